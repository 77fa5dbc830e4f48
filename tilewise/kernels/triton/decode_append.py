"""New tokens into a key/value cache: their keys and values, turned and quantised, to their places."""

from __future__ import annotations

import triton
import triton.language as tl

from ...problem_cached import BAD_PAGE, FP8_MAX, PAST_END
from . import decode, steps

PAST = tl.constexpr(PAST_END)
BAD = tl.constexpr(BAD_PAGE)
LARGEST = tl.constexpr(FP8_MAX)


@triton.jit(do_not_specialize=[*decode.RUN_TIME, "new_b", "new_h", "new_r", "w_b", "w_h", "w_r"])
def append_kernel(
    new_k, new_v, k, v, k_lens, pages, rows, starts, k_scale, v_scale, cos, sin, cu_q, q_lens, status,
    batch, kv_heads, q_len, capacity, slots, pool, table_width, positions, new_b, new_h, new_r, w_b, w_h, w_r,
    k_b, k_h, k_r, v_b, v_h, v_r, O: tl.constexpr,
):  # fmt: skip
    """One head of one new token. new_k (B, Hkv, q_len, D) or packed (T, Hkv, D); new_v None where V lies in K. fp8 storage: as
    bytes."""
    pid = tl.program_id(0)
    kv = pid % kv_heads
    if O.PACKED:
        s, t = steps.sequence_of(pid // kv_heads, batch, q_len, cu_q, 1)
    else:
        s = pid // kv_heads // q_len
        t = pid // kv_heads % q_len
    known = s < batch
    q_start, _q_span, q_used = steps.extent(s, batch, q_len, cu_q, q_lens, O.PACKED, O.Q_LENS)
    slot, there = decode.slot_of(s, rows, slots, known & (t < q_used), status, O)
    position = tl.load(k_lens + s, mask=there, other=0) + t
    if there & ((position < 0) | (position >= capacity)):
        tl.atomic_or(status, PAST)
        there = False
    start = 0
    if O.STARTS:
        start = tl.load(starts + s, mask=there, other=0)
    row = position
    if O.PAGE:
        slot = tl.load(pages + slot.to(tl.int64) * table_width + position // O.PAGE, mask=there, other=0)
        if (slot < 0) | (slot >= pool):
            tl.atomic_or(status, BAD)
            there = False
        row = position % O.PAGE
    if there:
        at = new_k + s.to(tl.int64) * new_b * 8 + kv.to(tl.int64) * new_h * 8 + (q_start + t).to(tl.int64) * new_r * 8
        columns = tl.arange(0, O.COLUMNS)
        one = tl.full((1,), True, tl.int1)
        x = tl.load(at + columns[None, :], mask=(columns < O.D)[None, :], other=0.0)
        if O.R:
            where = at + tl.zeros((1,), tl.int32)
            x = decode.turned(
                x, where, columns, one, position - start + tl.zeros((1,), tl.int32), cos, sin, positions, O
            )
        to = k + slot.to(tl.int64) * k_b * O.UNIT + kv.to(tl.int64) * k_h * O.UNIT + row.to(tl.int64) * k_r * O.UNIT
        tl.store(to + columns[None, :], stored_as(x, k, k_scale, kv, O), mask=(columns < O.D)[None, :])
        if new_v is not None:
            at = new_v + s.to(tl.int64) * w_b * 8 + kv.to(tl.int64) * w_h * 8 + (q_start + t).to(tl.int64) * w_r * 8
            x = tl.load(at + columns[None, :], mask=(columns < O.DV)[None, :], other=0.0)
            to = v + slot.to(tl.int64) * v_b * O.UNIT + kv.to(tl.int64) * v_h * O.UNIT + row.to(tl.int64) * v_r * O.UNIT
            tl.store(to + columns[None, :], stored_as(x, v, v_scale, kv, O), mask=(columns < O.DV)[None, :])


@triton.jit
def stored_as(x, storage, scale, kv, O: tl.constexpr):
    """x in the storage's dtype; fp8 as bytes, of x / scale within its range."""
    if O.FP8:
        x = x.to(tl.float32)
        if O.SCALES:
            x = x / tl.load(scale + kv)
        return e4m3(
            tl.minimum(
                tl.maximum(x, -LARGEST, propagate_nan=tl.PropagateNan.ALL), LARGEST, propagate_nan=tl.PropagateNan.ALL
            )
        )
    else:
        return x.to(storage.dtype.element_ty)


@triton.jit
def e4m3(x):
    """The byte of fp32 within +-448, rounded to even, as torch rounds.

    By integers: GPUs before sm89 have no instruction for it, and Triton's interpreter (3.6 to 3.9) rounds 124 to 64.
    Below 2^-6 numbers lie 2^-9 apart, as fp32 does from 2^14 on: a sum rounds them.
    """
    bits = x.to(tl.int32, bitcast=True)
    size = bits & 0x7FFFFFFF
    normal = ((size + 0x7FFFF + (size >> 20 & 1)) >> 20) - (120 << 3)
    small = (tl.abs(x) + 16384.0).to(tl.int32, bitcast=True) - 0x46800000
    code = tl.where(size < 0x3C800000, small, normal)
    code = tl.where(x != x, 0x7F, code)
    return (code | (bits >> 24 & 0x80)).to(tl.uint8)
