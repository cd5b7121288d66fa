"""Verdicts, shards and figures of hand-made groups."""

from __future__ import annotations

import numpy as np
import pytest

from monarch_rl.groups import check_ages, describe, figures, judge, make_shards
from monarch_rl.ledger import AgeError
from monarch_rl.types import NOT_SAMPLED, Episode, Group, Prompt, Version


def episode(reward: float | None, tokens: int = 2, steps: list[int] | None = None, prompt: int = 3, **more: object) -> Episode:
    """`prompt` prompt tokens, then `tokens` sampled ones; `steps`: of the weights behind each sampled token."""
    total, stamps = prompt + tokens, [Version(0, s).pack() for s in steps or [0] * tokens]
    return Episode(
        ids_T=np.arange(total, dtype=np.int32),
        loss_mask_T=np.arange(total) >= prompt,
        logprobs_T=np.where(np.arange(total) >= prompt, -1.0, 0.0).astype(np.float32),
        versions_T=np.array([NOT_SAMPLED] * prompt + stamps, np.int64),
        reward=reward,
        **more,  # type: ignore[arg-type]
    )


def group(ordinal: int, *episodes: Episode) -> Group:
    return Group(Prompt(ordinal, f"{ordinal}="), list(episodes))


@pytest.mark.parametrize(
    ("rewards", "verdict"),
    [
        ([1.0, 0.0], "trainable"),
        ([1.0, 0.0, None], "trainable"),
        ([0.0, 0.0, 0.0], "dead"),
        ([1.0, 1.0, None], "dead"),
        ([1.0, None, None], "dead"),
        ([None, None], "unscorable"),
        ([None, float("nan")], "unscorable"),
        ([float("nan"), 1.0, 0.0], "trainable"),
        ([], "unscorable"),
    ],
)
def test_judge(rewards: list[float | None], verdict: str) -> None:
    """Cases 15, 46: what cannot be compared is not trained, and what has no reward does not count as 0."""
    assert judge(group(0, *(episode(reward) for reward in rewards))) == verdict


@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_shards_deal_every_trained_episode_once(ranks: int) -> None:
    """Cases 46, 49, 51, 52: the denominators are of the whole batch, and count exactly what is trained, on every rank alike."""
    broken = episode(1.0, tokens=4)
    broken.logprobs_T[4] = np.nan
    groups = [
        group(4, episode(1.0, tokens=5), episode(0.0, tokens=1), episode(None, tokens=7)),
        group(6, broken, episode(0.0, tokens=0), episode(0.0, tokens=2), episode(float("nan"), tokens=9)),
    ]
    shards = make_shards(groups, step=3, ranks=ranks, budget=16)
    assert len(shards) == ranks
    places = [place for shard in shards for place in shard.places]
    assert sorted(places) == [(0, 0), (0, 1), (1, 0), (1, 2)]
    for shard in shards:
        assert [groups[p].episodes[g] for p, g in shard.places] == shard.episodes
        assert sorted(i for run in shard.microbatches for i in run) == list(range(len(shard.episodes)))
        assert len(shard.microbatches) == len(shards[0].microbatches)
        assert shard.step == 3
        assert shard.ordinals == [4, 6]
        assert shard.total_tokens == 5 + 1 + 3 + 2
        assert shard.total_episodes == 5
        np.testing.assert_array_equal(shard.rewards_PG, [[1, 0, np.nan, np.nan], [1, 0, 0, np.nan]])


def test_what_is_left_out_of_the_loss_leaves_the_denominators_and_stays_in_the_baseline() -> None:
    """Case 49: 30 sampled tokens, 5 of them of a truncated episode under `generator.truncated=mask` → /25."""
    groups = [group(0, episode(1.0, tokens=15), episode(0.0, tokens=10), episode(0.5, tokens=5, trained=False))]
    (shard,) = make_shards(groups, step=1, ranks=1, budget=64)
    assert sorted(shard.places) == [(0, 0), (0, 1)]
    assert (shard.total_tokens, shard.left_out_tokens, shard.total_episodes) == (25, 0, 2)
    np.testing.assert_array_equal(shard.rewards_PG, [[1, 0, 0.5]])


def test_a_group_of_which_nothing_is_trained_is_dead() -> None:
    assert judge(group(0, episode(1.0, trained=False), episode(0.0, trained=False))) == "dead"
    assert judge(group(0, episode(1.0, trained=False), episode(0.0))) == "trainable"


def test_dead_groups_cost_no_forward_pass_but_count_in_the_denominators() -> None:
    """Case 52 with `buffer.dead_groups=keep`: the loss is that of a batch in which they were trained with advantage 0."""
    groups = [group(0, episode(1.0, tokens=3), episode(1.0, tokens=4)), group(1, episode(1.0, tokens=2), episode(0.0, tokens=5))]
    (shard,) = make_shards(groups, step=1, ranks=1, budget=64)
    assert sorted(shard.places) == [(1, 0), (1, 1)]
    assert (shard.total_tokens, shard.left_out_tokens, shard.total_episodes) == (14, 7, 4)


def test_dead_groups_are_trained_where_advantages_are_no_differences_within_a_group() -> None:
    groups = [group(0, episode(1.0, tokens=3), episode(1.0, tokens=4)), group(1, episode(1.0, tokens=2), episode(None, tokens=5))]
    (shard,) = make_shards(groups, step=1, ranks=1, budget=64, dead_too=True)
    assert sorted(shard.places) == [(0, 0), (0, 1), (1, 0)]
    assert (shard.total_tokens, shard.left_out_tokens, shard.total_episodes) == (9, 0, 3)


def test_rewards_of_turns() -> None:
    """Totals that are equal are still to be compared where turns earned differently; without parts the last turn earned all."""
    early, late = (episode(1.0, tokens=3, turn_tokens=[1, 2], turn_rewards=parts) for parts in ([1.0, 0.0], [0.0, 1.0]))
    whole = episode(1.0, tokens=3, turn_tokens=[1, 1, 1])
    assert judge(group(0, early, early)) == "dead"
    assert judge(group(0, early, late)) == "trainable"
    assert judge(group(0, late, whole)) == "dead"
    (shard,) = make_shards([group(0, early, whole), group(1, episode(None), late)], step=1, ranks=1, budget=64)
    nan = np.nan
    np.testing.assert_array_equal(shard.turn_rewards_PGK, [[[1, 0, nan], [0, 0, 1]], [[nan] * 3, [0, 1, nan]]])
    np.testing.assert_array_equal(shard.rewards_PG, [[1, 1], [nan, 1]])


def test_ages_are_checked_token_by_token() -> None:
    """Cases 27, 28: one token that is too old is found and its prompt is named; so is one from the future."""
    fresh, old = group(1, episode(1.0, steps=[4, 6])), group(2, episode(1.0, steps=[5, 6]), episode(0.0, tokens=3, steps=[3, 4, 5]))
    check_ages([fresh, old], step=6, max_age=lambda _: 2, lineage=1)
    check_ages([fresh], step=7, max_age=lambda _: 2)
    with pytest.raises(AgeError, match="prompt 2 has a token of age 3 at step 7, above"):
        check_ages([fresh, old], step=7, max_age=lambda _: 2)
    with pytest.raises(AgeError, match="prompt 1: step 6"):
        check_ages([fresh], step=6, max_age=lambda _: 2)


def test_figures_table() -> None:
    """Case 66: known groups, exact figures."""
    trained = [
        group(0, episode(1.0, tokens=4, steps=[2, 2, 3, 3]), episode(0.0, tokens=2, steps=[3, 3])),
        group(1, episode(0.5, tokens=1, steps=[1]), episode(0.0, tokens=3, steps=[3, 3, 3], truncated=True)),
    ]
    barren = [
        group(2, episode(0.0, tokens=8, truncated=True), episode(0.0, tokens=8, truncated=True)),
        group(3, episode(None, tokens=1), episode(None, tokens=1)),
    ]
    rewards = [1, 0, 0.5, 0, 0, 0]
    assert figures(4, trained, barren) == pytest.approx(
        {
            "reward/mean": np.mean(rewards),
            "reward/std": np.std(rewards),
            "reward/frac_dead_groups": 2 / 4,
            "reward/frac_unscorable": 2 / 8,
            "episode/tokens_mean": 28 / 8,
            "episode/tokens_max": 8,
            "episode/frac_truncated": 3 / 8,
            "episode/trained_tokens_mean": 10 / 4,
            "episode/frac_mixed_versions": 1 / 4,
            "age/mean": (1 + 1 + 2) / 10,
            "age/max": 2,
        }
    )


def test_describe_is_one_line_with_what_went_wrong() -> None:
    """Case 18: a reward's exception is shown in its words."""
    line = describe(group(7, episode(0.0, text="a\nb"), episode(None, error="ValueError: no\nsuch answer")))
    assert line == "prompt 7: rewards [0 -], error ValueError: no such answer, completion 'a\\nb'"
