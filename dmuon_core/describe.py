"""What dedication does to a model, as text: hook modules, owned matrices, owners, bytes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn as nn

from dmuon_core import registry
from dmuon_core.optim.split import SplitRule
from dmuon_core.partition import Assignment
from dmuon_core.plan import Flops, make_plan

_MATRICES = 16  # shown of one hook module; a mixture of experts has hundreds
_UNITS = ("B", "KiB", "MiB", "GiB", "TiB")


@dataclass(frozen=True)
class _Boundary:
    name: str
    module: nn.Module
    fqns: list[str]


def describe(
    model: nn.Module,
    shard_size: int = 1,
    replicate_size: int = 1,
    predicate: Callable[[str, nn.Parameter], bool] | None = None,
    *,
    hook_boundary_predicate: Callable[[nn.Module], bool] | None = None,
    hook_boundary_strict: bool = True,
    master_dtype: torch.dtype | None = torch.float32,
    split: SplitRule | None = None,
    flops: Flops | None = None,
    max_owned_bytes: int | None = None,
) -> str:
    """The tree of hook modules with their matrices, shapes, owners and bytes, and how balanced it is. Local.

    For a plain model, on any device or on meta, it shows what `dedicate_params` with the same arguments would do on a
    mesh of ``replicate_size`` x ``shard_size`` ranks; neither a process group nor a GPU is needed. For a dedicated
    model it shows what was done, and the other arguments must be left out.

    Raises:
        ValueError: as `dedicate_params` does; a dedicated model with arguments.
    """
    dedicated = registry.find_dedicated(model)
    if dedicated is None:
        plan = make_plan(
            model, predicate, hook_boundary_predicate, hook_boundary_strict,
            shard_size=shard_size, replicate_size=replicate_size, device=None, master_dtype=master_dtype, split=split,
            max_owned_bytes=max_owned_bytes, flops=flops,
        )  # fmt: skip
        boundaries, assignment = [_Boundary(*boundary) for boundary in plan.boundaries], plan.assignment
    else:
        arguments = (shard_size, replicate_size, predicate, hook_boundary_predicate, hook_boundary_strict, split, flops)
        if arguments != (1, 1, None, None, True, None, None) or max_owned_bytes is not None:
            raise ValueError(f"{type(model).__name__} is dedicated already: call describe(model) without arguments")
        model, assignment = dedicated.model, dedicated.assignment
        boundaries = [_Boundary(g.fqn, g.module, [param.fqn for param in g.params]) for g in dedicated.groups]
    return "\n".join([*_head(model, assignment), *_tree(boundaries, assignment), "", str(assignment)])


def _head(model: nn.Module, assignment: Assignment) -> list[str]:
    params = dict(model.named_parameters())
    rest = [param for fqn, param in params.items() if fqn not in assignment.owners]
    rows = assignment.num_slots // assignment.shard_size
    mesh = f"{assignment.shard_size} shard ranks" + (f" x {rows} replicas" if rows > 1 else "")
    return [
        f"{type(model).__name__} on {mesh}: {len(assignment.specs)} matrices owned "
        f"({_bytes(sum(assignment.owned_bytes))}), {len(rest)} parameters left to FSDP2 "
        f"({_bytes(sum(param.numel() * param.element_size() for param in rest))})",
        "",
    ]


def _tree(boundaries: list[_Boundary], assignment: Assignment) -> list[str]:
    spec_of = {spec.fqn: spec for spec in assignment.specs}
    lines = []
    for boundary in boundaries:
        owned = sum(spec_of[fqn].nbytes for fqn in boundary.fqns)
        lines.append(
            f"{boundary.name or '(root)'}: {type(boundary.module).__name__}, {len(boundary.fqns)} matrices, "
            f"{_bytes(owned)}, at most {_bytes(assignment.root_bytes[boundary.name])} from one rank"
        )
        prefix = f"{boundary.name}." if boundary.name else ""
        shown = boundary.fqns if len(boundary.fqns) <= _MATRICES else boundary.fqns[: _MATRICES - 1]
        width = max(len(fqn.removeprefix(prefix)) for fqn in shown)
        for fqn in shown:
            spec = spec_of[fqn]
            shape = " x ".join(map(str, spec.shape))
            owner = _rank(assignment.owners[fqn], assignment)
            lines.append(f"    {fqn.removeprefix(prefix):<{width}}  {shape:>16}  {_bytes(spec.nbytes):>10}  {owner}")
        if len(shown) < len(boundary.fqns):
            lines.append(f"    ... and {len(boundary.fqns) - len(shown)} more")
    return lines


def _rank(slot: int, assignment: Assignment) -> str:
    if assignment.num_slots == assignment.shard_size:
        return f"rank {slot}"
    row, column = divmod(slot, assignment.shard_size)
    return f"replica {row}, shard rank {column}"


def _bytes(count: float) -> str:
    for unit in _UNITS[:-1]:
        if count < 1024:
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1024
    return f"{count:.1f} {_UNITS[-1]}"
