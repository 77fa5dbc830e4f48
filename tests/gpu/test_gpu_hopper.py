"""What the contract promises beyond right numbers, of the Hopper backend: its programs claim their tiles as they go."""

from __future__ import annotations

import os
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import pytest
import torch
from hopper_cases import CALLS, OPTIONS, PREFIX, SPANS
from test_layout import WAYS, check_results_lie_as_their_tensors
from torch import Tensor
from where import DEVICE, REHEARSAL, WHY_NOT_HOPPER, backend_of

import tilewise
from tilewise import Band, causal
from tilewise.algorithm.dropout import keep
from tilewise.kernels.triton import backend as triton_backend
from tilewise.problem import _checked

pytestmark = [
    pytest.mark.skipif(WHY_NOT_HOPPER is not None, reason=str(WHY_NOT_HOPPER)), pytest.mark.usefixtures("compiled"),
]  # fmt: skip

BF16, F16 = torch.bfloat16, torch.float16
REPEATS = 2 if REHEARSAL else int(os.environ.get("TILEWISE_REPEATS", "1000"))
Result = tuple[Tensor, Tensor]


def inputs(name: str, batch: int = 3, heads: int = 4) -> tuple[list[Tensor], Callable[..., Result]]:
    """q, k, v, and the call."""
    d, length, band = CALLS[name]
    make = torch.Generator(device=DEVICE).manual_seed(length)
    shape = (batch, length, heads, d)
    tensors = [torch.randn(shape, generator=make, device=DEVICE).to(BF16).transpose(1, 2) for _ in range(3)]

    def call(*tensors: Tensor, mask: Any = band, deterministic: bool = False) -> Result:
        return tilewise.attention(
            *tensors, mask=mask, return_lse=True, backend=backend_of(PREFIX), deterministic=deterministic
        )

    return tensors, call


def assert_same(a: tuple[Tensor, ...], b: tuple[Tensor, ...]) -> None:
    for x, y in zip(a, b, strict=True):
        assert torch.equal(x, y), f"{(x != y).sum().item()} of {x.numel()} differ"


@pytest.mark.parametrize("name", CALLS)
def test_a_thousand_calls_beside_another_stream_have_the_same_bits(name: str, cuda: None) -> None:
    tensors, call = inputs(name)
    expected = call(*tensors)
    noise, side = torch.randn(2048, 2048, device=DEVICE, dtype=BF16), torch.cuda.Stream()
    unlike = torch.zeros((), dtype=torch.int64, device=DEVICE)
    for n in range(REPEATS):
        if n % 10 == 0:
            with torch.cuda.stream(side):
                noise @ noise
        for x, y in zip(call(*tensors), expected, strict=True):
            unlike += (x != y).sum()
    assert unlike.item() == 0


def gradients_of(name: str) -> Callable[[bool], tuple[Tensor, ...]]:
    """dq, dk, dv, asked for reproducibly or not."""
    tensors, call = inputs(name)
    leaves = [x.detach().requires_grad_() for x in tensors]
    do = torch.randn_like(tensors[0])

    def grads(deterministic: bool) -> tuple[Tensor, ...]:
        return torch.autograd.grad(call(*leaves, deterministic=deterministic)[0], leaves, do)

    return grads


@pytest.mark.parametrize("name", [name for name, (d, _, _) in CALLS.items() if d <= 128])
def test_gradients_of_keys_and_values_have_the_same_bits_each_time(name: str) -> None:
    """dQ is added up in whatever order programs come by, unless it is asked to be deterministic."""
    grads = gradients_of(name)
    expected, unlike = grads(False), torch.zeros((), dtype=torch.int64, device=DEVICE)
    for _ in range(max(1, REPEATS // 5)):
        found = grads(False)
        for x, y in zip(found[1:], expected[1:], strict=True):
            unlike += (x != y).sum()
    assert unlike.item() == 0
    torch.testing.assert_close(found[0], expected[0], rtol=2e-2, atol=2e-3)


@pytest.mark.parametrize("name", CALLS)
def test_deterministic_gradients_beside_another_stream_have_the_same_bits(name: str, cuda: None) -> None:
    grads = gradients_of(name)
    expected, others = grads(True), grads(False)
    noise, side = torch.randn(2048, 2048, device=DEVICE, dtype=BF16), torch.cuda.Stream()
    unlike = torch.zeros(REPEATS, 3, dtype=torch.int64, device=DEVICE)
    for n in range(REPEATS):
        if n % 10 == 0:
            with torch.cuda.stream(side):
                noise @ noise
        unlike[n] = torch.stack([(x != y).sum() for x, y in zip(grads(True), expected, strict=True)])
    found = {n: of_qkv for n, of_qkv in enumerate(unlike.tolist()) if any(of_qkv)}
    assert not found, f"of calls, elements of dq, dk, dv: {found}"
    assert_same(others[1:], expected[1:])
    torch.testing.assert_close(others[0], expected[0], rtol=2e-2, atol=2e-3)
    assert CALLS[name][0] <= 128 or torch.equal(others[0], expected[0])  # wide heads have one order in any case


@pytest.mark.parametrize("name", CALLS)
def test_deterministic_gradients_do_not_see_their_batch(name: str) -> None:
    """Of grouped heads: a tile of keys adds to the dQ of each."""
    (q, k, v), call = inputs(name)
    do = torch.randn_like(q)

    def grads(at: slice) -> tuple[Tensor, ...]:
        leaves = [x[at].detach().requires_grad_() for x in (q, k[:, :2], v[:, :2])]
        return torch.autograd.grad(call(*leaves, deterministic=True)[0], leaves, do[at])

    assert_same(grads(slice(1, 2)), tuple(x[1:2] for x in grads(slice(None))))


@pytest.mark.parametrize("band", [Band(), causal], ids=str)
@pytest.mark.parametrize("d", [64, 128])
def test_more_tiles_add_to_one_dq_than_run_at_once(d: int, band: Band) -> None:
    """They wait for each other: none for one that has no room yet."""
    q_len, k_len = (100, 600) if REHEARSAL else (200, 65536)
    q = torch.randn(1, 2, q_len, d, device=DEVICE, dtype=BF16, requires_grad=True)
    k, v = (torch.randn(1, 2, k_len, d, device=DEVICE, dtype=BF16) for _ in range(2))

    def dq(deterministic: bool) -> Tensor:
        o = tilewise.attention(q, k, v, mask=band, backend=backend_of(PREFIX), deterministic=deterministic)
        return torch.autograd.grad(o.sum(), q)[0]

    expected = dq(True)
    assert torch.equal(dq(True), expected)
    torch.testing.assert_close(dq(False), expected, rtol=2e-2, atol=2e-3)


@pytest.mark.parametrize("name", CALLS)
def test_a_sequence_does_not_see_its_batch(name: str) -> None:
    tensors, call = inputs(name)
    o, lse = call(*tensors)
    assert_same(call(*(x[1:2] for x in tensors)), (o[1:2], lse[1:2]))
    assert_same(call(*(x[:, 2:] for x in tensors)), (o[:, 2:], lse[:, 2:]))


@pytest.mark.parametrize("name", [name for name in CALLS if "causal" in name])
def test_a_window_of_everything_is_causal_bit_for_bit(name: str) -> None:
    tensors, call = inputs(name)
    expected, length = call(*tensors), tensors[0].shape[2]
    for left in (length - 1, 10 * length, 2**40):
        assert_same(call(*tensors, mask=Band(left, 0)), expected)
    assert not torch.equal(call(*tensors, mask=Band(length // 2, 0))[0], expected[0])


@pytest.mark.parametrize("name", ["64 causal", "128 causal"])
def test_streams_at_once(name: str, cuda: None) -> None:
    tensors, call = inputs(name)
    expected = call(*tensors)
    torch.cuda.synchronize()
    streams, results = [torch.cuda.Stream() for _ in range(3)], []
    for n in range(60):
        with torch.cuda.stream(streams[n % 3]):
            results.append(call(*tensors))
    torch.cuda.synchronize()
    for result in results:
        assert_same(result, expected)


@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("name", ["64 causal", "128 causal"])
def test_gradients_on_streams_at_once(name: str, deterministic: bool, cuda: None) -> None:
    """Launches share the SMs: a program that waits for another's sums may not keep that one from its SM."""
    grads = gradients_of(name)
    expected = grads(deterministic)
    torch.cuda.synchronize()
    streams, results = [torch.cuda.Stream() for _ in range(3)], []
    for n in range(60):
        with torch.cuda.stream(streams[n % 3]):
            results.append(grads(deterministic))
    torch.cuda.synchronize()
    first = 0 if deterministic else 1
    for found in results:
        assert_same(found[first:], expected[first:])


@pytest.mark.parametrize("name", ["64 causal", "128 causal"])
def test_gradients_in_a_graph(name: str, cuda: None) -> None:
    """Two launches of it, replayed: each leaves its counter of tiles as it found it."""
    grads = gradients_of(name)
    expected = grads(True)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        results = [grads(True), grads(True)]
    for _ in range(5):
        for result in results:
            for x in result:
                x.fill_(torch.nan)
        graph.replay()
        torch.cuda.synchronize()
        for result in results:
            assert_same(result, expected)


@pytest.mark.parametrize("name", ["64 causal", "128 causal"])
def test_graphs_recorded_on_one_stream_replayed_on_two(name: str, cuda: None) -> None:
    tensors, call = inputs(name)
    expected = call(*tensors)
    graphs = []
    for _ in range(2):
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            results = [call(*tensors), call(*tensors)]
        graphs.append((graph, results, torch.cuda.Stream()))
    torch.cuda.synchronize()
    for _ in range(10):
        for graph, results, stream in graphs:
            with torch.cuda.stream(stream):
                for result in results:
                    for x in result:
                        x.fill_(torch.nan)
                graph.replay()
        torch.cuda.synchronize()
        for _, results, _ in graphs:
            for result in results:
                assert_same(result, expected)


def test_more_heads_than_a_grid_has_blocks() -> None:
    """And more tiles than programs, each with a row or two of keys."""
    batch = 20 if REHEARSAL else 40000
    q = torch.randn(batch, 2, 3, 64, device=DEVICE, dtype=F16)
    o, lse = tilewise.attention(q, q, q, mask=causal, return_lse=True, backend=backend_of(PREFIX))
    for at in (0, batch // 2, batch - 1):
        part = q[at : at + 1]
        one = tilewise.attention(part, part, part, mask=causal, return_lse=True, backend=backend_of(PREFIX))
        assert_same(one, (o[at : at + 1], lse[at : at + 1]))


@pytest.mark.parametrize(("q_len", "k_len"), [(0, 5), (5, 0), (70, 0)])
def test_nothing_to_attend_to(q_len: int, k_len: int) -> None:
    q, k = (torch.randn(2, 2, length, 64, device=DEVICE, dtype=BF16) for length in (q_len, k_len))
    o, lse = tilewise.attention(q, k, k, return_lse=True, backend=backend_of(PREFIX))
    assert o.shape == q.shape
    assert not o.any()
    assert (lse == -torch.inf).all()


# ---- dropout ---------------------------------------------------------------------------------------------------------


def dropped(backend: str, device: str, d: int, p: float, seed: int, mask: Any) -> Tensor:
    """Which pairs are: read off o for equal scores and unit vectors as v."""
    q = torch.zeros(2, 3, d, 64, device=device, dtype=BF16)
    v = torch.eye(d, device=device, dtype=BF16).expand(2, 3, d, d)
    return (tilewise.attention(q, q, v, mask=mask, dropout_p=p, seed=seed, backend=backend) == 0).cpu()


@pytest.mark.parametrize("band", [Band(), causal], ids=str)
@pytest.mark.parametrize("d", [64, 128, 192, 256])
def test_dropout_drops_the_pairs_that_the_cpu_drops(d: int, band: Band) -> None:
    for p, seed in ((0.1, 2**40 + 3), (0.5, -1)):
        found = dropped(backend_of(PREFIX), DEVICE, d, p, seed, band)
        assert torch.equal(found, dropped("tiled", "cpu", d, p, seed, band))


@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("name", CALLS)
def test_dropout_leaves_lse_and_its_gradients_are_those_of_triton(name: str, deterministic: bool) -> None:
    """Of the same bits: its own backward or Triton's, of grouped heads."""
    (q, k, v), _ = inputs(name)
    do = torch.randn_like(q)

    def results(backend: str) -> tuple[Tensor, ...]:
        leaves = [x.detach().requires_grad_() for x in (q, k[:, :2], v[:, :2])]
        options = {"mask": CALLS[name][2], "dropout_p": 0.2, "seed": 5, "return_lse": True}
        o, lse = tilewise.attention(*leaves, backend=backend, deterministic=deterministic, **options)
        return (lse.detach(), o.detach(), *torch.autograd.grad(o, leaves, do))

    for x, y in zip(results(backend_of(PREFIX)), results("tiled" if REHEARSAL else "triton"), strict=True):
        assert (x.float() - y.float()).norm() <= 1e-2 * y.float().norm()


@pytest.mark.parametrize("band", [Band(), causal], ids=str)
@pytest.mark.parametrize("d", [64, 96, 128])
def test_the_backward_drops_the_pairs_that_the_forward_drops(d: int, band: Band) -> None:
    """Read off dV for equal scores and unit vectors as dO: of the last head, of the second sequence."""
    length, p, seed = 2 * d, 0.3, 2**40 + 3
    q = torch.zeros(2, 3, length, d, device=DEVICE, dtype=BF16)
    v = torch.zeros_like(q).requires_grad_()
    eye = torch.eye(length, device=DEVICE, dtype=BF16).expand(2, 3, length, length)
    kept = [
        torch.autograd.grad(
            tilewise.attention(q, q, v, mask=band, dropout_p=p, seed=seed, backend=backend_of(PREFIX)), v,
            eye[..., first : first + d],
        )[0] != 0
        for first in range(0, length, d)
    ]  # fmt: skip
    positions = (
        torch.arange(n).view([n if m == dim else 1 for m in range(4)]) for dim, n in enumerate((2, 3, length, length))
    )
    assert torch.equal(torch.cat(kept, -1).mT.cpu(), keep(seed, p, *positions) & band.dense(length, length))


@pytest.mark.parametrize("name", ["64 causal", "128 causal"])
def test_gradients_with_dropout_in_a_graph_are_of_the_seed_that_is_there(name: str, cuda: None) -> None:
    """Replayed, for the seed lies on the device."""
    tensors, _ = inputs(name)
    leaves = [x.detach().requires_grad_() for x in tensors]
    do, seed = torch.randn_like(tensors[0]), torch.zeros((), dtype=torch.int64, device=DEVICE)

    def grads() -> tuple[Tensor, ...]:
        o = tilewise.attention(
            *leaves, mask=CALLS[name][2], dropout_p=0.2, seed=seed, deterministic=True, backend=backend_of(PREFIX)
        )
        return torch.autograd.grad(o, leaves, do)

    expected = {}
    for n in (0, 5):
        seed.fill_(n)
        expected[n] = grads()
    assert not torch.equal(expected[0][1], expected[5][1])
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = grads()
    for n in (5, 0, 5):
        seed.fill_(n)
        graph.replay()
        torch.cuda.synchronize()
        assert_same(found, expected[n])


@pytest.mark.parametrize("name", ["64 causal", "128 causal"])
def test_dropout_of_packed_sequences_is_that_of_each_alone(name: str) -> None:
    """But for its number, which the bits depend on: the first of them."""
    (q, k, v), _ = packed(name)
    do = torch.randn_like(q)

    def grads(end: int, spans: Any) -> tuple[Tensor, ...]:
        leaves = [x[:end].detach().requires_grad_() for x in (q, k, v)]
        o = tilewise.attention_packed(
            *leaves, ends_of(spans), mask=OPTIONS[name]["band"], dropout_p=0.2, seed=7, deterministic=True,
            backend=backend_of(PREFIX),
        )  # fmt: skip
        return torch.autograd.grad(o, leaves, do[:end])

    assert_same(grads(SPANS[0], SPANS[:1]), tuple(x[: SPANS[0]] for x in grads(sum(SPANS), SPANS)))


# ---- sequences of unlike lengths, block masks ------------------------------------------------------------------------


@pytest.fixture
def own_backward(monkeypatch: pytest.MonkeyPatch) -> None:
    """No backward is Triton's."""

    def fail(*_: Any) -> None:
        pytest.fail("it went to Triton")

    monkeypatch.setattr(triton_backend, "backward", fail)


def gradients(call: Callable[..., Result], tensors: list[Tensor], do: Tensor, **options: Any) -> tuple[Tensor, ...]:
    """dq, dk, dv."""
    leaves = [x.detach().requires_grad_() for x in tensors]
    return torch.autograd.grad(call(*leaves, **options)[0], leaves, do)


def assert_same_gradients(a: tuple[Tensor, ...], b: tuple[Tensor, ...], ordered: bool = False) -> None:
    """Bit for bit, and dQ within what the order of its sum may do."""
    assert all(x.isfinite().all() for x in a)
    for x, y in zip(a[not ordered :], b[not ordered :], strict=True):
        assert torch.equal(x, y), f"{(x != y).sum().item()} of {x.numel()} differ"
    torch.testing.assert_close(a[0], b[0], rtol=2e-2, atol=2e-3)


def ends_of(spans: Any) -> Tensor:
    return torch.tensor([0, *spans], device=DEVICE).cumsum(0).to(torch.int32)


def packed(name: str, tokens: int = sum(SPANS) + 7) -> tuple[list[Tensor], Callable[..., Result]]:
    """q, k, v of 4 and 2 heads, and the call of (q, k, v, the sequences' lengths, how many of each are in use)."""
    d, band, lens = OPTIONS[name]["d"], OPTIONS[name].get("band", Band()), OPTIONS[name].get("lens", False)
    make = torch.Generator(device=DEVICE).manual_seed(d)
    tensors = [torch.randn(tokens, heads, d, generator=make, device=DEVICE).to(BF16) for heads in (4, 2, 2)]

    def call(*tensors: Tensor, spans: Any = SPANS, cu: Tensor | None = None, deterministic: bool = False) -> Result:
        used = {f"{side}_lens": torch.tensor([n * 2 // 3 for n in spans], device=DEVICE).int() for side in "qk" if lens}
        return tilewise.attention_packed(
            *tensors,
            ends_of(spans) if cu is None else cu,
            mask=band,
            return_lse=True,
            backend=backend_of(PREFIX),
            deterministic=deterministic,
            **used,
        )

    return tensors, call


@pytest.mark.parametrize("name", OPTIONS)
def test_packed_sequences_do_not_see_each_other(name: str) -> None:
    """Each has the bits that it has alone, in another order, and while all others are NaN; tokens of none are 0."""
    tensors, call = packed(name)
    o, lse = call(*tensors)
    assert not o[sum(SPANS) :].any()
    assert (lse[:, sum(SPANS) :] == -torch.inf).all()
    ends = ends_of(SPANS).tolist()
    rows = [torch.arange(a, b, device=DEVICE) for a, b in pairwise(ends)]
    for order in ([0], [2], [4, 5], [5, 4, 3, 2, 1, 0]):
        some = torch.cat([rows[s] for s in order])
        found = call(*(x[some] for x in tensors), spans=[SPANS[s] for s in order])
        assert_same(found, (o[some], lse[:, some]))
    for here in rows:
        spoilt = [torch.full_like(x, torch.nan).index_copy_(0, here, x[here]) for x in tensors]
        found = call(*spoilt)
        assert_same((found[0][here], found[1][:, here]), (o[here], lse[:, here]))


@pytest.mark.parametrize("name", [name for name in OPTIONS if "lengths" not in name])
def test_a_packed_sequence_has_the_bits_of_a_dense_one(name: str) -> None:
    tensors, call = packed(name)
    o, lse = call(*tensors)
    for a, b in pairwise(ends_of(SPANS).tolist()):
        if a == b:
            continue
        alone = tilewise.attention(
            *(x[None, a:b].transpose(1, 2) for x in tensors), mask=OPTIONS[name].get("band", Band()), return_lse=True,
            backend=backend_of(PREFIX),
        )  # fmt: skip
        assert_same((alone[0][0].transpose(0, 1), alone[1][0]), (o[a:b], lse[:, a:b]))


@pytest.mark.parametrize("name", ["64", "128 causal"])
def test_nan_beyond_a_length_changes_no_bit(name: str) -> None:
    tensors, call = inputs(name)
    length = tensors[0].shape[2]
    lens = torch.tensor([length, length // 3, 0], device=DEVICE, dtype=torch.int32)
    options = {
        "mask": CALLS[name][2],
        "return_lse": True,
        "backend": backend_of(PREFIX),
        "q_lens": lens,
        "k_lens": lens,
    }
    expected = tilewise.attention(*tensors, **options)
    spoilt = [x.clone() for x in tensors]
    for x in spoilt:
        for b, n in enumerate(lens.tolist()):
            x[b, :, n:] = torch.nan
    o, lse = tilewise.attention(*spoilt, **options)
    assert_same((o, lse), expected)
    assert_same((o[:1], lse[:1]), call(*(x[:1] for x in tensors)))
    assert not o[1, :, length // 3 :].any()
    assert (lse[2] == -torch.inf).all()


NARROW = [name for name, options in OPTIONS.items() if options["d"] <= 128]  # whose backward is this backend's


@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("name", NARROW)
def test_gradients_of_packed_sequences_do_not_see_each_other(
    name: str, deterministic: bool, own_backward: None
) -> None:
    """Each sequence's are those that it has while all others are NaN; tokens of none have 0."""
    tensors, call = packed(name)
    do = torch.randn_like(tensors[0])
    grads = gradients(call, tensors, do, deterministic=deterministic)
    assert not any(x[sum(SPANS) :].any() for x in grads)
    for a, b in pairwise(ends_of(SPANS).tolist()):
        spoilt = [torch.full_like(x, torch.nan) for x in (*tensors, do)]
        for x, y in zip(spoilt, (*tensors, do), strict=True):
            x[a:b] = y[a:b]
        found = gradients(call, spoilt[:3], spoilt[3], deterministic=deterministic)
        assert_same_gradients(tuple(x[a:b] for x in found), tuple(x[a:b] for x in grads), deterministic)


@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("name", ["64", "128 causal"])
def test_nan_beyond_a_length_changes_no_bit_of_a_gradient(name: str, deterministic: bool, own_backward: None) -> None:
    tensors, _ = inputs(name)
    length = tensors[0].shape[2]
    lens = torch.tensor([length, length // 3, 0], device=DEVICE, dtype=torch.int32)
    spoilt = [x.clone() for x in (*tensors, torch.randn_like(tensors[0]))]
    clean = [x.clone() for x in spoilt]
    for x in spoilt:
        for b, n in enumerate(lens.tolist()):
            x[b, :, n:] = torch.nan

    def with_lengths(*tensors: Tensor) -> Result:
        return tilewise.attention(
            *tensors, mask=CALLS[name][2], return_lse=True, backend=backend_of(PREFIX), q_lens=lens, k_lens=lens,
            deterministic=deterministic,
        )  # fmt: skip

    expected = gradients(with_lengths, clean[:3], clean[3])
    assert_same_gradients(gradients(with_lengths, spoilt[:3], spoilt[3]), expected, deterministic)
    assert not any(x[1, :, length // 3 :].any() or x[2].any() for x in expected)


@pytest.mark.parametrize("name", ["64", "128"])
def test_gradients_of_packed_sequences_and_block_masks_repeat_bit_for_bit(
    name: str, cuda: None, own_backward: None
) -> None:
    """dQ too, where it is to be deterministic."""
    tensors, call = inputs(name)
    blocks, do = blocks_of(tensors[0].shape[2]), torch.randn_like(tensors[0])
    packed_tensors, packed_call = packed("64 causal" if name == "64" else "128 causal")
    packed_do = torch.randn_like(packed_tensors[0])

    def found() -> tuple[Tensor, ...]:
        return (
            *gradients(call, tensors, do, mask=blocks)[1:], *gradients(packed_call, packed_tensors, packed_do)[1:],
            *gradients(packed_call, packed_tensors, packed_do, deterministic=True),
        )  # fmt: skip

    expected, unlike = found(), torch.zeros((), dtype=torch.int64, device=DEVICE)
    for _ in range(REPEATS // 4):
        for x, y in zip(found(), expected, strict=True):
            unlike += (x != y).sum()
    assert unlike.item() == 0


def blocks_of(length: int) -> tilewise.BlockMask:
    document = (torch.arange(length, device=DEVICE) * 5 // length).sqrt().int()
    return tilewise.BlockMask.from_predicate(
        lambda b, h, i, j: (document[i] == document[j]) & (i >= j), length, length, device=DEVICE
    )


@pytest.mark.parametrize("name", ["64", "128", "256"])
def test_packed_sequences_and_block_masks_repeat_bit_for_bit(name: str, cuda: None) -> None:
    tensors, call = inputs(name)
    blocks = blocks_of(tensors[0].shape[2])
    packed_tensors, packed_call = packed("64 causal" if name == "64" else "128 causal")
    first = call(*tensors, mask=blocks), packed_call(*packed_tensors)
    unlike = torch.zeros((), dtype=torch.int64, device=DEVICE)
    for _ in range(REPEATS // 4):
        for found, expected in zip((call(*tensors, mask=blocks), packed_call(*packed_tensors)), first, strict=True):
            for x, y in zip(found, expected, strict=True):
                unlike += (x != y).sum()
    assert unlike.item() == 0
    assert_same(call(*(x[1:2] for x in tensors), mask=blocks), tuple(x[1:2] for x in first[0]))


def test_a_graph_takes_other_sequences(cuda: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing of cu_seqlens is read on the host."""
    monkeypatch.setattr(_checked, "active", False)
    tensors, call = packed("128 causal")
    spans = (700, 33, 0, 100, 100, 100)
    expected = call(*tensors, spans=spans)
    cu = ends_of(SPANS)
    call(*tensors, cu=cu)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        result = call(*tensors, cu=cu)
    cu.copy_(ends_of(spans))
    graph.replay()
    assert_same(result, expected)


def test_contents_out_of_range_are_clamped_where_they_are_not_checked(
    cuda: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(_checked, "active", False)
    tensors, call = packed("64 causal", tokens=300)
    for spans in ((100, 50, 2**20), (-(2**20), 2**21), (200, -150, 100)):
        call(*tensors, spans=spans)
        torch.cuda.synchronize()
    o, lse = call(*tensors, spans=(100, 50, 2**20))
    assert_same((o, lse), call(*tensors, spans=(100, 50, 150)))


def test_another_device(cuda: None) -> None:
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs")
    tensors, call = inputs("128 causal")
    there = call(*(x.to("cuda:1") for x in tensors))
    assert torch.cuda.current_device() == 0
    assert_same((there[0].to("cuda:0"), there[1].to("cuda:0")), call(*tensors))


@pytest.mark.parametrize("packed", [False, True])
def test_inductor_compiles_a_layer_around_it(packed: bool, cuda: None) -> None:
    """fullgraph=True, forward and backward; attention has the eager call's bits, for its inputs are the layer's own."""
    torch._dynamo.reset()
    cu = torch.tensor([0, 77, 300], dtype=torch.int32, device=DEVICE)
    shape = (300, 4, 64) if packed else (2, 4, 300, 64)
    q, k, v = (torch.randn(shape, device=DEVICE, dtype=BF16, requires_grad=True) for _ in range(3))

    def layer(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        if packed:
            o = tilewise.attention_packed(q, k, v, cu, mask=causal, backend=backend_of(PREFIX))
        else:
            o = tilewise.attention(q, k, v, mask=causal, backend=backend_of(PREFIX), deterministic=True)
        return o * 2

    compiled, eager = torch.compile(layer, fullgraph=True)(q, k, v), layer(q, k, v)
    assert_same((compiled,), (eager,))
    do = torch.randn_like(eager)
    got, expected = (torch.autograd.grad(o, (q, k, v), do) for o in (compiled, eager))
    assert_same(got[1:], expected[1:])  # packed, dQ has no fixed order
    torch.testing.assert_close(got[0], expected[0], atol=1e-2 if packed else 0.0, rtol=1e-2 if packed else 0.0)
    torch._dynamo.reset()


@pytest.mark.parametrize(("d", "v_dim"), [(64, 64), (128, 128), (96, 40), (256, 256)])
def test_results_lie_as_their_tensors(d: int, v_dim: int) -> None:
    dtype = torch.float32 if REHEARSAL else BF16
    for lengths in (False, True)[: 1 + (d <= 128)]:
        check_results_lie_as_their_tensors(backend_of(PREFIX), dtype, d, v_dim, DEVICE, lengths=lengths)
    check_results_lie_as_their_tensors(None, dtype, d, v_dim, DEVICE, compiled=True, ways=WAYS[::7])
