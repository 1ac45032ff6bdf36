"""What is checked before an optimizer steps: the only thing that Accelerate does not tell a plugin about."""

from __future__ import annotations

import os
import weakref
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
import torch.nn as nn
from accelerate.state import AcceleratorState
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook

from dmuon_core import DedicatedModel, OwnedTensor
from dmuon_core import Muon as CoreMuon
from dmuon_core.names import canonical_name

if TYPE_CHECKING:
    from dmuon_lightning.accelerate.config import Config
    from dmuon_lightning.accelerate.plugin import DMuonPlugin

_expecting: str | None = None  # why a model must be converted before an optimizer steps
_converted: list[weakref.ref[DedicatedModel]] = []
_optimizer_of: weakref.WeakKeyDictionary[DedicatedModel, weakref.ref[Optimizer]] = weakref.WeakKeyDictionary()
_handle: Any = None


def watch(plugin: DMuonPlugin, config: Config) -> None:
    """Note that a plugin was built, and check optimizers from now on. Local."""
    global _handle
    if config.found:
        expect("its configuration was read")
    elif int(os.environ.get("WORLD_SIZE", "1")) > 1:
        expect("this is one of several processes")
    if _handle is None:
        _handle = register_optimizer_step_pre_hook(_check)


def expect(reason: str) -> None:
    """Let a step be an error as long as no model is converted. Local."""
    global _expecting
    _expecting = _expecting or reason


def note_conversion(dedicated: DedicatedModel) -> None:
    """Note a model that was converted. Local."""
    _converted.append(weakref.ref(dedicated))


def check_converted() -> None:
    """Raise if a model should have been converted and none was. Local.

    Raises:
        RuntimeError: says why Accelerate does not use FSDP2 here.
    """
    if _expecting is None or _converted:
        return
    raise RuntimeError(f"DMuon is on ({_expecting}), but no model was prepared with owned matrices: {_why_not()}")


def _why_not() -> str:
    state = AcceleratorState._shared_state
    kind = str(getattr(state.get("distributed_type"), "value", "no Accelerator"))
    if kind != "FSDP":
        return (
            f"Accelerate runs this process as {kind!r}, not as 'FSDP'. Start it with accelerate launch and a config of "
            "distributed_type: FSDP, fsdp_version: 2, on GPUs (Accelerate runs FSDP2 nowhere else)"
        )
    plugin = state.get("fsdp_plugin")
    if hasattr(plugin, "targets_in"):
        return "pass model and optimizer to one Accelerator.prepare, and build no other Accelerator before"
    return (
        f"the Accelerator has a {type(plugin).__name__}, not a DMuonPlugin. Build it as "
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
    return [dedicated for reference in _converted if (dedicated := reference()) is not None]


def _check(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
    params = [param for group in optimizer.param_groups for param in group["params"]]
    if AcceleratorState._shared_state:
        check_converted()
    if len({id(param) for param in params}) < len(params):
        restore(optimizer)
        params = [param for group in optimizer.param_groups for param in group["params"]]
        if len({id(param) for param in params}) < len(params):
            raise RuntimeError(
                f"{type(optimizer).__name__} has lost owned parameters, because it was prepared twice: build it from "
                "(name, parameter) pairs (model.named_parameters()), or prepare it once"
            )
    ids = {id(param) for param in params}
    for dedicated in _living():
        if ids.isdisjoint(id(param) for param in dedicated.model.parameters()):
            continue
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
        _optimizer_of[dedicated] = weakref.ref(optimizer)


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
