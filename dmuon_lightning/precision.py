"""Precision plugins that work with owned and sharded parameters, how they clip, and the norms that users log."""

from __future__ import annotations

from types import MethodType
from typing import Any

import torch.nn as nn
from torch.optim import Optimizer

from dmuon_core import clip_grad_norm_
from dmuon_core.grad_clip import total_grad_norm
from dmuon_lightning._lightning import MisconfigurationException

# By name, because each distribution of Lightning has classes of its own.
_SUPPORTED = {"Precision", "HalfPrecision", "MixedPrecision"}
_PACKAGES = ("lightning.", "lightning_fabric.", "pytorch_lightning.")


def check_precision(plugin: Any) -> None:
    """Refuse a plugin that is not known to work. Local.

    Raises:
        MisconfigurationException: names the plugin and those that work.
    """
    stock = next(cls for cls in type(plugin).__mro__ if cls.__module__.startswith(_PACKAGES))
    if stock.__name__ not in _SUPPORTED:
        precision = getattr(plugin, "precision", stock.__name__)
        raise MisconfigurationException(
            f"DMuonStrategy does not support precision={precision!r} ({stock.__name__}): choose '32-true', "
            "'bf16-mixed', 'bf16-true', '16-true' or, with a gradient scaler, '16-mixed'"
        )


def clip_by_global_norm(plugin: Any) -> None:
    """Let ``plugin`` clip by one norm over owned and sharded gradients of any dtype, in one all-reduce. Local.

    A plugin with a way of its own keeps it.
    """
    if type(plugin).clip_grad_by_norm.__module__.startswith(_PACKAGES):
        plugin.clip_grad_by_norm = MethodType(_clip_grad_by_norm, plugin)


def _clip_grad_by_norm(plugin: Any, optimizer: Optimizer, clip_val: float) -> None:
    clip_grad_norm_(plugin.main_params(optimizer), clip_val)


def grad_norm(module: nn.Module, norm_type: float | str = 2.0, group_separator: str = "/") -> dict[str, float]:
    """Global norms of the gradients, of each parameter and in total. Collective: call it on every rank.

    The same as ``lightning.pytorch.utilities.grad_norm``, which cannot read sharded gradients. Parameters without a
    gradient are left out.

    Args:
        module: in ``on_before_optimizer_step``, say, the LightningModule.
        norm_type: p of the p-norm, > 0, or "inf".
        group_separator: of the names, such as ``grad_2.0_norm/head.weight``.
    """
    grads = {name: p.grad for name, p in module.named_parameters() if p.grad is not None}
    norm_type = float(norm_type)
    prefix = f"grad_{norm_type}_norm"
    norms = {f"{prefix}{group_separator}{name}": total_grad_norm([grad], norm_type) for name, grad in grads.items()}
    if norms:
        norms[f"{prefix}_total"] = total_grad_norm(list(grads.values()), norm_type)
    return {name: norm.item() for name, norm in norms.items()}
