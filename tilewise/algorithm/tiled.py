"""The backend "tiled": FlashAttention-2's loops over any layout, on any device that torch runs on.

A GPU runs one block for each (batch, head). Here a `Cell` stands for the blocks of a few consecutive sequences and
heads, which torch works on together: as many as keep S in the cache. Sequences of one cell have equal lengths, so that
inside it everything is a plain (b, h, S, d) view and nothing past a sequence's length is ever touched.

On a device other than the CPU the lengths are read back once a call.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import groupby, pairwise

import torch
from torch import Tensor

from ..block_mask import BlockMask
from ..problem import Aux, Grads, Layout, Problem, accumulator
from . import tiling
from .backward import flash_attention_2_backward, sink_gradient
from .forward import flash_attention_2
from .online_softmax import LOG2E
from .scores import Scores


def why_not(problem: Problem) -> str | None:
    """None: this backend takes every problem."""
    return None


def forward(problem: Problem, q: Tensor, k: Tensor, v: Tensor, aux: Aux) -> tuple[Tensor, Tensor]:
    """o (`problem.o_shape`, q's dtype) and lse (`problem.lse_shape`, fp32; fp64 for fp64)."""
    o = torch.empty(problem.o_shape, dtype=q.dtype, device=q.device)
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
    dq, dk, dv = (torch.zeros(x.shape, dtype=acc, device=x.device) for x in (q, k, v))
    dbias = None
    if aux.bias is not None and problem.bias is not None and problem.bias.grad:
        dbias = torch.zeros(aux.bias.shape, dtype=acc, device=q.device)
    slopes = None if aux.slopes is None else _slopes(aux.slopes, acc)
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


@dataclass(frozen=True, slots=True)
class Cell:
    """Sequences [batch] of equal lengths and query heads [heads]: the blocks that are worked on together."""

    batch: slice
    heads: slice
    kv_heads: slice
    q_len: int
    k_len: int
    packed: bool
    q_start: int = 0  # packed: the first sequence's first token, and the tokens from one sequence to the next
    q_span: int = 0
    k_start: int = 0
    k_span: int = 0

    def queries(self, x: Tensor) -> Tensor:
        """The cell's part of q, o, do or dq: (b, h, q_len, d), a view."""
        return self._sequences(x, self.q_start, self.q_span)[:, self.heads, : self.q_len]

    def keys(self, x: Tensor) -> Tensor:
        """The cell's part of k, v, dk or dv: (b, h_kv, k_len, d), a view."""
        return self._sequences(x, self.k_start, self.k_span)[:, self.kv_heads, : self.k_len]

    def rows(self, x: Tensor) -> Tensor:
        """The cell's part of lse or dlse: (b, h, q_len), a view."""
        if self.packed:
            n = self.batch.stop - self.batch.start
            x = x.narrow(1, self.q_start, n * self.q_span).unflatten(1, (n, self.q_span)).transpose(0, 1)
        else:
            x = x[self.batch]
        return x[:, self.heads, : self.q_len]

    def pairs(self, x: Tensor | None) -> Tensor | None:
        """The cell's part of a bias or boolean mask (B|1, Hq|1, Sq|1, Sk|1), a view."""
        if x is None:
            return None
        x = self.per_head(x)
        assert x is not None
        x = x if x.shape[2] == 1 else x[:, :, : self.q_len]
        return x if x.shape[3] == 1 else x[..., : self.k_len]

    def per_head(self, x: Tensor | None) -> Tensor | None:
        """The cell's part of a tensor (B|1, Hq|1, ...), a view."""
        if x is None:
            return None
        x = x if x.shape[0] == 1 else x[self.batch]
        return x if x.shape[1] == 1 else x[:, self.heads]

    def rules(self, problem: Problem, aux: Aux, band_tiles: dict[tuple[int, int, int], Tensor]) -> Scores:
        """The rules of the call for this cell's scores."""
        b0, h0, i0, j0 = aux.origin
        blocks = aux.mask if isinstance(aux.mask, BlockMask) else None
        return Scores(
            scale=problem.scale,
            softcap=problem.softcap,
            band=problem.band,
            offset=problem.band.offset(self.q_len, self.k_len),
            bias=self.pairs(aux.bias),
            slopes=None if aux.slopes is None else self.per_head(_slopes(aux.slopes, accumulator(problem.dtype))),
            visible=self.pairs(aux.mask) if blocks is None else None,  # type: ignore[arg-type]
            blocks=blocks,
            dropout_p=problem.dropout_p,
            seed=0 if aux.seed is None else aux.seed,
            batch_index=range(b0 + self.batch.start, b0 + self.batch.stop),
            head_index=range(h0 + self.heads.start, h0 + self.heads.stop),
            i0=i0,
            j0=j0,
            band_tiles=band_tiles,
        )

    def _sequences(self, x: Tensor, start: int, span: int) -> Tensor:
        if not self.packed:
            return x[self.batch]
        n = self.batch.stop - self.batch.start
        return x.narrow(0, start, n * span).unflatten(0, (n, span)).transpose(1, 2)


def cells(problem: Problem, aux: Aux) -> Iterator[Cell]:
    """Cut a call into cells. How it is cut changes no bit of the result, only how much is worked on at a time."""
    packed = problem.q_layout is Layout.PACKED
    q_starts, q_spans, q_lens = _extent(problem.batch, problem.q_len, aux.cu_q, aux.q_lens)
    k_starts, k_spans, k_lens = _extent(problem.batch, problem.k_len, aux.cu_k, aux.k_lens)
    extents = list(zip(q_spans, k_spans, q_lens, k_lens, strict=True))
    for (q_span, k_span, q_len, k_len), same in groupby(range(problem.batch), key=extents.__getitem__):
        if q_len == 0 and k_len == 0:
            continue
        sequences = list(same)
        n, heads = tiling.cell(problem, q_len, k_len)
        for b in range(sequences[0], sequences[-1] + 1, n):
            batch = slice(b, min(b + n, sequences[-1] + 1))
            for h in range(0, problem.heads, heads):
                stop = min(h + heads, problem.heads)
                kv = slice(h // problem.group, -(-stop // problem.group))
                yield Cell(
                    batch, slice(h, stop), kv, q_len, k_len, packed,
                    q_starts[b] if packed else 0, q_span, k_starts[b] if packed else 0, k_span,
                )  # fmt: skip


def _extent(batch: int, total: int, cu: Tensor | None, lens: Tensor | None) -> tuple[list[int], list[int], list[int]]:
    """Of every sequence: first token, tokens of memory, tokens in use. Contents out of range are clamped."""
    if cu is None:
        starts, spans = [0] * batch, [total] * batch
    else:
        ends = [min(max(n, 0), total) for n in cu.tolist()]
        starts, spans = ends[:-1], [max(b - a, 0) for a, b in pairwise(ends)]
    used = spans if lens is None else [min(max(n, 0), s) for n, s in zip(lens.tolist(), spans, strict=True)]
    return starts, spans, used


def _slopes(slopes: Tensor, dtype: torch.dtype) -> Tensor:
    """(1|B, Hq, 1, 1) from (Hq,) or (B, Hq)."""
    return slopes.to(dtype)[(None,) * (2 - slopes.dim())][..., None, None]


def _per_query_head(x: Tensor, rules: Scores) -> Tensor:
    return x.new_empty((x.shape[0], len(rules.head_index), *x.shape[2:]))
