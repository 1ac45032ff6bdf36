"""GradPipeline: the reduces in flight during one backward, and how their results come to rest."""

from __future__ import annotations

from functools import partial

import torch

from dmuon_core.comm import CommContext
from dmuon_core.group import DedicatedParamGroup
from dmuon_core.reduction import ReducedGrad
from dmuon_core.streams import Edge


class GradPipeline:
    """The gradients of all groups on their way to the owners. Collective: all ranks reduce the same groups in order."""

    def __init__(self, comm: CommContext) -> None:
        self._comm = comm
        self._reducing: DedicatedParamGroup | None = None  # along its row
        self._reducing_replicas: DedicatedParamGroup | None = None  # along the column
        self._collected: list[ReducedGrad] = []

    def start(self, group: DedicatedParamGroup) -> None:
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

    def finish(self) -> list[ReducedGrad]:
        """Wait for everything in flight and hand out all results since the last call."""
        while self._reducing is not None or self._reducing_replicas is not None:
            self._bring_reduces_on()
        collected, self._collected = self._collected, []
        return collected

    def bring_to_rest(self) -> None:
        """Finish, and put gradients at rest on every rank, for parameters that had one on any, as in one process."""
        grads = self.finish()
        if not grads:
            return
        streams = self._comm.streams
        mine = torch.tensor([g.had_local for g in grads], dtype=torch.uint8, device=self._comm.device)
        flags = torch.empty_like(mine)
        streams.allocate(flags)
        streams.current(partial(flags.copy_, mine), [flags])
        streams.wait(self._comm.any_rank(flags), Edge.FLAGS_BEFORE_USE)
        streams.hand_over()
        # A rank that has every gradient itself knows the answer and need not wait for the device.
        exists = [True] * len(grads) if all(g.had_local for g in grads) else flags.bool().tolist()
        streams.free(flags)
        for grad, there in zip(grads, exists, strict=True):
            if there:
                grad.param.add_reduced_grad(grad.local)
