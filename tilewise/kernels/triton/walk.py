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
def at_edge(t, a, z, O: tl.constexpr):
    """Whether the tile number t needs mask code."""
    if O.EDGES:
        return (t < a) | (t >= z)
    else:
        return False


@triton.jit
def place(t, list, origin, SIDE: tl.constexpr, BLOCKS: tl.constexpr):
    """Where the tile number t begins in the sequence."""
    if BLOCKS:
        PARTS: tl.constexpr = steps.TILE // SIDE
        n = t // PARTS
        return tl.load(list + n) * steps.TILE + (t - n * PARTS) * SIDE - origin
    else:
        return t * SIDE


@triton.jit
def find(count, list, known, tile):
    """(whether an ascending list holds `tile`, where)."""
    n = tl.load(count, mask=known, other=0)
    at = below(list, n, tile)
    return tl.load(list + at, mask=at < n, other=-1) == tile, at
