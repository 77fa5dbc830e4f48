"""The paper's tile sizes: the formulas, and that the tiles they give fit on the chip."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tilewise.algorithm.tiling import elements, flash_2_blocks, matmul_blocks, paper_blocks

capacities = st.integers(1, 2**20)
head_sizes = st.integers(1, 512)


@given(capacities, head_sizes)
@settings(max_examples=200, deadline=None)
def test_paper_blocks_are_algorithm_1_line_1(M: int, d: int) -> None:
    B_r, B_c = paper_blocks(M, d)
    assert 4 * d * (B_c - 1) < M <= 4 * d * B_c  # B_c = ceil(M / 4d), said without a division
    assert B_r == min(B_c, d)


@given(st.integers(1, 512), st.data())
@settings(max_examples=200, deadline=None)
def test_tiles_of_paper_blocks_fit_to_within_a_constant(d: int, data: st.DataObject) -> None:
    M = data.draw(st.integers(4 * d, 2**20), label="M")  # room for one row of each of the four at least
    B_r, B_c = paper_blocks(M, d)
    four_tiles, scores = 2 * B_r * d + 2 * B_c * d, B_r * B_c
    assert four_tiles <= M + 4 * d  # the ceilings may add one row to each
    assert scores <= M / 4 + d


@given(capacities, head_sizes)
@settings(max_examples=100, deadline=None)
def test_flash_2_holds_the_long_side(M: int, d: int) -> None:
    assert flash_2_blocks(M, d) == paper_blocks(M, d)[::-1]
    assert flash_2_blocks(M, d)[0] >= flash_2_blocks(M, d)[1]


@given(head_sizes, st.data())
@settings(max_examples=200, deadline=None)
def test_matmul_blocks_are_the_largest_square_that_fits(d: int, data: st.DataObject) -> None:
    M = data.draw(st.integers(2 * d + 1, 2**20), label="M")  # one row of each and one score fit
    B, also_B = matmul_blocks(M, d)
    assert B == also_B >= 1
    assert B * B + 2 * B * d <= M < (B + 1) ** 2 + 2 * (B + 1) * d


def test_the_papers_case() -> None:
    M = elements(100 * 1024, 2)
    assert M == 51200
    assert paper_blocks(M, 64) == (64, 200)
    assert paper_blocks(M, 128) == (100, 100)


@pytest.mark.parametrize("function", [paper_blocks, flash_2_blocks, matmul_blocks])
@pytest.mark.parametrize(("M", "d", "name"), [(0, 64, "M"), (-5, 64, "M"), (1024, 0, "d")])
def test_sizes_below_one_are_refused(function, M: int, d: int, name: str) -> None:
    with pytest.raises(
        ValueError, match=rf"^{name} must be a positive number of elements; got {M if name == 'M' else d}$"
    ):
        function(M, d)


def test_a_chip_without_room_for_one_element_is_refused() -> None:
    with pytest.raises(ValueError, match=r"^capacity must hold one element \(2 bytes\) at least; got 1 bytes$"):
        elements(1, 2)
