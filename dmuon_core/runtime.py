"""DedicatedModel: what the groups of one model share, and what happens at the borders of a forward and a backward."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any, NoReturn

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.autograd import Variable
from torch.distributed.device_mesh import DeviceMesh

from dmuon_core import fsdp2
from dmuon_core.comm import CommContext, CommStats
from dmuon_core.group import DedicatedParamGroup
from dmuon_core.hooks import GroupHooks, in_backward
from dmuon_core.param import DedicatedParam, WeightState
from dmuon_core.partition import Assignment
from dmuon_core.publication import EarlyPublication
from dmuon_core.reduction import ReducedGrad
from dmuon_core.streams import Edge


class DedicatedModel:
    """The state that :func:`dmuon_core.dedicate_params` leaves on a model.

    Attributes:
        mesh: the data-parallel device mesh.
        groups: one per hook module, in module order.
        assignment: who owns what, and how balanced that is.
        stats: exact counts of collectives and bytes.
        reshard_after_forward: True for Z3, False for Z2.
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
    ) -> None:
        self.model = model
        self.mesh = mesh
        self.groups = groups
        self.assignment = assignment
        self.reshard_after_forward = reshard_after_forward
        self.replicate_async = replicate_async
        self._comm = comm
        self._reducing: DedicatedParamGroup | None = None  # along its row
        self._reducing_replicas: DedicatedParamGroup | None = None  # along the column
        self._collected: list[ReducedGrad] = []
        self._entries: list[str] = []  # methods of the model that are running, outermost first
        self._forward_completed = False
        self._end_of_backward_queued = False
        self._pass = 0  # number of the current root forward
        self._unsharded_in_pass: dict[GroupHooks, int] = {}
        self._prefetched: GroupHooks | None = None
        self._kept: GroupHooks | None = None
        self._register_root_hooks()
        self._hooks = [GroupHooks(group, self) for group in groups]
        # The order of the last complete forward predicts the next one; the first is guessed from the module tree.
        self._expected = [h for h in self._hooks if h.group.module is not model]
        self._expected = [h for h in self._hooks if h.group.module is model] + self._expected
        self._this_forward: list[GroupHooks] = []
        self._published_early: set[DedicatedParamGroup] = set()  # by the optimizer step that is ending
        self._backward_order: list[GroupHooks] = []  # of all forwards with grad that have had no backward yet

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
            self._pass += 1
            self._this_forward = []

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
        self._drop_stale_prefetch(None)
        self.hand_over()
        self._expected = self._this_forward
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

    def prepare_for_forward(self, hooks: GroupHooks) -> None:
        """Free what an earlier pass left behind, so that the group computes with the weights of this moment."""
        if in_backward():
            return
        self._drop_stale_prefetch(hooks)
        if self._kept is not None and self._kept is not hooks:
            self._kept.group.reshard()
        self._kept = None
        if not (self.in_root_forward and self._unsharded_in_pass.get(hooks) == self._pass):
            hooks.group.reshard()
        self._note_unsharded(hooks)
        if self.in_root_forward:
            self._this_forward.append(hooks)

    def prefetch_for_forward(self, hooks: GroupHooks) -> None:
        """Start the broadcast of the group that ran next last time. Collective when it does something."""
        if not self.in_root_forward or in_backward():
            return
        position = len(self._this_forward)
        if position >= len(self._expected) or self._expected[position - 1] is not hooks:
            return  # this forward takes another path
        following = self._expected[position]
        if following.group.publication.is_unread and self._comm.streams.wait_blocks_host:
            return  # this group's compute would wait for the next group's new weights
        if not following.group.is_unsharded:
            following.group.unshard()
            self._note_unsharded(following)
            self._prefetched = following

    def keep_after_forward(self, hooks: GroupHooks, grad_enabled: bool) -> bool:
        """Whether the group keeps its buffers for backward: in Z2 all do, in Z3 the one whose backward comes first."""
        if grad_enabled:
            self._backward_order.append(hooks)
        if not grad_enabled:
            return False
        if not self.reshard_after_forward:
            return True
        position = len(self._this_forward)
        is_last = self.in_root_forward and position >= len(self._expected)
        if is_last:
            self._kept = hooks
        return is_last

    def _drop_stale_prefetch(self, wanted: GroupHooks | None) -> None:
        prefetched, self._prefetched = self._prefetched, None
        if prefetched is not None and prefetched is not wanted:
            prefetched.group.reshard()

    def _note_unsharded(self, hooks: GroupHooks) -> None:
        self._unsharded_in_pass[hooks] = self._pass
        self._count_unsharded(also=hooks)

    def _count_unsharded(self, also: GroupHooks) -> None:
        count = sum(h.group.is_unsharded or h is also for h in self._hooks)
        self.stats.max_unsharded_groups = max(self.stats.max_unsharded_groups, count)

    # Borders of a backward

    def queue_end_of_backward(self) -> None:
        """Ask the autograd engine to call :meth:`_end_of_backward` when it is done."""
        if not self._end_of_backward_queued:
            self._end_of_backward_queued = True
            queue = Variable._execution_engine.queue_callback
            # By way of a first callback, so that ours runs after FSDP2's, whichever was queued first: it waits for
            # other ranks, and these may be waiting in FSDP2's collectives.
            queue(lambda: queue(self._end_of_backward))

    def prefetch_for_backward(self, hooks: GroupHooks) -> None:
        """Start the broadcast of the group whose forward ran before this one's. Collective when it does something."""
        self._count_unsharded(also=hooks)
        order = self._backward_order
        while order and order.pop() is not hooks:
            pass  # groups in between had no gradient
        if order and not order[-1].group.is_unsharded:
            order[-1].group.unshard()
            self._count_unsharded(also=order[-1])

    def reduce(self, group: DedicatedParamGroup) -> None:
        """Start reducing the group's gradients, and bring what is in flight one step on.

        A group's gradients go along the row during the next group's backward and along the column during the one after
        it, so at most one group is on each way: its packed buffers are as large as the group.
        """
        self._bring_reduces_on()
        if self._reducing_replicas is group:  # a module that is used more than once
            self._bring_reduces_on()
        group.grads.start()
        self._reducing = group

    def _bring_reduces_on(self) -> None:
        if self._reducing_replicas is not None:
            group, self._reducing_replicas = self._reducing_replicas, None
            self._collected += group.grads.wait()
        if self._reducing is not None:
            group, self._reducing = self._reducing, None
            group.grads.go_on_over_replicas()
            if self._comm.replicate_size == 1:
                self._collected += group.grads.wait()
            else:
                self._reducing_replicas = group

    def _finish_reduces(self) -> list[ReducedGrad]:
        while self._reducing is not None or self._reducing_replicas is not None:
            self._bring_reduces_on()
        collected, self._collected = self._collected, []
        return collected

    @torch._dynamo.disable(recursive=True)
    def _end_of_backward(self) -> None:
        for hooks in reversed(self._hooks):
            hooks.end_backward()
        self._add_reduced_grads(self._finish_reduces())
        self._backward_order.clear()
        self._prefetched = self._kept = None
        self._end_of_backward_queued = False
        self.hand_over()

    def hand_over(self) -> None:
        """The user's operations follow on the current stream; see :class:`dmuon_core.streams.Streams`."""
        self._comm.streams.hand_over()

    def _add_reduced_grads(self, grads: list[ReducedGrad]) -> None:
        """Put the gradients at rest on every rank, for the parameters that had one on any rank, as in one process."""
        if not grads:
            return
        streams = self._comm.streams
        mine = torch.tensor([g.had_local for g in grads], dtype=torch.uint8, device=self._comm.device)
        flags = torch.empty_like(mine)
        streams.allocate(flags)
        streams.current(partial(flags.copy_, mine), [flags])
        streams.wait(self._comm.any_rank(flags), Edge.FLAGS_BEFORE_USE)
        self.hand_over()
        # A rank that has every gradient itself knows the answer and need not wait for the device.
        exists = [True] * len(grads) if all(g.had_local for g in grads) else flags.bool().tolist()
        streams.free(flags)
        for grad, there in zip(grads, exists, strict=True):
            if there:
                grad.param.add_reduced_grad(grad.local)

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
        self._backward_order.clear()  # graphs from before the step have had their backward, or never will
        self._pass += 1  # nothing that was unsharded before is fresh, even inside one training_step
        for hooks in self._hooks:
            if hooks.group.state is not WeightState.COMPUTING:
                hooks.group.reshard()
        self._prefetched = self._kept = None
        fsdp2.reshard(self.model)
        self.hand_over()

    def reset(self) -> None:
        """Bring everything back to rest after an exception in forward or backward, FSDP2's state too.

        Gradients of that iteration that had not arrived at ``.grad`` are lost, including those accumulated under
        ``no_sync``; what had arrived stays until ``zero_grad``. Call it on every rank.
        """
        self._finish_reduces()
        for hooks in self._hooks:
            hooks.reset()
        self._backward_order.clear()
        self._prefetched = self._kept = None
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
