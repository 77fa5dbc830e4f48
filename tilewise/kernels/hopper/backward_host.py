"""The host side of the backward: from a Problem and its tensors to three launches, or, split in two kernels, to two."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor
from triton.experimental.gluon import language as gl

from ...block_mask import BlockMask
from ...layout import empty, laid
from ...problem import NOTHING, Aux, Grads, Layout, Origin, Problem
from ..launch import Box, Ready
from ..tensors import READY, Memory, Strides, dense_rows, empty_strided, lies, memory, q_shape, ragged, v_shape
from ..triton.host import LOG2E, dropout, gradients_of, lying, side_by_side, strides
from . import config
from .backward import backward_kernel
from .backward_rows import convert_kernel, prepare_kernel
from .backward_split import dkdv_kernel, dq_kernel
from .config import BACKWARD_KEYS, PIECE, Backward, Kernel
from .host import box_of, contents, counter, lists_of, programs, rows_apart

PAD = 128  # rows: what the statistics of a head are a multiple of, and each tile divides
PREPARED = 64  # queries that a program of prepare_kernel takes
TOTAL = 11  # where a call's numbers have how many tiles there are
ROW = 256  # elements of dQ's accumulator


def backward(
    problem: Problem, do: Tensor, dlse: Tensor | None, q: Tensor, k: Tensor, v: Tensor, o: Tensor, lse: Tensor, aux: Aux
) -> Grads:
    (do, q, k, v), of_rows = dense_rows(do, q, k, v, expanded=False)
    of_dlse = None if dlse is None else dlse.stride()
    o, o_by_token = lies(o)
    room = empty_strided(q)
    if config.is_split(problem):
        split = split_of(problem, aux.origin, of_dlse, o_by_token, *of_rows)
        dq, dk, dv, statistics = [room(*what) for what in split.memory]
        split.dq(dq, q, do, k, v, o, lse, dlse, statistics)
        split.dkdv(dk, dv, k, v, q, do, statistics)
    else:
        (do, q, k, v), of_rows = clippable(problem, (do, q, k, v), of_rows)
        device = q.get_device()
        lists = lists_of(aux, by_query=False)
        start = launches_of(problem, aux.origin, programs(device), lists, of_dlse, o_by_token, *of_rows)
        dq, dk, dv, statistics, accumulator, *turns = [room(*what) for what in start.memory]
        turn = turns[0] if turns else None
        start.prepare(o, do, lse, dlse, statistics, accumulator, turn, aux.cu_q, aux.q_lens)
        tiles = counter(device)
        start.main(dk, dv, accumulator, q, k, v, do, statistics, turn, tiles, aux.seed, *contents(aux, by_query=False))
        start.convert(dq, accumulator, aux.cu_q, aux.q_lens)
        if problem.k_lens:
            dk, dv = laid(dk, k), laid(dv, v)
    return Grads(dq, dk, dv, dsink=None if aux.sink is None else sink_gradient(problem, aux.sink, statistics))


def sink_gradient(problem: Problem, sink: Tensor, statistics: Tensor) -> Tensor:
    """The sum over all rows of P_sink (0 - delta), a sink being a key without a value. -L of rows that have none is -inf."""
    minus_L, minus_delta = statistics.view(2, -1, problem.heads, statistics.shape[2])
    P = torch.exp(sink.float()[:, None] + minus_L / unit_of(problem))
    return (P * minus_delta / kept_of(problem)).sum((0, 2)).to(sink.dtype)


def kept_of(problem: Problem) -> float:
    """What dropout keeps, times which the fused main kernel's delta and dS are; of nothing kept they are what they are."""
    return 1.0 - problem.dropout_p if problem.dropout_p < 1 else 1.0


def unit_of(problem: Problem) -> float:
    """What lse is multiplied by to be L. The fused main kernel adds L to its scores before it scales them; under a softcap it
    scales them first, as the split ones do."""
    return LOG2E if problem.softcap > 0 or config.is_split(problem) else 1 / problem.scale


def clippable(
    problem: Problem, tensors: tuple[Tensor, ...], of_rows: list[Strides]
) -> tuple[list[Tensor], list[Strides]]:
    """do, q, k and v, or a contiguous copy where a descriptor is to clip at lengths and there is none (`ragged`)."""
    found = list(tensors)
    if problem.q_layout is Layout.DENSE and (problem.q_lens or problem.k_lens):
        for n, lens in enumerate((problem.q_lens, problem.q_lens, problem.k_lens, problem.k_lens)):
            if lens and ragged(found[n].shape, of_rows[n], 1, 1) is None:
                copy = empty(found[n].shape, found[n]).copy_(found[n])
                found[n : n + 1], of_rows[n : n + 1] = dense_rows(copy)
    return found, of_rows


def statistics_of(problem: Problem) -> Memory:
    """-L and -delta of each head's queries, padded; packed heads are those of all sequences, each of which is padded."""
    if problem.q_layout is Layout.PACKED:
        return memory((2, problem.heads, (problem.q_len // PAD + problem.batch + 1) * PAD), torch.float32)
    padded = -(-problem.q_len // PAD) * PAD
    return memory((2, problem.batch * problem.heads, padded), torch.float32)


def numbers_of(problem: Problem, origin: Origin, length: int, side: int, heads: int, together: int) -> tuple[Any, ...]:
    """`walk.Call` for tiles of `side` along `length`, of so many heads a sequence."""
    left, right = problem.band.bounds
    packed = problem.q_layout is Layout.PACKED
    diagonal = origin[2] - origin[3]
    if not packed and not problem.q_lens and not problem.k_lens:  # else each sequence has its own
        diagonal += problem.band.offset(problem.q_len, problem.k_len)
    tiles = length // side + problem.batch + 1 if packed else -(-length // side)
    return (
        problem.q_len, problem.k_len, diagonal, left, right, problem.scale * LOG2E, problem.softcap * LOG2E,
        problem.heads, problem.group, tiles, together, tiles * heads * (1 if packed else problem.batch),
    )  # fmt: skip


def heads_at_once(problem: Problem, size: int, in_turn: bool = False) -> int:
    """How many heads walk their tiles side by side, so that what passes by them, `size` bytes a head, is in the L2 at once.

    in_turn: tiles of a head wait for each other, and do so longer the more of one head are at work. Reckoned for tiles that
    see an add a step after it began, d 64 at 4k, the full mask takes 1.3 times as long with one head at once as with four.
    """
    batch = 1 if problem.q_layout is Layout.PACKED else problem.batch
    return 1 if problem.band.is_full and not in_turn else side_by_side(batch * problem.kv_heads, size)


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
    PLACES: int  # for each consumer's share of dQ
    HELD: bool  # K and V are in registers, too, as first operands
    LEFT: bool  # the Band is bounded on this side
    MASKED: bool  # blocks may need the mask
    SOFTCAP: bool
    ORDERED: bool  # dQ is added up in one order
    PACKED: bool
    Q_LENS: bool
    K_LENS: bool
    TOP_LEFT: bool
    BLOCKS: bool
    CUT: bool  # some of a BlockMask's tiles may not be wanted
    DROPOUT: bool
    CONSUMER_REGISTERS: int
    PRODUCER_REGISTERS: int
    DRAWN: int = 0  # for so many blocks at once a drawer draws dropout's words; 0: consumers do
    DRAWER_REGISTERS: int = 0

    @property
    def VARIED(self) -> bool:
        """Sequences have lengths of their own."""
        return self.PACKED or self.Q_LENS or self.K_LENS

    @property
    def Q_CLIPPED(self) -> bool:
        """Descriptors of Q and dO clip at a sequence's end."""
        return self.PACKED or self.Q_LENS

    @property
    def K_CLIPPED(self) -> bool:
        """Those of K, V and their gradients do."""
        return self.PACKED or self.K_LENS

    @classmethod
    def of(cls, problem: Problem, cfg: Backward, wide: int, part: bool = False) -> Options:
        """part: a BlockMask is of a larger call (`is_part`)."""
        consumer_registers, producer_registers = cfg.registers
        packed, blocks, band = problem.q_layout is Layout.PACKED, problem.mask == "blocks", problem.band
        varied = packed or problem.q_lens or problem.k_lens
        return cls(
            WIDTH=wide, ROWS=cfg.rows, STAGES=cfg.stages, PLACES=cfg.places, HELD=cfg.held, LEFT=band.left is not None,
            MASKED=varied or not band.is_full or problem.k_len % BACKWARD_KEYS > 0, SOFTCAP=problem.softcap > 0,
            ORDERED=problem.deterministic, PACKED=packed, Q_LENS=problem.q_lens, K_LENS=problem.k_lens,
            TOP_LEFT=varied and band.align == "top_left", BLOCKS=blocks,
            CUT=blocks and (varied or not band.is_full or part), DROPOUT=problem.dropout_p > 0,
            CONSUMER_REGISTERS=consumer_registers, PRODUCER_REGISTERS=producer_registers,
            DRAWN=cfg.drawn, DRAWER_REGISTERS=cfg.drawer_registers,
        )  # fmt: skip


class Launches(NamedTuple):
    """The three launches, and what they fill."""

    prepare: Ready  # (o, do, lse, dlse, statistics, accumulator, turns, cu_q, q_lens)
    main: Ready  # (dk, dv, accumulator, q, k, v, do, statistics, turns, counter, seed, *contents)
    convert: Ready  # (dq, accumulator, cu_q, q_lens)
    memory: tuple[Memory, ...]  # dq, dk, dv, statistics, accumulator, and turns where dQ is added up in one order


@lru_cache(maxsize=READY)
def launches_of(
    problem: Problem,
    origin: Origin,
    at_once: int,
    lists: Strides,
    of_dlse: Strides | None,
    o_by_token: bool,
    *of_rows: Strides,
) -> Launches:
    """at_once: how many programs the device holds. lists: `host.lists_of`. of_rows: the strides of do, q, k, v."""
    wide = config.backward_width(max(problem.qk_dim, problem.v_dim))
    cfg = config.backward_of(problem)
    options = Options.of(problem, cfg, wide, is_part(problem, origin, lists))
    of_do, of_q, of_k, of_v = of_rows
    # A descriptor that clips at lengths has its sequences as far apart as heads are long: those results are by heads, first.
    of_results = (of_q, None, None) if problem.k_lens else (of_q, of_k, of_v)
    dq, dk, dv = gradients_of(problem, *of_results)
    statistics = statistics_of(problem)
    _, heads, padded = statistics[0]
    accumulator = memory((heads * padded * wide // ROW, ROW), torch.float32)
    turns = [memory((heads * padded // cfg.rows * 2,), torch.int32)] if options.ORDERED else []
    chunk, columns = config.chunk(wide, wide), config.dq_columns(wide)
    by_key, by_query = (PIECE, chunk), (cfg.rows, chunk)
    boxes = (
        box_of(*dk[:2], by_key, problem.dtype, options.K_CLIPPED),
        box_of(*dv[:2], by_key, problem.dtype, options.K_CLIPPED),
        plain(accumulator, (PIECE * columns // ROW, ROW)),
        box_of(dq[0], of_q, by_query, problem.dtype, options.Q_CLIPPED),
        box_of(dk[0], of_k, by_key, problem.dtype, options.K_CLIPPED),
        box_of(dv[0], of_v, by_key, problem.dtype, options.K_CLIPPED),
        box_of(problem.o_shape, of_do, by_query, problem.dtype, options.Q_CLIPPED),
        plain(statistics, (2, 1, cfg.rows)),
    )
    size = problem.q_len * problem.group * wide * (2 * problem.dtype.itemsize + 4)  # Q, dO and dQ of a group
    together = heads_at_once(problem, size, in_turn=options.ORDERED)
    b0, h0, i0, j0 = origin
    least, kept = dropout(problem.dropout_p)[0], kept_of(problem)
    numbers = (
        *numbers_of(problem, origin, problem.k_len, BACKWARD_KEYS, problem.kv_heads, together), problem.batch,
        *(rows_apart(problem, x) for x in (of_q, of_do, of_k, of_v)), *lists, b0 * lists[0] + h0 * lists[1], j0, i0, b0, h0,
        least, 1.0 / kept,
    )  # fmt: skip
    along = (0,) * 3 if of_dlse is None else (*(0,) * (3 - len(of_dlse)), *of_dlse)
    which = {"PACKED": options.PACKED, "Q_LENS": options.Q_LENS}
    return Launches(
        Ready(
            prepare_kernel, (heads * padded // PREPARED,),
            (problem.heads, problem.q_len, padded, heads, unit_of(problem), kept, *strides(of_do), *along, problem.batch),
            {"DV": problem.v_dim, "WIDTH": wide, "ROWS": PREPARED, "BY_TOKEN": o_by_token, **which}, 4, 1,
        ),
        Ready(
            backward_kernel, (min(numbers[TOTAL], at_once),), numbers, {"O": options}, 4, 1, dict(enumerate(boxes)),
        ),
        Ready(
            convert_kernel, (heads * padded // PIECE * (wide // columns),),
            (problem.q_len, padded, problem.scale / kept, problem.heads, problem.batch),
            {"D": problem.qk_dim, "WIDTH": wide, "COLUMNS": columns, "BY_TOKEN": lying(q=dq) != "", **which}, 4, 1,
        ),
        (dq, dk, dv, statistics, accumulator, *turns),
    )  # fmt: skip


def is_part(problem: Problem, origin: Origin, lists: Strides) -> bool:
    """Whether a BlockMask, whose lists by keys have these sides, has tiles beyond this call's queries or before them."""
    return origin != NOTHING.origin or lists[3] * BlockMask.TILE >= problem.q_len + BlockMask.TILE


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
    O_BY_TOKEN: bool
    CONSUMER_REGISTERS: int
    PRODUCER_REGISTERS: int

    @classmethod
    def of(cls, problem: Problem, kernel: Kernel, o_by_token: bool = False) -> SplitOptions:
        consumer_registers, producer_registers = kernel.registers
        return cls(
            WIDTH=config.width(problem.qk_dim), V_WIDTH=config.width(problem.v_dim), ROWS=kernel.rows,
            KEYS=kernel.keys, STAGES=kernel.stages, V_STAGES=kernel.v_stages, LEFT=problem.band.left is not None,
            MASKED=not problem.band.is_full, SOFTCAP=problem.softcap > 0, O_BY_TOKEN=o_by_token,
            CONSUMER_REGISTERS=consumer_registers, PRODUCER_REGISTERS=producer_registers,
        )  # fmt: skip


class Split(NamedTuple):
    """The two launches, and what they fill."""

    dq: Ready  # (dq, q, do, k, v, o, lse, dlse, statistics)
    dkdv: Ready  # (dk, dv, k, v, q, do, statistics)
    memory: tuple[Memory, ...]  # dq, dk, dv, statistics


@lru_cache(maxsize=READY)
def split_of(problem: Problem, origin: Origin, of_dlse: Strides | None, o_by_token: bool, *of_rows: Strides) -> Split:
    """of_rows: the strides of do, q, k, v."""
    do, q, k, v = zip((problem.o_shape, q_shape(problem), problem.k_shape, v_shape(problem)), of_rows, strict=True)
    dq, dk, dv = gradients_of(problem, *of_rows[1:])
    statistics = statistics_of(problem)
    row = config.split_of(problem.qk_dim, problem.v_dim)
    by_query, by_key = row.dq, row.dkdv
    columns = (problem.qk_dim + problem.v_dim) * problem.dtype.itemsize

    side = by_query.keys
    passing = heads_at_once(problem, problem.k_len * columns) * problem.group  # K and V
    numbers = numbers_of(problem, origin, problem.q_len, by_query.rows, problem.heads, passing)
    boxes = [box(problem, *x) for x in ((dq, PIECE), (q, PIECE), (do, PIECE), (k, side), (v, side))]
    start_dq = Ready(
        dq_kernel, (numbers[-1],), (*numbers, statistics[0][2], problem.v_dim // 8, *(of_dlse or (0, 0, 0))),
        {"O": SplitOptions.of(problem, by_query, o_by_token)}, 4, 1, dict(enumerate(boxes)),
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
    wide = config.width(shape[-1])
    return box_of(shape, of_rows, (side, config.chunk(wide, wide)), problem.dtype)
