"""Filling slots one after another to a target: finds combinations of few kinds of items that exchanges do not reach."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from dmuon_core.bounds import simple_bound

Pattern = dict[int, int]
"""What one slot holds: cost -> number of items of that cost."""

_KINDS = 48  # with more of them longest-first and exchanges leave nothing to gain
_TARGETS = 16  # how many targets are tried
_NODES = 4_000  # how many fillings of one slot are looked at


def fill_slots(costs: Sequence[int], num_slots: int, below: int) -> list[Pattern] | None:
    """A pattern for every slot, with the busiest as low as the search finds it, or None if that is not `below`.

    Bisects over targets; for each a slot takes the largest item left and what brings it closest to the target (the
    subset-sum form of the multifit heuristic: Coffman, Garey and Johnson, SIAM Journal on Computing 7, 1978).
    """
    kinds = Counter(costs)
    low, high = simple_bound(costs, num_slots), below - 1
    if len(kinds) > _KINDS or low > high:
        return None
    best: list[Pattern] | None = None
    target = low
    for _ in range(_TARGETS):
        if low > high:
            break
        patterns = _fill(kinds, num_slots, target)
        if patterns is None:
            low = target + 1
        else:
            best = patterns
            high = max(sum(cost * count for cost, count in pattern.items()) for pattern in patterns) - 1
        target = (low + high) // 2
    # The steps may end before they come to the highest target that counts.
    return _fill(kinds, num_slots, below - 1) if best is None else best


def _fill(kinds: Counter[int], num_slots: int, target: int) -> list[Pattern] | None:
    left = dict(sorted(kinds.items(), reverse=True))
    patterns: list[Pattern] = []
    while left and len(patterns) < num_slots:
        pattern = _fill_one(list(left.items()), target)
        # Many slots are filled alike: as often as what is left allows.
        times = min(num_slots - len(patterns), *(left[cost] // count for cost, count in pattern.items()))
        patterns += [pattern] * times
        for cost, count in pattern.items():
            left[cost] -= times * count
            if not left[cost]:
                del left[cost]
    if left:
        return None
    return patterns + [{}] * (num_slots - len(patterns))


def _fill_one(left: list[tuple[int, int]], target: int) -> Pattern:
    """The items, one of the largest among them, whose sum comes closest to `target` from below."""
    after = [0] * (len(left) + 1)  # cost of everything from a kind on
    for index in reversed(range(len(left))):
        after[index] = after[index + 1] + left[index][0] * left[index][1]
    best_room = target + 1
    best: list[int] = []
    nodes = 0

    def go(index: int, room: int, taken: list[int]) -> None:
        nonlocal best_room, best, nodes
        nodes += 1
        if taken and room < best_room:
            best_room, best = room, list(taken)
        if index == len(left):
            return
        cost, count = left[index]
        for number in range(min(count, room // cost) if cost else count, -1 if index else 0, -1):
            # Fewer of this kind leave more room than all the later ones can fill.
            if best_room == 0 or nodes > _NODES or room - number * cost - after[index + 1] >= best_room:
                return
            go(index + 1, room - number * cost, [*taken, number])

    go(0, target, [])
    return {left[index][0]: number for index, number in enumerate(best) if number}
