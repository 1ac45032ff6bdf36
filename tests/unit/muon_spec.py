"""Muon with all its options, written down in float64 from the papers' formulas; knows nothing of dmuon_core.

Newton-Schulz is the polynomial of the singular values. A parameter comes as the list of matrices that it stands for.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

Quintic = tuple[float, float, float]


@dataclass
class Spec:
    lr: float = 0.02
    weight_decay: float = 0.1
    momentum: float = 0.95
    nesterov: bool = True
    polynomials: Sequence[Quintic] = ((3.4445, -4.7750, 2.0315),) * 5
    eps: float = 1e-7
    adjust: str = "original"
    maximize: bool = False
    cautious: bool = False
    normuon: bool = False
    beta2: float = 0.95
    averages: dict[int, Tensor] = field(default_factory=dict)
    seconds: dict[int, Tensor] = field(default_factory=dict)

    def step(self, index: int, w: Tensor, g: Tensor) -> Tensor:
        """The new value of matrix ``index``."""
        g = -g if self.maximize else g
        average = self.averages[index] = self.momentum * self.averages.get(index, 0 * g) + (1 - self.momentum) * g
        m = (1 - self.momentum) * g + self.momentum * average if self.nesterov else average
        u, s, vh = torch.linalg.svd(m, full_matrices=False)
        s = s / max(float(m.square().sum().sqrt()), self.eps)
        for a, b, c in self.polynomials:
            s = a * s + b * s**3 + c * s**5
        o = u @ torch.diag(s) @ vh
        if self.normuon:
            mean = o.square().mean(1)
            v = self.seconds[index] = self.beta2 * self.seconds.get(index, 0 * mean) + (1 - self.beta2) * mean
            norm = o.norm()
            o = o / (v.sqrt() + 1e-10)[:, None]
            o = o * norm / o.norm()
        rows, columns = w.shape
        scale = {
            "original": max(1.0, rows / columns) ** 0.5,
            "match_rms_adamw": 0.2 * max(rows, columns) ** 0.5,
            "none": 1.0,
        }[self.adjust]
        decayed = w * (o * w >= 0) if self.cautious else w
        return w - self.lr * self.weight_decay * decayed - self.lr * scale * o
