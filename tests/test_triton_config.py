"""config.py: which row serves a problem, and what the compiled kernels of every row take: registers, shared memory."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch
from spills import SPILLS

import tilewise
from tilewise import Problem, causal
from tilewise.kernels.triton import config as tables
from tilewise.kernels.triton.config import DIRECTIONS, ORDER, SHARED_KIB, TABLES, WIDTHS, choose, row

TARGETS = {
    "sm75": ("cuda", 75, 32), "sm80": ("cuda", 80, 32), "sm86": ("cuda", 86, 32), "sm90": ("cuda", 90, 32),
    "sm100": ("cuda", 100, 32), "cuda": ("hip", "gfx942", 64),
}  # fmt: skip
Case = tuple[str, str, int, int, str]  # arch, direction, padded head size, bytes of an element, options
# The rows allow what Triton 3.7 spills, which `make test` installs. Others give registers out otherwise, and spilled up
# to 2.7 times what a row allows (3.9, fp32 of bf16 products); what may spill nothing spills nothing on any.
TABLED, OTHERS_SPILL = "3.7.", 3
KINDS = ("fastest of ", "compiled", "not compiled", "Triton's interpreter")  # of evidence
REPRESENTATIVE: list[Case] = [
    ("sm75", "forward", 16, 4, "plain"),
    ("sm80", "forward", 64, 2, "plain"),
    ("sm86", "dq", 128, 2, "plain"),
    ("sm90", "forward", 64, 2, "plain"),
    ("sm90", "dkdv", 64, 2, "plain"),
    ("sm90", "dq", 128, 2, "plain"),
    ("sm90", "forward", 64, 2, "dressed"),
    ("sm90", "dkdv", 64, 2, "bias"),
    ("sm90", "forward", 64, 4, "plain"),
    ("sm90", "forward", 128, 2, "long"),
    ("sm90", "dq", 128, 2, "packed"),
    ("sm90", "dkdv", 128, 2, "plain"),
    ("cuda", "forward", 64, 2, "plain"),
    ("cuda", "dkdv", 64, 2, "plain"),
]


EVERYTHING = ("dressed", "dressed blocks")  # all options at once, with a boolean mask or with a BlockMask


def options(found: tables.Row) -> list[str]:
    """What to ask of a row, so that each of its Configs is compiled."""
    usual = found.plain, found.dressed
    others = [kind for kind in tables.KINDS[2:] if kind == "blocks" or found.config(kind) not in usual]
    return ["plain", *others, *EVERYTHING]


def every_row() -> Iterator[Case]:
    """One case for each Config that an architecture's tables give."""
    for arch in TARGETS:
        for direction in DIRECTIONS:
            for width in WIDTHS:
                for itemsize in (2, 4):
                    for name in options(row(arch, direction, width, itemsize)):
                        yield arch, direction, width, itemsize, name


def table_of(arch: str, key: tuple[str, int, int]) -> str:
    """The name of the table that has the architecture's row."""
    return next(name for name in TABLES if TABLES[name].get(key) is row(arch, *key))


def asked(case: Case, d: int, v_dim: int) -> tuple[Problem, tilewise.problem.Aux, list[torch.Tensor]]:
    """A problem of the kind that the case's name says."""
    arch, direction, _, itemsize, name = case
    # Turing has no bf16.
    dtype = torch.float32 if itemsize == 4 else torch.float16 if arch == "sm75" else torch.bfloat16
    long = dict.fromkeys(("long", "long full", "window"), tables.LONG)
    length = long.get(name, 240) + 8  # no side divides it: kernels with all their loops
    q, k, v = (torch.empty(1, 2, length, size, dtype=dtype) for size in (d, d, v_dim))
    seen = torch.ones(1, 2, 248, 248, dtype=torch.bool)
    blocks = tilewise.BlockMask.from_dense(seen)
    mask = {
        "full": None, "long full": None, "window": tilewise.sliding_window(100), "blocks": blocks,
        "dressed": causal & seen, "dressed blocks": causal & blocks,
    }.get(name, causal)  # fmt: skip
    given = {}
    if name in EVERYTHING:
        given = {
            "alibi_slopes": torch.ones(2), "sink": torch.ones(2), "softcap": 20.0, "dropout_p": 0.1, "seed": 1
        }  # fmt: skip
    if name in (*EVERYTHING, "bias") or direction == "dbias":
        heads = 1 if direction == "dbias" else 2  # one is broadcast, and dbias_kernel sums it
        given["bias"] = torch.zeros(1, heads, length, length, dtype=dtype, requires_grad=True)
    if name == "packed":
        q, k, v = (x[0].transpose(0, 1).contiguous() for x in (q, k, v))
        given["cu_seqlens_q"] = torch.tensor([0, 100, length], dtype=torch.int32)
    problem, aux = Problem.of(q, k, v, mask=mask, **given)
    return replace(problem, device=arch), aux, [q, k, v]


def check(case: Case, d: int | None = None, v_dim: int | None = None) -> None:
    """Compile the case's kernel; AssertionError where it takes more than its row, or its architecture, allows."""
    triton = pytest.importorskip("triton")
    if os.environ.get("TRITON_INTERPRET") == "1":
        pytest.skip("in Triton's interpreter there are no binaries")
    from triton.backends.compiler import GPUTarget

    from tilewise.kernels.launch import compile_for, recording, resources
    from tilewise.kernels.triton import host

    arch, direction, width, itemsize, _ = case
    problem, aux, tensors = asked(case, d or width, v_dim or width)
    with recording() as launches:
        o, lse = host.forward(problem, *tensors, aux)
        if direction != "forward":
            host.backward(problem, o, None, *tensors, o, lse, aux)
    (launch,) = (one for one in launches if one.kernel.__name__ == f"{direction}_kernel")
    compiled = compile_for(launch, GPUTarget(*TARGETS[arch]))
    taken = resources(compiled)
    assert not taken.unwritten, "ptxas left out an instruction"
    config, dressed = choose(problem, direction), tables.is_dressed(problem)
    allowed = SPILLS.get((table_of(arch, (direction, width, itemsize)), direction, width, itemsize), (0, 0))[dressed]
    allowed *= 1 if triton.__version__.startswith(TABLED) else OTHERS_SPILL
    assert taken.spilled <= allowed, f"{config}: {taken.spilled} bytes spill, {allowed} may"
    bound = tables.shared_bound(config, direction, width, itemsize, dressed)
    if arch in ("sm75", "sm100"):  # scalar products' operands, and tcgen05's, lie in shared memory once more
        bound += 2 * 32 * width * itemsize
    assert taken.shared <= bound, f"{config}: {taken.shared} bytes of shared memory, the bound is {bound}"
    limit = SHARED_KIB[arch] * 1024
    unfit = (arch, direction, width, itemsize) in tables.UNFIT
    assert (taken.shared > limit) == unfit, f"{config}: {taken.shared} bytes of shared memory, {arch} has {limit}"
    stationary = config.keys if direction == "dkdv" else config.rows
    if arch == "sm90" and itemsize == 2 and direction in ("forward", "dkdv", "dq") and stationary >= 64:
        assert "wgmma" in compiled.asm["ptx"]


@pytest.mark.parametrize("direction", ["forward", "dkdv", "dq"])
@pytest.mark.parametrize(("d", "v_dim"), [(64, 32), (16, 64)])
def test_fp32_values_of_another_width_than_keys(d: int, v_dim: int, direction: str) -> None:
    """ptxas 12.8 left an instruction out of such kernels."""
    check(("sm90", direction, max(d, v_dim), 4, "plain"), d, v_dim)


@pytest.mark.parametrize("case", REPRESENTATIVE, ids=lambda case: "-".join(map(str, case)))
def test_a_row_compiles_within_its_limits(case: Case) -> None:
    check(case)


@pytest.mark.slow
@pytest.mark.parametrize("case", list(every_row()), ids=lambda case: "-".join(map(str, case)))
def test_every_row_compiles_within_its_limits(case: Case) -> None:
    check(case)


def test_sides_are_powers_of_two_and_pipelines_fit() -> None:
    for arch, kib in SHARED_KIB.items():
        for direction in DIRECTIONS:
            for width in WIDTHS:
                for itemsize in (2, 4):
                    found = row(arch, direction, width, itemsize)
                    for kind in tables.KINDS:
                        config, dressed = found.config(kind), kind in ("dressed", "bias")
                        where = f"{arch} {direction} {width} {itemsize} {config}"
                        assert {config.rows, config.keys} <= {16, 32, 64, 128}, where
                        assert config.warps in (4, 8), where
                        bound = tables.shared_bound(config, direction, width, itemsize, dressed)
                        shared_in_turn = config.stages == 1 and (config.rows, config.keys) == (16, 16)
                        assert bound <= kib * 1024 or shared_in_turn, f"{where}: {bound} bytes"
                        assert arch in ("sm90", "sm100", "sm120") or not config.tma, where


def test_what_is_said_to_spill_is_there() -> None:
    assert all((kernel, width, size) in TABLES[name] for name, kernel, width, size in SPILLS)


def test_each_row_has_its_evidence_and_is_reached() -> None:
    reached = {
        id(row(arch, direction, width, itemsize))
        for arch in (*ORDER, "unknown")
        for direction in DIRECTIONS
        for width in WIDTHS
        for itemsize in (2, 4)
    }
    for name, table in TABLES.items():
        for key, found in table.items():
            assert found.evidence.startswith(KINDS), (name, key)
            assert id(found) in reached, (name, key)


def of(device: str, d: int = 64, d_v: int | None = None, dtype: torch.dtype = torch.float16, **options) -> Problem:
    q, v = torch.empty(1, 2, 32, d, dtype=dtype), torch.empty(1, 2, 32, d_v or d, dtype=dtype)
    return replace(Problem.of(q, q, v, **options)[0], device=device)


@pytest.mark.parametrize(("d", "d_v", "width"), [(1, 1, 16), (16, 17, 32), (65, 8, 128), (512, 300, 512)])
def test_the_greater_head_size_counts_rounded_up(d: int, d_v: int, width: int) -> None:
    for direction in DIRECTIONS:
        assert choose(of("sm90", d, d_v), direction) == row("sm90", direction, width, 2).config("full")


def test_the_nearest_table_answers_first() -> None:
    assert table_of("sm80", ("forward", 128, 2)) == "sm80"
    assert table_of("sm80", ("dkdv", 128, 2)) == "sm86"
    assert table_of("sm89", ("forward", 128, 2)) == "sm86"
    assert table_of("cuda", ("forward", 64, 2)) == table_of("hip", ("forward", 64, 2)) == "hip"
    assert table_of("sm90", ("forward", 128, 4)) == "any"
    assert table_of("sm61", ("forward", 64, 2)) == "any"


def test_an_unknown_device_gets_the_conservative_row() -> None:
    assert choose(of("sm999"), "forward") == TABLES["any"]["forward", 64, 2].plain


def test_fp32_has_rows_of_its_own() -> None:
    assert choose(of("sm90", dtype=torch.float32), "forward") == row("sm90", "forward", 64, 4).plain
    assert choose(of("sm90", dtype=torch.float32), "forward") != choose(of("sm90"), "forward")


SEEN = torch.ones(32, 32, dtype=torch.bool)


def test_what_a_row_does_not_say_apart() -> None:
    own = [kind for kind in tables.KINDS if kind != "long full"]  # a choice between the others
    configs = {kind: tables.Config(16, 16, 4, n) for n, kind in enumerate(own)}
    all_said = tables.Row(evidence="compiled", **configs)
    assert {kind: all_said.config(kind) for kind in own} == configs
    assert all_said.config("long full") == configs["long"]
    assert replace(all_said, long=None).config("long full") == configs["full"]
    assert replace(all_said, packed=None).config("packed") == configs["long"]
    least = replace(all_said, **dict.fromkeys(own[2:]))
    for kind in tables.KINDS[2:]:
        assert least.config(kind) == configs["dressed" if kind == "bias" else "plain"]


@pytest.mark.parametrize(
    ("options", "kind"),
    [
        ({}, "full"), ({"mask": causal}, "plain"), ({"sink": torch.ones(2)}, "full"),
        ({"mask": tilewise.BlockMask.from_dense(SEEN)}, "blocks"), ({"bias": torch.zeros(32, 32)}, "bias"),
        ({"mask": SEEN}, "dressed"), ({"alibi_slopes": torch.ones(2)}, "dressed"), ({"softcap": 5.0}, "dressed"),
        ({"dropout_p": 0.1}, "dressed"), ({"bias": torch.zeros(32, 32), "softcap": 5.0}, "dressed"),
        ({"bias": torch.zeros(32, 32), "mask": tilewise.BlockMask.from_dense(SEEN)}, "dressed"),
    ],
    ids=str,
)  # fmt: skip
def test_the_options_decide_which_config_of_a_row_serves(options: dict, kind: str) -> None:
    problem = of("sm90", **options)
    found = row("sm90", "forward", 64, 2)
    assert tables.kind_of(problem) == kind
    assert choose(problem, "forward") == found.config(kind)
    assert tables.is_dressed(problem) == (kind in ("dressed", "bias"))


@pytest.mark.parametrize(
    ("mask", "kind"), [(None, "long full"), (causal, "long"), (tilewise.sliding_window(9), "window")], ids=str
)
def test_long_and_packed_sequences_have_configs_of_their_own(mask: tilewise.Band | None, kind: str) -> None:
    problem = of("sm90", mask=mask)
    long = replace(problem, q_len=tables.LONG, k_len=tables.LONG)
    packed = replace(problem, q_layout=tilewise.problem.Layout.PACKED, k_layout=tilewise.problem.Layout.PACKED)
    for asked, its in (long, kind), (packed, "packed" if kind == "long" else kind):
        assert tables.kind_of(asked) == its
        assert choose(asked, "dq") == row("sm90", "dq", 64, 2).config(its)
    assert tables.kind_of(problem) in ("full", "plain")


def test_the_interpreter_has_small_tiles_whose_sides_differ() -> None:
    for direction in DIRECTIONS:
        for width in WIDTHS:
            config = choose(of("cpu", width), direction)
            assert config.rows != config.keys
            assert max(config.rows, config.keys) <= 32
