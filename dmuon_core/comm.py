"""CommContext: the process groups of this library and the three collectives that it issues.

Groups are our own, cloned from the mesh: a trainer's or FSDP2's collectives then never interleave with ours. Broadcasts
and reduces have one group each, so that a backward prefetch and a reduce in flight need no order between them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, fields

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from dmuon_core.streams import Lane, Pending, make_streams

TAG_NUMEL = 4
"""Elements at the end of every packed buffer that say which group it belongs to, as base-16 digits.

Digits below 16 survive bfloat16 and averaging, so that a receiver can tell a buffer of another module from its own."""


@dataclass
class CommStats:
    """Exact counts since the last :meth:`reset`, on this rank.

    Bytes are payload (matrix elements); each broadcast and reduce carries ``TAG_NUMEL`` elements more.
    """

    broadcasts: int = 0
    broadcast_bytes: int = 0
    reduces: int = 0
    reduce_bytes: int = 0
    flag_reduces: int = 0
    max_unsharded_groups: int = 0

    def reset(self) -> None:
        """Set every count to zero."""
        for field in fields(self):
            setattr(self, field.name, 0)


class CommContext:
    """Process groups and collectives of one dedicated model on a 1-D mesh. Creating one is collective over the mesh."""

    def __init__(self, mesh: DeviceMesh, device: torch.device) -> None:
        parent = mesh.get_group(0)
        self.rank = dist.get_rank(parent)
        self.world_size = dist.get_world_size(parent)
        self.device = device
        self.stats = CommStats()
        self._streams = make_streams(device)
        self._broadcast_group = _clone(parent, device, "dmuon_broadcast")
        self._reduce_group = _clone(parent, device, "dmuon_reduce")
        self._nccl = dist.get_backend(self._broadcast_group) == "nccl"

    def broadcast(self, buffers: Sequence[tuple[torch.Tensor, int]], what: str) -> Pending:
        """Broadcast each flat buffer from its owner rank. Collective, asynchronous; buffers must live until waited for.

        Args:
            buffers: (1-D buffer ending in a tag, owner rank) pairs, in the same order on every rank.
            what: names the operation in errors.
        """
        for buffer, _ in buffers:
            self.stats.broadcasts += 1
            self.stats.broadcast_bytes += (buffer.numel() - TAG_NUMEL) * buffer.itemsize
        group = self._broadcast_group

        def collective() -> list[dist.Work]:
            with self._coalesce(group) as coalesced:
                works = [dist.broadcast(b, group=group, group_src=src, async_op=True) for b, src in buffers]
            return [coalesced] if coalesced is not None else works

        return _Named(self._launch(Lane.BROADCAST, collective, what), what)

    def reduce(self, buffers: Sequence[tuple[torch.Tensor, int]], what: str) -> Pending:
        """Average each flat buffer over all ranks onto its owner rank; elsewhere it is lost. As ``broadcast``."""
        for buffer, _ in buffers:
            self.stats.reduces += 1
            self.stats.reduce_bytes += (buffer.numel() - TAG_NUMEL) * buffer.itemsize
        group = self._reduce_group
        op = dist.ReduceOp.AVG if self._nccl else dist.ReduceOp.SUM
        if not self._nccl and self.world_size > 1:
            for buffer, _ in buffers:  # gloo has no AVG
                buffer.div_(self.world_size)

        def collective() -> list[dist.Work]:
            with self._coalesce(group) as coalesced:
                works = [dist.reduce(b, group=group, group_dst=dst, op=op, async_op=True) for b, dst in buffers]
            return [coalesced] if coalesced is not None else works

        return _Named(self._launch(Lane.REDUCE, collective, what), what)

    def any_rank(self, flags: torch.Tensor) -> Pending:
        """Elementwise OR of uint8 ``flags`` [n] over all ranks, in place. Collective, asynchronous."""
        self.stats.flag_reduces += 1
        group = self._reduce_group
        what = "the agreement on which parameters have a gradient"

        def collective() -> list[dist.Work]:
            work = dist.all_reduce(flags, op=dist.ReduceOp.MAX, group=group, async_op=True)
            assert work is not None
            return [work]

        return _Named(self._launch(Lane.REDUCE, collective, what), what)

    def _launch(self, lane: Lane, collective: Callable[[], list[dist.Work]], what: str) -> Pending:
        try:
            return self._streams.launch(lane, collective)
        except RuntimeError as error:
            raise RuntimeError(_failure(what)) from error

    def _coalesce(self, group: dist.ProcessGroup) -> AbstractContextManager[dist.Work | None]:
        # gloo raises in the coalescing manager; NCCL fuses the owners' broadcasts into one launch with it.
        if not self._nccl:
            return nullcontext()
        return dist._coalescing_manager(group=group, device=self.device, async_ops=True)


class _Named(Pending):
    """Says in an error which operation failed: the usual cause is a rank that did not run the same modules."""

    def __init__(self, pending: Pending, what: str) -> None:
        self._pending = pending
        self._what = what

    def wait(self) -> None:
        try:
            self._pending.wait()
        except RuntimeError as error:
            raise RuntimeError(_failure(self._what)) from error


def _failure(what: str) -> str:
    return (
        f"{what} failed. Every rank must run the same modules in the same order, in forward and in backward; a rank "
        "that skipped this module, raised, or ended leaves the others waiting here"
    )


def make_tag(index: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """The tag [TAG_NUMEL] of the group with this ``index``. Local."""
    digits = [(index >> (4 * k)) & 0xF for k in range(TAG_NUMEL)]
    return torch.tensor(digits, dtype=dtype, device=device)


def check_tag(buffer: torch.Tensor, tag: torch.Tensor, what: str) -> None:
    """Check that a received flat ``buffer`` ends in ``tag``. Local; on CUDA without waiting for the device.

    Raises:
        RuntimeError: if another rank was at another module. On CUDA the device asserts instead.
    """
    matches = (buffer[-TAG_NUMEL:] - tag).abs().max() < 0.5
    if buffer.device.type == "cuda":
        torch._assert_async(matches, f"{what}: another rank was at another module")
    elif not matches:
        raise RuntimeError(f"{_failure(what)} (another rank was at another module)")


def _clone(parent: dist.ProcessGroup, device: torch.device, description: str) -> dist.ProcessGroup:
    """A new process group over the ranks of ``parent`` with its backend and timeout."""
    timeout = parent._get_backend(device).options._timeout
    group = dist.new_group(
        dist.get_process_group_ranks(parent),
        timeout=timeout,
        backend=dist.get_backend(parent),
        use_local_synchronization=True,
        group_desc=description,
    )
    assert isinstance(group, dist.ProcessGroup)
    return group
