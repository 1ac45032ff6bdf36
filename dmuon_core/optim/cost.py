"""What an update really costs, for the partition: FLOPs of the form and the steps that will run."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields, replace
from typing import TYPE_CHECKING, Any

import torch

from dmuon_core.optim import gram, newton_schulz
from dmuon_core.optim.polar import Coefficients, rescales_rows, schedule
from dmuon_core.optim.update import NS_DTYPES, split_of
from dmuon_core.owned_tensor import OwnedTensor
from dmuon_core.registry import dedicated_of

if TYPE_CHECKING:
    from dmuon_core.runtime import DedicatedModel

#: The busiest owner may have so much more work, over the bound, than the partition expected, before anyone is told.
_TOLERATED = 1.05


@dataclass(frozen=True)
class NewtonSchulzFlops:
    """FLOPs of orthogonalizing one ``(m, n)`` matrix with such options of :class:`dmuon_core.Muon`. Local, no tensors.

    For ``dedicate_params(flops=...)``, so that owners are balanced by what they will compute. Matrix products count,
    see :func:`~dmuon_core.optim.newton_schulz.flops`; "auto" counts as the form that it takes for the shape.

    Args:
        ns_coefficients: as in ``Muon``; "aol" costs one more product, and restarts of the Gram form depend on them.
        ns_steps: as in ``Muon``.
        ns_dtype: as in ``Muon``, or its name.
        ns_form: as in ``Muon``.
        device_type: where "auto" chooses; None for the device of the mesh, and "cpu" where there is none.

    Raises:
        ValueError: an option that ``Muon`` would not take.
    """

    ns_coefficients: Coefficients = newton_schulz.COEFFICIENTS
    ns_steps: int = newton_schulz.STEPS
    ns_dtype: torch.dtype | str = torch.bfloat16
    ns_form: newton_schulz.Form = "direct"
    device_type: str | None = None

    def __post_init__(self) -> None:
        # Tuples and names: two that mean the same are equal, and ranks can compare what they print.
        if not isinstance(self.ns_coefficients, str):
            entries = tuple(tuple(c) if isinstance(c, tuple | list) else c for c in self.ns_coefficients)
            object.__setattr__(self, "ns_coefficients", entries)
        name = str(self.ns_dtype).removeprefix("torch.")
        object.__setattr__(self, "ns_dtype", name)
        if name not in NS_DTYPES:
            raise ValueError(
                f"NewtonSchulzFlops: ns_dtype must be one of {', '.join(NS_DTYPES)}, got {self.ns_dtype!r}"
            )
        if self.ns_form not in ("direct", "gram", "auto"):
            raise ValueError(f"NewtonSchulzFlops: ns_form must be 'direct', 'gram' or 'auto', got {self.ns_form!r}")
        polynomials = schedule(self.ns_coefficients, self.ns_steps)
        if self.ns_form == "gram":
            gram.segments(polynomials, NS_DTYPES[name])

    def __call__(self, shape: tuple[int, int]) -> int:
        m, n = min(shape), max(shape)
        dtype = NS_DTYPES[str(self.ns_dtype)]
        polynomials = schedule(self.ns_coefficients, self.ns_steps)
        form = self.ns_form
        if form == "auto":
            form = newton_schulz.choose_form(m, n, dtype, self.device_type or "cpu")
        restarts = len(gram.segments(polynomials, dtype)) - 1 if form == "gram" else 0
        rescaling = 2 * m * m * n if rescales_rows(self.ns_coefficients) else 0
        return newton_schulz.flops(m, n, len(polynomials), form, restarts) + rescaling

    def on(self, device_type: str) -> NewtonSchulzFlops:
        """The same, where nothing else was said, on ``device_type``."""
        return self if self.device_type else replace(self, device_type=device_type)


def flops_of(options: Mapping[str, Any]) -> NewtonSchulzFlops:
    """The FLOPs of options of ``Muon``, or of one of its groups; those that are missing have its defaults. Local."""
    names = {field.name for field in fields(NewtonSchulzFlops)} - {"device_type"}
    return NewtonSchulzFlops(**{name: value for name, value in options.items() if name in names})


def warn_of_balance(groups: list[dict[str, Any]]) -> None:
    """Warn, on the first rank, if the owners of these groups' matrices were balanced for other work. Local."""
    for dedicated in dedicated_of(p for group in groups for p in group["params"]):
        problem = balance_problem(groups, dedicated)
        if problem and dedicated.place[1] == (0, 0):  # it is the same on all ranks
            warnings.warn(f"Muon: {problem}", stacklevel=5)


def balance_problem(groups: Iterable[dict[str, Any]], dedicated: DedicatedModel) -> str | None:
    """Say that the owners were balanced for other work than that of these groups, and the remedy; None if not. Local.

    Nothing is said of an optimizer that holds a part of the matrices only, or whose groups compute in different ways.
    """
    found: dict[str, int] = {}
    kinds = set()
    ours = {id(param.rest) for param in dedicated.params}
    for group in groups:
        if group["algorithm"] != "muon":
            continue
        flops = flops_of(group).on(dedicated.mesh.device_type)
        kinds.add(flops)
        for position, p in enumerate(group["params"]):
            if isinstance(p, OwnedTensor) and id(p) in ours:
                found[p.fqn] = sum(map(flops, split_of(group, position).parts))
    expected = dedicated.assignment
    if len(kinds) != 1 or any(spec.fqn not in found for spec in expected.specs):
        return None
    real = replace(expected, costs=tuple(found[spec.fqn] for spec in expected.specs))
    if real.ratio <= _TOLERATED * expected.ratio:
        return None
    (flops,) = kinds
    options = {
        field.name: getattr(flops, field.name)
        for field in fields(flops)
        if field.name != "device_type" and getattr(flops, field.name) != getattr(NewtonSchulzFlops(), field.name)
    }
    shown = ", ".join(f"{name}={value!r}" for name, value in options.items())
    return (
        f"the owners were balanced for other work: with the split and the Newton-Schulz options of this Muon the "
        f"busiest rank has {real.ratio:.2f} times the least that is possible, where {expected.ratio:.2f} was expected. "
        f"Give the same split and flops=NewtonSchulzFlops({shown}) to dedicate_params or the strategy, or with "
        "Accelerate the same options to DMuonPlugin(muon=...)"
    )
