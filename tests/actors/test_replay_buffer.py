"""The replay buffer as a real actor, driven by the test in the place of rollout workers and trainer ranks."""

from __future__ import annotations

import asyncio
import itertools
import json
import os
import signal
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from monarch.actor import ActorError, this_host

from actors.recording import Recording
from actors.replay_buffer import ReplayBuffer
from monarch_rl.config import Config
from monarch_rl.ledger import AgeError
from monarch_rl.lives import STATES, Life, Progress
from monarch_rl.observe import ledger_file
from monarch_rl.recorded import read
from monarch_rl.types import NOT_SAMPLED, Episode, Group, Lease, Prompt, Shard, Version
from tests.actors.buffer_actors import Bystander

TASK = """
import os, time
from monarch_rl.tasks import Task
from monarch_rl.types import Prompt

class Count(Task):
    name = "count"
    def __init__(self, broken=-1, gate="", size=None):
        self.broken, self.gate, self.size = broken, gate, size
    def prompt(self, ordinal, split):
        if ordinal == self.broken:
            raise KeyError("no row")
        while self.gate and ordinal and not os.path.exists(self.gate):
            time.sleep(0.01)
        return Prompt(ordinal, f"{split} {ordinal}")
    def reward(self, prompt, completion):
        return 0.0

class Course(Count):  # three rows; one that has earned more than a half is left out in the epoch that follows
    name = "course"
    def prompt(self, ordinal, split):
        return Prompt(ordinal, f"row {ordinal % 3}")
    def skip(self, prompt, past):
        return bool(past) and past[-1].reward > 0.5 and prompt.ordinal - past[-1].ordinal <= 3
"""

NUMBER = itertools.count()
Make = Callable[..., Any]


@pytest.fixture(scope="module")
def processes() -> Iterator[Any]:
    mesh = this_host().spawn_procs({"proc": 1})
    yield mesh
    mesh.stop().get()


@pytest.fixture
async def make(processes: Any, tmp_path: Path) -> AsyncIterator[Make]:
    """Makes a replay buffer of its own: P=2, S=1, group size 2, 10 steps, unless told otherwise."""
    (tmp_path / "count.py").write_text(TASK)
    buffers = []

    def spawn(
        *,
        steps: int = 10,
        epochs: int = 0,
        ranks: int = 1,
        deadline_s: float = 60.0,
        attempts: int = 3,
        task: str = "Count",
        task_args: Any = None,
        record: bool = False,
        found: Path | None = None,
        keep_groups: bool = True,
        every: int = 0,
        **buffer: Any,
    ) -> Any:
        task = f"{tmp_path / 'count.py'}:{task}"
        config = Config(steps=steps, epochs=epochs, output_dir=str(tmp_path), task=task, task_args=task_args or {}, record=record)
        config.buffer.prompts_per_step, config.buffer.max_age = 2, 1
        config.checkpoint.every = every
        for key, value in buffer.items():
            setattr(config.buffer, key, value)
        config.trainer.ranks, config.rollout.deadline_s, config.rollout.max_attempts = ranks, deadline_s, attempts
        buffers.append(processes.spawn(f"buffer_{next(NUMBER)}", ReplayBuffer, config, found, keep_groups))
        return buffers[-1]

    yield spawn
    for buffer in buffers:
        await buffer.close.call_one()


def group(prompt: Prompt, step: int = 0, rewards: tuple[float | None, ...] = (1.0, 0.0), error: str | None = None) -> Group:
    """One prompt token and three sampled ones per episode, all by the weights of `step`."""
    versions = np.array([NOT_SAMPLED] + 3 * [Version(0, step).pack()], np.int64)
    mask, ids, logprobs = np.array([False, True, True, True]), np.arange(4, dtype=np.int32), np.array([0, -1, -1, -1], np.float32)
    return Group(prompt, [Episode(ids, mask, logprobs, versions, f"answer {i}", reward, error) for i, reward in enumerate(rewards)])


PATIENCE_S = 100
"""Of waits that end at once but on a machine that stands still."""


async def soon(reply: Any) -> Any:
    return await within(reply.as_asyncio())


async def within(awaited: Awaitable[Any]) -> Any:
    return await asyncio.wait_for(awaited, PATIENCE_S)


async def claim(buffer: Any, count: int, worker: str = "w") -> list[tuple[Lease, Prompt]]:
    return [await soon(buffer.lease.call_one(worker)) for _ in range(count)]


async def put(buffer: Any, claims: list[tuple[Lease, Prompt]], **how: Any) -> list[bool]:
    return [await soon(buffer.put.call_one(lease, group(prompt, **how))) for lease, prompt in claims]


async def answer_all(buffer: Any, ordinals: Iterable[int], worker: str) -> None:
    """Lease and put until each has its group. Where leases are short, a slow machine loses some of them and tries again."""
    missing = set(ordinals)
    while missing:
        ((lease, prompt),) = await claim(buffer, 1, worker)
        if await soon(buffer.put.call_one(lease, group(prompt))):
            missing.discard(lease.ordinal)


async def parked(*futures: Any) -> None:
    """Fails if one of them is answered."""
    await asyncio.sleep(0.3)
    assert not any(future.done() for future in futures)


async def test_leases_park_until_the_trainer_is_ahead(make: Make) -> None:
    """The budget is given out in order; then workers wait without polling, and `trained` lets them go on."""
    buffer = make()
    claims = await claim(buffer, 4)
    assert claims == [(Lease(i, 1, 0), Prompt(i, f"train {i}")) for i in range(4)]
    waiting = [buffer.lease.call_one(f"w{i}").as_asyncio() for i in range(2)]
    batch = buffer.take.call_one(1, 0).as_asyncio()
    await put(buffer, claims[:1])
    await parked(batch, *waiting)
    await put(buffer, claims[1:2])
    shard: Shard = await within(batch)
    assert shard.ordinals == [0, 1]
    await parked(*waiting)
    buffer.trained.broadcast(1)
    leases = [lease for lease, _ in await within(asyncio.gather(*waiting))]
    assert leases == [Lease(4, 1, 1), Lease(5, 1, 1)]


async def test_taking_a_batch_says_that_the_last_one_is_trained(make: Make) -> None:
    buffer = make()
    await put(buffer, await claim(buffer, 4))
    waiting = buffer.lease.call_one("w").as_asyncio()
    await soon(buffer.take.call_one(1, 0))
    await parked(waiting)
    await soon(buffer.take.call_one(2, 0))
    assert (await within(waiting))[0] == Lease(4, 1, 1)


async def test_a_run_ends_when_its_last_batch_is_taken(make: Make) -> None:
    """Case 23: exactly steps × P groups are asked for; workers that wait for more are sent home."""
    buffer = make(steps=2)
    claims = await claim(buffer, 4)
    waiting = buffer.lease.call_one("w").as_asyncio()
    await put(buffer, claims)
    await soon(buffer.take.call_one(1, 0))
    await parked(waiting)
    await soon(buffer.take.call_one(2, 0))
    assert await within(waiting) is None
    assert await soon(buffer.lease.call_one("w")) is None


async def test_every_rank_gets_its_part_of_the_same_batch(make: Make) -> None:
    buffer = make(ranks=2)
    claims = await claim(buffer, 3)
    await put(buffer, claims[:1], rewards=(1.0, None, 0.0))
    first = buffer.take.call_one(1, 0).as_asyncio()
    await parked(first)
    await put(buffer, claims[1:])
    shards = [await within(first), await soon(buffer.take.call_one(1, 1))]
    assert sorted(place for shard in shards for place in shard.places) == [(0, 0), (0, 2), (1, 0), (1, 1)]
    for shard in shards:
        assert (shard.step, shard.ordinals, shard.total_tokens, shard.total_episodes) == (1, [0, 1], 12, 4)
        np.testing.assert_array_equal(shard.rewards_PG, [[1, np.nan, 0], [1, 0, np.nan]])
    with pytest.raises(ValueError, match="step 1 cannot be taken: the next one is 2"):
        await soon(buffer.take.call_one(1, 1))


async def test_dead_groups_are_replaced(make: Make) -> None:
    buffer = make()
    claims = await claim(buffer, 4)
    await put(buffer, claims[:1], rewards=(1.0, 1.0))
    await put(buffer, claims[1:2], rewards=(None, None), error="ValueError: no")
    await put(buffer, claims[2:])
    assert (await soon(buffer.take.call_one(1, 0))).ordinals == [2, 3]
    assert [lease for lease, _ in await claim(buffer, 2)] == [Lease(4, 1, 0), Lease(5, 1, 0)]
    stats = await soon(buffer.stats.call_one(1))
    expected = {
        "buffer/dropped": 2,
        "buffer/dropped_dead": 1,
        "buffer/dropped_unscorable": 1,
        "buffer/fill": 0,
        "buffer/leased": 0,
        "reward/mean": 4 / 6,
        "reward/frac_dead_groups": 0.5,
        "reward/frac_unscorable": 0.25,
        "age/max": 0,
    }
    assert {key: stats[key] for key in expected} == pytest.approx(expected)
    with pytest.raises(ActorError, match="no figures of step 2"):
        await soon(buffer.stats.call_one(2))


async def test_dead_groups_can_be_kept(make: Make) -> None:
    buffer = make(dead_groups="keep")
    await put(buffer, await claim(buffer, 2), rewards=(1.0, 1.0))
    assert (await soon(buffer.take.call_one(1, 0))).ordinals == [0, 1]
    assert (await soon(buffer.stats.call_one(1)))["reward/frac_dead_groups"] == 1


async def test_nothing_to_learn_ends_the_run(make: Make) -> None:
    """Case 15: rewards that are always 0 end the run after `max_dead_steps` steps' worth, with a look at what was sampled."""
    buffer = make(max_dead_steps=2)
    batch = buffer.take.call_one(1, 0).as_asyncio()
    await put(buffer, await claim(buffer, 3), rewards=(0.0, 0.0))
    waiting = buffer.lease.call_one("idle").as_asyncio()
    await parked(batch)
    await put(buffer, [await within(waiting)], rewards=(0.0, 0.0))
    with pytest.raises(RuntimeError) as raised:
        await within(batch)
    message = str(raised.value)
    assert "there is no batch for step 1: 4 prompts in a row gave nothing to train on" in message
    assert "(buffer.max_dead_steps=2; dropped so far: 4 dead)" in message
    assert "prompt 3: rewards [0 0], completion 'answer 0'" in message
    assert "\n" not in message
    assert await soon(buffer.lease.call_one("w")) is None
    with pytest.raises(RuntimeError, match="4 prompts in a row"):
        await soon(buffer.take.call_one(1, 0))


async def test_a_reward_that_always_raises_is_named(make: Make) -> None:
    """Case 18: the run ends with the exception of the reward."""
    buffer = make(max_dead_steps=1)
    await put(buffer, await claim(buffer, 2), rewards=(None, None), error="ZeroDivisionError: division by zero")
    with pytest.raises(RuntimeError, match=r"2 unscorable.*prompt 1: rewards \[- -\], error ZeroDivisionError: division by zero"):
        await soon(buffer.take.call_one(1, 0))


async def test_prompts_that_are_refused_end_the_run(make: Make) -> None:
    """Case 61: a prompt that is too long is dropped and counted; if all are, the run ends and says so."""
    buffer = make(max_dead_steps=1)
    (lease, _), kept = await claim(buffer, 2)
    await soon(buffer.drop.call_one(lease, "900 tokens do not fit"))
    await put(buffer, [kept])
    for lease, _ in await claim(buffer, 2):
        await soon(buffer.drop.call_one(lease, "900 tokens do not fit"))
    with pytest.raises(RuntimeError, match=r"3 refused.*prompt 3: 900 tokens do not fit"):
        await soon(buffer.take.call_one(1, 0))


async def test_a_lost_answer_is_asked_for_again(make: Make) -> None:
    """Cases 13, 14, 21: a worker that never answers loses its prompts at the deadline; its late answer is ignored."""
    buffer = make(deadline_s=0.5, attempts=100)
    lost = await claim(buffer, 2, "silent")
    await answer_all(buffer, range(4), "other")
    assert await put(buffer, lost) == [False, False]
    assert (await soon(buffer.take.call_one(1, 0))).ordinals == [0, 1]


async def test_failures_are_bounded(make: Make) -> None:
    """Case 29: a prompt that fails every time is dropped after `rollout.max_attempts`, and another takes its place."""
    buffer = make(attempts=2)
    first, second = await claim(buffer, 2)
    await put(buffer, [second])
    for attempt in (1, 2):
        await soon(buffer.fail.call_one(Lease(first[0].ordinal, attempt, 0), "engine died"))
        await claim(buffer, 1)
    await put(buffer, [(Lease(2, 1, 0), Prompt(2, ""))])
    assert (await soon(buffer.take.call_one(1, 0))).ordinals == [1, 2]
    assert (await soon(buffer.stats.call_one(1)))["buffer/dropped_failed"] == 1


async def test_a_released_worker_gives_back_its_prompts(make: Make) -> None:
    """Case 19: what a dead worker held goes to others; its parked calls are forgotten."""
    buffer = make()
    await claim(buffer, 2, "dead")
    await claim(buffer, 2, "alive")
    gone = buffer.lease.call_one("dead").as_asyncio()
    waiting = [buffer.lease.call_one("alive").as_asyncio() for _ in range(2)]
    await parked(gone, *waiting)
    await soon(buffer.release.call_one("dead"))
    assert [lease for lease, _ in await within(asyncio.gather(*waiting))] == [Lease(0, 2, 0), Lease(1, 2, 0)]
    assert not gone.done()


async def test_a_released_worker_that_wakes_up_is_heard_no_more(make: Make) -> None:
    """It was only stopped: what it had leased is another's by now, or waits for one, and it gets nothing new."""
    buffer = make()
    claims = await claim(buffer, 2, "slow")
    await soon(buffer.release.call_one("slow"))
    assert await put(buffer, claims) == [False, False]
    late = buffer.lease.call_one("slow").as_asyncio()
    again = await claim(buffer, 2, "alive")
    assert [lease for lease, _ in again] == [Lease(0, 2, 0), Lease(1, 2, 0)]
    assert await put(buffer, claims) == [False, False]
    assert await put(buffer, again) == [True, True]
    await parked(late)
    assert (await soon(buffer.take.call_one(1, 0))).ordinals == [0, 1]


async def test_a_killed_worker_with_a_parked_lease_does_no_harm(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    """Case 19: a lease that goes out to a dead process comes back at its deadline; the buffer lives."""
    monkeypatch.setattr("monarch.actor.unhandled_fault_hook", lambda failure: None)
    buffer = make(deadline_s=2.0, attempts=100)
    mesh = this_host().spawn_procs({"proc": 1})
    bystander = mesh.spawn("bystander", Bystander)
    await soon(bystander.ready.call_one())
    claims = await claim(buffer, 4)
    os.kill(await soon(bystander.wait_for_lease.call_one(buffer, "doomed")), signal.SIGKILL)
    heard = await put(buffer, claims)
    await answer_all(buffer, [lease.ordinal for (lease, _), in_time in zip(claims, heard, strict=True) if not in_time], "alive")
    await asyncio.gather(*[soon(buffer.take.call_one(step, 0)) for step in (1, 2)])
    last = await claim(buffer, 2, "alive")
    assert {lease.ordinal for lease, _ in last} == {4, 5}
    assert max(lease.attempt for lease, _ in last) > 1, "the dead one had none of them"
    await mesh.stop()


async def test_too_old_tokens_are_never_given_out(make: Make) -> None:
    """Case 27: stamps that break the bound (forced here by lying ones) end the run with the prompt's ordinal."""
    buffer = make(ranks=2)
    for step in (1, 2):
        await put(buffer, await claim(buffer, 2), step=step - 1)
        await asyncio.gather(*[soon(buffer.take.call_one(step, rank)) for rank in (0, 1)])
    await put(buffer, await claim(buffer, 2), step=0)
    for rank, error in ((0, AgeError), (1, RuntimeError)):
        with pytest.raises(error, match="prompt 4 has a token of age 2 at step 3, above"):
            await soon(buffer.take.call_one(3, rank))


async def test_a_prompt_that_cannot_be_made_ends_the_run(make: Make) -> None:
    """Case 18: what the task raises reaches the trainer in one line; nobody waits."""
    buffer = make(task_args={"broken": 1})
    waiting = [buffer.lease.call_one("w").as_asyncio() for _ in range(2)]
    with pytest.raises(RuntimeError, match="task count: prompt 1 cannot be made: KeyError: 'no row'"):
        await soon(buffer.take.call_one(1, 0))
    assert await within(waiting[0]) == (Lease(0, 1, 0), Prompt(0, "train 0"))
    assert await within(waiting[1]) is None


async def test_slow_prompts_do_not_hold_up_the_buffer(make: Make, tmp_path: Path) -> None:
    """Case 25: while a prompt is being made, other calls are answered."""
    gate = tmp_path / "gate"
    buffer = make(task_args={"gate": str(gate)})
    first = await claim(buffer, 1)
    waiting = buffer.lease.call_one("w").as_asyncio()
    await put(buffer, first)
    assert len(await soon(buffer.samples.call_one(5))) == 1
    assert not waiting.done()
    gate.touch()
    assert (await within(waiting))[0].ordinal == 1


async def test_samples_are_the_last_groups(make: Make) -> None:
    buffer = make()
    claims = await claim(buffer, 3)
    await put(buffer, claims[:2])
    await put(buffer, claims[2:], rewards=(0.0, 0.0))
    groups: list[Group] = await soon(buffer.samples.call_one(2))
    assert [g.ordinal for g in groups] == [1, 2]
    assert groups[0].prompt.content == "train 1"
    assert await soon(buffer.samples.call_one(0)) == []


async def test_closing_answers_everybody(make: Make) -> None:
    buffer = make()
    await claim(buffer, 4)
    waiting, batch = buffer.lease.call_one("w").as_asyncio(), buffer.take.call_one(1, 0).as_asyncio()
    await parked(waiting, batch)
    await soon(buffer.close.call_one())
    assert await within(waiting) is None
    with pytest.raises(RuntimeError, match="there is no batch for step 1: the replay buffer is closed"):
        await within(batch)


async def test_a_group_must_answer_its_lease(make: Make) -> None:
    buffer = make()
    first, second = await claim(buffer, 2)
    with pytest.raises(ActorError, match="the lease is on prompt 0, the group is of prompt 1"):
        await soon(buffer.put.call_one(first[0], group(second[1])))
    assert await put(buffer, [first]) == [True]


async def test_synchronous_run(make: Make) -> None:
    """`max_age=0` alternates strictly: no prompt is handed out while a batch is taken and not trained."""
    buffer = make(max_age=0, steps=3)
    for step in (1, 2, 3):
        claims = await claim(buffer, 2)
        assert [lease.min_step for lease, _ in claims] == [step - 1] * 2
        waiting = buffer.lease.call_one("w").as_asyncio()
        await put(buffer, claims, step=step - 1)
        await soon(buffer.take.call_one(step, 0))
        if step < 3:
            await parked(waiting)
            await soon(buffer.trained.call_one(step))
            lease, _ = await within(waiting)
            await soon(buffer.fail.call_one(lease, "handed back"))
        else:
            assert await within(waiting) is None
        assert (await soon(buffer.stats.call_one(step)))["age/max"] == 0


async def test_a_buffer_goes_on_from_a_checkpoint(make: Make, tmp_path: Path) -> None:
    """Cases 2, 5: what was finished is trained without being sampled again, what was in flight is leased anew, as the same attempt."""
    first = make()
    claims = await claim(first, 4)
    await put(first, [claims[0], claims[1], claims[3]])
    await soon(first.take.call_one(1, 0))
    assert await soon(first.snapshot.call_one(1)) == Progress(1, 2, {})
    await soon(first.save.call_one(tmp_path / "step_1"))
    await put(first, [claims[2]])  # after the checkpoint: lost with the run
    await soon(first.close.call_one())
    second = make(found=tmp_path / "step_1")
    again = await claim(second, 3)
    assert again == [(Lease(2, 1, 0), Prompt(2, "train 2")), *[(Lease(i, 1, 1), Prompt(i, f"train {i}")) for i in (4, 5)]]
    batch = second.take.call_one(2, 0).as_asyncio()
    await parked(batch)
    await put(second, again[:1])
    shard: Shard = await within(batch)
    assert (shard.ordinals, shard.total_tokens) == ([2, 3], 12)
    trained = [json.loads(line)["ordinal"] for line in (tmp_path / "rollouts.jsonl").read_text().splitlines()]
    assert trained == [0, 1, 2, 3]
    lives: list[Life] = await soon(second.lives.call_one(STATES, 9))
    assert [(life.ordinal, life.state, life.step) for life in lives] == [
        *[(0, "trained", 1), (1, "trained", 1), (2, "taken", 2), (3, "taken", 2), (4, "leased", 0), (5, "leased", 0)]
    ]
    assert [life.ordinal for life in await soon(second.lives.call_one(["leased"], 1))] == [5]
    assert list(ledger_file.lives(tmp_path / "ledger.jsonl").values()) == lives_rounded(lives)


def lives_rounded(lives: list[Life]) -> list[Life]:
    return [life._replace(since=round(life.since, 3)) for life in lives]


async def test_what_no_longer_fits_is_sampled_again(make: Make, tmp_path: Path) -> None:
    first = make()
    await put(first, await claim(first, 4))
    await soon(first.snapshot.call_one(0))
    await soon(first.save.call_one(tmp_path / "step_0"))
    second = make(found=tmp_path / "step_0", keep_groups=False, prompts_per_step=1, max_age=0)
    assert await claim(second, 1) == [(Lease(0, 1, 0), Prompt(0, "train 0"))]
    waiting = second.lease.call_one("w").as_asyncio()
    await parked(waiting)


async def test_a_task_leaves_out_what_is_solved_also_after_a_resume(make: Make, tmp_path: Path) -> None:
    """Three epochs of three rows, the second of which is solved in the first: dropped with its reason, and another takes its place."""
    keys = {"task": "Course", "task_args": {"size": 3}, "prompts_per_step": 3, "max_age": 0, "epochs": 3}
    first = make(**keys)
    claims = await claim(first, 3)
    for (lease, prompt), rewards in zip(claims, [(0.0, 1.0), (0.5, 1.0), (0.0, 0.5)], strict=True):
        await soon(first.put.call_one(lease, group(prompt, rewards=rewards)))
    assert (await soon(first.take.call_one(1, 0))).ordinals == [0, 1, 2]
    await soon(first.snapshot.call_one(1))
    await soon(first.save.call_one(tmp_path / "step_1"))
    assert [lease.ordinal for lease, _ in await claim(first, 3)] == [3, 5, 6]
    second = make(found=tmp_path / "step_1", **keys)
    again = await claim(second, 3)
    assert [lease.ordinal for lease, _ in again] == [3, 5, 6]
    await put(second, again, step=1)
    assert (await soon(second.take.call_one(2, 0))).ordinals == [3, 5, 6]
    assert (await soon(second.stats.call_one(2)))["buffer/dropped_skipped"] == 1
    await soon(second.trained.call_one(2))
    last = await claim(second, 2)
    assert [lease.ordinal for lease, _ in last] == [7, 8], "it is left out for one epoch"
    await put(second, last, step=2)
    assert (await soon(second.take.call_one(3, 0))).ordinals == [7, 8]
    assert await soon(second.take.call_one(4, 0)) is None


@pytest.mark.parametrize(("tail", "last"), [("train", [4, 5, 6]), ("drop", None)])
async def test_the_data_end(make: Make, tail: str, last: list[int] | None) -> None:
    """Case 23: seven prompts, four to a step. Three more are a smaller step or dropped; then workers go home and trainers hear of it."""
    buffer = make(epochs=1, task_args={"size": 7}, prompts_per_step=4, tail=tail)
    await put(buffer, await claim(buffer, 7))
    assert await soon(buffer.lease.call_one("w")) is None
    assert (await soon(buffer.take.call_one(1, 0))).ordinals == [0, 1, 2, 3]
    shard = await soon(buffer.take.call_one(2, 0))
    if last is None:
        assert shard is None
        assert [life.reason for life in await soon(buffer.lives.call_one(["dropped"], 9))] == ["tail"] * 3
    else:
        assert shard.ordinals == last
        assert await soon(buffer.take.call_one(3, 0)) is None
        assert await soon(buffer.take.call_one(3, 0)) is None


async def test_a_tail_can_be_an_error(make: Make) -> None:
    buffer = make(epochs=1, task_args={"size": 3}, tail="error")
    await put(buffer, await claim(buffer, 3))
    await soon(buffer.take.call_one(1, 0))
    with pytest.raises(ValueError, match=r"the data end with 1 groups \(prompts 2 to 2\), fewer than buffer\.prompts_per_step=2"):
        await soon(buffer.take.call_one(2, 0))


async def test_a_prompt_that_waits_for_another_attempt_holds_up_the_end(make: Make) -> None:
    """A lost claim at the very end of the data: others wait for it, and it is tried again."""
    buffer = make(epochs=1, task_args={"size": 2})
    first, second = await claim(buffer, 2)
    waiting = buffer.lease.call_one("w").as_asyncio()
    batch = buffer.take.call_one(1, 0).as_asyncio()
    await put(buffer, [first])
    await parked(waiting, batch)
    await soon(buffer.fail.call_one(second[0], "engine died"))
    lease, prompt = await within(waiting)
    assert lease == Lease(1, 2, 0)
    await put(buffer, [(lease, prompt)])
    assert (await within(batch)).ordinals == [0, 1]


async def test_data_of_which_nothing_is_left_are_an_error(make: Make) -> None:
    buffer = make(epochs=1, task_args={"size": 2}, max_dead_steps=9)
    batch = buffer.take.call_one(1, 0).as_asyncio()
    await put(buffer, await claim(buffer, 2), rewards=(1.0, 1.0))
    with pytest.raises(RuntimeError, match=r"all 2 prompts of the data were dropped \(2 dead\)\. prompt 0: rewards \[1 1\]"):
        await within(batch)


async def test_what_is_recorded_is_what_was_trained(make: Make, processes: Any, tmp_path: Path) -> None:
    """A replay gives the same shards to the same ranks."""
    buffer = make(record=True, ranks=2)
    await put(buffer, await claim(buffer, 2), rewards=(1.0, None, 0.5))
    shards = [await soon(buffer.take.call_one(1, rank)) for rank in (0, 1)]
    stats = await soon(buffer.stats.call_one(1))
    await soon(buffer.close.call_one())
    config = Config(replay=str(tmp_path))
    config.trainer.ranks = 2
    replay = processes.spawn(f"recording_{next(NUMBER)}", Recording, config)
    for rank, shard in enumerate(shards):
        again: Shard = await soon(replay.take.call_one(1, rank))
        assert (again.places, again.microbatches, again.total_tokens) == (shard.places, shard.microbatches, shard.total_tokens)
        for was, now in zip(shard.episodes, again.episodes, strict=True):
            assert now.logprobs_T.tobytes() == was.logprobs_T.tobytes()
            assert now.ids_T.tobytes() == was.ids_T.tobytes()
    replayed: dict[str, float] = await soon(replay.stats.call_one(1))
    assert replayed == {key: stats[key] for key in replayed}
    assert await soon(replay.take.call_one(2, 0)) is None


async def test_the_trainers_go_back(make: Make, tmp_path: Path) -> None:
    """Batches since the checkpoint are given again; what is asked or answered in the name of the lost ones changes nothing."""
    buffer = make(every=2, record=True)
    for step in (1, 2, 3):
        await put(buffer, await claim(buffer, 4 if step == 1 else 2), step=step - 1)
        await soon(buffer.take.call_one(step, 0))
        await soon(buffer.trained.call_one(step))
        if step == 1:
            assert await soon(buffer.snapshot.call_one(1)) == Progress(1, 2, {})
            await soon(buffer.covered.call_one(1))
    (late, prompt), (other, _) = await claim(buffer, 2)
    assert (await soon(buffer.take.call_one(4, 0))).ordinals == [6, 7]
    assert (await soon(buffer.stats.call_one(3)))["buffer/uncovered_mb"] > 0

    await soon(buffer.go_back.call_one(1, 1))
    assert await soon(buffer.put.call_one(late, group(prompt, step=3))) is False
    await soon(buffer.fail.call_one(other, "its generator is gone"))
    await soon(buffer.trained.call_one(3))
    await parked(buffer.take.call_one(2, 0).as_asyncio())
    shards = [await soon(buffer.take.call_one(step, 0, 1)) for step in (2, 3, 4)]
    assert [(shard.ordinals, shard.lineage) for shard in shards] == [([2, 3], 1), ([4, 5], 1), ([6, 7], 1)]
    assert [(await soon(buffer.stats.call_one(step)))["age/max"] for step in (2, 3)] == [1, 1]
    again = [lease for lease, _ in await claim(buffer, 2)]
    assert again == [Lease(late.ordinal, late.attempt, late.min_step, 1), Lease(other.ordinal, other.attempt, other.min_step, 1)]
    assert again[0].min_version == Version(1, late.min_step).pack()
    await soon(buffer.close.call_one())
    rows = [json.loads(line) for line in (tmp_path / "rollouts.jsonl").read_text().splitlines()]
    assert [(row["step"], row["ordinal"]) for row in rows] == [(1, 0), (1, 1), (2, 2), (2, 3), (3, 4), (3, 5), (4, 6), (4, 7)]
    assert [trained.lineage for step in (1, 2, 3) if (trained := read(tmp_path, step)) is not None] == [0, 1, 1]
