"""Standard attention: it writes S and P out whole, which is quadratic in the length, and right in an obvious way.

This is the definition that every backend is held to: run in fp64 it is the one oracle of the tests. All steps are
plain differentiable torch, so autograd supplies the oracle's gradients as well.

Source: "Attention Is All You Need" (Vaswani et al., 2017), equation 1; Algorithm 0 of "FlashAttention" (Dao et al.,
2022); ALiBi (Press et al., 2021); the softcap is Gemma 2's; the sink is a key of logit `sink` and value 0.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from ..block_mask import BlockMask
from ..problem import Aux, Layout, Problem, sequence_lengths
from .dropout import keep

INFINITY = float("inf")


def reference(
    problem: Problem, q: Tensor, k: Tensor, v: Tensor, aux: Aux, dtype: torch.dtype | None = torch.float64
) -> tuple[Tensor, Tensor]:
    """Attention of one `Problem`, sequence by sequence; returns (o, lse) of shapes `o_shape` and `lse_shape`.

    q, k, v and aux are as every backend gets them: dense (B, H, S, D) or packed (T, H, D), Hq a multiple of Hkv.
    dtype: what all is computed and returned in. With None each tensor keeps its own dtype, as plain PyTorch code would
        have it ("plain" in the error rule), and lse comes in `problem.lse_dtype`.
    lse[i] = log(sum_j exp(s[i, j])), natural, over the visible keys and the sink; a row with no visible key has o = 0,
    lse = -inf (with a sink, too) and gradients of exactly 0. So has a row past its sequence's length.

    >>> q, k, v = torch.zeros(1, 1, 2, 4), torch.zeros(1, 1, 3, 4), torch.tensor([[[[0.0], [1.0], [5.0]]]])
    >>> problem, aux = Problem.of(q, k, v)
    >>> o, lse = reference(problem, q, k, v, aux)
    >>> o.flatten(), lse.exp().flatten()              # all scores equal: the mean of v, and three keys
    (tensor([2.0000, 2.0000], dtype=torch.float64), tensor([3.0000, 3.0000], dtype=torch.float64))
    """
    optional = {name: getattr(aux, name) for name in ("bias", "slopes", "sink") if getattr(aux, name) is not None}
    if dtype is None:
        optional = {name: t.to(torch.promote_types(t.dtype, q.dtype)) for name, t in optional.items()}
    else:
        q, k, v = (t.to(dtype) for t in (q, k, v))
        optional = {name: t.to(dtype) for name, t in optional.items()}
    aux = replace(aux, **optional)
    packed = problem.q_layout is Layout.PACKED
    if packed:  # (T, H, D) -> (H, T, D)
        q, k, v = (t.transpose(0, 1) for t in (q, k, v))
    o = q.new_zeros((*q.shape[:-1], v.shape[-1]))
    lse = q.new_full(q.shape[:-1], -INFINITY, dtype=dtype or problem.lse_dtype)
    for b, (q_len, k_len) in enumerate(zip(*sequence_lengths(problem, aux), strict=True)):
        q_b = _sequence(q, aux.cu_q, b, q_len)
        k_b, v_b = (_sequence(t, aux.cu_k, b, k_len).repeat_interleave(problem.group, dim=0) for t in (k, v))
        i, j = torch.arange(q_len, device=q.device)[:, None], torch.arange(k_len, device=q.device)

        s = scores(problem, q_b, k_b, aux, b, i, j)
        p, lse_b = softmax_with_sink(s, aux.sink)
        if problem.dropout_p > 0:
            p = drop(problem, p, aux, b, i, j)
        _sequence(o, aux.cu_q, b, q_len).copy_(p.to(v.dtype) @ v_b)
        _sequence(lse, aux.cu_q, b, q_len).copy_(lse_b)
    return (o.transpose(0, 1) if packed else o), lse


def scores(problem: Problem, q: Tensor, k: Tensor, aux: Aux, b: int, i: Tensor, j: Tensor) -> Tensor:
    """S (Hq, q, k) of sequence b: scale, softcap, bias, ALiBi, then -inf at every pair that a mask hides.

    q: (Hq, q, D), k: (Hq, k, D); i: (q, 1) and j: (k,) are positions in the sequence.
    """
    s = problem.scale * (q @ k.mT)
    if problem.softcap > 0:
        s = problem.softcap * torch.tanh(s / problem.softcap)
    if aux.bias is not None:
        s = s + _pairs(aux.bias, b, i, j)

    _, _, i0, j0 = aux.origin
    offset = problem.band.offset(len(i), len(j))
    if aux.slopes is not None:
        slopes = aux.slopes if aux.slopes.dim() == 1 else aux.slopes[b]
        s = s - slopes[:, None, None] * ((i0 + i + offset) - (j0 + j)).abs()

    visible = problem.band.visible(i0 + i, j0 + j, offset)
    if isinstance(aux.mask, BlockMask):
        visible = visible & _block_mask(aux.mask, aux, b, problem.heads, i, j)
    elif aux.mask is not None:
        visible = visible & _pairs(aux.mask, b, i, j)
    return s.masked_fill(~visible, -INFINITY)


def softmax_with_sink(s: Tensor, sink: Tensor | None) -> tuple[Tensor, Tensor]:
    """(P, lse) of the scores s (Hq, q, k); the sink (Hq,) is one more key, whose column of P is dropped again.

    Without a sink that column is -inf: it weighs nothing, and no row is without an entry. Rows of nothing but -inf are
    computed on zeros and then overwritten, so that neither they nor their gradients meet inf - inf.
    """
    if sink is None:
        extra = s.new_full((*s.shape[:-1], 1), -INFINITY)
    else:
        extra = sink[:, None, None].expand(*s.shape[:-1], 1)
    empty = (s == -INFINITY).all(dim=-1, keepdim=True)
    s = torch.cat([s, extra], dim=-1).masked_fill(empty, 0.0)
    p = torch.softmax(s, dim=-1)[..., :-1].masked_fill(empty, 0.0)
    return p, torch.logsumexp(s, dim=-1).masked_fill(empty[..., 0], -INFINITY)


def drop(problem: Problem, p: Tensor, aux: Aux, b: int, i: Tensor, j: Tensor) -> Tensor:
    """P (Hq, q, k) of sequence b, dropped pairs 0 and kept ones over 1 - dropout_p; all 0 where dropout_p is 1."""
    assert aux.seed is not None
    b0, h0, i0, j0 = aux.origin
    h = torch.arange(problem.heads, device=p.device)[:, None, None]
    kept = keep(aux.seed, problem.dropout_p, torch.tensor(b0 + b, device=p.device), h0 + h, i0 + i, j0 + j)
    return p * kept / (1 - problem.dropout_p) if problem.dropout_p < 1 else p * 0


def _sequence(t: Tensor, cu: Tensor | None, b: int, length: int) -> Tensor:
    """The first `length` positions of sequence b, a view (H, length, ...) of (B, H, S, ...) or, packed, (H, T, ...)."""
    return t[b, :, :length] if cu is None else t[:, int(cu[b]) : int(cu[b]) + length]


def _pairs(t: Tensor, b: int, i: Tensor, j: Tensor) -> Tensor:
    """Sequence b of a bias or mask (1 or B, 1 or Hq, 1 or Sq, 1 or Sk), cut to the sequence's pairs."""
    return t[b if len(t) > 1 else 0, :, : len(i), : len(j)]


def _block_mask(mask: BlockMask, aux: Aux, b: int, heads: int, i: Tensor, j: Tensor) -> Tensor:
    """(1 or Hq, q, k): the part of a BlockMask that this call sees from its origin in the mask's problem."""
    b0, h0, i0, j0 = aux.origin
    dense = mask.to_dense()[b0 + b if mask.batch > 1 else 0]
    dense = dense[h0 : h0 + heads] if mask.heads > 1 else dense
    return dense[:, i0 : i0 + len(i), j0 : j0 + len(j)]
