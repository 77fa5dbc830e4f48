"""The model of DRAM's bytes: its two limits, its growth, one case by hand."""

from __future__ import annotations

from itertools import pairwise

import pytest

from tilewise import Band, causal
from tilewise.algorithm import io_model
from tilewise.algorithm.dram_model import (
    Cache,
    Eager,
    Kernel,
    Machine,
    Stream,
    flash_forward,
    fused_backward,
    split_backward,
    standard,
    standard_backward,
    traffic,
)
from tilewise.algorithm.io_model import Sizes

SIZES = Sizes(1000, 1000, 64, 64, batch=2, heads=6)
TILE = (128, 64)
MACHINE = Machine(programs=132)
ENDLESS, NONE = 1 << 50, 0


def everything(band: Band | None = None) -> dict[str, list[Kernel]]:
    options = {"band": band, "kv_heads": 2}
    return {
        "standard": standard(SIZES, TILE, MACHINE, Eager(mask=True, dropout=True)),
        "standard backward": standard_backward(SIZES, TILE, MACHINE, Eager(mask=True, dropout=True)),
        "forward": flash_forward(SIZES, TILE, MACHINE, **options),  # type: ignore[arg-type]
        "split": split_backward(SIZES, TILE, (64, 128), MACHINE, **options),  # type: ignore[arg-type]
        "fused": fused_backward(SIZES, TILE, MACHINE, width=64, **options),  # type: ignore[arg-type]
    }


# --- without a cache: io_model --------------------------------------------------------------------------------------


def test_without_a_cache_standard_attention_is_io_models() -> None:
    seen = traffic(standard(SIZES, TILE, MACHINE), Cache(NONE))
    cost = io_model.standard(SIZES, TILE)
    assert seen.bytes == cost.bytes
    assert (seen.reads, seen.writes) == (sum(cost.loaded.values()), sum(cost.stored.values()))
    assert [name for name, _, _ in seen.kernels] == [step.name for step in cost.steps]
    product = 2 * SIZES.batch * SIZES.heads * SIZES.q_len * SIZES.k_len * SIZES.element  # P dP, out and in: torch's own
    back = traffic(standard_backward(SIZES, TILE, MACHINE), Cache(NONE))
    softmax = "softmax_backward"
    names = [step.name for step in io_model.standard_backward(SIZES, TILE).steps]
    assert [name for name, _, _ in back.kernels if name != "P dP"] == names
    assert back.bytes == io_model.standard_backward(SIZES, TILE).bytes + product + product // 2
    assert [name for name, _, _ in back.kernels].index(softmax) == names.index(softmax) + 1


@pytest.mark.parametrize("band", [Band(), causal, Band(100, 30)], ids=str)
def test_without_a_cache_the_forward_is_io_models(band: Band) -> None:
    cost = io_model.flash_attention_2(SIZES, TILE, band=band)
    seen = traffic(flash_forward(SIZES, TILE, MACHINE, band=band), Cache(NONE))
    assert (seen.reads, seen.writes) == (sum(cost.loaded.values()), sum(cost.stored.values()))


@pytest.mark.parametrize("band", [Band(), causal], ids=str)
def test_without_a_cache_the_backward_asks_for_what_io_model_loads(band: Band) -> None:
    """The same visits; dQ is filled by another kernel, and what is stored of dK and dV has half the bytes."""
    cost = io_model.flash_attention_2_backward(SIZES, TILE, band=band)
    main = fused_backward(SIZES, TILE, MACHINE, band=band)[1]
    loaded = cost.steps[1].loaded
    for array in ("K", "V", "Q", "dO"):
        assert main.streams[array].loads == loaded[array]
    assert main.streams["statistics"].loads == loaded["L"] + loaded["delta"]
    assert main.streams["sums"].loads == main.streams["sums"].stores == loaded["dQ"]
    (_, dkdv) = split_backward(SIZES, TILE, TILE, MACHINE, band=band)
    assert dkdv.streams["Q"].loads == loaded["Q"]


# --- with an endless one: each array once ---------------------------------------------------------------------------


@pytest.mark.parametrize("band", [None, causal], ids=str)
def test_in_an_endless_cache_each_array_is_read_once(band: Band | None) -> None:
    for name, kernels in everything(band).items():
        seen = traffic(kernels, Cache(ENDLESS))
        assert seen.writes == 0, name  # all of it is still in the cache
        assert seen.reads == sum(s.size for k in kernels for s in k.streams.values() if s.loads), name


def test_unflushed_an_endless_cache_reads_inputs_and_writes_results_once() -> None:
    N, d = 1000 * 12, 64
    seen = traffic(fused_backward(SIZES, TILE, MACHINE), Cache(ENDLESS, flushed=False))
    assert seen.reads == 5 * N * d * 2 + N * 4  # O, dO, Q, K, V and lse
    assert seen.writes == 3 * N * d * 2 + 2 * N * 4 + N * d * 4  # dQ, dK, dV, statistics, and the sums, not their zeros


# --- between --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("flushed", [True, False])
def test_a_larger_cache_never_moves_more(flushed: bool) -> None:
    for name, kernels in everything(causal).items():
        seen = [traffic(kernels, Cache(size, flushed)).bytes for size in (0, *(1 << n for n in range(8, 40)))]
        assert all(a >= b for a, b in pairwise(seen)), name
        assert seen[0] > seen[-1], name


def test_unflushed_moves_no_more_reads_and_no_fewer_writes() -> None:
    for name, kernels in everything().items():
        size = 1 << 20
        flushed, kept = traffic(kernels, Cache(size)), traffic(kernels, Cache(size, flushed=False))
        assert kept.reads <= flushed.reads, name


def test_one_case_by_hand() -> None:
    """4 heads of 256 queries and keys, 32 columns of fp16: 16 KiB an array and head. Tiles of 64 queries, 4 a head.

    8 programs are at work: 2 heads, whose K and V take 64 KiB, so that a cache of 48 KiB keeps three quarters of them.
    K and V are asked for 4 times. 64 KiB each of Q, K and V come first, then a quarter of 3 * 64 KiB of K, and of V. O
    and lse are 64 and 4 KiB of the 260 that pass once; of 48 KiB that stay, 68 / 260 are theirs.
    """
    KiB = 1024
    (forward,) = flash_forward(Sizes(256, 256, 32, 32, heads=4), (64, 64), Machine(programs=8))
    assert forward.streams["K"] == Stream(64 * KiB, loads=256 * KiB, span=64 * KiB)
    seen = traffic([forward], Cache(48 * KiB))
    assert seen.reads == (3 * 64 + 2 * 48) * KiB
    assert seen.writes == pytest.approx((68 - 48 * 68 / 260) * KiB)


def test_grouped_heads_share_their_keys() -> None:
    """12 heads in groups of 6: as many bytes asked for, a sixth of them in memory, and a span of one set."""
    (grouped,) = flash_forward(SIZES, TILE, Machine(programs=8, together=6), kv_heads=1)
    (alone,) = flash_forward(SIZES, TILE, Machine(programs=8, together=6))
    assert grouped.streams["K"].loads == alone.streams["K"].loads
    assert 6 * grouped.streams["K"].size == alone.streams["K"].size
    assert 6 * grouped.streams["K"].span == alone.streams["K"].span


def test_the_papers_setting_moves_twenty_times_fewer_bytes() -> None:
    """Table 2 of the paper has 40.3 / 4.4 GB; there the cache is none."""
    sizes = Sizes(1024, 1024, 64, 64, batch=64, heads=16)
    options = Eager(mask=True, dropout=True)
    plain = standard(sizes, TILE, MACHINE, options) + standard_backward(sizes, TILE, MACHINE, options)
    ours = flash_forward(sizes, TILE, MACHINE, band=causal)
    ours += split_backward(sizes, (64, 64), (64, 64), MACHINE, band=causal)
    cache = Cache(50 << 20)
    assert traffic(plain, cache).bytes > 20 * traffic(ours, cache).bytes
