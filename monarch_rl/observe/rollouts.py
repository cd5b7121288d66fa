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

    def close(self) -> None:
        self._file.close()


def reopen(path: Path, after: int) -> TextIO:
    """A file of JSON lines with a `step` each, to be appended to; lines of later steps, and one that is not whole, are cut off."""
    kept: list[str] = []
    if after and path.exists():
        with path.open(encoding="utf-8") as earlier:  # line by line: `splitlines` would also split at what a model may sample
            kept = [line for line in earlier if line.endswith("\n") and json.loads(line)["step"] <= after]
    write_whole(path, "".join(kept))
    return path.open("a", encoding="utf-8")


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
