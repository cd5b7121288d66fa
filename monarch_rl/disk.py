"""Writing files on a disk that may be full: errors say which file, and what is half written is not left."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path


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


@contextlib.contextmanager
def dropped(draft: Path) -> Iterator[None]:
    """A file that is there no more if the body fails."""
    try:
        yield
    except BaseException:
        draft.unlink(missing_ok=True)
        raise
