"""Every documented option of torch's tools, what is in a checkpoint, and what others wrote."""

from __future__ import annotations

import copy
import io
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.nn as nn
from torch import Tensor
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    get_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
    set_state_dict,
)
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor

from dmuon_core import Muon, OwnedTensor
from tests.distributed.checkpoints import Layout, Run, assert_same
from tests.distributed.harness import run_distributed
from tests.distributed.models import GPT, MODELS
from tests.distributed.reference import ADAMW, Rows, full_state, full_weights

UP, EMBEDDING = "blocks.1.mlp.up.weight", "tok_emb.weight"


class BufferGPT(GPT):
    """With a buffer that is saved, one that is not, and everything that has no gradient."""

    def __init__(self) -> None:
        super().__init__(layers=2, unused=True)
        self.register_buffer("seen", torch.arange(3.0))
        self.register_buffer("scratch", torch.zeros(2), persistent=False)
        self.head.weight = self.tok_emb.weight
        self.blocks[0].attn.q.weight.requires_grad_(False)
        self.pos_emb.requires_grad_(False)


def _run_all(checks: list[Callable[..., None]], folder: str) -> None:
    """All in one job; a failure names its check."""
    for check in checks:
        try:
            torch.manual_seed(0)
            check(Path(folder) / check.__name__)
        except Exception as error:
            raise AssertionError(f"{check.__name__.strip('_')} failed on rank {dist.get_rank()}: {error}") from error
        dist.barrier()


# --------------------------------------------------------------------------------------------------------- the options


OPTIONS: list[tuple[dict[str, bool], dict[str, bool]]] = [  # of getting; what setting needs besides
    ({}, {}),
    ({"cpu_offload": True}, {}),
    ({"full_state_dict": True}, {}),
    ({"full_state_dict": True}, {"broadcast_from_rank0": True}),
    ({"full_state_dict": True, "cpu_offload": True}, {"broadcast_from_rank0": True}),
    ({"flatten_optimizer_state_dict": True}, {}),
    ({"flatten_optimizer_state_dict": True, "full_state_dict": True}, {}),
    (
        {"flatten_optimizer_state_dict": True, "full_state_dict": True, "cpu_offload": True},
        {"broadcast_from_rank0": True},
    ),
    ({"strict": False}, {}),
]


def _every_option(_: Path) -> None:
    run = Run(model="gpt_two_layers")
    run.train(range(2))
    want = run.tensors()
    for index, (getting, setting) in enumerate(OPTIONS):
        model, optimizer = copy.deepcopy(get_state_dict(run.model, run.optimizer, options=StateDictOptions(**getting)))
        if getting.get("full_state_dict"):
            has_it = not getting.get("cpu_offload") or dist.get_rank() == 0
            assert bool(model) == bool(optimizer) == has_it
            assert all(type(value) is Tensor for value in model.values())
        if getting.get("flatten_optimizer_state_dict") and optimizer:
            assert f"state.{UP}.momentum_buffer" in optimizer
        options = StateDictOptions(**{**getting, **setting})
        other = Run(model="gpt_two_layers", seed=3)
        if index % 2 == 0:
            set_state_dict(
                other.model, other.optimizer, model_state_dict=model, optim_state_dict=optimizer, options=options
            )
        else:
            set_model_state_dict(other.model, model, options=options)
            set_optimizer_state_dict(other.model, other.optimizer, optimizer, options=options)
        assert_same(other.tensors(), want)


def _frozen_parameters_left_out(_: Path) -> None:
    run = Run(model=BufferGPT)
    options = StateDictOptions(ignore_frozen_params=True, full_state_dict=True)
    state = get_model_state_dict(run.model, options=options)
    assert {"pos_emb.weight", "blocks.0.attn.q.weight"}.isdisjoint(state) and UP in state
    other = Run(model=BufferGPT, seed=3)
    frozen = full_weights(other.model)["pos_emb.weight"]
    set_model_state_dict(other.model, state, options=options)
    weights = full_weights(other.model)
    assert torch.equal(weights["pos_emb.weight"], frozen)
    assert torch.equal(weights[UP], full_weights(run.model)[UP])


# --------------------------------------------------------------------------------------------- native and asynchronous


def _native_state_dicts_in_a_folder(path: Path) -> None:
    """Into an optimizer that has never stepped, whose state must be there to be loaded into."""
    run = Run(model="gpt_two_layers")
    run.train(range(2))
    dcp.save({"model": run.model.state_dict(), "optimizer": run.optimizer.state_dict()}, checkpoint_id=path)
    other = Run(model="gpt_two_layers", seed=3)
    state = {"model": other.model.state_dict(), "optimizer": other.optimizer.state_dict()}
    dcp.load(state, checkpoint_id=path)
    other.model.load_state_dict(state["model"])
    other.optimizer.load_state_dict(state["optimizer"])
    assert_same(other.tensors(), run.tensors())


def _saved_while_training_goes_on(path: Path) -> None:
    """async_save copies first; on CPU it needs a process group of its own, as training uses the default one."""
    run = Run(model="gpt_two_layers")
    run.train(range(2))
    want = run.tensors()
    future = dcp.async_save(run.state(), checkpoint_id=path, process_group=dist.new_group(backend="gloo"))
    run.train(range(2, 5))
    future.result()
    other = Run(model="gpt_two_layers", seed=3)
    other.load_folder(path)
    assert_same(other.tensors(), want)


def _a_native_file_is_read_by_default(_: Path) -> None:
    run = Run(model="gpt_two_layers")
    run.train(range(1))
    file = io.BytesIO()
    torch.save(run.model.state_dict(), file)
    file.seek(0)
    state = torch.load(file, weights_only=True)
    assert type(state[UP]) is OwnedTensor
    other = Run(model="gpt_two_layers", seed=3)
    other.model.load_state_dict(state)
    assert_same(full_weights(other.model), full_weights(run.model))


# ----------------------------------------------------------------------------------------------------- what is in them


def _everything_is_in_it(path: Path) -> None:
    """Buffers, both names of a tied weight, frozen parameters, and one that never had a gradient."""
    run = Run(model=BufferGPT)
    run.train(range(2))
    run.model.seen += 1
    run.save_folder(path)
    run.save_file(f"{path}.file")
    want = run.tensors()
    assert f"{UP.replace('mlp.up', 'never')}/momentum_buffer" in want
    weights = torch.load(f"{path}.file")["model"]
    assert weights.keys() == BufferGPT().state_dict().keys()
    assert torch.equal(weights["head.weight"], weights[EMBEDDING]) and "scratch" not in weights
    plain = BufferGPT()
    plain.load_state_dict(weights)
    assert_same(
        {**dict(plain.named_parameters()), "seen": plain.seen}, {**full_weights(run.model), "seen": run.model.seen}
    )
    for how in ("folder", "file"):
        other = Run(model=BufferGPT, seed=3)
        other.load(how, path if how == "folder" else f"{path}.file")
        assert_same(other.tensors(), want)
        assert not other.model.blocks[0].attn.q.weight.requires_grad
        assert other.model.head.weight is other.model.tok_emb.weight
    run.train(range(2, 3))
    other.train(range(2, 3))
    assert_same(other.tensors(), run.tensors())


def _masters_stay_float32(path: Path) -> None:
    """A model in bfloat16, mixed precision: what is saved and loaded is the float32 master."""

    def build() -> nn.Module:
        return MODELS["gpt_two_layers"]().bfloat16()

    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16)
    run = Run(model=build, mp_policy=policy, fsdp_options={"mp_policy": policy})
    run.train(range(2))
    run.save_file(f"{path}.file")
    saved = torch.load(f"{path}.file")
    assert saved["model"][UP].dtype == saved["optimizer"]["state"][UP]["momentum_buffer"].dtype == torch.float32
    assert not torch.equal(saved["model"][UP], saved["model"][UP].bfloat16().float())
    other = Run(model=build, seed=3, mp_policy=policy, fsdp_options={"mp_policy": policy})
    other.load_file(f"{path}.file")
    assert_same(other.tensors(), run.tensors())


def _complete_after_an_evaluation(path: Path) -> None:
    """Z2 keeps weights after a forward; a checkpoint between it and the next backward is that of the model at rest."""
    for zero3 in (True, False):
        run = Run(model="gpt_two_layers", zero3=zero3)
        run.train(range(1))
        want = run.tensors()
        run.model.eval()
        with torch.no_grad():
            Rows("gpt", 0, 0, dist.get_rank(), dist.get_world_size()).loss(run.model)
        state = run.state()
        assert all(isinstance(value, DTensor) for value in state["model"].values())
        run.save_file(f"{path}{zero3}.file")
        other = Run(model="gpt_two_layers", seed=3)
        other.load_file(f"{path}{zero3}.file")
        assert_same(other.tensors(), want)


# ------------------------------------------------------------------------------------------------- what others wrote


def _train_plain(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    for step in range(2):
        Rows("gpt", step, 0, dist.get_rank(), dist.get_world_size()).loss(model).backward()
        optimizer.step()
        optimizer.zero_grad()


def _assert_started(run: Run, weights: dict[str, Tensor], moments: dict[str, Tensor]) -> None:
    """All weights; moments where the parameter stays with AdamW; no trace of AdamW elsewhere."""
    assert_same(full_weights(run.model), weights)
    state = full_state(run.model, run.optimizer)
    mine = {name: value for name, value in state.items() if not name.endswith("momentum_buffer")}
    assert mine and all(torch.equal(value, moments[name]) for name, value in mine.items())
    owned = {f"{param.fqn}/momentum_buffer" for param in run.handle.params}
    assert state.keys() - mine.keys() == owned
    assert not any(state[name].any() for name in owned)
    assert [group["lr"] for group in run.optimizer.param_groups] == [0.02, 3e-3]


def _a_folder_of_fsdp2_and_adamw(path: Path) -> None:
    torch.manual_seed(1)
    model = MODELS["gpt_two_layers"]()
    fully_shard(model)
    optimizer = torch.optim.AdamW(model.parameters(), **{**ADAMW, "lr": 1e-2})
    _train_plain(model, optimizer)
    dcp.save(
        {"model": get_model_state_dict(model), "optimizer": get_optimizer_state_dict(model, optimizer)},
        checkpoint_id=path,
    )
    run = Run(model="gpt_two_layers")
    state = run.state()
    moments = {name: entry for name, entry in state["optimizer"]["state"].items() if "exp_avg" in entry}
    dcp.load({"model": state["model"], "optimizer": {"state": moments}}, checkpoint_id=path)
    set_model_state_dict(run.model, state["model"])
    set_optimizer_state_dict(run.model, run.optimizer, state["optimizer"])
    _assert_started(run, full_weights(model), full_state(model, optimizer))
    run.train(range(1))


def _a_file_of_one_process_and_adamw(_: Path) -> None:
    torch.manual_seed(1)
    model = MODELS["gpt_two_layers"]()
    optimizer = torch.optim.AdamW(model.parameters(), **{**ADAMW, "lr": 1e-2})
    _train_plain(model, optimizer)
    for value in [*model.parameters(), *(v for state in optimizer.state.values() for v in state.values())]:
        dist.broadcast(value.detach(), 0)  # the ranks trained on other rows
    weights, state = get_state_dict(model, optimizer)
    for options in ({}, {"broadcast_from_rank0": True}):
        run = Run(model="gpt_two_layers")
        whole = StateDictOptions(full_state_dict=True, strict=False, **options)
        set_model_state_dict(run.model, copy.deepcopy(weights), options=whole)
        set_optimizer_state_dict(run.model, run.optimizer, copy.deepcopy(state), options=whole)
        _assert_started(run, full_weights(model), full_state(model, optimizer))
        run.train(range(1))


def _a_file_of_one_process_and_muon(_: Path) -> None:
    """What one process with the same optimizer saved by itself, keyed by position."""
    torch.manual_seed(1)
    model = MODELS["gpt_two_layers"]()
    names = {f"{name}.weight" for name in ("tok_emb", "pos_emb", "head")}
    named = list(model.named_parameters())
    matrices = [(name, p) for name, p in named if p.ndim == 2 and name not in names]
    others = [(name, p) for name, p in named if p.ndim < 2 or name in names]
    optimizer = Muon([{"params": matrices}, {"params": others, "algorithm": "adamw"}])
    for name, p in named:
        p.grad = torch.full_like(p, len(name))
    optimizer.step()
    run = Run(model="gpt_two_layers")
    set_model_state_dict(run.model, model.state_dict(), options=StateDictOptions(full_state_dict=True))
    run.optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    assert_same(run.tensors(), {**full_weights(model), **full_state(model, optimizer)})


CHECKS = [
    _frozen_parameters_left_out,
    _native_state_dicts_in_a_folder,
    _saved_while_training_goes_on,
    _a_native_file_is_read_by_default,
    _everything_is_in_it,
    _masters_stay_float32,
    _complete_after_an_evaluation,
    _a_folder_of_fsdp2_and_adamw,
    _a_file_of_one_process_and_adamw,
    _a_file_of_one_process_and_muon,
]


def test_formats(tmp_path: Path) -> None:
    run_distributed(_run_all, 2, CHECKS, str(tmp_path))


def test_every_option(tmp_path: Path) -> None:
    run_distributed(_run_all, 2, [_every_option], str(tmp_path))


def _in_hsdp(folder: str) -> None:
    """A weight that was just stepped is on its way to its replicas: a checkpoint has the new one."""
    run = Run(Layout(2, 2), "gpt_two_layers")
    run.train(range(2))
    pending = [group.publication.is_pending for group in run.handle.groups]
    state = run.state()
    future = dcp.async_save(state, checkpoint_id=f"{folder}/a", process_group=dist.new_group(backend="gloo"))
    want = run.tensors()
    run.train(range(2, 4))
    future.result()
    other = Run(Layout(2, 2), "gpt_two_layers", seed=3)
    other.load_folder(f"{folder}/a")
    assert_same(other.tensors(), want)
    assert any(pending), "nothing was on its way: the check shows nothing"


@pytest.mark.slow
def test_the_options_and_a_pending_publish_in_hsdp(tmp_path: Path) -> None:
    run_distributed(_in_hsdp, 4, str(tmp_path))
    run_distributed(_run_all, 4, [_every_option], str(tmp_path))
