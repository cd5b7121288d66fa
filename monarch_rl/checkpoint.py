"""`checkpoints/step_N/`: what a run needs to go on, complete or absent.

The trainer ranks write their shards with torch's distributed checkpoint, which reads them back on any number of ranks; the replay
buffer writes the ledger and the groups that are not trained yet; the controller adds `progress.json` and gives the folder its name last.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from monarch_rl import arrays
from monarch_rl.config import UserError
from monarch_rl.lives import Progress
from monarch_rl.types import Group

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

    from monarch_rl.learner import Learner

PROGRESS = "progress.json"
LEDGER = "ledger.npz"
GROUPS = "groups.npz"
PREFIX = "step_"
BASE = "base of the adapters"
"""Of what the trainers write: the digest of the base model, with adapters."""


def folder_of(output_dir: Path, step: int) -> Path:
    return output_dir / "checkpoints" / f"{PREFIX}{step}"


def unfinished(folder: Path) -> Path:
    """Where a checkpoint is written before it is complete."""
    return folder.with_name(f".{folder.name}")


def complete(folder: Path, progress: Progress, keep: int) -> None:
    """All have written: say where the run stands, give the folder its name, remove all but the newest `keep`.

    A folder of that name is of the same step of the same run, and stays.
    """
    written = unfinished(folder)
    with (written / PROGRESS).open("w", encoding="utf-8") as file:
        file.write(json.dumps(progress._asdict()) + "\n")
        file.flush()
        os.fsync(file.fileno())
    if folder.exists():
        shutil.rmtree(written)
    else:
        written.rename(folder)
    for old in found(folder.parent)[:-keep]:
        _remove(old)


def sweep(output_dir: Path) -> None:
    """Remove what runs left that were killed while they wrote."""
    for left in (output_dir / "checkpoints").glob(f".{PREFIX}*"):
        shutil.rmtree(left)


def set_aside(output_dir: Path, after: int) -> None:
    """Checkpoints of steps above `after` are not those of the run that goes on from there: nothing resumes from them any more."""
    for folder in found(output_dir / "checkpoints"):
        if read_progress(folder).step > after:
            aside = folder.with_name(f"aside_{folder.name}")
            shutil.rmtree(aside, ignore_errors=True)
            folder.rename(aside)


def found(checkpoints: Path) -> list[Path]:
    """The complete checkpoints in a folder, the newest last."""
    named = [path for path in checkpoints.glob(f"{PREFIX}*") if (path / PROGRESS).is_file()]
    return sorted(named, key=lambda path: read_progress(path).step)


def write_buffer(folder: Path, state: Mapping[str, Any], groups: Sequence[Group]) -> None:
    """The replay buffer's part: the state of its ledger, and the groups that wait for a step."""
    folder.mkdir(parents=True, exist_ok=True)
    arrays.write(folder / LEDGER, {name: part for name, part in state.items() if name != "columns"}, state["columns"])
    arrays.write(folder / GROUPS, *arrays.pack(groups))


def read_buffer(folder: Path) -> tuple[dict[str, Any], list[Group]]:
    """What `write_buffer` wrote. Raises UserError: it is not there, or damaged."""
    state, columns = arrays.read(folder / LEDGER)
    return state | {"columns": columns}, arrays.unpack(*arrays.read(folder / GROUPS))


def read_progress(folder: Path) -> Progress:
    """Raises UserError: that is no checkpoint."""
    try:
        return Progress(**json.loads((folder / PROGRESS).read_text()))
    except (OSError, TypeError, ValueError) as error:
        raise UserError(f"resume={folder}: no checkpoint, its {PROGRESS} cannot be read: {error}") from None


def to_resume(resume: str, output_dir: Path) -> Path | None:
    """The checkpoint that `resume` means: `none`, `latest` (of `output_dir`; None where there is none yet), or a path."""
    if resume == "none":
        return None
    if resume == "latest":
        return next(reversed(found(output_dir / "checkpoints")), None)
    folder = Path(resume)
    read_progress(folder)
    return folder


def _remove(folder: Path) -> None:
    """Under another name first, so that what is half removed is no checkpoint."""
    doomed = folder.with_name(f".{folder.name}.removed")
    shutil.rmtree(doomed, ignore_errors=True)
    folder.rename(doomed)
    shutil.rmtree(doomed)


class Saver:
    """Writes the checkpoints of one trainer rank beside its steps, one after the other. Keeps the memory of a copy of the state, since
    to get it anew takes longer than to fill it."""

    def __init__(self, group: ProcessGroup | None) -> None:
        """`group`: of its own, with a CPU backend, since training goes on in the others."""
        from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions

        plain = StagingOptions(use_pinned_memory=False, use_shared_memory=False, use_async_staging=False, use_non_blocking_copy=False)
        self._stager, self._group = DefaultStager(plain), group

    def save(self, learner: Learner, folder: Path, told: Callable[[Exception | None], None]) -> None:
        """Collective; each rank copies its shards and writes them afterwards. `told` that it is done, or why not, by another thread."""
        from torch.distributed.checkpoint.state_dict_saver import async_save

        writing: Any = async_save(_state(learner), checkpoint_id=folder, process_group=self._group, async_stager=self._stager)

        def written(done: Any) -> None:
            try:
                with _one_line(OSError, f"the checkpoint cannot be written in {folder}"):
                    done.result()
            except OSError as error:
                told(error)
            else:
                told(None)

        writing.add_done_callback(written)

    def close(self) -> None:
        self._stager.close()


def load(learner: Learner, folder: Path) -> None:
    """Collective. Model and optimizer go on as they were; weights of another model are refused by torch, with their names."""
    from torch.distributed.checkpoint.state_dict import StateDictOptions, set_state_dict
    from torch.distributed.checkpoint.state_dict_loader import load

    state = _state(learner)
    with _one_line(UserError, f"resume={folder}: does not fit this model, or is damaged"):
        load(state, checkpoint_id=folder)
    if state.get(BASE, learner.base) != learner.base:
        raise UserError(f"resume={folder}: its adapters were trained on other weights than those of model.path")
    options = StateDictOptions(strict=not learner.adapted)  # the base is not in it
    set_state_dict(learner.model, learner.optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"], options=options)


@contextlib.contextmanager
def _one_line(kind: type[Exception], what: str) -> Iterator[None]:
    """torch tells of every rank with its traceback, in an error that is no Exception; the reason comes last."""
    from torch.distributed.checkpoint.api import CheckpointException

    try:
        yield
    except (Exception, CheckpointException) as error:
        raise kind(f"{what}: {str(error).strip().splitlines()[-1].strip()}") from error


def _state(learner: Learner) -> dict[str, Any]:
    """Of the model what is trained; of a base that adapters are trained on its digest."""
    from torch.distributed.checkpoint.state_dict import get_state_dict

    model, optimizer = get_state_dict(learner.model, learner.optimizer)
    if not learner.adapted:
        return {"model": model, "optimizer": optimizer}
    trained = {name for name, parameter in learner.model.named_parameters() if parameter.requires_grad}
    kept = {name: weight for name, weight in model.items() if name in trained}
    return {"model": kept, "optimizer": optimizer, BASE: learner.base}
