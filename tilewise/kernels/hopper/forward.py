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
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, warpgroup_mma_wait

from .dropout import drop, lots_of
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
    ring_of_parts,
    stay_before,
    stay_behind,
    take_turn,
    wait_for_stores,
)  # fmt: skip
from .steps import (
    INF,
    accumulator,
    add_values,
    bits_mask,
    buffers_of,
    cap,
    finalize,
    mask,
    of_rows_in_use,
    rescale,
    scores,
    softmax,
    store,
    times,
    wait_for,
    wait_for_values,
    zeros,
)
from .walk import PIECE, WALK, Call, place_of, rows_at, visit, way


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
        if O.DROPOUT:
            put(message, 7 + WALK * CONSUMERS, (place.s,))
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
        rings.q.load_parts(t * CONSUMERS + c, q_desc, [b, place.h, place.q_start + (place.row * O.ROWS + PIECE * c), 0])
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
            rings.k.load_parts(n, k_desc, [b, kv, place.k_start + j0, 0])
            if j > 0:
                rings.v.load_parts(n - 1, v_desc, rows_of_v(place, kv, before, O))
            before = j0
            n += 1
        rings.v.load_parts(n - 1, v_desc, rows_of_v(place, kv, before, O))
    else:
        lo, hi = place.call.blocks(place.row * O.ROWS, O.ROWS, O)
        tell(rings, t, place, lo, hi, O)
        for j in range(hi - lo):
            block = hi - 1 - j
            if block == lo:
                claim = begin_claim(counter)
            rings.k.load_parts(n, k_desc, [b, kv, place.k_start + block * O.KEYS, 0])
            if j > 0:
                rings.v.load_parts(n - 1, v_desc, rows_of_v(place, kv, (block + 1) * O.KEYS, O))
            n += 1
        rings.v.load_parts(n - 1, v_desc, rows_of_v(place, kv, lo * O.KEYS, O))
    return n, claim


@gluon.jit
def rows_of_v(place, kv, j0, O: gl.constexpr):
    """Where V's descriptor has the block at key j0."""
    return rows_at(place.b, kv, j0, place.v_start, place.call.k_len, O.PACKED or O.K_LENS)


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
def first_step(
    q, n, first, block, bits, above, lots, rings, call, KEYS: gl.constexpr, C: gl.constexpr, O: gl.constexpr
):
    """(P, m, l) of a piece's first block n, or of the first KEYS keys of it. above: how many blocks it has skipped.

    block: as `block_at` has it. bits: a BlockMask's pool.
    """
    j0, masked, tile = block
    dtype: gl.constexpr = rings.q.buffers.dtype
    m_layout: gl.constexpr = gl.SliceLayout(1, accumulator(O.KEYS))
    p_layout: gl.constexpr = gl.DotOperandLayout(0, accumulator(O.KEYS), 2)
    l_layout: gl.constexpr = gl.DistributedLinearLayout(
        [[8, 0]], [[0, 1], [0, 2], [1, 0], [2, 0], [4, 0]], [[16, 0], [32, 0]], [], [PIECE, 4]
    )
    S = scores(q, wait_for(rings.k, n), KEYS, O)
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
    if O.DROPOUT:
        P = drop(P, lots, j0)
    P = P.to(dtype)
    if KEYS < O.KEYS and (O.CONSUMER_REGISTERS < 240 or O.Q_IN_REGISTERS):
        P = computed(P)  # Else ptxas issues the next S first, and has no registers for this one beside it.
    P = gl.convert_layout(P, p_layout)
    return P, gl.convert_layout(m, m_layout, assert_trivial=True), l


@gluon.jit
def step(P, o, m, l, q, n, first, block, bits, lots, rings, call, C: gl.constexpr, O: gl.constexpr):
    """S of block n and O += P V of the block before, of as many keys as P has; both are in flight at once, and P V
    during the softmax of S."""
    CONSUMERS: gl.constexpr = O.ROWS // PIECE
    j0, masked, tile = block
    k = wait_for(rings.k, n)
    take_turn(C)
    S = scores(q, k, O.KEYS, O)
    o = add_values(P, wait_for(rings.v, n - 1), o)
    pass_turn((C + 1) % CONSUMERS)
    S = warpgroup_mma_wait(len(o), [S])
    rings.k.release(n)
    S = cap(S, call, O)
    if O.MASKED and masked:
        S = mask(S, first, j0, call, O)
    if O.BLOCKS and tile >= 0:
        S = bits_mask(S, bits, tile, j0, C)
    if O.DROPOUT:
        stay_behind(j0)
    P_next, m, l, alpha = softmax(S, m, l, call, O.MASKED, O)
    stay_before(l)
    if O.DROPOUT:
        P_next = drop(P_next, lots, j0)
        if O.KEYS < 128:
            P_next = computed(
                P_next.to(rings.q.buffers.dtype)
            )  # Else beside wide O's ptxas drops pairs after the wait, and spills.
    o = wait_for_values(o)
    rings.v.release(n - 1)
    # Only now: the matmul in flight read P's registers.
    P = gl.convert_layout(P_next.to(rings.q.buffers.dtype), P.type.layout)
    return P, [rescale(part, alpha) for part in o], m, l


@gluon.jit
def consumer(o_desc, o_buffers, lse, sink, bits, draw, rings, call, C: gl.constexpr, O: gl.constexpr):
    """One warpgroup: rows [64 C, 64 C + 64) of each tile.

    Of a tile's blocks the other consumers may see some that this one does not: those it hands back as they come, and
    hands the turn on for each, so that all take as many.
    """
    CONSUMERS: gl.constexpr = O.ROWS // PIECE
    s_layout: gl.constexpr = accumulator(O.KEYS)
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
        lots: gl.tuple = ()
        if O.DROPOUT:
            lots = lots_of(draw, number(message, 7 + WALK * CONSUMERS) if O.PACKED else b, h, first)
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
        q = wait_for(rings.q, item)
        if O.Q_IN_REGISTERS:
            q = [part.load(gl.DotOperandLayout(0, s_layout, 2)) for part in q]
        o = zeros(O.V_WIDTH)
        hi -= 1
        block = block_at(n, hi, free_lo, free_hi, rings, O)
        if O.HALF and half > 0:
            P_half, m, l = first_step(q, n, first, block, bits, above, lots, rings, own, O.KEYS // 2, C, O)
            hi -= 1
            n += 1
            block = block_at(n, hi, free_lo, free_hi, rings, O)
            P, o, m, l = step(P_half, o, m, l, q, n, first, block, bits, lots, rings, own, C, O)
        else:
            P, m, l = first_step(q, n, first, block, bits, above, lots, rings, own, O.KEYS, C, O)
        if O.Q_IN_REGISTERS:
            rings.q.release(item)  # its loads into registers are done: S has been made of them
        n += 1
        for j in range(hi - lo):
            block = block_at(n, hi - 1 - j, free_lo, free_hi, rings, O)
            P, o, m, l = step(P, o, m, l, q, n, first, block, bits, lots, rings, own, C, O)
            n += 1
        if not O.O_IN_Q and not O.Q_IN_REGISTERS:
            rings.q.release(item)
        o = add_values(P, wait_for(rings.v, n - 1), o)
        l_row = gl.convert_layout(gl.sum(l, 1), gl.SliceLayout(1, s_layout))
        o = wait_for_values(o)
        rings.v.release(n - 1)
        for _ in range(below):
            take_turn(C)
            pass_turn((C + 1) % CONSUMERS)
            rings.k.skip(n)
            rings.v.skip(n)
            n += 1

        factor, L = finalize(m - O.HEADROOM, l_row, sink, h, O.SINK)
        if O.DROPOUT:
            factor *= draw[2]  # 1 / (1 - p)
        if O.O_IN_Q:
            place = rings.q.parts(item)[: len(o)]
        else:
            place = [part.index(C) for part in o_buffers]
            wait_for_stores()
        o = [times(part, factor) for part in o]
        if O.VARIED:
            o, L = of_rows_in_use(o, L, own.q_len - first)
        store(o, place, o_desc, rows_at(b, h, first, q_start, q_span, O.PACKED))
        at = first + gl.arange(0, PIECE, gl.SliceLayout(1, s_layout))
        gl.store(lse + (b.to(gl.int64) * call.heads + h) * call.q_len + q_start + at, L, mask=at < q_span)
        if O.O_IN_Q:
            wait_for_stores()
            rings.q.release(item)
        t += 1
        row = number(rings.tiles.wait(t), 0)
    rings.tiles.release(t)
    wait_for_stores()


@gluon.jit(
    do_not_specialize=[
        "q_len", "k_len", "diagonal", "left", "right", "scale", "softcap", "heads", "group", "tiles", "together", "total",
        "batch", "v_apart", "blocks_b", "blocks_h", "blocks_n", "blocks_m", "base", "i0", "j0", "b0", "h0", "least",
        "inverse_keep",
    ]
)  # fmt: skip
def forward_kernel(
    o, q, k, v, lse, sink, seed, counter, cu_q, cu_k, q_lens, k_lens, full_count, full, mixed_count, mixed, mixed_bits, bits,
    q_len, k_len, diagonal, left, right, scale, softcap, heads, group, tiles, together, total, batch, v_apart,
    blocks_b, blocks_h, blocks_n, blocks_m, base, i0, j0, b0, h0, least, inverse_keep, O: gl.constexpr,
):  # fmt: skip
    """o, q, k, v: TMA descriptors of (B, H, S, D) in blocks of 64 rows (o, q) or KEYS, and of a chunk's columns.

    lse: (B, Hq, Sq), contiguous. Packed: q and k of (1, H, T, D), o and v `tensors.ragged`, v with k_lens too; lse (Hq, T), q_len and k_len are T.
    sink: (Hq,) or None. seed: of dropout, one int64, or None; least: the largest word that is dropped. counter: one int32, 0 before the
    launch and after it. v_apart: rows of V between sequences.
    full_count ... bits: a BlockMask's query-major lists and its pool, or None; blocks_*: their strides; base: where
    (b, h) = 0 is among their rows.
    """
    CONSUMERS: gl.constexpr = O.ROWS // PIECE
    plain: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    tile_buffers = gl.allocate_shared_memory(gl.int32, [2, 32], plain)
    q_buffers = buffers_of(O.QUERIES * CONSUMERS, O.WIDTH, q)
    k_buffers = buffers_of(O.STAGES, O.WIDTH, k)
    v_buffers = buffers_of(O.STAGES, O.V_WIDTH, v)
    o_buffers = q_buffers
    if not O.O_IN_Q:
        o_buffers = buffers_of(CONSUMERS, O.V_WIDTH, o)
    tile_ring = ring_of(tile_buffers, CONSUMERS)
    block_ring = tile_ring
    if O.BLOCKS:
        block_ring = ring_of(gl.allocate_shared_memory(gl.int32, [4, 2], plain), CONSUMERS)
    rings = Rings(
        tile_ring, ring_of_parts(q_buffers, 1), ring_of_parts(k_buffers, CONSUMERS),
        ring_of_parts(v_buffers, CONSUMERS), block_ring,
    )  # fmt: skip
    fence_async_shared()
    call = Call(q_len, k_len, diagonal, left, right, scale, softcap, heads, group, tiles, together, total)
    lengths = (cu_q, cu_k, q_lens, k_lens, batch, v_apart)
    lists = (
        full_count, full, mixed_count, mixed, mixed_bits, batch, blocks_b, blocks_h, blocks_n, blocks_m, base, i0, j0,
    )  # fmt: skip
    draw = (seed, least, inverse_keep, b0, h0, i0, j0)
    # Arguments that are compile-time constants stay that only in tuples written in the call.
    if CONSUMERS == 2:
        gl.warp_specialize([
            (consumer, (o, o_buffers, lse, sink, bits, draw, rings, call, 0, O)),
            (consumer, (o, o_buffers, lse, sink, bits, draw, rings, call, 1, O)),
            (producer, (q, k, v, counter, lengths, lists, rings, call, O)),
        ], [4, 1], [O.CONSUMER_REGISTERS, O.PRODUCER_REGISTERS])  # fmt: skip
    else:
        gl.warp_specialize([
            (consumer, (o, o_buffers, lse, sink, bits, draw, rings, call, 0, O)),
            (consumer, (o, o_buffers, lse, sink, bits, draw, rings, call, 1, O)),
            (consumer, (o, o_buffers, lse, sink, bits, draw, rings, call, 2, O)),
            (producer, (q, k, v, counter, lengths, lists, rings, call, O)),
        ], [4, 4, 1], [O.CONSUMER_REGISTERS, O.CONSUMER_REGISTERS, O.PRODUCER_REGISTERS])  # fmt: skip
