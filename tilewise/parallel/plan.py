"""The pairs of (query, key) between two ranks as few calls of a backend: `Piece`s, of which none is empty.

Chunk by chunk, `mask.py`'s arithmetic says which keys any row sees and which every row does. A pair of chunks without
visible pairs makes no piece, and costs neither time nor a byte sent; a window's piece is no longer than the window.
Where every pair is seen there is no mask. Where nothing but the order of tokens matters, neighbours become one piece:
of a causal mask in zig-zag all steps are a single call each.

In packed sequences a chunk's own pairs are a packed call, and two chunks have at most one sequence in common, which is
a dense call. Their lengths are Python integers here: a plan is made on the host.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import lru_cache

from ..mask import Band, key_range, mask_free_range, query_range
from ..problem import HashedOnce
from .order import Chunk, chunks

ALIGN = 128  # pieces of a window begin at such rows and keys of their chunk: kernels have tiles, and dropout its runs


@dataclass(frozen=True, slots=True)
class Piece:
    """Rows [rows[0], rows[1]) of one rank against keys [keys[0], keys[1]) of another, each counted in its shard.

    origin: (b0, i0, j0), where the piece lies in the whole problem. cu: None, or the ends of packed sequences within.
    """

    rows: tuple[int, int]
    keys: tuple[int, int]
    band: Band
    origin: tuple[int, int, int]
    cu: tuple[int, ...] | None = None


@dataclass(frozen=True, slots=True)
class Whole(HashedOnce):
    """What all ranks attend to together.

    band: top_left, over positions. positional: a pair's position itself matters (dropout, ALiBi, BlockMask, lengths),
    not only which of two tokens comes first, or how far they lie apart. cu: the ends of packed sequences.
    """

    length: int
    ranks: int
    layout: str
    band: Band
    positional: bool
    cu: tuple[int, ...] | None = None

    __hash__ = HashedOnce.__hash__


@lru_cache(maxsize=1024)
def pieces(whole: Whole, rank: int, owner: int) -> tuple[Piece, ...]:
    """What `rank`'s queries see of `owner`'s keys.

    >>> causal = Whole(512, 2, "zigzag", Band(None, 0, "top_left"), False)
    >>> for rank, owner in ((0, 0), (0, 1), (1, 0)):                     # 2 ranks with 2 chunks of 128 tokens each
    ...     for piece in pieces(causal, rank, owner):
    ...         print(piece.rows, piece.keys, piece.band.is_full)
    (0, 256) (0, 256) False
    (128, 256) (0, 256) True
    (0, 256) (0, 128) True
    """
    queries = chunks(whole.length, whole.ranks, rank, whole.layout)
    keys = chunks(whole.length, whole.ranks, owner, whole.layout)
    if whole.cu is not None:
        found = [piece for q in queries for k in keys for piece in _packed(whole, whole.cu, q, k)]
    elif rank == owner and not whole.positional and (whole.band.left, whole.band.right) == (None, 0):
        local = Chunk(0, 0, whole.length // whole.ranks)  # a rank's rows are in the order of their positions
        found = _pair(whole, local, local)
    else:
        found = [piece for q in queries for k in keys for piece in _pair(whole, q, k)]
    return tuple(found if whole.positional else _joined(found))


def span(found: Iterable[Piece]) -> tuple[int, int]:
    """The keys [lo, hi) of the owner's shard that these pieces need: (0, 0) if none."""
    ends = [piece.keys for piece in found]
    return (min(lo for lo, _ in ends), max(hi for _, hi in ends)) if ends else (0, 0)


def depth(intervals: Iterable[tuple[int, int]]) -> int:
    """The most intervals [lo, hi) that have an element in common.

    >>> depth([(0, 4), (4, 8), (3, 5)])
    2
    """
    most = now = 0
    for _, change in sorted(event for lo, hi in intervals for event in ((lo, 1), (hi, -1))):  # ends come first
        now += change
        most = max(most, now)
    return most


def _pair(whole: Whole, q: Chunk, k: Chunk, b0: int = 0) -> list[Piece]:
    """Of two runs of tokens of one sequence, no piece or one."""
    left, right = whole.band.bounds
    apart = q.first - k.first
    lo, hi = key_range(0, q.size, left, right, apart, k.size)
    if lo == hi:
        return []
    lo, hi = lo - lo % ALIGN, min(-(-hi // ALIGN) * ALIGN, k.size)
    first, last = query_range(lo, hi, left, right, apart, q.size)
    first, last = first - first % ALIGN, min(-(-last // ALIGN) * ALIGN, q.size)
    free = mask_free_range(first, last, left, right, apart, k.size)
    full = free[0] <= lo and free[1] >= hi
    i0, j0 = q.first + first, k.first + lo
    band = Band(align="top_left") if full else whole.band
    if not whole.positional:  # only how far they lie apart matters, and without a mask not even that
        i0, j0 = (0, 0) if full else (max(i0 - j0, 0), max(j0 - i0, 0))
        if full or last - first == hi - lo:  # the two alignments agree: kernels of ordinary calls
            band = replace(band, align="bottom_right")
    return [Piece((q.local + first, q.local + last), (k.local + lo, k.local + hi), band, (b0, i0, j0))]


def _packed(whole: Whole, cu: tuple[int, ...], q: Chunk, k: Chunk) -> list[Piece]:
    """Of two runs of tokens of packed sequences."""
    if q != k:
        of_k = dict(_runs(cu, k))
        return [piece for s, run in _runs(cu, q) if s in of_k for piece in _pair(whole, run, of_k[s], s)]
    runs, found = _runs(cu, q), []
    if runs and runs[0][1].first > 0 and whole.positional:  # a sequence that begins in an earlier chunk
        (s, run), *runs = runs
        found = _pair(whole, run, run, s)
    if runs:
        first, last = runs[0][1].local, runs[-1][1].local + runs[-1][1].size
        # Sequences of no tokens between them are of the call too: a sequence's number is what dropout looks up.
        numbered = dict(runs)
        ends, at = [0], first
        for s in range(runs[0][0], runs[-1][0] + 1):
            at += numbered[s].size if s in numbered else 0
            ends.append(at - first)
        band = whole.band if whole.band.is_full else replace(whole.band, align="bottom_right")
        found.append(Piece((first, last), (first, last), band, (runs[0][0], 0, 0), tuple(ends)))
    return found


def _runs(cu: tuple[int, ...], chunk: Chunk) -> list[tuple[int, Chunk]]:
    """(sequence, its tokens in the chunk, by their positions in it), for each that has any."""
    end, found = chunk.first + chunk.size, []
    s = max(bisect_right(cu, chunk.first) - 1, 0)
    while s + 1 < len(cu) and cu[s] < end:
        lo, hi = max(cu[s], chunk.first), min(cu[s + 1], end)
        if lo < hi:
            found.append((s, Chunk(chunk.local + lo - chunk.first, lo - cu[s], hi - lo)))
        s += 1
    return found


def _joined(found: list[Piece]) -> list[Piece]:
    """Neighbours without a mask made one: first those of the same rows, then those of the same keys."""
    plain = [piece for piece in found if piece.band.is_full and piece.cu is None]
    others = [piece for piece in found if not (piece.band.is_full and piece.cu is None)]
    for along, across in (("keys", "rows"), ("rows", "keys")):
        joined: list[Piece] = []
        for piece in sorted(plain, key=lambda piece: (getattr(piece, across), getattr(piece, along))):
            last = joined[-1] if joined else None
            adjacent = last is not None and getattr(last, across) == getattr(piece, across)
            if last is not None and adjacent and getattr(last, along)[1] == getattr(piece, along)[0]:
                longer = getattr(last, along)[0], getattr(piece, along)[1]
                joined[-1] = replace(last, rows=longer) if along == "rows" else replace(last, keys=longer)
            else:
                joined.append(piece)
        plain = joined
    return others + plain
