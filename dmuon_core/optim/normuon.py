"""NorMuon: every neuron of an orthogonalized update gets the same share of it over time."""

from __future__ import annotations

import torch
from torch import Tensor

_EPS = 1e-10


def lerp(start: Tensor, end: Tensor, weight: float | Tensor) -> Tensor:
    """``start + weight (end - start)``; ``weight`` may be a tensor without dimensions of any dtype and device. Pure."""
    if not isinstance(weight, Tensor):
        return start.lerp(end, weight)
    # Tensor.lerp takes no tensor of another dtype, and computes in float32 at least.
    wide = torch.promote_types(start.dtype, torch.float32)
    return (start.to(wide) + weight * (end.to(wide) - start.to(wide))).to(start.dtype)


def normalize_neurons(update: Tensor, second: Tensor, beta2: float | Tensor) -> tuple[Tensor, Tensor]:
    """Divide each row by the root of its running mean square, and keep the Frobenius norm. Local, pure.

    ``v <- beta2 v + (1 - beta2) mean_j(O_ij^2)`` and ``O <- O / (sqrt(v) + eps)``, scaled back to the norm that ``O``
    had. The norm of an orthogonal factor is ``sqrt(min(m, n))``, so that with "match_rms_adamw" the step is the
    paper's ``0.2 lr sqrt(m n) O / |O|_F``.

    Shapes: ``update`` ``[..., m, n]`` in any floating dtype, ``second`` ``[..., m, 1]`` -> the new update in at least
    float32, and the new ``second`` in its dtype.

    Source: Z. Li et al., "NorMuon", arXiv:2510.05491, algorithm 1.
    """
    o = update.to(torch.promote_types(second.dtype, torch.float32))
    average = lerp(second.to(o.dtype), o.square().mean(-1, keepdim=True), 1 - beta2)
    normalized = o / average.sqrt().add(_EPS)
    before, after = (torch.linalg.vector_norm(t, dim=(-2, -1), keepdim=True) for t in (o, normalized))
    return normalized * (before / after.clamp(min=_EPS)), average.to(second.dtype)
