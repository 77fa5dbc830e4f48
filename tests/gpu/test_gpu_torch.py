"""Attention within PyTorch on a GPU: torch.compile, the ops, autocast, checkpointing, deterministic algorithms."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from cases import Case
from close import assert_close, evaluate
from test_torch import CASES, arguments, public
from torch import Tensor
from torch.utils.checkpoint import checkpoint
from triton_cases import PROMISED, for_triton
from where import BACKEND, DEVICE, REHEARSAL, moved

import tilewise
from tilewise import autograd as ours
from tilewise import causal

BF16, F16, F32 = torch.bfloat16, torch.float16, torch.float32
TRACED = {name: for_triton(case) for name, case in CASES.items()}
SOME = list(TRACED)[::5] if REHEARSAL else list(TRACED)

pytestmark = pytest.mark.usefixtures("compiled")


@pytest.fixture
def dynamo() -> Any:
    """torch._dynamo, its caches empty, before and after."""
    torch._dynamo.reset()
    yield torch._dynamo
    torch._dynamo.reset()


@pytest.mark.parametrize("name", SOME)
def test_compiles_whole_forward_and_backward(name: str, dynamo: Any) -> None:
    """fullgraph=True, and the numbers are the eager ones, bit for bit; the backend is the one chosen by itself."""
    case = TRACED[name]

    def call(q: Tensor, k: Tensor, v: Tensor, **options: Any) -> tuple[Tensor, Tensor]:
        return public(case)(q, k, v, **options, deterministic=True, return_lse=True)

    inputs = moved(case.build())
    got = evaluate(torch.compile(call, fullgraph=True, backend="aot_eager"), **inputs)
    eager = evaluate(call, **inputs)
    for result, x in got.items():
        assert torch.equal(x, eager[result]), result
    assert_close(got, **inputs)


def test_the_chosen_backend_is_the_tested_one() -> None:
    q = torch.randn(1, 2, 16, 16, device=DEVICE)
    assert f"{BACKEND}: chosen" in tilewise.explain(tilewise.Problem.of(q, q, q)[0])


def test_inductor_compiles_a_layer_around_it(cuda: None, dynamo: Any) -> None:
    x, weight = (torch.randn(*shape, device="cuda", requires_grad=True) for shape in ((2, 4, 200, 64), (64, 64)))

    def layer(x: Tensor) -> Tensor:
        return (tilewise.attention(x @ weight, x, x.sin(), mask=causal).relu() + x).square().mean()

    compiled = torch.compile(layer, fullgraph=True)(x)
    grads = torch.autograd.grad(compiled, (x, weight))
    expected = torch.autograd.grad(layer(x), (x, weight))
    torch.testing.assert_close(compiled, layer(x))
    for got, want in zip(grads, expected, strict=True):
        torch.testing.assert_close(got, want, atol=1e-5, rtol=1e-3)


@pytest.mark.parametrize("packed", [False, True])
def test_ten_lengths_compile_at_most_twice(packed: bool, dynamo: Any) -> None:
    from torch._dynamo.testing import CompileCounterWithBackend

    counter = CompileCounterWithBackend("aot_eager")

    def dense(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return tilewise.attention(q, k, v, mask=causal)

    def ragged(q: Tensor, k: Tensor, v: Tensor, cu: Tensor) -> Tensor:
        return tilewise.attention_packed(q, k, v, cu, mask=causal)

    compiled = torch.compile(ragged if packed else dense, fullgraph=True, backend=counter)
    for n in (16, 17, 30, 33, 47, 64, 65, 100, 128, 200):
        shape = (n, 4, 64) if packed else (2, 4, n, 64)
        q, k, v = (torch.randn(shape, dtype=BF16, device=DEVICE, requires_grad=True) for _ in range(3))
        cu = (torch.tensor([0, n // 3, n], dtype=torch.int32, device=DEVICE),) if packed else ()
        o = compiled(q, k, v, *cu)
        expected = (ragged if packed else dense)(q, k, v, *cu)
        assert torch.equal(o, expected)
        torch.autograd.grad(o.sum(), (q, k, v))
    assert counter.frame_count <= 2


@pytest.mark.parametrize("name", SOME)
def test_opcheck(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Schema, fake kernels and autograd registration of both ops, with the very arguments that the API gives them."""
    calls: dict[str, tuple[Any, ...]] = {}

    def recording(key: str, op: Any) -> Any:
        def call(*args: Any) -> Any:
            calls[key] = args
            return op(*args)

        return call

    forward, backward = ours.forward_op, ours.backward_op
    monkeypatch.setattr(ours, "forward_op", recording("forward", forward))
    monkeypatch.setattr(ours, "backward_op", recording("backward", backward))
    given = moved(arguments(TRACED[name]))
    given = {
        key: x.requires_grad_() if key in ("q", "k", "v", "bias", "alibi_slopes", "sink") else x
        for key, x in given.items()
    }
    every = dict.fromkeys(
        ("mask", "bias", "alibi_slopes", "sink", "scale", "seed", "q_lens", "k_lens", "cu_seqlens_q", "cu_seqlens_k")
    )
    every |= {"softcap": 0.0, "dropout_p": 0.0, "deterministic": True, "backend": BACKEND}
    o, lse = ours.attend_traced(**(every | given))
    (o.sum() + lse[lse > -torch.inf].sum()).backward()
    monkeypatch.undo()  # opcheck calls the ops, too
    torch.library.opcheck(forward, calls["forward"])
    torch.library.opcheck(backward, tuple(x.detach() if isinstance(x, Tensor) else x for x in calls["backward"]))


@pytest.mark.parametrize("dtype", [BF16, F16])
def test_autocast_computes_in_its_dtype(dtype: torch.dtype, backend: str) -> None:
    q, k, v = (torch.randn(1, 4, 130, 64, device=DEVICE, requires_grad=True) for _ in range(3))
    with torch.autocast(DEVICE, dtype=dtype):
        o = tilewise.attention(q, k, v, mask=causal, backend=backend)
    expected = tilewise.attention(q.to(dtype), k.to(dtype), v.to(dtype), mask=causal, backend=backend)
    assert o.dtype == dtype
    assert torch.equal(o, expected)
    o.float().sum().backward()
    assert q.grad is not None
    assert q.grad.dtype == F32


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpointing_drops_the_same_pairs_in_the_recompute(reentrant: bool, backend: str) -> None:
    q, k, v = (torch.randn(1, 4, 140, 64, dtype=BF16, device=DEVICE, requires_grad=True) for _ in range(3))

    def call(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return tilewise.attention(q, k, v, dropout_p=0.5, deterministic=True, backend=backend).square()

    torch.manual_seed(5)
    expected = torch.autograd.grad(call(q, k, v).sum(), (q, k, v))
    torch.manual_seed(5)
    checkpoint(call, q, k, v, use_reentrant=reentrant).sum().backward()
    for x, grad in zip((q, k, v), expected, strict=True):
        assert torch.equal(x.grad, grad)
    torch.manual_seed(6)
    assert not torch.equal(torch.autograd.grad(call(q, k, v).sum(), q)[0], expected[0])


@pytest.mark.parametrize("name", ["shared bias", "slopes, sink, dropout", "blocks"])
def test_deterministic_algorithms_are_asked_for(name: str, backend: str) -> None:
    """Under PyTorch's global switch nothing of ours refuses to run, and all gradients repeat bit for bit."""
    case = PROMISED[name]
    inputs = moved(case.build())
    torch.use_deterministic_algorithms(True)
    try:
        first, second = case.run(backend, inputs), case.run(backend, inputs)
    finally:
        torch.use_deterministic_algorithms(False)
    for result, x in first.items():
        assert torch.equal(x, second[result]), result


def test_derivatives_that_there_are_not_are_refused(backend: str) -> None:
    q, k, v = (torch.randn(1, 2, 20, 16, device=DEVICE, requires_grad=True) for _ in range(3))
    (dq,) = torch.autograd.grad(tilewise.attention(q, k, v, backend=backend).square().sum(), q, create_graph=True)
    with pytest.raises(NotImplementedError, match="no double backward"):
        dq.sum().backward()
    with pytest.raises(NotImplementedError, match="no forward-mode"):
        torch.func.jvp(lambda x: tilewise.attention(x, k, v, backend=backend), (q.detach(),), (torch.ones_like(q),))


def test_an_allowed_tf32_is_the_only_way_to_get_one(cuda: None, backend: str) -> None:
    """PyTorch's setting may make fp32 coarser, to TF32's 1e-3 and no further; without it nothing does."""
    inputs = moved(Case(batch=1, heads=4, kv_heads=4, q_len=300, k_len=300, dim=64, v_dim=64).build())
    q, k, v = inputs["q"], inputs["k"], inputs["v"]
    exact = tilewise.attention(q.double(), k.double(), v.double(), backend="tiled")
    errors = []
    for allowed in (False, True):
        torch.backends.cuda.matmul.allow_tf32 = allowed
        try:
            o = tilewise.attention(q, k, v, backend=backend)
        finally:
            torch.backends.cuda.matmul.allow_tf32 = False
        errors.append(((o - exact).norm() / exact.norm()).item())
    assert errors[0] < 2e-6
    assert errors[0] <= errors[1] < 3e-3
