"""The load plan on a small stand-in for an engine: what is recorded, what is refused, and that stage → apply is a full copy."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from itertools import pairwise
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor, nn

from monarch_rl.weights.delta import apply_delta, element_size, encode
from monarch_rl.weights.plan import LoadPlan, PlanError, apply, layout, record, record_whole, region_bytes, shard_rows, stage

VOCABULARY, PADDED, HIDDEN, HEADS, KV, EXPERTS = 7, 16, 6, 4, 2, 3

SHAPES: dict[str, tuple[int, ...]] = {
    "embed.weight": (VOCABULARY, HIDDEN),
    "q.weight": (HEADS, HIDDEN),
    "k.weight": (KV, HIDDEN),
    "v.weight": (KV, HIDDEN),
    "o.weight": (HIDDEN, HEADS),
    "norm.weight": (HIDDEN,),
    "q.bias": (HEADS,),
    "k.bias": (KV,),
    "v.bias": (KV,),
    "experts.down": (EXPERTS, HIDDEN, 5),
    "one.weight": (1, HIDDEN),
}


class Embedding(nn.Module):
    """A vocabulary padded with rows that no checkpoint has, as vLLM marks it."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.full((PADDED, HIDDEN), -1.0))
        self.shard_indices = SimpleNamespace(num_org_elements=VOCABULARY)


class Engine(nn.Module):
    """Fuses q, k and v; takes the right half of `o` as a tensor-parallel rank does, and each expert on its own."""

    def __init__(self, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.embed = Embedding()
        self.head = self.embed
        self.qkv = nn.Linear(HIDDEN, HEADS + 2 * KV)
        self.o = nn.Parameter(torch.zeros(HIDDEN, HEADS // 2))
        self.norm = nn.Parameter(torch.zeros(HIDDEN))
        self.down = nn.Parameter(torch.zeros(EXPERTS, HIDDEN, 5))
        self.one = nn.Parameter(torch.zeros(1, HIDDEN))
        self.to(dtype)

    def load_weights(self, tensors: Iterable[tuple[str, Tensor]]) -> None:
        for name, tensor in tensors:
            self.load(name, tensor)

    def load(self, name: str, tensor: Tensor) -> None:
        part, _, kind = name.partition(".")
        if part in "qkv":
            start, rows = {"q": (0, HEADS), "k": (HEADS, KV), "v": (HEADS + KV, KV)}[part]
            getattr(self.qkv, kind).data.narrow(0, start, rows).copy_(tensor)
        elif part == "embed":
            self.embed.weight[:VOCABULARY].data.copy_(tensor)
            self.embed.weight[VOCABULARY:].data.fill_(0)
        elif part == "o":
            self.o.data.copy_(tensor.narrow(1, HEADS // 2, HEADS // 2))
        elif part == "experts":
            for expert in range(EXPERTS):
                self.down.data[expert].copy_(tensor[expert])
        else:
            getattr(self, part).data.copy_(tensor)


def values(seed: int = 0) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {name: torch.randn(shape, generator=generator) for name, shape in SHAPES.items()}


def shards(tensors: dict[str, Tensor], rank: int, world: int) -> dict[str, Tensor]:
    return {name: tensor[slice(*shard_rows(tensor.shape[0], rank, world))] for name, tensor in tensors.items()}


def transfer(plan: LoadPlan, views: list[Tensor], tensors: dict[str, Tensor], world: int) -> None:
    """Stage on every rank, apply once."""
    layouts = [layout(plan, rank, world) for rank in range(world)]
    regions = [torch.full((region_bytes(blocks),), 255, dtype=torch.uint8) for blocks in layouts]
    for rank, (blocks, region) in enumerate(zip(layouts, regions, strict=True)):
        stage(blocks, plan, shards(tensors, rank, world), region, rank, world)
    apply(plan, layouts, regions, views)


def test_recording_lists_the_loaders_copies_and_changes_nothing() -> None:
    engine = Engine()
    before = {name: parameter.clone() for name, parameter in engine.named_parameters()}
    plan, views = record(engine, SHAPES)
    pieces = {piece.name: piece for piece in plan.pieces}
    assert len(plan.pieces) == len(views) == len(SHAPES) - 1 + EXPERTS
    assert (pieces["k.weight"].rows, pieces["k.weight"].cols) == (KV, HIDDEN)
    assert (pieces["o.weight"].rows, pieces["o.weight"].col0, pieces["o.weight"].cols) == (HIDDEN, HEADS // 2, HEADS // 2)
    assert (pieces["norm.weight"].rows, pieces["norm.weight"].cols) == (HIDDEN, 1)
    assert [(p.row0, p.rows, p.cols) for p in plan.pieces if p.name == "experts.down"] == [(e, 1, HIDDEN * 5) for e in range(EXPERTS)]
    for name, parameter in engine.named_parameters():
        kept = slice(0, VOCABULARY if name == "embed.weight" else None)
        assert torch.equal(parameter[kept], before[name][kept]), name


@pytest.mark.parametrize("world", [1, 2, 3, 5, 11])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_stage_then_apply_equals_a_full_load(world: int, dtype: torch.dtype) -> None:
    """Uneven shards everywhere (7 rows over 2, 3, 5), and empty ones (1 row over 2; 7 rows over 11)."""
    expected, engine, tensors = Engine(dtype), Engine(dtype), values()
    with torch.no_grad():
        expected.load_weights(tensors.items())
    plan, views = record(engine, SHAPES)
    transfer(plan, views, tensors, world)
    for (name, want), got in zip(expected.named_parameters(), engine.parameters(), strict=True):
        assert torch.equal(got, want), name


def test_a_tied_embedding_arrives_at_both_ends() -> None:
    """Case 36: nothing keeps a clone of the head."""
    engine, tensors = Engine(), values()
    plan, views = record(engine, SHAPES)
    transfer(plan, views, tensors, 2)
    assert torch.equal(engine.head.weight[:VOCABULARY], tensors["embed.weight"])
    assert not engine.embed.weight[VOCABULARY:].any()


def test_a_delta_of_the_embedding_alone_arrives_at_both_ends() -> None:
    """Case 36: what a delta changes is written as a whole image is."""
    engine, tensors = Engine(), values()
    plan, views = record(engine, SHAPES)
    blocks = layout(plan, 0, 1)
    old, new = (torch.zeros(region_bytes(blocks), dtype=torch.uint8) for _ in range(2))
    stage(blocks, plan, tensors, old, 0, 1)
    tensors["embed.weight"][3, 2] += 1
    stage(blocks, plan, tensors, new, 0, 1)
    delta = encode(old, new, element_size(plan), len(new))
    assert delta is not None
    apply_delta(delta, old, element_size(plan))
    apply(plan, [blocks], [old], views)
    assert torch.equal(engine.head.weight[:VOCABULARY], tensors["embed.weight"])


@pytest.mark.parametrize(("rows", "world"), [(7, 2), (7, 3), (2, 3), (1, 4), (9, 3), (10, 4)])
def test_shards_follow_torch_chunk(rows: int, world: int) -> None:
    chunks = list(torch.arange(rows).chunk(world))
    sizes = [len(chunk) for chunk in chunks] + [0] * (world - len(chunks))
    cuts = [shard_rows(rows, rank, world) for rank in range(world)]
    assert [high - low for low, high in cuts] == sizes
    assert cuts[0][0] == 0
    assert all(left[1] == right[0] for left, right in pairwise(cuts))


def test_blocks_are_aligned_and_disjoint() -> None:
    plan, _ = record(Engine(torch.bfloat16), SHAPES)
    blocks = layout(plan, 1, 3)
    assert all(block.offset % 64 == 0 for block in blocks)
    assert all(left.offset + left.nbytes <= right.offset for left, right in pairwise(blocks))
    assert region_bytes(blocks) >= blocks[-1].offset + blocks[-1].nbytes
    assert region_bytes(layout(plan, 10, 11)) == 0


def test_digest_tells_layouts_apart() -> None:
    plan, _ = record(Engine(), SHAPES)
    again, _ = record(Engine(), SHAPES)
    other, _ = record(Engine(torch.bfloat16), SHAPES)
    assert plan.digest == again.digest != other.digest


def test_a_shard_of_the_wrong_size_is_refused() -> None:
    plan, _ = record(Engine(), SHAPES)
    blocks = layout(plan, 0, 2)
    with pytest.raises(PlanError, match=r"rank 0 of 2: embed.weight has shape \(7, 6\), not \(4, 6\)"):
        stage(blocks, plan, values(), torch.zeros(region_bytes(blocks), dtype=torch.uint8), 0, 2)


def engine_that(loads: Callable[[Engine, str, Tensor], None]) -> Engine:
    engine = Engine()
    engine.load = lambda name, tensor: loads(engine, name, tensor)  # type: ignore[method-assign]
    return engine


@pytest.mark.parametrize(
    ("change", "op"),
    [
        (lambda tensor: tensor * 2, "mul"),
        (lambda tensor: tensor.add_(1), "add_"),
        (lambda tensor: tensor.clone(), "clone"),
        (lambda tensor: torch.cat([tensor, tensor])[: tensor.shape[0]], "cat"),
        (lambda tensor: torch.full_like(tensor, 1.0), "full_like"),
        (lambda tensor: tensor.to(torch.float64), "_to_copy"),
        (lambda tensor: tensor.view(torch.int32), "view"),
    ],
)
def test_a_loader_that_computes_is_refused(change: Callable[[Tensor], Tensor], op: str) -> None:
    engine = engine_that(lambda self, name, tensor: Engine.load(self, name, change(tensor) if name == "norm.weight" else tensor))
    with pytest.raises(PlanError, match=rf"more than copy norm\.weight.*{op}"):
        record(engine, SHAPES)


def test_a_transposed_copy_is_refused() -> None:
    engine = engine_that(lambda self, name, tensor: Engine.load(self, name, tensor.t() if name == "q.weight" else tensor))
    with pytest.raises(PlanError, match=r"a part of q\.weight \(6, 4\) that is no rectangle"):
        record(engine, {**SHAPES, "q.weight": (HIDDEN, HEADS)})


def test_a_run_across_row_ends_is_refused() -> None:
    engine = engine_that(
        lambda self, name, tensor: Engine.load(self, name, tensor.view(-1)[3 : 3 + HIDDEN] if name == "norm.weight" else tensor)
    )
    with pytest.raises(PlanError, match="no rectangle"):
        record(engine, {**SHAPES, "norm.weight": (3, 4)})


def test_uncovered_parameters_are_named() -> None:
    missing = {name: shape for name, shape in SHAPES.items() if name not in ("v.weight", "norm.weight")}
    with pytest.raises(PlanError, match=r"no trainer tensor fills all of norm, qkv\.weight$"):
        record(Engine(), missing)


def test_only_a_marked_vocabulary_may_have_rows_of_its_own() -> None:
    engine = Engine()
    engine.embed.shard_indices = None
    with pytest.raises(PlanError, match=r"embed\.weight"):
        record(engine, SHAPES)


def test_ignored_tensors_are_named() -> None:
    engine = engine_that(lambda self, name, tensor: None if name == "extra" else Engine.load(self, name, tensor))
    with pytest.raises(PlanError, match="ignores extra"):
        record(engine, {**SHAPES, "extra": (2, 2)})


def test_emptied_parameters_are_refused() -> None:
    """Engines on CPU pack weights elsewhere and leave an empty parameter: a copy into it would do nothing."""
    engine = Engine()
    engine.register_parameter("packed", nn.Parameter(torch.empty(0)))
    with pytest.raises(PlanError, match="packed"):
        record(engine, SHAPES)


def test_copies_outside_the_model_are_refused() -> None:
    aside = torch.zeros(HIDDEN)
    engine = engine_that(lambda self, name, tensor: aside.copy_(tensor) if name == "norm.weight" else Engine.load(self, name, tensor))
    with pytest.raises(PlanError, match="no parameter"):
        record(engine, SHAPES)


def test_scalars_are_refused() -> None:
    with pytest.raises(PlanError, match="scale"):
        record(Engine(), {**SHAPES, "scale": ()})


def computing() -> Engine:
    """Transposes q and adds one to the norm."""

    def load(self: Engine, name: str, tensor: Tensor) -> None:
        Engine.load(self, name, tensor.t() if name == "q.weight" else tensor + 1 if name == "norm.weight" else tensor)

    return engine_that(load)


TRANSPOSED = {**SHAPES, "q.weight": (HIDDEN, HEADS)}


def whole(engine: Engine, shapes: dict[str, tuple[int, ...]]) -> tuple[LoadPlan, list[Tensor], Callable[[], object]]:
    return record_whole(engine, lambda tensors: engine.load_weights(tensors.items()), shapes, "it computes")


@pytest.mark.parametrize("world", [1, 2, 3])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_loader_that_computes_is_given_whole_tensors(world: int, dtype: torch.dtype) -> None:
    expected, engine = computing().to(dtype), computing().to(dtype)
    plan, views, load = whole(engine, TRANSPOSED)
    assert plan.loader
    assert plan.digest != LoadPlan(plan.pieces).digest
    for seed in range(2):
        tensors = values(seed) | {"q.weight": torch.randn(HIDDEN, HEADS)}
        with torch.no_grad():
            expected.load_weights((name, tensor.to(dtype)) for name, tensor in tensors.items())
            transfer(plan, views, tensors, world)
            load()
        for (name, want), got in zip(expected.named_parameters(), engine.parameters(), strict=True):
            assert torch.equal(got, want), name


def test_what_a_loader_of_whole_tensors_leaves_out_is_named() -> None:
    with pytest.raises(PlanError, match=r"no trainer tensor fills all of norm, qkv\.weight$"):
        whole(computing(), {name: shape for name, shape in TRANSPOSED.items() if name not in ("v.weight", "norm.weight")})
    engine = engine_that(lambda self, name, tensor: None if name == "extra" else Engine.load(self, name, tensor))
    with pytest.raises(PlanError, match="ignores extra"):
        whole(engine, {**SHAPES, "extra": (2, 2)})
    engine = Engine()
    engine.register_parameter("packed", nn.Parameter(torch.empty(0)))
    with pytest.raises(PlanError, match="packed"):
        whole(engine, SHAPES)
    with pytest.raises(PlanError, match="scale"):
        whole(Engine(), {**SHAPES, "scale": ()})


def test_the_console_hears_what_travels() -> None:
    plan, _ = record(Engine(), SHAPES)
    assert plan.summary("tcp") == "weights travel over tcp"
    assert LoadPlan(plan.pieces, base=plan).summary("tcp") == "adapters travel over tcp"
    said = "weights travel over tcp; at each swap this model's own loader takes them, which is slower, for it computes"
    assert whole(computing(), TRANSPOSED)[0].summary("tcp") == said
