"""DMuonPlugin: ``Accelerator(fsdp_plugin=DMuonPlugin())`` prepares a model with owned matrices.

Accelerate prepares a model for FSDP2 in this order, and asks the plugin twice for its wrapping policy::

    set_auto_wrap_policy(model)            the model is plain: checks, and what FSDP2 is to shard one by one
    activation checkpointing, compile
    the optimizer's parameters are noted by their address
    set_auto_wrap_policy(model)            the matrices get their owners: only now: what a rank does not own has none
    fully_shard, module by module          leaves owned parameters alone
    the optimizer gets the new parameters  by name
"""

from __future__ import annotations

import os
import weakref
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from enum import Enum
from typing import TYPE_CHECKING, Any, ClassVar

import torch
import torch.nn as nn
from accelerate.state import AcceleratorState
from accelerate.utils import FullyShardedDataParallelPlugin
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule
from torch.distributed.fsdp.wrap import transformer_auto_wrap_policy
from torch.distributed.tensor import DTensor

from dmuon_core import OwnedTensor, default_boundaries
from dmuon_core.optim.cost import flops_of
from dmuon_core.plan import Plan, make_plan
from dmuon_core.registry import find_dedicated
from dmuon_core.targets import muon_targets
from dmuon_lightning.accelerate import guard
from dmuon_lightning.accelerate.config import read_config
from dmuon_lightning.accelerate.conversion import convert, ignored_parameters, make_mesh
from dmuon_lightning.accelerate.options import DEFAULTS, check_muon_options, checked_options, differing, flat
from dmuon_lightning.accelerate.selection import boundary_predicate, target_predicate


class Unset(Enum):
    """For an argument that was not passed; the configuration decides, then the default."""

    UNSET = "unset"


UNSET: Any = Unset.UNSET


@dataclass
class DMuonPlugin(FullyShardedDataParallelPlugin):
    """Accelerate's plugin for FSDP2, which also gives every hidden matrix an owner.

    Takes all arguments of ``FullyShardedDataParallelPlugin`` besides its own; ``fsdp_version`` is 2. What is not passed
    comes from ``DMUON_*`` variables, then from the file of ``accelerate launch`` (see :mod:`.config`), then from the
    defaults of ``dedicate_params``. Its ``reshard_after_forward``, mixed precision and ``parallelism_config`` hold for
    owned matrices too: the mesh is ("dp_shard_cp"), or ("dp_replicate", "dp_shard_cp") for HSDP. Without an
    ``auto_wrap_policy`` FSDP2 shards the modules that carry the hooks of owned matrices, and the model.

    Args:
        predicate: which parameters are Muon targets: ``(fqn, parameter) -> bool``, or patterns of names such as
            ``"*.mlp.*"``; by default the matrices of hidden layers.
        hook_boundary_predicate: which modules unshard their targets: ``(module) -> bool``, or names of classes.
        hook_boundary_strict: whether a target outside of such modules is an error.
        replicate_async: whether new weights reach their replicas behind the next forward (HSDP).
        master_dtype: least precise dtype of owned weights at rest; None keeps the parameter's.
        max_owned_bytes: bound on the bytes of the matrices that one rank owns.
        sync_module_states: whether all ranks start with the weights of the first one.
        muon: options of :class:`dmuon_lightning.accelerate.Muon` and ``DMuonTrainerOptimizer``, if they are built
            without them.

    Raises:
        ValueError: FSDP 1, CPU offload, an option that does not exist or has a value that it cannot have, or another
            one than in the process's Accelerator. When the model is prepared, on every rank: tensor or context
            parallelism, a model that is sharded already, ``ignored_modules`` with something to train, and what
            ``dedicate_params`` raises.
    """

    if TYPE_CHECKING:  # of the base class, without types there
        fsdp_version: Any
        sync_module_states: Any
        auto_wrap_policy: Any

    predicate: Callable[[str, nn.Parameter], bool] | Iterable[str] | None = UNSET
    hook_boundary_predicate: Callable[[nn.Module], bool] | Iterable[str] | None = UNSET
    hook_boundary_strict: bool = UNSET
    replicate_async: bool = UNSET
    master_dtype: torch.dtype | None = UNSET
    max_owned_bytes: int | None = UNSET
    muon: dict[str, Any] = field(default_factory=dict)

    defaults: ClassVar[dict[str, Any]] = {}
    """What :func:`dmuon_lightning.accelerate.enable` was called with."""
    was_enabled: ClassVar[bool] = False
    """Whether it stands in for a ``FullyShardedDataParallelPlugin``, because of ``enable``."""

    def __post_init__(self) -> None:
        config = read_config()
        if self.fsdp_version is None:
            self.fsdp_version = int(os.environ.get("FSDP_VERSION", "2"))
        if self.fsdp_version != 2:
            raise ValueError(f"DMuonPlugin needs FSDP2, not fsdp_version={self.fsdp_version}: set fsdp_version: 2")
        # FSDP2 has no such option; ours goes by the same name.
        sync, self.sync_module_states = self.sync_module_states, None
        super().__post_init__()
        if isinstance(self.cpu_offload, CPUOffloadPolicy):
            raise ValueError(
                "DMuonPlugin cannot offload parameters to the CPU: set fsdp_offload_params: false (cpu_offload=False)"
            )
        self.sync_module_states = UNSET if sync is None else sync
        passed = {name: getattr(self, name) for name in DEFAULTS if getattr(self, name) is not UNSET}
        passed = checked_options({**passed, "muon": self.muon}, "DMuonPlugin")
        outside = {**config.dedicate, **self.defaults, "muon": {**config.muon, **self.defaults.get("muon", {})}}
        self._outside = flat(outside)
        for name, value in {**DEFAULTS, **outside, **passed}.items():
            setattr(self, name, value)
        self.muon = {**outside["muon"], **passed["muon"]}
        check_muon_options(self.muon)
        self._check_not_late()
        self._wraps_hooked_modules = self.auto_wrap_policy is None
        self._announced: weakref.ref[nn.Module] | None = None
        self.has_converted = False
        guard.watch(config)

    @property
    def options(self) -> dict[str, Any]:
        """What holds, by option; those of the optimizer as ``muon.lr``."""
        return flat({name: getattr(self, name) for name in (*DEFAULTS, "muon")})

    def _check_not_late(self) -> None:
        """Refuse other options than those of the process's Accelerator: Accelerate keeps its first plugin for good."""
        active = guard.active_plugin()
        if active is None:
            return
        wanted, current = self.options, active.options
        if self.was_enabled:  # only what enable() and the configuration say was asked of it
            if not differing(self._outside, active._outside):
                return
            wanted = self._outside
            current = {name: current[name] for name in current if name in {*wanted, *active._outside}}
        if names := differing(wanted, current):
            raise ValueError(
                f"DMuonPlugin: {', '.join(names)} would have no effect: this process's Accelerator has a DMuonPlugin "
                "with other options, and Accelerate keeps the first plugin for all later ones. Give it these options"
            )

    def set_auto_wrap_policy(self, model: nn.Module) -> None:
        """Called twice by ``Accelerator.prepare``, see above. The second call is collective over the mesh.

        A model without anything to train, or that comes only once, is left to FSDP2: it is there for evaluation alone.
        """
        plain = getattr(model, "_orig_mod", model)
        if isinstance(model, FSDPModule) or isinstance(plain, FSDPModule):  # prepared again, as by a second train()
            guard.show_addresses(model)
            return
        if not any(param.requires_grad for param in model.parameters()):
            self._wrap({type(block) for block in default_boundaries(plain, dict(plain.named_parameters()))})
            super().set_auto_wrap_policy(plain)
            return
        if self._announced is not None and self._announced() is plain:
            self._announced = None
            guard.note_conversion(convert(self, model), self.muon)
            self.has_converted = True
            return
        self._check(plain)
        plan = self._plan(plain)
        if self.cpu_ram_efficient_loading:
            self._check_loading(plain, plan.targets)
        self._wrap({type(module) for _, module, _ in plan.boundaries if module is not plain})
        super().set_auto_wrap_policy(plain)
        self._announced = weakref.ref(plain)

    def targets_in(self, model: nn.Module) -> Callable[[str, nn.Parameter], bool] | None:
        """The predicate for ``model``; None for the default. Local."""
        chosen = target_predicate(self.predicate, model)
        ignored = {id(param) for param in ignored_parameters(self, model)}
        if not ignored:
            return chosen
        if chosen is None:
            default = {id(param) for param in muon_targets(model).values()}
            return lambda name, param: id(param) in default and id(param) not in ignored
        return lambda name, param: id(param) not in ignored and chosen(name, param)

    def _check(self, model: nn.Module) -> None:
        make_mesh()
        ignored = {id(param) for param in ignored_parameters(self, model)}
        for name, param in model.named_parameters():
            if id(param) in ignored and param.requires_grad and AcceleratorState().num_processes > 1:
                raise ValueError(
                    f"'{name}' is in ignored_modules and requires a gradient, which FSDP2 then does not average, so "
                    "that every process would train another one: freeze it (requires_grad_(False)), or take it out of "
                    "ignored_modules"
                )
        if find_dedicated(model) is not None or any(isinstance(p, OwnedTensor) for p in model.parameters()):
            raise ValueError(
                f"{type(model).__name__} has owned matrices before Accelerator.prepare: leave dedicate_params to "
                "DMuonPlugin. If an earlier prepare has failed, build the model anew"
            )
        for name, param in model.named_parameters():
            if isinstance(param, DTensor):
                raise ValueError(
                    f"'{name}' is sharded before Accelerator.prepare: DMuonPlugin needs a plain model, without "
                    "fully_shard and tensor parallelism"
                )

    def _wrap(self, classes: set[type[nn.Module]]) -> None:
        """Let FSDP2 shard modules of these classes one by one, if the user has not said which."""
        if self._wraps_hooked_modules:
            self.auto_wrap_policy = transformer_auto_wrap_policy
            self.transformer_cls_names_to_wrap = sorted(cls.__name__ for cls in classes)

    def _check_loading(self, model: nn.Module, targets: dict[str, nn.Parameter]) -> None:
        """Refuse what Accelerate's loader cannot load, or would load wrongly without a word."""
        remedy = "set fsdp_cpu_ram_efficient_loading: false"
        named = list(model.named_parameters(remove_duplicate=False))
        buffers = set(model.state_dict()) - {name for name, _ in named}
        if buffers:
            raise ValueError(
                f"Accelerate's cpu_ram_efficient_loading cannot load buffers such as '{min(buffers)}': {remedy}, or "
                "register them with persistent=False"
            )
        owned = {id(param) for param in targets.values()}  # tied again when they get their owners
        seen: set[int] = set()
        for name, param in named if not hasattr(model, "tie_weights") else []:
            if id(param) in seen and id(param) not in owned:
                raise ValueError(
                    f"Accelerate's cpu_ram_efficient_loading would untie '{name}': {remedy}, or give the model a "
                    "method tie_weights() that ties it again"
                )
            seen.add(id(param))

    def _plan(self, model: nn.Module) -> Plan:
        return make_plan(
            model, self.targets_in(model), boundary_predicate(self.hook_boundary_predicate, model),
            self.hook_boundary_strict, shard_size=1, replicate_size=1, device=None, master_dtype=self.master_dtype,
            split=self.muon.get("split"), max_owned_bytes=None, flops=flops_of(self.muon),
        )  # fmt: skip
