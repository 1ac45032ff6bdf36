"""LightningCLI: arguments in a config file, an optimizer that is built before the model is sharded, the example."""

from __future__ import annotations

import datetime
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch.cli import LightningCLI
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.utils.data import DataLoader

from dmuon_core import NewtonSchulzFlops
from dmuon_lightning import DMuonStrategy, Muon
from tests.distributed.harness import run_distributed
from tests.lightning import modules
from tests.lightning.runs import assert_equal, full_weights, make_trainer, mean_losses
from tests.lightning.test_launch import REPOSITORY, _launch
from tests.lightning.test_optimizers import scheduled

MODULES = "tests.lightning.modules"
MUON = {"lr": 0.02, "weight_decay": 0.1, "adamw_lr": 0.003, "adamw_betas": [0.9, 0.95], "ns_dtype": "torch.float32"}
#: `strategy:` -> what the strategy must be given
STRATEGIES: list[tuple[Any, dict[str, Any]]] = [
    ("dmuon", {}),
    ("dmuon_z2", {"reshard_after_forward": False}),
    (
        {
            "predicate": ["blocks.*.weight"],
            "auto_wrap_policy": [f"{MODULES}.Block"],
            "activation_checkpointing_policy": [f"{MODULES}.Block", "torch.nn.Linear"],
            "replicate_size": 2,
            "replicate_async": False,
            "reshard_after_forward": False,
        },
        {
            "predicate": ["blocks.*.weight"],
            "auto_wrap_policy": {modules.Block},
            "activation_checkpointing_policy": {modules.Block, torch.nn.Linear},
            "replicate_size": 2,
            "replicate_async": False,
            "reshard_after_forward": False,
        },
    ),
    (
        {
            "flops": {
                "class_path": "dmuon_core.NewtonSchulzFlops",
                "init_args": {"ns_dtype": "float32", "ns_form": "auto"},
            },
            "predicate": f"{MODULES}.dataset",
            "hook_boundary_predicate": f"{MODULES}.loader",
            "master_dtype": "torch.bfloat16",
            "mp_policy": {"param_dtype": "torch.bfloat16", "reduce_dtype": "torch.float32"},
        },
        {
            "flops": NewtonSchulzFlops(ns_dtype=torch.float32, ns_form="auto"),
            "predicate": modules.dataset,
            "hook_boundary_predicate": modules.loader,
            "master_dtype": torch.bfloat16,
            "mp_policy": MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32),
        },
    ),
]


class CliNet(modules.Net):
    """Without an optimizer of its own."""

    configure_optimizers = modules.pl.LightningModule.configure_optimizers

    def train_dataloader(self) -> DataLoader[Any]:
        return modules.loader()


def _settings_of(configs: list[Any]) -> list[tuple[Any, str]]:
    found = []
    for config in configs:
        if isinstance(config, dict):
            config = {"class_path": "dmuon_lightning.DMuonStrategy", "init_args": config}
        with warnings.catch_warnings():
            # Said where the config is written into the run's folder.
            warnings.filterwarnings("error", r"\s*Unable to serialize")
            cli = LightningCLI(
                CliNet,
                run=False,
                args={"trainer": {"accelerator": "cpu", "devices": 1, "logger": False, "strategy": config}},
                seed_everything_default=False,
            )
            dumped = cli.parser.dump(cli.config)
        found.append((vars(cli.trainer.strategy._settings), dumped))
    return found


def test_arguments_from_a_config_file() -> None:
    """Parsed, and written back in a form that gives the same again."""
    defaults = vars(DMuonStrategy()._settings)
    found = run_distributed(_settings_of, 1, [config for config, _ in STRATEGIES], init=False)[0]
    for (settings, dumped), (config, want) in zip(found, STRATEGIES, strict=True):
        assert settings == {**defaults, **want}
        for name in config if isinstance(config, dict) else ():
            assert f"{name}:" in dumped


def _other_arguments() -> tuple[Any, ...]:
    args = ["--trainer.strategy=dmuon_lightning.DMuonStrategy", "--trainer.strategy.timeout=0:10:00"]
    args += ["--trainer.strategy.process_group_backend=gloo", "--trainer.strategy.save_distributed_checkpoint=true"]
    cli = LightningCLI(CliNet, run=False, args=[*args, "--trainer.accelerator=cpu", "--trainer.logger=false"])
    strategy: Any = cli.trainer.strategy
    return strategy._timeout, strategy.process_group_backend, strategy._save_distributed_checkpoint


def test_arguments_from_the_command_line() -> None:
    found = run_distributed(_other_arguments, 1, init=False)[0]
    assert found == (datetime.timedelta(minutes=10), "gloo", True)


def _fits() -> dict[str, Any]:
    found = {}
    optimizer = {"class_path": "dmuon_lightning.Muon", "init_args": MUON}
    scheduler = {"class_path": "torch.optim.lr_scheduler.StepLR", "init_args": {"step_size": 1, "gamma": 0.3}}
    stock = {"class_path": "torch.optim.AdamW", "init_args": {"lr": 0.003}}
    groups = {"Muon": {"optimizer": optimizer, "lr_scheduler": scheduler}, "AdamW": {"optimizer": stock}}
    for name, group in groups.items():
        trainer = {"strategy": "dmuon", "devices": 2, "max_epochs": 2, "use_distributed_sampler": False}
        cli = LightningCLI(
            CliNet,
            args={"subcommand": "fit", "fit": {"trainer": {**trainer, "accelerator": "cpu", "logger": False}, **group}},
            trainer_defaults={"enable_checkpointing": False, "enable_progress_bar": False},
            save_config_callback=None,
            seed_everything_default=False,
        )
        rates = [group["lr"] for group in cli.trainer.optimizers[0].param_groups]
        found[name] = {"losses": mean_losses(cli.model), "weights": full_weights(cli.model), "rates": rates}

        module = modules.Net(_scheduled_muon if name == "Muon" else _adamw)
        make_trainer(DMuonStrategy(), max_epochs=2).fit(module, modules.loader())
        found[f"{name} in a script"] = {"losses": mean_losses(module), "weights": full_weights(module)}
    return found


def _muon(model: Any) -> Any:
    return Muon(model, **{**MUON, "ns_dtype": torch.float32})


def _scheduled_muon(model: Any) -> Any:
    configured = scheduled(_muon, model)
    return {**configured, "lr_scheduler": configured["lr_scheduler"]["scheduler"]}  # by the epoch, as the CLI does


def _adamw(model: Any) -> Any:
    return torch.optim.AdamW(model.parameters(), lr=0.003)


def test_an_optimizer_of_the_config_file_trains_as_one_of_a_script() -> None:
    for got in run_distributed(_fits, 2):
        for name in ("Muon", "AdamW"):
            want = got[f"{name} in a script"]
            assert got[name]["losses"] == want["losses"]
            assert got[name]["losses"][-1] < got[name]["losses"][0] - 0.2
            assert_equal(got[name]["weights"], want["weights"])
        assert got["Muon"]["rates"] == pytest.approx([0.02 * 0.09, 0.003 * 0.09])


@pytest.mark.slow
def test_the_example(tmp_path: Path) -> None:
    short = {"max_epochs": 1, "limit_train_batches": 4, "limit_val_batches": 1, "default_root_dir": tmp_path}
    arguments = [f"--trainer.{name}={value}" for name, value in short.items()]
    example = REPOSITORY / "examples" / "cli"
    _launch(str(example / "main.py"), "fit", "--config", str(example / "gpt.yaml"), *arguments)
    assert list(tmp_path.rglob("*.ckpt"))
