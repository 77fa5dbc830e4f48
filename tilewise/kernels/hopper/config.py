"""Tiles of the Hopper forward: a table by head size and mask, and the evidence for each row."""

from __future__ import annotations

from dataclasses import dataclass

from ...problem import Problem

PIECE = 64  # rows of a consumer warpgroup
WIDTHS = (64, 128, 256)  # columns of a tile: heads of another size are filled up with zeros by TMA
KINDS = ("full", "banded", "banded long")
LONG = 2048  # keys from which a Band counts as long
SHARED = 227 * 1024  # bytes that a block may take on sm90


@dataclass(frozen=True, slots=True)
class Config:
    """A tile of `rows` queries, 64 for each consumer, passed by blocks of `keys`, of which `stages` are in shared memory.

    queries: how many tiles of Q are: 1, whose place O takes before the next one, or 2, and O has a place of its own.
    half: a first block of which at most half is seen is taken as half a block.
    """

    rows: int
    keys: int
    stages: int
    queries: int
    half: bool = False

    @property
    def consumers(self) -> int:
        return self.rows // PIECE

    @property
    def registers(self) -> tuple[int, int]:
        """Of a consumer's and the producer's thread: an SM has 65536, and a warpgroup takes a multiple of 8 a thread."""
        return (240, 24) if self.consumers == 2 else (160, 24)


@dataclass(frozen=True, slots=True)
class Row:
    """By kind of mask."""

    full: Config
    banded: Config
    evidence: str
    long: Config | None = None  # instead of banded, from LONG keys on

    def config(self, kind: str) -> Config:
        """The Config of one of KINDS."""
        if kind == "full":
            return self.full
        return self.banded if kind == "banded" or self.long is None else self.long


# TFLOP/s on an H200, bf16, 16k tokens, Triton 3.6, 2026-11-30, five interleaved rounds; on another host than the run of
# bench/results/h200.csv (python -m bench.gpu --only "hopper forward"), which is up to 10 % slower on long rows. In a study
# that these kernels come from blocks of 64 keys with 128 columns reached 550, and without P V in flight during the softmax
# 619 of 672 were left; it chose the tiles.
TABLE: dict[int, Row] = {
    64: Row(
        Config(192, 128, 2, 2), Config(128, 128, 2, 2, half=True),
        "full 526 at 2k, 571 at 16k; causal 429, 560. 128 rows at 2k: 465, 403; with a Band at 1k: 332, 192 rows 320",
        long=Config(192, 128, 2, 2, half=True),
    ),
    128: Row(
        Config(128, 128, 2, 2), Config(128, 128, 2, 2, half=True), "full 696 at 2k, 742 at 16k; causal 572, 701"
    ),
    256: Row(Config(128, 64, 2, 1), Config(128, 64, 2, 1), "full 751 at 2k, 821 at 16k; causal 588, 805"),
}  # fmt: skip


def width(size: int) -> int:
    """The columns of a tile of heads of this size."""
    return next(wide for wide in WIDTHS if size <= wide)


def kind_of(problem: Problem) -> str:
    """Which of KINDS serves the problem."""
    if problem.band.is_full:
        return "full"
    return "banded long" if problem.k_len >= LONG else "banded"


def choose(problem: Problem) -> Config:
    """The configuration of the forward."""
    return TABLE[width(max(problem.qk_dim, problem.v_dim))].config(kind_of(problem))


def shared_bytes(config: Config, wide: int, v_wide: int) -> int:
    """Bytes of shared memory that a block takes, without its barriers (less than 1 KiB)."""
    q = config.rows * wide * config.queries
    o = 0 if config.queries == 1 and wide == v_wide else config.rows * v_wide
    return 2 * (q + o + config.stages * config.keys * (wide + v_wide))
