"""How the partitions of a Hopper kernel talk: rings of shared-memory buffers, tiles to claim, turns.

    Ring: acquire, commit | wait, release   items 0, 1, 2, ... go round through STAGES buffers
    begin_claim, end_claim                  the next tile, from a counter that all programs share
    put_tile | take_tile                    it goes to the consumers through a Ring, too
    take_turn, pass_turn                    ping-pong: one consumer's softmax under the others' matmuls

A Ring's item number says all: its buffer is number n % STAGES, and a buffer's barriers have completed n // STAGES times
before item n. So no kernel keeps a phase.
"""

# No `from __future__ import annotations`: an aggregate checks its fields against what their annotations are.

import math

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, tma
from triton.language.core import _aggregate as aggregate  # triton.aggregate, from 3.8 on

# Triton 3.6 and 3.7 have the second names only; 3.9's raise.
tma_load = getattr(tma, "async_load", None) or tma.async_copy_global_to_shared
tma_store = getattr(tma, "async_store", None) or tma.async_copy_shared_to_global


@aggregate
class Ring:
    """STAGES buffers of BYTES between one writer and READERS partitions; `full` and `empty` are their mbarriers."""

    buffers: gl.shared_memory_descriptor  # (STAGES, ...)
    full: gl.shared_memory_descriptor
    empty: gl.shared_memory_descriptor
    STAGES: gl.constexpr
    BYTES: gl.constexpr

    @gluon.constexpr_function
    def __init__(self, buffers, full, empty, STAGES, BYTES):
        self.buffers = buffers
        self.full = full
        self.empty = empty
        self.STAGES = gl.constexpr(STAGES)
        self.BYTES = gl.constexpr(BYTES)

    @gluon.jit
    def acquire(self, n):
        """The writer: item n's buffer, once every reader has released the item that was in it."""
        mbarrier.wait(self.empty.index(n % self.STAGES), (n // self.STAGES & 1) ^ 1)
        return self.buffers.index(n % self.STAGES)

    @gluon.jit
    def commit(self, n):
        """The writer: item n is in its buffer."""
        mbarrier.arrive(self.full.index(n % self.STAGES), count=1)

    @gluon.jit
    def load(self, n, descriptor, at):
        """The writer: acquire, and a TMA load, which commits when its bytes (zeros outside the tensor) are there."""
        buffer = self.acquire(n)
        full = self.full.index(n % self.STAGES)
        mbarrier.expect(full, self.BYTES)
        tma_load(descriptor, at, full, buffer)

    @gluon.jit
    def wait(self, n):
        """A reader: item n's buffer, once it is committed."""
        mbarrier.wait(self.full.index(n % self.STAGES), n // self.STAGES & 1)
        return self.buffers.index(n % self.STAGES)

    @gluon.jit
    def release(self, n):
        """A reader: it has read item n."""
        mbarrier.arrive(self.empty.index(n % self.STAGES), count=1)

    @gluon.jit
    def skip(self, n):
        """A reader: it needs no item n. It waits all the same: a release ahead of time would count for an older item."""
        self.wait(n)
        self.release(n)


@gluon.jit
def ring_of(buffers, READERS: gl.constexpr):
    """A Ring of the buffers (STAGES, ...)."""
    STAGES: gl.constexpr = buffers.shape[0]
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(STAGES):
        mbarrier.init(full.index(i), count=1)
        mbarrier.init(empty.index(i), count=READERS)
    return Ring(buffers, full, empty, STAGES, _bytes_of_one(buffers.dtype, buffers.shape))


@gluon.constexpr_function
def _bytes_of_one(dtype, shape):
    return dtype.primitive_bitwidth // 8 * math.prod(shape[1:])


# ---- tiles -----------------------------------------------------------------------------------------------------------


@gluon.jit
def put_tile(tiles, n, row, bh):
    """The producer tells the consumers the n-th tile of this program: tile `row` of the queries of head bh; -1: no more."""
    layout: gl.constexpr = gl.BlockedLayout([1], [32], [gl.num_warps()], [0])
    both = (row.to(gl.int64) << 32) | bh.to(gl.int64)
    tiles.acquire(n).store(gl.full([1], 0, gl.int64, layout) + both)
    tiles.commit(n)


@gluon.jit
def take_tile(tiles, n):
    """(row, bh) of the n-th tile."""
    layout: gl.constexpr = gl.BlockedLayout([1], [32], [gl.num_warps()], [0])
    both = gl.max(tiles.wait(n).load(layout), 0)
    tiles.release(n)
    return uniform((both >> 32).to(gl.int32)), uniform(both.to(gl.int32))


@gluon.jit
def uniform(x):
    """x, which all threads have, in the eyes of ptxas too: under a branch that it thinks divergent it lets no wgmma overlap."""
    return gl.inline_asm_elementwise(
        "shfl.sync.idx.b32 $0, $1, 0, 31, 0xffffffff;", "=r,r", [x], dtype=gl.int32, is_pure=False, pack=1
    )


@gluon.jit
def begin_claim(counter):
    """Count one tile more as taken. The number is with lane 0 alone, and on its way: `end_claim` waits for it."""
    return gl.inline_asm_elementwise(
        "{ .reg .pred p; .reg .b32 l; mov.u32 l, %laneid; setp.eq.u32 p, l, 0; mov.b32 $0, 0;"
        " @p atom.global.relaxed.gpu.add.u32 $0, [$1], 1; }",
        "=&r,l", [counter.to(gl.int64)], dtype=gl.int32, is_pure=False, pack=1,
    )  # fmt: skip


@gluon.jit
def end_claim(claim, counter, total):
    """The tile claimed; `total` or more: there is none left.

    Every program begins with a tile, claims until it gets none, and so all of them claim `total` times: who makes the
    last claim sets the counter back to 0 for the next launch.
    """
    taken = gl.inline_asm_elementwise(
        "{ .reg .pred p; .reg .b32 l, t; mov.u32 l, %laneid; sub.u32 t, $3, 1; setp.eq.u32 p, l, 0;"
        " setp.eq.and.u32 p, $1, t, p; @p st.global.relaxed.gpu.u32 [$2], 0;"
        " shfl.sync.idx.b32 $0, $1, 0, 31, 0xffffffff; }",
        "=&r,r,l,r", [claim, counter.to(gl.int64), total], dtype=gl.int32, is_pure=False, pack=1,
    )  # fmt: skip
    return taken + gl.num_programs(0)


# ---- ping-pong -------------------------------------------------------------------------------------------------------


@gluon.jit
def take_turn(consumer: gl.constexpr):
    """Wait until the consumer before has passed the turn."""
    _instruction(_barrier("sync", consumer))


@gluon.jit
def pass_turn(consumer: gl.constexpr):
    """To `consumer`."""
    _instruction(_barrier("arrive", consumer))


@gluon.constexpr_function
def _barrier(what, consumer):
    """One named barrier a consumer: its own 128 threads and the 128 before meet there. Triton uses the lowest ones."""
    return f"bar.{what} {8 + consumer}, 256; mov.u32 $0, 0;"


@gluon.jit
def _instruction(asm: gl.constexpr):
    """An instruction without operands, by every thread of the partition, where it stands."""
    gl.inline_asm_elementwise(asm, "=r", [], dtype=gl.int32, is_pure=False, pack=1)


@gluon.jit
def stay_before(x):
    """What x needs is computed before what follows: ptxas moves a wait for wgmma up, and nothing overlaps then.

    A store that never happens, x being >= 0, but that ptxas moves neither above x nor below a wait.
    """
    gl.inline_asm_elementwise(
        "{ .reg .pred p; setp.lt.f32 p, $2, 0fBF800000; setp.lt.or.f32 p, $3, 0fBF800000, p; mov.b32 $0, 0;"
        " mov.b32 $1, 0; @p st.volatile.shared.f32 [$0], $2; }",
        "=&r,=&r,f,f", [x], dtype=gl.int32, is_pure=False, pack=2,
    )  # fmt: skip


@gluon.jit
def store_by_tma(tile, buffer, descriptor, at):
    """Store a tile of registers by TMA, which clips it at the tensor's end, through `buffer`; without waiting for it."""
    buffer.reshape(tile.shape).store(tile)
    fence_async_shared()
    tma_store(descriptor, at, buffer)


@gluon.jit
def wait_for_stores():
    """Until this partition's stores by TMA have read their buffers."""
    tma.store_wait(0)
