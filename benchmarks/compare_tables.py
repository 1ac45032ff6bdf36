"""What `benchmarks.compare` measured, as Markdown: the tables, and the few figures that say whether it is good.

Times are ``runs[processes, batch][contender][phase]``, seconds of each step; counts ``counts[processes, contender]``.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping
from typing import Any

from benchmarks.contenders import BASELINE, REDUNDANT, Z2, Z3

NEAR = 1.03
"""The ratio to AdamW's step from which on Muon costs next to nothing."""

Runs = Mapping[tuple[int, int], Mapping[str, Mapping[str, list[float]]]]
Counts = Mapping[tuple[int, str], Mapping[str, Any]]


def ratio(times: Mapping[str, Mapping[str, list[float]]], name: str, other: str, phase: str) -> float:
    """The median of ``name`` over the median of ``other``."""
    return statistics.median(times[name][phase]) / statistics.median(times[other][phase])


def targets(runs: Runs, counts: Counts, context: int) -> list[str]:
    """For each number of processes: what Z3 and Z2 take beside AdamW and beside Muon done by every rank.

    The passes are compared where a step has the most tokens, the optimizer as the median over all sizes.
    """
    head = f"| processes | | step / AdamW's, by tokens per step | at most {NEAR} from | forward+backward / FSDP2's "
    lines = [
        head + "| optimizer / gathered | 1.15 / processes | FLOPs of the busiest owner / mean |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for processes in sorted({p for p, _ in runs}):
        sizes = sorted((batch, times) for (p, batch), times in runs.items() if p == processes)
        for name in (Z3, Z2):
            steps = [(processes * batch * context, ratio(t, name, BASELINE, "step")) for batch, t in sizes]
            optimizer = statistics.median(ratio(t, name, REDUNDANT, "optimizer") for _, t in sizes)
            flops = counts[processes, name]["flops"]
            cells = [
                str(processes),
                name,
                ", ".join(f"{tokens}: {value:.3f}" for tokens, value in steps),
                _near_from(steps),
                f"{ratio(sizes[-1][1], name, BASELINE, 'forward+backward'):.3f}",
                f"{optimizer:.3f}",
                f"{1.15 / processes:.3f}",
                f"{max(flops) * len(flops) / sum(flops):.3f}",
            ]
            lines.append(f"| {' | '.join(cells)} |")
    lines += [
        "",
        f'"At most {NEAR} from": the tokens per step from which on a step takes at most {NEAR} times AdamW\'s. '
        '"Optimizer / gathered": beside Muon as every rank computes it whole, which ownership divides among the '
        "processes; the next column leaves 15 % for imbalance.",
    ]
    return lines


def _near_from(steps: list[tuple[int, float]]) -> str:
    """The tokens per step from which on every ratio is near 1."""
    near_from: int | None = None
    for tokens, value in reversed(steps):
        if value > NEAR:
            break
        near_from = tokens
    return f"{near_from} tokens" if near_from is not None else f"not up to {steps[-1][0]} tokens"


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
