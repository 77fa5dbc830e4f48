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

from ... import mask as arithmetic
from .pipeline import (
    Ring,
    aggregate,
    begin_claim,
    end_claim,
    pass_turn,
    put_tile,
    ring_of,
    stay_before,
    store_by_tma,
    take_tile,
    take_turn,
    uniform,
    wait_for_stores,
)  # fmt: skip

LOG2E = gl.constexpr(1.4426950408889634)
LN2 = gl.constexpr(0.6931471805599453)
INF = gl.constexpr(float("inf"))
PIECE = gl.constexpr(64)  # rows of a consumer: wgmma's
GROWTH = gl.constexpr(8.0)  # bits that a row's maximum may grow by before l and O are rescaled

key_range = gluon.jit(arithmetic.key_range)
mask_free_range = gluon.jit(arithmetic.mask_free_range)
tile_of = gluon.jit(arithmetic.tile_of)


@aggregate
class Call:
    """The run-time numbers of a call."""

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
    def blocks(self, first, ROWS: gl.constexpr, O: gl.constexpr):
        """Blocks [lo, hi) that some of the rows [first, first + ROWS) see; where there is none, one all the same."""
        lo = 0
        hi = self.k_len
        if O.BANDED:
            last = gl.minimum(first + ROWS, self.q_len)
            # `uniform`: else the compiler computes what follows from the bounds alone once, and spills it (d 256, 40 bytes).
            lo, hi = key_range(first, last, uniform(self.left), uniform(self.right), self.diagonal, self.k_len)
        return lo // O.KEYS, gl.maximum((hi + O.KEYS - 1) // O.KEYS, lo // O.KEYS + 1)

    @gluon.jit
    def free_blocks(self, first, O: gl.constexpr):
        """Blocks [lo, hi) that each of a piece's rows sees all of."""
        lo = 0
        hi = self.k_len
        if O.BANDED:
            last = gl.minimum(first + PIECE, self.q_len)
            lo, hi = mask_free_range(first, last, self.left, self.right, self.diagonal, self.k_len)
        return (lo + O.KEYS - 1) // O.KEYS, hi // O.KEYS


@aggregate
class Rings:
    """What the producer hands the consumers. Of q, item t * consumers + c is consumer c's piece of tile t."""

    tiles: Ring
    q: Ring
    k: Ring
    v: Ring

    @gluon.constexpr_function
    def __init__(self, tiles, q, k, v):
        self.tiles = tiles
        self.q = q
        self.k = k
        self.v = v


# ---- the producer ----------------------------------------------------------------------------------------------------


@gluon.jit
def producer(q_desc, k_desc, v_desc, counter, rings, call, O: gl.constexpr):
    """One warp: claims tiles and loads Q, K and V of each.

    V of a block follows K of the next one, for that is the order in which they are wanted. The next tile is claimed with
    the last K of this one, as late as possible, so that it goes to the program that will be free first. The last V
    comes before the next Q, which has to wait for the buffer that a consumer reads until it has that V.
    """
    CONSUMERS: gl.constexpr = O.ROWS // PIECE
    tile = gl.program_id(0)
    t = 0
    n = 0  # blocks loaded
    while tile < call.total:
        row, bh = tile_of(tile, call.tiles, call.together, call.total // call.tiles)
        put_tile(rings.tiles, t, row, bh)
        b = bh // call.heads
        h = bh % call.heads
        kv = h // call.group
        for c in gl.static_range(CONSUMERS):
            rings.q.load(t * CONSUMERS + c, q_desc, [b, h, row * O.ROWS + PIECE * c, 0])
        lo, hi = call.blocks(row * O.ROWS, O.ROWS, O)
        claim = tile
        for j in range(hi - lo):
            block = hi - 1 - j
            if block == lo:
                claim = begin_claim(counter)
            rings.k.load(n, k_desc, [b, kv, block * O.KEYS, 0])
            if j > 0:
                rings.v.load(n - 1, v_desc, [b, kv, (block + 1) * O.KEYS, 0])
            n += 1
        rings.v.load(n - 1, v_desc, [b, kv, lo * O.KEYS, 0])
        t += 1
        tile = end_claim(claim, counter, call.total)
    put_tile(rings.tiles, t, tile * 0 - 1, tile * 0)


# ---- steps -----------------------------------------------------------------------------------------------------------


@gluon.jit
def matrix(buffer):
    """A block of one head, (1, 1, rows, columns) in shared memory, as (rows, columns)."""
    ROWS: gl.constexpr = buffer.shape[2]
    COLUMNS: gl.constexpr = buffer.shape[3]
    return buffer.reshape([ROWS, COLUMNS])


@gluon.jit
def scores(q, k):
    """S = Q K^T of a piece and a block of keys in shared memory; asynchronous."""
    KEYS: gl.constexpr = k.shape[0]
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, KEYS, 16])
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
def numbers(dim: gl.constexpr, x):
    """0, 1, 2, ... along one of x's four dimensions; of size 1 along the others."""
    n = gl.arange(0, x.shape[dim], _without_others(dim, x.type.layout))
    for other in gl.static_range(4):
        if other != dim:
            n = gl.expand_dims(n, other)
    return n


@gluon.constexpr_function
def _without_others(dim, layout):
    for other in (3, 2, 1, 0):
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
def step(P, o, m, l, q, n, first, j0, masked, rings, call, C: gl.constexpr, O: gl.constexpr):
    """S of block n and O += P V of the block before; both are in flight at once, and P V during the softmax of S."""
    CONSUMERS: gl.constexpr = O.ROWS // PIECE
    k = rings.k.wait(n)
    take_turn(C)
    S = scores(q, matrix(k))
    v = rings.v.wait(n - 1)
    o = warpgroup_mma(P, matrix(v), o, is_async=True)
    pass_turn((C + 1) % CONSUMERS)
    S = warpgroup_mma_wait(1, [S])
    rings.k.release(n)
    S = cap(S, call, O)
    if O.MASKED and masked:
        S = mask(S, first, j0, call, O)
    P_next, m, l, alpha = softmax(S, m, l, call, O.MASKED, O)
    stay_before(l)
    o = warpgroup_mma_wait(0, [o])
    rings.v.release(n - 1)
    # Only now: the matmul in flight read P's registers.
    P = gl.convert_layout(P_next.to(rings.q.buffers.dtype), P.type.layout)
    return P, rescale(o, alpha), m, l


@gluon.jit
def half_block(m, l, q, n, first, j0, rings, call, O: gl.constexpr):
    """(O, m, l) of a first block of whose keys only the first half is seen: half the work, nothing overlapped."""
    HALF: gl.constexpr = O.KEYS // 2
    k = rings.k.wait(n)
    S = scores(q, matrix(k).slice(0, HALF, dim=0))
    S = warpgroup_mma_wait(0, [S])
    rings.k.release(n)
    S = mask(cap(S, call, O), first, j0, call, O)
    m_layout: gl.constexpr = m.type.layout
    m = gl.convert_layout(m, gl.SliceLayout(1, S.type.layout), assert_trivial=True)
    P, m, l, _ = softmax(S, m, l, call, True, O)
    V_WIDTH: gl.constexpr = O.V_WIDTH
    o_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, V_WIDTH, 16])
    P = gl.convert_layout(P.to(rings.q.buffers.dtype), gl.DotOperandLayout(0, o_layout, 2))
    v = rings.v.wait(n)
    o = gl.zeros([PIECE, V_WIDTH], gl.float32, o_layout)
    o = warpgroup_mma(P, matrix(v).slice(0, HALF, dim=0), o, use_acc=False, is_async=True)
    o = warpgroup_mma_wait(0, [o])
    rings.v.release(n)
    return o, gl.convert_layout(m, m_layout, assert_trivial=True), l


@gluon.jit
def consumer(o_desc, o_buffers, lse, sink, rings, call, C: gl.constexpr, O: gl.constexpr):
    """One warpgroup: rows [64 C, 64 C + 64) of each tile.

    Of a tile's blocks the other consumers may see some that this one does not: those it hands back as they come, and
    hands the turn on for each, so that all take as many.
    """
    CONSUMERS: gl.constexpr = O.ROWS // PIECE
    V_WIDTH: gl.constexpr = O.V_WIDTH
    dtype: gl.constexpr = rings.q.buffers.dtype
    s_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, O.KEYS, 16])
    o_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, O.V_WIDTH, 16])
    m_layout: gl.constexpr = gl.SliceLayout(1, s_layout)
    l_layout: gl.constexpr = gl.DistributedLinearLayout(
        [[8, 0]], [[0, 1], [0, 2], [1, 0], [2, 0], [4, 0]], [[16, 0], [32, 0]], [], [PIECE, 4]
    )
    if C == 0:
        pass_turn(0)
    t = 0
    n = 0  # blocks taken
    row, bh = take_tile(rings.tiles, 0)
    while row >= 0:
        first = row * O.ROWS + PIECE * C
        tile_lo, tile_hi = call.blocks(row * O.ROWS, O.ROWS, O)
        lo, hi = call.blocks(first, PIECE, O)
        lo = gl.minimum(gl.maximum(lo, tile_lo), tile_hi - 1)
        hi = gl.minimum(gl.maximum(hi, lo + 1), tile_hi)
        free_lo, free_hi = call.free_blocks(first, O)

        above = tile_hi - hi
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
        m = gl.full([PIECE], -INF, gl.float32, m_layout)
        l = gl.zeros([PIECE, 4], gl.float32, l_layout)
        o = gl.zeros([PIECE, V_WIDTH], gl.float32, o_layout)
        half = False
        if O.HALF:
            seen = gl.minimum(gl.minimum(first + PIECE, call.q_len) + call.diagonal + call.right, call.k_len)
            half = (seen <= (hi - 1) * O.KEYS + O.KEYS // 2) & (hi - lo > 1)
            if half:
                if above > 0:
                    rings.v.skip(n - 1)
                    above = above * 0
                o, m, l = half_block(m, l, q, n, first, (hi - 1) * O.KEYS, rings, call, O)
                n += 1
                hi -= 1
                take_turn(C)
        k = rings.k.wait(n)
        S = scores(q, matrix(k))
        if O.HALF and half:
            pass_turn((C + 1) % CONSUMERS)
        S = warpgroup_mma_wait(0, [S])
        rings.k.release(n)
        if above > 0:
            rings.v.skip(n - 1)
        S = cap(S, call, O)
        if (hi - 1 < free_lo) | (hi - 1 >= free_hi):
            S = mask(S, first, (hi - 1) * O.KEYS, call, O)
        P, m, l, alpha = softmax(S, m, l, call, True, O)
        P = gl.convert_layout(P.to(dtype), gl.DotOperandLayout(0, o_layout, 2))
        if O.HALF and half:
            o = rescale(o, alpha)
        n += 1
        for j in range(1, hi - lo):
            block = hi - 1 - j
            masked = (block < free_lo) | (block >= free_hi)
            P, o, m, l = step(P, o, m, l, q, n, first, block * O.KEYS, masked, rings, call, C, O)
            n += 1
        if not O.O_IN_Q:
            rings.q.release(item)
        v = rings.v.wait(n - 1)
        o = warpgroup_mma(P, matrix(v), o, is_async=True)
        l_row = gl.convert_layout(gl.sum(l, 1), m_layout)
        o = warpgroup_mma_wait(0, [o])
        rings.v.release(n - 1)
        for _ in range(lo - tile_lo):
            take_turn(C)
            pass_turn((C + 1) % CONSUMERS)
            rings.k.skip(n)
            rings.v.skip(n)
            n += 1

        b = bh // call.heads
        h = bh % call.heads
        factor, L = finalize(m, l_row, sink, h, O.SINK)
        factor = gl.convert_layout(factor, gl.SliceLayout(1, o_layout), assert_trivial=True)
        at = first + gl.arange(0, PIECE, m_layout)
        gl.store(lse + bh.to(gl.int64) * call.q_len + at, L, mask=at < call.q_len)
        if O.O_IN_Q:
            buffer = q_buffer
        else:
            buffer = o_buffers.index(C)
            wait_for_stores()
        store_by_tma((o * factor[:, None]).to(dtype), buffer, o_desc, [b, h, first, 0])
        if O.O_IN_Q:
            wait_for_stores()
            rings.q.release(item)
        t += 1
        row, bh = take_tile(rings.tiles, t)
    wait_for_stores()


@gluon.jit(
    do_not_specialize=[
        "q_len", "k_len", "diagonal", "left", "right", "scale", "softcap", "heads", "group", "tiles", "together", "total",
    ]
)  # fmt: skip
def forward_kernel(
    o, q, k, v, lse, sink, counter,
    q_len, k_len, diagonal, left, right, scale, softcap, heads, group, tiles, together, total, O: gl.constexpr,
):  # fmt: skip
    """o, q, k, v: TMA descriptors of (B, H, S, D) in blocks of 64 rows (o, q) or KEYS; lse (B, Hq, Sq), contiguous.

    sink: (Hq,) or None. counter: one int32, 0 before the launch and after it.
    """
    CONSUMERS: gl.constexpr = O.ROWS // PIECE
    tile_buffers = gl.allocate_shared_memory(gl.int64, [2, 1], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    q_buffers = gl.allocate_shared_memory(q.dtype, [O.QUERIES * CONSUMERS, 1, 1, PIECE, O.WIDTH], q.layout)
    k_buffers = gl.allocate_shared_memory(k.dtype, [O.STAGES, 1, 1, O.KEYS, O.WIDTH], k.layout)
    v_buffers = gl.allocate_shared_memory(v.dtype, [O.STAGES, 1, 1, O.KEYS, O.V_WIDTH], v.layout)
    o_buffers = q_buffers
    if not O.O_IN_Q:
        o_buffers = gl.allocate_shared_memory(o.dtype, [CONSUMERS, 1, 1, PIECE, O.V_WIDTH], o.layout)
    rings = Rings(
        ring_of(tile_buffers, CONSUMERS), ring_of(q_buffers, 1), ring_of(k_buffers, CONSUMERS), ring_of(v_buffers, CONSUMERS)
    )  # fmt: skip
    fence_async_shared()
    call = Call(q_len, k_len, diagonal, left, right, scale, softcap, heads, group, tiles, together, total)
    # Arguments that are compile-time constants stay that only in tuples written in the call.
    if CONSUMERS == 2:
        gl.warp_specialize([
            (consumer, (o, o_buffers, lse, sink, rings, call, 0, O)),
            (consumer, (o, o_buffers, lse, sink, rings, call, 1, O)),
            (producer, (q, k, v, counter, rings, call, O)),
        ], [4, 1], [O.CONSUMER_REGISTERS, O.PRODUCER_REGISTERS])  # fmt: skip
    else:
        gl.warp_specialize([
            (consumer, (o, o_buffers, lse, sink, rings, call, 0, O)),
            (consumer, (o, o_buffers, lse, sink, rings, call, 1, O)),
            (consumer, (o, o_buffers, lse, sink, rings, call, 2, O)),
            (producer, (q, k, v, counter, rings, call, O)),
        ], [4, 4, 1], [O.CONSUMER_REGISTERS, O.CONSUMER_REGISTERS, O.PRODUCER_REGISTERS])  # fmt: skip
