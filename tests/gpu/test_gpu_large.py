"""Sizes at which attention libraries fail: many heads, offsets past 2^31, masks of 2^32 pairs, memory, a mask of 96k.

Where the whole is too large for the reference, a part is compared whose results depend on few of the inputs: the last
rows, with dO zero everywhere else, so that dK and dV are theirs, too.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from close import Results, assert_close, evaluate
from torch import Tensor
from where import DEVICE, REHEARSAL

import tilewise
from tilewise import Band, BlockMask, causal

BF16, F32 = torch.bfloat16, torch.float32
GIB, MIB = 2**30, 2**20
SMALL = 1000 if REHEARSAL else 1  # what sizes are divided by to try the tests themselves

pytestmark = pytest.mark.usefixtures("compiled")


@pytest.fixture(autouse=True)
def room() -> Iterator[None]:
    """Each test has the whole device."""
    yield
    gc.collect()
    if DEVICE == "cuda":
        torch.cuda.empty_cache()


@pytest.fixture(autouse=True)
def contents_are_checked() -> None:
    """They are not: these tests are the hot path at full size."""


def randn(*shape: int, dtype: torch.dtype = BF16) -> Tensor:
    """Made on the device; nothing of fp64, and nothing on the host, at these sizes."""
    return torch.randn(shape, dtype=dtype, device=DEVICE)


def attend(backend: str, packed: bool = False) -> Any:
    public = tilewise.attention_packed if packed else tilewise.attention
    return lambda *qkv, **options: public(*qkv, **options, return_lse=True, backend=backend)


def assert_last_rows(got: Results, n: int, inputs: dict[str, Any]) -> None:
    """The last n rows of dense results against the reference for them alone. `do` is 0 and dlse None elsewhere."""
    some = {name: x[..., -n:, :].contiguous() if name in ("q", "do") else x for name, x in inputs.items()}
    if "mask" in some:
        some["mask"] = some["mask"][..., -n:, :].contiguous()
    part = {"o": got["o"][..., -n:, :], "lse": got["lse"][..., -n:]} | {name: got[name] for name in ("dk", "dv")}
    part["dq"] = got["dq"][..., -n:, :]
    assert_close(part, **some)
    assert got["dq"][..., :-n, :].count_nonzero() == 0


def last_rows_only(shape: tuple[int, ...], n: int) -> Tensor:
    do = torch.zeros(shape, dtype=BF16, device=DEVICE)
    do[..., -n:, :] = randn(*shape[:-2], n, shape[-1])
    return do


# ---- many sequences and heads ----------------------------------------------------------------------------------------


def exact(q: Tensor, k: Tensor, v: Tensor, do: Tensor, masked: bool = False) -> Results:
    """Plain attention of many short sequences at once, in fp64: (..., S, D), gradients included."""
    leaves = [x.double().requires_grad_() for x in (q, k, v)]
    s = leaves[0] @ leaves[1].mT / q.shape[-1] ** 0.5
    s = s.masked_fill(torch.ones(s.shape[-2:], dtype=torch.bool, device=s.device).triu(1), -torch.inf) if masked else s
    o = torch.softmax(s, -1) @ leaves[2]
    grads = torch.autograd.grad(o, leaves, do.double())
    return {
        "o": o.detach(),
        "lse": torch.logsumexp(s, -1).detach(),
        **dict(zip(("dq", "dk", "dv"), grads, strict=True)),
    }


def assert_near(got: Results, ref: Results) -> None:
    """Within what bf16 rounds, in the mean and in the worst row: whole rows or heads that went wrong stand out."""
    for name, x in ref.items():
        assert got[name].shape == x.shape, name
        error = (got[name].double() - x).flatten(0, -2).norm(dim=-1)
        size = x.flatten(0, -2).norm(dim=-1)
        if (size == 0).all():  # one key: dq and dk are what is left of bf16's rounding
            assert error.max() < 0.1, name
            continue
        assert error.norm() < 0.012 * size.norm(), name
        assert (error <= 0.05 * size + 0.05 * size.square().mean().sqrt()).all(), name


@pytest.mark.parametrize(
    ("batch", "heads", "length", "dim"), [(80000, 1, 16, 64), (1, 71280, 3, 128), (8300, 16, 1, 128), (70000, 2, 5, 64)]
)
def test_more_than_65535_sequences_and_heads(batch: int, heads: int, length: int, dim: int, backend: str) -> None:
    batch, heads = (-(-n // SMALL) for n in (batch, heads))
    q, k, v, do = (randn(batch, heads, length, dim) for _ in range(4))
    assert_near(evaluate(attend(backend), q, k, v, do, None, mask=causal), exact(q, k, v, do, masked=True))


def test_80000_packed_sequences(backend: str) -> None:
    n, length = 80000 // SMALL, 16
    q, k, v, do = (randn(n * length, 2, 64) for _ in range(4))
    cu = torch.arange(0, n * length + 1, length, dtype=torch.int32, device=DEVICE)
    got = evaluate(attend(backend, packed=True), q, k, v, do, None, mask=causal, cu_seqlens_q=cu)
    lse = got.pop("lse").unflatten(1, (n, length)).transpose(0, 1)
    dense = {name: x.unflatten(0, (n, length)).transpose(1, 2) for name, x in got.items()} | {"lse": lse}
    ref = exact(*(x.unflatten(0, (n, length)).transpose(1, 2) for x in (q, k, v, do)), masked=True)
    assert_near(dense, ref)


def test_many_sequences_a_few_of_which_are_long(backend: str) -> None:
    """70000 sequences of one token and, last, one of 1500: tiles are found by search in cu_seqlens."""
    n, long = 70000 // SMALL, 1500
    q, k, v, do = (randn(n + long, 1, 64) for _ in range(4))
    cu = torch.cat([torch.arange(n + 1), torch.tensor([n + long])]).to(torch.int32).to(DEVICE)
    got = evaluate(attend(backend, packed=True), q, k, v, do, None, mask=causal, cu_seqlens_q=cu)
    assert torch.equal(got["o"][:n], v[:n])
    tail = {name: x[:, n:] if name == "lse" else x[n:] for name, x in got.items()}
    assert_close(
        tail, q[n:], k[n:], v[n:], do[n:], None, mask=causal,
        cu_seqlens_q=torch.tensor([0, long], dtype=torch.int32, device=DEVICE),
    )  # fmt: skip


# ---- offsets past 2^31 elements --------------------------------------------------------------------------------------


def test_a_view_of_a_cache_whose_batch_stride_is_2_to_the_30(backend: str, cuda: None) -> None:
    """k and v are (B, S, H, D) views of a (B, layers, S, H, D) cache: 4 * 2^30 elements of it, 8 GiB each."""
    batch, length, heads, dim = 4, 200, 2, 64
    views = []
    for _ in range(2):
        cache = torch.empty(batch * 2**30, dtype=BF16, device="cuda")
        view = cache.as_strided((batch, length, heads, dim), (2**30, heads * dim, dim, 1), 2**30 - length * heads * dim)
        views.append(view.copy_(randn(batch, length, heads, dim)).transpose(1, 2))
    q, do = randn(batch, 4, 150, dim), randn(batch, 4, 150, dim)
    inputs: dict[str, Any] = {"q": q, "k": views[0], "v": views[1], "do": do, "dlse": None, "mask": causal}
    got = evaluate(attend(backend), **inputs)
    assert_close(got, **(inputs | {"k": views[0].contiguous(), "v": views[1].contiguous()}))


def test_dout_strides_past_2_to_the_31(backend: str, cuda: None) -> None:
    """dO of 410,923 packed tokens with strides (9728, 96, 1), as a slice of a wider projection has them."""
    tokens, heads, dim, length = 410_923, 2, 96, 300
    wide = torch.empty(tokens * 9728, dtype=BF16, device="cuda")
    do = wide.as_strided((tokens, heads, dim), (9728, 96, 1)).zero_()
    q, k, v = (randn(tokens, heads, dim) for _ in range(3))
    do[-length:] = randn(length, heads, dim)
    cu = torch.tensor([0, tokens // 2, tokens - length, tokens], dtype=torch.int32, device="cuda")
    window = Band(100, 0)
    got = evaluate(attend(backend, packed=True), q, k, v, do, None, mask=window, cu_seqlens_q=cu)
    tail = {name: x[:, -length:] if name == "lse" else x[-length:] for name, x in got.items()}
    alone = torch.tensor([0, length], dtype=torch.int32, device="cuda")
    some = (x[-length:].contiguous() for x in (q, k, v, do))
    assert_close(tail, *some, None, mask=window, cu_seqlens_q=alone)
    for name in ("dq", "dk", "dv"):
        assert got[name][:-length].count_nonzero() == 0


def test_one_tensor_of_more_than_2_to_the_31_elements(backend: str, cuda: None) -> None:
    rows, n = 2**24 + 1000, 64
    q, k, v = randn(1, 1, rows, 128), randn(1, 1, 9, 128), randn(1, 1, 9, 128)
    assert q.numel() > 2**31
    inputs: dict[str, Any] = {"q": q, "k": k, "v": v, "do": last_rows_only(tuple(q.shape), n), "dlse": None}
    assert_last_rows(evaluate(attend(backend), **inputs), n, inputs)


def test_keys_of_more_than_2_to_the_31_elements(backend: str, cuda: None) -> None:
    """The last of them are seen by every row, those before by none."""
    keys, seen = 2**24 + 1000, 200
    k, v = randn(1, 1, keys, 128), randn(1, 1, keys, 128)
    q, do = randn(1, 2, 3, 128), randn(1, 2, 3, 128)
    got = evaluate(attend(backend), q, k, v, do, None, mask=Band(seen - 3, None))
    assert got["dk"][:, :, : -seen - 3].count_nonzero() == 0
    tail = got | {name: got[name][:, :, -1000:] for name in ("dk", "dv")}
    assert_close(
        tail, q, k[:, :, -1000:].contiguous(), v[:, :, -1000:].contiguous(), do, None, mask=Band(seen - 3, None)
    )


def test_a_boolean_mask_of_more_than_2_to_the_32_pairs(backend: str, cuda: None) -> None:
    length, n = 66_000, 64
    mask = torch.rand(length, length, dtype=torch.float16, device="cuda") < 0.4
    assert mask.numel() > 2**32
    q, k, v = (randn(1, 1, length, 64) for _ in range(3))
    inputs = {"q": q, "k": k, "v": v, "do": last_rows_only(tuple(q.shape), n), "dlse": None, "mask": mask}
    assert_last_rows(evaluate(attend(backend), **inputs), n, inputs)


# ---- memory ----------------------------------------------------------------------------------------------------------


def growth(call: Any) -> int:
    """Bytes of the device that are taken during a call beyond what was taken before, at the most."""
    torch.cuda.synchronize()
    gc.collect()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    result = call()
    torch.cuda.synchronize()
    del result
    return torch.cuda.max_memory_allocated() - before


def test_a_mask_grouped_heads_and_wide_heads_at_once_take_linear_memory(backend: str, cuda: None) -> None:
    """A boolean mask, 8/2 heads and d = 320 over 8000 rows: others fall back to 15 GiB."""
    length, dim = 8000, 320
    q, do = (randn(1, 8, length, dim) for _ in range(2))
    k, v = (randn(1, 2, length, dim) for _ in range(2))
    mask = torch.rand(length, length, device="cuda") > 0.1
    inputs: dict[str, Any] = {"q": q, "k": k, "v": v, "do": do, "dlse": None, "mask": mask}
    results = 2 * q.nbytes + 2 * k.nbytes  # o, dq, dk, dv
    taken = growth(lambda: evaluate(attend(backend), **inputs))
    assert taken < 2 * results + 32 * MIB, f"{taken / MIB:.0f} MiB, of which results are {results / MIB:.0f}"
    n = 100
    inputs["do"] = last_rows_only(tuple(q.shape), n)
    assert_last_rows(evaluate(attend(backend), **inputs), n, inputs)


def test_65536_rows_take_little_beside_what_they_are(backend: str, cuda: None) -> None:
    """16 heads, d = 128, forward and backward: under 30 % over inputs, outputs and gradients."""
    q, k, v, do = (randn(1, 16, 65536, 128) for _ in range(4))
    whole = 8 * q.nbytes  # q, k, v, do, o, dq, dk, dv
    taken = 4 * q.nbytes + growth(lambda: evaluate(attend(backend), q, k, v, do, None, mask=causal))
    assert taken < 1.3 * whole, f"{taken / whole:.2f} of inputs, outputs and gradients"


def test_the_bias_gradient_takes_an_array_of_its_own_shape(backend: str, cuda: None) -> None:
    """(1, 16, 1, 16384) over 16384 rows: an array of the pairs would take 16 GiB in fp32."""
    length = 16384
    q, k, v, do = (randn(1, 16, length, 64) for _ in range(4))
    bias = randn(1, 16, 1, length, dtype=F32)
    taken = growth(lambda: evaluate(attend(backend), q, k, v, do, None, mask=Band(2048, 0), bias=bias))
    assert taken < 3 * 4 * q.nbytes + 64 * MIB, f"{taken / MIB:.0f} MiB"


def test_a_block_mask_over_96k_is_built_in_5_s_and_1_gib(cuda: None) -> None:
    def build(length: int, device: str) -> BlockMask:
        return BlockMask.from_predicate(
            lambda b, h, i, j: (i >= j) & ((i - j < 4096) | (j % 1000 < 5)), length, length, device=device
        )

    build(1152, "cuda")  # what the first kernels of a process load is not the mask's
    start = time.perf_counter()
    taken = growth(lambda: build(98304, "cuda"))
    seconds = time.perf_counter() - start
    assert taken < GIB, f"{taken / MIB:.0f} MiB"
    assert seconds < 5, f"{seconds:.1f} s"
    whole, corner = build(98304, "cuda").to("cpu"), build(1152, "cpu")
    ours, theirs = whole.tile_map()[0, 0, :9, :9], corner.tile_map()[0, 0]
    assert torch.equal(ours.clamp(max=0), theirs.clamp(max=0))  # EMPTY, FULL and MIXED alike
    mixed = theirs >= 0
    assert mixed.any()
    assert torch.equal(whole.bits[ours[mixed].long()], corner.bits[theirs[mixed].long()])
