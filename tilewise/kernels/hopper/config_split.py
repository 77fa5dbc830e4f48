"""Tiles of the Hopper backward without atomics: a table by head size, and the evidence for each row."""

from __future__ import annotations

from dataclasses import dataclass, replace

from ...problem import Problem
from ..triton.options import PAD
from .config import width

BLOCKS_OF_P = 2


@dataclass(frozen=True, slots=True)
class Config:
    """A tile of `rows` queries and one of `keys`: the one stays, in blocks of the other's size its opposite passes by.

    stages, v_stages: blocks in shared memory of what passes by: of K and V, or of Q and dO.
    """

    rows: int
    keys: int
    stages: int
    v_stages: int
    registers: tuple[int, int] = (240, 24)  # of a consumer's and the producer's thread


@dataclass(frozen=True, slots=True)
class Row:
    """Of both kernels."""

    dq: Config  # its two consumers have 64 rows each
    dkdv: Config
    evidence: str


# TFLOP/s of the whole backward on an H200, bf16, 16k tokens, by the study that these kernels come from; in brackets the best of
# FlashAttention-4 and cuDNN, which are not deterministic.
TABLE: dict[int, Row] = {
    64: Row(Config(128, 128, 2, 2), Config(64, 128, 3, 3), "not measured yet"),
    128: Row(Config(128, 128, 2, 2), Config(64, 128, 2, 2), "not measured yet"),
    256: Row(
        Config(128, 64, 2, 1), Config(64, 64, 2, 2),
        "461 (305) full, 338 (254) causal at 1k; 512 (382) and 500 (376) at 16k, with a kernel of its own for the statistics",
    ),
}  # fmt: skip


def choose(problem: Problem) -> tuple[Config, Config]:
    """The configurations of dq_kernel and dkdv_kernel."""
    row = TABLE[width(max(problem.qk_dim, problem.v_dim))]
    if problem.softcap == 0:
        return row.dq, row.dkdv
    # Its derivative takes as many registers as the scores: with 128 keys a thread spills 1 to 1.5 KB (d 128).
    return replace(row.dq, keys=64), replace(row.dkdv, keys=64)


def why_not(problem: Problem) -> str | None:
    """None, or why these kernels do not take a problem that the forward takes."""
    if 2 * problem.batch * problem.heads * (problem.q_len + PAD) >= 2**31:  # an int32 says where a row's statistics are
        return "it takes at most 2^30 rows of queries in all"
    return None


def dq_bytes(config: Config, wide: int, v_wide: int) -> int:
    """Bytes of shared memory that a block takes, without its barriers (less than 1 KiB)."""
    return 2 * (config.rows * (wide + v_wide) + config.keys * (config.stages * wide + config.v_stages * v_wide))


def dkdv_bytes(config: Config, wide: int, v_wide: int) -> int:
    """Bytes of shared memory that a block takes, without its barriers (less than 1 KiB)."""
    passing = config.rows * (config.stages * wide + config.v_stages * v_wide)
    return 2 * (config.keys * (wide + v_wide) + passing + BLOCKS_OF_P * config.keys * config.rows) + (
        8 * config.stages * config.rows  # the statistics
    )
