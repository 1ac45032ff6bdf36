"""DedicatedParamGroup: the owned parameters of one hook module, and how their weights come and go.

All parameters with the same owner column and dtype share one flat buffer, so that a group costs one broadcast per owner
column. Buffers persist as tensor objects; their storage exists only while the group is unsharded. What happens to the
gradients is in ``reduction.py``, to the new weights after a step in ``publication.py``.
"""

from __future__ import annotations

from functools import partial

import torch
import torch.nn as nn

from dmuon_core.comm import CommContext, check_tag, make_tag
from dmuon_core.packing import Packed, by_owner, empty_packed
from dmuon_core.param import DedicatedParam, WeightState
from dmuon_core.publication import Publication
from dmuon_core.reduction import GradReduction
from dmuon_core.streams import Edge, Pending


class DedicatedParamGroup:
    """Owned parameters that are unsharded together, in the forward and backward of ``module``.

    ``unshard`` is collective: every rank calls it for the same groups in the same order. Everything else is local.

    Attributes:
        grads: how the group's gradients reach their owners.
        publication: how new weights reach the owners' replicas.
    """

    def __init__(self, index: int, fqn: str, module: nn.Module, params: list[DedicatedParam], comm: CommContext):
        self.index = index
        self.fqn = fqn
        self.module = module
        self.params = params
        self.requires_gradient_sync = True
        self.grads = GradReduction(self, comm)
        self.publication = Publication(self, comm)
        self._comm = comm
        self._streams = comm.streams
        self._buckets: list[Packed] = []
        self._tags: dict[torch.dtype, torch.Tensor] = {}
        self._pending_unshard: Pending | None = None

    @property
    def state(self) -> WeightState:
        """The state that all weights of the group share."""
        return self.params[0].weight_state

    @property
    def is_unsharded(self) -> bool:
        """Whether the buffers exist."""
        return self.state is not WeightState.SHARDED

    @property
    def has_local_grads(self) -> bool:
        """Whether this rank holds gradients of the group that were not reduced."""
        return any(p.has_local_grad for p in self.params)

    def tag(self, dtype: torch.dtype) -> torch.Tensor:
        """What ends every packed buffer of this group."""
        if dtype not in self._tags:
            with torch.inference_mode(False):
                self._tags[dtype] = make_tag(self.index, dtype, self._comm.device)
        return self._tags[dtype]

    def unshard(self) -> None:
        """Allocate the buffers and start the owners' broadcasts; a no-op if that happened already."""
        if self.is_unsharded:
            return
        self.publication.wait()  # first, so that it cannot reach parameters that have replaced those it was sent for
        self._build_buffers()
        self.publication.catch_up()
        self.publication.is_unread = False
        for bucket in self._buckets:
            self._streams.allocate(bucket.buffer)
            if bucket.owner == self._comm.shard_rank:
                self._streams.current(partial(bucket.pack, lambda param: param.owned._local_tensor), [bucket.buffer])
        self._pending_unshard = self._comm.broadcast([(b.buffer, b.owner) for b in self._buckets], self._broadcast_name)
        self._move_to(WeightState.UNSHARDING)

    def wait_for_unshard(self) -> None:
        """Make the weights usable: UNSHARDING -> UNSHARDED; a no-op without a broadcast in flight."""
        if self._pending_unshard is None:
            return
        pending, self._pending_unshard = self._pending_unshard, None
        try:
            self._streams.wait(pending, Edge.BROADCAST_BEFORE_COMPUTE)
        finally:  # also after a failure, so that the buffers can be freed
            self._move_to(WeightState.UNSHARDED)
        for bucket in self._buckets:
            if bucket.owner != self._comm.shard_rank:
                check = partial(check_tag, bucket.buffer, bucket.tag, self._broadcast_name)
                self._streams.current(check, [bucket.buffer])

    def start_computing(self) -> None:
        """Unshard if needed, wait, and let the modules show the plain parameters."""
        self.unshard()
        self.wait_for_unshard()
        if self.state is WeightState.UNSHARDED:
            for param in self.params:
                param.show_unsharded()

    def stop_computing(self) -> None:
        """Let the modules show the parameters at rest again; keeps the buffers."""
        if self.state is WeightState.COMPUTING:
            for param in self.params:
                param.hide_unsharded()

    def reshard(self) -> None:
        """Free the buffers from any state; a no-op if they do not exist."""
        self.wait_for_unshard()
        self.stop_computing()
        if self.is_unsharded:
            for bucket in self._buckets:
                self._streams.free(bucket.buffer)
            self._move_to(WeightState.SHARDED)

    def _move_to(self, state: WeightState) -> None:
        for param in self.params:
            param.move_to(state)

    def _check_gradient_in_time(self, param: DedicatedParam, _: torch.Tensor) -> None:
        if self.state in (WeightState.SHARDED, WeightState.UNSHARDING):
            raise RuntimeError(
                f"'{param.fqn}' got a gradient outside the backward of '{self.fqn}': the loss has a term that this "
                "module computes and does not return (it keeps it on itself, say), so its weights were not there for "
                "it. Return the term with the module's output, or choose an enclosing module with "
                "dedicate_params(hook_boundary_predicate=...)"
            )

    @property
    def _broadcast_name(self) -> str:
        return f"broadcast of the weights of '{self.fqn}'"

    def _build_buffers(self) -> None:
        """Make the flat buffers, and the plain parameters as views into them; again after a change of dtype."""
        for param in self.params:
            param.adopt_replaced_rest()
            if param.rest.device != self._comm.device:
                raise RuntimeError(
                    f"'{param.fqn}' is on {param.rest.device}, its mesh is on {self._comm.device}: materialize "
                    "the model there (model.to_empty(device=...) and initialize, or model.to(device)) before the "
                    "first forward"
                )
        if self._buckets and all(p.unsharded is not None and p.unsharded.dtype == p.compute_dtype for p in self.params):
            return
        # Outside inference mode: these tensors outlive an evaluation that happens to come first.
        with torch.inference_mode(False):
            self._buckets = []
            for (owner, _, dtype), params in by_owner(self.params, lambda p: (p.owner, 0, p.compute_dtype)):
                bucket = empty_packed(owner, 0, params, dtype, self.tag(dtype))
                self._streams.allocate(bucket.buffer)  # views need storage to be made
                for param, view in bucket.views():
                    # A hook needs a gradient at this moment; show_unsharded freezes what is frozen by then.
                    param.unsharded = nn.Parameter(view)
                    param.unsharded.register_post_accumulate_grad_hook(partial(self._check_gradient_in_time, param))
                self._streams.free(bucket.buffer)
                self._buckets.append(bucket)
