"""What every backend is tried on: a seeded sampler of all options, and named inputs that attention libraries failed on.

A `Case` is made of plain values. It prints as the expression that makes it again: a failure is reproduced by pasting.

    from cases import *
    case = Case(seed=7, dtype=torch.float16, q_len=33, ...)
    assert_close(case.run("tiled"), **case.build())
"""

from __future__ import annotations

import contextlib
import random
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, fields, replace
from itertools import pairwise, product
from typing import Any
from unittest import mock

import torch
from close import Results, evaluate
from torch import Tensor

import tilewise
from tilewise import Band, BlockMask, Problem, causal
from tilewise.algorithm import tiling
from tilewise.autograd import attend
from tilewise.block_mask import TILE


@dataclass(frozen=True, repr=False)
class Case:
    """One call. With cu_q it is packed: `batch` counts sequences, q_len and k_len are the total tokens.

    mask_dims and bias_dims: which of the letters "bhqk" (batch, heads, rows, keys) the tensor has; the others are of
    size 1, or with mask_expand / bias_layout "expanded" of stride 0.
    """

    seed: int = 0  # of the tensors' contents
    dtype: torch.dtype = torch.float32
    batch: int = 1
    heads: int = 2
    kv_heads: int = 2
    q_len: int = 16
    k_len: int = 16
    dim: int = 16
    v_dim: int = 16
    std: float = 1.0  # of q, k, v
    fill: float | None = None  # q, k, v all this number
    layout: str = "contiguous"  # of q, k, v: see `laid_out`
    do_layout: str = "contiguous"
    cu_q: tuple[int, ...] | None = None
    cu_k: tuple[int, ...] | None = None
    q_lens: tuple[int, ...] | None = None
    k_lens: tuple[int, ...] | None = None
    garbage: bool = False  # NaN wherever no sequence is
    band: Band = Band()
    mask: str | None = None  # "bool", "blocks"
    mask_dims: str = "qk"
    mask_density: float = 0.5
    mask_expand: bool = False
    bias_dims: str | None = None
    bias_dtype: torch.dtype = torch.float32
    bias_fill: str = "normal"  # "-inf entries", "-inf rows", "min rows" (finfo.min)
    bias_shift: float = 0.0
    bias_layout: str = "contiguous"  # "expanded", "last"
    slopes: str | None = None  # "h", "bh"
    slopes_dtype: torch.dtype = torch.float32
    sink: torch.dtype | None = None
    scale: float | None = None
    softcap: float = 0.0
    dropout_p: float = 0.0
    dropout_seed: int = 1
    origin: tuple[int, int, int, int] = (0, 0, 0, 0)
    grad: bool = True
    frozen: tuple[str, ...] = ()  # gradients that are not asked for
    lse_grad: bool = True
    tiles: tuple[int, int] | None = None  # (B_r, B_c) forced on the backend, so that little problems have many tiles

    def __repr__(self) -> str:
        shown = ((f.name, getattr(self, f.name)) for f in fields(self) if getattr(self, f.name) != f.default)
        return f"Case({', '.join(f'{name}={value!r}' for name, value in shown)})"

    def attend(self, backend: str | None) -> Callable[..., tuple[Tensor, Tensor]]:
        """attention, or attention_packed, as `close.evaluate` calls it."""

        def call(q: Tensor, k: Tensor, v: Tensor, **options: Any) -> tuple[Tensor, Tensor]:
            if any(self.origin):  # not in the public functions: context parallelism passes it
                problem, aux = Problem.of(q, k, v, **options)
                return attend(problem, q, k, v, aux, backend)
            public = tilewise.attention if self.cu_q is None else tilewise.attention_packed
            return public(q, k, v, **options, return_lse=True, backend=backend)

        return call

    def run(self, backend: str | None, inputs: dict[str, Any] | None = None, **changes: Any) -> Results:
        """What the backend answers, in tiles of the size asked for. inputs: what `build` gave; changes go into it."""
        with forced_tiles(self.tiles):
            return evaluate(self.attend(backend), **((inputs or self.build()) | changes))

    def build(self) -> dict[str, Any]:
        """The arguments of `close.evaluate`: q, k, v, do, dlse, frozen and the call's options."""
        make = torch.Generator().manual_seed(self.seed)

        def normal(*shape: int, dtype: torch.dtype = self.dtype, std: float = 1.0) -> Tensor:
            return (torch.randn(shape, generator=make, dtype=torch.float64) * std).to(dtype)

        def tokens(heads: int, length: int, dim: int) -> tuple[int, ...]:
            return (self.batch, heads, length, dim) if self.cu_q is None else (length, heads, dim)

        q = normal(*tokens(self.heads, self.q_len, self.dim), std=self.std)
        k = normal(*tokens(self.kv_heads, self.k_len, self.dim), std=self.std)
        v = normal(*tokens(self.kv_heads, self.k_len, self.v_dim), std=self.std)
        do = normal(*tokens(self.heads, self.q_len, self.v_dim))
        statistic = torch.float64 if self.dtype == torch.float64 else torch.float32
        rows = (self.batch, self.heads, self.q_len) if self.cu_q is None else (self.heads, self.q_len)
        dlse = normal(*rows, dtype=statistic) if self.lse_grad else None
        if self.fill is not None:
            q, k, v = (torch.full_like(t, self.fill) for t in (q, k, v))
        q, k, v = (laid_out(t, self.layout) for t in (q, k, v))
        do = laid_out(do, self.do_layout)
        if self.garbage:
            q, k, v, do = (self._with_garbage(t, side) for t, side in ((q, "q"), (k, "k"), (v, "k"), (do, "q")))
        return {
            "q": q, "k": k, "v": v, "do": do if self.grad else None, "dlse": dlse if self.grad else None,
            "frozen": self.frozen, **self._options(make, normal),
        }  # fmt: skip

    def _options(self, make: torch.Generator, normal: Callable[..., Tensor]) -> dict[str, Any]:
        options: dict[str, Any] = {"scale": self.scale, "softcap": self.softcap}
        longest = tuple(
            length if cu is None else max([1, *(b - a for a, b in pairwise(cu))])
            for length, cu in ((self.q_len, self.cu_q), (self.k_len, self.cu_k or self.cu_q))
        )
        full = (self.batch, self.heads, *longest)
        if self.mask is not None or self.band != Band():
            options["mask"] = self._mask(make, full)
        if self.bias_dims is not None:
            options["bias"] = self._bias(make, normal, full)
        if self.slopes is not None:
            shape = (self.heads,) if self.slopes == "h" else (self.batch, self.heads)
            options["alibi_slopes"] = normal(*shape, dtype=self.slopes_dtype, std=0.3)
        if self.sink is not None:
            options["sink"] = normal(self.heads, dtype=self.sink, std=2.0)
        if self.dropout_p > 0:
            options |= {"dropout_p": self.dropout_p, "seed": self.dropout_seed}
        for name, values in (
            ("cu_seqlens_q", self.cu_q), ("cu_seqlens_k", self.cu_k), ("q_lens", self.q_lens), ("k_lens", self.k_lens),
        ):  # fmt: skip
            if values is not None:
                options[name] = torch.tensor(values, dtype=torch.int32)
        return options | ({"origin": self.origin} if any(self.origin) else {})

    def _mask(self, make: torch.Generator, full: tuple[int, ...]) -> Any:
        if self.mask is None:
            return self.band
        b0, h0, i0, j0 = self.origin
        if self.mask == "blocks":  # it describes the whole of which an origin is a part
            full = (b0 + full[0], h0 + full[1], i0 + full[2], j0 + full[3])
            shape = (
                tuple(n if letter in self.mask_dims else 1 for n, letter in zip(full, "bh", strict=False)) + full[2:]
            )
            kind = torch.rand((*shape[:2], *(-(-n // TILE) for n in shape[2:])), generator=make)
            kind = kind.repeat_interleave(TILE, 2).repeat_interleave(TILE, 3)[..., : shape[2], : shape[3]]
            seen = torch.rand(shape, generator=make) < self.mask_density
            mask: Any = BlockMask.from_dense((kind > 0.7) | (seen & (kind > 0.3)))  # EMPTY, MIXED and FULL tiles
        else:
            shape = tuple(n if letter in self.mask_dims else 1 for n, letter in zip(full, "bhqk", strict=True))
            mask = torch.rand(shape, generator=make) < self.mask_density
            mask &= torch.rand((*shape[:3], 1), generator=make) < 0.9  # rows without a key
            mask = mask.expand(full) if self.mask_expand else mask
            mask = mask[0, 0] if mask.shape[:2] == (1, 1) else mask
        return mask if self.band == Band() else self.band & mask

    def _bias(self, make: torch.Generator, normal: Callable[..., Tensor], full: tuple[int, ...]) -> Tensor:
        shape = tuple(n if letter in self.bias_dims else 1 for n, letter in zip(full, "bhqk", strict=True))
        bias = normal(*shape, dtype=self.bias_dtype) + self.bias_shift
        if self.bias_fill == "-inf entries":
            bias.masked_fill_(torch.rand(shape, generator=make) < 0.2, -torch.inf)
        elif self.bias_fill in ("-inf rows", "min rows"):
            lowest = -torch.inf if self.bias_fill == "-inf rows" else torch.finfo(bias.dtype).min
            bias.masked_fill_(torch.rand((*shape[:3], 1), generator=make) < 0.2, lowest)
        if self.bias_layout == "expanded":
            return bias.expand(full)
        bias = laid_out(bias, self.bias_layout)
        return bias[0, 0] if shape[:2] == (1, 1) else bias

    def _with_garbage(self, t: Tensor, side: str) -> Tensor:
        cu, lens = (self.cu_q, self.q_lens) if side == "q" else (self.cu_k or self.cu_q, self.k_lens)
        inside = torch.zeros((len(t), t.shape[-2]) if cu is None else (len(t),), dtype=torch.bool)
        for b in range(self.batch):
            span = inside[b] if cu is None else inside[cu[b] : cu[b + 1]]
            span[: len(span) if lens is None else lens[b]] = True
        inside = inside[:, None, :, None] if cu is None else inside[:, None, None]
        return laid_out(t.masked_fill(~inside, torch.nan), self.layout)


@contextlib.contextmanager
def forced_tiles(tiles: tuple[int, int] | None) -> Iterator[None]:
    """ "tiled" cuts tiles of (B_r, B_c); with a BlockMask its backward exchanges the two. None: as it likes."""
    if tiles is None:
        yield
        return

    def cpu_tile(problem: Problem, backward: bool = False) -> tuple[int, int]:
        return tiles[::-1] if backward and problem.mask == "blocks" else tiles

    with mock.patch.object(tiling, "cpu_tile", cpu_tile):
        yield


def laid_out(t: Tensor, how: str) -> Tensor:
    """The values of `t` (packed (T, H, D) or dense (B, H, S, D)) with other strides. Expanded ones repeat t's first."""
    if how == "transposed":  # (B, S, H, D), packed (H, T, D), in memory
        return t.transpose(-3, -2).contiguous().transpose(-3, -2)
    if how == "columns":  # the positions of one column side by side
        return t.transpose(-2, -1).contiguous().transpose(-2, -1)
    if how == "last":  # last stride 2
        return t.repeat_interleave(2, dim=-1)[..., ::2]
    if how == "offset":  # an address that no vector load is aligned to
        return torch.cat([t.new_zeros(1), t.flatten()])[1:].view(t.shape)
    if how == "gaps":  # room between batches, heads and rows
        shape = [n + 1 for n in t.shape]
        return t.new_zeros(shape)[tuple(slice(n) for n in t.shape)].copy_(t)
    if how == "heads":  # expanded: stride 0 over the heads
        return t[..., :1, :].expand(t.shape) if t.dim() == 3 else t[:, :1].expand(t.shape)
    if how == "scalar":  # expanded: stride 0 everywhere, as out.sum().backward() gives
        return t.flatten()[:1].reshape((1,) * t.dim()).expand(t.shape) if t.numel() else t
    assert how == "contiguous", how
    return t


LAYOUTS = ("transposed", "columns", "last", "offset", "gaps", "heads")
TILES = ((16, 16), (32, 48), (16, 64), (48, 32), (64, 16))


def sample(seed: int) -> Case:
    """The seed's case: any combination of options; every one of them is off in most cases."""
    r = random.Random(seed)

    def maybe(p: float, value: Any, otherwise: Any = None) -> Any:
        return value if r.random() < p else otherwise

    dtype = r.choice((torch.float16, torch.bfloat16, torch.float32, torch.float32, torch.float64))
    kv_heads = r.choice((1, 1, 2, 3))
    heads = kv_heads * r.choice((1, 1, 2, 4))
    dim = r.choice((1, 2, 3, 5, 8, 8, 16, 16, 20, 32, 40, 64))
    case = Case(
        seed=seed, dtype=dtype, heads=heads, kv_heads=kv_heads, dim=dim,
        v_dim=maybe(0.6, dim, r.choice((1, 3, 8, 24, 32))), std=r.choice((1.0, 1.0, 1.0, 0.1, 3.0)),
        layout=maybe(0.3, r.choice(LAYOUTS), "contiguous"),
        do_layout=maybe(0.3, r.choice((*LAYOUTS, "scalar")), "contiguous"),
        scale=maybe(0.3, r.choice((0.0, -0.3, 1e-4, 0.5, 2.0))), softcap=maybe(0.2, r.choice((0.5, 5.0, 50.0)), 0.0),
        slopes=maybe(0.2, r.choice(("h", "bh"))), slopes_dtype=maybe(0.7, torch.float32, dtype),
        sink=maybe(0.2, r.choice((torch.float32, dtype))),
        dropout_p=maybe(0.15, r.choice((0.001, 0.1, 0.5, 0.9, 1.0)), 0.0),
        dropout_seed=r.choice((0, 1, -1, 2**40 + 3, -(2**63), 2**64 - 1)), grad=r.random() < 0.85,
        lse_grad=r.random() < 0.6, garbage=r.random() < 0.5,
    )  # fmt: skip
    case = _sample_lengths(r, maybe, case)
    case = _sample_masks(r, maybe, case)
    if maybe(0.25, True):
        case = replace(
            case, bias_dims=r.choice(("bhqk", "hqk", "qk", "k", "hk", "bk", "bqk", "q", "h", "b", "")),
            bias_dtype=maybe(0.6, torch.float32, dtype),
            bias_fill=r.choice(("normal", "normal", "-inf entries", "-inf rows")),
            bias_layout=r.choice(("contiguous", "contiguous", "last", "expanded")),
        )  # fmt: skip
    frozen = tuple(name for name in ("dq", "dk", "dv", "dbias", "dslopes", "dsink") if maybe(0.1, True))
    case = replace(case, frozen=frozen if case.grad and len(frozen) < 3 else ())
    return _without_idle(case)


def _without_idle(case: Case) -> Case:
    """The case with what has no effect at its default, so that it prints short."""
    idle = [name for on, names in (
        (case.mask is not None, ("mask_dims", "mask_density", "mask_expand")),
        (case.slopes is not None, ("slopes_dtype",)),
        (case.dropout_p > 0, ("dropout_seed",)),
        (case.grad, ("lse_grad", "do_layout")),
        (not case.band.is_full or case.slopes, ("band",)),
        (case.q_lens or case.k_lens or case.cu_q, ("garbage",)),
    ) if not on for name in names]  # fmt: skip
    gone = {"dbias": case.bias_dims, "dslopes": case.slopes, "dsink": case.sink}
    case = replace(case, frozen=tuple(name for name in case.frozen if gone.get(name, "q") is not None))
    return replace(case, **{f.name: f.default for f in fields(case) if f.name in idle})


def _sample_lengths(r: random.Random, maybe: Callable[..., Any], case: Case) -> Case:
    def length() -> int:
        return r.choice((0, 1, *(r.randint(2, 80) for _ in range(14)), *(r.randint(81, 300) for _ in range(4))))

    if maybe(0.65, True):
        batch, q_len = r.choice((1, 1, 2, 2, 3, 4)), length()
        case = replace(case, batch=maybe(0.02, 0, batch), q_len=q_len, k_len=maybe(0.4, q_len, length()))
        spans_q, spans_k = [case.q_len] * case.batch, [case.k_len] * case.batch
    else:
        batch = r.choice((0, 1, 1, 1, 2, 2, 3, 3, 4, 4, 5))
        spans_q = [r.choice((0, length() // 2)) if maybe(0.3, True) else length() // 2 for _ in range(batch)]
        spans_k = spans_q if maybe(0.4, True) else [length() // 2 for _ in range(batch)]
        cu_q, cu_k = (tuple(sum(spans[:n]) for n in range(batch + 1)) for spans in (spans_q, spans_k))
        tail = r.choice((0, 0, 0, 5))
        case = replace(
            case, batch=batch, q_len=cu_q[-1] + tail, k_len=cu_k[-1] + tail, cu_q=cu_q,
            cu_k=None if spans_q is spans_k and maybe(0.5, True) else cu_k,
        )  # fmt: skip
    for name, spans in (("q_lens", spans_q), ("k_lens", spans_k)):
        if maybe(0.2, True):
            case = replace(case, **{name: tuple(r.choice((0, n, r.randint(0, n), r.randint(0, n))) for n in spans)})
    return case


def _sample_masks(r: random.Random, maybe: Callable[..., Any], case: Case) -> Case:
    bound = max(case.q_len, case.k_len) + 5
    window = Band(
        maybe(0.7, r.choice((0, 1, 7, r.randint(-5, bound)))), maybe(0.7, r.choice((0, 0, 3, r.randint(-5, bound))))
    )
    band = maybe(0.6, maybe(0.4, causal, window), Band())
    band = replace(band, align=maybe(0.25, "top_left", "bottom_right"))
    origin = (r.randint(0, 3), r.randint(0, 5), r.randint(0, 2) * TILE, r.randint(0, 2) * TILE)
    case = replace(
        case, band=band, mask=maybe(0.35, r.choice(("bool", "bool", "blocks"))),
        mask_density=r.choice((0.0, 0.1, 0.5, 0.9)),
        mask_dims=r.choice(("bhqk", "bk", "hqk", "qk", "k", "q", "bqk", "")), mask_expand=maybe(0.3, True, False),
        origin=maybe(0.1, origin, (0, 0, 0, 0)), tiles=maybe(0.6, r.choice(TILES)),
    )  # fmt: skip
    if case.mask == "blocks":
        case = replace(case, tiles=maybe(0.5, (TILE, r.choice((1, 2)) * TILE)))
    elif any(case.origin):  # no multiple of anything is asked of it without a BlockMask
        case = replace(case, origin=tuple(x + r.choice((0, 3)) for x in case.origin))
    return case


# ---- named cases: inputs that attention libraries failed on ----------------------------------------------------------

F16, BF16, F32, F64 = torch.float16, torch.bfloat16, torch.float32, torch.float64
FULL, TOP_LEFT = Band(), Band(None, 0, "top_left")
Named = dict[str, Case]


def _dense(q_len: int, k_len: int | None = None, **more: Any) -> Case:
    return Case(q_len=q_len, k_len=q_len if k_len is None else k_len, **more)


def _packed(cu_q: tuple[int, ...], cu_k: tuple[int, ...] | None = None, **more: Any) -> Case:
    last = cu_q[-1] if cu_k is None else cu_k[-1]
    return Case(batch=len(cu_q) - 1, q_len=cu_q[-1], k_len=last, cu_q=cu_q, cu_k=cu_k, **more)


def _named(title: str, cases: Iterable[Case]) -> Named:
    """Each under the title and its own number."""
    return {f"{title} {n}": case for n, case in enumerate(cases)}


def _numbers() -> Named:
    one = {"heads": 1, "kv_heads": 1}
    low = ((("", 0.01), ("qk", 1.0), ("hk", 1.0)), (F32, F16), (-2e4, 3e3))  # ((bias, std), dtype, shift)
    late = {"bias_dims": "qk", "bias_shift": -250.0, "tiles": (16, 16)}
    capped = (
        {"dtype": F64},
        {"band": causal},
        {"dropout_p": 0.3},
        {"dtype": BF16},
        {"bias_dims": "hqk"},
        {"slopes": "h"},
    )
    return {
        "3 randn, 1024, d 128": _dense(1024, dim=128, v_dim=128, std=3.0, dtype=F16, band=causal, **one),
        **_named("3 randn", (
            _dense(n, m, dim=d, v_dim=d, std=3.0, dtype=dtype, band=causal, **one)
            for dtype, (n, m, d) in product((F16, BF16), ((1, 1, 16), (130, 130, 64), (65, 200, 128))))),
        "everything 1000, 512": _dense(512, batch=2, heads=4, kv_heads=4, dim=32, v_dim=32, fill=1000.0, dtype=BF16),
        **_named("everything one number", (
            _dense(n, heads=4, dim=32, v_dim=32, fill=fill, dtype=dtype)
            for dtype, fill, n in ((F16, 1000.0, 70), (F32, 1000.0, 70), (BF16, -1000.0, 17), (F32, 0.0, 33)))),
        # the softmax does not care by how much all scores are shifted
        **_named("all scores shifted", (
            _dense(100, dtype=dtype, bias_dims=dims, bias_shift=shift, std=std, band=causal, tiles=(32, 48))
            for (dims, std), dtype, shift in product(*low))),
        **_named("products near -14400", (_dense(70, fill=30.0, scale=-1.0, dtype=dtype) for dtype in (F32, BF16))),
        # rows whose first tiles are masked and whose scores are all below -200: a maximum must not start at 0
        **_named("first tiles masked, the rest very low", (
            _dense(128, 160, **late, band=Band(-70, None)), _dense(128, 160, **late, band=Band(-33, 90, "top_left")),
            _dense(128, 160, **late, mask="bool", mask_density=0.02, mask_dims="hqk"),
            _dense(128, 160, **late, band=Band(-70, None), dtype=F16))),
        **_named("scale", (
            _dense(75, scale=scale, dtype=dtype, band=band, tiles=(32, 48))
            for scale, dtype, band in product((0.0, -0.5, -50.0, 1e-4, 50.0), (F32, BF16), (causal, FULL)))),
        "scale -1 and softcap": _dense(75, scale=-1.0, softcap=5.0, band=causal, tiles=(16, 16)),
        **_named("softcap", (
            _dense(90, 110, softcap=cap, std=3.0, tiles=(32, 48), **options)
            for cap, options in product((5.0, 50.0), capped))),
        # dq and dk vanish: what is left of them is rounding
        **_named("one key", (
            _dense(40, 1, dtype=dtype, **options)
            for dtype, options in product((F16, BF16, F32, F64), ({}, {"dropout_p": 0.5}, {"sink": F32})))),
        **_named("one visible key", (_dense(70, dtype=dtype, band=Band(0, 0)) for dtype in (F16, F32))),
    }  # fmt: skip


def _masks() -> Named:
    lengths = product((1, 3, 127, 129), (0, 1, 3, 128, 513), (causal, TOP_LEFT, FULL))
    windows = (
        (Band(0, 5), 8, 4), (Band(0, 50), 80, 40),  # a right bound beyond the keys
        (Band(32, 64), 129, 129), (Band(32, 64), 129, 40), (Band(32, 64), 129, 300), (Band(0, 0), 33, 33),
        (Band(2, 1), 100, 30), (Band(3, -4), 60, 60), (Band(-5, 4), 60, 90),  # empty for some rows, and for all
        (Band(-1, 3), 50, 50), (Band(-3, 1), 50, 50), (Band(-1, 3), 20, 70), (Band(-1, 3), 70, 20),  # negative bounds
        (Band(-1, None), 50, 50), (Band(None, -1), 50, 50), (Band(-60, None), 50, 50), (Band(None, -60), 50, 50),
        (Band(-1, 3, "top_left"), 20, 70), (Band(10, 0, "top_left"), 90, 40), (Band(-20, None, "top_left"), 90, 40),
        (Band(2**40, 2**40), 33, 40), (Band(-(2**40), 2**40), 33, 40),
    )  # fmt: skip
    booleans = (
        ("bk", False, 0.5), ("hqk", False, 0.5), ("qk", False, 0.3), ("bhqk", False, 0.1), ("q", False, 0.7),
        ("bk", True, 0.5), ("k", True, 0.5), ("", False, 0.9), ("qk", False, 0.0), ("bhqk", False, 0.0),
        ("k", True, 0.0),
    )  # fmt: skip
    return {
        "causal 2048 x 1024": _dense(2048, 1024, heads=1, kv_heads=1, dim=64, v_dim=64, band=causal),
        **_named("causal 8 x 4", (
            _dense(8, 4, dtype=dtype, band=causal, sink=sink)
            for dtype, sink in product((F16, BF16, F32, F64), (None, F32)))),
        "causal 150 x 70, every option": _dense(
            150, 70, heads=4, band=causal, bias_dims="hqk", slopes="h", sink=F32, softcap=5.0, dropout_p=0.2,
            tiles=(16, 16)),
        **{f"{n} x {m}, {band}": _dense(n, m, band=band) for n, m, band in lengths},
        **_named("whole tiles", (
            _dense(128, 256, heads=4, kv_heads=2, dim=d, v_dim=d, dtype=dtype, band=band)
            for (d, dtype), band in product(
                ((64, BF16), (128, BF16), (64, F32)), (FULL, causal, TOP_LEFT, Band(50, None), Band(70, 20))))),
        **_named("whole tiles, small", (
            _dense(64, 32, heads=1, kv_heads=1, dtype=dtype, band=band)
            for dtype, band in product((F16, F32), (FULL, causal, TOP_LEFT, Band(5, None), Band(9, 3))))),
        "whole tiles, every option": _dense(
            128, 256, heads=4, kv_heads=2, dtype=BF16, mask="bool", mask_dims="hqk", bias_dims="hqk", slopes="h",
            sink=F32, softcap=5.0, dropout_p=0.2),
        **{
            f"{band}, {n} x {m}, tiles {tiles}": _dense(n, m, heads=1, kv_heads=1, band=band, tiles=tiles)
            for (band, n, m), tiles in product(windows, (None, (16, 16)))
        },
        **_named("boolean", (
            Case(batch=2, heads=4, q_len=70, k_len=90, mask="bool", mask_dims=dims, mask_expand=expand,
                 mask_density=density, tiles=(32, 48))
            for dims, expand, density in booleans)),
        "boolean and band": _dense(90, mask="bool", band=causal, mask_dims="qk", tiles=(16, 16)),
        "boolean and bias": _dense(90, mask="bool", mask_dims="k", bias_dims="hqk", dtype=BF16, tiles=(16, 16)),
    }  # fmt: skip


def _biases() -> Named:
    shapes = ("hk", "bqk", "bhqk", "qk", "k", "q", "b", "h", "bh", "bhq", "")
    hiding = ((F16, None, causal), (BF16, F32, FULL), (F32, F32, causal), (F64, None, FULL))
    return {
        **{
            f"bias {dims or 'scalar'}, {dtype}": Case(
                batch=2, heads=4, q_len=40, k_len=67, dtype=dtype, bias_dims=dims, bias_dtype=F32, tiles=(32, 48))
            for dims, dtype in product(shapes, (F16, F64))
        },
        **_named("bias of -inf", (
            _dense(60, 67, dtype=dtype, bias_dims="hqk", bias_fill=fill, bias_dtype=dtype, sink=sink, band=band)
            for fill, (dtype, sink, band) in product(("-inf entries", "-inf rows"), hiding))),
        "bias, last stride 2": _dense(40, 67, dtype=F16, bias_dims="hqk", bias_layout="last"),
        "bias, expanded view": Case(batch=2, q_len=40, k_len=67, bias_dims="hk", bias_layout="expanded"),
        "bias, 299 keys over tiles": _dense(130, 299, bias_dims="hk", tiles=(64, 64), dtype=BF16),
        "slopes of both signs, far keys": _dense(5, 900, heads=8, kv_heads=8, slopes="h"),  # exp(slope * 900) overflows
        **_named("slopes", (
            Case(batch=2, heads=4, q_len=150, k_len=270, dtype=dtype, slopes=kind, band=band, tiles=tiles)
            for kind, (dtype, tiles), band in product(
                ("h", "bh"), ((F16, None), (BF16, (16, 16)), (F32, (64, 16))),
                (FULL, causal, Band(20, 20, "top_left"))))),
    }  # fmt: skip


def _block_masks() -> Named:
    """FULL, MIXED and EMPTY tiles, partial last ones."""
    problems = (
        ("", 64, 300, 300, F32, FULL, None), ("bh", 64, 300, 413, F32, causal, (128, 128)),
        ("h", 128, 256, 390, F16, FULL, (128, 256)), ("b", 128, 130, 100, BF16, Band(70, 20), None),
        ("bh", 16, 257, 513, F64, FULL, (128, 128)), ("", 16, 5, 700, F32, causal, None),
        ("h", 16, 700, 5, F32, FULL, None),
    )  # fmt: skip
    return {
        **_named("block mask", (
            Case(batch=2, heads=4, kv_heads=2, q_len=n, k_len=m, dim=d, v_dim=d, dtype=dtype, mask="blocks",
                mask_dims=dims,
                 band=band, tiles=tiles)
            for dims, d, n, m, dtype, band, tiles in problems)),
        **_named("whole block mask", (  # lengths that tiles divide
            Case(heads=4, kv_heads=2, q_len=256, k_len=384, dim=d, v_dim=d, dtype=dtype, mask="blocks",
                 mask_dims="h", **options)
            for d, dtype, options in (
                (64, BF16, {}), (128, BF16, {}), (40, F32, {"band": causal}),
                (64, F16, {"origin": (0, 0, 128, 256)})))),
        "whole block mask, small": _dense(128, 256, heads=1, kv_heads=1, mask="blocks"),
        "whole block mask and band, small": _dense(128, 256, heads=1, kv_heads=1, mask="blocks", band=causal),
        "block mask of nothing": Case(q_len=200, k_len=200, mask="blocks", mask_density=0.0, seed=5, sink=F32),
        "block mask of everything": Case(q_len=200, k_len=300, mask="blocks", mask_density=1.0, seed=5),
        "block mask, every option": Case(
            heads=4, q_len=270, k_len=300, mask="blocks", mask_dims="h", bias_dims="hqk", slopes="h", sink=F32,
            dropout_p=0.2,
            softcap=5.0),
    }  # fmt: skip


def _shapes() -> Named:
    equal = ((d, d) for d in (1, 3, 8, 40, 59, 72, 96, 111, 128, 192, 256, 320, 512))
    dims = (*equal, (192, 128), (64, 512), (40, 24), (576, 512), (3, 1))
    strides = (
        *((layout, "contiguous") for layout in LAYOUTS), ("contiguous", "scalar"), ("transposed", "transposed"),
        ("contiguous", "columns"), ("last", "last"), ("contiguous", "offset"), ("contiguous", "heads"),
    )  # fmt: skip
    empty = (
        (0, 2, 5, 7, True), (0, 2, 5, 7, False), (2, 2, 0, 7, True), (2, 2, 5, 0, True), (2, 2, 5, 0, False),
        (2, 2, 0, 0, True),
        (2, 0, 5, 7, True), (0, 0, 0, 0, True),
    )  # fmt: skip
    lengths = (
        ((60, 0, 33), None), (None, (80, 0, 33)), ((1, 60, 59), (80, 1, 17)), ((0, 0, 0), (0, 0, 0)),
        ((16, 17, 60), (0, 80, 16)),
    )  # fmt: skip
    under = (
        {},
        {"band": causal, "dtype": BF16},
        {"band": TOP_LEFT, "mask": "bool"},
        {"dropout_p": 0.3, "bias_dims": "bqk"},
    )
    groups = ((6, 1), (6, 2), (6, 3), (6, 6), (1, 1), (16, 1))
    return {
        **{
            f"d {d}, dv {dv}, {dtype}": _dense(37, 50, dim=d, v_dim=dv, dtype=dtype, band=causal)
            for (d, dv), dtype in product(dims, (BF16, F32))
        },
        **{
            f"{layout}, dO {do_layout}, {'packed' if case.cu_q else 'dense'}": replace(
                case, band=causal, layout=layout, do_layout=do_layout, tiles=(32, 48))
            for layout, do_layout in strides
            for case in (_packed((0, 40, 40, 90), heads=4), _dense(90, batch=2, heads=4))
        },
        **{
            f"empty: batch {b}, heads {h}, {n} x {m}, {band}{', with gradient' * grad}": Case(
                batch=b, heads=h, kv_heads=h, q_len=n, k_len=m, band=band, grad=grad, sink=F32, slopes="h",
                bias_dims="hk")
            for (b, h, n, m, grad), band in product(empty, (FULL, causal))
        },
        **_named("heads", (
            Case(batch=2, heads=heads, kv_heads=kv_heads, q_len=50, k_len=60, dtype=dtype, band=causal, bias_dims="hqk",
                 tiles=(16, 32))
            for (heads, kv_heads), dtype in product(groups, (BF16, F64)))),
        **_named("lengths", (
            Case(batch=3, q_len=60, k_len=80, q_lens=q_lens, k_lens=k_lens, garbage=True, slopes="h", tiles=(32, 48),
                **options)
            for (q_lens, k_lens), options in product(lengths, under))),
    }  # fmt: skip


def _packed_cases() -> Named:
    return {
        **_named("few keys", (
            _packed((0, 76, 110, 256), (0, 1, 2, 3), dtype=dtype, std=3.0, band=band)
            for dtype, band in product((F16, BF16, F32), (causal, FULL)))),
        "empty sequence in the middle": _packed((0, 1, 1, 2), heads=9, kv_heads=3, band=causal),
        "empty sequences first": _packed((0, 0, 0, 0, 1), heads=21, kv_heads=7, dim=120, v_dim=120, dtype=BF16),
        "empty sequences first, long last": _packed(
            (0, 0, 0, 1023), (0, 0, 1, 2046), band=causal, dim=8, v_dim=8, heads=1, kv_heads=1),
        "empty sequence between long ones": _packed((0, 150, 150, 300), band=causal, dtype=F16),
        "empty sequence last": _packed((0, 70, 100, 100), (0, 30, 90, 90), band=causal),
        "queries without keys": _packed((0, 70, 100), (0, 0, 50), sink=F32),
        "keys without queries": _packed((0, 0, 50), (0, 70, 100), sink=F32, bias_dims="bqk"),
        "all sequences empty": _packed((0, 0, 0), heads=4),
        "all sequences empty, tokens there": Case(batch=2, q_len=9, k_len=9, cu_q=(0, 0, 0), garbage=True),
        "no sequence": Case(batch=0, q_len=9, k_len=9, cu_q=(0,), garbage=True),
        "tokens after the last sequence": Case(
            batch=2, q_len=60, k_len=70, cu_q=(0, 20, 50), cu_k=(0, 33, 64), garbage=True, band=causal),
        "lengths within packed sequences": Case(
            batch=3, q_len=90, k_len=90, cu_q=(0, 20, 50, 90), q_lens=(20, 11, 0), k_lens=(7, 30, 40), garbage=True,
            band=causal,
            slopes="bh", tiles=(16, 16)),
        "packed, every option": _packed(
            (0, 20, 90, 93), (0, 60, 90, 100), heads=6, band=causal, mask="bool", mask_dims="bk", bias_dims="bhqk",
            slopes="bh",
            sink=F32, softcap=5.0, dropout_p=0.2, tiles=(32, 48)),
        "packed, block mask": _packed((0, 200, 340), (0, 300, 431), mask="blocks", mask_dims="bh", band=Band(200, 20)),
    }  # fmt: skip


def _dropouts() -> Named:
    under = (
        {"band": causal, "tiles": (32, 48)}, {"bias_dims": "hqk", "tiles": (48, 16)}, {"sink": F32}, {"mask": "blocks"},
    )  # fmt: skip
    return {
        **{
            f"dropout {p}, {dtype}, {next(iter(options))}": _dense(
                100, 120, heads=4, dropout_p=p, dtype=dtype, dropout_seed=n - 1, **options)
            for p, dtype, (n, options) in product((0.001, 0.1, 0.5, 1.0), (F16, F32), enumerate(under))
        },
        "dropout, origin": Case(
            batch=2, q_len=70, k_len=90, dropout_p=0.4, band=causal, slopes="h", origin=(3, 5, 17, 9), tiles=(16, 48)),
        "dropout, origin, blocks": Case(
            batch=2, q_len=170, k_len=290, dropout_p=0.4, band=Band(100, 100), mask="blocks", mask_dims="bh",
            origin=(1, 2, 128, 256)),
    }  # fmt: skip


NAMED: Named = _numbers() | _masks() | _biases() | _block_masks() | _shapes() | _packed_cases() | _dropouts()
