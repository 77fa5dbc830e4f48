"""The host side: from a Problem and its tensors to grids, arguments and launches."""

from __future__ import annotations

import math
from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ...block_mask import BlockMask, TileLists
from ...layout import by_token, empty
from ...problem import NOTHING, Aux, Grads, Layout, Origin, Problem
from ..launch import Boxes, Ready
from ..tensors import (
    READY,
    Memory,
    Strides,
    dense_rows,
    empty_strided,
    lies,
    memory,
    q_shape,
    ragged,
    v_shape,
    whole,
)  # fmt: skip
from . import config
from .backward import dbias_kernel, dkdv_kernel, dq_kernel, per_head_kernel
from .forward import forward_kernel
from .options import BOX, NO_PAIRS, PAD, POINTERS, RAGGED, Options, Pairs, widths

LOG2E = math.log2(math.e)
TOGETHER_BYTES = 32 << 20  # of keys and values that heads walked side by side may take of the L2


# A launch's numbers, grid and compile-time options follow from the Problem and from strides. They are made once for
# calls that repeat: made anew each time, they take 40 microseconds of a forward's 60 on the host.
NO_BOX = (POINTERS, POINTERS)
Apart = tuple[int, Pairs, Pairs, Strides]  # slopes, bias, boolean mask, a BlockMask's lists


def forward(problem: Problem, q: Tensor, k: Tensor, v: Tensor, aux: Aux) -> tuple[Tensor, Tensor]:
    (q, k, v), of_rows = dense_rows(q, k, v)
    start, of_o, of_lse = _forward(problem, precision(problem), aux.origin, _pair_strides(aux), *of_rows)
    room = empty_strided(q)
    o, lse = room(*of_o), room(*of_lse)
    if q.numel() > 0:
        start(o, lse, aux.sink, *pointers(q, k, v, aux, by_query=True))
    return o, lse


@lru_cache(maxsize=READY)
def _forward(
    problem: Problem, precision: str, origin: Origin, apart: Apart, *of_rows: Strides
) -> tuple[Ready, Memory, Memory]:
    """The launch, o and lse."""
    cfg = config.choose(problem, "forward")
    steps = strides(*of_rows)
    named = dict(zip(("q", "k", "v"), of_rows, strict=True))
    *tma, boxes = _loads(problem, cfg, precision, {"k": 4, "v": 5}, {"q": 3}, named)
    of_o = memory(problem.o_shape, problem.dtype, like=of_rows[0])
    start = Ready(
        forward_kernel, (_tiles(problem, problem.q_len, cfg.rows) * problem.heads,),
        (*_common(problem, origin, together(problem)), *steps, *_numbers(apart)),
        {"O": Options.of(problem, cfg, tma, origin, precision, *apart[1:3], by_token=lying(o=of_o))},
        cfg.warps, cfg.stages, boxes,
    )  # fmt: skip
    return start, of_o, memory(problem.lse_shape, torch.float32)


def backward(
    problem: Problem, do: Tensor, dlse: Tensor | None, q: Tensor, k: Tensor, v: Tensor, o: Tensor, lse: Tensor, aux: Aux
) -> Grads:
    if lse.numel() == 0 or k.numel() == 0:
        return Grads(*[empty(x.shape, x).zero_() for x in (q, k, v)], *_zeros(problem, aux))
    (do, q, k, v), of_rows = dense_rows(do, q, k, v)
    o, o_by_token = lies(o)
    dbias = _dbias(problem, aux)
    start = _backward(
        problem, precision(problem), aux.origin, _pair_strides(aux), _pair_strides(aux, by_query=False),
        None if dbias is None else dbias.shape, None if dlse is None else dlse.stride(), o_by_token, *of_rows,
    )  # fmt: skip
    room = empty_strided(q)
    dq, dk, dv, statistics = [room(*what) for what in start.memory]
    by_row = torch.empty_like(lse) if problem.alibi else None
    by_query = (statistics, do, *pointers(q, k, v, aux, by_query=True))
    start.dq(dq, by_row, dbias if start.broadcast_dbias is None else None, o, lse, dlse, *by_query)
    start.dkdv(dk, dv, statistics, do, *pointers(q, k, v, aux, by_query=False))
    if start.broadcast_dbias is not None:
        start.broadcast_dbias(dbias, *by_query)
    if start.per_head is None and dbias is None:
        return Grads(dq, dk, dv)
    if dbias is not None:
        dbias = dbias.to(aux.bias.dtype)  # type: ignore[union-attr]
    return Grads(dq, dk, dv, dbias, *_per_head_sums(problem, aux, start.per_head, by_row, statistics))


def _per_head_sums(
    problem: Problem, aux: Aux, start: Ready | None, by_row: Tensor | None, statistics: Tensor
) -> tuple[Tensor | None, Tensor | None]:
    """dslopes and dsink: a sum for each sequence and head, then over the sequences that share them."""
    if start is None:
        return None, None
    sinks, slopes = torch.empty((2, problem.batch, problem.heads), dtype=torch.float32, device=statistics.device)
    start(sinks, slopes, aux.sink, by_row, statistics, aux.cu_q, aux.q_lens)
    dslopes = dsink = None
    if aux.slopes is not None:
        dslopes = (slopes if aux.slopes.dim() == 2 else slopes.sum(0)).to(aux.slopes.dtype)
    if aux.sink is not None:
        dsink = sinks.sum(0).to(aux.sink.dtype)
    return dslopes, dsink


class _Backward(NamedTuple):
    """The launches of a backward, in their order."""

    memory: tuple[Memory, ...]  # dq, dk, dv and the statistics
    dq: Ready
    dkdv: Ready
    broadcast_dbias: Ready | None
    per_head: Ready | None


@lru_cache(maxsize=READY)
def _backward(
    problem: Problem, precision: str, origin: Origin, by_query: Apart, by_key: Apart, dbias: Strides | None,
    of_dlse: Strides | None, o_by_token: bool, *of_rows: Strides,
) -> _Backward:  # fmt: skip
    """dbias: the shape of bias's gradient, if it is wanted."""
    of_dbias = None if dbias is None else Pairs.of(torch.empty(dbias, device="meta"))
    full = dbias is not None and _is_full(problem, dbias)
    broadcast = None
    if dbias is not None and of_dbias is not None and not full:
        broadcast = _broadcast_dbias(problem, precision, origin, by_query, dbias, of_dbias[:4], *of_rows)
    dq, dk, dv = gradients_of(problem, *of_rows[1:])
    at_queries = ("o" if o_by_token else "") + lying(q=dq)
    return _Backward(
        (dq, dk, dv, memory((_statistics(problem),), torch.float32)),
        _dq(problem, precision, origin, by_query, of_dbias if full else None, of_dlse, at_queries, *of_rows),
        _dkdv(problem, precision, origin, by_key, lying(k=dk, v=dv), *of_rows),
        broadcast,
        _per_head(problem, precision) if problem.alibi or problem.sink else None,
    )


def _dkdv(problem: Problem, precision: str, origin: Origin, apart: Apart, by_token: str, *of_rows: Strides) -> Ready:
    cfg = config.choose(problem, "dkdv")
    steps = strides(*of_rows)
    heads = max(1, together(problem) // problem.group)
    named = dict(zip(("do", "q", "k", "v"), of_rows, strict=True))
    *tma, boxes = _loads(problem, cfg, precision, {"do": 3, "q": 4}, {"k": 5, "v": 6}, named)
    return Ready(
        dkdv_kernel, (_tiles(problem, problem.k_len, cfg.keys) * problem.kv_heads,),
        (*_common(problem, origin, heads), *steps, *_numbers(apart)),
        {"O": Options.of(problem, cfg, tma, origin, precision, *apart[1:3], by_token=by_token)},
        cfg.warps, cfg.stages, boxes,
    )  # fmt: skip


def _dq(
    problem: Problem, precision: str, origin: Origin, apart: Apart, dbias: Pairs | None, of_dlse: Strides | None,
    by_token: str, *of_rows: Strides,
) -> Ready:  # fmt: skip
    cfg = config.choose(problem, "dq")
    steps = strides(*of_rows)
    named = dict(zip(("do", "q", "k", "v"), of_rows, strict=True))
    *tma, boxes = _loads(problem, cfg, precision, {"k": 9, "v": 10}, {"do": 7, "q": 8}, named)
    along = (0,) * 3 if of_dlse is None else (*(0,) * (3 - len(of_dlse)), *of_dlse)
    return Ready(
        dq_kernel, (_tiles(problem, problem.q_len, cfg.rows) * problem.heads,),
        (
            *_common(problem, origin, together(problem)), *steps, *_numbers(apart), *(dbias or NO_PAIRS).numbers[:4], *along,
        ),
        {"O": Options.of(problem, cfg, tma, origin, precision, *apart[1:3], dbias, by_token)},
        cfg.warps, cfg.stages, boxes,
    )  # fmt: skip


def _broadcast_dbias(
    problem: Problem, precision: str, origin: Origin, apart: Apart, shape: Strides, of_dbias: Strides,
    *of_rows: Strides,
) -> Ready:  # fmt: skip
    cfg = config.choose(problem, "dbias")
    steps = strides(*of_rows)
    b, h, rows, keys = shape
    return Ready(
        dbias_kernel, (b * h * -(-rows // cfg.rows) * -(-keys // cfg.keys),),
        (*_common(problem, origin, 1), *steps, *_numbers(apart), *of_dbias),
        {"O": Options.of(problem, cfg, NO_BOX, origin, precision, *apart[1:3])}, cfg.warps, cfg.stages,
    )  # fmt: skip


def _per_head(problem: Problem, precision: str) -> Ready:
    cfg = config.choose(problem, "dq")
    return Ready(
        per_head_kernel, (problem.batch * problem.heads,), (problem.batch, problem.heads, problem.q_len),
        {"O": Options.of(problem, cfg, NO_BOX, NOTHING.origin, precision)}, 4, 1,
    )  # fmt: skip


def _statistics(problem: Problem) -> int:
    """Numbers in the backward's statistics (`steps.statistics_of`)."""
    if problem.q_layout is Layout.PACKED:
        rows = (problem.q_len // PAD + problem.batch + 1) * PAD * problem.heads
    else:
        rows = -(-problem.q_len // PAD) * PAD * problem.batch * problem.heads
    return 2 * rows


def _is_full(problem: Problem, bias: Strides) -> bool:
    """Whether each element of a bias of this shape is one pair's: nothing is broadcast over more than one."""
    b, h, rows, keys = bias
    packed = problem.q_layout is Layout.PACKED
    lengths = (rows > 1 and keys > 1) if packed else (rows, keys) == (problem.q_len, problem.k_len)
    return (b, h) == (problem.batch, problem.heads) and lengths


def _dbias(problem: Problem, aux: Aux) -> Tensor | None:
    """Room for the bias's gradient, of its own shape; zeros where tiles are stored only if they are visited."""
    if aux.bias is None or problem.bias is None or not problem.bias.grad:
        return None
    full = _is_full(problem, aux.bias.shape)
    make = torch.zeros if full else torch.empty
    return make(aux.bias.shape, dtype=aux.bias.dtype if full else torch.float32, device=aux.bias.device)


def _zeros(problem: Problem, aux: Aux) -> list[Tensor | None]:
    """Gradients of bias, slopes and sink where there is no pair."""
    wanted = (aux.bias if problem.bias is not None and problem.bias.grad else None, aux.slopes, aux.sink)
    return [None if x is None else torch.zeros(x.shape, dtype=x.dtype, device=x.device) for x in wanted]


def precision(problem: Problem) -> str:
    """Of fp32 products: true fp32, unless PyTorch's setting allows TF32.

    True fp32 is made of three TF32 products, or of six bf16 ones (`steps.product`), which hold 24 bits too and are as
    many cycles of the tensor cores. On Hopper bf16 tiles need no transposition on their way there, as TF32's do, and a
    tile is split once for all the products that it is in. AMD has neither.
    """
    if problem.dtype is not torch.float32 or torch.backends.cuda.matmul.allow_tf32:
        return "tf32"
    if problem.device == "sm90" and max(problem.qk_dim, problem.v_dim) <= config.SPLIT:
        return "bf16x6"
    return "tf32x3" if problem.device.startswith("sm") else "ieee"


def pointers(q: Tensor, k: Tensor, v: Tensor, aux: Aux, by_query: bool) -> tuple[Tensor | None, ...]:
    """The tensors that all kernels share, in their order; a BlockMask's lists query-major or key-major."""
    if aux is NOTHING:
        return q, k, v  # and None, which a launch adds
    mask: Tensor | None = None
    lists: tuple[Tensor | None, ...] = _NO_LISTS
    if isinstance(aux.mask, BlockMask):
        tiles: TileLists = aux.mask.query_major if by_query else aux.mask.key_major
        lists = (*tiles, aux.mask.bits if by_query else aux.mask.turned)
    elif aux.mask is not None:
        mask = aux.mask.view(torch.uint8)
    return (
        q, k, v, aux.bias, aux.slopes, mask, *lists, aux.seed, aux.cu_q, aux.cu_k, aux.q_lens, aux.k_lens,
    )  # fmt: skip


_NO_LISTS = (None,) * 6


def gradients_of(
    problem: Problem, of_q: Strides, of_k: Strides | None, of_v: Strides | None
) -> tuple[Memory, Memory, Memory]:
    """dq, dk and dv, as tensors with these strides lie; None: by heads."""
    shapes = (q_shape(problem), of_q), (problem.k_shape, of_k), (v_shape(problem), of_v)
    dq, dk, dv = (memory(shape, problem.dtype, like) for shape, like in shapes)
    return dq, dk, dv


def lying(**results: Memory) -> str:
    """The names of those that lie by token."""
    return "".join(name for name, (shape, strides, _) in results.items() if by_token(shape, strides))


def strides(*of_tensors: Strides) -> Strides:
    """(From sequence to sequence, head to head, row to row) of each tensor, in units of 8 elements: packed ones lie in one
    sequence."""
    out: list[int] = []
    for stride in of_tensors:
        out += stride[:3] if len(stride) == 4 else (0, stride[1], stride[0])
    return tuple([n // 8 for n in out])


def _loads(
    problem: Problem, cfg: config.Config, precision: str, pass_by: dict[str, int],
    stay: dict[str, int], of_rows: dict[str, Strides],
) -> tuple[int, int, Boxes]:  # fmt: skip
    """How a kernel loads the tiles that pass by and those that stay (`Options.PASS`, `STAY`), and the descriptors.

    pass_by, stay: the places of q, k, v, do among the kernel's arguments.
    """
    how: list[int] = []
    boxes: Boxes = {}
    columns = widths(problem, cfg, precision)
    for places in (pass_by, stay):
        found = {}
        for name, place in places.items():
            queries = name in ("q", "do")
            lens, side = (problem.q_lens, cfg.rows) if queries else (problem.k_lens, cfg.keys)
            shape = {"q": q_shape(problem), "k": problem.k_shape, "v": v_shape(problem), "do": problem.o_shape}[name]
            clipped = problem.q_layout is Layout.PACKED or lens
            box = (ragged if clipped else whole)(shape, of_rows[name], side, columns[name in ("v", "do")])
            if cfg.tma and box is not None:
                found[place] = box
        if len(found) < len(places):
            how.append(POINTERS)
        else:
            how.append(RAGGED if clipped else BOX)
            boxes |= found
    return how[0], how[1], boxes


def _common(problem: Problem, origin: Origin, together: int) -> tuple[Any, ...]:
    left, right = problem.band.bounds
    b0, h0, i0, j0 = origin
    return (
        problem.batch, problem.heads, problem.group, problem.q_len, problem.k_len, together, problem.scale * LOG2E,
        problem.softcap * LOG2E, left, right, *dropout(problem.dropout_p), b0, h0, i0, j0,
    )  # fmt: skip


def dropout(p: float) -> tuple[int, float]:
    """(the largest word that is dropped, as an int32; what the kept pairs are multiplied by)."""
    largest = math.ceil(p * 2**32) - 1 if p > 0 else 0
    return largest - 2**32 if largest >= 2**31 else largest, 1.0 / (1.0 - p) if p < 1 else 0.0


def _pair_strides(aux: Aux, by_query: bool = True) -> Apart:
    """Of what has an element for pairs: slopes, bias, mask, a BlockMask's lists."""
    if aux.bias is aux.slopes is aux.mask is None:
        return _NOTHING_APART
    slopes_b = aux.slopes.stride(0) if aux.slopes is not None and aux.slopes.dim() == 2 else 0
    mask = aux.mask
    if isinstance(mask, BlockMask):
        b, h, n, m = (mask.query_major if by_query else mask.key_major).full.shape
        return slopes_b, Pairs.of(aux.bias), NO_PAIRS, (h if b > 1 else 0, 1 if h > 1 else 0, n, m)
    return slopes_b, Pairs.of(aux.bias), Pairs.of(mask), _NO_BLOCKS


_NO_BLOCKS = (0,) * 4
_NOTHING_APART = (0, NO_PAIRS, NO_PAIRS, _NO_BLOCKS)


def _numbers(apart: Apart) -> tuple[int, ...]:
    slopes_b, bias, mask, blocks = apart
    return (slopes_b, *bias.numbers, *mask.numbers, *blocks)


def _tiles(problem: Problem, length: int, side: int) -> int:
    """How many tiles of `side` cover all sequences: packed, an upper bound that needs no look at cu_seqlens."""
    if problem.q_layout is Layout.PACKED:
        return length // side + problem.batch + 1
    return problem.batch * -(-length // side)


def together(problem: Problem) -> int:
    """How many query heads walk their tiles side by side (dense)."""
    if problem.band.is_full:
        return 1
    size = max(problem.k_len, 1) * (problem.qk_dim + problem.v_dim) * problem.dtype.itemsize
    return side_by_side(problem.batch * problem.kv_heads, size) * problem.group


def side_by_side(heads: int, size: int) -> int:
    """How many of the heads, of `size` bytes each, walk their tiles side by side, so that these are in the L2 at once.

    The last ones to do so are to be about as many as the others: the long tiles of few would end when all else is done.
    Counted over the tiles of 16 heads of 8192 keys on 132 SMs, groups of 3 and a last one of 1 take 1.16 times their share,
    groups of 4 or of 2 take 1.00.
    """
    most = max(1, min(TOGETHER_BYTES // size, 32, heads))
    return max(range(most // 2 + 1, most + 1), key=lambda n: (((heads - 1) % n + 1) / n, n))
