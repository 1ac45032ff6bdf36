"""The script that runs on GPUs works: here on CPU, by the launcher that it is run with."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


TWO_DIMENSIONS = pytest.param(4, ["--replicas", "2"], id="2-D", marks=pytest.mark.slow)


@pytest.mark.parametrize(("processes", "options"), [pytest.param(2, [], id="1-D"), TWO_DIMENSIONS])
def test_it_passes_on_cpu(processes: int, options: list[str]) -> None:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={processes}"]
    command += ["tests/gpu/train.py", "--device", "cpu", "--backend", "gloo", *options]
    done = subprocess.run(
        command, cwd=ROOT, env={**os.environ, "OMP_NUM_THREADS": "1"}, capture_output=True, text=True, timeout=200
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("from one process") == 2
