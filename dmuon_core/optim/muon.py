"""Muon and AdamW parameter groups in one ``torch.optim.Optimizer`` that knows owned parameters."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext
from typing import Any, overload

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from dmuon_core.optim import newton_schulz
from dmuon_core.optim.adamw import adamw_state, adamw_update
from dmuon_core.optim.groups import (
    GROUP_DEFAULTS,
    NS_DTYPES,
    AdjustLrFn,
    check_defaults,
    complete_group,
    group_label,
    model_groups,
    param_label,
)
from dmuon_core.optim.loading import adopt_groups, check_loaded_state, drop_foreign_state, place_state, sizes_problem
from dmuon_core.optim.local import gradient_problem, is_stepped_here, local, state_problem, zeros_for_state
from dmuon_core.registry import drop_pending, publishing_as_updated

ParamsT = Iterable[Tensor] | Iterable[tuple[str, Tensor]] | Iterable[dict[str, Any]]


class Muon(torch.optim.Optimizer):
    """Muon for hidden matrices, AdamW for everything else, in one optimizer.

    ``params`` is a model, or an iterable of parameters, of ``(name, parameter)`` pairs, or of group dicts.

    * A model gives a group named "muon" (the owned parameters of a dedicated model, or the hidden matrices
      that :func:`~dmuon_core.targets.muon_targets` finds in a model that owns nothing) and a group named
      "adamw" (all other parameters that require a gradient).
    * A group dict says ``algorithm="muon"`` (the default) or ``algorithm="adamw"`` and may set that
      algorithm's options: ``lr, weight_decay, momentum, nesterov, ns_coefficients, eps, ns_steps,
      adjust_lr_fn, ns_dtype``, or ``lr, betas, eps, weight_decay``. Options it does not set come from the
      arguments below (``adamw_*`` for AdamW).

    Every group has its own ``lr`` and ``weight_decay``, so learning-rate schedulers work on all of them, and
    a zero is a value. Math, defaults and state keys are those of ``torch.optim.Muon`` and
    ``torch.optim.AdamW``; with bfloat16 Newton-Schulz the results are equal bit for bit. Two things differ:
    parameters with more than two dimensions are allowed (a convolution weight ``[out, in, h, w]`` is
    orthogonalized as ``[out, in*h*w]``), and the momentum of a bfloat16 parameter survives ``nesterov=False``
    (stock Newton-Schulz normalizes it in place).

    An owned parameter is updated by its owner alone. ``step`` issues no collective on a 1-D mesh; on a 2-D mesh it
    sends new weights to the owner's replicas as they are ready and does not wait for them. Every rank keeps momentum
    for an owned parameter, with no rows where it is not the owner, because checkpoint tools expect the same state on
    all ranks. ``load_state_dict`` takes state saved by this class, by ``torch.optim.Muon`` or ``torch.optim.AdamW``, as
    plain full tensors (the same on every rank), owned tensors of any owner, or sharded DTensors; it ends with the
    placement of its parameter. Loading is collective where a DTensor or another owner's tensor has to move, else local.

    Args:
        params: what to train, see above.
        lr: learning rate of Muon groups; a number or a one-element tensor (each group then gets its own
            copy).
        weight_decay: decoupled weight decay of Muon groups.
        momentum: decay of the momentum average, in [0, 1).
        nesterov: look ahead with the momentum.
        ns_coefficients: (a, b, c) of the Newton-Schulz polynomial.
        eps: smallest norm to divide by in Newton-Schulz.
        ns_steps: number of Newton-Schulz steps, below 100.
        adjust_lr_fn: scale of an ``[m, n]`` update: "original" (or None) is ``sqrt(max(1, m / n))``,
            "match_rms_adamw" is ``0.2 * sqrt(max(m, n))``.
        ns_dtype: dtype of Newton-Schulz: bfloat16, float32 or float64.
        adamw_lr: learning rate of AdamW groups; None takes ``lr``.
        adamw_betas: decay of AdamW's two averages.
        adamw_eps: added to AdamW's denominator.
        adamw_weight_decay: decoupled weight decay of AdamW groups.

    Raises:
        ValueError: an option or a parameter is not usable; the message names it and says what to do.

    Sources: K. Jordan et al., https://kellerjordan.github.io/posts/muon/; J. Liu et al., arXiv:2502.16982
    (decoupled weight decay, "match_rms_adamw").
    """

    def __init__(
        self,
        params: nn.Module | ParamsT,
        lr: float | Tensor = 1e-3,
        weight_decay: float = 0.1,
        momentum: float = 0.95,
        nesterov: bool = True,
        ns_coefficients: tuple[float, float, float] = newton_schulz.COEFFICIENTS,
        eps: float = newton_schulz.EPS,
        ns_steps: int = newton_schulz.STEPS,
        adjust_lr_fn: AdjustLrFn | None = None,
        *,
        ns_dtype: torch.dtype = torch.bfloat16,
        adamw_lr: float | Tensor | None = None,
        adamw_betas: tuple[float, float] = (0.9, 0.999),
        adamw_eps: float = 1e-8,
        adamw_weight_decay: float = 1e-2,
    ) -> None:
        defaults: dict[str, Any] = {
            "lr": lr,
            "weight_decay": weight_decay,
            "momentum": momentum,
            "nesterov": nesterov,
            "ns_coefficients": ns_coefficients,
            "eps": eps,
            "ns_steps": ns_steps,
            "adjust_lr_fn": adjust_lr_fn,
            "ns_dtype": ns_dtype,
            "adamw_lr": lr if adamw_lr is None else adamw_lr,
            "adamw_betas": adamw_betas,
            "adamw_eps": adamw_eps,
            "adamw_weight_decay": adamw_weight_decay,
        }
        check_defaults(defaults)
        super().__init__(model_groups(params) if isinstance(params, nn.Module) else params, defaults)

    def add_param_group(self, param_group: Any) -> None:
        """Add a group dict as the constructor takes it; ValueError, with nothing changed, if it is unfit."""
        if not isinstance(param_group, dict):
            super().add_param_group(param_group)  # raises torch's TypeError
        group = complete_group(param_group, self.defaults, self.param_groups)
        super().add_param_group(group)
        for key in set(self.defaults) - set(GROUP_DEFAULTS[group["algorithm"]]):
            group.pop(key, None)  # torch fills in every default, also those of the other algorithm

    @overload
    def step(self, closure: None = None) -> None: ...

    @overload
    def step(self, closure: Callable[[], float]) -> float: ...

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:
        """Update every parameter that has a gradient; local on a 1-D mesh (unless ``closure`` runs collectives).

        Collective over the columns of a 2-D mesh: owners start to send what they have updated.

        ``closure`` runs first, with gradients enabled, and its value is returned. All gradients and state are
        checked before the first parameter is written.

        Raises:
            RuntimeError: a gradient or a state tensor does not fit its parameter; nothing was updated.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self._preflight()
        with publishing_as_updated(p for group in self.param_groups for p in group["params"]) as updated:
            for group in self.param_groups:
                if group["algorithm"] == "adamw":
                    adamw_update(group, self.state)
                else:
                    muon_update(group, self.state, updated)
        return loss

    def _preflight(self) -> None:
        for index, group in enumerate(self.param_groups):
            for position, p in enumerate(group["params"]):
                if p.grad is None:
                    continue
                problem = gradient_problem(p, group["algorithm"]) or state_problem(p, self.state.get(p, {}))
                if problem:
                    name = param_label(group, position, group_label(index))
                    raise RuntimeError(f"Muon: {name}: {problem}. No parameter was updated")

    @torch._disable_dynamo
    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drop or zero all gradients, and drop what an open accumulation window holds back. Local."""
        super().zero_grad(set_to_none=set_to_none)
        drop_pending([p for group in self.param_groups for p in group["params"]])

    def init_state(self) -> None:
        """Give every parameter without state the one that its first step starts from: zeros, no step. Local.

        Checkpoints of a sharded model need it: they load into state that is there, and must hold that of parameters
        that never had a gradient. Parameters on the meta device are left out.
        """
        for group in self.param_groups:
            initial = adamw_state if group["algorithm"] == "adamw" else muon_state
            for p in group["params"]:
                if not p.is_meta and not self.state.get(p):
                    self.state[p] = initial(p)

    @torch._disable_dynamo
    def state_dict(self) -> dict[str, Any]:
        """State and groups as any optimizer's; complete from the start if a parameter is sharded or owned. Local."""
        if any(isinstance(p, DTensor) for group in self.param_groups for p in group["params"]):
            self.init_state()
        return super().state_dict()

    @torch._disable_dynamo
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load what ``state_dict`` gave, by position; see the class for what else it takes.

        Raises:
            ValueError: the groups or shapes differ; nothing was loaded.
        """
        try:
            super().load_state_dict(state_dict)
        except ValueError as error:
            problem = sizes_problem(state_dict.get("param_groups", []), self.param_groups)
            if problem is None:
                raise
            raise ValueError(
                f"Muon: {problem}; build the optimizer with the same groups as when the state was saved"
            ) from error

    def __setstate__(self, state: dict[str, Any]) -> None:
        # load_state_dict hands over matched groups and state before it changes the optimizer; unpickling,
        # which also comes here, brings its own defaults and needs no adoption.
        if "defaults" not in state:
            groups = adopt_groups(state["param_groups"], self.param_groups)
            drop_foreign_state(groups, state["state"])
            check_loaded_state(groups, state["state"])
            place_state(groups, state["state"])
            state = {**state, "param_groups": groups}
        super().__setstate__(state)


def muon_state(p: Tensor) -> dict[str, Tensor]:
    """State of a matrix before its first Muon step. Local."""
    return {"momentum_buffer": zeros_for_state(p)}


def muon_update(group: dict[str, Any], state: Any, updated: Callable[[Tensor], None]) -> None:
    """Step every matrix of one Muon group that has a gradient; in place, local, no collective of its own.

    ``M = momentum * M + (1 - momentum) * G``, the update is the orthogonalized ``M`` (with nesterov,
    ``(1 - momentum) * G + momentum * M``), and weight decay is decoupled. A rank that holds no rows of a
    matrix keeps its empty momentum and computes nothing. Every rank calls ``updated`` with every matrix of
    the group, in order, when it is done with it.
    """
    for p in group["params"]:
        if p.grad is not None:
            if "momentum_buffer" not in state[p]:
                state[p].update(muon_state(p))
            if is_stepped_here(p) and local(p).numel() > 0:
                _update_matrix(local(p), local(p.grad), local(state[p]["momentum_buffer"]), group)
        updated(p)


def _update_matrix(weight: Tensor, grad: Tensor, average: Tensor, group: dict[str, Any]) -> None:
    lr, momentum = group["lr"], group["momentum"]
    if isinstance(lr, Tensor):
        lr = lr.reshape(())
    average.lerp_(grad, 1 - momentum)
    update = grad.lerp(average, momentum) if group["nesterov"] else average
    with _no_autocast(weight.device.type):
        update = newton_schulz.orthogonalize(
            update.flatten(1),
            group["ns_coefficients"],
            group["ns_steps"],
            group["eps"],
            NS_DTYPES[group["ns_dtype"]],
        )
    weight.mul_(1 - lr * group["weight_decay"])
    weight.add_(update.reshape(weight.shape), alpha=-(lr * update_scale(weight.shape, group["adjust_lr_fn"])))


def update_scale(shape: torch.Size, adjust_lr_fn: AdjustLrFn | None) -> float:
    """Factor on the learning rate of a matrix of ``shape``, flattened to ``[m, n]``, with ``m, n >= 1``.

    "original" and None: ``sqrt(max(1, m / n))`` (Jordan); "match_rms_adamw": ``0.2 * sqrt(max(m, n))``, which
    gives updates the root mean square of AdamW's (arXiv:2502.16982, eq. 4).
    """
    m, n = shape[0], math.prod(shape[1:])
    if adjust_lr_fn == "match_rms_adamw":
        return 0.2 * math.sqrt(max(m, n))
    return math.sqrt(max(1, m / n))


def _no_autocast(device_type: str) -> AbstractContextManager[Any]:
    # A step taken inside an autocast region would otherwise run a float32 Newton-Schulz in the autocast
    # dtype.
    if torch.amp.is_autocast_available(device_type):
        return torch.autocast(device_type, enabled=False)
    return nullcontext()
