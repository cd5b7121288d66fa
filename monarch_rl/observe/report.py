"""`report.html`: one run on one page, made of its own files, readable without a network. Also of a run that goes on or has died."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Sequence
from html import escape
from pathlib import Path
from typing import Any

import yaml

from monarch_rl.config import schema
from monarch_rl.configure import flatten, show
from monarch_rl.disk import write_whole
from monarch_rl.observe import gantt
from monarch_rl.observe.charts import duration
from monarch_rl.observe.status import read_status

Row = dict[str, Any]

CHARTS = (
    ("Reward", ("reward/mean", "eval/accuracy")),
    ("Age of trained tokens, in steps", ("age/mean", "age/max")),
    ("Tokens per episode", ("episode/tokens_mean", "episode/trained_tokens_mean")),
    ("Seconds per step", ("time/step_s", "time/train_s", "time/wait_batch_s")),
    ("Idle share", ("idle/trainer", "idle/generator")),
    ("Dead groups, truncated and unscorable episodes", ("reward/frac_dead_groups", "episode/frac_truncated", "reward/frac_unscorable")),
    ("Entropy, in nats", ("entropy",)),
    ("Gradient norm", ("grad_norm",)),
    ("Steps' worth of groups in the buffer", ("buffer/fill",)),
    ("Seconds per weight update", ("sync/stage_s", "sync/pull_s", "sync/pause_s")),
)
"""Title and keys of each chart; a key without a value anywhere is left out."""
WIDTH, HEIGHT = 420, 150
COLOURS = ("#2f7fc1", "#d9730d", "#2a9d5c")
ROLLOUTS = 6
"""Samples of the best, and of the worst."""
LATE_BYTES = 4_000_000
"""Samples are from so much of the end of rollouts.jsonl."""
LONGEST = 20_000
"""Characters of a prompt or completion that are shown."""
STYLE = """
:root { color-scheme: light dark }
body { font: 15px/1.5 system-ui, sans-serif; max-width: 920px; margin: 2em auto; padding: 0 1em }
h2 { margin: 1.8em 0 .4em; font-size: 1.2em }
.charts { display: grid; grid-template-columns: repeat(auto-fit, 440px); gap: 1.5em 1em; margin: 1.5em 0 }
figure { margin: 0 }
figcaption { font-weight: 600 }
svg text { font-size: 11px; fill: currentColor }
.legend span { margin-right: 1em; display: inline-block }
.grid { stroke: currentColor; opacity: .15 }
.bad { color: #d1343b; font-weight: 600 }
table { border-collapse: collapse }
td, th { text-align: left; padding: .15em 1em .15em 0; vertical-align: top }
meter { width: 12em }
code, pre { font: 13px ui-monospace, monospace; white-space: pre-wrap; overflow-wrap: anywhere }
"""


def write_report(output_dir: Path) -> Path:
    """Make `report.html` from what there is of the run's files."""
    path = output_dir / "report.html"
    write_whole(path, _page(output_dir))
    return path


def read_rows(path: Path, last_bytes: int | None = None) -> list[Row]:
    """Objects of a file with one a line. A line that is being written, or was when the run died, is left out."""
    if not path.is_file():
        return []
    with path.open("rb") as file:
        if last_bytes is not None and (size := path.stat().st_size) > last_bytes:
            file.seek(size - last_bytes)
            file.readline()
        return [json.loads(line) for line in file if line.endswith(b"\n")]


def _page(output_dir: Path) -> str:
    rows, groups = read_rows(output_dir / "metrics.jsonl"), read_rows(output_dir / "rollouts.jsonl", LATE_BYTES)
    title = escape(output_dir.resolve().name)
    return f"""<!doctype html><html lang="en"><head><meta charset="utf-8"><title>{title}</title>
<style>{STYLE}{gantt.STYLE}</style></head><body>
<h1>{title}</h1>{_summary(output_dir, rows)}
<div class="charts">{"".join(_chart(title, keys, rows) for title, keys in CHARTS)}</div>
{_lanes(output_dir / "timeline.json")}
{_trouble(output_dir, rows, groups)}
{_ages(rows, groups)}
{_rollouts(groups)}
{_configuration(output_dir / "config.yaml")}</body></html>
"""


def _table(rows: Iterable[Sequence[str]]) -> str:
    """The first cell of each row is its heading. Cells are HTML."""
    return "<table>" + "".join(f"<tr><th>{head}</th>{''.join(f'<td>{c}</td>' for c in cells)}</tr>" for head, *cells in rows) + "</table>"


def _summary(output_dir: Path, rows: Sequence[Row]) -> str:
    evaluated = [row for row in rows if row.get("eval/accuracy") is not None]
    status = read_status(output_dir)
    facts = [("state", escape(str(status)) if status else "unknown")]
    if status and status.state in ("failed", "died"):
        facts = [("state", f'<span class="bad">{escape(str(status))}</span>')]
    facts.append(("steps", str(rows[-1]["step"]) if rows else "no rows yet"))
    if rows:
        facts.append(("wall time", duration(rows[-1]["wall_s"])))
    if evaluated:
        first, last = evaluated[0], evaluated[-1]
        said = f"{first['eval/accuracy']:.3f} → {last['eval/accuracy']:.3f} (version {last['eval/version']})"
        facts.append(("held-out accuracy", escape(said)))
    rewards = [row["reward/mean"] for row in rows if row.get("reward/mean") is not None]
    if rewards:
        facts.append(("mean reward", f"{rewards[0]:.3f} → {rewards[-1]:.3f}"))
    return _table(facts)


def _chart(title: str, keys: Iterable[str], rows: Sequence[Row]) -> str:
    """Lines over the steps as SVG; empty when there is nothing to draw."""
    lines = {key: [(row["step"], row[key]) for row in rows if row.get(key) is not None] for key in keys}
    lines = {key: points for key, points in lines.items() if points}
    if not lines:
        return ""
    top = max(value for points in lines.values() for _, value in points) or 1.0
    last = max(1, max(step for points in lines.values() for step, _ in points))
    drawn = "".join(_line(points, colour, last, top) for points, colour in zip(lines.values(), COLOURS, strict=False))
    legend = "".join(
        f'<span style="color:{colour}">■ {escape(key)} {points[-1][1]:.3g}</span>'
        for (key, points), colour in zip(lines.items(), COLOURS, strict=False)
    )
    middle = HEIGHT - (HEIGHT - 18) / 2
    axes = (
        f'<line x1="0" x2="{WIDTH}" y1="{HEIGHT}" y2="{HEIGHT}" stroke="currentColor"/><text x="0" y="12">{top:.3g}</text>'
        f'<line class="grid" x1="0" x2="{WIDTH}" y1="18" y2="18"/><line class="grid" x1="0" x2="{WIDTH}" y1="{middle}" y2="{middle}"/>'
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


def _lanes(timeline: Path) -> str:
    """Who did what in a few steps, and how much of the whole run each process was idle."""
    lanes = gantt.read_lanes(timeline)
    window, run = gantt.typical(lanes), gantt.whole(lanes)
    if not run.last:
        return ""
    drawn, height = gantt.picture(lanes, window, 900, top=26)
    working = [lane for lane in lanes if any(span.name in gantt.WORK for span in lane.spans)]
    idle = [(escape(lane.name), lane.idle(run.start_ns, run.end_ns)) for lane in working]
    shares = _table([(name, f'<meter value="{share:.3f}"></meter>', f"{share:.0%}") for name, share in idle])
    return (
        f"<h2>Who did what, steps {window.first} to {window.last}</h2>"
        f'<svg class="gantt" width="900" height="{height}">{gantt.legend(4)}{drawn}</svg>'
        f"<h2>Idle, of the time from the first step to the last</h2>{shares}"
    )


def _trouble(output_dir: Path, rows: Sequence[Row], groups: Sequence[Row]) -> str:
    """Why the run failed, what was dropped, what could not be scored, which pulls were thrown away."""
    last: Row = rows[-1] if rows else {}
    facts = [(f"prompts dropped: {key.removeprefix('buffer/dropped_')}", f"{n:.0f}") for key, n in last.items() if "/dropped_" in key]
    if last.get("sync/rejected"):
        facts.append(("pulls thrown away", f"{last['sync/rejected']:.0f}"))
    errors = Counter(episode["error"] for group in groups for episode in group["episodes"] if episode.get("error"))
    facts += [("episodes unscorable", f"{n} × <code>{escape(error)}</code>") for error, n in errors.most_common(5)]
    log, status = output_dir / "error.log", read_status(output_dir)
    story = ""
    if status and status.state == "failed" and log.is_file():
        said = escape(log.read_text(encoding="utf-8")[-20_000:])
        story = f"<details><summary>error.log</summary><pre>{said}</pre></details>"
    return f"<h2>Failures and drops</h2>{_table(facts) if facts else '<p>None.</p>'}{story}"


def _ages(rows: Sequence[Row], groups: Sequence[Row]) -> str:
    """Episodes by the age of their oldest token: steps done when they were trained minus the step of the weights, or 1 where these are of
    an older lineage and that is more."""
    lineages = {row["step"]: int(str(row.get("version", "0")).split(".")[0]) for row in rows}

    def age(step: int, version: str) -> int:
        lineage, of = map(int, version.split("."))
        return max(int(lineage < lineages.get(step, 0)), step - 1 - of)

    ages = Counter(age(group["step"], episode["versions"][0]) for group in groups for episode in group["episodes"] if episode["versions"])
    if not ages:
        return ""
    shares = [(f"{age} steps", n / ages.total()) for age, n in sorted(ages.items())]
    listed = [(name, f'<meter value="{share:.3f}"></meter>', f"{share:.0%}") for name, share in shares]
    return f"<h2>Age of the oldest token, of {ages.total()} trained episodes</h2>{_table(listed)}"


def _rollouts(groups: Sequence[Row]) -> str:
    """Of the last quarter of the groups the episodes with the highest and with the lowest rewards, one of each prompt."""
    late = groups[-max(ROLLOUTS, len(groups) // 4) :]
    pairs = [(group, episode) for group in reversed(late) for episode in group["episodes"]]
    scored = sorted((pair for pair in pairs if pair[1]["reward"] is not None), key=lambda pair: -pair[1]["reward"])
    unscorable = [pair for pair in pairs if pair[1]["reward"] is None]
    if not pairs:
        return ""
    return f"<h2>Best of the last rollouts</h2>{_samples(scored)}<h2>Worst</h2>{_samples(unscorable[:2] + scored[::-1])}"


def _samples(pairs: Iterable[tuple[Row, Row]]) -> str:
    chosen: dict[str, tuple[Row, Row]] = {}
    for group, episode in pairs:
        if len(chosen) == ROLLOUTS:
            break
        chosen.setdefault(str(group["prompt"]), (group, episode))
    head = "<tr><th>step</th><th>reward</th><th>versions</th><th>prompt and completion</th></tr>"
    return f"<table>{head}{''.join(_rollout(*pair) for pair in chosen.values())}</table>"


def _rollout(group: Row, episode: Row) -> str:
    prompt = group["prompt"]
    asked = prompt if isinstance(prompt, str) else prompt[-1]["content"]
    reward = "unscorable" if episode["reward"] is None else f"{episode['reward']:g}"
    versions = "–".join(dict.fromkeys(episode["versions"]))
    text = f"{_middle_out(asked)} <b>{_middle_out(str(episode.get('transcript', episode['completion'])))}</b>"
    return f"<tr><td>{group['step']}</td><td>{reward}</td><td>{versions}</td><td><code>{text}</code></td></tr>"


def _middle_out(text: str) -> str:
    """As HTML. Of a very long text the beginning and the end."""
    return escape(text if len(text) <= LONGEST else f"{text[: LONGEST // 2]} … {text[-LONGEST // 2 :]}")


def _configuration(path: Path) -> str:
    """What differs from the defaults, and below it everything."""
    if not path.is_file():
        return ""
    text = path.read_text(encoding="utf-8")
    defaults = {key: show(value.default) for key, value in schema().items()}
    own = [(key, show(value)) for key, value in flatten(yaml.safe_load(text)) if defaults.get(key) != show(value)]
    changed = _table([(f"<code>{escape(key)}</code>", f"<code>{escape(value)}</code>") for key, value in own])
    return f"<h2>Settings that are not the default</h2>{changed}<details><summary>all of them</summary><pre>{escape(text)}</pre></details>"
