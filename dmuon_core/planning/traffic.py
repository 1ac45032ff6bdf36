"""Which collectives one rank takes part in during a training step, and the bytes of their buffers."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from enum import Enum

from dmuon_core.planning.layout import Bucket, Placed
from dmuon_core.planning.shapes import ROOT


class Kind(Enum):
    """What a collective does. The first five are this library's, the last three FSDP2's."""

    BROADCAST = "broadcast of owned weights"
    REDUCE = "reduce of their gradients"
    REPLICATE_REDUCE = "reduce over replicas"
    PUBLISH = "publish of new weights"
    FLAGS = "which have a gradient"
    ALL_GATHER = "FSDP2 all-gather"
    REDUCE_SCATTER = "FSDP2 reduce-scatter"
    ALL_REDUCE = "FSDP2 all-reduce over replicas"


class Axis(Enum):
    """Between which ranks: along a row of the mesh, along a column, all."""

    SHARD = "shard"
    REPLICATE = "replicate"
    MESH = "mesh"


class Phase(Enum):
    FORWARD = "forward"
    BACKWARD = "backward"
    STEP = "step"


_AXES = {Kind.REPLICATE_REDUCE: Axis.REPLICATE, Kind.PUBLISH: Axis.REPLICATE, Kind.ALL_REDUCE: Axis.REPLICATE,
         Kind.FLAGS: Axis.MESH}  # fmt: skip


@dataclass(frozen=True)
class Transfer:
    """Collectives of one kind that are launched together for one unit.

    Attributes:
        buffers: how many collectives.
        nbytes: bytes of their buffers, each whole: what an all-gather ends with, what a reduce-scatter starts from.
    """

    kind: Kind
    phase: Phase
    unit: str
    buffers: int
    nbytes: int

    @property
    def axis(self) -> Axis:
        return _AXES.get(self.kind, Axis.SHARD)


def transfers(placed: Placed, column: int) -> list[Transfer]:
    """The collectives of one step in the steady state, on every rank of shard column ``column``. Pure.

    One forward and one backward, then the optimizer's step. In Z3 an owned unit is broadcast in both, but for those
    that keep their buffers: the one whose backward comes first, and what is around it, such as the root. FSDP2 gathers
    every unit but the root again. Where frozen blocks lead, backward fetches one of them in advance and comes to none.
    With G = 1 FSDP2 has nothing to send, this library still goes through its groups of one. (The first step also has
    what sets up the model.)
    """
    return [*common_transfers(placed), *column_transfers(placed)[column]]


def common_transfers(placed: Placed) -> list[Transfer]:
    """Those of `transfers` that are the same in every column: all but what the columns' owners exchange. Pure."""
    found = []
    units = list(placed.owned)
    last = units[-1] if units else ROOT  # the last whose forward starts
    again = _fetched_in_backward(placed, units)
    for unit in units:
        sent = placed.broadcasts[unit]
        found.append(_of(Kind.BROADCAST, Phase.FORWARD, unit, sent))
        kept = unit in (ROOT, last) or last.startswith(f"{unit}.")
        if placed.layout.zero3 and unit in again and not kept:
            found.append(_of(Kind.BROADCAST, Phase.BACKWARD, unit, sent))
        found.append(_of(Kind.REDUCE, Phase.BACKWARD, unit, placed.reduces[unit]))
    trainable = sum(w.trainable for weights in placed.owned.values() for w in weights)
    if trainable:
        found.append(Transfer(Kind.FLAGS, Phase.BACKWARD, ROOT, 1, trainable))
    return [transfer for transfer in [*found, *_of_fsdp2(placed)] if transfer.buffers]


def column_transfers(placed: Placed) -> list[list[Transfer]]:
    """For each column what its owners exchange with their replicas; as many entries as the layout has columns. Pure."""
    found: list[list[Transfer]] = [[] for _ in range(placed.layout.shard)]
    if placed.layout.replicate > 1:
        kinds = (
            (Kind.REPLICATE_REDUCE, Phase.BACKWARD, placed.reduces),
            (Kind.PUBLISH, Phase.STEP, placed.publications),
        )
        for unit in placed.owned:
            for kind, phase, buckets in kinds:
                of_column: dict[int, list[Bucket]] = {}
                for bucket in buckets[unit]:
                    of_column.setdefault(bucket.column, []).append(bucket)
                for column, mine in of_column.items():
                    found[column].append(_of(kind, phase, unit, mine))
    return found


def _fetched_in_backward(placed: Placed, units: Iterable[str]) -> set[str]:
    """Of the ``units``, in the order of their forward, those that backward comes to, and the one fetched ahead."""
    in_turn = sorted(units, key=lambda unit: unit == ROOT)  # the forward of the root ends last
    found: set[str] = set()
    for index, unit in enumerate(in_turn):
        if unit in placed.shapes.reached:
            found.update(in_turn[max(index - 1, 0) : index + 1])
    return found


def _of(kind: Kind, phase: Phase, unit: str, buckets: Iterable[Bucket]) -> Transfer:
    sizes = [bucket.nbytes for bucket in buckets]
    return Transfer(kind, phase, unit, len(sizes), sum(sizes))


def _of_fsdp2(placed: Placed) -> list[Transfer]:
    found = []
    layout = placed.layout
    again = _fetched_in_backward(placed, placed.sharded)
    for unit, weights in placed.sharded.items():
        gathered = sum(placed.padded(w) * placed.compute_dtype(w).itemsize for w in weights)
        scattered = sum(placed.padded(w) * placed.reduce_dtype(w).itemsize for w in weights if w.trainable)
        if layout.shard > 1:
            whole = Transfer(Kind.ALL_GATHER, Phase.FORWARD, unit, 1, gathered * layout.shard)
            found.append(whole)
            if layout.zero3 and unit in again and unit != ROOT:
                found.append(Transfer(Kind.ALL_GATHER, Phase.BACKWARD, unit, 1, whole.nbytes))
            if scattered:
                found.append(Transfer(Kind.REDUCE_SCATTER, Phase.BACKWARD, unit, 1, scattered * layout.shard))
        if layout.replicate > 1 and scattered:
            found.append(Transfer(Kind.ALL_REDUCE, Phase.BACKWARD, unit, 1, scattered))
    return found


def total(found: Iterable[Transfer], kind: Kind) -> int:
    """Bytes of all buffers of one kind."""
    return sum(transfer.nbytes for transfer in found if transfer.kind is kind)


def through_link(transfer: Transfer, group: int) -> float:
    """Bytes that the busiest rank of a ``group`` must take in or give out, whatever the algorithm.

    Broadcast and reduce: the whole buffer. All-gather and reduce-scatter: all but the rank's own part. All-reduce:
    both of these one after the other. Source: E. Chan et al., "Collective communication: theory, practice, and
    experience", 2007, section 4 (lower bounds on the bandwidth term).
    """
    if group == 1:
        return 0.0
    if transfer.kind in (Kind.ALL_GATHER, Kind.REDUCE_SCATTER):
        return transfer.nbytes * (group - 1) / group
    if transfer.kind in (Kind.ALL_REDUCE, Kind.FLAGS):
        return 2 * transfer.nbytes * (group - 1) / group
    return float(transfer.nbytes)


def group_size(placed: Placed, axis: Axis) -> int:
    """How many ranks take part."""
    layout = placed.layout
    return {Axis.SHARD: layout.shard, Axis.REPLICATE: layout.replicate, Axis.MESH: layout.ranks}[axis]


def link_bytes(placed: Placed, found: Iterable[Transfer], axis: Axis) -> float:
    """Bytes through the busiest rank's link along one axis in a step."""
    return sum(through_link(t, group_size(placed, axis)) for t in found if t.axis is axis)
