"""What attention costs, in closed form: bytes to and from HBM, memory on the chip and off it, flops, time on a GPU.

The functions return a `Cost` of steps (a step is a kernel). They do not look at the algorithms: they are a second
derivation, in integers, of what `hbm` counts while `standard`, `flash1`, `forward` and `backward` run, and a test
equates the two. In elements, for N queries and keys, head size d, a full mask, and a chip that holds M elements:

    standard                Theta(N d + N^2)              S and P go to HBM and come back, whatever M is
    FlashAttention-1, -2    Theta(N^2 d^2 / M)            each of 4 N d / M tiles of K and V sees all of Q go by, or the
                                                          other way round
    block-sparse            Theta(N d + s N^2 d^2 / M)    s: the share of the tiles that are not EMPTY

Where "5 to 9 times fewer bytes" comes from: forward and backward, standard attention without fusion moves N^2
elements 15 times (6 + 9), with a mask and dropout 23 times (10 + 13). For each of 4 N d / M tiles FlashAttention-1
moves Q, O and O again, then Q, O, dO, dQ and dQ again: 8 Nd, in all 32 N^2 d^2 / M. The ratio is (15 to 23) / 32 * M
/ d^2. With d = 64 and 100 KB of fp16, M = 51200 elements and M / d^2 = 12.5: 5.9 to 9.0. (The products of standard
attention load their operands more than once, which adds to it; what else there is of size Nd takes from it in short
sequences.)

>>> for N in 1024, 2048, 4096:
...     for options in False, True:
...         cost = compare(Sizes(N, N, 64, 64), M=51200, masked=options, dropout=options)
...         print(f"{N} {cost['standard'].bytes / cost['FlashAttention-1'].bytes:.1f}")
1024 4.9
1024 7.2
2048 5.7
2048 8.3
4096 6.2
4096 9.0

Every load counts as HBM's, as in the paper: there are two levels, and no cache between them.

Source: FlashAttention (Dao et al., 2022), Theorem 2 and Proposition 4; FlashAttention-2 (Dao, 2023), section 3.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from ..mask import Band, key_range, query_range
from . import tiling

Bytes = dict[str, int]  # an array's name -> bytes
Blocks = tuple[int, int]  # (B_r, B_c)
Live = Callable[[int, int], bool]  # is (i, j), of the tiles of (B_r, B_c), one that is not EMPTY?

ALIGN = 16  # FlashAttention-2's inner tiles start at multiples of it, and its accumulators' sides are rounded up to it


@dataclass(frozen=True, slots=True)
class Sizes:
    """One attention call: d of q and k, d_v of v; bytes of an `element` of q, k, v, o, and of the accumulators and
    statistics (`acc`: 4, and 8 for fp64 inputs). heads: of the queries."""

    q_len: int
    k_len: int
    d: int
    d_v: int
    batch: int = 1
    heads: int = 1
    element: int = 2
    acc: int = 4


@dataclass(frozen=True, slots=True)
class Step:
    """One kernel: bytes by array, over all batches and heads (`on_chip`: of one head), and the flops of its matmuls."""

    name: str
    loaded: Bytes
    stored: Bytes
    on_chip: Bytes
    arrays: Bytes  # allocated in HBM
    flops: int = 0

    @property
    def bytes(self) -> int:
        return sum(self.loaded.values()) + sum(self.stored.values())


@dataclass(frozen=True, slots=True)
class Cost:
    """The steps of an algorithm; ``forward + backward`` is the cost of both."""

    steps: tuple[Step, ...]

    @property
    def loaded(self) -> Bytes:
        return _total(step.loaded for step in self.steps)

    @property
    def stored(self) -> Bytes:
        return _total(step.stored for step in self.steps)

    @property
    def arrays(self) -> Bytes:
        return _total(step.arrays for step in self.steps)

    @property
    def bytes(self) -> int:
        """Bytes moved between HBM and the chip."""
        return sum(step.bytes for step in self.steps)

    @property
    def peak_on_chip(self) -> int:
        """Bytes on the chip for one (batch, head), in the step that needs most."""
        return max(sum(step.on_chip.values()) for step in self.steps)

    @property
    def allocated(self) -> int:
        """Bytes of HBM beyond the inputs: results, statistics, and S, P and their gradients where they exist."""
        return sum(self.arrays.values())

    @property
    def flops(self) -> int:
        return sum(step.flops for step in self.steps)

    @property
    def intensity(self) -> float:
        """Flops for each byte moved. Where it is below a GPU's flops / bandwidth, the bytes set the time."""
        return self.flops / self.bytes if self.bytes else 0.0

    def __add__(self, other: Cost) -> Cost:
        return Cost(self.steps + other.steps)


# --- standard attention --------------------------------------------------------------------------------------------


def standard(sizes: Sizes, blocks: Blocks, *, fused: bool = False, masked: bool = False, dropout: bool = False) -> Cost:
    """Forward of `standard.Standard`; blocks from `tiling.matmul_blocks`. Elements for N = q_len = k_len, d = d_v:

        Q K^T         Nd + ceil(N / B_r) Nd  in    N^2 out
        scale, mask   N^2 in                       N^2 out    each; unfused only, and the mask where there is one
        softmax       N^2 in                       N^2 out
        dropout       N^2 in                       N^2 out    unfused only
        P V           N^2 + ceil(N / B_r) Nd in    Nd out

    >>> N, d = 1024, 64
    >>> cost = standard(Sizes(N, N, d, d), (128, 128), fused=True)
    >>> cost.bytes == 2 * (4 * N * N + 2 * N * d + 2 * 8 * N * d)
    True
    """
    make = _Standard(sizes, blocks)
    P = "P_dropped" if dropout and not fused else "P"
    steps = [make.product("scores", "Q", "K", "S")]
    if not fused:
        steps.append(make.elementwise("scale", "S", "S"))
        if masked:
            steps.append(make.elementwise("mask", "S", "S"))
    steps.append(make.rowwise("softmax", ["S"], "P"))
    if P == "P_dropped":
        steps.append(make.elementwise("dropout", "P", P))
    steps.append(make.sum_over_keys("output", P, "V", "O"))
    return Cost(tuple(steps))


def standard_backward(
    sizes: Sizes, blocks: Blocks, *, fused: bool = False, masked: bool = False, dropout: bool = False
) -> Cost:
    """Backward of `standard.Standard`. Elements for N = q_len = k_len, d = d_v:

        P^T dO                 N^2 + ceil(N / B_c) Nd in    Nd out
        dO V^T                 Nd + ceil(N / B_r) Nd in     N^2 out
        dropout, mask, scale   N^2 in                       N^2 out    each; unfused only, and where there is one
        softmax                2 N^2 in                     N^2 out
        dS K, dS^T Q           N^2 + ceil(N / B) Nd in      Nd out     each

    >>> N, d = 1024, 64
    >>> cost = standard_backward(Sizes(N, N, d, d), (128, 128), fused=True)
    >>> cost.bytes == 2 * (7 * N * N + 4 * N * d + 4 * 8 * N * d)
    True
    """
    make = _Standard(sizes, blocks)
    P = "P_dropped" if dropout and not fused else "P"
    steps = [make.sum_over_rows("dV", P, "dO", "dV"), make.product("dP", "dO", "V", "dP")]
    if dropout and not fused:
        steps.append(make.elementwise("dropout_backward", "dP", "dP"))
    steps.append(make.rowwise("softmax_backward", ["P", "dP"], "dS"))
    if not fused:
        if masked:
            steps.append(make.elementwise("mask_backward", "dS", "dS"))
        steps.append(make.elementwise("scale_backward", "dS", "dS"))
    steps += [make.sum_over_keys("dQ", "dS", "K", "dQ"), make.sum_over_rows("dK", "dS", "Q", "dK")]
    return Cost(tuple(steps))


@dataclass(frozen=True, slots=True)
class _Standard:
    """The kernels of standard attention. A is a matrix of N x N, x one of N x d."""

    sizes: Sizes
    blocks: Blocks

    @property
    def pairs(self) -> int:
        return self.sizes.q_len * self.sizes.k_len

    def width(self, x: str) -> int:
        return self.sizes.d_v if x in ("V", "O", "dO", "dV") else self.sizes.d

    def whole(self, x: str) -> int:
        """Bytes of x."""
        length = self.sizes.k_len if x in ("K", "V", "dK", "dV") else self.sizes.q_len
        return length * self.width(x) * self.sizes.element

    def product(self, name: str, x: str, y: str, A: str) -> Step:
        """A = x y^T, x by rows: the whole of y goes by for every tile of them."""
        B_r, B_c = _tile(self.sizes, self.blocks)
        side = self.width(x) * self.sizes.element
        return _step(
            self.sizes,
            name,
            loaded={x: self.whole(x), y: _ceil(self.sizes.q_len, self.blocks[0]) * self.whole(y)},
            stored={A: self.pairs * self.sizes.element},
            on_chip={x: B_r * side, y: B_c * side, A: B_r * B_c * self.sizes.acc},
            arrays={A: self.pairs * self.sizes.element},
            flops=2 * self.pairs * self.width(x),
        )

    def sum_over_keys(self, name: str, A: str, x: str, y: str) -> Step:
        """y = A x: the whole of x goes by for every tile of A's rows."""
        B_r, B_c = _tile(self.sizes, self.blocks)
        return self._gathered(name, A, x, y, _ceil(self.sizes.q_len, self.blocks[0]), held=B_r, passing=B_c)

    def sum_over_rows(self, name: str, A: str, x: str, y: str) -> Step:
        """y = A^T x: the whole of x goes by for every tile of A's columns."""
        B_r, B_c = _tile(self.sizes, self.blocks)
        return self._gathered(name, A, x, y, _ceil(self.sizes.k_len, self.blocks[1]), held=B_c, passing=B_r)

    def _gathered(self, name: str, A: str, x: str, y: str, times: int, held: int, passing: int) -> Step:
        e, width = self.sizes.element, self.width(x)
        return _step(
            self.sizes,
            name,
            loaded={A: self.pairs * e, x: times * self.whole(x)},
            stored={y: self.whole(y)},
            on_chip={A: held * passing * e, x: passing * width * e, y: held * width * self.sizes.acc},
            arrays={y: self.whole(y)},
            flops=2 * self.pairs * width,
        )

    def elementwise(self, name: str, A: str, B: str) -> Step:
        """B from A tile by tile; A itself is overwritten if that is B."""
        B_r, B_c = _tile(self.sizes, self.blocks)
        return self._pass(name, [A], B, B_r * B_c)

    def rowwise(self, name: str, reads: list[str], B: str) -> Step:
        """B from whole rows: a row's maximum and sum come before its first result."""
        return self._pass(name, reads, B, _tile(self.sizes, self.blocks)[0] * self.sizes.k_len)

    def _pass(self, name: str, reads: list[str], B: str, tile: int) -> Step:
        size = self.pairs * self.sizes.element
        return _step(
            self.sizes,
            name,
            loaded=dict.fromkeys(reads, size),
            stored={B: size},
            on_chip=dict.fromkeys(reads, tile * self.sizes.element),
            arrays={} if B in reads else {B: size},
        )


# --- FlashAttention-1 and its block-sparse form --------------------------------------------------------------------


def flash_attention_1(sizes: Sizes, blocks: Blocks, *, band: Band | None = None, live: Live | None = None) -> Cost:
    """Forward of `flash1.FlashAttention1`; blocks from `tiling.paper_blocks`.

    K and V are loaded once. Each of their T_c = ceil(N / B_c) tiles sees Q, O, l and m go by, and the last three go
    back. In elements, N = q_len = k_len and d = d_v, a full mask, and with the first filling of O, l and m:

        2Nd + T_c (2Nd + 2N) in     (T_c + 1) (Nd + 2N) out

    live: which tiles the BlockMask has (see `live_tiles`); with it this is block-sparse FlashAttention.

    >>> N, d, T_c = 1000, 64, 5
    >>> cost = flash_attention_1(Sizes(N, N, d, d, element=4), (64, 200))
    >>> cost.bytes == 4 * (2 * N * d + T_c * (2 * N * d + 2 * N) + (T_c + 1) * (N * d + 2 * N))
    True
    >>> 3 * 4 * N * d + cost.allocated == 4 * (4 * N * d + 2 * N)              # all memory: Q, K, V, O, l, m
    True
    """
    visits = _query_visits(sizes, blocks, band or Band(), live)
    e, acc, N = sizes.element, sizes.acc, sizes.q_len
    K, V, Q, O = sizes.d * e, sizes.d_v * e, sizes.d * e, sizes.d_v * e  # noqa: E741  bytes of a row
    keys, rows = min(blocks[1], sizes.k_len), visits.tallest
    step = _step(
        sizes,
        "forward",
        loaded={
            "K": sizes.k_len * K,
            "V": sizes.k_len * V,
            "Q": visits.rows * Q,
            "O": visits.rows * O,
            "l": visits.rows * acc,
            "m": visits.rows * acc,
        },
        stored={"O": (N + visits.rows) * O, "l": (N + visits.rows) * acc, "m": (N + visits.rows) * acc},
        on_chip={
            "K": keys * K,
            "V": keys * V,
            "Q": rows * Q,
            "O": rows * O,
            "l": rows * acc,
            "m": rows * acc,
            "S": visits.largest * acc,
        },
        arrays={"O": N * O, "l": N * acc, "m": N * acc},
        flops=2 * (sizes.d + sizes.d_v) * visits.pairs,
    )
    return Cost((step,))


def flash_attention_1_backward(
    sizes: Sizes, blocks: Blocks, *, band: Band | None = None, live: Live | None = None
) -> Cost:
    """Backward of `flash1.FlashAttention1`: the forward's loops; Q, O, dO, dQ, l and m go by, and dQ goes back.

    In elements, N = q_len = k_len and d = d_v, a full mask, T_c = ceil(N / B_c), with the first filling of dQ:

        2Nd + T_c (4Nd + 2N) in     2Nd + (T_c + 1) Nd out

    >>> N, d, T_c = 1000, 64, 5
    >>> cost = flash_attention_1_backward(Sizes(N, N, d, d, element=4), (64, 200))
    >>> cost.bytes == 4 * (2 * N * d + T_c * (4 * N * d + 2 * N) + 2 * N * d + (T_c + 1) * N * d)
    True
    """
    visits = _query_visits(sizes, blocks, band or Band(), live)
    e, acc = sizes.element, sizes.acc
    key, value = sizes.d * e, sizes.d_v * e  # bytes of a row of Q, K, dQ, dK, and of V, O, dO, dV
    keys, rows = min(blocks[1], sizes.k_len), visits.tallest
    passing = {"Q": key, "O": value, "dO": value, "dQ": key, "l": acc, "m": acc}
    results = {"dQ": sizes.q_len * key, "dK": sizes.k_len * key, "dV": sizes.k_len * value}
    step = _step(
        sizes,
        "backward",
        loaded={"K": sizes.k_len * key, "V": sizes.k_len * value, **{x: visits.rows * n for x, n in passing.items()}},
        stored={**results, "dQ": results["dQ"] + visits.rows * key},
        on_chip={
            "K": keys * key,
            "V": keys * value,
            "dK": keys * sizes.d * acc,
            "dV": keys * sizes.d_v * acc,
            **{x: rows * n for x, n in passing.items()},
            "S": visits.largest * acc,
            "dP": visits.largest * acc,
        },
        arrays=results,
        flops=2 * (3 * sizes.d + 2 * sizes.d_v) * visits.pairs,
    )
    return Cost((step,))


def live_tiles(layout: Sequence[Sequence[bool]], blocks: Blocks, side: int = 128) -> Live:
    """Which (B_r, B_c) tiles lie, in part at least, on a tile of `side` x `side` that is True in `layout`.

    layout: for each tile of queries one bool a tile of keys, as in `BlockMask.from_tiles`, of one head.

    >>> live = live_tiles([[True, False], [False, True]], blocks=(64, 256))
    >>> [[live(i, j) for j in range(1)] for i in range(4)], live_tiles([[True, False]], (64, 64))(0, 2)
    ([[True], [True], [True], [True]], False)
    """
    B_r, B_c = blocks

    def live(i: int, j: int) -> bool:
        rows = layout[i * B_r // side : _ceil((i + 1) * B_r, side)]
        return any(any(row[j * B_c // side : _ceil((j + 1) * B_c, side)]) for row in rows)

    return live


@dataclass(frozen=True, slots=True)
class _Visits:
    """What an inner loop does, over all turns of the outer one."""

    rows: int  # rows of the inner side that went by, and
    pairs: int  # pairs that were worked on, in all turns together
    tallest: int  # rows of the largest inner tile
    largest: int  # pairs of the largest tile


def _query_visits(sizes: Sizes, blocks: Blocks, band: Band, live: Live | None) -> _Visits:
    """Key tiles outside, query tiles inside: those of the grid of B_r that have a pair in the band and are live."""
    B_r, B_c = blocks
    args = (*band.bounds, band.offset(sizes.q_len, sizes.k_len), sizes.q_len)
    total = pairs = tallest = largest = 0
    for j in range(_ceil(sizes.k_len, B_c)):
        keys = min(B_c, sizes.k_len - j * B_c)
        lo, hi = query_range(j * B_c, j * B_c + keys, *args)
        first, last = (lo // B_r, _ceil(hi, B_r)) if lo < hi else (0, 0)
        if live is None:
            rows = max(min(last * B_r, sizes.q_len) - first * B_r, 0)
            tall = min(B_r, rows)
        else:
            heights = [min(B_r, sizes.q_len - i * B_r) for i in range(first, last) if live(i, j)]
            rows, tall = sum(heights), max(heights, default=0)
        total, pairs = total + rows, pairs + rows * keys
        tallest, largest = max(tallest, tall), max(largest, tall * keys)
    return _Visits(total, pairs, tallest, largest)


# --- FlashAttention-2 ----------------------------------------------------------------------------------------------


def flash_attention_2(sizes: Sizes, blocks: Blocks, *, band: Band | None = None, live: Live | None = None) -> Cost:
    """Forward of `forward.flash_attention_2`; blocks from `tiling.flash_2_blocks`.

    Q is loaded and O and L are stored once. Each of Q's T_r = ceil(N / B_r) tiles sees the keys of its band go by. In
    elements, N = q_len = k_len and d = d_v, a full mask:

        Nd + 2 T_r Nd in     Nd + N out

    live: with it, a BlockMask of tiles (B_r, B_c) = (128, 128) that all heads share.

    >>> N, d, T_r = 1000, 64, 5
    >>> cost = flash_attention_2(Sizes(N, N, d, d, element=4), (200, 64))
    >>> cost.bytes == 4 * (N * d + 2 * T_r * N * d + N * d + N)
    True
    """
    visits = _key_visits(sizes, blocks, band or Band(), live)
    e, acc, N = sizes.element, sizes.acc, sizes.q_len
    B_r, B_c = _tile(sizes, blocks)
    key, value = sizes.d * e, sizes.d_v * e
    step = _step(
        sizes,
        "forward",
        loaded={"Q": N * key, "K": visits.rows * key, "V": visits.rows * value},
        stored={"O": N * value, "L": N * acc},
        on_chip={
            "Q": B_r * key,
            "K": B_c * key,
            "V": B_c * value,
            "S": _padded(B_r) * _padded(B_c) * acc,
            "O": _padded(B_r) * _padded(sizes.d_v) * acc,
        },
        arrays={"O": N * value, "L": N * acc},
        flops=2 * (sizes.d + sizes.d_v) * visits.pairs,
    )
    return Cost((step,))


def flash_attention_2_backward(
    sizes: Sizes, blocks: Blocks, *, band: Band | None = None, live: Live | None = None
) -> Cost:
    """Backward of `backward.flash_attention_2_backward`, with its own pass for delta = rowsum(dO * O).

    dQ, dK and dV are in the accumulator's dtype (casting them is the caller's). In elements, N = q_len = k_len and
    d = d_v, a full mask, T_c = ceil(N / B_c), with the first filling of dQ:

        delta: 2Nd in, N out     then: 2Nd + T_c (3Nd + 2N) in     2Nd + (T_c + 1) Nd out

    >>> N, d, T_c = 1000, 64, 5
    >>> cost = flash_attention_2_backward(Sizes(N, N, d, d, element=4), (64, 200))
    >>> cost.bytes == 4 * (2 * N * d + N + 2 * N * d + T_c * (3 * N * d + 2 * N) + 2 * N * d + (T_c + 1) * N * d)
    True
    """
    visits = _row_visits(sizes, blocks, band or Band(), live)
    e, acc, N = sizes.element, sizes.acc, sizes.q_len
    B_r, B_c = _tile(sizes, blocks)
    d, d_v = sizes.d, sizes.d_v
    delta = _step(
        sizes,
        "delta",
        loaded={"O": N * d_v * e, "dO": N * d_v * e},
        stored={"delta": N * acc},
        on_chip={"O": B_r * d_v * e, "dO": B_r * d_v * e},
        arrays={"delta": N * acc},
    )
    passing = {"Q": d * e, "dO": d_v * e, "L": acc, "delta": acc, "dQ": d * acc}  # bytes of a row
    results = {"dQ": N * d * acc, "dK": sizes.k_len * d * acc, "dV": sizes.k_len * d_v * acc}
    main = _step(
        sizes,
        "backward",
        loaded={
            "K": sizes.k_len * d * e,
            "V": sizes.k_len * d_v * e,
            **{x: visits.rows * n for x, n in passing.items()},
        },
        stored={**results, "dQ": results["dQ"] + visits.rows * d * acc},
        on_chip={
            "K": B_c * d * e,
            "V": B_c * d_v * e,
            "dK": _padded(B_c) * _padded(d) * acc,
            "dV": _padded(B_c) * _padded(d_v) * acc,
            **{x: B_r * n for x, n in passing.items()},
            "dQ": _padded(B_r) * _padded(d) * acc,
            "S": _padded(B_r) * _padded(B_c) * acc,
            "dP": _padded(B_r) * _padded(B_c) * acc,
        },
        arrays=results,
        flops=2 * (3 * d + 2 * d_v) * visits.pairs,
    )
    return Cost((delta, main))


def _key_visits(sizes: Sizes, blocks: Blocks, band: Band, live: Live | None) -> _Visits:
    """Query tiles outside, keys inside."""
    args = (*band.bounds, band.offset(sizes.q_len, sizes.k_len), sizes.k_len)
    spans = [key_range(i, min(i + blocks[0], sizes.q_len), *args) for i in range(0, sizes.q_len, blocks[0])]
    return _span_visits(spans, sizes.q_len, sizes.k_len, blocks[0], blocks[1], live)


def _row_visits(sizes: Sizes, blocks: Blocks, band: Band, live: Live | None) -> _Visits:
    """Key tiles outside, queries inside."""
    args = (*band.bounds, band.offset(sizes.q_len, sizes.k_len), sizes.q_len)
    spans = [query_range(j, min(j + blocks[1], sizes.k_len), *args) for j in range(0, sizes.k_len, blocks[1])]
    swapped = None if live is None else (lambda j, i: live(i, j))
    return _span_visits(spans, sizes.k_len, sizes.q_len, blocks[1], blocks[0], swapped)


def _span_visits(
    spans: list[tuple[int, int]], outer_len: int, inner_len: int, outer: int, inner: int, live: Live | None
) -> _Visits:
    """Spans [lo, hi) of the inner side go by, one for each outer tile; with `live`, the live tiles that they touch."""
    total = pairs = 0
    for tile, (lo, hi) in enumerate(spans):
        if lo >= hi:
            continue
        if live is None:
            length = hi - lo + lo % ALIGN
        else:
            touched = range(lo // inner, _ceil(hi, inner))
            length = sum(min(inner, inner_len - at * inner) for at in touched if live(tile, at))
        total, pairs = total + length, pairs + length * min(outer, outer_len - tile * outer)
    return _Visits(total, pairs, min(inner, inner_len), min(inner, inner_len) * min(outer, outer_len))


# --- side by side ---------------------------------------------------------------------------------------------------


def compare(
    sizes: Sizes,
    M: int,
    *,
    band: Band | None = None,
    masked: bool = False,
    dropout: bool = False,
    layout: Sequence[Sequence[bool]] | None = None,
    backward: bool = True,
) -> dict[str, Cost]:
    """The algorithms on a chip that holds M elements, each with the tiles that suit it; forward, and backward if asked.

    masked: there is a mask that spares no tile, for padding say. It costs standard attention a pass, as a Band does.
    layout: a BlockMask's tiles, as in `live_tiles`, for the entry "block-sparse", which is left out without it.

    >>> diagonal = [[i == j for j in range(8)] for i in range(8)]
    >>> for name, cost in compare(Sizes(1024, 1024, 64, 64), M=51200, layout=diagonal).items():
    ...     print(f"{name:18} {cost.bytes / 1e6:4.1f} MB, {cost.allocated / 1e6:.1f} MB allocated")
    standard           37.0 MB, 8.9 MB allocated
    standard, fused    28.6 MB, 8.9 MB allocated
    FlashAttention-1    7.5 MB, 0.5 MB allocated
    block-sparse        2.8 MB, 0.5 MB allocated
    FlashAttention-2    7.9 MB, 0.9 MB allocated
    """
    square = tiling.matmul_blocks(M, sizes.d)
    outer_keys, outer_queries = tiling.paper_blocks(M, sizes.d), tiling.flash_2_blocks(M, sizes.d)
    masked = masked or (band is not None and not band.is_full)
    costs = {}
    for name, fused in (("standard", False), ("standard, fused", True)):
        costs[name] = standard(sizes, square, fused=fused, masked=masked, dropout=dropout)
        if backward:
            costs[name] += standard_backward(sizes, square, fused=fused, masked=masked, dropout=dropout)
    live = None if layout is None else live_tiles(layout, outer_keys)
    for name, tiles in (("FlashAttention-1", None), ("block-sparse", live)):
        if name == "block-sparse" and live is None:
            continue
        costs[name] = flash_attention_1(sizes, outer_keys, band=band, live=tiles)
        if backward:
            costs[name] += flash_attention_1_backward(sizes, outer_keys, band=band, live=tiles)
    costs["FlashAttention-2"] = flash_attention_2(sizes, outer_queries, band=band)
    if backward:
        costs["FlashAttention-2"] += flash_attention_2_backward(sizes, outer_keys, band=band)
    return costs


# --- arithmetic ----------------------------------------------------------------------------------------------------


def _step(sizes: Sizes, name: str, loaded: Bytes, stored: Bytes, on_chip: Bytes, arrays: Bytes, flops: int = 0) -> Step:
    """A step from its numbers for one (batch, head)."""
    n = sizes.batch * sizes.heads
    loaded, stored, arrays = ({x: n * size for x, size in part.items()} for part in (loaded, stored, arrays))
    return Step(name, loaded, stored, on_chip, arrays, n * flops)


def _tile(sizes: Sizes, blocks: Blocks) -> Blocks:
    """The largest tile there is: short sequences do not fill one."""
    return min(blocks[0], sizes.q_len), min(blocks[1], sizes.k_len)


def _total(parts: Iterable[Bytes]) -> Bytes:
    total: Bytes = {}
    for part in parts:
        for name, size in part.items():
            total[name] = total.get(name, 0) + size
    return total


def _ceil(n: int, side: int) -> int:
    return -(-n // side)


def _padded(n: int) -> int:
    return _ceil(n, ALIGN) * ALIGN


# --- time ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class GPU:
    """A card's datasheet: bandwidth of its HBM in bytes a second, dense 16-bit matmul flops a second, on-chip bytes.

    shared: L1 and shared memory of one of the `processors` (streaming multiprocessors). measured_*: what copies and
    matmuls reached on such a card, where that was measured. l2, memory: bytes. clock: cycles a second, boosted.
    """

    name: str
    bandwidth: float
    flops: float
    shared: int
    processors: int
    source: str
    measured_bandwidth: float | None = None
    measured_flops: float | None = None
    l2: int | None = None
    memory: int | None = None
    clock: float | None = None


GPUS = {
    gpu.name: gpu
    for gpu in (
        GPU(
            "A100",
            bandwidth=1555e9,
            flops=312e12,
            shared=192 * 1024,
            processors=108,
            source="NVIDIA A100 datasheet, SXM4 40 GB; A100 architecture whitepaper (2020)",
            l2=40 << 20,
            memory=40 * 10**9,
            clock=1.41e9,
        ),
        GPU(
            "H100",
            bandwidth=3.35e12,
            flops=989e12,
            shared=256 * 1024,
            processors=132,
            source="NVIDIA H100 datasheet, SXM5 80 GB, without sparsity; H100 architecture whitepaper (2022)",
            l2=50 << 20,
            memory=80 * 10**9,
            clock=1.83e9,
        ),
        GPU(
            "H200",
            bandwidth=4.8e12,
            flops=989e12,
            shared=256 * 1024,
            processors=132,
            source="NVIDIA H200 datasheet, SXM 141 GB, without sparsity; processors as in the H100",
            measured_bandwidth=4.27e12,
            measured_flops=786e12,
            l2=50 << 20,
            memory=141 * 10**9,
            clock=1.83e9,
        ),
    )
}


def predicted_time(cost: Cost, gpu: GPU, measured: bool = False) -> float:
    """Seconds if every step is as fast as its bytes or its flops allow, whichever is slower: the roofline.

    measured: take the card's measured ceilings; ValueError if it has none.

    >>> gpt2 = Sizes(1024, 1024, 64, 64, batch=64, heads=16)
    >>> for name, cost in compare(gpt2, M=51200, masked=True, dropout=True).items():
    ...     print(f"{name:18} {cost.bytes / 1e9:4.1f} GB  {1e3 * predicted_time(cost, GPUS['A100']):4.1f} ms")
    standard           55.0 GB  35.4 ms
    standard, fused    29.3 GB  18.8 ms
    FlashAttention-1    7.7 GB   4.9 ms
    FlashAttention-2    8.1 GB   5.2 ms
    """
    bandwidth, flops = gpu.bandwidth, gpu.flops
    if measured:
        if gpu.measured_bandwidth is None or gpu.measured_flops is None:
            raise ValueError(f"measured must be False for {gpu.name}: nothing was measured on it, only on H200")
        bandwidth, flops = gpu.measured_bandwidth, gpu.measured_flops
    return sum(max(step.bytes / bandwidth, step.flops / flops) for step in cost.steps)
