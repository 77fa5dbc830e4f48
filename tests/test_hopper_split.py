"""The Hopper backward in two kernels, without a GPU: what its kernels take, whether its partitions wait for ever."""

from __future__ import annotations

import contextlib
import io
import itertools
import random
import re
from collections import Counter, defaultdict
from itertools import pairwise
from types import FunctionType, SimpleNamespace
from typing import Any

import pytest
import torch
from hopper_cases import seeds
from test_hopper import KINDS, listing_of, problem_of
from test_hopper_backward import recorded

from tilewise import Band, Problem, causal
from tilewise.kernels.hopper import config

pytest.importorskip("triton")
F16, BF16 = torch.float16, torch.bfloat16


# ---- the table -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("which", ["dq", "dkdv"])
def test_it_fits_the_shared_memory_and_the_registers(which: str) -> None:
    bytes_of = getattr(config, f"{which}_bytes")
    for sizes in itertools.product(config.WIDTHS, repeat=2):
        if max(sizes) <= max(config.BACKWARD):
            continue
        row = config.split_of(*sizes)
        cfg: config.Kernel = getattr(row, which)
        assert row.evidence
        assert cfg.rows % config.PIECE == cfg.keys % config.PIECE == 0
        if which == "dq":
            assert cfg.rows == 2 * config.PIECE
        assert row.dq.rows % row.dkdv.rows == 0  # dq_kernel writes the statistics that dkdv_kernel reads
        consumer, producer = cfg.registers
        assert 128 * (2 * consumer + producer) <= 65536
        assert bytes_of(cfg, *sizes) + 1024 <= config.SHARED


# ---- the kernels, compiled -------------------------------------------------------------------------------------------

SOME = [(256, 256, F16, "window"), (192, 192, BF16, "dressed"), (192, 128, BF16, "causal")]
UNLIKE = [(192, 128), (256, 128), (128, 256), (256, 64), (96, 256)]
EVERY = [
    (d, d, dtype, kind) for d in (192, 256) for dtype in (BF16, F16) for kind in ("full", "long", "window", "dressed")
]
EVERY += [(d, v_dim, BF16, kind) for d, v_dim in UNLIKE for kind in ("full", "window")]
# Bytes, without a softcap and with one, whose derivative takes as many registers as the scores.
SPILLS = {"dq": (32, 160), "dkdv": (0, 0)}
EACH = {"dq": 2, "dkdv": 1}  # how many warpgroups have exponentials


def compiled(problem: Problem) -> tuple[list[Any], str]:
    """dq_kernel and dkdv_kernel for sm90, and what ptxas said."""
    from triton import knobs
    from triton.backends.compiler import GPUTarget

    from tilewise.kernels.launch import compile_for

    said = io.StringIO()
    launches = recorded(problem, dlse=True)
    with knobs.nvidia.scope(), knobs.compilation.scope(), contextlib.redirect_stdout(said):
        knobs.nvidia.dump_ptxas_log = knobs.compilation.always_compile = True
        return [compile_for(launch, GPUTarget("cuda", 90, 32)) for launch in launches], said.getvalue()


def check(d: int, v_dim: int, dtype: torch.dtype, kind: str) -> None:
    """Compile both kernels; AssertionError where one is not what it was made to be."""
    problem = problem_of(d, v_dim, dtype=dtype, **KINDS[kind])
    binaries, said = compiled(problem)
    from tilewise.kernels.launch import resources

    assert "registers" in said
    assert "wgmma" not in said, said  # ptxas reports when it makes them wait for each other
    assert "warning" not in said, said
    wide, v_wide = config.width(d), config.width(v_dim)
    for name, binary in zip(("dq", "dkdv"), binaries, strict=True):
        kernel: config.Kernel = getattr(config.split_of(d, v_dim), name)
        taken = resources(binary)
        assert taken.spilled <= SPILLS[name][kind == "dressed"], name
        assert not taken.unwritten, "ptxas left out an instruction"
        bytes_of_tiles = getattr(config, f"{name}_bytes")(kernel, wide, v_wide)
        assert bytes_of_tiles < taken.shared <= min(bytes_of_tiles + 2048, config.SHARED)
        listing = listing_of(binary)
        for instruction in ("HGMMA", "UTMALDG", "UTMASTG", "USETMAXREG"):
            assert instruction in listing, instruction
        assert not re.search(r"\b(RED|ATOM)|UTMARED", listing), "sums have one owner"
        # Triton lets a partition's warps meet before one thread arrives for all of them.
        events = re.findall(r"BAR\.SYNC|HGMMA|DEPBAR|LDS|STS|SYNCS\.ARRIVE\.TRANS64\.A1T0", listing)
        before = [a for a, b in pairwise(events) if "ARRIVE" in b]
        assert before
        assert set(before) == {"BAR.SYNC"}
        scores = (kernel.rows if name == "dkdv" else config.PIECE) * kernel.keys
        exponentials = EACH[name] * scores // 128 * (2 if kind == "dressed" else 1)  # tanh has one too
        assert listing.count("MUFU.EX2") == exponentials


@pytest.mark.parametrize(("d", "v_dim", "dtype", "kind"), SOME, ids=str)
def test_a_kernel_compiles_within_its_limits(d: int, v_dim: int, dtype: torch.dtype, kind: str) -> None:
    check(d, v_dim, dtype, kind)


@pytest.mark.slow
@pytest.mark.parametrize(("d", "v_dim", "dtype", "kind"), EVERY, ids=str)
def test_every_kernel_compiles_within_its_limits(d: int, v_dim: int, dtype: torch.dtype, kind: str) -> None:
    check(d, v_dim, dtype, kind)


# ---- the mask --------------------------------------------------------------------------------------------------------


class _Tensor(torch.Tensor):
    type = SimpleNamespace(layout=None)


@pytest.mark.parametrize("band", [causal, Band(None, -3), Band(5, None), Band(9, 2), Band(-5, 3)], ids=str)
def test_keys_by_queries_are_masked_as_the_band_says(band: Band) -> None:
    from tilewise.kernels.hopper import backward_host, backward_split

    def numbers(dim: int, x: torch.Tensor) -> torch.Tensor:
        return torch.arange(x.shape[dim]).view([-1 if n == dim else 1 for n in range(4)])

    problem = problem_of(band=band, q_len=300, k_len=400)
    call = SimpleNamespace(**numbers_of(problem, 400, 128, 2, 1))
    gl = SimpleNamespace(where=torch.where, convert_layout=lambda x, *_, **__: x)
    plain = backward_split.mask_turned.fn
    mask = FunctionType(plain.__code__, {**plain.__globals__, "gl": gl, "numbers": numbers, "INF": torch.inf})
    for j0, i0 in ((0, 0), (128, 64), (256, 128), (128, 192)):
        options = backward_host.SplitOptions.of(problem, config.Kernel(64, 128, 1, 1))
        got = mask(torch.zeros(128, 64).as_subclass(_Tensor), j0, i0, call, options)
        seen = band.dense(300, 400)[i0 : i0 + 64, j0 : j0 + 128].T
        assert torch.equal(got == 0, seen)


# ---- the protocol, played --------------------------------------------------------------------------------------------


def drawn(seed: int) -> tuple[random.Random, Any]:
    """A small problem."""
    r = random.Random(seed)
    lengths = (1, 33, 64, 65, 128, 129, 192, 200, 300)
    q_len, k_len = r.choice(lengths), r.choice(lengths)
    k_len = q_len if r.random() < 0.4 else k_len
    bound = max(q_len, k_len) + 5
    band = r.choice((
        Band(), causal, causal, Band(None, r.randint(-9, bound)), Band(r.randint(0, bound), None),
        Band(None, 0, "top_left"), Band(r.randint(0, bound), r.randint(-5, 9)), Band(-5, 3),
        Band(r.randint(0, 40), r.randint(0, 40)),
    ))  # fmt: skip
    group, batch = r.choice((1, 2, 3)), r.choice((1, 2))
    d, v_dim = r.choice(((256, 256), (192, 192), (192, 128), (96, 256)))
    return r, problem_of(d, v_dim, band, q_len=q_len, k_len=k_len, heads=2 * group, kv_heads=2, batch=batch)


def parts(problem: Problem, *tiles: tuple[Any, ...]) -> set[tuple[Any, ...]]:
    """All parts of tiles (name, sequence, head, row): their first columns behind it."""
    from tilewise.kernels.hopper import steps

    found = set()
    for tile in tiles:
        sides = steps.parts(config.width(problem.qk_dim if tile[0] in "qk" else problem.v_dim))
        found |= {(*tile, sum(sides[:n])) for n in range(len(sides))}
    return found


def numbers_of(problem: Any, length: int, side: int, heads: int, together: int) -> dict[str, int]:
    """What `walk.Call` holds."""
    tiles = -(-length // side)
    left, right = problem.band.bounds
    return {
        "q_len": problem.q_len, "k_len": problem.k_len, "diagonal": problem.band.offset(problem.q_len, problem.k_len),
        "left": left, "right": right, "scale": 1, "softcap": 0, "heads": problem.heads, "group": problem.group,
        "tiles": tiles, "together": together, "total": tiles * problem.batch * heads,
    }  # fmt: skip


@pytest.mark.parametrize("seed", seeds(60))
def test_roles_hand_on_every_block_and_never_wait_for_ever(seed: int) -> None:
    from hopper_split_machine import Block

    from tilewise.kernels.hopper import backward_host

    r, problem = drawn(seed)
    group = problem.group
    cfg = config.Kernel(r.choice((64, 128)), r.choice((64, 128)), r.choice((1, 2, 3)), r.choice((1, 2, 3)))
    options = backward_host.SplitOptions.of(problem, cfg)
    numbers = numbers_of(problem, problem.k_len, cfg.keys, problem.kv_heads, r.choice((1, 2, 3)))
    tiles, seen = Counter[Any](), problem.band.dense(problem.q_len, problem.k_len)
    for program in range(numbers["total"]):
        block = Block(numbers, options, program, 100 * seed + program)
        block.run_dkdv()
        stores = dict(block.stores)
        assert set(stores) == {"dk", "dv"}
        (b, kv, j0) = stores["dk"]
        assert stores["dv"] == stores["dk"]
        tiles[b, kv, j0] += 1
        taken: dict[str, dict[Any, bool]] = {"probabilities": {}, "gradients": {}}
        for who, made_of, masked in block.log:
            ((_, _, h, i0, _),) = (x for x in made_of if x[0] == "do" and x[-1] == 0)
            assert h // group == kv
            minus_L, minus_delta = (("statistics", n, b * problem.heads + h, i0) for n in (0, 1))
            of_dv = parts(problem, ("k", b, kv, j0), ("q", b, h, i0), ("do", b, h, i0)) | {minus_L}
            of_dk = of_dv | parts(problem, ("v", b, kv, j0)) | {minus_delta}
            assert made_of == (of_dv if who == "probabilities" else of_dk)
            assert (h, i0) not in taken[who]
            taken[who][h, i0] = masked
        assert taken["probabilities"] == taken["gradients"]
        for h in range(kv * group, (kv + 1) * group):
            for i0 in range(0, problem.q_len, cfg.rows):
                part = seen[i0 : i0 + cfg.rows, j0 : j0 + cfg.keys]
                masked = taken["gradients"].get((h, i0))
                assert masked is not None or not part.any()
                assert masked is not False or part.all()
    firsts = range(0, problem.k_len, cfg.keys)
    assert tiles == Counter((b, h, j0) for b in range(problem.batch) for h in range(2) for j0 in firsts)


@pytest.mark.parametrize("seed", seeds(60))
def test_queries_take_every_block_and_never_wait_for_ever(seed: int) -> None:
    from hopper_split_machine import Block

    from tilewise.kernels.hopper import backward_host

    r, problem = drawn(seed)
    cfg = config.Kernel(128, r.choice((64, 128)), r.choice((1, 2, 3)), r.choice((1, 2, 3)))
    options = backward_host.SplitOptions.of(problem, cfg)
    numbers = numbers_of(problem, problem.q_len, cfg.rows, problem.heads, r.choice((1, 2, 3)))
    stored, seen = [], problem.band.dense(problem.q_len, problem.k_len)
    for program in range(numbers["total"]):
        block = Block(numbers, options, program, 100 * seed + program)
        block.run_dq()
        stored += [at for _, at in block.stores]
        taken: dict[Any, dict[int, bool]] = defaultdict(dict)
        for _, made_of, masked in block.log:
            ((_, b, h, first, _),) = (x for x in made_of if x[0] == "q" and x[-1] == 0)
            ((_, _, kv, j0, _),) = (x for x in made_of if x[0] == "k" and x[-1] == 0)
            assert kv == h // problem.group
            tiles = ("q", b, h, first), ("do", b, h, first), ("k", b, kv, j0), ("v", b, kv, j0)
            assert made_of == parts(problem, *tiles) | {("lse", b, h, first), ("delta", b, h, first)}
            assert j0 not in taken[first]
            taken[first][j0] = masked
        for _, (_, _, first) in block.stores:
            for j0 in range(0, problem.k_len, cfg.keys):
                part = seen[first : first + config.PIECE, j0 : j0 + cfg.keys]
                masked = taken[first].get(j0)
                assert masked is not None or not part.any()
                assert masked is not False or (part.all() and j0 + cfg.keys <= problem.k_len)
    firsts = [row + piece for row in range(0, problem.q_len, cfg.rows) for piece in (0, config.PIECE)]
    assert sorted(stored) == [(b, h, i) for b in range(problem.batch) for h in range(problem.heads) for i in firsts]
