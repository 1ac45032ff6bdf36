"""``lightning`` and ``pytorch_lightning`` are two distributions of the same classes: a strategy for either Trainer."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest

from dmuon_lightning import DMuonFabricStrategy, DMuonStrategy
from tests.distributed.harness import capture_error, run_distributed
from tests.lightning.test_launch import _launch

SCRIPT = Path(__file__).parent / "other_trainer.py"
pytest.importorskip("pytorch_lightning")


def _wrong_trainers() -> dict[str, str]:
    import lightning_fabric
    import pytorch_lightning

    import dmuon_lightning.pytorch_lightning as other

    options: dict[str, Any] = {"accelerator": "cpu", "devices": 1}
    attempts = {
        "ours": lambda: pytorch_lightning.Trainer(strategy=DMuonStrategy(), **options),
        "theirs": lambda: pl.Trainer(strategy=other.DMuonStrategy(), **options),
        "our Fabric": lambda: lightning_fabric.Fabric(strategy=DMuonFabricStrategy(), **options),
    }
    errors = {name: capture_error(attempt) for name, attempt in attempts.items()}
    return {name: error.message if error else "" for name, error in errors.items()}


def test_the_wrong_trainer_says_what_to_import() -> None:
    said = run_distributed(_wrong_trainers, 1, init=False)[0]
    hint = "for pytorch_lightning and lightning_fabric import it from dmuon_lightning.pytorch_lightning>"
    assert f"<DMuonStrategy for lightning; {hint}" in said["ours"]
    assert f"<DMuonFabricStrategy for lightning; {hint}" in said["our Fabric"]
    assert "; for lightning import it from dmuon_lightning>" in said["theirs"]


@pytest.mark.slow
def test_a_script_of_the_other_distribution(tmp_path: Path) -> None:
    """By name on two processes, by class on one, and where it is the only one; with averaging and a resume."""
    reports = {}
    for name, arguments in {"two": ["2"], "one": ["1"], "alone": ["1", "alone"]}.items():
        (tmp_path / name).mkdir()
        _launch(str(SCRIPT), str(tmp_path / name / "result"), *arguments)
        reports[name] = json.loads((tmp_path / name / "result.0").read_text())
    assert reports["alone"]["trees"] == ["pytorch_lightning"]
    assert reports["one"]["trees"] == ["lightning", "pytorch_lightning"]
    one = reports["one"]
    assert len(one["losses"]) == 5 and one["losses"][-1] < one["losses"][0] - 0.05
    for other in ("two", "alone"):
        assert reports[other]["losses"] == pytest.approx(one["losses"], abs=1e-5)
        assert reports[other]["val_loss"] == pytest.approx(one["val_loss"], abs=1e-5)
