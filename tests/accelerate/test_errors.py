"""What cannot work is an error that names the remedy, on every rank."""

from __future__ import annotations

import os
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn as nn
from torch.distributed.fsdp import fully_shard

from tests.accelerate.runs import OPTIONS, Setup, accelerator_for, build, forget_accelerator
from tests.distributed.harness import RankError, capture_error, run_distributed
from tests.distributed.models import MODELS
from tests.distributed.reference import ADAMW, Recipe, Rows


def _prepare(setup: Setup, change: Any = None, model: str = "gpt") -> tuple[Any, nn.Module, Any]:
    from dmuon_lightning.accelerate import Muon

    accelerator = accelerator_for(setup)
    built = MODELS[model]()
    optimizer = Muon(built, **OPTIONS)
    if change is not None:
        change(built)
    return (accelerator, *accelerator.prepare(built, optimizer))


def _backward(accelerator: Any, model: nn.Module) -> None:
    accelerator.backward(Rows("gpt", 0, 0, dist.get_rank(), dist.get_world_size()).loss(model))


def _sharded_before() -> None:
    _prepare(Setup(), change=lambda model: fully_shard(model.blocks[0]))


def _dedicated_before() -> None:
    import dmuon_core

    _prepare(Setup(), change=lambda model: dmuon_core.dedicate_params(model))


def _tensor_parallel() -> None:
    from accelerate.parallelism_config import ParallelismConfig

    _prepare(Setup(accelerator={"parallelism_config": ParallelismConfig(tp_size=2, dp_shard_size=2)}))


def _context_parallel() -> None:
    from accelerate.parallelism_config import ParallelismConfig

    _prepare(Setup(accelerator={"parallelism_config": ParallelismConfig(cp_size=2, dp_shard_size=2)}))


def _only_replicas() -> None:
    from accelerate.parallelism_config import ParallelismConfig

    # Newer Accelerates say so themselves.
    _prepare(Setup(accelerator={"parallelism_config": ParallelismConfig(dp_replicate_size=2)}))


def _predicate_matches_nothing() -> None:
    _prepare(Setup(plugin={"predicate": ["layers.*"]}))


def _boundary_does_not_exist() -> None:
    _prepare(Setup(plugin={"hook_boundary_predicate": ["Atention"]}))


def _loader_cannot_load_buffers() -> None:
    _prepare(Setup(plugin={"cpu_ram_efficient_loading": True}), lambda m: m.register_buffer("seen", torch.zeros(1)))


def _loader_would_untie() -> None:
    _prepare(Setup(plugin={"cpu_ram_efficient_loading": True}), model="tied_head")


def _two_optimizers() -> None:
    accelerator, model, optimizer = build(Recipe(), Setup())
    second = torch.optim.AdamW(list(model.parameters())[:1], **ADAMW)
    _backward(accelerator, model)
    optimizer.step()
    second.step()


def _muon_over_a_shard() -> None:
    import dmuon_core

    accelerator = accelerator_for(Setup(plugin={"predicate": ["*.mlp.*"]}))
    model = MODELS["gpt"]()
    model, optimizer = accelerator.prepare(model, dmuon_core.Muon(model, **OPTIONS))
    _backward(accelerator, model)
    optimizer.step()


def _optimizer_of_rows_and_columns() -> None:
    accelerator = accelerator_for(Setup())
    model = MODELS["gpt"]()
    model, optimizer = accelerator.prepare(model, torch.optim.Adafactor(model.parameters()))
    _backward(accelerator, model)
    optimizer.step()


def _nothing_converted() -> None:
    from accelerate import Accelerator

    import dmuon_lightning.accelerate.guard as guard
    from dmuon_lightning.accelerate import DMuonPlugin

    guard._converted.clear()  # what the checks before this one have converted
    DMuonPlugin()  # built, but not passed on
    del os.environ["LOCAL_RANK"]  # so that Accelerate takes this process for a lone one, as it does on CPUs
    accelerator = Accelerator()
    model = nn.Linear(2, 2)
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters()))
    optimizer.step()


def _enabled_too_late() -> None:
    from accelerate.utils import FullyShardedDataParallelPlugin

    import dmuon_lightning.accelerate.guard as guard
    from dmuon_lightning.accelerate import enable

    guard._converted.clear()
    accelerator = accelerator_for(Setup(stock=True))
    enable()
    try:
        model = MODELS["gpt"]()
        model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters()))
        optimizer.step()
    finally:
        del FullyShardedDataParallelPlugin.__new__


CASES: dict[str, tuple[Any, str, str]] = {
    "sharded before": (_sharded_before, "ValueError", "is sharded before Accelerator.prepare"),
    "dedicated before": (_dedicated_before, "ValueError", "leave dedicate_params to DMuonPlugin"),
    "only replicas": (_only_replicas, "ValueError", "dp_shard_size"),
    "no such name": (_predicate_matches_nothing, "ValueError", "no matrix of GPT has a name like 'layers.*'"),
    "no such class": (_boundary_does_not_exist, "ValueError", "did you mean 'Attention'?"),
    "buffers": (_loader_cannot_load_buffers, "ValueError", "cannot load buffers such as 'seen'"),
    "untied": (_loader_would_untie, "ValueError", "would untie 'head.weight'"),
    "two optimizers": (_two_optimizers, "RuntimeError", "Accelerate saves one optimizer of a model"),
    "muon over a shard": (_muon_over_a_shard, "RuntimeError", "'blocks.0.attn.q.weight', which DMuonPlugin has given"),
    "rows and columns": (_optimizer_of_rows_and_columns, "", "owned"),
    "enabled too late": (_enabled_too_late, "RuntimeError", "enable() before it, or the Trainer, is built"),
    "nothing converted": (_nothing_converted, "RuntimeError", "no model was prepared with owned matrices: Accelerate"),
}


OF_FOUR: dict[str, tuple[Any, str, str]] = {
    "tensor parallel": (_tensor_parallel, "ValueError", "tp_size=2: set it to 1"),
    "context parallel": (_context_parallel, "ValueError", "cp_size=2: set it to 1"),
}


def _errors(names: list[str]) -> dict[str, RankError | None]:
    checks = {**CASES, **OF_FOUR}
    return {name: capture_error(checks[name][0]) for name in names if forget_accelerator()}


@pytest.fixture(scope="module")
def errors() -> dict[str, list[RankError | None]]:
    """By name, what every rank raised; None if it raised nothing."""
    found = {}
    for world, cases in ((2, CASES), (4, OF_FOUR)):
        ranks = run_distributed(_errors, world, list(cases))
        found.update({name: [of_rank[name] for of_rank in ranks] for name in cases})
    return found


@pytest.mark.parametrize("name", [*CASES, *OF_FOUR])
def test_is_refused_on_every_rank(name: str, errors: dict[str, list[RankError | None]]) -> None:
    _, kind, message = {**CASES, **OF_FOUR}[name]
    for error in errors[name]:
        assert error is not None
        assert kind in error.type, error.traceback
        assert message in error.message, error.traceback
