"""Which generator a request of a rollout worker goes to, and how it goes on when that one is lost."""

from __future__ import annotations

import asyncio
import hashlib
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import count
from typing import TYPE_CHECKING

from monarch_rl.supervise import together
from monarch_rl.trajectory import spliced
from monarch_rl.types import Generation, Sampling

if TYPE_CHECKING:
    from monarch.actor import Port, PortReceiver

    from actors.generator import Generator
    from monarch_rl.engine_bursts import Burst


class Routes:
    """The generators that a worker sends requests to, and how many of its episodes each works on.

    Args:
        name: of the worker, by which generators know where to send bursts.
        burst_tokens: `generator.burst_tokens`; requests for no more than that are not streamed.
    """

    def __init__(self, generators: Mapping[int, Generator], name: str = "", burst_tokens: int = 0) -> None:
        self._generators = dict(generators)
        self._load = Counter[int]()
        self._changed = asyncio.Event()
        self._name, self._burst_tokens = name, burst_tokens
        self._numbers = count()
        self._streamed: dict[int, list[list[Generation]]] = {}
        self._port: Port[tuple[int, Burst]] | None = None
        self._listening: asyncio.Task[None] | None = None
        self._introduced: set[int] = set()

    def add(self, replica: int, generator: Generator) -> None:
        self._generators[replica] = generator
        self._tell()

    def lose(self, replica: int) -> None:
        """Choose it no more."""
        self._generators.pop(replica, None)

    async def drain(self, replica: int) -> None:
        """Choose it no more, and wait until nothing is left to come back from it."""
        self.lose(replica)
        while self._load[replica]:
            await self._changed.wait()

    async def generate(
        self, ids: list[int], sampling: Sampling, seeds: Sequence[int], min_step: int, replica: int | None = None
    ) -> list[Generation]:
        """By the replica that has least to do, or by one that has seen the beginning before and is still here.

        A replica that is lost meanwhile is asked no more, and others go on with what it has sampled, as far as it has told; where there
        is none, one is waited for.
        """
        from monarch_rl.engine_setup import is_lost

        while True:
            while not self._generators:
                await self._changed.wait()
            chosen = replica if replica in self._generators else min(self._generators, key=self._load.__getitem__)
            number = next(self._numbers)
            begun = self._streamed[number] = [[] for _ in seeds]
            self._load[chosen] += len(seeds)
            try:
                return await self._ask(chosen, number, ids, sampling, list(seeds), min_step)
            except Exception as error:
                if not is_lost(error):
                    raise
                self.lose(chosen)
            finally:
                del self._streamed[number]
                self._load[chosen] -= len(seeds)
                self._tell()
            if any(begun):
                return await self._go_on(begun, ids, sampling, seeds, min_step)

    async def _ask(
        self, replica: int, number: int, ids: list[int], sampling: Sampling, seeds: list[int], min_step: int
    ) -> list[Generation]:
        generator = self._generators[replica]
        if not 0 < self._burst_tokens < sampling.max_new_tokens:
            return await generator.generate.call_one(ids, sampling, seeds, min_step)
        await self._introduce(replica, generator)
        return await generator.generate.call_one(ids, sampling, seeds, min_step, (self._name, number))

    async def _go_on(
        self, begun: list[list[Generation]], ids: list[int], sampling: Sampling, seeds: Sequence[int], min_step: int
    ) -> list[Generation]:
        """Each episode from where it was, as a request of its own."""
        whole: dict[int, Generation] = {}

        async def one(index: int) -> None:
            whole[index] = await self._continue(begun[index], ids, sampling, seeds[index], min_step)

        await together([one(index) for index in range(len(seeds))])
        return [whole[index] for index in range(len(seeds))]

    async def _continue(self, begun: list[Generation], ids: list[int], sampling: Sampling, seed: int, min_step: int) -> Generation:
        if not begun:
            (generation,) = await self.generate(ids, sampling, [seed], min_step)
            return generation
        first = spliced(begun)
        if first.finish_reason != "abort":
            return first
        tokens = len(first.ids_T)
        rest = replace(sampling, max_new_tokens=sampling.max_new_tokens - tokens, begun=sampling.begun + tokens)
        (more,) = await self.generate(ids + first.ids_T.tolist(), rest, [continued_seed(seed, tokens)], min_step)
        return spliced([first, more])

    # --- bursts -----------------------------------------------------------------------------------------------------

    async def _introduce(self, replica: int, generator: Generator) -> None:
        """Tell a generator, once, where to send bursts."""
        if self._listening is None:
            from monarch.actor import Channel

            self._port, bursts = Channel[tuple[int, "Burst"]].open()
            self._listening = asyncio.create_task(self._listen(bursts), name="bursts")
        if self._listening.done():
            self._listening.result()
        if replica not in self._introduced:
            await generator.introduce.call_one(self._name, self._port)
            self._introduced.add(replica)

    async def _listen(self, bursts: PortReceiver[tuple[int, Burst]]) -> None:
        while True:
            self.hear(*await bursts.recv())

    def hear(self, number: int, burst: Burst) -> None:
        """What a generator has sampled for a request since it was heard of last."""
        begun = self._streamed.get(number)
        if begun is None:  # the answer was here first, or the replica is lost already
            return
        for index, generation in burst:
            if generation.finish_reason != "abort":  # the whole of it
                begun[index].clear()
            begun[index].append(generation)

    def _tell(self) -> None:
        changed, self._changed = self._changed, asyncio.Event()
        changed.set()


def continued_seed(seed: int, tokens: int) -> int:
    """Of an episode that goes on elsewhere after so many tokens: another one, for the generator of the first is lost."""
    return int.from_bytes(hashlib.blake2b(f"{seed}/{tokens}".encode(), digest_size=8).digest(), "little") >> 1
