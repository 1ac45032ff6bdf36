"""Checkpoints of the Trainer: written aside and put in place whole; read whoever wrote them, in any layout.

Either one file, gathered on rank 0 and free of anything of this library, or a folder that every rank writes its part of
(see ``checkpoint_folder.py``).
"""

from __future__ import annotations

import os
import pickle
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict, set_optimizer_state_dict
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP
from torch.distributed.fsdp import OptimStateKeyType
from torch.optim import Optimizer

from dmuon_core import checkpoint
from dmuon_core.agreement import agree
from dmuon_core.names import canonical_name


def save_aside(path: Path, write: Callable[[Path], None]) -> None:
    """Let ``write`` make a file or a folder beside ``path``, and give it that name when it is complete. Collective.

    Whenever the job is killed, ``path`` is what it was before or what it is to be. Only a folder that replaces another
    takes two renames: between them, the old one is at ``.NAME.old``.

    Args:
        path: on a file system that all ranks see.
        write: collective; makes the path that it is given, which does not exist.

    Raises:
        OSError: on the first rank, if ``path`` cannot be written; a RuntimeError that says so on the others.
    """
    aside, old = path.with_name(f".{path.name}.partial"), path.with_name(f".{path.name}.old")

    def prepare() -> tuple[None, list[Any]]:
        if dist.get_rank() == 0:
            path.parent.mkdir(parents=True, exist_ok=True)
            for left_behind in (aside, old) if path.exists() else (aside,):
                _remove(left_behind)
        return None, []

    def put_in_place() -> tuple[None, list[Any]]:
        if dist.get_rank() == 0:
            if path.is_dir() or (path.exists() and aside.is_dir()):
                os.replace(path, old)
            os.replace(aside, path)
            _remove(old)
        return None, []

    agree(world(), prepare)
    write(aside)
    agree(world(), put_in_place)


def write_one_file(content: dict[str, Any], path: Path) -> None:
    """Write what rank 0 has gathered, straight to the disk. Collective, so that an error is one on every rank."""

    def write() -> tuple[None, list[Any]]:
        if dist.get_rank() == 0:
            with path.open("wb") as file:
                torch.save(content, file)
                file.flush()
                os.fsync(file.fileno())
        return None, []

    agree(world(), write)


def read_file(path: Path, **options: Any) -> Any:
    """``torch.load``, which says of a damaged file that it is one. Local.

    Raises:
        RuntimeError: the file cannot be read.
    """
    try:
        return torch.load(path, **options)
    except FileNotFoundError:
        raise
    except (OSError, EOFError, RuntimeError, pickle.UnpicklingError) as error:
        reason = str(error).splitlines()[0] if str(error) else ""
        raise RuntimeError(
            f"{path} cannot be read ({type(error).__name__}: {reason}). If it is damaged or was cut short, load the "
            "checkpoint before it"
        ) from error


def load_one_file(
    path: Path, module: nn.Module, optimizers: list[Optimizer], *, strict: bool, weights_only: bool | None
) -> dict[str, Any]:
    """Load weights and optimizer state from a Trainer's one-file checkpoint; returns the rest of it. Collective.

    Every rank maps the file, and rank 0 broadcasts one tensor after the other.

    Raises:
        RuntimeError: the weights are of another model, or the file is none of a Trainer.
        ValueError: the optimizer state is of other parameter groups. Both on every rank, before anything is loaded.
    """

    def read() -> tuple[dict[str, Any], list[Any]]:
        found = read_file(path, mmap=True, map_location="cpu", weights_only=weights_only)
        if not isinstance(found, dict) or "state_dict" not in found:
            raise RuntimeError(f"{path} is no checkpoint of a Trainer: it has no 'state_dict'")
        saved, current = checkpoint.shapes_of(found["state_dict"]), checkpoint.shapes_of(module.state_dict())
        problem = checkpoint.model_problem(saved, current, strict=strict)
        if problem:
            raise RuntimeError(f"{path} does not fit {type(module).__name__}: {problem}. {checkpoint.MODEL_REMEDY}")
        return found, [("the names of the weights in the file", sorted(found["state_dict"]))]

    found = agree(world(), read)
    saved = [_by_name(state, module) for state in found.get("optimizer_states", [])]
    for optimizer, state in zip(optimizers, saved, strict=False):
        problem = checkpoint.fit_optimizer_state(module, [optimizer], state, strict=strict)[1]
        if problem:  # the same on every rank; now, because the weights are loaded first
            name = type(optimizer).__name__
            raise ValueError(f"{path} does not fit {name}: {problem}. {checkpoint.OPTIMIZER_REMEDY}")
    options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True, strict=strict)
    set_model_state_dict(module, found.pop("state_dict"), options=options)
    for optimizer, state in zip(optimizers, saved, strict=False):
        set_optimizer_state_dict(module, optimizer, state, options=options)
    return found


def _by_name(state: dict[str, Any], module: nn.Module) -> dict[str, Any]:
    """Optimizer state keyed by parameter name.

    A stock optimizer numbers parameters group by group, this strategy's files number them as the module does. The
    groups say their names, if the optimizer was given any, and then it does not matter who wrote the file.
    """
    groups = state["param_groups"]
    known = {canonical_name(name) for name, _ in module.named_parameters()}
    given = [[canonical_name(name) for name in group.get("param_names", ["?"])] for group in groups]
    keys = [key for group in groups for key in group["params"]]
    if not all(set(names) <= known for names in given):
        if keys and isinstance(keys[0], int):
            state = FSDP.rekey_optim_state_dict(state, OptimStateKeyType.PARAM_NAME, module)
        keys = [key for group in state["param_groups"] for key in group["params"]]
        given = [[canonical_name(name) for name in group["params"]] for group in state["param_groups"]]
    names = dict(zip(keys, (name for its in given for name in its), strict=True))
    return {
        "state": {names[key]: value for key, value in state["state"].items()},
        "param_groups": [{**group, "params": its} for group, its in zip(groups, given, strict=True)],
    }


def world() -> dist.ProcessGroup:
    """The group of all processes, which the strategy has made."""
    assert dist.group.WORLD is not None
    return dist.group.WORLD


def _remove(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)
