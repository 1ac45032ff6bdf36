"""A step that raises, anywhere, leaves the model usable: later steps equal training that never saw the failed one.

Exceptions are raised on all ranks (a rank that raises alone has left the job). Step 2 of five fails; steps 0, 1, 3 and
4 are compared with one process that runs only those: raw gradients 1e-6, weights 1e-5, losses 1e-6, as in reference.py.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn as nn
from torch import Tensor

from tests.distributed.harness import run_distributed
from tests.distributed.models import MODELS
from tests.distributed.reference import (
    ReferenceMuon,
    Rows,
    Training,
    assert_at_rest,
    assert_same_training,
    assert_slots_at_rest,
    dedicate,
    full_grads,
    full_weights,
    make_muon,
    mean_over_ranks,
)

FAILING_STEP, STEPS = 2, 5


class Bomb(Exception):
    pass


class Fuse:
    """Raises while armed; placed in models by `PLACES`."""

    armed = False

    def check(self, *_: Any) -> None:
        if self.armed:
            raise Bomb("the user's own error")


class _RaiseInBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, fuse: Fuse) -> Tensor:
        ctx.fuse = fuse
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        ctx.fuse.check()
        return grad, None


def _in_backward_of(module: nn.Module, fuse: Fuse) -> None:
    module.register_forward_hook(lambda module, args, output: _RaiseInBackward.apply(output, fuse))


def _on_gradient_of(module_of: Callable[[nn.Module], nn.Module], model: nn.Module, fuse: Fuse) -> None:
    def hook(module: nn.Module, args: Any, output: Tensor) -> None:
        if output.requires_grad:
            output.register_hook(fuse.check)

    module_of(model).register_forward_hook(hook)


# place -> how the fuse gets there; registered after dedication, so on top of the library's hooks
PLACES: dict[str, Callable[[Any, Fuse], Any]] = {
    "forward_of_the_first_block": lambda m, f: m.blocks[0].norm1.register_forward_pre_hook(f.check),
    "forward_deep_inside_a_block": lambda m, f: m.blocks[1].mlp.down.register_forward_pre_hook(f.check),
    "forward_of_the_head": lambda m, f: m.head.register_forward_pre_hook(f.check),
    "pre_hook_of_a_hook_module": lambda m, f: m.blocks[1].register_forward_pre_hook(f.check),
    "hook_of_a_hook_module": lambda m, f: m.blocks[1].register_forward_hook(f.check),
    "hook_of_the_root": lambda m, f: m.register_forward_hook(f.check),
    "pre_hook_of_the_root": lambda m, f: m.register_forward_pre_hook(f.check),
    "backward_of_the_head": lambda m, f: _in_backward_of(m.norm, f),
    "backward_of_the_last_block": lambda m, f: _in_backward_of(m.blocks[2].norm1, f),
    "backward_deep_inside_a_block": lambda m, f: _in_backward_of(m.blocks[1].mlp.up, f),
    "backward_between_blocks": lambda m, f: _in_backward_of(m.blocks[0], f),
    "backward_of_the_embedding": lambda m, f: _in_backward_of(m.tok_emb, f),
    "tensor_hook_inside_a_block": lambda m, f: _on_gradient_of(lambda model: model.blocks[1].attn.o, m, f),
}


def _failing_step(model: nn.Module, rows: Rows, fuse: Fuse) -> None:
    fuse.armed = True
    try:
        rows.loss(model).backward()
    except Bomb:
        return
    finally:
        fuse.armed = False
    raise AssertionError("the bomb did not go off")


def _train_with_a_failure(
    place: str, zero3: bool, model_name: str, explicit: bool, window: bool, shard: str
) -> Training | None:
    import dmuon_core

    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    model, fuse = MODELS[model_name](), Fuse()
    handle = dedicate(model, zero3=zero3, shard=shard)
    PLACES[place](model, fuse)
    optimizer, result = make_muon(model), Training()
    for step in range(STEPS):
        rows = Rows(model_name, step, 0, rank, world)
        if step == FAILING_STEP:
            if window:  # a good micro-batch first, whose gradient must be dropped with the rest
                with dmuon_core.no_sync(model):
                    rows.loss(model).backward()
            _failing_step(model, rows, fuse)
            if explicit:
                dmuon_core.reset(model)
                assert_at_rest(handle)
                assert_slots_at_rest(model, handle)
            optimizer.zero_grad()
            continue
        loss = rows.loss(model)
        loss.backward()
        result.losses.append(mean_over_ranks(loss.item()))
        result.grads.append(full_grads(model))
        optimizer.step()
        optimizer.zero_grad()
        assert_at_rest(handle)
        assert_slots_at_rest(model, handle)
    result.weights = full_weights(model)
    return result if rank == 0 else None


@functools.cache
def _reference(model_name: str) -> Training:
    torch.manual_seed(0)
    model = MODELS[model_name]()
    optimizer, result = ReferenceMuon(model), Training()
    for step in range(STEPS):
        if step == FAILING_STEP:
            continue
        loss = Rows(model_name, step, 0, 0, 1).loss(model)
        loss.backward()
        result.losses.append(loss.item())
        result.grads.append({name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None})
        optimizer.step()
        model.zero_grad()
    result.weights = {name: p.detach().clone() for name, p in model.named_parameters()}
    return result


@pytest.mark.parametrize("zero3", [True, False], ids=["z3", "z2"])
@pytest.mark.parametrize("place", PLACES)
def test_training_goes_on_after_a_failure(place: str, zero3: bool) -> None:
    got = run_distributed(_train_with_a_failure, 2, place, zero3, "gpt", False, False, "blocks")[0]
    assert_same_training(got, _reference("gpt"))


@pytest.mark.parametrize("zero3", [True, False], ids=["z3", "z2"])
@pytest.mark.parametrize("place", ["forward_deep_inside_a_block", "backward_deep_inside_a_block"])
def test_explicit_reset(place: str, zero3: bool) -> None:
    """`reset(model)` brings everything to rest at once; without it the next forward does."""
    got = run_distributed(_train_with_a_failure, 2, place, zero3, "gpt", True, False, "blocks")[0]
    assert_same_training(got, _reference("gpt"))


@pytest.mark.parametrize("zero3", [True, False], ids=["z3", "z2"])
@pytest.mark.parametrize("place", ["forward_deep_inside_a_block", "backward_deep_inside_a_block"])
def test_a_failure_in_an_accumulation_window(place: str, zero3: bool) -> None:
    got = run_distributed(_train_with_a_failure, 2, place, zero3, "gpt", False, True, "blocks")[0]
    assert_same_training(got, _reference("gpt"))


@pytest.mark.parametrize("model", ["outside_nonreentrant", "outside_reentrant", "inside_nonreentrant", "twice"])
@pytest.mark.parametrize("place", ["forward_deep_inside_a_block", "backward_deep_inside_a_block"])
def test_a_failure_under_checkpointing_and_reuse(model: str, place: str) -> None:
    got = run_distributed(_train_with_a_failure, 2, place, True, model, False, False, "blocks")[0]
    assert_same_training(got, _reference(model))


def _recomputation_fails(zero3: bool) -> Training | None:
    """The forward passes and its recomputation in backward raises."""
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    model, fuse = MODELS["outside_nonreentrant"](), Fuse()
    dedicate(model, zero3=zero3)
    model.blocks[1].mlp.down.register_forward_pre_hook(fuse.check)
    optimizer, result = make_muon(model), Training()
    for step in range(STEPS):
        loss = Rows("outside_nonreentrant", step, 0, rank, world).loss(model)
        fuse.armed = step == FAILING_STEP
        try:
            loss.backward()
        except Bomb:
            assert step == FAILING_STEP
            optimizer.zero_grad()
            continue
        finally:
            fuse.armed = False
        result.losses.append(mean_over_ranks(loss.item()))
        result.grads.append(full_grads(model))
        optimizer.step()
        optimizer.zero_grad()
    result.weights = full_weights(model)
    return result if rank == 0 else None


@pytest.mark.parametrize("zero3", [True, False], ids=["z3", "z2"])
def test_a_recomputation_that_raises(zero3: bool) -> None:
    assert_same_training(run_distributed(_recomputation_fails, 2, zero3)[0], _reference("outside_nonreentrant"))


def _dropped(how: str, zero3: bool) -> Training | None:
    """Steps that never reach the optimizer: a forward without backward, a backward then zero_grad, an open window."""
    import dmuon_core

    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    model = MODELS["gpt"]()
    handle = dedicate(model, zero3=zero3)
    optimizer, result = make_muon(model), Training()
    for step in range(STEPS):
        rows = Rows("gpt", step, 0, rank, world)
        if step == FAILING_STEP:
            if how == "no_backward":
                rows.loss(model)
            elif how == "evaluation_raises":
                with torch.no_grad():
                    fuse = Fuse()
                    removable = model.blocks[1].mlp.down.register_forward_pre_hook(fuse.check)
                    _failing_step(model, rows, fuse)
                    removable.remove()
            elif how == "step_skipped":
                rows.loss(model).backward()
            elif how == "window_left_open":
                with dmuon_core.no_sync(model):
                    rows.loss(model).backward()
            optimizer.zero_grad()
            continue
        loss = rows.loss(model)
        loss.backward()
        result.losses.append(mean_over_ranks(loss.item()))
        result.grads.append(full_grads(model))
        optimizer.step()
        optimizer.zero_grad()
        assert_at_rest(handle)
    result.weights = full_weights(model)
    return result if rank == 0 else None


@pytest.mark.parametrize("zero3", [True, False], ids=["z3", "z2"])
@pytest.mark.parametrize("how", ["no_backward", "evaluation_raises", "step_skipped", "window_left_open"])
def test_a_step_that_never_happened_leaves_nothing_behind(how: str, zero3: bool) -> None:
    assert_same_training(run_distributed(_dropped, 2, how, zero3)[0], _reference("gpt"))
