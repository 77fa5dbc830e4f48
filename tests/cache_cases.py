"""Calls on key/value caches, for every backend: a case builds a cache by hand, runs one call, and checks all of it.

What is stored is placed by the test itself, key by key, in memory that is NaN everywhere else. After the call the new
keys must lie where they belong, nothing else may have changed by a bit, and o and lse are held to the fp64 reference
over the keys gathered back into a dense tensor.

    from cache_cases import *
    CacheCase(seed=7, page=16, new=(1, 5, 0), ...).check("tiled")
"""

from __future__ import annotations

import random
from dataclasses import dataclass, fields, replace
from typing import Any

import torch
from close import assert_close, evaluate, standard
from torch import Tensor

import tilewise
from tilewise import Band, KVCache, Rotary, causal, sliding_window

F16, BF16, F32, F64, FP8 = torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.float8_e4m3fn


@dataclass(frozen=True, repr=False)
class CacheCase:
    """One call of `attention_cached`: sequence b has stored[b] keys and gets new[b] queries (and keys, if `append`)."""

    seed: int = 0
    dtype: torch.dtype = F32
    storage: torch.dtype | None = None  # fp8; by default dtype
    heads: int = 4
    kv_heads: int = 2
    dim: int = 16
    v_dim: int | None = None
    stored: tuple[int, ...] = (5, 0, 37)
    new: tuple[int, ...] = (1, 1, 1)
    room: int = 64  # of a sequence, at least; rounded up to pages
    page: int | None = None
    packed: bool = False
    append: bool = True
    rows: tuple[int, ...] | None = None  # with 2 slots more than there are sequences
    starts: tuple[int, ...] | None = None  # of the sequences
    rotary: str | None = None
    rotary_dim: int = 8
    prefix: int | None = None  # its length
    prefix_page: int | None = None
    v_in_k: bool = False
    strided: bool = False  # the storage is a layer of (2, slots, S, H, D)
    band: Band = causal
    softcap: float = 0.0
    sink: bool = False
    slopes: str | None = None  # "h", "bh"
    scale: float | None = None

    def __repr__(self) -> str:
        shown = ((f.name, getattr(self, f.name)) for f in fields(self) if getattr(self, f.name) != f.default)
        return f"CacheCase({', '.join(f'{name}={value!r}' for name, value in shown)})"

    @property
    def batch(self) -> int:
        return len(self.new)

    def check(self, backend: str | None) -> None:
        """AssertionError where a result, or what is stored, is not what it must be."""
        call = self.build()
        before = call.cache.k.clone(), call.cache.v.clone()
        o, lse = call.run(backend)
        call.check_storage(*before)
        call.check_results(o, lse)

    def build(self) -> Call:
        return Call(self)


class Call:
    """The tensors of a case."""

    def __init__(self, case: CacheCase) -> None:
        self.case = case
        self.make = torch.Generator().manual_seed(case.seed)
        self.random = random.Random(case.seed)
        n, heads, v_dim = case.batch, case.kv_heads, case.v_dim or case.dim
        self.longest = max(case.new, default=0)
        self.lens = None
        shape = (sum(case.new) + 2,) if case.packed else (n, self.longest)  # two tokens of no sequence
        self.q, self.k, self.v = (
            self._tokens(shape, h, d) for h, d in ((case.heads, case.dim), (heads, case.dim), (heads, v_dim))
        )
        slots = n if case.rows is None else n + 2
        self.rows = case.rows or tuple(range(n))
        lengths = [self.random.randint(0, 3) if case.rows else 0 for _ in range(slots)]
        self.starts = [0] * n if case.starts is None else list(case.starts)
        starts = [0] * slots
        for row, length, start in zip(self.rows, case.stored, self.starts, strict=True):
            if row >= 0:
                lengths[row], starts[row] = length, start
        self.lengths = lengths
        size = max(max(lengths, default=0), case.room)
        self.cache = self._cache(slots, size, lengths, case.page, starts if case.starts else None)
        for slot, length in enumerate(lengths):
            for position in range(length):
                self._place(self.cache, slot, position)
        self.prefix = None
        if case.prefix is not None:
            self.prefix = self._cache(1, case.prefix + 5, [case.prefix], case.prefix_page, None)
            for position in range(case.prefix):
                self._place(self.prefix, 0, position)
        self.rotary = self._rotary() if case.rotary else None

    def _normal(self, *shape: int, dtype: torch.dtype | None = None) -> Tensor:
        return torch.randn(shape, generator=self.make, dtype=F64).to(dtype or self.case.dtype)

    def _tokens(self, shape: tuple[int, ...], heads: int, dim: int) -> Tensor:
        """New tokens, NaN where a row is not in use."""
        x = self._normal(*shape, heads, dim)
        if self.case.packed:
            x[sum(self.case.new) :] = torch.nan
            return x
        for b, n in enumerate(self.case.new):
            x[b, n:] = torch.nan
        return x.transpose(1, 2)

    def _cache(self, slots: int, size: int, lengths: list[int], page: int | None, starts: list[int] | None) -> KVCache:
        case, pages = self.case, None
        outer = (slots, size)
        if page is not None:
            width = -(-size // page)
            ids = list(range(slots * width + 3))
            self.random.shuffle(ids)
            pages = ints([ids[s * width : s * width + width] for s in range(slots)]).view(slots, width)
            for s, length in enumerate(lengths):  # what is beyond the room that the call needs may hold anything
                used = -(-min(length + self.longest, size) // page)
                pages[s, used:] = self.random.choice((-1, 10**6))
            outer = (len(ids), page)
        dtype = case.storage or case.dtype

        def empty(dim: int) -> Tensor:
            shape = (outer[0], case.kv_heads, outer[1], dim)
            if not case.strided:
                return torch.full(shape, torch.nan).to(dtype)
            return torch.full((2, *outer, case.kv_heads, dim), torch.nan).to(dtype)[1].transpose(1, 2)

        k = empty(case.dim)
        v = k[..., : case.v_dim] if case.v_in_k else empty(case.v_dim or case.dim)
        scales = {}
        if dtype is FP8:  # a few bits more than fp8's, so that values are exact in half types
            scales = {
                name: torch.tensor([(0.5, 1.5, 1.0)[(h + i) % 3] for h in range(case.kv_heads)])
                for i, name in enumerate(("k_scale", "v_scale"))
            }
        return KVCache(k, v, ints(lengths), pages, starts=None if starts is None else ints(starts), **scales)

    def _place(self, cache: KVCache, slot: int, position: int) -> None:
        at = where(cache, slot, position)
        for x in (cache.k, cache.v) if not self.case.v_in_k else (cache.k,):
            x[at] = self._normal(x.shape[1], x.shape[3], dtype=F32).to(x.dtype)

    def _rotary(self) -> Rotary:
        half = self.case.rotary_dim // 2
        positions = (self.case.prefix or 0) + self.cache.shape.capacity
        angle = torch.outer(torch.arange(positions, dtype=F64), 100 ** -(torch.arange(half, dtype=F64) / half))
        dtype = F32 if self.case.dtype is not F64 else F64
        return Rotary(angle.cos().to(dtype), angle.sin().to(dtype), self.case.rotary)

    @property
    def options(self) -> dict[str, Any]:
        """Those that the dense call takes, too."""
        case, options = self.case, {}
        make = torch.Generator().manual_seed(case.seed + 1)
        if case.slopes is not None:
            shape = (case.heads,) if case.slopes == "h" else (case.batch, case.heads)
            options["alibi_slopes"] = torch.randn(shape, generator=make) * 0.3
        if case.sink:
            options["sink"] = torch.randn(case.heads, generator=make) * 2
        return options | {"mask": case.band, "softcap": case.softcap, "scale": case.scale}

    def run(self, backend: str | None, **changes: Any) -> tuple[Tensor, Tensor]:
        """o and lse, (B, Hq, longest, Dv) and (B, Hq, longest), whatever the layout."""
        case = self.case
        given: dict[str, Any] = {"rotary": self.rotary, "prefix": self.prefix, **self.options}
        if case.append:
            given |= {"k": self.k, "v": None if case.v_in_k else self.v}
        if case.rows is not None:
            given["rows"] = ints(case.rows)
        if case.packed:
            given["cu_seqlens_q"] = ints([0, *torch.tensor(case.new).cumsum(0).tolist()])
        elif any(n != self.longest for n in case.new):
            given["q_lens"] = ints(case.new)
        o, lse = self.ask(backend, given | changes)
        if not case.packed:
            return o, lse
        assert (o[sum(case.new) :] == 0).all()
        assert (lse[:, sum(case.new) :] == -torch.inf).all()
        return self._padded(o, 0.0), self._padded(lse.T[..., None], -torch.inf)[..., 0]

    def ask(self, backend: str | None, options: dict[str, Any]) -> tuple[Tensor, Tensor]:
        """The call itself."""
        return tilewise.attention_cached(self.q, self.cache, return_lse=True, backend=backend, **options)

    def _padded(self, x: Tensor, fill: float) -> Tensor:
        out = x.new_full((self.case.batch, x.shape[1], self.longest, x.shape[2]), fill)
        end = 0
        for b, n in enumerate(self.case.new):
            out[b, :, :n] = x[end : end + n].transpose(0, 1)
            end += n
        return out

    def check_storage(self, k: Tensor, v: Tensor) -> None:
        """k, v: the storage before the call, which is put into what it must be after it."""
        case, cache = self.case, self.cache
        new = case.new if case.append else (0,) * case.batch
        expected = list(self.lengths)
        end = 0
        for b, (row, n) in enumerate(zip(self.rows, case.new, strict=True)):
            for t in range(n if row >= 0 and case.append else 0):
                position = self.lengths[row] + t
                at = where(cache, row, position)
                for x, scale, tokens, then in (
                    (k, cache.k_scale, self.k, cache.k), (v, cache.v_scale, self.v, cache.v),
                ):  # fmt: skip
                    if tokens is self.v and case.v_in_k:
                        continue
                    token = tokens[end + t] if case.packed else tokens[b, :, t]
                    turned = self.rotary is not None and tokens is self.k
                    if turned:
                        token = self.turned(token, max(position - self.starts[b], 0) + (case.prefix or 0))
                    if x.dtype is FP8:
                        assert scale is not None
                        token = (token.double() / scale[:, None]).clamp(-448, 448).float().to(FP8)
                    eps = 0.13 if x.dtype is FP8 else 2 * torch.finfo(x.dtype).eps
                    got = then[at].double()
                    if turned:  # rounded from another precision
                        assert ((got - token.double()).abs() <= eps * (1 + got.abs())).all(), (b, t)
                    else:
                        assert torch.equal(got, token.double()), (b, t)
                    x[at] = then[at]
            end += n
            if row >= 0:
                expected[row] += new[b]
        for x, then in ((k, cache.k), (v, cache.v)) if not case.v_in_k else ((k, cache.k),):
            assert same_bits(then, x), "something else was written"
        assert cache.lengths.tolist() == expected
        assert int(cache.status) == 0

    def turned(self, x: Tensor, position: int) -> Tensor:
        """x (H, D), its first columns turned as complex numbers."""
        assert self.rotary is not None
        R = self.case.rotary_dim
        z = x[:, :R].double()
        by_pair = self.case.rotary == "interleaved"
        pairs = z.unflatten(1, (-1, 2)) if by_pair else z.unflatten(1, (2, -1)).transpose(1, 2)
        angle = torch.complex(self.rotary.cos[position].double(), self.rotary.sin[position].double())
        z = torch.view_as_real(torch.view_as_complex(pairs.clone(memory_format=torch.contiguous_format)) * angle)
        return torch.cat([(z if by_pair else z.transpose(1, 2)).flatten(1).to(x.dtype), x[:, R:]], 1)

    def dense(self) -> dict[str, Any]:
        """The call as the reference takes it: keys gathered, queries turned."""
        case, cache = self.case, self.cache
        lengths = [int(cache.lengths[row]) if row >= 0 else 0 for row in self.rows]
        P = case.prefix or 0
        width = max([0, *(n - s for n, s in zip(lengths, self.starts, strict=True))]) + P
        k, v = (
            torch.full((case.batch, case.kv_heads, width, d), torch.nan, dtype=case.dtype)
            for d in (case.dim, case.v_dim or case.dim)
        )
        k_lens = []
        q = torch.full((case.batch, case.heads, self.longest, case.dim), torch.nan, dtype=case.dtype)
        end = 0
        for b, (row, n, length, start) in enumerate(zip(self.rows, case.new, lengths, self.starts, strict=True)):
            keys = [(self.prefix, 0, j) for j in range(P)] + [(cache, row, j) for j in range(start, length)]
            for j, (source, slot, position) in enumerate(keys if row >= 0 else []):
                for x, stored, scale in ((k, source.k, source.k_scale), (v, source.v, source.v_scale)):
                    found = stored[where(source, slot, position)].double()
                    x[b, :, j] = found if scale is None else found * scale[:, None]
            k_lens.append(len(keys) if row >= 0 else 0)
            for t in range(n):
                token = self.q[end + t] if case.packed else self.q[b, :, t]
                position = length - n + t - start + P
                q[b, :, t] = token if self.rotary is None else self.turned(token, max(position, 0))
            end += n
        return {"q": q, "k": k, "v": v, "q_lens": ints(case.new), "k_lens": ints(k_lens), **self.options}

    def check_results(self, o: Tensor, lse: Tensor) -> None:
        case, dense = self.case, self.dense()
        if case.rotary and case.dtype in (F16, BF16):  # a turned q may be rounded the other way: lse sees such a bit
            expected = evaluate(standard(F64), **dense, do=None, dlse=None)["lse"]
            assert torch.equal(lse == -torch.inf, expected == -torch.inf)
            error = (lse.double() - expected).nan_to_num(0.0, 0.0, 0.0)
            assert (error.abs() <= torch.finfo(case.dtype).eps * (1 + expected.abs())).all(), error.abs().max()
            lse = expected.float()
        assert_close({"o": o, "lse": lse}, **dense, do=None, dlse=None)


def ints(values: Any) -> Tensor:
    return torch.tensor(values, dtype=torch.int32)


def where(cache: KVCache, slot: int, position: int) -> tuple[Any, ...]:
    """The index of a key's heads (Hkv, d) in a cache's storage."""
    if cache.pages is None:
        return slot, slice(None), position
    size = cache.k.shape[2]
    return int(cache.pages[slot, position // size]), slice(None), position % size


def same_bits(x: Tensor, y: Tensor) -> bool:
    """Equal bit for bit, NaN too."""
    as_ints = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[x.dtype.itemsize]
    return torch.equal(x.contiguous().view(as_ints), y.contiguous().view(as_ints))


BANDS = (causal, causal, causal, Band(), sliding_window(4), sliding_window(0), Band(7, 2), Band(-1, 3), Band(None, -2))


def sample(seed: int) -> CacheCase:
    """The seed's case: any combination of options; every one of them is off in most cases."""
    r = random.Random(seed)

    def maybe(p: float, value: Any, otherwise: Any = None) -> Any:
        return value if r.random() < p else otherwise

    dtype = r.choice((F16, BF16, F32, F32, F64))
    kv_heads = r.choice((1, 1, 2, 3))
    batch = r.choice((1, 2, 3, 3, 5))
    kind = r.choice(("decode", "decode", "few", "mixed", "prefill"))
    new = {
        "decode": [1] * batch,
        "few": [r.randint(1, 16)] * batch,
        "mixed": [r.choice((1, 1, 1, 4, 33, 0)) for _ in range(batch)],
        "prefill": [r.randint(1, 70) for _ in range(batch)],
    }[kind]
    append = r.random() < 0.8
    stored = [r.choice((0, 1, 15, 16, 17, r.randint(0, 150))) for _ in range(batch)]
    stored = stored if append else [n + s for n, s in zip(new, stored, strict=True)]
    total = [s + n if append else s for s, n in zip(stored, new, strict=True)]
    dim = r.choice((1, 3, 8, 16, 16, 40))
    case = CacheCase(
        seed=seed, dtype=dtype, storage=maybe(0.2, FP8), heads=kv_heads * r.choice((1, 1, 2, 4)), kv_heads=kv_heads,
        dim=dim, v_dim=maybe(0.2, r.choice((1, 8, 24))), stored=tuple(stored), new=tuple(new),
        room=max(total) + r.choice((0, 0, 1, 20)), page=maybe(0.6, r.choice((1, 2, 7, 16, 16, 64, 256))),
        packed=kind in ("mixed", "prefill") and r.random() < 0.6, append=append, strided=maybe(0.2, True, False),
        band=r.choice(BANDS), softcap=maybe(0.15, 5.0, 0.0), sink=maybe(0.2, True, False),
        slopes=maybe(0.2, r.choice(("h", "bh"))), scale=maybe(0.2, r.choice((0.0, -0.3, 2.0))),
    )  # fmt: skip
    if r.random() < 0.3:
        rows = r.sample(range(batch + 2), batch)
        case = replace(case, rows=tuple(-1 if r.random() < 0.15 else row for row in rows))
    if r.random() < 0.25 and dim >= 2:
        styles = ("half", "interleaved")
        case = replace(case, rotary=r.choice(styles), rotary_dim=r.choice((2, dim // 2 * 2)))
    if r.random() < 0.2:
        case = replace(case, starts=tuple(r.randint(0, n) for n in total))
    elif r.random() < 0.2:
        case = replace(case, prefix=r.choice((1, 16, 50)), prefix_page=maybe(0.5, 16))
    if case.rotary is None and case.v_dim is None and r.random() < 0.15:
        case = replace(case, v_in_k=True, v_dim=max(1, dim // 2))
    return case
