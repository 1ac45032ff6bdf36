"""DMuonStrategy: ``Trainer(strategy=DMuonStrategy())`` trains an unchanged LightningModule with owned matrices."""

from __future__ import annotations

from collections.abc import Callable, Generator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.nn as nn
from lightning.fabric.plugins.collectives.torch_collective import default_pg_timeout
from lightning.fabric.plugins.io.torch_io import TorchCheckpointIO
from lightning.fabric.strategies.fsdp import _is_sharded_checkpoint
from lightning.fabric.utilities.init import _materialize_distributed_module
from lightning.fabric.utilities.optimizer import _optimizers_to_device
from lightning.fabric.utilities.types import _PATH
from lightning.pytorch import Trainer
from lightning.pytorch.strategies import ModelParallelStrategy
from lightning.pytorch.strategies.parallel import ParallelStrategy
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from lightning.pytorch.utilities.model_helpers import is_overridden
from lightning_utilities.core.rank_zero import rank_zero_info
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy
from typing_extensions import override

from dmuon_core import DedicatedModel, no_sync
from dmuon_lightning.checkpoint import load_one_file, save_aside, write_one_file
from dmuon_lightning.checkpoint_folder import load_folder
from dmuon_lightning.sharding import is_prepared, shard_module

_STEP_METHODS = ("training_step", "validation_step", "test_step", "predict_step")


class DMuonStrategy(ModelParallelStrategy):
    """Trains with one owner rank per Muon-target matrix and FSDP2 for everything else.

    The LightningModule needs no ``configure_model`` and no change, except that ``configure_optimizers`` returns
    ``dmuon_core.Muon(self, lr=...)``; the strategy calls it after sharding. All processes are data parallel: each
    sees its own part of the data, and gradients are averaged.

    Args:
        predicate: ``(fqn, parameter) -> bool`` chooses the Muon targets; None for the matrices of hidden layers.
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

    Raises:
        MisconfigurationException: in ``setup_environment``, the number of processes is no multiple of
            ``replicate_size``.
        ValueError: ``replicate_size`` is below 1. Also, in ``setup`` on every rank, see
            :func:`dmuon_core.dedicate_params`.
    """

    def __init__(
        self,
        predicate: Callable[[str, nn.Parameter], bool] | None = None,
        hook_boundary_predicate: Callable[[nn.Module], bool] | None = None,
        reshard_after_forward: bool = True,
        replicate_size: int = 1,
        replicate_async: bool = True,
        mp_policy: MixedPrecisionPolicy | None = None,
        master_dtype: torch.dtype | None = torch.float32,
        save_distributed_checkpoint: bool = False,
        process_group_backend: str | None = None,
        timeout: timedelta | None = default_pg_timeout,
    ) -> None:
        super().__init__(
            save_distributed_checkpoint=save_distributed_checkpoint,
            process_group_backend=process_group_backend,
            timeout=timeout,
        )
        if replicate_size < 1:
            raise ValueError(f"DMuonStrategy(replicate_size={replicate_size}): pass 1 or more")
        self._predicate = predicate
        self._hook_boundary_predicate = hook_boundary_predicate
        self._reshard_after_forward = reshard_after_forward
        self._replicate_size = replicate_size
        self._replicate_async = replicate_async
        self._mp_policy = mp_policy
        self._master_dtype = master_dtype

    @override
    def setup_environment(self) -> None:
        # The base class's own setup builds a (data, tensor) mesh that is tensor parallel on one node.
        ParallelStrategy.setup_environment(self)
        self._setup_distributed()
        self._device_mesh = self._make_mesh()
        assert self.lightning_module is not None
        self.lightning_module._device_mesh = self._device_mesh

    def _make_mesh(self) -> DeviceMesh:
        """A mesh in which "data_parallel" is every process: the base class takes the sampler's arguments from it."""
        kind, size, replicas = self.root_device.type, self.world_size, self._replicate_size
        if replicas == 1:
            return init_device_mesh(kind, (size,), mesh_dim_names=("data_parallel",))
        if size % replicas:
            raise MisconfigurationException(
                f"DMuonStrategy(replicate_size={replicas}) does not divide the number of processes, {size}: choose a "
                "divisor, such as the number of nodes, or another Trainer(devices=..., num_nodes=...)"
            )
        mesh = init_device_mesh(kind, (replicas, size // replicas), mesh_dim_names=("replicate", "shard"))
        mesh._flatten("data_parallel")
        return mesh

    @override
    def setup(self, trainer: Trainer) -> None:
        assert self.model is not None
        assert self.accelerator is not None
        self.accelerator.setup(trainer)
        self._disable_inference_mode(trainer)
        if not is_prepared(self.model):
            # The precision plugin must see the plain module: it may swap layers, or convert parameters, which would
            # round the masters if it happened again.
            self.model = self.precision_plugin.convert_module(self.model)
        self.setup_module(self.model)
        self.model_to_device()
        self.barrier()
        fitting = trainer.state.fn == TrainerFn.FITTING
        if fitting:
            self.setup_optimizers(trainer)
        self.setup_precision_plugin()
        if fitting:
            _optimizers_to_device(self.optimizers, self.root_device)

    def setup_module(self, module: nn.Module) -> DedicatedModel:
        """Dedicate and shard ``module`` and materialize what is still on the meta device. Collective."""
        dedicated = shard_module(
            module,
            self.device_mesh,
            predicate=self._predicate,
            hook_boundary_predicate=self._hook_boundary_predicate,
            reshard_after_forward=self._reshard_after_forward,
            replicate_async=self._replicate_async,
            mp_policy=self._mp_policy,
            master_dtype=self._master_dtype,
            forward_methods=[name for name in _STEP_METHODS if is_overridden(name, self.lightning_module)],
        )
        _materialize_distributed_module(module, self.root_device)
        rank_zero_info(
            f"DMuon: {len(dedicated.params)} matrices owned over {self.device_mesh.size()} ranks, busiest owner at "
            f"{dedicated.assignment.ratio:.3f} of the ideal"
        )
        return dedicated

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
    def save_checkpoint(self, checkpoint: dict[str, Any], filepath: _PATH, storage_options: Any | None = None) -> None:
        if type(self.checkpoint_io) is not TorchCheckpointIO and not self._save_distributed_checkpoint:
            return super().save_checkpoint(checkpoint, filepath, storage_options)  # how to write is the plugin's matter
        path = Path(self.broadcast(filepath))
        if storage_options is not None:
            raise TypeError("DMuonStrategy writes to a file system that all processes see: leave storage_options out")
        if path.is_dir() and not _is_sharded_checkpoint(path):
            raise IsADirectoryError(f"The checkpoint path exists and is a directory: {path}")
        if self._save_distributed_checkpoint:
            save_aside(path, lambda aside: super(DMuonStrategy, self).save_checkpoint(checkpoint, aside))
        else:
            save_aside(path, lambda aside: write_one_file(checkpoint, aside))

    @override
    def load_checkpoint(self, checkpoint_path: _PATH, weights_only: bool | None = None) -> dict[str, Any]:
        path = Path(self.broadcast(checkpoint_path))
        assert self.model is not None
        assert self.lightning_module is not None
        strict = self.lightning_module.strict_loading
        load = load_folder if path.is_dir() else load_one_file
        return load(path, self.model, self.optimizers, strict=strict, weights_only=weights_only)
