"""The classes for ``pytorch_lightning`` and ``lightning_fabric``, where ``lightning`` is installed as well.

Importing this module also makes the strategies known there by name.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import lightning_fabric.strategies
import pytorch_lightning
import pytorch_lightning.callbacks
import pytorch_lightning.strategies
from lightning_fabric.strategies.strategy import _BackwardSyncControl
from lightning_utilities.core.imports import module_available

import dmuon_lightning
from dmuon_lightning.averaging import ShardedAverage
from dmuon_lightning.fabric import FabricStrategy, no_backward_sync
from dmuon_lightning.strategy import TrainerStrategy, register_strategies

__all__ = ["DMuonFabricStrategy", "DMuonStrategy", "DMuonWeightAveraging"]

if TYPE_CHECKING or module_available("lightning"):

    class DMuonStrategy(TrainerStrategy, pytorch_lightning.strategies.ModelParallelStrategy):
        """:class:`dmuon_lightning.DMuonStrategy` for ``pytorch_lightning.Trainer``."""

        lightning_module_class = pytorch_lightning.LightningModule

    class _NoBackwardSync(_BackwardSyncControl):
        no_backward_sync = no_backward_sync

    class DMuonFabricStrategy(FabricStrategy, lightning_fabric.strategies.ModelParallelStrategy):
        """:class:`dmuon_lightning.DMuonFabricStrategy` for ``lightning_fabric.Fabric``."""

        backward_sync_control_class = _NoBackwardSync

    class DMuonWeightAveraging(ShardedAverage, pytorch_lightning.callbacks.WeightAveraging):
        """:class:`dmuon_lightning.DMuonWeightAveraging` for ``pytorch_lightning.Trainer``."""

    register_strategies(pytorch_lightning.strategies.StrategyRegistry, DMuonStrategy)
    register_strategies(lightning_fabric.strategies.STRATEGY_REGISTRY, DMuonFabricStrategy)
else:
    DMuonStrategy = dmuon_lightning.DMuonStrategy
    DMuonFabricStrategy = dmuon_lightning.DMuonFabricStrategy
    DMuonWeightAveraging = dmuon_lightning.DMuonWeightAveraging
