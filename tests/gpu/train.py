"""A short training on owned matrices beside the same training in one process, on whatever device and backend.

Run by ``run.sh`` on GPUs; on CPU by the test suite, so that the script itself is known to work::

    torchrun --nproc_per_node 2 tests/gpu/train.py --device cpu --backend gloo
"""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from dmuon_core import Muon, check_invariants, clip_grad_norm_, dedicate_params, default_boundaries, no_sync
from examples.gpt import GPT, VOCAB_SIZE, GPTConfig

CONFIG = GPTConfig(dim=96, layers=4, heads=4, context=64)
STEPS, BATCH = 10, 4  # sequences of one process in one micro-batch
# float32 everywhere, so what differs is the order of sums: some 1e-6 of a loss of 5 that ten steps carry on.
TOLERANCE = 1e-4


def batch(step: int, micro: int, rank: int, device: torch.device) -> torch.Tensor:
    generator = torch.Generator().manual_seed(1000 * step + 100 * micro + rank)
    return torch.randint(0, VOCAB_SIZE, (BATCH, CONFIG.context), generator=generator).to(device)


def loss_of(model: torch.nn.Module, tokens: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())


def optimizer_of(model: torch.nn.Module) -> Muon:
    return Muon(model, lr=0.02, adamw_lr=1e-3, adamw_eps=1e-4, ns_dtype=torch.float32)


def reference(device: torch.device, world: int) -> list[float]:
    """The same training in this process alone, over the data of all ranks."""
    torch.manual_seed(0)
    model = GPT(CONFIG).to(device)
    optimizer, losses = optimizer_of(model), []
    for step in range(STEPS):
        total = 0.0
        for micro in range(2):
            for rank in range(world):
                loss = loss_of(model, batch(step, micro, rank, device)) / (2 * world)
                loss.backward()
                total += loss.item()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(total)
    return losses


def owned(device: torch.device, replicas: int, zero3: bool) -> list[float]:
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(rank)  # the first rank's weights win
    if rank == 0:
        torch.manual_seed(0)
    model = GPT(CONFIG).to(device)
    shape, names = ((world,), ("shard",)) if replicas == 1 else ((replicas, world // replicas), ("replicate", "shard"))
    mesh = init_device_mesh(device.type, shape, mesh_dim_names=names)
    dedicate_params(model, mesh, reshard_after_forward=zero3)
    for block in default_boundaries(model):
        fully_shard(block, mesh=mesh, reshard_after_forward=zero3)
    fully_shard(model, mesh=mesh)
    optimizer, losses = optimizer_of(model), []
    for step in range(STEPS):
        with no_sync(model):
            first = loss_of(model, batch(step, 0, rank, device)) / 2
            first.backward()
        second = loss_of(model, batch(step, 1, rank, device)) / 2
        second.backward()
        clip_grad_norm_(model, 1.0)
        optimizer.step()
        optimizer.zero_grad()
        total = first.detach() + second.detach()
        dist.all_reduce(total)
        losses.append(total.item() / world)
        check_invariants(model)
    return losses


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda", choices=["cuda", "cpu"])
    parser.add_argument("--backend", default="nccl", choices=["nccl", "gloo"])
    parser.add_argument("--replicas", type=int, default=1, help="rows of a 2-D mesh; 1 is a 1-D mesh")
    parser.add_argument("--sanitize", action="store_true", help="torch.cuda._sanitizer: find races between streams")
    args = parser.parse_args()
    device = torch.device(args.device)
    if args.device == "cuda":
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]) % torch.cuda.device_count())
        torch.cuda.set_device(device)
        torch.backends.cuda.matmul.allow_tf32 = False
    if args.sanitize:
        from torch.cuda._sanitizer import enable_cuda_sanitizer

        enable_cuda_sanitizer()
    dist.init_process_group(args.backend)
    expected = reference(device, dist.get_world_size())
    for zero3 in (True, False):
        losses = owned(device, args.replicas, zero3)
        worst = max(abs(a - b) for a, b in zip(losses, expected, strict=True))
        if dist.get_rank() == 0:
            print(f"{args} {'Z3' if zero3 else 'Z2'}: losses differ by {worst:.1e} from one process", flush=True)
        if not worst <= TOLERANCE:
            raise AssertionError(f"losses {losses} instead of {expected}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
