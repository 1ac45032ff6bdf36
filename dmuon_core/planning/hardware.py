"""What a machine can do: a line such as ``intra=400GB/s,inter=50GB/s,flops=400T``, or a file that was measured."""

from __future__ import annotations

import difflib
import json
import math
import re
from collections.abc import Sequence
from dataclasses import dataclass, field, fields
from itertools import pairwise
from pathlib import Path
from typing import Any

from dmuon_core.planning.json_file import read_json
from dmuon_core.planning.traffic import Kind

Rate = tuple[tuple[float, float], ...]
"""(size, FLOP/s) by rising size: products of small matrices are slower. One pair for the same rate at any size."""

_PREFIXES = {"": 1.0, "k": 1e3, "K": 1e3, "M": 1e6, "G": 1e9, "T": 1e12, "P": 1e15,
             "ki": 2.0**10, "Ki": 2.0**10, "Mi": 2.0**20, "Gi": 2.0**30, "Ti": 2.0**40, "Pi": 2.0**50}  # fmt: skip
_NUMBER = r"\s*(\d+(?:\.\d*)?(?:[eE][+-]?\d+)?|\.\d+)\s*"
_UNITS = {
    "bytes/s": re.compile(_NUMBER + r"([kKMGTP]i?)?(B|b|bit|bytes?)?(?:/s|ps)?\s*"),
    "bytes": re.compile(_NUMBER + r"([kKMGTP]i?)?(B|bytes?)?\s*"),
    "FLOP/s": re.compile(_NUMBER + r"([kKMGTP])?(?:FLOPS|FLOP/s|FLOPs?|flops?)?(?:/s)?\s*"),
    "seconds": re.compile(_NUMBER + r"(n|u|µ|m)?s\s*"),
    "share": re.compile(_NUMBER),
}
_EXAMPLES = {"bytes/s": "400GB/s", "bytes": "80GB", "FLOP/s": "400T", "seconds": "10us", "share": "0.9"}
_KINDS = {"intra": "bytes/s", "inter": "bytes/s", "memory": "bytes/s", "flops": "FLOP/s", "ns_flops": "FLOP/s",
          "latency": "seconds", "overlap": "share", "overhead": "seconds"}  # fmt: skip


@dataclass(frozen=True)
class Hardware:
    """Of one rank, with all ranks busy.

    Attributes:
        intra: bytes/s through its link to ranks of its node; a collective along a row of G ranks of a node.
        inter: bytes/s through its link to another node; None if not given, and then ``intra`` is taken.
        flops: FLOP/s of forward and backward as a whole, by width of the model.
        ns_flops: FLOP/s of Newton-Schulz, by the shorter side of the matrix; ``flops`` if not given.
        memory: bytes/s of its memory: the elementwise part of updates, packing. Infinite if not given.
        latency: seconds that a collective takes without any bytes.
        overhead: seconds that the host needs for a unit's hooks in a pass, where the device waits for it. 0.
        overlap: how much of the communication can run beside compute: 1 with engines of its own, 0 where it takes the
            cores that compute.
        algorithms: bytes/s of single kinds of collective where they were measured, through the busiest link.
    """

    intra: float
    inter: float | None
    flops: Rate
    ns_flops: Rate
    memory: float = math.inf
    latency: float = 10e-6
    overhead: float = 0.0
    overlap: float = 1.0
    algorithms: dict[Kind, float] = field(default_factory=dict)

    def bandwidth(self, kind: Kind, crosses_nodes: bool) -> float:
        """Bytes/s of a collective through one rank's link."""
        between = self.intra if self.inter is None else self.inter
        return self.algorithms.get(kind, between if crosses_nodes else self.intra)

    def to_json(self) -> str:
        """The text of a file that `parse_hardware` reads; bytes, FLOPs and seconds."""
        values = {f.name: getattr(self, f.name) for f in fields(self) if f.name != "algorithms"}
        finite = {name: value for name, value in values.items() if value not in (math.inf, None)}
        return json.dumps({**finite, "algorithms": {k.name: v for k, v in self.algorithms.items()}}, indent=2) + "\n"


def rate_at(rate: Rate, size: float) -> float:
    """FLOP/s at a size: on a straight line in the logarithms between measured sizes, constant beyond them."""
    for (low, below), (high, above) in pairwise(rate):
        if size <= low:
            return below
        if size < high:
            part = math.log(size / low) / math.log(high / low)
            return below ** (1 - part) * above**part
    return rate[-1][1] if size >= rate[-1][0] else rate[0][1]


def parse_hardware(text: str) -> Hardware:
    """Read a hardware line, or the JSON file of that name.

    Raises:
        ValueError: a key that does not exist (the nearest one is named), a value that cannot be read, a missing one.
    """
    if text.endswith(".json"):
        if not Path(text).is_file():
            made = "torchrun --nproc_per_node N -m dmuon_core measure --json"
            raise ValueError(f"hardware: there is no file {text}; make it with {made} {text}")
        return _read(Path(text))
    values: dict[str, float] = {}
    for entry in filter(None, (part.strip() for part in text.split(","))):
        key, equals, value = (part.strip() for part in entry.partition("="))
        _check_key(key)
        if not equals:
            raise ValueError(f"hardware: '{entry}' has no value; write {key}={_EXAMPLES[_KINDS[key]]}")
        if key in values:
            raise ValueError(f"hardware: '{key}' occurs twice")
        values[key] = parse_quantity(value, _KINDS[key], f"hardware: {key}")
    return _complete({key: ((1.0, v),) if _KINDS[key] == "FLOP/s" else v for key, v in values.items()}, {})


def parse_quantity(text: str, kind: str, what: str) -> float:
    """A number with its unit, in bytes, bytes/s, FLOP/s, seconds or as a share; "Gb" are bits, "GB" bytes. Pure.

    Raises:
        ValueError: text that is no positive quantity of that ``kind``.
    """
    match = _UNITS[kind].fullmatch(text)
    number = math.nan if match is None else float(match[1])
    # Finite with any prefix.
    fine = 0 <= number <= 1 if kind == "share" else number > 0 and math.isfinite(number * 1e18)
    if match is None or not fine:
        wanted = "a number from 0 to 1" if kind == "share" else f"a positive number of {kind}"
        raise ValueError(f"{what}={text!r} is not {wanted}; write it like {_EXAMPLES[kind]}")
    if kind in ("bytes", "bytes/s", "FLOP/s") and not (match[2] or text.strip()[-1:].isalpha()):
        raise ValueError(f"{what}={text!r} has no unit; write it like {_EXAMPLES[kind]}")
    if kind == "share":
        return number
    if kind == "seconds":
        return number * {None: 1.0, "m": 1e-3, "u": 1e-6, "µ": 1e-6, "n": 1e-9}[match[2]]
    value = number * _PREFIXES[match[2] or ""]
    return value / 8 if kind == "bytes/s" and match[3] in ("b", "bit") else value


def _check_key(key: str) -> None:
    if key not in _KINDS:
        near = difflib.get_close_matches(key, _KINDS, 1, 0.5)
        meant = f"did you mean '{near[0]}'? " if near else ""
        raise ValueError(f"hardware: there is no '{key}'; {meant}The keys are {', '.join(_KINDS)}")


def _complete(values: dict[str, Any], algorithms: dict[Kind, float]) -> Hardware:
    for key in ("intra", "flops"):
        if key not in values:
            raise ValueError(f"hardware: {key} is missing; write for example intra=400GB/s,inter=50GB/s,flops=400T")
    values.setdefault("inter", None)
    values.setdefault("ns_flops", values["flops"])
    return Hardware(**values, algorithms=algorithms)


def _read(path: Path) -> Hardware:
    try:
        found = read_json(path)
    except ValueError as error:
        raise ValueError(f"hardware: {error}") from error
    if not isinstance(found, dict):
        raise ValueError(f"hardware: {path} must hold an object with {', '.join(_KINDS)}")
    algorithms = found.pop("algorithms", {})
    if not isinstance(algorithms, dict):
        raise ValueError(f"hardware: {path}: algorithms must be an object with {', '.join(Kind.__members__)}")
    values: dict[str, float | Rate] = {}
    for key, value in found.items():
        _check_key(key)
        values[key] = (
            _rate(value, f"{path}: {key}") if _KINDS[key] == "FLOP/s" else _number(value, _KINDS[key], f"{path}: {key}")
        )
    for name in algorithms:
        if name not in Kind.__members__:
            raise ValueError(
                f"hardware: {path}: there is no collective '{name}'; they are {', '.join(Kind.__members__)}"
            )
    return _complete(values, {Kind[name]: _number(v, "bytes/s", f"{path}: {name}") for name, v in algorithms.items()})


def _rate(value: object, what: str) -> Rate:
    pairs = value if isinstance(value, Sequence) and not isinstance(value, str) else [[1.0, value]]
    if not pairs or not all(isinstance(pair, Sequence) and len(pair) == 2 for pair in pairs):
        raise ValueError(f"hardware: {what} must be FLOP/s, or a list of [size, FLOP/s]")
    return tuple(sorted((_number(size, "size", what), _number(rate, "FLOP/s", what)) for size, rate in pairs))


def _number(value: object, kind: str, what: str) -> float:
    """A finite number: from 0 to 1 as a share, at least 0 in seconds, positive in all else."""
    fine = {"share": lambda number: 0 <= number <= 1, "seconds": lambda number: number >= 0}.get(kind, lambda n: n > 0)
    wanted = {"share": "from 0 to 1", "seconds": "of at least 0"}.get(kind, "above 0")
    try:
        number = math.nan if isinstance(value, bool) or not isinstance(value, (int, float)) else float(value)
    except OverflowError:
        number = math.inf
    if not (math.isfinite(number) and fine(number)):
        raise ValueError(f"hardware: {what} must be a number {wanted}, got {value!r}")
    return number
