"""The backend "tiled": FlashAttention-2's loops over any layout, on any device that torch runs on.

A call is done in `cells`, a few sequences and heads at a time. `append` and `attend` are those of a key/value cache.

On a device other than the CPU the lengths are read back once a call.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..layout import empty
from ..problem import Aux, Grads, Layout, Problem, accumulator
from . import tiling
from .backward import flash_attention_2_backward, sink_gradient
from .cached import append, attend
from .cells import cells, slopes_of
from .forward import flash_attention_2
from .online_softmax import LOG2E
from .scores import Scores

__all__ = ["append", "attend", "backward", "forward", "why_not"]


def why_not(problem: Problem) -> str | None:
    """None: this backend takes every problem."""
    return None


def forward(problem: Problem, q: Tensor, k: Tensor, v: Tensor, aux: Aux) -> tuple[Tensor, Tensor]:
    """o (`problem.o_shape`, q's dtype) and lse (`problem.lse_shape`, fp32; fp64 for fp64)."""
    o = empty(problem.o_shape, q)
    lse = torch.empty(problem.lse_shape, dtype=problem.lse_dtype, device=q.device)
    if problem.q_lens or problem.q_layout is Layout.PACKED:  # rows that belong to no sequence
        o.zero_()
        lse.fill_(-torch.inf)
    sink = None if aux.sink is None else aux.sink.to(lse.dtype)[:, None, None] * LOG2E
    band_tiles: dict[tuple[int, int, int], Tensor] = {}
    for cell in cells(problem, aux):
        rules = cell.rules(problem, aux, band_tiles)
        Q, K, V = cell.queries(q), cell.keys(k), cell.keys(v)
        flash_attention_2(
            Q, K, V, rules, tiling.cpu_tile(problem), None if sink is None else sink[cell.heads],
            out=(cell.queries(o), cell.rows(lse)), bounded=rules.bounded(Q, K, V),
        )  # fmt: skip
    return o, lse


def backward(
    problem: Problem,
    do: Tensor,
    dlse: Tensor | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    o: Tensor,
    lse: Tensor,
    aux: Aux,
) -> Grads:
    """The gradients of everything that was given, by recomputation; bit-reproducible, since all sums run in order."""
    acc = accumulator(q.dtype)
    dq, dk, dv = (empty(x.shape, x, acc).zero_() for x in (q, k, v))
    dbias = None
    if aux.bias is not None and problem.bias is not None and problem.bias.grad:
        dbias = torch.zeros(aux.bias.shape, dtype=acc, device=q.device)
    slopes = None if aux.slopes is None else slopes_of(aux.slopes, acc)
    dslopes = None if slopes is None else torch.zeros_like(slopes)
    dsink = None if aux.sink is None else torch.zeros(aux.sink.shape, dtype=acc, device=q.device)
    band_tiles: dict[tuple[int, int, int], Tensor] = {}
    for cell in cells(problem, aux):
        rules = cell.rules(problem, aux, band_tiles)
        rules.dbias, rules.dslopes = cell.pairs(dbias), cell.per_head(dslopes)
        dk_cell, dv_cell = cell.keys(dk), cell.keys(dv)
        shared = problem.group > 1  # several query heads, in several cells perhaps, add to one dK and dV
        *_, dk_heads, dv_heads, delta = flash_attention_2_backward(
            cell.queries(q), cell.keys(k), cell.keys(v), cell.queries(o), cell.rows(lse), cell.queries(do), rules,
            tiling.cpu_tile(problem, backward=True), dlse=None if dlse is None else cell.rows(dlse),
            out=(
                cell.queries(dq),
                _per_query_head(dk_cell, rules) if shared else dk_cell,
                _per_query_head(dv_cell, rules) if shared else dv_cell,
            ),
        )  # fmt: skip
        if shared:
            for total, heads in ((dk_cell, dk_heads), (dv_cell, dv_heads)):
                total += heads.unflatten(1, (total.shape[1], -1)).sum(2)
        if dsink is not None:
            sink = aux.sink.to(acc)[cell.heads, None]  # type: ignore[union-attr]
            dsink[cell.heads] += sink_gradient(sink, cell.rows(lse), delta)
    return Grads(
        dq.to(q.dtype),
        dk.to(k.dtype),
        dv.to(v.dtype),
        dbias=None if dbias is None else dbias.to(aux.bias.dtype),  # type: ignore[union-attr]
        dslopes=None if dslopes is None else dslopes.reshape(aux.slopes.shape).to(aux.slopes.dtype),  # type: ignore[union-attr]
        dsink=None if dsink is None else dsink.to(aux.sink.dtype),  # type: ignore[union-attr]
    )


def _per_query_head(x: Tensor, rules: Scores) -> Tensor:
    return x.new_empty((x.shape[0], len(rules.head_index), *x.shape[2:]))
