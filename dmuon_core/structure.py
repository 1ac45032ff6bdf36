"""What the module tree itself says: leaves, containers, every path to a module, and the repeated blocks."""

from __future__ import annotations

from collections import Counter
from collections.abc import Container, Iterator
from dataclasses import dataclass

from torch import nn

_CONTAINERS = (nn.ModuleList, nn.ModuleDict, nn.Sequential)


def children(module: nn.Module) -> list[nn.Module]:
    """Direct children; a block registered four times appears four times, unlike in `nn.Module.children()`."""
    return [child for child in module._modules.values() if child is not None]


def is_leaf(module: nn.Module) -> bool:
    return not children(module)


def is_container(module: nn.Module) -> bool:
    return isinstance(module, _CONTAINERS)


def has_forward(module: nn.Module) -> bool:
    """Whether the module can be called: a plain ModuleList or ModuleDict inherits one that only raises."""
    return type(module).forward is not nn.Module.forward or "forward" in module.__dict__


def module_chains(model: nn.Module) -> Iterator[tuple[nn.Module, ...]]:
    """Every path from the root to every module, root first, including all paths to a module that is shared.

    `named_modules(remove_duplicate=False)` yields the same paths by name, but never returns on a cyclic tree.
    """

    def walk(chain: tuple[nn.Module, ...]) -> Iterator[tuple[nn.Module, ...]]:
        yield chain
        for child in children(chain[-1]):
            if not any(child is ancestor for ancestor in chain):
                yield from walk((*chain, child))

    return walk((model,))


def repeated_blocks(model: nn.Module, wanted: Container[int]) -> list[nn.Module]:
    """The layers of a model, found from structure only, in module order; `wanted` holds ids of parameters.

    A block is a child of a ModuleList, ModuleDict or Sequential that holds a wanted parameter and is
    repeated. A module with children is repeated if its class occurs again among the container children of the
    same parent module (so the one-block stages of a ResNet count together, and so do lists inside a list), or
    if it is the only child of a ModuleList. A leaf is repeated if its class occurs again in its own
    container; leaves are blocks only where nothing else is, as in a plain MLP. The outermost block wins: what is
    inside a block, such as experts, stays with it. What is only a grouping is never a block but looked into: ModuleList
    and ModuleDict, which have no forward, a plain Sequential of repeated modules (a stage), and a module with such a
    Sequential that holds most of its wanted parameters.
    """
    found: set[int] = set()
    visited: set[int] = set()

    def visit(parent: nn.Module) -> None:
        visited.add(id(parent))
        members = list(_members(parent))
        classes = Counter(type(m.module) for m in members if m.container is not None)
        for member in members:
            module = member.module
            if _is_repeated(member, classes) and _holds(module, wanted) and not _wraps_stage(module, wanted):
                found.add(id(module))
            elif id(module) not in visited:
                visit(module)

    visit(model)
    blocks = [module for module in model.modules() if id(module) in found]
    if any(not is_leaf(block) for block in blocks):
        blocks = [block for block in blocks if not is_leaf(block)]
    # A module registered in several places may be met on its own first and inside another block later.
    inner = {id(below) for block in blocks for below in block.modules() if below is not block}
    return [block for block in blocks if id(block) not in inner]


@dataclass(frozen=True)
class _Member:
    module: nn.Module
    container: nn.Module | None  # the nearest container that holds it; None for a plain attribute
    only_child: bool  # of a ModuleList


def _members(parent: nn.Module, only_child: bool = False) -> Iterator[_Member]:
    """The children of a module, with groupings replaced by what they hold."""
    kids = children(parent)
    inside = is_container(parent)
    only_child = only_child or (isinstance(parent, nn.ModuleList) and len(kids) == 1)
    for name, kid in parent._modules.items():
        if kid is None:
            continue
        if is_container(kid) and "expert" in name.lower():
            # Which experts run depends on the data, so it may differ between ranks: an expert with hooks of
            # its own would issue collectives that other ranks never join. Experts stay with what surrounds
            # them.
            continue
        if is_container(kid) and not has_forward(kid):
            yield from _members(kid, only_child and len(kids) == 1)
        elif type(kid) is nn.Sequential and (not inside or _is_stage(kid)):
            yield from _members(kid)
        else:
            yield _Member(kid, parent if inside else None, only_child)


def _holds(module: nn.Module, wanted: Container[int]) -> bool:
    return any(id(parameter) in wanted for parameter in module.parameters())


def _wraps_stage(module: nn.Module, wanted: Container[int]) -> bool:
    """Whether most of what the module wants is in a stage whose members hold several wanted parameters each.

    A plain Sequential runs all that it holds, so looking into it is safe; a ModuleList may be experts. A member with
    one parameter is a layer of a block, say a convolution with its norm.
    """

    def sizes(of: nn.Module) -> list[int]:
        return [parameter.numel() for parameter in of.parameters() if id(parameter) in wanted]

    stages = [kid for kid in children(module) if type(kid) is nn.Sequential and _is_stage(kid)]
    inside = [sizes(member) for stage in stages for member in children(stage)]
    return all(len(found) > 1 for found in inside) and 2 * sum(map(sum, inside)) > sum(sizes(module))


def _is_stage(sequential: nn.Sequential) -> bool:
    classes = Counter(type(child) for child in children(sequential) if not is_leaf(child))
    return any(count > 1 for count in classes.values())


def _is_repeated(member: _Member, classes: Counter[type[nn.Module]]) -> bool:
    if member.container is None or not has_forward(member.module):
        return False
    if is_leaf(member.module):
        return sum(type(kid) is type(member.module) for kid in children(member.container)) > 1
    return member.only_child or classes[type(member.module)] > 1
