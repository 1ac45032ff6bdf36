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

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import yaml
from accelerate.utils.constants import FSDP_SHARDING_STRATEGY

from dmuon_lightning.accelerate.options import MUON_OPTIONS, check_muon_options, nearest
from dmuon_lightning.accelerate.values import NAMES, READERS

VARIABLE = "DMUON_"
_FILE = "FSDP_SHARDING_STRATEGY"
# What is there without DMuon: nothing, or a strategy of FSDP1, by name or by number; the launcher has one by default.
_OF_FSDP1 = {"", "NONE", *FSDP_SHARDING_STRATEGY, *(str(i + 1) for i in range(len(FSDP_SHARDING_STRATEGY)))}
# What is set elsewhere, and where.
ELSEWHERE = {
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
        ValueError: an option that does not exist, with the nearest one that does; a value that it cannot have; text
            that is no YAML.
    """
    environ = os.environ if environ is None else environ
    file, found = _from_file(environ.get(_FILE, ""))
    values = {name: (value, f"{name} in fsdp_sharding_strategy") for name, value in file.items()}
    for variable, text in environ.items():
        if variable.startswith(VARIABLE):
            name = variable.removeprefix(VARIABLE).lower()
            values[name] = (_from_variable(name, text, variable), variable)
            found = True
    checked = {name: _read(name, value, where) for name, (value, where) in values.items()}
    muon = {name: value for name, value in checked.items() if name in MUON_OPTIONS}
    try:
        check_muon_options(muon)  # together: some exclude others
    except ValueError as error:
        blamed = [name for name in muon if re.search(rf"\b{name}\b", str(error))] or list(muon)
        raise ValueError(f"{', '.join(values[name][1] for name in blamed)}: {error}") from None
    return Config({name: value for name, value in checked.items() if name not in muon}, muon, found)


def _from_variable(name: str, text: str, variable: str) -> Any:
    if not text.strip():
        raise ValueError(f"{variable} is empty: give it a value, or unset it")
    try:
        value = yaml.safe_load(text)
    except yaml.YAMLError as error:
        if name in NAMES:  # a pattern such as *.mlp.*, which is an alias in YAML
            text = text.strip()
            listed = text[1:-1] if text.startswith("[") and text.endswith("]") else text
            return [part.strip().strip("'\"") for part in listed.split(",")]
        raise ValueError(f"{variable}={text!r} cannot be read: {' '.join(str(error).split())}") from None
    if isinstance(value, int | float) and ":" in text:  # YAML 1.1 counts 1:30 to the base of 60
        return text
    return value


def _from_file(text: str) -> tuple[dict[str, Any], bool]:
    if text.strip().upper().lstrip("_") in _OF_FSDP1:
        return {}, False
    strategies = ", ".join(FSDP_SHARDING_STRATEGY)
    try:
        value = yaml.safe_load(text)
    except yaml.YAMLError as error:
        why = " ".join(str(error).split())
        raise ValueError(
            f"fsdp_sharding_strategy={text!r} is neither dmuon with its options, as in {{dmuon: {{lr: 0.02}}}}, nor "
            f"one of {strategies}: {why}"
        ) from None
    if isinstance(value, str) and value.lower() == "dmuon":
        return {}, True
    if not isinstance(value, dict):
        raise ValueError(
            f"fsdp_sharding_strategy={text!r} is neither dmuon, with options as in {{dmuon: {{lr: 0.02}}}}, nor one of "
            f"{strategies}: {nearest(value, ('dmuon', *FSDP_SHARDING_STRATEGY))}"
        )
    for name in value or ("{}",):
        if name != "dmuon":
            raise ValueError(f"fsdp_sharding_strategy has no option {name!r}: did you mean 'dmuon'?")
    options = value["dmuon"]
    if options is None or options == "None":
        return {}, True
    if not isinstance(options, dict):
        raise ValueError(f"fsdp_sharding_strategy: dmuon must hold options, as in 'lr: 0.02', got {options!r}")
    return options, True


def _read(name: str, value: Any, where: str) -> Any:
    if name in ELSEWHERE:
        raise ValueError(f"{where}: {ELSEWHERE[name]}")
    if name not in READERS:
        raise ValueError(f"{where} is no option of DMuon: {nearest(name, READERS)}")
    try:
        return READERS[name](None if value in ("None", "none") else value)
    except (TypeError, ValueError) as error:
        raise ValueError(f"{where}={value!r}: {error}") from None
