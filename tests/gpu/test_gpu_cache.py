"""Key/value caches on a GPU: the other backends' cases and larger ones, bits that hold still, CUDA graphs, faults."""

from __future__ import annotations

import os
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from multiprocessing import get_context
from typing import Any

import pytest
import torch
from cache_cases import BF16, F16, F32, F64, FP8, CacheCase, Call, sample
from test_cache import NAMED, soak
from torch import Tensor
from where import BACKEND, DEVICE, REHEARSAL, moved, set_up

import tilewise
from tilewise import Band, KVCache, Rotary, causal, sliding_window
from tilewise.integrations import flash_attn
from tilewise.problem_cached import BAD_PAGE, PAST_END

LONG = CacheCase(stored=(5000, 2047, 0, 2600), new=(1, 1, 1, 1), room=5100, heads=8, kv_heads=2, dim=128, dtype=BF16)
SIZED = {
    "several blocks": LONG,
    "in pages of 16": replace(LONG, page=16),
    "in pages of 64": replace(LONG, page=64, band=sliding_window(3000)),
    "in pages of 256": replace(LONG, page=256),
    "in pages of 7": replace(LONG, page=7, dtype=F16),
    "all heads share keys": replace(LONG, heads=16, kv_heads=1),
    "no heads do": replace(LONG, heads=4, kv_heads=4, dim=64),
    "16 queries": replace(LONG, new=(16, 16, 16, 16)),
    "5 queries, all on scores": replace(LONG, new=(5, 5, 5, 5), sink=True, softcap=20.0, slopes="bh"),
    "many queries": replace(LONG, new=(300, 300, 300, 300), room=5400),
    "many queries, turned": replace(LONG, new=(300, 300, 300, 300), room=5400, rotary="half", rotary_dim=128),
    "many queries in pages": replace(LONG, new=(300, 170, 1, 30), room=5400, page=16),
    "long and short, packed": replace(LONG, new=(300, 1, 17, 1), room=5400, packed=True, page=64),
    "turned": replace(LONG, rotary="half", rotary_dim=128),
    "turned by pairs, padded": replace(LONG, rotary="interleaved", rotary_dim=64, starts=(7, 2000, 0, 3)),
    "fp8": replace(LONG, storage=FP8), "fp8 in pages": replace(LONG, storage=FP8, page=64, dtype=F16),
    "latent": replace(LONG, heads=16, kv_heads=1, dim=576, v_dim=512, v_in_k=True, page=64),
    "latent, 128 heads": replace(LONG, heads=128, kv_heads=1, dim=576, v_dim=512, v_in_k=True),
    "rows of 222 bytes": replace(LONG, dim=111, v_dim=72, page=16, dtype=F16, heads=2, kv_heads=1),
    "head size 256": replace(LONG, dim=256), "head size 96": replace(LONG, dim=96, dtype=F16),
    "fp32": replace(LONG, dtype=F32, dim=64), "fp32, 128": replace(LONG, dtype=F32),
    "a prefix": replace(LONG, prefix=3000, prefix_page=16, page=16, rotary="half", rotary_dim=128, sink=True),
    "places of their own": replace(LONG, rows=(5, -1, 1, 0)),
    "a layer of many": replace(LONG, strided=True),
}  # fmt: skip
# Of one value of fp16 (see tests/interpreted) the error is no average; fp64 is "tiled"'s.
SAMPLES = [
    seed for seed in range(150)
    if (case := sample(seed)).dtype is not F64 and not (case.dtype is not F32 and (case.v_dim or case.dim) == 1)
]  # fmt: skip
CASES = SIZED | {f"named {name}": case for name, case in NAMED.items() if "sizes 1," not in name}
CASES |= {f"sample {seed}": sample(seed) for seed in SAMPLES}
if REHEARSAL:
    CASES = dict(list(CASES.items())[:: len(CASES) // 6])

pytestmark = pytest.mark.usefixtures("poisoned")


class Placed(Call):
    """A case's call on the device; what is stored there comes back."""

    def ask(self, backend: str | None, options: dict[str, Any]) -> tuple[Tensor, Tensor]:
        there = placed(self.cache)
        options = {name: placed(x) for name, x in options.items()}
        o, lse = tilewise.attention_cached(moved(self.q), there, return_lse=True, backend=backend, **options)
        assert there.status is not None
        assert self.cache.status is not None
        for x, y in ((self.cache.k, there.k), (self.cache.v, there.v), (self.cache.lengths, there.lengths)):
            x.copy_(y)
        self.cache.status.copy_(there.status)
        return o.cpu(), lse.cpu()


def placed(x: Any) -> Any:
    if isinstance(x, KVCache):
        k = moved(x.k)
        v = k[..., : x.shape.v_dim] if x.shape.v_in_k else moved(x.v)
        tables = {name: moved(getattr(x, name)) for name in ("pages", "k_scale", "v_scale", "starts")}
        return KVCache(k, v, moved(x.lengths), **tables)
    return Rotary(moved(x.cos), moved(x.sin), x.style) if isinstance(x, Rotary) else moved(x)


def fault_of(name: str) -> str:
    """ "" or what is wrong. Alone in its process's turn, for most of the time goes into compiling."""
    case = CASES[name]
    try:
        call = Placed(case)
        before = call.cache.k.clone(), call.cache.v.clone()
        with tilewise.checked():
            o, lse = call.run(BACKEND)
        call.check_storage(*before)
        call.check_results(o, lse)
    except Exception as error:
        return f"{case}\n{type(error).__name__}: {error}"
    return ""


@pytest.fixture(scope="module")
def faults() -> Iterator[dict[str, str]]:
    processes = 2 if REHEARSAL else max(1, min(14, os.cpu_count() or 1))
    with ProcessPoolExecutor(processes, get_context("spawn"), set_up) as pool:
        yield dict(zip(CASES, pool.map(fault_of, CASES), strict=True))


@pytest.mark.parametrize("name", CASES)
def test_case(name: str, faults: dict[str, str]) -> None:
    assert not faults[name], faults[name]


# ---- bits ------------------------------------------------------------------------------------------------------------


def filled(batch: int, keys: int, page: int = 0, dtype: torch.dtype = BF16, d: int = 128) -> tuple[Tensor, KVCache]:
    """(q, a cache of random keys). Each sequence's numbers are its own, whatever the batch."""
    q, k, v = (
        torch.stack([
            torch.randn(heads, n, d, generator=torch.Generator(device=DEVICE).manual_seed(7 * b + m), device=DEVICE)
            for b in range(batch)
        ]).to(dtype)
        for m, (heads, n) in enumerate(((32, 1), (8, keys), (8, keys)))
    )  # fmt: skip
    lengths = torch.tensor([keys - 37 * b % keys for b in range(batch)], dtype=torch.int32, device=DEVICE)
    if not page:
        return q, KVCache(k, v, lengths)
    width = keys // page
    order = torch.randperm(batch * width, generator=torch.Generator().manual_seed(0)).to(DEVICE)
    pages = torch.empty(batch * width, dtype=torch.int32, device=DEVICE)
    pages[:] = order
    k, v = (
        torch.empty_like(x.reshape(batch, 8, width, page, d).transpose(1, 2).flatten(0, 1)).index_copy_(
            0, order, x.reshape(batch, 8, width, page, d).transpose(1, 2).flatten(0, 1)
        )
        for x in (k, v)
    )
    return q, KVCache(k, v, lengths, pages.view(batch, width))


@pytest.mark.parametrize("page", [0, 16, 64])
@pytest.mark.parametrize(("keys", "most"), [(1024, 70), (8192, 70), (32768, 20)])
def test_a_sequence_does_not_see_its_batch(keys: int, most: int, page: int, cuda: None) -> None:
    """Alone its pieces are shared by many programs, among many each program has whole blocks. Of 32768 keys so
    many blocks are merged that the order of their sum may differ."""
    q, cache = filled(most, keys, page)
    o, lse = tilewise.attention_cached(q, cache, mask=causal, return_lse=True)
    for batch in (1, 3, most // 2):
        q, cache = filled(batch, keys, page)
        some = tilewise.attention_cached(q, cache, mask=causal, return_lse=True)
        assert torch.equal(some[0], o[:batch])
        assert torch.equal(some[1], lse[:batch])


def test_repeats_have_the_same_bits(cuda: None) -> None:
    q, cache = filled(3, 8192, 16)
    expected = tilewise.attention_cached(q, cache, mask=causal)
    noise, side = torch.randn(2048, 2048, device=DEVICE, dtype=BF16), torch.cuda.Stream()
    unlike = torch.zeros((), dtype=torch.int64, device=DEVICE)
    for n in range(1000):
        if n % 10 == 0:
            with torch.cuda.stream(side):
                noise @ noise
        unlike += (tilewise.attention_cached(q, cache, mask=causal) != expected).any()
    assert int(unlike) == 0


@pytest.fixture
def unchecked(monkeypatch: pytest.MonkeyPatch) -> None:
    """The hot path: contents are not looked at."""
    monkeypatch.setattr("tilewise.cache.checks_contents", lambda device: False)


# ---- graphs ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("page", [0, 16])
def test_one_graph_replays_while_the_cache_grows(page: int, cuda: None, unchecked: None) -> None:
    """Append, rotary and attention in the graph: each replay is what eager code does."""
    angle = torch.outer(torch.arange(8192.0, device=DEVICE), 10000 ** -(torch.arange(64.0, device=DEVICE) / 64))
    rotary = Rotary(angle.cos(), angle.sin())
    caches = []
    for _ in range(2):
        _, cache = filled(3, 8192, page)
        cache.lengths.copy_(torch.tensor([700, 2040, 5]))
        caches.append(cache)
    q, k, v = (torch.randn(3, heads, 1, 128, device=DEVICE).to(BF16) for heads in (32, 8, 8))

    def step(cache: KVCache) -> Tensor:
        return tilewise.attention_cached(q, cache, k=k, v=v, mask=causal, rotary=rotary)

    lengths = caches[1].lengths.clone()
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        step(caches[1])
    torch.cuda.synchronize()
    caches[1].lengths.copy_(lengths)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = step(caches[1])
    caches[1].lengths.copy_(lengths)
    for _ in range(20):
        for x in (q, k, v):
            x.normal_()
        expected = step(caches[0])
        graph.replay()
        assert torch.equal(captured, expected)
    assert torch.equal(caches[0].lengths, caches[1].lengths)
    assert caches[0].lengths.tolist() == [720, 2060, 25]


# ---- faults and places -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("fault", ["no page", "no room", "no slot"])
def test_faults_are_noted_and_write_nothing(fault: str, cuda: None, unchecked: None) -> None:
    pages = torch.tensor([[0, 1], [2, 7 if fault == "no page" else 3]], dtype=torch.int32, device=DEVICE)
    lengths = torch.tensor([15, 32 if fault == "no room" else 20], dtype=torch.int32, device=DEVICE)
    k, v, q, new = (torch.randn(*shape, device=DEVICE, dtype=BF16)
                    for shape in ((4, 2, 16, 64), (4, 2, 16, 64), (2, 8, 1, 64), (2, 2, 1, 64)))  # fmt: skip
    cache = KVCache(k, v, lengths, pages)
    rows = torch.tensor([0, 5 if fault == "no slot" else 1], dtype=torch.int32, device=DEVICE)
    before = k.clone()
    o, lse = tilewise.attention_cached(q, cache, k=new, v=new, mask=causal, rows=rows, return_lse=True)
    assert cache.status is not None
    assert int(cache.status) == {"no page": BAD_PAGE, "no room": PAST_END, "no slot": BAD_PAGE}[fault]
    assert [tuple(x) for x in (k != before).any(-1).any(1).nonzero().tolist()] == [(0, 15)]
    assert torch.isfinite(o).all()
    with pytest.raises(ValueError, match="pages or rows" if fault != "no room" else "past the end"):
        cache.check()
    if fault == "no slot":
        assert (lse[1] == -torch.inf).all()


def test_strides_past_2_31(cuda: None) -> None:
    memory = torch.empty(2**31 + 2**21, dtype=BF16, device=DEVICE)
    k = memory.as_strided((2, 2, 300, 64), (2**31, 300 * 64, 64, 1))
    v = memory.as_strided((2, 2, 300, 64), (2**31, 300 * 64, 64, 1), 2**20)
    dense = [torch.randn(2, 2, 300, 64, device=DEVICE).to(BF16) for _ in range(2)]
    k.copy_(dense[0]), v.copy_(dense[1])
    lengths = torch.tensor([300, 170], dtype=torch.int32, device=DEVICE)
    q = torch.randn(2, 8, 3, 64, device=DEVICE).to(BF16)
    expected = tilewise.attention_cached(q, KVCache(*dense, lengths), mask=causal)
    assert torch.equal(tilewise.attention_cached(q, KVCache(k, v, lengths), mask=causal), expected)
    cache = KVCache(k, v, lengths.clone())
    cache.append(k[:, :, :3].contiguous(), v[:, :, :3].contiguous(), lens=torch.tensor([0, 3], device=DEVICE).int())
    assert torch.equal(k[1, :, 170:173], dense[0][1, :, :3])


def test_many_queries_go_to_the_kernels_for_dense_tensors(cuda: None) -> None:
    """Bit for bit: the storage is k and v, its lengths are k_lens."""
    q, cache = filled(2, 2048)
    q = torch.randn(2, 32, 200, 128, device=DEVICE).to(BF16)
    got = tilewise.attention_cached(q, cache, mask=causal, return_lse=True)
    expected = tilewise.attention(q, cache.k, cache.v, mask=causal, k_lens=cache.lengths, return_lse=True)
    assert all(torch.equal(x, y) for x, y in zip(got, expected, strict=True))


def test_flash_attn_with_kvcache(cuda: None) -> None:
    q, cache = filled(2, 2048)
    k, v = cache.k.transpose(1, 2).contiguous(), cache.v.transpose(1, 2).contiguous()
    expected = tilewise.attention_cached(q, cache, mask=Band(None, 0))
    found = flash_attn.flash_attn_with_kvcache(q.transpose(1, 2), k, v, cache_seqlens=cache.lengths, causal=True)
    assert torch.equal(found.transpose(1, 2), expected)


@pytest.mark.parametrize("seed", range(1 if REHEARSAL else 3))
def test_soak(seed: int) -> None:
    soak(20 if REHEARSAL else 400, seed, BACKEND, DEVICE)
