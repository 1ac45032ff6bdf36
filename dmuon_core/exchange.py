"""Moves and swaps of single items that make a placement better, until none helps or the budget is spent.

The budget counts what was looked at, never time, so that every machine comes to the same placement.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import islice

from dmuon_core.placement import Kind, Placement

PARTNERS = 16  # how many of the lightest slots are tried before all of them
TRIES = 32  # how many items of one kind, each of another layer, are tried


class Budget:
    """How many pairs may still be looked at."""

    def __init__(self, pairs: int) -> None:
        self.left = pairs

    def spend(self) -> bool:
        self.left -= 1
        return self.left >= 0


def lower_busiest(placement: Placement, max_bytes: int | None, budget: Budget) -> None:
    """Take cost off the busiest slot until no move or swap with another slot lowers it.

    A layer stays on as many shard ranks as it is on; no slot comes over `max_bytes`.
    """

    def allowed(item: int, slot: int, other: int | None) -> bool:
        leaving = 0 if other is None else placement.items.nbytes[other]
        fits = max_bytes is None or placement.nbytes[slot] + placement.items.nbytes[item] - leaving <= max_bytes
        return fits and (_same_layer(placement, item, other) or placement.keeps_spread(item, slot))

    _lower_peak(placement, placement.loads, 0, allowed, budget)


def use_idle_slots(placement: Placement) -> None:
    """Give each slot without an item one of a busy slot that has several, where the spread and the roots allow it."""
    slots = range(len(placement.loads))
    # Kept up to date instead of searched for each: there may be thousands of slots.
    donors = {donor for donor in slots if placement.count(donor) > 1}
    for slot in [slot for slot in slots if not placement.on_slot[slot]]:
        for donor in sorted(donors, key=lambda donor: (-placement.loads[donor], donor)):
            items = (item for kind in sorted(placement.on_slot[donor]) for item in placement.one_per_layer(donor, kind))
            allowed = (
                item for item in items if placement.keeps_spread(item, slot) and placement.keeps_root(item, slot)
            )
            item = next(allowed, None)
            if item is not None:
                placement.move(item, slot)
                if placement.count(donor) <= 1:
                    donors.discard(donor)
                break


def lower_largest(placement: Placement, max_load: int, budget: Budget) -> None:
    """Take bytes off the slot that owns most of them, with no slot's cost over `max_load` and no worse root."""

    def allowed(item: int, slot: int, other: int | None) -> bool:
        leaving = 0 if other is None else placement.items.costs[other]
        if placement.loads[slot] + placement.items.costs[item] - leaving > max_load:
            return False
        if _same_layer(placement, item, other):
            return placement.keeps_root(item, slot, placement.items.nbytes[other] if other is not None else 0)
        return placement.keeps_spread(item, slot) and placement.keeps_root(item, slot)

    _lower_peak(placement, placement.nbytes, 1, allowed, budget)


Allowed = Callable[[int, int, "int | None"], bool]
"""(item, target slot, item that leaves the target for it) -> whether the move keeps every other bound."""


def _lower_peak(placement: Placement, sums: list[int], weight: int, allowed: Allowed, budget: Budget) -> None:
    """Lower the largest of `sums`, which adds up component `weight` of the kinds on each slot."""
    slots = range(len(sums))
    while budget.left > 0:
        top = max(slots, key=lambda slot: (sums[slot], -slot))
        partners = sorted((slot for slot in slots if slot != top), key=lambda slot: (sums[slot], slot))
        best: tuple[int, int, int, int | None] | None = None
        for tried, slot in enumerate(partners):
            gap = sums[top] - sums[slot]
            if gap <= 0 or (tried >= PARTNERS and best is not None):
                break
            for gain, mine, theirs in _gains(placement, top, slot, gap, weight, budget):
                if best is not None and gain <= best[0]:
                    break
                found = _first_allowed(placement, top, slot, mine, theirs, allowed)
                if found is not None:
                    best = (gain, slot, *found)
                    break
        if best is None:
            return
        _, slot, item, other = best
        if other is None:
            placement.move(item, slot)
        else:
            placement.swap(item, other)


def _gains(
    placement: Placement, top: int, slot: int, gap: int, weight: int, budget: Budget
) -> Iterator[tuple[int, Kind, Kind | None]]:
    """(how far the pair's larger sum falls, kind to give, kind to take back), the best first."""
    found: list[tuple[int, Kind, Kind | None]] = []
    others: list[Kind | None] = [None, *placement.on_slot[slot]]
    for mine in placement.on_slot[top]:
        for theirs in others:
            if not budget.spend():
                break
            shift = mine[weight] - (0 if theirs is None else theirs[weight])
            if 0 < shift < gap:
                found.append((min(shift, gap - shift), mine, theirs))
    # Of equal gains the one that moves least: a small item before a large one, a move before a swap.
    found.sort(key=lambda entry: (-entry[0], entry[1], entry[2] is not None, entry[2] or (0, 0)))
    return iter(found)


def _first_allowed(
    placement: Placement, top: int, slot: int, mine: Kind, theirs: Kind | None, allowed: Allowed
) -> tuple[int, int | None] | None:
    for item in islice(placement.one_per_layer(top, mine), TRIES):
        if theirs is None:
            if allowed(item, slot, None):
                return item, None
            continue
        for other in islice(placement.one_per_layer(slot, theirs), TRIES):
            if allowed(item, slot, other) and allowed(other, top, item):
                return item, other
    return None


def _same_layer(placement: Placement, item: int, other: int | None) -> bool:
    return other is not None and placement.items.layers[item] == placement.items.layers[other]


def restore_spread(placement: Placement, budget: Budget) -> None:
    """Swap items of equal cost until each layer sits on as many shard ranks as it can, or nothing more helps."""
    items = placement.items
    for layer, members in items.of_layer.items():
        counts = placement.layer_counts[layer]
        missing = min(len(members), placement.columns) - (placement.columns - counts.count(0))
        for item in members:
            if not missing:
                break
            if counts[placement.slot_of[item] % placement.columns] > 1:
                other = _spreading_swap(placement, item, budget)
                if other is not None:
                    placement.swap(item, other)
                    missing -= 1


def _spreading_swap(placement: Placement, item: int, budget: Budget) -> int | None:
    counts = placement.layer_counts[placement.items.layers[item]]
    kind, source = placement.kind(item), placement.slot_of[item]
    for slot in range(len(placement.loads)):
        if not budget.spend():
            return None
        if counts[slot % placement.columns] or kind not in placement.on_slot[slot]:
            continue
        for other in placement.one_per_layer(slot, kind):
            if not budget.spend():
                return None
            if placement.keeps_spread(other, source):
                return other
    return None
