"""The host side: from a Problem and its tensors to a launch."""

from __future__ import annotations

import threading
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor
from triton.experimental.gluon import language as gl

from ...problem import Aux, Origin, Problem
from ..launch import Box, Ready
from ..tensors import READY, Memory, Strides, dense_rows, empty_strided, memory, q_shape, v_shape, whole
from ..triton.host import LOG2E, TOGETHER_BYTES
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
    O_IN_Q: bool  # O is stored through Q's buffer
    BANDED: bool  # some keys may not be seen
    LEFT: bool  # the Band is bounded on this side
    MASKED: bool  # blocks after a piece's first may need the mask
    HALF: bool
    SOFTCAP: bool
    SINK: bool
    CONSUMER_REGISTERS: int
    PRODUCER_REGISTERS: int

    @classmethod
    def of(cls, problem: Problem, cfg: Config, diagonal: int) -> Options:
        wide, v_wide = config.width(problem.qk_dim), config.width(problem.v_dim)
        band = problem.band
        # A piece begins at a multiple of 64 rows. Where its first row's last key ends a run of 64, or comes next to it,
        # no block but the one with the last row's last key is cut by the diagonal.
        cut = band.right is not None and (diagonal + band.bounds[1] + 1) % PIECE > 1
        consumer_registers, producer_registers = cfg.registers
        return cls(
            WIDTH=wide, V_WIDTH=v_wide, ROWS=cfg.rows, KEYS=cfg.keys, STAGES=cfg.stages, QUERIES=cfg.queries,
            O_IN_Q=cfg.queries == 1 and wide == v_wide, BANDED=not band.is_full, LEFT=band.left is not None,
            MASKED=band.left is not None or cut,
            HALF=cfg.half and band.right is not None, SOFTCAP=problem.softcap > 0, SINK=problem.sink,
            CONSUMER_REGISTERS=consumer_registers, PRODUCER_REGISTERS=producer_registers,
        )  # fmt: skip


class Launch(NamedTuple):
    """start(o, q, k, v, lse, sink, counter of tiles), and what o and lse are."""

    start: Ready
    o: Memory
    lse: Memory


def forward(problem: Problem, q: Tensor, k: Tensor, v: Tensor, aux: Aux) -> tuple[Tensor, Tensor]:
    if q.numel() == 0 or k.numel() == 0:  # TMA knows no empty tensors
        o = q.new_zeros(problem.o_shape)
        return o, q.new_full(problem.lse_shape, -torch.inf, dtype=torch.float32)
    (q, k, v), of_rows = dense_rows(q, k, v, expanded=False)
    device = q.get_device()
    start, of_o, of_lse = launch_of(problem, aux.origin, programs(device), *of_rows)
    empty = empty_strided(q)
    o, lse = empty(*of_o), empty(*of_lse)
    start(o, q, k, v, lse, aux.sink, counter(device))
    return o, lse


@lru_cache(maxsize=READY)
def launch_of(problem: Problem, origin: Origin, at_once: int, *of_rows: Strides) -> Launch:
    """at_once: how many programs the device holds."""
    cfg = config.choose(problem)
    left, right = problem.band.bounds
    diagonal = origin[2] - origin[3] + problem.band.offset(problem.q_len, problem.k_len)
    options = Options.of(problem, cfg, diagonal)
    tiles = -(-problem.q_len // cfg.rows)
    total = tiles * problem.batch * problem.heads
    o, lse = memory(problem.o_shape, problem.dtype), memory(problem.lse_shape, torch.float32)
    shapes = problem.o_shape, q_shape(problem), problem.k_shape, v_shape(problem)
    sides = (PIECE, options.V_WIDTH), (PIECE, options.WIDTH), (cfg.keys, options.WIDTH), (cfg.keys, options.V_WIDTH)
    boxes = (
        _box(shape, strides, side, problem.dtype)
        for shape, strides, side in zip(shapes, (o[1], *of_rows), sides, strict=True)
    )
    numbers = (
        problem.q_len, problem.k_len, diagonal, left, right, problem.scale * LOG2E, problem.softcap * LOG2E,
        problem.heads, problem.group, tiles, _together(problem), total,
    )  # fmt: skip
    grid = (min(total, at_once),)
    return Launch(Ready(forward_kernel, grid, numbers, {"O": options}, 4, 1, dict(enumerate(boxes))), o, lse)


def _box(shape: tuple[int, ...], strides: Strides, side: tuple[int, int], dtype: torch.dtype) -> Box:
    """A tensor (B, H, S, D) in blocks of some rows of one head."""
    found = whole(shape, strides, *side)
    assert found is not None, "there is none of an empty or an expanded tensor"
    elements = {torch.float16: gl.float16, torch.bfloat16: gl.bfloat16}[dtype]
    return replace(found, layout=gl.NVMMASharedLayout.get_default_for(list(found.block), elements))


def _together(problem: Problem) -> int:
    """How many query heads walk their tiles side by side, so that their keys are in the L2 at once."""
    if problem.band.is_full:
        return 1
    size = max(problem.k_len, 1) * (problem.qk_dim + problem.v_dim) * problem.dtype.itemsize
    return max(1, min(TOGETHER_BYTES // size, 32)) * problem.group


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
