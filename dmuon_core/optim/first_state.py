"""The state that an optimizer starts from, for checkpoints that need it before there was a step."""

from __future__ import annotations

import copy
import random
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.utils._pytree import tree_leaves

from dmuon_core.optim.local import local


@torch.no_grad()
def make_first_state(optimizer: torch.optim.Optimizer, params: Sequence[Tensor]) -> list[set[str]]:
    """Let ``optimizer`` make state for ``params`` by a step with zero gradients, of which nothing else remains. Local.

    Only an optimizer itself knows what its state is made of, and it makes it in ``step``. So it takes one with a
    learning rate of zero; afterwards weights, gradients, options of groups and random numbers are those from before,
    and steps that were counted count as none.

    Returns:
        for each group the options that the step has added, which are still there.
    """
    data = [p.data for p in params]
    weights = [p.detach().clone() for p in params]
    every = [p for group in optimizer.param_groups for p in group["params"]]
    grads = [p.grad for p in every]
    options = [{k: _kept(v) for k, v in g.items() if k != "params"} for g in optimizer.param_groups]
    chance = random.getstate()
    devices = sorted({p.device for p in params if p.device.type == "cuda"}, key=str)
    try:
        for p in every:
            p.grad = None
        for p in params:
            p.grad = torch.zeros_like(p)
        for group in optimizer.param_groups:
            if "lr" in group:
                group["lr"] = torch.zeros_like(group["lr"]) if isinstance(group["lr"], Tensor) else 0.0
        with torch.random.fork_rng(devices=devices):
            optimizer.step()
    finally:
        random.setstate(chance)
        for p, own, weight in zip(params, data, weights, strict=True):
            own.copy_(weight)
            if not isinstance(p, DTensor):
                p.data = own  # the optimizer may have put other memory there
        for p, grad in zip(every, grads, strict=True):
            p.grad = grad
        for group, before in zip(optimizer.param_groups, options, strict=True):
            group.update(before)
    counted: list[dict[str, Any]] = [optimizer.state.get(p, {}) for p in params]
    added = [
        group.keys() - before.keys() - {"params"} for group, before in zip(optimizer.param_groups, options, strict=True)
    ]
    counted += [group for group, new in zip(optimizer.param_groups, added, strict=True) if "step" in new]
    for counts in counted:
        if isinstance(counts.get("step"), Tensor):
            counts["step"].zero_()
        elif "step" in counts:
            counts["step"] = 0
    return added


def _kept(value: Any) -> Any:
    return copy.deepcopy(value) if isinstance(value, Tensor | list | dict) else value  # what a step may write into


def writes_into(*optimizers: torch.optim.Optimizer | None) -> int:
    """A number that grows when a tensor of the optimizers' state is written in place. Local."""
    states = [dict(optimizer.state) for optimizer in optimizers if optimizer is not None]
    tensors = [leaf for leaf in tree_leaves([list(state.values()) for state in states]) if isinstance(leaf, Tensor)]
    return sum(local(t)._version for t in tensors)
