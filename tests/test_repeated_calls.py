"""What is kept from call to call: the same call again is found, any other is made as if nothing had been kept."""

from __future__ import annotations

import importlib.util
import math
import os
import pickle
import re
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses import FakeTensorMode

import tilewise
from tilewise import problem as module
from tilewise.layout import by_token, strides_of
from tilewise.problem import Aux, Problem

F16, F32 = torch.float16, torch.float32


@pytest.fixture(autouse=True)
def nothing_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_validated", {})


def qkv(
    batch: int = 2, heads: int = 4, kv: int = 2, q: int = 8, k: int = 16, d: int = 8, dv: int = 8, **made: Any
) -> Any:
    return [torch.zeros(shape, **made) for shape in ((batch, heads, q, d), (batch, kv, k, d), (batch, kv, k, dv))]


@pytest.fixture
def deterministic() -> Iterator[Callable[[], None]]:
    yield lambda: torch.use_deterministic_algorithms(True)
    torch.use_deterministic_algorithms(False)


# ---- Problem.of ------------------------------------------------------------------------------------------------------

TENSORS = {
    **{name: {name: 1} for name in ("batch", "heads", "kv", "q", "k", "d", "dv")},
    "dtype": {"dtype": F16}, "requires_grad": {"requires_grad": True}, "heads 2": {"heads": 2},
}  # fmt: skip
OPTIONS = {
    "mask": {"mask": tilewise.causal}, "window": {"mask": tilewise.sliding_window(3)}, "scale": {"scale": 1},
    "negative scale": {"scale": -1.0}, "softcap": {"softcap": 5}, "dropout": {"dropout_p": 0.5, "seed": 3},
    "deterministic": {"deterministic": True},
}  # fmt: skip


@pytest.mark.parametrize("name", [*TENSORS, *OPTIONS])
def test_another_call_gives_another_problem(name: str) -> None:
    if name == "heads":
        tensors: dict[str, Any] = {"heads": 6}
    else:
        tensors = TENSORS.get(name, {})
        tensors = tensors | ({"heads": 4, "kv": 4} if name == "kv" else {})
    options: dict[str, Any] = OPTIONS.get(name, {})
    plain, _ = Problem.of(*qkv())
    assert Problem.of(*qkv())[0] is plain
    other, _ = Problem.of(*qkv(**tensors), **options)
    assert other != plain
    again, aux = Problem.of(*qkv(**tensors), **options)
    assert again is other
    assert (aux.seed is not None) == (name == "dropout")
    module._validated.clear()
    fresh, _ = Problem.of(*qkv(**tensors), **options)
    assert fresh is not other
    assert fresh == other
    assert hash(fresh) == hash(other)


def test_whether_gradients_are_wanted_is_looked_at_each_time() -> None:
    q, k, v = qkv()
    sink = torch.zeros(4)
    for wanted in (None, q, None, v, sink, None, k):
        for x in (q, k, v, sink):
            x.requires_grad_(x is wanted)
        for options in ({}, {"sink": sink}):
            o = tilewise.attention(q, k, v, **options)
            asked = wanted is not None and (wanted is not sink or bool(options))
            assert o.requires_grad == asked
            if asked:
                (grad,) = torch.autograd.grad(o.sum(), wanted)
                assert grad.shape == wanted.shape


def test_tensors_that_leaked_from_a_transform_are_as_others() -> None:
    leaked: list[Tensor] = []

    def leak(x: Tensor) -> Tensor:
        leaked.append(x * 2)
        return x.sum()

    x, w = torch.randn(2, 1, 2, 6, 8)
    torch.func.grad(leak)(x)
    w.requires_grad_()
    expected = tilewise.attention(w, x * 2, x * 2)
    o = tilewise.attention(w, leaked[0], leaked[0])
    assert torch.equal(o, expected)
    (grad,), (other,) = (torch.autograd.grad(each.square().sum(), w) for each in (o, expected))
    assert torch.equal(grad, other)
    sink = torch.zeros(2)
    torch.func.grad(lambda s: (leaked.append(s + 1), s.sum())[1])(sink)
    o = tilewise.attention(w, x, x, sink=leaked[1])
    assert torch.equal(o, tilewise.attention(w, x, x, sink=sink + 1))


def test_meta_tensors_are_not_taken_for_others_of_their_shape() -> None:
    for device in ("meta", "cpu", "meta"):
        tensors = qkv(device=device)
        Problem.of(*tensors)
        assert tilewise.attention(*tensors).device.type == device
        assert tilewise.attention(*map(torch.nn.Parameter, tensors)).device.type == device


def test_the_modes_of_torch_are_looked_at(deterministic: Callable[[], None]) -> None:
    tensors = qkv(requires_grad=True)
    assert Problem.of(*tensors)[0].needs_grad
    with torch.no_grad():
        assert not Problem.of(*tensors)[0].needs_grad
    assert Problem.of(*tensors)[0].needs_grad
    deterministic()
    assert Problem.of(*tensors)[0].deterministic
    assert not Problem.of(*tensors, deterministic=False)[0].deterministic


@pytest.mark.parametrize(
    ("right", "wrong"),
    [
        ({"scale": 1}, {"scale": True}), ({"softcap": 0}, {"softcap": False}),
        ({"dropout_p": 0.0}, {"dropout_p": False}), ({"deterministic": True}, {"deterministic": 1}),
        ({}, {"scale": [1.0]}), ({}, {"mask": "causal"}),
    ],
)  # fmt: skip
def test_what_equals_a_right_call_is_still_refused(right: dict[str, Any], wrong: dict[str, Any]) -> None:
    Problem.of(*qkv(), **right)
    with pytest.raises(TypeError, match=re.escape(f"{next(iter(wrong))} is ")):
        Problem.of(*qkv(), **wrong)


def test_optional_tensors_are_looked_at_each_time() -> None:
    q, k, v = qkv()
    for lens in (torch.tensor([3, 16], dtype=torch.int32), None):
        Problem.of(q, k, v, k_lens=lens)
    with pytest.raises(ValueError, match=r"k_lens\[1\] is 17"):
        Problem.of(q, k, v, k_lens=torch.tensor([3, 17], dtype=torch.int32))
    bias = torch.zeros(8, 16)
    assert Problem.of(q, k, v, bias=bias)[1].bias is not None
    assert Problem.of(q, k, v)[1] == Aux()
    assert len(module._validated) == 1


def test_each_call_draws_its_own_seed() -> None:
    q, k, v = qkv()
    seeds = {int(Problem.of(q, k, v, dropout_p=0.5)[1].seed) for _ in range(3)}  # type: ignore[arg-type]
    assert len(seeds) == 3
    assert int(Problem.of(q, k, v, dropout_p=0.5, seed=-1)[1].seed) == -1  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=r"seed is 0\.5"):
        Problem.of(q, k, v, dropout_p=0.5, seed=0.5)  # type: ignore[arg-type]


def test_fake_tensors_and_subclasses_are_not_kept() -> None:
    class Own(Tensor):
        pass

    Problem.of(*(x.as_subclass(Own) for x in qkv()))
    with FakeTensorMode():
        Problem.of(*qkv())
    assert not module._validated


def test_lengths_that_are_symbols_are_not_kept() -> None:
    """Within functionalize a fake tensor is a plain torch.Tensor whose lengths are symbols."""
    seen = []

    def body(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        Problem.of(q, k, v)
        seen.append((type(q), type(q.shape[2])))
        return q

    tensors = qkv()
    torch.fx.experimental.proxy_tensor.make_fx(torch.func.functionalize(body), tracing_mode="symbolic")(*tensors)
    assert seen == [(Tensor, torch.SymInt)]
    assert not module._validated


def test_it_does_not_grow_without_bound() -> None:
    for q_len in range(module.MOST_VALIDATED + 3):
        Problem.of(*qkv(1, 1, 1, q_len, 1, 1, 1))
        assert 0 < len(module._validated) <= module.MOST_VALIDATED


def test_a_hash_is_of_one_process() -> None:
    """Strings and dtypes hash otherwise in another: a pickle must not carry the hash along."""
    problem, _ = Problem.of(*qkv())
    hash(problem)
    other = pickle.loads(pickle.dumps(problem))
    assert not hasattr(other, "_hash")
    assert other == problem
    assert hash(replace(problem, q_len=9)) != hash(problem)


# ---- the Triton backend's launches -----------------------------------------------------------------------------------

needs_triton = pytest.mark.skipif(
    importlib.util.find_spec("triton") is None or os.environ.get("TRITON_INTERPRET") == "1", reason="needs Triton"
)


def kept() -> list[Any]:
    from tilewise.kernels.triton import host

    return [each for each in vars(host).values() if callable(getattr(each, "cache_clear", None))]


def launches(
    shift: int = 0, dtype: torch.dtype = F16, dlse: bool = False, origin: Any = None, **options: Any
) -> list[Any]:
    """(kernel, grid, numbers, options, warps, stages) of each launch of a forward and backward on a GPU."""
    from tilewise.kernels.launch import recording
    from tilewise.kernels.triton import host

    q, k, v = (torch.zeros(2, 2, 40, 16 + shift, dtype=dtype, requires_grad=True)[..., :16] for _ in range(3))
    problem, aux = Problem.of(q, k, v, origin=origin, **options)
    problem = replace(problem, device="sm90")
    with recording() as made, torch.no_grad():
        o, lse = host.forward(problem, q, k, v, aux)
        host.backward(problem, torch.zeros_like(o), torch.zeros_like(lse) if dlse else None, q, k, v, o, lse, aux)
    return [
        (
            each.kernel, each.grid, [x for x in each.args if isinstance(x, int | float)], each.constexprs, each.warps,
            each.stages,
        )
        for each in made
    ]  # fmt: skip


@needs_triton
@pytest.mark.parametrize(
    "other",
    [
        {"shift": 8}, {"dtype": F32}, {"dlse": True}, {"origin": (1, 2, 0, 16)}, {"origin": (0, 0, 3, 0)},
        {"mask": tilewise.causal}, {"bias": torch.zeros(40, 40)}, {"bias": torch.zeros(40, 80)[:, ::2]},
        {"bias": torch.zeros(2, 2, 40, 40, requires_grad=True)}, {"bias": torch.zeros(40, 40, requires_grad=True)},
        {"alibi_slopes": torch.zeros(2, 2)}, {"sink": torch.zeros(2)}, {"mask": torch.ones(40, 40, dtype=torch.bool)},
        {"scale": 2.0}, {"softcap": 2.0}, {"dropout_p": 0.5, "seed": 1},
    ],
    ids=lambda other: "-".join(other),
)  # fmt: skip
def test_another_call_makes_another_launch(other: dict[str, Any]) -> None:
    plain = launches()
    assert launches() == plain
    changed = launches(**other)
    assert changed != plain
    for each in kept():
        each.cache_clear()
    assert launches(**other) == changed
    assert launches() == plain


@needs_triton
def test_rows_that_do_not_begin_at_16_bytes_are_launched_as_a_copy() -> None:
    assert launches(shift=1) == launches()


@needs_triton
def test_the_setting_for_fp32_products_is_looked_at() -> None:
    seen = []
    for allowed in (False, True, False):
        torch.backends.cuda.matmul.allow_tf32 = allowed
        seen.append({each[3]["O"].PRECISION for each in launches(dtype=F32)})
        assert {each[3]["O"].PRECISION for each in launches(dtype=F16)} == {"tf32"}
    assert seen == [{"bf16x6"}, {"tf32"}, {"bf16x6"}]


@needs_triton
def test_launches_are_kept_within_bounds() -> None:
    assert len(kept()) == 2
    for each in kept():
        assert 0 < each.cache_parameters()["maxsize"] <= 1024
    before = [each.cache_info().misses for each in kept()]
    launches(scale=3.0)
    once = [each.cache_info().misses for each in kept()]
    launches(scale=3.0)
    assert [each.cache_info().misses for each in kept()] == once != before


@needs_triton
@pytest.mark.parametrize("which", ["q", "k", "v", "do", "dlse"])
@pytest.mark.parametrize("other", ["misaligned", "transposed", "expanded"])
def test_the_same_problem_with_other_strides_is_launched_with_them(which: str, other: str) -> None:
    """And a misaligned tensor, whose strides are the same, as an aligned copy."""
    from tilewise.kernels.launch import recording
    from tilewise.kernels.triton import host

    shape = (2, 2, 40) if which == "dlse" else (2, 2, 40, 16)
    changed = {
        "misaligned": torch.zeros(2 * 2 * 40 * 16 + 1)[1:][: math.prod(shape)].view(shape),
        "transposed": torch.zeros(2, 40, 2, *shape[3:]).transpose(1, 2),
        "expanded": torch.zeros(()).expand(shape),
    }[other]

    def made(change: bool) -> tuple[list[Any], Tensor]:
        tensors = {name: torch.zeros(2, 2, 40, 16) for name in ("q", "k", "v", "do")} | {"dlse": torch.zeros(2, 2, 40)}
        if change:
            tensors[which] = changed
        q, k, v, do, dlse = tensors.values()
        problem, aux = Problem.of(q, k, v)
        problem = replace(problem, device="sm90", needs_grad=True)
        with recording() as launched:
            o, lse = host.forward(problem, q, k, v, aux)
            grads = host.backward(problem, do, dlse, q, k, v, o, lse, aux)
        assert lse.is_contiguous()
        for x, like in zip((o, *grads[:3]), (q, q, k, v), strict=True):
            assert x.stride() == strides_of(x.shape, by_token(like.shape, like.stride()))
        assert [x.shape for x in grads[:3]] == [q.shape, k.shape, v.shape]
        for each in launched:
            for x in each.args:
                if isinstance(x, Tensor) and x.dim() == 4:
                    assert x.stride(-1) == 1
                    assert x.data_ptr() % 16 == 0
        return [
            (each.kernel, [x for x in each.args if isinstance(x, int | float)], each.constexprs) for each in launched
        ], tensors[which]

    plain, _ = made(False)
    first, _ = made(True)
    assert made(False)[0] == plain
    for each in kept():
        each.cache_clear()
    assert made(True)[0] == first
    copied = other == "misaligned" or (other == "expanded" and which != "dlse")
    assert (first == plain) == copied


@needs_triton
@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("lengths", [(40, 24), (0, 24), (40, 0)])
def test_new_memory_has_its_tensors_shape(packed: bool, lengths: tuple[int, int]) -> None:
    from tilewise.kernels.launch import recording
    from tilewise.kernels.triton import host

    (q_len, k_len), cu = lengths, {}
    q, k, v = torch.zeros(2, 4, q_len, 16), torch.zeros(2, 2, k_len, 16), torch.zeros(2, 2, k_len, 8)
    if packed:
        q, k, v = (x[0].transpose(0, 1) for x in (q, k, v))
        cu = {f"cu_seqlens_{x}": torch.tensor([0, n], dtype=torch.int32) for x, n in (("q", q_len), ("k", k_len))}
    problem, aux = Problem.of(q, k, v, **cu)
    problem = replace(problem, device="sm90", needs_grad=True)
    with recording():
        o, lse = host.forward(problem, q, k, v, aux)
        grads = host.backward(problem, torch.zeros_like(o), None, q, k, v, o, lse, aux)
    assert (o.shape, lse.shape) == (problem.o_shape, problem.lse_shape)
    assert [x.shape for x in grads[:3]] == [q.shape, k.shape, v.shape]
    assert all(x.is_contiguous() and x.device == q.device for x in (o, lse, *grads[:3]))
    assert [x.dtype for x in (o, lse, *grads[:3])] == [F32] * 5
    assert all(not x.any() for x in grads[:3]) or 0 not in lengths


@needs_triton
def test_new_memory_is_on_the_tensors_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """The allocator's own function takes no device: it is asked only where x's is the current one."""
    from types import SimpleNamespace

    from tilewise.kernels.triton import host

    monkeypatch.setattr(torch._C, "_cuda_getDevice", lambda: 1, raising=False)
    direct = torch._C._dynamo.guards._empty_strided_cuda

    def on(device: int, is_cuda: bool = True) -> Any:
        return SimpleNamespace(is_cuda=is_cuda, get_device=lambda: device, device=torch.device("cpu"))

    assert host.empty_strided(on(1)) is direct
    for other in (on(0), on(1, is_cuda=False)):
        assert host.empty_strided(other) is not direct
        x = host.empty_strided(other)((2, 3), (1, 2), F16)
        assert (x.shape, x.stride(), x.dtype) == ((2, 3), (1, 2), F16)


@needs_triton
def test_dtypes_that_no_problem_tells_reach_the_launch() -> None:
    """The Problem is the same for sinks of any dtype, a binary is not: see test_triton_launch for its key."""
    from tilewise.kernels.launch import recording
    from tilewise.kernels.triton import host

    q, k, v = qkv(kv=4, k=8, dtype=F16)
    for dtype in (F32, F16, F32):
        problem, aux = Problem.of(q, k, v, sink=torch.zeros(4, dtype=dtype))
        with recording() as made:
            host.forward(replace(problem, device="sm90"), q, k, v, aux)
        assert made[0].args[2] is aux.sink


@needs_triton
def test_whether_the_interpreter_is_on_is_looked_at_each_time(monkeypatch: pytest.MonkeyPatch) -> None:
    from tilewise.kernels.triton import backend

    problem, _ = Problem.of(*qkv())
    for _ in range(2):
        assert "needs a GPU" in str(backend.why_not(problem))
        with monkeypatch.context() as patch:
            patch.setenv("TRITON_INTERPRET", "1")
            assert backend.why_not(problem) is None
