"""The steps of the Hopper kernels on tiles: a tile as a tuple of parts, scores, masks, the online softmax, O.

Source: FlashAttention-3 (Shah et al., 2024), Algorithm 1; the softmax is FlashAttention-4's, that rescales O seldom.
"""

# No `from __future__ import annotations`: as in `pipeline`.

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, warpgroup_mma, warpgroup_mma_wait

from .pipeline import beside, chunks_of, matrix, tma_store
from .walk import PIECE, TILE

LOG2E = gl.constexpr(1.4426950408889634)
LN2 = gl.constexpr(0.6931471805599453)
INF = gl.constexpr(float("inf"))
GROWTH = gl.constexpr(8.0)  # bits that a row's maximum may grow by before l and O are rescaled
MOST = gl.constexpr(15)  # bits that P may lie above 1 in fp16

# ---- parts -----------------------------------------------------------------------------------------------------------
#
# A tensor has 2^n columns, and a head of 96 or 192 has not. So a tile is a tuple of parts, 64 + 32 or 128 + 64 columns; others
# are of one. One descriptor loads them all, a chunk of columns at a time (`config.chunk`).


@gluon.constexpr_function
def parts(width):
    """The columns of each part: the powers of two that add up to the width, the largest first."""
    return [1 << n for n in reversed(range(width.bit_length())) if width >> n & 1]


@gluon.jit
def buffers_of(n: gl.constexpr, WIDTH: gl.constexpr, descriptor):
    """Of each part n buffers in shared memory, for tiles of as many rows as the descriptor's blocks have."""
    PARTS: gl.constexpr = parts(WIDTH)
    found: gl.tuple = ()
    for part in gl.static_range(len(PARTS)):
        found += (allocate(n, PARTS[part], descriptor),)
    return found


@gluon.jit
def allocate(n: gl.constexpr, COLUMNS: gl.constexpr, descriptor):
    return gl.allocate_shared_memory(descriptor.dtype, wider(n, descriptor.block_shape, COLUMNS), descriptor.layout)


@gluon.constexpr_function
def wider(n, block, columns):
    """The shape of n buffers of blocks with so many columns."""
    return [n, *block[:-1], columns]


@gluon.jit
def wait_for(ring, n):
    """The parts of a Ring's item n, once it is committed: matrices in shared memory."""
    ring.wait(n)
    return [matrix(part) for part in ring.parts(n)]


@gluon.constexpr_function
def accumulator(columns):
    """The layout of a piece's sums."""
    return gl.NVMMADistributedLayout([3, 0], [4, 1], [16, columns, 16])


@gluon.jit
def zeros(WIDTH: gl.constexpr):
    """O of a piece."""
    PARTS: gl.constexpr = parts(WIDTH)
    found: gl.tuple = ()
    for n in gl.static_range(len(PARTS)):
        found += (zero(PARTS[n]),)
    return found


@gluon.jit
def zero(COLUMNS: gl.constexpr):
    return gl.zeros([PIECE, COLUMNS], gl.float32, accumulator(COLUMNS))


# ---- steps -----------------------------------------------------------------------------------------------------------


@gluon.jit
def scores(q, k, KEYS: gl.constexpr, O: gl.constexpr):
    """S = Q K^T of a piece and the first KEYS keys of a block; asynchronous."""
    S = zero(KEYS)
    for n in gl.static_range(len(q)):
        q_part = q[n]
        if O.Q_IN_REGISTERS:
            q_part = gl.convert_layout(q_part, gl.DotOperandLayout(0, accumulator(KEYS), 2), assert_trivial=True)
        S = warpgroup_mma(q_part, k[n].slice(0, KEYS, dim=0).permute([1, 0]), S, use_acc=n > 0, is_async=True)
    return S


@gluon.jit
def add_values(P, v, o):
    """O += P V of as many keys as P has; asynchronous, a matmul a part."""
    sums: gl.tuple = ()
    for n in gl.static_range(len(o)):
        P_n = gl.convert_layout(P, gl.DotOperandLayout(0, o[n].type.layout, 2), assert_trivial=True)
        sums += (warpgroup_mma(P_n, v[n].slice(0, P.shape[1], dim=0), o[n], is_async=True),)
    return sums


@gluon.jit
def wait_for_values(o):
    """O, when no matmul is in flight."""
    if len(o) == 1:
        return (warpgroup_mma_wait(0, o),)
    else:
        return warpgroup_mma_wait(0, o)


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
    m_new = gl.where(m_new - m > min(GROWTH, MOST - O.HEADROOM), m_new, m)
    pivot = m_new
    if EMPTY:
        pivot = gl.where(m_new == -INF, 0.0, m_new)
    alpha = gl.exp2(m - pivot)
    P = gl.exp2(S * factor - (pivot - O.HEADROOM)[:, None])
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


# ---- the end of a tile -----------------------------------------------------------------------------------------------


@gluon.jit
def times(o, factor):
    """O * factor, a row each."""
    factor = gl.convert_layout(factor, gl.SliceLayout(1, o.type.layout), assert_trivial=True)
    return o * factor[:, None]


@gluon.jit
def scaled(sums, call):
    """dQ or dK, times the scale: of a call it is that of bits."""
    return [part * (call.scale * LN2) for part in sums]


@gluon.jit
def of_rows_in_use(o, L, end):
    """(O, lse) with 0 and -inf in rows from `end` on, where Q may have been NaN."""
    used = gl.arange(0, PIECE, L.type.layout) < end
    return [zero_unless(part, used) for part in o], gl.where(used, L, -INF)


@gluon.jit
def zero_unless(o, used):
    used = gl.convert_layout(used, gl.SliceLayout(1, o.type.layout), assert_trivial=True)
    return gl.where(used[:, None], o, 0.0)


@gluon.jit
def store(o, buffers, descriptor, at):
    """Store O by TMA, which clips it at the tensor's end, through a buffer for each part; without waiting for it."""
    for n in gl.static_range(len(o)):
        matrix(buffers[n]).store(o[n].to(buffers[n].dtype))
    fence_async_shared()
    chunks = chunks_of(buffers, descriptor)
    for c in gl.static_range(len(chunks)):
        tma_store(descriptor, beside(at, c * descriptor.block_shape[-1]), chunks[c])
