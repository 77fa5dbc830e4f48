"""Key/value caches: what a transformer has computed of its past, kept for the queries to come.

    KVCache   where keys and values lie: one tensor a sequence, or pages anywhere; and how many of each are valid
    PagePool  which pages are free, on the host: it fills the page table of a paged cache

Lengths live on the device and are advanced there: nothing on the way of a call waits for them, so that one CUDA graph
replays while the cache grows. What would be written outside the cache is not written, and noted in `status`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from .dispatch import choose
from .layout import laid
from .mask import causal
from .problem import Aux, Layout, MaskLike, Problem
from .problem_cached import (
    BAD_PAGE,
    PAST_END,
    CacheShape,
    Rotary,
    check_cached_contents,
    checks_contents,
    of_cached,
)  # fmt: skip

FAULTS = {
    PAST_END: "keys past the end of a sequence's room were not stored",
    BAD_PAGE: "pages or rows out of range were not written, nor read",
}


Places = tuple[Tensor, Tensor]
VECTORS = 64  # whole vectors of any CPU, unrolled


@dataclass(frozen=True, slots=True, eq=False)
class KVCache:
    """Keys and values of some sequences, on the device, and how many of them are valid.

    Made by `contiguous` or `paged`, or around tensors that are there already:

    k: (slots, Hkv, S_max, D), any strides; paged (pages, Hkv, page_size, D), page_size 1 to 256. q's dtype, or fp8
        as torch.float8_e4m3fn. (slots, S_max, Hkv, D) comes as `x.transpose(1, 2)`, a layer of (layers, ...) as a view.
    v: the same with Dv. A view of k's first columns, `k[..., :Dv]`, is stored with k (multi-head latent attention).
    lengths: int32 (slots,), contiguous: how many keys each sequence has. `append` advances it, on the device.
    pages: int32 (slots, max_pages), contiguous: key j of sequence s is in page pages[s, j // page_size]. What no key
        needs yet may hold anything.
    k_scale, v_scale: fp32 (Hkv,), of fp8: a value is what is stored times its head's scale.
    starts: int32 (slots,), how many keys of padding lie before each sequence's first. No query sees them, and positions
        of rotary embeddings are counted from there.
    status: int32 (1,). Bit 1: keys did not fit; bit 2: a page or row was out of range. Caches may share one.

    Each layer of a model needs lengths of its own, since each of them appends; pages and status can be shared.

    ValueError, TypeError: one sentence that names the argument, what it was and what is allowed.

    >>> import torch, tilewise
    >>> cache = tilewise.KVCache.contiguous(2, 4, 100, 64)                # 2 sequences, 4 heads, at most 100 keys
    >>> k, v = torch.randn(2, 2, 4, 7, 64)                                # 7 tokens of each
    >>> cache.append(k, v)
    >>> cache.lengths.tolist()
    [7, 7]
    """

    k: Tensor
    v: Tensor
    lengths: Tensor
    pages: Tensor | None = None
    k_scale: Tensor | None = None
    v_scale: Tensor | None = None
    starts: Tensor | None = None
    status: Tensor | None = None
    shape: CacheShape = field(init=False, repr=False)

    def __post_init__(self) -> None:
        shape = CacheShape.of(
            self.k, self.v, self.lengths, self.pages, self.k_scale, self.v_scale, self.starts, self.status
        )
        object.__setattr__(self, "shape", shape)
        if self.status is None:
            object.__setattr__(self, "status", torch.zeros(1, dtype=torch.int32, device=self.k.device))

    @classmethod
    def contiguous(
        cls, slots: int, kv_heads: int, max_len: int, qk_dim: int, v_dim: int | None = None, *,
        dtype: torch.dtype | None = None, device: torch.device | str | None = None, v_in_k: bool = False,
        **options: Any,
    ) -> KVCache:  # fmt: skip
        """An empty cache of `slots` sequences, each of at most max_len keys, in one tensor each for k and v.

        v_in_k: v is a view of k's first v_dim columns. options: k_scale, v_scale, starts, status.
        """
        k, v = _storage((slots, kv_heads, max_len), qk_dim, v_dim, dtype, device, v_in_k)
        return cls(k, v, torch.zeros(slots, dtype=torch.int32, device=device), **options)

    @classmethod
    def paged(
        cls, pool: PagePool, kv_heads: int, qk_dim: int, v_dim: int | None = None, *,
        dtype: torch.dtype | None = None, v_in_k: bool = False, **options: Any,
    ) -> KVCache:  # fmt: skip
        """An empty cache in the pages of `pool`, which the caches of all layers may share.

        >>> import torch, tilewise
        >>> pool = tilewise.PagePool(pages=8, page_size=16, sequences=2, max_len=64)
        >>> cache = tilewise.KVCache.paged(pool, kv_heads=4, qk_dim=64)
        >>> pool.reserve(0, 20), pool.reserve(1, 20)                          # tokens, two pages each
        (2, 2)
        >>> k, v = torch.randn(2, 2, 4, 20, 64)
        >>> cache.append(k, v)
        """
        k, v = _storage((pool.pages, kv_heads, pool.page_size), qk_dim, v_dim, dtype, pool.table.device, v_in_k)
        lengths = torch.zeros(len(pool.table), dtype=torch.int32, device=pool.table.device)
        return cls(k, v, lengths, pool.table, **options)

    def append(
        self, k: Tensor, v: Tensor | None = None, *, rotary: Rotary | None = None, rows: Tensor | None = None,
        lens: Tensor | None = None, cu_seqlens: Tensor | None = None, backend: str | None = None,
    ) -> None:  # fmt: skip
        """Store keys and values behind those that are there, and advance the lengths.

        k: (B, Hkv, n, D), or packed (T, Hkv, D) with cu_seqlens int32 (B + 1,). v: the same with Dv.
        rotary: turns k at its position in the sequence. rows: int32 (B,), where each sequence is stored, -1 for one
        that is absent; by default all in order. lens: int32 (B,), how many of a sequence's n tokens are to be stored.

        ValueError, TypeError: as `attention_cached`; nothing is stored then.
        """
        if torch.compiler.is_compiling():
            from .cache_op import append_traced

            return append_traced(self, k, v, rotary, rows, lens, cu_seqlens, backend)
        problem = of_cached(
            self.shape, k, None, v, rotary=rotary, q_lens=lens, cu_seqlens=cu_seqlens, rows=rows, appending=True
        )
        places = None if rows is None else _places(rows, self.shape.slots)
        aux = self._aux(places, rotary, lens, cu_seqlens, rows)
        if checks_contents(self.k.device):
            check_cached_contents(problem, aux, appending=True)
        self._append(choose(problem, backend), problem, k, v, aux, places)

    def stored(self, slot: int) -> tuple[Tensor, Tensor]:
        """What is stored of one sequence, dense: (Hkv, length, D) and (Hkv, length, Dv), fp8 as fp32. Synchronises."""
        n = int(self.lengths[slot])
        found = []
        for x, scale in ((self.k, self.k_scale), (self.v, self.v_scale)):
            if self.pages is None:
                x = x[slot, :, :n]
            else:
                table = self.pages[slot, : -(-n // x.shape[2])].tolist()
                x = (
                    torch.cat([x[page] for page in table], 1)[:, :n]
                    if table
                    else x.new_empty((x.shape[1], 0, x.shape[3]))
                )
            if x.dtype.itemsize == 1:
                x = x.float() if scale is None else x.float() * scale[:, None, None]
            found.append(x)
        return found[0], found[1]

    def problem(
        self, q: Tensor, *, mask: MaskLike = causal, cu_seqlens_q: Tensor | None = None,
        prefix: KVCache | None = None, **options: Any,
    ) -> Problem:  # fmt: skip
        """The call `attention_cached(q, self, ...)`, validated and frozen; nothing runs.

        >>> import torch, tilewise
        >>> cache = tilewise.KVCache.contiguous(2, 4, 100, 64)
        >>> print(tilewise.explain(cache.problem(torch.randn(2, 8, 1, 64))).splitlines()[-1])
          tiled: chosen
        """
        before = None if prefix is None else prefix.shape
        return of_cached(self.shape, q, mask=mask, cu_seqlens=cu_seqlens_q, prefix=before, **options)

    def check(self) -> None:
        """ValueError with what `status` notes, which is cleared; nothing if it notes nothing. Synchronises."""
        assert self.status is not None
        noted = int(self.status)
        self.status.zero_()
        if noted:
            raise ValueError("; ".join(sentence for bit, sentence in FAULTS.items() if noted & bit))

    def _aux(
        self, places: Places | None, rotary: Rotary | None, q_lens: Tensor | None, cu_seqlens: Tensor | None,
        rows: Tensor | None, sink: Tensor | None = None, slopes: Tensor | None = None,
    ) -> Aux:  # fmt: skip
        """The call's tensors; lengths and starts are those of its sequences."""
        lengths, starts = self.lengths, self.starts
        if places is not None:
            at, here = places
            lengths = lengths.index_select(0, at) * here if self.shape.slots else torch.zeros_like(here)
            starts = None if starts is None else starts.index_select(0, at)
        cos, sin = (None, None) if rotary is None else rotary[:2]
        return Aux(
            slopes=slopes, sink=sink, cu_q=cu_seqlens, q_lens=q_lens, k_lens=lengths, pages=self.pages, rows=rows,
            starts=starts, k_scale=self.k_scale, v_scale=self.v_scale, rotary_cos=cos, rotary_sin=sin,
            status=self.status,
        )  # fmt: skip

    def _append(
        self, module: Any, problem: Problem, k: Tensor, v: Tensor | None, aux: Aux, places: Places | None
    ) -> None:
        """Store, and then advance both the cache's lengths and aux's, which without rows are one tensor."""
        assert aux.k_lens is not None
        module.append(problem, k, v, self.k, self.v, aux)
        n = _new(problem, aux)
        if places is None:
            self.lengths.add_(n).clamp_(0, self.shape.capacity)
        elif self.shape.slots:
            at, here = places
            gain = (aux.k_lens + n).clamp_(0, self.shape.capacity).sub_(aux.k_lens).mul_(here)
            self.lengths.index_add_(0, at, gain)
            aux.k_lens.add_(gain)


def attend_cached(
    cache: KVCache, q: Tensor, k: Tensor | None, v: Tensor | None, mask: MaskLike, scale: float | None, softcap: float,
    sink: Tensor | None, alibi_slopes: Tensor | None, rotary: Rotary | None, q_lens: Tensor | None,
    cu_seqlens_q: Tensor | None, rows: Tensor | None, prefix: KVCache | None, backend: str | None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """o and lse of `attention_cached`: the new keys are appended, the lengths advanced, the queries answered."""
    problem = of_cached(
        cache.shape, q, k, v, mask=mask, scale=scale, softcap=softcap, sink=sink, alibi_slopes=alibi_slopes,
        rotary=rotary, q_lens=q_lens, cu_seqlens=cu_seqlens_q, rows=rows,
        prefix=None if prefix is None else prefix.shape,
    )  # fmt: skip
    places = None if rows is None else _places(rows, cache.shape.slots)
    aux = cache._aux(places, rotary, q_lens, cu_seqlens_q, rows, sink, alibi_slopes)
    if checks_contents(q.device):
        check_cached_contents(problem, aux, appending=k is not None)
    if prefix is not None:
        return _cascade(cache, prefix, problem, q, k, v, aux, places, backend)
    module = choose(problem, backend)
    if k is not None:
        cache._append(module, problem, k, v, aux, places)
    return module.attend(problem, q, cache.k, cache.v, aux)


def _cascade(
    cache: KVCache, prefix: KVCache, problem: Problem, q: Tensor, k: Tensor | None, v: Tensor | None, aux: Aux,
    places: Places | None, backend: str | None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """A prefix that all sequences share is attended by all of them at once, then each its own keys; both are merged."""
    from .algorithm.online_softmax import LOG2E, State  # with torch alone, but not when tilewise is imported

    own, shared = _parts(problem, prefix.shape)
    before = prefix.lengths.expand(problem.batch).contiguous()
    if places is not None:  # who is absent sees no prefix either
        before = before * places[1]
    # Positions of the own part begin where the prefix ends; no key lies before it.
    mine = replace(aux, sink=None, starts=None if own.cache is None or not own.cache.starts else -before)
    module = choose(own, backend)
    if k is not None:
        cache._append(module, own, k, v, mine, places)
    theirs = replace(
        mine, k_lens=before, pages=prefix.pages, rows=None, starts=None, after=mine.k_lens, k_scale=prefix.k_scale,
        v_scale=prefix.v_scale, status=prefix.status,
    )  # fmt: skip
    answers = (
        choose(shared, backend).attend(shared, q, prefix.k, prefix.v, theirs),
        module.attend(own, q, cache.k, cache.v, mine),
    )
    packed = problem.q_layout is Layout.PACKED
    states = []
    for o, lse in answers:
        if packed:
            o, lse = o.transpose(0, 1)[None], lse[None]  # (1, Hq, T, Dv) and (1, Hq, T)
        if q.device.type == "cpu":  # torch's exp2 of the last few elements is another than of those before them
            rows = -lse.shape[2] % VECTORS
            o, lse = F.pad(o, (0, 0, 0, rows)), F.pad(lse, (0, rows), value=-math.inf)
        m = lse[..., None] * LOG2E
        states.append(State(m, (m > -math.inf).to(m.dtype), o))
    sink = None if aux.sink is None else aux.sink.to(m.dtype)[:, None, None] * LOG2E
    o, lse = states[0].merge(states[1]).finalize(sink)
    rows = problem.q_len
    o, lse = o[:, :, :rows].to(q.dtype), lse[:, :, :rows]
    return (laid(o[0].transpose(0, 1), q), lse[0]) if packed else (laid(o, q), lse)


@lru_cache(maxsize=512)
def _parts(problem: Problem, prefix: CacheShape) -> tuple[Problem, Problem]:
    """The two problems of a cascade: the sequences' own keys, and the prefix."""
    asked = problem.cache
    assert asked is not None
    own = replace(problem, sink=False, cache=replace(asked, partial=True, starts=asked.rotary is not None))
    cache = replace(
        prefix, rotary=asked.rotary, rotary_dim=asked.rotary_dim, shared=True, after=True, partial=True,
    )  # fmt: skip
    layout = Layout.PAGED if prefix.page_size else Layout.DENSE
    return own, replace(own, k_len=prefix.capacity, k_layout=layout, cache=cache)


def _places(rows: Tensor, slots: int) -> Places:
    """Rows that can be looked up, and 1 where they are those that were asked for, else 0."""
    at = rows.clamp(0, max(slots - 1, 0))
    return at, at.eq(rows).to(torch.int32) if slots else torch.zeros_like(rows)


def _new(problem: Problem, aux: Aux) -> Tensor | int:
    """How many tokens each sequence gets, on the device where that is not one number."""
    if aux.cu_q is None:
        return problem.q_len if aux.q_lens is None else aux.q_lens.clamp(0, problem.q_len)
    spans = (aux.cu_q[1:] - aux.cu_q[:-1]).clamp_(0, problem.q_len)
    return spans if aux.q_lens is None else torch.minimum(aux.q_lens.clamp(min=0), spans)


def _storage(
    shape: tuple[int, int, int], qk_dim: int, v_dim: int | None, dtype: torch.dtype | None,
    device: torch.device | str | None, v_in_k: bool,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    v_dim = qk_dim if v_dim is None else v_dim
    k = torch.empty((*shape, qk_dim), dtype=dtype, device=device)
    return k, k[..., :v_dim] if v_in_k else torch.empty((*shape, v_dim), dtype=dtype, device=device)


class OutOfPages(RuntimeError):
    """A PagePool has fewer free pages than a sequence needs; nothing was reserved."""


class PagePool:
    """Which pages are whose, kept on the host: it needs no more than lengths that the host knows.

    table: int32 (sequences, max_pages) on the device, -1 where no page is. `reserve` and `free` write a few numbers of
    it; call them outside a CUDA graph, in the stream that uses the cache.

    >>> pool = PagePool(pages=4, page_size=16, sequences=2, max_len=64)
    >>> pool.reserve(0, tokens=33)                                        # enough for 33 keys in all
    3
    >>> pool.reserve(0, tokens=40), pool.free_pages                       # it has them
    (0, 1)
    >>> pool.free(0)
    >>> pool.free_pages
    4
    """

    def __init__(
        self, pages: int, page_size: int, sequences: int, max_len: int, device: torch.device | str | None = None
    ) -> None:
        for name, n in (("pages", pages), ("page_size", page_size), ("sequences", sequences), ("max_len", max_len)):
            if isinstance(n, bool) or not isinstance(n, int) or n < (name == "page_size"):
                raise ValueError(
                    f"{name} is {n!r}: it must be an int, {'at least 1' if name == 'page_size' else '>= 0'}"
                )
        self.pages, self.page_size = pages, page_size
        self.table = torch.full((sequences, -(-max_len // page_size)), -1, dtype=torch.int32, device=device)
        self._free = list(range(pages))[::-1]
        self._owned: list[list[int]] = [[] for _ in range(sequences)]

    @property
    def free_pages(self) -> int:
        return len(self._free)

    def owned(self, sequence: int) -> tuple[int, ...]:
        """The pages of a sequence, in the order of its keys."""
        return tuple(self._owned[sequence])

    def reserve(self, sequence: int, tokens: int) -> int:
        """Give the sequence pages until it has room for `tokens` keys in all; how many came new.

        OutOfPages if too few are free, ValueError if the table is too narrow; then nothing is given.
        """
        mine = self._owned[sequence]
        need = -(-tokens // self.page_size)
        if need > self.table.shape[1]:
            raise ValueError(
                f"tokens is {tokens}: the table has room for {self.table.shape[1] * self.page_size} of a sequence"
            )
        new = need - len(mine)
        if new <= 0:
            return 0
        if new > len(self._free):
            raise OutOfPages(
                f"sequence {sequence} needs {new} more pages of {self.page_size}, {len(self._free)} are free"
            )
        given = [self._free.pop() for _ in range(new)]
        self.table[sequence, len(mine) : need] = torch.tensor(given, dtype=torch.int32)
        mine += given
        return new

    def free(self, sequence: int) -> None:
        """Take all pages of the sequence back; its length in the caches is theirs to reset."""
        self._free += reversed(self._owned[sequence])
        self._owned[sequence] = []
        self.table[sequence] = -1
