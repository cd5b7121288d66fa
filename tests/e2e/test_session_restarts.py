"""A session driven by hand whose trainer is killed: between two steps, and while it is paused."""

from __future__ import annotations

import asyncio
import json
import os
import signal
from collections.abc import Callable
from pathlib import Path

import pytest

from monarch_rl.configure import load
from monarch_rl.session import Session
from monarch_rl.types import Version

pytestmark = pytest.mark.timeout(400)

DEADLINE_S = 180.0
PROMPTS = 8
SMALL = [
    *("recipe=grpo_qwen", "profile=cpu", f"buffer.prompts_per_step={PROMPTS}", "trainer.warmup_steps=1", "trainer.lr=1e-6"),
    *("eval.prompts=8", "eval.every=0", "console.rollouts_every=0", "steps=600", "checkpoint.every=2"),
]


async def kill_the_trainer(session: Session) -> None:
    usage = await session._meshes.processes()["trainer"].usage.call_one()
    os.kill(usage.pid, signal.SIGKILL)


async def until(reached: Callable[[], bool]) -> None:
    async with asyncio.timeout(DEADLINE_S):
        while not reached():  # noqa: ASYNC110
            await asyncio.sleep(0.05)


async def test_steps_and_pauses_outlive_the_trainer(tmp_path: Path) -> None:
    async with Session(load([*SMALL, f"output_dir={tmp_path}"]).config) as session:
        await session.step(3)
        await kill_the_trainer(session)
        shown = await session.step(2)
        assert session.version == Version(1, 5), "two more than there were; the third is done again, from the checkpoint of the second"
        assert [row[0] for row in shown.rows] == [4, 5]

        training = asyncio.create_task(session.train(9))
        await until(lambda: session.version.step >= 6)
        await session.pause()
        paused = session.version.step
        await kill_the_trainer(session)
        await until(lambda: session.version.lineage == 2)
        back = session.version.step
        assert back <= paused
        assert back % 2 == 0
        evaluated, asked = await asyncio.gather(session.evaluate(prompts=4), session.generate("1+2="))
        assert evaluated.prompts + evaluated.unscorable == 4
        assert asked.texts
        assert await session.checkpoint() == tmp_path / "checkpoints" / f"step_{back}"
        assert session.version == Version(2, back), "still paused"
        assert not training.done()
        session.resume()
        await asyncio.wait_for(training, DEADLINE_S)
        assert session.version == Version(2, 9)

    rows = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows] == list(range(10))
    assert max(row["age/max"] for row in rows[1:]) <= 2
    trained = [json.loads(line)["ordinal"] for line in (tmp_path / "rollouts.jsonl").read_text().splitlines()]
    assert len(trained) == len(set(trained)) == 9 * PROMPTS
    assert max(trained) < 9 * PROMPTS + rows[-1]["buffer/dropped"]
