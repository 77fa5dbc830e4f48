"""The two small kernels around the fused backward: what its accumulators begin with, and dQ from fp32.

They only move bytes, in Triton: what is reckoned for a row, not for a pair. Statistics and the accumulator have 128 rows or a
multiple for each sequence (`place_of_rows`); what lies where in the accumulator is told by `backward_steps.put_share`.

Source: FlashAttention-2 (Dao, 2023), algorithm 2, line 4 (delta), and FlashAttention-3 (Shah et al., 2024), appendix B.1.
"""

import triton
import triton.language as tl

from ..triton import steps as triton_steps

PAD = tl.constexpr(128)  # rows: what a sequence's statistics and dQ are a multiple of


@triton.jit
def place_of_rows(first, bh, heads, batch, q_len, cu_q, q_lens, PACKED: tl.constexpr, Q_LENS: tl.constexpr):
    """(number in its sequence of the padded row `first`, a multiple of 64; the sequence's first row; rows in memory and in use)."""
    if PACKED or Q_LENS:
        s = bh // heads
        if PACKED:
            s, tile = triton_steps.sequence_of(first // PAD, batch, q_len, cu_q, PAD)
            first = tl.where(tile < 0, q_len, tile * PAD + first % PAD)
        start, span, used = triton_steps.extent(s, batch, q_len, cu_q, q_lens, PACKED, Q_LENS)
        return first, start, span, used
    else:
        return first, 0, q_len, q_len


@triton.jit(
    do_not_specialize=[
        "heads", "q_len", "padded", "total", "scale", "keep", "do_b", "do_h", "do_r", "dlse_b", "dlse_h", "dlse_r", "batch",
    ]
)  # fmt: skip
def prepare_kernel(
    o, do, lse, dlse, statistics, dq, turns, cu_q, q_lens, heads, q_len, padded, total, scale, keep, do_b, do_h, do_r,
    dlse_b, dlse_h, dlse_r, batch,
    DV: tl.constexpr, WIDTH: tl.constexpr, ROWS: tl.constexpr, BY_TOKEN: tl.constexpr, PACKED: tl.constexpr,
    Q_LENS: tl.constexpr,
):  # fmt: skip
    """-L and -delta of ROWS queries, and zeros for their dQ and for its `turns`, where these are given.

    o (B, Hq, Sq, DV), BY_TOKEN (B, Sq, Hq, DV), and lse (B, Hq, Sq), or packed (T, Hq, DV) and (Hq, T): contiguous. do's strides: in units of 8
    elements. statistics: (2, total = B Hq, padded), L in the unit of the main kernel's scores, which `scale` makes of lse. P
    of an empty row, and behind the last one in use, is to be 0: its L is +inf. keep: what dropout keeps, times which delta is.
    """
    tiles = padded // ROWS
    bh = (tl.program_id(0) // tiles).to(tl.int64)
    first = tl.program_id(0) % tiles * ROWS
    b = bh // heads
    h = bh % heads
    own, start, _, used = place_of_rows(first, bh, heads, batch, q_len, cu_q, q_lens, PACKED, Q_LENS)
    rows = own + tl.arange(0, ROWS)
    columns = tl.arange(0, triton.next_power_of_2(WIDTH))[None, :]
    inside = (rows < used)[:, None] & (columns < DV)
    wide = rows.to(tl.int64)
    if PACKED:
        wide += start
        of_o = wide * heads + h
    elif BY_TOKEN:
        of_o = (b * q_len + wide) * heads + h
    else:
        of_o = bh * q_len + wide
    O = tl.load(o + of_o[:, None] * DV + columns, mask=inside, other=0.0)
    DO = tl.load(do + 8 * (b * do_b + h * do_h + wide * do_r)[:, None] + columns, mask=inside, other=0.0)
    delta = tl.sum(O.to(tl.float32) * DO.to(tl.float32), 1)
    if dlse is not None:
        delta -= tl.load(dlse + b * dlse_b + h * dlse_h + wide * dlse_r, mask=rows < used, other=0.0)
    L = tl.load(lse + bh * q_len + (start + rows), mask=rows < used, other=-float("inf"))
    at = bh * padded + (first + tl.arange(0, ROWS))
    tl.store(statistics + at, tl.where(L == -float("inf"), L, -L * scale))
    tl.store(statistics + total * padded.to(tl.int64) + at, -delta * keep)
    SIDE: tl.constexpr = WIDTH & -WIDTH
    for part in tl.static_range(WIDTH // SIDE):
        at = (bh * padded + first) * WIDTH + part * ROWS * SIDE + tl.arange(0, ROWS * SIDE)
        tl.store(dq + at, tl.zeros((ROWS * SIDE,), tl.float32))
    if turns is not None:
        SHARES: tl.constexpr = (ROWS * WIDTH + 64 * 64 - 1) // (64 * 64)
        tl.store(turns + (bh * padded + first) // ROWS * SHARES + tl.arange(0, SHARES), tl.zeros((SHARES,), tl.int32))


@triton.jit(do_not_specialize=["q_len", "padded", "scale", "heads", "batch"])
def convert_kernel(
    dq, accumulator, cu_q, q_lens, q_len, padded, scale, heads, batch,
    D: tl.constexpr, WIDTH: tl.constexpr, COLUMNS: tl.constexpr, BY_TOKEN: tl.constexpr, PACKED: tl.constexpr,
    Q_LENS: tl.constexpr,
):  # fmt: skip
    """64 rows and COLUMNS of the accumulator (`put_share`), times the scale, to dq (B, Hq, Sq, D), BY_TOKEN (B, Sq, Hq, D),
    or packed (T, Hq, D), contiguous; 0 where rows are not in use."""
    SIDE: tl.constexpr = 64
    SHARES: tl.constexpr = WIDTH // COLUMNS
    share = tl.program_id(0)
    shares = padded // SIDE * SHARES  # of a head
    bh = (share // shares).to(tl.int64)
    share_of_head = share % shares
    x = tl.load(accumulator + share.to(tl.int64) * (SIDE * COLUMNS) + tl.arange(0, SIDE * COLUMNS))
    x = tl.permute(tl.reshape(x * scale, (COLUMNS // 8, 4, 8, 4, 2, 2)), (1, 4, 2, 0, 3, 5))
    x = tl.reshape(x, (SIDE, COLUMNS)).to(dq.dtype.element_ty)
    first = share_of_head // SHARES * SIDE
    own, start, span, used = place_of_rows(first, bh, heads, batch, q_len, cu_q, q_lens, PACKED, Q_LENS)
    rows = own + tl.arange(0, SIDE)[:, None]
    columns = share_of_head % SHARES * COLUMNS + tl.arange(0, COLUMNS)[None, :]
    if PACKED or Q_LENS:
        x = tl.where(rows < used, x, 0.0)
    if PACKED:
        at = (start + rows).to(tl.int64) * heads + bh
    elif BY_TOKEN:
        at = (bh // heads * q_len + rows) * heads + bh % heads
    else:
        at = bh * q_len + rows
    tl.store(dq + at * D + columns, x, mask=(rows < span) & (columns < D))
