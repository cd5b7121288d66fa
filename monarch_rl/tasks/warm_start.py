"""Rebuilds a tiny checkpoint: `python -m monarch_rl.tasks.warm_start [--task NAME] [--out DIR] [--seed N]`, some minutes on one core.

Supervised training in two phases makes a model that can work the answer out (sums by a scratchpad, expressions by the calculator)
but mostly guesses, which leaves reinforcement learning something to discover: first worked answers only, until most come out
right; then a short mixture in which most answers are given directly. Only training prompts are used, also to decide when a phase ends.
"""

from __future__ import annotations

import argparse
import random
import time
from collections.abc import Callable
from dataclasses import dataclass
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
import transformers

from monarch_rl.tasks import Completion, Task
from monarch_rl.tasks.arithmetic import Arithmetic, operands
from monarch_rl.tasks.calculator import Calculator, steps
from monarch_rl.tasks.tiny import EOS, PAD, build_model, build_tokenizer, tiny_path
from monarch_rl.types import Prompt, Split

BATCH = 32
SKILL_LR = 2e-3
WARM_UP_STEPS = 20
SKILL = 0.8
"""Sampled accuracy that ends the first phase."""
MAX_SKILL_STEPS = 1500
CHECK_EVERY = 25
MIXTURE_LR = 1e-3
"""Falls to 0 over the second phase, so that the skill survives it."""
MIXTURE_STEPS = 50
DIRECT = 0.8
"""Share of answers without a scratchpad in the second phase."""
MAX_NEW_TOKENS = 96
MAX_TURNS = 8
Demonstration = Callable[[Prompt], list[str]]
"""What the model is to write, turn by turn."""


def scratchpad(prompt: Prompt) -> list[str]:
    """`4+7=11;11+2=13;#13` for `4+7+2=`."""
    terms = operands(str(prompt.content))
    steps = (f"{total}+{term}={after};" for term, (total, after) in zip(terms[1:], pairwise(accumulate(terms)), strict=True))
    return [f"{''.join(steps)}#{prompt.answer}"]


def questions(prompt: Prompt) -> list[str]:
    """`[12*7]`, `[84+5]`, `#89` for `12*7+5=`."""
    return [*(f"[{operation}]" for operation, _ in steps(str(prompt.content))), f"#{prompt.answer}"]


def right_away(prompt: Prompt) -> list[str]:
    """The answer, which the model cannot learn without working it out: it learns to guess."""
    return [f"#{prompt.answer}"]


def first_number(prompt: Prompt) -> list[str]:
    """A guess that is as good as always wrong, and easily learned; guesses at large numbers would disturb the skill."""
    return [f"#{str(prompt.content).partition('*')[0]}"]


@dataclass(frozen=True)
class Course:
    """What is taught, and where the package keeps the result."""

    task: Callable[[int], Task]
    worked: Demonstration
    guessed: Demonstration
    home: str


COURSES = {
    "arithmetic": Course(lambda seed: Arithmetic(seed=seed), scratchpad, right_away, "tiny"),
    "calculator": Course(lambda seed: Calculator(seed=seed), questions, first_number, "tiny_calculator"),
}


class WarmStart:
    """Model, optimizer and the stream of training prompts."""

    def __init__(self, course: Course, seed: int) -> None:
        self.task = course.task(seed)
        self.course = course
        self.tokenizer = build_tokenizer()
        self.model = build_model(seed)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=SKILL_LR, betas=(0.9, 0.98), weight_decay=0.01)
        self.rng = random.Random(seed)
        self.ordinal = 0
        self.step = 0

    def train(self, demonstration: Demonstration, lr: float) -> float:
        """One optimizer step on `BATCH` fresh demonstrations; the loss of their tokens in nats."""
        self.step += 1
        for group in self.optimizer.param_groups:
            group["lr"] = lr
        ids_BT, labels_BT = self._batch([(p, demonstration(p)) for p in self._prompts(BATCH)])
        logits_BTV = self.model(input_ids=ids_BT).logits
        loss = F.cross_entropy(logits_BTV[:, :-1].flatten(0, 1), labels_BT[:, 1:].flatten(), ignore_index=-100)
        self.optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        return loss.item()

    def mixture(self, prompt: Prompt) -> list[str]:
        return (self.course.guessed if self.rng.random() < DIRECT else self.course.worked)(prompt)

    def accuracy_on_fresh(self, count: int) -> float:
        return accuracy(self.model, self.tokenizer, self.task, self._prompts(count))

    def _prompts(self, count: int) -> list[Prompt]:
        self.ordinal += count
        return [self.task.prompt(ordinal, "train") for ordinal in range(self.ordinal - count, self.ordinal)]

    def _batch(self, pairs: list[tuple[Prompt, list[str]]]) -> tuple[torch.Tensor, torch.Tensor]:
        """Right-padded ids and labels; labels are -100 on all that the model does not write."""
        rows = [self._row(prompt, turns) for prompt, turns in pairs]
        width = max(len(ids) for ids, _ in rows)
        ids_BT = torch.full((len(rows), width), PAD)
        labels_BT = torch.full((len(rows), width), -100)
        for row, (ids, labels) in enumerate(rows):
            ids_BT[row, : len(ids)] = torch.tensor(ids)
            labels_BT[row, : len(ids)] = torch.tensor(labels)
        return ids_BT, labels_BT

    def _row(self, prompt: Prompt, turns: list[str]) -> tuple[list[int], list[int]]:
        ids = list(self.tokenizer.encode(prompt.content))
        labels = [-100] * len(ids)
        for count, turn in enumerate(turns, 1):
            written = [*self.tokenizer.encode(turn), EOS]
            told = self.tokenizer.encode(self.task.observe(prompt, turns[:count]) or "")
            ids += [*written, *told]
            labels += [*written, *[-100] * len(told)]
        return ids, labels


@torch.no_grad()
def complete(model: Any, tokenizer: Any, task: Task, prompts: list[Prompt]) -> list[Completion | None]:
    """One episode per prompt at temperature 1; None for one that did not end within `MAX_NEW_TOKENS` a turn and `MAX_TURNS`."""
    texts = [str(prompt.content) for prompt in prompts]
    turns: list[list[str]] = [[] for _ in prompts]
    done: dict[int, Completion | None] = {}
    for _ in range(MAX_TURNS):
        live = [i for i in range(len(prompts)) if i not in done]
        for i, (turn, ended) in zip(live, _turns(model, tokenizer, [texts[i] for i in live]), strict=True):
            turns[i].append(turn)
            told = task.observe(prompts[i], turns[i]) if ended else None
            texts[i] += turn + (tokenizer.eos_token + str(told) if told is not None else "")
            if told is None:
                done[i] = Completion(texts[i], turns[i]) if ended else None
        if len(done) == len(prompts):
            break
    return [done.get(i) for i in range(len(prompts))]


def _turns(model: Any, tokenizer: Any, texts: list[str]) -> list[tuple[str, bool]]:
    inputs = tokenizer(texts, return_tensors="pt", padding=True, return_token_type_ids=False)
    ids_BT = model.generate(**inputs, do_sample=True, temperature=1.0, top_k=0, top_p=1.0, max_new_tokens=MAX_NEW_TOKENS)
    new_BT = ids_BT[:, inputs["input_ids"].shape[1] :]
    return [(tokenizer.decode(ids_T, skip_special_tokens=True), EOS in ids_T) for ids_T in new_BT]


def accuracy(model: Any, tokenizer: Any, task: Task, prompts: list[Prompt]) -> float:
    """Share of prompts answered right by one sampled episode each."""
    completions = complete(model, tokenizer, task, prompts)
    return sum(task.reward(p, said) == 1 for p, said in zip(prompts, completions, strict=True) if said is not None) / len(prompts)


def split_accuracy(model: Any, tokenizer: Any, task: Task, split: Split, count: int) -> float:
    chunks = [[task.prompt(ordinal, split) for ordinal in range(start, start + 128)] for start in range(0, count, 128)]
    return sum(accuracy(model, tokenizer, task, chunk) for chunk in chunks) / len(chunks)


def build(course: Course, seed: int, say: Callable[[str], None]) -> WarmStart:
    """Both phases. Raises RuntimeError when the skill is not reached in `MAX_SKILL_STEPS`."""
    work, started, skill = WarmStart(course, seed), time.monotonic(), 0.0
    while skill < SKILL:
        if work.step == MAX_SKILL_STEPS:
            raise RuntimeError(f"accuracy {skill:.2f} after {work.step} steps, below {SKILL}: try another --seed")
        for _ in range(CHECK_EVERY):
            loss = work.train(course.worked, SKILL_LR * min(1.0, (work.step + 1) / WARM_UP_STEPS))
        skill = work.accuracy_on_fresh(256)
        say(f"worked answers: step {work.step:4d}  loss {loss:.3f}  accuracy {skill:.3f}  {time.monotonic() - started:.0f} s")
    for step in range(MIXTURE_STEPS):
        loss = work.train(work.mixture, MIXTURE_LR * (1 - step / MIXTURE_STEPS))
    say(f"mixture: step {work.step:4d}  loss {loss:.3f}  {time.monotonic() - started:.0f} s")
    return work


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--task", choices=COURSES, default="arithmetic")
    parser.add_argument("--out", type=Path, help="directory to write (default: where the package keeps it)")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    torch.set_num_threads(1)
    transformers.utils.logging.disable_progress_bar()
    course = COURSES[options.task]
    out = options.out or tiny_path(course.home)
    work = build(course, options.seed, lambda line: print(line, flush=True))
    model = work.model.to(torch.bfloat16)
    model.save_pretrained(out)
    work.tokenizer.save_pretrained(out)
    print(f"held-out accuracy at temperature 1: {split_accuracy(model.float(), work.tokenizer, work.task, 'eval', 1024):.3f}")
    (out / "model.safetensors").chmod(0o644)
    print(f"wrote {out} ({sum(f.stat().st_size for f in out.iterdir()) / 1e6:.2f} MB)")


if __name__ == "__main__":
    main()
