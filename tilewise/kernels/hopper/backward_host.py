"""The host side of the backward: from a Problem and its tensors to three launches."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from ...problem import Aux, Grads, Origin, Problem
from ..triton.host import LOG2E, READY, TOGETHER_BYTES, Memory, Strides, empty_strided
from . import config
from .backward import backward_kernel, convert_kernel, prepare_kernel
from .config import BACKWARD_KEYS, PIECE, Backward
from .host import Box, box_of, loadable

PREPARED = 64  # queries that a program of prepare_kernel takes
SHARE = (PIECE * PIECE // 256, 256)  # the shape of a consumer's part of a block's dQ in the accumulator


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
    """The three launches without their tensors, and the tensors that they fill."""

    gradients: tuple[Memory, ...]  # dq, dk, dv
    between: tuple[Memory, ...]  # the statistics and dQ's accumulator
    padded: int  # queries of a head in them
    boxes: tuple[Box, ...]  # of dk, dv, the accumulator, q, k, v, do and the statistics
    numbers: tuple[int | float, ...]  # of the main kernel
    options: Options
    of_dlse: Strides

    def prepare(self, problem: Problem, o: Tensor, do: Tensor, lse: Tensor, dlse: Tensor | None, *between: Tensor) -> None:
        heads = problem.batch * problem.heads
        # What the main kernel adds to its scores before it scales them; under a softcap it scales them first.
        scale = LOG2E if self.options.SOFTCAP else 1 / problem.scale
        prepare_kernel[heads * self.padded // PREPARED,](
            o, do, lse, dlse, *between, problem.heads, problem.q_len, self.padded, heads, scale, *do.stride()[:3], *self.of_dlse,
            DV=problem.v_dim, WIDTH=self.options.WIDTH, ROWS=PREPARED, num_warps=4,
        )  # fmt: skip

    def arguments(self, *tensors: Tensor) -> tuple[Any, ...]:
        """What the main kernel takes before its options."""
        boxed = [
            TensorDescriptor(x, list(box.shape), list(box.strides), list(box.block), box.layout)
            for x, box in zip(tensors, self.boxes, strict=True)
        ]
        return (*boxed, *self.numbers)

    def main(self, *tensors: Tensor) -> None:
        # Newer Tritons fuse a product with a sum only where they are asked to.
        backward_kernel[self.numbers[-1],](
            *self.arguments(*tensors), O=self.options, num_warps=4, enable_fp_fusion=True  # type: ignore[arg-type]
        )  # fmt: skip

    def convert(self, problem: Problem, dq: Tensor, accumulator: Tensor) -> None:
        convert_kernel[accumulator.numel() // PIECE**2,](
            dq, accumulator, problem.q_len, self.padded, problem.scale, D=problem.qk_dim, WIDTH=self.options.WIDTH, num_warps=4
        )  # fmt: skip


def backward(
    problem: Problem, do: Tensor, dlse: Tensor | None, q: Tensor, k: Tensor, v: Tensor, o: Tensor, lse: Tensor, aux: Aux
) -> Grads:
    if q.is_cuda and q.get_device() != torch.cuda.current_device():
        with torch.cuda.device(q.device):
            return backward(problem, do, dlse, q, k, v, o, lse, aux)
    do, q, k, v = (loadable(x) for x in (do, q, k, v))
    of_dlse = (0, 0, 0) if dlse is None else dlse.stride()
    start = launches_of(problem, aux.origin, of_dlse, do.stride(), q.stride(), k.stride(), v.stride())
    empty = empty_strided(q)
    dq, dk, dv = (empty(*memory) for memory in start.gradients)
    statistics, accumulator = (empty(*memory) for memory in start.between)
    start.prepare(problem, o, do, lse, dlse, statistics, accumulator)
    start.main(dk, dv, accumulator, q, k, v, do, statistics)
    start.convert(problem, dq, accumulator)
    dsink = None if aux.sink is None else sink_gradient(aux.sink, lse, statistics)
    return Grads(dq, dk, dv, dsink=dsink)


def sink_gradient(sink: Tensor, lse: Tensor, statistics: Tensor) -> Tensor:
    """Of P_sink (0 - delta), summed over all rows: a sink is a key without a value. An empty row's is 0."""
    P = torch.exp(sink.float()[:, None] - lse).masked_fill_(lse == -torch.inf, 0.0)
    minus_delta = statistics[1].view(*lse.shape[:2], -1)[..., : lse.shape[2]]
    return (P * minus_delta).sum((0, 2)).to(sink.dtype)


@lru_cache(maxsize=READY)
def launches_of(
    problem: Problem, origin: Origin, of_dlse: Strides, of_do: Strides, of_q: Strides, of_k: Strides, of_v: Strides
) -> Launches:
    wide = config.width(max(problem.qk_dim, problem.v_dim))
    cfg = config.BACKWARD[wide]
    options = Options.of(problem, cfg, wide)
    heads, kv_heads = problem.batch * problem.heads, problem.batch * problem.kv_heads
    padded = -(-problem.q_len // BACKWARD_KEYS) * BACKWARD_KEYS
    q_shape = (*problem.o_shape[:3], problem.qk_dim)
    v_shape = (*problem.k_shape[:3], problem.v_dim)
    gradients = tuple(_memory(shape, problem.dtype) for shape in (q_shape, problem.k_shape, v_shape))
    of_statistics = _memory((2, heads, padded), torch.float32)
    accumulator = _memory((heads * padded * wide // SHARE[1], SHARE[1]), torch.float32)
    by_key, by_query = (PIECE, wide), (cfg.rows, wide)
    boxes = (
        box_of(problem.k_shape, gradients[1][1], by_key, problem.dtype),
        box_of(v_shape, gradients[2][1], by_key, problem.dtype),
        _plain(accumulator, SHARE),
        box_of(q_shape, of_q, by_query, problem.dtype),
        box_of(problem.k_shape, of_k, by_key, problem.dtype),
        box_of(v_shape, of_v, by_key, problem.dtype),
        box_of(problem.o_shape, of_do, by_query, problem.dtype),
        _plain(of_statistics, (2, 1, cfg.rows)),
    )
    left, right = problem.band.bounds
    diagonal = origin[2] - origin[3] + problem.band.offset(problem.q_len, problem.k_len)
    tiles = -(-problem.k_len // BACKWARD_KEYS)
    numbers = (
        problem.q_len, problem.k_len, diagonal, left, right, problem.scale * LOG2E, problem.softcap * LOG2E,
        problem.heads, problem.group, tiles, _together(problem, wide), tiles * kv_heads,
    )  # fmt: skip
    return Launches(gradients, (of_statistics, accumulator), padded, boxes, numbers, options, of_dlse)


def _plain(memory: Memory, block: tuple[int, ...]) -> Box:
    """Of contiguous fp32, not swizzled: so that it is read and written in rows, without conflicts."""
    shape, strides, _ = memory
    layout = gl.NVMMASharedLayout(swizzle_byte_width=0, element_bitwidth=32, rank=len(block))
    return Box(shape, strides, block, layout)


def _memory(shape: tuple[int, ...], dtype: torch.dtype) -> Memory:
    """Contiguous."""
    return shape, torch.empty(shape, device="meta").stride(), dtype


def _together(problem: Problem, wide: int) -> int:
    """How many key/value heads walk their tiles side by side, so that Q, dO and dQ of their groups are in the L2 at once."""
    if problem.band.is_full:
        return 1
    size = problem.q_len * problem.group * wide * (2 * problem.dtype.itemsize + 4)
    return max(1, min(TOGETHER_BYTES // size, 32))
