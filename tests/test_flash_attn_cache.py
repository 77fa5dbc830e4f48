"""`flash_attn_with_kvcache` against `attention` over keys that the test puts together itself."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from cache_cases import ints
from torch import Tensor

import tilewise
from tilewise import Band
from tilewise.integrations.flash_attn import flash_attn_with_kvcache

B, HQ, HKV, D = 3, 4, 2, 16
STORED = (20, 3, 33)
TABLE = torch.outer(torch.arange(64.0), 10 ** -torch.arange(4.0))

CASES: dict[str, dict[str, Any]] = {
    "full": {},
    "causal": {"causal": True},
    "window": {"window_size": (7, 2)},
    "causal window": {"causal": True, "window_size": (9, -1)},
    "options": {
        "causal": True,
        "softcap": 4.0,
        "softmax_scale": 0.5,
        "alibi_slopes": torch.tensor([0.1, 0.2, 0.3, 0.4]),
    },
    "padding": {"causal": True, "cache_leftpad": ints([3, 0, 11])},
    "slots": {"causal": True, "cache_batch_idx": ints([4, 0, 2])},
    "one query, two keys": {"causal": True, "q_len": 1, "n": 2},
    "nothing new": {"causal": True, "n": 0},
    "rotary": {"causal": True, "rotary": True},
    "rotary, half": {"window_size": (20, 0), "rotary": True, "rotary_interleaved": False},
    "rotary, all queries at one place": {"rotary": True},
    "rotary, padding": {"causal": True, "rotary": True, "cache_leftpad": ints([3, 0, 2])},
    "rotary, fewer queries": {"causal": True, "rotary": True, "q_len": 2, "n": 4},
}


def here(x: Tensor) -> Tensor:
    """On the default device."""
    return x.to(torch.get_default_device())


def turned(x: Tensor, position: int, interleaved: bool) -> Tensor:
    """x (H, D): its first 8 columns as complex numbers."""
    pairs = x[:, :8].unflatten(1, (4, 2)) if interleaved else x[:, :8].unflatten(1, (2, 4)).transpose(1, 2)
    angle = here(torch.complex(TABLE[position].cos(), TABLE[position].sin()))
    z = torch.view_as_real(torch.view_as_complex(pairs.contiguous()) * angle)
    return torch.cat([(z if interleaved else z.transpose(1, 2)).flatten(1), x[:, 8:]], 1)


PAGES = [(name, page) for name in CASES for page in (None, 4, 256) if not page or name != "slots"]  # a table has none


@pytest.mark.parametrize(("name", "page"), PAGES)
def test_cases(name: str, page: int | None) -> None:
    options = {key: here(x) if isinstance(x, Tensor) else x for key, x in CASES[name].items()}
    q_len, n, rotary = options.pop("q_len", 3), options.pop("n", 3), options.pop("rotary", False)
    slots = options.get("cache_batch_idx", torch.arange(B)).tolist()
    q, k, v = (torch.randn(B, length, h, D) for length, h in ((q_len, HQ), (n, HKV), (n, HKV)))
    past = [torch.randn(2, length, HKV, D) for length in STORED]
    if page:
        width = -(-40 // page)
        table = torch.randperm(B * width + 2)[: B * width].view(B, width).int()
        k_cache, v_cache = torch.full((2, B * width + 2, page, HKV, D), torch.nan)
        options["block_table"] = table
    else:
        k_cache, v_cache = torch.full((2, 5, 40, HKV, D), torch.nan)

    def at(b: int, j: int) -> tuple[int, int]:
        return (slots[b], j) if not page else (int(table[b, j // page]), j % page)

    for b, pair in enumerate(past):
        for j in range(STORED[b]):
            k_cache[at(b, j)], v_cache[at(b, j)] = pair[:, j]
    if rotary:
        options |= {"rotary_cos": here(TABLE.cos()), "rotary_sin": here(TABLE.sin())}
    new = {"k": k, "v": v} if n else {}
    lens = ints(STORED)
    o, lse = flash_attn_with_kvcache(q, k_cache, v_cache, **new, cache_seqlens=lens, return_softmax_lse=True, **options)
    assert lens.tolist() == list(STORED)
    assert o.is_contiguous()
    left, right = (None if w < 0 else w for w in options.get("window_size", (-1, -1)))
    interleaved = options.get("rotary_interleaved", True)
    local = options.get("causal", False) or (left, right) != (None, None)
    for b in range(B):
        q_b, k_b = q[b], k[b]
        if rotary:
            q_b = torch.stack([turned(x, STORED[b] + t * local, interleaved) for t, x in enumerate(q_b)])
            k_b = torch.stack([turned(x, STORED[b] + t, interleaved) for t, x in enumerate(k_b)])
        K, V = torch.cat([past[b][0], k_b]), torch.cat([past[b][1], v[b]])
        for j in range(STORED[b] + n):
            torch.testing.assert_close(k_cache[at(b, j)], K[j])
            assert torch.equal(v_cache[at(b, j)], V[j])
        pad = options["cache_leftpad"][b] if "cache_leftpad" in options else 0
        expected, expected_lse = tilewise.attention(
            *(x.transpose(0, 1)[None] for x in (q_b, K[pad:], V[pad:])), return_lse=True,
            mask=Band(left, 0 if options.get("causal") else right), softcap=options.get("softcap", 0.0),
            scale=options.get("softmax_scale"), alibi_slopes=options.get("alibi_slopes"),
        )  # fmt: skip
        torch.testing.assert_close(o[b], expected[0].transpose(0, 1))
        torch.testing.assert_close(lse[b], expected_lse[0])
    assert k_cache.isnan().any()


def test_lengths_by_number_and_slots_twice() -> None:
    q, k_cache = torch.randn(2, 1, 2, 8), torch.randn(1, 9, 2, 8)
    twice = {"cache_batch_idx": ints([0, 0]), "causal": True}
    for lens, equal in ((5, 5), (None, 9)):
        o = flash_attn_with_kvcache(q, k_cache, k_cache, cache_seqlens=lens, **twice)
        same = flash_attn_with_kvcache(q, k_cache, k_cache, cache_seqlens=ints([equal, equal]), **twice)
        assert torch.equal(o, same)
    o = flash_attn_with_kvcache(q, k_cache, k_cache, cache_seqlens=ints([2, 9]), **twice)  # one slot, two lengths
    assert torch.equal(o[1], same[1]) is (equal == 9)
    assert not torch.equal(o[0], same[0])


@pytest.mark.parametrize(
    ("change", "kind", "message"),
    [
        ({"cache_seqlens": None}, ValueError, "cache_seqlens is None"),
        ({"cache_seqlens": torch.tensor([1, 2])}, ValueError, "cache_seqlens is torch.int64"),
        ({"rotary_cos": TABLE}, ValueError, "given both"),
        ({"k": None, "v": None, "rotary_cos": TABLE, "rotary_sin": TABLE}, ValueError, "with k"),
        ({"v": None}, TypeError, "v is None"),
        ({"cache_leftpad": ints([0])}, ValueError, "cache_leftpad is"),
        ({"cache_seqlens": ints([8, 9])}, ValueError, "gets 1 more"),
        ({"block_table": ints([[0], [1]]), "cache_batch_idx": ints([0, 1])}, ValueError, "cache_batch_idx"),
    ],
)
def test_errors(change: dict[str, Any], kind: type[Exception], message: str) -> None:
    new = torch.zeros(2, 1, 2, 8)
    k_cache, v_cache = torch.zeros(2, 2, 9, 2, 8)
    with pytest.raises(kind, match=message):
        flash_attn_with_kvcache(
            **({"q": new, "k_cache": k_cache, "v_cache": v_cache, "k": new, "v": new, "cache_seqlens": 3} | change)
        )
