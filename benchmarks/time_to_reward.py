"""Wall time from the end of start-up to 0.80 sampled accuracy, of the default job, by seeds.

Start-up ends with row 0 of `metrics.jsonl`. Accuracy is `eval/accuracy`: one episode for each held-out prompt at the training
temperature, by the weights of the step that the evaluation names, beside the training. An evaluation counts when it arrives.
The moment of 0.80 is interpolated linearly between the first evaluation that reaches it and the one before.
"""

from __future__ import annotations

import tempfile
from argparse import Namespace
from itertools import pairwise
from pathlib import Path

from benchmarks.common import Row, arguments, median, report, run_job, table

OFTEN = ("eval.every=4", "eval.prompts=256")
"""An evaluation at every fourth step, of as many episodes as one step: a quarter more to generate."""


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--seeds", type=int, nargs="*", default=[0, 1, 2], help="one run each (0 1 2)")
    parser.add_argument("--accuracy", type=float, default=0.8, help="to be reached (0.8)")
    parser.add_argument("--runs", type=Path, help="keep the runs in this folder; those that it holds already are not run again")
    parser.add_argument("overrides", nargs="*", help="key=value for every run")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        measure(options, options.runs or Path(temporary))


def measure(options: Namespace, folder: Path) -> None:
    rows: list[Row] = []
    for seed in options.seeds:
        job = run_job(folder / f"seed_{seed}", *OFTEN, *options.overrides, f"seed={seed}")
        curve = [row for row in job.rows if "eval/accuracy" in row]
        when = reached(curve, options.accuracy)
        rows.append({"seed": seed, "start": curve[0]["eval/accuracy"], "end": curve[-1]["eval/accuracy"], "wall_s": job.wall_s} | when)
    show(rows, options)


def reached(curve: list[Row], accuracy: float) -> Row:
    """`after_s` since the first row and the `at_step` of the moment, both interpolated; None: never."""
    for before, after in pairwise(curve):
        if after["eval/accuracy"] >= accuracy:
            part = (accuracy - before["eval/accuracy"]) / (after["eval/accuracy"] - before["eval/accuracy"])
            at = {key: before[key] + part * (after[key] - before[key]) for key in ("wall_s", "step")}
            return {"after_s": at["wall_s"] - curve[0]["wall_s"], "at_step": at["step"]}
    return {"after_s": None, "at_step": None}


def show(rows: list[Row], options: Namespace) -> None:
    def line(row: Row) -> tuple[str, ...]:
        when = ("never", "-") if row["after_s"] is None else (f"{row['after_s']:.1f} s", f"{row['at_step']:.1f}")
        return (str(row["seed"]), f"{row['start']:.3f}", *when, f"{row['end']:.3f}", f"{row['wall_s']:.1f} s")

    text = table(("seed", "accuracy at first", f"{options.accuracy:g} after", "step", "accuracy at last", "whole run"), map(line, rows))
    if all(row["after_s"] is not None for row in rows):
        text += f"\n\nmedian: {median(row['after_s'] for row in rows):.1f} s"
    report(options.out, text, {"accuracy": options.accuracy, "seeds": rows})


if __name__ == "__main__":
    main()
