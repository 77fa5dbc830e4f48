"""Band, Masked and the index arithmetic, against definitions written out pair by pair."""

import itertools
import os
import subprocess
import sys
import tempfile
import textwrap
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tilewise.block_mask import BlockMask
from tilewise.mask import (
    INF,
    Band,
    Masked,
    causal,
    key_range,
    mask_free_queries,
    mask_free_range,
    query_range,
    sliding_window,
)

ROOT = Path(__file__).parents[1]
lengths = st.integers(0, 12)
bounds = st.none() | st.integers(-14, 14) | st.sampled_from([2**30, -(2**30), 2**40, -(2**40)])
bands = st.builds(Band, bounds, bounds, st.sampled_from(["bottom_right", "top_left"]))


def defined(band, q_len, k_len):
    """The mask by the definition, with no arithmetic of the package's."""
    offset = k_len - q_len if band.align == "bottom_right" else 0
    left = float("inf") if band.left is None else band.left
    right = float("inf") if band.right is None else band.right
    return [[-left <= j - (i + offset) <= right for j in range(k_len)] for i in range(q_len)]


# Band


@settings(deadline=None, max_examples=300)
@given(bands, lengths, lengths)
def test_band_dense_count_and_show_follow_the_definition(band, q_len, k_len):
    want = defined(band, q_len, k_len)
    dense = band.dense(q_len, k_len)
    assert dense.dtype == torch.bool
    assert dense.shape == (q_len, k_len)
    assert dense.tolist() == want
    assert band.count(q_len, k_len) == sum(map(sum, want))
    picture = band.show(q_len, k_len).split("\n")[1:]
    assert picture == ["".join(".#"[seen] for seen in row) for row in want]


@settings(deadline=None, max_examples=300)
@given(bands, bands, lengths, lengths)
def test_and_of_bands_shows_what_both_show(a, b, q_len, k_len):
    if a.align != b.align and not a.is_full and not b.is_full:
        with pytest.raises(ValueError, match="unlike align"):
            a & b
        return
    assert torch.equal((a & b).dense(q_len, k_len), a.dense(q_len, k_len) & b.dense(q_len, k_len))


@settings(deadline=None, max_examples=600)
@given(bands, lengths, lengths, st.data())
def test_ranges_are_exactly_the_rows_and_keys_they_name(band, q_len, k_len, data):
    seen, args = defined(band, q_len, k_len), (*band.bounds, band.offset(q_len, k_len))
    columns = [[row[j] for row in seen] for j in range(k_len)]
    for size, other, lines, any_range, all_range in (
        (q_len, k_len, seen, key_range, mask_free_range),
        (k_len, q_len, columns, query_range, mask_free_queries),
    ):
        lo = data.draw(st.integers(0, size))
        hi = data.draw(st.integers(lo, size))
        some, every = any_range(lo, hi, *args, other), all_range(lo, hi, *args, other)
        assert 0 <= some[0] <= every[0] <= every[1] <= some[1] <= other
        assert list(range(*some)) == [x for x in range(other) if any(line[x] for line in lines[lo:hi])]
        assert list(range(*every)) == [x for x in range(other) if lo < hi and all(line[x] for line in lines[lo:hi])]


class Int32(int):
    """An int whose sums, differences and products must fit 32 bits, as in a kernel."""

    def _checked(name):
        def operate(self, other):
            value = getattr(int, name)(int(self), int(other))
            assert -(2**31) <= value < 2**31, f"{value} leaves int32"
            return Int32(value)

        return operate

    __add__, __radd__, __sub__ = map(_checked, ("__add__", "__radd__", "__sub__"))
    __rsub__, __mul__, __rmul__ = map(_checked, ("__rsub__", "__mul__", "__rmul__"))


@pytest.mark.parametrize("left", [-INF, 1 - INF, -1, 0, 1, INF - 1, INF])
@pytest.mark.parametrize("right", [-INF, 1 - INF, -1, 0, 1, INF - 1, INF])
def test_arithmetic_stays_in_int32_at_the_extremes(left, right):
    for q_len, k_len in itertools.product((0, 1, 2**29, 2**30 - 1), repeat=2):
        for offset in {k_len - q_len, 0}:
            for size, other, any_range, all_range, before, after in (
                (q_len, k_len, key_range, mask_free_range, offset - left, offset + right),
                (k_len, q_len, query_range, mask_free_queries, -offset - right, -offset + left),
            ):
                for lo, hi in ((0, 0), (0, size), (max(size - 128, 0), size)):
                    args = (lo, hi, left, right, offset, other)
                    some, every = any_range(*map(Int32, args)), all_range(*map(Int32, args))
                    assert some == any_range(*args)
                    assert every == all_range(*args)
                    seen = (
                        range(max(lo + before, 0), min(hi + after, other))
                        if lo < hi and left + right >= 0
                        else range(0)
                    )
                    assert range(*some) == seen


@pytest.mark.parametrize(("q_len", "k_len"), [(1, 1), (1, 513), (129, 128), (128, 129), (2048, 1024)])
def test_full_left_bound_is_causal(q_len, k_len):
    window = sliding_window(max(q_len, k_len) - 1)
    assert torch.equal(window.dense(q_len, k_len), causal.dense(q_len, k_len))
    assert window.count(q_len, k_len) == causal.count(q_len, k_len)


def test_negative_bounds_are_bounds():
    assert Band(-1, 3).dense(3, 5).tolist() == defined(Band(-1, 3), 3, 5)
    assert Band(-1, 3).show(2, 4).split("\n")[1:] == ["...#", "...."]
    assert Band(-3, 1).count(64, 64) == 0
    assert key_range(0, 64, -3, 1, 0, 64) == (3, 3)
    assert Band(-1, None).count(4, 4) == 6


def test_alignments_differ_when_lengths_do():
    top = Band(None, 0, "top_left")
    assert causal.dense(2, 4).tolist() == [[True, True, True, False], [True] * 4]
    assert top.dense(2, 4).tolist() == [[True, False, False, False], [True, True, False, False]]
    assert torch.equal(top.dense(5, 5), causal.dense(5, 5))
    assert causal.dense(1, 9).all()
    assert causal.dense(8, 4).any(1).tolist() == [False] * 4 + [True] * 4


def test_band_count_of_long_sequences_is_closed_form():
    S = 2**20
    assert causal.count(S, S) == S * (S + 1) // 2
    assert Band().count(S, 3 * S) == 3 * S * S
    assert sliding_window(1024).count(S, S) == 1025 * S - 1024 * 1025 // 2


def test_visible_broadcasts_and_takes_an_offset_per_sequence():
    i, j = torch.arange(3).view(3, 1), torch.arange(4)
    offset = torch.tensor([1, -1]).view(2, 1, 1)
    both = sliding_window(1).visible(i, j, offset)
    assert both.shape == (2, 3, 4)
    for row, number in zip(both, (1, -1), strict=True):
        assert row.tolist() == [[-1 <= y - (x + number) <= 0 for y in range(4)] for x in range(3)]
    assert Band().visible(i, j, 0).shape == (3, 4)


def test_bands_are_values():
    assert hash(causal) == hash(Band(None, 0))
    assert causal == Band(None, 0)
    assert causal != Band(None, 0, "top_left")
    with pytest.raises(AttributeError):
        causal.left = 3
    assert Band(2**40, -(2**40)).bounds == (INF, -INF)
    assert causal & sliding_window(5, 2) == sliding_window(5)
    assert Band() & Band(1, 2, "top_left") == Band(1, 2, "top_left") == Band(1, 2, "top_left") & Band()


@pytest.mark.parametrize(
    ("make", "error", "words"),
    [
        (lambda: Band(1.0, 0), TypeError, "left must be an int.*1.0"),
        (lambda: Band(None, True), TypeError, "right must be an int.*True"),
        (lambda: sliding_window("3"), TypeError, "left must be an int.*'3'"),
        (lambda: Band(align="bottom"), ValueError, "align must be.*'bottom'"),
        (lambda: causal & Band(None, 0, "top_left"), ValueError, "unlike align"),
        (lambda: causal & torch.ones(2, 2), TypeError, "torch.bool.*float32"),
        (lambda: causal & 3, TypeError, "unsupported operand"),
        (lambda: Masked(causal, None), TypeError, "BlockMask or a tensor.*NoneType"),
        (lambda: Masked(None, torch.ones(2, 2) > 0), TypeError, "must be a Band.*NoneType"),
    ],
)
def test_faults_name_the_argument(make, error, words):
    with pytest.raises(error, match=words):
        make()


# Masked


def test_band_and_mask_combine_in_both_orders():
    mask, blocks, window = torch.rand(4, 4) > 0.5, BlockMask.butterfly(256, 256), sliding_window(3)
    for one, two in ((causal & mask, mask & causal), (causal & blocks, blocks & causal)):
        assert isinstance(one, Masked)
        assert isinstance(two, Masked)
        assert one.band == two.band == causal
        assert one.mask is two.mask
        assert (one & window).band == (window & one).band == window
        assert repr(one).startswith("Masked(Band(left=None, right=0")
        assert "\n" not in repr(one)
    with pytest.raises(ValueError, match="unlike align"):
        (causal & mask) & Band(0, 0, "top_left")


def test_masks_of_one_kind_narrow_a_masked():
    a, b = (torch.rand(4, 4) > 0.5 for _ in range(2))
    assert torch.equal(((causal & a) & b).mask, a & b)
    assert torch.equal((a & (causal & b)).mask, a & b)
    both = (causal & a) & (sliding_window(2, 1) & b)
    assert both.band == sliding_window(2)
    assert torch.equal(both.mask, a & b)
    one, two = BlockMask.butterfly(512, 512), BlockMask.strided(512, 512, 0, 2)
    for both in ((causal & one) & two, two & (one & causal)):
        assert torch.equal(both.mask.to_dense(), one.to_dense() & two.to_dense())
    for mixed in (lambda: (causal & a) & one, lambda: one & (causal & a)):
        with pytest.raises(TypeError, match="from_dense"):
            mixed()


# Triton compiles the same source


KERNEL = """
    import sys, types
    import torch, triton, triton.language as tl
    from triton.compiler import ASTSource
    from triton.backends.compiler import GPUTarget
    from tilewise import mask

    def jit(function):
        # The interpreter wants triton.language among a jitted function's globals; the compiler does not care.
        return triton.jit(types.FunctionType(function.__code__, {**function.__globals__, "tl": tl}, function.__name__))

    key_range, mask_free_range = jit(mask.key_range), jit(mask.mask_free_range)
    query_range, mask_free_queries = jit(mask.query_range), jit(mask.mask_free_queries)

    @triton.jit
    def ranges(cases, out):
        case, row = cases + 6 * tl.program_id(0), out + 8 * tl.program_id(0)
        lo, hi, left = tl.load(case), tl.load(case + 1), tl.load(case + 2)
        right, offset, length = tl.load(case + 3), tl.load(case + 4), tl.load(case + 5)
        a, b = key_range(lo, hi, left, right, offset, length)
        c, d = mask_free_range(lo, hi, left, right, offset, length)
        tl.store(row, a)
        tl.store(row + 1, b)
        tl.store(row + 2, c)
        tl.store(row + 3, d)
        a, b = query_range(lo, hi, left, right, offset, length)
        c, d = mask_free_queries(lo, hi, left, right, offset, length)
        tl.store(row + 4, a)
        tl.store(row + 5, b)
        tl.store(row + 6, c)
        tl.store(row + 7, d)
"""


def in_fresh_process(script, **environment):
    """Run the script from a file (Triton reads its source) with the package importable; its standard output."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "script.py")
        path.write_text(textwrap.dedent(script))
        environment = {
            **os.environ,
            "PYTHONPATH": str(ROOT),
            "TRITON_CACHE_DIR": folder,
            "OMP_NUM_THREADS": "1",
            **environment,
        }
        done = subprocess.run([sys.executable, path], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_triton_interprets_the_index_arithmetic():
    pytest.importorskip("triton", reason="Triton is not installed")
    script = (
        KERNEL
        + """
    generator = torch.Generator().manual_seed(0)
    cases = torch.randint(-300, 600, (80, 6), generator=generator, dtype=torch.int32)
    cases[:, 0] = cases[:, 0].abs()
    cases[:, 1] = cases[:, 0] + cases[:, 1].abs()
    cases[:, 5] = cases[:, 5].abs()
    cases[30:50, 2] = cases[40:60, 3] = mask.INF
    cases[60:65, 2] = cases[65:70, 3] = -mask.INF
    out = torch.empty(len(cases), 8, dtype=torch.int32)
    ranges[(len(cases),)](cases, out)
    functions = mask.key_range, mask.mask_free_range, mask.query_range, mask.mask_free_queries
    assert out.tolist() == [[end for f in functions for end in f(*case)] for case in cases.tolist()]
    assert (out[:, 1] > out[:, 0]).sum() > 15
    print("equal")
    """
    )
    assert in_fresh_process(script, TRITON_INTERPRET="1") == "equal\n"


def test_triton_compiles_the_index_arithmetic():
    pytest.importorskip("triton", reason="Triton is not installed")
    script = (
        KERNEL
        + """
    source = ASTSource(ranges, {"cases": "*i32", "out": "*i32"})
    print("ptx" in triton.compile(source, target=GPUTarget("cuda", 90, 32)).asm)
    """
    )
    assert in_fresh_process(script, TRITON_INTERPRET="0") == "True\n"
