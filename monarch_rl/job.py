"""One run from the command line: look for mistakes, make the output folder, train, and leave with an exit code that says how it went."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import threading
import traceback
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

from monarch_rl import checkpoint, preflight
from monarch_rl.cluster.hosts import look
from monarch_rl.cluster.placement import place
from monarch_rl.config import Config, UserError
from monarch_rl.observe import console
from monarch_rl.output import check_output_dir
from monarch_rl.running import CLOSE_S, Halted
from monarch_rl.session import Session
from monarch_rl.supervise import cause, root

HALTED = 85
"""Exit code after SIGUSR1, told apart from all others so that a batch script can put the job back in the queue."""


def run(config: Config) -> int:
    """Train as `config` says, in this process as the controller.

    Returns the exit code: 0, 1 (a failure), 2 (a mistake of the user's), 85 (SIGUSR1: a checkpoint was written, `resume=latest`
    goes on from it), 129 (SIGHUP), 130 (SIGINT) or 143 (SIGTERM).
    """
    output_dir = Path(config.output_dir)
    interrupt = Interrupt(config)
    try:
        return asyncio.run(_train(config, interrupt))
    except BaseException as error:
        if interrupt.asked:
            return interrupt.tell()
        if not isinstance(error, Exception) or (isinstance(error, UserError) and error.__cause__ is None):
            raise
        return failed(error, output_dir)


def failed(error: Exception, output_dir: Path | None = None) -> int:
    """One line on the console, the rest in error.log where there is a folder for it; the exit code."""
    if output_dir is None:
        console.complain(cause(error))
        return 2 if isinstance(root(error), UserError) else 1
    log = output_dir / "error.log"
    try:
        output_dir.mkdir(parents=True, exist_ok=True)
        log.write_text("".join(traceback.format_exception(error)), encoding="utf-8")
        where = f"whole story in {log}"
    except OSError as refused:
        where = f"{log} cannot be written: {refused.strerror}"
    code = 2 if isinstance(root(error), UserError) else 1
    newest = _newest(output_dir) if code == 1 else None
    then = f"; resume=latest goes on from {newest}, what came after it is lost" if newest else ""
    console.complain(f"{cause(error)}{then} ({where})")
    return code


def _newest(output_dir: Path) -> Path | None:
    """The checkpoint from which `resume=latest` goes on."""
    with contextlib.suppress(UserError):  # of one that is removed while they are listed
        return checkpoint.to_resume("latest", output_dir)
    return None


async def _train(config: Config, interrupt: Interrupt) -> int:
    session = Session(config)
    interrupt.watch(session)
    async with session, interrupt.saves(session):
        code, said = await _to_the_end(session)
    console.say(said)
    return code


async def _to_the_end(session: Session) -> tuple[int, str]:
    """Exit code and last line of a run that ends by itself, or by SIGUSR1."""
    try:
        await session.train()
    except Halted:
        folder = await session.checkpoint()
        return HALTED, f"stopped after step {session.version.step}: resume=latest goes on from {folder}"
    path = await session.save_model()
    return 0, f"done: model in {path}, metrics in {session.output_dir / 'metrics.jsonl'}"


class Interrupt:
    """SIGINT, SIGTERM and SIGHUP: the first has the run write a checkpoint after the step in progress and close, within
    `close_deadline_s`; the next has it close without one, within `CLOSE_S`; the next ends the process at once. Where there is nothing to
    save, the first is the close. SIGUSR1, the warning of a batch system: the run stops between two steps, and writes a checkpoint.

    Child processes end with the controller, so ending it is always enough.
    """

    def __init__(self, config: Config) -> None:
        self.exit_code = 130
        self.asked = False
        self._config = config
        self._may_save = False
        self._without = f"interrupted; what was written is in {config.output_dir}"
        self._last_words: str | None = self._without
        self._halting: list[asyncio.Task[None]] = []

    def watch(self, session: Session) -> None:
        """Handle signals in the running loop, for the running task."""
        loop, main = asyncio.get_running_loop(), asyncio.current_task()
        assert main is not None
        for number, code in ((signal.SIGINT, 130), (signal.SIGTERM, 143), (signal.SIGHUP, 129)):
            if number != signal.SIGHUP or signal.getsignal(number) is not signal.SIG_IGN:  # as nohup leaves it
                loop.add_signal_handler(number, self._on_signal, session, main, code)
        loop.add_signal_handler(signal.SIGQUIT, lambda: session.show_waits())

    @contextlib.asynccontextmanager
    async def saves(self, session: Session) -> AsyncIterator[None]:
        """What interrupts the body has the session write a checkpoint, and SIGUSR1 halts it."""
        loop = asyncio.get_running_loop()
        loop.add_signal_handler(signal.SIGUSR1, lambda: self._halting.append(loop.create_task(session.halt())))
        self._may_save = True
        try:
            yield
        except asyncio.CancelledError:
            if self.asked and self._may_save:
                await self._save(session)
            raise
        finally:
            self._may_save = False

    def tell(self) -> int:
        """Say, once, that it was interrupted; the exit code."""
        said, self._last_words = self._last_words, None
        if said is not None:
            with contextlib.suppress(OSError):  # of a terminal that has hung up
                console.complain(said)
        return self.exit_code

    async def _save(self, session: Session) -> None:
        """In what time there is for it; and know what to say at the end."""
        whole_s = self._config.close_deadline_s
        left_s = whole_s - min(CLOSE_S, whole_s / 2)
        try:
            async with asyncio.timeout(left_s):
                saved = await session.stop()
            self._last_words = self._without
            if saved is not None:
                self._last_words = f"interrupted after step {session.version.step}: resume=latest goes on from {saved}"
        except TimeoutError:
            self._nothing_saved(f"step and checkpoint took more than {left_s:g} s (of close_deadline_s={whole_s:g})")
        except Exception as error:  # it closes, whatever is the matter with it
            self._nothing_saved(cause(error))

    def _on_signal(self, session: Session, main: asyncio.Task[Any], code: int) -> None:
        if self.asked and not self._may_save:
            self._end(session)
        self._may_save = self._may_save and not self.asked and session.worth_saving
        most_s = self._config.close_deadline_s
        if self._may_save:
            self._close_within(most_s, session, "closing after the step in progress and a checkpoint", "close without")
            self._nothing_saved("it came to no end")  # if that is how it will be
        else:
            self._close_within(min(CLOSE_S, most_s), session, "closing", "end at once")
            if self.asked:
                self._nothing_saved("it was interrupted again")
        self.asked, self.exit_code = True, code
        main.cancel()

    def _close_within(self, deadline_s: float, session: Session, what: str, once_more: str) -> None:
        # A thread, since the loop may be what does not come to its end.
        deadline = threading.Timer(deadline_s, self._end, (session,))
        deadline.daemon = True
        deadline.start()
        with contextlib.suppress(UserError):
            console.say(f"{what} (at most {deadline_s:g} s; once more to {once_more})")

    def _nothing_saved(self, why: str) -> None:
        newest = _newest(Path(self._config.output_dir))
        then = f"resume=latest goes on from {newest}" if newest else f"what was written is in {self._config.output_dir}"
        self._last_words = f"interrupted, and nothing was saved: {why}; {then}"

    def _end(self, session: Session) -> None:
        """At once, whatever is still open."""
        with contextlib.suppress(Exception):
            session.close_console()
        self.tell()
        os._exit(self.exit_code)


def dry_run(config: Config) -> list[str]:
    """Check what can be checked without starting the system; one line per finding. Raises UserError as `preflight` does."""
    output = check_output_dir(config)
    renderer, task = preflight.check(config)
    found = preflight.look_closely(config, renderer, task)
    budget = (config.buffer.max_age + 1) * config.buffer.prompts_per_step - (config.buffer.window - 1)
    return [
        f"output: {output}",
        f"model: {renderer.directory}, stop ids {list(renderer.stop_ids)}",
        *found,
        f"admission: {budget} groups ahead at most, {budget / config.buffer.prompts_per_step:g} steps",
        *[f"placement: {processes}" for processes in place(config, asyncio.run(look(config)))],
    ]
