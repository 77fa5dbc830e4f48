"""What is measured of key/value caches: decoding, in CUDA graphs, and a chunk of a prompt.

A graph has one call on each of several caches, of 256 MB or more in all, so that none is found in the L2 cache (60 MB
on an H200), and no launch is waited for. What is measured is the whole graph; its rate counts each stored byte of K and
V once a call. Ours is the public API, dispatch chooses the backend; all lengths are full.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import sdpa_kernel

import tilewise
from tilewise import KVCache, Rotary, causal

from . import gpu_cases, hopper_cases
from .gpu_cases import CUDNN, FA2, Attend, Built, Call, Cell, Peer, Prepare, Setting, ours
from .hopper_cases import FA3
from .rows import Row

LARGE = Setting().tokens  # the tests' setting has fewer tokens, and everything here is as many times smaller
ROTATED = 256e6  # bytes of K and V in a graph, at least
H200 = 4.8e12  # bytes a second, of its data sheet
SHEET, CONTIGUOUS = "4.8 TB/s", "ours, contiguous"


@dataclass(frozen=True)
class Form:
    """A decoding step: `queries` new tokens a sequence, over `length` keys each."""

    batch: int
    length: int
    heads: int = 32
    kv_heads: int = 8
    d: int = 128
    queries: int = 1
    page: int | None = None
    fp8: bool = False
    v_dim: int | None = None  # then v is a view of k (multi-head latent attention)
    appends: bool = False  # the last key is new, and turned with q in the call

    def smaller(self, setting: Setting) -> Form:
        times = LARGE // setting.tokens
        return replace(self, batch=max(1, self.batch // times), length=self.length // times)

    @property
    def bytes(self) -> int:
        """Of K and V, which a call reads."""
        columns = self.d if self.v_dim else 2 * self.d
        return self.batch * self.kv_heads * self.length * columns * (1 if self.fp8 else 2)

    @property
    def name(self) -> str:
        parts = [f"B {self.batch}", f"{self.heads}/{self.kv_heads} heads"]
        parts += [f"{self.queries} queries"] * (self.queries > 1) + [f"pages of {self.page}"] * bool(self.page)
        return ", ".join(parts + [f"d_v {self.v_dim}"] * bool(self.v_dim) + ["append, rotary"] * self.appends)


GRID = [Form(*size) for size in ((1, 8192), (8, 8192), (64, 8192), (1, 131072), (8, 32768), (64, 1024))]
MIDDLE = Form(8, 8192)
FORMS = [
    replace(MIDDLE, fp8=True),
    *(Form(32, 4096, heads, 1, 576, v_dim=512) for heads in (16, 128)),
    replace(MIDDLE, queries=16),
    replace(MIDDLE, appends=True),
]


def cells(setting: Setting) -> list[Cell]:
    flash = (Peer(FA3),) if hopper_cases.is_here(FA3) else ()
    beside = tuple(replace(peer, goal=">= 0.95") for peer in (*flash, Peer(CUDNN), Peer(FA2)))
    found = [decode(setting, "decode", form, *beside) for form in GRID]
    found += [
        decode(setting, "decode paged", replace(MIDDLE, page=page), Peer(CONTIGUOUS, ">= 0.95"), *flash)
        for page in (16, 64)
    ]
    one = Form(1, 131072, heads=8, kv_heads=1)
    found.append(decode(setting, "decode one head", one, by_the_sheet(setting, one, ">= 0.7")))
    found.append(one_sequence_more(setting))
    found.append(chunk(setting))
    found += [decode(setting, "decode forms", form, by_the_sheet(setting, form), *beside_form(form)) for form in FORMS]
    return found


def by_the_sheet(setting: Setting, form: Form, goal: str = "") -> Peer:
    """The ratio beside it is the share of the bandwidth."""
    small = form.smaller(setting)
    return Peer(SHEET, goal, ms=copies(setting, small) * small.bytes / H200 * 1e3, same_result=False)


def beside_form(form: Form) -> tuple[Peer, ...]:
    """FlashAttention-3 takes q in fp8 too, so its result is another."""
    return (Peer(FA3, same_result=not form.fp8),) if hopper_cases.is_here(FA3) else ()


# --- a decoding step -----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Step:
    """The tensors of a call; new: k and v of the appended token."""

    q: Tensor
    cache: KVCache
    rotary: Rotary | None = None
    new: tuple[Tensor, Tensor] | None = None


def decode(setting: Setting, subject: str, form: Form, *peers: Peer) -> Cell:
    small = form.smaller(setting)
    count = copies(setting, small)

    def build() -> Built:
        steps = [drawn(setting, small) for _ in range(count)]

        def beside(name: str) -> Prepare:
            if name == CONTIGUOUS:
                return in_turn(setting, ours_of, [replace(step, cache=contiguous(step.cache)) for step in steps])
            of = functools.partial(by_flash, small) if name == FA3 else functools.partial(by_pytorch, name)
            return in_turn(setting, of, steps)

        return Built(
            in_turn(setting, ours_of, steps), {peer.name: beside(peer.name) for peer in peers if peer.ms is None}
        )

    row = Row(
        subject, "forward", "fp8" if form.fp8 else "bf16", form.d, small.name, small.length, unit="TB/s"
    )  # fmt: skip
    return Cell(row, peers, count * small.bytes, build)


def copies(setting: Setting, form: Form) -> int:
    return math.ceil(ROTATED / (LARGE / setting.tokens) ** 2 / form.bytes)


def drawn(setting: Setting, form: Form) -> Step:
    where = {"device": setting.device, "dtype": torch.bfloat16}
    slots = torch.full((form.batch,), form.length - form.appends, dtype=torch.int32, device=setting.device)
    shape = (form.batch, form.kv_heads, form.length, form.d)
    k = torch.randn(shape, **where)
    v = k[..., : form.v_dim] if form.v_dim else torch.randn(shape, **where)
    scales = {}
    if form.fp8:
        k, v = k.to(torch.float8_e4m3fn), v.to(torch.float8_e4m3fn)
        scales = {name: torch.ones(form.kv_heads, device=setting.device) for name in ("k_scale", "v_scale")}
    pages = None
    if form.page:
        (k, v), pages = in_pages((k, v), form.page)
    q = torch.randn(form.batch, form.heads, form.queries, form.d, **where)
    rotary = new = None
    if form.appends:
        position = torch.arange(form.length, device=setting.device)
        angle = torch.outer(position, 1e4 ** -(torch.arange(0, form.d, 2, device=setting.device) / form.d))
        rotary = Rotary(angle.cos().bfloat16(), angle.sin().bfloat16())
        new = tuple(torch.randn(form.batch, form.kv_heads, 1, form.d, **where) for _ in range(2))
    return Step(q, KVCache(k, v, slots, pages, **scales), rotary, new)


def in_pages(tensors: tuple[Tensor, ...], size: int) -> tuple[tuple[Tensor, ...], Tensor]:
    """The same keys in pages (pages, Hkv, size, D) at random places, and their table."""
    batch, _, length, _ = tensors[0].shape
    order = torch.randperm(batch * length // size, device=tensors[0].device)
    paged = tuple(x.unflatten(2, (-1, size)).transpose(1, 2).flatten(0, 1)[order] for x in tensors)
    return paged, order.argsort().to(torch.int32).view(batch, -1)


def contiguous(cache: KVCache) -> KVCache:
    """The same keys, a tensor a sequence."""
    assert cache.pages is not None
    k, v = (x[cache.pages.long()].transpose(1, 2).flatten(2, 3) for x in (cache.k, cache.v))
    return KVCache(k, v, cache.lengths)


def in_turn(setting: Setting, of: Callable[[Step], Call], steps: list[Step]) -> Prepare:
    """The calls `of` the steps, one behind the other: of all of them one CUDA graph. Returns the first one's result."""

    def ready() -> Call:
        calls = [of(step) for step in steps]

        def run() -> Tensor:
            with torch.no_grad():
                first, *_ = [call() for call in calls]
            return first

        if setting.device == "cpu":
            return run
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):  # compiles, and allocates what is kept
            run()
        torch.cuda.current_stream().wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            result = run()

        def replay() -> Tensor:
            graph.replay()
            return result

        return replay

    return ready


def ours_of(step: Step) -> Call:
    def append() -> Tensor:
        step.cache.lengths.copy_(before)  # the call advances them: a copy that the peers do without
        return tilewise.attention_cached(step.q, step.cache, k=k, v=v, rotary=step.rotary)

    if step.new is None:
        return lambda: tilewise.attention_cached(step.q, step.cache)
    (k, v), before = step.new, step.cache.lengths.clone()
    return append


def by_pytorch(name: str, step: Step) -> Call:
    """One query sees all keys, so there is no mask."""
    q, k, v = step.q, step.cache.k, step.cache.v

    def attend() -> Tensor:
        with sdpa_kernel(gpu_cases.SDPA[name]):
            return F.scaled_dot_product_attention(q, k, v, enable_gqa=True)

    return attend


def by_flash(form: Form, step: Step) -> Call:
    """flash_attn_with_kvcache of FlashAttention-3: (B, S, H, D), pages (pages, size, H, D)."""
    cache = step.cache
    q, k, v = (x.transpose(1, 2) for x in (step.q, cache.k, cache.v))
    before = torch.full_like(cache.lengths, form.length - form.appends)  # ours may have run; it advances none
    given: dict[str, object] = {"cache_seqlens": before, "page_table": cache.pages, "causal": True}
    if form.v_dim:
        given["qv"], q, k = q[..., : form.v_dim], q[..., form.v_dim :], k[..., form.v_dim :]
    if form.fp8:
        q = q.to(torch.float8_e4m3fn)
        scales = {"k_descale": cache.k_scale, "v_descale": cache.v_scale}
        given |= {name: scale.expand(form.batch, -1) for name, scale in scales.items() if scale is not None}
    if step.new is not None and step.rotary is not None:
        given |= {name: x.transpose(1, 2) for name, x in zip("kv", step.new, strict=True)}
        given |= {"rotary_cos": step.rotary.cos, "rotary_sin": step.rotary.sin, "rotary_interleaved": False}
    attend = hopper_cases.module(FA3).flash_attn_with_kvcache
    return lambda: attend(q, k, v, **given).transpose(1, 2)


# --- beside ourselves ----------------------------------------------------------------------------------------------


def one_sequence_more(setting: Setting) -> Cell:
    """33 sequences take 33/32 of the time of 32: no wave of work is left nearly empty. Graphs of as many calls each."""
    other, form = (Form(n, 8192, heads=40).smaller(setting) for n in (32, 33))
    count, name = copies(setting, form), "ours, B 32"

    def build() -> Built:
        mine, theirs = ([drawn(setting, size) for _ in range(count)] for size in (form, other))
        return Built(in_turn(setting, ours_of, mine), {name: in_turn(setting, ours_of, theirs)})

    factor = form.bytes / other.bytes
    peer = Peer(
        name, ">= 0.95", factor=factor, flops=count * other.bytes, same_result=False, note="ratio of the rates"
    )  # fmt: skip
    row = Row("decode batch", "forward", "bf16", form.d, form.name, form.length, unit="TB/s")
    return Cell(row, (peer,), count * form.bytes, build)


def chunk(setting: Setting) -> Cell:
    """2k tokens of a prompt of which 32k are stored, beside the plain forward over the same keys."""
    times = LARGE // setting.tokens
    chunk, length, heads, kv_heads, d = 2048 // times, 34816 // times, 32, 8, 128

    def build() -> Built:
        step = drawn(setting, Form(1, length, heads, kv_heads, d, queries=chunk))
        attend: Attend = ours(replace(setting, backend=None), mask=causal)()

        def plain() -> Tensor:
            with torch.no_grad():
                return attend(step.q, step.cache.k, step.cache.v)

        def cached() -> Tensor:
            with torch.no_grad():
                return tilewise.attention_cached(step.q, step.cache)

        return Built(lambda: cached, {"ours, dense": lambda: plain})

    visible = chunk * (length - chunk) + chunk * (chunk + 1) / 2
    row = Row("chunked prefill", "forward", "bf16", d, f"causal, {chunk} queries", length)
    return Cell(row, (Peer("ours, dense", ">= 0.95"),), 4 * d * heads * visible, build)
