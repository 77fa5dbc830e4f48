"""What the contract promises beyond right numbers, of the Hopper backend: its programs claim their tiles as they go."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from hopper_cases import PREFIX
from torch import Tensor
from where import DEVICE, REHEARSAL, WHY_NOT_HOPPER, backend_of

import tilewise
from tilewise import Band, causal

pytestmark = pytest.mark.skipif(WHY_NOT_HOPPER is not None, reason=str(WHY_NOT_HOPPER))

BF16, F16 = torch.bfloat16, torch.float16
REPEATS = 2 if REHEARSAL else 1000
Result = tuple[Tensor, Tensor]

CALLS: dict[str, tuple[int, int, Band]] = {  # head size, length, Band: each kind of its kernels
    "64": (64, 520, Band()), "64 causal": (64, 1000, causal), "64 causal, long": (64, 2304, causal),
    "128": (128, 512, Band()), "128 causal": (128, 1024, causal), "128 window": (128, 777, Band(300, 5)),
    "256": (256, 300, Band()), "256 causal": (256, 640, causal),
}  # fmt: skip


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
    unlike = torch.zeros((), dtype=torch.int64, device=DEVICE)
    for n in range(REPEATS):
        if n % 10 == 0:
            with torch.cuda.stream(side):
                noise @ noise
        for x, y in zip(grads(True), expected, strict=True):
            unlike += (x != y).sum()
    assert unlike.item() == 0
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


def test_another_device(cuda: None) -> None:
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs")
    tensors, call = inputs("128 causal")
    there = call(*(x.to("cuda:1") for x in tensors))
    assert torch.cuda.current_device() == 0
    assert_same((there[0].to("cuda:0"), there[1].to("cuda:0")), call(*tensors))
