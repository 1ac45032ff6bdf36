"""DMuonWeightAveraging: the numbers of Lightning's own callback in one process, checkpoints included."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint, StochasticWeightAveraging, WeightAveraging
from torch import Tensor
from torch.optim.swa_utils import get_ema_avg_fn

from dmuon_core import OwnedTensor
from dmuon_lightning import DMuonStrategy, DMuonWeightAveraging
from tests.distributed.harness import expect_errors, run_distributed
from tests.distributed.reference import full
from tests.lightning import modules
from tests.lightning.runs import (
    LOSS_ATOL,
    WEIGHT_ATOL,
    assert_equal,
    assert_tensors_close,
    full_weights,
    make_trainer,
    mean_losses,
    metrics,
    muon,
    one_process_muon,
)

DECAY = 0.7


class BufferNet(modules.Net):
    """With a buffer that training changes."""

    def build(self) -> None:
        super().build()
        self.register_buffer("seen", torch.zeros(3))

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        self.seen += 1.0
        return super().training_step(batch, batch_idx)


def _callback(stock: bool, mean: bool) -> Any:
    if stock:
        return WeightAveraging() if mean else WeightAveraging(avg_fn=get_ema_avg_fn(DECAY))
    return DMuonWeightAveraging() if mean else DMuonWeightAveraging(decay=DECAY)


def _averaged(stock: bool, mean: bool, strategy: dict[str, Any], folder: str) -> dict[str, Any]:
    """Fit with validation and checkpoints of the average; resume from the middle."""
    place = Path(folder, "stock" if stock else "ranks")
    module = BufferNet(one_process_muon if stock else muon)
    callback = _callback(stock, mean)
    keep = ModelCheckpoint(place, "{epoch}", save_top_k=-1)
    options: dict[str, Any] = {"max_epochs": 2, "enable_checkpointing": True}
    made = make_trainer("auto" if stock else DMuonStrategy(**strategy), callbacks=[callback, keep], **options)
    made.fit(module, modules.loader(), modules.loader())
    found = {"losses": mean_losses(module), "val_loss": metrics(made)["val_loss"], "weights": full_weights(module)}
    owned = [p for p in callback._average_model.module.parameters() if isinstance(p, OwnedTensor)]
    found["elsewhere"] = [p.is_owner or p._local_tensor.numel() == 0 for p in owned]
    saved = torch.load(place / "epoch=0.ckpt", weights_only=False)
    found["saved"] = saved["state_dict"]
    found["current"] = saved["current_model_state"]

    resumed = BufferNet(one_process_muon if stock else muon)
    callback = _callback(stock, mean)
    trainer = make_trainer("auto" if stock else DMuonStrategy(**strategy), callbacks=[callback], max_epochs=2)
    trainer.fit(resumed, modules.loader(), ckpt_path=str(place / "epoch=0.ckpt"), weights_only=False)
    found["resumed"] = full_weights(resumed)
    found["count"] = full(callback._average_model.n_averaged)
    return found


@pytest.mark.parametrize(
    ("mean", "world", "strategy"),
    [
        (False, 2, {}),
        pytest.param(True, 2, {"reshard_after_forward": False}, marks=pytest.mark.slow),
        pytest.param(False, 4, {"replicate_size": 2}, marks=pytest.mark.slow),
    ],
)
def test_average_equals_lightnings(mean: bool, world: int, strategy: dict[str, Any], tmp_path: Path) -> None:
    want = run_distributed(_averaged, 1, True, mean, {}, str(tmp_path), init=False)[0]
    for got in run_distributed(_averaged, world, False, mean, strategy, str(tmp_path)):
        assert len(got["elsewhere"]) == 7 and all(got["elsewhere"])
        assert got["losses"] == pytest.approx(want["losses"], abs=LOSS_ATOL)
        assert got["val_loss"] == pytest.approx(want["val_loss"], abs=LOSS_ATOL)
        assert torch.equal(got["count"], want["count"])
        for name in ("weights", "saved", "current", "resumed"):
            assert_tensors_close(got[name], want[name], WEIGHT_ATOL)
        assert_equal(got["resumed"], got["weights"])
        apart = (got["saved"]["blocks.0.up.weight"] - got["current"]["blocks.0.up.weight"]).abs().max()
        assert apart > 1e-3  # the average is not the weights


def _fit_with(callback: Any, **strategy: Any) -> None:
    trainer = make_trainer(DMuonStrategy(**strategy), max_epochs=1, callbacks=[callback])
    trainer.fit(modules.Net(muon), modules.loader())


def _refused(kind: str) -> None:
    if kind == "folder":
        _fit_with(DMuonWeightAveraging(), save_distributed_checkpoint=True)
    else:
        _fit_with(StochasticWeightAveraging(1e-2) if kind == "swa" else WeightAveraging())


@pytest.mark.parametrize(
    ("kind", "remedy"), [("swa", "DMuonWeightAveraging"), ("stock", "DMuonWeightAveraging"), ("folder", "one-file")]
)
def test_what_cannot_average_is_refused(kind: str, remedy: str) -> None:
    for error in expect_errors(_refused, 2, kind):
        assert error.type == "MisconfigurationException"
        assert remedy in error
