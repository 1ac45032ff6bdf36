"""Measures the tables of docs/newton_schulz.md and writes them there: `python -m docs.measure_newton_schulz`.

Accuracy needs half a minute. Timings are worth something on a quiet machine only; `--no-timings` leaves them as they
are.
"""

from __future__ import annotations

import argparse
import platform
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor

from dmuon_core.optim.newton_schulz import flops, orthogonalize
from docs.pages import replace_section

PAGE = Path(__file__).parent / "newton_schulz.md"
ROWS, COLUMNS = 256, 1024
SCHEDULES = [("quintic", 5), ("polar_express", 5), ("polar_express", 8), ("cans", 5), ("aol", 4)]
KINDS = [
    (torch.bfloat16, "direct"),
    (torch.float16, "direct"),
    (torch.float16, "gram"),
    (torch.float32, "direct"),
    (torch.float32, "gram"),
]


def with_singular_values(values: Tensor) -> Tensor:
    rng = torch.Generator().manual_seed(0)
    left, right = (
        torch.linalg.qr(torch.randn(size, ROWS, dtype=torch.float64, generator=rng))[0] for size in (ROWS, COLUMNS)
    )
    return left @ torch.diag(values.double()) @ right.T


def polar_factor(g: Tensor) -> Tensor:
    u, _, vh = torch.linalg.svd(g, full_matrices=False)
    return u @ vh


def accuracy() -> str:
    gaussian = torch.randn(ROWS, COLUMNS, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    spread = with_singular_values(torch.logspace(0, -2, ROWS))
    lines = [
        "| schedule | steps | dtype | form | Gaussian: error | singular values | spread: error | singular values |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for name, steps in SCHEDULES:
        for dtype, form in KINDS:
            cells = []
            for g in (gaussian, spread):
                exact = polar_factor(g)
                found = orthogonalize(g, name, steps, dtype=dtype, form=form).double()
                values = torch.linalg.svdvals(found)
                error = torch.linalg.norm(found - exact) / torch.linalg.norm(exact)
                cells += [f"{error:.4f}", f"{values.min():.3f} to {values.max():.3f}"]
            lines.append(f"| {name} | {steps} | {_name(dtype)} | {form} | {' | '.join(cells)} |")
    return "\n".join(lines)


def timings(repeats: int) -> str:
    lines = [
        f"{platform.machine()}, {torch.get_num_threads()} thread(s), torch {torch.__version__}, float32, median of "
        f"{repeats} interleaved runs.",
        "",
        "| shape | direct, ms | Gram, ms | speed-up | ratio of FLOPs |",
        "|---|---|---|---|---|",
    ]
    for m in (64, 128, 256, 512, 1024):
        for ratio in (1, 2, 4, 8):
            n = ratio * m
            if m * n > 2**22:
                continue
            g = torch.randn(m, n)
            times = interleaved({form: _run(g, form) for form in ("direct", "gram")}, repeats)
            theory = flops(m, n) / flops(m, n, scheme="gram")
            cells = [f"{1000 * times[form]:.2f}" for form in ("direct", "gram")]
            lines.append(f"| {m} x {n} | {' | '.join(cells)} | {times['direct'] / times['gram']:.2f} | {theory:.2f} |")
    lines += ["", "| dtype | matrices | one at a time, ms | as one batch, ms |", "|---|---|---|---|"]
    for dtype in (torch.bfloat16, torch.float32):
        for count, m, n in ((16, 64, 64), (16, 64, 256), (8, 256, 256), (4, 512, 2048)):
            batch = torch.randn(count, m, n)
            runs = {"single": _each(batch, dtype), "batch": _together(batch, dtype)}
            times = interleaved(runs, repeats)
            cells = [f"{1000 * value:.2f}" for value in times.values()]
            lines.append(f"| {_name(dtype)} | {count} of {m} x {n} | {' | '.join(cells)} |")
    return "\n".join(lines)


def _run(g: Tensor, form: str) -> Callable[[], object]:
    return lambda: orthogonalize(g, dtype=torch.float32, form=form)  # type: ignore[arg-type]


def _each(batch: Tensor, dtype: torch.dtype) -> Callable[[], object]:
    return lambda: [orthogonalize(g, dtype=dtype) for g in batch]


def _together(batch: Tensor, dtype: torch.dtype) -> Callable[[], object]:
    return lambda: orthogonalize(batch, dtype=dtype)


def interleaved(runs: dict[str, Callable[[], object]], repeats: int) -> dict[str, float]:
    """Median seconds of each, run in turn, so that a disturbance hits all alike."""
    times: dict[str, list[float]] = {name: [] for name in runs}
    for repeat in range(repeats + 1):
        for name, run in runs.items():
            start = time.perf_counter()
            run()
            if repeat:  # the first is a warm-up
                times[name].append(time.perf_counter() - start)
    return {name: statistics.median(values) for name, values in times.items()}


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--no-timings", action="store_true", help="measure accuracy only")
    parser.add_argument("--repeats", type=int, default=9)
    options = parser.parse_args()
    torch.set_num_threads(1)
    replace_section(PAGE, "accuracy", accuracy())
    if not options.no_timings:
        replace_section(PAGE, "timings", timings(options.repeats))


if __name__ == "__main__":
    main()
