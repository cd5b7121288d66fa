"""What was trained since the last checkpoint: trainers that restart from it train it again. No asyncio, no Monarch, no torch."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

from monarch_rl.lives import STATES, Ended
from monarch_rl.types import Episode, Group, Prompt

PENDING = STATES.index("pending")


class Kept(NamedTuple):
    """A prompt that was trained."""

    prompt: Prompt
    max_age: int
    """That it was started with."""
    group: Group | None
    """None: there was no room for it, and its prompt is to be sampled again."""


class Again(NamedTuple):
    """What there is to go on with after a restart."""

    ledger: dict[str, Any]
    """State of a ledger that has done the steps up to the checkpoint, and no more."""
    groups: dict[int, Group]
    """By ordinal: finished, for some step to train them."""
    prompts: dict[int, Prompt]
    """By ordinal: finished before, and to be sampled again."""


class Uncovered:
    """Groups by the step that trained them, until a checkpoint covers that step.

    Args:
        most_bytes: of groups. Of those beyond it only the prompts are kept. None: trainers do not go back, and nothing is.
    """

    def __init__(self, most_bytes: float | None) -> None:
        self._most_bytes = 0.0 if most_bytes is None else most_bytes
        self.needed = most_bytes is not None
        self._steps: dict[int, list[Kept]] = {}
        self.nbytes = 0
        """Of the groups that are kept."""

    def figures(self) -> dict[str, float]:
        """For a row of metrics."""
        left_out = sum(kept.group is None for steps in self._steps.values() for kept in steps)
        return {"buffer/uncovered_mb": self.nbytes / 2**20, "buffer/uncovered_left_out": float(left_out)} if self.needed else {}

    def add(self, step: int, groups: Iterable[Group], bounds: Iterable[int]) -> None:
        """`step` is done. `bounds`: the `max_age` of each of its prompts."""
        if not self.needed:
            return
        self._steps[step] = [self._keep(group, bound) for group, bound in zip(groups, bounds, strict=True)]

    def covered(self, step: int) -> None:
        """A checkpoint holds what the steps up to and including `step` have changed."""
        for done in [done for done in self._steps if done <= step]:
            self.nbytes -= sum(nbytes(kept.group) for kept in self._steps.pop(done) if kept.group is not None)

    def go_back(self, ledger: Mapping[str, Any], step: int, waiting: Iterable[Group], keep_groups: bool) -> Again:
        """The steps after `step`, which a checkpoint covers, are undone.

        What was dropped since stays dropped, and was reported; what was in flight is claimed again, as the same attempt.

        Args:
            ledger: its state as it is now.
            waiting: groups that no step has trained.
            keep_groups: False: all groups are sampled again.
        """
        undone = [kept for done in sorted(self._steps) if done > step for kept in self._steps.pop(done)]
        self.nbytes = sum(nbytes(kept.group) for steps in self._steps.values() for kept in steps if kept.group is not None)
        ended = Ended.of(ledger["words"], ledger["columns"])
        states = ledger["columns"]["state"].copy()
        live = list(ledger["live"])
        for prompt, max_age, group in undone:
            life = ended.get(prompt.ordinal)
            assert life is not None  # it was trained
            states[prompt.ordinal] = PENDING
            finished = group is not None
            claim = life.attempt - (not finished), life.owner, life.min_step
            live.append([prompt.ordinal, finished, *claim, max_age, life.oldest, life.newest])
        state = {**ledger, "step": step, "trained": ledger["trained"] - len(undone), "live": sorted(live)}
        state["columns"] = {**ledger["columns"], "state": states}
        groups = {group.ordinal: group for group in (*(kept.group for kept in undone), *waiting) if group is not None}
        prompts = {kept.prompt.ordinal: kept.prompt for kept in undone if kept.group is None}
        if keep_groups:
            return Again(state, groups, prompts)
        return Again(state, {}, prompts | {ordinal: group.prompt for ordinal, group in groups.items()})

    def _keep(self, group: Group, bound: int) -> Kept:
        size = nbytes(group)
        if self.nbytes + size > self._most_bytes:
            return Kept(group.prompt, bound, None)
        self.nbytes += size
        return Kept(group.prompt, bound, group)


def nbytes(group: Group) -> int:
    """Of its arrays and texts."""
    return sum(map(_nbytes, group.episodes))


def _nbytes(episode: Episode) -> int:
    arrays = [episode.ids_T, episode.loss_mask_T, episode.logprobs_T, episode.versions_T]
    for rows in episode.channels.values():
        arrays += [rows.values] if rows.offsets is None else [rows.values, rows.offsets]
    return sum(array.nbytes for array in arrays) + len(episode.text) + len(episode.transcript)
