"""A generator that stands still where the test wants it to, to be killed there."""

from __future__ import annotations

import asyncio
import os
import threading
from pathlib import Path

from monarch.actor import concurrent_endpoint
from transformers import AutoModelForCausalLM

from actors.generator import Generator
from monarch_rl.types import Version
from tests.engines import System


class HeldGenerator(Generator):
    """Reads a checkpoint instead of following a trainer."""

    @concurrent_endpoint
    async def load(self, model: Path, step: int) -> int:
        """Holds the weights as version 0.`step`; answers with its process."""
        trainer = System(self._engine, self._plan, AutoModelForCausalLM.from_pretrained(model), model)
        await self._engine.swap(trainer.write, Version(0, step))
        return os.getpid()

    @concurrent_endpoint
    async def hold_after(self, steps: int) -> None:
        """Takes so many decode steps and no further one, ever."""
        last, step = self._engine.stats().steps + steps, self._engine._llm.step
        self._held = threading.Event()

        def hold() -> object:
            if self._engine.stats().steps >= last:
                self._held.set()
                threading.Event().wait()
            return step()

        self._engine._llm.step = hold

    @concurrent_endpoint
    async def held(self) -> None:
        """Answers when it stands still."""
        await asyncio.to_thread(self._held.wait)
