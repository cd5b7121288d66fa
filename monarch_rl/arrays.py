"""Arrays and JSON in one file, read without running any code: an npz without pickles. And groups in such a file."""

from __future__ import annotations

import json
import math
import os
import zipfile
from collections.abc import Mapping, Sequence
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from monarch_rl import types
from monarch_rl.config import UserError
from monarch_rl.disk import on_disk
from monarch_rl.types import Group

Arrays = Mapping[str, NDArray[Any]]
NOUNS: Mapping[str, Any] = {name: noun for name, noun in vars(types).items() if is_dataclass(noun)}


def write(path: Path, about: Any, arrays: Arrays) -> None:
    """`about` is anything that JSON can say. On the disk when this returns."""
    text = np.frombuffer(json.dumps(about, default=str).encode(), np.uint8)
    with on_disk(path), path.open("wb") as file:
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


def pack(groups: Sequence[Group]) -> tuple[Any, Arrays]:
    """Groups as what `write` takes, whatever their episodes hold of arrays, nouns of `types`, and what JSON can say. The rest, which may
    be in a prompt's answer, is kept as text: the reward has seen it."""
    packer = _Packer()
    about = packer.encode(list(groups))
    return about, {name: np.concatenate(parts) for name, parts in packer.parts.items()}


def unpack(about: Any, arrays: Arrays) -> list[Group]:
    """The groups that were packed; arrays of the very same bits."""
    groups: list[Group] = _decode(about, arrays)
    return groups


class _Packer:
    """Puts arrays end to end, one long one for each type; where they were stands where they are now."""

    def __init__(self) -> None:
        self.parts: dict[str, list[NDArray[Any]]] = {}
        self._ends: dict[str, int] = {}

    def encode(self, value: Any) -> Any:
        if isinstance(value, np.ndarray):
            return {"array": self._put(value), "shape": value.shape}
        if isinstance(value, np.generic):
            return value.item()
        if type(value) in NOUNS.values():
            return {"noun": type(value).__name__, "of": {field.name: self.encode(getattr(value, field.name)) for field in fields(value)}}
        if isinstance(value, dict):
            return {"dict": [[self.encode(key), self.encode(held)] for key, held in value.items()]}
        if isinstance(value, (list, tuple)):
            return [self.encode(held) for held in value]
        return value

    def _put(self, array: NDArray[Any]) -> tuple[str, int]:
        name = array.dtype.name
        start = self._ends.get(name, 0)
        self._ends[name] = start + array.size
        self.parts.setdefault(name, []).append(array.ravel())
        return name, start


def _decode(value: Any, arrays: Arrays) -> Any:
    if isinstance(value, list):
        return [_decode(held, arrays) for held in value]
    if not isinstance(value, dict):
        return value
    if "array" in value:
        (name, start), shape = value["array"], value["shape"]
        return arrays[name][start : start + math.prod(shape)].reshape(shape).copy()
    if "noun" in value:
        return NOUNS[value["noun"]](**{name: _decode(held, arrays) for name, held in value["of"].items()})
    return {_decode(key, arrays): _decode(held, arrays) for key, held in value["dict"]}
