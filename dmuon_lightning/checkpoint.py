"""Reading one-file checkpoints, whoever wrote them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import torch.nn as nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, set_optimizer_state_dict
from torch.optim import Optimizer

from dmuon_lightning._lightning import load_raw_module_state, rekey_optimizer_state


def load_one_file(
    path: Path, module: nn.Module, optimizers: list[Optimizer], *, strict: bool, weights_only: bool | None
) -> dict[str, Any]:
    """Load weights and optimizer state from a Trainer's one-file checkpoint; returns the rest of it. Collective.

    Raises:
        KeyError: if ``strict`` and a parameter is missing.
    """
    checkpoint: dict[str, Any] = torch.load(path, mmap=True, map_location="cpu", weights_only=weights_only)
    load_raw_module_state(checkpoint.pop("state_dict"), module, strict=strict)
    options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True, strict=strict)
    for optimizer, state in zip(optimizers, checkpoint.get("optimizer_states", []), strict=False):
        set_optimizer_state_dict(module, optimizer, _by_name(state, module), options=options)
    return checkpoint


def _by_name(state: dict[str, Any], module: nn.Module) -> dict[str, Any]:
    """Optimizer state keyed by parameter name.

    A stock optimizer numbers parameters group by group, this strategy's files number them as the module does. The
    groups say their names, if the optimizer was given any, and then it does not matter who wrote the file.
    """
    groups = state["param_groups"]
    known = {name for name, _ in module.named_parameters()}
    if not all(set(group.get("param_names", ["?"])) <= known for group in groups):
        return rekey_optimizer_state(state, module)
    names = {key: name for group in groups for key, name in zip(group["params"], group["param_names"], strict=True)}
    return {
        "state": {names[key]: value for key, value in state["state"].items()},
        "param_groups": [{**group, "params": group["param_names"]} for group in groups],
    }
