"""Arrays and JSON in one file, read without running any code: an npz without pickles. And groups in such a file."""

from __future__ import annotations

import json
import os
import zipfile
from collections.abc import Mapping, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from monarch_rl.config import UserError
from monarch_rl.types import Episode, Group, Prompt

Arrays = Mapping[str, NDArray[Any]]


def write(path: Path, about: Any, arrays: Arrays) -> None:
    """`about` is anything that JSON can say. On the disk when this returns."""
    text = np.frombuffer(json.dumps(about, default=str).encode(), np.uint8)
    with path.open("wb") as file:
        np.savez(file, allow_pickle=False, about=text, **arrays)
        file.flush()
        os.fsync(file.fileno())


def read(path: Path) -> tuple[Any, Arrays]:
    """Raises UserError: the file is not there, or damaged."""
    try:
        with np.load(path, allow_pickle=False) as file:
            arrays = {name: file[name] for name in file.files}
        return json.loads(arrays.pop("about").tobytes()), arrays
    except (OSError, ValueError, KeyError, EOFError, zipfile.BadZipFile) as error:
        raise UserError(f"{path}: cannot be read: {error}") from None


def pack(groups: Sequence[Group]) -> tuple[dict[str, Any], Arrays]:
    """Groups as what `write` takes. Of a prompt's answer, which the reward has seen, only what JSON can say is kept.

    Raises:
        TypeError: a field of an episode is neither an array nor something for JSON.
    """
    episodes = [episode for group in groups for episode in group.episodes]
    values = {field.name: [getattr(episode, field.name) for episode in episodes] for field in fields(Episode)}
    plain, shapes, arrays = {}, {}, {}
    for name, listed in values.items():
        if not any(isinstance(value, np.ndarray) for value in listed):
            json.dumps(listed)
            plain[name] = listed
            continue
        shapes[name] = [None if value is None else value.shape for value in listed]
        arrays[name] = np.concatenate([np.ravel(value) for value in listed if value is not None])
    prompts = [[g.prompt.ordinal, g.prompt.content, g.prompt.answer, g.prompt.task] for g in groups]
    return {"prompts": prompts, "episodes": [len(g.episodes) for g in groups], "plain": plain, "shapes": shapes}, arrays


def unpack(about: Mapping[str, Any], arrays: Arrays) -> list[Group]:
    """The groups that were packed; arrays of the very same bits."""
    columns = dict(about["plain"]) | {name: _split(shapes, arrays[name]) for name, shapes in about["shapes"].items()}
    rows = zip(*columns.values(), strict=True)
    episodes = iter([Episode(**dict(zip(columns, row, strict=True))) for row in rows])
    return [
        Group(Prompt(*prompt), [next(episodes) for _ in range(count)])
        for prompt, count in zip(about["prompts"], about["episodes"], strict=True)
    ]


def _split(shapes: Sequence[Sequence[int] | None], flat: NDArray[Any]) -> list[NDArray[Any] | None]:
    parts: list[NDArray[Any] | None] = []
    at = 0
    for shape in shapes:
        if shape is None:
            parts.append(None)
            continue
        size = int(np.prod(shape))
        parts.append(flat[at : at + size].reshape(shape).copy())
        at += size
    return parts
