"""The output folder of a run: what is refused as one, and how an earlier run in it is kept."""

from __future__ import annotations

import errno
import itertools
import os
import re
import socket
import tempfile
import time
from pathlib import Path

from monarch_rl.config import Config, UserError
from monarch_rl.configure import write
from monarch_rl.observe import console
from monarch_rl.observe.status import read_status

RUN_FILES = {
    *("config.yaml", "metrics.jsonl", "rollouts.jsonl", "ledger.jsonl", "report.html", "timeline.json", "error.log"),
    *("model", "adapter", "checkpoints", "record", "export"),
    *("job.sbatch", "console.log", "tensorboard", "wandb", "trackio", "trackers.json", "status.json", "workers"),
    *(".model", "status.new", "report.new", "metrics.new", "rollouts.new", "ledger.new"),  # of a run that was killed while it wrote them
}
"""What a run writes. A folder that holds anything else is not moved aside, nor filled."""


def check_output_dir(config: Config) -> str:
    """Whether `output_dir` can be had; what will become of it, in words. Leaves nothing behind.

    Raises:
        UserError: names `output_dir` and what stands in the way.
    """
    try:
        return _look(config, _absolute(config))
    except (OSError, RuntimeError) as error:  # pathlib has a RuntimeError for links in a circle
        raise _refusal(config, error) from None


def make_output_dir(config: Config) -> Path:
    """The folder of this run, with its resolved configuration. A folder that holds an earlier run is moved aside, not written over.

    Raises:
        UserError: as `check_output_dir` does.
    """
    check_output_dir(config)
    path = Path(config.output_dir)
    try:
        if config.resume == "none" and holds_run(path):
            old = _absolute(config)
            aside = next(p for n in itertools.count(1) if not (p := old.with_name(f"{old.name}.{n}")).exists())
            old.rename(aside)
            console.say(f"{path} held an earlier run: moved to {path.parent / aside.name}")
        path.mkdir(parents=True, exist_ok=True)
        write(config, path / "config.yaml")
    except OSError as error:
        raise _refusal(config, error) from None
    return path


def holds_run(path: Path) -> bool:
    return (path / "metrics.jsonl").exists()


def of_a_run(name: str) -> bool:
    """Whether a run writes a file of this name. A resumed one keeps the earlier timelines under numbers."""
    return name in RUN_FILES or bool(re.fullmatch(r"timeline\.\d+\.json", name))


def _look(config: Config, path: Path) -> str:
    _check_free(config, path)
    if config.resume == "none":
        _check_own(config, path)
    if config.replay and path.resolve() == Path(config.replay).expanduser().resolve():
        raise UserError(f"output_dir={config.output_dir}: is the run that replay names; name another folder")
    # Permissions do not tell all, e.g. of /proc and of full disks.
    with tempfile.TemporaryDirectory(prefix=".monarch_rl_", dir=_nearest_folder(path)) as probe:
        (Path(probe) / "probe").write_text("probe")
    if not path.exists():
        return f"{config.output_dir}, to be made"
    if config.resume == "none" and holds_run(path):
        return f"{config.output_dir}, whose earlier run will be moved aside"
    return config.output_dir


def _refusal(config: Config, error: Exception) -> UserError:
    return UserError(f"output_dir={config.output_dir}: cannot be written: {getattr(error, 'strerror', None) or error}")


def _absolute(config: Config) -> Path:
    return Path(os.path.abspath(Path(config.output_dir)))


def _nearest_folder(path: Path) -> Path:
    """The folder itself, or where it has to be made. Raises NotADirectoryError."""
    nearest = next(p for p in (path, *path.parents) if os.path.lexists(p))
    if not nearest.is_dir():
        raise NotADirectoryError(errno.ENOTDIR, f"{nearest} is no folder")
    return nearest


def _check_free(config: Config, path: Path) -> None:
    """Two runs must not write into one folder. A job that Slurm starts again has ended before, whatever its last word was."""
    status = read_status(path)
    if status is None or status.state != "running" or "SLURM_RESTART_COUNT" in os.environ:
        return
    if (status.host, status.pid) != (socket.gethostname(), os.getpid()):
        ago_s = time.time() - status.updated
        raise UserError(
            f"output_dir={config.output_dir}: a run goes on there (process {status.pid} on {status.host}, heard of {ago_s:.0f} s ago); "
            "end it first, or name a folder for this run alone"
        )


def _check_own(config: Config, path: Path) -> None:
    """A new run may fill a folder that is new, empty, or holds nothing but a run."""
    if Path.cwd().is_relative_to(path.resolve()):
        raise UserError(f"output_dir={config.output_dir}: the folder you start from lies in it; name one for this run alone")
    if path.is_dir() and (foreign := sorted(entry.name for entry in path.iterdir() if not of_a_run(entry.name))):
        raise UserError(f"output_dir={config.output_dir}: holds {foreign[0]}, which no run has written; name a folder for this run alone")
    if holds_run(path) and Path(config.model.path).expanduser().resolve().is_relative_to(path.resolve()):
        raise UserError(f"output_dir={config.output_dir}: would be moved aside, and model.path={config.model.path} is in it")
