"""`dmuon_core` in a plain PyTorch loop: no Lightning, only torch.

    torchrun --nproc_per_node 2 examples/plain_torch.py
    python examples/plain_torch.py                        # one process: the same code

A small residual network learns to imitate a fixed random network, from data that differ on every process.
"""

from __future__ import annotations

import os

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from dmuon_core import Muon, clip_grad_norm_, dedicate_params, default_boundaries, no_sync

STEPS = 40
MICRO_BATCHES = 2  # in each step, on each process
BATCH, INPUTS, WIDTH, OUTPUTS = 64, 16, 64, 8


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up = nn.Linear(WIDTH, 2 * WIDTH)
        self.down = nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(F.gelu(self.up(self.norm(x))))


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Linear(INPUTS, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(3))
        self.head = nn.Linear(WIDTH, OUTPUTS)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def start() -> torch.device:
    """Joins the processes that torchrun started, or makes a group of this one alone."""
    gpu = torch.cuda.is_available()
    backend = "nccl" if gpu else "gloo"
    if "RANK" in os.environ:
        dist.init_process_group(backend)
    else:
        dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
    if not gpu:
        return torch.device("cpu")
    torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", 0)))
    return torch.device("cuda", torch.cuda.current_device())


def main() -> None:
    device = start()
    rank = dist.get_rank()
    torch.manual_seed(0)
    teacher = nn.Sequential(nn.Linear(INPUTS, 32), nn.Tanh(), nn.Linear(32, OUTPUTS)).to(device)
    teacher.requires_grad_(False)
    model = Net().to(device)

    # The order matters: every hidden matrix gets an owner, FSDP2 shards the rest, and only then comes the
    # optimizer, because both replace parameters.
    mesh = init_device_mesh(device.type, (dist.get_world_size(),))
    dedicate_params(model, mesh)
    for block in default_boundaries(model):
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer = Muon(model, lr=0.02, adamw_lr=0.01)

    data = torch.Generator(device).manual_seed(1000 + rank)  # other data on every process
    losses = []
    for step in range(STEPS):
        total = torch.zeros((), device=device)
        for micro in range(MICRO_BATCHES):
            x = torch.randn(BATCH, INPUTS, generator=data, device=device)
            if micro + 1 < MICRO_BATCHES:
                with no_sync(model):  # accumulates on this process, sends nothing
                    loss = F.mse_loss(model(x), teacher(x)) / MICRO_BATCHES
                    loss.backward()
            else:
                loss = F.mse_loss(model(x), teacher(x)) / MICRO_BATCHES
                loss.backward()  # one reduction to each owner for the whole step
            total += loss.detach()
        norm = clip_grad_norm_(model, max_norm=1.0)  # over owned and sharded gradients together
        optimizer.step()
        optimizer.zero_grad()
        dist.all_reduce(total)
        losses.append(total.item() / dist.get_world_size())
        if rank == 0 and (step % 10 == 0 or step == STEPS - 1):
            print(f"step {step:3d}  loss {losses[-1]:.4f}  gradient norm {norm.item():.3f}")

    assert losses[-1] < 0.5 * losses[0], f"the loss did not fall: {losses[0]:.4f} -> {losses[-1]:.4f}"
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
