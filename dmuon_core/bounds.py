"""What no partition can beat: lower bounds on the busiest slot's cost. Integers only."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence

_ROUNDINGS = 64


def simple_bound(costs: Sequence[int], num_slots: int) -> int:
    """max(mean load, largest item), rounded up."""
    return max(-(-sum(costs) // num_slots), max(costs, default=0))


def proven_bound(costs: Sequence[int], num_slots: int, achieved: int) -> int:
    """The busiest slot costs at least this much in every partition; at most `achieved`, which then is optimal.

    Beyond `simple_bound` it sees that whole items leave gaps: three items of 2/3 of a slot do not fit on two.
    """
    kinds = Counter(costs)
    unit = math.gcd(*kinds) or 1  # every load is a multiple of it
    low, high = -(-simple_bound(costs, num_slots) // unit) * unit, achieved
    if low < high and _too_much(kinds, num_slots, high - 1):
        return high
    # Everything up to a limit that is too low is too low: search for the highest one.
    while low < high:
        limit = (low + high) // 2
        if _too_much(kinds, num_slots, limit):
            low = limit + 1
        else:
            high = limit
    return low


def _too_much(kinds: Counter[int], num_slots: int, limit: int) -> bool:
    """Whether the items provably do not fit on slots of `limit`.

    With x = cost / limit, the function u_k(x) = x where (k + 1) x is whole, else floor((k + 1) x) / k, sums to at most
    1 over items that fit on one slot. Source: Fekete and Schepers, "New classes of fast lower bounds for bin packing
    problems", Mathematical Programming 91 (2001), theorem 4.
    """
    for k in range(1, _ROUNDINGS + 1):
        total = 0  # in units of 1 / (k * limit)
        for cost, count in kinds.items():
            whole, part = divmod((k + 1) * cost, limit)
            total += count * (whole * limit if part else k * cost)
        if total > num_slots * k * limit:
            return True
    return False
