"""GroupOrder: which group comes next, so that its weights are on their way before it is called.

Also what follows from the order: whether a buffer that exists is fresh, and which one to keep for backward.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from dmuon_core.comm import CommContext
from dmuon_core.in_backward import in_backward

if TYPE_CHECKING:
    from dmuon_core.hooks import GroupHooks


class GroupOrder:
    """The order of the groups in the current forward, the last one, and the backwards to come.

    The order of the last complete forward predicts the next one; the first is guessed from the module tree.
    """

    def __init__(self, all_hooks: list[GroupHooks], reshard_after_forward: bool, comm: CommContext) -> None:
        self._all = all_hooks
        self._reshard_after_forward = reshard_after_forward
        self._comm = comm
        self._in_forward = False
        self._pass = 0  # number of the current forward
        self._unsharded_in_pass: dict[GroupHooks, int] = {}
        self._expected = list(all_hooks)
        self._this_forward: list[GroupHooks] = []
        self._backward_order: list[GroupHooks] = []  # of all forwards with grad that have had no backward yet
        self._prefetched: GroupHooks | None = None
        self._kept: GroupHooks | None = None

    def begin_forward(self) -> None:
        """A forward of the whole model starts: groups follow one another in a known order. Local."""
        self._in_forward = True
        self._pass += 1
        self._this_forward = []

    def end_forward(self) -> None:
        """The forward is complete. Local."""
        self._in_forward = False
        self._drop_stale_prefetch(None)
        self._expected = self._this_forward

    def end_backward(self) -> None:
        """A backward is complete, and every group at rest. Local."""
        self._backward_order.clear()
        self._prefetched = self._kept = None

    def abandon(self) -> None:
        """The iteration was interrupted, and every group is at rest. Local."""
        self._in_forward = False
        self.end_backward()

    def invalidate(self) -> None:
        """Weights have changed: nothing that was unsharded before is fresh, even inside one training_step. Local."""
        self._pass += 1
        self.end_backward()  # graphs from before the step have had their backward, or never will

    def prepare_for_forward(self, hooks: GroupHooks) -> None:
        """Free what an earlier pass left behind, so that the group computes with the weights of this moment."""
        if in_backward():
            return
        self._drop_stale_prefetch(hooks)
        if self._kept is not None and self._kept is not hooks:
            self._kept.group.reshard()
        self._kept = None
        if not (self._in_forward and self._unsharded_in_pass.get(hooks) == self._pass):
            hooks.group.reshard()
        self._note_unsharded(hooks)
        if self._in_forward:
            self._this_forward.append(hooks)

    def prefetch_for_forward(self, hooks: GroupHooks) -> None:
        """Start the broadcast of the group that ran next last time. Collective when it does something."""
        if not self._in_forward or in_backward():
            return
        position = len(self._this_forward)
        if position >= len(self._expected) or self._expected[position - 1] is not hooks:
            return  # this forward takes another path
        following = self._expected[position]
        if following.group.publication.is_unread and self._comm.streams.wait_blocks_host:
            return  # this group's compute would wait for the next group's new weights
        if not following.group.is_unsharded:
            following.group.unshard()
            self._note_unsharded(following)
            self._prefetched = following

    def keep_after_forward(self, hooks: GroupHooks, grad_enabled: bool) -> bool:
        """Whether the group keeps its buffers for backward: in Z2 all do, in Z3 the one whose backward comes first."""
        if grad_enabled:
            self._backward_order.append(hooks)
        if not grad_enabled:
            return False
        if not self._reshard_after_forward:
            return True
        position = len(self._this_forward)
        is_last = self._in_forward and position >= len(self._expected)
        if is_last:
            self._kept = hooks
        return is_last

    def _drop_stale_prefetch(self, wanted: GroupHooks | None) -> None:
        prefetched, self._prefetched = self._prefetched, None
        if prefetched is not None and prefetched is not wanted:
            prefetched.group.reshard()

    def _note_unsharded(self, hooks: GroupHooks) -> None:
        self._unsharded_in_pass[hooks] = self._pass
        self._count_unsharded(also=hooks)

    def _count_unsharded(self, also: GroupHooks) -> None:
        count = sum(h.group.is_unsharded or h is also for h in self._all)
        self._comm.stats.max_unsharded_groups = max(self._comm.stats.max_unsharded_groups, count)

    def prefetch_for_backward(self, hooks: GroupHooks) -> None:
        """Start the broadcast of the group whose forward ran before this one's. Collective when it does something."""
        self._count_unsharded(also=hooks)
        order = self._backward_order
        while order and order.pop() is not hooks:
            pass  # groups in between had no gradient
        if order and not order[-1].group.is_unsharded:
            order[-1].group.unshard()
            self._count_unsharded(also=order[-1])
