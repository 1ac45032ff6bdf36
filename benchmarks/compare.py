"""Muon on owned matrices beside FSDP2 + AdamW, FSDP2 + Muon and other packages: `python -m benchmarks.compare`.

All train the same GPT on the same processes and take turns, one step each, so that whatever else the machine does meets
all of them alike. Bytes, FLOPs and memory are counted for each alone. Writes the figures, as tables and a picture, into
docs/benchmarks.md, whose text around them is written by hand, and everything measured into a JSON file beside it.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
from itertools import product
from pathlib import Path
from typing import Any

import torch

from benchmarks.compare_tables import count_table, targets, timing_table
from benchmarks.contenders import BASELINE, contenders
from docs.pages import replace_section

ROOT = Path(__file__).parent.parent


def run(processes: int, batch: int, args: argparse.Namespace, alone: str | None = None) -> Any:
    """What `benchmarks.compare_rank` measured on so many processes."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "result.json"
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", str(processes)]
        command += ["-m", "benchmarks.compare_rank", "--batch", str(batch), "--json", str(out)]
        for name in ("dim", "layers", "context", "warmup", "steps"):
            command += [f"--{name}", str(getattr(args, name))]
        if alone:
            command += ["--alone", alone]
        subprocess.run(command, check=True, cwd=ROOT, env={**os.environ, "OMP_NUM_THREADS": "1"})
        return json.loads(out.read_text())


def draw(runs: dict[tuple[int, int], Any], context: int, path: Path) -> None:
    """Step time over AdamW's, by tokens per step, one line for each contender and number of processes."""
    import matplotlib

    matplotlib.use("svg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(figsize=(7, 4))
    styles = ["-", "--", ":", "-."]
    counts = sorted({processes for processes, _ in runs})
    for color, name in enumerate(next(iter(runs.values()))):
        for style, processes in zip(styles, counts, strict=False):
            points = []
            for (p, batch), times in runs.items():
                if p == processes:
                    ratio = statistics.median(times[name]["step"]) / statistics.median(times[BASELINE]["step"])
                    points.append((p * batch * context, ratio))
            label = f"{name}, {processes} process{'es' if processes > 1 else ''}"
            axes.plot(*zip(*sorted(points), strict=True), style, marker="o", color=f"C{color}", label=label)
    axes.set(xscale="log", xlabel="tokens per step, all processes", ylabel="step time / FSDP2 + AdamW")
    axes.grid(alpha=0.3)
    axes.legend(fontsize=6)
    figure.tight_layout()
    figure.savefig(path)


def machine() -> str:
    cpu = platform.processor() or platform.machine()
    info = Path("/proc/cpuinfo")
    if info.exists():
        cpu = next((line.split(":")[1].strip() for line in info.read_text().splitlines() if "model name" in line), cpu)
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else "CPU, gloo, one thread a process"
    return f"{cpu}, {os.cpu_count()} logical cores, torch {torch.__version__}, {device}"


def save(args: argparse.Namespace, runs: dict[tuple[int, int], Any], counts: dict[tuple[int, str], Any]) -> None:
    """Write everything measured so far beside the page."""
    measured = {
        "machine": machine(),
        "arguments": {name: value for name, value in vars(args).items() if name != "out"},
        "seconds": [{"processes": p, "batch": batch, "of": times} for (p, batch), times in runs.items()],
        "counted": [{"processes": p, "contender": name, **found} for (p, name), found in counts.items()],
    }
    args.out.with_suffix(".json").write_text(json.dumps(measured))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--processes", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--batch", type=int, nargs="+", default=[4, 16, 64], help="sequences per process and step")
    parser.add_argument("--dim", type=int, default=256)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--context", type=int, default=128)
    parser.add_argument("--warmup", type=int, default=3)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--out", type=Path, default=ROOT / "docs" / "benchmarks.md")
    args = parser.parse_args()
    runs: dict[tuple[int, int], Any] = {}
    counts: dict[tuple[int, str], Any] = {}
    # Saved as they come: a run that fails at the end must not take the others along.
    for p, batch in product(args.processes, args.batch):
        runs[p, batch] = run(p, batch, args)
        save(args, runs, counts)
    for p, name in product(args.processes, contenders()):
        counts[p, name] = run(p, args.batch[0], args, name)
        save(args, runs, counts)
    picture = args.out.with_suffix(".svg")
    draw(runs, args.context, picture)
    if not args.out.exists():
        args.out.write_text("# Benchmarks\n\n<!-- figures -->\n<!-- end of figures -->\n")
    lines = [
        f"Made by `python -m benchmarks.compare {' '.join(sys.argv[1:])}` on: {machine()}. A GPT of "
        f"{args.layers} layers of width {args.dim}, sequences of {args.context}; medians of {args.steps} steps, of the "
        "slowest process, taken in turn.",
        "",
        f"![step time over AdamW's]({picture.name})",
        "",
        *targets(runs, counts, args.context),
        "",
        *timing_table(runs, args.context),
        "",
        "Counted on rank 0, each contender in processes of its own: megabytes by collective operator (the whole "
        "buffer), matrix-product FLOPs of the optimizer, and the largest resident memory of a process.",
        "",
        *count_table(counts),
    ]
    replace_section(args.out, "figures", "\n".join(lines))
    print("\n".join(lines))
    print(f"wrote {args.out}, {picture.name} and {picture.with_suffix('.json').name}")


if __name__ == "__main__":
    main()
