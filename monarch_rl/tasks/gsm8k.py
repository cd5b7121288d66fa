"""GSM8K: grade-school word problems with one number as the answer (Cobbe et al. 2021, arXiv:2110.14168)."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from decimal import Decimal
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Literal

from monarch_rl.config import UserError
from monarch_rl.tasks import Task, held_out, row_of
from monarch_rl.types import Prompt, Split

INSTRUCTION = "Reason step by step, then give the final answer as a number after ####."
NUMBER = re.compile(r"(?<!\d)-?(?:\d[\d,]*(?:\.\d+)?|\.\d+)")
Rows = list[dict[str, Any]]
Verifier = Callable[[str, Decimal], bool]


class GSM8K(Task):
    """Rows of `question` and `answer` (whose number follows `####`), asked as a chat message, one pass per epoch.

    `path` is a hub name, a folder, or a .jsonl or .parquet file. Hub data sets and folders have `train` and `test` splits (in a folder,
    train.jsonl and test.jsonl will do); of a single file, `eval_path` gives the held-out rows, or else one question in eight is held out.
    """

    name = "gsm8k"
    truncated_reward = 0.0

    def __init__(
        self,
        seed: int = 0,
        path: str = "openai/gsm8k",
        subset: str | None = None,
        eval_path: str | None = None,
        reward: Literal["number", "math_verify"] = "number",
    ) -> None:
        """`reward`: `number` compares the last number, `math_verify` any expression that equals the answer."""
        if reward not in VERIFIERS:
            raise UserError(f"task_args.reward={reward}: must be one of {', '.join(VERIFIERS)}")
        self.seed = seed
        self._equals = VERIFIERS[reward]()
        self.rows: dict[Split, Rows] = load_rows(path, subset, eval_path)
        if not self.rows["train"]:
            raise UserError(f"task_args.path={path}: the dataset has no training rows")
        if missing := {"question", "answer"} - self.rows["train"][0].keys():
            raise UserError(f"task_args.path={path}: rows have no column {' and no column '.join(sorted(missing))}")
        self.size = len(self.rows["train"])
        self.eval_size = len(self.rows["eval"])

    def prompt(self, ordinal: int, split: Split) -> Prompt:
        rows = self.rows[split]
        row = rows[row_of(ordinal, len(rows), self.seed, split)]
        messages = [{"role": "user", "content": f"{row['question']}\n{INSTRUCTION}"}]
        return Prompt(ordinal, messages, answer=final_number(row["answer"]), task=self.name)

    def reward(self, prompt: Prompt, completion: str) -> float:
        """1 if the completion's final number (with `math_verify`: its final expression) equals the answer, else 0."""
        return float(prompt.answer is not None and self._equals(completion, prompt.answer))


def final_number(text: str) -> Decimal | None:
    """The last number after the last `####`, or the last number of a text without `####`; `1,234.50` is 1234.5."""
    numbers = NUMBER.findall(text.rpartition("####")[2])
    return Decimal(numbers[-1].replace(",", "")) if numbers else None


def numeric() -> Verifier:
    return lambda completion, answer: final_number(completion) == answer


def math_verify() -> Verifier:
    """Stops endless expressions by signals, so it works on a main thread only, as the reward has one; imported there, at the first use."""
    if find_spec("math_verify") is None:
        raise UserError("task_args.reward=math_verify needs the package math-verify: pip install --no-deps -r requirements/envs.txt")

    def equals(completion: str, answer: Decimal) -> bool:
        from math_verify import parse, verify

        return bool(verify(parse(str(answer)), parse(completion.rpartition("####")[2])))

    return equals


VERIFIERS = {"number": numeric, "math_verify": math_verify}


def load_rows(path: str, subset: str | None, eval_path: str | None) -> dict[Split, Rows]:
    """Training and held-out rows; see `GSM8K`. Raises UserError naming the path."""
    if all((Path(path) / f"{split}.jsonl").is_file() for split in ("train", "test")):
        return {"train": _read_file(f"{path}/train.jsonl"), "eval": _read_file(f"{path}/test.jsonl")}
    if Path(path).suffix not in (".jsonl", ".parquet"):
        name = subset or (None if Path(path).is_dir() else "main")
        return {"train": _load(path, path, name, split="train"), "eval": _load(path, path, name, split="test")}
    rows = _read_file(path)
    if eval_path is not None:
        return {"train": rows, "eval": _read_file(eval_path)}
    return {"train": [r for r in rows if not held_out(r["question"])], "eval": [r for r in rows if held_out(r["question"])]}


def _read_file(path: str) -> Rows:
    if not Path(path).is_file():
        raise UserError(f"task_args.path={path}: there is no such file")
    if path.endswith(".parquet"):
        return _load(path, "parquet", data_files=path, split="train")
    with open(path, encoding="utf-8") as lines:
        return [json.loads(line) for line in lines if line.strip()]


def _load(path: str, *args: str | None, **options: str) -> Rows:
    try:
        import datasets
    except ImportError as error:
        raise UserError(f"task_args.path={path} needs the package datasets: pip install --no-deps -r requirements/envs.txt") from error
    datasets.disable_progress_bars()
    try:
        return list(datasets.load_dataset(*args, **options))
    except (OSError, ValueError, datasets.exceptions.DatasetsError) as error:
        raise UserError(f"task_args.path={path}: {str(error).strip().splitlines()[0]}") from error
