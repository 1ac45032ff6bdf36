"""A LightningModule that needs this library only to train; as a script, one that loads a checkpoint without it."""

from __future__ import annotations

import sys
from typing import Any

import lightning.pytorch as pl
import torch
import torch.nn as nn
from torch import Tensor


class PlainNet(pl.LightningModule):
    def __init__(self, width: int = 16, layers: int = 2) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.embed = nn.Embedding(21, width)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(width, width), nn.GELU()) for _ in range(layers))
        self.head = nn.Linear(width, 21)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        for block in self.blocks:
            x = x + block(x)
        return self.head(x)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        tokens, targets = batch
        return nn.functional.cross_entropy(self(tokens).flatten(0, 1), targets.flatten())

    def configure_optimizers(self) -> Any:
        from dmuon_core import Muon

        return Muon(self, lr=0.02)


class _NotInstalled:
    """An import system in which this library does not exist."""

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> None:
        if name.split(".")[0] in ("dmuon_core", "dmuon_lightning"):
            raise ModuleNotFoundError(f"No module named {name!r}")


if __name__ == "__main__":
    sys.meta_path.insert(0, _NotInstalled())
    module = PlainNet.load_from_checkpoint(sys.argv[1])
    torch.save({"layers": module.hparams.layers, "weights": module.state_dict()}, sys.argv[2])
    assert not [name for name in sys.modules if name.startswith("dmuon")]
