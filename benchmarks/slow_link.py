"""How much of the HSDP publish a training step hides, on a link that is really slow.

    sudo python -m benchmarks.slow_link

Two hosts (network namespaces) are joined by a link of limited bandwidth. Each runs two ranks, one row of a (2, 2) mesh:
replicas are across the link, shards inside a host. They train one GPT with ``replicate_async`` off and on in turn, step
by step. Reported are the median step of each kind, how long the synchronous one waits for the publish, and the share of
that time that the asynchronous one does not wait for: (synchronous - asynchronous step) / publish.

Where the machine cannot do this it says why and exits with code 0.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict
from pathlib import Path
from types import FrameType

from rich.console import Console
from rich.table import Table

from benchmarks.slow_link_rank import Medians, Turn, Workload
from benchmarks.two_hosts import INTERFACE, Host, NotAvailable, two_hosts

RANKS_PER_HOST = 2


def run(hosts: tuple[Host, Host], workload: Workload, limit: float) -> Medians:
    """Train once, in new processes; they are gone when this returns or raises.

    Raises:
        RuntimeError: a rank failed, or the run took more than ``limit`` seconds.
    """
    ranks: list[subprocess.Popen[bytes]] = []
    with tempfile.TemporaryDirectory(prefix="dmuon-slow-link-") as folder:
        result = Path(folder) / "medians.json"
        command = [sys.executable, "-m", "benchmarks.slow_link_rank", json.dumps(asdict(workload)), str(result)]
        try:
            for index, host in enumerate(hosts):
                for local_rank in range(RANKS_PER_HOST):
                    rank = index * RANKS_PER_HOST + local_rank
                    ranks.append(host.start(command, _environment(rank, local_rank, hosts[0].address)))
            _wait_for_all(ranks, limit)
            kinds = json.loads(result.read_text())
            return Medians(**{kind: Turn(**seconds) for kind, seconds in kinds.items()})
        finally:
            for process in ranks:
                process.kill()
            for process in ranks:
                process.wait()


def _environment(rank: int, local_rank: int, master: str) -> dict[str, str]:
    return os.environ | {
        "RANK": str(rank),
        "LOCAL_RANK": str(local_rank),
        "WORLD_SIZE": str(2 * RANKS_PER_HOST),
        "MASTER_ADDR": master,
        "MASTER_PORT": "29500",  # free: the namespace is new
        "GLOO_SOCKET_IFNAME": INTERFACE,
        "OMP_NUM_THREADS": "1",
    }


def _wait_for_all(ranks: list[subprocess.Popen[bytes]], limit: float) -> None:
    deadline = time.monotonic() + limit
    while any(process.poll() is None for process in ranks):
        failed = [rank for rank, process in enumerate(ranks) if process.poll()]
        if failed or time.monotonic() > deadline:
            raise RuntimeError(f"rank(s) {failed} failed" if failed else f"not done after {limit:.0f} s")
        time.sleep(0.1)


def report(runs: list[Medians], title: str) -> Table:
    """Every run, then median and spread."""
    columns = {
        "synchronous step": ([r.synchronous.whole for r in runs], "ms"),
        "asynchronous step": ([r.asynchronous.whole for r in runs], "ms"),
        "publish": ([r.synchronous.publish for r in runs], "ms"),
        "publish / sync. step": ([r.publish_share for r in runs], "%"),
        "publish hidden": ([r.hidden for r in runs], "%"),
    }
    table = Table("", *columns, title=title)

    def row(name: str, numbers: list[float]) -> None:
        units = [unit for _, unit in columns.values()]
        cells = [f"{n * (1e3 if u == 'ms' else 100):.1f} {u}" for n, u in zip(numbers, units, strict=True)]
        table.add_row(name, *cells)

    for index in range(len(runs)):
        row(f"run {index + 1}", [values[index] for values, _ in columns.values()])
    table.add_section()
    for name, pick in (("median", statistics.median), ("least", min), ("most", max)):
        row(name, [pick(values) for values, _ in columns.values()])
    return table


def _interrupt(number: int, frame: FrameType | None) -> None:
    raise KeyboardInterrupt  # so that a polite end cleans up as control-C does


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rate", default="490mbit", help="of the link, in each direction, as for tc")
    parser.add_argument("--delay", help="of a packet, as for tc ('1ms'); needs netem in the kernel")
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--steps", type=int, default=8, help="of each kind in one run")
    parser.add_argument("--warmup", type=int, default=2)
    parser.add_argument("--dim", type=int, default=384)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--context", type=int, default=64)
    parser.add_argument("--batch", type=int, default=1, help="sequences per rank")
    parser.add_argument("--limit", type=float, default=300, help="seconds that one run may take")
    parser.add_argument("--json", type=Path, help="also write every run's medians here")
    args = parser.parse_args()
    signal.signal(signal.SIGTERM, _interrupt)
    workload = Workload(args.dim, args.layers, args.context, args.batch, args.steps, args.warmup)
    try:
        with two_hosts(args.rate, args.delay) as hosts:
            runs = []
            for index in range(args.runs):
                runs.append(run(hosts, workload, args.limit))
                print(f"run {index + 1}: {runs[-1]}", flush=True)
    except NotAvailable as reason:
        print(f"skipped: {reason}")
        return
    title = f"2 hosts x {RANKS_PER_HOST} ranks, {args.rate}{f' + {args.delay}' if args.delay else ''}, {workload}"
    Console(width=120).print(report(runs, title))
    if args.json:
        args.json.write_text(json.dumps([asdict(r) for r in runs], indent=2) + "\n")


if __name__ == "__main__":
    main()
