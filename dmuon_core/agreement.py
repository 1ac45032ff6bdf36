"""Ranks compare what they are about to do before they do it, so that a difference is an error on every rank."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from typing import Any, TypeVar

import torch.distributed as dist

T = TypeVar("T")
Description = list[tuple[str, Any]]
"""What must be equal on all ranks: (name of the thing, value) pairs, in order.

Values pickle and print themselves whole: numbers, strings, tuples of them.
"""


def agree(group: dist.ProcessGroup, plan: Callable[[], tuple[T, Description]]) -> T:
    """Run ``plan`` on every rank and return its result if all ranks describe the same. Collective over ``group``.

    Args:
        group: the ranks that must agree.
        plan: computes (result, description) without any collective; may raise.

    Raises:
        Exception: what ``plan`` raised on this rank.
        RuntimeError: if it raised on another rank only, or the descriptions differ; names the first difference.
    """
    error: Exception | None = None
    result: T | None = None
    description: Description = []
    try:
        result, description = plan()
    except Exception as raised:  # noqa: BLE001 - raised again below, after the other ranks know
        error = raised
    message = None if error is None else f"{type(error).__name__}: {error}"
    # A model has many parameters and a cluster many ranks: the descriptions travel only if their hashes differ.
    digest = hashlib.sha256(repr(description).encode()).hexdigest()
    everyone = _gather((message, digest), group)
    if error is not None:
        raise error
    for rank, (failed, _) in enumerate(everyone):
        if failed is not None:
            raise RuntimeError(f"rank {rank} cannot go on: {failed}")
    if all(other == digest for _, other in everyone):
        return result  # type: ignore[return-value]
    descriptions = _gather(description, group)
    for rank, other in enumerate(descriptions):
        difference = _first_difference(descriptions[0], other)
        if difference is not None:
            name, here, there = difference
            raise RuntimeError(
                f"ranks disagree on {name}: rank 0 has {here}, rank {rank} has {there}. Build the same model with the "
                "same arguments on every rank; a predicate must depend on name and shape only"
            )
    raise AssertionError("the hashes of equal descriptions differ: a value in them does not print itself whole")


def _gather(mine: T, group: dist.ProcessGroup) -> list[T]:
    everyone: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(everyone, mine, group=group)
    return everyone


def _first_difference(first: Description, other: Description) -> tuple[str, Any, Any] | None:
    for (name, value), (other_name, other_value) in zip(first, other, strict=False):
        if name != other_name:
            return name, repr(name), repr(other_name)
        if value != other_value:
            return name, value, other_value
    if len(first) != len(other):
        longer = first if len(first) > len(other) else other
        name, value = longer[min(len(first), len(other))]
        return (name, value, "nothing") if longer is first else (name, "nothing", value)
    return None
