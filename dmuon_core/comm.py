"""CommContext: the process groups of this library and the collectives that it issues.

Groups are our own, cloned from the mesh: a trainer's or FSDP2's collectives then never interleave with ours. Broadcasts
and reduces have one group each, so that a backward prefetch and a reduce in flight need no order between them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, fields
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from dmuon_core.streams import Edge, Lane, Pending, make_streams

_groups: dict[Any, dist.ProcessGroup] = {}

TAG_NUMEL = 4
"""Elements at the end of every packed buffer that say which group it belongs to, as base-16 digits.

Digits below 16 survive bfloat16 and averaging, so that a receiver can tell a buffer of another module from its own."""

Sent = tuple[torch.Tensor, int]
"""A flat buffer that ends in a tag, and its root: a rank in the group that it is sent in."""


@dataclass
class CommStats:
    """Exact counts since the last :meth:`reset`, on this rank.

    Bytes are payload (matrix elements); every buffer carries ``TAG_NUMEL`` elements more.
    """

    broadcasts: int = 0
    broadcast_bytes: int = 0
    reduces: int = 0
    reduce_bytes: int = 0
    replicate_reduces: int = 0
    replicate_reduce_bytes: int = 0
    publishes: int = 0
    publish_bytes: int = 0
    flag_reduces: int = 0
    max_unsharded_groups: int = 0

    def reset(self) -> None:
        """Set every count to zero."""
        for field in fields(self):
            setattr(self, field.name, 0)


class CommContext:
    """Process groups and collectives of one dedicated model. Creating one is collective over the mesh.

    Attributes:
        shard_rank, shard_size: this rank in its row of the mesh, G ranks.
        replicate_rank, replicate_size: this rank in its column, R ranks; 0 and 1 on a 1-D mesh.
    """

    def __init__(self, mesh: DeviceMesh, device: torch.device) -> None:
        row = mesh.get_group(mesh.ndim - 1)
        self.shard_rank, self.shard_size = dist.get_rank(row), dist.get_world_size(row)
        self.replicate_rank, self.replicate_size = 0, 1
        self.device = device
        self.stats = CommStats()
        self.streams = make_streams(device)
        self._broadcast_group = _clone(row, device, "dmuon_broadcast")
        self._reduce_group = self._flag_group = _clone(row, device, "dmuon_reduce")
        if mesh.ndim == 2:
            column = mesh.get_group(0)
            self.replicate_rank, self.replicate_size = (dist.get_rank(column), dist.get_world_size(column))
            self._replicate_reduce_group = _clone(column, device, "dmuon_replicate_reduce")
            self._publish_group = _clone(column, device, "dmuon_publish")
            self._flag_group = mesh_group(mesh, device, "dmuon_flags")
        self._nccl = dist.get_backend(self._broadcast_group) == "nccl"

    def broadcast(self, sent: Sequence[Sent], what: str) -> Pending:
        """Send each buffer from its root to the whole row. Collective over the row, asynchronous.

        Args:
            sent: in the same order on every rank; buffers must live until waited for.
            what: names the operation in errors.
        """
        self.stats.broadcasts += len(sent)
        self.stats.broadcast_bytes += _payload(sent)
        return self._launch(
            Lane.BROADCAST,
            self._broadcasts(sent, self._broadcast_group),
            sent,
            what,
            Edge.WEIGHTS_PACKED_BEFORE_BROADCAST,
        )

    def publish(self, sent: Sequence[Sent], what: str) -> Pending:
        """Send each buffer from its root to the whole column. Collective over the column, asynchronous."""
        self.stats.publishes += len(sent)
        self.stats.publish_bytes += _payload(sent)
        return self._launch(
            Lane.PUBLISH, self._broadcasts(sent, self._publish_group), sent, what, Edge.WEIGHTS_PACKED_BEFORE_PUBLISH
        )

    def reduce(self, sent: Sequence[Sent], what: str) -> Pending:
        """Average each buffer over the row onto its root; elsewhere it is lost. As :meth:`broadcast`.

        With gloo, which can only sum, dividing by :attr:`gradient_divisor` is part of packing.
        """
        self.stats.reduces += len(sent)
        self.stats.reduce_bytes += _payload(sent)
        return self._launch(
            Lane.REDUCE, self._reduces(sent, self._reduce_group), sent, what, Edge.GRADS_PACKED_BEFORE_REDUCE
        )

    def replicate_reduce(self, sent: Sequence[Sent], after: Pending, what: str) -> Pending:
        """Average each buffer over the column onto its root, ``after`` its row's reduce. As :meth:`publish`."""
        self.stats.replicate_reduces += len(sent)
        self.stats.replicate_reduce_bytes += _payload(sent)
        return self._launch(
            Lane.REPLICATE_REDUCE,
            self._reduces(sent, self._replicate_reduce_group),
            sent,
            what,
            None,  # not after the backward that the current stream has been given since: this shall run beside it
            [(after, Edge.REDUCE_BEFORE_REPLICATE_REDUCE)],
        )

    def any_rank(self, flags: torch.Tensor) -> Pending:
        """Elementwise OR of uint8 ``flags`` [n] over the whole mesh, in place. Collective, asynchronous."""
        self.stats.flag_reduces += 1
        what = "the agreement on which parameters have a gradient"

        def collective() -> list[dist.Work]:
            work = dist.all_reduce(flags, op=dist.ReduceOp.MAX, group=self._flag_group, async_op=True)
            assert work is not None
            return [work]

        return self._launch(Lane.REDUCE, collective, [(flags, 0)], what, Edge.FLAGS_BEFORE_REDUCE)

    def gather(self, value: Any) -> list[Any]:
        """Every rank's picklable ``value``. Collective over the whole mesh; the host waits."""
        values: list[Any] = [None] * dist.get_world_size(self._flag_group)
        dist.all_gather_object(values, value, group=self._flag_group)
        return values

    @property
    def gradient_divisor(self) -> int:
        """What packed gradients are divided by before they are reduced: 1 where the backend averages."""
        return 1 if self._nccl else self.shard_size * self.replicate_size

    def _launch(
        self,
        lane: Lane,
        collective: Callable[[], list[dist.Work]],
        sent: Sequence[Sent],
        what: str,
        after_current: Edge | None,
        after: Sequence[tuple[Pending, Edge]] = (),
    ) -> Pending:
        buffers = tuple(buffer for buffer, _ in sent)

        def named() -> list[dist.Work]:
            # Receiving into a buffer whose views autograd has saved is no modification: the content comes back.
            with _named(what), torch.autograd._unsafe_preserve_version_counter(buffers):
                return [_NamedWork(work, what) for work in collective()]  # type: ignore[misc]

        return self.streams.launch(lane, what, named, buffers, after_current=after_current, after=after)

    def _broadcasts(self, sent: Sequence[Sent], group: dist.ProcessGroup) -> Callable[[], list[dist.Work]]:
        def collective() -> list[dist.Work]:
            with self._coalesce(group) as coalesced:
                works = [dist.broadcast(b, group=group, group_src=root, async_op=True) for b, root in sent]
            return [coalesced] if coalesced is not None else works

        return collective

    def _reduces(self, sent: Sequence[Sent], group: dist.ProcessGroup) -> Callable[[], list[dist.Work]]:
        op = dist.ReduceOp.AVG if self._nccl else dist.ReduceOp.SUM

        def collective() -> list[dist.Work]:
            with self._coalesce(group) as coalesced:
                works = [dist.reduce(b, group=group, group_dst=root, op=op, async_op=True) for b, root in sent]
            return [coalesced] if coalesced is not None else works

        return collective

    def _coalesce(self, group: dist.ProcessGroup) -> AbstractContextManager[dist.Work | None]:
        # gloo raises in the coalescing manager; NCCL fuses the owners' broadcasts into one launch with it.
        if not self._nccl:
            return nullcontext()
        return dist._coalescing_manager(group=group, device=self.device, async_ops=True)


class _NamedWork:
    """Says in an error which operation failed: the usual cause is a rank that did not run the same modules."""

    def __init__(self, work: dist.Work, what: str) -> None:
        self._work = work
        self._what = what

    def wait(self) -> None:
        with _named(self._what):
            self._work.wait()

    def is_completed(self) -> bool:
        return self._work.is_completed()


class _named:
    def __init__(self, what: str) -> None:
        self._what = what

    def __enter__(self) -> None:
        return None

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        if isinstance(error, RuntimeError):
            raise RuntimeError(_failure(self._what)) from error


def _failure(what: str) -> str:
    return (
        f"{what} failed. Every rank must run the same modules in the same order, in forward and in backward; a rank "
        "that skipped this module, raised, or ended leaves the others waiting here"
    )


def _payload(sent: Sequence[Sent]) -> int:
    return sum((buffer.numel() - TAG_NUMEL) * buffer.itemsize for buffer, _ in sent)


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


def mesh_group(mesh: DeviceMesh, device: torch.device, description: str) -> dist.ProcessGroup:
    """One process group over all ranks of ``mesh``, ordered by their coordinates. Collective over the mesh."""
    parent = mesh.get_group(mesh.ndim - 1)
    return _new_group(mesh.mesh.flatten().tolist(), parent, device, description)


def _clone(parent: dist.ProcessGroup, device: torch.device, description: str) -> dist.ProcessGroup:
    return _new_group(dist.get_process_group_ranks(parent), parent, device, description)


def _new_group(ranks: list[int], like: dist.ProcessGroup, device: torch.device, description: str) -> dist.ProcessGroup:
    """A process group with the backend of ``like``, shared by all models that ask for the same one.

    Its timeout is that of ``like`` or of the default group, whichever is shorter: ``init_device_mesh`` gives the groups
    of a 2-D mesh torch's half hour, whatever the user chose for ``init_process_group``. Models may share a group, as
    all ranks run them in the same order; sockets and communicators are not released before the default group is.
    """
    backend = dist.get_backend(like)
    groups = (like, dist.distributed_c10d._get_default_group())
    timeout = min(group._get_backend(device).options._timeout for group in groups)
    key = (tuple(ranks), description, backend, timeout)
    group = _groups.get(key)
    if group is None or group not in dist.distributed_c10d._world.pg_map:  # not made yet, or destroyed
        group = dist.new_group(
            ranks, timeout=timeout, backend=backend, use_local_synchronization=True, group_desc=description
        )
        assert isinstance(group, dist.ProcessGroup)
        _groups[key] = group
    return group
