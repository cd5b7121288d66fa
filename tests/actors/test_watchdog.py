"""The watchdog over real processes: what they wait for, and one that is stopped."""

from __future__ import annotations

import asyncio
import os
import signal
from typing import Any

import monarch.actor
import pytest
from monarch.actor import Actor, concurrent_endpoint, this_host

from actors.process import Process
from monarch_rl.supervise import HOLDING, answer
from monarch_rl.watchdog import Watchdog, look


class Parked(Actor):
    """Asks another that answers when it is told to."""

    def __init__(self, other: Parked | None = None) -> None:
        self._other, self._go = other, asyncio.Event()

    @concurrent_endpoint
    async def ask(self) -> None:
        assert self._other is not None
        HOLDING.set("prompt 3")
        await answer(self._other.when_told.call_one(), "scorer 0", 600)

    @concurrent_endpoint
    async def when_told(self) -> None:
        await self._go.wait()

    @concurrent_endpoint
    async def tell(self) -> None:
        self._go.set()


@pytest.mark.timeout(120)
async def test_waits_are_seen_and_a_stopped_process_is_told_of() -> None:
    monarch.actor.unhandled_fault_hook = lambda failure: None  # for good: Monarch may tell of a death when the test is over
    meshes: dict[str, Any] = {name: this_host().spawn_procs({"worker": 1}) for name in ("rollout", "scorer")}
    processes: dict[str, Any] = {name: mesh.spawn(f"{name}_process", Process) for name, mesh in meshes.items()}
    scorer = meshes["scorer"].spawn("scorer", Parked)
    rollout = meshes["rollout"].spawn("rollout", Parked, scorer)
    asked = asyncio.ensure_future(rollout.ask.call_one().as_asyncio())
    async with asyncio.timeout(60):
        while not (seen := await look(processes)).waits:  # noqa: ASYNC110
            await asyncio.sleep(0.05)
    ((who, wait),) = seen.waits
    assert (who, wait.who, wait.deadline_s, wait.holding) == ("rollout 0", "scorer 0", 600, "prompt 3")
    assert (seen.passed, seen.silent) == ([], [])
    await scorer.tell.call_one()
    await asked
    assert (await look(processes)).waits == []

    pid = (await processes["scorer"].usage.call_one()).pid
    hung: asyncio.Queue[str] = asyncio.Queue()
    watchdog = asyncio.create_task(Watchdog(lambda: processes, print, hung.put_nowait, silent_s=4.0).watch())
    os.kill(pid, signal.SIGSTOP)
    async with asyncio.timeout(60):
        while await hung.get() != "scorer":
            pass
    watchdog.cancel()
    os.kill(pid, signal.SIGKILL)
    await asyncio.gather(*[mesh.stop() for mesh in meshes.values()], return_exceptions=True)
