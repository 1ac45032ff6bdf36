"""Weight averaging (EMA, or the mean of all steps) over owned and sharded parameters, each averaged where it lives."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
import torch.nn as nn
from lightning_utilities.core.rank_zero import rank_zero_warn
from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict
from torch.distributed.tensor import DTensor
from torch.optim.swa_utils import AveragedModel, get_ema_avg_fn
from typing_extensions import override

from dmuon_lightning._lightning import MisconfigurationException, WeightAveraging

if TYPE_CHECKING:
    _Base = WeightAveraging
else:
    _Base = object


class ShardedAverage(_Base):
    """All of :class:`DMuonWeightAveraging`; comes before the WeightAveraging of either distribution of Lightning."""

    works_with_dmuon = True

    def __init__(
        self,
        device: torch.device | str | int | None = None,
        use_buffers: bool = True,
        decay: float | None = None,
        **kwargs: Any,
    ) -> None:
        if decay is not None:
            if not 0.0 <= decay <= 1.0:
                raise ValueError(f"DMuonWeightAveraging(decay={decay}): pass a number from 0 to 1")
            kwargs["avg_fn"] = get_ema_avg_fn(decay)
        super().__init__(device=device, use_buffers=use_buffers, **kwargs)

    @override
    def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:
        """Nothing yet: the module is not sharded before ``on_fit_start``."""
        if stage == "fit" and getattr(trainer.strategy, "_save_distributed_checkpoint", False):
            raise MisconfigurationException(
                "DMuonWeightAveraging keeps its state in one-file checkpoints only: use "
                "DMuonStrategy(save_distributed_checkpoint=False)"
            )

    @override
    def on_fit_start(self, trainer: Any, pl_module: Any) -> None:
        """Start an average that is sharded and owned as the module is."""
        self._average_model = AveragedModel(
            _same_tensors(pl_module, {}),
            self._device or pl_module.device,
            use_buffers=self._use_buffers,
            **self._kwargs,
        )

    @override
    def on_save_checkpoint(self, trainer: Any, pl_module: Any, checkpoint: dict[str, Any]) -> None:
        """Put the average into the checkpoint's ``state_dict``, the weights beside it. Collective."""
        if self._average_model is None:
            super().on_save_checkpoint(trainer, pl_module, checkpoint)
            return
        average = {name: _whole(tensor) for name, tensor in self._average_model.module.state_dict().items()}
        if trainer.is_global_zero:  # as with the weights, the other ranks have gathered nothing to write
            names = {name.replace("_orig_mod.", ""): name for name in average}
            checkpoint["current_model_state"] = checkpoint["state_dict"]
            checkpoint["state_dict"] = {
                name: average[names[name]] if name in names else value
                for name, value in checkpoint["state_dict"].items()
            }
        checkpoint["averaging_state"] = {"n_averaged": self._average_model.n_averaged}

    @override
    def on_load_checkpoint(self, trainer: Any, pl_module: Any, checkpoint: dict[str, Any]) -> None:
        """Take the average from the module, into which the strategy has loaded it, and load the weights. Collective."""
        if self._average_model is None:
            super().on_load_checkpoint(trainer, pl_module, checkpoint)
            return
        with torch.no_grad():
            for average, loaded in zip(_tensors(self._average_model.module), _tensors(pl_module), strict=True):
                average.copy_(loaded.to(average.device))
        if "averaging_state" not in checkpoint:
            rank_zero_warn("the checkpoint was saved without DMuonWeightAveraging: the average starts from its weights")
            return
        self._average_model.n_averaged.copy_(checkpoint["averaging_state"]["n_averaged"])
        options = StateDictOptions(full_state_dict=True)
        set_model_state_dict(pl_module, checkpoint["current_model_state"], options=options)


class DMuonWeightAveraging(ShardedAverage, WeightAveraging):
    """Lightning's ``WeightAveraging`` for a module that DMuonStrategy has sharded.

    Every rank averages what it owns and its shards of the rest; nothing is gathered but for a checkpoint, whose
    ``state_dict`` is the average. Validation, and the end of training, use the average.

    Args:
        device: where to keep the average; None for the module's device.
        use_buffers: whether to average buffers too.
        decay: of an exponential moving average; None for what ``avg_fn`` or ``multi_avg_fn`` say, by default the mean.
        kwargs: as for ``torch.optim.swa_utils.AveragedModel``.

    Raises:
        MisconfigurationException: the strategy writes sharded checkpoints.
    """


def _same_tensors(module: nn.Module, made: dict[nn.Module, nn.Module]) -> nn.Module:
    """A module tree with the parameters and buffers of ``module`` under their names, and nothing else. Local.

    ``AveragedModel`` copies it, which an FSDP2 module does not allow.
    """
    if module not in made:
        copy = made[module] = nn.Module()
        copy._parameters = dict(module._parameters)
        copy._buffers = dict(module._buffers)
        copy._non_persistent_buffers_set = set(module._non_persistent_buffers_set)
        for name, child in module.named_children():
            copy._modules[name] = _same_tensors(child, made)
    return made[module]


def _tensors(module: nn.Module) -> list[torch.Tensor]:
    return [*module.parameters(), *module.buffers()]


def _whole(tensor: torch.Tensor) -> torch.Tensor:
    return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).detach().cpu()
