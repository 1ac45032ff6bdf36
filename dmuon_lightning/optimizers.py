"""Optimizers as users build them: over plain parameters, before there is an owner; and what they leave out."""

from __future__ import annotations

from collections.abc import Iterable

import torch.nn as nn
from lightning_utilities.core.rank_zero import rank_zero_warn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from dmuon_core import Muon as CoreMuon
from dmuon_core import OwnedOptimizer, OwnedTensor
from dmuon_core.optim.loading import place_state
from dmuon_core.registry import get_dedicated
from dmuon_lightning._lightning import MisconfigurationException
from dmuon_lightning.muon import Muon
from dmuon_lightning.sharding import names_before_sharding

_SHOWN = 8  # names in a message


def rebind(optimizers: Iterable[Optimizer], module: nn.Module) -> None:
    """Let optimizers that were built before ``module`` was sharded hold its parameters of now, in place.

    State that an optimizer has for them moves along. Group dicts stay the same objects, so learning-rate schedulers go
    on working. Local, unless there is state, which is then redistributed by collectives.

    Raises:
        MisconfigurationException: a Muon group holds a matrix that has no owner.
    """
    before = names_before_sharding(module)
    now = dict(module.named_parameters())
    names = {id(param): name for name, param in now.items()}
    for optimizer in optimizers:
        if isinstance(optimizer, OwnedOptimizer) and any(
            p in before for g in optimizer.param_groups for p in g["params"]
        ):
            raise MisconfigurationException(
                "OwnedOptimizer hands whole matrices to the optimizers that it holds, so it cannot be built before the "
                "model is sharded: build it in configure_optimizers, or after fabric.setup_module"
            )
        moved: list[nn.Parameter] = []
        for group in optimizer.param_groups:
            for index, param in enumerate(group["params"]):
                if param in before:
                    group["params"][index] = now[before[param]]
                    moved.append(group["params"][index])
                    if param in optimizer.state:
                        optimizer.state[moved[-1]] = optimizer.state.pop(param)
        if any(param in optimizer.state for param in moved):
            place_state([{"params": moved}], optimizer.state)
        if not any(id(param) in names for group in optimizer.param_groups for param in group["params"]):
            continue  # it trains another module
        if isinstance(optimizer, Muon):
            optimizer.sort_parameters(module, get_dedicated(module).split)
        if isinstance(optimizer, CoreMuon):
            _check_owned(optimizer, names)


def warn_of_unheld(optimizers: list[Optimizer], module: nn.Module) -> None:
    """Warn of trainable parameters of ``module`` that no optimizer holds, and of held ones that it does not have."""
    held = {id(p): p for optimizer in optimizers for group in optimizer.param_groups for p in group["params"]}
    kind = type(module).__name__.removeprefix("FSDP")  # fully_shard renames the class
    if not held:
        return  # no optimizer at all, which the Trainer says by itself
    unheld = [name for name, p in module.named_parameters() if p.requires_grad and id(p) not in held]
    if unheld:
        rank_zero_warn(
            f"No optimizer holds {_list(unheld)} of {kind}, so training does not change them: pass "
            "them to an optimizer in configure_optimizers, or set requires_grad=False to say that this is meant"
        )
    known = {id(p) for p in module.parameters()}
    foreign = [f"one of shape {tuple(p.shape)}" for key, p in held.items() if key not in known]
    if foreign:
        rank_zero_warn(
            f"The optimizers hold parameters that are not in {kind} ({_list(foreign)}): their "
            "gradients are not averaged over the processes. If configure_model has replaced layers, build the "
            "optimizer in configure_optimizers, which is called later"
        )


def _check_owned(optimizer: CoreMuon, names: dict[int, str]) -> None:
    matrices = [p for group in optimizer.param_groups if group["algorithm"] == "muon" for p in group["params"]]
    without = [names.get(id(p), "?") for p in matrices if isinstance(p, DTensor) and not isinstance(p, OwnedTensor)]
    if without:
        raise MisconfigurationException(
            f"Muon is to train {_list(without)}, which DMuonStrategy has given no owner: choose them with "
            'DMuonStrategy(predicate=...), or put them in a group with algorithm="adamw"'
        )


def _list(names: list[str]) -> str:
    more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return ", ".join(repr(name) if not name.startswith("one of") else name for name in names[:_SHOWN]) + more
