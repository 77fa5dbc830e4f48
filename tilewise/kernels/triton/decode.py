"""Attention over a key/value cache in Triton: a few queries, many keys that lie where a cache has put them.

    piece_kernel    a share of a sequence's keys, for the few queries of a key/value head: o and lse of its pieces
    merge_kernel    the parts of a row, in their order
    whole_kernel    all keys that a tile of queries sees: for many queries, or where no other program has some of them
    turn_kernel     queries turned by their positions, for the kernels for dense tensors

The query heads of a group are rows of one tile, so that their keys are loaded once. Keys are cut at fixed positions into
pieces, so many pieces are a block, and so many blocks a chapter. Each piece has a softmax of its own, a block is the merge of
its pieces, a chapter that of its blocks, a row that of its chapters. Where there is little to do, programs share a block, and
merge_kernel has its pieces; where there is more, a program has whole blocks or chapters, the PARTs that merge_kernel has then,
and merges what they are made of itself, by the same operations. So a row has the same bits in any batch, slot or order of
pages.

Source: Flash-Decoding (Dao, Haziza, Massa, Sizov, 2023); pages: PagedAttention (Kwon et al., 2023).
"""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from ...problem_cached import BAD_PAGE, PAST_END
from . import steps

BAD = tl.constexpr(BAD_PAGE)
PAST = tl.constexpr(PAST_END)

RUN_TIME = [
    "batch", "kv_heads", "q_len", "capacity", "slots", "pool", "table_width", "positions", "scale", "softcap", "left",
    "right", "slopes_b", "q_b", "q_h", "q_r", "k_b", "k_h", "k_r", "v_b", "v_h", "v_r", "o_b", "o_h", "o_r", "most",
    "parts", "sharers", "tiles", "new_b", "new_h", "new_r", "w_b", "w_h", "w_r",
]  # fmt: skip


# ---- where a sequence lies -------------------------------------------------------------------------------------------


@triton.jit
def slot_of(s, rows, slots, known, status, O: tl.constexpr):
    """(sequence s's slot, whether it has one). A slot that the cache does not have is noted in the status."""
    slot = s * 0
    if not O.SHARED:
        slot += s
        if O.SLOTS:
            slot = tl.load(rows + s, mask=known, other=-1, cache_modifier=".cg")
            if slot >= slots:
                tl.atomic_or(status, BAD)
    there = known & (slot >= 0) & (slot < slots)
    return tl.where(there, slot, 0), there


@triton.jit
def keys_of(s, there, k_lens, starts, after, capacity, new, O: tl.constexpr):
    """(where positions begin, keys, how many follow elsewhere) of sequence s. No key lies before 0, whatever begins there.

    new: how many more there will be than k_lens says, where the launch stores them (NEW). Loads go past the L1: merge_kernel
    asks before it waits.
    """
    used = tl.load(k_lens + s, mask=there, other=0, cache_modifier=".cg")
    used = tl.minimum(used, capacity)
    if O.NEW:
        used += tl.where(there, new, 0)
    used = tl.minimum(tl.maximum(used, 0), capacity)
    start = s * 0
    if O.STARTS:
        start = tl.load(starts + s, mask=there, other=0, cache_modifier=".cg")
    follow = s * 0
    if O.AFTER:
        follow = tl.load(after + s, mask=there, other=0, cache_modifier=".cg")
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
def keys_at(x, slot, kv, x_b, x_h, O: tl.constexpr):
    """What `load_keys` reads: a head's keys, in the sequence's slot or in the pool of pages."""
    x += kv.to(tl.int64) * x_h * O.UNIT
    if O.PAGE == 0:
        x += slot.to(tl.int64) * x_b * O.UNIT
    return x


@triton.jit
def load_keys(
    x, x_b, x_r, page, there, j0, begin, end, COLUMN: tl.constexpr, WIDTH: tl.constexpr, DIM: tl.constexpr, O: tl.constexpr
):  # fmt: skip
    """Columns [COLUMN, COLUMN + WIDTH) of the keys [j0, j0 + KEYS): zeros from DIM on, outside [begin, end), and where no page
    is there. What lies outside may be NaN.

    x: `keys_at`. Strides: in units of UNIT elements (`decode_host._unit`).
    """
    rows = tl.arange(0, O.KEYS)
    columns = COLUMN + tl.arange(0, WIDTH)
    if O.PAGE == 0:
        at = x + tl.cast(j0, tl.int64) * x_r * O.UNIT + (rows.to(tl.int64)[:, None] * (x_r * O.UNIT) + columns[None, :])
        inside = (rows < end - j0)[:, None]
        if O.STARTS:
            inside = inside & (rows >= begin - j0)[:, None]
    elif O.PAGE % O.KEYS == 0:
        first = tl.cast(page, tl.int64) * (x_b * O.UNIT) + tl.cast(j0 % O.PAGE, tl.int64) * (x_r * O.UNIT)
        at = x + first + (rows.to(tl.int64)[:, None] * (x_r * O.UNIT) + columns[None, :])
        inside = (rows < tl.where(there, end - j0, 0))[:, None]
        if O.STARTS:
            inside = inside & (rows >= begin - j0)[:, None]
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
    o, m, l, bad, q, rest, k, v, page, j0, lo, hi, free_lo, free_hi, t, diagonal, slope, pool, k_b, k_r, v_b, v_r, scale,
    softcap, left, right, O: tl.constexpr,
):  # fmt: skip
    """(o, m, l, bad) with the keys [j0, j0 + KEYS) taken in, of which those in [lo, hi) are there, and [free_lo, free_hi) are
    seen by all rows. bad: pages that are not there."""
    j = j0 + tl.arange(0, O.KEYS)
    inside = (j >= lo) & (j < hi)
    there = inside
    edge = (j0 < free_lo) | (j0 + O.KEYS > free_hi)
    if O.PAGE:
        there = (page >= 0) & (page < pool)
        bad = bad | (inside & (there == 0)).to(tl.int32)
        page = tl.where(there, page, 0)
        inside = inside & there
        if O.PAGE % O.KEYS:
            there = inside
        else:
            edge = edge | (there == 0)
    k_tile = load_keys(k, k_b, k_r, page, there, j0, lo, hi, 0, O.WIDTH, O.D, O)
    k_cast = k_tile.to(q.dtype)
    S = steps.product((q,), (k_cast.T,), None, O)
    if O.REST:
        k_rest = load_keys(k, k_b, k_r, page, there, j0, lo, hi, O.WIDTH, O.REST, O.D, O)
        S = steps.product((rest,), (k_rest.to(q.dtype).T,), S, O)
    S, _ = steps.scaled(S, scale, softcap, O)
    i = t[:, None]
    if O.ALIBI:
        S = steps.alibi(S, slope[:, None], i, j[None, :], diagonal)
    if edge or ((O.PAGE > 0) & (O.PAGE % O.KEYS > 0)):
        S = steps.band_mask(S, i, j[None, :], diagonal, left, right, hi, O.LEFT, O.RIGHT, False)
        S = tl.where(inside[None, :], S, -steps.INF)
    m, l, P, alpha = steps.rescale(m, l, S, scale if O.RAW else 1.0, True, O.HEADROOM)
    if O.V_IN_K:
        v_cast = k_cast
    else:
        v_cast = load_keys(v, v_b, v_r, page, there, j0, lo, hi, 0, O.V_WIDTH, O.DV, O).to(q.dtype)
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
def nothing_of(ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """The same of merge_kernel, as (m, l, o)."""
    return (
        tl.full((ROWS,), -steps.INF, tl.float32),
        tl.zeros((ROWS,), tl.float32),
        tl.zeros((ROWS, COLUMNS), tl.float32),
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
    """[lo, hi), the keys that a tile's queries see, from a multiple of KEYS on; [free_lo, free_hi), those that all of them do."""
    if O.GROUP <= O.ROWS:
        QUERIES: tl.constexpr = O.ROWS // O.GROUP
        first = tile * QUERIES
        last = tl.minimum(first + QUERIES, q_used)
    else:
        PARTS: tl.constexpr = (O.GROUP + O.ROWS - 1) // O.ROWS
        first = tile // PARTS
        last = tl.minimum(first + 1, q_used)
    lo, hi = steps.key_range(first, last, left, right, diagonal, k_used)
    free_lo, free_hi = steps.mask_free_range(first, last, left, right, diagonal, k_used)
    lo = tl.maximum(lo, tl.maximum(start, 0)) // O.KEYS * O.KEYS
    return lo, tl.where(last > first, tl.maximum(hi, lo), lo), tl.maximum(free_lo, start), free_hi


@triton.jit
def note_past(s, there, k_lens, q_used, capacity, status):
    """New tokens that have no room, in the status: without an overflow, whatever the length is."""
    old = tl.load(k_lens + s, mask=there, other=0)
    if there & (q_used > 0) & ((old < 0) | (old > capacity - q_used)):
        tl.atomic_or(status, PAST)


@triton.jit
def store_new(
    k, v, K, V, new_k, new_v, table, s, kv, there, k_lens, first, stop, q_used, pool, positions, cos, sin, status,
    k_b, k_r, v_b, v_r, new_b, new_h, new_r, w_b, w_h, w_r, O: tl.constexpr,
):  # fmt: skip
    """Of a sequence's new tokens those at [first, stop): a head's keys and values, turned, to their places.

    Whoever attends to those keys stores them, before it loads any: programs with other queries of the same keys store the
    same. new_k (B, Hkv, q_len, D); new_v None where V lies in K. Tokens past the end (`note_past`), or on a page that is not
    there, are noted and not stored.
    """
    NEW: tl.constexpr = O.NEW
    old = tl.load(k_lens + s, mask=there, other=0)
    if there & (old < stop) & (old > first - q_used):
        t = tl.arange(0, NEW)
        row = old + t
        inside = (t < q_used) & (row >= first) & (row < stop)
        position = row
        page = row * 0
        if O.PAGE:
            page = tl.load(table + row // O.PAGE, mask=inside, other=0)
            is_page = (page >= 0) & (page < pool)
            tl.atomic_or(status, BAD, mask=tl.max((inside & (is_page == 0)).to(tl.int32), 0) > 0)
            inside = inside & is_page
            row = row % O.PAGE
        at = new_k + s.to(tl.int64) * new_b * 8
        to = K + (page.to(tl.int64) * k_b * O.UNIT + row.to(tl.int64) * k_r * O.UNIT)[:, None]
        columns = tl.arange(0, O.WIDTH)[None, :]
        x = load_queries(at, new_h, new_r, t, kv + t * 0, inside, position, cos, sin, positions, 0, O.WIDTH, O)
        tl.store(to + columns, x.to(k.dtype.element_ty), mask=inside[:, None] & (columns < O.D))
        if O.REST:
            columns = O.WIDTH + tl.arange(0, O.REST)[None, :]
            x = load_queries(at, new_h, new_r, t, kv + t * 0, inside, position, cos, sin, positions, O.WIDTH, O.REST, O)
            tl.store(to + columns, x.to(k.dtype.element_ty), mask=inside[:, None] & (columns < O.D))
        if new_v is not None:
            at = new_v + s.to(tl.int64) * w_b * 8 + kv.to(tl.int64) * w_h * 8 + (t.to(tl.int64) * w_r * 8)[:, None]
            to = V + (page.to(tl.int64) * v_b * O.UNIT + row.to(tl.int64) * v_r * O.UNIT)[:, None]
            columns = tl.arange(0, O.V_WIDTH)[None, :]
            mask = inside[:, None] & (columns < O.DV)
            tl.store(to + columns, tl.load(at + columns, mask=mask, other=0.0).to(v.dtype.element_ty), mask=mask)
    tl.debug_barrier()  # the program's threads load what others of them have stored


@triton.jit
def put_part(o, lse, at, L, x, inside, in_memory, columns, O: tl.constexpr):
    """A part's results for merge_kernel, at its rows' places `at`."""
    tl.store(lse + at, L, mask=inside)
    tl.store(o + at[:, None] * O.DV + columns[None, :], x, mask=in_memory)


@triton.jit
def part_at(o, lse, row, n, first, stop, columns, O: tl.constexpr):
    """(L, x) of a row's parts n, some of its columns; nothing, where n is not in [first, stop)."""
    live = (n >= first) & (n < stop)
    L = tl.load(lse + row + n, mask=live, other=-steps.INF)
    mask = live[:, None] & (columns < O.DV)[None, :]
    return L, tl.load(o + (row + n)[:, None] * O.DV + columns[None, :], mask=mask, other=0.0)


@triton.jit
def follow_on(O: tl.constexpr):
    """A kernel's first words, where it is launched while the one before still runs: wait for that one. What is gained is the
    time that it takes to get programs on SMs. Then the next one's may come, which waits by itself."""
    if O.EARLY:
        gdc_wait()
        gdc_launch_dependents()


# ---- kernels ---------------------------------------------------------------------------------------------------------


@triton.jit(do_not_specialize=RUN_TIME)
def piece_kernel(
    o, lse, q, k, v, k_lens, pages, rows, starts, after, k_scale, v_scale, cos, sin, slopes, cu_q, q_lens, status, new_k, new_v,
    batch, kv_heads, q_len, capacity, slots, pool, table_width, positions, scale, softcap, left, right, slopes_b,
    q_b, q_h, q_r, k_b, k_h, k_r, v_b, v_h, v_r, new_b, new_h, new_r, w_b, w_h, w_r, most, parts, sharers, tiles,
    O: tl.constexpr,
):  # fmt: skip
    """A share of the pieces of one sequence and key/value head, for one tile of at most `most` queries.

    o (B, Hq, most, parts, DV), lse in bits (B, Hq, most, parts), fp32: of each PART, a piece, a block or a chapter. What a
    tile sees nothing of is not written.
    """
    follow_on(O)
    pid = tl.program_id(0)
    share = pid % sharers
    tile = pid // sharers % tiles
    kv = pid // (sharers * tiles) % kv_heads
    s = pid // (sharers * tiles * kv_heads)
    slot, there = slot_of(s, rows, slots, s < batch, status, O)
    q_start, q_span, q_used = steps.extent(s, batch, q_len, cu_q, q_lens, O.PACKED, O.Q_LENS)
    start, k_used, follow = keys_of(s, there, k_lens, starts, after, capacity, q_used, O)
    if O.NEW:
        note_past(s, there, k_lens, q_used, capacity, status)
    diagonal = k_used + follow - q_used
    lo, hi, free_lo, free_hi = seen(tile, start, q_used, k_used, left, right, diagonal, O)
    lowest = lo // O.PART
    live = ((hi + O.PART - 1) // O.PART - lowest).to(tl.int64)  # 2^21 pieces by as many programs
    first = tl.maximum((lowest + (live * share // sharers).to(tl.int32)) * O.PART, lo)
    stop = tl.minimum((lowest + (live * (share + 1) // sharers).to(tl.int32)) * O.PART, hi)
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
        K = keys_at(k, slot, kv, k_b, k_h, O)
        V = keys_at(v, slot, kv, v_b, v_h, O)
        table = pages
        if O.PAGE:
            table += slot.to(tl.int64) * table_width
        if O.NEW:
            store_new(
                k, v, K, V, new_k, new_v, table, s, kv, there, k_lens, first, stop, q_used, pool, positions, cos, sin,
                status, k_b, k_r, v_b, v_r, new_b, new_h, new_r, w_b, w_h, w_r, O,
            )  # fmt: skip
        # One loop over all of its pieces: a loop for each would fill the pipeline anew.
        at = ((s.to(tl.int64) * (kv_heads * O.GROUP) + head) * most + t) * parts
        columns = tl.arange(0, O.V_WIDTH)
        in_memory = inside[:, None] & (columns < O.DV)[None, :]
        KEYS: tl.constexpr = O.KEYS
        bad = tl.zeros((KEYS,), tl.int32)
        acc, m, l = nothing(O)
        block, m_block, l_block = nothing(O)
        chapter, m_chapter, l_chapter = nothing(O)
        page = pages_of(table, first, start, stop, O)
        for j0 in tl.range(first, stop, O.KEYS):
            following = pages_of(table, j0 + O.KEYS, start, stop, O)  # on its way while this tile is worked on
            acc, m, l, bad = attend_keys(
                acc, m, l, bad, q_tile, rest, K, V, page, j0, start, hi, free_lo, free_hi, t, diagonal, slope, pool, k_b, k_r,
                v_b, v_r, factor, softcap, left, right, O,
            )  # fmt: skip
            page = following
            if O.ALONE == 0 and ((j0 + O.KEYS) % O.PIECE == 0) | (j0 + O.KEYS >= stop):
                L, x = normal(m - O.HEADROOM, l, acc)
                acc, m, l = nothing(O)
                if O.PART == O.PIECE:
                    put_part(o, lse, at + j0 // O.PART, L, x, inside, in_memory, columns, O)
                else:
                    m_block, l_block, block = joined(m_block, l_block, block, L, x)
                    if ((j0 + O.KEYS) % O.BLOCK == 0) | (j0 + O.KEYS >= stop):
                        L, x = normal(m_block, l_block, block)
                        block, m_block, l_block = nothing(O)
                        if O.PART == O.BLOCK:
                            put_part(o, lse, at + j0 // O.PART, L, x, inside, in_memory, columns, O)
                        else:
                            m_chapter, l_chapter, chapter = joined(m_chapter, l_chapter, chapter, L, x)
                            if ((j0 + O.KEYS) % O.CHAPTER == 0) | (j0 + O.KEYS >= stop):
                                L, x = normal(m_chapter, l_chapter, chapter)
                                chapter, m_chapter, l_chapter = nothing(O)
                                put_part(o, lse, at + j0 // O.PART, L, x, inside, in_memory, columns, O)
        if O.ALONE:
            L, x = normal(m - O.HEADROOM, l, acc)
            put_part(o, lse, at + first // O.PART, L, x, inside, in_memory, columns, O)
        if O.PAGE:
            tl.atomic_or(status, BAD, mask=tl.max(bad, 0) > 0)


@triton.jit(do_not_specialize=RUN_TIME)
def merge_kernel(
    o, lse, o_parts, lse_parts, k_lens, rows, starts, after, v_scale, sink, cu_q, q_lens, status,
    batch, kv_heads, q_len, capacity, slots, left, right, o_b, o_h, o_r, most, parts, O: tl.constexpr,
):  # fmt: skip
    """One row's parts, COLUMNS of them, merged in their order: o, and lse as natural logarithm, by the first columns' program."""
    SLICES: tl.constexpr = (O.DV + O.COLUMNS - 1) // O.COLUMNS
    if O.EARLY:
        gdc_launch_dependents()
    pid = tl.program_id(0)
    part = pid % SLICES
    t = pid // SLICES % most
    head = pid // (SLICES * most) % (kv_heads * O.GROUP)
    s = pid // (SLICES * most * kv_heads * O.GROUP)
    # These are older than piece_kernel's beginning, which has waited for them; those of `steps.extent` may be in the L1.
    if O.EARLY and (O.PACKED or O.Q_LENS):
        gdc_wait()
    _slot, there = slot_of(s, rows, slots, s < batch, status, O)
    q_start, q_span, q_used = steps.extent(s, batch, q_len, cu_q, q_lens, O.PACKED, O.Q_LENS)
    start, k_used, follow = keys_of(s, there, k_lens, starts, after, capacity, q_used, O)
    if O.EARLY and not (O.PACKED or O.Q_LENS):
        gdc_wait()
    if (q_span <= most) & (t < q_span):
        if O.GROUP <= O.ROWS:
            tile = t // (O.ROWS // O.GROUP)
        else:
            tile = t * ((O.GROUP + O.ROWS - 1) // O.ROWS)
        lo, hi, _free_lo, _free_hi = seen(tile, start, q_used, k_used, left, right, k_used + follow - q_used, O)
        hi = tl.where(t < q_used, hi, lo)
        BLOCKS: tl.constexpr = O.CHAPTER // O.BLOCK
        PIECES: tl.constexpr = O.BLOCK // O.PIECE
        AT_ONCE: tl.constexpr = O.AT_ONCE
        COLUMNS: tl.constexpr = O.COLUMNS
        first = lo // O.PART
        stop = tl.where(lo < hi, (hi + O.PART - 1) // O.PART, first)
        row = ((s.to(tl.int64) * (kv_heads * O.GROUP) + head) * most + t) * parts
        columns = part * COLUMNS + tl.arange(0, COLUMNS)
        m = -steps.INF
        l = 0.0
        acc = tl.zeros((COLUMNS,), tl.float32)
        chapters = lo // O.CHAPTER // AT_ONCE * AT_ONCE, tl.where(lo < hi, (hi + O.CHAPTER - 1) // O.CHAPTER, 0)
        for at in tl.range(chapters[0], chapters[1], AT_ONCE):
            n = at + tl.arange(0, AT_ONCE)
            if O.PART == O.CHAPTER:
                L, x = part_at(o_parts, lse_parts, row, n, first, stop, columns, O)
            else:
                m_chapter, l_chapter, chapter = nothing_of(AT_ONCE, COLUMNS)
                for b in tl.static_range(BLOCKS):
                    if O.PART == O.BLOCK:
                        L, x = part_at(o_parts, lse_parts, row, n * BLOCKS + b, first, stop, columns, O)
                    else:
                        m_block, l_block, block = nothing_of(AT_ONCE, COLUMNS)
                        for p in tl.static_range(PIECES):
                            piece = (n * BLOCKS + b) * PIECES + p
                            L, x = part_at(o_parts, lse_parts, row, piece, first, stop, columns, O)
                            m_block, l_block, block = joined(m_block, l_block, block, L, x)
                        L, x = normal(m_block, l_block, block)
                    m_chapter, l_chapter, chapter = joined(m_chapter, l_chapter, chapter, L, x)
                L, x = normal(m_chapter, l_chapter, chapter)
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
    o, lse, q, k, v, k_lens, pages, rows, starts, after, k_scale, v_scale, cos, sin, slopes, sink, cu_q, q_lens, status, new_k,
    new_v, batch, kv_heads, q_len, capacity, slots, pool, table_width, positions, scale, softcap, left, right, slopes_b,
    q_b, q_h, q_r, k_b, k_h, k_r, v_b, v_h, v_r, new_b, new_h, new_r, w_b, w_h, w_r, o_b, o_h, o_r, most, O: tl.constexpr,
):  # fmt: skip
    """A tile of queries, of sequences of more than `most`: o, and lse as natural logarithm."""
    follow_on(O)
    QUERIES: tl.constexpr = O.ROWS // O.GROUP if O.GROUP <= O.ROWS else 1
    PARTS: tl.constexpr = (O.GROUP + O.ROWS - 1) // O.ROWS
    s, part, first = steps.which_tile(batch, kv_heads * PARTS, q_len, cu_q, 1, QUERIES, O.PACKED, True)
    kv = part // PARTS
    tile = first // QUERIES * PARTS + part % PARTS
    known = s < batch
    slot, there = slot_of(s, rows, slots, known, status, O)
    q_start, q_span, q_used = steps.extent(s, batch, q_len, cu_q, q_lens, O.PACKED, O.Q_LENS)
    start, k_used, follow = keys_of(s, there, k_lens, starts, after, capacity, q_used, O)
    if O.NEW:
        note_past(s, there, k_lens, q_used, capacity, status)
    if (first < q_span) & ((q_span > most) | (known == 0)):
        q_tile, rest, t, head, inside, diagonal, slope = asked(
            q, s * known, kv, tile, q_start, q_used, start, follow, k_used, q_b, q_h, q_r, cos, sin, positions, slopes,
            slopes_b, O,
        )  # fmt: skip
        lo, hi, free_lo, free_hi = seen(tile, start, q_used, k_used, left, right, diagonal, O)
        factor = scale
        if O.SCALES:
            factor = factor * tl.load(k_scale + kv)
        if O.AS_FP16:
            q_tile, rest, down = as_fp16(q_tile, rest, O)
            factor = factor * down
        K = keys_at(k, slot, kv, k_b, k_h, O)
        V = keys_at(v, slot, kv, v_b, v_h, O)
        table = pages
        if O.PAGE:
            table += slot.to(tl.int64) * table_width
        if O.NEW:
            store_new(
                k, v, K, V, new_k, new_v, table, s, kv, there, k_lens, lo, hi, q_used, pool, positions, cos, sin,
                status, k_b, k_r, v_b, v_r, new_b, new_h, new_r, w_b, w_h, w_r, O,
            )  # fmt: skip
        KEYS: tl.constexpr = O.KEYS
        bad = tl.zeros((KEYS,), tl.int32)
        acc, m, l = nothing(O)
        block, m_block, l_block = nothing(O)
        chapter, m_chapter, l_chapter = nothing(O)
        page = pages_of(table, lo, start, hi, O)
        for j0 in tl.range(lo, hi, O.KEYS):
            following = pages_of(table, j0 + O.KEYS, start, hi, O)
            acc, m, l, bad = attend_keys(
                acc, m, l, bad, q_tile, rest, K, V, page, j0, start, hi, free_lo, free_hi, t, diagonal, slope, pool, k_b, k_r,
                v_b, v_r, factor, softcap, left, right, O,
            )  # fmt: skip
            page = following
            if O.PIECE:  # noqa: SIM102 (the outer one is compile-time): pieces of the only PART
                if ((j0 + O.KEYS) % O.PIECE == 0) | (j0 + O.KEYS >= hi):
                    L, x = normal(m - O.HEADROOM, l, acc)
                    m_block, l_block, block = joined(m_block, l_block, block, L, x)
                    acc, m, l = nothing(O)
                    if O.PART == O.CHAPTER and ((j0 + O.KEYS) % O.BLOCK == 0) | (j0 + O.KEYS >= hi):
                        L, x = normal(m_block, l_block, block)
                        m_chapter, l_chapter, chapter = joined(m_chapter, l_chapter, chapter, L, x)
                        block, m_block, l_block = nothing(O)
        if O.PAGE:
            tl.atomic_or(status, BAD, mask=tl.max(bad, 0) > 0)
        if O.PIECE:
            if O.PART == O.CHAPTER:
                m, acc = normal(m_chapter, l_chapter, chapter)
            else:
                m, acc = normal(m_block, l_block, block)
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
