"""The counting of benchmarks.compare_rank, which its tables rest on."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("matplotlib")

from benchmarks.compare_rank import Count
from benchmarks.compare_tables import count_table, targets, timing_table
from benchmarks.contenders import BASELINE, REDUNDANT, Z2, Z3
from dmuon_core.optim import orthogonalize
from dmuon_core.optim.newton_schulz import flops
from dmuon_core.planning.layout import Layout, place
from dmuon_core.planning.shapes import shapes_of
from examples.gpt import GPT, GPTConfig


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


def test_targets_are_ratios_of_medians():
    def took(passes: float, optimizer: float) -> dict[str, list[float]]:
        return {"step": [passes + optimizer] * 2, "forward+backward": [passes] * 2, "optimizer": [optimizer] * 2}

    small = {BASELINE: took(1, 1), REDUNDANT: took(1, 4), Z3: took(1.1, 1.9), Z2: took(0.9, 2)}
    large = {BASELINE: took(99, 1), REDUNDANT: took(99, 4), Z3: took(100, 2.5), Z2: took(102, 3)}
    counts = {(2, name): {"flops": [3e9, 1e9]} for name in (Z3, Z2)}
    lines = targets({(2, 4): small, (2, 8): large}, counts, context=128)
    assert lines[2:4] == [
        f"| 2 | {Z3} | 1024: 1.500, 2048: 1.025 | 2048 tokens | 1.010 | 0.550 | 0.575 | 1.500 |",
        f"| 2 | {Z2} | 1024: 1.450, 2048: 1.050 | not up to 2048 tokens | 1.030 | 0.625 | 0.575 | 1.500 |",
    ]


@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("dim", [128, 256])
def test_owners_of_the_benchmark_model_have_equal_work(ranks, dim):
    with torch.device("meta"):
        model = GPT(GPTConfig(dim=dim, layers=4, heads=dim // 32, context=128))
    loads = place(shapes_of(model), Layout(ranks)).assignment.loads
    assert max(loads) <= 1.05 * sum(loads) / ranks
    matrices = [p for name, p in model.named_parameters() if "blocks" in name and p.ndim == 2]
    assert sum(loads) == sum(flops(*p.shape) for p in matrices)
