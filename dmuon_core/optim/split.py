"""Which matrices one parameter stands for: fused projections, attention heads, stacked experts, convolutions."""

from __future__ import annotations

import fnmatch
import functools
import math
import pickle
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn
from torch.nn.modules.conv import _ConvNd

from dmuon_core.names import canonical_name

SplitSpec = str | int | Sequence[int]
"""How one parameter is divided, see :func:`parse_split`."""
SplitRule = SplitSpec | Mapping[str, SplitSpec] | Callable[[str, Tensor], SplitSpec | None]
"""A spec for all parameters, a spec for each pattern of names, or a function of name and parameter."""


@dataclass(frozen=True)
class Split:
    """A parameter of one shape, divided into matrices that are orthogonalized each by itself.

    Attributes:
        shape: shape of the parameter.
        experts: whether its first dimension counts matrices; else it is one matrix ``[d0, rest]``.
        axis: "rows" or "columns", the side along which each of these is cut.
        sizes: rows or columns of the pieces, in order.
    """

    shape: tuple[int, ...]
    experts: bool
    axis: str
    sizes: tuple[int, ...]

    def pieces(self, t: Tensor) -> list[Tensor]:
        """Views of ``t``, of this shape, one for each size."""
        return list(t.split(self.sizes, dim=self._dim)) if len(self.sizes) > 1 else [t]

    def matrices(self, piece: Tensor) -> Tensor:
        """A piece as ``[m, n]``, or as ``[E, m, n]`` for experts; a view where the memory allows it."""
        return piece.flatten(2) if self.experts else piece.flatten(1)

    def row_values(self, t: Tensor) -> list[Tensor]:
        """The pieces of a tensor of shape :attr:`row_shape`: for each piece one value a row of its matrices."""
        if len(self.sizes) == 1:
            return [t]
        return list(t.split(1, dim=t.ndim - 1)) if self.axis == "columns" else self.pieces(t)

    @property
    def row_shape(self) -> tuple[int, ...]:
        """Shape with one value for each row of each matrix."""
        rows = 2 if self.experts else 1
        last = len(self.sizes) if self.axis == "columns" else 1
        return (*self.shape[:rows], *(1,) * (len(self.shape) - rows - 1), last)

    @property
    def parts(self) -> tuple[tuple[int, int], ...]:
        """``(m, n)`` of every matrix, for the cost of the parameter."""
        lead = self.shape[0] if self.experts else 1
        m, *rest = self.shape[1:] if self.experts else self.shape
        n = math.prod(rest)
        one = [(size, n) if self.axis == "rows" else (m, size) for size in self.sizes]
        return tuple(one) * lead

    @property
    def _dim(self) -> int:
        return len(self.shape) - 1 if self.axis == "columns" else int(self.experts)


@functools.lru_cache(maxsize=4096)
def parse_split(spec: str | None, shape: tuple[int, ...], name: str = "the parameter") -> Split:
    """Read a spec for a parameter of ``shape`` (at least 2-D). Local, pure.

    * ``None`` or ``"whole"``: one matrix ``[d0, product of the rest]``, as convolutions ``[out, in, h, w]`` need;
    * ``"rows:3"``: three blocks of equally many rows (a fused QKV weight; one block a head for as many heads);
    * ``"rows:4096,1024,1024"``: blocks of so many rows (QKV with fewer key and value heads);
    * ``"columns:12"``: the same along the columns (an output projection by heads);
    * ``"experts"``: ``[E, m, n]`` is E matrices; also followed by one of the above, ``"experts columns:2"``.

    Raises:
        ValueError: a spec that cannot be read or does not fit the shape; the message gives ``name``.
    """

    def fail(why: str) -> ValueError:
        return ValueError(
            f"Muon: split {spec!r} of {name} with shape {shape}: {why}; specs are 'whole', 'rows:3', "
            "'rows:4096,1024,1024', 'columns:12', 'experts' and 'experts rows:2'"
        )

    words = ["whole"] if spec is None else spec.split()
    experts = words[:1] == ["experts"]
    words = words[1:] if experts else words
    if experts and len(shape) < 3:
        raise fail("stacked experts need three dimensions [E, m, n]")
    m, *rest = shape[1:] if experts else shape
    if words == ["whole"] or (experts and not words):
        return Split(shape, experts, "rows", (m,))
    if not words:
        raise fail("it is empty")
    axis, _, numbers = words[0].partition(":")
    try:
        counts = [int(number) for number in numbers.split(",")]
    except ValueError:
        counts = []
    if len(words) > 1 or axis not in ("rows", "columns") or not counts or min(counts) < 1:
        raise fail("it cannot be read")
    if axis == "columns" and len(rest) != 1:
        raise fail("a convolution has no columns to cut")
    side = m if axis == "rows" else rest[0]
    if len(counts) == 1:
        if side % counts[0]:
            raise fail(f"{counts[0]} does not divide its {side} {axis}")
        counts = [side // counts[0]] * counts[0]
    elif sum(counts) != side:
        raise fail(f"the sizes add up to {sum(counts)}, not to its {side} {axis}")
    return Split(shape, experts, axis, tuple(counts))


def resolve_split(rule: SplitRule | None, name: str, p: Tensor) -> str | None:
    """The spec of one parameter, as a string that :func:`parse_split` takes and that checkpoints can carry. Local.

    Names count without the prefixes of wrappers. An integer is that many equal blocks of rows, a sequence of integers
    the rows of each block. Of several patterns that match (``fnmatch``: ``"*.qkv.weight"``) the first counts.

    Raises:
        ValueError: patterns for a parameter without a name, or a spec that does not fit the parameter.
    """
    if rule is None:
        return None
    name = canonical_name(name)
    spec: SplitSpec | None
    if isinstance(rule, Mapping):
        if not name:
            raise ValueError(
                "Muon: split goes by parameter names, but the parameters have none; pass a model, (name, parameter) "
                "pairs, or a function of (name, parameter)"
            )
        spec = next((spec for pattern, spec in rule.items() if fnmatch.fnmatchcase(name, pattern)), None)
    elif callable(rule):
        spec = rule(name, p)
    else:
        spec = rule
    if spec is None:
        return None
    if not isinstance(spec, str):  # integers of NumPy count too; what cannot be read is refused below
        spec = f"rows:{','.join(map(str, spec)) if isinstance(spec, Iterable) else spec}"
    parse_split(spec, tuple(p.shape), repr(name) if name else "a parameter")
    return spec


class CarriedRule:
    """A rule that is a function, in an optimizer that may be pickled, which a lambda may not.

    A copy has the function itself. So has what is unpickled, if the function can be found by its name; else it knows
    the split of the parameters that it holds, as that is kept as text, and refuses to guess that of others.
    """

    def __init__(self, rule: Callable[[str, Tensor], SplitSpec | None]) -> None:
        self.rule = rule

    def __call__(self, name: str, p: Tensor) -> SplitSpec | None:
        return self.rule(name, p)

    def __deepcopy__(self, memo: Any) -> CarriedRule:
        return self

    def __reduce__(self) -> tuple[Any, ...]:
        try:
            pickle.dumps(self.rule)
        except (pickle.PicklingError, AttributeError, TypeError):
            return CarriedRule, (_lost_rule,)
        return CarriedRule, (self.rule,)


def carried(rule: SplitRule | None) -> SplitRule | None:
    """``rule`` in a form that an optimizer can keep. Local."""
    return CarriedRule(rule) if callable(rule) and not isinstance(rule, CarriedRule) else rule


def _lost_rule(name: str, p: Tensor) -> SplitSpec | None:
    raise ValueError(
        f"Muon: how to split {repr(name) if name else 'a parameter'} is not known, because this optimizer was "
        'unpickled and its split was a function without a name in a module; give the new group a "split" of its own'
    )


def unmatched_patterns(rule: SplitRule | None, names: Sequence[str]) -> list[str]:
    """Patterns of a mapping that fit none of ``names``: probably misspelt."""
    if not isinstance(rule, Mapping):
        return []
    plain = [canonical_name(name) for name in names]
    return [pattern for pattern in rule if not fnmatch.filter(plain, pattern)]


def model_splits(model: nn.Module, rule: SplitRule | None = None) -> dict[str, str | None]:
    """The spec of every parameter with two dimensions or more, by name. Local; reads shapes and module types only.

    Where ``rule`` says nothing, a 3-D parameter counts as stacked experts, unless the module that holds it is a
    convolution (by type, or a class named so).

    Raises:
        ValueError: a pattern that matches no parameter, or as :func:`resolve_split`.
    """
    convolutions = {
        id(p)
        for module in model.modules()
        if isinstance(module, _ConvNd) or "conv" in type(module).__name__.lower()
        for p in module.parameters(recurse=False)
    }
    specs: dict[str, str | None] = {}
    for name, p in model.named_parameters():
        if p.ndim >= 2:
            spec = resolve_split(rule, name, p)
            specs[name] = "experts" if spec is None and p.ndim == 3 and id(p) not in convolutions else spec
    misspelt = unmatched_patterns(rule, list(specs))
    if misspelt:
        raise ValueError(f"split: no parameter of {type(model).__name__} with two dimensions fits {misspelt}")
    return specs


def matrix_parts(model: nn.Module, rule: SplitRule | None = None) -> dict[str, tuple[tuple[int, int], ...]]:
    """``(m, n)`` of each matrix that every parameter stands for, by name: what the partition has to cost. Local."""
    shapes = {name: tuple(p.shape) for name, p in model.named_parameters()}
    return {name: parse_split(spec, shapes[name], name).parts for name, spec in model_splits(model, rule).items()}
