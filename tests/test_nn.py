"""tilewise.nn.MultiheadAttention is torch's: results, gradients, state dict, layouts, masks."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import tilewise
import tilewise.nn

N, L, S, E, H = 2, 5, 7, 16, 4
causal = torch.ones(L, S, dtype=torch.bool).triu(1)


def hidden(*shape: int) -> Tensor:
    mask = torch.rand(shape, generator=torch.Generator().manual_seed(2)) > 0.6
    mask[..., 0] = False  # torch's gives NaN where nothing is visible
    return mask


def pair(**options: Any) -> tuple[Any, Any]:
    torch.manual_seed(0)
    theirs = torch.nn.MultiheadAttention(E, H, **options).double()
    with torch.no_grad():
        for parameter in theirs.parameters():  # biases begin as zeros
            parameter.normal_(std=0.3)
    ours = tilewise.nn.MultiheadAttention(E, H, **options).double()
    assert str(ours.load_state_dict(theirs.state_dict())) == "<All keys matched successfully>"
    return ours, theirs


MODULES: dict[str, dict[str, Any]] = {
    "plain": {},
    "batch first": {"batch_first": True},
    "no bias": {"bias": False, "batch_first": True},
    "sizes of their own": {"kdim": 6, "vdim": 10},
    "learned key": {"add_bias_kv": True},
    "zero key": {"add_zero_attn": True, "batch_first": True},
    "both keys": {"add_bias_kv": True, "add_zero_attn": True},
}
MASKS: dict[str, dict[str, Any]] = {
    "none": {},
    "padding": {"key_padding_mask": hidden(N, S)},
    "padding added": {"key_padding_mask": torch.randn(N, S, dtype=torch.float64)},
    "pairs": {"attn_mask": hidden(L, S)},
    "pairs a head": {"attn_mask": hidden(N * H, L, S)},
    "pairs added, padding": {
        "attn_mask": torch.randn(L, S, dtype=torch.float64), "key_padding_mask": hidden(N, S).double() * -9,
    },
    "both": {"attn_mask": hidden(L, S), "key_padding_mask": hidden(N, S)},
    "causal": {"attn_mask": causal, "is_causal": True},
}  # fmt: skip


@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("module", MODULES)
def test_it_is_torchs(module: str, mask: str) -> None:
    options = MODULES[module]
    ours, theirs = pair(**options)
    shapes = [(L, N, E), (S, N, options.get("kdim", E)), (S, N, options.get("vdim", E))]
    inputs = [torch.randn(shape, dtype=torch.float64, requires_grad=True) for shape in shapes]
    given = [x.transpose(0, 1) if options.get("batch_first") else x for x in inputs]
    expected, weights = theirs(*given, need_weights=True, **MASKS[mask])
    found, nothing = ours(*given, **MASKS[mask])
    assert nothing is None
    torch.testing.assert_close(found, expected)
    do = torch.cos(torch.arange(found.numel(), dtype=found.dtype)).view_as(found)
    for one, other in zip(
        torch.autograd.grad(found, [*inputs, *ours.parameters()], do),
        torch.autograd.grad(expected, [*inputs, *theirs.parameters()], do),
        strict=True,
    ):
        torch.testing.assert_close(one, other)
    again, found_weights = ours(*given, need_weights=True, **MASKS[mask])
    torch.testing.assert_close(found_weights, weights)
    torch.testing.assert_close(again, expected)


def test_one_sequence_without_a_batch() -> None:
    ours, theirs = pair()
    q, k = torch.randn(L, E, dtype=torch.float64), torch.randn(S, E, dtype=torch.float64)
    for masks in ({}, {"key_padding_mask": hidden(S), "attn_mask": hidden(H, L, S)}):
        torch.testing.assert_close(ours(q, k, k, **masks)[0], theirs(q, k, k, **masks)[0])


@pytest.mark.parametrize("batch_first", [False, True])
def test_causal_needs_no_mask(batch_first: bool) -> None:
    """torch's wants the mask beside its hint."""
    ours, theirs = pair(batch_first=batch_first)
    q, k = torch.randn(L, N, E, dtype=torch.float64), torch.randn(S, N, E, dtype=torch.float64)
    if batch_first:
        q, k = q.transpose(0, 1), k.transpose(0, 1)
    expected, weights = theirs(q, k, k, attn_mask=causal)
    torch.testing.assert_close(ours(q, k, k, is_causal=True)[0], expected)
    torch.testing.assert_close(ours(q, k, k, is_causal=True, need_weights=True), (expected, weights))


def test_self_attention_is_one_product() -> None:
    ours, theirs = pair(batch_first=True)
    x = torch.randn(N, L, E, dtype=torch.float64)
    torch.testing.assert_close(ours(x, x, x)[0], theirs(x, x, x)[0])


def test_a_row_that_sees_nothing_is_no_nan() -> None:
    ours, _ = pair(batch_first=True)
    x = torch.randn(N, L, E, dtype=torch.float64)
    o, _ = ours(x, x, x, key_padding_mask=torch.tensor([[True] * L, [False] * L]))
    torch.testing.assert_close(o[0], ours.out_proj.bias.expand(L, E))


def test_within_a_layer_of_torch() -> None:
    torch.manual_seed(0)
    layer = torch.nn.TransformerEncoderLayer(E, H, 32, dropout=0.0, batch_first=True)
    x, padding = torch.randn(N, L, E), torch.tensor([[False] * L, [False] * 3 + [True] * 2])
    expected = layer(x, src_key_padding_mask=padding)
    ours = tilewise.nn.MultiheadAttention(E, H, batch_first=True)
    ours.load_state_dict(layer.self_attn.state_dict())
    layer.self_attn = ours
    torch.testing.assert_close(layer(x, src_key_padding_mask=padding), expected)


def test_dropout_is_for_training() -> None:
    ours, _ = pair(dropout=0.5)
    x = torch.randn(L, N, E, dtype=torch.float64)
    first = ours(x, x, x)[0]
    assert not torch.equal(first, ours(x, x, x)[0])
    ours.eval()
    assert torch.equal(ours(x, x, x)[0], ours(x, x, x)[0])


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"key_padding_mask": torch.zeros(S, N, dtype=torch.bool)}, "key_padding_mask"),
        ({"attn_mask": torch.zeros(N, L, S, dtype=torch.bool)}, "attn_mask"),
        ({"attn_mask": torch.zeros(L, S, dtype=torch.int32)}, "int32"),
        ({"query": torch.randn(L, E, dtype=torch.float64)}, "3-D"),
        ({"key": torch.nested.nested_tensor([torch.randn(2, E)], layout=torch.jagged)}, "nested"),
    ],
)
def test_what_is_wrong_is_said(options: dict[str, Any], match: str) -> None:
    ours, _ = pair()
    q, k = torch.randn(L, N, E, dtype=torch.float64), torch.randn(S, N, E, dtype=torch.float64)
    with pytest.raises(ValueError, match=match):
        ours(**{"query": q, "key": k, "value": k} | options)
