"""Waiting for something that may take long, unless a process dies; without processes."""

from __future__ import annotations

import asyncio
import gc
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import monarch.actor
import pytest

from monarch_rl import meshes
from monarch_rl.config import Config
from monarch_rl.meshes import Meshes
from monarch_rl.supervise import obituary


async def test_a_wait_that_is_given_up_is_not_heard_of_again() -> None:
    """`asyncio.gather` among others ends with an error when it is cancelled, which asyncio would print if nobody looked at it."""
    said: list[dict[str, Any]] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: said.append(context))
    parts = [asyncio.ensure_future(asyncio.sleep(60)) for _ in range(2)]
    waiting = asyncio.ensure_future(Meshes(Config()).alive("engines", asyncio.gather(*parts)))
    await asyncio.sleep(0)
    waiting.cancel()
    with suppress(asyncio.CancelledError):
        await waiting
    await asyncio.sleep(0.01)
    del waiting, parts
    gc.collect()
    await asyncio.sleep(0)
    assert said == []


async def test_the_result_comes_through() -> None:
    assert await Meshes(Config()).alive("engines", asyncio.sleep(0, "started")) == "started"
    with pytest.raises(ZeroDivisionError):
        await Meshes(Config()).alive("engines", divide())


async def divide() -> float:
    return 1 / 0


async def test_a_process_that_the_kernel_ended_for_its_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Only where the kernel has counted one since the start: somebody else may have sent the signal."""
    counter = tmp_path / "vmstat"
    monkeypatch.setattr(meshes, "OOM_KILLS", counter)
    report = "actor <root>.<actors.trainer.Trainer trainer{'rank': 1/2}> failed: the process was Killed(sig=9)"
    for kills, hint in ((0, ""), (3, ""), (4, ", when memory had run out on this host")):
        counter.write_text(f"nr_free_pages 1\noom_kill {min(kills, 3)}\n")
        running = Meshes(Config())
        running.watch()
        counter.write_text(f"nr_free_pages 1\noom_kill {kills}\n")
        running._died(report, obituary(report))
        assert str(await running.death()) == f"trainer 1 was killed by signal 9 (SIGKILL){hint}"
    counter.unlink()
    assert meshes.oom_kills() == 0


async def test_a_process_that_monarch_cannot_reach_is_no_death_by_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    """It may be one of an earlier session of this process, whose names were the same. A call that fails with it says how."""
    monkeypatch.setattr("monarch.actor.unhandled_fault_hook", None)
    running = Meshes(Config())
    running.watch()
    agent = "trainer-2<y5naP8ZRdGj>@trainer-2<y5naP8ZRdGj>.ipc://@Dt5Pn4vL3wfi8bUicGtVlEXv,proc_agent"
    report = f"The actor {agent} and all its descendants have failed:\n  no answer"
    assert obituary(report) == "trainer 2 is gone: its process does not answer any more"
    assert obituary(report.replace("trainer-2", "rollout_1-0")) == "rollout 1 is gone: its process does not answer any more"
    hook: Any = monarch.actor.unhandled_fault_hook
    hook(SimpleNamespace(report=lambda: report))
    await asyncio.sleep(0.01)
    assert not running.fault.done()
    hook(SimpleNamespace(report=lambda: "actor <root>.<actors.process.Process trainer_process{'rank': 1/2}> failed: Killed(sig=9)"))
    await asyncio.sleep(0.01)
    assert str(running.fault.exception()) == "trainer 1 was killed by signal 9 (SIGKILL)"


async def test_actors_of_monarch_are_not_mourned(monkeypatch: pytest.MonkeyPatch) -> None:
    """It has one in each mesh that joins a process group, which may be told of seconds after the mesh was ended."""
    monkeypatch.setattr("monarch.actor.unhandled_fault_hook", None)
    running = Meshes(Config())
    running.watch()
    hook: Any = monarch.actor.unhandled_fault_hook
    theirs = "actor <root>.<monarch.spmd.SPMDActor _SPMDActor{'tp': 0/2}> failed: cleanup error: deadline has elapsed"
    hook(SimpleNamespace(report=lambda: theirs))
    await asyncio.sleep(0.01)
    assert not running.fault.done()
    hook(SimpleNamespace(report=lambda: theirs.replace("_SPMDActor{", "replay_buffer{")))
    await asyncio.sleep(0.01)
    assert str(running.fault.exception()) == "replay buffer 0 ended: cleanup error: deadline has elapsed"
