"""Advantages against loops written from the formulas, and against numbers worked out by hand."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable
from typing import get_args

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from monarch_rl.algorithms.advantages import ADVANTAGES, grpo, mean, reward_to_go, rloo
from monarch_rl.algorithms.objective import Objective
from monarch_rl.trainer_config import CENTRED, AdvantageName, TrainerConfig

NAN = math.nan
Groups = list[list[float]]
OF_EPISODES = [name for name in get_args(AdvantageName) if name != "reward_to_go"]


def rewards(*groups: list[float]) -> Tensor:
    return torch.tensor(groups, dtype=torch.float64)


def by_turn(name: AdvantageName, rewards_PG: Tensor) -> Tensor:
    """Of episodes of one turn each, so that all advantages can be called alike."""
    return reward_to_go(rewards_PG[..., None])[..., 0] if name == "reward_to_go" else ADVANTAGES[name](rewards_PG)


# Straight from the formulas. `known`: the rewards of the group's scorable episodes, `batch`: those of all groups.


def known(group: list[float]) -> list[float]:
    return [r for r in group if not math.isnan(r)]


def less_mean(group: list[float], r: float) -> float:
    return r - sum(known(group)) / len(known(group))


def std(values: list[float]) -> float:
    return statistics.stdev(values) if len(values) > 1 else 0.0


def leave_one_out(group: list[float], r: float) -> float:
    others = list(known(group))
    others.remove(r)
    return r - sum(others) / len(others) if others else 0.0


def batch(groups: Groups) -> list[float]:
    return [r for group in groups for r in known(group)]


def centred_batch(groups: Groups) -> list[float]:
    return [less_mean(group, r) for group in groups for r in known(group)]


REFERENCE: dict[AdvantageName, Callable[[Groups, list[float], float], float]] = {
    "mean": lambda groups, group, r: less_mean(group, r),
    "dr_grpo": lambda groups, group, r: less_mean(group, r),
    "grpo": lambda groups, group, r: less_mean(group, r) / (std(known(group)) + 1e-4),
    "rloo": lambda groups, group, r: leave_one_out(group, r),
    "batch_norm": lambda groups, group, r: less_mean(group, r) / (std(batch(groups)) + 1e-4),
    "reinforce_pp": lambda groups, group, r: (r - sum(batch(groups)) / len(batch(groups))) / (std(batch(groups)) + 1e-8),
    "reinforce_pp_baseline": lambda groups, group, r: less_mean(group, r) / (std(centred_batch(groups)) + 1e-8),
    "reward_to_go": lambda groups, group, r: less_mean(group, r),
}
REWARD = st.one_of(st.just(NAN), st.integers(-8, 8).map(lambda n: n / 4))
GROUPS = st.integers(1, 5).flatmap(lambda g: st.lists(st.lists(REWARD, min_size=g, max_size=g), min_size=1, max_size=4))


@pytest.mark.parametrize("name", get_args(AdvantageName))
@settings(max_examples=20, deadline=None)
@given(groups=GROUPS)
def test_advantages_are_those_of_the_formulas(name: AdvantageName, groups: Groups) -> None:
    """Cases 46, 55: the whole group makes the baseline, and only its scorable episodes."""
    made = by_turn(name, rewards(*groups)).tolist()
    expected = [[0.0 if math.isnan(r) else REFERENCE[name](groups, group, r) for r in group] for group in groups]
    for row, formula in zip(made, expected, strict=True):
        assert row == pytest.approx(formula, abs=1e-6)


def test_advantages_by_hand() -> None:
    """Case 55: two groups of three, of which one episode is unscorable."""
    groups = rewards([1, 0, 5], [2, NAN, 4])  # means 2 and 3; unbiased variances 7 and 2; of the batch: mean 2.4, variance 17.2 / 4
    batch_std, centred_std = math.sqrt(4.3), math.sqrt((1 + 4 + 9 + 1 + 1) / 4)
    expected: dict[AdvantageName, list[list[float]]] = {
        "mean": [[-1, -2, 3], [-1, 0, 1]],
        "dr_grpo": [[-1, -2, 3], [-1, 0, 1]],
        "grpo": [[x / (math.sqrt(7) + 1e-4) for x in (-1, -2, 3)], [x / (math.sqrt(2) + 1e-4) for x in (-1, 0, 1)]],
        "rloo": [[1 - 2.5, 0 - 3, 5 - 0.5], [-2, 0, 2]],
        "batch_norm": [[x / (batch_std + 1e-4) for x in row] for row in ([-1, -2, 3], [-1, 0, 1])],
        "reinforce_pp": [[x / batch_std for x in row] for row in ([-1.4, -2.4, 2.6], [-0.4, 0, 1.6])],
        "reinforce_pp_baseline": [[x / centred_std for x in row] for row in ([-1, -2, 3], [-1, 0, 1])],
        "reward_to_go": [[-1, -2, 3], [-1, 0, 1]],
    }
    for name, table in expected.items():
        torch.testing.assert_close(by_turn(name, groups), torch.tensor(table, dtype=torch.float64), atol=1e-7, rtol=0)


@pytest.mark.parametrize("name", OF_EPISODES)
def test_unscorable_episodes_leave_the_baseline(name: AdvantageName) -> None:
    """Cases 44, 46: [1, 0, None] → baseline over two, the third gets 0, its peers do not notice it."""
    advantages_PG = ADVANTAGES[name](rewards([1, 0, NAN]))
    assert advantages_PG[0, 2] == 0
    torch.testing.assert_close(advantages_PG[:, :2], ADVANTAGES[name](rewards([1, 0])))


@pytest.mark.parametrize("name", get_args(AdvantageName))
@pytest.mark.parametrize("group", [[0.1] * 8, [0.1] * 7 + [NAN], [5.0], [NAN], [NAN, NAN], [2.0, NAN], [1e300, 1e300], [math.inf, 1.0]])
def test_groups_with_nothing_to_compare_get_exactly_zero(name: AdvantageName, group: list[float]) -> None:
    """Beside a group that has something, too, where the advantage is a difference within the group."""
    assert by_turn(name, rewards(group)).tolist() == [[0] * len(group)]
    if name in CENTRED:
        other = [float(n) for n in range(len(group))]
        assert by_turn(name, rewards(group, other))[0].tolist() == [0] * len(group)


def test_without_a_baseline_of_the_group_equal_rewards_teach_too() -> None:
    assert ADVANTAGES["reinforce_pp"](rewards([1, 1], [0, 1])).tolist() == [pytest.approx([0.5] * 2), pytest.approx([-1.5, 0.5])]


@pytest.mark.parametrize("others", [0.95, 0.95 + 1e-12, 1e8])
def test_advantages_stay_under_their_documented_bounds(others: float) -> None:
    """Case 47: [0, .95 × 7] gave −2075 by E[x²] − E[x]²."""
    group = rewards([0] + [others] * 7)
    assert grpo(group).abs().max() <= 7 / math.sqrt(8)
    assert rloo(group).abs().max() <= others * (1 + 1e-12)
    for name in get_args(AdvantageName):
        assert by_turn(name, group).abs().max() <= max(8, others * (1 + 1e-12)), name


# Rewards of turns

TURNS = st.lists(st.integers(-4, 4).map(lambda n: n / 4), min_size=1, max_size=4)


def table(group: list[list[float] | None]) -> Tensor:
    """[1, G, K]; None: unscorable."""
    width = max([1, *(len(turns) for turns in group if turns)])
    return torch.tensor([[(turns or []) + [NAN] * (width - len(turns or [])) for turns in group]], dtype=torch.float64)


@settings(max_examples=60, deadline=None)
@given(group=st.lists(st.one_of(st.none(), TURNS), min_size=1, max_size=5))
def test_rewards_of_turns_are_those_of_the_formula(group: list[list[float] | None]) -> None:
    scorable = [turns for turns in group if turns]
    for turns, made in zip(group, reward_to_go(table(group))[0].tolist(), strict=True):
        for k, advantage in enumerate(made):
            if not turns or k >= len(turns):
                assert advantage == 0
                continue
            baseline = sum(sum(other[min(k, len(other) - 1) :]) for other in scorable) / len(scorable)
            assert advantage == pytest.approx(sum(turns[k:]) - baseline, abs=1e-9)


def test_rewards_of_turns_by_hand() -> None:
    """Three episodes: to go are (3, 2, 2), (1, 1) and (5, 4, 1); the second stands at 1 when it is over."""
    made = reward_to_go(table([[1, 0, 2], [0, 1], [1, 3, 1], None]))
    thirds = [[0, -1, 2], [-6, -4, 0], [6, 5, -1], [0, 0, 0]]
    assert made[0].tolist() == [pytest.approx([x / 3 for x in row]) for row in thirds]


def test_a_reward_at_the_end_alone_reaches_every_turn() -> None:
    """Case 54: 3-turn trajectory → every turn has the scalar R − mean(R)."""
    made = reward_to_go(table([[0, 0, 1], [0, 0], [0, 0, 0], [1]]))
    assert made[0].tolist() == [[0.5] * 3, [-0.5, -0.5, 0], [-0.5] * 3, [0.5, 0, 0]]
    assert mean(rewards([1, 0, 0, 1])).tolist() == [[0.5, -0.5, -0.5, 0.5]]


def test_advantages_of_a_user_are_left_out_where_there_is_no_reward() -> None:
    def raw(rewards_PG: Tensor, *, scale: float = 1.0) -> Tensor:
        return scale * rewards_PG

    objective = Objective.of(TrainerConfig(advantage=raw, advantage_args={"scale": 3}))
    groups = rewards([1, NAN, 2])
    assert objective.advantages(groups, groups[..., None]).tolist() == [[[3], [0], [6]]]


def test_tables_hold_exactly_the_names_of_the_configuration() -> None:
    assert list(ADVANTAGES) == list(get_args(AdvantageName)) == list(REFERENCE)
