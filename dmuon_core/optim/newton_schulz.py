"""Newton-Schulz orthogonalization: the matrix function at the heart of Muon, as pure tensor math."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from dmuon_core.optim import gram
from dmuon_core.optim.polar import JORDAN, Coefficients, Quintic, rescales_rows, schedule
from dmuon_core.partition import newton_schulz_flops

Form = Literal["direct", "gram", "auto"]

#: The defaults of ``torch.optim.Muon``.
COEFFICIENTS: Quintic = JORDAN
STEPS = 5
EPS = 1e-7
DTYPES = (torch.bfloat16, torch.float16, torch.float32, torch.float64)


def orthogonalize(
    g: Tensor,
    coefficients: Coefficients = COEFFICIENTS,
    steps: int = STEPS,
    eps: float = EPS,
    dtype: torch.dtype = torch.bfloat16,
    *,
    form: Form = "direct",
) -> Tensor:
    """Push all singular values of each matrix towards 1 and keep its singular vectors.

    With ``X = g / max(|g|_F, eps)``, every step maps ``X`` to ``a X + b (X X^T) X + c (X X^T)^2 X``, that is,
    each singular value ``s`` to ``a s + b s^3 + c s^5``. The default coefficients trade exactness for speed:
    after five steps the singular values lie around 1 (roughly 0.7 to 1.2), which is what Muon wants.
    docs/newton_schulz.md has the accuracy of every schedule and dtype.

    Shapes: ``[..., m, n]`` in any floating dtype -> ``[..., m, n]`` in ``dtype``. Local; ``g`` is never written to.
    The shorter side becomes the row side, so the products with ``X X^T`` cost ``min(m, n)^2 * max(m, n)``. Every
    matrix of a batch is normalized by itself. An all-zero matrix gives an all-zero result; one whose norm overflows
    ``float32`` does too. A single matrix in ``bfloat16`` with the other defaults equals ``torch.optim.Muon`` bit for
    bit; in a batch the products may differ in the last bit, because another kernel runs them.

    Args:
        g: the matrices.
        coefficients: a triple, a triple for each step, or the name of a schedule, see
            :func:`~dmuon_core.optim.polar.schedule`. "aol" rescales rows first (:func:`rescale_rows`), and so ends
            near the orthogonal factor of the rescaled matrix.
        steps: number of steps.
        eps: smallest norm to divide by.
        dtype: of the products. ``float16`` normalizes in ``float32``, because the norm may overflow.
        form: "direct" iterates on ``X``; "gram" on ``X X^T`` (:mod:`dmuon_core.optim.gram`), which is cheaper for
            long matrices; "auto" takes the one that was measured to be faster, see :func:`choose_form`.

    Raises:
        ValueError: ``g`` is no floating-point matrix, or another argument is not usable.

    Source: K. Jordan et al., "Muon: An optimizer for hidden layers in neural networks", 2024
    (https://kellerjordan.github.io/posts/muon/); J. Bernstein and L. Newhouse, arXiv:2409.20325, section on
    Newton-Schulz.
    """
    if g.ndim < 2 or not g.is_floating_point():
        raise ValueError(f"orthogonalize takes floating-point matrices, got {g.dtype} with shape {tuple(g.shape)}")
    if dtype not in DTYPES:
        raise ValueError(f"dtype must be one of {', '.join(map(str, DTYPES))}, got {dtype}")
    polynomials = schedule(coefficients, steps)
    *batch, m, n = g.shape
    chosen = choose_form(m, n, dtype, g.device.type) if form == "auto" else form
    if chosen not in ("direct", "gram"):
        raise ValueError(f"form must be 'direct', 'gram' or 'auto', got {form!r}")
    tall = m > n
    x = _normalize(g, eps, dtype)
    if x.ndim > 2:
        # One matrix takes the kernels of one matrix, so that it does not matter whether it is called a batch.
        count = x.shape[:-2].numel()
        x = x.reshape(m, n) if count == 1 else x.reshape(count, m, n)
    if tall:
        x = x.mT
    if rescales_rows(coefficients):
        x = rescale_rows(x, eps)
    x = gram.iterate(x, polynomials) if chosen == "gram" else _iterate(x, polynomials)
    if tall:
        x = x.mT
    return x.reshape(*batch, m, n) if batch else x


def _iterate(x: Tensor, polynomials: tuple[Quintic, ...]) -> Tensor:
    for a, b, c in polynomials:
        square = x @ x.mT
        polynomial = gram.fused_product(square, square, square, beta=b, alpha=c)
        x = gram.fused_product(x, polynomial, x, beta=a)
    return x


def _normalize(g: Tensor, eps: float, dtype: torch.dtype) -> Tensor:
    # Out of place: with g already in `dtype`, x shares its memory, and g may well be the momentum buffer.
    x = g.to(torch.float32 if dtype == torch.float16 else dtype)
    if x.ndim == 2:
        return (x / x.norm().clamp(min=eps)).to(dtype)
    norm = torch.linalg.vector_norm(x, dim=(-2, -1), keepdim=True)
    return (x / norm.clamp(min=eps)).to(dtype)


def rescale_rows(x: Tensor, eps: float = EPS) -> Tensor:
    """Divide row ``i`` by ``sqrt(sum_j |X X^T|_ij)``, after which no singular value is above 1. Local, pure.

    Closer to orthogonal than division by the norm, and cheap, but it changes the singular vectors: what follows
    orthogonalizes the rescaled matrix. Shape ``[..., m, n]`` -> the same.

    Source: B. Prach and C. Lampert, arXiv:2208.03160 (almost-orthogonal layers); for Muon arXiv:2512.04632.
    """
    sums = (x @ x.mT).abs().sum(-1, keepdim=True)
    # eps^2 is what a row of norm eps has; clamped, because float16 has no such number.
    return x * sums.clamp(min=max(eps * eps, torch.finfo(x.dtype).tiny)).rsqrt()


def choose_form(m: int, n: int, dtype: torch.dtype, device_type: str = "cpu") -> Literal["direct", "gram"]:
    """The faster form for an ``[m, n]`` matrix, by measured crossover points (docs/newton_schulz.md). Local.

    Never "gram" in bfloat16, which has not the precision for it; nor where nothing was measured.
    """
    if dtype not in (torch.float32, torch.float64) or device_type != "cpu":
        return "direct"
    short, long = min(m, n), max(m, n)
    # Small matrices pay for the number of products, large ones for FLOPs, which are equal at 1.5.
    return "gram" if long >= (2 if short >= 128 else 3) * short else "direct"


def flops(m: int, n: int, steps: int = STEPS, scheme: Literal["direct", "gram"] = "direct", restarts: int = 1) -> int:
    """FLOPs of orthogonalizing one ``[m, n]`` matrix, products only. Pure Python.

    With ``m <= n``: a direct step is ``X X^T`` (2 m^2 n), its square (2 m^3) and a product with ``X`` (2 m^2 n). The
    Gram form multiplies with ``n`` columns twice for each of its ``restarts + 1`` segments (4 m^2 n); each step squares
    (2 m^3), and all but the last of a segment update ``Q`` and ``R`` by three more products (6 m^3). Five steps:
    ``20 m^2 n + 10 m^3`` direct, ``8 m^2 n + 28 m^3`` with one restart.
    """
    if scheme == "direct":
        return newton_schulz_flops((m, n), steps)
    m, n = min(m, n), max(m, n)
    if scheme != "gram":
        raise ValueError(f"scheme must be 'direct' or 'gram', got {scheme!r}")
    segments = min(restarts + 1, steps)
    return segments * 4 * m * m * n + 2 * m**3 * (4 * steps - 3 * segments)
