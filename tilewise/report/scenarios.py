"""What the page of `tilewise explain --html` can show: small problems, and for each algorithm the tiles that fit.

The page offers what is listed here and nothing else. Inputs are fp16, statistics and accumulators fp32, one head.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch

from ..algorithm import io_model
from ..algorithm.io_model import Blocks, Cost, Sizes
from ..block_mask import EMPTY, TILE, BlockMask
from ..mask import Band, causal, key_range, sliding_window

ALGORITHMS = {"standard": "Standard attention", "flash1": "FlashAttention-1", "flash2": "FlashAttention-2"}
DIRECTIONS = ("forward", "backward")
MASKS = ("full", "causal", "window", "block-sparse")

# (N, d, KiB on the chip). Tiles of a BlockMask are 128 x 128, so it wants a larger chip and longer sequences.
DENSE = tuple((N, d, kib) for N in (256, 512) for d in (16, 32) for kib in (32, 64))
SPARSE = tuple((N, d, 256) for N in (512, 1024) for d in (16, 32))


@dataclass(frozen=True, slots=True)
class Scenario:
    """Self-attention of N tokens, head size d, on a chip of `kib` KiB, under one of MASKS.

    >>> scenario = Scenario("causal", 256, 16, 32)
    >>> scenario.blocks("flash1", "forward"), scenario.blocks("flash2", "forward")
    ((16, 240), (192, 16))
    >>> scenario.cost("flash1", "forward").bytes < scenario.cost("standard", "forward").bytes
    True
    """

    mask: str
    N: int
    d: int
    kib: int

    @property
    def key(self) -> str:
        return f"{self.mask}/{self.N}/{self.d}/{self.kib}"

    @property
    def M(self) -> int:
        """Bytes of on-chip memory."""
        return self.kib * 1024

    @property
    def sizes(self) -> Sizes:
        return Sizes(self.N, self.N, self.d, self.d, element=2, acc=4)

    @property
    def band(self) -> Band:
        return {"causal": causal, "window": sliding_window(self.N // 4 - 1)}.get(self.mask, Band())

    @property
    def block_mask(self) -> BlockMask | None:
        """Tiles next to the diagonal, and one tile of keys and queries that all see and that sees all."""
        if self.mask != "block-sparse":
            return None
        return BlockMask.from_tiles(torch.tensor(self.layout), self.N, self.N)

    @property
    def layout(self) -> list[list[bool]]:
        """Of the BlockMask: for each tile of queries one bool a tile of keys."""
        n = self.N // TILE
        return [[abs(i - j) <= 1 or i == 0 or j == 0 for j in range(n)] for i in range(n)]

    @property
    def visible(self) -> list[list[tuple[int, int]]]:
        """The pairs that the mask shows as polygons of (key, query), for a drawing."""
        N = self.N
        block_mask = self.block_mask
        if block_mask is not None:
            live = (block_mask.tile_map()[0, 0] != EMPTY).nonzero().tolist()
            corners = ((0, 0), (TILE, 0), (TILE, TILE), (0, TILE))
            return [[(j * TILE + x, i * TILE + y) for x, y in corners] for i, j in live]
        step = N // 64
        left, right = [], []
        for i in range(0, N, step):
            lo, hi = key_range(i, i + step, *self.band.bounds, 0, N)
            left += [(lo, i), (lo, i + step)]
            right += [(hi, i), (hi, i + step)]
        return [left + right[::-1]]

    def blocks(self, algorithm: str, direction: str) -> Blocks:
        """(B_r, B_c): the largest outer tile with which everything that the algorithm holds on chip fits into M.

        The inner tile has d rows, as in the paper (less where M is too small), and tiles are multiples of 16. The
        softmax of standard attention holds whole rows of N scores: its B_r is the largest power of two that fits.
        """
        return next(
            blocks for blocks in self._candidates(algorithm, direction) if self._fits(algorithm, direction, blocks)
        )

    def cost(self, algorithm: str, direction: str) -> Cost:
        """The closed form of what the run moves."""
        return self._model(algorithm, direction, self.blocks(algorithm, direction))

    def _candidates(self, algorithm: str, direction: str) -> Iterator[Blocks]:
        if algorithm == "standard":
            yield from ((side, min(self.N // 8, TILE)) for side in (128, 64, 32, 16, 8))
        elif self.mask == "block-sparse":
            yield TILE, TILE
        else:
            for inner in (self.d, 16):
                for outer in range(self.N, 0, -16):
                    yield (outer, inner) if (algorithm, direction) == ("flash2", "forward") else (inner, outer)

    def _fits(self, algorithm: str, direction: str, blocks: Blocks) -> bool:
        return self._model(algorithm, direction, blocks).peak_on_chip <= self.M

    def _model(self, algorithm: str, direction: str, blocks: Blocks) -> Cost:
        if algorithm == "standard":
            masked = not self.band.is_full
            if direction == "forward":
                return io_model.standard(self.sizes, blocks, masked=masked)
            return io_model.standard_backward(self.sizes, blocks, masked=masked)
        models = {
            ("flash1", "forward"): io_model.flash_attention_1,
            ("flash1", "backward"): io_model.flash_attention_1_backward,
            ("flash2", "forward"): io_model.flash_attention_2,
            ("flash2", "backward"): io_model.flash_attention_2_backward,
        }
        live = io_model.live_tiles(self.layout, blocks) if self.mask == "block-sparse" else None
        return models[algorithm, direction](self.sizes, blocks, band=self.band, live=live)


SCENARIOS = tuple(
    Scenario(mask, N, d, kib) for mask in MASKS for N, d, kib in (SPARSE if mask == "block-sparse" else DENSE)
)
