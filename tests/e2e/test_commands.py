"""The commands on real runs: the main job, which was watched from its beginning to its end, and one that is killed while it is watched."""

from __future__ import annotations

import json
from pathlib import Path
from signal import SIGKILL
from typing import Any

import pytest

from tests.e2e.jobs import MAIN_STEPS as STEPS
from tests.e2e.jobs import SMALL, Job, command, said, started
from tests.unit.test_trace import check

pytestmark = pytest.mark.timeout(600)


def steps_of(out: str) -> list[str]:
    return [line.split("  ")[0] for line in out.splitlines() if line.startswith("step ")]


def test_watching_shows_what_the_run_itself_shows_and_ends_with_it(main_job: Job) -> None:
    out = (main_job.output_dir.parent / "watch.out").read_text()
    assert steps_of(out) == steps_of(main_job.out) == [f"step {step}/{STEPS}" for step in range(STEPS + 1)]
    assert out.splitlines()[-1] == "the run has ended: done"


def test_the_timeline_has_every_actor_and_arrows_to_every_pull(main_job: Job) -> None:
    whole = json.loads((main_job.output_dir / "timeline.json").read_text())
    events: list[dict[str, Any]] = whole["traceEvents"]
    check(events)
    lanes = {event["args"]["name"] for event in events if event["name"] == "process_name"}
    assert lanes == {"trainer 0", "generator 0", "rollout 0", "scorer 0", "replay buffer"}
    spans = {event["name"] for event in events if event["ph"] == "X"}
    assert spans == {"wait", "train", "stage", "decode", "idle", "pull", "swap", "generate", "rollout", "evaluate", "score"}
    pulled = [event["args"]["version"] for event in events if event["name"] == "pull"]
    assert (pulled[0], pulled[-1]) == ("0.0", f"0.{STEPS}"), "one in between may be passed over for a newer one"
    assert sum(event["ph"] == "f" for event in events) == len(pulled)
    assert {event["name"] for event in events if event["ph"] == "C"} == {"prompts", "generator"}
    assert whole["metadata"]["clock_offsets_ns"] == {}, "one host, one clock"


def test_tensorboard_has_every_row(main_job: Job) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(main_job.output_dir / "tensorboard"))
    events.Reload()
    assert [event.step for event in events.Scalars("time/step_s")] == list(range(1, STEPS + 1))
    assert [event.value for event in events.Scalars("reward/mean")] == pytest.approx([row["reward/mean"] for row in main_job.rows[1:]])


def test_the_newest_weights_are_evaluated_and_exported(main_job: Job) -> None:
    """The accuracy is that of the last row, whose prompts and seeds are the same; a model of its own needs its task said."""
    home = main_job.output_dir.parent
    code, out, err = said(command("export", "job", "--to", "exported", cwd=home))
    assert (code, out, err) == (0, "exported\n", "")
    found = []
    of_a_model = ["exported", "task=arithmetic", "eval.prompts=64", "generator.max_new_tokens=96"]
    for arguments in (["job"], of_a_model):
        code, out, err = said(command("eval", *arguments, cwd=home))
        assert (code, err) == (0, "")
        readable, line = out.splitlines()
        found.append(json.loads(line))
        assert f"accuracy {found[-1]['accuracy']:.3f}" in readable
    for each in found:
        assert (each["prompts"], each["unscorable"], each["task"]) == (64, 0, "arithmetic")
        assert each["accuracy"] == main_job.rows[-1]["eval/accuracy"]
    assert [each["version"] for each in found] == [f"0.{STEPS}", None]


def test_a_run_that_is_killed_is_said_to_have_died(tmp_path: Path) -> None:
    with started(tmp_path, *SMALL, "steps=1000", "eval.prompts=0") as job:
        job.until_steps(1)
        code, out, err = said(command("report", "job", cwd=tmp_path))
        assert (code, out, err) == (0, "job/report.html\n", "")
        assert "<td>running</td>" in (job.output_dir / "report.html").read_text()
        watching = command("watch", "job", cwd=tmp_path)
        job.signal(SIGKILL)
        job.wait()
        code, out, err = said(watching)
    assert (code, err) == (1, "")
    reason = f"died: its controller, process {job.process.pid} on "
    assert out.splitlines()[-1].startswith(f"the run has ended: {reason}")
    code, _, err = said(command("report", "job", cwd=tmp_path))
    assert (code, err) == (0, "")
    page = (job.output_dir / "report.html").read_text()
    assert f'<span class="bad">{reason}' in page
    assert "<h2>Who did what, steps 1 to " in page, "the timeline of a killed run can be read"
