"""What a kernel is compiled for: everything about a call that is no run-time number."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from ...problem import Layout, Problem
from .config import Config


@dataclass(frozen=True, slots=True)
class Options:
    """The one compile-time argument of the kernels. Lengths are never in it."""

    D: int
    DV: int
    WIDTH: int  # D and DV as a tile has them: powers of two, 16 at least
    V_WIDTH: int
    ROWS: int
    KEYS: int
    TMA: bool
    ALIGNED: bool  # rows of q, k, v, dO begin at multiples of 16 bytes
    PACKED: bool
    Q_LENS: bool
    K_LENS: bool
    BAND: bool
    TOP_LEFT: bool
    RAW: bool  # scores go to the softmax unscaled: scale > 0, and nothing is added to them
    SOFTCAP: bool
    BIAS: bool
    ALIBI: bool
    SINK: bool
    BOOL: bool
    BLOCKS: bool
    DROPOUT: bool
    RUNS: bool  # dropout's coordinates start at multiples of 16, and tiles have two such runs on each side
    HEADROOM: int  # bits that P may lie above 1: of fp16, whose least number is near
    PRECISION: str  # of fp32 products
    BIAS_ROWS: bool  # the bias has rows and keys of its own
    BIAS_KEYS: bool
    STORE_DBIAS: bool  # the bias is full: each pair's gradient is stored by the tile that makes it

    @classmethod
    def of(
        cls, problem: Problem, config: Config, aligned: bool, runs: bool, precision: str, store_dbias: bool = False
    ) -> Options:
        return cls(
            D=problem.qk_dim, DV=problem.v_dim, WIDTH=width(problem.qk_dim), V_WIDTH=width(problem.v_dim),
            ROWS=config.rows, KEYS=config.keys, TMA=config.tma and aligned, ALIGNED=aligned,
            PACKED=problem.q_layout is Layout.PACKED, Q_LENS=problem.q_lens, K_LENS=problem.k_lens,
            BAND=not problem.band.is_full, TOP_LEFT=problem.band.align == "top_left",
            RAW=problem.scale > 0 and not (problem.softcap or problem.bias or problem.alibi),
            SOFTCAP=problem.softcap > 0, BIAS=problem.bias is not None, ALIBI=problem.alibi, SINK=problem.sink,
            BOOL=problem.mask == "bool", BLOCKS=problem.mask == "blocks", DROPOUT=problem.dropout_p > 0,
            # On tiles with one run a side Triton 3.6 drew wrong bits now and then (H200, wide heads, a boolean mask).
            RUNS=runs and min(config.rows, config.keys) >= 32,
            HEADROOM=12 if problem.dtype is torch.float16 else 0, PRECISION=precision,
            BIAS_ROWS=problem.bias is not None and problem.bias.rows,
            BIAS_KEYS=problem.bias is not None and problem.bias.keys, STORE_DBIAS=store_dbias,
        )  # fmt: skip


def width(d: int) -> int:
    """The columns of a tile for head size d: the next power of two, 16 at least."""
    return max(16, 1 << (d - 1).bit_length())
