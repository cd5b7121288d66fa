"""The generations that a rollout worker asks for, and how they go on elsewhere when their generator is lost.

A generator tells in bursts what it has sampled so far; all of a worker's come through one port, which each generator is given once.
"""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Sequence
from dataclasses import replace
from itertools import count
from typing import TYPE_CHECKING

from monarch_rl.calls import Calls
from monarch_rl.engine_errors import is_lost
from monarch_rl.routes import Routes
from monarch_rl.supervise import together
from monarch_rl.trajectory import spliced
from monarch_rl.types import Generation, Sampling

if TYPE_CHECKING:
    from monarch.actor import Port, PortReceiver

    from actors.generator import Generator
    from monarch_rl.engine_bursts import Burst


class Streams:
    """What the generators of `routes` are asked, and what has come of it by now.

    Args:
        calls: of the worker.
        name: of the worker, by which generators know where to send bursts.
        burst_tokens: `generator.burst_tokens`; requests for no more than that are not streamed.
    """

    def __init__(self, routes: Routes[Generator], calls: Calls, name: str = "", burst_tokens: int = 0) -> None:
        self._routes, self._calls, self._name, self._burst_tokens = routes, calls, name, burst_tokens
        self._numbers = count()
        self._begun: dict[int, list[list[Generation]]] = {}
        self._port: Port[tuple[int, Burst]] | None = None
        self._listening: asyncio.Task[None] | None = None
        self._introduced: list[Generator] = []

    async def generate(
        self, ids: list[int], sampling: Sampling, seeds: Sequence[int], min_version: int, replica: int | None = None
    ) -> list[Generation]:
        """By the replica that has least to do, or by one that has seen the beginning before and is still here.

        When a replica is lost, others go on with what it has sampled, as far as it has told.
        """
        while True:
            number = next(self._numbers)
            begun = self._begun[number] = [[] for _ in seeds]

            async def ask(generator: Generator, number: int = number) -> list[Generation]:
                return await self._ask(generator, number, ids, sampling, list(seeds), min_version)

            try:
                return await self._routes.once(ask, len(seeds), replica, min_version)
            except Exception as error:
                if not is_lost(error):
                    raise
            finally:
                del self._begun[number]
            if any(begun):
                return await self._go_on(begun, ids, sampling, seeds, min_version)

    async def _ask(
        self, generator: Generator, number: int, ids: list[int], sampling: Sampling, seeds: list[int], min_version: int
    ) -> list[Generation]:
        stream = None
        if 0 < self._burst_tokens < sampling.max_new_tokens:
            await self._introduce(generator)
            stream = self._name, number
        return await self._calls.one(generator.generate, ids, sampling, seeds, min_version, stream)

    async def _go_on(
        self, begun: list[list[Generation]], ids: list[int], sampling: Sampling, seeds: Sequence[int], min_version: int
    ) -> list[Generation]:
        """Each episode from where it was, as a request of its own."""
        whole: dict[int, Generation] = {}

        async def one(index: int) -> None:
            whole[index] = await self._continue(begun[index], ids, sampling, seeds[index], min_version)

        await together([one(index) for index in range(len(seeds))])
        return [whole[index] for index in range(len(seeds))]

    async def _continue(self, begun: list[Generation], ids: list[int], sampling: Sampling, seed: int, min_version: int) -> Generation:
        if not begun:
            (generation,) = await self.generate(ids, sampling, [seed], min_version)
            return generation
        first = spliced(begun)
        if first.finish_reason != "abort":
            return first
        tokens = len(first.ids_T)
        rest = replace(sampling, max_new_tokens=sampling.max_new_tokens - tokens, begun=sampling.begun + tokens)
        (more,) = await self.generate(ids + first.ids_T.tolist(), rest, [continued_seed(seed, tokens)], min_version)
        return spliced([first, more])

    async def _introduce(self, generator: Generator) -> None:
        """Tell a generator, once, where to send bursts."""
        if self._listening is None:
            from monarch.actor import Channel

            self._port, bursts = Channel[tuple[int, "Burst"]].open()
            self._listening = asyncio.create_task(self._listen(bursts), name="bursts")
        if self._listening.done():
            self._listening.result()
        if not any(known is generator for known in self._introduced):
            await generator.introduce.call_one(self._name, self._port)
            self._introduced.append(generator)

    async def _listen(self, bursts: PortReceiver[tuple[int, Burst]]) -> None:
        while True:
            self.hear(*await bursts.recv())

    def hear(self, number: int, burst: Burst) -> None:
        """What a generator has sampled for a request since it was heard of last."""
        begun = self._begun.get(number)
        if begun is None:  # the answer was here first, or the replica is lost already
            return
        for index, generation in burst:
            if generation.finish_reason != "abort":  # the whole of it
                begun[index].clear()
            begun[index].append(generation)


def continued_seed(seed: int, tokens: int) -> int:
    """Of an episode that goes on elsewhere after so many tokens: another one, for the generator of the first is lost."""
    return int.from_bytes(hashlib.blake2b(f"{seed}/{tokens}".encode(), digest_size=8).digest(), "little") >> 1
