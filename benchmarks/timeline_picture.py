"""Draws docs/timeline.svg: the same stretch of time of the synchronous job and of the default one, a lane for each process.

Both are the default job without evaluations. The synchronous run gives the length of the stretch, a few typical steps; the other
one is shown for as long from the same step on.
"""

from __future__ import annotations

import tempfile
from pathlib import Path

from benchmarks.common import Job, arguments, report, run_job, table
from monarch_rl.observe import gantt
from monarch_rl.observe.gantt import Lane, Window

WIDTH, TITLE = 900, 30
KINDS = (("synchronous (buffer.max_age=0)", "buffer.max_age=0"), ("asynchronous, the default (buffer.max_age=2)", "buffer.max_age=2"))


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--picture", type=Path, default=Path("docs/timeline.svg"), help="where to draw (docs/timeline.svg)")
    parser.add_argument("--runs", type=Path, help="keep the runs in this folder; those that it holds already are not run again")
    parser.add_argument("--steps", type=int, default=4, help="of the synchronous run that are shown (4)")
    parser.add_argument("overrides", nargs="*", help="key=value for both jobs, e.g. steps=30")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        folder = options.runs or Path(temporary)
        jobs = [run_job(folder / f"{n}", "eval.prompts=0", *options.overrides, override) for n, (_, override) in enumerate(KINDS)]
        shown = windows(jobs, options.steps)
        options.picture.write_text(draw(shown), encoding="utf-8")
        tell(jobs, shown, options.picture, options.out)


def windows(jobs: list[Job], steps: int) -> list[tuple[list[Lane], Window]]:
    synchronous, asynchronous = (gantt.read_lanes(job.folder / "timeline.json") for job in jobs)
    window = gantt.typical(synchronous, steps)
    return [(synchronous, window), (asynchronous, gantt.stretch(asynchronous, window.first, window.end_ns - window.start_ns))]


def draw(shown: list[tuple[list[Lane], Window]]) -> str:
    parts, y = [gantt.legend(4)], 30
    for (title, _), (lanes, window) in zip(KINDS, shown, strict=True):
        parts.append(f'<text x="0" y="{y + 14}" font-weight="600">{title}: steps {window.first} to {window.last}</text>')
        drawn, y = gantt.picture(lanes, window, WIDTH, y + TITLE)
        parts.append(drawn)
        y += 14
    return gantt.svg("".join(parts), WIDTH, y)


def tell(jobs: list[Job], shown: list[tuple[list[Lane], Window]], picture: Path, out: Path | None) -> None:
    rows = []
    for (title, _), job, (lanes, window) in zip(KINDS, jobs, shown, strict=True):
        run = gantt.whole(lanes)
        shares = [f"{lane.idle(run.start_ns, run.end_ns):.0%}" for lane in lanes if lane.name != "replay buffer"]
        rows.append((title, len(job.rows) - 1, f"{job.wall_s:.1f} s", window.last - window.first + 1, *shares))
    names = [f"{lane.name} idle" for lane in shown[0][0] if lane.name != "replay buffer"]
    text = table(("job", "steps", "wall", "steps in the picture", *names), rows)
    report(out, f"{text}\n\n{picture}: {picture.stat().st_size / 1e3:.0f} kB", {"rows": rows})


if __name__ == "__main__":
    main()
