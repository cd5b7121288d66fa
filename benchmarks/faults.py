"""What the loss of a process costs: each kind is killed in turn while the default job runs, with two generators.

Seen from the controller, in seconds from `kill -9`: until the loss is known and a replacement started (`found`), until the
replacement works (`back`: the first decode step, rollout or score of its own), and the longest optimizer step until then, beside the
median step before. `--compare` also runs the job undisturbed and with a generator killed at every fifteenth step.
"""

from __future__ import annotations

import asyncio
import os
import signal
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks.common import JOB, Row, arguments, median, report, table
from monarch_rl.configure import load
from monarch_rl.session import Session

FIRST_WORK = {"generator": "decode", "rollout": "rollout", "scorer": "score"}
"""The span by which the timeline shows that a replacement works."""
CALM_STEPS = 6
"""Before the first kill, and between one that is made good and the next."""
LOOK_S = 0.01
EVERY = 15


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--kills", type=int, default=3, help="of each kind (3)")
    parser.add_argument(
        "--compare", action="store_true", help="the whole job, undisturbed and with a generator killed every fifteenth step"
    )
    parser.add_argument("overrides", nargs="*", help="key=value")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        losses = asyncio.run(measure(Path(folder) / "losses", options.kills, options.overrides))
        result: Row = {"losses": losses}
        text = table(("killed", "found after", "back after", "longest step", "steps before"), [line(loss) for loss in losses])
        if options.compare:
            runs = [asyncio.run(whole(Path(folder) / name, every, options.overrides)) for name, every in (("calm", 0), ("kills", EVERY))]
            result["runs"] = runs
            columns = ("generators killed", "wall", "held-out accuracy at last")
            text += "\n\n" + table(columns, [(run["kills"], f"{run['wall_s']:.0f} s", f"{run['accuracy']:.3f}") for run in runs])
    report(options.out, text, result)


async def measure(folder: Path, kills: int, overrides: list[str]) -> list[Row]:
    losses: list[Row] = []
    async with system(folder, "steps=100000", "eval.every=0", "trainer.lr=1e-6", *overrides) as session:
        training = asyncio.create_task(session.train())
        for kind in [kind for _ in range(kills) for kind in FIRST_WORK]:
            await steps(session, CALM_STEPS)
            losses.append(await lose(session, kind))
        training.cancel()
        await asyncio.wait({training})
    return losses


async def whole(folder: Path, every: int, overrides: list[str]) -> Row:
    """The default job to its end."""
    async with system(folder, "generator.max_restarts=1000", *overrides) as session:
        training = asyncio.create_task(session.train())
        kills = 0
        while not training.done():
            await asyncio.sleep(LOOK_S)
            if every and session.version.step >= (kills + 1) * every and session.version.step < session.config.steps:
                os.kill(await pid(session, "generator", min(pool(session, "generator").live)), signal.SIGKILL)
                kills += 1
        await training
        rows = session._records.rows
        accuracy = next(row["eval/accuracy"] for row in reversed(rows) if "eval/accuracy" in row)
        return {"kills": kills, "wall_s": rows[-1]["wall_s"] - rows[0]["wall_s"], "accuracy": accuracy}


def system(folder: Path, *overrides: str) -> Session:
    return Session(load([*JOB, "generator.replicas=2", f"output_dir={folder}", "console.rollouts_every=0", *overrides]).config)


async def lose(session: Session, kind: str) -> Row:
    """Kill the oldest member of a kind and see when that is made good."""
    members = pool(session, kind).live
    before, step = set(members), session.version.step
    victim = await pid(session, kind, min(members))
    killed = time.time()
    os.kill(victim, signal.SIGKILL)
    await until(lambda: bool(set(members) - before))
    found = time.time()
    lane = f"{kind} {max(set(members) - before)}"

    def worked() -> list[int]:
        return [span.start_ns for span in session._records.recent.get(lane, ()) if span.name == FIRST_WORK[kind]]

    await until(lambda: bool(worked()))
    await steps(session, 1)
    took = {row["step"]: row["time/step_s"] for row in session._records.rows if row["step"]}
    usual = median(took[at] for at in took if step - CALM_STEPS < at <= step)
    longest = max(took[at] for at in took if at > step)
    return {
        "kind": kind,
        "found_s": found - killed,
        "back_s": min(worked()) / 1e9 - killed,
        "longest_step_s": longest,
        "usual_step_s": usual,
    }


async def steps(session: Session, count: int) -> None:
    last = session.version.step + count
    await until(lambda: bool(session._records.rows) and session._records.rows[-1]["step"] >= last)


async def until(reached: Callable[[], bool]) -> None:
    while not reached():  # noqa: ASYNC110
        await asyncio.sleep(LOOK_S)


async def pid(session: Session, kind: str, number: int) -> int:
    usage = await session._meshes.processes()[f"{kind}_{number}"].usage.call_one()
    return int(usage.pid)


def pool(session: Session, kind: str) -> Any:
    return {"generator": session._replicas, "rollout": session._rollouts, "scorer": session._scorers}[kind].pool


def line(loss: Row) -> tuple[str, ...]:
    return (loss["kind"], *[f"{loss[key]:.2f} s" for key in ("found_s", "back_s", "longest_step_s", "usual_step_s")])


if __name__ == "__main__":
    main()
