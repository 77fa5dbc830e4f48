"""The names of flash_attn: formula, layouts and gradients by the definition, written out."""

from __future__ import annotations

import inspect
from typing import Any

import pytest
import torch
from torch import Tensor

import tilewise.integrations.flash_attn as flash_attn
from tilewise.integrations.flash_attn import bert_padding
from tilewise.integrations.flash_attn.bert_padding import pad_input, unpad_input


def by_definition(
    q: Tensor, k: Tensor, v: Tensor, *, softmax_scale: float | None = None, causal: bool = False,
    window_size: tuple[int, int] = (-1, -1), softcap: float = 0.0, alibi_slopes: Tensor | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """(o, lse) of (B, S, H, D) tensors, in the definition's own order; rows that see no key give 0 and -inf."""
    k, v = (x.repeat_interleave(q.shape[2] // x.shape[2], 2) for x in (k, v))
    s = torch.einsum("bihd,bjhd->bhij", q, k) * (q.shape[-1] ** -0.5 if softmax_scale is None else softmax_scale)
    if softcap:
        s = softcap * torch.tanh(s / softcap)
    i = torch.arange(q.shape[1])[:, None] + k.shape[1] - q.shape[1]
    j = torch.arange(k.shape[1])
    if alibi_slopes is not None:
        s = s - alibi_slopes.reshape(-1, q.shape[2], 1, 1) * (i - j).abs()
    left, right = window_size[0], 0 if causal else window_size[1]
    hidden = (j > i + right if right >= 0 else j < 0) | (j < i - left if left >= 0 else j < 0)
    s = s.masked_fill(hidden, -torch.inf)
    p = torch.where(hidden.all(-1, keepdim=True), 0.0, s.softmax(-1))
    return torch.einsum("bhij,bjhd->bihd", p.nan_to_num(), v), s.logsumexp(-1)


def random(*shape: int, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator, dtype=torch.float64, requires_grad=True)


def compare(found: Any, expected: Any, inputs: list[Tensor]) -> None:
    """Values and gradients. found: of a function with return_attn_probs."""
    o, lse, nothing = found
    assert nothing is None
    torch.testing.assert_close(o, expected[0])
    torch.testing.assert_close(lse, expected[1])
    do = torch.cos(torch.arange(o.numel(), dtype=o.dtype)).view_as(o)
    for one, other in zip(
        torch.autograd.grad(o, inputs, do), torch.autograd.grad(expected[0], inputs, do), strict=True
    ):  # fmt: skip
        torch.testing.assert_close(one, other)


OPTIONS: list[dict[str, Any]] = [
    {},
    {"causal": True, "softmax_scale": 0.2},
    {"window_size": (2, 1), "softcap": 1.5},
    {"window_size": (2, 5), "causal": True},
    {"window_size": (-1, 1)},
    {"alibi_slopes": torch.tensor([0.1, 0.2, 0.3, 0.4], dtype=torch.float64), "causal": True},
    {"alibi_slopes": torch.rand(2, 4, dtype=torch.float64)},
]


@pytest.mark.parametrize("options", OPTIONS, ids=lambda options: "-".join(options) or "plain")
def test_dense(options: dict[str, Any]) -> None:
    for q_len, k_len, kv_heads in ((7, 7, 4), (3, 9, 2), (9, 4, 1)):
        q, k, v = random(2, q_len, 4, 8), random(2, k_len, kv_heads, 8, seed=1), random(2, k_len, kv_heads, 8, seed=2)
        found = flash_attn.flash_attn_func(q, k, v, return_attn_probs=True, **options)
        assert found[0].is_contiguous()
        compare(found, by_definition(q, k, v, **options), [q, k, v])
        assert torch.equal(flash_attn.flash_attn_func(q, k, v, **options), found[0])
        kv = torch.stack([k, v], 2).detach().requires_grad_()
        found = flash_attn.flash_attn_kvpacked_func(q, kv, return_attn_probs=True, **options)
        compare(found, by_definition(q, kv[:, :, 0], kv[:, :, 1], **options), [q, kv])
    qkv = random(2, 7, 3, 4, 8)
    found = flash_attn.flash_attn_qkvpacked_func(qkv, return_attn_probs=True, **options)
    compare(found, by_definition(*qkv.unbind(2), **options), [qkv])


@pytest.mark.parametrize("options", OPTIONS, ids=lambda options: "-".join(options) or "plain")
def test_varlen(options: dict[str, Any]) -> None:
    """As each sequence alone; with a slope for each of two sequences and head."""
    lens_q, lens_k = [3, 6], [5, 4]
    cu_q, cu_k = (torch.tensor([0, a, a + b], dtype=torch.int32) for a, b in (lens_q, lens_k))
    q, kv, qkv = random(9, 4, 8), random(9, 2, 2, 8, seed=1), random(9, 3, 4, 8, seed=2)

    def apart(q: Tensor, k: Tensor, v: Tensor, of_k: list[int]) -> tuple[Tensor, Tensor]:
        found = []
        for s, one in enumerate(zip(q.split(lens_q), k.split(of_k), v.split(of_k), strict=True)):
            slopes = options.get("alibi_slopes")
            own = options if slopes is None or slopes.dim() == 1 else options | {"alibi_slopes": slopes[s]}
            found.append(by_definition(*(x[None] for x in one), **own))
        return torch.cat([o[0] for o, _ in found]), torch.cat([lse[0] for _, lse in found], -1)

    k, v = kv.unbind(1)
    found = flash_attn.flash_attn_varlen_func(q, k, v, cu_q, cu_k, 6, 5, return_attn_probs=True, **options)
    compare(found, apart(q, k, v, lens_k), [q, kv])
    found = flash_attn.flash_attn_varlen_kvpacked_func(q, kv, cu_q, cu_k, 6, 5, return_attn_probs=True, **options)
    compare(found, apart(q, k, v, lens_k), [q, kv])
    found = flash_attn.flash_attn_varlen_qkvpacked_func(qkv, cu_q, 6, return_attn_probs=True, **options)
    compare(found, apart(*qkv.unbind(1), lens_q), [qkv])


def test_padded_to_packed_and_back() -> None:
    x, mask = random(2, 5, 2, 4), torch.tensor([[0, 1, 1, 1, 0], [1, 1, 1, 1, 1]])
    tokens, indices, cu, longest, used = unpad_input(x, mask)
    assert torch.equal(tokens, x[mask.bool()])
    assert (cu.dtype, cu.tolist(), longest, used.tolist()) == (torch.int32, [0, 3, 8], 5, [3, 5])
    again = pad_input(tokens, indices, 2, 5)
    assert torch.equal(again, x * mask[..., None, None])
    (grad,) = torch.autograd.grad(again, x, torch.ones_like(again))
    assert torch.equal(grad, mask[..., None, None].expand_as(x).double())
    *_, cu, longest, used = unpad_input(x, mask, torch.tensor([[1, 0, 0, 0, 0], [0] * 5]))
    assert (cu.tolist(), longest, used.tolist()) == ([0, 4, 9], 5, [3, 5])
    rows, indices, cu, longest = bert_padding.unpad_input_for_concatenated_sequences(
        x, torch.tensor([[2, 1, 0, 0, 0], [5, 0, 0, 0, 0]])
    )
    assert (indices.tolist(), cu.tolist(), longest) == ([0, 1, 2, 5, 6, 7, 8, 9], [0, 2, 3, 8], 5)
    assert cu.dtype == torch.int32
    assert torch.equal(rows, torch.cat([x[0, :3], x[1]]))
    some, all_of_it = bert_padding.index_first_axis_residual(x[0], torch.tensor([3, 1]))
    assert torch.equal(some, x[0, [3, 1]])
    assert torch.equal(all_of_it, x[0])


def test_what_differs_is_an_error() -> None:
    q = random(2, 5, 4, 8)
    cu = torch.tensor([0, 5], dtype=torch.int32)
    with pytest.raises(ValueError, match="return_attn_probs"):
        flash_attn.flash_attn_func(q, q, q, 0.1, return_attn_probs=True)
    with pytest.raises(ValueError, match="block_table"):
        flash_attn.flash_attn_varlen_func(q[0], q[0], q[0], cu, cu, 5, 5, block_table=cu)
    with pytest.raises(ValueError, match="qkv"):
        flash_attn.flash_attn_qkvpacked_func(q)
    with pytest.raises(TypeError, match="window"):
        flash_attn.flash_attn_func(q, q, q, window=(1, 1))


def test_dropout_repeats_with_torchs_seed() -> None:
    qkv = random(2, 5, 3, 4, 8)
    found = []
    for seed in (0, 0, 1):
        torch.manual_seed(seed)
        found.append(flash_attn.flash_attn_qkvpacked_func(qkv, 0.5))
    assert torch.equal(found[0], found[1])
    assert not torch.equal(found[0], found[2])


def test_arguments_stand_in_their_places() -> None:
    """Callers pass them by place."""
    options = [
        "dropout_p", "softmax_scale", "causal", "window_size", "softcap", "alibi_slopes", "deterministic",
        "return_attn_probs",
    ]  # fmt: skip
    lengths = ["cu_seqlens_q", "cu_seqlens_k", "max_seqlen_q", "max_seqlen_k"]
    for name, first in {
        "flash_attn_func": ["q", "k", "v"],
        "flash_attn_kvpacked_func": ["q", "kv"],
        "flash_attn_qkvpacked_func": ["qkv"],
        "flash_attn_varlen_func": ["q", "k", "v", *lengths],
        "flash_attn_varlen_kvpacked_func": ["q", "kv", *lengths],
        "flash_attn_varlen_qkvpacked_func": ["qkv", "cu_seqlens", "max_seqlen"],
    }.items():
        last = ["block_table"] if name == "flash_attn_varlen_func" else []
        assert list(inspect.signature(getattr(flash_attn, name)).parameters) == [*first, *options, *last]
