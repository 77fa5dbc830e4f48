"""The host side of the Hopper backward without atomics: from a Problem and its tensors to two launches."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor
from triton.experimental.gluon import language as gl

from ...problem import Aux, Grads, Origin, Problem
from ..launch import Box, Ready
from ..triton.host import LOG2E, READY, Memory, Strides, _memory, _per_head, _per_head_sums, _zeros, empty_strided
from ..triton.options import PAD
from . import config, config_split
from .backward_split import dkdv_kernel, dq_kernel
from .config import PIECE
from .config_split import Config
from .host import _box, _together, loadable


@dataclass(frozen=True, slots=True)
class Options:
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
    def of(cls, problem: Problem, cfg: Config) -> Options:
        return cls(
            config.width(problem.qk_dim), config.width(problem.v_dim), cfg.rows, cfg.keys, cfg.stages, cfg.v_stages,
            problem.band.left is not None, not problem.band.is_full, problem.softcap > 0, *cfg.registers,
        )  # fmt: skip


class Backward(NamedTuple):
    """The launches of a backward, in their order."""

    memory: tuple[Memory, ...]  # dq, dk, dv and the statistics
    dq: Ready
    dkdv: Ready
    dsink: Ready | None


def backward(
    problem: Problem, do: Tensor, dlse: Tensor | None, q: Tensor, k: Tensor, v: Tensor, o: Tensor, lse: Tensor, aux: Aux
) -> Grads:
    if q.numel() == 0 or k.numel() == 0:  # TMA knows no empty tensors
        return Grads(*[torch.zeros(x.shape, dtype=x.dtype, device=x.device) for x in (q, k, v)], *_zeros(problem, aux))
    do, q, k, v = (loadable(x) for x in (do, q, k, v))
    of_rows = [x.stride() for x in (do, q, k, v)]
    start = launches_of(problem, aux.origin, None if dlse is None else dlse.stride(), *of_rows)
    empty = empty_strided(q)
    dq, dk, dv, statistics = [empty(*memory) for memory in start.memory]
    start.dq(dq, q, do, k, v, o, lse, dlse, statistics)
    start.dkdv(dk, dv, k, v, q, do, statistics)
    return Grads(dq, dk, dv, None, *_per_head_sums(problem, aux, start.dsink, None, statistics))


@lru_cache(maxsize=READY)
def launches_of(problem: Problem, origin: Origin, of_dlse: Strides | None, *of_rows: Strides) -> Backward:
    """of_rows: the strides of do, q, k and v."""
    of_do, of_q, of_k, of_v = of_rows
    q_shape, k_shape = (*problem.o_shape[:3], problem.qk_dim), problem.k_shape
    v_shape, do_shape = (*k_shape[:3], problem.v_dim), problem.o_shape
    rows = -(-problem.q_len // PAD) * PAD
    statistics = (2 * problem.batch * problem.heads * rows,)
    gradients = [_memory(shape, problem.dtype) for shape in (q_shape, k_shape, v_shape)]
    of_dq, of_dk, of_dv = (strides for _, strides, _ in gradients)
    of_queries, of_keys = config_split.choose(problem)

    side, options = of_queries.keys, Options.of(problem, of_queries)
    loads = (q_shape, of_q, PIECE), (do_shape, of_do, PIECE), (k_shape, of_k, side), (v_shape, of_v, side)
    numbers = _numbers(problem, origin, problem.q_len, of_queries.rows, problem.heads)
    dq = Ready(
        dq_kernel, (numbers[-1],), (*numbers, rows, problem.v_dim // 8, *(of_dlse or (0, 0, 0))), {"O": options}, 4, 1,
        _boxes(problem, (q_shape, of_dq, PIECE), *loads),
    )  # fmt: skip

    keys, side, options = of_keys.keys, of_keys.rows, Options.of(problem, of_keys)
    stores = (k_shape, of_dk, keys), (v_shape, of_dv, keys)
    loads = (k_shape, of_k, keys), (v_shape, of_v, keys), (q_shape, of_q, side), (do_shape, of_do, side)
    boxes = _boxes(problem, *stores, *loads)
    boxes[len(boxes)] = Box(statistics, (1,), (side,), gl.NVMMASharedLayout(0, 32, 1))
    numbers = _numbers(problem, origin, problem.k_len, keys, problem.kv_heads)
    dkdv = Ready(dkdv_kernel, (numbers[-1],), (*numbers, rows), {"O": options}, 4, 1, boxes)
    memory = *gradients, _memory(statistics, torch.float32)
    return Backward(memory, dq, dkdv, _per_head(problem, "tf32") if problem.sink else None)


def _numbers(problem: Problem, origin: Origin, length: int, side: int, heads: int) -> tuple[Any, ...]:
    """What `forward.Call` holds: for tiles of `side` along `length`, of so many heads."""
    tiles = -(-length // side)
    diagonal = origin[2] - origin[3] + problem.band.offset(problem.q_len, problem.k_len)
    together = max(1, _together(problem) * heads // problem.heads)
    return (
        problem.q_len, problem.k_len, diagonal, *problem.band.bounds, problem.scale * LOG2E, problem.softcap * LOG2E,
        problem.heads, problem.group, tiles, together, tiles * problem.batch * heads,
    )  # fmt: skip


def _boxes(problem: Problem, *tensors: tuple[Sequence[int], Sequence[int], int]) -> dict[int, Box]:
    """Descriptors of the kernel's first tensors, each of a shape, strides, and rows of a block."""
    return {
        place: Box(*_box(shape, strides, (side, config.width(shape[-1])), problem.dtype))
        for place, (shape, strides, side) in enumerate(tensors)
    }
