"""Key/value caches on a GPU: the cases against the reference, what the contract promises of them, graphs and a soak.

The tests of test_cache.py that hold for any backend are run again here, by the backend that dispatch chooses.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import cache_on_gpu
import pool
import pytest
import test_cache
import test_flash_attn_cache
import torch
from cache_cases import BF16, F16, F32, drawn, ints, same_bits
from close import assert_close
from torch import Tensor
from where import BACKEND, DEVICE, EVERY, REHEARSAL

from tilewise import KVCache, Rotary, attention_cached, causal, dispatch

REPEATS, STEPS = (3, 60) if REHEARSAL else (1000, 2000)

unchecked = test_cache.unchecked  # a fixture
AGAIN = (
    "a_sequence_does_not_see_its_batch", "where_keys_lie_changes_no_bit", "what_lies_beyond_changes_no_bit",
    "token_by_token_is_attention", "append_alone", "queries_without_new_keys_are_the_last_tokens",
    "fp8_is_rounded_and_clamped", "layers_whose_strides_pass_2_31", "nothing_to_do", "past_the_end_is_not_written",
    "pages_out_of_range_are_not_touched", "rows_out_of_range_are_absent", "garbage_lengths_are_clamped",
)  # fmt: skip
globals().update({f"test_{name}": getattr(test_cache, f"test_{name}") for name in AGAIN})
test_flash_attn_with_kvcache = test_flash_attn_cache.test_cases
test_lengths_by_number_and_slots_twice = test_flash_attn_cache.test_lengths_by_number_and_slots_twice


@pytest.fixture(autouse=True)
def on_the_device() -> Iterator[None]:
    with torch.device(DEVICE):
        yield


@pytest.fixture
def backend() -> str | None:
    return None


@pytest.mark.parametrize("case_name", list(cache_on_gpu.on_gpu())[::EVERY])
def test_case(case_name: str, verdicts: dict[str, pool.Verdict]) -> None:
    assert not verdicts[case_name].fault, verdicts[case_name].fault


def test_the_cases_go_to_a_kernel() -> None:
    """Dispatch falls back on "tiled", which would answer them all as well."""
    elsewhere = []
    for name, case in cache_on_gpu.on_gpu().items():
        call = case.build()
        given = {"cu_seqlens_q": ints([0, *torch.tensor(case.new).cumsum(0).tolist()])} if case.packed else {}
        problem = call.cache.problem(
            call.q, rotary=call.rotary, rows=None if case.rows is None else ints(case.rows), **call.options, **given
        )
        chosen = dispatch.choose(problem)
        if chosen is not dispatch.backend(BACKEND):
            elsewhere.append(f"{name}: {chosen.__name__}, for {dispatch.backend(BACKEND).why_not(problem)}")
    assert not elsewhere, "\n".join(elsewhere)


def test_the_pool_sees_faults_of_caches(monkeypatch: pytest.MonkeyPatch) -> None:
    case = cache_on_gpu.CacheCase(page=16)
    assert pool._fault(case, twice=False, backend=None) == ""
    build = cache_on_gpu.CacheCase.build

    def wrong(self: Any) -> Any:
        call = build(self)
        ask = call.run
        call.run = lambda backend: tuple(x * 1.1 for x in ask(backend))
        return call

    monkeypatch.setattr(cache_on_gpu.CacheCase, "build", wrong)
    assert "o: error / budget" in pool._fault(case, twice=False, backend=None)


# ---- real sizes ------------------------------------------------------------------------------------------------------


def filled(
    lengths: list[int], heads: int, dim: int, dtype: torch.dtype, page: int | None, seed: int = 0, room: int = 0
) -> tuple[KVCache, Tensor, Tensor]:
    """A cache with those lengths, NaN elsewhere, with `room` more keys a sequence; and its keys and values, dense."""
    make = torch.Generator().manual_seed(seed)
    batch, longest = len(lengths), max(lengths) + room
    size = page or 1
    longest = -(-longest // size) * size
    dense = [drawn((batch, heads, longest, dim), make).to(dtype) for _ in range(2)]
    lens = ints(lengths)
    beyond = torch.arange(longest) >= lens[:, None]
    k, v = (x.masked_fill(beyond[:, None, :, None], torch.nan) for x in dense)
    pages = None
    if page is not None:
        order = torch.randperm(batch * longest // page, generator=make, device="cpu").to(k.device)
        k, v = (x.unflatten(2, (-1, page)).transpose(1, 2).flatten(0, 1)[order] for x in (k, v))
        pages = order.argsort().to(torch.int32).view(batch, -1)
    return KVCache(k, v, lens, pages), *dense


LONG = [
    (64, 1, 1, F16, 16),
    (128, 8, 4, BF16, None),
    (128, 8, 4, BF16, 64),
    (128, 16, 1, BF16, 256),
    (64, 4, 5, F32, 7),
]


@pytest.mark.parametrize(("dim", "group", "queries", "dtype", "page"), LONG[: 2 if REHEARSAL else None])
def test_thousands_of_keys(dim: int, group: int, queries: int, dtype: torch.dtype, page: int | None) -> None:
    """Against the fp64 reference: many splits of a sequence, beside one with a few keys."""
    lengths = [700, 130, 3] if REHEARSAL else [9000, 4097, 5]
    cache, k, v = filled(lengths, 2, dim, dtype, page)
    q = drawn((3, 2 * group, queries, dim), torch.Generator().manual_seed(9)).to(dtype)
    o, lse = attention_cached(q, cache, return_lse=True)
    q_lens = ints([queries] * 3)
    assert_close(
        {"o": o, "lse": lse}, q, k, v, None, None, mask=causal, q_lens=q_lens, k_lens=cache.lengths
    )  # fmt: skip


@pytest.mark.parametrize(("page", "queries"), [(None, 1), (16, 1), (16, 4)][: 2 if REHEARSAL else None])
def test_a_sequence_alone_has_the_bits_that_it_has_among_33(page: int | None, queries: int) -> None:
    longest = 300 if REHEARSAL else 3000
    lengths = [(n * 997) % longest + queries for n in range(33)]
    cache, _, _ = filled(lengths, 8, 128, BF16, page)
    q = drawn((33, 40, queries, 128), torch.Generator().manual_seed(1)).to(BF16)
    o, lse = attention_cached(q, cache, return_lse=True)
    assert o.isfinite().all()
    for b in range(0, 33, 4 if not REHEARSAL else 16):
        own = slice(b, b + 1)
        if page is None:
            alone = KVCache(cache.k[own], cache.v[own], cache.lengths[own])
        else:
            assert cache.pages is not None
            alone = KVCache(cache.k, cache.v, cache.lengths[own], cache.pages[own])
        for got in (
            attention_cached(q[own], alone, return_lse=True),
            attention_cached(q[own], cache, rows=ints([b]), return_lse=True),
        ):
            assert same_bits(got[0], o[own]), b
            assert same_bits(got[1], lse[own]), b


@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize("fault", ["past the end", "page", "row"])
@pytest.mark.parametrize("queries", [1, 40])
def test_faults_leave_the_memory_around_alone(fault: str, queries: int) -> None:
    """The storage lies between NaN, where pages before the first and after the last would be: nothing of it is written,
    and nothing of it is seen. What is stored in order all the same is stored."""
    pages, page, guard = 12, 16, 4
    around = [torch.full((pages + 2 * guard, 2, page, 64), torch.nan, dtype=BF16) for _ in range(2)]
    k, v = (x[guard:-guard] for x in around)
    table = torch.arange(pages, dtype=torch.int32).view(3, 4)
    lengths = [20, 3, 17]
    for s, n in enumerate(lengths):
        for j in range(n):
            k[table[s, j // page], :, j % page] = v[table[s, j // page], :, j % page] = 0.5
    rows, capacity = [0, 1, 2], 4 * page
    if fault == "past the end":
        lengths[0] = capacity - queries // 2
        k[:4] = v[:4] = 0.5
    elif fault == "page":
        table[0, 1], table[1, 0], table[2, 2] = pages, -1, pages + guard - 1
    else:
        rows = [0, 3, -5]
    cache = KVCache(k, v, ints(lengths), table)
    before = [x.clone() for x in around]
    q, new_k, new_v = (torch.ones(3, h, queries, 64, dtype=BF16) for h in (8, 2, 2))
    o = attention_cached(q, cache, k=new_k, v=new_v, rows=ints(rows))
    assert o.isfinite().all()
    stored = [n + queries if row == s else n for s, (n, row) in enumerate(zip(lengths, rows, strict=True))]
    assert cache.lengths.tolist() == [min(n, capacity) for n in stored]
    noted = test_cache.PAST_END if fault == "past the end" else test_cache.BAD_PAGE
    assert int(cache.status) == noted
    for s, n in enumerate(lengths):
        for j in range(n, cache.lengths.tolist()[s]):
            if 0 <= (at := int(table[s, j // page])) < pages:
                for x in before:
                    x[guard + at, :, j % page] = 1.0
    for x, y in zip(around, before, strict=True):
        assert same_bits(x, y)


# ---- graphs and races ------------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("unchecked", "cuda")
@pytest.mark.parametrize("page", [None, 16])
def test_a_graph_replays_while_the_cache_grows(page: int | None) -> None:
    """Its results, and what it stores, are those of eager calls, bit for bit; at the end nothing more is stored."""
    steps, room, batch = 40, 35, 3
    lengths = [300, 0, 17]
    caches = [filled(lengths, 2, 64, BF16, page, room=room)[0] for _ in range(2)]
    capacity = caches[0].shape.capacity
    angle = torch.outer(torch.arange(capacity), 100 ** -(torch.arange(32) / 32))
    rotary = Rotary(angle.cos(), angle.sin())
    q, k, v = (drawn((steps, batch, h, 1, 64), torch.Generator().manual_seed(h)).to(BF16) for h in (8, 2, 2))
    given = [x[0].clone() for x in (q, k, v)]

    def step(cache: KVCache) -> tuple[Tensor, Tensor]:
        q, k, v = given
        return attention_cached(q, cache, k=k, v=v, rotary=rotary, return_lse=True)

    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        step(filled(lengths, 2, 64, BF16, page, room=room)[0])  # compiles
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        result = step(caches[0])
    for n in range(steps):
        for x, tokens in zip(given, (q, k, v), strict=True):
            x.copy_(tokens[n])
        graph.replay()
        for x, y in zip(result, step(caches[1]), strict=True):
            assert same_bits(x, y), n
    assert caches[0].lengths.tolist() == caches[1].lengths.tolist()
    assert caches[0].lengths.tolist() == [min(n + steps, capacity) for n in lengths]
    assert int(caches[0].status) == int(caches[1].status) == test_cache.PAST_END
    assert same_bits(caches[0].k, caches[1].k)
    assert same_bits(caches[0].v, caches[1].v)


@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize(("page", "queries"), [(None, 1), (16, 1), (16, 70)])
def test_a_thousand_repeats_have_the_same_bits(page: int | None, queries: int) -> None:
    """Beside products on another stream, so that programs run in ever other orders."""
    lengths = [100 * n + queries for n in range(2 if REHEARSAL else 17)]
    cache, _, _ = filled(lengths, 2, 64, BF16, page)
    q = drawn((len(lengths), 8, queries, 64), torch.Generator().manual_seed(2)).to(BF16)
    first = attention_cached(q, cache, return_lse=True)
    noise, side = torch.randn(2048 if DEVICE == "cuda" else 8, 2048, dtype=BF16), None
    if DEVICE == "cuda":
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
    unlike = torch.zeros((), dtype=torch.int64)
    for n in range(REPEATS):
        if side is not None and n % 5 == 0:
            with torch.cuda.stream(side):
                noise @ noise
        for x, y in zip(attention_cached(q, cache, return_lse=True), first, strict=True):
            unlike += (x != y).sum()
    assert unlike.item() == 0
    assert not any(x.isnan().any() for x in first)


@pytest.mark.usefixtures("unchecked", "cuda")
@pytest.mark.parametrize("page", [None, 16])
def test_nothing_waits_for_the_device(page: int | None) -> None:
    cache, _, _ = filled([300, 0, 17], 2, 64, BF16, page, room=50)
    q, k, v = (torch.randn(3, h, 1, 64, dtype=BF16) for h in (8, 2, 2))
    rows = ints([2, 0, 1])
    attention_cached(q, cache, k=k, v=v, rows=rows)  # compiles
    torch.cuda.set_sync_debug_mode("error")
    try:
        attention_cached(q, cache, k=k, v=v, rows=rows)
        attention_cached(q, cache)
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize("seed", range(1 if REHEARSAL else 3))
def test_soak(seed: int) -> None:
    test_cache.soak(STEPS, seed, None)
