"""The drawer: a warpgroup of `backward`'s that draws dropout's words for its consumers, who have enough to do.

A block's words are the same work whoever draws them; drawn by consumers they take turns with the matmuls' exponentials.
"""

# No `from __future__ import annotations`: as in `pipeline`.

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from .backward_tiles import block_told, place_told, query_blocks
from .dropout import drawn, lots_of_keys, put_words
from .pipeline import number
from .walk import PIECE


@gluon.jit
def drawer(draw, lengths, rings, call, O: gl.constexpr):
    """One warpgroup: says of each block which pairs dropout keeps, for both consumers, while they multiply and exponentiate."""
    t = 0
    n = 0  # blocks drawn for
    first = number(rings.tiles.wait(0), 0)
    while first >= 0:
        place = place_told(first, rings.tiles.buffers.index(t % rings.tiles.STAGES), call, O)
        rings.tiles.release(t)
        lots = (lots_of_keys(draw, place.s, place.first), lots_of_keys(draw, place.s, place.first + PIECE))
        if O.BLOCKS:
            share, block, _, h = block_told(n + t, rings)
            while share >= 0:
                draw_block(lots, n, h, block * O.ROWS, rings, O)
                n += 1
                share, block, _, h = block_told(n + t, rings)
        else:
            lo, hi = query_blocks(place.first, place.call, O.ROWS)
            for member in range(call.group):
                for block in range(lo, hi):
                    draw_block(lots, n, place.kv * call.group + member, block * O.ROWS, rings, O)
                    n += 1
        t += 1
        first = number(rings.tiles.wait(t), 0)
    rings.tiles.release(t)


@gluon.jit
def draw_block(lots, n, h, i0, rings, O: gl.constexpr):
    """Item n of rings.words, of the block of head h's queries at i0. What of a call depends on queries alone is both consumers'."""
    words = rings.words.acquire(n)
    for piece in gl.static_range(O.ROWS // PIECE):
        for c in gl.static_range(2):
            put_words(drawn(lots[c], h, i0 + PIECE * piece), words, 2 * piece + c)
    rings.words.commit(n)
