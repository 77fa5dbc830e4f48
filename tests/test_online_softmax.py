"""State: merge is a monoid, update is merge with one tile, and rows without keys stay empty."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tilewise.algorithm.online_softmax import LOG2E, State, bounded

ROWS, DIM = 4, 3


def tile(seed: int, keys: int, hidden: float = 0.3, scale: float = 5.0) -> tuple[torch.Tensor, torch.Tensor]:
    """Scores in bits, some -inf, and values, fp64."""
    make = torch.Generator().manual_seed(seed)
    S = torch.randn(1, 1, ROWS, keys, generator=make, dtype=torch.float64) * scale
    S.masked_fill_(torch.rand(S.shape, generator=make) < hidden, -math.inf)
    S[..., 0, :] = -math.inf  # row 0 sees no key of this tile
    return S, torch.randn(1, 1, keys, DIM, generator=make, dtype=torch.float64)


def state(*tiles: tuple[torch.Tensor, torch.Tensor]) -> State:
    s = State.init(1, 1, ROWS, DIM, torch.float64)
    for S, V in tiles:
        s.update(S.clone(), V)
    return s


def same(a: State, b: State) -> None:
    for x, y in zip(a.finalize(), b.finalize(), strict=True):
        torch.testing.assert_close(x, y, rtol=1e-12, atol=1e-12)


seeds = st.integers(0, 10**6)
sizes = st.integers(1, 5)


@settings(max_examples=50, deadline=None)
@given(seeds, sizes, sizes, sizes)
def test_merge_is_associative_and_has_an_identity(seed: int, n: int, m: int, k: int) -> None:
    a, b, c = (state(tile(seed + i, keys)) for i, keys in enumerate((n, m, k)))
    same(a.merge(b).merge(c), a.merge(b.merge(c)))
    same(a.merge(b), b.merge(a))
    empty = State.init(1, 1, ROWS, DIM, torch.float64)
    same(a.merge(empty), a)
    same(empty.merge(a), a)


@settings(max_examples=50, deadline=None)
@given(seeds, sizes, sizes)
def test_update_is_merge_with_the_tiles_state(seed: int, n: int, m: int) -> None:
    first, second = tile(seed, n), tile(seed + 1, m)
    same(state(first, second), state(first).merge(state(second)))


@settings(max_examples=50, deadline=None)
@given(seeds, st.lists(sizes, min_size=1, max_size=4))
def test_it_is_the_softmax_of_all_tiles(seed: int, keys: list[int]) -> None:
    tiles = [tile(seed + i, n) for i, n in enumerate(keys)]
    S, V = torch.cat([S for S, _ in tiles], -1) / LOG2E, torch.cat([V for _, V in tiles], -2)
    o, lse = state(*tiles).finalize()
    torch.testing.assert_close(o, torch.softmax(S, -1).nan_to_num(0.0) @ V, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(lse, torch.logsumexp(S, -1), rtol=1e-12, atol=1e-12)
    assert (o[..., 0, :] == 0).all()
    assert (lse[..., 0] == -math.inf).all()


def test_a_row_whose_first_tiles_are_empty_and_whose_scores_are_low() -> None:
    """A carried maximum clamped to a finite number would let exp(-500) underflow; subtracting -inf would give NaN."""
    nothing = torch.full((1, 1, 1, 2), -math.inf)
    low = torch.tensor([[[[-500.0, -501.0]]]]) * LOG2E
    V = torch.tensor([[[[1.0], [3.0]]]])
    s = State.init(1, 1, 1, 1)
    for S in (nothing, nothing, low):
        s.update(S.clone(), V)
    o, lse = s.finalize()
    expected = torch.softmax(torch.tensor([-500.0, -501.0]), -1) @ torch.tensor([1.0, 3.0])
    torch.testing.assert_close(o.flatten()[0], expected, rtol=1e-4, atol=0)
    torch.testing.assert_close(lse.flatten()[0], torch.tensor(-500.0 + math.log1p(math.exp(-1))), rtol=1e-6, atol=0)


@pytest.mark.parametrize("sink", [-3.0, 0.0, 200.0, -math.inf])
def test_a_sink_joins_the_denominator_but_not_an_empty_row(sink: float) -> None:
    S, V = tile(1, 5, hidden=0.0)
    o, lse = state((S, V)).finalize(torch.tensor(sink, dtype=torch.float64) * LOG2E)
    with_sink = torch.cat([S / LOG2E, torch.full((1, 1, ROWS, 1), sink, dtype=torch.float64)], -1)
    P = torch.softmax(with_sink, -1)[..., :-1]
    torch.testing.assert_close(o[..., 1:, :], (P @ V)[..., 1:, :], rtol=1e-12, atol=1e-200)
    torch.testing.assert_close(lse[..., 1:], torch.logsumexp(with_sink, -1)[..., 1:], rtol=1e-12, atol=1e-12)
    assert (o[..., 0, :] == 0).all()
    assert (lse[..., 0] == -math.inf).all()


def test_bounded_rows_keep_pivot_zero_and_their_bits_whatever_rows_stand_beside_them() -> None:
    tiles = [tile(i, 5, scale=3.0) for i in range(3)]
    alone = State.init(1, 1, ROWS, DIM, torch.float64, bounded=torch.ones(1, 1, ROWS, 1, dtype=torch.bool))
    mixed_rows = torch.tensor([True, True, False, True])[:, None]
    mixed = State.init(1, 1, ROWS, DIM, torch.float64, bounded=mixed_rows[None, None])
    for S, V in tiles:
        alone.update(S.clone(), V)
        mixed.update(S.clone(), V)
    assert alone.all_bounded
    assert not mixed.all_bounded
    same(alone, state(*tiles))
    same(mixed, state(*tiles))
    for x, y in zip(alone.finalize(), mixed.finalize(), strict=True):
        assert torch.equal(x[:, :, [0, 1, 3]], y[:, :, [0, 1, 3]])


@pytest.mark.parametrize(
    ("change", "rows"),
    [
        (lambda q, k, v: None, [True, True]),
        (lambda q, k, v: q[:, :, 1].mul_(1e3), [True, False]),
        (lambda q, k, v: k[:, :, 3].mul_(1e3), [False, False]),
        (lambda q, k, v: k[:, :, 3, 0].fill_(math.nan), [False, False]),
        (lambda q, k, v: q[:, :, 0, 0].fill_(math.inf), [False, True]),
        (lambda q, k, v: v[:, :, 2, 0].fill_(-1e30), [False, False]),
        (lambda q, k, v: v[:, :, 2, 0].fill_(math.nan), [False, False]),
    ],
)
def test_bounded_is_a_row_property_that_large_or_undefined_numbers_end(change, rows: list[bool]) -> None:
    q, k, v = (torch.ones(1, 1, n, 4) for n in (2, 5, 5))
    change(q, k, v)
    assert bounded(q, k, v, scale=-1.0).flatten().tolist() == rows


def test_a_softcap_bounds_any_finite_row() -> None:
    q = torch.tensor([[[[1e4, 0.0], [math.nan, 0.0]]]])
    assert bounded(q, q[:, :, :1], q[:, :, :1], scale=1.0, cap=30.0).flatten().tolist() == [True, False]
