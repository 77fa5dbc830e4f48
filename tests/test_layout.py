"""layout.py: results lie in memory as what they are made of, on every backend, and have the same bits there."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

import tilewise
from tilewise import causal
from tilewise.layout import by_token, empty, laid, strides_of

WAYS = list(itertools.product((False, True), repeat=4))  # whether q, k, v and dO lie by token


def drawn(shape: tuple[int, ...], tokens: bool, dtype: torch.dtype, device: str, seed: int) -> Tensor:
    """The same numbers either way."""
    x = torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(device, dtype)
    return x.transpose(1, 2).contiguous().transpose(1, 2) if tokens else x


def check_results_lie_as_their_tensors(
    backend: str | None, dtype: torch.dtype, d: int, v_dim: int, device: str = "cpu", compiled: bool = False,
    ways: Sequence[tuple[bool, ...]] = WAYS, lengths: bool = False,
) -> None:  # fmt: skip
    """o and dq as q, dk as k, dv as v: forward and backward of each of the ways; two heads share keys."""
    shapes = (2, 4, 37, d), (2, 2, 50, d), (2, 2, 50, v_dim), (2, 4, 37, v_dim)
    expected: list[Tensor] = []
    q_lens, k_lens = (
        torch.tensor(x, dtype=torch.int32, device=device) if lengths else None for x in ((37, 20), (9, 50))
    )
    for way in ways:
        torch._dynamo.reset()  # each way is a recompilation, and there is a limit
        *qkv, do = (drawn(shape, way[n], dtype, device, n) for n, shape in enumerate(shapes))
        assert [by_token(x.shape, x.stride()) for x in (*qkv, do)] == list(way)
        leaves = [x.detach().requires_grad_() for x in qkv]

        def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            return tilewise.attention(
                q, k, v, mask=causal, q_lens=q_lens, k_lens=k_lens, deterministic=True, backend=backend
            )

        o = (torch.compile(attend, fullgraph=True, backend="aot_eager") if compiled else attend)(*leaves)
        found = [o.detach(), *torch.autograd.grad(o, leaves, do)]
        for name, x, like in zip(("o", "dq", "dk", "dv"), found, (qkv[0], *qkv), strict=True):
            want = strides_of(x.shape, by_token(like.shape, like.stride()))
            assert x.stride() == want, f"{name} of {way}: {x.stride()}, not {want}"
        expected = expected or found
        assert all(torch.equal(x, y) for x, y in zip(found, expected, strict=True)), way


@pytest.mark.parametrize("lengths", [False, True])
@pytest.mark.parametrize("compiled", [False, True])
def test_results_lie_as_their_tensors(compiled: bool, lengths: bool) -> None:
    check_results_lie_as_their_tensors("tiled", torch.float32, 16, 24, compiled=compiled, lengths=lengths)


def test_a_projection_goes_back_without_a_copy() -> None:
    x = torch.randn(2, 30, 4, 16)
    q, k, v = (x.transpose(1, 2) for _ in range(3))
    o = tilewise.attention(q, k, v)
    assert o.transpose(1, 2).is_contiguous()


@pytest.mark.parametrize(
    ("shape", "strides", "tokens"),
    [
        ((2, 3, 5, 8), (120, 40, 8, 1), False),
        ((2, 3, 5, 8), (120, 8, 24, 1), True),
        ((2, 3, 5, 8), (360, 8, 72, 1), True),  # of q, k and v in one tensor
        ((2, 3, 5, 8), (40, 0, 8, 1), False),  # expanded over the heads
        ((2, 1, 5, 8), (40, 8, 8, 1), False),
        ((2, 3, 1, 8), (24, 8, 24, 1), False),
        ((5, 3, 8), (24, 8, 1), False),  # packed
    ],
)
def test_what_lies_by_token(shape: tuple[int, ...], strides: tuple[int, ...], tokens: bool) -> None:
    assert by_token(shape, strides) == tokens
    like = torch.empty_strided(shape, strides)
    room = empty(shape, like)
    assert room.stride() == strides_of(shape, tokens) == torch.empty_strided(shape, strides_of(shape, tokens)).stride()
    x = torch.randn(shape)
    assert torch.equal(laid(x, like), x)
    assert laid(x, like).stride() == room.stride()
    assert laid(room, like) is room
