"""``Trainer(precision=...)``: autocast, bfloat16 weights under a float32 master, and FSDP2's own policy."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributed.fsdp import MixedPrecisionPolicy

from dmuon_core import OwnedTensor
from dmuon_lightning import DMuonStrategy
from tests.distributed.harness import run_distributed
from tests.lightning import modules
from tests.lightning.runs import Fit, Fitted, assert_close, fit, fit_in_one_process, full_weights, make_trainer, muon

MIXED: dict[str, Any] = {"precision": "bf16-mixed", "max_steps": 4}

# One process that takes the same micro-batches of the same rows rounds as the ranks do; what is left is rounding of
# the mean in float32. Measured: losses 1e-7, gradients 0, weights 3e-6. The allowance is for a number that this moves
# across a rounding border of bfloat16; float32 instead of bf16-mixed is off by 3e-4, 1e-3 and 7e-3.
MIXED_LOSS_ATOL, MIXED_GRAD_ATOL, MIXED_WEIGHT_ATOL = 1e-4, 5e-4, 1e-3


@cache
def _one_process(hands: int, precision: str | None) -> Fitted:
    options = {**MIXED, "precision": precision}
    return run_distributed(fit_in_one_process, 1, Fit(trainer=options, hands=hands), init=False)[0]


@pytest.mark.parametrize("world", [1, 2])
def test_bf16_mixed_equals_one_process(world: int) -> None:
    want = _one_process(world, "bf16-mixed")
    for got in run_distributed(fit, world, Fit(trainer=MIXED)):
        assert_close(got, want, MIXED_LOSS_ATOL, MIXED_GRAD_ATOL, MIXED_WEIGHT_ATOL)
        assert all(value.dtype == torch.float32 for value in [*got.weights.values(), *got.state.values()])


def test_bf16_mixed_is_not_float32() -> None:
    mixed, full = _one_process(1, "bf16-mixed"), _one_process(1, None)
    assert mixed.losses[0] != full.losses[0]
    assert mixed.losses[0] == pytest.approx(full.losses[0], rel=1e-2)


class Watch(modules.Net):
    """Notes what its blocks compute in."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        handle = self.blocks[0].up.register_forward_hook(self._note)
        try:
            return super().training_step(batch, batch_idx)
        finally:
            handle.remove()

    def _note(self, module: torch.nn.Module, args: tuple[Tensor, ...], output: Tensor) -> None:
        self.seen = (args[0].dtype, module.weight.dtype, output.dtype)


def _dtypes(strategy: dict[str, Any], precision: str | None) -> dict[str, Any]:
    module = Watch(muon)
    trainer = make_trainer(DMuonStrategy(**strategy), max_epochs=1, precision=precision)
    trainer.fit(module, modules.loader())
    owned = {p for p in module.parameters() if isinstance(p, OwnedTensor)}
    state = trainer.optimizers[0].state
    losses = torch.tensor(module.losses)
    return {
        "computed": set(module.seen),
        "owned": {(p.dtype, p._local_tensor.dtype) for p in owned},
        "momentum": {state[p]["momentum_buffer"].dtype for p in owned},
        "gradients": {p.grad.dtype for p in owned if p.grad is not None},
        "others": {p.dtype for p in module.parameters() if p not in owned},
        "learned": bool(losses[-1] < losses[0]),
    }


BF16, FP32 = torch.bfloat16, torch.float32


@pytest.mark.parametrize("world", [1, 2])
def test_bf16_true_keeps_a_float32_master(world: int) -> None:
    for got in run_distributed(_dtypes, world, {}, "bf16-true"):
        assert got == {
            "computed": {BF16},
            "owned": {(FP32, FP32)},
            "momentum": {FP32},
            "gradients": {FP32},
            "others": {BF16},
            "learned": True,
        }


def test_bf16_true_without_a_master() -> None:
    for got in run_distributed(_dtypes, 2, {"master_dtype": None}, "bf16-true"):
        assert got["owned"] == {(BF16, BF16)}
        assert got["momentum"] == got["gradients"] == {BF16}
        assert got["learned"]


def test_the_policy_of_fsdp2() -> None:
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    for got in run_distributed(_dtypes, 2, {"mp_policy": policy}, None):
        assert got["computed"] == {BF16}
        assert got["owned"] == {(FP32, FP32)}
        assert got["others"] == got["momentum"] == got["gradients"] == {FP32}
        assert got["learned"]


def _master_after_other_loops() -> list[dict[str, Tensor]]:
    module = modules.Net(muon)
    options = {"precision": "bf16-true", "max_epochs": 1}
    make_trainer(DMuonStrategy(), **options).fit(module, modules.loader())
    snapshots = [full_weights(module)]
    make_trainer(DMuonStrategy(), **options).validate(module, modules.loader(), verbose=False)
    snapshots.append(full_weights(module))
    trainer = make_trainer(DMuonStrategy(), **{**options, "max_steps": 0})
    trainer.fit(module, modules.loader())
    return [*snapshots, full_weights(module)]


def test_later_loops_do_not_round_the_master() -> None:
    fitted, validated, fitted_again = run_distributed(_master_after_other_loops, 2)[0]
    matrix = "blocks.0.up.weight"
    assert fitted[matrix].dtype == FP32
    assert not torch.equal(fitted[matrix], fitted[matrix].bfloat16().float())
    for later in (validated, fitted_again):
        assert later[matrix].dtype == FP32
        assert torch.equal(later[matrix], fitted[matrix])
