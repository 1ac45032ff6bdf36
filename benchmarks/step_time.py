"""Step time of owned matrices beside FSDP2 + AdamW and beside the usual FSDP2 + Muon, in one run.

    torchrun --nproc_per_node 2 -m benchmarks.step_time

All three train the same GPT on the same processes and take turns, one step each, so that whatever else the machine
does meets all of them alike. "FSDP2 + Muon" is the common way to run Muon on FSDP2: every rank gathers every gradient
and runs Newton-Schulz on it. Reported are medians over the steps and the ratio of each to FSDP2 + AdamW.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from rich.console import Console
from rich.table import Table
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor

from dmuon_core import Muon, dedicate_params, default_boundaries
from dmuon_core.optim import orthogonalize
from dmuon_core.targets import muon_targets
from examples.gpt import GPT, VOCAB_SIZE, GPTConfig

Step = Callable[[torch.Tensor], None]


def shard(model: nn.Module, mesh: DeviceMesh) -> None:
    for block in default_boundaries(model):
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)


def train_step(model: nn.Module, optimizers: list[torch.optim.Optimizer], tokens: torch.Tensor) -> None:
    logits = model(tokens[:, :-1])
    F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten()).backward()
    for optimizer in optimizers:
        optimizer.step()
        optimizer.zero_grad()


class GatheringMuon(torch.optim.Optimizer):
    """Muon on sharded parameters as it is usually done: gather the whole update on every rank, keep the own slice."""

    def __init__(self, params: list[nn.Parameter], lr: float, momentum: float = 0.95) -> None:
        super().__init__(params, {"lr": lr, "momentum": momentum})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                momentum = self.state[p].setdefault("momentum_buffer", torch.zeros_like(p.grad))
                momentum.lerp_(p.grad, 1 - group["momentum"])
                update = p.grad.lerp(momentum, group["momentum"]).full_tensor()
                whole = orthogonalize(update).to(p.dtype)
                p.add_(distribute_tensor(whole, p.device_mesh, p.placements, src_data_rank=None), alpha=-group["lr"])


def dmuon(config: GPTConfig, mesh: DeviceMesh) -> Step:
    model = GPT(config).to(mesh.device_type)
    dedicate_params(model, mesh)
    shard(model, mesh)
    optimizer = Muon(model, lr=0.01)
    return lambda tokens: train_step(model, [optimizer], tokens)


def fsdp2_adamw(config: GPTConfig, mesh: DeviceMesh) -> Step:
    model = GPT(config).to(mesh.device_type)
    shard(model, mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    return lambda tokens: train_step(model, [optimizer], tokens)


def fsdp2_muon(config: GPTConfig, mesh: DeviceMesh) -> Step:
    model = GPT(config).to(mesh.device_type)
    names = set(muon_targets(model))
    shard(model, mesh)
    hidden = [p for name, p in model.named_parameters() if name in names]
    rest = [p for name, p in model.named_parameters() if name not in names]
    assert all(isinstance(p, DTensor) for p in hidden)
    optimizers = [GatheringMuon(hidden, lr=0.01), torch.optim.AdamW(rest, lr=1e-3)]
    return lambda tokens: train_step(model, optimizers, tokens)


def measure(contenders: dict[str, Step], config: GPTConfig, args: argparse.Namespace) -> dict[str, list[float]]:
    """Seconds per step of each contender; the slowest rank's count."""
    device = torch.get_default_device()
    times: dict[str, list[float]] = {name: [] for name in contenders}
    for index in range(args.warmup + args.steps):
        tokens = torch.randint(0, VOCAB_SIZE, (args.batch, config.context + 1), device=device)
        for name, step in contenders.items():
            dist.barrier()
            start = time.perf_counter()
            step(tokens)
            if device.type == "cuda":
                torch.cuda.synchronize()
            seconds = torch.tensor(time.perf_counter() - start)
            dist.all_reduce(seconds, op=dist.ReduceOp.MAX)
            if index >= args.warmup:
                times[name].append(seconds.item())
    return times


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dim", type=int, default=256)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--context", type=int, default=128)
    parser.add_argument("--batch", type=int, default=16, help="sequences per process")
    parser.add_argument("--warmup", type=int, default=3)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--json", type=Path, help="also write the medians here")
    args = parser.parse_args()
    dist.init_process_group()
    torch.set_num_threads(1)
    mesh = init_device_mesh("cuda" if torch.cuda.is_available() else "cpu", (dist.get_world_size(),))
    torch.set_default_device(mesh.device_type)
    config = GPTConfig(dim=args.dim, layers=args.layers, heads=args.dim // 32, context=args.context)
    builders = {"FSDP2 + AdamW": fsdp2_adamw, "DMuon": dmuon, "FSDP2 + Muon": fsdp2_muon}
    times = measure({name: build(config, mesh) for name, build in builders.items()}, config, args)
    medians = {name: statistics.median(values) for name, values in times.items()}
    if dist.get_rank() == 0:
        table = Table("", "median step", "spread (quartiles)", "ratio", title=f"{mesh.size()} processes, {config}")
        for name, median in medians.items():
            low, _, high = statistics.quantiles(times[name], n=4)
            ratio = median / medians["FSDP2 + AdamW"]
            table.add_row(name, f"{median * 1e3:.1f} ms", f"{low * 1e3:.1f} - {high * 1e3:.1f} ms", f"{ratio:.3f}")
        Console(width=110).print(table)
        if args.json:
            args.json.write_text(json.dumps(medians, indent=2) + "\n")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
