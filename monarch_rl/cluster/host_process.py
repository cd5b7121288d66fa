"""Monarch's host process on an attached host: the parent of all processes that a run has there.

As a program (`python -m monarch_rl.cluster.host_process ADDRESS`) it is that process.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import subprocess
import sys
import sysconfig
import time
from collections.abc import Iterator
from pathlib import Path

from monarch_rl.cluster.address import Address, free_port, interface_of
from monarch_rl.cluster.child import CONTROLLER, die_with_parent, outlive_sigterm
from monarch_rl.cluster.machine import MONARCH_ENVIRONMENT, ROOT

START_S = 60.0
"""For Monarch to listen; it imports for a second or two."""
END_S = 10.0
"""For killed processes to be gone."""
ATTEMPTS = 3
"""A free port may be taken by another before Monarch has it."""


class HostProcess:
    """Started by `start`; ended, with everything below it, by `end_children`."""

    def __init__(self, ip: str, cwd: Path) -> None:
        self.address = Address(ip, free_port(ip))
        command = [sys.executable, "-m", "monarch_rl.cluster.host_process", str(self.address)]
        self._process = subprocess.Popen(command, cwd=cwd, env=_environment(ip), stdin=subprocess.DEVNULL)
        self.pid = self._process.pid

    @classmethod
    async def start(cls, ip: str, cwd: Path) -> HostProcess:
        """Raises RuntimeError when it does not come up."""
        for _ in range(ATTEMPTS):
            host = cls(ip, cwd)
            deadline = time.monotonic() + START_S
            while host.ended() is None and time.monotonic() < deadline:
                if await host._listens():
                    return host
                await asyncio.sleep(0.05)
            end_children()
        raise RuntimeError(f"Monarch's host process did not start (exit code {host.ended()})")

    def ended(self) -> int | None:
        """The exit code, once there is one."""
        return self._process.poll()

    async def _listens(self) -> bool:
        try:
            _, writer = await asyncio.open_connection(self.address.host, self.address.port)
        except OSError:
            return False
        writer.close()
        return True


def _environment(ip: str) -> dict[str, str]:
    """The worker's own, and what Monarch and torch must know of this host. It is inherited by all processes of the run."""
    own = {CONTROLLER: str(os.getpid()), **MONARCH_ENVIRONMENT}
    if interface := interface_of(ip):
        own["GLOO_SOCKET_IFNAME"] = interface  # gloo would look this host's name up, which may lead to its loopback interface
    if str(ROOT) != sysconfig.get_path("purelib"):
        own["PYTHONPATH"] = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    return os.environ | own


def end_children() -> None:
    """Kill all processes below this one, which must be their subreaper; they are gone when this returns."""
    deadline = time.monotonic() + END_S
    while (pids := list(_children())) and time.monotonic() < deadline:
        for pid in pids:
            with contextlib.suppress(ProcessLookupError, ChildProcessError):
                os.kill(pid, signal.SIGKILL)
                os.waitpid(pid, os.WNOHANG)
        time.sleep(0.01)


def _children() -> Iterator[int]:
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with contextlib.suppress(OSError):  # it may end meanwhile
                status = (entry / "stat").read_text()
                if int(status.rpartition(")")[2].split()[1]) == os.getpid():
                    yield int(entry.name)


def main() -> None:
    die_with_parent(int(os.environ[CONTROLLER]))
    outlive_sigterm()
    from monarch_rl.observe.quiet import silent_stderr

    with silent_stderr():
        from monarch.actor import start_worker_loop_forever

        running = start_worker_loop_forever(address=sys.argv[1], ca="trust_all_connections")
    running.get()


if __name__ == "__main__":
    main()
