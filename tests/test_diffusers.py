"""The integration with diffusers: its dispatcher and a model of its own, as on the backend that is replaced."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

pytest.importorskip("diffusers", reason="pip install diffusers")

from diffusers import FluxTransformer2DModel, attention_backend
from diffusers.models import attention_dispatch
from diffusers.models.attention_dispatch import dispatch_attention_fn

import tilewise
import tilewise.integrations.diffusers as integration
from tilewise.integrations import sdpa

REGISTRY = attention_dispatch._AttentionBackendRegistry


def tables() -> tuple[Any, ...]:
    return (
        dict(REGISTRY._backends), dict(REGISTRY._constraints), dict(REGISTRY._supported_arg_names),
        set(REGISTRY._supports_context_parallel),
    )  # fmt: skip


@pytest.fixture(autouse=True)
def nothing_is_left_behind() -> Iterator[None]:
    before = tables()
    yield
    integration.restore()
    assert tables() == before


CALLS: list[dict[str, Any]] = [
    {},
    {"is_causal": True, "scale": 0.2},
    {"attn_mask": torch.tensor([[True] * 7, [True] * 4 + [False] * 3])},
    {"attn_mask": torch.randn(5, 7)},
    {"attn_mask": torch.rand(2, 1, 5, 7) > 0.2},
    {"attn_mask": torch.randn(1, 4, 5, 7)},
]


@pytest.mark.parametrize("call", range(len(CALLS)))
def test_calls_are_those_of_native(call: int) -> None:
    q, k, v = torch.randn(2, 5, 4, 8), torch.randn(2, 7, 4, 8), torch.randn(2, 7, 4, 8)
    expected = dispatch_attention_fn(q, k, v, **CALLS[call])
    integration.register()
    found = dispatch_attention_fn(q, k, v, **CALLS[call])
    assert not torch.equal(found, expected)  # another kernel adds in another order
    torch.testing.assert_close(found, expected)


def test_the_switch_of_pytorchs_function_reaches_native() -> None:
    q = torch.randn(2, 5, 4, 8, requires_grad=True)
    sdpa.enable()
    try:
        o = dispatch_attention_fn(q, q, q)
    finally:
        sdpa.disable()
    assert torch.equal(o, tilewise.attention(*(q.transpose(1, 2),) * 3).transpose(1, 2))


def test_grouped_heads_and_lse() -> None:
    q, k = torch.randn(2, 5, 4, 8), torch.randn(2, 7, 2, 8)
    expected = dispatch_attention_fn(q, k, k, enable_gqa=True)
    integration.register("flex")
    with attention_backend("flex"):
        o, lse = dispatch_attention_fn(q, k, k, enable_gqa=True, attention_kwargs={"return_lse": True})
        with pytest.raises(ValueError, match="enable_gqa"):
            dispatch_attention_fn(q, k, k)
    torch.testing.assert_close(o, expected)
    scores = torch.einsum("bihd,bjhd->bihj", q, k.repeat_interleave(2, 2)) * 8**-0.5
    torch.testing.assert_close(lse, scores.logsumexp(-1))


def test_a_mask_for_each_batch_entry() -> None:
    q, seen = torch.randn(2, 5, 4, 8), torch.rand(2, 5, 5) > 0.2
    expected = dispatch_attention_fn(q, q, q, attn_mask=seen[:, None])
    integration.register()
    torch.testing.assert_close(dispatch_attention_fn(q, q, q, attn_mask=seen), expected)


def test_what_cannot_be_honoured_is_an_error() -> None:
    """diffusers itself drops arguments that a backend does not name."""
    q = torch.randn(2, 5, 4, 8)
    integration.register()
    integration.register()
    for options, match in (
        ({"attention_kwargs": {"window_size": (2, 2)}}, "window_size"),
        ({"parallel_config": object()}, "_parallel_config"),
        ({"attn_mask": torch.ones(5, 5, dtype=torch.bool), "is_causal": True}, "only one"),
    ):
        with pytest.raises(ValueError, match=match):
            dispatch_attention_fn(q, q, q, **options)
    with pytest.raises(ValueError, match="nonsense"):
        integration.register("nonsense")


def test_a_model() -> None:
    torch.manual_seed(0)
    model = FluxTransformer2DModel(
        patch_size=1, in_channels=4, num_layers=1, num_single_layers=1, attention_head_dim=16, num_attention_heads=2,
        joint_attention_dim=32, pooled_projection_dim=32, axes_dims_rope=[4, 4, 8],
    )  # fmt: skip
    inputs = {
        "hidden_states": torch.randn(1, 16, 4), "encoder_hidden_states": torch.randn(1, 8, 32),
        "pooled_projections": torch.randn(1, 32), "timestep": torch.tensor([1.0]), "img_ids": torch.rand(16, 3),
        "txt_ids": torch.rand(8, 3),
    }  # fmt: skip
    outcomes = []
    for ours in (False, True):
        if ours:
            integration.register()
        model.zero_grad()
        out = model(**inputs).sample
        out.square().sum().backward()
        outcomes.append([out, *(p.grad.clone() for p in model.parameters() if p.grad is not None)])
    assert not torch.equal(outcomes[0][0], outcomes[1][0])
    for found, expected in zip(*outcomes, strict=True):
        torch.testing.assert_close(found, expected, atol=1e-4, rtol=1e-4)
