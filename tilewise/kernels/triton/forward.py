"""FlashAttention-2's forward in Triton: one program a tile of queries, one pass over its keys, one division at the end.

Tiles of keys are walked in `walk`'s order, which depends on lengths, Band and mask alone: so do a row's bits.

Source: FlashAttention-2 (Dao, 2023), Algorithm 1; FlashAttention (Dao et al., 2022), Algorithm 5 for block masks.
"""

from __future__ import annotations

import triton
import triton.language as tl

from . import steps, walk
from .operands import RUN_TIME


@triton.jit
def attend(
    o, m, l, q, K, V, j0, edge, bits_tile, i, first, k_r, v_r, k_used, scale, softcap, seed, threshold, b, h, origin_i,
    origin_j, terms, O: tl.constexpr,
):  # fmt: skip
    """(o, m, l) with the keys [j0, j0 + KEYS) taken in."""
    j = j0 + tl.arange(0, O.KEYS)[None, :]
    k = steps.load_tile(K, k_r, j0, k_used, O.KEYS, O.WIDTH, O.D, O.PASS, not O.EVEN)
    S, _ = steps.scores(q, steps.turned(steps.parts(k, O)), scale, softcap, O)
    S = steps.bias_and_mask(S, i, j, j0, edge, bits_tile, *terms, O=O)
    factor = scale if O.RAW else 1.0
    m, l, P, alpha = steps.rescale(m, l, S, factor, O.EDGES or O.BLOCKS or O.BIAS or O.BOOL, O.HEADROOM)
    if O.DROPOUT:
        P = tl.where(steps.keep(seed, threshold, b, h, first + origin_i, j0 + origin_j, True, O), P, 0.0)
    v = steps.load_tile(V, v_r, j0, k_used, O.KEYS, O.V_WIDTH, O.DV, O.PASS, not O.EVEN)
    o = steps.product(steps.parts(P.to(v.dtype), O), steps.parts(v, O), o * alpha[:, None], O)
    return o, m, l


@triton.jit(do_not_specialize=RUN_TIME)
def forward_kernel(
    o, lse, sink, q, k, v, bias, slopes, mask, full_count, full, mixed_count, mixed, mixed_bits, bits, seed,
    cu_q, cu_k, q_lens, k_lens,
    batch, heads, group, q_len, k_len, together, scale, softcap, left, right, threshold, inverse_keep, b0, h0, i0, j0,
    q_b, q_h, q_r, k_b, k_h, k_r, v_b, v_h, v_r, slopes_b, bias_b, bias_h, bias_r, bias_c, bias_q, bias_k,
    mask_b, mask_h, mask_r, mask_c, mask_q, mask_k, blocks_b, blocks_h, blocks_n, blocks_m, O: tl.constexpr,
):  # fmt: skip
    ROWS: tl.constexpr = O.ROWS
    KEYS: tl.constexpr = O.KEYS
    V_WIDTH: tl.constexpr = O.V_WIDTH
    s, head, first = steps.which_tile(batch, heads, q_len, cu_q, together, ROWS, O.PACKED, True)
    q_start, q_span, q_used = steps.extent(s, batch, q_len, cu_q, q_lens, O.PACKED, O.Q_LENS)
    k_start, _k_span, k_used = steps.extent(s, batch, k_len, cu_k, k_lens, O.PACKED, O.K_LENS)
    if first < q_span:
        kv = head // group
        Q, q_r = steps.source(q, s, head, q_start, q_b, q_h, q_r, q_used, O.STAY)
        K, k_r = steps.source(k, s, kv, k_start, k_b, k_h, k_r, k_used, O.PASS)
        V, v_r = steps.source(v, s, kv, k_start, v_b, v_h, v_r, k_used, O.PASS)
        diagonal = steps.diagonal(q_used, k_used, i0, j0, O)
        bias_of = (bias, bias_b, bias_h, bias_r, bias_c, bias_q, bias_k)
        mask_of = (mask, mask_b, mask_h, mask_r, mask_c, mask_q, mask_k)
        terms = steps.terms_of(
            s, head, batch, diagonal, k_used, left, right, bias_of, slopes, slopes_b, mask_of, bits, i0, j0, O
        )
        draw = tl.load(seed) if O.DROPOUT else 0
        i = first + tl.arange(0, ROWS)[:, None]
        common = (i, first, k_r, v_r, k_used, scale, softcap, draw, threshold, s + b0, head + h0, i0, j0, terms)

        tile = steps.parts(steps.load_tile(Q, q_r, first, q_used, ROWS, O.WIDTH, O.D, O.STAY, not O.EVEN), O)
        acc = tl.zeros((ROWS, V_WIDTH), tl.float32)
        m = tl.full((ROWS,), -steps.INF, tl.float32)
        l = tl.zeros((ROWS,), tl.float32)
        last = tl.minimum(first + ROWS, q_used)
        lo, hi = steps.key_range(first, last, left, right, diagonal, k_used)
        free_lo, free_hi = steps.mask_free_range(first, last, left, right, diagonal, k_used)
        lists = (full_count, full, mixed_count, mixed, mixed_bits, blocks_b, blocks_h, blocks_n, blocks_m)
        way = walk.way(
            lo, hi, free_lo, free_hi, lists, s + b0, head + h0, s < batch, first + i0, j0, KEYS, O,
        )  # fmt: skip
        entry = walk.entry(way, way[0], KEYS, O)
        for n in tl.range(way[0], walk.end(way)):
            visit = walk.visit(way, n, entry, j0, KEYS, O)
            entry = walk.entry(way, n + 1, KEYS, O)
            acc, m, l = attend(acc, m, l, tile, K, V, *visit, *common, O=O)

        logit = 0.0
        if O.SINK:
            logit = tl.load(sink + head).to(tl.float32)
        acc, L = steps.finalize(m - O.HEADROOM, l, acc, logit, O.SINK)
        if O.DROPOUT:
            acc = acc * inverse_keep
        at, row = steps.result(s, head, heads, q_len, q_start, O.DV, O.PACKED, O.O_BY_TOKEN)
        used = i < q_used
        steps.store_tile(o + at, row, first, q_span, tl.where(used, acc, 0.0), ROWS, V_WIDTH, O.DV)
        rows = first + tl.arange(0, ROWS)
        at = steps.statistic(s, head, heads, q_len, q_start, O.PACKED)
        tl.store(lse + at + rows, tl.where(rows < q_used, L, -steps.INF), mask=rows < q_span)
