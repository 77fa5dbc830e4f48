"""The Hopper backend without a GPU: what it takes, what its kernels take, whether its partitions wait for ever."""

from __future__ import annotations

import contextlib
import io
import itertools
import os
import random
import re
import subprocess
import tempfile
from collections import defaultdict
from dataclasses import replace
from types import FunctionType, SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hopper_cases import seeds

import tilewise
from tilewise import Band, Problem, causal, sliding_window
from tilewise.kernels.hopper import backend, config
from tilewise.mask import tile_of
from tilewise.problem import Aux, Layout

F16, BF16 = torch.float16, torch.bfloat16
FULL = Band()


def problem_of(
    d: int = 64, v_dim: int | None = None, band: Band = FULL, dtype: torch.dtype = BF16, q_len: int = 200,
    k_len: int | None = None, batch: int = 1, heads: int = 2, kv_heads: int | None = None,
    layout: Layout = Layout.DENSE, blocks: bool = False, q_lens: bool = False, k_lens: bool = False, **options: Any,
) -> Problem:  # fmt: skip
    kv, k_len = kv_heads or heads, k_len or q_len
    q, k, v = (
        torch.empty(shape, dtype=dtype, device="meta")
        for shape in ((batch, heads, q_len, d), (batch, kv, k_len, d), (batch, kv, k_len, v_dim or d))
    )
    varied = {"q_layout": layout, "k_layout": layout, "q_lens": q_lens, "k_lens": k_lens}
    return replace(
        Problem.of(q, k, v, mask=band, **options)[0], device="sm90", mask="blocks" if blocks else None, **varied
    )


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
    seen, q = torch.ones(200, 200, dtype=torch.bool), torch.empty(1, 2, 200, 64, dtype=F16)
    problem = replace(Problem.of(q, q, q, mask=seen)[0], device="sm90")
    assert backend.why_not(problem) == "it does not take a boolean mask yet"
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


def test_dropout_that_it_takes() -> None:
    pytest.importorskip("triton")
    wide = "chosen; its backward is triton's: it takes no dropout at head sizes over 128"
    for d, where in ((64, "chosen\n"), (256, wide)):
        problem = problem_of(d, dropout_p=0.1, seed=1)
        assert backend.why_not(problem) is None
        assert f"hopper: {where}" in tilewise.explain(problem)


def test_sequences_and_block_masks_that_it_takes() -> None:
    pytest.importorskip("triton")
    seen = tilewise.BlockMask.butterfly(200, 200)
    for d, where in ((64, "chosen\n"), (256, "chosen; its backward is triton's: it takes ")):
        q = torch.empty(200, 2, d, dtype=F16)
        packed = replace(Problem.of(q, q, q, cu_seqlens_q=torch.tensor([0, 200], dtype=torch.int32))[0], device="sm90")
        blocks = replace(Problem.of(*[q[None].transpose(1, 2)] * 3, mask=causal & seen)[0], device="sm90")
        lengths = [replace(problem_of(d), **{side: True}) for side in ("q_lens", "k_lens")]
        for problem in (packed, blocks, *lengths):
            assert backend.why_not(problem) is None
            assert f"hopper: {where}" in tilewise.explain(problem)


# ---- the table -------------------------------------------------------------------------------------------------------


def test_rows_fit_the_shared_memory_and_the_registers() -> None:
    assert all(row.evidence for row in config.TABLE.values())
    for sizes in itertools.product(config.WIDTHS, repeat=2):
        problem = problem_of(*sizes, dropout_p=0.5, seed=1)
        for cfg in (*(config.row_of(*sizes).config(kind) for kind in config.KINDS), config.choose(problem)):
            assert cfg.rows % config.PIECE == 0
            assert cfg.keys % config.PIECE == 0
            # A piece's last block and its tile's are then neighbours or one (`steps.mask`: what `MASKED` relies on).
            consumer, producer = cfg.registers
            assert 128 * (consumer * cfg.consumers + producer) <= 65536
            assert config.shared_bytes(cfg, *sizes) + config.BARRIERS <= config.SHARED, (sizes, cfg)


def test_a_configuration_depends_on_no_batch_and_no_heads() -> None:
    for band in (FULL, causal, sliding_window(100)):
        for length in (100, 5000):
            some = problem_of(band=band, q_len=length)
            assert config.choose(some) == config.choose(replace(some, batch=777, heads=12, kv_heads=3, needs_grad=True))


def test_tiles_of_block_masks_have_its_rows_and_packed_ones_do_not_ask_for_tokens() -> None:
    for d in config.WIDTHS:
        cfg = config.choose(problem_of(d, blocks=True, q_len=5000))
        assert (cfg.rows, 128 % cfg.keys) == (128, 0)
        for band in (FULL, causal):
            few, many = (config.choose(problem_of(d, band=band, q_len=n, layout=Layout.PACKED)) for n in (100, 5000))
            assert few == many


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


@pytest.mark.parametrize("heads", [0, 1, 2, 16, 20, 33, 128, 1024])
@pytest.mark.parametrize("size", [1, 1 << 18, 4 << 20, 10 << 20, 1 << 30])
def test_heads_side_by_side_come_in_even_groups_that_fit(heads: int, size: int) -> None:
    pytest.importorskip("triton")
    from tilewise.kernels.triton.host import TOGETHER_BYTES, side_by_side

    together = side_by_side(heads, size)
    assert together == 1 or together * size <= TOGETHER_BYTES
    if heads:
        last = (heads - 1) % together + 1
        assert last > together // 2, (together, last)
        assert together == heads or together * 2 > min(TOGETHER_BYTES // size, 32), "far fewer than could"


# ---- the kernels, compiled -------------------------------------------------------------------------------------------

KINDS: dict[str, dict[str, Any]] = {
    "full": {"q_len": 1000}, "causal": {"band": causal, "q_len": 1024}, "long": {"band": causal, "q_len": 4096},
    "ragged": {"band": causal, "q_len": 1000, "k_len": 1017}, "window": {"band": sliding_window(100), "q_len": 4096},
    "dressed": {"band": causal, "q_len": 1000, "k_len": 1017, "softcap": 20.0, "sink": meta(2)},
    "packed": {"layout": Layout.PACKED, "batch": 3}, "blocks": {"blocks": True, "q_len": 1024},
    "packed causal": {"layout": Layout.PACKED, "batch": 3, "band": causal},
    "lengths": {"batch": 3, "q_len": 1000, "q_lens": True, "k_lens": True},
    "dropout": {"band": causal, "q_len": 1024, "dropout_p": 0.1, "seed": 1},
    "every": {
        "layout": Layout.PACKED, "batch": 3, "blocks": True, "band": sliding_window(100), "q_lens": True,
        "k_lens": True, "softcap": 20.0, "sink": meta(2),
    },
}  # fmt: skip
SOME = [  # of EVERY, for a kernel takes some ten seconds
    (64, 64, BF16, "long"), (128, 128, BF16, "causal"), (96, 96, F16, "causal"),
    (128, 128, BF16, "dressed"), (256, 256, BF16, "ragged"), (192, 128, BF16, "causal"),
    (128, 128, BF16, "packed causal"), (128, 128, BF16, "blocks"), (128, 128, BF16, "dropout"),
]  # fmt: skip
# Bytes, of what their newer ptxas keeps from tile to tile; in no loop over keys.
SPILLS = {"3.7": 36, "3.8": 56, "3.9": 192}
SPILLS_BESIDE = {(192, 128): 64}  # of a tile's numbers, beside the places of K's and Q's parts
SPILLS_OF_ALL = 96  # of a kernel with every option: numbers of a tile, in no loop over keys either
READ_IN_LOOP = {(256, "dropout"): 2, (128, "dropout"): 1}  # numbers of a tile, beside 800 instructions
SPILLS_OF_DROPOUT = 256  # numbers of a tile, in no loop over keys
UNLIKE = [(256, 128), (128, 256), (128, 64), (64, 128), (256, 64), (64, 256)]
UNLIKE += [(192, 128), (128, 192), (96, 64), (96, 256)]
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
    aux, lists = contents_of(problem)
    start = host.launch_of(problem, (0, 0, 0, 0), 132, True, lists, *(x.stride() for x in (q, k, v))).start
    with recording() as launches:
        start(
            o, q, k, v, torch.empty(problem.lse_shape), sink, aux.seed, torch.zeros(1, dtype=torch.int32),
            *host.contents(aux),
        )  # fmt: skip
    said = io.StringIO()
    with knobs.nvidia.scope(), knobs.compilation.scope(), contextlib.redirect_stdout(said):
        knobs.nvidia.dump_ptxas_log = knobs.compilation.always_compile = True
        binary = compile_for(launches[0], GPUTarget("cuda", 90, 32))
    return binary, said.getvalue()


def contents_of(problem: Problem) -> tuple[Aux, tuple[int, ...]]:
    """Of the problem's options those whose contents say which tiles there are, and how a BlockMask's lists lie."""
    from tilewise.kernels.hopper import host

    some = torch.zeros(problem.batch + 1, dtype=torch.int32)
    packed = problem.q_layout is Layout.PACKED
    seen = tilewise.BlockMask.butterfly(256, 256) if problem.mask == "blocks" else None
    aux = Aux(
        cu_q=some if packed else None, cu_k=some if packed else None, q_lens=some if problem.q_lens else None,
        k_lens=some if problem.k_lens else None, mask=seen,
        seed=torch.zeros((), dtype=torch.int64) if problem.dropout_p else None,
    )  # fmt: skip
    return aux, host.lists_of(aux)


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
    allowed = SPILLS.get(triton.__version__[:3], 0) + SPILLS_BESIDE.get((d, v_dim), 0)
    assert taken.spilled <= allowed + {"every": SPILLS_OF_ALL, "dropout": SPILLS_OF_DROPOUT}.get(kind, 0)
    assert not taken.unwritten, "ptxas left out an instruction"
    bytes_of_tiles = config.shared_bytes(cfg, config.width(d), config.width(v_dim))
    assert bytes_of_tiles < taken.shared <= min(bytes_of_tiles + config.BARRIERS, config.SHARED)
    listing = listing_of(binary)
    assert "registers" in said
    assert "wgmma" not in said, said  # ptxas reports when it makes them wait for each other
    assert "warning" not in said, said
    for instruction in ("HGMMA", "UTMALDG", "UTMASTG", "USETMAXREG"):
        assert instruction in listing, instruction
    # In each consumer's loop, and in its step behind half a block, the exponentials lie between the wait for S and the
    # one for P V, which is in flight there.
    steps = 2 if cfg.half and problem.band.right is not None and problem.mask is None else 1
    parts = config.width(v_dim).bit_count()
    overlapped = re.findall(rf"DEPBAR\.LE gsb0, 0x{parts}(.*?)DEPBAR\.LE gsb0, 0x0", listing, re.DOTALL)
    assert [part.count("MUFU.EX2") >= cfg.keys // 2 for part in overlapped] == [True] * cfg.consumers * steps
    allowed = READ_IN_LOOP.get((d, kind), 0)
    assert all(len(re.findall("LDL", part)) <= allowed and "STL" not in part for part in overlapped)
    if kind == "dropout":  # and so do most of Philox's products, 16 for four of a thread's pairs
        assert all(part.count("IMAD.WIDE") >= cfg.keys for part in overlapped)


@pytest.mark.parametrize(("d", "v_dim", "dtype", "kind"), SOME, ids=str)
def test_a_kernel_compiles_within_its_limits(d: int, v_dim: int, dtype: torch.dtype, kind: str) -> None:
    check(d, v_dim, dtype, kind)


@pytest.mark.slow
@pytest.mark.parametrize(("d", "v_dim", "dtype", "kind"), EVERY, ids=str)
def test_every_kernel_compiles_within_its_limits(d: int, v_dim: int, dtype: torch.dtype, kind: str) -> None:
    check(d, v_dim, dtype, kind)


# ---- dropout ---------------------------------------------------------------------------------------------------------


class Numbers(np.ndarray):
    """A tensor of the steps played in Python: as many bits as its dtype says, and they wrap around."""

    def permute(self, order: list[int]) -> Numbers:
        return self.transpose(order)

    def to(self, dtype: Any) -> Numbers:
        return self.astype(dtype)

    type = SimpleNamespace(layout=None)


def numbers_of(x: Any, dtype: Any) -> Numbers:
    return np.asarray(x, dtype).view(Numbers)


def drawn_by_asm(asm: str, constraints: str, args: tuple[Any, ...], dtype: Any, pack: int = 1, **_: Any) -> Any:
    """The few instructions of PTX that dropout is made of, for all elements at once, or, packed, for all threads.

    Packed ones are (warp, bit 3 of the row, row, 8 columns, lane, b): registers are counted by b, then by bit 3.
    """
    outputs = len(dtype) if isinstance(dtype, tuple) else 1
    args = np.broadcast_arrays(*(np.asarray(x) for x in args))
    if pack > 1:
        args = [x.transpose(3, 1, 5, 0, 2, 4).reshape(pack, -1) for x in args]
        args = [register for x in args for register in x]
    assert constraints.count(",") + 1 == outputs * pack + len(args)
    place: dict[str, Any] = {f"${outputs * pack + n}": x for n, x in enumerate(args)}
    for held, text in re.findall(r"(@p )?([a-z][a-z0-9.]* [^;]*);", re.sub(r"\.reg [^;]*;", "", asm)):
        name, rest = text.split(" ", 1)
        to, *given = re.findall(r"\{[^}]*\}|\$?\w+", rest)
        x = [place[g] if g in place else 0 if g == "0f00000000" else int(g, 0) for g in given]
        before = place.get(to)
        if name == "mul.wide.u32":
            place[to] = x[0].astype(np.uint64) * np.uint64(x[1])
        elif name == "mov.b64":
            low, high = re.findall(r"\$?\w+", to)
            place[low], place[high] = x[0].astype(np.uint32), (x[0] >> np.uint64(32)).astype(np.uint32)
        else:
            place[to] = {
                "xor.b32": lambda a, b: a ^ b, "mov.b32": lambda a: a, "or.b32": lambda a, b: a | b,
                "and.b32": lambda a, b: a & np.array(b).astype(np.int32), "setp.ne.b32": lambda a, b: a != b,
                "setp.gt.u32": lambda a, b: a > b.astype(np.uint32), "selp.f32": lambda a, b, p: np.where(p, a, b),
                "selp.b32": lambda a, b, p: np.where(p, np.int32(a), np.int32(b)),
                "shfl.sync.bfly.b32": lambda a, *_: a,
            }[name](*x)  # fmt: skip
        if held:
            place[to] = np.where(place["p"], place[to], before)
    found = [place[f"${n}"].view(Numbers) for n in range(outputs * pack)]
    if pack > 1:
        return np.stack(found).reshape(8, 2, 2, 4, 8, 4).transpose(3, 1, 4, 0, 5, 2).view(Numbers)
    return found if isinstance(dtype, tuple) else found[0]


def played_dropout(*functions: str) -> dict[str, Any]:
    """Functions of `kernels.hopper.dropout` as the Python that they are, but for layouts."""
    from tilewise.kernels.hopper import dropout

    constants = {name: getattr(dropout, name).value for name in ("A", "B", "STEP_0", "STEP_1", "ROUNDS", "BEGUN")}
    names: dict[str, Any] = vars(dropout) | constants | {
        "PIECE": 64, "accumulator": lambda _: None, "numbers": lambda dim, x: np.arange(x.shape[dim]).reshape(
            [-1 if n == dim else 1 for n in range(x.ndim)]
        ).astype(np.int32).view(Numbers),
        "gl": SimpleNamespace(
            uint32=np.uint32, int32=np.int32, float32=np.float32, tuple=tuple, constexpr=Any, load=lambda x: x,
            to_tensor=lambda x: x, static_range=range, split=lambda x: (x[..., 0], x[..., 1]),
            zeros=lambda shape, dtype, _: np.zeros(shape, dtype).view(Numbers), SliceLayout=lambda *_: None,
            join=lambda a, b: np.stack((a, b), -1).view(Numbers), convert_layout=lambda x, *_, **__: x,
            umulhi=lambda x, y: (x.astype(np.uint64) * np.uint64(y) >> np.uint64(32)).astype(np.uint32).view(Numbers),
            sum=lambda x, dim: x.sum(dim, dtype=np.int32).view(Numbers), inline_asm_elementwise=drawn_by_asm,
        ),
    }  # fmt: skip
    for name in ("begin", "steps_of", "quarters", "as_piece", "product", *functions):
        function = getattr(dropout, name)
        names[name] = FunctionType(function.fn.__code__, names, name)
    return names


@pytest.mark.parametrize(("KEYS", "p"), [(128, 0.1), (64, 0.5), (64, 1.0), (128, 1e-12)])
def test_a_piece_drops_the_pairs_that_the_contract_says(KEYS: int, p: float) -> None:
    """`lots_of` and `drop` as the Python that they are, but for layouts."""
    pytest.importorskip("triton")
    from tilewise.algorithm.dropout import keep
    from tilewise.kernels.triton.host import dropout as numbers

    plain = played_dropout("lots_of", "drop")
    (s, h, first, j0), (b0, h0, i0, k0) = (2, 5, 192, 640), (3, 4, 48, 256)
    seed = -(2**62) + 12345
    least, scale = numbers(p)
    draw = (numbers_of(seed, np.int64), numbers_of(least, np.int32), scale, b0, h0, i0, k0)
    P = numbers_of(np.ones((64, KEYS)), np.float32)
    with np.errstate(over="ignore"):
        lots = plain["lots_of"](draw, *(numbers_of(x, np.int32) for x in (s, h, first)))
        got = plain["drop"](P, lots, numbers_of(j0, np.int32))
    i, j = i0 + first + torch.arange(64)[:, None], k0 + j0 + torch.arange(KEYS)[None]
    assert torch.equal(torch.from_numpy(np.asarray(got)) != 0, keep(seed, p, *torch.tensor([b0 + s, h0 + h]), i, j))


@pytest.mark.parametrize("p", [0.1, 0.5, 1.0, 1e-12])
def test_keys_by_queries_are_kept_as_the_contract_says(p: float) -> None:
    """What the backward draws: `lots_of_keys`, `drawn` and `kept`."""
    pytest.importorskip("triton")
    from tilewise.algorithm.dropout import keep
    from tilewise.kernels.triton.host import dropout as numbers

    plain = played_dropout("lots_of_keys", "drawn", "kept")
    (s, h, first, i), (b0, h0, i0, j0) = (2, 5, 192, 640), (3, 4, 48, 80)
    seed = -(2**62) + 12345
    least, scale = numbers(p)
    draw = (numbers_of(seed, np.int64), numbers_of(least, np.int32), scale, b0, h0, i0, j0)
    P = numbers_of(np.ones((64, 64)), np.float32)
    with np.errstate(over="ignore"):
        lots = plain["lots_of_keys"](draw, *(numbers_of(x, np.int32) for x in (s, first)))
        got = plain["kept"](P, plain["drawn"](lots, *(numbers_of(x, np.int32) for x in (h, i))))
    queries, keys = i0 + i + torch.arange(64)[:, None], j0 + first + torch.arange(64)[None]
    want = keep(seed, p, *torch.tensor([b0 + s, h0 + h]), queries, keys)
    assert torch.equal(torch.from_numpy(np.asarray(got)) != 0, want.T)


# ---- the protocol, played --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", seeds(150))
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
    d, v_dim = r.choice(((64, 64), (96, 96), (192, 128)))
    problem = problem_of(d, v_dim, band, q_len=q_len, k_len=k_len, heads=2 * group, kv_heads=2, batch=batch)
    queries = r.choice((1, 2))
    cfg = config.Config(
        r.choice((128, 192)), r.choice((64, 128)), r.choice((2, 3)), queries, r.random() < 0.7, r.random() < 0.3
    )
    options = replace(
        host.Options.of(problem, cfg, band.offset(q_len, k_len)),
        O_IN_Q=queries == 1 and not cfg.q_in_registers and r.random() < 0.7,
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
    assert stored == [(b, h, first, 0) for b in range(batch) for h in range(problem.heads) for first in firsts]
    taken = defaultdict(list)
    for _, _, (b, h, first), (k_b, k_h, j0), masked, _, keys in (entry for entry in log if entry[0] == "block"):
        assert (k_b, k_h) == (b, h // group)
        taken[b, h, first].append((j0, masked, keys))
    seen = band.dense(q_len, k_len)
    for (_, _, first), blocks in taken.items():
        assert [j0 for j0, _, _ in blocks] == sorted({j0 for j0, _, _ in blocks}, reverse=True)
        unmasked = {j0: masked for j0, masked, _ in blocks}
        sides = {j0: keys for j0, _, keys in blocks}
        rows = seen[first : first + config.PIECE]
        for j0 in range(0, k_len, cfg.keys):
            part = rows[:, j0 : j0 + cfg.keys]
            assert j0 in unmasked or not part.any()
            assert not part[:, sides.get(j0, 0) :].any()
            assert unmasked.get(j0, True) or (part.all() and j0 + cfg.keys <= k_len)


@pytest.mark.parametrize("seed", seeds(150))
def test_sequences_and_block_masks_played(seed: int) -> None:
    """Sequences of unlike lengths, packed or padded, a BlockMask, an origin: each pair is seen by whom it should be."""
    pytest.importorskip("triton")
    from hopper_machine import APART, NO_LISTS, Block, lists_in

    from tilewise.kernels.hopper import host
    from tilewise.kernels.tensors import FAR

    r = random.Random(seed)
    drawn = Drawn(r, r.choice((64, 96)))
    packed, blocks, q_lens, k_lens = drawn.packed, drawn.blocks, drawn.q_lens, drawn.k_lens
    batch, group, band, origin, problem = drawn.batch, drawn.group, drawn.band, drawn.origin, drawn.problem
    spans_q, cu_q, cu_k, used_q, used_k = drawn.spans_q, drawn.cu_q, drawn.cu_k, drawn.used_q, drawn.used_k
    q_len, k_len, mask, varied = drawn.q_len, drawn.k_len, drawn.mask, drawn.varied
    diagonal = origin[2] - origin[3]
    known = band.align == "top_left" or (not (q_lens or k_lens) and (drawn.alike or not packed))
    if not varied:
        diagonal += band.offset(q_len, k_len)
    rows = 128 if blocks else r.choice((128, 192))
    cfg = config.Config(rows, r.choice((64, 128)), r.choice((2, 3)), r.choice((1, 2)), r.random() < 0.7)
    options = replace(host.Options.of(problem, cfg, diagonal if known else None, origin), DROPOUT=r.random() < 0.5)
    tiles = q_len // rows + batch + 1 if packed else -(-q_len // rows)
    total = tiles * problem.heads * (1 if packed else batch)
    lists: tuple[Any, ...] = NO_LISTS
    if mask is not None:
        lists = lists_in(mask.query_major, batch, origin, origin[2:])
    numbers = {
        "q_len": q_len, "k_len": k_len, "diagonal": diagonal, "left": band.bounds[0], "right": band.bounds[1],
        "heads": problem.heads, "group": group, "tiles": tiles, "together": r.choice((1, 2, 3)), "total": total,
    }  # fmt: skip
    programs, counter, log = min(total, r.choice((1, 2, 3, 99))), [0], []
    for program in range(programs):
        block = Block(
            numbers, options, program, programs, counter, 100 * seed + program,
            (*drawn.contents(), batch, 0 if packed else APART), lists,
        )  # fmt: skip
        block.run()
        log += block.log
    assert counter == [0]

    # What is stored: each row of memory once. A consumer's blocks are those of what it stores next.
    ends = [*spans_q, q_len - cu_q[-1]] if packed else spans_q
    pieces = {
        (s, h, first) for s, span in enumerate(ends) for h in range(problem.heads)
        for at in range(0, span, rows) for first in range(at, at + rows, config.PIECE)
    }  # fmt: skip
    by_end = {sum(ends[: s + 1]): s for s, span in enumerate(ends) if span}
    stored, taken, since, in_use = [], {}, defaultdict(list), {}
    for what, consumer, *entry in log:
        if what == "in use":
            in_use[consumer] = entry[0]
            continue
        if what == "block":
            since[consumer].append(entry)
            continue
        s, h, first = entry[0][:3]
        if packed:
            _, end, h, row, _ = entry[0]
            s = by_end[end]
            first = row + ends[s] - FAR
        stored.append((s, h, first))
        assert in_use.pop(consumer, None) == ((used_q[s] if s < batch else 0) - first if varied else None)
        taken[s, h, first] = since.pop(consumer)
    assert sorted(stored) == sorted(pieces)

    # What each of a sequence's rows saw.
    for s, h, first in pieces:
        start_q, start_k = (cu_q[s], cu_k[s]) if packed else (0, 0)
        if s == batch:
            continue
        n, m = used_q[s], used_k[s]
        if first >= n or first >= ends[s]:
            continue
        i, j = torch.arange(first, min(first + config.PIECE, n))[:, None], torch.arange(m + 2 * cfg.keys)
        banded, true = drawn.seen(s, h, i, j)
        got = torch.zeros_like(true)
        for (q_b, q_h, row), (k_b, k_h, key), masked, tile, keys in taken[s, h, first]:
            assert q_b == k_b == (0 if packed else s)
            assert (q_h, k_h, row) == (h, h // group, start_q + first)
            j0 = key - start_k
            here = slice(j0, j0 + keys)
            part = banded[:, here] if masked else torch.ones_like(banded[:, here])
            if tile >= 0:
                bits = torch.from_numpy(np.unpackbits(mask.bits[tile].numpy(), axis=1, bitorder="little")).bool()
                part = part & bits[i % 128, (origin[3] + j[here]) % 128]
            assert not (got[:, here] & part).any()
            got[:, here] |= part
        assert torch.equal(got, true)


class Drawn:
    """Sequences of unlike lengths, packed or padded, a Band, a BlockMask, an origin, by a seed."""

    def __init__(self, r: random.Random, d: int = 64) -> None:
        self.packed, self.blocks = packed, blocks = r.choice((False, True)), r.choice((False, True))
        self.q_lens, self.k_lens = q_lens, k_lens = r.choice((False, True)), r.choice((False, True))
        self.batch, self.group = batch, group = r.choice((1, 2, 3)), r.choice((1, 2))
        self.alike = packed and r.random() < 0.5
        self.varied = packed or q_lens or k_lens
        self.spans_q = spans_q = self.spans(r)
        self.spans_k = spans_k = spans_q if self.alike else self.spans(r)
        self.cu_q, self.cu_k = ([sum(spans[:n]) for n in range(batch + 1)] for spans in (spans_q, spans_k))
        self.q_len = self.cu_q[-1] + 5 if packed else spans_q[0]
        self.k_len = self.cu_k[-1] + r.choice((0, 70)) if packed else spans_k[0]
        self.used_q, self.used_k = (
            [r.randint(0, n) for n in spans] if lens else spans
            for lens, spans in ((q_lens, spans_q), (k_lens, spans_k))
        )  # fmt: skip
        self.band = r.choice((
            FULL, FULL, causal, causal, Band(None, r.randint(-9, 300)), Band(r.randint(0, 300), None),
            Band(None, 0, "top_left"), Band(r.randint(0, 300), r.randint(-5, 9)), Band(-5, 3),
        ))  # fmt: skip
        self.origin = origin = (1, 1, 128, 256) if blocks and r.random() < 0.3 else (0, 0, 0, 0)
        self.problem = problem_of(
            d, band=self.band, q_len=max(self.q_len, 1), k_len=max(self.k_len, 1), heads=2 * group, kv_heads=2,
            batch=batch, blocks=blocks, layout=Layout.PACKED if packed else Layout.DENSE, q_lens=q_lens, k_lens=k_lens,
        )  # fmt: skip
        self.mask = mask_of(r, batch + origin[0], 2 * group + origin[1], origin) if blocks else None

    def spans(self, r: random.Random) -> list[int]:
        lengths = (0, 1, 33, 64, 65, 127, 128, 129, 200, 300)
        return [r.choice(lengths) for _ in range(self.batch)] if self.packed else [r.choice(lengths[1:])] * self.batch

    def contents(self) -> list[Any]:
        """Pointers to cu_seqlens and lengths."""
        from hopper_machine import Pointer

        given = (
            (self.packed, self.cu_q),
            (self.packed, self.cu_k),
            (self.q_lens, self.used_q),
            (self.k_lens, self.used_k),
        )
        return [Pointer(x) if there else None for there, x in given]

    def seen(self, s: int, h: int, i: torch.Tensor, j: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """The pairs that sequence s, head h shows: by its Band and its keys' end, and by its BlockMask, too."""
        n, m, origin = self.used_q[s], self.used_k[s], self.origin
        banded = self.band.visible(i, j, origin[2] - origin[3] + self.band.offset(n, m)) & (j < m)
        if self.mask is None:
            return banded, banded
        dense = self.mask.to_dense()
        dense = dense[min(origin[0] + s, self.mask.batch - 1), min(origin[1] + h, self.mask.heads - 1)]
        padded = torch.zeros(2048, 2048, dtype=torch.bool)
        padded[: dense.shape[0], : dense.shape[1]] = dense
        return banded, banded & padded[origin[2] + i, origin[3] + j]


def mask_of(r: random.Random, batch: int, heads: int, origin: tuple[int, ...]) -> tilewise.BlockMask:
    """A BlockMask of EMPTY, MIXED and FULL tiles, for sequences of up to 300 tokens from the origin on."""
    make = torch.Generator().manual_seed(r.randrange(2**31))
    sides = (r.choice((1, batch)), r.choice((1, heads)), 300 + origin[2], 300 + origin[3])
    kind = torch.rand((*sides[:2], *(-(-n // 128) for n in sides[2:])), generator=make)
    kind = kind.repeat_interleave(128, 2).repeat_interleave(128, 3)[..., : sides[2], : sides[3]]
    return tilewise.BlockMask.from_dense((kind > 0.7) | ((torch.rand(sides, generator=make) < 0.5) & (kind > 0.3)))
