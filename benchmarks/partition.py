"""How well the partition balances the matrices of known models over known clusters; on a laptop, in seconds.

    python -m benchmarks.partition [--json partition.json]

Prints one table and writes it as JSON. For every model and mesh of G shard ranks x R replicas:

- busiest/bound: FLOPs of the busiest owner over max(mean, largest matrix), below which nothing can get; beside it the
  same for plain longest-processing-time-first, which knows loads alone;
- /proven: the same over the best bound known, which sees that whole matrices leave gaps: 1 is proven optimal;
- max/mean: busiest owner over the mean, and the figure of the public implementation where it is known;
- root/ideal: the most bytes of a layer that one shard rank broadcasts over max(layer / G, largest matrix), median over
  the layers and worst layer;
- root/share: the same bytes over layer / G, and the public figure. Where one matrix is larger than a layer's share,
  nothing can reach 1;
- roots: shard ranks that broadcast a part of a layer, median over the layers;
- owned bytes of the fullest slot over the mean, and the same for the weights of a shard column.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import mean, median

from rich.console import Console
from rich.table import Table

from dmuon_core.assignment import Assignment, MatrixSpec
from dmuon_core.partition import compute_balanced_assignment, newton_schulz_flops

Shapes = dict[str, tuple[int, int]]
MESHES = [(8, 1), (8, 2), (8, 16), (64, 1), (64, 16)]


def swiglu(hidden: int, intermediate: int, kv: int) -> Shapes:
    """A Llama-like layer."""
    return {
        "self_attn.q_proj": (hidden, hidden),
        "self_attn.k_proj": (kv, hidden),
        "self_attn.v_proj": (kv, hidden),
        "self_attn.o_proj": (hidden, hidden),
        "mlp.gate_proj": (intermediate, hidden),
        "mlp.up_proj": (intermediate, hidden),
        "mlp.down_proj": (hidden, intermediate),
    }


def mixture(hidden: int, query: int, kv: int, expert: int, experts: int) -> Shapes:
    """A Qwen3-MoE-like layer, its experts as modules."""
    shapes = {
        "self_attn.q_proj": (query, hidden),
        "self_attn.k_proj": (kv, hidden),
        "self_attn.v_proj": (kv, hidden),
        "self_attn.o_proj": (hidden, query),
        "mlp.gate": (experts, hidden),
    }
    for i in range(experts):
        shapes[f"mlp.experts.{i}.gate_proj"] = (expert, hidden)
        shapes[f"mlp.experts.{i}.up_proj"] = (expert, hidden)
        shapes[f"mlp.experts.{i}.down_proj"] = (hidden, expert)
    return shapes


def vit(hidden: int) -> Shapes:
    return {
        "attn.qkv": (3 * hidden, hidden),
        "attn.proj": (hidden, hidden),
        "mlp.fc1": (4 * hidden, hidden),
        "mlp.fc2": (hidden, 4 * hidden),
    }


def gpt2(hidden: int) -> Shapes:
    """Linear layers with weight [in, out], as Hugging Face's Conv1D."""
    return {
        "attn.c_attn": (hidden, 3 * hidden),
        "attn.c_proj": (hidden, hidden),
        "mlp.c_fc": (hidden, 4 * hidden),
        "mlp.c_proj": (4 * hidden, hidden),
    }


MODELS: dict[str, Callable[[], tuple[str, int, Shapes]]] = {
    "Llama-3-8B": lambda: ("model.layers", 32, swiglu(4096, 14336, 1024)),
    "Qwen2.5-7B": lambda: ("model.layers", 28, swiglu(3584, 18944, 512)),
    "Qwen3-30B-A3B": lambda: ("model.layers", 48, mixture(2048, 4096, 512, 768, 128)),
    "ViT-L": lambda: ("blocks", 24, vit(1024)),
    "GPT-2": lambda: ("h", 12, gpt2(768)),
    "405B-like": lambda: ("model.layers", 126, swiglu(16384, 53248, 1024)),
}

# Public figures for the same shapes: (model, G, R) -> (max/mean owner FLOPs, root bytes / (layer bytes / G)).
PUBLIC: dict[tuple[str, int, int], tuple[float, float | None]] = {
    ("Llama-3-8B", 8, 1): (1.030, 2.15),
    ("Llama-3-8B", 8, 16): (1.253, None),
    ("Qwen2.5-7B", 8, 1): (1.072, 2.33),
    ("Qwen2.5-7B", 8, 16): (1.162, None),
    ("Qwen3-30B-A3B", 8, 1): (1.007, 7.78),
    ("Qwen3-30B-A3B", 8, 16): (2.45, None),
    ("ViT-L", 8, 1): (1.00, 8.0),
    ("ViT-L", 8, 16): (5.33, None),
}


def specs_of(model: str) -> list[MatrixSpec]:
    """The hidden matrices of one of `MODELS`, layer by layer."""
    prefix, layers, shapes = MODELS[model]()
    return [
        MatrixSpec(f"{prefix}.{i}.{name}.weight", shape, f"{prefix}.{i}")
        for i in range(layers)
        for name, shape in shapes.items()
    ]


def plain_longest_first(specs: list[MatrixSpec], slots: int) -> float:
    """Busiest load over the lower bound if each matrix, the costliest first, goes to the least loaded slot."""
    costs = sorted((newton_schulz_flops(spec.shape) for spec in specs), reverse=True)
    loads = [0] * slots
    for cost in costs:
        loads[loads.index(min(loads))] += cost
    return max(loads) / max(sum(costs) / slots, costs[0])


@dataclass(frozen=True)
class Row:
    model: str
    shard: int
    replicate: int
    matrices: int
    ratio: float
    over_proven: float
    plain_ratio: float
    max_over_mean: float
    public_max_over_mean: float | None
    root_over_ideal: float
    worst_root_over_ideal: float
    root_over_share: float
    public_root_over_share: float | None
    roots: float
    idle_slots: int
    slot_bytes_over_mean: float
    column_bytes_over_mean: float
    seconds: float


def measure(model: str, shard: int, replicate: int) -> Row:
    specs, slots = specs_of(model), shard * replicate
    start = time.perf_counter()
    assignment = compute_balanced_assignment(specs, slots, shard_size=shard)
    seconds = time.perf_counter() - start
    public = PUBLIC.get((model, shard, replicate), (None, None))
    roots = assignment.root_balance.values()
    return Row(
        model,
        shard,
        replicate,
        len(specs),
        assignment.ratio,
        max(assignment.loads) / assignment.proven_bound,
        plain_longest_first(specs, slots),
        max(assignment.loads) / mean(assignment.loads),
        public[0],
        median(roots),
        max(roots),
        median(root / share for root, share in _roots_and_shares(assignment)),
        public[1],
        median(_roots_of_layers(assignment)),
        len(assignment.idle_slots),
        max(assignment.owned_bytes) / mean(assignment.owned_bytes),
        max(assignment.column_bytes) / mean(assignment.column_bytes),
        seconds,
    )


def _roots_and_shares(assignment: Assignment) -> Iterator[tuple[int, float]]:
    layer_bytes: dict[str, int] = {}
    for spec in assignment.specs:
        layer_bytes[spec.layer] = layer_bytes.get(spec.layer, 0) + spec.nbytes
    for layer, nbytes in layer_bytes.items():
        yield assignment.root_bytes[layer], nbytes / assignment.shard_size


def _roots_of_layers(assignment: Assignment) -> list[int]:
    columns: dict[str, set[int]] = {}
    for spec, slot in zip(assignment.specs, assignment.slots, strict=True):
        columns.setdefault(spec.layer, set()).add(slot % assignment.shard_size)
    return [len(used) for used in columns.values()]


def show(rows: list[Row]) -> None:
    table = Table(title="Partition of known models; the figures of the public implementation in brackets")
    headings = [
        "model",
        "G x R",
        "per slot",
        "busiest/bound",
        "/proven",
        "plain LPT",
        "max/mean",
        "root/ideal",
        "worst",
    ]
    headings += ["root/share", "roots", "idle", "slot bytes", "column bytes", "seconds"]
    for index, heading in enumerate(headings):
        table.add_column(heading, justify="left" if index == 0 else "right")

    def beside(ours: float, public: float | None) -> str:
        return f"{ours:.3f}" + ("" if public is None else f" ({public:.2f})")

    for row in rows:
        slots = row.shard * row.replicate
        table.add_row(
            row.model,
            f"{row.shard} x {row.replicate}",
            f"{row.matrices / slots:.1f}",
            f"{row.ratio:.4f}",
            f"{row.over_proven:.4f}",
            f"{row.plain_ratio:.4f}",
            beside(row.max_over_mean, row.public_max_over_mean),
            f"{row.root_over_ideal:.3f}",
            f"{row.worst_root_over_ideal:.3f}",
            beside(row.root_over_share, row.public_root_over_share),
            f"{row.roots:g}",
            str(row.idle_slots),
            f"{row.slot_bytes_over_mean:.3f}",
            f"{row.column_bytes_over_mean:.3f}",
            f"{row.seconds:.2f}",
        )
    Console(width=170).print(table)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, default=Path("partition.json"), help="where the figures go as JSON")
    parser.add_argument("--models", nargs="+", choices=list(MODELS), default=list(MODELS))
    arguments = parser.parse_args()
    rows = [measure(model, *mesh) for model in arguments.models for mesh in MESHES]
    show(rows)
    arguments.json.write_text(json.dumps([asdict(row) for row in rows], indent=2))
    print(f"written to {arguments.json}")


if __name__ == "__main__":
    main()
