"""The Hopper backward without a GPU: what it takes, its kernels, whether its partitions wait for ever."""

from __future__ import annotations

import contextlib
import io
import os
import random
import re
from collections import Counter, defaultdict
from dataclasses import replace
from itertools import product
from types import FunctionType, SimpleNamespace
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from hopper_cases import seeds
from test_hopper import BF16, F16, FULL, KINDS, Drawn, contents_of, listing_of, meta, problem_of

import tilewise
from tilewise import Band, Problem, causal, sliding_window
from tilewise.kernels.hopper import backend, config
from tilewise.mask import ALIGNS
from tilewise.problem import NOTHING, Aux, Layout

# ---- what it takes ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("band", [FULL, causal, sliding_window(9), Band(-3, 7, "top_left")], ids=str)
@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize(("d", "v_dim"), [(8, 8), (64, 64), (128, 128), (128, 64), (40, 96), (256, 256), (64, 136)])
def test_what_it_takes(d: int, v_dim: int, deterministic: bool, band: Band) -> None:
    problem = problem_of(
        d, v_dim, band, F16, 100, 300, heads=4, kv_heads=2, softcap=5.0, sink=meta(4), batch=40000,
        deterministic=deterministic,
    )  # fmt: skip
    assert backend.backward_elsewhere(problem) is None
    assert config.is_split(problem) == (max(d, v_dim) > 128)
    varied = {"q_lens": True}, {"k_lens": True}, {"q_layout": Layout.PACKED, "k_layout": Layout.PACKED}
    for options in varied:
        elsewhere = backend.backward_elsewhere(replace(problem, **options))
        wide = "triton", "it takes sequences of one length at head sizes over 128"
        assert elsewhere == (wide if config.is_split(problem) else None)
    why = {True: "at head sizes over 128", False: "where it is to be deterministic"}[config.is_split(problem)]
    taken = not config.is_split(problem) and not deterministic
    elsewhere = backend.backward_elsewhere(replace(problem, mask="blocks"))
    assert elsewhere == (None if taken else ("triton", f"it takes no block mask {why}"))


def test_explain_says_whose_the_backward_is(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("triton")
    empty = problem_of(batch=0)
    assert backend.backward_elsewhere(empty) == ("triton", "there is nothing to add up")
    assert "hopper: chosen; its backward is triton's: there is nothing to add up\n" in tilewise.explain(empty)
    monkeypatch.setattr(backend.triton_backend, "backward", lambda *_: "triton's")
    nothing = torch.empty(0)
    assert backend.backward(empty, nothing, None, *[nothing] * 5, Aux()) == "triton's"


def test_rows_fit_the_shared_memory_and_the_registers() -> None:
    for wide, cfg in config.BACKWARD.items():
        assert cfg.evidence
        dropout = config.backward_of(problem_of(wide, dropout_p=0.5, seed=1))
        assert (dropout.rows, dropout.stages, dropout.places) == (cfg.rows, cfg.stages, 1)
        assert dropout.drawer_registers >= 24
        assert dropout.drawer_registers % 8 == 0
        assert config.backward_shared_bytes(dropout, wide) + 1024 <= config.SHARED
        assert cfg.rows * wide <= 2 * config.PIECE**2  # a share of dQ is (64, 64), or less
        assert config.backward_shared_bytes(cfg, wide) + 1024 <= config.SHARED
        consumer, producer = cfg.registers
        assert 128 * (2 * consumer + producer) <= 65536


# ---- the kernels, compiled -------------------------------------------------------------------------------------------

SOME = [  # the last: deterministic
    (64, 64, BF16, "causal", False), (64, 64, F16, "packed", True), (128, 128, BF16, "full", False),
    (128, 128, F16, "window", True), (96, 64, BF16, "dressed", False), (96, 96, BF16, "packed causal", True),
    (64, 64, BF16, "blocks", False), (64, 64, F16, "dropout", False), (128, 128, BF16, "dropout", True),
]  # fmt: skip
EVERY = [
    (d, d, dtype, kind, deterministic)
    for d in config.BACKWARD
    for dtype in (BF16, F16)
    for kind in KINDS
    for deterministic in (False, True)
    if not (deterministic and KINDS[kind].get("blocks"))
]
# Bytes, by columns and softcap, most of them with Triton 3.9, outside the loop over queries. With 64 columns each ptxas
# reloads some in it, as with a softcap: K and V are in registers, too.
SPILLS = {
    (64, False): 1360, (64, True): 2688, (96, False): 256, (96, True): 256, (128, False): 208, (128, True): 1184,
}  # fmt: skip
RELOADED = {"3.9": 32}  # instructions of some 350 between two waits, with 64 columns and no softcap
SPILLS_OF_DROPOUT = 1472  # most of it numbers of a tile, outside the loop
SPILLS_VARIED = 128  # more, where sequences have lengths of their own: of a tile's place, outside it or once a block


def recorded(problem: Problem, dlse: bool = False) -> list[Any]:
    """The launches of a backward."""
    pytest.importorskip("triton")
    if os.environ.get("TRITON_INTERPRET") == "1":
        pytest.skip("in Triton's interpreter there are no binaries")
    from tilewise.kernels.hopper import backward_host
    from tilewise.kernels.launch import recording
    from tilewise.kernels.tensors import q_shape, v_shape

    shapes = problem.o_shape, q_shape(problem), problem.k_shape, v_shape(problem), problem.o_shape
    do, q, k, v, o = (torch.empty(shape, dtype=problem.dtype) for shape in shapes)
    lse = torch.zeros(problem.lse_shape)
    device = {"programs": lambda _: 132, "counter": lambda _: torch.zeros(1, dtype=torch.int32)}
    with recording() as launches, mock.patch.multiple(backward_host, **device):
        backward_host.backward(problem, do, lse if dlse else None, q, k, v, o, lse, contents_of(problem)[0])
    return launches


def check(d: int, v_dim: int, dtype: torch.dtype, kind: str, deterministic: bool) -> None:
    """Compile a backward's kernels; AssertionError where one is not what it was made to be."""
    problem = problem_of(d, v_dim, dtype=dtype, deterministic=deterministic, **KINDS[kind])
    launches = recorded(problem)
    import triton
    from triton import knobs
    from triton.backends.compiler import GPUTarget

    from tilewise.kernels.launch import compile_for, resources

    said = io.StringIO()
    with knobs.nvidia.scope(), knobs.compilation.scope(), contextlib.redirect_stdout(said):
        knobs.nvidia.dump_ptxas_log = knobs.compilation.always_compile = True
        prepare, binary, convert = (compile_for(launch, GPUTarget("cuda", 90, 32)) for launch in launches)
    assert "registers" in said.getvalue()
    assert "wgmma" not in said.getvalue(), said.getvalue()  # ptxas reports when it makes them wait for each other
    for small in (prepare, convert):
        assert not resources(small).spilled
        listing = listing_of(small)
        wide = config.backward_width(max(d, v_dim))
        least = config.dq_columns(wide) // 16
        assert len(re.findall(r"LDG\.E\.128", listing)) >= 2 * least, "rows are loaded by 16 bytes"
        assert len(re.findall(r"STG\.E\.128", listing)) >= least
    taken = resources(binary)
    varied = problem.q_layout is Layout.PACKED or problem.q_lens or problem.k_lens
    dropout = problem.dropout_p > 0
    assert (
        taken.spilled <= (SPILLS_OF_DROPOUT if dropout else SPILLS[wide, problem.softcap > 0]) + SPILLS_VARIED * varied
    )
    assert not taken.unwritten, "ptxas left out an instruction"
    cfg = config.backward_of(problem)
    bytes_of_tiles = config.backward_shared_bytes(cfg, wide)
    assert bytes_of_tiles < taken.shared <= min(bytes_of_tiles + 1024, config.SHARED)
    listing = listing_of(binary)
    for instruction in ("HGMMA", "UTMALDG", "UTMASTG", "UTMAREDG", "USETMAXREG"):
        assert instruction in listing, instruction
    # A turn is counted, with all that was done before it, at the end of an add that was waited for.
    counted = re.findall(r"UTMAREDG(.*?)\bRED", listing, re.DOTALL)
    assert len(counted) == (2 if deterministic else 0)
    assert all(re.search(r"DEPBAR.*MEMBAR\.\w+\.GPU", part, re.DOTALL) for part in counted)
    # Between a wait for S and the next one, for dP, lie the exponentials of 64 queries: 32 of a thread.
    overlapped = re.findall(r"WARPGROUP\.DEPBAR\.LE gsb0, 0x[123](.*?)WARPGROUP\.DEPBAR", listing, re.DOTALL)
    if dropout:
        # A word is drawn by 8 calls of 18 products. Both times it is tested by the byte.
        assert listing.count("IMAD.WIDE") >= 2 * cfg.rows // config.PIECE * 8 * 16
        assert listing.count("R2P") == 2 * 2 * 4 * cfg.rows // config.PIECE
    elif not problem.softcap:
        allowed = RELOADED.get(triton.__version__[:3], 8) if wide == 64 else 0
        assert all(len(re.findall("STL|LDL", part)) <= allowed for part in overlapped)
    assert sum(part.count("MUFU.EX2") >= 32 for part in overlapped) == 2 * cfg.rows // config.PIECE


@pytest.mark.parametrize("what", SOME, ids=str)
def test_kernels_compile_within_their_limits(what: Any) -> None:
    check(*what)


@pytest.mark.slow
@pytest.mark.parametrize("what", EVERY, ids=str)
def test_all_kernels_compile_within_their_limits(what: Any) -> None:
    check(*what)


# ---- turns -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("rows", [1, 2])
def test_turns_count_the_tiles_that_add_before(rows: int) -> None:
    """Those that take a block have its turns 0, 1, ..., the last first: all lengths and bounds, on a small scale."""
    pytest.importorskip("triton")
    from tilewise import mask
    from tilewise.kernels.hopper import backward

    def plain(function: Any) -> Any:
        names = {"gl": SimpleNamespace(minimum=min, where=lambda c, a, b: a if c else b), "KEYS": 2}
        names |= {"query_range": mask.query_range, "key_range": mask.key_range}
        return FunctionType(function.fn.__code__, names)

    query_blocks, turn_of = plain(backward.query_blocks), plain(backward.turn_of)
    options = SimpleNamespace(ROWS=rows)
    lengths, bounds = range(1, 7), [None, *range(-7, 8)]
    for q_len, k_len, left, right, align in product(lengths, lengths, bounds, bounds, ALIGNS):
        band = Band(left, right, align)
        low, high = band.bounds
        call = SimpleNamespace(q_len=q_len, k_len=k_len, left=low, right=high, diagonal=band.offset(q_len, k_len))
        turns: dict[int, list[int]] = defaultdict(list)
        for first in reversed(range(0, k_len, 2)):
            for block in range(*query_blocks(first, call, rows)):
                turns[block].append(turn_of(first, block, call, options))
        assert all(found == list(range(len(found))) for found in turns.values()), (q_len, k_len, band)


# ---- the protocol, played --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", seeds(80))
def test_partitions_take_every_pair_once_and_never_wait_for_ever(seed: int) -> None:
    """By programs as many, and so many at once, as the seed draws. Of every second one dQ is added up in one order."""
    pytest.importorskip("triton")
    from hopper_backward_machine import BackwardBlock, Device

    from tilewise.kernels.hopper import backward_host

    r, ordered = random.Random(seed), seed % 2 == 1
    lengths = (1, 33, 64, 65, 128, 129, 192, 200, 300, 384, 500)
    q_len, k_len = r.choice(lengths), r.choice(lengths)
    k_len = q_len if r.random() < 0.4 else k_len
    bound = max(q_len, k_len) + 5
    band = r.choice((
        FULL, causal, causal, Band(None, r.randint(-9, bound)), Band(r.randint(0, bound), None),
        Band(None, 0, "top_left"), Band(r.randint(0, bound), r.randint(-5, 9)), Band(-5, 3),
        Band(r.randint(0, 40), r.randint(0, 40)),
    ))  # fmt: skip
    group, batch, wide = r.choice((1, 2, 3)), r.choice((1, 2)), r.choice(list(config.BACKWARD))
    problem = problem_of(wide, band=band, q_len=q_len, k_len=k_len, heads=2 * group, kv_heads=2, batch=batch)
    problem = replace(problem, deterministic=ordered, dropout_p=0.1 * (seed // 2 % 2))
    options = backward_host.Options.of(problem, config.backward_of(problem), wide)
    options = replace(options, STAGES=r.choice((1, 2, 3)), PLACES=r.choice((1, 2)))
    if options.DROPOUT:
        options = replace(options, DRAWN=seed // 4 % 2 * r.choice((1, 2, 4)))
    tiles = -(-k_len // config.BACKWARD_KEYS)
    numbers = backward_host.numbers_of(problem, NOTHING.origin, k_len, config.BACKWARD_KEYS, 2, r.choice((1, 2, 3)))
    device = Device(seed, r.choice((1, 2, 3, 5)))
    programs = min(numbers[backward_host.TOTAL], r.choice((1, 2, 3, 5, 99)))
    blocks = [BackwardBlock(numbers, options, program, programs, device) for program in range(programs)]
    device.run(blocks)
    log = [entry for block in blocks for entry in block.log]

    firsts = [(b, kv, 64 * n, 0) for b in range(batch) for kv in range(2) for n in range(2 * tiles)]
    for gradient in ("dk", "dv"):
        assert sorted(entry[1:] for entry in log if entry[0] == gradient) == firsts
    seen = band.dense(q_len, k_len)
    pairs = [entry[1:] for entry in log if entry[0] == "pair"]
    taken = Counter((head, j0, i0) for _, head, j0, i0, *_ in pairs)
    assert not taken or max(taken.values()) == 1
    for b, h in [(b, h) for b in range(batch) for h in range(problem.heads)]:
        for i0 in range(0, q_len, 64):
            for j0 in range(0, k_len, 64):
                assert ((b, h), j0, i0) in taken or not seen[i0 : i0 + 64, j0 : j0 + 64].any()
    for _, _, j0, i0, masked, *_ in pairs:
        part = seen[i0 : i0 + 64, j0 : j0 + 64]
        assert masked or (part.all() and j0 + 64 <= k_len)

    assert all(row == i0 for kind, _, i0, row, *_ in log if kind == "queries")

    # Each consumer sends its share of each block's dQ, once for each tile of keys, and nobody else's.
    padded = -(-q_len // 128) * 128
    for _, consumer, (b, h), _, i0, share in (entry for entry in log if entry[0] == "dq"):
        head, rest = divmod(share, 2 * padded // options.ROWS)
        assert head == b * problem.heads + h
        assert divmod(rest, 2) == (i0 // options.ROWS, consumer)
    sent = Counter((head, j0, i0) for kind, _, head, j0, i0, *_ in log if kind == "dq")
    assert set(sent) == {(head, j0 // 128 * 128, i0 // options.ROWS * options.ROWS) for head, j0, i0 in taken}
    assert set(sent.values()) <= {2}
    # In one order: the last of the tiles that a block sees comes first.
    added = {share: [j0 for _, _, j0, _ in adds] for share, adds in device.order.items()}
    assert sum(map(len, added.values())) == ordered * sum(sent.values())
    assert all(tiles == sorted(tiles, reverse=True) for tiles in added.values())


@pytest.mark.parametrize("seed", seeds(80))
def test_sequences_and_block_masks_played(seed: int) -> None:
    """Sequences of unlike lengths, packed or padded, a BlockMask, an origin: each pair is seen by whom it should be."""
    pytest.importorskip("triton")
    from hopper_backward_machine import BackwardBlock, Device
    from hopper_machine import APART, NO_LISTS, lists_in

    from tilewise.kernels.hopper import backward_host
    from tilewise.kernels.tensors import FAR

    r = random.Random(seed)
    drawn, wide = Drawn(r), r.choice(list(config.BACKWARD))
    problem, batch, packed, origin = drawn.problem, drawn.batch, drawn.packed, drawn.origin
    ordered = not drawn.blocks and r.random() < 0.5
    problem = replace(problem, qk_dim=wide, v_dim=wide, deterministic=ordered, dropout_p=0.1 * (seed // 2 % 2))
    lists, part = NO_LISTS, False
    if drawn.mask is not None:
        lists = lists_in(drawn.mask.key_major, batch, origin, (origin[3], origin[2]))
        part = backward_host.is_part(problem, origin, lists[6:10])
    options = backward_host.Options.of(problem, config.backward_of(problem), wide, part)
    options = replace(options, STAGES=r.choice((1, 2, 3)), PLACES=r.choice((1, 2)))
    if options.DROPOUT:
        options = replace(options, DRAWN=seed // 4 % 2 * r.choice((1, 2, 4)))
    numbers = list(backward_host.numbers_of(problem, origin, drawn.k_len, 128, 2, r.choice((1, 2, 3))))
    numbers[:2] = drawn.q_len, drawn.k_len
    lengths = (*drawn.contents(), batch, *(0 if packed else APART for _ in range(4)))
    device = Device(seed, r.choice((1, 2, 3)))
    programs = min(numbers[backward_host.TOTAL], r.choice((1, 2, 3, 99)))
    blocks = [
        BackwardBlock(tuple(numbers), options, program, programs, device, lengths, lists) for program in range(programs)
    ]
    device.run(blocks)
    log = [entry for block in blocks for entry in block.log]

    # dK and dV: each row of memory is stored once, that of no sequence too.
    spans = [*drawn.spans_k, drawn.k_len - drawn.cu_k[-1]] if packed else drawn.spans_k
    starts = drawn.cu_k if packed else [s * drawn.k_len * 2 for s in range(batch)]
    rows = [(kv, start + n) for kv in range(2) for start, span in zip(starts, spans, strict=True) for n in range(span)]
    for gradient in ("dk", "dv"):
        stored = []
        for at in (entry[1:] for entry in log if entry[0] == gradient):
            if options.K_CLIPPED:
                _, end, kv, row, _ = at
                stored += [(kv, end + n - FAR) for n in range(row, min(row + 64, FAR))]
            else:
                s, kv, first, _ = at
                stored += [(kv, starts[s] + n) for n in range(first, min(first + 64, drawn.k_len))]
        assert sorted(stored) == sorted(rows)

    # Statistics are those of the queries, which end where their sequence does.
    start_q, start_k = (drawn.cu_q, drawn.cu_k) if packed else ([0] * batch, [0] * batch)
    before = [start // 128 * 128 + 128 * s if packed else 0 for s, start in enumerate(start_q)]
    for _, (s, _), i0, row, end in (entry for entry in log if entry[0] == "queries"):
        assert row - before[s] == i0 - start_q[s]
        assert end == (start_q[s] + drawn.used_q[s] if options.Q_CLIPPED else None)

    # Each pair of a sequence is seen once, by whom it should be.
    taken: dict[Any, dict[Any, Any]] = defaultdict(dict)
    for _, _, head, j0, i0, masked, tile, first, own in (entry for entry in log if entry[0] == "pair"):
        assert (first, own) == (j0 - start_k[head[0]], i0 - start_q[head[0]])
        assert (first, own) not in taken[head]
        taken[head][first, own] = masked, tile
    for s, h in ((s, h) for s in range(batch) for h in range(problem.heads)):
        n, m = drawn.used_q[s], drawn.used_k[s]
        i, j = torch.arange(n)[:, None], torch.arange(m + 128)
        banded, true = drawn.seen(s, h, i, j)
        got = torch.zeros_like(true)
        for (j0, i0), (masked, tile) in taken[s, h].items():
            here = slice(i0, i0 + 64), slice(j0, j0 + 64)
            part = banded[here] if masked else torch.ones_like(banded[here])
            if tile >= 0:
                turned = torch.from_numpy(np.unpackbits(drawn.mask.turned[tile].numpy(), axis=1, bitorder="little"))
                part = part & turned.bool()[(origin[3] + j[here[1]]) % 128, (origin[2] + i[here[0]]) % 128]
            assert not got[here].any()
            got[here] = part
        assert torch.equal(got, true)

    # Shares of dQ are of the block's rows; in one order the last of a sequence's tiles comes first.
    padded = (drawn.q_len // 128 + batch + 1 if packed else -(-drawn.q_len // 128)) * 128
    for _, consumer, (s, h), _, i0, share in (entry for entry in log if entry[0] == "dq"):
        head, rest = divmod(share, 2 * padded // options.ROWS)
        assert head == (0 if packed else s) * problem.heads + h
        assert divmod(rest, 2) == ((before[s] + i0 - start_q[s]) // options.ROWS, consumer)
    sent = Counter((head, j0, i0) for kind, _, head, j0, i0, *_ in log if kind == "dq")
    of_tiles = {
        (head, start_k[head[0]] + j0 // 128 * 128, start_q[head[0]] + i0 // options.ROWS * options.ROWS)
        for head, pairs in taken.items() for j0, i0 in pairs
    }  # fmt: skip
    assert set(sent) == of_tiles
    assert set(sent.values()) <= {2}
    added = [[j0 for _, _, j0, _ in adds] for adds in device.order.values()]
    assert sum(map(len, added)) == ordered * sum(sent.values())
    assert all(tiles == sorted(tiles, reverse=True) for tiles in added)
