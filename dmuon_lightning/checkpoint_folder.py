"""Reading the Trainer's sharded checkpoint folders, in any layout and by any optimizer that fits."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
import torch.nn as nn
from lightning.fabric.strategies.fsdp import _METADATA_FILENAME
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.optim import Optimizer

from dmuon_core import checkpoint
from dmuon_core.agreement import agree
from dmuon_lightning.checkpoint import world


def load_folder(
    path: Path, module: nn.Module, optimizers: list[Optimizer], *, strict: bool, weights_only: bool | None
) -> dict[str, Any]:
    """Load weights and optimizer state from a Trainer's folder; returns the rest of the checkpoint. Collective.

    Each rank reads its own part. What is there is compared with what is needed before anything is read.

    Raises:
        RuntimeError: the weights are of another model, or the folder is not complete.
        ValueError: the optimizer state is of other parameter groups. Both on every rank, before anything is loaded.
    """
    weights = get_model_state_dict(module)
    states = [get_optimizer_state_dict(module, optimizer) for optimizer in optimizers]

    def plan() -> tuple[tuple[dict[str, Any], Metadata], list[Any]]:
        if not (path / _METADATA_FILENAME).is_file() or not (path / ".metadata").is_file():
            raise RuntimeError(
                f"{path} is no complete checkpoint: a folder without '.metadata' and {_METADATA_FILENAME!r} is what is "
                "left of a save that was interrupted. Load the one before it"
            )
        rest = torch.load(path / _METADATA_FILENAME, weights_only=weights_only)
        stored = dcp.FileSystemReader(path).read_metadata()
        saved = {name: _shape(entry) for name, entry in _below("state_dict", stored).items()}
        problem = checkpoint.model_problem(saved, checkpoint.shapes_of(weights), strict=strict)
        if problem:
            raise RuntimeError(f"{path} does not fit {type(module).__name__}: {problem}. {checkpoint.MODEL_REMEDY}")
        return (rest, stored), [("what the checkpoint holds", sorted(stored.state_dict_metadata))]

    rest, stored = agree(world(), plan)
    plans = []
    for index, optimizer in enumerate(optimizers):
        saved = _saved_optimizer(f"optimizer_{index}", stored, path)
        if saved["param_groups"]:  # else weights only
            fitted, problem = checkpoint.fit_optimizer_state(module, [optimizer], saved, strict=strict)
            if problem:  # the same on every rank, as what is stored and the model are
                raise ValueError(
                    f"{path} does not fit {type(optimizer).__name__}: {problem}. {checkpoint.OPTIMIZER_REMEDY}"
                )
            plans.append((index, optimizer, fitted))

    weights = {name: value for name, value in weights.items() if f"state_dict.{name}" in stored.state_dict_metadata}
    dcp.load({"state_dict": weights}, checkpoint_id=path)
    set_model_state_dict(module, weights, options=StateDictOptions(strict=strict))
    for index, optimizer, fitted in plans:
        current: Any = states[index]["state"]
        wanted = {name: {key: current[name][key] for key in entry} for name, entry in fitted["state"].items()}
        dcp.load({f"optimizer_{index}": {"state": wanted}}, checkpoint_id=path)
        state = {"state": wanted, "param_groups": fitted["param_groups"]}
        set_optimizer_state_dict(module, optimizer, state, options=StateDictOptions(strict=strict))
    return rest


def _saved_optimizer(key: str, stored: Metadata, path: Path) -> dict[str, Any]:
    """A saved optimizer's state dict with its groups as they are and its tensors on the meta device. Collective."""
    state: dict[str, Any] = {}
    for name, entry in _below(f"{key}.state", stored).items():
        parameter, _, what = name.rpartition(".")
        state.setdefault(parameter, {})[what] = _placeholder(entry, "meta")
    options = _below(f"{key}.param_groups", stored)
    values = {f"{key}.param_groups.{name}": _placeholder(entry, "cpu") for name, entry in options.items()}
    if values:
        dcp.load(values, checkpoint_id=path)
    groups: dict[int, dict[str, Any]] = {}
    for name in options:
        index, option, *position = name.split(".")
        group, value = groups.setdefault(int(index), {"params": []}), values[f"{key}.param_groups.{name}"]
        if position:
            group.setdefault(option, {})[int(position[0])] = value
        else:
            group[option] = value
    return {"state": state, "param_groups": [_lists(groups[index]) for index in sorted(groups)]}


def _lists(group: dict[str, Any]) -> dict[str, Any]:
    return {k: [v[i] for i in sorted(v)] if isinstance(v, dict) else v for k, v in group.items()}


def _below(key: str, stored: Metadata) -> dict[str, Any]:
    prefix = f"{key}."
    return {
        name.removeprefix(prefix): entry
        for name, entry in stored.state_dict_metadata.items()
        if name.startswith(prefix)
    }


def _shape(entry: Any) -> tuple[int, ...] | None:
    return tuple(entry.size) if isinstance(entry, TensorStorageMetadata) else None


def _placeholder(entry: Any, device: str) -> Any:
    if isinstance(entry, TensorStorageMetadata):
        return torch.empty(entry.size, dtype=entry.properties.dtype, device=device)
    return None
