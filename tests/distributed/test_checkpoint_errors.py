"""A checkpoint that does not fit is an error on every rank, with the differences and a remedy; nothing is loaded."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)

from dmuon_core import Muon, OwnedTensor
from tests.distributed.checkpoints import Run, assert_same
from tests.distributed.harness import run_distributed
from tests.distributed.models import MODELS

UP, EMBEDDING, MODEL = "blocks.1.mlp.up.weight", "tok_emb.weight", "gpt_two_layers"
EVERYWHERE = StateDictOptions(full_state_dict=True)
FROM_RANK_0 = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)


def _refused(load: Callable[[], Any], kind: str, *texts: str) -> None:
    """On every rank, with the same message. Collective, and the ranks go on together afterwards."""
    try:
        load()
    except (Exception, CheckpointException) as error:
        found, message = type(error).__name__, str(error)
    else:
        raise AssertionError("it was loaded")
    assert found == kind, message
    missing = [text for text in texts if text not in message]
    assert not missing, f"{missing} not in {message}"
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, message)
    if kind != "CheckpointException":  # torch's own shows the ranks in any order
        assert len(set(everyone)) == 1


def _without(name: str) -> Callable[[dict[str, Tensor]], None]:
    return lambda state: state.__delitem__(name)


def _put(name: str, *shape: int) -> Callable[[dict[str, Tensor]], None]:
    return lambda state: state.update({name: torch.zeros(shape)})


WEIGHTS: dict[str, tuple[Callable[[dict[str, Tensor]], None], str]] = {
    "owned weight missing": (_without(UP), f"missing are '{UP}'"),
    "sharded weight missing": (_without(EMBEDDING), f"missing are '{EMBEDDING}'"),
    "weight of another model": (_put("other.weight", 3), "not in the model are 'other.weight'"),
    "owned shape": (_put(UP, 16, 10), f"'{UP}' (saved (16, 10), in the model (17, 10))"),
    "owned shape that broadcasts": (_put(UP, 1, 10), f"'{UP}' (saved (1, 10), in the model (17, 10))"),
    "sharded shape": (_put(EMBEDDING, 12, 10), f"'{EMBEDDING}' (saved (12, 10), in the model (13, 10))"),
    "sharded shape that broadcasts": (_put(EMBEDDING, 1, 10), f"'{EMBEDDING}' (saved (1, 10)"),
}


def _weights() -> None:
    run = Run(model=MODEL)
    before = run.tensors()
    for spoil, text in WEIGHTS.values():
        for options in (EVERYWHERE, FROM_RANK_0):
            state = MODELS[MODEL]().state_dict()
            spoil(state)
            if options is FROM_RANK_0 and dist.get_rank() != 0:
                state = {}
            _refused(
                lambda state=state, options=options: set_model_state_dict(run.model, state, options=options),
                "RuntimeError", text, "FSDPGPT", "Nothing was loaded", "strict=False",
            )  # fmt: skip
            assert_same(run.tensors(), before)
    # Not strict: what both have, and still no other shape.
    state = MODELS[MODEL]().state_dict()
    del state[UP]
    state["other.weight"] = torch.zeros(3)
    loose = StateDictOptions(full_state_dict=True, strict=False)
    set_model_state_dict(run.model, dict(state), options=loose)
    after = run.tensors()
    assert torch.equal(after[UP], before[UP]) and torch.equal(after[EMBEDDING], state[EMBEDDING])
    state[EMBEDDING] = torch.zeros(1, 10)
    _refused(lambda: set_model_state_dict(run.model, state, options=loose), "RuntimeError", EMBEDDING)


def _many_differences() -> None:
    """The first ones are listed, the others counted."""
    run = Run(model=MODEL)
    state = MODELS["gpt"]().state_dict()
    load = lambda: set_model_state_dict(run.model, state, options=EVERYWHERE)  # noqa: E731
    _refused(load, "RuntimeError", "not in the model are 'blocks.2.norm1.weight'", "and 8 more")


def _optimizer(run: Run, groups: str) -> Muon:
    named = list(run.model.named_parameters())
    owned = [(name, p) for name, p in named if isinstance(p, OwnedTensor)]
    rest = [(name, p) for name, p in named if not isinstance(p, OwnedTensor)]
    adamw = {"params": rest, "algorithm": "adamw"}
    return {
        "as saved": lambda: Muon([{"params": owned}, adamw]),
        "in another order": lambda: Muon([adamw, {"params": owned}]),
        "one more": lambda: Muon([{"params": owned[:4]}, {"params": owned[4:]}, adamw]),
        "one moved": lambda: Muon([{"params": owned[1:]}, {**adamw, "params": [*rest, owned[0]]}]),
        "one left out": lambda: Muon([{"params": owned[1:]}, adamw]),
        "all AdamW": lambda: Muon([{**adamw, "params": owned}, adamw]),
    }[groups]()


FIRST = "blocks.0.attn.q.weight"
GROUPS: dict[str, list[str]] = {
    "one more": ["'blocks.0.mlp.up.weight' was saved in one group with", "now in group 1"],
    "one moved": [f"'{FIRST}' of parameter group 1 was saved in group 0"],
    "one left out": [f"'{FIRST}' was saved in one group with", "not trained by this optimizer"],
    "all AdamW": [f"the group of '{FIRST}' uses 'adamw'", "a group that uses 'muon'"],
}


def _groups() -> None:
    run = Run(model=MODEL)
    run.optimizer = _optimizer(run, "as saved")
    run.train(range(1))
    want = run.tensors()
    saved = get_optimizer_state_dict(run.model, run.optimizer, options=EVERYWHERE)
    other = Run(model=MODEL, seed=3)
    for groups, texts in GROUPS.items():
        other.optimizer = _optimizer(other, groups)
        before = other.tensors()
        for options in (EVERYWHERE, FROM_RANK_0):
            state = copy.deepcopy(saved) if options is EVERYWHERE or dist.get_rank() == 0 else {}
            _refused(
                lambda state=state, options=options: set_optimizer_state_dict(
                    other.model, other.optimizer, state, options=options
                ),
                "ValueError", *texts, "Nothing of the optimizer was loaded", "strict=False",
            )  # fmt: skip
            after = other.tensors()
            assert_same({name: after[name] for name in before}, before)
    other.optimizer = _optimizer(other, "in another order")
    set_optimizer_state_dict(other.model, other.optimizer, copy.deepcopy(saved), options=EVERYWHERE)
    set_model_state_dict(other.model, get_model_state_dict(run.model))
    assert_same(other.tensors(), want)

    # A moment of another shape, and one that is missing.
    for spoil, text in [
        (lambda state: state[UP].update(momentum_buffer=torch.zeros(1, 10)), f"'momentum_buffer' of '{UP}'"),
        (lambda state: state[EMBEDDING].update(exp_avg=torch.zeros(12, 10)), f"'exp_avg' of '{EMBEDDING}'"),
        (lambda state: state[EMBEDDING].pop("exp_avg"), f"of the state of '{EMBEDDING}' is missing: exp_avg"),
        (lambda state: state.pop(UP), f"of the state of '{UP}' is missing: momentum_buffer"),
    ]:
        state = copy.deepcopy(saved)
        spoil(state["state"])
        _refused(
            lambda state=state: set_optimizer_state_dict(other.model, other.optimizer, state, options=EVERYWHERE),
            "ValueError", text,
        )  # fmt: skip


def _groups_by_position() -> None:
    """An optimizer's own state_dict: by number, size and names of the groups."""
    run = Run(model=MODEL)
    run.optimizer = _optimizer(run, "as saved")
    run.train(range(1))
    saved = run.optimizer.state_dict()
    for groups, texts in {
        "one more": ["2 parameter groups", "this optimizer 3", "same groups"],
        "one left out": ["group 0 was saved with 12 parameters and has 11", f"'{FIRST}' only in the loaded state"],
        "in another order": ["group 0"],
    }.items():
        optimizer = _optimizer(run, groups)
        _refused(lambda optimizer=optimizer: optimizer.load_state_dict(saved), "ValueError", *texts)
    renamed = copy.deepcopy(saved)
    names = renamed["param_groups"][0]["param_names"]
    names[0], names[1] = names[1], names[0]
    optimizer = _optimizer(run, "as saved")
    _refused(lambda: optimizer.load_state_dict(renamed), "ValueError", f"'{FIRST}'", "other parameters", "by position")


def _folders(path: str) -> None:
    """torch reads nothing where something is missing or of another shape, and says so on every rank."""
    run = Run(model=MODEL)
    run.train(range(1))
    run.save_folder(path)
    for model, text in (("gpt", "blocks.2"), ("wide", "Size mismatch"), ("float", "blocks.0.norm.weight")):
        other = Run(model=model)
        before = other.tensors()
        state = other.state()
        _refused(lambda state=state: dcp.load(state, checkpoint_id=path), "CheckpointException", text)
        after = other.tensors()
        assert_same({name: after[name] for name in before}, before)


def _all(folder: str) -> None:
    _weights()
    _many_differences()
    _groups()
    _groups_by_position()
    _folders(f"{folder}/saved")


def test_what_does_not_fit_is_refused_on_every_rank(tmp_path: Any) -> None:
    run_distributed(_all, 2, str(tmp_path))
