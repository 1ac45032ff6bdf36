"""Runs a function on real gloo processes and brings back what every rank returned or raised.

A fork server imports torch once per pytest session; each rank of each job is a fresh fork of it. So a job starts in
some 20 ms, owns its default process group, and whatever it leaves behind (a half-finished collective, a patched
module, a compiled graph) dies with its processes: failures cannot leak into the next test. On a platform without a
fork server the ranks are spawned, which is the same thing but slower.
"""

from __future__ import annotations

import contextlib
import datetime
import faulthandler
import io
import multiprocessing
import multiprocessing.connection
import os
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

import torch
import torch.distributed as dist

DEFAULT_TIMEOUT = 120.0
# After the first rank failed, the others either notice the closed connection or hang; that long they get to say.
_GRACE_AFTER_FAILURE = 10.0
_PRELOAD = [
    "torch",
    "torch._dynamo",
    "torch.distributed.checkpoint.state_dict",
    "torch.distributed.fsdp",
    "torch.distributed.tensor",
    "torch.utils.checkpoint",
    "dmuon_core",
    "pytest",
]


@dataclass(frozen=True)
class RankError:
    """What one rank raised: the type's name, the message, and the traceback as text."""

    type: str
    message: str
    traceback: str
    mro: tuple[str, ...]

    def __contains__(self, text: str) -> bool:
        return text.lower() in self.message.lower()


class RanksFailed(AssertionError):
    """At least one rank raised, died or hung; the message carries every rank's traceback."""


def run_distributed(
    fn: Callable[..., Any],
    world_size: int,
    *args: Any,
    timeout: float = DEFAULT_TIMEOUT,
    init: bool = True,
    group_timeout: float = 60.0,
    **kwargs: Any,
) -> list[Any]:
    """Calls `fn(*args, **kwargs)` on `world_size` processes and returns the ranks' results in rank order.

    `fn` is a module-level function; arguments and results must pickle (plain tensors are fine). With `init=False` no
    process group exists in the rank. `timeout` bounds the job, after which every rank is asked for its stack and then
    killed; `group_timeout` is the process group's. Raises `RanksFailed` with each rank's traceback.
    """
    context = _context()
    # The parent holds the rendezvous store, so no port is guessed and none can be taken in between.
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False) if init else None
    port = store.port if store is not None else 0
    with tempfile.TemporaryDirectory(prefix="dmuon-test-") as folder, _rank_environment():
        ranks = []
        try:
            for rank in range(world_size):
                ours, theirs = context.Pipe()
                log = str(Path(folder) / f"rank{rank}.log")
                job = (theirs, log, rank, world_size, port, init, group_timeout, fn, args, kwargs)
                process = context.Process(target=_rank_main, args=job, daemon=True, name=f"rank{rank}")
                process.start()
                theirs.close()
                ranks.append(_Rank(process, ours, log))
            _collect(ranks, timeout)
            if any(rank.failure is not None for rank in ranks):
                raise RanksFailed(_report(fn, ranks))
            return [rank.value for rank in ranks]
        finally:
            for rank in ranks:
                rank.close()


def expect_errors(
    fn: Callable[..., Any],
    world_size: int,
    *args: Any,
    timeout: float = DEFAULT_TIMEOUT,
    group_timeout: float = 60.0,
    **kwargs: Any,
) -> list[RankError]:
    """Calls `fn` on `world_size` processes and returns each rank's error; a rank that raised none fails the test.

    A rank that raised stays alive until all ranks have reported, so no rank's error is only the echo of another
    rank's exit.
    """
    outcomes = run_distributed(_capture, world_size, fn, args, kwargs, timeout=timeout, group_timeout=group_timeout)
    calm = [rank for rank, outcome in enumerate(outcomes) if not isinstance(outcome, RankError)]
    if calm:
        noise = "\n".join(f"rank {r}: {o.traceback}" for r, o in enumerate(outcomes) if isinstance(o, RankError))
        raise AssertionError(f"{_name(fn)}: no error on rank(s) {calm}; the others said:\n{noise or '(none)'}")
    return outcomes


def capture_error(fn: Callable[..., Any], *args: Any, **kwargs: Any) -> RankError | None:
    """The error `fn` raises as a picklable record, None if it raises none; for use inside a rank."""
    outcome = _capture(fn, args, kwargs)
    return outcome if isinstance(outcome, RankError) else None


# --------------------------------------------------------------------------------------------------- the parent's side


class _Rank:
    def __init__(self, process: Any, connection: multiprocessing.connection.Connection, log: str) -> None:
        self.process, self.connection, self.log = process, connection, log
        self.done = False
        self.value: Any = None
        self.failure: str | None = None

    def receive(self) -> None:
        self.done = True
        try:
            ok, payload = self.connection.recv()
        except (EOFError, OSError):
            self.process.join(5)
            self.failure = f"the process died with exit code {self.process.exitcode} and said nothing"
            return
        if ok:
            # Made by our own rank a moment ago, so unpickling is safe; tensors come as bytes, not as shared memory.
            self.value = torch.load(io.BytesIO(payload), weights_only=False)
        else:
            self.failure = payload

    def hang(self) -> None:
        """Asks the rank for its stack, which lands in its log, and records that it hung."""
        self.done = True
        self.failure = "did not finish in time; its stack is at the end of its output"
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.process.pid, signal.SIGUSR1)
        self.process.join(0.5)

    def close(self) -> None:
        with contextlib.suppress(OSError):
            self.connection.close()  # tells a finished rank that it may leave
        self.process.join(0.5 if self.done and self.failure is None else 0)
        if self.process.is_alive():
            self.process.kill()
            self.process.join(5)


def _collect(ranks: list[_Rank], timeout: float) -> None:
    deadline = time.monotonic() + timeout
    while waiting := [rank for rank in ranks if not rank.done]:
        left = deadline - time.monotonic()
        ready = multiprocessing.connection.wait([rank.connection for rank in waiting], max(left, 0))
        if not ready:
            for rank in waiting:
                rank.hang()
            return
        for rank in waiting:
            if rank.connection in ready:
                rank.receive()
                if rank.failure is not None:
                    deadline = min(deadline, time.monotonic() + _GRACE_AFTER_FAILURE)


def _report(fn: Callable[..., Any], ranks: list[_Rank]) -> str:
    parts = [f"{_name(fn)} failed on rank(s) {[i for i, rank in enumerate(ranks) if rank.failure is not None]}"]
    for index, rank in enumerate(ranks):
        parts.append(f"---------- rank {index}: {rank.failure or 'finished without an error'}")
        output = Path(rank.log).read_text(errors="replace").strip() if Path(rank.log).exists() else ""
        if output:
            parts.append(f"---------- rank {index}, last output:\n{output[-6000:]}")
    return "\n".join(parts)


def _name(fn: Callable[..., Any]) -> str:
    return getattr(fn, "__qualname__", repr(fn))


def _context() -> Any:
    if "forkserver" not in multiprocessing.get_all_start_methods():
        return multiprocessing.get_context("spawn")
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(_PRELOAD)
    return context


@contextlib.contextmanager
def _rank_environment() -> Any:
    # Seen by the fork server only if it is not running yet, hence set around every start.
    before = {key: os.environ.get(key) for key in ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "GLOO_SOCKET_IFNAME")}
    os.environ.update(OMP_NUM_THREADS="1", MKL_NUM_THREADS="1")
    if sys.platform.startswith("linux"):
        os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    try:
        yield
    finally:
        for key, value in before.items():
            if value is None:
                os.environ.pop(key, None)
            else:
                os.environ[key] = value


# ----------------------------------------------------------------------------------------------------- the rank's side


def _rank_main(
    connection: multiprocessing.connection.Connection,
    log: str,
    rank: int,
    world_size: int,
    port: int,
    init: bool,
    group_timeout: float,
    fn: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> NoReturn:
    output = open(log, "w", buffering=1)
    os.dup2(output.fileno(), 1)
    os.dup2(output.fileno(), 2)
    sys.stdout = sys.stderr = output
    faulthandler.enable(output)
    faulthandler.register(signal.SIGUSR1, output, all_threads=True)
    try:
        torch.set_num_threads(1)
        torch.manual_seed(0)
        if init:
            os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(world_size))
            store = dist.TCPStore("127.0.0.1", port, is_master=False)
            seconds = datetime.timedelta(seconds=group_timeout)
            dist.init_process_group("gloo", store=store, rank=rank, world_size=world_size, timeout=seconds)
        value = fn(*args, **kwargs)
        payload = io.BytesIO()
        torch.save(value, payload)
        message = (True, payload.getvalue())
    except BaseException:
        # SystemExit and KeyboardInterrupt too: whatever ended the rank belongs into the report.
        message = (False, traceback.format_exc())
    connection.send(message)
    if message[0]:
        # Stay until everybody is done, so that no peer sees our sockets close in the middle of its work.
        with contextlib.suppress(EOFError, OSError):
            connection.recv()
    output.flush()
    # Without destroying the group: a peer that failed would make that wait.
    os._exit(0 if message[0] else 1)


def _capture(fn: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    try:
        return fn(*args, **kwargs)
    except Exception as error:
        mro = tuple(kind.__name__ for kind in type(error).__mro__)
        return RankError(type(error).__name__, str(error), traceback.format_exc(), mro)
