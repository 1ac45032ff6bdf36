"""How the partition is searched: a greedy start, then exchanges, objective after objective."""

from __future__ import annotations

import heapq
from collections import Counter

from dmuon_core.bounds import simple_bound
from dmuon_core.exchange import Budget, lower_busiest, lower_largest, restore_spread, use_idle_slots
from dmuon_core.filling import Pattern, fill_slots
from dmuon_core.placement import Items, Placement
from dmuon_core.roots import level_roots

_PAIRS = 1_000_000  # looked at per objective: about a second
_FIT_NODES = 200_000  # looked at by the exact search for a placement within the bound on bytes
_SLACK = 200  # one part in so many of the lower bound may be spent on the objectives after the first


def balance(items: Items, columns: int, rows: int, max_bytes: int | None = None) -> list[int] | None:
    """The slot of every item; see `compute_balanced_assignment`. None if no placement within `max_bytes` was found."""
    if not items.costs:
        return []
    num_slots = columns * rows
    singles = [[item] for item in range(len(items.costs))]
    plain = longest_first(items, singles, columns, rows, False, max_bytes)
    ceiling = sum(items.costs) if plain is None else _busiest(items, plain, num_slots)
    bound = simple_bound(items.costs, num_slots)
    slack = bound // _SLACK

    def start_from(slot_of: list[int]) -> Placement:
        start = Placement(items, columns, rows, slot_of)
        lower_busiest(start, max_bytes, Budget(_PAIRS))
        return start

    spread = longest_first(items, pack_small(items, columns), columns, rows, True, max_bytes)
    best = None if spread is None else start_from(spread)
    if best is not None and max_bytes is None:
        # Filling keeps a layer's items apart less well, which a gain within the slack is not worth.
        best = _refill(best, below=min(max(best.loads) - slack, ceiling + 1))
    # The rules of that start may cost balance; the next ones are for that case, and usually not needed.
    if plain is not None and (best is None or max(best.loads) > ceiling):
        best = start_from(plain)
        restore_spread(best, Budget(_PAIRS))
    if best is None and max_bytes is not None:
        fitted = fit_bytes(items, num_slots, max_bytes)
        best = None if fitted is None else start_from(fitted)
    if best is None:
        return None

    max_load = max(min(bound + slack, ceiling), *best.loads)
    use_idle_slots(best)
    level_roots(best, max_load, max_bytes, Budget(_PAIRS))
    lower_largest(best, max_load, Budget(_PAIRS))
    return best.slot_of


def _refill(placement: Placement, below: int) -> Placement:
    """The placement, or one whose busiest slot is `below` that if filling slots one by one to a target finds it."""
    items, num_slots = placement.items, len(placement.loads)
    patterns = fill_slots(items.costs, num_slots, below)
    if patterns is None:
        return placement
    filled = Placement(items, placement.columns, placement.rows, follow_patterns(items, patterns, placement.columns))
    restore_spread(filled, Budget(_PAIRS))
    return filled


def follow_patterns(items: Items, patterns: list[Pattern], columns: int) -> list[int]:
    """A slot for every item so that slot `k` holds what `patterns[k]` says, its layers spread by a greedy choice."""
    used: dict[int, Counter[int]] = {layer: Counter() for layer in items.of_layer}
    slot_of = [-1] * len(items.costs)
    by_cost: dict[int, list[int]] = {}
    for item, cost in enumerate(items.costs):
        by_cost.setdefault(cost, []).append(item)
    for cost in sorted(by_cost, reverse=True):
        needs = {slot: pattern[cost] for slot, pattern in enumerate(patterns) if cost in pattern}
        for item in by_cost[cost]:
            columns_of_layer = used[items.layers[item]]
            slot = min(needs, key=lambda slot: (columns_of_layer[slot % columns], -needs[slot], slot))
            columns_of_layer[slot % columns] += 1
            slot_of[item] = slot
            needs[slot] -= 1
            if not needs[slot]:
                del needs[slot]
    return slot_of


def pack_small(items: Items, columns: int) -> list[list[int]]:
    """Groups of items that start on one slot: every item by itself, but for the small ones of a layer.

    Those are put into as few groups as keep the largest share of the layer's bytes and the costliest group no more
    than its costliest item. Where the layer needs every shard rank anyway nothing is gained, so nothing is packed.
    """
    units = []
    for layer, members in items.of_layer.items():
        small = [item for item in members if items.small[item]]
        large = [item for item in members if not items.small[item]]
        units += [[item] for item in large]
        ideal = items.ideal_root(layer, columns)
        costliest = max(items.costs[item] for item in members)
        fewest = max(1, -(-sum(items.nbytes[item] for item in small) // ideal)) if ideal else 1
        most = min(len(small), columns - len(large))
        for count in range(fewest, most):
            groups = _spread_bytes(items, small, count)
            if all(
                sum(items.nbytes[item] for item in group) <= ideal
                and sum(items.costs[item] for item in group) <= costliest
                for group in groups
            ):
                units += groups
                break
        else:
            units += [[item] for item in small]
    return units


def _spread_bytes(items: Items, members: list[int], count: int) -> list[list[int]]:
    groups: list[list[int]] = [[] for _ in range(count)]
    heap = [(0, group) for group in range(count)]
    for item in sorted(members, key=lambda item: (-items.nbytes[item], item)):
        nbytes, group = heap[0]
        groups[group].append(item)
        heapq.heapreplace(heap, (nbytes + items.nbytes[item], group))
    return groups


def longest_first(
    items: Items, units: list[list[int]], columns: int, rows: int, spread: bool, max_bytes: int | None
) -> list[int] | None:
    """Longest processing time first over groups of items; None if one fits on no slot within `max_bytes`.

    With `spread` a unit goes to the least loaded slot off the shard ranks that its layer uses, if it leaves any. Among
    equal loads the shard rank that the layer uses least wins, then the row: its broadcasts, and its new weights, leave
    from as many places as possible.
    """
    cost = [sum(items.costs[item] for item in unit) for unit in units]
    nbytes = [sum(items.nbytes[item] for item in unit) for unit in units]
    queue = _SlotQueue(columns, rows, max_bytes)
    used_columns: dict[int, Counter[int]] = {layer: Counter() for layer in items.of_layer}
    used_rows: dict[int, Counter[int]] = {layer: Counter() for layer in items.of_layer}
    slot_of = [-1] * len(items.costs)
    for index in _costliest_first(items, units, cost, columns):
        layer = items.layers[units[index][0]]
        leaves_any = spread and len(used_columns[layer]) < columns
        cell = queue.take(cost[index], nbytes[index], used_columns[layer], used_rows[layer], leaves_any)
        if cell is None:
            return None
        column, row = cell
        used_columns[layer][column] += 1
        used_rows[layer][row] += 1
        for item in units[index]:
            slot_of[item] = row * columns + column
    return slot_of


class _SlotQueue:
    """The slots by load, the least loaded first; load -> column -> rows."""

    def __init__(self, columns: int, rows: int, max_bytes: int | None) -> None:
        self._levels = {0: {column: list(range(rows)) for column in range(columns)}}
        self._loads = [0]  # a heap; a load whose level is gone stays until it comes up
        self._room = None if max_bytes is None else [[max_bytes] * rows for _ in range(columns)]

    def take(
        self, cost: int, nbytes: int, used_columns: Counter[int], used_rows: Counter[int], unused_only: bool
    ) -> tuple[int, int] | None:
        """Put a unit on the best of the least loaded slots that take it and return (column, row)."""
        passed = []
        found: tuple[int, int] | None = None
        while self._loads and found is None:
            load = self._loads[0]
            level = self._levels.get(load)
            if level is None:
                heapq.heappop(self._loads)
                continue
            least = -1
            for column, rows in level.items():
                used = used_columns[column]
                if (unused_only and used) or (found is not None and used >= least):
                    continue
                fitting = rows if self._room is None else [row for row in rows if self._room[column][row] >= nbytes]
                if fitting:
                    found, least = (column, min(fitting, key=lambda row: (used_rows[row], row))), used
                    if not used:
                        break
            if found is None:
                passed.append(heapq.heappop(self._loads))
        if found is not None:
            self._raise(load, *found, cost, nbytes)
        for load in passed:
            heapq.heappush(self._loads, load)
        return found

    def _raise(self, load: int, column: int, row: int, cost: int, nbytes: int) -> None:
        rows = self._levels[load][column]
        rows.remove(row)
        if not rows:
            del self._levels[load][column]
        if not self._levels[load]:
            del self._levels[load]
        if load + cost not in self._levels:
            self._levels[load + cost] = {}
            heapq.heappush(self._loads, load + cost)
        self._levels[load + cost].setdefault(column, []).append(row)
        if self._room is not None:
            self._room[column][row] -= nbytes


def _costliest_first(items: Items, units: list[list[int]], cost: list[int], columns: int) -> list[int]:
    """Indices of the units. Among equal costs the layers take turns, one item for every column at a time: no layer then
    fills the slots that are free at first, and none meets the same few columns in every turn.
    """
    turns: Counter[tuple[int, int]] = Counter()
    keys = []
    for index in sorted(range(len(units)), key=lambda index: units[index]):
        layer = items.layers[units[index][0]]
        keys.append((-cost[index], turns[cost[index], layer] // columns, units[index], index))
        turns[cost[index], layer] += 1
    return [key[-1] for key in sorted(keys)]


def fit_bytes(items: Items, num_slots: int, max_bytes: int) -> list[int] | None:
    """A placement with no slot over `max_bytes`: depth first, the largest item to the fullest slot that takes it.

    None if there is none, or if none was found among the first placements looked at.
    """
    order = sorted(range(len(items.nbytes)), key=lambda item: (-items.nbytes[item], item))
    free = [max_bytes] * num_slots
    nodes = 0
    choices: list[list[int]] = []  # per depth: the slots still to try, the one in use last
    placed: list[int] = []
    while len(placed) < len(order):
        size = items.nbytes[order[len(placed)]]
        if len(choices) == len(placed):
            nodes += 1
            # Slots with equal room are the same choice; the fullest is tried first, hence comes last.
            by_room = {free[slot]: slot for slot in reversed(range(num_slots)) if free[slot] >= size}
            choices.append([by_room[room] for room in sorted(by_room, reverse=True)])
        if not choices[-1] or nodes > _FIT_NODES:
            choices.pop()
            if not placed or nodes > _FIT_NODES:
                return None
            free[placed.pop()] += items.nbytes[order[len(placed)]]
            continue
        slot = choices[-1].pop()
        free[slot] -= size
        placed.append(slot)
    slot_of = [-1] * len(order)
    for item, slot in zip(order, placed, strict=True):
        slot_of[item] = slot
    return slot_of


def _busiest(items: Items, slot_of: list[int], num_slots: int) -> int:
    loads = [0] * num_slots
    for cost, slot in zip(items.costs, slot_of, strict=True):
        loads[slot] += cost
    return max(loads)
