"""A model as planning sees it: names, shapes, dtypes, and which module brings each parameter."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import cached_property

import torch
from torch import nn

from dmuon_core.assignment import MatrixSpec
from dmuon_core.boundary import default_boundaries
from dmuon_core.optim.split import SplitRule
from dmuon_core.plan import make_plan, rest_dtype_of
from dmuon_core.targets import is_embedding

ROOT = ""
"""The unit of everything outside the repeated blocks: the model itself."""


@dataclass(frozen=True)
class Weight:
    """One parameter.

    Attributes:
        unit: name of the hook module that unshards it; for what is left to FSDP2, of the module it is wrapped with.
        rest_dtype: dtype of an owned weight, its gradient and its momentum at rest; ``dtype`` for all others.
        owned: whether one rank owns it whole; FSDP2 shards the others.
        used: share of a rank's tokens that are multiplied with it: 0 for embeddings, norms and biases, 1 for an
            ordinary matrix, less for a routed expert.
    """

    fqn: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    unit: str
    owned: bool
    trainable: bool = True
    rest_dtype: torch.dtype = torch.float32
    used: float = 1.0

    @property
    def numel(self) -> int:
        return torch.Size(self.shape).numel()


@dataclass(frozen=True)
class ModelShapes:
    """All parameters of a model. ``units`` are in the order of the forward, the root first.

    Attributes:
        matrices: what the partition takes, one for each owned weight.
        attention: FLOPs that one token takes in a forward for each token of its sequence, outside of parameters.
        repeated: (name, earlier name) of modules with matrices that are in the tree again under another name.
    """

    name: str
    units: tuple[str, ...]
    weights: tuple[Weight, ...]
    matrices: tuple[MatrixSpec, ...]
    attention: float = 0.0
    repeated: tuple[tuple[str, str], ...] = ()

    @property
    def numel(self) -> int:
        return sum(weight.numel for weight in self.weights)

    @property
    def owned_numel(self) -> int:
        return sum(weight.numel for weight in self.weights if weight.owned)

    def of_unit(self, unit: str) -> list[Weight]:
        """The weights of one unit, in order."""
        return [weight for weight in self.weights if weight.unit == unit]

    @cached_property
    def reached(self) -> frozenset[str]:
        """The units that a backward comes to: something trains in them, or earlier in the order of the weights.

        What comes first in that order is taken to come first in the forward, so with frozen embeddings the frozen
        blocks up to the first that trains are not in it. The root is where anything trains.
        """
        first = next((index for index, weight in enumerate(self.weights) if weight.trainable), None)
        if first is None:
            return frozenset()
        reached = {ROOT}
        for weight in self.weights[first:]:
            reached.add(weight.unit)
            parts = weight.fqn.split(".")  # the weight may be FSDP2's root's, inside of a hook module
            reached.update(".".join(parts[:count]) for count in range(1, len(parts)))
        return frozenset(reached.intersection(self.units))

    def with_expert_share(self, share: float) -> ModelShapes:
        """Routed experts (names with "experts.") used by ``share`` of the tokens: 8 of 128 is 0.0625."""
        weights = tuple(
            replace(weight, used=weight.used * share) if ".experts." in f".{weight.fqn}" else weight
            for weight in self.weights
        )
        return replace(self, weights=weights)


def shapes_of(
    model: nn.Module,
    predicate: Callable[[str, nn.Parameter], bool] | None = None,
    *,
    master_dtype: torch.dtype | None = torch.float32,
    split: SplitRule | None = None,
    name: str | None = None,
    attention: float = 0.0,
) -> ModelShapes:
    """The shapes of a plain ``model`` on any device, with the decisions of `dedicate_params`. Local, reads no data.

    What is not owned is taken to be wrapped as the README does: ``fully_shard`` on each of `default_boundaries`, then
    on the model. Hook modules that a ``predicate`` adds to these, such as frozen blocks, are not wrapped: what they do
    not own is the root's.

    Raises:
        ValueError: as `dedicate_params` does, such as for a model without matrices.
    """
    plan = make_plan(
        model, predicate, None, True,
        shard_size=1, replicate_size=1, device=None, master_dtype=master_dtype, split=split, max_owned_bytes=None,
    )  # fmt: skip
    wrapped = {id(block) for block in default_boundaries(model)}
    blocks = wrapped | {id(module) for _, module, _ in plan.boundaries}
    names = {id(module): fqn for fqn, module in model.named_modules() if id(module) in blocks}
    unit_of: dict[int, str] = {}
    for module in model.modules():
        if id(module) in wrapped:
            for param in module.parameters():
                unit_of.setdefault(id(param), names[id(module)])
    hook_of = {fqn: unit for unit, _, fqns in plan.boundaries for fqn in fqns}
    used = {id(p) for m in model.modules() if not is_embedding(m) for p in m._parameters.values() if p is not None}
    weights = tuple(
        Weight(
            fqn,
            tuple(param.shape),
            param.dtype,
            hook_of.get(fqn, unit_of.get(id(param), ROOT)),
            fqn in hook_of,
            param.requires_grad,
            rest_dtype_of(param, master_dtype) if fqn in hook_of else param.dtype,
            1.0 if param.ndim >= 2 and id(param) in used else 0.0,
        )
        for fqn, param in model.named_parameters()
    )
    units = [ROOT, *(unit for unit in names.values() if unit != ROOT)]
    filled = {weight.unit for weight in weights}
    return ModelShapes(
        name or type(model).__name__,
        tuple(unit for unit in units if unit in filled),
        weights,
        plan.assignment.specs,
        attention,
        tuple(_repeated(model)),
    )


def _repeated(model: nn.Module) -> Iterator[tuple[str, str]]:
    """(name, earlier name) of modules with matrices for products that a walk of the tree comes to again."""
    first: dict[int, str] = {}

    def walk(module: nn.Module, name: str, around: tuple[nn.Module, ...]) -> Iterator[tuple[str, str]]:
        for key, child in module._modules.items():
            if child is None or any(child is ancestor for ancestor in around):
                continue  # a reference back up is no second call
            path = f"{name}.{key}" if name else key
            if id(child) not in first:
                first[id(child)] = path
                yield from walk(child, path, (*around, child))
            elif not is_embedding(child) and any(param.ndim >= 2 for param in child.parameters()):
                yield path, first[id(child)]

    return walk(model, ROOT, (model,))
