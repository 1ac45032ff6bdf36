"""save_state and load_state, sharded and full, into other numbers of processes; the weights that save_model writes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from tests.accelerate.runs import Setup, build, difference, forget_accelerator, steps
from tests.accelerate.test_training import check
from tests.distributed.harness import run_distributed
from tests.distributed.reference import Recipe, Training, full_state, full_weights, train_reference

# Saved by the first in the middle, loaded by the others.
FORMATS = {"sharded": "SHARDED_STATE_DICT", "full": "FULL_STATE_DICT"}
HALF, WHOLE = Recipe(steps=2, max_norm=0.5), Recipe(steps=4, max_norm=0.5)


def _save(folder: str) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, kind in FORMATS.items():
        forget_accelerator()
        accelerator, model, optimizer = build(HALF, Setup(plugin={"state_dict_type": kind}))
        accelerator.save_state(f"{folder}/{name}/before")  # nothing was stepped yet
        steps(accelerator, model, optimizer, HALF)
        accelerator.save_state(f"{folder}/{name}/half")
        found[name] = (full_weights(model), full_state(model, optimizer))
    accelerator.save_model(model, f"{folder}/model")
    state = accelerator.get_state_dict(model)
    found["get_state_dict"] = dict(state) if accelerator.is_main_process else None
    found["unwrapped"] = accelerator.unwrap_model(model) is model
    return found


def _resume(folder: str, replicas: int, optimizer: str = "muon") -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, kind in FORMATS.items():
        forget_accelerator()
        # Other weights than those that were saved.
        setup = Setup(plugin={"state_dict_type": kind}, replicas=replicas, optimizer=optimizer)
        accelerator, model, optimizer_ = build(Recipe(seed=5), setup)
        accelerator.load_state(f"{folder}/{name}/half")
        loaded = (full_weights(model), full_state(model, optimizer_))
        rest = steps(accelerator, model, optimizer_, WHOLE, first=2)
        accelerator.load_state(f"{folder}/{name}/before")
        again = steps(accelerator, model, optimizer_, WHOLE)
        found[name] = (loaded, rest, again)
    return found


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, list[dict[str, Any]]]:
    folder = str(tmp_path_factory.mktemp("states"))
    return folder, run_distributed(_save, 2, folder)


@pytest.mark.parametrize(("world", "replicas"), [(2, 1), pytest.param(4, 2, marks=pytest.mark.slow)])
def test_state_continues_as_if_never_interrupted(
    saved: tuple[str, list[dict[str, Any]]], world: int, replicas: int
) -> None:
    want = train_reference(WHOLE)
    for ranks in run_distributed(_resume, world, saved[0], replicas):
        for name in FORMATS:
            (weights, state), rest, again = ranks[name]
            assert difference(weights, saved[1][0][name][0]) == 0
            assert difference(state, saved[1][0][name][1]) == 0
            later = Training(want.losses[2:], want.grads[2:], want.norms[2:], weights=want.weights)
            check(name, rest, later)
            check(name, again, want)


def test_saved_models_are_whole(saved: tuple[str, list[dict[str, Any]]]) -> None:
    folder, ranks = saved
    weights = ranks[0]["full"][0]
    assert ranks[0]["unwrapped"]
    assert difference(ranks[0]["get_state_dict"], weights) == 0
    assert all(type(value) is torch.Tensor for value in ranks[0]["get_state_dict"].values())
    assert difference(load_file(f"{folder}/model/model.safetensors"), weights) == 0


def test_merged_weights_are_whole(
    saved: tuple[str, list[dict[str, Any]]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By `accelerate merge-weights`, in this process. (The program `accelerate` imports what has no part in it.)"""
    from accelerate.commands.merge import main

    folder, ranks = saved
    shards = f"{folder}/sharded/half/pytorch_model_fsdp_0"
    monkeypatch.setattr("sys.argv", ["merge-weights", shards, str(tmp_path)])
    main()
    assert difference(load_file(tmp_path / "model.safetensors"), ranks[0]["sharded"][0]) == 0
