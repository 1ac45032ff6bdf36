"""Counts that do not come from the library under test: collectives by operator, and bytes by allocation."""

from __future__ import annotations

import gc
from collections import Counter
from collections.abc import Callable
from typing import Any

import torch
from torch.distributed.tensor import DTensor
from torch.profiler import ProfilerActivity, profile
from torch.utils._python_dispatch import TorchDispatchMode


class CountCollectives(TorchDispatchMode):
    """Counts the c10d operators that this rank issues, by name, and calls `on_each` at each of them."""

    def __init__(self, on_each: Callable[[], None] | None = None) -> None:
        super().__init__()
        self.calls: Counter[str] = Counter()
        self._on_each = on_each

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func._schema.name
        if any(isinstance(kind, type) and issubclass(kind, DTensor) for kind in types):
            return NotImplemented  # the tensor's own rules first; what they run comes back here as plain operators
        if name.startswith(("c10d::", "_c10d_functional::")) and "wait" not in name:
            self.calls[name.split("::")[1]] += 1
            if self._on_each is not None:
                self._on_each()
        return func(*args, **(kwargs or {}))


def live_bytes() -> int:
    """Bytes of all storages that some Python tensor of this process refers to."""
    gc.collect()
    sizes: dict[int, int] = {}
    for thing in gc.get_objects():
        if issubclass(type(thing), torch.Tensor):
            local = thing._local_tensor if isinstance(thing, DTensor) else thing
            if local.device.type == "cpu" and local.layout == torch.strided:
                storage = local.untyped_storage()
                sizes[storage._cdata] = storage.nbytes()
    return sum(sizes.values())


def peak_bytes(prepare: Callable[[], Callable[[], None]]) -> int:
    """Peak of the bytes held by torch's allocator while the function that `prepare` returns runs.

    Counts everything that was allocated from the start of `prepare` on, so weights and optimizer state are included.
    """
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        measured = prepare()
        with torch.profiler.record_function("measured section"):
            measured()
    results = profiler.profiler.kineto_results
    events = sorted(results.events(), key=lambda event: event.start_ns())
    start = next(event.start_ns() for event in events if event.name() == "measured section")
    held = peak = 0
    for event in events:
        if event.name() == "[memory]":
            held += event.nbytes()
            if event.start_ns() >= start:
                peak = max(peak, held)
    return peak


def extra_bytes(measured: Callable[[], object]) -> int:
    """Most bytes that torch's allocator held, while `measured` ran, beyond what it held before."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        result = measured()
    del result
    held = peak = 0
    events = [e for e in profiler.profiler.kineto_results.events() if e.name() == "[memory]"]
    for event in sorted(events, key=lambda event: event.start_ns()):
        held += event.nbytes()
        peak = max(peak, held)
    return peak
