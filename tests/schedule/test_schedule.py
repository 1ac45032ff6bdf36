"""Whole training steps are the same, bit for bit, however late or early collectives run.

Each case trains three steps on plain CPU streams and then under schedules of the simulated device, in the same
processes: losses, weights, optimizer state and what the case reads in between must be equal on every rank.
"""

from __future__ import annotations

import pytest

from tests.distributed.harness import run_distributed
from tests.schedule.simulated import Policy, Schedule
from tests.schedule.training import CASES, compare

# The name of a mesh says G ranks in a row and R rows.
MESHES = {"g2": (2,), "g2_r1": (1, 2), "g1_r2": (2, 1), "g2_r2": (2, 2)}
EXTREMES = [Schedule(Policy.EARLY), Schedule(Policy.LATE)]
FEW = EXTREMES + [Schedule(Policy.RANDOM, seed) for seed in range(3)]
MANY = EXTREMES + [Schedule(Policy.RANDOM, seed) for seed in range(3, 53)]

# One row has nothing to publish; that the 2-D form of it is nothing special, a few cases show.
FULL = [(mesh, case) for mesh in ("g2", "g1_r2", "g2_r2") for case in CASES if (mesh, case) != ("g2", "synchronous")]
SOME = [("g2_r1", "z3"), ("g2_r1", "two_steps")]
QUICK = [(mesh, case) for mesh, case in FULL if mesh != "g1_r2"] + SOME + [("g1_r2", "z3"), ("g1_r2", "two_steps")]


def _check(mesh: str, case: str, schedules: list[Schedule]) -> None:
    shape = MESHES[mesh]
    world = shape[0] * shape[-1] if len(shape) == 2 else shape[0]
    outcomes = run_distributed(compare, world, CASES[case], shape, schedules, timeout=200.0)
    wrong = [
        f"rank {rank}, {schedule}: {names}"
        for rank, outcome in enumerate(outcomes)
        for schedule, names in outcome.items()
        if names
    ]
    assert all(len(outcome) == len(schedules) for outcome in outcomes)
    assert wrong == []


@pytest.mark.parametrize(("mesh", "case"), QUICK)
def test_few_schedules(mesh: str, case: str) -> None:
    _check(mesh, case, FEW)


@pytest.mark.slow
@pytest.mark.parametrize(("mesh", "case"), FULL + SOME)
def test_many_schedules(mesh: str, case: str) -> None:
    _check(mesh, case, MANY)
