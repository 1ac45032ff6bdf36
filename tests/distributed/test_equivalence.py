"""Training with owned matrices equals training in one process without this library.

The global batch is the same whatever the number of processes; every rank sees other rows of it. Default targets and
boundaries, float32, Newton-Schulz in float32, 20 steps.

Tolerances: loss 1e-6 and weights 1e-5 are the promise of the project. The same reference split into 2 or 4 partial
batches in one process, which only changes the order of sums, differs from itself by 6e-7 and 1.4e-6, so a promise
much tighter would be one about rounding.
"""

from __future__ import annotations

import functools

import pytest
import torch
import torch.distributed as dist

from tests.distributed.harness import run_distributed
from tests.distributed.models import MODELS, hidden_matrix, plain_name
from tests.distributed.reference import (
    GRAD_ATOL,
    Recipe,
    Rows,
    Training,
    assert_identical,
    assert_same_training,
    dedicate,
    full,
    full_grads,
    make_muon,
    train_dmuon,
    train_reference,
)

STEPS = 20
WINDOWS = {
    "plain": {},
    # Below the norm of every step's gradient, which the test asserts: each step is clipped.
    "clip": {"max_norm": 0.2},
    "accumulate": {"accumulate": 2},
    "accumulate_no_sync": {"accumulate": 2, "no_sync": "ours"},
    "clip_accumulate_fsdp_sync": {"accumulate": 2, "no_sync": "fsdp", "max_norm": 0.2},
}
RUNS = [(2, window) for window in WINDOWS] + [
    (world, window) for world in (1, 4) for window in ("plain", "clip_accumulate_fsdp_sync")
]


def _recipe(window: str, zero3: bool, steps: int = STEPS) -> Recipe:
    return Recipe(steps=steps, zero3=zero3, default_targets=True, **WINDOWS[window])


@functools.cache
def _reference(window: str) -> Training:
    return train_reference(_recipe(window, True))


@functools.cache
def _on_ranks(world: int, window: str, zero3: bool) -> Training:
    return run_distributed(train_dmuon, world, _recipe(window, zero3))[0]


@pytest.mark.parametrize("zero3", [True, False], ids=["z3", "z2"])
@pytest.mark.parametrize(("world", "window"), RUNS)
def test_equals_one_process_without_the_library(world: int, window: str, zero3: bool) -> None:
    reference = _reference(window)
    if "clip" in window:
        assert all(norm > 0.2 for norm in reference.norms), "nothing was clipped, so the test would show nothing"
    got = _on_ranks(world, window, zero3)
    assert len(got.losses) == STEPS
    assert_same_training(got, reference)


@pytest.mark.parametrize(("world", "window"), RUNS)
def test_z2_and_z3_are_bit_identical(world: int, window: str) -> None:
    assert_identical(_on_ranks(world, window, False), _on_ranks(world, window, True))


@pytest.mark.parametrize("zero3", [True, False], ids=["z3", "z2"])
def test_one_process_without_a_distributed_launch(zero3: bool) -> None:
    """No process group, no fully_shard: `python train.py`."""
    recipe = Recipe(steps=STEPS, zero3=zero3, default_targets=True, shard="none", max_norm=0.2)
    assert_same_training(run_distributed(train_dmuon, 1, recipe, init=False)[0], _reference("clip"))


def test_the_reference_would_notice_a_missing_reduce() -> None:
    """The comparison itself: gradients of one rank's rows are far outside the tolerance from the mean of all."""
    recipe = Recipe(steps=1)
    whole = train_reference(recipe)
    torch.manual_seed(0)
    model = MODELS["gpt"]()
    Rows("gpt", 0, 0, 0, 2).loss(model).backward()
    for name, p in model.named_parameters():
        expected = whole.grads[0][name]
        assert p.grad is not None and expected is not None
        assert (p.grad - expected).abs().max() > 1000 * GRAD_ATOL, name


def _compare_updates_with_stock(nesterov: bool, adjust_lr_fn: str | None, weight_decay: float) -> list[str]:
    """Three steps on two ranks, and stock optimizers fed the very same gradients; the names that differ in any bit."""
    torch.manual_seed(3)
    model = MODELS["gpt"]()
    dedicate(model)
    names = {plain_name(name): p for name, p in model.named_parameters()}
    copies = {name: torch.nn.Parameter(full(p)) for name, p in names.items()}
    options = dict(lr=0.02, weight_decay=weight_decay, momentum=0.9, nesterov=nesterov, adjust_lr_fn=adjust_lr_fn)
    adamw = dict(lr=1e-2, betas=(0.8, 0.95), eps=1e-7, weight_decay=weight_decay)
    ours = make_muon(
        model, ns_dtype=torch.bfloat16, **options, **{f"adamw_{name}": value for name, value in adamw.items()}
    )
    matrices = [p for name, p in copies.items() if hidden_matrix(name, p)]
    shapes = {tuple(p.shape) for p in matrices}
    assert {(10, 10), (17, 10), (10, 17)} <= shapes  # square, tall and wide
    others = [p for name, p in copies.items() if not hidden_matrix(name, p)]
    stock = [torch.optim.Muon(matrices, **options), torch.optim.AdamW(others, **adamw)]
    wrong = []
    for step in range(3):
        Rows("gpt", step, 0, dist.get_rank(), dist.get_world_size()).loss(model).backward()
        for name, grad in full_grads(model).items():
            copies[name].grad = grad
        ours.step()
        ours.zero_grad()
        for optimizer in stock:
            optimizer.step()
        wrong += [f"{name} at step {step}" for name, p in names.items() if not torch.equal(full(p), copies[name])]
    return wrong


@pytest.mark.parametrize("nesterov", [True, False])
@pytest.mark.parametrize("adjust_lr_fn", [None, "original", "match_rms_adamw"])
def test_updates_equal_the_stock_optimizers_bit_for_bit(nesterov: bool, adjust_lr_fn: str | None) -> None:
    """bfloat16 Newton-Schulz, wide, tall and square matrices; zero weight decay is a value, not a default."""
    decay = 0.0 if adjust_lr_fn is None else 0.1
    for wrong in run_distributed(_compare_updates_with_stock, 2, nesterov, adjust_lr_fn, decay):
        assert wrong == []
