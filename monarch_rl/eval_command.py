"""`monarch-rl eval`: held-out accuracy of a model, by a session that only evaluates."""

from __future__ import annotations

import asyncio
import contextlib
import io
import json
import tempfile
from collections.abc import Sequence
from pathlib import Path

from monarch_rl.config import Config, UserError
from monarch_rl.configure import load
from monarch_rl.evaluation import Evaluated
from monarch_rl.export import export, newest
from monarch_rl.job import Interrupt, failed
from monarch_rl.observe import console
from monarch_rl.session import Session

OWN = {
    "steps": "1",
    "trainer.warmup_steps": "0",
    "trainer.schedule": "constant",
    "generator.group_size": "2",
    "buffer.prompts_per_step": "1",
    "buffer.max_age": "0",
    "buffer.window": "1",
    "buffer.dead_groups": "keep",
    "weights.every": "1",
    "model.lora.rank": "0",
    "eval.every": "0",
    "console.rollouts_every": "0",
}
"""Nothing is trained, so that of training prompts no more than one is asked; what is evaluated has its adapters merged."""


def evaluate(path: str, settings: Sequence[str]) -> int:
    """Print the accuracy, for people and as a line of JSON; the exit code, as of `job.run`.

    Raises:
        UserError: a path or a setting is wrong.
    """
    with tempfile.TemporaryDirectory(prefix="monarch_rl_eval_") as work:
        config, version = settle(path, settings, Path(work))
        interrupt = Interrupt(config)
        try:
            with contextlib.redirect_stdout(io.StringIO()):  # a session tells of its start
                evaluated = asyncio.run(_evaluate(config, interrupt))
        except BaseException as error:
            if interrupt.asked:
                return interrupt.tell()
            if not isinstance(error, Exception) or isinstance(error, UserError):
                raise
            return failed(error)
    show(path, config, evaluated, version)
    return 0


def settle(path: str, settings: Sequence[str], work: Path) -> tuple[Config, str | None]:
    """The configuration, and the version of the weights where a run says it.

    Raises:
        UserError: a setting that is not for evaluations; no task; nothing to evaluate.
    """
    taken = sorted({setting.partition("=")[0] for setting in settings} & {*OWN, "output_dir", "model.path"})
    if taken:
        raise UserError(f"{taken[0]}: not a setting of eval, which trains nothing and writes nothing")
    own = [f"{key}={value}" for key, value in OWN.items()]
    folder = Path(path).expanduser()
    if (folder / "config.yaml").is_file():
        weights = newest(folder)
        model = export(folder, work / "model") if weights.is_checkpoint else weights.path
        base, version = [f"recipe={folder / 'config.yaml'}"], f"0.{weights.step}"
    else:
        if not any(setting.startswith(("task=", "recipe=")) for setting in settings):
            kind = "no output folder of a run" if folder.exists() else "no folder"
            raise UserError(f"{path} is {kind}: to evaluate it as a model, say what to ask it with task=NAME")
        model, base, version = folder if folder.exists() else Path(path), [], None
    config = load([*base, *settings, *own, f"model.path={model}", f"output_dir={work / 'run'}"]).config
    if not config.eval.prompts:
        raise UserError("eval.prompts=0: there is nothing to evaluate; say eval.prompts=N")
    return config, version


async def _evaluate(config: Config, interrupt: Interrupt) -> Evaluated:
    session = Session(config)
    interrupt.watch(session)
    async with session:
        return await session.evaluate(prompts=config.eval.prompts)


def show(path: str, config: Config, evaluated: Evaluated, version: str | None) -> None:
    said = "nothing could be scored" if evaluated.accuracy is None else f"accuracy {evaluated.accuracy:.3f}"
    of = f" (version {version})" if version else ""
    counts = f"{evaluated.prompts} held-out prompts, {evaluated.unscorable} unscorable"
    console.say(f"{path}{of} on {config.task}: {said}, {counts}")
    figures = {"accuracy": evaluated.accuracy, "prompts": evaluated.prompts, "unscorable": evaluated.unscorable}
    console.say(json.dumps(figures | {"version": version, "task": config.task, "model": path}))
