"""The command line: `python -m monarch_rl.run recipe=NAME [key=value …]`, also installed as `monarch-rl`.

Settles the configuration, then hands over to `job`, or to a command of `commands`; nothing heavy is imported before that.
"""

from __future__ import annotations

import os
import shutil
import signal
import sys
from collections.abc import Callable, Sequence
from importlib.util import find_spec
from pathlib import Path

from monarch_rl import commands
from monarch_rl.config import Config, UserError
from monarch_rl.configure import Resolved, help_table, load, provenance_table, recipe_names

USAGE = """\
usage:   python -m monarch_rl.run recipe=NAME [key=value ...] [option ...], or COMMAND ...
example: python -m monarch_rl.run recipe=grpo_qwen steps=20 trainer.lr=1e-4
options: --print, --dry-run, --help; commands: report, watch, eval, export, inspect, worker"""

HELP = """
  recipe=NAME   ./recipes/NAME.yaml, else the recipe of that name that comes with
                the package; or the path of a YAML file, such as the config.yaml
                of an earlier run. From here: {recipes}
  --print       show every value and where it came from, then exit
  --dry-run     check paths, tokenizer, reward and placement, then exit
  --help        this text; COMMAND --help tells about a command

Commands, instead of training:
{commands}

Where a key is set more than once, the last of these counts: default, recipe,
its profile, command line."""

FLAGS = {"-h", "--help", "--print", "--dry-run"}


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line and return its exit code: 0, 2 for a user's mistake, 130 for Ctrl-C, else the run's."""
    arguments = sys.argv[1:] if argv is None else list(argv)
    if not arguments:
        print(USAGE, file=sys.stderr)
        return 2
    if arguments[0] in commands.COMMANDS:
        return _guarded(lambda: commands.run(arguments[0], arguments[1:]))
    flags = FLAGS.intersection(arguments)
    if flags & {"-h", "--help"}:
        width = shutil.get_terminal_size(fallback=(120, 24)).columns
        _show(USAGE, HELP.format(commands=commands.listed(), recipes=", ".join(recipe_names())), help_table(width))
        return 0
    if "=" not in arguments[0] and not arguments[0].startswith("-"):
        return _guarded(lambda: commands.unknown(arguments[0]))
    settings = [argument for argument in arguments if argument not in FLAGS]
    return _guarded(lambda: _start(load(settings), flags, settings))


def _guarded(work: Callable[[], int]) -> int:
    """The exit code of some work; a user's mistake is one line."""
    try:
        return work()
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130


def _start(resolved: Resolved, flags: set[str], settings: Sequence[str]) -> int:
    _show(f"profile {resolved.profile} ({resolved.profile_reason})" + _settled_again(resolved))
    if "--print" in flags:
        _show(provenance_table(resolved))
    if "--dry-run" in flags:
        check_actors()
        from monarch_rl.job import dry_run

        _show(*dry_run(resolved.config))
    if flags:
        return 0
    check_actors()
    if resolved.config.cluster.kind == "slurm":
        return _start_on_slurm(resolved.config, settings)
    from monarch_rl.job import run

    return run(resolved.config)


def _settled_again(resolved: Resolved) -> str:
    """What a login node finds says nothing of the nodes."""
    if resolved.config.cluster.kind != "slurm" or not resolved.profile_reason.startswith("auto"):
        return ""
    from monarch_rl.cluster.slurm import inside_allocation

    return "" if inside_allocation() else "; the job looks for a GPU on its first node"


def _start_on_slurm(config: Config, settings: Sequence[str]) -> int:
    """Inside an allocation use it; elsewhere submit a job that runs the same command."""
    from monarch_rl.cluster import slurm

    if not slurm.inside_allocation():
        from monarch_rl.submit import submit

        return submit(config, settings)
    # Until the run can do better: it may take minutes to start.
    signal.signal(signal.SIGUSR1, lambda *_: slurm.warned_early(config.cluster.warning_s))
    from monarch_rl.job import run

    code = run(config)
    if code == slurm.REQUEUE:
        slurm.requeue()
    return code


def _show(*texts: str) -> None:
    try:
        print(*texts, sep="\n", flush=True)
    except OSError as error:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # what Python flushes at exit must go somewhere
        if not isinstance(error, BrokenPipeError):  # `--help | head`: the reader has seen enough
            raise UserError(f"cannot write to stdout: {error.strerror}") from error


def check_actors() -> None:
    """Refuse to start when a file of the user's hides our `actors` package; looks without importing.

    Raises:
        UserError: naming the file.
    """
    ours = Path(__file__).resolve().parent.parent / "actors"
    spec = find_spec("actors")
    places = list(spec.submodule_search_locations or []) if spec else []
    if not spec or ours not in [Path(place).resolve() for place in places]:
        found = f"{spec.origin or places[0]} hides it; rename that file, or start from another folder" if spec else "it is not installed"
        raise UserError(f"monarch_rl needs its own package {ours}, but {found}")


if __name__ == "__main__":
    sys.exit(main())
