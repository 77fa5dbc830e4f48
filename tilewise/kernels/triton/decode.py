"""Attention over a key/value cache in Triton: a few queries, many keys that lie where a cache has put them.

    piece_kernel    a share of a sequence's keys, for the few queries of a key/value head: o and lse of its pieces
    merge_kernel    the pieces of a row, in their order
    whole_kernel    all keys that a tile of queries sees: for many queries, or a single block
    turn_kernel     queries turned by their positions, for the kernels for dense tensors

The query heads of a group are rows of one tile, so that their keys are loaded once. Keys are cut at fixed positions into
pieces, and so many pieces are a block. Each piece has a softmax of its own, a block is the merge of its pieces and a row
that of its blocks. Where there is little to do, programs share a block, and merge_kernel has its pieces; where there is
much, a program has whole blocks and merges their pieces itself, by the same operations. So a row has the same bits in any
batch, slot or order of pages.

Source: Flash-Decoding (Dao, Haziza, Massa, Sizov, 2023); pages: PagedAttention (Kwon et al., 2023).
"""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from ...problem_cached import BAD_PAGE
from . import steps

BAD = tl.constexpr(BAD_PAGE)

RUN_TIME = [
    "batch", "kv_heads", "q_len", "capacity", "slots", "pool", "table_width", "positions", "scale", "softcap", "left",
    "right", "slopes_b", "q_b", "q_h", "q_r", "k_b", "k_h", "k_r", "v_b", "v_h", "v_r", "o_b", "o_h", "o_r", "most",
    "pieces", "sharers", "tiles",
]  # fmt: skip


# ---- where a sequence lies -------------------------------------------------------------------------------------------


@triton.jit
def slot_of(s, rows, slots, known, status, O: tl.constexpr):
    """(sequence s's slot, whether it has one). A slot that the cache does not have is noted in the status."""
    slot = s * 0
    if not O.SHARED:
        slot += s
        if O.SLOTS:
            slot = tl.load(rows + s, mask=known, other=-1)
            if slot >= slots:
                tl.atomic_or(status, BAD)
    there = known & (slot >= 0) & (slot < slots)
    return tl.where(there, slot, 0), there


@triton.jit
def keys_of(s, there, k_lens, starts, after, capacity, O: tl.constexpr):
    """(where positions begin, keys, how many follow elsewhere) of sequence s. No key lies before 0, whatever begins there."""
    used = tl.minimum(tl.maximum(tl.load(k_lens + s, mask=there, other=0), 0), capacity)
    start = s * 0
    if O.STARTS:
        start = tl.load(starts + s, mask=there, other=0)
    follow = s * 0
    if O.AFTER:
        follow = tl.load(after + s, mask=there, other=0)
    return start, used, follow


@triton.jit
def pages_of(table, j0, lo, hi, O: tl.constexpr):
    """The pages of the keys [j0, j0 + KEYS): one number where they lie in one, else one a key; 0 outside [lo, hi)."""
    if O.PAGE == 0:
        return j0 * 0
    elif O.PAGE % O.KEYS == 0:
        return tl.load(table + j0 // O.PAGE, mask=j0 < hi, other=0)
    else:
        j = j0 + tl.arange(0, O.KEYS)
        return tl.load(table + j // O.PAGE, mask=(j >= lo) & (j < hi), other=0)


@triton.jit
def load_keys(
    x, x_b, x_r, page, there, j0, end, COLUMN: tl.constexpr, WIDTH: tl.constexpr, DIM: tl.constexpr, O: tl.constexpr
):  # fmt: skip
    """Columns [COLUMN, COLUMN + WIDTH) of the keys [j0, j0 + KEYS): zeros from DIM on, past `end`, and where no page is there.

    x: of a head, in the sequence's slot or in the pool of pages. Strides: in units of UNIT elements (`decode_host._unit`).
    """
    rows = tl.arange(0, O.KEYS)
    columns = COLUMN + tl.arange(0, WIDTH)
    if O.PAGE == 0:
        at = x + tl.cast(j0, tl.int64) * x_r * O.UNIT + (rows.to(tl.int64)[:, None] * (x_r * O.UNIT) + columns[None, :])
        inside = (rows < end - j0)[:, None]
    elif O.PAGE % O.KEYS == 0:
        first = tl.cast(page, tl.int64) * (x_b * O.UNIT) + tl.cast(j0 % O.PAGE, tl.int64) * (x_r * O.UNIT)
        at = x + first + (rows.to(tl.int64)[:, None] * (x_r * O.UNIT) + columns[None, :])
        inside = (rows < tl.where(there, end - j0, 0))[:, None]
    else:
        first = tl.cast(page, tl.int64) * (x_b * O.UNIT) + ((j0 + rows) % O.PAGE).to(tl.int64) * (x_r * O.UNIT)
        at = x + (first[:, None] + columns[None, :])
        inside = there[:, None]
    if COLUMN + WIDTH > DIM:
        inside = inside & (columns < DIM)[None, :]
    return tl.load(at, mask=inside, other=0.0)


# ---- queries ---------------------------------------------------------------------------------------------------------


@triton.jit
def rows_of_tile(tile, O: tl.constexpr):
    """(query, head of the group, whether there is one) of each of the ROWS rows of a tile, counted from query 0.

    A tile has all heads of ROWS // GROUP queries, or ROWS heads of one query.
    """
    r = tl.arange(0, O.ROWS)
    if O.GROUP <= O.ROWS:
        QUERIES: tl.constexpr = O.ROWS // O.GROUP
        return tile * QUERIES + r // O.GROUP, r % O.GROUP, r < QUERIES * O.GROUP
    else:
        PARTS: tl.constexpr = (O.GROUP + O.ROWS - 1) // O.ROWS
        g = tile % PARTS * O.ROWS + r
        return tile // PARTS + r * 0, g, g < O.GROUP


@triton.jit
def load_queries(
    q, q_h, q_r, t, head, inside, position, cos, sin, positions, COLUMN: tl.constexpr, WIDTH: tl.constexpr, O: tl.constexpr
):  # fmt: skip
    """Columns [COLUMN, COLUMN + WIDTH) of the rows' queries, turned by their positions. q: of a sequence."""
    at = q + t.to(tl.int64) * q_r * 8 + head.to(tl.int64) * q_h * 8
    columns = COLUMN + tl.arange(0, WIDTH)
    there = inside[:, None] & (columns < O.D)[None, :]
    x = tl.load(at[:, None] + columns[None, :], mask=there, other=0.0)
    if O.R > COLUMN:
        x = turned(x, at, columns, inside, position, cos, sin, positions, O)
    return x


@triton.jit
def turned(x, at, columns, inside, position, cos, sin, positions, O: tl.constexpr):
    """x, whose rows begin at `at`, with its first R columns turned by the rows' positions, which the table clamps."""
    HALF: tl.constexpr = O.R // 2
    if O.INTERLEAVED:
        pair = columns // 2
        first = columns % 2 == 0
        other = columns ^ 1
    else:
        pair = columns % HALF
        first = columns < HALF
        other = tl.where(first, columns + HALF, columns - HALF)
    turns = columns < O.R
    there = inside[:, None] & turns[None, :]
    y = tl.load(at[:, None] + tl.where(turns, other, 0)[None, :], mask=there, other=0.0)
    row = tl.minimum(tl.maximum(position, 0), positions - 1).to(tl.int64)[:, None] * HALF
    angle = row + tl.where(turns, pair, 0)[None, :]
    c = tl.load(cos + angle, mask=there, other=1.0).to(tl.float32)
    s = tl.load(sin + angle, mask=there, other=0.0).to(tl.float32)
    s = tl.where(first[None, :], -s, s)
    z = x.to(tl.float32) * c + y.to(tl.float32) * s
    return tl.where(there, z.to(x.dtype), x)


# ---- keys ------------------------------------------------------------------------------------------------------------


@triton.jit
def attend_keys(
    o, m, l, bad, q, rest, k, v, page, j0, lo, hi, t, diagonal, slope, pool, k_b, k_r, v_b, v_r, scale, softcap, left, right,
    O: tl.constexpr,
):  # fmt: skip
    """(o, m, l, bad) with the keys [j0, j0 + KEYS) taken in, of which those in [lo, hi) are there. bad: pages that are not."""
    j = j0 + tl.arange(0, O.KEYS)
    inside = (j >= lo) & (j < hi)
    there = inside
    if O.PAGE:
        there = (page >= 0) & (page < pool)
        bad = bad | (inside & (there == 0)).to(tl.int32)
        page = tl.where(there, page, 0)
        inside = inside & there
        if O.PAGE % O.KEYS:
            there = inside
    k_tile = load_keys(k, k_b, k_r, page, there, j0, hi, 0, O.WIDTH, O.D, O)
    k_cast = k_tile.to(q.dtype)
    S = steps.product((q,), (k_cast.T,), None, O)
    if O.REST:
        k_rest = load_keys(k, k_b, k_r, page, there, j0, hi, O.WIDTH, O.REST, O.D, O)
        S = steps.product((rest,), (k_rest.to(q.dtype).T,), S, O)
    S, _ = steps.scaled(S, scale, softcap, O)
    i = t[:, None]
    if O.ALIBI:
        S = steps.alibi(S, slope[:, None], i, j[None, :], diagonal)
    S = steps.band_mask(S, i, j[None, :], diagonal, left, right, hi, O.LEFT, O.RIGHT, False)
    S = tl.where(inside[None, :], S, -steps.INF)
    m, l, P, alpha = steps.rescale(m, l, S, scale if O.RAW else 1.0, True, O.HEADROOM)
    if O.V_IN_K:
        v_cast = k_cast
    else:
        v_cast = load_keys(v, v_b, v_r, page, there, j0, hi, 0, O.V_WIDTH, O.DV, O).to(q.dtype)
    o = steps.product((P.to(q.dtype),), (v_cast,), o * alpha[:, None], O)
    return o, m, l, bad


@triton.jit
def nothing(O: tl.constexpr):
    """(o, m, l) before the first key."""
    ROWS: tl.constexpr = O.ROWS
    V_WIDTH: tl.constexpr = O.V_WIDTH
    return (
        tl.zeros((ROWS, V_WIDTH), tl.float32),
        tl.full((ROWS,), -steps.INF, tl.float32),
        tl.zeros((ROWS,), tl.float32),
    )


@triton.jit
def normal(m, l, o):
    """(lse in bits, o) of a softmax that is done; nothing seen: -inf, 0."""
    return tl.where(l == 0.0, -steps.INF, m + tl.log2(l)), o * tl.where(l == 0.0, 0.0, 1.0 / l)[:, None]


@triton.jit
def joined(m, l, o, L, x):
    """(m, l, o) with a softmax that is done, of lse L in bits and result x. Fused by hand: two kernels must round alike."""
    m_new = tl.maximum(m, L)
    base = steps.pivot(m_new, True)
    alpha = tl.exp2(m - base)
    w = tl.exp2(L - base)
    return m_new, tl.fma(l, alpha, w), tl.fma(o, alpha[:, None], x * w[:, None])


@triton.jit
def asked(
    q, s, kv, tile, q_start, q_used, start, follow, k_used, q_b, q_h, q_r, cos, sin, positions, slopes, slopes_b, O: tl.constexpr
):  # fmt: skip
    """Of a tile's rows: (q, its columns past WIDTH, query, head, whether in use, the diagonal, slope)."""
    t, g, inside = rows_of_tile(tile, O)
    head = kv * O.GROUP + g
    inside = inside & (t < q_used)
    diagonal = k_used + follow - q_used
    at = q + s.to(tl.int64) * q_b * 8 + q_start.to(tl.int64) * q_r * 8
    position = t + diagonal - start
    tile_q = load_queries(at, q_h, q_r, t, head, inside, position, cos, sin, positions, 0, O.WIDTH, O)
    rest = tile_q
    if O.REST:
        rest = load_queries(at, q_h, q_r, t, head, inside, position, cos, sin, positions, O.WIDTH, O.REST, O)
    slope = 0.0
    if O.ALIBI:
        slope = tl.load(slopes + s.to(tl.int64) * slopes_b + head, mask=inside, other=0.0).to(tl.float32)
    return tile_q, rest, t, head, inside, diagonal, slope


@triton.jit
def as_fp16(q, rest, O: tl.constexpr):
    """(q, its columns past WIDTH, both as fp16 times a power of two of each row; what scores are multiplied by for it).

    For bf16 queries of fp8 keys: these become fp16 by one instruction for two, and bf16 by three more, of which two run at
    a quarter of the rate (sm90). A row's largest number is brought to [2^14, 2^15): what is rounded of the others is less
    than 2^-38 of it, less than sums in fp32 round. A row with inf or NaN has it still, and its numbers stay finite.
    """
    most = tl.max(tl.abs(q.to(tl.float32)), 1)
    if O.REST:
        most = tl.maximum(most, tl.max(tl.abs(rest.to(tl.float32)), 1))
    # Biased: of 2^14 / 2^floor(log2 of the largest).
    exponent = tl.minimum(127 + 14 + 127 - (most.to(tl.int32, bitcast=True) >> 23), 253)
    up = (exponent << 23).to(tl.float32, bitcast=True)
    down = ((254 - exponent) << 23).to(tl.float32, bitcast=True)
    q = (q.to(tl.float32) * up[:, None]).to(tl.float16)
    if O.REST:
        rest = (rest.to(tl.float32) * up[:, None]).to(tl.float16)
    return q, rest, down[:, None]


@triton.jit
def seen(tile, start, q_used, k_used, left, right, diagonal, O: tl.constexpr):
    """[lo, hi): the keys that a tile's queries see, from a multiple of KEYS on."""
    if O.GROUP <= O.ROWS:
        QUERIES: tl.constexpr = O.ROWS // O.GROUP
        first = tile * QUERIES
        last = tl.minimum(first + QUERIES, q_used)
    else:
        PARTS: tl.constexpr = (O.GROUP + O.ROWS - 1) // O.ROWS
        first = tile // PARTS
        last = tl.minimum(first + 1, q_used)
    lo, hi = steps.key_range(first, last, left, right, diagonal, k_used)
    lo = tl.maximum(lo, tl.maximum(start, 0)) // O.KEYS * O.KEYS
    return lo, tl.where(last > first, tl.maximum(hi, lo), lo)


# ---- kernels ---------------------------------------------------------------------------------------------------------


@triton.jit(do_not_specialize=RUN_TIME)
def piece_kernel(
    o, lse, q, k, v, k_lens, pages, rows, starts, after, k_scale, v_scale, cos, sin, slopes, cu_q, q_lens, status,
    batch, kv_heads, q_len, capacity, slots, pool, table_width, positions, scale, softcap, left, right, slopes_b,
    q_b, q_h, q_r, k_b, k_h, k_r, v_b, v_h, v_r, most, pieces, sharers, tiles, O: tl.constexpr,
):  # fmt: skip
    """A share of the pieces of one sequence and key/value head, for one tile of at most `most` queries.

    o (B, Hq, most, pieces, DV), lse in bits (B, Hq, most, pieces), fp32: of blocks where they are JOINED. What a tile sees
    nothing of is not written.
    """
    if O.EARLY:
        gdc_launch_dependents()
    pid = tl.program_id(0)
    share = pid % sharers
    tile = pid // sharers % tiles
    kv = pid // (sharers * tiles) % kv_heads
    s = pid // (sharers * tiles * kv_heads)
    slot, there = slot_of(s, rows, slots, s < batch, status, O)
    start, k_used, follow = keys_of(s, there, k_lens, starts, after, capacity, O)
    q_start, q_span, q_used = steps.extent(s, batch, q_len, cu_q, q_lens, O.PACKED, O.Q_LENS)
    diagonal = k_used + follow - q_used
    lo, hi = seen(tile, start, q_used, k_used, left, right, diagonal, O)
    SHARED_BY: tl.constexpr = O.BLOCK if O.JOINED else O.PIECE
    lowest = lo // SHARED_BY
    live = ((hi + SHARED_BY - 1) // SHARED_BY - lowest).to(tl.int64)  # 2^21 pieces by as many programs
    first = tl.maximum((lowest + (live * share // sharers).to(tl.int32)) * SHARED_BY, lo)
    stop = tl.minimum((lowest + (live * (share + 1) // sharers).to(tl.int32)) * SHARED_BY, hi)
    if (q_span <= most) & (lo < hi) & (first < stop):
        q_tile, rest, t, head, inside, diagonal, slope = asked(
            q,
            s,
            kv,
            tile,
            q_start,
            q_used,
            start,
            follow,
            k_used,
            q_b,
            q_h,
            q_r,
            cos,
            sin,
            positions,
            slopes,
            slopes_b,
            O,
        )
        factor = scale
        if O.SCALES:
            factor = factor * tl.load(k_scale + kv)
        if O.AS_FP16:
            q_tile, rest, down = as_fp16(q_tile, rest, O)
            factor = factor * down
        k += kv.to(tl.int64) * k_h * O.UNIT
        v += kv.to(tl.int64) * v_h * O.UNIT
        table = pages
        if O.PAGE:
            table += slot.to(tl.int64) * table_width
        else:
            k += slot.to(tl.int64) * k_b * O.UNIT
            v += slot.to(tl.int64) * v_b * O.UNIT
        # One loop over all of its pieces: a loop for each would fill the pipeline anew.
        at = ((s.to(tl.int64) * (kv_heads * O.GROUP) + head) * most + t) * pieces
        columns = tl.arange(0, O.V_WIDTH)
        in_memory = inside[:, None] & (columns < O.DV)[None, :]
        KEYS: tl.constexpr = O.KEYS
        bad = tl.zeros((KEYS,), tl.int32)
        acc, m, l = nothing(O)
        block, M, W = nothing(O)
        page = pages_of(table, first, start, stop, O)
        for j0 in tl.range(first, stop, O.KEYS):
            following = pages_of(table, j0 + O.KEYS, start, stop, O)  # on its way while this tile is worked on
            acc, m, l, bad = attend_keys(
                acc, m, l, bad, q_tile, rest, k, v, page, j0, start, hi, t, diagonal, slope, pool, k_b, k_r,
                v_b, v_r, factor, softcap, left, right, O,
            )  # fmt: skip
            page = following
            if O.ALONE == 0 and ((j0 + O.KEYS) % O.PIECE == 0) | (j0 + O.KEYS >= stop):
                L, x = normal(m - O.HEADROOM, l, acc)
                acc, m, l = nothing(O)
                if O.JOINED:
                    M, W, block = joined(M, W, block, L, x)
                    if ((j0 + O.KEYS) % O.BLOCK == 0) | (j0 + O.KEYS >= stop):
                        L, x = normal(M, W, block)
                        block, M, W = nothing(O)
                        tl.store(lse + at + j0 // O.BLOCK, L, mask=inside)
                        tl.store(o + (at + j0 // O.BLOCK)[:, None] * O.DV + columns[None, :], x, mask=in_memory)
                else:
                    tl.store(lse + at + j0 // O.PIECE, L, mask=inside)
                    tl.store(o + (at + j0 // O.PIECE)[:, None] * O.DV + columns[None, :], x, mask=in_memory)
        if O.ALONE:
            L, x = normal(m - O.HEADROOM, l, acc)
            tl.store(lse + at + first // O.PIECE, L, mask=inside)
            tl.store(o + (at + first // O.PIECE)[:, None] * O.DV + columns[None, :], x, mask=in_memory)
        if O.PAGE:
            tl.atomic_or(status, BAD, mask=tl.max(bad, 0) > 0)


@triton.jit(do_not_specialize=RUN_TIME)
def merge_kernel(
    o, lse, o_pieces, lse_pieces, k_lens, rows, starts, after, v_scale, sink, cu_q, q_lens, status,
    batch, kv_heads, q_len, capacity, slots, left, right, o_b, o_h, o_r, most, pieces, O: tl.constexpr,
):  # fmt: skip
    """One row's pieces, COLUMNS of them, merged in their order: o, and lse as natural logarithm, by the first columns' program."""
    SLICES: tl.constexpr = (O.DV + O.COLUMNS - 1) // O.COLUMNS
    pid = tl.program_id(0)
    part = pid % SLICES
    t = pid // SLICES % most
    head = pid // (SLICES * most) % (kv_heads * O.GROUP)
    s = pid // (SLICES * most * kv_heads * O.GROUP)
    _slot, there = slot_of(s, rows, slots, s < batch, status, O)
    start, k_used, follow = keys_of(s, there, k_lens, starts, after, capacity, O)
    q_start, q_span, q_used = steps.extent(s, batch, q_len, cu_q, q_lens, O.PACKED, O.Q_LENS)
    if O.EARLY:
        gdc_wait()
    if (q_span <= most) & (t < q_span):
        if O.GROUP <= O.ROWS:
            tile = t // (O.ROWS // O.GROUP)
        else:
            tile = t * ((O.GROUP + O.ROWS - 1) // O.ROWS)
        lo, hi = seen(tile, start, q_used, k_used, left, right, k_used + follow - q_used, O)
        hi = tl.where(t < q_used, hi, lo)
        SIDE: tl.constexpr = O.BLOCK if O.JOINED else O.PIECE
        PARTS_OF_BLOCK: tl.constexpr = O.BLOCK // SIDE
        AT_ONCE: tl.constexpr = O.AT_ONCE
        COLUMNS: tl.constexpr = O.COLUMNS
        first = lo // SIDE
        stop = tl.where(lo < hi, (hi + SIDE - 1) // SIDE, first)
        row = ((s.to(tl.int64) * (kv_heads * O.GROUP) + head) * most + t) * pieces
        columns = part * COLUMNS + tl.arange(0, COLUMNS)
        m = -steps.INF
        l = 0.0
        acc = tl.zeros((COLUMNS,), tl.float32)
        blocks = lo // O.BLOCK // AT_ONCE * AT_ONCE, tl.where(lo < hi, (hi + O.BLOCK - 1) // O.BLOCK, 0)
        for at in tl.range(blocks[0], blocks[1], AT_ONCE):
            M = tl.full((AT_ONCE,), -steps.INF, tl.float32)
            W = tl.zeros((AT_ONCE,), tl.float32)
            block = tl.zeros((AT_ONCE, COLUMNS), tl.float32)
            for n in tl.static_range(PARTS_OF_BLOCK):
                piece = (at + tl.arange(0, AT_ONCE)) * PARTS_OF_BLOCK + n
                live = (piece >= first) & (piece < stop)
                L = tl.load(lse_pieces + row + piece, mask=live, other=-steps.INF)
                x = tl.load(
                    o_pieces + (row + piece)[:, None] * O.DV + columns[None, :],
                    mask=live[:, None] & (columns < O.DV)[None, :], other=0.0,
                )  # fmt: skip
                M, W, block = joined(M, W, block, L, x)
            L, x = normal(M, W, block)
            m_new = tl.maximum(m, tl.max(L, 0))
            base = steps.pivot(m_new, True)
            w = tl.exp2(L - base)
            alpha = tl.exp2(m - base)
            l = l * alpha + tl.sum(w, 0)
            acc = acc * alpha + tl.sum(x * w[:, None], 0)
            m = m_new
        logit = 0.0
        if O.SINK:
            logit = tl.load(sink + head).to(tl.float32)
        one = tl.zeros((1,), tl.float32)
        acc, natural = steps.finalize(one + m, one + l, acc[None, :], logit, O.SINK)
        if O.SCALES:
            acc = acc * tl.load(v_scale + head // O.GROUP)
        at = o + s.to(tl.int64) * o_b + head.to(tl.int64) * o_h + (q_start + t).to(tl.int64) * o_r
        tl.store(at + columns[None, :], acc.to(o.dtype.element_ty), mask=(columns < O.DV)[None, :])
        at = steps.statistic(s, head, kv_heads * O.GROUP, q_len, q_start, O.PACKED) + t
        tl.store(lse + at + tl.zeros((1,), tl.int32), natural, mask=part == 0)


@triton.jit(do_not_specialize=RUN_TIME)
def whole_kernel(
    o, lse, q, k, v, k_lens, pages, rows, starts, after, k_scale, v_scale, cos, sin, slopes, sink, cu_q, q_lens, status,
    batch, kv_heads, q_len, capacity, slots, pool, table_width, positions, scale, softcap, left, right, slopes_b,
    q_b, q_h, q_r, k_b, k_h, k_r, v_b, v_h, v_r, o_b, o_h, o_r, most, O: tl.constexpr,
):  # fmt: skip
    """A tile of queries, of sequences of more than `most`: o, and lse as natural logarithm."""
    QUERIES: tl.constexpr = O.ROWS // O.GROUP if O.GROUP <= O.ROWS else 1
    PARTS: tl.constexpr = (O.GROUP + O.ROWS - 1) // O.ROWS
    s, part, first = steps.which_tile(batch, kv_heads * PARTS, q_len, cu_q, 1, QUERIES, O.PACKED, True)
    kv = part // PARTS
    tile = first // QUERIES * PARTS + part % PARTS
    known = s < batch
    slot, there = slot_of(s, rows, slots, known, status, O)
    start, k_used, follow = keys_of(s, there, k_lens, starts, after, capacity, O)
    q_start, q_span, q_used = steps.extent(s, batch, q_len, cu_q, q_lens, O.PACKED, O.Q_LENS)
    if (first < q_span) & ((q_span > most) | (known == 0)):
        q_tile, rest, t, head, inside, diagonal, slope = asked(
            q, s * known, kv, tile, q_start, q_used, start, follow, k_used, q_b, q_h, q_r, cos, sin, positions, slopes,
            slopes_b, O,
        )  # fmt: skip
        lo, hi = seen(tile, start, q_used, k_used, left, right, diagonal, O)
        factor = scale
        if O.SCALES:
            factor = factor * tl.load(k_scale + kv)
        if O.AS_FP16:
            q_tile, rest, down = as_fp16(q_tile, rest, O)
            factor = factor * down
        k += kv.to(tl.int64) * k_h * O.UNIT
        v += kv.to(tl.int64) * v_h * O.UNIT
        table = pages
        if O.PAGE:
            table += slot.to(tl.int64) * table_width
        else:
            k += slot.to(tl.int64) * k_b * O.UNIT
            v += slot.to(tl.int64) * v_b * O.UNIT
        KEYS: tl.constexpr = O.KEYS
        bad = tl.zeros((KEYS,), tl.int32)
        acc, m, l = nothing(O)
        block, M, W = nothing(O)
        page = pages_of(table, lo, start, hi, O)
        for j0 in tl.range(lo, hi, O.KEYS):
            following = pages_of(table, j0 + O.KEYS, start, hi, O)
            acc, m, l, bad = attend_keys(
                acc, m, l, bad, q_tile, rest, k, v, page, j0, start, hi, t, diagonal, slope, pool, k_b, k_r,
                v_b, v_r, factor, softcap, left, right, O,
            )  # fmt: skip
            page = following
            if O.PIECE:  # noqa: SIM102 (the outer one is compile-time): pieces of the only block
                if ((j0 + O.KEYS) % O.PIECE == 0) | (j0 + O.KEYS >= hi):
                    L, x = normal(m - O.HEADROOM, l, acc)
                    M, W, block = joined(M, W, block, L, x)
                    acc, m, l = nothing(O)
        if O.PAGE:
            tl.atomic_or(status, BAD, mask=tl.max(bad, 0) > 0)
        if O.PIECE:
            m, acc = normal(M, W, block)
            l = tl.where(m == -steps.INF, 0.0, 1.0)
        else:
            m = m - O.HEADROOM
        logit = 0.0
        if O.SINK:
            logit = tl.load(sink + head, mask=inside, other=0.0).to(tl.float32)
        acc, natural = steps.finalize(m, l, acc, logit, O.SINK)
        if O.SCALES:
            acc = acc * tl.load(v_scale + kv)
        _t, _g, in_tile = rows_of_tile(tile, O)
        in_memory = in_tile & (t < q_span)
        acc = tl.where(inside[:, None], acc, 0.0)
        at = o + s.to(tl.int64) * o_b + head.to(tl.int64) * o_h + (q_start + t).to(tl.int64) * o_r
        columns = tl.arange(0, O.V_WIDTH)
        tl.store(
            at[:, None] + columns[None, :], acc.to(o.dtype.element_ty),
            mask=in_memory[:, None] & (columns < O.DV)[None, :],
        )  # fmt: skip
        at = steps.statistic(s, head, kv_heads * O.GROUP, q_len, q_start, O.PACKED) + t
        tl.store(lse + at, tl.where(inside, natural, -steps.INF), mask=in_memory)


@triton.jit(do_not_specialize=RUN_TIME)
def turn_kernel(
    o, q, k_lens, cos, sin, q_lens, batch, kv_heads, q_len, capacity, positions, q_b, q_h, q_r, o_b, o_h, o_r, O: tl.constexpr
):  # fmt: skip
    """A tile of dense queries, turned: for the kernels for dense tensors. o: as q."""
    QUERIES: tl.constexpr = O.ROWS // O.GROUP if O.GROUP <= O.ROWS else 1
    PARTS: tl.constexpr = (O.GROUP + O.ROWS - 1) // O.ROWS
    s, part, first = steps.which_tile(batch, kv_heads * PARTS, q_len, k_lens, 1, QUERIES, False, False)
    kv = part // PARTS
    tile = first // QUERIES * PARTS + part % PARTS
    used = tl.minimum(tl.maximum(tl.load(k_lens + s), 0), capacity)
    q_start, _q_span, q_used = steps.extent(s, batch, q_len, k_lens, q_lens, False, O.Q_LENS)
    x, rest, t, head, inside, _diagonal, _slope = asked(
        q, s, kv, tile, q_start, q_used, s * 0, s * 0, used, q_b, q_h, q_r, cos, sin, positions, q, 0, O
    )  # fmt: skip
    at = o + s.to(tl.int64) * o_b + head.to(tl.int64) * o_h + t.to(tl.int64) * o_r
    columns = tl.arange(0, O.WIDTH)
    tl.store(at[:, None] + columns[None, :], x, mask=inside[:, None] & (columns < O.D)[None, :])
    if O.REST:
        columns = O.WIDTH + tl.arange(0, O.REST)
        tl.store(at[:, None] + columns[None, :], rest, mask=inside[:, None] & (columns < O.D)[None, :])
