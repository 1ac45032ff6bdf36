"""Two hosts on one machine: network namespaces that are joined by a link of limited bandwidth, and by nothing else.

Needs Linux, root and iproute2. Whatever was made is removed at the end, also after an error or an interrupt.
"""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass

INTERFACE = "link0"
"""Name of the interface to the other host, in each of the two."""

_NETWORK = "10.213.77"  # seen only inside the two namespaces


class NotAvailable(Exception):
    """This machine cannot play two hosts; says why."""


@dataclass(frozen=True)
class Host:
    """One of the two: its network namespace, and its address on the link."""

    namespace: str
    address: str

    def start(self, command: list[str], environment: dict[str, str]) -> subprocess.Popen[bytes]:
        """Start ``command`` on this host; the process that is returned is the command's own."""
        return subprocess.Popen(["ip", "netns", "exec", self.namespace, *command], env=environment)


@contextmanager
def two_hosts(rate: str, delay: str | None = None) -> Iterator[tuple[Host, Host]]:
    """Two hosts with a link of ``rate`` in each direction, in the notation of ``tc`` ("200mbit").

    Args:
        rate: bandwidth, by a token bucket (``tbf``).
        delay: time that a packet takes ("2ms"); needs ``netem`` in the kernel. None for none.

    Raises:
        NotAvailable: no iproute2, no right to make namespaces, or a queueing discipline that the kernel lacks.
    """
    if shutil.which("ip") is None or shutil.which("tc") is None:
        raise NotAvailable("iproute2 is missing (apt-get install iproute2)")
    hosts = [Host(f"dmuon-{os.getpid()}-{k}", f"{_NETWORK}.{k + 1}") for k in range(2)]
    with ExitStack() as undo:
        for host in hosts:
            _run("ip", "netns", "add", host.namespace)
            undo.callback(_run, "ip", "netns", "delete", host.namespace)
        # A pair goes when the namespace of one end goes. It is made inside, so that it never is among our interfaces.
        ends = ("name", INTERFACE, "type", "veth", "peer", "name", INTERFACE, "netns", hosts[1].namespace)
        _run("ip", "-netns", hosts[0].namespace, "link", "add", *ends)
        for host in hosts:
            _limit(host, rate, delay)
            _run("ip", "-netns", host.namespace, "address", "add", f"{host.address}/24", "dev", INTERFACE)
            for interface in ("lo", INTERFACE):
                _run("ip", "-netns", host.namespace, "link", "set", interface, "up")
        yield hosts[0], hosts[1]


def _limit(host: Host, rate: str, delay: str | None) -> None:
    device = ("dev", INTERFACE)
    add = ("tc", "-netns", host.namespace, "qdisc", "add", *device)
    _run(*add, "root", "handle", "1:", "tbf", "rate", rate, "burst", "256kb", "latency", "50ms")
    if delay is not None:
        _run(*add, "parent", "1:1", "netem", "delay", delay, "limit", "10000")


def _run(*command: str) -> None:
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=30)
    if done.returncode != 0:
        raise NotAvailable(f"`{' '.join(command)}` says: {(done.stderr or done.stdout).strip()}")
