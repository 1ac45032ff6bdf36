"""DedicatedParam: one owned parameter's life between rest and compute, as a state machine with checked transitions."""

from __future__ import annotations

from enum import Enum, auto

import torch
import torch.nn as nn

from dmuon_core.owned_tensor import OwnedTensor, empty_like_non_owner, own_like
from dmuon_core.registry import note_replaced

Slot = tuple[nn.Module, str]
"""A place where a parameter is registered: ``module._parameters[name]``. Tied weights have several."""


class WeightState(Enum):
    """Where the weight is."""

    SHARDED = auto()  # at rest: data on the owner only, no buffer
    UNSHARDING = auto()  # buffer allocated, broadcast in flight
    UNSHARDED = auto()  # whole matrix in the buffer of every rank; the module still shows the parameter at rest
    COMPUTING = auto()  # the module shows the plain parameter, a view into the buffer


class GradState(Enum):
    """Where the gradient of the current backward is. Independent of the weight: the next unshard may start."""

    LOCAL = auto()  # not sent: on the plain parameter, or accumulated by earlier backwards without communication
    REDUCING = auto()  # on its way to the owner


_WEIGHT_TRANSITIONS = {
    (WeightState.SHARDED, WeightState.UNSHARDING),
    (WeightState.UNSHARDING, WeightState.UNSHARDED),
    (WeightState.UNSHARDED, WeightState.COMPUTING),
    (WeightState.COMPUTING, WeightState.UNSHARDED),
    (WeightState.UNSHARDED, WeightState.SHARDED),
}
_GRAD_TRANSITIONS = {(GradState.LOCAL, GradState.REDUCING), (GradState.REDUCING, GradState.LOCAL)}


class DedicatedParam:
    """One owned parameter: where it is registered, who owns it, and its two faces.

    Attributes:
        fqn: name in the model.
        rest: the ``nn.Parameter`` over :class:`OwnedTensor` that the module shows outside forward and backward.
        unsharded: the persistent plain ``nn.Parameter`` that the module shows in forward and backward, a view into the
            group's buffer; made by the group.
        compute_dtype: dtype of ``unsharded`` and of what is broadcast.
        reduce_dtype: dtype in which gradients are accumulated and reduced.
    """

    def __init__(
        self,
        fqn: str,
        slots: list[Slot],
        rest: nn.Parameter,
        dtype: torch.dtype,
        param_dtype: torch.dtype | None,
        reduce_dtype: torch.dtype | None,
    ) -> None:
        self.fqn = fqn
        self.slots = slots
        self.rest = rest
        self.unsharded: nn.Parameter | None = None
        self.weight_state = WeightState.SHARDED
        self.grad_state = GradState.LOCAL
        self._policy = (param_dtype, reduce_dtype)
        self._rest_dtype = rest.dtype
        self._accumulated: torch.Tensor | None = None
        self._set_dtypes(dtype)
        self.show_rest()

    def _set_dtypes(self, dtype: torch.dtype) -> None:
        """Choose for a model of ``dtype`` what the policy leaves open."""
        param_dtype, reduce_dtype = self._policy
        self.compute_dtype = param_dtype or dtype
        self.reduce_dtype = reduce_dtype or torch.promote_types(self.compute_dtype, torch.float32)

    @property
    def owned(self) -> OwnedTensor:
        """The tensor at rest, typed."""
        assert isinstance(self.rest, OwnedTensor)
        return self.rest

    @property
    def owner(self) -> int:
        """Rank of the owner in its row of the mesh: the ranks of that column broadcast the weight in their rows."""
        return self.owned.home[-1]

    @property
    def owner_replicate(self) -> int:
        """Rank of the owner in its column of the mesh; 0 on a 1-D mesh."""
        return self.owned.home[0] if len(self.owned.home) == 2 else 0

    @property
    def is_owner(self) -> bool:
        """Whether this rank owns the parameter: only then it steps it."""
        return self.owned.is_home

    @property
    def shape(self) -> torch.Size:
        """Global shape."""
        return self.rest.shape

    @property
    def numel(self) -> int:
        """Number of elements of the whole parameter."""
        return self.rest.numel()

    def move_to(self, state: WeightState) -> None:
        """Change the weight's state.

        Raises:
            RuntimeError: for a transition that the lifecycle does not have; always a bug in this library.
        """
        if (self.weight_state, state) not in _WEIGHT_TRANSITIONS:
            raise RuntimeError(f"'{self.fqn}': weight cannot go from {self.weight_state.name} to {state.name}")
        self.weight_state = state

    def move_grad_to(self, state: GradState) -> None:
        """Change the gradient's state; raises like :meth:`move_to`."""
        if (self.grad_state, state) not in _GRAD_TRANSITIONS:
            raise RuntimeError(f"'{self.fqn}': gradient cannot go from {self.grad_state.name} to {state.name}")
        self.grad_state = state

    # What the module shows

    def show_unsharded(self) -> None:
        """Put the plain parameter into every slot: UNSHARDED -> COMPUTING."""
        self.move_to(WeightState.COMPUTING)
        assert self.unsharded is not None
        if self.unsharded.requires_grad != self.rest.requires_grad:
            self.unsharded.requires_grad_(self.rest.requires_grad)
        self._show(self.unsharded)

    def hide_unsharded(self) -> None:
        """Put the parameter at rest back into every slot: COMPUTING -> UNSHARDED."""
        self.move_to(WeightState.UNSHARDED)
        self.show_rest()

    def show_rest(self) -> None:
        """Put the parameter at rest into every slot."""
        self._show(self.rest)

    def _show(self, param: nn.Parameter) -> None:
        for module, name in self.slots:
            if type(module).__setattr__ is nn.Module.__setattr__:
                module._parameters[name] = param
            else:
                setattr(module, name, param)  # such as nn.LSTM, which keeps a second list of its weights

    def adopt_replaced_rest(self) -> None:
        """Take over a parameter that somebody put into the slot, such as ``load_state_dict(assign=True)``.

        Local, but collective if the new parameter is a DTensor that is not owned by our owner.

        Raises:
            ValueError: if its shape differs.
        """
        module, name = self.slots[0]
        found = module._parameters[name]
        if found is not self.rest and found is not self.unsharded and found is not None:
            if not (isinstance(found, OwnedTensor) and found.lives_with(self.owned)):
                data = own_like(found.detach(), self.owned)
                found = nn.Parameter(data.to(self.rest.dtype), requires_grad=found.requires_grad)
            elif found.shape != self.shape:
                raise ValueError(f"'{self.fqn}' was replaced by a parameter of shape {tuple(found.shape)}")
            note_replaced(self.rest, self.fqn)
            self.rest = found
            self.show_rest()
        if self.rest.dtype != self._rest_dtype:  # module.to(dtype) after dedication sets the compute dtype too
            self._rest_dtype = self.rest.dtype
            self._set_dtypes(self.rest.dtype)

    # Gradients

    @property
    def has_local_grad(self) -> bool:
        """Whether this rank holds a gradient that was not sent to the owner."""
        return self._accumulated is not None or (self.unsharded is not None and self.unsharded.grad is not None)

    def accumulate_local_grad(self) -> None:
        """Keep this backward's gradient on this rank, in ``reduce_dtype``, for a later reduce. Local."""
        assert self.unsharded is not None
        grad, self.unsharded.grad = self.unsharded.grad, None
        if grad is None:
            return
        if self._accumulated is None:
            self._accumulated = grad.to(self.reduce_dtype)
        else:
            self._accumulated.add_(grad)

    def take_local_grad(self) -> torch.Tensor | None:
        """Hand out and forget this rank's unsent gradient, of global shape, or None. Local."""
        if self._accumulated is not None:
            self.accumulate_local_grad()
            grad, self._accumulated = self._accumulated, None
            return grad
        if self.unsharded is None:
            return None
        own_grad, self.unsharded.grad = self.unsharded.grad, None
        return own_grad

    def add_reduced_grad(self, local: torch.Tensor | None) -> None:
        """Add the averaged gradient to ``rest.grad``: the whole matrix on the owner, None elsewhere. Local."""
        if local is None:
            local = empty_like_non_owner(self.shape, dtype=self.rest.dtype, device=self.rest.device)
        if self.rest.grad is None:
            self.rest.grad = self.owned.at_home(local)
        else:
            assert isinstance(self.rest.grad, OwnedTensor)
            self.rest.grad._local_tensor.add_(local)
        for hook in list((getattr(self.rest, "_post_accumulate_grad_hooks", None) or {}).values()):
            hook(self.rest)  # autograd runs them on the plain parameter only, where nobody can register one
