"""What may differ between ranks without a hang: who has a gradient, and whose inputs require one."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard

from tests.distributed.harness import run_distributed
from tests.distributed.reference import full_grads


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(8)
        self.up = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.up(self.norm(x))


class Net(nn.Module):
    """`task` is a matrix of the root's own group; `blocks` are hook modules."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.scale = nn.Parameter(torch.ones(8))  # so that every block has inputs with grad, as FSDP2 needs it
        self.task = nn.Linear(8, 8, bias=False)
        self.blocks = nn.ModuleList(Block() for _ in range(3))
        self.head = nn.Linear(8, 3)

    def forward(self, x: Tensor, use_task: bool = True) -> Tensor:
        x = x * self.scale
        if use_task:
            x = self.task(x)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def _data(rank: int) -> Tensor:
    return torch.randn(4, 8, generator=torch.Generator().manual_seed(10 + rank))


def _reference(uses_task: list[bool]) -> dict[str, Tensor]:
    model = Net()
    for rank, use_task in enumerate(uses_task):
        (model(_data(rank), use_task).square().mean() / len(uses_task)).backward()
    return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


def _sharded_net() -> nn.Module:
    import dmuon_core

    model = Net()
    dmuon_core.dedicate_params(model)
    for block in model.blocks:
        fully_shard(block)
    fully_shard(model)
    return model


def _zero_grad_between(zero_grad: bool) -> dict[str, Tensor | None]:
    import dmuon_core

    model, rank = _sharded_net(), dist.get_rank()
    optimizer = dmuon_core.Muon(model, lr=0.1)
    loss = model(_data(rank), use_task=rank == 0).square().mean()
    if zero_grad:
        optimizer.zero_grad()  # the order of Lightning's closure: forward, zero_grad, backward
    loss.backward()
    return full_grads(model)


def _other_inputs_require_grad() -> dict[str, Tensor | None]:
    model, rank = _sharded_net(), dist.get_rank()
    model(_data(rank).requires_grad_(rank == 0)).square().mean().backward()
    return full_grads(model)


def _assert_grads(got: dict[str, Tensor | None], want: dict[str, Tensor]) -> None:
    assert {name for name, grad in got.items() if grad is not None} == set(want)
    for name, grad in want.items():
        # One float32 backward in another order of summation: a few units in the last place of values below 1.
        torch.testing.assert_close(got[name], grad, rtol=0, atol=1e-6, msg=lambda text, name=name: f"{name}: {text}")


@pytest.mark.parametrize("zero_grad", [False, True])
def test_a_matrix_that_one_rank_uses(zero_grad: bool) -> None:
    for grads in run_distributed(_zero_grad_between, 2, zero_grad, timeout=60, group_timeout=20):
        _assert_grads(grads, _reference([True, False]))


def test_inputs_that_require_grad_on_one_rank_only() -> None:
    """That rank reduces the root's group in backward, the other at its end; FSDP2's collectives lie in between."""
    for grads in run_distributed(_other_inputs_require_grad, 2, timeout=60, group_timeout=20):
        _assert_grads(grads, _reference([True, True]))
