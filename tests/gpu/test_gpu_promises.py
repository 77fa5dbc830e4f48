"""What the contract promises beyond right numbers, on a GPU: bits that hold still and what nobody may see.

All of it with the specialisations of PROMISED, which `compiled` waits for.
"""

from __future__ import annotations

import math
from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest
import torch
from cases import LAYOUTS, Case, laid_out
from close import Results, evaluate
from covering import tile_steps
from test_contract import assert_same, part, same
from test_layout import WAYS, check_results_lie_as_their_tensors
from triton_cases import PROMISED
from where import DEVICE, REHEARSAL, moved

import tilewise
from tilewise import Band, causal

pytestmark = pytest.mark.usefixtures("compiled", "poisoned")

BF16, F32 = torch.bfloat16, torch.float32
DENSE = [name for name, case in PROMISED.items() if case.cu_q is None and case.q_lens is None]
if REHEARSAL:
    DENSE = DENSE[:2]


def sized(case: Case, q_len: int, k_len: int) -> Case:
    return replace(case, q_len=q_len, k_len=k_len)


@pytest.mark.parametrize(("q_len", "k_len"), [(150, 130), (600, 700), (1024, 1024)][: 1 if REHEARSAL else None])
@pytest.mark.parametrize("name", DENSE)
def test_a_sequence_does_not_see_its_batch(name: str, q_len: int, k_len: int, backend: str) -> None:
    """o, lse and gradients of a batch entry, or of some heads of it, are bit-equal when computed alone."""
    case = sized(PROMISED[name], q_len, k_len)
    inputs = moved(case.build())
    whole = case.run(backend, inputs)
    for batch, heads in ((slice(0, 1), slice(0, 4)), (slice(2, 3), slice(0, 4)), (slice(1, 3), slice(2, 4))):
        some, alone = part(inputs, batch, heads, 2), case
        if case.dropout_p and (batch.start or heads.start):  # the pairs that it drops belong to (b, h)
            alone = replace(case, origin=(batch.start, heads.start, 0, 0))
            some["origin"] = alone.origin
        got = evaluate(alone.attend(backend), **some)
        kv = slice(heads.start // 2, heads.stop // 2)
        for result, here in (("o", heads), ("lse", heads), ("dq", heads), ("dk", kv), ("dv", kv)):
            assert same(got[result], whole[result][batch, here]), (result, batch, heads)


@pytest.mark.parametrize("name", ["causal", "slopes, sink, dropout"])
def test_one_among_thousands(name: str, backend: str) -> None:
    """The same tiles and order of sums when the device is full as when it is empty."""
    case = replace(PROMISED[name], batch=5 if REHEARSAL else 1500, q_len=33, k_len=47, slopes=None)
    inputs = moved(case.build())
    whole = case.run(backend, inputs)
    at = case.batch // 2
    alone = replace(case, origin=(at, 0, 0, 0))
    got = evaluate(alone.attend(backend), **part(inputs, slice(at, at + 1), slice(0, 4), 2), origin=alone.origin)
    for result in ("o", "lse", "dq", "dk", "dv"):
        assert same(got[result], whole[result][at : at + 1]), result


@pytest.mark.parametrize("name", [*DENSE, "packed", "lengths"])
def test_results_repeat_bit_for_bit(name: str, backend: str) -> None:
    case = PROMISED[name]
    inputs = moved(case.build())
    first = case.run(backend, inputs, deterministic=True)
    for _ in range(2):
        assert_same(case.run(backend, inputs, deterministic=True), first)
    forward = replace(case, grad=False).run(backend, inputs | {"do": None, "dlse": None})
    assert_same(forward, {result: first[result] for result in ("o", "lse")})  # needs_grad changes nothing


@pytest.mark.parametrize("n", [17, 600, 1024])
def test_a_window_of_everything_is_causal_bit_for_bit(n: int, backend: str) -> None:
    case = sized(PROMISED["causal"], n, n)
    inputs = moved(case.build())
    expected = case.run(backend, inputs)
    for band in (Band(n - 1, 0), Band(10 * n, 0), Band(2**40, 0)):
        assert_same(case.run(backend, inputs, mask=band), expected)
    assert not same(case.run(backend, inputs, mask=Band(n // 2, 0))["o"], expected["o"])


def test_packed_sequences_do_not_see_each_other(backend: str) -> None:
    """Each is bit-equal to itself alone and in another order, and while all others are NaN."""
    case = PROMISED["packed"]
    assert case.cu_q is not None
    inputs = moved(case.build())
    whole = case.run(backend, inputs)
    spans = [slice(a, b) for a, b in pairwise(case.cu_q)]
    for order in ([0], [2], [4], [4, 3, 2, 1, 0], [3, 4]):
        rows = torch.cat([torch.arange(spans[s].start, spans[s].stop) for s in order]).to(inputs["q"].device)
        ends = torch.tensor([0, *(spans[s].stop - spans[s].start for s in order)]).cumsum(0).to(torch.int32)
        some = {name: x[rows] if name in ("q", "k", "v", "do") else x for name, x in inputs.items()}
        some |= {"dlse": inputs["dlse"][:, rows], "cu_seqlens_q": moved(ends)}
        assert_same(_picked(evaluate(case.attend(backend), **some)), _picked(whole, rows))
    for span in spans:
        spoilt = {}
        for name in ("q", "k", "v", "do"):
            spoilt[name] = torch.full_like(inputs[name], math.nan)
            spoilt[name][span] = inputs[name][span]
        rows = torch.arange(span.start, span.stop, device=inputs["q"].device)
        assert_same(_picked(case.run(backend, inputs | spoilt), rows), _picked(whole, rows))


def _picked(results: Results, rows: Any = slice(None)) -> Results:
    """The rows of packed results."""
    return {name: x[:, rows] if name == "lse" else x[rows] for name, x in results.items()}


def test_nan_beyond_a_length_changes_no_bit(backend: str) -> None:
    case = PROMISED["lengths"]
    clean, spoilt = (moved(replace(case, garbage=garbage).build()) for garbage in (False, True))
    assert_same(case.run(backend, spoilt), case.run(backend, clean))


@pytest.mark.parametrize("dtype", [torch.float16, BF16, F32])
def test_strides_change_no_bit(dtype: torch.dtype, backend: str) -> None:
    case = Case(batch=2, heads=4, q_len=150, k_len=170, dim=64, v_dim=64, dtype=dtype, band=causal)
    inputs = case.build()
    for layout in (*LAYOUTS, "scalar"):
        strided = {name: laid_out(inputs[name], layout) for name in ("q", "k", "v", "do")}
        contiguous = {name: x.contiguous() for name, x in strided.items()}
        ours, theirs = (case.run(backend, moved(inputs | given)) for given in (strided, contiguous))
        assert_same(ours, theirs)


def test_contents_out_of_range_are_clamped_where_they_are_not_checked(backend: str) -> None:
    """Lengths and cu_seqlens that lie do not make a kernel read or write out of bounds; the device lives on."""
    case = PROMISED["packed"]
    inputs = moved(case.build())
    del inputs["cu_seqlens_q"]
    if REHEARSAL:
        return
    from tilewise.problem import _checked

    active, _checked.active = _checked.active, False
    try:
        for ends in ([0, 10**6, 2**30, 5, -7, 905], [-(2**31), 300, 200, 100, 50, 2**31 - 1], [7] * 6):
            cu = torch.tensor(ends, dtype=torch.int32, device="cuda")
            evaluate(case.attend(backend), **inputs, cu_seqlens_q=cu)
            torch.cuda.synchronize()
    finally:
        _checked.active = active
    with tilewise.checked(), pytest.raises(ValueError, match="cu_seqlens_q"):
        evaluate(
            case.attend(backend),
            **inputs,
            cu_seqlens_q=torch.tensor([0, 9, 5, 8, 9, 9], dtype=torch.int32, device="cuda"),
        )


# ---- dropout ---------------------------------------------------------------------------------------------------------


def kept(backend: str, device: str, p: float, seed: Any, heads: int = 8, n: int = 128) -> torch.Tensor:
    """(heads, n, n) bool: the pairs that dropout keeps, read off o for equal scores and the unit matrix as v."""
    q, v = torch.zeros(1, heads, n, 64, device=device), torch.eye(n, device=device).expand(1, heads, n, n)
    return (tilewise.attention(q, q, v, dropout_p=p, seed=seed, backend=backend)[0] != 0).cpu()


@pytest.mark.parametrize("p", [0.001, 0.5])
@pytest.mark.parametrize("seed", [0, -1, 2**40 + 3, 2**64 - 1])
def test_dropout_drops_the_pairs_that_the_cpu_drops(p: float, seed: int, backend: str, device: str) -> None:
    assert torch.equal(kept(backend, device, p, seed), kept("tiled", "cpu", p, seed))


def test_dropout_keeps_as_many_pairs_as_it_says(backend: str, device: str) -> None:
    """p = 0.001 keeps 0.999 of the pairs; thresholds of 8 bits would keep 0.996."""
    kept_pairs = kept(backend, device, 0.001, seed=3, heads=64).double()
    assert abs(kept_pairs.mean().item() - 0.999) < 4 * (0.001 * 0.999 / kept_pairs.numel()) ** 0.5


def test_dropout_drops_the_same_pairs_in_packed_sequences_and_from_an_origin(backend: str, device: str) -> None:
    packed = Case(batch=2, q_len=190, k_len=190, v_dim=128, cu_q=(0, 70, 190), dropout_p=0.5, fill=0.0, grad=False)
    dense = Case(batch=2, q_len=130, k_len=128, v_dim=128, dropout_p=0.5, fill=0.0, origin=(3, 5, 17, 9), grad=False)
    for case in (packed, dense):
        inputs = case.build()
        shape = inputs["v"].shape
        v = torch.eye(128)[torch.arange(shape[0 if case.cu_q else 2]) % 70]
        inputs["v"] = (v[:, None] if case.cu_q else v).expand(shape).contiguous()
        ours, theirs = case.run(backend, moved(inputs))["o"].cpu(), case.run("tiled", inputs)["o"]
        torch.testing.assert_close(ours, theirs, atol=1e-6, rtol=1e-5)
        assert 0.3 < (theirs[..., :60] != 0).double().mean() < 0.99


def test_gradients_flow_through_lse_alone(backend: str) -> None:
    """Against PyTorch's own logsumexp in fp64."""
    case = replace(PROMISED["full, fp32"], kv_heads=4)
    inputs = moved(case.build())
    q, k, v = (inputs[name].requires_grad_() for name in "qkv")
    _, lse = tilewise.attention(q, k, v, mask=causal, return_lse=True, backend=backend)
    weight = inputs["dlse"]
    ours = torch.autograd.grad(lse, (q, k, v), weight)
    visible = moved(causal.dense(case.q_len, case.k_len))
    exact = torch.logsumexp((q.double() @ k.double().mT / 8).masked_fill(~visible, -torch.inf), -1)
    theirs = torch.autograd.grad(exact, (q, k), weight.double())
    for x, ref in zip(ours, theirs, strict=False):
        assert (x - ref).norm() < 3e-6 * ref.norm()
    assert (ours[2] == 0).all()


def test_fp32_is_fp32(backend: str) -> None:
    """An error near 1e-6, not TF32's 1e-3."""
    inputs = moved(PROMISED["full, fp32"].build())
    q, k, v = inputs["q"], inputs["k"], inputs["v"]
    o = tilewise.attention(q, k, v, backend=backend)
    exact = tilewise.attention(q.double(), k.double(), v.double(), backend="tiled")
    assert ((o - exact).norm() / exact.norm()) < 2e-6


# ---- races -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["causal", "slopes, sink, dropout", "blocks"])
def test_a_thousand_repeats_beside_the_same_kernel_on_another_stream(name: str, backend: str, cuda: None) -> None:
    """Forward and deterministic backward, bit-equal each time."""
    case = PROMISED[name]
    assert tile_steps(case, 128) > 100  # more programs than the device runs at once, when both streams are busy
    inputs, others = moved(case.build()), moved(replace(case, seed=1).build())
    for given in (inputs, others):
        if case.dropout_p:
            given["seed"] = torch.tensor(5, device="cuda")
    first = case.run(backend, inputs, deterministic=True)
    torch.cuda.synchronize()
    streams = [torch.cuda.Stream() for _ in range(2)]
    wrong = torch.zeros((), dtype=torch.int64, device="cuda")
    torch.cuda.synchronize()
    for _ in range(1000):
        with torch.cuda.stream(streams[1]):
            case.run(backend, others, deterministic=True)
        with torch.cuda.stream(streams[0]):
            got = case.run(backend, inputs, deterministic=True)
            for result, x in first.items():
                wrong += (got[result] != x).sum()
    torch.cuda.synchronize()
    assert wrong.item() == 0
    assert not any(x.isnan().any() for x in first.values())


def test_results_lie_as_their_tensors(backend: str) -> None:
    dtype = F32 if REHEARSAL else BF16
    check_results_lie_as_their_tensors(backend, dtype, 64, 64, DEVICE, ways=WAYS[::5])
    check_results_lie_as_their_tensors(None, dtype, 64, 64, DEVICE, compiled=True, ways=WAYS[-1:])
