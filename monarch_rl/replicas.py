"""The generators of a session: a pool whose members follow the trainer, and whose size can change while it runs."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Iterable
from typing import TYPE_CHECKING, Any, NamedTuple

from monarch_rl.config import Config, UserError
from monarch_rl.engine_errors import EngineError, is_lost
from monarch_rl.meshes import DEATH_NOTICE_S, LEAVE_DEADLINE_S, START_DEADLINE_S, Meshes
from monarch_rl.pool import BACK_OFF_S, MOST_BACK_OFF_S, Pool, for_ever
from monarch_rl.supervise import answer, cause, ended, root

if TYPE_CHECKING:
    from actors.generator import Generator
    from actors.metrics import Metrics
    from actors.publisher import Publisher
    from monarch_rl.types import Version
    from monarch_rl.weights.plan import LoadPlan
    from monarch_rl.weights.slots import SlotBuffers
    from monarch_rl.workers import RolloutWorkers


class Source(NamedTuple):
    """Where weights come from."""

    publishers: Publisher
    rings: list[list[list[SlotBuffers]]]
    """Of each trainer rank: for each rank of a generator its slots."""
    plans: list[str]
    """Digests of the load plans that the slots are laid out for, by rank of a generator."""
    base: list[dict[str, int]]
    """Fingerprints of the base model that the ranks of a generator must have read, where only adapters travel."""


class Replicas:
    """A new one takes requests when it holds the newest weights."""

    name = "generator"

    def __init__(self, config: Config, meshes: Meshes, metrics: Metrics, say: Callable[[str], None]) -> None:
        self._config, self._meshes, self._metrics, self._say = config, meshes, metrics, say
        self._starts: dict[int, asyncio.Future[list[LoadPlan]]] = {}
        self._ranks: dict[int, Any] = {}
        self._holding = False
        self._spares: dict[int, Any] = {}
        self._pinning = asyncio.Lock()
        self.pool: Pool[Generator] = Pool(self, config.generator, meshes, say)

    @property
    def live(self) -> dict[int, Generator]:
        """Those that requests may be sent to, and those that start; of each the rank that is asked."""
        return self.pool.live

    @property
    def plans(self) -> list[LoadPlan]:
        """How the engine of each rank cuts the weights; known when the first ones have started."""
        return next(start.result() for number, start in self._starts.items() if self._has_started(number))

    async def started(self, *numbers: int) -> list[LoadPlan]:
        """Wait for engines (all without an argument); the plans of their ranks are the same for all.

        Raises:
            UserError: vLLM refuses the model or a setting. RuntimeError: an engine cuts the weights differently from the first.
        """
        found = await self._meshes.alive("generators (engine start)", asyncio.gather(*[self._starts[n] for n in numbers or self._starts]))
        first = self.plans
        if any([plan.digest for plan in plans] != [plan.digest for plan in first] for plans in found):
            raise RuntimeError("generators cut the weights in different ways; all replicas must share one layout")
        return first

    def begin(self, tasks: asyncio.TaskGroup, source: Source, rollouts: RolloutWorkers) -> None:
        """From now on each replica follows the trainer, and one that is lost is replaced; `rollouts` are told who is there."""
        self._tasks, self._source, self._rollouts = tasks, source, rollouts
        self.pool.begin(tasks)
        self.follow()

    def follow(self) -> None:
        """Have all replicas pull what the trainers publish, until `hold`. One that still starts will by itself."""
        self._holding = False
        self._have_follow(self.live)

    def renew(self, source: Source) -> None:
        """The trainers were started again: from now on weights come from there, also for those that wait for their first."""
        self._source = source
        self._have_follow([number for number in self.live if not self._holding or number not in self.pool.joined])

    async def hold(self) -> None:
        """They pull nothing more."""
        self._holding = True
        await asyncio.gather(*[self._unfollow(number) for number in self.live])

    async def pull(self, number: int, newest: Version) -> None:
        """Have one that does not follow pull once.

        Raises:
            UserError: they follow.
        """
        if not self._holding:
            raise UserError(f"pull({number}): generators follow the trainer and pull by themselves; `hold()` them first")
        publishers, rings, plans, _ = self._source
        await answer(self.live[number].pull.call_one(publishers, rings, plans, newest), f"generator {number} (pull)", LEAVE_DEADLINE_S)

    @contextlib.asynccontextmanager
    async def pinned(self, min_version: int) -> AsyncIterator[int]:
        """A replica that keeps the weights which it holds, at least those of `min_version`, while the body runs. Rollouts that need newer
        ones go to others, or wait where there are none."""
        async with self._pinning:
            number, step = await self._pin(min_version)
            try:
                await self._rollouts.each(lambda worker: worker.pin_generator.call_one(number, step), "rollout workers (pin)")
                yield number
            finally:
                if number in self.live:
                    with contextlib.suppress(Exception):  # it may be dead all the same
                        await answer(self.live[number].unpin.call_one(), f"generator {number} (unpin)", LEAVE_DEADLINE_S)
                await self._rollouts.each(lambda worker: worker.pin_generator.call_one(number, None), "rollout workers (unpin)")

    async def scale(self, count: int) -> None:
        """One that leaves is sent no more requests, and ends after its last."""
        async with self.pool.changing:
            if (more := count - len(self.live)) > 0:
                await asyncio.gather(*[self.pool.add(number) for number in self.pool.spawn(more)])
            for number in sorted(self.live, reverse=True)[: max(0, -more)]:
                await self._remove(number)

    async def shut(self, deadline_s: float) -> None:
        """Have them stop pulling, whatever state they are in."""
        unfollowed = [asyncio.wait_for(self._unfollow(number), deadline_s) for number in self.live]
        await asyncio.gather(*unfollowed, return_exceptions=True)

    def _have_follow(self, numbers: Iterable[int]) -> None:
        for number in numbers:
            if self._has_started(number):
                self._tasks.create_task(self._follow(self.live[number]), name=f"generator {number}")

    def _has_started(self, number: int) -> bool:
        start = self._starts.get(number)  # none of one that is lost
        return start is not None and start.done() and not start.cancelled() and start.exception() is None

    async def _follow(self, generator: Generator) -> None:
        """Answers when it has been told to stop, or the trainers are gone."""
        try:
            await generator.follow.call_one(*self._source).as_asyncio()
        except Exception as error:
            if not is_lost(error):  # the pool hears of it too, and sees to it
                raise

    async def _pin(self, min_version: int) -> tuple[int, int]:
        """The number of a replica, and the step that it keeps to. One that is lost before it answers is replaced meanwhile."""
        while True:
            if here := self.pool.joined or self.live:
                number = min(here)
                try:
                    return number, await answer(here[number].pin.call_one(min_version), f"generator {number} (pin)", START_DEADLINE_S)
                except Exception as error:
                    if not is_lost(error):
                        raise
            await asyncio.sleep(BACK_OFF_S)

    async def _unfollow(self, number: int) -> None:
        await answer(self.live[number].unfollow.call_one(), f"generator {number} (stop pulling)", LEAVE_DEADLINE_S)

    async def _remove(self, number: int) -> None:
        who = f"generator {number} (last requests)"
        await self._rollouts.each(lambda worker: worker.drain_generator.call_one(number), who, self._config.rollout.deadline_s)
        with contextlib.suppress(Exception):  # it may be dead by now
            await answer(self.live[number].shut.call_one(), f"generator {number} (closing)", LEAVE_DEADLINE_S)
            await self._meshes.end(f"generator_{number}")
        await self.pool.bury(number)

    # --- what the pool asks for -------------------------------------------------------------------------------------

    def spawn(self, number: int) -> Generator:
        ranks = self._ranks[number] = self._spares.pop(number, None) or self._process(number)
        self._starts[number] = asyncio.ensure_future(self._start(number))
        return ranks.slice(tp=0)  # type: ignore[no-any-return]

    async def _start(self, number: int) -> list[LoadPlan]:
        ranks = self._ranks[number]
        if self._config.generator.tensor_parallel == 1:
            return [await ranks.start.call_one().as_asyncio()]
        from monarch.spmd import setup_torch_elastic_env_async

        await setup_torch_elastic_env_async(self._meshes[f"generator_{number}"])
        return list((await ranks.start.call(ranks)).values())

    async def ready(self, number: int, generator: Generator) -> None:
        await self.started(number)
        following = asyncio.ensure_future(self._follow(generator))
        pulled = asyncio.ensure_future(answer(generator.ready.call_one(0), f"generator {number} (first pull)", START_DEADLINE_S))
        pulled.add_done_callback(lambda done: done.cancelled() or done.exception())  # where it is lost, `following` may tell first
        try:
            await asyncio.wait({following, pulled}, return_when=asyncio.FIRST_COMPLETED)
            if following.done():
                following.result()  # without a failure the trainers are gone: it is told to follow those that take their place
            await pulled
        finally:
            pulled.cancel()
        self._tasks.create_task(ended(following), name=f"generator {number}")

    def joins(self, number: int, generator: Generator) -> None:
        self._rollouts.tell(lambda worker: worker.add_generator.call_one(number, generator))
        self._keep_spares()

    def lost(self, number: int) -> None:
        self._starts.pop(number).cancel()
        del self._ranks[number]
        self._rollouts.tell(lambda worker: worker.lose_generator.call_one(number))
        self._metrics.ended.broadcast(number)

    async def work(self, number: int, generator: Generator) -> str:
        try:
            await self._until_one_fails(number)
        except Exception as error:
            if not isinstance(root(error), EngineError):
                raise
            if self._config.generator.tensor_parallel > 1:
                await asyncio.sleep(DEATH_NOTICE_S)  # where another rank has died, that is what others tell
            return cause(error)
        return await for_ever()

    async def _until_one_fails(self, number: int) -> None:
        """Of the ranks of a replica, by which all are lost."""
        ranks = self._ranks[number]
        count = self._config.generator.tensor_parallel
        watched = [asyncio.ensure_future(ranks.slice(tp=rank).shut_or_failed.call_one().as_asyncio()) for rank in range(count)]
        try:
            done, _ = await asyncio.wait(watched, return_when=asyncio.FIRST_COMPLETED)
            for over in done:
                over.result()
        finally:
            for watch in watched:
                watch.cancel()

    async def progress(self, number: int, generator: Generator) -> int | None:
        """Decode steps, when all ranks have answered."""
        ranks = await self._ranks[number].steps.call().as_asyncio()
        steps: int | None = next(iter(ranks.values()))
        return steps

    # --- spares -----------------------------------------------------------------------------------------------------

    def _process(self, number: int) -> Any:
        return self._actor(number, self._meshes.spawn_generator(number))

    def _actor(self, number: int, mesh: Any) -> Any:
        from actors.generator import Generator

        return mesh.spawn(f"generator_{number}", Generator, self._config, number, self._metrics)

    def _keep_spares(self) -> None:
        """Have processes wait for the numbers that come next."""
        for number in range(self.pool.next, self.pool.next + self._config.generator.spares):
            if number not in self._spares:
                self._spares[number] = self._process(number)
                self._tasks.create_task(self._keep_spare(number), name=f"generator {number} (spare)")

    async def _keep_spare(self, number: int) -> None:
        """Until it is needed. One that dies before is started again, as often as a generator may be; after that its death is found out
        when it is needed."""
        mesh = f"generator_{number}"
        died = self._meshes.leave(mesh)
        for restart in range(self._config.generator.max_restarts):
            warming = asyncio.ensure_future(self._warm_up(number))
            try:
                await asyncio.wait({died})
            finally:
                warming.cancel()
            await asyncio.sleep(min(MOST_BACK_OFF_S, BACK_OFF_S * 2**restart))
            async with self.pool.changing:  # nobody takes it meanwhile
                if number not in self._spares:
                    return
                self._say(f"{died.result()}; another spare takes its place")
                await self._meshes.renew(mesh)
                died = self._meshes.heed(mesh)
                self._spares[number] = self._actor(number, self._meshes[mesh])
        await self._warm_up(number)

    async def _warm_up(self, number: int) -> None:
        with contextlib.suppress(Exception):
            await answer(self._spares[number].warm_up.call(), f"generator {number} (spare)", START_DEADLINE_S)
