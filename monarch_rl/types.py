"""The nouns of the system. Importable without torch, so that every process can speak them.

`Prompt` → `Generation` (one model call) → `Episode` (the turns of one trajectory, with reward) → `Group` (all episodes of
one prompt) → `Shard` (what one trainer rank gets of one step's groups).
Array names carry their dimensions: G episodes in a group, P groups in a step, T tokens.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from monarch_rl.generator_config import SAMPLED_BY, GeneratorConfig

FinishReason = Literal["stop", "length", "abort"]
Split = Literal["train", "eval"]
Message = dict[str, str]

NOT_SAMPLED = -1
"""Stands in `Episode.versions_T` at tokens that no sampler produced (prompt, observations)."""


class Version(NamedTuple):
    """Which weights: `step` optimizer steps done, `lineage` trainer restarts before that. Compares as a tuple."""

    lineage: int
    step: int

    def pack(self) -> int:
        """One int64 that orders as the version does, for per-token arrays."""
        return (self.lineage << 32) | self.step

    @staticmethod
    def unpack(packed: int) -> Version:
        return Version(packed >> 32, packed & 0xFFFFFFFF)

    def __str__(self) -> str:
        return f"{self.lineage}.{self.step}"


@dataclass(frozen=True, slots=True)
class Prompt:
    """What the model is asked. A pure function of its ordinal, so it can be made again after a crash."""

    ordinal: int
    content: str | list[Message]
    """Raw text to continue, or chat messages for the model's chat template."""
    answer: Any = None
    """What the reward compares with; any picklable value."""
    task: str = ""


class Outcome(NamedTuple):
    """What a prompt has earned once, see `Task.skip`."""

    ordinal: int
    reward: float
    """Mean over its scorable episodes."""
    step: int
    """Optimizer steps done when it was finished."""


@dataclass(frozen=True, slots=True)
class Sampling:
    """How tokens are drawn; travels with each generation."""

    max_new_tokens: int
    temperature: float = 1.0
    stop_ids: tuple[int, ...] = ()
    """Ids that end a turn; the one that was sampled is part of the generation and is trained."""
    stop: tuple[str, ...] = ()
    """Texts that end a turn, special tokens among them; all ids up to the one that completes it are the generation."""
    top_k: int = 0
    """0: off."""
    top_p: float = 1.0
    min_p: float = 0.0
    begun: int = 0
    """How many ids at the end of the prompt were sampled before, as the beginning of this turn: a text of `stop` may begin in them."""

    @classmethod
    def of(cls, generator: GeneratorConfig, stop_ids: tuple[int, ...] = ()) -> Sampling:
        """As the configuration says. `stop_ids`: the model's own."""
        drawn = {name: getattr(generator, name) for name in SAMPLED_BY}
        return cls(**drawn, stop_ids=(*stop_ids, *generator.stop_ids), stop=tuple(generator.stop))

    @property
    def truncates(self) -> bool:
        """Whether some ids may never be drawn."""
        return self.top_k > 0 or self.top_p < 1 or self.min_p > 0


class _Compact:
    """Pickles arrays as bytes. Thousands of small ones pass between processes; numpy's own way takes five times as long."""

    __slots__: tuple[str, ...] = ()

    def __reduce__(self) -> tuple[Any, ...]:
        values = [getattr(self, name) for name in type(self).__slots__]
        return _unpack, (type(self), [(v.dtype.str, v.tobytes(), v.shape) if isinstance(v, np.ndarray) else v for v in values])


def _unpack(cls: type[_Compact], values: list[Any]) -> _Compact:
    # A bytearray, since arrays over bytes could not be written to.
    return cls(*[np.frombuffer(bytearray(v[1]), v[0]).reshape(v[2]) if type(v) is tuple else v for v in values])


MASK = "mask"
"""Channel: the ids that could be drawn in place of a sampled token, int32, ragged. An empty row: all of them."""
ROUTING = "routing"
"""Channel: the experts of each token that the model has read, [layers, experts per token] integers."""


@dataclass(slots=True)
class Rows(_Compact):
    """A channel: something that travels with tokens beside their logprobs. One row for each token from `start` on."""

    values: NDArray[Any]
    """[rows, ...], row t being `values[t]`; with `offsets` [M], row t being `values[offsets[t]:offsets[t + 1]]`."""
    offsets: NDArray[np.int32] | None = None
    """[rows + 1], where rows are of uneven length."""
    start: int = 0
    """Token of the sequence (prompt included) to which the first row belongs."""

    def __len__(self) -> int:
        return len(self.values) if self.offsets is None else len(self.offsets) - 1

    @property
    def end(self) -> int:
        return self.start + len(self)

    def after(self, token: int) -> Rows:
        """The rows of tokens from `token` on; none where it ends before."""
        skip = min(len(self), max(0, token - self.start))
        if self.offsets is None:
            return Rows(self.values[skip:], None, self.start + skip)
        return Rows(self.values[self.offsets[skip] :], self.offsets[skip:] - self.offsets[skip], self.start + skip)


def row_offsets(lengths: NDArray[Any]) -> NDArray[np.int32]:
    """`Rows.offsets` of rows of these lengths."""
    return np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32)


@dataclass(slots=True)
class Generation(_Compact):
    """One model call: the sampled ids with the logprob and the version behind each."""

    ids_T: NDArray[np.int32]
    logprobs_T: NDArray[np.float32]
    """Of the distribution that was sampled (after temperature, top-k, top-p and min-p)."""
    versions_T: NDArray[np.int64]
    """`Version.pack()` of the weights that sampled each token."""
    finish_reason: FinishReason
    replica: int = 0
    """That sampled the last token."""
    channels: dict[str, Rows] = field(default_factory=dict)
    """By name. `start` counts from the first token of the prompt, so that rows can belong to the prompt too."""


@dataclass(slots=True)
class Episode(_Compact):
    """One trajectory: prompt, sampled tokens and observations in one sequence."""

    ids_T: NDArray[np.int32]
    loss_mask_T: NDArray[np.bool_]
    """True where the policy sampled the token; only these are trained."""
    logprobs_T: NDArray[np.float32]
    """The sampler's; 0 where `loss_mask_T` is False."""
    versions_T: NDArray[np.int64]
    """`Version.pack()`, or `NOT_SAMPLED`."""
    text: str = ""
    """The completion, decoded, as the reward saw it."""
    reward: float | None = None
    """None: unscorable (see `error`); left out of the baseline and of the loss."""
    error: str | None = None
    truncated: bool = False
    """Ended by the token budget and not by an end token."""
    temperature: float = 1.0
    """That its tokens were sampled at."""
    transcript: str = ""
    """Of an episode of several turns: the text with what the model was told in ⟨ ⟩."""
    turn_tokens: list[int] = field(default_factory=list)
    """Sampled tokens of each turn; empty: they are all of one."""
    turn_rewards: list[float] = field(default_factory=list)
    """One for each turn, `reward` is their sum; empty: the reward is of the episode, earned with the last turn."""
    trained: bool = True
    """False: left out of the loss and its denominators, though its reward is part of the baseline (`generator.truncated=mask`)."""
    channels: dict[str, Rows] = field(default_factory=dict)
    """By name; one row for each of the T tokens."""

    @property
    def sampled_tokens(self) -> int:
        return int(self.loss_mask_T.sum())

    def versions(self) -> tuple[Version, Version] | None:
        """Oldest and newest version behind the sampled tokens; None when nothing was sampled."""
        sampled = self.versions_T[self.loss_mask_T]
        return (Version.unpack(int(sampled.min())), Version.unpack(int(sampled.max()))) if sampled.size else None


@dataclass(slots=True)
class Group:
    """All episodes of one prompt."""

    prompt: Prompt
    episodes: list[Episode]

    @property
    def ordinal(self) -> int:
        return self.prompt.ordinal

    @property
    def rewards_G(self) -> NDArray[np.float64]:
        """NaN where an episode is unscorable."""
        return np.array([np.nan if e.reward is None else e.reward for e in self.episodes], dtype=np.float64)


@dataclass(frozen=True, slots=True)
class Lease:
    """A time-bounded claim of a rollout worker on one prompt."""

    ordinal: int
    attempt: int
    """1 for the first; goes into `scored`/`failed`, so that a late answer of a lost claim is told apart."""
    min_step: int
    """A generator may start this prompt only when it holds at least this step (the admission rule) ..."""
    lineage: int = 0
    """... of this lineage. A claim of an older one is void: the trainer has restarted since."""

    @property
    def min_version(self) -> int:
        """`Version.pack()` of the oldest weights that may start it."""
        return Version(self.lineage, self.min_step).pack()


@dataclass(slots=True)
class Shard:
    """What one trainer rank gets of step `step`: its episodes, and what it must know of the whole batch."""

    step: int
    episodes: list[Episode]
    places: list[tuple[int, int]]
    """(group, episode) of each of `episodes` in `rewards_PG`."""
    microbatches: list[list[int]]
    """Indices into `episodes`, per micro-batch; every rank has the same number (one may be empty)."""
    rewards_PG: NDArray[np.float64]
    """Of the whole batch; NaN: unscorable (or no such episode)."""
    turn_rewards_PGK: NDArray[np.float64]
    """The same by turn; NaN: no such turn."""
    total_tokens: int
    """Sampled tokens of all scorable episodes of the whole batch: the global token-mean denominator."""
    total_episodes: int
    """Scorable episodes of the whole batch that are to be trained."""
    left_out_tokens: int = 0
    """Of `total_tokens`, those that no rank has to look at: of dead groups, whose advantages are all 0."""
    ordinals: list[int] = field(default_factory=list)
    """Of the groups of the whole batch, in order of `rewards_PG`."""
    lineage: int = 0
    """Of the trainer that trains it, see `Version`."""
