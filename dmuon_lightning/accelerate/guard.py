"""What is checked before an optimizer steps: the only thing that Accelerate does not tell a plugin about."""

from __future__ import annotations

import os
import warnings
import weakref
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
import torch.nn as nn
from accelerate.state import AcceleratorState
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook

from dmuon_core import DedicatedModel, OwnedOptimizer, OwnedTensor
from dmuon_core import Muon as CoreMuon
from dmuon_core.names import canonical_name
from dmuon_lightning.accelerate.options import same_value

if TYPE_CHECKING:
    from dmuon_lightning.accelerate.config import Config
    from dmuon_lightning.accelerate.plugin import DMuonPlugin

_enabled: str | None = None  # why every optimizer has to step with owned matrices
_pending: str | None = None  # why a model must be converted before an optimizer steps
_has_converted = False
_converted: list[weakref.ref[DedicatedModel]] = []
_muon_options: weakref.WeakKeyDictionary[DedicatedModel, dict[str, Any]] = weakref.WeakKeyDictionary()
_optimizer_of: weakref.WeakKeyDictionary[DedicatedModel, weakref.ref[Optimizer]] = weakref.WeakKeyDictionary()
_warned: weakref.WeakSet[DedicatedModel] = weakref.WeakSet()
_handle: Any = None


def watch(config: Config) -> None:
    """Note that a plugin was built, and check optimizers from now on. Local."""
    global _handle, _pending
    if config.found:
        _pending = "its configuration was read"
    elif int(os.environ.get("WORLD_SIZE", "1")) > 1:
        _pending = "this is one of several processes"
    if _handle is None:
        _handle = register_optimizer_step_pre_hook(_check)


def expect(reason: str) -> None:
    """Let a step under an Accelerator without DMuonPlugin be an error from now on. Local."""
    global _enabled, _handle
    _enabled = reason
    if _handle is None:
        _handle = register_optimizer_step_pre_hook(_check)


def note_conversion(dedicated: DedicatedModel, muon: dict[str, Any]) -> None:
    """Note a model that was converted, and the optimizer's options that the plugin holds. Local."""
    global _pending, _has_converted
    _pending, _has_converted = None, True
    _converted.append(weakref.ref(dedicated))
    _muon_options[dedicated] = muon


def active_plugin() -> DMuonPlugin | None:
    """The plugin of the process's Accelerator, if it is ours. Local."""
    plugin = AcceleratorState._shared_state.get("fsdp_plugin")
    return plugin if hasattr(plugin, "targets_in") else None


def check_converted() -> None:
    """Raise if a model should have been converted and none was. Local.

    Raises:
        RuntimeError: says why Accelerate does not use FSDP2 here.
    """
    if not _has_converted:
        _refuse(_enabled or _pending)


def _check_meant(optimizer: Optimizer, params: list[nn.Parameter]) -> None:
    """Of an optimizer that trains no owned matrix: is that meant?"""
    plugin = active_plugin()
    if plugin is not None and plugin.has_converted:
        # Beside the prepared model others may be trained, but none that is sharded.
        if any(isinstance(param, DTensor) and param.ndim > 1 for param in params):
            raise RuntimeError(
                f"{type(optimizer).__name__} trains a sharded model without owned matrices, beside the one that "
                "DMuonPlugin has prepared: pass this model and its optimizer to one Accelerator.prepare, too"
            )
    else:
        _refuse(_enabled or _pending)


def _refuse(reason: str | None) -> None:
    if reason is not None:
        raise RuntimeError(f"DMuon is on ({reason}), but no model was prepared with owned matrices: {_why_not()}")


def _why_not() -> str:
    state = AcceleratorState._shared_state
    kind = str(getattr(state.get("distributed_type"), "value", "no Accelerator"))
    if kind != "FSDP":
        return (
            f"Accelerate runs this process as {kind!r}, not as 'FSDP'. Start it with accelerate launch and a config of "
            "distributed_type: FSDP, fsdp_version: 2, on GPUs (Accelerate runs FSDP2 nowhere else)"
        )
    if active_plugin() is not None:
        return "pass model and optimizer to one Accelerator.prepare, and build no other Accelerator before"
    return (
        f"the Accelerator has a {type(state.get('fsdp_plugin')).__name__}, not a DMuonPlugin. Build it as "
        "Accelerator(fsdp_plugin=DMuonPlugin()), or call dmuon_lightning.accelerate.enable() before it, or the "
        "Trainer, is built"
    )


def show_addresses(model: nn.Module) -> None:
    """Let Accelerate, which comes next, read the address of this rank's part from owned parameters. Local.

    It would take it from DTensors alone, and asks subclasses for their own, of which they have none. For one question:
    torch tells by that what may be copied.
    """
    for param in model.parameters():
        if isinstance(param, OwnedTensor):
            param.data_ptr = partial(_address_once, param)  # type: ignore[method-assign]


def _address_once(param: OwnedTensor) -> int:
    del param.data_ptr
    return param._local_tensor.data_ptr()


def restore(optimizer: Optimizer) -> None:
    """Undo what preparing a model again does to the optimizer of its owned matrices. Local.

    Accelerate tells parameters apart by address, and what a rank does not own has none.
    """
    held = {id(param) for group in optimizer.param_groups for param in group["params"]}
    for dedicated in _living():
        params = {canonical_name(name): param for name, param in dedicated.model.named_parameters()}
        if held.isdisjoint(map(id, params.values())):
            continue
        for group in optimizer.param_groups:
            names = [canonical_name(name) for name in group.get("param_names", ["?"])]
            if all(name in params for name in names):
                group["params"] = [params[name] for name in names]


def _living() -> list[DedicatedModel]:
    _converted[:] = [reference for reference in _converted if reference() is not None]
    return [dedicated for reference in _converted if (dedicated := reference()) is not None]


def _check(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
    params = [param for group in optimizer.param_groups for param in group["params"]]
    if len({id(param) for param in params}) < len(params):
        restore(optimizer)
        params = [param for group in optimizer.param_groups for param in group["params"]]
        if len({id(param) for param in params}) < len(params):
            raise RuntimeError(
                f"{type(optimizer).__name__} has lost owned parameters, because it was prepared twice: build it from "
                "(name, parameter) pairs (model.named_parameters()), or prepare it once"
            )
    ids = {id(param) for param in params}
    trained = [d for d in _living() if not ids.isdisjoint(id(param) for param in d.model.parameters())]
    if not trained and AcceleratorState._shared_state:
        _check_meant(optimizer, params)
    for dedicated in trained:
        _warn_of_open_window(dedicated)
        known = _optimizer_of.get(dedicated)
        first = known() if known is not None else None
        if first is optimizer:
            continue
        if first is not None:
            raise RuntimeError(
                f"{type(first).__name__} and {type(optimizer).__name__} both train {type(dedicated.model).__name__}: "
                "Accelerate saves one optimizer of a model. Put all parameters in one, as Muon(model) does with AdamW "
                "for what is no matrix"
            )
        _check_whole(optimizer)
        _check_options(optimizer, _muon_options[dedicated])
        _optimizer_of[dedicated] = weakref.ref(optimizer)


def _warn_of_open_window(dedicated: DedicatedModel) -> None:
    """Say once that a step does nothing because every gradient still waits for the end of its window."""
    params = dedicated.params
    if dedicated in _warned or any(param.rest.grad is not None for param in params):
        return
    if any(param.has_local_grad for param in params):
        _warned.add(dedicated)
        warnings.warn(
            f"a step has no effect on the owned matrices of {type(dedicated.model).__name__}: their gradients are kept "
            "on each rank, because every backward pass was under no_sync. Leave no_sync for the last one before a step",
            stacklevel=4,
        )


def _check_whole(optimizer: Optimizer) -> None:
    """Newton-Schulz of a piece of a matrix is not a piece of its Newton-Schulz."""
    if not isinstance(optimizer, CoreMuon | torch.optim.Muon):
        return
    for group in optimizer.param_groups:
        if group.get("algorithm", "muon") != "muon":
            continue
        for index, param in enumerate(group["params"]):
            if isinstance(param, DTensor) and not isinstance(param, OwnedTensor):
                names = group.get("param_names")
                name = f"'{names[index]}'" if names else f"a parameter of shape {tuple(param.shape)}"
                raise RuntimeError(
                    f"{type(optimizer).__name__} is to train {name}, which DMuonPlugin has given no owner: choose the "
                    "same matrices for both (dmuon_lightning.accelerate.Muon(model) does), or put it in a group with "
                    'algorithm="adamw"'
                )


def _check_options(optimizer: Optimizer, options: dict[str, Any]) -> None:
    """An option that only our Muon reads is of no effect with another optimizer, unless that has the same."""
    from dmuon_lightning.accelerate.optimizer import Muon

    if isinstance(optimizer, Muon):
        return
    # These also balance the owners; who runs which optimizer on them, nobody knows of an OwnedOptimizer.
    of_owners = ("split", "ns_form", "ns_steps", "ns_dtype", "ns_coefficients")
    used = of_owners if isinstance(optimizer, OwnedOptimizer) else of_owners[:1]
    same = (
        name for name in optimizer.defaults if name in options and same_value(options[name], optimizer.defaults[name])
    )
    if lost := options.keys() - {*same, *used}:
        raise RuntimeError(
            f"{type(optimizer).__name__} does not read DMuon's {', '.join(sorted(lost))} (of DMuonPlugin(muon=...), "
            "of enable, of DMUON_* variables, or in fsdp_sharding_strategy): train with "
            "dmuon_lightning.accelerate.Muon(model), in a Trainer with DMuonTrainerOptimizer, or remove what nobody "
            "reads"
        )
