"""DMuonFabricStrategy: ``Fabric(strategy=DMuonFabricStrategy())`` for loops that the user writes."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import torch
import torch.nn as nn
from lightning_utilities.core.rank_zero import rank_zero_info
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.optim import Optimizer
from typing_extensions import override

from dmuon_core import clip_grad_norm_, no_sync
from dmuon_lightning._lightning import (
    BackwardSyncControl,
    FabricModelParallelStrategy,
    FabricRegistry,
    default_pg_timeout,
    materialize,
    where_to_import,
)
from dmuon_lightning.optimizers import rebind, warn_of_unheld
from dmuon_lightning.precision import check_precision
from dmuon_lightning.settings import ModulePolicy, Settings, Splits, Targets, checkpoint_activations
from dmuon_lightning.sharding import shard_module
from dmuon_lightning.strategy import register_strategies
from dmuon_lightning.summary import describe

if TYPE_CHECKING:
    _Base = FabricModelParallelStrategy
else:
    _Base = object


class FabricStrategy(_Base):
    """All of :class:`DMuonFabricStrategy`; comes before the ModelParallelStrategy of either distribution."""

    backward_sync_control_class: type

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
            parallelize_fn=_never_called,
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
        self._backward_sync_control = self.backward_sync_control_class()
        self._modules: list[nn.Module] = []

    def __repr__(self) -> str:
        return where_to_import(self)

    @override
    def setup_environment(self) -> None:
        # The base class builds a (data, tensor) mesh that is tensor parallel on one node.
        assert self.accelerator is not None
        self.accelerator.setup_device(self.root_device)
        self._setup_distributed()
        self._device_mesh = self._settings.make_mesh(self.root_device, self.world_size)

    @property
    @override
    def precision(self) -> Any:
        return super().precision

    @precision.setter
    @override
    def precision(self, plugin: Any) -> None:
        if plugin is not None:
            check_precision(plugin)
        self._precision = plugin

    @override
    def setup_module(self, module: nn.Module) -> nn.Module:
        """Dedicate and shard ``module``, in place, and materialize what is on the meta device. Collective."""
        if self._settings.activation_checkpointing_policy is not None:
            checkpoint_activations(module, self._settings.activation_checkpointing_policy)
        dedicated = shard_module(module, self.device_mesh, self._settings)
        materialize(module, self.root_device)
        module.to(self.root_device)
        rank_zero_info(describe(dedicated))
        self._modules.append(module)
        return module

    @override
    def setup_module_and_optimizers(self, module: nn.Module, optimizers: list[Optimizer], scheduler: Any = None) -> Any:
        """Set up ``module`` and let ``optimizers``, built over its plain parameters, hold those of now. Collective."""
        module = self.setup_module(module)
        rebind(optimizers, module)
        warn_of_unheld(optimizers, module)
        return module, optimizers, scheduler

    @override
    def setup_optimizer(self, optimizer: Optimizer) -> Optimizer:
        """Take an optimizer by itself, built before or after its module was set up."""
        for module in self._modules:
            rebind([optimizer], module)
        return optimizer

    @override
    def clip_gradients_norm(
        self,
        module: nn.Module,
        optimizer: Optimizer,
        max_norm: float,
        norm_type: float = 2.0,
        error_if_nonfinite: bool = True,
    ) -> torch.Tensor:
        """Clip by the global norm, which is returned. Collective: one all-reduce."""
        self.precision.unscale_gradients(optimizer)
        parameters = self.precision.main_params(optimizer)
        return clip_grad_norm_(parameters, max_norm, norm_type, error_if_nonfinite=error_if_nonfinite)


def no_backward_sync(control: Any, module: nn.Module, enabled: bool) -> AbstractContextManager:
    """Backwards inside accumulate without communication if ``enabled``; afterwards all is as before."""
    return no_sync(module) if enabled else nullcontext()


class _NoBackwardSync(BackwardSyncControl):
    no_backward_sync = override(no_backward_sync)


class DMuonFabricStrategy(FabricStrategy, FabricModelParallelStrategy):
    """The strategy for Fabric: one owner rank per Muon-target matrix, and FSDP2 for everything else.

    ``fabric.setup(model, optimizer)`` accepts an optimizer that was built over the plain model, or set up the model
    first and then build ``dmuon_core.Muon(model, lr=...)``. ``fabric.no_backward_sync``, ``clip_gradients``, ``save``,
    ``load`` and ``load_raw`` work as with any strategy.

    The arguments, and what is raised, are those of :class:`dmuon_lightning.DMuonStrategy`.
    """

    backward_sync_control_class = _NoBackwardSync


register_strategies(FabricRegistry, DMuonFabricStrategy)


def _never_called(module: nn.Module, mesh: Any) -> nn.Module:
    raise AssertionError("setup_module does its work")
