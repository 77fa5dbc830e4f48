"""The hot path: nothing waits for the device, CUDA graphs record it, streams and devices are those of the tensors."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest
import torch
from cases import Case
from close import Results, evaluate
from test_contract import assert_same
from triton_cases import PROMISED
from where import moved

import tilewise
from tilewise import causal

pytestmark = pytest.mark.usefixtures("compiled", "cuda")


@pytest.fixture(autouse=True)
def contents_are_checked() -> None:
    """They are not: looking at them waits for the device."""


def trained(case: Case, backend: str, inputs: dict[str, Any]) -> Callable[[], Results]:
    """A call with backward, on inputs that lie ready."""
    return lambda: evaluate(case.attend(backend), **inputs)


@pytest.mark.parametrize("name", PROMISED)
def test_a_call_never_waits_for_the_device(name: str, backend: str) -> None:
    call = trained(PROMISED[name], backend, moved(PROMISED[name].build()))
    call()  # compiles
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        call()
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_dropout_that_draws_its_seed_does_not_wait_either(backend: str) -> None:
    q = torch.randn(1, 4, 300, 64, dtype=torch.bfloat16, device="cuda", requires_grad=True)

    def call() -> None:
        tilewise.attention(q, q, q, dropout_p=0.5, backend=backend).sum().backward()

    call()
    torch.cuda.set_sync_debug_mode("error")
    try:
        call()
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_the_sync_alarm_rings() -> None:
    torch.cuda.set_sync_debug_mode("error")
    try:
        with pytest.raises(RuntimeError, match="synchroniz"):
            torch.ones(1, device="cuda").item()
    finally:
        torch.cuda.set_sync_debug_mode("default")


# ---- CUDA graphs -----------------------------------------------------------------------------------------------------


def recorded(call: Callable[[], Any]) -> tuple[torch.cuda.CUDAGraph, Any]:
    """A graph of the call, warmed up on a stream of its own, and the tensors that a replay fills."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        call()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        result = call()
    return graph, result


@pytest.mark.parametrize("name", [name for name in PROMISED if name != "dropout"])
def test_a_replay_gives_what_a_call_gives(name: str, backend: str) -> None:
    """Also for other contents of the same tensors."""
    case = PROMISED[name]
    inputs = moved(case.build())
    if case.dropout_p:
        inputs["seed"] = torch.tensor(7, device="cuda")

    def call() -> Results:
        return evaluate(case.attend(backend), **inputs, deterministic=True)

    graph, results = recorded(call)
    for other in (None, 1):
        if other is not None:
            for name, x in moved(replace(case, seed=other).build()).items():
                if isinstance(x, torch.Tensor) and x.is_floating_point():
                    inputs[name].copy_(x)
        for x in results.values():
            x.fill_(torch.nan)
        graph.replay()
        torch.cuda.synchronize()
        assert_same(results, call())


def test_each_replay_draws_new_dropout_in_forward_and_backward_alike(backend: str) -> None:
    """With equal scores, v and dO the unit matrix: o is the kept pairs over n (1 - p), and dv is its transpose."""
    n = 64
    q = torch.zeros(1, 4, n, n, dtype=torch.bfloat16, device="cuda", requires_grad=True)
    eye = torch.eye(n, dtype=torch.bfloat16, device="cuda").expand(1, 4, n, n)
    v = eye.clone().requires_grad_()

    def call() -> tuple[torch.Tensor, torch.Tensor]:
        o = tilewise.attention(q, q, v, dropout_p=0.5, backend=backend)
        return o.detach(), torch.autograd.grad(o, v, eye)[0]

    torch.manual_seed(0)
    graph, (o, dv) = recorded(call)
    masks = []
    for _ in range(5):
        graph.replay()
        torch.cuda.synchronize()
        assert torch.equal(o, dv.mT)
        masks.append((o != 0).cpu())
        assert 0.45 < masks[-1].double().mean() < 0.55
    for x, y in pairwise(masks):
        assert 0.4 < (x == y).double().mean() < 0.6


def test_two_graphs_replayed_together(backend: str) -> None:
    """Of the same kernels, on two streams, a hundred times: whatever scratch they have is their own."""
    case = PROMISED["causal"]
    inputs = [moved(replace(case, seed=seed).build()) for seed in (0, 1)]

    def call(which: int) -> Callable[[], Results]:
        return lambda: evaluate(case.attend(backend), **inputs[which], deterministic=True)

    expected = [call(which)() for which in (0, 1)]
    graphs = [recorded(call(which)) for which in (0, 1)]
    streams = [torch.cuda.Stream() for _ in graphs]
    wrong = torch.zeros(2, dtype=torch.int64, device="cuda")
    torch.cuda.synchronize()
    for _ in range(100):
        for which, (graph, results) in enumerate(graphs):
            with torch.cuda.stream(streams[which]):
                graph.replay()
                for name, x in results.items():
                    wrong[which] += (x != expected[which][name]).sum()
    torch.cuda.synchronize()
    assert wrong.tolist() == [0, 0]


# ---- streams and devices ---------------------------------------------------------------------------------------------


def test_it_runs_on_the_current_stream(backend: str) -> None:
    """After half a second's wait on a side stream come the inputs, and then the call: it must not overtake them."""
    case = PROMISED["causal"]
    inputs = moved(case.build())
    expected = evaluate(case.attend(backend), **inputs, deterministic=True)
    empty = {name: torch.zeros_like(x) if isinstance(x, torch.Tensor) else x for name, x in inputs.items()}
    stream = torch.cuda.Stream()
    torch.cuda.synchronize()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(10**9)
        for name in ("q", "k", "v", "do", "dlse"):
            empty[name].copy_(inputs[name])
        got = evaluate(case.attend(backend), **empty, deterministic=True)
    torch.cuda.synchronize()
    assert_same(got, expected)


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
@pytest.mark.parametrize("name", ["causal", "blocks", "packed", "slopes, sink, dropout"])
def test_tensors_on_another_device_than_the_current_one(name: str, backend: str) -> None:
    case = PROMISED[name]
    first, second = (
        evaluate(case.attend(backend), **moved(case.build(), device), deterministic=True)
        for device in ("cuda:0", "cuda:1")
    )
    assert torch.cuda.current_device() == 0
    assert_same({name: x.cpu() for name, x in second.items()}, {name: x.cpu() for name, x in first.items()})
    assert all(x.device.index == 1 for x in second.values())


def test_mixed_devices_are_an_error(backend: str) -> None:
    q = torch.randn(1, 2, 16, 64, device="cuda")
    with pytest.raises(ValueError, match="device"):
        tilewise.attention(q, q.cpu(), q, mask=causal, backend=backend)
