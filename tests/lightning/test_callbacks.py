"""Callbacks and loops: every row gives the same values on two processes as by the stock Trainer in one."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import (
    DeviceStatsMonitor,
    EarlyStopping,
    GradientAccumulationScheduler,
    LearningRateMonitor,
    ModelCheckpoint,
    ModelSummary,
    OnExceptionCheckpoint,
    RichModelSummary,
    RichProgressBar,
    Timer,
)
from lightning.pytorch.loggers import CSVLogger
from lightning.pytorch.tuner import Tuner
from torch import Tensor
from torch.utils.data import DataLoader

from dmuon_lightning import DMuonStrategy, grad_norm
from tests.distributed.harness import capture_error, run_distributed
from tests.distributed.reference import full
from tests.lightning import modules
from tests.lightning.runs import (
    LOSS_ATOL,
    WEIGHT_ATOL,
    assert_tensors_close,
    full_weights,
    make_trainer,
    mean_losses,
    metrics,
    muon,
    one_process_muon,
    step_decay,
    world_size,
)


class Row:
    """What a row has to build its own script: fresh modules and Trainers of one side of the comparison."""

    def __init__(self, stock: bool, folder: Path) -> None:
        self.stock = stock
        self.folder = folder
        self.make = one_process_muon if stock else muon

    def net(self, kind: str = "Net", make: Any = None) -> Any:
        return getattr(modules, kind)(make or self.make)

    def trainer(self, *callbacks: pl.Callback, **options: Any) -> pl.Trainer:
        options = {"max_epochs": 2, "callbacks": list(callbacks), "default_root_dir": self.folder, **options}
        return make_trainer("auto" if self.stock else DMuonStrategy(), **options)

    def fit(self, *callbacks: pl.Callback, module: Any = None, validate: bool = False, **options: Any) -> Any:
        module = module or self.net()
        trainer = self.trainer(*callbacks, **options)
        trainer.fit(module, modules.loader(), modules.loader() if validate else None)
        return trainer, module


def _result(trainer: pl.Trainer, module: Any, **more: Any) -> dict[str, Any]:
    # The last train_loss is that of each rank's own rows.
    found = {name: value for name, value in metrics(trainer).items() if not name.startswith("train_loss")}
    steps = (trainer.global_step, trainer.current_epoch)
    return {"losses": mean_losses(module), "metrics": found, "steps": steps, "weights": full_weights(module), **more}


def model_checkpoint(row: Row) -> dict[str, Any]:
    """Top-k and last; then testing the best, whose weights are those of its epoch."""
    keep = ModelCheckpoint(row.folder, "{epoch}", monitor="val_loss", save_top_k=2, save_last=True)
    trainer, module = row.fit(keep, validate=True, max_epochs=3, enable_checkpointing=True)
    trained = _result(trainer, module)
    scores = {Path(path).name: float(score) for path, score in keep.best_k_models.items()}
    [best] = trainer.test(module, modules.loader(), ckpt_path="best", verbose=False)
    return {**trained, "scores": scores, "last": Path(keep.last_model_path).name, "best": best}


def early_stopping(row: Row) -> dict[str, Any]:
    stop = EarlyStopping("val_loss", min_delta=1.0, patience=1)
    trainer, module = row.fit(stop, validate=True, max_epochs=6)
    return _result(trainer, module, stopped=stop.stopped_epoch, best=float(stop.best_score))


def learning_rate_monitor(row: Row) -> dict[str, Any]:
    monitor = LearningRateMonitor(logging_interval="step", log_momentum=False)
    module = row.net(make=step_decay(row.make))
    trainer, _ = row.fit(monitor, module=module, logger=CSVLogger(row.folder), log_every_n_steps=1)
    result = _result(trainer, module, rates=sorted(monitor.lrs.values()))
    # Named after the optimizer's class and groups, which differ.
    result["metrics"] = sorted(result["metrics"].items(), key=lambda item: item[1])
    return {**result, "metrics": [value for _, value in result["metrics"]]}


def model_summary(row: Row) -> dict[str, Any]:
    """Printed before training, over parameters that are sharded by then."""
    seen: list[Any] = []

    class Keep(ModelSummary):
        def on_fit_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
            summary = self._summary(trainer, pl_module)
            shapes = {name: tuple(p.shape) for name, p in pl_module.named_parameters()}
            seen.append((summary.param_nums, summary.total_parameters, summary.trainable_parameters, shapes))

    trainer, module = row.fit(Keep(max_depth=2), RichModelSummary(), max_steps=1, enable_model_summary=True)
    return _result(trainer, module, summary=seen)


def rich_progress_bar(row: Row) -> dict[str, Any]:
    bar = RichProgressBar()
    trainer, module = row.fit(bar, validate=True, max_steps=3, enable_progress_bar=True)
    return _result(trainer, module, shown=sorted(set(bar.get_metrics(trainer, module)) - {"v_num"}))


def gradient_accumulation_scheduler(row: Row) -> dict[str, Any]:
    trainer, module = row.fit(GradientAccumulationScheduler({0: 1, 1: 4, 2: 2}), max_epochs=3)
    return _result(trainer, module)


def timer(row: Row) -> dict[str, Any]:
    clock = Timer(duration={"hours": 1})
    trainer, module = row.fit(clock)
    return _result(trainer, module, elapsed=clock.time_elapsed("train") > 0)


def timer_stops(row: Row) -> dict[str, Any]:
    trainer, module = row.fit(Timer(duration={"seconds": 0}, interval="step"))
    return _result(trainer, module)


def on_exception_checkpoint(row: Row) -> dict[str, Any]:
    """Saved by all ranks after a mistake in the third batch's forward; resumed from."""
    module = row.net("FailingNet")
    module.fails = "forward"
    callback = OnExceptionCheckpoint(row.folder)
    error = capture_error(row.fit, callback, module=module, enable_checkpointing=True)
    assert error is not None and error.type == "ValueError", error
    whole = row.net()
    trainer = row.trainer(max_epochs=1)
    trainer.fit(whole, modules.loader(), ckpt_path=str(row.folder / "on_exception.ckpt"), weights_only=False)
    return _result(trainer, whole)


def device_stats(row: Row) -> dict[str, Any]:
    logger = CSVLogger(row.folder)
    trainer, module = row.fit(DeviceStatsMonitor(cpu_stats=True), logger=logger, log_every_n_steps=1)
    header = (
        Path(logger.log_dir, "metrics.csv").read_text().splitlines()[0] if trainer.is_global_zero else "cpu_percent"
    )
    return _result(trainer, module, logged="cpu_percent" in header)


def overfit_batches(row: Row) -> dict[str, Any]:
    """Every rank trains on the same two batches, as with any strategy."""
    module = row.net()
    trainer = row.trainer(overfit_batches=2)
    data = DataLoader(modules.dataset(), batch_size=4)
    trainer.fit(module, data, data)
    return _result(trainer, module)


def barebones(row: Row) -> dict[str, Any]:
    names = ("logger", "enable_progress_bar", "enable_model_summary", "enable_checkpointing")
    return _result(*row.fit(barebones=True, **dict.fromkeys(names)))


def limits(row: Row) -> dict[str, Any]:
    limits = {"limit_train_batches": 3, "limit_val_batches": 2, "limit_test_batches": 1, "num_sanity_val_steps": 1}
    trainer, module = row.fit(validate=True, **limits)
    fitted = _result(trainer, module)
    return {**fitted, "test": trainer.test(module, modules.loader(), verbose=False)[0]}


def fast_dev_run(row: Row) -> dict[str, Any]:
    return _result(*row.fit(validate=True, fast_dev_run=2))


def lr_find(row: Row) -> dict[str, Any]:
    """Its own steps leave no trace: training afterwards is training."""

    def make(module: Any) -> Any:
        optimizer = row.make(module)
        optimizer.param_groups[0]["lr"] = module.lr
        return optimizer

    module = row.net(make=make)
    module.lr = 0.02
    trainer = row.trainer()
    finder = Tuner(trainer).lr_find(
        module, modules.loader(), num_training=4, update_attr=False, early_stop_threshold=None
    )
    tried, module.losses = mean_losses(module), []
    trainer.fit(module, modules.loader())
    return _result(trainer, module, tried=tried, rates=finder.results["lr"])


def fit_twice(row: Row) -> dict[str, Any]:
    trainer, module = row.fit(max_epochs=1)
    trainer.fit_loop.max_epochs = 2
    trainer.fit(module, modules.loader())
    return _result(trainer, module)


def validate_then_fit_then_predict(row: Row) -> dict[str, Any]:
    module = row.net()
    trainer = row.trainer(max_epochs=1)
    [first] = trainer.validate(module, modules.loader(), verbose=False)
    trainer.fit(module, modules.loader(), modules.loader())
    fitted = _result(trainer, module)
    predicted = torch.cat(trainer.predict(module, modules.loader()))  # type: ignore[arg-type]
    return {**fitted, "first": first, "predicted": _mean(predicted.square().mean())}


def resume_in_mid_epoch(row: Row) -> dict[str, Any]:
    trainer, module = row.fit(max_steps=3)
    trainer.save_checkpoint(row.folder / "mid.ckpt")
    module = row.net()
    trainer = row.trainer()
    trainer.fit(module, modules.loader(), ckpt_path=str(row.folder / "mid.ckpt"), weights_only=False)
    return _result(trainer, module)


def gradients_and_their_norm(row: Row) -> dict[str, Any]:
    """As a callback sees them before the step, and as users log them: the norm of everything, before clipping."""
    seen: dict[str, Any] = {}

    class Look(pl.Callback):
        def on_before_optimizer_step(self, trainer: pl.Trainer, pl_module: Any, optimizer: Any) -> None:
            seen["norms"] = {name: float(norm) for name, norm in norm_of(pl_module, norm_type=2).items()}
            seen["largest"] = float(norm_of(pl_module, norm_type="inf")["grad_inf_norm_total"])
            seen["values"] = {name: full(p.grad) for name, p in pl_module.named_parameters() if p.grad is not None}

    norm_of: Callable[..., dict[str, Any]] = pl.utilities.grad_norm if row.stock else grad_norm
    trainer, module = row.fit(Look(), gradient_clip_val=0.5, max_steps=3)
    return _result(trainer, module, norms=seen["norms"], largest=seen["largest"], grads=seen["values"])


def clipping_in_a_hook(row: Row) -> dict[str, Any]:
    """The user's own clipping, by the functions of torch, which knows nothing of owners."""

    class Net(modules.Net):
        def configure_gradient_clipping(self, optimizer: Any, *_: Any, **__: Any) -> None:
            norm = torch.nn.utils.clip_grad_norm_(self.parameters(), 0.3, error_if_nonfinite=True)
            norms.append(float(full(norm)))

    norms: list[float] = []
    trainer, module = row.fit(module=Net(row.make), max_steps=3)
    return _result(trainer, module, norms=norms)


def toggled_optimizers(row: Row) -> dict[str, Any]:
    """A step of each of two optimizers on a loss of its own, as in a GAN; one window of accumulation in between."""
    trainer, module = row.fit(module=row.net("ToggledNet", make=two_halves(row.stock)))
    return _result(trainer, module)


def two_halves(stock: bool) -> Callable[[Any], Any]:
    def configure(model: Any) -> Any:
        first = [(n, p) for n, p in model.named_parameters() if n.startswith(("embed", "mix", "blocks.0"))]
        rest = [(n, p) for n, p in model.named_parameters() if not n.startswith(("embed", "mix", "blocks.0"))]
        return [torch.optim.SGD([p for _, p in part], lr=0.05, momentum=0.9) for part in (first, rest)]

    return configure


def _mean(value: Tensor) -> float:
    if world_size() > 1:
        torch.distributed.all_reduce(value)
    return float(value) / world_size()


ROWS: dict[str, Callable[[Row], dict[str, Any]]] = {
    row.__name__: row
    for row in (
        model_checkpoint,
        early_stopping,
        learning_rate_monitor,
        model_summary,
        rich_progress_bar,
        gradient_accumulation_scheduler,
        timer,
        timer_stops,
        on_exception_checkpoint,
        device_stats,
        overfit_batches,
        barebones,
        limits,
        fast_dev_run,
        lr_find,
        fit_twice,
        validate_then_fit_then_predict,
        resume_in_mid_epoch,
        gradients_and_their_norm,
        clipping_in_a_hook,
        toggled_optimizers,
    )
}
FAST = ["early_stopping", "lr_find", "resume_in_mid_epoch", "gradients_and_their_norm", "toggled_optimizers"]
SLOW = [name for name in ROWS if name not in FAST]


def _run(names: list[str], stock: bool, folder: str) -> dict[str, Any]:
    results = {}
    for name in names:
        place = Path(folder, "stock" if stock else f"ranks{world_size()}", name)
        place.mkdir(parents=True, exist_ok=True)
        try:
            results[name] = ROWS[name](Row(stock, place))
        except Exception as error:
            raise RuntimeError(f"row {name!r}") from error
    return results


def assert_alike(got: Any, want: Any, where: str) -> None:
    """Equal in structure; numbers and tensors to the rounding of another order of summation."""
    if isinstance(want, dict) and want and all(isinstance(value, Tensor) for value in want.values()):
        assert_tensors_close(got, want, WEIGHT_ATOL)
    elif isinstance(want, dict):
        assert got.keys() == want.keys(), where
        for key, value in want.items():
            assert_alike(got[key], value, f"{where}/{key}")
    elif isinstance(want, (list, tuple)) and not (want and isinstance(want[0], float)):
        assert len(got) == len(want), f"{where}: {got} is not {want}"
        for index, value in enumerate(want):
            assert_alike(got[index], value, f"{where}/{index}")
    elif isinstance(want, (float, list, tuple)):
        assert got == pytest.approx(want, abs=LOSS_ATOL, rel=1e-6), where
    else:
        assert got == want, where


@pytest.mark.parametrize(
    "names", [pytest.param(FAST, id="fast"), pytest.param(SLOW, id="slow", marks=pytest.mark.slow)]
)
def test_two_processes_equal_one(names: list[str], tmp_path: Path) -> None:
    want = run_distributed(_run, 1, names, True, str(tmp_path), init=False, timeout=240)[0]
    for got in run_distributed(_run, 2, names, False, str(tmp_path), timeout=240):
        for name in names:
            assert_alike(got[name], want[name], name)
