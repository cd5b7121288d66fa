"""Which rows of the trainer's tensors go where in the engine: recorded from the engine's own loader, then plain copies.

A trainer cannot know how the engine cuts its parameters (fused qkv and gate/up, padded vocabulary). So the engine loads once
from tensors without data and every copy that its loader makes is written down. Both sides work from that list. Where the loader does
more than copy, tensors travel whole to memory of their own, and the loader takes them from there at each swap (`record_whole`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from math import prod
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from monarch_rl.weights.handles import LoadPlan as LoadPlan
from monarch_rl.weights.handles import Piece as Piece
from monarch_rl.weights.handles import Shape as Shape

ALIGNMENT = 64
"""Bytes; every block of a region starts at a multiple of it."""


class PlanError(RuntimeError):
    """The engine's loader does something that a list of copies cannot express."""


@dataclass(frozen=True, slots=True)
class Block:
    """What one trainer rank holds of one piece: rows [row, row + rows) of the piece."""

    piece: int
    """Index into `LoadPlan.pieces`."""
    row: int
    rows: int
    offset: int
    """Bytes from the start of the rank's region, a multiple of `ALIGNMENT`."""
    nbytes: int


def record(model: nn.Module, tensors: Mapping[str, Shape]) -> tuple[LoadPlan, list[Tensor]]:
    """Run `model.load_weights` once over tensors without data and list the copies. No parameter changes, but padding may be zeroed.

    Args:
        tensors: name → shape of every tensor that the trainer has.

    Returns:
        The plan, and for each piece its destination, a [rows, cols] view of an engine parameter.

    Raises:
        PlanError: the loader computes with a tensor, ignores one, copies what is no rectangle, copies elsewhere than into the
            model's own memory, or leaves elements of a parameter untouched. One exception: rows that pad a vocabulary past its last
            token (modules with vLLM's `shard_indices`) belong to no checkpoint.
    """
    load = cast(Callable[[Iterator[tuple[str, Tensor]]], object], model.load_weights)
    plan, views = record_copies(lambda sources: load(iter(sources.items())), tensors, next(model.parameters()).dtype)
    _check_coverage(model, views)
    return plan, views


def record_copies(
    load: Callable[[dict[str, Tensor]], object], tensors: Mapping[str, Shape], dtype: torch.dtype
) -> tuple[LoadPlan, list[Tensor]]:
    """The copies that `load` makes of tensors without data, and where each of them goes.

    Raises:
        PlanError: `load` computes with a tensor, ignores one, or copies what is no rectangle.
    """
    _check_rows(tensors)
    sources = {name: torch.empty(shape, dtype=dtype, device="meta") for name, shape in tensors.items()}
    recorder = _Recorder(sources)
    with torch.no_grad(), recorder:
        load(sources)
    if ignored := [name for name in tensors if name not in recorder.used]:
        raise PlanError(f"the engine's loader ignores {_some(ignored)}")
    return LoadPlan(tuple(recorder.pieces)), recorder.views


def record_whole(
    model: nn.Module, load: Callable[[Mapping[str, Tensor]], object], tensors: Mapping[str, Shape], why: str
) -> tuple[LoadPlan, list[Tensor], Callable[[], object]]:
    """What `record` gives, where the loader does more than copy, and what is to be called when the destinations are filled: they are memory
    beside the model, from which `load` takes them. The model is left without weights.

    Raises:
        PlanError: `load` ignores a tensor, or leaves elements of a parameter untouched (which it is shown by tensors without a number).
    """
    _check_rows(tensors)
    dtype = next(model.parameters()).dtype
    memory = {name: torch.full(shape, torch.nan, dtype=dtype) for name, shape in tensors.items()}
    watch = _Watch(memory)
    with torch.no_grad(), watch:
        load(memory)
    if ignored := [name for name in tensors if name not in watch.used]:
        raise PlanError(f"the engine's loader ignores {_some(ignored)}")
    _check_filled(model, lambda parameter, rows: bool((parameter if rows is None else parameter[:rows]).isnan().all()))
    kind = str(dtype).removeprefix("torch.")
    pieces = tuple(Piece(name, tuple(shape), 0, shape[0], 0, prod(shape[1:]), kind) for name, shape in tensors.items())
    return LoadPlan(pieces, loader=why), [memory[piece.name].view(piece.rows, piece.cols) for piece in pieces], partial(load, memory)


def shard_rows(rows: int, rank: int, world: int) -> tuple[int, int]:
    """First and past-the-last row of a rank's shard: the rule of `torch.chunk`, which FSDP2's `Shard(0)` follows."""
    size = -(-rows // world)
    return min(rank * size, rows), min((rank + 1) * size, rows)


def layout(plan: LoadPlan, rank: int, world: int) -> tuple[Block, ...]:
    """Where each part of the plan that `rank` holds lies in its region. Every process computes the same."""
    blocks: list[Block] = []
    offset = 0
    for index, piece in enumerate(plan.pieces):
        low, high = shard_rows(piece.shape[0], rank, world)
        first, last = max(low, piece.row0), min(high, piece.row0 + piece.rows)
        if first < last:
            nbytes = (last - first) * piece.cols * _dtype(piece).itemsize
            blocks.append(Block(index, first - piece.row0, last - first, offset, nbytes))
            offset += -(-nbytes // ALIGNMENT) * ALIGNMENT
    return tuple(blocks)


def region_bytes(blocks: Sequence[Block]) -> int:
    """Size of the region that holds `blocks`; 0 for a rank without rows."""
    return -(-(blocks[-1].offset + blocks[-1].nbytes) // ALIGNMENT) * ALIGNMENT if blocks else 0


@torch.no_grad()
def stage(blocks: Sequence[Block], plan: LoadPlan, local: Mapping[str, Tensor], region: Tensor, rank: int, world: int) -> None:
    """Copy and cast what `blocks` ask of this rank's shards into its region.

    Args:
        local: name → the rank's rows of that tensor, contiguous, in any dtype and on any device.
        region: uint8 [region_bytes(blocks)].

    Raises:
        PlanError: a shard has another number of rows than the plan's sharding rule gives.
    """
    for block in blocks:
        piece = plan.pieces[block.piece]
        low, high = shard_rows(piece.shape[0], rank, world)
        shard = local[piece.name]
        if shard.shape != (high - low, *piece.shape[1:]):
            raise PlanError(f"rank {rank} of {world}: {piece.name} has shape {tuple(shard.shape)}, not {(high - low, *piece.shape[1:])}")
        row = piece.row0 + block.row - low
        rectangle = shard.view(high - low, -1)[row : row + block.rows, piece.col0 : piece.col0 + piece.cols]
        _in_region(block, piece, region).copy_(rectangle, non_blocking=True)


@torch.no_grad()
def apply(plan: LoadPlan, blocks: Sequence[Sequence[Block]], regions: Sequence[Tensor], views: Sequence[Tensor]) -> None:
    """Copy the regions of all trainer ranks into the engine's parameters.

    Args:
        blocks: for each rank, its layout.
        regions: for each rank, uint8 [region_bytes].
        views: for each piece, its destination, from `record`.
    """
    for own, region in zip(blocks, regions, strict=True):
        for block in own:
            source = _in_region(block, plan.pieces[block.piece], region)
            views[block.piece][block.row : block.row + block.rows].copy_(source, non_blocking=True)


class _Recorder(TorchDispatchMode):
    """Stands between the loader and torch: lets it cut tensors without data, writes down its copies, refuses the rest."""

    def __init__(self, sources: Mapping[str, Tensor]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.pieces: list[Piece] = []
        self.views: list[Tensor] = []
        self.used: set[str] = set()
        self._sources = {_storage(tensor): (name, tensor) for name, tensor in sources.items()}

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None) -> Any:
        sources = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor) and _storage(leaf) in self._sources]
        if not sources:
            return func(*args, **kwargs or {})
        if func is torch.ops.aten.copy_.default and len(sources) == 1 and sources[0] is args[1]:
            self._add(*args[:2])
            return args[0]
        if func._schema.is_mutable or not _is_view(func):
            raise PlanError(f"the engine's loader does more than copy {self._name(sources[0])}: it calls {func}")
        return func(*args, **kwargs or {})

    def _name(self, tensor: Tensor) -> str:
        return self._sources[_storage(tensor)][0]

    def _add(self, destination: Tensor, source: Tensor) -> None:
        name, whole = self._sources[_storage(source)]
        self.used.add(name)
        if source.numel() == 0:  # of a vocabulary that is shared by ranks, the last may hold padding only
            return
        row0, rows, col0, cols = _rectangle(name, whole, source)
        try:
            view = destination.view(rows, cols)
        except RuntimeError as error:
            raise PlanError(f"the copy of {name} fills no [{rows}, {cols}] block: it goes to {tuple(destination.shape)}") from error
        self.views.append(view)
        self.pieces.append(Piece(name, tuple(whole.shape), row0, rows, col0, cols, str(destination.dtype).removeprefix("torch.")))


class _Watch(TorchDispatchMode):
    """Writes down which tensors the loader reads."""

    def __init__(self, sources: Mapping[str, Tensor]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.used: set[str] = set()
        self._names = {_storage(tensor): name for name, tensor in sources.items()}

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None) -> Any:
        if func._schema.is_mutable or not _is_view(func):
            storages = {_storage(leaf) for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)}
            self.used |= {self._names[storage] for storage in storages & self._names.keys()}
        return func(*args, **kwargs or {})


def _rectangle(name: str, whole: Tensor, part: Tensor) -> tuple[int, int, int, int]:
    """(row0, rows, col0, cols) of a view in its tensor, both seen as matrices."""
    width = prod(whole.shape[1:])
    row0, col0 = divmod(int(part.storage_offset()), width)
    rows, cols = 1, 1
    match _runs(part):
        case []:
            pass
        case [(length, 1)] if col0 == 0 and length % width == 0:
            rows, cols = length // width, width
        case [(length, 1)]:
            cols = length
        case [(length, stride)] if stride == width:
            rows = length
        case [(length, stride), (run, 1)] if stride == width:
            rows, cols = length, run
        case _:
            cols = width + 1
    if col0 + cols > width:
        raise PlanError(f"the engine's loader copies a part of {name} {tuple(whole.shape)} that is no rectangle: {tuple(part.shape)}")
    return row0, rows, col0, cols


def _runs(part: Tensor) -> list[tuple[int, int]]:
    """(length, stride) of each dimension, with neighbours merged where they are one run in memory."""
    runs: list[tuple[int, int]] = []
    for length, stride in zip(part.shape, part.stride(), strict=True):
        if length == 1:
            continue
        if runs and runs[-1][1] == length * stride:
            runs[-1] = (runs[-1][0] * length, stride)
        else:
            runs.append((length, stride))
    return runs


def _check_coverage(model: nn.Module, views: Sequence[Tensor]) -> None:
    filled: dict[int, list[Tensor]] = {}
    for view in views:
        filled.setdefault(_storage(view), []).append(view)
    owned = {_storage(tensor) for tensor in (*model.parameters(), *model.buffers())}
    if set(filled) - owned:
        raise PlanError("the engine's loader copies into memory that is no parameter of the model")
    _check_filled(model, lambda parameter, rows: _covered(parameter, rows, filled.get(_storage(parameter), [])))


def _check_rows(tensors: Mapping[str, Shape]) -> None:
    if odd := [name for name, shape in tensors.items() if not shape or 0 in shape]:
        raise PlanError(f"scalars and empty tensors cannot be sharded by rows: {_some(odd)}")


def _check_filled(model: nn.Module, is_filled: Callable[[Tensor, int | None], bool]) -> None:
    """An emptied parameter (its weights were packed elsewhere) is not.

    Args:
        is_filled: by tensors of the trainer; is given the parameter, and its rows where they are not all.
    """
    bare = [
        f"{prefix}{'.' * bool(prefix)}{name}"
        for prefix, module in model.named_modules()
        for name, parameter in module.named_parameters(recurse=False)
        if parameter.numel() == 0 or parameter.is_meta or not is_filled(parameter, _checkpoint_rows(module, parameter))
    ]
    if bare:
        raise PlanError(f"no trainer tensor fills all of {_some(bare)}")


def _checkpoint_rows(module: nn.Module, parameter: Tensor) -> int | None:
    """Rows that a checkpoint has of a padded vocabulary; None (all) for everything else."""
    indices = getattr(module, "shard_indices", None)
    return None if indices is None else int(indices.num_org_elements)


def _covered(parameter: Tensor, rows: int | None, views: Sequence[Tensor]) -> bool:
    filled = torch.zeros(parameter.untyped_storage().nbytes() // parameter.itemsize, dtype=torch.bool)
    for view in views:
        filled.as_strided(view.shape, view.stride(), view.storage_offset()).fill_(True)
    own = filled.as_strided(parameter.shape, parameter.stride(), parameter.storage_offset())
    return bool((own if rows is None else own[:rows]).all())


def _in_region(block: Block, piece: Piece, region: Tensor) -> Tensor:
    """The block's bytes as a [rows, cols] matrix of the piece's dtype."""
    return region[block.offset : block.offset + block.nbytes].view(_dtype(piece)).view(block.rows, piece.cols)


def _dtype(piece: Piece) -> torch.dtype:
    return cast(torch.dtype, getattr(torch, piece.dtype))


def _is_view(func: Any) -> bool:
    """Whether an operator only cuts: its result aliases its input, with the same element type."""
    return func is not torch.ops.aten.view.dtype and any(r.alias_info is not None for r in func._schema.returns)


def _storage(tensor: Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)


def _some(names: Sequence[str], most: int = 5) -> str:
    return ", ".join(names[:most]) + (f" and {len(names) - most} more" if len(names) > most else "")
