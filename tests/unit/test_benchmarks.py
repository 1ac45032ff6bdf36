"""The counting of benchmarks.compare_rank, which its tables rest on."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("matplotlib")

from benchmarks.compare import count_table, timing_table
from benchmarks.compare_rank import Count
from benchmarks.contenders import BASELINE, REDUNDANT
from dmuon_core.optim import orthogonalize
from dmuon_core.optim.newton_schulz import flops


@pytest.mark.parametrize("shape", [(8, 24), (24, 8)])
def test_flops_of_products_are_counted(shape):
    with Count() as counted:
        orthogonalize(torch.randn(shape))
        orthogonalize(torch.randn(3, *shape))
    assert counted.flops == 4 * flops(*shape)
    assert not counted.bytes


def test_tables_show_medians_and_ratios():
    fast = {"step": [0.1, 0.2, 0.3], "forward+backward": [0.1] * 3, "optimizer": [0.05] * 3, "cpu": [0.2] * 3}
    slow = {**fast, "step": [0.5, 0.4, 0.3], "optimizer": [0.1] * 3}
    lines = timing_table({(2, 4): {BASELINE: fast, REDUNDANT: slow}}, context=128)
    assert lines[2].startswith(
        f"| 2 | 1024 | {BASELINE} | 200.0 (100.0 to 300.0) | 1.00 | 100.0 | 1.00 | 50.0 | 0.50 |"
    )
    assert lines[3].startswith(
        f"| 2 | 1024 | {REDUNDANT} | 400.0 (300.0 to 500.0) | 2.00 | 100.0 | 1.00 | 100.0 | 1.00 |"
    )
    found = {"bytes": {"forward+backward": {"reduce": 2_000_000}, "optimizer": {}}, "flops": [3e9, 1e9], "rss": 5e8}
    assert count_table({(2, BASELINE): found})[2] == f"| 2 | {BASELINE} | reduce 2.00 | 0 | 3.000 | 1.500 | 500 |"
