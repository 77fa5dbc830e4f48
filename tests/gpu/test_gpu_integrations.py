"""Integrations on a GPU: nothing waits for the device, and PyTorch's registry of flash attention reaches ours."""

from __future__ import annotations

import pytest
import torch
from torch.nn.attention import (
    SDPBackend,
    activate_flash_attention_impl,
    restore_flash_attention_impl,
    sdpa_kernel,
)

import tilewise
import tilewise.integrations.flash_attn as flash_attn
from tilewise.integrations import flash_impl, sdpa

F = torch.nn.functional


def qkv(device: str, *shape: int) -> list[torch.Tensor]:
    return [torch.randn(shape, dtype=torch.bfloat16, device=device, requires_grad=True) for _ in range(3)]


@pytest.mark.parametrize("padding", [None, "right"])
def test_transformers_never_waits(device: str, padding: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Mask and attention function, prefill and a decoding step; the padding is right all the same."""
    pytest.importorskip("transformers")
    from tilewise.integrations import transformers_mask
    from tilewise.integrations.transformers import attention_function, mask_function

    monkeypatch.setattr(transformers_mask._checked, "active", False)  # looking at contents waits
    module = torch.nn.Identity()
    q, k, v = qkv(device, 2, 4, 70, 64)
    present = torch.ones(2, 70, dtype=torch.bool, device=device)
    present[1, 50:] = False

    def call() -> tuple[torch.Tensor, torch.Tensor]:
        mask = mask_function(2, 70, 70, attention_mask=present, padding=padding)
        first, _ = attention_function(module, q, k, v, mask)
        mask = mask_function(2, 1, 70, 69, attention_mask=present, padding=padding)
        second, _ = attention_function(module, q[:, :, -1:], k, v, mask)
        (first[:, :50].sum() + second.sum()).backward()
        return first, second

    call()  # compiles
    if device == "cuda":
        torch.cuda.set_sync_debug_mode("error")
    try:
        first, second = call()
    finally:
        if device == "cuda":
            torch.cuda.set_sync_debug_mode("default")
    alone = tilewise.attention(q[1:, :, :50], k[1:, :, :50], v[1:, :, :50], mask=tilewise.causal)
    torch.testing.assert_close(first[1:, :50], alone.transpose(1, 2), atol=2e-2, rtol=2e-2)
    alone = tilewise.attention(q[1:, :, -1:], k[1:, :, :50], v[1:, :, :50])
    torch.testing.assert_close(second[1:], alone.transpose(1, 2), atol=2e-2, rtol=2e-2)


@pytest.mark.usefixtures("cuda")
@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("compiled", [False, True])
def test_pytorchs_registry_reaches_ours(is_causal: bool, compiled: bool) -> None:
    q, k, v = qkv("cuda", 2, 4, 300, 64)
    expected = tilewise.attention(q, k, v, mask=tilewise.causal if is_causal else None)

    def call(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
            return F.scaled_dot_product_attention(q, k, v, is_causal=is_causal)

    flash_impl.register()
    activate_flash_attention_impl("tilewise")
    try:
        found = (torch.compile(call) if compiled else call)(q, k, v)
        assert torch.equal(found, expected)  # the same kernel, the same bits
        do = torch.randn_like(found)
        for one, other in zip(
            torch.autograd.grad(found, (q, k, v), do), torch.autograd.grad(expected, (q, k, v), do), strict=True
        ):
            torch.testing.assert_close(one, other, atol=2e-2, rtol=2e-2)
    finally:
        restore_flash_attention_impl()


def test_functions_of_other_names(device: str) -> None:
    q, k, v = qkv(device, 2, 4, 70, 64)
    mask = torch.rand(2, 1, 70, 70, device=device) > 0.3
    with sdpa.replaced():
        found = F.scaled_dot_product_attention(q, k, v, attn_mask=mask)
    assert torch.equal(found, tilewise.attention(q, k, v, mask=mask))
    expected = tilewise.attention(q, k, v, mask=tilewise.sliding_window(9))
    found = flash_attn.flash_attn_func(*(x.transpose(1, 2) for x in (q, k, v)), causal=True, window_size=(9, 0))
    assert torch.equal(found, expected.transpose(1, 2))
