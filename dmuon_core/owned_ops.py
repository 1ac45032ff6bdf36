"""Which operations an owned parameter supports at rest, and how each one runs on the local part.

A whitelist. An operation is on it when running it on the owner's whole matrix and on 0 rows elsewhere gives the global
result on every rank without any redistribution. Everything else raises: delegating to DTensor's general machinery would
redistribute by the nominal placement and so hang or compute on the wrong data.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor
from torch.utils._pytree import tree_leaves, tree_map, tree_map_only

from dmuon_core.owned_tensor import OwnedTensor

aten = torch.ops.aten

_ALIAS = {aten.detach.default, aten.alias.default}
_LIKE = {
    aten.clone.default,
    aten.lift_fresh.default,
    aten._to_copy.default,
    aten.empty_like.default,
    aten.zeros_like.default,
    aten.ones_like.default,
    aten.full_like.default,
}
_RANDOM_LIKE = {aten.rand_like.default: "uniform_", aten.randn_like.default: "normal_"}
_RANDOM_FILL = {
    aten.normal_.default,
    aten.uniform_.default,
    aten.bernoulli_.float,
    aten.exponential_.default,
    aten.random_.default,
    aten.random_.to,
    getattr(aten.random_, "from"),
    aten.log_normal_.default,
    aten.cauchy_.default,
    aten.geometric_.default,
}
_FILL = {aten.fill_.Scalar, aten.fill_.Tensor, aten.zero_.default}
_NEW = {aten.new_zeros.default, aten.new_empty.default, aten.new_ones.default, aten.new_full.default}
_SAME_SHAPE_VIEW = {aten.view.default, aten._unsafe_view.default}
# Reductions to which other ranks' nothing adds nothing: the nominal Shard(0) placement is exact and DTensor never moves
# the input.
_REDUCTION = {
    aten.linalg_vector_norm.default,
    aten.norm.Scalar,
    aten._foreach_norm.Scalar,
    aten.sum.default,
    aten.any.default,
}
# DTensor's own rule is right on the local tensors as they are. torch.amp's agrees on found_inf over the mesh.
_AS_DTENSOR = {aten._amp_foreach_non_finite_check_and_unscale_.default, aten.all.default}


def dispatch(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Run the operator ``func`` on owned tensors; entry point of ``OwnedTensor.__torch_dispatch__``.

    Raises:
        NotImplementedError: for an operation that has no meaning on a tensor that lives on one rank.
    """
    if func in _AS_DTENSOR:
        return _as_dtensors(func, args, kwargs, pad_empty=False)
    if func in _REDUCTION and not _is_norm_of_the_smallest(func, args):
        return _as_dtensors(func, args, kwargs, pad_empty=True)
    if func._schema.name.startswith(("aten::_foreach_", "aten::_fused_")):  # fused optimizers take lists as well
        return _foreach(func, args, kwargs)
    if func is aten.copy_.default:
        return _copy_(*args[:2])
    if func is aten.equal.default:
        return _equal(*args)
    owned = args[0] if args and isinstance(args[0], OwnedTensor) else None
    if owned is not None:
        if func in _ALIAS:
            return owned.alias(func(owned._local_tensor))
        if func in _LIKE:
            return owned.like(func(owned._local_tensor, *args[1:], **kwargs))
        if func in _RANDOM_LIKE:
            out = owned.like(aten.empty_like.default(owned._local_tensor, *args[1:], **kwargs))
            return getattr(out, _RANDOM_LIKE[func])()
        if func in _RANDOM_FILL:
            return _random_fill(func, owned, args[1:], kwargs)
        if func in _SAME_SHAPE_VIEW and tuple(args[1]) == tuple(owned.shape):
            return owned.alias(owned._local_tensor.view_as(owned._local_tensor))
        if func in _NEW and tuple(args[1]) == tuple(owned.shape):
            return owned.like(func(owned._local_tensor, owned._local_tensor.shape, *args[2:], **kwargs))
        if func in _NEW and len(args[1]) == 0:  # 0-dim scratch values, for example of optimizers
            return func(owned._local_tensor, *args[1:], **kwargs)
    if torch.Tag.pointwise in func.tags or func in _FILL:
        return _pointwise(func, args, kwargs)
    raise NotImplementedError(_refusal(func, args, kwargs))


def _is_norm_of_the_smallest(func: Any, args: tuple[Any, ...]) -> bool:
    """Whether it is a norm with p < 0: small elements count most there, and padding is none of nothing."""
    return "norm" in func._schema.name and len(args) > 1 and isinstance(args[1], (int, float)) and args[1] < 0


def _refusal(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> str:
    owned = next(t for t in tree_leaves((args, kwargs)) if isinstance(t, OwnedTensor))
    return (
        f"{func} is not defined for the owned parameter '{owned.fqn}' at rest: its data lives on one rank only. Call "
        ".full_tensor() on every rank to get the whole matrix (or read ._local_tensor on the owner). If this comes "
        "from your model's forward, the weight is used outside the forward of the module that unshards it: choose an "
        "enclosing module with dedicate_params(hook_boundary_predicate=...), or register the method that uses it "
        "with register_forward_method(model, name)."
    )


def _as_dtensors(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], *, pad_empty: bool) -> Any:
    """Run ``func`` by DTensor's rule on the same local tensors."""

    def unwrap(t: Any) -> Any:
        if not isinstance(t, OwnedTensor):
            return t
        local = t._local_tensor
        if pad_empty and local.numel() == 0 and t.numel() > 0:
            # One row of zeros: no norm or sum changes, and the infinity norm of nothing is undefined.
            local = local.new_zeros((1, *t.shape[1:]))
        return DTensor(local, t._spec, requires_grad=False)

    unwrapped_args, unwrapped_kwargs = tree_map(unwrap, (args, kwargs))
    return func(*unwrapped_args, **unwrapped_kwargs)


def _random_fill(func: Any, owned: OwnedTensor, args: tuple[Any, ...], kwargs: dict[str, Any]) -> OwnedTensor:
    # Non-owners draw into scratch, so that the generators of all ranks advance as in one process.
    local = owned._local_tensor
    func(local if owned.is_owner else local.new_empty(owned.shape), *args, **kwargs)
    if owned.delivery is not None:
        owned.delivery.due = True  # the replicas' generators may have been seeded differently
    return owned


def _copy_(dst: torch.Tensor, src: torch.Tensor) -> torch.Tensor:
    if isinstance(dst, OwnedTensor):
        if isinstance(src, DTensor) and not (isinstance(src, OwnedTensor) and src.owner == dst.owner):
            src = src.full_tensor()
        dst._local_tensor.copy_(_local_operand(src, dst))
    elif isinstance(dst, DTensor):
        assert isinstance(src, OwnedTensor)
        dst.copy_(src.redistribute(dst.device_mesh, dst.placements))
    else:
        assert isinstance(src, OwnedTensor)
        dst.copy_(src.full_tensor())
    return dst


def _equal(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether all elements are equal, the same answer on every rank. Collective, unless the shapes differ."""
    if one.shape != other.shape:
        return False
    owned, value = (one, other) if isinstance(one, OwnedTensor) else (other, one)
    assert isinstance(owned, OwnedTensor)
    if isinstance(value, DTensor) and not (isinstance(value, OwnedTensor) and value.owner == owned.owner):
        value = value.full_tensor()
    same = torch.equal(owned._local_tensor, _local_operand(value, owned))
    answer = torch.tensor(float(same), device=owned.device)
    for dim in range(owned.device_mesh.ndim):
        dist.all_reduce(answer, op=dist.ReduceOp.MIN, group=owned.device_mesh.get_group(dim))
    return bool(answer)


def _local_operand(value: Any, reference: OwnedTensor) -> Any:
    """The part of ``value`` that this rank needs beside ``reference``'s local tensor."""
    if not isinstance(value, torch.Tensor):
        return value
    if isinstance(value, OwnedTensor):
        if value.shape != reference.shape or not _covers(value, reference):
            raise RuntimeError(
                f"owned tensors '{value.fqn}' {tuple(value.shape)} of owner {value.owner} and '{reference.fqn}' "
                f"{tuple(reference.shape)} of owner {reference.owner} cannot be combined: call .full_tensor() on both "
                "first"
            )
        return value._local_tensor if reference.is_owner else value._local_tensor[:0]
    if isinstance(value, DTensor):
        if value.dim() == 0:
            return value.full_tensor()
        if not all(placement.is_replicate() for placement in value.placements):
            raise RuntimeError(
                f"the owned parameter '{reference.fqn}' cannot be combined with a sharded DTensor of shape "
                f"{tuple(value.shape)}: call .full_tensor() on the DTensor first"
            )
        value = value._local_tensor
    # A plain tensor counts as replicated: every rank has it whole.
    if value.dim() > reference.dim() or torch.broadcast_shapes(value.shape, reference.shape) != reference.shape:
        raise RuntimeError(
            f"a tensor of shape {tuple(value.shape)} does not fit the owned parameter '{reference.fqn}' of shape "
            f"{tuple(reference.shape)}"
        )
    has_rows = value.dim() == reference.dim() and value.shape[0] == reference.shape[0]
    return value[:0] if has_rows and not reference.is_owner else value


def _covers(value: OwnedTensor, reference: OwnedTensor) -> bool:
    """Whether ``value`` has its data wherever ``reference`` has, as replicated weights have beside a gradient."""
    pairs = zip(value.owner, reference.owner, strict=True)
    return value._spec.mesh == reference._spec.mesh and all(mine in (None, theirs) for mine, theirs in pairs)


def _most_specific(tensors: list[Any]) -> OwnedTensor | None:
    """The owned tensor that the fewest ranks hold: where it is, an operation with the others can run."""
    owned = [t for t in tensors if isinstance(t, OwnedTensor)]
    return min(owned, key=lambda t: t.owner.count(None), default=None)


def _updates_elsewhere(written: Any, reference: OwnedTensor) -> bool:
    """Whether an in-place operation happens on other ranks only, because only those have all that it needs.

    Then this rank's copy stays as it is: replicas of a weight follow by the publish after the optimizer's step.
    """
    if not isinstance(written, OwnedTensor) or written.owner == reference.owner:
        return False
    written.leave_to_home()
    return not reference.is_owner


def _pointwise(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    reference = _most_specific(tree_leaves((args, kwargs)))
    assert reference is not None
    out_arg = kwargs.get("out")
    written = args[0] if func._schema.is_mutable and out_arg is None else out_arg
    if written is not None and not isinstance(written, OwnedTensor):
        raise RuntimeError(
            f"{func} would write the owned parameter '{reference.fqn}' into a tensor that is not owned: call "
            ".full_tensor() first"
        )
    local_args, local_kwargs = tree_map(lambda t: _local_operand(t, reference), (args, kwargs))
    if _updates_elsewhere(written, reference):
        return written
    result = func(*local_args, **local_kwargs)
    if written is not None:
        return written
    return tree_map_only(torch.Tensor, reference.like, result)


def _foreach(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Run a foreach operator on the owned entries by their local tensors, and on the other entries as they are."""
    count = next(len(a) for a in args if isinstance(a, (list, tuple)))
    lists = [i for i, a in enumerate(args) if isinstance(a, (list, tuple)) and len(a) == count]

    references = [_most_specific([args[i][k] for i in lists]) for k in range(count)]
    results: list[Any] = [None] * count
    others = [k for k in range(count) if references[k] is None]
    if others:
        picked = [[a[k] for k in others] if i in lists else a for i, a in enumerate(args)]
        for k, value in zip(others, func(*picked, **kwargs) or [], strict=False):
            results[k] = value
    mutable = func._schema.is_mutable
    owned = [
        (k, ref)
        for k, ref in enumerate(references)
        if ref is not None and not (mutable and _updates_elsewhere(args[0][k], ref))
    ]
    if owned:

        def replicated(value: Any) -> Any:
            return value.full_tensor() if isinstance(value, DTensor) else value

        local_args = [
            [_local_operand(a[k], ref) for k, ref in owned] if i in lists else replicated(a) for i, a in enumerate(args)
        ]
        local_kwargs = {name: replicated(value) for name, value in kwargs.items()}
        for (k, ref), value in zip(owned, func(*local_args, **local_kwargs) or [], strict=False):
            results[k] = ref.like(value)
    return None if mutable else results
