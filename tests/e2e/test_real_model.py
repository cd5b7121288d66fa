"""A real model of 135 M parameters, all of them trained; docs/models.md tells how to get one.

REAL_MODEL=directory python -m pytest -m slow -s tests/e2e/test_real_model.py
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
from transformers import AutoModelForCausalLM

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(1200),
    pytest.mark.skipif("REAL_MODEL" not in os.environ, reason="REAL_MODEL names no model directory"),
]

MOST_BYTES = 12 << 30
KEYS = f"""task={Path(__file__).parent / "digits_task.py"}:Digits steps=2 buffer.prompts_per_step=2 eval.prompts=0
generator.group_size=4 generator.max_new_tokens=32 trainer.lr=1e-4 trainer.warmup_steps=1 profile=cpu""".split()


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_real_model_trains_within_12_gigabytes(tmp_path: Path, dtype: str) -> None:
    path = Path(os.environ["REAL_MODEL"]).resolve()
    command = [sys.executable, "-m", "monarch_rl.run", "recipe=grpo_qwen", f"model.path={path}", f"model.dtype={dtype}", *KEYS]
    run = subprocess.Popen(command, cwd=tmp_path, stdin=subprocess.DEVNULL)
    peak = 0
    while run.poll() is None:
        peak = max(peak, sum(map(memory, family(run.pid))))
        time.sleep(0.3)
    assert run.returncode == 0
    assert 1 << 30 < peak <= MOST_BYTES
    rows = [json.loads(line) for line in (tmp_path / "runs/grpo_qwen/metrics.jsonl").read_text().splitlines()]
    print(f"peak {peak / 1e9:.1f} GB, {rows[-1]['wall_s']:.0f} s, steps of {[round(row['time/train_s'], 1) for row in rows[1:]]} s")
    for row in rows[1:]:
        assert row["grad_norm"] > 0
        assert row["tokens/trained"] > 0
    before, after = (AutoModelForCausalLM.from_pretrained(folder).state_dict() for folder in (path, tmp_path / "runs/grpo_qwen/model"))
    assert any(not weight.equal(before[name]) for name, weight in after.items())


def family(pid: int) -> list[int]:
    """A process and all below it."""
    parents = {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            parents[int(stat.parent.name)] = int(stat.read_text().rpartition(")")[2].split()[1])
        except (FileNotFoundError, ProcessLookupError):
            continue  # it ended meanwhile
    found = [pid]
    for member in found:
        found += [child for child, parent in parents.items() if parent == member]
    return found


def memory(pid: int) -> int:
    """Bytes, memory that is shared by n processes counted as an n-th (PSS)."""
    try:
        lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
    except (FileNotFoundError, ProcessLookupError):
        return 0
    return next((int(line.split()[1]) << 10 for line in lines if line.startswith("Pss:")), 0)
