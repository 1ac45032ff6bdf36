"""Which parameters Muon updates by default: the matrices of hidden layers."""

from __future__ import annotations

from collections.abc import Iterator

from torch import nn
from torch.nn.modules.batchnorm import _NormBase
from torch.nn.parameter import is_lazy

from dmuon_core.structure import is_leaf, repeated_blocks

_EMBEDDINGS = (nn.Embedding, nn.EmbeddingBag)
_NORMS = (nn.LayerNorm, nn.RMSNorm, nn.GroupNorm, nn.LocalResponseNorm, _NormBase)


def muon_targets(model: nn.Module) -> dict[str, nn.Parameter]:
    """Name -> parameter for every hidden matrix, in `named_parameters()` order; local, reads shapes only.

    A target is a trainable real floating-point parameter that is a matrix once flattened to [d0, rest] (both
    sides at least 2), unless one of the places that hold it makes it something else:

    - an embedding (by type, or a class named so), and whatever is tied to one;
    - the output head, see `output_heads`;
    - a norm, or a bias (a stack of biases is 2-D too);
    - a bare parameter, not named "...weight", of a module with children outside the repeated blocks: position
      tables and class tokens live there.

    The result may be empty, e.g. for an embedding followed by a head. Raises ValueError on uninitialized lazy
    parameters.
    """
    for name, parameter in model.named_parameters():
        if is_lazy(parameter):
            raise ValueError(f"Parameter {name!r} is not initialized yet: run the model on a batch first.")
    excluded = _head_parameters(model)
    blocks = [block for block in repeated_blocks(model, _matrix_ids(model)) if not is_leaf(block)]
    in_block = {id(module) for block in blocks for module in block.modules()}
    for module in model.modules():
        for name, parameter in _own_parameters(module):
            bare = not is_leaf(module) and not name.endswith("weight") and id(module) not in in_block
            if bare or "bias" in name.lower() or is_embedding(module) or _is_norm(module):
                excluded.add(id(parameter))
    return {
        name: parameter
        for name, parameter in model.named_parameters()
        if parameter.requires_grad and _is_matrix(parameter) and id(parameter) not in excluded
    }


def output_heads(model: nn.Module) -> list[nn.Module]:
    """The modules that produce the model's output; the first of these rules that finds one decides.

    1. A linear layer whose weight is an embedding's parameter.
    2. What `get_output_embeddings()` returns, on whichever module has that method (Hugging Face models).
    3. The last linear layer in registration order outside the repeated blocks. Blocks here are modules of a
       class of their own: the layers of a plain Sequential, and of Sequentials in it, are candidates, so the
       last linear layer of an MLP is its head. A model that is itself one linear layer has no head: its
       weight is the only thing to train.

    A linear layer is an nn.Linear or any other leaf with a 2-D `weight` that is no embedding and no norm. A
    model with several untied heads needs a predicate; one that is called a head too many is merely updated by
    AdamW.
    """
    linears = [module for module in model.modules() if _is_linear(module)]
    embedded = {id(p) for m in model.modules() if is_embedding(m) for _, p in _own_parameters(m)}
    tied = [module for module in linears if any(id(p) in embedded for _, p in _own_parameters(module))]
    if tied:
        return tied
    named = [head for module in model.modules() if (head := _declared_head(module)) is not None]
    if named:
        return named
    blocks = [
        block
        for block in repeated_blocks(model, _matrix_ids(model))
        if not is_leaf(block) and type(block) is not nn.Sequential
    ]
    in_block = {id(module) for block in blocks for module in block.modules()}
    outside = [module for module in linears if id(module) not in in_block and module is not model]
    return outside[-1:]


def _head_parameters(model: nn.Module) -> set[int]:
    return {id(parameter) for head in output_heads(model) for parameter in head.parameters()}


def _declared_head(module: nn.Module) -> nn.Module | None:
    declare = getattr(module, "get_output_embeddings", None)
    if not callable(declare):
        return None
    try:
        head = declare()
    except NotImplementedError:  # an abstract declaration says nothing about the head
        return None
    return head if isinstance(head, nn.Module) else None


def _own_parameters(module: nn.Module) -> Iterator[tuple[str, nn.Parameter]]:
    """The module's own slots; a parameter that has several slots is met in each of them."""
    return ((name, parameter) for name, parameter in module._parameters.items() if parameter is not None)


def _matrix_ids(model: nn.Module) -> set[int]:
    """Ids of what could be a target by shape, frozen or not: freezing a layer does not unmake a block."""
    return {
        id(parameter)
        for module in model.modules()
        if not is_embedding(module) and not _is_norm(module)
        for _, parameter in _own_parameters(module)
        if _is_matrix(parameter)
    }


def _is_matrix(parameter: nn.Parameter) -> bool:
    if not parameter.is_floating_point() or parameter.ndim < 2:
        return False
    rows = parameter.shape[0]
    # A row or a column is a vector in disguise: orthogonalizing it is only a normalization.
    return rows >= 2 and parameter.numel() >= 2 * rows


def is_embedding(module: nn.Module) -> bool:
    if isinstance(module, _EMBEDDINGS):
        return True
    # Mixins that are no modules are left out: in Hugging Face they sit under every model.
    return any("embed" in cls.__name__.lower() for cls in type(module).__mro__ if issubclass(cls, nn.Module))


def _is_norm(module: nn.Module) -> bool:
    return isinstance(module, _NORMS) or type(module).__name__.endswith("Norm")


def _is_linear(module: nn.Module) -> bool:
    if is_embedding(module) or _is_norm(module):
        return False
    weight = module._parameters.get("weight")
    return isinstance(module, nn.Linear) or (is_leaf(module) and weight is not None and weight.ndim == 2)
