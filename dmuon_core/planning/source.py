"""Where a model's shapes come from: a factory in Python, a config of Hugging Face, or a file of shapes."""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Callable
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import torch
from torch import nn

from dmuon_core.planning.json_file import read_json
from dmuon_core.planning.shapes import ModelShapes, shapes_of
from dmuon_core.planning.shapes_file import read_shapes


def load_shapes(
    source: str,
    *,
    patterns: list[str] | None = None,
    dtype: torch.dtype | None = None,
    master_dtype: torch.dtype | None = torch.float32,
) -> ModelShapes:
    """The shapes that ``source`` names. Nothing is allocated: models are built on the meta device.

    * ``package.module:factory``: a function without arguments, or a class, that makes the model; the current folder is
      importable;
    * a ``.json`` file with "model_type": a config of Hugging Face, such as a ``config.json`` (needs ``transformers``);
    * any other ``.json`` or ``.csv`` file: shapes, see `read_shapes`.

    Args:
        patterns: globs over names of parameters that Muon is to train, in place of the default choice.
        dtype: of the parameters before dedication; None for the model's own.
        master_dtype: as in `dedicate_params`.

    Raises:
        ValueError: a source that cannot be read, and why.
    """
    if source.endswith((".json", ".csv")):
        path = Path(source)
        if not path.is_file():
            raise ValueError(f"there is no file '{source}'")
        config = read_json(path) if source.endswith(".json") else None
        if not (isinstance(config, dict) and "model_type" in config):
            if patterns:
                raise ValueError(f"{source}: a shapes file says in its 'kind' what Muon trains: leave out --match")
            return read_shapes(path, dtype=dtype, master_dtype=master_dtype)
        model, attention = _from_config(config, source)
        name = f"{type(model).__name__} of {path.name}"
    elif ":" in source:
        model, attention, name = _from_factory(source), 0.0, source
    else:
        raise ValueError(f"'{source}' is neither package.module:factory nor a .json or .csv file")
    if dtype is not None:
        model.to(dtype)
    _check_matches(model, patterns or [])
    return shapes_of(model, _matching(patterns), master_dtype=master_dtype, name=name, attention=attention)


def _matching(patterns: list[str] | None) -> Callable[[str, nn.Parameter], bool] | None:
    if not patterns:
        return None
    return lambda fqn, param: param.ndim >= 2 and any(fnmatchcase(fqn, pattern) for pattern in patterns)


def _check_matches(model: nn.Module, patterns: list[str]) -> None:
    """A pattern that matches nothing is a slip, even beside others that do."""
    for pattern in patterns:
        ranks = [param.ndim for name, param in model.named_parameters() if fnmatchcase(name, pattern)]
        if not any(ndim >= 2 for ndim in ranks):
            found = "only parameters that are no matrices" if ranks else "no parameter"
            names = [name for name, param in model.named_parameters() if param.ndim >= 2]
            raise ValueError(
                f"--match: '{pattern}' matches {found}; the matrices are {', '.join(names[:8])}"
                f"{' and more' if len(names) > 8 else ''}"
            )


def _from_factory(source: str) -> nn.Module:
    module_name, _, attribute = source.partition(":")
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())
    try:
        found: Any = importlib.import_module(module_name)
    except (Exception, SystemExit) as error:  # whatever the module does when it is imported
        what = "" if isinstance(error, ImportError) else f"{type(error).__name__}: "
        if module_name.endswith(".py"):
            what = f"write it without .py: {what}"
        raise ValueError(f"cannot import '{module_name}' of '{source}': {what}{error}") from error
    for part in attribute.split("."):
        if not hasattr(found, part):
            names = [name for name, value in vars(found).items() if callable(value) and not name.startswith("_")]
            raise ValueError(f"'{module_name}' has no '{attribute}'; it has {', '.join(names[:12]) or 'no function'}")
        found = getattr(found, part)
    try:
        with torch.device("meta"):
            model = found()
    except (Exception, SystemExit) as error:
        raise ValueError(
            f"'{source}' raised {type(error).__name__} on the meta device: {error}. It is called without arguments, "
            "and must not look at values of its parameters"
        ) from error
    if not isinstance(model, nn.Module):
        raise ValueError(f"'{source}' returned a {type(model).__name__}, not a torch.nn.Module")
    elsewhere = [name for name, param in model.named_parameters() if not param.is_meta]
    if elsewhere:
        raise ValueError(
            f"'{source}': '{elsewhere[0]}' is not on the meta device: the factory names a device or loads weights. "
            "Leave that to the training script"
        )
    return model


def _from_config(config: dict[str, Any], source: str) -> tuple[nn.Module, float]:
    """The model of a config, and the FLOPs of its attention for each pair of tokens."""
    try:
        import transformers
    except ImportError as error:
        raise ValueError(f"{source} is a config of Hugging Face, which needs transformers: pip install "
                         "'dmuon-lightning[plan]'") from error  # fmt: skip
    try:
        settings = transformers.AutoConfig.for_model(**config)
        name = (config.get("architectures") or [None])[0]
        with torch.device("meta"):
            if name is not None and hasattr(transformers, name):
                model = getattr(transformers, name)(settings)
            else:
                model = _guessed_model(transformers, settings)
    except Exception as error:
        raise ValueError(f"{source}: transformers {transformers.__version__} cannot build it: {error}") from error
    if isinstance(settings.dtype, torch.dtype):
        model.to(settings.dtype)
    text = settings.get_text_config()  # itself, or the part of a model with images that reads text
    layers, heads, hidden = (
        getattr(text, key, None) for key in ("num_hidden_layers", "num_attention_heads", "hidden_size")
    )
    if not (layers and heads and hidden):
        return model, 0.0
    # Scores and their product with the values, of the half that a causal mask leaves: 2 x 2 x width / 2.
    return model, 2.0 * layers * heads * (getattr(text, "head_dim", None) or hidden // heads)


def _guessed_model(transformers: Any, settings: Any) -> nn.Module:
    """The model of a config without 'architectures': one that generates text, with images if it has them, or any."""
    names = ["AutoModelForCausalLM", "AutoModelForImageTextToText", "AutoModel"]
    if hasattr(settings, "vision_config"):  # as a causal one it would be its text part alone, if that
        names[:2] = reversed(names[:2])
    refused: ValueError | None = None
    for auto in (getattr(transformers, name) for name in names if hasattr(transformers, name)):
        try:
            return auto.from_config(settings)
        except ValueError as error:  # none of this kind for such a config
            refused = refused or error
    raise refused or ValueError("it has no class for it")


def expert_share(source: str) -> float | None:
    """Share of tokens that a routed expert of a config of Hugging Face sees; None where there are none.

    It stands in the config itself, or in the part of it that describes the text model.
    """
    config = read_json(Path(source)) if source.endswith(".json") else None
    if not isinstance(config, dict) or "model_type" not in config:
        return None
    for part in (config, *(value for value in config.values() if isinstance(value, dict))):
        chosen = part.get("num_experts_per_tok")
        experts = next((part[k] for k in ("num_experts", "num_local_experts", "n_routed_experts") if part.get(k)), None)
        if chosen and experts:
            return chosen / experts
    return None
