"""The checkpoints of a session, one at a time: what is to be written is copied between two steps, and written beside the next ones."""

from __future__ import annotations

import asyncio
import shutil
from pathlib import Path
from typing import TYPE_CHECKING, Any

from monarch_rl import checkpoint, resume
from monarch_rl.config import Config
from monarch_rl.lives import Progress
from monarch_rl.meshes import START_DEADLINE_S
from monarch_rl.supervise import answer
from monarch_rl.trainers import Trainers
from monarch_rl.types import Version

if TYPE_CHECKING:
    from monarch.actor import Future

    from monarch_rl.tasks import Task


class Saving:
    """`newest` is the last complete checkpoint, or what the run was resumed from."""

    def __init__(self, config: Config, task: Task, trainers: Trainers, buffer: Any, newest: Path | None) -> None:
        self._config, self._task, self._trainers, self._buffer, self.newest = config, task, trainers, buffer, newest
        self._writing: asyncio.Task[None] | None = None
        self._failed: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def newest_step(self) -> int:
        """Where trainers can go on."""
        return checkpoint.read_progress(self.newest).step if self.newest else 0

    async def begin(self, version: Version) -> Path:
        """Between two steps, when no other is being written. Where it will be."""
        folder = checkpoint.folder_of(Path(self._config.output_dir), version.step)
        snapshot = self._buffer.snapshot.call_one(version.step)
        progress: Progress = await answer(snapshot, "replay buffer (snapshot)", 60.0)
        # Before the next step, since messages keep their order.
        copied = self._trainers.ranks.checkpoint.call(checkpoint.unfinished(folder))
        self._writing = asyncio.create_task(self._write(folder, progress, copied), name=f"checkpoint of step {progress.step}")
        self._writing.add_done_callback(self._end)
        return folder

    def listen(self) -> asyncio.Future[None]:
        """A training that goes on beside it hears at once of one that cannot be written, by the failure of this."""
        self._failed = asyncio.get_running_loop().create_future()
        return self._failed

    async def written(self) -> None:
        """Wait for the one that was begun. Raises what it fails with, but not that the trainers were lost."""
        if (writing := self._writing) is not None:
            try:
                await asyncio.shield(writing)
            finally:
                if self._writing is writing and writing.done():
                    self._writing = None

    async def abandon(self) -> None:
        """The trainers are lost: what they have copied is written all the same, the rest is removed."""
        if self._writing is not None:
            await asyncio.wait({self._writing})
            self._writing = None
        checkpoint.sweep(Path(self._config.output_dir))

    def _end(self, writing: asyncio.Task[None]) -> None:
        if not writing.cancelled() and (error := writing.exception()) is not None and not self._failed.done():
            self._failed.set_exception(error)
            self._failed.exception()  # there may be no training

    async def _write(self, folder: Path, progress: Progress, copied: Future[Any]) -> None:
        unfinished = checkpoint.unfinished(folder)
        try:
            await self._trainers.answer(copied, "trainers (checkpoint)", START_DEADLINE_S)
            await answer(self._buffer.save.call_one(unfinished), "replay buffer (checkpoint)", START_DEADLINE_S)
            resume.write(unfinished, self._config, self._task)
            checkpoint.complete(folder, progress, self._config.checkpoint.keep)
        except Exception as error:
            shutil.rmtree(unfinished, ignore_errors=True)
            if await self._trainers.are_lost(error):
                return
            raise
        self.newest = folder
        await answer(self._buffer.covered.call_one(progress.step), "replay buffer (checkpoint)", START_DEADLINE_S)


def heard(task: asyncio.Task[Any]) -> None:
    """What fails after its caller was cancelled, because the run ends, has nothing to tell."""
    if not task.cancelled():
        task.exception()
