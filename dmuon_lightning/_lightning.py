"""What this package uses of Lightning, from the distribution that is installed.

``lightning`` holds both the Trainer and Fabric. ``pytorch_lightning`` with ``lightning_fabric`` is the same code as a
second tree of classes, which the first knows nothing of; it is used here only where it is installed alone. Where both
are, :mod:`dmuon_lightning.pytorch_lightning` has the classes for the second.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from lightning_utilities.core.imports import module_available

if TYPE_CHECKING or module_available("lightning"):
    from lightning.fabric.plugins.collectives.torch_collective import default_pg_timeout
    from lightning.fabric.strategies import STRATEGY_REGISTRY as FabricRegistry
    from lightning.fabric.strategies import ModelParallelStrategy as FabricModelParallelStrategy
    from lightning.fabric.strategies.fsdp import _METADATA_FILENAME as METADATA_FILENAME
    from lightning.fabric.strategies.fsdp import _is_sharded_checkpoint as is_sharded_checkpoint
    from lightning.fabric.strategies.strategy import _BackwardSyncControl as BackwardSyncControl
    from lightning.fabric.utilities.exceptions import MisconfigurationException
    from lightning.fabric.utilities.init import _materialize_distributed_module as materialize
    from lightning.fabric.utilities.optimizer import _optimizers_to_device as optimizers_to_device
    from lightning.pytorch import LightningModule, Trainer
    from lightning.pytorch.callbacks import WeightAveraging
    from lightning.pytorch.strategies import ModelParallelStrategy, StrategyRegistry
else:
    from lightning_fabric.plugins.collectives.torch_collective import default_pg_timeout
    from lightning_fabric.strategies import STRATEGY_REGISTRY as FabricRegistry
    from lightning_fabric.strategies import ModelParallelStrategy as FabricModelParallelStrategy
    from lightning_fabric.strategies.fsdp import _METADATA_FILENAME as METADATA_FILENAME
    from lightning_fabric.strategies.fsdp import _is_sharded_checkpoint as is_sharded_checkpoint
    from lightning_fabric.strategies.strategy import _BackwardSyncControl as BackwardSyncControl
    from lightning_fabric.utilities.exceptions import MisconfigurationException
    from lightning_fabric.utilities.init import _materialize_distributed_module as materialize
    from lightning_fabric.utilities.optimizer import _optimizers_to_device as optimizers_to_device
    from pytorch_lightning import LightningModule, Trainer
    from pytorch_lightning.callbacks import WeightAveraging
    from pytorch_lightning.strategies import ModelParallelStrategy, StrategyRegistry

__all__ = [
    "METADATA_FILENAME",
    "BackwardSyncControl",
    "FabricModelParallelStrategy",
    "FabricRegistry",
    "LightningModule",
    "MisconfigurationException",
    "ModelParallelStrategy",
    "StrategyRegistry",
    "Trainer",
    "WeightAveraging",
    "default_pg_timeout",
    "is_sharded_checkpoint",
    "materialize",
    "optimizers_to_device",
    "where_to_import",
]


def where_to_import(strategy: object) -> str:
    """The ``repr`` of a strategy, which a Trainer or Fabric of the other distribution prints when it refuses it."""
    modules = [cls.__module__.partition(".")[0] for cls in type(strategy).__mro__]
    if "lightning" in modules:
        ours, other, where = "lightning", "pytorch_lightning and lightning_fabric", "dmuon_lightning.pytorch_lightning"
    else:
        ours, other, where = "pytorch_lightning and lightning_fabric", "lightning", "dmuon_lightning"
    return f"<{type(strategy).__name__} for {ours}; for {other} import it from {where}>"
