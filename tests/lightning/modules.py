"""LightningModules as users write them, and the data they learn."""

from __future__ import annotations

from typing import Any

import lightning.pytorch as pl
import torch
import torch.distributed as dist
import torch.nn as nn
from torch import Tensor
from torch.distributed.fsdp import fully_shard
from torch.utils.data import DataLoader, DistributedSampler, Subset, TensorDataset

from dmuon_core import dedicate_params

VOCABULARY = 21  # no world size divides it: FSDP2 pads the embedding
WIDTH = 16
ROWS = 32
BATCH = 8  # rows of one global batch


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up = nn.Linear(WIDTH, 2 * WIDTH, bias=False)
        self.down = nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(nn.functional.gelu(self.up(self.norm(x))))


class Net(pl.LightningModule):
    """Next-token model. Matrices in blocks and beside them, and parameters on the LightningModule itself.

    ``optimizers`` makes what ``configure_optimizers`` returns, so that one class serves both sides of a comparison.
    """

    def __init__(self, optimizers: Any = None, seed: int = 0) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.build()
        self._make_optimizers = optimizers
        self.losses: list[float] = []

    def build(self) -> None:
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.mix = nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(3))
        self.head = nn.Linear(WIDTH, VOCABULARY)
        self.scale = nn.Parameter(torch.ones(WIDTH))
        self.turn = nn.Parameter(torch.eye(WIDTH) + 0.1 * torch.randn(WIDTH, WIDTH))

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.mix(self.embed(tokens))
        for block in self.blocks:
            x = block(x)
        return self.head(x @ self.turn * self.scale)

    def loss_of(self, batch: Any) -> Tensor:
        tokens, targets = batch
        return nn.functional.cross_entropy(self(tokens).flatten(0, 1).float(), targets.flatten())

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = self.loss_of(batch)
        self.losses.append(loss.item())
        self.log("train_loss", loss)
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val_loss", self.loss_of(batch), sync_dist=True)

    def test_step(self, batch: Any, batch_idx: int) -> None:
        self.log("test_loss", self.loss_of(batch), sync_dist=True)

    def predict_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self(batch[0])

    def configure_optimizers(self) -> Any:
        return self._make_optimizers(self)


class SubmodulesNet(Net):
    """A training_step that never calls the module itself, takes no batch index, and uses direct parameters twice."""

    def training_step(self, batch: Any) -> Tensor:  # type: ignore[override]
        tokens, targets = batch
        x = self.mix(self.embed(tokens)) * self.scale
        for block in self.blocks:
            x = block(x)
        logits = self.head(x @ self.turn * self.scale)
        loss = nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten())
        self.losses.append(loss.item())
        return loss


class MixedNet(Net):
    """Calls itself in training_step and goes on with a direct parameter afterwards; calls itself twice."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        tokens, targets = batch
        logits = self(tokens) + self(tokens.flip(0)).flip(0)
        loss = nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten())
        loss = loss + 0.1 * (self.scale - 2).square().mean() + 0.1 * self.turn.square().mean()
        self.losses.append(loss.item())
        return loss


class OneRankNet(Net):
    """Uses a matrix of the root on the first of two ranks only. One process plays the ranks in turn."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        whose = dist.get_rank() if dist.is_initialized() else batch_idx % 2
        self.uses_mix = whose == 0
        return super().training_step(batch, batch_idx)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens) * self.scale
        if self.uses_mix:
            x = x + x @ self.mix.weight.T  # without the bias: FSDP2 itself cannot have a gradient on some ranks only
        for block in self.blocks:
            x = block(x)
        return self.head(x @ self.turn)


class ManualNet(Net):
    """Manual optimization: clipping, a step and a scheduler in the hands of the training_step."""

    def __init__(self, optimizers: Any = None, seed: int = 0) -> None:
        super().__init__(optimizers, seed)
        self.automatic_optimization = False

    def training_step(self, batch: Any, batch_idx: int) -> None:  # type: ignore[override]
        optimizers = self.optimizers()
        optimizers = optimizers if isinstance(optimizers, list) else [optimizers]
        loss = self.loss_of(batch)
        for optimizer in optimizers:
            optimizer.zero_grad()
        self.manual_backward(loss)
        for optimizer in optimizers:
            optimizer.step()
        self.losses.append(loss.item())


class TwoStepsNet(ManualNet):
    """Two forwards, backwards and steps inside one training_step: the second must see the first one's weights."""

    def training_step(self, batch: Any, batch_idx: int) -> None:  # type: ignore[override]
        super().training_step(batch, batch_idx)
        super().training_step(batch, batch_idx)


class ToggledNet(ManualNet):
    """Two optimizers on losses of their own, each toggled, with a backward that is only accumulated before the step."""

    def training_step(self, batch: Any, batch_idx: int) -> None:  # type: ignore[override]
        for factor, optimizer in zip((1.0, 0.5), self.optimizers(), strict=True):  # type: ignore[arg-type]
            optimizer.zero_grad()
            for is_last in (False, True):
                with optimizer.toggle_model(sync_grad=is_last):
                    loss = factor * self.loss_of(batch)
                    self.manual_backward(loss)
            optimizer.step()
            self.losses.append(loss.item())


class LateNet(Net):
    """Builds its layers in configure_model, which the Trainer may call once per fit, validate, test."""

    def build(self) -> None:
        self.head = None

    def configure_model(self) -> None:
        if self.head is None:
            torch.manual_seed(0)
            super().build()


class FailingNet(Net):
    """A user's mistake in the third batch, as long as ``fails`` says where."""

    fails = ""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        if batch_idx != 2 or not self.fails:
            return super().training_step(batch, batch_idx)
        if self.fails == "training_step":
            super().training_step(batch, batch_idx)
            _mistake()
        in_backward = self.fails == "backward"
        hook = _fail_in_backward if in_backward else _mistake
        handle = self.blocks[1].up.register_forward_hook(hook)
        try:
            return super().training_step(batch, batch_idx)
        finally:
            handle.remove()


def _mistake(*_: Any) -> None:
    raise ValueError("a user's mistake")


def _fail_in_backward(module: nn.Module, args: Any, output: Tensor) -> None:
    output.register_hook(_mistake)


class LoadersNet(Net):
    """Validates on two loaders, with the signature that this needs."""

    def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int) -> None:  # type: ignore[override]
        self.log("val_loss", self.loss_of(batch) * (1 + dataloader_idx), sync_dist=True)


class MetaNet(Net):
    """Knows how to initialize the parameters that sit on it, so that it can be built on the meta device."""

    def build(self) -> None:
        super().build()
        self.register_buffer("offset", torch.zeros(WIDTH))

    def reset_parameters(self) -> None:
        nn.init.constant_(self.scale, 0.5)
        nn.init.normal_(self.turn, std=0.2)
        nn.init.constant_(self.offset, 0.25)

    def forward(self, tokens: Tensor) -> Tensor:
        return super().forward(tokens) + self.offset.sum()


class ShardedByUserNet(Net):
    def configure_model(self) -> None:
        for block in self.blocks:
            fully_shard(block)


class DedicatedByUserNet(Net):
    def configure_model(self) -> None:
        dedicate_params(self)


class EarlyOptimizerNet(Net):
    """Builds its optimizer where its parameters are still plain."""

    def __init__(self, optimizers: Any = None, seed: int = 0) -> None:
        super().__init__(optimizers, seed)
        self._optimizer = optimizers(self)

    def configure_optimizers(self) -> Any:
        return self._optimizer


class EarlyManualNet(EarlyOptimizerNet, ManualNet):
    """The same with manual optimization."""

    def __init__(self, optimizers: Any = None, seed: int = 0) -> None:
        ManualNet.__init__(self, None, seed)
        self._optimizer = optimizers(self)


class EarlyMetaNet(EarlyOptimizerNet, MetaNet):
    """The same on the meta device."""


def dataset(rows: int = ROWS) -> TensorDataset:
    generator = torch.Generator().manual_seed(5)
    tokens = torch.randint(0, VOCABULARY, (rows, 6), generator=generator)
    return TensorDataset(tokens, (3 * tokens + 1) % VOCABULARY)


def loader(rows: int = ROWS, hands: int = 1) -> DataLoader[Any]:
    """Batches of ``BATCH`` rows over all ranks, in order. A Trainer's own sampler would shuffle for more than one.

    One process with ``hands`` > 1 gets, in turn, the rows that each of so many ranks would get.
    """
    data = dataset(rows)
    if dist.is_initialized():
        sampler: Any = DistributedSampler(data, shuffle=False)
        return DataLoader(data, batch_size=BATCH // dist.get_world_size(), sampler=sampler)
    order = [start + i for start in range(0, rows, BATCH) for hand in range(hands) for i in range(hand, BATCH, hands)]
    return DataLoader(Subset(data, order), batch_size=BATCH // hands, shuffle=False)


class FixedOrder(pl.LightningDataModule):
    """The same loaders for a script, in which there are no ranks yet when it builds its data."""

    def train_dataloader(self) -> DataLoader[Any]:
        return loader()

    def val_dataloader(self) -> DataLoader[Any]:
        return loader()
