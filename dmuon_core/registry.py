"""Which dedicated models live in this process, and which parameters they replaced: for hooks that see only tensors."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, Any

import torch
import torch.nn as nn
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook
from torch.utils.weak import WeakIdKeyDictionary

if TYPE_CHECKING:
    from dmuon_core.runtime import DedicatedModel

_ATTRIBUTE = "_dmuon_dedicated"
_live: list[weakref.ref[DedicatedModel]] = []  # in order of dedication, which all ranks share
_replaced = WeakIdKeyDictionary()  # parameter that left the model at dedication -> its FQN


def register(model: nn.Module, dedicated: DedicatedModel) -> None:
    """Remember ``dedicated`` on its model, and that it is alive."""
    model.__dict__[_ATTRIBUTE] = dedicated
    _live.append(weakref.ref(dedicated))


def _live_models() -> list[DedicatedModel]:
    found = [(reference, reference()) for reference in _live]
    _live[:] = [reference for reference, dedicated in found if dedicated is not None]
    return [dedicated for _, dedicated in found if dedicated is not None]


def note_replaced(param: nn.Parameter, fqn: str) -> None:
    """Remember that ``param`` is no longer in its model, to tell an optimizer that still holds it."""
    _replaced[param] = fqn


def find_dedicated(model: nn.Module) -> DedicatedModel | None:
    """The dedicated model that ``model`` is or contains, or None."""
    for module in model.modules():
        if _ATTRIBUTE in module.__dict__:
            return module.__dict__[_ATTRIBUTE]
    return None


def get_dedicated(model: nn.Module) -> DedicatedModel:
    """The dedicated model that ``model`` is or contains.

    Raises:
        ValueError: if there is none.
    """
    found = find_dedicated(model)
    if found is None:
        raise ValueError(f"{type(model).__name__} has no dedicated parameters: call dedicate_params(model, ...) first")
    return found


def dedicated_of(params: Iterable[torch.Tensor]) -> list[DedicatedModel]:
    """The live dedicated models that own some of ``params``, in order of dedication. Local."""
    ids = {id(p) for p in params}
    return [dedicated for dedicated in _live_models() if any(id(param.rest) in ids for param in dedicated.params)]


def drop_pending(params: Iterable[torch.Tensor]) -> None:
    """Forget the gradients of ``params`` that were not reduced, in every dedicated model. Local."""
    params = list(params)
    for dedicated in _live_models():
        dedicated.drop_pending(params)


@contextmanager
def publishing_as_updated(params: Iterable[torch.Tensor]) -> Iterator[Callable[[torch.Tensor], None]]:
    """For an optimizer step over ``params``: call what this gives with each parameter that is updated for good.

    The new weights of a group then travel to their replicas while others are still being updated. An optimizer that
    does not use this has them published at the end of its step. Collective over the columns of a 2-D mesh, else local.
    """
    param_ids = {id(p) for p in params}
    with ExitStack() as stack:
        listeners = [stack.enter_context(model.publishing_as_updated(param_ids)) for model in _live_models()]

        def updated(param: torch.Tensor) -> None:
            for listener in listeners:
                listener(param)

        yield updated


def set_requires_gradient_sync(modules: Iterable[nn.Module], sync: bool) -> None:
    """Set for the groups hooked on ``modules`` whether the next backward reduces their gradients. Local."""
    wanted = set(modules)
    for dedicated in _live_models():
        dedicated.set_requires_gradient_sync(wanted, sync)


def _refuse_replaced_params(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
    for group in optimizer.param_groups:
        for param in group["params"]:
            if param in _replaced:
                raise RuntimeError(
                    f"{type(optimizer).__name__} holds '{_replaced[param]}' from before dedicate_params, which "
                    "replaced it in the model: this step would train nothing. Build the optimizer after "
                    "dedicate_params and fully_shard"
                )


def _after_step(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
    param_ids = {id(p) for group in optimizer.param_groups for p in group["params"]}
    for dedicated in _live_models():
        dedicated.after_step(param_ids)


# For every optimizer, ours or not.
register_optimizer_step_pre_hook(_refuse_replaced_params)
register_optimizer_step_post_hook(_after_step)
