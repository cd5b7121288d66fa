"""Wall time of the same job with `buffer.max_age=0` against the recipe's default, runs in turn: what asynchrony is worth.

A step is a step here, though the two do not learn the same in one: an asynchronous step trains older tokens, and where the policy is
better more groups are dead and have to be replaced. So the table also says when the mean reward of three steps first reached 0.8, and
`buffer.dead_groups=keep` compares the two on the same number of episodes.

Time counts from row 0 of `metrics.jsonl`, when everything is started, to the last step. Evaluation is off. With `--tool-median` every
episode waits for a tool with a heavy-tailed latency (log-normal, 5 % stragglers that take 20 times as long; sleeping, not computing),
dead groups are kept so that both jobs train the same prompts, and beside the ratio stands the one that the real ledger gives in
virtual time for the lengths and latencies of the two runs and the training time of the synchronous one (`schedules`).
"""

from __future__ import annotations

import tempfile
from argparse import Namespace
from pathlib import Path

from benchmarks.common import Job, Row, arguments, median, report, run_job, spread, table
from benchmarks.schedules import Costs, Episode, read_costs, total_s
from benchmarks.slow_tool import latency_s
from monarch_rl.configure import load

SLOW_TOOL = Path(__file__).with_name("slow_tool.py")


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--pairs", type=int, default=3, help="runs of each kind (3)")
    parser.add_argument("--tool-median", type=float, help="seconds; without it there is no tool")
    parser.add_argument("--tools", type=int, help="tools that the job can run at once, for the virtual time (any number)")
    parser.add_argument("--costs", type=Path, help="what generator_overhead --out wrote, for the virtual time")
    parser.add_argument("--runs", type=Path, help="keep the runs in this folder; those that it holds already are not run again")
    parser.add_argument("overrides", nargs="*", help="key=value for both jobs, e.g. steps=20")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        measure(options, options.runs or Path(temporary))


def measure(options: Namespace, folder: Path) -> None:
    overrides = ["eval.prompts=0", *tool_overrides(options.tool_median), *options.overrides]
    pairs = []
    for number in range(options.pairs):
        synchronous = run_job(folder / f"{number}_synchronous", *overrides, "buffer.max_age=0")
        pairs.append((synchronous, run_job(folder / f"{number}_asynchronous", *overrides)))
    ideal = None if options.tool_median is None else virtual_ratio(pairs[0], options)
    show(pairs, ideal, options.out)


def tool_overrides(median_s: float | None) -> list[str]:
    if median_s is None:
        return []
    longest_s = 100 * 20 * median_s
    return [
        f"task={SLOW_TOOL}:SlowTool",
        f"task_args.median_s={median_s}",
        f"scorer.deadline_s={max(10.0, longest_s)}",
        "buffer.dead_groups=keep",
    ]


def virtual_ratio(pair: tuple[Job, Job], options: Namespace) -> float:
    """Of the schedules of both runs, each with the lengths and latencies that it had."""
    synchronous, asynchronous = pair
    train_s = (synchronous.total("time/train_s") + synchronous.total("sync/stage_s")) / (len(synchronous.rows) - 1)
    times = {"train_s": train_s, "tools": options.tools}
    costs = read_costs(options.costs, **times) if options.costs else Costs(**times)

    def took_s(job: Job) -> float:
        groups = [durations(group, options.tool_median) for group in sorted(job.groups, key=lambda group: int(group["ordinal"]))]
        buffer = load([f"recipe={job.folder / 'config.yaml'}"]).config.buffer
        return total_s(groups, prompts_per_step=buffer.prompts_per_step, max_age=buffer.max_age, window=buffer.window, costs=costs)

    return took_s(synchronous) / took_s(asynchronous)


def durations(group: Row, median_s: float) -> list[Episode]:
    return [Episode(episode["tokens"], latency_s(group["ordinal"], episode["completion"], median_s)) for episode in group["episodes"]]


def show(pairs: list[tuple[Job, Job]], ideal: float | None, out: Path | None) -> None:
    ratios = [synchronous.wall_s / asynchronous.wall_s for synchronous, asynchronous in pairs]
    rows = [(name, *columns([pair[kind] for pair in pairs])) for kind, name in enumerate(("buffer.max_age=0", "default"))]
    header = ("job", "wall", "per step", "trained tokens/s", "generated tokens", "waited for data", "reward 0.8 after", "last reward")
    text = f"{table(header, rows)}\n\nasynchronous is {spread(ratios)} times as fast"
    result: Row = {"ratio": median(ratios), "ratios": ratios, "wall_s": [[job.wall_s for job in pair] for pair in pairs]}
    if ideal is not None:
        text += f"; virtual time says {ideal:.2f}, so {median(ratios) / ideal:.2f} of what is possible"
        result |= {"virtual_ratio": ideal, "of_virtual": median(ratios) / ideal}
    report(out, text, result)


def columns(jobs: list[Job]) -> list[str]:
    steps = len(jobs[0].rows) - 1
    return [
        f"{spread([job.wall_s for job in jobs], 1)} s",
        f"{median(job.wall_s for job in jobs) / steps:.2f} s",
        spread([job.total("tokens/trained") / job.wall_s for job in jobs], 0),
        spread([job.total("tokens/generated") for job in jobs], 0),
        f"{median(job.total('time/wait_batch_s') / job.wall_s for job in jobs):.0%}",
        reached(jobs, 0.8),
        f"{median(median(row['reward/mean'] for row in job.rows[1:][-5:]) for job in jobs):.2f}",
    ]


def reached(jobs: list[Job], reward: float) -> str:
    """Median time after which the mean reward of three steps in a row was `reward`; `-` unless every job got there."""
    times = [time for job in jobs if (time := _reached_s(job.rows, reward)) is not None]
    return f"{median(times):.0f} s" if len(times) == len(jobs) else "-"


def _reached_s(rows: list[Row], reward: float) -> float | None:
    for last in range(3, len(rows)):
        if sum(row["reward/mean"] for row in rows[last - 2 : last + 1]) >= 3 * reward:
            return float(rows[last]["wall_s"] - rows[0]["wall_s"])
    return None


if __name__ == "__main__":
    main()
