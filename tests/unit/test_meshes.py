"""Waiting for something that may take long, unless a process dies; without processes."""

from __future__ import annotations

import asyncio
import errno
import gc
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import suppress
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import monarch.actor
import psutil
import pytest

from monarch_rl import meshes
from monarch_rl.cluster.children import Child
from monarch_rl.cluster.machine import MONARCH_ENVIRONMENT
from monarch_rl.config import Config
from monarch_rl.meshes import MANNER_S, Meshes
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
    hook(failure(report))
    await asyncio.sleep(0.01)
    assert not running.fault.done()
    hook(failure(KILLED))
    await asyncio.sleep(0.01)
    assert str(running.fault.exception()) == "trainer 1 was killed by signal 9 (SIGKILL)"


KILLED = (
    "actor <root>.<actors.process.Process trainer_process{'rank': 1/2}> failed: the process this actor was running on failed: Killed(sig=9)"
)


def run(*command: str) -> subprocess.Popen[bytes]:
    return subprocess.Popen(command)


def failure(report: str, mesh: str = "trainer_process-2dRz") -> Any:
    return SimpleNamespace(report=lambda: report, mesh_name=mesh)


class Watched:
    """Meshes that hear of deaths from Monarch and from the kernel. `trainer` has two ranks; the second is a real process."""

    def __init__(self) -> None:
        self.meshes = Meshes(Config())
        self.meshes.watch()
        self.process: Any = SimpleNamespace()
        self.child = run("sleep", "600")
        mesh: Any = SimpleNamespace()
        self.meshes._meshes["trainer"] = mesh, self.process
        Child(self.child.pid, partial(self.meshes._child_ended, "trainer", self.process, "trainer 1"))

    def monarch_tells(self, mesh: str = "trainer_process-2dRz") -> None:
        hook: Any = monarch.actor.unhandled_fault_hook
        hook(failure(KILLED, mesh))

    async def until(self, future: asyncio.Future[Any]) -> None:
        await asyncio.wait({future}, timeout=60)
        assert future.done()


@pytest.fixture
def watched(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    monkeypatch.setattr("monarch.actor.unhandled_fault_hook", None)
    made: list[Watched] = []

    def make() -> Watched:
        made.append(Watched())
        return made[0]

    yield make
    made[0].child.kill()
    made[0].child.wait()


async def test_a_death_that_the_kernel_tells_of_is_known_without_monarch(watched: Any) -> None:
    """And mourned once: what Monarch says of it later changes nothing."""
    seen = watched()
    seen.child.kill()
    await seen.until(seen.meshes.fault)
    died = seen.meshes.fault.exception()
    assert str(died) == "trainer 1 was killed by signal 9 (SIGKILL)"
    seen.monarch_tells()
    await asyncio.sleep(0.01)
    assert seen.meshes.fault.exception() is died


async def test_who_deals_with_a_death_hears_of_it_once_whoever_tells_first(watched: Any) -> None:
    seen = watched()
    left = seen.meshes.leave("trainer")
    seen.monarch_tells()
    await seen.until(left)
    seen.child.kill()
    seen.child.wait()
    await asyncio.sleep(2 * MANNER_S)
    assert left.result() == "trainer 1 was killed by signal 9 (SIGKILL)"
    assert not seen.meshes.fault.done()


async def test_late_news_of_a_mesh_that_was_replaced_are_not_about_the_new_one(watched: Any) -> None:
    seen = watched()
    seen.meshes._former.add("trainer_process-2dRz")
    again = seen.meshes.heed("trainer")
    other: Any = SimpleNamespace()
    seen.meshes._meshes["trainer"] = other, other
    seen.monarch_tells()
    seen.child.kill()
    seen.child.wait()
    await asyncio.sleep(2 * MANNER_S)
    assert not again.done()
    assert not seen.meshes.fault.done()
    seen.monarch_tells("trainer_process-9kQx")
    await seen.until(again)


async def test_how_a_process_ended_is_told_by_monarch_where_the_kernel_has_told_it_already(watched: Any) -> None:
    seen = watched()
    seen.meshes._child_ended("trainer", seen.process, "trainer 1", "")
    seen.monarch_tells()
    await seen.until(seen.meshes.fault)
    assert str(seen.meshes.fault.exception()) == "trainer 1 was killed by signal 9 (SIGKILL)"
    other = Meshes(Config())
    other._meshes["trainer"] = seen.meshes._meshes["trainer"]
    other._child_ended("trainer", seen.process, "trainer 1", "")
    await seen.until(other.fault)
    assert str(other.fault.exception()) == "trainer 1 is gone"


@pytest.mark.parametrize(("command", "how"), [("exit 3", "ended with exit code 3"), ("kill -TERM $$", "was killed by signal 15 (SIGTERM)")])
async def test_a_process_that_has_ended_is_heard_of_and_left_to_its_parent(command: str, how: str) -> None:
    heard: asyncio.Queue[str] = asyncio.Queue()
    process = run("sh", "-c", command)
    Child(process.pid, heard.put_nowait)
    assert await asyncio.wait_for(heard.get(), 60) == how
    assert process.wait() == (3 if "exit" in command else -signal.SIGTERM)
    Child(process.pid, heard.put_nowait)
    assert await asyncio.wait_for(heard.get(), 60) == "", "nobody is there to ask"


async def test_how_a_process_ended_is_known_though_its_parent_has_asked_first() -> None:
    heard: asyncio.Queue[str] = asyncio.Queue()
    process = run("sleep", "600")
    Child(process.pid, heard.put_nowait)
    process.kill()
    process.wait()
    kept = tuple(map(int, os.uname().release.split(".")[:2])) >= (6, 15)
    assert await asyncio.wait_for(heard.get(), 60) == ("was killed by signal 9 (SIGKILL)" if kept else "")


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
async def test_how_a_process_ended_is_known_of_a_zombie_whose_parent_does_not_ask(number: signal.Signals) -> None:
    heard: asyncio.Queue[str] = asyncio.Queue()
    parent = run("sh", "-c", "sleep 600 & exec sleep 601")
    async with asyncio.timeout(60):
        while not (children := psutil.Process(parent.pid).children()):  # noqa: ASYNC110
            await asyncio.sleep(0.01)
    Child(children[0].pid, heard.put_nowait)
    children[0].send_signal(number)
    assert await asyncio.wait_for(heard.get(), 60) == f"was killed by signal {number.value} ({number.name})"
    parent.kill()
    parent.wait()


@pytest.mark.parametrize("tells", [True, False], ids=["the kernel tells", "it does not"])
async def test_a_stopped_process_is_ended(tells: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if not tells:
        monkeypatch.setattr(os, "pidfd_open", not_implemented)
    heard: asyncio.Queue[str] = asyncio.Queue()
    process = run("sleep", "600")
    child = Child(process.pid, heard.put_nowait)
    process.send_signal(signal.SIGSTOP)
    child.kill()
    assert await asyncio.wait_for(heard.get(), 60) == ("was killed by signal 9 (SIGKILL)" if tells else "")
    assert child.ended
    process.wait()
    child.kill()  # which is nothing to it any more


async def test_one_that_has_ended_before_anybody_listens_is_heard_of_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "pidfd_open", not_implemented)
    heard: asyncio.Queue[str] = asyncio.Queue()
    process = run("true")
    process.wait()
    assert Child(process.pid, heard.put_nowait).ended
    assert await asyncio.wait_for(heard.get(), 60) == ""


def not_implemented(_: int) -> int:
    """As some sandboxes answer."""
    raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS))


async def test_actors_of_monarch_are_not_mourned(monkeypatch: pytest.MonkeyPatch) -> None:
    """It has one in each mesh that joins a process group, which may be told of seconds after the mesh was ended."""
    monkeypatch.setattr("monarch.actor.unhandled_fault_hook", None)
    running = Meshes(Config())
    running.watch()
    hook: Any = monarch.actor.unhandled_fault_hook
    theirs = "actor <root>.<monarch.spmd.SPMDActor _SPMDActor{'tp': 0/2}> failed: cleanup error: deadline has elapsed"
    hook(failure(theirs))
    await asyncio.sleep(0.01)
    assert not running.fault.done()
    hook(failure(theirs.replace("_SPMDActor{", "replay_buffer{")))
    await asyncio.sleep(0.01)
    assert str(running.fault.exception()) == "replay buffer 0 ended: cleanup error: deadline has elapsed"


FIRST_IMPORT = """
import asyncio, os, sys

class Seen:
    def find_spec(self, name, *_):
        if name == "monarch":
            sys.meta_path.remove(self)
            print(os.environ.get("HYPERACTOR_MESH_SUPERVISION_POLL_FREQUENCY"))

sys.meta_path.insert(0, Seen())
from monarch_rl.config import Config
from monarch_rl.session import Session

async def main():
    Session(Config())._meshes.watch()

asyncio.run(main())
"""


def test_monarch_finds_its_settings_when_a_session_imports_it_first() -> None:
    """It reads them once."""
    bare = {key: value for key, value in os.environ.items() if key not in MONARCH_ENVIRONMENT}
    done = subprocess.run([sys.executable, "-c", FIRST_IMPORT], env=bare, capture_output=True, text=True, timeout=200)
    assert done.stdout == "30s\n", done.stderr
