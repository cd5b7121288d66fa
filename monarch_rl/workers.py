"""The rollout workers and the scorers of a session: a pool each."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

from monarch_rl.calls import Calls
from monarch_rl.config import Config
from monarch_rl.engine_errors import is_lost
from monarch_rl.meshes import START_DEADLINE_S, Meshes
from monarch_rl.pool import Pool, for_ever
from monarch_rl.routes import Routes
from monarch_rl.supervise import answer, ended

if TYPE_CHECKING:
    from monarch.actor import Future

    from actors.generator import Generator
    from actors.metrics import Metrics
    from actors.replay_buffer import ReplayBuffer
    from actors.rollout import RolloutWorker
    from actors.scorer import Scorer

TELL_S = 120.0
"""For a worker to hear of something, beyond the time after which one that stands still is replaced."""


class Known(NamedTuple):
    """Whom a rollout worker deals with."""

    buffer: ReplayBuffer
    generators: Mapping[int, Generator]
    scorers: Mapping[int, Scorer]
    metrics: Metrics


class RolloutWorkers:
    """They take leases as long as they live; what one that is lost had leased goes back to the replay buffer."""

    name = "rollout"

    def __init__(self, config: Config, meshes: Meshes, known: Known, say: Callable[[str], None]) -> None:
        self._config, self._meshes, self._known, self._calls = config, meshes, known, Calls()
        self.pool: Pool[RolloutWorker] = Pool(self, config.rollout, meshes, say)
        self.routes: Routes[RolloutWorker] = Routes({}, self.name)

    def begin(self, tasks: asyncio.TaskGroup) -> None:
        """From now on they work, and one that is lost is replaced."""
        self._tasks = tasks
        self.pool.begin(tasks)

    async def each(self, ask: Callable[[RolloutWorker], Future[Any]], who: str, deadline_s: float | None = None) -> None:
        """Ask all of them. One that is lost meanwhile need not answer: what replaces it begins with how things are then. Without
        `deadline_s` there is time enough for one that stands still to be replaced.

        Raises:
            NamedTimeout: one does not answer in time.
        """

        async def asked(worker: RolloutWorker) -> None:
            try:
                await answer(ask(worker), who, deadline_s or self._config.rollout.hang_s + TELL_S)
            except Exception as error:
                if not is_lost(error):
                    raise

        await asyncio.gather(*[asked(worker) for worker in self.pool.live.values()])

    def tell(self, ask: Callable[[RolloutWorker], Future[Any]]) -> None:
        """`each`, without waiting for it."""
        who = "rollout workers (who is there)"
        self._tasks.create_task(self.each(ask, who), name=who)

    # --- what the pool asks for -------------------------------------------------------------------------------------

    def spawn(self, number: int) -> RolloutWorker:
        from actors.rollout import RolloutWorker

        mesh: Any = self._meshes.spawn_worker(self.name, number)
        worker: RolloutWorker = mesh.spawn(f"rollout_{number}", RolloutWorker, self._config, number, *self._known)
        return worker

    async def ready(self, number: int, worker: RolloutWorker) -> None:
        await answer(worker.alive.call_one(), f"rollout {number} (start)", START_DEADLINE_S)

    def joins(self, number: int, worker: RolloutWorker) -> None:
        self.routes.add(number, worker)

    def lost(self, number: int) -> None:
        self.routes.lose(number)
        given_back = answer(self._known.buffer.release.call_one(f"rollout {number}"), "replay buffer (release)", TELL_S)
        self._tasks.create_task(given_back, name=f"leases of rollout {number}")

    async def work(self, number: int, worker: RolloutWorker) -> str:
        await ended(worker.work.call_one().as_asyncio())
        await ended(worker.until_lost.call_one().as_asyncio())
        return await for_ever()

    async def progress(self, number: int, worker: RolloutWorker) -> None:
        await self._calls.one(worker.alive)


class Scorers:
    """What one that is lost was asked is asked of others."""

    name = "scorer"

    def __init__(self, config: Config, meshes: Meshes, metrics: Metrics, say: Callable[[str], None]) -> None:
        self._config, self._meshes, self._metrics, self._calls = config, meshes, metrics, Calls()
        self.pool: Pool[Scorer] = Pool(self, config.scorer, meshes, say)

    def begin(self, tasks: asyncio.TaskGroup, rollouts: RolloutWorkers) -> None:
        """From now on one that is lost is replaced; `rollouts` are told who is there."""
        self._rollouts = rollouts
        self.pool.begin(tasks)

    # --- what the pool asks for -------------------------------------------------------------------------------------

    def spawn(self, number: int) -> Scorer:
        from actors.scorer import Scorer

        config = self._config
        judged_by = config.task, config.task_args, config.seed, config.scorer.deadline_s, config.scorer.memory_mb
        mesh: Any = self._meshes.spawn_worker(self.name, number)
        scorer: Scorer = mesh.spawn(f"scorer_{number}", Scorer, *judged_by, number, self._metrics)
        return scorer

    async def ready(self, number: int, scorer: Scorer) -> None:
        await answer(scorer.load.call_one(), f"scorer {number} (start)", START_DEADLINE_S)

    def joins(self, number: int, scorer: Scorer) -> None:
        self._rollouts.tell(lambda worker: worker.add_scorer.call_one(number, scorer))

    def lost(self, number: int) -> None:
        self._rollouts.tell(lambda worker: worker.lose_scorer.call_one(number))

    async def work(self, number: int, scorer: Scorer) -> str:
        await ended(scorer.until_lost.call_one().as_asyncio())
        return await for_ever()

    async def progress(self, number: int, scorer: Scorer) -> None:
        await self._calls.one(scorer.alive)
