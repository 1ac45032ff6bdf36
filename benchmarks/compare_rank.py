"""One rank of `benchmarks.compare`, started by torchrun; rank 0 writes what was measured as JSON."""

from __future__ import annotations

import argparse
import json
import resource
import time
from collections import Counter
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from benchmarks.contenders import Contender, contenders
from examples.gpt import VOCAB_SIZE, GPTConfig

_PRODUCTS = {"aten::mm": (0, 1), "aten::bmm": (0, 1), "aten::addmm": (1, 2), "aten::baddbmm": (1, 2)}


class Count(TorchDispatchMode):
    """Bytes of every collective by operator (its largest buffer, whole), and FLOPs of matrix products, on this rank."""

    def __init__(self) -> None:
        super().__init__()
        self.bytes: Counter[str] = Counter()
        self.flops = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(isinstance(kind, type) and issubclass(kind, DTensor) for kind in types):
            return NotImplemented  # what it runs on local tensors comes back here
        name = func._schema.name
        if name.startswith(("c10d::", "_c10d_functional::")) and not name.endswith(("wait_tensor", "_autograd")):
            sizes = [
                sum(t.numel() * t.element_size() for t in tree_leaves(a) if isinstance(t, torch.Tensor)) for a in args
            ]
            self.bytes[name.split("::")[1].strip("_")] += max(sizes, default=0)
        if name in _PRODUCTS:
            left, right = (args[i] for i in _PRODUCTS[name])
            self.flops += 2 * left.numel() * right.shape[-1]
        return func(*args, **(kwargs or {}))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    for name in ("dim", "layers", "context", "batch", "warmup", "steps"):
        parser.add_argument(f"--{name}", type=int, required=True)
    parser.add_argument("--json", type=Path, required=True)
    parser.add_argument("--alone", help="count what this contender does instead of timing all")
    args = parser.parse_args()
    result: dict[str, Any]
    dist.init_process_group()
    torch.set_num_threads(1)
    mesh = init_device_mesh("cuda" if torch.cuda.is_available() else "cpu", (dist.get_world_size(),))
    torch.set_default_device(mesh.device_type)
    config = GPTConfig(dim=args.dim, layers=args.layers, heads=max(1, args.dim // 32), context=args.context)
    if args.alone:
        # A compiled function cannot be counted.
        with torch.compiler.set_stance("force_eager"):
            result = count(args.alone, config, mesh, args)
    else:
        result = measure(config, mesh, args)
    if dist.get_rank() == 0:
        args.json.write_text(json.dumps(result))
    dist.destroy_process_group()
    # A thread of gloo that drops its last tensors while the interpreter is torn down aborts (pytorch issue 190489).
    # Contenders without this library have nothing else that waits for it.
    time.sleep(0.2)


def measure(config: GPTConfig, mesh: DeviceMesh, args: argparse.Namespace) -> dict[str, dict[str, list[float]]]:
    """Seconds of each phase of each step by contender, of the slowest rank; one step each in turn."""
    built = {name: build(config, mesh) for name, build in contenders().items()}
    times: dict[str, dict[str, list[float]]] = {name: {} for name in built}
    for index in range(args.warmup + args.steps):
        for name, contender in built.items():
            phases = timed_step(contender, _tokens(config, args.batch), mesh)
            if index >= args.warmup:
                for phase, seconds in phases.items():
                    times[name].setdefault(phase, []).append(seconds)
    return times


def timed_step(contender: Contender, tokens: torch.Tensor, mesh: DeviceMesh) -> dict[str, float]:
    dist.barrier()
    start, cpu = _now(), time.process_time()
    contender.forward_backward(tokens)
    middle = _now()
    contender.step()
    end = _now()
    seconds = torch.tensor([end - start, middle - start, end - middle, time.process_time() - cpu], dtype=torch.float64)
    dist.all_reduce(seconds, dist.ReduceOp.MAX)
    return dict(zip(("step", "forward+backward", "optimizer", "cpu"), seconds.tolist(), strict=True))


def count(name: str, config: GPTConfig, mesh: DeviceMesh, args: argparse.Namespace) -> dict[str, Any]:
    """Bytes, FLOPs of the optimizer and memory of one contender in processes of its own."""
    contender = contenders()[name](config, mesh)
    for _ in range(2):
        contender.forward_backward(_tokens(config, args.batch))
        contender.step()
    with Count() as passes:
        contender.forward_backward(_tokens(config, args.batch))
    with Count() as optimizer:
        contender.step()
    mine = {
        "bytes": {"forward+backward": dict(passes.bytes), "optimizer": dict(optimizer.bytes)},
        "flops": optimizer.flops,
        "rss": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
    }
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, mine)
    return {
        "bytes": everyone[0]["bytes"],
        "flops": [rank["flops"] for rank in everyone],
        "rss": max(rank["rss"] for rank in everyone),
    }


def _tokens(config: GPTConfig, batch: int) -> torch.Tensor:
    return torch.randint(0, VOCAB_SIZE, (batch, config.context + 1))


def _now() -> float:
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return time.perf_counter()


if __name__ == "__main__":
    main()
