"""Loss curves on the example text: Muon, NorMuon and Polar Express against AdamW, in one process.

    python -m benchmarks.loss_curves             # what docs/loss_curves.md shows; half an hour on one core
    python -m benchmarks.loss_curves --sweep     # only the search for the learning rates
    python -m benchmarks.loss_curves --page      # only the page and the picture, from the results that there are

The hidden matrices are trained in several ways. All else (embeddings, head, norms) is trained by AdamW with one rate,
the same in all runs, but for AdamW with one rate for everything. First every way searches its learning rate on a seed
of its own: three rates, each twice the former, and further rates while the best is the lowest or the highest. Then it
runs with the best rate on the other seeds. Every run is written to the results as it ends; runs that are there already,
with the same sizes, are not run again.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from dmuon_core import Muon
from dmuon_core.targets import muon_targets
from examples.gpt import GPT, GPTConfig, Windows, load_text, next_byte_loss

DOCS = Path(__file__).resolve().parent.parent / "docs"
REST_LR = 4e-3  # of what is no hidden matrix: the example's
BETAS = (0.9, 0.95)
WEIGHT_DECAY = 0.1
#: The options that make each way, and the middle rate of its search.
WAYS: dict[str, tuple[dict[str, Any], float]] = {
    "AdamW": ({}, 1e-3),
    "AdamW, one rate for all": ({}, 2e-3),
    "Muon": ({}, 0.04),
    "NorMuon": ({"normuon": True}, 0.04),
    "Polar Express": ({"ns_coefficients": "polar_express"}, 0.04),
}
SWEEP_SEED = 0


def make_optimizer(way: str, model: nn.Module, lr: float) -> torch.optim.Optimizer:
    """``way`` with rate ``lr`` for the hidden matrices of ``model``, and AdamW for the rest."""
    if way.startswith("AdamW"):
        hidden = muon_targets(model)
        rest = [p for name, p in model.named_parameters() if name not in hidden]
        groups = [
            {"params": list(hidden.values()), "lr": lr, "weight_decay": WEIGHT_DECAY},
            {"params": rest, "lr": REST_LR if way == "AdamW" else lr},
        ]
        return torch.optim.AdamW(groups, betas=BETAS, weight_decay=0.01)
    options, _ = WAYS[way]
    return Muon(
        model, lr=lr, weight_decay=WEIGHT_DECAY, batched=True, adamw_lr=REST_LR, adamw_betas=BETAS,
        adamw_weight_decay=0.01, **options,
    )  # fmt: skip


def factor(step: int, steps: int) -> float:
    """Of the learning rate at ``step``: up over the first twentieth of the run, then down to zero at its end."""
    warmup = max(1, steps // 20)
    return min((step + 1) / warmup, (steps - step) / (steps - warmup + 1))


def train(way: str, lr: float, seed: int, args: argparse.Namespace, text: Tensor) -> list[tuple[int, float]]:
    """(step, validation loss) of one run. Weights and order of the windows depend on the seed alone."""
    torch.manual_seed(seed)
    model = GPT(GPTConfig(args.dim, args.layers, args.heads, args.context))
    cut = len(text) - len(text) // 50
    windows, held_out = Windows(text[:cut], args.context), Windows(text[cut:], args.context)
    order = torch.randint(len(windows), (args.steps, args.batch), generator=torch.Generator().manual_seed(seed))
    shown = torch.linspace(0, len(held_out) - 1, args.validation).long().split(args.batch)
    optimizer = make_optimizer(way, model, lr)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: factor(step, args.steps))
    losses = []
    for step in range(args.steps):
        _loss(model, windows, order[step]).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        if (step + 1) % args.eval_every == 0 or step + 1 == args.steps:
            with torch.no_grad():
                total = sum(float(_loss(model, held_out, part)) * len(part) for part in shown)
            losses.append((step + 1, total / args.validation))
    return [(step, loss if math.isfinite(loss) else 99.0) for step, loss in losses]  # diverged: the worst of rates


def _loss(model: nn.Module, windows: Windows, indices: Tensor) -> Tensor:
    tokens, targets = zip(*(windows[int(index)] for index in indices), strict=True)
    return next_byte_loss(model(torch.stack(tokens)), torch.stack(targets))


def tune(final_loss: Callable[[float], float], middle: float, limit: int = 4) -> float:
    """The best of half the middle rate, it and twice it, searched on while the best is at an edge, ``limit`` times."""
    found = {rate: final_loss(rate) for rate in (middle / 2, middle, 2 * middle)}
    for _ in range(limit):
        best = min(found, key=lambda rate: found[rate])
        if best not in (min(found), max(found)):
            break
        further = best / 2 if best == min(found) else best * 2
        found[further] = final_loss(further)
    return min(found, key=lambda rate: found[rate])


class Results:
    """Runs by (way, rate, seed), in a JSON file that grows with every run."""

    def __init__(self, path: Path, args: argparse.Namespace) -> None:
        self.path = path
        self.sizes = {name: getattr(args, name) for name in SIZES}
        before = json.loads(path.read_text()) if path.exists() else {}
        self.runs: list[dict[str, Any]] = before["runs"] if before.get("sizes") == self.sizes else []

    def find(self, way: str, lr: float, seed: int) -> list[tuple[int, float]] | None:
        return next((r["losses"] for r in self.runs if (r["way"], r["lr"], r["seed"]) == (way, lr, seed)), None)

    def add(self, way: str, lr: float, seed: int, losses: list[tuple[int, float]]) -> None:
        rounded = [(step, round(loss, 4)) for step, loss in losses]
        self.runs.append({"way": way, "lr": lr, "seed": seed, "losses": rounded})
        runs = ",\n".join(f"  {json.dumps(run)}" for run in self.runs)
        self.path.write_text(f'{{"sizes": {json.dumps(self.sizes)},\n "runs": [\n{runs}\n]}}\n')

    def of(self, way: str) -> tuple[dict[float, float], float, dict[int, list[tuple[int, float]]]]:
        """Final losses of the search by rate, the best rate, and the curves of the other seeds with it."""
        mine = [run for run in self.runs if run["way"] == way]
        sweep = {run["lr"]: run["losses"][-1][1] for run in mine if run["seed"] == SWEEP_SEED}
        best = min(sweep, key=lambda rate: sweep[rate])
        return sweep, best, {r["seed"]: r["losses"] for r in mine if r["seed"] != SWEEP_SEED and r["lr"] == best}


SIZES = ("dim", "layers", "heads", "context", "batch", "steps", "eval_every", "validation")


def table(results: Results) -> list[str]:
    lines = [
        "| hidden matrices by | rate | final validation loss, mean ± standard deviation | by seed |",
        "|---|---|---|---|",
    ]
    for way in WAYS:
        _, best, curves = results.of(way)
        finals = [losses[-1][1] for losses in curves.values()]
        spread = statistics.stdev(finals) if len(finals) > 1 else float("nan")
        each = ", ".join(f"{final:.3f}" for final in finals)
        lines.append(f"| {way} | {best:g} | {statistics.mean(finals):.3f} ± {spread:.3f} | {each} |")
    return lines


def sweep_table(results: Results) -> list[str]:
    lines = ["| hidden matrices by | final validation loss by rate |", "|---|---|"]
    for way in WAYS:
        sweep, best, _ = results.of(way)
        cells = [
            f"**{rate:g}: {loss:.3f}**" if rate == best else f"{rate:g}: {loss:.3f}"
            for rate, loss in sorted(sweep.items())
        ]
        lines.append(f"| {way} | {', '.join(cells)} |")
    return lines


def draw(results: Results, path: Path) -> None:
    """Mean validation loss by step, a line for each way, its band from the lowest to the highest seed."""
    import matplotlib

    matplotlib.use("svg")
    import matplotlib.pyplot as plt

    matplotlib.rcParams["svg.hashsalt"] = "loss curves"  # the same runs give the same file
    figure, axes = plt.subplots(figsize=(7, 4.5), layout="constrained")
    for index, way in enumerate(WAYS):
        _, best, curves = results.of(way)
        steps = [step for step, _ in next(iter(curves.values()))]
        losses = torch.tensor([[loss for _, loss in curve] for curve in curves.values()])
        low, high = losses.amin(0).tolist(), losses.amax(0).tolist()
        axes.fill_between(steps, low, high, color=f"C{index}", alpha=0.2, linewidth=0)
        axes.plot(steps, losses.mean(0).tolist(), color=f"C{index}", marker=".", label=f"{way}, rate {best:g}")
    axes.set(xlabel="step", ylabel="validation loss (nats per byte)")
    axes.grid(alpha=0.3)
    axes.legend()
    figure.savefig(path, metadata={"Date": None})
    plt.close(figure)


def write_page(results: Results, folder: Path) -> None:
    draw(results, folder / "loss_curves.svg")
    size = results.sizes
    seeds = sorted(results.of("Muon")[2])
    text = f"""# Loss curves

Made by `python -m benchmarks.loss_curves`; all runs are in [loss_curves.json](loss_curves.json). The model of
`examples/gpt.py` ({size["layers"]} layers of width {size["dim"]}) learns the source text of the Python standard
library: {size["steps"]} steps of {size["batch"]} sequences of {size["context"]} bytes, one process, float32. The ways
differ in the hidden matrices only; embeddings, head and norms are trained by AdamW with rate {REST_LR:g} in all of
them, except where AdamW has one rate for everything. The loss is that of {size["validation"]} windows that are never
trained on. Losses by step are compared; nothing is claimed about time.

![validation loss by step](loss_curves.svg)

Seeds {", ".join(map(str, seeds))}, each with its own weights and order of the text, the same for all ways:

{chr(10).join(table(results))}

The rates were searched on seed {SWEEP_SEED}, by factors of two until the best was not at an edge:

{chr(10).join(sweep_table(results))}

AdamW has betas {BETAS}, weight decay is {WEIGHT_DECAY} for hidden matrices, the rate warms up over a twentieth of the
steps and falls linearly to zero, gradients are clipped to norm 1. Runs as short as these say how the ways compare here,
not at scale; differences below the spread say nothing.
"""
    (folder / "loss_curves.md").write_text(text)
    print(f"wrote {folder / 'loss_curves.md'} and {folder / 'loss_curves.svg'}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sweep", action="store_true", help="search the rates, and stop")
    parser.add_argument("--page", action="store_true", help="run nothing")
    parser.add_argument("--seeds", type=int, default=3, help="runs of each way at its best rate")
    parser.add_argument("--dim", type=int, default=96)
    parser.add_argument("--layers", type=int, default=3)
    parser.add_argument("--heads", type=int, default=4)
    parser.add_argument("--context", type=int, default=96)
    parser.add_argument("--batch", type=int, default=16, help="sequences a step")
    parser.add_argument("--steps", type=int, default=240)
    parser.add_argument("--eval-every", type=int, default=30)
    parser.add_argument("--validation", type=int, default=128, help="windows of the validation loss")
    parser.add_argument("--out", type=Path, default=DOCS, help="folder of page, picture and results")
    args = parser.parse_args()
    torch.set_num_threads(1)
    args.out.mkdir(parents=True, exist_ok=True)
    results = Results(args.out / "loss_curves.json", args)
    if args.page and not results.runs:
        parser.error(f"there are no results of these sizes in {results.path}: run without --page first")
    if not args.page:
        text = load_text()

        def run(way: str, lr: float, seed: int) -> float:
            losses = results.find(way, lr, seed)
            if losses is None:
                losses = train(way, lr, seed, args, text)
                results.add(way, lr, seed, losses)
                print(f"{way}, rate {lr:g}, seed {seed}: {losses[-1][1]:.4f}", flush=True)
            return losses[-1][1]

        def search(way: str) -> float:
            return tune(lambda lr: run(way, lr, SWEEP_SEED), WAYS[way][1])

        best = {way: search(way) for way in WAYS}
        for seed in range(1, 1 if args.sweep else args.seeds + 1):
            for way, lr in best.items():
                run(way, lr, seed)
    if not args.sweep:
        write_page(results, args.out)


if __name__ == "__main__":
    main()
