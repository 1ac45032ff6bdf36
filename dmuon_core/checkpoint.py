"""What torch.distributed.checkpoint needs beyond OwnedTensor: does a state dict fit? Asked before anything is written.

Torch's own checks come while it loads, some on the rank only that has the state dict, and let through what can be
broadcast into place. Here every rank asks first, and all of them raise if one has to.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

import torch
import torch.nn as nn
from torch import Tensor
from torch.optim import Optimizer

from dmuon_core.names import canonical_name
from dmuon_core.optim.loading import OWN_OPTIONS, STATE_KEYS, group_problem, unwrapped, used_state
from dmuon_core.optim.update import state_shapes
from dmuon_core.owned_tensor import Delivery, OwnedTensor

if TYPE_CHECKING:
    from dmuon_core.runtime import DedicatedModel

Shapes = dict[str, tuple[int, ...] | None]
"""Shape by name; None for what is not a tensor."""

# torch.load(weights_only=True), the default, reads a rank's own state_dict as it reads one of DTensors.
torch.serialization.add_safe_globals([OwnedTensor, Delivery])

MODEL_REMEDY = (
    "Nothing was loaded. Build the model that was saved, or load with strict=False what it shares with this one; leave "
    "tensors of another shape out of the state dict before"
)
_OPTIMIZER_REMEDY = "Build the optimizer with the groups of the saved one, or load with strict=False what fits it"
OPTIMIZER_REMEDY = f"Nothing was loaded. {_OPTIMIZER_REMEDY}"
OPTIMIZER_ALONE_REMEDY = (
    "Nothing of the optimizer was loaded; a call that loads the model first, as set_state_dict does, has loaded the "
    f"model already. {_OPTIMIZER_REMEDY}"
)
"""Where only the optimizer's part of a load is seen."""
_SHOWN = 4  # differences of a kind that a message lists


def shapes_of(state: Mapping[str, Any]) -> Shapes:
    """Global shape of every tensor of ``state``, by canonical name. Local."""
    return {
        canonical_name(name): tuple(value.shape) if isinstance(value, Tensor) else None for name, value in state.items()
    }


def model_problem(saved: Shapes, model: Shapes, *, strict: bool) -> str | None:
    """How a model's saved state differs from the model's own; None if it fits. Not ``strict``: in shapes only."""
    common = [name for name in saved if name in model]
    other_shape = [
        f"'{name}' (saved {saved[name]}, in the model {model[name]})"
        for name in common
        if None not in (saved[name], model[name]) and saved[name] != model[name]
    ]
    found = [("of another shape are", other_shape)]
    if strict:
        found.append(("missing are", [f"'{name}'" for name in model if name not in saved]))
        found.append(("not in the model are", [f"'{name}'" for name in saved if name not in model]))
    return "; ".join(f"{kind} {_first(items)}" for kind, items in found if items) or None


def fit_optimizer_state(
    model: nn.Module, optimizers: Iterable[Optimizer], saved: Mapping[str, Any], *, strict: bool
) -> tuple[dict[str, Any], str | None]:
    """Saved optimizer state in the form of what ``optimizers`` hold, and why it does not fit, or None. Local.

    Args:
        saved: what ``get_optimizer_state_dict`` gave for these optimizers or for others, flat or not.
        strict: whether every parameter must be there, in the same groups. If not, a parameter takes over the state that
            its algorithm knows, and a group its options if it has the same parameters.

    Returns:
        ``{"state": {name: {key: value}}, "param_groups": [...]}`` with the groups and the options of ``optimizers``.
    """
    names: dict[Tensor, list[str]] = {}
    for fqn, param in model.named_parameters(remove_duplicate=False):
        names.setdefault(param, []).append(canonical_name(fqn))
    state: dict[str, Any] = {}
    groups: list[dict[str, Any]] = []
    problems: list[str] = []
    for optimizer in map(unwrapped, optimizers):
        if hasattr(optimizer, "init_state"):
            optimizer.init_state()
        members = [[names.get(p, ["?"]) for p in group["params"]] for group in optimizer.param_groups]
        whole = saved if "state" in saved else _nested(optimizer, members, saved, problems)
        saved_members = [set(group["params"]) for group in whole["param_groups"]]
        if strict:
            problems += _regrouped(members, saved_members)
        for group, aliases in zip(optimizer.param_groups, members, strict=True):
            chosen = [next((name for name in found if name in whole["state"]), found[0]) for found in aliases]
            same = [len(its) == len(aliases) and not any(map(its.isdisjoint, aliases)) for its in saved_members]
            theirs: dict[str, Any] = whole["param_groups"][same.index(True)] if any(same) else {}
            if "algorithm" in group and theirs:
                problem = group_problem(theirs, group)
                problems += [f"the group of '{chosen[0]}' {problem}"] if problem and strict else []
                theirs = {} if problem else theirs
            kept = OWN_OPTIONS if "algorithm" in group else ()
            options = {key: value if key in kept else theirs.get(key, value) for key, value in group.items()}
            groups.append({**options, "params": chosen})
            for position, (param, name) in enumerate(zip(group["params"], chosen, strict=True)):
                state[name], missing = _fit_state(whole["state"].get(name, {}), group)
                problems += _other_shapes(name, state[name], group, position) if "algorithm" in group else ()
                if not state[name]:
                    del state[name]
                    if strict and param.requires_grad and optimizer.state.get(param):
                        problems.append(f"of the state of '{name}' is missing: {', '.join(missing) or 'all'}")
    return {"state": state, "param_groups": groups}, _first(problems, "; ") if problems else None


def _fit_state(entry: dict[str, Any], group: dict[str, Any]) -> tuple[dict[str, Any], list[str]]:
    """What ``group`` uses of a parameter's saved state, nothing if that is not complete, and what is missing."""
    if "algorithm" not in group:  # of other optimizers nobody knows what they need
        return entry, []
    return used_state(entry, group), [key for key in STATE_KEYS[group["algorithm"]] if key not in entry]


def _other_shapes(name: str, entry: dict[str, Any], group: dict[str, Any], position: int) -> Iterator[str]:
    shapes = state_shapes(group, position)
    for key, value in entry.items():
        expected = tuple(shapes.get(key, group["params"][position].shape))
        if isinstance(value, Tensor) and value.dim() > 0 and tuple(value.shape) != expected:
            yield f"{key!r} of '{name}' was saved with shape {tuple(value.shape)}, the parameter has {expected}"


def _nested(
    optimizer: Optimizer, members: list[list[list[str]]], flat: Mapping[str, Any], problems: list[str]
) -> dict[str, Any]:
    """A flat state dict in the groups of ``optimizer``; adds to ``problems`` what was not saved alike in a group."""
    state: dict[str, Any] = {}
    groups = []
    for group, aliases in zip(optimizer.param_groups, members, strict=True):
        options = [key for key in group if key not in ("params", "param_names")]
        found: list[str] = []
        for param, names in zip(group["params"], aliases, strict=True):
            name = next((name for name in names if any(f"param_groups.{name}.{key}" in flat for key in options)), None)
            if name is not None:
                found.append(name)
                entry = {key: f"state.{name}.{key}" for key in optimizer.state.get(param, {})}
                state[name] = {key: flat[path] for key, path in entry.items() if path in flat}
        values = [{key: flat.get(f"param_groups.{name}.{key}") for key in options} for name in found]
        for name, value in zip(found, values, strict=True):
            other = [key for key in options if value[key] != values[0][key]]
            problems += [f"'{found[0]}' and '{name}' were saved with different {', '.join(other)}"] if other else []
        groups.append({"params": found, **{k: v for k, v in (values[0] if values else {}).items() if v is not None}})
    return {"state": state, "param_groups": groups}


def check_state_can_start(optimizer: Optimizer) -> None:
    """Torch makes missing state by a step with zero gradients, and makes none while there are others. Local.

    Raises:
        RuntimeError: ``optimizer`` has owned parameters with gradients, and no state yet. On every rank.
    """
    groups = optimizer.param_groups
    if optimizer.state or (isinstance(optimizer, torch.optim.SGD) and not any(group["momentum"] for group in groups)):
        return
    for param in (param for group in groups for param in group["params"]):
        if isinstance(param, OwnedTensor) and param.grad is not None:
            raise RuntimeError(
                f"{type(optimizer).__name__} cannot be saved or loaded between a backward and its first step, because "
                f"it has no state yet ('{param.fqn}' has a gradient): do it after the step or after zero_grad"
            )


def is_by_position(saved: Mapping[str, Any]) -> bool:
    """Whether optimizer state is keyed by position, as an optimizer's own ``state_dict`` is."""
    return "state" in saved and bool(saved["state"]) and all(isinstance(key, int) for key in saved["state"])


def raise_everywhere(dedicated: DedicatedModel, kind: type[Exception], problem: str | None) -> None:
    """Raise on every rank if a rank has a problem. Collective over the mesh.

    Raises:
        Exception: of ``kind``, with the first problem.
    """
    problem = next((text for text in dedicated.gather(problem) if text), None)
    if problem:
        raise kind(problem)


def _regrouped(groups: list[list[list[str]]], saved: list[set[str]]) -> Iterator[str]:
    """What the groups (of parameters, of their aliases) do not share with the saved groups of names."""
    where = {name: index for index, group in enumerate(saved) for name in group}
    ours = {name: index for index, group in enumerate(groups) for aliases in group for name in aliases}
    for index, group in enumerate(groups):
        found = [next((where[name] for name in aliases if name in where), None) for aliases in group]
        home = next((place for place in found if place is not None), None)
        for aliases, place in zip(group, found, strict=True):
            if place is None:
                yield f"'{aliases[0]}' of parameter group {index} was not saved"
            elif place != home:
                yield f"'{aliases[0]}' of parameter group {index} was saved in group {place}, others of it in {home}"
        for name in sorted(saved[home]) if home is not None else []:
            if ours.get(name) != index:
                now = f"now in group {ours[name]}" if name in ours else "not trained by this optimizer"
                yield f"'{name}' was saved in one group with '{group[0][0]}' and is {now}"


def _first(items: Iterable[str], separator: str = ", ") -> str:
    listed = list(items)
    rest = len(listed) - _SHOWN
    return separator.join(listed[:_SHOWN]) + (f"{separator}and {rest} more" if rest > 0 else "")
