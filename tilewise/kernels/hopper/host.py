"""The host side: from a Problem and its tensors to a launch."""

from __future__ import annotations

import threading
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor
from triton.experimental.gluon import language as gl

from ...block_mask import BlockMask, TileLists
from ...layout import empty
from ...problem import NOTHING, Aux, Layout, Origin, Problem
from ..launch import Box, Ready
from ..tensors import READY, Memory, Strides, dense_rows, empty_strided, memory, q_shape, ragged, v_shape, whole
from ..triton.host import LOG2E, dropout, together
from . import config
from .config import PIECE, Config
from .forward import forward_kernel


@dataclass(frozen=True, slots=True)
class Options:
    """The one compile-time argument of the kernel. Lengths are never in it."""

    WIDTH: int  # columns of the tiles of Q and K
    V_WIDTH: int  # of V and O
    ROWS: int
    KEYS: int
    STAGES: int
    QUERIES: int
    Q_IN_REGISTERS: bool
    O_IN_Q: bool  # O is stored through Q's buffer
    BANDED: bool  # some keys may not be seen
    LEFT: bool  # the Band is bounded on this side
    MASKED: bool  # blocks after a piece's first may need the mask
    HALF: bool
    SOFTCAP: bool
    SINK: bool
    PACKED: bool
    Q_LENS: bool
    K_LENS: bool
    TOP_LEFT: bool
    BLOCKS: bool
    CUT: bool  # some of a BlockMask's tiles may not be wanted
    DROPOUT: bool
    HEADROOM: int  # bits that P lies above 1: of fp16, below whose least number may be what dropout leaves
    CONSUMER_REGISTERS: int
    PRODUCER_REGISTERS: int

    @property
    def VARIED(self) -> bool:
        """Sequences have lengths of their own."""
        return self.PACKED or self.Q_LENS or self.K_LENS

    @property
    def TOLD(self) -> bool:
        """The producer tells consumers which blocks they take; else these are all, and every key is seen."""
        return self.BANDED or self.VARIED or self.BLOCKS

    @classmethod
    def of(cls, problem: Problem, cfg: Config, diagonal: int | None, origin: Origin = NOTHING.origin) -> Options:
        """diagonal: None where each sequence has its own."""
        wide, v_wide = config.width(problem.qk_dim), config.width(problem.v_dim)
        band = problem.band
        # A piece begins at a multiple of 64 rows. Where its first row's last key ends a run of 64, or comes next to it,
        # no block but the one with the last row's last key is cut by the diagonal.
        cut = band.right is not None and (diagonal is None or (diagonal + band.bounds[1] + 1) % PIECE > 1)
        blocks, packed = problem.mask == "blocks", problem.q_layout is Layout.PACKED
        varied = packed or problem.q_lens or problem.k_lens
        consumer_registers, producer_registers = cfg.registers
        return cls(
            WIDTH=wide, V_WIDTH=v_wide, ROWS=cfg.rows, KEYS=cfg.keys, STAGES=cfg.stages, QUERIES=cfg.queries,
            Q_IN_REGISTERS=cfg.q_in_registers, O_IN_Q=cfg.o_in_q(wide, v_wide), BANDED=not band.is_full,
            LEFT=band.left is not None, MASKED=band.left is not None or cut or blocks,
            HALF=cfg.half and band.right is not None and not blocks, SOFTCAP=problem.softcap > 0, SINK=problem.sink,
            PACKED=packed, Q_LENS=problem.q_lens, K_LENS=problem.k_lens, TOP_LEFT=band.align == "top_left",
            BLOCKS=blocks, CUT=blocks and (varied or not band.is_full or origin != NOTHING.origin),
            DROPOUT=problem.dropout_p > 0,
            HEADROOM=12 if problem.dropout_p > 0 and problem.dtype is torch.float16 else 0,
            CONSUMER_REGISTERS=consumer_registers, PRODUCER_REGISTERS=producer_registers,
        )  # fmt: skip


class Launch(NamedTuple):
    """start(o, q, k, v, lse, sink, counter of tiles, *contents), and what o and lse are."""

    start: Ready
    o: Memory
    lse: Memory


def forward(problem: Problem, q: Tensor, k: Tensor, v: Tensor, aux: Aux) -> tuple[Tensor, Tensor]:
    if q.numel() == 0 or k.numel() == 0:  # TMA knows no empty tensors
        o = empty(problem.o_shape, q).zero_()
        return o, q.new_full(problem.lse_shape, -torch.inf, dtype=torch.float32)
    (q, k, v), of_rows = dense_rows(q, k, v, expanded=False)
    if problem.k_lens and problem.q_layout is Layout.DENSE and ragged(v.shape, of_rows[2], 1, 1) is None:
        (v,), of_rows[2:] = dense_rows(empty(v.shape, v).copy_(v))
    device = q.get_device()
    start, of_o, of_lse = launch_of(
        problem, aux.origin, programs(device), aux.cu_q is aux.cu_k, lists_of(aux), *of_rows
    )
    room = empty_strided(q)
    o, lse = room(*of_o), room(*of_lse)
    start(o, q, k, v, lse, aux.sink, aux.seed, counter(device), *contents(aux))
    return o, lse


def contents(aux: Aux, by_query: bool = True) -> tuple[Tensor | None, ...]:
    """The tensors whose contents say which tiles there are; a BlockMask's lists and pool by queries or by keys."""
    if aux is NOTHING:
        return ()
    lengths = aux.cu_q, aux.cu_k, aux.q_lens, aux.k_lens
    if not isinstance(aux.mask, BlockMask):
        return lengths
    return (*lengths, *of_tiles(aux.mask, by_query), aux.mask.bits if by_query else aux.mask.turned)


def lists_of(aux: Aux, by_query: bool = True) -> Strides:
    """How a BlockMask's lists lie: their sides, and of those that are shared 0 for the first two."""
    if not isinstance(aux.mask, BlockMask):
        return NO_LISTS
    b, h, n, m = of_tiles(aux.mask, by_query).full.shape
    return (h if b > 1 else 0, 1 if h > 1 else 0, n, m)


def of_tiles(blocks: BlockMask, by_query: bool) -> TileLists:
    return blocks.query_major if by_query else blocks.key_major


NO_LISTS = (0, 0, 0, 0)


@lru_cache(maxsize=READY)
def launch_of(problem: Problem, origin: Origin, at_once: int, alike: bool, lists: Strides, *of_rows: Strides) -> Launch:
    """at_once: how many programs the device holds. alike: queries and keys are packed alike. lists: `lists_of`."""
    cfg = config.choose(problem)
    left, right = problem.band.bounds
    packed, lens = problem.q_layout is Layout.PACKED, problem.q_lens or problem.k_lens
    diagonal = origin[2] - origin[3]
    if not packed and not lens:
        diagonal += problem.band.offset(problem.q_len, problem.k_len)
    known = problem.band.align == "top_left" or (not lens and (alike or not packed))
    options = Options.of(problem, cfg, diagonal if known else None, origin)
    tiles = problem.q_len // cfg.rows + problem.batch + 1 if packed else -(-problem.q_len // cfg.rows)
    total = tiles * problem.heads * (1 if packed else problem.batch)
    o, lse = memory(problem.o_shape, problem.dtype, like=of_rows[0]), memory(problem.lse_shape, torch.float32)
    shapes = problem.o_shape, q_shape(problem), problem.k_shape, v_shape(problem)
    widths = options.WIDTH, options.V_WIDTH
    chunk, v_chunk = (config.chunk(*pair) for pair in (widths, widths[::-1]))
    sides = (PIECE, v_chunk), (PIECE, chunk), (cfg.keys, chunk), (cfg.keys, v_chunk)
    clipped = packed, False, False, packed or problem.k_lens
    boxes = (
        box_of(shape, strides, side, problem.dtype, at_ends)
        for shape, strides, side, at_ends in zip(shapes, (o[1], *of_rows), sides, clipped, strict=True)
    )
    alone = replace(problem, batch=1) if packed else problem  # packed heads are those of all sequences
    apart = rows_apart(problem, of_rows[2])
    numbers = (
        problem.q_len, problem.k_len, diagonal, left, right, problem.scale * LOG2E, problem.softcap * LOG2E,
        problem.heads, problem.group, tiles, together(alone), total, problem.batch, apart,
        *lists, origin[0] * lists[0] + origin[1] * lists[1], *origin[2:], *origin[:2],
        *dropout(problem.dropout_p),
    )  # fmt: skip
    grid = (min(total, at_once),)
    return Launch(Ready(forward_kernel, grid, numbers, {"O": options}, 4, 1, dict(enumerate(boxes))), o, lse)


def box_of(
    shape: tuple[int, ...], strides: Strides, side: tuple[int, int], dtype: torch.dtype, at_ends: bool = False
) -> Box:
    """A tensor (B, H, S, D), or (T, H, D) as (1, H, T, D), in blocks of some rows of one head. at_ends: clipped there."""
    if at_ends:
        found = ragged(shape, strides, *side)
    elif len(shape) == 3:
        found = whole((1, shape[1], shape[0], shape[2]), (8, strides[1], strides[0], 1), *side)
    else:
        found = whole(shape, strides, *side)
    assert found is not None, "there is none of an empty or an expanded tensor"
    elements = {torch.float16: gl.float16, torch.bfloat16: gl.bfloat16}[dtype]
    return replace(found, layout=gl.NVMMASharedLayout.get_default_for(list(found.block), elements))


def rows_apart(problem: Problem, strides: Strides) -> int:
    """How many rows lie from a sequence's first to the next one's, in a descriptor that clips at their ends."""
    return 0 if problem.q_layout is Layout.PACKED or problem.batch == 1 else strides[0] // strides[2]


@lru_cache
def programs(device: int) -> int:
    """How many programs run at once: one on each SM, whose shared memory it fills."""
    return torch.cuda.get_device_properties(device).multi_processor_count


# ---- the counter of tiles --------------------------------------------------------------------------------------------

_counters: dict[tuple[int, int], Tensor] = {}


def counter(device: int) -> Tensor:
    """An int32 that is 0 when the launch begins, and that no launch at the same time counts with.

    Launches on one stream follow one another and each leaves it at 0, so it is one a stream. In a graph it is one a
    launch, set to 0 by the graph: what is captured on one stream may be replayed on many.
    """
    if torch._C._cuda_isCurrentStreamCapturing():
        return torch.zeros(1, dtype=torch.int32, device=device)
    key = device, torch._C._cuda_getCurrentRawStream(device)
    found = _counters.get(key)
    if found is None:
        _counters[key] = found = _lasting_zero(torch.cuda.current_stream(device))
    return found


def _lasting_zero(stream: torch.cuda.Stream) -> Tensor:
    """Allocated by a thread of its own. Of this thread all allocations may go to the pool of a CUDA graph that is about
    to be captured (torch.compile's warm-up), which takes memory back without asking."""
    made: list[Tensor] = []

    def make() -> None:
        with torch.cuda.stream(stream):
            made.append(torch.zeros(1, dtype=torch.int32, device=stream.device))

    thread = threading.Thread(target=make)
    thread.start()
    thread.join()
    return made[0]
