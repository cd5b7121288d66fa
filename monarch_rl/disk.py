"""Writing files on a disk that may be full: errors say which file, and what is half written is not left."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path
from typing import TextIO


@contextlib.contextmanager
def on_disk(path: Path) -> Iterator[None]:
    """An OSError of the body says which file it is about; that of a full disk does not."""
    try:
        yield
    except OSError as error:
        raise OSError(f"{path} cannot be written: {error.strerror or error}") from error


def write_whole(path: Path, text: str) -> None:
    """The file is the new one or, where that cannot be written, what it was. Raises OSError, naming it."""
    new = path.with_suffix(".new")
    with on_disk(path), dropped(new):
        new.write_text(text, encoding="utf-8")
        new.replace(path)


def appended(path: Path, nbytes: int) -> TextIO:
    """The file, to be written to behind its first `nbytes`, where it is cut off; a new one where there is none."""
    with on_disk(path):
        path.touch()
        os.truncate(path, nbytes)
        return path.open("a", encoding="utf-8")


@contextlib.contextmanager
def dropped(draft: Path) -> Iterator[None]:
    """A file that is there no more if the body fails."""
    try:
        yield
    except BaseException:
        draft.unlink(missing_ok=True)
        raise
