"""dedicate_params(): the one entry point, and what a training loop calls besides."""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, register_fsdp_forward_method

from dmuon_core import fsdp2, registry
from dmuon_core.agreement import Description, agree
from dmuon_core.comm import CommContext, mesh_group
from dmuon_core.group import DedicatedParamGroup
from dmuon_core.mesh import data_parallel_mesh, mesh_device
from dmuon_core.module_states import sync_module_states as broadcast_module_states
from dmuon_core.optim.split import SplitRule
from dmuon_core.owned_tensor import OwnedTensor, Owner, empty_like_non_owner, holds
from dmuon_core.param import DedicatedParam, Slot
from dmuon_core.partition import Assignment
from dmuon_core.plan import Flops, Plan, make_plan, rest_dtype_of
from dmuon_core.runtime import DedicatedModel


def dedicate_params(
    model: nn.Module,
    mesh: DeviceMesh | None = None,
    predicate: Callable[[str, nn.Parameter], bool] | None = None,
    *,
    replicate_mesh: DeviceMesh | None = None,
    hook_boundary_predicate: Callable[[nn.Module], bool] | None = None,
    hook_boundary_strict: bool = True,
    reshard_after_forward: bool = True,
    replicate_async: bool = True,
    mp_policy: MixedPrecisionPolicy | None = None,
    master_dtype: torch.dtype | None = torch.float32,
    split: SplitRule | None = None,
    flops: Flops | None = None,
    max_owned_bytes: int | None = None,
    sync_module_states: bool = True,
) -> DedicatedModel:
    """Give every Muon-target matrix of ``model`` one owner rank, in place. Collective over ``mesh``.

    Call it once on the whole model, before ``fully_shard`` (which then leaves the owned parameters alone) and before
    the optimizer is built. Nothing is changed if it raises.

    Args:
        model: plain module with its parameters on the mesh's device, on the CPU, or on meta.
        mesh: data-parallel mesh, 1-D, or 2-D (replicate, shard) for HSDP as in ``fully_shard``; None for all
            processes of the default group, which is created if there is none (by the launcher's environment, or for
            this process alone).
        predicate: ``(fqn, parameter) -> bool`` chooses the targets; None for the matrices of hidden layers, see
            :func:`dmuon_core.targets.muon_targets`.
        replicate_mesh: for HSDP in two arguments: ``mesh["shard"]`` and ``mesh["replicate"]`` of one 2-D mesh.
        hook_boundary_predicate: ``(module) -> bool`` chooses the modules that unshard their targets: for each target
            its lowest ancestor for which it is true. None for the repeated blocks of the module tree.
        hook_boundary_strict: whether a target without such an ancestor is an error.
        reshard_after_forward: True frees the weights after forward and broadcasts them again for backward (Z3); False
            keeps them until backward (Z2).
        replicate_async: whether the owners' new weights reach their replicas behind the next forward (HSDP). False
            waits in the optimizer's step, to look for a slow link.
        mp_policy: ``param_dtype`` is what is broadcast and computed with (default: the parameter's dtype),
            ``reduce_dtype`` what gradients are reduced in (default: at least float32).
        master_dtype: least precise dtype of owned weights, gradients and momentum at rest; None keeps the parameter's.
        split: which matrices a parameter stands for, as in :class:`dmuon_core.Muon`, whose default it becomes; owners
            are balanced by what they will compute. None for one matrix each, but E for stacked experts ``[E, m, n]``.
        flops: FLOPs of the update of one ``(m, n)`` matrix, by which owners are balanced; such as
            ``NewtonSchulzFlops(ns_form="auto", ns_dtype=torch.float32)`` for a Muon with these options. None for those
            of Muon's defaults; the number of steps alone changes no balance. ``Muon`` warns in its first step if its
            own split and options would need other owners.
        max_owned_bytes: bound on the bytes of the matrices that one rank owns, at rest; None for no bound. A rank also
            keeps their momentum and, with a 2-D mesh, the weights that other ranks of its shard column own.
        sync_module_states: whether all weights and buffers are first made those of the mesh's first rank.

    Returns:
        The state of the dedicated model: groups, owners, counts.

    Warns:
        UserWarning: on the first rank, if there are fewer matrices than ranks.

    Raises:
        ValueError: the predicate matches nothing; a target is already sharded, owned, of a wrong dtype or on a wrong
            device; no module satisfies a strict ``hook_boundary_predicate``; no partition keeps to
            ``max_owned_bytes``; the mesh is of another form.
        RuntimeError: ranks disagree, or another rank raised. All of these on every rank.
    """
    mesh = data_parallel_mesh(mesh, replicate_mesh)
    device = mesh_device(mesh)
    group = mesh.get_group(0) if mesh.ndim == 1 else mesh_group(mesh, device, "dmuon_setup")

    def plan() -> tuple[Plan, Description]:
        _check_not_dedicated(model)
        made = make_plan(
            model, predicate, hook_boundary_predicate, hook_boundary_strict,
            shard_size=mesh.size(mesh.ndim - 1), replicate_size=mesh.size(0) if mesh.ndim == 2 else 1,
            device=device, master_dtype=master_dtype, split=split, max_owned_bytes=max_owned_bytes,
            flops=flops,
        )  # fmt: skip
        arguments = (
            reshard_after_forward, replicate_async, str(mp_policy), str(master_dtype), max_owned_bytes,
            sync_module_states,
        )  # fmt: skip
        return made, [*_describe_model(model), ("the arguments", arguments), *made.description()]

    agreed = agree(group, plan)
    if dist.get_rank(group) == 0:
        _say_who_is_idle(agreed.assignment)
    if sync_module_states:
        broadcast_module_states(model, group, device)
    comm = CommContext(mesh, device)
    slots = _slots_of(model, set(map(id, agreed.targets.values())))
    groups = []
    for index, (layer, module, fqns) in enumerate(agreed.boundaries):
        params = [
            _dedicate_one(
                fqn, agreed.targets[fqn], slots[id(agreed.targets[fqn])], agreed.assignment.owners[fqn],
                mesh, device, mp_policy, master_dtype,
            )
            for fqn in fqns
        ]  # fmt: skip
        groups.append(DedicatedParamGroup(index, layer, module, params, comm))
    dedicated = DedicatedModel(
        model, mesh, groups, agreed.assignment, comm, reshard_after_forward, replicate_async, split
    )
    registry.register(model, dedicated)
    return dedicated


@contextmanager
def no_sync(model: nn.Module) -> Iterator[None]:
    """Backwards inside accumulate gradients on each rank without communication, owned and sharded ones alike. Local.

    The first backward after it reduces the whole window once. The unreduced gradients have their full size.

    Raises:
        ValueError: if the model is not dedicated.
    """
    groups = registry.get_dedicated(model).groups
    before = all(group.requires_gradient_sync for group in groups)
    fsdp2.set_requires_gradient_sync(model, False)
    try:
        yield
    finally:
        fsdp2.set_requires_gradient_sync(model, before)


def reset(model: nn.Module) -> None:
    """Bring ``model`` back to rest after an exception in forward or backward; see :meth:`DedicatedModel.reset`.

    The next forward and ``Muon.zero_grad`` do so by themselves; call this on every rank to inspect the model before.
    """
    registry.get_dedicated(model).reset()


def register_forward_method(model: nn.Module, name: str) -> None:
    """Let method ``name`` of the model act as its forward, for owned and for FSDP2's parameters. Local.

    Needed when a trainer calls, say, ``training_step`` directly: the model's own parameters are unsharded by hooks that
    only ``model(...)`` would run. Call it after ``fully_shard``.

    Raises:
        ValueError: if the model is not dedicated or has no such method.
    """
    dedicated = registry.get_dedicated(model)
    if not callable(getattr(model, name, None)):
        raise ValueError(f"{type(model).__name__} has no method '{name}'")
    for hooks in dedicated.hooks_on(model):
        _wrap_method(model, name, functools.partial(_run_with_hooks, hooks, model))
    if isinstance(model, FSDPModule):
        register_fsdp_forward_method(model, name)
    if dedicated.model is model:
        _wrap_method(model, name, functools.partial(_run_as_root, dedicated, name))


def _run_with_hooks(hooks: Any, model: nn.Module, method: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    args, kwargs = hooks.pre_forward(model, args, kwargs) or (args, kwargs)
    output = method(*args, **kwargs)
    hooks.post_forward(model, args, output)
    return output


def _run_as_root(dedicated: DedicatedModel, name: str, method: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    dedicated.begin_root_forward(name)
    raised = True
    try:
        output = method(*args, **kwargs)
        raised = False
        return output
    finally:
        dedicated.end_root_forward(name, raised=raised)


def _wrap_method(model: nn.Module, name: str, run: Callable[..., Any]) -> None:
    method = getattr(model, name)

    @functools.wraps(method)
    def wrapped(*args: Any, **kwargs: Any) -> Any:
        return run(method, *args, **kwargs)

    setattr(model, name, wrapped)


def _check_not_dedicated(model: nn.Module) -> None:
    for fqn, param in model.named_parameters():
        if isinstance(param, OwnedTensor):
            raise ValueError(f"'{fqn}' is dedicated already: call dedicate_params once, on the whole model")


def _say_who_is_idle(assignment: Assignment) -> None:
    idle = len(assignment.idle_slots)
    if idle:
        warnings.warn(
            f"{idle} of {assignment.num_slots} ranks own no matrix, because there are only {len(assignment.specs)}: "
            "they compute forward and backward like the others and wait while those step",
            stacklevel=3,
        )


def _describe_model(model: nn.Module) -> Description:
    def kind(tensor: torch.Tensor) -> tuple[Any, ...]:
        return (tuple(tensor.shape), str(tensor.dtype), tensor.is_meta, type(tensor).__name__)

    tensors = [*model.named_parameters(), *model.named_buffers()]
    return [(f"shape, dtype or kind of '{fqn}'", kind(tensor)) for fqn, tensor in tensors]


def _slots_of(model: nn.Module, wanted: set[int]) -> dict[int, list[Slot]]:
    """Where each parameter is registered, by identity: names would miss tied weights."""
    slots: dict[int, list[Slot]] = {}
    for module in model.modules():
        for name, param in module._parameters.items():
            if id(param) in wanted:
                slots.setdefault(id(param), []).append((module, name))
    return slots


def _dedicate_one(
    fqn: str,
    param: nn.Parameter,
    slots: list[Slot],
    owner: int,
    mesh: DeviceMesh,
    device: torch.device,
    mp_policy: MixedPrecisionPolicy | None,
    master_dtype: torch.dtype | None,
) -> DedicatedParam:
    rest_dtype = rest_dtype_of(param, master_dtype)
    at = torch.device("meta") if param.is_meta else device
    home: tuple[int, ...] = (owner,) if mesh.ndim == 1 else divmod(owner, mesh.size(1))
    replicated: Owner = home if mesh.ndim == 1 else (None, home[1])  # every rank of the owner's column keeps the weight
    if holds(mesh, replicated):
        local = param.detach().to(device=at, dtype=rest_dtype, copy=True).contiguous()
    else:
        local = empty_like_non_owner(param.shape, dtype=rest_dtype, device=at)
    owned = OwnedTensor.wrap(local, param.shape, mesh, replicated, fqn, home)
    rest = nn.Parameter(owned, requires_grad=param.requires_grad)
    registry.note_replaced(param, fqn)
    policy = mp_policy or MixedPrecisionPolicy()
    return DedicatedParam(fqn, slots, rest, param.dtype, policy.param_dtype, policy.reduce_dtype)
