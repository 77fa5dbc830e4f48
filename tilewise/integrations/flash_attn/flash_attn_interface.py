"""The six functions of flash_attn for training and prefill: dense or packed sequences, q, k, v apart or in one tensor.

All of them take the same options:

- dropout_p: applied whenever it is given, so 0.0 outside of training; softmax_scale: 1 / sqrt(D) by default;
- causal: aligned to the bottom right, so that the last query sees the last key; window_size: (left, right), keys beside
  the diagonal, -1 for no bound; softcap: 0.0 is off;
- alibi_slopes: (H,) or (B, H), adds -slope * |i + Sk - Sq - j|; deterministic: bit-reproducible gradients;
- return_attn_probs: also return lse, fp32, (B, H, Sq) or (H, T), and None.

Raises ValueError or TypeError, as `tilewise.attention`, which also has the sources; and ValueError for
return_attn_probs with dropout.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from ... import attention, attention_packed
from ...mask import Band

Window = tuple[int, int]
EVERYWHERE = (-1, -1)


def flash_attn_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: Window = EVERYWHERE,
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
) -> Any:
    """q (B, Sq, H, D), k (B, Sk, Hkv, D), v (B, Sk, Hkv, Dv) -> (B, Sq, H, Dv), contiguous. H is a multiple of Hkv.

    >>> import torch
    >>> import tilewise.integrations.flash_attn as flash_attn
    >>> q, k, v = torch.randn(3, 2, 10, 4, 16)
    >>> flash_attn.flash_attn_func(q, k, v, causal=True).shape
    torch.Size([2, 10, 4, 16])
    """
    q, k, v = q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)
    options = _options(dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes, deterministic)
    o, lse = attention(q, k, v, return_lse=True, **options)
    return _returned(o.transpose(1, 2).contiguous(), lse, return_attn_probs, dropout_p)


def flash_attn_kvpacked_func(
    q: Tensor,
    kv: Tensor,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: Window = EVERYWHERE,
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
) -> Any:
    """`flash_attn_func` with k and v in one tensor: q (B, Sq, H, D), kv (B, Sk, 2, Hkv, D)."""
    k, v = _apart("kv", kv, 2)
    return flash_attn_func(
        q, k, v, dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes, deterministic, return_attn_probs
    )


def flash_attn_qkvpacked_func(
    qkv: Tensor,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: Window = EVERYWHERE,
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
) -> Any:
    """`flash_attn_func` with q, k and v in one tensor: qkv (B, S, 3, H, D)."""
    q, k, v = _apart("qkv", qkv, 3)
    return flash_attn_func(
        q, k, v, dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes, deterministic, return_attn_probs
    )


def flash_attn_varlen_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int | None = None,
    max_seqlen_k: int | None = None,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: Window = EVERYWHERE,
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
    block_table: None = None,
) -> Any:
    """Packed sequences: q (Tq, H, D), k (Tk, Hkv, D), v (Tk, Hkv, Dv) -> (Tq, H, Dv).

    cu_seqlens_q, cu_seqlens_k: int32 (N + 1,), sequence s is rows cu_seqlens[s] : cu_seqlens[s + 1]. The longest
    lengths, max_seqlen_q and max_seqlen_k, are taken and not needed.
    """
    if block_table is not None:
        raise ValueError("block_table is given: flash_attn_varlen_func on tilewise takes no paged keys")
    options = _options(dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes, deterministic)
    o, lse = attention_packed(q, k, v, cu_seqlens_q, cu_seqlens_k, return_lse=True, **options)
    return _returned(o, lse, return_attn_probs, dropout_p)


def flash_attn_varlen_kvpacked_func(
    q: Tensor,
    kv: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int | None = None,
    max_seqlen_k: int | None = None,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: Window = EVERYWHERE,
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
) -> Any:
    """`flash_attn_varlen_func` with k and v in one tensor: q (Tq, H, D), kv (Tk, 2, Hkv, D)."""
    k, v = _apart("kv", kv, 2)
    return flash_attn_varlen_func(
        q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, dropout_p, softmax_scale, causal, window_size,
        softcap, alibi_slopes, deterministic, return_attn_probs,
    )  # fmt: skip


def flash_attn_varlen_qkvpacked_func(
    qkv: Tensor,
    cu_seqlens: Tensor,
    max_seqlen: int | None = None,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: Window = EVERYWHERE,
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
) -> Any:
    """`flash_attn_varlen_func` with q, k and v in one tensor: qkv (T, 3, H, D), one cu_seqlens for all."""
    q, k, v = _apart("qkv", qkv, 3)
    return flash_attn_varlen_func(
        q, k, v, cu_seqlens, cu_seqlens, max_seqlen, max_seqlen, dropout_p, softmax_scale, causal, window_size, softcap,
        alibi_slopes, deterministic, return_attn_probs,
    )  # fmt: skip


def band(causal: bool, window: Window) -> Band:
    """Their window: -1 is no bound; causal is aligned to the bottom right."""
    left, right = (None if bound < 0 else bound for bound in window)
    return Band(left, 0 if causal else right)


def _options(
    dropout_p: float, scale: float | None, causal: bool, window: Window, softcap: float, slopes: Tensor | None,
    deterministic: bool,
) -> dict[str, Any]:  # fmt: skip
    """Theirs as ours. deterministic=False is no wish for the contrary: PyTorch's switch then decides."""
    return {
        "mask": band(causal, window), "scale": scale, "softcap": softcap, "dropout_p": dropout_p,
        "alibi_slopes": slopes, "deterministic": deterministic or None,
    }  # fmt: skip


def _apart(name: str, packed: Tensor, count: int) -> tuple[Tensor, ...]:
    if packed.dim() < 4 or packed.shape[-3] != count:
        raise ValueError(f"{name} is {tuple(packed.shape)}: it must be (..., {count}, H, D)")
    return packed.unbind(-3)


def _returned(o: Tensor, lse: Tensor, with_lse: bool, dropout_p: float) -> Any:
    if with_lse and dropout_p > 0:
        raise ValueError("return_attn_probs is given with dropout: tilewise never forms the matrix that it asks for")
    return (o, lse, None) if with_lse else o
