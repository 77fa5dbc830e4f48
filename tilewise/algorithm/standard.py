"""Standard attention as memory sees it: S and P, N x N each, are written to HBM and read back by every step.

Each function below is one kernel, as a framework without fusion would launch it:

    unfused:  S = Q K^T | S = scale S | S = mask(S) | P = softmax(S) | P_dropped = dropout(P) | O = P_dropped V
    fused:    S = Q K^T |           P = dropout(softmax(mask(scale S)))                       | O = P V

The fused form is the best that standard attention can do: the steps between the products in one pass over S. It has one
array P; a dropped pair is marked there by its sign, so that the backward still has its probability.

This is what FlashAttention is compared with, not an oracle (`reference` is) and not a backend.

Source: FlashAttention (Dao et al., 2022), Algorithm 0 (forward) and Algorithm 3 (backward).
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from ..mask import Band
from . import hbm
from .dropout import keep


@dataclass(frozen=True, slots=True)
class Standard:
    """Standard attention for heads of their own (no GQA), with its options and the tile sizes that its kernels use.

    scale, band, dropout_p, seed: as in `tilewise.attention`. blocks: (B_r, B_c), rows of Q and of K in a tile of S.
    fused: one pass between the products instead of up to four. A step whose option is off is not run.

    >>> q, k, v, do = torch.randn(4, 1, 2, 50, 16).double()
    >>> attention = Standard(scale=0.25, blocks=(16, 32))
    >>> with hbm.counting() as traffic:
    ...     o, P, _ = attention.forward(q, k, v)
    >>> torch.testing.assert_close(o, torch.softmax(q @ k.mT / 4, -1) @ v)
    >>> list(traffic.kernels)
    ['scores', 'scale', 'softmax', 'output']
    >>> traffic.stored["S"] == 2 * 2 * 50 * 50 * 8            # two heads; S was written twice, scaled and not
    True
    """

    scale: float
    blocks: tuple[int, int]
    band: Band = Band()
    dropout_p: float = 0.0
    seed: int = 0
    fused: bool = False

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """o (b, h, N, d_v), and what the backward needs: P and P_dropped (b, h, N, k_len), in q's dtype.

        q: (b, h, N, d), k: (b, h, k_len, d), v: (b, h, k_len, d_v), N and k_len at least 1. P_dropped is P itself
        if there is no dropout, and when fused (a dropped pair's P is negative).
        """
        S = self._scores(q, k)
        if self.fused:
            P = self._fused_softmax(S)
            return self._output(P, v, "P"), P, P
        self._scale(S, "S")
        if not self.band.is_full:
            self._mask(S)
        P = self._softmax(S)
        if self.dropout_p == 0.0:
            return self._output(P, v, "P"), P, P
        P_dropped = self._dropout(P)
        return self._output(P_dropped, v, "P_dropped"), P, P_dropped

    def backward(
        self, do: Tensor, q: Tensor, k: Tensor, v: Tensor, P: Tensor, P_dropped: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """dq, dk, dv in the dtypes of q, k, v. do: (b, h, N, d_v); P, P_dropped: from the forward."""
        dv = self._dV(P_dropped, do, "P" if P_dropped is P else "P_dropped")
        dP = self._dP(do, v)
        if self.fused:
            dS = self._softmax_backward(P, dP)
        else:
            if self.dropout_p > 0.0:
                self._dropout_backward(dP)
            dS = self._softmax_backward(P, dP)
            if not self.band.is_full:
                self._mask_backward(dS)
            self._scale(dS, "dS")
        return self._dQ(dS, k), self._dK(dS, q), dv

    # The products, forward: S = Q K^T and O = P V

    @hbm.kernel("scores")
    def _scores(self, q: Tensor, k: Tensor) -> Tensor:
        S = _matrix("S", q, k)
        for i in self._rows(q):
            Q_i = hbm.load(q, "Q", i)
            for j in self._keys(k):
                K_j = hbm.load(k, "K", j)
                S_ij = hbm.keep("S", Q_i @ K_j.mT)
                hbm.store(S[..., j], "S", i, S_ij)
        return S

    @hbm.kernel("output")
    def _output(self, P: Tensor, v: Tensor, name: str) -> Tensor:
        o = hbm.empty((*P.shape[:3], v.shape[3]), "O", dtype=v.dtype, device=v.device)
        for i in self._rows(P):
            O_i = torch.zeros(())
            for j in self._keys(v):
                P_ij = self._kept(hbm.load(P[..., j], name, i))
                V_j = hbm.load(v, "V", j)
                O_i = hbm.keep("O", O_i + P_ij @ V_j)
            hbm.store(o, "O", i, O_i)
        return o

    # The steps between them, one pass over N x N each

    def _scale(self, S: Tensor, name: str) -> None:
        with hbm.kernel("scale" if name == "S" else "scale_backward"):
            for i, j in self._tiles(S):
                S_ij = hbm.load(S[..., j], name, i)
                hbm.store(S[..., j], name, i, S_ij * self.scale)

    @hbm.kernel("mask")
    def _mask(self, S: Tensor) -> None:
        for i, j in self._tiles(S):
            S_ij = hbm.load(S[..., j], "S", i)
            hbm.store(S[..., j], "S", i, S_ij.masked_fill(~self._visible(S, i, j), -math.inf))

    @hbm.kernel("softmax")
    def _softmax(self, S: Tensor) -> Tensor:
        P = _matrix("P", S)
        for i in self._rows(S):
            S_i = hbm.load(S, "S", i)  # a whole row of keys: the softmax cannot begin before its maximum is known
            hbm.store(P, "P", i, _softmax(S_i))
        return P

    @hbm.kernel("dropout")
    def _dropout(self, P: Tensor) -> Tensor:
        P_dropped = _matrix("P_dropped", P)
        for i, j in self._tiles(P):
            P_ij = hbm.load(P[..., j], "P", i)
            hbm.store(P_dropped[..., j], "P_dropped", i, P_ij * self._keep(P, i, j) * self._inverse_keep)
        return P_dropped

    @hbm.kernel("softmax")
    def _fused_softmax(self, S: Tensor) -> Tensor:
        P, j = _matrix("P", S), slice(0, S.shape[3])
        for i in self._rows(S):
            S_i = hbm.load(S, "S", i) * self.scale
            P_i = _softmax(S_i.masked_fill(~self._visible(S, i, j), -math.inf))
            if self.dropout_p > 0.0:
                P_i = torch.where(self._keep(S, i, j), P_i, -P_i)
            hbm.store(P, "P", i, P_i)
        return P

    # Backward: dV = P_dropped^T dO, dP = dO V^T; dS = P * (dP - rowsum(P * dP)); dQ = dS K, dK = dS^T Q

    @hbm.kernel("dV")
    def _dV(self, P: Tensor, do: Tensor, name: str) -> Tensor:
        return self._transposed(P, name, do, "dO", "dV")

    @hbm.kernel("dP")
    def _dP(self, do: Tensor, v: Tensor) -> Tensor:
        dP = _matrix("dP", do, v)
        for i in self._rows(do):
            dO_i = hbm.load(do, "dO", i)
            for j in self._keys(v):
                V_j = hbm.load(v, "V", j)
                hbm.store(dP[..., j], "dP", i, hbm.keep("dP", dO_i @ V_j.mT))
        return dP

    @hbm.kernel("dropout_backward")
    def _dropout_backward(self, dP: Tensor) -> None:
        for i, j in self._tiles(dP):
            dP_ij = hbm.load(dP[..., j], "dP", i)
            hbm.store(dP[..., j], "dP", i, dP_ij * self._keep(dP, i, j) * self._inverse_keep)

    @hbm.kernel("softmax_backward")
    def _softmax_backward(self, P: Tensor, dP: Tensor) -> Tensor:
        dS = _matrix("dS", P)
        for i in self._rows(P):
            P_i, dP_i = hbm.load(P, "P", i), hbm.load(dP, "dP", i)
            if self.fused and self.dropout_p > 0.0:
                dP_i = dP_i * (P_i > 0) * self._inverse_keep
                P_i = P_i.abs()
            dS_i = P_i * (dP_i - (P_i * dP_i).sum(-1, keepdim=True))
            hbm.store(dS, "dS", i, dS_i * self.scale if self.fused else dS_i)
        return dS

    @hbm.kernel("mask_backward")
    def _mask_backward(self, dS: Tensor) -> None:
        for i, j in self._tiles(dS):
            dS_ij = hbm.load(dS[..., j], "dS", i)
            hbm.store(dS[..., j], "dS", i, dS_ij.masked_fill(~self._visible(dS, i, j), 0.0))

    @hbm.kernel("dQ")
    def _dQ(self, dS: Tensor, k: Tensor) -> Tensor:
        dq = hbm.empty((*dS.shape[:3], k.shape[3]), "dQ", dtype=k.dtype, device=k.device)
        for i in self._rows(dS):
            dQ_i = torch.zeros(())
            for j in self._keys(k):
                dS_ij, K_j = hbm.load(dS[..., j], "dS", i), hbm.load(k, "K", j)
                dQ_i = hbm.keep("dQ", dQ_i + dS_ij @ K_j)
            hbm.store(dq, "dQ", i, dQ_i)
        return dq

    @hbm.kernel("dK")
    def _dK(self, dS: Tensor, q: Tensor) -> Tensor:
        return self._transposed(dS, "dS", q, "Q", "dK")

    def _transposed(self, A: Tensor, A_name: str, x: Tensor, x_name: str, name: str) -> Tensor:
        """A^T x for A (b, h, N, k_len) and x (b, h, N, d): the sum over rows that makes dV and dK."""
        y = hbm.empty((*A.shape[:2], A.shape[3], x.shape[3]), name, dtype=x.dtype, device=x.device)
        for j in self._keys(y):
            y_j = torch.zeros(())
            for i in self._rows(x):
                A_ij, x_i = hbm.load(A[..., j], A_name, i), hbm.load(x, x_name, i)
                y_j = hbm.keep(name, y_j + (self._kept(A_ij) if name == "dV" else A_ij).mT @ x_i)
            hbm.store(y, name, j, y_j)
        return y

    # What the tiles are, and what is said about them

    def _rows(self, x: Tensor) -> list[slice]:
        return _runs(x.shape[2], self.blocks[0])

    def _keys(self, x: Tensor) -> list[slice]:
        return _runs(x.shape[2], self.blocks[1])

    def _tiles(self, S: Tensor) -> list[tuple[slice, slice]]:
        return [(i, j) for i in self._rows(S) for j in _runs(S.shape[3], self.blocks[1])]

    def _visible(self, S: Tensor, i: slice, j: slice) -> Tensor:
        rows, keys = torch.arange(i.start, i.stop, device=S.device), torch.arange(j.start, j.stop, device=S.device)
        return self.band.visible(rows[:, None], keys, self.band.offset(*S.shape[2:]))

    def _keep(self, S: Tensor, i: slice, j: slice) -> Tensor:
        at = [torch.arange(n, device=S.device) for n in S.shape]
        b, h = at[0][:, None, None, None], at[1][:, None, None]
        return keep(self.seed, self.dropout_p, b, h, at[2][i, None], at[3][None, j])

    @property
    def _inverse_keep(self) -> float:
        """1 / (1 - p), by which the kept pairs are multiplied; at p = 1 there are none."""
        return 1 / (1 - self.dropout_p) if self.dropout_p < 1.0 else 0.0

    def _kept(self, P_ij: Tensor) -> Tensor:
        """P with dropout from the fused form's P, where dropped pairs are negative; the unfused form's as it is."""
        return P_ij.clamp(min=0) * self._inverse_keep if self.fused and self.dropout_p > 0.0 else P_ij


def _softmax(S_i: Tensor) -> Tensor:
    """Over whole rows (b, h, rows, k_len); 0 for a row that sees no key."""
    m_i = S_i.amax(-1, keepdim=True)
    P_i = torch.exp(S_i - torch.where(m_i == -math.inf, 0.0, m_i))
    l_i = P_i.sum(-1, keepdim=True)
    return P_i / torch.where(l_i == 0, 1.0, l_i)


def _matrix(name: str, x: Tensor, y: Tensor | None = None) -> Tensor:
    """An N x N array in HBM: of x's shape, or rows of x by rows of y."""
    shape = x.shape if y is None else (*x.shape[:3], y.shape[2])
    return hbm.empty(tuple(shape), name, dtype=x.dtype, device=x.device)


def _runs(length: int, side: int) -> list[slice]:
    return [slice(start, min(start + side, length)) for start in range(0, length, side)]
