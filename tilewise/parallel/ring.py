"""Ring attention: each rank keeps its queries, and the keys and values of the others pass by.

In step t rank r attends to the keys of rank r - t (modulo n), while those of the next step are on their way; what it
has of a row is a `State` of the online softmax, and a step is a `merge`. The backward goes round once more. With the
final o and lse each step's P is what it is in the whole, so that a backend's own backward gives the step's part of dQ,
which stays, and of dK and dV, which go home to their owner, who adds them up.

Two things are not in the paper. Keys come straight from their owner, and gradients go straight to it, not from
neighbour to neighbour: a pair of ranks with nothing to see costs no message, and gradients travel once, in the input's
dtype, where sums that travel would go in fp32 and be one message behind the last step. And heads are done a few at a
time, as one queue of (heads, step): what is on its way is a fraction of the keys, the next heads' keys come while these
are worked on, and in the backward the last thing to be done is a rank's own keys, while the last gradients travel.

Source: Liu, Zaharia and Abbeel, "Ring Attention with Blockwise Transformers", 2023 (arXiv 2310.01889).
"""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass, replace
from types import ModuleType
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ..algorithm.online_softmax import LN2, LOG2E, State
from ..autograd import FORWARD_MODE, TWICE, VMAP, transformed
from ..block_mask import BlockMask
from ..dispatch import choose
from ..problem import Aux, Grads, Problem, accumulator
from .agree import agreement
from .exchange import Exchange, Pair
from .plan import Piece, Whole, depth, pieces, span

AHEAD = 2  # exchanges begin so many steps before their keys are read: a kernel that fills the device may hold one up
MOST_GROUPS = 8  # of heads
ENOUGH = 2**17  # rows of keys, all heads and sequences together, that fill a device well for one step
AT_ONCE = 2**23  # elements that are merged at a time, in fp32

Heads = tuple[slice, slice]  # of queries, of keys


@dataclass(frozen=True, slots=True)
class Call:
    """A call on all ranks of `group`, but for its tensors; q, k and v of packed ones are (1, H, T, D)."""

    group: dist.ProcessGroup
    whole: Whole
    packed: bool
    first_head: int  # of all query heads, where q's begin
    blocks: BlockMask | None
    lens: Tensor | None
    scale: float
    softcap: float
    dropout_p: float
    seed: Tensor | None
    deterministic: bool
    backend: str | None
    needs_grad: bool
    head_groups: int | None

    @property
    def rank(self) -> int:
        return dist.get_rank(self.group)

    def plan(self, rank: int, owner: int) -> tuple[Piece, ...]:
        return pieces(self.whole, rank % self.whole.ranks, owner % self.whole.ranks)

    def heads(self, q: Tensor, k: Tensor) -> list[Heads]:
        """The heads that are worked on together."""
        kv_heads, together = k.shape[1], max(q.shape[1] // max(k.shape[1], 1), 1)
        if self.head_groups is not None:
            n = self.head_groups
        else:
            most = min(MOST_GROUPS, k.shape[0] * kv_heads * k.shape[2] // ENOUGH)
            n = max((n for n in range(1, most + 1) if kv_heads % n == 0), default=1)
        size = max(-(-kv_heads // n), 1)
        return [
            (slice(a * together, min(a + size, kv_heads) * together), slice(a, min(a + size, kv_heads)))
            for a in range(0, kv_heads, size)
        ]

    def steps(self, heads: list[Heads], own_last: bool) -> list[tuple[int, int]]:
        """(which heads, which step), in order. own_last: own keys are the last heads' last, unless these are all."""
        found = []
        for g in range(len(heads)):
            steps = list(range(self.whole.ranks))
            if own_last and 0 < g == len(heads) - 1:
                steps = [*steps[1:], 0]
            found += [(g, t) for t in steps]
        return found

    def part(self, piece: Piece, of: Heads, q: Tensor, k: Tensor, v: Tensor, slopes: Tensor | None) -> Part:
        """The piece as a call of a backend. q, k, v: its rows and keys."""
        b0, i0, j0 = piece.origin
        cu = lens_q = lens_k = None
        if piece.cu is not None:
            cu = _ends(piece.cu, q.device)
            q, k, v = (packed(x) for x in (q, k, v))
        if self.lens is not None:
            lens_q = (self.lens - i0).clamp(0, piece.rows[1] - piece.rows[0])
            lens_k = (self.lens - j0).clamp(0, piece.keys[1] - piece.keys[0])
        if slopes is not None:
            slopes = slopes[sequences(piece, slopes, self.packed)][..., of[0]]
        origin = (b0, self.first_head + of[0].start, i0, j0)
        if self.dropout_p == 0 and self.blocks is None:  # nobody looks b0 and h0 up: without them it is validated once
            origin = (0, 0, i0, j0)
        problem, aux = Problem.of(
            q, k, v, mask=piece.band if self.blocks is None else piece.band & self.blocks, alibi_slopes=slopes,
            scale=self.scale, softcap=self.softcap, dropout_p=self.dropout_p, seed=self.seed, q_lens=lens_q,
            k_lens=lens_k, cu_seqlens_q=cu, cu_seqlens_k=cu, deterministic=self.deterministic,
            origin=origin if any(origin) or self.blocks is not None else None,
        )  # fmt: skip
        if self.needs_grad:
            problem = replace(problem, needs_grad=True)
        return Part(problem, aux, choose(problem, self.backend), q, k, v)


@dataclass(frozen=True, slots=True)
class Part:
    """One call of a backend."""

    problem: Problem
    aux: Aux
    module: ModuleType
    q: Tensor
    k: Tensor
    v: Tensor

    def forward(self) -> tuple[Tensor, Tensor]:
        o, lse = self.module.forward(self.problem, self.q, self.k, self.v, self.aux)
        return (dense(o), lse[None]) if o.dim() == 3 else (o, lse)

    def backward(self, do: Tensor, dlse: Tensor | None, o: Tensor, lse: Tensor) -> Grads:
        if self.q.dim() == 3:
            do, o, lse = packed(do), packed(o), lse[0]
            dlse = None if dlse is None else dlse[0]
        lse, o = lse.contiguous(), o.contiguous()  # as a forward makes them
        grads = self.module.backward(self.problem, do, dlse, self.q, self.k, self.v, o, lse, self.aux)
        if self.q.dim() == 3:
            grads = grads._replace(dq=dense(grads.dq), dk=dense(grads.dk), dv=dense(grads.dv))
        return grads


def dense(x: Tensor) -> Tensor:
    """(1, H, T, D) of packed (T, H, D), a view."""
    return x.transpose(0, 1)[None]


def packed(x: Tensor) -> Tensor:
    """(T, H, D) of (1, H, T, D), a view."""
    return x[0].transpose(0, 1)


def sequences(piece: Piece, slopes: Tensor, of_packed: bool) -> slice:
    """Whose slopes (N, Hq) the piece has; (Hq,) are everybody's."""
    if slopes.dim() == 1 or not of_packed:
        return slice(None)
    b0 = piece.origin[0]
    return slice(b0, b0 + (1 if piece.cu is None else len(piece.cu) - 1))


_kept: dict[tuple[tuple[int, ...], torch.device], Tensor] = {}


def _ends(cu: tuple[int, ...], device: torch.device) -> Tensor:
    """cu_seqlens on the device, once for all layers and steps of a batch."""
    key = cu, device
    if key not in _kept:
        if len(_kept) >= 64:
            _kept.clear()
        _kept[key] = torch.tensor(cu, dtype=torch.int32).to(device)
    return _kept[key]


# ---- sums ------------------------------------------------------------------------------------------------------------


class Merged:
    """Rows' o and lse over the keys of the pieces so far.

    o: (B, h, S, Dv), where the result goes. sink: (h,). pieces: how many of them a row is in at most. Of up to two
    pieces the first one's o waits in its own dtype, and their merge is rounded once; of more there is a State in fp32.
    """

    def __init__(self, o: Tensor, lse: Tensor, sink: Tensor | None, pieces: int):
        self.o, self.lse, self.sink, self.few = o, lse, sink, pieces <= 2 and sink is None
        m = lse.new_full((*o.shape[:3], 1), -math.inf)
        kept = o if self.few else torch.empty(o.shape, dtype=lse.dtype, device=o.device)
        self.state, self.empty = State(m, torch.zeros_like(m), kept), True

    def take(self, rows: tuple[int, int], o: Tensor, lse: Tensor) -> None:
        m = (lse * LOG2E)[..., None]
        new = State(m, (m > -math.inf).to(m.dtype), o)
        here = _part(self.state, slice(*rows))
        if self.empty and here.o.shape == self.o.shape:
            here.m, here.l = self.state.m, self.state.l = new.m, new.l
            here.o.copy_(o)
            self.empty = False
            return
        if self.empty:
            self.state.o.zero_()
            self.empty = False
        for heads in _slices(o):
            self._merge(_part(here, slice(None), heads), _part(new, slice(None), heads))

    def _merge(self, state: State, new: State) -> None:
        """`State.merge` in the memory of `state`, in two passes over o: first of what is small. That it makes (a, b) of
        (1, 0) and (0, 1) says what it multiplies the two by."""
        one, zero = torch.ones_like(state.m), torch.zeros_like(state.m)
        left = State(state.m, state.l, torch.cat((one, zero), -1))
        both = left.merge(State(new.m, new.l, torch.cat((zero, one), -1)))
        m, l, (a, b) = both.m, both.l, both.o.split(1, -1)  # noqa: E741
        if self.few:  # o is divided already, so that to be rounded is the last thing that happens to it
            a, b = (x / l.clamp(min=torch.finfo(l.dtype).tiny) for x in (a, b))
            state.o.copy_((a * state.o).addcmul_(b, new.o))
            m, l = m + torch.log2(l), (l > 0).to(l.dtype)  # noqa: E741
        else:
            state.o.mul_(a).addcmul_(b, new.o)
        state.m.copy_(m)
        state.l.copy_(l)

    def finish(self) -> None:
        if self.empty:
            self.state.o.zero_()
        if self.few:
            self.lse.copy_(self.state.m.squeeze(-1) * LN2)
            return
        for heads in _slices(self.o):
            bits = None if self.sink is None else self.sink[heads].to(self.lse.dtype)[:, None, None] * LOG2E
            o, lse = _part(self.state, slice(None), heads).finalize(bits)
            self.o[:, heads].copy_(o)
            self.lse[:, heads].copy_(lse)


def _part(state: State, rows: slice, heads: slice = slice(None)) -> State:
    return State(state.m[:, heads, rows], state.l[:, heads, rows], state.o[:, heads, rows])


def _slices(x: Tensor) -> list[slice]:
    """Heads, as many as make AT_ONCE elements."""
    each = max(AT_ONCE // max(x[:, :1].numel(), 1), 1)
    return [slice(a, min(a + each, x.shape[1])) for a in range(0, x.shape[1], each)]


class Sum:
    """A gradient, of which each piece adds to some rows. Of up to two pieces the sum is made where the result goes, and
    rounded as a sum in fp32 would be; of more it is in fp32 until `finish`."""

    def __init__(self, out: Tensor, pieces: int):
        self.out, self.empty = out, True
        acc = out.dtype if pieces <= 2 else accumulator(out.dtype)
        self.total = out if acc == out.dtype else torch.empty(out.shape, dtype=acc, device=out.device)

    def add(self, rows: tuple[int, int], x: Tensor) -> None:
        here = self.total[:, :, rows[0] : rows[1]]
        if self.empty and here.shape == self.total.shape:
            here.copy_(x)
        else:
            if self.empty:
                self.total.zero_()
            here.add_(x)
        self.empty = False

    def finish(self) -> None:
        if self.empty:
            self.total.zero_()
        if self.total is not self.out:
            self.out.copy_(self.total)


# ---- keys that pass by -----------------------------------------------------------------------------------------------


class Passing:
    """The keys and values of each step: views of one's own, or what an exchange brings, begun AHEAD steps before."""

    def __init__(self, call: Call, k: Tensor, v: Tensor, heads: list[Heads], steps: list[tuple[int, int]]):
        self.call, self.k, self.v, self.heads, self.steps = call, k, v, heads, steps
        self.begun: dict[int, tuple[Exchange, Pair]] = {}
        self.asked = 0
        self.copy: tuple[Any, Pair] | None = None  # what was sent last, for it is often sent again

    def of(self, n: int) -> tuple[Tensor, Tensor]:
        """k and v of the n-th step: those keys that its pieces need."""
        while self.asked < min(n + AHEAD + 1, len(self.steps)):
            self._begin(self.asked)
            self.asked += 1
        g, t = self.steps[n]
        if t == 0:
            lo, hi = span(self.call.plan(self.call.rank, self.call.rank))
            return self._own(g, lo, hi)
        exchange, pair = self.begun.pop(n)
        exchange.wait()
        return pair.first, pair.second

    def _own(self, g: int, lo: int, hi: int) -> tuple[Tensor, Tensor]:
        return self.k[:, self.heads[g][1], lo:hi], self.v[:, self.heads[g][1], lo:hi]

    def _begin(self, n: int) -> None:
        g, t = self.steps[n]
        if t == 0:
            return
        call, rank, ranks = self.call, self.call.rank, self.call.whole.ranks
        to, source = (rank + t) % ranks, (rank - t) % ranks
        lo, hi = span(call.plan(to, rank))
        what = (g, lo, hi)
        if self.copy is None or self.copy[0] != what:
            self.copy = what, Pair.of(*self._own(g, lo, hi))
        first, last = span(call.plan(rank, source))
        pair = Pair.empty(self._own(g, 0, 0), last - first)
        self.begun[n] = Exchange(call.group, [(self.copy[1].flat, to)], [(pair.flat, source)]), pair


# ---- the two directions ----------------------------------------------------------------------------------------------


def forward(
    call: Call, q: Tensor, k: Tensor, v: Tensor, slopes: Tensor | None, sink: Tensor | None
) -> tuple[Tensor, Tensor]:
    """o (B, Hq, S, Dv) and lse (B, Hq, S) of this rank's queries and all ranks' keys."""
    heads, rank = call.heads(q, k), call.rank
    steps = call.steps(heads, own_last=False)
    shape = (*q.shape[:3], v.shape[3])
    o = dense(q.new_empty((shape[2], shape[1], shape[3]))) if call.packed else q.new_empty(shape)
    lse = torch.empty(shape[:3], dtype=accumulator(q.dtype), device=q.device)
    most = depth(piece.rows for owner in range(call.whole.ranks) for piece in call.plan(rank, owner))
    passing = Passing(call, k, v, heads, steps)
    for n, (g, t) in enumerate(steps):
        K, V = passing.of(n)
        if n % call.whole.ranks == 0:
            of = heads[g]
            merged = Merged(o[:, of[0]], lse[:, of[0]], None if sink is None else sink[of[0]], most)
        found = call.plan(rank, rank - t)
        first, _ = span(found)
        for piece in found:
            keys = slice(piece.keys[0] - first, piece.keys[1] - first)
            part = call.part(piece, of, q[:, of[0], slice(*piece.rows)], K[:, :, keys], V[:, :, keys], slopes)
            merged.take(piece.rows, *part.forward())
        if n % call.whole.ranks == call.whole.ranks - 1:
            merged.finish()
    return o, lse


class Backward:
    """dq, dk, dv, dslopes and dsink, from this rank's do and dlse."""

    def __init__(
        self, call: Call, do: Tensor, dlse: Tensor | None, q: Tensor, k: Tensor, v: Tensor, slopes: Tensor | None,
        sink: Tensor | None, o: Tensor, lse: Tensor,
    ):  # fmt: skip
        self.call, self.do, self.dlse, self.q, self.o, self.lse, self.slopes = call, do, dlse, q, o, lse, slopes
        self.rank, self.ranks = call.rank, call.whole.ranks
        self.heads = call.heads(q, k)
        self.dq, self.dk, self.dv = (_like(x, call.packed) for x in (q, k, v))
        self.dslopes = None if slopes is None else torch.zeros_like(slopes, dtype=lse.dtype)
        self.dsink = None if sink is None else sink_gradient(sink, do, dlse, o, lse)
        self.returning: deque[tuple[int, int, Exchange, Pair, tuple[int, int]]] = deque()
        ours = [call.plan(self.rank, owner) for owner in range(self.ranks)]
        self.most_rows = depth(piece.rows for found in ours for piece in found)
        home = [span(call.plan(other, self.rank)) for other in range(self.ranks) if other != self.rank]
        self.most_keys = depth([*(piece.keys for piece in ours[self.rank]), *(x for x in home if x[0] < x[1])])
        self.run(k, v)

    def run(self, k: Tensor, v: Tensor) -> None:
        steps = self.call.steps(self.heads, own_last=True)
        passing = Passing(self.call, k, v, self.heads, steps)
        dkv: dict[int, tuple[Sum, Sum]] = {}
        for n, (g, t) in enumerate(steps):
            K, V = passing.of(n)
            of = self.heads[g]
            if n % self.ranks == 0:
                dq = Sum(self.dq[:, of[0]], self.most_rows)
                dkv[g] = Sum(self.dk[:, of[1]], self.most_keys), Sum(self.dv[:, of[1]], self.most_keys)
            self.settle(dkv, n - AHEAD)
            found = self.call.plan(self.rank, self.rank - t)
            first, last = span(found)
            if t == 0:
                self.step(found, of, K, V, first, dq, dkv[g], 0)
            else:
                self.send_home(n, g, t, self.contribution(found, of, K, V, first, last, dq))
            if n % self.ranks == self.ranks - 1:
                dq.finish()
        self.settle(dkv, len(steps))
        for sums in dkv.values():
            for total in sums:
                total.finish()

    def contribution(
        self, found: tuple[Piece, ...], of: Heads, K: Tensor, V: Tensor, first: int, last: int, dq: Sum
    ) -> Pair:
        """dk and dv of another rank's keys [first, last)."""
        if len(found) == 1:  # its gradients are all that there is
            ((dk, dv),) = [self.gradients(piece, of, K, V, first, dq) for piece in found]
            return Pair.of(dk, dv)
        pair = Pair.empty((K, V), last - first)
        most = depth(piece.keys for piece in found)
        sums = Sum(pair.first, most), Sum(pair.second, most)
        self.step(found, of, K, V, first, dq, sums, first)
        for total in sums:
            total.finish()
        return pair

    def step(
        self, found: tuple[Piece, ...], of: Heads, K: Tensor, V: Tensor, first: int, dq: Sum, dkv: tuple[Sum, Sum],
        zero: int,
    ) -> None:  # fmt: skip
        """The pieces' gradients added up; dk and dv begin at key `zero`."""
        for piece in found:
            keys = piece.keys[0] - zero, piece.keys[1] - zero
            for total, x in zip(dkv, self.gradients(piece, of, K, V, first, dq), strict=True):
                total.add(keys, x)

    def gradients(self, piece: Piece, of: Heads, K: Tensor, V: Tensor, first: int, dq: Sum) -> tuple[Tensor, Tensor]:
        """dk and dv of a piece. K and V begin at key `first`."""
        rows, keys = slice(*piece.rows), slice(piece.keys[0] - first, piece.keys[1] - first)
        part = self.call.part(piece, of, self.q[:, of[0], rows], K[:, :, keys], V[:, :, keys], self.slopes)
        dlse = None if self.dlse is None else self.dlse[:, of[0], rows]
        grads = part.backward(self.do[:, of[0], rows], dlse, self.o[:, of[0], rows], self.lse[:, of[0], rows])
        dq.add(piece.rows, grads.dq)
        if self.dslopes is not None and grads.dslopes is not None:
            self.dslopes[sequences(piece, self.dslopes, self.call.packed)][..., of[0]] += grads.dslopes
        return grads.dk, grads.dv

    def send_home(self, n: int, g: int, t: int, pair: Pair) -> None:
        """The gradients go to their owner, those of one's own keys come from whom they went to."""
        owner, other = (self.rank - t) % self.ranks, (self.rank + t) % self.ranks
        lo, hi = span(self.call.plan(other, self.rank))
        back = Pair.empty((pair.first, pair.second), hi - lo)
        exchange = Exchange(self.call.group, [(pair.flat, owner)], [(back.flat, other)])
        self.returning.append((n, g, exchange, back, (lo, hi)))

    def settle(self, dkv: dict[int, tuple[Sum, Sum]], n: int) -> None:
        """Add what has come back from steps up to the n-th."""
        while self.returning and self.returning[0][0] <= n:
            _, g, exchange, pair, keys = self.returning.popleft()
            exchange.wait()
            if keys[0] < keys[1]:
                for total, x in zip(dkv[g], (pair.first, pair.second), strict=True):
                    total.add(keys, x)


def _like(x: Tensor, of_packed: bool) -> Tensor:
    b, h, s, d = x.shape
    return dense(x.new_empty((s, h, d))) if of_packed else x.new_empty((b, h, s, d))


def sink_gradient(sink: Tensor, do: Tensor, dlse: Tensor | None, o: Tensor, lse: Tensor) -> Tensor:
    """dsink (Hq,) of this rank's rows: a sink is a key without a value, so its dS is P_sink (0 - delta)."""
    total = torch.empty(sink.shape, dtype=lse.dtype, device=lse.device)
    for heads in _slices(o):
        delta = (do[:, heads].to(lse.dtype) * o[:, heads]).sum(-1)
        if dlse is not None:
            delta -= dlse[:, heads]
        L = lse[:, heads].masked_fill(lse[:, heads] == -math.inf, math.inf)
        total[heads] = -(torch.exp(sink[heads].to(L.dtype)[:, None] - L) * delta).sum((0, 2))
    return total


class RingAttention(torch.autograd.Function):
    """(call, q, k, v, slopes, sink) -> o, lse."""

    @staticmethod
    def forward(ctx: Any, call: Call, q: Tensor, k: Tensor, v: Tensor, slopes: Any, sink: Any) -> tuple[Tensor, Tensor]:
        o, lse = forward(call, q, k, v, slopes, sink)
        ctx.call = call
        ctx.save_for_backward(q, k, v, slopes, sink, o, lse)
        ctx.set_materialize_grads(False)
        return o, lse

    @staticmethod
    def backward(ctx: Any, do: Tensor | None, dlse: Tensor | None) -> tuple[Any, ...]:
        if torch.is_grad_enabled():
            raise NotImplementedError(TWICE)
        q, k, v, slopes, sink, o, lse = ctx.saved_tensors
        call = ctx.call
        agreement(call.group, q.device).reach({"the pass": "backward", "q": f"{tuple(q.shape)}"})
        do = torch.zeros_like(o) if do is None else do
        grads = Backward(call, do, dlse, q, k, v, slopes, sink, o, lse)
        dslopes = None if slopes is None else grads.dslopes.to(slopes.dtype)  # type: ignore[union-attr]
        dsink = None if sink is None else grads.dsink.to(sink.dtype)  # type: ignore[union-attr]
        return None, grads.dq, grads.dk, grads.dv, dslopes, dsink


def attend(
    call: Call, q: Tensor, k: Tensor, v: Tensor, slopes: Tensor | None, sink: Tensor | None
) -> tuple[Tensor, Tensor]:
    """o and lse, differentiable once."""
    if transformed():
        raise NotImplementedError(f"{FORWARD_MODE}; {VMAP}")
    return RingAttention.apply(call, q, k, v, slopes, sink)
