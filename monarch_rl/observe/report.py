"""`report.html`: one run on one page, made of its own files, readable without a network."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from html import escape
from pathlib import Path
from typing import Any

Row = dict[str, Any]

CHARTS = (
    ("Reward", ("reward/mean", "eval/accuracy")),
    ("Age of trained tokens, in steps", ("age/mean", "age/max")),
    ("Tokens per episode", ("episode/tokens_mean", "episode/trained_tokens_mean")),
    ("Seconds per step", ("time/step_s", "time/train_s", "time/wait_batch_s")),
    ("Idle share", ("idle/trainer", "idle/generator")),
    ("Entropy, in nats", ("entropy",)),
    ("Gradient norm", ("grad_norm",)),
    ("Seconds per weight update", ("sync/stage_s", "sync/pull_s", "sync/pause_s")),
)
"""Title and keys of each chart; a key without a value anywhere is left out."""
WIDTH, HEIGHT = 420, 150
COLOURS = ("#1f77b4", "#d9730d", "#2a9d4b")
ROLLOUTS = 12
STYLE = """
:root { color-scheme: light dark }
body { font: 15px/1.5 system-ui, sans-serif; max-width: 920px; margin: 2em auto; padding: 0 1em }
.charts { display: grid; grid-template-columns: repeat(auto-fit, 440px); gap: 1.5em 1em; margin: 1.5em 0 }
figure { margin: 0 }
figcaption { font-weight: 600 }
svg text { font-size: 11px; fill: currentColor }
.legend span { margin-right: 1em }
table { border-collapse: collapse }
td, th { text-align: left; padding: .15em 1em .15em 0; vertical-align: top }
code, pre { font: 13px ui-monospace, monospace; white-space: pre-wrap; overflow-wrap: anywhere }
"""


def write_report(output_dir: Path) -> Path:
    """Make `report.html` from `metrics.jsonl`, `rollouts.jsonl` and `config.yaml` of a run."""
    rows, groups = _lines(output_dir / "metrics.jsonl"), _lines(output_dir / "rollouts.jsonl")
    config = output_dir / "config.yaml"
    settings = config.read_text(encoding="utf-8") if config.is_file() else ""
    path = output_dir / "report.html"
    path.write_text(_page(output_dir.name, rows, groups, settings), encoding="utf-8")
    return path


def _page(name: str, rows: Sequence[Row], groups: Sequence[Row], settings: str) -> str:
    title = escape(name)
    return f"""<!doctype html><html lang="en"><head><meta charset="utf-8"><title>{title}</title><style>{STYLE}</style></head><body>
<h1>{title}</h1>{_summary(rows)}
<div class="charts">{"".join(_chart(title, keys, rows) for title, keys in CHARTS)}</div>
<h2>The last rollouts</h2>{_rollouts(groups)}
<details><summary>Configuration</summary><pre>{escape(settings)}</pre></details></body></html>
"""


def _summary(rows: Sequence[Row]) -> str:
    evaluated = [row for row in rows if row.get("eval/accuracy") is not None]
    facts = {"steps": rows[-1]["step"] if rows else 0, "wall time": f"{rows[-1]['wall_s']:.0f} s" if rows else "-"}
    if evaluated:
        first, last = evaluated[0], evaluated[-1]
        facts["held-out accuracy"] = f"{first['eval/accuracy']:.3f} → {last['eval/accuracy']:.3f} (version {last['eval/version']})"
    return "<table>" + "".join(f"<tr><th>{escape(k)}</th><td>{escape(str(v))}</td></tr>" for k, v in facts.items()) + "</table>"


def _chart(title: str, keys: Iterable[str], rows: Sequence[Row]) -> str:
    """Lines over the steps as SVG; empty when there is nothing to draw."""
    lines = {key: [(row["step"], row[key]) for row in rows if row.get(key) is not None] for key in keys}
    lines = {key: points for key, points in lines.items() if points}
    if not lines:
        return ""
    top = max(value for points in lines.values() for _, value in points) or 1.0
    last = max(1, max(step for points in lines.values() for step, _ in points))
    drawn = "".join(_line(points, colour, last, top) for points, colour in zip(lines.values(), COLOURS, strict=False))
    legend = "".join(f'<span style="color:{colour}">■ {escape(key)}</span>' for key, colour in zip(lines, COLOURS, strict=False))
    axes = (
        f'<line x1="0" x2="{WIDTH}" y1="{HEIGHT}" y2="{HEIGHT}" stroke="currentColor"/><text x="0" y="12">{top:.3g}</text>'
        f'<text x="{WIDTH}" y="{HEIGHT + 14}" text-anchor="end">step {last}</text>'
    )
    return (
        f'<figure><figcaption>{escape(title)}</figcaption><svg width="{WIDTH}" height="{HEIGHT + 18}">{axes}{drawn}</svg>'
        f'<div class="legend">{legend}</div></figure>'
    )


def _line(points: Sequence[tuple[int, float]], colour: str, last: int, top: float) -> str:
    where = [(WIDTH * step / last, HEIGHT - (HEIGHT - 18) * max(0.0, value) / top) for step, value in points]
    path = " ".join(f"{x:.1f},{y:.1f}" for x, y in where)
    dots = "".join(f'<circle cx="{x:.1f}" cy="{y:.1f}" r="2.5" fill="{colour}"/>' for x, y in where) if len(where) < 12 else ""
    return f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="1.6"/>{dots}'


def _rollouts(groups: Sequence[Row]) -> str:
    head = "<tr><th>step</th><th>reward</th><th>versions</th><th>prompt and completion</th></tr>"
    return f"<table>{head}{''.join(_rollout(group) for group in groups[-ROLLOUTS:])}</table>"


def _rollout(group: Row) -> str:
    """The first episode of a group."""
    if not group["episodes"]:
        return ""
    episode, prompt = group["episodes"][0], group["prompt"]
    asked = prompt if isinstance(prompt, str) else prompt[-1]["content"]
    reward = "unscorable" if episode["reward"] is None else f"{episode['reward']:g}"
    versions = "–".join(dict.fromkeys(episode["versions"]))
    text = f"{escape(asked)} <b>{escape(episode.get('transcript', episode['completion']))}</b>"
    return f"<tr><td>{group['step']}</td><td>{reward}</td><td>{versions}</td><td><code>{text}</code></td></tr>"


def _lines(path: Path) -> list[Row]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()] if path.is_file() else []
