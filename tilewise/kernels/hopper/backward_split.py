"""A backward for Hopper in two kernels, in Gluon: nothing is added by atomics, every sum has one owner, and the same bits each time.

    dq_kernel        a tile of queries stays, keys pass by:  dQ += scale dS K      (dS = P * (dO V^T - delta))
                     and delta_i = rowsum(dO_i * O_i) - dlse_i, kept beside lse_i for the other
    dkdv_kernel      a tile of keys stays, queries pass by:  dV += P^T dO    dK += scale dS^T Q

Beside `backward.py` S and dO V^T are made twice, seven matmuls for five. In dkdv_kernel no warpgroup's registers hold dK and dV of a wide head, 64 keys of 256
columns each, so two share the work by role: one makes S, P and dV, and hands P on through shared memory; the other makes
dP, dS and dK. In both kernels one warpgroup's exponentials run under the other's matmuls, and a warp loads by TMA.

    producer         K      Q_0      V dO_0     Q_1         dO_1
    probabilities           S_0 = K Q_0^T,  P_0      dV += P_0 dO_0      S_1 ...
    gradients                        dP_0 = V dO_0^T,  dS_0,  dK += dS_0 Q_0       dP_1 ...

Tiles of dkdv_kernel are (keys, queries): P and dS, as they come out of one matmul, are the first operands of the next.

Source: FlashAttention-2 (Dao, 2023), Algorithm 2, its one loop in two; FlashAttention-3 (Shah et al., 2024), for the
producer and the consumers.
"""

# No `from __future__ import annotations`: an aggregate checks its fields against what their annotations are.

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, warpgroup_mma, warpgroup_mma_wait

from ... import mask as arithmetic
from .pipeline import Ring, aggregate, matrix, ring_of, ring_of_parts, wait_for_stores
from .steps import INF, LOG2E, accumulator, buffers_of, mask, numbers, parts, scaled, store, tanh, wait_for, zeros
from .walk import PIECE, Call, key_range, mask_free_range, tile_of

query_range = gluon.jit(arithmetic.query_range)
mask_free_queries = gluon.jit(arithmetic.mask_free_queries)


@aggregate
class KeyRings:
    """What dkdv_kernel's partitions hand on. Of k and v there is one item, the tile; when it has been read, dK and dV go there.

    statistics: items 2 n and 2 n + 1 are -L and -delta of block n. p: from the one consumer to the other.
    """

    k: Ring
    v: Ring
    q: Ring
    do: Ring
    statistics: Ring
    p: Ring

    @gluon.constexpr_function
    def __init__(self, k, v, q, do, statistics, p):
        self.k = k
        self.v = v
        self.q = q
        self.do = do
        self.statistics = statistics
        self.p = p


@aggregate
class QueryRings:
    """What dq_kernel's producer hands the consumers. Of q and do, item c is consumer c's piece; of k and v, all blocks."""

    q: Ring
    do: Ring
    k: Ring
    v: Ring

    @gluon.constexpr_function
    def __init__(self, q, do, k, v):
        self.q = q
        self.do = do
        self.k = k
        self.v = v


# ---- steps -----------------------------------------------------------------------------------------------------------


@gluon.jit
def held(ring, item: gl.constexpr, n):
    """A tile that has been waited for before the loop of which n is the block.

    n >> 30 is 0. But of a buffer that the loop does not change ptxas makes its 16 operands before the loop, and spills
    them (600 bytes in dq_kernel at d 256).
    """
    return [matrix(part) for part in ring.place(item + (n >> 30))]


@gluon.jit
def product(a, b):
    """A B^T of two tiles in shared memory; asynchronous."""
    ROWS: gl.constexpr = a[0].shape[0]
    COLUMNS: gl.constexpr = b[0].shape[0]
    S = gl.zeros([ROWS, COLUMNS], gl.float32, accumulator(COLUMNS))
    for n in gl.static_range(len(a)):
        S = warpgroup_mma(a[n], b[n].permute([1, 0]), S, use_acc=n > 0, is_async=True)
    return S


@gluon.jit
def add_product(x, b, sums):
    """The sums + X B, of X in registers and B in shared memory: a matmul a part, and the wait for them."""
    found: gl.tuple = ()
    x = x.to(b[0].dtype)
    for n in gl.static_range(len(b)):
        operand = gl.convert_layout(x, gl.DotOperandLayout(0, sums[n].type.layout, 2))
        found += (warpgroup_mma(operand, b[n], sums[n], is_async=True),)
    operands = (operand,)  # X's own registers, which are read until the wait.
    return warpgroup_mma_wait(0, found + operands)[:-1]


@gluon.jit
def of_queries(buffer, layout: gl.constexpr):
    """A number for each query of a block, (1, 1, ROWS) in shared memory, as columns of scores (keys, queries) lie in threads."""
    ROWS: gl.constexpr = buffer.shape[2]
    return buffer.reshape([ROWS]).load(gl.SliceLayout(0, layout))


@gluon.jit
def cap(S, call, O: gl.constexpr):
    """(scores, the softcap's derivative): in bits where there is a softcap; without one as they are, and 1."""
    slope = 1.0
    if O.SOFTCAP:
        t = tanh(S * (call.scale / call.softcap))
        S = t * call.softcap
        slope = 1.0 - t * t
    return S, slope


@gluon.jit
def factor(call, O: gl.constexpr):
    """What makes `cap`'s scores bits."""
    return 1.0 if O.SOFTCAP else call.scale


@gluon.jit
def mask_turned(S, first, i0, call, O: gl.constexpr):
    """-inf where a key of the tile at `first` is not seen by a query of the block at i0: `steps.mask` of (keys, queries)."""
    KEYS: gl.constexpr = S.shape[0]
    ROWS: gl.constexpr = S.shape[1]
    S4 = S.reshape([KEYS, ROWS // 8, 4, 2])
    j = numbers(0, S4)
    a = numbers(1, S4)
    lane = numbers(2, S4)
    b = numbers(3, S4)
    on = j + (first - call.diagonal)  # the query on the key's diagonal
    seen = 8 * a + b >= on - call.right - i0 - 2 * lane
    if O.LEFT:
        seen = seen & (8 * a + b <= on + call.left - i0 - 2 * lane)
    S4 = gl.where(seen, S4, -INF)
    return gl.convert_layout(S4.reshape([KEYS, ROWS]), S.type.layout, assert_trivial=True)


# ---- dK and dV -------------------------------------------------------------------------------------------------------


@gluon.jit
def key_tile(call, O: gl.constexpr):
    """(first key, sequence, key/value head) of this program's tile: those that causal masks leave most queries come first."""
    kv_heads = call.heads // call.group
    tile, bh = tile_of(gl.program_id(0), call.tiles, call.together, call.total // call.tiles)
    return (call.tiles - 1 - tile) * O.KEYS, bh // kv_heads, bh % kv_heads


@gluon.jit
def query_blocks(first, call, O: gl.constexpr):
    """Blocks [lo, hi) of queries that see some of the keys of the tile at `first`, and [free_lo, free_hi), that see all.

    Keys behind the last one have rows of their own in all products, which are not stored: they need no mask.
    """
    last = gl.minimum(first + O.KEYS, call.k_len)
    lo, hi = query_range(first, last, call.left, call.right, call.diagonal, call.q_len)
    free_lo, free_hi = mask_free_queries(first, last, call.left, call.right, call.diagonal, call.q_len)
    lo, hi = lo // O.ROWS, (hi + O.ROWS - 1) // O.ROWS
    return lo, hi, (free_lo + O.ROWS - 1) // O.ROWS, free_hi // O.ROWS


@gluon.jit
def queries_producer(k_desc, v_desc, q_desc, do_desc, statistics_desc, rings, call, O: gl.constexpr):
    """One warp: K and V of the tile; Q, dO and their rows' statistics of each block, for each query head of the group."""
    first, b, kv = key_tile(call, O)
    lo, hi, _, _ = query_blocks(first, call, O)
    rings.k.load_parts(0, k_desc, [b, kv, first, 0])
    rings.v.load_parts(0, v_desc, [b, kv, first, 0])
    n = 0
    for member in range(call.group):
        h = kv * call.group + member
        bh = b * call.heads + h
        for block in range(lo, hi):
            i0 = block * O.ROWS
            rings.q.load_parts(n, q_desc, [b, h, i0, 0])
            rings.statistics.load(2 * n, statistics_desc, [0, bh, i0])
            rings.do.load_parts(n, do_desc, [b, h, i0, 0])
            rings.statistics.load(2 * n + 1, statistics_desc, [1, bh, i0])
            n += 1


@gluon.jit
def probabilities(dv_desc, rings, call, O: gl.constexpr):
    """One warpgroup: S and P, for the other one too, and dV.

    With a softcap it hands on P times the softcap's derivative, for the other one only multiplies by it.
    """
    dtype: gl.constexpr = rings.q.buffers.dtype
    s_layout: gl.constexpr = accumulator(O.ROWS)
    first, b, kv = key_tile(call, O)
    lo, hi, free_lo, free_hi = query_blocks(first, call, O)
    dv = zeros(O.V_WIDTH)
    rings.k.wait(0)
    n = 0
    for _ in range(call.group):
        for block in range(lo, hi):
            q = wait_for(rings.q, n)
            S = product(held(rings.k, 0, n), q)
            minus_L = of_queries(rings.statistics.wait(2 * n), s_layout)
            S = warpgroup_mma_wait(0, [S])
            rings.q.release(n)
            rings.statistics.release(2 * n)
            S, slope = cap(S, call, O)
            if O.MASKED and ((block < free_lo) | (block >= free_hi)):
                S = mask_turned(S, first, block * O.ROWS, call, O)
            P = gl.exp2(S * factor(call, O) + minus_L[None, :])
            rings.p.acquire(n).store((P * slope).to(dtype))
            rings.p.commit(n)
            dv = add_product(P, wait_for(rings.do, n), dv)
            rings.do.release(n)
            n += 1
    rings.k.release(0)
    rings.v.acquire(1)
    store(dv, rings.v.parts(1), dv_desc, [b, kv, first, 0])
    wait_for_stores()


@gluon.jit
def gradients(dk_desc, rings, call, O: gl.constexpr):
    """The other warpgroup: dP, dS and dK."""
    s_layout: gl.constexpr = accumulator(O.ROWS)
    first, b, kv = key_tile(call, O)
    lo, hi, _, _ = query_blocks(first, call, O)
    dk = zeros(O.WIDTH)
    rings.v.wait(0)
    n = 0
    for _ in range(call.group):
        for _ in range(lo, hi):
            do = wait_for(rings.do, n)
            dP = product(held(rings.v, 0, n), do)
            minus_delta = of_queries(rings.statistics.wait(2 * n + 1), s_layout)
            dP = warpgroup_mma_wait(0, [dP])
            rings.do.release(n)
            rings.statistics.release(2 * n + 1)
            dP = dP + minus_delta[None, :]
            P = rings.p.wait(n).load(s_layout)
            rings.p.release(n)
            dS = P.to(gl.float32) * dP
            dk = add_product(dS, wait_for(rings.q, n), dk)
            rings.q.release(n)
            n += 1
    rings.v.release(0)
    dk = scaled(dk, call)
    rings.k.acquire(1)
    store(dk, rings.k.parts(1), dk_desc, [b, kv, first, 0])
    wait_for_stores()


@gluon.jit(
    do_not_specialize=[
        "q_len", "k_len", "diagonal", "left", "right", "scale", "softcap", "heads", "group", "tiles", "together", "total",
    ]
)  # fmt: skip
def dkdv_kernel(
    dk, dv, k, v, q, do, statistics,
    q_len, k_len, diagonal, left, right, scale, softcap, heads, group, tiles, together, total, O: gl.constexpr,
):  # fmt: skip
    """dk, k (blocks of KEYS x WIDTH), dv, v (KEYS x V_WIDTH), q (ROWS x WIDTH), do (ROWS x V_WIDTH): TMA descriptors of
    (B, H, S, D). statistics (2, B Hq, padded) fp32: one of dq_kernel's -L and -delta, in blocks of (1, 1, ROWS)."""
    q_buffers = buffers_of(O.STAGES, O.WIDTH, q)
    do_buffers = buffers_of(O.V_STAGES, O.V_WIDTH, do)
    k_buffers = buffers_of(1, O.WIDTH, k)
    v_buffers = buffers_of(1, O.V_WIDTH, v)
    p_layout: gl.constexpr = gl.NVMMASharedLayout.get_default_for([O.KEYS, O.ROWS], q.dtype)
    p_buffers = gl.allocate_shared_memory(q.dtype, [2, O.KEYS, O.ROWS], p_layout)
    row_buffers = gl.allocate_shared_memory(gl.float32, [2 * O.STAGES, 1, 1, O.ROWS], statistics.layout)
    rings = KeyRings(
        ring_of_parts(k_buffers, 1), ring_of_parts(v_buffers, 1), ring_of_parts(q_buffers, 2),
        ring_of_parts(do_buffers, 2), ring_of(row_buffers, 1), ring_of(p_buffers, 1),
    )  # fmt: skip
    fence_async_shared()
    call = Call(q_len, k_len, diagonal, left, right, scale, softcap, heads, group, tiles, together, total)
    # Arguments that are compile-time constants stay that only in tuples written in the call.
    gl.warp_specialize([
        (probabilities, (dv, rings, call, O)),
        (gradients, (dk, rings, call, O)),
        (queries_producer, (k, v, q, do, statistics, rings, call, O)),
    ], [4, 1], [O.CONSUMER_REGISTERS, O.PRODUCER_REGISTERS])  # fmt: skip


# ---- dQ, and the statistics ------------------------------------------------------------------------------------------


@gluon.jit
def query_tile(call, O: gl.constexpr):
    """(first query, sequence, query head) of this program's tile: those that a causal mask leaves most keys come first."""
    tile, bh = tile_of(gl.program_id(0), call.tiles, call.together, call.total // call.tiles)
    return tile * O.ROWS, bh // call.heads, bh % call.heads


@gluon.jit
def key_blocks(first, call, ROWS: gl.constexpr, O: gl.constexpr):
    """Blocks [lo, hi) of keys that some of the queries [first, first + ROWS) see, and [free_lo, free_hi), that all do."""
    last = gl.minimum(first + ROWS, call.q_len)
    lo, hi = key_range(first, last, call.left, call.right, call.diagonal, call.k_len)
    free_lo, free_hi = mask_free_range(first, last, call.left, call.right, call.diagonal, call.k_len)
    lo, hi = lo // O.KEYS, (hi + O.KEYS - 1) // O.KEYS
    return lo, hi, (free_lo + O.KEYS - 1) // O.KEYS, free_hi // O.KEYS


@gluon.jit
def keys_producer(q_desc, do_desc, k_desc, v_desc, rings, call, O: gl.constexpr):
    """One warp: Q and dO of the tile, K and V of each block, from the last one on."""
    first, b, h = query_tile(call, O)
    lo, hi, _, _ = key_blocks(first, call, O.ROWS, O)
    kv = h // call.group
    for c in gl.static_range(O.ROWS // PIECE):
        rings.do.load_parts(c, do_desc, [b, h, first + PIECE * c, 0])
        rings.q.load_parts(c, q_desc, [b, h, first + PIECE * c, 0])
    for n in range(hi - lo):
        j0 = (hi - 1 - n) * O.KEYS
        rings.k.load_parts(n, k_desc, [b, kv, j0, 0])
        rings.v.load_parts(n, v_desc, [b, kv, j0, 0])


@gluon.jit
def row_statistics(
    do, o, lse, dlse, statistics, dlse_b, dlse_h, dlse_r, v_eighth, padded, b, h, first, call, O: gl.constexpr
):  # fmt: skip
    """(-L, -delta) of the rows [first, first + PIECE), as rows of scores lie in threads; stored for dkdv_kernel, too.

    L is lse in bits. Of a row without keys, and behind the last row, -L is -inf, from which comes P = 0.
    """
    PARTS: gl.constexpr = parts(O.V_WIDTH)
    s_layout: gl.constexpr = accumulator(O.KEYS)
    bh = (b * call.heads + h).to(gl.int64)
    minus_delta = minus_delta_of(do[0], o, 0, v_eighth, b, h, first, call, s_layout, O)
    for n in gl.static_range(1, len(PARTS)):
        minus_delta += minus_delta_of(do[n], o, PARTS[0], v_eighth, b, h, first, call, s_layout, O)
    i = first + gl.arange(0, PIECE, gl.SliceLayout(1, s_layout))
    inside = i < call.q_len
    if dlse is not None:
        along = b.to(gl.int64) * dlse_b + h.to(gl.int64) * dlse_h + i.to(gl.int64) * dlse_r
        minus_delta += gl.load(dlse + along, mask=inside, other=0.0)
    L = gl.load(lse + bh * call.q_len + i, mask=inside, other=-INF)
    minus_L = gl.where(L == -INF, L, -L * LOG2E)
    heads = call.total // call.tiles  # of all sequences
    gl.store(statistics + bh * padded + i, minus_L)
    gl.store(statistics + (heads + bh) * padded + i, minus_delta)
    return minus_L, minus_delta


@gluon.jit
def minus_delta_of(
    do, o, COLUMN: gl.constexpr, v_eighth, b, h, first, call, s_layout: gl.constexpr, O: gl.constexpr
):  # fmt: skip
    """What a part of dO, from COLUMN on, gives of -rowsum(dO * O)."""
    COLUMNS: gl.constexpr = do.shape[1]
    ACROSS: gl.constexpr = COLUMNS // 8  # lanes of a row: 16 rows are a warp's, as they are of scores
    layout: gl.constexpr = gl.BlockedLayout([ACROSS // 2, 8], [32 // ACROSS, ACROSS], [4, 1], [1, 0])
    i = first + gl.arange(0, PIECE, gl.SliceLayout(1, layout))
    column = COLUMN + gl.arange(0, COLUMNS, gl.SliceLayout(0, layout))
    if O.O_BY_TOKEN:
        row = (b.to(gl.int64) * call.q_len + i) * call.heads + h
    else:
        row = (b * call.heads + h).to(gl.int64) * call.q_len + i
    at = row[:, None] * (v_eighth * 8) + column[None, :]
    o_tile = gl.load(o + at, mask=(i < call.q_len)[:, None] & (column < v_eighth * 8)[None, :], other=0.0)
    minus_delta = -gl.sum(o_tile.to(gl.float32) * do.load(layout).to(gl.float32), 1)
    return gl.convert_layout(minus_delta, gl.SliceLayout(1, s_layout))


@gluon.jit
def add_block(dq, n, first, j0, masked, minus_L, minus_delta, rings, call, C: gl.constexpr, O: gl.constexpr):
    """dQ with the n-th block of keys taken in; dP is in flight during the exponentials."""
    k = wait_for(rings.k, n)
    S = product(held(rings.q, C, n), k)
    v = wait_for(rings.v, n)
    dP = product(held(rings.do, C, n), v)
    S = warpgroup_mma_wait(len(v), [S])
    S, slope = cap(S, call, O)
    if masked:
        S = mask(S, first, j0, call, O)
    P = gl.exp2(S * factor(call, O) + minus_L[:, None]) * slope
    rings.v.wait(n)  # which it has done: ptxas moves the wait for dP above the exponentials, but over no loop
    dP = warpgroup_mma_wait(0, [dP])
    rings.v.release(n)
    dq = add_product(P * (dP + minus_delta[:, None]), k, dq)
    rings.k.release(n)
    return dq


@gluon.jit
def queries(
    dq_desc, o, lse, dlse, statistics, dlse_b, dlse_h, dlse_r, v_eighth, padded, rings, call, C: gl.constexpr,
    O: gl.constexpr,
):  # fmt: skip
    """One warpgroup: rows [64 C, 64 C + 64) of the tile. Blocks that the other one's rows see, and its own do not, it hands back."""
    tile, b, h = query_tile(call, O)
    tile_lo, tile_hi, _, _ = key_blocks(tile, call, O.ROWS, O)
    first = tile + PIECE * C
    lo, hi, free_lo, free_hi = key_blocks(first, call, PIECE, O)
    hi = gl.minimum(hi, tile_hi)
    lo = gl.minimum(gl.maximum(lo, tile_lo), hi)
    minus_L, minus_delta = row_statistics(
        wait_for(rings.do, C), o, lse, dlse, statistics, dlse_b, dlse_h, dlse_r, v_eighth, padded, b, h, first, call, O
    )  # fmt: skip
    rings.q.wait(C)
    dq = zeros(O.WIDTH)
    n = 0
    for _ in range(tile_hi - hi):
        rings.k.skip(n)
        rings.v.skip(n)
        n += 1
    for m in range(hi - lo):
        block = hi - 1 - m
        masked = (block < free_lo) | (block >= free_hi)
        dq = add_block(dq, n, first, block * O.KEYS, masked, minus_L, minus_delta, rings, call, C, O)
        n += 1
    for _ in range(lo - tile_lo):
        rings.k.skip(n)
        rings.v.skip(n)
        n += 1
    store(scaled(dq, call), rings.q.parts(C), dq_desc, [b, h, first, 0])
    wait_for_stores()


@gluon.jit(
    do_not_specialize=[
        "q_len", "k_len", "diagonal", "left", "right", "scale", "softcap", "heads", "group", "tiles", "together",
        "total", "padded", "v_eighth", "dlse_b", "dlse_h", "dlse_r",
    ]
)  # fmt: skip
def dq_kernel(
    dq, q, do, k, v, o, lse, dlse, statistics,
    q_len, k_len, diagonal, left, right, scale, softcap, heads, group, tiles, together, total, padded, v_eighth,
    dlse_b, dlse_h, dlse_r, O: gl.constexpr,
):  # fmt: skip
    """dq, q (blocks of 64 x WIDTH), do (64 x V_WIDTH), k (KEYS x WIDTH), v (KEYS x V_WIDTH): TMA descriptors of (B, H, S, D).

    o (B, Hq, Sq, 8 v_eighth), or (B, Sq, Hq, 8 v_eighth), and lse (B, Hq, Sq), contiguous; dlse: of lse's shape, or None. statistics (2, B Hq, padded):
    -L and -delta are stored there, padded being a multiple of ROWS.
    """
    q_buffers = buffers_of(2, O.WIDTH, q)
    do_buffers = buffers_of(2, O.V_WIDTH, do)
    k_buffers = buffers_of(O.STAGES, O.WIDTH, k)
    v_buffers = buffers_of(O.V_STAGES, O.V_WIDTH, v)
    rings = QueryRings(
        ring_of_parts(q_buffers, 1), ring_of_parts(do_buffers, 1), ring_of_parts(k_buffers, 2),
        ring_of_parts(v_buffers, 2),
    )  # fmt: skip
    fence_async_shared()
    call = Call(q_len, k_len, diagonal, left, right, scale, softcap, heads, group, tiles, together, total)
    # Arguments that are compile-time constants stay that only in tuples written in the call.
    gl.warp_specialize([
        (queries, (dq, o, lse, dlse, statistics, dlse_b, dlse_h, dlse_r, v_eighth, padded, rings, call, 0, O)),
        (queries, (dq, o, lse, dlse, statistics, dlse_b, dlse_h, dlse_r, v_eighth, padded, rings, call, 1, O)),
        (keys_producer, (q, do, k, v, rings, call, O)),
    ], [4, 1], [O.CONSUMER_REGISTERS, O.PRODUCER_REGISTERS])  # fmt: skip
