"""Memory and time of log-probabilities and their loss for one long row, against the naive `log_softmax` over all logits.

The row is that of a large vocabulary: 4,096 tokens of hidden size 1,024 and 151,936 logits each, float32. Each measurement is a
process of its own: forward, a policy loss, backward. The sides take turns, and a ratio is that of two neighbours in time. Memory is the
peak on top of what hidden states and head take; the gradient of the head, which both sides need, is part of it.
"""

from __future__ import annotations

import multiprocessing
import re
import time
from argparse import Namespace
from multiprocessing.pool import Pool
from pathlib import Path
from typing import NamedTuple

from benchmarks.common import Row, arguments, median, report, spread, table

CHUNKED, NAIVE = "token_logprobs", "log_softmax"


class Cost(NamedTuple):
    """Of one side, once."""

    peak_bytes: int
    forward_s: float
    backward_s: float
    cpu_s: float
    """Of all threads, forward and backward: what a busy machine changes least."""

    @property
    def seconds(self) -> float:
        return self.forward_s + self.backward_s


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--tokens", type=int, default=4096, help="of the row (4096)")
    parser.add_argument("--vocabulary", type=int, default=151_936, help="logits of a token (151936)")
    parser.add_argument("--hidden", type=int, default=1024, help="hidden size (1024)")
    parser.add_argument("--chunk", type=int, help="trainer.logprob_chunk (its default)")
    parser.add_argument("--threads", type=int, default=0, help="of torch; 0: as many as it takes (0)")
    parser.add_argument("--turns", type=int, default=3, help="of each side (3)")
    options = parser.parse_args()
    costs: dict[str, list[Cost]] = {CHUNKED: [], NAIVE: []}
    for _ in range(options.turns):
        for side, taken in costs.items():
            taken.append(in_a_process(side, options))
    show(costs, options)


def in_a_process(side: str, options: Namespace) -> Cost:
    with Pool(1, context=multiprocessing.get_context("spawn")) as pool:
        return pool.apply(measure, (side, options))


def measure(side: str, options: Namespace) -> Cost:
    import torch

    from monarch_rl.config import TrainerConfig

    if options.threads:
        torch.set_num_threads(options.threads)
    torch.manual_seed(0)
    head = torch.nn.Linear(options.hidden, options.vocabulary, bias=False)
    hidden_ND = torch.randn(options.tokens, options.hidden, requires_grad=True)
    targets_N, temperatures_N = torch.randint(options.vocabulary, (options.tokens,)), torch.ones(options.tokens)
    advantages_N = torch.randn(options.tokens)
    before = resident("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")  # the peak starts anew
    start, cpu = time.perf_counter(), time.process_time()
    if side == NAIVE:
        logprobs_N = head(hidden_ND).log_softmax(-1).gather(-1, targets_N[:, None]).squeeze(-1)
    else:
        from monarch_rl.algorithms.logprobs import token_logprobs

        chunk = options.chunk or TrainerConfig().logprob_chunk
        logprobs_N, _ = token_logprobs(hidden_ND, targets_N, head, temperatures_N, chunk)
    middle = time.perf_counter()
    (-advantages_N * (logprobs_N - logprobs_N.detach()).exp()).mean().backward()
    return Cost(resident("VmHWM") - before, middle - start, time.perf_counter() - middle, time.process_time() - cpu)


def resident(key: str) -> int:
    """Bytes of this process's memory: `VmRSS` now, `VmHWM` at its peak."""
    found = re.search(rf"{key}:\s+(\d+) kB", Path("/proc/self/status").read_text())
    assert found, key
    return int(found[1]) * 1024


def show(costs: dict[str, list[Cost]], options: Namespace) -> None:
    sides = list(zip(costs[CHUNKED], costs[NAIVE], strict=True))
    memory = [ours.peak_bytes / naive.peak_bytes for ours, naive in sides]
    seconds = [ours.seconds / naive.seconds for ours, naive in sides]
    cpu = [ours.cpu_s / naive.cpu_s for ours, naive in sides]
    rows = [
        (side, *(spread(values) for values in zip(*((c.peak_bytes / 2**30, c.forward_s, c.backward_s, c.cpu_s) for c in of), strict=True)))
        for side, of in costs.items()
    ]
    text = table(("side", "peak GiB", "forward s", "backward s", "CPU-seconds"), rows)
    text += f"\n\nof log_softmax: memory {spread(memory, 3)}, time {spread(seconds)}, CPU-seconds {spread(cpu)}"
    shape = {name: getattr(options, name) for name in ("tokens", "vocabulary", "hidden", "chunk", "threads")}
    turns = {side: [cost._asdict() for cost in of] for side, of in costs.items()}
    result: Row = {"memory_ratio": median(memory), "time_ratio": median(seconds), "cpu_ratio": median(cpu), "shape": shape, "turns": turns}
    report(options.out, text, result)


if __name__ == "__main__":
    main()
