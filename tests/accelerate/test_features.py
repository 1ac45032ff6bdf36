"""Mixed precision, a gradient scaler, schedulers, stock optimizers, models for evaluation, and saves at odd moments."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn as nn

from dmuon_core import get_dedicated
from dmuon_core.partition import newton_schulz_flops
from tests.accelerate.runs import OPTIONS, Setup, accelerator_for, build, difference, forget_accelerator, steps, train
from tests.accelerate.test_training import check
from tests.distributed.harness import capture_error, run_distributed
from tests.distributed.models import MODELS
from tests.distributed.reference import (
    ADAMW,
    GRAD_ATOL,
    WEIGHT_ATOL,
    Recipe,
    Rows,
    full_grads,
    full_state,
    full_weights,
    train_reference,
)

WORLD = 2
ADAMW_RECIPE = Recipe(steps=3, max_norm=0.5)


def _rows(step: int = 0) -> Rows:
    return Rows("gpt", step, 0, dist.get_rank(), dist.get_world_size())


def _mixed_precision(folder: str) -> dict[str, Any]:
    """The same script with Accelerate's plugin and with ours."""
    found = {}
    for name, stock in (("stock", True), ("ours", False)):
        forget_accelerator()
        setup = Setup(accelerator={"mixed_precision": "bf16"}, optimizer="adamw", stock=stock)
        accelerator, model, optimizer = build(ADAMW_RECIPE, setup)
        seen: list[torch.dtype] = []
        model.blocks[0].mlp.up.register_forward_hook(lambda m, args, out, seen=seen: seen.append(m.weight.dtype))
        found[name] = steps(accelerator, model, optimizer, ADAMW_RECIPE)
        found[f"{name} dtypes"] = (
            seen[0],
            model.blocks[0].mlp.up.weight.dtype,
            found[name].grads[0]["head.weight"].dtype,
        )
    return found


def _scaler(folder: str) -> dict[str, Any]:
    """Accelerate makes a scaler for GPUs only: here it is given the one for CPUs."""
    from dmuon_lightning.accelerate import Muon

    forget_accelerator()
    accelerator = accelerator_for(Setup())
    accelerator.scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    accelerator.native_amp, accelerator.state._mixed_precision = True, "fp16"  # so that it unscales before it clips
    torch.manual_seed(0)
    model = MODELS["gpt"]()
    model, optimizer = accelerator.prepare(model, Muon(model, **OPTIONS))
    trained = steps(accelerator, model, optimizer, Recipe(max_norm=0.5))
    before = full_weights(model)
    found = {"trained": trained}
    for name in ("loss of one rank", "matrix of one owner"):
        loss = _rows().loss(model)
        accelerator.backward(loss * float("inf") if name == "loss of one rank" and dist.get_rank() == 1 else loss)
        if name == "matrix of one owner":
            local = model.blocks[0].mlp.up.weight.grad._local_tensor
            if local.numel():  # here alone: the other rank has no row of it
                local[0, 0] = float("inf")
        optimizer.step()
        weights = difference(full_weights(model), before)
        found[name] = (optimizer.step_was_skipped, accelerator.scaler.get_scale(), weights)
        optimizer.zero_grad()
    return found


def _fp16(folder: str) -> dict[str, Any]:
    """The same script with Accelerate's plugin and with ours, from a scale that overflows at first."""
    found: dict[str, Any] = {}
    for name, stock in (("stock", True), ("ours", False)):
        forget_accelerator()
        accelerator = accelerator_for(Setup(accelerator={"mixed_precision": "fp16"}, stock=stock))
        accelerator.scaler = torch.amp.GradScaler("cpu", init_scale=2.0**20)
        accelerator.native_amp = True
        torch.manual_seed(0)
        model = MODELS["gpt"]()
        model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters(), **ADAMW))
        seen: list[torch.dtype] = []
        model.blocks[0].mlp.up.register_forward_hook(lambda m, args, out, seen=seen: seen.append(m.weight.dtype))
        log = []
        for step in range(6):
            loss = _rows(step).loss(model)
            accelerator.backward(loss)
            norm = float(accelerator.clip_grad_norm_(model.parameters(), 0.5).full_tensor())
            optimizer.step()
            optimizer.zero_grad()
            log.append((loss.item(), norm, optimizer.step_was_skipped, accelerator.scaler.get_scale()))
        found[name] = (log, full_weights(model))
        found[f"{name} dtypes"] = (seen[0], model.blocks[0].mlp.up.weight.dtype)
    return found


def _scheduler(folder: str) -> dict[str, Any]:
    from dmuon_lightning.accelerate import Muon

    forget_accelerator()
    accelerator = accelerator_for(Setup())
    torch.manual_seed(0)
    model = MODELS["gpt"]()
    optimizer = Muon(model, **OPTIONS)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=2 * WORLD, gamma=0.1)
    model, optimizer, scheduler = accelerator.prepare(model, optimizer, scheduler)
    trained = steps(accelerator, model, optimizer, Recipe(steps=4), scheduler=scheduler)
    return {"trained": trained, "lr": [group["lr"] for group in optimizer.param_groups]}


def _clip_by_value(folder: str) -> dict[str, Any]:
    forget_accelerator()
    accelerator, model, _ = build(Recipe(), Setup(plugin={"muon": {"ns_steps": 7}}))
    owners = get_dedicated(model).assignment  # balanced by the options that the plugin knows
    assert owners.costs == tuple(newton_schulz_flops(spec.shape, 7) for spec in owners.specs)
    accelerator.backward(_rows().loss(model))
    before = full_grads(model)
    error = capture_error(accelerator.clip_grad_value_, model.parameters(), 1e-3)
    nn.utils.clip_grad_value_(model.parameters(), 1e-3)
    return {"before": before, "after": full_grads(model), "error": error}


def _stock_optimizer(folder: str) -> dict[str, Any]:
    forget_accelerator()
    return {"trained": train(ADAMW_RECIPE, Setup(optimizer="adamw"))}


def _save_in_a_window(folder: str) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for kind in ("muon", "adamw"):
        forget_accelerator()
        setup = Setup(optimizer=kind, accelerator={"gradient_accumulation_steps": 2})
        accelerator, model, optimizer = build(Recipe(), setup)
        weights = full_weights(model)
        with accelerator.accumulate(model):
            accelerator.backward(_rows().loss(model))
        accelerator.save_state(f"{folder}/{kind}")
        with accelerator.accumulate(model):
            accelerator.backward(_rows(1).loss(model))
        found[f"{kind} grads"] = full_grads(model)
        accelerator, model, optimizer = _build_again(Setup(optimizer=kind))
        accelerator.backward(_rows().loss(model))
        found[f"{kind} error"] = capture_error(accelerator.save_state, f"{folder}/{kind}-late")
        optimizer.zero_grad()
        accelerator.load_state(f"{folder}/{kind}")
        found[f"{kind} weights"] = difference(full_weights(model), weights)
        found[f"{kind} state"] = full_state(model, optimizer)
    return found


def _build_again(setup: Setup) -> tuple[Any, nn.Module, Any]:
    forget_accelerator()
    return build(Recipe(seed=4), setup)


def _models_for_evaluation(folder: str) -> dict[str, Any]:
    from accelerate.utils.fsdp_utils import fsdp2_prepare_model

    from dmuon_lightning.accelerate import Muon

    recipe = Recipe()
    forget_accelerator()
    torch.manual_seed(7)
    others = [MODELS["gpt"](), MODELS["gpt_two_layers"]()]
    with torch.no_grad():
        want = [_rows().loss(other) for other in others]
    accelerator, model, optimizer = build(recipe, Setup())
    prepared, _ = accelerator.prepare(others[0], Muon(others[0], **OPTIONS))
    alone = fsdp2_prepare_model(accelerator, others[1].requires_grad_(False))  # as TRL does with a reference model
    trained = steps(accelerator, model, optimizer, recipe)
    with torch.no_grad():
        got = [_rows().loss(other) for other in (prepared, alone)]
    return {"trained": trained, "off": max(abs(a - b).item() for a, b in zip(got, want, strict=True))}


def _prepared_again(folder: str) -> dict[str, Any]:
    """As the Trainer does it in a second train()."""
    forget_accelerator()
    accelerator, model, optimizer = build(Recipe(), Setup())
    first = steps(accelerator, model, optimizer, Recipe(steps=1))
    again, optimizer_again = accelerator.prepare(model, optimizer)
    accelerator.save_state(f"{folder}/again")
    rest = steps(accelerator, again, optimizer_again, Recipe(), first=1)
    copies = [type(copy.deepcopy(p.detach())).__name__ for p in model.blocks[0].mlp.parameters()]
    return {"same": again is model, "losses": first.losses + rest.losses, "weights": rest.weights, "copies": copies}


JOBS = (
    _mixed_precision, _scaler, _fp16, _scheduler, _clip_by_value, _stock_optimizer, _save_in_a_window,
    _models_for_evaluation, _prepared_again,
)  # fmt: skip


def _all(folder: str) -> dict[str, Any]:
    return {job.__name__: job(folder) for job in JOBS}


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    return run_distributed(_all, WORLD, str(tmp_path_factory.mktemp("window")), timeout=200)


def test_bf16_is_that_of_fsdp2(ranks: list[dict[str, Any]]) -> None:
    full = train_adamw()
    for found in (rank["_mixed_precision"] for rank in ranks):
        assert found["ours dtypes"] == found["stock dtypes"] == (torch.bfloat16, torch.float32, torch.float32)
        # The gradients that the ranks exchange are rounded to 8 bits in both, in another order; Adam's first steps are
        # as large for a gradient that is small.
        losses = [torch.tensor(found[name].losses) for name in ("ours", "stock")]
        assert (losses[0] - losses[1]).abs().max() < 5e-3
        assert (losses[0] - torch.tensor(full["losses"])).abs().max() > 1e-5  # it is not float32
        for ours, stock in zip(found["ours"].norms, found["stock"].norms, strict=True):
            assert ours == pytest.approx(stock, rel=2e-2)
        assert difference(found["ours"].weights, found["stock"].weights) < 5e-3


def test_a_scaler_skips_on_all_ranks_or_on_none(ranks: list[dict[str, Any]]) -> None:
    want = train_reference(Recipe(max_norm=0.5))
    for found in (rank["_scaler"] for rank in ranks):
        assert found["trained"].losses == pytest.approx(want.losses, abs=1e-6)
        assert difference(found["trained"].weights, want.weights) <= WEIGHT_ATOL
        assert found["loss of one rank"] == (True, 4.0, 0.0)
        assert found["matrix of one owner"] == (True, 2.0, 0.0)


def test_fp16_is_that_of_fsdp2(ranks: list[dict[str, Any]]) -> None:
    for found in (rank["_fp16"] for rank in ranks):
        assert found["ours dtypes"] == found["stock dtypes"] == (torch.float16, torch.float32)
        (ours, weights), (stock, stock_weights) = found["ours"], found["stock"]
        assert [step[2:] for step in ours] == [step[2:] for step in stock]
        skipped = [step[2] for step in ours]
        assert 1 <= sum(skipped) <= 4 and skipped == sorted(skipped, reverse=True)  # first too large, then not
        for step, other in zip(ours, stock, strict=True):
            assert step[0] == pytest.approx(other[0], abs=2e-3)
            assert step[2] or step[1] == pytest.approx(other[1], rel=1e-2)
        # Adam's first steps are as large for a gradient of rounding errors.
        assert difference(weights, stock_weights) < 5e-3


def test_schedulers_reach_both_groups(ranks: list[dict[str, Any]]) -> None:
    weights = scheduled_in_one_process()
    for found in (rank["_scheduler"] for rank in ranks):
        assert found["lr"] == pytest.approx([OPTIONS["lr"] * 0.01, OPTIONS["adamw_lr"] * 0.01])
        assert difference(found["trained"].weights, weights) <= WEIGHT_ATOL


def test_clipping_by_value(ranks: list[dict[str, Any]]) -> None:
    """Accelerate refuses it with any FSDP; torch's own function works."""
    for found in (rank["_clip_by_value"] for rank in ranks):
        assert found["error"] is not None and "clip_grad_value_" in found["error"].message
        want = {name: grad.clamp(-1e-3, 1e-3) for name, grad in found["before"].items()}
        assert difference(found["after"], want) == 0
        assert difference(found["before"], want) > GRAD_ATOL


def test_a_stock_optimizer_trains_owned_matrices(ranks: list[dict[str, Any]]) -> None:
    want = train_adamw()
    for found in (rank["_stock_optimizer"]["trained"] for rank in ranks):
        assert found.losses == pytest.approx(want["losses"], abs=1e-6)
        assert difference(found.weights, want["weights"]) <= WEIGHT_ATOL


def test_a_save_before_the_first_step_holds_no_step(ranks: list[dict[str, Any]]) -> None:
    torch.manual_seed(0)
    model = MODELS["gpt"]()
    for step in range(2):
        (Rows("gpt", step, 0, 0, 1).loss(model) / 2).backward()
    grads = {name: p.grad for name, p in model.named_parameters()}
    for found in (rank["_save_in_a_window"] for rank in ranks):
        for kind in ("muon", "adamw"):
            assert difference(found[f"{kind} grads"], grads) <= GRAD_ATOL  # the window is as if nothing was saved
            assert found[f"{kind} weights"] == 0
            moments = [value for name, value in found[f"{kind} state"].items() if not name.endswith("/step")]
            assert moments and all(value.abs().max() == 0 for value in moments)
        # Once gradients have arrived, torch makes no state for a stock optimizer that has none.
        assert found["muon error"] is None
        assert "after the step or after zero_grad" in found["adamw error"].message


def test_other_models_are_prepared_for_evaluation(ranks: list[dict[str, Any]]) -> None:
    want = train_reference(Recipe())
    for found in (rank["_models_for_evaluation"] for rank in ranks):
        check("trained", found["trained"], want)
        assert found["off"] <= 1e-6


def test_a_model_is_prepared_again(ranks: list[dict[str, Any]]) -> None:
    want = train_reference(Recipe())
    for found in (rank["_prepared_again"] for rank in ranks):
        assert found["same"]
        assert found["losses"] == pytest.approx(want.losses, abs=1e-6)
        assert difference(found["weights"], want.weights) <= WEIGHT_ATOL
        assert "OwnedTensor" in found["copies"]


def train_adamw() -> dict[str, Any]:
    """ADAMW_RECIPE by the stock optimizer in this process."""
    torch.manual_seed(0)
    model = MODELS["gpt"]()
    optimizer = torch.optim.AdamW(model.parameters(), **ADAMW)
    losses = []
    for step in range(ADAMW_RECIPE.steps):
        loss = Rows("gpt", step, 0, 0, 1).loss(model)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return {"losses": losses, "weights": {name: p.detach() for name, p in model.named_parameters()}}


def scheduled_in_one_process() -> dict[str, torch.Tensor]:
    """Two steps with the first learning rate, two with a tenth; the optimizer's own test compares it with torch's."""
    import dmuon_core

    torch.manual_seed(0)
    model = MODELS["gpt"]()
    optimizer = dmuon_core.Muon(model, **OPTIONS)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=2, gamma=0.1)
    for step in range(4):
        Rows("gpt", step, 0, 0, 1).loss(model).backward()
        optimizer.step()
        optimizer.zero_grad()
        scheduler.step()
    return {name: p.detach() for name, p in model.named_parameters()}
