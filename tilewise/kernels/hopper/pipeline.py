"""How the partitions of a Hopper kernel talk: rings of shared-memory buffers, tiles to claim, turns.

    Ring: acquire, commit | wait, release   items 0, 1, 2, ... go round through STAGES buffers
    begin_claim, end_claim                  the next tile, from a counter that all programs share
    put | number                            it goes to the consumers through a Ring, too, as a few integers
    take_turn, pass_turn                    ping-pong: one consumer's softmax under the others' matmuls
    await_turn, end_turn                    programs that change one place in memory one after the other

A Ring's item number says all: its buffer is number n % STAGES, and a buffer's barriers have completed n // STAGES times
before item n. So no kernel keeps a phase.
"""

# No `from __future__ import annotations`: an aggregate checks its fields against what their annotations are.

import math

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language._core import _unwrap_if_constexpr, builtin
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, tma
from triton.language.core import _aggregate as aggregate  # triton.aggregate, from 3.8 on

# Triton 3.6 and 3.7 have the second names only; 3.9's raise.
tma_load = getattr(tma, "async_load", None) or tma.async_copy_global_to_shared
tma_store = getattr(tma, "async_store", None) or tma.async_copy_shared_to_global


@builtin
def _reduce_add(descriptor, at, buffer, _semantic=None):
    """For Triton 3.6 and 3.7, which have the instruction and no name for it."""
    from triton._C.libtriton import ir

    at = _semantic._convert_to_ir_values(at, require_i64=False)
    _semantic.builder.create_async_tma_reduce(ir.DESCRIPTOR_REDUCE_KIND.ADD, descriptor.handle, at, buffer.handle)


@builtin
def seen_as(buffer, shape, layout, _semantic=None):
    """A buffer's memory in another shape of that size. Triton's method of a buffer has two names."""
    shape = [_unwrap_if_constexpr(side) for side in shape]
    return _semantic.memdesc_reinterpret(buffer, buffer.dtype, shape, _unwrap_if_constexpr(layout))


tma_add = getattr(tma, "async_atomic_add", None) or _reduce_add


@aggregate
class Ring:
    """STAGES buffers of BYTES between one writer and READERS partitions; `full` and `empty` are their mbarriers."""

    buffers: gl.shared_memory_descriptor  # (STAGES, ...)
    others: gl.tuple  # of a tile in parts those of its other ones
    full: gl.shared_memory_descriptor
    empty: gl.shared_memory_descriptor
    STAGES: gl.constexpr
    BYTES: gl.constexpr

    @gluon.constexpr_function
    def __init__(self, buffers, others, full, empty):
        self.buffers = buffers
        self.others = others
        self.full = full
        self.empty = empty
        self.STAGES = gl.constexpr(buffers.shape[0])
        self.BYTES = gl.constexpr(_bytes_of_one(buffers) + sum(_bytes_of_one(part) for part in others))

    @gluon.jit
    def parts(self, n):
        """Item n's buffers, one for each part."""
        return self.place(n % self.STAGES)

    @gluon.jit
    def place(self, n):
        """The n-th buffers."""
        first = (self.buffers,)
        return [part.index(n) for part in first + self.others]

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
        full = self.expect(n, self.BYTES)
        tma_load(descriptor, at, full, self.buffers.index(n % self.STAGES))

    @gluon.jit
    def load_parts(self, n, descriptor, at):
        """The writer: the same of a tile in parts, by a load for each chunk."""
        full = self.expect(n, self.BYTES)
        load_chunks(self.parts(n), descriptor, at, full)

    @gluon.jit
    def expect(self, n, BYTES: gl.constexpr):
        """The writer: acquire, for TMA loads of BYTES together. They are to name the barrier, and then commit."""
        self.acquire(n)
        full = self.full.index(n % self.STAGES)
        mbarrier.expect(full, BYTES)
        return full

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
    return ring_of_parts((buffers,), READERS)


@gluon.jit
def ring_of_parts(parts, READERS: gl.constexpr):
    """A Ring of tiles in parts, the buffers (STAGES, ...) of each."""
    STAGES: gl.constexpr = parts[0].shape[0]
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(STAGES):
        mbarrier.init(full.index(i), count=1)
        mbarrier.init(empty.index(i), count=READERS)
    return Ring(parts[0], parts[1:], full, empty)


@gluon.jit
def load_chunks(parts, descriptor, at, full):
    """A TMA load for each chunk of a tile; `full` hears of its bytes."""
    chunks = chunks_of(parts, descriptor)
    for c in gl.static_range(len(chunks)):
        tma_load(descriptor, beside(at, c * descriptor.block_shape[-1]), full, chunks[c])


@gluon.jit
def beside(at, columns: gl.constexpr):
    """A place so many columns further on."""
    column = [at[-1] + columns]
    return at[:-1] + column


@gluon.jit
def chunks_of(parts, descriptor):
    """A tile's memory as the blocks that the descriptor loads and stores, from left to right."""
    found: gl.tuple = ()
    for n in gl.static_range(len(parts)):
        found += chunks_of_part(parts[n], descriptor)
    return found


@gluon.jit
def chunks_of_part(part, descriptor):
    """A swizzled matrix has its first columns in all rows first, as many as the swizzle's 32, 64 or 128 bytes; then the next."""
    CHUNKS: gl.constexpr = part.shape[-1] // descriptor.block_shape[-1]
    if CHUNKS == 1:
        return (part,)
    else:
        found: gl.tuple = ()
        chunks = seen_as(part, stacked(CHUNKS, descriptor.block_shape), descriptor.layout)
        for n in gl.static_range(CHUNKS):
            found += (chunks.index(n),)
        return found


@gluon.constexpr_function
def stacked(n, block):
    """The shape of n buffers of a block."""
    return [n, *block]


@gluon.jit
def matrix(buffer):
    """A block of one head, (..., rows, columns) in shared memory, as (rows, columns)."""
    ROWS: gl.constexpr = buffer.shape[len(buffer.shape) - 2]
    COLUMNS: gl.constexpr = buffer.shape[len(buffer.shape) - 1]
    return buffer.reshape([ROWS, COLUMNS])


@gluon.constexpr_function
def _bytes_of_one(buffers):
    return buffers.dtype.primitive_bitwidth // 8 * math.prod(buffers.shape[1:])


# ---- tiles -----------------------------------------------------------------------------------------------------------


@gluon.jit
def put(buffer, at: gl.constexpr, numbers):
    """int32 numbers into places `at`, at + 1, ... of an item of a Ring."""
    layout: gl.constexpr = gl.BlockedLayout([1], [32], [gl.num_warps()], [0])
    for i in gl.static_range(len(numbers)):
        buffer.slice(at + i, 1).store(gl.full([1], 0, gl.int32, layout) + numbers[i])


@gluon.jit
def number(buffer, at: gl.constexpr):
    """The number in place `at`."""
    layout: gl.constexpr = gl.BlockedLayout([1], [32], [gl.num_warps()], [0])
    return uniform(gl.max(buffer.slice(at, 1).load(layout), 0))


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
def meet():
    """Both of two consumers wait here for each other."""
    _instruction("bar.sync 8, 256; mov.u32 $0, 0;")


@gluon.jit
def _instruction(asm: gl.constexpr):
    """An instruction without operands, by every thread of the partition, where it stands."""
    gl.inline_asm_elementwise(asm, "=r", [], dtype=gl.int32, is_pure=False, pack=1)


# ---- turns in memory -------------------------------------------------------------------------------------------------


@gluon.jit
def await_turn(counter, turn):
    """Until `turn` turns have ended by a counter in memory. What was done in them comes before what follows, by TMA too."""
    gl.inline_asm_elementwise(
        "{ .reg .pred p; .reg .b32 ended; AGAIN: ld.acquire.gpu.global.u32 ended, [$1]; setp.ne.u32 p, ended, $2;"
        " @p bra AGAIN; fence.proxy.async.global; mov.b32 $0, 0; }",
        "=r,l,r", [counter.to(gl.int64), turn], dtype=gl.int32, is_pure=False, pack=1,
    )  # fmt: skip


@gluon.jit
def end_turn(counter):
    """One warp: its turn ends when its stores and adds by TMA are done: not only read, as `wait_for_stores` has it, but in memory.

    Whichever lane began them has seen them done before lane 0, after all lanes, counts the turn.
    """
    gl.inline_asm_elementwise(
        "{ .reg .pred p; .reg .b32 l; cp.async.bulk.wait_group 0; bar.warp.sync 0xffffffff; mov.u32 l, %laneid;"
        " setp.eq.u32 p, l, 0; @p red.release.gpu.global.add.u32 [$1], 1; mov.b32 $0, 0; }",
        "=r,l", [counter.to(gl.int64)], dtype=gl.int32, is_pure=False, pack=1,
    )  # fmt: skip


# ---- registers -------------------------------------------------------------------------------------------------------


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
def stay_behind(n):
    """What follows is not begun before: ptxas would, and spill for it. n >= 0.

    A loop that never repeats, as in `computed`.
    """
    gl.inline_asm_elementwise(
        "{ .reg .pred p, q; AGAIN: setp.lt.s32 p, $1, 0; vote.sync.any.pred q, p, 0xffffffff; @q bra AGAIN;"
        " mov.b32 $0, 0; }",
        "=r,r", [n], dtype=gl.int32, is_pure=False, pack=1,
    )  # fmt: skip


@gluon.jit
def computed(x):
    """x (64, N) of 16-bit numbers >= 0, all of it computed before what follows, as by `stay_before`.

    A loop that never repeats, no two such numbers being 0xdeadbeef, and that ptxas moves nothing across.
    """
    N: gl.constexpr = x.shape[1] // 4  # registers of a thread, two numbers in each
    return gl.inline_asm_elementwise(
        _computed(N), _outputs_and_inputs(N), [x], dtype=x.dtype, is_pure=False, pack=2 * N
    )


@gluon.constexpr_function
def _computed(n):
    moves = " ".join(f"mov.b32 ${i}, ${n + i};" for i in range(n))
    return (
        f"{{ .reg .pred p, q; AGAIN: setp.eq.b32 p, ${2 * n - 1}, 0xdeadbeef; vote.sync.any.pred q, p, 0xffffffff;"
        f" @q bra AGAIN; {moves} }}"
    )


@gluon.constexpr_function
def _outputs_and_inputs(n):
    return ",".join(["=r"] * n + ["r"] * n)


# ---- stores ----------------------------------------------------------------------------------------------------------


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
