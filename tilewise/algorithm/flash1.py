"""FlashAttention to the letter: the outer loop walks K and V, the inner loop Q; O, l, m go through memory each time.

    forward     Algorithm 1; Algorithm 2 with mask and dropout; Algorithm 5 with a BlockMask: EMPTY tiles are skipped
    backward    Algorithm 4: P is recomputed from Q, K, l, m; dQ goes through memory each time

Not a backend: FlashAttention-2's order (`forward`, `backward`) gives the same numbers and moves fewer bytes, because
a row's O, l and m never leave the chip before they are done. Here O is divided by l, and rounded in half types, in
every step. This order takes a Band, a BlockMask and dropout, and no more.

Source: FlashAttention (Dao, Fu, Ermon, Rudra and Re, 2022); the numbers in the comments are those of its lines.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from ..block_mask import EMPTY, FULL, TILE, BlockMask
from ..mask import Band, query_range
from . import hbm
from .dropout import keep


@dataclass(frozen=True, slots=True)
class FlashAttention1:
    """The paper's attention for heads of their own (no GQA), with its options and its tile sizes.

    scale, band, dropout_p, seed: as in `tilewise.attention`; mask: a BlockMask, on q's device.
    blocks: (B_r, B_c), rows of Q and of K, V in a tile; the paper's are `tiling.paper_blocks(M, d)`.

    >>> q, k, v, do = torch.randn(4, 1, 2, 50, 16).double()
    >>> attention = FlashAttention1(scale=0.25, blocks=(16, 32))
    >>> o, l, m = attention.forward(q, k, v)
    >>> torch.testing.assert_close(o, torch.softmax(q @ k.mT / 4, -1) @ v)
    >>> torch.testing.assert_close(m + l.log(), torch.logsumexp(q @ k.mT / 4, -1))
    >>> dq, dk, dv = attention.backward(do, q, k, v, o, l, m)
    >>> torch.testing.assert_close(dv, torch.softmax(q @ k.mT / 4, -1).mT @ do)
    """

    scale: float
    blocks: tuple[int, int]
    band: Band = Band()
    mask: BlockMask | None = None
    dropout_p: float = 0.0
    seed: int = 0

    @hbm.kernel("forward")
    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """o (b, h, N, d_v) in q's dtype, and l, m (b, h, N) in fp32 (fp64 for fp64 inputs): lse = m + log(l).

        q: (b, h, N, d), k: (b, h, k_len, d), v: (b, h, k_len, d_v). A row without keys has o = 0, l = 0, m = -inf.
        """
        acc = torch.float64 if q.dtype == torch.float64 else torch.float32
        o = hbm.zeros((*q.shape[:3], v.shape[3]), "O", dtype=q.dtype, device=q.device)  # 2
        l = hbm.zeros(tuple(q.shape[:3]), "l", dtype=acc, device=q.device)  # noqa: E741
        m = hbm.full(tuple(q.shape[:3]), "m", -math.inf, dtype=acc, device=q.device)
        for at, tiles in _Tiles.of(self, q, k):
            self._forward(q[at], k[at], v[at], o[at], l[at], m[at], tiles)
        return o, l, m

    def _forward(self, q: Tensor, k: Tensor, v: Tensor, o: Tensor, l: Tensor, m: Tensor, tiles: _Tiles) -> None:  # noqa: E741
        for j in tiles.keys():  # 5
            K_j, V_j = hbm.load(k, "K", j), hbm.load(v, "V", j)  # 6
            for i in tiles.queries(j):  # 7
                Q_i, O_i = hbm.load(q, "Q", i), hbm.load(o, "O", i)  # 8
                l_i, m_i = hbm.load(l, "l", i), hbm.load(m, "m", i)
                S_ij = hbm.keep("S", self.scale * (Q_i @ K_j.mT))  # 9
                S_ij = tiles.mask(S_ij, i, j)  # Algorithm 2, line 11
                m_ij = S_ij.amax(-1)  # 10
                P_ij = torch.exp(S_ij - _pivot(m_ij)[..., None])  # where S was
                l_ij = P_ij.sum(-1)
                m_new = torch.maximum(m_i, m_ij)  # 11
                alpha, beta = torch.exp(m_i - _pivot(m_new)), torch.exp(m_ij - _pivot(m_new))
                l_new = alpha * l_i + beta * l_ij
                P_ij = tiles.dropout(P_ij, i, j)  # Algorithm 2, line 14
                O_i = (l_i * alpha)[..., None] * O_i + beta[..., None] * (P_ij @ V_j)  # 12
                hbm.store(o, "O", i, O_i / _divisor(l_new)[..., None])
                hbm.store(l, "l", i, l_new)  # 13
                hbm.store(m, "m", i, m_new)

    @hbm.kernel("backward")
    def backward(
        self,
        do: Tensor,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        o: Tensor,
        l: Tensor,  # noqa: E741
        m: Tensor,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """dq, dk, dv in the dtypes of q, k, v. do: (b, h, N, d_v), the gradient of o; o, l, m: from the forward."""
        dq = hbm.zeros(tuple(q.shape), "dQ", dtype=q.dtype, device=q.device)  # 5
        dk = hbm.empty(tuple(k.shape), "dK", dtype=k.dtype, device=k.device)  # no zeros: each tile is written once
        dv = hbm.empty(tuple(v.shape), "dV", dtype=v.dtype, device=v.device)
        for at, tiles in _Tiles.of(self, q, k):
            self._backward(
                do[at], q[at], k[at], v[at], o[at], l[at], m[at], dq[at], dk[at], dv[at], tiles,
            )  # fmt: skip
        return dq, dk, dv

    def _backward(
        self,
        do: Tensor,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        o: Tensor,
        l: Tensor,  # noqa: E741
        m: Tensor,
        dq: Tensor,
        dk: Tensor,
        dv: Tensor,
        tiles: _Tiles,
    ) -> None:
        for j in tiles.keys():  # 6
            K_j, V_j = hbm.load(k, "K", j), hbm.load(v, "V", j)  # 7
            dK_j, dV_j = hbm.keep("dK", torch.zeros_like(K_j)), hbm.keep("dV", torch.zeros_like(V_j))  # 8
            for i in tiles.queries(j):  # 9
                Q_i, O_i, dO_i = hbm.load(q, "Q", i), hbm.load(o, "O", i), hbm.load(do, "dO", i)  # 10
                dQ_i, l_i, m_i = hbm.load(dq, "dQ", i), hbm.load(l, "l", i), hbm.load(m, "m", i)
                S_ij = hbm.keep("S", self.scale * (Q_i @ K_j.mT))  # 11
                S_ij = tiles.mask(S_ij, i, j)  # 12
                P_ij = torch.exp(S_ij - _pivot(m_i)[..., None]) / _divisor(l_i)[..., None]  # 13, where S was
                dV_j += tiles.dropout(P_ij, i, j).mT @ dO_i  # 14 to 16
                dP_ij = hbm.keep("dP", dO_i @ V_j.mT)  # 17
                dP_ij = tiles.dropout(dP_ij, i, j)  # 18
                D_i = (dO_i * O_i).sum(-1)  # 19
                dS_ij = P_ij * (dP_ij - D_i[..., None])  # 20, where dP was
                hbm.store(dq, "dQ", i, dQ_i + self.scale * (dS_ij @ K_j))  # 21
                dK_j += self.scale * (dS_ij.mT @ Q_i)  # 22
            hbm.store(dk, "dK", j, dK_j)  # 24
            hbm.store(dv, "dV", j, dV_j)


def _pivot(m: Tensor) -> Tensor:
    """What is subtracted before exp: the maximum, or 0 where no key was seen (-inf - -inf is NaN)."""
    return torch.where(m == -math.inf, 0.0, m)


def _divisor(l: Tensor) -> Tensor:  # noqa: E741
    return torch.where(l == 0, 1.0, l)


@dataclass(frozen=True, slots=True)
class _Tiles:
    """The tiles that a run of the loops visits, for batches `b` and heads `h`, and what hides and drops their pairs."""

    options: FlashAttention1
    q_len: int
    k_len: int
    b: Tensor  # numbers of the batches, (b, 1, 1, 1)
    h: Tensor  # and of the heads, (h, 1, 1)
    tile_map: Tensor | None = None  # (n, m): EMPTY, FULL or a row of the BlockMask's bits for each 128 x 128 tile

    @staticmethod
    def of(options: FlashAttention1, q: Tensor, k: Tensor) -> Iterator[tuple[tuple[slice, slice], _Tiles]]:
        """(which batches and heads, their tiles): all at once, or one by one where a BlockMask tells them apart."""
        b = torch.arange(q.shape[0], device=q.device)[:, None, None, None]
        h = torch.arange(q.shape[1], device=q.device)[:, None, None]
        if options.mask is None:
            yield (slice(None), slice(None)), _Tiles(options, q.shape[2], k.shape[2], b, h)
            return
        tile_maps = options.mask.tile_map()
        for n, maps_of_heads in enumerate(tile_maps):
            for g, tile_map in enumerate(maps_of_heads):
                at_b = slice(n, n + 1) if len(tile_maps) > 1 else slice(None)
                at_h = slice(g, g + 1) if len(maps_of_heads) > 1 else slice(None)
                yield (at_b, at_h), _Tiles(options, q.shape[2], k.shape[2], b[at_b], h[at_h], tile_map)

    def keys(self) -> list[slice]:
        return _runs(self.k_len, self.options.blocks[1])

    def queries(self, j: slice) -> list[slice]:
        """The tiles of queries that have a pair with key tile j: all of them, but for a Band and EMPTY blocks."""
        lo, hi = query_range(j.start, j.stop, *self.options.band.bounds, self._offset, self.q_len)
        tiles = [i for i in _runs(self.q_len, self.options.blocks[0]) if max(i.start, lo) < min(i.stop, hi)]
        if self.tile_map is None:
            return tiles
        live = (self.tile_map[:, _covering(j)] != EMPTY).any(1).tolist()
        return [i for i in tiles if any(live[_covering(i)])]

    def mask(self, S_ij: Tensor, i: slice, j: slice) -> Tensor:
        """-inf where the Band or the BlockMask hides a pair."""
        rows, keys = _positions(S_ij, i, j)
        if not self.options.band.is_full:
            S_ij = S_ij.masked_fill(~self.options.band.visible(rows, keys, self._offset), -math.inf)
        if self.options.mask is not None and self.tile_map is not None:
            state = self.tile_map[rows // TILE, keys // TILE]
            visible = state == FULL
            if (state >= 0).any():
                byte = self.options.mask.bits[state.clamp(min=0), rows % TILE, keys % TILE // 8]
                visible |= (state >= 0) & (byte.long() >> keys % 8 & 1).bool()
            S_ij = S_ij.masked_fill(~visible, -math.inf)
        return S_ij

    def dropout(self, P_ij: Tensor, i: slice, j: slice) -> Tensor:
        """P * Z / (1 - p), Z being the pairs that are kept: drawn from their positions, so never stored."""
        p = self.options.dropout_p
        if p == 0.0:
            return P_ij
        Z_ij = keep(self.options.seed, p, self.b, self.h, *_positions(P_ij, i, j))
        return P_ij * Z_ij / (1 - p) if p < 1.0 else torch.zeros_like(P_ij)

    @property
    def _offset(self) -> int:
        return self.options.band.offset(self.q_len, self.k_len)


def _positions(S_ij: Tensor, i: slice, j: slice) -> tuple[Tensor, Tensor]:
    """The tile's rows (B_r, 1) and keys (1, B_c)."""
    rows, keys = (torch.arange(t.start, t.stop, device=S_ij.device) for t in (i, j))
    return rows[:, None], keys[None, :]


def _runs(length: int, side: int) -> list[slice]:
    return [slice(start, min(start + side, length)) for start in range(0, length, side)]


def _covering(t: slice) -> slice:
    """The BlockMask's tiles in which the positions of t lie."""
    return slice(t.start // TILE, (t.stop - 1) // TILE + 1)
