"""`flash_attn_with_kvcache` with the arguments, layouts and meanings that users of the package flash-attn know.

What it does there and here: new keys are written into the cache behind `cache_seqlens`, and the queries attend to all.
Here pages may have any size from 1 to 256, head sizes and devices are tilewise's, and `num_splits` has no effect: how
keys are split changes no bit of the result.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from ...algorithm.cached import rotate
from ...dispatch import choose
from ...problem import Aux, _check_lens
from ...problem_cached import CacheShape, Rotary, check_cached_contents, checks_contents, of_cached
from .flash_attn_interface import band


def flash_attn_with_kvcache(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    k: Tensor | None = None,
    v: Tensor | None = None,
    rotary_cos: Tensor | None = None,
    rotary_sin: Tensor | None = None,
    cache_seqlens: int | Tensor | None = None,
    cache_batch_idx: Tensor | None = None,
    cache_leftpad: Tensor | None = None,
    block_table: Tensor | None = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    rotary_interleaved: bool = True,
    alibi_slopes: Tensor | None = None,
    num_splits: int = 0,
    return_softmax_lse: bool = False,
) -> Any:
    """Attention of q over a cache, into which k and v are written first.

    Args:
        q: (B, Sq, Hq, D). k_cache, v_cache: (slots, S_max, Hkv, D), or with a block_table (pages, page_size, Hkv, D).
        k, v: (B, n, Hkv, D), written in place behind cache_seqlens.
        rotary_cos, rotary_sin: (positions, R / 2), if k is given. k turns at cache_seqlens, cache_seqlens + 1, ...;
            q too with causal or a window, otherwise all of it at cache_seqlens. Padding counts.
        cache_seqlens: int32 (B,) or an int, how many keys there are before k; not advanced. None: the cache is full.
        cache_batch_idx: int32 (B,), the slot of each sequence. cache_leftpad: int32 (B,), its first key.
        block_table: int32 (B, max_pages). window_size: (left, right), -1 for no bound.
        The others are `attention`'s under other names.

    Returns:
        (B, Sq, Hq, D), and with return_softmax_lse also (B, Hq, Sq) in fp32.

    Raises:
        ValueError, TypeError: as `tilewise.attention_cached`.

    >>> import torch
    >>> q, k, v = torch.randn(3, 2, 1, 4, 64)                             # one token of two sequences
    >>> k_cache, v_cache = torch.zeros(2, 2, 100, 4, 64)
    >>> lens = torch.zeros(2, dtype=torch.int32)
    >>> o = flash_attn_with_kvcache(q, k_cache, v_cache, k, v, cache_seqlens=lens, causal=True)
    >>> torch.allclose(o, v), torch.equal(k_cache[:, 0], k[:, 0])
    (True, True)
    """
    _check(q, k, rotary_cos, rotary_sin, cache_seqlens, cache_batch_idx, cache_leftpad, block_table)
    q, k_cache, v_cache = q.transpose(1, 2), k_cache.transpose(1, 2), v_cache.transpose(1, 2)
    if block_table is None and cache_batch_idx is None:
        k_cache, v_cache = k_cache[: len(q)], v_cache[: len(q)]
    lens = _lengths(cache_seqlens, q, k_cache, block_table)
    slots = len(k_cache) if block_table is None else len(block_table)
    some = torch.empty(slots, dtype=torch.int32, device=q.device)  # lengths are the call's, not the slots'
    shape = CacheShape.of(k_cache, v_cache, some, block_table, None, None, None, None)
    aux = Aux(
        k_lens=lens, pages=block_table, rows=cache_batch_idx, status=torch.zeros_like(some[:1]), slopes=alibi_slopes
    )
    rotary, after = None, lens
    if rotary_cos is not None and rotary_sin is not None:
        rotary = Rotary(rotary_cos, rotary_sin, "interleaved" if rotary_interleaved else "half")
        aux = replace(aux, rotary_cos=rotary_cos, rotary_sin=rotary_sin)
    if k is not None:
        k, v = k.transpose(1, 2), v if v is None else v.transpose(1, 2)
        after = lens + k.shape[2]
        _write(shape, k, v, k_cache, v_cache, rotary, replace(aux, slopes=None))
    mask = band(causal, window_size)
    local = not mask.is_full
    if rotary is not None and (cache_leftpad is not None or not local or k is None or k.shape[2] != q.shape[2]):
        q, rotary = _turned(q, lens, aux, rotary.style, local), None
    problem = of_cached(
        replace(shape, starts=cache_leftpad is not None), q, mask=mask,
        scale=softmax_scale, softcap=softcap, alibi_slopes=alibi_slopes, rotary=rotary, rows=cache_batch_idx,
    )  # fmt: skip
    aux = replace(aux, k_lens=after, starts=cache_leftpad)
    if checks_contents(q.device):
        check_cached_contents(problem, aux, appending=False)
    o, lse = choose(problem).attend(problem, q, k_cache, v_cache, aux)
    o = o.transpose(1, 2).contiguous()
    return (o, lse) if return_softmax_lse else o


def _check(
    q: Tensor, k: Tensor | None, rotary_cos: Tensor | None, rotary_sin: Tensor | None,
    cache_seqlens: int | Tensor | None, cache_batch_idx: Tensor | None, cache_leftpad: Tensor | None,
    block_table: Tensor | None,
) -> None:  # fmt: skip
    """What this function alone asks of its arguments."""
    _check_lens("cache_leftpad", cache_leftpad, len(q), q)
    if k is not None and cache_seqlens is None:
        raise ValueError("cache_seqlens is None: where k is to be written must be given")
    if (rotary_cos is None) != (rotary_sin is None) or (rotary_cos is not None and k is None):
        raise ValueError("rotary_cos and rotary_sin must be given both, and with k")
    if block_table is not None and cache_batch_idx is not None:
        raise ValueError("cache_batch_idx was given with a block_table: its rows are the call's sequences already")


def _lengths(cache_seqlens: int | Tensor | None, q: Tensor, k_cache: Tensor, block_table: Tensor | None) -> Tensor:
    if isinstance(cache_seqlens, Tensor):
        if cache_seqlens.dtype != torch.int32 or tuple(cache_seqlens.shape) != (q.shape[0],):
            raise ValueError(
                f"cache_seqlens is {cache_seqlens.dtype} {tuple(cache_seqlens.shape)}: it must be an int, or int32 "
                f"({q.shape[0]},)"
            )
        return cache_seqlens.contiguous()
    if cache_seqlens is None:
        cache_seqlens = k_cache.shape[2] * (1 if block_table is None else block_table.shape[1])
    return torch.full((q.shape[0],), cache_seqlens, dtype=torch.int32, device=q.device)


def _write(
    shape: CacheShape, k: Tensor, v: Tensor | None, k_cache: Tensor, v_cache: Tensor, rotary: Rotary | None, aux: Aux
) -> None:
    problem = of_cached(shape, k, None, v, rotary=rotary, rows=aux.rows, appending=True)
    if checks_contents(k.device):
        check_cached_contents(problem, aux, appending=True)
    choose(problem).append(problem, k, v, k_cache, v_cache, aux)


def _turned(q: Tensor, lens: Tensor, aux: Aux, style: str, local: bool) -> Tensor:
    """q (B, Hq, Sq, D) turned at lens, lens + 1, ..., or all of a sequence's at lens."""
    B, _, S, _ = q.shape
    positions = lens[:, None] + torch.arange(S, device=q.device) * local
    turned = rotate(q.transpose(1, 2).flatten(0, 1), positions.flatten(), aux, style)
    return turned.unflatten(0, (B, S)).transpose(1, 2)
