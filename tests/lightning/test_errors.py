"""What a user may get wrong: an error on every rank that says what to do."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh

from dmuon_lightning import DMuonStrategy
from dmuon_lightning.checkpoint import read_file
from dmuon_lightning.checkpoint_folder import _read_metadata
from dmuon_lightning.settings import Settings
from dmuon_lightning.sharding import shard_module
from tests.distributed.harness import expect_errors
from tests.lightning import modules
from tests.lightning.runs import adamw, make_trainer, muon


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


def test_a_damaged_file_is_named(tmp_path: Path) -> None:
    path = tmp_path / "last.ckpt"
    torch.save({"state_dict": {"weight": torch.ones(500)}}, path)
    path.write_bytes(path.read_bytes()[:700])
    for options in ({}, {"mmap": True}):
        with pytest.raises(RuntimeError, match=r"last\.ckpt cannot be read .* load the checkpoint before it"):
            read_file(path, weights_only=True, **options)
    with pytest.raises(FileNotFoundError):
        read_file(tmp_path / "none.ckpt")
    (tmp_path / ".metadata").touch()
    with pytest.raises(RuntimeError, match=r"\.metadata cannot be read \(EOFError.* load the checkpoint before it"):
        _read_metadata(tmp_path)


def _second_strategy() -> None:
    module = modules.Net(adamw)
    shard_module(module, init_device_mesh("cpu", (2,)), Settings(predicate=lambda name, p: name == "mix.weight"))
    shard_module(module, init_device_mesh("cpu", (2,)), Settings())  # functions are not compared
    shard_module(module, init_device_mesh("cpu", (2,)), Settings(reshard_after_forward=False))


def test_a_second_strategy_with_other_arguments_is_refused() -> None:
    for error in expect_errors(_second_strategy, 2):
        assert error.type == "MisconfigurationException"
        assert "reshard_after_forward=True" in error and "now says reshard_after_forward=False" in error
