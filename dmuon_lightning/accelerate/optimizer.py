"""Muon for scripts that build their optimizer before ``Accelerator.prepare``, as Accelerate wants it."""

from __future__ import annotations

from typing import Any

import torch.nn as nn
from accelerate.state import AcceleratorState

from dmuon_core import Muon as CoreMuon
from dmuon_core.optim.muon import ParamsT
from dmuon_core.targets import muon_targets
from dmuon_lightning.accelerate.config import read_config, target_predicate
from dmuon_lightning.accelerate.guard import restore
from dmuon_lightning.accelerate.plugin import DMuonPlugin


class Muon(CoreMuon):
    """:class:`dmuon_core.Muon` whose Muon group is what the Accelerator's :class:`DMuonPlugin` will give owners.

    Options that are not passed come from the plugin or, without one, from the same configuration.

    Args:
        params: the model, before ``prepare``; or what the base class takes.
        options: of the base class.
    """

    def __init__(self, params: nn.Module | ParamsT, **options: Any) -> None:
        groups = muon_groups(params) if isinstance(params, nn.Module) else params
        super().__init__(groups, **{**muon_options(), **options})

    def init_state(self) -> None:
        """See the base class; also after the model was prepared again."""
        restore(self)
        super().init_state()

    def state_dict(self) -> dict[str, Any]:
        """See the base class; also after the model was prepared again."""
        restore(self)
        return super().state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """See the base class; also after the model was prepared again."""
        restore(self)
        super().load_state_dict(state_dict)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """See the base class; also after the model was prepared again."""
        restore(self)
        super().zero_grad(set_to_none)


def active_plugin() -> DMuonPlugin | None:
    """The plugin of the process's Accelerator, if it is ours. Local."""
    plugin = AcceleratorState._shared_state.get("fsdp_plugin")
    return plugin if isinstance(plugin, DMuonPlugin) else None


def muon_options() -> dict[str, Any]:
    """The optimizer's options of the active plugin or, without one, of the configuration. Local."""
    plugin = active_plugin()
    return read_config().muon if plugin is None else plugin.muon


def muon_groups(model: nn.Module) -> list[dict[str, Any]]:
    """Named groups "muon", of what the active plugin will give owners, and "adamw", of the rest. Local.

    Raises:
        ValueError: no parameter requires a gradient.
    """
    plugin = active_plugin()
    if plugin is None:
        predicate = target_predicate(read_config().dedicate.get("predicate"), model)
    else:
        predicate = plugin.targets_in(model)
    named = [(name, param) for name, param in model.named_parameters() if param.requires_grad]
    if not named:
        raise ValueError(f"no parameter of {type(model).__name__} requires a gradient: unfreeze what is to be trained")
    if predicate is None:
        ids = {id(param) for param in muon_targets(model).values()}
    else:
        ids = {id(param) for name, param in named if predicate(name, param)}
    split = {
        "muon": [(name, param) for name, param in named if id(param) in ids],
        "adamw": [(name, param) for name, param in named if id(param) not in ids],
    }
    return [{"name": name, "algorithm": name, "params": params} for name, params in split.items() if params]
