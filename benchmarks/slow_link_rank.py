"""What one rank of ``slow_link`` runs: training steps with a synchronous and an asynchronous publish in turn."""

from __future__ import annotations

import datetime
import json
import statistics
import sys
import time
from dataclasses import asdict, astuple, dataclass
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

from dmuon_core import Muon, dedicate_params
from examples.gpt import GPT, VOCAB_SIZE, GPTConfig


@dataclass(frozen=True)
class Workload:
    """What is trained, and for how many steps of each kind. ``batch`` is sequences per rank."""

    dim: int
    layers: int
    context: int
    batch: int
    steps: int
    warmup: int


@dataclass(frozen=True)
class Turn:
    """Seconds of one training step, and of its parts in the order in which they run; each of the slowest rank.

    ``publish`` is what the optimizer's step still waits for when all matrices are updated. An asynchronous publish is
    waited for in ``forward``, so far as it is not hidden.
    """

    update: float
    publish: float
    forward: float
    backward: float
    whole: float


@dataclass(frozen=True)
class Medians:
    """The median turn of each kind, part by part."""

    synchronous: Turn
    asynchronous: Turn

    @property
    def hidden(self) -> float:
        """The share of the publish time that the asynchronous step does not wait for."""
        return (self.synchronous.whole - self.asynchronous.whole) / self.synchronous.publish

    @property
    def publish_share(self) -> float:
        """The publish time as a share of the synchronous step."""
        return self.synchronous.publish / self.synchronous.whole


def measure(workload: Workload) -> Medians:
    """Train on a (2, 2) mesh of the default group; the medians over the steps, of the slowest rank's times."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    config = GPTConfig(dim=workload.dim, layers=workload.layers, heads=workload.dim // 32, context=workload.context)
    model = GPT(config)
    # Gradients cross the link too. In half the bytes, and beside a backward that broadcasts nothing, they do not hold
    # the step up more than the publish does, as they would not with the compute of a real node.
    policy = MixedPrecisionPolicy(reduce_dtype=torch.bfloat16)
    dedicated = dedicate_params(model, mesh, mp_policy=policy, reshard_after_forward=False)
    fully_shard(model, mesh=mesh)
    optimizer = Muon(model, lr=0.01, ns_dtype=torch.float32)  # a CPU's bfloat16 may be anything from fast to very slow
    clock = _Clock()

    def updates_are_done(*_: Any) -> None:
        """Runs before the library's own hook, which publishes what is not published yet."""
        if not dedicated.replicate_async:
            dist.barrier()  # ranks meet in the publish anyway; so they do not wait there for each other's matrices
        clock.mark("update")

    optimizer.register_step_post_hook(updates_are_done)

    # A turn starts with the optimizer and ends with a backward: so all that a publish costs falls into its own turn.
    turns: dict[bool, list[Turn]] = {True: [], False: []}
    _forward_and_backward(model, workload, clock)
    for index in range(2 * (workload.warmup + workload.steps)):
        dedicated.replicate_async = index % 2 == 1
        dist.barrier()
        clock.start()
        optimizer.step()
        clock.mark("publish")
        optimizer.zero_grad()
        _forward_and_backward(model, workload, clock)
        if index >= 2 * workload.warmup:
            turns[dedicated.replicate_async].append(clock.turn())

    return Medians(_median(turns[False]), _median(turns[True]))


def _median(turns: list[Turn]) -> Turn:
    return Turn(*(statistics.median(values) for values in zip(*map(astuple, turns), strict=True)))


def _forward_and_backward(model: GPT, workload: Workload, clock: _Clock) -> None:
    tokens = torch.randint(0, VOCAB_SIZE, (workload.batch, workload.context + 1))
    logits = model(tokens[:, :-1])
    loss = F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())
    clock.mark("forward")
    loss.backward()
    clock.mark("backward")


class _Clock:
    """Seconds of the parts of one step, each from the mark before."""

    def __init__(self) -> None:
        self.start()

    def start(self) -> None:
        self._begin = self._last = time.perf_counter()
        self._parts: dict[str, float] = {}

    def mark(self, part: str) -> None:
        now = time.perf_counter()
        self._parts[part], self._last = now - self._last, now

    def turn(self) -> Turn:
        """What was marked, each part of the rank where it took longest. Collective."""
        parts = {**self._parts, "whole": self._last - self._begin}
        seconds = torch.tensor(list(parts.values()), dtype=torch.float64)
        dist.all_reduce(seconds, op=dist.ReduceOp.MAX)
        return Turn(**dict(zip(parts, seconds.tolist(), strict=True)))


def main() -> None:
    """Run with a workload as JSON, by ``slow_link``; rank 0 writes the medians as JSON to the file that follows."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    dist.init_process_group("gloo", timeout=datetime.timedelta(seconds=60))
    torch.manual_seed(dist.get_rank())
    medians = measure(Workload(**json.loads(sys.argv[1])))
    if dist.get_rank() == 0:
        with open(sys.argv[2], "w") as file:
            json.dump(asdict(medians), file)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
