"""`python -W error::UserWarning`: this package makes no warning in a script that does nothing wrong."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
from lightning.pytorch.strategies import ModelParallelStrategy
from torch import nn
from torch.distributed.fsdp import FSDPModule, fully_shard

from dmuon_core import Muon
from dmuon_lightning import DMuonStrategy
from tests.distributed.harness import run_distributed
from tests.lightning import modules
from tests.lightning.runs import adamw, make_trainer, muon, world_size

VIEW = "returned a view tensor"  # FSDP2, of a module whose output shares memory with something else


class ReadmeModule(pl.LightningModule):
    """As in the README: a model inside, and nothing about sharding."""

    def __init__(self) -> None:
        super().__init__()
        self.model = modules.Net()

    def loss_of(self, batch: Any) -> Any:
        return nn.functional.cross_entropy(self.model(batch[0]).flatten(0, 1), batch[1].flatten())

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = self.loss_of(batch)
        self.log("loss", loss)
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val_loss", self.loss_of(batch), sync_dist=True)

    def configure_optimizers(self) -> Any:
        return Muon(self, lr=0.02, adamw_lr=3e-4)


def _readme(folder: str) -> list[str]:
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        # Lightning's own advice on the data of this test.
        warnings.filterwarnings("ignore", "(?s).*(does not have many workers|is smaller than the logging interval)")
        module = ReadmeModule()
        options = {"enable_checkpointing": True, "default_root_dir": folder, "gradient_clip_val": 1.0}
        trainer = make_trainer(DMuonStrategy(), max_epochs=2, **options)
        trainer.fit(module, modules.loader(), modules.loader())
        trainer.validate(module, modules.loader(), ckpt_path="best", verbose=False)
    return [type(trainer.strategy).__name__, trainer.strategy.root_device.type]


def test_the_readme_example_warns_of_nothing(tmp_path: Path) -> None:
    assert run_distributed(_readme, 2, str(tmp_path)) == [["DMuonStrategy", "cpu"]] * 2


class ShardedNet(modules.Net):
    """The same units as DMuonStrategy makes, by FSDP2 alone."""

    def configure_model(self) -> None:
        if not isinstance(self, FSDPModule):
            for block in self.blocks:
                fully_shard(block)
            fully_shard(self)


def _view_warnings() -> tuple[int, int]:
    counts = []
    for kind in (modules.Net, ShardedNet):
        strategy: Any = DMuonStrategy()
        if kind is ShardedNet:
            strategy = ModelParallelStrategy(data_parallel_size=world_size(), tensor_parallel_size=1)
        module = kind(muon if kind is modules.Net else adamw)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            make_trainer(strategy, max_epochs=1).fit(module, modules.loader())
        counts.append(sum(VIEW in str(warning.message) for warning in caught))
    return counts[0], counts[1]


@pytest.mark.slow
def test_views_are_the_models_own() -> None:
    """A module that returns a view makes FSDP2 warn; as often as without this package."""
    for ours, stock in run_distributed(_view_warnings, 2):
        assert ours == stock > 0
