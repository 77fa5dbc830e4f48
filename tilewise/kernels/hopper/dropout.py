"""The pairs that dropout keeps, by `algorithm.dropout`'s contract, drawn by the threads that hold them.

One Philox call has words for the pairs {i, i + 8} x {j, j + 8}. A thread of a piece's S holds rows r and r + 8, and of them
keys 8 a + 2 lane + b: so all four words of a call are for pairs of its own, and nothing is exchanged.

What a call costs in the loop over keys (SASS, Triton 3.6, d 128): 16 IMAD.WIDE, 18 LOP3, and for each of its four pairs ISETP
and FSEL, 42 instructions or 10.5 a thread's pair; without dropout the loop has 7.2. Keys are in uniform registers.
"""

# No `from __future__ import annotations`: as in `pipeline`.

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from .pipeline import ring_of
from .steps import accumulator, numbers
from .walk import PIECE

A, B = gl.constexpr(0xD2511F53), gl.constexpr(0xCD9E8D57)  # Philox's multipliers
STEP_0, STEP_1 = gl.constexpr(0x9E3779B9), gl.constexpr(0xBB67AE85)  # of its keys, from round to round
ROUNDS, BEGUN = gl.constexpr(10), gl.constexpr(3)


@gluon.jit
def lots_of(draw, s, h, first):
    """What `drop` needs of a piece: the seed's words, the largest word that is dropped, (s, h, row, key) in the whole problem.

    draw: as `forward_kernel` makes it. first: the piece's first row in its sequence.
    """
    seed, least, _, b0, h0, i0, j0 = draw
    seed = gl.load(seed)
    return seed.to(gl.uint32), (seed >> 32).to(gl.uint32), least, s + b0, h + h0, first + i0, j0


@gluon.jit
def drop(P, lots, j0):
    """P of the block at j0, with 0 where dropout drops the pair. Rows begin at a multiple of 16, keys at one of P's keys."""
    key_0, key_1, least, b, h, first, origin = lots
    P_00, P_01, P_10, P_11 = quarters(P)
    i = first + 16 * numbers(0, P_00) + numbers(1, P_00)
    of_block, c2_2, c0_3, c2_3, c3_3 = begin(i.to(gl.uint32), b.to(gl.uint32), h.to(gl.uint32), key_0, key_1)
    # j by exclusive or, for its bits come from three places: so a register's part is the constant of an instruction that is there.
    of_lane = of_block ^ (j0 + origin + 2 * numbers(3, P_00)).to(gl.uint32)
    j = of_lane ^ (16 * numbers(2, P_00) + numbers(4, P_00)).to(gl.uint32)
    keys: gl.tuple = ()
    for n in gl.static_range(BEGUN, ROUNDS):
        keys += (key_0 + steps_of(STEP_0, n), key_1 + steps_of(STEP_1, n))
    P_00, P_01, P_10, P_11 = gl.inline_asm_elementwise(
        _drop(), _operands(), (P_00, P_01, P_10, P_11, j, c2_2, c0_3, c2_3, c3_3) + keys + (least,),  # noqa: RUF005
        dtype=(gl.float32, gl.float32, gl.float32, gl.float32), is_pure=True, pack=1,
    )  # fmt: skip
    return as_piece(P_00, P_01, P_10, P_11, P)


@gluon.jit
def quarters(P):
    """P's elements as (warp, row, run of 16 columns, lane, b), those in rows and columns with bit 3 of their number apart:
    of neither, of columns, of rows, of both."""
    P7 = P.reshape([PIECE // 16, 2, 8, P.shape[1] // 16, 2, 4, 2]).permute([0, 2, 3, 5, 6, 1, 4])
    left, right = gl.split(P7)
    P_00, P_10 = gl.split(left)
    P_01, P_11 = gl.split(right)
    return P_00, P_01, P_10, P_11


@gluon.jit
def as_piece(P_00, P_01, P_10, P_11, P):
    """The quarters put together again, as P was."""
    P7 = gl.join(gl.join(P_00, P_10), gl.join(P_01, P_11)).permute([0, 5, 1, 2, 6, 3, 4])
    return gl.convert_layout(P7.reshape(P.shape), P.type.layout, assert_trivial=True)


@gluon.jit
def begin(i, b, h, key_0, key_1):
    """What rounds 1 to 3 make of the counter (i, j, h, b) without j: it is outside the loop, and leaves 3 products a call of 6.

    A round: (c0, c1, c2, c3) becomes (high(B c2) ^ c1 ^ key_0, low(B c2), high(A c0) ^ c3 ^ key_1, low(A c0)). Returned are,
    with keys, what is yet to meet j in c0 of round 1, c2 of round 2, c0 and c2 of round 3; and its c3.
    """
    c0_1 = gl.umulhi(h, gl.to_tensor(B)) ^ key_0
    c1 = h * B
    c2 = gl.umulhi(i, gl.to_tensor(A)) ^ b ^ key_1
    c2_2 = i * A ^ (key_1 + STEP_1)
    c0 = gl.umulhi(c2, gl.to_tensor(B)) ^ c1 ^ (key_0 + STEP_0)
    c0_3 = c2 * B ^ (key_0 + steps_of(STEP_0, 2))
    c2_3 = gl.umulhi(c0, gl.to_tensor(A)) ^ (key_1 + steps_of(STEP_1, 2))
    return c0_1, c2_2, c0_3, c2_3, c0 * A


@gluon.constexpr_function
def steps_of(step, n):
    """What a key has grown by at round n, from 0 on."""
    return n * step % 2**32


@gluon.constexpr_function
def _drop():
    """The rest of a call, and P or 0 by each of its words.

    Operands 0 to 3 and 4 to 7 are P of the pairs of words 0 to 3; 8 to 12 c0 of round 1 and what `begin` says of the others; then
    come two keys a round, and the largest word that is dropped.
    """
    lines = [
        _product("$8", A, "h", "c3"), "xor.b32 c2, h, $9;",
        _product("c2", B, "h", "c1"), "xor.b32 c0, h, $10;", "xor.b32 c2, $11, c3;", "mov.b32 c3, $12;",
        *_rounds(13),
    ]  # fmt: skip
    for word in range(4):
        lines.append(f"setp.gt.u32 p, c{word}, ${_keys() + 13};")
        lines.append(f"selp.f32 ${word}, ${4 + word}, 0f00000000, p;")
    return _of_registers(lines)


@gluon.constexpr_function
def _rounds(keys):
    """The rounds behind the first three, with operands from number `keys` on."""
    lines = []
    for n in range(keys, keys + _keys(), 2):
        lines += [
            _product("c0", A, "h", "l"), _product("c2", B, "c0", "m"),
            f"xor.b32 c0, c0, c1; xor.b32 c0, c0, ${n};", "mov.b32 c1, m;",
            f"xor.b32 c2, h, c3; xor.b32 c2, c2, ${n + 1};", "mov.b32 c3, l;",
        ]  # fmt: skip
    return lines


@gluon.constexpr_function
def _keys():
    return 2 * (ROUNDS.value - BEGUN.value)


@gluon.constexpr_function
def _of_registers(lines):
    return f"{{ .reg .pred p; .reg .b64 w; .reg .b32 c0, c1, c2, c3, h, l, m; {' '.join(lines)} }}"


@gluon.constexpr_function
def _product(x, by, high, low):
    return f"mul.wide.u32 w, {x}, {by}; mov.b64 {{{low}, {high}}}, w;"


@gluon.constexpr_function
def _operands():
    return ",".join(["=&f"] * 4 + ["f"] * 4 + ["r"] * (6 + _keys()))


# ---- backward --------------------------------------------------------------------------------------------------------


@gluon.jit
def lots_of_keys(draw, s, first):
    """The same of a piece of keys, for `drawn`; of what is drawn for queries the largest word dropped, (s, 0, key, query)."""
    seed, least, _, b0, h0, i0, j0 = draw
    seed = gl.load(seed)
    return seed.to(gl.uint32), (seed >> 32).to(gl.uint32), least, s + b0, h0, first + j0, i0


@gluon.jit
def drawn(lots, h, i0):
    """Which pairs of a piece of keys and the piece of head h's queries at i0 are kept: a word of each thread, for `kept`.

    A thread has one j, but for bit 3, and eight i: what rounds 1 to 3 make of those is most of them.
    """
    key_0, key_1, least, b, h0, first, origin = lots
    like = quarters(gl.zeros([PIECE, PIECE], gl.int32, accumulator(PIECE)))[0]
    i = (i0 + origin + 2 * numbers(3, like) + 16 * numbers(2, like) + numbers(4, like)).to(gl.uint32)
    h = (h + h0).to(gl.uint32)
    j = (first + 16 * numbers(0, like) + numbers(1, like)).to(gl.uint32)
    c0_low, c0_high = product(gl.umulhi(h, gl.to_tensor(B)) ^ key_0 ^ j, A)
    low, high = product(i, A)
    c2_low, c2_high = product(high ^ (b.to(gl.uint32) ^ key_1), B)
    c2 = low ^ (c0_high ^ (key_1 + STEP_1))
    low, high = product(c2_high ^ (h * B ^ (key_0 + STEP_0)), A)
    c2_3 = high ^ (c0_low ^ (key_1 + steps_of(STEP_1, 2)))
    keys: gl.tuple = (key_0 + steps_of(STEP_0, 2),)
    for n in gl.static_range(BEGUN, ROUNDS):
        keys += (key_0 + steps_of(STEP_0, n), key_1 + steps_of(STEP_1, n))
    words = (c2, c2_low, c2_3, low) + keys + (least,)  # noqa: RUF005
    bits = gl.inline_asm_elementwise(_draw(), _words(), words, dtype=gl.int32, is_pure=True, pack=1)
    return gl.sum(gl.sum(bits << (8 * numbers(2, like) + numbers(4, like)), 4), 2)


@gluon.jit
def product(x, by: gl.constexpr):
    """(Low, high) word of it."""
    return gl.inline_asm_elementwise(_both(by), "=r,=r,r", [x], dtype=(gl.uint32, gl.uint32), is_pure=True, pack=1)


@gluon.constexpr_function
def _both(by):
    return f"{{ .reg .b64 w; mul.wide.u32 w, $2, {by}; mov.b64 {{$0, $1}}, w; }}"


@gluon.jit
def words_ring(BLOCKS: gl.constexpr, PIECES: gl.constexpr):
    """A Ring of what `drawn` gives for so many pieces a block. Two partitions read it."""
    plain: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    return ring_of(gl.allocate_shared_memory(gl.int32, [BLOCKS, PIECES * 128], plain), 2)


@gluon.jit
def put_words(words, buffer, piece: gl.constexpr):
    """A piece's words into their place in a block's, a thread's beside its neighbour's."""
    buffer.slice(piece * 128, 128).store(words.reshape([128]))


@gluon.jit
def words_in(buffer, piece: gl.constexpr):
    """Each thread's word of a piece, as `drawn` gives it."""
    layout: gl.constexpr = gl.DistributedLinearLayout([], [[1], [2], [4], [8], [16]], [[32], [64]], [], [128])
    return buffer.slice(piece * 128, 128).load(layout).reshape([PIECE // 16, 8, 4])


@gluon.jit
def kept(P, word):
    """P (keys, queries) with 0 where the pair is dropped: the bit of a thread's n-th pair is the word's n-th."""
    P6 = P.reshape([PIECE // 16, 2, 8, PIECE // 8, 4, 2])
    # As if from another lane: ptxas tests a word that it knows nothing of by the byte (R2P), and keeps no tests for the next use.
    word = gl.inline_asm_elementwise(
        "shfl.sync.bfly.b32 $0, $1, 0, 31, 0xffffffff;", "=r,r", [word], dtype=gl.int32, is_pure=False, pack=1
    )
    of_thread: gl.constexpr = gl.SliceLayout(1, gl.SliceLayout(3, gl.SliceLayout(5, P6.type.layout)))
    word = gl.convert_layout(word, of_thread, assert_trivial=True)[:, None, :, None, :, None]
    P6 = gl.inline_asm_elementwise(_kept(), _pairs(), [P6, word], dtype=gl.float32, is_pure=False, pack=32)
    return gl.convert_layout(P6.reshape(P.shape), P.type.layout, assert_trivial=True)


@gluon.constexpr_function
def _kept():
    lines = [
        f"and.b32 l, $64, {1 << n}; setp.ne.b32 p, l, 0; selp.f32 ${n}, ${32 + n}, 0f00000000, p;" for n in range(32)
    ]
    return _of_registers(lines)


@gluon.constexpr_function
def _pairs():
    return ",".join(["=&f"] * 32 + ["f"] * 32 + ["r"] * 32)


@gluon.constexpr_function
def _draw():
    """The rest of a call, and of its word n bit 2 n of operand 0. Operands 1 to 5 are what round 3 is made of; then as `_drop`."""
    lines = [
        _product("$1", B, "h", "c1"), "xor.b32 c0, h, $2; xor.b32 c0, c0, $5;", "mov.b32 c2, $3;", "mov.b32 c3, $4;",
        *_rounds(6), f"setp.gt.u32 p, c0, ${_keys() + 6};", "selp.b32 l, 1, 0, p;",
    ]  # fmt: skip
    for word in range(1, 4):
        lines += [f"setp.gt.u32 p, c{word}, ${_keys() + 6};", f"@p or.b32 l, l, {1 << 2 * word};"]
    return _of_registers([*lines, "mov.b32 $0, l;"])


@gluon.constexpr_function
def _words():
    return ",".join(["=r"] + ["r"] * (6 + _keys()))
