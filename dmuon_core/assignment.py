"""The result of a partition: who owns what, and how good that is. Pure Python, like the partition itself."""

from __future__ import annotations

import hashlib
import json
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from statistics import median
from types import MappingProxyType

from dmuon_core.bounds import proven_bound

_TABLE_ROWS = 16


@dataclass(frozen=True)
class MatrixSpec:
    """One parameter to own: its name, its shape (at least 2-D) and the layer whose matrices travel together.

    Args:
        fqn: name of the parameter.
        shape: its shape; more than two dimensions are updated as the matrix [d0, product of the rest].
        layer: name of the module that unshards it with its other matrices.
        parts: shapes of the matrices that are orthogonalized one by one, for a fused projection or stacked experts;
            None for the one matrix of `shape`. Together they have as many elements as `shape`.
        itemsize: bytes of one element.

    Raises ValueError for fewer than two dimensions and for parts that do not add up.
    """

    fqn: str
    shape: tuple[int, ...]
    layer: str
    parts: tuple[tuple[int, int], ...] | None = None
    itemsize: int = 4

    def __post_init__(self) -> None:
        # A torch.Size is a tuple too, but it would drag torch into pickles and into the printed form.
        shape = tuple(int(size) for size in self.shape)
        object.__setattr__(self, "shape", shape)
        if len(shape) < 2:
            raise ValueError(
                f"{self.fqn!r} has shape {shape}: only parameters with two or more dimensions can be "
                "owned as a matrix. Leave it out of the predicate, so that AdamW updates it."
            )
        elements = 1
        for size in shape:
            elements *= size
        if self.parts is None:
            rest = 1
            for size in shape[1:]:
                rest *= size
            object.__setattr__(self, "parts", ((shape[0], rest),))
            return
        parts = tuple((int(rows), int(columns)) for rows, columns in self.parts)
        object.__setattr__(self, "parts", parts)
        if sum(rows * columns for rows, columns in parts) != elements:
            raise ValueError(f"the parts {parts} of {self.fqn!r} do not add up to its shape {shape}.")

    @property
    def numel(self) -> int:
        return sum(rows * columns for rows, columns in self.parts or ())

    @property
    def nbytes(self) -> int:
        return self.numel * self.itemsize


@dataclass(frozen=True)
class Assignment:
    """A partition that knows its own quality. Build it with `compute_balanced_assignment`.

    `specs` are sorted by name, `slots[i]` owns `specs[i]` and spends `costs[i]` FLOPs on it, so equal partitions are
    equal objects whatever the order of the input was. Slot `k` is shard rank (column) `k % shard_size` of row
    `k // shard_size`.
    """

    specs: tuple[MatrixSpec, ...]
    slots: tuple[int, ...]
    costs: tuple[int, ...]
    num_slots: int
    shard_size: int

    def __reduce__(self) -> tuple[object, ...]:
        # The cached read-only mappings cannot be pickled or copied; the fields rebuild everything.
        return Assignment, (self.specs, self.slots, self.costs, self.num_slots, self.shard_size)

    @cached_property
    def owners(self) -> Mapping[str, int]:
        """Read-only map from the name of a matrix to the slot that owns it."""
        return MappingProxyType({spec.fqn: slot for spec, slot in zip(self.specs, self.slots, strict=True)})

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

    @cached_property
    def proven_bound(self) -> int:
        """FLOPs that the busiest slot has in every partition: at least the lower bound, more where whole matrices leave
        gaps. Equal to the busiest slot's load if that is provably optimal; see `dmuon_core.bounds.proven_bound`.
        """
        return proven_bound(self.costs, self.num_slots, max(self.loads))

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

    @cached_property
    def owned_bytes(self) -> tuple[int, ...]:
        """Bytes of the matrices that each slot owns: its momentum, and what it updates."""
        owned = [0] * self.num_slots
        for spec, slot in zip(self.specs, self.slots, strict=True):
            owned[slot] += spec.nbytes
        return tuple(owned)

    @property
    def column_bytes(self) -> tuple[int, ...]:
        """Bytes of the weights that every rank of a shard column keeps: what the slots of that column own."""
        owned = self.owned_bytes
        return tuple(sum(owned[column :: self.shard_size]) for column in range(self.shard_size))

    @cached_property
    def root_bytes(self) -> Mapping[str, int]:
        """Read-only map from a layer to the most bytes of it that one shard rank broadcasts."""
        sums: dict[str, dict[int, int]] = {}
        for spec, slot in zip(self.specs, self.slots, strict=True):
            columns = sums.setdefault(spec.layer, defaultdict(int))
            columns[slot % self.shard_size] += spec.nbytes
        return MappingProxyType({layer: max(columns.values()) for layer, columns in sums.items()})

    @cached_property
    def root_balance(self) -> Mapping[str, float]:
        """Read-only map from a layer to its `root_bytes` over their ideal, max(layer / shard_size, largest matrix)."""
        total: dict[str, int] = defaultdict(int)
        largest: dict[str, int] = defaultdict(int)
        for spec in self.specs:
            total[spec.layer] += spec.nbytes
            largest[spec.layer] = max(largest[spec.layer], spec.nbytes)
        ideal = {layer: max(total[layer] / self.shard_size, largest[layer]) for layer in total}
        balance = {layer: root / ideal[layer] if ideal[layer] else 1.0 for layer, root in self.root_bytes.items()}
        return MappingProxyType(balance)

    def digest(self) -> str:
        """Hex SHA-256 of the whole assignment, equal on every Python and platform for equal assignments."""
        rows = [
            [spec.fqn, spec.shape, spec.layer, spec.parts, spec.itemsize, slot, cost]
            for spec, slot, cost in zip(self.specs, self.slots, self.costs, strict=True)
        ]
        text = json.dumps([self.num_slots, self.shard_size, rows], separators=(",", ":"))
        return hashlib.sha256(text.encode()).hexdigest()

    def __str__(self) -> str:
        matrices = [0] * self.num_slots
        for slot in self.slots:
            matrices[slot] += 1
        roots = self.root_balance.values()
        columns = self.column_bytes
        size, unit = _unit(max(self.owned_bytes), 1024, ("B", "KiB", "MiB", "GiB"))
        work, flops = _unit(max(self.loads), 1000, ("FLOPs", "kFLOPs", "MFLOPs", "GFLOPs", "TFLOPs"))
        lines = [
            f"{len(self.specs)} matrices on {self.num_slots} slots ({len(self.idle_slots)} idle), "
            f"busiest / lower bound = {self.ratio:.3f}",
            f"root bytes of a layer / ideal = {median(roots) if roots else 1.0:.3f} (median), "
            f"{max(roots, default=1.0):.3f} (worst of {len(roots)} layers); "
            f"{min(columns) / size:,.1f} to {max(columns) / size:,.1f} {unit} of weights on a shard rank",
            f"{'slot':>6} {'matrices':>9} {unit:>11} {flops:>14} {'of bound':>9}",
        ]
        for slot in range(min(self.num_slots, _TABLE_ROWS)):
            share = self.loads[slot] / self.lower_bound if self.lower_bound else 0.0
            lines.append(
                f"{slot:>6} {matrices[slot]:>9} {self.owned_bytes[slot] / size:>11,.1f} "
                f"{self.loads[slot] / work:>14,.3f} {share:>9.3f}"
            )
        if self.num_slots > _TABLE_ROWS:
            lines.append(f"{'...':>6} {self.num_slots - _TABLE_ROWS} more slots")
        return "\n".join(lines)


def _unit(largest: int, step: int, names: tuple[str, ...]) -> tuple[int, str]:
    """The unit in which the largest value is at least 1, as (its size, its name)."""
    size, index = 1, 0
    while largest >= size * step and index < len(names) - 1:
        size, index = size * step, index + 1
    return size, names[index]
