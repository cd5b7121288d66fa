"""What a weight update costs whom: the trainer's stall per publish, the generator's pause per swap, bandwidth, bytes.

Stall: one trainer rank stages a Qwen3-like model of `--mb` in bfloat16 from float32 shards, while 0 to 8 reader processes pull every
version, and while one of 8 is stopped by a signal. Timed in turn under the same load: the publish, a bare loop of the same copies
with the same casts and slices, and a memcpy of the result. Beside it what a trainer would stall that waits for all pulls.

Pause: a swap of the default job's model against one `load_weights` of the same tensors on the same thread; and tokens per second while
versions arrive at the default job's pace, against none arriving.

Bandwidth: a whole pull with its checksums, against a TCP socket on the loopback device and a memcpy of as many bytes.

Bytes: what the ranks of a generator pull from those of a trainer, by the load plans of real engines, against one copy of the model.

Delta: see `benchmarks.deltas`.
"""

from __future__ import annotations

import asyncio
import os
import signal
import tempfile
from argparse import Namespace
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from copy import deepcopy
from pathlib import Path
from typing import Any

from transformers import AutoConfig

from benchmarks import deltas
from benchmarks.common import JOB, Row, arguments, median, report, spread, table
from benchmarks.engines import Caller, Work
from benchmarks.generator_overhead import make_turns
from benchmarks.publishing import PullingReader, Stager, SwappingGenerator, bytes_of, qwen_like
from monarch_rl.cluster import local
from monarch_rl.cluster.placement import Processes
from monarch_rl.config import Config
from monarch_rl.configure import load
from monarch_rl.rendering import Renderer
from monarch_rl.weights.plan import LoadPlan

READERS = (0, 1, 2, 4, 8)
STOPPED = "8, one stopped"
TENSOR_PARALLEL = (1, 2, 4)
"""Ranks of a generator; the default job's model has two key-value heads."""
PARTS = ("stall", "pause", "bandwidth", "bytes", "delta")


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=PARTS, help="of the benchmark (all)")
    parser.add_argument("--models", nargs="+", choices=deltas.MODELS, default=[*deltas.MODELS], help="of the part delta (all)")
    parser.add_argument("--mb", type=int, default=64, help="of the staged model (64)")
    parser.add_argument("--rounds", type=int, default=40, help="timed publishes of each kind (40)")
    parser.add_argument("--turns", type=int, default=8, help="turns of generation with and without publishes (8)")
    parser.add_argument("--publish-s", type=float, default=2.0, help="between two publishes while tokens are counted (2, about a step)")
    asyncio.run(measure(parser.parse_args()))


async def measure(options: Namespace) -> None:
    config = load(list(JOB)).config
    os.environ.update(local.environment(config))
    plan, results, texts = model_of(options.mb), {}, []
    parts: Row = {"stall": stall, "pause": pause, "bandwidth": bandwidth, "bytes": count_bytes, "delta": deltas.measure}
    for part in options.parts:
        text, results[part] = await parts[part](config, plan, options)
        texts.append(text)
    report(options.out, "\n\n".join(texts), results)


def model_of(mb: int) -> LoadPlan:
    """Layers of about 3.5 MB, and as many as it takes."""
    return qwen_like(hidden=448, layers=max(1, round(mb / 4.5)), vocabulary=8192)


# --- the trainer's stall


async def stall(config: Config, plan: LoadPlan, options: Namespace) -> tuple[str, Row]:
    import monarch.actor

    monarch.actor.unhandled_fault_hook = lambda _: None  # Monarch takes the stopped one for dead; calls fail by themselves
    async with system(config, plan, max(READERS)) as (stager, readers, _):
        rows, result, following = [], {}, 0
        await asyncio.gather(*[reader.pid.call_one() for reader in readers])  # they have started
        for wanted in (*READERS, STOPPED):
            count = wanted if isinstance(wanted, int) else max(READERS)
            await asyncio.gather(*[reader.follow.call_one() for reader in readers[following:count]])
            following = count
            stopped = await readers[-1].pid.call_one() if wanted == STOPPED else None
            signal_to(stopped, signal.SIGSTOP)
            seconds, lost = await stager.stalls.call_one(options.rounds, 0.05)
            signal_to(stopped, signal.SIGCONT)
            if lost:
                raise RuntimeError(f"{lost} publishes were lost: the side thread is slower than the trainer publishes")
            blocking = await blocked(stager, readers, count, stopped, max(2, options.rounds // 8))
            rows.append((wanted, *stall_line(seconds, blocking)))
            result[str(wanted)] = {**seconds, "blocking": blocking}
    header = ("readers", "publish, ms", "same copies, ms", "ratio", "of CPU time", "memcpy, ms", "publish that waits for all pulls, ms")
    return f"Stall of the trainer, {result_mb(plan):.0f} MB\n\n{table(header, rows)}", result


async def blocked(stager: Any, readers: Sequence[Any], count: int, stopped: int | None, rounds: int) -> list[float]:
    """The same with a publish that waits; a stopped reader has it wait for ever."""
    await asyncio.gather(*[reader.unfollow.call_one() for reader in readers[:count]])
    signal_to(stopped, signal.SIGSTOP)
    seconds: list[float] = await stager.blocking_stalls.call_one(list(readers[:count]), rounds)
    signal_to(stopped, signal.SIGCONT)
    if stopped is None:
        await asyncio.gather(*[reader.follow.call_one() for reader in readers[:count]])
    return seconds


def stall_line(seconds: dict[str, list[float]], blocking: list[float]) -> tuple[str, ...]:
    milliseconds = {name: [1e3 * s for s in taken] for name, taken in seconds.items()}
    waits = "for ever" if float("inf") in blocking else spread([1e3 * s for s in blocking], 1)
    ratios = [median(p / b for p, b in zip(seconds[f"publish{kind}"], seconds[f"bare{kind}"], strict=True)) for kind in ("", " cpu")]
    shown = [spread(milliseconds[name], 1) for name in ("publish", "bare")]
    return (*shown, *[f"{ratio:.2f}" for ratio in ratios], spread(milliseconds["memcpy"], 1), waits)


def signal_to(pid: int | None, number: signal.Signals) -> None:
    if pid is not None:
        os.kill(pid, number)


# --- the generator's pause


async def pause(config: Config, _: LoadPlan, options: Namespace) -> tuple[str, Row]:
    async with generating(config) as (generator, caller, plan):
        swaps, loads = await generator.pauses.call_one(Renderer.of(config.model).directory, 100)
        with_, without = await rates(config, generator, caller, plan, options)
    ratio = median(w / o for w, o in zip(with_, without, strict=True))
    rows = [
        ("pause of a swap, ms", spread([1e3 * s for s in swaps]), spread([1e3 * s for s in loads]), f"{median(swaps) / median(loads):.2f}"),
        (f"tokens/s, a version every {options.publish_s:g} s", spread(with_, 0), spread(without, 0), f"{ratio:.3f}"),
    ]
    header = ("of the default job's generator", "with", "against", "ratio")
    text = f"{table(header, rows)}\n\nagainst: one load_weights of the same tensors; no versions arriving"
    return text, {"swap_s": swaps, "load_s": loads, "with_publishes": with_, "without": without, "tokens_ratio": ratio}


async def rates(config: Config, generator: Any, caller: Any, plan: LoadPlan, options: Namespace) -> tuple[list[float], list[float]]:
    """Tokens per second of neighbouring turns, with and without versions arriving."""
    turns = make_turns(config, Namespace(groups=128, turns=2 * options.turns, at_once=32), 32)
    async with system(config, plan, 0) as (stager, _, (publishers, rings)):
        following = generator.follow.call_one(publishers, rings, [plan.digest], []).as_asyncio()
        found: tuple[list[float], list[float]] = [], []
        for number, work in enumerate(turns):
            publishing = number % 2 == 0
            rate, versions = await turn(stager, caller, work, options.publish_s if publishing else None)
            if publishing and not versions:
                raise RuntimeError("a turn was over before a version came")
            found[number % 2].append(rate)
        await generator.unfollow.call_one()
        await following
    return found[0][1:], found[1][1:]


async def turn(stager: Any, caller: Any, work: Work, every_s: float | None) -> tuple[float, int]:
    """(tokens per second, versions that were published meanwhile)."""
    with tempfile.TemporaryDirectory() as folder:
        stop = Path(folder) / "stop"
        publishing = None if every_s is None else stager.publish_every.call_one(every_s, stop).as_asyncio()
        timing = await caller.run.call_one(work)
        stop.touch()
        return timing.tokens / timing.wall_s, await publishing if publishing is not None else 0


# --- bandwidth and bytes


async def bandwidth(config: Config, plan: LoadPlan, options: Namespace) -> tuple[str, Row]:
    async with system(config, plan, 1) as (stager, readers, _):
        await stager.publish.call_one()
        found: dict[str, list[float]] = await readers[0].bandwidths.call_one(options.rounds)
    ratio = median(pull / raw for pull, raw in zip(found["pull"], found["loopback"], strict=True))
    rows = [(name, spread([rate / 1e9 for rate in rates])) for name, rates in found.items()]
    text = f"{table((f'{result_mb(plan):.0f} MB', 'GB/s'), rows)}\n\npull over loopback: {ratio:.2f}"
    return text, {**found, "ratio": ratio}


async def count_bytes(config: Config, _: LoadPlan, options: Namespace) -> tuple[str, Row]:
    """By the plans of real engines. Fails where anything travels more or less often than every rank that needs it makes necessary."""
    rows, result = [], {}
    copy, _ = bytes_of(await engine_plans(config, 1), 1)
    kv_heads = AutoConfig.from_pretrained(Renderer.of(config.model).directory).num_key_value_heads
    for ranks in TENSOR_PARALLEL:
        plans = await engine_plans(config, ranks)
        for trainers in (1, 2, 3, 4):
            moved, padded = bytes_of(plans, trainers)
            needed = {name: nbytes * holders(name, ranks, kv_heads) for name, nbytes in copy.items()}
            if moved != needed:
                wrong = [name for name in copy | moved if moved[name] != needed.get(name)]
                raise RuntimeError(
                    f"{trainers} trainer ranks to {ranks} of a generator: {wrong} travel more or less often than they are needed"
                )
            beyond = {name.split(".")[-2]: 0 for name in moved - copy}
            for name, nbytes in (moved - copy).items():
                beyond[name.split(".")[-2]] += nbytes
            again = ", ".join(f"{kind} {nbytes / copy.total():.4f}" for kind, nbytes in beyond.items())
            rows.append((ranks, trainers, f"{moved.total() / copy.total():.4f}", again or "nothing", f"{padded / copy.total():.4f}"))
            result[f"{trainers} to {ranks}"] = {"moved": moved.total(), "copy": copy.total(), "beyond": beyond, "aligned": padded}
    header = ("generator ranks", "trainer ranks", "bytes of one pull, of the model's", "of these again", "with alignment")
    return table(header, rows), result


def holders(name: str, ranks: int, kv_heads: int) -> int:
    """Ranks of a generator that need the same elements of a checkpoint tensor."""
    module = name.split(".")[-2]
    if module in ("k_proj", "v_proj"):
        return max(1, ranks // kv_heads)
    return ranks if module.endswith("norm") else 1


async def engine_plans(config: Config, ranks: int) -> list[LoadPlan]:
    """Of a real generator of the default job's model."""
    from monarch.spmd import setup_torch_elastic_env_async

    from actors.generator import Generator

    config = deepcopy(config)
    config.generator.tensor_parallel = ranks
    mesh = local.spawn(local.host(), Processes(f"generator_of_{ranks}", "tp", ranks), local.environment(config))
    try:
        generator: Any = mesh.spawn("generator", Generator, config, 0, None)
        if ranks == 1:
            return [await generator.start.call_one()]
        await setup_torch_elastic_env_async(mesh)
        return list((await generator.start.call(generator)).values())
    finally:
        await mesh.stop()


def result_mb(plan: LoadPlan) -> float:
    """Of one copy of the model."""
    return bytes_of([plan], 1)[0].total() / 1e6


# --- processes


@asynccontextmanager
async def system(config: Config, plan: LoadPlan, readers: int) -> AsyncIterator[tuple[Any, list[Any], tuple[Any, list[Any]]]]:
    """A trainer rank with its publisher, and readers in processes of their own."""
    from actors.publisher import Publisher

    host, environment = local.host(), local.environment(config)
    trainers = local.spawn(host, Processes("trainer", "rank", 1), environment)
    stager: Any = trainers.spawn("stager", Stager, plan, config.weights.slots)
    publishers: Any = trainers.spawn("publisher", Publisher)
    meshes = [trainers]
    try:
        rings = list((await stager.register.call()).values())
        meshes += [local.spawn(host, Processes(f"reader_{i}", "tp", 1), environment) for i in range(readers)]
        spawned: list[Any] = [mesh.spawn("reader", PullingReader, plan, rings, publishers) for mesh in meshes[1:]]
        yield stager, spawned, (publishers, rings)
    finally:
        await asyncio.gather(*[mesh.stop() for mesh in meshes])


@asynccontextmanager
async def generating(config: Config) -> AsyncIterator[tuple[Any, Any, LoadPlan]]:
    """The default job's generator, somebody who asks it, and its load plan."""
    from actors.metrics import Metrics

    host, environment = local.host(), local.environment(config)
    meshes = [local.spawn(host, Processes(name, "proc", 1), environment) for name in ("generator", "rollout", "metrics")]
    metrics: Any = meshes[2].spawn("metrics", Metrics)
    generator: Any = meshes[0].spawn("generator", SwappingGenerator, config, 0, metrics)
    caller: Any = meshes[1].spawn("caller", Caller, generator, config.generator.burst_tokens)
    try:
        plan: LoadPlan = await generator.start.call_one()
        await generator.load.call_one(Renderer.of(config.model).directory)
        yield generator, caller, plan
        await generator.shut.call_one()
    finally:
        await asyncio.gather(*[mesh.stop() for mesh in meshes])


if __name__ == "__main__":
    main()
