"""The online softmax: softmax(S) V over a row of keys that arrives tile by tile, in one pass.

Three numbers a row carry everything that the tiles seen so far have to say:

    m = max_j S_j                    the running maximum,
    l = sum_j 2^(S_j - m)            the running sum, relative to m,
    o = sum_j 2^(S_j - m) V_j        the running output, relative to m and not yet divided by l.

Scores come in bits: S = log2(e) s, so that e^s = 2^S. The factor costs nothing, since it joins the scale of Q, and exp2
is the cheaper function: on a CPU torch's takes half the time of its exp (measured: 2.4 against 1.3 G elements/s).

States form a monoid: `merge` is associative and its identity is the row that has seen no key, (-inf, 0, 0). That one
fact carries the tiles of this file, split keys, shared prefixes and rings of devices.

Source: Milakov and Gimelshein, "Online normalizer calculation for softmax", 2018; FlashAttention, section 3.1;
FlashAttention-2, section 3.1 (o stays unscaled until the end).
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from .chip import add_matmul_

LOG2E, LN2 = math.log2(math.e), math.log(2.0)


@dataclass(slots=True)
class State:
    """m (in bits), l: (b, h, rows, 1); o: (b, h, rows, d_v); fp32, or fp64 for fp64 inputs.

    >>> s, V = torch.tensor([[[[0.0, 1.0, 2.0]]]]), torch.tensor([[[[1.0], [2.0], [3.0]]]])
    >>> S = s * LOG2E
    >>> state = State.init(1, 1, 1, 1)
    >>> state.update(S[..., :2].clone(), V[..., :2, :])     # two keys,
    >>> state.update(S[..., 2:].clone(), V[..., 2:, :])     # then the third
    >>> o, lse = state.finalize()
    >>> torch.testing.assert_close(o, torch.softmax(s, -1) @ V)
    >>> torch.testing.assert_close(lse, torch.logsumexp(s, -1))
    """

    m: Tensor
    l: Tensor  # noqa: E741  the paper's name
    o: Tensor

    @classmethod
    def init(
        cls,
        batch: int,
        heads: int,
        rows: int,
        v_dim: int,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
    ) -> State:
        """The identity of `merge`: rows that have seen no key."""
        m = torch.full((batch, heads, rows, 1), -math.inf, dtype=dtype, device=device)
        return cls(m, torch.zeros_like(m), torch.zeros((batch, heads, rows, v_dim), dtype=dtype, device=device))

    def update(self, S: Tensor, V: Tensor, keep: Tensor | None = None) -> None:
        """Take in a tile: scores S (b, h, rows, keys) in bits, -inf where hidden, and values V (b, h, keys, d_v).

        keep: the tile's dropout mask; it thins what is summed into o, not into l. S's memory is reused for P.
        """
        m_new = torch.maximum(self.m, S.amax(-1, keepdim=True))
        pivot = _pivot(m_new)
        P = S.sub_(pivot).exp2_()
        alpha = self.m.sub_(pivot).exp2_()
        self.l.mul_(alpha).add_(P.sum(-1, keepdim=True))
        if keep is not None:
            P.mul_(keep)
        add_matmul_(self.o.mul_(alpha), P, V)
        self.m = m_new

    def merge(self, other: State) -> State:
        """The state of a row that has seen both states' keys."""
        m = torch.maximum(self.m, other.m)
        pivot = _pivot(m)
        a, b = torch.exp2(self.m - pivot), torch.exp2(other.m - pivot)
        return State(m, a * self.l + b * other.l, a * self.o + b * other.o)

    def finalize(self, sink: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """o (b, h, rows, d_v), divided by l once, and lse = log(2) (m + log2(l)) (b, h, rows), a natural logarithm.

        sink: a logit in bits (broadcastable to (b, h, rows, 1)) that joins the denominator without a value. A row
        without keys stays empty with a sink too: o = 0, lse = -inf.
        """
        m, l, o = self.m, self.l, self.o  # noqa: E741
        if sink is not None:
            sink = torch.where(m == -math.inf, m, sink)
            m_new = torch.maximum(m, sink)
            pivot = _pivot(m_new)
            alpha = torch.exp2(m - pivot)
            l = alpha * l + torch.exp2(sink - pivot)  # noqa: E741
            m, o = m_new, o * alpha
        return o / torch.where(l == 0, 1.0, l), (m + torch.log2(l)).mul_(LN2).squeeze(-1)


def _pivot(m: Tensor) -> Tensor:
    """What is subtracted before exp: m, made finite for a row that has seen no key yet (-inf - -inf would be NaN).

    Only the pivot is replaced, not m: a carried maximum that is finite would let what comes later underflow.
    """
    return m.clamp(min=torch.finfo(m.dtype).min)
