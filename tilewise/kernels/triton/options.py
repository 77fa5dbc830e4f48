"""What a kernel is compiled for: everything about a call that is no run-time number."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from ...block_mask import TILE
from ...problem import NOTHING, Layout, Origin, Problem
from .config import Config


class Pairs(NamedTuple):
    """How an array with an element for pairs, (B|1, Hq|1, Sq|1, Sk|1), lies: strides, 0 where its size is 1, and extents."""

    batch: int
    head: int
    row: int
    column: int
    rows: int  # 2^30 where the size is 1: no row is past it
    keys: int

    @classmethod
    def of(cls, x: Tensor | None) -> Pairs:
        if x is None:
            return NO_PAIRS
        steps = [0 if size == 1 else stride for size, stride in zip(x.shape, x.stride(), strict=True)]
        return cls(*steps, *(2**30 if size == 1 else size for size in x.shape[2:]))

    @property
    def wide(self) -> bool:
        """Whether rows begin at multiples of 8 elements and are of 8 consecutive keys each time."""
        return self.column == 1 and not any(n % 8 for n in (self.batch, self.head, self.row, self.keys))

    @property
    def numbers(self) -> tuple[int, ...]:
        """What a kernel takes of it: where it is wide, strides in units of 8."""
        if not self.wide:
            return tuple(self)
        return (self.batch // 8, self.head // 8, self.row // 8, 1, self.rows, self.keys)


NO_PAIRS = Pairs(0, 0, 0, 0, 0, 0)


# How tiles are loaded: by pointers, or by descriptors (`steps.source`).
POINTERS, BOX, RAGGED = 0, 1, 2
PAD = 128  # rows: of the statistics that a sequence has are a multiple; no tile has more


@dataclass(frozen=True, slots=True)
class Options:
    """The one compile-time argument of the kernels. Lengths are never in it."""

    D: int
    DV: int
    WIDTH: int  # D and DV as a tile has them: powers of two, 16 at least (`widths`)
    V_WIDTH: int
    ROWS: int
    KEYS: int
    PASS: int  # how the tiles that pass by are loaded
    STAY: int  # and those that stay
    PACKED: bool
    Q_LENS: bool
    K_LENS: bool
    LEFT: bool  # the Band is bounded on this side
    RIGHT: bool
    TOP_LEFT: bool
    RAW: bool  # scores go to the softmax unscaled: scale > 0, and nothing is added to them
    SOFTCAP: bool
    BIAS: bool
    ALIBI: bool
    SINK: bool
    BOOL: bool
    BLOCKS: bool
    EVEN: bool  # the sides divide the lengths: no tile reaches past an end
    EDGES: bool  # some tiles do, or the Band cuts through them
    CUT: bool  # MIXED tiles may lie across the Band's edge or the last key: their bits do not say all
    DROPOUT: bool
    RUNS: bool  # dropout's coordinates start at multiples of 16, and tiles have two such runs on each side
    HEADROOM: int  # bits that P may lie above 1: of fp16, whose least number is near
    PRECISION: str  # of fp32 products
    BIAS_ROWS: bool  # the bias, or the boolean mask, has rows or keys of its own (`steps.at_pairs`)
    BIAS_KEYS: bool
    BIAS_WIDE: bool
    MASK_ROWS: bool
    MASK_KEYS: bool
    MASK_WIDE: bool
    STORE_DBIAS: bool  # the bias is full: each pair's gradient is stored by the tile that makes it
    DBIAS_WIDE: bool
    O_BY_TOKEN: bool  # o lies as (B, S, H, D), as q does
    Q_BY_TOKEN: bool  # so does dq, as q
    K_BY_TOKEN: bool
    V_BY_TOKEN: bool

    @classmethod
    def of(
        cls, problem: Problem, config: Config, tma: Sequence[int], origin: Origin, precision: str,
        bias: Pairs = NO_PAIRS, mask: Pairs = NO_PAIRS, dbias: Pairs | None = None, by_token: str = "",
    ) -> Options:  # fmt: skip
        """by_token: which of o, dq, dk, dv the kernel has, and lie by token (`layout`): of "o", "q", "k", "v"."""
        blocks = problem.mask == "blocks"
        varied = problem.q_layout is Layout.PACKED or problem.q_lens or problem.k_lens
        rows, keys = (TILE, TILE) if blocks else (config.rows, config.keys)
        even = not (varied or problem.q_len % rows or problem.k_len % keys)
        banded = not problem.band.is_full
        wide, v_wide = widths(problem, config, precision)
        return cls(
            D=problem.qk_dim, DV=problem.v_dim, WIDTH=wide, V_WIDTH=v_wide,
            ROWS=config.rows, KEYS=config.keys, PASS=tma[0], STAY=tma[1],
            PACKED=problem.q_layout is Layout.PACKED, Q_LENS=problem.q_lens, K_LENS=problem.k_lens,
            LEFT=problem.band.left is not None, RIGHT=problem.band.right is not None, TOP_LEFT=problem.band.align == "top_left",
            RAW=problem.scale > 0 and not (problem.softcap or problem.bias or problem.alibi),
            SOFTCAP=problem.softcap > 0, BIAS=problem.bias is not None, ALIBI=problem.alibi, SINK=problem.sink,
            BOOL=problem.mask == "bool", BLOCKS=blocks, EVEN=even, EDGES=banded or not even,
            CUT=blocks and (varied or banded or origin != NOTHING.origin), DROPOUT=problem.dropout_p > 0,
            # On tiles with one run a side Triton 3.6 drew wrong bits now and then (H200, wide heads, a boolean mask).
            RUNS=not (origin[2] % 16 or origin[3] % 16) and min(config.rows, config.keys) >= 32,
            HEADROOM=12 if problem.dtype is torch.float16 else 0, PRECISION=precision,
            BIAS_ROWS=problem.bias is not None and problem.bias.rows,
            BIAS_KEYS=problem.bias is not None and problem.bias.keys, BIAS_WIDE=bias.wide,
            MASK_ROWS=mask.row != 0, MASK_KEYS=mask.column != 0, MASK_WIDE=mask.wide,
            STORE_DBIAS=dbias is not None, DBIAS_WIDE=dbias is not None and dbias.wide,
            O_BY_TOKEN="o" in by_token, Q_BY_TOKEN="q" in by_token, K_BY_TOKEN="k" in by_token,
            V_BY_TOKEN="v" in by_token,
        )  # fmt: skip


def widths(problem: Problem, config: Config, precision: str) -> tuple[int, int]:
    """The columns of the tiles of q, k and of v, dO: the next power of two, 16 at least.

    Hopper, tiles that no pipeline loads: the wider for all. One is then in shared memory where the other was, a narrower
    one is swizzled otherwise, and ptxas 12.8 leaves out an instruction: a uniform register of a wgmma's descriptor is
    read that nothing has written (d 64, dv 32; wrong results or an illegal address on an H200; `launch.Resources`).
    Parts of fp32 tiles never are in a pipeline; others with one stage.
    """
    wide, v_wide = (max(16, 1 << (n - 1).bit_length()) for n in (problem.qk_dim, problem.v_dim))
    alone = problem.device == "sm90" and (precision == "bf16x6" or config.stages == 1)
    return (max(wide, v_wide),) * 2 if alone else (wide, v_wide)
