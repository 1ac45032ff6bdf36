"""Every option of Muon against a float64 specification, the stock optimizer, or separate parameters."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import dmuon_core
from dmuon_core.optim import Muon
from dmuon_core.optim.polar import schedule
from tests.unit.muon_spec import Spec

STEPS = 6


def randn(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float64) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


def train(params: list[nn.Parameter], optimizer: torch.optim.Optimizer, grads: Callable[[int, int], Any]) -> None:
    for step in range(STEPS):
        for index, p in enumerate(params):
            p.grad = grads(index, step)
        optimizer.step()


def gradient(shape: tuple[int, ...], index: int, step: int, dtype: torch.dtype = torch.float64) -> torch.Tensor:
    return randn(*shape, seed=1000 + 10 * step + index, dtype=dtype)


OPTIONS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "defaults": ({}, {}),
    "no nesterov": ({"nesterov": False}, {"nesterov": False}),
    "match_rms_adamw": ({"adjust_lr_fn": "match_rms_adamw"}, {"adjust": "match_rms_adamw"}),
    "none": ({"adjust_lr_fn": "none"}, {"adjust": "none"}),
    "maximize": ({"maximize": True}, {"maximize": True}),
    "cautious": ({"cautious_weight_decay": True}, {"cautious": True}),
    "cautious, large decay": (
        {"cautious_weight_decay": True, "weight_decay": 5.0},
        {"cautious": True, "weight_decay": 5.0},
    ),
    "normuon": ({"normuon": True}, {"normuon": True}),
    "normuon, beta2": ({"normuon": True, "beta2": 0.5}, {"normuon": True, "beta2": 0.5}),
    "polar express": ({"ns_coefficients": "polar_express"}, {"polynomials": schedule("polar_express", 5)}),
    "cans in 3": ({"ns_coefficients": "cans", "ns_steps": 3}, {"polynomials": schedule("cans", 3)}),
    "custom": (
        {"ns_coefficients": [(2.0, -1.5, 0.5), (1.5, -0.5, 0.0)], "ns_steps": 3},
        {"polynomials": [(2.0, -1.5, 0.5), (1.5, -0.5, 0.0), (1.5, -0.5, 0.0)]},
    ),
    "gram": ({"ns_form": "gram"}, {}),
    "auto": ({"ns_form": "auto"}, {}),
    "batched": ({"batched": True}, {}),
    "tensors": ({key: torch.tensor([x], dtype=torch.float64) for key, x in (("lr", 0.02), ("weight_decay", 0.1))}, {}),
    "all": (
        {"normuon": True, "cautious_weight_decay": True, "maximize": True, "adjust_lr_fn": "match_rms_adamw",
         "ns_coefficients": "polar_express", "ns_form": "gram", "nesterov": False, "batched": True},
        {"normuon": True, "cautious": True, "maximize": True, "adjust": "match_rms_adamw",
         "polynomials": schedule("polar_express", 5), "nesterov": False},
    ),
}  # fmt: skip
# Shape, split, and the matrices of a tensor of that shape.
LAYOUTS: dict[str, tuple[tuple[int, ...], Any, Callable[[torch.Tensor], list[torch.Tensor]]]] = {
    "wide": ((5, 12), None, lambda t: [t]),
    "tall": ((12, 5), None, lambda t: [t]),
    "convolution": ((6, 2, 3, 1), None, lambda t: [t.flatten(1)]),
    "qkv": ((12, 5), 3, lambda t: list(t.chunk(3))),
    "grouped qkv": ((14, 5), (8, 3, 3), lambda t: [t[:8], t[8:11], t[11:]]),
    "heads of an output": ((5, 12), "columns:4", lambda t: list(t.chunk(4, 1))),
    "experts": ((3, 4, 7), "experts", list),
    "experts, gate and up": ((2, 4, 6), "experts columns:2", lambda t: [part for e in t for part in e.chunk(2, 1)]),
    "expert rows": ((2, 6, 4), "experts rows:4,2", lambda t: [part for e in t for part in e.split((4, 2))]),
}  # fmt: skip


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("name", OPTIONS)
def test_equals_the_float64_specification(layout, name):
    """1e-9: float64 in both, and the Gram form's rounding; three parameters of a shape, so that batches form."""
    shape, split, matrices = LAYOUTS[layout]
    options, spec_options = OPTIONS[name]
    params = [nn.Parameter(randn(*shape, seed=index)) for index in range(3)]
    named = [(f"layers.{i}.w", p) for i, p in enumerate(params)]
    optimizer = Muon(named, ns_dtype=torch.float64, split=split, **{"lr": 0.02, **options})
    train(params, optimizer, lambda index, step: gradient(shape, index, step))
    for index, p in enumerate(params):
        expected = randn(*shape, seed=index)
        specs = [Spec(**spec_options) for _ in matrices(expected)]
        for step in range(STEPS):
            grads = matrices(gradient(shape, index, step))
            for spec, w, g in zip(specs, matrices(expected), grads, strict=True):
                w.copy_(spec.step(0, w.clone(), g))  # views of the parameter
        torch.testing.assert_close(p.detach(), expected, rtol=0, atol=1e-9)
    if options.get("normuon"):
        second = optimizer.state[params[0]]["second_momentum_buffer"]
        assert second.numel() == sum(w.shape[0] for w in matrices(randn(*shape)))


@pytest.mark.parametrize(
    "options", [{}, {"nesterov": False}, {"adjust_lr_fn": "match_rms_adamw"}, {"lr": torch.tensor(0.02)}]
)
def test_matrices_of_one_shape_equal_stock(options):
    """Bit for bit by default; as batches within the rounding of bfloat16."""
    shapes = [(6, 9), (9, 6), (6, 9), (4, 4), (6, 9), (9, 6)]
    results = {}
    for kind, make in {
        "stock": lambda ps: torch.optim.Muon(ps, **{"lr": 0.02, **options}),
        "one at a time": lambda ps: Muon(ps, **{"lr": 0.02, **options}),
        "batched": lambda ps: Muon(ps, batched=True, **{"lr": 0.02, **options}),
    }.items():
        params = [nn.Parameter(randn(*shape, seed=i, dtype=torch.float32)) for i, shape in enumerate(shapes)]
        train(params, make(params), lambda index, step: gradient(shapes[index], index, step, torch.float32))
        results[kind] = params
    for one, stock, batched in zip(results["one at a time"], results["stock"], results["batched"], strict=True):
        assert torch.equal(one, stock)
        # An update differs by up to 2e-2 where a last bit of bfloat16 does, times lr and 6 steps.
        torch.testing.assert_close(batched, stock, rtol=0, atol=0.02 * 2e-2 * STEPS)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float16])
@pytest.mark.parametrize("batched", [True, False])
def test_a_fused_parameter_equals_separate_ones(dtype, batched):
    options = {"lr": 0.02, "ns_dtype": dtype, "batched": batched}
    fused = nn.Parameter(randn(14, 5, dtype=torch.float32))
    stacked = nn.Parameter(randn(3, 4, 6, dtype=torch.float32))
    apart = [nn.Parameter(t.clone()) for t in (*fused.detach().split((8, 3, 3)), *stacked.detach())]
    together = Muon([("qkv", fused), ("experts", stacked)], split={"qkv": (8, 3, 3), "exp*": "experts"}, **options)
    separate = Muon(apart, **options)
    for step in range(STEPS):
        fused.grad, stacked.grad = (
            gradient((14, 5), 0, step, torch.float32),
            gradient((3, 4, 6), 1, step, torch.float32),
        )
        for p, g in zip(apart, (*fused.grad.split((8, 3, 3)), *stacked.grad), strict=True):
            p.grad = g.clone()
        together.step()
        separate.step()
    for p, q in zip((*fused.split((8, 3, 3)), *stacked), apart, strict=True):
        assert torch.equal(p, q)


def test_batches_are_really_formed(monkeypatch):
    calls = []
    from dmuon_core.optim import newton_schulz, update

    original = newton_schulz.orthogonalize
    monkeypatch.setattr(
        update.newton_schulz, "orthogonalize", lambda g, *a, **k: calls.append(tuple(g.shape)) or original(g, *a, **k)
    )
    shapes = [(6, 9), (9, 6), (6, 9), (4, 4), (2, 6, 9)]
    params = [nn.Parameter(randn(*shape)) for shape in shapes]
    named = [(f"w{i}", p) for i, p in enumerate(params)]
    for batched, expected in ((True, [(4, 6, 9), (9, 6), (4, 4)]), (False, [*shapes[:4], (6, 9), (6, 9)])):
        calls.clear()
        optimizer = Muon(named, split={"w4": "experts"}, batched=batched)
        for index, p in enumerate(params):
            p.grad = gradient(shapes[index], index, 0)
        optimizer.step()
        assert calls == expected
    monkeypatch.setattr(update, "_WINDOW", 2 * 54 + 54)  # three matrices of 54 elements at once
    calls.clear()
    Muon(named, split={"w4": "experts"}, batched=True).step()
    assert calls == [(2, 6, 9), (9, 6), (4, 4), (2, 6, 9)]


def test_a_scheduled_tensor_weight_decay_is_read_at_every_step():
    p = nn.Parameter(randn(4, 6))
    optimizer = Muon([p], lr=0.5, weight_decay=torch.tensor(0.1, dtype=torch.float64), ns_steps=0, momentum=0.0)
    optimizer.param_groups[0]["weight_decay"].fill_(1.0)
    p.grad = torch.zeros_like(p)
    optimizer.step()
    assert torch.equal(p, randn(4, 6) * 0.5)


def test_maximize_reaches_adamw_groups():
    p, q = (nn.Parameter(randn(5, dtype=torch.float32)) for _ in range(2))
    ours = Muon([{"params": [p], "algorithm": "adamw"}], maximize=True, adamw_weight_decay=torch.tensor(0.1))
    stock = torch.optim.AdamW([q], lr=1e-3, weight_decay=0.1, maximize=True)
    for optimizer, param in ((ours, p), (stock, q)):
        train([param], optimizer, lambda index, step: gradient((5,), index, step, torch.float32))
    torch.testing.assert_close(p, q, rtol=0, atol=1e-7)
    q.grad, p.grad = -torch.ones(5), -torch.ones(5)
    before = p.detach().clone()
    ours.step()
    assert not torch.equal(p, before)


@pytest.mark.parametrize("options", [{}, {"normuon": True, "cautious_weight_decay": True, "ns_dtype": torch.float32}])
@pytest.mark.slow  # a minute of the C++ compiler
def test_the_compiled_step_equals_the_eager_one(options):
    shapes = [(6, 9), (9, 6), (6, 9), (12, 4)]
    results = []
    for compiled in (False, True):
        params = [nn.Parameter(randn(*shape, seed=i, dtype=torch.float32)) for i, shape in enumerate(shapes)]
        optimizer = Muon(
            [(f"w{i}", p) for i, p in enumerate(params)], lr=0.02, split={"w3": 3}, compile=compiled, **options
        )
        for step in range(3):
            for index, p in enumerate(params):
                p.grad = gradient(shapes[index], index, step, torch.float32)
            optimizer.param_groups[0]["lr"] = 0.02 / (1 + step)
            optimizer.param_groups[0]["momentum"] = 0.8 + 0.05 * step
            optimizer.step()
        results.append(params)
    bound = 1e-6 if options.get("ns_dtype") else 0.02 * 5e-2
    for eager, fused in zip(*results, strict=True):
        torch.testing.assert_close(fused, eager, rtol=0, atol=bound)


@pytest.mark.parametrize(("dtype", "bound"), [(torch.float32, 1e-6), (torch.bfloat16, 2**-8)])
def test_every_shape_is_compiled_once_whatever_numbers_change(monkeypatch, dtype, bound):
    """torch would go on without compiling after eight kinds of calls."""
    from torch._dynamo.testing import CompileCounter  # here, because it takes seconds

    from dmuon_core.optim import update

    counter = CompileCounter()
    compiled = torch.compile(update.step_window, dynamic=False, backend=counter)
    monkeypatch.setattr(update, "_compiled", lambda: compiled)
    torch._dynamo.reset()
    shapes = [(2, 3 + i) for i in range(10)]
    results = []
    for compile in (True, False):
        params = [nn.Parameter(randn(*shape, seed=i).to(dtype)) for i, shape in enumerate(shapes)]
        optimizer = Muon(params, compile=compile, normuon=True, ns_steps=1, ns_dtype=torch.float32)
        for step in range(3):
            for index, p in enumerate(params):
                p.grad = gradient(shapes[index], index, step, dtype)
            optimizer.param_groups[0].update(lr=0.02 / (1 + step), momentum=0.8 + step / 20, beta2=0.7 + step / 10)
            optimizer.step()
        results.append([*params, *(optimizer.state[p]["momentum_buffer"] for p in params)])
    assert counter.frame_count == len(shapes)
    for fused, eager in zip(*results, strict=True):
        torch.testing.assert_close(fused, eager, rtol=bound, atol=bound)


# ------------------------------------------------------------------------------------------------- state and preflight


@pytest.mark.parametrize("split", [None, "rows:2", "columns:3"])
def test_normuon_state_is_saved_and_loaded(split):
    def build() -> tuple[nn.Parameter, Muon]:
        p = nn.Parameter(randn(4, 6, dtype=torch.float32))
        return p, Muon([("w", p)], lr=0.02, normuon=True, split=split)

    p, optimizer = build()
    train([p], optimizer, lambda index, step: gradient((4, 6), index, step, torch.float32))
    q, other = build()
    q.data.copy_(p)
    other.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    for param, o in ((p, optimizer), (q, other)):
        train([param], o, lambda index, step: gradient((4, 6), 5, step, torch.float32))
    assert torch.equal(p, q)
    bad = optimizer.state_dict()
    bad["state"][0]["second_momentum_buffer"] = torch.zeros(4, 6)
    with pytest.raises(ValueError, match=r"'second_momentum_buffer' of parameter 'w' has shape \(4, 6\)"):
        other.load_state_dict(bad)


def test_the_split_stays_that_of_the_model():
    p, q = nn.Parameter(randn(4, 6)), nn.Parameter(randn(4, 6))
    one, two = Muon([("w", p)], split=2), Muon([("w", q)])
    two.load_state_dict(one.state_dict())
    assert (one.param_groups[0]["split"], two.param_groups[0]["split"]) == (("rows:2",), None)
    one.load_state_dict(two.state_dict())
    assert one.param_groups[0]["split"] == ("rows:2",)


def test_unfit_normuon_state_leaves_everything_untouched():
    p, q = nn.Parameter(randn(4, 6)), nn.Parameter(randn(4, 6))
    optimizer = Muon([("a", p), ("b", q)], normuon=True)
    p.grad, q.grad = gradient((4, 6), 0, 0), gradient((4, 6), 1, 0)
    optimizer.step()
    optimizer.state[q]["second_momentum_buffer"] = randn(6, 1)
    before = [t.clone() for t in (p.detach(), q.detach(), optimizer.state[p]["momentum_buffer"])]
    with pytest.raises(RuntimeError, match=r"'b': its state 'second_momentum_buffer' has shape \(6, 1\).*No parameter"):
        optimizer.step()
    after = (p.detach(), q.detach(), optimizer.state[p]["momentum_buffer"])
    assert all(torch.equal(a, b) for a, b in zip(before, after, strict=True))


# ----------------------------------------------------------------------------------------------------------- signatures


def parameters_of(function: Any) -> dict[str, inspect.Parameter]:
    return dict(inspect.signature(function).parameters)


def test_muon_takes_what_torch_takes_by_the_same_names_in_the_same_order():
    """Found by looking, so that what torch adds to its optimizers is noticed here."""
    stock, ours = parameters_of(torch.optim.Muon), parameters_of(Muon)
    assert list(ours)[: len(stock)] == list(stock)
    for name, parameter in stock.items():
        assert ours[name].default == parameter.default, name
        assert ours[name].kind == parameter.kind, name
    adamw = parameters_of(torch.optim.AdamW)
    # How the same numbers are computed is torch's affair; amsgrad is another algorithm.
    left_out = {"foreach", "capturable", "differentiable", "fused", "amsgrad"}
    for name, parameter in adamw.items():
        if name in ("params", "maximize"):
            assert name in ours
        elif name == "lr":
            assert ours["adamw_lr"].default is None
        elif name not in left_out:
            assert ours[f"adamw_{name}"].default == parameter.default, name
    assert left_out <= set(adamw)


@pytest.mark.parametrize(
    ("ours", "stock", "without"),
    [
        (dmuon_core.clip_grad_norm_, torch.nn.utils.clip_grad_norm_, {"foreach"}),
        (Muon.step, torch.optim.Muon.step, set()),
        (Muon.zero_grad, torch.optim.Optimizer.zero_grad, set()),
        (Muon.add_param_group, torch.optim.Optimizer.add_param_group, set()),
    ],
)
def test_public_functions_keep_the_names_of_torch(ours, stock, without):
    names = [name for name in parameters_of(stock) if name not in without]
    found = list(parameters_of(ours))
    if ours is dmuon_core.clip_grad_norm_:
        assert names.pop(0) == "parameters" and found.pop(0) == "model_or_params"
    assert found[: len(names)] == names
    for name in names:
        if name in parameters_of(ours):
            assert parameters_of(ours)[name].default == parameters_of(stock)[name].default
