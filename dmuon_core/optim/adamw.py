"""The AdamW side of Muon: embeddings, heads, norms and biases, with the numbers of ``torch.optim.AdamW``."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.optim.adamw import adamw

from dmuon_core.optim.local import is_stepped_here, local, zeros_for_state


def adamw_state(p: Tensor) -> dict[str, Tensor]:
    """State of a parameter before its first AdamW step. Local."""
    dtype = torch.float64 if torch.get_default_dtype() == torch.float64 else torch.float32
    return {
        "step": torch.tensor(0.0, dtype=dtype, device="cpu"),
        "exp_avg": zeros_for_state(p),
        "exp_avg_sq": zeros_for_state(p),
    }


def adamw_update(group: dict[str, Any], state: Any) -> None:
    """Step every parameter of one AdamW group that has a gradient; in place, local, no collective.

    State has the keys, dtypes and placements of ``torch.optim.AdamW``: ``step`` (a scalar on CPU),
    ``exp_avg`` and ``exp_avg_sq`` (like the parameter, so a DTensor stays a DTensor). AdamW is elementwise,
    so each rank may work on its own shard.

    Source: I. Loshchilov and F. Hutter, arXiv:1711.05101; the arithmetic is torch's functional ``adamw``.
    """
    params = [p for p in group["params"] if p.grad is not None]
    if not params:
        return
    for p in params:
        if not state[p]:
            state[p].update(adamw_state(p))
    for p in params:
        if not is_stepped_here(p):
            state[p]["step"] += 1  # any rank may be asked for it, by a checkpoint or by a later owner
    params = [p for p in params if is_stepped_here(p)]
    if not params:
        return
    beta1, beta2 = group["betas"]
    adamw(
        [local(p) for p in params],
        [local(p.grad) for p in params],
        [local(state[p]["exp_avg"]) for p in params],
        [local(state[p]["exp_avg_sq"]) for p in params],
        [],
        [local(state[p]["step"]) for p in params],
        has_complex=any(p.is_complex() for p in params),
        amsgrad=False,
        maximize=group["maximize"],
        beta1=beta1,
        beta2=beta2,
        lr=group["lr"],
        weight_decay=float(group["weight_decay"]),
        eps=group["eps"],
    )
