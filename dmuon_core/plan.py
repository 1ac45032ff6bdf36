"""What will be done to a model, decided from names and shapes alone: targets, hook modules, owners."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn as nn
from torch.distributed.tensor import DTensor

from dmuon_core.agreement import Description
from dmuon_core.boundary import assign_boundaries
from dmuon_core.optim.cost import NewtonSchulzFlops
from dmuon_core.optim.split import SplitRule, matrix_parts
from dmuon_core.partition import Assignment, MatrixSpec, compute_balanced_assignment, newton_schulz_flops
from dmuon_core.targets import muon_targets

Flops = Callable[[tuple[int, int]], int]
"""FLOPs of the update of one matrix (m, n)."""

_DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)


@dataclass(frozen=True)
class Plan:
    """The three decisions: ``boundaries`` as `assign_boundaries` returns them, ``targets`` by name, ``assignment``."""

    boundaries: list[tuple[str, nn.Module, list[str]]]
    targets: dict[str, nn.Parameter]
    assignment: Assignment

    def description(self) -> Description:
        """What ranks that carry out this plan together must have in common, most telling first."""
        description: Description = [(f"whether '{fqn}' is a Muon target", True) for fqn in self.targets]
        description += [(f"the hook module of '{fqn}'", layer) for layer, _, fqns in self.boundaries for fqn in fqns]
        description += [(f"the owner of '{fqn}'", slot) for fqn, slot in self.assignment.owners.items()]
        return [*description, ("the assignment of owners", self.assignment.digest())]


def make_plan(
    model: nn.Module,
    predicate: Callable[[str, nn.Parameter], bool] | None,
    hook_boundary_predicate: Callable[[nn.Module], bool] | None,
    hook_boundary_strict: bool,
    *,
    shard_size: int,
    replicate_size: int,
    device: torch.device | None,
    master_dtype: torch.dtype | None,
    split: SplitRule | None,
    max_owned_bytes: int | None,
    flops: Flops | None = None,
) -> Plan:
    """Decide targets, hook modules and owners; local, changes nothing. The arguments are those of `dedicate_params`.

    ``device`` is where the mesh is; None if there is none yet.

    Raises ValueError as `dedicate_params` does.
    """
    targets = _choose_targets(model, predicate)
    for fqn, param in targets.items():
        _check_target(fqn, param, device)
    boundaries = assign_boundaries(model, targets, hook_boundary_predicate, hook_boundary_strict)
    parts = matrix_parts(model, split)
    specs = [
        MatrixSpec(
            fqn, tuple(targets[fqn].shape), layer, parts[fqn], rest_dtype_of(targets[fqn], master_dtype).itemsize
        )
        for layer, _, fqns in boundaries
        for fqn in fqns
    ]
    if isinstance(flops, NewtonSchulzFlops) and device is not None:
        flops = flops.on(device.type)
    assignment = compute_balanced_assignment(
        specs, shard_size * replicate_size, shard_size=shard_size, flops=flops or newton_schulz_flops,
        max_owned_bytes=max_owned_bytes,
    )  # fmt: skip
    return Plan(boundaries, targets, assignment)


def rest_dtype_of(param: torch.Tensor, master_dtype: torch.dtype | None) -> torch.dtype:
    """The dtype in which an owned weight, its gradient and its momentum are kept."""
    return param.dtype if master_dtype is None else torch.promote_types(param.dtype, master_dtype)


def _choose_targets(model: nn.Module, predicate: Callable[[str, nn.Parameter], bool] | None) -> dict[str, nn.Parameter]:
    if predicate is None:
        targets = muon_targets(model)
        if not targets:
            raise ValueError(
                f"{type(model).__name__} has no hidden-layer matrix to dedicate: pass predicate=(fqn, parameter) -> "
                "bool that chooses the matrices for Muon"
            )
        return targets
    targets = {fqn: param for fqn, param in model.named_parameters() if predicate(fqn, param)}
    if not targets:
        names = [fqn for fqn, param in model.named_parameters() if param.ndim >= 2]
        raise ValueError(
            f"the predicate matches no parameter of {type(model).__name__}: it is called with (fqn, parameter), and "
            f"the matrices are {names[:8]}{' and more' if len(names) > 8 else ''}"
        )
    return targets


def _check_target(fqn: str, param: nn.Parameter, device: torch.device | None) -> None:
    if isinstance(param, DTensor):
        raise ValueError(
            f"'{fqn}' is a DTensor already: call dedicate_params before fully_shard and other parallelism, on the "
            "plain model"
        )
    if param.ndim < 2:
        raise ValueError(
            f"'{fqn}' has shape {tuple(param.shape)}: only matrices can be Muon targets, leave it out of the predicate"
        )
    if param._backward_hooks:
        raise ValueError(
            f"'{fqn}' has a hook of register_hook, which would not run on the reduced gradient: use "
            "register_post_accumulate_grad_hook on the owned parameter, after dedicate_params, or leave it out of the "
            "predicate"
        )
    if param.numel() == 0:
        raise ValueError(f"'{fqn}' has no elements: leave it out of the predicate")
    if param.dtype not in _DTYPES:
        raise ValueError(
            f"'{fqn}' has dtype {param.dtype}: Muon needs one of {', '.join(map(str, _DTYPES))}; leave it out of the "
            "predicate or convert it"
        )
    if device is not None and param.device.type not in ("cpu", "meta") and param.device != device:
        raise ValueError(f"'{fqn}' is on {param.device}, the mesh is on {device}: move the model there first")
