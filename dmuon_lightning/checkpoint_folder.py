"""Reading the Trainer's sharded checkpoint folders, in any layout and by any optimizer that fits."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
import torch.nn as nn
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
from dmuon_lightning._lightning import METADATA_FILENAME
from dmuon_lightning.checkpoint import read_file, world


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
        if not (path / METADATA_FILENAME).is_file() or not (path / ".metadata").is_file():
            raise RuntimeError(
                f"{path} is no complete checkpoint: a folder without '.metadata' and {METADATA_FILENAME!r} is what is "
                "left of a save that was interrupted. Load the one before it"
            )
        rest = read_file(path / METADATA_FILENAME, weights_only=weights_only)
        stored = _read_metadata(path)
        saved = {name: _shape(entry) for name, entry in _below("state_dict", stored).items()}
        problem = checkpoint.model_problem(saved, checkpoint.shapes_of(weights), strict=strict)
        if problem:
            raise RuntimeError(f"{path} does not fit {type(module).__name__}: {problem}. {checkpoint.MODEL_REMEDY}")
        return (rest, stored), [("what the checkpoint holds", sorted(stored.state_dict_metadata))]

    rest, stored = agree(world(), plan)
    plans = []
    for index, optimizer in enumerate(optimizers):
        current: Any = states[index]["state"]
        saved = _saved_optimizer(f"optimizer_{index}", stored, path, current)
        if saved["param_groups"]:  # else weights only
            fitted, problem = checkpoint.fit_optimizer_state(module, [optimizer], saved, strict=strict)
            if "algorithm" not in optimizer.param_groups[0]:  # of Muon's it is known what it can do without
                problem = problem or _other_keys(fitted["state"], current, strict=strict)
            if problem:  # the same on every rank, as what is stored and the model are
                raise ValueError(
                    f"{path} does not fit {type(optimizer).__name__}: {problem}. {checkpoint.OPTIMIZER_REMEDY}"
                )
            plans.append((index, optimizer, fitted))

    weights = {name: value for name, value in weights.items() if f"state_dict.{name}" in stored.state_dict_metadata}
    dcp.load({"state_dict": weights}, checkpoint_id=path)
    set_model_state_dict(module, weights, options=StateDictOptions(strict=strict))
    for index, optimizer, fitted in plans:
        current = states[index]["state"]
        wanted = {name: {key: current[name][key] for key in entry} for name, entry in fitted["state"].items()}
        dcp.load({f"optimizer_{index}": {"state": wanted}}, checkpoint_id=path)
        state = {"state": wanted, "param_groups": fitted["param_groups"]}
        set_optimizer_state_dict(module, optimizer, state, options=StateDictOptions(strict=strict))
    return rest


def _read_metadata(path: Path) -> Metadata:
    try:
        return dcp.FileSystemReader(path).read_metadata()
    except (OSError, EOFError, pickle.UnpicklingError) as error:
        raise RuntimeError(
            f"{path / '.metadata'} cannot be read ({type(error).__name__}: {error}): it is damaged, load the "
            "checkpoint before it"
        ) from error


def _other_keys(fitted: dict[str, Any], current: dict[str, Any], *, strict: bool) -> str | None:
    """What a parameter's saved state holds and its state of now does not, or the other way round; None if nothing.

    Not ``strict``: drops from ``fitted`` what has no place. Both are the same on every rank.
    """
    for name, entry in fitted.items():
        known = current.get(name, {})
        foreign = [key for key in entry if key not in known]
        missing = [key for key in known if key not in entry]
        if strict and (foreign or missing):
            kinds = [
                f"{kind} {', '.join(map(repr, keys))}" for kind, keys in (("has", foreign), ("lacks", missing)) if keys
            ]
            return f"the saved state of '{name}' {' and '.join(kinds)}"
        for key in foreign:
            del entry[key]
    return None


def _saved_optimizer(key: str, stored: Metadata, path: Path, current: dict[str, Any]) -> dict[str, Any]:
    """A saved optimizer's state dict with its groups as they are and its tensors on the meta device. Collective.

    State that is a list or a dict was saved leaf by leaf: ``current`` says where a parameter's name ends.
    """
    state: dict[str, Any] = {}
    for name, entry in _below(f"{key}.state", stored).items():
        parameter, _, what = name.rpartition(".")
        while parameter not in current and "." in parameter:
            parameter, _, what = parameter.rpartition(".")
        if parameter not in current:
            parameter, _, what = name.rpartition(".")
        nested = name != f"{parameter}.{what}"
        state.setdefault(parameter, {})[what] = None if nested else _placeholder(entry, "meta")
    options = _below(f"{key}.param_groups", stored)
    values = {f"{key}.param_groups.{name}": _placeholder(entry, "cpu") for name, entry in options.items()}
    if values:
        dcp.load(values, checkpoint_id=path)
    groups: dict[int, dict[str, Any]] = {}
    for name in options:
        index, option, *position = name.split(".")
        group, value = groups.setdefault(int(index), {}), values[f"{key}.param_groups.{name}"]
        if position:  # only lists of tensors are taken apart
            group.setdefault(option, {})[int(position[0])] = value
        else:
            group[option] = value
    return {"state": state, "param_groups": [_lists(groups[index]) for index in sorted(groups)]}


def _lists(group: dict[str, Any]) -> dict[str, Any]:
    return {"params": [], **{k: [v[i] for i in sorted(v)] if isinstance(v, dict) else v for k, v in group.items()}}


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
