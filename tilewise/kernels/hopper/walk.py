"""Which rows and keys a tile is about, where tensors' contents say so: sequences of unlike lengths, a BlockMask's lists.

As `steps` and `walk` of the Triton backend have it, but for one thing: a block that nobody sees is walked where there is
no other, so that every tile has one. A tile's FULL blocks come first, then its MIXED ones, each in ascending order.
"""

# No `from __future__ import annotations`: as in `pipeline`.

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from .. import tensors

TILE = gl.constexpr(128)  # a BlockMask's
FAR = gl.constexpr(tensors.FAR)

# ---- sequences -------------------------------------------------------------------------------------------------------


@gluon.jit
def clamped(x, most):
    return gl.minimum(gl.maximum(x, 0), most)


@gluon.jit
def sequence_of(t, batch, length, cu, ROWS: gl.constexpr):
    """(sequence, tile of it) of the t-th tile of a packed head: the last sequence s with cu[s] // ROWS + s <= t.

    What lies behind the last sequence is taken for one more, `batch`, that is not in use.
    """
    s = t * 0
    beyond = batch + 1
    while beyond - s > 1:
        middle = (s + beyond) // 2
        before = clamped(gl.load(cu + middle), length) // ROWS + middle <= t
        s = gl.where(before, middle, s)
        beyond = gl.where(before, beyond, middle)
    return s, t - (clamped(gl.load(cu + s), length) // ROWS + s)


@gluon.jit
def extent(s, batch, length, cu, lens, PACKED: gl.constexpr, LENS: gl.constexpr):
    """(first token, tokens of memory, tokens in use) of sequence s; contents out of range are clamped."""
    start = s * 0
    span = length + start
    if PACKED:
        start = clamped(gl.load(cu + s), length)
        stop = gl.load(cu + s + 1, mask=s < batch, other=length)
        span = gl.minimum(gl.maximum(stop, start), length) - start
    used = span
    if LENS:
        used = clamped(gl.load(lens + s, mask=s < batch, other=0), span)
    elif PACKED:
        used = gl.where(s < batch, span, 0)
    return start, span, used


@gluon.jit
def clipped(start, end, head, row):
    """Where row `row` of a sequence that has `end` rows from `start` on is in a `tensors.ragged` descriptor."""
    return [FAR + row * 0, start + end, head, FAR - end + row, row * 0]


# ---- a BlockMask's lists ---------------------------------------------------------------------------------------------


@gluon.jit
def below(list, count, tile):
    """How many of an ascending list's `count` entries lie below `tile`. One warp looks at all, 128 at a time."""
    layout: gl.constexpr = gl.BlockedLayout([4], [32], [gl.num_warps()], [0])
    n = count * 0
    for first in range(0, count, 128):
        at = first + gl.arange(0, 128, layout)
        n += gl.sum((gl.load(list + at, mask=at < count, other=0x7FFFFFFF) < tile).to(gl.int32), 0)
    return n


@gluon.jit
def live(count, list, known, lo, hi, CUT: gl.constexpr):
    """(first, how many) entries of an ascending list whose tiles have some of the positions [lo, hi).

    known: False where the mask does not reach. Without CUT all of the list is wanted.
    """
    n = gl.load(count, mask=known, other=0)
    first = n * 0
    if CUT:
        first = below(list, n, lo // TILE)
        n = below(list, n, gl.where(hi > lo, (hi + TILE - 1) // TILE, 0))
    return first, gl.maximum(n - first, 0)


@gluon.jit
def way(lists, b, h, known, row, lo, hi, O: gl.constexpr):
    """The blocks of the tile of queries `row` of (b, h), for `visit`: (how many, how many of them are FULL, the lists' places).

    [lo, hi): the keys that it sees, in this call's positions. known: whether there is such a sequence.
    """
    full_count, full, mixed_count, mixed, mixed_bits, blocks_b, blocks_h, blocks_n, blocks_m, base, i0, j0 = lists
    PARTS: gl.constexpr = TILE // O.KEYS
    row += i0 // TILE
    known = known & (row < blocks_n)
    at = base + b.to(gl.int64) * blocks_b + h.to(gl.int64) * blocks_h
    at = at * blocks_n + row
    full += at * blocks_m
    mixed += at * blocks_m
    mixed_bits += at * blocks_m
    f, fulls = live(full_count + at, full, known, lo + j0, hi + j0, O.CUT)
    m, mixes = live(mixed_count + at, mixed, known, lo + j0, hi + j0, O.CUT)
    return (fulls + mixes) * PARTS, fulls * PARTS, full + f, mixed + m, mixed_bits + m


@gluon.jit
def visit(way, n, nowhere, j0, O: gl.constexpr):
    """(first key, its bit tile's place plus 1, or 0) of block n; of a tile without any: `nowhere`, behind the last key."""
    count, fulls, full, mixed, mixed_bits = way
    PARTS: gl.constexpr = TILE // O.KEYS
    is_mixed = n >= fulls
    entry = gl.where(is_mixed, n - fulls, n) // PARTS
    tile = gl.load(gl.where(is_mixed, mixed, full) + entry, mask=n < count, other=0)
    bits = gl.load(mixed_bits + entry, mask=is_mixed & (n < count), other=-1)
    key = tile * TILE + n % PARTS * O.KEYS - j0
    return gl.where(n < count, key, nowhere), bits + 1
