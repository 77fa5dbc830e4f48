"""tests/gpu/stress.py: what it takes for a difference. The program itself needs a GPU."""

from __future__ import annotations

import pytest
import torch
from gpu.stress import differing

BF16 = torch.bfloat16


def results() -> dict[str, torch.Tensor]:
    make = torch.Generator().manual_seed(0)
    return {name: torch.randn(2, 3, 200, 64, generator=make).to(BF16) for name in ("dq", "dk")}


def test_equal_results_do_not_differ() -> None:
    assert differing(results(), results(), ordered=False).tolist() == [False, False]


def test_sums_in_another_order_do_not_differ() -> None:
    """One bit of bf16 in a hundredth of dQ: what is left of another order after rounding is less."""
    changed = results()
    changed["dq"].view(-1)[::100].mul_(1 + 2**-8)
    assert differing(results(), changed, ordered=False).tolist() == [False, False]
    assert differing(results(), changed, ordered=True).tolist() == [True, False]


@pytest.mark.parametrize(
    ("name", "rows", "factor", "found"),
    [
        ("dq", slice(130, 140), 1.01, [True, False]),
        ("dq", slice(195, 200), 0.9, [True, False]),  # behind the last whole 64
        ("dq", slice(0, 1), torch.nan, [True, False]),
        ("dk", slice(199, 200), 1.01, [False, True]),
    ],
)
def test_a_tile_that_is_wrong_is_seen(name: str, rows: slice, factor: float, found: list[bool]) -> None:
    changed = results()
    changed[name][1, 2, rows] *= factor
    assert differing(results(), changed, ordered=False).tolist() == found
