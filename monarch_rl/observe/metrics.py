"""`metrics.jsonl`: one object per optimizer step, and how each figure comes from what the actors report."""

from __future__ import annotations

import json
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from monarch_rl.disk import on_disk
from monarch_rl.observe.rollouts import cut, reopen
from monarch_rl.types import Version


@dataclass(slots=True)
class GeneratorReport:
    """What one generator has done since it started; counters only grow, the others are the latest value."""

    replica: int
    step: int = -1
    """of the weights it holds; -1 before the first"""
    tokens: int = 0
    """sampled"""
    idle_s: float = 0.0
    """time without a request"""
    asleep: bool = False
    """without a request now, so that `idle_s` goes on growing"""
    pulled: int = 0
    """versions swapped in"""
    rejected: int = 0
    """pulls that were not one whole version"""
    too_slow: int = 0
    """times that several pulls in a row were rejected, so that the trainer was asked to keep a version for this one"""
    tokens_during_pulls: int = 0
    """sampled between the start of a pull and its swap"""
    pull_s: float = 0.0
    """of the last pull"""
    pause_s: float = 0.0
    """of the last swap: the time in which no decode step could run"""
    bytes_per_pull: int = 0
    """of the last pull"""
    deltas: int = 0
    """pulls that moved only what had changed (`weights.encoding`)"""
    lineage: int = 0
    """of the weights it holds"""
    ended: bool = False
    """it has left, or was lost"""

    def behind(self, trainer: Version) -> int:
        """Optimizer steps; at least 1 where the trainer has restarted from a checkpoint since."""
        return max(trainer.step - self.step, int(self.lineage < trainer.lineage))


class GeneratorFigures:
    """Turns successive reports of all generators into the figures of one step."""

    def __init__(self) -> None:
        self._tokens = self._idle_s = 0.0
        self._at = time.monotonic()

    def row(self, version: Version, reports: Iterable[GeneratorReport]) -> dict[str, float]:
        """Figures since the last call; `version` is the trainer's."""
        reports, now = list(reports), time.monotonic()
        tokens, idle_s = float(sum(r.tokens for r in reports)), sum(r.idle_s for r in reports)
        elapsed, generated, idle = now - self._at, tokens - self._tokens, idle_s - self._idle_s
        self._tokens, self._idle_s, self._at = tokens, idle_s, now
        if not reports:
            return {}
        live = [r for r in reports if not r.ended] or reports
        lags = [r.behind(version) for r in live]
        return {
            "lag/mean": sum(lags) / len(lags),
            "lag/max": float(max(lags)),
            "sync/pull_s": max(r.pull_s for r in live),
            "sync/pause_s": max(r.pause_s for r in live),
            "sync/rejected": float(sum(r.rejected for r in reports)),
            "sync/pulled_bytes": float(max((r.bytes_per_pull for r in live), default=0)),
            "sync/deltas": float(sum(r.deltas for r in reports)),
            "sync/too_slow": float(sum(r.too_slow for r in reports)),
            "sync/tokens_during_pulls": float(sum(r.tokens_during_pulls for r in reports)),
            "tokens/generated": generated,
            "throughput/generated_tok_s": generated / elapsed,
            "idle/generator": min(1.0, max(0.0, idle / (elapsed * len(live)))),
        }


def trainer_figures(ranks: Iterable[Mapping[str, float]]) -> dict[str, float]:
    """One dict from the dicts of all ranks: figures of the loss are equal on all; times are those of the slowest rank."""
    ranks = list(ranks)
    merged = dict(ranks[0])
    for key in merged:
        if key.startswith(("time/", "sync/")):
            merged[key] = max(rank[key] for rank in ranks)
    merged["sync/bytes"] = sum(rank["sync/bytes"] for rank in ranks)
    merged["throughput/trained_tok_s"] = merged["tokens/trained"] / max(merged["time/step_s"], 1e-9)
    merged["idle/trainer"] = merged["time/wait_batch_s"] / max(merged["time/step_s"], 1e-9)
    return merged


class MetricsFile:
    """Appends rows to `metrics.jsonl`; of an earlier run the steps up to `after` are kept."""

    def __init__(self, path: Path, after: int = 0) -> None:
        self._path, self._file = path, reopen(path, after)

    def write(self, row: Mapping[str, object]) -> None:
        with on_disk(self._path):
            self._last = self._file.tell()
            self._file.write(json.dumps(row) + "\n")
            self._file.flush()

    def rewrite(self, row: Mapping[str, object]) -> None:
        """In place of the last row."""
        self._file.seek(self._last)
        self._file.truncate()
        self.write(row)

    def cut(self, after: int) -> None:
        """Later steps are undone; row 0 stays."""
        self._file = cut(self._file, self._path, after)

    def close(self) -> None:
        with on_disk(self._path):
            self._file.close()
