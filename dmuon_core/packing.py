"""Packed buffers: the matrices that travel together in one collective, end to end in one flat tensor."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

import torch

from dmuon_core.comm import TAG_NUMEL
from dmuon_core.param import DedicatedParam


@dataclass(eq=False)
class Packed:
    """A flat ``buffer`` [sum of numel + TAG_NUMEL] for ``params`` of one owner and dtype, and the tag that ends it.

    Attributes:
        owner: the owner's rank in its row.
        owner_replicate: the owner's rank in its column; for buffers that only move in rows it does not matter.
    """

    owner: int
    owner_replicate: int
    params: list[DedicatedParam]
    buffer: torch.Tensor
    tag: torch.Tensor

    def views(self) -> Iterator[tuple[DedicatedParam, torch.Tensor]]:
        """Each parameter with its part of the buffer in its global shape."""
        offset = 0
        for param in self.params:
            yield param, self.buffer[offset : offset + param.numel].view(param.shape)
            offset += param.numel

    def pack(self, value_of: Callable[[DedicatedParam], torch.Tensor | None]) -> None:
        """Fill the buffer, with zeros where there is no value, and tag it. Local, on the current stream.

        Autograd may have saved views of the buffer in an earlier forward. That is no modification of them: the content
        comes back the same.
        """
        with torch.no_grad(), torch.autograd._unsafe_preserve_version_counter(self.buffer):
            for param, view in self.views():
                value = value_of(param)
                if value is None:
                    view.zero_()
                else:
                    view.copy_(value)
                del value  # a gradient is freed before the next one is copied
            self.buffer[-TAG_NUMEL:].copy_(self.tag)


def by_owner(
    params: Iterable[DedicatedParam], key: Callable[[DedicatedParam], tuple[int, int, torch.dtype]]
) -> list[tuple[tuple[int, int, torch.dtype], list[DedicatedParam]]]:
    """``params`` by (owner in row, owner in column, dtype), in an order that all ranks share."""
    found: dict[tuple[int, int, torch.dtype], list[DedicatedParam]] = {}
    for param in params:
        found.setdefault(key(param), []).append(param)
    return sorted(found.items(), key=lambda item: (item[0][0], item[0][1], str(item[0][2])))


def empty_packed(
    owner: int, owner_replicate: int, params: list[DedicatedParam], dtype: torch.dtype, tag: torch.Tensor
) -> Packed:
    """A :class:`Packed` on the tag's device whose buffer has no storage yet."""
    numel = sum(p.numel for p in params) + TAG_NUMEL
    buffer = torch.empty(numel, dtype=dtype, device=tag.device)
    buffer.untyped_storage().resize_(0)
    return Packed(owner, owner_replicate, params, buffer, tag)
