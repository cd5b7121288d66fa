"""Figures of a session for notebooks, with plotly (the extra `notebook`)."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from monarch_rl.config import UserError

if TYPE_CHECKING:
    from plotly.graph_objects import Figure

    from monarch_rl.observe.timeline import Span

COLOURS = {
    "generate": "#4477aa",
    "train": "#228833",
    "wait": "#dddddd",
    "stage": "#ccbb44",
    "pull": "#66ccee",
    "swap": "#ee6677",
    "score": "#aa3377",
}
"""Of what actors do; told apart by colour-blind readers too."""


def curves(rows: Sequence[Mapping[str, Any]], keys: Sequence[Sequence[str]]) -> Figure:
    """One small chart under the other, each of the named metrics over the optimizer steps."""
    plotly_objects, make_subplots = _plotly()
    figure = make_subplots(rows=len(keys), cols=1, shared_xaxes=True, vertical_spacing=0.06)
    for at, names in enumerate(keys, start=1):
        for name in names:
            shown = [(row["step"], row[name]) for row in rows if name in row]
            steps, values = [step for step, _ in shown], [value for _, value in shown]
            figure.add_trace(plotly_objects.Scatter(x=steps, y=values, name=name, mode="lines+markers"), row=at, col=1)
    figure.update_xaxes(title_text="optimizer step", row=len(keys), col=1)
    figure.update_layout(height=190 * len(keys) + 60, margin={"t": 20, "b": 40}, template="plotly_white")
    return figure


def lanes(spans: Mapping[str, Iterable[Span]], last_s: float) -> Figure:
    """What each actor did in the last `last_s` seconds that were recorded."""
    plotly_objects, _ = _plotly()
    end_ns = max((span.end_ns for lane in spans.values() for span in lane), default=0)
    figure, named = plotly_objects.Figure(), set()
    for lane in sorted(spans, reverse=True):
        for span in spans[lane]:
            begin_s = (span.start_ns - end_ns) / 1e9
            if begin_s < -last_s:
                continue
            bar = plotly_objects.Bar(
                y=[lane],
                base=[begin_s],
                x=[(span.end_ns - span.start_ns) / 1e9],
                orientation="h",
                marker_color=COLOURS.get(span.name, "#999999"),
                name=span.name,
                legendgroup=span.name,
                showlegend=span.name not in named,
                hovertext=f"{span.name} {span.args or ''}",
            )
            named.add(span.name)
            figure.add_trace(bar)
    height = 60 * len(spans) + 120
    figure.update_layout(barmode="overlay", height=height, margin={"t": 20, "b": 40}, template="plotly_white", xaxis_title="seconds")
    return figure


def _plotly() -> tuple[Any, Any]:
    try:
        from plotly import graph_objects
        from plotly.subplots import make_subplots
    except ImportError:
        raise UserError("figures need the package plotly: pip install -e '.[notebook]'") from None
    return graph_objects, make_subplots
