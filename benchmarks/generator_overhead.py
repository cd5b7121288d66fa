"""Tokens per second through the Generator actor, against the bare in-process engine: what the actor costs.

Both have the same settings, prompts, seeds and sampling parameters, one request per episode. The actor is asked by another
process, one message per group of 8, 32 groups at once, the next as soon as one is finished. The two take turns while the other is idle;
a ratio is that of two neighbours in time. Beside it: the bare engine with one request of n=8 per group, which gives no episode
a seed, partial tokens and an end of its own.

Twice: with episodes of one length, as a model makes them that has learnt the task, and with episodes as the untrained model ends
them, which are so short that messages weigh most.
"""

from __future__ import annotations

import asyncio
import multiprocessing
import os
from argparse import Namespace
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.common import JOB, Row, arguments, median, report, spread, table
from benchmarks.engines import Caller, ReadyGenerator, Timing, Work, serve_bare
from monarch_rl.cluster import local
from monarch_rl.cluster.placement import Processes
from monarch_rl.config import Config
from monarch_rl.configure import load
from monarch_rl.rendering import Renderer
from monarch_rl.tasks import load_task
from monarch_rl.types import Sampling

WARM_UP = 2
"""Turns of each side before the first that counts."""


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--turns", type=int, default=12, help="of each side (12)")
    parser.add_argument("--groups", type=int, default=96, help="groups of a turn (96)")
    parser.add_argument("--at-once", type=int, default=32, help="groups in the engine at a time (32)")
    parser.add_argument("--tokens", type=int, default=32, help="of an episode, where all have one length (32)")
    parser.add_argument("overrides", nargs="*", help="key=value of the default job, e.g. generator.group_size=16")
    asyncio.run(measure(parser.parse_args()))


async def measure(options: Namespace) -> None:
    config = load([*JOB, *options.overrides]).config
    os.environ.update(local.environment(config))
    shapes = {f"{options.tokens} tokens each": options.tokens, "as the model ends them": None}
    turns = {shape: make_turns(config, options, tokens) for shape, tokens in shapes.items()}
    bare = Bare(config)
    async with actor(config) as run_actor:
        bare.wait()
        timings = {shape: await take_turns(turns[shape], run_actor, bare) for shape in shapes}
    show(timings, decode_costs(bare.close()), options.out)


async def take_turns(turns: list[Work], run_actor: Callable[[Work], Any], bare: Bare) -> dict[str, list[Timing]]:
    timings: dict[str, list[Timing]] = {"actor": [], "bare": [], "bare, n=G": []}
    for work in turns:
        timings["actor"].append(await run_actor(work))
        timings["bare"].append(await asyncio.to_thread(bare.run, work))
        timings["bare, n=G"].append(await asyncio.to_thread(bare.run, work._replace(one_request_per_group=True)))
    return {name: timed[WARM_UP:] for name, timed in timings.items()}


def make_turns(config: Config, options: Namespace, tokens: int | None) -> list[Work]:
    """Prompts of the default job, those of a turn each once; `tokens` for each episode, or as many as the model makes of them."""
    from actors.rollout import episode_seed

    renderer, task = Renderer.of(config.model), load_task(config.task, config.task_args, config.seed)
    longest, stop_ids = (config.generator.max_new_tokens, renderer.stop_ids) if tokens is None else (tokens, ())
    sampling = Sampling(longest, config.generator.temperature, stop_ids)

    def group(ordinal: int) -> tuple[list[int], list[int]]:
        seeds = [episode_seed(config.seed, "train", ordinal, 1, index) for index in range(config.generator.group_size)]
        return renderer.render(task.prompt(ordinal, "train").content), seeds

    starts = range(0, options.groups * (options.turns + WARM_UP), options.groups)
    return [Work([group(ordinal) for ordinal in range(start, start + options.groups)], options.at_once, sampling) for start in starts]


@asynccontextmanager
async def actor(config: Config) -> AsyncIterator[Callable[[Work], Any]]:
    """A Generator in its process and a caller in another, as in a run."""
    from actors.metrics import Metrics

    model = Renderer.of(config.model).directory
    names = {"generator": "tp", "rollout": "worker", "metrics": "proc"}
    host, environment = local.host(), local.environment(config)
    meshes = {name: local.spawn(host, Processes(name, dim, 1), environment) for name, dim in names.items()}
    metrics: Any = meshes["metrics"].spawn("metrics", Metrics)
    generator: Any = meshes["generator"].spawn("generator", ReadyGenerator, config, 0, metrics)
    caller: Any = meshes["rollout"].spawn("caller", Caller, generator, config.generator.burst_tokens)
    try:
        await generator.start.call_one()
        await generator.load.call_one(model)
        yield lambda work: caller.run.call_one(work).as_asyncio()
        await generator.shut.call_one()
    finally:
        await asyncio.gather(*[mesh.stop() for mesh in meshes.values()])


class Bare:
    """The bare engine's process."""

    def __init__(self, config: Config) -> None:
        spawn = multiprocessing.get_context("spawn")
        self._pipe, theirs = spawn.Pipe()
        model: Path = Renderer.of(config.model).directory
        self._process = spawn.Process(target=partial(serve_bare, theirs, model, config.model.dtype), daemon=True)
        self._process.start()
        theirs.close()  # or a dead process would not be noticed

    def wait(self) -> None:
        self._pipe.recv()

    def run(self, work: Work) -> Timing:
        self._pipe.send(work)
        timing: Timing = self._pipe.recv()
        return timing

    def close(self) -> list[tuple[int, float]]:
        self._pipe.send(None)
        steps: list[tuple[int, float]] = self._pipe.recv()
        self._process.join()
        return steps


def decode_costs(steps: list[tuple[int, float]]) -> tuple[float, float]:
    """(seconds of a decode step, seconds more for each request in it), fitted to the median duration at each number of requests."""
    by_requests: dict[int, list[float]] = {}
    for requests, seconds in steps:
        by_requests.setdefault(requests, []).append(seconds)
    slope, constant = np.polyfit(list(by_requests), [median(seconds) for seconds in by_requests.values()], 1)
    return float(constant), float(slope)


def show(timings: dict[str, dict[str, list[Timing]]], costs: tuple[float, float], out: Path | None) -> None:
    header = ("episodes", "engine", "tokens/s", "of bare", "tokens per CPU-second", "of bare", "steps of a turn", "time in steps")
    rows = [(shape, name, *line(timed, of["bare"])) for shape, of in timings.items() for name, timed in of.items()]
    text = table(header, rows) + f"\n\ndecode step of the bare engine: {costs[0] * 1e3:.2f} ms + {costs[1] * 1e6:.1f} µs per request"
    result: Row = {
        "ratio": {shape: median(ratios(of["actor"], of["bare"], rate)) for shape, of in timings.items()},
        "cpu_ratio": {shape: median(ratios(of["actor"], of["bare"], rate_per_cpu)) for shape, of in timings.items()},
        "decode_s": costs[0],
        "decode_per_request_s": costs[1],
        "turns": {shape: {name: [t._asdict() for t in timed] for name, timed in of.items()} for shape, of in timings.items()},
    }
    report(out, text, result)


def line(timed: list[Timing], bare: list[Timing]) -> tuple[str, ...]:
    return (
        spread([rate(t) for t in timed], 0),
        spread(ratios(timed, bare, rate), 3),
        spread([rate_per_cpu(t) for t in timed], 0),
        spread(ratios(timed, bare, rate_per_cpu), 3),
        f"{median(t.steps for t in timed):.0f}",
        f"{median(t.decoding_s / t.wall_s for t in timed):.1%}",
    )


def rate(timing: Timing) -> float:
    return timing.tokens / timing.wall_s


def rate_per_cpu(timing: Timing) -> float:
    return timing.tokens / timing.cpu_s


def ratios(timed: list[Timing], bare: list[Timing], of: Callable[[Timing], float]) -> list[float]:
    return [of(one) / of(other) for one, other in zip(timed, bare, strict=True)]


if __name__ == "__main__":
    main()
