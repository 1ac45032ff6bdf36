"""Items on slots, changed one item at a time with every sum that the search looks at kept up to date."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property


@dataclass(frozen=True)
class Items:
    """What is to be placed, as parallel lists of integers; an item is an index into them."""

    costs: list[int]
    nbytes: list[int]
    layers: list[int]
    small: list[bool]

    @cached_property
    def of_layer(self) -> dict[int, list[int]]:
        """Layer -> its items, in order."""
        found: dict[int, list[int]] = defaultdict(list)
        for item, layer in enumerate(self.layers):
            found[layer].append(item)
        return dict(found)

    def ideal_root(self, layer: int, columns: int) -> int:
        """Bytes of a layer that at least one shard rank must broadcast: max(layer / columns, largest item)."""
        nbytes = [self.nbytes[item] for item in self.of_layer[layer]]
        return max(-(-sum(nbytes) // columns), *nbytes)


Kind = tuple[int, int]
"""(cost, bytes) of an item: items of one kind weigh the same wherever they are."""


class Placement:
    """Every item on one slot. Slot `row * columns + column` is that cell of the mesh."""

    def __init__(self, items: Items, columns: int, rows: int, slot_of: Sequence[int]) -> None:
        self.items, self.columns, self.rows = items, columns, rows
        self.slot_of = list(slot_of)
        slots = columns * rows
        self.loads = [0] * slots
        self.nbytes = [0] * slots
        self.on_slot: list[dict[Kind, dict[int, list[int]]]] = [{} for _ in range(slots)]  # kind -> layer -> items
        self.layer_counts = [[0] * columns for _ in items.of_layer]
        self.layer_bytes = [[0] * columns for _ in items.of_layer]
        self.ideal_roots = [items.ideal_root(layer, columns) for layer in range(len(items.of_layer))]
        for item, slot in enumerate(self.slot_of):
            self._add(item, slot)

    def move(self, item: int, slot: int) -> None:
        source = self.slot_of[item]
        self._add(item, source, sign=-1)
        self._add(item, slot)
        self.slot_of[item] = slot

    def swap(self, item: int, other: int) -> None:
        here, there = self.slot_of[item], self.slot_of[other]
        self.move(item, there)
        self.move(other, here)

    def kind(self, item: int) -> Kind:
        return self.items.costs[item], self.items.nbytes[item]

    def count(self, slot: int) -> int:
        return sum(len(members) for of_kind in self.on_slot[slot].values() for members in of_kind.values())

    def one_per_layer(self, slot: int, kind: Kind) -> Iterator[int]:
        """Items of one kind on a slot, one of each layer: more of one layer would only be the same again."""
        return (members[0] for members in self.on_slot[slot][kind].values())

    def slots_of_column(self, column: int) -> Iterable[int]:
        return range(column, self.columns * self.rows, self.columns)

    def keeps_spread(self, item: int, slot: int) -> bool:
        """Whether the item's layer sits on as many shard ranks as before once the item is on `slot`."""
        counts = self.layer_counts[self.items.layers[item]]
        source, target = self.slot_of[item] % self.columns, slot % self.columns
        return source == target or counts[source] > 1 or counts[target] == 0

    def keeps_root(self, item: int, slot: int, leaving: int = 0) -> bool:
        """Whether the item adds no root bytes to its layer beyond what the layer has or must have.

        `leaving` are bytes of the same layer that leave the column of `slot` at the same time.
        """
        layer = self.items.layers[item]
        per_column = self.layer_bytes[layer]
        target = slot % self.columns
        if self.slot_of[item] % self.columns == target:
            return True
        after = per_column[target] + self.items.nbytes[item] - leaving
        return after <= self.ideal_roots[layer] or after <= max(per_column)

    def _add(self, item: int, slot: int, sign: int = 1) -> None:
        items = self.items
        self.loads[slot] += sign * items.costs[item]
        self.nbytes[slot] += sign * items.nbytes[item]
        layer, column = items.layers[item], slot % self.columns
        self.layer_counts[layer][column] += sign
        self.layer_bytes[layer][column] += sign * items.nbytes[item]
        kind = self.kind(item)
        of_kind = self.on_slot[slot].setdefault(kind, {})
        if sign > 0:
            of_kind.setdefault(layer, []).append(item)
            return
        of_kind[layer].remove(item)
        if not of_kind[layer]:
            del of_kind[layer]
        if not of_kind:
            del self.on_slot[slot][kind]
