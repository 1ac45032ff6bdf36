"""Muon on owned matrices beside FSDP2 + AdamW, FSDP2 + Muon and other packages: `python -m benchmarks.compare`.

All train the same GPT on the same processes and take turns, one step each, so that whatever else the machine does meets
all of them alike. Bytes, FLOPs and memory are counted for each alone. Writes tables and a picture into docs/.
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
from pathlib import Path
from typing import Any

import torch

from benchmarks.contenders import BASELINE, REDUNDANT, contenders

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


def timing_table(runs: dict[tuple[int, int], Any], context: int) -> list[str]:
    lines = [
        "| processes | tokens per step | | step, ms (quartiles) | / AdamW | forward+backward, ms | / AdamW "
        "| optimizer, ms | / gathered | CPU s |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    for (processes, batch), times in runs.items():
        median = {name: {key: statistics.median(v) for key, v in phases.items()} for name, phases in times.items()}
        for name, phases in median.items():
            low, _, high = statistics.quantiles(times[name]["step"], n=4)
            step, passes, optimizer = (1e3 * phases[key] for key in ("step", "forward+backward", "optimizer"))
            cells = [
                str(processes),
                str(processes * batch * context),
                name,
                f"{step:.1f} ({1e3 * low:.1f} to {1e3 * high:.1f})",
                f"{phases['step'] / median[BASELINE]['step']:.2f}",
                f"{passes:.1f}",
                f"{phases['forward+backward'] / median[BASELINE]['forward+backward']:.2f}",
                f"{optimizer:.1f}",
                f"{phases['optimizer'] / median[REDUNDANT]['optimizer']:.2f}",
                f"{phases['cpu']:.3f}",
            ]
            lines.append(f"| {' | '.join(cells)} |")
    return lines


def count_table(counts: dict[tuple[int, str], Any]) -> list[str]:
    lines = [
        "| processes | | MB in forward+backward | MB in the optimizer | GFLOPs of the busiest rank's optimizer "
        "| / mean | peak RSS, MB |",
        "|---|---|---|---|---|---|---|",
    ]
    for (processes, name), found in counts.items():
        flops = found["flops"]
        mean = sum(flops) / len(flops)
        moved = [
            ", ".join(f"{op} {size / 1e6:.2f}" for op, size in sorted(found["bytes"][phase].items())) or "0"
            for phase in ("forward+backward", "optimizer")
        ]
        balance = f"{max(flops) / mean:.3f}" if mean else ""
        cells = [str(processes), name, *moved, f"{max(flops) / 1e9:.3f}", balance, f"{found['rss'] / 1e6:.0f}"]
        lines.append(f"| {' | '.join(cells)} |")
    return lines


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
    runs = {(p, batch): run(p, batch, args) for p in args.processes for batch in args.batch}
    counts = {(p, name): run(p, args.batch[0], args, name) for p in args.processes for name in contenders()}
    picture = args.out.with_suffix(".svg")
    draw(runs, args.context, picture)
    lines = [
        "# Benchmarks",
        "",
        f"Made by `python -m benchmarks.compare` on: {machine()}. A GPT of {args.layers} layers of width {args.dim}, "
        f"sequences of {args.context}; medians of {args.steps} steps, of the slowest process, taken in turn.",
        "",
        f"![step time over AdamW's]({picture.name})",
        "",
        *timing_table(runs, args.context),
        "",
        "Counted on rank 0, each contender in processes of its own: megabytes by collective operator (the whole "
        "buffer), matrix-product FLOPs of the optimizer, and the largest resident memory of a process.",
        "",
        *count_table(counts),
        "",
    ]
    args.out.write_text("\n".join(lines))
    print(f"wrote {args.out} and {picture}")


if __name__ == "__main__":
    main()
