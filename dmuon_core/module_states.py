"""One rank's weights and buffers win everywhere, before the model is split up."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.distributed.tensor import DTensor


@torch.no_grad()
def sync_module_states(model: nn.Module, group: dist.ProcessGroup, device: torch.device) -> None:
    """Broadcast every plain parameter and buffer of ``model`` from the first rank of ``group``, in place. Collective.

    Tensors on the meta device and DTensors are left alone; which those are must be the same on every rank.

    Args:
        model: has the same parameters and buffers on every rank.
        group: the ranks to make equal.
        device: where the group's backend works; tensors elsewhere pass through it one at a time.
    """
    if dist.get_world_size(group) == 1:
        return
    seen: set[int] = set()
    for tensor in itertools.chain(model.parameters(), model.buffers()):
        if tensor.is_meta or isinstance(tensor, DTensor) or tensor.numel() == 0 or id(tensor) in seen:
            continue
        seen.add(id(tensor))
        # Bytes: not every backend takes every dtype.
        moved = tensor.detach().to(device).contiguous()
        dist.broadcast(moved.reshape(-1).view(torch.uint8), group=group, group_src=0)
        if moved.data_ptr() != tensor.data_ptr():
            _once(tensor.detach()).copy_(_once(moved, tensor.stride()))


def _once(tensor: torch.Tensor, strides: Sequence[int] | None = None) -> torch.Tensor:
    """The part of ``tensor`` with each element once. Strides, its own or given ones, say which dims are expanded."""
    for dim, stride in enumerate(tensor.stride() if strides is None else strides):
        if stride == 0 and tensor.shape[dim] > 1:
            tensor = tensor.narrow(dim, 0, 1)
    return tensor
