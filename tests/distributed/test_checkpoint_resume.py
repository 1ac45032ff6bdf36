"""Exact resume: 2k steps equal k steps, a checkpoint, new processes and k more, bit by bit, on the same layout."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.optim.lr_scheduler import CosineAnnealingLR

import dmuon_core
from tests.distributed.checkpoints import Layout, Run, assert_same
from tests.distributed.harness import run_distributed
from tests.distributed.models import GPT

HALF = 3  # steps


class DropoutGPT(GPT):
    """Drops embeddings, and counts its forwards in a buffer."""

    def __init__(self) -> None:
        super().__init__(layers=2)
        self.tok_emb.register_forward_hook(lambda module, args, out: F.dropout(out, 0.2))
        self.register_buffer("forwards", torch.zeros((), dtype=torch.int64))

    def forward(self, tokens: Tensor) -> Any:
        self.forwards += 1
        return super().forward(tokens)


@dataclass(frozen=True)
class Case:
    layout: Layout
    zero3: bool
    how: str  # "folder", "file" or "rank": a native state_dict in one file a rank


CASES = [
    pytest.param(Case(Layout(2), True, "folder"), id="1-D, Z3, folder", marks=pytest.mark.slow),
    pytest.param(Case(Layout(2, 2), False, "rank"), id="HSDP, Z2, a file a rank"),
    pytest.param(Case(Layout(2), False, "file"), id="1-D, Z2, file", marks=pytest.mark.slow),
    pytest.param(Case(Layout(2, 2), True, "folder"), id="HSDP, Z3, folder", marks=pytest.mark.slow),
    pytest.param(Case(Layout(2, 2), True, "file"), id="HSDP, Z3, file", marks=pytest.mark.slow),
    pytest.param(Case(Layout(1, 2), False, "folder"), id="replicas only, Z2, folder", marks=pytest.mark.slow),
]


class _Trainer:
    """Scheduler, clipping, accumulation, dropout."""

    def __init__(self, case: Case, seed: int) -> None:
        self.run = Run(case.layout, DropoutGPT, seed, case.zero3)
        self.scheduler = CosineAnnealingLR(self.run.optimizer, T_max=2 * HALF)
        self.how = case.how

    def train(self, steps: range) -> list[float]:
        run, losses = self.run, []
        for step in steps:
            torch.manual_seed(1000 * step + dist.get_rank())
            with dmuon_core.no_sync(run.model):
                losses.append(run.backward(step, micro=0, scale=0.5))
            losses.append(run.backward(step, micro=1, scale=0.5))
            norm = dmuon_core.clip_grad_norm_(run.model, 0.2)
            losses.append(float(norm))
            run.optimizer.step()
            run.optimizer.zero_grad()
            self.scheduler.step()
        return losses

    def save(self, folder: str) -> None:
        if self.how == "rank":
            own = {"model": self.run.model.state_dict(), "optimizer": self.run.optimizer.state_dict()}
            torch.save(own, f"{folder}/rank{dist.get_rank()}")
        else:
            self.run.save(self.how, f"{folder}/checkpoint")
        torch.save(self.scheduler.state_dict(), f"{folder}/scheduler{dist.get_rank()}")

    def load(self, folder: str) -> None:
        if self.how == "rank":
            own = torch.load(f"{folder}/rank{dist.get_rank()}")  # weights_only, as is the default
            self.run.model.load_state_dict(own["model"])
            self.run.optimizer.load_state_dict(own["optimizer"])
        else:
            self.run.load(self.how, f"{folder}/checkpoint")
        self.scheduler.load_state_dict(torch.load(f"{folder}/scheduler{dist.get_rank()}"))


def _whole_and_half(case: Case, folder: str) -> tuple[list[float], dict[str, Tensor], list[Any]]:
    trainer = _Trainer(case, seed=0)
    first = trainer.train(range(HALF))
    trainer.save(folder)
    first += trainer.train(range(HALF, 2 * HALF))
    return first, trainer.run.tensors(), _options(trainer.run.optimizer)


def _second_half(case: Case, folder: str) -> tuple[list[float], dict[str, Tensor], list[Any]]:
    trainer = _Trainer(case, seed=5)
    trainer.load(folder)
    return trainer.train(range(HALF, 2 * HALF)), trainer.run.tensors(), _options(trainer.run.optimizer)


def _options(optimizer: torch.optim.Optimizer) -> list[Any]:
    """Without the parameters; a tuple may come back as a list."""
    return [
        {k: list(v) if isinstance(v, tuple) else v for k, v in group.items() if k != "params"}
        for group in optimizer.param_groups
    ]


@pytest.mark.parametrize("case", CASES)
def test_resume_is_exact(case: Case, tmp_path: Path) -> None:
    whole = run_distributed(_whole_and_half, case.layout.world, case, str(tmp_path))
    resumed = run_distributed(_second_half, case.layout.world, case, str(tmp_path))
    for (losses, tensors, options), (later, same, its_options) in zip(whole, resumed, strict=True):
        assert losses[3 * HALF :] == later
        assert_same(same, tensors)
        assert its_options == options
        assert tensors["forwards"] == 4 * HALF


def _save_then_go_on(folder: str) -> tuple[list[float], dict[str, Tensor]]:
    """Saved before the first step, and in the middle of an accumulation window."""
    run = Run()
    run.save_folder(f"{folder}/fresh")
    with dmuon_core.no_sync(run.model):
        run.backward(0)
    run.save_folder(f"{folder}/open window before the first step")
    run.backward(0, micro=1)
    run.optimizer.step()
    run.optimizer.zero_grad()
    with dmuon_core.no_sync(run.model):
        run.backward(1)
    run.save_folder(f"{folder}/open window")
    run.save_file(f"{folder}/open window.file")
    run.backward(1, micro=1)  # the window that was open goes on
    run.optimizer.step()
    run.optimizer.zero_grad()
    return run.train(range(2, 4)), run.tensors()


def _never_saved() -> tuple[list[float], dict[str, Tensor]]:
    run = Run()
    for step in range(2):
        with dmuon_core.no_sync(run.model):
            run.backward(step)
        run.backward(step, micro=1)
        run.optimizer.step()
        run.optimizer.zero_grad()
    return run.train(range(2, 4)), run.tensors()


def _resume_windows(folder: str) -> list[dict[str, Tensor]]:
    """The window is played again from its start, because gradients are not in a checkpoint."""
    results = []
    for name, start in (("fresh", 0), ("open window before the first step", 0), ("open window", 1)):
        for how in ("folder", "file"):
            path = Path(f"{folder}/{name}" + (".file" if how == "file" else ""))
            if not path.exists():
                continue
            run = Run(seed=9)
            run.load(how, path)
            for step in range(start, 2):
                for micro in range(2):
                    run.backward(step, micro)
                run.optimizer.step()
                run.optimizer.zero_grad()
            run.train(range(2, 4))
            results.append(run.tensors())
    return results


@pytest.mark.slow
def test_saving_disturbs_nothing_and_works_in_an_open_window(tmp_path: Path) -> None:
    losses, tensors = run_distributed(_never_saved, 2)[0]
    assert run_distributed(_save_then_go_on, 2, str(tmp_path))[0][0] == losses
    found = run_distributed(_resume_windows, 2, str(tmp_path))[0]
    assert len(found) == 4
    # Two backwards are added up before one reduction in the run that was saved, after two in the one that resumed.
    for other in found:
        assert other.keys() == tensors.keys()
        worst = max(((other[name] - tensors[name]).abs().max().item(), name) for name in tensors)
        assert worst[0] <= 1e-6, worst
