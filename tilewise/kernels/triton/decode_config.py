"""How a cached call is cut: into tiles, and into pieces of a sequence's keys. A rule, with its evidence; no trial runs.

Pieces must not depend on the batch, or a row's bits would. They are short enough that one sequence gives many programs
their share, and long enough that their results are little beside their keys. On an H200 (bf16, 32/8 heads of 128) pieces of
256, 512 and 1024 keys, each in memory, take 550, 536 and 524 us of 64 x 8k keys, 16, 15 and 21 us of 1 x 8k; pieces of 512
that are merged in blocks of 2048 take 499 and 15.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

from ...problem import Layout, Problem
from ...problem_cached import FP8
from .config import SHARED_KIB

SHORT = 16  # queries of a sequence that are asked piece by piece; more are asked of all keys at once
PIECE = 512  # keys
BLOCK = 2048  # keys of a block of pieces
KIB = 1024


@dataclass(frozen=True, slots=True)
class Config:
    """rows: of a tile, queries times heads of a group. keys: that pass by at a time. piece: keys that have a softmax of
    their own; 0: all. at_once: programs on an SM."""

    rows: int
    keys: int
    piece: int
    warps: int
    stages: int
    at_once: int


def why_not(problem: Problem) -> str | None:
    """Why no tile fits the device's shared memory; None: one does."""
    kib = SHARED_KIB.get(problem.device, 64)
    if problem.device != "cpu" and _kib(problem, 16, *SHAPES[-1][:2]) > kib:
        return f"a tile of head sizes {problem.qk_dim} and {problem.v_dim} does not fit the shared memory of {problem.device}"
    if problem.cache is not None and problem.cache.dtype is FP8 and problem.device in ("sm75", "sm80", "sm86", "sm87"):
        return f"{problem.device} has no fp8"
    return None


# (keys, stages, programs on an SM), the first that fits. Timed on an H200, bf16, 32/8 heads of 128, 8 x 8k keys: 64, 3, 2
# takes 71 us, 128, 2, 2 75, 64, 4, 2 74, 32, 5, 2 77, 64, 5, 1 77.
Shapes = tuple[tuple[int, int, int], ...]
SHAPES: Shapes = ((64, 3, 2), (64, 2, 2), (32, 3, 2), (32, 2, 2), (32, 2, 1), (16, 2, 1), (16, 1, 1))
# Each key of a small page has an address of its own: there 128, 3, 1 takes 75 us, 64, 3, 2 78.
SMALL_PAGES: Shapes = ((128, 3, 1), *SHAPES)
UNALIGNED: Shapes = ((32, 1, 2), (16, 1, 2), (16, 1, 1))


@lru_cache(maxsize=512)
def choose(problem: Problem, whole: bool, aligned: bool = True) -> Config:
    """whole: for many queries of a sequence. aligned: whether keys begin at 16 bytes; else each element is a load."""
    rows, piece = _rows(problem, whole) if aligned else 16, 0 if whole else PIECE
    cache, kib = problem.cache, SHARED_KIB.get(problem.device, 64)
    assert cache is not None
    if problem.device == "cpu":  # in Triton's interpreter: small
        return Config(rows, 16, piece, 4, 1, 1)
    small_pages = 0 < cache.page_size < 64 and rows == 16
    shapes = (SMALL_PAGES if small_pages else SHAPES) if aligned else UNALIGNED
    keys, stages, at_once = next(
        (shape for shape in shapes if _kib(problem, rows, *shape[:2]) <= kib / shape[2]), shapes[-1]
    )
    _, v_wide = columns(problem)
    return Config(rows, keys, piece, 8 if rows * v_wide >= 64 * 256 else 4, stages, at_once)


def _rows(problem: Problem, whole: bool) -> int:
    """Of a packed sequence no more is known than whether it is short, one query perhaps, or longer; and a tile must not
    depend on how many tokens there are in all."""
    queries = problem.q_len
    if problem.q_layout is Layout.PACKED:
        queries = 64 if whole else 1
    wide = max(problem.qk_dim, problem.v_dim)
    most = 64 if wide <= 256 or SHARED_KIB.get(problem.device, 64) >= 227 else 16
    most = 16 if problem.device in ("cpu", "sm75") else most
    return min(max(1 << (queries * problem.group - 1).bit_length(), 16), most)


def _kib(problem: Problem, rows: int, keys: int, stages: int) -> float:
    """Of shared memory, about: queries, P, the keys in flight, and the result on its way out."""
    (wide, rest), v_wide = columns(problem)
    assert problem.cache is not None
    key = (wide + rest + (0 if v_in_k(problem) else v_wide)) * problem.cache.dtype.itemsize
    size = problem.dtype.itemsize
    in_flight, result = max(stages - 1, 1) * keys * key, rows * v_wide * 4
    if problem.device == "sm75" or rows * v_wide <= 16 * 256:  # else the result takes the place of keys
        in_flight += result
    return (rows * (wide + rest + keys) * size + max(in_flight, result)) / KIB + 2


def columns(problem: Problem) -> tuple[tuple[int, int], int]:
    """((columns of K's tile, of a second one for the rest or 0), columns of V's): 576 are 512 and 64, and not 1024."""
    d, v_wide = problem.qk_dim, max(16, 1 << (problem.v_dim - 1).bit_length())
    whole = max(16, 1 << (d - 1).bit_length())
    half = whole // 2
    if whole > 32 and 0 < d - half <= half // 2:
        return (half, max(16, 1 << (d - half - 1).bit_length())), v_wide
    return (whole, 0), v_wide


def v_in_k(problem: Problem) -> bool:
    """Whether V's tile is K's: it lies in K's first columns, and its own is as wide as theirs."""
    (wide, _), v_wide = columns(problem)
    return problem.cache is not None and problem.cache.v_in_k and v_wide <= wide
