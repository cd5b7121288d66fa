"""The generators of a session: how many there are can change while it runs."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

from monarch_rl.config import Config, UserError
from monarch_rl.meshes import START_DEADLINE_S, Meshes
from monarch_rl.supervise import answer, cause

if TYPE_CHECKING:
    from actors.generator import Generator
    from actors.metrics import Metrics
    from actors.publisher import Publisher
    from monarch_rl.types import Version
    from monarch_rl.weights.plan import LoadPlan
    from monarch_rl.weights.slots import SlotBuffers

LEAVE_DEADLINE_S = 30.0


class Replicas:
    """Generators by number; a number is never given twice."""

    def __init__(self, config: Config, meshes: Meshes, metrics: Metrics) -> None:
        self._config, self._meshes, self._metrics = config, meshes, metrics
        self._next = 0
        self._starts: dict[int, asyncio.Future[LoadPlan]] = {}
        self.live: dict[int, Generator] = {}
        """Those that requests may be sent to."""

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

    async def add(self, number: int, publishers: Publisher, slots: list[list[SlotBuffers]]) -> asyncio.Future[None]:
        """Let a new replica follow the trainer, and wait until it holds weights. Ends it when it cannot start."""
        try:
            plan = await self.started(number)
            following = asyncio.ensure_future(self.follow(number, publishers, slots, plan.digest))
            ready = asyncio.ensure_future(answer(self.live[number].ready.call_one(0), f"generator {number} (first pull)", START_DEADLINE_S))
            done, _ = await asyncio.wait({following, ready}, return_when=asyncio.FIRST_COMPLETED)
            done.pop().result()
        except Exception as error:
            await self.end(number)
            raise UserError(f"generator {number} could not be added: {cause(error)}") from error
        return following

    async def follow(self, number: int, publishers: Publisher, slots: list[list[SlotBuffers]], digest: str) -> None:
        """Have a replica pull what the trainers publish, until it is told to stop."""
        await self.live[number].follow.call_one(publishers, slots, digest).as_asyncio()

    async def pull(self, number: int, publishers: Publisher, slots: list[list[SlotBuffers]], newest: Version) -> None:
        """Have one that does not follow pull once."""
        await answer(self.live[number].pull.call_one(publishers, slots, newest), f"generator {number} (pull)", LEAVE_DEADLINE_S)

    async def unfollow(self, number: int) -> None:
        """It pulls nothing more."""
        await answer(self.live[number].unfollow.call_one(), f"generator {number} (stop pulling)", LEAVE_DEADLINE_S)

    async def end(self, number: int) -> None:
        """End a replica that no request is sent to any more."""
        generator = self.live.pop(number)
        self._starts.pop(number).cancel()
        await asyncio.gather(answer(generator.shut.call_one(), f"generator {number} (closing)", LEAVE_DEADLINE_S), return_exceptions=True)
        await self._meshes.end(_name(number))
        await self._meshes.stop(_name(number))


def _name(number: int) -> str:
    return f"generator_{number}"
