"""Newton-Schulz orthogonalization: the matrix function at the heart of Muon, as pure tensor math."""

from __future__ import annotations

import torch
from torch import Tensor

#: Quintic coefficients (a, b, c) with the steepest slope at zero; from Jordan's post cited below.
COEFFICIENTS: tuple[float, float, float] = (3.4445, -4.7750, 2.0315)
STEPS = 5
EPS = 1e-7


def orthogonalize(
    g: Tensor,
    coefficients: tuple[float, float, float] = COEFFICIENTS,
    steps: int = STEPS,
    eps: float = EPS,
    dtype: torch.dtype = torch.bfloat16,
) -> Tensor:
    """Push all singular values of one matrix towards 1 and keep its singular vectors.

    With ``X = g / max(|g|_F, eps)``, every step maps ``X`` to ``a X + b (X X^T) X + c (X X^T)^2 X``, that is,
    each singular value ``s`` to ``a s + b s^3 + c s^5``. The default coefficients trade exactness for speed:
    after five steps the singular values lie around 1 (roughly 0.7 to 1.2), which is what Muon wants.

    Shapes: ``[m, n]`` in any floating dtype -> ``[m, n]`` in ``dtype``. Local; ``g`` is never written to. The
        shorter
    side becomes the row side, so the products with ``X X^T`` cost ``min(m, n)^2 * max(m, n)``. An all-zero
    matrix gives an all-zero result. In ``bfloat16`` the result equals that of ``torch.optim.Muon`` bit for
    bit.

    Raises:
        ValueError: ``g`` is not a floating-point matrix, ``steps`` is negative, or there are not three
            coefficients.

    Source: K. Jordan et al., "Muon: An optimizer for hidden layers in neural networks", 2024
    (https://kellerjordan.github.io/posts/muon/); J. Bernstein and L. Newhouse, arXiv:2409.20325, section on
    Newton-Schulz.
    """
    if g.ndim != 2 or not g.is_floating_point():
        raise ValueError(
            f"orthogonalize takes one floating-point matrix, got {g.dtype} with shape {tuple(g.shape)}; "
            "flatten a convolution weight with g.flatten(1) first"
        )
    if steps < 0:
        raise ValueError(f"steps must be >= 0, got {steps}")
    if len(coefficients) != 3:
        raise ValueError(f"coefficients must be three numbers (a, b, c), got {coefficients!r}")
    a, b, c = coefficients
    tall = g.size(0) > g.size(1)
    x = g.to(dtype)
    if tall:
        x = x.T
    # Out of place: with g already in `dtype`, x shares its memory, and g may well be the momentum buffer.
    x = x / x.norm().clamp(min=eps)
    for _ in range(steps):
        gram = x @ x.T
        polynomial = torch.addmm(gram, gram, gram, beta=b, alpha=c)
        x = torch.addmm(x, polynomial, x, beta=a)
    return x.T if tall else x
