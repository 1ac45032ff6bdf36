"""Draws the timelines in docs/schedule.md from recorded runs: `python -m docs.draw_schedule` in the repository root.

Two processes (Z3) or four (HSDP) train the test GPT for two steps on the simulated streams of `tests/schedule`, which
records what the runtime queues where and after what. The recording of rank 0 for the second step and the beginning of
the third is then played on one current stream and one stream a lane, each in order, with nominal durations. So order
and waits are the runtime's; lengths are made up, in proportion to what is typical, and the same at every run.
"""

from __future__ import annotations

import re
from pathlib import Path

import matplotlib

matplotlib.use("svg")
import matplotlib.pyplot as plt
import torch.nn as nn
from torch import Tensor

from dmuon_core.streams import Lane
from tests.distributed.harness import run_distributed
from tests.schedule.simulated import CURRENT, Record, SimulatedStreams
from tests.schedule.training import Case, Run

HERE = Path(__file__).parent
CASE = Case("gpt")

# Durations of work on the current stream by the beginning of its label, and of collectives by lane.
COMPUTE = {"embed": 3.0, "forward": 4.0, "head": 3.0, "backward of block": 8.0, "backward": 2.0, "step": 6.0}
COPY = {"pack": 0.5, "unpack": 0.5, "copy_": 0.2}
NETWORK = {Lane.BROADCAST: 3.0, Lane.REDUCE: 3.0, Lane.REPLICATE_REDUCE: 7.0, Lane.PUBLISH: 7.0}
FLAGS = 0.6
COLORS = {
    CURRENT: "#4c78a8",
    Lane.BROADCAST.value: "#59a14f",
    Lane.REDUCE.value: "#f28e2b",
    Lane.REPLICATE_REDUCE.value: "#e15759",
    Lane.PUBLISH.value: "#b07aa1",
}


def record(mesh_shape: tuple[int, ...]) -> list[Record]:
    """Runs on a rank: the second training step of a fresh model and the forward after it, as queued."""
    streams = SimulatedStreams()
    run = Run(CASE, mesh_shape, streams)
    _note_compute(run.model, streams)
    records: list[Record] = []
    for step in range(2):
        if step == 1:
            records = streams.record()
        run.forward_backward(step, {})
        streams.note("step")
        run.step()
        run.optimizer.zero_grad()
    run.forward(2)
    streams.records = None
    streams.flush()
    return records


def _note_compute(model: nn.Module, streams: SimulatedStreams) -> None:
    """Say where the user's own work is. These hooks come after the library's, so that its work is in front."""
    model.register_forward_pre_hook(lambda module, args: streams.note("embed"))
    model.norm.register_forward_pre_hook(lambda module, args: streams.note("head"))

    def on_gradient(tensor: Tensor, label: str) -> None:
        if tensor.requires_grad:
            tensor.register_hook(lambda grad: streams.note(label))

    model.register_forward_hook(lambda module, args, output: on_gradient(output, "backward of head"))
    for index, block in enumerate(model.blocks):
        block.register_forward_pre_hook(lambda module, args, i=index: streams.note(f"forward of block {i}"))
        block.register_forward_hook(lambda module, args, out, i=index: on_gradient(out, f"backward of block {i}"))


def duration(record: Record) -> float:
    """Nominal length of one piece of work."""
    if record.place != CURRENT:
        return FLAGS if record.label.startswith("the agreement") else NETWORK[Lane(record.place)]
    for lengths in (COMPUTE, COPY):
        for beginning, length in lengths.items():
            if record.label.startswith(beginning):
                return length
    return 0.0


def play(records: list[Record]) -> dict[int, tuple[float, float]]:
    """When each piece of work begins and ends, by its number: every place in order, each after what it needs."""
    times: dict[int, tuple[float, float]] = {}
    free_from: dict[str, float] = {}
    for item in records:
        begin = max([free_from.get(item.place, 0.0)] + [times[n][1] for n in item.needs if n in times])
        times[item.number] = begin, begin + duration(item)
        free_from[item.place] = times[item.number][1]
    return times


def draw(records: list[Record], title: str, path: Path) -> None:
    """One row a stream; a thin line from each end of work to the start on another stream that waits for it."""
    times = play(records)
    used = {item.place for item in records}
    rows = [place for place in (CURRENT, *(lane.value for lane in Lane)) if place in used]
    height = {place: len(rows) - 1 - row for row, place in enumerate(rows)}
    by_number = {item.number: item for item in records}
    figure, axes = plt.subplots(figsize=(19, 0.75 * len(rows) + 1.3))
    for item in records:
        begin, end = times[item.number]
        y = height[item.place]
        if end > begin:
            is_copy = item.place == CURRENT and any(item.label.startswith(name) for name in COPY)
            color = "#9ecae9" if is_copy else COLORS[item.place]
            axes.barh(y, end - begin, 0.5, begin, color=color, edgecolor="white", linewidth=0.8)
            if not is_copy:
                axes.text((begin + end) / 2, y, _short(item.label), ha="center", va="center", fontsize=7)
        for number in item.needs:
            source = by_number.get(number)
            if source is None or source.place == item.place:
                continue
            down = 0.25 if height[source.place] > y else -0.25
            line = [times[number][1], begin], [height[source.place] - down, y + down]
            axes.plot(*line, color=COLORS[source.place], linewidth=0.9)
            axes.plot(line[0][1], line[1][1], marker="o", markersize=2.5, color=COLORS[source.place])
    names = [f"{place} stream" if place == CURRENT else place for place in rows]
    axes.set_yticks([height[place] for place in rows], names)
    axes.set_xticks([])
    axes.set_xlim(0, max(end for _, end in times.values()))
    axes.set_ylim(-0.6, len(rows) - 0.4)
    axes.set_title(title, fontsize=10, loc="left")
    for side in ("top", "right", "bottom", "left"):
        axes.spines[side].set_visible(False)
    figure.tight_layout()
    figure.savefig(path, metadata={"Date": None})
    plt.close(figure)


def _short(label: str) -> str:
    block = re.search(r"blocks\.(\d)", label)
    if block is not None:
        return block.group(1)
    if label.startswith("the agreement"):
        return "f"
    return label.replace(" of block ", "\n").replace(" of ", "\n").replace("backward", "bwd").replace("forward", "fwd")


def main() -> None:
    plt.rcParams.update({"svg.hashsalt": "schedule", "svg.fonttype": "none"})  # the same small file at every run
    legend = "numbers: block; f: flags; light: packing; lines: waits across streams; lengths are nominal"
    draw(run_distributed(record, 2, (2,))[0], f"Z3 on rank 0 of 2 ({legend})", HERE / "schedule_z3.svg")
    draw(run_distributed(record, 4, (2, 2))[0], f"HSDP on rank 0 of 2 x 2 ({legend})", HERE / "schedule_hsdp.svg")


if __name__ == "__main__":
    main()
