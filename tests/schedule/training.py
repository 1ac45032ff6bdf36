"""Whole training steps, once on plain CPU streams and then under schedules, compared bit for bit on every rank."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from dataclasses import dataclass

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

import dmuon_core
from dmuon_core import group, publication, reduction
from dmuon_core.streams import Edge, replace_streams
from tests.distributed.models import MODELS, hidden_matrix
from tests.distributed.reference import Rows, make_muon
from tests.schedule.simulated import Removal, Schedule, SimulatedStreams

STEPS = 3


@dataclass(frozen=True)
class Case:
    """One way to train, by names, so that it can be sent to a rank."""

    model: str = "gpt_two_layers"
    zero3: bool = True
    asynchronous: bool = True
    accumulate: int = 1
    no_sync: bool = False
    body: str = "plain"  # key of BODIES: what happens beside forward, backward and step
    fsdp: bool = False  # the parameters that are not owned, by fully_shard or plain and averaged by the user


CASES = {
    "z3": Case(),
    "z2": Case(zero3=False),
    "synchronous": Case(asynchronous=False),
    "accumulate": Case(accumulate=2),
    "accumulate_no_sync": Case(accumulate=2, no_sync=True),
    "accumulate_no_sync_z2": Case(accumulate=2, no_sync=True, zero3=False),
    "checkpoint_inside": Case("inside_nonreentrant"),
    "checkpoint_outside_reentrant": Case("outside_reentrant"),
    "twice": Case("twice"),
    "twice_z2": Case("twice", zero3=False),
    "two_steps": Case(body="two_steps"),
    "eval_between": Case(body="eval_between"),
    "eval_between_z2": Case(body="eval_between", zero3=False),
    "state_dict": Case(body="state_dict"),
    "other_path": Case("gpt", body="other_path"),
    "gradients_differ": Case("experts", body="gradients_differ"),
    "interrupted": Case("gpt", body="interrupted"),
    "fsdp": Case(fsdp=True),
    "fsdp_z2": Case(fsdp=True, zero3=False),
}

Found = dict[str, Tensor]
"""What this rank has seen: losses, and its part of weights and of optimizer state."""


class Run:
    """One model that can be trained several times from the same start."""

    def __init__(self, case: Case, mesh_shape: tuple[int, ...], streams: SimulatedStreams | None) -> None:
        self.case, self.streams = case, streams
        names = ("replicate", "shard")[-len(mesh_shape) :]
        mesh = init_device_mesh("cpu", mesh_shape, mesh_dim_names=names)
        torch.manual_seed(0)
        self.model = MODELS[case.model]()
        replace_streams(None if streams is None else lambda device: streams)
        self.handle = dmuon_core.dedicate_params(
            self.model,
            mesh,
            hidden_matrix,
            reshard_after_forward=case.zero3,
            replicate_async=case.asynchronous,
        )
        replace_streams(None)
        if case.fsdp:
            for block in self.model.blocks:
                fully_shard(block, mesh=mesh, reshard_after_forward=case.zero3)
            fully_shard(self.model, mesh=mesh)
        self.start = {name: _local(p).clone() for name, p in self.model.named_parameters()}
        self.optimizer = make_muon(self.model)

    def train(self, steps: int = STEPS) -> Found:
        """Train from the start. Collective."""
        with torch.no_grad():
            for name, p in self.model.named_parameters():
                _local(p).copy_(self.start[name])
        self.optimizer = make_muon(self.model)
        found: Found = {}
        for step in range(steps):
            BODIES[self.case.body](self, step, found)
        self.check_handed_over()
        for name, p in self.model.named_parameters():
            found[f"weight {name}"] = _local(p).clone()
        self.add_state("at the end", found)
        if self.streams is not None:
            self.streams.flush()
        return found

    def forward(self, step: int, micro: int = 0) -> Tensor:
        loss = Rows(self.case.model, step, micro, dist.get_rank(), dist.get_world_size()).loss(self.model)
        self.check_handed_over()
        return loss

    def forward_backward(self, step: int, found: Found) -> None:
        for micro in range(self.case.accumulate):
            hold = self.case.no_sync and micro + 1 < self.case.accumulate
            with dmuon_core.no_sync(self.model) if hold else contextlib.nullcontext():
                loss = self.forward(step, micro)
                (loss / self.case.accumulate).backward()
                self.check_handed_over()
            found[f"loss {step}.{micro}"] = loss.detach()
        if not self.case.fsdp:
            grads = [p.grad for p in self.model.parameters() if p.grad is not None and not isinstance(p.grad, DTensor)]
            if grads:
                flat = torch.cat([grad.flatten() for grad in grads])
                dist.all_reduce(flat)
                flat /= dist.get_world_size()
                for grad, mean in zip(grads, flat.split([grad.numel() for grad in grads]), strict=True):
                    grad.copy_(mean.view_as(grad))

    def step(self) -> None:
        self.optimizer.step()
        self.check_handed_over()

    def evaluate(self, step: int, found: Found, when: str) -> None:
        with torch.no_grad():
            found[f"eval {when} {step}"] = self.forward(step, 60)

    def add_state(self, when: str, found: Found) -> None:
        for index, state in enumerate(self.optimizer.state.values()):
            for key, value in state.items():
                found[f"state {index} {key} {when}"] = _local(value).clone()

    def check_handed_over(self) -> None:
        """Wherever the user's operations follow, the library's must have run."""
        removed = self.streams is not None and self.streams.without is not None
        assert self.streams is None or removed or self.streams.is_handed_over


def _local(tensor: Tensor) -> Tensor:
    # to_local, because it is a read of the weights: it waits for what is on its way.
    return (tensor.to_local() if isinstance(tensor, DTensor) else tensor).detach()


def _plain(run: Run, step: int, found: Found) -> None:
    run.forward_backward(step, found)
    run.step()
    run.optimizer.zero_grad()


def _two_steps(run: Run, step: int, found: Found) -> None:
    """Two updates by one gradient: the second publication starts before anything has read the first."""
    run.forward_backward(step, found)
    run.step()
    run.step()
    run.optimizer.zero_grad()


def _eval_between(run: Run, step: int, found: Found) -> None:
    run.forward_backward(step, found)
    run.evaluate(step, found, "before the step")
    run.step()
    run.evaluate(step, found, "after the step")
    run.optimizer.zero_grad()


def _state_dict(run: Run, step: int, found: Found) -> None:
    _plain(run, step, found)
    for name, value in run.model.state_dict().items():
        found[f"state dict {step} {name}"] = _local(value).clone()
    run.add_state(f"after step {step}", found)


def _other_path(run: Run, step: int, found: Found) -> None:
    """The forward leaves out blocks that were expected, so that broadcasts are in flight for nothing."""
    run.model.skip = {1: {2}, 2: {1}}.get(step, set())  # the last one of the path, then one within it
    _plain(run, step, found)
    run.model.skip = set()


def _gradients_differ(run: Run, step: int, found: Found) -> None:
    """Ranks use different experts, or all the same and the other one has no gradient anywhere."""
    run.model.expert = {0: dist.get_rank() % 2, 1: 0, 2: (dist.get_rank() + 1) % 2}[step]
    _plain(run, step, found)


class _Interruption(Exception):
    pass


def _interrupt_at(tensor: Tensor) -> None:
    def interrupt(grad: Tensor) -> None:
        raise _Interruption

    tensor.register_hook(interrupt)


def _interrupted(run: Run, step: int, found: Found) -> None:
    """A backward that the user's code ends in the middle, with broadcasts and reduces in flight."""

    if step == 1:
        block = run.model.blocks[0]
        handle = block.register_forward_hook(lambda module, args, output: _interrupt_at(args[0]))
        with pytest.raises(_Interruption):
            run.forward_backward(step, {})
        handle.remove()
        run.optimizer.zero_grad()
        run.check_handed_over()
    _plain(run, step, found)


BODIES: dict[str, Callable[[Run, int, Found], None]] = {
    "plain": _plain,
    "two_steps": _two_steps,
    "eval_between": _eval_between,
    "state_dict": _state_dict,
    "other_path": _other_path,
    "gradients_differ": _gradients_differ,
    "interrupted": _interrupted,
}


def compare(
    case: Case, mesh_shape: tuple[int, ...], schedules: list[Schedule], without: Removal = None
) -> dict[str, list[str]]:
    """Runs on a rank: what differs from the plain run under each schedule, by the schedule's name; empty lists if good.

    The first schedule meets a model that has never run, the others one that has been trained before.
    """
    want = Run(case, mesh_shape, None).train()
    check_not_vacuous(want)
    run = Run(case, mesh_shape, SimulatedStreams(without))
    assert run.streams is not None
    found: dict[str, list[str]] = {}
    for schedule in schedules:
        run.streams.restart(schedule)
        found[str(schedule)] = _differences(run.train(), want)
    return found


def compare_without(
    removal: Removal, case: Case, mesh_shape: tuple[int, ...], schedules: list[Schedule]
) -> dict[str, list[str]]:
    """As `compare`, with an ordering left out and the library's own check of what it receives switched off.

    That check would notice most removals before the bench does.
    """
    for module in (group, publication, reduction):
        module.check_tag = lambda buffer, tag, what: None  # type: ignore[attr-defined]
    return compare(case, mesh_shape, schedules, removal)


def sites_of_waits(cases: list[tuple[Case, tuple[int, ...]]]) -> set[tuple[Edge, str]]:
    """Runs on a rank: every wait that these cases make, by its edge and the function that needs it."""
    found: set[tuple[Edge, str]] = set()
    for case, mesh_shape in cases:
        streams = SimulatedStreams()
        Run(case, mesh_shape, streams).train()
        found |= streams.waited_at
    return found


def check_not_vacuous(want: Found) -> None:
    """Training has no NaN of its own, which would hide those of the simulation."""
    assert all(torch.isfinite(value.float()).all() for value in want.values())


def _differences(got: Found, want: Found) -> list[str]:
    if got.keys() != want.keys():
        return sorted(got.keys() ^ want.keys())
    return [name for name, value in want.items() if not torch.equal(got[name], value)]
