"""The host side: from a Problem and its tensors to a launch."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from ...problem import Aux, Origin, Problem
from ..triton.host import LOG2E, READY, TOGETHER_BYTES, Memory, Strides, empty_strided
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
            O_IN_Q=cfg.queries == 1 and wide == v_wide, LEFT=band.left is not None, MASKED=band.left is not None or cut,
            HALF=cfg.half and band.right is not None, SOFTCAP=problem.softcap > 0, SINK=problem.sink,
            CONSUMER_REGISTERS=consumer_registers, PRODUCER_REGISTERS=producer_registers,
        )  # fmt: skip


class Box(NamedTuple):
    """A tensor as TMA sees it: its extents and strides, and the block that one instruction moves."""

    shape: tuple[int, ...]
    strides: tuple[int, ...]
    block: tuple[int, ...]
    layout: Any  # of the block in shared memory


class Launch(NamedTuple):
    """A launch without its tensors: o, q, k, v (by `boxes`, in this order), lse, sink and the counter of tiles."""

    grid: tuple[int]
    boxes: tuple[Box, ...]
    numbers: tuple[int | float, ...]
    options: Options
    o: Memory
    lse: Memory

    def arguments(self, o: Tensor, q: Tensor, k: Tensor, v: Tensor, *others: Tensor | None) -> tuple[Any, ...]:
        """What the kernel takes before its options."""
        boxed = [
            TensorDescriptor(x, list(box.shape), list(box.strides), list(box.block), box.layout)
            for x, box in zip((o, q, k, v), self.boxes, strict=True)
        ]
        return (*boxed, *others, *self.numbers)

    def __call__(self, *tensors: Tensor | None) -> None:
        # Newer Tritons fuse a product with a sum only where they are asked to.
        forward_kernel[self.grid](
            *self.arguments(*tensors), O=self.options, num_warps=4, enable_fp_fusion=True  # type: ignore[arg-type]
        )  # fmt: skip


def forward(problem: Problem, q: Tensor, k: Tensor, v: Tensor, aux: Aux) -> tuple[Tensor, Tensor]:
    if q.numel() == 0 or k.numel() == 0:  # TMA knows no empty tensors
        o = q.new_zeros(problem.o_shape)
        return o, q.new_full(problem.lse_shape, -torch.inf, dtype=torch.float32)
    q, k, v = (loadable(x) for x in (q, k, v))
    if q.is_cuda and q.get_device() != torch.cuda.current_device():
        with torch.cuda.device(q.device):
            return forward(problem, q, k, v, aux)
    start = launch_of(problem, aux.origin, programs(q.device), q.stride(), k.stride(), v.stride())
    empty = empty_strided(q)
    o, lse = empty(*start.o), empty(*start.lse)
    start(o, q, k, v, lse, aux.sink, counter(q.device))
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
    o, lse = (
        (shape, torch.empty(shape, device="meta").stride(), dtype)
        for shape, dtype in ((problem.o_shape, problem.dtype), (problem.lse_shape, torch.float32))
    )
    of_q = (problem.batch, problem.heads, problem.q_len, problem.qk_dim)
    shapes = problem.o_shape, of_q, problem.k_shape, (*problem.k_shape[:3], problem.v_dim)
    sides = (PIECE, options.V_WIDTH), (PIECE, options.WIDTH), (cfg.keys, options.WIDTH), (cfg.keys, options.V_WIDTH)
    boxes = tuple(
        box_of(shape, strides, side, problem.dtype)
        for shape, strides, side in zip(shapes, (o[1], *of_rows), sides, strict=True)
    )
    numbers = (
        problem.q_len, problem.k_len, diagonal, left, right, problem.scale * LOG2E, problem.softcap * LOG2E,
        problem.heads, problem.group, tiles, _together(problem), total,
    )  # fmt: skip
    return Launch((min(total, at_once),), boxes, numbers, options, o, lse)


def box_of(shape: Sequence[int], strides: Sequence[int], side: tuple[int, int], dtype: torch.dtype) -> Box:
    block = (1, 1, *side)
    layout = gl.NVMMASharedLayout.get_default_for(
        list(block), {torch.float16: gl.float16, torch.bfloat16: gl.bfloat16}[dtype]
    )
    # Of a dimension with one element the stride means nothing, and TMA minds it.
    known = tuple(stride if size > 1 else 8 for size, stride in zip(shape[:3], strides[:3], strict=True))
    return Box(tuple(shape), (*known, 1), block, layout)


def _together(problem: Problem) -> int:
    """How many query heads walk their tiles side by side, so that their keys are in the L2 at once."""
    if problem.band.is_full:
        return 1
    size = max(problem.k_len, 1) * (problem.qk_dim + problem.v_dim) * problem.dtype.itemsize
    return max(1, min(TOGETHER_BYTES // size, 32)) * problem.group


def loadable(x: Tensor) -> Tensor:
    """x, or a copy of it that TMA can load: rows contiguous, at multiples of 16 bytes, none of them in two places."""
    strides = x.stride()
    apart = all(
        stride % 8 == 0 and stride > 0 for stride, size in zip(strides[:3], x.shape[:3], strict=True) if size > 1
    )
    if strides[3] == 1 and apart and x.data_ptr() % 16 == 0:
        return x
    return x.clone(memory_format=torch.contiguous_format)


@lru_cache
def programs(device: torch.device) -> int:
    """How many programs run at once: one on each SM, whose shared memory it fills."""
    return torch.cuda.get_device_properties(device).multi_processor_count


# ---- the counter of tiles --------------------------------------------------------------------------------------------

_counters: dict[tuple[int, int], Tensor] = {}


def counter(device: torch.device) -> Tensor:
    """An int32 that is 0 when the launch begins, and that no launch at the same time counts with.

    Launches on one stream follow one another and each leaves it at 0, so it is one a stream. In a graph it is one a
    launch, set to 0 by the graph: what is captured on one stream may be replayed on many.
    """
    if torch.cuda.is_current_stream_capturing():
        return torch.zeros(1, dtype=torch.int32, device=device)
    stream = torch.cuda.current_stream(device)
    key = (stream.device_index, stream.cuda_stream)
    found = _counters.get(key)
    if found is None:
        _counters[key] = found = _lasting_zero(stream)
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
