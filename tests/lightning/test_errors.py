"""What a user may get wrong: an error on every rank that says what to do."""

from __future__ import annotations

from typing import Any

from dmuon_lightning import DMuonStrategy
from tests.distributed.harness import expect_errors
from tests.lightning import modules
from tests.lightning.runs import make_trainer, muon


def _fit(kind: str, optimizers: Any = muon, **strategy: Any) -> None:
    module = getattr(modules, kind)(optimizers)
    make_trainer(DMuonStrategy(**strategy), max_epochs=1).fit(module, modules.loader())


def _nothing(name: str, p: Any) -> bool:
    return False


def test_configure_model_that_dedicates() -> None:
    for error in expect_errors(_fit, 2, "DedicatedByUserNet"):
        assert error.type == "ValueError"
        assert "is sharded already" in error
        assert "'blocks.0" in error or "'mix.weight'" in error
        assert "configure_model" in error


def test_predicate_that_matches_nothing() -> None:
    for error in expect_errors(_fit, 2, "Net", predicate=_nothing):
        assert error.type == "ValueError"
        assert "matches no parameter of Net" in error
