"""What a user may get wrong: an error on every rank that says what to do."""

from __future__ import annotations

from typing import Any

import pytest

from dmuon_lightning import DMuonStrategy
from tests.distributed.harness import expect_errors
from tests.lightning import modules
from tests.lightning.runs import adamw, make_trainer, muon


def _fit(kind: str, optimizers: Any = muon, **strategy: Any) -> None:
    module = getattr(modules, kind)(optimizers)
    make_trainer(DMuonStrategy(**strategy), max_epochs=1).fit(module, modules.loader())


def _nothing(name: str, p: Any) -> bool:
    return False


@pytest.mark.parametrize("kind", ["ShardedByUserNet", "DedicatedByUserNet"])
def test_configure_model_that_shards(kind: str) -> None:
    for error in expect_errors(_fit, 2, kind):
        assert error.type == "ValueError"
        assert "is sharded already" in error
        assert "'blocks.0" in error or "'mix.weight'" in error
        assert "configure_model" in error


@pytest.mark.parametrize("optimizers", [muon, adamw])
def test_optimizer_from_before_sharding(optimizers: Any) -> None:
    for error in expect_errors(_fit, 2, "EarlyOptimizerNet", optimizers):
        assert error.type == "RuntimeError"
        assert "from before dedicate_params" in error
        assert "build the optimizer after" in error


def _sharded_parameters_only(model: Any) -> Any:
    return adamw(model.embed)


def test_optimizer_of_sharded_parameters_from_before_sharding() -> None:
    for error in expect_errors(_fit, 2, "EarlyOptimizerNet", _sharded_parameters_only):
        assert error.type == "RuntimeError"
        assert "'embed.weight'" in error


def test_predicate_that_matches_nothing() -> None:
    for error in expect_errors(_fit, 2, "Net", predicate=_nothing):
        assert error.type == "ValueError"
        assert "matches no parameter of Net" in error
