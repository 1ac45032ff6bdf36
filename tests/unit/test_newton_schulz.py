"""The orthogonalization against its definition, its symmetries, and the stock optimizer."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.optim._muon import _zeropower_via_newtonschulz as stock

from dmuon_core.optim import orthogonalize
from dmuon_core.optim.newton_schulz import COEFFICIENTS, EPS, STEPS

SHAPES = [(8, 8), (4, 24), (24, 4), (1, 16), (16, 1), (1, 1), (33, 17)]

sizes = st.integers(1, 24)
seeds = st.integers(0, 2**31)
dtypes = st.sampled_from([torch.bfloat16, torch.float32, torch.float64])
few = settings(max_examples=30, deadline=None)


def matrix(shape: tuple[int, int], seed: int = 0, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


def polynomial_of_singular_values(
    g: torch.Tensor, coefficients: tuple[float, float, float], steps: int
) -> torch.Tensor:
    """The definition: keep the singular vectors, map each singular value by the polynomial `steps` times."""
    a, b, c = coefficients
    u, s, vh = torch.linalg.svd(g.double(), full_matrices=False)
    s = s / torch.linalg.matrix_norm(g.double())
    for _ in range(steps):
        s = a * s + b * s**3 + c * s**5
    return u @ torch.diag(s) @ vh


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_equals_stock_bit_for_bit_in_bfloat16(shape, dtype):
    g = matrix(shape, dtype=dtype)
    # The stock function normalizes a bfloat16 input in place, so it gets its own copy.
    expected = stock(g.clone(), COEFFICIENTS, STEPS, EPS)
    actual = orthogonalize(g)
    assert actual.dtype == torch.bfloat16
    assert torch.equal(actual, expected)


@pytest.mark.parametrize("steps", [0, 1, 5])
@pytest.mark.parametrize("coefficients", [COEFFICIENTS, (2.0, -1.5, 0.5)])
@pytest.mark.parametrize("shape", SHAPES)
def test_is_the_polynomial_of_the_singular_values(shape, coefficients, steps):
    g = matrix(shape, dtype=torch.float64)
    actual = orthogonalize(g, coefficients, steps, dtype=torch.float64)
    torch.testing.assert_close(actual, polynomial_of_singular_values(g, coefficients, steps), atol=1e-10, rtol=1e-10)


def test_singular_values_end_near_one():
    s = torch.linalg.svdvals(orthogonalize(matrix((64, 48)), dtype=torch.float32))
    assert 0.4 < s.min() <= s.max() < 1.3


@few
@given(m=sizes, n=sizes, seed=seeds, dtype=dtypes)
def test_input_is_never_written(m, n, seed, dtype):
    g = matrix((m, n), seed, dtype)
    before = g.clone()
    orthogonalize(g, dtype=dtype)
    assert torch.equal(g, before)


@few
@given(m=sizes, n=sizes, seed=seeds, power=st.integers(-10, 10), dtype=dtypes)
def test_scale_does_not_matter(m, n, seed, power, dtype):
    """Powers of two change only exponents, so even the rounding is the same."""
    g = matrix((m, n), seed)
    assert torch.equal(orthogonalize(g * 2.0**power, dtype=dtype), orthogonalize(g, dtype=dtype))


@few
@given(m=sizes, n=sizes, seed=seeds, dtype=dtypes)
def test_is_odd(m, n, seed, dtype):
    g = matrix((m, n), seed)
    assert torch.equal(orthogonalize(-g, dtype=dtype), -orthogonalize(g, dtype=dtype))


@few
@given(m=sizes, n=sizes, seed=seeds)
def test_commutes_with_transposition(m, n, seed):
    g = matrix((m, n), seed, torch.float64)
    torch.testing.assert_close(
        orthogonalize(g.T, dtype=torch.float64),
        orthogonalize(g, dtype=torch.float64).T,
        atol=1e-12,
        rtol=1e-12,
    )


@few
@given(m=sizes, n=sizes, seed=seeds)
def test_commutes_with_rotations(m, n, seed):
    g = matrix((m, n), seed, torch.float64)
    left = torch.linalg.qr(matrix((m, m), seed + 1, torch.float64))[0]
    right = torch.linalg.qr(matrix((n, n), seed + 2, torch.float64))[0]
    rotated = orthogonalize(left @ g @ right, dtype=torch.float64)
    torch.testing.assert_close(rotated, left @ orthogonalize(g, dtype=torch.float64) @ right, atol=1e-9, rtol=1e-9)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_zero_stays_zero(shape, dtype):
    assert torch.equal(orthogonalize(torch.zeros(shape), dtype=dtype), torch.zeros(shape, dtype=dtype))


def test_strided_input_equals_contiguous_input():
    g = matrix((32, 16), dtype=torch.float64)[::2, 1::3]
    assert not g.is_contiguous()
    strided, contiguous = (orthogonalize(x, dtype=torch.float64) for x in (g, g.contiguous()))
    torch.testing.assert_close(strided, contiguous, atol=1e-12, rtol=1e-12)


@pytest.mark.parametrize(
    ("argument", "kwargs", "message"),
    [
        (torch.zeros(3), {}, "floating-point matrix"),
        (torch.zeros(2, 3, 4), {}, r"flatten\(1\)"),
        (torch.zeros(2, 3, dtype=torch.int64), {}, "torch.int64"),
        (torch.zeros(2, 3, dtype=torch.complex64), {}, "torch.complex64"),
        (torch.zeros(2, 3), {"steps": -1}, "steps must be >= 0, got -1"),
        (torch.zeros(2, 3), {"coefficients": (1.0, 2.0)}, "three numbers"),
    ],
)
def test_errors(argument, kwargs, message):
    with pytest.raises(ValueError, match=message):
        orthogonalize(argument, **kwargs)
