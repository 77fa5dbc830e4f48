"""FlashAttention-3's forward for Hopper, in Gluon: a producer warp loads by TMA, consumer warpgroups multiply and exponentiate.

Each program is one block of an SM and stays there: it claims tiles of queries, the long ones first, until none is left.
A consumer owns 64 rows of the tile and walks its own range of key blocks, from the last one (where a causal mask's
diagonal is) to the first. Two things overlap with its softmax: its own matmuls, S of the next block being in flight
together with P V of this one (`step`), and the other consumers', who take turns at issuing theirs (ping-pong).

    producer    Q            K_0  K_1 V_0  K_2 V_1  ...  V_n           blocks numbered as they are walked
    consumer    S_0 softmax  S_1 P_0 V_0 softmax  S_2 P_1 V_1 ...  P_n V_n  O

Source: FlashAttention-3 (Shah et al., 2024), Algorithms 1 and 2.
"""

# No `from __future__ import annotations`: an aggregate checks its fields against what their annotations are.

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, warpgroup_mma, warpgroup_mma_wait

from .pipeline import (
    Ring,
    aggregate,
    begin_claim,
    computed,
    end_claim,
    number,
    pass_turn,
    put,
    ring_of,
    stay_before,
    store_by_tma,
    take_turn,
    wait_for_stores,
)  # fmt: skip
from .walk import PIECE, TILE, WALK, Call, place_of, rows_at, visit, way

LOG2E = gl.constexpr(1.4426950408889634)
LN2 = gl.constexpr(0.6931471805599453)
INF = gl.constexpr(float("inf"))
GROWTH = gl.constexpr(8.0)  # bits that a row's maximum may grow by before l and O are rescaled


@aggregate
class Rings:
    """What the producer hands the consumers. Of q, item t * consumers + c is consumer c's piece of tile t.

    tiles: `tell` says what of each. blocks: with a BlockMask, whose lists the producer alone reads, the first key of
    block n and its bit tile's place in the pool, or -1.
    """

    tiles: Ring
    q: Ring
    k: Ring
    v: Ring
    blocks: Ring

    @gluon.constexpr_function
    def __init__(self, tiles, q, k, v, blocks):
        self.tiles = tiles
        self.q = q
        self.k = k
        self.v = v
        self.blocks = blocks


# ---- a tile's message ------------------------------------------------------------------------------------------------


@gluon.jit
def tell(rings, t, place, lo, hi, O: gl.constexpr):
    """Tile t's message: (row, b, h), and what its consumers would else reckon: the producer has the time, while they are at
    the tile before.

    That is each one's walk (`Call.walk`) of the tile's blocks [lo, hi), and the lengths of the tile's sequence in use; of a
    packed one its first query and its queries in memory, too.
    """
    CONSUMERS: gl.constexpr = O.ROWS // PIECE
    message = rings.tiles.acquire(t)
    put(message, 0, (place.row, place.b, place.h))
    if O.TOLD:
        for c in gl.static_range(CONSUMERS):
            put(message, 3 + WALK * c, place.call.walk(place.row * O.ROWS + PIECE * c, lo, hi, O))
    if O.VARIED:
        put(message, 3 + WALK * CONSUMERS, (place.call.q_len, place.call.k_len))
    if O.PACKED:
        put(message, 5 + WALK * CONSUMERS, (place.q_start, place.q_span))
    rings.tiles.commit(t)


@gluon.jit
def walk_of(message, C: gl.constexpr):
    """Consumer C's `Call.walk`."""
    at: gl.constexpr = 3 + WALK * C
    return (
        number(message, at), number(message, at + 1), number(message, at + 2), number(message, at + 3),
        number(message, at + 4), number(message, at + 5), number(message, at + 6),
    )  # fmt: skip


@gluon.jit
def sequence_in(message, call, O: gl.constexpr):
    """(The call as the tile's sequence has it, its first query, its queries in memory)."""
    at: gl.constexpr = 3 + WALK * (O.ROWS // PIECE)
    if O.PACKED:
        own = call.with_lengths(number(message, at), number(message, at + 1), O)
        return own, number(message, at + 2), number(message, at + 3)
    elif O.VARIED:
        return call.with_lengths(number(message, at), number(message, at + 1), O), 0, call.q_len
    else:
        return call, 0, call.q_len


# ---- the producer ----------------------------------------------------------------------------------------------------


@gluon.jit
def producer(q_desc, k_desc, v_desc, counter, lengths, lists, rings, call, O: gl.constexpr):
    """One warp: claims tiles and loads Q, K and V of each. lengths, lists: as `forward_kernel` makes them.

    V of a block follows K of the next one, for that is the order in which they are wanted. The next tile is claimed with
    the last K of this one, as late as possible, so that it goes to the program that will be free first. The last V
    comes before the next Q, which has to wait for the buffer that a consumer reads until it has that V.
    """
    tile = gl.program_id(0)
    t = 0
    n = 0  # blocks loaded
    while tile < call.total:
        place = place_of(tile, call, lengths, O)
        claim = tile
        if not O.PACKED or ((place.row >= 0) & (place.row * O.ROWS < place.q_span)):
            n, claim = load_tile(q_desc, k_desc, v_desc, counter, lists, t, n, claim, place, rings, O)
            t += 1
        else:
            claim = begin_claim(counter)
        tile = end_claim(claim, counter, call.total)
    put(rings.tiles.acquire(t), 0, (-1, 0, 0))
    rings.tiles.commit(t)


@gluon.jit
def load_tile(q_desc, k_desc, v_desc, counter, lists, t, n, claim, place, rings, O: gl.constexpr):
    """(n, the claim of the next tile), with Q of a tile loaded, and K and V of its blocks from number n on.

    Behind a sequence's end Q and K may have whatever is there: those rows of O are not stored, those scores are masked.
    V has zeros there, because 0 * NaN is not 0.
    """
    CONSUMERS: gl.constexpr = O.ROWS // PIECE
    b = place.b
    kv = place.h // place.call.group
    for c in gl.static_range(CONSUMERS):
        rings.q.load(t * CONSUMERS + c, q_desc, [b, place.h, place.q_start + (place.row * O.ROWS + PIECE * c), 0])
    if O.BLOCKS:
        tile_lo, tile_hi = place.call.keys(place.row * O.ROWS, O.ROWS, O)
        blocks = way(lists, place.s, place.h, place.row, tile_lo, tile_hi, O.KEYS, O.CUT)
        count = gl.maximum(blocks[0], 1)
        tell(rings, t, place, 0, count, O)
        before = count * 0
        for j in range(count):
            j0, bits = visit(blocks, j, lists, place.call.k_len, O.KEYS)
            put(rings.blocks.acquire(n), 0, (j0, bits))
            rings.blocks.commit(n)
            if j == count - 1:
                claim = begin_claim(counter)
            rings.k.load(n, k_desc, [b, kv, place.k_start + j0, 0])
            if j > 0:
                rings.v.load(n - 1, v_desc, rows_of_v(place, kv, before, O))
            before = j0
            n += 1
        rings.v.load(n - 1, v_desc, rows_of_v(place, kv, before, O))
    else:
        lo, hi = place.call.blocks(place.row * O.ROWS, O.ROWS, O)
        tell(rings, t, place, lo, hi, O)
        for j in range(hi - lo):
            block = hi - 1 - j
            if block == lo:
                claim = begin_claim(counter)
            rings.k.load(n, k_desc, [b, kv, place.k_start + block * O.KEYS, 0])
            if j > 0:
                rings.v.load(n - 1, v_desc, rows_of_v(place, kv, (block + 1) * O.KEYS, O))
            n += 1
        rings.v.load(n - 1, v_desc, rows_of_v(place, kv, lo * O.KEYS, O))
    return n, claim


@gluon.jit
def rows_of_v(place, kv, j0, O: gl.constexpr):
    """Where V's descriptor has the block at key j0."""
    return rows_at(place.b, kv, j0, place.v_start, place.call.k_len, O.PACKED or O.K_LENS)


# ---- steps -----------------------------------------------------------------------------------------------------------


@gluon.jit
def matrix(buffer):
    """A block of one head, (..., rows, columns) in shared memory, as (rows, columns)."""
    ROWS: gl.constexpr = buffer.shape[len(buffer.shape) - 2]
    COLUMNS: gl.constexpr = buffer.shape[len(buffer.shape) - 1]
    return buffer.reshape([ROWS, COLUMNS])


@gluon.jit
def scores(q, k, O: gl.constexpr):
    """S = Q K^T of a piece and a block of keys in shared memory; asynchronous."""
    KEYS: gl.constexpr = k.shape[0]
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, KEYS, 16])
    if O.Q_IN_REGISTERS:
        q = gl.convert_layout(q, gl.DotOperandLayout(0, layout, 2), assert_trivial=True)
    zero = gl.zeros([PIECE, KEYS], gl.float32, layout)
    return warpgroup_mma(q, k.permute([1, 0]), zero, use_acc=False, is_async=True)


@gluon.jit
def cap(S, call, O: gl.constexpr):
    """The softcap: scores in bits. Without one they stay as they are, and the softmax takes the scale into its subtraction."""
    if O.SOFTCAP:
        S = tanh(S * (call.scale / call.softcap)) * call.softcap
    return S


@gluon.jit
def tanh(x):
    """1 - 2 / (e^2x + 1), and below 0.6 a polynomial, as in the Triton backend's steps: right to 2e-7 of the value."""
    t = x * x
    series = x * (
        0.9999999976
        + t * (-0.3333328397 + t * (0.1333170470 + t * (-0.0537699218 + t * (0.0207574754 - t * 0.0058564278))))
    )
    return gl.where(t < 0.36, series, 1.0 - 2.0 / (gl.exp2(x * (2.0 * LOG2E)) + 1.0))


@gluon.jit
def mask(S, first, j0, call, O: gl.constexpr):
    """-inf where a row of the piece at `first` does not see a key of the block at j0.

    Key 8 a + 2 lane + b is in register (a, b) of a lane: with S so shaped both bounds are compared with constants, and no
    register holds a key's number.
    """
    KEYS: gl.constexpr = S.shape[1]
    S4 = S.reshape([PIECE, KEYS // 8, 4, 2])
    i = numbers(0, S4)
    a = numbers(1, S4)
    lane = numbers(2, S4)
    b = numbers(3, S4)
    on = i + (first + call.diagonal)  # the key on the row's diagonal
    end = gl.minimum(on + call.right + 1, call.k_len) - j0 - 2 * lane
    seen = 8 * a + b < end
    if O.LEFT:
        seen = seen & (8 * a + b >= on - call.left - j0 - 2 * lane)
    S4 = gl.where(seen, S4, -INF)
    return gl.convert_layout(S4.reshape([PIECE, KEYS]), S.type.layout, assert_trivial=True)


@gluon.jit
def bits_mask(S, bits, tile, j0, C: gl.constexpr):
    """-inf where a BlockMask's bit tile hides the pair.

    bits: the pool, (128, 4) int32 a tile: a row's words of 32 keys. Of a word a lane has the bits 8 a + 2 lane + b: shifted
    by 2 lane once, it is tested with constants.
    """
    WORDS: gl.constexpr = S.shape[1] // 32
    S5 = S.reshape([PIECE, WORDS, 4, 4, 2])
    side_by_side: gl.constexpr = gl.DistributedLinearLayout(
        ([[0, 1], [0, 2]] if WORDS == 4 else [[0, 1]]) + [[8, 0]],
        [[0, 0], [0, 0], [1, 0], [2, 0], [4, 0]], [[16, 0], [32, 0]], [], [PIECE, WORDS],
    )  # fmt: skip
    i = gl.arange(0, PIECE, gl.SliceLayout(1, side_by_side))[:, None]
    w = gl.arange(0, WORDS, gl.SliceLayout(0, side_by_side))[None, :]
    pool = bits.to(gl.pointer_type(gl.int32), bitcast=True) + tile.to(gl.int64) * (TILE * TILE // 32)
    at = (PIECE * C + i) * (TILE // 32) + j0 % TILE // S.shape[1] * WORDS + w
    word = gl.load(pool + at)
    of_lane: gl.constexpr = gl.SliceLayout(2, gl.SliceLayout(3, gl.SliceLayout(4, S5.type.layout)))
    word = gl.convert_layout(word, of_lane, assert_trivial=True)[:, :, None, None, None] >> (2 * numbers(3, S5))
    S5 = gl.where((word & (1 << (8 * numbers(2, S5) + numbers(4, S5)))) != 0, S5, -INF)
    return gl.convert_layout(S5.reshape(S.shape), S.type.layout, assert_trivial=True)


@gluon.jit
def numbers(dim: gl.constexpr, x):
    """0, 1, 2, ... along one of x's dimensions; of size 1 along the others."""
    n = gl.arange(0, x.shape[dim], _without_others(dim, len(x.shape), x.type.layout))
    for other in gl.static_range(len(x.shape)):
        if other != dim:
            n = gl.expand_dims(n, other)
    return n


@gluon.constexpr_function
def _without_others(dim, rank, layout):
    for other in reversed(range(rank)):
        if other != dim:
            layout = gl.SliceLayout(other, layout)
    return layout


@gluon.jit
def softmax(S, m, l, call, EMPTY: gl.constexpr, O: gl.constexpr):
    """(P, m, l, alpha) with a block's scores taken in; alpha is what O is to be multiplied by.

    m, what P is 2 to the power of S minus, follows a row's maximum only when that has grown by GROWTH: else alpha is 1,
    and `rescale` has nothing to do. EMPTY: a row may have seen no key yet. l (rows, 4): of each lane its own part.
    """
    KEYS: gl.constexpr = S.shape[1]
    factor = 1.0 if O.SOFTCAP else call.scale
    m_new = gl.maximum(m, gl.max(S, 1) * factor)
    m_new = gl.where(m_new - m > GROWTH, m_new, m)
    pivot = m_new
    if EMPTY:
        pivot = gl.where(m_new == -INF, 0.0, m_new)
    alpha = gl.exp2(m - pivot)
    P = gl.exp2(S * factor - pivot[:, None])
    L: gl.constexpr = l.type.layout
    part = gl.sum(gl.sum(P.reshape([PIECE, KEYS // 8, 4, 2]), 3), 1)
    l = l * gl.convert_layout(alpha, gl.SliceLayout(1, L), assert_trivial=True)[:, None]
    return P, m_new, l + gl.convert_layout(part, L, assert_trivial=True), alpha


@gluon.jit
def rescale(o, alpha):
    """O * alpha; a warp whose rows all have alpha = 1 jumps over the multiplications."""
    alpha = gl.convert_layout(alpha, gl.SliceLayout(1, o.type.layout), assert_trivial=True)
    N: gl.constexpr = o.shape[1] // 2  # registers of a thread
    return gl.inline_asm_elementwise(
        _rescale(N), _constraints(N), [o, alpha[:, None]], dtype=gl.float32, is_pure=True, pack=N
    )


@gluon.constexpr_function
def _rescale(n):
    low, high = f"${2 * n}", f"${2 * n + 2}"  # alpha of a thread's two rows
    products = " ".join(f"mul.f32 ${i}, ${i}, {high if i // 2 % 2 else low};" for i in range(n))
    return (
        f"{{ .reg .pred p, q; setp.neu.f32 p, {low}, 0f3F800000; setp.neu.or.f32 p, {high}, 0f3F800000, p;"
        f" vote.sync.any.pred q, p, 0xffffffff; @!q bra SKIP; {products} SKIP: }}"
    )


@gluon.constexpr_function
def _constraints(n):
    return ",".join(["=f"] * n + [str(i) for i in range(n)] + ["f"] * n)


@gluon.jit
def finalize(m, l, sink, h, SINK: gl.constexpr):
    """(what O is to be multiplied by, lse). The sink, a logit, joins l without a value; an empty row stays empty."""
    factor = 1.0
    if SINK:
        logit = gl.load(sink + h).to(gl.float32) * LOG2E
        m_new = gl.where(l == 0.0, m, gl.maximum(m, logit))
        pivot = gl.where(m_new == -INF, 0.0, m_new)
        factor = gl.exp2(m - pivot)
        l = gl.where(l == 0.0, 0.0, l * factor + gl.exp2(logit - pivot))
        m = m_new
    return gl.where(l == 0.0, 0.0, factor / l), gl.where(l == 0.0, -INF, (m + gl.log2(l)) * LN2)


# ---- the consumers ---------------------------------------------------------------------------------------------------


@gluon.jit
def block_at(n, block, free_lo, free_hi, rings, O: gl.constexpr):
    """(first key, whether some row does not see it all, bit tile or -1) of a piece's block n.

    block: its number by its keys; with a BlockMask the producer tells which one it is.
    """
    if O.BLOCKS:
        told = rings.blocks.wait(n)
        j0 = number(told, 0)
        tile = number(told, 1)
        rings.blocks.release(n)
        block = j0 // O.KEYS
    masked = (block < free_lo) | (block >= free_hi)
    if O.BLOCKS:
        return j0, masked, tile
    else:
        return block * O.KEYS, masked, -1


@gluon.jit
def first_step(q, n, first, block, bits, above, rings, call, KEYS: gl.constexpr, C: gl.constexpr, O: gl.constexpr):
    """(P, m, l) of a piece's first block n, or of the first KEYS keys of it. above: how many blocks it has skipped.

    block: as `block_at` has it. bits: a BlockMask's pool.
    """
    j0, masked, tile = block
    dtype: gl.constexpr = rings.q.buffers.dtype
    m_layout: gl.constexpr = gl.SliceLayout(1, gl.NVMMADistributedLayout([3, 0], [4, 1], [16, O.KEYS, 16]))
    o_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, O.V_WIDTH, 16])
    l_layout: gl.constexpr = gl.DistributedLinearLayout(
        [[8, 0]], [[0, 1], [0, 2], [1, 0], [2, 0], [4, 0]], [[16, 0], [32, 0]], [], [PIECE, 4]
    )
    k = matrix(rings.k.wait(n))
    S = scores(q, k.slice(0, KEYS, dim=0), O)
    S = warpgroup_mma_wait(0, [S])
    rings.k.release(n)
    if above > 0:
        rings.v.skip(n - 1)  # which comes after K of this block
    S = cap(S, call, O)
    if masked:
        S = mask(S, first, j0, call, O)
    if O.BLOCKS and tile >= 0:
        S = bits_mask(S, bits, tile, j0, C)
    m = gl.full([PIECE], -INF, gl.float32, gl.SliceLayout(1, S.type.layout))
    P, m, l, _ = softmax(S, m, gl.zeros([PIECE, 4], gl.float32, l_layout), call, True, O)
    P = P.to(dtype)
    if KEYS < O.KEYS and (O.CONSUMER_REGISTERS < 240 or O.Q_IN_REGISTERS):
        P = computed(P)  # Else ptxas issues the next S first, and has no registers for this one beside it.
    P = gl.convert_layout(P, gl.DotOperandLayout(0, o_layout, 2))
    return P, gl.convert_layout(m, m_layout, assert_trivial=True), l


@gluon.jit
def step(P, o, m, l, q, n, first, block, bits, rings, call, C: gl.constexpr, O: gl.constexpr):
    """S of block n and O += P V of the block before, of as many keys as P has; both are in flight at once, and P V
    during the softmax of S."""
    CONSUMERS: gl.constexpr = O.ROWS // PIECE
    j0, masked, tile = block
    k = rings.k.wait(n)
    take_turn(C)
    S = scores(q, matrix(k), O)
    v = rings.v.wait(n - 1)
    o = warpgroup_mma(P, matrix(v).slice(0, P.shape[1], dim=0), o, is_async=True)
    pass_turn((C + 1) % CONSUMERS)
    S = warpgroup_mma_wait(1, [S])
    rings.k.release(n)
    S = cap(S, call, O)
    if O.MASKED and masked:
        S = mask(S, first, j0, call, O)
    if O.BLOCKS and tile >= 0:
        S = bits_mask(S, bits, tile, j0, C)
    P_next, m, l, alpha = softmax(S, m, l, call, O.MASKED, O)
    stay_before(l)
    o = warpgroup_mma_wait(0, [o])
    rings.v.release(n - 1)
    # Only now: the matmul in flight read P's registers.
    P = gl.convert_layout(P_next.to(rings.q.buffers.dtype), P.type.layout)
    return P, rescale(o, alpha), m, l


@gluon.jit
def of_rows_in_use(o, L, end):
    """(O, lse) with 0 and -inf in rows from `end` on, where Q may have been NaN."""
    used = gl.arange(0, PIECE, L.type.layout) < end
    L = gl.where(used, L, -INF)
    used = gl.convert_layout(used, gl.SliceLayout(1, o.type.layout), assert_trivial=True)
    return gl.where(used[:, None], o, 0.0), L


@gluon.jit
def consumer(o_desc, o_buffers, lse, sink, bits, rings, call, C: gl.constexpr, O: gl.constexpr):
    """One warpgroup: rows [64 C, 64 C + 64) of each tile.

    Of a tile's blocks the other consumers may see some that this one does not: those it hands back as they come, and
    hands the turn on for each, so that all take as many.
    """
    CONSUMERS: gl.constexpr = O.ROWS // PIECE
    dtype: gl.constexpr = rings.q.buffers.dtype
    s_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, O.KEYS, 16])
    V_WIDTH: gl.constexpr = O.V_WIDTH
    o_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, V_WIDTH, 16])
    if C == 0:
        pass_turn(0)
    t = 0
    n = 0  # blocks taken
    row = number(rings.tiles.wait(0), 0)
    while row >= 0:
        message = rings.tiles.buffers.index(t % rings.tiles.STAGES)
        first = row * O.ROWS + PIECE * C
        b = number(message, 1)
        h = number(message, 2)
        own, q_start, q_span = sequence_in(message, call, O)
        if O.TOLD:
            above, lo, hi, below, free_lo, free_hi, half = walk_of(message, C)
        else:
            tile_lo, tile_hi = call.blocks(first, PIECE, O)
            above, lo, hi, below, free_lo, free_hi, half = call.walk(first, tile_lo, tile_hi, O)
        rings.tiles.release(t)

        for j in range(above):
            rings.k.skip(n)
            if j > 0:
                rings.v.skip(n - 1)
            take_turn(C)
            pass_turn((C + 1) % CONSUMERS)
            n += 1
        # V of the last of them comes after K of the first own block: it is handed back when S of that has been made.

        item = t * CONSUMERS + C
        q_buffer = rings.q.wait(item)
        q = matrix(q_buffer)
        if O.Q_IN_REGISTERS:
            q = q.load(gl.DotOperandLayout(0, s_layout, 2))
            rings.q.release(item)
        o = gl.zeros([PIECE, V_WIDTH], gl.float32, o_layout)
        hi -= 1
        block = block_at(n, hi, free_lo, free_hi, rings, O)
        if O.HALF and half > 0:
            P_half, m, l = first_step(q, n, first, block, bits, above, rings, own, O.KEYS // 2, C, O)
            hi -= 1
            n += 1
            block = block_at(n, hi, free_lo, free_hi, rings, O)
            P, o, m, l = step(P_half, o, m, l, q, n, first, block, bits, rings, own, C, O)
        else:
            P, m, l = first_step(q, n, first, block, bits, above, rings, own, O.KEYS, C, O)
        n += 1
        for j in range(hi - lo):
            block = block_at(n, hi - 1 - j, free_lo, free_hi, rings, O)
            P, o, m, l = step(P, o, m, l, q, n, first, block, bits, rings, own, C, O)
            n += 1
        if not O.O_IN_Q and not O.Q_IN_REGISTERS:
            rings.q.release(item)
        v = rings.v.wait(n - 1)
        o = warpgroup_mma(P, matrix(v), o, is_async=True)
        l_row = gl.convert_layout(gl.sum(l, 1), gl.SliceLayout(1, s_layout))
        o = warpgroup_mma_wait(0, [o])
        rings.v.release(n - 1)
        for _ in range(below):
            take_turn(C)
            pass_turn((C + 1) % CONSUMERS)
            rings.k.skip(n)
            rings.v.skip(n)
            n += 1

        factor, L = finalize(m, l_row, sink, h, O.SINK)
        factor = gl.convert_layout(factor, gl.SliceLayout(1, o_layout), assert_trivial=True)
        if O.O_IN_Q:
            buffer = q_buffer
        else:
            buffer = o_buffers.index(C)
            wait_for_stores()
        o *= factor[:, None]
        if O.VARIED:
            o, L = of_rows_in_use(o, L, own.q_len - first)
        store_by_tma(o.to(dtype), buffer, o_desc, rows_at(b, h, first, q_start, q_span, O.PACKED))
        at = first + gl.arange(0, PIECE, gl.SliceLayout(1, s_layout))
        gl.store(lse + (b.to(gl.int64) * call.heads + h) * call.q_len + q_start + at, L, mask=at < q_span)
        if O.O_IN_Q:
            wait_for_stores()
            rings.q.release(item)
        t += 1
        row = number(rings.tiles.wait(t), 0)
    rings.tiles.release(t)
    wait_for_stores()


@gluon.constexpr_function
def stacked(n, block):
    """The shape of n buffers of a block."""
    return [n, *block]


@gluon.jit(
    do_not_specialize=[
        "q_len", "k_len", "diagonal", "left", "right", "scale", "softcap", "heads", "group", "tiles", "together", "total",
        "batch", "v_apart", "blocks_b", "blocks_h", "blocks_n", "blocks_m", "base", "i0", "j0",
    ]
)  # fmt: skip
def forward_kernel(
    o, q, k, v, lse, sink, counter, cu_q, cu_k, q_lens, k_lens, full_count, full, mixed_count, mixed, mixed_bits, bits,
    q_len, k_len, diagonal, left, right, scale, softcap, heads, group, tiles, together, total, batch, v_apart,
    blocks_b, blocks_h, blocks_n, blocks_m, base, i0, j0, O: gl.constexpr,
):  # fmt: skip
    """o, q, k, v: TMA descriptors of (B, H, S, D) in blocks of 64 rows (o, q) or KEYS; lse (B, Hq, Sq), contiguous.

    Packed: q and k of (1, H, T, D), o and v `tensors.ragged`, v with k_lens too; lse (Hq, T), q_len and k_len are T.
    sink: (Hq,) or None. counter: one int32, 0 before the launch and after it. v_apart: rows of V between sequences.
    full_count ... bits: a BlockMask's query-major lists and its pool, or None; blocks_*: their strides; base: where
    (b, h) = 0 is among their rows.
    """
    CONSUMERS: gl.constexpr = O.ROWS // PIECE
    plain: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    tile_buffers = gl.allocate_shared_memory(gl.int32, [2, 32], plain)
    q_buffers = gl.allocate_shared_memory(q.dtype, stacked(O.QUERIES * CONSUMERS, q.block_shape), q.layout)
    k_buffers = gl.allocate_shared_memory(k.dtype, stacked(O.STAGES, k.block_shape), k.layout)
    v_buffers = gl.allocate_shared_memory(v.dtype, stacked(O.STAGES, v.block_shape), v.layout)
    o_buffers = q_buffers
    if not O.O_IN_Q:
        o_buffers = gl.allocate_shared_memory(o.dtype, stacked(CONSUMERS, o.block_shape), o.layout)
    tile_ring = ring_of(tile_buffers, CONSUMERS)
    block_ring = tile_ring
    if O.BLOCKS:
        block_ring = ring_of(gl.allocate_shared_memory(gl.int32, [4, 2], plain), CONSUMERS)
    rings = Rings(
        tile_ring, ring_of(q_buffers, 1), ring_of(k_buffers, CONSUMERS), ring_of(v_buffers, CONSUMERS), block_ring
    )  # fmt: skip
    fence_async_shared()
    call = Call(q_len, k_len, diagonal, left, right, scale, softcap, heads, group, tiles, together, total)
    lengths = (cu_q, cu_k, q_lens, k_lens, batch, v_apart)
    lists = (
        full_count, full, mixed_count, mixed, mixed_bits, batch, blocks_b, blocks_h, blocks_n, blocks_m, base, i0, j0,
    )  # fmt: skip
    # Arguments that are compile-time constants stay that only in tuples written in the call.
    if CONSUMERS == 2:
        gl.warp_specialize([
            (consumer, (o, o_buffers, lse, sink, bits, rings, call, 0, O)),
            (consumer, (o, o_buffers, lse, sink, bits, rings, call, 1, O)),
            (producer, (q, k, v, counter, lengths, lists, rings, call, O)),
        ], [4, 1], [O.CONSUMER_REGISTERS, O.PRODUCER_REGISTERS])  # fmt: skip
    else:
        gl.warp_specialize([
            (consumer, (o, o_buffers, lse, sink, bits, rings, call, 0, O)),
            (consumer, (o, o_buffers, lse, sink, bits, rings, call, 1, O)),
            (consumer, (o, o_buffers, lse, sink, bits, rings, call, 2, O)),
            (producer, (q, k, v, counter, lengths, lists, rings, call, O)),
        ], [4, 4, 1], [O.CONSUMER_REGISTERS, O.CONSUMER_REGISTERS, O.PRODUCER_REGISTERS])  # fmt: skip
