"""Real processes of a session that die while Monarch tells nothing of it, and one that is stopped while the session closes."""

from __future__ import annotations

import asyncio
import os
import re
import signal
from pathlib import Path

import monarch.actor
import psutil
import pytest

from monarch_rl.config import Config
from monarch_rl.meshes import Meshes


@pytest.mark.timeout(200)
async def test_deaths_are_heard_of_without_monarch_whenever_and_nothing_is_left(tmp_path: Path) -> None:
    config = Config(output_dir=str(tmp_path))
    config.trainer.ranks = 2
    monarch.actor.unhandled_fault_hook = lambda failure: None  # for good: Monarch may tell of a death when the test is over
    meshes = Meshes(config)
    await meshes.open()
    left = meshes.leave("trainer")
    usages = {name: list((await process.usage.call()).values()) for name, process in meshes.processes().items()}
    pids = [usage.pid for of_mesh in usages.values() for usage in of_mesh]
    assert {psutil.Process(pid).ppid() for pid in pids} == {os.getpid()}
    await asyncio.wait(set(meshes._listening.values()))

    os.kill(usages["trainer"][1].pid, signal.SIGKILL)
    async with asyncio.timeout(60):
        assert re.fullmatch(r"trainer 1 (was killed by signal 9 \(SIGKILL\)|is gone)", await left)
    assert not meshes.fault.done()

    await meshes.renew("trainer")
    again = meshes.heed("trainer")
    await asyncio.wait(set(meshes._listening.values()))
    first, second = [usage.pid for usage in (await meshes.processes()["trainer"].usage.call()).values()]
    assert not any(lives(pid) for pid in pids if pid not in {usage.pid for usage in usages["replay_buffer"]})
    pids += [first, second]
    assert not again.done()
    os.kill(first, signal.SIGKILL)
    async with asyncio.timeout(60):
        assert re.fullmatch(r"trainer 0 (was killed by signal 9 \(SIGKILL\)|is gone)", await again)

    before = psutil.Process().children()
    await meshes.renew("trainer")
    async with asyncio.timeout(60):
        while not (unborn := [child for child in psutil.Process().children() if child not in before]):  # noqa: ASYNC110
            await asyncio.sleep(0.01)
    unborn[0].kill()
    with pytest.raises(Exception, match="error creating proc"):
        await meshes.processes()["trainer"].usage.call()
    await meshes.renew("trainer")
    pids += [usage.pid for usage in (await meshes.processes()["trainer"].usage.call()).values()]

    (buffer,) = usages["replay_buffer"]
    os.kill(buffer.pid, signal.SIGTERM)
    await asyncio.sleep(0.2)
    (still,) = (await meshes.processes()["replay_buffer"].usage.call()).values()
    assert still.pid == buffer.pid, "what a batch system sends to all is for the controller to act on"
    os.kill(buffer.pid, signal.SIGSTOP)
    await meshes.close(3.0, 20.0)
    async with asyncio.timeout(60):
        while any(map(lives, pids)):  # noqa: ASYNC110
            await asyncio.sleep(0.05)


def lives(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False
