"""The Gram form of Newton-Schulz: the iteration runs on the small matrix ``X X^T`` instead of on ``X``."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import torch
from torch import Tensor

from dmuon_core.optim.polar import Quintic

#: Largest bound on the relative error of the Gram matrix before it is made anew, by dtype. Chosen by measurement: the
#: result is then within four times the error of the direct form (tests/unit/test_gram.py). bfloat16 has none: its first
#: Gram matrix is off by 4e-3 already.
_TOLERANCES = {torch.float16: 0.2, torch.float32: 1e-3, torch.float64: 1e-10}
DTYPES = tuple(_TOLERANCES)


def iterate(x: Tensor, polynomials: Sequence[Quintic]) -> Tensor:
    """Apply every odd quintic ``a X + b (X X^T) X + c (X X^T)^2 X`` in turn. Local, pure.

    With ``R = X X^T`` and ``P = a I + b R + c R^2`` a step is ``X <- P X`` and ``R <- P R P``, because all of these are
    polynomials in the first ``R`` and commute. So only ``R`` and the product ``Q`` of all ``P``, both ``[m, m]``,
    are iterated, and ``X`` is multiplied once, at the end: for ``m <= n`` that saves most products with ``n``.

    Rounding errors of ``R`` grow by up to ``a^2`` a step. Where the dtype could not bear that to the end, the steps are
    divided into segments (:func:`segments`); each ends with ``X <- Q X`` and a new ``R`` (a restart).

    Shapes: ``[m, n]`` or ``[batch, m, n]`` with ``m <= n``, singular values up to 1 -> the same.

    Source: the identity is elementary; restarts as in https://dao-ailab.github.io/blog/2026/gram-newton-schulz/.
    """
    for segment in segments(polynomials, x.dtype):
        gram = x @ x.mT
        product: Tensor | None = None
        for index, (a, b, c) in enumerate(segment):
            rest = fused_product(gram, gram, gram, beta=b, alpha=c)  # P = a I + rest
            last = index + 1 == len(segment)
            if not last:
                half = fused_product(gram, gram, rest, beta=a)
                gram = fused_product(half, rest, half, beta=a)
            if product is None:
                product = rest if last else rest.clone()
                product.diagonal(dim1=-2, dim2=-1).add_(a)
            else:
                product = fused_product(product, rest, product, beta=a)
        assert product is not None
        x = product @ x
    return x


def segments(polynomials: Sequence[Quintic], dtype: torch.dtype) -> list[tuple[Quintic, ...]]:
    """Divide the steps into the fewest near-equal segments over which rounding errors stay small.

    Raises:
        ValueError: a dtype without the precision for the Gram form.
    """
    if dtype not in DTYPES:
        raise ValueError(
            f"the Gram form needs {', '.join(map(str, DTYPES))}, not {dtype}, in which it loses the small singular "
            'values and doubles large ones; use form="direct" or form="auto"'
        )
    steps = len(polynomials)
    for count in range(1, steps + 1):
        bounds = [index * steps // count for index in range(count + 1)]
        found = [tuple(polynomials[start:end]) for start, end in pairwise(bounds)]
        if all(_error(segment, dtype) <= _TOLERANCES[dtype] for segment in found):
            return found
    return [(polynomial,) for polynomial in polynomials]


def _error(segment: Sequence[Quintic], dtype: torch.dtype) -> float:
    error = torch.finfo(dtype).eps
    for a, _, _ in segment[:-1]:
        error *= max(1.0, a * a)
    return error


def fused_product(added: Tensor, left: Tensor, right: Tensor, *, beta: float, alpha: float = 1.0) -> Tensor:
    """``beta * added + alpha * left @ right`` with one rounding, for matrices and for batches of them. Local."""
    if added.ndim == 2:
        return torch.addmm(added, left, right, beta=beta, alpha=alpha)
    return torch.baddbmm(added, left, right, beta=beta, alpha=alpha)
