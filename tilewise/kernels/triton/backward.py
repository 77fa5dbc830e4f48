"""The backward in Triton, by recomputation: P is made again from q, k and lse, tile by tile.

    dq_kernel        a tile of queries stays, keys pass by:  dQ += scale dS K      (dS = P * (dO V^T - delta))
                     and delta_i = rowsum(dO_i * O_i) - dlse_i, kept beside lse_i for those that follow
    dkdv_kernel      a tile of keys stays, queries pass by:  dV += P^T dO    dK += scale dS^T Q
    dbias_kernel     a tile of a broadcast bias stays, all that reads it passes by:  dbias += dS
    per_head_kernel  the sinks' and the slopes' gradients of one sequence and head, summed over its rows

S and dO V^T are made twice, and every sum has one owner: no atomics, so the same bits each time, and no memory but the
statistics.
A key/value head's owner walks all query heads of its group.

Source: FlashAttention-2 (Dao, 2023), Algorithm 2, its one loop in two.
"""

from __future__ import annotations

import triton
import triton.language as tl

from . import steps, walk
from .operands import RUN_TIME


@triton.jit
def score_gradient(
    q, k, v, do, L, D, j0, edge, bits_tile, i, j, first, scale, softcap, seed, threshold, inverse_keep, b, h, origin_i,
    origin_j, terms, O: tl.constexpr,
):  # fmt: skip
    """dS (ROWS, KEYS), the gradient of the masked scores; and tanh, for the softcap's derivative."""
    S, capped = steps.scores(q, steps.turned(k), scale, softcap, O)
    S = steps.bias_and_mask(S, i, j, j0, edge, bits_tile, *terms, O=O)
    P = tl.exp2(S * (scale if O.RAW else 1.0) - L[:, None])
    dP = steps.product(do, steps.turned(v), None, O)
    if O.DROPOUT:
        keep = steps.keep(seed, threshold, b, h, first + origin_i, j0 + origin_j, True, O)
        dP = tl.where(keep, dP * inverse_keep, 0.0)
    return P * (dP - D[:, None]), capped


@triton.jit
def attend_queries(
    dq, dslope, q, do, L, D, K, V, j0, edge, bits_tile, i, first, k_r, v_r, k_used, diagonal, dbias, dbias_r, dbias_c,
    bias_q, bias_k, rest, O: tl.constexpr,
):  # fmt: skip
    """(dq, the slope's gradient by row) with the keys [j0, j0 + KEYS) taken in; a full bias's gradient is stored."""
    j = j0 + tl.arange(0, O.KEYS)[None, :]
    k_tile = steps.load_tile(K, k_r, j0, k_used, O.KEYS, O.WIDTH, O.D, O.PASS, not O.EVEN)
    k = steps.parts(k_tile, O)
    v = steps.parts(steps.load_tile(V, v_r, j0, k_used, O.KEYS, O.V_WIDTH, O.DV, O.PASS, not O.EVEN), O)
    dS, capped = score_gradient(q, k, v, do, L, D, j0, edge, bits_tile, i, j, first, *rest, O=O)
    if O.ALIBI:
        dslope -= tl.sum(dS * tl.abs(i + diagonal - j).to(tl.float32), 1)
    if O.STORE_DBIAS:
        at, inside = steps.at_pairs(dbias, i, j, dbias_r, dbias_c, bias_q, bias_k, True, True, O.DBIAS_WIDE)
        tl.store(at, dS.to(dbias.dtype.element_ty), mask=inside)
    if O.SOFTCAP:
        dS = dS * (1.0 - capped * capped)
    return steps.product(steps.parts(dS.to(k_tile.dtype), O), k, dq, O), dslope


@triton.jit(do_not_specialize=RUN_TIME)
def dq_kernel(
    dq, dslope, dbias, o, lse, dlse, statistics, do, q, k, v, bias, slopes, mask, full_count, full, mixed_count, mixed, mixed_bits,
    bits, seed, cu_q, cu_k, q_lens, k_lens,
    batch, heads, group, q_len, k_len, together, scale, softcap, left, right, threshold, inverse_keep, b0, h0, i0, j0,
    do_b, do_h, do_r, q_b, q_h, q_r, k_b, k_h, k_r, v_b, v_h, v_r, slopes_b, bias_b, bias_h, bias_r, bias_c, bias_q,
    bias_k, mask_b, mask_h, mask_r, mask_c, mask_q, mask_k, blocks_b, blocks_h, blocks_n, blocks_m,
    dbias_b, dbias_h, dbias_r, dbias_c, dlse_b, dlse_h, dlse_r, O: tl.constexpr,
):  # fmt: skip
    ROWS: tl.constexpr = O.ROWS
    KEYS: tl.constexpr = O.KEYS
    WIDTH: tl.constexpr = O.WIDTH
    V_WIDTH: tl.constexpr = O.V_WIDTH
    s, head, first = steps.which_tile(batch, heads, q_len, cu_q, together, ROWS, O.PACKED, True)
    q_start, q_span, q_used = steps.extent(s, batch, q_len, cu_q, q_lens, O.PACKED, O.Q_LENS)
    k_start, _k_span, k_used = steps.extent(s, batch, k_len, cu_k, k_lens, O.PACKED, O.K_LENS)
    if first < q_span:
        kv = head // group
        Q, q_r = steps.source(q, s, head, q_start, q_b, q_h, q_r, q_used, O.STAY)
        DO, do_r = steps.source(do, s, head, q_start, do_b, do_h, do_r, q_used, O.STAY)
        K, k_r = steps.source(k, s, kv, k_start, k_b, k_h, k_r, k_used, O.PASS)
        V, v_r = steps.source(v, s, kv, k_start, v_b, v_h, v_r, k_used, O.PASS)
        diagonal = steps.diagonal(q_used, k_used, i0, j0, O)
        dbias_at = 0
        if O.STORE_DBIAS:
            dbias_at = dbias + (s.to(tl.int64) * dbias_b + head.to(tl.int64) * dbias_h) * (8 if O.DBIAS_WIDE else 1)
        bias_of = (bias, bias_b, bias_h, bias_r, bias_c, bias_q, bias_k)
        mask_of = (mask, mask_b, mask_h, mask_r, mask_c, mask_q, mask_k)
        lists = (full_count, full, mixed_count, mixed, mixed_bits, blocks_b, blocks_h, blocks_n, blocks_m)
        terms = steps.terms_of(
            s, head, batch, diagonal, k_used, left, right, bias_of, slopes, slopes_b, mask_of, bits, i0, j0, O
        )
        draw = tl.load(seed) if O.DROPOUT else 0
        rest = (scale, softcap, draw, threshold, inverse_keep, s + b0, head + h0, i0, j0, terms)
        i = first + tl.arange(0, ROWS)[:, None]
        common = (i, first, k_r, v_r, k_used, diagonal, dbias_at, dbias_r, dbias_c, bias_q, bias_k, rest)
        rows = first + tl.arange(0, ROWS)
        q_tile = steps.load_tile(Q, q_r, first, q_used, ROWS, WIDTH, O.D, O.STAY, not O.EVEN)
        do_tile = steps.load_tile(DO, do_r, first, q_used, ROWS, V_WIDTH, O.DV, O.STAY, not O.EVEN)
        at, o_r = steps.result(s, head, heads, q_len, q_start, O.DV, O.PACKED, O.O_BY_TOKEN)
        o_tile = steps.load_tile(o + at, o_r, first, q_used, ROWS, V_WIDTH, O.DV, 0, not O.EVEN)
        D = tl.sum(o_tile.to(tl.float32) * do_tile.to(tl.float32), 1)
        if dlse is not None:
            dlse += s.to(tl.int64) * dlse_b + head.to(tl.int64) * dlse_h + q_start.to(tl.int64) * dlse_r
            D -= tl.load(dlse + rows.to(tl.int64) * dlse_r, mask=rows < q_used, other=0.0)
        lse += steps.statistic(s, head, heads, q_len, q_start, O.PACKED)
        logs = tl.load(lse + rows, mask=rows < q_used, other=0.0)
        L = tl.where((rows < q_used) & (logs != -steps.INF), logs * steps.LOG2E, steps.INF)  # from +inf comes P = 0
        L_at, D_at = steps.statistics_of(statistics, s, head, batch, heads, q_len, q_start, O.PACKED)
        steps.store_statistics(L_at, L, steps.INF, first, q_span, ROWS)
        steps.store_statistics(D_at, D, 0.0, first, q_span, ROWS)
        q_parts = steps.parts(q_tile, O)
        do_parts = steps.parts(do_tile, O)
        acc = tl.zeros((ROWS, WIDTH), tl.float32)
        by_row = tl.zeros((ROWS,), tl.float32)
        last = tl.minimum(first + ROWS, q_used)
        lo, hi = steps.key_range(first, last, left, right, diagonal, k_used)
        free_lo, free_hi = steps.mask_free_range(first, last, left, right, diagonal, k_used)
        way = walk.way(
            lo, hi, free_lo, free_hi, lists, s + b0, head + h0, s < batch, first + i0, j0, KEYS, O,
        )  # fmt: skip
        entry = walk.entry(way, way[0], KEYS, O)
        for n in tl.range(way[0], walk.end(way)):
            visit = walk.visit(way, n, entry, j0, KEYS, O)
            entry = walk.entry(way, n + 1, KEYS, O)
            acc, by_row = attend_queries(acc, by_row, q_parts, do_parts, L, D, K, V, *visit, *common, O=O)
        at_q, row_q = steps.result(s, head, heads, q_len, q_start, O.D, O.PACKED, O.Q_BY_TOKEN)
        acc = tl.where(i < q_used, acc * (scale * steps.LN2), 0.0)
        steps.store_tile(dq + at_q, row_q, first, q_span, acc, ROWS, WIDTH, O.D)
        if O.ALIBI:
            at = steps.statistic(s, head, heads, q_len, q_start, O.PACKED)
            tl.store(dslope + at + rows, by_row, mask=rows < q_used)


@triton.jit
def attend_keys(
    dk, dv, k, v, Q, DO, i0, edge, bits_tile, j, first, q_r, do_r, q_used, lse, delta, scale, softcap, seed, threshold,
    inverse_keep, b, h, origin_i, origin_j, terms, O: tl.constexpr,
):  # fmt: skip
    """(dk, dv) of the keys from `first` on, with the queries [i0, i0 + ROWS) taken in. Tiles are (KEYS, ROWS)."""
    rows = i0 + tl.arange(0, O.ROWS)
    q_tile = steps.load_tile(Q, q_r, i0, q_used, O.ROWS, O.WIDTH, O.D, O.PASS, not O.EVEN)
    q = steps.parts(q_tile, O)
    S, capped = steps.scores(k, steps.turned(q), scale, softcap, O)
    S = steps.bias_and_mask(S, rows[None, :], j, i0, edge, bits_tile, *terms, O=O)
    L = tl.load(lse + rows)  # +inf behind the last row: P = 0
    P = tl.exp2(S * (scale if O.RAW else 1.0) - L[None, :])
    do_tile = steps.load_tile(DO, do_r, i0, q_used, O.ROWS, O.V_WIDTH, O.DV, O.PASS, not O.EVEN)
    do = steps.parts(do_tile, O)
    dP = steps.product(v, steps.turned(do), None, O)
    kept = P
    if O.DROPOUT:
        keep = steps.keep(seed, threshold, b, h, i0 + origin_i, first + origin_j, False, O)
        kept = tl.where(keep, P * inverse_keep, 0.0)
        dP = tl.where(keep, dP * inverse_keep, 0.0)
    dv = steps.product(steps.parts(kept.to(do_tile.dtype), O), do, dv, O)
    D = tl.load(delta + rows)  # here and not above, where it would hold registers
    dS = P * (dP - D[None, :])
    if O.SOFTCAP:
        dS = dS * (1.0 - capped * capped)
    dk = steps.product(steps.parts(dS.to(q_tile.dtype), O), q, dk, O)
    return dk, dv


@triton.jit(do_not_specialize=RUN_TIME)
def dkdv_kernel(
    dk, dv, statistics, do, q, k, v, bias, slopes, mask, full_count, full, mixed_count, mixed, mixed_bits, bits, seed,
    cu_q, cu_k, q_lens, k_lens,
    batch, heads, group, q_len, k_len, together, scale, softcap, left, right, threshold, inverse_keep, b0, h0, i0, j0,
    do_b, do_h, do_r, q_b, q_h, q_r, k_b, k_h, k_r, v_b, v_h, v_r, slopes_b, bias_b, bias_h, bias_r, bias_c, bias_q,
    bias_k, mask_b, mask_h, mask_r, mask_c, mask_q, mask_k, blocks_b, blocks_h, blocks_n, blocks_m, O: tl.constexpr,
):  # fmt: skip
    ROWS: tl.constexpr = O.ROWS
    KEYS: tl.constexpr = O.KEYS
    WIDTH: tl.constexpr = O.WIDTH
    V_WIDTH: tl.constexpr = O.V_WIDTH
    kv_heads = heads // group
    s, kv, first = steps.which_tile(batch, kv_heads, k_len, cu_k, together, KEYS, O.PACKED, False)
    q_start, _q_span, q_used = steps.extent(s, batch, q_len, cu_q, q_lens, O.PACKED, O.Q_LENS)
    k_start, k_span, k_used = steps.extent(s, batch, k_len, cu_k, k_lens, O.PACKED, O.K_LENS)
    if first < k_span:
        K, k_r = steps.source(k, s, kv, k_start, k_b, k_h, k_r, k_used, O.STAY)
        V, v_r = steps.source(v, s, kv, k_start, v_b, v_h, v_r, k_used, O.STAY)
        k_tile = steps.parts(steps.load_tile(K, k_r, first, k_used, KEYS, WIDTH, O.D, O.STAY, not O.EVEN), O)
        v_tile = steps.parts(steps.load_tile(V, v_r, first, k_used, KEYS, V_WIDTH, O.DV, O.STAY, not O.EVEN), O)
        diagonal = steps.diagonal(q_used, k_used, i0, j0, O)
        j = first + tl.arange(0, KEYS)[:, None]
        acc_k = tl.zeros((KEYS, WIDTH), tl.float32)
        acc_v = tl.zeros((KEYS, V_WIDTH), tl.float32)
        last = tl.minimum(first + KEYS, k_used)
        range_lo, range_hi = steps.query_range(first, last, left, right, diagonal, q_used)
        free_lo, free_hi = steps.mask_free_queries(first, last, left, right, diagonal, q_used)
        bias_of = (bias, bias_b, bias_h, bias_r, bias_c, bias_q, bias_k)
        mask_of = (mask, mask_b, mask_h, mask_r, mask_c, mask_q, mask_k)
        lists = (full_count, full, mixed_count, mixed, mixed_bits, blocks_b, blocks_h, blocks_n, blocks_m)
        for member in tl.range(0, group):
            head = kv * group + member
            Q, q_row = steps.source(q, s, head, q_start, q_b, q_h, q_r, q_used, O.PASS)
            DO, do_row = steps.source(do, s, head, q_start, do_b, do_h, do_r, q_used, O.PASS)
            terms = steps.terms_of(
                s, head, batch, diagonal, k_used, left, right, bias_of, slopes, slopes_b, mask_of, bits, i0, j0, O
            )
            draw = tl.load(seed) if O.DROPOUT else 0
            lse, delta = steps.statistics_of(statistics, s, head, batch, heads, q_len, q_start, O.PACKED)
            common = (
                j, first, q_row, do_row, q_used, lse, delta, scale, softcap, draw, threshold, inverse_keep,
                s + b0, head + h0, i0, j0, terms,
            )  # fmt: skip
            way = walk.way(
                range_lo, range_hi, free_lo, free_hi, lists, s + b0, head + h0, s < batch, first + j0, i0, ROWS, O,
            )  # fmt: skip
            entry = walk.entry(way, way[0], ROWS, O)
            for n in tl.range(way[0], walk.end(way)):
                visit = walk.visit(way, n, entry, i0, ROWS, O)
                entry = walk.entry(way, n + 1, ROWS, O)
                acc_k, acc_v = attend_keys(acc_k, acc_v, k_tile, v_tile, Q, DO, *visit, *common, O=O)
        used = j < k_used
        acc_k = tl.where(used, acc_k * (scale * steps.LN2), 0.0)
        at, row = steps.result(s, kv, kv_heads, k_len, k_start, O.D, O.PACKED, O.K_BY_TOKEN)
        steps.store_tile(dk + at, row, first, k_span, acc_k, KEYS, WIDTH, O.D)
        at, row = steps.result(s, kv, kv_heads, k_len, k_start, O.DV, O.PACKED, O.V_BY_TOKEN)
        steps.store_tile(dv + at, row, first, k_span, tl.where(used, acc_v, 0.0), KEYS, V_WIDTH, O.DV)


@triton.jit(do_not_specialize=RUN_TIME)
def dbias_kernel(
    dbias, statistics, do, q, k, v, bias, slopes, mask, full_count, full, mixed_count, mixed, mixed_bits, bits, seed,
    cu_q, cu_k, q_lens, k_lens,
    batch, heads, group, q_len, k_len, together, scale, softcap, left, right, threshold, inverse_keep, b0, h0, i0, j0,
    do_b, do_h, do_r, q_b, q_h, q_r, k_b, k_h, k_r, v_b, v_h, v_r, slopes_b, bias_b, bias_h, bias_r, bias_c, bias_q,
    bias_k, mask_b, mask_h, mask_r, mask_c, mask_q, mask_k, blocks_b, blocks_h, blocks_n, blocks_m,
    dbias_b, dbias_h, dbias_r, dbias_c, O: tl.constexpr,
):  # fmt: skip
    """One tile of dbias (B|1, Hq|1, Sq|1, Sk|1), whose strides are 0 where its size is 1: what is broadcast is walked."""
    ROWS: tl.constexpr = O.ROWS
    KEYS: tl.constexpr = O.KEYS
    row_tiles = (bias_q + ROWS - 1) // ROWS if O.BIAS_ROWS else 1
    key_tiles = (bias_k + KEYS - 1) // KEYS if O.BIAS_KEYS else 1
    pid = tl.program_id(0)
    own_key, pid = pid % key_tiles, pid // key_tiles
    own_row, pid = pid % row_tiles, pid // row_tiles
    own_heads = tl.where(dbias_h == 0, 1, heads)
    own_head, own_s = pid % own_heads, pid // own_heads  # 0 where they are walked
    acc = tl.zeros((ROWS, KEYS), tl.float32)
    bias_of = (bias, bias_b, bias_h, bias_r, bias_c, bias_q, bias_k)
    mask_of = (mask, mask_b, mask_h, mask_r, mask_c, mask_q, mask_k)
    lists = (full_count, full, mixed_count, mixed, mixed_bits, blocks_b, blocks_h, blocks_n, blocks_m)
    for s_n in tl.range(0, tl.where(dbias_b == 0, batch, 1)):
        s = own_s + s_n
        q_start, _q_span, q_used = steps.extent(s, batch, q_len, cu_q, q_lens, O.PACKED, O.Q_LENS)
        k_start, _k_span, k_used = steps.extent(s, batch, k_len, cu_k, k_lens, O.PACKED, O.K_LENS)
        diagonal = steps.diagonal(q_used, k_used, i0, j0, O)
        for head_n in tl.range(0, tl.where(dbias_h == 0, heads, 1)):
            head = own_head + head_n
            kv = head // group
            q_rows, q_row = steps.rows_of(q, s, head, q_start, q_b, q_h, q_r)
            do_rows, do_row = steps.rows_of(do, s, head, q_start, do_b, do_h, do_r)
            k_rows, k_row = steps.rows_of(k, s, kv, k_start, k_b, k_h, k_r)
            v_rows, v_row = steps.rows_of(v, s, kv, k_start, v_b, v_h, v_r)
            lse, delta = steps.statistics_of(statistics, s, head, batch, heads, q_len, q_start, O.PACKED)
            terms = steps.terms_of(
                s, head, batch, diagonal, k_used, left, right, bias_of, slopes, slopes_b, mask_of, bits, i0, j0, O
            )
            draw = tl.load(seed) if O.DROPOUT else 0
            rest = (scale, softcap, draw, threshold, inverse_keep, s + b0, head + h0, i0, j0, terms)
            r_lo = own_row if O.BIAS_ROWS else 0
            r_hi = own_row + 1 if O.BIAS_ROWS else (q_used + ROWS - 1) // ROWS
            for r in tl.range(r_lo, r_hi):
                first = r * ROWS
                rows = first + tl.arange(0, ROWS)
                i = rows[:, None]
                last = tl.minimum(first + ROWS, q_used)
                lo, hi = steps.key_range(first, last, left, right, diagonal, k_used)
                lo, hi, _a, _z = walk.cut(lo, hi, lo, lo, KEYS)
                L = tl.load(lse + rows)
                D = tl.load(delta + rows)
                q_tile = steps.load_tile(q_rows, q_row, first, q_used, ROWS, O.WIDTH, O.D, 0, True)
                do_tile = steps.load_tile(do_rows, do_row, first, q_used, ROWS, O.V_WIDTH, O.DV, 0, True)
                q_parts = steps.parts(q_tile, O)
                do_parts = steps.parts(do_tile, O)
                if O.BIAS_KEYS:
                    lo = tl.maximum(lo, own_key)
                    hi = tl.minimum(hi, own_key + 1)
                for t in tl.range(lo, hi):
                    j0_tile = t * KEYS
                    j = j0_tile + tl.arange(0, KEYS)[None, :]
                    k_tile = steps.load_tile(k_rows, k_row, j0_tile, k_used, KEYS, O.WIDTH, O.D, 0, True)
                    v_tile = steps.load_tile(v_rows, v_row, j0_tile, k_used, KEYS, O.V_WIDTH, O.DV, 0, True)
                    k_parts = steps.parts(k_tile, O)
                    v_parts = steps.parts(v_tile, O)
                    seen = True
                    bits_tile = -1
                    if O.BLOCKS:
                        n_tile = (j0_tile + j0) // steps.TILE
                        seen, bits_tile = walk.find(lists, s + b0, head + h0, s < batch, first + i0, n_tile)
                    if seen:
                        dS, _capped = score_gradient(
                            q_parts, k_parts, v_parts, do_parts, L, D, j0_tile, True, bits_tile, i, j, first, *rest, O=O
                        )
                        acc += dS
    dbias += own_s.to(tl.int64) * dbias_b + own_head.to(tl.int64) * dbias_h
    rows = own_row * ROWS + tl.arange(0, ROWS)
    keys = own_key * KEYS + tl.arange(0, KEYS)
    if O.BIAS_ROWS and O.BIAS_KEYS:
        at = dbias + rows.to(tl.int64)[:, None] * dbias_r + keys.to(tl.int64)[None, :] * dbias_c
        tl.store(at, acc, mask=(rows < bias_q)[:, None] & (keys < bias_k)[None, :])
    elif O.BIAS_ROWS:
        tl.store(dbias + rows.to(tl.int64) * dbias_r, tl.sum(acc, 1), mask=rows < bias_q)
    elif O.BIAS_KEYS:
        tl.store(dbias + keys.to(tl.int64) * dbias_c, tl.sum(acc, 0), mask=keys < bias_k)
    else:
        tl.store(dbias, tl.sum(tl.sum(acc, 1), 0))


@triton.jit(do_not_specialize=RUN_TIME)
def per_head_kernel(dsink, dslopes, sink, row_slopes, statistics, cu_q, q_lens, batch, heads, q_len, O: tl.constexpr):
    """dsink: a sink is a key without a value, so dS = P_sink (0 - delta); dslopes: rows' parts. Both (B, Hq), fp32."""
    s = tl.program_id(0) // heads
    head = tl.program_id(0) % heads
    start, _span, used = steps.extent(s, batch, q_len, cu_q, q_lens, O.PACKED, O.Q_LENS)
    at = steps.statistic(s, head, heads, q_len, start, O.PACKED)
    lse, delta = steps.statistics_of(statistics, s, head, batch, heads, q_len, start, O.PACKED)
    SIDE: tl.constexpr = 1024
    of_sink = tl.zeros((SIDE,), tl.float32)
    of_slope = tl.zeros((SIDE,), tl.float32)
    for first in tl.range(0, used, SIDE):
        rows = first + tl.arange(0, SIDE)
        if O.SINK:
            logit = tl.load(sink + head).to(tl.float32)
            L = tl.load(lse + rows, mask=rows < used, other=steps.INF)
            D = tl.load(delta + rows, mask=rows < used, other=0.0)
            of_sink -= tl.exp2(logit * steps.LOG2E - L) * D
        if O.ALIBI:
            of_slope += tl.load(row_slopes + at + rows, mask=rows < used, other=0.0)
    if O.SINK:
        tl.store(dsink + s.to(tl.int64) * heads + head, tl.sum(of_sink, 0))
    if O.ALIBI:
        tl.store(dslopes + s.to(tl.int64) * heads + head, tl.sum(of_slope, 0))
