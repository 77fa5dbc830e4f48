"""Which rows and keys a tile is about: by a Band, by lengths and a BlockMask's lists, which are tensors' contents.

As `steps` and `walk` of the Triton backend have it, but for one thing: a block that nobody sees is walked where there is
no other, so that every tile has one.
"""

# No `from __future__ import annotations`: as in `pipeline`.

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from ... import mask as arithmetic
from .. import tensors
from .pipeline import aggregate, uniform

PIECE = gl.constexpr(64)  # rows of a consumer: wgmma's
TILE = gl.constexpr(128)  # a BlockMask's
WALK = gl.constexpr(7)  # numbers of `Call.walk`
FAR = gl.constexpr(tensors.FAR)

key_range = gluon.jit(arithmetic.key_range)
mask_free_range = gluon.jit(arithmetic.mask_free_range)
tile_of = gluon.jit(arithmetic.tile_of)

# ---- a Band ----------------------------------------------------------------------------------------------------------


@aggregate
class Call:
    """The run-time numbers of a call, or of one of its sequences, that has lengths of its own."""

    q_len: gl.tensor
    k_len: gl.tensor
    diagonal: gl.tensor  # j - i on the diagonal of the Band
    left: gl.tensor
    right: gl.tensor
    scale: gl.tensor  # log2(e) times the call's, as softcap
    softcap: gl.tensor
    heads: gl.tensor
    group: gl.tensor  # query heads that share one of keys
    tiles: gl.tensor  # of a head
    together: gl.tensor
    total: gl.tensor  # tiles of all heads

    @gluon.constexpr_function
    def __init__(
        self, q_len, k_len, diagonal, left, right, scale, softcap, heads, group, tiles, together, total,
    ):  # fmt: skip
        self.q_len = q_len
        self.k_len = k_len
        self.diagonal = diagonal
        self.left = left
        self.right = right
        self.scale = scale
        self.softcap = softcap
        self.heads = heads
        self.group = group
        self.tiles = tiles
        self.together = together
        self.total = total

    @gluon.jit
    def with_lengths(self, q_len, k_len, O: gl.constexpr):
        """The call as one of its sequences has it, of which so many queries and keys are in use."""
        diagonal = self.diagonal
        if not O.TOP_LEFT:
            diagonal += k_len - q_len
        return Call(
            q_len, k_len, diagonal, self.left, self.right, self.scale, self.softcap, self.heads, self.group, self.tiles,
            self.together, self.total,
        )  # fmt: skip

    @gluon.jit
    def keys(self, first, ROWS: gl.constexpr, O: gl.constexpr):
        """Keys [lo, hi) that some of the rows [first, first + ROWS) see."""
        lo = 0
        hi = self.k_len
        if O.BANDED:
            last = gl.minimum(first + ROWS, self.q_len)
            # `uniform`: else the compiler computes what follows from the bounds alone once, and spills it (d 256, 40 bytes).
            lo, hi = key_range(first, last, uniform(self.left), uniform(self.right), self.diagonal, self.k_len)
        elif O.Q_LENS or O.PACKED:
            hi = gl.where(first < self.q_len, hi, 0)
        return lo, hi

    @gluon.jit
    def blocks(self, first, ROWS: gl.constexpr, O: gl.constexpr):
        """The same in blocks; where there is none, one all the same."""
        lo, hi = self.keys(first, ROWS, O)
        return lo // O.KEYS, gl.maximum((hi + O.KEYS - 1) // O.KEYS, lo // O.KEYS + 1)

    @gluon.jit
    def walk(self, first, tile_lo, tile_hi, O: gl.constexpr):
        """(above, lo, hi, below, free_lo, free_hi, half): what the piece at `first` takes of its tile's blocks [tile_lo, tile_hi).

        As they come, the last first: it skips `above`, takes [lo, hi) and skips `below`. In [free_lo, free_hi) each row
        sees all keys. half: 1 where its first block is to be taken as half a block. Of a BlockMask's blocks, whose numbers
        do not say their keys, it takes all.
        """
        lo = tile_lo
        hi = tile_hi
        if not O.BLOCKS:
            lo, hi = self.blocks(first, PIECE, O)
            lo = gl.minimum(gl.maximum(lo, tile_lo), tile_hi - 1)
            hi = gl.minimum(gl.maximum(hi, lo + 1), tile_hi)
        free_lo = 0
        free_hi = self.k_len
        half = 0
        if O.BANDED:
            last = gl.minimum(first + PIECE, self.q_len)
            free_lo, free_hi = mask_free_range(first, last, self.left, self.right, self.diagonal, self.k_len)
            if O.HALF:
                seen = gl.minimum(last + self.diagonal + self.right, self.k_len)
                half = gl.where((seen <= (hi - 1) * O.KEYS + O.KEYS // 2) & (hi - lo > 1), 1, 0)
        return tile_hi - hi, lo, hi, lo - tile_lo, (free_lo + O.KEYS - 1) // O.KEYS, free_hi // O.KEYS, half


# ---- tiles -----------------------------------------------------------------------------------------------------------


@aggregate
class Place:
    """Where a tile of queries is, and the call as its sequence has it."""

    row: gl.tensor  # which tile of its sequence
    s: gl.tensor  # the sequence
    b: gl.tensor  # that, or 0 of a packed one: where in Q, K and O it is
    h: gl.tensor
    q_start: gl.tensor  # the sequence's first query, and how many it has in memory
    q_span: gl.tensor
    k_start: gl.tensor
    v_start: gl.tensor  # its first row in V, where V clips at its end
    call: Call

    @gluon.constexpr_function
    def __init__(self, row, s, b, h, q_start, q_span, k_start, v_start, call):
        self.row = row
        self.s = s
        self.b = b
        self.h = h
        self.q_start = q_start
        self.q_span = q_span
        self.k_start = k_start
        self.v_start = v_start
        self.call = call


@gluon.jit
def place_of(tile, call, lengths, O: gl.constexpr):
    """The tile-th Place. More packed tiles are counted than there are: of some the row is not in their sequence."""
    cu_q, cu_k, q_lens, k_lens, batch, v_apart = lengths
    row, bh = tile_of(tile, call.tiles, call.together, call.total // call.tiles)
    b = bh // call.heads
    h = bh % call.heads
    s = b
    if O.PACKED:
        s, row = sequence_of(row, batch, call.q_len, cu_q, O.ROWS)
    if O.VARIED:
        q_start, q_span, q_len = extent(s, batch, call.q_len, cu_q, q_lens, O.PACKED, O.Q_LENS)
        k_start, _, k_len = extent(s, batch, call.k_len, cu_k, k_lens, O.PACKED, O.K_LENS)
        own = call.with_lengths(uniform(q_len), uniform(k_len), O)
        return Place(row, s, b, h, q_start, q_span, k_start, s * v_apart + k_start, own)
    else:
        return Place(row, s, b, h, b * 0, call.q_len, b * 0, b * 0, call)


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


@gluon.jit
def rows_at(b, head, row, start, end, CLIPPED: gl.constexpr):
    """The same, or where it is in a descriptor of sequences of one length."""
    if CLIPPED:
        return clipped(start, end, head, row)
    else:
        return [b, head, row, 0]


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
def way(lists, s, h, row, lo, hi, SIDE: gl.constexpr, CUT: gl.constexpr):
    """The blocks of SIDE that the row-th tile of sequence s, head h has partners in, for `visit`: (how many, how many of them
    are FULL, where the lists have them).

    FULL ones come first, then MIXED, each in ascending order. lo, hi: which of the partners' positions are wanted, where
    CUT. Of lists the last two say where the tiles' side begins in the mask, and the partners'.
    """
    full_count, full, mixed_count, mixed, mixed_bits = lists[:5]
    batch, blocks_b, blocks_h, blocks_n, blocks_m, base, own, partners = lists[5:]
    PARTS: gl.constexpr = TILE // SIDE
    row = row + own // TILE
    known = (s < batch) & (row < blocks_n)
    at = base + s.to(gl.int64) * blocks_b + h.to(gl.int64) * blocks_h
    at = at * blocks_n + row
    full += at * blocks_m
    mixed += at * blocks_m
    mixed_bits += at * blocks_m
    f, fulls = live(full_count + at, full, known, lo + partners, hi + partners, CUT)
    m, mixes = live(mixed_count + at, mixed, known, lo + partners, hi + partners, CUT)
    return (fulls + mixes) * PARTS, fulls * PARTS, full + f, mixed + m, mixed_bits + m


@gluon.jit
def visit(way, n, lists, beyond, SIDE: gl.constexpr):
    """(its first position, its bit tile's place, or -1) of block n; a tile without any has one, at `beyond`."""
    partners = lists[len(lists) - 1]
    count, fulls, full, mixed, mixed_bits = way
    PARTS: gl.constexpr = TILE // SIDE
    is_mixed = n >= fulls
    entry = gl.where(is_mixed, n - fulls, n) // PARTS
    tile = gl.load(gl.where(is_mixed, mixed, full) + entry, mask=n < count, other=0)
    bits = gl.load(mixed_bits + entry, mask=is_mixed & (n < count), other=-1)
    position = tile * TILE + n % PARTS * SIDE - partners
    return gl.where(n < count, position, beyond), bits
