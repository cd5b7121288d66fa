"""`status.json` says of a run that it goes on, how it ended, or that nobody could say so."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from monarch_rl.observe import status
from monarch_rl.observe.status import StatusFile, process_started, read_status


def rewrite(folder: Path, **values: Any) -> None:
    file = folder / "status.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | values))


async def test_a_run_is_running_until_it_is_closed(tmp_path: Path) -> None:
    assert read_status(tmp_path) is None
    file = StatusFile(tmp_path)
    file.start()
    running = read_status(tmp_path)
    assert running
    assert (running.state, running.pid) == ("running", os.getpid())
    file.close()
    assert str(read_status(tmp_path)) == "stopped"
    assert os.listdir(tmp_path) == ["status.json"]


async def test_how_it_ends_is_what_was_said_last(tmp_path: Path) -> None:
    file = StatusFile(tmp_path)
    file.start()
    file.ends("done")
    file.ends("failed", "trainer 1 was killed by signal 9 (SIGKILL)")
    file.close()
    file.close()
    assert str(read_status(tmp_path)) == "failed: trainer 1 was killed by signal 9 (SIGKILL)"


async def test_a_controller_that_is_gone_has_died(tmp_path: Path) -> None:
    file = StatusFile(tmp_path)
    file.start()
    ended = await asyncio.create_subprocess_exec(sys.executable, "-c", "")
    await ended.wait()
    rewrite(tmp_path, pid=ended.pid)
    assert str(read_status(tmp_path)).startswith(f"died: its controller, process {ended.pid} on ")
    rewrite(tmp_path, pid=os.getpid(), process_started=process_started(os.getpid()) - 1)
    died = read_status(tmp_path)
    assert died
    assert died.state == "died", "another process has its number"
    file.close()


def test_a_process_that_nobody_has_taken_note_of_is_gone() -> None:
    """As in a container without an init process."""
    ended = subprocess.Popen(["cat"], stdin=subprocess.PIPE)
    assert process_started(ended.pid) > 0
    ended.kill()
    os.waitid(os.P_PID, ended.pid, os.WEXITED | os.WNOWAIT)
    assert process_started(ended.pid) == 0
    ended.communicate()


async def test_on_another_host_silence_means_death(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = StatusFile(tmp_path)
    file.start()
    rewrite(tmp_path, host="elsewhere", pid=1)
    far = read_status(tmp_path)
    assert far
    assert far.state == "running"
    monkeypatch.setattr(status.time, "time", lambda: far.updated + status.SILENT_S)
    assert str(read_status(tmp_path)).startswith("died")
    file.close()
