"""Muon on plain parameters against the stock optimizers, and what a step does besides the arithmetic."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from dmuon_core.optim import Muon, orthogonalize

Shapes = Sequence[tuple[int, ...]]
SHAPES = [(8, 8), (4, 24), (24, 4), (1, 16), (16, 1), (1, 1)]
STEPS = 12


def parameters(shapes: Shapes = SHAPES, dtype: torch.dtype = torch.float32) -> list[nn.Parameter]:
    rng = torch.Generator().manual_seed(1)
    return [nn.Parameter(torch.randn(shape, generator=rng).to(dtype)) for shape in shapes]


def set_gradients(params: Sequence[nn.Parameter], step: int) -> None:
    rng = torch.Generator().manual_seed(100 + step)
    for p in params:
        p.grad = torch.randn(p.shape, generator=rng).to(p.dtype)


def assert_same_training(
    ours: Callable[[list[nn.Parameter]], torch.optim.Optimizer],
    stock: Callable[[list[nn.Parameter]], torch.optim.Optimizer],
    steps: int = STEPS,
    **kwargs: Any,
) -> None:
    """Same gradients into both optimizers: every weight and every state tensor must be equal bit for bit."""
    mine, theirs = parameters(**kwargs), parameters(**kwargs)
    a, b = ours(mine), stock(theirs)
    for step in range(steps):
        set_gradients(mine, step)
        set_gradients(theirs, step)
        a.step()
        b.step()
        for p, q in zip(mine, theirs, strict=True):
            assert torch.equal(p, q), f"step {step}, shape {tuple(p.shape)}"
            assert a.state[p].keys() == b.state[q].keys()
            for key in a.state[p]:
                assert torch.equal(a.state[p][key], b.state[q][key]), f"step {step}, state {key}"


@pytest.mark.parametrize("adjust_lr_fn", [None, "original", "match_rms_adamw"])
@pytest.mark.parametrize("nesterov", [True, False])
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"momentum": 0.0},
        {"weight_decay": 0.0},
        {"lr": 0.0},
        {"ns_steps": 1},
        {"eps": 1.0},
        {"ns_coefficients": (2.0, -1.5, 0.5)},
    ],
)
def test_muon_groups_equal_stock_bit_for_bit(adjust_lr_fn, nesterov, options):
    options = {"lr": 0.02, "nesterov": nesterov, "adjust_lr_fn": adjust_lr_fn, **options}
    assert_same_training(lambda p: Muon(p, **options), lambda p: torch.optim.Muon(p, **options))


def test_defaults_equal_stock():
    assert_same_training(Muon, torch.optim.Muon)


@pytest.mark.parametrize("lr", [torch.tensor(0.02), torch.tensor([0.02])])
def test_tensor_learning_rate_equals_stock(lr):
    assert_same_training(lambda p: Muon(p, lr=lr), lambda p: torch.optim.Muon(p, lr=lr.clone()))


def test_bfloat16_parameters_equal_stock():
    assert_same_training(lambda p: Muon(p, lr=0.02), lambda p: torch.optim.Muon(p, lr=0.02), dtype=torch.bfloat16)


@settings(max_examples=25, deadline=None)
@given(
    shape=st.tuples(st.integers(1, 20), st.integers(1, 20)),
    lr=st.floats(0, 0.5),
    weight_decay=st.floats(0, 0.5),
    momentum=st.floats(0, 0.99),
    nesterov=st.booleans(),
    ns_steps=st.integers(0, 7),
    adjust_lr_fn=st.sampled_from([None, "original", "match_rms_adamw"]),
)
def test_any_hyper_parameters_equal_stock(shape, **options):
    assert_same_training(
        lambda p: Muon(p, **options), lambda p: torch.optim.Muon(p, **options), steps=3, shapes=[shape]
    )


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"betas": (0.0, 0.0)},
        {"betas": (0.8, 0.95)},
        {"eps": 1e-3},
        {"weight_decay": 0.0},
        {"weight_decay": 0.3},
        {"lr": 0.0},
        {"lr": torch.tensor(0.01)},
    ],
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_adamw_groups_equal_stock_bit_for_bit(options, dtype):
    shapes = [(7,), (3, 5), (), (2, 3, 4)]
    options = {"lr": 0.01, **options}
    assert_same_training(
        lambda p: Muon([{"params": p, "algorithm": "adamw", **options}], lr=123.0),
        lambda p: torch.optim.AdamW(p, **options),
        shapes=shapes,
        dtype=dtype,
    )
    assert_same_training(
        lambda p: Muon(
            [{"params": p, "algorithm": "adamw"}], **{f"adamw_{key}": value for key, value in options.items()}
        ),
        lambda p: torch.optim.AdamW(p, **options),
        shapes=shapes,
        dtype=dtype,
    )


def test_adamw_default_options_equal_stock():
    assert_same_training(
        lambda p: Muon([{"params": p, "algorithm": "adamw"}]), torch.optim.AdamW, shapes=[(7,), (3, 5)]
    )


def test_complex_parameters_train_in_adamw_groups():
    assert_same_training(
        lambda p: Muon([{"params": p, "algorithm": "adamw"}]),
        torch.optim.AdamW,
        shapes=[(5,)],
        dtype=torch.complex64,
    )


@pytest.mark.parametrize("shape", [(6, 3, 2, 2), (2, 5, 3), (40, 2, 3, 3)])
def test_convolutions_are_flattened(shape):
    kernel, flat = parameters([shape])[0], nn.Parameter(parameters([shape])[0].detach().flatten(1))
    ours, stock = Muon([kernel], lr=0.02), torch.optim.Muon([flat], lr=0.02)
    for step in range(5):
        set_gradients([kernel], step)
        assert kernel.grad is not None
        flat.grad = kernel.grad.flatten(1)
        ours.step()
        stock.step()
        assert torch.equal(kernel.flatten(1), flat)


def test_channels_last_equals_contiguous():
    contiguous = parameters([(6, 3, 2, 2)])[0]
    strided = nn.Parameter(contiguous.detach().to(memory_format=torch.channels_last))
    optimizers = [Muon([contiguous], lr=0.02), Muon([strided], lr=0.02)]
    for step in range(3):
        set_gradients([contiguous, strided], step)
        assert contiguous.grad is not None
        strided.grad = contiguous.grad.to(memory_format=torch.channels_last)
        for optimizer in optimizers:
            optimizer.step()
    assert torch.equal(contiguous, strided)


def test_momentum_of_a_bfloat16_parameter_survives_without_nesterov():
    p = parameters([(4, 6)], torch.bfloat16)[0]
    optimizer = Muon([p], momentum=0.5, nesterov=False)
    set_gradients([p], 0)
    optimizer.step()
    assert torch.equal(optimizer.state[p]["momentum_buffer"], torch.zeros_like(p).lerp(p.grad, 0.5))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_newton_schulz_dtype(dtype):
    p, before = parameters([(4, 6)])[0], parameters([(4, 6)])[0]
    set_gradients([p], 0)
    optimizer = Muon([p], lr=0.1, weight_decay=0.0, momentum=0.0, ns_dtype=dtype)
    with torch.autocast("cpu", dtype=torch.bfloat16):  # must not reach into the step
        optimizer.step()
    assert p.grad is not None
    expected = before.detach().add_(orthogonalize(p.grad, dtype=dtype), alpha=-0.1)
    assert torch.equal(p, expected)


@pytest.mark.parametrize("shape", [*SHAPES, (3, 2, 2), (0, 4), (4, 0)])
@pytest.mark.parametrize("fill", [0.0, 1e-30, 1e30])
def test_degenerate_gradients_give_finite_weights(shape, fill):
    p = parameters([shape])[0]
    optimizer = Muon([p], weight_decay=0.0)
    for _ in range(2):
        p.grad = torch.full_like(p, fill)
        optimizer.step()
    assert torch.isfinite(p).all()
    if fill == 0.0:
        assert torch.equal(p, parameters([shape])[0])


def test_parameters_without_gradient_are_skipped():
    matrices, others = parameters([(3, 4), (4, 3)]), parameters([(3,), (4,)])
    before = [p.detach().clone() for p in (*matrices, *others)]
    optimizer = Muon([{"params": matrices}, {"params": others, "algorithm": "adamw"}], weight_decay=0.5)
    set_gradients([matrices[0], others[0]], 0)
    optimizer.step()
    changed = [not torch.equal(p, q) for p, q in zip((*matrices, *others), before, strict=True)]
    assert changed == [True, False, True, False]
    assert set(optimizer.state) == {matrices[0], others[0]}
    optimizer.zero_grad()
    optimizer.step()
    assert optimizer.state[others[0]]["step"].item() == 1


def test_closure_runs_once_with_gradients_and_before_the_update():
    p = parameters([(3, 4)])[0]
    optimizer = Muon([p])
    before = p.detach().clone()
    calls = []

    def closure() -> float:
        assert torch.is_grad_enabled()
        assert torch.equal(p, before)
        optimizer.zero_grad()
        loss = (p**2).sum()
        loss.backward()
        calls.append(loss)
        return loss

    with torch.no_grad():
        loss = optimizer.step(closure)
    assert len(calls) == 1
    assert loss is calls[0]
    assert not torch.equal(p, before)
    assert optimizer.step() is None


def test_closure_that_raises_leaves_everything():
    p = parameters([(3, 4)])[0]
    optimizer = Muon([p])
    set_gradients([p], 0)
    before = p.detach().clone()

    def closure() -> float:
        raise ArithmeticError("user error")

    with pytest.raises(ArithmeticError, match="user error"):
        optimizer.step(closure)
    assert torch.equal(p, before)
    assert not optimizer.state
    optimizer.step()
    assert not torch.equal(p, before)


@pytest.mark.parametrize("lr", [0.1, torch.tensor(0.1)])
def test_schedulers_drive_every_group(lr):
    matrix, bias = parameters([(3, 4), (3,)])
    optimizer = Muon([{"params": [matrix]}, {"params": [bias], "algorithm": "adamw", "lr": 0.2}], lr=lr)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, [lambda step: 0.5**step, lambda step: 0.25**step])
    for _ in range(2):
        set_gradients([matrix, bias], 0)
        optimizer.step()
        scheduler.step()
    assert [float(group["lr"]) for group in optimizer.param_groups] == pytest.approx([0.1 / 4, 0.2 / 16])
    frozen = [matrix.detach().clone(), bias.detach().clone()]
    for group in optimizer.param_groups:
        group["lr"] = 0.0
    optimizer.step()
    assert torch.equal(matrix, frozen[0])
    assert torch.equal(bias, frozen[1])


def test_groups_do_not_share_a_tensor_learning_rate():
    lr = torch.tensor(0.1)
    matrix, bias = parameters([(3, 4), (3,)])
    first, second = Muon([{"params": [matrix]}, {"params": [bias], "algorithm": "adamw"}], lr=lr).param_groups
    first["lr"].fill_(0.5)
    assert float(second["lr"]) == pytest.approx(0.1)
    assert float(lr) == pytest.approx(0.1)


def test_one_cycle_scheduler_cycles_the_momentum():
    matrix, bias = parameters([(3, 4), (3,)])
    optimizer = Muon([{"params": [matrix]}, {"params": [bias], "algorithm": "adamw"}])
    scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=[0.1, 0.01], total_steps=10)
    first = optimizer.param_groups[0]["momentum"]
    set_gradients([matrix, bias], 0)
    optimizer.step()
    scheduler.step()
    assert optimizer.param_groups[0]["momentum"] != first


def test_zero_grad_drops_what_is_held_back(monkeypatch):
    matrix, bias = parameters([(3, 4), (3,)])
    optimizer = Muon([{"params": [matrix]}, {"params": [bias], "algorithm": "adamw"}])
    dropped = []
    monkeypatch.setattr("dmuon_core.optim.muon.drop_pending", dropped.extend)
    optimizer.zero_grad()
    assert [id(p) for p in dropped] == [id(matrix), id(bias)]


def test_zero_grad():
    matrix, bias = parameters([(3, 4), (3,)])
    optimizer = Muon([{"params": [matrix]}, {"params": [bias], "algorithm": "adamw"}])
    set_gradients([matrix, bias], 0)
    optimizer.zero_grad(set_to_none=False)
    assert not matrix.grad.any()
    assert not bias.grad.any()
    optimizer.zero_grad()
    assert matrix.grad is None
    assert bias.grad is None


def shrink(p: nn.Parameter) -> None:
    p.data = p.data[:, :2].clone()


def to_half(p: nn.Parameter) -> None:
    p.data = p.data.bfloat16()


def make_sparse(p: nn.Parameter) -> None:
    p.grad = p.grad.to_sparse()


@pytest.mark.parametrize(
    ("spoil", "message"),
    [(shrink, "shape"), (to_half, "dtype"), (make_sparse, "sparse")],
)
@pytest.mark.parametrize("algorithm", ["muon", "adamw"])
@pytest.mark.parametrize("stepped", [False, True])
def test_an_unfit_gradient_leaves_everything_untouched(spoil, message, algorithm, stepped):
    matrix, bias = parameters([(3, 4), (3,)])
    bad = parameters([(5, 4)])[0]
    groups = [
        {"params": [("matrix", matrix)]},
        {"params": [("bias", bias)], "algorithm": "adamw"},
        {"params": [("layer.bad", bad)], "algorithm": algorithm},
    ]
    optimizer = Muon(groups)
    set_gradients([matrix, bias, bad], 0)
    if stepped:
        optimizer.step()
    before = [p.detach().clone() for p in (matrix, bias)]
    state = {p: {k: v.clone() for k, v in optimizer.state[p].items()} for p in (matrix, bias) if stepped}
    spoil(bad)
    with pytest.raises(RuntimeError, match=f"'layer.bad'.*({message}).*No parameter was updated"):
        optimizer.step()
    assert torch.equal(matrix, before[0])
    assert torch.equal(bias, before[1])
    assert set(optimizer.state) - {bad} == set(state)
    for p, saved in state.items():
        assert all(torch.equal(optimizer.state[p][key], value) for key, value in saved.items())


class Moved(nn.Parameter):
    """A parameter whose gradient stayed behind, which assignment to `grad` does not allow on the CPU."""

    @property
    def grad(self) -> torch.Tensor:
        return torch.zeros(self.shape, device="meta")


@pytest.mark.parametrize("algorithm", ["muon", "adamw"])
def test_a_gradient_on_another_device_is_named(algorithm):
    matrix, moved = parameters([(3, 4)])[0], Moved(torch.zeros(2, 3))
    optimizer = Muon([{"params": [("a", matrix), ("b", moved)], "algorithm": algorithm}])
    set_gradients([matrix], 0)
    before = matrix.detach().clone()
    with pytest.raises(RuntimeError, match="'b': its gradient is on meta, the parameter on cpu"):
        optimizer.step()
    assert torch.equal(matrix, before)
    assert not optimizer.state


@pytest.mark.parametrize("state", [torch.zeros(4, 3), torch.zeros(3, 4, device="meta")])
def test_an_unfit_state_tensor_is_named(state):
    p = parameters([(3, 4)])[0]
    optimizer = Muon([p])
    set_gradients([p], 0)
    optimizer.step()
    optimizer.state[p]["momentum_buffer"] = state
    with pytest.raises(RuntimeError, match=r"parameter 0 of parameter group 0.*'momentum_buffer'.*(\(4, 3\)|on meta)"):
        optimizer.step()


def test_a_matrix_that_turned_complex_is_named():
    p = parameters([(3, 4)])[0]
    optimizer = Muon([("w", p)])
    p.data = p.data.to(torch.complex64)
    p.grad = torch.zeros_like(p)
    with pytest.raises(RuntimeError, match=r"'w'.*complex.*adamw"):
        optimizer.step()
