"""The steps of the Hopper backward's consumers (`backward.step`), in the paper's names; tiles of scores are (keys, queries).

Also how a share of dQ lies in the fp32 accumulator (`put_share`), which `backward_rows.convert_kernel` undoes.
"""

# No `from __future__ import annotations`, as in `backward`.

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, warpgroup_mma, warpgroup_mma_wait

from .dropout import kept
from .pipeline import computed, matrix
from .steps import INF, accumulator, bits_mask, numbers, tanh
from .walk import PIECE


@gluon.jit
def mask(S, first, i0, call, O: gl.constexpr):
    """-inf where a key of the piece at `first` is not seen by a query of the piece at i0; compared as in the forward."""
    S4 = S.reshape([PIECE, PIECE // 8, 4, 2])
    j = first + numbers(0, S4)
    a = numbers(1, S4)
    lane = numbers(2, S4)
    b = numbers(3, S4)
    on = j - call.diagonal - i0 - 2 * lane  # the query whose diagonal key it is
    begin = gl.where(j < call.k_len, on - call.right, PIECE)
    seen = 8 * a + b >= begin
    if O.LEFT:
        seen = seen & (8 * a + b <= on + call.left)
    S4 = gl.where(seen, S4, -INF)
    return gl.convert_layout(S4.reshape([PIECE, PIECE]), S.type.layout, assert_trivial=True)


@gluon.jit
def queries(rings, at, piece: gl.constexpr):
    """(Q, dO, -L, -delta) of a piece of the block in place `at`."""
    q = [matrix(part).slice(PIECE * piece, PIECE, dim=0) for part in rings.q.place(at)]
    do = [matrix(part.index(at)).slice(PIECE * piece, PIECE, dim=0) for part in rings.do]
    layout: gl.constexpr = gl.SliceLayout(0, accumulator(PIECE))
    ROWS: gl.constexpr = rings.statistics.shape[3]
    both = rings.statistics.index(at).reshape([2 * ROWS])
    L = both.slice(PIECE * piece, PIECE, dim=0).load(layout)
    delta = both.slice(ROWS + PIECE * piece, PIECE, dim=0).load(layout)
    return q, do, L, delta


@gluon.jit
def in_registers(parts):
    """A tile as the first operand of wgmmas, which are bound by shared memory's bandwidth where they read both there."""
    found: gl.tuple = ()
    for n in gl.static_range(len(parts)):
        found += (matrix(parts[n]).load(gl.DotOperandLayout(0, accumulator(PIECE), 2)),)
    return found


@gluon.jit
def begin_with(row):
    """An accumulator (keys, queries) that begins with a number for each query."""
    zero = gl.zeros([PIECE, PIECE], gl.float32, accumulator(PIECE))
    return gl.broadcast(row[None, :], zero)[0]


@gluon.jit
def turned_product(a, b, S):
    """S + A B^T of two tiles, B's in shared memory; asynchronous, a matmul a part.

    S: None where it is begun while others run, for ptxas would let none of its registers be written then.
    """
    FRESH: gl.constexpr = S is None
    if FRESH:
        S = gl.zeros([PIECE, PIECE], gl.float32, accumulator(PIECE))
    for n in gl.static_range(len(a)):
        S = warpgroup_mma(a[n], b[n].permute([1, 0]), S, use_acc=not FRESH or n > 0, is_async=True)
    return S


@gluon.jit
def add_product(x, b, sums):
    """The sums + X B, of X in registers and B in shared memory; asynchronous, a matmul a part."""
    found: gl.tuple = ()
    for n in gl.static_range(len(b)):
        found += (warpgroup_mma(x, b[n], sums[n], is_async=True),)
    return found


@gluon.jit
def score_gradient(S, dP, L, late, lots, first, i0, masked, tile, bits, BEHIND_S: gl.constexpr,
                   BEHIND_DP: gl.constexpr, dtype: gl.constexpr, call, C: gl.constexpr, O: gl.constexpr):  # fmt: skip
    """(P, dS) of the scores and dP, than which so many wgmmas are younger. late: what dP did not begin with, or None.

    lots: which pairs dropout keeps (`drawn`). Of the others dP is 0, and so is the P that dV is made of; what kept ones are
    multiplied by waits till the end, for both gradients and dQ, and is taken out of delta beforehand.
    """
    S = warpgroup_mma_wait(BEHIND_S, [S])
    if O.SOFTCAP:
        capped = tanh(S * (call.scale / call.softcap))
        S = capped * call.softcap + L[None, :]
    if O.MASKED and masked:
        S = mask(S, first, i0, call, O)
    if O.BLOCKS and tile >= 0:
        S = bits_mask(S, bits, tile, i0, C)
    P = gl.exp2(S if O.SOFTCAP else S * call.scale)
    if O.DROPOUT:
        rounded = computed(kept(P, lots).to(dtype))
    else:
        rounded = computed(P.to(dtype))
    if O.SOFTCAP:
        P *= 1.0 - capped * capped
    dP = warpgroup_mma_wait(BEHIND_DP, [dP])
    if O.DROPOUT:
        dP = kept(dP, lots)
    if late is not None:
        dP += late[None, :]
    return rounded, (P * dP).to(dtype)


@gluon.jit
def share_of_dq(ds_buffers, dS_at, k_ring, zero, C: gl.constexpr, O: gl.constexpr):
    """dS K over all keys of the tile, a share of the block's dQ; asynchronous.

    Of a block of 128 queries the consumer has 64, of one of 64 queries 64 of the columns, or what there is beyond 64.
    """
    COLUMNS: gl.constexpr = share_columns(C, O.ROWS, O.WIDTH)
    dq = gl.zeros([PIECE, COLUMNS], gl.float32, accumulator(COLUMNS))
    for c in gl.static_range(2):
        dS = ds_buffers.index(dS_at + c)
        k = [matrix(part) for part in k_ring.place(c + zero)]
        if len(k) > 1:
            k_share = k[C]
        elif O.ROWS == PIECE:
            k_share = k[0].slice(PIECE * C, PIECE, dim=1)
        else:
            k_share = k[0]
            dS = dS.slice(PIECE * C, PIECE, dim=1)
        dq = warpgroup_mma(dS.permute([1, 0]), k_share, dq, use_acc=c > 0, is_async=True)
    return dq


@gluon.constexpr_function
def share_columns(consumer, rows, width):
    """Of a share: a block's columns are in parts, or in halves, where they are more than 64."""
    return min(PIECE.value, width - PIECE.value * consumer) if rows == PIECE.value else width


@gluon.jit
def put_share(dq, buffer):
    """A share of dQ into shared memory, as it is to lie in the accumulator.

    Row 16 w + 8 x + y and column 8 a + 2 z + b of it are in register (a, x, b) of lane (y, z) of warp w. So shaped, a
    thread stores four registers side by side, and a warp 512 bytes.
    """
    COLUMNS: gl.constexpr = dq.shape[1]
    if COLUMNS < PIECE:
        buffer = buffer.slice(0, buffer.shape[0] * COLUMNS // PIECE, dim=0)
    buffer.store(dq.reshape([4, 2, 8, COLUMNS // 8, 4, 2]).permute([3, 0, 2, 4, 1, 5]).reshape(buffer.shape))
    fence_async_shared()
