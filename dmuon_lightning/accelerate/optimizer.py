"""Muon for scripts that build their optimizer before ``Accelerator.prepare``, as Accelerate wants it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch.nn as nn

from dmuon_core import Muon as CoreMuon
from dmuon_core.optim.groups import model_groups
from dmuon_core.optim.muon import ParamsT
from dmuon_core.optim.split import SplitRule
from dmuon_core.targets import muon_targets
from dmuon_lightning.accelerate.config import read_config
from dmuon_lightning.accelerate.guard import active_plugin, restore
from dmuon_lightning.accelerate.selection import target_predicate


class Muon(CoreMuon):
    """:class:`dmuon_core.Muon` whose Muon group is what the Accelerator's :class:`.DMuonPlugin` will give owners.

    Options that are not passed come from the plugin or, without one, from the same configuration.

    Args:
        params: the model, before ``prepare``; or what the base class takes.
        options: of the base class.
    """

    def __init__(self, params: nn.Module | ParamsT, **options: Any) -> None:
        options = {**muon_options(), **options}
        if isinstance(params, nn.Module):
            params = muon_groups(params, options.pop("split", None), options.pop("groups", None))
        super().__init__(params, **options)

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


def muon_options() -> dict[str, Any]:
    """The optimizer's options of the active plugin or, without one, of the configuration. Local."""
    plugin = active_plugin()
    return read_config().muon if plugin is None else plugin.muon


def muon_groups(
    model: nn.Module, split: SplitRule | None = None, named: Mapping[str, Mapping[str, Any]] | None = None
) -> list[dict[str, Any]]:
    """Named groups "muon", of what the active plugin will give owners, and "adamw", of the rest. Local.

    ``split`` and the groups ``named``, which come first, are as in the base class.

    Raises:
        ValueError: no parameter requires a gradient, or as for the base class.
    """
    plugin = active_plugin()
    if plugin is None:
        predicate = target_predicate(read_config().dedicate.get("predicate"), model)
    else:
        predicate = plugin.targets_in(model)
    if predicate is None:
        hidden = {id(param) for param in muon_targets(model).values()}
    else:
        hidden = {id(param) for name, param in model.named_parameters() if predicate(name, param)}
    return model_groups(model, split, named, hidden)
