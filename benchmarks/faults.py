"""What the loss of a process costs: each kind is killed in turn while the default job runs, with two generators.

In seconds from `kill -9`: until the loss is known and a replacement is being started (`found after`), and until that works (`back
after`: it begins its first request, rollout or score; trainers: the step that they were at is done again). `speed`: steps per second until
it is back, or for six steps if that is longer, against those before the kill. Generators are killed between two decode steps, and leave
word of what they had sampled of episodes that were not answered: `lost` is what no burst had told of.

`--compare` also runs the job undisturbed and with a generator killed at every fifteenth step.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import tempfile
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

from benchmarks.common import JOB, Row, arguments, report, spread, table
from monarch_rl.configure import load
from monarch_rl.saving import heard
from monarch_rl.session import Session

FIRST_WORK = {"generator": "generate", "rollout": "rollout", "scorer": "score"}
"""The span by which the timeline shows that a replacement works."""
SPARE = "spare"
KINDS = [*FIRST_WORK, "trainer", SPARE]
CALM_STEPS = 6
"""Before each kill, and at least as many behind it."""
LEARN_STEPS = 18
"""Before the first kill: until episodes are as long as the task asks for."""
LOOK_S = 0.01
EVERY = 15
BURST = 16
FOR_EVER = (
    *("steps=100000", "eval.every=0", "buffer.dead_groups=keep", f"generator.burst_tokens={BURST}"),
    *("checkpoint.every=5", "checkpoint.keep=1"),
    *(f"{kind}.max_restarts=1000" for kind in ("generator", "rollout", "scorer", "trainer")),
)
"""Steps stay alike however well the model has learnt."""


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--kills", type=int, default=3, help="of each kind (3)")
    parser.add_argument(
        "--kind", action="append", choices=KINDS, help="what is killed, may be given again (all); spare: a generator with one"
    )
    parser.add_argument("--compare", type=int, default=0, metavar="PAIRS", help="whole jobs, undisturbed and with kills, in turn (0)")
    parser.add_argument("overrides", nargs="*", help="key=value")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        text, result = asyncio.run(measure(Path(folder), (options.kind or KINDS) * options.kills, options.compare, options.overrides))
    report(options.out, text, result)


async def measure(folder: Path, kinds: list[str], pairs: int, overrides: list[str]) -> tuple[str, Row]:
    texts, result = [], Row()
    losses: dict[str, list[Row]] = {}
    if known := [kind for kind in kinds if kind != SPARE]:
        losses |= await losses_of(folder / "losses", known, overrides)
    if spares := kinds.count(SPARE):
        found = await losses_of(folder / "spares", ["generator"] * spares, ["generator.spares=1", *overrides])
        losses["generator, with a spare"] = found["generator"]
    if losses:
        result["losses"] = losses
        texts.append(show_times(losses))
        if generators := [loss for kind, each in losses.items() if kind.startswith("generator") for loss in each]:
            texts.append(show_tokens(generators))
    if pairs:
        runs = [await whole(folder / f"run_{number}", every, overrides) for number, every in enumerate((0, EVERY) * pairs)]
        ratios = [killed["wall_s"] / calm["wall_s"] for calm, killed in zip(runs[::2], runs[1::2], strict=True)]
        result |= {"runs": runs, "ratios": ratios}
        rows = [(run["kills"], f"{run['wall_s']:.0f} s", f"{run['accuracy']:.3f}") for run in runs]
        texts += [table(("generators killed", "wall", "held-out accuracy at last"), rows), f"with kills: {spread(ratios)} times as long"]
    return "\n\n".join(texts), result


def show_times(losses: dict[str, list[Row]]) -> str:
    def line(kind: str) -> tuple[str, ...]:
        found, back, speed = ([loss[key] for loss in losses[kind]] for key in ("found_s", "back_s", "speed"))
        return kind, f"{spread(found)} s", f"{spread(back)} s", spread(speed)

    return table(("killed", "found after", "back after", "speed"), map(line, losses))


def show_tokens(losses: list[Row]) -> str:
    """Of the generators."""
    per_kill = [[loss[key] for loss in losses] for key in ("episodes", "sampled", "untold")]
    most = max(loss["most_untold"] for loss in losses)
    row = [*(spread(figures, 0) for figures in per_kill), most, BURST]
    return table(("episodes not answered", "tokens of these", "lost", "lost of an episode, at most", "generator.burst_tokens"), [row])


async def losses_of(folder: Path, kinds: list[str], overrides: list[str]) -> dict[str, list[Row]]:
    """Kill one after another, each when the one before is made good."""
    losses: dict[str, list[Row]] = {}
    async with training(folder, *FOR_EVER, *overrides) as session:
        await steps(session, LEARN_STEPS)
        for kind in kinds:
            await steps(session, CALM_STEPS)
            lost = await (lose_trainer(session) if kind == "trainer" else lose(session, kind))
            losses.setdefault(kind, []).append(lost)
    return losses


async def whole(folder: Path, every: int, overrides: list[str]) -> Row:
    """The default job to its end."""
    async with training(folder, "steps=60", "eval.every=0", "generator.max_restarts=1000", *overrides) as session:
        kills = 0
        while not session._done.done():
            await asyncio.sleep(LOOK_S)
            if every and session.version.step >= (kills + 1) * every and session.version.step < session.config.steps:
                await kill_generator(session, min(pool(session, "generator").joined))
                kills += 1
        await session._done
        rows = session._records.rows
        return {"kills": kills, "wall_s": rows[-1]["wall_s"] - rows[0]["wall_s"], "accuracy": rows[-1]["eval/accuracy"]}


class Watched(Session):
    """A session that trains."""

    _done: asyncio.Task[None]


@asynccontextmanager
async def training(folder: Path, *overrides: str) -> AsyncIterator[Watched]:
    """With generators that can be killed at a chosen moment."""
    import actors.generator
    from benchmarks.doomed import Doomed

    actors.generator.Generator = Doomed  # type: ignore[misc]  # whose processes import it from there
    config = load([*JOB, "generator.replicas=2", f"output_dir={folder}", "console.rollouts_every=0", *overrides]).config
    async with Watched(config) as session:
        session._done = asyncio.create_task(session.train())
        try:
            yield session
        finally:
            session._done.cancel()
            with suppress(asyncio.CancelledError):
                await session._done


async def lose(session: Watched, kind: str) -> Row:
    """Kill the oldest member of a kind and see when that is made good."""
    members, step, usual_s = pool(session, kind).live, session.version.step, step_s(session)
    before = set(members)
    word: Row = {}
    if kind == "generator":
        word = await kill_generator(session, min(before))
    else:
        victim = await pid(session, f"{kind}_{min(before)}")
        word["at"] = time.time()
        os.kill(victim, signal.SIGKILL)
    await until(session, lambda: bool(set(members) - before))
    found = time.time()
    lane = f"{kind} {max(set(members) - before)}"

    def worked() -> list[int]:
        return [span.start_ns for span in session._records.recent.get(lane, ()) if span.name == FIRST_WORK[kind]]

    await until(session, lambda: bool(worked()) and session.version.step >= step + CALM_STEPS)
    speed = (session.version.step - step) * usual_s / (time.time() - word["at"])
    return word | {"found_s": found - word["at"], "back_s": min(worked()) / 1e9 - word["at"], "speed": speed}


async def lose_trainer(session: Watched) -> Row:
    step, usual_s, lineage = session.version.step, step_s(session), session.version.lineage
    victim, killed = await pid(session, "trainer"), time.time()
    os.kill(victim, signal.SIGKILL)
    await until(session, lambda: session._trainers._down)
    found = time.time()
    await until(session, lambda: session.version.lineage > lineage and session.version.step >= step)
    back = time.time()
    await steps(session, CALM_STEPS)
    speed = (session.version.step - step) * usual_s / (time.time() - killed)
    return {"found_s": found - killed, "back_s": back - killed, "speed": speed}


async def kill_generator(session: Watched, number: int) -> Row:
    """When, and what of the episodes that were not answered was sampled and lost."""
    word = session.output_dir / f"generator_{number}.json"
    generator: Any = session._replicas.live[number]
    dying = asyncio.ensure_future(generator.die.call_one(word).as_asyncio())
    dying.add_done_callback(heard)  # what is killed gives no answer
    await until(session, word.exists)
    left = json.loads(word.read_text())
    counts = {"episodes": len(left["sampled"]), "sampled": sum(left["sampled"]), "untold": sum(left["untold"])}
    return {"at": left["at"], **counts, "most_untold": max(left["untold"], default=0)}


async def steps(session: Watched, count: int) -> None:
    last = session.version.step + count
    await until(session, lambda: bool(session._records.rows) and session._records.rows[-1]["step"] >= last)


async def until(session: Watched, reached: Callable[[], bool]) -> None:
    while not reached():
        if session._done.done():
            session._done.result()
        await asyncio.sleep(LOOK_S)


async def pid(session: Watched, mesh: str) -> int:
    usage = await session._meshes.processes()[mesh].usage.call_one()
    return int(usage.pid)


def step_s(session: Watched) -> float:
    """Of the last steps, each."""
    rows = session._records.rows
    return float(rows[-1]["wall_s"] - rows[-1 - CALM_STEPS]["wall_s"]) / CALM_STEPS


def pool(session: Watched, kind: str) -> Any:
    return {"generator": session._replicas, "rollout": session._rollouts, "scorer": session._scorers}[kind].pool


if __name__ == "__main__":
    main()
