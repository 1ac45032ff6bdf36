"""Which mesh and mode to train in: the fastest predicted one that fits in memory."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

from dmuon_core.planning.hardware import Hardware
from dmuon_core.planning.layout import Layout, Placed, place
from dmuon_core.planning.memory import Memory, memories
from dmuon_core.planning.shapes import ModelShapes
from dmuon_core.planning.timing import Times, Work, step_times
from dmuon_core.planning.units import size

_TIE = 0.005
"""Predicted times this close say nothing: then less memory wins."""


@dataclass(frozen=True)
class Limits:
    """What a layout has to keep to, per rank.

    Attributes:
        memory: bytes of the device; None for no limit.
        activations: bytes that activations take, which are not predicted.
        max_owned_bytes: as in `dedicate_params`.
    """

    memory: int | None = None
    activations: int = 0
    max_owned_bytes: int | None = None

    def fit(self, needed: Memory) -> bool:
        """Whether the figures for one rank fit."""
        return self.memory is None or needed.total + self.activations <= self.memory


@dataclass(frozen=True)
class Option:
    """One layout with what it takes. ``memory`` is of the rank that needs most; ``times`` None without hardware."""

    placed: Placed
    memory: Memory
    times: Times | None
    fits: bool

    @property
    def layout(self) -> Layout:
        return self.placed.layout


@dataclass(frozen=True)
class Recommendation:
    """The best option, the next one, and why, a sentence each. ``best`` is None if nothing fits."""

    options: tuple[Option, ...]
    best: Option | None
    runner_up: Option | None
    reasons: tuple[str, ...]


def layouts(devices: int, like: Layout) -> list[Layout]:
    """Every (G, R) with G x R devices, in Z3 and Z2; dtypes as in ``like``."""
    sizes = [shard for shard in range(1, devices + 1) if devices % shard == 0]
    return [
        replace(like, shard=shard, replicate=devices // shard, zero3=zero3)
        for shard in reversed(sizes)
        for zero3 in (True, False)
    ]


def evaluate(
    shapes: ModelShapes, layout: Layout, hardware: Hardware | None, work: Work, limits: Limits, normuon: bool = False
) -> Option:
    """One layout's owners, memory of its fullest rank, and times. Pure.

    Raises:
        ValueError: no partition keeps to ``limits.max_owned_bytes``.
    """
    placed = place(shapes, layout, limits.max_owned_bytes)
    fullest = max(memories(placed, normuon=normuon), key=lambda needed: needed.total)
    times = None if hardware is None else step_times(placed, hardware, work)
    return Option(placed, fullest, times, limits.fit(fullest))


def recommend(options: Iterable[Option]) -> Recommendation:
    """Choose among evaluated options, of which all have times. Pure."""
    options = tuple(options)
    fitting = sorted((option for option in options if option.fits), key=_seconds)
    if not fitting:
        least = min(options, key=lambda option: option.memory.total)
        return Recommendation(
            options,
            None,
            None,
            (f"Nothing fits: {least.layout} needs least, {size(least.memory.total)} on its fullest rank.",),
        )
    # Among what is as fast as the fastest, what needs least memory.
    tied = [option for option in fitting if _seconds(option) <= _seconds(fitting[0]) * (1 + _TIE)]
    best = min(tied, key=lambda option: (option.memory.total, _seconds(option)))
    others = [option for option in fitting if option is not best]
    runner_up = others[0] if others else None
    return Recommendation(options, best, runner_up, tuple(_reasons(options, best, runner_up)))


def _seconds(option: Option) -> float:
    assert option.times is not None
    return option.times.step


def _reasons(options: tuple[Option, ...], best: Option, runner_up: Option | None) -> Iterable[str]:
    fitting = sum(option.fits for option in options)
    yield (
        f"{best.layout}: {fitting} of {len(options)} layouts fit, and none of these is predicted more than {_TIE:.1%} "
        f"faster than its {_seconds(best) * 1e3:.1f} ms a step."
    )
    if runner_up is not None:
        yield f"Next is {runner_up.layout}: {_difference(runner_up, best)}."
    twin = next((o for o in options if o.layout == replace(best.layout, zero3=not best.layout.zero3)), None)
    if twin is not None and twin is not runner_up:
        yield f"{twin.layout.mode} on the same mesh: {_difference(twin, best)}."


def _difference(other: Option, best: Option) -> str:
    assert other.times is not None
    assert best.times is not None
    slower = other.times.step / best.times.step - 1
    speed = "as fast" if abs(slower) <= _TIE else f"{abs(slower):.1%} {'slower' if slower > 0 else 'faster'}"
    gap = other.memory.total / best.memory.total - 1
    size = "the same memory" if abs(gap) < 0.005 else f"{abs(gap):.1%} {'more' if gap > 0 else 'less'} memory"
    parts = {
        "forward and backward": (other.times.forward + other.times.backward)
        - (best.times.forward + best.times.backward),
        "the optimizer": other.times.optimizer - best.times.optimizer,
        "the publish": other.times.exposed_publish - best.times.exposed_publish,
    }
    part, seconds = max(parts.items(), key=lambda item: abs(item[1]))
    why = f", {abs(seconds) * 1e3:.1f} ms {'more' if seconds > 0 else 'less'} in {part}" if abs(slower) > _TIE else ""
    return f"{speed} with {size}{why}" + ("" if other.fits else "; it does not fit")
