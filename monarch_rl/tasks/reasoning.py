"""The procedural tasks of reasoning-gym: `task=reasoning_gym:chain_sum` (https://github.com/open-thought/reasoning-gym)."""

from __future__ import annotations

import difflib
import hashlib
import re
from functools import lru_cache
from typing import Any

from monarch_rl.config import UserError
from monarch_rl.tasks import Task, held_out
from monarch_rl.types import Prompt, Split

PREFIX = "reasoning_gym:"
INSTRUCTION = "Give the final answer between <answer> and </answer>."
TAGGED = re.compile(r"<answer>(.*?)</answer>", re.DOTALL)
CHUNK = 100
"""Prompts that share a data set of reasoning-gym; some make all of their entries, or a pool for them, at the start."""
TRIES = 64
"""Entries for each prompt, of which the first that belongs to the split is taken."""
JUNK = ("zzz", "")
"""Answers that must not earn much."""
TOLERATED = 0.1
"""What some scorers give for any answer at all."""


class ReasoningGym(Task):
    """Endless. A question, as written, is either a training or a held-out one, for all seeds alike.

    The answer is what stands between the last <answer> and </answer> of a chat completion, or after the last # of raw text. The scorer's
    figure is the reward, within 0 and 1; a scorer that fails on an answer takes it for wrong.
    """

    truncated_reward = 0.0

    def __init__(self, dataset: str, seed: int = 0, chat: bool = True, **options: Any) -> None:
        """`options` are those of the data set. Refuses one whose scorer does not know its own answers from junk."""
        self.name = f"{PREFIX}{dataset}"
        self.dataset, self.seed, self.chat, self.options = dataset, seed, chat, options
        self._make = _factory(dataset)
        self._chunk = lru_cache(maxsize=4)(self._new_chunk)
        self._check()

    def prompt(self, ordinal: int, split: Split) -> Prompt:
        """Raises RuntimeError when no question of the split turns up: the data set has too few different ones."""
        chunk, at = divmod(ordinal, CHUNK)
        entries = self._chunk(f"{split}/{self.seed}/{chunk}" if split == "train" else f"{split}/{chunk}")
        for place in range(at * TRIES, (at + 1) * TRIES):
            entry = entries[place]
            if held_out(entry["question"]) == (split == "eval"):
                return Prompt(ordinal, self._content(entry["question"]), answer=entry, task=self.name)
        raise RuntimeError(f"{TRIES} questions of {self.name} hold none for the {split} split: too few different ones")

    def reward(self, prompt: Prompt, completion: str) -> float:
        said = self._said(completion)
        return 0.0 if said is None else self._score(said, prompt.answer)

    def _content(self, question: str) -> Any:
        return [{"role": "user", "content": f"{question}\n{INSTRUCTION}"}] if self.chat else question

    def _said(self, completion: str) -> str | None:
        if self.chat:
            tagged = TAGGED.findall(completion)
            return tagged[-1].strip() if tagged else None
        return completion.rpartition("#")[2].strip()

    def _score(self, said: str, entry: Any) -> float:
        try:
            score = float(self._judge.score_answer(said, entry))
        except Exception:
            return 0.0
        return min(1.0, max(0.0, score))

    def _new_chunk(self, name: str) -> Any:
        seed = int.from_bytes(hashlib.blake2b(name.encode(), digest_size=4).digest(), "little")
        try:
            return self._make(seed=seed, size=CHUNK * TRIES, **self.options)
        except (TypeError, ValueError, AssertionError) as error:
            raise UserError(f"task_args: {self.name}: {error}") from error

    def _check(self) -> None:
        self._judge = self._chunk("check")
        for place in range(2):
            entry = self._judge[place]
            if (gold := self._score(entry["answer"], entry)) < 1:
                raise UserError(f"task={self.name}: its scorer gives its own answer {gold:g}, so it cannot be trained on")
            for junk in JUNK:
                if (score := self._score(junk, entry)) > TOLERATED:
                    raise UserError(f"task={self.name}: its scorer gives the answer {junk!r} {score:g}, so it cannot be trained on")


def _factory(dataset: str) -> Any:
    try:
        from reasoning_gym.factory import DATASETS, create_dataset
    except ImportError as error:
        install = "pip install --no-deps -r requirements/envs.txt"
        raise UserError(f"task={PREFIX}{dataset} needs the package reasoning-gym: {install}") from error
    if dataset not in DATASETS:
        near = difflib.get_close_matches(dataset, DATASETS, n=1)
        raise UserError(f"task={PREFIX}{dataset}: reasoning-gym has no such task" + (f"; did you mean {near[0]!r}?" if near else ""))
    return lambda **options: create_dataset(dataset, **options)
