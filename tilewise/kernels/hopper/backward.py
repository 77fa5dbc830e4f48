"""FlashAttention-3's backward for Hopper: one main kernel in Gluon, between two small ones of `backward_rows` that only move bytes.

    prepare_kernel   delta = rowsum(dO * O) - dlse and lse, as the main kernel's accumulators begin with them; zeros for dQ
    backward_kernel  a tile of 128 keys stays, queries pass by, those of all query heads of the group:
                     S^T = K Q^T    dP^T = V dO^T    P = 2^(S - L)    dS = P * (dP - delta)
                     dV += P^T dO   dK += dS^T Q     dQ += dS K
    convert_kernel   dQ from fp32, times the scale

Each program is one block of an SM and stays there: it claims tiles, the long ones first, until none is left. What comes next
is loaded while the last tile's dK and dV leave.

A consumer warpgroup owns 64 of the keys. S and dP are made transposed, so that P^T and dS^T lie in registers as the first
operands of dV and dK. Only dQ sums over the keys of both consumers: dS^T goes through shared memory, and each consumer
makes a share of dQ's block, which a warp beside it (`adder`) has TMA add to an fp32 accumulator in global memory. The
accumulator's elements lie there as they lie in registers, so that nothing is moved between threads on the way. Programs add
in whatever order they come by; ORDERED, they take turns at it, and dQ has the same bits each time, too.

Sequences that have lengths of their own: statistics and the accumulator have 128 rows or a multiple for each, so that a
packed one begins at row 128 (cu_q[s] // 128 + s) of them; behind its last row P is 0 there.

Source: FlashAttention-3 (Shah et al., 2024), section 3 and appendix B.1.
"""

# No `from __future__ import annotations`: an aggregate checks its fields against what their annotations are.

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, warpgroup_mma_wait

from .backward_drawer import drawer
from .backward_steps import (
    add_product,
    begin_with,
    in_registers,
    put_share,
    queries,
    score_gradient,
    share_columns,
    share_of_dq,
    turned_product,
)
from .backward_tiles import (
    KEYS,
    Rings,
    block_told,
    free_queries,
    place_of_keys,
    place_told,
    query_blocks,
    shares_before,
    shares_of_head,
    tell,
)
from .dropout import drawn, lots_of_keys, words_in, words_ring
from .pipeline import (
    await_turn,
    begin_claim,
    end_claim,
    end_turn,
    load_chunks,
    matrix,
    meet,
    number,
    put,
    ring_of,
    ring_of_parts,
    seen_as,
    stacked,
    tma_add,
    tma_load,
    wait_for_stores,
)  # fmt: skip
from .steps import buffers_of, scaled, store, zeros
from .walk import PIECE, Call, key_range, rows_at, visit, way

# ---- the producer ----------------------------------------------------------------------------------------------------


@gluon.jit
def producer(q_desc, k_desc, v_desc, do_desc, statistics_desc, counter, lengths, lists, rings, call, O: gl.constexpr):
    """One warp: claims tiles, and loads of each K and V, then block after block of each query head.

    The next tile is claimed behind the last block of this one, as late as possible, so that it goes to the program that will
    be free first.
    """
    tile = gl.program_id(0)
    if O.ORDERED:
        tile = claim(counter, call, O)
    t = 0
    n = 0  # blocks loaded
    while tile < call.total:
        place, starts = place_of_keys(tile, call, lengths, O)
        if not O.PACKED or (place.first < place.k_span):
            tell(rings, t, place, O)
            n = load_tile(
                q_desc, k_desc, v_desc, do_desc, statistics_desc, lengths, lists, t, n, place, starts, rings, call, O
            )
            t += 1
        tile = claim(counter, call, O)
    put(rings.tiles.acquire(t), 0, (-1,))
    rings.tiles.commit(t)


@gluon.jit
def claim(counter, call, O: gl.constexpr):
    """The next tile; call.total or more: there is none left.

    Ordered, programs claim their first one, too. A tile waits for lower ones only, and those are then all with programs at
    work, none with one that has to wait for an SM. Of tiles not done the lowest waits for none, and its program has done
    all that it claimed before: there is always one that goes on.
    """
    if O.ORDERED:
        programs = gl.num_programs(0)
        return end_claim(begin_claim(counter), counter, call.total + programs) - programs
    else:
        return end_claim(begin_claim(counter), counter, call.total)


@gluon.jit
def load_tile(
    q_desc, k_desc, v_desc, do_desc, statistics_desc, lengths, lists, t, n, place, starts, rings, call, O: gl.constexpr
):
    """n, with tile t's K and V loaded, and its blocks of queries, from number n on.

    The first block comes before K and V, whose places are the last of the tile before that are free. Behind a sequence's end
    all of them have zeros, whatever is there: 0 * NaN is not 0.
    """
    before = n
    lo, hi = query_blocks(place.first, place.call, O.ROWS)
    for member in range(call.group):
        h = place.kv * call.group + member
        if O.BLOCKS:
            head_share = shares_before(place, member, shares_of_head(call, lengths, O), call, 0)
            blocks = way(lists, starts[0], h, place.first // KEYS, lo * O.ROWS, hi * O.ROWS, O.ROWS, O.CUT)
            for j in range(blocks[0]):
                i0, bits = visit(blocks, j, lists, 0, O.ROWS)
                block = i0 // O.ROWS
                put(rings.blocks.acquire(n + t), 0, (head_share + 2 * block, block, bits, h))
                rings.blocks.commit(n + t)
                load_queries(q_desc, do_desc, statistics_desc, n, h, block, place, starts, rings, O)
                if n == before:
                    load_keys(k_desc, v_desc, t, place, starts, rings, O)
                n += 1
        else:
            for block in range(lo, hi):
                load_queries(q_desc, do_desc, statistics_desc, n, h, block, place, starts, rings, O)
                if n == before:
                    load_keys(k_desc, v_desc, t, place, starts, rings, O)
                n += 1
    if n == before:
        load_keys(k_desc, v_desc, t, place, starts, rings, O)
    if O.BLOCKS:
        put(rings.blocks.acquire(n + t), 0, (-1, 0, 0, 0))
        rings.blocks.commit(n + t)
    return n


@gluon.jit
def load_keys(k_desc, v_desc, t, place, starts, rings, O: gl.constexpr):
    """Tile t's K and V."""
    _, _, _, k_start, v_start = starts
    end = place.call.k_len
    for c in gl.static_range(2):
        at = place.first + PIECE * c
        rings.v.load_parts(2 * t + c, v_desc, rows_at(place.b, place.kv, at, v_start, end, O.K_CLIPPED))
    for c in gl.static_range(2):
        at = place.first + PIECE * c
        rings.k.load_parts(2 * t + c, k_desc, rows_at(place.b, place.kv, at, k_start, end, O.K_CLIPPED))


@gluon.jit
def load_queries(q_desc, do_desc, statistics_desc, n, h, block, place, starts, rings, O: gl.constexpr):
    """Item n of rings.q: a block of head h's queries."""
    own = place.call
    _, q_start, do_start, _, _ = starts
    full = rings.q.expect(n, rings.BYTES)
    at = n % O.STAGES
    i0 = block * O.ROWS
    q_at = rows_at(place.b, h, i0, q_start, own.q_len, O.Q_CLIPPED)
    do_at = rows_at(place.b, h, i0, do_start, own.q_len, O.Q_CLIPPED)
    load_chunks(rings.q.place(at), q_desc, q_at, full)
    padded = [0, place.b * own.heads + h, (place.before + block) * O.ROWS]
    tma_load(statistics_desc, padded, full, rings.statistics.index(at))
    load_chunks([part.index(at) for part in rings.do], do_desc, do_at, full)


# ---- the adders ------------------------------------------------------------------------------------------------------


@gluon.jit
def turn_of(first, block, call, O: gl.constexpr):
    """How many tiles of keys add to a block's dQ before the tile at `first`, one of those that the block sees.

    Those behind it. Of a causal mask the tile on the diagonal is the first, and as all tiles begin there, none has to wait.
    """
    i0 = block * O.ROWS
    last = gl.minimum(i0 + O.ROWS, call.q_len)
    _, hi = key_range(i0, last, call.left, call.right, call.diagonal, call.k_len)
    return (hi - 1 - first) // KEYS


@gluon.jit
def adder(dq_desc, turns, lengths, rings, call, C: gl.constexpr, O: gl.constexpr):
    """One warp: adds consumer C's shares to the accumulator; ordered, each when its turn has come.

    turns: how many adds each share has in memory. A turn ends when its sum is there, for the next may be of another SM.
    """
    t = 0
    n = 0  # blocks added
    first = number(rings.tiles.wait(0), 0)
    while first >= 0:
        place = place_told(first, rings.tiles.buffers.index(t % rings.tiles.STAGES), call, O)
        rings.tiles.release(t)
        if O.BLOCKS:
            share, _, _, _ = block_told(n + t, rings)
            while share >= 0:
                add_share(dq_desc, n, share + C, rings, C, O)
                n += 1
                share, _, _, _ = block_told(n + t, rings)
        else:
            lo, hi = query_blocks(place.first, place.call, O.ROWS)
            a_head = shares_of_head(call, lengths, O)
            for member in range(call.group):
                head_share = shares_before(place, member, a_head, call, C)
                for block in range(lo, hi):
                    share = head_share + 2 * block
                    if O.ORDERED:  # mostly it has come before the share
                        await_turn(turns + share, turn_of(place.first, block, place.call, O))
                    add_share(dq_desc, n, share, rings, C, O)
                    if O.ORDERED:
                        end_turn(turns + share)
                    n += 1
        t += 1
        first = number(rings.tiles.wait(t), 0)
    rings.tiles.release(t)


@gluon.jit
def add_share(dq_desc, n, share, rings, C: gl.constexpr, O: gl.constexpr):
    """Add consumer C's share of block n to the accumulator, in which a block's two shares lie one behind the other."""
    SIDE: gl.constexpr = dq_desc.block_shape[0]
    buffer = rings.dq.wait(2 * n + C)
    if buffer.shape[0] == SIDE:  # shares are alike
        tma_add(dq_desc, [share * SIDE, 0], buffer)
    else:
        row = (share - C) * (O.ROWS * O.WIDTH // 512) + C * buffer.shape[0]
        parts = seen_as(buffer, stacked(buffer.shape[0] // SIDE, dq_desc.block_shape), dq_desc.layout)
        for part in gl.static_range(PIECE * share_columns(C, O.ROWS, O.WIDTH) // 256 // SIDE):
            tma_add(dq_desc, [row + SIDE * part, 0], parts.index(part))
    wait_for_stores()
    rings.dq.release(2 * n + C)


# ---- the consumers ---------------------------------------------------------------------------------------------------


@gluon.jit
def step(
    dk, dv, held, lots, n, h, first, i0, free_lo, free_hi, tile, bits, rings, ds_buffers, call, C: gl.constexpr,
    O: gl.constexpr,
):  # fmt: skip
    """(dK, dV) with block n of head h's queries taken in, and its dQ sent off. tile: its bits' place in the pool, or -1.

    lots: dropout's. Its words are drawn while the matmuls run whose scores they are for. Of 128 queries the second half's S is in flight from the start: the tensor cores have it to do during the first's
    exponentials, and dP, dV and dK during the second's. held: K and V in registers, or nothing.
    """
    TWO: gl.constexpr = O.ROWS > PIECE
    PARTS: gl.constexpr = len(dk)
    dtype: gl.constexpr = rings.q.buffers.dtype
    operand: gl.constexpr = gl.DotOperandLayout(0, dk[0].type.layout, 2)
    zero = n >> 30  # Else wgmma's descriptors of K and V are computed before the loop, kept, and spilled.
    k = [matrix(part) for part in rings.k.place(C + zero)]
    v = [matrix(part) for part in rings.v.place(C + zero)]
    if O.HELD:
        k, v = held
    rings.q.wait(n)
    at = n % O.STAGES
    dS_at = 2 * (n % 2)
    own_dS = ds_buffers.index(dS_at + C)

    q, do, L, delta = queries(rings, at, 0)
    S = begin_with(gl.zeros_like(L) if O.SOFTCAP else L)
    dP = None
    if not O.DROPOUT:
        dP = begin_with(delta)
    if TWO:
        q2, do2, L2, delta2 = queries(rings, at, 1)
        S2 = begin_with(gl.zeros_like(L2) if O.SOFTCAP else L2)
    # All set before the first wgmma: ptxas waits for that before it lets the others' registers be written.
    if O.DROPOUT and TWO:
        S, S2 = warpgroup_mma_wait(0, [S, S2])
    elif O.DROPOUT:
        S = warpgroup_mma_wait(0, [S])
    elif TWO:
        S, dP, S2 = warpgroup_mma_wait(0, [S, dP, S2])
    else:
        S, dP = warpgroup_mma_wait(0, [S, dP])
    S = turned_product(k, q, S)
    dP = turned_product(v, do, dP)
    if TWO:
        S2 = turned_product(k, q2, S2)

    words: gl.tuple = (None, None)
    late: gl.tuple = (None, delta2 if TWO else None)
    if O.DRAWN:
        words = (words_in(rings.words.wait(n), C), None)
    elif O.DROPOUT:
        words = (drawn(lots, h, i0), None)
    if O.DROPOUT:
        late = (delta, late[1])
    masked = (i0 < free_lo) | (i0 + PIECE > free_hi)
    P, dS = score_gradient(
        S, dP, L, late[0], words[0], first, i0, masked, tile, bits, 2 if TWO else PARTS, 1 if TWO else 0, dtype, call,
        C, O,
    )  # fmt: skip
    own_dS.slice(0, PIECE, dim=1).store(dS)
    P = gl.convert_layout(P, operand)
    dS = gl.convert_layout(dS, operand)
    if TWO:
        dP2 = turned_product(v, do2, None)
    dv = add_product(P, do, dv)
    if TWO:
        dk = add_product(dS, q, dk)
        if O.DRAWN:
            words = (None, words_in(rings.words.wait(n), 2 + C))
        elif O.DROPOUT:
            words = (None, drawn(lots, h, i0 + PIECE))
        masked = (i0 + PIECE < free_lo) | (i0 + 2 * PIECE > free_hi)
        P2, dS2 = score_gradient(
            S2, dP2, L2, late[1], words[1], first, i0 + PIECE, masked, tile, bits, 3, 2, dtype, call, C, O
        )
        own_dS.slice(PIECE, PIECE, dim=1).store(dS2)
        P2 = gl.convert_layout(P2, operand)
        dS2 = gl.convert_layout(dS2, operand)
        dv = add_product(P2, do2, dv)
    fence_async_shared()
    meet()  # dS of both is there; and both have read the one before the last, whose place is the next one's
    dq = share_of_dq(ds_buffers, dS_at, rings.k, zero, C, O)
    if TWO:
        dk = add_product(dS2, q2, dk)
    else:
        dk = add_product(dS, q, dk)
    dq = warpgroup_mma_wait(PARTS, [dq])
    put_share(dq, rings.dq.acquire(2 * n + C))
    rings.dq.commit(2 * n + C)
    operands: gl.tuple = (P, dS)
    if TWO:
        operands += (P2, dS2)
    sums = warpgroup_mma_wait(0, dk + dv + operands)
    rings.q.release(n)
    if O.DRAWN:
        rings.words.release(n)
    return sums[:PARTS], sums[PARTS : 2 * PARTS]


@gluon.jit
def consumer(dk_desc, dv_desc, ds_buffers, bits, draw, rings, call, C: gl.constexpr, O: gl.constexpr):
    """One warpgroup: keys [64 C, 64 C + 64) of each tile, and a share of each block's dQ. bits: a BlockMask's pool by keys.
    draw: as `backward_kernel` makes it.

    dK and dV are stored through the place that is the next block's dS, so that K and V make room for the next tile's as soon
    as they have been read, or, where blocks have 64 rows and it is too small, through K's and V's.
    """
    dtype: gl.constexpr = rings.q.buffers.dtype
    t = 0
    n = 0  # blocks taken
    tile_first = number(rings.tiles.wait(0), 0)
    while tile_first >= 0:
        place = place_told(tile_first, rings.tiles.buffers.index(t % rings.tiles.STAGES), call, O)
        rings.tiles.release(t)
        own = place.call
        first = tile_first + PIECE * C
        lo, hi = query_blocks(tile_first, own, O.ROWS)
        free_lo, free_hi = free_queries(first, own)
        dk = zeros(O.WIDTH)
        dv = zeros(O.WIDTH)
        for c in gl.static_range(2):
            rings.k.wait(2 * t + c)
        rings.v.wait(2 * t + C)
        held: gl.tuple = ()
        if O.HELD:
            held = (in_registers(rings.k.place(C)), in_registers(rings.v.place(C)))
            wait_for_stores()  # of the tile before
        lots: gl.tuple = ()
        if O.DROPOUT and not O.DRAWN:
            lots = lots_of_keys(draw, place.s, first)
        if O.BLOCKS:
            share, block, tile, h = block_told(n + t, rings)
            while share >= 0:
                dk, dv = step(
                    dk, dv, held, lots, n, h, first, block * O.ROWS, free_lo, free_hi, tile, bits, rings, ds_buffers,
                    own, C, O,
                )  # fmt: skip
                n += 1
                share, block, tile, h = block_told(n + t, rings)
        else:
            for member in range(call.group):
                h = place.kv * call.group + member
                for block in range(lo, hi):
                    dk, dv = step(
                        dk, dv, held, lots, n, h, first, block * O.ROWS, free_lo, free_hi, -1, bits, rings, ds_buffers,
                        own, C, O,
                    )  # fmt: skip
                    n += 1
        if O.DROPOUT:
            dk, dv = [part * draw[2] for part in dk], [part * draw[2] for part in dv]

        at = rows_at(place.b, place.kv, first, place.dk_start, place.k_span, O.K_CLIPPED)
        dv_place = rings.v.place(C)
        dk_place = rings.k.place(C)
        if O.HELD:
            # V not before this either: with its loads into registers no more than begun, the next tile's V came into them.
            rings.v.release(2 * t + C)
            for c in gl.static_range(2):
                rings.k.release(2 * t + c)
            next_dS = ds_buffers.index(2 * (n % 2) + C)
            halves = seen_as(next_dS, stacked(2, dk_desc.block_shape), dk_desc.layout)
            dv_place = (halves.index(0),)
            dk_place = (halves.index(1),)
        store([part.to(dtype) for part in dv], dv_place, dv_desc, at)
        if not O.HELD:
            meet()  # both have read K
        store([part.to(dtype) for part in scaled(dk, call)], dk_place, dk_desc, at)
        if not O.HELD:
            wait_for_stores()
            rings.v.release(2 * t + C)
            for c in gl.static_range(2):
                rings.k.release(2 * t + c)
        t += 1
        tile_first = number(rings.tiles.wait(t), 0)
    rings.tiles.release(t)
    wait_for_stores()


@gluon.jit(
    do_not_specialize=[
        "q_len", "k_len", "diagonal", "left", "right", "scale", "softcap", "heads", "group", "tiles", "together", "total",
        "batch", "q_apart", "do_apart", "k_apart", "v_apart", "blocks_b", "blocks_h", "blocks_n", "blocks_m", "base", "j0",
        "i0", "b0", "h0", "least", "inverse_keep",
    ]
)  # fmt: skip
def backward_kernel(
    dk, dv, dq, q, k, v, do, statistics, turns, counter, seed, cu_q, cu_k, q_lens, k_lens, full_count, full, mixed_count,
    mixed, mixed_bits, bits,
    q_len, k_len, diagonal, left, right, scale, softcap, heads, group, tiles, together, total, batch, q_apart, do_apart,
    k_apart, v_apart, blocks_b, blocks_h, blocks_n, blocks_m, base, j0, i0, b0, h0, least, inverse_keep, O: gl.constexpr,
):  # fmt: skip
    """TMA descriptors: dk, dv, k, v (B, Hkv, Sk, D) in blocks of 64 rows, q and do (B, Hq, Sq, D) of ROWS;
    statistics (2, B Hq, Sq) fp32, -L and -delta; dq (shares of dQ * 16, 256) fp32, in blocks of a share.
    turns: an int32 0 of each share, or None. counter: one int32, 0 before the launch and after it. seed ... inverse_keep: of
    dropout, as in the forward; of its pairs delta is here without what kept ones are multiplied by.

    Packed: all of (1, H, T, D) and statistics (2, Hq, rows). Those of queries are `tensors.ragged` there and with q_lens, those
    of keys there and with k_lens; q_apart ...: how many rows their sequences are apart. full_count ... bits: a BlockMask's
    key-major lists and its pool turned, or None; blocks_*, base: as in the forward.
    """
    q_buffers = buffers_of(O.STAGES, O.WIDTH, q)
    do_buffers = buffers_of(O.STAGES, O.WIDTH, do)
    of_rows = gl.allocate_shared_memory(gl.float32, [O.STAGES, 2, 1, O.ROWS], statistics.layout)
    k_buffers = buffers_of(2, O.WIDTH, k)
    v_buffers = buffers_of(2, O.WIDTH, v)
    dS_layout: gl.constexpr = gl.NVMMASharedLayout.get_default_for([PIECE, O.ROWS], q.dtype)
    ds_buffers = gl.allocate_shared_memory(q.dtype, [4, PIECE, O.ROWS], dS_layout)  # two of each consumer
    dq_buffers = gl.allocate_shared_memory(gl.float32, [2 * O.PLACES, PIECE * PIECE // 256, 256], dq.layout)
    BYTES: gl.constexpr = 2 * O.ROWS * (2 * O.WIDTH + 4)
    plain: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    MESSAGES: gl.constexpr = 1 if O.BLOCKS else 2  # beside blocks' numbers there is no room for two
    READERS: gl.constexpr = 5 if O.DRAWN else 4  # consumers and adders, and who draws
    tile_ring = ring_of(gl.allocate_shared_memory(gl.int32, [MESSAGES, 8], plain), READERS)
    k_ring = ring_of_parts(k_buffers, 2)
    v_ring = ring_of_parts(v_buffers, 1)
    q_ring = ring_of_parts(q_buffers, 2)
    dq_ring = ring_of(dq_buffers, 1)
    block_ring = q_ring
    if O.BLOCKS:
        block_ring = ring_of(gl.allocate_shared_memory(gl.int32, [3, 4], plain), READERS)
    words = tile_ring
    if O.DRAWN:
        words = words_ring(O.DRAWN, 2 * (O.ROWS // PIECE))
    rings = Rings(tile_ring, k_ring, v_ring, q_ring, dq_ring, do_buffers, of_rows, block_ring, words, BYTES)
    fence_async_shared()
    call = Call(q_len, k_len, diagonal, left, right, scale, softcap, heads, group, tiles, together, total)
    lengths = (cu_q, cu_k, q_lens, k_lens, batch, q_apart, do_apart, k_apart, v_apart)
    lists = (
        full_count, full, mixed_count, mixed, mixed_bits, batch, blocks_b, blocks_h, blocks_n, blocks_m, base, j0, i0,
    )  # fmt: skip
    draw = (seed, least, inverse_keep, b0, h0, i0, j0)
    if O.DRAWN:
        gl.warp_specialize([
            (consumer, (dk, dv, ds_buffers, bits, draw, rings, call, 0, O)),
            (consumer, (dk, dv, ds_buffers, bits, draw, rings, call, 1, O)),
            (drawer, (draw, lengths, rings, call, O)),
            (producer, (q, k, v, do, statistics, counter, lengths, lists, rings, call, O)),
            (adder, (dq, turns, lengths, rings, call, 0, O)),
            (adder, (dq, turns, lengths, rings, call, 1, O)),
        ], [4, 4, 1, 1, 1], [O.CONSUMER_REGISTERS, O.DRAWER_REGISTERS, O.PRODUCER_REGISTERS, O.PRODUCER_REGISTERS,
                             O.PRODUCER_REGISTERS])  # fmt: skip
    else:
        gl.warp_specialize([
            (consumer, (dk, dv, ds_buffers, bits, draw, rings, call, 0, O)),
            (consumer, (dk, dv, ds_buffers, bits, draw, rings, call, 1, O)),
            (producer, (q, k, v, do, statistics, counter, lengths, lists, rings, call, O)),
            (adder, (dq, turns, lengths, rings, call, 0, O)),
            (adder, (dq, turns, lengths, rings, call, 1, O)),
        ], [4, 1, 1, 1], [O.CONSUMER_REGISTERS, O.PRODUCER_REGISTERS, O.PRODUCER_REGISTERS, O.PRODUCER_REGISTERS])  # fmt: skip
