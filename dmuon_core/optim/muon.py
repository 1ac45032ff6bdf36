"""Muon and AdamW parameter groups in one ``torch.optim.Optimizer`` that knows owned parameters."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Mapping
from itertools import chain
from typing import Any, overload

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from dmuon_core.optim import newton_schulz
from dmuon_core.optim.adamw import adamw_state, adamw_update
from dmuon_core.optim.cost import warn_of_balance
from dmuon_core.optim.groups import complete_group, group_label, model_groups, param_label
from dmuon_core.optim.loading import (
    adopt_groups,
    check_loaded_state,
    drop_foreign_state,
    place_state,
    sizes_problem,
    state_keys,
    without_matched_names,
)
from dmuon_core.optim.local import gradient_problem, state_problem
from dmuon_core.optim.options import GROUP_DEFAULTS, check_defaults, options_problem
from dmuon_core.optim.polar import Coefficients
from dmuon_core.optim.qk_clip import QKClip
from dmuon_core.optim.split import SplitRule, carried, unmatched_patterns
from dmuon_core.optim.update import AdjustLrFn, muon_state, muon_update, state_shapes
from dmuon_core.registry import drop_pending, publishing_as_updated

ParamsT = Iterable[Tensor] | Iterable[tuple[str, Tensor]] | Iterable[dict[str, Any]]


class Muon(torch.optim.Optimizer):
    """Muon for hidden matrices, AdamW for everything else, in one optimizer.

    ``params`` is a model, or an iterable of parameters, of ``(name, parameter)`` pairs, or of group dicts.

    * A model gives a group named "muon" (the owned parameters of a dedicated model, or the hidden matrices
      that :func:`~dmuon_core.targets.muon_targets` finds in a model that owns nothing) and a group named
      "adamw" (all other parameters that require a gradient).
    * A group dict says ``algorithm="muon"`` (the default) or ``algorithm="adamw"`` and may set that
      algorithm's options, which are the arguments below; for AdamW ``lr, betas, eps, weight_decay, maximize``.
      Options it does not set come from the arguments (``adamw_*`` for AdamW).

    Every group has its own ``lr`` and ``weight_decay``, so learning-rate schedulers work on all of them, and
    a zero is a value. Math, defaults and state keys are those of ``torch.optim.Muon`` and
    ``torch.optim.AdamW``; with the default options of Newton-Schulz the results are equal bit for bit.
    Two things differ: parameters with more than two dimensions are allowed (see ``split``), and the momentum of a
    bfloat16 parameter survives ``nesterov=False`` (stock Newton-Schulz normalizes it in place).

    An owned parameter is updated by its owner alone. ``step`` issues no collective on a 1-D mesh; on a 2-D mesh it
    sends new weights to the owner's replicas as they are ready and does not wait for them. Every rank keeps momentum
    for an owned parameter, with no rows where it is not the owner, because checkpoint tools expect the same state on
    all ranks. ``load_state_dict`` takes state saved by this class, by ``torch.optim.Muon`` or ``torch.optim.AdamW``, as
    plain full tensors (the same on every rank), owned tensors of any owner, or sharded DTensors; it ends with the
    placement of its parameter. The learning rate, weight decay, momentum, betas and eps of a group come from the saved
    one; how an update is made (all other options) stays as this optimizer was built. Loading is collective where a
    DTensor or another owner's tensor has to move, else local.

    Args:
        params: what to train, see above.
        lr: learning rate of Muon groups; a number or a one-element tensor (each group then gets its own
            copy).
        weight_decay: decoupled weight decay of Muon groups; a number or a one-element tensor.
        momentum: decay of the momentum average, in [0, 1).
        nesterov: look ahead with the momentum.
        ns_coefficients: (a, b, c) of the Newton-Schulz polynomial; a sequence of such, one a step; or the name of
            a schedule: "quintic", "polar_express", "cans", "aol" (:func:`dmuon_core.optim.polar.schedule`).
        eps: smallest norm to divide by in Newton-Schulz.
        ns_steps: number of Newton-Schulz steps, below 100.
        adjust_lr_fn: scale of an ``[m, n]`` update: "original" (or None) is ``sqrt(max(1, m / n))``,
            "match_rms_adamw" is ``0.2 * sqrt(max(m, n))``, "none" is 1.
        ns_dtype: dtype of Newton-Schulz: bfloat16, float16, float32 or float64.
        ns_form: "direct"; "gram", cheaper for long matrices, not in bfloat16; or "auto", the faster one
            (:func:`dmuon_core.optim.newton_schulz.orthogonalize`).
        batched: orthogonalize the matrices of one shape that this rank owns together, across layers; much faster for
            small ones. Another kernel runs the products then, so that they may differ from those of one matrix at a
            time in the last bit of ``ns_dtype``: updates by up to 1e-5 in float32 and 2e-2 in bfloat16.
        split: which matrices a parameter stands for, each of which is orthogonalized and scaled by itself: a spec, a
            mapping of name patterns to specs, or a function ``(name, parameter) -> spec or None``. Specs are 3 or
            "rows:3" (fused QKV, or as many heads), (4096, 1024, 1024), "columns:12", "experts", "whole", see
            :func:`dmuon_core.optim.split.parse_split`. Without one a parameter is one matrix ``[d0, product of the
            rest]``, as a convolution needs it; but 3-D parameters of a model, other than convolutions, are stacked
            experts ``[E, m, n]``.
        groups: only with a model: parameter groups by name, as ``{"slow": {"params": "*.attn.*", "lr": 1e-3}}``. Each
            takes the parameters that match its pattern (or sequence of patterns) and no earlier group, with options
            of its own; ``algorithm`` need not be given if they all have the same.
        maximize: ascend, in all groups.
        cautious_weight_decay: decay only the elements that the update moves towards zero (arXiv:2510.12402).
        normuon: divide each row of an update by the root of its running mean square, :mod:`dmuon_core.optim.normuon`;
            adds state "second_momentum_buffer", one number a row.
        beta2: decay of that mean, in [0, 1).
        compile: run the step of Muon groups through ``torch.compile``. Results are then within rounding of the
            eager ones, not equal. Each shape is compiled once; learning rate, weight decay, momentum and beta2 may
            change at every step.
        qk_clip: scale query and key heads with too large logits after the update, :class:`QKClip`; the step then
            issues a small all-reduce.
        adamw_lr: learning rate of AdamW groups; None takes ``lr``.
        adamw_betas: decay of AdamW's two averages.
        adamw_eps: added to AdamW's denominator.
        adamw_weight_decay: decoupled weight decay of AdamW groups.

    Raises:
        ValueError: an option or a parameter is not usable; the message names it and says what to do.

    Sources: K. Jordan et al., https://kellerjordan.github.io/posts/muon/; J. Liu et al., arXiv:2502.16982
    (decoupled weight decay, "match_rms_adamw").
    """

    _balance_checked = False
    qk_clip: QKClip | None = None  # of the running program: not part of a pickled optimizer

    def __init__(
        self,
        params: nn.Module | ParamsT,
        lr: float | Tensor = 1e-3,
        weight_decay: float | Tensor = 0.1,
        momentum: float = 0.95,
        nesterov: bool = True,
        ns_coefficients: Coefficients = newton_schulz.COEFFICIENTS,
        eps: float = newton_schulz.EPS,
        ns_steps: int = newton_schulz.STEPS,
        adjust_lr_fn: AdjustLrFn | None = None,
        *,
        ns_dtype: torch.dtype = torch.bfloat16,
        ns_form: newton_schulz.Form = "direct",
        batched: bool = False,
        split: SplitRule | None = None,
        groups: Mapping[str, Mapping[str, Any]] | None = None,
        maximize: bool = False,
        cautious_weight_decay: bool = False,
        normuon: bool = False,
        beta2: float = 0.95,
        compile: bool = False,
        qk_clip: QKClip | None = None,
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
            "ns_form": ns_form,
            "batched": batched,
            "split": carried(split),
            "maximize": maximize,
            "cautious_weight_decay": cautious_weight_decay,
            "normuon": normuon,
            "beta2": beta2,
            "compile": compile,
            "adamw_lr": lr if adamw_lr is None else adamw_lr,
            "adamw_betas": adamw_betas,
            "adamw_eps": adamw_eps,
            "adamw_weight_decay": adamw_weight_decay,
        }
        check_defaults(defaults)
        if isinstance(params, nn.Module):
            params = model_groups(params, split, groups)
        elif groups is not None:
            raise ValueError("Muon: groups by name need a model; make group dicts of these parameters instead")
        super().__init__(params, defaults)
        names = [name for group in self.param_groups for name in group.get("param_names", [])]
        if misspelt := unmatched_patterns(split, names):
            raise ValueError(f"Muon: split has patterns that no parameter fits: {misspelt}")
        self.qk_clip = qk_clip
        if qk_clip is not None:
            qk_clip.bind(self._named_params())

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
            RuntimeError: a gradient or a state tensor does not fit its parameter, or a logit of ``qk_clip`` is NaN or
                inf; nothing was updated. Raised on the rank that has it, and with ``qk_clip`` on all ranks; others
                would go on, because a step is local.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        clip = self._start_clip(self._find_problem())
        if not self._balance_checked:  # now everything that could replace parameters or groups has done so
            self._balance_checked = True
            warn_of_balance(self.param_groups)
        with publishing_as_updated(p for group in self.param_groups for p in group["params"]) as updated:
            for group in self.param_groups:
                if group["algorithm"] == "adamw":
                    adamw_update(group, self.state)
                    for p in group["params"]:
                        clip(p)
                else:
                    muon_update(group, self.state, clip, updated)
        return loss

    def _named_params(self) -> dict[str, Tensor]:
        named = [zip(group.get("param_names", []), group["params"], strict=False) for group in self.param_groups]
        return dict(chain.from_iterable(named))

    def _start_clip(self, problem: str | None) -> Callable[[Tensor], None]:
        clip = self.qk_clip
        if clip is None:
            if problem is not None:
                raise RuntimeError(problem)
            return lambda p: None
        params = self._named_params()
        factors = clip.take_factors(params, problem)
        names = {id(p): name for name, p in params.items()}
        return lambda p: clip.apply(names.get(id(p), ""), p, factors)

    def _find_problem(self) -> str | None:
        """What keeps this rank from the step; None if nothing does. Local."""
        for index, group in enumerate(self.param_groups):
            if problem := options_problem(group):
                return f"{problem} in {group_label(index)}. No parameter was updated"
            for position, p in enumerate(group["params"]):
                if p.grad is None:
                    continue
                state, shapes = self.state.get(p, {}), state_shapes(group, position)
                problem = gradient_problem(p, group["algorithm"]) or state_problem(p, state, shapes)
                if problem:
                    name = param_label(group, position, group_label(index))
                    return f"Muon: {name}: {problem}. No parameter was updated"
        return None

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
            for position, p in enumerate(group["params"]):
                if not p.is_meta and not state_keys(group) <= self.state.get(p, {}).keys():
                    initial = adamw_state(p) if group["algorithm"] == "adamw" else muon_state(group, position)
                    self.state[p] = {**initial, **self.state.get(p, {})}

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
            super().load_state_dict(without_matched_names(state_dict, self.param_groups))
        except ValueError as error:
            problem = sizes_problem(state_dict.get("param_groups", []), self.param_groups)
            if problem is None:
                raise
            raise ValueError(
                f"Muon: {problem}; build the optimizer with the same groups as when the state was saved"
            ) from error

    def __getstate__(self) -> dict[str, Any]:
        if self.qk_clip is not None:
            warnings.warn(
                "Muon: a copied or pickled optimizer has no QKClip, because logits are recorded with the one of this "
                "program; set its attribute qk_clip",
                stacklevel=4,
            )
        return super().__getstate__()

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
