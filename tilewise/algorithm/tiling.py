"""Tile sizes from the capacity of the chip: how many rows of Q and of K, V are worked on at once.

Capacities are in ELEMENTS of the inputs' dtype, as in the paper: 100 KB hold M = 51200 elements of fp16 or bf16.
"""

from __future__ import annotations

from math import isqrt
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ..problem import Problem


def elements(capacity: int, element_size: int) -> int:
    """How many elements of `element_size` bytes fit into `capacity` bytes on the chip: the paper's M.

    >>> elements(100 * 1024, 2)
    51200
    """
    if capacity < element_size:
        raise ValueError(f"capacity must hold one element ({element_size} bytes) at least; got {capacity} bytes")
    return capacity // element_size


def paper_blocks(M: int, d: int) -> tuple[int, int]:
    """(B_r, B_c) of FlashAttention, Algorithm 1, line 1: B_c = ceil(M / 4d), B_r = min(ceil(M / 4d), d).

    M: elements that fit on the chip, d: head size. Four tiles (Q_i, K_j, V_j, O_i) share M, hence M / 4d rows each; no
    more than d rows of Q keep the tile of scores, B_r * B_c <= d * M / 4d, within a quarter of M too.

    >>> paper_blocks(51200, 64)             # 100 KB of fp16
    (64, 200)
    >>> paper_blocks(1000, 64)              # a chip this small: few rows of both
    (4, 4)
    """
    _positive(M=M, d=d)
    B_c = -(-M // (4 * d))
    return min(B_c, d), B_c


def flash_2_blocks(M: int, d: int) -> tuple[int, int]:
    """(B_r, B_c) from the same capacity for FlashAttention-2's forward: `paper_blocks` with the sides exchanged.

    What the outer loop holds is loaded once, what the inner loop walks is loaded once for each outer tile: so the outer
    side takes the many rows. It is K and V in FlashAttention-1 and in both backwards, Q in FlashAttention-2's forward.

    >>> flash_2_blocks(51200, 64)
    (200, 64)
    """
    B_c, B_r = paper_blocks(M, d)
    return B_r, B_c


def matmul_blocks(M: int, d: int) -> tuple[int, int]:
    """(B, B) for the products of standard attention: the largest square tile of S that fits beside its Q and K rows.

    B * B + 2 * B * d <= M, that is (B + d)^2 <= M + d^2. A product of two N x d matrices then loads N^2 d / B elements
    beside the N d of its outer operand: no more than the N^2 that it writes as soon as B >= d, which M >= 3 d^2 gives.
    Standard attention's Theta(Nd + N^2) is meant for such chips.

    >>> matmul_blocks(51200, 64)
    (171, 171)
    """
    _positive(M=M, d=d)
    B = max(isqrt(M + d * d) - d, 1)
    return B, B


def _positive(**sizes: int) -> None:
    for name, size in sizes.items():
        if size < 1:
            raise ValueError(f"{name} must be a positive number of elements; got {size}")


# What follows is for the CPU that this runs on, whose "on-chip memory" is its caches.

CELL_ELEMENTS = 2**20  # of S that are worked on together: 4 MiB of fp32; with fewer, the calls of torch cost too much


def cpu_tile(problem: Problem, backward: bool = False) -> tuple[int, int]:
    """(B_r, B_c) of the backend "tiled": multiples of 16, with a BlockMask 128 on its outer side.

    By the kind of mask: fewer rows where a Band may be narrow beside them. The choice must not look at batch, heads,
    lengths or the Band's bounds (a row's bits depend on where its keys are cut). Measured with `python -m bench` on two
    cores.
    """
    if problem.mask == "blocks":
        return (1024, 128) if backward else (128, 512)
    if backward:
        return 512, 256
    return (512, 512) if problem.band.is_full else (256, 512)


def cell(problem: Problem, q_len: int, k_len: int) -> tuple[int, int]:
    """(sequences, query heads) that are worked on together: as many as keep S within CELL_ELEMENTS.

    Heads come in whole groups that share a key/value head, or in an equal part of one group.
    """
    B_r, B_c = cpu_tile(problem)
    tile = min(B_r, -(-max(q_len, 1) // 16) * 16) * min(B_c, -(-max(k_len, 1) // 16) * 16)
    n = max(CELL_ELEMENTS // tile, 1)
    if n >= problem.heads:
        return n // max(problem.heads, 1), max(problem.heads, 1)
    if n >= problem.group:
        return 1, n // problem.group * problem.group
    return 1, next(part for part in range(n, 0, -1) if problem.group % part == 0)
