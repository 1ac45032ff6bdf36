"""Which slot owns which matrix: a balanced partition over names and shapes.

Pure Python on purpose: no tensors, no process group, so that a partition of a model of any size can be
computed and looked at on a laptop. The optimizer step is as long as the busiest owner's, hence the cost of a
matrix is what its update costs (Newton-Schulz FLOPs), not how many elements it has.
"""

from __future__ import annotations

import hashlib
import heapq
import json
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from types import MappingProxyType

_TABLE_ROWS = 16


@dataclass(frozen=True)
class MatrixSpec:
    """One matrix to own: its name, its shape (at least 2-D) and the layer whose matrices travel together."""

    fqn: str
    shape: tuple[int, ...]
    layer: str

    def __post_init__(self) -> None:
        # A torch.Size is a tuple too, but it would drag torch into pickles and into the printed form.
        object.__setattr__(self, "shape", tuple(int(size) for size in self.shape))
        if len(self.shape) < 2:
            raise ValueError(
                f"{self.fqn!r} has shape {self.shape}: only parameters with two or more dimensions can be "
                "owned as a matrix. Leave it out of the predicate, so that AdamW updates it."
            )


def newton_schulz_flops(shape: tuple[int, ...], steps: int = 5) -> int:
    """FLOPs of `steps` quintic Newton-Schulz iterations on a matrix of this shape.

    With m <= n one iteration is X X^T (2 m^2 n), its square (2 m^3) and one product with X (2 m^2 n). More
    than two dimensions count as the matrix [d0, product of the rest], the form in which Muon updates them.
    Source: Jordan et al., "Muon: An optimizer for hidden layers in neural networks", 2024.
    """
    rows, columns = shape[0], 1
    for size in shape[1:]:
        columns *= size
    m, n = min(rows, columns), max(rows, columns)
    return steps * (4 * m * m * n + 2 * m**3)


@dataclass(frozen=True)
class Assignment:
    """A partition that knows its own quality. Build it with `compute_balanced_assignment`.

    `specs` are sorted by name and `slots[i]` owns `specs[i]`, so equal partitions are equal objects whatever
    the order of the input was.
    """

    specs: tuple[MatrixSpec, ...]
    slots: tuple[int, ...]
    num_slots: int
    ns_steps: int

    def __reduce__(self) -> tuple[object, ...]:
        # The cached read-only mapping cannot be pickled or copied; the four fields rebuild everything.
        return Assignment, (self.specs, self.slots, self.num_slots, self.ns_steps)

    @cached_property
    def owners(self) -> Mapping[str, int]:
        """Read-only map from the name of a matrix to the slot that owns it."""
        return MappingProxyType({spec.fqn: slot for spec, slot in zip(self.specs, self.slots, strict=True)})

    @cached_property
    def costs(self) -> tuple[int, ...]:
        """FLOPs of each matrix, in the order of `specs`."""
        return tuple(newton_schulz_flops(spec.shape, self.ns_steps) for spec in self.specs)

    @cached_property
    def loads(self) -> tuple[int, ...]:
        """FLOPs that each slot computes in one optimizer step."""
        loads = [0] * self.num_slots
        for cost, slot in zip(self.costs, self.slots, strict=True):
            loads[slot] += cost
        return tuple(loads)

    @property
    def lower_bound(self) -> float:
        """FLOPs below which no partition can bring the busiest slot: max(mean load, largest matrix)."""
        return max(sum(self.costs) / self.num_slots, float(max(self.costs, default=0)))

    @property
    def ratio(self) -> float:
        """Busiest slot over the lower bound: 1.0 proves it optimal (an empty partition has it too)."""
        bound = self.lower_bound
        return max(self.loads) / bound if bound else 1.0

    @property
    def idle_slots(self) -> tuple[int, ...]:
        """The slots that own no matrix."""
        busy = set(self.slots)
        return tuple(slot for slot in range(self.num_slots) if slot not in busy)

    def digest(self) -> str:
        """Hex SHA-256 of the whole assignment, equal on every Python and platform for equal assignments."""
        rows = [[s.fqn, s.shape, s.layer, slot] for s, slot in zip(self.specs, self.slots, strict=True)]
        text = json.dumps([self.num_slots, self.ns_steps, rows], separators=(",", ":"))
        return hashlib.sha256(text.encode()).hexdigest()

    def __str__(self) -> str:
        matrices = [0] * self.num_slots
        for slot in self.slots:
            matrices[slot] += 1
        lines = [
            f"{len(self.specs)} matrices on {self.num_slots} slots ({len(self.idle_slots)} idle), "
            f"busiest / lower bound = {self.ratio:.3f}",
            f"{'slot':>6} {'matrices':>9} {'GFLOPs':>14} {'of bound':>9}",
        ]
        for slot in range(min(self.num_slots, _TABLE_ROWS)):
            share = self.loads[slot] / self.lower_bound if self.lower_bound else 0.0
            lines.append(f"{slot:>6} {matrices[slot]:>9} {self.loads[slot] / 1e9:>14,.3f} {share:>9.3f}")
        if self.num_slots > _TABLE_ROWS:
            lines.append(f"{'...':>6} {self.num_slots - _TABLE_ROWS} more slots")
        return "\n".join(lines)


def compute_balanced_assignment(
    specs: Iterable[MatrixSpec], num_slots: int, *, shard_size: int | None = None, ns_steps: int = 5
) -> Assignment:
    """Give every matrix one owner slot; local, deterministic, independent of the order of `specs`.

    Longest processing time first (Graham, 1969): the costliest matrix goes to the least loaded slot. One rule
    comes before the load: a slot that has no matrix of the same layer is preferred, so that the broadcasts of
    a layer leave from as many ranks as possible. A layer of k matrices therefore sits on exactly min(k,
    num_slots) slots; once it is on all of them, the load alone decides. Ties go to the lower slot index.

    With `shard_size` the slots are a mesh: slot `k` is shard rank `k % shard_size` of row `k // shard_size`. Slots of
    one shard rank share the broadcasts of every row, so a layer is spread over shard ranks instead of slots, and over
    rows where the load leaves the choice.

    Raises ValueError for num_slots < 1, ns_steps < 1 and for a name that occurs twice.
    """
    if num_slots < 1:
        raise ValueError(f"num_slots must be at least 1, got {num_slots}.")
    if ns_steps < 1:
        raise ValueError(f"ns_steps must be at least 1, got {ns_steps}: without a step nothing has a cost.")
    by_name = tuple(sorted(specs, key=lambda spec: spec.fqn))
    for first, second in pairwise(by_name):
        if first.fqn == second.fqn:
            raise ValueError(f"{first.fqn!r} occurs twice. Pass it once: tied weights have one owner.")

    columns = num_slots if shard_size is None else shard_size
    if num_slots % columns:
        raise ValueError(f"num_slots={num_slots} is no multiple of shard_size={columns}.")
    cost = {spec.fqn: newton_schulz_flops(spec.shape, ns_steps) for spec in by_name}
    rows = num_slots // columns
    # Equal loads go column by column, so that the slots of all rows are next to one another.
    heap = [(0, column, row) for column in range(columns) for row in range(rows)]
    layer_places: dict[str, list[tuple[int, int]]] = {}
    owner: dict[str, int] = {}
    for spec in sorted(by_name, key=lambda spec: (-cost[spec.fqn], spec.fqn)):
        used = layer_places.setdefault(spec.layer, [])
        load, column, row = _pop_least(heap, used, columns, rows)
        heapq.heappush(heap, (load + cost[spec.fqn], column, row))
        used.append((column, row))
        owner[spec.fqn] = row * columns + column
    return Assignment(by_name, tuple(owner[spec.fqn] for spec in by_name), num_slots, ns_steps)


def _pop_least(
    heap: list[tuple[int, int, int]], used: list[tuple[int, int]], columns: int, rows: int
) -> tuple[int, int, int]:
    """Take the least loaded (load, column, row) out of the heap, off the columns that the layer uses if it leaves any.

    Among equal loads the row that the layer uses least wins: its new weights then leave from all rows at once.
    """
    used_columns = {column for column, _ in used}
    avoid = used_columns if len(used_columns) < columns else set()
    uses = Counter(row for _, row in used)
    passed: list[tuple[int, int, int]] = []
    candidates: list[tuple[int, int, int]] = []
    while heap and len(candidates) < rows and (not candidates or heap[0][0] == candidates[0][0]):
        entry = heapq.heappop(heap)
        (passed if entry[1] in avoid else candidates).append(entry)
    least = min(candidates, key=lambda entry: (uses[entry[2]], entry[1], entry[2]))
    for entry in (*passed, *candidates):
        if entry is not least:
            heapq.heappush(heap, entry)
    return least
