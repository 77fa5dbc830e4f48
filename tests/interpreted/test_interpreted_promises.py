"""What the contract promises beyond right numbers, of Triton's kernels, interpreted."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from cases import LAYOUTS, Case, laid_out
from close import assert_close, evaluate
from test_attention import kept
from test_contract import assert_same, part, same
from test_layout import WAYS, check_results_lie_as_their_tensors
from torch import Tensor

import tilewise
from tilewise import Band, causal
from tilewise.kernels.triton import host

F16, F32, F64 = torch.float16, torch.float32, torch.float64

pytestmark = pytest.mark.usefixtures("poisoned")

KINDS = {
    "full": {}, "causal": {"band": causal, "dtype": F16}, "window": {"band": Band(9, 3)},
    "boolean": {"mask": "bool", "mask_dims": "bqk"}, "blocks": {"mask": "blocks", "mask_dims": "bh", "band": causal},
    "bias": {"bias_dims": "bhqk", "softcap": 5.0},
    "slopes, sink, dropout": {"slopes": "bh", "sink": F32, "dropout_p": 0.2},
}  # fmt: skip
CASES = {name: Case(**({"batch": 2, "heads": 2, "q_len": 20, "k_len": 35} | given)) for name, given in KINDS.items()}


@pytest.mark.parametrize("name", CASES)
def test_a_sequence_does_not_see_its_batch(name: str, backend: str) -> None:
    case = CASES[name]
    whole = case.run(backend)
    for batch, heads in ((slice(1, 2), slice(0, 2)), (slice(0, 1), slice(1, 2))):
        some, alone = part(case.build(), batch, heads, 1), case
        if case.dropout_p:  # the pairs that it drops belong to (b, h)
            alone = replace(case, origin=(batch.start, heads.start, 0, 0))
            some["origin"] = alone.origin
        got = evaluate(alone.attend(backend), **some)
        for result in ("o", "lse", "dq", "dk", "dv"):
            assert same(got[result], whole[result][batch, heads]), (result, batch, heads)


@pytest.mark.parametrize("name", CASES)
def test_results_repeat_bit_for_bit(name: str, backend: str) -> None:
    first = CASES[name].run(backend, deterministic=True)
    assert_same(CASES[name].run(backend, deterministic=True), first)
    assert_same(replace(CASES[name], grad=False).run(backend), {result: first[result] for result in ("o", "lse")})


IN_FP32 = {name: replace(case, dtype=F32) for name, case in CASES.items()} | {
    "grouped heads, unequal sizes": Case(heads=4, kv_heads=2, q_len=20, k_len=35, dim=40, v_dim=24),
    "packed": Case(batch=3, q_len=40, k_len=40, cu_q=(0, 7, 30, 40), band=causal),
    "broadcast bias": Case(batch=2, heads=2, q_len=20, k_len=35, bias_dims="k"),
}


@pytest.mark.parametrize("name", IN_FP32)
def test_fp32_of_six_bf16_products_is_exact_too(name: str, backend: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """As on Hopper; the interpreter's own products are fp32."""
    monkeypatch.setattr(host, "precision", lambda problem: "bf16x6")
    inputs = IN_FP32[name].build()
    assert_close(IN_FP32[name].run(backend, inputs), **inputs)


@pytest.mark.parametrize("packed", [False, True])
def test_nan_beyond_a_sequence_changes_no_bit(packed: bool, backend: str) -> None:
    shape: dict[str, Any] = (
        {"cu_q": (0, 20, 20, 57, 60)} if packed else {"q_lens": (60, 33, 0, 1), "k_lens": (50, 60, 7, 0)}
    )
    case = Case(batch=4, heads=1, kv_heads=1, q_len=60, k_len=60, band=causal, **shape)
    clean = case.run(backend)
    if not packed:
        assert_same(replace(case, garbage=True).run(backend), clean)
        return
    inputs = case.build()
    for start, stop in ((0, 20), (20, 57), (57, 60)):
        spoilt = {}
        for name in ("q", "k", "v", "do"):
            spoilt[name] = torch.full_like(inputs[name], math.nan)
            spoilt[name][start:stop] = inputs[name][start:stop]
        got = case.run(backend, **spoilt)
        for name in ("o", "dq", "dk", "dv"):
            assert same(got[name][start:stop], clean[name][start:stop]), (name, start)
        assert same(got["lse"][:, start:stop], clean["lse"][:, start:stop])


@pytest.mark.parametrize("dtype", [F32, F16])
def test_a_window_of_everything_is_causal_bit_for_bit(dtype: torch.dtype, backend: str) -> None:
    case = Case(heads=1, kv_heads=1, q_len=50, k_len=50, dtype=dtype, band=causal)
    expected = case.run(backend)
    for band in (Band(49, 0), Band(2**40, 0)):
        assert_same(replace(case, band=band).run(backend), expected)
    assert not same(replace(case, band=Band(20, 0)).run(backend)["o"], expected["o"])


@pytest.mark.parametrize("layout", [*LAYOUTS[::2], "scalar"])
def test_strides_change_no_bit(layout: str, backend: str) -> None:
    case = Case(heads=2, q_len=20, k_len=35, dim=24, v_dim=24, band=causal)
    inputs = case.build()
    strided = {name: laid_out(inputs[name], layout) for name in ("q", "k", "v", "do")}
    contiguous = {name: x.contiguous() for name, x in strided.items()}
    assert_same(case.run(backend, **strided), case.run(backend, **contiguous))


@pytest.mark.parametrize("dtype", [F16, F32])
@pytest.mark.parametrize("optional", [F16, F32, F64])
def test_results_have_their_inputs_dtypes(dtype: torch.dtype, optional: torch.dtype, backend: str) -> None:
    case = Case(dtype=dtype, bias_dims="qk", bias_dtype=optional, slopes="h", slopes_dtype=optional, sink=optional)
    assert {name: x.dtype for name, x in case.run(backend).items()} == {
        "o": dtype, "lse": F32, "dq": dtype, "dk": dtype, "dv": dtype, "dbias": optional, "dslopes": optional,
        "dsink": optional,
    }  # fmt: skip


@pytest.mark.parametrize("seed", [0, -1, 2**40 + 3, 2**64 - 1])
def test_dropout_drops_the_pairs_that_tiled_drops(seed: int, backend: str) -> None:
    for p in (0.001, 0.5):
        assert torch.equal(kept(backend, p, 70, seed), kept("tiled", p, 70, seed))


def test_dropout_drops_the_same_pairs_from_an_origin(backend: str) -> None:
    case = Case(q_len=40, k_len=48, v_dim=48, dropout_p=0.5, fill=0.0, origin=(3, 5, 17, 9), grad=False)
    inputs = case.build() | {"v": torch.eye(48).expand(1, 2, 48, 48)}
    ours, theirs = (case.run(name, inputs)["o"] != 0 for name in (backend, "tiled"))
    assert torch.equal(ours, theirs)
    assert 0.4 < ours.double().mean() < 0.6


def test_forward_saves_its_inputs_o_and_lse_only(backend: str) -> None:
    inputs = Case(heads=4, bias_dims="hk", slopes="h", sink=F32, dropout_p=0.2, band=causal).build()
    leaves = {
        name: x.detach().requires_grad_() if isinstance(x, Tensor) and x.is_floating_point() else x
        for name, x in inputs.items() if name not in ("do", "dlse", "frozen")
    }  # fmt: skip
    saved: list[Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda x: saved.append(x) or x, lambda x: x):
        o, lse = tilewise.attention(**leaves, return_lse=True, backend=backend)
    known = {x.untyped_storage().data_ptr() for x in (*leaves.values(), o, lse) if isinstance(x, Tensor)}
    assert saved
    assert not [x.shape for x in saved if x.untyped_storage().data_ptr() not in known and x.numel() > 1]


@pytest.mark.parametrize(
    ("options", "reason"), [({"dtype": F64}, "float64|fp64"), ({"dtype": torch.bfloat16}, "bfloat16|bf16")]
)
def test_what_it_cannot_do_it_says(options: dict[str, Any], reason: str, backend: str) -> None:
    with pytest.raises(ValueError, match=reason):
        Case(**options).run(backend)


@pytest.mark.parametrize(("d", "v_dim"), [(16, 16), (20, 9)])
def test_results_lie_as_their_tensors(d: int, v_dim: int, backend: str) -> None:
    """Of a v_dim of 9 rows are not whole vectors: q, k, v and dO are copied, in the order that they have."""
    check_results_lie_as_their_tensors(backend, F32, d, v_dim, ways=WAYS[::5], lengths=d == 20)


def test_strides_past_2_to_the_31(backend: str) -> None:
    """Of sequences and of heads; eight times a stride in units of 8 is past 32 bits."""
    memory = torch.from_numpy(np.empty(2**31 + 2**20, np.float16))  # which nobody fills: most of it is never touched
    for strides in ((2**31, 20 * 16, 16, 1), (20 * 16, 2**31, 16, 1)):
        q, k, v = (memory.as_strided((2, 2, 20, 16), strides, n * 2**12) for n in range(3))
        dense = [torch.randn(2, 2, 20, 16).half() for _ in range(3)]
        for x, y in zip((q, k, v), dense, strict=True):
            x.copy_(y)
        leaves, expected = ([x.requires_grad_() for x in xs] for xs in ((q, k, v), dense))
        o, o_dense = (tilewise.attention(*xs, mask=causal, backend=backend) for xs in (leaves, expected))
        assert torch.equal(o, o_dense)
        do = torch.randn_like(o)
        grads = (torch.autograd.grad(o, leaves, do), torch.autograd.grad(o_dense, expected, do))
        assert all(torch.equal(x, y) for x, y in zip(*grads, strict=True))
