"""Levelling each layer's broadcasts: exchanges that take bytes off the shard rank that sends most of a layer."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass
from itertools import islice

from dmuon_core.exchange import PARTNERS, TRIES, Budget
from dmuon_core.placement import Placement


def level_roots(placement: Placement, max_load: int, max_bytes: int | None, budget: Budget) -> None:
    """Take bytes of each layer off the shard rank that broadcasts most of them.

    No slot's cost comes over `max_load`, no slot over `max_bytes`, and no other layer's root grows beyond its ideal or
    what it is.
    """
    excess = [
        max(found) / max(ideal, 1) for found, ideal in zip(placement.layer_bytes, placement.ideal_roots, strict=True)
    ]
    worst_first = sorted(range(len(excess)), key=lambda layer: (-excess[layer], layer))
    share = Budget(0)
    for index, layer in enumerate(worst_first):
        # What one layer leaves goes to the ones after it; one that starts far off may take more than its part.
        share.left = max(budget.left, 0) // min(8, len(worst_first) - index)
        before = share.left
        while _lighten_root(placement, layer, max_load, max_bytes, share):
            pass
        budget.left -= before - max(share.left, 0)
    while _level_a_pair(placement, max_load, max_bytes, budget):
        pass


@dataclass(frozen=True)
class _Shift:
    """A swap inside one layer that lowers its root and brings `cost` from one slot to another."""

    cost: int
    layer: int
    item: int
    other: int


def _level_a_pair(placement: Placement, max_load: int, max_bytes: int | None, budget: Budget) -> bool:
    """Lower the roots of two layers at once by shifts between the same slots that make up for each other.

    Alone, each of them would bring a slot over `max_load`. Layers of one shape that sit on two slots the other way
    round are the usual case.
    """
    forth: dict[tuple[int, int], list[_Shift]] = defaultdict(list)
    for layer in range(len(placement.ideal_roots)):
        for slots, shift in _shifts(placement, layer, max_bytes, budget):
            forth[slots].append(shift)
    for (source, target), shifts in sorted(forth.items()):
        for first in shifts:
            for second in forth.get((target, source), []):
                moved = first.cost - second.cost
                fits = placement.loads[target] + moved <= max_load and placement.loads[source] - moved <= max_load
                if first.layer != second.layer and fits:
                    for shift in (first, second):
                        placement.swap(shift.item, shift.other)
                    return True
    return False


def _shifts(
    placement: Placement, layer: int, max_bytes: int | None, budget: Budget
) -> list[tuple[tuple[int, int], _Shift]]:
    """The (source, target) slots and shifts of a layer, one for each cost that can be brought from one to the other."""
    items = placement.items
    per_column = placement.layer_bytes[layer]
    peak = max(per_column)
    if peak <= placement.ideal_roots[layer]:
        return []
    heaviest = per_column.index(peak)
    members = items.of_layer[layer]
    here = [item for item in members if placement.slot_of[item] % placement.columns == heaviest]
    found: dict[tuple[int, int, int], _Shift] = {}
    for item in here:
        source = placement.slot_of[item]
        for other in members:
            target = placement.slot_of[other]
            column = target % placement.columns
            if column == heaviest or not budget.spend():
                continue
            moved = items.nbytes[item] - items.nbytes[other]
            cost = items.costs[item] - items.costs[other]
            room = max_bytes is None or placement.nbytes[target] + moved <= max_bytes
            if moved > 0 and per_column[column] + moved < peak and cost > 0 and room:
                found.setdefault((source, target, cost), _Shift(cost, layer, item, other))
    return [((source, target), shift) for (source, target, _), shift in found.items()]


def _lighten_root(placement: Placement, layer: int, max_load: int, max_bytes: int | None, budget: Budget) -> bool:
    per_column = placement.layer_bytes[layer]
    peak = max(per_column)
    if peak <= placement.ideal_roots[layer]:
        return False
    heaviest = per_column.index(peak)
    items = placement.items
    here = [item for item in items.of_layer[layer] if placement.slot_of[item] % placement.columns == heaviest]
    alike = {(placement.slot_of[item], placement.kind(item)): item for item in reversed(here)}
    here = sorted(alike.values(), key=lambda item: (items.nbytes[item], item))
    for column in sorted(range(placement.columns), key=lambda column: (per_column[column], column))[:PARTNERS]:
        slots = sorted(placement.slots_of_column(column), key=lambda slot: (placement.loads[slot], slot))[:PARTNERS]
        for item in here:
            if per_column[column] + items.nbytes[item] >= peak:
                break  # the items after it have no fewer bytes
            for slot in slots:
                if not budget.spend():
                    return False
                if _fits(placement, item, slot, None, max_load, max_bytes) and placement.keeps_spread(item, slot):
                    placement.move(item, slot)
                    return True
        for item in here:
            for slot in slots:
                other = _counterpart(placement, item, slot, peak, max_load, max_bytes, budget)
                if other is not None:
                    placement.swap(item, other)
                    return True
                if budget.left <= 0:
                    return False
    return False


def _counterpart(
    placement: Placement, item: int, slot: int, peak: int, max_load: int, max_bytes: int | None, budget: Budget
) -> int | None:
    """An item on `slot` that can change places with `item`, so that the root of the item's layer falls."""
    items = placement.items
    layer, source = items.layers[item], placement.slot_of[item]
    at_target = placement.layer_bytes[layer][slot % placement.columns]
    kinds = sorted(
        placement.on_slot[slot], key=lambda kind: (abs(kind[0] - items.costs[item]), kind)
    )  # equal costs first: they leave both slots' loads as they are
    for kind in kinds:
        for other in islice(placement.one_per_layer(slot, kind), TRIES):
            if not budget.spend():
                return None
            if not _fits(placement, item, slot, other, max_load, max_bytes):
                break  # so it is for every item of this kind
            if not _fits(placement, other, source, item, max_load, max_bytes):
                break
            if items.layers[other] == layer:
                shift = items.nbytes[item] - items.nbytes[other]
                if shift > 0 and at_target + shift < peak:
                    return other
            elif (
                at_target + items.nbytes[item] < peak
                and placement.keeps_spread(item, slot)
                and placement.keeps_spread(other, source)
                and placement.keeps_root(other, source)
            ):
                return other
    return None


def _fits(
    placement: Placement, item: int, slot: int, leaving: int | None, max_load: int, max_bytes: int | None
) -> bool:
    items = placement.items
    cost = items.costs[item] - (0 if leaving is None else items.costs[leaving])
    nbytes = items.nbytes[item] - (0 if leaving is None else items.nbytes[leaving])
    if placement.loads[slot] + cost > max_load:
        return False
    return max_bytes is None or placement.nbytes[slot] + nbytes <= max_bytes
