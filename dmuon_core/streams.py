"""Streams and events: the only file that knows how collectives overlap with compute on a device.

The runtime launches collectives on a lane and later waits for the returned :class:`Pending`. On CUDA a lane is a side
stream and waiting is an event wait on the current stream; the host goes on. On CPU a lane is nothing (gloo runs the
operation in its own threads) and waiting blocks the host. The CUDA form has not been run on a GPU yet.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from enum import Enum

import torch
import torch.distributed as dist


class Lane(Enum):
    """What a side stream is for. Both lanes are intra-node and latency critical, so of high priority, as in FSDP2."""

    BROADCAST = "broadcast"
    REDUCE = "reduce"


class Pending(ABC):
    """A launched collective. Every one must be waited for exactly once: gloo hangs later if a Work is dropped."""

    @abstractmethod
    def wait(self) -> None:
        """Make the result visible to what the caller does next on the current stream (CUDA) or on the host (CPU)."""


class Streams(ABC):
    """How collectives are launched on one kind of device."""

    @abstractmethod
    def launch(self, lane: Lane, collective: Callable[[], list[dist.Work]]) -> Pending:
        """Run ``collective`` on ``lane`` after all work that is enqueued on the current stream so far."""


class _PendingWorks(Pending):
    def __init__(self, works: list[dist.Work]) -> None:
        self._works = works

    def wait(self) -> None:
        # Wait for all of them even if one fails: an un-waited Work would hang the next collective.
        failure: Exception | None = None
        for work in self._works:
            try:
                work.wait()
            except Exception as error:  # noqa: BLE001 - the first one is raised below
                failure = failure or error
        self._works = []
        if failure is not None:
            raise failure


class CpuStreams(Streams):
    """gloo: operations run in the process group's threads, the host waits."""

    def launch(self, lane: Lane, collective: Callable[[], list[dist.Work]]) -> Pending:
        return _PendingWorks(collective())


class _PendingEvent(Pending):
    def __init__(self, event: torch.cuda.Event) -> None:
        self._event = event

    def wait(self) -> None:
        torch.cuda.current_stream().wait_event(self._event)


class CudaStreams(Streams):
    """NCCL: one high-priority side stream per lane.

    Buffers are allocated and freed on the current stream. That is safe without ``record_stream``: the lane starts after
    the current stream's work so far, and the current stream waits for the lane's event before the buffer is freed.
    """

    def __init__(self, device: torch.device) -> None:
        self._lanes = {lane: torch.cuda.Stream(device=device, priority=-1) for lane in Lane}

    def launch(self, lane: Lane, collective: Callable[[], list[dist.Work]]) -> Pending:
        stream = self._lanes[lane]
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for work in collective():
                work.wait()  # orders NCCL's internal stream before this lane; the host does not block
            return _PendingEvent(stream.record_event())


def make_streams(device: torch.device) -> Streams:
    """The implementation for ``device``."""
    return CudaStreams(device) if device.type == "cuda" else CpuStreams()
