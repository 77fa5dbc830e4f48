"""Each step of the kernels against its namesake in `algorithm/`, or against the definition."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import pytest
import torch
import triton
import triton.language as tl
from torch import Tensor

from tilewise import Band, BlockMask
from tilewise.algorithm import dropout
from tilewise.algorithm.online_softmax import LOG2E, State
from tilewise.algorithm.scores import Scores
from tilewise.algorithm.tiles import run
from tilewise.kernels.triton import steps, walk


@dataclass(frozen=True)
class Sides:
    ROWS: int
    KEYS: int
    RUNS: bool


@triton.jit
def tanh_kernel(x, n: tl.constexpr):
    at = tl.arange(0, n)
    tl.store(x + at, steps.tanh(tl.load(x + at)))


def test_tanh_is_right_to_a_few_roundings_and_near_zero_too() -> None:
    x = torch.cat([torch.linspace(-12, 12, 1024), torch.logspace(-8, 1, 1024)])
    expected = torch.tanh(x.double())
    tanh_kernel[(1,)](x, 2048)
    assert ((x.double() - expected).abs() <= 2.5e-7 * expected.abs()).all()


@dataclass(frozen=True)
class Products:
    PRECISION: str


@triton.jit
def product_kernel(out, a, b, acc, M: tl.constexpr, D: tl.constexpr, N: tl.constexpr, O: tl.constexpr):
    m, d, n = tl.arange(0, M), tl.arange(0, D), tl.arange(0, N)
    x = steps.parts(tl.load(a + m[:, None] * D + d[None, :]), O)
    y = steps.turned(steps.parts(tl.load(b + n[:, None] * D + d[None, :]), O))
    at = m[:, None] * N + n[None, :]
    tl.store(out + at, steps.product(x, y, None, O) if acc is None else steps.product(x, y, tl.load(acc + at), O))


def product(a: Tensor, b: Tensor, acc: Tensor | None = None, precision: str = "bf16x6") -> Tensor:
    """acc + a b^T by `steps.product`."""
    out = torch.empty(len(a), len(b))
    product_kernel[(1,)](out, a, b, acc, *a.shape, len(b), Products(precision))
    return out


@pytest.mark.parametrize("precision", ["bf16x6", "ieee"])
@pytest.mark.parametrize("d", [16, 64])
@pytest.mark.parametrize("make", [torch.randn, torch.rand])
def test_a_product_has_the_error_of_fp32(make: Callable[..., Tensor], d: int, precision: str) -> None:
    torch.manual_seed(0)
    a, b, acc = make(64, d), make(64, d), make(64, 64)
    for start in (None, acc):
        exact = a.double() @ b.double().T + (0 if start is None else start)
        ours, plain = (
            (x.double() - exact).square().mean().sqrt()
            for x in (product(a, b, start, precision), a @ b.T + (0 if start is None else start))
        )
        assert ours <= 2 * plain


@triton.jit
def parts_kernel(out, x, N: tl.constexpr, O: tl.constexpr):
    n = tl.arange(0, N)
    high, middle, low = steps.parts(tl.load(x + n), O)
    tl.store(out + n, high.to(tl.float32))
    tl.store(out + N + n, middle.to(tl.float32))
    tl.store(out + 2 * N + n, low.to(tl.float32))


def test_parts_add_up_to_the_number_and_have_its_sign() -> None:
    largest, least = torch.finfo(torch.float32).max, torch.finfo(torch.float32).tiny
    x = torch.cat([torch.randn(1020) * torch.logspace(-32, 38, 1020), torch.tensor([largest, -largest, least, 0.0])])
    out = torch.empty(3, 1024)
    parts_kernel[(1,)](out, x, 1024, Products("bf16x6"))
    assert torch.equal(out, out.bfloat16().float())
    assert (out.sign() * x.sign() >= 0).all()
    wrong = (out.double().sum(0) - x.double()).abs()
    assert (wrong[x.abs() >= 2.0**-110] == 0).all()
    assert (wrong < 2.0**-133).all()  # bf16's least number


def test_a_product_meets_inf_nan_and_the_largest_numbers_as_fp32_does() -> None:
    """Some rows of a have one of them. Lower parts of b are often 0, which with inf make NaN."""
    largest = torch.finfo(torch.float32).max
    torch.manual_seed(0)
    b = torch.cat([torch.randn(8, 16), torch.randn(8, 16).bfloat16().float()])
    b[:4] = b[:4].sign() * 0.998
    b[-1] = 0.0
    a = torch.randn(16, 16)
    for row, value in enumerate((torch.inf, -torch.inf, torch.nan, largest, -largest, 3.4e38, 2.0**-126, 2.0**-149)):
        a[row, row] = value
    a[8, :2], a[9, :2] = torch.inf, torch.tensor([torch.inf, -torch.inf])
    for x, y in ((a, b), (b, a)):
        got, exact = product(x, y), (x.double() @ y.double().T).float()
        torch.testing.assert_close(got, exact, rtol=1e-5, atol=1e-5, equal_nan=True)
    spoilt = torch.tensor([torch.nan, torch.inf, -torch.inf, 1.0]).repeat(64).view(16, 16)
    got, exact = product(a, b, spoilt), (a.double() @ b.double().T).float() + spoilt
    torch.testing.assert_close(got, exact, rtol=1e-5, atol=1e-5, equal_nan=True)


@triton.jit
def keep_kernel(out, seed, threshold, b, h, i0, j0, FIRST: tl.constexpr, O: tl.constexpr):
    A: tl.constexpr = O.ROWS if FIRST else O.KEYS
    B: tl.constexpr = O.KEYS if FIRST else O.ROWS
    kept = steps.keep(tl.load(seed), threshold, b, h, i0, j0, FIRST, O)
    tl.store(out + tl.arange(0, A)[:, None] * B + tl.arange(0, B)[None, :], kept.to(tl.int8))


@pytest.mark.parametrize("first", [True, False])
@pytest.mark.parametrize(("i0", "j0", "runs"), [(32, 64, True), (0, 0, True), (5, 13, False), (32, 64, False)])
@pytest.mark.parametrize("p", [0.3, 0.001, 1.0])
def test_keep_draws_the_bits_of_algorithm_dropout(first: bool, i0: int, j0: int, runs: bool, p: float) -> None:
    rows, keys, b, h = 32, 16, 3, 5
    out = torch.empty((rows, keys) if first else (keys, rows), dtype=torch.int8)
    least = dropout.threshold(p) - 1
    seed = torch.tensor(-123456789012345)
    keep_kernel[(1,)](
        out, seed, least - 2**32 if least >= 2**31 else least, b, h, i0, j0, first, Sides(rows, keys, runs)
    )
    index = (torch.tensor(b), torch.tensor(h), torch.arange(i0, i0 + rows)[:, None], torch.arange(j0, j0 + keys))
    expected = dropout.keep(seed, p, *index)
    assert torch.equal(out.bool(), expected if first else expected.T)


@triton.jit
def softmax_kernel(
    S,
    V,
    o,
    lse,
    sink,
    ROWS: tl.constexpr,
    KEYS: tl.constexpr,
    D: tl.constexpr,
    SINK: tl.constexpr,
    HEADROOM: tl.constexpr,
):
    rows, keys, columns = tl.arange(0, ROWS), tl.arange(0, KEYS), tl.arange(0, D)
    m = tl.full((ROWS,), -steps.INF, tl.float32)
    l = tl.zeros((ROWS,), tl.float32)
    acc = tl.zeros((ROWS, D), tl.float32)
    for n in tl.static_range(3):
        tile = tl.load(S + rows[:, None] * (3 * KEYS) + n * KEYS + keys[None, :])
        v = tl.load(V + (n * KEYS + keys)[:, None] * D + columns[None, :])
        m, l, P, alpha = steps.rescale(m, l, tile, 0.5, True, HEADROOM)
        acc = acc * alpha[:, None] + tl.dot(P, v)
    acc, L = steps.finalize(m - HEADROOM, l, acc, tl.load(sink), SINK)
    tl.store(o + rows[:, None] * D + columns[None, :], acc)
    tl.store(lse + rows, L)


@pytest.mark.parametrize("headroom", [0, 12])
@pytest.mark.parametrize("sink", [None, -2.0, 90.0])
def test_rescale_and_finalize_are_state_update_and_finalize(sink: float | None, headroom: int) -> None:
    rows, keys, d = 16, 16, 16
    torch.manual_seed(0)
    S, V = torch.randn(rows, 3 * keys) * 20, torch.randn(3 * keys, d)
    S[0] = -torch.inf  # an empty row
    S[1, : 2 * keys] = -torch.inf  # one whose first tiles are
    o, lse = torch.empty(rows, d), torch.empty(rows)
    softmax_kernel[(1,)](S, V, o, lse, torch.tensor(sink or 0.0), rows, keys, d, sink is not None, headroom)
    state = State.init(1, 1, rows, d)
    for n in range(3):
        state.update(0.5 * S[None, None, :, n * keys : (n + 1) * keys], V[None, None, n * keys : (n + 1) * keys])
    expected = state.finalize(None if sink is None else torch.tensor(sink * LOG2E))
    torch.testing.assert_close(o, expected[0][0, 0], rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(lse, expected[1][0, 0], rtol=1e-6, atol=1e-6)


@triton.jit
def terms_kernel(
    S, bias, slope, mask, i0, j0, diagonal, k_end, left, right, row, column,
    ROWS: tl.constexpr, KEYS: tl.constexpr, LEFT: tl.constexpr, RIGHT: tl.constexpr, END: tl.constexpr,
    WIDE: tl.constexpr,
):  # fmt: skip
    i = i0 + tl.arange(0, ROWS)[:, None]
    j = j0 + tl.arange(0, KEYS)[None, :]
    at = S + (i - i0) * KEYS + (j - j0)
    x = steps.add_bias(tl.load(at), bias, i, j, row, column, 1000, 1000, True, True, WIDE)
    x = steps.alibi(x, slope, i, j, diagonal)
    x = steps.bool_mask(x, mask, i, j, row, column, 1000, 1000, True, True, WIDE)
    tl.store(at, steps.band_mask(x, i, j, diagonal, left, right, k_end, LEFT, RIGHT, END))


@pytest.mark.parametrize(("wide", "k_len"), [(True, 70), (False, 70), (False, 60)])
@pytest.mark.parametrize("band", [Band(), Band(None, 0), Band(5, None), Band(9, 3), Band(-1, 3)])
def test_bias_alibi_boolean_mask_and_band_are_those_of_scores(band: Band, wide: bool, k_len: int) -> None:
    rows, keys, i0, j0, q_len = 16, 32, 16, 32, 40
    torch.manual_seed(0)
    S, bias = torch.randn(1, 1, rows, keys), torch.randn(64, 80)
    bias[20, 40], bias[21] = -torch.inf, torch.finfo(torch.float32).min
    mask = torch.rand(64, 80) < 0.7
    shown = 22 + band.offset(q_len, k_len) + (band.left == -1)
    bias[22, shown], mask[22, shown] = torch.nan, True
    rules = Scores(
        band=band, offset=band.offset(q_len, k_len), bias=bias[None, None], visible=mask[None, None],
        slopes=torch.full((1, 1, 1, 1), 0.3),
    )  # fmt: skip
    free = (0, 0)  # all of the tile is edge
    expected = rules.bias_and_mask(S.clone(), run(i0, i0 + rows), run(j0, j0 + keys, free))
    expected[..., k_len - j0 :] = -torch.inf
    terms_kernel[(1,)](
        S, bias, 0.3, mask.view(torch.uint8), i0, j0, rules.diagonal, k_len, *band.bounds, 10 if wide else 80, 1,
        rows, keys, band.left is not None, band.right is not None, k_len < j0 + keys, wide,
    )  # fmt: skip
    torch.testing.assert_close(S, expected, rtol=1e-5, atol=1e-5, equal_nan=True)


@triton.jit
def bits_kernel(out, bits, tile, i0, j0, ROWS: tl.constexpr, KEYS: tl.constexpr, TURNED: tl.constexpr):
    if TURNED:
        i = i0 + tl.arange(0, ROWS)[None, :]
        j = j0 + tl.arange(0, KEYS)[:, None]
        S = tl.zeros((KEYS, ROWS), tl.float32)
    else:
        i = i0 + tl.arange(0, ROWS)[:, None]
        j = j0 + tl.arange(0, KEYS)[None, :]
        S = tl.zeros((ROWS, KEYS), tl.float32)
    S = steps.bits_mask(S, bits, tile, j, i0) if TURNED else steps.bits_mask(S, bits, tile, i, j0)
    tl.store(out + (i - i0) * KEYS + (j - j0), S)


@pytest.mark.parametrize("turned", [True, False])
@pytest.mark.parametrize(("rows", "keys", "i0", "j0"), [(32, 16, 160, 272), (16, 64, 112, 64), (128, 128, 128, 256)])
def test_bits_mask_is_the_block_mask(rows: int, keys: int, i0: int, j0: int, turned: bool) -> None:
    torch.manual_seed(0)
    dense = torch.rand(256, 384) < 0.5
    blocks = BlockMask.from_dense(dense)
    lists = blocks.query_major
    row = i0 // 128
    at = lists.mixed[0, 0, row].tolist().index(j0 // 128)
    out = torch.empty(rows, keys)
    tile = lists.mixed_bits[0, 0, row, at : at + 1]
    pool = blocks.turned if turned else blocks.bits
    bits_at_kernel[(1,)](out, pool.view(torch.int32), tile, i0, j0, rows, keys, turned)
    assert torch.equal(out == 0, dense[i0 : i0 + rows, j0 : j0 + keys])
    assert set(out.unique().tolist()) == {-torch.inf, 0.0}


@triton.jit
def bits_at_kernel(out, bits, tile, i0, j0, ROWS: tl.constexpr, KEYS: tl.constexpr, TURNED: tl.constexpr):
    bits_kernel(out, bits, tl.load(tile), i0, j0, ROWS, KEYS, TURNED)


@triton.jit
def tiles_kernel(out, cu, batch, heads, length, together, SIDE: tl.constexpr, PACKED: tl.constexpr, LAST: tl.constexpr):
    s, head, first = steps.which_tile(batch, heads, length, cu, together, SIDE, PACKED, LAST)
    start, span, used = steps.extent(s, batch, length, cu, cu, PACKED, False)
    at = out + tl.program_id(0) * 5
    tl.store(at, s)
    tl.store(at + 1, head)
    tl.store(at + 2, start + first)
    tl.store(at + 3, tl.minimum(first + SIDE, span) - first)
    tl.store(at + 4, used)


@pytest.mark.parametrize("last_first", [True, False])
@pytest.mark.parametrize("together", [1, 4])
def test_dense_tiles_cover_every_row_of_every_head_once(together: int, last_first: bool) -> None:
    batch, heads, length, side = 2, 3, 70, 32
    out = torch.empty(batch * heads * 3, 5, dtype=torch.int32)
    tiles_kernel[(len(out),)](out, None, batch, heads, length, together, side, False, last_first)
    seen = {(s, h, row) for s, h, first, n, _ in out.tolist() for row in range(first, first + n)}
    assert len(seen) == sum(out[:, 3].tolist()) == batch * heads * length


@pytest.mark.parametrize("cu", [(0, 5, 5, 70, 90), (0, 0, 0), (0, 33), (0, 32, 64), (7, 3, 400), (0, 64, 20, 96)])
def test_packed_tiles_cover_every_token_once_and_know_what_is_behind_the_last_sequence(cu: tuple[int, ...]) -> None:
    heads, total, side = 2, 96, 32
    batch, bounds = len(cu) - 1, torch.tensor(cu, dtype=torch.int32)
    out = torch.empty((total // side + batch + 1) * heads, 5, dtype=torch.int32)
    tiles_kernel[(len(out),)](out, bounds, batch, heads, total, 1, side, True, True)
    rows = [(s, h, row, used) for s, h, first, n, used in out.tolist() for row in range(first, first + max(n, 0))]
    assert all(0 <= row < total for _, _, row, _ in rows)  # contents out of range are clamped
    if list(cu) == sorted(cu) and cu[0] == 0:
        assert len({(h, row) for _, h, row, _ in rows}) == len(rows) == heads * total
        for s, _, row, used in rows:
            assert (
                (cu[s] <= row < cu[s + 1] and used == cu[s + 1] - cu[s]) if s < batch else (row >= cu[-1] and not used)
            )


class Walked(NamedTuple):
    """What `walk` asks of Options."""

    BLOCKS: bool
    CUT: bool


@triton.jit
def walk_kernel(
    out, full_count, full, mixed_count, mixed, bits, lo, hi, free_lo, free_hi, SIDE: tl.constexpr, O: tl.constexpr
):  # fmt: skip
    lists = (full_count, full, mixed_count, mixed, bits, 0, 0, 8, 8)
    zero = tl.program_id(0)
    way = walk.way(lo, hi, free_lo, free_hi, lists, zero, zero, zero == 0, zero, 0, SIDE, O)
    for n in tl.range(way[0], walk.end(way)):
        position, edge, tile = walk.visit(way, n, walk.entry(way, n, SIDE, O), 0, SIDE, O)
        tl.store(out + 3 * (n - way[0]), position)
        tl.store(out + 3 * (n - way[0]) + 1, edge)
        tl.store(out + 3 * (n - way[0]) + 2, tile)


@pytest.mark.parametrize(
    ("lo", "hi", "free_lo", "free_hi"),
    [
        (0, 500, 0, 500),
        (0, 384, 0, 384),
        (0, 500, 100, 300),
        (130, 140, 135, 136),
        (256, 256, 256, 256),
        (40, 333, 40, 333),
        (0, 512, 0, 512),
    ],
)
@pytest.mark.parametrize(("blocks", "cut"), [(False, True), (True, True), (True, False)])
def test_the_walk_visits_what_is_visible_once_and_takes_as_free_what_is(
    lo: int, hi: int, free_lo: int, free_hi: int, blocks: bool, cut: bool
) -> None:
    if not cut:  # no Band, and the sequence ends with the mask
        lo, free_lo, free_hi = 0, 0, hi
    side = 32
    full, mixed = ([n for n in tiles if cut or n < hi / 128] for tiles in ((0, 3), (1, 2)))
    out = torch.full((64, 3), -2, dtype=torch.int32)
    counts = [torch.tensor([len(tiles)], dtype=torch.int32) for tiles in (full, mixed)]
    lists = [torch.tensor([*tiles, 99], dtype=torch.int32) for tiles in (full, mixed)]
    walk_kernel[(1,)](
        out, counts[0], lists[0], counts[1], lists[1], torch.tensor([70, 71, 99], dtype=torch.int32),
        lo, hi, free_lo, free_hi, side, Walked(blocks, cut),
    )  # fmt: skip
    visits = out[out[:, 0] != -2].tolist()
    starts = [start for start, _, _ in visits]
    assert len(set(starts)) == len(starts)
    positions = {p for start in starts for p in range(start, start + side)}
    visible = {p for p in range(lo, hi) if not blocks or p // 128 in full + mixed}
    assert visible <= positions
    unit = 128 if blocks else side
    assert positions <= set(range(lo // unit * unit, -(-hi // unit) * unit))
    for start, edge, tile in visits:
        assert tile == (70 + mixed.index(start // 128) if blocks and start // 128 in mixed else -1)
        # Without CUT the bits of a MIXED tile hide what is past the end.
        assert edge or (tile >= 0 and not cut) or free_lo <= start <= start + side <= free_hi
        if not blocks:
            assert edge == (not free_lo <= start <= start + side <= free_hi)
