"""`tilewise explain`: one question put to the model in `algorithm.io_model`, and where the saving comes from.

The chip is one number here, M, as in the paper: how many elements fit on it. From it come the tiles, from the tiles the
bytes, from bytes and flops the time.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from ..algorithm import io_model, tiling
from ..algorithm.io_model import GPU, Cost, Sizes
from ..block_mask import TILE, BlockMask
from ..mask import Band

ELEMENT_BYTES = {"fp16": 2, "bf16": 2, "fp32": 4}
ARRAYS = ("Q", "K", "V", "O", "S", "P", "P_dropped", "l", "m", "L")  # in the order in which a table shows them


@dataclass(frozen=True, slots=True)
class Question:
    """Self-attention of `seqlen` tokens on a chip of sram_kib KiB (the paper's 100 KB: 51200 elements of fp16)."""

    seqlen: int = 1024
    head_dim: int = 64
    sram_kib: float = 100.0
    band: Band = Band()
    heads: int = 16
    batch: int = 64
    dtype: str = "fp16"
    dropout: bool = False

    @property
    def element(self) -> int:
        return ELEMENT_BYTES[self.dtype]

    @property
    def sizes(self) -> Sizes:
        N, d = self.seqlen, self.head_dim
        return Sizes(N, N, d, d, self.batch, self.heads, self.element)

    @property
    def M(self) -> int:
        """Elements that fit on the chip."""
        return tiling.elements(int(self.sram_kib * 1024), self.element)

    @property
    def blocks(self) -> dict[str, tuple[int, int]]:
        """(B_r, B_c) of each algorithm's forward."""
        square, outer_keys = tiling.matmul_blocks(self.M, self.head_dim), tiling.paper_blocks(self.M, self.head_dim)
        return {
            "standard": square,
            "standard, fused": square,
            "FlashAttention-1": outer_keys,
            "block-sparse": outer_keys,
            "FlashAttention-2": tiling.flash_2_blocks(self.M, self.head_dim),
        }

    def costs(self, backward: bool) -> dict[str, Cost]:
        """By algorithm, with the backward or without. block-sparse: FlashAttention-1 on the butterfly pattern."""
        layout = butterfly(self.seqlen)
        return io_model.compare(
            self.sizes, self.M, band=self.band, dropout=self.dropout, layout=layout, backward=backward
        )


def butterfly(seqlen: int) -> list[list[bool]]:
    """Which 128 x 128 tiles the paper's fixed butterfly pattern has (section 3.3).

    >>> density(butterfly(1024))                              # 4 of the 8 tiles in each row
    0.5
    """
    lists = BlockMask.butterfly(seqlen, seqlen).query_major
    n = -(-seqlen // TILE)
    layout = [[False] * n for _ in range(n)]
    for counts, tiles in ((lists.full_count, lists.full), (lists.mixed_count, lists.mixed)):
        for row, count, columns in zip(layout, counts[0, 0].tolist(), tiles[0, 0].tolist(), strict=True):
            for j in columns[:count]:
                row[j] = True
    return layout


def density(layout: Sequence[Sequence[bool]]) -> float:
    """The paper's s: the share of tiles that are not empty."""
    return sum(map(sum, layout)) / sum(map(len, layout))


def passes(question: Question, cost: Cost) -> dict[str, float]:
    """By array, how often an N x N matrix's worth of it crosses between HBM and the chip, both directions together.

    >>> question = Question()
    >>> forward = question.costs(backward=False)
    >>> {array: round(n, 2) for array, n in passes(question, forward["standard"]).items()}
    {'Q': 0.06, 'K': 0.38, 'V': 0.38, 'O': 0.06, 'S': 4.0, 'P': 2.0}
    """
    sizes = question.sizes
    matrix = sizes.batch * sizes.heads * sizes.q_len * sizes.k_len * sizes.element
    loaded, stored = cost.loaded, cost.stored
    return {a: (loaded.get(a, 0) + stored.get(a, 0)) / matrix for a in ARRAYS if a in loaded or a in stored}


@dataclass(frozen=True, slots=True)
class Ratios:
    """Bytes of standard attention over FlashAttention-1's at one length: of three forms, from the leanest up."""

    seqlen: int
    fused: float
    unfused: float
    with_mask_and_dropout: float


def ratios(question: Question, backward: bool) -> Iterator[Ratios]:
    """At a quarter of the question's length up to four times of it, without its band.

    >>> for r in ratios(Question(), backward=False):
    ...     print(f"{r.seqlen:5} {r.fused:.1f} {r.unfused:.1f} {r.with_mask_and_dropout:.1f}")
      256 2.4 3.2 4.9
      512 3.2 4.5 7.1
     1024 3.6 5.0 8.0
     2048 4.1 5.8 9.2
     4096 4.5 6.3 10.0
    """
    for seqlen in (question.seqlen * n // 4 for n in (1, 2, 4, 8, 16)):
        sizes = replace(question, seqlen=seqlen).sizes
        plain = io_model.compare(sizes, question.M, backward=backward)
        most = io_model.compare(sizes, question.M, masked=True, dropout=True, backward=backward)
        flash = plain["FlashAttention-1"].bytes
        yield Ratios(
            seqlen,
            plain["standard, fused"].bytes / flash,
            plain["standard"].bytes / flash,
            most["standard"].bytes / flash,
        )


def seconds(question: Question, cost: Cost, gpu: GPU) -> float | None:
    """The roofline's time on `gpu`, by its measured ceilings if it has any; None in fp32."""
    if question.dtype == "fp32":
        return None
    return io_model.predicted_time(cost, gpu, measured=gpu.measured_flops is not None)
