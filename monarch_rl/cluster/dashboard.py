"""Monarch's own dashboard (`cluster.dashboard`): the meshes, actors and messages of a run in a browser.

A process of its own beside the controller; as a program (`python -m monarch_rl.cluster.dashboard KEY [TRANSPORT]`) it is that process.
What the processes of a run do reaches it through a socket on each host. Monarch itself would show it to the whole network, and leave
its process behind when the controller is killed; here it listens on the loopback interface, and is tied to the controller.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import pickle
import shutil
import sys
import traceback
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from monarch_rl.cluster.child import CONTROLLER, die_with_parent
from monarch_rl.cluster.machine import MONARCH_ENVIRONMENT
from monarch_rl.config import UserError
from monarch_rl.observe.quiet import silent_stderr

if TYPE_CHECKING:
    from asyncio.subprocess import Process

    from monarch.actor import HostMesh

ANSWER_S = 60.0
"""For the process to start, and to reach a host."""
KEPT_S = 3600
"""Messages and events are shown for so long."""
PICTURE_S = 5.0
"""Between two pictures of the whole."""


KEY = f"rl_{os.urandom(6).hex()}"
"""Names the sockets. One for all dashboards of a process, one after the other: Monarch does not let it change its mind."""
_socket = ""
"""Where processes that are spawned from now on send what they do; empty: nowhere."""


class Dashboard:
    """To be started before any other process of the run, so that it sees them all."""

    def __init__(self, log: Path) -> None:
        """`log`: a file for what goes wrong in it."""
        self.url = ""
        self._log = log
        self._process: Process | None = None
        self._folder: Path | None = None  # of its socket, which Monarch leaves behind

    async def start(self, *transport: str) -> None:
        """Raises UserError when it cannot be had."""
        self._log.parent.mkdir(parents=True, exist_ok=True)
        with self._log.open("ab") as log:
            self._process = await asyncio.create_subprocess_exec(
                *(sys.executable, "-m", "monarch_rl.cluster.dashboard", KEY, *transport),
                env=os.environ | MONARCH_ENVIRONMENT | {CONTROLLER: str(os.getpid())},
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
                stderr=log,
                start_new_session=True,  # Ctrl-C is for this process to handle
            )
        said = await self._heard()
        self.url = said["url"]
        self._folder = Path(said["socket"]).parent
        _use_socket(said["socket"])

    async def show(self, hosts: Sequence[HostMesh]) -> None:
        """Hosts that are there. The first call says what its picture of the whole will hold."""
        assert self._process is not None
        assert self._process.stdin is not None
        for host in hosts:
            await host.initialized
        self._process.stdin.write(pickle.dumps(list(hosts)))
        await self._heard()

    async def _heard(self) -> dict[str, Any]:
        assert self._process is not None
        assert self._process.stdout is not None
        try:
            line = await asyncio.wait_for(self._process.stdout.readline(), ANSWER_S)
            said: dict[str, Any] = json.loads(line)
        except (TimeoutError, ValueError):
            raise UserError(f"cluster.dashboard: Monarch's dashboard gives no answer; see {self._log}") from None
        if "problem" in said:
            raise UserError(f"cluster.dashboard: {said['problem']}")
        return said

    async def close(self) -> None:
        """May be called twice."""
        if self._process is None:
            return
        _use_socket("")
        with contextlib.suppress(ProcessLookupError):
            self._process.kill()
        await self._process.wait()
        self._process, self.url = None, ""
        if self._folder is not None:
            shutil.rmtree(self._folder, ignore_errors=True)


def _use_socket(path: str) -> None:
    """Have this process and those that it spawns from now on report to the dashboard at this path."""
    from monarch._src.actor.proc_mesh import SetupActor

    global _socket
    if _first_words not in SetupActor._startup_functions:
        SetupActor.register_startup_function(_first_words)
    _socket = path
    if path:
        _report_to(path)


def _first_words() -> partial[None] | None:
    """What a process does first."""
    return partial(_report_to, _socket) if _socket else None


def _report_to(path: str) -> None:
    """As Monarch's own `install_sidecar_socket_sink`, which would import Flask; vLLM, which looks into all modules, fails on that."""
    from monarch._rust_bindings.monarch_distributed_telemetry import _set_unix_socket_sink_path

    _set_unix_socket_sink_path(path)


def main() -> None:
    die_with_parent(int(os.environ[CONTROLLER]))
    key, *transport = sys.argv[1:]
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # Monarch's admin server says there where it listens
    try:
        for answer in _serve(key, transport):
            print(json.dumps(answer), file=answers, flush=True)
    except Exception as error:
        traceback.print_exc()
        print(json.dumps({"problem": f"{type(error).__name__}: {error}"}), file=answers, flush=True)


def _serve(key: str, transport: Sequence[str]) -> Iterator[dict[str, str]]:
    """One answer when it is there, and one for each message on stdin, which is a list of hosts."""
    from monarch._src.job.telemetry_actor import TelemetryActor, telemetry_socket_path
    from monarch.actor import context, enable_transport
    from monarch.distributed_telemetry.engine import QueryEngine
    from monarch.monarch_dashboard.server.app import start_telemetry_servers
    from monarch.monarch_dashboard.server.query_engine_adapter import QueryEngineAdapter

    for way in transport:
        enable_transport(way)
    with silent_stderr():
        here = context().actor_instance.proc_mesh
    collector = here.spawn("telemetry", TelemetryActor, key, KEPT_S)
    if not collector.activate.call_one().get():
        raise RuntimeError(f"{telemetry_socket_path(key)} cannot be had")
    # What it calls its dashboard listens to the whole network. What it calls its API serves the same pages on the loopback interface.
    url = start_telemetry_servers(QueryEngineAdapter(QueryEngine(collector)), include_dashboard=False)["api_url"]
    yield {"url": url, "socket": telemetry_socket_path(key)}
    picture = False
    for hosts in _received():
        if transport:
            for host in hosts:
                collector.start_worker_collector.call_one(host, True).get()
        if not picture:
            _take_pictures(hosts, url)
            picture = True
        yield {}


def _take_pictures(hosts: list[HostMesh], url: str) -> None:
    """Have Monarch look at all hosts, processes and actors now and then, and tell the server at `url`."""
    from monarch._rust_bindings.monarch_extension.snapshot_integration import _start_periodic_snapshots_http
    from monarch._src.actor.host_mesh import _spawn_admin
    from monarch.actor import context

    _, admin = _spawn_admin(hosts, "127.0.0.1:0", url).get()
    _start_periodic_snapshots_http(base_url=url, admin_ref=admin, instance=context().actor_instance._as_rust(), interval_secs=PICTURE_S)


def _received() -> Iterator[list[HostMesh]]:
    with contextlib.suppress(EOFError):
        while True:
            yield pickle.load(sys.stdin.buffer)


if __name__ == "__main__":
    main()
