"""PyTorch's switch for flash attention. The operators are CUDA's; here they are registered for the CPU, and called."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch.nn.attention import (
    activate_flash_attention_impl,
    current_flash_attention_impl,
    list_flash_attention_impls,
    restore_flash_attention_impl,
)

import tilewise
from tilewise.integrations import flash_impl

aten = torch.ops.aten


@pytest.fixture
def active() -> Iterator[None]:
    flash_impl.register("CPU")
    activate_flash_attention_impl("tilewise")
    yield
    restore_flash_attention_impl()
    flash_impl.register()


def qkv(*shape: int) -> list[torch.Tensor]:
    torch.manual_seed(0)
    return [torch.randn(shape, requires_grad=True) for _ in range(3)]


def gradients(o: torch.Tensor, inputs: list[torch.Tensor]) -> list[torch.Tensor]:
    return [o.detach(), *torch.autograd.grad(o, inputs, torch.cos(torch.arange(o.numel())).view_as(o))]


@pytest.mark.usefixtures("active")
@pytest.mark.parametrize("is_causal", [False, True])
def test_the_operator_under_sdpa(is_causal: bool) -> None:
    """Its gradient is that of PyTorch's formula, which calls the operator for the backward."""
    x = qkv(2, 5, 3, 8)  # strides as models have them
    inputs = [t.transpose(1, 2) for t in x]
    o, lse, *_, debug = aten._scaled_dot_product_flash_attention(*inputs, 0.0, is_causal, False, scale=0.3)
    assert debug.numel() == 0
    assert o.stride() == inputs[0].stride()
    expected, expected_lse = tilewise.attention(
        *inputs, mask=tilewise.causal if is_causal else None, scale=0.3, return_lse=True
    )
    torch.testing.assert_close(lse, expected_lse)
    for one, other in zip(gradients(o, x), gradients(expected, x), strict=True):
        torch.testing.assert_close(one, other)


@pytest.mark.usefixtures("active")
def test_dropout_is_the_same_both_ways() -> None:
    """The backward drops what the forward dropped: the gradient of v for ones is the sum of each kept column."""
    q, k, _ = qkv(1, 2, 40, 8)
    eye = torch.eye(40).expand(1, 2, 40, 40).clone().requires_grad_()
    dropped, *_ = aten._scaled_dot_product_flash_attention(q, k, eye, 0.5)  # the matrix P itself
    assert 0.3 < (dropped == 0).double().mean() < 0.7
    (dv,) = torch.autograd.grad(dropped.sum(), eye)
    torch.testing.assert_close(dv, dropped.sum(2)[..., None].expand_as(dv).detach())
    again, *_ = aten._scaled_dot_product_flash_attention(q, k, eye, 0.5)
    assert not torch.equal(again, dropped)


@pytest.mark.usefixtures("active")
def test_packed_and_windowed_operators() -> None:
    x = qkv(9, 2, 8)
    cu = torch.tensor([0, 4, 9], dtype=torch.int32)
    o, lse, *rest = aten._flash_attention_forward(*x, cu, cu, 5, 5, 0.0, True, False, window_size_left=2)
    expected, expected_lse = tilewise.attention_packed(
        *x, cu, mask=tilewise.sliding_window(2), return_lse=True
    )  # fmt: skip
    torch.testing.assert_close(lse, expected_lse)
    for one, other in zip(gradients(o, x), gradients(expected, x), strict=True):
        torch.testing.assert_close(one, other)
    assert len(rest) == 3
    y = qkv(2, 5, 3, 8)
    o, *_ = aten._flash_attention_forward(
        *y, None, None, 5, 5, 0.0, False, False, seqused_k=torch.tensor([5, 2], dtype=torch.int32),
        alibi_slopes=torch.ones(3),
    )  # fmt: skip
    q, k, v = (t.transpose(1, 2) for t in y)
    expected = tilewise.attention(q, k, v, k_lens=torch.tensor([5, 2], dtype=torch.int32), alibi_slopes=torch.ones(3))
    torch.testing.assert_close(o, expected.transpose(1, 2))
    if hasattr(aten, "_flash_attention_forward_no_dropout_inplace"):
        out = torch.empty_like(x[0])
        with torch.no_grad():
            found = aten._flash_attention_forward_no_dropout_inplace(out, *x, cu, cu, 5, 5, 0.0, False, False)
        expected, expected_lse = tilewise.attention_packed(*x, cu, return_lse=True)
        torch.testing.assert_close(out, expected)
        torch.testing.assert_close(found, expected_lse)


@pytest.mark.usefixtures("active")
def test_what_is_not_there_is_an_error() -> None:
    x = qkv(2, 5, 3, 8)
    if "block_table" in str(aten._flash_attention_forward.default._schema):  # in newer versions
        with pytest.raises(ValueError, match="block_table"):
            aten._flash_attention_forward(
                *x, None, None, 5, 5, 0.0, False, False, block_table=torch.zeros(2, 1, dtype=torch.int32)
            )
    with pytest.raises(ValueError, match="return_debug_mask"):
        aten._scaled_dot_product_flash_attention(*x, 0.0, False, True)


def test_on_and_off() -> None:
    x = qkv(1, 2, 5, 8)
    flash_impl.register("CPU")
    assert "tilewise" in list_flash_attention_impls()
    for _ in range(2):
        with pytest.raises(NotImplementedError):
            aten._scaled_dot_product_flash_attention(*x)
        activate_flash_attention_impl("tilewise")
        assert current_flash_attention_impl() == "tilewise"
        aten._scaled_dot_product_flash_attention(*x)
        restore_flash_attention_impl()
    assert current_flash_attention_impl() is None
    flash_impl.register()
