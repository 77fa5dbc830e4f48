"""PyTorch's scaled_dot_product_attention on tilewise: the same results and gradients, and nothing left behind."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.attention.bias import causal_lower_right, causal_upper_left

import tilewise
from tilewise.integrations import sdpa

PYTORCHS = torch.nn.functional.scaled_dot_product_attention
F = torch.nn.functional


@pytest.fixture(autouse=True)
def nothing_is_left_behind() -> Iterator[None]:
    yield
    assert F.scaled_dot_product_attention is PYTORCHS


def random(*shape: int, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed + sum(shape))
    return torch.randn(shape, generator=generator, dtype=torch.float64, requires_grad=True)


def visible(*shape: int) -> Tensor:
    mask = random(*shape).detach() > 0
    mask[..., 0] = True
    return mask


CASES: list[tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...], dict[str, Any]]] = [
    ((2, 4, 7, 8), (2, 4, 7, 8), (2, 4, 7, 8), {}),
    ((2, 4, 5, 8), (2, 4, 9, 8), (2, 4, 9, 6), {"is_causal": True}),  # aligned to the top left
    ((2, 4, 9, 8), (2, 4, 5, 8), (2, 4, 5, 8), {"is_causal": True, "scale": 0.3}),
    ((2, 4, 5, 8), (2, 2, 9, 8), (2, 2, 9, 8), {"enable_gqa": True}),
    ((2, 4, 5, 8), (2, 2, 9, 8), (2, 4, 9, 8), {"enable_gqa": True, "attn_mask": visible(2, 1, 5, 9)}),
    ((4, 5, 8), (2, 9, 8), (2, 9, 8), {"enable_gqa": True}),
    ((5, 8), (9, 8), (9, 8), {"attn_mask": visible(5, 9)}),
    ((3, 5, 8), (3, 9, 8), (3, 9, 8), {"attn_mask": visible(3, 1, 9)}),
    ((2, 3, 4, 5, 8), (2, 3, 4, 9, 8), (2, 3, 4, 9, 8), {"attn_mask": random(3, 1, 5, 9)}),
    ((2, 3, 4, 5, 8), (2, 1, 4, 9, 8), (1, 4, 9, 8), {"attn_mask": random(2, 1, 4, 1, 9)}),
    ((2, 4, 5, 8), (1, 1, 9, 8), (1, 1, 9, 8), {"attn_mask": random(1, 4, 5, 1)}),
    ((2, 1, 5, 8), (2, 4, 9, 8), (2, 4, 9, 8), {}),
    ((2, 4, 5, 8), (2, 4, 9, 8), (2, 4, 9, 8), {"attn_mask": random(2, 4, 5, 9)}),
    ((2, 4, 5, 8), (2, 4, 9, 8), (2, 4, 9, 8), {"attn_mask": visible(1, 9)}),
    ((1, 2, 5, 8), (1, 2, 9, 8), (1, 2, 9, 8), {"attn_mask": torch.zeros(5, 9, dtype=torch.bool)}),  # sees nothing
    ((1, 2, 5, 8), (1, 2, 9, 8), (1, 2, 9, 8), {"attn_mask": visible(5, 9).double().log()}),  # -inf where hidden
    ((2, 4, 5, 8), (2, 4, 9, 8), (2, 4, 9, 8), {"dropout_p": 0.0}),
]


@pytest.mark.parametrize("case", range(len(CASES)))
def test_results_and_gradients_are_pytorchs(case: int) -> None:
    *shapes, options = CASES[case]
    q, k, v = (random(*shape, seed=i) for i, shape in enumerate(shapes))
    inputs = [x for x in (q, k, v, options.get("attn_mask")) if x is not None and x.requires_grad]
    expected = PYTORCHS(q, k, v, **options)
    with sdpa.replaced():
        found = F.scaled_dot_product_attention(q, k, v, **options)
    assert "Attention" in str(found.grad_fn.next_functions) + str(found.grad_fn)  # it did not run on PyTorch's
    torch.testing.assert_close(found, expected, atol=1e-12, rtol=1e-12)
    do = random(*expected.shape, seed=3).detach()
    for one, other in zip(
        torch.autograd.grad(found, inputs, do), torch.autograd.grad(expected, inputs, do), strict=True
    ):
        torch.testing.assert_close(one, other, atol=1e-12, rtol=1e-12)


def test_causal_biases() -> None:
    q, k = random(1, 2, 5, 8), random(1, 2, 9, 8)
    for bias in (causal_upper_left(5, 9), causal_lower_right(5, 9)):
        expected = PYTORCHS(q, k, k, attn_mask=bias._materialize())
        with sdpa.replaced():
            torch.testing.assert_close(F.scaled_dot_product_attention(q, k, k, attn_mask=bias), expected)
        torch.testing.assert_close(sdpa.scaled_dot_product_attention(q, k, k, bias), expected)


def test_dropout_is_applied_as_given() -> None:
    q = random(1, 2, 5, 8)
    torch.manual_seed(0)
    expected = tilewise.attention(q, q, q, dropout_p=0.5)
    torch.manual_seed(0)
    with sdpa.replaced():
        assert torch.equal(F.scaled_dot_product_attention(q, q, q, dropout_p=0.5), expected)
    assert (sdpa.scaled_dot_product_attention(q, q, q, dropout_p=1.0) == 0).all()


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"attn_mask": torch.ones(5, 5, dtype=torch.bool), "is_causal": True}, "only one"),
        ({"key": torch.randn(1, 3, 5, 8)}, "3"),
        ({"key": torch.randn(1, 2, 5, 8), "enable_gqa": False}, "enable_gqa"),
        ({"query": torch.randn(8)}, "two dimensions"),
        ({"attn_mask": torch.ones(4, 4, dtype=torch.bool)}, "broadcastable"),
        ({"query": torch.nested.nested_tensor([torch.randn(2, 5, 8)], layout=torch.jagged)}, "attention_packed"),
    ],
)  # fmt: skip
def test_what_is_wrong_is_said(options: dict[str, Any], match: str) -> None:
    q = torch.randn(1, 4, 5, 8)
    with pytest.raises(ValueError, match=match):
        sdpa.scaled_dot_product_attention(**{"query": q, "key": q, "value": q} | options)


def test_on_and_off() -> None:
    """The switch reaches every thread and torch's own modules; the block this thread alone, and every name."""
    q = torch.randn(1, 2, 5, 8, requires_grad=True)
    ours, seen = "_EagerAttention", []

    def node(function: Any = None) -> str:
        return type((function or F.scaled_dot_product_attention)(q, q, q).grad_fn).__name__

    def elsewhere() -> None:
        seen.append(node())

    def in_a_thread() -> str:
        thread = threading.Thread(target=elsewhere)
        thread.start()
        thread.join()
        return seen.pop()

    assert ours not in node()
    sdpa.enable()
    sdpa.enable()
    assert ours in node()
    assert ours in in_a_thread()
    assert ours not in node(PYTORCHS)
    sdpa.disable()
    sdpa.disable()
    assert ours not in node()
    with sdpa.replaced():
        assert ours in node()
        assert ours in node(PYTORCHS)
        assert ours not in in_a_thread()
    assert ours not in node(PYTORCHS)
    with pytest.raises(KeyError), sdpa.replaced():
        raise KeyError
    assert ours not in node()


def test_modules_of_torch_run_on_it() -> None:
    layer = torch.nn.TransformerEncoderLayer(16, 2, 32, dropout=0.0, batch_first=True)
    x, hidden = torch.randn(2, 5, 16), torch.tensor([[False] * 5, [False] * 3 + [True] * 2])
    expected = layer(x, src_key_padding_mask=hidden)
    sdpa.enable()
    try:
        found = layer(x, src_key_padding_mask=hidden)
    finally:
        sdpa.disable()
    assert not torch.equal(found, expected)  # another kernel adds in another order
    torch.testing.assert_close(found, expected)


@pytest.mark.parametrize("switch", ["enable", "replaced"])
def test_it_compiles(switch: str) -> None:
    q, mask = torch.randn(1, 2, 5, 8), torch.randn(5, 5)

    def twice(x: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(x, x, x, attn_mask=mask) * 2

    graphs = []

    def backend(graph: torch.fx.GraphModule, inputs: Any) -> Any:
        graphs.append(str(graph.graph))
        return graph

    torch._dynamo.reset()
    compiled = torch.compile(twice, backend=backend, fullgraph=True)
    if switch == "enable":
        sdpa.enable()
        try:
            found = compiled(q)
        finally:
            sdpa.disable()
    else:
        with sdpa.replaced():
            found = compiled(q)
    torch.testing.assert_close(found, twice(q))
    assert "tilewise" in graphs[0]
