"""Which module carries the hooks of which target: the unit in which broadcasts and reduces are coalesced."""

from __future__ import annotations

from collections.abc import Callable
from itertools import takewhile

from torch import nn

from dmuon_core.structure import has_forward, is_container, module_chains, repeated_blocks
from dmuon_core.targets import muon_targets

Chain = tuple[nn.Module, ...]


def default_boundaries(model: nn.Module, targets: dict[str, nn.Parameter] | None = None) -> list[nn.Module]:
    """The repeated blocks that hold a target, in module order; local.

    `targets` defaults to `muon_targets(model)`. The root is not in the list, so `fully_shard` can be called
    on each of these and then on the model. They never nest.
    """
    targets = muon_targets(model) if targets is None else targets
    return repeated_blocks(model, {id(parameter) for parameter in targets.values()})


def assign_boundaries(
    model: nn.Module,
    targets: dict[str, nn.Parameter],
    predicate: Callable[[nn.Module], bool] | None = None,
    strict: bool = True,
) -> list[tuple[str, nn.Module, list[str]]]:
    """(name of the hook module, hook module, names of its targets) for all targets, in module order; local.

    Without a predicate a target belongs to the repeated block around it, else to the root. With one it
    belongs to its lowest ancestor, its own module included, for which the predicate is true. If the places
    that hold a target (tied weights, shared modules) belong to different modules, it belongs to the lowest
    ancestor that all of them share and that has a forward and is not a mere container, whose forward is often
    bypassed; in the end to the root.

    Raises ValueError if the predicate picks a module without a forward, where hooks would never run, and,
    when `strict`, if it is false on every ancestor of a target. When not `strict`, such a target keeps its
    default boundary.
    """
    chains = _slot_chains(model, targets)
    blocks = {id(block) for block in default_boundaries(model, targets)}
    picked: set[int] = set()
    if predicate is not None:
        picked = {id(module) for module in model.modules() if predicate(module)}

    hook_of: dict[str, nn.Module] = {}
    unmatched: list[str] = []
    for name in targets:
        hooks = _lowest_of_each(chains[name], picked)
        _check_forward(hooks, name)
        if len(hooks) < len(chains[name]):
            unmatched.append(name)
            hooks = _lowest_of_each(chains[name], blocks | {id(model)})
        agreed = all(hook is hooks[0] for hook in hooks)
        hook_of[name] = hooks[0] if agreed else _common_ancestor(chains[name])
    if predicate is not None and strict and unmatched:
        raise ValueError(
            f"hook_boundary_predicate is false on every module around {', '.join(map(repr, unmatched))}. "
            "Make it true for one of them, leave these parameters out of the target predicate, or pass "
            "hook_boundary_strict=False to keep their default boundary."
        )
    names_at: dict[int, list[str]] = {}
    for name, hook in hook_of.items():
        names_at.setdefault(id(hook), []).append(name)
    ordered = ((name, module) for name, module in model.named_modules() if id(module) in names_at)
    return [(name, module, names_at[id(module)]) for name, module in ordered]


def _slot_chains(model: nn.Module, targets: dict[str, nn.Parameter]) -> dict[str, list[Chain]]:
    """Every path to a module that holds the target in a slot, found by identity: ties go by other names."""
    name_of = {id(parameter): name for name, parameter in targets.items()}
    chains: dict[str, list[Chain]] = {name: [] for name in targets}
    for chain in module_chains(model):
        for parameter in chain[-1]._parameters.values():
            if parameter is not None and id(parameter) in name_of:
                chains[name_of[id(parameter)]].append(chain)
    missing = [name for name, found in chains.items() if not found]
    if missing:
        names = ", ".join(map(repr, missing))
        raise ValueError(f"Not parameters of the model: {names}. Pass targets taken from this model.")
    return chains


def _lowest_of_each(chains: list[Chain], accepted: set[int]) -> list[nn.Module]:
    """For each path its lowest accepted module; a path without one contributes nothing."""
    lowest = []
    for chain in chains:
        lowest += [module for module in reversed(chain) if id(module) in accepted][:1]
    return lowest


def _common_ancestor(chains: list[Chain]) -> nn.Module:
    levels = zip(*chains, strict=False)
    shared = [level[0] for level in takewhile(lambda level: all(m is level[0] for m in level), levels)]
    callable_ones = [module for module in shared if has_forward(module) and not is_container(module)]
    return callable_ones[-1] if callable_ones else shared[0]


def _check_forward(hooks: list[nn.Module], name: str) -> None:
    for module in hooks:
        if not has_forward(module):
            raise ValueError(
                f"hook_boundary_predicate picks a {type(module).__name__} for {name!r}. It has no forward, "
                "so hooks on it would never run: make the predicate true for its children or for its parent."
            )
