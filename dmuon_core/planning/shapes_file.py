"""A file of shapes: enough to plan for a model whose code is not at hand."""

from __future__ import annotations

import csv
import math
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from dmuon_core.assignment import MatrixSpec
from dmuon_core.planning.json_file import read_json
from dmuon_core.planning.shapes import ROOT, ModelShapes, Weight

_KEYS = ("name", "shape", "layer", "dtype", "kind")
_KINDS = ("muon", "adamw", "embedding", "frozen")


def read_shapes(
    path: Path, *, dtype: torch.dtype | None = None, master_dtype: torch.dtype | None = torch.float32
) -> ModelShapes:
    """Read ``path``: JSON ``{name: [m, n]}`` or ``{name: {"shape": [m, n], ...}}``, or CSV with a header. Local.

    Columns of the CSV, and keys of an entry, all but the first two optional:

    * ``name``, ``shape``: in CSV the shape is written ``4096x1024``;
    * ``layer``: the module that unshards it; by default the name up to its first number (``model.layers.3``), else the
      model itself;
    * ``dtype``: such as ``bfloat16``; by default ``dtype``, else float32;
    * ``kind``: ``muon`` (owned), ``adamw``, ``embedding`` (AdamW, no products), ``frozen``; by default ``muon`` for two
      or more dimensions inside a numbered layer, else ``embedding`` where the name says so, else ``adamw``.

    Raises:
        ValueError: an entry that cannot be read, by name; no matrix for Muon.
    """
    entries = _entries(path)
    weights = [_weight(name, entry, dtype, master_dtype, path) for name, entry in entries.items()]
    matrices = tuple(
        MatrixSpec(w.fqn, w.shape, w.unit, itemsize=w.rest_dtype.itemsize, parts=_experts(w))
        for w in weights
        if w.owned
    )
    if not matrices:
        raise ValueError(
            f"{path}: no matrix for Muon: none with two or more dimensions is in a numbered layer; set 'kind'"
        )
    units = list(dict.fromkeys(weight.unit for weight in weights))
    units.sort(key=lambda unit: unit != ROOT)  # the root first, the others as they come
    return ModelShapes(path.name, tuple(units), tuple(weights), matrices)


def _entries(path: Path) -> dict[str, Mapping[str, Any]]:
    if path.suffix == ".csv":
        return _rows(path)
    found = read_json(path)
    if not isinstance(found, dict) or not found:
        raise ValueError(f"{path} must hold {{name: shape}}, or be a config of Hugging Face with 'model_type'")
    return {name: value if isinstance(value, dict) else {"shape": value} for name, value in found.items()}


def _rows(path: Path) -> dict[str, Mapping[str, Any]]:
    """The entries of a CSV file, with or without the mark that spreadsheets put before UTF-8."""
    try:
        with path.open(newline="", encoding="utf-8-sig") as file:
            lines = [[cell.strip() for cell in line] for line in csv.reader(file)]
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise ValueError(f"cannot read {path} as CSV in UTF-8: {error}") from error
    heads, *rows = [line for line in lines if any(line)] or [[]]
    if not {"name", "shape"} <= set(heads):
        raise ValueError(f"{path}: the first line must name the columns, at least name,shape")
    if len(set(filter(None, heads))) < len([head for head in heads if head]):
        raise ValueError(f"{path}: the first line names a column twice")
    entries: dict[str, Mapping[str, Any]] = {}
    for row in rows:
        entry = {key: value for key, value in zip(heads, row, strict=False) if value}
        name = entry.get("name")
        if name is None:
            raise ValueError(f"{path}: a line has no name: {','.join(row)}")
        if any(row[len(heads) :]):
            raise ValueError(f"{path}: '{name}' has more cells than the first line: quote a shape with commas")
        if name in entries:
            raise ValueError(f"{path}: '{name}' occurs twice")
        entries[name] = entry
    return entries


def _weight(
    name: str, entry: Mapping[str, Any], dtype: torch.dtype | None, master_dtype: torch.dtype | None, path: Path
) -> Weight:
    unknown = [key for key in entry if key not in _KEYS]
    if unknown:
        raise ValueError(f"{path}: '{name}' has an unknown '{unknown[0]}'; an entry has {', '.join(_KEYS)}")
    shape = _shape(entry.get("shape"), f"{path}: '{name}'")
    layer = entry.get("layer")
    unit = _layer_of(name) if layer is None else str(layer)
    kept: Any = dtype or torch.float32
    if "dtype" in entry:
        kept = getattr(torch, str(entry["dtype"]).removeprefix("torch."), None)
    if not (isinstance(kept, torch.dtype) and kept.is_floating_point):
        raise ValueError(f"{path}: '{name}' has the unknown dtype {entry['dtype']!r}")
    kind = entry.get("kind") or _kind_of(name, shape, unit)
    if kind not in _KINDS:
        raise ValueError(f"{path}: '{name}' has the unknown kind {kind!r}; the kinds are {', '.join(_KINDS)}")
    if kind == "muon" and len(shape) < 2:
        raise ValueError(f"{path}: '{name}' has shape {list(shape)}: Muon takes two or more dimensions")
    rest = kept if kind != "muon" or master_dtype is None else torch.promote_types(kept, master_dtype)
    used = 1.0 if len(shape) >= 2 and kind != "embedding" else 0.0
    return Weight(name, shape, kept, unit, kind == "muon", kind != "frozen", rest, used)


def _shape(value: Any, what: str) -> tuple[int, ...]:
    sizes = re.split(r"[xX, ]+", value.strip("[]() ")) if isinstance(value, str) else value
    if isinstance(value, str) and all(size.isdecimal() for size in sizes):
        sizes = [int(size) for size in sizes]
    whole = isinstance(sizes, list) and all(type(size) is int for size in sizes)  # neither 4.7 nor true
    shape = tuple(sizes) if whole else ()
    if not shape or min(shape) < 1 or math.prod(shape) >= 2**63:
        raise ValueError(
            f"{what} has the shape {value!r}; write [4096, 1024], in CSV 4096x1024 (and a config of Hugging Face needs "
            "model_type)"
        )
    return shape


def _layer_of(name: str) -> str:
    parts = name.split(".")
    for index, part in enumerate(parts[:-1]):
        if part.isdigit():
            return ".".join(parts[: index + 1])
    return ROOT


def _kind_of(name: str, shape: tuple[int, ...], unit: str) -> str:
    lowered = name.lower()
    if len(shape) >= 2 and unit != ROOT and not any(word in lowered for word in ("bias", "norm", "embed")):
        return "muon"
    return "embedding" if any(word in lowered for word in ("embed", "wte", "wpe")) else "adamw"


def _experts(weight: Weight) -> tuple[tuple[int, int], ...] | None:
    """Three dimensions are stacked experts, as in a model, but for convolutions."""
    if len(weight.shape) != 3 or "conv" in weight.fqn.lower():
        return None
    return (weight.shape[1:],) * weight.shape[0]
