"""The Gram form against the direct form and against float64."""

from __future__ import annotations

import pytest
import torch

from dmuon_core.optim import gram
from dmuon_core.optim.newton_schulz import choose_form, flops, orthogonalize
from dmuon_core.optim.polar import schedule

NAMES = ["quintic", "polar_express", "cans", "aol"]


def with_singular_values(values: torch.Tensor, n: int, seed: int = 0) -> torch.Tensor:
    rng = torch.Generator().manual_seed(seed)
    m = len(values)
    left = torch.linalg.qr(torch.randn(m, m, dtype=torch.float64, generator=rng))[0]
    right = torch.linalg.qr(torch.randn(n, m, dtype=torch.float64, generator=rng))[0]
    return left @ torch.diag(values.double()) @ right.T


MATRICES = {
    "gaussian": torch.randn(48, 96, dtype=torch.float64, generator=torch.Generator().manual_seed(1)),
    "square": torch.randn(64, 64, dtype=torch.float64, generator=torch.Generator().manual_seed(2)),
    "down to 1e-3": with_singular_values(torch.logspace(0, -3, 48), 96),
    "down to 1e-6": with_singular_values(torch.logspace(0, -6, 48), 96),
    "half the rank": with_singular_values(torch.arange(48) % 2, 96),
    "one row": torch.randn(1, 96, dtype=torch.float64, generator=torch.Generator().manual_seed(3)),
    "tall": torch.randn(96, 32, dtype=torch.float64, generator=torch.Generator().manual_seed(4)),
}


@pytest.mark.parametrize("steps", [0, 1, 2, 5, 8, 12])
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("matrix", MATRICES)
def test_equals_the_direct_form_in_float64(matrix, name, steps):
    g = MATRICES[matrix]
    direct = orthogonalize(g, name, steps, dtype=torch.float64)
    actual = orthogonalize(g, name, steps, dtype=torch.float64, form="gram")
    # Rounding of the Gram matrix, 2e-16, grows by at most a^2 a step within a segment: to 1e-10 of it.
    torch.testing.assert_close(actual, direct, rtol=0, atol=1e-8)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("matrix", MATRICES)
@pytest.mark.parametrize(("dtype", "floor"), [(torch.float32, 3e-6), (torch.float16, 1e-2)])
def test_is_nearly_as_accurate_as_the_direct_form(matrix, name, dtype, floor):
    g = MATRICES[matrix]
    exact = orthogonalize(g, name, dtype=torch.float64)
    errors = {
        form: (torch.linalg.norm(orthogonalize(g, name, dtype=dtype, form=form).double() - exact)).item()
        / torch.linalg.norm(exact).item()
        for form in ("direct", "gram")
    }
    assert errors["gram"] <= 4 * errors["direct"] + floor


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("matrix", MATRICES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_no_singular_value_leaves_the_band(matrix, name, dtype):
    largest = torch.linalg.svdvals(orthogonalize(MATRICES[matrix], name, dtype=dtype, form="gram").double()).max()
    exact = torch.linalg.svdvals(orthogonalize(MATRICES[matrix], name, dtype=torch.float64)).max()
    assert largest <= max(exact, 1.0) + (0.03 if dtype == torch.float16 else 1e-4)


def test_segments_are_as_few_as_precision_allows():
    quintic = schedule("quintic", 5)
    assert [len(s) for s in gram.segments(quintic, torch.float32)] == [2, 3]
    assert [len(s) for s in gram.segments(quintic, torch.float16)] == [2, 3]
    assert [len(s) for s in gram.segments(quintic, torch.float64)] == [5]
    assert [len(s) for s in gram.segments(schedule("polar_express", 8), torch.float32)] == [2, 3, 3]
    assert gram.segments((), torch.float32) == [()] or gram.segments((), torch.float32) == []
    assert sum(gram.segments(quintic, torch.float32), ()) == quintic


def test_without_restarts_float32_would_lose_digits(monkeypatch):
    """What the restarts are for; fails if they no longer matter."""
    g = MATRICES["down to 1e-6"]
    exact = orthogonalize(g, "polar_express", 5, dtype=torch.float64)

    def error() -> float:
        return (orthogonalize(g, "polar_express", 5, dtype=torch.float32, form="gram").double() - exact).norm().item()

    restarted = error()
    monkeypatch.setitem(gram._TOLERANCES, torch.float32, 1.0)
    assert error() > 4 * restarted


def test_bfloat16_is_refused_and_auto_avoids_it():
    g = torch.randn(8, 64)
    with pytest.raises(ValueError, match=r'the Gram form needs .*torch\.float32.*not torch\.bfloat16.*form="direct"'):
        orthogonalize(g, form="gram")
    assert torch.equal(orthogonalize(g, form="auto"), orthogonalize(g))
    with pytest.raises(ValueError, match="form must be 'direct', 'gram' or 'auto', got 'Gram'"):
        orthogonalize(g, form="Gram")


def test_auto_takes_the_form_that_it_says():
    long, square = torch.randn(16, 64), torch.randn(32, 32)
    for g, form in ((long, "gram"), (long.T, "gram"), (square, "direct")):
        assert choose_form(*g.shape, torch.float32) == form
        auto = orthogonalize(g, dtype=torch.float32, form="auto")
        assert torch.equal(auto, orthogonalize(g, dtype=torch.float32, form=form))
    assert choose_form(16, 64, torch.float32, "cuda") == "direct"  # nothing was measured there
    assert choose_form(16, 64, torch.bfloat16) == "direct"


class CountProducts(torch.utils._python_dispatch.TorchDispatchMode):
    """FLOPs of the matrix products that really run."""

    flops = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        factors = {"mm": args[:2], "bmm": args[:2], "addmm": args[1:3], "baddbmm": args[1:3]}
        left, right = factors.get(func._schema.name.split("::")[1], (None, None))
        if left is not None:
            self.flops += 2 * left.numel() * right.shape[-1]
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("steps", [1, 2, 5, 8])
@pytest.mark.parametrize("shape", [(8, 24), (24, 8), (16, 16)])
def test_flops_are_those_that_run(shape, steps):
    g = torch.randn(shape)
    for dtype, form in ((torch.float32, "direct"), (torch.float32, "gram"), (torch.float64, "gram")):
        restarts = len(gram.segments(schedule("quintic", steps), dtype)) - 1
        with CountProducts() as counted:
            orthogonalize(g, steps=steps, dtype=dtype, form=form)
        assert counted.flops == flops(*shape, steps, form, restarts)
    m, n = sorted(shape)
    assert flops(*shape) == 20 * m * m * n + 10 * m**3
    assert flops(*shape, scheme="gram") == 8 * m * m * n + 28 * m**3
    with pytest.raises(ValueError, match="'direct' or 'gram', got 'auto'"):
        flops(*shape, scheme="auto")
