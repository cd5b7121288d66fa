"""`checkpoints/step_N/`: what a run needs to go on, complete or absent.

The trainer ranks write their shards with torch's distributed checkpoint, which reads them back on any number of ranks; the replay
buffer writes the ledger and the groups that are not trained yet; the controller adds `progress.json` and gives the folder its name last.
"""

from __future__ import annotations

import contextlib
import json
import os
import pickle
import shutil
import sys
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from pathlib import Path
from typing import TYPE_CHECKING, Any

from monarch_rl import arrays
from monarch_rl.config import UserError
from monarch_rl.disk import on_disk
from monarch_rl.lives import Progress
from monarch_rl.types import Group

if TYPE_CHECKING:
    from torch import Tensor
    from torch.distributed import ProcessGroup

    from monarch_rl.checkpoint_process import WriterProcess
    from monarch_rl.learner import Learner

PROGRESS = "progress.json"
LEDGER = "ledger.npz"
GROUPS = "groups.npz"
PREFIX = "step_"
BASE = "base of the adapters"
"""Of what the trainers write: the digest of the weights that adapters were trained on."""
METADATA = ".metadata"
"""Where torch's distributed checkpoint says what is in which file."""
NOUNS = {
    *(("torch.distributed.checkpoint.metadata", name) for name in ("Metadata", "MetadataIndex", "StorageMeta", "TensorStorageMetadata")),
    *(("torch.distributed.checkpoint.metadata", name) for name in ("ChunkStorageMetadata", "TensorProperties", "_MEM_FORMAT_ENCODING")),
    ("torch.distributed.checkpoint.filesystem", "_StorageInfo"),
    ("torch", "Size"),
    ("torch.serialization", "_get_layout"),
    ("pathlib", "PosixPath"),
}
"""What it may name."""
DTYPES = {"float64", "float32", "float16", "bfloat16", "int64", "int32", "int16", "int8", "uint8", "bool"}


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
    with on_disk(written / PROGRESS), (written / PROGRESS).open("w", encoding="utf-8") as file:
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
    """Writes the checkpoints of one trainer rank beside its steps, one after the other.

    The trainer stands still for one copy of its state. The memory of the copy is kept, since to get it anew takes longer than to fill it,
    and so is what torch knows of the state, which takes a while in Python. A thread has it written, by the rank itself or, as soon as those
    of all ranks have started, by a process beside each.
    """

    def __init__(self, group: ProcessGroup | None, apart: bool = False, store: tuple[str, int] = ("", 0)) -> None:
        """`group`: of its own, with a CPU backend, as training goes on in the others.

        `apart`: by processes, where there will be many checkpoints; those of several ranks meet at their TCPStore, `store` (host, port)."""
        from torch.distributed import get_world_size, is_initialized

        from monarch_rl.checkpoint_process import NO_GROUP

        self._group, self._apart, self._store = group, apart and sys.platform == "linux", store
        self._alone = not is_initialized() or get_world_size(group) == 1
        """A rank alone asks nobody."""
        warnings.filterwarnings("ignore", NO_GROUP, UserWarning)
        self._thread = ThreadPoolExecutor(1, "checkpoint")
        self._process: WriterProcess | None = None
        self._processes = 0
        """started so far"""
        self._writing: Future[None] | None = None
        self._where: list[int] = []
        """addresses of the learner's tensors, as they were when the copy was laid out"""
        self._pairs: list[tuple[Tensor, Tensor]] = []
        """(copy, tensor)"""
        self._copy: dict[str, Any] = {}

    def save(self, learner: Learner, folder: Path, told: Callable[[Exception | None], None]) -> None:
        """Collective; each rank copies its shards and writes them afterwards. `told` that it is done, or why not, by another thread."""
        if self._writing is not None:
            wait([self._writing])
        self._take(learner)
        self._writing = self._thread.submit(self._write, folder, told)

    def close(self) -> None:
        self._thread.submit(self._end_process)
        self._thread.shutdown()

    def _take(self, learner: Learner) -> None:
        import torch

        with torch.no_grad():
            held = _held(learner)
            if self._where != [tensor.data_ptr() for tensor in held]:
                return self._lay_out(learner, on_gpu=held[0].is_cuda)
            for copy, tensor in self._pairs:
                copy.copy_(tensor, non_blocking=True)
            if held[0].is_cuda:
                torch.cuda.current_stream().synchronize()

    def _lay_out(self, learner: Learner, on_gpu: bool) -> None:
        """A first copy, which those that follow are written over."""
        from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions

        pinned = on_gpu and not self._apart
        at_once = StagingOptions(use_pinned_memory=pinned, use_shared_memory=False, use_async_staging=False, use_non_blocking_copy=False)
        state = _state(learner)
        self._copy = DefaultStager(at_once).stage(state)  # type: ignore[assignment]  # a Future with async staging only
        if self._apart:
            self._thread.submit(self._start_process, on_gpu).result()
        pairs = zip(_tensors(self._copy), _tensors(state), strict=True)
        self._pairs = list({copy.data_ptr(): (copy, tensor) for copy, tensor in pairs}.values())  # a tied weight has two names
        self._where = [tensor.data_ptr() for tensor in _held(learner)]

    def _start_process(self, pinned: bool) -> None:
        """By the thread, as the process ends with the thread that has started it."""
        from torch.distributed import get_rank, get_world_size

        from monarch_rl.checkpoint_process import Peers, WriterProcess

        self._end_process()
        self._processes += 1
        meeting = f"checkpoint writers {self._processes}"
        peers = None if self._alone else Peers(*self._store, meeting, get_rank(self._group), get_world_size(self._group))
        self._process = WriterProcess(self._copy, pinned, peers)

    def _end_process(self) -> None:
        if self._process is not None:
            self._process.close()

    def _write(self, folder: Path, told: Callable[[Exception | None], None]) -> None:
        from torch.distributed.checkpoint.state_dict_saver import save

        process = self._process
        try:
            with _one_line(OSError, f"the checkpoint cannot be written in {folder}"):
                if process is None or not self._all(process.is_ready):
                    save(self._copy, checkpoint_id=folder, process_group=self._group, no_dist=self._alone)
                elif not self._all(lambda: process.write(folder)):
                    raise OSError("the processes that write it have lost each other")
        except OSError as error:
            told(error)
        else:
            told(None)

    def _all(self, done: Callable[[], bool]) -> bool:
        """Whether it is so on all ranks. Raises OSError on all of them: what one of them raises."""
        from torch.distributed import all_gather_object, get_world_size

        if self._alone:
            return done()
        try:
            mine: bool | str = done()
        except OSError as error:
            mine = str(error)
        answers: list[bool | str] = [False] * get_world_size(self._group)
        all_gather_object(answers, mine, self._group)
        for reason in answers:
            if isinstance(reason, str):
                raise OSError(reason)
        return all(answers)


def load(learner: Learner, folder: Path) -> None:
    """Collective. Model and optimizer go on as they were; weights of another model are refused by torch, with their names."""
    from torch.distributed.checkpoint.state_dict import StateDictOptions, set_state_dict
    from torch.distributed.checkpoint.state_dict_loader import load

    check_metadata(folder)
    state = _state(learner)
    with _one_line(UserError, f"resume={folder}: does not fit this model, or is damaged"):
        load(state, checkpoint_id=folder)
    if learner.adapted and int(state[BASE]) != learner.base:
        raise UserError(f"resume={folder}: its adapters were trained on other weights than those of model.path")
    optimizer = state["optimizer"] | {"param_groups": _optimizer_state(learner)["param_groups"]}
    options = StateDictOptions(strict=not learner.adapted)  # the base model is not in it
    set_state_dict(learner.model, learner.optimizer, model_state_dict=state["model"], optim_state_dict=optimizer, options=options)


def check_metadata(folder: Path) -> None:
    """torch reads its `.metadata` as a pickle, which could run any code, and so could what it calls bytes: refuse all but tensors.

    Raises:
        UserError: the file cannot be read, or names anything else.
    """
    path = folder / METADATA
    try:
        with path.open("rb") as file:
            _Nouns(file).load()
    except Exception as error:  # a damaged pickle may raise whatever it likes
        raise UserError(f"{path}: cannot be read: {error}") from None


class _Nouns(pickle.Unpickler):
    """Makes what describes tensors, and nothing else."""

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) not in NOUNS and not (module == "torch" and name in DTYPES):
            raise pickle.UnpicklingError(f"it names {module}.{name}, which describes no tensor")
        return super().find_class(module, name)


@contextlib.contextmanager
def _one_line(kind: type[Exception], what: str) -> Iterator[None]:
    """torch tells of every rank with its traceback, in an error that is no Exception; the reason comes last."""
    from torch.distributed.checkpoint.api import CheckpointException

    try:
        yield
    except (Exception, CheckpointException) as error:
        raise kind(f"{what}: {str(error).strip().splitlines()[-1].strip()}") from error


def _state(learner: Learner) -> dict[str, Any]:
    """Tensors alone, those that the learner works on, and of a base that adapters are trained on its digest. Settings of the optimizer are
    the configuration's to say."""
    import torch
    from torch.distributed.checkpoint.state_dict import get_model_state_dict

    model, optimizer = get_model_state_dict(learner.model), {"state": _optimizer_state(learner)["state"]}
    if not learner.adapted:
        return {"model": model, "optimizer": optimizer}
    trained = {name for name, parameter in learner.model.named_parameters() if parameter.requires_grad}
    kept = {name: weight for name, weight in model.items() if name in trained}
    return {"model": kept, "optimizer": optimizer, BASE: torch.tensor([learner.base])}


def _optimizer_state(learner: Learner) -> dict[str, Any]:
    from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict

    return get_optimizer_state_dict(learner.model, learner.optimizer)


def _held(learner: Learner) -> list[Tensor]:
    """This rank's shards of what is trained, and of its moments."""
    return list(_tensors([*learner.parameters, *learner.optimizer.state.values()]))


def _tensors(state: Any) -> Iterator[Tensor]:
    """This rank's shards of whatever is in there, in order."""
    import torch
    from torch.distributed.tensor import DTensor

    if isinstance(state, DTensor):
        yield state.to_local()
    elif isinstance(state, torch.Tensor):
        yield state
    elif isinstance(state, Mapping):
        for held in state.values():
            yield from _tensors(held)
    elif isinstance(state, (list, tuple)):
        for held in state:
            yield from _tensors(held)
