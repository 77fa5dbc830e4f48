"""Bytes that cross between DRAM and a GPU's L2 cache, in closed form: what a hardware counter sees of the kernels.

`io_model` has two levels, as the paper has: each load is HBM's. On a GPU a load goes to the L2 first, which lies
between all processors and the DRAM, holds tens of megabytes, and writes back what was written to it only when the room
is needed. Three things follow for each array of a kernel:

    first touch   Its bytes come from DRAM once. The L2 is empty when a kernel begins, as a profiler that flushes it
                  leaves it (`Cache.flushed`), or holds what the kernels before it left.
    again         A byte asked for again comes from the L2 if less than the L2 holds was touched in between: its `span`.
                  Of a larger span a share L2 / span is still there (lines are evicted in no strict order, so the edge
                  is not sharp), and the rest is read again. A sum that is added to, load and store, is no different.
    stores        Each byte written goes to DRAM once, and not before it is evicted. At the end of a kernel the last
                  bytes that it touched are in the L2; as many of them as its traffic has stores are dirty, and are
                  nobody's traffic: the counter stops before they are written back. `flushed=False` counts whole calls,
                  which something else follows that evicts them; then every byte is counted.

What a span is, kernel by kernel:

    matmuls       Of standard attention a tile of S needs rows of Q and K, which for one head are small. What passes
                  between two uses of a row are the operands of the heads at work, and a tile of S of each program.
    elementwise   Each byte once.
    forward       FlashAttention's programs at work at a time belong to a few heads, that of the first to that of the
                  last, and walk the keys of those from one end to the other. So between two uses of a key those heads'
                  K and V pass by. Of grouped heads those that share a K and V are neighbours: one set serves them.
    backward      The same with Q, dO and the rows' statistics for a tile of keys that stays (dK, dV), with K and V for
                  a tile of queries that stays (dQ). Where one kernel does both, dQ is a sum in fp32 that each tile of
                  keys adds to: a kernel before it writes zeros, one behind it reads the sums, and in between it passes
                  by with Q and dO. The additions are made in the L2, and read it first: DRAM sees it once in and once
                  out.

With no L2 at all (0 bytes) every load is DRAM's, and the figures are those of `io_model`; with an endless one each
array is moved once.

>>> sizes = Sizes(4096, 4096, 128, 128, batch=4, heads=16)
>>> (forward,) = flash_forward(sizes, (128, 128), Machine(programs=132))
>>> for size in 0, 50 << 20, 1 << 40:
...     seen = traffic([forward], Cache(size))
...     print(f"{seen.reads / 2**20:.0f} MiB in, {seen.writes / 2**20:.0f} MiB out")
4160 MiB in, 65 MiB out
192 MiB in, 52 MiB out
192 MiB in, 0 MiB out

Source: NVIDIA H100 architecture whitepaper (2022) for the L2; Nsight Compute's documentation, "Cache Control", for what
a profiler does to it; FlashAttention (Dao et al., 2022), Theorem 2, for the bytes that are asked for.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from ..mask import Band
from . import io_model
from .io_model import Blocks, Sizes, Step

STATISTIC = 4  # bytes of a row's lse or delta


@dataclass(frozen=True, slots=True)
class Cache:
    """An L2 of so many bytes. flushed: it is emptied before each kernel, and what stays in it is not counted."""

    size: int
    flushed: bool = True

    def missed(self, span: float) -> float:
        """The share of what is touched again, after `span` bytes of other things, that is not there any more."""
        return max(0.0, 1.0 - self.size / span) if span > 0 else 0.0


@dataclass(frozen=True, slots=True)
class Machine:
    """How many programs (thread blocks) are at work at a time, and how many heads the launch order interleaves."""

    programs: int
    together: int = 1

    def heads_at_work(self, tiles: int, heads: int) -> int:
        """Of `heads` with `tiles` programs each: from the first program's head to the last one's."""
        return min(heads, max(self.together, -(-self.programs // max(tiles, 1))))


@dataclass(frozen=True, slots=True)
class Stream:
    """One array in one kernel. size: bytes of it that are touched; loads, stores: bytes asked for, size or more, or
    0."""

    size: int
    loads: int = 0
    stores: int = 0
    span: int = 0  # bytes of all arrays that pass between two touches of a byte

    @property
    def once(self) -> int:
        """Bytes moved if every touch after the first were free."""
        return (self.size if self.loads else 0) + (self.size if self.stores else 0)


@dataclass(frozen=True, slots=True)
class Kernel:
    """A kernel's streams by the array's name."""

    name: str
    streams: dict[str, Stream]

    @property
    def once(self) -> int:
        return sum(stream.once for stream in self.streams.values())

    @property
    def asked(self) -> int:
        """Bytes that processors ask of the L2, in both directions."""
        return sum(stream.loads + stream.stores for stream in self.streams.values())


@dataclass(frozen=True, slots=True)
class Traffic:
    """DRAM's bytes, of each kernel in turn."""

    kernels: tuple[tuple[str, float, float], ...] = field(default=())  # name, read, written

    @property
    def reads(self) -> float:
        return sum(read for _, read, _ in self.kernels)

    @property
    def writes(self) -> float:
        return sum(written for _, _, written in self.kernels)

    @property
    def bytes(self) -> float:
        return self.reads + self.writes


def traffic(kernels: Sequence[Kernel], cache: Cache) -> Traffic:
    """What DRAM sees of kernels that run one after the other."""
    seen = []
    for at, kernel in enumerate(kernels):
        read = written = stored = 0.0
        for name, stream in kernel.streams.items():
            missed = cache.missed(stream.span)
            if stream.loads:
                first = stream.size * (1.0 if cache.flushed else _first_missed(kernels, at, name, cache))
                read += first + (stream.loads - stream.size) * missed
            if stream.stores:
                stored += stream.size
                written += stream.size + (stream.stores - stream.size) * missed
        if cache.flushed and stored:
            written -= min(stored, cache.size * stored / kernel.once)
        elif not cache.flushed:
            written -= _written_again(kernels, at, cache)
        seen.append((kernel.name, read, written))
    return Traffic(tuple(seen))


def _distance(kernels: Sequence[Kernel], before: int, at: int) -> float:
    """Bytes that pass between touching a byte in one kernel and in a later one: on the average half of each."""
    return (kernels[before].once + kernels[at].once) / 2 + sum(k.once for k in kernels[before + 1 : at])


def _first_missed(kernels: Sequence[Kernel], at: int, name: str, cache: Cache) -> float:
    """The share of an array that no kernel before this one left in the L2."""
    for before in reversed(range(at)):
        if name in kernels[before].streams:
            return cache.missed(_distance(kernels, before, at))
    return 1.0


def _written_again(kernels: Sequence[Kernel], at: int, cache: Cache) -> float:
    """Bytes that this kernel writes and a later one overwrites, or adds to, while they are still in the L2."""
    again = 0.0
    for name, stream in kernels[at].streams.items():
        later = [n for n in range(at + 1, len(kernels)) if name in kernels[n].streams]
        if stream.stores and later and kernels[later[0]].streams[name].stores:
            again += stream.size * (1.0 - cache.missed(_distance(kernels, at, later[0])))
    return again


# --- standard attention --------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Eager:
    """How plain torch passes over N x N: a kernel each. mask: one of bools that all heads share, N x N bytes, or none.

    dropout writes a bool a pair beside its result, and the backward reads it.
    """

    mask: bool = False
    dropout: bool = False


def standard(sizes: Sizes, blocks: Blocks, machine: Machine, options: Eager | None = None) -> list[Kernel]:
    """Forward: scores, scale, mask, softmax, dropout, output, each out of place. blocks: the matmuls' tiles of S."""
    options = options or Eager()
    cost = io_model.standard(sizes, blocks, masked=options.mask, dropout=options.dropout)
    return [_eager(step, sizes, blocks, machine) for step in cost.steps]


def standard_backward(sizes: Sizes, blocks: Blocks, machine: Machine, options: Eager | None = None) -> list[Kernel]:
    """Backward, in autograd's order: dV, dP, dropout, P * dP, softmax, mask, scale, dQ, dK.

    Of a softmax's backward, P * (dP - rowsum(P * dP)), torch writes the product with a kernel of its own, which
    `io_model` has fused.
    """
    options = options or Eager()
    cost = io_model.standard_backward(sizes, blocks, masked=options.mask, dropout=options.dropout)
    kernels = [_eager(step, sizes, blocks, machine) for step in cost.steps]
    matrix = sizes.batch * sizes.heads * sizes.q_len * sizes.k_len * sizes.element
    at = next(n for n, kernel in enumerate(kernels) if kernel.name == "softmax_backward")
    streams = {"P dP" if name == "dP" else name: stream for name, stream in kernels[at].streams.items()}
    product = Kernel("P dP", {"P": _in(matrix), "dP": _in(matrix), "P dP": _out(matrix)})
    return [*kernels[:at], product, Kernel("softmax_backward", streams), *kernels[at + 1 :]]


def _eager(step: Step, sizes: Sizes, blocks: Blocks, machine: Machine) -> Kernel:
    heads, pairs = sizes.batch * sizes.heads, sizes.q_len * sizes.k_len
    matrix = heads * pairs * sizes.element
    streams = {}
    for name in {**step.loaded, **step.stored}:
        loads, stores = step.loaded.get(name, 0), step.stored.get(name, 0)
        size = _whole(sizes, name) or matrix
        if loads and stores:  # out of place: from one buffer to another
            streams[f"new {name}"] = _out(size)
            stores = 0
        streams[name] = Stream(size, loads, stores, _matmul_span(sizes, blocks, machine) if loads > size else 0)
    if step.name.startswith("mask"):
        streams["mask"] = Stream(pairs, heads * pairs, span=2 * pairs * sizes.element)  # a head's S, in and out
    if step.name.startswith("dropout"):
        bools = heads * pairs
        streams["kept"] = Stream(bools, stores=bools) if step.name == "dropout" else Stream(bools, loads=bools)
    return Kernel(step.name, streams)


def _matmul_span(sizes: Sizes, blocks: Blocks, machine: Machine) -> int:
    """Between two uses of an operand's row: the operands of the heads at work, and a block of N x N of each program."""
    tiles = -(-sizes.q_len // blocks[0])
    heads = machine.heads_at_work(tiles, sizes.batch * sizes.heads)
    operands = (sizes.q_len + sizes.k_len) * max(sizes.d, sizes.d_v) * sizes.element
    return heads * operands + machine.programs * blocks[0] * blocks[1] * sizes.element


def _whole(sizes: Sizes, name: str) -> int | None:
    """Bytes of an array of N x d, in all heads; None for one of N x N."""
    width = {"Q": sizes.d, "K": sizes.d, "dQ": sizes.d, "dK": sizes.d}
    width |= {"V": sizes.d_v, "O": sizes.d_v, "dV": sizes.d_v, "dO": sizes.d_v}
    if name not in width:
        return None
    length = sizes.k_len if name in ("K", "V", "dK", "dV") else sizes.q_len
    return sizes.batch * sizes.heads * length * width[name] * sizes.element


# --- FlashAttention ------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Flash:
    """Bytes of a problem's arrays. K and V have `kv_heads` heads; sizes.heads are those of Q."""

    sizes: Sizes
    kv_heads: int
    band: Band

    @property
    def q_heads(self) -> int:
        return self.sizes.batch * self.sizes.heads

    @property
    def group(self) -> int:
        return self.sizes.heads // self.kv_heads

    def of_queries(self, width: int, element: int | None = None) -> int:
        return self.q_heads * self.sizes.q_len * width * (element or self.sizes.element)

    def of_keys(self, width: int) -> int:
        return self.sizes.batch * self.kv_heads * self.sizes.k_len * width * self.sizes.element

    @property
    def statistics(self) -> int:
        return self.of_queries(1, STATISTIC)

    def passing_keys(self, blocks: Blocks, machine: Machine) -> tuple[dict[str, int], int]:
        """(K's and V's bytes that tiles of blocks[0] queries ask for, all of them; the span)."""
        step = io_model.flash_attention_2(self.sizes, blocks, band=self.band).steps[0]
        tiles = -(-self.sizes.q_len // blocks[0])
        heads = machine.heads_at_work(tiles, self.q_heads)
        sets = min(-(-heads // self.group) + (heads % self.group > 1), self.sizes.batch * self.kv_heads)
        a_set = self.sizes.k_len * (self.sizes.d + self.sizes.d_v) * self.sizes.element
        return {x: step.loaded[x] for x in ("K", "V")}, sets * a_set

    def passing_queries(self, blocks: Blocks, machine: Machine, more: int = 0) -> tuple[dict[str, int], int]:
        """(bytes of Q, dO, L, delta and dQ that tiles of blocks[1] keys ask for; the span, with `more` bytes a row)."""
        step = io_model.flash_attention_2_backward(self.sizes, blocks, band=self.band).steps[1]
        tiles = -(-self.sizes.k_len // blocks[1])
        sets = machine.heads_at_work(tiles, self.sizes.batch * self.kv_heads)
        row = (self.sizes.d + self.sizes.d_v) * self.sizes.element + 2 * STATISTIC + more
        return {x: step.loaded[x] for x in ("Q", "dO", "L", "delta", "dQ")}, sets * self.group * self.sizes.q_len * row

    def keys_stay(self, asked: dict[str, int], span: int) -> dict[str, Stream]:
        """K and V in and dK and dV out, once; Q, dO and the statistics pass by, `asked` and `span` as above."""
        d, d_v = self.sizes.d, self.sizes.d_v
        return {
            "K": _in(self.of_keys(d)),
            "V": _in(self.of_keys(d_v)),
            "Q": _again(self.of_queries(d), asked["Q"], span),
            "dO": _again(self.of_queries(d_v), asked["dO"], span),
            "statistics": _again(2 * self.statistics, asked["L"] + asked["delta"], span),
            "dK": _out(self.of_keys(d)),
            "dV": _out(self.of_keys(d_v)),
        }


def flash_forward(
    sizes: Sizes, blocks: Blocks, machine: Machine, *, kv_heads: int | None = None, band: Band | None = None
) -> list[Kernel]:
    """Tiles of blocks[0] queries stay, keys pass by: Q in, O and lse out, once each; K and V for each tile.

    kv_heads: those of K and V, where heads are grouped.
    """
    of = _Flash(sizes, kv_heads or sizes.heads, band or Band())
    asked, span = of.passing_keys(blocks, machine)
    streams = {
        "Q": _in(of.of_queries(sizes.d)),
        "K": _again(of.of_keys(sizes.d), asked["K"], span),
        "V": _again(of.of_keys(sizes.d_v), asked["V"], span),
        "O": _out(of.of_queries(sizes.d_v)),
        "L": _out(of.statistics),
    }
    return [Kernel("forward", streams)]


def split_backward(
    sizes: Sizes,
    dq: Blocks,
    dkdv: Blocks,
    machine: Machine,
    *,
    kv_heads: int | None = None,
    band: Band | None = None,
) -> list[Kernel]:
    """Two kernels, no atomics. dq, dkdv: their blocks (queries, keys).

    dq      Q, dO, O and lse in once, K and V for each tile of queries; dQ and the statistics out
    dkdv    K and V in once, Q, dO and the statistics for each tile of keys; dK and dV out
    """
    of = _Flash(sizes, kv_heads or sizes.heads, band or Band())
    keys, key_span = of.passing_keys(dq, machine)
    queries, query_span = of.passing_queries(dkdv, machine)
    d, d_v = sizes.d, sizes.d_v
    first = {
        **{x: _in(of.of_queries(n)) for x, n in (("Q", d), ("dO", d_v), ("O", d_v))},
        "L": _in(of.statistics),
        "K": _again(of.of_keys(d), keys["K"], key_span),
        "V": _again(of.of_keys(d_v), keys["V"], key_span),
        "dQ": _out(of.of_queries(d)),
        "statistics": _out(2 * of.statistics),
    }
    return [Kernel("dq", first), Kernel("dkdv", of.keys_stay(queries, query_span))]


def fused_backward(
    sizes: Sizes,
    blocks: Blocks,
    machine: Machine,
    *,
    width: int | None = None,
    kv_heads: int | None = None,
    band: Band | None = None,
) -> list[Kernel]:
    """One kernel makes all three, between two small ones. width: columns of dQ's accumulator, d or more.

    prepare    O, dO and lse in; the statistics, and the accumulator's zeros, out
    backward   K and V in once; Q, dO and the statistics for each tile of keys, and dQ added to; dK and dV out
    convert    the accumulator in, dQ out
    """
    of = _Flash(sizes, kv_heads or sizes.heads, band or Band())
    d, d_v, acc = sizes.d, sizes.d_v, sizes.acc
    columns = width or d
    asked, span = of.passing_queries(blocks, machine, more=columns * acc)
    sums, added = of.of_queries(columns, acc), asked["dQ"] * columns // d
    prepare = {
        "O": _in(of.of_queries(d_v)),
        "dO": _in(of.of_queries(d_v)),
        "L": _in(of.statistics),
        "statistics": _out(2 * of.statistics),
        "sums": _out(sums),
    }
    main = {**of.keys_stay(asked, span), "sums": Stream(min(sums, added), added, added, span)}
    convert = {"sums": _in(sums), "dQ": _out(of.of_queries(d))}
    return [Kernel("prepare", prepare), Kernel("backward", main), Kernel("convert", convert)]


def _in(size: int) -> Stream:
    return Stream(size, loads=size)


def _out(size: int) -> Stream:
    return Stream(size, stores=size)


def _again(size: int, asked: int, span: int) -> Stream:
    """An array that passes by: under a window some of it may never."""
    return Stream(min(size, asked), loads=asked, span=span)
