"""An asynchronous run with adapters: which tokens they sampled, what travels, and that whoever comes late has them."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
import torch
from peft import PeftModel
from transformers import AutoModelForCausalLM

from monarch_rl.tasks.tiny import tiny_path
from monarch_rl.weights.plan import LoadPlan
from tests.e2e.audit_reference import Reference, runs
from tests.e2e.audit_system import Audit, audit

pytestmark = pytest.mark.timeout(300)

MOST, MEAN = 1e-4, 2e-6
"""Of |Δ log-probability| in float32, nats."""
RANK, STEPS = 4, 4
KEYS = [
    *(f"model.lora.rank={RANK}", "trainer.lr=1e-2", "trainer.kl=1e-3", f"steps={STEPS}", "weights.verify=every"),
    *("buffer.prompts_per_step=8", "buffer.max_age=2", "generator.engine.max_num_seqs=4"),
]


@dataclass
class Seen:
    """A finished run whose second generator came after step 2."""

    audit: Audit
    plan: LoadPlan
    bases: list[dict[str, int]] = field(default_factory=list)
    """Fingerprints of the base model: the trainer's, then each generator's."""
    at_start: dict[str, int] = field(default_factory=dict)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def seen(tmp_path_factory: pytest.TempPathFactory) -> Seen:
    folder = tmp_path_factory.mktemp("lora")
    made = audit(folder / "run", *KEYS)
    async with made.session() as session, session.background():
        seen = Seen(made, session._replicas.plans[0], at_start=await made.trainer_fingerprints())
        await made.keep_weights(0)
        for step in range(1, STEPS + 1):
            await made.train_step(step)
            await made.keep_weights(step)
            if step == 2:
                await session.scale(generators=2)
        for replica in range(2):
            await made.ask(replica, min_step=STEPS)
        made.held, made.trained = await made.generator_fingerprints(), await made.trainer_fingerprints()
        seen.bases = next(iter((await session._trainers.ranks.fingerprints.call([seen.plan.base])).values()))
        seen.bases += [(await generator.base_fingerprints.call_one())[0] for generator in session._replicas.live.values()]
        await session.save_model()
    return seen


def test_tokens_were_sampled_by_the_adapters_that_they_name(seen: Seen) -> None:
    """Cases 28, 33, 37: recomputed by transformers from the merged weights of each version, over the keys and values of those before."""
    reference = Reference(seen.audit.weights, 1.0)
    episodes = [episode for group in seen.audit.groups.values() for episode in group.episodes]
    assert len({run.step for episode in episodes for run in runs(episode)}) >= 3
    assert any(len(runs(episode)) > 1 for episode in episodes), "no adapter arrived while an episode was under way"
    gaps = reference.gaps(episodes)
    assert gaps.max() <= MOST
    assert gaps.mean() <= MEAN


def test_the_ratio_at_zero_lag_is_one(seen: Seen) -> None:
    fresh = [row for row in seen.audit.stats if "mismatch/max_abs" in row]
    assert fresh
    assert max(row["mismatch/max_abs"] for row in fresh) <= MOST
    assert max(row["mismatch/mean_abs"] for row in fresh) <= MEAN


def test_adapters_alone_travel(seen: Seen) -> None:
    """From the first version on; of each the tensors of rank 4, and what rounds them up to 64 bytes."""
    numbers = sum(piece.rows * piece.cols for piece in seen.plan.pieces)
    assert {min(piece.rows, piece.cols) for piece in seen.plan.pieces} == {RANK}
    assert len(seen.plan.pieces) == 3 * 7 * 2
    for row in seen.audit.rows()[1:]:
        assert 4 * numbers <= row["sync/bytes"] < 4 * numbers + 64 * len(seen.plan.pieces)
    pulls = [report.bytes_per_pull for report in seen.audit._session._records.reports]
    assert set(pulls) == {seen.audit.rows()[-1]["sync/bytes"]}


def test_generators_hold_the_trainers_adapters_also_one_that_came_late(seen: Seen) -> None:
    """Case 35."""
    assert seen.audit.held == [seen.audit.trained] * 2
    assert not seen.audit.trained.items() & seen.at_start.items(), "some tensor was not trained"
    trainer, *generators = seen.bases
    assert generators == [trainer] * 2
    assert len(trainer) == len(dict(AutoModelForCausalLM.from_pretrained(tiny_path()).named_parameters()))


@torch.no_grad()
def test_the_run_leaves_the_merged_model_and_the_adapter(seen: Seen) -> None:
    ids = torch.arange(4, 90)[None]

    def logits(model: Any) -> torch.Tensor:
        found: torch.Tensor = model.eval()(input_ids=ids).logits
        return found

    def load(path: Path) -> Any:
        return AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)

    expected = logits(load(seen.audit.folder / "model"))
    assert (expected - logits(load(tiny_path()))).abs().max() > 0.01
    on_base = PeftModel.from_pretrained(load(tiny_path()), str(seen.audit.folder / "adapter"))
    torch.testing.assert_close(logits(on_base), expected, atol=1e-4, rtol=1e-4)
