"""Commands of the command line beside training: `report`, `watch`, `eval`, `export`, `inspect`. Each says how it went in its exit code.

Nothing heavy is imported before the arguments are checked.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path
from typing import NoReturn

from monarch_rl.config import UserError

DTYPES = ("float32", "bfloat16")


@dataclass(frozen=True)
class Command:
    """One word of the command line."""

    usage: str
    summary: str
    """for the list of commands"""
    help: str
    run: Callable[[list[str]], int]


def run(name: str, arguments: Sequence[str]) -> int:
    """Run a command and return its exit code. Raises UserError: an argument is wrong."""
    command = COMMANDS[name]
    if {"-h", "--help"}.intersection(arguments):
        print(f"usage: monarch-rl {command.usage}\n\n{command.help}", flush=True)
        return 0
    return command.run(list(arguments))


def listed() -> str:
    """The commands, a line each."""
    return "\n".join(f"  {name:<8}{command.summary}" for name, command in COMMANDS.items())


def unknown(word: str) -> NoReturn:
    """Raises UserError: the first word is neither a command nor a setting nor an option."""
    near = get_close_matches(word, COMMANDS, n=1)
    hint = f"did you mean {near[0]!r}? " if near else ""
    raise UserError(f"no command {word!r}; {hint}commands: {', '.join(COMMANDS)}; settings are key=value, e.g. recipe=grpo_qwen")


def output_folder(name: str) -> Path:
    """The output folder of a run.

    Raises:
        UserError: there is no such folder, or no run has written into it; names those below it where there are some.
    """
    path = Path(name).expanduser()
    if not path.exists():
        raise UserError(f"{name}: there is no such folder")
    if not path.is_dir() or not (path / "config.yaml").is_file():
        runs = sorted(file.parent for file in path.glob("*/config.yaml"))[:3] if path.is_dir() else []
        hint = f"; below it are {', '.join(map(str, runs))}" if runs else ""
        raise UserError(f"{name} is no output folder of a run: it has no config.yaml{hint}")
    return path


def _one_folder(name: str, arguments: list[str]) -> Path:
    if len(arguments) != 1 or arguments[0].startswith("-"):
        raise UserError(f"{name} takes one output folder: monarch-rl {COMMANDS[name].usage}")
    return output_folder(arguments[0])


def _report(arguments: list[str]) -> int:
    folder = _one_folder("report", arguments)
    from monarch_rl.observe.report import read_rows, write_report

    rows = read_rows(folder / "metrics.jsonl")
    print(write_report(folder), flush=True)
    if not rows:
        print(f"{folder} has no rows yet: metrics.jsonl is empty", file=sys.stderr)
    return 0


def _watch(arguments: list[str]) -> int:
    folder = _one_folder("watch", arguments)
    from monarch_rl.configure import load
    from monarch_rl.observe.watch import watch

    status = asyncio.run(watch(folder, load([f"recipe={folder / 'config.yaml'}", f"output_dir={folder}"]).config))
    print(f"the run has ended: {status}", flush=True)
    return 0 if status.state == "done" else 1


def _eval(arguments: list[str]) -> int:
    if not arguments or arguments[0].startswith("-") or "=" in arguments[0]:
        raise UserError(f"eval takes a model or an output folder first: monarch-rl {COMMANDS['eval'].usage}")
    from monarch_rl.eval_command import evaluate

    return evaluate(arguments[0], arguments[1:])


def _export(arguments: list[str]) -> int:
    adapter = "--adapter" in arguments
    rest = [argument for argument in arguments if argument != "--adapter"]
    words, options = _options(rest, {"--to": "a folder", "--dtype": " or ".join(DTYPES)})
    dtype = options.get("--dtype", "")
    if dtype and dtype not in DTYPES:
        raise UserError(f"--dtype must be {' or '.join(DTYPES)}, got {dtype!r}")
    if adapter and dtype:
        raise UserError("--dtype: an adapter is written in float32")
    folder = _one_folder("export", words)
    from monarch_rl.export import export

    print(export(folder, Path(options["--to"]) if "--to" in options else None, dtype or None, adapter=adapter), flush=True)
    return 0


def _inspect(arguments: list[str]) -> int:
    words, options = _options(arguments, {"--prompt": "an ordinal"})
    folder = _one_folder("inspect", words)
    ordinal = options.get("--prompt", "")
    if ordinal and not ordinal.isdecimal():
        raise UserError(f"--prompt must be an ordinal, got {ordinal!r}")
    from monarch_rl.inspect_command import inspect

    print(inspect(folder, int(ordinal) if ordinal else None), flush=True)
    return 0


def _worker(arguments: list[str]) -> int:
    from monarch_rl.cluster.worker import main

    return main(arguments)


def _options(arguments: Sequence[str], known: Mapping[str, str]) -> tuple[list[str], dict[str, str]]:
    """Words, and the values of `--name VALUE` or `--name=VALUE`."""
    words: list[str] = []
    options: dict[str, str] = {}
    rest = iter(arguments)
    for argument in rest:
        name, equals, value = argument.partition("=")
        if not name.startswith("-"):
            words.append(argument)
            continue
        if name not in known:
            raise UserError(f"unknown option {name!r}; there are {', '.join(known)}")
        found = value if equals else next(rest, "")
        if not found:
            raise UserError(f"{name} needs a value: {known[name]}")
        options[name] = found
    return words, options


COMMANDS = {
    "report": Command(
        "report OUTPUT_DIR",
        "write report.html again, also of a run that goes on or has died",
        "Writes OUTPUT_DIR/report.html from what the run has written so far: state, curves, who did what, failures, rollouts, settings.",
        _report,
    ),
    "watch": Command(
        "watch OUTPUT_DIR",
        "the console of a run that was started elsewhere",
        "Shows the run until it ends. Ctrl-C ends the watching, not the run.\nExit code: 0 when the run did all its steps, else 1.",
        _watch,
    ),
    "eval": Command(
        "eval MODEL_OR_OUTPUT_DIR [task=NAME] [eval.prompts=N] [key=value ...]",
        "held-out accuracy of a model, or of the newest weights of a run",
        """Samples held-out prompts, one episode each, with the engine, the tasks and the scorers of training.
  MODEL       directory or hub name of a Hugging Face causal LM; task= says what to ask it
  OUTPUT_DIR  of a run: its newest weights, its task and its settings, unless key=value says otherwise
The last line on stdout is one JSON object: accuracy, prompts, unscorable, version, task, model.""",
        _eval,
    ),
    "export": Command(
        "export OUTPUT_DIR [--to DIR] [--dtype float32|bfloat16 | --adapter]",
        "the newest weights of a run as a Hugging Face directory",
        """Takes the newer of OUTPUT_DIR/model and the last of OUTPUT_DIR/checkpoints.
  --to DIR    where to write (OUTPUT_DIR/export); must be empty or absent
  --dtype     of the weights; without it the run's model.dtype
  --adapter   of a run with model.lora.rank: the adapters alone, in peft's format; without it they are merged""",
        _export,
    ),
    "inspect": Command(
        "inspect OUTPUT_DIR [--prompt ORDINAL]",
        "which prompts are in flight, trained and dropped, and why",
        """Tells from OUTPUT_DIR/ledger.jsonl how many prompts are in each state, what is in flight and who holds it, and what was dropped
and why; also of a run that goes on or has died.
  --prompt    the whole life of one prompt""",
        _inspect,
    ),
    "worker": Command(
        "worker --address tcp://HOST:PORT [--publish DIR] [--stay]",
        "lend this host to a run with cluster.kind=attach",
        """Serves one controller, and ends with it all that it has started here. Whoever reaches the port can run what he likes.
  --address   where controllers reach this host; port 0 takes a free one
  --publish   write the address into a file of this folder
  --stay      serve another controller when one is done""",
        _worker,
    ),
}
