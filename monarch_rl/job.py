"""One run from the command line: look for mistakes, make the output folder, train, and leave with an exit code that says how it went."""

from __future__ import annotations

import asyncio
import itertools
import os
import signal
import traceback
from pathlib import Path
from typing import Any

from monarch_rl.cluster.hosts import look
from monarch_rl.cluster.placement import host_count, hosts_by_role, place
from monarch_rl.config import Config, UserError, label
from monarch_rl.configure import write
from monarch_rl.observe import console, trackers
from monarch_rl.rendering import Renderer
from monarch_rl.running import Halted
from monarch_rl.session import Session
from monarch_rl.supervise import cause, root
from monarch_rl.tasks import Score, Task, load_task
from monarch_rl.tasks.reward_process import RewardProcess
from monarch_rl.types import Prompt

HALTED = 85
"""Exit code after SIGUSR1, told apart from all others so that a batch script can put the job back in the queue."""


def run(config: Config) -> int:
    """Train as `config` says, in this process as the controller.

    Returns the exit code: 0, 1 (a failure), 2 (a mistake of the user's), 85 (SIGUSR1: a checkpoint was written, `resume=latest`
    goes on from it), 130 (SIGINT) or 143 (SIGTERM).
    """
    output_dir = Path(config.output_dir)
    interrupt = Interrupt(config.close_deadline_s)
    try:
        return asyncio.run(_train(config, interrupt))
    except BaseException as error:
        if interrupt.asked:
            console.complain(f"interrupted; what was written is in {output_dir}")
            return interrupt.exit_code
        if not isinstance(error, Exception) or (isinstance(error, UserError) and error.__cause__ is None):
            raise
        return failed(error, output_dir)


def failed(error: Exception, output_dir: Path) -> int:
    """One line on the console, the rest in error.log."""
    output_dir.mkdir(parents=True, exist_ok=True)
    log = output_dir / "error.log"
    log.write_text("".join(traceback.format_exception(error)), encoding="utf-8")
    console.complain(f"{cause(error)} (whole story in {log})")
    return 2 if isinstance(root(error), UserError) else 1


async def _train(config: Config, interrupt: Interrupt) -> int:
    interrupt.watch()
    async with Session(config) as session:
        interrupt.before_halt(session)
        try:
            await session.train()
        except Halted:
            folder = await session.checkpoint()
            console.say(f"stopped after step {session.version.step}: resume=latest goes on from {folder}")
            return HALTED
        path = await session.save_model()
    console.say(f"done: model in {path}, metrics in {session.output_dir / 'metrics.jsonl'}")
    return 0


class Interrupt:
    """SIGINT and SIGTERM: the first asks for an orderly close within the deadline, a second ends the process at once.
    SIGUSR1, the warning of a batch system: the run stops between two steps, and writes a checkpoint.

    Child processes end with the controller, so ending it is always enough.
    """

    def __init__(self, close_deadline_s: float) -> None:
        self.exit_code = 130
        self._close_deadline_s = close_deadline_s
        self.asked = False
        self._halting: list[asyncio.Task[None]] = []

    def watch(self) -> None:
        """Handle signals in the running loop, for the running task."""
        loop, main = asyncio.get_running_loop(), asyncio.current_task()
        assert main is not None
        for number, code in ((signal.SIGINT, 130), (signal.SIGTERM, 143)):
            loop.add_signal_handler(number, self._on_signal, loop, main, code)

    def before_halt(self, session: Session) -> None:
        """From now on SIGUSR1 halts the session."""
        loop = asyncio.get_running_loop()
        loop.add_signal_handler(signal.SIGUSR1, lambda: self._halting.append(loop.create_task(session.halt())))

    def _on_signal(self, loop: asyncio.AbstractEventLoop, main: asyncio.Task[Any], code: int) -> None:
        if self.asked:
            os._exit(code)
        self.asked, self.exit_code = True, code
        console.say(f"closing (at most {self._close_deadline_s:g} s; once more to end at once)")
        loop.call_later(self._close_deadline_s, os._exit, code)
        main.cancel()


def make_output_dir(config: Config) -> Path:
    """The folder of this run, with its resolved configuration. A folder that holds an earlier run is moved aside, not written over."""
    path = Path(config.output_dir)
    if config.resume == "none" and (path / "metrics.jsonl").exists():
        aside = next(p for n in itertools.count(1) if not (p := path.with_name(f"{path.name}.{n}")).exists())
        path.rename(aside)
        console.say(f"{path} held an earlier run: moved to {aside}")
    path.mkdir(parents=True, exist_ok=True)
    write(config, path / "config.yaml")
    return path


def check(config: Config) -> tuple[Renderer, Task, Prompt, list[int]]:
    """Look for mistakes in placement, model and task before anything is started; the first prompt and its ids come with them.

    Raises:
        UserError: names the key and what is wrong with it.
    """
    hosts_by_role(config, host_count(config))
    trackers.check(config.trackers)
    renderer = Renderer.of(config.model)
    try:
        task = load_task(config.task, config.task_args, config.seed)
        prompt = task.prompt(0, "train")
    except UserError:
        raise
    except Exception as error:  # the task may be the user's own
        raise UserError(f"task={label(config.task)}: {type(error).__name__}: {cause(error)}") from error
    if config.eval.prompts and task.eval_size == 0:
        raise UserError(f"eval.prompts={config.eval.prompts}: task {task.name} has no held-out prompts; set it to 0")
    return renderer, task, prompt, renderer.render(prompt.content)


def dry_run(config: Config) -> list[str]:
    """Check what can be checked without starting the system; one line per finding. Raises UserError as `check` does."""
    renderer, task, prompt, ids = check(config)
    score = asyncio.run(_score_once(config, prompt))
    budget = (config.buffer.max_age + 1) * config.buffer.prompts_per_step - (config.buffer.window - 1)
    return [
        f"model: {renderer.directory}, stop ids {list(renderer.stop_ids)}",
        f"task: {label(config.task)}, {task.size or 'endless'} prompts; the first has {len(ids)} tokens",
        f"reward of an empty completion: {score.reward if score.error is None else score.error}",
        f"admission: {budget} groups ahead at most, {budget / config.buffer.prompts_per_step:g} steps",
        *[f"placement: {processes}" for processes in place(config, asyncio.run(look(config)))],
    ]


async def _score_once(config: Config, prompt: Prompt) -> Score:
    process = RewardProcess(config.task, config.task_args, config.seed)
    try:
        return await process.score(prompt, "", config.scorer.deadline_s)
    finally:
        await process.close()
