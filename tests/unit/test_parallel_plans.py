"""From N trainer ranks to the M ranks of a generator: each has what a full load would have given it, and nothing travels twice in vain."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor, nn

from monarch_rl.weights.plan import LoadPlan, layout, record, region_bytes
from monarch_rl.weights.slots import fingerprints
from tests.unit.test_plan import shards, transfer

VOCABULARY, PADDED, HIDDEN, HEADS, KV, WIDE = 7, 16, 6, 4, 2, 12

SHAPES: dict[str, tuple[int, ...]] = {
    "embed.weight": (VOCABULARY, HIDDEN),
    **{f"{part}.weight": (rows, HIDDEN) for part, rows in (("q", HEADS), ("k", KV), ("v", KV))},
    **{f"{part}.bias": (rows,) for part, rows in (("q", HEADS), ("k", KV), ("v", KV))},
    "o.weight": (HIDDEN, HEADS),
    "o.bias": (HIDDEN,),
    "gate.weight": (WIDE, HIDDEN),
    "up.weight": (WIDE, HIDDEN),
    "down.weight": (HIDDEN, WIDE),
    "norm.weight": (HIDDEN,),
}
RANKS = (1, 2, 4)
"""Of the generator: with fewer, as many and twice as many as key-value heads."""


class Linear(nn.Module):
    def __init__(self, rows: int, columns: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.full((rows, columns), -1.0))
        self.bias = nn.Parameter(torch.full((rows,), -1.0))


class Rank(nn.Module):
    """Cuts as vLLM's loaders do for one of several ranks: heads and feed-forward rows shared, key-value heads shared or repeated, the
    columns of what follows them shared and its bias repeated, the vocabulary padded and shared, its head tied to it."""

    def __init__(self, rank: int, ranks: int) -> None:
        super().__init__()
        self.rank, self.ranks = rank, ranks
        self.heads, self.kv, self.repeats = HEADS // ranks, max(1, KV // ranks), max(1, ranks // KV)
        self.embed = nn.Module()
        self.embed.weight = nn.Parameter(torch.full((PADDED // ranks, HIDDEN), -1.0))
        self.first = min(rank * PADDED // ranks, VOCABULARY)
        self.tokens = min((rank + 1) * PADDED // ranks, VOCABULARY) - self.first
        self.embed.shard_indices = SimpleNamespace(num_org_elements=self.tokens)
        self.qkv = Linear(self.heads + 2 * self.kv, HIDDEN)
        self.o = Linear(HIDDEN, self.heads)
        self.gate_up = nn.Parameter(torch.full((2 * WIDE // ranks, HIDDEN), -1.0))
        self.down = nn.Parameter(torch.full((HIDDEN, WIDE // ranks), -1.0))
        self.norm = nn.Parameter(torch.full((HIDDEN,), -1.0))

    def load_weights(self, tensors: Iterable[tuple[str, Tensor]]) -> None:
        for name, tensor in tensors:
            part, _, kind = name.partition(".")
            if part in "qkv":
                self.load_heads(part, kind, tensor)
            elif part == "embed":
                self.embed.weight[: self.tokens].data.copy_(tensor.narrow(0, self.first, self.tokens))
                self.embed.weight[self.tokens :].data.fill_(0)
            elif part in ("gate", "up"):
                own = WIDE // self.ranks
                self.gate_up.data.narrow(0, own * (part == "up"), own).copy_(tensor.narrow(0, self.rank * own, own))
            elif name in ("o.weight", "down.weight"):
                into = self.o.weight if part == "o" else self.down
                into.data.copy_(tensor.narrow(1, self.rank * into.shape[1], into.shape[1]))
            else:
                (self.o.bias if part == "o" else self.norm).data.copy_(tensor)

    def load_heads(self, part: str, kind: str, tensor: Tensor) -> None:
        start, own = {"q": (0, self.heads), "k": (self.heads, self.kv), "v": (self.heads + self.kv, self.kv)}[part]
        source = self.rank if part == "q" else self.rank // self.repeats
        getattr(self.qkv, kind).data.narrow(0, start, own).copy_(tensor.narrow(0, source * own, own))


def values() -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(0)
    return {name: torch.randn(shape, generator=generator) for name, shape in SHAPES.items()}


def plans(ranks: int) -> list[LoadPlan]:
    return [record(Rank(rank, ranks), SHAPES)[0] for rank in range(ranks)]


@pytest.mark.parametrize("ranks", RANKS)
@pytest.mark.parametrize("trainers", [1, 2, 3, 5, 11])
def test_every_rank_has_what_a_full_load_gives_it(trainers: int, ranks: int) -> None:
    """Uneven and empty shards on one side (7 rows over 11), a rank without a token of the vocabulary on the other (7 of 16 over 4)."""
    tensors = values()
    for rank in range(ranks):
        expected, engine = Rank(rank, ranks), Rank(rank, ranks)
        with torch.no_grad():
            expected.load_weights(tensors.items())
        plan, views = record(engine, SHAPES)
        transfer(plan, views, tensors, trainers)
        for (name, want), got in zip(expected.named_parameters(), engine.parameters(), strict=True):
            assert torch.equal(got, want), name
        assert fingerprints(plan, views) == fingerprints(plan, [piece.cut(tensors[piece.name]) for piece in plan.pieces])


@pytest.mark.parametrize("ranks", RANKS)
@pytest.mark.parametrize("trainers", [1, 2, 3])
def test_what_travels_is_one_copy_and_what_every_rank_needs(trainers: int, ranks: int) -> None:
    """Norms, biases added after a sum over ranks, and key-value heads of which there are fewer than ranks; nothing else."""
    moved = Counter[str]()
    for plan in plans(ranks):
        for trainer in range(trainers):
            blocks = layout(plan, trainer, trainers)
            for block in blocks:
                moved[plan.pieces[block.piece].name] += block.nbytes
            assert region_bytes(blocks) < sum(block.nbytes + 64 for block in blocks) + 64
    copy = {name: 4 * torch.Size(shape).numel() for name, shape in SHAPES.items()}
    repeated = {name: ranks for name in ("norm.weight", "o.bias")} | {name: max(1, ranks // KV) for name in SHAPES if name[0] in "kv"}
    assert moved == {name: nbytes * repeated.get(name, 1) for name, nbytes in copy.items()}


def test_no_rank_reads_more_of_a_trainer_than_its_own_rows() -> None:
    """A shard is staged as it lies: no trainer needs rows of another."""
    for plan in plans(2):
        for trainer in range(3):
            own = shards(values(), trainer, 3)
            for block in layout(plan, trainer, 3):
                assert block.rows <= len(own[plan.pieces[block.piece].name])
