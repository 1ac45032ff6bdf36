"""Values of options from outside of a script: from what YAML makes of them to the types that the options have."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

_DTYPES = {
    str(dtype).removeprefix("torch."): dtype for dtype in (torch.float64, torch.float32, torch.bfloat16, torch.float16)
}


def _names(value: Any) -> list[str] | None:
    if value is None:
        return None
    if isinstance(value, str):
        return [part.strip() for part in value.split(",")]
    if isinstance(value, list) and all(isinstance(part, str) for part in value):
        return value
    raise ValueError("pass names, in a list or with commas between them")


def _flag(value: Any) -> bool:
    if isinstance(value, bool):
        return value
    if value in (0, 1):
        return bool(value)
    raise ValueError("pass true or false")


def _integer(value: Any) -> int | None:
    if value is None or (isinstance(value, int) and not isinstance(value, bool)):
        return value
    return int(str(value).replace("_", ""))


def _number(value: Any) -> float | None:
    if isinstance(value, bool):
        raise ValueError("pass a number")
    return None if value is None else float(value)  # YAML reads 1e-3 as text


def _numbers(value: Any) -> tuple[float, ...]:
    parts = value.split(",") if isinstance(value, str) else value
    return tuple(float(part) for part in parts)


def _coefficients(value: Any) -> Any:
    if isinstance(value, str) and not any(map(str.isdigit, value)):
        return value  # the name of a schedule
    if isinstance(value, list) and all(isinstance(step, list) for step in value):
        return tuple(map(_numbers, value))
    return _numbers(value)


def _whatever(value: Any) -> Any:
    return value


def _text(value: Any) -> str | None:
    return None if value is None else str(value)


def _dtype(value: Any) -> torch.dtype | None:
    if value is None:
        return None
    name = str(value).removeprefix("torch.")
    if name not in _DTYPES:
        raise ValueError(f"pass one of {', '.join(_DTYPES)}")
    return _DTYPES[name]


READERS: dict[str, Callable[[Any], Any]] = {
    "predicate": _names,
    "hook_boundary_predicate": _names,
    "hook_boundary_strict": _flag,
    "replicate_async": _flag,
    "master_dtype": _dtype,
    "max_owned_bytes": _integer,
    "sync_module_states": _flag,
    "lr": _number,
    "weight_decay": _number,
    "momentum": _number,
    "nesterov": _flag,
    "ns_coefficients": _coefficients,
    "eps": _number,
    "ns_steps": _integer,
    "adjust_lr_fn": _text,
    "ns_dtype": _dtype,
    "ns_form": _text,
    "batched": _flag,
    "split": _whatever,
    "groups": _whatever,
    "maximize": _flag,
    "cautious_weight_decay": _flag,
    "normuon": _flag,
    "beta2": _number,
    "compile": _flag,
    "adamw_lr": _number,
    "adamw_betas": _numbers,
    "adamw_eps": _number,
    "adamw_weight_decay": _number,
}
"""By option; each raises TypeError or ValueError for what the option cannot have."""
NAMES = tuple(option for option, reader in READERS.items() if reader is _names)
"""The options that hold patterns or names."""
