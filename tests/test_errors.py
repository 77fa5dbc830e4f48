"""Bad input: one ValueError or TypeError with the argument, what it was and what is allowed, before anything runs."""

from __future__ import annotations

import inspect
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from torch import Tensor

import tilewise
from tilewise import Band, BlockMask, causal
from tilewise.algorithm import tiled
from tilewise.problem import _checked

F16, F32, F64 = torch.float16, torch.float32, torch.float64


def ints(*values: int, dtype: torch.dtype = torch.int32, device: str = "cpu") -> Tensor:
    return torch.tensor(values, dtype=dtype, device=device)


def ones(*shape: int, dtype: torch.dtype = F32, device: str = "cpu") -> Tensor:
    return torch.ones(shape, dtype=dtype, device=device)


def dense() -> dict[str, Any]:
    return {"q": ones(2, 4, 5, 8), "k": ones(2, 2, 7, 8), "v": ones(2, 2, 7, 6)}


def packed() -> dict[str, Any]:
    return {
        "q": ones(9, 4, 8),
        "k": ones(11, 2, 8),
        "v": ones(11, 2, 6),
        "cu_seqlens_q": ints(0, 4, 9),
        "cu_seqlens_k": ints(0, 6, 11),
    }


def call(**arguments: Any) -> Any:
    return (tilewise.attention_packed if "cu_seqlens_q" in arguments else tilewise.attention)(**arguments)


# (argument, value) -> exception, what it was, what is allowed. In both layouts unless the shapes say otherwise.
OPTIONS: list[tuple[str, Any, type[Exception], str, str]] = [
    ("bias", 3.0, TypeError, "3.0 (float)", "torch.Tensor"),
    ("bias", ones(1, dtype=torch.int64), TypeError, "torch.int64", "floating-point"),
    ("bias", ones(1, dtype=torch.bool), TypeError, "torch.bool", "mask="),
    ("bias", ones(1, dtype=torch.complex64), TypeError, "torch.complex64", "floating-point"),
    ("bias", ones(1, 3, 1, 1), ValueError, "(1, 3, 1, 1)", "broadcastable to (B, Hq, Sq, Sk) = (2, 4,"),
    ("bias", ones(3, 1, 1, 1), ValueError, "(3, 1, 1, 1)", "broadcastable"),
    ("bias", ones(1, 2, 1, 1), ValueError, "(1, 2, 1, 1)", "broadcastable"),  # kv heads are not heads
    ("bias", ones(1, 2, 4, 5, 7), ValueError, "(1, 2, 4, 5, 7)", "broadcastable"),
    ("bias", ones(1, device="meta"), ValueError, "meta", "one device"),
    ("mask", "causal", TypeError, "'causal' (str)", "Band"),
    ("mask", True, TypeError, "True (bool)", "Band"),
    ("mask", ones(1), TypeError, "torch.float32", "torch.bool"),
    ("mask", ones(1, dtype=torch.uint8), TypeError, "torch.uint8", "torch.bool"),
    ("mask", ones(1, 3, 1, 1, dtype=torch.bool), ValueError, "(1, 3, 1, 1)", "broadcastable"),
    ("mask", causal & ones(1, 3, 1, 1, dtype=torch.bool), ValueError, "(1, 3, 1, 1)", "broadcastable"),
    ("mask", ones(1, dtype=torch.bool, device="meta"), ValueError, "meta", "one device"),
    ("mask", BlockMask.from_dense(ones(3, 1, 5, 7, dtype=torch.bool)), ValueError, "batch 3", "1 or the call's"),
    ("mask", BlockMask.from_dense(ones(1, 2, 5, 7, dtype=torch.bool)), ValueError, "2 heads", "1 or the call's"),
    ("alibi_slopes", 0.5, TypeError, "0.5 (float)", "torch.Tensor"),
    ("alibi_slopes", ones(4, dtype=torch.int32), TypeError, "torch.int32", "floating-point"),
    ("alibi_slopes", ones(2), ValueError, "(2)", "(4,) or (2, 4)"),
    ("alibi_slopes", ones(1, 4), ValueError, "(1, 4)", "(4,) or (2, 4)"),
    ("alibi_slopes", ones(4, device="meta"), ValueError, "meta", "one device"),
    ("sink", [0.0] * 4, TypeError, "(list)", "torch.Tensor"),
    ("sink", ones(4, dtype=torch.bool), TypeError, "torch.bool", "floating-point"),
    ("sink", ones(2, 4), ValueError, "(2, 4)", "(4,)"),
    ("sink", ones(), ValueError, "()", "(4,)"),
    ("sink", ones(4, device="meta"), ValueError, "meta", "one device"),
    ("scale", "1", TypeError, "'1' (str)", "number"),
    ("scale", ones(), TypeError, "(Tensor)", "number"),
    ("scale", True, TypeError, "True (bool)", "number"),
    ("scale", float("nan"), ValueError, "nan", "finite"),
    ("scale", float("inf"), ValueError, "inf", "finite"),
    ("softcap", -1.0, ValueError, "-1.0", "0 (off) or positive"),
    ("softcap", None, TypeError, "None (NoneType)", "number"),
    ("softcap", float("nan"), ValueError, "nan", "finite"),
    ("dropout_p", -0.1, ValueError, "-0.1", "[0, 1]"),
    ("dropout_p", 1.5, ValueError, "1.5", "[0, 1]"),
    ("dropout_p", float("nan"), ValueError, "nan", "finite"),
    ("dropout_p", None, TypeError, "None (NoneType)", "number"),
    ("q_lens", [5, 5], TypeError, "[5, 5] (list)", "torch.Tensor"),
    ("q_lens", ints(4, 4, dtype=torch.int64), TypeError, "torch.int64", "torch.int32"),
    ("q_lens", ints(4), ValueError, "(1)", "(2,)"),
    ("q_lens", ints(4, 4, device="meta"), ValueError, "meta", "one device"),
    ("k_lens", ints(5, 5, dtype=torch.int64), TypeError, "torch.int64", "torch.int32"),
    ("k_lens", ints(5, 5, 5), ValueError, "(3)", "(2,)"),
    ("k_lens", ints(5, -1), ValueError, "k_lens[1] is -1", "[0, "),
    ("k_lens", ints(12, 1), ValueError, "k_lens[0] is 12", "[0, "),
    ("q_lens", ints(1, 10), ValueError, "q_lens[1] is 10", "[0, 5]"),
    ("deterministic", "yes", TypeError, "'yes' (str)", "True, False or None"),
    ("backend", "fast", ValueError, "'fast'", "'tiled'"),
    ("backend", 3, ValueError, "3", "'tiled'"),
]  # fmt: skip

SEEDS: list[tuple[Any, type[Exception], str, str]] = [
    (1.5, TypeError, "1.5 (float)", "int"),
    (True, TypeError, "True (bool)", "int"),
    (2**64, ValueError, str(2**64), "64 bits"),
    (-(2**63) - 1, ValueError, str(-(2**63) - 1), "64 bits"),
    (ints(1), TypeError, "torch.int32", "torch.int64"),
    (ints(1, 2, dtype=torch.int64), TypeError, "(2)", "one torch.int64"),
    (torch.tensor(1, device="meta"), ValueError, "meta", "one device"),
]

DENSE: list[tuple[dict[str, Any], type[Exception], str, str, str]] = [
    ({"q": None}, TypeError, "q", "None (NoneType)", "torch.Tensor"),
    ({"k": [1.0]}, TypeError, "k", "[1.0] (list)", "torch.Tensor"),
    ({"v": 1}, TypeError, "v", "1 (int)", "torch.Tensor"),
    ({"q": ones(4, 5, 8)}, ValueError, "q", "(4, 5, 8)", "4 dimensions (B, H, S, D)"),
    ({"v": ones(2, 7, 6)}, ValueError, "v", "(2, 7, 6)", "4 dimensions (B, H, S, D)"),
    ({"q": ones(2, 4, 5, 8, dtype=torch.int32)}, TypeError, "q", "torch.int32", "torch.float16"),
    ({"q": ones(2, 4, 5, 8, dtype=torch.complex64)}, TypeError, "q", "torch.complex64", "torch.float16"),
    ({"k": ones(2, 2, 7, 8, dtype=F16)}, TypeError, "k", "torch.float16", "one dtype"),
    ({"v": ones(2, 2, 7, 6, dtype=F64)}, TypeError, "v", "torch.float64", "one dtype"),
    ({"k": ones(2, 2, 7, 8, device="meta")}, ValueError, "k", "meta", "one device"),
    ({"v": ones(2, 2, 7, 6, device="meta")}, ValueError, "v", "meta", "one device"),
    ({"q": ones(2, 4, 5, 0)}, ValueError, "q", "(2, 4, 5, 0)", "at least 1"),
    ({"v": ones(2, 2, 7, 0)}, ValueError, "v", "(2, 2, 7, 0)", "at least 1"),
    ({"k": ones(1, 2, 7, 8)}, ValueError, "k", "(1, 2, 7, 8)", "batches"),
    ({"v": ones(3, 2, 7, 6)}, ValueError, "v", "(3, 2, 7, 6)", "batches"),
    ({"k": ones(2, 2, 7, 9)}, ValueError, "k", "(2, 2, 7, 9)", "head sizes"),
    ({"v": ones(2, 4, 7, 6)}, ValueError, "v", "(2, 4, 7, 6)", "number of heads"),
    ({"v": ones(2, 2, 8, 6)}, ValueError, "v", "(2, 2, 8, 6)", "length"),
    ({"k": ones(2, 3, 7, 8), "v": ones(2, 3, 7, 6)}, ValueError, "q", "4 heads, k has 3", "multiple"),
    ({"k": ones(2, 8, 7, 8), "v": ones(2, 8, 7, 6)}, ValueError, "q", "4 heads, k has 8", "multiple"),
    ({"k": ones(2, 0, 7, 8), "v": ones(2, 0, 7, 6)}, ValueError, "q", "4 heads, k has 0", "multiple"),
    ({"bias": ones(5, 8)}, ValueError, "bias", "(5, 8)", "(2, 4, 5, 7)"),
    ({"bias": ones(7, 5)}, ValueError, "bias", "(7, 5)", "(2, 4, 5, 7)"),
    ({"mask": ones(5, 8, dtype=torch.bool)}, ValueError, "mask", "(5, 8)", "(2, 4, 5, 7)"),
    ({"mask": BlockMask.from_dense(ones(5, 8, dtype=torch.bool))}, ValueError, "mask", "5 queries and 8 keys",
        "5 and 7"),
    ({"mask": causal & BlockMask.from_dense(ones(6, 7, dtype=torch.bool))}, ValueError, "mask",
        "6 queries and 7 keys", "5 and 7"),
]  # fmt: skip

PACKED: list[tuple[dict[str, Any], type[Exception], str, str, str]] = [
    ({"q": ones(1, 9, 4, 8)}, ValueError, "q", "(1, 9, 4, 8)", "3 dimensions (T, H, D)"),
    ({"k": ones(11, 2, 9)}, ValueError, "k", "(11, 2, 9)", "head sizes"),
    ({"v": ones(12, 2, 6)}, ValueError, "v", "(12, 2, 6)", "length"),
    ({"v": ones(11, 1, 6)}, ValueError, "v", "(11, 1, 6)", "number of heads"),
    ({"k": ones(11, 3, 8), "v": ones(11, 3, 6)}, ValueError, "q", "4 heads, k has 3", "multiple"),
    ({"cu_seqlens_q": None}, TypeError, "cu_seqlens_q", "None", "attention"),
    ({"cu_seqlens_q": [0, 9]}, TypeError, "cu_seqlens_q", "[0, 9] (list)", "torch.Tensor"),
    ({"cu_seqlens_q": ints(0, 4, 9, dtype=torch.int64)}, TypeError, "cu_seqlens_q", "torch.int64", "torch.int32"),
    ({"cu_seqlens_k": ints(0, 6, 11, dtype=torch.int64)}, TypeError, "cu_seqlens_k", "torch.int64", "torch.int32"),
    ({"cu_seqlens_q": ints()}, ValueError, "cu_seqlens_q", "(0)", "number of sequences + 1"),
    ({"cu_seqlens_q": ints(0, 4, 9)[None]}, ValueError, "cu_seqlens_q", "(1, 3)", "one-dimensional"),
    ({"cu_seqlens_q": ints(0, 4, 9, device="meta")}, ValueError, "cu_seqlens_q", "meta", "one device"),
    ({"cu_seqlens_k": ints(0, 11)}, ValueError, "cu_seqlens_k", "1 sequences, cu_seqlens_q 2", "same number"),
    ({"cu_seqlens_q": ints(1, 4, 9)}, ValueError, "cu_seqlens_q", "cu_seqlens_q[0] is 1", "start at 0"),
    ({"cu_seqlens_k": ints(-1, 6, 11)}, ValueError, "cu_seqlens_k", "cu_seqlens_k[0] is -1", "start at 0"),
    ({"cu_seqlens_q": ints(0, 5, 4)}, ValueError, "cu_seqlens_q", "cu_seqlens_q[2] is 4, after 5", "never decrease"),
    ({"cu_seqlens_q": ints(0, 4, 10)}, ValueError, "cu_seqlens_q", "10", "9 tokens"),
    ({"cu_seqlens_k": ints(0, 6, 12)}, ValueError, "cu_seqlens_k", "12", "11 tokens"),
    ({"q_lens": ints(5, 5)}, ValueError, "q_lens", "q_lens[0] is 5", "[0, 4]"),
    ({"bias": ones(4, 6)}, ValueError, "bias", "4 in dimension 2", "at least the longest sequence's 5"),
    ({"bias": ones(5, 5)}, ValueError, "bias", "5 in dimension 3", "at least the longest sequence's 6"),
    ({"mask": ones(5, 5, dtype=torch.bool)}, ValueError, "mask", "5 in dimension 3",
        "at least the longest sequence's 6"),
    ({"mask": BlockMask.from_dense(ones(5, 5, dtype=torch.bool))}, ValueError, "mask", "5 queries and 5 keys",
        "5 and 6"),
    ({"mask": BlockMask.from_dense(ones(4, 9, dtype=torch.bool))}, ValueError, "mask", "4 queries and 9 keys",
        "5 and 6"),
]  # fmt: skip


@pytest.fixture(autouse=True)
def nothing_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    """A backend that is reached is a fault of its own."""

    def reached(*args: Any, **options: Any) -> None:
        pytest.fail("the backend was called")

    monkeypatch.setattr(tiled, "forward", reached)


def check(arguments: dict[str, Any], error: type[Exception], name: str, was: str, allowed: str) -> None:
    with pytest.raises((ValueError, TypeError)) as caught:
        call(**arguments)
    message = str(caught.value)
    assert type(caught.value) is error, message
    assert message.startswith(name), message
    assert was in message, message
    assert allowed in message, message
    assert "\n" not in message


def label(entry: Any) -> str:
    first, second = entry[0], entry[1]
    if isinstance(first, dict):
        return ", ".join(f"{name}={_brief(x)}" for name, x in first.items())
    return f"{first}={_brief(second)}"


def _brief(x: Any) -> str:
    if isinstance(x, Tensor):
        return f"{str(x.dtype).removeprefix('torch.')}{tuple(x.shape)}{'' if x.device.type == 'cpu' else x.device.type}"
    return repr(x)[:40]


@pytest.mark.parametrize("layout", [dense, packed])
@pytest.mark.parametrize("entry", OPTIONS, ids=label)
def test_options(entry: tuple[str, Any, type[Exception], str, str], layout: Any) -> None:
    name, value, *expected = entry
    check(layout() | {name: value}, expected[0], name, *expected[1:])


@pytest.mark.parametrize("layout", [dense, packed])
@pytest.mark.parametrize("entry", SEEDS, ids=lambda entry: _brief(entry[0]))
def test_seeds(entry: tuple[Any, type[Exception], str, str], layout: Any) -> None:
    value, error, was, allowed = entry
    check(layout() | {"dropout_p": 0.5, "seed": value}, error, "seed", was, allowed)


@pytest.mark.parametrize("entry", DENSE, ids=label)
def test_dense(entry: tuple[dict[str, Any], type[Exception], str, str, str]) -> None:
    changes, *expected = entry
    check(dense() | changes, *expected)


@pytest.mark.parametrize("entry", PACKED, ids=label)
def test_packed(entry: tuple[dict[str, Any], type[Exception], str, str, str]) -> None:
    changes, *expected = entry
    check(packed() | changes, *expected)


def test_contents_are_checked_on_the_cpu_without_being_asked() -> None:
    _checked.active = False  # the context of all tests; its exit restores what it found
    with pytest.raises(ValueError, match=r"k_lens\[0\] is 8"):
        tilewise.attention(**dense(), k_lens=ints(8, 1))


def test_checked_is_of_one_thread() -> None:
    with tilewise.checked(), ThreadPoolExecutor(1) as pool:
        assert _checked.active
        assert not pool.submit(lambda: _checked.active).result()


def test_bands() -> None:
    for bad in (1.5, "3", True):
        with pytest.raises(TypeError, match="left"):
            Band(bad, 0)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="align"):
        Band(None, 0, "top_right")
    with pytest.raises(ValueError, match="align"):
        causal & Band(3, None, "top_left")
    with pytest.raises(TypeError, match=r"torch\.bool"):
        causal & ones(5, 7)


def test_every_argument_is_in_a_table() -> None:
    """A new argument needs its faults here."""
    arguments = set(inspect.signature(tilewise.attention_packed).parameters) - {"return_lse"}
    tried = {entry[0] for entry in OPTIONS} | {"seed"} | {name for entry in (*DENSE, *PACKED) for name in entry[0]}
    assert tried == arguments
