"""Options from the launcher's file and from DMUON_* variables. In this process; nothing is trained."""

from __future__ import annotations

import inspect
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from accelerate.commands.launch import _validate_launch_command, launch_command_parser
from accelerate.utils.launch import prepare_multi_gpu_env

import dmuon_core
from dmuon_lightning.accelerate import DMuonPlugin, Muon
from dmuon_lightning.accelerate.config import ELSEWHERE, read_config
from dmuon_lightning.accelerate.values import READERS
from tests.distributed.models import MODELS

EVERY_OPTION: dict[str, tuple[Any, Any]] = {  # as written in YAML, as read
    "predicate": (["blocks.*.mlp.*", "*.attn.*"], ["blocks.*.mlp.*", "*.attn.*"]),
    "hook_boundary_predicate": (["Attention", "MLP"], ["Attention", "MLP"]),
    "hook_boundary_strict": (False, False),
    "replicate_async": (False, False),
    "master_dtype": ("bfloat16", torch.bfloat16),
    "max_owned_bytes": (1_000_000, 1_000_000),
    "sync_module_states": (False, False),
    "lr": (0.03, 0.03),
    "weight_decay": (0, 0.0),
    "momentum": (0.9, 0.9),
    "nesterov": (False, False),
    "ns_coefficients": ([3.0, -4.0, 2.0], (3.0, -4.0, 2.0)),
    "eps": ("1e-6", 1e-6),
    "ns_steps": (4, 4),
    "adjust_lr_fn": ("match_rms_adamw", "match_rms_adamw"),
    "ns_dtype": ("float32", torch.float32),
    "ns_form": ("gram", "gram"),
    "batched": (True, True),
    "split": ({"*.up.weight": 2}, {"*.up.weight": 2}),
    "groups": ({"slow": {"params": "*.mlp.*", "lr": 0.001}}, {"slow": {"params": "*.mlp.*", "lr": 0.001}}),
    "maximize": (True, True),
    "cautious_weight_decay": (True, True),
    "normuon": (True, True),
    "beta2": (0.9, 0.9),
    "compile": (False, False),
    "adamw_lr": ("3e-4", 3e-4),
    "adamw_betas": ([0.9, 0.98], (0.9, 0.98)),
    "adamw_eps": ("1e-7", 1e-7),
    "adamw_weight_decay": (0.02, 0.02),
}


@pytest.fixture(autouse=True)
def no_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("FSDP_SHARDING_STRATEGY", raising=False)
    monkeypatch.delenv("FSDP_VERSION", raising=False)


def launched(tmp_path: Path, **fsdp_config: Any) -> dict[str, str]:
    """What `accelerate launch --config_file` puts into the environment of its processes."""
    content = {"distributed_type": "FSDP", "num_processes": 2, "fsdp_config": {"fsdp_version": 2, **fsdp_config}}
    file = tmp_path / "dmuon.yaml"
    file.write_text(yaml.safe_dump(content))
    args = launch_command_parser().parse_args(["--config_file", str(file), "--main_process_port", "0", "train.py"])
    args, _, _ = _validate_launch_command(args)
    return prepare_multi_gpu_env(args)


def test_every_option_of_both_is_reachable() -> None:
    dedicate = set(inspect.signature(dmuon_core.dedicate_params).parameters) - {"model"}
    optimizer = set(inspect.signature(dmuon_core.Muon.__init__).parameters) - {"self", "params"}
    assert set(READERS) | set(ELSEWHERE) == dedicate | optimizer
    assert set(EVERY_OPTION) == set(READERS)


def test_every_option_comes_from_the_file(tmp_path: Path) -> None:
    environ = launched(tmp_path, fsdp_sharding_strategy={"dmuon": {k: text for k, (text, _) in EVERY_OPTION.items()}})
    config = read_config(environ)
    assert config.found
    assert {**config.dedicate, **config.muon} == {name: value for name, (_, value) in EVERY_OPTION.items()}
    assert "lr" in config.muon and "predicate" in config.dedicate


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("polar_express", "polar_express"),
        ("3, -4, 2", (3.0, -4.0, 2.0)),
        ("[[4, -7, 2], [3.4, -5, 2]]", ((4.0, -7.0, 2.0), (3.4, -5.0, 2.0))),
    ],
)
def test_every_form_of_coefficients(text: str, value: Any) -> None:
    assert read_config({"DMUON_NS_COEFFICIENTS": text}).muon == {"ns_coefficients": value}


def test_every_option_comes_from_a_variable() -> None:
    as_text = {
        f"DMUON_{name.upper()}": ",".join(map(str, text)) if isinstance(text, list) else str(text)
        for name, (text, _) in EVERY_OPTION.items()
    }
    config = read_config(as_text)
    assert {**config.dedicate, **config.muon} == {name: value for name, (_, value) in EVERY_OPTION.items()}


def test_the_file_in_the_readme_is_read(tmp_path: Path) -> None:
    readme = (Path(__file__).parents[2] / "README.md").read_text()
    content = yaml.safe_load(readme.split("```yaml\n")[1].split("```")[0])
    config = read_config(launched(tmp_path, **content["fsdp_config"]))
    assert config.dedicate == {"predicate": ["*.mlp.*", "*.self_attn.*"]} and config.muon == {"momentum": 0.95}


def test_the_word_alone_turns_it_on(tmp_path: Path) -> None:
    assert read_config(launched(tmp_path, fsdp_sharding_strategy="dmuon")).found
    assert read_config(launched(tmp_path, fsdp_sharding_strategy={"dmuon": None})).found
    assert not read_config(launched(tmp_path)).found


@pytest.mark.parametrize("text", ["", "None", "HYBRID_SHARD", "_HYBRID_SHARD_ZERO2", "full_shard", "1", "5"])
def test_strategies_of_fsdp1_do_not(text: str) -> None:
    assert not read_config({"FSDP_SHARDING_STRATEGY": text}).found


@pytest.mark.parametrize("text", ["*.mlp.*", "*.mlp.*, x", "[*.mlp.*]", "['*.mlp.*', 'x']", "x,*.mlp.*"])
def test_patterns_of_a_variable_need_no_quotes(text: str) -> None:
    patterns = read_config({"DMUON_PREDICATE": text}).dedicate["predicate"]
    assert sorted(patterns) == ["*.mlp.*", "x"][: 1 + ("x" in text)]
    assert read_config({"DMUON_PREDICATE": "*.[qk]"}).dedicate["predicate"] == ["*.[qk]"]


def test_variables_win_over_the_file_and_arguments_over_both(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = launched(tmp_path, fsdp_sharding_strategy={"dmuon": {"momentum": 0.8, "ns_steps": 3, "max_owned_bytes": 7}})
    for name in ("FSDP_SHARDING_STRATEGY", "FSDP_VERSION"):
        monkeypatch.setenv(name, file[name])
    monkeypatch.setenv("DMUON_NS_STEPS", "4")
    monkeypatch.setenv("DMUON_REPLICATE_ASYNC", "false")
    plugin = DMuonPlugin(max_owned_bytes=9, muon={"nesterov": False})
    assert plugin.muon == {"momentum": 0.8, "ns_steps": 4, "nesterov": False}
    assert (plugin.max_owned_bytes, plugin.replicate_async, plugin.hook_boundary_strict) == (9, False, True)
    optimizer = Muon(MODELS["gpt"](), momentum=0.7)  # no Accelerator here: straight from the configuration
    assert [optimizer.param_groups[0][key] for key in ("momentum", "ns_steps")] == [0.7, 4]


@pytest.mark.parametrize(
    ("environ", "message"),
    [
        ({"DMUON_MOMENTM": "0.9"}, "DMUON_MOMENTM is no option of DMuon: did you mean 'momentum'?"),
        (
            {"FSDP_SHARDING_STRATEGY": "{'dmuon': {'predicat': 'x'}}"},
            "predicat in fsdp_sharding_strategy is no option of DMuon: did you mean 'predicate'?",
        ),
        ({"FSDP_SHARDING_STRATEGY": "{'dmoun': {}}"}, "'dmoun': did you mean 'dmuon'?"),
        ({"FSDP_SHARDING_STRATEGY": "{'dmuon': 3}"}, "must hold options"),
        ({"DMUON_MESH": "2"}, "DMUON_MESH: set parallelism_config"),
        ({"DMUON_NESTEROV": "maybe"}, "DMUON_NESTEROV='maybe': pass true or false"),
        ({"DMUON_MASTER_DTYPE": "int8"}, "pass one of float64, float32, bfloat16, float16"),
        ({"DMUON_LR": "fast"}, "DMUON_LR='fast'"),
        ({"DMUON_MOMENTUM": "1.5", "DMUON_LR": "1"}, "DMUON_MOMENTUM: Muon: momentum must be a number in [0, 1)"),
        ({"DMUON_LR": ""}, "DMUON_LR is empty"),
        ({"DMUON_LR": "{"}, "DMUON_LR='{' cannot be read"),
        ({"DMUON_WEIGHT_DECAY": "1:30"}, "DMUON_WEIGHT_DECAY='1:30'"),
        (
            {"FSDP_SHARDING_STRATEGY": "{'dmuon': {'LR': 1}}"},
            "LR in fsdp_sharding_strategy is no option of DMuon: did ",
        ),
        ({"FSDP_SHARDING_STRATEGY": "{'dmuon': {'LR': 1}}"}, "did you mean 'lr'?"),
        ({"FSDP_SHARDING_STRATEGY": "{'dmuon': {1: 2}}"}, "1 in fsdp_sharding_strategy is no option of DMuon"),
        ({"FSDP_SHARDING_STRATEGY": "{1: 2}"}, "no option 1: did you mean 'dmuon'?"),
        ({"FSDP_SHARDING_STRATEGY": "{}"}, "did you mean 'dmuon'?"),
        ({"FSDP_SHARDING_STRATEGY": "{'dmuon': {'lr': 0.02}"}, "is neither dmuon with its options"),
        ({"FSDP_SHARDING_STRATEGY": "dmuon: lr: 0.02"}, "mapping values are not allowed here"),
        ({"FSDP_SHARDING_STRATEGY": "dmuons"}, "did you mean 'dmuon'?"),
        ({"FSDP_SHARDING_STRATEGY": "[dmuon]"}, "did you mean 'dmuon'?"),
        ({"FSDP_SHARDING_STRATEGY": "FULL_SHRAD"}, "did you mean 'FULL_SHARD'?"),
    ],
)
def test_what_does_not_fit_is_an_error(environ: dict[str, str], message: str) -> None:
    with pytest.raises(ValueError) as error:  # noqa: PT011
        read_config(environ)
    assert message in str(error.value)


def test_arguments_that_do_not_fit_are_errors(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ValueError, match="Muon has no option 'momentun': did you mean 'momentum'"):
        DMuonPlugin(muon={"momentun": 0.9})
    with pytest.raises(ValueError, match="set fsdp_version: 2"):
        DMuonPlugin(fsdp_version=1)
    monkeypatch.setenv("FSDP_VERSION", "1")
    with pytest.raises(ValueError, match="set fsdp_version: 2"):
        DMuonPlugin()
    monkeypatch.delenv("FSDP_VERSION")
    with pytest.raises(ValueError, match="cannot offload parameters to the CPU"):
        DMuonPlugin(cpu_offload=True)
