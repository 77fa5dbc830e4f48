"""The covering arrays: that they cover, that they are small, and that the rows become cases of their own kind."""

from __future__ import annotations

from collections import Counter
from itertools import combinations, product

import pytest
from cases import sample
from covering import cover, cover_product, options, padded, pairs, specialisation
from triton_cases import ARRAY, MOST_PAIRS, SAMPLES, VALUES, array, array_case, on_gpu, real_size

PLAIN = ("dtype", "mask", "alibi", "softcap", "sink", "dropout", "aligned", "band")  # in a row as in a case


@pytest.mark.parametrize("times", [1, 3])
def test_cover_holds_every_pair_that_there_is(times: int) -> None:
    rows = [options(sample(seed)) for seed in range(300)]
    there = Counter(pair for row in rows for pair in pairs(row))
    chosen = cover(rows, times)
    held = Counter(pair for n in chosen for pair in pairs(rows[n]))
    assert len(set(chosen)) == len(chosen) < len(rows)
    assert all(held[pair] >= min(times, n) for pair, n in there.items())


def test_cover_prefers_cheap_rows() -> None:
    rows = [{"a": 1, "b": 2}, {"a": 1, "b": 2}, {"a": 2, "b": 2}]
    assert sorted(cover(rows, 1, lambda n: (9.0, 1.0, 1.0)[n])) == [1, 2]


def test_a_product_of_two_options_is_covered_by_all_of_it() -> None:
    rows = cover_product({"a": (1, 2, 3), "b": ("x", "y")})
    assert sorted((row["a"], row["b"]) for row in rows) == sorted(product((1, 2, 3), "xy"))


def test_the_array_covers_in_at_most_120_rows() -> None:
    wanted = {((a, x), (b, y)) for a, b in combinations(ARRAY, 2) for x in ARRAY[a] for y in ARRAY[b]}
    assert {pair for row in array() for pair in pairs(row)} == wanted
    assert len(array()) <= 120


def test_the_cases_of_a_row_are_what_it_says() -> None:
    for row in array():
        kinds = set()
        for n in range(VALUES):
            case = array_case(row, n)
            assert case == array_case(row, n)
            found = specialisation(case)
            kinds.add(tuple(found.items()))
            assert {name: row[name] for name in PLAIN} == {name: found[name] for name in PLAIN}
            assert (padded(case.dim), padded(case.v_dim), case.bias_dims) == (row["d"], row["d_v"], row["bias"])
            assert (case.cu_q is not None, case.cu_k is not None) == (row["layout"] != "dense", "own" in row["layout"])
            assert "".join("qk"[n] for n, given in enumerate((case.q_lens, case.k_lens)) if given) == row["lens"]
        assert len(kinds) == 1, kinds


def test_samples_of_real_size_are_large_and_fit() -> None:
    cases = [real_size(seed) for seed in range(SAMPLES)]
    assert max(max(case.q_len, case.k_len) for case in cases) > 1000
    assert sum(max(case.q_len, case.k_len) > 200 for case in cases) > SAMPLES / 2
    assert {padded(case.dim) for case in cases} >= {16, 64, 128, 256}
    assert all(case.heads * case.q_len * case.k_len <= max(MOST_PAIRS, 10**6) for case in cases)


def test_every_case_for_a_gpu_can_be_built() -> None:
    """One in 13 of them: shapes fit one another, and the call is valid."""
    from tilewise import Problem

    for case in list(on_gpu().values())[::13]:
        inputs = {name: x for name, x in case.build().items() if name not in ("do", "dlse", "frozen")}
        Problem.of(inputs.pop("q"), inputs.pop("k"), inputs.pop("v"), **inputs)
