"""Which of Lightning's precision plugins work with owned and sharded parameters, and how they clip."""

from __future__ import annotations

from types import MethodType
from typing import Any

from torch.optim import Optimizer

from dmuon_core import clip_grad_norm_
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
            "'bf16-mixed', 'bf16-true' or, with a gradient scaler, '16-mixed'"
        )


def clip_by_global_norm(plugin: Any) -> None:
    """Let ``plugin`` clip by one norm over owned and sharded gradients of any dtype, in one all-reduce. Local.

    A plugin with a way of its own keeps it.
    """
    if type(plugin).clip_grad_by_norm.__module__.startswith(_PACKAGES):
        plugin.clip_grad_by_norm = MethodType(_clip_grad_by_norm, plugin)


def _clip_grad_by_norm(plugin: Any, optimizer: Optimizer, clip_val: float) -> None:
    clip_grad_norm_(plugin.main_params(optimizer), clip_val)
