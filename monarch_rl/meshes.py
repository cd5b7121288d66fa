"""The process meshes of a session: started, watched, and ended again."""

from __future__ import annotations

import asyncio
import contextlib
import re
from collections import defaultdict
from collections.abc import Awaitable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from monarch_rl.cluster.children import Child
from monarch_rl.cluster.hosts import Hosts
from monarch_rl.cluster.link import Distant
from monarch_rl.cluster.machine import set_monarch_up
from monarch_rl.cluster.placement import Processes, place_generator, place_single, place_worker
from monarch_rl.config import Config
from monarch_rl.supervise import DEATH, PROCESS_DIED, answer, named, obituary

if TYPE_CHECKING:
    from monarch.actor import MeshFailure, ProcMesh

    from actors.process import Process

T = TypeVar("T")

START_DEADLINE_S = 900.0
"""A large model may take minutes to load."""
LEAVE_DEADLINE_S = 30.0
"""For the processes of a mesh to end that is not needed any more."""
END_DEADLINE_S = 2.0
"""For a process to answer that it ends, when others of its mesh may be dead."""
LEAVE_S = 0.1
"""From when a process says that it ends until it does, for the word to get out."""
DEATH_NOTICE_S = 1.5
"""So long may it take to hear of a death after its consequences: the loops that tell of it may be busy."""
MANNER_S = 0.5
"""For Monarch to tell how a process has ended, where it has asked the kernel first."""

OOM_KILLS = Path("/proc/vmstat")
"""Where the kernel counts the processes of this host that it ended because memory had run out."""


class ActorDied(Exception):
    """A process of the system ended by itself."""


def first_failure(error: BaseException) -> BaseException:
    """Of a task group that has ended: a root cause before what it dragged along."""
    while isinstance(error, BaseExceptionGroup):
        error = min(error.exceptions, key=lambda e: isinstance(e, ActorDied))
    return error


async def unless_dead(waited: Awaitable[T], died: asyncio.Future[Any]) -> T:
    """What comes of a question to a process.

    Raises:
        ActorDied: it has died meanwhile, or `died` says so itself. Monarch may take long to tell.
    """
    asked = asyncio.ensure_future(waited)
    asked.add_done_callback(lambda done: done.cancelled() or done.exception())  # it may end when nobody waits for it any more
    try:
        await asyncio.wait({asked, died}, return_when=asyncio.FIRST_COMPLETED)
        if asked.done():
            return asked.result()
        raise ActorDied(died.result())
    finally:
        asked.cancel()


class Meshes:
    """Process meshes by name. `fault` fails when a process dies that nobody has ended."""

    def __init__(self, config: Config) -> None:
        self._config = config
        self._meshes: dict[str, tuple[ProcMesh, Process]] = {}
        self._placed: dict[str, Processes] = {}
        self.hosts = Hosts(config)
        self._ended: set[str] = set()
        self._gone: set[str] = set()  # asking them anything is a wait for Monarch to take note
        self._left: dict[str, asyncio.Future[str]] = {}
        self._children: defaultdict[str, list[Child | Distant]] = defaultdict(list)
        self._listening: dict[str, asyncio.Task[None]] = {}
        self._former: set[str] = set()  # Monarch's names of meshes that others of the same name have replaced
        self._oom_kills = oom_kills()
        self.fault: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.fault.add_done_callback(lambda fault: fault.cancelled() or fault.exception())  # may come when nobody waits for it

    def __getitem__(self, name: str) -> ProcMesh:
        return self._meshes[name][0]

    def processes(self) -> dict[str, Process]:
        """The actor of each mesh that can end it and tell its time."""
        return {name: process for name, (_, process) in self._meshes.items()}

    def watch(self) -> None:
        """Hear of deaths from now on. Monarch has one hook for it in a process, so this is for one session at a time."""
        set_monarch_up()
        import monarch.actor

        loop = asyncio.get_running_loop()

        def hook(failure: MeshFailure) -> None:
            # A process is mourned once, by its Process actor; and Monarch has actors of its own: without an obituary, or with a name that
            # begins with _. That a process is out of reach may be late news of an earlier session, whose names were the same: calls to
            # one of this session fail.
            report = failure.report()
            died = None if failure.mesh_name in self._former else DEATH.search(report)
            if died and not died["actor"].startswith("_") and ("_process{" in report or not PROCESS_DIED.search(report)):
                loop.call_soon_threadsafe(self._died, report, obituary(report))

        monarch.actor.unhandled_fault_hook = hook

    async def open(self) -> None:
        """Start trainer and replay buffer, on hosts whose loss is a death. Raises UserError as `Hosts.open` does."""
        loop = asyncio.get_running_loop()
        await self.hosts.open(lambda lost: loop.call_soon_threadsafe(self._lost, lost))
        for processes in place_single(self._config, self.hosts.facts):
            self._spawn(processes)

    def spawn_generator(self, number: int) -> ProcMesh:
        """One more, where there are the fewest."""
        return self._spawn(place_generator(number, self._config, self.hosts.facts, self._placed.values()))

    def spawn_worker(self, role: str, number: int) -> ProcMesh:
        """One more rollout worker or scorer, where there are the fewest."""
        return self._spawn(place_worker(role, number, self._config, self.hosts.facts, self._placed.values()))

    def _spawn(self, processes: Processes) -> ProcMesh:
        from actors.process import Process

        mesh, name = self.hosts.spawn(processes), processes.name
        self._placed[name] = processes
        self._meshes[name] = mesh, mesh.spawn(f"{name}_process", Process)
        self._listening[name] = asyncio.ensure_future(self._listen(name))
        return mesh

    async def _listen(self, name: str) -> None:
        """Hear at once when one of these processes ends, as soon as they have told which they are."""
        process, placed = self._meshes[name][1], self._placed[name]
        try:
            usages = await answer(process.usage.call(), f"{name.replace('_', ' ')} (process)", START_DEADLINE_S)
        except Exception:  # one has died before, which Monarch tells
            return
        for rank, usage in enumerate(usages.values()):
            who = named(name, rank, len(usages))
            ended = partial(self._child_ended, name, process, who)
            self._children[name].append(self.hosts.child(placed, rank, usage.pid, ended))

    async def alive(self, who: str, waited: Awaitable[T]) -> T:
        """Await something that may take long, unless a process dies meanwhile."""
        return await unless_dead(answer(waited, who, START_DEADLINE_S), self.fault)

    def leave(self, name: str) -> asyncio.Future[str]:
        """The death of this mesh is another's to deal with: `fault` is not told. The result says how it died."""
        return self._left.setdefault(name, asyncio.get_running_loop().create_future())

    async def renew(self, name: str) -> None:
        """End a mesh that was left, in whatever state it is, and start its processes again where they were."""
        placed = self._placed[name]
        process: Any = self._meshes[name][1]
        with contextlib.suppress(Exception):  # one whose processes died before they were there has no name
            async with asyncio.timeout(END_DEADLINE_S):
                self._former.add(await process._name.as_asyncio())
        await self.bury(name)
        self._gone.discard(name)
        self._spawn(placed)

    def heed(self, name: str) -> asyncio.Future[str]:
        """As `leave`, of a mesh that was renewed: from here on its deaths are its own, and not those of the one before."""
        self._left.pop(name, None)
        return self.leave(name)

    def vacate(self, name: str) -> None:
        """What is spawned from now on may take its place: this mesh is going to end."""
        self._placed.pop(name, None)

    async def death(self) -> BaseException | None:
        """Why a process died, if one has; waits for the news of what has just happened."""
        await asyncio.wait({self.fault}, timeout=DEATH_NOTICE_S)
        return self.fault.exception() if self.fault.done() and not self.fault.cancelled() else None

    async def end(self, *names: str) -> None:
        """End processes; they are gone when this returns, and nobody is told that they died."""
        known = [name for name in names if name in self._meshes and name not in self._gone]
        self._ended.update(known)
        replies = [self._meshes[name][1].end.call(LEAVE_S).as_asyncio() for name in known]
        await asyncio.gather(*replies, return_exceptions=True)
        self._gone.update(known)
        await asyncio.sleep(2 * LEAVE_S)

    async def stop(self, *names: str) -> None:
        """Have Monarch take note that processes are gone. It waits longer for those that were still starting."""
        known = [name for name in names if name in self._meshes]
        meshes = [self._meshes.pop(name)[0] for name in known]
        for mesh in meshes:
            # In a notebook Monarch would first have the processes flush their logs, and wait for the dead ones for ever.
            mesh._logging_manager._logging_mesh_client = None
        stopped = [mesh.stop() for mesh in meshes]
        for name in names:
            self.vacate(name)
        for name in known:
            if name in self._listening:
                self._listening.pop(name).cancel()
        try:
            await asyncio.gather(*stopped, return_exceptions=True)
        finally:
            for name in known:
                self._kill(name)

    async def bury(self, name: str) -> None:
        """End what is left of a mesh, in whatever state it is."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(LEAVE_DEADLINE_S):
                await self._end_left(name)
                await self.stop(name)

    async def _end_left(self, name: str) -> None:
        """Those ranks that still answer: each is asked by itself, as one that is dead makes calls to all fail."""
        if name not in self._meshes:
            return
        ranks: Any = self._meshes[name][1].flatten("rank")
        dead = {rank for rank, child in enumerate(self._children.get(name, ())) if child.ended}
        asked = [ranks.slice(rank=rank).end.call_one(LEAVE_S).as_asyncio() for rank in range(ranks.size()) if rank not in dead]
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(END_DEADLINE_S):
                await asyncio.gather(*asked, return_exceptions=True)
                await asyncio.sleep(2 * LEAVE_S)

    async def close(self, deadline_s: float, notice_s: float) -> None:
        """End all processes within `deadline_s`, let Monarch take note for `notice_s`, then let the hosts go."""
        self.fault.cancel()  # whatever dies from here on is meant to
        names = tuple(self._meshes)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(deadline_s):
                await self.end(*names)
        for name in names:
            self._kill(name)  # what is stopped, or deaf
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(notice_s):
                await self.stop(*names)
        await self.hosts.close()

    def _kill(self, name: str) -> None:
        """Those of its processes that have not ended."""
        for child in self._children.pop(name, ()):
            child.kill()

    def _lost(self, what: str) -> None:
        if not self.fault.done():
            self.fault.set_exception(ActorDied(what))

    def _died(self, report: str, died: str) -> None:
        known = [name for name in {*self._ended, *self._left} if f"{name}_process{{" in report or f"{name}{{" in report]
        if PROCESS_DIED.search(report):
            self._gone.update(known)
        for name in known or [""]:
            self._mourn(name, died)

    def _child_ended(self, name: str, process: Process, who: str, how: str) -> None:
        if name not in self._meshes or self._meshes[name][1] is not process:
            return  # it was stopped
        self._gone.add(name)
        if how:
            self._mourn(name, f"{who} {how}")
        else:  # unless Monarch tells in time
            asyncio.get_running_loop().call_later(MANNER_S, self._child_ended, name, process, who, "is gone")

    def _mourn(self, name: str, died: str) -> None:
        """Once, whoever brings the news first."""
        if "(SIGKILL)" in died and oom_kills() > self._oom_kills:
            died += ", when memory had run out on this host"
        left = self._left.get(name)
        if left is not None and not left.done():
            left.set_result(died)
        elif left is None and name not in self._ended:
            self._lost(died)

    def hung(self, name: str) -> None:
        """A process of this mesh gives no sign of life: as good as dead, unless another deals with it."""
        if name not in self._ended and name not in self._left:
            self._gone.add(name)
            self._lost(f"{name.replace('_', ' ')} gave no sign of life for {self._config.buffer.hang_s:g} s")


def oom_kills() -> int:
    """So many so far; 0 where the kernel does not say."""
    try:
        found = re.search(r"^oom_kill (\d+)$", OOM_KILLS.read_text(), re.MULTILINE)
    except OSError:
        return 0
    return int(found[1]) if found else 0
