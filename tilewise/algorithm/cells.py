"""Cells: the parts of a call that torch works on together.

A GPU runs one block for each (batch, head). A `Cell` stands for the blocks of a few consecutive sequences and heads, as
many as keep S in the cache. Its sequences have equal lengths, so that inside it everything is a plain (b, h, S, d) view
and nothing past a sequence's length is ever touched. How a call is cut changes no bit of the result.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import groupby, pairwise

import torch
from torch import Tensor

from ..block_mask import BlockMask
from ..problem import Aux, Layout, Problem, accumulator
from . import tiling
from .scores import Scores


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
            slopes=None if aux.slopes is None else self.per_head(slopes_of(aux.slopes, accumulator(problem.dtype))),
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
    q_starts, q_spans, q_lens = extents(problem.batch, problem.q_len, aux.cu_q, aux.q_lens)
    k_starts, k_spans, k_lens = extents(problem.batch, problem.k_len, aux.cu_k, aux.k_lens)
    alike = list(zip(q_spans, k_spans, q_lens, k_lens, strict=True))
    for (q_span, k_span, q_len, k_len), same in groupby(range(problem.batch), key=alike.__getitem__):
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


def extents(batch: int, total: int, cu: Tensor | None, lens: Tensor | None) -> tuple[list[int], list[int], list[int]]:
    """Of every sequence: first token, tokens of memory, tokens in use. Contents out of range are clamped."""
    if cu is None:
        starts, spans = [0] * batch, [total] * batch
    else:
        ends = [min(max(n, 0), total) for n in cu.tolist()]
        starts, spans = ends[:-1], [max(b - a, 0) for a, b in pairwise(ends)]
    used = spans if lens is None else [min(max(n, 0), s) for n, s in zip(lens.tolist(), spans, strict=True)]
    return starts, spans, used


def slopes_of(slopes: Tensor, dtype: torch.dtype) -> Tensor:
    """(1|B, Hq, 1, 1) from (Hq,) or (B, Hq)."""
    return slopes.to(dtype)[(None,) * (2 - slopes.dim())][..., None, None]
