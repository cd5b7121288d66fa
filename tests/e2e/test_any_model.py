"""The main job on model directories that it has never seen, made on the spot."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoModelForCausalLM

from tests.e2e.audit_system import audit
from tests.random_models import write_model
from tests.unit.test_docs import documented_metrics

pytestmark = pytest.mark.timeout(300)

DIGITS = f"task={Path(__file__).parent / 'digits_task.py'}:Digits"
SHORT = f"""{DIGITS} steps=2 buffer.prompts_per_step=4 buffer.max_age=0 generator.group_size=4 generator.max_new_tokens=24
generator.temperature=0.7 generator.top_p=0.9 generator.top_k=12 trainer.lr=1e-3 trainer.warmup_steps=1""".split()


def test_a_random_llama_directory_is_trained_from_the_command_line(tmp_path: Path) -> None:
    """At zero lag the sampler's log-probabilities are the trainer's, though ids are left out; the result is of the same kind."""
    path = write_model(tmp_path / "llama", "llama")
    command = [sys.executable, "-m", "monarch_rl.run", "recipe=grpo_qwen", "profile=cpu", f"model.path={path}", "eval.prompts=4", *SHORT]
    command += ["trainer.kl=0.01", "checkpoint.every=1"]  # so that every metric there is has its row
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=240, stdin=subprocess.DEVNULL)
    assert done.returncode == 0, done.stderr
    run = tmp_path / "runs" / "grpo_qwen"
    rows: list[dict[str, Any]] = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    for row in rows[1:]:
        assert row["grad_norm"] > 0
        assert row["kl/ref"] <= 1e-9 if row["step"] == 1 else row["kl/ref"] > 0
        assert row["mismatch/max_abs"] <= 1e-4
        assert row["mismatch/kl"] <= 1e-9
    emitted = {key for row in rows for key in row}
    assert emitted <= documented_metrics()
    assert {key for key in documented_metrics() if not key.startswith("buffer/dropped_")} <= emitted
    before, after = (AutoModelForCausalLM.from_pretrained(folder).state_dict() for folder in (path, run / "model"))
    assert before.keys() == after.keys()
    assert [name for name, weight in after.items() if weight.equal(before[name])] == []


@pytest.mark.parametrize(
    ("shape", "keys"), [("qwen3_moe", ["generator.replicas=2"]), ("gpt2", []), ("mixtral", ["generator.keep_routing=false"])]
)
@pytest.mark.asyncio(loop_scope="module")
async def test_models_of_other_kinds_reach_generators_from_two_ranks(tmp_path: Path, shape: str, keys: list[str]) -> None:
    """Case 35: five experts over two ranks, whose choice travels with each token, as does what was left out; and models that vLLM's own
    loader takes at each swap, with transposed weights and with experts by other names."""
    path = write_model(tmp_path / shape, shape)
    made = audit(tmp_path / "run", f"model.path={path}", "trainer.ranks=2", *keys, *SHORT)
    await made.run()
    assert made.held == [made.trained] * made.config.generator.replicas
    for stats in made.stats:
        assert stats["grad_norm"] > 0
        assert stats["mismatch/max_abs"] <= 1e-4
        assert stats["mismatch/kl"] <= 1e-9
