"""Which tokens a rank holds: the sequence in chunks, contiguous or in zig-zag.

Under a causal mask the last rows have the most keys. Cut into n runs of equal length, the last rank would have nearly
all the work, and the first nearly none. In zig-zag there are 2 n chunks, and rank r holds chunk r and chunk 2 n - 1 -
r, an early one and a late one:

    chunk   0 1 2 3 4 5 6 7
    rank    0 1 2 3 3 2 1 0

With chunks of C tokens a rank has 2 C^2 pairs with its own keys and 2 C^2 with those of each other rank, whichever
these are: every step of the ring is the same work for all.

Source: the layout is that of "Striped Attention"'s successors in Megatron-LM and the training of Llama 3 (section
3.3.2).
"""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

LAYOUTS = ("zigzag", "contiguous")


class Chunk(NamedTuple):
    """`size` tokens from position `first` on, which lie from row `local` on in the rank's shard."""

    local: int
    first: int
    size: int


@lru_cache(maxsize=512)
def chunks(length: int, ranks: int, rank: int, layout: str) -> tuple[Chunk, ...]:
    """The chunks of one rank, in the order of their rows. ValueError where `length` does not divide.

    >>> chunks(80, 4, 1, "zigzag")
    (Chunk(local=0, first=10, size=10), Chunk(local=10, first=60, size=10))
    >>> chunks(80, 4, 1, "contiguous")
    (Chunk(local=0, first=20, size=20),)
    """
    runs = 2 * ranks if layout == "zigzag" and ranks > 1 else ranks
    if length % runs:
        raise ValueError(
            f"the sequence has {length} tokens: over {ranks} ranks in layout {layout!r} it must be a multiple of "
            f"{runs} (fill it up at its end)"
        )
    size = length // runs
    if runs == ranks:
        return (Chunk(0, rank * size, size),)
    return Chunk(0, rank * size, size), Chunk(size, (runs - 1 - rank) * size, size)
