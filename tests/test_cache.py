"""Key/value caches: what is stored, what is answered, what is refused, and bits that do not depend on the batch."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

import pytest
import torch
from cache_cases import BF16, F16, FP8, CacheCase, ints, same_bits, sample
from torch import Tensor

import tilewise
from tilewise import Band, KVCache, OutOfPages, PagePool, Rotary, causal, sliding_window
from tilewise.problem_cached import BAD_PAGE, PAST_END, of_cached

SAMPLES, CHUNK = 150, 50
NAN = torch.nan

NAMED = {
    "one token, nothing stored": CacheCase(stored=(0,), new=(1,)),
    "16 speculative queries": CacheCase(stored=(300, 0, 17), new=(16, 16, 16), room=320, page=16, dtype=BF16),
    "more keys than a tile": CacheCase(stored=(1100, 511), new=(1, 1), room=1200, page=64, dtype=F16),
    "chunked prefill": CacheCase(stored=(70, 513), new=(300, 300), room=820, page=16, band=sliding_window(200)),
    "prefill and decode in one call": CacheCase(
        stored=(0, 37, 200, 5, 0), new=(130, 1, 1, 0, 3), packed=True, room=210, page=16, rotary="half", dtype=BF16
    ),
    "pages of one key": CacheCase(page=1, room=40),
    "pages of 256": CacheCase(page=256, stored=(255, 256, 257), new=(2, 1, 1), room=300),
    "latent attention": CacheCase(heads=16, kv_heads=1, dim=576, v_dim=512, v_in_k=True, stored=(40, 17), new=(1, 1),
                                  page=64, dtype=BF16),
    "fp8 pages, a scale a head": CacheCase(storage=FP8, dtype=BF16, kv_heads=4, page=16, rotary="interleaved"),
    "padding on the left": CacheCase(stored=(0, 0, 0), new=(9, 9, 9), starts=(4, 0, 9), rotary="half"),
    "absent sequences": CacheCase(rows=(3, -1, 0), page=16, sink=True),
    "a window in a long past": CacheCase(stored=(900, 30), new=(2, 2), room=1000, page=16, band=sliding_window(31, 0)),
    "one prefix for all": CacheCase(prefix=130, prefix_page=16, page=16, rotary="half", sink=True, slopes="bh"),
    "a prefix beyond the window": CacheCase(prefix=64, band=sliding_window(8), stored=(0, 3, 30)),
    "a prefix, packed": CacheCase(prefix=33, stored=(0, 7, 3), new=(5, 1, 0), packed=True, dtype=F16, softcap=5.0),
    "every query sees every key": CacheCase(band=Band(), new=(3, 5, 2), page=7, slopes="h"),
}  # fmt: skip


NAMED |= {
    f"head sizes {d}, {v}": CacheCase(heads=2, kv_heads=1, dim=d, v_dim=v, page=page, dtype=F16,
                                       stored=(7, 40), new=(1, 1))
    for d, v, page in ((1, 1, 7), (40, 24, None), (111, 72, 16), (192, 128, 64), (64, 512, 16), (512, 512, None))
}  # fmt: skip


@pytest.fixture
def unchecked(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a GPU's hot path: contents are not looked at."""
    monkeypatch.setattr("tilewise.cache.checks_contents", lambda device: False)


@pytest.mark.usefixtures("poisoned")
@pytest.mark.parametrize("name", NAMED)
def test_named(name: str, backend: str) -> None:
    NAMED[name].check(backend)


@pytest.mark.parametrize("first", range(0, SAMPLES, CHUNK))
def test_sampled(first: int, backend: str) -> None:
    faults = []
    for seed in range(first, first + CHUNK):
        try:
            sample(seed).check(backend)
        except AssertionError as error:
            faults.append(f"{sample(seed)}\n{error}")
    assert not faults, "\n\n".join(faults)


def test_the_check_sees_faults() -> None:
    """A key stored one place off, a key too few, an angle that is wrong: each is found."""
    for spoil in ("place", "key", "angle"):
        call = CacheCase(page=16, rotary="half", stored=(20, 9, 30)).build()
        before = call.cache.k.clone(), call.cache.v.clone()
        o, lse = call.run("tiled")
        call.check_storage(*before)
        call.check_results(o, lse)
        if spoil == "place":
            page = int(call.cache.pages[0, 1])
            call.cache.k[page] = call.cache.k[page].roll(1, 1)
            with pytest.raises(AssertionError):
                call.check_storage(*before)
        elif spoil == "key":
            call.cache.lengths[2] -= 1
            with pytest.raises(AssertionError, match="budget"):
                call.check_results(o, lse)
        else:
            call.rotary = Rotary(call.rotary.cos, -call.rotary.sin, "half")
            with pytest.raises(AssertionError, match="budget"):
                call.check_results(o, lse)


# ---- bits --------------------------------------------------------------------------------------------------------

BITS = {
    "decode": CacheCase(stored=(600, 3, 600, 40), new=(1,) * 4, room=700, page=16, dtype=BF16),
    "window": CacheCase(stored=(50, 0, 700), new=(5,) * 3, room=710, page=16, band=sliding_window(100), sink=True),
    "mixed": CacheCase(stored=(0, 530, 77, 0), new=(280, 1, 16, 3), packed=True, room=600, rotary="half", dtype=F16),
    "fp8": CacheCase(stored=(90, 91, 3), new=(2,) * 3, room=100, storage=FP8, dtype=F16, page=64, slopes="bh"),
    "prefix": CacheCase(stored=(9, 31, 3), new=(2,) * 3, prefix=77, prefix_page=16, rotary="interleaved"),
}


@pytest.mark.parametrize("kind", BITS)
def test_a_sequence_does_not_see_its_batch(kind: str, backend: str) -> None:
    """o and lse of a sequence are bit-equal when it is alone, or in another order, or stored elsewhere."""
    case = BITS[kind]
    call, options = case.build(), case.build().options
    o, lse = case.build().run(backend)
    slopes = options.get("alibi_slopes")
    starts = [0, *torch.tensor(case.new).cumsum(0).tolist()]
    for order in ([case.batch - 1], [1, 0], list(reversed(range(case.batch)))):
        again = case.build()
        if case.packed:
            tokens = torch.cat([torch.arange(starts[b], starts[b + 1]) for b in order])
            q, k, v = (x[tokens] for x in (again.q, again.k, again.v))
        else:
            q, k, v = (x[order] for x in (again.q, again.k, again.v))
        given = options | {"rotary": call.rotary, "prefix": call.prefix, "rows": ints(order)}
        if slopes is not None and slopes.dim() == 2:
            given["alibi_slopes"] = slopes[order]
        if case.packed:
            given["cu_seqlens_q"] = ints([0, *torch.tensor([case.new[b] for b in order]).cumsum(0).tolist()])
        got, got_lse = tilewise.attention_cached(
            q, again.cache, k=k, v=v, return_lse=True, backend=backend, **given
        )  # fmt: skip
        end = 0
        for at, b in enumerate(order):
            n = case.new[b]
            here = (got[end : end + n].transpose(0, 1), got_lse[:, end : end + n]) if case.packed else (
                got[at, :, :n], got_lse[at, :, :n])  # fmt: skip
            end += n
            assert torch.equal(here[0], o[b, :, :n]), (kind, order, b)
            assert torch.equal(here[1], lse[b, :, :n]), (kind, order, b)


@pytest.mark.parametrize("kind", ["decode", "window", "mixed"])
def test_where_keys_lie_changes_no_bit(kind: str, backend: str) -> None:
    results = []
    for page, strided in ((None, False), (None, True), (1, False), (16, False), (256, True)):
        call = replace(BITS[kind], page=page, strided=strided).build()
        results.append(call.run(backend))
    for o, lse in results[1:]:
        assert torch.equal(o, results[0][0])
        assert torch.equal(lse, results[0][1])


def test_what_lies_beyond_changes_no_bit(backend: str) -> None:
    """NaN or numbers past the end, in unused pages and in rows of no sequence."""
    case = CacheCase(stored=(20, 7), new=(3, 1), page=16, room=60)
    outputs = []
    for fill in (NAN, 3.0):
        call = case.build()
        for x in (call.cache.k, call.cache.v):
            x.nan_to_num_(fill) if fill == fill else None
        for x in (call.q, call.k, call.v):
            x.nan_to_num_(fill) if fill == fill else None
        outputs.append(call.run(backend))
    assert torch.equal(outputs[0][0], outputs[1][0])
    assert torch.equal(outputs[0][1], outputs[1][1])


# ---- the cache as a whole ----------------------------------------------------------------------------------------


def test_token_by_token_is_attention(backend: str) -> None:
    """Prompt, then tokens one at a time, against `attention` over the whole."""
    q, k, v = (torch.randn(2, h, 40, 16, generator=torch.Generator().manual_seed(h)) for h in (4, 2, 2))
    pool = PagePool(pages=8, page_size=16, sequences=2, max_len=64)
    for cache in (KVCache.contiguous(2, 2, 64, 16), KVCache.paged(pool, 2, 16)):
        outputs = []
        for a, b in ((0, 13), *((n, n + 1) for n in range(13, 40))):
            for sequence in range(2):
                pool.reserve(sequence, b)
            part = (x[:, :, a:b] for x in (q, k, v))
            q_part, k_part, v_part = part
            outputs.append(tilewise.attention_cached(q_part, cache, k=k_part, v=v_part, backend=backend))
        o = torch.cat(outputs, 2)
        torch.testing.assert_close(o, tilewise.attention(q, k, v, mask=causal))
        assert cache.lengths.tolist() == [40, 40]
        assert torch.equal(cache.stored(1)[0], k[1])


def test_append_alone(backend: str) -> None:
    cache = KVCache.contiguous(3, 2, 20, 8, v_dim=4)
    k, v = torch.randn(2, 2, 6, 8), torch.randn(2, 2, 6, 4)
    there = cache.k.device
    cache.append(k, v, rows=ints([2, 0]).to(there), lens=ints([6, 4]).to(there), backend=backend)
    assert cache.lengths.tolist() == [4, 0, 6]
    cache.append(k[0].transpose(0, 1), v[0].transpose(0, 1), cu_seqlens=ints([0, 1, 1, 6]).to(there), backend=backend)
    assert cache.lengths.tolist() == [5, 0, 11]
    assert torch.equal(cache.stored(0)[0], torch.cat([k[1, :, :4], k[0, :, :1]], 1))
    assert torch.equal(cache.stored(2)[1], torch.cat([v[0], v[0, :, 1:]], 1))


def test_queries_without_new_keys_are_the_last_tokens(backend: str) -> None:
    q, k, v = torch.randn(3, 1, 2, 12, 8)
    cache = KVCache.contiguous(1, 2, 12, 8)
    cache.append(k, v)
    o = tilewise.attention_cached(q[:, :, -3:], cache, backend=backend)
    torch.testing.assert_close(o, tilewise.attention(q, k, v, mask=causal)[:, :, -3:])
    assert cache.lengths.tolist() == [12]


def test_fp8_is_rounded_and_clamped(backend: str) -> None:
    cache = KVCache.contiguous(1, 2, 4, 2, dtype=FP8, k_scale=torch.tensor([1.0, 0.5]), v_scale=torch.ones(2))
    k = torch.tensor([[[[500.0, -1e5]], [[1.06, -0.3]]]], dtype=BF16)
    cache.append(k, torch.zeros_like(k), backend=backend)
    assert cache.stored(0)[0].tolist() == [[[448.0, -448.0]], [[1.0, -0.3125]]]


def test_layers_whose_strides_pass_2_31(backend: str) -> None:
    """A layer of (slots, layers, ...) in one array: 4 GiB of addresses, of which a few pages are touched."""
    memory = torch.empty(2**31 + 2**13, dtype=F16)
    k, v = (memory[n:].as_strided((2, 2, 40, 16), (2**31, 16, 32, 1)) for n in (2**11, 2**12))
    cache = KVCache(k, v, ints([0, 0]))
    q, new_k, new_v = torch.randn(3, 2, 2, 33, 16).half()
    o = tilewise.attention_cached(q, cache, k=new_k, v=new_v, backend=backend)
    assert torch.equal(k[1, :, :33], new_k[1])
    assert torch.equal(o, tilewise.attention(q, new_k, new_v, mask=causal, backend=backend))


@pytest.mark.parametrize("shape", [(0, 2, 3), (2, 2, 0)])
def test_nothing_to_do(shape: tuple[int, int, int], backend: str) -> None:
    q = torch.ones(*shape, 8)
    cache = KVCache.contiguous(shape[0], 2, 5, 8)
    o, lse = tilewise.attention_cached(q, cache, k=q, v=q, return_lse=True, backend=backend)
    assert o.shape == q.shape
    assert lse.shape == q.shape[:3]
    none = KVCache.contiguous(2, 2, 0, 8)
    o, lse = tilewise.attention_cached(torch.ones(2, 2, 3, 8), none, return_lse=True, backend=backend)
    assert (o == 0).all()
    assert (lse == -torch.inf).all()


@pytest.mark.parametrize("kind", ["rotary and a prefix", "latent"])
def test_compiled(kind: str) -> None:
    """One graph, the bits of eager code, and no new graph as the cache grows."""
    latent = kind == "latent"
    prefix, options = KVCache.contiguous(1, 2, 9, 8), {}
    prefix.append(*torch.randn(2, 1, 2, 9, 8))
    if not latent:
        angle = torch.randn(64, 4)
        options = {"rotary": Rotary(angle.cos(), angle.sin(), "interleaved"), "prefix": prefix}

    def step(q: Tensor, k: Tensor, v: Tensor | None, cache: KVCache) -> tuple[Tensor, Tensor]:
        cache.append(k, v)
        return tilewise.attention_cached(2 * q, cache, k=k, v=v, return_lse=True, mask=sliding_window(5), **options)

    torch._dynamo.reset()
    compiled = torch.compile(step, backend="aot_eager", fullgraph=True)
    before = torch._dynamo.utils.counters["stats"]["unique_graphs"]
    caches = [KVCache.contiguous(2, 2, 20, 8, 4 if latent else 8, v_in_k=latent) for _ in range(2)]
    for _ in range(4):
        q, k, v = torch.randn(2, 4, 1, 8), torch.randn(2, 2, 1, 8), None if latent else torch.randn(2, 2, 1, 8)
        for got, expected in zip(compiled(q, k, v, caches[0]), step(q, k, v, caches[1]), strict=True):
            assert torch.equal(got, expected)
    assert caches[0].lengths.tolist() == caches[1].lengths.tolist() == [8, 8]
    for slot in range(2):
        assert torch.equal(caches[0].stored(slot)[0], caches[1].stored(slot)[0])
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == before + 1


# ---- the hot path: what does not fit is left out, and noted ------------------------------------------------------


def run_unchecked(cache: KVCache, n: int, backend: str, **options: Any) -> Tensor:
    batch = len(options["rows"]) if "rows" in options else cache.shape.slots
    q, k, v = torch.ones(3, batch, 2, n, 4)
    return tilewise.attention_cached(q, cache, k=k, v=v, backend=backend, **options)


def filled(lengths: list[int], capacity: int, **options: Any) -> KVCache:
    """NaN but for the keys that are there."""
    k, v = torch.full((2, len(lengths), 2, capacity, 4), NAN)
    for slot, n in enumerate(lengths):
        k[slot, :, : max(n, 0)] = v[slot, :, : max(n, 0)] = 0.5
    return KVCache(k, v, ints(lengths), **options)


@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize("rows", [None, [1, 2, 0]])
def test_past_the_end_is_not_written(rows: list[int] | None, backend: str) -> None:
    cache = filled([6, 2, 8], 8)
    options = {} if rows is None else {"rows": ints(rows).to(cache.k.device)}
    before = cache.k.clone()
    o = run_unchecked(cache, 3, backend, **options)
    assert o.isfinite().all()
    assert cache.lengths.tolist() == [8, 5, 8]
    before[0, :, 6:], before[1, :, 2:5] = 1.0, 1.0
    assert same_bits(cache.k, before)
    assert int(cache.status) == PAST_END
    with pytest.raises(ValueError, match="past the end"):
        cache.check()
    cache.check()  # once


@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize("bad", [-1, 5, 2**31 - 1, -(2**31)])
def test_pages_out_of_range_are_not_touched(bad: int, backend: str) -> None:
    k, v = torch.full((2, 5, 2, 4, 4), NAN)
    k[1] = v[1] = 0.5
    pages = ints([[1, bad, 3], [2, 0, bad]])
    cache = KVCache(k, v, ints([4, 0]), pages)
    before = k.clone()
    o = run_unchecked(cache, 6, backend)
    assert o.isfinite().all()
    before[2], before[0, :, :2] = 1.0, 1.0  # the second sequence's; the first one's 4 on the bad page are lost
    before[3, :, :2] = 1.0
    assert same_bits(k, before)
    assert cache.lengths.tolist() == [10, 6]
    assert int(cache.status) == BAD_PAGE


@pytest.mark.usefixtures("unchecked")
def test_rows_out_of_range_are_absent(backend: str) -> None:
    cache = filled([3, 4], 8)
    o = run_unchecked(cache, 1, backend, rows=ints([-1, 1, -7]))
    assert (o[[0, 2]] == 0).all()
    assert (o[1] != 0).all()
    assert cache.lengths.tolist() == [3, 5]
    assert int(cache.status) == 0
    o = run_unchecked(cache, 1, backend, rows=ints([2, 1]))
    assert (o[0] == 0).all()
    assert cache.lengths.tolist() == [3, 6]
    assert int(cache.status) == BAD_PAGE


@pytest.mark.usefixtures("unchecked")
def test_garbage_lengths_are_clamped(backend: str) -> None:
    cache = filled([-5, 900, 3], 8)
    q = torch.ones(3, 2, 1, 4)
    cache.k.nan_to_num_(0.5), cache.v.nan_to_num_(0.5)
    o = tilewise.attention_cached(q, cache, backend=backend, q_lens=ints([1, 40, -3]))
    assert (o[[0, 2]] == 0).all()
    assert (o[1] - 0.5).abs().max() < 1e-6
    packed = torch.ones(3, 2, 4)
    o = tilewise.attention_cached(packed, cache, cu_seqlens_q=ints([-4, 90, 2, 1]), backend=backend)
    assert o.isfinite().all()


# ---- errors ------------------------------------------------------------------------------------------------------


def parts() -> dict[str, Any]:
    k, v = torch.zeros(2, 6, 2, 16, 8)
    return {"k": k, "v": v, "lengths": ints([3, 0]), "pages": ints([[0, 1], [2, 3]])}


STORAGE = [
    ({"k": None}, TypeError, "k is None", "torch.Tensor"),
    ({"k": torch.zeros(6, 2, 16)}, ValueError, "k is (6, 2, 16)", "4 dimensions (pages, Hkv, page_size, D)"),
    ({"k": torch.zeros(6, 2, 16, 8, dtype=torch.int8)}, TypeError, "torch.int8", "float8_e4m3fn"),
    ({"v": torch.zeros(6, 2, 16, 8).half()}, TypeError, "v is torch.float16", "one dtype"),
    ({"v": torch.zeros(6, 2, 8, 8)}, ValueError, "v is (6, 2, 8, 8)", "only their head sizes"),
    ({"pages": ints([0, 1])}, ValueError, "pages is (2)", "(slots, max_pages)"),
    ({"pages": torch.zeros(2, 2)}, TypeError, "pages is torch.float32", "torch.int32"),
    ({"pages": ints([[0, 1], [2, 3]]).T}, ValueError, "pages has strides", "contiguous"),
    ({"lengths": torch.zeros(2, dtype=torch.int64)}, TypeError, "lengths is torch.int64", "torch.int32"),
    ({"lengths": ints([3])}, ValueError, "lengths is (1)", "(2,)"),
    ({"starts": ints([3])}, ValueError, "starts is (1)", "(2,)"),
    ({"k_scale": torch.ones(2), "v_scale": torch.ones(2)}, TypeError, "k_scale is torch.float32", "float8_e4m3fn"),
    ({"k": torch.zeros(6, 2, 300, 8), "v": torch.zeros(6, 2, 300, 8)}, ValueError, "(6, 2, 300, 8)", "1 to 256"),
    ({"lengths": ints([3, 0]).to("meta")}, ValueError, "lengths is on meta", "one device"),
]  # fmt: skip


@pytest.mark.parametrize(("change", "kind", "was", "allowed"), STORAGE)
def test_a_cache_that_cannot_be(change: dict[str, Any], kind: type[Exception], was: str, allowed: str) -> None:
    with pytest.raises(kind) as caught:
        KVCache(**(parts() | change))
    assert was in str(caught.value)
    assert allowed in str(caught.value)


ONE = torch.zeros(2, 4, 1, 8)
NEW = torch.zeros(2, 2, 1, 8)
TABLE = torch.zeros(64, 4)
CALLS = [
    ({"q": None}, TypeError, "q is None", "torch.Tensor"),
    ({"q": ONE[0]}, ValueError, "q is (4, 1, 8)", "4 dimensions"),
    ({"q": ONE.half()}, TypeError, "q is torch.float16", "torch.float32"),
    ({"q": ONE[..., :4]}, ValueError, "q is (2, 4, 1, 4)", "head size 8"),
    ({"q": torch.zeros(2, 3, 1, 8)}, ValueError, "q is (2, 3, 1, 8)", "a multiple"),
    ({"q": torch.zeros(3, 4, 1, 8)}, ValueError, "q has 3 sequences, the cache 2", "rows="),
    ({"q": ONE.clone().requires_grad_()}, ValueError, "no gradient", "no_grad"),
    ({"cache": 3}, TypeError, "cache is a int", "KVCache"),
    ({"prefix": NEW}, TypeError, "prefix is a Tensor", "KVCache"),
    ({"k": NEW}, TypeError, "v is None", "view of its k"),
    ({"v": NEW}, TypeError, "k is None", "torch.Tensor"),
    ({"k": NEW, "v": torch.zeros(2, 2, 2, 8)}, ValueError, "v is (2, 2, 2, 8)", "(2, 2, 1, 8)"),
    ({"k": torch.zeros(2, 4, 1, 8), "v": NEW}, ValueError, "k is (2, 4, 1, 8)", "(2, 2, 1, 8)"),
    ({"k": NEW, "v": NEW.half()}, TypeError, "v is torch.float16", "torch.float32"),
    ({"mask": torch.ones(1, dtype=torch.bool)}, TypeError, "mask is Tensor", "Band"),
    ({"mask": Band(None, 0, "top_left")}, ValueError, "top_left", "bottom_right"),
    ({"softcap": -1.0}, ValueError, "softcap is -1.0", "positive"),
    ({"scale": "1"}, TypeError, "scale is '1'", "number"),
    ({"sink": torch.ones(2)}, ValueError, "sink is (2)", "(4,)"),
    ({"alibi_slopes": torch.ones(2)}, ValueError, "alibi_slopes is (2)", "(4,)"),
    ({"rotary": TABLE}, TypeError, "rotary is Tensor", "Rotary"),
    ({"rotary": Rotary(TABLE, TABLE, "gptj")}, ValueError, "'gptj'", "'interleaved'"),
    ({"rotary": Rotary(TABLE, TABLE[:3])}, ValueError, "rotary.sin is (3, 4)", "alike"),
    ({"rotary": Rotary(torch.zeros(64, 5), torch.zeros(64, 5))}, ValueError, "(64, 5)", "at most 8"),
    ({"rows": torch.tensor([0, 1])}, TypeError, "rows is torch.int64", "torch.int32"),
    ({"q_lens": ints([1])}, ValueError, "q_lens is (1)", "(2,)"),
    ({"backend": "fast"}, ValueError, "'fast'", "'tiled'"),
    # contents
    ({"q_lens": ints([2, 1])}, ValueError, "q_lens[0] is 2", "[0, 1]"),
    ({"rows": ints([0, 2])}, ValueError, "rows[1] is 2", "2 rows"),
    ({"rows": ints([1, 1]), "k": NEW, "v": NEW}, ValueError, "rows[1] is 1", "another"),
    ({"rotary": Rotary(TABLE[:3], TABLE[:3]), "k": NEW, "v": NEW}, ValueError, "3 positions", "position 3"),
    ({"cu_seqlens_q": ints([0, 2, 1]), "q": torch.zeros(2, 4, 8)}, ValueError, "is 1, after 2", "never decrease"),
]  # fmt: skip


@pytest.mark.parametrize(("change", "kind", "was", "allowed"), CALLS)
def test_a_call_that_cannot_be(change: dict[str, Any], kind: type[Exception], was: str, allowed: str) -> None:
    cache = KVCache(**parts())
    with pytest.raises(kind) as caught:
        tilewise.attention_cached(**({"q": ONE, "cache": cache} | change))
    assert was in str(caught.value)
    assert allowed in str(caught.value)
    assert cache.lengths.tolist() == [3, 0]
    assert not cache.k.any()


@pytest.mark.parametrize(
    ("change", "n", "was", "allowed"),
    [
        ({"lengths": ints([31, 0])}, 2, "sequence 0 has 31 keys and gets 2 more", "holds 32"),
        ({"lengths": ints([33, 0])}, 1, "lengths[0] is 33", "[0, 32]"),
        ({"pages": ints([[0, 1], [6, 3]])}, 1, "pages[1, 0] is 6", "6 pages"),
        ({"pages": ints([[0, -1], [2, 3]])}, 14, "pages[0, 1] is -1", "17 keys need it"),
        ({"starts": ints([5, 0])}, 1, "starts[0] is 5", "4 keys"),
    ],
)
def test_contents_that_cannot_be(change: dict[str, Any], n: int, was: str, allowed: str) -> None:
    cache = KVCache(**(parts() | change))
    before = cache.lengths.tolist()
    k = torch.ones(2, 2, n, 8)
    for append in (lambda: cache.append(k, k), lambda: tilewise.attention_cached(k, cache, k=k, v=k)):
        with pytest.raises(ValueError) as caught:
            append()
        assert was in str(caught.value)
        assert allowed in str(caught.value)
    assert cache.lengths.tolist() == before
    assert not cache.k.any()


def test_what_a_prefix_and_a_shared_v_refuse() -> None:
    cache, two = KVCache.contiguous(2, 2, 8, 8), KVCache.contiguous(2, 2, 8, 8)
    with pytest.raises(ValueError, match="prefix holds 2 sequences"):
        tilewise.attention_cached(ONE, cache, prefix=two)
    padded = KVCache.contiguous(2, 2, 8, 8, starts=ints([0, 0]))
    with pytest.raises(ValueError, match="starts"):
        tilewise.attention_cached(ONE, padded, prefix=KVCache.contiguous(1, 2, 8, 8))
    latent = KVCache.contiguous(2, 2, 8, 8, 4, v_in_k=True)
    with pytest.raises(ValueError, match="v must be None"):
        latent.append(NEW, NEW[..., :4])
    with pytest.raises(ValueError, match="rotate q and k before"):
        latent.append(NEW, rotary=Rotary(TABLE, TABLE))


def test_a_call_is_validated_once() -> None:
    cache = KVCache.contiguous(2, 2, 8, 8)
    first = of_cached(cache.shape, ONE, mask=causal)
    assert of_cached(KVCache.contiguous(2, 2, 8, 8).shape, ONE.clone(), mask=causal) is first
    assert cache.problem(ONE) is first
    assert cache.problem(ONE, softcap=2.0) is not first
    assert cache.problem(ONE, prefix=KVCache.contiguous(1, 2, 8, 8)) is not first
    assert "at most 8 keys a sequence, cached" in str(first)


# ---- pages -------------------------------------------------------------------------------------------------------


def test_pool() -> None:
    pool = PagePool(pages=3, page_size=4, sequences=2, max_len=16)
    assert pool.reserve(0, 5) == 2
    assert pool.reserve(0, 8) == 0
    assert pool.table[0].tolist() == [*pool.owned(0), -1, -1]
    with pytest.raises(OutOfPages, match="needs 2 more pages of 4, 1 are free"):
        pool.reserve(1, 8)
    assert pool.free_pages == 1
    with pytest.raises(ValueError, match="room for 16"):
        pool.reserve(1, 17)
    pool.free(0)
    assert pool.free_pages == 3
    assert (pool.table == -1).all()
    with pytest.raises(ValueError, match="page_size is 0"):
        PagePool(1, 0, 1, 1)


def soak(steps: int, seed: int, backend: str | None, device: str = "cpu") -> None:
    """Sequences come, grow, are asked and go, in pages that are NaN when free; nothing is lost, nothing leaks."""
    r, make = random.Random(seed), torch.Generator().manual_seed(seed)
    slots, heads = 6, 2
    pool = PagePool(pages=24, page_size=r.choice((1, 5, 16)), sequences=slots, max_len=100, device=device)
    cache = KVCache.paged(pool, heads, 8, v_dim=4)
    cache.k.fill_(NAN), cache.v.fill_(NAN)
    past: dict[int, tuple[Tensor, Tensor]] = {}

    def drop(slot: int) -> None:
        for page in pool.owned(slot):
            cache.k[page], cache.v[page] = NAN, NAN
        pool.free(slot)
        cache.lengths[slot] = 0
        del past[slot]

    for step in range(steps):
        action = r.random()
        if past and action < 0.1:
            drop(r.choice(sorted(past)))
            continue
        chosen = r.sample(range(slots), r.randint(1, slots))
        new = {}
        for slot in chosen:
            n = r.choice((1, 1, 1, 3, 17))
            have = past[slot][0].shape[1] if slot in past else 0
            try:
                if have + n <= 100:
                    pool.reserve(slot, have + n)
                    new[slot] = n
            except OutOfPages:
                if have:
                    drop(slot)
        if not new:
            continue
        cu = ints([0, *torch.tensor(list(new.values())).cumsum(0).tolist()]).to(device)
        sizes = (4, 8), (heads, 8), (heads, 4)
        q, k, v = (torch.randn(int(cu[-1]), h, d, generator=make).to(device) for h, d in sizes)
        asked = action < 0.5
        given: dict[str, Any] = {"rows": ints(list(new)).to(device), "backend": backend}
        o = None
        if asked:
            o = tilewise.attention_cached(q, cache, k=k, v=v, cu_seqlens_q=cu, mask=sliding_window(40), **given)
        else:
            cache.append(k, v, cu_seqlens=cu, **given)
        for i, slot in enumerate(new):
            part = slice(int(cu[i]), int(cu[i + 1]))
            there = past.get(slot, tuple(torch.empty(heads, 0, d, device=device) for d in (8, 4)))
            past[slot] = tuple(torch.cat([x, y[part].transpose(0, 1)], 1) for x, y in zip(there, (k, v), strict=True))
            if o is not None:
                q_s = q[part].transpose(0, 1)[None].double()
                K, V = (x[None].double().repeat_interleave(2, 1) for x in past[slot])
                n, m = q_s.shape[2], K.shape[2]
                far = (torch.arange(m) - torch.arange(m - n, m)[:, None]).to(device)
                S = (q_s @ K.mT / 8**0.5).masked_fill((far > 0) | (far < -40), -torch.inf)
                expected = (S.softmax(-1) @ V)[0].transpose(0, 1)
                assert (o[part] - expected).abs().max() < 1e-5, (step, slot)
        owned = [page for slot in range(slots) for page in pool.owned(slot)]
        assert len(set(owned)) == len(owned) == pool.pages - pool.free_pages
        slot = r.choice(sorted(past))
        for got, want in zip(cache.stored(slot), past[slot], strict=True):
            assert torch.equal(got, want), (step, slot)
    for slot in sorted(past):
        for got, want in zip(cache.stored(slot), past[slot], strict=True):
            assert torch.equal(got, want)
        drop(slot)
    assert pool.free_pages == pool.pages
    assert cache.k.isnan().all()  # nothing was written outside a sequence's own pages
    assert cache.v.isnan().all()
    cache.check()


@pytest.mark.parametrize("seed", range(3))
def test_soak(seed: int, backend: str) -> None:
    soak(150, seed, backend)


@pytest.mark.slow
def test_soak_of_10_000_steps(backend: str) -> None:
    for seed in range(4):
        soak(2500, 100 + seed, backend)
