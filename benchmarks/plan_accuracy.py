"""How good the predicted step times are: predicted beside measured, on the machine whose constants are measured too.

    torchrun --nproc_per_node 2 -m benchmarks.plan_accuracy
    torchrun --nproc_per_node 4 -m benchmarks.plan_accuracy --replicate 2

Each round takes one sample of every constant (`dmuon_core.planning.measure`) and one training step of every workload:
whatever else the machine does meets the prediction and what it is held against alike. The constants come from other
models and sizes than the workloads. Reported are medians over the rounds, of the slowest rank.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
import warnings
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from rich.console import Console
from rich.table import Table
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard

from dmuon_core import Muon, dedicate_params, default_boundaries
from dmuon_core.planning.hardware import Hardware
from dmuon_core.planning.layout import Layout, place
from dmuon_core.planning.measure import Measurement, Probe
from dmuon_core.planning.shapes import shapes_of
from dmuon_core.planning.timing import Work, step_times
from examples.gpt import GPT, VOCAB_SIZE, GPTConfig

PARTS = ("forward and backward", "optimizer", "step")


@dataclass(frozen=True)
class Case:
    """One workload; ``batch`` is sequences of one rank."""

    dim: int
    layers: int
    batch: int
    zero3: bool
    context: int = 128

    def __str__(self) -> str:
        return f"{self.layers} x {self.dim}, {self.batch} x {self.context} tokens, {'Z3' if self.zero3 else 'Z2'}"


CASES = [Case(192, 4, 8, True), Case(192, 4, 8, False), Case(384, 4, 8, True), Case(384, 4, 8, False),
         Case(384, 8, 16, True)]  # fmt: skip


class Training:
    """A workload that is ready to step, with the seconds of its parts so far."""

    def __init__(self, case: Case, mesh: DeviceMesh) -> None:
        self.case = case
        model = GPT(GPTConfig(dim=case.dim, layers=case.layers, heads=case.dim // 32, context=case.context))
        attention = 2.0 * case.layers * case.dim
        self.shapes = shapes_of(model, attention=attention)
        dedicate_params(model, mesh, reshard_after_forward=case.zero3)
        for block in default_boundaries(model):
            fully_shard(block, mesh=mesh, reshard_after_forward=case.zero3)
        fully_shard(model, mesh=mesh)
        self.model, self.optimizer = model, Muon(model, lr=0.01)
        self.seconds: dict[str, list[float]] = {part: [] for part in PARTS}

    def step(self) -> None:
        tokens = torch.randint(0, VOCAB_SIZE, (self.case.batch, self.case.context + 1))
        dist.barrier()
        start = time.perf_counter()
        logits = self.model(tokens[:, :-1])
        F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten()).backward()
        middle = time.perf_counter()
        dist.barrier()  # the optimizer by itself: not a wait for a rank that is late in backward
        between = time.perf_counter()
        self.optimizer.step()
        self.optimizer.zero_grad()
        end = time.perf_counter()
        mine = torch.tensor([middle - start, end - between], dtype=torch.float64)
        dist.all_reduce(mine, op=dist.ReduceOp.MAX)
        passes, optimizer = mine.tolist()
        for part, seconds in zip(PARTS, (passes, optimizer, passes + optimizer), strict=True):
            self.seconds[part].append(seconds)

    def predicted(self, hardware: Hardware, layout: Layout) -> dict[str, float]:
        work = Work(self.case.batch * self.case.context, self.case.context, per_node=layout.ranks)
        times = step_times(place(self.shapes, layout), hardware, work)
        passes = times.forward + times.backward + times.exposed_publish
        return dict(zip(PARTS, (passes, times.optimizer, passes + times.optimizer), strict=True))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--replicate", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=15, help="at least 2, for quartiles")
    parser.add_argument("--json", type=Path, help="also write the constants, predictions and measurements here")
    args = parser.parse_args()
    if args.rounds < 2:
        parser.error("--rounds must be at least 2")
    warnings.filterwarnings("ignore")
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    shard = dist.get_world_size() // args.replicate
    mesh = init_device_mesh("cpu", (shard,)) if args.replicate == 1 else init_device_mesh(
        "cpu", (args.replicate, shard), mesh_dim_names=("replicate", "shard"))  # fmt: skip
    constants = Measurement(Probe(group=shard), torch.device("cpu"))
    trainings = [Training(case, mesh) for case in CASES]
    for index in range(args.rounds + 2):
        if index == 2:  # the first two warm up
            constants.forget()
            for training in trainings:
                training.seconds = {part: [] for part in PARTS}
        constants.round()
        for training in trainings:
            training.step()
    hardware = constants.hardware()
    if dist.get_rank() == 0:
        show(trainings, hardware, shard, args.replicate, args.json)
    dist.barrier()
    dist.destroy_process_group()


def show(trainings: list[Training], hardware: Hardware, shard: int, replicate: int, path: Path | None) -> None:
    table = Table("GPT", *(f"{part}: predicted / measured (quartiles)" for part in PARTS))
    found = []
    for training in trainings:
        predicted = training.predicted(hardware, Layout(shard, replicate, training.case.zero3))
        cells, measured = [], {}
        for part in PARTS:
            low, median, high = statistics.quantiles(training.seconds[part], n=4)
            measured[part] = median
            cells.append(f"{predicted[part] * 1e3:.0f} / {median * 1e3:.0f} ms ({low * 1e3:.0f} - {high * 1e3:.0f}), "
                         f"{predicted[part] / median - 1:+.0%}")  # fmt: skip
        table.add_row(str(training.case), *cells)
        found.append({"case": asdict(training.case), "predicted": predicted, "measured": measured})
    print(hardware.to_json())
    table.title = f"{shard} shard ranks x {replicate} replicas"
    Console(width=150).print(table)
    if path is not None:
        path.write_text(json.dumps({"hardware": json.loads(hardware.to_json()), "cases": found}, indent=2) + "\n")


if __name__ == "__main__":
    main()
