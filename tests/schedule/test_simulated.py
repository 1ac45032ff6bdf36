"""The simulated device itself, in one process, with collectives that only write down that they ran."""

from __future__ import annotations

from functools import partial

import pytest
import torch

from dmuon_core.streams import Edge, Lane, Pending
from tests.schedule.simulated import Implicit, Policy, Removal, Schedule, SimulatedStreams, UseAfterFree

PACKED, ARRIVED = Edge.WEIGHTS_PACKED_BEFORE_BROADCAST, Edge.BROADCAST_BEFORE_COMPUTE


class Device:
    """Simulated streams, one buffer, and the order in which work ran."""

    def __init__(self, policy: Policy, without: Removal = None, seed: int = 0) -> None:
        self.streams = SimulatedStreams(without)
        self.streams.restart(Schedule(policy, seed))
        self.ran: list[str] = []
        self.buffer = torch.empty(4)
        self.streams.allocate(self.buffer)

    def note(self, what: str) -> None:
        self.ran.append(what)

    def launch(self, name: str, lane: Lane = Lane.BROADCAST, after: Pending | None = None) -> Pending:
        def collective() -> list:
            self.note(name)
            return []

        edges = [] if after is None else [(after, Edge.REDUCE_BEFORE_REPLICATE_REDUCE)]
        return self.streams.launch(lane, name, collective, [self.buffer], after_current=PACKED, after=edges)

    def pack_and_launch(self) -> Pending:
        self.streams.current(partial(self.note, "pack"), [self.buffer])
        return self.launch("broadcast")


def test_early_runs_at_launch_and_late_when_waited_for() -> None:
    for policy, before in ((Policy.EARLY, ["pack", "broadcast"]), (Policy.LATE, ["pack"])):
        device = Device(policy)
        pending = device.pack_and_launch()
        device.streams.hand_over()
        assert device.ran == before
        device.streams.wait(pending, ARRIVED)
        device.streams.hand_over()
        assert device.ran == ["pack", "broadcast"]


def test_what_nothing_waits_for_runs_at_the_end() -> None:
    device = Device(Policy.LATE)
    device.launch("first", Lane.PUBLISH)
    device.launch("second", Lane.REDUCE)
    device.streams.hand_over()
    assert device.ran == [] and not device.streams.is_idle
    device.streams.flush()
    assert device.ran == ["second", "first"] and device.streams.is_idle


def test_a_lane_runs_in_order_and_a_dependency_first() -> None:
    device = Device(Policy.LATE)
    reduce = device.launch("reduce", Lane.REDUCE)
    device.launch("other", Lane.REPLICATE_REDUCE)
    device.streams.wait(device.launch("replicate", Lane.REPLICATE_REDUCE, reduce), Edge.REDUCE_BEFORE_USE)
    device.streams.hand_over()
    assert device.ran == ["other", "reduce", "replicate"]


def test_random_schedules_differ_by_seed_only() -> None:
    def order(seed: int) -> tuple[str, ...]:
        device = Device(Policy.RANDOM, seed=seed)
        for number in range(4):
            device.launch(f"broadcast {number}")
            device.launch(f"reduce {number}", Lane.REDUCE)
            device.launch(f"publish {number}", Lane.PUBLISH)
            device.streams.hand_over()
        device.streams.flush()
        return tuple(device.ran)

    orders = [order(seed) for seed in range(20)]
    assert orders == [order(seed) for seed in range(20)]
    assert len(set(orders)) > 10


def test_memory_holds_nan_when_given_and_is_gone_when_freed() -> None:
    device = Device(Policy.LATE)
    assert device.buffer.isnan().all()
    device.buffer.zero_()
    device.streams.free(device.buffer)
    assert (device.buffer == 0).all()  # the current stream has not come there
    device.streams.hand_over()
    assert device.buffer.untyped_storage().nbytes() == 0
    device.streams.allocate(device.buffer)
    assert device.buffer.isnan().all()


def test_late_work_on_a_freed_buffer_says_so() -> None:
    """Also if the buffer has been given out again."""
    for again in (False, True):
        device = Device(Policy.LATE)
        device.launch("broadcast of something")
        device.streams.free(device.buffer)
        if again:
            device.streams.allocate(device.buffer)
        with pytest.raises(UseAfterFree, match="freed buffer on lane 'broadcast': broadcast of something"):
            device.streams.flush()


def test_left_out_orderings() -> None:
    device = Device(Policy.EARLY, without=PACKED)
    device.pack_and_launch()
    device.streams.hand_over()
    assert device.ran == ["broadcast", "pack"]

    device = Device(Policy.LATE, without=ARRIVED)
    device.streams.wait(device.pack_and_launch(), ARRIVED)
    device.streams.hand_over()
    assert device.ran == ["pack"]

    device = Device(Policy.LATE, without=Implicit.HANDED_OVER)
    device.pack_and_launch()
    device.streams.hand_over()
    assert device.ran == []

    device = Device(Policy.LATE, without=Implicit.FREED_IN_ORDER)
    device.pack_and_launch()
    device.streams.free(device.buffer)
    with pytest.raises(UseAfterFree, match="lane 'current': note"):
        device.streams.hand_over()


def test_one_of_several_waits_can_be_left_out() -> None:
    def needed_by_this_one(device: Device, pending: Pending) -> None:
        wait_for(device, pending)

    def needed_by_that_one(device: Device, pending: Pending) -> None:
        wait_for(device, pending)

    def wait_for(device: Device, pending: Pending) -> None:
        device.streams.wait(pending, ARRIVED)

    device = Device(Policy.LATE, without=(ARRIVED, "needed_by_this_one"))
    pending = device.pack_and_launch()
    needed_by_this_one(device, pending)
    device.streams.hand_over()
    assert device.ran == ["pack"]
    needed_by_that_one(device, pending)
    device.streams.hand_over()
    assert device.ran == ["pack", "broadcast"]
