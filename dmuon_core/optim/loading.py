"""Loading optimizer state that others may have written: stock optimizers, plain models, other owners."""

from __future__ import annotations

from itertools import chain
from typing import Any

from torch import Tensor
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.optim import Optimizer

from dmuon_core.names import canonical_name
from dmuon_core.optim.groups import group_label, param_label
from dmuon_core.optim.local import zeros_for_state
from dmuon_core.optim.options import GROUP_DEFAULTS, check_options
from dmuon_core.optim.update import MOMENTUM, SECOND, state_shapes
from dmuon_core.owned_tensor import OwnedTensor, own_like

#: What each algorithm cannot go on without of a parameter's state, and what it also keeps.
STATE_KEYS = {"muon": (MOMENTUM,), "adamw": ("step", "exp_avg", "exp_avg_sq")}
_MORE_KEYS = {"muon": (SECOND,), "adamw": ()}
#: Options that say how an update is made: they are the program's and stay as the optimizer was built, whatever a
#: checkpoint says. Numbers that schedules change (learning rate, weight decay, momentum, betas, eps) come from it.
OWN_OPTIONS = (
    "split", "normuon", "batched", "compile", "ns_form", "ns_dtype", "ns_coefficients", "ns_steps", "nesterov",
    "adjust_lr_fn", "cautious_weight_decay", "maximize",
)  # fmt: skip


def unwrapped(optimizer: Optimizer) -> Optimizer:
    """The optimizer itself, where a trainer's wrapper keeps it as ``.optimizer``. Local."""
    while isinstance(getattr(optimizer, "optimizer", None), Optimizer):
        optimizer = optimizer.optimizer  # type: ignore[attr-defined]
    return optimizer


def adopt_groups(saved: list[dict[str, Any]], current: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the saved groups, with what stock ``torch.optim.Muon`` and ``AdamW`` do not save from ours.

    Raises:
        ValueError: a saved group is of another algorithm, of an AdamW variant that Muon does not have, of parameters
            with other names, or has an option that cannot be.
    """
    adopted = []
    for index, (theirs, ours) in enumerate(zip(saved, current, strict=True)):
        problem = group_problem(theirs, ours) or names_problem(theirs, ours)
        if problem:
            raise ValueError(f"Muon: {group_label(index)} {problem}")
        own_keys = ("algorithm", "name", *GROUP_DEFAULTS[ours["algorithm"]])
        kept = {key: ours[key] for key in OWN_OPTIONS if key in ours}
        group = {**{key: ours[key] for key in own_keys if key in ours}, **theirs, **kept}
        check_options(group, f" of the saved {group_label(index)}")
        adopted.append(group)
    return adopted


def group_problem(theirs: dict[str, Any], ours: dict[str, Any]) -> str | None:
    """Why the options of a saved group cannot become those of our group; None if they can."""
    algorithm = theirs.get("algorithm") or ("adamw" if "betas" in theirs else "muon")
    if algorithm != ours["algorithm"]:
        return (
            f"uses {ours['algorithm']!r}, but the loaded state was saved by a group that uses {algorithm!r}; build the "
            "optimizer with the same groups, in the same order, as when the state was saved"
        )
    if theirs.get("amsgrad"):
        return "was saved with amsgrad=True, which Muon does not support; start this group without saved state"
    return None


def without_matched_names(state_dict: dict[str, Any], current: list[dict[str, Any]]) -> dict[str, Any]:
    """``state_dict`` without the ``param_names`` of groups whose parameters were matched by name already. Local.

    ``set_optimizer_state_dict`` hands over names where the numbers of parameters should be, in our order; the
    ``param_names`` that it brings along still have the order in which they were saved.
    """

    def matched(theirs: dict[str, Any], ours: dict[str, Any]) -> bool:
        names, known = theirs["params"], ours.get("param_names", [])
        if len(names) != len(known) or not all(isinstance(name, str) for name in names):
            return False
        # Either may be the name in a part of the other's model.
        pairs = [(canonical_name(a), canonical_name(b)) for a, b in zip(names, known, strict=True)]
        return all(f".{a}".endswith(f".{b}") or f".{b}".endswith(f".{a}") for a, b in pairs)

    groups = state_dict.get("param_groups", [])
    if len(groups) != len(current):  # which is refused later; or a hook of the user's will bring them
        return state_dict
    kept = [
        {key: value for key, value in theirs.items() if key != "param_names"} if matched(theirs, ours) else theirs
        for theirs, ours in zip(groups, current, strict=True)
    ]
    return {**state_dict, "param_groups": kept}


def names_problem(theirs: dict[str, Any], ours: dict[str, Any]) -> str | None:
    """Which parameters of a saved group, by position, have other names than ours; None if none or without names."""
    pairs = zip(theirs.get("param_names") or [], ours.get("param_names") or [], strict=False)
    other = [(saved, name) for saved, name in pairs if canonical_name(saved) != canonical_name(name)]
    if not other:
        return None
    shown = ", ".join(f"'{saved}' where it has '{name}'" for saved, name in other[:4])
    more = f" and {len(other) - 4} more" if len(other) > 4 else ""
    return (
        f"was saved with other parameters: {shown}{more}; build the optimizer with the same groups, or remove "
        "'param_names' from the saved groups to load by position"
    )


def sizes_problem(saved: list[dict[str, Any]], current: list[dict[str, Any]]) -> str | None:
    """How the saved groups differ from ours in number or size; None if they do not."""
    if len(saved) != len(current):
        return f"the loaded state has {len(saved)} parameter groups, this optimizer {len(current)}"
    for index, (theirs, ours) in enumerate(zip(saved, current, strict=True)):
        before, now = theirs.get("param_names") or [], ours.get("param_names") or []
        if len(theirs["params"]) != len(ours["params"]):
            gone = [f"'{name}' only in the loaded state" for name in before if name not in now]
            new = [f"'{name}' only in the optimizer" for name in now if name not in before]
            listed = f": {', '.join((gone + new)[:4])}" if before and now else ""
            sizes = f"{len(theirs['params'])} parameters and has {len(ours['params'])}"
            return f"{group_label(index)} was saved with {sizes}{listed}"
    return None


def check_loaded_state(groups: list[dict[str, Any]], state: Any) -> None:
    """Check the shapes of loaded state against the parameters. Local; writes nothing.

    Raises:
        ValueError: a loaded tensor does not have its parameter's shape; the message names the parameter.
    """
    for index, group in enumerate(groups):
        for position, p in enumerate(group["params"]):
            for key, value in _tensors(state, p):
                expected = tuple(state_shapes(group, position).get(key, p.shape))
                if tuple(value.shape) != expected:
                    name = param_label(group, position, group_label(index))
                    raise ValueError(
                        f"Muon: the loaded {key!r} of {name} has shape {tuple(value.shape)}, the parameter "
                        f"needs {expected}; was the state saved from the same model, in the same order, with the same "
                        "split?"
                    )


def drop_foreign_state(groups: list[dict[str, Any]], state: Any) -> None:
    """Leave out what another algorithm saved of a parameter, which then starts without state. Local."""
    for group in groups:
        for p in group["params"]:
            used = used_state(state.pop(p, {}), group)
            if used:
                state[p] = used


def state_keys(group: dict[str, Any]) -> set[str]:
    """What the state of every stepped parameter of the group holds."""
    more = _MORE_KEYS[group["algorithm"]] if group.get("normuon") else ()
    return {*STATE_KEYS[group["algorithm"]], *more}


def used_state(found: dict[str, Any], group: dict[str, Any]) -> dict[str, Any]:
    """What ``group`` uses of a parameter's saved state; nothing if something that it needs is not there. Local."""
    if not set(STATE_KEYS[group["algorithm"]]) <= found.keys():
        return {}
    return {key: value for key, value in found.items() if key in state_keys(group)}


def place_state(groups: list[dict[str, Any]], state: Any) -> None:
    """Give every state tensor the placement of its parameter.

    Each rank takes its part of a plain full tensor without communication; a DTensor placed in another way is
    redistributed, which is a collective: the order is that of the groups, so all ranks must load the same
    state.
    """
    for p in chain.from_iterable(group["params"] for group in groups):
        for key, value in _tensors(state, p):
            state[p][key] = placed_like(value, p)


def placed_like(value: Tensor, p: Tensor) -> Tensor:
    """``value`` as state of ``p``: whole where ``p`` is plain, else with its placement. See :func:`place_state`."""
    if isinstance(p, OwnedTensor):
        like = zeros_for_state(p, value.shape)
        assert isinstance(like, OwnedTensor)
        return own_like(value, like)
    if isinstance(p, DTensor):
        if not isinstance(value, DTensor):
            return distribute_tensor(value, p.device_mesh, p.placements, src_data_rank=None)
        same = value.placements == p.placements and value.device_mesh == p.device_mesh
        return value if same and not isinstance(value, OwnedTensor) else value.redistribute(p.device_mesh, p.placements)
    return value.full_tensor() if isinstance(value, DTensor) else value


def _tensors(state: Any, p: Tensor) -> list[tuple[str, Tensor]]:
    return [(k, v) for k, v in state.get(p, {}).items() if k != "step" and isinstance(v, Tensor)]
