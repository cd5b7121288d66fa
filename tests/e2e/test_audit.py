"""Whose weights sampled which token, and who holds which weights: audited with real sessions, without trusting a stamp or a log."""

from __future__ import annotations

import asyncio
import json
import os
import signal
from collections.abc import Callable, Iterable
from copy import copy, deepcopy
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

from monarch_rl.replicas import Replicas
from monarch_rl.types import Episode, Generation, Version
from tests.e2e.audit_reference import Reference, Run, runs
from tests.e2e.audit_system import DEADLINE_S, Audit, audit

pytestmark = pytest.mark.timeout(300)

MOST, MEAN = 1e-4, 2e-6
"""Of |Δ log-probability| in float32, nats."""

SHARED_PREFIX = f"task={Path(__file__).parent / 'audit_task.py'}:SharedPrefix"

# Few sequences at a time: decoding is what takes long, so that weights arrive while episodes are under way and others still wait.
ASYNCHRONOUS = ["buffer.prompts_per_step=8", "buffer.max_age=2", "generator.engine.max_num_seqs=2"]
AUDITS = {
    # 98 vocabulary rows over three ranks
    "every version, three uneven trainer ranks": [*ASYNCHRONOUS, "steps=6", "weights.verify=every", "trainer.ranks=3"],
    "every other version, cooler, shared prefixes": [
        *ASYNCHRONOUS,
        *("steps=7", "weights.every=2", "generator.temperature=0.7", SHARED_PREFIX),
    ],
}


@pytest_asyncio.fixture(scope="module", loop_scope="module", params=AUDITS.values(), ids=AUDITS)
async def audited(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Audit:
    """A finished asynchronous run, with the trainer's weights of every step."""
    made = audit(tmp_path_factory.mktemp("audit") / "run", *request.param)
    await made.run(keep_weights=True)
    return made


@pytest.fixture(scope="module")
def reference(audited: Audit) -> Reference:
    return Reference(audited.weights, audited.config.generator.temperature)


def episodes(audited: Audit, wanted: Callable[[int], bool]) -> list[Episode]:
    """Those of which `wanted` says yes to the number of versions behind them."""
    return [episode for group in audited.groups.values() for episode in group.episodes if wanted(len(runs(episode)))]


def by_version(unmixed: Iterable[Episode]) -> dict[int, list[Episode]]:
    found: dict[int, list[Episode]] = {}
    for episode in unmixed:
        found.setdefault(runs(episode)[0].step, []).append(episode)
    return found


def test_tokens_were_sampled_by_the_weights_that_they_name(audited: Audit, reference: Reference) -> None:
    """Cases 28, 42: also where prompts share a prefix that older weights have computed before."""
    unmixed = by_version(episodes(audited, lambda versions: versions == 1))
    assert len(unmixed) >= 3, f"only versions {list(unmixed)} were seen"
    for step, own in unmixed.items():
        gaps = reference.gaps(own)
        assert gaps.max() <= MOST, f"version {step}"
        assert gaps.mean() <= MEAN, f"version {step}"


def test_mixed_episodes_go_on_with_the_keys_and_values_of_older_weights(audited: Audit, reference: Reference) -> None:
    """Cases 28, 37: every token after a swap comes of the new weights, every one before it of the old, and no forward pass of both."""
    mixed = episodes(audited, lambda versions: versions > 1)
    assert mixed, "no weights arrived while an episode was under way"
    for episode in mixed:
        steps = [run.step for run in runs(episode)]
        assert steps == sorted(set(steps)), "versions only rise"
    gaps = reference.gaps(mixed)
    assert gaps.max() <= MOST
    assert gaps.mean() <= MEAN


def test_the_audit_notices_weights_one_step_off(audited: Audit, reference: Reference) -> None:
    last = audited.config.steps
    for step, own in by_version(episodes(audited, lambda versions: versions == 1)).items():
        for other in {max(step - 1, 0), min(step + 1, last)} - {step}:
            gaps = reference.gaps(own[:24], lambda stretches, other=other: [run._replace(step=other) for run in stretches])
            assert gaps.max() > 100 * MOST, f"version {step} taken for {other}"
            assert gaps.mean() > 100 * MEAN, f"version {step} taken for {other}"


@pytest.mark.parametrize("by", [-1, 1])
def test_the_audit_notices_a_swap_one_token_off(audited: Audit, reference: Reference, by: int) -> None:
    def moved(stretches: list[Run]) -> list[Run]:
        first, second, *rest = stretches
        return [first._replace(past=first.past + by), second._replace(first=second.first + by), *rest]

    long = [e for e in episodes(audited, lambda versions: versions > 1) if all(run.past - run.first > 1 for run in runs(e))]
    assert reference.gaps(long, moved).max() > 10 * MOST


def test_no_trained_token_is_older_than_allowed(audited: Audit) -> None:
    """Case 27: ages counted anew, from the tokens of the groups and the steps that consumed them."""
    consumed = [json.loads(line) for line in (audited.folder / "rollouts.jsonl").read_text().splitlines()]
    steps = {group["ordinal"]: group["step"] for group in consumed}
    oldest = {ordinal: min(runs(e)[0].step for e in audited.groups[ordinal].episodes) for ordinal in steps.keys() & audited.groups.keys()}
    ages = [steps[ordinal] - 1 - step for ordinal, step in oldest.items()]
    assert max(ages) <= audited.config.buffer.max_age
    assert max(ages) > 0, "nothing was asynchronous"
    assert max(row["age/max"] for row in audited.rows() if row["step"]) <= audited.config.buffer.max_age


def test_generators_hold_published_versions_only_and_the_last_in_the_end(audited: Audit) -> None:
    every, steps = audited.config.weights.every, audited.config.steps
    published = {*range(0, steps, every), steps}
    stamped = {run.step for episode in episodes(audited, bool) for run in runs(episode)}
    assert stamped <= published
    assert len(stamped) >= 3
    assert {version.step for version in audited.pulled()} <= published
    assert audited.held == [audited.trained]


@dataclass
class Pair:
    """What was seen of two generators over two trainer ranks, one of the generators stopped for a while."""

    audit: Audit
    dummies: list[dict[str, int]] = field(default_factory=list)
    served_without_weights: int = 0
    first: list[Generation] = field(default_factory=list)
    at_start: tuple[list[dict[str, int]], dict[str, int]] = field(default_factory=lambda: ([], {}))
    rows_while_stopped: list[dict[str, Any]] = field(default_factory=list)
    after_stop: Generation | None = None
    after_stop_prints: tuple[list[dict[str, int]], dict[str, int]] = field(default_factory=lambda: ([], {}))
    at_end: tuple[list[dict[str, int]], dict[str, int]] = field(default_factory=lambda: ([], {}))

    async def before_weights(self) -> None:
        """The engines stand and version 0 is published, but nobody pulls yet."""
        self.dummies = await self.audit.generator_fingerprints()
        self._early = [asyncio.create_task(self.audit.ask(replica, 0)) for replica in range(2)]
        done, _ = await asyncio.wait(self._early, timeout=1.0)
        self.served_without_weights = len(done)

    async def train_while_one_is_stopped(self) -> None:
        """All that may be started is finished before, so that three batches are there, and the stopped one has no part in them."""
        await self.audit.until_nothing_more_may_start()
        stopped = await self.audit.process_id(1)
        os.kill(stopped, signal.SIGSTOP)
        try:
            for step in (1, 2, 3):
                await self.audit.train_step(step)
            self.rows_while_stopped = await self.audit.until_row(3)
        finally:
            os.kill(stopped, signal.SIGCONT)
        self.after_stop = await self.audit.ask(1, min_step=3)

    async def prints(self, step: int) -> tuple[list[dict[str, int]], dict[str, int]]:
        return await self.audit.generator_fingerprints(min_step=step), await self.audit.trainer_fingerprints()


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def pair(tmp_path_factory: pytest.TempPathFactory) -> Pair:
    wide = ["trainer.ranks=2", "generator.replicas=2", "weights.slots=2", "generator.hang_s=600"]
    keys = [*wide, "steps=5", "buffer.prompts_per_step=4", "buffer.dead_groups=keep", SHARED_PREFIX]
    seen = Pair(audit(tmp_path_factory.mktemp("pair") / "run", *keys))
    async with seen.audit.session() as session:
        await seen.before_weights()
        async with session.background():
            seen.first = await asyncio.wait_for(asyncio.gather(*seen._early), DEADLINE_S)
            seen.at_start = await seen.prints(0)
            await seen.train_while_one_is_stopped()
            seen.after_stop_prints = await seen.prints(3)
            for step in (4, 5):
                await seen.audit.train_step(step)
            seen.at_end = await seen.prints(5)
    return seen


def test_nothing_is_served_before_the_first_weights(pair: Pair) -> None:
    """Cases 9, 35: a request waits for version 0, and what then answers are the trainer's weights and not what the engine began with."""
    assert pair.served_without_weights == 0
    for generation in pair.first:
        assert set(generation.versions_T.tolist()) == {Version(0, 0).pack()}
    held, trained = pair.at_start
    assert held == [trained, trained]
    for dummy in pair.dummies:
        assert dummy.keys() == trained.keys()
        assert not dummy.items() & trained.items(), "some tensor of the engine was the trainer's before any pull"


def test_five_steps_of_two_ranks_leave_both_generators_bit_equal_to_the_trainer(pair: Pair) -> None:
    held, trained = pair.at_end
    assert held == [trained, trained]
    assert not trained.items() & pair.at_start[1].items(), "some tensor was not trained"


def test_the_trainer_goes_on_while_a_generator_is_stopped(pair: Pair) -> None:
    """Cases 25, 39: three optimizer steps and publishes ended while the stopped one had a pull to answer for."""
    assert [row["lag/max"] for row in pair.rows_while_stopped if row["step"]] == [1, 2, 3]


def test_a_stopped_generator_comes_back_to_the_newest_version(pair: Pair) -> None:
    """Case 38: what it was offered before has been written over (two slots, three publishes), which it notices."""
    assert pair.after_stop is not None
    assert set(pair.after_stop.versions_T.tolist()) == {Version(0, 3).pack()}
    held, trained = pair.after_stop_prints
    assert held == [trained, trained]
    assert pair.audit.rows()[-1]["sync/rejected"] >= 1


@pytest.fixture
def an_encoding_each(monkeypatch: pytest.MonkeyPatch) -> None:
    """Generator 0 pulls whole images, generator 1 deltas."""
    process = Replicas._process

    def with_its_own(replicas: Replicas, number: int) -> Any:
        own = copy(replicas)
        own._config = deepcopy(replicas._config)
        own._config.weights.encoding = ("full", "delta")[number]
        return process(own, number)

    monkeypatch.setattr(Replicas, "_process", with_its_own)


@pytest.mark.asyncio(loop_scope="module")
async def test_whole_images_and_deltas_leave_the_same_bits_at_every_version(tmp_path: Path, an_encoding_each: None) -> None:
    """Of one trainer in bfloat16 at a learning rate of 1e-6, whose weights, rounded, both generators hold. None passes a version over."""
    rounded = ["model.dtype=bfloat16", "trainer.lr=1e-6", "weights.encoding=delta", "trainer.ranks=2", "generator.replicas=2", "steps=20"]
    few = ["buffer.prompts_per_step=2", "buffer.max_age=0", "buffer.dead_groups=keep", "generator.max_new_tokens=16"]
    few += ["trainer.entropy=0.01"]  # a gradient whatever the rewards
    made = audit(tmp_path / "run", *rounded, *few)
    trained: list[dict[str, int]] = []
    async with made.session() as session, session.background():
        for step in range(made.config.steps + 1):
            if step:
                await made.train_step(step)
            trained.append(await made.trainer_fingerprints())
            assert await made.generator_fingerprints(min_step=step) == [trained[-1]] * 2, f"version {step}"
    assert all(before != after for before, after in pairwise(trained)), "a version changed nothing"
    full, delta = made.reports()
    assert full.deltas == 0
    assert delta.deltas >= 0.9 * (delta.pulled - 1)
    assert min(full.pulled, delta.pulled) > made.config.steps
