"""What is asked of a key/value cache, frozen: the storage's shape, and a call that reads it or appends to it.

The counterpart of `Problem.of` for calls whose keys are stored from earlier calls. `CacheShape.of` checks the storage
once, when a cache is made; `of_cached` a call. Positions of a sequence are counted from its start, not from the
padding before it.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .problem import (
    DTYPES,
    Aux,
    HashedOnce,
    Layout,
    MaskLike,
    Problem,
    _check_contents,
    _check_cu,
    _check_device,
    _check_lens,
    _check_vector,
    _checked,
    _finite,
    _is_tensor,
    _shape,
    device_name,
    split_mask,
)  # fmt: skip

FP8 = torch.float8_e4m3fn
FP8_MAX = 448.0
PAST_END, BAD_PAGE = 1, 2  # the bits of a cache's status
STYLES = ("half", "interleaved")
LARGEST_PAGE = 256


class Rotary(NamedTuple):
    """Rotary position embedding of the first R columns of q and of new keys (Su et al., 2021).

    cos, sin: (positions, R / 2), floating point. style "half" turns the pairs (x[i], x[i + R/2]), as Llama does;
    "interleaved" the pairs (x[2i], x[2i + 1]), as GPT-J does. Both as a function of their own would: computed in fp32
    (fp64 for fp64), rounded to q's dtype.

    >>> import torch, tilewise
    >>> angle = torch.outer(torch.arange(64.0), 10_000 ** -(torch.arange(8.0) / 8))
    >>> rotary = tilewise.Rotary(angle.cos(), angle.sin())                # the first 16 columns, 64 positions
    """

    cos: Tensor
    sin: Tensor
    style: str = "half"


@dataclass(frozen=True, slots=True)
class CacheShape(HashedOnce):
    """Everything about a cache, and how a call uses it, but its contents."""

    dtype: torch.dtype  # of the storage: the call's, or fp8
    slots: int  # sequences that it has a place for
    capacity: int  # keys that one of them can have
    kv_heads: int
    qk_dim: int
    v_dim: int
    device: torch.device
    page_size: int = 0  # 0: contiguous
    pages: int = 0  # of memory
    v_in_k: bool = False  # V is the first v_dim columns of K (MLA): appended with it
    scales: bool = False
    starts: bool = False
    # of a call
    rows: bool = False
    rotary: str | None = None  # one of STYLES
    rotary_dim: int = 0
    shared: bool = False  # all sequences read the first one stored
    after: bool = False
    partial: bool = False  # o is wanted in the accumulator's dtype: it is to be merged

    __hash__ = HashedOnce.__hash__

    @property
    def k_shape(self) -> tuple[int, ...]:
        if self.page_size:
            return (self.pages, self.kv_heads, self.page_size, self.qk_dim)
        return (self.slots, self.kv_heads, self.capacity, self.qk_dim)

    def __str__(self) -> str:
        kind = f"in pages of {self.page_size}" if self.page_size else "cached"
        options = [str(self.dtype).removeprefix("torch.")] if self.dtype is FP8 else []
        options += [name for name in ("v_in_k", "starts", "rows", "shared", "after") if getattr(self, name)]
        options += [f"rotary {self.rotary} {self.rotary_dim}"] if self.rotary else []
        return " ".join([kind, *([f"({', '.join(options)})"] if options else [])])

    @classmethod
    def of(
        cls, k: Tensor, v: Tensor, lengths: Tensor, pages: Tensor | None, k_scale: Tensor | None,
        v_scale: Tensor | None, starts: Tensor | None, status: Tensor | None,
    ) -> CacheShape:  # fmt: skip
        """Validate a cache's tensors. One ValueError or TypeError that names the one at fault."""
        form = "(slots, Hkv, S, D)" if pages is None else "(pages, Hkv, page_size, D)"
        for name, t in (("k", k), ("v", v)):
            _is_tensor(name, t)
            if t.dim() != 4 or t.shape[-1] == 0:
                raise ValueError(f"{name} is {_shape(t)}: a cache's must have 4 dimensions {form}, D at least 1")
            if t.dtype not in (*DTYPES, FP8):
                raise TypeError(f"{name} is {t.dtype}: it must be one of {', '.join(map(str, (*DTYPES, FP8)))}")
        if v.dtype != k.dtype:
            raise TypeError(f"v is {v.dtype}, k is {k.dtype}: both must have one dtype")
        _check_device("v", v, k)
        if v.shape[:3] != k.shape[:3]:
            raise ValueError(f"v is {_shape(v)}, k is {_shape(k)}: only their head sizes (last dimension) may differ")
        (n, kv_heads, length, qk_dim), v_dim = k.shape, v.shape[-1]
        slots, capacity = n, length
        if pages is not None:
            _is_tensor("pages", pages)
            if pages.dtype != torch.int32:
                raise TypeError(f"pages is {pages.dtype}: it must be torch.int32")
            _check_device("pages", pages, k)
            if pages.dim() != 2:
                raise ValueError(f"pages is {_shape(pages)}: it must be (slots, max_pages), a row for each sequence")
            if not 1 <= length <= LARGEST_PAGE:
                raise ValueError(f"k is {_shape(k)}: pages must have 1 to {LARGEST_PAGE} keys (dimension 2)")
            slots, capacity = pages.shape[0], pages.shape[1] * length
        if capacity >= 2**30:
            raise ValueError(f"a sequence of the cache could have {capacity} keys: it must be fewer than 2^30")
        _check_lens("lengths", lengths, slots, k)
        _check_lens("starts", starts, slots, k)
        _check_lens("status", status, 1, k)
        for name, table in (("lengths", lengths), ("pages", pages), ("starts", starts)):
            if table is not None and not table.is_contiguous():
                raise ValueError(f"{name} has strides {table.stride()}: it must be contiguous")
        if k.requires_grad or v.requires_grad:
            raise ValueError("k or v requires grad: a cache has no gradient, detach them")
        for name, scale in (("k_scale", k_scale), ("v_scale", v_scale)):
            _check_vector(name, scale, [(kv_heads,)], k)
            if scale is not None and (k.dtype is not FP8 or scale.dtype is not torch.float32):
                raise TypeError(
                    f"{name} is {scale.dtype}, k is {k.dtype}: scales are torch.float32 and belong to {FP8}"
                )
        if (k_scale is None) != (v_scale is None):
            raise ValueError("k_scale and v_scale must be given both or neither")
        inside = v.numel() > 0 and v.data_ptr() == k.data_ptr() and v.stride() == k.stride() and v_dim <= qk_dim
        return cls(
            dtype=k.dtype, slots=slots, capacity=capacity, kv_heads=kv_heads, qk_dim=qk_dim, v_dim=v_dim,
            device=k.device, page_size=0 if pages is None else length, pages=0 if pages is None else n,
            v_in_k=inside, scales=k_scale is not None, starts=starts is not None,
        )  # fmt: skip


MOST_VALIDATED = 512
_validated: dict[tuple[Any, ...], Problem] = {}


def of_cached(
    shape: CacheShape,
    q: Tensor,
    k: Tensor | None = None,
    v: Tensor | None = None,
    *,
    mask: MaskLike = None,
    scale: float | None = None,
    softcap: float = 0.0,
    sink: Tensor | None = None,
    alibi_slopes: Tensor | None = None,
    rotary: Rotary | tuple[Tensor, Tensor] | None = None,
    q_lens: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    rows: Tensor | None = None,
    prefix: CacheShape | None = None,
    appending: bool = False,
) -> Problem:
    """Validate a call on a cache and freeze it. With `appending` q stands for the new keys, and no query is asked.

    A call like an earlier one is looked up by all that validation looks at.
    """
    options = (k, v, sink, alibi_slopes, q_lens, cu_seqlens, rows)
    if torch.is_grad_enabled() and any(isinstance(t, Tensor) and t.requires_grad for t in (q, *options)):
        raise ValueError("attention over a cache has no gradient: call it under torch.no_grad(), or detach its inputs")
    key: Any = (
        shape, *map(_facts, (q, *options)), _facts(rotary), mask, scale, softcap, type(scale), type(softcap), prefix,
        appending,
    )  # fmt: skip
    try:
        problem = _validated.get(key)
    except TypeError:  # not hashable: an option that validation will refuse
        key = problem = None
    if problem is None:
        problem = _validate(
            shape,
            q,
            k,
            v,
            mask,
            scale,
            softcap,
            sink,
            alibi_slopes,
            rotary,
            q_lens,
            cu_seqlens,
            rows,
            prefix,
            appending,
        )
        if len(_validated) >= MOST_VALIDATED:
            _validated.clear()
        _validated[key] = problem
    return problem


def _facts(t: Any) -> Any:
    if isinstance(t, Tensor):
        return t.shape, t.dtype, t.device
    return tuple(map(_facts, t)) if isinstance(t, tuple) else t


def _validate(
    shape: CacheShape, q: Tensor, k: Tensor | None, v: Tensor | None, mask: MaskLike, scale: float | None,
    softcap: float, sink: Tensor | None, alibi_slopes: Tensor | None, rotary: Any, q_lens: Tensor | None,
    cu_seqlens: Tensor | None, rows: Tensor | None, prefix: CacheShape | None, appending: bool,
) -> Problem:  # fmt: skip
    packed = cu_seqlens is not None
    name = "k" if appending else "q"
    _check_tokens(name, q, shape, packed)
    heads, q_len = q.shape[1], q.shape[0 if packed else 2]
    batch = _check_cu("cu_seqlens" if appending else "cu_seqlens_q", cu_seqlens, q) if packed else q.shape[0]
    if appending or k is not None or v is not None:
        _check_new(q if appending else k, v, q, shape, packed, appending)
    if not appending and (heads % shape.kv_heads if shape.kv_heads else heads):
        raise ValueError(f"q is {_shape(q)}, the cache has {shape.kv_heads} heads: q's must be a multiple of them")
    _check_lens("lens" if appending else "q_lens", q_lens, batch, q)
    _check_lens("rows", rows, batch, q)
    if rows is None and not shape.shared and batch != shape.slots:
        raise ValueError(
            f"{name} has {batch} sequences, the cache {shape.slots}: pass rows=, where in the cache each one is stored"
        )
    band, dense = split_mask(mask)
    if dense is not None:
        raise TypeError(
            f"mask is {type(dense).__name__}: over a cache it must be a Band (tilewise.causal, ...) or None"
        )
    if band.align != "bottom_right":
        raise ValueError(
            f"mask is {band}: a cache's queries are a sequence's last tokens, align must be 'bottom_right'"
        )
    _check_vector("alibi_slopes", alibi_slopes, [(heads,), (batch, heads)], q)
    _check_vector("sink", sink, [(heads,)], q)
    softcap = _finite("softcap", softcap)
    if softcap < 0:
        raise ValueError(f"softcap is {softcap}: it must be 0 (off) or positive")
    style, rotary_dim = _check_rotary(rotary, shape, q)
    if prefix is not None:
        _check_prefix(prefix, shape)
    return Problem(
        batch=batch, q_len=q_len, k_len=shape.capacity, heads=heads, kv_heads=shape.kv_heads, qk_dim=shape.qk_dim,
        v_dim=shape.v_dim, dtype=q.dtype, device=device_name(q.device),
        q_layout=Layout.PACKED if packed else Layout.DENSE,
        k_layout=Layout.PAGED if shape.page_size else Layout.DENSE, q_lens=q_lens is not None, k_lens=True, band=band,
        alibi=alibi_slopes is not None, sink=sink is not None,
        scale=1.0 / math.sqrt(shape.qk_dim) if scale is None else _finite("scale", scale), softcap=softcap,
        cache=replace(shape, rows=rows is not None, rotary=style, rotary_dim=rotary_dim),
    )  # fmt: skip


def _check_tokens(name: str, t: Any, shape: CacheShape, packed: bool) -> None:
    """q, or new keys: packed (T, H, D) or dense (B, H, n, D), of the cache's head size, dtype and device."""
    _is_tensor(name, t)
    dims, form = (3, "(T, H, D)") if packed else (4, "(B, H, S, D)")
    if t.dim() != dims:
        raise ValueError(f"{name} is {_shape(t)}: it must have {dims} dimensions {form}")
    if t.dtype not in DTYPES or shape.dtype not in (t.dtype, FP8):
        raise TypeError(f"{name} is {t.dtype}, the cache is {shape.dtype}: they must be equal, or the cache {FP8}")
    if t.device != shape.device:
        raise ValueError(f"{name} is on {t.device}, the cache on {shape.device}: they must be on one device")
    if t.shape[-1] != shape.qk_dim:
        raise ValueError(f"{name} is {_shape(t)}, the cache's keys have head size {shape.qk_dim}: they must be equal")


def _check_new(k: Any, v: Any, q: Tensor, shape: CacheShape, packed: bool, appending: bool) -> None:
    """New keys and values: as many tokens as q has, the cache's heads and head sizes."""
    _check_tokens("k", k, shape, packed)
    if v is None and not shape.v_in_k:
        raise TypeError("v is None: only a cache whose v is a view of its k takes k alone")
    if v is not None and shape.v_in_k:
        raise ValueError(f"v is {_shape(v)}: this cache's v is a view of its k, so that v must be None")
    seq = 0 if packed else 2
    for name, t, dim in (("k", k, shape.qk_dim), ("v", v, shape.v_dim)):
        if t is None:
            continue
        _is_tensor(name, t)
        want = [shape.kv_heads if i == 1 else dim if i == q.dim() - 1 else q.shape[i] for i in range(q.dim())]
        if list(t.shape) != want:
            as_many = "k" if appending else "q"
            raise ValueError(
                f"{name} is {_shape(t)}: it must be ({', '.join(map(str, want))}), the cache's heads and head size and "
                f"as many tokens as {as_many} has ({q.shape[seq]})"
            )
        if t.dtype != q.dtype:
            raise TypeError(f"{name} is {t.dtype}: it must be {q.dtype}, as the other new tokens are")
        _check_device(name, t, q)


def _check_rotary(rotary: Any, shape: CacheShape, q: Tensor) -> tuple[str | None, int]:
    if rotary is None:
        return None, 0
    if not isinstance(rotary, tuple) or not 2 <= len(rotary) <= 3:
        raise TypeError(f"rotary is {type(rotary).__name__}: it must be a tilewise.Rotary(cos, sin, style) or None")
    rotary = Rotary(*rotary)
    if rotary.style not in STYLES:
        raise ValueError(f"rotary.style is {rotary.style!r}: it must be 'half' or 'interleaved'")
    for name, t in (("rotary.cos", rotary.cos), ("rotary.sin", rotary.sin)):
        _is_tensor(name, t)
        if not t.dtype.is_floating_point:
            raise TypeError(f"{name} is {t.dtype}: it must be a floating-point tensor")
        if t.dim() != 2 or t.shape != rotary.cos.shape or 0 in t.shape or 2 * t.shape[1] > shape.qk_dim:
            raise ValueError(
                f"{name} is {_shape(t)}: cos and sin must be (positions, R / 2) alike, R at most {shape.qk_dim}"
            )
        _check_device(name, t, q)
    if rotary.sin.dtype != rotary.cos.dtype:
        raise TypeError(f"rotary.sin is {rotary.sin.dtype}, rotary.cos is {rotary.cos.dtype}: both must have one dtype")
    if shape.v_in_k:
        raise ValueError("rotary turns the first columns of k, which are also this cache's v: rotate q and k before")
    return rotary.style, 2 * rotary.cos.shape[1]


def _check_prefix(prefix: CacheShape, shape: CacheShape) -> None:
    if prefix.slots != 1:
        raise ValueError(f"prefix holds {prefix.slots} sequences: it must hold the one that all others share")
    for name, cache in (("prefix", prefix), ("cache", shape)):
        if cache.starts:
            raise ValueError(f"{name} has starts: padding cannot lie before a shared prefix, nor behind it")
    if prefix.device != shape.device:
        raise ValueError(f"prefix is on {prefix.device}, the cache on {shape.device}: they must be on one device")
    for name in ("kv_heads", "qk_dim", "v_dim"):
        if getattr(prefix, name) != getattr(shape, name):
            raise ValueError(
                f"prefix has {name} {getattr(prefix, name)}, the cache {getattr(shape, name)}: they must be equal"
            )
    if FP8 not in (prefix.dtype, shape.dtype) and prefix.dtype != shape.dtype:
        raise TypeError(f"prefix is {prefix.dtype}, the cache is {shape.dtype}: they must be equal, or one {FP8}")


def checks_contents(device: torch.device) -> bool:
    """Whether contents are looked at: on the CPU, and under `tilewise.checked()`, where that synchronises."""
    return device.type == "cpu" or _checked.active


def check_cached_contents(problem: Problem, aux: Aux, appending: bool) -> None:
    """Lengths, rows, starts, pages and rotary positions, of a call that appends as many keys as it has q, or none.

    aux.k_lens are the lengths before. Raises before anything is written.
    """
    cache = problem.cache
    assert cache is not None
    assert aux.k_lens is not None
    _check_contents(problem, replace(aux, k_lens=None))
    rows = list(range(problem.batch)) if aux.rows is None else aux.rows.tolist()
    if cache.shared:
        rows = [0] * problem.batch
    taken: set[int] = set()
    for s, row in enumerate(rows):
        if row >= cache.slots:
            raise ValueError(f"rows[{s}] is {row}: the cache has {cache.slots} rows (-1: the sequence is absent)")
        if appending and row in taken:
            raise ValueError(f"rows[{s}] is {row}, as that of another sequence: both would be appended there")
        if row >= 0:
            taken.add(row)
    new = new_tokens(problem, aux)
    starts = [0] * problem.batch if aux.starts is None else aux.starts.tolist()
    for s, (row, length, n, start) in enumerate(zip(rows, aux.k_lens.tolist(), new, starts, strict=True)):
        if row < 0:
            continue
        if not 0 <= length <= cache.capacity:
            raise ValueError(f"lengths[{row}] is {length}: lengths must lie in [0, {cache.capacity}]")
        if appending and length + n > cache.capacity:
            raise ValueError(
                f"sequence {s} has {length} keys and gets {n} more: the cache holds {cache.capacity} of a sequence"
            )
        end = length + n if appending else length
        if start > end:
            raise ValueError(f"starts[{row}] is {start}: the sequence has {end} keys, so that none is valid")
        if aux.pages is not None:
            _check_pages(aux.pages[row].tolist(), row, end, cache)
        if cache.rotary is not None and aux.rotary_cos is not None and n:
            last = end - start - 1
            if last >= len(aux.rotary_cos):
                raise ValueError(
                    f"rotary.cos has {len(aux.rotary_cos)} positions: sequence {s} reaches position {last}"
                )


def _check_pages(table: list[int], row: int, length: int, cache: CacheShape) -> None:
    for i in range(-(-length // cache.page_size)):
        if not 0 <= table[i] < cache.pages:
            raise ValueError(
                f"pages[{row}, {i}] is {table[i]}: {length} keys need it, and the cache has {cache.pages} pages"
            )


def new_tokens(problem: Problem, aux: Aux) -> list[int]:
    """How many rows of q each sequence has, as Python integers."""
    spans = [problem.q_len] * problem.batch
    if aux.cu_q is not None:
        ends = [min(max(n, 0), problem.q_len) for n in aux.cu_q.tolist()]
        spans = [max(b - a, 0) for a, b in pairwise(ends)]
    if aux.q_lens is None:
        return spans
    return [min(max(n, 0), span) for n, span in zip(aux.q_lens.tolist(), spans, strict=True)]
