"""A model's shapes on a mesh: who owns what, and what travels together, as the runtime will have it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property, lru_cache

import torch

from dmuon_core.assignment import Assignment, MatrixSpec
from dmuon_core.comm import TAG_NUMEL
from dmuon_core.optim.cost import NewtonSchulzFlops
from dmuon_core.partition import compute_balanced_assignment
from dmuon_core.planning.shapes import ModelShapes, Weight


@dataclass(frozen=True)
class Layout:
    """G shard ranks x R replicas, and whether weights are freed between forward and backward (Z3) or kept (Z2).

    Attributes:
        param_dtype, reduce_dtype: as in ``MixedPrecisionPolicy``; None for its defaults.
        flops: of an update, as in `dedicate_params`.
    """

    shard: int
    replicate: int = 1
    zero3: bool = True
    param_dtype: torch.dtype | None = None
    reduce_dtype: torch.dtype | None = None
    flops: NewtonSchulzFlops = field(default_factory=NewtonSchulzFlops)

    def __post_init__(self) -> None:
        if self.shard < 1 or self.replicate < 1:
            raise ValueError(f"a mesh has at least one rank each way, got {self.replicate} x {self.shard}")

    @property
    def ranks(self) -> int:
        return self.shard * self.replicate

    @property
    def mode(self) -> str:
        return "Z3" if self.zero3 else "Z2"

    def __str__(self) -> str:
        rows = f" x {self.replicate} replicas" if self.replicate > 1 else ""
        return f"{self.mode}, {self.shard} shard rank{'s' if self.shard > 1 else ''}{rows}"


@dataclass(frozen=True)
class Bucket:
    """What one collective carries: owned matrices with one home and dtype. ``row`` is 0 where it does not matter."""

    column: int
    row: int
    numel: int
    itemsize: int

    @property
    def nbytes(self) -> int:
        """Bytes of the packed buffer, its tag included."""
        return (self.numel + TAG_NUMEL) * self.itemsize


@dataclass(frozen=True)
class Placed:
    """A model on a mesh. Rank ``r`` is shard rank (column) ``r % shard`` of replica (row) ``r // shard``."""

    shapes: ModelShapes
    layout: Layout
    assignment: Assignment

    @cached_property
    def specs(self) -> dict[str, MatrixSpec]:
        """What the partition knows of each owned weight."""
        return {spec.fqn: spec for spec in self.assignment.specs}

    def home(self, fqn: str) -> tuple[int, int]:
        """(row, column) of the owner."""
        row, column = divmod(self.assignment.owners[fqn], self.layout.shard)
        return row, column

    def compute_dtype(self, weight: Weight) -> torch.dtype:
        return self.layout.param_dtype or weight.dtype

    def reduce_dtype(self, weight: Weight) -> torch.dtype:
        """Of the gradient on its way: of owned weights at least float32, of FSDP2's what it computes in."""
        if self.layout.reduce_dtype is not None:
            return self.layout.reduce_dtype
        computed = self.compute_dtype(weight)
        return torch.promote_types(computed, torch.float32) if weight.owned else computed

    @cached_property
    def owned(self) -> dict[str, list[Weight]]:
        """The owned weights of each unit that has some, in the order of the forward."""
        return self._of_units(owned=True)

    @cached_property
    def sharded(self) -> dict[str, list[Weight]]:
        """The weights of each unit that FSDP2 shards, likewise."""
        return self._of_units(owned=False)

    def _of_units(self, owned: bool) -> dict[str, list[Weight]]:
        found: dict[str, list[Weight]] = {unit: [] for unit in self.shapes.units}
        for weight in self.shapes.weights:
            if weight.owned is owned:
                found[weight.unit].append(weight)
        return {unit: weights for unit, weights in found.items() if weights}

    @cached_property
    def broadcasts(self) -> dict[str, list[Bucket]]:
        """What an unshard of a unit sends in every row: one buffer for each owner column and dtype."""
        return self._buckets(lambda w: (self.home(w.fqn)[1], 0, self.compute_dtype(w)))

    @cached_property
    def reduces(self) -> dict[str, list[Bucket]]:
        """What a backward sends in every row, and each buffer then in its owners' column: one for each owner."""
        return self._buckets(lambda w: (*self.home(w.fqn)[::-1], self.reduce_dtype(w)), trainable=True)

    @cached_property
    def publications(self) -> dict[str, list[Bucket]]:
        """The weights at rest, one buffer for each owner; each is sent in its owner's column."""
        return self._buckets(lambda w: (*self.home(w.fqn)[::-1], w.rest_dtype))

    def _buckets(
        self, key: Callable[[Weight], tuple[int, int, torch.dtype]], trainable: bool = False
    ) -> dict[str, list[Bucket]]:
        found: dict[str, list[Bucket]] = {}
        for unit, weights in self.owned.items():
            numel: dict[tuple[int, int, torch.dtype], int] = {}
            for weight in weights:
                if weight.trainable or not trainable:
                    numel[key(weight)] = numel.get(key(weight), 0) + weight.numel
            found[unit] = [Bucket(column, row, count, dtype.itemsize) for (column, row, dtype), count in numel.items()]
        return found

    def padded(self, weight: Weight) -> int:
        """Elements that FSDP2 keeps of a sharded weight on every rank: as many rows as the largest shard."""
        rows = weight.shape[0]
        return -(-rows // self.layout.shard) * (weight.numel // rows if rows else 0)

    def local(self, weight: Weight, column: int) -> int:
        """Elements of a sharded weight that are this shard rank's; its Adam state has as many."""
        rows = weight.shape[0]
        chunk = -(-rows // self.layout.shard)
        mine = max(0, min(chunk, rows - chunk * column))
        return mine * (weight.numel // rows if rows else 0)


def place(shapes: ModelShapes, layout: Layout, max_owned_bytes: int | None = None) -> Placed:
    """Give every matrix its owner, as `dedicate_params` does on such a mesh. Local.

    Raises:
        ValueError: no partition keeps to ``max_owned_bytes``; a parameter that FSDP2 cannot shard.
    """
    for weight in shapes.weights:
        if not weight.owned and not weight.shape:
            raise ValueError(f"'{weight.fqn}' is a scalar, which FSDP2 does not shard: give it the shape [1]")
    mesh = (layout.shard, layout.replicate)
    return Placed(shapes, layout, _assign(shapes.matrices, *mesh, layout.flops, max_owned_bytes))


@lru_cache(maxsize=64)
def _assign(
    matrices: tuple[MatrixSpec, ...], shard: int, replicate: int, flops: NewtonSchulzFlops, max_owned_bytes: int | None
) -> Assignment:
    return compute_balanced_assignment(
        matrices, shard * replicate, shard_size=shard, flops=flops, max_owned_bytes=max_owned_bytes
    )
