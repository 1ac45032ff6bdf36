"""A plan as a picture: memory, traffic, and the predicted step, Z3 beside Z2."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from dmuon_core.planning.recommend import Option
from dmuon_core.planning.traffic import group_size, through_link, transfers

_MEMORY = ("owned_weights", "momentum", "sharded_weights", "adam", "owned_gradients", "sharded_gradients", "buffers")


def draw(options: Sequence[Option], path: Path) -> None:
    """Write a PNG, SVG or PDF by the name's ending. Local.

    Raises:
        ValueError: without matplotlib, for an ending that it does not know, a file that cannot be written.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ValueError("--plot needs matplotlib: pip install 'dmuon-lightning[plan]'") from error
    figure = Figure(figsize=(13, 4.5), layout="constrained")
    axes = figure.subplots(1, 3 if options[0].times else 2)
    names = [option.layout.mode for option in options]
    _stack(axes[0], names, {part.replace("_", " "): [getattr(o.memory, part) / 1e9 for o in options]
                            for part in _MEMORY})  # fmt: skip
    axes[0].set(title="Memory of the fullest rank, no activations", ylabel="GB")
    _stack(axes[1], names, _traffic(options))
    axes[1].set(title="Through one rank's link in a step", ylabel="GB")
    times = [option.times for option in options if option.times is not None]
    if times:
        parts = {"forward": "forward", "backward": "backward", "optimizer": "optimizer", "publish": "exposed_publish"}
        _stack(axes[2], names, {label: [getattr(t, part) * 1e3 for t in times] for label, part in parts.items()})
        axes[2].set(title="Predicted step", ylabel="ms")
    figure.suptitle(f"{options[0].placed.shapes.name}, {options[0].layout.shard} shard ranks x "
                    f"{options[0].layout.replicate} replicas")  # fmt: skip
    try:
        figure.savefig(path)
    except OSError as error:
        raise ValueError(f"cannot write {path}: {error}") from error


def _traffic(options: Sequence[Option]) -> dict[str, list[float]]:
    found: dict[str, list[float]] = {}
    for index, option in enumerate(options):
        for transfer in transfers(option.placed, 0):
            values = found.setdefault(f"{transfer.kind.value} ({transfer.axis.value})", [0.0] * len(options))
            values[index] += through_link(transfer, group_size(option.placed, transfer.axis)) / 1e9
    return found


def _stack(axes: Any, names: Sequence[str], parts: dict[str, list[float]]) -> None:
    below = [0.0] * len(names)
    for label, values in parts.items():
        axes.bar(names, values, bottom=below, label=label, width=0.55)
        below = [low + value for low, value in zip(below, values, strict=True)]
    axes.set_xlim(-0.6, len(names) - 0.4)
    axes.set_ylim(0, 1.7 * max(below) or 1)  # room for the legend
    axes.legend(fontsize=7, loc="upper right")
