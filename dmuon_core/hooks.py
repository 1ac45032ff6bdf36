"""Forward and backward hooks of one group: when its weights appear and when its gradients leave.

The hooks are registered in the default (append) order and follow FSDP2's states. With ``fully_shard`` applied after
to the same module, one pass runs (F: FSDP2, D: ours)::

    F.pre D.pre | forward | D.post F.post || D.pre_backward F.pre_backward | backward | D.post_backward F.post_backward

so inputs are cast before we attach to them, and both systems have their weights before any compute.
"""

from __future__ import annotations

from enum import Enum, auto
from typing import TYPE_CHECKING, Any

import torch
import torch.nn as nn

from dmuon_core.group import DedicatedParamGroup
from dmuon_core.in_backward import in_backward
from dmuon_core.param import WeightState
from dmuon_core.tree import grad_tensors, map_grad_tensors

if TYPE_CHECKING:
    from dmuon_core.runtime import DedicatedModel


class Phase(Enum):
    """Where a group is in one iteration."""

    IDLE = auto()
    FORWARD = auto()
    PRE_BACKWARD = auto()  # weights are there for backward
    POST_BACKWARD = auto()  # gradients were handed over


class GroupHooks:
    """The hooks of ``group``, installed on ``group.module`` at construction."""

    def __init__(self, group: DedicatedParamGroup, runtime: DedicatedModel) -> None:
        self.group = group
        self.phase = Phase.IDLE
        self.awaits_reduce = False
        """A forward with grad ran since the last reduce. Such a group is reduced at the end of backward even if this
        rank has no gradient for it: another rank may have one, and all ranks must take part."""
        self._runtime = runtime
        self._nested_calls = 0  # running calls of the model's forward by another of its methods
        # Compiled modules call the hooks between graphs; nothing in here is for a compiler.
        self.pre_forward = torch._dynamo.disable(self._pre_forward, recursive=True)
        self.post_forward = torch._dynamo.disable(self._post_forward, recursive=True)
        group.module.register_forward_pre_hook(self.pre_forward, with_kwargs=True)
        group.module.register_forward_hook(self.post_forward)

    def _pre_forward(self, module: nn.Module, args: Any, kwargs: Any) -> tuple[Any, Any] | None:
        if self.phase is Phase.PRE_BACKWARD:  # activation checkpointing recomputes this module for its backward
            self.group.start_computing()
            self._runtime.hand_over()
            return None
        if self._runtime.is_nested_call(module) and self.group.state is WeightState.COMPUTING:
            self._nested_calls += 1
            return None
        self.phase = Phase.FORWARD
        self._runtime.order.prepare_for_forward(self)
        self.group.start_computing()
        self._runtime.order.prefetch_for_forward(self)
        self._runtime.hand_over()
        if not torch.is_grad_enabled():
            return None
        self.awaits_reduce = True
        tensors = grad_tensors((args, kwargs))
        if not tensors:
            return None  # the end of backward takes over
        wrapped = iter(_PostBackward.apply(self, *tensors))
        return map_grad_tensors(lambda _: next(wrapped), (args, kwargs))

    def _post_forward(self, module: nn.Module, args: Any, output: Any) -> None:
        if self.phase is Phase.PRE_BACKWARD:
            return
        if self._nested_calls > 0:
            self._nested_calls -= 1
            return
        self.phase = Phase.IDLE
        grad_enabled = torch.is_grad_enabled()
        if not in_backward():  # a reentrant checkpoint's recompute is followed by its backward at once
            self.group.stop_computing()
            if not self._runtime.order.keep_after_forward(self, grad_enabled):
                self.group.reshard()
                self._runtime.hand_over()
        if grad_enabled:
            for tensor in grad_tensors(output):
                tensor.register_hook(self.pre_backward)
                if tensor._base is not None and tensor._base.grad_fn is not None:
                    # An in-place operation on a view replaces its node and drops the hook; the base's node stays.
                    tensor._base.grad_fn.register_prehook(self.pre_backward)

    @torch._dynamo.disable(recursive=True)
    def pre_backward(self, _: Any) -> None:
        """Bring the weights back before the first gradient enters the module."""
        self._runtime.queue_end_of_backward()
        if self.phase is not Phase.PRE_BACKWARD:
            self.phase = Phase.PRE_BACKWARD
            self.group.start_computing()
            self._runtime.order.prefetch_for_backward(self)
            self._runtime.hand_over()

    @torch._dynamo.disable(recursive=True)
    def post_backward(self) -> None:
        """Free the weights and hand the gradients over; on every rank, whether it has gradients or not."""
        self.phase = Phase.POST_BACKWARD
        if not self.group.requires_gradient_sync:
            self.group.grads.accumulate()
            self.group.reshard()
        else:
            self.group.reshard()
            self._runtime.grads.start(self.group)
            self.awaits_reduce = False
        self._runtime.hand_over()

    def end_backward(self) -> None:
        """What is left to do for this group when the whole backward is over."""
        if self.phase is not Phase.POST_BACKWARD and (self.awaits_reduce or self.group.has_local_grads):
            self.post_backward()
        self.group.reshard()
        self.phase = Phase.IDLE

    def reset(self) -> None:
        """Back to rest after an exception; gradients that had not arrived are lost."""
        self.group.grads.drop()
        self.group.reshard()
        self.phase = Phase.IDLE
        self.awaits_reduce = False
        self._nested_calls = 0


class _PostBackward(torch.autograd.Function):
    """Identity on a module's inputs; its backward runs when the module's own backward is complete."""

    @staticmethod
    def forward(ctx: Any, hooks: GroupHooks, *inputs: torch.Tensor) -> tuple[torch.Tensor, ...]:
        ctx.hooks = hooks
        ctx.set_materialize_grads(False)
        return inputs

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor | None) -> tuple[Any, ...]:
        ctx.hooks.post_backward()
        return (None, *grads)
