"""Tiles of the Hopper kernels: a table by head size and length, and the evidence for each row."""

from __future__ import annotations

from dataclasses import dataclass, replace

from ...problem import Layout, Problem

PIECE = 64  # rows of a consumer warpgroup
WIDTHS = (64, 96, 128, 192, 256)  # columns of a tile: heads of another size are filled up with zeros by TMA
KINDS = ("short", "long")
LONG = 2048  # keys from which a problem is
MOST_KEYS = 128  # of a block
RUN = 16  # rows that share dropout's words
SHARED = 227 * 1024  # bytes that a block may take on sm90
BARRIERS = 1280  # more bytes than barriers and numbers take


@dataclass(frozen=True, slots=True)
class Config:
    """A tile of `rows` queries, 64 for each consumer, passed by blocks of `keys`, of which `stages` are in shared memory.

    queries: how many tiles of Q are: 1, whose place O takes before the next one, or 2, and O has a place of its own.
    half: a first block of which at most half is seen is taken as half a block.
    q_in_registers: a consumer's piece of Q goes there once, and its place is free for the next tile's.
    """

    rows: int
    keys: int
    stages: int
    queries: int
    half: bool = False
    q_in_registers: bool = False

    @property
    def consumers(self) -> int:
        return self.rows // PIECE

    def o_in_q(self, wide: int, v_wide: int) -> bool:
        """O is stored through Q's place, or the first parts of it. With room for its own the next Q need not wait for it."""
        own = 2 * self.rows * v_wide
        crowded = self.bytes_loaded(wide, v_wide) + own + BARRIERS > SHARED
        first_parts = wide & -(v_wide & -v_wide) == v_wide
        return crowded and first_parts and self.queries == 1 and not self.q_in_registers

    def bytes_loaded(self, wide: int, v_wide: int) -> int:
        """Shared memory of Q, K and V."""
        return 2 * (self.rows * wide * self.queries + self.stages * self.keys * (wide + v_wide))

    @property
    def registers(self) -> tuple[int, int]:
        """Of a consumer's and the producer's thread: an SM has 65536, and a warpgroup takes a multiple of 8 a thread."""
        return (240, 24) if self.consumers == 2 else (160, 24)


@dataclass(frozen=True, slots=True)
class Row:
    """By kind of problem."""

    long: Config
    evidence: str
    short: Config | None = None  # if another

    def config(self, kind: str) -> Config:
        """The Config of one of KINDS."""
        return self.short if kind == "short" and self.short is not None else self.long


# TFLOP/s on an H200, bf16, 16k tokens, Triton 3.6, 2026-11-30, five interleaved rounds of kernels alone. In a study that
# these kernels come from blocks of 64 keys with 128 columns reached 550, and without P V in flight during the softmax 619 of
# 672 were left; it chose the tiles.
TABLE: dict[tuple[int, int], Row] = {
    (64, 64): Row(
        Config(192, 128, 2, 2, half=True),
        "full 529 at 2k, 557 at 16k; causal 439, 540. 128 rows: 473, 466; 410, 462; with whole blocks only causal 432, 527."
        " Short: full 411 at 512, 452 at 1k, causal 242, 341; 192 rows 395, 454, 213, 323; Q in shared memory 384, 433, 234, 334",
        short=Config(128, 128, 3, 1, half=True, q_in_registers=True),
    ),
    (96, 96): Row(
        Config(128, 128, 2, 1, half=True, q_in_registers=True),
        "full 528 at 1k, 582 at 4k, 553 at 16k; causal 393, 546, 569. As 128 columns: 505, 540, 548; 386, 527, 561. Three stages:"
        " 531, 554, 557; 402, 551, 564. 192 rows and 64 keys: 470, 557, 575; 362, 544, 576",
    ),
    (128, 128): Row(
        Config(128, 128, 2, 1, half=True, q_in_registers=True),
        "full 557 at 512, 712 at 2k, 695 at 16k; causal 350, 617, 700. Two tiles of Q in shared memory: full 554, 702, 686; causal"
        " 343, 606, 693; those with whole blocks only causal 348, 607, 690",
    ),
    (192, 128): Row(
        Config(128, 128, 2, 1, half=True),
        "full 621 at 1k, 754 at 4k, 746 at 16k; causal 453, 696, 779. K as 256 columns: 540, 621, 590; 433, 595, 638. 64 keys and"
        " three stages: 593, 691, 673; 458, 642, 626",
    ),
    (192, 192): Row(
        Config(128, 64, 2, 1),
        "full 648 at 1k, 739 at 4k, 747 at 16k; causal 494, 695, 724. Three stages: 624, 729, 744; 474, 685, 749. As 256 columns:"
        " 541, 630, 627; 425, 525, 548",
    ),
    (256, 256): Row(
        Config(128, 64, 2, 1), "full 751 at 2k, 821 at 16k (another host); causal 654, 781",
    ),
}  # fmt: skip


def width(size: int, widths: tuple[int, ...] = WIDTHS) -> int:
    """The columns of a tile of heads of this size."""
    return next(wide for wide in widths if size <= wide)


def chunk(wide: int, other: int) -> int:
    """Of a tile's columns those that a descriptor moves at once: all. If its or the others' are in parts, a divisor of each."""
    divisors = wide & -wide, other & -other  # powers of two
    return wide if divisors == (wide, other) else min(divisors)


def kind_of(problem: Problem) -> str:
    """Which of KINDS serves the problem. Of packed sequences no length is known, and a BlockMask's tiles have 128 rows."""
    if problem.mask == "blocks":
        return "short"
    return "long" if problem.k_len >= LONG or problem.q_layout is Layout.PACKED else "short"


def row_of(size: int, v_size: int) -> Row:
    """The first one whose tiles such heads fit in."""
    return next(row for (wide, v_wide), row in TABLE.items() if size <= wide and v_size <= v_wide)


def choose(problem: Problem) -> Config:
    """The configuration of the forward."""
    config = row_of(problem.qk_dim, problem.v_dim).config(kind_of(problem))
    return with_dropout(config, problem) if problem.dropout_p > 0 else config


def with_dropout(config: Config, problem: Problem) -> Config:
    """Philox takes the registers of Q and of a third consumer, and the instructions of a step beside the loop, half a block's.

    Beside K of 192 columns not even S of 128 keys stays in registers.
    """
    config = replace(config, rows=2 * PIECE, half=False, q_in_registers=False)
    if max(problem.qk_dim, problem.v_dim) > 128 and config.keys == 128:
        config = replace(config, keys=64, stages=2 * config.stages)
    return config


def shared_bytes(config: Config, wide: int, v_wide: int) -> int:
    """Bytes of shared memory that a block takes, without its barriers and numbers."""
    o = 0 if config.o_in_q(wide, v_wide) else 2 * config.rows * v_wide
    return config.bytes_loaded(wide, v_wide) + o


# ---- backward, dQ by TMA ---------------------------------------------------------------------------------------------

BACKWARD_KEYS = 128  # of a tile: a piece for each of two consumers


@dataclass(frozen=True, slots=True)
class Backward:
    """A tile of 128 keys, passed by blocks of `rows` queries, of which `stages` are in shared memory, and dQ of `places`."""

    rows: int
    stages: int
    places: int
    evidence: str
    held: bool = False  # K and V in registers, as first operands of S and dP, besides
    registers: tuple[int, int] = (240, 24)  # of a consumer's and the producer's thread
    drawn: int = (
        0  # dropout's words are drawn by a warpgroup of its own, at most so many blocks ahead; 0: by the consumers
    )

    @property
    def drawer_registers(self) -> int:
        """What is left for a thread of the drawer."""
        return 512 - 2 * self.registers[0] - self.registers[1] if self.drawn else 0


# By columns of the tiles, of Q, K, V and dO alike. TFLOP/s as above, of the whole backward. rows * columns is 8192 at most: a
# consumer's share of dQ is then (64, 64), or smaller.
BACKWARD: dict[int, Backward] = {
    64: Backward(
        128, 2, 2, "full 300 at 512, 496 at 4k, 503 at 16k; causal 184, 457, 514. One place for dQ: 298, 490, 499; 184, 451, 507."
        " Consumers that add to dQ themselves: 308, 488, 491; 189, 455, 507",
        held=True,
    ),
    96: Backward(
        64, 2, 1, "causal 480 at 4k; as 128 columns; in parts, tiles that are not filled up to 128. Three blocks, or those and two places, in a study: 0.93",
    ),
    128: Backward(
        64, 2, 1, "full 366 at 512, 597 at 4k, 609 at 16k; causal 227, 573, 634. Two places for dQ: 358, 583, 595; 226, 575, 626."
        " Consumers that add to dQ themselves: 366, 593, 577; 228, 557, 584. Vector atomics, in a study, were 8 % slower",
    ),
}  # fmt: skip


def backward_width(size: int) -> int:
    """The columns of a tile of the fused backward, of heads of this size."""
    return width(size, tuple(BACKWARD))


# With dropout: 1.14 times the speed of consumers that draw at 1k (d 64), 1.10 (d 64) and 1.05 (d 128) at 4k. Four blocks ahead are
# as fast. Below 224 registers ptxas makes wgmmas wait for each other (d 128). In the forward a drawer takes 1.1 to 1.2 times as
# long: there the consumers' own instructions are fewer, and a step waits for the words.
DRAWN, DRAWN_REGISTERS = 2, 224


def backward_of(problem: Problem) -> Backward:
    """The configuration of the fused backward. Beside dropout's words K and V have no registers, nor dQ a second place."""
    row = BACKWARD[backward_width(max(problem.qk_dim, problem.v_dim))]
    if problem.dropout_p == 0:
        return row
    return replace(row, held=False, places=1, drawn=DRAWN, registers=(DRAWN_REGISTERS, 24))


def dq_columns(wide: int) -> int:
    """Of dQ those that are added and rounded at once, 64 rows of them: of each consumer's share a divisor."""
    return min(PIECE, wide & -wide)


def backward_shared_bytes(config: Backward, wide: int) -> int:
    """Bytes of shared memory that a block of the backward's main kernel takes, without its barriers (less than 1 KiB)."""
    k_v = 2 * 2 * BACKWARD_KEYS * wide
    queries = config.stages * config.rows * (2 * 2 * wide + 2 * 4)
    ds = 2 * 2 * BACKWARD_KEYS * config.rows
    dq = 4 * config.places * 2 * PIECE * PIECE  # of both consumers, as if their shares were alike
    return k_v + queries + ds + dq + config.drawn * 2 * PIECE * config.rows // 8


# ---- backward, split in two kernels ----------------------------------------------------------------------------------

BLOCKS_OF_P = 2  # in shared memory, from one consumer of dkdv_kernel to the other


@dataclass(frozen=True, slots=True)
class Kernel:
    """A tile of `rows` queries and one of `keys`: the one stays, in blocks of the other's size its opposite passes by.

    stages, v_stages: blocks in shared memory of what passes by: of K and V, or of Q and dO.
    """

    rows: int
    keys: int
    stages: int
    v_stages: int
    registers: tuple[int, int] = (240, 24)  # of a consumer's and the producer's thread


@dataclass(frozen=True, slots=True)
class Split:
    """Of both kernels."""

    dq: Kernel  # its two consumers have 64 rows each
    dkdv: Kernel
    evidence: str


# By columns of the tiles of Q and K, and of V and dO. TFLOP/s of the whole backward, as above. With vector atomics, in a
# study, 0.9 of it.
SPLIT: dict[tuple[int, int], Split] = {
    (192, 128): Split(
        Kernel(128, 64, 3, 3), Kernel(64, 64, 3, 3), "as many blocks as there is room for, alike for K and V: causal 440 at 4k",
    ),
    (192, 192): Split(
        Kernel(128, 64, 3, 2), Kernel(64, 64, 3, 3), "as many blocks as there is room for: causal 457 at 4k",
    ),
    (256, 256): Split(
        Kernel(128, 64, 2, 1), Kernel(64, 64, 2, 2), "full 354 at 512, 518 at 4k, 508 at 16k; causal 240, 494, 549",
    ),
}  # fmt: skip


def split_of(size: int, v_size: int) -> Split:
    """The first one whose tiles such heads fit in."""
    return next(row for (wide, v_wide), row in SPLIT.items() if size <= wide and v_size <= v_wide)


def is_split(problem: Problem) -> bool:
    """Whether its backward is in two kernels: the other has no registers for wide heads' dK and dV."""
    return max(problem.qk_dim, problem.v_dim) > max(BACKWARD)


def dq_bytes(kernel: Kernel, wide: int, v_wide: int) -> int:
    """Bytes of shared memory that a block of dq_kernel takes, without its barriers (less than 1 KiB)."""
    return 2 * (kernel.rows * (wide + v_wide) + kernel.keys * (kernel.stages * wide + kernel.v_stages * v_wide))


def dkdv_bytes(kernel: Kernel, wide: int, v_wide: int) -> int:
    """Bytes of shared memory that a block of dkdv_kernel takes, without its barriers (less than 1 KiB)."""
    passing = kernel.rows * (kernel.stages * wide + kernel.v_stages * v_wide)
    P = BLOCKS_OF_P * kernel.keys * kernel.rows
    statistics = 2 * 4 * kernel.stages * kernel.rows
    return 2 * (kernel.keys * (wide + v_wide) + passing + P) + statistics
