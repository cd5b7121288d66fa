"""What a session shows of itself, as text and as HTML."""

from __future__ import annotations

import io
import time
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from typing import TYPE_CHECKING, Any

from rich import box
from rich.console import Console
from rich.table import Table as RichTable

from monarch_rl.clocks import lane
from monarch_rl.config import Config, UserError, label
from monarch_rl.lives import STATES, Holdings, Life, State
from monarch_rl.observe.metrics import GeneratorReport
from monarch_rl.types import NOT_SAMPLED, Episode, Generation, Group, Message, Version

if TYPE_CHECKING:
    from actors.process import Usage
    from monarch_rl.rendering import Renderer

SHOWN = 12
"""Prompts of a kind that are listed."""
PALETTE = ("#4477aa", "#ee6677", "#228833", "#ccbb44", "#66ccee", "#aa3377")
"""Colours of versions, one after the other; told apart by colour-blind readers too."""


@dataclass(frozen=True)
class Table:
    """Rows under a title. A notebook shows it as HTML, everything else as text."""

    title: str
    columns: Sequence[str]
    rows: Sequence[Sequence[object]]
    note: str = ""

    def __repr__(self) -> str:
        shape: dict[str, Any] = {"title": self.title, "title_justify": "left", "caption": self.note or None, "box": box.SIMPLE}
        drawn = RichTable(*self.columns, show_header=any(self.columns), **shape)
        for row in self.rows:
            drawn.add_row(*[_text(cell) for cell in row])
        console = Console(file=io.StringIO(), width=140, color_system=None, force_jupyter=False, markup=False, emoji=False)
        console.print(drawn)
        return str(console.file.getvalue()).rstrip()  # type: ignore[attr-defined]

    def _repr_html_(self) -> str:
        head = "".join(f"<th style='text-align:left'>{escape(column)}</th>" for column in self.columns)
        body = "".join(f"<tr>{''.join(_cell(cell) for cell in row)}</tr>" for row in self.rows)
        note = f"<caption style='caption-side:bottom;text-align:left'>{escape(self.note)}</caption>" if self.note else ""
        head = f"<thead><tr>{head}</tr></thead>" if any(self.columns) else ""
        return f"<b>{escape(self.title)}</b><table>{note}{head}<tbody>{body}</tbody></table>"


@dataclass(frozen=True)
class Coloured:
    """Pieces of a text with the version that sampled each; None: nobody did."""

    pieces: Sequence[tuple[str, Version | None]]

    def __str__(self) -> str:
        return "".join(text for text, _ in self.pieces)

    def html(self) -> str:
        seen: dict[Version, str] = {}
        for _, version in self.pieces:
            if version is not None:
                seen.setdefault(version, PALETTE[len(seen) % len(PALETTE)])
        spans = [
            f"<span style='border-bottom:3px solid {seen[v]}' title='version {v}'>{_html(text)}</span>" if v is not None else _html(text)
            for text, v in self.pieces
        ]
        return f"<span style='font-family:monospace;white-space:pre-wrap'>{''.join(spans)}</span>"


@dataclass(frozen=True)
class Link:
    """An address to click on."""

    url: str

    def __str__(self) -> str:
        return self.url

    def html(self) -> str:
        return f"<a href='{escape(self.url)}' target='_blank'>{escape(self.url)}</a>"


@dataclass(frozen=True, repr=False)
class Samples(Table):
    """Completions. `texts` are the completions alone."""

    texts: Sequence[str] = ()


@dataclass(frozen=True, repr=False)
class BufferTable(Table):
    """Prompts by state; what is known of each is asked for."""

    ask: Callable[[Sequence[State], int], Awaitable[list[Life]]] | None = None

    async def ledger(self, *states: State, last: int = 64) -> Table:
        """The life of each of the newest `last` prompts in any of `states`: `await session.buffer.ledger("leased", "dropped")`."""
        if wrong := set(states) - set(STATES):
            raise UserError(f"there is no state {sorted(wrong)[0]!r}; there are {', '.join(STATES)}")
        assert self.ask is not None
        return of_lives(await self.ask(states or STATES, last), time.time())


def of_lives(lives: Iterable[Life], now: float, title: str = "Ledger") -> Table:
    """One prompt a line; `now` in seconds since the epoch."""
    columns = ("prompt", "state", "for s", "attempt", "held by", "step", "sampled by", "reason")
    return Table(title, columns, [_life(life, now) for life in lives])


def _life(life: Life, now: float) -> tuple[object, ...]:
    span = [str(Version.unpack(packed)) for packed in (life.oldest, life.newest) if packed != NOT_SAMPLED]
    seconds = f"{max(0.0, now - life.since):.1f}"
    claim = life.attempt, life.owner, life.step or ""
    return (life.ordinal, life.state, seconds, *claim, "-".join(sorted(set(span), key=span.index)), life.reason)


def of_session(
    config: Config, state: str, version: Version, last: Mapping[str, Any], evaluated: Mapping[str, Any], dashboard: str = ""
) -> Table:
    """`last`: the last row; `evaluated`: the last one with an evaluation."""
    listed: list[tuple[object, object]] = [
        ("state", state),
        ("step", f"{version.step} of {config.steps}"),
        ("task", label(config.task)),
        ("model", f"{config.model.path}, {config.model.dtype}"),
        ("output", config.output_dir),
    ]
    listed += [("reward", last["reward/mean"])] if "reward/mean" in last else []
    listed += [("held-out accuracy", f"{evaluated['eval/accuracy']:.3f} @{evaluated['eval/version']}")] if evaluated else []
    listed += [("Monarch's dashboard", Link(dashboard))] if dashboard else []
    return Table("Session", ("", ""), listed)


def of_rows(rows: Sequence[Mapping[str, Any]]) -> Table:
    keys: tuple[str, ...] = ("step", "reward/mean", "loss/policy", "grad_norm", "lr", "age/mean", "age/max", "time/step_s")
    keys += ("time/wait_batch_s", *(["eval/accuracy"] if any("eval/accuracy" in row for row in rows) else []))
    return Table("Trainer", keys, [tuple(row.get(key, "") for key in keys) for row in rows])


def of_buffer(holdings: Holdings | None, ask: Callable[[Sequence[State], int], Awaitable[list[Life]]] | None = None) -> BufferTable:
    if holdings is None:
        return BufferTable("ReplayBuffer", ("state", "prompts", "held by", "ordinals"), [], "nothing was started yet", ask)
    rows: list[tuple[object, ...]] = []
    for state in ("pending", "leased", "scored", "taken"):
        held = [h for h in holdings.prompts if h.state == state]
        owners = sorted({h.owner for h in held if h.owner and state == "leased"})
        listed = " ".join(str(h.ordinal) for h in held[:SHOWN]) + (" …" if len(held) > SHOWN else "")
        rows.append((state, len(held), ", ".join(owners), listed))
    dropped = ", ".join(f"{count} {reason}" for reason, count in holdings.dropped.items())
    rows += [("trained", holdings.counts.trained, "", ""), ("dropped", holdings.counts.dropped, dropped, "")]
    note = f"max_age {holdings.max_age}: at most {holdings.budget} groups may be started ahead of the generators' step"
    return BufferTable("ReplayBuffer", ("state", "prompts", "held by", "ordinals"), rows, note, ask)


def of_generators(reports: Iterable[GeneratorReport], version: Version) -> Table:
    columns = ("generator", "holds step", "behind the trainer", "tokens", "idle s", "pulls")
    return Table("Generators", columns, [(r.replica, r.step, max(0, r.behind(version)), r.tokens, r.idle_s, r.pulled) for r in reports])


def of_weights(reports: Iterable[GeneratorReport], version: Version) -> Table:
    columns = ("generator", "holds step", "pull s", "pause ms", "MB", "tokens during pulls", "rejected pulls")
    rows = [(r.replica, r.step, r.pull_s, 1e3 * r.pause_s, r.bytes_per_pull / 1e6, r.tokens_during_pulls, r.rejected) for r in reports]
    return Table("Weights", columns, rows, f"the trainer has version {version}")


def of_processes(usages: Mapping[str, Sequence[Usage] | None]) -> Table:
    """By mesh: what each of its processes says of itself; None: it does not answer."""
    rows: list[Sequence[object]] = []
    for name, usage in usages.items():
        rows += [(lane(name, 0), "no answer", "", "", "")] if usage is None else []
        for rank, used in enumerate(usage or ()):
            rows.append((lane(name, rank), used.host, used.pid, f"{used.memory_bytes / 2**20:.0f}", f"{used.cpu_s:.1f}"))
    return Table("Processes", ("process", "host", "pid", "memory MB", "CPU s"), rows)


def of_generations(prompt: str | list[Message], generations: Sequence[Generation], renderer: Renderer) -> Samples:
    rows, texts = [], []
    for generation in generations:
        ids, versions = generation.ids_T.tolist(), [Version.unpack(int(v)) for v in generation.versions_T]
        texts.append(renderer.decode(ids))
        pieces = [(renderer.decode([token]), version) for token, version in zip(ids, versions, strict=True)]
        span = f"{versions[0]}" + (f"-{versions[-1]}" if versions and versions[-1] != versions[0] else "")
        rows.append((Coloured(pieces), len(ids), generation.finish_reason, span, float(generation.logprobs_T.sum())))
    title = prompt if isinstance(prompt, str) else prompt[-1]["content"]
    return Samples(title, ("completion", "tokens", "ended by", "version", "logprob"), rows, texts=texts)


def of_groups(groups: Sequence[Group], version: Version) -> Samples:
    rows = [row for group in groups for row in _episodes(group, version)]
    return Samples(
        "Rollouts",
        ("prompt", "completion", "reward", "tokens", "sampled by", "steps ago"),
        rows,
        texts=[e.text for group in groups for e in group.episodes],
    )


def _episodes(group: Group, version: Version) -> Iterable[tuple[object, ...]]:
    content = group.prompt.content
    question = content if isinstance(content, str) else content[-1]["content"]
    for at, episode in enumerate(group.episodes):
        reward = episode.error if episode.reward is None else episode.reward
        yield (
            question if at == 0 else "",
            episode.transcript or episode.text,
            reward,
            episode.sampled_tokens,
            _span(episode),
            _behind(episode, version),
        )


def _span(episode: Episode) -> str:
    span = episode.versions()
    return "" if span is None else str(span[0]) if span[0] == span[1] else f"{span[0]}-{span[1]}"


def _behind(episode: Episode, version: Version) -> object:
    span = episode.versions()
    return "" if span is None else max(int(span[0].lineage < version.lineage), version.step - span[0].step)


def _text(cell: object) -> str:
    return f"{cell:.4g}" if isinstance(cell, float) else str(cell)


def _html(text: str) -> str:
    return escape(text).replace("\n", "<br>")


def _cell(cell: object) -> str:
    return f"<td style='text-align:left'>{cell.html() if isinstance(cell, Coloured | Link) else _html(_text(cell))}</td>"
