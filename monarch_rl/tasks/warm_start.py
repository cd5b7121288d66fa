"""Rebuilds the tiny checkpoint: `python -m monarch_rl.tasks.warm_start [--out DIR] [--seed N]`, some minutes on one core.

Supervised training in two phases makes a model that can work sums out but mostly guesses, which leaves reinforcement
learning something to discover: first scratchpads only, until most sums come out right; then a short mixture in which
most answers are given directly. Only training prompts are used, also to decide when a phase ends.
"""

from __future__ import annotations

import argparse
import random
import time
from collections.abc import Callable
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
import transformers

from monarch_rl.tasks.arithmetic import Arithmetic, operands
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
Demonstration = Callable[[Prompt], str]


def scratchpad(prompt: Prompt) -> str:
    """`4+7=11;11+2=13;#13` for `4+7+2=`."""
    terms = operands(str(prompt.content))
    steps = (f"{total}+{term}={after};" for term, (total, after) in zip(terms[1:], pairwise(accumulate(terms)), strict=True))
    return f"{''.join(steps)}#{prompt.answer}"


class WarmStart:
    """Model, optimizer and the stream of training prompts."""

    def __init__(self, seed: int) -> None:
        self.task = Arithmetic(seed=seed)
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

    def mixture(self, prompt: Prompt) -> str:
        return f"#{prompt.answer}" if self.rng.random() < DIRECT else scratchpad(prompt)

    def accuracy_on_fresh(self, count: int) -> float:
        return accuracy(self.model, self.tokenizer, self.task, self._prompts(count))

    def _prompts(self, count: int) -> list[Prompt]:
        self.ordinal += count
        return [self.task.prompt(ordinal, "train") for ordinal in range(self.ordinal - count, self.ordinal)]

    def _batch(self, pairs: list[tuple[Prompt, str]]) -> tuple[torch.Tensor, torch.Tensor]:
        """Right-padded ids and labels; labels are -100 on prompts and padding."""
        rows = [(self.tokenizer.encode(p.content), [*self.tokenizer.encode(text), EOS]) for p, text in pairs]
        width = max(len(prompt) + len(answer) for prompt, answer in rows)
        ids_BT = torch.full((len(rows), width), PAD)
        labels_BT = torch.full((len(rows), width), -100)
        for row, (prompt, answer) in enumerate(rows):
            end = len(prompt) + len(answer)
            ids_BT[row, :end] = torch.tensor(prompt + answer)
            labels_BT[row, len(prompt) : end] = torch.tensor(answer)
        return ids_BT, labels_BT


@torch.no_grad()
def complete(model: Any, tokenizer: Any, prompts: list[Prompt]) -> list[tuple[str, bool]]:
    """One completion per prompt at temperature 1, and whether it ended by itself."""
    inputs = tokenizer([p.content for p in prompts], return_tensors="pt", padding=True, return_token_type_ids=False)
    ids_BT = model.generate(**inputs, do_sample=True, temperature=1.0, top_k=0, top_p=1.0, max_new_tokens=MAX_NEW_TOKENS)
    completions_BT = ids_BT[:, inputs["input_ids"].shape[1] :]
    return [(tokenizer.decode(ids_T, skip_special_tokens=True), EOS in ids_T) for ids_T in completions_BT]


def accuracy(model: Any, tokenizer: Any, task: Arithmetic, prompts: list[Prompt]) -> float:
    """Share of prompts answered right by one sampled completion each."""
    completions = complete(model, tokenizer, prompts)
    return sum(task.reward(p, text) for p, (text, ended) in zip(prompts, completions, strict=True) if ended) / len(prompts)


def split_accuracy(model: Any, tokenizer: Any, split: Split, count: int) -> float:
    task = Arithmetic()
    chunks = [[task.prompt(ordinal, split) for ordinal in range(start, start + 128)] for start in range(0, count, 128)]
    return sum(accuracy(model, tokenizer, task, chunk) for chunk in chunks) / len(chunks)


def build(seed: int, say: Callable[[str], None]) -> WarmStart:
    """Both phases. Raises RuntimeError when the skill is not reached in `MAX_SKILL_STEPS`."""
    work, started, skill = WarmStart(seed), time.monotonic(), 0.0
    while skill < SKILL:
        if work.step == MAX_SKILL_STEPS:
            raise RuntimeError(f"accuracy {skill:.2f} after {work.step} steps, below {SKILL}: try another --seed")
        for _ in range(CHECK_EVERY):
            loss = work.train(scratchpad, SKILL_LR * min(1.0, (work.step + 1) / WARM_UP_STEPS))
        skill = work.accuracy_on_fresh(256)
        say(f"scratchpads: step {work.step:4d}  loss {loss:.3f}  accuracy {skill:.3f}  {time.monotonic() - started:.0f} s")
    for step in range(MIXTURE_STEPS):
        loss = work.train(work.mixture, MIXTURE_LR * (1 - step / MIXTURE_STEPS))
    say(f"mixture: step {work.step:4d}  loss {loss:.3f}  {time.monotonic() - started:.0f} s")
    return work


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=tiny_path(), help="directory to write (default: where the package keeps it)")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    torch.set_num_threads(1)
    transformers.utils.logging.disable_progress_bar()
    work = build(options.seed, lambda line: print(line, flush=True))
    model = work.model.to(torch.bfloat16)
    model.save_pretrained(options.out)
    work.tokenizer.save_pretrained(options.out)
    print(f"held-out accuracy at temperature 1: {split_accuracy(model.float(), work.tokenizer, 'eval', 1024):.3f}")
    (options.out / "model.safetensors").chmod(0o644)
    print(f"wrote {options.out} ({sum(f.stat().st_size for f in options.out.iterdir()) / 1e6:.2f} MB)")


if __name__ == "__main__":
    main()
