"""The loss-curve benchmark: its search, its runs, its page."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import pytest
import torch

pytest.importorskip("matplotlib")

from benchmarks import loss_curves
from benchmarks.loss_curves import SIZES, WAYS, Results, train, tune, write_page

TINY = argparse.Namespace(dim=8, layers=1, heads=2, context=8, batch=4, steps=4, eval_every=3, validation=8)


@pytest.mark.parametrize(("best", "tried"), [(1.0, 3), (4.0, 5), (0.25, 5), (1e6, 7)])
def test_the_search_goes_on_while_the_best_is_at_an_edge(best: float, tried: int) -> None:
    seen = []
    found = tune(lambda rate: seen.append(rate) or abs(rate - best), 1.0)
    assert len(seen) == len(set(seen)) == tried
    assert found == (best if best < 1e3 else max(seen))


def test_runs_depend_on_the_seed_alone_and_every_way_trains() -> None:
    text = (torch.arange(4000) % 7).to(torch.uint8)
    losses = {way: train(way, 0.01, 3, TINY, text) for way in WAYS}
    assert all([step for step, _ in found] == [3, 4] for found in losses.values())
    assert all(found[-1][1] < 5.54 for found in losses.values())  # log 256 at the start
    assert len({found[-1][1] for found in losses.values()}) == len(WAYS)
    assert train("Muon", 0.01, 3, TINY, text) == losses["Muon"] != train("Muon", 0.01, 4, TINY, text)


def test_results_are_kept_and_shown(tmp_path: Path) -> None:
    results = Results(tmp_path / "loss_curves.json", TINY)
    for index, way in enumerate(WAYS):
        for rate, loss in ((0.1, 3.0), (0.2, 2.0), (0.4, 4.0)):
            results.add(way, rate, 0, [(3, 5.0), (4, loss)])
        for seed, loss in ((1, 2.0), (2, 3.0 + index), (3, 4.0)):
            results.add(way, 0.2, seed, [(3, 5.0), (4, loss)])
    again = Results(tmp_path / "loss_curves.json", TINY)
    assert again.runs == json.loads(json.dumps(results.runs)) and again.find("Muon", 0.2, 3) == [[3, 5.0], [4, 4.0]]
    assert Results(tmp_path / "loss_curves.json", argparse.Namespace(**{**vars(TINY), "steps": 5})).runs == []
    assert set(again.sizes) == set(SIZES)
    write_page(again, tmp_path)
    page = (tmp_path / "loss_curves.md").read_text()
    assert "| AdamW | 0.2 | 3.000 ± 1.000 | 2.000, 3.000, 4.000 |" in page
    assert "| Muon | 0.1: 3.000, **0.2: 2.000**, 0.4: 4.000 |" in page
    assert "</svg>" in (tmp_path / "loss_curves.svg").read_text()


def test_the_page_is_that_of_the_results(tmp_path: Path) -> None:
    """Whoever changes the words or the runs makes the page anew: python -m benchmarks.loss_curves --page."""
    saved = json.loads((loss_curves.DOCS / "loss_curves.json").read_text())
    write_page(Results(loss_curves.DOCS / "loss_curves.json", argparse.Namespace(**saved["sizes"])), tmp_path)
    assert (tmp_path / "loss_curves.md").read_text() == (loss_curves.DOCS / "loss_curves.md").read_text()
