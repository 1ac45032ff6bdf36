"""What ModelCheckpoint and the Trainer do with checkpoints: best, last, weights only, wrappers, strangers, errors."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn as nn
from lightning.fabric.plugins.io.torch_io import TorchCheckpointIO
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.strategies import ModelParallelStrategy
from torch import Tensor
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.fsdp import fully_shard, register_fsdp_forward_method

from dmuon_lightning import DMuonStrategy
from tests.distributed.harness import RankError, capture_error, run_distributed
from tests.lightning import modules, plain_module
from tests.lightning.runs import (
    LOSS_ATOL,
    Fit,
    adamw,
    assert_equal,
    fit,
    full_weights,
    make_module,
    make_trainer,
    mean_losses,
    muon,
    rank,
    state_of,
)
from tests.lightning.test_checkpoint import FIT, FOLDER, AtStart, _resume, _save


class CompiledNet(modules.Net):
    def build(self) -> None:
        super().build()
        self.blocks[0] = torch.compile(self.blocks[0], backend="eager")


class WrappedNet(modules.Net):
    def build(self) -> None:
        super().build()
        for index, block in enumerate(self.blocks):
            self.blocks[index] = checkpoint_wrapper(block)


class StrangeNet(modules.Net):
    """With parameters that are tied, frozen, and never used; and a buffer."""

    def build(self) -> None:
        super().build()
        self.head.weight = self.embed.weight
        self.blocks[0].up.weight.requires_grad_(False)
        self.scale.requires_grad_(False)
        self.never = nn.Linear(modules.WIDTH, modules.WIDTH)
        self.register_buffer("seen", torch.zeros(()))

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        self.seen += 1
        return super().training_step(batch, batch_idx)


class WiderNet(modules.Net):
    def build(self) -> None:
        super().build()
        self.head = nn.Linear(modules.WIDTH, modules.VOCABULARY + 1)


class DeeperNet(modules.Net):
    def build(self) -> None:
        super().build()
        self.blocks.append(modules.Block())


class LooseNet(modules.Net):
    """Takes over what fits."""

    strict_loading = False  # type: ignore[assignment]


class StockNet(modules.Net):
    """Sharded whole, as a user of FSDP2 does it."""

    def configure_model(self) -> None:
        for block in self.blocks:
            fully_shard(block)
        fully_shard(self)
        register_fsdp_forward_method(self, "training_step")


# Fits are named by strings that travel to the ranks.
for _kind in (CompiledNet, WrappedNet, StrangeNet):
    setattr(modules, _kind.__name__, _kind)


def _callbacks(recipe: Fit, folder: str) -> None:
    best = ModelCheckpoint(folder, "{epoch}", "val_loss", save_top_k=2, save_last=True, enable_version_counter=False)
    light = ModelCheckpoint(f"{folder}/light", "{epoch}", save_weights_only=True, save_top_k=-1)
    module = make_module(recipe)
    trainer = make_trainer(
        DMuonStrategy(**recipe.strategy), max_epochs=3, callbacks=[best, light], enable_checkpointing=True
    )
    trainer.fit(module, modules.loader(), modules.loader())
    trained, state = full_weights(module), state_of(trainer, module)
    trainer.strategy.barrier()
    kept = sorted(name for name in os.listdir(folder) if name != "light")
    assert len(kept) == 3 and kept[-1] == "last.ckpt" and best.best_model_path.endswith(tuple(kept[:2]))
    assert sorted(os.listdir(f"{folder}/light")) == [f"epoch={n}.ckpt" for n in range(3)]

    with torch.no_grad():
        for p in module.parameters():
            p.zero_()
    tested = trainer.test(module, modules.loader(), ckpt_path="best", verbose=False)[0]["test_loss"]
    assert tested == pytest.approx(best.best_model_score.item(), abs=LOSS_ATOL)

    start = AtStart()
    other = make_module(recipe)
    resumed = make_trainer(DMuonStrategy(**recipe.strategy), max_epochs=4, callbacks=[start])
    resumed.fit(other, modules.loader(), ckpt_path=f"{folder}/last.ckpt")
    assert_equal(start.weights, trained)
    assert_equal(start.state, state)

    last = make_module(recipe)
    evaluation = make_trainer(DMuonStrategy(**recipe.strategy))
    evaluation.validate(last, modules.loader(), ckpt_path=f"{folder}/light/epoch=2.ckpt", verbose=False)
    assert_equal(full_weights(last), trained)
    assert "contains only the model" in _error_of_fit(make_module(recipe), f"{folder}/light/epoch=2.ckpt")


class _Recorder(TorchCheckpointIO):
    """A plugin of the user's own, which decides how a file is written."""

    def save_checkpoint(self, checkpoint: dict[str, Any], path: Any, storage_options: Any = None) -> None:
        super().save_checkpoint({"state_dict": checkpoint["state_dict"], "mine": True}, path, storage_options)


def _own_plugin(path: str) -> None:
    module = modules.Net(muon)
    trainer = make_trainer(DMuonStrategy(), max_epochs=1, plugins=[_Recorder()])
    trainer.fit(module, modules.loader())
    trainer.save_checkpoint(path)
    found = torch.load(path)
    assert found["mine"]
    assert_equal(found["state_dict"], full_weights(module))


@pytest.mark.slow
def test_a_plugin_of_the_user_writes_the_file(tmp_path: Path) -> None:
    run_distributed(_own_plugin, 2, str(tmp_path / "model.ckpt"))


@pytest.mark.parametrize("recipe", [FIT, pytest.param(FOLDER, marks=pytest.mark.slow)], ids=["file", "folder"])
def test_model_checkpoint(recipe: Fit, tmp_path: Path) -> None:
    run_distributed(_callbacks, 2, recipe, str(tmp_path))


def _resume_exactly(recipe: Fit, folder: str) -> None:
    whole = fit(recipe)
    half, path = _save(recipe, folder)
    resumed, start = _resume(recipe, path)
    assert half.losses + resumed.losses == whole.losses
    assert_equal(start["weights"], half.weights)
    assert_equal(resumed.weights, whole.weights)
    common = {name: value for name, value in resumed.state.items() if name in whole.state}
    assert_equal(common, whole.state)
    assert all(name.startswith("never.") for name in resumed.state.keys() - whole.state.keys())
    if rank() == 0 and Path(path).is_file():
        checkpoint = torch.load(path, weights_only=True)
        module = make_module(recipe)
        named = [
            name.replace("_orig_mod.", "").replace("_checkpoint_wrapped_module.", "") for name in module.state_dict()
        ]
        assert sorted(checkpoint["state_dict"]) == sorted(named)
        plain = modules.Net(muon) if recipe.module != "StrangeNet" else module
        plain.load_state_dict(checkpoint["state_dict"])
        if recipe.module == "StrangeNet":
            assert module.seen == 8 and module.head.weight is module.embed.weight
    dist.barrier()


@pytest.mark.parametrize(
    ("kind", "recipe"),
    [
        pytest.param("StrangeNet", FIT, marks=pytest.mark.slow),
        pytest.param("StrangeNet", FOLDER, marks=pytest.mark.slow),
        pytest.param("CompiledNet", FIT, marks=pytest.mark.slow),
        pytest.param("CompiledNet", FOLDER, marks=pytest.mark.slow),
        pytest.param("WrappedNet", FIT, marks=pytest.mark.slow),
        pytest.param("WrappedNet", FOLDER, marks=pytest.mark.slow),
        pytest.param("ManualNet", replace(FIT, optimizers="two_optimizers"), marks=pytest.mark.slow),
        pytest.param("ManualNet", replace(FOLDER, optimizers="two_optimizers"), marks=pytest.mark.slow),
    ],
)
def test_resume_is_exact(kind: str, recipe: Fit, tmp_path: Path) -> None:
    run_distributed(_resume_exactly, 2, replace(recipe, module=kind), str(tmp_path))


# --------------------------------------------------------------------------------------------------------------- errors


def _error_of_fit(module: Any, path: str) -> RankError:
    trainer = make_trainer(DMuonStrategy(), max_epochs=4)
    error = capture_error(trainer.fit, module, modules.loader(), ckpt_path=path)
    assert error is not None, "it was loaded"
    return error


def _refuse(paths: list[str], scratch: str) -> None:
    for path in paths:
        for kind, text in (
            (WiderNet, "'head.weight' (saved (21, 16), in the model (22, 16))"),
            (DeeperNet, "blocks.3"),
        ):
            error = _error_of_fit(kind(muon), path)
            assert error.type == "RuntimeError"
            assert text in error and "Nothing was loaded" in error and "strict=False" in error
        # The same model with another optimizer; its weights stay as they were, too.
        module = modules.Net(lambda model: muon(model.blocks), seed=4)
        error = _error_of_fit(module, path)
        assert error.type == "ValueError"
        assert "not trained by this optimizer" in error and "Nothing was loaded" in error
        assert_equal(full_weights(module), dict(modules.Net(seed=4).named_parameters()))
    folder = next(path for path in paths if Path(path).is_dir())
    for name in (".metadata", "meta.pt"):
        if rank() == 0:
            os.rename(f"{folder}/{name}", f"{folder}/moved")
        dist.barrier()
        assert "no complete checkpoint" in _error_of_fit(modules.Net(muon), folder)
        dist.barrier()
        if rank() == 0:
            os.rename(f"{folder}/moved", f"{folder}/{name}")
    # What cannot be written is an error on every rank, too.
    Path(f"{scratch}/taken").touch()
    for strategy in (DMuonStrategy(), DMuonStrategy(save_distributed_checkpoint=True)):
        trainer = make_trainer(strategy, max_epochs=1)
        trainer.fit(modules.Net(muon), modules.loader())
        failed = capture_error(trainer.save_checkpoint, f"{scratch}/taken/not a folder.ckpt")
        assert failed is not None and "taken" in failed, failed


def _save_both(folder: str) -> list[str]:
    return [_save(recipe, f"{folder}/{name}")[1] for name, recipe in (("file", FIT), ("folder", FOLDER))]


def test_what_does_not_fit_is_refused_on_every_rank(tmp_path: Path) -> None:
    paths = run_distributed(_save_both, 2, str(tmp_path))[0]
    run_distributed(_refuse, 2, paths, str(tmp_path))


# ------------------------------------------------------------------------------------------------------------ strangers


def _fit_adamw(folder: str) -> tuple[str, dict[str, Tensor], dict[str, Tensor]]:
    module = modules.Net(adamw)
    saver = ModelCheckpoint(folder, filename="{epoch}")
    trainer = make_trainer("auto", max_epochs=1, callbacks=[saver], enable_checkpointing=True)
    trainer.fit(module, modules.loader())
    return saver.best_model_path, full_weights(module), state_of(trainer, module)


def _fit_fsdp2(folder: str) -> tuple[str, dict[str, Tensor], dict[str, Tensor]]:
    module = StockNet(adamw)
    strategy = ModelParallelStrategy(data_parallel_size=2, tensor_parallel_size=1, save_distributed_checkpoint=True)
    trainer = make_trainer(strategy, max_epochs=1)
    trainer.fit(module, modules.loader())
    trainer.save_checkpoint(f"{folder}/stock")
    return f"{folder}/stock", full_weights(module), state_of(trainer, module)


def _start_from_adamw(path: str) -> tuple[dict[str, Tensor], dict[str, Tensor], list[float], int]:
    start = AtStart()
    trainer = make_trainer(DMuonStrategy(), max_epochs=2, callbacks=[start])
    module = LooseNet(muon)
    trainer.fit(module, modules.loader(), ckpt_path=path)
    assert "was saved in one group with" in _error_of_fit(modules.Net(muon), path)
    return start.weights, start.state, start.rates, len(mean_losses(module))


@pytest.mark.slow
@pytest.mark.parametrize("stock", ["one process, file", "FSDP2, folder"])
def test_a_run_with_adamw_goes_on_with_muon(stock: str, tmp_path: Path) -> None:
    """strict_loading = False takes over the weights, and the moments of what AdamW still trains."""
    if stock == "FSDP2, folder":
        path, weights, state = run_distributed(_fit_fsdp2, 2, str(tmp_path))[0]
    else:
        path, weights, state = run_distributed(_fit_adamw, 1, str(tmp_path), init=False)[0]
    for got, moments, rates, steps in run_distributed(_start_from_adamw, 2, path):
        assert_equal(got, weights)
        kept = {name: value for name, value in moments.items() if not name.endswith("momentum_buffer")}
        assert len(kept) == 3 * 15
        assert_equal(kept, {name: state[name] for name in kept})
        assert not any(value.any() for name, value in moments.items() if name not in kept)
        assert rates == [0.02, 3e-3] and steps == 4


def _fit_plain(path: str) -> dict[str, Tensor]:
    module = plain_module.PlainNet(layers=3)
    trainer = make_trainer(DMuonStrategy(), max_epochs=1)
    trainer.fit(module, modules.loader())
    trainer.save_checkpoint(path)
    return full_weights(module)


@pytest.mark.slow
def test_load_from_checkpoint_where_this_library_is_not_installed(tmp_path: Path) -> None:
    path, result = tmp_path / "model.ckpt", tmp_path / "loaded.pt"
    weights = run_distributed(_fit_plain, 2, str(path))[0]
    done = subprocess.run(
        [sys.executable, plain_module.__file__, str(path), str(result)], capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    loaded = torch.load(result)
    assert loaded["layers"] == 3
    assert_equal(loaded["weights"], weights)
