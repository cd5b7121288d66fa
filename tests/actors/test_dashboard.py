"""Monarch's dashboard: what it shows, to whom, and that it ends."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import textwrap
import time
import urllib.request
from pathlib import Path

import psutil
import pytest

from monarch_rl.cluster.dashboard import Dashboard
from monarch_rl.config import UserError

SHOWN_S = 60.0


def asked(url: str) -> object:
    with urllib.request.urlopen(url, timeout=30) as answer:
        return json.loads(answer.read())


def until_shown(url: str, *texts: str) -> None:
    deadline = time.monotonic() + SHOWN_S
    while missing := [text for text in texts if text not in json.dumps(asked(url))]:
        assert time.monotonic() < deadline, (url, missing)
        time.sleep(0.2)


@pytest.mark.timeout(200)
def test_it_shows_the_actors_of_a_run_on_the_loopback_interface_and_ends_with_its_controller(tmp_path: Path) -> None:
    """In a process of its own, since Monarch keeps what it has started; it is killed, so that nothing is left to good manners."""
    program = """
        import asyncio, sys
        from pathlib import Path
        from monarch.actor import Actor, this_host
        from monarch_rl.cluster.dashboard import Dashboard

        class Watched(Actor):
            pass

        async def main():
            earlier = Dashboard(Path(sys.argv[1]))
            await earlier.start()
            await earlier.close()
            dashboard = Dashboard(Path(sys.argv[1]))
            await dashboard.start()
            await dashboard.show([this_host()])
            this_host().spawn_procs({"seen": 2}, name="seen_procs").spawn("watched_actor", Watched)
            print(dashboard.url, flush=True)
            await asyncio.sleep(600)

        asyncio.run(main())
    """
    command = [sys.executable, "-c", textwrap.dedent(program), str(tmp_path / "log")]
    controller = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, env=os.environ)
    try:
        assert controller.stdout is not None
        url = controller.stdout.readline().strip()
        until_shown(f"{url}/api/actors", "watched_actor")
        until_shown(f"{url}/api/dag", "watched_actor", "seen_procs-1")
        with urllib.request.urlopen(url, timeout=30) as page:
            assert b"Monarch Dashboard" in page.read()
        dashboard = next(p for p in psutil.Process(controller.pid).children() if "monarch_rl.cluster.dashboard" in p.cmdline())
        open_to = {c.laddr.ip for c in dashboard.net_connections("tcp") if c.status == psutil.CONN_LISTEN}
        assert open_to <= {"127.0.0.1", "::1"}
    finally:
        controller.send_signal(signal.SIGKILL)
        controller.wait()
    psutil.wait_procs([dashboard], timeout=SHOWN_S)
    assert not dashboard.is_running()


async def test_where_it_cannot_be_had_one_line_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "flask.py").write_text("raise ImportError('no Flask here')")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=os.pathsep)
    dashboard = Dashboard(tmp_path / "log")
    try:
        with pytest.raises(UserError, match=r"^cluster.dashboard: ImportError: no Flask here$"):
            await dashboard.start()
    finally:
        await dashboard.close()
    assert "Traceback" in (tmp_path / "log").read_text()
