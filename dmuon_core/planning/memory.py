"""What one rank keeps in memory, and what it allocates on the way. Without activations."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
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
    """What rank ``rank`` of the mesh holds, in bytes. Pure."""
    row, column = divmod(rank, placed.layout.shard)
    owned = [weight for weights in placed.owned.values() for weight in weights]
    sharded = [weight for weights in placed.sharded.values() for weight in weights]
    trained = [weight for weight in sharded if weight.trainable]
    mine = [weight for weight in owned if placed.home(weight.fqn) == (row, column)]
    gradients = [b for unit in placed.owned for b in placed.reduces[unit] if (b.row, b.column) == (row, column)]
    publish = [b for unit in placed.owned for b in placed.publications[unit] if b.column == column]
    zero3 = placed.layout.zero3
    ns_itemsize = NS_DTYPES[str(placed.layout.flops.ns_dtype)].itemsize
    return Memory(
        owned_weights=sum(_at_rest(w) for w in owned if placed.home(w.fqn)[1] == column),
        momentum=sum(_at_rest(w) for w in mine if w.trainable),
        second_moment=sum(_neurons(placed, w) * w.rest_dtype.itemsize for w in mine if w.trainable) if normuon else 0,
        sharded_weights=sum(placed.padded(w) * w.dtype.itemsize for w in sharded),
        adam=sum(2 * placed.local(w, column) * w.dtype.itemsize + 4 for w in trained),
        owned_gradients=_gradients_at_rest(placed, mine, gradients),
        sharded_gradients=sum(placed.padded(w) * w.dtype.itemsize for w in trained),
        unsharded=_unsharded(placed, zero3),
        packed_gradients=_packed_gradients(placed),
        local_gradients=_local_gradients(placed),
        publish=sum(b.nbytes for b in publish) if placed.layout.replicate > 1 else 0,
        gathered=_gathered(placed, zero3),
        update=max((update_bytes(placed.specs[w.fqn], ns_itemsize) for w in mine if w.trainable), default=0),
        next_forward=_unsharded(placed, True) + _gathered(placed, True),
    )


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


def _gradients_at_rest(placed: Placed, mine: Sequence[Weight], buckets: Sequence[Bucket]) -> int:
    trained = [weight for weight in mine if weight.trainable]
    if all(placed.reduce_dtype(weight) == weight.rest_dtype for weight in trained):
        return sum(bucket.nbytes for bucket in buckets)
    return sum(map(_at_rest, trained))


def _unsharded(placed: Placed, zero3: bool) -> int:
    sizes = {unit: sum(bucket.nbytes for bucket in placed.broadcasts[unit]) for unit in placed.owned}
    root = sizes.pop(ROOT, 0)  # there as long as any other
    return root + (_largest_pair(list(sizes.values())) if zero3 else sum(sizes.values()))


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
