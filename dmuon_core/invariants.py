"""check_invariants(): what must hold of a dedicated model at any time outside its forward and backward.

I1. Every matrix has exactly one owner, and all ranks agree on which rank that is.
I2. The weights of a matrix are on every rank of its owner's shard column, and on no other rank.
I3. A reduced gradient is on the owner alone, and either every rank has a (possibly empty) gradient or none has.
I4. All copies of a weight are equal, bit by bit, once those on their way have arrived.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass

import torch
import torch.nn as nn

from dmuon_core.in_backward import in_backward
from dmuon_core.owned_tensor import OwnedTensor
from dmuon_core.param import DedicatedParam, WeightState
from dmuon_core.registry import get_dedicated
from dmuon_core.runtime import DedicatedModel

_REMEDIES = {
    "I1": "call dedicate_params on every rank with the same model and arguments, and do not replace its parameters on "
    "some ranks only",
    "I2": "change weights by in-place operations, load_state_dict or an optimizer, never by way of _local_tensor",
    "I3": "leave gradients where backward puts them; call zero_grad on every rank, and after an exception "
    "dmuon_core.reset(model) on every rank",
    "I4": "write weights on every rank alike, and step them with a torch.optim.Optimizer, or by operations on the "
    "parameters themselves that every rank runs",
}


@dataclass(frozen=True)
class _Seen:
    """What one rank sees of one parameter; plain values, to be sent to all ranks."""

    fqn: str
    home: tuple[int, int]  # (replicate, shard) of the rank that this rank takes for the owner
    claims: bool  # whether this rank takes itself for the owner
    shape: tuple[int, ...]
    weight: tuple[int, ...]  # shape of this rank's part
    grad: tuple[int, ...] | str | None  # the same of the gradient, or why it has none
    digest: str  # of this rank's bytes


@dataclass(frozen=True)
class _Rank:
    """Where one rank is on the mesh, and what it sees."""

    rank: int
    place: tuple[int, int]  # (replicate, shard)
    seen: tuple[_Seen, ...]


def check_invariants(model: nn.Module) -> None:
    """Check I1 to I4 for every owned matrix of ``model``. Collective over the mesh; for debugging.

    Call it on every rank, anywhere outside a forward and a backward. Weights that are on their way to their replicas
    are waited for, and equal weights are compared by a hash, so it reads every owned weight once.

    Raises:
        ValueError: the model is not dedicated.
        RuntimeError: an invariant does not hold; names it, the parameter, the ranks and a remedy. On every rank. Also,
            on this rank alone, inside a forward or backward of the model.
    """
    dedicated = get_dedicated(model)
    if in_backward() or dedicated.in_root_forward or any(g.state is WeightState.COMPUTING for g in dedicated.groups):
        raise RuntimeError("check_invariants inside a forward or backward: call it before or after, on every rank")
    _let_weights_arrive(dedicated)
    everyone = dedicated.gather(_look(dedicated))
    problems = list(_problems(everyone))
    if problems:
        invariant, first = problems[0]
        others = f" ({len(problems) - 1} more)" if len(problems) > 1 else ""
        raise RuntimeError(f"{invariant} does not hold: {first}{others}. Remedy: {_REMEDIES[invariant]}")


def _let_weights_arrive(dedicated: DedicatedModel) -> None:
    for group in dedicated.groups:
        group.publication.wait()
        for param in group.params:
            param.adopt_replaced_rest()
    due = [group.publication.is_due for group in dedicated.groups]
    shard_rank = dedicated.place[1][1]
    column = [flags for rank, flags in dedicated.gather((shard_rank, due)) if rank == shard_rank]
    for group, flags in zip(dedicated.groups, zip(*column, strict=True), strict=True):
        if all(flags):  # if some ranks do not know of a change, that is what this check is there to find
            group.publication.catch_up()


def _look(dedicated: DedicatedModel) -> _Rank:
    rank, place = dedicated.place
    return _Rank(rank, place, tuple(_look_at(param) for param in dedicated.params))


def _look_at(param: DedicatedParam) -> _Seen:
    grad = param.rest.grad
    part: tuple[int, ...] | str | None = None
    if isinstance(grad, OwnedTensor):
        part = tuple(grad._local_tensor.shape)
    elif grad is not None:
        part = f"a {type(grad).__name__}"
    return _Seen(
        param.fqn,
        (param.owner_replicate, param.owner),
        param.is_owner,
        tuple(param.shape),
        tuple(param.owned._local_tensor.shape),
        part,
        _digest(param.owned._local_tensor),
    )


def _digest(local: torch.Tensor) -> str:
    if local.is_meta or local.numel() == 0:
        return ""
    data = local.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
    return hashlib.sha256(data.numpy().tobytes()).hexdigest()


def _problems(everyone: list[_Rank]) -> Iterator[tuple[str, str]]:
    """(invariant, what is wrong) for everything that is wrong; the same on every rank."""
    first = everyone[0]
    for other in everyone[1:]:
        if [seen.fqn for seen in other.seen] != [seen.fqn for seen in first.seen]:
            yield "I1", f"rank {other.rank} owns other parameters than rank {first.rank}"
            return
    for views in zip(*(rank.seen for rank in everyone), strict=True):
        yield from _problems_of(everyone, views)


def _problems_of(everyone: list[_Rank], views: tuple[_Seen, ...]) -> Iterator[tuple[str, str]]:
    """One parameter as all ranks see it."""
    name, home = f"'{views[0].fqn}'", views[0].home
    for rank, seen in zip(everyone, views, strict=True):
        if seen.home != home:
            yield (
                "I1",
                f"{name} belongs to the rank at (replicate, shard) = {home} for rank {everyone[0].rank}, but to the "
                f"one at {seen.home} for rank {rank.rank}",
            )
        if seen.claims != (rank.place == home):
            verb = "takes itself" if seen.claims else "does not take itself"
            yield "I1", f"rank {rank.rank} at {rank.place} {verb} for the owner of {name}, which is at {home}"
        nothing = (0, *seen.shape[1:])
        wanted = seen.shape if rank.place[1] == home[1] else nothing
        if seen.weight != wanted:
            yield "I2", f"rank {rank.rank} holds {seen.weight} of the weight {name} instead of {wanted}"
        if isinstance(seen.grad, str):
            yield "I3", f"the gradient of {name} on rank {rank.rank} is {seen.grad}, not an OwnedTensor"
        elif seen.grad is not None and seen.grad != (seen.shape if rank.place == home else nothing):
            yield "I3", f"rank {rank.rank} holds {seen.grad} of the gradient of {name}, whose owner is at {home}"
    with_grad = [rank.rank for rank, seen in zip(everyone, views, strict=True) if seen.grad is not None]
    if with_grad and len(with_grad) < len(everyone):
        without = [rank.rank for rank in everyone if rank.rank not in with_grad]
        yield "I3", f"{name} has a gradient on rank(s) {with_grad} and none on rank(s) {without}"
    digests = {rank.place: (rank.rank, seen.digest) for rank, seen in zip(everyone, views, strict=True) if seen.digest}
    if home in digests:
        owner, right = digests[home]
        wrong = [rank for rank, digest in digests.values() if digest != right]
        if wrong:
            yield "I4", f"the copy of {name} on rank(s) {wrong} differs from its owner's, rank {owner}"
