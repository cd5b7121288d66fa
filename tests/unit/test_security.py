"""What is read runs no code, and what is listened to is this host's alone (tests/e2e/test_closing.py looks at a run's sockets)."""

from __future__ import annotations

import ast
import io
import os
import pickle
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint.metadata import BytesStorageMetadata

from monarch_rl import checkpoint
from monarch_rl.config import UserError
from monarch_rl.export import read_checkpoint
from monarch_rl.user_files import load_attribute
from tests.batches import save
from tests.unit.test_docs import sources

OWN_PROCESSES = {
    "reward_process.py": "pickle.loads",
    "checkpoint_process.py": "pickle.loads",
    "dashboard.py": "pickle.load",
    "lockstep.py": "pickle.loads",
}
"""Pickles from a parent to its child and back, and between the ranks of a generator as between all actors."""
UNPICKLES = {"pickle.load", "pickle.loads", "cloudpickle.load", "cloudpickle.loads", "marshal.loads", "shelve.open", "joblib.load"}
RUNS = {"eval", "exec", "compile", "os.system", "os.popen", "yaml.load", "yaml.unsafe_load", "runpy.run_path"}


def calls() -> Iterator[tuple[str, str, dict[str, str]]]:
    """File, function and keywords of every call in the packages."""
    for path in sources():
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Call):
                yield path.name, ast.unparse(node.func), {word.arg: ast.unparse(word.value) for word in node.keywords if word.arg}


def test_files_are_read_without_running_code() -> None:
    found = list(calls())
    assert {(file, name) for file, name, _ in found if name in UNPICKLES} == set(OWN_PROCESSES.items())
    assert [(file, name) for file, name, _ in found if name in RUNS] == []
    assert [file for file, name, words in found if name == "np.load" and words.get("allow_pickle") != "False"] == []
    assert [file for file, name, words in found if name == "torch.load" and words.get("weights_only") != "True"] == []
    assert [file for file, _, words in found if "trust_remote_code" in words] == []


class Evil:
    """Makes a folder when it is unpickled."""

    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __reduce__(self) -> Any:
        return os.mkdir, (str(self.mark),)


def learner() -> Any:
    model = torch.nn.Linear(3, 2)
    return SimpleNamespace(model=model, adapted=False, parameters=list(model.parameters()), optimizer=torch.optim.AdamW(model.parameters()))


@pytest.fixture
def written(tmp_path: Path) -> Path:
    """A checkpoint of torch's part."""
    save(learner(), tmp_path / "c")
    return tmp_path / "c"


pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")


@pytest.mark.parametrize("read", [lambda folder: checkpoint.load(learner(), folder), read_checkpoint])
def test_a_checkpoint_that_lies_about_what_it_holds_runs_nothing(read: Any, written: Path) -> None:
    """As a pickle, or as bytes that torch would unpickle: torch reads both."""
    mark, metadata = written.parent / "mark", written / checkpoint.METADATA
    read(written)
    honest = pickle.loads(metadata.read_bytes())
    honest.state_dict_metadata["model.weight"] = BytesStorageMetadata()
    for lie in (Evil(mark), {"a": [Evil(mark)]}, honest, os.system):
        metadata.write_bytes(pickle.dumps(lie))
        with pytest.raises(UserError, match=rf"^{metadata}: cannot be read: it names \S+, which describes no tensor$"):
            read(written)
    metadata.write_bytes(b"no pickle")
    with pytest.raises(UserError, match=rf"^{metadata}: cannot be read: "):
        read(written)
    assert not mark.exists()


def test_tensors_that_are_something_else_run_nothing(written: Path) -> None:
    mark, evil = written.parent / "mark", io.BytesIO()
    torch.save(Evil(mark), evil)
    metadata = pickle.loads((written / checkpoint.METADATA).read_bytes())
    for where in metadata.storage_data.values():
        where.offset, where.length = 0, len(evil.getvalue())
    (written / checkpoint.METADATA).write_bytes(pickle.dumps(metadata))
    for file in written.glob("*.distcp"):
        file.write_bytes(evil.getvalue())
    with pytest.raises(UserError, match="does not fit this model, or is damaged"):
        checkpoint.load(learner(), written)
    assert not mark.exists()


def test_a_file_of_the_users_is_imported_when_it_is_named_and_no_other(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text("Task = 1\n")
    for other in ("other.py", "conftest.py", "sitecustomize.py", "__init__.py"):
        (tmp_path / other).write_text("raise AssertionError('was imported')\n")
    assert load_attribute("task", f"{tmp_path}/mine.py:Task") == 1
