"""Which tile of keys a program of `backward`'s has, what of it the producer tells the others, and which blocks of queries meet it."""

# No `from __future__ import annotations`: an aggregate checks its fields against what their annotations are.

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from ... import mask as arithmetic
from .pipeline import Ring, aggregate, number, put, uniform
from .walk import PIECE, Call, extent, sequence_of, tile_of

KEYS = gl.constexpr(128)  # of a program: a piece for each consumer

query_range = gluon.jit(arithmetic.query_range)
mask_free_queries = gluon.jit(arithmetic.mask_free_queries)


@aggregate
class Rings:
    """What the producer hands the consumers. Items 2 t + c of k and v are consumer c's pieces of tile t, and stay as long as it.

    tiles: `tell` says what of each; consumers and adders read it. An item of q is a block of queries: Q, and in the same
    place of the other two dO and (-L, -delta); blocks are counted on from tile to tile. Of dq, which goes from the consumers
    to their adders, item 2 n + c is consumer c's share of block n's. With a BlockMask the producer alone knows which block
    comes: item n + t of blocks tells consumers and adders (its first share of dQ, its number, its bit tile's place in the
    pool, or -1, its head), and after a tile's last one (-1, 0, 0, 0).
    """

    tiles: Ring
    k: Ring
    v: Ring
    q: Ring
    dq: Ring
    do: gl.tuple  # of each part (STAGES, 1, 1, ROWS, columns)
    statistics: gl.shared_memory_descriptor  # (STAGES, 2, 1, ROWS)
    blocks: Ring
    words: Ring  # with a drawer, what it drew for block n: of each 64 queries both consumers' words
    BYTES: gl.constexpr  # of an item

    @gluon.constexpr_function
    def __init__(self, tiles, k, v, q, dq, do, statistics, blocks, words, BYTES):
        self.tiles = tiles
        self.k = k
        self.v = v
        self.q = q
        self.dq = dq
        self.do = do
        self.statistics = statistics
        self.blocks = blocks
        self.words = words
        self.BYTES = gl.constexpr(BYTES)


@aggregate
class Place:
    """Where a tile of keys is, and the call as its sequence has it."""

    first: gl.tensor  # of its sequence's keys
    s: gl.tensor  # the sequence
    b: gl.tensor  # that, or 0 of a packed one: where in Q, K and dK it is
    kv: gl.tensor
    before: gl.tensor  # blocks of queries that statistics and dQ have before the sequence's
    dk_start: gl.tensor  # its first row in dK and dV, where their descriptors clip at its end
    k_span: gl.tensor  # keys it has in memory
    call: Call

    @gluon.constexpr_function
    def __init__(self, first, s, b, kv, before, dk_start, k_span, call):
        self.first = first
        self.s = s
        self.b = b
        self.kv = kv
        self.before = before
        self.dk_start = dk_start
        self.k_span = k_span
        self.call = call


@gluon.jit
def place_of_keys(tile, call, lengths, O: gl.constexpr):
    """(Place of the tile-th tile, (its sequence, that one's first row in Q, dO, K and V, whose descriptors clip at its end)).

    Long tiles come first: a causal mask's first ones. Ordered, the last tiles of a head do, for which others wait (`turn_of`).
    More packed tiles are counted than there are: they are behind their sequence's end in memory.
    """
    cu_q, cu_k, q_lens, k_lens, batch, q_apart, do_apart, k_apart, v_apart = lengths
    tile, bh = tile_of(tile, call.tiles, call.together, call.total // call.tiles)
    kv_heads = call.heads // call.group
    if not O.ORDERED:
        tile = call.tiles - 1 - tile
    first = tile * KEYS
    b = bh // kv_heads
    kv = bh % kv_heads
    if O.VARIED:
        s = b
        if O.PACKED:
            s, tile = sequence_of(tile, batch, call.k_len, cu_k, KEYS)
        q_start, _, q_len = extent(s, batch, call.q_len, cu_q, q_lens, O.PACKED, O.Q_LENS)
        k_start, k_span, k_len = extent(s, batch, call.k_len, cu_k, k_lens, O.PACKED, O.K_LENS)
        before = s * 0
        dk_start = k_start
        if O.PACKED:
            before = (q_start // KEYS + s) * (KEYS // O.ROWS)
        else:
            dk_start = s * (call.k_len * kv_heads)
        first = uniform(gl.where(tile < 0, k_span, tile * KEYS))
        own = call.with_lengths(uniform(q_len), uniform(k_len), O)
        starts = (s, s * q_apart + q_start, s * do_apart + q_start, s * k_apart + k_start, s * v_apart + k_start)
        return Place(first, s, b, kv, before, dk_start, k_span, own), starts
    else:
        none = b * 0
        return Place(first, b, b, kv, none, none, call.k_len, call), (b, none, none, none, none)


# ---- a tile's message ------------------------------------------------------------------------------------------------


@gluon.jit
def tell(rings, t, place, O: gl.constexpr):
    """Tile t's Place, as a message. To find a packed sequence takes one load after the other, and the producer has the time:
    consumers and adders are at the tile before."""
    message = rings.tiles.acquire(t)
    put(message, 0, (place.first, place.s, place.kv))
    if O.VARIED:
        put(message, 3, (place.call.q_len, place.call.k_len, place.before, place.dk_start, place.k_span))
    rings.tiles.commit(t)


@gluon.jit
def place_told(first, message, call, O: gl.constexpr):
    """The same, from a message that begins with `first`."""
    s = number(message, 1)
    kv = number(message, 2)
    if O.VARIED:
        b = s
        if O.PACKED:
            b = s * 0
        own = call.with_lengths(number(message, 3), number(message, 4), O)
        return Place(first, s, b, kv, number(message, 5), number(message, 6), number(message, 7), own)
    else:
        return Place(first, s, s, kv, s * 0, s * 0, call.k_len, call)


@gluon.jit
def query_blocks(first, call, ROWS: gl.constexpr):
    """Blocks [lo, hi) of ROWS queries that see some of the keys of the tile at `first`."""
    last = gl.minimum(first + KEYS, call.k_len)
    lo, hi = query_range(first, last, call.left, call.right, call.diagonal, call.q_len)
    return lo // ROWS, gl.where(hi > lo, (hi + ROWS - 1) // ROWS, lo // ROWS)


@gluon.jit
def free_queries(first, call):
    """Queries [lo, hi) that see all keys of the piece at `first`. Behind the last query nothing needs a mask: P is 0 there."""
    last = gl.minimum(first + PIECE, call.k_len)
    lo, hi = mask_free_queries(first, last, call.left, call.right, call.diagonal, call.q_len)
    hi = gl.where(hi == call.q_len, hi + KEYS, hi)
    return lo, gl.where(first + PIECE > call.k_len, lo, hi)


# ---- which shares of dQ, and which blocks -----------------------------------------------------------------------------


@gluon.jit
def shares_of_head(call, lengths, O: gl.constexpr):
    """How many shares a head's dQ has."""
    SHARES: gl.constexpr = 2 * PIECE // O.ROWS  # of 64 queries' dQ
    tiles = (call.q_len + KEYS - 1) // KEYS
    if O.PACKED:
        tiles = call.q_len // KEYS + lengths[4] + 1
    return tiles * (KEYS // PIECE * SHARES)


@gluon.jit
def shares_before(place, member, a_head, call, C: gl.constexpr):
    """Where consumer C's first share of the sequence's queries is in dQ, of a head of the group; those of blocks are 2 apart."""
    return (place.b * call.heads + place.kv * call.group + member) * a_head + C + 2 * place.before


@gluon.jit
def block_told(n, rings):
    """(First share of dQ, number, its bit tile's place or -1, head) of a block, by item n of rings.blocks."""
    told = rings.blocks.wait(n)
    share = number(told, 0)
    block = number(told, 1)
    tile = number(told, 2)
    h = number(told, 3)
    rings.blocks.release(n)
    return share, block, tile, h
