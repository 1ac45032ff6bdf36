"""Validate, test, predict and several fits of one module, in any order; and what a Trainer reads off the module."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import LearningRateMonitor
from lightning.pytorch.loggers import CSVLogger
from lightning.pytorch.loops import utilities as loop_utilities
from lightning.pytorch.utilities.model_summary import ModelSummary
from torch import Tensor

from dmuon_lightning import DMuonStrategy
from tests.distributed.harness import capture_error, run_distributed
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
    world_size,
)


def _trainer(stock: bool, **options: Any) -> pl.Trainer:
    return make_trainer("auto" if stock else DMuonStrategy(), **options)


def _all_loops(stock: bool) -> dict[str, Any]:
    module = modules.Net(one_process_muon if stock else muon)
    found: dict[str, Any] = {}
    _trainer(stock).validate(module, modules.loader(), verbose=False)
    for name in ("first", "second"):
        trainer = _trainer(stock, max_epochs=1)
        trainer.fit(module, modules.loader(), modules.loader())
        found |= {f"{name} {key}": value for key, value in metrics(trainer).items() if key != "train_loss"}
        # The same trainer, and another one.
        for evaluator in (trainer, _trainer(stock)):
            found[f"{name} test"] = evaluator.test(module, modules.loader(), verbose=False)[0]["test_loss"]
    predictions = _trainer(stock).predict(module, modules.loader())
    assert predictions is not None
    return {
        "metrics": found,
        "predictions": torch.cat(predictions),
        "losses": mean_losses(module),
        "weights": full_weights(module),
    }


@pytest.mark.parametrize("world", [1, 2])
def test_every_loop_of_one_module(world: int) -> None:
    want = run_distributed(_all_loops, 1, True, init=False)[0]
    results = run_distributed(_all_loops, world, False)
    for got in results:
        assert got["losses"] == pytest.approx(want["losses"], abs=LOSS_ATOL)
        assert got["metrics"] == pytest.approx(want["metrics"], abs=LOSS_ATOL)
        assert_tensors_close(got["weights"], want["weights"], WEIGHT_ATOL)
    dealt = torch.stack([got["predictions"] for got in results], dim=1).flatten(0, 1)
    torch.testing.assert_close(dealt, want["predictions"], rtol=0, atol=1e-4)


class Modes(modules.Net):
    """Notes under which grad modes its evaluation steps run."""

    def build(self) -> None:
        super().build()
        self.modes: list[tuple[str, bool, bool]] = []

    def loss_of(self, batch: Any) -> Tensor:
        stage = str(self.trainer.state.stage.value) if self.trainer.state.stage else ""
        self.modes.append((stage, torch.is_inference_mode_enabled(), torch.is_grad_enabled()))
        return super().loss_of(batch)

    def predict_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self.loss_of(batch)


def _modes() -> dict[str, Any]:
    # What a Trainer asks to find out whether the backend is gloo, on which it never uses inference mode.
    loop_utilities._distributed_is_initialized = lambda: False  # type: ignore[assignment]
    module = Modes(muon)
    _trainer(False).validate(module, modules.loader(), verbose=False)
    _trainer(False).predict(module, modules.loader())
    _trainer(False).test(module, modules.loader(), verbose=False)
    trainer = _trainer(False, max_epochs=1, inference_mode=True)
    trainer.fit(module, modules.loader(), modules.loader())
    for loop in (trainer.validate, trainer.test, trainer.predict):
        loop(module, modules.loader())
    _trainer(False, max_epochs=1).fit(module, modules.loader())
    stock = Modes(one_process_muon)
    if world_size() == 1:
        _trainer(True).validate(stock, modules.loader(), verbose=False)
    return {"modes": set(module.modes), "losses": mean_losses(module), "stock": set(stock.modes)}


@pytest.mark.parametrize("world", [1, 2])
def test_no_loop_enters_inference_mode(world: int) -> None:
    for got in run_distributed(_modes, world):
        assert got["modes"] == {
            ("sanity_check", False, False),
            ("validate", False, False),
            ("test", False, False),
            ("predict", False, False),
            ("train", False, True),
        }
        assert got["losses"][-1] < got["losses"][0]
        if world == 1:  # the emulation works: elsewhere the Trainer does use it
            assert got["stock"] == {("validate", True, False)}


def _fit_after_a_mistake(stock: bool, where: str) -> dict[str, Any]:
    module = modules.FailingNet(one_process_muon if stock else muon)
    module.fails = where
    error = capture_error(_trainer(stock, max_epochs=1).fit, module, modules.loader())
    module.fails = ""
    _trainer(stock, max_epochs=1).fit(module, modules.loader())
    evaluated = _trainer(stock).validate(module, modules.loader(), verbose=False)[0]["val_loss"]
    # The failed step may have noted its loss; the four of the second fit come last.
    module.losses = module.losses[-4:]
    return {
        "error": error.message if error else "",
        "losses": mean_losses(module),
        "evaluated": evaluated,
        "weights": full_weights(module),
    }


@pytest.mark.parametrize("where", ["training_step", "forward", "backward"])
def test_a_users_mistake_leaves_a_usable_module(where: str) -> None:
    want = run_distributed(_fit_after_a_mistake, 1, True, where, init=False)[0]
    for got in run_distributed(_fit_after_a_mistake, 2, False, where):
        assert got["error"] == want["error"] == "a user's mistake"
        assert got["losses"] == pytest.approx(want["losses"], abs=LOSS_ATOL)
        assert got["evaluated"] == pytest.approx(want["evaluated"], abs=LOSS_ATOL)
        assert_tensors_close(got["weights"], want["weights"], WEIGHT_ATOL)


def _two_loaders(stock: bool) -> dict[str, float]:
    module = modules.LoadersNet(one_process_muon if stock else muon)
    trainer = _trainer(stock, max_epochs=1)
    trainer.fit(module, modules.loader(), [modules.loader(), modules.loader(rows=16)])
    return {key: value for key, value in metrics(trainer).items() if key != "train_loss"}


def test_validation_on_two_loaders() -> None:
    want = run_distributed(_two_loaders, 1, True, init=False)[0]
    for got in run_distributed(_two_loaders, 2, False):
        assert got == pytest.approx(want, abs=LOSS_ATOL)
        assert len(got) == 2


def _meta() -> dict[str, Any]:
    trainer = _trainer(False, max_epochs=2)
    with trainer.init_module(empty_init=True):
        module = modules.MetaNet(muon, seed=world_size())
    assert all(t.is_meta for t in [*module.parameters(), *module.buffers()])
    trainer.fit(module, modules.loader())
    return {"losses": mean_losses(module), "offset": module.offset, "weights": full_weights(module)}


class Start(pl.Callback):
    """Keeps the weights that training starts with."""

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self.weights = full_weights(pl_module)


def _meta_start() -> dict[str, Tensor]:
    start = Start()
    trainer = _trainer(False, max_epochs=1, callbacks=[start])
    with trainer.init_module(empty_init=True):
        module = modules.MetaNet(muon)
    trainer.fit(module, modules.loader())
    return start.weights


@pytest.mark.parametrize("world", [1, 2])
def test_a_module_from_the_meta_device(world: int) -> None:
    for got in run_distributed(_meta, world):
        assert got["losses"][-1] < got["losses"][0] < 4
        assert torch.equal(got["offset"], torch.full((modules.WIDTH,), 0.25))
    starts = run_distributed(_meta_start, world)
    for start in starts:
        assert torch.equal(start["scale"], torch.full((modules.WIDTH,), 0.5))
        for name, fan_in in {"blocks.0.up.weight": 16, "blocks.0.down.weight": 32, "head.weight": 16}.items():
            bound = fan_in**-0.5
            assert start[name].abs().max() <= bound
            assert start[name].std().item() == pytest.approx(bound / 3**0.5, rel=0.2)
        assert start["embed.weight"].std().item() == pytest.approx(1, rel=0.2)
        assert all(torch.equal(start[name], starts[0][name]) for name in start)
        assert not torch.equal(start["blocks.0.up.weight"], start["blocks.1.up.weight"])


def _what_a_trainer_reads(folder: str) -> dict[str, Any]:
    module = modules.Net(muon)
    plain = ModelSummary(module)
    monitor = LearningRateMonitor(logging_interval="step")
    logger = CSVLogger(folder)
    trainer = _trainer(
        False, max_epochs=1, logger=logger, callbacks=[monitor], enable_model_summary=True, log_every_n_steps=1
    )
    trainer.fit(module, modules.loader())
    summary = ModelSummary(module)
    return {
        "plain": (plain.total_parameters, plain.trainable_parameters, plain.param_nums),
        "sharded": (summary.total_parameters, summary.trainable_parameters, summary.param_nums),
        "rates": monitor.lrs,
    }


def test_summary_and_learning_rates(tmp_path: Path) -> None:
    for got in run_distributed(_what_a_trainer_reads, 2, str(tmp_path)):
        assert got["sharded"] == got["plain"]
        assert {tuple(values) for values in got["rates"].values()} == {(0.02,) * 4, (3e-3,) * 4}
