"""A session driven by hand, as in a notebook: step, pause, scale, set, ask, checkpoint, while it trains."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from monarch_rl.config import Config, ConfigError, UserError
from monarch_rl.configure import load
from monarch_rl.session import Session
from monarch_rl.types import Version

pytestmark = pytest.mark.timeout(400)

DEADLINE_S = 180.0
SMALL = [
    *("recipe=grpo_qwen", "profile=cpu", "buffer.prompts_per_step=8", "trainer.warmup_steps=1", "eval.prompts=32", "eval.every=0"),
    *("console.rollouts_every=0", "steps=600"),
]

OTHER = [{"name": "reasoning_gym:chain_sum", "args": {"chat": False}}]


def config(folder: Path, *keys: str) -> Config:
    return load([*SMALL, f"output_dir={folder}", *keys]).config


def rows(folder: Path, file: str = "metrics.jsonl") -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / file).read_text().splitlines()]


async def until(reached: Callable[[], bool], training: asyncio.Task[None]) -> None:
    async with asyncio.timeout(DEADLINE_S):
        while not reached():
            assert not training.done(), training.exception()
            await asyncio.sleep(0.05)


def check_every_prompt_was_trained_once(folder: Path, steps: int) -> None:
    trained = [(row["step"], row["ordinal"]) for row in rows(folder, "rollouts.jsonl")]
    ordinals = [ordinal for _, ordinal in trained]
    assert [step for step, _ in trained] == sorted(step for step, _ in trained)
    assert ordinals == sorted(set(ordinals))
    assert len(ordinals) == steps * 8
    assert max(ordinals) < steps * 8 + rows(folder)[-1]["buffer/dropped"]


async def test_everything_works_while_it_trains(tmp_path: Path) -> None:
    async with Session(config(tmp_path)) as session:
        before = await session.generate("1+2=", n=2)
        assert all(row[3] == "0.0" for row in before.rows)
        assert len(before.texts) == 2

        shown = await session.step(2)
        assert [row[0] for row in shown.rows] == [1, 2]
        assert "2 of 600" in repr(session)

        with pytest.raises(ConfigError, match=r"steps cannot change in a running session; these can: lr, temperature"):
            await session.set(steps=3)
        with pytest.raises(ConfigError, match=r"trainer\.lr: must be a finite number above 0"):
            await session.set(temperature=0.5, lr=-1.0)
        with pytest.raises(ConfigError, match=r"buffer\.max_age: cannot change to or from 0"):
            await session.set(max_age=0)
        assert session.config.generator.temperature == 1.0
        await session.set(lr=1e-4, temperature=0.8, max_age=3)

        training = asyncio.create_task(session.train())
        await until(lambda: session.version.step >= 3, training)
        with pytest.raises(UserError, match="training already"):
            await session.step()
        step = session.version.step
        generators = await session.scale(generators=2)
        assert session.version.step > step  # nobody waited for the engine to start
        assert [row[0] for row in generators.rows] == [0, 1]
        (completion,) = (await session.generate("3+4=", replica=1)).rows
        assert Version(*map(int, str(completion[3]).partition("-")[0].split("."))) >= Version(0, step)
        await until(lambda: all(report.tokens > 100 for report in session._records.reports), training)

        step = session.version.step
        assert [row[0] for row in (await session.scale(generators=1)).rows] == [0]
        with pytest.raises(UserError, match="replica=1: there are 0"):
            await session.generate("3+4=", replica=1)

        await session.pause()
        step = session.version.step
        with pytest.raises(UserError, match="no chat template"):
            await session.evaluate("reasoning_gym:chain_sum", 4)
        with pytest.raises(UserError, match=r"pull\(0\): generators follow the trainer and pull by themselves"):
            await session.pull(0)
        evaluated, other = await asyncio.gather(session.evaluate(prompts=16), session.evaluate(OTHER, 4))
        assert (evaluated.prompts, other.prompts + other.unscorable) == (16, 4)
        assert (await session.generate("5+6=")).texts
        assert session.version.step == step
        assert not training.done()
        folder = await session.checkpoint()
        assert json.loads((folder / "progress.json").read_text())["step"] == step
        session.resume()

        await until(lambda: session.version.step > step + 1, training)
        training.cancel()  # as an interrupted cell does
        with pytest.raises(asyncio.CancelledError):
            await training
        last = session.version.step + 2
        await session.train(last)
        samples = await session.rollouts(4)
        for shown in (session.buffer, session.generators, session.trainer, session.weights, samples):
            assert shown.rows
            assert "<table>" in shown._repr_html_()
            assert repr(shown)
        temperatures = {e.temperature for group in await session._buffer.samples.call_one(4) for e in group.episodes}
        assert temperatures == {0.8}
    await session.close()
    assert [row["step"] for row in rows(tmp_path)] == list(range(last + 1))
    assert {row["lr"] for row in rows(tmp_path)[3:]} == {1e-4}
    assert max(row["age/max"] for row in rows(tmp_path)[1:]) <= 3
    check_every_prompt_was_trained_once(tmp_path, steps=last)


async def test_a_pinned_evaluation_is_of_one_version_while_training_goes_on(tmp_path: Path) -> None:
    """Case 30. Five steps are trained meanwhile, more than `max_age` allows without new weights: by what another replica samples."""
    async with Session(config(tmp_path, "generator.replicas=2", "buffer.max_age=1", "eval.pin=true")) as session:
        await session.step(1)
        async with session._replicas.pinned(1) as replica:
            pinned = await session.generate("1+2=", n=2, replica=replica)
            await session.step(5)
            later = await session.generate("1+2=", n=2, replica=replica)
        assert {row[3] for row in pinned.rows} == {row[3] for row in later.rows} == {"0.1"}
        assert later.texts == pinned.texts
        await asyncio.wait_for(session._replicas.live[replica].ready.call_one(6).as_asyncio(), DEADLINE_S)
        training = asyncio.create_task(session.step(6))
        evaluated = [await session.evaluate(prompts=48) for _ in range(3)]
        await training
    assert [one.mixed for one in evaluated] == [False] * 3
    assert [one.prompts for one in evaluated] == [48] * 3
    check_every_prompt_was_trained_once(tmp_path, steps=12)


async def test_sessions_one_after_another_and_cells_out_of_order(tmp_path: Path) -> None:
    """In one process, as in a notebook; the second goes on from a checkpoint of the first, on more ranks. Case 7."""
    early = Session(config(tmp_path / "early"))
    for too_early in (early.step(), early.generate("1+2="), early.rollouts(), early.set(lr=1e-4)):
        with pytest.raises(UserError, match=r"this session is not started; `await session\.start\(\)`"):
            await too_early
    assert "not started" in repr(early)
    async with Session(config(tmp_path / "run", "steps=4")) as first:
        with pytest.raises(UserError, match=r"another session is open in this process \(.*run\): close it first"):
            await early.start()
        with pytest.raises(UserError, match="this session is ready; make a new one"):
            await first.start()
        one, other = await asyncio.gather(first.generate("1+2="), first.generate("1+2="))  # before anything is published
        assert one.texts == other.texts
        await first.step(2)
        folder = await first.checkpoint()
        await first.step(1)  # beyond the checkpoint: the next run does it again
    with pytest.raises(UserError, match="this session is closed"):
        await first.step()
    await first.close()
    again = config(tmp_path / "run", "steps=4", "resume=latest", "trainer.ranks=2")
    async with Session(again) as second:
        assert second.version == Version(0, 2)
        await second.train()
        assert (await second.checkpoint() / ".metadata").is_file(), "written by two ranks"
        lives = await second.buffer.ledger(last=1000)
        assert sum(life[1] == "trained" for life in lives.rows) == 4 * 8
        assert {life[1] for life in lives.rows} <= {"trained", "dropped"}
    assert [row["step"] for row in rows(tmp_path / "run")] == [0, 1, 2, 3, 4]
    check_every_prompt_was_trained_once(tmp_path / "run", steps=4)
    with pytest.raises(UserError, match=r"resume=.*nothing: no checkpoint"):
        async with Session(config(tmp_path / "other", f"resume={tmp_path}/nothing")):
            pass
    assert folder.is_dir()
