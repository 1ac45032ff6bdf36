"""State of an arbitrary optimizer of matrices as checkpoints need it: the same on every rank, owned as its matrix."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.utils._pytree import tree_flatten, tree_map, tree_unflatten

from dmuon_core.optim.loading import placed_like
from dmuon_core.optim.local import is_stepped_here, zeros_for_state
from dmuon_core.owned_tensor import OwnedTensor, own_like
from dmuon_core.registry import find_dedicated

#: Checkpoint tools flatten nested state and lose empty containers. Tensors without elements, of these shapes, stand in.
_EMPTY: dict[type, tuple[int, int]] = {list: (0, 1), tuple: (0, 2), dict: (0, 3)}
_PLAIN = (bool, int, float, complex, str, bytes, type(None), torch.Size)


@dataclass(frozen=True)
class _Whole:
    """Stands for a tensor that only the owner has."""

    shape: tuple[int, ...]
    dtype: torch.dtype


@dataclass(frozen=True)
class _Small:
    """A tensor without rows, such as a step count, as it is."""

    value: Tensor


@dataclass(frozen=True)
class _Empty:
    """Stands for an empty list, tuple or dict."""

    shape: tuple[int, int]


@dataclass(frozen=True)
class _Text:
    """A string on its way through ``Optimizer.load_state_dict``, which would iterate over it as over a list."""

    value: str


@dataclass(frozen=True)
class _Unfit:
    """Stands for what checkpoints cannot carry."""

    kind: str


def gather_state(
    model: nn.Module,
    matrices: Sequence[Tensor],
    state: Mapping[Tensor, Any],
    groups: Sequence[dict[str, Any] | None],
) -> tuple[dict[Tensor, Any], list[dict[str, Any]]]:
    """The state of every matrix on every rank, and the options of every group as a rank has them that uses it.

    Tensors become owned tensors of their own shape: whole on the owner, with 0 rows elsewhere. Collective, one
    exchange of shapes and small values; local if the model is not dedicated.

    Raises:
        TypeError: on every rank, if there is something that is neither tensor nor plain value.
    """
    dedicated = find_dedicated(model)
    mine = {
        i: tree_map(_describe, state[p], is_leaf=_is_empty)
        for i, p in enumerate(matrices)
        if is_stepped_here(p) and state.get(p)
    }
    everyone = [(mine, list(groups))] if dedicated is None else dedicated.gather((mine, list(groups)))
    described = dict(sorted(entry for trees, _ in everyone for entry in trees.items()))
    for i, tree in described.items():
        kinds = {leaf.kind for leaf in tree_flatten(tree)[0] if isinstance(leaf, _Unfit)}
        if kinds:
            p = matrices[i]
            raise TypeError(
                f"OwnedOptimizer: the state of {repr(p.fqn) if isinstance(p, OwnedTensor) else f'matrix {i}'} holds "
                f"{', '.join(sorted(kinds))}, and checkpoints carry only tensors and plain values: save no optimizer "
                "state, or use another optimizer"
            )
    options = [
        next((found[k] for _, found in everyone if found[k] is not None), None) or {} for k in range(len(groups))
    ]
    return {matrices[i]: _rebuild(tree, matrices[i], state) for i, tree in described.items()}, options


def portable(value: Any) -> Any:
    """An option of a group as checkpoint tools can carry it: a dtype by its name."""
    return str(value) if isinstance(value, torch.dtype) else value


def restored(value: Any, current: Any) -> Any:
    """What :func:`portable` was given, where the option is ``current`` now."""
    if isinstance(current, torch.dtype) and isinstance(value, str):
        return getattr(torch, value.removeprefix("torch."))
    return value


def _is_empty(node: Any) -> bool:
    return type(node) in _EMPTY and not node


def _describe(leaf: Any) -> Any:
    if _is_empty(leaf):
        return _Empty(_EMPTY[type(leaf)])
    if not isinstance(leaf, Tensor):
        return leaf if isinstance(leaf, _PLAIN) else _Unfit(type(leaf).__name__)
    if leaf.ndim == 0 or leaf.numel() == 0:
        return _Small(leaf.detach().cpu())
    return _Whole(tuple(leaf.shape), leaf.dtype)


def _rebuild(tree: Any, p: Tensor, state: Mapping[Tensor, Any]) -> Any:
    leaves, spec = tree_flatten(tree)
    own = tree_flatten(state[p], is_leaf=_is_empty)[0] if is_stepped_here(p) else [None] * len(leaves)

    def rebuilt(leaf: Any, mine: Any) -> Any:
        if isinstance(leaf, _Empty):
            return torch.empty(leaf.shape, device=p.device)
        if isinstance(leaf, _Small):
            return leaf.value if mine is None else mine
        if not isinstance(leaf, _Whole):
            return leaf
        if not isinstance(p, OwnedTensor):
            return mine
        here = torch.empty((0, *leaf.shape[1:]), dtype=leaf.dtype, device=p.device) if mine is None else mine
        return OwnedTensor.wrap(here.contiguous(), torch.Size(leaf.shape), p.device_mesh, p.home, p.fqn)

    return tree_unflatten([rebuilt(leaf, mine) for leaf, mine in zip(leaves, own, strict=True)], spec)


def place_states(params: Sequence[Tensor], state: Any) -> None:
    """Give loaded state of every parameter, in place, the form in which its optimizer holds it.

    State of an owned matrix becomes plain tensors on its owner, and nothing elsewhere. Values may be plain full tensors
    (the same on every rank), owned tensors of any owner, or sharded. Collective where a DTensor has to move, else
    local; the order is that of ``params``.
    """
    for p in params:
        if p not in state:
            continue
        placed = tree_map(lambda leaf, p=p: _placed(leaf, p), state[p])
        state[p] = placed if is_stepped_here(p) else {}


def shielded(state: Any) -> Any:
    """State as ``Optimizer.load_state_dict`` leaves it whole; :func:`place_states` undoes it. Local."""
    return tree_map(lambda leaf: _Text(leaf) if isinstance(leaf, str) else leaf, state)


def _placed(leaf: Any, p: Tensor) -> Any:
    if isinstance(leaf, _Text):
        return leaf.value
    if not isinstance(leaf, Tensor) or leaf.ndim == 0:
        return leaf
    if leaf.numel() == 0:
        return next((kind() for kind, shape in _EMPTY.items() if tuple(leaf.shape) == shape), leaf)
    if isinstance(p, OwnedTensor):
        like = zeros_for_state(p, leaf.shape)
        assert isinstance(like, OwnedTensor)
        return own_like(leaf, like)._local_tensor
    if leaf.shape == p.shape:
        return placed_like(leaf, p)
    return leaf.full_tensor() if isinstance(leaf, DTensor) and not isinstance(p, DTensor) else leaf
