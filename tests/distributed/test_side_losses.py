"""Loss terms that do not come out of a module's forward: on weights at rest, and on what a module keeps to itself."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

from tests.distributed.harness import expect_errors, run_distributed
from tests.distributed.models import MODELS
from tests.distributed.reference import Rows, dedicate, full_grads, make_muon


def _penalty(model: nn.Module, how: str) -> Tensor:
    total = torch.zeros(())
    for p in model.parameters():
        whole = p.full_tensor() if hasattr(p, "full_tensor") else p
        if how == "after":
            total = total + whole.square().sum()
        else:
            norm = p.square().sum()
            total = total + (norm.full_tensor() if hasattr(norm, "full_tensor") else norm)
    return 0.1 * total


def _with_penalty(how: str) -> dict[str, Tensor | None]:
    torch.manual_seed(0)
    model = MODELS["gpt"]()
    dedicate(model)
    Rows("gpt", 0, 0, dist.get_rank(), dist.get_world_size()).loss(model).backward()
    _penalty(model, how).backward()
    return full_grads(model)


@pytest.mark.parametrize("how", ["after", "before"], ids=["square_of_the_whole", "whole_of_the_square"])
def test_a_penalty_on_whole_weights(how: str) -> None:
    torch.manual_seed(0)
    model = MODELS["gpt"]()
    Rows("gpt", 0, 0, 0, 1).loss(model).backward()
    _penalty(model, "after").backward()
    for grads in run_distributed(_with_penalty, 2, how):
        for name, p in model.named_parameters():
            # The two backwards add up to values below 1: some units in the last place.
            torch.testing.assert_close(grads[name], p.grad, rtol=0, atol=1e-6, msg=lambda text, name=name: name + text)


class _KeepsATerm(nn.Module):
    """A block whose side term is made after its output, so that autograd goes through it first.

    `gate` is in that term only: its gradient is complete before the block's backward has begun.
    """

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(8, 8)
        self.down = nn.Linear(8, 8)
        self.gate = nn.Linear(8, 8)
        self.side = torch.zeros(())

    def forward(self, x: Tensor) -> Tensor:
        out = x + self.down(self.up(x).relu())
        self.side = (self.gate.weight * 2.0).square().sum()
        return out


def _side_term() -> None:
    import dmuon_core

    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), *(_KeepsATerm() for _ in range(3)), nn.Linear(8, 2))
    dmuon_core.dedicate_params(model, predicate=lambda name, p: p.shape == (8, 8))
    loss = model(torch.ones(2, 4)).square().sum()
    (loss + model[2].side).backward()  # type: ignore[operator]


def test_a_term_that_a_module_keeps_is_refused() -> None:
    for error in expect_errors(_side_term, 2, group_timeout=20.0, timeout=60.0):
        assert error.type == "RuntimeError", error.traceback
        assert "'2.gate.weight'" in error and "does not return" in error, error.traceback


def _freeze_in_a_window() -> tuple[float, float]:
    import dmuon_core

    torch.manual_seed(0)
    model = MODELS["gpt"]()
    dedicate(model)
    rank, world = dist.get_rank(), dist.get_world_size()
    with dmuon_core.no_sync(model):
        Rows("gpt", 0, 0, rank, world).loss(model).backward()
    for p in model.blocks[1].parameters():
        p.requires_grad_(False)
    Rows("gpt", 1, 0, rank, world).loss(model).backward()
    model.zero_grad()
    for p in model.blocks[1].parameters():
        p.requires_grad_(True)
    Rows("gpt", 2, 0, rank, world).loss(model).backward()
    got = dmuon_core.clip_grad_norm_(model, 1e9).item()
    model.zero_grad()
    Rows("gpt", 2, 0, rank, world).loss(model).backward()
    return got, dmuon_core.clip_grad_norm_(model, 1e9).item()


def test_what_was_frozen_in_a_window_does_not_come_out_later() -> None:
    for got, want in run_distributed(_freeze_in_a_window, 2):
        assert got == want


def _policy_survives_conversion() -> tuple[torch.dtype, torch.dtype]:
    import dmuon_core

    model = MODELS["gpt"]()
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float64)
    handle = dmuon_core.dedicate_params(model, mp_policy=policy)
    for block in model.blocks:
        fully_shard(block, mp_policy=policy)
    fully_shard(model, mp_policy=policy)
    model.double()
    make_muon(model)
    Rows("gpt", 0, 0, dist.get_rank(), dist.get_world_size()).loss(model).backward()
    param = handle.params[0]
    assert param.unsharded is not None and param.rest.grad is not None
    return param.unsharded.dtype, param.rest.grad.dtype


def test_a_precision_policy_survives_a_conversion() -> None:
    for computed, at_rest in run_distributed(_policy_survives_conversion, 2):
        assert (computed, at_rest) == (torch.bfloat16, torch.float64)
