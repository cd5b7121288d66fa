"""What asynchrony is worth for given durations, in virtual time: the real ledger, an engine and a trainer that are only clocks.

One engine decodes a token of every running request in each decode step, which takes `decode_s` and `decode_per_request_s` for each of them.
An episode then sleeps in a tool; tools run at once, or at most `tools` of them. The trainer takes `train_s` for each step. Engine and
trainer never slow each other, and weights arrive at once, so that the result is what a system without any cost of its own
would reach. The second table sets the ledger beside other ways to pace and order groups (`policies`).
"""

from __future__ import annotations

import json
import math
import random
from argparse import Namespace
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from heapq import heappop, heappush
from itertools import count
from pathlib import Path
from typing import NamedTuple

from benchmarks.common import Row, arguments, report, table
from benchmarks.policies import compare
from monarch_rl.ledger import Ledger


class Episode(NamedTuple):
    """Durations of one episode."""

    tokens: int
    tool_s: float = 0.0


@dataclass(frozen=True)
class Costs:
    """Service times, in seconds."""

    decode_s: float = 0.0015
    """a decode step, whoever is in it"""
    decode_per_request_s: float = 65e-6
    """a decode step, more for each request in it"""
    train_s: float = 1.0
    """an optimizer step"""
    requests: int = 256
    """most requests in a decode step; more of them wait"""
    tools: int | None = None
    """tools that run at once; None: any number"""


@dataclass(slots=True)
class _Request:
    ordinal: int
    left: int
    tool_s: float


class Schedule:
    """One run: prompt number i is `groups[i]`; `ledger` says when it may start and when a batch is complete."""

    def __init__(self, groups: Sequence[Sequence[Episode]], ledger: Ledger, costs: Costs) -> None:
        self._groups, self._ledger, self._costs = groups, ledger, costs
        self._now = 0.0
        self._events: list[tuple[float, int, Callable[[], None]]] = []  # heap; the number keeps those of one moment in order
        self._numbers = count()
        self._queue: deque[_Request] = deque()  # for a place in the engine
        self._decoding: list[_Request] = []
        self._tool_queue: deque[_Request] = deque()
        self._tools_busy = 0
        self._open: dict[int, tuple[int, int]] = {}  # ordinal → (attempt, unfinished episodes)
        self._busy = {"engine": False, "trainer": False}
        self._ends: list[float] = []

    def run(self) -> list[float]:
        """When each optimizer step ends, in seconds from the start."""
        self._start_what_can()
        while self._events:
            self._now, _, happen = heappop(self._events)
            happen()
            self._start_what_can()
        return self._ends

    def _after(self, seconds: float, happen: Callable[[], None]) -> None:
        heappush(self._events, (self._now + seconds, next(self._numbers), happen))

    def _start_what_can(self) -> None:
        self._train()
        self._lease()
        self._decode()
        self._use_tools()

    def _lease(self) -> None:
        while lease := self._ledger.lease("virtual", self._now, math.inf, self._ledger.trained_steps):
            episodes = self._groups[lease.ordinal]
            self._open[lease.ordinal] = (lease.attempt, len(episodes))
            self._queue.extend(_Request(lease.ordinal, episode.tokens, episode.tool_s) for episode in episodes)

    def _decode(self) -> None:
        if self._busy["engine"]:
            return
        while self._queue and len(self._decoding) < self._costs.requests:
            self._decoding.append(self._queue.popleft())
        if self._decoding:
            self._busy["engine"] = True
            self._after(self._costs.decode_s + self._costs.decode_per_request_s * len(self._decoding), self._decoded)

    def _decoded(self) -> None:
        self._busy["engine"] = False
        for request in self._decoding:
            request.left -= 1
        self._tool_queue.extend(request for request in self._decoding if request.left <= 0)
        self._decoding = [request for request in self._decoding if request.left > 0]

    def _use_tools(self) -> None:
        while self._tool_queue and self._tools_busy < (self._costs.tools or math.inf):
            request = self._tool_queue.popleft()
            self._tools_busy += 1
            self._after(request.tool_s, lambda ordinal=request.ordinal: self._episode_done(ordinal))  # type: ignore[misc]

    def _episode_done(self, ordinal: int) -> None:
        self._tools_busy -= 1
        attempt, left = self._open.pop(ordinal)
        if left > 1:
            self._open[ordinal] = (attempt, left - 1)
        else:
            self._ledger.scored(ordinal, attempt, trainable=True)

    def _train(self) -> None:
        if not self._busy["trainer"] and not self._ledger.over and self._ledger.take(self._ledger.taken_steps + 1) is not None:
            self._busy["trainer"] = True
            self._after(self._costs.train_s, self._trained)

    def _trained(self) -> None:
        self._busy["trainer"] = False
        self._ledger.trained(self._ledger.taken_steps)
        self._ends.append(self._now)


def total_s(groups: Sequence[Sequence[Episode]], *, prompts_per_step: int, max_age: int, window: int = 1, costs: Costs) -> float:
    """Seconds that a run takes which trains all of `groups`, `prompts_per_step` in each step."""
    steps = len(groups) // prompts_per_step
    ledger = Ledger(prompts_per_step=prompts_per_step, max_age=max_age, window=window, steps=steps)
    return Schedule(groups, ledger, costs).run()[-1]


def heavy_tailed(place: str, median_s: float, sigma: float = 0.5, stragglers: float = 0.05, factor: float = 20.0) -> float:
    """A tool's latency in seconds, a pure function of `place`: log-normal, and `factor` times as long for a share of `stragglers`."""
    rng = random.Random(f"latency/{place}")
    slow = factor if rng.random() < stragglers else 1.0
    return median_s * rng.lognormvariate(0.0, sigma) * slow


def made_up(steps: int, prompts_per_step: int, group_size: int, median_s: float) -> list[list[Episode]]:
    """Groups with geometric lengths (mean 20 tokens, at most 96) and heavy-tailed tools."""
    rng = random.Random(0)

    def tokens() -> int:
        return min(96, 2 + int(rng.expovariate(1 / 18)))

    ordinals = range(steps * prompts_per_step)
    return [[Episode(tokens(), heavy_tailed(f"{ordinal}/{index}", median_s)) for index in range(group_size)] for ordinal in ordinals]


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--steps", type=int, default=36, help="optimizer steps (36)")
    parser.add_argument("--tool-median", type=float, nargs="*", default=[0.0, 0.05, 0.2], help="seconds, several (0 0.05 0.2)")
    parser.add_argument("--train", type=float, default=1.0, help="seconds of an optimizer step (1)")
    parser.add_argument("--tools", type=int, help="tools that run at once (any number)")
    parser.add_argument("--median", type=float, default=0.1, help="of the policies: median group, in training steps (0.1)")
    parser.add_argument("--ages", type=int, nargs="*", default=[1, 2, 4], help="of the policies: values of max_age (1 2 4)")
    options = parser.parse_args()
    ratios, made = asynchrony(options, Costs(train_s=options.train, tools=options.tools))
    tails = ((0.0, 1.0), (0.01, 10.0), (0.05, 20.0), (0.1, 50.0))
    text, compared = compare(P=32, ages=options.ages, tails=tails, steps=200, slots=256, median_s=options.median)
    report(options.out, f"{ratios}\n\n{text}", made | {"policies": compared})


def asynchrony(options: Namespace, costs: Costs) -> tuple[str, Row]:
    """How many times faster than `max_age=0` other settings are, for the made-up job."""
    settings = [(1, 1), (2, 1), (4, 1), (2, 32), (4, 32)]
    rows, result = [], []
    for median_s in options.tool_median:
        groups = made_up(options.steps, 32, 8, median_s)
        synchronous_s = total_s(groups, prompts_per_step=32, max_age=0, costs=costs)
        for max_age, window in settings:
            took_s = total_s(groups, prompts_per_step=32, max_age=max_age, window=window, costs=costs)
            rows.append((f"{median_s:g} s", max_age, window, f"{synchronous_s:.1f} s", f"{took_s:.1f} s", f"{synchronous_s / took_s:.2f}"))
            result.append({"tool_median_s": median_s, "max_age": max_age, "window": window, "ratio": synchronous_s / took_s})
    text = table(("tool, median", "max_age", "window", "synchronous", "asynchronous", "ratio"), rows)
    return text, {"costs": asdict(costs), "ratios": result}


def read_costs(file: Path, **others: float) -> Costs:
    """With the decode costs that `generator_overhead --out` wrote."""
    measured = json.loads(file.read_text())
    return Costs(decode_s=measured["decode_s"], decode_per_request_s=measured["decode_per_request_s"], **others)  # type: ignore[arg-type]


if __name__ == "__main__":
    main()
