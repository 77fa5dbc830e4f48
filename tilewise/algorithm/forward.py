"""FlashAttention-2's forward: the outer loop walks the queries, the inner loop the keys; one division at the end.

Each query tile is loaded once, its state (m, l, o) stays on chip until its row of key tiles is done, and only O and
L = logsumexp(S) go back. (FlashAttention-1's order, with the loops exchanged, is in `flash1`; it gives the same numbers
and moves more bytes.)

Source: FlashAttention-2 (Dao, 2023), Algorithm 1.
"""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor

from ..problem import accumulator
from . import hbm
from .chip import Chip
from .online_softmax import State
from .scores import Scores
from .tiles import ALIGN, key_tiles, round_up, runs


def flash_attention_2(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    rules: Scores,
    blocks: tuple[int, int],
    sink: Tensor | None = None,
    out: tuple[Tensor, Tensor] | None = None,
    bounded: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """o (b, h, Sq, d_v) in q's dtype and lse (b, h, Sq) in fp32 (fp64 for fp64 inputs).

    q: (b, h, Sq, d); k: (b, h_kv, Sk, d); v: (b, h_kv, Sk, d_v); h a multiple of h_kv.
    rules: scale, masks, bias, dropout. blocks: (B_r, B_c), multiples of 16 (128 for a BlockMask).
    sink: (h, 1, 1), a logit a head, in bits (times log2 e). out: where to write (o, lse), if not into new arrays.
    bounded: boolean (b, h, Sq, 1), rows that need no running maximum (`online_softmax.bounded`); no bit else changes.

    >>> import torch
    >>> q, k, v = torch.randn(3, 1, 2, 100, 64).double()
    >>> o, lse = flash_attention_2(q, k, v, Scores(scale=1 / 8), blocks=(32, 48))
    >>> S = q @ k.mT / 8
    >>> torch.testing.assert_close(o, torch.softmax(S, -1) @ v)
    >>> torch.testing.assert_close(lse, torch.logsumexp(S, -1))
    """
    (b, h, q_len, d), (k_len, d_v) = q.shape, v.shape[-2:]
    B_r, B_c = blocks
    width, v_width = round_up(d, ALIGN), round_up(d_v, ALIGN)
    if out is None:
        acc = accumulator(q.dtype)
        o = hbm.empty((b, h, q_len, d_v), "O", dtype=q.dtype, device=q.device)
        lse = hbm.empty((b, h, q_len), "L", dtype=acc, device=q.device)
    else:
        o, lse = out
    chip = Chip()
    for i in runs(q_len, B_r):
        Q = hbm.load(q, "Q", i.rows, i.size, width=width).mul_(rules.scale_in_bits)
        small = None if bounded is None else bounded[:, :, i.rows]
        if small is not None and i.size > i.count:
            small = F.pad(small, (0, 0, 0, i.size - i.count), value=True)
        state = State.init(b, h, i.size, v_width, Q.dtype, Q.device, small)
        hbm.keep("O", state.o)
        for j in key_tiles(i, rules, k_len, B_c):
            K = hbm.load(k, "K", j.rows, j.size, width=width, heads=h, chip=chip, read_only=True)
            S = rules.scores(Q, K, chip)
            S = rules.bias_and_mask(S, i, j)
            V = hbm.load(v, "V", j.rows, j.size, width=v_width, heads=h, chip=chip, read_only=True)
            state.update(S, V, rules.keep(i, j, S.device))
            hbm.show("m", state.m)
            hbm.show("l", state.l)
            hbm.show("O", state.o)
        O, L = state.finalize(sink)  # noqa: E741
        if rules.dropout_p:
            O.mul_(rules.inverse_keep)
        hbm.store(o, "O", i.rows, O)
        hbm.store(lse, "L", i.rows, L)
    return o, lse
