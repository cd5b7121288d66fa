"""Cases 49 and 52 as a property: the gradient is that of the batch, however the batch is cut. More ranks: `tests/actors/test_ranks.py`."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
from hypothesis import given, settings
from torch.distributed.device_mesh import DeviceMesh

from monarch_rl.learner import Learner
from tests.batches import shards
from tests.cuts import LIMITS, QUICK, STEP, Case, cases, gradient, learner


@pytest.fixture(scope="module", params=LIMITS, ids=str)
def learners(mesh: DeviceMesh, request: pytest.FixtureRequest) -> dict[int, Learner]:
    """By chunk."""
    return {chunk: learner(mesh, request.param, chunk) for chunk in (1024, 3)}


@settings(QUICK, max_examples=10)
@given(case=cases())
def test_cutting_padding_and_order_change_no_gradient(learners: dict[int, Learner], case: Case) -> None:
    whole, chunked = learners[1024], learners[3]
    (shard,) = shards(case.groups, budget=10**6, step=STEP)
    expected = gradient(whole, shard, case.config)
    limit = LIMITS[expected.dtype] * expected.norm()
    (one_by_one,), (few,) = shards(case.groups, budget=1, step=STEP), shards(case.groups, budget=40, step=STEP)
    (shuffled,) = shards(case.groups, budget=10**6, step=STEP, order=random.Random(case.seed))
    padded = replace(few, microbatches=[[], *few.microbatches, []])
    for cut, rank in [(one_by_one, whole), (padded, whole), (shuffled, whole), (few, chunked)]:
        assert (gradient(rank, cut, case.config) - expected).norm() <= limit


@settings(QUICK, max_examples=3)
@given(case=cases())
def test_a_batch_with_nothing_to_train_gives_exactly_zero(learners: dict[int, Learner], case: Case) -> None:
    for episode in (episode for group in case.groups for episode in group):
        episode.reward = None
    (shard,) = shards(case.groups, budget=40, step=STEP)
    assert not gradient(learners[1024], shard, case.config).any()
