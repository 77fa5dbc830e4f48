"""The host side of attention over a key/value cache: from a Problem and its tensors to launches, without a look at lengths.

few queries of a sequence     piece_kernel, merge_kernel; whole_kernel where a program has the only block
many                          the kernels for dense tensors, where the cache is such, and for rotary turn_kernel before them;
                              else whole_kernel
packed                        all three: which sequences have many queries only the device knows
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor

from ...layout import empty
from ...problem import Aux, Layout, Problem
from ...problem_cached import FP8, CacheShape
from ..launch import Ready
from ..tensors import READY, Strides, dense_rows
from . import config as config_of_dense
from . import decode_config as config
from .decode import merge_kernel, piece_kernel, turn_kernel, whole_kernel
from .decode_append import append_kernel
from .host import LOG2E, precision, strides

EARLY = ("sm90", "sm100", "sm103", "sm120", "sm121")
# Elements of a tile's result. Of more, a block's accumulator beside it would spill, and to store it amid the loop takes
# shared memory beside that of the keys in flight: each program has one piece, and stores it at its end.
NARROW = 16 * 256
AT_ONCE = 32  # blocks that are merged in one step, at most


@dataclass(frozen=True, slots=True)
class Options:
    """The one compile-time argument of the kernels. Lengths are never in it."""

    D: int
    DV: int
    WIDTH: int  # columns of K's tile, and
    REST: int  # of a second one with the others, or 0
    V_WIDTH: int
    GROUP: int
    ROWS: int
    KEYS: int
    PIECE: int  # keys
    BLOCK: int  # keys of a block of pieces
    JOINED: bool  # a program has whole blocks, and merges their pieces
    ALONE: bool  # a program has one piece
    COLUMNS: int  # of a program of merge_kernel, append_kernel
    AT_ONCE: int
    PAGE: int  # keys of one; 0: the cache is contiguous
    UNIT: int  # the storage's strides are in units of so many elements: 16 bytes, if all are multiples
    FP8: bool
    SCALES: bool
    V_IN_K: bool
    PACKED: bool
    Q_LENS: bool
    SLOTS: bool  # sequences say which slot they have
    SHARED: bool  # all have the first one
    STARTS: bool
    AFTER: bool
    R: int  # columns that are turned
    INTERLEAVED: bool
    LEFT: bool  # the Band is bounded on this side
    RIGHT: bool
    RAW: bool  # scores go to the softmax unscaled
    SOFTCAP: bool
    ALIBI: bool
    SINK: bool
    AS_FP16: bool  # bf16 queries of fp8 keys: products are of fp16 (`decode.as_fp16`)
    HEADROOM: int
    PRECISION: str
    EARLY: bool  # merge_kernel is launched while pieces are worked on, and waits for them itself (Hopper on)

    @classmethod
    def of(
        cls, problem: Problem, cfg: config.Config, unit: int, fp32: str, columns: int, blocks: int = 1, joined: bool = False,
        alone: bool = False,
    ) -> Options:  # fmt: skip
        cache = problem.cache
        assert cache is not None
        (wide, rest), v_wide = config.columns(problem)
        fp8 = cache.dtype is FP8
        as_fp16 = fp8 and problem.dtype is torch.bfloat16
        return cls(
            D=problem.qk_dim, DV=problem.v_dim, WIDTH=wide, REST=rest,
            V_WIDTH=wide if config.v_in_k(problem) else v_wide, GROUP=problem.group, ROWS=cfg.rows, KEYS=cfg.keys,
            PIECE=cfg.piece, BLOCK=config.BLOCK, JOINED=joined, ALONE=alone, COLUMNS=columns, AT_ONCE=min(AT_ONCE, 1 << (blocks - 1).bit_length()), PAGE=cache.page_size, UNIT=unit, FP8=fp8,
            SCALES=cache.scales, V_IN_K=config.v_in_k(problem), PACKED=problem.q_layout is Layout.PACKED,
            Q_LENS=problem.q_lens, SLOTS=cache.rows and not cache.shared, SHARED=cache.shared, STARTS=cache.starts,
            AFTER=cache.after, R=cache.rotary_dim, INTERLEAVED=cache.rotary == "interleaved",
            LEFT=problem.band.left is not None, RIGHT=problem.band.right is not None,
            RAW=problem.scale > 0 and not (problem.softcap or problem.alibi or cache.scales or as_fp16),
            SOFTCAP=problem.softcap > 0, ALIBI=problem.alibi, SINK=problem.sink,
            AS_FP16=as_fp16, HEADROOM=12 if as_fp16 or problem.dtype is torch.float16 else 0,
            PRECISION="tf32x3" if fp32 == "bf16x6" else fp32,  # K and V are split where they are converted, too
            EARLY=problem.device in EARLY,
        )  # fmt: skip


class Plan(NamedTuple):
    """The launches of a call, in their order, and the room for what pieces give: (their number, floats of o, of lse)."""

    pieces: Ready | None
    merge: Ready | None
    whole: Ready | None
    room: tuple[int, int]


def attend(problem: Problem, q: Tensor, k: Tensor, v: Tensor, aux: Aux) -> tuple[Tensor, Tensor]:
    """o (`problem.o_shape`, as q lies) and lse of queries that are the last tokens of aux.k_lens keys in the storage k, v."""
    cache = problem.cache
    assert cache is not None
    o = empty(problem.o_shape, q, torch.float32 if cache.partial else None)
    lse = torch.empty(problem.lse_shape, dtype=torch.float32, device=q.device)
    if lse.numel() == 0:
        return o, lse
    if cache.slots == 0 or k.numel() == 0:
        return o.zero_(), lse.fill_(-torch.inf)
    unit = _unit(k, v, cache.page_size > 0)
    dense = _as_dense(problem)
    if dense is not None and unit > 1:
        from ...dispatch import choose  # when it is asked, for dispatch stands above the backends

        if cache.rotary is not None:
            q = _turned(problem, q, aux)
        return choose(dense).forward(
            dense, q, k, v, Aux(slopes=aux.slopes, sink=aux.sink, q_lens=aux.q_lens, k_lens=aux.k_lens)
        )
    (q,), of_q = dense_rows(q)
    *turns, positions = _turns(aux)
    plan = plan_of(
        problem,
        precision(problem),
        unit,
        q.device,
        *of_q,
        k.stride(),
        v.stride(),
        o.stride(),
        _slopes_b(aux),
        positions,
    )
    where = aux.k_lens, aux.pages, aux.rows, aux.starts, aux.after
    if plan.pieces is not None and plan.merge is not None:
        of_o, of_lse = plan.room
        o_pieces, lse_pieces = torch.empty(of_o + of_lse, dtype=torch.float32, device=q.device).split((of_o, of_lse))
        plan.pieces(
            o_pieces,
            lse_pieces,
            q,
            k,
            v,
            *where,
            aux.k_scale,
            aux.v_scale,
            *turns,
            aux.slopes,
            aux.cu_q,
            aux.q_lens,
            aux.status,
        )
        plan.merge(
            o, lse, o_pieces, lse_pieces, aux.k_lens, aux.rows, aux.starts, aux.after, aux.v_scale, aux.sink, aux.cu_q,
            aux.q_lens, aux.status,
        )  # fmt: skip
    if plan.whole is not None:
        plan.whole(
            o,
            lse,
            q,
            k,
            v,
            *where,
            aux.k_scale,
            aux.v_scale,
            *turns,
            aux.slopes,
            aux.sink,
            aux.cu_q,
            aux.q_lens,
            aux.status,
        )
    return o, lse


@lru_cache(maxsize=READY)
def _as_dense(problem: Problem) -> Problem | None:
    """The same call on the storage as k and v with lengths, where it is one tensor a sequence and there are many queries:
    the kernels for dense tensors, Hopper's too, are faster there. Else None."""
    cache = problem.cache
    assert cache is not None
    plain = CacheShape(
        problem.dtype, problem.batch, problem.k_len, problem.kv_heads, problem.qk_dim, problem.v_dim, cache.device,
        v_in_k=cache.v_in_k, rotary=cache.rotary, rotary_dim=cache.rotary_dim,
    )  # fmt: skip
    if problem.q_layout is Layout.PACKED or problem.q_len <= config.SHORT or cache != plain:
        return None
    dense = replace(problem, cache=None, k_lens=True)
    return dense if config_of_dense.why_not(dense) is None and max(problem.qk_dim, problem.v_dim) <= 512 else None


def _turned(problem: Problem, q: Tensor, aux: Aux) -> Tensor:
    """Dense queries turned by their positions; what is not in use is not written."""
    (q,), (of_q,) = dense_rows(q)
    turned = empty(q.shape, q)
    cos, sin, positions = _turns(aux)
    _turn_of(problem, positions, of_q, turned.stride())(turned, q, aux.k_lens, cos, sin, aux.q_lens)
    return turned


@lru_cache(maxsize=READY)
def _turn_of(problem: Problem, positions: int, of_q: Strides, of_o: Strides) -> Ready:
    rows = 16
    options = Options.of(problem, config.Config(rows, 16, 0, 4, 1, 1), 8, "ieee", columns=0)
    tiles = problem.batch * -(-problem.q_len // max(1, rows // problem.group)) * -(-problem.group // rows)
    numbers = (
        problem.batch, problem.kv_heads, problem.q_len, problem.k_len, positions, *strides(of_q), *of_o[:3],
    )  # fmt: skip
    return Ready(turn_kernel, (tiles * problem.kv_heads,), numbers, {"O": options}, 4, 1)


@lru_cache(maxsize=READY)
def plan_of(
    problem: Problem, fp32: str, unit: int, device: torch.device, of_q: Strides, of_k: Strides, of_v: Strides, of_o: Strides,
    slopes_b: int, positions: int,
) -> Plan:  # fmt: skip
    cache = problem.cache
    assert cache is not None
    packed = problem.q_layout is Layout.PACKED
    split = packed or problem.q_len <= config.SHORT
    most = min(problem.q_len, config.SHORT) if split else 0
    left, right = problem.band.bounds
    storage = cache.slots, cache.pages, problem.k_len // cache.page_size if cache.page_size else 0
    common = (
        problem.batch, problem.kv_heads, problem.q_len, problem.k_len, *storage, positions, problem.scale * LOG2E,
        problem.softcap * LOG2E, left, right, slopes_b, *strides(of_q),
        *(n // unit for stride in (of_k, of_v) for n in stride[:3]),
    )  # fmt: skip
    to_o = (0, of_o[1], of_o[0]) if packed else of_o[:3]
    at_pieces = at_end = whole = None
    room = 0, 0
    direct = False
    cfg = config.choose(problem, not split, unit > 1)
    if split:
        tiles = _tiles(cfg.rows, problem.group, most)
        sequences = problem.batch * problem.kv_heads * tiles
        pieces, blocks = (-(-problem.k_len // n) for n in (cfg.piece, config.BLOCK))
        at_once = cfg.at_once * _sms(device)
        alone = cfg.rows * problem.v_dim > NARROW
        sharers = pieces if alone else sharers_of(sequences, pieces, at_once)
        joined = sharers <= blocks and not alone
        direct = joined and blocks == 1 and not packed
    if split and not direct:
        pieces = blocks if joined else pieces
        rows = problem.batch * problem.heads * most
        options = Options.of(problem, cfg, unit, fp32, _columns(problem.v_dim), blocks, joined, alone)
        at_pieces = Ready(
            piece_kernel,
            (sequences * sharers,),
            (*common, most, pieces, sharers, tiles),
            {"O": options},
            cfg.warps,
            cfg.stages,
        )
        at_end = Ready(
            merge_kernel, (rows * -(-problem.v_dim // options.COLUMNS),),
            (
                problem.batch, problem.kv_heads, problem.q_len, problem.k_len, cache.slots, left, right, *to_o, most, pieces,
            ),
            {"O": options}, max(1, min(4, options.AT_ONCE * options.COLUMNS // 128)), 1, early=options.EARLY,
        )  # fmt: skip
        room = rows * pieces * problem.v_dim, rows * pieces
    if packed or not split or direct:
        cfg = config.choose(problem, True, unit > 1) if packed else cfg
        options = Options.of(problem, cfg, unit, fp32, columns=0)
        parts = -(-problem.group // cfg.rows)
        queries = max(1, cfg.rows // problem.group)
        tiles = problem.q_len // queries + problem.batch + 1 if packed else problem.batch * -(-problem.q_len // queries)
        longer = most if packed else 0
        whole = Ready(
            whole_kernel,
            (tiles * problem.kv_heads * parts,),
            (*common, *to_o, longer),
            {"O": options},
            cfg.warps,
            cfg.stages,
        )
    return Plan(at_pieces, at_end, whole, room)


def append(problem: Problem, k_new: Tensor, v_new: Tensor | None, k: Tensor, v: Tensor, aux: Aux) -> None:
    """Store new keys and values behind the aux.k_lens that each sequence has; the lengths stay as they are."""
    cache = problem.cache
    assert cache is not None
    if k_new.numel() == 0 or problem.batch == 0:
        return
    (k_new, *others), of_rows = dense_rows(*(x for x in (k_new, v_new) if x is not None))
    *turns, positions = _turns(aux)
    stored = (k.view(torch.uint8), v.view(torch.uint8)) if cache.dtype is FP8 else (k, v)
    append_of(problem, precision(problem), _unit(k, v, cache.page_size > 0), positions, k.stride(), v.stride(), *of_rows)(
        k_new, others[0] if others else None, *stored, aux.k_lens, aux.pages, aux.rows, aux.starts, aux.k_scale, aux.v_scale,
        *turns, aux.cu_q, aux.q_lens, aux.status,
    )  # fmt: skip


@lru_cache(maxsize=READY)
def append_of(
    problem: Problem, fp32: str, unit: int, positions: int, of_k: Strides, of_v: Strides, *of_rows: Strides
) -> Ready:
    cache = problem.cache
    assert cache is not None
    wide = max(16, 1 << (max(problem.qk_dim, problem.v_dim) - 1).bit_length())
    options = Options.of(problem, config.Config(16, 16, 0, 4, 1, 1), unit, fp32, columns=wide)
    packed = problem.q_layout is Layout.PACKED
    tokens = problem.q_len + problem.batch + 1 if packed else problem.batch * problem.q_len
    pages = problem.k_len // cache.page_size if cache.page_size else 0
    numbers = (
        problem.batch, problem.kv_heads, problem.q_len, problem.k_len, cache.slots, cache.pages, pages, positions,
        *strides(*of_rows), *(0,) * (3 * (2 - len(of_rows))), *(n // unit for stride in (of_k, of_v) for n in stride[:3]),
    )  # fmt: skip
    return Ready(append_kernel, (tokens * problem.kv_heads,), numbers, {"O": options}, 1, 1)


def _columns(v_dim: int) -> int:
    """How many columns of V a program of merge_kernel has.

    Whatever the batch: how a sum over blocks is shared by threads, and so in which order they are added, follows from the
    tile's shape. (8 blocks of 32 columns are added in pairs of neighbours, of 128 columns n with n + 4.)
    """
    return min(32, max(16, 1 << (v_dim - 1).bit_length()))


def _tiles(rows: int, group: int, queries: int) -> int:
    """Tiles of a key/value head: all heads of some queries each, or some heads of one."""
    return -(-queries // (rows // group)) if group <= rows else queries * -(-group // rows)


def _unit(k: Tensor, v: Tensor, paged: bool) -> int:
    """Elements of 16 bytes where all rows of the storage begin at such places, else 1: loads are as wide then.

    1, too, where pages or keys lie 2^31 elements apart: kernels multiply those strides in 32 bits, for there are many
    of them; a slot's and a head's in 64.
    """
    for name, x in (("k", k), ("v", v)):
        if x.stride(3) != 1 and x.shape[3] > 1:
            raise ValueError(f"the cache's {name} has strides {x.stride()}: the last must be 1 for backend 'triton'")
    unit, strides = 16 // k.element_size(), (*k.stride()[:3], *v.stride()[:3])
    aligned = not (k.data_ptr() & 15 or v.data_ptr() & 15 or any(n % unit for n in strides))
    many = (k.stride(2), v.stride(2), *((k.stride(0), v.stride(0)) if paged else ()))
    return unit if aligned and max(many) < 2**31 else 1


def _turns(aux: Aux) -> tuple[Tensor | None, Tensor | None, int]:
    """cos and sin without gaps, and how many positions they have."""
    if aux.rotary_cos is None or aux.rotary_sin is None:
        return None, None, 0
    return aux.rotary_cos.contiguous(), aux.rotary_sin.contiguous(), len(aux.rotary_cos)


def _slopes_b(aux: Aux) -> int:
    return aux.slopes.stride(0) if aux.slopes is not None and aux.slopes.dim() == 2 else 0


def sharers_of(sequences: int, pieces: int, at_once: int) -> int:
    """How many programs share a sequence's pieces, so that all SMs have about as much to do, for as few turns as that takes.

    >>> sharers_of(8, 32, 264), sharers_of(64, 32, 264), sharers_of(200, 32, 264), sharers_of(512, 32, 264)
    (32, 4, 5, 1)
    """
    most = min(pieces, max(1, 4 * at_once // max(sequences, 1)))

    def idle(n: int) -> float:
        turns = -(-sequences * n // at_once)
        return turns * at_once / max(sequences * n, 1) + 0.02 * turns

    return min(range(1, most + 1), key=idle)


@lru_cache
def _sms(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 4
