"""Case 63: every turn of every episode is sampled with a seed of its own, which the replica and the machine have no part in."""

from __future__ import annotations

from itertools import product

from actors.rollout import episode_seed

SEED = 4623456692532943550


def test_seeds_are_distinct_over_whatever_may_differ() -> None:
    axes = product((0, 1, 11), ("train", "eval"), range(12), (1, 2), range(8), (0, 1, 2))
    seeds = [episode_seed(*where) for where in axes]
    assert len(set(seeds)) == len(seeds) == 3 * 2 * 12 * 2 * 8 * 3
    assert all(0 <= seed < 2**63 for seed in seeds)


def test_seeds_are_the_same_again_on_every_machine() -> None:
    """Written down once: a run that is repeated elsewhere, or after an update, samples what it did."""
    assert episode_seed(0, "train", 3, 1, 2) == episode_seed(0, "train", 3, 1, 2)
    assert episode_seed(0, "train", 0, 1, 0) == SEED
    assert episode_seed(1, "train", 0, 1, 0) != SEED
