"""What becomes of finished groups: is there something to learn, who trains which episode, and the figures of a step. numpy only."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from monarch_rl.ledger import AgeError
from monarch_rl.packing import pack, token_ages, trained_mask
from monarch_rl.types import NOT_SAMPLED, Episode, Group, Shard

Verdict = Literal["trainable", "dead", "unscorable"]


def judge(group: Group) -> Verdict:
    """`unscorable`: no episode has a reward. `dead`: there is nothing to learn, since all earn the same (from every turn on), so that
    none is better than another, or since every episode is left out of the loss (`Episode.trained`)."""
    to_go = [_to_go(turns) for turns in map(turn_rewards, group.episodes) if turns]
    if not to_go:
        return "unscorable"
    width = max(map(len, to_go))
    differ = len({(*one, *one[-1:] * (width - len(one))) for one in to_go}) > 1
    return "trainable" if differ and any(e.trained for e in group.episodes) else "dead"


def turn_rewards(episode: Episode) -> list[float]:
    """What each turn earned; empty where the episode is unscorable."""
    if episode.reward is None or not np.isfinite(episode.reward):
        return []
    return list(episode.turn_rewards) or [0.0] * (len(episode.turn_tokens) - 1) + [episode.reward]


def _to_go(turns: list[float]) -> tuple[float, ...]:
    """From each turn to the end."""
    return tuple(itertools.accumulate(reversed(turns)))[::-1]


def describe(group: Group, width: int = 60) -> str:
    """A group in one line, for errors: rewards, the first reward error, the first completion."""
    rewards = " ".join("-" if np.isnan(r) else f"{r:g}" for r in group.rewards_G)
    errors = [e.error for e in group.episodes if e.error]
    texts = [e.text for e in group.episodes]
    parts = [f"prompt {group.ordinal}: rewards [{rewards}]"]
    parts += [f"error {' '.join(errors[0].split())[: 2 * width]}"] if errors else []
    parts += [f"completion {texts[0][:width]!r}"] if texts else []
    return ", ".join(parts)


def by_reason(dropped: Mapping[str, int]) -> str:
    return ", ".join(f"{count} {reason}" for reason, count in dropped.items())


def stamps(group: Group) -> tuple[int, int]:
    """`Version.pack()` of the oldest weights behind the sampled tokens, and of the newest; `NOT_SAMPLED` where there are none."""
    sampled = [e.versions_T[e.loss_mask_T] for e in group.episodes]
    versions_N = np.concatenate(sampled) if sampled else np.zeros(0, np.int64)
    return (int(versions_N.min()), int(versions_N.max())) if versions_N.size else (NOT_SAMPLED, NOT_SAMPLED)


def check_ages(groups: Iterable[Group], step: int, max_age: Callable[[int], int], lineage: int = 0) -> None:
    """Look at every sampled token of the groups of optimizer step `step`; `max_age` of each ordinal.

    Raises:
        AgeError: one is older than that, or newer than the trainer; the message names the prompt.
    """
    for group in groups:
        bound = max_age(group.ordinal)
        for episode in group.episodes:
            try:
                ages_N = token_ages(episode.versions_T[episode.loss_mask_T], step, lineage)
            except ValueError as error:
                raise AgeError(f"prompt {group.ordinal}: {error}") from error
            if ages_N.size and ages_N.max() > bound:
                raise AgeError(f"prompt {group.ordinal} has a token of age {ages_N.max()} at step {step}, above buffer.max_age={bound}")


def make_shards(groups: Sequence[Group], step: int, ranks: int, budget: int, *, dead_too: bool = False, lineage: int = 0) -> list[Shard]:
    """Deal the episodes of a batch to the ranks.

    In no shard are episodes without a trained token (unscorable, empty), and dead groups: where every advantage is a difference to
    the rest of the group, theirs are 0. Their tokens count in the denominators all the same. `dead_too`: dead groups are in
    the shards, for they may have a gradient.

    Args:
        groups: of the whole batch, in the order of `Shard.rewards_PG`.
        step: the optimizer step that trains them.
        ranks: trainer ranks, one shard each.
        budget: most padded tokens of a micro-batch.
        lineage: of the trainer.
    """
    rewards_PG, turn_rewards_PGK = reward_tables([group.episodes for group in groups])
    live = [judge(group) == "trainable" or dead_too for group in groups]
    trained = [(p, g, e) for p, group in enumerate(groups) if live[p] for g, e in enumerate(group.episodes) if trained_mask(e).any()]
    tokens_P = [sum(int(trained_mask(e).sum()) for e in group.episodes) for group in groups]
    shards = []
    for runs in pack([len(e.ids_T) for _, _, e in trained], ranks, budget):
        mine = [trained[i] for run in runs for i in run]
        starts = np.cumsum([0, *(len(run) for run in runs)]).tolist()
        shards.append(
            Shard(
                step=step,
                episodes=[e for _, _, e in mine],
                places=[(p, g) for p, g, _ in mine],
                microbatches=[list(range(start, start + len(run))) for start, run in zip(starts, runs, strict=False)],
                rewards_PG=rewards_PG,
                turn_rewards_PGK=turn_rewards_PGK,
                total_tokens=sum(tokens_P),
                left_out_tokens=sum(tokens for tokens, alive in zip(tokens_P, live, strict=True) if not alive),
                total_episodes=sum(_scorable(e) and e.trained for group in groups for e in group.episodes),
                ordinals=[group.ordinal for group in groups],
                lineage=lineage,
            )
        )
    return shards


def reward_tables(groups: Sequence[Sequence[Episode]]) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """`Shard.rewards_PG` and `Shard.turn_rewards_PGK`."""
    earned = [[turn_rewards(e) for e in group] for group in groups]
    most = max([1, *(len(turns) for group in earned for turns in group)])
    turn_rewards_PGK = np.full((len(groups), max(map(len, earned)), most), np.nan)
    for p, group in enumerate(earned):
        for g, turns in enumerate(group):
            turn_rewards_PGK[p, g, : len(turns)] = turns
    unscorable_PG = np.isnan(turn_rewards_PGK[..., 0])
    return np.where(unscorable_PG, np.nan, np.nansum(turn_rewards_PGK, -1)), turn_rewards_PGK


def figures(step: int, trained: Sequence[Group], barren: Sequence[Group], lineage: int = 0) -> dict[str, float]:
    """The figures of one step. `trained`: the P groups of its batch; `barren`: those dropped as dead or unscorable since the batch before.

    All figures but the last four are over `trained` and `barren` together, that is over what the policy produced, so that
    replacing dead groups does not bend the curve:

    - `reward/mean`, `reward/std`: mean and population standard deviation of the rewards of all scorable episodes.
    - `reward/frac_dead_groups`: groups with nothing to learn, see `judge`, per group (unscorable groups among them).
    - `reward/frac_unscorable`: episodes without a finite reward, per episode.
    - `episode/tokens_mean`, `episode/tokens_max`: sampled tokens of an episode.
    - `episode/frac_truncated`: episodes that their token budget ended, per episode.

    Over the trained tokens (`packing.trained_mask`) of `trained` alone:

    - `episode/trained_tokens_mean`: trained tokens, per episode that has any. Below `episode/tokens_mean`: training favours short episodes.
    - `episode/frac_mixed_versions`: episodes whose tokens come from two or more versions, per episode with a trained token.
    - `age/mean`, `age/max`: of a token, as in `packing.token_ages`.
    """
    groups = [*trained, *barren]
    episodes = [e for group in groups for e in group.episodes]
    rewards = np.concatenate([_scores(group) for group in groups])
    lengths = np.array([e.sampled_tokens for e in episodes])
    versions = [e.versions_T[mask] for group in trained for e in group.episodes if (mask := trained_mask(e)).any()]
    ages_N = token_ages(np.concatenate(versions), step, lineage) if versions else np.zeros(1)
    return {
        "reward/mean": float(rewards.mean()),
        "reward/std": float(rewards.std()),
        "reward/frac_dead_groups": _share(judge(group) != "trainable" for group in groups),
        "reward/frac_unscorable": 1.0 - rewards.size / len(episodes),
        "episode/tokens_mean": float(lengths.mean()),
        "episode/tokens_max": float(lengths.max()),
        "episode/frac_truncated": _share(e.truncated for e in episodes),
        "episode/trained_tokens_mean": _mean(len(v) for v in versions),
        "episode/frac_mixed_versions": _share(bool((v != v[0]).any()) for v in versions),
        "age/mean": float(ages_N.mean()),
        "age/max": float(ages_N.max()),
    }


def _scores(group: Group) -> NDArray[np.float64]:
    return np.array([e.reward for e in group.episodes if _scorable(e)], dtype=np.float64)


def _scorable(episode: Episode) -> bool:
    return episode.reward is not None and bool(np.isfinite(episode.reward))


def _mean(values: Iterable[float]) -> float:
    listed = list(values)
    return sum(listed) / len(listed) if listed else 0.0


def _share(flags: Iterable[bool]) -> float:
    return _mean(float(flag) for flag in flags)
