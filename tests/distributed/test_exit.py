"""A process that ends right after its last collective: gloo's threads must be done before Python is torn down."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

_PROGRAM = """
import atexit, sys
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

path, rank = sys.argv[1], int(sys.argv[2])
dist.init_process_group("gloo", init_method=f"file://{path}", rank=rank, world_size=2)
mesh = init_device_mesh("cpu", (2,))
pending = []
# Registered before what is tested, so it runs after it.
atexit.register(lambda: print(sum(p.is_running for p in pending), "running", flush=True))

from dmuon_core.comm import CommContext

comm = CommContext(mesh, torch.device("cpu"))
pending += [comm.broadcast([(torch.randn(8), 0)], "broadcast") for _ in range(1000)]
print(sum(p.is_running for p in pending), "running", flush=True)
"""


@pytest.mark.slow
def test_the_end_waits_for_what_is_under_way(tmp_path: Path) -> None:
    command = [sys.executable, "-c", _PROGRAM, str(tmp_path / "store")]
    ranks = [
        subprocess.Popen([*command, str(rank)], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        for rank in range(2)
    ]
    for rank in ranks:
        printed, errors = rank.communicate(timeout=120)
        assert rank.returncode == 0, errors
        under_way, left = (int(line.split()[0]) for line in printed.splitlines())
        assert under_way > 0  # or this test shows nothing
        assert left == 0
