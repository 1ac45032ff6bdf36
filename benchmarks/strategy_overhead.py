"""Time per step of a Trainer with DMuonStrategy beside the plain loop of the same model.

    torchrun --nproc_per_node 2 -m benchmarks.strategy_overhead

Pairs of short runs, taking turns: the loop of the README, and a Trainer. Reported is the ratio of their median times
from one step to the next, which includes what the Trainer does between steps; the median over the pairs.
"""

from __future__ import annotations

import argparse
import itertools
import os
import statistics
import time
from collections.abc import Callable
from typing import Any

import lightning as L
import torch
import torch.distributed as dist
from rich.console import Console
from rich.table import Table
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.utils.data import DataLoader

from benchmarks.step_time import shard
from dmuon_core import Muon, clip_grad_norm_, dedicate_params
from dmuon_lightning import DMuonStrategy
from examples.gpt import GPT, VOCAB_SIZE, GPTConfig, next_byte_loss


class Module(L.LightningModule):
    """A LightningModule as one writes it, and a clock."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.model = GPT(config)
        self.times: list[float] = []

    def training_step(self, tokens: Tensor, batch_idx: int) -> Tensor:
        return next_byte_loss(self.model(tokens[:, :-1]), tokens[:, 1:])

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        self.times.append(now())

    def configure_optimizers(self) -> Any:
        return Muon(self, lr=0.01)


clock = time.perf_counter


def now() -> float:
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return clock()


def by_trainer(config: GPTConfig, data: DataLoader) -> list[float]:
    """Seconds from each start of a step to the next."""
    module = Module(config)
    trainer = L.Trainer(
        strategy=DMuonStrategy(),
        accelerator="gpu" if torch.cuda.is_available() else "cpu",
        devices=int(os.environ["LOCAL_WORLD_SIZE"]),
        max_epochs=1,
        gradient_clip_val=1.0,
        use_distributed_sampler=False,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(module, data)
    return [end - start for start, end in itertools.pairwise(module.times)]


def by_hand(config: GPTConfig, data: DataLoader) -> list[float]:
    """The same by the loop of the README."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    mesh = init_device_mesh(device, (dist.get_world_size(),))
    model = GPT(config).to(device)
    dedicate_params(model, mesh)
    shard(model, mesh)
    optimizer = Muon(model, lr=0.01)
    times = []
    for tokens in data:
        times.append(now())
        tokens = tokens.to(device)
        optimizer.zero_grad()
        next_byte_loss(model(tokens[:, :-1]), tokens[:, 1:]).backward()
        clip_grad_norm_(model, 1.0)
        optimizer.step()
    return [end - start for start, end in itertools.pairwise(times)]


def slowest_median(times: list[float], warmup: int) -> float:
    """Median time of a step on the slowest rank. Collective."""
    median = torch.tensor(statistics.median(times[warmup:]))
    if torch.cuda.is_available():
        median = median.cuda()
    dist.all_reduce(median, op=dist.ReduceOp.MAX)
    return median.item()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dim", type=int, default=256)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--context", type=int, default=128)
    parser.add_argument("--batch", type=int, default=16, help="sequences per process")
    parser.add_argument("--warmup", type=int, default=2, help="steps of each run that do not count")
    parser.add_argument("--steps", type=int, default=8, help="steps of each run that do")
    parser.add_argument("--pairs", type=int, default=7)
    parser.add_argument(
        "--processor-time", action="store_true", help="count each process's own seconds: for a machine with other work"
    )
    args = parser.parse_args()
    global clock
    clock = time.process_time if args.processor_time else time.perf_counter
    torch.set_num_threads(1)
    dist.init_process_group()
    config = GPTConfig(dim=args.dim, layers=args.layers, heads=args.dim // 32, context=args.context)
    tokens = torch.randint(0, VOCAB_SIZE, ((args.warmup + args.steps + 1) * args.batch, args.context + 1))
    data: DataLoader = DataLoader(tokens, args.batch)  # type: ignore[arg-type]

    contenders: list[Callable[[], list[float]]] = [
        lambda: by_hand(config, data),
        lambda: by_trainer(config, data),
    ]
    pairs = []
    for index in range(args.pairs):
        order = contenders if index % 2 == 0 else contenders[::-1]
        measured = {run: slowest_median(run(), args.warmup) for run in order}
        pairs.append((measured[contenders[0]], measured[contenders[1]]))
    if dist.get_rank() == 0:
        ratios = sorted(strategy / loop for loop, strategy in pairs)
        table = Table("", "median step", title=f"{dist.get_world_size()} processes, {config}, {args.pairs} pairs")
        for name, times in zip(("plain loop", "DMuonStrategy"), zip(*pairs, strict=True), strict=True):
            table.add_row(name, f"{statistics.median(times) * 1e3:.1f} ms")
        table.add_row("ratio, median of pairs", f"{statistics.median(ratios):.3f} ({ratios[0]:.3f} - {ratios[-1]:.3f})")
        Console(width=110).print(table)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
