"""Options from outside of a script: from the file of ``accelerate launch``, and from ``DMUON_*`` variables.

The launcher hands its config file on as environment variables. Of the keys of ``fsdp_config`` it drops those that it
does not know, but ``fsdp_sharding_strategy``, which FSDP2 has no use for, travels as free text. So that is where the
options go::

    fsdp_config:
      fsdp_version: 2
      fsdp_sharding_strategy:
        dmuon:
          lr: 0.02
          predicate: ["*.mlp.*"]

or just ``fsdp_sharding_strategy: dmuon``. Variables such as ``DMUON_LR=0.02`` win over the file.
"""

from __future__ import annotations

import difflib
import fnmatch
import inspect
import os
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
import torch.nn as nn
import yaml

from dmuon_core import Muon
from dmuon_core.names import canonical_name

VARIABLE = "DMUON_"
_FILE = "FSDP_SHARDING_STRATEGY"
_DTYPES = {
    str(dtype).removeprefix("torch."): dtype for dtype in (torch.float64, torch.float32, torch.bfloat16, torch.float16)
}
# What is set elsewhere, and where.
_ELSEWHERE = {
    "mesh": "set parallelism_config (dp_replicate_size and dp_shard_size) of Accelerate instead",
    "replicate_mesh": "set parallelism_config (dp_replicate_size and dp_shard_size) of Accelerate instead",
    "mp_policy": "set mixed_precision of Accelerate instead",
    "reshard_after_forward": "set fsdp_config (fsdp_reshard_after_forward) of Accelerate instead",
    "flops": "it follows from ns_form, ns_steps, ns_dtype and ns_coefficients",
    "qk_clip": "it observes a model, so build it in the script: Muon(model, qk_clip=QKClip(...))",
}


@dataclass(frozen=True)
class Config:
    """Options by name, checked, in the types that :class:`~dmuon_lightning.accelerate.DMuonPlugin` takes.

    Attributes:
        dedicate: of ``dedicate_params``.
        muon: of the optimizer.
        found: whether there was anything at all to read.
    """

    dedicate: dict[str, Any] = field(default_factory=dict)
    muon: dict[str, Any] = field(default_factory=dict)
    found: bool = False


def read_config(environ: Mapping[str, str] | None = None) -> Config:
    """The options in ``environ``, by default this process's. Local.

    Raises:
        ValueError: an option that does not exist, with the nearest one that does; a value that it cannot have.
    """
    environ = os.environ if environ is None else environ
    file, found = _from_file(environ.get(_FILE, ""))
    values = {name: (value, f"{name} in fsdp_sharding_strategy") for name, value in file.items()}
    for variable, text in environ.items():
        if variable.startswith(VARIABLE):
            name = variable.removeprefix(VARIABLE).lower()
            values[name] = (yaml.safe_load(text), variable)
            found = True
    checked = {name: _read(name, value, where) for name, (value, where) in values.items()}
    muon = {name: value for name, value in checked.items() if name in MUON_OPTIONS}
    check_muon_options(muon)
    return Config({name: value for name, value in checked.items() if name not in muon}, muon, found)


def check_muon_options(options: dict[str, Any]) -> None:
    """Check options of the optimizer before there is a model. Local.

    Raises:
        ValueError: an option that it does not have, with the nearest one; a value that it cannot have.
    """
    for name in options:
        if name not in MUON_OPTIONS:
            raise ValueError(f"Muon has no option {name!r}: {nearest(name, MUON_OPTIONS)}")
    of_a_model = ("split", "groups", "qk_clip")
    Muon([nn.Parameter(torch.zeros(2, 2))], **{k: v for k, v in options.items() if k not in of_a_model})


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


def _from_file(text: str) -> tuple[dict[str, Any], bool]:
    try:
        value = yaml.safe_load(text)
    except yaml.YAMLError:
        value = None
    if isinstance(value, str) and value.lower() == "dmuon":
        return {}, True
    if not isinstance(value, dict):
        return {}, False  # a strategy of FSDP1, the launcher's default
    for name in value:
        if name != "dmuon":
            raise ValueError(f"fsdp_sharding_strategy has no option {name!r}: did you mean 'dmuon'?")
    options = value["dmuon"]
    if options is None or options == "None":
        return {}, True
    if not isinstance(options, dict):
        raise ValueError(f"fsdp_sharding_strategy: dmuon must hold options, as in 'lr: 0.02', got {options!r}")
    return options, True


def _read(name: str, value: Any, where: str) -> Any:
    if name in _ELSEWHERE:
        raise ValueError(f"{where}: {_ELSEWHERE[name]}")
    if name not in _READERS:
        near = nearest(name, _READERS)
        raise ValueError(f"{where} is no option of DMuon: {near}")
    try:
        return _READERS[name](None if value in ("None", "none") else value)
    except (TypeError, ValueError) as error:
        raise ValueError(f"{where}={value!r}: {error}") from None


def nearest(name: str, known: Iterable[str]) -> str:
    """Which of ``known`` was meant, for a message. Local."""
    names = list(known)
    near = difflib.get_close_matches(name, names, n=1, cutoff=0.0)
    return f"did you mean {near[0]!r}?" if near else f"there are {', '.join(names)}"


def _names(value: Any) -> list[str] | None:
    if value is None:
        return None
    if isinstance(value, str):
        return [part.strip() for part in value.split(",")]
    if isinstance(value, list) and all(isinstance(part, str) for part in value):
        return value
    raise ValueError("pass names, in a list or with commas between them")


def _flag(value: Any) -> bool:
    if isinstance(value, bool):
        return value
    if value in (0, 1):
        return bool(value)
    raise ValueError("pass true or false")


def _integer(value: Any) -> int | None:
    if value is None or (isinstance(value, int) and not isinstance(value, bool)):
        return value
    return int(str(value).replace("_", ""))


def _number(value: Any) -> float | None:
    if isinstance(value, bool):
        raise ValueError("pass a number")
    return None if value is None else float(value)  # YAML reads 1e-3 as text


def _numbers(value: Any) -> tuple[float, ...]:
    parts = value.split(",") if isinstance(value, str) else value
    return tuple(float(part) for part in parts)


def _coefficients(value: Any) -> Any:
    if isinstance(value, str) and not any(map(str.isdigit, value)):
        return value  # the name of a schedule
    if isinstance(value, list) and all(isinstance(step, list) for step in value):
        return tuple(map(_numbers, value))
    return _numbers(value)


def _whatever(value: Any) -> Any:
    return value


def _text(value: Any) -> str | None:
    return None if value is None else str(value)


def _dtype(value: Any) -> torch.dtype | None:
    if value is None:
        return None
    name = str(value).removeprefix("torch.")
    if name not in _DTYPES:
        raise ValueError(f"pass one of {', '.join(_DTYPES)}")
    return _DTYPES[name]


_READERS: dict[str, Callable[[Any], Any]] = {
    "predicate": _names,
    "hook_boundary_predicate": _names,
    "hook_boundary_strict": _flag,
    "replicate_async": _flag,
    "master_dtype": _dtype,
    "max_owned_bytes": _integer,
    "sync_module_states": _flag,
    "lr": _number,
    "weight_decay": _number,
    "momentum": _number,
    "nesterov": _flag,
    "ns_coefficients": _coefficients,
    "eps": _number,
    "ns_steps": _integer,
    "adjust_lr_fn": _text,
    "ns_dtype": _dtype,
    "ns_form": _text,
    "batched": _flag,
    "split": _whatever,
    "groups": _whatever,
    "maximize": _flag,
    "cautious_weight_decay": _flag,
    "normuon": _flag,
    "beta2": _number,
    "compile": _flag,
    "adamw_lr": _number,
    "adamw_betas": _numbers,
    "adamw_eps": _number,
    "adamw_weight_decay": _number,
}
MUON_OPTIONS = tuple(name for name in inspect.signature(Muon.__init__).parameters if name not in ("self", "params"))
"""What the optimizer can be told from outside."""
