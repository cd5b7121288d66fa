"""The generators of a session: how many there are can change while it runs, and one that is lost is replaced."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable
from typing import TYPE_CHECKING, Any, NamedTuple

from monarch_rl.config import Config, UserError
from monarch_rl.engine_setup import EngineError, is_lost
from monarch_rl.meshes import START_DEADLINE_S, ActorDied, Meshes
from monarch_rl.supervise import answer, cause, ended, obituary, root

if TYPE_CHECKING:
    from actors.generator import Generator
    from actors.metrics import Metrics
    from actors.publisher import Publisher
    from actors.rollout import RolloutWorker
    from monarch_rl.types import Version
    from monarch_rl.weights.plan import LoadPlan
    from monarch_rl.weights.slots import SlotBuffers

LEAVE_DEADLINE_S = 30.0
TELL_DEADLINE_S = 60.0
LOOKS = 4
"""So many in a row must see a replica stand still before it is taken for stuck."""
NO_ANSWER = -1
BACK_OFF_S = 1.0
"""Before the second replacement in a row; twice as long before each further one."""
MOST_BACK_OFF_S = 60.0


class Source(NamedTuple):
    """Where weights come from."""

    publishers: Publisher
    slots: list[list[SlotBuffers]]
    """Of all trainer ranks."""
    digest: str
    """Of the load plan that the slots are laid out for."""


class Replicas:
    """Generators by number; a number is never given twice."""

    def __init__(self, config: Config, meshes: Meshes, metrics: Metrics, say: Callable[[str], None]) -> None:
        self._config, self._meshes, self._metrics, self._say = config, meshes, metrics, say
        self._next = 0
        self._lost = 0
        self._starts: dict[int, asyncio.Future[LoadPlan]] = {}
        self._changing = asyncio.Lock()
        self._holding = False
        self._pinning = asyncio.Lock()
        self.live: dict[int, Generator] = {}
        """Those that requests may be sent to, and those that start."""

    @property
    def plan(self) -> LoadPlan:
        """How the engines cut the weights; known when the first ones have started."""
        return next(start.result() for start in self._starts.values() if start.done())

    def spawn(self, count: int) -> list[int]:
        """Start processes and engines; returns their numbers at once."""
        numbers = list(range(self._next, self._next + count))
        self._next += count
        from actors.generator import Generator

        for number in numbers:
            self._meshes.spawn_generator(number)
            generator: Any = self._meshes[_name(number)].spawn(_name(number), Generator, self._config, number, self._metrics)
            self.live[number] = generator
            self._starts[number] = asyncio.ensure_future(generator.start.call_one().as_asyncio())
        return numbers

    async def started(self, *numbers: int) -> LoadPlan:
        """Wait for engines (all without an argument); the plan is the same for all.

        Raises:
            UserError: vLLM refuses the model or a setting. RuntimeError: an engine cuts the weights differently from the first.
        """
        plans = await self._meshes.alive("generators (engine start)", asyncio.gather(*[self._starts[n] for n in numbers or self.live]))
        first: LoadPlan = self.plan
        if any(plan.digest != first.digest for plan in plans):
            raise RuntimeError("generators cut the weights in different ways; all replicas must share one layout")
        return first

    def begin(self, tasks: asyncio.TaskGroup, source: Source, rollouts: RolloutWorker) -> None:
        """From now on each replica follows the trainer, and one that is lost is replaced; `rollouts` are told who is there."""
        self._tasks, self._source, self._rollouts = tasks, source, rollouts
        for number in self.live:
            self._tend(number)
        self.follow()

    def follow(self) -> None:
        """Have all replicas pull what the trainers publish, until `hold`. One that still starts will by itself."""
        self._holding = False
        for number in self.live:
            if self._starts[number].done():
                self._tasks.create_task(self._follow(number), name=f"generator {number}")

    def renew(self, source: Source) -> None:
        """The trainers were started again: from now on weights come from there."""
        self._source = source
        if not self._holding:
            self.follow()

    async def hold(self) -> None:
        """They pull nothing more."""
        self._holding = True
        await asyncio.gather(*[self._unfollow(number) for number in self.live])

    async def pull(self, number: int, newest: Version) -> None:
        """Have one that does not follow pull once."""
        publishers, slots, _ = self._source
        await answer(self.live[number].pull.call_one(publishers, slots, newest), f"generator {number} (pull)", LEAVE_DEADLINE_S)

    @contextlib.asynccontextmanager
    async def pinned(self, min_version: int) -> AsyncIterator[int]:
        """A replica that keeps the weights which it holds, at least those of `min_version`, while the body runs. Rollouts that need newer
        ones go to others, or wait where there are none."""
        async with self._pinning:
            number, step = await self._pin(min_version)
            try:
                await answer(self._rollouts.pin_generator.call(number, step), "rollout workers (pin)", TELL_DEADLINE_S)
                yield number
            finally:
                if number in self.live:
                    with contextlib.suppress(Exception):  # it may be dead all the same
                        await answer(self.live[number].unpin.call_one(), f"generator {number} (unpin)", LEAVE_DEADLINE_S)
                await answer(self._rollouts.pin_generator.call(number, None), "rollout workers (unpin)", TELL_DEADLINE_S)

    async def scale(self, count: int) -> None:
        """A new replica takes requests when it holds the newest weights; one that leaves is sent no more, and ends after its last."""
        async with self._changing:
            if (more := count - len(self.live)) > 0:
                await asyncio.gather(*[self._add(number) for number in self.spawn(more)])
            for number in sorted(self.live, reverse=True)[: max(0, -more)]:
                await self._remove(number)

    async def shut(self, deadline_s: float) -> None:
        """Have them stop pulling, whatever state they are in."""
        unfollowed = [asyncio.wait_for(self._unfollow(number), deadline_s) for number in self.live]
        await asyncio.gather(*unfollowed, return_exceptions=True)

    async def _follow(self, number: int) -> None:
        try:
            await self.live[number].follow.call_one(*self._source).as_asyncio()
        except Exception as error:
            if not is_lost(error):  # `_tend` hears of it too, and sees to it
                raise

    async def _pin(self, min_version: int) -> tuple[int, int]:
        """The number of a replica, and the step that it keeps to. One that is lost before it answers is replaced meanwhile."""
        while True:
            number = min(self.live)
            try:
                return number, await answer(self.live[number].pin.call_one(min_version), f"generator {number} (pin)", START_DEADLINE_S)
            except Exception as error:
                if not is_lost(error):
                    raise
            await asyncio.sleep(BACK_OFF_S)

    async def _unfollow(self, number: int) -> None:
        await answer(self.live[number].unfollow.call_one(), f"generator {number} (stop pulling)", LEAVE_DEADLINE_S)

    async def _add(self, number: int) -> None:
        """Let a new replica follow the trainer, and wait until it holds weights. Ends it when it cannot start."""
        self._meshes.leave(_name(number))
        try:
            await self.started(number)
            following = asyncio.ensure_future(self._follow(number))
            ready = asyncio.ensure_future(answer(self.live[number].ready.call_one(0), f"generator {number} (first pull)", START_DEADLINE_S))
            done, _ = await asyncio.wait({following, ready}, return_when=asyncio.FIRST_COMPLETED)
            done.pop().result()
        except Exception as error:
            await self._bury(number)
            raise UserError(f"generator {number} could not be added: {cause(error)}") from error
        self._tasks.create_task(ended(following), name=f"generator {number}")
        self._tend(number)
        await answer(self._rollouts.add_generator.call(number, self.live[number]), "rollout workers (new generator)", TELL_DEADLINE_S)

    async def _remove(self, number: int) -> None:
        await answer(self._rollouts.drain_generator.call(number), f"generator {number} (last requests)", self._config.rollout.deadline_s)
        with contextlib.suppress(Exception):  # it may be dead by now
            await answer(self.live[number].shut.call_one(), f"generator {number} (closing)", LEAVE_DEADLINE_S)
            await self._meshes.end(_name(number))
        await self._bury(number)

    async def _bury(self, number: int) -> None:
        """End a replica, in whatever state it is."""
        del self.live[number]
        self._starts.pop(number).cancel()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(LEAVE_DEADLINE_S):
                await self._meshes.stop(_name(number))
        self._metrics.ended.broadcast(number)

    # --- replacing --------------------------------------------------------------------------------------------------

    def _tend(self, number: int) -> None:
        self._meshes.leave(_name(number))
        self._tasks.create_task(self._replace_when_lost(number), name=f"generator {number} (replacement)")

    async def _replace_when_lost(self, number: int) -> None:
        watched = [asyncio.ensure_future(watch) for watch in (self._until_dead(number), self._until_stuck(number))]
        await asyncio.wait(watched, return_when=asyncio.FIRST_COMPLETED)
        why = next(watch.result() for watch in watched if watch.done())
        for watch in watched:
            watch.cancel()
        async with self._changing:
            if why is not None and number in self.live:  # else it has left, or was about to
                await self._replace(number, why)

    async def _until_dead(self, number: int) -> str | None:
        """Why a replica can serve no more; None when it has been shut."""
        try:
            await self.live[number].shut_or_failed.call_one().as_asyncio()
        except Exception as error:
            if isinstance(root(error), EngineError):
                return f"generator {number}: {cause(error)}"
            # What the call fails with may be a consequence of the death: of a message that could not be delivered, for one.
            return obituary(str(root(error))) or await self._meshes.obituary(_name(number)) or cause(error)
        return None

    async def _until_stuck(self, number: int) -> str:
        """Says so when a replica that has something to decode has taken no step for `generator.hang_s`.

        Looks are counted, not seconds: the controller may have been stopped itself, as a notebook's kernel is by a long cell.
        """
        hang_s = self._config.generator.hang_s
        seen: int | None = None
        stood_still = 0
        while stood_still < LOOKS:
            steps = await self._look(number, hang_s / LOOKS)
            stood_still = stood_still + 1 if steps == NO_ANSWER or (steps is not None and steps == seen) else 0
            seen = steps
        return f"generator {number} took no step for {hang_s:g} s"

    async def _look(self, number: int, pause_s: float) -> int | None:
        """Decode steps of a replica, None where it has nothing to decode, or NO_ANSWER; after `pause_s`, whatever it is."""
        pause = asyncio.create_task(asyncio.sleep(pause_s))
        steps: int | None = NO_ANSWER
        with contextlib.suppress(Exception):
            steps = await asyncio.wait_for(self.live[number].steps.call_one().as_asyncio(), pause_s)
        await pause
        return steps

    async def _replace(self, number: int, why: str) -> None:
        """Start another until one holds weights.

        Raises:
            ActorDied: `generator.max_restarts` were not enough.
        """
        wait_s = 0.0
        while True:
            self._lost += 1
            most = self._config.generator.max_restarts
            if self._lost > most:
                raise ActorDied(f"{why} (generator.max_restarts={most} were used up)" if most else why)
            await asyncio.sleep(wait_s)
            (new,) = self.spawn(1)
            self._say(f"{why}; generator {new} takes its place")
            if number in self.live:
                await answer(self._rollouts.lose_generator.call(number), f"rollout workers (generator {number} is lost)", TELL_DEADLINE_S)
                await self._bury(number)
            try:
                return await self._add(new)
            except UserError as error:
                why = str(error)
            wait_s = min(MOST_BACK_OFF_S, 2 * wait_s or BACK_OFF_S)


def _name(number: int) -> str:
    return f"generator_{number}"
