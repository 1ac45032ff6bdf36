"""The orthogonalization against its definition, its symmetries, and the stock optimizer."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.optim._muon import _zeropower_via_newtonschulz as stock

from dmuon_core.optim import orthogonalize
from dmuon_core.optim.newton_schulz import COEFFICIENTS, EPS, STEPS
from dmuon_core.optim.polar import schedule

SHAPES = [(8, 8), (4, 24), (24, 4), (1, 16), (16, 1), (1, 1), (33, 17)]

sizes = st.integers(1, 24)
seeds = st.integers(0, 2**31)
dtypes = st.sampled_from([torch.bfloat16, torch.float32, torch.float64])
few = settings(max_examples=30, deadline=None)


def matrix(shape: tuple[int, ...], seed: int = 0, dtype: torch.dtype = torch.float32) -> torch.Tensor:
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


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("name", ["quintic", "polar_express", "cans"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_every_schedule_and_dtype_against_float64(shape, name, dtype):
    """Relative errors in the Frobenius norm, measured below two thirds of these: the rounding of a product, 1e-7 in
    float32, is multiplied by up to the product of all `a`, a thousand, where singular values are small."""
    g = matrix(shape)
    exact = polynomials_of_singular_values(g, schedule(name, 5))
    error = torch.linalg.norm(orthogonalize(g, name, dtype=dtype).double() - exact) / torch.linalg.norm(exact)
    assert error < {torch.bfloat16: 0.3, torch.float16: 3e-2, torch.float32: 2e-4}[dtype]


def polynomials_of_singular_values(g: torch.Tensor, polynomials) -> torch.Tensor:
    u, s, vh = torch.linalg.svd(g.double(), full_matrices=False)
    s = s / torch.linalg.matrix_norm(g.double())
    for a, b, c in polynomials:
        s = a * s + b * s**3 + c * s**5
    return u @ torch.diag(s) @ vh


@pytest.mark.parametrize("shape", SHAPES)
def test_aol_is_the_polynomial_of_the_matrix_with_rescaled_rows(shape):
    g = matrix(shape, dtype=torch.float64)
    short = g.T if shape[0] > shape[1] else g
    short = short / torch.linalg.matrix_norm(short)
    scaled = short / (short @ short.T).abs().sum(1, keepdim=True).sqrt()
    assert torch.linalg.matrix_norm(scaled, 2) <= 1 + 1e-12
    u, s, vh = torch.linalg.svd(scaled, full_matrices=False)
    for a, b, c in schedule("aol", 4):
        s = a * s + b * s**3 + c * s**5
    expected = u @ torch.diag(s) @ vh
    actual = orthogonalize(g, "aol", 4, dtype=torch.float64)
    torch.testing.assert_close(actual, expected.T if shape[0] > shape[1] else expected, atol=1e-10, rtol=1e-10)


FORMS = [(torch.bfloat16, "direct"), *((d, f) for d in (torch.float16, torch.float32) for f in ("direct", "gram"))]


@pytest.mark.parametrize("shape", [(5, 8, 8), (3, 4, 24), (3, 24, 4), (4, 1, 16), (2, 16, 1), (2, 3, 6, 5), (1, 7, 9)])
@pytest.mark.parametrize(("dtype", "form"), FORMS)
def test_a_batch_equals_its_matrices(shape, dtype, form):
    """Another kernel may add in another order: a last bit of a product, which the steps multiply where singular values
    are small. Alone in its batch a matrix takes the same kernel."""
    batch = matrix(shape).to(torch.float32)
    together = orthogonalize(batch, dtype=dtype, form=form)
    assert together.shape == batch.shape and together.dtype == dtype
    alone = [orthogonalize(g, dtype=dtype, form=form) for g in batch.flatten(0, -3)]
    if len(alone) == 1:
        assert torch.equal(together.flatten(0, -3), torch.stack(alone))
    bound = 1e-5 if dtype == torch.float32 else 2e-2
    torch.testing.assert_close(together.flatten(0, -3), torch.stack(alone), rtol=0, atol=bound)


def test_matrices_of_a_batch_do_not_touch_one_another():
    batch = matrix((3, 6, 9)).float()
    batch[0] *= 1e-20
    batch[1] *= 1e20
    for dtype, form in FORMS:
        together = orthogonalize(batch, dtype=dtype, form=form)
        expected = orthogonalize(batch[2], dtype=dtype, form=form)
        torch.testing.assert_close(together[2], expected, rtol=0, atol=2e-2 if dtype == torch.float16 else 1e-5)


@pytest.mark.parametrize("shape", [(6, 6), (1, 16), (16, 1), (1, 1), (5, 12), (3, 4, 9), (0, 4), (4, 0), (0, 3, 4)])
@pytest.mark.parametrize("name", ["quintic", "polar_express", "cans", "aol"])
@pytest.mark.parametrize(("dtype", "form"), FORMS)
def test_degenerate_matrices_stay_finite(shape, name, dtype, form):
    rank_one = torch.outer(torch.arange(1.0, shape[-2] + 1), torch.linspace(-1, 1, shape[-1])).expand(shape)
    ones, random = torch.ones(shape), matrix(shape).float()
    for g in (ones * 0, ones, rank_one, *(scale * random for scale in (1e-38, 1e-20, 1e-7, 1e15, 1e30))):
        result = orthogonalize(g, name, dtype=dtype, form=form)
        assert result.shape == g.shape
        # No schedule goes above 1.35 in exact arithmetic; rounding of 8 and 11 bits adds the rest.
        assert torch.isfinite(result).all() and (result.numel() == 0 or result.abs().max() < 1.5)
        if not g.any():
            assert not result.any()


@pytest.mark.parametrize(
    ("argument", "kwargs", "message"),
    [
        (torch.zeros(3), {}, r"floating-point matrices, got torch.float32 with shape \(3,\)"),
        (torch.zeros(2, 3), {"dtype": torch.int32}, "dtype must be one of torch.bfloat16"),
        (torch.zeros(2, 3), {"coefficients": "jordan"}, "unknown coefficients 'jordan'"),
        (torch.zeros(2, 3, dtype=torch.int64), {}, "torch.int64"),
        (torch.zeros(2, 3, dtype=torch.complex64), {}, "torch.complex64"),
        (torch.zeros(2, 3), {"steps": -1}, "steps must be >= 0, got -1"),
        (torch.zeros(2, 3), {"coefficients": (1.0, 2.0)}, "three numbers"),
    ],
)
def test_errors(argument, kwargs, message):
    with pytest.raises(ValueError, match=message):
        orthogonalize(argument, **kwargs)
