"""The GPT of `gpt.py` by LightningCLI: everything is in a config file, or on the command line.

python examples/cli/main.py fit --config examples/cli/gpt.yaml
python examples/cli/main.py fit --config examples/cli/gpt.yaml --trainer.strategy dmuon_z2
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

import lightning as L
import torch
from lightning.pytorch.cli import LightningArgumentParser, LightningCLI
from torch import Tensor
from torch.utils.data import DataLoader

import dmuon_lightning  # noqa: F401 - makes `strategy: dmuon` known

sys.path.insert(0, str(Path(__file__).parents[1]))
from gpt import GPT, GPTConfig, Windows, load_text, next_byte_loss


class GPTModule(L.LightningModule):
    """Next-byte model. Says nothing of optimizers: those are the config file's."""

    def __init__(self, dim: int = 128, layers: int = 4, heads: int = 4, context: int = 128) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.model = GPT(GPTConfig(dim=dim, layers=layers, heads=heads, context=context))

    def _loss(self, batch: tuple[Tensor, Tensor]) -> Tensor:
        tokens, targets = batch
        return next_byte_loss(self.model(tokens), targets)

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        loss = self._loss(batch)
        self.log("loss", loss, prog_bar=True)
        return loss

    def validation_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> None:
        self.log("val_loss", self._loss(batch), prog_bar=True, sync_dist=True)


class TextData(L.LightningDataModule):
    """Windows of a text, the last fiftieth for validation: a file, or the source of the Python standard library."""

    def __init__(self, context: int = 128, batch_size: int = 16, text: Path | None = None) -> None:
        super().__init__()
        self.context, self.batch_size, self.text = context, batch_size, text

    def setup(self, stage: str) -> None:
        text = load_text(self.text)
        cut = len(text) - len(text) // 50
        self.train, self.val = Windows(text[:cut], self.context), Windows(text[cut:], self.context)

    def train_dataloader(self) -> DataLoader:
        return DataLoader(self.train, self.batch_size, shuffle=True, drop_last=True)

    def val_dataloader(self) -> DataLoader:
        return DataLoader(self.val, self.batch_size)


class GPTCLI(LightningCLI):
    """Windows are as long as the model's context."""

    def add_arguments_to_parser(self, parser: LightningArgumentParser) -> None:
        parser.link_arguments("data.context", "model.context")


def main() -> None:
    if not torch.cuda.is_available() and "OMP_NUM_THREADS" not in os.environ:
        # One thread a process, also in the processes that the Trainer starts: they share the cores already.
        os.environ["OMP_NUM_THREADS"] = "1"
        torch.set_num_threads(1)
    GPTCLI(GPTModule, TextData, seed_everything_default=0, save_config_kwargs={"overwrite": True})


if __name__ == "__main__":
    main()
