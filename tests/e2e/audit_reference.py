"""Log-probabilities by transformers alone, from the weights that the trainer saved at each version."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import cached_property
from itertools import groupby
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, DynamicCache, PreTrainedModel

from monarch_rl.types import Episode, Version


class Run(NamedTuple):
    """A stretch of sampled tokens [first, past) that one version is said to have sampled."""

    step: int
    first: int
    past: int


def runs(episode: Episode) -> list[Run]:
    """What the stamps say, in the order of the tokens."""
    stamps = [Version.unpack(int(packed)).step for packed in episode.versions_T[episode.loss_mask_T]]
    lengths = [(step, len(list(tokens))) for step, tokens in groupby(stamps)]
    ends = torch.tensor([length for _, length in lengths]).cumsum(0).tolist()
    return [Run(step, end - length, end) for (step, length), end in zip(lengths, ends, strict=True)]


class Reference:
    """The saved weights of a run: `folder/STEP` is a Hugging Face directory.

    Each run of tokens is computed by its own weights over the keys and values that the weights before it left behind,
    which is what an engine does that goes on with the ones it has when new weights come.
    """

    def __init__(self, folder: Path, temperature: float) -> None:
        self._folder, self._temperature = folder, temperature

    @cached_property
    def models(self) -> dict[int, PreTrainedModel]:
        """By step."""
        return {int(path.name): AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval() for path in self._folder.iterdir()}

    @torch.no_grad()
    def logprobs(self, episode: Episode, stretches: Iterable[Run]) -> Tensor:
        """[T sampled] as if the tokens of each stretch had been sampled by the weights that it names."""
        ids = torch.from_numpy(episode.ids_T).long()
        prompt, cache, read, parts = int((~episode.loss_mask_T).sum()), DynamicCache(), 0, []
        for step, first, past in stretches:
            until = prompt + past - 1  # the last token of a stretch is predicted from the one before it
            logits = self.models[step](ids[None, read:until], past_key_values=cache, use_cache=True).logits[0, first - past :]
            logprobs = (logits / self._temperature).log_softmax(-1)
            parts.append(logprobs.gather(-1, ids[prompt + first : prompt + past, None])[:, 0])
            read = until
        return torch.cat(parts)

    def gaps(self, episodes: Iterable[Episode], as_if: Callable[[list[Run]], list[Run]] = list) -> Tensor:
        """|sampler's - recomputed| of all sampled tokens, with what the stamps say, or `as_if` they said something else."""
        gaps = []
        for episode in episodes:
            sampler = torch.from_numpy(episode.logprobs_T[episode.loss_mask_T])
            gaps.append((sampler - self.logprobs(episode, as_if(runs(episode)))).abs())
        return torch.cat(gaps)
