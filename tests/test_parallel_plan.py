"""What each rank does by itself: pieces that are the whole mask, once; equal work; heads in parts; sums of pieces."""

from __future__ import annotations

import random
from itertools import pairwise

import pytest
import torch
from torch import Tensor

import tilewise
from tilewise.parallel import ring
from tilewise.parallel.order import chunks
from tilewise.parallel.plan import Whole, pieces, span


def random_whole(r: random.Random) -> Whole:
    ranks, layout = r.choice((1, 2, 3, 4)), r.choice(("zigzag", "contiguous"))
    runs = 2 * ranks if layout == "zigzag" else ranks
    length = runs * r.choice((1, 3, 60, 128, 140, 256))
    length = min(length, runs * (1200 // runs))
    cu = None
    if r.random() < 0.5:
        cu = (0, *sorted(r.choice((0, length // runs, r.randint(0, length), length)) for _ in range(r.randint(0, 6))))
    bounds = [r.choice((None, 0, 1, 5, 127, 128, 300, -3)) for _ in range(2)]
    return Whole(length, ranks, layout, tilewise.Band(*bounds, "top_left"), r.random() < 0.5, cu)


def seen(whole: Whole, rank: int, owner: int) -> Tensor:
    """How many pieces show each pair of (row of rank, key of owner), by the contract of a call and its origin."""
    size = whole.length // whole.ranks
    count = torch.zeros(size, size, dtype=torch.int64)
    for piece in pieces(whole, rank, owner):
        (a, b), (c, d) = piece.rows, piece.keys
        assert 0 <= a < b <= size
        assert 0 <= c < d <= size
        _, i0, j0 = piece.origin
        if piece.cu is None:
            i, j = torch.arange(b - a)[:, None], torch.arange(d - c)
            count[a:b, c:d] += piece.band.visible(i + i0, j + j0, piece.band.offset(b - a, d - c))
        else:
            assert (i0, j0, piece.cu[0], piece.cu[-1]) == (0, 0, 0, b - a)
            for lo, hi in pairwise(piece.cu):
                count[a + lo : a + hi, c + lo : c + hi] += piece.band.dense(hi - lo, hi - lo)
    return count


def order_of(whole: Whole, rank: int) -> Tensor:
    return torch.cat(
        [torch.arange(c.first, c.first + c.size) for c in chunks(whole.length, whole.ranks, rank, whole.layout)]
    )


@pytest.mark.parametrize("seed", range(60))
def test_pieces_are_the_mask_once(seed: int) -> None:
    whole = random_whole(random.Random(seed))
    cu = torch.tensor(whole.cu if whole.cu is not None else (0, whole.length))
    sequence = torch.searchsorted(cu, torch.arange(whole.length), right=True)  # 0: none, or past the last one
    inside = (sequence > 0) & (sequence < len(cu))
    dense = whole.band.dense(whole.length, whole.length) & (sequence[:, None] == sequence) & inside
    for rank in range(whole.ranks):
        rows = order_of(whole, rank)
        for owner in range(whole.ranks):
            expected = dense[rows][:, order_of(whole, owner)]
            assert torch.equal(seen(whole, rank, owner), expected.long()), (whole, rank, owner)


@pytest.mark.parametrize("seed", range(30))
def test_pieces_lie_where_dropout_looks_them_up(seed: int) -> None:
    whole = random_whole(random.Random(seed))
    whole = Whole(whole.length, whole.ranks, whole.layout, whole.band, True, whole.cu)
    cu = whole.cu or (0, whole.length)
    for rank in range(whole.ranks):
        for owner in range(whole.ranks):
            for piece in pieces(whole, rank, owner):
                b0, i0, j0 = piece.origin
                first_row, first_key = order_of(whole, rank)[piece.rows[0]], order_of(whole, owner)[piece.keys[0]]
                if piece.cu is None:
                    assert (cu[b0] + i0, cu[b0] + j0) == (first_row, first_key)
                else:
                    assert [cu[b0] + n for n in piece.cu[:-1]] == [*cu[b0 : b0 + len(piece.cu) - 1]]


def test_causal_zigzag_is_equal_work_in_one_piece_a_step() -> None:
    n, C = 4, 64
    whole = Whole(2 * n * C, n, "zigzag", tilewise.Band(None, 0, "top_left"), False)
    for rank in range(n):
        for owner in range(n):
            (piece,) = pieces(whole, rank, owner)
            rows, keys = piece.rows[1] - piece.rows[0], piece.keys[1] - piece.keys[0]
            assert piece.band.is_full == (rank != owner)
            assert piece.band.count(rows, keys) == (2 * C * C if rank != owner else C * (2 * C + 1))


def test_a_window_passes_ranks_by() -> None:
    """Contiguous, a window of 100: each rank hears of its left neighbour alone, and of that one's last 128 keys."""
    whole = Whole(4096, 4, "contiguous", tilewise.Band(100, 0, "top_left"), False)
    spans = [[span(pieces(whole, rank, owner)) for owner in range(4)] for rank in range(4)]
    for rank in range(4):
        for owner in range(4):
            expected = {0: (0, 1024), 1: (896, 1024)}.get(rank - owner, (0, 0))
            assert spans[rank][owner] == expected


def test_heads_are_done_in_parts_when_there_is_enough() -> None:
    def parts(heads: int, kv_heads: int, length: int, head_groups: int | None = None) -> list[tuple[slice, slice]]:
        q, k = (torch.empty(1, h, length, 8, device="meta") for h in (heads, kv_heads))
        whole = Whole(length, 1, "zigzag", tilewise.Band(), False)
        options = (None, None, 1.0, 0.0, 0.0, None, False, None, False)
        call = ring.Call(None, whole, False, 0, *options, head_groups)  # type: ignore[arg-type]
        return call.heads(q, k)

    assert parts(16, 16, 32768) == [(slice(a, a + 4), slice(a, a + 4)) for a in range(0, 16, 4)]
    assert len(parts(16, 16, 131072)) == ring.MOST_GROUPS
    assert len(parts(16, 16, 1024)) == 1
    assert parts(6, 3, 64, 2) == [(slice(0, 4), slice(0, 2)), (slice(4, 6), slice(2, 3))]
    assert len(parts(12, 3, 10**6)) == 3


# --- sums ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("n", [1, 2, 3, 7])
def test_a_gradient_is_rounded_once(n: int) -> None:
    torch.manual_seed(n)
    parts = torch.randn(n, 1, 2, 64, 8).bfloat16()
    out = torch.full(parts.shape[1:], torch.nan, dtype=torch.bfloat16)
    total = ring.Sum(out, n + 1)
    for part in parts:
        total.add((0, 64), part)
    total.add((16, 32), parts[0, :, :, :16])
    total.finish()
    exact = parts.float().sum(0)
    exact[:, :, 16:32] += parts[0, :, :, :16].float()
    assert torch.equal(out, exact.bfloat16())
    ring.Sum(out, 2).finish()
    assert not out.any()


@pytest.mark.parametrize("n", [1, 2, 7])
def test_merged_rows_are_one_softmax(n: int) -> None:
    """Each part of the keys to some of the rows, rows of no keys in between; o within one rounding of the whole's."""
    torch.manual_seed(n)
    S, V = torch.randn(2, 64, 32 * n) * 3, torch.randn(2, 32 * n, 8)
    S[:, 40:, :32] = S[:, :16] = -torch.inf
    o, lse = torch.full((1, 2, 64, 8), torch.nan).bfloat16(), torch.full((1, 2, 64), torch.nan)
    merged = ring.Merged(o, lse, None, n)
    exact = []
    for k in reversed(range(n)):
        rows, keys = (16, 64) if k else (16, 40), slice(32 * k, 32 * k + 32)
        part, here = S[:, rows[0] : rows[1], keys], torch.softmax(S[:, rows[0] : rows[1], keys], -1) @ V[:, keys]
        exact.append((rows, here.bfloat16(), torch.logsumexp(part, -1)))
        merged.take(rows, exact[-1][1][None], exact[-1][2][None])
    merged.finish()
    whole = torch.logsumexp(S, -1)
    torch.testing.assert_close(lse[0], whole)
    expected = torch.zeros(2, 64, 8)
    for (a, b), part_o, part_lse in exact:
        expected[:, a:b] += (part_lse - whole[:, a:b]).exp().nan_to_num()[..., None] * part_o
    torch.testing.assert_close(o[0].float(), expected, rtol=2**-8, atol=1e-6)
