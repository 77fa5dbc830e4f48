"""Key/value caches on a GPU: the other backends' cases and larger ones, bits that hold still, CUDA graphs, faults."""

from __future__ import annotations

import pool
import pytest
import torch
from cache_cases import BF16
from cache_jobs import CASES
from test_cache import soak
from torch import Tensor
from where import BACKEND, DEVICE, REHEARSAL

import tilewise
from tilewise import Band, KVCache, Rotary, causal
from tilewise.integrations import flash_attn
from tilewise.problem_cached import BAD_PAGE, PAST_END

pytestmark = pytest.mark.usefixtures("poisoned")


@pytest.mark.parametrize("case_name", CASES)
def test_case(case_name: str, verdicts: dict[str, pool.Verdict]) -> None:
    assert not verdicts[case_name].fault, verdicts[case_name].fault


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
    in_turn = [x.reshape(batch, 8, width, page, d).transpose(1, 2).flatten(0, 1) for x in (k, v)]
    k, v = (torch.empty_like(x).index_copy_(0, order, x) for x in in_turn)
    return q, KVCache(k, v, lengths, order.int().view(batch, width))


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
