"""What the strategy's arguments, its names and the user's ``configure_model`` do to a module: never to the numbers."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.fsdp.wrap import ModuleWrapPolicy

import dmuon_lightning.strategy as strategy_module
from dmuon_core import OwnedTensor, get_dedicated
from dmuon_lightning import DMuonStrategy
from tests.distributed.harness import capture_error, run_distributed
from tests.lightning import modules
from tests.lightning.runs import assert_equal, full_weights, make_trainer, mean_losses, muon


class ShardedInside(modules.Net):
    """Calls ``fully_shard`` itself, where its layers exist, and returns early when called again."""

    calls = 0

    def configure_model(self) -> None:
        self.calls += 1
        if isinstance(self.blocks[0], FSDPModule):
            return
        mesh = self.device_mesh["data_parallel"]  # type: ignore[index]
        for block in self.blocks:
            fully_shard(block, mesh=mesh)
            assert isinstance(block.up.weight, OwnedTensor)  # its owner was first
        fully_shard(self.embed, mesh=mesh)


class BuiltInside(modules.LateNet):
    """Builds and shards in ``configure_model``."""

    def configure_model(self) -> None:
        if self.head is None:
            super().configure_model()
            for block in self.blocks:
                fully_shard(block)


class BuiltTooLate(modules.Net):
    def build(self) -> None:
        super().build()
        self.head = None  # type: ignore[assignment]

    def configure_model(self) -> None:
        fully_shard(self.blocks[0])
        self.head = nn.Linear(modules.WIDTH, modules.VOCABULARY)


class Rebuilt(modules.Net):
    """Builds new layers every time that it is called."""

    def configure_model(self) -> None:
        self.build()


class CompiledBlocks(modules.Net):
    def build(self) -> None:
        super().build()
        for index, block in enumerate(self.blocks):
            self.blocks[index] = torch.compile(block, backend="eager", fullgraph=True)


class CompiledInPlace(modules.Net):
    def build(self) -> None:
        super().build()
        for block in self.blocks:
            block.compile(backend="eager", fullgraph=True)


class Watched(modules.Net):
    """Counts how often its blocks compute."""

    computed = 0

    def build(self) -> None:
        super().build()
        for block in self.blocks:
            block.norm.register_forward_hook(self._count)

    def _count(self, *_: Any) -> None:
        self.computed += 1


def _only_linears(module: nn.Module) -> bool:
    return isinstance(module, nn.Linear)


FORMS: dict[str, tuple[type[modules.Net], Any]] = {
    "fully_shard in configure_model": (ShardedInside, {}),
    "layers and fully_shard in configure_model": (BuiltInside, {}),
    "patterns": (modules.Net, {"predicate": ["blocks.*.weight", "mix*"]}),
    "one pattern": (modules.Net, {"predicate": ["[bm][li][ox]*"]}),
    "classes": (modules.Net, {"auto_wrap_policy": {modules.Block}}),
    "a policy": (modules.Net, {"auto_wrap_policy": ModuleWrapPolicy({modules.Block, nn.Embedding})}),
    "boundaries": (modules.Net, {"auto_wrap_policy": {nn.Linear}}),
    "checkpointed": (Watched, {"activation_checkpointing_policy": {modules.Block}}),
    "compiled": (CompiledBlocks, {}),
    "compiled in place": (CompiledInPlace, {"reshard_after_forward": False}),
    "compiled and checkpointed": (CompiledInPlace, {"activation_checkpointing_policy": {modules.Block}}),
    "dmuon": (modules.Net, "dmuon"),
    "dmuon_z2": (modules.Net, "dmuon_z2"),
}


def _run(kind: type[modules.Net], options: Any) -> dict[str, Any]:
    module = kind(muon)
    strategy = options if isinstance(options, str) else DMuonStrategy(**options)
    trainer = make_trainer(strategy, max_epochs=1, gradient_clip_val=0.5)
    trainer.validate(module, modules.loader(), verbose=False)
    trainer.fit(module, modules.loader(), modules.loader())
    weights = {name.replace("_orig_mod.", ""): weight for name, weight in full_weights(module).items()}
    return {
        "losses": mean_losses(module),
        "weights": weights,
        "groups": [group.fqn for group in get_dedicated(module).groups],
        "units": [name for name, m in module.named_modules() if isinstance(m, FSDPModule)],
        "calls": getattr(module, "calls", None),
        "computed": getattr(module, "computed", None),
        "z3": trainer.strategy._settings.reshard_after_forward,  # type: ignore[attr-defined]
    }


def _every_form() -> dict[str, dict[str, Any]]:
    # Names of compiled modules are their own, so references are made in the same job.
    return {"plain": _run(modules.Net, {}), **{name: _run(*form) for name, form in FORMS.items()}}


def test_every_form_gives_the_same_numbers() -> None:
    blocks = ["blocks.0", "blocks.1", "blocks.2"]
    for rank in run_distributed(_every_form, 2, timeout=240):
        plain = rank["plain"]
        assert plain["losses"][-1] < plain["losses"][0]
        assert plain["groups"] == ["", *blocks]
        for name, got in rank.items():
            assert got["losses"] == plain["losses"], name
            assert_equal(got["weights"], plain["weights"])
        assert rank["fully_shard in configure_model"]["calls"] == 2
        assert rank["fully_shard in configure_model"]["units"] == ["", "embed", *blocks]
        assert rank["classes"]["groups"] == rank["plain"]["groups"]
        assert rank["a policy"]["units"] == ["", "embed", *blocks]
        assert rank["boundaries"]["groups"] == ["mix", *(f"{b}.{m}" for b in blocks for m in ("up", "down"))]
        # Three blocks in the batches of validate, the sanity check, fit and its validation; again in each backward.
        assert rank["checkpointed"]["computed"] == 3 * (4 + 2 + 4 + 4 + 4)
        assert rank["dmuon"]["z3"] and not rank["dmuon_z2"]["z3"]


class BatchNormed(modules.Net):
    def build(self) -> None:
        super().build()
        self.norm = nn.BatchNorm1d(modules.WIDTH)


CONTRADICTION = {"hook_boundary_predicate": _only_linears, "auto_wrap_policy": {nn.Linear}}


def _message(kind: type[modules.Net], options: dict[str, Any], fits: int = 1, **trainer: Any) -> str:
    def run() -> None:
        module = kind(muon)
        for _ in range(fits):
            make_trainer(DMuonStrategy(**options), max_steps=1, **trainer).fit(module, modules.loader())

    error = capture_error(run)
    return f"{error.type}: {error.message}" if error else ""


def _messages() -> dict[str, str]:
    return {
        "too late": _message(BuiltTooLate, {}),
        "rebuilt": _message(Rebuilt, {}, fits=2),
        "pattern": _message(modules.Net, {"predicate": ["blocks.*", "layers.*"]}),
        "no list": _message(modules.Net, {"predicate": "blocks.*"}),
        "contradiction": _message(
            modules.Net, {"hook_boundary_predicate": _only_linears, "auto_wrap_policy": {nn.Linear}}
        ),
        "nothing to checkpoint": _message(modules.Net, {"activation_checkpointing_policy": {nn.LSTM}}),
        "sync_batchnorm": _message(BatchNormed, {}, sync_batchnorm=True),
        "compiled": _compiled_module(),
    }


def _compiled_module() -> str:
    module: Any = torch.compile(modules.Net(muon), backend="eager")
    error = capture_error(make_trainer(DMuonStrategy(), max_steps=1).fit, module, modules.loader())
    return error.message if error else ""


def test_what_cannot_work_says_so() -> None:
    for said in run_distributed(_messages, 2):
        assert said["too late"].startswith("MisconfigurationException: 'mix.weight' was built")
        assert "build all layers first" in said["too late"]
        assert (
            said["rebuilt"].startswith("MisconfigurationException: ''")
            or "was replaced after it was" in said["rebuilt"]
        )
        assert "return from it at once" in said["rebuilt"]
        assert said["pattern"].startswith("MisconfigurationException: DMuonStrategy(predicate=['layers.*'])")
        assert "'embed.weight'" in said["pattern"]
        assert (
            said["no list"] == "ValueError: DMuonStrategy(predicate='blocks.*'): pass a list of patterns, or a function"
        )
        assert said["contradiction"].startswith("ValueError: DMuonStrategy(hook_boundary_predicate")
        assert "chooses no module of Net" in said["nothing to checkpoint"]
        assert "no synchronized batch norm on CPUs" in said["sync_batchnorm"]
        assert "Using a compiled model is incompatible" in said["compiled"]


def _start_line() -> list[str]:
    said: list[str] = []
    strategy_module.rank_zero_info = said.append  # type: ignore[assignment]
    module = modules.Net(muon)
    for _ in range(2):  # once, not again for a module that is sharded already
        make_trainer(DMuonStrategy(replicate_size=2), max_steps=1).fit(module, modules.loader())
    return said


def test_the_start_up_line() -> None:
    [line] = run_distributed(_start_line, 4)[0]
    # mix 16 x 16 and three blocks of 16 x 32, twice, in float32
    assert "7 matrices (0.01 MiB) owned over 4 ranks (mesh 2 x 2, replicate x shard)" in line
    assert "MiB on a rank; busiest owner at 1." in line
