"""What every integration does to a module: dedicate its matrices, shard the rest, register its step methods."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from weakref import WeakSet

import torch
import torch.nn as nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor

from dmuon_core import DedicatedModel, dedicate_params, register_forward_method, reset
from dmuon_core.registry import find_dedicated, get_dedicated, note_replaced

_prepared: WeakSet[DedicatedModel] = WeakSet()


def shard_module(
    module: nn.Module,
    mesh: DeviceMesh,
    *,
    predicate: Callable[[str, nn.Parameter], bool] | None = None,
    hook_boundary_predicate: Callable[[nn.Module], bool] | None = None,
    reshard_after_forward: bool = True,
    replicate_async: bool = True,
    mp_policy: MixedPrecisionPolicy | None = None,
    master_dtype: torch.dtype | None = torch.float32,
    forward_methods: Iterable[str] = (),
) -> DedicatedModel:
    """Dedicate the Muon targets of ``module`` and give everything else to FSDP2, in place. Collective over ``mesh``.

    The hook modules of the owned matrices are FSDP2's modules too, and ``module`` is the root of both. A module that
    this function has prepared before (a second ``fit``, a validation before it) is only brought back to rest.

    Args:
        module: the whole model; in Lightning the LightningModule itself, so that parameters that sit directly on it are
            synchronized as well.
        mesh: data-parallel mesh, 1-D or 2-D (replicate, shard).
        forward_methods: methods of ``module`` that a trainer calls instead of its forward.

    The other arguments are those of :func:`dmuon_core.dedicate_params`, which says what is raised.

    Raises:
        ValueError: someone else has called ``dedicate_params`` or ``fully_shard`` on the module or a part of it.
    """
    if is_prepared(module):
        reset(module)  # an earlier run may have been interrupted in a backward
        return get_dedicated(module)
    _check_plain(module)
    plain = dict(module.named_parameters())
    dedicated = dedicate_params(
        module,
        mesh,
        predicate,
        hook_boundary_predicate=hook_boundary_predicate,
        reshard_after_forward=reshard_after_forward,
        replicate_async=replicate_async,
        mp_policy=mp_policy,
        master_dtype=master_dtype,
    )
    policy = MixedPrecisionPolicy() if mp_policy is None else mp_policy
    for group in reversed(dedicated.groups):  # inner modules first
        if group.module is not module and not isinstance(group.module, FSDPModule):
            fully_shard(group.module, mesh=mesh, reshard_after_forward=reshard_after_forward, mp_policy=policy)
    fully_shard(module, mesh=mesh, mp_policy=policy)
    for name in forward_methods:
        user_method = getattr(module, name)
        register_forward_method(module, name)
        # Trainers look one decorator deep to learn which arguments a step method takes.
        getattr(module, name).__wrapped__ = user_method
    kept = set(module.parameters())
    for fqn, param in plain.items():
        if param not in kept:
            note_replaced(param, fqn)  # as dedicate_params does for its own
    _prepared.add(dedicated)
    return dedicated


def is_prepared(module: nn.Module) -> bool:
    """Whether :func:`shard_module` has been called on ``module``. Local."""
    dedicated = find_dedicated(module)
    return dedicated is not None and dedicated.model is module and dedicated in _prepared


def _check_plain(module: nn.Module) -> None:
    for fqn, param in module.named_parameters():
        if isinstance(param, DTensor):
            raise ValueError(
                f"'{fqn}' is sharded already: this integration calls dedicate_params and fully_shard itself, so leave "
                "them out of configure_model and of the script, and build plain layers there"
            )
