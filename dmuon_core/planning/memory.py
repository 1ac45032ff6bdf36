"""What one rank keeps in memory, and what it allocates on the way. Without activations."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from itertools import pairwise

from dmuon_core.assignment import MatrixSpec
from dmuon_core.optim.update import NS_DTYPES
from dmuon_core.planning.layout import Bucket, Placed
from dmuon_core.planning.shapes import ROOT, Weight


@dataclass(frozen=True)
class Memory:
    """Bytes on one rank.

    At rest between steps:

    Attributes:
        owned_weights: weights of the rank's shard column in their rest dtype. With replicas every rank of a column has
            all of the column's, because it broadcasts them in its row.
        momentum: of the matrices whose only owner this rank is; ``second_moment`` with NorMuon.
        sharded_weights: FSDP2's shards, padded to equal size.
        adam: the two moments of the rank's rows, and a step count of 4 bytes for each parameter.

    From backward to ``zero_grad``:

    Attributes:
        owned_gradients: of the rank's own matrices, with the tags of their buffers: where gradients are reduced in the
            rest dtype, the reduce buffer is the gradient.
        sharded_gradients: FSDP2's, padded.

    The most that exists of each kind of buffer at once (not at the same moment, so their sum is an upper bound):

    Attributes:
        unsharded: packed buffers of broadcast weights: Z3 the unit that computes and the next one, Z2 all units; the
            root's own on top.
        packed_gradients: packed buffers on their way to owners: one unit's, with replicas two units'.
        local_gradients: gradients as autograd leaves them, of one unit and of the root, which FSDP2 reduces last. An
            upper bound: those of an embedding come when the units' have left.
        publish: packed copies of the column's weights after a step, until the next forward reads them.
        update: what the optimizer's step needs for the rank's largest matrix.
        next_forward: unsharded and gathered weights of the first units, while published copies are still there.
        gathered: what FSDP2 has gathered, likewise. (It holds a second copy of a unit while it copies it out.)
    """

    owned_weights: int
    momentum: int
    second_moment: int
    sharded_weights: int
    adam: int
    owned_gradients: int
    sharded_gradients: int
    unsharded: int
    packed_gradients: int
    local_gradients: int
    publish: int
    gathered: int
    update: int
    next_forward: int

    @property
    def at_rest(self) -> int:
        """Weights and optimizer state."""
        return self.owned_weights + self.momentum + self.second_moment + self.sharded_weights + self.adam

    @property
    def gradients(self) -> int:
        return self.owned_gradients + self.sharded_gradients

    @property
    def buffers(self) -> int:
        """The most in a pass, or in a step and after it, whichever is larger."""
        in_pass = self.unsharded + self.packed_gradients + self.local_gradients + self.gathered
        return max(in_pass, self.publish + max(self.update, self.next_forward))

    @property
    def total(self) -> int:
        """An upper bound on all of these together. Activations come on top."""
        return self.at_rest + self.gradients + self.buffers

    def as_dict(self) -> dict[str, int]:
        """Every figure by name, the sums too."""
        parts = {field.name: getattr(self, field.name) for field in fields(self)}
        return {**parts, "at_rest": self.at_rest, "buffers": self.buffers, "total": self.total}


def memory(placed: Placed, rank: int, *, normuon: bool = False) -> Memory:
    """What rank ``rank`` of the mesh holds, in bytes. Pure. `memories` has all ranks in the same time."""
    return memories(placed, normuon=normuon)[rank]


def memories(placed: Placed, *, normuon: bool = False) -> list[Memory]:
    """What each rank of the mesh holds, in bytes, by rank. Pure; its time grows with matrices + ranks."""
    layout = placed.layout
    sharded = [weight for weights in placed.sharded.values() for weight in weights]
    trained = [weight for weight in sharded if weight.trainable]
    alike = Memory(
        owned_weights=0,
        momentum=0,
        second_moment=0,
        sharded_weights=sum(placed.padded(w) * w.dtype.itemsize for w in sharded),
        adam=0,
        owned_gradients=0,
        sharded_gradients=sum(placed.padded(w) * w.dtype.itemsize for w in trained),
        unsharded=_unsharded(placed, layout.zero3),
        packed_gradients=_packed_gradients(placed),
        local_gradients=_local_gradients(placed),
        publish=0,
        gathered=_gathered(placed, layout.zero3),
        update=0,
        next_forward=_unsharded(placed, True) + _gathered(placed, True),
    )
    of_columns = [
        {"owned_weights": weights, "adam": adam, "publish": publish}
        for weights, adam, publish in zip(
            _owned_in_column(placed), _adam(placed, trained), _published(placed), strict=True
        )
    ]
    of_ranks = _of_owners(placed, normuon)
    return [replace(alike, **of_columns[rank % layout.shard], **of_ranks.get(rank, {})) for rank in range(layout.ranks)]


def _owned_in_column(placed: Placed) -> list[int]:
    found = [0] * placed.layout.shard
    for weights in placed.owned.values():
        for weight in weights:
            found[placed.home(weight.fqn)[1]] += _at_rest(weight)
    return found


def _published(placed: Placed) -> list[int]:
    found = [0] * placed.layout.shard
    if placed.layout.replicate > 1:
        for buckets in placed.publications.values():
            for bucket in buckets:
                found[bucket.column] += bucket.nbytes
    return found


def _adam(placed: Placed, trained: Sequence[Weight]) -> list[int]:
    """Of each column; weights of one shape, such as norms, are counted once."""
    alike = Counter((weight.shape, weight.dtype) for weight in trained)
    some = {(weight.shape, weight.dtype): weight for weight in trained}
    return [
        sum(
            count * (2 * placed.local(some[key], column) * some[key].dtype.itemsize + 4) for key, count in alike.items()
        )
        for column in range(placed.layout.shard)
    ]


def _of_owners(placed: Placed, normuon: bool) -> dict[int, dict[str, int]]:
    """The figures of the ranks that own something: of its matrices alone."""
    ns_itemsize = NS_DTYPES[str(placed.layout.flops.ns_dtype)].itemsize
    mine: dict[int, list[Weight]] = {}
    gradients: dict[int, list[Bucket]] = {}
    for unit, weights in placed.owned.items():
        for weight in weights:
            mine.setdefault(placed.assignment.owners[weight.fqn], []).append(weight)
        for bucket in placed.reduces[unit]:
            gradients.setdefault(bucket.row * placed.layout.shard + bucket.column, []).append(bucket)
    found = {}
    for rank, weights in mine.items():
        trained = [weight for weight in weights if weight.trainable]
        found[rank] = {
            "momentum": sum(map(_at_rest, trained)),
            "second_moment": sum(_neurons(placed, w) * w.rest_dtype.itemsize for w in trained) if normuon else 0,
            "owned_gradients": _gradients_at_rest(placed, trained, gradients.get(rank, [])),
            "update": max((update_bytes(placed.specs[w.fqn], ns_itemsize) for w in trained), default=0),
        }
    return found


def update_bytes(spec: MatrixSpec, ns_itemsize: int) -> int:
    """Bytes that the update of one parameter allocates, at most, with the default options. Pure.

    The momentum with Nesterov's look-ahead in the rest dtype; then, for one matrix after the other, three copies of it
    and two of its square in the dtype of Newton-Schulz; stacked experts are collected and stacked.
    """
    rows, columns = max(spec.parts or (), key=lambda part: part[0] * part[1])
    shorter = min(rows, columns)
    stack = 2 * spec.numel if len(spec.shape) == 3 and len(spec.parts or ()) > 1 else 0
    return spec.nbytes + ns_itemsize * (3 * rows * columns + 2 * shorter * shorter + stack)


def _at_rest(weight: Weight) -> int:
    return weight.numel * weight.rest_dtype.itemsize


def _neurons(placed: Placed, weight: Weight) -> int:
    """Rows of all matrices that the parameter stands for."""
    return sum(rows for rows, _ in placed.specs[weight.fqn].parts or ())


def _gradients_at_rest(placed: Placed, trained: Sequence[Weight], buckets: Sequence[Bucket]) -> int:
    if all(placed.reduce_dtype(weight) == weight.rest_dtype for weight in trained):
        return sum(bucket.nbytes for bucket in buckets)
    return sum(map(_at_rest, trained))


def _unsharded(placed: Placed, zero3: bool) -> int:
    sizes = {unit: sum(bucket.nbytes for bucket in placed.broadcasts[unit]) for unit in placed.owned}
    # There as long as any other: the root, and a unit around others, such as an encoder with a matrix that its blocks
    # share.
    around = [unit for unit in sizes if unit == ROOT or any(other.startswith(f"{unit}.") for other in sizes)]
    outer = sum(sizes.pop(unit) for unit in around)
    return outer + (_largest_pair(list(sizes.values())) if zero3 else sum(sizes.values()))


def _packed_gradients(placed: Placed) -> int:
    sizes = [sum(bucket.nbytes for bucket in placed.reduces[unit]) for unit in placed.owned]
    # With replicas a unit is on its way along the column while the next one goes along the row.
    return _largest_pair(sizes) if placed.layout.replicate > 1 else max(sizes, default=0)


def _local_gradients(placed: Placed) -> int:
    def size(unit: str) -> int:
        trained = [weight for weight in placed.shapes.of_unit(unit) if weight.trainable]
        return sum(weight.numel * placed.compute_dtype(weight).itemsize for weight in trained)

    return size(ROOT) + max((size(unit) for unit in placed.shapes.units if unit != ROOT), default=0)


def _gathered(placed: Placed, zero3: bool) -> int:
    sizes = {
        unit: sum(placed.padded(w) * placed.layout.shard * placed.compute_dtype(w).itemsize for w in weights)
        for unit, weights in placed.sharded.items()
    }
    root = sizes.pop(ROOT, 0)
    return root + (_largest_pair(list(sizes.values())) if zero3 else sum(sizes.values()))


def _largest_pair(sizes: Sequence[int]) -> int:
    """Most of two neighbours together."""
    return max((a + b for a, b in pairwise(sizes)), default=sum(sizes))
