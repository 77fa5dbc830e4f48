"""How a cached call joins torch.compile: two private ops, which say what they write to.

While tracing, a KVCache is taken apart into its tensors; inside the op it is put together again and the call runs as
in eager code. What is written (keys, values, lengths, status) are arguments that the ops declare to mutate.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .cache import KVCache, attend_cached
from .layout import empty
from .mask import Band
from .problem import split_mask
from .problem_cached import Rotary

WRITTEN = ("k_cache", "v_cache", "lengths", "status")
Tables = list[Tensor | None]  # pages, k_scale, v_scale, starts


@torch.library.custom_op("tilewise::append_cached", mutates_args=WRITTEN)
def append_op(
    k_cache: Tensor, v_cache: Tensor | None, v_dim: int, lengths: Tensor, status: Tensor, tables: list[Tensor | None],
    k: Tensor, v: Tensor | None, rotary: list[Tensor], style: str, rows: Tensor | None, lens: Tensor | None,
    cu_seqlens: Tensor | None, backend: str | None,
) -> None:  # fmt: skip
    cache = _together(k_cache, v_cache, v_dim, lengths, status, tables)
    cache.append(k, v, rotary=_rotary(rotary, style), rows=rows, lens=lens, cu_seqlens=cu_seqlens, backend=backend)


@torch.library.custom_op("tilewise::attend_cached", mutates_args=WRITTEN)
def attend_op(
    k_cache: Tensor, v_cache: Tensor | None, v_dim: int, lengths: Tensor, status: Tensor, tables: list[Tensor | None],
    q: Tensor, k: Tensor | None, v: Tensor | None, left: int | None, right: int | None, scale: float | None,
    softcap: float, sink: Tensor | None, slopes: Tensor | None, rotary: list[Tensor], style: str,
    q_lens: Tensor | None, cu_seqlens_q: Tensor | None, rows: Tensor | None, prefix: list[Tensor],
    prefix_tables: list[Tensor | None], backend: str | None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    cache = _together(k_cache, v_cache, v_dim, lengths, status, tables)
    before = None
    if prefix:
        pages, k_scale, v_scale, starts = prefix_tables
        before = KVCache(prefix[0], prefix[1], prefix[2], pages, k_scale, v_scale, starts, status)
    return attend_cached(
        cache, q, k, v, Band(left, right), scale, softcap, sink, slopes, _rotary(rotary, style), q_lens, cu_seqlens_q,
        rows, before, backend,
    )  # fmt: skip


@attend_op.register_fake
def _(
    k_cache: Tensor, v_cache: Tensor | None, v_dim: int, lengths: Tensor, status: Tensor, tables: Any, q: Tensor,
    *rest: Any,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    lse = (q.shape[1], q.shape[0]) if q.dim() == 3 else q.shape[:3]
    acc = torch.float64 if q.dtype is torch.float64 else torch.float32
    return empty((*q.shape[:-1], v_dim), q), q.new_empty(lse, dtype=acc)


def append_traced(
    cache: KVCache, k: Tensor, v: Tensor | None, rotary: Rotary | None, rows: Tensor | None, lens: Tensor | None,
    cu_seqlens: Tensor | None, backend: str | None,
) -> None:  # fmt: skip
    """`KVCache.append` as an op."""
    append_op(*_apart(cache), k, v, *_flat(rotary), rows, lens, cu_seqlens, backend)


def attend_traced(
    cache: KVCache, q: Tensor, k: Tensor | None, v: Tensor | None, mask: Any, scale: float | None, softcap: float,
    sink: Tensor | None, alibi_slopes: Tensor | None, rotary: Rotary | None, q_lens: Tensor | None,
    cu_seqlens_q: Tensor | None, rows: Tensor | None, prefix: KVCache | None, backend: str | None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """`attend_cached` as an op."""
    band, dense = split_mask(mask)
    if dense is not None or band.align != "bottom_right":
        raise TypeError(f"mask is {mask!r}: over a cache it must be a Band aligned at the bottom right, or None")
    before = [] if prefix is None else [prefix.k, prefix.v, prefix.lengths]
    return attend_op(
        *_apart(cache), q, k, v, band.left, band.right, scale, float(softcap), sink, alibi_slopes, *_flat(rotary),
        q_lens, cu_seqlens_q, rows, before, [] if prefix is None else _tables(prefix), backend,
    )  # fmt: skip


def _apart(cache: KVCache) -> tuple[Any, ...]:
    assert cache.status is not None
    v = None if cache.shape.v_in_k else cache.v  # an op may not write to one memory under two names
    return cache.k, v, cache.shape.v_dim, cache.lengths, cache.status, _tables(cache)


def _tables(cache: KVCache) -> Tables:
    return [cache.pages, cache.k_scale, cache.v_scale, cache.starts]


def _together(
    k: Tensor, v: Tensor | None, v_dim: int, lengths: Tensor, status: Tensor, tables: Tables
) -> KVCache:  # fmt: skip
    pages, k_scale, v_scale, starts = tables
    return KVCache(k, k[..., :v_dim] if v is None else v, lengths, pages, k_scale, v_scale, starts, status)


def _flat(rotary: Rotary | None) -> tuple[list[Tensor], str]:
    if rotary is None:
        return [], ""
    rotary = Rotary(*rotary)
    return [rotary.cos, rotary.sin], rotary.style


def _rotary(tables: list[Tensor], style: str) -> Rotary | None:
    return Rotary(tables[0], tables[1], style) if tables else None
