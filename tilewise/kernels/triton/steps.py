"""The named steps of attention in Triton, each written once: the kernels are sentences made of them.

    which_tile, extent       program -> (sequence, head, tile) and where a sequence lies
    source, load_tile        rows of a sequence, by pointers or (Hopper) by descriptors that clip at its end
    parts, turned, product   a b, of tiles as they are, or of three bf16 parts each: true fp32 on Hopper
    scores                   S = q k^T, softcap
    terms_of, bias_and_mask  + bias, - ALiBi, boolean mask, block bits, Band and the sequence's end (-inf)
    keep                     the pairs that dropout keeps
    update, finalize         the online softmax
    statistics_of, store_..  what the backward keeps of each row: lse and delta

`algorithm/` has the same names in torch, and the tests compare them one by one. Whatever an option needs stands under a
compile-time `if`, so that an option that is off costs nothing. Scores reach the softmax in bits (log2(e) times), as there.

A tile of S is (ROWS, KEYS) in the forward and for dq. For dk and dv it is (KEYS, ROWS), so that P^T and dS^T are what the
matmuls take from registers: index tensors `i` (rows) and `j` (keys) then lie along the other side, and nothing else changes.
"""

from __future__ import annotations

from types import FunctionType
from typing import Any

import triton
import triton.language as tl

from ... import mask as arithmetic
from .. import tensors
from . import options

LOG2E = tl.constexpr(1.4426950408889634)
LN2 = tl.constexpr(0.6931471805599453)
LEAST = tl.constexpr(-3.4028234663852886e38)  # of fp32
INF = tl.constexpr(float("inf"))
TILE = tl.constexpr(128)  # a BlockMask's
PAD = tl.constexpr(options.PAD)
BOX, RAGGED, FAR = tl.constexpr(options.BOX), tl.constexpr(options.RAGGED), tl.constexpr(tensors.FAR)


def _jit(function: Any) -> Any:
    """A plain integer function of `mask` as a jitted one; the interpreter looks for `tl` among its globals."""
    return triton.jit(FunctionType(function.__code__, {**function.__globals__, "tl": tl}, function.__name__))


key_range = _jit(arithmetic.key_range)
mask_free_range = _jit(arithmetic.mask_free_range)
query_range = _jit(arithmetic.query_range)
mask_free_queries = _jit(arithmetic.mask_free_queries)


# ---- which rows ------------------------------------------------------------------------------------------------------


@triton.jit
def which_tile(batch, heads, length, cu, together, SIDE: tl.constexpr, PACKED: tl.constexpr, LAST_FIRST: tl.constexpr):
    """(sequence, head, first row of the tile) of this program.

    Dense: `together` heads walk their tiles side by side, so that their keys stay in L2; LAST_FIRST begins with the last
    tiles, the long ones of a causal mask.
    """
    pid = tl.program_id(0)
    if PACKED:
        tiles = length // SIDE + batch + 1
        head = pid // tiles
        t = pid % tiles
        if LAST_FIRST:
            t = tiles - 1 - t
        s, tile = sequence_of(t, batch, length, cu, SIDE)
        return s, head, tile * SIDE
    else:
        tiles = (length + SIDE - 1) // SIDE
        group = pid // (tiles * together)
        r = pid % (tiles * together)
        width = tl.minimum(together, batch * heads - group * together)
        t = r // width
        if LAST_FIRST:
            t = tiles - 1 - t
        bh = group * together + r % width
        return bh // heads, bh % heads, t * SIDE


@triton.jit
def sequence_of(t, batch, length, cu, SIDE: tl.constexpr):
    """(sequence, tile of it) of the t-th tile of a packed head: the last sequence s with cu[s] // SIDE + s <= t.

    What lies behind the last sequence is taken for one more, `batch`, that is not in use.
    """
    s = 0
    beyond = batch + 1
    while beyond - s > 1:
        middle = (s + beyond) // 2
        start = tl.minimum(tl.maximum(tl.load(cu + middle), 0), length)
        if start // SIDE + middle <= t:
            s = middle
        else:
            beyond = middle
    return s, t - (tl.minimum(tl.maximum(tl.load(cu + s), 0), length) // SIDE + s)


@triton.jit
def extent(s, batch, length, cu, lens, PACKED: tl.constexpr, LENS: tl.constexpr):
    """(first token, tokens of memory, tokens in use) of sequence s; contents out of range are clamped."""
    start = s * 0
    span = length + start
    if PACKED:
        start = tl.minimum(tl.maximum(tl.load(cu + s), 0), length)
        stop = tl.load(cu + s + 1, mask=s < batch, other=length)
        span = tl.minimum(tl.maximum(stop, start), length) - start
    used = span
    if LENS:
        used = tl.minimum(tl.maximum(tl.load(lens + s, mask=s < batch, other=0), 0), span)
    elif PACKED:
        used = tl.where(s < batch, span, 0)
    return start, span, used


@triton.jit
def statistic(s, head, heads, length, start, PACKED: tl.constexpr):
    """Where a sequence's rows begin in lse: (B, H, S), or packed (H, T)."""
    if PACKED:
        return head.to(tl.int64) * length + start
    else:
        return (s.to(tl.int64) * heads + head) * length


@triton.jit
def statistics_of(x, s, head, batch, heads, length, start, PACKED: tl.constexpr):
    """(lse in bits, delta): where a sequence's rows begin in x, the backward's statistics.

    x is (B, H, 2, rows), or packed (H, 2, rows), in which each sequence begins at a multiple of PAD: so loads are wide, and
    what a tile reaches past its end is its own.
    """
    if PACKED:
        rows = (length // PAD + batch + 1) * PAD
        at = x + head.to(tl.int64) * 2 * rows + (start // PAD + s) * PAD
        return at, at + rows
    else:
        rows = (length + PAD - 1) // PAD * PAD
        at = x + (s.to(tl.int64) * heads + head) * 2 * rows
        return at, at + rows


@triton.jit
def store_statistics(x, values, past, first, end, SIDE: tl.constexpr):
    """The tile of rows [first, first + SIDE), and behind the last one `past` to a multiple of PAD: `values` has it to SIDE."""
    rows = tl.arange(0, SIDE)
    tl.store(x + first + rows, values)
    padded = (end + PAD - 1) // PAD * PAD
    for at in tl.range(tl.where(first + SIDE < end, padded, first + SIDE), padded, SIDE):
        tl.store(x + at + rows, tl.zeros_like(values) + past)


@triton.jit
def result(s, head, heads, length, start, DIM: tl.constexpr, PACKED: tl.constexpr, BY_TOKEN: tl.constexpr):
    """(where a sequence's rows begin, from row to row) in an array of ours: (B, H, S, DIM), or BY_TOKEN (B, S, H, DIM), or
    packed (T, H, DIM)."""
    if PACKED:
        return (start.to(tl.int64) * heads + head) * DIM, heads * DIM
    elif BY_TOKEN:
        return (s.to(tl.int64) * length * heads + head) * DIM, heads * DIM
    else:
        return (s.to(tl.int64) * heads + head) * length * DIM, DIM


@triton.jit
def diagonal(q_used, k_used, i0, j0, O: tl.constexpr):
    """j - i on the diagonal of the Band and of ALiBi, in this call's own positions."""
    if O.TOP_LEFT:
        return i0 - j0
    else:
        return i0 - j0 + k_used - q_used


@triton.jit
def rows_of(x, s, head, start, x_b, x_h, x_r):
    """(rows of one sequence and head of x, the stride from one to the next). A packed x has x_b = 0.

    Strides come in units of 8 elements, so that the compiler sees that rows begin at 16 bytes and loads may be as wide. The
    units are multiplied last: eight times a stride of 2^28 units and more is past 32 bits.
    """
    x_r = x_r * 8
    return x + s.to(tl.int64) * x_b * 8 + head.to(tl.int64) * x_h * 8 + start.to(tl.int64) * x_r, x_r


@triton.jit
def terms_of(
    s, head, batch, diagonal, k_used, left, right, bias_of, slopes, slopes_b, mask_of, bits, i0, j0, O: tl.constexpr
):
    """What bias_and_mask adds to the scores of one sequence and head; 0 for what is off.

    bias_of, mask_of: the array, its four strides and its two extents (`options.Pairs`).
    """
    bias, bias_b, bias_h, bias_r, bias_c, bias_q, bias_k = bias_of
    mask, mask_b, mask_h, mask_r, mask_c, mask_q, mask_k = mask_of
    bias_at = 0
    slope = 0.0
    mask_at = 0
    pool = 0
    if O.BIAS:
        bias_at = bias + (s.to(tl.int64) * bias_b + head.to(tl.int64) * bias_h) * (8 if O.BIAS_WIDE else 1)
    if O.ALIBI:
        slope = tl.load(slopes + s.to(tl.int64) * slopes_b + head, mask=s < batch, other=0.0).to(tl.float32)
    if O.BOOL:
        mask_at = mask + (s.to(tl.int64) * mask_b + head.to(tl.int64) * mask_h) * (8 if O.MASK_WIDE else 1)
    if O.BLOCKS:
        pool = bits.to(tl.pointer_type(tl.int32), bitcast=True)
    return (
        diagonal, k_used, left, right, slope, bias_at, bias_r, bias_c, bias_q, bias_k,
        mask_at, mask_r, mask_c, mask_q, mask_k, pool, i0, j0,
    )  # fmt: skip


# ---- tiles of q, k, v, dO --------------------------------------------------------------------------------------------


@triton.jit
def source(x, s, head, start, x_b, x_h, x_r, end, TMA: tl.constexpr):
    """(what load_tile reads, from row to row): rows [0, end) of one sequence and head of x.

    TMA: 0, x is a pointer; BOX, a descriptor (sequences, heads, rows, columns), which clips at the tensor's rows; RAGGED,
    one that clips at `end` (`tensors.ragged`).
    """
    if TMA == BOX:
        return (x, s, head), x_r
    elif TMA == RAGGED:
        return (x, s * (x_b // x_r) + start + end, head, FAR - end), x_r
    else:
        return rows_of(x, s, head, start, x_b, x_h, x_r)


@triton.jit
def load_tile(
    x, row, first, end,
    SIDE: tl.constexpr, WIDTH: tl.constexpr, DIM: tl.constexpr, TMA: tl.constexpr, EDGE: tl.constexpr,
):  # fmt: skip
    """Rows [first, first + SIDE) in WIDTH columns, zeros from DIM and (EDGE) from `end` on: NaN there must not count.

    Hardware clips what a descriptor loads; a caller that knows the tile to lie inside says EDGE = False.
    """
    if TMA == BOX:
        return x[0].load([x[1], x[2], first, 0]).reshape(SIDE, WIDTH)
    elif TMA == RAGGED:
        return x[0].load([FAR, x[1], x[2], x[3] + first, 0]).reshape(SIDE, WIDTH)
    else:
        rows = tl.arange(0, SIDE)
        columns = tl.arange(0, WIDTH)
        # The tile's own offsets are the same in every round of a loop; only the scalar in front moves.
        at = (x + tl.cast(first, tl.int64) * row) + (rows.to(tl.int64)[:, None] * row + columns[None, :])
        if EDGE and DIM != WIDTH:
            return tl.load(at, mask=(rows < end - first)[:, None] & (columns < DIM)[None, :], other=0.0)
        elif EDGE:
            return tl.load(at, mask=(rows < end - first)[:, None], other=0.0)
        elif DIM != WIDTH:
            return tl.load(at, mask=(columns < DIM)[None, :], other=0.0)
        else:
            return tl.load(at)


@triton.jit
def store_tile(
    x, row, first, end, tile, SIDE: tl.constexpr, WIDTH: tl.constexpr, DIM: tl.constexpr,
):  # fmt: skip
    """Rows [first, end) of the tile, DIM of its columns."""
    rows = tl.arange(0, SIDE)
    columns = tl.arange(0, WIDTH)
    at = (x + tl.cast(first, tl.int64) * row) + (rows.to(tl.int64)[:, None] * row + columns[None, :])
    inside = (rows < end - first)[:, None]
    if DIM != WIDTH:
        inside = inside & (columns < DIM)[None, :]
    tl.store(at, tile.to(x.dtype.element_ty), mask=inside)


# ---- products --------------------------------------------------------------------------------------------------------


@triton.jit
def parts(x, O: tl.constexpr):
    """What `product` takes of a tile: (x,), or for "bf16x6" (high, middle, low), three bf16 tiles whose sum is x.

    Each holds the next 8 of fp32's 24 bits, cut off and not rounded: so the largest fp32 stays finite, and all have x's
    sign. Where x is inf, high is inf and the others are NaN; where it is NaN, all are (but one with nothing in its upper
    bits, which no arithmetic makes, counts as inf). Of x below 2^-110 the lowest bits are lost: bf16 has none smaller
    than 2^-133. A tile is split once, for all the products that it is in.
    """
    if O.PRECISION == "bf16x6":
        high = _upper_half(x)
        rest = x - high
        middle = _upper_half(rest)
        return high.to(tl.bfloat16), middle.to(tl.bfloat16), (rest - middle).to(tl.bfloat16)
    else:
        return (x,)


@triton.jit
def _upper_half(x):
    """x (fp32) without its lower 16 bits: a bf16 number."""
    return (x.to(tl.int32, bitcast=True) & -65536).to(tl.float32, bitcast=True)


@triton.jit
def turned(x):
    """The parts of the transposed tile: views of the same memory."""
    if len(x) == 3:
        return x[0].T, x[1].T, x[2].T
    else:
        return (x[0].T,)


@triton.jit
def product(a, b, acc, O: tl.constexpr):
    """acc + a b of two tiles' parts; acc None: 0.

    "bf16x6" leaves out the three smallest of nine products of parts, less than 2^-21 of |a| |b| in all, and sums the
    others from the smallest on. Tensor cores cut off what does not fit the accumulator: so acc is added afterwards,
    rounded. Over 4096 keys of one sign the error is 0.2 of fp32's that way, and 35 times fp32's with all six added to
    acc by the tensor cores (emulated). Of inf the small products are inf of the right sign, or NaN, from a part that is
    0 or inf's own lower parts: with a finite number in NaN's place the large product decides.
    """
    if O.PRECISION == "bf16x6":
        small = tl.dot(a[2], b[0])
        small = tl.dot(a[0], b[2], small)
        small = tl.dot(a[1], b[1], small)
        small = tl.dot(a[1], b[0], small)
        small = tl.dot(a[0], b[1], small)
        ab = tl.dot(a[0], b[0], tl.maximum(small, LEAST))
        return ab if acc is None else acc + ab
    else:
        return tl.dot(a[0], b[0], acc, input_precision=O.PRECISION)


# ---- scores ----------------------------------------------------------------------------------------------------------


@triton.jit
def scores(a, b, scale, softcap, O: tl.constexpr):
    """S = a b of two tiles' parts, in bits, capped at +-softcap (in bits); and tanh, of which the softcap's derivative is made.

    scale: log2(e) times the call's. RAW leaves S unscaled, and the softmax takes the factor into its subtraction.
    """
    return scaled(product(a, b, None, O), scale, softcap, O)


@triton.jit
def scaled(S, scale, softcap, O: tl.constexpr):
    """The same of a product that is there."""
    capped = S
    if O.SOFTCAP:
        capped = tanh(S * (scale / softcap))
        S = capped * softcap
    elif not O.RAW:
        S = S * scale
    return S, capped


@triton.jit
def tanh(x):
    """1 - 2 / (e^2x + 1), and below 0.6 a polynomial: what is left of 1 - 1 there would be rounding.

    The polynomial in x^2 is tanh(x) / x at Chebyshev's points; both are right to 2e-7 of the value.
    """
    t = x * x
    series = x * (
        0.9999999976
        + t * (-0.3333328397 + t * (0.1333170470 + t * (-0.0537699218 + t * (0.0207574754 - t * 0.0058564278))))
    )
    return tl.where(t < 0.36, series, 1.0 - 2.0 / (tl.exp2(x * (2.0 * LOG2E)) + 1.0))


@triton.jit
def band_mask(S, i, j, diagonal, left, right, k_end, LEFT: tl.constexpr, RIGHT: tl.constexpr, END: tl.constexpr):
    """-inf where key j is not within [-left, right] of row i's diagonal, or past the end: LEFT, RIGHT, END say what bounds it.

    A bound lies along one side of the tile, and is compared with j for each pair.
    """
    if LEFT:
        S = tl.where(j >= i + (diagonal - left), S, -INF)
    if RIGHT:
        last = i + (diagonal + right)
        S = tl.where(j <= (tl.minimum(last, k_end - 1) if END else last), S, -INF)
    elif END:
        S = tl.where(j < k_end, S, -INF)
    return S


@triton.jit
def at_pairs(x, i, j, row, column, i_end, j_end, ROWS: tl.constexpr, KEYS: tl.constexpr, WIDE: tl.constexpr):
    """(addresses of the pairs (i, j) in x, which of them x has). x has rows or keys of its own only where ROWS, KEYS say so.

    WIDE: its rows begin at multiples of 8 (row comes in units of 8) and it has a multiple of 8 keys, one beside the other:
    so 8 neighbours are there or are not, and one load may take them.
    """
    at = x
    inside = True
    if ROWS:
        at += i.to(tl.int64) * (row * 8 if WIDE else row)
        inside = i < i_end
    if KEYS:
        at += j.to(tl.int64) * (1 if WIDE else column)
        inside = inside & (j < j_end)
        if WIDE:
            inside = tl.max_constancy(inside, [1, 8] if j.shape[0] == 1 else [8, 1])
    return at, inside


@triton.jit
def bool_mask(S, mask, i, j, row, column, i_end, j_end, ROWS: tl.constexpr, KEYS: tl.constexpr, WIDE: tl.constexpr):
    """-inf where the boolean mask, read through its own strides, says False."""
    at, inside = at_pairs(mask, i, j, row, column, i_end, j_end, ROWS, KEYS, WIDE)
    return tl.where(tl.load(at, mask=inside, other=0) != 0, S, -INF)


@triton.jit
def bits_mask(S, bits, tile, a, b0):
    """-inf where a BlockMask's bit tile hides the pair.

    tile: row of the pool of bits. a: positions in the mask along S's first side; b0: the first position along the other.
    The pool has (128, 4) int32 a tile, words of 32 positions along S's other side. b is counted from the tile's first
    column, so that which word a register's pair is in, and its bit, are known before the loop.
    """
    SIDE: tl.constexpr = S.shape[1]
    at = bits + tile.to(tl.int64) * (TILE * TILE // 32) + a % TILE * (TILE // 32) + b0 % TILE // 32
    b = tl.arange(0, SIDE)[None, :]
    word = tl.load(at)
    if SIDE < 32:
        word = word >> (b0 % 32)
    for n in tl.static_range(1, SIDE // 32):
        word = tl.where(b & -32 == 32 * n, tl.load(at + n), word)
    return tl.where(word & (1 << (b & 31)) != 0, S, -INF)


@triton.jit
def add_bias(S, bias, i, j, row, column, i_end, j_end, ROWS: tl.constexpr, KEYS: tl.constexpr, WIDE: tl.constexpr):
    """S + log2(e) bias. Only -inf becomes -inf: a dtype's least number, a mask to some, stays finite in bits too."""
    at, inside = at_pairs(bias, i, j, row, column, i_end, j_end, ROWS, KEYS, WIDE)
    b = tl.load(at, mask=inside, other=0.0).to(tl.float32)
    return S + tl.where(b == -INF, b, tl.maximum(b * LOG2E, LEAST, propagate_nan=tl.PropagateNan.ALL))


@triton.jit
def alibi(S, slope, i, j, diagonal):
    """S - log2(e) slope |i + diagonal - j|."""
    return S - (slope * LOG2E) * tl.abs(i + diagonal - j).to(tl.float32)


@triton.jit
def bias_and_mask(
    S, i, j, b0, edge, bits_tile, diagonal, k_used, left, right, slope, bias, bias_r, bias_c, bias_q, bias_k,
    mask, mask_r, mask_c, mask_q, mask_k, bits, i0, j0, O: tl.constexpr,
):  # fmt: skip
    """Add bias and ALiBi to a tile of scores, and put -inf where row i may not see key j.

    i, j: positions in the sequence, one along each side; b0: the first along S's second. edge: the tile may cross the
    Band's edge or the last key. bits_tile: the BlockMask's bit tile that it lies in, -1 for none. Both are jumps in the
    one loop that there is: a loop of its own for such tiles fills a pipeline anew.
    """
    if O.BIAS:
        S = add_bias(S, bias, i, j, bias_r, bias_c, bias_q, bias_k, O.BIAS_ROWS, O.BIAS_KEYS, O.BIAS_WIDE)
    if O.ALIBI:
        S = alibi(S, slope, i, j, diagonal)
    if O.BOOL:
        S = bool_mask(S, mask, i, j, mask_r, mask_c, mask_q, mask_k, O.MASK_ROWS, O.MASK_KEYS, O.MASK_WIDE)
    if O.BLOCKS:  # noqa: SIM102 (the outer one is compile-time)
        if bits_tile >= 0:
            S = (
                bits_mask(S, bits, bits_tile, i + i0, b0 + j0)
                if j.shape[0] == 1
                else bits_mask(S, bits, bits_tile, j + j0, b0 + i0)
            )
    if O.EDGES:  # noqa: SIM102
        if edge or O.WIDTH >= 256:  # accumulators fill the registers there: a jump spills 940 bytes (dK, dV; d 256)
            S = band_mask(S, i, j, diagonal, left, right, k_used, O.LEFT, O.RIGHT, not O.EVEN)
    return S


@triton.jit
def keep(seed, threshold, b, h, i0, j0, FIRST: tl.constexpr, O: tl.constexpr):
    """Which pairs of rows [i0, i0 + ROWS) and keys [j0, j0 + KEYS) dropout keeps; (ROWS, KEYS), or turned unless FIRST.

    The contract of `algorithm.dropout`: one Philox call serves {i, i + 8} x {j, j + 8}. RUNS: i0 and j0 are multiples of
    16, and each call is made once; else once for each pair. threshold: the least word kept, minus 1.
    """
    A: tl.constexpr = O.ROWS if FIRST else O.KEYS
    B: tl.constexpr = O.KEYS if FIRST else O.ROWS
    a0 = i0 if FIRST else j0
    b0 = j0 if FIRST else i0
    least = threshold.to(tl.uint32)
    if O.RUNS:
        n = tl.arange(0, A // 2)
        m = tl.arange(0, B // 2)
        x = (a0 + n // 8 * 16 + n % 8)[:, None] + tl.zeros((1, B // 2), tl.int32)
        y = (b0 + m // 8 * 16 + m % 8)[None, :] + tl.zeros((A // 2, 1), tl.int32)
    else:
        x = (a0 + tl.arange(0, A))[:, None] + tl.zeros((1, B), tl.int32)
        y = (b0 + tl.arange(0, B))[None, :] + tl.zeros((A, 1), tl.int32)
    i = x if FIRST else y
    j = y if FIRST else x
    zero = tl.zeros_like(i)
    w00, w01, w10, w11 = tl.philox(seed, i & ~8, j & ~8, zero + h, zero + b)
    if O.RUNS:
        k00 = (w00 > least).to(tl.int8)
        k01 = ((w01 if FIRST else w10) > least).to(tl.int8)  # y's bit 3 is set
        k10 = ((w10 if FIRST else w01) > least).to(tl.int8)
        k11 = (w11 > least).to(tl.int8)
        four = tl.join(tl.join(k00, k10), tl.join(k01, k11))  # (A / 2, B / 2, x's bit, y's bit)
        four = tl.reshape(four, (A // 16, 8, B // 16, 8, 2, 2))
        return tl.reshape(tl.permute(four, (0, 4, 1, 2, 5, 3)), (A, B)) != 0
    else:
        low = tl.where(j & 8 != 0, w01, w00)
        high = tl.where(j & 8 != 0, w11, w10)
        return tl.where(i & 8 != 0, high, low) > least


# ---- softmax ---------------------------------------------------------------------------------------------------------


@triton.jit
def pivot(m, EMPTY: tl.constexpr):
    """What is subtracted before exp2: m, but 0 for a row that has seen no key (EMPTY: there may be one)."""
    if EMPTY:
        return tl.where(m == -INF, 0.0, m)
    else:
        return m


@triton.jit
def rescale(m, l, S, factor, EMPTY: tl.constexpr, HEADROOM: tl.constexpr):
    """(m, l, P, alpha) with a tile's scores S * factor taken into m and l; alpha is what O is to be multiplied by.

    l and O are made of P = 2^(S - m + HEADROOM): fp16 holds nothing below 2^-24, and what dropout leaves of a row may lie
    there. The caller takes HEADROOM off m at the end.
    """
    m_new = tl.maximum(m, tl.max(S, 1) * factor)
    base = pivot(m_new, EMPTY)
    P = tl.exp2(S * factor - (base - HEADROOM)[:, None])
    alpha = tl.exp2(m - base)
    return m_new, l * alpha + tl.sum(P, 1), P, alpha


@triton.jit
def finalize(m, l, o, sink, SINK: tl.constexpr):
    """O / l and lse (natural logarithm). The sink, a logit, joins l without a value; an empty row stays empty."""
    if SINK:
        m_new = tl.where(l == 0.0, m, tl.maximum(m, sink * LOG2E))
        base = pivot(m_new, True)
        alpha = tl.exp2(m - base)
        l = tl.where(l == 0.0, 0.0, l * alpha + tl.exp2(sink * LOG2E - base))
        o = o * alpha[:, None]
        m = m_new
    o = o * tl.where(l == 0.0, 0.0, 1.0 / l)[:, None]
    return o, tl.where(l == 0.0, -INF, (m + tl.log2(l)) * LN2)
