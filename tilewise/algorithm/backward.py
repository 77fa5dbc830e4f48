"""The backward by recomputation: from (q, k, v), o and lse alone, P is made again, tile by tile.

    delta_i = rowsum(dO_i * O_i)                     one number a row stands for the softmax's Jacobian
    S, P = exp(S - L)                                recomputed, already normalised
    dV = P^T dO      dP = dO V^T      dS = P * (dP - delta)      dQ = scale dS K      dK = scale dS^T Q

S and L are in bits here (exp2 for exp, see `online_softmax`): K was multiplied by scale log2(e) when it was loaded.
dS is the gradient of the score itself.

The outer loop walks the keys: dK_j and dV_j stay on chip, dQ is added to in memory. A gradient that arrives at lse
joins through delta, since dlse/dS = P: dS = P * (dP - (delta - dlse)).

Source: FlashAttention, section 3.1 and Algorithm 4; FlashAttention-2, Algorithm 2.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from ..problem import accumulator
from . import hbm
from .chip import Chip, add_matmul_
from .online_softmax import LN2, LOG2E
from .scores import Scores
from .tiles import ALIGN, query_tiles, round_up, runs


def flash_attention_2_backward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    o: Tensor,
    lse: Tensor,
    do: Tensor,
    rules: Scores,
    blocks: tuple[int, int],
    dlse: Tensor | None = None,
    out: tuple[Tensor, Tensor, Tensor] | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """dq (b, h, Sq, d), dk (b, h, Sk, d), dv (b, h, Sk, d_v), for each QUERY head, and delta (b, h, Sq).

    All in the accumulator's dtype (fp32, fp64 for fp64). Shapes of the inputs as in `flash_attention_2`;
    do: (b, h, Sq, d_v); dlse: (b, h, Sq). Gradients of bias and slopes are added to rules.dbias and rules.dslopes.
    blocks: (B_r, B_c) as in the forward, but any: the backward need not cut where the forward did.
    out: (dq of zeros, dk, dv) to write into, if not new arrays.
    """
    (b, h, q_len, d), (k_len, d_v) = q.shape, v.shape[-2:]
    B_r, B_c = blocks
    width, v_width = round_up(d, ALIGN), round_up(d_v, ALIGN)
    acc = accumulator(q.dtype)
    if out is None:
        dq = hbm.zeros((b, h, q_len, d), "dQ", dtype=acc, device=q.device)
        dk = hbm.empty((b, h, k_len, d), "dK", dtype=acc, device=q.device)
        dv = hbm.empty((b, h, k_len, d_v), "dV", dtype=acc, device=q.device)
    else:
        dq, dk, dv = out
    delta = rowsum_do_o(do, o, dlse, B_r)
    chip = Chip()
    for j in runs(k_len, B_c):
        K = hbm.load(k, "K", j.rows, j.size, width=width, heads=h).mul_(rules.scale_in_bits)
        V = hbm.load(v, "V", j.rows, j.size, width=v_width, heads=h)
        dK, dV = hbm.keep("dK", torch.zeros_like(K)), hbm.keep("dV", torch.zeros_like(V))
        for i in query_tiles(j, rules, q_len, B_r):
            Q = hbm.load(q, "Q", i.rows, i.size, width=width, chip=chip, read_only=True)
            dO = hbm.load(do, "dO", i.rows, i.size, width=v_width, chip=chip, read_only=True)
            L = hbm.load(lse, "L", i.rows, i.size).mul_(LOG2E)
            L.masked_fill_(L == -math.inf, math.inf)  # a row that is empty,
            L[..., i.count :] = math.inf  # and one that is padding: P = 0
            D = hbm.load(delta, "delta", i.rows, i.size)
            S = rules.scores(Q, K, chip)
            slope = rules.cap_slope(S)
            S = rules.bias_and_mask(S, i, j)
            P = S.sub_(L[..., None]).exp2_()
            dP = chip.matmul("dP", dO, V.mT)
            keep = rules.keep(i, j, S.device)
            if keep is not None:
                keep = keep.to(dP.dtype).mul_(rules.inverse_keep)
                dP.mul_(keep)
            add_matmul_(dV, (P if keep is None else P * keep).mT, dO)
            dS = dP.sub_(D[..., None]).mul_(P)
            rules.add_gradients(dS, i, j)
            if slope is not None:
                dS.mul_(slope)
            add_matmul_(dK, dS.mT, Q)
            hbm.accumulate(dq, "dQ", i.rows, chip.matmul("dQ", dS, K).mul_(LN2))
        hbm.store(dk, "dK", j.rows, dK.mul_(rules.scale))
        hbm.store(dv, "dV", j.rows, dV)
    return dq, dk, dv, delta


@hbm.kernel("delta")
def rowsum_do_o(do: Tensor, o: Tensor, dlse: Tensor | None, B_r: int) -> Tensor:
    """delta = rowsum(dO * O) - dlse, (b, h, Sq): a pass of its own over rows."""
    delta = hbm.empty(o.shape[:3], "delta", dtype=accumulator(o.dtype), device=o.device)
    for i in runs(o.shape[2], B_r):
        O, dO = hbm.load(o, "O", i.rows), hbm.load(do, "dO", i.rows)  # noqa: E741
        D = (dO * O).sum(-1)
        if dlse is not None:
            D -= hbm.load(dlse, "dL", i.rows)
        hbm.store(delta, "delta", i.rows, D)
    return delta


def sink_gradient(sink: Tensor, lse: Tensor, delta: Tensor) -> Tensor:
    """dsink (h,): the sink is a key without a value, so its dP is 0 and dS = P_sink * (0 - delta). sink: (h, 1)."""
    P_sink = torch.exp(sink - torch.where(lse == -math.inf, math.inf, lse))
    return -(P_sink * delta).sum((0, 2))
