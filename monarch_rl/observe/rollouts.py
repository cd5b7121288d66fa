"""`rollouts.jsonl`: what was trained, one group a line, readable without the tokenizer."""

from __future__ import annotations

import json
import mmap
from collections.abc import Iterable
from pathlib import Path
from typing import TextIO

from monarch_rl.disk import appended, on_disk
from monarch_rl.types import Episode, Group


class RolloutsFile:
    """Appends the groups of each step; of an earlier run the steps up to `after` are kept."""

    def __init__(self, path: Path, after: int = 0) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self._path, self._file = path, reopen(path, after)

    def write(self, step: int, groups: Iterable[Group]) -> None:
        """Groups of one optimizer step. A prompt's answer is written as text where JSON has no such type."""
        with on_disk(self._path):
            for group in groups:
                prompt = {"step": step, "ordinal": group.ordinal, "prompt": group.prompt.content, "answer": group.prompt.answer}
                row = prompt | {"episodes": [_episode(e) for e in group.episodes]}
                self._file.write(json.dumps(row, default=str, ensure_ascii=False) + "\n")
            self._file.flush()

    def cut(self, after: int) -> None:
        """Later steps are undone."""
        self._file = cut(self._file, self._path, after)

    def close(self) -> None:
        self._file.close()


def reopen(path: Path, after: int) -> TextIO:
    """A file of JSON lines with a `step` each, to be appended to; of an earlier run the steps up to `after` are kept, and none for 0."""
    return appended(path, _end_of(path, after) if after and path.exists() else 0)


def cut(file: TextIO, path: Path, after: int) -> TextIO:
    """The same file without the lines of later steps, which are its last."""
    file.close()
    return appended(path, _end_of(path, after))


def _end_of(path: Path, step: int) -> int:
    """Bytes up to the last line of `step` or an earlier one. It is looked for from the end, since the file may be larger than memory."""
    if not path.stat().st_size:
        return 0
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as lines:
        end = lines.rfind(b"\n") + 1
        while end:
            start = lines.rfind(b"\n", 0, end - 1) + 1
            if json.loads(lines[start:end])["step"] <= step:
                break
            end = start
        return end


def _episode(episode: Episode) -> dict[str, object]:
    versions = episode.versions()
    transcript = {"transcript": episode.transcript} if episode.transcript else {}
    return {
        "completion": episode.text,
        **transcript,
        "reward": episode.reward,
        **({"turn_rewards": episode.turn_rewards} if episode.turn_rewards else {}),
        "error": episode.error,
        "tokens": episode.sampled_tokens,
        "truncated": episode.truncated,
        "versions": [str(version) for version in versions] if versions else [],
    }
