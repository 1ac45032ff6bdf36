"""A simulated device: lanes that run adversarially, over CPU tensors and real gloo collectives.

On a device the host only queues work: on the current stream, which runs it in order, and on lanes, which run beside it.
Here the same queues exist as closures, and a policy decides when a lane's work runs. Two things are as on a device:

* *The current stream.* The user's own operations run on the host at once, so whatever the library has queued before
  them must have run: `hand_over` runs it. Between two hand-overs the library's own work is queued in program order.
* *Lanes.* A lane runs its collectives in the order of their launch, each after what its edges say and nothing else. A
  collective that nothing waits for may run as late as the end of training; one that waits for nothing at once.

Buffers hold NaN after `allocate` and after `free` (0xFF in each byte), and `free` takes the storage away at its place
in the order of the current stream: work that comes too late finds its buffer gone and says so.

*Deadlocks.* A collective blocks its rank until all of its group take part, so ranks must agree on an order although
they do not run the same calls: a rank has replicate reduces and publications only if its column owns something, and
packs only what it owns. The order is the same on all ranks because (1) collectives of a row are run by choice only at
calls that every rank makes, with draws that every rank makes, after the current stream has come equally far; (2) those
of a column only at calls that the column makes, with its own draws, and never if that would force one of a row.
"""

from __future__ import annotations

import enum
import random
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch.utils.weak import WeakIdKeyDictionary

from dmuon_core.streams import Edge, Lane, Pending, Streams

ROW_LANES = (Lane.BROADCAST, Lane.REDUCE)
CURRENT = "current"


class Policy(enum.Enum):
    """When a lane runs what nothing forces it to run."""

    EARLY = "early"  # at launch, in front of queued work of the current stream
    LATE = "late"  # never, until something waits for it or training ends
    RANDOM = "random"  # at any later call, by a seed


class Implicit(enum.Enum):
    """An ordering that is no `Edge`, because on a device it costs no wait."""

    FREED_IN_ORDER = "a buffer is given back when the current stream gets there, not when the host does"
    HANDED_OVER = "the user's operations follow the library's on the current stream"


Removal = Edge | Implicit | tuple[Edge, str] | None
"""An ordering to leave out; with a name, only where the function of that name asks for it, see `_site`."""


@dataclass(frozen=True)
class Schedule:
    """A policy and, for `Policy.RANDOM`, its seed."""

    policy: Policy
    seed: int = 0

    def __str__(self) -> str:
        return f"random {self.seed}" if self.policy is Policy.RANDOM else self.policy.value


@dataclass(eq=False)
class Item:
    """Work in a queue, and what must have run before it."""

    number: int
    label: str
    lane: Lane | None  # None: the current stream
    work: Callable[[], object]
    uses: list[tuple[torch.Tensor, int]]  # buffers, and how often each had been freed when the work was queued
    needs: list[Item]
    done: bool = False

    @property
    def place(self) -> str:
        return CURRENT if self.lane is None else self.lane.value


@dataclass(frozen=True)
class Record:
    """One piece of work of a recorded run, in the order in which the runtime queued it (`number`)."""

    number: int
    label: str
    place: str  # `CURRENT`, or a lane's value
    needs: tuple[int, ...]
    numel: int


class UseAfterFree(RuntimeError):
    """Work came to a buffer whose storage had been freed."""


@dataclass
class _Memory:
    freed_on_host: int = 0  # calls of free
    freed: int = 0  # those that the current stream has come to


class _PendingItem(Pending):
    def __init__(self, item: Item) -> None:
        self.item = item

    def wait(self) -> None:
        raise AssertionError("waits go through Streams.wait")


@dataclass
class _Draws:
    """Random decisions of a group of ranks that all make them."""

    generator: random.Random = field(default_factory=random.Random)
    rate: float = 0.5

    def seed(self, *what: object) -> None:
        self.generator.seed(repr(what))
        self.rate = self.generator.choice((0.1, 0.3, 0.5, 0.8))

    def yes(self) -> bool:
        return self.generator.random() < self.rate


class SimulatedStreams(Streams):
    """See the module. `without` leaves out one ordering; `schedule` may be changed by `restart`."""

    def __init__(self, without: Removal = None) -> None:
        self.without = without
        self.records: list[Record] | None = None
        self.waited_at: set[tuple[Edge, str]] = set()
        self._count = 0
        self._current: list[Item] = []  # not run yet
        self._last_current: Item | None = None
        self._lanes: dict[Lane, list[Item]] = {lane: [] for lane in Lane}
        self._last_in_lane: dict[Lane, Item | None] = dict.fromkeys(Lane)
        self._row_wait: Item | None = None  # the last wait for a row in the current stream
        self._memory: WeakIdKeyDictionary = WeakIdKeyDictionary()
        self._row_draws, self._column_draws = _Draws(), _Draws()
        self.restart(Schedule(Policy.EARLY))

    def restart(self, schedule: Schedule) -> None:
        """Take another schedule; nothing may be queued."""
        assert self.is_idle, "restart in the middle of a run"
        self.schedule = schedule
        self._row_draws.seed(schedule.seed, "row")
        self._column_draws.seed(schedule.seed, "column")

    def record(self) -> list[Record]:
        """Start recording; the list grows as work is queued."""
        self.records = []
        return self.records

    def note(self, label: str) -> None:
        """Record that the user's operations `label` follow on the current stream."""
        self._queue(label, lambda: None, [], [])
        self._run_current()

    @property
    def is_handed_over(self) -> bool:
        """Whether the current stream has nothing left to do, as it must be when the user's operations run."""
        return not self._current

    @property
    def is_idle(self) -> bool:
        return self.is_handed_over and not any(self._lanes.values())

    def flush(self) -> None:
        """End of training: run whatever nothing has forced, collectives of rows first, each in launch order."""
        self._run_current()
        for lanes in (ROW_LANES, tuple(lane for lane in Lane if lane not in ROW_LANES)):
            for item in sorted((i for lane in lanes for i in self._lanes[lane]), key=lambda i: i.number):
                self._run(item)

    # Streams

    def launch(
        self,
        lane: Lane,
        name: str,
        collective: Callable[[], list[dist.Work]],
        buffers: Sequence[torch.Tensor],
        *,
        after_current: Edge | None,
        after: Sequence[tuple[Pending, Edge]] = (),
    ) -> Pending:
        def run() -> None:
            for work in collective():
                work.wait()

        needs = [self._last_in_lane[lane]]
        if after_current is not None and not self._left_out(after_current):
            needs.append(self._last_current)
        for pending, edge in after:
            assert isinstance(pending, _PendingItem)
            if not self._left_out(edge):
                needs.append(pending.item)
        item = self._item(name, lane, run, buffers, needs)
        self._last_in_lane[lane] = item
        self._lanes[lane].append(item)
        if self.schedule.policy is Policy.EARLY:
            self._run(item)
        self._choose(every_rank_is_here=lane in ROW_LANES, reached=self._row_wait)
        return _PendingItem(item)

    def current(self, work: Callable[[], object], buffers: Sequence[torch.Tensor] = ()) -> None:
        self._queue(getattr(work, "func", work).__name__.strip("_"), work, buffers, [])

    def wait(self, pending: Pending, edge: Edge) -> None:
        assert isinstance(pending, _PendingItem)
        is_row = edge is not Edge.PUBLISH_BEFORE_USE  # GradReduction.wait: for the column, or else for the row
        self.waited_at.add((edge, _site()))
        earlier = self._row_wait
        if not self._left_out(edge):
            item = self._queue(f"wait for {pending.item.label}", lambda: None, [], [pending.item])
            if is_row:
                self._row_wait = item
        self._choose(every_rank_is_here=is_row, reached=earlier)

    def allocate(self, buffer: torch.Tensor) -> None:
        memory = self._memory_of(buffer)

        def give() -> None:
            buffer.untyped_storage().resize_(buffer.numel() * buffer.itemsize)
            buffer.untyped_storage().fill_(0xFF)

        if memory.freed < memory.freed_on_host:
            self._queue("allocate", give, [], [])  # its earlier life is not over
        else:
            give()

    def free(self, buffer: torch.Tensor) -> None:
        memory = self._memory_of(buffer)

        def take() -> None:
            memory.freed += 1
            buffer.untyped_storage().fill_(0xFF)
            buffer.untyped_storage().resize_(0)

        if self._left_out(Implicit.FREED_IN_ORDER):
            memory.freed_on_host += 1
            take()
        else:
            self._queue("free", take, [buffer], [])
            memory.freed_on_host += 1

    def hand_over(self) -> None:
        if not self._left_out(Implicit.HANDED_OVER):
            self._run_current()

    # Queues

    def _item(
        self,
        label: str,
        lane: Lane | None,
        work: Callable[[], object],
        buffers: Sequence[torch.Tensor],
        needs: Sequence[Item | None],
    ) -> Item:
        wanted = [item for item in needs if item is not None]
        uses = [(buffer, self._memory_of(buffer).freed_on_host) for buffer in buffers]
        item = Item(self._count, label, lane, work, uses, [item for item in wanted if not item.done])
        self._count += 1
        if self.records is not None:
            numbers = tuple(item.number for item in wanted)
            self.records.append(Record(item.number, label, item.place, numbers, sum(b.numel() for b in buffers)))
        return item

    def _queue(
        self, label: str, work: Callable[[], object], buffers: Sequence[torch.Tensor], needs: Sequence[Item]
    ) -> Item:
        item = self._item(label, None, work, buffers, [self._last_current, *needs])
        self._current.append(item)
        self._last_current = item
        return item

    def _run_current(self) -> None:
        while self._current:
            self._run(self._current[0])

    def _run(self, item: Item) -> None:
        if item.done:
            return
        for needed in item.needs:
            self._run(needed)
        item.needs = []
        item.done = True
        queue = self._current if item.lane is None else self._lanes[item.lane]
        queue.remove(item)
        for buffer, freed in item.uses:
            if self._memory_of(buffer).freed > freed or buffer.untyped_storage().nbytes() == 0 < buffer.numel():
                raise UseAfterFree(f"use of a freed buffer on lane '{item.place}': {item.label}")
        item.work()

    def _memory_of(self, buffer: torch.Tensor) -> _Memory:
        if buffer not in self._memory:
            self._memory[buffer] = _Memory()
        return self._memory[buffer]

    # Policy

    def _choose(self, *, every_rank_is_here: bool, reached: Item | None) -> None:
        """Run by chance what nothing forces; where every rank is, after the current stream has `reached` that."""
        if self.schedule.policy is not Policy.RANDOM:
            return
        if every_rank_is_here:
            if reached is not None:
                self._run(reached)
            while self._row_draws.yes():
                lane = self._row_draws.generator.choice(ROW_LANES)
                if self._lanes[lane]:
                    self._run(self._lanes[lane][0])
        for lane in Lane:
            if lane not in ROW_LANES and self._column_draws.yes() and self._lanes[lane]:
                head = self._lanes[lane][0]
                if not any(item.lane in ROW_LANES for item in _unmet(head)):
                    self._run(head)

    def _left_out(self, ordering: Edge | Implicit) -> bool:
        if isinstance(self.without, tuple):
            return self.without == (ordering, _site())
        return ordering is self.without


def _unmet(item: Item) -> Iterator[Item]:
    """What would have to run before `item`, each once."""
    seen, stack = {item}, [item]
    while stack:
        for needed in stack.pop().needs:
            if not needed.done and needed not in seen:
                seen.add(needed)
                stack.append(needed)
                yield needed


def _site() -> str:
    """The function for whose sake the runtime came here: the caller of the one that called into this file."""
    frame = sys._getframe(1)
    while frame.f_code.co_filename == __file__ and frame.f_back is not None:
        frame = frame.f_back
    return frame.f_back.f_code.co_name if frame.f_back is not None else ""
