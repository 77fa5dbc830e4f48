"""Which tiles a loop visits, in which order: contiguous pieces of a Band's range, or the live tiles of a BlockMask.

The outer loop of a forward walks query tiles and asks `key_tiles` for the keys that they may see; the outer loop of a
backward walks key tiles and asks `query_tiles` for the rows that may see them. Where the cuts fall depends on lengths,
band and mask alone, never on how many batches or heads are worked on together: a sequence's bits are its own.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ..block_mask import BlockMask, TileLists
from ..mask import key_range, mask_free_queries, mask_free_range, query_range
from .hbm import Rows

if TYPE_CHECKING:
    from .scores import Scores

ALIGN = 16  # tile sides and starts are multiples of it: one shape of matmul, and whole runs of dropout's counters
GROUP = 4  # tiles of a BlockMask gathered at once for heads that differ
FULL, NONE = -1, -2  # what a slot holds where it holds no row of BlockMask.bits


@dataclass(frozen=True, slots=True)
class Tile:
    """Positions of one sequence that are worked on at once: a run, or (BlockMask) several runs of 128.

    Where all heads see the same tiles, `rows` names the runs; where each has its own, positions are gathered.
    """

    rows: Rows  # what hbm.load reads: positions as a tensor are (1|b, 1|h, size)
    count: int  # positions that are not padding, if rows is a slice; else size
    size: int  # sides of the matmul
    edges: tuple[slice, ...] = ()  # the parts of the tile in which the Band may hide a pair
    slots: Tensor | None = None  # (1|b, 1|h, size / 128): each run's row of BlockMask.bits, FULL or NONE
    gathered: Tensor | None = None  # positions (1|b, 1|h, size), unlike rows past the end in padding
    past_end: int | None = None  # with a BlockMask: positions from here on are padding

    @property
    def span(self) -> tuple[int, int]:
        """(start, stop) of a contiguous tile."""
        assert isinstance(self.rows, slice)
        return self.rows.start, self.rows.stop

    def index(self, device: torch.device) -> Tensor:
        """Positions (1|b, 1|h, size) on `device`; past the end in padding."""
        if self.gathered is not None:
            return self.gathered
        if isinstance(self.rows, tuple):
            return torch.cat([torch.arange(run.start, run.stop, device=device) for run in self.rows])[None, None]
        start, _ = self.span
        return torch.arange(start, start + self.size, device=device)[None, None]


def run(start: int, stop: int, free: tuple[int, int] | None = None) -> Tile:
    """The contiguous tile [start, stop), its side rounded up; free: the positions that the Band hides no pair of."""
    size = round_up(stop - start, ALIGN)
    return Tile(slice(start, stop), stop - start, size, () if free is None else _edges(start, stop, size, free))


def _edges(start: int, stop: int, size: int, free: tuple[int, int]) -> tuple[slice, ...]:
    """The parts of a tile of `size` that lie outside the mask-free positions."""
    a = min(max(free[0] - start, 0), size)
    b = size if free[1] >= stop else max(free[1] - start, 0)
    if a >= b:
        return (slice(0, size),)
    return tuple(part for part in (slice(0, a), slice(b, size)) if part.start < part.stop)


def runs(length: int, side: int) -> Iterator[Tile]:
    """The whole sequence in tiles of `side`: an outer loop."""
    for start in range(0, length, side):
        yield run(start, min(start + side, length))


def key_tiles(i: Tile, scores: Scores, k_len: int, side: int) -> Iterator[Tile]:
    """The tiles of keys that query tile i may see, EMPTY ones left out."""
    span = i.span
    args = (*scores.band.bounds, scores.diagonal, k_len)
    visible, free = key_range(*span, *args), mask_free_range(*span, *args)
    if scores.blocks is not None:
        lists, at = scores.blocks.query_major, (scores.i0 + span[0]) // BlockMask.TILE
        return _gathered(lists, at, scores.j0 // BlockMask.TILE, visible, free, scores, k_len, side)
    return _pieces(visible, free, side)


def query_tiles(j: Tile, scores: Scores, q_len: int, side: int) -> Iterator[Tile]:
    """The tiles of rows that may see key tile j, EMPTY ones left out."""
    span = j.span
    args = (*scores.band.bounds, scores.diagonal, q_len)
    visible, free = query_range(*span, *args), mask_free_queries(*span, *args)
    if scores.blocks is not None:
        lists, at = scores.blocks.key_major, (scores.j0 + span[0]) // BlockMask.TILE
        return _gathered(lists, at, scores.i0 // BlockMask.TILE, visible, free, scores, q_len, side)
    return _pieces(visible, free, side)


def _pieces(visible: tuple[int, int], free: tuple[int, int], side: int) -> Iterator[Tile]:
    """[lo, hi) in tiles of `side`; what lies inside the mask-free range needs no mask."""
    lo, hi = visible
    for start in range(lo - lo % ALIGN if lo < hi else hi, hi, side):
        stop = min(start + side, hi)
        yield run(start, stop, free)


def _gathered(
    lists: TileLists,
    at: int,
    first: int,
    visible: tuple[int, int],
    free: tuple[int, int],
    scores: Scores,
    length: int,
    side: int,
) -> Iterator[Tile]:
    """Row `at` of the lists, some live tiles at a time; `first` is the mask's tile at this call's position 0.

    A list that all share is cut as it comes, `side // 128` tiles at a time. Where heads have lists of their own, all
    groups have one width and shorter lists get slots that hold nothing, so that a head's products have one shape
    whatever the other heads see.
    """
    if visible[0] >= visible[1]:
        return
    T = BlockMask.TILE
    live = [
        [slot for slot in row if slot[0] * T < visible[1] and (slot[0] + 1) * T > visible[0]]
        for row in _live_slots(lists, at, first, scores)
    ]
    alike = len(live) == 1
    group = max(side // T, 1) if alike else min(GROUP, -(-length // T))
    width = round_up(max(map(len, live), default=0), 1 if alike else group)
    live = [row + [(0, NONE)] * (width - len(row)) for row in live]
    device, heads = lists.full.device, min(lists.full.shape[1], len(scores.head_index))
    for start in range(0, width, group):
        part = [row[start : start + group] for row in live]
        tiles = [[tile for tile, _ in row] for row in part]
        slots = [[slot for _, slot in row] for row in part]
        lo, hi = min(map(min, tiles)) * T, max(map(max, tiles)) * T + T
        size, ends = len(tiles[0]) * T, hi > length
        rows: Rows = tuple(slice(tile * T, tile * T + T) for tile in tiles[0])
        index = None
        if not alike:
            index = torch.tensor(tiles, device=device)[..., None] * T + torch.arange(T, device=device)
            index = index.view(-1, heads, size)
            rows = index.clamp(max=length - 1) if ends else index
        yield Tile(
            rows,
            count=size,
            size=size,
            edges=(slice(0, size),) if lo < free[0] or hi > free[1] else (),
            slots=torch.tensor(slots, device=device).view(-1, heads, len(slots[0]))
            if any(map(_mixed, slots))
            else None,
            gathered=index,
            past_end=length if ends else None,
        )


def _mixed(slots: list[int]) -> bool:
    return any(slot != FULL for slot in slots)


def _live_slots(lists: TileLists, at: int, first: int, scores: Scores) -> list[list[tuple[int, int]]]:
    """(tile, FULL or row of bits) of the live tiles in row `at`, for each batch entry and head the mask tells apart."""
    b, h = (
        slice(None) if n == 1 else slice(used.start, used.stop)
        for n, used in zip(lists.full.shape[:2], (scores.batch_index, scores.head_index), strict=True)
    )
    rows = (x[b, h, at].flatten(0, 1).tolist() for x in lists)
    return [
        [(tile - first, FULL) for tile in full[:n_full]]
        + [(tile - first, slot) for tile, slot in zip(mixed[:n_mixed], bits, strict=False)]
        for n_full, full, n_mixed, mixed, bits in zip(*rows, strict=True)
    ]


def round_up(n: int, to: int) -> int:
    return -(-n // to) * to
