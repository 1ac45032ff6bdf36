"""What OwnedOptimizer cannot work with: optimizers that run the model in their step, gradients that one refuses."""

from __future__ import annotations

import inspect

import torch
from torch import Tensor

from dmuon_core.optim.local import gradient_problem

#: Of torch. Of others nobody knows; they are given sparse gradients.
_DENSE_ONLY = tuple(
    getattr(torch.optim, name)
    for name in (
        "ASGD", "Adadelta", "Adafactor", "Adam", "Adamax", "AdamW", "Muon", "NAdam", "RAdam", "RMSprop", "Rprop",
    )
    if hasattr(torch.optim, name)
)  # fmt: skip


def closure_problem(optimizer: torch.optim.Optimizer) -> str | None:
    """Say why ``optimizer`` cannot be stepped without a closure, and the remedy; None if it can. Local.

    Those that have to run the model in their step are told by its signature (LBFGS), or by the name of a class whose
    signature calls optional what it needs: of sharpness-aware minimization (SAM, GSAM), and AliG.
    """
    closure = inspect.signature(type(optimizer).step).parameters.get("closure")
    required = closure is not None and closure.default is inspect.Parameter.empty
    if not required and not any(kind.__name__.endswith(("SAM", "AliG")) for kind in type(optimizer).__mro__):
        return None
    return (
        f"{type(optimizer).__name__} runs forward and backward inside its step, where owned parameters are not whole; "
        "use an optimizer that steps by the gradients that are there, or train without ownership"
    )


def other_gradient_problem(p: Tensor, optimizer: torch.optim.Optimizer) -> str | None:
    """Say why ``optimizer`` would refuse the gradient of ``p`` (not None), and the remedy; None if it would not. Local.

    It is asked before any optimizer steps: one that raises later leaves half a step behind.
    """
    assert p.grad is not None
    name = type(optimizer).__name__
    if isinstance(optimizer, torch.optim.SparseAdam) and p.grad.layout == torch.strided:
        return f"its gradient is dense, and {name} takes only sparse ones; build the layer with sparse=True"
    return gradient_problem(p, "adamw", sparse=not isinstance(optimizer, _DENSE_ONLY))
