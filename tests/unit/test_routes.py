"""Which of several actors is asked, and what becomes of a request when that one is lost."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest

from actors.rollout import Evaluation
from monarch_rl.engine_errors import EngineError
from monarch_rl.evaluation import evaluate
from monarch_rl.routes import Routes
from monarch_rl.supervise import NamedTimeout, waits

LOAD = 2


class Replica:
    """Counts what it is asked, and waits until it may answer or is lost."""

    def __init__(self, name: str, error: Exception | None = None) -> None:
        self.name, self.error, self.asked = name, error, 0
        self.may_answer = asyncio.Event()

    async def name_of(self) -> str:
        self.asked += 1
        await self.may_answer.wait()
        if self.error is not None:
            raise self.error
        return self.name


async def ask(routes: Routes[Replica], preferred: int | None = None, step: int = 0) -> str:
    return await routes.ask(Replica.name_of, LOAD, preferred, step)


def replicas(*errors: Exception | None) -> dict[int, Replica]:
    return {number: Replica(str(number), error) for number, error in enumerate(errors)}


async def settle() -> None:
    for _ in range(5):
        await asyncio.sleep(0)


async def test_what_a_lost_replica_was_asked_is_asked_of_another() -> None:
    live = replicas(EngineError("the engine failed while decoding"), None)
    routes = Routes(live)
    asked = [asyncio.create_task(ask(routes)) for _ in range(4)]
    await settle()
    assert (live[0].asked, live[1].asked) == (2, 2)
    for replica in live.values():
        replica.may_answer.set()
    assert await asyncio.gather(*asked) == ["1"] * 4
    assert (live[0].asked, live[1].asked) == (2, 4)
    assert await ask(routes, preferred=0) == "1", "an episode that it had begun goes on elsewhere"


async def test_when_none_is_left_a_replacement_is_waited_for() -> None:
    live = replicas(EngineError("the engine failed"))
    live[0].may_answer.set()
    routes = Routes(live)
    asked = asyncio.create_task(ask(routes))
    await settle()
    assert live[0].asked == 1
    assert not asked.done()
    new = Replica("1")
    new.may_answer.set()
    routes.add(1, new)
    assert await asked == "1"


async def test_other_errors_are_the_callers() -> None:
    live = replicas(ValueError("temperature"), None)
    live[0].may_answer.set()
    routes = Routes(live)
    with pytest.raises(ValueError, match="temperature"):
        await ask(routes)
    assert live[1].asked == 0


async def test_one_that_is_said_to_be_lost_is_not_waited_for() -> None:
    """Monarch may take long to say so."""
    live = replicas(None, None)
    live[1].may_answer.set()
    routes = Routes(live)
    asked = [asyncio.create_task(ask(routes, preferred=0)) for _ in range(2)]
    await settle()
    routes.lose(0)
    assert await asyncio.gather(*asked) == ["1"] * 2
    assert live[0].asked == 2


async def test_a_deadline_that_passes_is_no_loss() -> None:
    live = replicas(None)
    routes = Routes(live, "scorer", 0.01)
    with pytest.raises(NamedTimeout, match=r"no answer from scorer 0 within 0\.01 s"):
        await ask(routes)
    waits()  # which has passed is nothing to other tests
    live[0].may_answer.set()
    assert await ask(routes) == "0"
    routes.lose(0)


async def test_a_drained_replica_gives_back_what_it_has() -> None:
    live = replicas(None, None)
    routes = Routes(live)
    asked = asyncio.create_task(ask(routes))
    await settle()
    drained = asyncio.create_task(routes.drain(0))
    await settle()
    assert not drained.done()
    live[0].may_answer.set()
    await asyncio.gather(asked, drained)
    live[1].may_answer.set()
    assert await ask(routes) == "1"
    await routes.drain(1)


async def test_what_a_lost_worker_was_to_evaluate_is_done_again() -> None:
    done: list[range] = []

    class Worker:
        def __init__(self, lost: bool) -> None:
            self.lost = lost
            self.evaluate: Any = SimpleNamespace(call_one=self._evaluate)

        async def _evaluate(self, indices: range, min_step: int, task: str | None, replica: int | None) -> Evaluation:
            await asyncio.sleep(0)
            if self.lost:
                raise EngineError("gone")
            done.append(indices)
            return Evaluation(rewards=[float(index) for index in indices], tokens=len(indices))

    routes: Any = Routes({0: Worker(lost=False), 1: Worker(lost=True), 2: Worker(lost=False)})
    evaluated = await evaluate(routes, 7, 0)
    assert sorted(index for indices in done for index in indices) == list(range(7))
    assert (evaluated.prompts, evaluated.tokens, evaluated.accuracy) == (7, 7, 3.0)


async def test_what_needs_newer_weights_is_not_sent_to_a_pinned_replica() -> None:
    """Unless there is no other: then it waits there."""
    live = replicas(None, None)
    for replica in live.values():
        replica.may_answer.set()
    routes = Routes(live)
    routes.pin(0, 3)
    assert [await ask(routes, step=4) for _ in range(3)] == ["1"] * 3
    assert await ask(routes, step=3) == "0"
    assert await ask(routes, preferred=0, step=4) == "0", "an episode that it had begun"
    routes.lose(1)
    assert await ask(routes, step=4) == "0"
    routes.add(1, live[1])
    routes.pin(0, None)
    assert await ask(routes, step=4) == "0"
