"""Publication: how an owner's new weights reach the replicas of its column after an optimizer step.

Every rank of the owner's column keeps a copy of the weights, because it broadcasts them in its own row. The owner sends
them on a lane of their own; they are waited for by whatever reads or writes the weights next, usually the group's next
forward. The transfer hides behind the forward of earlier groups and, if the optimizer says when a matrix is updated,
behind the update of later ones. Nothing here does anything on a 1-D mesh.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial
from typing import TYPE_CHECKING

import torch

from dmuon_core.comm import CommContext, check_tag
from dmuon_core.packing import Packed, by_owner, empty_packed
from dmuon_core.param import DedicatedParam
from dmuon_core.streams import Edge, Pending

if TYPE_CHECKING:
    from dmuon_core.group import DedicatedParamGroup


class Publication:
    """The new weights of ``group`` on their way. :meth:`start` is collective over the column, :meth:`wait` is local."""

    def __init__(self, group: DedicatedParamGroup, comm: CommContext) -> None:
        self._group = group
        self._comm = comm
        self._streams = comm.streams
        self._packed: list[Packed] = []
        self._pending: Pending | None = None
        self.is_unread = False
        """Whether the group was published since its last unshard; in this rank's column or not, so equal in a row."""

    @property
    def is_pending(self) -> bool:
        """Whether weights were sent and not yet put in place on this rank."""
        return self._pending is not None

    @property
    def is_due(self) -> bool:
        """Whether replicas on this rank's column may differ from their owners' weights, and nothing was sent yet."""
        if self._comm.replicate_size == 1:
            return False
        deliveries = [p.owned.delivery for p in self._mine if not p.rest.is_meta]
        return any(delivery is None or delivery.due for delivery in deliveries)

    def catch_up(self) -> None:
        """Make replicas equal that may not be: of new weights, and of weights that only their home could update.

        Collective over the column when it does something.
        """
        if self.is_due:
            self.start()
            self.wait()

    def start(self) -> None:
        """Send the weights of this rank's column from their owners."""
        if self._comm.replicate_size == 1:
            return
        self.is_unread = True
        self.wait()  # an earlier publication that nothing has read
        mine = self._mine
        if not mine:
            return
        for (owner, replicate, dtype), params in by_owner(mine, lambda p: (p.owner, p.owner_replicate, p.rest.dtype)):
            packed = empty_packed(owner, replicate, params, dtype, self._group.tag(dtype))
            self._streams.allocate(packed.buffer)
            if replicate == self._comm.replicate_rank:
                pack = partial(packed.pack, lambda param: param.owned._local_tensor)
                self._streams.current(pack, [packed.buffer])
            self._packed.append(packed)
        self._pending = self._comm.publish([(p.buffer, p.owner_replicate) for p in self._packed], self._name)
        for param in mine:
            delivery = param.owned.delivery
            assert delivery is not None
            delivery.arrival, delivery.due = self.wait, False

    def wait(self) -> None:
        """Put weights that are on their way in place; a no-op without any."""
        if self._pending is None:
            return
        pending, self._pending = self._pending, None
        packed, self._packed = self._packed, []
        self._streams.wait(pending, Edge.PUBLISH_BEFORE_USE)
        for part in packed:
            if part.owner_replicate != self._comm.replicate_rank:
                self._streams.current(partial(self._unpack, part), [part.buffer])
            self._streams.free(part.buffer)
        self._streams.hand_over()

    @property
    def _mine(self) -> list[DedicatedParam]:
        return [p for p in self._group.params if p.owner == self._comm.shard_rank]

    @property
    def _name(self) -> str:
        return f"publication of the weights of '{self._group.fqn}'"

    def _unpack(self, packed: Packed) -> None:
        check_tag(packed.buffer, packed.tag, self._name)
        for param, view in packed.views():
            param.owned._local_tensor.copy_(view)


class EarlyPublication:
    """Publishes the groups of one optimizer step while it runs, each when all its parameters in it are updated.

    Groups go in their order in the model, whatever the order of the updates: it is the same on all ranks, and the group
    that the next forward needs first goes first.

    Attributes:
        published: the groups that were published so far.
    """

    def __init__(self, groups: Iterable[DedicatedParamGroup], param_ids: set[int]) -> None:
        self.published: set[DedicatedParamGroup] = set()
        self._missing = {group: {id(p.rest) for p in group.params} & param_ids for group in groups}
        self._missing = {group: ids for group, ids in self._missing.items() if ids}
        self._group_of = {param_id: group for group, ids in self._missing.items() for param_id in ids}
        self._order = list(reversed(self._missing))

    def updated(self, param: torch.Tensor) -> bool:
        """Note that ``param`` has its new value; whether that published anything. Collective over the columns."""
        group = self._group_of.get(id(param))
        if group is None:
            return False
        self._missing[group].discard(id(param))
        before = len(self.published)
        while self._order and not self._missing[self._order[-1]]:
            complete = self._order.pop()
            complete.publication.start()
            self.published.add(complete)
        return len(self.published) > before
