"""Training with Accelerate on the ranks of a job, by names; the same training in one process is `train_reference`."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
import torch.nn as nn
from torch import Tensor

from tests.accelerate.cpu.sitecustomize import let_cpus_count_as_gpus
from tests.distributed.models import MODELS
from tests.distributed.reference import ADAMW, MUON, Recipe, Rows, Training, full_grads, full_state, full_weights

OPTIONS: dict[str, Any] = {
    **MUON,
    "ns_dtype": torch.float32,
    **{f"adamw_{name}": value for name, value in ADAMW.items()},
}


@dataclass(frozen=True)
class Setup:
    """What stands around a training, by names, so that it can be sent to a rank."""

    plugin: dict[str, Any] = field(default_factory=dict)
    accelerator: dict[str, Any] = field(default_factory=dict)
    replicas: int = 1
    environment: dict[str, str] = field(default_factory=dict)
    unequal: bool = False  # every rank builds other weights
    optimizer: str = "muon"
    stock: bool = False  # Accelerate's own plugin


def accelerator_for(setup: Setup) -> Any:
    """An Accelerator with DMuonPlugin, of this rank."""
    from accelerate import Accelerator
    from accelerate.parallelism_config import ParallelismConfig
    from accelerate.utils import FullyShardedDataParallelPlugin

    from dmuon_lightning.accelerate import DMuonPlugin

    let_cpus_count_as_gpus()
    os.environ.update(setup.environment)
    options = dict(setup.accelerator)
    if setup.replicas > 1:
        shards = dist.get_world_size() // setup.replicas
        options["parallelism_config"] = ParallelismConfig(dp_replicate_size=setup.replicas, dp_shard_size=shards)
    if setup.stock:
        blocks = {"auto_wrap_policy": "transformer_based_wrap", "transformer_cls_names_to_wrap": ["Block"]}
        return Accelerator(fsdp_plugin=FullyShardedDataParallelPlugin(fsdp_version=2, **blocks), **options)
    return Accelerator(fsdp_plugin=DMuonPlugin(**setup.plugin), **options)


def build(recipe: Recipe, setup: Setup) -> tuple[Any, nn.Module, Any]:
    """(accelerator, prepared model, prepared optimizer)."""
    from dmuon_lightning.accelerate import Muon

    accelerator = accelerator_for(setup)
    torch.manual_seed(recipe.seed + (dist.get_rank() if setup.unequal else 0))
    model = MODELS[recipe.model]()
    optimizer = torch.optim.AdamW(model.parameters(), **ADAMW) if setup.optimizer == "adamw" else Muon(model, **OPTIONS)
    return (accelerator, *accelerator.prepare(model, optimizer))


@contextlib.contextmanager
def _window(accelerator: Any, model: nn.Module, recipe: Recipe, micro: int) -> Iterator[None]:
    if recipe.no_sync == "accumulate":
        with accelerator.accumulate(model):
            yield
    elif recipe.no_sync and micro + 1 < recipe.accumulate:
        with accelerator.no_sync(model):
            yield
    else:
        yield


def train(recipe: Recipe, setup: Setup | None = None) -> Training:
    """Inside a rank."""
    return steps(*build(recipe, setup or Setup()), recipe)


def steps(
    accelerator: Any, model: nn.Module, optimizer: Any, recipe: Recipe, first: int = 0, scheduler: Any = None
) -> Training:
    """Train the steps from `first` on, as Accelerate's users write it."""
    result = Training()
    world, rank = dist.get_world_size(), dist.get_rank()
    for step in range(first, recipe.steps):
        loss = torch.zeros(())
        for micro in range(recipe.accumulate):
            with _window(accelerator, model, recipe, micro):
                own = Rows(recipe.model, step, micro, rank, world).loss(model)
                loss += own.detach() / recipe.accumulate
                # accumulate() has backward divide by the number of its steps
                accelerator.backward(own if recipe.no_sync == "accumulate" else own / recipe.accumulate)
                if micro + 1 == recipe.accumulate:
                    if recipe.records(step):
                        result.grads.append(full_grads(model))
                    if recipe.max_norm is not None:
                        norm = accelerator.clip_grad_norm_(model.parameters(), recipe.max_norm)
                        result.norms.append(float(getattr(norm, "full_tensor", lambda: norm)()))  # noqa: B023
                if recipe.no_sync == "accumulate" or micro + 1 == recipe.accumulate:
                    optimizer.step()
                    if scheduler is not None:
                        scheduler.step()
                    optimizer.zero_grad()
        dist.all_reduce(loss)
        result.losses.append(loss.item() / world)
    result.weights = full_weights(model)
    result.state = full_state(model, optimizer)
    return result


def difference(got: dict[str, Tensor], want: dict[str, Tensor]) -> float:
    assert got.keys() == want.keys()
    return max((got[name].double() - want[name].double()).abs().max().item() for name in want)


def train_all(cases: list[tuple[Recipe, Setup]]) -> list[Training]:
    """Inside a rank: several trainings one after the other, each with an Accelerator of its own."""
    return [train(recipe, setup) for recipe, setup in cases if forget_accelerator()]


def forget_accelerator() -> bool:
    """Let the next Accelerator be the first one of this process."""
    from accelerate.state import AcceleratorState, GradientState

    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()
    forget_enable()
    for name in list(os.environ):
        if name.startswith(("ACCELERATE_", "FSDP_", "DMUON_")):  # Accelerate and its plugin also write some
            del os.environ[name]
    return True


def forget_enable() -> None:
    """As before dmuon_lightning.accelerate.enable was called."""
    from accelerate.utils import FullyShardedDataParallelPlugin

    from dmuon_lightning.accelerate import DMuonPlugin, guard

    DMuonPlugin.defaults = {}
    guard._enabled = guard._pending = None
    if "__new__" in vars(FullyShardedDataParallelPlugin):
        # Not deleted: object's own then takes no arguments, as the class looks to C as if it had one still.
        FullyShardedDataParallelPlugin.__new__ = _plain_new


def _plain_new(cls: type, *args: Any, **kwargs: Any) -> Any:
    return object.__new__(cls)
