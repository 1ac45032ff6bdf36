"""DMuonStrategy(replicate_size=R) on four processes: the numbers of one process, exact resume, what samplers see."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader

from dmuon_lightning import DMuonStrategy
from tests.distributed.harness import expect_errors, run_distributed
from tests.lightning import modules
from tests.lightning.runs import (
    LOSS_ATOL,
    WEIGHT_ATOL,
    Fit,
    Fitted,
    assert_close,
    assert_equal,
    assert_tensors_close,
    fit,
    fit_in_one_process,
    make_trainer,
    muon,
)
from tests.lightning.test_checkpoint import FIT, FOLDER, _resume, _saved

OPEN_WINDOW = {"trainer": {"accumulate_grad_batches": 3, "gradient_clip_val": 0.5}, "epochs": 3}
VALIDATED = {"trainer": {"val_check_interval": 2}, "epochs": 1, "validate": True}


@cache
def _reference(name: str) -> Fitted:
    recipe = Fit(**{"open window": OPEN_WINDOW, "validated": VALIDATED}[name])
    return run_distributed(fit_in_one_process, 1, recipe, init=False)[0]


@pytest.mark.parametrize(
    ("name", "strategy"),
    [
        ("validated", {"replicate_size": 2}),
        ("open window", {"replicate_size": 2}),
        ("validated", {"replicate_size": 2, "reshard_after_forward": False, "replicate_async": False}),
        pytest.param("validated", {"replicate_size": 4}, marks=pytest.mark.slow),
        pytest.param("open window", {"replicate_size": 4, "reshard_after_forward": False}, marks=pytest.mark.slow),
    ],
)
def test_four_processes_equal_one(name: str, strategy: dict[str, Any]) -> None:
    want = _reference(name)
    recipe = Fit(**{**(OPEN_WINDOW if name == "open window" else VALIDATED), "strategy": strategy})
    for got in run_distributed(fit, 4, recipe):
        assert_close(got, want)
        assert got.metrics.keys() == want.metrics.keys()
        for metric in want.metrics.keys() - {"train_loss"}:  # the last batch of each rank
            assert got.metrics[metric] == pytest.approx(want.metrics[metric], abs=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize("recipe", [FIT, FOLDER], ids=["file", "folder"])
def test_resume_is_exact(recipe: Fit, tmp_path: Path) -> None:
    recipe = replace(recipe, strategy={**recipe.strategy, "replicate_size": 2})
    whole = run_distributed(fit, 4, recipe)[0]
    half, path = _saved(recipe, 4, tmp_path)
    for resumed, start in run_distributed(_resume, 4, recipe, path):
        assert_equal(start["weights"], half.weights)
        assert_equal(start["state"], half.state)
        assert half.losses + resumed.losses == whole.losses
        assert_equal(resumed.weights, whole.weights)
        assert_equal(resumed.state, whole.state)


@pytest.mark.slow
@pytest.mark.parametrize(("recipe", "after"), [(FIT, 2), (FOLDER, 1), (FOLDER, 4)])
def test_resume_in_another_layout(recipe: Fit, after: int, tmp_path: Path) -> None:
    """From 2 replicas x 2 shards to one replica over ``after`` shards, momentum included, and back."""
    replicated = replace(recipe, strategy={**recipe.strategy, "replicate_size": 2})
    (tmp_path / "a").mkdir()
    half, path = _saved(replicated, 4, tmp_path / "a")
    expected = run_distributed(_resume, 4, replicated, path)[0][0]
    for resumed, start in run_distributed(_resume, after, recipe, path):
        assert_equal(start["weights"], half.weights)
        assert_equal(start["state"], half.state)
        assert resumed.losses == pytest.approx(expected.losses, abs=LOSS_ATOL)
        assert_tensors_close(resumed.weights, expected.weights, WEIGHT_ATOL)
    half, path = _saved(recipe, after, tmp_path / "b")
    for resumed, start in run_distributed(_resume, 4, replicated, path):
        assert_equal(start["weights"], half.weights)
        assert_equal(start["state"], half.state)
        assert resumed.losses == pytest.approx(expected.losses, abs=LOSS_ATOL)


class _SeenNet(modules.Net):
    """Remembers the rows that this rank trained on."""

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        self.seen = [*getattr(self, "seen", []), *batch[0].tolist()]
        return super().training_step(batch, batch_idx)


def _sampled() -> dict[str, Any]:
    module = _SeenNet(muon)
    strategy = DMuonStrategy(replicate_size=2)
    trainer = make_trainer(strategy, max_epochs=1, use_distributed_sampler=True)
    trainer.fit(module, DataLoader(modules.dataset(), batch_size=2, shuffle=False))
    return {
        "sampler": dict(strategy.distributed_sampler_kwargs),
        "mesh": (strategy.device_mesh.mesh_dim_names, tuple(strategy.device_mesh.shape)),
        "same": module.device_mesh is strategy.device_mesh,
        "seen": module.seen,
        "world": trainer.world_size,
    }


def test_samplers_see_all_data_ranks() -> None:
    """Every row is trained on once, by one of the four ranks."""
    results = run_distributed(_sampled, 4)
    for rank, result in enumerate(results):
        assert result["sampler"] == {"num_replicas": 4, "rank": rank}
        assert result["mesh"] == (("replicate", "shard"), (2, 2))
        assert result["same"]
        assert result["world"] == 4
    seen = [row for result in results for row in result["seen"]]
    assert sorted(seen) == sorted(modules.dataset().tensors[0].tolist())


@pytest.mark.parametrize("window", [1, 4])
def test_a_window_communicates_gradients_once(window: int) -> None:
    strategy, trainer = {"replicate_size": 2}, {"accumulate_grad_batches": window}
    got = run_distributed(fit, 4, Fit(trainer=trainer, strategy=strategy))
    once = run_distributed(fit, 4, Fit(trainer={"max_steps": 1}, strategy=strategy, epochs=1))
    steps = 8 // window
    for result, single in zip(got, once, strict=True):
        assert single.stats["replicate_reduces"] > 0
        for name in ("reduces", "reduce_bytes", "replicate_reduces", "replicate_reduce_bytes", "flag_reduces"):
            assert result.stats[name] == steps * single.stats[name], name


def _fit_with(replicate_size: int) -> None:
    make_trainer(DMuonStrategy(replicate_size=replicate_size), max_epochs=1).fit(modules.Net(muon), modules.loader())


def test_a_size_that_does_not_fit() -> None:
    for error in expect_errors(_fit_with, 4, 3):
        assert error.type == "MisconfigurationException"
        assert "replicate_size=3" in error
        assert "number of processes, 4" in error
        assert "divisor" in error
    with pytest.raises(ValueError, match=r"replicate_size=0.*1 or more"):
        DMuonStrategy(replicate_size=0)
