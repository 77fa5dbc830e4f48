"""What the contract promises beyond right numbers: bits that hold still, memory that is not read, or not taken."""

from __future__ import annotations

import math
import subprocess
import sys
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from cases import LAYOUTS, Case, forced_tiles, laid_out
from close import Results, evaluate
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

import tilewise
from tilewise import Band, BlockMask, causal

F16, BF16, F32, F64 = torch.float16, torch.bfloat16, torch.float32, torch.float64
NOT_OPTIONS = ("q", "k", "v", "do", "dlse", "frozen")

pytestmark = pytest.mark.usefixtures("poisoned")


def same(x: Tensor, y: Tensor) -> bool:
    """Equal bit for bit (and of one dtype); NaN equals nothing."""
    return x.dtype == y.dtype and torch.equal(x, y)


def assert_same(got: Results, expected: Results) -> None:
    assert set(got) == set(expected)
    different = [name for name in got if not same(got[name], expected[name])]
    assert not different, f"bits differ in {different}"


def options_of(inputs: dict[str, Any]) -> dict[str, Any]:
    return {name: x for name, x in inputs.items() if name not in NOT_OPTIONS}


# Option sets under which bits must hold still. Lengths straddle tiles, heads share keys.
KINDS = {
    "full": {},
    "causal": {"band": causal},
    "window": {"band": Band(40, 3)},
    "boolean": {"mask": "bool", "mask_dims": "bqk"},
    "blocks": {"mask": "blocks", "mask_dims": "bh", "band": causal},
    "bias": {"bias_dims": "bhqk", "softcap": 5.0},
    "slopes, sink, dropout": {"slopes": "bh", "sink": F32, "dropout_p": 0.2},
}
SIZES = {
    "small": (13, 19, None),
    "one tile": (150, 130, None),
    "whole tiles": (160, 192, (32, 48)),  # nothing is padded: tiles may be views of their tensors
    "many tiles": (150, 170, (32, 48)),
    "large": (600, 700, None),
}


def kinds() -> list[Any]:
    """KINDS x SIZES x dtypes; the large ones in one dtype only."""
    cases = []
    for kind, options in KINDS.items():
        for size, (q_len, k_len, tiles) in SIZES.items():
            for dtype in (F32,) if size == "large" else (F32, BF16, F16, F64):
                if kind == "blocks":
                    tiles = tiles and (128, 128)
                case = Case(
                    dtype=dtype, batch=3, heads=4, kv_heads=4 if size == "whole tiles" else 2, q_len=q_len, k_len=k_len,
                    tiles=tiles, **options,
                )  # fmt: skip
                cases.append(pytest.param(case, id=f"{kind}-{size}-{str(dtype).removeprefix('torch.')}"))
    return cases


def part(inputs: dict[str, Any], batch: slice, heads: slice, group: int) -> dict[str, Any]:
    """The inputs of some batches and heads alone. Dropout looks (b, h) up, so it needs an origin: see the caller."""
    kv = slice(heads.start // group, -(-heads.stop // group))

    def cut(x: Tensor) -> Tensor:  # (B|1, H|1, ...)
        x = x if x.shape[0] == 1 else x[batch]
        return x if x.shape[1] == 1 else x[:, heads]

    cutters = {
        "q": lambda x: x[batch, heads], "do": lambda x: x[batch, heads], "dlse": lambda x: x[batch, heads],
        "k": lambda x: x[batch, kv], "v": lambda x: x[batch, kv], "bias": cut, "alibi_slopes": cut,
        "sink": lambda x: x[heads],
    }  # fmt: skip
    result = {name: cutters[name](x) if name in cutters and x is not None else x for name, x in inputs.items()}
    mask = inputs.get("mask")
    dense = mask if isinstance(mask, Tensor) else getattr(mask, "mask", None)
    if isinstance(dense, BlockMask):
        result["mask"] = mask.band & BlockMask.from_dense(dense.to_dense()[batch, heads])
    elif dense is not None:
        result["mask"] = cut(dense)
    return result


@pytest.mark.parametrize("case", kinds())
def test_a_sequence_does_not_see_its_batch(case: Case, backend: str) -> None:
    """o, lse and gradients of a batch entry, or of some heads of it, are bit-equal when computed alone."""
    inputs = case.build()
    whole = case.run(backend)
    for batch, heads in (
        (slice(0, 1), slice(0, 4)),
        (slice(2, 3), slice(0, 4)),
        (slice(1, 3), slice(2, 4)),
        (slice(1, 2), slice(0, 2)),
    ):
        group = case.heads // case.kv_heads
        some = part(inputs, batch, heads, group)
        alone = case
        if case.dropout_p and (batch.start or heads.start):  # the pairs that it drops belong to (b, h)
            alone = replace(case, origin=(batch.start, heads.start, 0, 0))
            some["origin"] = alone.origin
        with forced_tiles(case.tiles):
            got = evaluate(alone.attend(backend), **some)
        kv = slice(heads.start // group, heads.stop // group)
        for name, here in (("o", heads), ("lse", heads), ("dq", heads), ("dk", kv), ("dv", kv)):
            assert same(got[name], whole[name][batch, here]), (name, batch, heads)


@pytest.mark.parametrize("dtype", [F32, BF16])
def test_one_among_many(dtype: torch.dtype, backend: str) -> None:
    """The middle one of 50 short sequences with 6 heads, alone."""
    case = Case(batch=50, heads=6, kv_heads=2, q_len=33, k_len=47, dtype=dtype, band=causal, bias_dims="hk")
    whole = case.run(backend)
    for heads in (slice(0, 6), slice(3, 6)):
        alone = evaluate(case.attend(backend), **part(case.build(), slice(23, 24), heads, group=3))
        kv = slice(heads.start // 3, 2)
        for name, here in (("o", heads), ("lse", heads), ("dq", heads), ("dk", kv), ("dv", kv)):
            assert same(alone[name], whole[name][23:24, here]), (name, heads)


@pytest.mark.parametrize("case", kinds())
def test_forward_and_deterministic_gradients_repeat_bit_for_bit(case: Case, backend: str) -> None:
    first = case.run(backend, deterministic=True)
    for _ in range(2):
        assert_same(case.run(backend, deterministic=True), first)
    without = replace(case, grad=False).run(backend)
    assert_same(without, {name: first[name] for name in ("o", "lse")})  # needs_grad changes nothing


def test_two_threads_give_the_bits_of_one(backend: str) -> None:
    case = Case(batch=2, heads=4, q_len=300, k_len=300, dim=64, v_dim=64, band=causal)
    first = case.run(backend)
    threads = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        second = case.run(backend)
    finally:
        torch.set_num_threads(threads)
    assert_same(second, first)


@pytest.mark.parametrize(
    ("n", "tiles"), [(1, None), (17, None), (17, (16, 16)), (150, None), (150, (16, 48)), (600, None)]
)
@pytest.mark.parametrize("dtype", [F32, BF16])
def test_a_window_of_everything_is_causal_bit_for_bit(
    n: int, tiles: tuple[int, int] | None, dtype: torch.dtype, backend: str
) -> None:
    case = Case(q_len=n, k_len=n, dtype=dtype, band=causal, tiles=tiles, slopes="h")
    expected = case.run(backend)
    for band in (Band(n - 1, 0), Band(10 * n, 0), Band(2**40, 0)):
        assert_same(replace(case, band=band).run(backend), expected)
    assert n == 1 or not same(replace(case, band=Band(n // 2, 0), slopes=None).run(backend)["o"], expected["o"])


# ---- packed sequences, lengths, and what lies beyond them ------------------------------------------------------------

CU = (0, 70, 70, 171, 175, 305)


def packed_case(**options: Any) -> Case:
    return Case(**({"batch": 5, "heads": 4, "kv_heads": 2, "q_len": CU[-1], "k_len": CU[-1], "cu_q": CU} | options))


PACKED_KINDS = {
    name: options for name, options in KINDS.items() if name not in ("blocks", "boolean", "slopes, sink, dropout")
}
PACKED_KINDS |= {"boolean": {"mask": "bool", "mask_dims": "k"}, "blocks": {"mask": "blocks", "mask_dims": "h"},
                 "slopes, sink": {"slopes": "h", "sink": F32}, "bias": {"bias_dims": "hqk"}}  # fmt: skip


@pytest.mark.parametrize("tiles", [None, (32, 48)])
@pytest.mark.parametrize("dtype", [F32, F16])
@pytest.mark.parametrize("kind", PACKED_KINDS)
def test_packed_sequences_do_not_see_each_other(
    kind: str, dtype: torch.dtype, tiles: tuple[int, int] | None, backend: str
) -> None:
    """Each is bit-equal to itself alone, and to itself among others in another order."""
    if kind == "blocks":
        tiles = tiles and (128, 128)
    case = packed_case(dtype=dtype, tiles=tiles, **PACKED_KINDS[kind])
    inputs, whole = case.build(), case.run(backend)
    spans = [slice(a, b) for a, b in pairwise(CU)]

    def taken(order: list[int]) -> tuple[dict[str, Any], Tensor]:
        rows = torch.cat([torch.arange(spans[s].start, spans[s].stop) for s in order])
        cu = torch.tensor(
            [0, *torch.tensor([spans[s].stop - spans[s].start for s in order]).cumsum(0)], dtype=torch.int32
        )
        some = {name: x[rows] if name in ("q", "k", "v", "do") else x for name, x in inputs.items()}
        return some | {"dlse": inputs["dlse"][:, rows], "cu_seqlens_q": cu}, rows

    for order in ([0], [2], [4], [4, 3, 2, 1, 0], [2, 0], [3, 4]):
        some, rows = taken(order)
        with forced_tiles(tiles):
            got = evaluate(case.attend(backend), **some)
        for name in ("o", "dq", "dk", "dv"):
            assert same(got[name], whole[name][rows]), (name, order)
        assert same(got["lse"], whole["lse"][:, rows]), order


@pytest.mark.parametrize("band", [Band(), causal])
@pytest.mark.parametrize("dtype", [F32, F16, BF16])
def test_a_longer_neighbour_changes_nothing(dtype: torch.dtype, band: Band, backend: str) -> None:
    one = Case(batch=2, heads=4, q_len=10, k_len=10, cu_q=(0, 1, 10), dtype=dtype, band=band)
    inputs = replace(one, q_len=11, k_len=11, cu_q=(0, 1, 11)).build()
    results = [
        evaluate(
            one.attend(backend), **(inputs | {name: inputs[name][:n] for name in ("q", "k", "v", "do")} | {
                "dlse": inputs["dlse"][:, :n], "cu_seqlens_q": torch.tensor([0, 1, n], dtype=torch.int32)}))
        for n in (10, 11)
    ]  # fmt: skip
    for name in ("o", "dq", "dk", "dv"):
        assert same(results[0][name][:1], results[1][name][:1]), name
    assert same(results[0]["lse"][:, :1], results[1]["lse"][:, :1])


@pytest.mark.parametrize("kind", ["full", "causal", "slopes, sink, dropout", "bias"])
def test_packed_and_dense_agree_bit_for_bit_with_themselves_under_other_lengths(kind: str, backend: str) -> None:
    """Dense with lengths: what other sequences' lengths are changes nothing in this one."""
    case = Case(
        batch=3, heads=4, kv_heads=2, q_len=150, k_len=170, q_lens=(100, 150, 7), k_lens=(170, 90, 33), **KINDS[kind]
    )
    whole = case.run(backend)
    for q_lens, k_lens in (((100, 0, 150), (170, 170, 0)), ((100, 99, 98), (170, 1, 2))):
        other = replace(case, q_lens=q_lens, k_lens=k_lens).run(backend)
        for name in ("o", "lse", "dq", "dk", "dv"):
            assert same(other[name][0], whole[name][0]), name


@pytest.mark.parametrize("dtype", [F32, BF16])
@pytest.mark.parametrize("tiles", [None, (32, 48)])
@pytest.mark.parametrize("kind", ["full", "causal", "window", "slopes, sink, dropout"])
def test_nan_beyond_a_sequence_changes_no_bit(
    kind: str, tiles: tuple[int, int] | None, dtype: torch.dtype, backend: str
) -> None:
    """NaN past the lengths of a padded batch, and in all other sequences of a packed one: q, k, v and dO."""
    case = Case(batch=3, heads=4, kv_heads=2, q_len=75, k_len=90, q_lens=(75, 33, 0), k_lens=(50, 90, 7), dtype=dtype,
        tiles=tiles,
                **KINDS[kind])  # fmt: skip
    assert_same(replace(case, garbage=True).run(backend), case.run(backend))
    case = packed_case(dtype=dtype, tiles=tiles, **(KINDS[kind] | {"slopes": None, "sink": None}))
    inputs, clean = case.build(), case.run(backend)
    for s, (start, stop) in enumerate(pairwise(CU)):
        spoilt = {}
        for name in ("q", "k", "v", "do"):
            spoilt[name] = torch.full_like(inputs[name], math.nan)
            spoilt[name][start:stop] = inputs[name][start:stop]
        got = case.run(backend, **spoilt)
        for name in ("o", "dq", "dk", "dv"):
            assert same(got[name][start:stop], clean[name][start:stop]), (name, s)
        assert same(got["lse"][:, start:stop], clean["lse"][:, start:stop]), s


def test_tokens_of_no_sequence_are_left_alone(backend: str) -> None:
    case = Case(batch=2, q_len=50, k_len=60, cu_q=(0, 20, 33), cu_k=(0, 30, 41), garbage=True, band=causal)
    got = case.run(backend)
    assert (got["o"][33:] == 0).all()
    assert (got["lse"][:, 33:] == -math.inf).all()
    assert (got["dq"][33:] == 0).all()
    assert (got["dk"][41:] == 0).all()
    assert (got["dv"][41:] == 0).all()


# ---- shapes and strides ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("grad", [False, True])
@pytest.mark.parametrize(
    ("b", "h", "n", "m"), [(0, 2, 5, 7), (2, 2, 0, 7), (2, 2, 5, 0), (2, 2, 0, 0), (2, 0, 5, 7), (0, 0, 0, 0)]
)
def test_empty(b: int, h: int, n: int, m: int, grad: bool, backend: str) -> None:
    q = torch.randn(b, h, n, 8, requires_grad=grad)
    k, v = torch.randn(b, h, m, 8, requires_grad=grad), torch.randn(b, h, m, 3, requires_grad=grad)
    sink = torch.zeros(h, requires_grad=grad)
    o, lse = tilewise.attention(q, k, v, sink=sink, return_lse=True, backend=backend)
    assert o.shape == (b, h, n, 3)
    assert lse.shape == (b, h, n)
    assert o.dtype == F32
    assert lse.dtype == F32
    if m == 0:
        assert (o == 0).all()
        assert (lse == -math.inf).all()
    if grad:
        (o.sum() + lse[lse > -math.inf].sum()).backward()
        for x in (q, k, v, sink):
            assert x.grad is not None
            assert x.grad.shape == x.shape
            assert x.grad.isfinite().all()


STRIDED = {
    "padded": Case(batch=2, heads=4, q_len=150, k_len=170, dim=24, v_dim=24, band=causal),
    "whole tiles": Case(batch=2, heads=4, kv_heads=4, q_len=160, k_len=192, dim=16, v_dim=16),
    "whole tiles, many": Case(batch=2, heads=4, kv_heads=4, q_len=128, k_len=256, dim=64, v_dim=64, tiles=(32, 64)),
    "packed": Case(batch=3, heads=4, q_len=175, k_len=175, cu_q=(0, 70, 171, 175), dim=24, v_dim=24, band=causal),
    "packed, one head": Case(batch=2, heads=1, kv_heads=1, q_len=176, k_len=176, cu_q=(0, 64, 176), band=causal),
}


@pytest.mark.parametrize("dtype", [F32, F16, F64])
@pytest.mark.parametrize("layout", [*LAYOUTS, "scalar"])
@pytest.mark.parametrize("name", STRIDED)
def test_strides_change_no_bit(name: str, layout: str, dtype: torch.dtype, backend: str) -> None:
    case = replace(STRIDED[name], dtype=dtype)
    inputs = case.build()
    for names in (("q",), ("k", "v"), ("do",), ("q", "k", "v", "do")):
        strided = {name: laid_out(inputs[name], layout) for name in names}
        contiguous = {name: x.contiguous() for name, x in strided.items()}
        assert_same(case.run(backend, **strided), case.run(backend, **contiguous))
    lse_layout = laid_out(inputs["dlse"], "scalar")
    assert_same(case.run(backend, dlse=lse_layout), case.run(backend, dlse=lse_layout.contiguous()))


@pytest.mark.parametrize("dims", ["k", "hk", "bqk", "qk", ""])
def test_strides_of_masks_and_biases_change_no_bit(dims: str, backend: str) -> None:
    case = Case(batch=2, heads=4, q_len=70, k_len=90, tiles=(32, 48), mask="bool", mask_dims=dims, bias_dims=dims)
    inputs = case.build()
    full = (2, 4, 70, 90)
    mask, bias = inputs["mask"].expand(full), inputs["bias"].expand(full)
    expected = case.run(backend, mask=mask.contiguous(), bias=bias.contiguous())
    assert_same(case.run(backend, mask=mask, bias=bias), expected)
    transposed = (x.transpose(1, 3).contiguous().transpose(1, 3) for x in (mask, bias))
    assert_same(case.run(backend, **dict(zip(("mask", "bias"), transposed, strict=True))), expected)
    without = case.run(backend)  # of size 1 where it is broadcast: the same, but for the gradient's shape
    assert same(without["o"], expected["o"])
    assert same(without["dq"], expected["dq"])
    assert without["dbias"].shape == inputs["bias"].shape


def test_results_are_laid_out_as_new_tensors(backend: str) -> None:
    """No result aliases an input, and an input is never written."""
    case = Case(
        batch=2,
        heads=4,
        q_len=50,
        k_len=60,
        dtype=BF16,
        bias_dims="hqk",
        sink=F32,
        slopes="h",
        layout="transposed",
        band=causal,
    )
    inputs = case.build()
    tensors = {name: x for name, x in inputs.items() if isinstance(x, Tensor)}
    before = {name: x.clone() for name, x in tensors.items()}
    got = evaluate(case.attend(backend), **inputs)
    storages = {x.untyped_storage().data_ptr() for x in tensors.values()}
    for name, x in got.items():
        assert x.untyped_storage().data_ptr() not in storages, name
    assert_same(tensors, before)


# ---- dtypes ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [F16, BF16, F32, F64])
@pytest.mark.parametrize("optional", [F16, F32, F64])
def test_results_have_their_inputs_dtypes(dtype: torch.dtype, optional: torch.dtype, backend: str) -> None:
    case = Case(dtype=dtype, bias_dims="qk", bias_dtype=optional, slopes="h", slopes_dtype=optional, sink=optional)
    got = case.run(backend)
    statistic = F64 if dtype == F64 else F32
    assert {name: x.dtype for name, x in got.items()} == {
        "o": dtype, "lse": statistic, "dq": dtype, "dk": dtype, "dv": dtype, "dbias": optional, "dslopes": optional,
        "dsink": optional,
    }  # fmt: skip


def test_slopes_are_not_rounded_to_the_inputs_dtype(backend: str) -> None:
    """ALiBi's fp32 slopes beside fp16 q: at a distance of 2000 their rounding to fp16 would show in lse."""
    q = torch.zeros(1, 1, 1, 8, dtype=F16)
    k = torch.zeros(1, 1, 3000, 8, dtype=F16)
    slopes = torch.tensor([-0.0100037])
    _, lse = tilewise.attention(q, k, k, alibi_slopes=slopes, return_lse=True, backend=backend)
    expected = torch.logsumexp(0.0100037 * torch.arange(2999, -1, -1, dtype=F64), 0)
    assert abs(lse.item() - expected.item()) < 1e-4
    assert abs(slopes.half().item() - slopes.item()) * 2999 > 1e-3


# ---- memory ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("packed", [False, True])
def test_forward_saves_its_inputs_o_and_lse_only(packed: bool, backend: str) -> None:
    options: dict[str, Any] = {
        "heads": 4,
        "bias_dims": "hk",
        "sink": F32,
        "slopes": "h",
        "dropout_p": 0.2,
        "band": causal,
        "softcap": 3.0,
    }
    case = packed_case(**options) if packed else Case(batch=2, q_len=150, k_len=170, k_lens=(170, 60), **options)
    inputs = case.build()
    leaves = {
        name: x.detach().requires_grad_() if isinstance(x, Tensor) and x.is_floating_point() else x
        for name, x in inputs.items()
    }
    saved: list[Tensor] = []

    def pack(x: Tensor) -> Tensor:
        saved.append(x)
        return x

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
        o, lse = case.attend(backend)(leaves["q"], leaves["k"], leaves["v"], **options_of(leaves))
    assert saved
    allowed = {x.untyped_storage().data_ptr() for x in (*leaves.values(), o, lse) if isinstance(x, Tensor)}
    new = [tuple(x.shape) for x in saved if x.untyped_storage().data_ptr() not in allowed and x.numel() > 1]
    assert not new, f"saved besides inputs, o and lse: {new}"


def test_transposed_views_are_not_copied_whole(backend: str) -> None:
    """(B, S, H, D) users pass .transpose(1, 2): a forward makes nothing of the size of q, k or v but o."""
    q, k, v = (torch.randn(4, 1024, 8, 64).transpose(1, 2) for _ in range(3))
    given = {x.untyped_storage().data_ptr() for x in (q, k, v)}
    with _Sizes() as sizes:
        o = tilewise.attention(q, k, v, mask=causal, backend=backend)
    given.add(o.untyped_storage().data_ptr())
    largest = max(x.untyped_storage().nbytes() for pointer, x in sizes.made.items() if pointer not in given)
    assert o.untyped_storage().data_ptr() in sizes.made
    assert largest < q.numel() * q.element_size()


class _Sizes(TorchDispatchMode):
    """Notes the bytes of every storage that is made while it is active."""

    def __init__(self) -> None:
        super().__init__()
        self.made: dict[int, Tensor] = {}  # by address; kept alive, so that none is used twice

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for x in result if isinstance(result, tuple | list) else (result,):
            if isinstance(x, Tensor):
                self.made.setdefault(x.untyped_storage().data_ptr(), x)
        return result


PEAK = """
import torch, tilewise
from tilewise import Band, BlockMask, causal

def peak():
    with open("/proc/self/status") as status:
        return next(int(line.split()[1]) * 1024 for line in status if line.startswith("VmHWM"))

torch.set_num_threads(1)
torch.manual_seed(0)
{setup}
warm = torch.randn(1, 1, 64, 64, requires_grad=True)
tilewise.attention(warm, warm, warm, mask=causal).sum().backward()
before = peak()
{measured}
print(peak() - before)
"""


def peak_growth(measured: str, setup: str = "") -> int:
    """Bytes by which a fresh process grows at most while it runs `measured`."""
    if not Path("/proc/self/status").exists():
        pytest.skip("the peak of a process is read from /proc")
    code = PEAK.format(setup=setup, measured=measured)
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=1200)
    assert done.returncode == 0, done.stderr
    return int(done.stdout)


def train(n: int, d: int = 16, q_heads: int = 1, kv_heads: int = 1, options: str = "", setup: str = "") -> int:
    """The growth of a forward and a backward."""
    shapes = f"x = [torch.randn(1, h, {n}, {d}, requires_grad=True) for h in ({q_heads}, {kv_heads}, {kv_heads})]"
    return peak_growth(f"tilewise.attention(*x, {options}).sum().backward()", f"{shapes}\n{setup}")


MIB = 2**20


def test_the_measure_of_memory_sees_what_is_allocated() -> None:
    assert 190 * MIB < peak_growth(f"torch.ones({200 * MIB}, dtype=torch.uint8)") < 230 * MIB


@pytest.mark.parametrize(
    "options", ["mask=Band(256, 0)", "mask=Band(256, 0), bias=torch.zeros(1, 1, 1, 16384, requires_grad=True)"]
)
def test_memory_is_far_below_quadratic(options: str) -> None:
    """16384 rows, forward and backward: S alone would take 1 GiB."""
    assert train(16384, options=options) < 120 * MIB


@pytest.mark.slow
def test_memory_grows_linearly_to_65536_rows() -> None:
    """d = 64, one head: doubling the length at most doubles what it takes, and 65536 rows take under 1 GiB."""
    half, whole = train(32768, d=64), train(65536, d=64)
    assert whole < 1024 * MIB
    assert whole <= 2.2 * half + 32 * MIB


@pytest.mark.slow
def test_mask_grouped_heads_and_wide_heads_at_once_take_linear_memory() -> None:
    """A boolean mask, 8/2 heads and d = 320 over 8000 rows: others fall back to 15 GiB."""
    setup = "mask = torch.rand(8000, 8000) > 0.1"
    inputs = 8000 * 320 * 4 * (8 + 2 + 2)
    assert train(8000, d=320, q_heads=8, kv_heads=2, options="mask=mask", setup=setup) < 4 * inputs + 400 * MIB


@pytest.mark.slow
def test_a_block_mask_of_16384_is_used_in_linear_memory() -> None:
    setup = "mask = BlockMask.local_global(16384, 16384, 2, 1)"
    assert train(16384, options="mask=mask", setup=setup) < 200 * MIB


def test_large_scores_beside_small_ones_change_no_bit_of_them_and_stay_exact() -> None:
    """A head whose scores pass 2^32 takes the running maximum; the other head of its cell keeps pivot 0."""
    q, k, v = (torch.randn(1, 2, 96, 32) for _ in range(3))
    loud = torch.stack([q[:, 0], 40 * q[:, 1]], 1)
    o, lse = tilewise.attention(loud, k, v, mask=causal, return_lse=True)
    alone, alone_lse = tilewise.attention(q[:, :1], k[:, :1], v[:, :1], mask=causal, return_lse=True)
    assert torch.equal(o[:, :1], alone)
    assert torch.equal(lse[:, :1], alone_lse)
    for x, factor in ((loud, 1.0), (q, 1e36)):
        S = (x.double() @ k.double().mT) * 32**-0.5
        S.masked_fill_(torch.ones(96, 96, dtype=torch.bool).triu(1), -torch.inf)
        expected = torch.softmax(S, -1) @ (factor * v.double())
        error = (
            tilewise.attention(x, k, factor * v, mask=causal).double() - expected
        ).abs().max() / expected.abs().max()
        assert error < (1e-4 if x is loud else 1e-6)
