"""The order in which a tile's partners are walked, the same for forward and backward.

One after the other, and then (BlockMask) the MIXED ones.
"""

from __future__ import annotations

import triton
import triton.language as tl

from . import steps


@triton.jit
def cut(lo, hi, free_lo, free_hi, SIDE: tl.constexpr):
    """[lo, hi) in tiles of SIDE, of which [a, z) need no mask: tile numbers (lo, hi, a, z), lo <= a <= z."""
    first = lo // SIDE
    end = tl.where(hi > lo, (hi + SIDE - 1) // SIDE, first)
    a = tl.minimum(tl.maximum((free_lo + SIDE - 1) // SIDE, first), end)
    z = tl.minimum(tl.maximum(free_hi // SIDE, a), end)
    return first, end, a, z


@triton.jit
def live(count, list, known, lo, hi, free_lo, free_hi, SIDE: tl.constexpr, CUT: tl.constexpr):
    """The same of an ascending list of a BlockMask's tiles: numbers count the tiles of SIDE in its entries.

    lo ... free_hi: positions in the mask. known: False where the mask does not reach. Without CUT all of the list is
    wanted, and only its last tile may reach past the sequence's end.
    """
    PARTS: tl.constexpr = steps.TILE // SIDE
    n = tl.load(count, mask=known, other=0)
    if CUT:
        first = below(list, n, lo // steps.TILE)
        end = tl.maximum(below(list, n, tl.where(hi > lo, (hi + steps.TILE - 1) // steps.TILE, 0)), first)
        a = tl.minimum(tl.maximum(below(list, n, (free_lo + steps.TILE - 1) // steps.TILE), first), end)
        z = tl.minimum(tl.maximum(below(list, n, free_hi // steps.TILE), a), end)
        return first * PARTS, end * PARTS, a * PARTS, z * PARTS
    else:
        last = tl.load(list + n - 1, mask=n > 0, other=0)
        whole = n - ((n > 0) & (last >= free_hi // steps.TILE)).to(tl.int32)
        return n * 0, n * PARTS, n * 0, whole * PARTS


@triton.jit
def below(list, count, tile):
    """How many of an ascending list's `count` entries lie below `tile`.

    All are looked at, 128 at a time: a search by halves waits for memory at each step, and a kernel asks eight times.
    """
    n = 0
    for first in tl.range(0, count, 128):
        at = first + tl.arange(0, 128)
        n += tl.sum((tl.load(list + at, mask=at < count, other=0x7FFFFFFF) < tile).to(tl.int32), 0)
    return n


@triton.jit
def rows_of_mask(lists, b, h, known, position):
    """The lists of the tiles that a BlockMask has beside the one at `position` of sequence b, head h.

    lists: (the kernel's pointers, and their strides). known: whether that tile is in use at all.
    """
    full_count, full, mixed_count, mixed, mixed_bits, blocks_b, blocks_h, blocks_n, blocks_m = lists
    row = (b.to(tl.int64) * blocks_b + h.to(tl.int64) * blocks_h) * blocks_n + position // steps.TILE
    known = known & (position // steps.TILE < blocks_n)
    at = row * blocks_m
    return full_count + row, full + at, mixed_count + row, mixed + at, mixed_bits + at, known


@triton.jit
def way(lo, hi, free_lo, free_hi, lists, b, h, known, position, origin, SIDE: tl.constexpr, O: tl.constexpr):
    """The partners of a tile in their order, for `visit`: all of [lo, hi), in which [free_lo, free_hi) need no mask.

    origin: where the partners' side begins in the BlockMask; the others are rows_of_mask's.
    """
    if O.BLOCKS:
        full_count, full, mixed_count, mixed, mixed_bits, known = rows_of_mask(lists, b, h, known, position)
        positions = (lo + origin, hi + origin, free_lo + origin, free_hi + origin)
        x_lo, x_hi, _, _ = live(mixed_count, mixed, known, *positions, SIDE, O.CUT)
        lo, hi, a, z = live(full_count, full, known, *positions, SIDE, O.CUT)
        return lo, hi, a, z, x_lo, x_hi, full, mixed, mixed_bits
    else:
        lo, hi, a, z = cut(lo, hi, free_lo, free_hi, SIDE)
        return lo, hi, a, z, 0, 0, 0, 0, 0


@triton.jit
def end(way):
    """A loop over all of them is from way[0] to here: past the second, numbers are of MIXED tiles."""
    return way[1] + (way[5] - way[4])


@triton.jit
def entry(way, n, SIDE: tl.constexpr, O: tl.constexpr):
    """(Tile of the mask, its bit tile's place or -1) of the partner number n, as `visit` wants them; 0, -1 past the last.

    A loop asks for the next partner's while it works on this one's: else each round begins by waiting for memory.
    """
    _lo, hi, _a, _z, x_lo, x_hi, full, mixed, mixed_bits = way
    if O.BLOCKS:
        is_mixed = n >= hi
        at = tl.where(is_mixed, n - hi + x_lo, n) // (steps.TILE // SIDE)
        there = n < hi + (x_hi - x_lo)
        tile = tl.load(tl.where(is_mixed, mixed, full) + at, mask=there, other=0)
        return tile, tl.load(mixed_bits + at, mask=there & is_mixed, other=-1)
    else:
        return 0, -1


@triton.jit
def visit(way, n, entry, origin, SIDE: tl.constexpr, O: tl.constexpr):
    """(Where the partner number n begins in the sequence; whether it needs the Band's mask; its bit tile's place, or -1)."""
    _lo, hi, a, z, x_lo, _x_hi, _full, _mixed, _mixed_bits = way
    edge = (n < a) | (n >= z)
    if O.BLOCKS:
        PARTS: tl.constexpr = steps.TILE // SIDE
        part = tl.where(n >= hi, n - hi + x_lo, n) % PARTS
        if not O.CUT:
            edge = (n >= z) & (n < hi)
        return entry[0] * steps.TILE + part * SIDE - origin, edge, entry[1]
    else:
        return n * SIDE, edge, -1


@triton.jit
def find(lists, b, h, known, position, tile):
    """(Whether the tile is live, its bit tile's place or -1)."""
    full_count, full, mixed_count, mixed, mixed_bits, known = rows_of_mask(lists, b, h, known, position)
    n = tl.load(full_count, mask=known, other=0)
    at = below(full, n, tile)
    is_full = tl.load(full + at, mask=at < n, other=-1) == tile
    n = tl.load(mixed_count, mask=known, other=0)
    at = below(mixed, n, tile)
    is_mixed = tl.load(mixed + at, mask=at < n, other=-1) == tile
    return is_full | is_mixed, tl.load(mixed_bits + at, mask=is_mixed, other=-1)
