"""Prompts under which actors are lost: the one that ends them is given up, and those that were in work with it are not."""

from __future__ import annotations

import asyncio

import pytest

from monarch_rl import suspects
from monarch_rl.engine_errors import EngineError
from monarch_rl.routes import Routes
from monarch_rl.suspects import LOSSES, Losses, TooManyLost

POISON = "poison"


class Engine:
    """Takes a few turns of the loop for a prompt; ends with all that it works on as soon as it looks at the poison."""

    def __init__(self, routes: Routes[Engine], number: int) -> None:
        self._routes, self._number = routes, number
        self._over = asyncio.Event()

    async def work(self, prompt: str) -> str:
        for turn in range(5):
            await asyncio.sleep(0)
            if prompt == POISON and turn == 2:
                self._over.set()
                asyncio.get_running_loop().call_later(0.01, self._replace)
            if self._over.is_set():
                raise EngineError("the engine failed")
        return prompt

    def _replace(self) -> None:
        self._routes.add(self._number + 1, Engine(self._routes, self._number + 1))


async def test_only_the_prompt_that_ends_its_actors_is_given_up() -> None:
    routes: Routes[Engine] = Routes({}, "generator")
    routes.add(0, Engine(routes, 0))

    async def asked(prompt: str) -> str:
        LOSSES.set(Losses(3))
        try:
            return await routes.ask(lambda engine: engine.work(prompt), 1)
        except TooManyLost as error:
            return f"given up: {error}"

    async with asyncio.timeout(60):
        ended = await asyncio.gather(*map(asked, ["a", "b", POISON, "c"]))
    assert ended == ["a", "b", "given up: generator 0, generator 1, generator 2 were lost while working on it", "c"]
    assert len(routes) == 1, "the fourth engine lives"


async def test_a_suspect_that_works_for_a_while_holds_up_no_other(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(suspects, "APART_S", 0.01)
    routes = Routes({0: "engine"}, "generator")
    begun: list[str] = []
    go = asyncio.Event()

    async def suspect(prompt: str) -> str:
        losses = Losses(2)
        losses.add("generator 7")
        LOSSES.set(losses)

        async def work(_: str) -> str:
            begun.append(prompt)
            await go.wait()
            return prompt

        return await routes.ask(work, 1)

    tasks = [asyncio.create_task(suspect(prompt)) for prompt in "abc"]
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    assert begun == ["a"]
    async with asyncio.timeout(60):
        while len(begun) < 3:  # noqa: ASYNC110
            await asyncio.sleep(0.005)
    assert not any(task.done() for task in tasks)
    go.set()
    assert await asyncio.gather(*tasks) == ["a", "b", "c"]


def test_a_prompt_has_no_chance_beyond_its_attempts() -> None:
    once = Losses(1)
    assert not once.suspect
    with pytest.raises(TooManyLost, match="scorer 3 was lost while working on it"):
        once.add("scorer 3")
    thrice = Losses(3)
    for _ in range(3):
        thrice.add("generator 1")  # its episodes are all lost with it
    assert not thrice.suspect
    thrice.add("scorer 0")
    assert thrice.suspect
    thrice.clear()
    assert not thrice.suspect
