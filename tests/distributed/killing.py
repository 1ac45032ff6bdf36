"""A rank that is killed by SIGKILL at a chosen moment, from outside its own interpreter."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from pathlib import Path


def kill_me_in(seconds: float) -> None:
    """Let this process die after ``seconds``, whatever it is doing then."""
    _kill_after(lambda: time.sleep(seconds))


def kill_me_when_writing(folder: Path, seconds: float) -> None:
    """Let this process die ``seconds`` after something in ``folder`` was first written to."""

    def wait() -> None:
        before = _sizes(folder)
        while _sizes(folder) == before:
            time.sleep(0.0005)
        time.sleep(seconds)

    _kill_after(wait)


def _sizes(folder: Path) -> dict[str, int]:
    found = {}
    for path in folder.rglob("*"):
        try:
            found[str(path)] = path.stat().st_size if path.is_file() else 0
        except FileNotFoundError:  # renamed or removed meanwhile
            found[str(path)] = -1
    return {path: size for path, size in found.items() if size}


def _kill_after(wait: Callable[[], None]) -> None:
    victim = os.getpid()
    if os.fork() == 0:
        wait()
        if os.getppid() == victim:
            os.kill(victim, signal.SIGKILL)
        os._exit(0)
