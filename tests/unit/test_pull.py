"""From a ring's slots to live parameters within one process: what is proven on the way, and what is compared at the end."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from monarch_rl.model_config import LoraConfig
from monarch_rl.models import PolicyModel, adapter_weights, add_adapters, local_shards
from monarch_rl.types import Version
from monarch_rl.weights import adapters, transport
from monarch_rl.weights import pull as pull_module
from monarch_rl.weights import slots as slots_module
from monarch_rl.weights.board import Board, Offer
from monarch_rl.weights.plan import LoadPlan, Piece, shard_rows
from monarch_rl.weights.pull import Puller, RejectedPull, Target, WeightsDiffer, common
from monarch_rl.weights.slots import Ring, most_delta
from tests.batches import small_model

PLAN = LoadPlan(
    (
        Piece("embed", (33, 5), 0, 33, 0, 5, "bfloat16"),
        Piece("qkv", (12, 6), 0, 8, 0, 6, "bfloat16"),
        Piece("qkv", (12, 6), 8, 4, 0, 6, "bfloat16"),
        Piece("norm", (7,), 0, 7, 0, 1, "float32"),
    )
)
SHAPES = {piece.name: piece.shape for piece in PLAN.pieces}


@pytest.fixture(autouse=True)
def local_transport(monkeypatch: pytest.MonkeyPatch) -> None:
    """Registered memory is read by a plain copy."""

    async def read(pieces: list[tuple[Tensor, Any]], *, deadline_s: int) -> None:
        for here, there in pieces:
            here.copy_(there)

    monkeypatch.setattr(transport, "CHUNK_BYTES", 128)
    monkeypatch.setattr(transport, "register", lambda host, chunk=0: [host[piece] for piece in transport.cut(len(host), chunk)])
    monkeypatch.setattr(transport, "read", read)


class Trainers:
    """Rings of all ranks, and weights that follow from the version."""

    def __init__(self, world: int, slots: int = 3, *, plans: Sequence[LoadPlan] = (PLAN,), deltas: bool = False) -> None:
        self.boards = [Board() for _ in range(world)]
        sizes = {"world": world, "slots": slots}
        self.rings = [Ring(plans, rank=rank, board=board, deltas=deltas, **sizes) for rank, board in enumerate(self.boards)]
        self.slots = [ring.register() for ring in self.rings]
        self.offers: list[Offer] = [Offer({})] * world

    async def publish(self, step: int) -> Target:
        """Seal `step` on every rank."""
        for rank, (ring, board) in enumerate(zip(self.rings, self.boards, strict=True)):
            sealed = asyncio.Event()
            board.listen(self._heard(rank, step, sealed))
            rows = {name: slice(*shard_rows(shape[0], rank, len(self.rings))) for name, shape in SHAPES.items()}
            ring.publish({name: whole[rows[name]].contiguous() for name, whole in weights(step).items()}, Version(0, step))
            await sealed.wait()
        target = common(self.offers)
        assert target is not None
        return target

    def _heard(self, rank: int, step: int, sealed: asyncio.Event) -> Callable[[Offer], None]:
        def hear(offer: Offer) -> None:
            if offer.version.step == step:
                self.offers[rank] = offer
                sealed.set()

        return hear


def weights(step: int) -> dict[str, Tensor]:
    """A few elements of every tensor change at each step."""
    generator = torch.Generator().manual_seed(0)
    made = {name: torch.randn(shape, generator=generator) for name, shape in SHAPES.items()}
    for _ in range(step):
        for whole in made.values():
            whole.view(-1)[torch.randint(whole.numel(), (2,), generator=generator)] += 1
    return made


def empty() -> list[Tensor]:
    return [torch.zeros(piece.rows, piece.cols, dtype=getattr(torch, piece.dtype)) for piece in PLAN.pieces]


@pytest.mark.parametrize("world", [1, 2, 3, 8])
async def test_what_is_pulled_is_what_was_published(world: int) -> None:
    trainers, live = Trainers(world), empty()
    puller = Puller(PLAN, trainers.slots)
    for step in range(5):
        await puller.pull(await trainers.publish(step))
        puller.write(live)
        puller.compare(live)
        assert all(torch.equal(view, piece.cut(weights(step)[piece.name])) for piece, view in zip(PLAN.pieces, live, strict=True))


@pytest.mark.parametrize("index", range(len(PLAN.pieces)))
async def test_one_live_element_that_differs_is_noticed_and_its_tensor_named(index: int) -> None:
    """Case 35: what the generator holds after a swap is compared with what the trainer published."""
    trainers, live = Trainers(2), empty()
    puller = Puller(PLAN, trainers.slots)
    await puller.pull(await trainers.publish(0))
    puller.write(live)
    live[index][-1, -1] += 1
    with pytest.raises(WeightsDiffer, match=rf"not those of version 0\.0: {PLAN.pieces[index].name} differs from trainer rank 1's"):
        puller.compare(live)


async def test_a_swap_that_never_happened_is_noticed() -> None:
    """Case 35."""
    trainers, live = Trainers(1), empty()
    puller = Puller(PLAN, trainers.slots)
    await puller.pull(await trainers.publish(0))
    puller.write(live)
    await puller.pull(await trainers.publish(1))
    with pytest.raises(WeightsDiffer, match=r"version 0\.1: embed"):
        puller.compare(live)


async def test_bytes_that_changed_on_the_way_are_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    trainers = Trainers(2)
    puller = Puller(PLAN, trainers.slots)
    target = await trainers.publish(0)
    read = transport.read

    async def flip(pieces: list[tuple[Tensor, Any]], *, deadline_s: int) -> None:
        await read(pieces, deadline_s=deadline_s)
        pieces[-1][0][0] ^= 1

    monkeypatch.setattr(transport, "read", flip)
    with pytest.raises(RejectedPull):
        await puller.pull(target)


async def test_a_transport_that_fails_is_a_rejected_pull(monkeypatch: pytest.MonkeyPatch) -> None:
    """And what may still be under way never arrives in the memory of the next pull."""
    trainers, live, late = Trainers(1), empty(), []
    puller = Puller(PLAN, trainers.slots)
    target = await trainers.publish(0)
    read = transport.read

    async def fail(pieces: list[tuple[Tensor, Any]], *, deadline_s: int) -> None:
        late.extend(here for here, _ in pieces)
        raise RuntimeError("tcp submit timed out")

    monkeypatch.setattr(transport, "read", fail)
    with pytest.raises(RejectedPull, match="tcp submit timed out"):
        await puller.pull(target)
    monkeypatch.setattr(transport, "read", read)
    await puller.pull(target)
    for memory in late:
        memory.fill_(255)
    puller.write(live)
    puller.compare(live)


async def test_a_slot_that_is_kept_is_passed_over() -> None:
    trainers = Trainers(1)
    assert trainers.boards[0].keep("slow", 1)
    kept = [await trainers.publish(step) for step in range(5)][1]
    puller, live = Puller(PLAN, trainers.slots), empty()
    await puller.pull(kept)
    puller.write(live)
    assert torch.equal(live[3].view(-1), weights(1)["norm"])
    trainers.boards[0].release("slow")
    for step in range(5, 8):
        await trainers.publish(step)
    with pytest.raises(RejectedPull, match="written over"):
        await puller.pull(kept)


async def swapped(puller: Puller, target: Target, live: list[Tensor]) -> None:
    await puller.pull(target)
    puller.write(live)
    puller.compare(live)


@pytest.mark.parametrize("world", [1, 2, 3, 40])
async def test_deltas_lead_to_the_same_weights_as_whole_images(world: int) -> None:
    """Bit for bit, at every version, and with fewer bytes; also where some ranks have no rows."""
    trainers = Trainers(world, slots=2, deltas=True)
    full, delta = Puller(PLAN, trainers.slots), Puller(PLAN, trainers.slots, encoding="delta")
    one, other = empty(), empty()
    for step in range(12):
        target = await trainers.publish(step)
        await swapped(full, target, one)
        await swapped(delta, target, other)
        assert all(torch.equal(left, right) for left, right in zip(one, other, strict=True))
        assert (delta.deltas, full.deltas) == (step, 0)
    assert full.moved == full.nbytes


@pytest.fixture
def short_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    """As deltas are registered in, so that there is room for several."""
    for module in (slots_module, pull_module):
        monkeypatch.setattr(module, "delta_chunk", lambda region: 8)


@pytest.mark.parametrize(("world", "slots"), [(1, 4), (2, 2)])
async def test_a_reader_that_missed_versions_pulls_all_their_deltas_while_slots_hold_them(
    world: int, slots: int, short_pieces: None
) -> None:
    trainers, live, step, deltas = Trainers(world, slots, deltas=True), empty(), 0, 0
    puller = Puller(PLAN, trainers.slots, encoding="delta")
    await swapped(puller, await trainers.publish(0), live)
    for missed in (*range(slots), slots, 0):
        for _ in range(missed + 1):
            target = await trainers.publish(step := step + 1)
        await swapped(puller, target, live)
        deltas += missed < slots
        assert puller.deltas == deltas, missed
        assert all(torch.equal(view, piece.cut(weights(step)[piece.name])) for piece, view in zip(PLAN.pieces, live, strict=True))


async def test_deltas_that_together_are_hardly_smaller_than_an_image_are_not_pulled(short_pieces: None) -> None:
    trainers, live, sizes = Trainers(1, slots=4, deltas=True), empty(), 0
    puller = Puller(PLAN, trainers.slots, encoding="delta")
    await swapped(puller, await trainers.publish(0), live)
    for step in (5, 10, 15):
        target = await trainers.publish(step)
        (delta,) = target.sealed[0].deltas
        assert delta is not None
        sizes += delta.nbytes
    assert sizes > most_delta(puller.nbytes)
    await swapped(puller, target, live)
    assert puller.deltas == 0


async def test_a_delta_that_arrives_damaged_leaves_the_base_as_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    trainers, live = Trainers(1, deltas=True), empty()
    puller = Puller(PLAN, trainers.slots, encoding="delta")
    await swapped(puller, await trainers.publish(0), live)
    target, read = await trainers.publish(1), transport.read

    async def flip(pieces: list[tuple[Tensor, Any]], *, deadline_s: int) -> None:
        await read(pieces, deadline_s=deadline_s)
        monkeypatch.setattr(transport, "read", read)  # the seal arrives as it is
        pieces[0][0][0] ^= 1

    monkeypatch.setattr(transport, "read", flip)
    with pytest.raises(RejectedPull, match=r"delta on version 0\.0"):
        await puller.pull(target)
    await swapped(puller, target, live)
    assert puller.deltas == 1


async def test_adapters_of_which_little_has_changed_travel_as_deltas(monkeypatch: pytest.MonkeyPatch) -> None:
    """B is made anew for each publish, with the scale in it."""
    monkeypatch.setattr(transport, "CHUNK_BYTES", 4096)  # seals of so many tensors are longer than the fixture's pieces
    lora = LoraConfig(rank=3, alpha=7)
    model = PolicyModel(add_adapters(small_model(), lora, seed=0), 64)
    shapes = adapters.shapes(small_model(), lora)
    plan = LoadPlan(tuple(Piece(name, shape, 0, shape[0], 0, shape[1], "bfloat16") for name, shape in shapes.items()))
    board = Board()
    ring = Ring([plan], rank=0, world=1, slots=3, board=board, deltas=True)
    puller, generator = Puller(plan, [ring.register()], encoding="delta"), torch.Generator().manual_seed(0)
    live = [torch.zeros(shape, dtype=torch.bfloat16) for shape in shapes.values()]
    for step in range(4):
        for weight in adapter_weights(model.causal_lm).values():
            weight.add_((0.1 if step == 0 else 1e-5) * torch.randn(weight.shape, generator=generator))
        sealed: asyncio.Future[Offer] = asyncio.get_running_loop().create_future()
        board.listen(lambda offer, sealed=sealed: None if offer.version.step < step else sealed.set_result(offer))  # noqa: B023
        ring.publish(local_shards(model), Version(0, step))
        target = common([await sealed])
        assert target is not None
        await swapped(puller, target, live)
        expected = [sent.bfloat16() for sent in local_shards(model).values()]
        assert all(torch.equal(view, sent) for view, sent in zip(live, expected, strict=True))
        assert puller.deltas == step


async def test_where_all_has_changed_the_image_is_pulled() -> None:
    trainers, live = Trainers(1, deltas=True), empty()
    puller = Puller(PLAN, trainers.slots, encoding="delta")
    await swapped(puller, await trainers.publish(0), live)
    await swapped(puller, await trainers.publish(1000), live)
    assert puller.deltas == 0


async def test_auto_takes_what_has_been_faster(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a network that costs nothing no delta pays, once it is known what applying one costs."""
    trainers, live = Trainers(1, deltas=True), empty()
    puller = Puller(PLAN, trainers.slots, encoding="auto")
    for step, (read_s, apply_s, deltas) in enumerate([(0.0, 0.0, 0), (1.0, 0.0, 1), (1.0, 0.5, 2), (0.0, 0.5, 2), (0.01, 0.5, 2)]):
        puller._read_s, puller._apply_s = read_s, apply_s
        await swapped(puller, await trainers.publish(step), live)
        assert puller.deltas == deltas, step


async def test_each_rank_of_a_generator_pulls_its_own_region() -> None:
    """Deltas too; and where one rank's region was written over, that of the other is as well."""
    halves = [LoadPlan(tuple(piece for piece in PLAN.pieces if (piece.name == "embed") == first)) for first in (True, False)]
    trainers = Trainers(2, plans=halves, deltas=True)
    pullers = [Puller(plan, trainers.slots, rank=rank, encoding="delta") for rank, plan in enumerate(halves)]
    live = [[view for piece, view in zip(PLAN.pieces, empty(), strict=True) if piece in plan.pieces] for plan in halves]
    targets = []
    for step in range(4):
        targets.append(await trainers.publish(step))
        for puller, views in zip(pullers, live, strict=True):
            await swapped(puller, targets[-1], views)
            assert puller.deltas == step
    found = dict(zip([piece for plan in halves for piece in plan.pieces], [view for views in live for view in views], strict=True))
    assert all(torch.equal(view, piece.cut(weights(3)[piece.name])) for piece, view in found.items())
    for puller in pullers:
        with pytest.raises(RejectedPull):
            await puller.pull(targets[0])


def test_a_slot_is_as_large_as_its_regions() -> None:
    one, two = (Trainers(2, plans=plans) for plans in ([PLAN], [PLAN, PLAN]))
    assert [ring.nbytes for ring in two.rings] == [2 * ring.nbytes for ring in one.rings]
