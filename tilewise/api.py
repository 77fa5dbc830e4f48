"""The public functions. No maths here: each validates and freezes its call, and hands it on."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch._subclasses import FakeTensor

from . import cache_op
from .autograd import attend, attend_traced
from .cache import KVCache, attend_cached
from .mask import causal
from .problem import MaskLike, Problem
from .problem_cached import Rotary


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    mask: MaskLike = None,
    bias: Tensor | None = None,
    alibi_slopes: Tensor | None = None,
    sink: Tensor | None = None,
    scale: float | None = None,
    softcap: float = 0.0,
    dropout_p: float = 0.0,
    seed: int | Tensor | None = None,
    q_lens: Tensor | None = None,
    k_lens: Tensor | None = None,
    return_lse: bool = False,
    deterministic: bool | None = None,
    backend: str | None = None,
) -> Any:
    """Exact attention, softmax(scale q k^T + ...) v, in memory linear in the sequence length.

    Scores are made in this order: s = scale * q.k; softcap * tanh(s / softcap); + bias;
    - slope * |i + (k_len - q_len) - j| (aligned as the Band: without k_len - q_len beside a top_left one); masks;
    softmax (with sink); dropout.

    Args:
        q: (B, Hq, Sq, D). fp16, bf16, fp32 or fp64, any strides. Users of (B, S, H, D) pass `x.transpose(1, 2)`.
        k: (B, Hkv, Sk, D), q's dtype and device. Hq is a multiple of Hkv: query head h reads head h // (Hq / Hkv).
        v: (B, Hkv, Sk, Dv). Dv may differ from D.
        mask: `tilewise.causal`, `tilewise.sliding_window(left, right)` or any Band; a BlockMask; a boolean tensor
            broadcastable to (B, Hq, Sq, Sk), True where visible; or a Band & one of the latter two.
        bias: floating point, broadcastable to (B, Hq, Sq, Sk), added to the scores. Differentiable; the gradient takes
            an array of bias's own shape, so give it size 1 where it is broadcast (an expanded view counts as full).
        alibi_slopes: (Hq,) or (B, Hq), positive for the usual penalty. Differentiable.
        sink: (Hq,), a logit a head that joins the softmax's denominator without a value. Differentiable.
        scale: any real number; 1 / sqrt(D) by default.
        softcap: 0 is off; scores then stay within (-softcap, softcap).
        dropout_p: the probability, in [0, 1], to drop a pair; kept ones are multiplied by 1 / (1 - p).
        seed: of the dropout, an int or an int64 tensor on q's device. By default drawn with `torch.randint`, so that
            `torch.manual_seed` reproduces it. A seed gives the same pairs on every backend.
        q_lens, k_lens: int32 (B,), how many rows of each sequence are in use; Bands and ALiBi align to them. Later keys
            are never read into a result; later rows give o = 0, lse = -inf.
        return_lse: also return lse.
        deterministic: bit-reproducible gradients, where that costs time; by default as
            `torch.use_deterministic_algorithms` says. The forward always is.
        backend: a name (`tilewise.explain` lists them) to insist on; by default the first that can.

    Returns:
        o (B, Hq, Sq, Dv) in q's dtype; with return_lse (o, lse), lse (B, Hq, Sq) in fp32 (fp64 for fp64 inputs), the
        natural logarithm of the softmax's denominator, bias and sink included, differentiable. A row that sees no key
        gives o = 0, lse = -inf and gradients of 0.

    Raises:
        ValueError, TypeError: one sentence that names the argument, what it was and what is allowed.
        NotImplementedError: forward-mode or second derivatives, vmap.

    Source: FlashAttention (Dao et al., 2022), FlashAttention-2 (Dao, 2023).

    >>> import torch, tilewise
    >>> q, k, v = torch.randn(3, 1, 4, 100, 64)
    >>> o = tilewise.attention(q, k, v, mask=tilewise.causal)
    >>> torch.testing.assert_close(o, torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True))
    """
    o, lse = _attention(
        q, k, v, mask, bias, alibi_slopes, sink, scale, softcap, dropout_p, seed, q_lens, k_lens, None, None,
        deterministic, backend,
    )  # fmt: skip
    return (o, lse) if return_lse else o


def attention_packed(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor | None = None,
    *,
    mask: MaskLike = None,
    bias: Tensor | None = None,
    alibi_slopes: Tensor | None = None,
    sink: Tensor | None = None,
    scale: float | None = None,
    softcap: float = 0.0,
    dropout_p: float = 0.0,
    seed: int | Tensor | None = None,
    q_lens: Tensor | None = None,
    k_lens: Tensor | None = None,
    return_lse: bool = False,
    deterministic: bool | None = None,
    backend: str | None = None,
) -> Any:
    """`attention` over N sequences of any lengths, packed one after the other without padding ("varlen").

    Args:
        q: (Tq, Hq, D); k: (Tk, Hkv, D); v: (Tk, Hkv, Dv). Sequence s is rows cu_seqlens[s] : cu_seqlens[s + 1].
        cu_seqlens_q: int32 (N + 1,), from 0, never decreasing, at most Tq; on q's device.
        cu_seqlens_k: the same for k and v; by default cu_seqlens_q.
        bias, mask: i and j are positions in their sequence: (1 or N, 1 or Hq, max_q, max_k), a BlockMask likewise.
        alibi_slopes: (Hq,) or (N, Hq). q_lens, k_lens: int32 (N,), if less than the whole of each sequence is in use.
        The others are those of `attention`.

    Returns:
        o (Tq, Hq, Dv); with return_lse (o, lse), lse (Hq, Tq). Rows that belong to no sequence give o = 0, lse = -inf.

    Raises:
        ValueError, TypeError, NotImplementedError: as `attention`. Contents of cu_seqlens are checked on the CPU and
        under `tilewise.checked()`.

    >>> import torch, tilewise
    >>> x = torch.randn(7, 2, 16)
    >>> cu = torch.tensor([0, 3, 7], dtype=torch.int32)                      # sequences of 3 and 4 tokens
    >>> o = tilewise.attention_packed(x, x, x, cu, mask=tilewise.causal)
    >>> alone = x[3:].transpose(0, 1)[None]                                  # the second one, dense
    >>> torch.equal(o[3:], tilewise.attention(alone, alone, alone, mask=tilewise.causal)[0].transpose(0, 1))
    True
    """
    if cu_seqlens_q is None:
        raise TypeError("cu_seqlens_q is None: attention_packed needs it; for (B, H, S, D) tensors use attention")
    o, lse = _attention(
        q, k, v, mask, bias, alibi_slopes, sink, scale, softcap, dropout_p, seed, q_lens, k_lens, cu_seqlens_q,
        cu_seqlens_k, deterministic, backend,
    )  # fmt: skip
    return (o, lse) if return_lse else o


def attention_cached(
    q: Tensor,
    cache: KVCache,
    *,
    k: Tensor | None = None,
    v: Tensor | None = None,
    mask: MaskLike = causal,
    scale: float | None = None,
    softcap: float = 0.0,
    sink: Tensor | None = None,
    alibi_slopes: Tensor | None = None,
    rotary: Rotary | None = None,
    q_lens: Tensor | None = None,
    cu_seqlens_q: Tensor | None = None,
    rows: Tensor | None = None,
    prefix: KVCache | None = None,
    return_lse: bool = False,
    backend: str | None = None,
) -> Any:
    """Attention of new queries, the last tokens of their sequences, over all keys that a cache has of these.

    For inference: no gradients, no dropout. Decoding (a few queries), prefilling (many) and both in one packed call.

    Args:
        q: (B, Hq, Sq, D), or packed (T, Hq, D) with cu_seqlens_q, int32 (B + 1,).
        cache: a KVCache, with one stored sequence for each of q's unless rows says which.
        k, v: the new tokens' keys and values, as many as q has: stored first, and the cache's lengths advanced.
            (B, Hkv, Sq, D) and (B, Hkv, Sq, Dv), packed (T, Hkv, D) and (T, Hkv, Dv), in q's dtype. Without them
            q belongs to the tokens that are stored already. v is None if the cache's v is a view of its k.
        mask: `causal` (the default), a sliding window or any other Band that is aligned at the bottom right; None:
            every query sees every key.
        scale, softcap, sink, alibi_slopes: as in `attention`.
        rotary: turns q, and k before it is stored, at their positions in the sequence.
        q_lens: int32 (B,), how many of a sequence's rows in q (and k, v) are in use.
        rows: int32 (B,), where in the cache each sequence is stored; -1: it is absent, its rows give o = 0, lse = -inf.
        prefix: a KVCache of one sequence with which every sequence begins. It is read once for all of them
            ("cascade"), and positions are counted from its start.
        return_lse, backend: as in `attention`.

    Returns:
        o, in q's dtype, and with return_lse also lse, as `attention` and `attention_packed` do. A row has the same
        bits whatever else is in the batch.

    Raises:
        ValueError, TypeError: one sentence that names the argument, what it was and what is allowed. Contents (lengths,
        pages, rows) are checked on the CPU and under `tilewise.checked()`, before anything is stored; elsewhere what
        does not fit is left out and noted in `cache.status`.

    >>> import torch, tilewise
    >>> cache = tilewise.KVCache.contiguous(2, 4, 100, 64)
    >>> q, k, v = torch.randn(3, 2, 4, 10, 64)
    >>> prompt = tilewise.attention_cached(q[:, :, :9], cache, k=k[:, :, :9], v=v[:, :, :9])
    >>> token = tilewise.attention_cached(q[:, :, 9:], cache, k=k[:, :, 9:], v=v[:, :, 9:])
    >>> whole = tilewise.attention(q, k, v, mask=tilewise.causal)
    >>> torch.testing.assert_close(torch.cat([prompt, token], 2), whole)
    """
    if not isinstance(cache, KVCache) or not (prefix is None or isinstance(prefix, KVCache)):
        name, wrong = ("prefix", prefix) if isinstance(cache, KVCache) else ("cache", cache)
        raise TypeError(f"{name} is a {type(wrong).__name__}: it must be a tilewise.KVCache")
    run = cache_op.attend_traced if torch.compiler.is_compiling() else attend_cached
    o, lse = run(
        cache, q, k, v, mask, scale, softcap, sink, alibi_slopes, rotary, q_lens, cu_seqlens_q, rows, prefix, backend
    )
    return (o, lse) if return_lse else o


def _attention(
    q: Tensor, k: Tensor, v: Tensor, mask: MaskLike, bias: Tensor | None, alibi_slopes: Tensor | None,
    sink: Tensor | None, scale: float | None, softcap: float, dropout_p: float, seed: int | Tensor | None,
    q_lens: Tensor | None, k_lens: Tensor | None, cu_seqlens_q: Tensor | None, cu_seqlens_k: Tensor | None,
    deterministic: bool | None, backend: str | None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Each option has its name here, for a call that hands them on in a dict takes 5 microseconds longer."""
    # Whether any autocast is on is asked first: which device's takes 2 microseconds to find out.
    if torch._C._is_any_autocast_enabled() and _autocasts(q):
        q, k, v = _autocast(q), _autocast(k), _autocast(v)
    if torch.compiler.is_compiling() or _has_no_data(q):
        return attend_traced(
            q, k, v, mask=mask, bias=bias, alibi_slopes=alibi_slopes, sink=sink, scale=scale, softcap=softcap,
            dropout_p=dropout_p, seed=seed, q_lens=q_lens, k_lens=k_lens, cu_seqlens_q=cu_seqlens_q,
            cu_seqlens_k=cu_seqlens_k, deterministic=deterministic, backend=backend,
        )  # fmt: skip
    problem, aux = Problem.of_call(
        q, k, v, mask, bias, alibi_slopes, sink, scale, softcap, dropout_p, seed, q_lens, k_lens, cu_seqlens_q,
        cu_seqlens_k, deterministic,
    )  # fmt: skip
    return attend(problem, q, k, v, aux, backend)


def _autocasts(q: Any) -> bool:
    return isinstance(q, Tensor) and not q.is_meta and torch.is_autocast_enabled(q.device.type)


def _autocast(x: Tensor) -> Tensor:
    """What autocast does to a matmul's operands: fp64 and other devices' tensors stay as they are."""
    if not isinstance(x, Tensor) or not x.is_floating_point() or x.dtype is torch.float64:
        return x
    return x.to(torch.get_autocast_dtype(x.device.type))


def _has_no_data(q: Any) -> bool:
    """Meta and fake tensors: they take the op, whose fake knows the shapes."""
    if type(q) is Tensor:  # to ask for FakeTensor, which it is not, takes as long as the rest
        return q.is_meta
    return isinstance(q, Tensor) and (q.is_meta or isinstance(q, FakeTensor))
