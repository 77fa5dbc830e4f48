"""The Hopper backend without a GPU: what it takes, what its kernels take, whether its partitions wait for ever."""

from __future__ import annotations

import contextlib
import io
import os
import random
import re
import subprocess
import tempfile
from collections import defaultdict
from dataclasses import replace
from typing import Any

import pytest
import torch

import tilewise
from tilewise import Band, Problem, causal, sliding_window
from tilewise.kernels.hopper import backend, config
from tilewise.mask import tile_of

F16, BF16 = torch.float16, torch.bfloat16
FULL = Band()


def problem_of(
    d: int = 64, v_dim: int | None = None, band: Band = FULL, dtype: torch.dtype = BF16, q_len: int = 200,
    k_len: int | None = None, batch: int = 1, heads: int = 2, kv_heads: int | None = None, **options: Any,
) -> Problem:  # fmt: skip
    kv, k_len = kv_heads or heads, k_len or q_len
    q, k, v = (
        torch.empty(shape, dtype=dtype, device="meta")
        for shape in ((batch, heads, q_len, d), (batch, kv, k_len, d), (batch, kv, k_len, v_dim or d))
    )
    return replace(Problem.of(q, k, v, mask=band, **options)[0], device="sm90")


# ---- what it takes ---------------------------------------------------------------------------------------------------


def meta(*shape: int) -> torch.Tensor:
    return torch.empty(shape, device="meta")


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"dtype": torch.float32}, "it takes fp16 and bf16, not float32"),
        ({"d": 60}, "it takes head sizes that are multiples of 8, up to 256, not 60"),
        ({"d": 264}, "it takes head sizes that are multiples of 8, up to 256, not 264"),
        ({"d": 64, "v_dim": 12}, "it takes head sizes that are multiples of 8, up to 256, not 64/12"),
        ({"scale": 0.0}, "it takes a positive scale, not 0"),
        ({"scale": -0.5}, "it takes a positive scale, not -0.5"),
        ({"bias": meta(200, 200)}, "it does not take a bias yet"),
        ({"alibi_slopes": meta(2)}, "it does not take ALiBi yet"),
        ({"dropout_p": 0.1, "seed": 1}, "it does not take dropout yet"),
    ],
    ids=str,
)  # fmt: skip
def test_what_it_does_not_take(options: dict[str, Any], reason: str) -> None:
    pytest.importorskip("triton")
    problem = problem_of(**options)
    assert backend.why_not(problem) == reason
    assert f"hopper: {reason}" in tilewise.explain(problem)


def test_masks_and_layouts_that_it_does_not_take() -> None:
    pytest.importorskip("triton")
    seen = torch.ones(200, 200, dtype=torch.bool)
    q = torch.empty(200, 2, 64, dtype=F16)
    packed = Problem.of(q, q, q, cu_seqlens_q=torch.tensor([0, 200], dtype=torch.int32))[0]
    assert backend.why_not(replace(packed, device="sm90")) == "it does not take packed sequences yet"
    q = torch.empty(1, 2, 200, 64, dtype=F16)
    for mask, name in ((seen, "a boolean mask"), (tilewise.BlockMask.from_dense(seen), "a block mask")):
        problem = replace(Problem.of(q, q, q, mask=mask)[0], device="sm90")
        assert backend.why_not(problem) == f"it does not take {name} yet"
    for side in ("q_lens", "k_lens"):
        assert backend.why_not(replace(problem_of(), **{side: True})) == "it does not take lengths yet"
    assert backend.why_not(replace(problem_of(), device="sm100")) == "it is for Hopper GPUs, sm90 (q is on sm100)"
    assert backend.why_not(replace(problem_of(), device="cpu")) == "it is for Hopper GPUs, sm90 (q is on cpu)"


@pytest.mark.parametrize("band", [FULL, causal, sliding_window(9), Band(-3, 7, "top_left")], ids=str)
@pytest.mark.parametrize(("d", "v_dim"), [(8, 8), (64, 64), (96, 96), (192, 128), (256, 256), (64, 256)])
def test_what_it_takes(d: int, v_dim: int, band: Band) -> None:
    pytest.importorskip("triton")
    problem = problem_of(
        d, v_dim, band, F16, 100, 300, heads=4, kv_heads=2, softcap=5.0, sink=meta(4), batch=40000, scale=3.0
    )
    assert backend.why_not(problem) is None
    assert "hopper: chosen\n" in tilewise.explain(problem)


# ---- the table -------------------------------------------------------------------------------------------------------


def test_rows_fit_the_shared_memory_and_the_registers() -> None:
    for wide, row in config.TABLE.items():
        assert row.evidence
        for kind in config.KINDS:
            cfg = row.config(kind)
            assert cfg.rows % config.PIECE == 0
            assert cfg.keys % config.PIECE == 0
            # A piece's last block and its tile's are then neighbours or one (`forward.mask`: what `MASKED` relies on).
            consumer, producer = cfg.registers
            assert 128 * (consumer * cfg.consumers + producer) <= 65536
            for v_wide in config.WIDTHS:
                if v_wide <= wide:
                    for sizes in ((wide, v_wide), (v_wide, wide)):
                        assert config.shared_bytes(cfg, *sizes) + 1024 <= config.SHARED, (wide, v_wide, kind)


def test_a_configuration_depends_on_no_batch_and_no_heads() -> None:
    for band in (FULL, causal, sliding_window(100)):
        for length in (100, 5000):
            some = problem_of(band=band, q_len=length)
            assert config.choose(some) == config.choose(replace(some, batch=777, heads=12, kv_heads=3, needs_grad=True))


def test_a_window_of_everything_has_the_configuration_of_causal() -> None:
    """For it must have its bits: those depend on the blocks of keys, and on what becomes of a piece's first one."""
    for d in config.WIDTHS:
        for length in (200, 5000):
            a, b = (config.choose(problem_of(d, band=band, q_len=length)) for band in (causal, Band(length - 1, 0)))
            assert (a.keys, a.half) == (b.keys, b.half)


@pytest.mark.parametrize("together", [1, 2, 3, 7])
@pytest.mark.parametrize("tiles", [1, 2, 5])
@pytest.mark.parametrize("heads", [1, 4, 6, 7])
def test_every_tile_has_its_turn_once_the_last_ones_first(heads: int, tiles: int, together: int) -> None:
    order = [tile_of(t, tiles, together, heads) for t in range(heads * tiles)]
    assert sorted(order) == [(tile, head) for tile in range(tiles) for head in range(heads)]
    assert [tile for tile, head in order if head == 0] == list(range(tiles))[::-1]


# ---- the kernels, compiled -------------------------------------------------------------------------------------------

KINDS: dict[str, dict[str, Any]] = {
    "full": {"q_len": 1000}, "causal": {"band": causal, "q_len": 1024}, "long": {"band": causal, "q_len": 4096},
    "ragged": {"band": causal, "q_len": 1000, "k_len": 1017}, "window": {"band": sliding_window(100), "q_len": 4096},
    "dressed": {"band": causal, "q_len": 1000, "k_len": 1017, "softcap": 20.0, "sink": meta(2)},
}  # fmt: skip
SOME = [
    (64, 64, BF16, "full"), (64, 64, BF16, "causal"), (64, 64, BF16, "long"), (128, 128, BF16, "full"),
    (128, 128, BF16, "causal"), (128, 128, F16, "causal"), (128, 128, BF16, "window"),
    (128, 128, BF16, "dressed"), (256, 256, BF16, "full"),
    (256, 256, BF16, "ragged"), (192, 128, BF16, "causal"),
]  # fmt: skip
SPILLS = {"3.9": 144}  # bytes, by what its newer ptxas keeps from tile to tile at d 256; in no loop over keys
UNLIKE = [(256, 128), (128, 256), (128, 64), (64, 128), (256, 64), (64, 256)]
EVERY = [(d, d, dtype, kind) for d in config.WIDTHS for dtype in (BF16, F16) for kind in KINDS]
EVERY += [(d, v_dim, BF16, kind) for d, v_dim in UNLIKE for kind in ("full", "long", "window")]


def compiled(problem: Problem) -> tuple[Any, str]:
    """The forward's kernel for sm90, and what ptxas said."""
    pytest.importorskip("triton")
    if os.environ.get("TRITON_INTERPRET") == "1":
        pytest.skip("in Triton's interpreter there are no binaries")
    from triton import knobs
    from triton.backends.compiler import GPUTarget

    from tilewise.kernels.hopper import host
    from tilewise.kernels.launch import compile_for, recording
    from tilewise.kernels.tensors import q_shape, v_shape

    shapes = q_shape(problem), problem.k_shape, v_shape(problem)
    o, q, k, v = (torch.empty(shape, dtype=problem.dtype) for shape in (problem.o_shape, *shapes))
    sink = torch.empty(problem.heads) if problem.sink else None
    start = host.launch_of(problem, (0, 0, 0, 0), 132, *(x.stride() for x in (q, k, v))).start
    with recording() as launches:
        start(o, q, k, v, torch.empty(problem.lse_shape), sink, torch.zeros(1, dtype=torch.int32))
    said = io.StringIO()
    with knobs.nvidia.scope(), knobs.compilation.scope(), contextlib.redirect_stdout(said):
        knobs.nvidia.dump_ptxas_log = knobs.compilation.always_compile = True
        binary = compile_for(launches[0], GPUTarget("cuda", 90, 32))
    return binary, said.getvalue()


def listing_of(binary: Any) -> str:
    """Its instructions."""
    from triton import knobs

    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(binary.asm["cubin"])
        file.flush()
        tool = [knobs.nvidia.cuobjdump.path, "--dump-sass", file.name]
        return subprocess.run(tool, capture_output=True, text=True, check=True).stdout


def check(d: int, v_dim: int, dtype: torch.dtype, kind: str) -> None:
    """Compile a kernel; AssertionError where it is not what it was made to be."""
    triton = pytest.importorskip("triton")
    problem = problem_of(d, v_dim, dtype=dtype, **KINDS[kind])
    cfg = config.choose(problem)
    binary, said = compiled(problem)
    from tilewise.kernels.launch import resources

    taken = resources(binary)
    assert taken.spilled <= SPILLS.get(triton.__version__[:3], 0)
    assert not taken.unwritten, "ptxas left out an instruction"
    bytes_of_tiles = config.shared_bytes(cfg, config.width(d), config.width(v_dim))
    assert bytes_of_tiles < taken.shared <= min(bytes_of_tiles + 1024, config.SHARED)
    listing = listing_of(binary)
    assert "registers" in said
    assert "wgmma" not in said, said  # ptxas reports when it makes them wait for each other
    assert "warning" not in said, said
    for instruction in ("HGMMA", "UTMALDG", "UTMASTG", "USETMAXREG"):
        assert instruction in listing, instruction
    # In each consumer's loop the exponentials lie between the wait for S and the one for P V, which is in flight there.
    overlapped = re.findall(r"DEPBAR\.LE gsb0, 0x1(.*?)DEPBAR\.LE gsb0, 0x0", listing, re.DOTALL)
    assert [part.count("MUFU.EX2") >= cfg.keys // 2 for part in overlapped] == [True] * cfg.consumers
    assert not any(re.search("STL|LDL", part) for part in overlapped)


@pytest.mark.parametrize(("d", "v_dim", "dtype", "kind"), SOME, ids=str)
def test_a_kernel_compiles_within_its_limits(d: int, v_dim: int, dtype: torch.dtype, kind: str) -> None:
    check(d, v_dim, dtype, kind)


@pytest.mark.slow
@pytest.mark.parametrize(("d", "v_dim", "dtype", "kind"), EVERY, ids=str)
def test_every_kernel_compiles_within_its_limits(d: int, v_dim: int, dtype: torch.dtype, kind: str) -> None:
    check(d, v_dim, dtype, kind)


# ---- the protocol, played --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(150))
def test_partitions_hand_on_every_block_and_never_wait_for_ever(seed: int) -> None:
    pytest.importorskip("triton")
    from hopper_machine import Block

    from tilewise.kernels.hopper import host

    r = random.Random(seed)
    lengths = (1, 33, 64, 65, 128, 129, 192, 200, 300, 384, 500)
    q_len, k_len = r.choice(lengths), r.choice(lengths)
    k_len = q_len if r.random() < 0.4 else k_len
    bound = max(q_len, k_len) + 5
    band = r.choice((
        FULL, causal, causal, Band(None, r.randint(-9, bound)), Band(r.randint(0, bound), None),
        Band(None, 0, "top_left"), Band(r.randint(0, bound), r.randint(-5, 9)), Band(-5, 3),
        Band(r.randint(0, 40), r.randint(0, 40)),
    ))  # fmt: skip
    group, batch = r.choice((1, 2)), r.choice((1, 2))
    problem = problem_of(band=band, q_len=q_len, k_len=k_len, heads=2 * group, kv_heads=2, batch=batch)
    queries = r.choice((1, 2))
    cfg = config.Config(r.choice((128, 192)), r.choice((64, 128)), r.choice((2, 3)), queries, r.random() < 0.7)
    options = replace(
        host.Options.of(problem, cfg, band.offset(q_len, k_len)), O_IN_Q=queries == 1 and r.random() < 0.7
    )
    names = ("q_len", "k_len", "diagonal", "left", "right", "heads", "group", "tiles", "together", "total")
    tiles = -(-q_len // cfg.rows)
    total = tiles * batch * problem.heads
    values = (
        q_len, k_len, band.offset(q_len, k_len), *band.bounds, problem.heads, group, tiles, r.choice((1, 2, 3)), total,
    )  # fmt: skip
    programs = min(total, r.choice((1, 2, 3, 99)))
    counter = [0]
    log = []
    for program in range(programs):  # one after another: the first takes what is left of the others' tiles
        block = Block(dict(zip(names, values, strict=True)), options, program, programs, counter, 100 * seed + program)
        block.run()
        log += block.log
    assert counter == [0]

    stored = sorted(entry[2] for entry in log if entry[0] == "store")
    firsts = [row * cfg.rows + piece for row in range(tiles) for piece in range(0, cfg.rows, config.PIECE)]
    assert stored == [(b, h, first) for b in range(batch) for h in range(problem.heads) for first in firsts]
    taken = defaultdict(list)
    for _, _, (b, h, first), (k_b, k_h, j0), masked in (entry for entry in log if entry[0] == "block"):
        assert (k_b, k_h) == (b, h // group)
        taken[b, h, first].append((j0, masked))
    seen = band.dense(q_len, k_len)
    for (_, _, first), blocks in taken.items():
        assert [j0 for j0, _ in blocks] == sorted({j0 for j0, _ in blocks}, reverse=True)
        unmasked = dict(blocks)
        rows = seen[first : first + config.PIECE]
        for j0 in range(0, k_len, cfg.keys):
            part = rows[:, j0 : j0 + cfg.keys]
            assert j0 in unmasked or not part.any()
            assert unmasked.get(j0, True) or (part.all() and j0 + cfg.keys <= k_len)
