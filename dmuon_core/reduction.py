"""GradReduction: how one group's gradients reach their owners.

Every rank packs what it has, zeros where it has nothing, one buffer per owner. First each row of the mesh averages onto
its rank in the owner's column; on a 2-D mesh that column then averages onto the owner. The owner keeps the buffer: the
gradients at rest are views into it.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

import torch

from dmuon_core.comm import CommContext, check_tag
from dmuon_core.packing import Packed, by_owner, empty_packed
from dmuon_core.param import DedicatedParam, GradState
from dmuon_core.streams import Edge, Pending

if TYPE_CHECKING:
    from dmuon_core.group import DedicatedParamGroup


@dataclass
class ReducedGrad:
    """One parameter's averaged gradient in its rest dtype on the owner, None elsewhere, and if this rank had one."""

    param: DedicatedParam
    local: torch.Tensor | None
    had_local: bool


class GradReduction:
    """The gradients of ``group`` on their way. :meth:`start` and :meth:`go_on_over_replicas` are collective."""

    def __init__(self, group: DedicatedParamGroup, comm: CommContext) -> None:
        self._group = group
        self._comm = comm
        self._streams = comm.streams
        self._packed: list[Packed] = []
        self._had_local: dict[DedicatedParam, bool] = {}
        self._pending: Pending | None = None
        self._in_window: set[DedicatedParam] = set()  # trainable in a backward that sent nothing

    def accumulate(self) -> None:
        """Keep this backward's gradients on this rank. Local."""
        self._in_window |= {p for p in self._group.params if p.rest.requires_grad}
        for param in self._group.params:
            if param.unsharded is not None:
                param.accumulate_local_grad()

    def start(self) -> None:
        """Pack this rank's gradients and start averaging them along the row."""
        # One that was frozen inside a window is sent too: its gradient would come out of a later step.
        trainable = [p for p in self._group.params if p.rest.requires_grad or p in self._in_window]
        self._in_window.clear()
        if not trainable:
            return
        self._had_local = {param: param.has_local_grad for param in trainable}
        for (owner, replicate, dtype), params in by_owner(
            trainable, lambda p: (p.owner, p.owner_replicate, p.reduce_dtype)
        ):
            packed = empty_packed(owner, replicate, params, dtype, self._group.tag(dtype))
            self._streams.allocate(packed.buffer)
            self._streams.current(partial(_pack, packed, self._comm.gradient_divisor), [packed.buffer])
            self._packed.append(packed)
            for param in params:
                param.move_grad_to(GradState.REDUCING)
        self._pending = self._comm.reduce([(p.buffer, p.owner) for p in self._packed], self._name)

    def go_on_over_replicas(self) -> None:
        """Average the row's results along the owners' column, on the ranks of that column. A no-op on a 1-D mesh."""
        mine = [p for p in self._packed if p.owner == self._comm.shard_rank]
        if self._pending is not None and self._comm.replicate_size > 1 and mine:
            sent = [(p.buffer, p.owner_replicate) for p in mine]
            self._pending = self._comm.replicate_reduce(sent, self._pending, f"{self._name} over replicas")

    def wait(self) -> list[ReducedGrad]:
        """Finish what is in flight and hand out its result, once per parameter; empty without one. Local."""
        if self._pending is None:
            return []
        pending, self._pending = self._pending, None
        packed, self._packed = self._packed, []
        for part in packed:
            for param in part.params:
                param.move_grad_to(GradState.LOCAL)
        self._streams.wait(pending, Edge.REDUCE_BEFORE_USE)
        self._streams.hand_over()
        return [grad for part in packed for grad in self._unpack(part)]

    def drop(self) -> None:
        """Forget every gradient that has not reached ``rest.grad``. Local."""
        self.wait()
        for param in self._group.params:
            param.take_local_grad()

    @property
    def _name(self) -> str:
        return f"reduce of the gradients of '{self._group.fqn}'"

    def _unpack(self, packed: Packed) -> list[ReducedGrad]:
        is_owner = (packed.owner, packed.owner_replicate) == (self._comm.shard_rank, self._comm.replicate_rank)
        if not is_owner:
            self._streams.free(packed.buffer)
            return [ReducedGrad(param, None, self._had_local[param]) for param in packed.params]
        check_tag(packed.buffer, packed.tag, self._name)
        return [ReducedGrad(param, view.to(param.rest.dtype), self._had_local[param]) for param, view in packed.views()]


def _pack(packed: Packed, divisor: int) -> None:
    packed.pack(lambda param: param.take_local_grad())
    if divisor != 1:
        packed.buffer.div_(divisor)
