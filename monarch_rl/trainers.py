"""The trainer ranks of a session and their publishers: started, watched, and where one is lost all started again."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from monarch_rl.config import Config, can_restart
from monarch_rl.meshes import DEATH_NOTICE_S, START_DEADLINE_S, ActorDied, Meshes, unless_dead
from monarch_rl.pool import BACK_OFF_S, MOST_BACK_OFF_S, until_stuck
from monarch_rl.replicas import Source
from monarch_rl.supervise import answer, stillborn

if TYPE_CHECKING:
    from actors.replay_buffer import ReplayBuffer
    from monarch_rl.weights.plan import LoadPlan

T = TypeVar("T")

MESH = "trainer"
REASON_S = 5.0
"""Longest for Monarch to tell why a process is gone, when it knows that it is."""


class Trainers:
    """One mesh at a time. Collectives bind its ranks together, so that the loss of one is the loss of all."""

    def __init__(self, config: Config, meshes: Meshes, buffer: ReplayBuffer, lineage: int) -> None:
        self._config, self._meshes, self._buffer = config, meshes, buffer
        self._may_restart = can_restart(config)  # the buffer keeps what that takes from its start
        self._steps = config.steps  # that the learning rate goes by, also where the data end before
        self._restarts = 0
        self._lost: asyncio.Future[str] | None = None
        self._down = False
        self.lineage = lineage
        """Of the versions that they make."""
        self.renewed: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        """Done when they have been restarted; then another takes its place."""
        self._spawn()

    def _spawn(self) -> None:
        from actors.publisher import Publisher
        from actors.trainer import Trainer

        mesh = self._meshes[MESH]
        config = replace(self._config, steps=self._steps)
        self.ranks: Any = mesh.spawn("trainer", Trainer, config, self._buffer, self.lineage)
        self.publishers: Any = mesh.spawn("publisher", Publisher)

    async def answer(self, reply: Awaitable[T], who: str, deadline_s: float | None) -> T:
        """As `supervise.answer`. Raises ActorDied as soon as one of them is lost."""
        return await unless_dead(answer(reply, who, deadline_s), self._meshes.fault if self._lost is None else self._lost)

    async def load(self, found: Path | None) -> None:
        """Join the process group, load the model, and go on from a checkpoint where there is one."""
        from monarch.spmd import setup_torch_elastic_env_async

        await self.answer(setup_torch_elastic_env_async(self._meshes[MESH]), "trainer processes", START_DEADLINE_S)
        await self.answer(self.ranks.setup.call(), "trainers (model load)", START_DEADLINE_S)
        if found is not None:
            await self.answer(self.ranks.restore.call(found), "trainers (checkpoint)", START_DEADLINE_S)

    async def open_rings(self, plans: list[LoadPlan]) -> Source:
        """Have them lay out what they publish as the ranks of a generator want it."""
        rings = await self.answer(self.ranks.open_ring.call(plans), "trainers (staging slots)", START_DEADLINE_S)
        return Source(self.publishers, list(rings.values()), [plan.digest for plan in plans], await self._base(plans))

    async def _base(self, plans: list[LoadPlan]) -> list[dict[str, int]]:
        """Fingerprints of what the ranks of a generator have read from the model's directory, for them to compare."""
        read = [plan.base for plan in plans if plan.base is not None]
        if not read or self._config.weights.verify == "off":
            return []
        ranks = await self.answer(self.ranks.fingerprints.call(read), "trainers (base model)", START_DEADLINE_S)
        return list(next(iter(ranks.values())))

    # --- restarting -------------------------------------------------------------------------------------------------

    def watch(self) -> None:
        """From now on `lost` hears of what becomes of them."""
        self._lost = self._meshes.heed(MESH)

    async def lost(self) -> str:
        """Waits until one is, and says why: its process has died, or has not answered for `trainer.hang_s`."""
        assert self._lost is not None
        stuck = asyncio.ensure_future(self._until_stuck())
        try:
            await asyncio.wait({self._lost, stuck}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            stuck.cancel()
        if not self._lost.done():
            self._lost.set_result(stuck.result())
        self._down = True
        return self._lost.result()

    def check(self) -> None:
        """Raises ActorDied: they are lost, as far as is known, and not started again yet."""
        if self._down or (self._lost is not None and self._lost.done()):
            raise ActorDied("the trainers are lost")

    async def are_lost(self, error: Exception) -> bool:
        """Whether they are, as `error` suggests that they were asked with, and are not started again yet."""
        return self._down or await self.one_died(error)

    async def one_died(self, error: Exception) -> bool:
        """Whether one of those that were started last is lost; waits for the news of what has just happened."""
        from monarch._rust_bindings.monarch_hyperactor.supervision import SupervisionError

        if self._lost is None:
            return False
        unborn = stillborn(str(error))
        gone = isinstance(error, SupervisionError) or bool(unborn)
        await asyncio.wait({self._lost}, timeout=REASON_S if gone else DEATH_NOTICE_S)
        if gone and not self._lost.done():
            self._lost.set_result(unborn or "trainer is gone")
        return self._lost.done()

    async def renew(self, why: str) -> None:
        """End all ranks, whatever state they are in, and start the processes of others, of the next lineage.

        Raises:
            ActorDied: they may not be restarted (again).
        """
        most = self._config.trainer.max_restarts
        if not self._may_restart:
            hint = "" if most == 0 or self._config.replay else "; with checkpoint.every=N it would start again from the last checkpoint"
            raise ActorDied(f"{why}{hint}")
        if self._restarts == most:
            raise ActorDied(f"{why} (trainer.max_restarts={most} were used up)")
        if self._restarts:
            await asyncio.sleep(min(MOST_BACK_OFF_S, BACK_OFF_S * 2 ** (self._restarts - 1)))
        self._restarts += 1
        self.lineage += 1
        await self._meshes.renew(MESH)
        self.watch()
        self._spawn()

    def are_renewed(self) -> None:
        """They go on from where they were told, and are watched."""
        self.watch()
        self._down = False
        renewed, self.renewed = self.renewed, asyncio.get_running_loop().create_future()
        renewed.set_result(None)

    async def _until_stuck(self) -> str:
        """Says so when the processes have answered nothing for `trainer.hang_s`: a rank itself is busy for as long as a step takes."""
        hang_s = self._config.trainer.hang_s
        await until_stuck(self._alive, hang_s)
        return f"trainer answered nothing for {hang_s:g} s"

    async def _alive(self) -> None:
        await self.publishers.alive.call().as_asyncio()
