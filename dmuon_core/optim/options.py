"""Hyper-parameters of :class:`~dmuon_core.optim.muon.Muon`: which algorithm has which, and their permitted values."""

from __future__ import annotations

import functools
import math
import numbers
from collections.abc import Callable
from typing import Any, get_args

import torch
from torch import Tensor

from dmuon_core.optim.newton_schulz import Form
from dmuon_core.optim.polar import ScheduleName, schedule
from dmuon_core.optim.update import NS_DTYPES, AdjustLrFn

_SAME = ("lr", "weight_decay", "eps", "maximize")
_MUON = (
    "momentum", "nesterov", "ns_coefficients", "ns_steps", "adjust_lr_fn", "ns_dtype", "ns_form", "batched", "split",
    "normuon", "beta2", "cautious_weight_decay", "compile",
)  # fmt: skip
#: What a group of each algorithm holds, and the constructor argument that is its default.
GROUP_DEFAULTS: dict[str, dict[str, str]] = {
    "muon": {name: name for name in (*_SAME, *_MUON)},
    "adamw": {
        "lr": "adamw_lr",
        "betas": "adamw_betas",
        "eps": "adamw_eps",
        "weight_decay": "adamw_weight_decay",
        "maximize": "maximize",
    },
}
#: Every name of the tables above, whichever side.
ALL_OPTIONS = {name for table in GROUP_DEFAULTS.values() for pair in table.items() for name in pair}
_MAX_NS_STEPS = 99  # the limit of torch.optim.Muon


def check_defaults(defaults: dict[str, Any]) -> None:
    """Check the constructor's arguments, also those that no group uses; ValueError names the unfit one."""
    for algorithm, options in GROUP_DEFAULTS.items():
        values = {key: defaults[argument] for key, argument in options.items()}
        renamed = {key: argument for key, argument in options.items() if argument != key}
        check_options({"algorithm": algorithm, **values}, names=renamed)


def check_options(group: dict[str, Any], where: str = "", names: dict[str, str] | None = None) -> None:
    """Check the hyper-parameters of one complete group, and make its sequences tuples.

    ``where`` and ``names`` dress an option for messages: "lr of parameter group 1", "adamw_lr".
    """
    rules = {**_RULES, **(_MUON_RULES if group["algorithm"] == "muon" else _ADAMW_RULES)}
    for name, (fits, rule) in rules.items():
        if not fits(group[name]):
            label = (names or {}).get(name, name)
            raise ValueError(f"Muon: {label}{where} must be {rule}, got {group[name]!r}")
    if group["algorithm"] == "adamw":
        group["betas"] = tuple(group["betas"])
        return
    if not isinstance(group["ns_coefficients"], str):
        group["ns_coefficients"] = _as_tuples(group["ns_coefficients"])
    name = group["ns_dtype"] = _dtype_name(group["ns_dtype"])
    # An eps that is zero, also after rounding, turns the all-zero gradient of an unused layer into NaN
    # weights. float16 is normalized in float32.
    eps = group["eps"]
    divided_in = torch.float32 if name == "float16" else NS_DTYPES[name]
    # On the CPU also where the default device is meta.
    if not _is_number(eps) or not math.isfinite(eps) or not torch.tensor(eps, dtype=divided_in, device="cpu") > 0:
        raise ValueError(f"Muon: eps{where} must be a finite number > 0 in {name}, got {eps!r}")
    if group["ns_form"] == "gram" and name == "bfloat16":
        raise ValueError(
            f"Muon: ns_form{where} must be 'direct' or 'auto' with ns_dtype=torch.bfloat16, got 'gram': its precision "
            "does not suffice; pass ns_dtype=torch.float32"
        )


def options_problem(group: dict[str, Any]) -> str | None:
    """What is wrong with the options of a complete group, also with one that was written into it later. Local.

    Learning rate and weight decay, which change all the time and may be on a device, are not looked at.
    """
    left_out = ("lr", "weight_decay", "split")
    names = [name for name in GROUP_DEFAULTS[group["algorithm"]] if name not in left_out]
    values = (_as_tuples(v) if isinstance(v, tuple | list) else v for v in map(group.get, names))
    try:
        return _problem_of(group["algorithm"], tuple(zip(names, values, strict=True)))
    except TypeError:  # something without a hash
        return f"Muon: an option of algorithm={group['algorithm']!r} is of a wrong type"


@functools.lru_cache(maxsize=256)
def _problem_of(algorithm: str, options: tuple[tuple[str, Any], ...]) -> str | None:
    try:
        check_options({"algorithm": algorithm, "lr": 0.0, "weight_decay": 0.0, **dict(options)})
    except ValueError as error:
        return str(error)
    return None


def _is_number(value: Any) -> bool:
    return isinstance(value, numbers.Real) and not isinstance(value, bool)


def _are_numbers(value: Any, count: int) -> bool:
    return isinstance(value, tuple | list) and len(value) == count and all(map(_is_number, value))


def _is_scalar(value: Any) -> bool:
    if isinstance(value, Tensor):
        return value.numel() == 1 and 0.0 <= value.item() < math.inf
    return _is_number(value) and 0.0 <= value < math.inf


def _is_fraction(value: Any) -> bool:
    return _is_number(value) and 0.0 <= value < 1.0


def _is_bool(value: Any) -> bool:
    return isinstance(value, bool)


def _is_steps(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value <= _MAX_NS_STEPS


def _is_schedule(value: Any) -> bool:
    if isinstance(value, str):
        return value in get_args(ScheduleName)
    if not isinstance(value, tuple | list):
        return False
    try:
        schedule(value, 0)
    except ValueError:
        return False
    return True


def _dtype_name(value: Any) -> str:
    return str(value).removeprefix("torch.")


def _as_tuples(value: Any) -> tuple[Any, ...]:
    return tuple(tuple(entry) if isinstance(entry, tuple | list) else entry for entry in value)


def _one_of(choices: tuple[Any, ...]) -> str:
    return f"one of {', '.join(map(repr, choices))}"


_Rule = tuple[Callable[[Any], bool], str]

_RULES: dict[str, _Rule] = {
    "lr": (_is_scalar, "a finite number >= 0, or a tensor with one element"),
    "weight_decay": (_is_scalar, "a finite number >= 0, or a tensor with one element"),
    "maximize": (_is_bool, "True or False"),
}
_ADAMW_RULES: dict[str, _Rule] = {
    "eps": (lambda value: _is_number(value) and 0.0 <= value < math.inf, "a finite number >= 0"),
    "betas": (
        lambda value: _are_numbers(value, 2) and all(0.0 <= beta < 1.0 for beta in value),
        "two numbers in [0, 1)",
    ),
}
_MUON_RULES: dict[str, _Rule] = {
    "momentum": (_is_fraction, "a number in [0, 1)"),
    "nesterov": (_is_bool, "True or False"),
    "ns_coefficients": (
        _is_schedule,
        f"three finite numbers (a, b, c), a sequence of such, or {_one_of(get_args(ScheduleName))}",
    ),
    "ns_steps": (_is_steps, f"an integer from 0 to {_MAX_NS_STEPS}"),
    "adjust_lr_fn": (
        lambda value: value is None or value in get_args(AdjustLrFn),
        f"None or {_one_of(get_args(AdjustLrFn))}",
    ),
    "ns_dtype": (
        lambda value: _dtype_name(value) in NS_DTYPES,
        f"one of {', '.join(map(str, NS_DTYPES.values()))}",
    ),
    "ns_form": (lambda value: value in get_args(Form), _one_of(get_args(Form))),
    "batched": (_is_bool, "True or False"),
    "normuon": (_is_bool, "True or False"),
    "beta2": (_is_fraction, "a number in [0, 1)"),
    "cautious_weight_decay": (_is_bool, "True or False"),
    "compile": (_is_bool, "True or False"),
}
