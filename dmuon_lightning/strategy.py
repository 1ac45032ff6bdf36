"""DMuonStrategy: ``Trainer(strategy=DMuonStrategy())`` trains an unchanged LightningModule with owned matrices."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.nn as nn
from lightning_utilities.core.rank_zero import rank_zero_info
from torch.distributed.fsdp import MixedPrecisionPolicy
from typing_extensions import override

from dmuon_core import DedicatedModel, no_sync
from dmuon_core.fsdp2 import before_fully_shard
from dmuon_core.registry import find_dedicated
from dmuon_lightning._lightning import (
    LightningModule,
    MisconfigurationException,
    ModelParallelStrategy,
    StrategyRegistry,
    Trainer,
    default_pg_timeout,
    is_sharded_checkpoint,
    materialize,
    optimizers_to_device,
    where_to_import,
)
from dmuon_lightning.checkpoint import load_one_file, save_aside, write_one_file
from dmuon_lightning.checkpoint_folder import load_folder
from dmuon_lightning.optimizers import rebind, warn_of_unheld
from dmuon_lightning.precision import check_precision, clip_by_global_norm
from dmuon_lightning.settings import ModulePolicy, Settings, Splits, Targets, checkpoint_activations
from dmuon_lightning.sharding import dedicate_module, is_prepared, shard_module
from dmuon_lightning.summary import describe

if TYPE_CHECKING:
    _Base = ModelParallelStrategy
else:
    _Base = object

_STEP_METHODS = ("training_step", "validation_step", "test_step", "predict_step")
_REFUSED_CALLBACKS = {
    "StochasticWeightAveraging": "it copies the whole model: average with dmuon_lightning.DMuonWeightAveraging",
    "WeightAveraging": "it copies the whole model: average with dmuon_lightning.DMuonWeightAveraging",
}


class TrainerStrategy(_Base):
    """All of :class:`DMuonStrategy`; comes before the ModelParallelStrategy of either distribution of Lightning."""

    lightning_module_class: type

    def __init__(
        self,
        predicate: Targets | None = None,
        hook_boundary_predicate: Callable[[nn.Module], bool] | None = None,
        reshard_after_forward: bool = True,
        replicate_size: int = 1,
        replicate_async: bool = True,
        mp_policy: MixedPrecisionPolicy | None = None,
        master_dtype: torch.dtype | None = torch.float32,
        save_distributed_checkpoint: bool = False,
        process_group_backend: str | None = None,
        timeout: timedelta | None = default_pg_timeout,
        auto_wrap_policy: ModulePolicy | None = None,
        activation_checkpointing_policy: ModulePolicy | None = None,
        split: Splits | None = None,
        max_owned_bytes: int | None = None,
        flops: Callable[[tuple[int, int]], int] | None = None,
    ) -> None:
        super().__init__(
            save_distributed_checkpoint=save_distributed_checkpoint,
            process_group_backend=process_group_backend,
            timeout=timeout,
        )
        self._settings = Settings(
            predicate=predicate,
            hook_boundary_predicate=hook_boundary_predicate,
            auto_wrap_policy=auto_wrap_policy,
            activation_checkpointing_policy=activation_checkpointing_policy,
            reshard_after_forward=reshard_after_forward,
            replicate_size=replicate_size,
            replicate_async=replicate_async,
            mp_policy=mp_policy,
            master_dtype=master_dtype,
            split=split,
            max_owned_bytes=max_owned_bytes,
            flops=flops,
        )

    def __repr__(self) -> str:
        return where_to_import(self)

    @override
    def setup_environment(self) -> None:
        # The base class builds a (data, tensor) mesh that is tensor parallel on one node.
        assert self.lightning_module is not None
        _check_callbacks(self.lightning_module.trainer)
        self._setup_distributed()
        self._device_mesh = self._settings.make_mesh(self.root_device, self.world_size)
        self.lightning_module._device_mesh = self._device_mesh

    @property
    @override
    def precision_plugin(self) -> Any:
        return super().precision_plugin

    @precision_plugin.setter
    @override
    def precision_plugin(self, plugin: Any) -> None:
        if plugin is not None:
            check_precision(plugin)
            clip_by_global_norm(plugin)
        self._precision_plugin = plugin

    @contextmanager
    @override
    def model_sharded_context(self) -> Iterator[None]:
        """Around ``configure_model``: matrices get their owners before the first ``fully_shard`` in it."""
        with before_fully_shard(self._dedicate), super().model_sharded_context():
            yield

    def _dedicate(self) -> None:
        assert self.model is not None
        if not is_prepared(self.model):
            self._convert_plain_module()
            dedicate_module(self.model, self.device_mesh, self._settings)

    def _convert_plain_module(self) -> None:
        """What may swap layers or convert parameters, and would round the masters if it came later."""
        assert self.model is not None
        self.model = self.precision_plugin.convert_module(self.model)
        if self._layer_sync is not None:
            self.model = self._layer_sync.apply(self.model)
            _check_sync_batchnorm(self.model, self.root_device)
        if self._settings.activation_checkpointing_policy is not None:
            checkpoint_activations(self.model, self._settings.activation_checkpointing_policy)

    @override
    def setup(self, trainer: Trainer) -> None:
        assert self.model is not None
        assert self.accelerator is not None
        self.accelerator.setup(trainer)
        self._disable_inference_mode(trainer)
        if find_dedicated(self.model) is None:
            self._convert_plain_module()
        self.setup_module(self.model)
        self.model_to_device()
        self.barrier()
        fitting = trainer.state.fn == "fit"
        if fitting:
            self.setup_optimizers(trainer)
        self.setup_precision_plugin()
        if fitting:
            optimizers_to_device(self.optimizers, self.root_device)

    def setup_module(self, module: nn.Module) -> DedicatedModel:
        """Dedicate and shard ``module`` and materialize what is still on the meta device. Collective."""
        is_new = not is_prepared(module)
        dedicated = shard_module(
            module, self.device_mesh, self._settings, forward_methods=filter(self._is_overridden, _STEP_METHODS)
        )
        materialize(module, self.root_device)
        if is_new:
            rank_zero_info(describe(dedicated))
        return dedicated

    def _is_overridden(self, name: str) -> bool:
        return getattr(type(self.lightning_module), name) is not getattr(self.lightning_module_class, name)

    @override
    def setup_optimizers(self, trainer: Trainer) -> None:
        super().setup_optimizers(trainer)
        assert self.model is not None
        rebind(self.optimizers, self.model)
        warn_of_unheld(self.optimizers, self.model)

    @staticmethod
    def _disable_inference_mode(trainer: Trainer) -> None:
        # FSDP2 creates tensors at its first forward; made under inference mode they break a later fit.
        for loop in (
            trainer.fit_loop.epoch_loop.val_loop,
            trainer.validate_loop,
            trainer.test_loop,
            trainer.predict_loop,
        ):
            loop.inference_mode = False

    @contextmanager
    @override
    def block_backward_sync(self) -> Generator[None, None, None]:
        """Accumulate gradients without communication; the Trainer enters it for all but the last batch of a window."""
        assert self.model is not None
        with no_sync(self.model):
            yield

    @override
    def optimizer_state(self, optimizer: Any) -> dict[str, Any]:
        optimizer = getattr(optimizer, "_optimizer", optimizer)
        is_new = not optimizer.state
        saved = super().optimizer_state(optimizer)
        if is_new:  # torch has filled the state by a step without gradients, which must not count
            for state in [*optimizer.state.values(), *saved.get("state", {}).values()]:
                if "step" in state:
                    state["step"] = torch.zeros_like(torch.as_tensor(state["step"]))
        return saved

    @override
    def save_checkpoint(self, checkpoint: dict[str, Any], filepath: Any, storage_options: Any | None = None) -> None:
        stock_io = type(self.checkpoint_io).__name__ == "TorchCheckpointIO"  # of either distribution
        if not stock_io and not self._save_distributed_checkpoint:
            return super().save_checkpoint(checkpoint, filepath, storage_options)  # how to write is the plugin's matter
        path = Path(self.broadcast(filepath))
        if storage_options is not None:
            raise TypeError("DMuonStrategy writes to a file system that all processes see: leave storage_options out")
        if path.is_dir() and not is_sharded_checkpoint(path):
            raise IsADirectoryError(f"The checkpoint path exists and is a directory: {path}")
        if self._save_distributed_checkpoint:
            save_aside(path, lambda aside: super(TrainerStrategy, self).save_checkpoint(checkpoint, aside))
        else:
            save_aside(path, lambda aside: write_one_file(checkpoint, aside))

    @override
    def load_checkpoint(self, checkpoint_path: Any, weights_only: bool | None = None) -> dict[str, Any]:
        path = Path(self.broadcast(checkpoint_path))
        assert self.model is not None
        assert self.lightning_module is not None
        strict = self.lightning_module.strict_loading
        load = load_folder if path.is_dir() else load_one_file
        return load(path, self.model, self.optimizers, strict=strict, weights_only=weights_only)


class DMuonStrategy(TrainerStrategy, ModelParallelStrategy):
    """Trains with one owner rank per Muon-target matrix and FSDP2 for everything else.

    The LightningModule needs no ``configure_model`` and no change, except that ``configure_optimizers`` returns
    ``dmuon_core.Muon(self, lr=...)``; the strategy calls it after sharding. An optimizer that was built earlier is made
    to hold the new parameters. All processes are data parallel: each sees its own part of the data, and gradients are
    averaged.

    Args:
        predicate: chooses the Muon targets: ``(fqn, parameter) -> bool``, or patterns such as ``"blocks.*.weight"`` of
            the names of matrices; None for the matrices of hidden layers.
        hook_boundary_predicate: ``(module) -> bool`` chooses the modules that are unsharded as a unit; None for the
            repeated blocks.
        reshard_after_forward: True frees weights between forward and backward (Z3), False keeps them (Z2).
        replicate_size: number R of replicas of the model's shards (HSDP). Of N processes, each N / R consecutive ones
            share one replica; they should sit on one node. 1 shards over all processes.
        replicate_async: whether new weights reach the replicas behind the next forward; False waits in the step.
        mp_policy: FSDP2's dtype policy, for owned and sharded parameters. ``Trainer(precision=...)`` works without.
        master_dtype: least precise dtype of owned weights, gradients and momentum at rest; None keeps theirs.
        save_distributed_checkpoint: False writes one ordinary checkpoint file, gathered on rank 0; True a folder
            with one file per rank.
        process_group_backend: None for the device's default, ``gloo`` or ``nccl``.
        timeout: of every collective.
        auto_wrap_policy: as in FSDPStrategy, a set of module classes or a policy: another way to choose the modules
            that are unsharded as a unit. Targets outside of them keep the default.
        activation_checkpointing_policy: a set of module classes or a policy: those recompute their activations.
        split: which matrices a parameter stands for, such as ``{"*.qkv.weight": 3}``, as in :class:`dmuon_core.Muon`.
        max_owned_bytes: bound on the bytes of the matrices that one rank owns.
        flops: FLOPs of the update of a matrix, by which owners are balanced, such as ``NewtonSchulzFlops(...)`` of
            :mod:`dmuon_core` with the options of your Muon.

    Raises:
        MisconfigurationException: before training, for what cannot work.
        ValueError: the arguments contradict one another. Also, in ``setup`` on every rank, see
            :func:`dmuon_core.dedicate_params`.
    """

    lightning_module_class = LightningModule


def register_strategies(registry: Any, strategy: type) -> None:
    """Make ``strategy`` known by name: ``dmuon``, and ``dmuon_z2``, which keeps weights until backward."""
    registry.register("dmuon", strategy, description="one owner rank per Muon-target matrix (Z3)")
    registry.register(
        "dmuon_z2", strategy, description="the same, weights kept from forward to backward", reshard_after_forward=False
    )


register_strategies(StrategyRegistry, DMuonStrategy)


def _check_callbacks(trainer: Any) -> None:
    for callback in trainer.callbacks:
        for cls in type(callback).__mro__:
            if getattr(cls, "works_with_dmuon", False):
                break
            if cls.__name__ in _REFUSED_CALLBACKS:
                name, reason = type(callback).__name__, _REFUSED_CALLBACKS[cls.__name__]
                raise MisconfigurationException(f"DMuonStrategy cannot be used with {name}, because {reason}")


def _check_sync_batchnorm(module: nn.Module, device: torch.device) -> None:
    if device.type == "cpu" and any(isinstance(m, nn.SyncBatchNorm) for m in module.modules()):
        raise MisconfigurationException(
            "Trainer(sync_batchnorm=True): torch has no synchronized batch norm on CPUs. Leave it out, or use GPUs"
        )
