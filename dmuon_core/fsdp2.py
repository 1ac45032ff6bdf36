"""Composition with FSDP2: every patch of torch, and everything that touches FSDP2's private state.

Each patch is listed in ``PATCHES``, checks at import that torch still has the function in the form that it expects, and
raises an error with the torch version otherwise.
"""

from __future__ import annotations

import functools
import inspect
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed._state_dict_utils as state_dict_utils
import torch.distributed.checkpoint.state_dict as dcp_state_dict
import torch.distributed.fsdp._fully_shard._fsdp_init as fsdp_init
import torch.nn as nn
import torch.optim._muon as stock_muon
from torch.distributed.fsdp import FSDPModule

from dmuon_core import checkpoint, registry
from dmuon_core.optim.loading import unwrapped
from dmuon_core.optim.local import local
from dmuon_core.optim.muon import Muon
from dmuon_core.optim.owned import OwnedOptimizer
from dmuon_core.owned_tensor import OwnedTensor


def reshard(model: nn.Module) -> None:
    """Free the unsharded parameters of every FSDP2 module in ``model``. Local."""
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()


def reset(model: nn.Module) -> None:
    """Bring FSDP2 back to rest after an exception in forward or backward, where it has run before. Local."""
    if isinstance(model, FSDPModule) and model._get_fsdp_state()._is_root:
        model.reset_iter_state()
        # It leaves the gradients of modules whose backward had not ended; the next backward would add to them.
        for fsdp_param in _fsdp_params(model):
            _drop_unsharded_grad(fsdp_param)


def backward_was_interrupted(model: nn.Module) -> bool:
    """Whether FSDP2's last backward on ``model`` never came to its end; only meaningful outside a backward. Local."""
    if not isinstance(model, FSDPModule):
        return False
    return bool(model._get_fsdp_state()._state_ctx.post_backward_final_callback_queued)


def drop_pending(model: nn.Module, param_ids: set[int]) -> None:
    """Forget the gradients that FSDP2 has accumulated without communication for these sharded parameters. Local."""
    for fsdp_param in _fsdp_params(model):
        if id(fsdp_param.sharded_param) in param_ids:
            _drop_unsharded_grad(fsdp_param)


def set_requires_gradient_sync(model: nn.Module, sync: bool) -> None:
    """Set gradient synchronization of every group in ``model``, ours and FSDP2's. Local."""
    registry.set_requires_gradient_sync(model.modules(), sync)
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_requires_gradient_sync(sync, recurse=False)


def _fsdp_params(model: nn.Module) -> Iterator[Any]:
    for module in model.modules():
        if isinstance(module, FSDPModule):
            for group in module._get_fsdp_state()._fsdp_param_groups:
                yield from group.fsdp_params


def _drop_unsharded_grad(fsdp_param: Any) -> None:
    if hasattr(fsdp_param, "_unsharded_param"):  # made by the first unshard
        fsdp_param.unsharded_accumulated_grad = None
        fsdp_param.unsharded_param.grad = None


# Patches


@dataclass(frozen=True)
class Patch:
    """One replaced function of torch: where it lives, its leading parameters, what replaces it, and why."""

    holder: Any
    name: str
    parameters: tuple[str, ...]
    replacement: Callable[[Callable[..., Any]], Callable[..., Any]]
    reason: str
    everywhere: bool = False  # also where other modules of torch.distributed imported it by name

    def install(self) -> None:
        """Replace the function, once per process.

        Raises:
            ImportError: if torch has another form of it.
        """
        original = getattr(self.holder, self.name, None)
        if getattr(original, "_dmuon_patch", False):
            return
        if original is None or tuple(inspect.signature(original).parameters)[: len(self.parameters)] != self.parameters:
            raise ImportError(
                f"dmuon_core does not know torch {torch.__version__}: {self.name} has changed, and it is needed so "
                f"that {self.reason}. Use a torch release that this version of dmuon-lightning supports, or update it"
            )
        replacement = functools.wraps(original)(self.replacement(original))
        replacement._dmuon_patch = True  # type: ignore[attr-defined]
        holders = [self.holder]
        if self.everywhere:
            modules = [m for name, m in list(sys.modules.items()) if name.startswith("torch.distributed")]
            holders += [m for m in modules if getattr(m, self.name, None) is original]
        for holder in holders:
            setattr(holder, self.name, replacement)


_waiting: list[Callable[[], None]] = []


@contextmanager
def before_fully_shard(call: Callable[[], None]) -> Iterator[None]:
    """In this context ``call`` runs once, when ``fully_shard`` is first called, before it has done anything. Local."""
    _waiting.append(call)
    try:
        yield
    finally:
        _waiting[:] = [other for other in _waiting if other is not call]


def _ignore_owned(original: Callable[..., Any]) -> Callable[..., Any]:
    def get_managed_states(
        modules: list[nn.Module], ignored_params: set[nn.Parameter] | None = None, *args: Any, **kwargs: Any
    ) -> Any:
        while _waiting:
            _waiting.pop()()
        owned = {p for m in modules for p in m.parameters(recurse=False) if isinstance(p, OwnedTensor)}
        return original(modules, owned | (ignored_params or set()), *args, **kwargs)

    return get_managed_states


def _sync_owned_groups(original: Callable[..., Any]) -> Callable[..., Any]:
    def set_requires_gradient_sync(self: nn.Module, requires_gradient_sync: bool, *, recurse: bool = True) -> None:
        original(self, requires_gradient_sync, recurse=recurse)
        registry.set_requires_gradient_sync(self.modules() if recurse else [self], requires_gradient_sync)

    return set_requires_gradient_sync


def _distribute_to_owners(original: Callable[..., Any]) -> Callable[..., Any]:
    def distribute_tensors(local_state_dict: dict[str, Any], keys: list[str], *args: Any, **kwargs: Any) -> None:
        rest = []
        for key in keys:
            pair = local_state_dict.get(key)
            if isinstance(pair, tuple) and isinstance(pair[0], OwnedTensor):
                pair[0].copy_(pair[1])
                local_state_dict[key] = pair[0]
            else:
                rest.append(key)
        original(local_state_dict, rest, *args, **kwargs)

    return distribute_tensors


def _step_at_home(original: Callable[..., Any]) -> Callable[..., Any]:
    def muon(
        params: list[torch.Tensor],
        grads: list[torch.Tensor],
        muon_momentum_bufs: list[torch.Tensor],
        **options: Any,
    ) -> None:
        stepped: list[tuple[torch.Tensor, ...]] = []
        for p, *grad_and_state in zip(params, grads, muon_momentum_bufs, strict=True):
            if not isinstance(p, OwnedTensor):
                stepped.append((p, *grad_and_state))
                continue
            p.leave_to_home()
            if p.is_home:
                stepped.append((local(p), *map(local, grad_and_state)))
        if stepped:
            original(*map(list, zip(*stepped, strict=True)), **options)

    return muon


def _check_model_state(original: Callable[..., Any]) -> Callable[..., Any]:
    def load_model_state_dict(model: nn.Module, state_dict: dict[str, Any], info: Any) -> Any:
        dedicated = registry.find_dedicated(model)
        if dedicated is None:
            return original(model, state_dict, info)
        if info.broadcast_from_rank0:
            # Torch decides by the state dict, which only rank 0 needs to have: the others would not take part.
            info.handle_model = any(dedicated.gather(info.handle_model))
            state_dict = state_dict if dist.get_rank() == 0 else {}
        problem = None
        if info.handle_model and state_dict:
            saved, current = checkpoint.shapes_of(state_dict), checkpoint.shapes_of(model.state_dict())
            if info.ignore_frozen_params:
                frozen = {checkpoint.canonical_name(n) for n, p in model.named_parameters() if not p.requires_grad}
                current = {name: shape for name, shape in current.items() if name in saved or name not in frozen}
            problem = checkpoint.model_problem(saved, current, strict=info.strict)
        message = f"the checkpoint does not fit {type(model).__name__}: {problem}. {checkpoint.MODEL_REMEDY}"
        checkpoint.raise_everywhere(dedicated, RuntimeError, problem and message)
        return original(model, state_dict, info)

    return load_model_state_dict


def _fit_optimizer_state(original: Callable[..., Any]) -> Callable[..., Any]:
    def load_optim_state_dict(model: nn.Module, optimizers: tuple[Any, ...], state_dict: Any, info: Any) -> None:
        dedicated = registry.find_dedicated(model)
        if dedicated is None or not info.handle_optim:
            return original(model, optimizers, state_dict, info)
        if info.broadcast_from_rank0 and dist.get_rank() != 0:
            state_dict = {}
        problem = None
        if state_dict and not checkpoint.is_by_position(state_dict):
            for optimizer in optimizers:
                dcp_state_dict._init_optim_state(optimizer)
            state_dict, problem = checkpoint.fit_optimizer_state(model, optimizers, state_dict, strict=info.strict)
        message = f"the state does not fit the optimizer of {type(model).__name__}: {problem}. "
        checkpoint.raise_everywhere(dedicated, ValueError, problem and message + checkpoint.OPTIMIZER_ALONE_REMEDY)
        # What fits is not flat. Torch compares a flat state with one that is not if both options are set.
        original(model, optimizers, state_dict, replace(info, flatten_optimizer_state_dict=False))

    return load_optim_state_dict


def _start_from_zero(original: Callable[..., Any]) -> Callable[..., Any]:
    def init_optim_state(optim: Any) -> None:
        own = unwrapped(optim)  # a wrapper may hold steps back, also the one that makes state
        if isinstance(own, Muon | OwnedOptimizer):
            own.init_state()
        else:
            checkpoint.check_state_can_start(own)
        original(own)

    return init_optim_state


PATCHES = [
    Patch(
        fsdp_init,
        "_get_managed_states",
        ("modules", "ignored_params"),
        _ignore_owned,
        "fully_shard, whoever calls it, leaves owned parameters alone",
        everywhere=True,
    ),
    Patch(
        FSDPModule,
        "set_requires_gradient_sync",
        ("self", "requires_gradient_sync"),
        _sync_owned_groups,
        "gradient accumulation without communication holds for owned parameters too",
    ),
    Patch(
        state_dict_utils,
        "_distribute_tensors",
        ("local_state_dict", "keys"),
        _distribute_to_owners,
        "a full state dict that rank 0 broadcasts reaches the owners whole",
        everywhere=True,
    ),
    Patch(
        stock_muon,
        "muon",
        ("params", "grads", "muon_momentum_bufs"),
        _step_at_home,
        "torch.optim.Muon steps owned matrices whole, each on its owner",
    ),
    Patch(
        dcp_state_dict,
        "_load_model_state_dict",
        ("model", "state_dict", "info"),
        _check_model_state,
        "a state dict of another model is an error on every rank before it is loaded",
    ),
    Patch(
        dcp_state_dict,
        "_load_optim_state_dict",
        ("model", "optimizers", "state_dict", "info"),
        _fit_optimizer_state,
        "state of another optimizer is an error on every rank before it is loaded, and flat state loads whole",
    ),
    Patch(
        dcp_state_dict,
        "_init_optim_state",
        ("optim",),
        _start_from_zero,
        "a checkpoint before the first step, or of a parameter that never was stepped, has no step in it",
    ),
]


def install_patches() -> None:
    """Install every patch; called when ``dmuon_core`` is imported."""
    for patch in PATCHES:
        patch.install()
