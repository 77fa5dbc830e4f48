"""The host side of the backward: from a Problem and its tensors to three launches, or, split in two kernels, to two."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor
from triton.experimental.gluon import language as gl

from ...problem import Aux, Grads, Origin, Problem
from ..launch import Box, Ready
from ..tensors import READY, Memory, Strides, dense_rows, empty_strided, memory, q_shape, v_shape
from ..triton.host import LOG2E, side_by_side, strides
from . import config
from .backward import backward_kernel, convert_kernel, prepare_kernel
from .backward_split import dkdv_kernel, dq_kernel
from .config import BACKWARD_KEYS, PIECE, Backward, Kernel
from .host import box_of

PAD = 128  # rows: what the statistics of a head are a multiple of, and each tile divides
PREPARED = 64  # queries that a program of prepare_kernel takes
SHARE = (PIECE * PIECE // 256, 256)  # of dQ, in the accumulator


def backward(
    problem: Problem, do: Tensor, dlse: Tensor | None, q: Tensor, k: Tensor, v: Tensor, o: Tensor, lse: Tensor, aux: Aux
) -> Grads:
    (do, q, k, v), of_rows = dense_rows(do, q, k, v, expanded=False)
    of_dlse = None if dlse is None else dlse.stride()
    empty = empty_strided(q)
    if config.is_split(problem):
        split = split_of(problem, aux.origin, of_dlse, *of_rows)
        dq, dk, dv, statistics = [empty(*what) for what in split.memory]
        split.dq(dq, q, do, k, v, o, lse, dlse, statistics)
        split.dkdv(dk, dv, k, v, q, do, statistics)
    else:
        start = launches_of(problem, aux.origin, of_dlse, *of_rows)
        dq, dk, dv, statistics, accumulator, *turns = [empty(*what) for what in start.memory]
        start.prepare(o, do, lse, dlse, statistics, accumulator, *turns)
        start.main(dk, dv, accumulator, q, k, v, do, statistics, *turns)
        start.convert(dq, accumulator)
    return Grads(dq, dk, dv, dsink=None if aux.sink is None else sink_gradient(aux.sink, lse, statistics))


def sink_gradient(sink: Tensor, lse: Tensor, statistics: Tensor) -> Tensor:
    """The sum over all rows of P_sink (0 - delta), a sink being a key without a value. An empty row has none."""
    P = torch.exp(sink.float()[:, None] - lse).masked_fill_(lse == -torch.inf, 0.0)
    minus_delta = statistics[1].view(*lse.shape[:2], -1)[..., : lse.shape[2]]
    return (P * minus_delta).sum((0, 2)).to(sink.dtype)


def gradients_of(problem: Problem) -> tuple[Memory, Memory, Memory]:
    """dq, dk and dv."""
    dq, dk, dv = (memory(shape, problem.dtype) for shape in (q_shape(problem), problem.k_shape, v_shape(problem)))
    return dq, dk, dv


def statistics_of(problem: Problem) -> Memory:
    """-L and -delta of each head's queries, padded."""
    padded = -(-problem.q_len // PAD) * PAD
    return memory((2, problem.batch * problem.heads, padded), torch.float32)


def numbers_of(problem: Problem, origin: Origin, length: int, side: int, heads: int, together: int) -> tuple[Any, ...]:
    """`forward.Call` for tiles of `side` along `length`, of so many heads a sequence."""
    left, right = problem.band.bounds
    diagonal = origin[2] - origin[3] + problem.band.offset(problem.q_len, problem.k_len)
    tiles = -(-length // side)
    return (
        problem.q_len, problem.k_len, diagonal, left, right, problem.scale * LOG2E, problem.softcap * LOG2E,
        problem.heads, problem.group, tiles, together, tiles * problem.batch * heads,
    )  # fmt: skip


def heads_at_once(problem: Problem, size: int, in_turn: bool = False) -> int:
    """How many heads walk their tiles side by side, so that what passes by them, `size` bytes a head, is in the L2 at once.

    in_turn: tiles of a head wait for each other, and do so longer the more of one head are at work. Reckoned for tiles that
    see an add a step after it began, d 64 at 4k, the full mask takes 1.3 times as long with one head at once as with four.
    """
    return 1 if problem.band.is_full and not in_turn else side_by_side(problem.batch * problem.kv_heads, size)


def plain(what: Memory, block: tuple[int, ...]) -> Box:
    """Of contiguous fp32, not swizzled: threads read and write whole rows of it."""
    layout = gl.NVMMASharedLayout(swizzle_byte_width=0, element_bitwidth=32, rank=len(block))
    return Box(what[0], what[1], block, layout)


# ---- dQ by TMA -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Options:
    """The one compile-time argument of the main kernel. Lengths are never in it."""

    WIDTH: int  # columns of all tiles
    ROWS: int
    STAGES: int
    LEFT: bool  # the Band is bounded on this side
    MASKED: bool  # blocks may need the mask
    SOFTCAP: bool
    ORDERED: bool  # dQ is added up in one order
    CONSUMER_REGISTERS: int
    PRODUCER_REGISTERS: int

    @classmethod
    def of(cls, problem: Problem, cfg: Backward, wide: int) -> Options:
        consumer_registers, producer_registers = cfg.registers
        return cls(
            WIDTH=wide, ROWS=cfg.rows, STAGES=cfg.stages, LEFT=problem.band.left is not None,
            MASKED=not problem.band.is_full or problem.k_len % BACKWARD_KEYS > 0, SOFTCAP=problem.softcap > 0,
            ORDERED=problem.deterministic, CONSUMER_REGISTERS=consumer_registers, PRODUCER_REGISTERS=producer_registers,
        )  # fmt: skip


class Launches(NamedTuple):
    """The three launches, and what they fill."""

    prepare: Ready  # (o, do, lse, dlse, statistics, accumulator, turns)
    main: Ready  # (dk, dv, accumulator, q, k, v, do, statistics, turns)
    convert: Ready  # (dq, accumulator)
    memory: tuple[Memory, ...]  # dq, dk, dv, statistics, accumulator, and turns where dQ is added up in one order


@lru_cache(maxsize=READY)
def launches_of(problem: Problem, origin: Origin, of_dlse: Strides | None, *of_rows: Strides) -> Launches:
    """of_rows: the strides of do, q, k, v."""
    wide = config.width(max(problem.qk_dim, problem.v_dim))
    cfg = config.BACKWARD[wide]
    options = Options.of(problem, cfg, wide)
    dq, dk, dv = gradients_of(problem)
    statistics = statistics_of(problem)
    _, heads, padded = statistics[0]
    accumulator = memory((heads * padded * wide // SHARE[1], SHARE[1]), torch.float32)
    turns = [memory((accumulator[0][0] // SHARE[0],), torch.int32)] if options.ORDERED else []
    of_do, of_q, of_k, of_v = of_rows
    by_key, by_query = (PIECE, wide), (cfg.rows, wide)
    boxes = (
        box_of(*dk[:2], by_key, problem.dtype),
        box_of(*dv[:2], by_key, problem.dtype),
        plain(accumulator, SHARE),
        box_of(dq[0], of_q, by_query, problem.dtype),
        box_of(dk[0], of_k, by_key, problem.dtype),
        box_of(dv[0], of_v, by_key, problem.dtype),
        box_of(problem.o_shape, of_do, by_query, problem.dtype),
        plain(statistics, (2, 1, cfg.rows)),
    )
    size = problem.q_len * problem.group * wide * (2 * problem.dtype.itemsize + 4)  # Q, dO and dQ of a group
    together = heads_at_once(problem, size, in_turn=options.ORDERED)
    numbers = numbers_of(problem, origin, problem.k_len, BACKWARD_KEYS, problem.kv_heads, together)
    # The main kernel adds L to its scores before it scales them; under a softcap it scales them first.
    unit = LOG2E if options.SOFTCAP else 1 / problem.scale
    return Launches(
        Ready(
            prepare_kernel, (heads * padded // PREPARED,),
            (problem.heads, problem.q_len, padded, heads, unit, *strides(of_do), *(of_dlse or (0, 0, 0))),
            {"DV": problem.v_dim, "WIDTH": wide, "ROWS": PREPARED}, 4, 1,
        ),
        Ready(backward_kernel, (numbers[-1],), numbers, {"O": options}, 4, 1, dict(enumerate(boxes))),
        Ready(
            convert_kernel, (accumulator[0][0] // SHARE[0],), (problem.q_len, padded, problem.scale),
            {"D": problem.qk_dim, "WIDTH": wide}, 4, 1,
        ),
        (dq, dk, dv, statistics, accumulator, *turns),
    )  # fmt: skip


# ---- split in two kernels --------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class SplitOptions:
    """The one compile-time argument of both kernels. Lengths are never in it."""

    WIDTH: int  # columns of the tiles of Q, K, dQ and dK
    V_WIDTH: int  # of V, dO and dV
    ROWS: int
    KEYS: int
    STAGES: int
    V_STAGES: int
    LEFT: bool  # the Band is bounded on this side
    MASKED: bool  # it is on any
    SOFTCAP: bool
    CONSUMER_REGISTERS: int
    PRODUCER_REGISTERS: int

    @classmethod
    def of(cls, problem: Problem, kernel: Kernel) -> SplitOptions:
        consumer_registers, producer_registers = kernel.registers
        return cls(
            WIDTH=config.width(problem.qk_dim), V_WIDTH=config.width(problem.v_dim), ROWS=kernel.rows, KEYS=kernel.keys,
            STAGES=kernel.stages, V_STAGES=kernel.v_stages, LEFT=problem.band.left is not None,
            MASKED=not problem.band.is_full, SOFTCAP=problem.softcap > 0,
            CONSUMER_REGISTERS=consumer_registers, PRODUCER_REGISTERS=producer_registers,
        )  # fmt: skip


class Split(NamedTuple):
    """The two launches, and what they fill."""

    dq: Ready  # (dq, q, do, k, v, o, lse, dlse, statistics)
    dkdv: Ready  # (dk, dv, k, v, q, do, statistics)
    memory: tuple[Memory, ...]  # dq, dk, dv, statistics


@lru_cache(maxsize=READY)
def split_of(problem: Problem, origin: Origin, of_dlse: Strides | None, *of_rows: Strides) -> Split:
    """of_rows: the strides of do, q, k, v."""
    do, q, k, v = zip((problem.o_shape, q_shape(problem), problem.k_shape, v_shape(problem)), of_rows, strict=True)
    dq, dk, dv = gradients_of(problem)
    statistics = statistics_of(problem)
    by_query, by_key = config.SPLIT.dq, config.SPLIT.dkdv
    columns = (problem.qk_dim + problem.v_dim) * problem.dtype.itemsize

    side = by_query.keys
    passing = heads_at_once(problem, problem.k_len * columns) * problem.group  # K and V
    numbers = numbers_of(problem, origin, problem.q_len, by_query.rows, problem.heads, passing)
    boxes = [box(problem, *x) for x in ((dq, PIECE), (q, PIECE), (do, PIECE), (k, side), (v, side))]
    start_dq = Ready(
        dq_kernel, (numbers[-1],), (*numbers, statistics[0][2], problem.v_dim // 8, *(of_dlse or (0, 0, 0))),
        {"O": SplitOptions.of(problem, by_query)}, 4, 1, dict(enumerate(boxes)),
    )  # fmt: skip

    keys, side = by_key.keys, by_key.rows
    passing = heads_at_once(problem, problem.q_len * problem.group * columns)  # Q and dO of a group
    numbers = numbers_of(problem, origin, problem.k_len, keys, problem.kv_heads, passing)
    boxes = [box(problem, *x) for x in ((dk, keys), (dv, keys), (k, keys), (v, keys), (q, side), (do, side))]
    start_dkdv = Ready(
        dkdv_kernel, (numbers[-1],), numbers, {"O": SplitOptions.of(problem, by_key)}, 4, 1,
        dict(enumerate([*boxes, plain(statistics, (1, 1, side))])),
    )  # fmt: skip
    return Split(start_dq, start_dkdv, (dq, dk, dv, statistics))


def box(problem: Problem, tensor: tuple[Any, ...], side: int) -> Box:
    """Of a tensor (shape, strides, ...), in blocks of `side` rows."""
    shape, of_rows, *_ = tensor
    return box_of(shape, of_rows, (side, config.width(shape[-1])), problem.dtype)
