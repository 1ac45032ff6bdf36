"""The bench bites: each ordering of the runtime is left out, one at a time, and a schedule must notice.

Noticed is a number that differs from the plain run, or a freed buffer. `python -m tests.schedule.test_mutations` prints
which policy notices what, as in `docs/schedule.md`.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

import pytest

from dmuon_core.streams import Edge
from tests.distributed.harness import RanksFailed, run_distributed
from tests.schedule.simulated import Implicit, Policy, Removal, Schedule
from tests.schedule.training import CASES, compare_without, sites_of_waits

SCHEDULES = {
    Policy.EARLY: [Schedule(Policy.EARLY)],
    Policy.LATE: [Schedule(Policy.LATE)],
    Policy.RANDOM: [Schedule(Policy.RANDOM, seed) for seed in range(6)],
}


@dataclass(frozen=True)
class Mutation:
    """An ordering to leave out, the training that needs it, and the policy that must notice."""

    removal: Removal
    by: Policy
    case: str = "z3"
    mesh: tuple[int, ...] = (2,)

    def __str__(self) -> str:
        if isinstance(self.removal, tuple):
            return f"{self.removal[0].name} in {self.removal[1]}"
        assert self.removal is not None
        return self.removal.name


COLUMN, BOTH = (2, 1), (2, 2)
EDGES = [
    Mutation(Edge.WEIGHTS_PACKED_BEFORE_BROADCAST, Policy.EARLY),
    Mutation(Edge.BROADCAST_BEFORE_COMPUTE, Policy.LATE),
    Mutation(Edge.GRADS_PACKED_BEFORE_REDUCE, Policy.EARLY),
    Mutation(Edge.REDUCE_BEFORE_REPLICATE_REDUCE, Policy.LATE, mesh=BOTH),
    Mutation(Edge.REDUCE_BEFORE_USE, Policy.LATE),
    Mutation(Edge.FLAGS_BEFORE_REDUCE, Policy.EARLY, "gradients_differ"),
    Mutation(Edge.FLAGS_BEFORE_USE, Policy.LATE, "gradients_differ"),
    Mutation(Edge.WEIGHTS_PACKED_BEFORE_PUBLISH, Policy.EARLY, mesh=COLUMN),
    Mutation(Edge.PUBLISH_BEFORE_USE, Policy.LATE, mesh=COLUMN),
]
# Where an edge has several waits, each by itself. Only a case that needs the one wait can notice.
SITES = [
    Mutation((Edge.BROADCAST_BEFORE_COMPUTE, "start_computing"), Policy.LATE),
    Mutation((Edge.BROADCAST_BEFORE_COMPUTE, "reshard"), Policy.LATE, "other_path"),
    Mutation((Edge.REDUCE_BEFORE_USE, "_bring_reduces_on"), Policy.LATE, mesh=BOTH),
    Mutation((Edge.FLAGS_BEFORE_USE, "_end_of_backward"), Policy.LATE, "gradients_differ"),
    Mutation((Edge.PUBLISH_BEFORE_USE, "unshard"), Policy.LATE, mesh=COLUMN),
    Mutation((Edge.PUBLISH_BEFORE_USE, "catch_up"), Policy.LATE, mesh=COLUMN),
    Mutation((Edge.PUBLISH_BEFORE_USE, "start"), Policy.LATE, "two_steps", COLUMN),
    Mutation((Edge.PUBLISH_BEFORE_USE, "arrive"), Policy.LATE, "state_dict", COLUMN),
    Mutation((Edge.PUBLISH_BEFORE_USE, "after_step"), Policy.LATE, "synchronous", COLUMN),
]
IMPLICIT = [
    Mutation(Implicit.FREED_IN_ORDER, Policy.LATE, mesh=COLUMN),
    Mutation(Implicit.HANDED_OVER, Policy.LATE),
]
MUTATIONS = EDGES + SITES + IMPLICIT


def notice(mutation: Mutation, policy: Policy) -> str:
    """What tells of the mutation under a policy; empty if nothing does."""
    world = mutation.mesh[0] * mutation.mesh[-1] if len(mutation.mesh) == 2 else mutation.mesh[0]
    args = (mutation.removal, CASES[mutation.case], mutation.mesh, SCHEDULES[policy])
    try:
        outcomes = run_distributed(compare_without, world, *args, timeout=60.0, group_timeout=30.0)
    except RanksFailed as failure:
        freed = re.search(r"UseAfterFree: (.*)", str(failure))
        # A rank that computed with NaN or on another path may end otherwise, which is no evidence: say so.
        return freed.group(1) if freed is not None else f"unclear: {str(failure)[-2000:]}"
    wrong = [f"{names[0]} differs" for outcome in outcomes for names in outcome.values() if names]
    return wrong[0] if wrong else ""


def test_every_ordering_has_a_mutation() -> None:
    assert {m.removal for m in EDGES} == set(Edge)
    assert {m.removal for m in IMPLICIT} == set(Implicit)


def test_every_wait_has_a_mutation() -> None:
    """By the function that needs it, over cases that make all of them."""
    cases = [(CASES[m.case], m.mesh) for m in SITES if m.mesh != BOTH]
    sites = set().union(*run_distributed(sites_of_waits, 2, cases))
    assert sites == {m.removal for m in SITES}


@pytest.mark.parametrize("mutation", MUTATIONS, ids=str)
def test_a_missing_ordering_is_noticed(mutation: Mutation) -> None:
    what = notice(mutation, mutation.by)
    assert what, f"nothing notices under {mutation.by}: a redundant wait, or a hole in the bench"
    assert not what.startswith("unclear"), what


if __name__ == "__main__":
    for each in MUTATIONS:
        print(f"{each} ({each.case}, mesh {each.mesh})")
        for policy in Policy:
            print(f"    {policy.value:8} {notice(each, policy)[:200] or '-'}", flush=True)
