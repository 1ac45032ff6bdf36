"""ModelCheckpoint and resume, as a file and as a folder: exact on the same ranks, complete on other numbers of them."""

from __future__ import annotations

import pickletools
import zipfile
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import Tensor

from tests.distributed.harness import run_distributed
from tests.lightning import modules
from tests.lightning.runs import (
    LOSS_ATOL,
    WEIGHT_ATOL,
    Fit,
    Fitted,
    assert_equal,
    assert_tensors_close,
    fit,
    full_weights,
    make_trainer,
    mean_losses,
    muon,
    state_of,
)

HALF, WHOLE = 2, 4  # epochs
FIT = Fit(optimizers="step_decay", epochs=WHOLE, validate=True)
FOLDER = replace(FIT, strategy={"save_distributed_checkpoint": True})
BF16 = replace(FIT, trainer={"precision": "bf16-true"})


class AtStart(pl.Callback):
    """What a resumed training starts with, whole."""

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self.weights = full_weights(pl_module)
        self.state = state_of(trainer, pl_module)
        self.rates = [group["lr"] for group in trainer.optimizers[0].param_groups]


def _save(recipe: Fit, folder: str) -> tuple[Fitted, str]:
    """Half of the epochs, with a checkpoint at the end of each of which the last is kept."""
    saver = ModelCheckpoint(folder, filename="{epoch}", enable_version_counter=False)
    half = replace(recipe, epochs=HALF, trainer={**recipe.trainer, "enable_checkpointing": True})
    return fit(half, callbacks=[saver]), saver.best_model_path


def _resume(recipe: Fit, path: str) -> tuple[Fitted, dict[str, Any]]:
    start = AtStart()
    fitted = fit(recipe, path, [start])
    return fitted, {"weights": start.weights, "state": start.state, "rates": start.rates}


def _saved(recipe: Fit, world: int, folder: Path) -> tuple[Fitted, str]:
    return run_distributed(_save, world, recipe, str(folder))[0]


@pytest.mark.parametrize(
    "recipe",
    [FIT, pytest.param(FOLDER, marks=pytest.mark.slow), pytest.param(BF16, marks=pytest.mark.slow)],
    ids=["file", "folder", "file, bf16-true"],
)
def test_resume_is_exact(recipe: Fit, tmp_path: Path) -> None:
    whole = run_distributed(fit, 2, recipe)[0]
    half, path = _saved(recipe, 2, tmp_path)
    assert [entry.name for entry in tmp_path.iterdir()] == ["epoch=1.ckpt"]  # the first one was removed
    assert Path(path).is_dir() == (recipe is FOLDER)
    resumed, start = run_distributed(_resume, 2, recipe, path)[0]
    assert_equal(start["weights"], half.weights)
    assert_equal(start["state"], half.state)
    assert start["rates"] == pytest.approx([0.02 * 0.3**4, 3e-3 * 0.3**4])
    assert half.losses + resumed.losses == whole.losses
    assert_equal(resumed.weights, whole.weights)
    assert_equal(resumed.state, whole.state)


CHANGES = [
    pytest.param(*change, id=f"{'folder' if change[0] is FOLDER else 'file'}-{change[1]}-to-{change[2]}", marks=marks)
    for *change, marks in [
        (FIT, 2, 1, []),
        (FIT, 1, 2, pytest.mark.slow),
        (FIT, 2, 4, []),
        (FOLDER, 2, 4, pytest.mark.slow),
        (FOLDER, 2, 1, pytest.mark.slow),
        (FOLDER, 1, 2, pytest.mark.slow),
        (FIT, 4, 2, pytest.mark.slow),
    ]
]


@pytest.mark.parametrize(("recipe", "before", "after"), CHANGES)
def test_resume_on_another_number_of_processes(recipe: Fit, before: int, after: int, tmp_path: Path) -> None:
    half, path = _saved(recipe, before, tmp_path)
    expected = run_distributed(_resume, before, recipe, path)[0][0]
    for resumed, start in run_distributed(_resume, after, recipe, path):
        assert_equal(start["weights"], half.weights)
        assert_equal(start["state"], half.state)
        assert resumed.losses == pytest.approx(expected.losses, abs=LOSS_ATOL)
        assert_tensors_close(resumed.weights, expected.weights, WEIGHT_ATOL)


# ------------------------------------------------------------------------------------- the one file, seen from outside


def _tensors(tree: Any) -> Iterator[Tensor]:
    if isinstance(tree, Tensor):
        yield tree
    elif isinstance(tree, dict):
        for value in tree.values():
            yield from _tensors(value)
    elif isinstance(tree, (list, tuple)):
        for value in tree:
            yield from _tensors(value)


def test_the_file_needs_nothing_of_this_library(tmp_path: Path) -> None:
    half, path = _saved(FIT, 2, tmp_path)
    checkpoint = torch.load(path, weights_only=True)
    assert {type(tensor) for tensor in _tensors(checkpoint)} == {Tensor}
    with zipfile.ZipFile(path) as archive:
        pickled = archive.read(next(name for name in archive.namelist() if name.endswith("data.pkl")))
    words = {str(argument) for _, argument, _ in pickletools.genops(pickled)}
    assert not [word for word in words if "dmuon" in word.lower() or "distributed" in word.lower()]

    module = modules.Net(muon, seed=3)
    module.load_state_dict(checkpoint["state_dict"])
    assert_equal(dict(module.named_parameters()), half.weights)
    loaded = modules.Net.load_from_checkpoint(path, optimizers=muon)
    assert_equal(dict(loaded.named_parameters()), half.weights)

    # The optimizer's state fits the same optimizer over the plain module.
    optimizer = muon(module)
    optimizer.load_state_dict(checkpoint["optimizer_states"][0])
    names = {p: name for name, p in module.named_parameters()}
    state = {
        f"{names[p]}/{key}": torch.as_tensor(value)
        for p, entry in optimizer.state.items()
        for key, value in entry.items()
    }
    assert_equal(state, half.state)


def _resume_stock(path: str) -> tuple[list[float], dict[str, Tensor]]:
    module = modules.Net(muon)
    trainer = make_trainer("auto", max_epochs=WHOLE)
    trainer.fit(module, modules.loader(), ckpt_path=path)
    return mean_losses(module), full_weights(module)


def test_the_stock_strategy_goes_on_with_the_file(tmp_path: Path) -> None:
    whole = run_distributed(fit, 2, Fit(epochs=WHOLE))[0]
    half, path = _saved(Fit(), 2, tmp_path)
    losses, weights = run_distributed(_resume_stock, 1, path, init=False)[0]
    assert half.losses + losses == pytest.approx(whole.losses, abs=LOSS_ATOL)
    assert_tensors_close(weights, whole.weights, WEIGHT_ATOL)


def _save_stock(folder: str) -> tuple[dict[str, Tensor], dict[str, Tensor], str]:
    saver = ModelCheckpoint(folder, filename="{epoch}", enable_version_counter=False)
    module = modules.Net(muon)
    trainer = make_trainer("auto", max_epochs=HALF, callbacks=[saver], enable_checkpointing=True)
    trainer.fit(module, modules.loader())
    return full_weights(module), state_of(trainer, module), saver.best_model_path


def test_a_stock_checkpoint_starts_a_dmuon_run(tmp_path: Path) -> None:
    """A stock optimizer numbers its parameters group by group, so the state must find its parameters by name."""
    weights, state, path = run_distributed(_save_stock, 1, str(tmp_path), init=False)[0]
    _, start = run_distributed(_resume, 2, Fit(epochs=WHOLE), path)[0]
    assert_equal(start["weights"], weights)
    assert_equal(start["state"], state)


def _evaluate(path: str) -> tuple[float, float, dict[str, Tensor]]:
    """A checkpoint loaded by validate, into a module from the meta device, and by test."""
    from dmuon_lightning import DMuonStrategy

    trainer = make_trainer(DMuonStrategy())
    with trainer.init_module(empty_init=True):
        module = modules.Net(muon)
    validated = trainer.validate(module, modules.loader(), ckpt_path=path, verbose=False)[0]["val_loss"]
    other = modules.Net(muon, seed=9)
    tested = make_trainer(DMuonStrategy()).test(other, modules.loader(), ckpt_path=path, verbose=False)[0]["test_loss"]
    return validated, tested, full_weights(module)


def test_a_checkpoint_that_only_evaluation_loads(tmp_path: Path) -> None:
    half, path = _saved(FIT, 2, tmp_path)
    for validated, tested, weights in run_distributed(_evaluate, 2, path):
        assert validated == tested == pytest.approx(half.metrics["val_loss"], abs=LOSS_ATOL)
        assert_equal(weights, half.weights)
