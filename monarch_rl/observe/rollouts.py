"""`rollouts.jsonl`: what was trained, one group a line, readable without the tokenizer."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path

from monarch_rl.types import Episode, Group


class RolloutsFile:
    """Appends the groups of each step."""

    def __init__(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self._file = path.open("w", encoding="utf-8")

    def write(self, step: int, groups: Iterable[Group]) -> None:
        """Groups of one optimizer step. A prompt's answer is written as text where JSON has no such type."""
        for group in groups:
            prompt = {"step": step, "ordinal": group.ordinal, "prompt": group.prompt.content, "answer": group.prompt.answer}
            row = prompt | {"episodes": [_episode(e) for e in group.episodes]}
            self._file.write(json.dumps(row, default=str, ensure_ascii=False) + "\n")
        self._file.flush()

    def close(self) -> None:
        self._file.close()


def _episode(episode: Episode) -> dict[str, object]:
    versions = episode.versions()
    return {
        "completion": episode.text,
        "reward": episode.reward,
        "error": episode.error,
        "tokens": episode.sampled_tokens,
        "truncated": episode.truncated,
        "versions": [str(version) for version in versions] if versions else [],
    }
