"""What a person sees while a run goes on: one plain line per step, and a few rollouts now and then."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping
from typing import Any

from monarch_rl.types import Group


def say(line: str) -> None:
    print(line, flush=True)


def complain(line: str) -> None:
    print(f"error: {line}", file=sys.stderr, flush=True)


def step_line(row: Mapping[str, Any], steps: int) -> str:
    """One step in one line of at most 120 columns."""
    width = len(str(steps))
    parts = [f"step {row['step']:>{width}}/{steps}"]
    if "reward/mean" in row:
        parts += [
            f"reward {row['reward/mean']:.3f}",
            f"loss {row['loss/policy']:+.4f}",
            f"grad {row['grad_norm']:.2f}",
            f"age {row['age/mean']:.1f}≤{row['age/max']:.0f}",
            f"len {row['episode/tokens_mean']:.0f}",
            f"{row['time/step_s']:.2f} s (wait {row['time/wait_batch_s']:.2f})",
        ]
        if "throughput/generated_tok_s" in row:
            parts.append(f"{row['throughput/generated_tok_s'] / 1e3:.1f}k tok/s")
    if "eval/accuracy" in row:
        parts.append(f"eval {row['eval/accuracy']:.3f} @{row['eval/version']}")
    return "  ".join(parts)


def rollout_lines(groups: Iterable[Group], width: int = 110) -> list[str]:
    """Prompt, completion and reward of the first episodes of some groups."""
    lines = []
    for group in groups:
        prompt = group.prompt.content if isinstance(group.prompt.content, str) else group.prompt.content[-1]["content"]
        for episode in group.episodes[:2]:
            reward = "unscorable" if episode.reward is None else f"{episode.reward:g}"
            text = f"{prompt}{episode.text}".replace("\n", "⏎")
            lines.append(f"    [{reward}] {text if len(text) <= width else text[: width - 1] + '…'}")
    return lines
