"""OwnedOptimizer in a Trainer: the same training as in one process, and resumed from files and folders."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import Tensor, nn

from dmuon_core import OwnedOptimizer
from dmuon_lightning import DMuonStrategy
from tests.distributed.harness import run_distributed
from tests.distributed.reference import full_weights
from tests.lightning import modules
from tests.lightning.runs import assert_tensors_close, make_trainer, mean_losses, rank

pytestmark = pytest.mark.slow
EPOCHS = 2


def shampoo(model: nn.Module) -> OwnedOptimizer:
    pytorch_optimizer = pytest.importorskip("pytorch_optimizer")
    return OwnedOptimizer(
        model,
        matrix=lambda params: pytorch_optimizer.Shampoo(params, lr=1e-2, momentum=0.5, matrix_eps=1e-3),
        other=lambda params: torch.optim.AdamW(params, lr=3e-3, eps=1e-4),
    )


def soap(model: nn.Module) -> OwnedOptimizer:
    """Its state holds lists of tensors."""
    pytorch_optimizer = pytest.importorskip("pytorch_optimizer")
    return OwnedOptimizer(
        model,
        matrix=lambda params: pytorch_optimizer.SOAP(params, lr=3e-3),
        other=lambda params: torch.optim.AdamW(params, lr=3e-3, eps=1e-4),
    )


def _fit(
    make: Callable[[nn.Module], OwnedOptimizer], folder: str, epochs: int, distributed_files: bool, path: str | None
) -> tuple[list[float], Any, str]:
    module = modules.Net(make, seed=rank())
    saver = ModelCheckpoint(folder, filename=f"{epochs}", enable_version_counter=False)
    strategy = DMuonStrategy(save_distributed_checkpoint=distributed_files)
    trainer = make_trainer(strategy, max_epochs=epochs, callbacks=[saver], enable_checkpointing=True)
    trainer.fit(module, modules.loader(), ckpt_path=path)
    return mean_losses(module), full_weights(module), saver.best_model_path


def _fit_in_one_process(make: Callable[[nn.Module], OwnedOptimizer]) -> tuple[list[float], dict[str, Tensor]]:
    module = modules.Net(make)
    make_trainer("auto", max_epochs=EPOCHS).fit(module, modules.loader())
    return module.losses, full_weights(module)


@pytest.mark.parametrize(
    ("make", "distributed_files"), [(shampoo, False), (shampoo, True), (soap, True)], ids=["file", "folder", "lists"]
)
def test_trains_and_resumes(
    make: Callable[[nn.Module], OwnedOptimizer], distributed_files: bool, tmp_path: Path
) -> None:
    whole_losses, whole, _ = run_distributed(_fit, 2, make, str(tmp_path / "a"), EPOCHS, distributed_files, None)[0]
    if make is shampoo:  # SOAP's eigenvectors turn the last bit of a gradient into another direction
        losses, weights = run_distributed(_fit_in_one_process, 1, make, init=False)[0]
        assert whole_losses == pytest.approx(losses, abs=1e-5)
        assert_tensors_close(whole, weights, 1e-4)
    half_losses, _, path = run_distributed(_fit, 2, make, str(tmp_path / "b"), 1, distributed_files, None)[0]
    assert Path(path).is_dir() == distributed_files
    resumed_losses, resumed, _ = run_distributed(_fit, 2, make, str(tmp_path / "c"), EPOCHS, distributed_files, path)[0]
    assert half_losses + resumed_losses == pytest.approx(whole_losses, abs=1e-6)
    assert_tensors_close(resumed, whole, 1e-6)
