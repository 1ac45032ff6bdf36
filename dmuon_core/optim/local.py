"""What one rank holds of a parameter, and what must be true of it before anything is written."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from dmuon_core.owned_tensor import OwnedTensor


def local(t: Tensor) -> Tensor:
    """This rank's part of a tensor: the local tensor of a DTensor (shared memory), else itself. Local."""
    return t._local_tensor if isinstance(t, DTensor) else t


def is_stepped_here(p: Tensor) -> bool:
    """Whether this rank updates ``p``: only its home does, for an owned parameter; replicas follow later. Local."""
    return not isinstance(p, OwnedTensor) or p.is_home


def zeros_for_state(p: Tensor, shape: Sequence[int] | None = None) -> Tensor:
    """Zeros for optimizer state of ``p``, placed where ``p`` is updated; of the shape of ``p`` by default. Local."""
    if shape is not None and tuple(shape) != tuple(p.shape):
        if not isinstance(p, OwnedTensor):
            return torch.zeros(shape, dtype=p.dtype, device=p.device)
        whole = torch.Size(shape)
        here = whole if p.is_home else (0, *whole[1:])
        zeros = torch.zeros(here, dtype=p.dtype, device=p.device)
        return OwnedTensor.wrap(zeros, whole, p.device_mesh, p.home, p.fqn)
    if isinstance(p, OwnedTensor):
        return p.zeros_at_home()
    return torch.zeros_like(p, memory_format=torch.preserve_format)


def gradient_problem(p: Tensor, algorithm: str, *, sparse: bool = False) -> str | None:
    """Say why the gradient of ``p`` (not None) cannot be applied, and the remedy; None if it can. Local.

    ``sparse``: whether it may be sparse.
    """
    grad = p.grad
    assert grad is not None
    if algorithm == "muon" and isinstance(p, DTensor) and not isinstance(p, OwnedTensor):
        # Of what was given nothing was sharded: a trainer has put other parameters there since.
        return (
            "it is sharded, not owned, and an update needs the whole matrix; let the model own it before it is sharded "
            "(dedicate_params, DMuonStrategy with Lightning, DMuonPlugin or enable() with Accelerate), or "
            'put it in a group with algorithm="adamw"'
        )
    if grad.layout != torch.strided and not sparse:
        return f"its gradient is sparse ({grad.layout}); build the layer with sparse=False"
    if grad.is_complex() and algorithm == "muon":
        return 'its gradient is complex; put it in a group with algorithm="adamw"'
    if grad.dtype != p.dtype:
        return f"its gradient has dtype {grad.dtype}, the parameter {p.dtype}; zero_grad after changing a dtype"
    if grad.shape != p.shape:
        return (
            f"its gradient has shape {_shapes(grad)}, the parameter {_shapes(p)}; call zero_grad after "
            "replacing a parameter's data"
        )
    if grad.device != p.device:
        return f"its gradient is on {grad.device}, the parameter on {p.device}; zero_grad after moving a model"
    if _placement(grad) not in (_placement(p), _placement_of_state(p)):
        return (
            f"its gradient is placed as {_placement(grad)}, the parameter as {_placement(p)}; use the "
            "gradient that backward leaves, or give it the parameter's placement"
        )
    return None


def state_problem(p: Tensor, state: dict[str, Any], shapes: Mapping[str, Sequence[int]]) -> str | None:
    """Say which state tensor does not lie where ``p`` lies, and the remedy; None if all do. Local.

    ``shapes`` are the global shapes of those that do not have the parameter's.
    """
    for key, value in state.items():
        if key == "step" or not isinstance(value, Tensor):
            continue
        if value.dtype != p.dtype:
            return (
                f"its state {key!r} has dtype {value.dtype}, the parameter {p.dtype}; build the optimizer after "
                "changing a dtype, or reload its state with load_state_dict"
            )
        other = shapes.get(key)
        here = local(p).shape if other is None else torch.Size(other)
        if (
            value.shape != torch.Size(other or p.shape)
            or (is_stepped_here(p) and local(value).shape != here)
            or value.device != p.device
        ):
            return (
                f"its state {key!r} has shape {_shapes(value)} on {value.device}, the parameter {_shapes(p)} "
                f"on {p.device}; build the optimizer after moving or replacing parameters, or reload its "
                "state with load_state_dict"
            )
    return None


def _shapes(t: Tensor) -> str:
    part = f" ({tuple(local(t).shape)} on this rank)" if isinstance(t, DTensor) else ""
    return f"{tuple(t.shape)}{part}"


def _placement_of_state(p: Tensor) -> tuple[Any, ...]:
    return ("owned by", p.home, p.device_mesh) if isinstance(p, OwnedTensor) else _placement(p)


def _placement(t: Tensor) -> tuple[Any, ...]:
    if isinstance(t, OwnedTensor):
        return "owned by", t.owner, t.device_mesh
    if isinstance(t, DTensor):
        return t.placements, t.device_mesh
    return ("a plain tensor",)
