"""Parameter groups of :class:`~dmuon_core.optim.muon.Muon`: how they are built and checked."""

from __future__ import annotations

import difflib
import fnmatch
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from dmuon_core.names import canonical_name
from dmuon_core.optim.options import ALL_OPTIONS, GROUP_DEFAULTS, check_options
from dmuon_core.optim.split import SplitRule, model_splits, resolve_split
from dmuon_core.owned_tensor import OwnedTensor
from dmuon_core.registry import find_dedicated
from dmuon_core.targets import muon_targets

#: Of torch's optimizers. A group that was made for one of them must not lose them without a word.
_STOCK_OPTIONS = ("amsgrad", "capturable", "differentiable", "foreach", "fused")


def model_groups(
    model: nn.Module,
    split: SplitRule | None = None,
    named: Mapping[str, Mapping[str, Any]] | None = None,
    hidden: Collection[int] | None = None,
) -> list[dict[str, Any]]:
    """Divide a model into the named groups "muon" and "adamw"; a group without parameters is left out.

    "muon" holds the owned parameters of a dedicated model, or the default targets of a model that owns
    nothing; "adamw" holds every other parameter that requires a gradient. ``split`` (None for that of the dedicated
    model) and the groups ``named``, which come first, are as in ``Muon``. ``hidden``, ids of parameters, are what
    "muon" is to hold instead. Local.

    Raises:
        ValueError: no parameter of the model requires a gradient, the split does not fit, or a named group takes no
            parameter or those of both algorithms.
    """
    dedicated = find_dedicated(model)
    if dedicated is not None:
        dedicated.settle()
        split = dedicated.split if split is None else split
    trainable = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
    if not trainable:
        raise ValueError(
            f"Muon got {type(model).__name__}, in which no parameter requires a gradient; unfreeze what you "
            "want to train"
        )
    if hidden is None:
        owned = [p for p in model.parameters() if isinstance(p, OwnedTensor)]
        hidden = {id(p) for p in owned or muon_targets(model).values()}
    groups = []
    for name, options in (named or {}).items():
        taken = _matching(trainable, options.get("params"), name)
        names = {fqn for fqn, _ in taken}
        trainable = [entry for entry in trainable if entry[0] not in names]
        algorithms = {"muon" if id(p) in hidden else "adamw" for _, p in taken}
        if "algorithm" not in options and len(algorithms) > 1:
            raise ValueError(
                f"Muon: group {name!r} would hold hidden matrices and other parameters; make two groups of it, or say "
                "which algorithm updates all of them"
            )
        groups.append({"algorithm": algorithms.pop(), **options, "name": name, "params": taken})
    divided = {
        "muon": [(name, p) for name, p in trainable if id(p) in hidden],
        "adamw": [(name, p) for name, p in trainable if id(p) not in hidden],
    }
    groups += [{"name": name, "algorithm": name, "params": params} for name, params in divided.items() if params]
    specs = {canonical_name(name): spec for name, spec in model_splits(model, split).items()}
    for group in groups:
        if group["algorithm"] == "muon" and "split" not in group:
            group["split"] = lambda name, _: specs[name]
    return groups


def _matching(named: list[tuple[str, nn.Parameter]], patterns: Any, group: str) -> list[tuple[str, nn.Parameter]]:
    patterns = [patterns] if isinstance(patterns, str) else patterns
    if not isinstance(patterns, Sequence) or not all(isinstance(pattern, str) for pattern in patterns):
        raise ValueError(
            f"Muon: group {group!r} needs params, a pattern of names such as '*.attn.*' or a sequence of patterns, got "
            f"{patterns!r}"
        )
    found = [
        (name, p)
        for name, p in named
        if any(fnmatch.fnmatchcase(canonical_name(name), pattern) for pattern in patterns)
    ]
    if not found:
        raise ValueError(f"Muon: group {group!r}: no trainable parameter is left whose name matches {patterns}")
    return found


def complete_group(
    param_group: dict[str, Any], defaults: dict[str, Any], present: list[dict[str, Any]]
) -> dict[str, Any]:
    """Return a checked copy of a user's group with every option of its algorithm filled in.

    ``defaults`` are the constructor's arguments, ``present`` the groups that the optimizer has already.

    Raises:
        ValueError: an option, the algorithm or a parameter is not usable; the message names it and the
            remedy.
    """
    group = dict(param_group)
    where = group_label(len(present))
    algorithm = _check_algorithm(group.get("algorithm", "muon"), where)
    group["algorithm"] = algorithm
    options = GROUP_DEFAULTS[algorithm]
    for key in group:
        if key in ALL_OPTIONS and key not in options:
            raise ValueError(_foreign_option(key, algorithm, where))
        if key in _STOCK_OPTIONS and group[key]:
            raise ValueError(f"Muon: {where} has {key}={group[key]!r}, which Muon does not support; leave it out")
    for key, default in options.items():
        if key not in group:
            value = defaults[default]
            # A group owns its learning rate: schedulers write into a tensor lr in place.
            group[key] = value.clone() if isinstance(value, Tensor) else value
    check_options(group, f" of {where}")
    if isinstance(group["params"], Iterable) and not isinstance(group["params"], Tensor | set):
        group["params"] = list(group["params"])
        _check_params(group, where, present)
        if algorithm == "muon":
            group["split"] = _specs(group)
    return group  # anything else is a TypeError of torch's own


def _specs(group: dict[str, Any]) -> tuple[str | None, ...] | None:
    """The split of every parameter, in a form that checkpoints can carry; None if all are whole."""
    names = group.get("param_names") or [""] * len(group["params"])
    entries = [
        entry if isinstance(entry, tuple) else (name, entry) for name, entry in zip(names, group["params"], strict=True)
    ]
    found = tuple(resolve_split(group["split"], name, p) if isinstance(p, Tensor) else None for name, p in entries)
    return found if any(found) else None


def group_label(index: int) -> str:
    """Name a group for a message."""
    return f"parameter group {index}"


def param_label(group: dict[str, Any], position: int, where: str) -> str:
    """Name one parameter of a group for a message: its name if there is one, else where it stands."""
    names = group.get("param_names")
    entry = group["params"][position]
    if isinstance(entry, tuple):
        return f"parameter '{entry[0]}'"
    if names:
        return f"parameter '{names[position]}'"
    return f"parameter {position} of {where} (shape {tuple(entry.shape)})"


def _check_params(group: dict[str, Any], where: str, present: list[dict[str, Any]]) -> None:
    seen = {
        id(p): param_label(earlier, position, group_label(index))
        for index, earlier in enumerate(present)
        for position, p in enumerate(earlier["params"])
    }
    for position, entry in enumerate(group["params"]):
        p = entry[1] if isinstance(entry, tuple) else entry
        if not isinstance(p, Tensor):
            continue  # torch's own TypeError says it
        name = param_label(group, position, where)
        if id(p) in seen:
            raise ValueError(f"Muon: {name} is given twice (first as {seen[id(p)]}); pass each parameter once")
        seen[id(p)] = name
        if not p.requires_grad:
            raise ValueError(
                f"Muon: {name} is frozen (requires_grad=False); leave it out, or unfreeze it before the "
                "optimizer is built (add_param_group adds it later)"
            )
        if group["algorithm"] == "muon":
            _check_matrix(p, name)


def _check_matrix(p: Tensor, name: str) -> None:
    remedy = 'put it in a group with algorithm="adamw"'
    if p.ndim < 2:
        raise ValueError(f"Muon: {name} has shape {tuple(p.shape)}, but Muon needs a matrix; {remedy}")
    if not p.is_floating_point():
        raise ValueError(f"Muon: {name} has dtype {p.dtype}, but Muon needs a real floating-point matrix; {remedy}")
    if isinstance(p, DTensor) and not isinstance(p, OwnedTensor):
        raise ValueError(
            f"Muon: {name} is a sharded DTensor, and Newton-Schulz needs the whole matrix in one place; "
            f"dedicate it first (dedicate_params before fully_shard, the optimizer last), or {remedy}"
        )


def _check_algorithm(algorithm: Any, where: str) -> str:
    if algorithm in GROUP_DEFAULTS:
        return str(algorithm)
    near = difflib.get_close_matches(str(algorithm).lower(), GROUP_DEFAULTS, n=1, cutoff=0.0)
    hint = f"did you mean {near[0]!r}? " if near else ""
    choices = " or ".join(map(repr, GROUP_DEFAULTS))
    raise ValueError(f"Muon: unknown algorithm {algorithm!r} in {where}; {hint}It must be {choices}")


def _foreign_option(key: str, algorithm: str, where: str) -> str:
    renamed = key.removeprefix("adamw_")
    if key != renamed:  # a constructor argument used inside a group
        advice = f"inside a group it is called {renamed!r}"
    else:
        advice = f"it belongs to algorithm={'adamw' if algorithm == 'muon' else 'muon'!r}"
    return f"Muon: {where} has algorithm={algorithm!r}, which does not use {key!r}; {advice}"
