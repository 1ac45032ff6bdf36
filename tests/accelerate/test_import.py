"""Accelerate is enough: Lightning is not needed, and said so where it is."""

from __future__ import annotations

import subprocess
import sys

PROGRAM = """
import sys
sys.modules.update(dict.fromkeys(["lightning", "pytorch_lightning", "lightning_fabric", "lightning_utilities"]))
from dmuon_lightning.accelerate import DMuonPlugin, Muon, enable
assert DMuonPlugin().fsdp_version == 2
import dmuon_lightning
try:
    dmuon_lightning.DMuonStrategy
except ImportError as error:
    assert "pip install 'dmuon-lightning[lightning]'" in str(error)
    print("said so")
"""


def test_it_imports_without_lightning() -> None:
    done = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, timeout=120)
    assert done.stdout == "said so\n", done.stderr
