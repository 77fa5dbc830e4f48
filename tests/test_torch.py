"""Attention within PyTorch: torch.compile, fake tensors, autocast, checkpointing, the derivatives it does not have."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from cases import Case
from close import assert_close, evaluate
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils.checkpoint import checkpoint

import tilewise
from tilewise import Band, BlockMask, causal
from tilewise import autograd as ours

F16, BF16, F32, F64 = torch.float16, torch.bfloat16, torch.float32, torch.float64

# Every argument of the public functions, alone and together, dense and packed.
CASES = {
    "plain": Case(),
    "causal": Case(q_len=40, k_len=50, band=causal),
    "window, top-left": Case(q_len=40, k_len=50, band=Band(7, 3, "top_left")),
    "grouped heads": Case(heads=4, kv_heads=1, q_len=20, k_len=30, dim=8, v_dim=24),
    "boolean": Case(q_len=20, k_len=30, mask="bool", mask_dims="hqk", band=causal),
    "blocks": Case(q_len=140, k_len=150, mask="blocks", band=causal),
    "bias": Case(q_len=20, k_len=30, bias_dims="hk", dtype=BF16),
    "slopes and sink": Case(q_len=20, k_len=30, slopes="h", sink=F32, softcap=4.0, scale=0.3),
    "dropout": Case(q_len=20, k_len=30, dropout_p=0.3),
    "lengths": Case(batch=2, q_len=20, k_len=30, q_lens=(13, 20), k_lens=(30, 7), band=causal),
    "packed": Case(batch=3, q_len=60, k_len=60, cu_q=(0, 20, 25, 60), band=causal),
    "packed, everything": Case(batch=2, heads=4, q_len=50, k_len=60, cu_q=(0, 20, 45), cu_k=(0, 30, 60), band=causal,
        bias_dims="hqk",
                               slopes="h", sink=F32, softcap=4.0, dropout_p=0.2, q_lens=(20, 11), dtype=F64),
}  # fmt: skip
DIFFERENTIABLE = ("q", "k", "v", "bias", "alibi_slopes", "sink")


def arguments(case: Case) -> dict[str, Any]:
    """What the public function gets, differentiable tensors as leaves."""
    inputs = {name: x for name, x in case.build().items() if name not in ("do", "dlse", "frozen")}
    return {name: x.detach().requires_grad_() if name in DIFFERENTIABLE else x for name, x in inputs.items()}


def public(case: Case) -> Callable[..., Any]:
    return tilewise.attention if case.cu_q is None else tilewise.attention_packed


@pytest.fixture
def dynamo() -> Any:
    """torch._dynamo, its caches empty, before and after."""
    torch._dynamo.reset()
    yield torch._dynamo
    torch._dynamo.reset()


# ---- torch.compile ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", CASES)
def test_compiles_whole_forward_and_backward(name: str, dynamo: Any) -> None:
    """fullgraph=True, and the numbers are the eager ones, bit for bit."""
    case = CASES[name]

    def call(q: Tensor, k: Tensor, v: Tensor, **options: Any) -> tuple[Tensor, Tensor]:
        return public(case)(q, k, v, **options, return_lse=True)

    compiled = torch.compile(call, fullgraph=True, backend="aot_eager")
    inputs = case.build()
    got, eager = evaluate(compiled, **inputs), evaluate(call, **inputs)
    for result, x in got.items():
        assert torch.equal(x, eager[result]), result
    assert_close(got, **inputs)


def test_a_compiled_model_around_it(dynamo: Any) -> None:
    """Computation before and after is in the same graph; no gradient is asked of some inputs, and none of lse."""
    weight = torch.randn(8, 8, dtype=F64, requires_grad=True)

    def model(x: Tensor, bias: Tensor) -> Tensor:
        q, k, v = (x @ weight * s for s in (1.0, 2.0, 3.0))
        return (tilewise.attention(q, k, v, mask=causal, bias=bias).relu() + x).sum()

    x, bias = torch.randn(2, 3, 20, 8, dtype=F64), torch.randn(20, dtype=F64)
    loss = torch.compile(model, fullgraph=True, backend="aot_eager")(x, bias)
    (grad,) = torch.autograd.grad(loss, weight)
    torch.testing.assert_close(loss, model(x, bias))
    torch.testing.assert_close(grad, torch.autograd.grad(model(x, bias), weight)[0])
    with torch.no_grad():
        torch.testing.assert_close(torch.compile(model, fullgraph=True, backend="aot_eager")(x, bias), loss)


@pytest.mark.parametrize("packed", [False, True])
def test_ten_lengths_compile_at_most_twice(packed: bool, dynamo: Any) -> None:
    from torch._dynamo.testing import CompileCounterWithBackend

    counter = CompileCounterWithBackend("aot_eager")

    def dense(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return tilewise.attention(q, k, v, mask=causal, softcap=3.0)

    def ragged(q: Tensor, k: Tensor, v: Tensor, cu: Tensor) -> Tensor:
        return tilewise.attention_packed(q, k, v, cu, mask=causal)

    compiled = torch.compile(ragged if packed else dense, fullgraph=True, backend=counter)
    for n in (16, 17, 30, 33, 47, 64, 65, 100, 128, 200):
        shape = (n, 2, 8) if packed else (2, 2, n, 8)
        q, k, v = (torch.randn(shape, requires_grad=True) for _ in range(3))
        cu = (torch.tensor([0, n // 3, n], dtype=torch.int32),) if packed else ()
        o = compiled(q, k, v, *cu)
        expected = (ragged if packed else dense)(q, k, v, *cu)
        assert torch.equal(o, expected)
        for x, y in zip(
            torch.autograd.grad(o.sum(), (q, k, v)), torch.autograd.grad(expected.sum(), (q, k, v)), strict=True
        ):
            assert torch.equal(x, y)
    assert counter.frame_count <= 2


def test_a_compiled_call_draws_new_dropout_each_time(dynamo: Any) -> None:
    q, v = torch.zeros(1, 1, 64, 8), torch.eye(64)[None, None]

    def call() -> Tensor:
        return tilewise.attention(q, q, v, dropout_p=0.5)

    compiled = torch.compile(call, fullgraph=True, backend="aot_eager")
    first, second = compiled(), compiled()
    assert not torch.equal(first, second)
    torch.manual_seed(3)
    third = compiled()
    torch.manual_seed(3)
    assert torch.equal(third, compiled())


def test_bad_input_is_an_error_under_compile(dynamo: Any) -> None:
    compiled = torch.compile(tilewise.attention, fullgraph=True, backend="aot_eager")
    q = torch.randn(1, 2, 5, 8)
    with pytest.raises(Exception, match="head sizes"):
        compiled(q, torch.randn(1, 2, 5, 9), q)


# ---- the ops, fake tensors, the meta device --------------------------------------------------------------------------


@pytest.mark.parametrize("name", CASES)
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
    case = CASES[name]
    inputs = arguments(case)
    every = dict.fromkeys(
        ("mask", "bias", "alibi_slopes", "sink", "scale", "seed", "q_lens", "k_lens", "cu_seqlens_q", "cu_seqlens_k")
    )
    every |= {"softcap": 0.0, "dropout_p": 0.0, "deterministic": None, "backend": None}
    o, lse = ours.attend_traced(**(every | inputs))
    (o.sum() + lse[lse > -torch.inf].sum()).backward()
    monkeypatch.undo()  # opcheck calls the ops, too
    torch.library.opcheck(forward, calls["forward"])
    torch.library.opcheck(backward, tuple(x.detach() if isinstance(x, Tensor) else x for x in calls["backward"]))


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("where", ["fake", "meta"])
def test_shapes_without_data(name: str, where: str) -> None:
    """Fake and meta tensors give what real ones do: shape, dtype, strides, device."""
    case = CASES[name]
    inputs = arguments(case)
    real = public(case)(**inputs, return_lse=True)
    mode = FakeTensorMode()

    def without_data(x: Any) -> Any:
        if isinstance(x, Tensor):
            return mode.from_tensor(x) if where == "fake" else x.to("meta")
        if isinstance(x, BlockMask):
            return BlockMask.from_tensors(x.q_len, x.k_len, [without_data(t) for t in x.tensors()])
        if isinstance(x, tilewise.Masked):
            return tilewise.Masked(x.band, without_data(x.mask))
        return x

    fakes = {key: without_data(x) for key, x in inputs.items()}
    with mode if where == "fake" else torch.no_grad():
        got = public(case)(**fakes, return_lse=True)
    for x, y in zip(got, real, strict=True):
        assert (x.shape, x.dtype, x.stride()) == (y.shape, y.dtype, y.stride())
        assert x.device.type == ("meta" if where == "meta" else "cpu")


def test_a_meta_model_can_be_trained_on_paper() -> None:
    q = torch.randn(1, 2, 10**6, 64, device="meta", requires_grad=True)
    o = tilewise.attention(q, q, q, mask=causal)
    o.sum().backward()
    assert q.grad is not None
    assert q.grad.shape == q.shape
    assert q.grad.is_meta


# ---- autocast, checkpointing, determinism ----------------------------------------------------------------------------


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("dtype", [BF16, F16])
def test_autocast_computes_in_its_dtype(dtype: torch.dtype, compiled: bool, dynamo: Any) -> None:
    q, k, v = (torch.randn(1, 2, 20, 8, requires_grad=True) for _ in range(3))
    bias = torch.randn(20, 20, requires_grad=True)

    def call() -> Tensor:
        return tilewise.attention(q, k, v, bias=bias, mask=causal)

    with torch.autocast("cpu", dtype=dtype):
        o = (torch.compile(call, fullgraph=True, backend="aot_eager") if compiled else call)()
    expected = tilewise.attention(q.to(dtype), k.to(dtype), v.to(dtype), bias=bias, mask=causal)
    assert o.dtype == dtype
    assert torch.equal(o, expected)
    o.float().sum().backward()
    assert q.grad.dtype == F32
    assert bias.grad.dtype == F32
    with torch.autocast("cpu", dtype=dtype):  # fp64 is left alone, as autocast leaves it
        assert tilewise.attention(q.double(), k.double(), v.double()).dtype == F64
        mixed = tilewise.attention(q.to(dtype), k, v)
    assert mixed.dtype == dtype
    with pytest.raises(TypeError, match="one dtype"):
        tilewise.attention(q.to(dtype), k, v)


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpointing_drops_the_same_pairs_in_the_recompute(reentrant: bool) -> None:
    q, k, v = (torch.randn(1, 2, 40, 8, dtype=F64, requires_grad=True) for _ in range(3))

    def call(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return tilewise.attention(q, k, v, dropout_p=0.5).square()

    torch.manual_seed(5)
    expected = torch.autograd.grad(call(q, k, v).sum(), (q, k, v))
    torch.manual_seed(5)
    checkpoint(call, q, k, v, use_reentrant=reentrant).sum().backward()
    for x, grad in zip((q, k, v), expected, strict=True):
        assert torch.equal(x.grad, grad)
    torch.manual_seed(6)
    assert not torch.equal(torch.autograd.grad(call(q, k, v).sum(), q)[0], expected[0])


def test_deterministic_algorithms_are_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """PyTorch's global switch reaches the Problem, an argument overrides it, and nothing non-deterministic is used."""
    seen: list[bool] = []
    of = tilewise.Problem.of_call

    def spy(*args: Any, **options: Any) -> Any:
        result = of(*args, **options)
        seen.append(result[0].deterministic)
        return result

    monkeypatch.setattr(tilewise.Problem, "of_call", spy)
    case = Case(
        batch=2,
        heads=4,
        q_len=150,
        k_len=170,
        bias_dims="hk",
        slopes="h",
        sink=F32,
        mask="blocks",
        band=causal,
        dropout_p=0.1,
    )
    torch.use_deterministic_algorithms(True)
    try:
        first, second = case.run(None), case.run(None)
        inputs = case.build()
        tilewise.attention(inputs["q"], inputs["k"], inputs["v"], deterministic=False)
    finally:
        torch.use_deterministic_algorithms(False)
    case.run(None)
    assert seen == [True, True, False, False]
    for name, x in first.items():
        assert torch.equal(x, second[name]), name


# ---- the derivatives that there are not ------------------------------------------------------------------------------

TWICE, FORWARD, VMAP = "no double backward", "no forward-mode derivative", "no vmap"


def qkv(*shape: int) -> list[Tensor]:
    return [torch.randn(shape or (1, 2, 6, 8), dtype=F64) for _ in range(3)]


@pytest.mark.parametrize("through", ["o", "lse"])
def test_double_backward_is_refused(through: str) -> None:
    q, k, v = (x.requires_grad_() for x in qkv())
    o, lse = tilewise.attention(q, k, v, return_lse=True)
    (dq,) = torch.autograd.grad((o if through == "o" else lse).square().sum(), q, create_graph=True)
    with pytest.raises(NotImplementedError, match=TWICE):
        dq.sum().backward()


def test_double_backward_is_refused_under_compile(dynamo: Any) -> None:
    q, k, v = (x.requires_grad_() for x in qkv())
    o = torch.compile(tilewise.attention, fullgraph=True, backend="aot_eager")(q, k, v)
    with pytest.raises(RuntimeError, match=r"double backward|does not support|create_graph"):
        torch.autograd.grad(torch.autograd.grad(o.square().sum(), q, create_graph=True)[0].sum(), q)


def test_create_graph_alone_is_no_fault() -> None:
    """The first derivative is right with create_graph, too: others need it."""
    q, k, v = (x.requires_grad_() for x in qkv())
    o = tilewise.attention(q, k, v)
    expected = torch.autograd.grad(o.sum(), q, retain_graph=True)[0]
    assert torch.equal(torch.autograd.grad(o.sum(), q, create_graph=True)[0].detach(), expected)


def test_gradients_of_a_gradient_penalty_do_not_vanish_silently() -> None:
    """Through do: the gradient of q's gradient with respect to what came after attention."""
    q, k, v = (x.requires_grad_() for x in qkv())
    weight = torch.randn(8, dtype=F64, requires_grad=True)
    (dq,) = torch.autograd.grad((tilewise.attention(q, k, v) * weight).sum(), q, create_graph=True)
    with pytest.raises(NotImplementedError, match=TWICE):
        torch.autograd.grad(dq.square().sum(), weight)


@pytest.mark.parametrize("which", [0, 1, 2])
def test_jvp_is_refused(which: int) -> None:
    inputs = qkv()

    def call(x: Tensor) -> Tensor:
        return tilewise.attention(*inputs[:which], x, *inputs[which + 1 :])

    with pytest.raises(NotImplementedError, match=FORWARD):
        torch.func.jvp(call, (inputs[which],), (torch.ones_like(inputs[which]),))
    with pytest.raises(NotImplementedError, match=FORWARD), torch.autograd.forward_ad.dual_level():
        call(torch.autograd.forward_ad.make_dual(inputs[which], torch.ones_like(inputs[which])))


@pytest.mark.parametrize("name", ["bias", "alibi_slopes", "sink"])
def test_jvp_of_the_optional_tensors_is_refused(name: str) -> None:
    value = torch.randn({"bias": (6, 6)}.get(name, (2,)), dtype=F64)
    with pytest.raises(NotImplementedError, match=FORWARD):
        torch.func.jvp(lambda x: tilewise.attention(*qkv(), **{name: x}), (value,), (torch.ones_like(value),))
    with pytest.raises(NotImplementedError, match=FORWARD), torch.autograd.forward_ad.dual_level():
        tilewise.attention(*qkv(), **{name: torch.autograd.forward_ad.make_dual(value, torch.ones_like(value))})


def test_inside_a_dual_level_without_tangents_it_works() -> None:
    q, k, v = qkv()
    with torch.autograd.forward_ad.dual_level():
        o = tilewise.attention(q, k, v)
    assert torch.equal(o, tilewise.attention(q, k, v))


def test_vmap_is_refused() -> None:
    q, k, v = qkv(3, 1, 2, 6, 8)
    with pytest.raises(NotImplementedError, match=VMAP):
        torch.vmap(tilewise.attention)(q, k, v)
    with pytest.raises(NotImplementedError, match=VMAP):
        torch.vmap(lambda k: tilewise.attention(q[0], k, v[0]))(k)
    with pytest.raises(NotImplementedError, match=f"{VMAP}|{FORWARD}"):
        torch.func.jacfwd(lambda q: tilewise.attention(q, k[0], v[0]))(q[0])


@pytest.mark.parametrize("transform", ["grad", "vjp"])
def test_func_grad_is_right(transform: str) -> None:
    q, k, v = qkv()

    def loss(q: Tensor) -> Tensor:
        return tilewise.attention(q, k, v, mask=causal).square().sum()

    if transform == "grad":
        got = torch.func.grad(loss)(q)
    else:
        _, pull = torch.func.vjp(loss, q)
        (got,) = pull(torch.ones((), dtype=F64))
    q.requires_grad_()
    assert torch.equal(got, torch.autograd.grad(loss(q), q)[0])


def test_a_second_func_grad_is_refused() -> None:
    q, k, v = qkv()

    def norm(q: Tensor) -> Tensor:
        return torch.func.grad(lambda x: tilewise.attention(x, k, v).square().sum())(q).square().sum()

    with pytest.raises(NotImplementedError, match=f"{TWICE}|{FORWARD}"):
        torch.func.grad(norm)(q)


def test_hessian_vector_products_are_refused() -> None:
    q, k, v = qkv()

    def loss(q: Tensor) -> Tensor:
        return tilewise.attention(q, k, v).square().sum()

    with pytest.raises(NotImplementedError):
        torch.func.jvp(torch.func.grad(loss), (q,), (torch.ones_like(q),))
    with pytest.raises(NotImplementedError):
        torch.autograd.functional.hvp(loss, q, torch.ones_like(q))


# ---- what else modules do --------------------------------------------------------------------------------------------


def test_no_grad_and_inference_mode() -> None:
    q, k, v = (x.requires_grad_() for x in qkv())
    expected = tilewise.attention(q, k, v)
    assert expected.requires_grad
    for mode in (torch.no_grad, torch.inference_mode):
        with mode():
            o = tilewise.attention(q, k, v)
        assert not o.requires_grad
        assert torch.equal(o, expected)


def test_only_what_is_asked_for_is_differentiated() -> None:
    q, k, v = qkv()
    bias = torch.randn(6, 6, dtype=F64, requires_grad=True)
    o = tilewise.attention(q, k, v, bias=bias)
    (dbias,) = torch.autograd.grad(o.sum(), bias, retain_graph=True)
    assert dbias.shape == bias.shape
    o.backward(torch.ones_like(o))
    assert q.grad is None
    assert k.grad is None
    assert v.grad is None


def test_backward_twice_over_a_retained_graph() -> None:
    q, k, v = (x.requires_grad_() for x in qkv())
    o = tilewise.attention(q, k, v)
    first = torch.autograd.grad(o.sum(), (q, k, v), retain_graph=True)
    second = torch.autograd.grad(o.sum(), (q, k, v))
    for x, y in zip(first, second, strict=True):
        assert torch.equal(x, y)
    with pytest.raises(RuntimeError, match="second time"):
        torch.autograd.grad(o.sum(), (q, k, v))


def test_an_input_that_was_changed_in_place_is_noticed() -> None:
    q, k, v = qkv()
    q.requires_grad_()
    o = tilewise.attention(q, k, v)
    k.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        o.sum().backward()


def test_one_tensor_as_q_k_and_v() -> None:
    x = torch.randn(1, 2, 9, 8, dtype=F64, requires_grad=True)
    q, k, v = (x.detach().clone().requires_grad_() for _ in range(3))
    (grad,) = torch.autograd.grad(tilewise.attention(x, x, x).square().sum(), x)
    parts = torch.autograd.grad(tilewise.attention(q, k, v).square().sum(), (q, k, v))
    torch.testing.assert_close(grad, sum(parts))


def test_calls_from_several_threads_do_not_disturb_each_other() -> None:
    from concurrent.futures import ThreadPoolExecutor

    inputs = [qkv(1, 2, 100, 16) for _ in range(8)]
    expected = [tilewise.attention(*x, mask=causal, dropout_p=0.2, seed=1) for x in inputs]
    with ThreadPoolExecutor(4) as pool:
        got = list(pool.map(lambda x: tilewise.attention(*x, mask=causal, dropout_p=0.2, seed=1), inputs))
    for x, y in zip(got, expected, strict=True):
        assert torch.equal(x, y)
