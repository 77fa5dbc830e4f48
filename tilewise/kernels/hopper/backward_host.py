"""The host side of the backward: from a Problem and its tensors to three launches."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor
from triton.experimental.gluon import language as gl

from ...problem import Aux, Grads, Origin, Problem
from ..launch import Box, Ready
from ..tensors import READY, Memory, Strides, dense_rows, empty_strided, memory, q_shape, v_shape
from ..triton.host import LOG2E, side_by_side, strides
from . import config
from .backward import backward_kernel, convert_kernel, prepare_kernel
from .config import BACKWARD_KEYS, PIECE, Backward
from .host import box_of

PREPARED = 64  # queries that a program of prepare_kernel takes
SHARE = (PIECE * PIECE // 256, 256)  # of dQ, in the accumulator


@dataclass(frozen=True, slots=True)
class Options:
    """The one compile-time argument of the main kernel. Lengths are never in it."""

    WIDTH: int  # columns of all tiles
    ROWS: int
    STAGES: int
    LEFT: bool  # the Band is bounded on this side
    MASKED: bool  # blocks may need the mask
    SOFTCAP: bool
    CONSUMER_REGISTERS: int
    PRODUCER_REGISTERS: int

    @classmethod
    def of(cls, problem: Problem, cfg: Backward, wide: int) -> Options:
        consumer_registers, producer_registers = cfg.registers
        return cls(
            WIDTH=wide, ROWS=cfg.rows, STAGES=cfg.stages, LEFT=problem.band.left is not None,
            MASKED=not problem.band.is_full or problem.k_len % BACKWARD_KEYS > 0, SOFTCAP=problem.softcap > 0,
            CONSUMER_REGISTERS=consumer_registers, PRODUCER_REGISTERS=producer_registers,
        )  # fmt: skip


class Launches(NamedTuple):
    """The three launches, and what they fill."""

    prepare: Ready  # (o, do, lse, dlse, statistics, accumulator)
    main: Ready  # (dk, dv, accumulator, q, k, v, do, statistics)
    convert: Ready  # (dq, accumulator)
    gradients: tuple[Memory, ...]  # dq, dk, dv
    between: tuple[Memory, ...]  # statistics, accumulator


def backward(
    problem: Problem, do: Tensor, dlse: Tensor | None, q: Tensor, k: Tensor, v: Tensor, o: Tensor, lse: Tensor, aux: Aux
) -> Grads:
    (do, q, k, v), of_rows = dense_rows(do, q, k, v, expanded=False)
    start = launches_of(problem, aux.origin, None if dlse is None else dlse.stride(), *of_rows)
    empty = empty_strided(q)
    dq, dk, dv = [empty(*what) for what in start.gradients]
    statistics, accumulator = [empty(*what) for what in start.between]
    start.prepare(o, do, lse, dlse, statistics, accumulator)
    start.main(dk, dv, accumulator, q, k, v, do, statistics)
    start.convert(dq, accumulator)
    dsink = None if aux.sink is None else sink_gradient(aux.sink, lse, statistics)
    return Grads(dq, dk, dv, dsink=dsink)


def sink_gradient(sink: Tensor, lse: Tensor, statistics: Tensor) -> Tensor:
    """The sum over all rows of P_sink (0 - delta), a sink being a key without a value. An empty row has none."""
    P = torch.exp(sink.float()[:, None] - lse).masked_fill_(lse == -torch.inf, 0.0)
    minus_delta = statistics[1].view(*lse.shape[:2], -1)[..., : lse.shape[2]]
    return (P * minus_delta).sum((0, 2)).to(sink.dtype)


@lru_cache(maxsize=READY)
def launches_of(problem: Problem, origin: Origin, of_dlse: Strides | None, *of_rows: Strides) -> Launches:
    """of_rows: the strides of do, q, k, v."""
    wide = config.width(max(problem.qk_dim, problem.v_dim))
    cfg = config.BACKWARD[wide]
    options = Options.of(problem, cfg, wide)
    heads = problem.batch * problem.heads
    padded = -(-problem.q_len // BACKWARD_KEYS) * BACKWARD_KEYS
    dq, dk, dv = (memory(shape, problem.dtype) for shape in (q_shape(problem), problem.k_shape, v_shape(problem)))
    statistics = memory((2, heads, padded), torch.float32)
    accumulator = memory((heads * padded * wide // SHARE[1], SHARE[1]), torch.float32)
    of_do, of_q, of_k, of_v = of_rows
    by_key, by_query = (PIECE, wide), (cfg.rows, wide)
    boxes = (
        box_of(*dk[:2], by_key, problem.dtype),
        box_of(*dv[:2], by_key, problem.dtype),
        _plain(accumulator, SHARE),
        box_of(dq[0], of_q, by_query, problem.dtype),
        box_of(dk[0], of_k, by_key, problem.dtype),
        box_of(dv[0], of_v, by_key, problem.dtype),
        box_of(problem.o_shape, of_do, by_query, problem.dtype),
        _plain(statistics, (2, 1, cfg.rows)),
    )
    left, right = problem.band.bounds
    diagonal = origin[2] - origin[3] + problem.band.offset(problem.q_len, problem.k_len)
    tiles = -(-problem.k_len // BACKWARD_KEYS)
    total = tiles * problem.batch * problem.kv_heads
    numbers = (
        problem.q_len, problem.k_len, diagonal, left, right, problem.scale * LOG2E, problem.softcap * LOG2E,
        problem.heads, problem.group, tiles, _together(problem, wide), total,
    )  # fmt: skip
    # The main kernel adds L to its scores before it scales them; under a softcap it scales them first.
    unit = LOG2E if options.SOFTCAP else 1 / problem.scale
    return Launches(
        Ready(
            prepare_kernel, (heads * padded // PREPARED,),
            (problem.heads, problem.q_len, padded, heads, unit, *strides(of_do), *(of_dlse or (0, 0, 0))),
            {"DV": problem.v_dim, "WIDTH": wide, "ROWS": PREPARED}, 4, 1,
        ),
        Ready(backward_kernel, (total,), numbers, {"O": options}, 4, 1, dict(enumerate(boxes))),
        Ready(
            convert_kernel, (accumulator[0][0] // SHARE[0],), (problem.q_len, padded, problem.scale),
            {"D": problem.qk_dim, "WIDTH": wide}, 4, 1,
        ),
        (dq, dk, dv), (statistics, accumulator),
    )  # fmt: skip


def _plain(what: Memory, block: tuple[int, ...]) -> Box:
    """Of contiguous fp32, not swizzled: threads read and write whole rows of it."""
    layout = gl.NVMMASharedLayout(swizzle_byte_width=0, element_bitwidth=32, rank=len(block))
    return Box(what[0], what[1], block, layout)


def _together(problem: Problem, wide: int) -> int:
    """How many key/value heads walk their tiles side by side, so that Q, dO and dQ of their groups are in the L2 at once."""
    if problem.band.is_full:
        return 1
    size = problem.q_len * problem.group * wide * (2 * problem.dtype.itemsize + 4)
    return side_by_side(problem.batch * problem.kv_heads, size)
