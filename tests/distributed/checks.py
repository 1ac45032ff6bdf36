"""Checks that run on the ranks of a job, under pytest and under torchrun alike.

A check is a function without arguments that every rank calls and that raises where something is wrong. pytest starts
four ranks for each; a file that is run as a script is one of the ranks that torchrun has started, and calls them all.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

Check = Callable[[], None]


@dataclass
class Checks:
    """The checks of one file by name, in order."""

    found: dict[str, Check] = field(default_factory=dict)

    def __call__(self, check: Check) -> Check:
        """Decorator for a function without arguments."""
        self.found[check.__name__.removeprefix("_")] = check
        return check

    def of(self, **arguments: dict[str, Any]) -> Callable[[Callable[..., None]], Callable[..., None]]:
        """Decorator for a function with arguments: one check for each entry, ``id={argument: value}``."""

        def add(check: Callable[..., None]) -> Callable[..., None]:
            for name, kwargs in arguments.items():
                self.found[f"{check.__name__.removeprefix('_')}-{name}"] = partial(check, **kwargs)
            return check

        return add

    def slow_but(self, *fast: str) -> list[Any]:
        """The names for `pytest.mark.parametrize`; all but ``fast`` are marked as slow."""
        import pytest  # a rank that torchrun has started needs none

        assert set(fast) <= self.found.keys()
        return [pytest.param(name, marks=() if name in fast else pytest.mark.slow) for name in self.found]

    def run(self, name: str) -> None:
        """Inside a rank."""
        self.found[name]()

    def run_as_script(self) -> None:
        """All checks, one after the other, on the ranks that torchrun has started; rank 0 says how it goes."""
        torch.set_num_threads(1)  # as under pytest, where sums are compared bit for bit
        dist.init_process_group("gloo")
        world = dist.get_world_size()
        if world != 4:
            raise SystemExit(f"these checks are for four processes, not {world}: torchrun --nproc_per_node=4")
        for name, check in self.found.items():
            start = time.monotonic()
            torch.manual_seed(0)
            check()  # an exception ends this rank, and torchrun the others
            dist.barrier()
            if dist.get_rank() == 0:
                print(f"passed in {time.monotonic() - start:5.1f} s: {name}", flush=True)
        if dist.get_rank() == 0:
            print(f"{len(self.found)} passed", flush=True)
        dist.destroy_process_group()
