"""Triton's kernels for key/value caches, interpreted: the cases of `cache_cases` against the fp64 reference."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import pytest
import torch
import triton
import triton.language as tl
from cache_cases import BF16, F16, F32, FP8, CacheCase, same_bits, sample
from torch import Tensor

import tilewise
from tilewise import Band, sliding_window
from tilewise.kernels.triton import decode, decode_config, decode_host

LONG = CacheCase(stored=(300, 130, 213), room=320)
NAMED = {
    "few keys": CacheCase(),
    "several blocks": LONG,
    "pages of 16": replace(LONG, page=16, dtype=F16),
    "pages of 64, a window": replace(LONG, page=64, band=sliding_window(70)),
    "pages of 7": replace(LONG, page=7),
    "many queries": CacheCase(new=(40, 40, 40), stored=(30, 0, 60), room=120),
    "many queries, turned": CacheCase(
        new=(40, 40, 40), stored=(30, 0, 60), room=120, rotary="half", rotary_dim=16, heads=6, dtype=F16
    ),
    "many queries of several lengths, turned by pairs": CacheCase(
        new=(40, 17, 3), stored=(30, 0, 60), room=120, rotary="interleaved", dim=72, heads=20, kv_heads=1
    ),
    "many queries in pages": CacheCase(new=(40, 17, 3), stored=(30, 0, 60), room=120, page=16),
    "long and short, packed": replace(LONG, new=(40, 3, 1), room=360, packed=True),
    "several queries, all on scores": replace(LONG, new=(5, 5, 5), sink=True, softcap=5.0, slopes="bh"),
    "rows of 222 bytes": replace(LONG, dim=111, v_dim=72, page=16, dtype=F16),
    "columns of 64 and 8": replace(LONG, dim=72, v_dim=64, v_in_k=True, heads=16, kv_heads=1, dtype=F16),
    "more heads than rows": replace(LONG, heads=40, kv_heads=2, dim=16),
    "turned": replace(LONG, rotary="half", rotary_dim=12, starts=(3, 0, 70)),
    "fp8": replace(LONG, storage=FP8, dtype=F16),
    "fp8 of bf16": replace(LONG, storage=FP8, dtype=BF16),
    "fp8 of bf16, columns of 64 and 8": replace(
        LONG, storage=FP8, dtype=BF16, dim=72, v_dim=64, v_in_k=True, kv_heads=1, softcap=5.0, new=(5, 5, 5)
    ),
    "a prefix": replace(LONG, prefix=150, prefix_page=16, rotary="interleaved"),
    "places of their own": replace(LONG, rows=(4, -1, 1)),
    "keys that nothing sees": replace(LONG, band=Band(None, -40)),
}


def runs(case: CacheCase) -> bool:
    """Not bf16, which the interpreter cannot multiply, but of fp8 keys. Nor one value of fp16, of a sum whose terms are
    rounded: its error has no others to be averaged with."""
    single = case.dtype is F16 and (case.v_dim or case.dim) == 1
    return (case.dtype in (F16, F32) or (case.dtype is BF16 and case.storage is FP8)) and not single


SAMPLES = [seed for seed in range(140) if runs(sample(seed))]


@pytest.fixture(params=["shared blocks", "whole blocks"])
def sms(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """Small pieces; and programs enough to share each block, or so few that each has whole ones."""
    monkeypatch.setattr(decode_config, "PIECE", 32)
    monkeypatch.setattr(decode_config, "BLOCK", 128)
    forget()
    monkeypatch.setattr(decode_host, "_sms", lambda device: {"shared blocks": 1000, "whole blocks": 1}[request.param])
    yield request.param
    forget()


def forget() -> None:
    decode_config.choose.cache_clear()
    decode_host.plan_of.cache_clear()


@pytest.mark.parametrize("name", NAMED)
def test_named(name: str, sms: str, backend: str) -> None:
    with tilewise.checked():
        NAMED[name].check(backend)


@pytest.mark.parametrize("seed", SAMPLES)
def test_sampled(seed: int, backend: str) -> None:
    sample(seed).check(backend)


@pytest.mark.parametrize("name", ["several blocks", "pages of 64, a window", "several queries, all on scores"])
def test_who_merges_the_pieces_changes_no_bit(name: str, monkeypatch: pytest.MonkeyPatch, backend: str) -> None:
    monkeypatch.setattr(decode_config, "PIECE", 32)
    monkeypatch.setattr(decode_config, "BLOCK", 128)
    results = []
    for sms in (1, 3, 1000):
        forget()
        monkeypatch.setattr(decode_host, "_sms", lambda device, sms=sms: sms)
        call = NAMED[name].build()
        results.append(call.run(backend))
        call.check_results(*results[-1])
    forget()
    for o, lse in results[1:]:
        assert same_bits(o, results[0][0])
        assert same_bits(lse, results[0][1])


@dataclass(frozen=True)
class Columns:
    REST: int


@triton.jit
def as_fp16_kernel(x, q, rest, down, O: tl.constexpr):
    i, j = tl.arange(0, 16)[:, None], tl.arange(0, 16)[None, :]
    first, second, by = decode.as_fp16(tl.load(x + i * 32 + j), tl.load(x + i * 32 + 16 + j), O)
    tl.store(q + i * 32 + j, first)
    tl.store(rest + i * 32 + j, second)
    tl.store(down + i, by)


def test_bf16_rows_as_fp16_lose_less_than_sums_do() -> None:
    """Of rows from 1e-30 to 1e38, whose numbers differ by 30 powers of two; inf and NaN stay where they are."""
    make = torch.Generator().manual_seed(0)
    x = torch.randn(16, 32, generator=make) * torch.logspace(-30, 37.5, 16)[:, None]
    x = (x * torch.logspace(0, -9, 32)).to(BF16)
    x[3], x[4, 2], x[5, 20] = 0.0, torch.inf, torch.nan
    q, down = torch.empty(16, 32, dtype=F16), torch.empty(16)
    as_fp16_kernel[(1,)](x, q, q[:, 16:], down, Columns(REST=16))
    got = q.double() * down.double()[:, None]
    finite = x.isfinite()
    largest = torch.where(finite, x.double(), 0.0).abs().amax(1, keepdim=True)
    error = torch.where(finite, got - x.double(), 0.0).abs()
    allowed = torch.where(x.isinf().any(1, keepdim=True), torch.inf, largest * 2**-38)  # beside inf nothing counts
    assert (error <= allowed).all()
    assert error.any()
    assert torch.equal(got.isinf(), x.isinf())
    assert torch.equal(got.isnan(), x.isnan())


@pytest.mark.parametrize("fault", ["no page", "no room", "no slot"])
def test_faults_are_noted_and_write_nothing(fault: str, backend: str) -> None:
    """Without a check of contents: as on a GPU."""
    make = torch.Generator().manual_seed(0)

    def drawn(*shape: int) -> Tensor:
        return torch.randn(shape, generator=make)

    pages = torch.tensor([[0, 1], [2, 7 if fault == "no page" else 3]], dtype=torch.int32)
    lengths = torch.tensor([15, 32 if fault == "no room" else 20], dtype=torch.int32)
    k, v = drawn(4, 2, 16, 8), drawn(4, 2, 16, 8)
    cache = tilewise.KVCache(k, v, lengths, pages)
    rows = torch.tensor([0, 5 if fault == "no slot" else 1], dtype=torch.int32)
    before = k.clone()
    module = tilewise.dispatch.backend(backend)
    problem = tilewise.problem_cached.of_cached(cache.shape, drawn(2, 2, 1, 8), mask=tilewise.causal, rows=rows)
    aux = cache._aux((rows.clamp(0, 1), (rows < 2).int()), None, None, None, rows)
    module.append(problem, drawn(2, 2, 1, 8), drawn(2, 2, 1, 8), cache.k, cache.v, aux)
    changed = [(int(p), int(t)) for p, t in (k != before).any(-1).any(1).nonzero()]
    assert changed == [(0, 15)] + [(3, 4)] * (fault not in ("no page", "no room", "no slot"))
    assert int(cache.status) == {"no page": 2, "no room": 1, "no slot": 2}[fault]
    cache.status.zero_()
    o, lse = module.attend(problem, drawn(2, 2, 1, 8), cache.k, cache.v, aux)
    assert torch.isfinite(o).all()
    assert int(cache.status) == (0 if fault == "no room" else 2)
    if fault == "no slot":
        assert (lse[1] == -torch.inf).all()
