"""OwnedOptimizer: any optimizer of matrices, unmodified, on the matrices that a rank owns."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from typing import Any, overload

import torch
from torch import Tensor, nn

from dmuon_core.optim.first_state import make_first_state, writes_into
from dmuon_core.optim.groups import group_label, model_groups
from dmuon_core.optim.loading import names_problem, without_matched_names
from dmuon_core.optim.local import gradient_problem, is_stepped_here, local
from dmuon_core.optim.owned_checks import closure_problem, other_gradient_problem
from dmuon_core.optim.owned_state import gather_state, place_states, portable, restored, shielded
from dmuon_core.owned_tensor import OwnedTensor
from dmuon_core.registry import drop_pending

_NOT_OPTIONS = ("params", "param_names")


class OwnedOptimizer(torch.optim.Optimizer):
    """Train owned matrices with one optimizer and all other parameters with another, each as it is.

    ``OwnedOptimizer(model, matrix=lambda ps: SOAP(ps, lr=3e-3), other=lambda ps: AdamW(ps, lr=1e-3))``

    ``matrix`` gets ordinary parameters: on the owner the whole matrix, and in ``step`` its whole gradient; elsewhere a
    stand-in of the same shape, without memory or gradient, which every optimizer passes over. So whatever computes on
    one matrix at a time (SOAP, Shampoo, ``torch.optim.Muon``) gives what it gives in one process. What combines
    matrices, such as a norm over all of them, sees those of one rank only; and what draws random numbers (Kron) draws
    others in every layout. ``other`` gets the remaining parameters, as
    FSDP2 has them. Both may make param groups of what they get.

    Param groups are those of ``matrix``, then those of ``other``, with the model's parameters in them: schedulers and
    hyper-parameters work as ever. The state dict has the state of both, each tensor of a matrix owned as the matrix
    is, and loads into any layout; making and loading one is collective. ``step`` is local on a 1-D mesh if both are.

    Args:
        model: a dedicated model, or a plain one (then ``matrix`` gets what
            :func:`~dmuon_core.targets.muon_targets` finds).
        matrix: makes the optimizer of a list of matrices.
        other: makes the optimizer of a list of other parameters; needed if the model has such.

    Raises:
        ValueError: there are no matrices, or other parameters without ``other``; an optimizer leaves out or invents
            parameters, or needs a closure in its step (LBFGS, SAM).
    """

    def __init__(
        self,
        model: nn.Module,
        matrix: Callable[[list[nn.Parameter]], torch.optim.Optimizer],
        other: Callable[[list[nn.Parameter]], torch.optim.Optimizer] | None = None,
    ) -> None:
        found = {group["algorithm"]: group["params"] for group in model_groups(model)}
        named_matrices, named_others = found.get("muon", []), found.get("adamw", [])
        if not named_matrices:
            raise ValueError(f"OwnedOptimizer: {type(model).__name__} has no matrix to train; use its optimizer alone")
        if named_others and other is None:
            raise ValueError(
                f"OwnedOptimizer: pass other=lambda params: ... for {named_others[0][0]!r} and {len(named_others) - 1} "
                "more parameters that are no hidden matrices, or freeze them"
            )
        self._model = model
        self._names = {id(p): name for name, p in (*named_matrices, *named_others)}
        self._local = {id(p): _local_parameter(p) for _, p in named_matrices}
        self.matrix = matrix(list(self._local.values()))
        self.other = other([p for _, p in named_others]) if other is not None and named_others else None
        self._real = {id(self._local[id(p)]): p for _, p in named_matrices} | {id(p): p for _, p in named_others}
        for given, optimizer in ((named_matrices, self.matrix), (named_others, self.other)):
            self._check_fit(given, optimizer)
        has_state = bool(self.matrix.state) or bool(self.other is not None and self.other.state)
        for p in self._matrices():
            if not is_stepped_here(p):
                self.matrix.state.pop(self._local[id(p)], None)  # made ahead, for a stand-in
        self._writes = 0
        self._is_new = True  # before the first step and before any state was loaded
        self._made_state: list[tuple[torch.optim.Optimizer, dict[Any, Any], list[set[str]]]] = []
        self._building = True
        # Without defaults, which torch would fill into the groups of both.
        super().__init__([self._outer_group(group) for group in self._inner_groups()], {})
        self.defaults = dict(self.matrix.defaults)
        self._building = False
        self._share_state(has_state)

    def add_param_group(self, param_group: Any) -> None:
        """Only while it is built: NotImplementedError later."""
        if not self.__dict__.get("_building"):
            raise NotImplementedError(
                "OwnedOptimizer: build a new one to train other parameters; groups are made inside matrix and other"
            )
        super().add_param_group(param_group)

    @overload
    def step(self, closure: None = None) -> None: ...

    @overload
    def step(self, closure: Callable[[], float]) -> float: ...

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:
        """Step both optimizers; local on a 1-D mesh if they are, collective over the columns of a 2-D mesh.

        ``closure`` runs first, once, with gradients enabled, and its value is returned.

        Raises:
            RuntimeError: a gradient does not fit, or parameters were replaced; nothing was updated.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        known = {id(p) for p in self._real.values()}
        if any(id(p) not in known for group in self.param_groups for p in group["params"]):
            raise RuntimeError(
                "OwnedOptimizer: other parameters were put in place of those that it was built with, so nothing would "
                "be trained; build it after the model was sharded. No parameter was updated"
            )
        for p in self._real.values():
            if p.grad is None:
                continue
            if self.other is None or id(p) in self._local:
                problem = gradient_problem(p, "muon")
            else:
                problem = other_gradient_problem(p, self.other)
            if problem:
                raise RuntimeError(
                    f"OwnedOptimizer: parameter {self._names[id(p)]!r}: {problem}. No parameter was updated"
                )
        self._drop_made_state()
        self._push_options()
        stepped = [p for p in self._matrices() if p.grad is not None and is_stepped_here(p)]
        for p in stepped:
            assert p.grad is not None
            # Other tensor objects on the same memory: some optimizers transpose them in place.
            own = self._local[id(p)]
            own.data = local(p).detach()
            own.grad = local(p.grad).detach()
        try:
            self.matrix.step()
        finally:
            for p in stepped:
                own = self._local[id(p)]
                own.grad = None
                if own.data_ptr() != local(p).data_ptr():  # the optimizer put other memory there
                    local(p).copy_(own)
        if self.other is not None:
            self.other.step()
        self._pull_options()
        self._share_state(True)
        return loss

    @torch._disable_dynamo
    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drop or zero all gradients, and drop what an open accumulation window holds back. Local."""
        super().zero_grad(set_to_none=set_to_none)
        drop_pending([p for group in self.param_groups for p in group["params"]])

    def init_state(self) -> None:
        """Before the first step: make the state that checkpoints load into or, with zeros, hold. Local.

        The first step drops it again, unless state was loaded, so a run does not depend on whether it was asked for.
        What is saved before the first step is this state; an optimizer that does something else in its first step than
        later (SOAP chooses its bases) resumes from it as from a step with zero gradients.
        """
        if not self._is_new or self._made_state:
            return
        for p in self._matrices():
            if is_stepped_here(p):
                self._local[id(p)].data = local(p).detach()
        for optimizer in (self.matrix, self.other):
            if optimizer is None:
                continue
            before = {p: copy.deepcopy(state) for p, state in optimizer.state.items()}  # what it has made ahead
            params = [p for group in optimizer.param_groups for p in group["params"] if p.requires_grad]
            others = {id(self._local[id(p)]) for p in self._matrices() if not is_stepped_here(p)}
            added = make_first_state(optimizer, [p for p in params if id(p) not in others])
            self._made_state.append((optimizer, before, added))
        self._writes = writes_into(self.matrix, self.other)
        self._pull_options()
        self._share_state(True)

    def _drop_made_state(self) -> None:
        outer_of = dict(zip(map(id, self._inner_groups()), self.param_groups, strict=True))
        # State that was written into since, as by dcp.load, is loaded state, whatever was called afterwards.
        made = [] if writes_into(self.matrix, self.other) != self._writes else self._made_state
        for optimizer, before, added in made:
            optimizer.state.clear()
            optimizer.state.update(before)
            for group, names in zip(optimizer.param_groups, added, strict=True):
                for options in (group, outer_of[id(group)]):
                    for name in names:
                        options.pop(name, None)
        self._is_new, self._made_state = False, []

    @torch._disable_dynamo
    def state_dict(self) -> dict[str, Any]:
        """The state of both optimizers, the same keys on every rank. Collective.

        Raises:
            TypeError: on every rank, if the state of a matrix holds something that is neither tensor nor plain value.
        """
        own, groups = self.state, self.param_groups
        matrices = self._matrices()
        gathered, options = gather_state(self._model, matrices, own, self._owner_groups())
        try:
            known_state = {p: values for p, values in own.items() if id(p) not in self._local and values}
            self.state = {**known_state, **gathered}  # type: ignore[assignment]
            self.param_groups = [
                {**group, **{key: portable(value) for key, value in known.items() if key not in _NOT_OPTIONS}}
                for group, known in zip(groups, options, strict=True)
            ]
            return super().state_dict()
        finally:
            self.state, self.param_groups = own, groups

    @torch._disable_dynamo
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load what ``state_dict`` gave, or the like of a plain model, by position. Collective.

        Raises:
            ValueError: the groups differ in number or size, or are of parameters with other names; nothing was loaded.
        """
        matched = without_matched_names(state_dict, self.param_groups)
        super().load_state_dict({**matched, "state": shielded(state_dict["state"])})

    def __setstate__(self, state: dict[str, Any]) -> None:
        if "defaults" in state:  # from copy or pickle
            raise TypeError("an OwnedOptimizer cannot be copied or pickled: save its state_dict()")
        # load_state_dict comes here with matched groups and state.
        for index, (theirs, ours) in enumerate(zip(state["param_groups"], self.param_groups, strict=True)):
            if problem := names_problem(theirs, ours):
                raise ValueError(f"OwnedOptimizer: {group_label(index)} {problem}")
        for inner, group in zip(self._inner_groups(), state["param_groups"], strict=True):
            group.update((key, restored(value, inner.get(key))) for key, value in group.items())
        place_states([p for group in state["param_groups"] for p in group["params"]], state["state"])
        super().__setstate__(state)
        for optimizer, params in ((self.matrix, self._matrices()), (self.other, self._others())):
            if optimizer is not None:
                optimizer.state.clear()
                for p in params:
                    if state["state"].get(p) and is_stepped_here(p):
                        optimizer.state[self._local.get(id(p), p)] = state["state"][p]
        self._is_new, self._made_state = False, []
        self._push_options()
        self._share_state(bool(state["state"]))

    # The two optimizers behind it

    def _matrices(self) -> list[Tensor]:
        return [p for p in self._real.values() if id(p) in self._local]

    def _others(self) -> list[Tensor]:
        return [p for p in self._real.values() if id(p) not in self._local]

    def _inner_groups(self) -> Iterator[dict[str, Any]]:
        yield from self.matrix.param_groups
        if self.other is not None:
            yield from self.other.param_groups

    def _check_fit(self, given: list[tuple[str, nn.Parameter]], optimizer: torch.optim.Optimizer | None) -> None:
        if optimizer is None:
            return
        if problem := closure_problem(optimizer):
            raise ValueError(f"OwnedOptimizer: {problem}")
        taken = {id(self._real.get(id(p))) for group in optimizer.param_groups for p in group["params"]}
        missing = [name for name, p in given if id(p) not in taken]
        if missing or len(taken) != len(given):
            raise ValueError(
                f"OwnedOptimizer: {type(optimizer).__name__} must hold exactly the {len(given)} parameters that it is "
                f"given, but holds {len(taken)}; it leaves out {missing[:4]}"
            )

    def _outer_group(self, group: dict[str, Any]) -> dict[str, Any]:
        params = [self._real[id(p)] for p in group["params"]]
        options = {key: value for key, value in group.items() if key not in _NOT_OPTIONS}
        return {**options, "params": [(self._names[id(p)], p) for p in params]}

    def _push_options(self) -> None:
        for inner, outer in zip(self._inner_groups(), self.param_groups, strict=True):
            inner.update((key, value) for key, value in outer.items() if key not in _NOT_OPTIONS)

    def _pull_options(self) -> None:
        # Some optimizers count their steps in the group.
        for inner, outer in zip(self._inner_groups(), self.param_groups, strict=True):
            outer.update((key, value) for key, value in inner.items() if key not in _NOT_OPTIONS)

    def _share_state(self, has_state: bool) -> None:
        """Show the optimizers' state under the model's parameters; empty for matrices that others own.

        ``has_state`` is the same on every rank: checkpoint tools initialize what has no state by a step of its own.
        """
        if not has_state:
            return
        for p in self._real.values():
            optimizer = self.matrix if id(p) in self._local else self.other
            assert optimizer is not None
            self.state[p] = optimizer.state.get(self._local.get(id(p), p), {})

    def _owner_groups(self) -> list[dict[str, Any] | None]:
        """The options of each group if this rank has stepped a matrix of it, as who owns none may not have counted."""
        return [
            {key: value for key, value in group.items() if key not in _NOT_OPTIONS}
            if any(id(p) not in self._local or is_stepped_here(p) for p in group["params"])
            else None
            for group in self.param_groups
        ]


def _local_parameter(p: nn.Parameter) -> nn.Parameter:
    if not isinstance(p, OwnedTensor):
        return p
    if p.is_home:
        return nn.Parameter(p._local_tensor.detach())
    return nn.Parameter(torch.zeros((), dtype=p.dtype, device=p.device).expand(p.shape))
