"""DedicatedModel: what the groups of one model share, and what happens at the borders of a forward and a backward."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any, NoReturn

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.autograd import Variable
from torch.distributed.device_mesh import DeviceMesh

from dmuon_core import fsdp2
from dmuon_core.comm import CommContext, CommStats
from dmuon_core.group import DedicatedParamGroup
from dmuon_core.hooks import GroupHooks
from dmuon_core.in_backward import in_backward
from dmuon_core.optim.split import SplitRule
from dmuon_core.order import GroupOrder
from dmuon_core.param import DedicatedParam, WeightState
from dmuon_core.partition import Assignment
from dmuon_core.pipeline import GradPipeline
from dmuon_core.publication import EarlyPublication


class DedicatedModel:
    """The state that :func:`dmuon_core.dedicate_params` leaves on a model.

    Attributes:
        mesh: the data-parallel device mesh.
        groups: one per hook module, in module order.
        assignment: who owns what, and how balanced that is.
        split: which matrices a parameter stands for, see `dedicate_params`.
        stats: exact counts of collectives and bytes.
    """

    def __init__(
        self,
        model: nn.Module,
        mesh: DeviceMesh,
        groups: list[DedicatedParamGroup],
        assignment: Assignment,
        comm: CommContext,
        reshard_after_forward: bool,
        replicate_async: bool,
        split: SplitRule | None = None,
    ) -> None:
        self.model = model
        self.mesh = mesh
        self.groups = groups
        self.assignment = assignment
        self.replicate_async = replicate_async
        self.split = split
        self._comm = comm
        self._entries: list[str] = []  # methods of the model that are running, outermost first
        self._forward_completed = False
        self._end_of_backward_queued = False
        self._register_root_hooks()
        self._hooks = [GroupHooks(group, self) for group in groups]
        outermost_first = sorted(self._hooks, key=lambda hooks: hooks.group.module is not model)
        self.order = GroupOrder(outermost_first, reshard_after_forward, comm)
        self.grads = GradPipeline(comm)
        self._published_early: set[DedicatedParamGroup] = set()  # by the optimizer step that is ending

    @property
    def params(self) -> list[DedicatedParam]:
        """Every owned parameter, in group order."""
        return [param for group in self.groups for param in group.params]

    @property
    def stats(self) -> CommStats:
        """Exact counts of collectives and bytes on this rank."""
        return self._comm.stats

    @property
    def place(self) -> tuple[int, tuple[int, int]]:
        """This process: its rank, and its (replicate, shard) coordinates on the mesh."""
        return dist.get_rank(), (self._comm.replicate_rank, self._comm.shard_rank)

    def gather(self, value: Any) -> list[Any]:
        """Every rank's picklable ``value``. Collective over the mesh."""
        return self._comm.gather(value)

    def hooks_on(self, module: nn.Module) -> list[GroupHooks]:
        """The hooks of the groups on ``module``."""
        return [hooks for hooks in self._hooks if hooks.group.module is module]

    # Borders of a forward

    def _register_root_hooks(self) -> None:
        model = self.model

        @torch._dynamo.disable(recursive=True)
        def first_pre_hook(module: nn.Module, args: Any) -> None:
            # Only now fully_shard has registered its hooks. Ours enclose them: they mend FSDP2's state too after an
            # iteration that raised, and free what it keeps after an evaluation.
            handle.remove()
            model.register_forward_pre_hook(pre_hook, prepend=True)
            model.register_forward_hook(completed_hook)
            model.register_forward_hook(end_hook, always_call=True)
            self.begin_root_forward("forward")

        @torch._dynamo.disable(recursive=True)
        def pre_hook(module: nn.Module, args: Any) -> None:
            self.begin_root_forward("forward")

        @torch._dynamo.disable(recursive=True)
        def completed_hook(module: nn.Module, args: Any, output: Any) -> None:
            self._forward_completed = True

        @torch._dynamo.disable(recursive=True)
        def end_hook(module: nn.Module, args: Any, output: Any) -> None:
            self.end_root_forward("forward", raised=not self._forward_completed)

        handle = model.register_forward_pre_hook(first_pre_hook)
        model.register_state_dict_pre_hook(lambda *_: self.settle())
        model.register_load_state_dict_pre_hook(lambda *_: self.settle())

    def begin_root_forward(self, entry: str) -> None:
        """Start a forward of the whole model by its method ``entry``, from rest. Local unless the last one raised.

        One method may call another, as ``training_step`` calls ``forward``; the outermost one is the border.
        """
        if in_backward():
            return  # a checkpoint around the whole model recomputes it
        self._forward_completed = False
        if entry in self._entries or self._backward_was_interrupted():
            self.reset()
        self._entries.append(entry)
        if len(self._entries) == 1:
            self.order.begin_forward()

    def end_root_forward(self, entry: str, *, raised: bool) -> None:
        """End what :meth:`begin_root_forward` started; after an exception bring everything back to rest."""
        if in_backward() or entry not in self._entries:
            return
        del self._entries[self._entries.index(entry) :]
        if self._entries:
            return
        if raised:
            self.reset()
            return
        self.order.end_forward()
        self.hand_over()
        if not torch.is_grad_enabled():
            # FSDP2 keeps its root unsharded for a backward that will not come. Until then the model would show
            # parameters without their gradients, and keep stale weights if it is stepped.
            fsdp2.reshard(self.model)

    def _backward_was_interrupted(self) -> bool:
        return self._end_of_backward_queued or fsdp2.backward_was_interrupted(self.model)

    @property
    def in_root_forward(self) -> bool:
        """Whether a method of the model is running, so that groups follow one another in a known order."""
        return bool(self._entries)

    def is_nested_call(self, module: nn.Module) -> bool:
        """Whether ``module`` is the model itself, called by one of its own methods."""
        return module is self.model and len(self._entries) > 1

    # Borders of a backward

    def queue_end_of_backward(self) -> None:
        """Ask the autograd engine to call :meth:`_end_of_backward` when it is done."""
        if not self._end_of_backward_queued:
            self._end_of_backward_queued = True
            queue = Variable._execution_engine.queue_callback
            # By way of a first callback, so that ours runs after FSDP2's, whichever was queued first: it waits for
            # other ranks, and these may be waiting in FSDP2's collectives.
            queue(lambda: queue(self._end_of_backward))

    @torch._dynamo.disable(recursive=True)
    def _end_of_backward(self) -> None:
        for hooks in reversed(self._hooks):
            hooks.end_backward()
        self.grads.bring_to_rest()
        self.order.end_backward()
        self._end_of_backward_queued = False
        self.hand_over()

    def hand_over(self) -> None:
        """The user's operations follow on the current stream; see :class:`dmuon_core.streams.Streams`."""
        self._comm.streams.hand_over()

    # At any time

    @contextmanager
    def publishing_as_updated(self, param_ids: set[int]) -> Iterator[Callable[[torch.Tensor], None]]:
        """See :func:`dmuon_core.registry.publishing_as_updated`. Does nothing with a synchronous publish."""
        if self._comm.replicate_size == 1 or not self.replicate_async:
            yield lambda param: None
            return
        early = EarlyPublication(self.groups, param_ids)

        def updated(param: torch.Tensor) -> None:
            if early.updated(param):
                self.hand_over()

        yield updated
        self._published_early = early.published  # not after an exception: then no step has ended

    def after_step(self, param_ids: set[int]) -> None:
        """Publish the new weights of the optimizer's parameters, and free every buffer, ours and FSDP2's.

        The buffers hold the weights from before the step. Collective over the columns of a 2-D mesh, else local.
        """
        published, self._published_early = self._published_early, set()
        stepped = [group for group in self.groups if any(id(p.rest) in param_ids for p in group.params)]
        for group in stepped:
            if group not in published:
                group.publication.start()
        if not self.replicate_async:
            for group in stepped:
                group.publication.wait()
        if in_backward():
            self.hand_over()
            return  # an optimizer that steps in backward, parameter by parameter
        for hooks in self._hooks:
            if hooks.group.state is not WeightState.COMPUTING:
                hooks.group.reshard()
        self.order.invalidate()
        fsdp2.reshard(self.model)
        self.hand_over()

    def reset(self) -> None:
        """Bring everything back to rest after an exception in forward or backward, FSDP2's state too.

        Gradients of that iteration that had not arrived at ``.grad`` are lost, including those accumulated under
        ``no_sync``; what had arrived stays until ``zero_grad``. Call it on every rank.
        """
        self.grads.finish()
        for hooks in self._hooks:
            hooks.reset()
        self.order.abandon()
        self._entries = []
        self._end_of_backward_queued = False
        self.hand_over()
        fsdp2.reset(self.model)

    def settle(self) -> None:
        """Bring everything back to rest if an iteration was interrupted; no effect on one that is running.

        Called before the model's parameters are read from outside: by ``state_dict``, or by an optimizer that is built.
        """
        if in_backward() or self.in_root_forward:
            return
        left_behind = any(hooks.group.state is WeightState.COMPUTING for hooks in self._hooks)
        if left_behind or self._backward_was_interrupted():
            self.reset()

    def drop_pending(self, params: Iterable[torch.Tensor]) -> None:
        """Forget gradients of ``params`` that were not reduced: those of an open accumulation window. Local."""
        self.settle()
        ids = {id(p) for p in params}
        for hooks in self._hooks:
            for param in hooks.group.params:
                if id(param.rest) in ids:
                    param.take_local_grad()
        fsdp2.drop_pending(self.model, ids)

    def set_requires_gradient_sync(self, modules: set[nn.Module], sync: bool) -> None:
        """Set for the groups on ``modules`` whether the next backward reduces their gradients. Local."""
        for group in self.groups:
            if group.module in modules:
                group.requires_gradient_sync = sync

    def __deepcopy__(self, memo: Any) -> NoReturn:
        raise RuntimeError(
            "a model with dedicated parameters cannot be copied with copy.deepcopy, like any FSDP2 model: copy it "
            "before dedicate_params, or copy weights through state_dict()"
        )
