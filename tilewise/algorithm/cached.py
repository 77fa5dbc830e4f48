"""The backend "tiled" over a key/value cache: new keys are stored where they belong, stored ones gathered and attended.

The oracle of what kernels do with a cache. Where keys lie (one tensor a sequence, or pages anywhere) is undone by a
gather, a few sequences at a time; after that a call is FlashAttention-2's loop as any other. Key j of a sequence is at
position j, whatever its page; keys are cut into tiles at fixed positions, so that a sequence's bits are its own.

On a device other than the CPU the lengths are read back.

Source: pages are those of Kwon et al., "Efficient Memory Management for LLM Serving with PagedAttention", 2023.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import groupby

import torch
from torch import Tensor

from ..layout import empty
from ..problem import Aux, Layout, Problem, accumulator
from ..problem_cached import BAD_PAGE, FP8, FP8_MAX, PAST_END
from . import tiling
from .cells import Cell, extents
from .forward import flash_attention_2
from .online_softmax import LOG2E
from .tiles import ALIGN


def append(problem: Problem, k_new: Tensor, v_new: Tensor | None, k: Tensor, v: Tensor, aux: Aux) -> None:
    """Store new keys and values behind the aux.k_lens that each sequence has; the lengths stay as they are.

    k_new, v_new: (B, Hkv, n, D) or packed (T, Hkv, D); v_new None where V lies in K. k, v: the storage. A token past
    the end of its sequence's room, or on a page that is not there, is not written but noted in aux.status.
    """
    cache = problem.cache
    assert cache is not None
    assert aux.k_lens is not None
    if problem.batch == 0 or k_new.numel() == 0:
        return
    b, t, used = _tokens(problem, aux)
    k_new, v_new = _flat(problem, k_new), None if v_new is None else _flat(problem, v_new)
    positions = aux.k_lens.long()[b] + t
    if cache.rotary is not None:
        starts = 0 if aux.starts is None else aux.starts.long()[b]
        k_new = rotate(k_new, positions - starts, aux, cache.rotary)
    row = _rows(problem, aux, k.device)[b]
    used = used & (row >= 0)
    inside = (positions >= 0) & (positions < cache.capacity)
    there = row < cache.slots
    _flag(aux, PAST_END, used & there & ~inside)
    used, row = used & inside & there, row.clamp(0, max(cache.slots - 1, 0))
    if cache.page_size:
        assert aux.pages is not None
        page = positions.clamp(0, max(cache.capacity - 1, 0)) // cache.page_size
        row = aux.pages.long()[row, page] if aux.pages.numel() else torch.full_like(row, -1)
        there = there & (row >= 0) & (row < cache.pages)
        positions = positions % cache.page_size
    _flag(aux, BAD_PAGE, used & ~there)
    used = used & there
    for stored, new, scale in ((k, k_new, aux.k_scale), (v, v_new, aux.v_scale)):
        if new is not None:
            _bits(stored)[row[used], :, positions[used]] = _bits(_quantised(new[used], stored.dtype, scale))


def attend(problem: Problem, q: Tensor, k: Tensor, v: Tensor, aux: Aux) -> tuple[Tensor, Tensor]:
    """o (`problem.o_shape`) and lse of queries that are the last tokens of aux.k_lens keys in the storage k, v."""
    cache = problem.cache
    assert cache is not None
    o = empty(problem.o_shape, q, problem.lse_dtype if cache.partial else q.dtype).zero_()
    lse = torch.full(problem.lse_shape, -torch.inf, dtype=problem.lse_dtype, device=q.device)
    if cache.rotary is not None:
        q = _rotated_queries(problem, q, aux)
    sink = None if aux.sink is None else aux.sink.to(lse.dtype)[:, None, None] * LOG2E
    band_tiles: dict[tuple[int, int, int], Tensor] = {}
    for cell, stored in _cells(problem, aux):
        K, there = stored.gather(k, cell, problem, aux.k_scale)
        V, _ = stored.gather(v, cell, problem, aux.v_scale)
        rules = cell.rules(problem, aux, band_tiles)
        rules.offset = stored.offset
        if there is not None:
            _flag(aux, BAD_PAGE, ~there)
            rules.visible = there[:, None, None, :]
        Q = cell.queries(q)
        flash_attention_2(
            Q, K, V, rules, tiling.cpu_tile(problem), None if sink is None else sink[cell.heads],
            out=(cell.queries(o), cell.rows(lse)), bounded=rules.bounded(Q, K, V),
        )  # fmt: skip
    return o, lse


def rotate(x: Tensor, positions: Tensor, aux: Aux, style: str) -> Tensor:
    """x (N, H, D) with its first R columns turned by the angles of its positions (N,), which the table clamps.

    >>> x, angle = torch.tensor([[[1.0, 0.0]]]), torch.tensor([[0.0], [torch.pi / 2]])
    >>> aux = Aux(rotary_cos=angle.cos(), rotary_sin=angle.sin())
    >>> rotate(x, torch.tensor([1]), aux, "half").round().abs()
    tensor([[[0., 1.]]])
    """
    assert aux.rotary_cos is not None
    assert aux.rotary_sin is not None
    acc = accumulator(x.dtype)
    at = positions.clamp(0, len(aux.rotary_cos) - 1)
    cos, sin = (table[at].to(acc)[:, None] for table in (aux.rotary_cos, aux.rotary_sin))
    R = 2 * cos.shape[-1]
    turned, rest = x[..., :R].to(acc), x[..., R:]
    a, b = (turned[..., 0::2], turned[..., 1::2]) if style == "interleaved" else turned.chunk(2, -1)
    pair = a * cos - b * sin, b * cos + a * sin
    turned = torch.stack(pair, -1).flatten(-2) if style == "interleaved" else torch.cat(pair, -1)
    return torch.cat([turned.to(x.dtype), rest], -1)


@dataclass(frozen=True, slots=True)
class _Stored:
    """Keys [first, stop) of the cell's sequences, which lie in `rows` of the storage or of the page table."""

    rows: list[int]
    first: int
    stop: int
    offset: int  # of the gathered keys, which begin at `first`
    pages: Tensor | None

    def gather(self, x: Tensor, cell: Cell, problem: Problem, scale: Tensor | None) -> tuple[Tensor, Tensor | None]:
        """(b, h_kv, keys, d) of the storage x, and which keys (b, keys) are there; None: all of them."""
        x, there, n = x[:, cell.kv_heads], None, len(self.rows)
        rows = self.rows[:1] if len(set(self.rows)) == 1 else self.rows  # a prefix that all share is gathered once
        if self.pages is None:
            x = x[:, :, self.first : self.stop]
            in_order = rows == list(range(rows[0], rows[0] + len(rows)))
            x = x[rows[0] : rows[0] + len(rows)] if in_order else _taken(x, torch.tensor(rows, device=x.device))
        else:
            size = x.shape[2]
            lo, hi = self.first // size, -(-self.stop // size)
            table = self.pages[rows, lo:hi].long()
            valid = (table >= 0) & (table < len(x))
            keys = slice(self.first - lo * size, self.stop - lo * size)
            if not valid.all():
                there = valid.repeat_interleave(size, 1)[:, keys]
            table = table.clamp(0, max(len(x) - 1, 0))
            x = _taken(x, table) if len(x) else x.new_zeros((*table.shape, *x.shape[1:]))
            x = x.transpose(1, 2).flatten(2, 3)[:, :, keys]
        if x.dtype is FP8:
            x = x.to(accumulator(problem.dtype))
            x = x if scale is None else x * scale[cell.kv_heads, None, None]
        if there is not None:
            x = x.masked_fill(~there[:, None, :, None], 0)
        return x.expand(n, -1, -1, -1), there


def _cells(problem: Problem, aux: Aux) -> Iterator[tuple[Cell, _Stored]]:
    """Cut a call into cells of sequences that are alike: in queries, keys, padding and what follows."""
    cache = problem.cache
    assert cache is not None
    assert aux.k_lens is not None
    packed = problem.q_layout is Layout.PACKED
    q_starts, q_spans, q_lens = extents(problem.batch, problem.q_len, aux.cu_q, aux.q_lens)
    rows = _rows(problem, aux, torch.device("cpu")).tolist()
    k_lens = [min(max(n, 0), cache.capacity) for n in aux.k_lens.tolist()]
    k_lens = [n if 0 <= row < cache.slots else 0 for n, row in zip(k_lens, rows, strict=True)]
    if aux.rows is not None:
        _flag(aux, BAD_PAGE, aux.rows >= cache.slots)
    none = [0] * problem.batch
    firsts = none if aux.starts is None else [max(n, 0) for n in aux.starts.tolist()]
    after = none if aux.after is None else aux.after.tolist()
    # Of a window no more is gathered than what some row sees, from a multiple of the tiles' alignment on.
    left, _ = problem.band.bounds
    unseen = [n + a - q - left - f for n, a, q, f in zip(k_lens, after, q_lens, firsts, strict=True)]
    firsts = [f + max(n, 0) // ALIGN * ALIGN for n, f in zip(unseen, firsts, strict=True)]
    alike = list(zip(q_spans, q_lens, k_lens, firsts, after, strict=True))
    for (q_span, q_len, k_len, first, follow), same in groupby(range(problem.batch), key=alike.__getitem__):
        if q_len == 0 or k_len <= first:
            continue
        sequences = list(same)
        n, heads = tiling.cell(problem, q_len, k_len - first)
        for b in range(sequences[0], sequences[-1] + 1, n):
            stop = min(b + n, sequences[-1] + 1)
            stored = _Stored(rows[b:stop], first, k_len, k_len + follow - q_len - first, aux.pages)
            for h in range(0, problem.heads, heads):
                h_stop = min(h + heads, problem.heads)
                kv = slice(h // problem.group, -(-h_stop // problem.group))
                yield (
                    Cell(
                        slice(b, stop), slice(h, h_stop), kv, q_len, k_len - first, packed,
                        q_starts[b] if packed else 0, q_span,
                    ),
                    stored,
                )  # fmt: skip


def _tokens(problem: Problem, aux: Aux) -> tuple[Tensor, Tensor, Tensor]:
    """Of all tokens (N,) of q or of new keys: sequence, number in it, and whether it is in use."""
    device = aux.k_lens.device if aux.k_lens is not None else None
    if problem.q_layout is Layout.PACKED:
        assert aux.cu_q is not None
        token, ends = torch.arange(problem.q_len, device=device), aux.cu_q[1:].long()
        b = torch.searchsorted(ends, token, right=True)
        used = b < problem.batch
        b = b.clamp(max=max(problem.batch - 1, 0))
        t = token - aux.cu_q.long()[b]
    else:
        b = torch.arange(problem.batch, device=device).repeat_interleave(problem.q_len)
        t = torch.arange(problem.q_len, device=device).repeat(problem.batch)
        used = torch.ones_like(b, dtype=torch.bool)
    return b, t, used if aux.q_lens is None else used & (t < aux.q_lens[b])


def _rotated_queries(problem: Problem, q: Tensor, aux: Aux) -> Tensor:
    cache = problem.cache
    assert cache is not None
    assert aux.k_lens is not None
    assert cache.rotary is not None
    if problem.batch == 0 or q.numel() == 0:
        return q
    b, t, _ = _tokens(problem, aux)
    _, _, q_lens = extents(problem.batch, problem.q_len, aux.cu_q, aux.q_lens)
    offset = aux.k_lens.clamp(0, cache.capacity).long() - torch.tensor(q_lens, device=q.device)
    for shift, sign in ((aux.after, 1), (aux.starts, -1)):
        offset = offset if shift is None else offset + sign * shift
    turned = rotate(_flat(problem, q), offset[b] + t, aux, cache.rotary)
    if problem.q_layout is Layout.PACKED:
        return turned
    return turned.unflatten(0, (problem.batch, problem.q_len)).transpose(1, 2)


def _flat(problem: Problem, x: Tensor) -> Tensor:
    """(N, H, D) of dense or packed tokens, in the order of `_tokens`."""
    return x if problem.q_layout is Layout.PACKED else x.transpose(1, 2).flatten(0, 1)


def _rows(problem: Problem, aux: Aux, device: torch.device) -> Tensor:
    """Where each sequence lies (B,)."""
    assert problem.cache is not None
    if problem.cache.shared:
        return torch.zeros(problem.batch, dtype=torch.int64, device=device)
    return torch.arange(problem.batch, device=device) if aux.rows is None else aux.rows.long().to(device)


def _quantised(x: Tensor, dtype: torch.dtype, scale: Tensor | None) -> Tensor:
    """x (N, Hkv, d) as it is stored; fp8 is x / scale within its range."""
    if dtype is not FP8:
        return x
    x = x.to(accumulator(x.dtype))
    return (x if scale is None else x / scale[:, None]).clamp(-FP8_MAX, FP8_MAX).to(FP8)


def _bits(x: Tensor) -> Tensor:
    """fp8 as bytes: not every torch indexes it."""
    return x.view(torch.uint8) if x.dtype is FP8 else x


def _taken(x: Tensor, index: Tensor) -> Tensor:
    return _bits(x)[index].view(x.dtype)


def _flag(aux: Aux, bit: int, where: Tensor) -> None:
    if aux.status is not None:
        aux.status.bitwise_or_(where.any().to(torch.int32) * bit)
