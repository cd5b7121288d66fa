"""Metrics: the mailbox in which other actors leave what they did, so that nobody has to ask a busy or stopped one.

Owns: the latest report of each generator, and the records of all who send some. Those of its own process, which is also the
replay buffer's, it finds itself.
Promises: `collect` answers at once, `news` as soon as something has come since the last `collect`.
Called by: Generator (`report`), RolloutWorker and Scorer (`records`), all without reply; the controller (`ended`, `news`, `collect`).
May be blocked by: nothing.
"""

from __future__ import annotations

import asyncio
import time
from dataclasses import replace

from monarch.actor import Actor, Port, endpoint

from monarch_rl.observe import timeline
from monarch_rl.observe.metrics import GeneratorReport
from monarch_rl.observe.timeline import Record

REPORT_S = 0.5
"""Between two messages of `Records`."""


class Metrics(Actor):
    def __init__(self) -> None:
        self._reports: dict[int, GeneratorReport] = {}
        self._came: dict[int, float] = {}
        self._ended: set[int] = set()
        self._records: dict[str, list[Record]] = {}
        self._is_news = False
        self._waiting: Port[None] | None = None

    @endpoint
    async def report(self, report: GeneratorReport, records: list[Record]) -> None:
        self._reports[report.replica] = _at_its_end(report) if report.replica in self._ended else report
        self._came[report.replica] = time.monotonic()
        self._keep(f"generator {report.replica}", records)

    @endpoint
    async def ended(self, replica: int) -> None:
        """It holds and does nothing any more; what it did stays in the sums. Its last report may come after this."""
        self._ended.add(replica)
        if replica in self._reports:
            self._reports[replica] = _at_its_end(self._reports[replica])

    @endpoint
    async def records(self, lane: str, records: list[Record]) -> None:
        self._keep(lane, records)

    @endpoint(explicit_response_port=True)
    async def news(self, port: Port[None]) -> None:
        """Answers when there is something to collect. A second call replaces the first."""
        self._waiting = port
        self._answer()

    @endpoint
    async def collect(self) -> tuple[list[GeneratorReport], dict[str, list[Record]]]:
        """The latest report of each generator, as it would be now, and the records since the last call by lane."""
        records, self._records = self._records, {}
        self._is_news = False
        now = time.monotonic()
        reports = [replace(r, idle_s=r.idle_s + now - self._came[r.replica]) if r.asleep else r for r in self._reports.values()]
        return reports, records | {"replay buffer": timeline.drain()}

    def _keep(self, lane: str, records: list[Record]) -> None:
        self._records.setdefault(lane, []).extend(records)
        self._is_news = True
        self._answer()

    def _answer(self) -> None:
        if self._is_news and self._waiting is not None:
            self._waiting.send(None)
            self._waiting = None


def _at_its_end(report: GeneratorReport) -> GeneratorReport:
    return replace(report, ended=True, asleep=False)


class Records:
    """Sends what this process records to the metrics actor, now and then and without waiting. Without one nothing is sent."""

    def __init__(self, metrics: Metrics | None, lane: str) -> None:
        self._metrics, self._lane = metrics, lane
        self._due: asyncio.TimerHandle | None = None

    def soon(self) -> None:
        if self._due is None:
            self._due = asyncio.get_running_loop().call_later(REPORT_S, self.send)

    def send(self) -> None:
        if self._due is not None:
            self._due.cancel()
            self._due = None
        records = timeline.drain()
        if self._metrics is not None and records:
            self._metrics.records.broadcast(self._lane, records)
