"""What `train_gpt.py` shows of a run: its speed in the progress bar, its losses as a table and a picture."""

from __future__ import annotations

import csv
import time
from pathlib import Path
from typing import Any

import lightning as L
import matplotlib

matplotlib.use("Agg")  # draws into files: needs no screen
import matplotlib.pyplot as plt
from lightning.pytorch.callbacks import TQDMProgressBar


class SpeedBar(TQDMProgressBar):
    """Lightning's progress bar with tokens per second over all processes, validation time not counted."""

    def __init__(self, tokens_per_step: int) -> None:
        super().__init__(refresh_rate=5)
        self.tokens_per_step = tokens_per_step
        self.seconds = 0.0
        self.steps = 0
        self._since: float | None = None

    @property
    def tokens_per_second(self) -> float:
        return self.steps * self.tokens_per_step / self.seconds if self.seconds else 0.0

    def on_train_batch_start(self, *args: Any) -> None:
        super().on_train_batch_start(*args)
        self._since = time.perf_counter()

    def on_train_batch_end(self, *args: Any) -> None:
        if self._since is not None:
            self.seconds += time.perf_counter() - self._since
            self.steps += 1
        super().on_train_batch_end(*args)

    def get_metrics(self, trainer: L.Trainer, pl_module: L.LightningModule) -> dict[str, Any]:
        metrics = dict(super().get_metrics(trainer, pl_module))
        metrics["tokens/s"] = f"{self.tokens_per_second:,.0f}"
        return metrics


class LossHistory(L.Callback):
    """Keeps the training loss of every step and every validation loss, as (step, loss)."""

    def __init__(self) -> None:
        self.train: list[tuple[int, float]] = []
        self.val: list[tuple[int, float]] = []

    def on_train_batch_end(self, trainer: L.Trainer, *args: Any) -> None:
        self.train.append((trainer.global_step, float(trainer.callback_metrics["loss"])))

    def on_validation_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        if not trainer.sanity_checking and (not self.val or self.val[-1][0] != trainer.global_step):
            self.val.append((trainer.global_step, float(trainer.callback_metrics["val_loss"])))

    def save(self, path: Path) -> None:
        """Writes rows of kind (train or val), step, loss."""
        with path.open("w", newline="") as file:
            writer = csv.writer(file)
            writer.writerow(("kind", "step", "loss"))
            writer.writerows(("train", *row) for row in self.train)
            writer.writerows(("val", *row) for row in self.val)

    @classmethod
    def load(cls, path: Path) -> LossHistory:
        """Reads what `save` wrote."""
        history = cls()
        with path.open(newline="") as file:
            for row in csv.DictReader(file):
                rows = history.train if row["kind"] == "train" else history.val
                rows.append((int(row["step"]), float(row["loss"])))
        return history


def draw(histories: dict[str, LossHistory], path: Path) -> None:
    """Draws the runs, by name, into one PNG: training losses as thin lines, validation losses as dots."""
    figure, axes = plt.subplots(figsize=(7, 4.5), layout="constrained")
    for index, (name, history) in enumerate(histories.items()):
        color = f"C{index}"
        axes.plot(*zip(*history.train, strict=True), color=color, alpha=0.35, linewidth=1)
        label = f"{name}: {history.val[-1][1]:.3f}" if history.val else name
        axes.plot(*zip(*history.val or [(0, float("nan"))], strict=True), "o-", color=color, label=label)
    axes.set_xlabel("step")
    axes.set_ylabel("loss (nats per byte)")
    axes.set_title("training (thin) and validation (dots, last value)")
    axes.grid(alpha=0.3)
    axes.legend()
    figure.savefig(path, dpi=120)
    plt.close(figure)
