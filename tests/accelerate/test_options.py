"""Options that a script passes: to DMuonPlugin, to enable() and to DMuonTrainerOptimizer. Here; nothing is trained."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from accelerate.state import AcceleratorState
from accelerate.utils import FullyShardedDataParallelPlugin

from dmuon_lightning.accelerate import DMuonPlugin, DMuonTrainerOptimizer, enable
from tests.accelerate.runs import forget_accelerator, forget_enable
from tests.distributed.models import MODELS

WRONG: list[tuple[dict[str, Any], str]] = [
    ({"predicate": 3}, "predicate=3"),
    ({"hook_boundary_predicate": [torch.nn.Linear]}, "hook_boundary_predicate="),
    ({"hook_boundary_predicate": torch.nn.Linear}, "pass a function, or names in a list"),
    ({"hook_boundary_strict": None}, "pass True or False"),
    ({"replicate_async": "no"}, "replicate_async='no'): pass True or False"),
    ({"sync_module_states": "false"}, "sync_module_states='false'"),
    ({"master_dtype": "bfloat16"}, "pass a floating-point dtype such as torch.float32"),
    ({"master_dtype": torch.int8}, "pass a floating-point dtype"),
    ({"max_owned_bytes": "1GB"}, "max_owned_bytes='1GB'"),
    ({"max_owned_bytes": 0}, "a positive int"),
    ({"muon": None}, "muon=None): pass a dict"),
    ({"muon": 3}, "muon=3): pass a dict"),
    ({"muon": {"lrr": 1}}, "Muon has no option 'lrr': did you mean 'lr'?"),
    ({"muon": {"momentum": 1.5}}, "momentum must be a number in"),
    ({"muon": {"lr": "fast"}}, "Muon: lr must be"),
    ({"muon": {"groups": 3}}, "groups must be a dict of dicts"),
]


@pytest.fixture(autouse=True)
def as_new() -> Iterator[None]:
    forget_accelerator()
    yield
    forget_accelerator()


def active(plugin: Any) -> Any:
    """Let `plugin` be that of the process's Accelerator."""
    AcceleratorState._shared_state["fsdp_plugin"] = plugin
    return plugin


def names_mlp(name: str, param: Any) -> bool:
    return "mlp" in name


@pytest.mark.parametrize("who", [DMuonPlugin, enable])
@pytest.mark.parametrize(("options", "message"), WRONG, ids=str)
def test_what_does_not_fit_is_an_error(who: Any, options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError) as error:  # noqa: PT011
        who(**options)
    assert message in str(error.value)
    assert type(FullyShardedDataParallelPlugin(fsdp_version=2)) is FullyShardedDataParallelPlugin


def test_a_generator_of_patterns_is_read_once() -> None:
    plugin = DMuonPlugin(predicate=(part for part in ["*.mlp.*"]), sync_module_states=0)
    assert plugin.predicate == ["*.mlp.*"]
    assert plugin.sync_module_states is False


def test_enable_makes_every_plugin_ours() -> None:
    with pytest.raises(ValueError, match="no option 'predicat': did you mean 'predicate'"):
        enable(predicat="x")
    enable(max_owned_bytes=5, muon={"lr": 0.5})
    plugin = FullyShardedDataParallelPlugin(fsdp_version=2, reshard_after_forward=False)
    assert type(plugin) is DMuonPlugin
    assert (plugin.max_owned_bytes, plugin.muon, plugin.reshard_after_forward) == (5, {"lr": 0.5}, False)
    forget_enable()
    assert type(FullyShardedDataParallelPlugin(fsdp_version=2)) is FullyShardedDataParallelPlugin


def test_enable_twice_adds_and_never_drops() -> None:
    enable(predicate=["*.mlp.*"], muon={"lr": 0.5})
    enable()
    enable(max_owned_bytes=5, muon={"momentum": 0.9, "lr": 0.5})
    plugin = FullyShardedDataParallelPlugin(fsdp_version=2)
    assert (plugin.predicate, plugin.max_owned_bytes) == (["*.mlp.*"], 5)
    assert plugin.muon == {"lr": 0.5, "momentum": 0.9}
    for options, name in (({"predicate": ["*.attn.*"]}, "predicate="), ({"muon": {"lr": 0.1}}, "muon.lr=0.1")):
        with pytest.raises(ValueError, match=f"{name}.* would have no effect: an earlier enable"):
            enable(**options)
    assert FullyShardedDataParallelPlugin(fsdp_version=2).predicate == ["*.mlp.*"]


def test_enable_after_the_accelerator_must_agree_with_it() -> None:
    active(DMuonPlugin(predicate=["*.mlp.*"], muon={"lr": 0.5}))
    for options in ({"predicate": ["*.attn.*"]}, {"max_owned_bytes": 5}, {"muon": {"momentum": 0.9}}):
        with pytest.raises(ValueError, match="would have no effect: the Accelerator is there already"):
            enable(**options)
    enable(predicate=["*.mlp.*"], muon={"lr": 0.5})
    FullyShardedDataParallelPlugin(fsdp_version=2)  # as a Trainer does


def test_a_later_plugin_must_agree_with_the_accelerators() -> None:
    def over(part: str) -> Any:
        return lambda name, param: part in name

    for options in (
        {}, {"predicate": ["*.mlp.*"]}, {"predicate": over("mlp")}, {"predicate": names_mlp},
        {"muon": {"lr": 0.5, "split": {"*.q": 2}}, "master_dtype": None},
    ):  # fmt: skip
        forget_accelerator()
        active(DMuonPlugin(**options))
        DMuonPlugin(**{**options, "reshard_after_forward": False})
        if callable(options.get("predicate")) and options["predicate"] is not names_mlp:
            DMuonPlugin(predicate=over("mlp"))  # another function of the same code over the same values
            with pytest.raises(ValueError, match="DMuonPlugin: predicate would have no effect"):
                DMuonPlugin(predicate=over("attn"))
        for other in ({"predicate": functools.partial(names_mlp)}, {"max_owned_bytes": 7}, {"muon": {"lr": 0.1}}):
            with pytest.raises(ValueError, match="would have no effect: this process's Accelerator has a DMuonPlugin"):
                DMuonPlugin(**{**options, **other})


def test_a_library_may_build_an_accelerator_later(monkeypatch: pytest.MonkeyPatch) -> None:
    """After enable(), beside a plugin with options of its own: it asks for none."""
    enable(max_owned_bytes=5)
    active(DMuonPlugin(predicate=["*.mlp.*"], muon={"lr": 0.5}))
    FullyShardedDataParallelPlugin(fsdp_version=2)
    monkeypatch.setenv("DMUON_LR", "0.1")  # asked of the second Trainer of a process, too late
    with pytest.raises(ValueError, match=r"DMuonPlugin: muon\.lr would have no effect"):
        FullyShardedDataParallelPlugin(fsdp_version=2)
    forget_accelerator()
    monkeypatch.setenv("DMUON_LR", "0.1")
    enable()
    active(FullyShardedDataParallelPlugin(fsdp_version=2))
    FullyShardedDataParallelPlugin(fsdp_version=2)
    monkeypatch.delenv("DMUON_LR")
    with pytest.raises(ValueError, match=r"DMuonPlugin: muon\.lr would have no effect"):
        FullyShardedDataParallelPlugin(fsdp_version=2)


def test_the_trainers_optimizer_names_the_nearest_option() -> None:
    with pytest.raises(ValueError, match="Muon has no option 'momentun': did you mean 'momentum'"):
        DMuonTrainerOptimizer()(MODELS["gpt"](), args=SimpleNamespace(), momentun=0.9)
