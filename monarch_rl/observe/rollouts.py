"""`rollouts.jsonl`: what was trained, one group a line, readable without the tokenizer."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import TextIO

from monarch_rl.types import Episode, Group


class RolloutsFile:
    """Appends the groups of each step; of an earlier run the steps up to `after` are kept."""

    def __init__(self, path: Path, after: int = 0) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self._path = path
        self._file = reopen(path, after)

    def write(self, step: int, groups: Iterable[Group]) -> None:
        """Groups of one optimizer step. A prompt's answer is written as text where JSON has no such type."""
        for group in groups:
            prompt = {"step": step, "ordinal": group.ordinal, "prompt": group.prompt.content, "answer": group.prompt.answer}
            row = prompt | {"episodes": [_episode(e) for e in group.episodes]}
            self._file.write(json.dumps(row, default=str, ensure_ascii=False) + "\n")
        self._file.flush()

    def cut(self, after: int) -> None:
        """Later steps are undone."""
        self._file.close()
        self._file = cut(self._path, after)

    def close(self) -> None:
        self._file.close()


def reopen(path: Path, after: int) -> TextIO:
    """A file of JSON lines with a `step` each, to be appended to; of an earlier run the steps up to `after` are kept, and none for 0."""
    return cut(path, after) if after and path.exists() else path.open("w", encoding="utf-8")


def cut(path: Path, after: int) -> TextIO:
    """The same file without the lines of later steps."""
    kept = [line for line in path.read_text(encoding="utf-8").splitlines(keepends=True) if json.loads(line)["step"] <= after]
    file = path.open("w", encoding="utf-8")
    file.writelines(kept)
    file.flush()
    return file


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
