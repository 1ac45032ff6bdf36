"""A rank that is killed by SIGKILL at a chosen moment, from outside its own interpreter."""

from __future__ import annotations

import os
import signal
import time


def kill_me_in(seconds: float) -> None:
    """Let this process die after ``seconds``, whatever it is doing then."""
    victim = os.getpid()
    if os.fork() == 0:
        time.sleep(seconds)
        if os.getppid() == victim:
            os.kill(victim, signal.SIGKILL)
        os._exit(0)
