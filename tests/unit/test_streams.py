"""What becomes of the episodes of a generator that is lost: how they go on elsewhere from what it has told of them."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import numpy as np

from actors.streams import Streams, continued_seed
from monarch_rl.engine_errors import EngineError
from monarch_rl.observe.quiet import silent_stderr
from monarch_rl.routes import Routes
from monarch_rl.types import FinishReason, Generation, Sampling, Version
from tests.replies import Called


def sampled(ids: list[int], version: int, reason: FinishReason = "abort", replica: int = 0) -> Generation:
    """Tokens with the logprobs -1, -2, … of their ids."""
    ids_T = np.array(ids, np.int32)
    return Generation(ids_T, -ids_T.astype(np.float32), np.full(len(ids), Version(0, version).pack()), reason, replica)


class Streaming:
    """Where a generator's actor is asked: tells what it is given to tell, and then is lost; or answers with what `answers` has for a
    prompt, up to the budget."""

    def __init__(self, answers: dict[tuple[int, ...], Generation] | None = None) -> None:
        self.answers, self.asked, self.met = answers, [], []
        self.die = asyncio.Event()
        self.generate = self._generate
        self.introduce: Any = SimpleNamespace(call_one=self._introduce)

    async def _introduce(self, worker: str, port: Any) -> None:
        self.met.append(worker)

    async def _generate(self, ids: list[int], sampling: Sampling, seeds: list[int], min_step: int, stream: Any = None) -> list[Generation]:
        self.asked.append((ids, sampling, seeds, min_step, stream))
        if self.answers is None:
            await self.die.wait()
            raise EngineError("the engine failed while decoding")
        assert len(self.answers[tuple(ids)].ids_T) <= sampling.max_new_tokens
        return [self.answers[tuple(ids)] for _ in seeds]


def streaming(*replicas: Any) -> tuple[Routes[Any], Streams]:
    with silent_stderr():
        import monarch.actor

        monarch.actor.context()
    routes = Routes(dict(enumerate(replicas)))
    return routes, Streams(routes, Called(), "rollout 0", burst_tokens=4)  # type: ignore[arg-type]


async def settle() -> None:
    for _ in range(8):
        await asyncio.sleep(0)


async def test_an_episode_goes_on_from_what_was_told_of_it() -> None:
    """Its budget, its versions and its end are those of one generation; another that ended before is not asked for again."""
    lost: Any = Streaming()
    heir: Any = Streaming({(1, 2, 11, 12, 13, 14, 15): sampled([16, 17], 3, "stop", 1), (1, 2): sampled([19], 3, "length", 1)})
    _, streams = streaming(lost, heir)
    asked = asyncio.create_task(streams.generate([1, 2], Sampling(10), [7, 8, 9], 2))
    await settle()
    ((ids, sampling, seeds, min_step, (worker, number)),) = lost.asked
    assert (ids, sampling, seeds, min_step, worker, lost.met) == ([1, 2], Sampling(10), [7, 8, 9], 2, "rollout 0", ["rollout 0"])
    streams.hear(number, [(0, sampled([11, 12, 13], 2)), (1, sampled([21], 2))])
    streams.hear(number, [(1, sampled([21, 22], 2, "stop")), (0, sampled([14, 15], 3))])
    streams.hear(number + 100, [(0, sampled([99], 2))])  # of nobody that is waiting
    lost.die.set()
    continued, ended, anew = await asked
    assert continued.ids_T.tolist() == [11, 12, 13, 14, 15, 16, 17]
    assert continued.logprobs_T.tolist() == [-11, -12, -13, -14, -15, -16, -17]
    assert [Version.unpack(int(v)).step for v in continued.versions_T] == [2, 2, 2, 3, 3, 3, 3]
    assert (continued.finish_reason, continued.replica) == ("stop", 1)
    assert (ended.ids_T.tolist(), ended.finish_reason, ended.replica) == ([21, 22], "stop", 0)
    assert (anew.ids_T.tolist(), anew.finish_reason) == ([19], "length")
    requests = {tuple(ids): (sampling, seeds, min_step) for ids, sampling, seeds, min_step, _ in heir.asked}
    assert requests == {
        (1, 2): (Sampling(10), [9], 2),
        (1, 2, 11, 12, 13, 14, 15): (Sampling(5, begun=5), [continued_seed(7, 5)], 2),
    }
    assert continued_seed(7, 5) not in (7, continued_seed(7, 6), continued_seed(8, 5))


async def test_an_episode_may_lose_one_replica_after_another() -> None:
    first: Any = Streaming()
    second: Any = Streaming()
    third: Any = Streaming({(1, 11, 12, 13): sampled([14], 0, "stop", 2)})
    routes, streams = streaming(first)
    asked = asyncio.create_task(streams.generate([1], Sampling(10), [7], 0))
    for replica, told in ((first, [11, 12]), (second, [13])):
        await settle()
        streams.hear(replica.asked[0][-1][1], [(0, sampled(told, 0))])
        if replica is first:
            routes.add(1, second)
            first.die.set()
    await settle()
    routes.add(2, third)
    second.die.set()
    (generation,) = await asked
    assert (generation.ids_T.tolist(), generation.replica) == ([11, 12, 13, 14], 2)
    assert [sampling for _, sampling, *_ in (*second.asked, *third.asked)] == [Sampling(8, begun=2), Sampling(7, begun=3)]


async def test_episodes_of_a_single_burst_are_not_streamed() -> None:
    replica: Any = Streaming({(1,): sampled([5], 0, "stop")})
    _, streams = streaming(replica)
    await streams.generate([1], Sampling(4), [7], 0)
    assert (replica.asked[-1][-1], replica.met) == (None, [])
    for _ in range(2):
        await streams.generate([1], Sampling(5), [7], 0)
    assert (replica.asked[-1][-1], replica.met) == (("rollout 0", 2), ["rollout 0"])
