"""Named waits: which are open, which have passed their deadline, how they are shown, and when a process counts as hung."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest

from monarch_rl.supervise import HOLDING, NamedTimeout, Wait, answer, waits
from monarch_rl.watchdog import Look, Watchdog, line, look, table
from tests.replies import Reply


async def test_a_wait_is_open_until_it_is_answered() -> None:
    reply = Reply()

    async def serve() -> str:
        HOLDING.set("prompt 3")
        return await answer(reply, "generator 1", 600)

    asked = asyncio.create_task(serve())
    parked = asyncio.create_task(answer(Reply(), "replay buffer (lease)", None))
    await asyncio.sleep(0)
    (first, second), passed = waits()
    assert (first.who, first.deadline_s, first.holding) == ("generator 1", 600, "prompt 3")
    assert (second.who, second.deadline_s, second.holding) == ("replay buffer (lease)", None, "")
    assert first.for_s >= 0
    assert passed == []
    reply.future.set_result("tokens")
    assert await asked == "tokens"
    parked.cancel()
    await asyncio.wait([parked])
    assert waits() == ([], [])


async def test_a_deadline_that_passes_is_told_once() -> None:
    with pytest.raises(NamedTimeout, match=r"no answer from scorer 0 within 0\.01 s"):
        await answer(Reply(), "scorer 0", 0.01)
    open_now, (passed,) = waits()
    assert open_now == []
    assert (passed.who, passed.deadline_s) == ("scorer 0", 0.01)
    assert (
        line("rollout 1", Wait("scorer 0", 10.2, 10, "prompt 4"))
        == "rollout 1 has waited 10 s (at most 10 s) for scorer 0, holding prompt 4"
    )
    assert waits() == ([], [])


def process(*told: tuple[list[Wait], list[Wait]]) -> Any:
    """Of a mesh: what each of its processes tells; none: it does not answer."""

    async def reply() -> Any:
        if not told:
            await asyncio.get_running_loop().create_future()
        return SimpleNamespace(values=lambda: told)

    return SimpleNamespace(waits=SimpleNamespace(call=lambda: SimpleNamespace(as_asyncio=reply)))


async def test_the_table_names_who_waits_for_whom_and_who_is_silent() -> None:
    prompts = [Wait("generator 0", for_s, 600, f"prompt {n}") for n, for_s in enumerate((1.0, 7.5, 2.0, 3.0, 4.0))]
    batch = Wait("replay buffer (batch of step 4)", 9.0, 1860, "")
    seen = await look(
        {"trainer": process(([batch], []), ([batch], [])), "rollout": process((prompts, [])), "replay_buffer": process()}, 0.05
    )
    assert seen.silent == ["replay_buffer"]
    shown = table(seen)
    assert list(shown.rows) == [
        ("trainer 0", "replay buffer (batch of step 4)", 1, "9.0 s", "1860 s", ""),
        ("trainer 1", "replay buffer (batch of step 4)", 1, "9.0 s", "1860 s", ""),
        ("rollout 0", "generator 0", 5, "7.5 s", "600 s", "prompt 0, prompt 1, prompt 2, prompt 3 and 1 more"),
    ]
    assert "replay_buffer gives no sign of life" in repr(shown)


def test_only_a_process_that_is_silent_look_after_look_is_hung() -> None:
    said: list[str] = []
    hung: list[str] = []
    watchdog = Watchdog(dict, said.append, hung.append, silent_s=8.0)
    quiet, silent = Look([], [], []), Look([], [], ["trainer"])
    for seen in (silent, silent, silent, quiet, silent, silent, silent):
        watchdog.judge(seen)
    assert (said, hung) == ([], [])
    for _ in range(3):
        watchdog.judge(silent)
    assert hung == ["trainer"]
    assert len(said) == 1
    assert "trainer gives no sign of life" in said[0]


def test_a_wait_that_has_nearly_passed_its_deadline_is_shown_once_with_all_others() -> None:
    said: list[str] = []
    watchdog = Watchdog(dict, said.append, said.append, silent_s=120.0)
    parked, group = ("trainer 0", Wait("replay buffer (batch of step 2)", 541, 1860, "")), Wait("its group", 530, 600, "prompt 7")
    watchdog.judge(Look([parked, ("rollout 0", group)], [], []))
    assert said == []
    for _ in range(2):
        watchdog.judge(
            Look([parked, ("rollout 0", group._replace(for_s=545.0)), ("rollout 0", Wait("generator 1", 544, None, ""))], [], [])
        )
    first, shown = said
    assert first == "rollout 0 has waited 545 s (at most 600 s) for its group, holding prompt 7"
    assert "replay buffer (batch of step 2)" in shown
    assert "generator 1" in shown
    watchdog.judge(Look([], [("rollout 0", group._replace(for_s=600.2))], []))
    assert said[2:] == ["rollout 0 has waited 600 s (at most 600 s) for its group, holding prompt 7"]
