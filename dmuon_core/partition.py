"""Which slot owns which matrix: a balanced partition over names and shapes.

Pure Python on purpose: no tensors, no process group, so that a partition of a model of any size can be
computed and looked at on a laptop. The optimizer step is as long as the busiest owner's, hence the cost of a
matrix is what its update costs (Newton-Schulz FLOPs), not how many elements it has.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from itertools import pairwise

from dmuon_core.assignment import Assignment, MatrixSpec
from dmuon_core.balancing import Items, balance

SMALL_PARAM_THRESHOLD = 5_000_000
"""Elements below which a matrix may share its owner with other small ones of its layer."""


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


def compute_balanced_assignment(
    specs: Iterable[MatrixSpec],
    num_slots: int,
    *,
    shard_size: int | None = None,
    flops: Callable[[tuple[int, int]], int] = newton_schulz_flops,
    small_threshold: int = SMALL_PARAM_THRESHOLD,
    max_owned_bytes: int | None = None,
) -> Assignment:
    """Give every matrix one owner slot; local, deterministic, independent of the order of `specs`.

    What is minimised, in this order: the FLOPs of the busiest slot; for each layer the most bytes that one shard rank
    broadcasts; the most bytes that one slot owns. The second may cost half a percent of the lower bound of the first.

    Longest processing time first (Graham, 1969) gives the start: the costliest matrix goes to the least loaded slot,
    among those whose shard rank has nothing of its layer yet, so that the broadcasts of a layer leave from as many
    ranks as possible. Small matrices of a layer start together as long as that leaves a shard rank out of the layer's
    broadcasts and keeps the layer's largest share. Moves and swaps of single matrices follow, until none helps or a
    fixed number was tried. The busiest slot is never above what plain longest-first, without any of these rules, gives.

    Args:
        specs: the matrices, each name once.
        num_slots: how many ranks own matrices.
        shard_size: with it the slots are a mesh: slot `k` is shard rank `k % shard_size` of row `k // shard_size`. All
            rows of a shard rank share its broadcasts. None for one row.
        flops: FLOPs of one matrix (m, n) in the configured update; a spec costs the sum over its parts.
        small_threshold: elements below which a matrix counts as small; 0 packs nothing.
        max_owned_bytes: bound on the bytes that a slot owns.

    Raises ValueError for num_slots < 1, a name that occurs twice, or a bound that cannot be met.
    """
    if num_slots < 1:
        raise ValueError(f"num_slots must be at least 1, got {num_slots}.")
    by_name = tuple(sorted(specs, key=lambda spec: spec.fqn))
    for first, second in pairwise(by_name):
        if first.fqn == second.fqn:
            raise ValueError(f"{first.fqn!r} occurs twice. Pass it once: tied weights have one owner.")
    columns = num_slots if shard_size is None else shard_size
    if columns < 1 or num_slots % columns:
        raise ValueError(f"num_slots={num_slots} is no multiple of shard_size={columns}.")
    if max_owned_bytes is not None:
        _check_bound(by_name, num_slots, max_owned_bytes)
    layer_index: dict[str, int] = {}
    for spec in by_name:
        layer_index.setdefault(spec.layer, len(layer_index))
    cost_of = {part: int(flops(part)) for part in {part for spec in by_name for part in spec.parts or ()}}
    items = Items(
        costs=[sum(cost_of[part] for part in spec.parts or ()) for spec in by_name],
        nbytes=[spec.nbytes for spec in by_name],
        layers=[layer_index[spec.layer] for spec in by_name],
        small=[spec.numel < small_threshold for spec in by_name],
    )
    slots = balance(items, columns, num_slots // columns, max_owned_bytes)
    if slots is None:
        raise ValueError(
            f"found no partition on {num_slots} slots that keeps every slot within max_owned_bytes={max_owned_bytes}: "
            "raise the bound or use more ranks."
        )
    return Assignment(by_name, tuple(slots), tuple(items.costs), num_slots, columns)


def _check_bound(specs: tuple[MatrixSpec, ...], num_slots: int, max_owned_bytes: int) -> None:
    for spec in specs:
        if spec.nbytes > max_owned_bytes:
            raise ValueError(
                f"{spec.fqn!r} alone has {spec.nbytes} bytes, max_owned_bytes is {max_owned_bytes}: raise it to at "
                "least that, or leave this parameter out of the predicate."
            )
    total = sum(spec.nbytes for spec in specs)
    if total > num_slots * max_owned_bytes:
        raise ValueError(
            f"the matrices have {total} bytes, {num_slots} slots of max_owned_bytes={max_owned_bytes} hold "
            f"{num_slots * max_owned_bytes}: raise it to at least {-(-total // num_slots)} or use more ranks."
        )
