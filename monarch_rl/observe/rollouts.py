"""`rollouts.jsonl`: what was trained, one group a line, readable without the tokenizer."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import TextIO

from monarch_rl.disk import on_disk, write_whole
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
    write_whole(path, _up_to(path, after) if after and path.exists() else "")
    return path.open("a", encoding="utf-8")


def cut(file: TextIO, path: Path, after: int) -> TextIO:
    """The same file without the lines of later steps."""
    file.close()
    write_whole(path, _up_to(path, after))
    return path.open("a", encoding="utf-8")


def _up_to(path: Path, step: int) -> str:
    """Without a line that is not whole."""
    with path.open(encoding="utf-8") as file:  # line by line: `splitlines` would also split at what a model may sample
        return "".join(line for line in file if line.endswith("\n") and json.loads(line)["step"] <= step)


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
