"""An episode while it is rolled out: what the model sampled and what it was told, one sequence that only grows. numpy only."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from monarch_rl.types import NOT_SAMPLED, Episode, Generation, Rows, row_offsets


class Trajectory:
    """Starts as the prompt. Sampled ids are appended as they are and never rendered again, so logprobs and versions stay with them.

    turns – what the model wrote, turn by turn.
    truncated – the token budget or the context ended it, and not the model or the environment.
    error – why it cannot be scored; one line.
    """

    def __init__(self, prompt_ids: Sequence[int]) -> None:
        self.turns: list[str] = []
        self.truncated = False
        self.error: str | None = None
        self.replica = 0
        self.sampled_tokens = 0
        self._parts: list[Generation] = []
        self._masks: list[bool] = []
        self._shown = ""
        self._prompt_tokens = len(prompt_ids)
        self.append_told(prompt_ids)

    @property
    def ids(self) -> list[int]:
        """All of it: the prompt of the next turn."""
        ids: list[int] = np.concatenate([part.ids_T for part in self._parts]).tolist()
        return ids

    @property
    def new_ids(self) -> list[int]:
        """What came after the prompt."""
        return self.ids[self._prompt_tokens :]

    @property
    def last_id(self) -> int:
        return int(self._parts[-1].ids_T[-1])

    def append_sampled(self, generation: Generation, text: str) -> None:
        """One turn of the model; `text` is what it wrote."""
        self.turns.append(text)
        self._shown += text
        self.truncated = generation.finish_reason == "length"
        self.replica = generation.replica
        self.sampled_tokens += len(generation.ids_T)
        self._parts.append(generation)
        self._masks.append(True)

    def append_told(self, ids: Sequence[int], text: str = "") -> None:
        """Tokens that no policy sampled; they are not trained. `text` is what they say, for display."""
        self._shown += f"⟨{text}⟩" if text else ""
        ids_T = np.asarray(ids, np.int32)
        self._parts.append(Generation(ids_T, np.zeros(len(ids), np.float32), np.full(len(ids), NOT_SAMPLED, np.int64), "stop"))
        self._masks.append(False)

    def episode(self, text: str, temperature: float) -> Episode:
        """The finished episode, not yet scored."""
        return Episode(
            ids_T=np.concatenate([part.ids_T for part in self._parts]),
            loss_mask_T=np.repeat(self._masks, [len(part.ids_T) for part in self._parts]),
            logprobs_T=np.concatenate([part.logprobs_T for part in self._parts]),
            versions_T=np.concatenate([part.versions_T for part in self._parts]),
            text=text,
            error=self.error,
            truncated=self.truncated,
            temperature=temperature,
            transcript=self._shown if len(self.turns) > 1 else "",
            turn_tokens=[len(part.ids_T) for part, sampled in zip(self._parts, self._masks, strict=True) if sampled],
            channels=self._channels(),
        )

    def _channels(self) -> dict[str, Rows]:
        if not self.sampled_tokens:
            return {}
        sampled = [part.channels for part, mask in zip(self._parts, self._masks, strict=True) if mask]
        names = {name for channels in sampled for name in channels}
        if lacking := [name for name in names if any(name not in channels for channels in sampled)]:
            raise ValueError(f"some turns come with the channel {lacking[0]} and some without")
        tokens = sum(len(part.ids_T) for part in self._parts)
        return {name: joined([channels[name] for channels in sampled], tokens) for name in sorted(names)}


def spliced(pieces: Sequence[Generation]) -> Generation:
    """One generation, from the parts of it in order; the last says how it ended."""
    first, last = pieces[0], pieces[-1]
    if len(pieces) == 1:
        return first
    channels = {name: [piece.channels[name] for piece in pieces] for name in first.channels}
    return Generation(
        ids_T=np.concatenate([piece.ids_T for piece in pieces]),
        logprobs_T=np.concatenate([piece.logprobs_T for piece in pieces]),
        versions_T=np.concatenate([piece.versions_T for piece in pieces]),
        finish_reason=last.finish_reason,
        replica=last.replica,
        channels={name: joined(rows, max(row.end for row in rows), rows[0].start) for name, rows in channels.items()},
    )


def joined(pieces: Sequence[Rows], tokens: int, start: int = 0) -> Rows:
    """A channel with one row for each token of a sequence from `start` on, from pieces in the order in which they were recorded.

    Where pieces overlap (a later turn reads all tokens again), the earlier row is the one that sampled and counts. Tokens without a
    row get an empty one, where rows are ragged. Where they are of fixed width only the last token can lack one, which no model has
    read yet; it gets zeros.

    Raises:
        ValueError: the rows of another token are missing, or there are more rows than tokens.
    """
    parts: list[Rows] = []
    end = start
    for piece in pieces:
        parts.append(piece.after(end))
        if piece.offsets is None and parts[-1].start > end:
            raise ValueError(f"a channel has no rows for tokens {end} to {parts[-1].start - 1}")
        end = max(end, piece.end)
    if end > tokens or (parts and parts[0].offsets is None and end < tokens - 1):
        raise ValueError(f"a channel has rows for {end} of {tokens} tokens")
    values = np.concatenate([part.values for part in parts])
    if parts[0].offsets is None:
        return Rows(np.concatenate([values, np.zeros((tokens - end, *values.shape[1:]), values.dtype)]), None, start)
    lengths_T = np.zeros(tokens - start, np.int32)
    for part in parts:
        lengths_T[part.start - start : part.end - start] = 0 if part.offsets is None else np.diff(part.offsets)
    return Rows(values, row_offsets(lengths_T), start)
