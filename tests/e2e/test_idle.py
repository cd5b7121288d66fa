"""What a run says of its idle time agrees with what the kernel says of its processes."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.common import Job
from benchmarks.cpu_profile import idle, spent, watch
from tests.e2e.jobs import ROOT


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("max_age", [0, 2])
def test_idle_shares_agree_with_the_cpu_time_of_each_process(max_age: int, tmp_path: Path) -> None:
    """Within 5 points; a thread that is ready and waits for a core is not idle."""
    settings = ["recipe=grpo_qwen", "profile=cpu", "eval.prompts=0", "steps=10", f"buffer.max_age={max_age}", f"output_dir={tmp_path}"]
    with subprocess.Popen([sys.executable, "-m", "monarch_rl.run", *settings], cwd=ROOT, stdout=subprocess.DEVNULL) as process:
        first, last = watch(process, tmp_path / "metrics.jsonl")
    assert process.returncode == 0
    shares = idle(spent(first, last), Job(tmp_path), first.at_ns, last.at_ns)
    assert {name for name, *_ in shares} == {"trainer 0", "generator 0"}
    for _, said, drawn, kernel in shares:
        assert said == pytest.approx(kernel, abs=0.05)
        assert drawn == pytest.approx(kernel, abs=0.05)
