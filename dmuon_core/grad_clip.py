"""One global gradient norm over owned, sharded and replicated gradients."""

from __future__ import annotations

import math
from collections.abc import Iterable

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.nn.utils import clip_grads_with_norm_

from dmuon_core.owned_tensor import OwnedTensor


@torch.no_grad()
def clip_grad_norm_(
    model_or_params: nn.Module | torch.Tensor | Iterable[torch.Tensor],
    max_norm: float,
    norm_type: float = 2.0,
    error_if_nonfinite: bool = False,
) -> torch.Tensor:
    """Scale all gradients in place so that their global norm is at most ``max_norm``. Collective.

    Equal to ``torch.nn.utils.clip_grad_norm_`` on the whole model in one process. Unlike that function it accepts
    owned, sharded and plain gradients together and needs one all-reduce per mesh. Call it on every rank with the same
    parameters.

    Args:
        model_or_params: module, parameter or parameters; those without gradient are skipped.
        max_norm: bound of the norm.
        norm_type: p of the p-norm, > 0; ``inf`` for the largest absolute value.
        error_if_nonfinite: raise on every rank if the norm is nan or infinite, leaving gradients as they are.

    Returns:
        The norm before clipping, 0-dim, equal on every rank.

    Raises:
        ValueError: if ``norm_type`` is not positive.
        RuntimeError: see ``error_if_nonfinite``; or for a gradient in a placement that has no norm yet (Partial).
    """
    params = _as_list(model_or_params)
    norm = total_grad_norm([p.grad for p in params if p.grad is not None], norm_type)
    if error_if_nonfinite and not torch.isfinite(norm):
        raise RuntimeError(
            f"the gradient norm of order {norm_type} is {norm.item()}, so it cannot be clipped: pass "
            "error_if_nonfinite=False to scale by it anyway"
        )
    clip_grads_with_norm_(params, max_norm, norm)
    return norm


@torch.no_grad()
def total_grad_norm(grads: list[torch.Tensor], norm_type: float = 2.0) -> torch.Tensor:
    """The p-norm of all ``grads`` as one vector, 0-dim float, equal on all ranks. Collective: one all-reduce a mesh."""
    norm_type = float(norm_type)  # trainers pass "inf" by name
    if not norm_type > 0:
        raise ValueError(f"norm_type must be positive, got {norm_type}")
    if not grads:
        return torch.tensor(0.0)
    device = grads[0].device
    local_parts: dict[DeviceMesh | None, list[torch.Tensor]] = {}
    for grad in grads:
        mesh, part = _local_part(grad)
        local_parts.setdefault(mesh, []).append(part)
    totals = []
    for mesh, parts in local_parts.items():
        # The infinity norm of an empty tensor is undefined, so drop empty parts; every mesh still takes its all-reduce.
        norms = torch._foreach_norm([p for p in parts if p.numel() > 0] or [torch.zeros(1, device=device)], norm_type)
        norm = torch.linalg.vector_norm(torch.stack([n.to(device) for n in norms]).float(), norm_type)
        totals.append(norm if mesh is None else _reduce_norm(norm, norm_type, mesh))
    return torch.linalg.vector_norm(torch.stack(totals), norm_type)


def _reduce_norm(norm: torch.Tensor, norm_type: float, mesh: DeviceMesh) -> torch.Tensor:
    is_max = math.isinf(norm_type)
    # Summed in float64, so that squaring neither overflows nor costs digits.
    total = norm if is_max else norm.double() ** norm_type
    for dim in range(mesh.ndim):
        dist.all_reduce(total, op=dist.ReduceOp.MAX if is_max else dist.ReduceOp.SUM, group=mesh.get_group(dim))
    return total if is_max else (total ** (1.0 / norm_type)).to(norm.dtype)


def _local_part(grad: torch.Tensor) -> tuple[DeviceMesh | None, torch.Tensor]:
    """The mesh to reduce the norm over (None for a gradient that every rank has whole), and this rank's share."""
    if not isinstance(grad, DTensor):
        return None, grad
    local = grad._local_tensor
    if isinstance(grad, OwnedTensor):
        return grad.device_mesh, local
    share = local
    for dim, placement in enumerate(grad.placements):
        if isinstance(placement, Replicate):
            if grad.device_mesh.get_local_rank(dim) != 0:
                share = local.new_empty(0)  # counted once
        elif not isinstance(placement, Shard):
            raise RuntimeError(f"a gradient with placement {placement} has no norm yet: redistribute it first")
    return grad.device_mesh, share


def _as_list(model_or_params: nn.Module | torch.Tensor | Iterable[torch.Tensor]) -> list[torch.Tensor]:
    if isinstance(model_or_params, nn.Module):
        return list(model_or_params.parameters())
    if isinstance(model_or_params, torch.Tensor):
        return [model_or_params]
    return list(model_or_params)
