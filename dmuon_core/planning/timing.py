"""How long a training step takes: the runtime's schedule of compute and collectives, played through on one clock.

The order of events is that of ``hooks.py``, ``order.py`` and ``pipeline.py``: in forward a unit's weights are on their
way while the unit before computes; in backward likewise, while the gradients of the unit behind travel along the row
and those of the one behind that along the column; new weights travel behind the next forward. FSDP2 does the same for
its part. Rows and columns have one lane each, on which transfers follow one another.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from dmuon_core.assignment import MatrixSpec
from dmuon_core.planning.hardware import Hardware, rate_at
from dmuon_core.planning.layout import Placed
from dmuon_core.planning.shapes import ROOT
from dmuon_core.planning.traffic import (
    Axis,
    Kind,
    Phase,
    Transfer,
    column_transfers,
    common_transfers,
    group_size,
    through_link,
)

MUON_PASSES = 14
"""Reads and writes of a whole matrix in one update, beside the products of Newton-Schulz: momentum (3), nesterov (3),
cast and normalization (4), weight decay (2), the step itself (2)."""

ADAM_PASSES = 16
"""Reads and writes of a whole parameter in one AdamW update, counted in torch's unfused form."""


@dataclass(frozen=True)
class Work:
    """What one rank computes in a step.

    Attributes:
        tokens: tokens of one rank's micro-batch; one micro-batch a step.
        sequence: tokens of one sequence, for attention.
        per_node: ranks of one node; rank ``r`` is on node ``r // per_node``.
        recompute: whether backward computes forward again (activation checkpointing).
    """

    tokens: int
    sequence: int = 0
    per_node: int = 8
    recompute: bool = False


@dataclass(frozen=True)
class Times:
    """Seconds of the parts of one step.

    Attributes:
        compute: forward and backward without any communication.
        communication: row and column collectives of forward and backward, one after the other.
        forward, backward: as scheduled, without the wait for a publish.
        optimizer: the busiest rank's update.
        publish: all of the publication, as if nothing ran beside it; the largest column's.
        exposed_publish: what the next forward waits for it.
    """

    compute: float
    communication: float
    forward: float
    backward: float
    optimizer: float
    publish: float
    exposed_publish: float

    @property
    def step(self) -> float:
        return self.forward + self.backward + self.optimizer + self.exposed_publish

    @property
    def exposed(self) -> float:
        """What forward and backward wait for communication."""
        return self.forward + self.backward - self.compute

    @property
    def hides(self) -> bool | None:
        """Whether at least 99 % of the publish hides; None where there is none."""
        return None if self.publish == 0 else self.exposed_publish <= 0.01 * self.publish

    def as_dict(self) -> dict[str, float]:
        names = ("compute", "communication", "forward", "backward", "optimizer", "publish", "exposed_publish", "step")
        return {name: getattr(self, name) for name in names}


def step_times(placed: Placed, hardware: Hardware, work: Work) -> Times:
    """Predict one step of ``placed``. Pure; an estimate, see docs/planning.md for how good."""
    return _Schedule(placed, hardware, work).times()


Sends = dict[tuple[Phase, str], float]
"""Seconds of what is sent for a unit in a phase."""


class _Schedule:
    def __init__(self, placed: Placed, hardware: Hardware, work: Work) -> None:
        self._placed, self._hardware, self._work = placed, hardware, work
        self._units = list(placed.shapes.units)
        self._blocks = [unit for unit in self._units if unit != ROOT]
        # Rows are alike; columns differ in what their owners send over replicas.
        common = common_transfers(placed)
        self._row = self._sends([t for t in common if t.axis is not Axis.REPLICATE])
        self._gathers = self._sends([t for t in common if t.kind in (Kind.BROADCAST, Kind.ALL_GATHER)])
        self._columns = [self._sends(found) for found in column_transfers(placed)]
        self._slowest = self._of_slowest_column(self._sends([t for t in common if t.axis is Axis.REPLICATE]))
        self._forward = {unit: self._compute(unit) for unit in self._units}
        # Twice the products: gradients of the input and of the weight.
        back = 3 if work.recompute else 2
        self._back = {unit: back * self._forward[unit] * (unit in placed.shapes.reached) for unit in self._units}

    def times(self) -> Times:
        forward, back = sum(self._forward.values()), sum(self._back.values())
        replicate = {unit: self._slowest.get((Phase.BACKWARD, unit), 0.0) for unit in self._units}
        sent_forward = sum(seconds for (phase, _), seconds in self._row.items() if phase is Phase.FORWARD)
        sent_back = sum(self._row.values()) - sent_forward + sum(replicate.values())
        optimizer, ready = self._updates()
        publish = sum(self._slowest.get((Phase.STEP, unit), 0.0) for unit in self._units)
        return Times(
            forward + back,
            sent_forward + sent_back,
            self._blend(self._way_out({}), forward + sent_forward),
            self._blend(self._way_back(replicate), back + sent_back),
            optimizer,
            publish,
            self._blend(self._way_out(self._published(optimizer, ready)) - self._way_out({}), publish),
        )

    def _blend(self, overlapped: float, serial: float) -> float:
        overlap = self._hardware.overlap
        return overlap * overlapped + (1 - overlap) * max(serial, overlapped)

    # Durations

    def _compute(self, unit: str) -> float:
        """Seconds of one forward of the unit."""
        shapes, work = self._placed.shapes, self._work
        weights = shapes.of_unit(unit)
        flops = sum(2 * weight.numel * weight.used for weight in weights) * work.tokens
        if unit != ROOT:
            flops += shapes.attention / len(self._blocks) * work.tokens * work.sequence
        width = max((_shorter_side(weight.shape) for weight in weights if weight.used), default=1)
        return flops / rate_at(self._hardware.flops, width) + self._hardware.overhead

    def _seconds(self, transfer: Transfer) -> float:
        group = group_size(self._placed, transfer.axis)
        if group == 1:
            return 0.0
        moved = through_link(transfer, group)
        bandwidth = self._hardware.bandwidth(transfer.kind, self._crosses(transfer.axis))
        copies = 2 * transfer.nbytes / self._hardware.memory  # packed, or copied out
        return self._hardware.latency * transfer.buffers + moved / bandwidth + copies

    def _crosses(self, axis: Axis) -> bool:
        """Whether some group along the axis has ranks on two nodes."""
        layout, node = self._placed.layout, self._work.per_node
        if layout.ranks <= node:
            return False
        return axis is not Axis.SHARD or node % layout.shard != 0

    def _sends(self, found: list[Transfer]) -> Sends:
        sends: Sends = {}
        for transfer in found:
            key = (transfer.phase, transfer.unit)
            sends[key] = sends.get(key, 0.0) + self._seconds(transfer)
        return sends

    def _of_slowest_column(self, common: Sends) -> Sends:
        """Seconds over replicas, of the column that takes longest; ``common`` is sent in every one."""
        slowest: Sends = {}
        for sends in self._columns:
            for key, seconds in sends.items():
                slowest[key] = max(slowest.get(key, 0.0), seconds)
        return {key: slowest.get(key, 0.0) + common.get(key, 0.0) for key in {**slowest, **common}}

    # Schedules

    def _way_out(self, published: dict[str, float]) -> float:
        """When the forward ends. ``published``: when each unit's new weights are there, on the same clock."""
        clock = started = 0.0  # `started`: when the unit before did, and the sending of this one's weights
        lane = max(0.0, published.get(ROOT, 0.0)) + self._row.get((Phase.FORWARD, ROOT), 0.0)
        for unit in self._blocks:
            lane = max(lane, started, published.get(unit, 0.0)) + self._row.get((Phase.FORWARD, unit), 0.0)
            started = max(clock, lane)
            clock = started + self._forward[unit]
        return max(clock, lane) + self._forward.get(ROOT, 0.0)  # the root computes at the end: its head

    def _way_back(self, replicate: dict[str, float]) -> float:
        """When the backward ends."""
        clock = self._back.get(ROOT, 0.0)
        order = list(reversed(self._blocks))
        gathers = [self._gathers.get((Phase.BACKWARD, unit), 0.0) for unit in order]
        lane = ready = gathers[0] if gathers else 0.0  # `ready`: when the weights of the next unit are there
        row_end = column_end = 0.0
        behind: str | None = None  # the unit whose gradients go along the row
        for unit, gather, following in zip(order, gathers, [*gathers[1:], 0.0], strict=False):
            started = max(clock, ready)
            clock = started + self._back[unit]
            ready = lane = max(lane, started) + following
            # What is in flight goes one step on before this unit's gradients are sent.
            clock = max(clock, column_end if self._placed.layout.replicate > 1 else row_end)
            if behind is not None:
                column_end = max(column_end, row_end) + replicate[behind]
            lane = max(lane, clock) + self._row.get((Phase.BACKWARD, unit), 0.0) - gather
            row_end, behind = lane, unit
        row_end = max(lane, clock) + self._row.get((Phase.BACKWARD, ROOT), 0.0)
        rest = replicate.get(ROOT, 0.0) + (replicate[behind] if behind is not None else 0.0)
        return max(row_end, column_end) + rest

    def _updates(self) -> tuple[float, list[dict[str, float]]]:
        """Seconds of the busiest rank's step, and for each column when its ranks have updated what they own of a unit.

        That is when the last of the column's ranks has come past the unit, whether it owns something there or not.
        """
        layout, specs = self._placed.layout, self._placed.specs
        ready: list[dict[str, float]] = [{} for _ in range(layout.shard)]
        clocks = [0.0] * layout.ranks
        latest = [0.0] * layout.shard
        for unit, weights in self._placed.owned.items():
            here = set()
            for weight in weights:
                rank, column = self._placed.assignment.owners[weight.fqn], self._placed.home(weight.fqn)[1]
                clocks[rank] += self._update(specs[weight.fqn])
                latest[column] = max(latest[column], clocks[rank])
                here.add(column)
            for column in here:
                ready[column][unit] = latest[column]
        sharded = [weight for weights in self._placed.sharded.values() for weight in weights if weight.trainable]
        nbytes = sum(self._placed.padded(weight) * weight.dtype.itemsize for weight in sharded)
        return max(clocks) + ADAM_PASSES * nbytes / self._hardware.memory, ready

    def _update(self, spec: MatrixSpec) -> float:
        products = sum(
            self._placed.layout.flops(part) / rate_at(self._hardware.ns_flops, min(part)) for part in spec.parts or ()
        )
        return products + MUON_PASSES * spec.nbytes / self._hardware.memory

    def _published(self, optimizer: float, ready: list[dict[str, float]]) -> dict[str, float]:
        """When each unit's new weights are in every column, from the end of the update on."""
        published: dict[str, float] = {}
        for updated, sends in zip(ready, self._columns, strict=True):
            lane = 0.0
            for (phase, unit), seconds in sends.items():  # in the order of the units
                if phase is Phase.STEP:
                    lane = max(lane, updated[unit]) + seconds
                    published[unit] = max(published.get(unit, 0.0), lane - optimizer)
        return published


def _shorter_side(shape: tuple[int, ...]) -> int:
    """Of the matrix [d0, rest], or of one of stacked experts [E, m, n]."""
    first, *rest = shape[1:] if len(shape) == 3 else shape
    return min(first, math.prod(rest))
