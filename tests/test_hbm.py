"""Loads, stores and their counter: what they copy, what they count, and that an inactive counter counts nothing."""

import threading

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tilewise.algorithm import hbm
from tilewise.algorithm.chip import Chip

DTYPES = [torch.float16, torch.bfloat16, torch.float32, torch.float64]


def _array(b: int, h: int, S: int, d: int | None, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Integers that every dtype holds and that tell all places apart up to 2048 of them."""
    shape = (b, h, S) if d is None else (b, h, S, d)
    return torch.arange(1, torch.Size(shape).numel() + 1).reshape(shape).remainder(251).to(dtype)


@st.composite
def _loads(draw):
    b, group, kv_heads, S = (draw(st.integers(1, n)) for n in (3, 3, 2, 12))
    d = draw(st.none() | st.integers(1, 5))
    x = _array(b, kv_heads, S, d, draw(st.sampled_from(DTYPES)))
    if draw(st.booleans()) and d is not None:  # other strides than the contiguous ones
        x = x.mT.contiguous().mT
    heads = group * kv_heads
    start = draw(st.integers(0, S))
    rows = slice(start, draw(st.integers(start, S + 3)))
    if draw(st.booleans()):
        shape = (draw(st.sampled_from([1, b])), draw(st.sampled_from([1, heads])), draw(st.integers(0, 8)))
        rows = torch.tensor(
            draw(st.lists(st.integers(0, S - 1), min_size=(n := torch.Size(shape).numel()), max_size=n))
        )
        rows = rows.to(torch.int64).reshape(shape)
    extra_rows, extra_columns = draw(st.none() | st.integers(0, 4)), draw(st.none() | st.integers(0, 4))
    return x, rows, heads, extra_rows, extra_columns


def _expected(x: torch.Tensor, rows: slice | torch.Tensor, heads: int) -> torch.Tensor:
    """The rows, by one plain indexing operation a head."""
    x = x.repeat_interleave(heads // x.shape[1], 1)
    if isinstance(rows, slice):
        return x[:, :, rows]
    rows = rows.expand(x.shape[0], heads, -1)
    return torch.stack([torch.stack([x[n, g][rows[n, g]] for g in range(heads)]) for n in range(x.shape[0])])


@given(_loads())
@settings(max_examples=200, deadline=None)
def test_load_copies_pads_and_counts(case) -> None:
    x, rows, heads, extra_rows, extra_columns = case
    expected = _expected(x, rows, heads)
    n = expected.shape[2]
    size = None if extra_rows is None else n + extra_rows
    width = None if extra_columns is None or x.ndim == 3 else x.shape[3] + extra_columns
    with hbm.counting() as traffic:
        tile = hbm.load(x, "K", rows, size=size, width=width, heads=heads)
    assert tile.shape == (x.shape[0], heads, n if size is None else size) + (
        () if x.ndim == 3 else (width or x.shape[3],)
    )
    assert tile.dtype == (torch.float64 if x.dtype == torch.float64 else torch.float32)
    assert tile.is_contiguous()
    inside = (slice(None), slice(None), slice(n)) + (() if x.ndim == 3 else (slice(x.shape[3]),))
    assert torch.equal(tile[inside], expected.to(tile.dtype))
    assert tile.sum() == tile[inside].sum()  # all entries are positive: the padding is 0
    assert traffic.loaded == {"K": expected.numel() * x.element_size()}
    assert traffic.on_chip == {"K": expected[0, 0].numel() * x.element_size()}
    assert traffic.stored == {}
    assert traffic.allocated == 0


def test_a_tile_is_a_copy() -> None:
    x = _array(1, 1, 4, 3)
    before = x.clone()
    for rows in slice(0, 4), torch.arange(4)[None, None]:
        hbm.load(x, "K", rows).fill_(-1)
    assert torch.equal(x, before)


def test_read_only_tiles_are_not_copied_where_a_copy_would_lie_the_same() -> None:
    x = torch.rand(1, 2, 8, 16)  # a row is 64 bytes
    narrow = torch.rand(1, 2, 8, 8)  # half of that: every second row is aligned as fresh memory is
    with hbm.counting() as traffic:
        for array, start, copied in (x, 3, False), (narrow, 2, False), (narrow, 3, True), (x.double(), 3, False):
            tile = hbm.load(array, "K", slice(start, start + 4), size=4, width=array.shape[3], read_only=True)
            assert torch.equal(tile, array[:, :, start : start + 4])
            assert (tile.data_ptr() != array[:, :, start:].data_ptr()) == copied
        for options in {"size": 5, "width": 16}, {"size": 4, "width": 32}, {"size": 4, "width": 16, "heads": 4}:
            tile = hbm.load(x, "K", slice(0, 4), read_only=True, **options)
            assert tile.data_ptr() != x.data_ptr()
    assert traffic.loaded == {"K": 4 * (2 * 16 * 4 + 2 * 8 * 4 * 2 + 2 * 16 * 8 + (2 + 2 + 4) * 16 * 4)}


def test_tiles_of_one_name_share_a_buffer() -> None:
    chip, x = Chip(), 1 + torch.rand(1, 2, 8, 3)
    first = hbm.load(x, "K", slice(0, 8), size=8, width=4, chip=chip)
    assert torch.equal(first[..., :3], x)
    second = hbm.load(x, "K", slice(6, 8), size=8, width=4, chip=chip)
    assert second.data_ptr() == first.data_ptr()
    assert torch.equal(second[:, :, :2, :3], x[:, :, 6:])
    assert second[:, :, 2:].eq(0).all()  # nothing is left of the first
    assert second[..., 3].eq(0).all()
    assert hbm.load(x, "V", slice(0, 8), size=8, width=4, chip=chip).data_ptr() != first.data_ptr()


def test_load_takes_a_dtype() -> None:
    x = _array(1, 1, 4, 3, torch.float32)
    with hbm.counting() as traffic:
        assert hbm.load(x, "K", slice(0, 4), dtype=torch.float64).dtype == torch.float64
    assert traffic.loaded == {"K": 4 * 3 * 4}  # what is read is fp32


@given(st.integers(0, 6), st.integers(0, 9), st.sampled_from(DTYPES), st.booleans())
@settings(max_examples=100, deadline=None)
def test_store_writes_the_rows_and_nothing_else(
    start: int, stop: int, dtype: torch.dtype, one_number_a_row: bool
) -> None:
    stop = max(start, stop)
    x = torch.zeros((2, 3, 6) if one_number_a_row else (2, 3, 6, 2), dtype=dtype)
    tile = 1 + torch.rand((2, 3, 9) if one_number_a_row else (2, 3, 9, 4))
    with hbm.counting() as traffic:
        hbm.store(x, "O", slice(start, stop), tile)
    n = min(stop, 6) - start
    expected = torch.zeros_like(x)
    expected[:, :, start : start + n] = (tile[:, :, :n] if one_number_a_row else tile[:, :, :n, :2]).to(dtype)
    assert torch.equal(x, expected)
    assert traffic.stored == {"O": expected[:, :, start : start + n].numel() * x.element_size()}
    assert traffic.loaded == {}


def test_store_and_accumulate_at_gathered_positions() -> None:
    rows = torch.tensor([[[0, 3]], [[2, 1]]])  # for each of two batches
    tile = _array(2, 2, 2, 5)
    x = torch.full((2, 2, 4, 3), 7.0)
    with hbm.counting() as traffic:
        hbm.store(x, "O", rows, tile)
        hbm.accumulate(x, "O", rows, tile)
    for n in range(2):
        for r, at in enumerate(rows[n, 0].tolist()):
            assert torch.equal(x[n, :, at], 2 * tile[n, :, r, :3])
    assert x.eq(7.0).all(-1).all(1).sum() == 4  # the two other positions of each batch
    assert traffic.stored == {"O": 2 * 2 * 2 * 2 * 3 * 4}
    assert traffic.loaded == {"O": 2 * 2 * 2 * 3 * 4}


@pytest.mark.parametrize("shape", [(1, 1, 3), (2, 1, 3), (2, 2, 3)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_accumulate_adds_repeated_positions(shape: tuple[int, int, int], dtype: torch.dtype) -> None:
    x = torch.ones(2, 2, 4, 3, dtype=dtype)
    hbm.accumulate(x, "dQ", torch.tensor([1, 3, 1]).expand(shape), torch.full((2, 2, 3, 4), 2.0))
    assert x[0, 0, :, 0].tolist() == [1, 5, 1, 3]
    assert torch.equal(x, x[:1, :1, :, :1].expand_as(x))


def test_accumulate_adds_a_slice_and_counts_both_ways() -> None:
    x = torch.ones(2, 2, 4, dtype=torch.float64)
    with hbm.counting() as traffic:
        hbm.accumulate(x, "dQ", slice(3, 6), torch.full((2, 2, 3), 2.0))
    assert x[1, 1].tolist() == [1, 1, 1, 3]
    assert traffic.loaded == traffic.stored == {"dQ": 2 * 2 * 1 * 8}
    assert traffic.on_chip == {"dQ": 8}


def test_on_chip_is_the_largest_tile_of_each_name_of_one_head() -> None:
    k, v = torch.zeros(3, 2, 10, 4), torch.zeros(3, 2, 10, 2, dtype=torch.float16)
    with hbm.counting() as traffic:
        for start, stop in (0, 2), (2, 7), (7, 8):
            hbm.load(k, "K", slice(start, stop), size=8, width=16)  # padding is not counted
        hbm.load(v, "V", slice(0, 3))  # in its own dtype, not in the tile's fp32
        S = torch.zeros(3, 2, 5, 7)
        assert hbm.keep("S", S) is S
    assert traffic.on_chip == {"K": 5 * 4 * 4, "V": 3 * 2 * 2, "S": 5 * 7 * 4}
    assert traffic.peak_on_chip == 80 + 12 + 140
    assert traffic.loaded == {"K": 6 * 8 * 4 * 4, "V": 6 * 3 * 2 * 2}


def test_allocations() -> None:
    with hbm.counting() as traffic:
        assert hbm.empty((2, 3), "O", dtype=torch.float16).shape == (2, 3)
        assert torch.equal(hbm.zeros((4,), "l", dtype=torch.float64), torch.zeros(4, dtype=torch.float64))
        assert torch.equal(hbm.full((4,), "m", -torch.inf, dtype=torch.float32), torch.full((4,), -torch.inf))
    assert traffic.arrays == {"O": 12, "l": 32, "m": 16}
    assert traffic.allocated == 60
    assert traffic.stored == {"l": 32, "m": 16}  # filling writes; an empty array is not filled
    assert traffic.bytes == 48


def _move(times: int = 1) -> None:
    x = torch.zeros(1, 1, 2, 2)
    for _ in range(times):
        hbm.load(x, "K", slice(0, 2))


def test_the_counter_counts_only_while_it_is_active() -> None:
    _move()
    with hbm.counting() as traffic:
        _move()
    _move()
    assert traffic.loaded == {"K": 16}


def _fail_while_counting(seen: list[hbm.Traffic]) -> None:
    with hbm.counting() as traffic, hbm.kernel("k"):
        seen.append(traffic)
        _move()
        raise ZeroDivisionError


def test_the_counter_ends_with_an_exception() -> None:
    seen: list[hbm.Traffic] = []
    with pytest.raises(ZeroDivisionError):
        _fail_while_counting(seen)
    before = dict(seen[0].loaded)
    _move()
    assert seen[0].loaded == before


def test_an_inner_counter_takes_over() -> None:
    with hbm.counting() as outer:
        _move()
        with hbm.counting() as inner:
            _move(2)
        _move()
    assert outer.loaded == {"K": 32}
    assert inner.loaded == {"K": 32}


def test_threads_do_not_count_for_each_other() -> None:
    with hbm.counting() as traffic:
        thread = threading.Thread(target=_move)
        thread.start()
        thread.join()
    assert traffic.loaded == {}


def test_kernels_are_counted_apart_and_share_no_on_chip_memory() -> None:
    x = torch.zeros(1, 1, 8, 2)

    @hbm.kernel("first")
    def first(rows: int) -> None:
        hbm.load(x, "Q", slice(0, rows))
        hbm.store(hbm.empty((1, 1, 8, 2), "S", dtype=torch.float32), "S", slice(0, rows), x)

    with hbm.counting() as traffic:
        first(3)
        first(2)
        with hbm.kernel("second"):
            hbm.load(x, "K", slice(0, 1))
            hbm.load(x, "V", slice(0, 1))
        hbm.load(x, "O", slice(0, 1))
    first(8)  # nobody counts
    assert list(traffic.kernels) == ["first", "second"]
    assert traffic.loaded == {"Q": 40, "K": 8, "V": 8, "O": 8}
    assert traffic.stored == {"S": 40}
    assert traffic.arrays == {"S": 128}
    assert traffic.kernels["first"].loaded == {"Q": 40}
    assert traffic.kernels["first"].allocated == 128
    assert traffic.kernels["first"].on_chip == {"Q": 24}
    assert traffic.on_chip == {"O": 8}
    assert traffic.kernels["second"].peak_on_chip == 16
    assert traffic.peak_on_chip == 24  # not 24 + 16 + 8


def test_an_observer_is_told_what_is_counted() -> None:
    """Every byte, in order, in kernels too; and which kernel begins, and that it ends."""
    told: list[hbm.Event] = []
    x = _array(1, 2, 6, 3)
    with hbm.counting(told.append) as traffic:
        o = hbm.zeros((1, 2, 6, 3), "O", dtype=torch.float32)
        with hbm.kernel("inner"):
            tile = hbm.keep("S", hbm.load(x, "K", slice(2, 4)))
            hbm.show("m", tile)
            hbm.store(o, "O", slice(0, 2), tile)
        hbm.accumulate(o, "O", slice(0, 2), tile)
    assert [(event.kind, event.name) for event in told] == [
        ("fill", "O"), ("kernel", "inner"), ("load", "K"), ("keep", "S"), ("show", "m"), ("store", "O"), ("kernel", ""),
        ("accumulate", "O"),
    ]  # fmt: skip
    assert sum(event.loaded for event in told) == sum(traffic.loaded.values())
    assert sum(event.stored for event in told) == sum(traffic.stored.values())
    assert [event.held for event in told] == [0, 0, 24, 24, 0, 0, 0, 24]  # of one head
    assert told[2].rows == slice(2, 4)
    assert told[5].tile is tile
