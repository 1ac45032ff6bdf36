"""Settings of the Accelerate tests."""

from __future__ import annotations

import importlib.util

import torch

from tests.distributed import harness

if importlib.util.find_spec("accelerate") is None:
    collect_ignore_glob = ["test_*.py"]
else:
    # The fork server imports it once, instead of every rank on its own.
    harness._PRELOAD.append("dmuon_lightning.accelerate")
    torch.set_num_threads(1)
