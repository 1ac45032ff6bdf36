"""A fit on 1, 2 and 4 processes equals the stock Trainer's fit in one process, float32, equal global batches."""

from __future__ import annotations

from functools import cache

import pytest

from tests.distributed.harness import run_distributed
from tests.lightning.runs import (
    Fit,
    Fitted,
    assert_close,
    differences,
    fit,
    fit_in_one_process,
    matrices_and_turn,
)

FITS = {
    "plain": Fit(),
    "norm clipped": Fit(trainer={"gradient_clip_val": 0.5}),
    "value clipped": Fit(trainer={"gradient_clip_val": 0.002, "gradient_clip_algorithm": "value"}),
    "validated in between": Fit(trainer={"val_check_interval": 2}, epochs=1, validate=True),
    "validated in an open window": Fit(
        trainer={"val_check_interval": 1, "accumulate_grad_batches": 2}, epochs=2, validate=True
    ),
    "AdamW alone": Fit(optimizers="adamw"),
    "owned matrix on the LightningModule": Fit(
        "MixedNet", "also_turn", strategy={"predicate": matrices_and_turn}, epochs=1
    ),
    "accumulated": Fit(trainer={"accumulate_grad_batches": 2}, epochs=4),
    "open window": Fit(trainer={"accumulate_grad_batches": 3, "gradient_clip_val": 0.5}, epochs=3),
    "scheduled": Fit(optimizers="step_decay"),
    "submodules used directly": Fit("SubmodulesNet"),
    "called twice, then a direct parameter": Fit("MixedNet", epochs=1),
    "a matrix that one rank uses": Fit("OneRankNet", hands=2),
    "built in configure_model": Fit("LateNet", epochs=1),
    "manual": Fit("ManualNet"),
    "manual, two optimizers": Fit("ManualNet", "two_optimizers"),
    "manual, two steps": Fit("TwoStepsNet", epochs=1),
    "Z2": Fit(strategy={"reshard_after_forward": False}),
    "Z2, validated in an open window": Fit(
        trainer={"val_check_interval": 1, "accumulate_grad_batches": 2},
        strategy={"reshard_after_forward": False},
        epochs=2,
        validate=True,
    ),
    "Z2, manual, two steps": Fit("TwoStepsNet", strategy={"reshard_after_forward": False}, epochs=1),
}


@cache
def _reference(name: str) -> Fitted:
    return run_distributed(fit_in_one_process, 1, FITS[name], init=False)[0]


def _check(name: str, world: int, *, init: bool = True) -> Fitted:
    want = _reference(name)
    results = run_distributed(fit, world, FITS[name], init=init)
    for result in results:
        assert_close(result, want)
        assert result.metrics.keys() == want.metrics.keys()
        if "val_loss" in want.metrics:
            assert result.metrics["val_loss"] == pytest.approx(want.metrics["val_loss"], abs=1e-6)
    return results[0]


@pytest.mark.parametrize("name", FITS)
def test_two_processes_equal_one(name: str) -> None:
    _check(name, 2)


@pytest.mark.parametrize("name", ["plain", "open window"])
def test_four_processes_equal_one(name: str) -> None:
    _check(name, 4)


@pytest.mark.slow
@pytest.mark.parametrize(
    "name", [name for name in FITS if name not in ("plain", "open window") and FITS[name].hands == 1]
)
def test_four_processes_equal_one_everywhere(name: str) -> None:
    _check(name, 4)


@pytest.mark.parametrize("name", ["plain", "open window", "manual, two optimizers"])
def test_one_device_equals_the_stock_trainer(name: str) -> None:
    _check(name, 1, init=False)


def test_the_comparison_would_notice() -> None:
    """What should differ does, by far more than the tolerance. (Muon and AdamW hardly feel a scale of the gradient.)"""
    plain = _reference("plain")
    for name in ("norm clipped", "value clipped"):
        assert max(dict(differences(plain.grads, _reference(name).grads)).values()) > 1e-3
    for name in ("norm clipped", "value clipped", "scheduled"):
        assert max(dict(differences(plain.weights, _reference(name).weights)).values()) > 1e-4


@pytest.mark.parametrize("window", [1, 2, 4])
def test_a_window_communicates_gradients_once(window: int) -> None:
    trainer = {"accumulate_grad_batches": window}
    got = run_distributed(fit, 2, Fit(trainer=trainer, epochs=2))
    once = run_distributed(fit, 2, Fit(trainer={"max_steps": 1}, epochs=1))
    steps = 8 // window
    for result, single in zip(got, once, strict=True):
        assert single.stats["reduces"] > 0
        for name in ("reduces", "reduce_bytes", "flag_reduces"):
            assert result.stats[name] == steps * single.stats[name], name
        assert result.stats["broadcasts"] > 4 * single.stats["broadcasts"]
