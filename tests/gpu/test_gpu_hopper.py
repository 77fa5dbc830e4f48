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

    def call(*tensors: Tensor, mask: Any = band) -> Result:
        return tilewise.attention(*tensors, mask=mask, return_lse=True, backend=backend_of(PREFIX))

    return tensors, call


def assert_same(a: Result, b: Result) -> None:
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
