"""Decoding from a key/value cache: cells of few queries and many keys, bound by the bytes of K and V.

What is timed is a CUDA graph of as many calls as have 256 MB of keys and values in all, each on a cache of its own: the
L2 holds none of the next one's. Peers read the same memory, as theirs. TB/s count K and V once (of multi-head latent
attention K, in which V lies), and nothing else.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import sdpa_kernel

import tilewise
from tilewise import KVCache, Rotary, causal

from . import hopper_cases
from .gpu_cases import CUDNN, FA2, SDPA, Built, Call, Cell, Peer, Prepare, Setting
from .hopper_cases import FA3
from .rows import Row

ROTATED_BYTES = 256e6
DATA_SHEET = "4.8 TB/s"  # of an H200
CONTIGUOUS, STORED, DENSE = "ours, contiguous", "ours, stored before", "ours, dense"
GRID = [(1, 8192), (8, 8192), (64, 8192), (1, 131072), (8, 32768), (64, 1024)]


@dataclass(frozen=True)
class Shape:
    batch: int
    keys: int
    heads: int = 32
    kv_heads: int = 8
    d: int = 128
    v_dim: int = 128
    queries: int = 1
    page: int = 0
    fp8: bool = False
    latent: bool = False  # V is K's first columns

    @property
    def bytes(self) -> int:
        columns = self.d if self.latent else self.d + self.v_dim
        return self.batch * self.keys * self.kv_heads * columns * (1 if self.fp8 else 2)

    def scaled(self, setting: Setting) -> Shape:
        keys = self.keys * setting.tokens // Setting().tokens
        return replace(self, keys=max(keys, self.page, self.queries))


def cells(setting: Setting) -> list[Cell]:
    found = [decode(setting, Shape(*size), ">= 0.95") for size in GRID]
    for page in (16, 64):
        for batch in (8, 64):
            shape = Shape(batch, 8192, page=page)
            peers = {Peer(CONTIGUOUS, ">= 0.95", same_result=False): replace(shape, page=0)}
            found.append(cell(setting, "decode paged", f"page {page}, batch {batch}", shape, peers))
    found.append(of_data_sheet(setting, "decode one head", "batch 1, heads 8/1", Shape(1, 131072, 8, 1), ">= 0.7"))
    wide = Shape(33, 8192, heads=40)
    before = Peer("ours, batch 32", ">= 1.0", factor=33 / 32, same_result=False, note="ratio: 33/32 of its time / ours")
    found.append(cell(setting, "decode odd batch", "batch 33, heads 40/8", wide, {before: replace(wide, batch=32)}))
    found.append(decode(setting, Shape(8, 8192, queries=16), "", "decode 16 queries"))
    found.append(of_data_sheet(setting, "decode fp8", "batch 8", Shape(8, 8192, fp8=True)))
    for heads in (16, 128):
        shape = Shape(32, 4096, heads, 1, d=576, v_dim=512, latent=True)
        found.append(of_data_sheet(setting, "decode latent", f"batch 32, heads {heads}/1, dv 512", shape))
    return [cell for cell in (*found, appending(setting), prefill(setting)) if cell.peers]


def name_of(shape: Shape) -> str:
    return f"batch {shape.batch}"


def decode(setting: Setting, shape: Shape, goal: str, subject: str = "decode") -> Cell:
    """Beside everybody who reads a contiguous cache of K and V."""
    names = [FA3] * hopper_cases.is_here(FA3) + ([CUDNN, FA2] if shape.queries == 1 else [])
    peers: dict[Peer, Shape | None] = {Peer(name, goal): None for name in names}
    return cell(setting, subject, name_of(shape), shape, peers)


def of_data_sheet(setting: Setting, subject: str, mask: str, shape: Shape, goal: str = "") -> Cell:
    ideal_ms = shape.bytes / 4.8e12 * 1e3
    peer = Peer(DATA_SHEET, goal, factor=0.0, slack_ms=ideal_ms, same_result=False, note="ratio: of the bandwidth")
    return cell(setting, subject, mask, shape, {peer: shape})


def cell(setting: Setting, subject: str, mask: str, shape: Shape, peers: dict[Peer, Any]) -> Cell:
    """peers: each with the shape of a call of ours, or None for a call of its own."""
    small = shape.scaled(setting)
    copies = copies_of(setting, shape)

    def build() -> Built:
        q, caches = filled(setting, small, copies)
        return Built(
            graph(setting, [asked(q, cache) for cache in caches]),
            {
                peer.name: graph(setting, [theirs(peer.name, q, cache) for cache in caches])
                if other is None
                else (lambda other=other: again(setting, other.scaled(setting), copies))
                for peer, other in peers.items()
            },
        )

    row = Row(subject, "", "bf16", shape.d, mask, shape.keys, note="TB/s of K and V")
    peers_there = tuple(replace(peer, note=peer.note or row.note) for peer in peers)
    return Cell(row, peers_there, shape.bytes, build, calls=copies)


def again(setting: Setting, shape: Shape, copies: int) -> Call:
    """The call of another shape, on memory of its own."""
    q, caches = filled(setting, shape, copies)
    return graph(setting, [asked(q, cache) for cache in caches])()


def copies_of(setting: Setting, shape: Shape) -> int:
    return max(2, math.ceil(ROTATED_BYTES / shape.bytes)) if setting.device == "cuda" else 1


def filled(setting: Setting, shape: Shape, copies: int) -> tuple[Tensor, list[KVCache]]:
    make = torch.Generator(device=setting.device).manual_seed(0)

    def drawn(*size: int) -> Tensor:
        return torch.randn(size, generator=make, device=setting.device, dtype=torch.bfloat16)

    def one() -> KVCache:
        outer, pages = (shape.batch, shape.kv_heads, shape.keys), None
        if shape.page:
            width = shape.keys // shape.page
            outer = (shape.batch * width, shape.kv_heads, shape.page)
            order = torch.randperm(outer[0], generator=make, device=setting.device)
            pages = order.int().view(shape.batch, width)
        k = drawn(*outer, shape.d)
        v = k[..., : shape.v_dim] if shape.latent else drawn(*outer, shape.v_dim)
        if shape.fp8:
            k, v = k.to(torch.float8_e4m3fn), v.to(torch.float8_e4m3fn)
        lengths = torch.full((shape.batch,), shape.keys, dtype=torch.int32, device=setting.device)
        return KVCache(k, v, lengths, pages)

    return drawn(shape.batch, shape.heads, shape.queries, shape.d), [one() for _ in range(copies)]


def asked(q: Tensor, cache: KVCache, **options: Any) -> Call:
    def call() -> Tensor:
        with torch.no_grad():
            return tilewise.attention_cached(q, cache, mask=causal, **options)

    return call


def theirs(name: str, q: Tensor, cache: KVCache) -> Call:
    if name == FA3:
        attend = hopper_cases.module(FA3).flash_attn_with_kvcache
        k, v, at = cache.k.transpose(1, 2), cache.v.transpose(1, 2), q.transpose(1, 2)

        def call() -> Tensor:
            o = attend(at, k, v, cache_seqlens=cache.lengths, causal=True)
            return (o[0] if isinstance(o, tuple) else o).transpose(1, 2)

        return call

    def by_pytorch() -> Tensor:
        with torch.no_grad(), sdpa_kernel(SDPA[name]):
            return F.scaled_dot_product_attention(q, cache.k, cache.v, enable_gqa=True)

    return by_pytorch


def graph(setting: Setting, calls: list[Call]) -> Prepare:
    """What replays all of the calls at once and returns the last one's result; without a GPU, what runs the first."""

    def prepare() -> Call:
        if setting.device != "cuda":
            return calls[0]
        stream = torch.cuda.Stream()
        with torch.cuda.stream(stream):
            calls[0]()
        torch.cuda.synchronize()
        captured = torch.cuda.CUDAGraph()
        with torch.cuda.graph(captured):
            for call in calls:
                result = call()

        def replay() -> Any:
            captured.replay()
            return result

        return replay

    return prepare


def appending(setting: Setting) -> Cell:
    """A step of a model: a token's key turned and stored, its query turned and answered; beside the last alone."""
    shape = Shape(8, 8192)
    small, copies = shape.scaled(setting), copies_of(setting, shape)

    def build() -> Built:
        q, caches = filled(setting, small, copies)
        k, v = (torch.randn_like(q[:, : shape.kv_heads]) for _ in range(2))
        angle = torch.rand(small.keys, shape.d // 2, device=setting.device)
        rotary = Rotary(angle.cos(), angle.sin())

        def step(cache: KVCache) -> Call:
            one_less = torch.full_like(cache.lengths, small.keys - 1)
            attend = asked(q, cache, k=k, v=v, rotary=rotary)

            def call() -> Tensor:
                cache.lengths.copy_(one_less)  # as many keys at each replay
                return attend()

            return call

        alone = graph(setting, [asked(q, cache) for cache in caches])
        return Built(graph(setting, [step(cache) for cache in caches]), {STORED: alone})

    row = Row("decode appending", "", "bf16", shape.d, "batch 8, rotary", shape.keys, note="TB/s of K and V")
    return Cell(row, (Peer(STORED, same_result=False, note=row.note),), shape.bytes, build, calls=copies)


def prefill(setting: Setting) -> Cell:
    """2k queries, of a sequence with 32k keys before them, beside the plain forward on the same keys."""
    queries, shape = 2048 * setting.tokens // Setting().tokens, Shape(1, 34816)
    small = shape.scaled(setting)

    def build() -> Built:
        q, (cache,) = filled(setting, replace(small, queries=queries), 1)
        plain: Callable[[], Call] = lambda: lambda: tilewise.attention(q, cache.k, cache.v, mask=causal)  # noqa: E731
        return Built(graph(setting, [asked(q, cache)]), {DENSE: plain})

    pairs = 2048 * (34816 - 1024)
    row = Row("chunked prefill", "", "bf16", shape.d, "2k onto 32k", shape.keys)
    return Cell(row, (Peer(DENSE, ">= 0.95"),), 4.0 * shape.heads * shape.d * pairs, build)
