"""The ways to start a script: Lightning's own launcher, which runs it once per device, and torchrun."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.distributed.harness import run_distributed
from tests.lightning.runs import LOSS_ATOL, Fit, fit_in_one_process

REPOSITORY = Path(__file__).parents[2]
SCRIPT = Path(__file__).parent / "launched.py"
TIMEOUT = 180.0


def _launch(*arguments: str) -> None:
    """Run and wait; a failure carries the output of every rank."""
    environment = {key: value for key, value in os.environ.items() if not key.startswith(("RANK", "LOCAL_", "WORLD_"))}
    environment.update(OMP_NUM_THREADS="1", PYTHONPATH=str(REPOSITORY), PYTHONUNBUFFERED="1")
    if sys.platform.startswith("linux"):
        environment["GLOO_SOCKET_IFNAME"] = "lo"
    process = subprocess.Popen(
        [sys.executable, *arguments],
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    try:
        output, _ = process.communicate(timeout=TIMEOUT)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, 9)  # the ranks that it started, too
        output, _ = process.communicate()
        pytest.fail(f"no end after {TIMEOUT} s:\n{output[-8000:]}")
    assert process.returncode == 0, output[-8000:]


def _check(folder: Path, environment: str) -> None:
    reports: list[dict[str, Any]] = [json.loads((folder / f"result.{rank}").read_text()) for rank in range(2)]
    want = run_distributed(fit_in_one_process, 1, Fit(epochs=1), init=False)[0]
    losses = [sum(pair) / 2 for pair in zip(*(report["losses"] for report in reports), strict=True)]
    assert losses == pytest.approx(want.losses, abs=LOSS_ATOL)
    norm = torch.stack([weight.norm() for weight in want.weights.values()]).norm().item()
    for rank, report in enumerate(reports):
        assert report["rank"] == rank
        assert report["environment"] == environment
        assert report["weights"] == pytest.approx(norm, abs=1e-5)
        assert Path(report["checkpoint"]).is_file()
    assert reports[0]["checkpoint"] == reports[1]["checkpoint"]


def test_script_that_the_trainer_launches(tmp_path: Path) -> None:
    _launch(str(SCRIPT), str(tmp_path / "result"), "2")
    _check(tmp_path, "LightningEnvironment")


@pytest.mark.slow
def test_torchrun(tmp_path: Path) -> None:
    run = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2"]
    _launch(*run, str(SCRIPT), str(tmp_path / "result"), "2")
    _check(tmp_path, "TorchElasticEnvironment")
