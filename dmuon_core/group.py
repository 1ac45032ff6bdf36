"""DedicatedParamGroup: the owned parameters of one hook module, their packed buffers, and how these move.

All parameters with the same owner and dtype share one flat buffer, so that a group costs one broadcast and one reduce
per owner. Buffers persist as tensor objects; their storage exists only while the group is unsharded.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
import torch.nn as nn

from dmuon_core.comm import TAG_NUMEL, CommContext, check_tag, make_tag
from dmuon_core.param import DedicatedParam, GradState, WeightState
from dmuon_core.streams import Pending


@dataclass
class Bucket:
    """The parameters of a group with one owner and compute dtype: ``buffer`` is [sum of numel + TAG_NUMEL]."""

    owner: int
    params: list[DedicatedParam]
    buffer: torch.Tensor
    tag: torch.Tensor


@dataclass
class Reduction:
    """Gradients on their way to one owner: ``packed`` is [sum of numel of ``params`` + TAG_NUMEL]."""

    owner: int
    params: list[DedicatedParam]
    packed: torch.Tensor
    tag: torch.Tensor
    had_local: list[bool] = field(default_factory=list)


@dataclass
class ReducedGrad:
    """One parameter's averaged gradient in its rest dtype on the owner, None elsewhere, and if this rank had one."""

    param: DedicatedParam
    local: torch.Tensor | None
    had_local: bool


class DedicatedParamGroup:
    """Owned parameters that are unsharded together, in the forward and backward of ``module``.

    ``unshard``, ``reduce_grads`` and their waits are collective: every rank calls them for the same groups in the same
    order. Everything else is local.
    """

    def __init__(self, index: int, fqn: str, module: nn.Module, params: list[DedicatedParam], comm: CommContext):
        self.index = index
        self.fqn = fqn
        self.module = module
        self.params = params
        self.requires_gradient_sync = True
        self._comm = comm
        self._buckets: list[Bucket] = []
        self._tags: dict[torch.dtype, torch.Tensor] = {}
        self._pending_unshard: Pending | None = None
        self._pending_reduce: tuple[Pending, list[Reduction]] | None = None

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

    # Weights

    def unshard(self) -> None:
        """Allocate the buffers and start the owners' broadcasts; a no-op if that happened already."""
        if self.is_unsharded:
            return
        self._build_buffers()
        rank = self._comm.rank
        buffers = [bucket.buffer for bucket in self._buckets]
        # Autograd may have saved views of these buffers in an earlier forward; their content comes back the same.
        with torch.no_grad(), torch.autograd._unsafe_preserve_version_counter(tuple(buffers)):
            for bucket in self._buckets:
                bucket.buffer.untyped_storage().resize_(bucket.buffer.numel() * bucket.buffer.itemsize)
                if bucket.owner == rank:
                    self._pack_weights(bucket)
            self._pending_unshard = self._comm.broadcast(
                [(bucket.buffer, bucket.owner) for bucket in self._buckets],
                f"broadcast of the weights of '{self.fqn}'",
            )
        self._move_to(WeightState.UNSHARDING)

    def wait_for_unshard(self) -> None:
        """Make the weights usable: UNSHARDING -> UNSHARDED; a no-op without a broadcast in flight."""
        if self._pending_unshard is None:
            return
        pending, self._pending_unshard = self._pending_unshard, None
        try:
            pending.wait()
        finally:  # also after a failure, so that the buffers can be freed
            self._move_to(WeightState.UNSHARDED)
        for bucket in self._buckets:
            if bucket.owner != self._comm.rank:
                check_tag(bucket.buffer, bucket.tag, f"broadcast of the weights of '{self.fqn}'")

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
                bucket.buffer.untyped_storage().resize_(0)
            self._move_to(WeightState.SHARDED)

    def _move_to(self, state: WeightState) -> None:
        for param in self.params:
            param.move_to(state)

    def _pack_weights(self, bucket: Bucket) -> None:
        offset = 0
        for param in bucket.params:
            bucket.buffer[offset : offset + param.numel].copy_(param.owned._local_tensor.reshape(-1))
            offset += param.numel
        bucket.buffer[offset:].copy_(bucket.tag)

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
        by_key: dict[tuple[int, torch.dtype], list[DedicatedParam]] = {}
        for param in self.params:
            by_key.setdefault((param.owner, param.compute_dtype), []).append(param)
        self._buckets = []
        # Outside inference mode: these tensors outlive an evaluation that happens to come first.
        with torch.inference_mode(False):
            for (owner, dtype), params in sorted(by_key.items(), key=lambda item: (item[0][0], str(item[0][1]))):
                numel = sum(p.numel for p in params)
                buffer = torch.empty(numel + TAG_NUMEL, dtype=dtype, device=self._comm.device)
                offset = 0
                for param in params:
                    view = buffer[offset : offset + param.numel].view(param.shape)
                    param.unsharded = nn.Parameter(view, requires_grad=param.rest.requires_grad)
                    offset += param.numel
                buffer.untyped_storage().resize_(0)
                self._buckets.append(Bucket(owner, params, buffer, self._tag(dtype)))

    def _tag(self, dtype: torch.dtype) -> torch.Tensor:
        if dtype not in self._tags:
            self._tags[dtype] = make_tag(self.index, dtype, self._comm.device)
        return self._tags[dtype]

    # Gradients

    def accumulate_grads(self) -> None:
        """Keep this backward's gradients on this rank."""
        for param in self.params:
            if param.unsharded is not None:
                param.accumulate_local_grad()

    def reduce_grads(self) -> None:
        """Pack this rank's gradients, zeros where there is none, and start averaging them onto the owners."""
        reductions = [self._pack_grads(owner, dtype, params) for (owner, dtype), params in self._reduce_keys().items()]
        if reductions:
            pending = self._comm.reduce(
                [(r.packed, r.owner) for r in reductions], f"reduce of the gradients of '{self.fqn}'"
            )
            self._pending_reduce = (pending, reductions)

    def wait_for_reduce(self) -> list[ReducedGrad]:
        """Finish the reduce in flight and hand out its result, once per parameter; empty without one."""
        if self._pending_reduce is None:
            return []
        (pending, reductions), self._pending_reduce = self._pending_reduce, None
        for reduction in reductions:
            for param in reduction.params:
                param.move_grad_to(GradState.LOCAL)
        pending.wait()
        return [grad for reduction in reductions for grad in self._unpack_grads(reduction)]

    def drop_grads(self) -> None:
        """Forget every gradient that has not reached ``rest.grad``."""
        self.wait_for_reduce()
        for param in self.params:
            param.take_local_grad()

    def _reduce_keys(self) -> dict[tuple[int, torch.dtype], list[DedicatedParam]]:
        by_key: dict[tuple[int, torch.dtype], list[DedicatedParam]] = {}
        for bucket in self._buckets:
            for param in bucket.params:
                if param.rest.requires_grad:
                    by_key.setdefault((bucket.owner, param.reduce_dtype), []).append(param)
        return by_key

    def _pack_grads(self, owner: int, dtype: torch.dtype, params: list[DedicatedParam]) -> Reduction:
        numel = sum(p.numel for p in params)
        packed = torch.empty(numel + TAG_NUMEL, dtype=dtype, device=self._comm.device)
        reduction = Reduction(owner, params, packed, self._tag(dtype))
        offset = 0
        for param in params:
            grad = param.take_local_grad()
            reduction.had_local.append(grad is not None)
            target = packed[offset : offset + param.numel]
            if grad is None:
                target.zero_()
            else:
                target.copy_(grad.reshape(-1))
            del grad  # frees it before the next one is copied
            offset += param.numel
            param.move_grad_to(GradState.REDUCING)
        packed[offset:].copy_(reduction.tag)
        return reduction

    def _unpack_grads(self, reduction: Reduction) -> list[ReducedGrad]:
        is_owner = reduction.owner == self._comm.rank
        if is_owner:
            check_tag(reduction.packed, reduction.tag, f"reduce of the gradients of '{self.fqn}'")
        result, offset = [], 0
        for param, had_local in zip(reduction.params, reduction.had_local, strict=True):
            flat = reduction.packed[offset : offset + param.numel]
            offset += param.numel
            local = flat.view(param.shape).to(param.rest.dtype) if is_owner else None
            result.append(ReducedGrad(param, local, had_local))
        return result
