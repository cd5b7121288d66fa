"""Token-budget micro-batches: which episode goes where, and the arrays a forward pass needs. No torch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from monarch_rl.types import MASK, Episode, Rows, Version, row_offsets

MAX_PADDING = 0.08
"""More micro-batches are made until padding is at most this share of the padded tokens ..."""
MAX_SPLIT = 4
"""... but never more than this many times the fewest that fit the budget: each forward pass has a fixed cost."""


def pack(lengths: Sequence[int], ranks: int, budget: int) -> list[list[list[int]]]:
    """Deals rows to ranks and micro-batches; a pure function of its arguments.

    Rows are sorted by length and cut into runs of nearly equal padded size; neighbouring runs go to different ranks, since
    the ranks walk through their micro-batches in step. Every rank gets the same number of micro-batches, at least one;
    some may be empty. A row longer than the budget is a micro-batch of its own.

    Args:
        lengths: tokens of each row, positive.
        ranks: number of trainer ranks.
        budget: most padded tokens (rows times the longest row) of one micro-batch.

    Returns:
        `[rank][microbatch]` → indices into `lengths`, each index once.
    """
    order = sorted(range(len(lengths)), key=lambda i: (-lengths[i], i))
    rows = [lengths[i] for i in order]
    runs = _choose_runs(rows, ranks, budget)
    slots = max(1, -(-len(runs) // ranks))
    runs += [(len(rows), len(rows))] * (slots * ranks - len(runs))
    return [[[order[i] for i in range(*runs[slot * ranks + rank])] for slot in range(slots)] for rank in range(ranks)]


def _choose_runs(rows: list[int], ranks: int, budget: int) -> list[tuple[int, int]]:
    """The fewest micro-batches per rank whose padding is acceptable, else the split that pads least."""
    fewest = max(1, -(-len(_cut(rows, budget)) // ranks))
    best: list[tuple[int, int]] = []
    for slots in range(fewest, MAX_SPLIT * fewest + 1):
        runs = _balanced(rows, slots * ranks, budget)
        if not best or _padded(rows, runs) < _padded(rows, best):
            best = runs
        if sum(rows) >= (1 - MAX_PADDING) * _padded(rows, best):
            break
    return best


def _balanced(rows: list[int], count: int, budget: int) -> list[tuple[int, int]]:
    """At most `count` runs under the smallest padded size that allows so few (found by bisection)."""
    low, high = 1, budget
    while low < high:
        middle = (low + high) // 2
        low, high = (low, middle) if len(_cut(rows, middle)) <= count else (middle + 1, high)
    return _cut(rows, high)


def _cut(rows: list[int], limit: int) -> list[tuple[int, int]]:
    """Greedy runs [start, end) of descending `rows`, each of padded size ≤ limit or a single row."""
    runs, start = [], 0
    while start < len(rows):
        end = min(len(rows), start + max(1, limit // rows[start]))
        runs.append((start, end))
        start = end
    return runs


def _padded(rows: list[int], runs: list[tuple[int, int]]) -> int:
    return sum((end - start) * rows[start] for start, end in runs)


@dataclass(frozen=True, slots=True)
class Batch:
    """One micro-batch, rows padded on the right with id 0. N counts the trained tokens of all rows, row by row.

    A causal model never looks right, so no attention mask is needed; what is trained follows from lengths and masks alone,
    never from ids, so a padding id that equals an end-of-turn id does no harm.
    """

    inputs_BT: NDArray[np.int64]
    """What the model reads: every token but the last of each row."""
    positions_N: NDArray[np.int64]
    """Index into the flattened `inputs_BT` of the position that predicts each trained token."""
    targets_N: NDArray[np.int64]
    """Ids of the trained tokens."""
    rows_N: NDArray[np.int64]
    """Row of each trained token."""
    logprobs_N: NDArray[np.float32]
    """The sampler's."""
    versions_N: NDArray[np.int64]
    """`Version.pack()` of the weights that sampled each trained token."""
    temperatures_N: NDArray[np.float32]
    """That each trained token was sampled at."""
    tokens: int
    """Entries of `inputs_BT` that are no padding."""
    channels: dict[str, Rows | NDArray[Any]]
    """Ragged ones: the N rows of the trained tokens. Of fixed width: [B, T, ...] beside `inputs_BT`, zeros at padding."""


def trained_mask(episode: Episode) -> NDArray[np.bool_]:
    """[T] True where a token enters the loss and its denominator: sampled, with a finite logprob, in a scorable episode."""
    if episode.reward is None or not np.isfinite(episode.reward):
        return np.zeros_like(episode.loss_mask_T)
    trained_T: NDArray[np.bool_] = episode.loss_mask_T & np.isfinite(episode.logprobs_T)
    return trained_T


def collate(episodes: Sequence[Episode]) -> Batch:
    """Arrays of one micro-batch; no episodes give one row of padding without a trained token.

    Raises:
        ValueError: an episode's first token is marked as sampled, but nothing precedes it to predict it. Or a channel lacks rows,
        or belongs to other tokens.
    """
    rows, width = max(1, len(episodes)), max([2, *(len(e.ids_T) for e in episodes)])
    ids_BT, mask_BT = np.zeros((rows, width), np.int64), np.zeros((rows, width), np.bool_)
    logprobs_BT, versions_BT = np.zeros((rows, width), np.float32), np.zeros((rows, width), np.int64)
    for row, episode in enumerate(episodes):
        here = np.s_[row, : len(episode.ids_T)]
        ids_BT[here], mask_BT[here] = episode.ids_T, trained_mask(episode)
        logprobs_BT[here], versions_BT[here] = episode.logprobs_T, episode.versions_T
    if mask_BT[:, 0].any():
        raise ValueError(f"episode {int(mask_BT[:, 0].argmax())} of the micro-batch has no prompt: its first token is marked as sampled")
    mask_BT = mask_BT[:, 1:]
    rows_N = np.nonzero(mask_BT)[0]
    temperatures_B = np.array([e.temperature for e in episodes] or [1.0], np.float32)
    return Batch(
        inputs_BT=np.ascontiguousarray(ids_BT[:, :-1]),
        positions_N=np.flatnonzero(mask_BT),
        targets_N=ids_BT[:, 1:][mask_BT],
        rows_N=rows_N,
        logprobs_N=logprobs_BT[:, 1:][mask_BT],
        versions_N=versions_BT[:, 1:][mask_BT],
        temperatures_N=temperatures_B[rows_N],
        tokens=sum(max(0, len(e.ids_T) - 1) for e in episodes),
        channels=_channels(episodes, width - 1, ids_BT[:, 1:][mask_BT]),
    )


def _channels(episodes: Sequence[Episode], width: int, targets_N: NDArray[np.int64]) -> dict[str, Rows | NDArray[Any]]:
    names = {name for episode in episodes for name in episode.channels}
    if lacking := [name for name in sorted(names) if any(name not in episode.channels for episode in episodes)]:
        raise ValueError(f"some episodes of the micro-batch come with the channel {lacking[0]} and some without")
    made: dict[str, Rows | NDArray[Any]] = {}
    for name in sorted(names):
        rows = [episode.channels[name] for episode in episodes]
        if any(len(r) != len(e.ids_T) for r, e in zip(rows, episodes, strict=True)):
            raise ValueError(f"the channel {name} of an episode has not one row for each token")
        made[name] = _beside_inputs(rows, width) if rows[0].offsets is None else _of_targets(rows, episodes)
    if isinstance(mask := made.get(MASK), Rows):
        _check_mask(mask, targets_N)
    return made


def _of_targets(rows: Sequence[Rows], episodes: Sequence[Episode]) -> Rows:
    """Rows of the trained tokens, one after the other."""
    values, lengths = [], []
    for row, episode in zip(rows, episodes, strict=True):
        assert row.offsets is not None
        trained_T, lengths_T = trained_mask(episode), np.diff(row.offsets)
        values.append(row.values[np.repeat(trained_T, lengths_T)])
        lengths.append(lengths_T[trained_T])
    return Rows(np.concatenate(values), row_offsets(np.concatenate(lengths)))


def _beside_inputs(rows: Sequence[Rows], width: int) -> NDArray[Any]:
    first = rows[0].values
    beside_BT = np.zeros((len(rows), width, *first.shape[1:]), first.dtype)
    for at, row in enumerate(rows):
        beside_BT[at, : len(row) - 1] = row.values[:-1]
    return beside_BT


def _check_mask(mask: Rows, targets_N: NDArray[np.int64]) -> None:
    """A sampled token that its mask leaves out has probability 0: its row belongs to another token."""
    assert mask.offsets is not None
    lengths_N = np.diff(mask.offsets)
    found_M = mask.values == np.repeat(targets_N, lengths_N)
    found_N = np.bincount(np.repeat(np.arange(len(targets_N)), lengths_N), found_M, len(targets_N)).astype(bool)
    if (wrong := (lengths_N > 0) & ~found_N).any():
        raise ValueError(f"token {targets_N[wrong.argmax()]} was sampled, but is not among the ids that could be drawn")


def token_ages(versions_N: NDArray[np.int64], step: int, lineage: int) -> NDArray[np.int64]:
    """[N] age of each token in a batch consumed for optimizer step `step`, that is with `step - 1` steps done.

    On-policy tokens have age 0. A token of an older lineage has age ≥ 1 whatever its step says, since those weights
    are not the ones that this trainer went through.

    Raises:
        ValueError: a token was sampled by weights that this trainer has not made yet.
    """
    lineages_N, steps_N = versions_N >> 32, versions_N & 0xFFFFFFFF
    ages_N = step - 1 - steps_N
    if ((lineages_N > lineage) | ((lineages_N == lineage) & (ages_N < 0))).any():
        newest = Version.unpack(int(versions_N.max()))
        raise ValueError(f"step {step} of lineage {lineage} got a token of version {newest}, which the trainer has not made yet")
    return np.where(lineages_N < lineage, np.maximum(ages_N, 1), ages_N)
