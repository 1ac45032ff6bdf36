"""What cannot work is an error that names the remedy, on every rank."""

from __future__ import annotations

import os
import tempfile
import warnings
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn as nn
from torch.distributed.fsdp import fully_shard

from tests.accelerate.runs import OPTIONS, Setup, accelerator_for, build, difference, forget_accelerator
from tests.distributed.harness import RankError, capture_error, run_distributed
from tests.distributed.models import MODELS
from tests.distributed.reference import ADAMW, Recipe, Rows, full_weights


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

    from dmuon_lightning.accelerate import DMuonPlugin

    DMuonPlugin()  # built, but not passed on
    del os.environ["LOCAL_RANK"]  # so that Accelerate takes this process for a lone one, as it does on CPUs
    accelerator = Accelerator()
    model = nn.Linear(2, 2)
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters()))
    optimizer.step()


def _enabled_too_late() -> None:
    """After a model with owners was trained in the same process."""
    from dmuon_lightning.accelerate import enable

    accelerator, trained, _ = build(Recipe(), Setup())
    forget_accelerator()
    accelerator = accelerator_for(Setup(stock=True))
    enable()
    model = MODELS["gpt"]()
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters()))
    assert len(list(trained.parameters())) > 0  # it lives on
    optimizer.step()


def _sharded_without_owners() -> None:
    build(Recipe(), Setup())
    other = fully_shard(MODELS["gpt"]())
    side = nn.Linear(2, 2)
    torch.optim.SGD(side.parameters()).step()  # beside the prepared model, each process may train what it likes
    torch.optim.SGD(other.parameters()).step()


def _another_plugin() -> None:
    from dmuon_lightning.accelerate import DMuonPlugin

    accelerator_for(Setup())
    DMuonPlugin()  # the same
    DMuonPlugin(predicate=["*.mlp.*"])


def _trained_but_ignored() -> None:
    _prepare(Setup(plugin={"ignored_modules": r"blocks\.1\.mlp"}))


def _options_that_nobody_reads() -> None:
    setup = Setup(optimizer="adamw", environment={"DMUON_MOMENTUM": "0.9"}, plugin={"muon": {"lr": ADAMW["lr"]}})
    accelerator, model, optimizer = build(Recipe(), setup)
    _backward(accelerator, model)
    optimizer.step()


def _step_in_a_window() -> None:
    accelerator, model, optimizer = build(Recipe(), Setup())
    with warnings.catch_warnings(record=True) as closed:
        warnings.simplefilter("always")
        optimizer.step()  # there is nothing to do, and nothing waits
        _backward(accelerator, model)
        optimizer.step()
        optimizer.zero_grad()
    assert not [w for w in closed if "has no effect on the owned" in str(w.message)]
    before = full_weights(model)
    with accelerator.no_sync(model):
        _backward(accelerator, model)
    with warnings.catch_warnings(record=True) as open_:
        warnings.simplefilter("always")
        optimizer.step()
        optimizer.step()
    assert difference(full_weights(model), before) == 0
    (said,) = [w.message for w in open_ if "has no effect on the owned" in str(w.message)]  # once
    raise said if isinstance(said, Warning) else AssertionError


def _loaded_by_halves() -> None:
    box = [tempfile.mkdtemp() if dist.get_rank() == 0 else None]
    dist.broadcast_object_list(box)
    full = {"state_dict_type": "FULL_STATE_DICT"}
    accelerator, model, optimizer = build(Recipe(), Setup(plugin=full))
    _backward(accelerator, model)
    optimizer.step()
    accelerator.save_state(box[0])
    saved = full_weights(model)
    forget_accelerator()
    accelerator, model, _ = build(Recipe(seed=4), Setup(plugin={**full, "predicate": ["*.mlp.*"]}))
    assert difference(full_weights(model), saved) > 0
    try:
        accelerator.load_state(box[0])
    finally:
        assert difference(full_weights(model), saved) == 0  # Accelerate loads the model first


def _owned_optimizer() -> None:
    from dmuon_core import OwnedOptimizer

    accelerator, model = accelerator_for(Setup()), MODELS["gpt"]()
    optimizer = OwnedOptimizer(model, matrix=torch.optim.Muon, other=torch.optim.AdamW)
    model, optimizer = accelerator.prepare(model, optimizer)
    _backward(accelerator, model)
    before = full_weights(model)
    try:
        optimizer.step()
    finally:
        assert difference(full_weights(model), before) == 0


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
    "owned optimizer": (_owned_optimizer, "RuntimeError", "other parameters were put in place of those"),
    "rows and columns": (_optimizer_of_rows_and_columns, "", "owned"),
    "enabled too late": (_enabled_too_late, "RuntimeError", "enable() before it, or the Trainer, is built"),
    "sharded without owners": (_sharded_without_owners, "RuntimeError", "SGD trains a sharded model without owned"),
    "another plugin": (_another_plugin, "ValueError", "predicate would have no effect: this process's Accelerator"),
    "trained but ignored": (_trained_but_ignored, "ValueError", "'blocks.1.mlp.up.weight' is in ignored_modules"),
    "unread": (_options_that_nobody_reads, "RuntimeError", "AdamW does not read DMuon's momentum (of DMuonPlugin("),
    "step in a window": (_step_in_a_window, "UserWarning", "Leave no_sync for the last one before a step"),
    "loaded by halves": (_loaded_by_halves, "ValueError", "Nothing of the optimizer was loaded; a call that loads the"),
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
