"""Metrics: the mailbox in which generators leave what they did, so that nobody has to ask a busy or stopped one.

Owns: the latest report of each generator and their spans. Promises: answers at once.
Called by: Generator (`report`, without reply), the controller (`collect`). May be blocked by: nothing.
"""

from __future__ import annotations

from monarch.actor import Actor, endpoint

from monarch_rl.observe.metrics import GeneratorReport
from monarch_rl.observe.timeline import Span


class Metrics(Actor):
    def __init__(self) -> None:
        self._reports: dict[int, GeneratorReport] = {}
        self._spans: dict[str, list[Span]] = {}

    @endpoint
    async def report(self, report: GeneratorReport, spans: list[Span]) -> None:
        self._reports[report.replica] = report
        self._spans.setdefault(f"generator {report.replica}", []).extend(spans)

    @endpoint
    async def collect(self) -> tuple[list[GeneratorReport], dict[str, list[Span]]]:
        """The latest report of each generator, and the spans since the last call."""
        spans, self._spans = self._spans, {}
        return list(self._reports.values()), spans
