"""Streams and events: the only file that knows how collectives overlap with compute on a device.

The runtime says *what* must come before what; an implementation says how. Its vocabulary:

* ``current(work)``: work on the current stream, between the user's own operations, such as packing a buffer.
* ``launch(lane, collective, ...)``: a collective on a side stream, after the current stream's work so far and after
  other collectives if asked.
* ``wait(pending)``: the current stream goes on only when the collective is done.
* ``allocate`` and ``free``: a buffer's storage, in the order of the current stream.
* ``hand_over()``: the library is done for now and the user's operations follow on the current stream.

Every ordering is an :class:`Edge` with a name, so that a test can leave out one at a time.

On CUDA a lane is a side stream and waiting is an event wait; the host goes on. On CPU a lane is nothing (gloo runs the
operation in its own threads) and waiting blocks the host. ``tests/schedule`` has a third implementation that runs lanes
adversarially. The CUDA form has not been run on a GPU yet.
"""

from __future__ import annotations

import atexit
import time
import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from enum import Enum
from functools import cache

import torch
import torch.distributed as dist


class Lane(Enum):
    """What a side stream is for.

    The first two carry intra-node traffic that compute waits for soon, at high priority, as FSDP2's do; the replicate
    lanes carry inter-node traffic at default priority.
    """

    BROADCAST = "broadcast"
    REDUCE = "reduce"
    REPLICATE_REDUCE = "replicate reduce"
    PUBLISH = "publish"


class Edge(Enum):
    """One ordering between the current stream and the lanes: "this before that", and what it protects."""

    WEIGHTS_PACKED_BEFORE_BROADCAST = "the owner's buffer holds the weights before it is sent"
    BROADCAST_BEFORE_COMPUTE = "the weights have arrived before a module computes with them, or before they are freed"
    GRADS_PACKED_BEFORE_REDUCE = "the buffer holds this rank's gradients before it is summed"
    REDUCE_BEFORE_REPLICATE_REDUCE = "a row's sum is complete before rows are added up"
    REDUCE_BEFORE_USE = (
        "the sum is complete before the owner takes it as its gradient and the others free their buffers"
    )
    FLAGS_BEFORE_REDUCE = "the flags of this rank are written before they are combined"
    FLAGS_BEFORE_USE = "the flags of all ranks are combined before they are read"
    WEIGHTS_PACKED_BEFORE_PUBLISH = "the owner's buffer holds the new weights before it is sent"
    PUBLISH_BEFORE_USE = "the new weights have arrived before they are read or replaced"


class Pending(ABC):
    """A launched collective. Every one must be waited for once: gloo hangs later if a Work is dropped."""

    @abstractmethod
    def wait(self) -> None:
        """Order what the current stream (CUDA) or the host (CPU) does next after the collective."""


class Streams(ABC):
    """How work is ordered on one kind of device.

    Attributes:
        wait_blocks_host: whether :meth:`wait` keeps the host, and with it the user's operations, until it is over.
    """

    wait_blocks_host = False

    @abstractmethod
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
        """Run ``collective``, which reads and writes ``buffers``, on ``lane``.

        Args:
            name: says what is sent, for people.
            after_current: why the current stream's work so far comes before it; None if ``after`` says enough.
            after: other collectives that come before it, and why.
        """

    def current(self, work: Callable[[], object], buffers: Sequence[torch.Tensor] = ()) -> None:
        """Run ``work``, which reads or writes ``buffers``, on the current stream."""
        work()

    def wait(self, pending: Pending, edge: Edge) -> None:
        """Order the current stream after ``pending``."""
        pending.wait()

    def allocate(self, buffer: torch.Tensor) -> None:
        """Give a buffer its storage; its content is undefined."""
        buffer.untyped_storage().resize_(buffer.numel() * buffer.itemsize)

    def free(self, buffer: torch.Tensor) -> None:
        """Take a buffer's storage away."""
        buffer.untyped_storage().resize_(0)

    def hand_over(self) -> None:  # noqa: B027 - nothing to do where the current stream is the user's stream
        """The user's operations follow."""


class _PendingWorks(Pending):
    def __init__(self, works: list[dist.Work]) -> None:
        self._works = works

    def wait(self) -> None:
        # Wait for all of them even if one fails: an un-waited Work would hang the next collective.
        failure: Exception | None = None
        for work in self._works:
            try:
                work.wait()
            except Exception as error:  # noqa: BLE001 - the first one is raised below
                failure = failure or error
        self._works = []
        if failure is not None:
            raise failure

    @property
    def is_running(self) -> bool:
        """Whether any of them is still under way. Does not block."""
        return not all(work.is_completed() for work in self._works)


_EXIT_GRACE = 2.0
"""Seconds that the end of the process waits for collectives that nothing has waited for, such as a publication."""

_launched: weakref.WeakSet[_PendingWorks] = weakref.WeakSet()


@cache
def _let_gloo_finish_at_exit() -> None:
    """Let gloo's threads drop their tensors before Python is torn down.

    They take the GIL for that; a thread that does so too late aborts the process ("terminate called without an active
    exception", pytorch issue 190489).
    """

    def finish() -> None:
        until = time.monotonic() + _EXIT_GRACE  # a peer that is gone must not hold this process back
        while any(pending.is_running for pending in list(_launched)) and time.monotonic() < until:
            time.sleep(0.01)
        time.sleep(0.1)  # what is complete is dropped a moment later

    atexit.register(finish)


class CpuStreams(Streams):
    """gloo: operations run in the process group's threads, the host waits."""

    wait_blocks_host = True

    def __init__(self) -> None:
        _let_gloo_finish_at_exit()

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
        for pending, _ in after:
            pending.wait()  # gloo does not order two operations on one tensor
        launched = _PendingWorks(collective())
        _launched.add(launched)
        return launched


class _PendingEvent(Pending):
    def __init__(self, event: torch.cuda.Event) -> None:
        self.event = event

    def wait(self) -> None:
        torch.cuda.current_stream().wait_event(self.event)


class CudaStreams(Streams):
    """NCCL: one side stream per lane.

    Buffers are allocated and freed on the current stream. That is safe without ``record_stream``: a lane starts after
    the current stream's work so far, and the current stream waits for the lane's event before the buffer is freed.
    """

    def __init__(self, device: torch.device) -> None:
        urgent = (Lane.BROADCAST, Lane.REDUCE)
        self._lanes = {lane: torch.cuda.Stream(device=device, priority=-1 if lane in urgent else 0) for lane in Lane}

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
        stream = self._lanes[lane]
        if after_current is not None:
            stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for pending, _ in after:
                pending.wait()
            for work in collective():
                work.wait()  # orders NCCL's internal stream before this lane; the host does not block
            return _PendingEvent(stream.record_event())


_make_streams: Callable[[torch.device], Streams] | None = None


def make_streams(device: torch.device) -> Streams:
    """The implementation for ``device``, or the one that a test has put in its place."""
    if _make_streams is not None:
        return _make_streams(device)
    return CudaStreams(device) if device.type == "cuda" else CpuStreams()


def replace_streams(factory: Callable[[torch.device], Streams] | None) -> None:
    """Let models that are dedicated from now on use ``factory(device)``; None goes back to the device's own."""
    global _make_streams
    _make_streams = factory
