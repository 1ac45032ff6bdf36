"""The options of DMuonPlugin and of its Muon as a script passes them: checked, completed and compared. All local."""

from __future__ import annotations

import difflib
import inspect
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
import torch.nn as nn

from dmuon_core import Muon

MUON_OPTIONS = tuple(name for name in inspect.signature(Muon.__init__).parameters if name not in ("self", "params"))
"""What the optimizer can be told from outside."""
DEFAULTS: dict[str, Any] = {
    "predicate": None,
    "hook_boundary_predicate": None,
    "hook_boundary_strict": True,
    "replicate_async": True,
    "master_dtype": torch.float32,
    "max_owned_bytes": None,
    "sync_module_states": True,
}
"""What DMuonPlugin adds to Accelerate's plugin, besides ``muon``."""


def nearest(name: object, known: Iterable[str]) -> str:
    """Which of ``known`` was meant, for a message."""
    names = {known_name.casefold(): known_name for known_name in known}
    near = difflib.get_close_matches(str(name).casefold(), names, n=1)
    return f"did you mean {names[near[0]]!r}?" if near else f"there are {', '.join(names.values())}"


def check_muon_options(options: Mapping[str, Any]) -> None:
    """Check options of the optimizer before there is a model.

    Raises:
        ValueError: an option that it does not have, with the nearest one; a value that it cannot have.
    """
    for name in options:
        if name not in MUON_OPTIONS:
            raise ValueError(f"Muon has no option {name!r}: {nearest(name, MUON_OPTIONS)}")
    groups = options.get("groups")
    if groups is not None and not (
        isinstance(groups, Mapping) and all(isinstance(group, Mapping) for group in groups.values())
    ):
        raise ValueError(f"Muon: groups must be a dict of dicts, by the names of the groups, got {groups!r}")
    of_a_model = ("split", "groups", "qk_clip")
    try:
        Muon([nn.Parameter(torch.zeros(2, 2))], **{k: v for k, v in options.items() if k not in of_a_model})
    except TypeError as error:
        raise ValueError(f"Muon: an option of {dict(options)!r} is of a wrong type: {error}") from None


def checked_options(options: Mapping[str, Any], who: str) -> dict[str, Any]:
    """``options`` of DMuonPlugin, checked, with patterns and names in lists.

    Args:
        options: any of :data:`DEFAULTS`, and ``muon``.
        who: took them, for messages.

    Raises:
        ValueError: an option that does not exist, with the nearest one; a value that it cannot have.
    """
    known = (*DEFAULTS, "muon")
    for name in options:
        if name not in known:
            raise ValueError(f"DMuonPlugin has no option {name!r}: {nearest(name, known)}")
    return {name: _CHECKS[name](value, f"{who}({name}={value!r})") for name, value in options.items()}


def same_value(one: Any, other: Any) -> bool:
    """Whether two values of an option mean the same; functions do if they have the same code over the same values."""
    if one is other:
        return True
    if isinstance(one, Mapping) and isinstance(other, Mapping):
        return one.keys() == other.keys() and all(same_value(value, other[key]) for key, value in one.items())
    try:
        if hasattr(one, "__code__") and hasattr(other, "__code__"):
            return one.__code__ == other.__code__ and _over(one) == _over(other)
        return bool(one == other)
    except (RuntimeError, TypeError, ValueError):  # of values that cannot say so, such as tensors
        return False


def differing(one: Mapping[str, Any], other: Mapping[str, Any]) -> list[str]:
    """The options that only one of both has, or that have different values."""
    names = [*one, *(name for name in other if name not in one)]
    return [n for n in names if n not in one or n not in other or not same_value(one[n], other[n])]


def _over(function: Any) -> tuple[Any, ...]:
    cells = function.__closure__ or ()
    held = [cell.cell_contents for cell in cells]
    return (*held, function.__defaults__, function.__kwdefaults__, getattr(function, "__self__", None))


def flat(options: Mapping[str, Any]) -> dict[str, Any]:
    """``options`` with those of ``muon`` beside the others, as ``muon.lr``."""
    return {
        **{name: value for name, value in options.items() if name != "muon"},
        **{f"muon.{name}": value for name, value in options.get("muon", {}).items()},
    }


def _names(value: Any, what: str) -> Any:
    if value is None or isinstance(value, str) or (callable(value) and not isinstance(value, type)):
        return value
    names = list(value) if isinstance(value, Iterable) else [None]
    if not all(isinstance(name, str) for name in names):
        raise ValueError(f"{what}: pass a function, or names in a list")
    return names


def _flag(value: Any, what: str) -> bool:
    if value not in (True, False):  # so 0 and 1 too
        raise ValueError(f"{what}: pass True or False")
    return bool(value)


def _dtype(value: Any, what: str) -> torch.dtype | None:
    if value is not None and not (isinstance(value, torch.dtype) and value.is_floating_point):
        raise ValueError(f"{what}: pass a floating-point dtype such as torch.float32, or None")
    return value


def _bytes(value: Any, what: str) -> int | None:
    if value is not None and (not isinstance(value, int) or isinstance(value, bool) or value <= 0):
        raise ValueError(f"{what}: pass a number of bytes, a positive int, or None")
    return value


def _muon(value: Any, what: str) -> dict[str, Any]:
    if not isinstance(value, Mapping):
        raise ValueError(f"{what}: pass a dict of options, such as {{'lr': 0.02}}")
    check_muon_options(value)
    return dict(value)


_CHECKS: dict[str, Callable[[Any, str], Any]] = {
    "predicate": _names,
    "hook_boundary_predicate": _names,
    "hook_boundary_strict": _flag,
    "replicate_async": _flag,
    "master_dtype": _dtype,
    "max_owned_bytes": _bytes,
    "sync_module_states": _flag,
    "muon": _muon,
}
