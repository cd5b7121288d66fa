"""Metrics: the mailbox in which generators leave what they did, so that nobody has to ask a busy or stopped one.

Owns: the latest report of each generator and their spans.
Promises: `collect` answers at once, `news` as soon as something has come since the last `collect`.
Called by: Generator (`report`, without reply), the controller (`news`, `collect`). May be blocked by: nothing.
"""

from __future__ import annotations

from monarch.actor import Actor, Port, endpoint

from monarch_rl.observe.metrics import GeneratorReport
from monarch_rl.observe.timeline import Span


class Metrics(Actor):
    def __init__(self) -> None:
        self._reports: dict[int, GeneratorReport] = {}
        self._spans: dict[str, list[Span]] = {}
        self._is_news = False
        self._waiting: Port[None] | None = None

    @endpoint
    async def report(self, report: GeneratorReport, spans: list[Span]) -> None:
        self._reports[report.replica] = report
        self._spans.setdefault(f"generator {report.replica}", []).extend(spans)
        self._is_news = True
        self._answer()

    @endpoint(explicit_response_port=True)
    async def news(self, port: Port[None]) -> None:
        """Answers when there is something to collect. A second call replaces the first."""
        self._waiting = port
        self._answer()

    @endpoint
    async def collect(self) -> tuple[list[GeneratorReport], dict[str, list[Span]]]:
        """The latest report of each generator, and the spans since the last call."""
        spans, self._spans = self._spans, {}
        self._is_news = False
        return list(self._reports.values()), spans

    def _answer(self) -> None:
        if self._is_news and self._waiting is not None:
            self._waiting.send(None)
            self._waiting = None
