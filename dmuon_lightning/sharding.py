"""What every integration does to a module: dedicate its matrices, shard the rest, register its step methods."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from weakref import WeakKeyDictionary

import torch
import torch.nn as nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from torch.utils.weak import WeakIdKeyDictionary

from dmuon_core import DedicatedModel, dedicate_params, register_forward_method, reset
from dmuon_core.registry import find_dedicated, get_dedicated, note_replaced
from dmuon_core.targets import muon_targets
from dmuon_lightning._lightning import MisconfigurationException
from dmuon_lightning.settings import Settings


@dataclass
class _Preparation:
    """How a module was dedicated, the names of its parameters from before, and whether FSDP2 has the rest already."""

    settings: Settings
    before: Mapping[nn.Parameter, str] = field(default_factory=WeakIdKeyDictionary)
    is_complete: bool = False


_prepared: WeakKeyDictionary[DedicatedModel, _Preparation] = WeakKeyDictionary()


def shard_module(
    module: nn.Module, mesh: DeviceMesh, settings: Settings, *, forward_methods: Iterable[str] = ()
) -> DedicatedModel:
    """Dedicate the Muon targets of ``module`` and give everything else to FSDP2, in place. Collective over ``mesh``.

    The hook modules of the owned matrices are FSDP2's modules too, and ``module`` is the root of both. Modules on
    which ``fully_shard`` was called after :func:`dedicate_module` stay as they are. A module that this function has
    prepared before (a second ``fit``, a validation before it) is only brought back to rest.

    Args:
        module: the whole model; in Lightning the LightningModule itself, so that parameters that sit directly on it are
            synchronized as well.
        mesh: data-parallel mesh, 1-D or 2-D (replicate, shard).
        settings: the strategy's arguments.
        forward_methods: methods of ``module`` that a trainer calls instead of its forward.

    Raises:
        ValueError: see :func:`dmuon_core.dedicate_params`; or someone else has called it, or ``fully_shard``, on the
            module or a part of it.
        MisconfigurationException: layers were built after the first ``fully_shard``, or in place of prepared ones.
    """
    if is_prepared(module):
        dedicated = get_dedicated(module)
        _check_same_layers(dedicated)
        _check_same_settings(_prepared[dedicated].settings, settings)
        reset(module)  # an earlier run may have been interrupted in a backward
        return dedicated
    if _is_dedicated_here(module):  # by the first fully_shard of the user
        _check_none_missed(module, settings)
    else:
        dedicate_module(module, mesh, settings)
    dedicated = get_dedicated(module)
    preparation = _prepared[dedicated]
    policy = settings.mp_policy or MixedPrecisionPolicy()
    if settings.mp_policy is None and _reduces_below_float32(module):
        policy = MixedPrecisionPolicy(reduce_dtype=torch.float32)  # as owned gradients are
    for unit in reversed(_units(dedicated, settings)):  # inner modules first
        if unit is not module and not isinstance(unit, FSDPModule):
            fully_shard(unit, mesh=mesh, reshard_after_forward=settings.reshard_after_forward, mp_policy=policy)
    if not isinstance(module, FSDPModule):
        fully_shard(module, mesh=mesh, mp_policy=policy)
    for name in forward_methods:
        user_method = getattr(module, name)
        register_forward_method(module, name)
        # Trainers look one decorator deep to learn which arguments a step method takes.
        getattr(module, name).__wrapped__ = user_method
    kept = set(module.parameters())
    for param, fqn in preparation.before.items():
        if param not in kept:
            note_replaced(param, fqn)  # as dedicate_params does for its own
    preparation.is_complete = True
    return dedicated


def dedicate_module(module: nn.Module, mesh: DeviceMesh, settings: Settings) -> DedicatedModel:
    """The first part of :func:`shard_module`: what must come before any ``fully_shard``. Collective over ``mesh``."""
    _check_plain(module)
    preparation = _Preparation(settings)
    for name, param in module.named_parameters():
        preparation.before[param] = name  # type: ignore[index]
    dedicated = dedicate_params(
        module,
        mesh,
        settings.targets_in(module),
        hook_boundary_predicate=settings.boundary(),
        hook_boundary_strict=settings.auto_wrap_policy is None,
        reshard_after_forward=settings.reshard_after_forward,
        replicate_async=settings.replicate_async,
        mp_policy=settings.mp_policy,
        master_dtype=settings.master_dtype,
        split=settings.split,
        max_owned_bytes=settings.max_owned_bytes,
        flops=settings.flops,
    )
    _prepared[dedicated] = preparation
    return dedicated


def is_prepared(module: nn.Module) -> bool:
    """Whether :func:`shard_module` has been called on ``module``. Local."""
    return _is_dedicated_here(module) and _prepared[get_dedicated(module)].is_complete


def names_before_sharding(module: nn.Module) -> Mapping[nn.Parameter, str]:
    """Parameter from before :func:`shard_module` -> its name, for those that still live. Local."""
    return _prepared[get_dedicated(module)].before


def _is_dedicated_here(module: nn.Module) -> bool:
    dedicated = find_dedicated(module)
    return dedicated is not None and dedicated.model is module and dedicated in _prepared


def _units(dedicated: DedicatedModel, settings: Settings) -> list[nn.Module]:
    """The modules to shard one by one, in module order: those that carry hooks, and those that the user names."""
    hooked = {group.module for group in dedicated.groups}
    named: Callable[[nn.Module], bool] | None = settings.boundary() if settings.auto_wrap_policy else None
    return [m for m in dedicated.model.modules() if m in hooked or (named is not None and named(m))]


def _reduces_below_float32(module: nn.Module) -> bool:
    return any(p.dtype in (torch.bfloat16, torch.float16) for p in module.parameters())


def _check_plain(module: nn.Module) -> None:
    for fqn, param in module.named_parameters():
        if isinstance(param, DTensor):
            raise ValueError(
                f"'{fqn}' is sharded already: this strategy calls dedicate_params itself, and before any fully_shard. "
                "Build plain layers; with the Trainer, fully_shard may be called in configure_model, nowhere earlier, "
                "and dedicate_params not at all"
            )


def _check_none_missed(module: nn.Module, settings: Settings) -> None:
    predicate = settings.targets_in(module)
    if predicate is None:
        targets = muon_targets(module)
    else:
        targets = {name: p for name, p in module.named_parameters() if predicate(name, p)}
    owned = {id(param.rest) for param in get_dedicated(module).params}
    missed = [name for name, p in targets.items() if id(p) not in owned]
    if missed:
        raise MisconfigurationException(
            f"'{missed[0]}' was built, or became a hidden matrix, after the first fully_shard in configure_model, when "
            "matrices get their owners: build all layers first, then call fully_shard"
        )


def _check_same_layers(dedicated: DedicatedModel) -> None:
    found = set(dedicated.model.modules())
    for group in dedicated.groups:
        if group.module not in found:
            raise MisconfigurationException(
                f"'{group.fqn}' was replaced after it was sharded: configure_model runs again for every fit, "
                "validate, test and predict, so return from it at once if the layers exist"
            )


def _check_same_settings(before: Settings, now: Settings) -> None:
    # Functions are not compared: one that is written anew for every Trainer means the same.
    for name in ("replicate_size", "reshard_after_forward", "replicate_async", "mp_policy", "master_dtype"):
        was, is_ = getattr(before, name), getattr(now, name)
        if was != is_:
            raise MisconfigurationException(
                f"this module was sharded with {name}={was!r}, and the strategy now says {name}={is_!r}: build the "
                "module anew (and load its weights from a checkpoint), or keep the strategy's arguments"
            )
