"""The main job as a user starts it: a short run of `recipe=grpo_qwen`, and what it must leave behind."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from monarch_rl.output import RUN_FILES
from tests.e2e.jobs import MAIN, Job, finished
from tests.e2e.jobs import MAIN_STEPS as STEPS

pytestmark = pytest.mark.timeout(400)

PROMISED = """
step version wall_s reward/mean reward/std reward/frac_dead_groups episode/tokens_mean episode/tokens_max episode/frac_truncated
loss/policy loss/kl grad_norm lr entropy ratio/mean ratio/max age/mean age/max lag/mean lag/max buffer/fill buffer/dropped time/step_s
time/wait_batch_s time/train_s sync/stage_s sync/pull_s sync/pause_s sync/bytes tokens/generated tokens/trained
throughput/generated_tok_s throughput/trained_tok_s idle/generator idle/trainer
""".split()  # noqa: SIM905


def groups_of(job: Job) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (job.output_dir / "rollouts.jsonl").read_text().splitlines()]


def test_rows_are_one_per_step_with_the_promised_keys(main_job: Job) -> None:
    assert [row["step"] for row in main_job.rows] == list(range(STEPS + 1))
    assert "eval/accuracy" in main_job.rows[0]
    assert "eval/accuracy" in main_job.rows[-1]
    assert main_job.rows[0]["eval/version"] == "0.0"
    assert main_job.rows[-1]["eval/version"] == f"0.{STEPS}"
    for row in main_job.rows[1:]:
        assert [key for key in PROMISED if key not in row] == []


def test_no_token_is_older_than_allowed_and_some_are_old(main_job: Job) -> None:
    ages = [row["age/max"] for row in main_job.rows[1:]]
    assert max(ages) <= 2
    assert max(ages) > 0, "nothing was asynchronous"


def test_every_step_trains_its_own_prompts_once(main_job: Job) -> None:
    ordinals = [group["ordinal"] for group in groups_of(main_job)]
    assert len(ordinals) == len(set(ordinals)) == STEPS * 16
    assert ordinals == sorted(ordinals), "window 1 trains in order"


def test_generation_goes_on_while_weights_arrive(main_job: Job) -> None:
    """Some episodes were sampled by more than one version, and tokens were produced between a pull's start and its swap."""
    assert any(row["episode/frac_mixed_versions"] > 0 for row in main_job.rows[1:])
    assert main_job.rows[-1]["sync/tokens_during_pulls"] > 0


def test_the_console_says_what_matters_and_nothing_else(main_job: Job) -> None:
    lines = main_job.out.splitlines()
    assert lines[0].startswith("profile cpu")
    assert sum(line.startswith("step ") for line in lines) == STEPS + 1
    assert lines[-1].startswith("done: model in ")
    assert main_job.err == ""


def test_it_writes_what_a_later_run_moves_aside_and_nothing_else(main_job: Job) -> None:
    names = {path.name for path in main_job.output_dir.iterdir()}
    assert {"config.yaml", "metrics.jsonl", "rollouts.jsonl", "report.html", "timeline.json", "model"} <= names <= RUN_FILES


def test_the_timeline_is_a_chrome_trace(main_job: Job) -> None:
    events = json.loads((main_job.output_dir / "timeline.json").read_text())["traceEvents"]
    lanes = {event["args"]["name"] for event in events if event["name"] == "process_name"}
    assert lanes == {"trainer 0", "generator 0", "replay buffer", "rollout 0", "scorer 0"}
    names = {event["name"] for event in events if event["ph"] == "X"}
    assert names >= {"wait", "train", "stage", "generate", "pull", "swap", "rollout", "score", "evaluate"}
    pulled = [event["args"]["version"] for event in events if event["ph"] == "X" and event["name"] == "pull"]
    assert pulled[-1] == f"0.{STEPS}", "the last pull is missing"


def test_the_report_shows_the_run(main_job: Job) -> None:
    page = (main_job.output_dir / "report.html").read_text()
    assert f"(version 0.{STEPS})" in page
    assert "<polyline" in page


def test_the_model_loads_in_transformers(main_job: Job) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model = AutoModelForCausalLM.from_pretrained(main_job.output_dir / "model")
    assert sum(p.numel() for p in model.parameters()) == 603_456
    assert AutoTokenizer.from_pretrained(main_job.output_dir / "model").eos_token_id == model.generation_config.eos_token_id


def test_the_written_config_runs_again_on_the_trained_model(main_job: Job, tmp_path: Path) -> None:
    """`config.yaml` re-runs, the model directory serves as `model.path` for trainer and vLLM, and max_age=0 is synchronous."""
    again = finished(
        tmp_path,
        f"recipe={main_job.output_dir / 'config.yaml'}",
        f"model.path={main_job.output_dir / 'model'}",
        "steps=3",
        "buffer.max_age=0",
        "generator.temperature=0.7",
        "eval.prompts=0",
        "trackers=[]",
        name="again",
    )
    assert again.process.returncode == 0
    for row in again.rows[1:]:
        assert row["age/max"] == 0
        assert row["mismatch/max_abs"] <= 1e-4
        assert row["mismatch/mean_abs"] <= 2e-6
        assert row["mismatch/kl"] <= 1e-9
    assert not overlaps(again.output_dir / "timeline.json", "generate", "train"), "max_age=0 must alternate strictly"
    assert overlaps(main_job.output_dir / "timeline.json", "generate", "train"), "the default run must not"


def overlaps(timeline: Path, one: str, other: str) -> bool:
    """Whether any span named `one` shares time with one named `other`."""
    spans = [e for e in json.loads(timeline.read_text())["traceEvents"] if e["ph"] == "X"]
    ours, theirs = ([(s["ts"], s["ts"] + s["dur"]) for s in spans if s["name"] == name] for name in (one, other))
    return any(a < d and c < b for a, b in ours for c, d in theirs)


def test_max_age_one_is_the_double_buffer_with_two_ranks_and_two_replicas(tmp_path: Path) -> None:
    wide = ["steps=4", "buffer.max_age=1", "trainer.ranks=2", "generator.replicas=2", "weights.every=2"]
    job = finished(tmp_path, *MAIN, *wide)
    assert job.process.returncode == 0
    assert max(row["age/max"] for row in job.rows[1:]) == 1
    sampled = {version for group in groups_of(job) for episode in group["episodes"] for version in episode["versions"]}
    assert sampled == {"0.0", "0.2"}, "every second version is published, and the last one comes too late to be trained on"
