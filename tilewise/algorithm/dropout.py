"""The random bits of dropout: counter-based, so that a pair's bit depends on its coordinates and on nothing else.

The forward and the backward recompute the same bits for whatever tiles they cut, and every backend draws the same
ones: the generator is Philox-4x32-10 (Salmon, Moraes, Dror, Shaw: "Parallel random numbers: as easy as 1, 2, 3",
SC 2011, section 3.3), which is also what Triton's `tl.philox` computes.

The contract: the key is the 64-bit seed (low word, high word). For query row `i` and key `j` of query head `h` of
sequence `b` the counter is `(i', j', h, b)`, where `i'` and `j'` are `i` and `j` without bit 3 (the bit worth 8), and
of the four 32-bit words that come out, word `2 * bit3(i) + bit3(j)` belongs to the pair. So one call serves the pairs
`{i, i + 8} x {j, j + 8}`. A pair is kept iff its word is at least `p * 2^32`.
"""

from __future__ import annotations

import math

import torch

MASK32 = 0xFFFFFFFF
MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
KEY_STEPS = (0x9E3779B9, 0xBB67AE85)
ROUNDS = 10
RUN = 16  # positions that share their counters: 8 without bit 3 set, then 8 with it

Key = int | torch.Tensor
Words = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]


def threshold(p: float) -> int:
    """The smallest 32-bit word that is kept; 2^32 (none is) for p = 1. ValueError unless 0 <= p <= 1.

    >>> threshold(0.25) == 2**30
    True
    """
    if not 0.0 <= p <= 1.0:
        raise ValueError(f"dropout_p must be between 0 and 1; got {p!r}")
    return math.ceil(p * 2**32)  # p * 2^32 is exact: words are integers, so the ceiling asks the same question


def split_seed(seed: int | torch.Tensor) -> tuple[Key, Key]:
    """(low, high) 32-bit words of a 64-bit seed: ints, or 0-d int64 tensors for a seed that lies on another device.

    Seeds are taken modulo 2^64. TypeError for one that is neither an int nor an int64 tensor of one element.

    >>> split_seed(-1) == (2**32 - 1, 2**32 - 1)
    True
    """
    if isinstance(seed, torch.Tensor):
        if seed.dtype != torch.int64 or seed.numel() != 1:
            raise TypeError(
                f"seed must be an int64 tensor of one element; got {seed.dtype} of shape {tuple(seed.shape)}"
            )
        seed = int(seed) if seed.device.type == "cpu" else seed.reshape(())
    elif isinstance(seed, bool) or not isinstance(seed, int):
        raise TypeError(f"seed must be an int or an int64 tensor; got {type(seed).__name__}")
    return seed & MASK32, (seed >> 32) & MASK32


def philox(key_lo: Key, key_hi: Key, c0: torch.Tensor, c1: torch.Tensor, c2: torch.Tensor, c3: torch.Tensor) -> Words:
    """Philox-4x32-10: four words for each counter.

    Keys: ints or 0-d int64 tensors; counters: int64 tensors that broadcast against each other; all hold uint32 values.
    Returns four fresh int64 tensors of the broadcast shape, uint32 values too.

    >>> zero = torch.tensor(0)
    >>> [f"{int(word):08x}" for word in philox(0, 0, zero, zero, zero, zero)]
    ['6627e8d5', 'e169c58d', 'bc57ac4c', '9b00dbd8']
    """
    shape = torch.broadcast_tensors(c0, c1, c2, c3)[0].shape  # broadcast_shapes imports sympy: a second
    # After three rounds every word depends on all four counters. Until then they are smaller than `shape` if the
    # counters are (a column of rows and a row of columns), and the rounds almost free.
    words = (c0, c1, c2, c3)
    for _ in range(3):
        words = _round(words, key_lo, key_hi)
        key_lo, key_hi = (key_lo + KEY_STEPS[0]) & MASK32, (key_hi + KEY_STEPS[1]) & MASK32
    c0, c1, c2, c3 = (word.expand(shape).contiguous() for word in words)
    # The other seven in place. A product may stay unmasked in c1 and c3, where only its low word matters.
    product0, product1 = torch.empty_like(c0), torch.empty_like(c0)
    for _ in range(ROUNDS - 3):
        torch.mul(c0, MULTIPLIERS[0], out=product0)
        torch.mul(c2, MULTIPLIERS[1], out=product1)
        torch.bitwise_right_shift(product1, 32, out=c0).bitwise_xor_(c1).bitwise_xor_(key_lo).bitwise_and_(MASK32)
        torch.bitwise_right_shift(product0, 32, out=c2).bitwise_xor_(c3).bitwise_xor_(key_hi).bitwise_and_(MASK32)
        c1, product1, c3, product0 = product1, c1, product0, c3
        key_lo, key_hi = (key_lo + KEY_STEPS[0]) & MASK32, (key_hi + KEY_STEPS[1]) & MASK32
    return c0, c1.bitwise_and_(MASK32), c2, c3.bitwise_and_(MASK32)


def _round(words: Words, key_lo: Key, key_hi: Key) -> Words:
    """One round. A product of two uint32 wraps modulo 2^64 into an int64, whose bits are still the right ones."""
    c0, c1, c2, c3 = words
    product0, product1 = c0 * MULTIPLIERS[0], c2 * MULTIPLIERS[1]
    high0, high1 = (product0 >> 32) & MASK32, (product1 >> 32) & MASK32
    return high1 ^ c1 ^ key_lo, product1 & MASK32, high0 ^ c3 ^ key_hi, product0 & MASK32


def keep(
    seed: int | torch.Tensor, p: float, b: torch.Tensor, h: torch.Tensor, i: torch.Tensor, j: torch.Tensor
) -> torch.Tensor:
    """Which pairs dropout keeps: bool, of the shape that the int64 index tensors broadcast to.

    `b`: sequences, `h`: query heads, `i`: query rows, `j`: keys; `seed`: int, or int64 tensor of one element. Any
    positions will do. Those that `keep_tile` takes are recognised on the CPU (elsewhere looking would synchronise).

    >>> i, j, zero = torch.arange(1000)[:, None], torch.arange(1000), torch.tensor(0)
    >>> round(keep(7, 0.1, zero, zero, i, j).double().mean().item(), 3)
    0.9
    """
    if i.device.type == "cpu" and _is_tile(b, h, i, j) and _in_runs(i.transpose(-1, -2)) and _in_runs(j):
        return keep_tile(seed, p, b, h, i, j)
    key_lo, key_hi = split_seed(seed)
    without_bit3 = MASK32 ^ 8
    w00, w01, w10, w11 = philox(key_lo, key_hi, i & without_bit3, j & without_bit3, h & MASK32, b & MASK32)
    i_bit, j_bit = (i & 8) != 0, (j & 8) != 0
    word = torch.where(i_bit, torch.where(j_bit, w11, w10), torch.where(j_bit, w01, w00))
    return word >= threshold(p)


def keep_tile(
    seed: int | torch.Tensor, p: float, b: torch.Tensor, h: torch.Tensor, i: torch.Tensor, j: torch.Tensor
) -> torch.Tensor:
    """`keep` for a tile, with a quarter of the Philox calls; the same bits.

    `i` (..., R, 1) and `j` (..., 1, C), each in runs of 16 consecutive positions that start at a multiple of 16 (the
    last run may be cut short); `b` and `h` (..., 1, 1). Returns bool (..., R, C).
    ValueError for other shapes and, on the CPU (elsewhere looking would synchronise), for other positions.

    >>> i, j, zero = torch.arange(512)[:, None], torch.arange(100)[None], torch.zeros(1, 1, dtype=torch.int64)
    >>> whole = keep_tile(7, 0.1, zero, zero, i, j)
    >>> torch.equal(whole[32:64], keep_tile(7, 0.1, zero, zero, i[32:64], j))
    True
    """
    if not _is_tile(b, h, i, j):
        shapes = ", ".join(f"{name} {tuple(x.shape)}" for name, x in (("b", b), ("h", h), ("i", i), ("j", j)))
        raise ValueError(f"keep_tile: i must be (..., R, 1), j (..., 1, C), b and h (..., 1, 1); got {shapes}")
    if i.device.type == "cpu":
        for name, positions in (("i", i.transpose(-1, -2)), ("j", j)):
            if not _in_runs(positions):
                raise ValueError(f"keep_tile: {name} must come in runs of {RUN} positions from multiples of {RUN}")
    eight = torch.arange(8, device=i.device)
    rows = (i[..., ::RUN, :] + eight).flatten(-2).unsqueeze(-1) & MASK32  # (..., R / 2, 1): each run's first half
    keys = (j[..., ::RUN].unsqueeze(-1) + eight).flatten(-2) & MASK32  # (..., 1, C / 2)
    words = philox(*split_seed(seed), rows, keys, h & MASK32, b & MASK32)
    *batch, half_rows, half_keys = words[0].shape
    kept = torch.empty((*batch, half_rows // 8, 2, 8, half_keys // 8, 2, 8), dtype=torch.bool, device=i.device)
    least = threshold(p)
    for index, word in enumerate(words):
        word = word.view(*batch, half_rows // 8, 8, half_keys // 8, 8)
        torch.ge(word, least, out=kept[..., :, index // 2, :, :, index % 2, :])
    return kept.view(*batch, 2 * half_rows, 2 * half_keys)[..., : i.shape[-2], : j.shape[-1]]


def _is_tile(b: torch.Tensor, h: torch.Tensor, i: torch.Tensor, j: torch.Tensor) -> bool:
    return min(i.ndim, j.ndim) >= 2 and i.shape[-1] == 1 and j.shape[-2] == 1 and {*b.shape[-2:], *h.shape[-2:]} <= {1}


def _in_runs(positions: torch.Tensor) -> bool:
    """True if (..., N) positions come in runs of 16 from multiples of 16, the last perhaps cut short."""
    count = positions.shape[-1]
    starts = positions[..., ::RUN]
    runs = (starts.unsqueeze(-1) + torch.arange(RUN)).flatten(-2)[..., :count]
    return bool(torch.equal(runs, positions) and not (starts & (RUN - 1)).any())
