"""What a user gets wrong ends in one line that says what to put right; what single prompts and rewards get wrong is counted."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from monarch_rl.tasks.tiny import tiny_path
from tests.e2e.jobs import SMALL, finished
from tests.e2e.unruly_tasks import fate

pytestmark = pytest.mark.timeout(300)

TASKS = Path(__file__).with_name("unruly_tasks.py")


def without(folder: Path, *names: str) -> Path:
    """The tiny model without some of its files."""
    folder.mkdir()
    for file in tiny_path().iterdir():
        if file.name not in names:
            (folder / file.name).write_bytes(file.read_bytes())
    return folder


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    home = tmp_path_factory.mktemp("models")
    without(home / "speechless", "tokenizer.json", "tokenizer_config.json")
    without(home / "endless", "tokenizer_config.json", "generation_config.json", "config.json")
    (home / "broken.py").write_text("import no_such_module_of_mine\n")
    (home / "empty.jsonl").write_text("")
    return home


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["trainer.learning_rte=1"], "unknown key 'trainer.learning_rte'; did you mean 'trainer.lr'"),
        (["weights.every=4"], "weights.every=4 would stall generation at buffer.max_age=2.*at most 3"),
        (["model.path=./nowhere"], "model.path=./nowhere: there is no such directory"),
        (["model.path={models}/speechless"], "holds no tokenizer"),
        (["model.path={models}/endless"], "names no end token"),
        (["task={models}/broken.py:Task"], "broken.py cannot be imported: ModuleNotFoundError.*error.log"),
        (["task={tasks}:Unrly"], "has no attribute 'Unrly'; did you mean 'Unruly'"),
        (["task={tasks}:Empty"], "the dataset has no rows"),
        (["task=gsm8k", "task_args.path={models}/empty.jsonl"], "the dataset has no training rows"),
        (["task={tasks}:Chatty"], "has no chat template"),
        (["task={tasks}:NothingHeldOut"], "eval.prompts=8.*no held-out prompts"),
        (["task={tasks}:Faulty"], "KeyError: 'question'.*error.log"),
    ],
    ids=lambda value: value[0].partition("=")[2] if isinstance(value, list) else "",
)
def test_a_mistake_is_one_line_and_nothing_is_started(arguments: list[str], said: str, models: Path, tmp_path: Path) -> None:
    """Case 68 among them. An earlier run in the same folder stays where it is."""
    earlier = tmp_path / "job" / "metrics.jsonl"
    earlier.parent.mkdir()
    earlier.write_text("kept")
    job = finished(tmp_path, *SMALL, *[a.format(models=models, tasks=TASKS) for a in arguments])
    assert job.process.returncode == 2
    (line,) = job.err.splitlines()
    assert line.startswith("error: ")
    assert re.search(said, line)
    assert earlier.read_text() == "kept"
    if "error.log" in said:
        assert "Traceback" in (job.output_dir / "error.log").read_text()


def test_a_setting_that_vllm_does_not_have(tmp_path: Path) -> None:
    """Found by the generator's process; the line is the same as for other mistakes."""
    job = finished(tmp_path, *SMALL, "generator.engine.max_num_seq=3")
    assert job.process.returncode == 2
    (line,) = job.err.splitlines()
    assert line.startswith("error: generator.engine.max_num_seq: vLLM has no such setting; did you mean max_num_seqs?")
    assert "EngineError" in (job.output_dir / "error.log").read_text()


def test_rewards_and_prompts_that_go_wrong_are_counted_and_the_run_goes_on(tmp_path: Path) -> None:
    """Cases 20, 21, 23, 46, 61, 62: the reward gives None or NaN, raises, is cancelled, hangs, ends its process; a prompt is too long;
    completions are empty; the dataset is smaller than a batch."""
    job = finished(tmp_path, *SMALL, f"task={TASKS}:Unruly", "steps=3", "scorer.deadline_s=1", "scorer.workers=2")
    assert job.process.returncode == 0
    assert [row["step"] for row in job.rows] == [0, 1, 2, 3]
    groups = [json.loads(line) for line in (job.output_dir / "rollouts.jsonl").read_text().splitlines()]
    errors: dict[str, set[str]] = {}
    for answer, error in ((group["answer"], e["error"]) for group in groups for e in group["episodes"] if e["error"]):
        errors.setdefault(answer, set()).add(error)
    late = "deadline of 1 s passed"
    assert errors.pop("hangs") == {late}
    assert {how: said - {late} for how, said in errors.items() if how != "empty"} == {  # any is late on a machine that stands still
        "nothing": {"RewardError: reward is None, not a number"},
        "nan": {"RewardError: reward is nan"},
        "raises": {"RewardError: ValueError: no idea"},
        "cancelled": {"RewardError: CancelledError"},
        "dies": {"RewardError: the reward's process died (exit code 3)"},
    }
    assert all(e["reward"] is None for group in groups for e in group["episodes"] if e["error"]), "an error is not a zero"
    assert all(0 < row["reward/frac_unscorable"] < 1 for row in job.rows[1:])
    empty = [e for group in groups if group["answer"] == "empty" for e in group["episodes"]]
    assert any(e["completion"] == "" and e["tokens"] == 1 for e in empty)
    assert "long" not in {group["answer"] for group in groups}
    assert job.rows[-1]["buffer/dropped_refused"] >= 3
    assert job.rows[0]["eval/unscorable"] >= 1
    too_long = r"task unruly: prompt \d+ is dropped: a prompt of 602 tokens leaves no room in a context of 512 tokens \(\d+ so far\)"
    unscorable = r"scorer [01]: \d+ unscorable so far, the last of prompt \d+: .*"
    assert all(re.fullmatch(f"{too_long}|{unscorable}", line) for line in job.err.splitlines()), job.err
    assert "unscorable so far" in job.err
    assert 1 <= job.err.count("is dropped") <= 5


def test_a_reward_that_always_raises_ends_the_run_with_its_words(tmp_path: Path) -> None:
    """Cases 15, 18."""
    job = finished(tmp_path, *SMALL, f"task={TASKS}:Broken", "buffer.max_dead_steps=2")
    assert job.process.returncode == 1
    *before, line = job.err.splitlines()
    said = r"scorer 0: (\d+) unscorable so far, the last of prompt \d+: RewardError: LookupError: the key of the answers is lost"
    assert [re.fullmatch(said, told)[1] for told in before][:3] == ["1", "10", "20"]  # type: ignore[index]
    assert len(before) < 10
    assert line.startswith("error: ")
    assert "buffer.max_dead_steps=2" in line
    assert "LookupError: the key of the answers is lost" in line
    assert line.endswith("error.log)")
    assert "eval/accuracy" not in job.rows[0]
    assert job.rows[0]["eval/unscorable"] == 8


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_thousand_episodes_of_which_some_go_wrong_are_counted_exactly(tmp_path: Path) -> None:
    """Cases 20 and 21: 5 % raise, 1 % hang, 1 % give None, NaN or text."""
    steps, prompts, size = 16, 8, 8
    keep = [f"steps={steps}", f"buffer.prompts_per_step={prompts}", "buffer.dead_groups=keep", "scorer.deadline_s=5", "eval.prompts=0"]
    job = finished(tmp_path, *SMALL, *keep, f"task={TASKS}:Seldom", f"generator.group_size={size}")
    assert job.process.returncode == 0, job.err
    groups = [json.loads(line) for line in (job.output_dir / "rollouts.jsonl").read_text().splitlines()]
    episodes = [(group["ordinal"], episode) for group in groups for episode in group["episodes"]]
    assert len(episodes) == steps * prompts * size > 1000
    said = {
        "raises": "RewardError: ValueError: no idea",
        "hangs": "deadline of 5 s passed",
        "nothing": "RewardError: reward is None, not a number",
        "nan": "RewardError: reward is nan",
        "text": "RewardError: reward is 'right', not a number",
        "": None,
    }
    for ordinal, episode in episodes:
        assert episode["error"] == said[fate(ordinal, episode["completion"])], (ordinal, episode)
        assert (episode["reward"] is None) == (episode["error"] is not None)
    wrong, unscorable, dropped = sum(episode["error"] is not None for _, episode in episodes), 0.0, 0.0
    for row in job.rows[1:]:  # of the groups that were trained and of those that had no reward at all and were dropped
        barren, dropped = row.get("buffer/dropped_unscorable", 0.0) - dropped, row.get("buffer/dropped_unscorable", 0.0)
        unscorable += row["reward/frac_unscorable"] * (prompts + barren) * size
    assert round(unscorable) == wrong + dropped * size
    assert job.rows[-1]["buffer/dropped"] == dropped
    assert wrong > 0
