"""Philox-4x32-10 and the keep bits of the contract."""

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

from tilewise.algorithm.dropout import keep, keep_tile, philox, split_seed, threshold

ROOT = Path(__file__).parents[1]
ZERO = torch.zeros(1, 1, 1, 1, dtype=torch.int64)


def span(start, stop):
    return torch.arange(start, stop)


def tile(seed, p, batches, heads, rows, keys, keep=keep):
    """Keep bits (b, h, R, C) of 1-D positions."""
    b, h = batches.view(-1, 1, 1, 1), heads.view(1, -1, 1, 1)
    return keep(seed, p, b, h, rows.view(1, 1, -1, 1), keys.view(1, 1, 1, -1))


def philox_by_hand(key, counter):
    """Philox-4x32-10 in Python's integers, as the paper writes it."""
    (k0, k1), (c0, c1, c2, c3) = key, counter
    for _ in range(10):
        p0, p1 = 0xD2511F53 * c0, 0xCD9E8D57 * c2
        c0, c1, c2, c3 = (p1 >> 32) ^ c1 ^ k0, p1 % 2**32, (p0 >> 32) ^ c3 ^ k1, p0 % 2**32
        k0, k1 = (k0 + 0x9E3779B9) % 2**32, (k1 + 0xBB67AE85) % 2**32
    return c0, c1, c2, c3


# The known answers that come with Random123, the paper's code (its file tests/kat_vectors, philox4x32 10).
KNOWN = [
    ((0,) * 2, (0,) * 4, (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
    ((0xFFFFFFFF,) * 2, (0xFFFFFFFF,) * 4, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
    (
        (0xA4093822, 0x299F31D0),
        (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
        (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
    ),
]


@pytest.mark.parametrize(("key", "counter", "words"), KNOWN)
def test_philox_known_answers(key, counter, words):
    got = philox(*key, *(torch.tensor(c) for c in counter))
    assert tuple(map(int, got)) == words == philox_by_hand(key, counter)
    many = philox(*(torch.tensor(k) for k in key), *(torch.full((3, 5), c) for c in counter))
    assert all(word.dtype == torch.int64 and (word == want).all() for word, want in zip(many, words, strict=True))


words32 = st.integers(0, 2**32 - 1)


@settings(deadline=None, max_examples=50)
@given(st.tuples(words32, words32), st.tuples(*[st.lists(words32, min_size=1, max_size=3)] * 4))
def test_philox_of_broadcast_counters(key, counters):
    """Counters that vary along axes of their own: the first rounds run before they are broadcast."""
    tensors = [torch.tensor(c).view([-1 if axis == n else 1 for axis in range(4)]) for n, c in enumerate(counters)]
    before = [x.clone() for x in tensors]
    got = philox(*key, *tensors)
    assert all(torch.equal(x, y) for x, y in zip(tensors, before, strict=True)), "the counters were written to"
    shape = tuple(map(len, counters))
    assert all(word.shape == shape for word in got)
    for index in torch.cartesian_prod(*map(torch.arange, shape)).view(-1, 4).tolist():
        want = philox_by_hand(key, [c[x] for c, x in zip(counters, index, strict=True)])
        assert tuple(int(word[tuple(index)]) for word in got) == want


@pytest.mark.parametrize("seed", [0, 1, 2**40 + 7, 2**63, -1, torch.tensor(12345), torch.tensor([-(2**63)])])
def test_word_order_is_the_contracts(seed):
    number = int(seed) % 2**64
    got = tile(seed, 0.5, span(3, 5), span(0, 2), span(0, 32), span(16, 48))
    for b, h, i, j in torch.randint(0, 32, (200, 4), generator=torch.Generator().manual_seed(0)).tolist():
        b, h = b % 2, h % 2
        i_, j_ = i & ~8, (16 + j) & ~8
        words = philox_by_hand((number % 2**32, number >> 32), (i_, j_, h, b + 3))
        assert bool(got[b, h, i, j]) == (words[2 * (i >> 3 & 1) + (j >> 3 & 1)] >= 2**31)


@pytest.mark.parametrize("p", [0.001, 0.1, 0.5, 0.9])
def test_keeps_the_share_it_says(p):
    """Within five standard deviations; an 8-bit threshold keeps 0.9961 for p = 0.001."""
    kept = tile(11, p, span(0, 1), span(0, 4), span(0, 1024), span(0, 1024))
    share, deviation = kept.double().mean().item(), (p * (1 - p) / kept.numel()) ** 0.5
    assert abs(share - (1 - p)) < 5 * deviation


def test_extreme_probabilities():
    positions = (span(0, 2), span(0, 2), span(0, 64), span(0, 64))
    assert tile(1, 0.0, *positions).all()
    assert tile(1, 0, *positions).all()
    assert not tile(1, 1.0, *positions).any()
    assert threshold(0.0) == 0
    assert threshold(1.0) == 2**32
    assert threshold(0.5) == 2**31
    assert threshold(2**-32) == 1 == threshold(1e-12)  # a word of 0 is below any p > 0


def test_bits_of_different_seeds_heads_sequences_and_places_differ():
    base = tile(1, 0.5, span(0, 1), span(0, 1), span(0, 64), span(0, 64))
    others = [
        tile(2, 0.5, span(0, 1), span(0, 1), span(0, 64), span(0, 64)),
        tile(1 + 2**32, 0.5, span(0, 1), span(0, 1), span(0, 64), span(0, 64)),
        tile(1, 0.5, span(1, 2), span(0, 1), span(0, 64), span(0, 64)),
        tile(1, 0.5, span(0, 1), span(1, 2), span(0, 64), span(0, 64)),
        tile(1, 0.5, span(0, 1), span(0, 1), span(64, 128), span(0, 64)),
        tile(1, 0.5, span(0, 1), span(0, 1), span(0, 64), span(64, 128)),
        base.transpose(2, 3),
    ]
    for other in others:
        assert 0.4 < (base == other).double().mean().item() < 0.6


@settings(deadline=None, max_examples=60)
@given(st.integers(0, 200), st.integers(1, 100), st.integers(0, 200), st.integers(1, 100), st.integers(0, 2**64 - 1))
def test_bits_do_not_depend_on_the_tile(top, rows, first, keys, seed):
    whole = tile(seed, 0.3, span(0, 2), span(0, 3), span(0, 304), span(0, 304))
    part = tile(seed, 0.3, span(0, 2), span(0, 3), span(top, top + rows), span(first, first + keys))
    assert torch.equal(part, whole[:, :, top : top + rows, first : first + keys])


def pair_by_pair(seed, p, b, h, i, j):
    """`keep`'s general way: positions without the form of a tile."""
    return keep(seed, p, b, h, i.expand(*torch.broadcast_shapes(i.shape, j.shape)), j)


@settings(deadline=None, max_examples=60)
@given(st.integers(0, 20), st.integers(0, 70), st.integers(0, 20), st.integers(0, 70), st.integers(0, 2**64 - 1))
def test_the_fast_path_gives_the_same_bits(n, rows, m, keys, seed):
    positions = span(0, 2), span(5, 7), span(16 * n, 16 * n + rows), span(16 * m, 16 * m + keys)
    fast = tile(seed, 0.4, *positions, keep=keep_tile)
    assert fast.shape == (2, 2, rows, keys)
    assert fast.dtype == torch.bool
    assert torch.equal(fast, tile(seed, 0.4, *positions, keep=pair_by_pair))


def test_gathered_tiles_take_the_fast_path():
    """Keys gathered for a BlockMask: runs of 128 per (batch, head), in any order, repeated too."""
    tiles = torch.randint(0, 40, (2, 3, 4), generator=torch.Generator().manual_seed(0))
    keys = (128 * tiles[..., None] + torch.arange(128)).flatten(2).unsqueeze(2)  # (2, 3, 1, 512)
    b, h, rows = torch.arange(2).view(2, 1, 1, 1), torch.arange(3).view(1, 3, 1, 1), torch.arange(32).view(1, 1, 32, 1)
    got = keep_tile(9, 0.5, b, h, rows, keys)
    assert torch.equal(got, pair_by_pair(9, 0.5, b, h, rows, keys))
    whole = keep(9, 0.5, b, h, rows, torch.arange(40 * 128).view(1, 1, 1, -1))
    assert torch.equal(got, whole.gather(3, keys.expand(2, 3, 32, 512)))


def test_positions_of_any_kind():
    rows, keys = torch.tensor([5, 3, 3, 900, 8]), torch.tensor([77, 0, 8])
    got = tile(4, 0.5, span(0, 1), span(0, 1), rows, keys)[0, 0]
    whole = tile(4, 0.5, span(0, 1), span(0, 1), span(0, 912), span(0, 80))[0, 0]
    assert torch.equal(got, whole[rows][:, keys])
    far = 2**31 + 16 * torch.arange(4)  # beyond int32
    assert int(keep(4, 0.5, ZERO[0, 0, 0], ZERO[0, 0, 0], far, far).sum()) == sum(
        philox_by_hand((4, 0), (x, x, 0, 0))[0] >= 2**31 for x in far.tolist()
    )


def test_empty_tiles():
    assert tile(1, 0.5, span(0, 2), span(0, 2), span(0, 0), span(0, 5)).shape == (2, 2, 0, 5)
    assert tile(1, 0.5, span(0, 2), span(0, 2), span(0, 5), span(0, 0)).shape == (2, 2, 5, 0)
    assert tile(1, 0.5, span(0, 0), span(0, 2), span(0, 5), span(0, 5)).shape == (0, 2, 5, 5)


@pytest.mark.parametrize(
    ("call", "error", "words"),
    [
        (lambda: threshold(1.5), ValueError, "between 0 and 1; got 1.5"),
        (lambda: threshold(-0.1), ValueError, "between 0 and 1; got -0.1"),
        (lambda: threshold(float("nan")), ValueError, "got nan"),
        (lambda: split_seed(0.5), TypeError, "seed must be an int.*float"),
        (lambda: split_seed(True), TypeError, "seed must be an int.*bool"),
        (lambda: split_seed(torch.tensor(1.0)), TypeError, "int64 tensor.*float32"),
        (lambda: split_seed(torch.tensor([1, 2])), TypeError, r"one element.*\(2,\)"),
        (lambda: tile(1, 0.5, span(0, 1), span(0, 1), span(8, 24), span(0, 16), keep_tile), ValueError, "i must come"),
        (lambda: tile(1, 0.5, span(0, 1), span(0, 1), span(0, 16), span(1, 9), keep_tile), ValueError, "j must come"),
        (lambda: keep_tile(1, 0.5, ZERO, ZERO, span(0, 16), span(0, 16)), ValueError, r"i must be \(\.\.\., R, 1\)"),
    ],
)
def test_faults_name_the_argument(call, error, words):
    with pytest.raises(error, match=words):
        call()


def test_equals_triton_bit_for_bit():
    """`tl.philox` through Triton's interpreter, with the contract's counters, for every pair of a tile of two heads."""
    pytest.importorskip("triton", reason="Triton is not installed")
    script = """
        import torch, triton, triton.language as tl
        from tilewise.algorithm.dropout import keep, philox, threshold

        @triton.jit
        def draw(out, words, seed, threshold, i0, j0, b, S: tl.constexpr):
            h = tl.program_id(0)
            i, j = i0 + tl.arange(0, S)[:, None], j0 + tl.arange(0, S)[None, :]
            zero = tl.zeros((S, S), tl.uint32)
            row, key = zero + (i & ~8).to(tl.uint32), zero + (j & ~8).to(tl.uint32)
            w0, w1, w2, w3 = tl.philox(seed, row, key, zero + h.to(tl.uint32), zero + b.to(tl.uint32))
            low, high = tl.where((j & 8) != 0, w1, w0), tl.where((j & 8) != 0, w3, w2)
            word = tl.where((i & 8) != 0, high, low)
            at = h * S * S + tl.arange(0, S)[:, None] * S + tl.arange(0, S)[None, :]
            tl.store(out + at, (word >= threshold.to(tl.uint32)).to(tl.int8))
            tl.store(words + at, word.to(tl.int64))

        S = 64
        calls = (0, 0, 0, 0, 0.1), (2**63 - 5, 3, 960, 4096, 0.5), (0x123456789ABCDEF, 1, 7, 1000, 0.001)
        for seed, b, i0, j0, p in calls:
            out, words = torch.empty(2, S, S, dtype=torch.int8), torch.empty(2, S, S, dtype=torch.int64)
            draw[(2,)](out, words, seed, threshold(p), i0, j0, b, S)
            i, j, h = (i0 + torch.arange(S))[:, None], j0 + torch.arange(S)[None], torch.arange(2).view(2, 1, 1)
            sequence = torch.tensor(b).view(1, 1, 1)
            assert torch.equal(out.bool(), keep(seed, p, sequence, h, i, j)), (seed, p)
            four = philox(seed & 0xFFFFFFFF, seed >> 32, i & ~8, j & ~8, h, sequence)
            which = (2 * (i >> 3 & 1) + (j >> 3 & 1)).expand(2, S, S)
            assert torch.equal(words, torch.stack(four).gather(0, which[None])[0]), (seed, p)
        print("equal")
    """
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "script.py")  # Triton reads a kernel's source from its file
        path.write_text(textwrap.dedent(script))
        done = subprocess.run([sys.executable, path], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout == "equal\n"
