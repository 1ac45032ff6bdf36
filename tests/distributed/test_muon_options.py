"""Muon's options on owned parameters: training equals that of one process, and state goes through any layout."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.nn as nn
from torch import Tensor
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import dmuon_core
from dmuon_core.optim import Muon, QKClip, QKLayer
from tests.distributed.counting import CountCollectives
from tests.distributed.harness import capture_error, run_distributed
from tests.distributed.reference import assert_close, full

DIM, HEADS, EXPERTS, ROWS, STEPS = 6, 2, 3, 8, 3


class Block(nn.Module):
    """Stacked experts of which all run, a convolution, and fused QKV with one key head for two query heads.

    QKV comes last: its block is published to replicas as soon as it is done, which must be after it was clipped.
    """

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(DIM)
        self.up = nn.Parameter(torch.randn(EXPERTS, DIM, 10) / 3)
        self.down = nn.Parameter(torch.randn(EXPERTS, 10, DIM) / 3)
        self.conv = nn.Conv1d(DIM, DIM, 3, padding=1, bias=False)
        self.qkv = nn.Linear(DIM, 4 * DIM // 2)
        self.logits: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(x)
        q, k, v = self.qkv(y).split((DIM, DIM // 2, DIM // 2), -1)
        scores = q.unflatten(-1, (HEADS, -1)).transpose(1, 2) @ k.unsqueeze(1).mT
        self.logits = scores.detach()
        x = x + (scores.softmax(-1) @ v.unsqueeze(1)).transpose(1, 2).flatten(-2)
        x = x + torch.einsum("bsd,edh,ehf->bsf", y, self.up, self.down) + self.conv(y.mT).mT
        return x


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(7, DIM)
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.head = nn.Linear(DIM, 7)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


SPLIT = {"*.qkv.weight": "rows:3,3,3,3"}
OPTIONS: dict[str, dict[str, Any]] = {
    "normuon": {"normuon": True, "cautious_weight_decay": True, "ns_coefficients": "polar_express", "batched": True},
    "gram, clipped": {"ns_form": "gram", "adjust_lr_fn": "match_rms_adamw", "nesterov": False, "qk_clip": 0.05},
    "maximize": {"maximize": True, "adjust_lr_fn": "none", "lr": torch.tensor(0.01)},
}


def optimizer_for(model: nn.Module, options: dict[str, Any]) -> Muon:
    options = {"lr": 0.02, **options}
    if "qk_clip" in options:
        names = ["weight", "bias"]
        layers = {
            str(i): QKLayer(*[[f"blocks.{i}.qkv.{name}" for name in names]] * 2, HEADS, 1, DIM // 2, key_start=DIM)
            for i in range(len(model.blocks))
        }
        options["qk_clip"] = QKClip(layers, options["qk_clip"])
    # eps: a key bias has a gradient of nothing but rounding, which Adam would turn into steps of full size.
    return Muon(model, split=SPLIT, ns_dtype=torch.float32, adamw_lr=0.01, adamw_eps=1e-3, **options)


def rows(step: int, rank: int, world: int) -> tuple[Tensor, Tensor]:
    rng = torch.Generator().manual_seed(step)
    tokens, targets = torch.randint(0, 7, (2, ROWS, 5), generator=rng)
    return tokens[rank::world], targets[rank::world]


def train(model: nn.Module, optimizer: Muon, steps: range, rank: int, world: int) -> list[int]:
    """Returns how many collectives each optimizer step took."""
    counts = []
    for step in steps:
        tokens, targets = rows(step, rank, world)
        loss = nn.functional.cross_entropy(model(tokens).flatten(0, 1), targets.flatten())
        loss.backward()
        if optimizer.qk_clip is not None:
            for name, block in enumerate(model.blocks):
                optimizer.qk_clip.record(str(name), block.logits)
        with CountCollectives() as counted:
            optimizer.step()
        counts.append(sum(counted.calls.values()))
        optimizer.zero_grad()
    return counts


def tensors_of(model: nn.Module, optimizer: Muon) -> dict[str, Tensor]:
    """Weights and state, whole. Collective."""
    found = {}
    for name, p in model.named_parameters():
        found[name] = full(p.detach()).clone()
        for key, value in sorted(optimizer.state.get(p, {}).items()):
            found[f"{name}/{key}"] = full(torch.as_tensor(value)).clone()
    return found


def one_process(options: dict[str, Any], steps: int = STEPS) -> dict[str, Tensor]:
    torch.manual_seed(0)
    model = Net()
    optimizer = optimizer_for(model, options)
    train(model, optimizer, range(steps), 0, 1)
    return tensors_of(model, optimizer)


def build(replicas: int, options: dict[str, Any]) -> tuple[nn.Module, Muon]:
    torch.manual_seed(dist.get_rank())  # rank 0's weights win
    model = Net()
    sizes = (replicas, dist.get_world_size() // replicas)
    mesh = init_device_mesh("cpu", sizes, mesh_dim_names=("replicate", "shard")) if replicas > 1 else None
    mesh = mesh or init_device_mesh("cpu", (dist.get_world_size(),))
    dmuon_core.dedicate_params(model, mesh)
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return model, optimizer_for(model, options)


def _train(replicas: int) -> dict[str, tuple[dict[str, Tensor], list[int]]]:
    results = {}
    for name, options in OPTIONS.items():
        torch.manual_seed(0)
        model, optimizer = build(replicas, options)
        counts = train(model, optimizer, range(STEPS), dist.get_rank(), dist.get_world_size())
        dmuon_core.check_invariants(model)
        results[name] = (tensors_of(model, optimizer), counts)
    return results


@pytest.mark.parametrize(("world", "replicas"), [(2, 1), (4, 2)])
def test_options_equal_one_process(world, replicas):
    """Rounding differences of gradients, 1e-7, times what Newton-Schulz makes of them in float32, times lr: 1e-5."""
    outcomes = run_distributed(_train, world, replicas)
    for name, options in OPTIONS.items():
        want = one_process(options)
        for rank, outcome in enumerate(outcomes):
            got, counts = outcome[name]
            assert_close(got, want, 1e-5, f"{name} on rank {rank}")
            if replicas == 1:
                assert counts == [1 if "qk_clip" in options else 0] * STEPS
    # The clip did something, and the options are not all the same.
    unclipped = one_process({**OPTIONS["gram, clipped"], "qk_clip": 1e9})
    want = one_process(OPTIONS["gram, clipped"])
    assert (unclipped["blocks.0.qkv.weight"] - want["blocks.0.qkv.weight"]).abs().max() > 1e-2
    assert want["blocks.0.up/momentum_buffer"].shape == (EXPERTS, DIM, 10)
    assert outcomes[0]["normuon"][0]["blocks.0.up/second_momentum_buffer"].shape == (EXPERTS, DIM, 1)


def _save(folder: str) -> None:
    model, optimizer = build(1, OPTIONS["normuon"])
    train(model, optimizer, range(STEPS), dist.get_rank(), dist.get_world_size())
    dcp.save({"m": model.state_dict(), "o": get_optimizer_state_dict(model, optimizer)}, checkpoint_id=folder)


def _resume(folder: str, replicas: int, one_file: bool) -> dict[str, Tensor]:
    model, optimizer = build(replicas, OPTIONS["normuon"])
    state = {"m": model.state_dict(), "o": get_optimizer_state_dict(model, optimizer)}
    dcp.load(state, checkpoint_id=folder)
    model.load_state_dict(state["m"])
    set_optimizer_state_dict(model, optimizer, state["o"])
    if one_file:
        # Through full tensors on rank 0 and back, as one-file checkpoints go.
        options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
        full_state = get_optimizer_state_dict(model, optimizer, options=options)
        set_optimizer_state_dict(model, optimizer, full_state, options=options)
    train(model, optimizer, range(STEPS, 2 * STEPS), dist.get_rank(), dist.get_world_size())
    return tensors_of(model, optimizer)


@pytest.mark.slow  # four jobs
def test_state_of_normuon_goes_into_any_layout(tmp_path):
    run_distributed(_save, 2, str(tmp_path))
    want = one_process(OPTIONS["normuon"], 2 * STEPS)
    for world, replicas, one_file in ((4, 2, False), (2, 1, True), (1, 1, False)):
        for got in run_distributed(_resume, world, str(tmp_path), replicas, one_file):
            assert_close(got, want, 2e-5, f"{world} processes")


def _refuse_on_one_rank(replicas: int) -> tuple[str, dict[str, Tensor]]:
    torch.manual_seed(0)
    model, optimizer = build(replicas, OPTIONS["gram, clipped"])
    owned = [p for p in optimizer.param_groups[0]["params"] if p.is_home]
    if dist.get_rank() == 1:
        optimizer.state[owned[-1]]["momentum_buffer"] = torch.zeros(1)
    tokens, targets = rows(0, dist.get_rank(), dist.get_world_size())
    nn.functional.cross_entropy(model(tokens).flatten(0, 1), targets.flatten()).backward()
    for name, block in enumerate(model.blocks):
        optimizer.qk_clip.record(str(name), block.logits)
    before = [full(p.detach()).clone() for p in model.parameters()]
    error = capture_error(optimizer.step)
    assert all(torch.equal(full(p.detach()), b) for p, b in zip(model.parameters(), before, strict=True))
    optimizer.state.clear()
    optimizer.step()  # clips by what was recorded before
    return error.message if error else "", tensors_of(model, optimizer)


@pytest.mark.parametrize(("world", "replicas"), [(2, 1), (4, 2)])
def test_an_error_on_one_rank_is_one_on_all_with_qk_clip(world, replicas):
    want = one_process(OPTIONS["gram, clipped"], 1)
    for rank, (message, got) in enumerate(run_distributed(_refuse_on_one_rank, world, replicas, timeout=60)):
        said = "its state 'momentum_buffer' has shape" if rank == 1 else "another rank cannot take this step"
        assert said in message and "No parameter was updated" in message
        assert_close(got, want, 1e-5, f"rank {rank}")


def _clip_without_owners(sharded: bool) -> list[Any]:
    torch.manual_seed(0)
    model = nn.Module()
    model.q, model.k = nn.Linear(4, 8, bias=False), nn.Linear(4, 8, bias=False)
    if sharded:
        fully_shard(model, mesh=init_device_mesh("cpu", (2,)))
    clip = QKClip({"layer": QKLayer("q.weight", "k.weight", 2)}, threshold=1.0)
    algorithm = "adamw" if sharded else "muon"
    optimizer = Muon([{"params": list(model.named_parameters()), "algorithm": algorithm}], qk_clip=clip)
    before = [full(p.detach()).clone() for p in model.parameters()]
    rank = dist.get_rank()
    clip.record("layer", torch.tensor([1.0, 16.0] if rank else [4.0, 1.0]))
    optimizer.step()  # no gradients: the clip alone
    scales = [(full(p.detach()) / b)[:, 0] for p, b in zip(model.parameters(), before, strict=True)]
    clip.record("layer", torch.tensor([float("nan") if rank else 1.0, 1.0]))
    error = capture_error(optimizer.step)
    return [*scales, error.message if error else ""]


@pytest.mark.parametrize("sharded", [False, True])
def test_clips_by_the_logits_of_all_ranks_where_nothing_is_owned(sharded):
    expected = torch.tensor([0.5] * 4 + [0.25] * 4)
    for query, key, message in run_distributed(_clip_without_owners, 2, sharded):
        torch.testing.assert_close(query, expected, rtol=1e-6, atol=0)
        torch.testing.assert_close(key, expected, rtol=1e-6, atol=0)
        assert "logits of layer 'layer' were inf or NaN on some rank" in message
