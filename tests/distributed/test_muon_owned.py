"""Muon over owned and sharded parameters: the owner alone computes, and state goes where its parameter is."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.debug import CommDebugMode

from dmuon_core.optim import Muon
from dmuon_core.owned_tensor import OwnedTensor
from tests.distributed.harness import run_distributed

SHAPES = {"a": (6, 4), "b": (4, 6), "c": (4, 3, 2, 2)}
OWNERS = {"a": 0, "b": 1, "c": 1}
STEPS = 4


def full(name: str, seed: int = 0) -> torch.Tensor:
    rng = torch.Generator().manual_seed(seed * 10 + sorted([*SHAPES, "d"]).index(name))
    return torch.randn(SHAPES.get(name, (5, 3)), generator=rng)


def owned(value: torch.Tensor, owner: int, mesh: DeviceMesh, name: str) -> OwnedTensor:
    local = value if mesh.get_local_rank() == owner else value[:0]
    return OwnedTensor.wrap(local.clone(), value.shape, mesh, (owner,), name)


def build(mesh: DeviceMesh, owners: dict[str, int] = OWNERS) -> tuple[dict[str, nn.Parameter], Muon]:
    params = {name: nn.Parameter(owned(full(name), owners[name], mesh, name)) for name in SHAPES}
    params["d"] = nn.Parameter(distribute_tensor(full("d"), mesh, [Shard(0)]))
    groups = [
        {"params": [(name, params[name]) for name in ("a", "b")]},
        {"params": [(name, params[name]) for name in ("c", "d")], "algorithm": "adamw"},
    ]
    return params, Muon(groups, lr=0.02)


def train(params: dict[str, nn.Parameter], optimizer: torch.optim.Optimizer, steps: range) -> None:
    for step in steps:
        for name, p in params.items():
            gradient = full(name, 1 + step)
            if isinstance(p, OwnedTensor):
                p.grad = p.like(gradient if p.is_owner else gradient[:0])
            elif isinstance(p, DTensor):
                p.grad = distribute_tensor(gradient, p.device_mesh, p.placements, src_data_rank=None)
            else:
                p.grad = gradient
        optimizer.step()


def reference(steps: int) -> tuple[dict[str, nn.Parameter], list[torch.optim.Optimizer]]:
    params = {name: nn.Parameter(full(name)) for name in (*SHAPES, "d")}
    optimizers = [
        torch.optim.Muon([params["a"], params["b"]], lr=0.02),
        torch.optim.AdamW([params["c"], params["d"]], lr=0.02),
    ]
    for step in range(steps):
        for name, p in params.items():
            p.grad = full(name, 1 + step)
        for optimizer in optimizers:
            optimizer.step()
    return params, optimizers


def assert_equals_reference(params: dict[str, nn.Parameter], steps: int) -> None:
    for name, expected in reference(steps)[0].items():
        assert torch.equal(params[name].full_tensor(), expected), name


def _step() -> None:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    params, optimizer = build(mesh)
    with CommDebugMode() as comms:
        train(params, optimizer, range(STEPS))
    assert comms.get_total_counts() == 0
    assert_equals_reference(params, STEPS)
    for name, keys in {
        "a": ["momentum_buffer"],
        "b": ["momentum_buffer"],
        "c": ["exp_avg", "exp_avg_sq"],
    }.items():
        p = params[name]
        for key in keys:
            value = optimizer.state[p][key]
            assert isinstance(value, OwnedTensor)
            assert value.owner == p.owner
            assert value._local_tensor.shape == (p.shape if p.is_owner else (0, *p.shape[1:]))
    optimizer.zero_grad()
    assert all(p.grad is None for p in params.values())


def test_the_owner_steps_alone_and_equals_stock_bit_for_bit():
    run_distributed(_step, 2)


def moved(value: Any, how: str, mesh: DeviceMesh, name: str) -> Any:
    if not isinstance(value, torch.Tensor) or value.dim() == 0 or how == "as saved":
        return value
    value = value.full_tensor()
    if how == "full":
        return value
    if how == "other owner":
        return owned(value, 1 - OWNERS.get(name, 0), mesh, name)
    return distribute_tensor(value, mesh, [Shard(0) if how == "sharded" else Replicate()])


def _load(how: str) -> None:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    first, saved_by = build(mesh)
    train(first, saved_by, range(2))
    saved = saved_by.state_dict()
    names = [name for group in saved["param_groups"] for name in group["param_names"]]
    saved["state"] = {
        index: {key: moved(value, how, mesh, names[index]) for key, value in values.items()}
        for index, values in saved["state"].items()
    }
    params, optimizer = build(mesh, {name: 1 - owner for name, owner in OWNERS.items()})
    with torch.no_grad():
        for name, p in params.items():
            p.copy_(first[name].full_tensor() if name != "d" else first[name])
    optimizer.load_state_dict(saved)
    for p, values in optimizer.state.items():
        for key, value in values.items():
            if key != "step":
                assert type(value) is (OwnedTensor if isinstance(p, OwnedTensor) else DTensor)
                assert value._local_tensor.shape == p._local_tensor.shape
    train(params, optimizer, range(2, STEPS))
    assert_equals_reference(params, STEPS)


@pytest.mark.parametrize("how", ["as saved", "full", "sharded", "replicated", "other owner"])
def test_loaded_state_moves_to_the_new_owner(how):
    run_distributed(_load, 2, how)


def _gather_into_plain() -> None:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    params, optimizer = build(mesh)
    train(params, optimizer, range(2))
    plain = {name: nn.Parameter(p.full_tensor().detach()) for name, p in params.items()}
    other = Muon([{"params": [plain["a"], plain["b"]]}, {"params": [plain["c"], plain["d"]], "algorithm": "adamw"}])
    other.load_state_dict(optimizer.state_dict())
    train(plain, other, range(2, STEPS))
    for name, expected in reference(STEPS)[0].items():
        assert torch.equal(plain[name], expected), name


def test_state_loads_into_plain_parameters():
    run_distributed(_gather_into_plain, 2)


def _errors() -> None:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    sharded = nn.Parameter(distribute_tensor(full("d"), mesh, [Shard(0)]))
    with pytest.raises(ValueError, match=r"'head' is a sharded DTensor.*dedicate it first.*adamw"):
        Muon([("head", sharded)])

    params, optimizer = build(mesh)
    before = {name: p._local_tensor.clone() for name, p in params.items()}
    train({name: params[name] for name in ("a", "c", "d")}, Muon([nn.Parameter(torch.zeros(1, 1))]), range(1))
    spoiled = params["b"]
    other_owner = owned(full("b"), 1 - OWNERS["b"], mesh, "b")
    replicated = distribute_tensor(full("b"), mesh, [Replicate()])
    for gradient in (other_owner, replicated):
        spoiled.grad = gradient
        with pytest.raises(RuntimeError, match=r"'b': its gradient.*No parameter was updated"):
            optimizer.step()
    assert all(torch.equal(p._local_tensor, before[name]) for name, p in params.items())
    assert not optimizer.state


def test_misplaced_parameters_and_gradients_are_named():
    run_distributed(_errors, 2)
