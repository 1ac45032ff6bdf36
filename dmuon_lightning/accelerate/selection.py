"""Which parameters and which modules of a model are meant, by patterns of names and names of classes."""

from __future__ import annotations

import fnmatch
from collections.abc import Callable, Iterable
from functools import partial

import torch.nn as nn

from dmuon_core.names import canonical_name
from dmuon_lightning.accelerate.options import nearest


def target_predicate(
    targets: Callable[[str, nn.Parameter], bool] | Iterable[str] | None, model: nn.Module
) -> Callable[[str, nn.Parameter], bool] | None:
    """A predicate from patterns of names, or from one that knows nothing of wrappers; None for the default. Local.

    Raises:
        ValueError: a pattern matches no matrix of ``model``.
    """
    if targets is None:
        return None
    if callable(targets):
        return partial(_with_plain_name, targets)
    patterns = [targets] if isinstance(targets, str) else list(targets)
    matrices = [canonical_name(name) for name, p in model.named_parameters() if p.ndim >= 2]
    for pattern in patterns:
        if not fnmatch.filter(matrices, pattern):
            raise ValueError(
                f"predicate: no matrix of {type(model).__name__} has a name like {pattern!r}; the first ones are "
                f"{', '.join(map(repr, matrices[:5]))}"
            )
    return partial(_with_plain_name, partial(_is_like, patterns))


def boundary_predicate(
    modules: Callable[[nn.Module], bool] | Iterable[str] | None, model: nn.Module
) -> Callable[[nn.Module], bool] | None:
    """A predicate from names of classes; None for the default. Local.

    Raises:
        ValueError: ``model`` has no module of such a class.
    """
    if modules is None or callable(modules):
        return modules
    wanted = {modules} if isinstance(modules, str) else set(modules)
    classes = {type(module).__name__ for module in model.modules()}
    for name in sorted(wanted - classes):
        raise ValueError(
            f"hook_boundary_predicate: {type(model).__name__} has no module of class {name!r}: "
            f"{nearest(name, sorted(classes))}"
        )
    return lambda module: type(module).__name__ in wanted


def _with_plain_name(predicate: Callable[[str, nn.Parameter], bool], name: str, param: nn.Parameter) -> bool:
    return predicate(canonical_name(name), param)


def _is_like(patterns: list[str], name: str, param: nn.Parameter) -> bool:
    return param.ndim >= 2 and any(fnmatch.fnmatchcase(name, pattern) for pattern in patterns)
