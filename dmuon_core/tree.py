"""Find and replace gradient-requiring tensors in what modules take and return: any nesting of common containers."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable
from typing import Any

import torch


def grad_tensors(value: Any) -> list[torch.Tensor]:
    """The tensors that require grad in nested dicts, lists, tuples, namedtuples and dataclasses, in a fixed order."""
    found: list[torch.Tensor] = []

    def note(tensor: torch.Tensor) -> torch.Tensor:
        found.append(tensor)
        return tensor

    map_grad_tensors(note, value)
    return found


def map_grad_tensors(function: Callable[[torch.Tensor], torch.Tensor], value: Any) -> Any:
    """``value`` with ``function`` applied to every tensor that requires grad.

    Containers are copied only if something in them changed, so that other objects keep their identity. Visits in the
    order of :func:`grad_tensors`.
    """
    if isinstance(value, torch.Tensor):
        return function(value) if value.requires_grad else value
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return _map_dataclass(function, value)
    if isinstance(value, dict):
        new_items = {key: map_grad_tensors(function, item) for key, item in value.items()}
        if all(new_items[key] is item for key, item in value.items()):
            return value
        result = copy.copy(value)  # keeps subclasses and their order
        for key, item in new_items.items():
            result[key] = item
        return result
    if isinstance(value, (list, tuple)):
        new = [map_grad_tensors(function, item) for item in value]
        if all(a is b for a, b in zip(new, value, strict=True)):
            return value
        if hasattr(value, "_fields"):
            return type(value)(*new)  # namedtuple
        return type(value)(new)
    return value


def _map_dataclass(function: Callable[[torch.Tensor], torch.Tensor], value: Any) -> Any:
    result = None
    for field in dataclasses.fields(value):
        old = getattr(value, field.name)
        new = map_grad_tensors(function, old)
        if new is not old:
            if result is None:
                result = copy.copy(value)
            if isinstance(result, dict):  # transformers.ModelOutput is both; its items follow its attributes
                result[field.name] = new
            object.__setattr__(result, field.name, new)
    return value if result is None else result
