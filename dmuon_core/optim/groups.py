"""Parameter groups of :class:`~dmuon_core.optim.muon.Muon`: how they are built and checked."""

from __future__ import annotations

import difflib
import math
import numbers
from collections.abc import Iterable
from typing import Any, Literal, get_args

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from dmuon_core.owned_tensor import OwnedTensor
from dmuon_core.registry import find_dedicated
from dmuon_core.targets import muon_targets

Algorithm = Literal["muon", "adamw"]
AdjustLrFn = Literal["original", "match_rms_adamw"]

#: What a group of each algorithm holds, and the constructor argument that is its default.
GROUP_DEFAULTS: dict[str, dict[str, str]] = {
    "muon": {
        "lr": "lr",
        "weight_decay": "weight_decay",
        "momentum": "momentum",
        "nesterov": "nesterov",
        "ns_coefficients": "ns_coefficients",
        "eps": "eps",
        "ns_steps": "ns_steps",
        "adjust_lr_fn": "adjust_lr_fn",
        "ns_dtype": "ns_dtype",
    },
    "adamw": {"lr": "adamw_lr", "betas": "adamw_betas", "eps": "adamw_eps", "weight_decay": "adamw_weight_decay"},
}
#: Every name of the tables above, whichever side.
_ALL_OPTIONS = {name for table in GROUP_DEFAULTS.values() for pair in table.items() for name in pair}
#: The Frobenius norm of a large matrix overflows float16, which would silently zero its update.
NS_DTYPES = {"bfloat16": torch.bfloat16, "float32": torch.float32, "float64": torch.float64}
_MAX_NS_STEPS = 99  # the limit of torch.optim.Muon


def model_groups(model: nn.Module) -> list[dict[str, Any]]:
    """Split a model into the named groups "muon" and "adamw"; a group without parameters is left out.

    "muon" holds the owned parameters of a dedicated model, or the default targets of a model that owns
    nothing; "adamw" holds every other parameter that requires a gradient. Local.

    Raises:
        ValueError: no parameter of the model requires a gradient.
    """
    dedicated = find_dedicated(model)
    if dedicated is not None:
        dedicated.settle()
    trainable = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
    if not trainable:
        raise ValueError(
            f"Muon got {type(model).__name__}, in which no parameter requires a gradient; unfreeze what you "
            "want to train"
        )
    if any(isinstance(p, OwnedTensor) for _, p in model.named_parameters()):
        hidden = {id(p) for _, p in trainable if isinstance(p, OwnedTensor)}
    else:
        hidden = {id(p) for p in muon_targets(model).values()}
    split = {
        "muon": [(name, p) for name, p in trainable if id(p) in hidden],
        "adamw": [(name, p) for name, p in trainable if id(p) not in hidden],
    }
    return [{"name": name, "algorithm": name, "params": params} for name, params in split.items() if params]


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
        if key in _ALL_OPTIONS and key not in options:
            raise ValueError(_foreign_option(key, algorithm, where))
    for key, default in options.items():
        if key not in group:
            value = defaults[default]
            # A group owns its learning rate: schedulers write into a tensor lr in place.
            group[key] = value.clone() if isinstance(value, Tensor) else value
    check_options(group, f" of {where}")
    if isinstance(group["params"], Iterable) and not isinstance(group["params"], Tensor | set):
        group["params"] = list(group["params"])
        _check_params(group, where, present)
    return group  # anything else is a TypeError of torch's own


def check_defaults(defaults: dict[str, Any]) -> None:
    """Check the constructor's arguments, also those that no group uses; ValueError names the unfit one."""
    for algorithm, options in GROUP_DEFAULTS.items():
        values = {key: defaults[argument] for key, argument in options.items()}
        check_options({"algorithm": algorithm, **values}, prefix="adamw_" if algorithm == "adamw" else "")


def check_options(group: dict[str, Any], where: str = "", prefix: str = "") -> None:
    """Check the hyper-parameters of one complete group, and make its sequences tuples.

    ``where`` and ``prefix`` dress the option's name in messages: "lr of parameter group 1", "adamw_lr".
    """

    def fail(name: str, rule: str) -> ValueError:
        return ValueError(f"Muon: {prefix}{name}{where} must be {rule}, got {group[name]!r}")

    lr = group["lr"]
    if isinstance(lr, Tensor):
        if lr.numel() != 1:
            raise fail("lr", "a number or a tensor with one element")
        lr = lr.item()
    if not _is_number(lr) or not 0.0 <= lr < math.inf:
        raise fail("lr", "a finite number >= 0")
    if not _is_number(group["weight_decay"]) or not 0.0 <= group["weight_decay"] < math.inf:
        raise fail("weight_decay", "a finite number >= 0")
    if group["algorithm"] == "adamw":
        if not _is_number(group["eps"]) or not 0.0 <= group["eps"] < math.inf:
            raise fail("eps", "a finite number >= 0")
        if not _are_numbers(group["betas"], 2) or not all(0.0 <= beta < 1.0 for beta in group["betas"]):
            raise fail("betas", "two numbers in [0, 1)")
        group["betas"] = tuple(group["betas"])
        return
    if not _is_number(group["momentum"]) or not 0.0 <= group["momentum"] < 1.0:
        raise fail("momentum", "a number in [0, 1)")
    if not isinstance(group["nesterov"], bool):
        raise fail("nesterov", "True or False")
    if not _are_numbers(group["ns_coefficients"], 3) or not all(map(math.isfinite, group["ns_coefficients"])):
        raise fail("ns_coefficients", "three finite numbers (a, b, c)")
    group["ns_coefficients"] = tuple(group["ns_coefficients"])
    steps = group["ns_steps"]
    if not isinstance(steps, int) or isinstance(steps, bool) or not 0 <= steps <= _MAX_NS_STEPS:
        raise fail("ns_steps", f"an integer from 0 to {_MAX_NS_STEPS}")
    if group["adjust_lr_fn"] is not None and group["adjust_lr_fn"] not in get_args(AdjustLrFn):
        raise fail("adjust_lr_fn", f"None or one of {', '.join(map(repr, get_args(AdjustLrFn)))}")
    # Kept as a name: checkpoint tools carry numbers and strings in groups, not dtypes.
    name = str(group["ns_dtype"]).removeprefix("torch.")
    if name not in NS_DTYPES:
        raise fail("ns_dtype", f"one of {', '.join(map(str, NS_DTYPES.values()))}")
    group["ns_dtype"] = name
    # An eps that is zero, also after rounding, turns the all-zero gradient of an unused layer into NaN
    # weights.
    eps = group["eps"]
    if not _is_number(eps) or not math.isfinite(eps) or not _rounded(eps, name) > 0:
        raise fail("eps", f"a finite number > 0 in {name}")


def _rounded(value: float, dtype: str) -> float:
    return torch.tensor(value, dtype=NS_DTYPES[dtype], device="cpu").item()  # also where the default device is meta


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


def _is_number(value: Any) -> bool:
    return isinstance(value, numbers.Real) and not isinstance(value, bool)


def _are_numbers(value: Any, count: int) -> bool:
    return isinstance(value, tuple | list) and len(value) == count and all(map(_is_number, value))
