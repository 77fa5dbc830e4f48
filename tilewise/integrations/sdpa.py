"""`torch.nn.functional.scaled_dot_product_attention` on tilewise: in a `with` block, or for the whole process.

`replaced()` is a mode of PyTorch's: it catches the function by whatever name it is called, in this thread, and costs
each torch call in the block some microseconds. `enable()` puts our function in the place of PyTorch's, for all
threads and at no cost, but only for those who look it up in `torch.nn.functional` when they call it. Both serve every
call: masks of all kinds, with gradient, any sizes. PyTorch's own switch, which lets fewer calls through, is served by
`flash_impl.py`.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention.bias import CausalBias, CausalVariant
from torch.overrides import TorchFunctionMode

from .. import attention
from ..mask import Band, causal

TOP_LEFT = Band(None, 0, "top_left")
ORIGINAL = torch.nn.functional.scaled_dot_product_attention


def scaled_dot_product_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """PyTorch's function of this name, all its arguments, on `tilewise.attention`.

    Args:
        query: (..., Hq, L, E); key: (..., H, S, E); value: (..., H, S, Ev). None or more leading dimensions, which
            broadcast; Hq, H too are of the leading ones. One floating-point dtype.
        attn_mask: broadcastable to (..., Hq, L, S): boolean, True where visible, or added to the scores, then with
            gradient; or one of `torch.nn.attention.bias`.
        dropout_p: applied whenever it is given, in training or not, as PyTorch does.
        is_causal: aligned to the top left. Not beside attn_mask.
        enable_gqa: Hq may be a multiple of H.

    Returns:
        (..., Hq, L, Ev). Rows that see no key give 0.

    Raises:
        ValueError, TypeError: for what PyTorch refuses too, and for nested tensors (`tilewise.attention_packed` takes
        sequences of many lengths). NotImplementedError: as `tilewise.attention`.

    >>> import torch
    >>> from tilewise.integrations import sdpa
    >>> q, k, v = torch.randn(3, 2, 4, 10, 16)
    >>> o = sdpa.scaled_dot_product_attention(q, k, v, is_causal=True)
    >>> torch.testing.assert_close(o, torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True))
    """
    mask: Any = None
    bias = None
    if is_causal:
        if attn_mask is not None:
            raise ValueError("attn_mask and is_causal are given: only one of them may be")
        mask = TOP_LEFT
    elif isinstance(attn_mask, CausalBias):
        mask = TOP_LEFT if attn_mask.variant == CausalVariant.UPPER_LEFT else causal
    elif attn_mask is not None:
        mask, bias = (attn_mask, None) if attn_mask.dtype is torch.bool else (None, attn_mask)
    if query.is_nested or key.is_nested or value.is_nested:
        raise ValueError("nested tensors are not taken: pass their values and offsets to tilewise.attention_packed")
    shape = query.shape
    if query.dim() == 4 and shape[:-2] == key.shape[:-2] == value.shape[:-2]:
        return attention(query, key, value, mask=mask, bias=bias, scale=scale, dropout_p=dropout_p)
    q, k, v, leading = _four_d(query, key, value, enable_gqa)
    if mask is attn_mask:
        mask = _leading(mask, leading)
    o = attention(q, k, v, mask=mask, bias=_leading(bias, leading), scale=scale, dropout_p=dropout_p)
    return o.reshape(*leading, *o.shape[-2:])


def _four_d(q: Tensor, k: Tensor, v: Tensor, grouped: bool) -> tuple[Tensor, Tensor, Tensor, tuple[int, ...]]:
    """q, k and v of any number of dimensions as (B, H, S, D), and the dimensions that the output has before (L, Ev)."""
    for name, x in (("query", q), ("key", k), ("value", v)):
        if x.dim() < 2:
            raise ValueError(f"{name} is {tuple(x.shape)}: it must have at least two dimensions, (..., S, D)")
    without_heads = max(q.dim(), k.dim(), v.dim()) == 2
    q, k, v = (x if x.dim() > 2 else x[None] for x in (q, k, v))
    heads = [x.shape[-3] for x in (q, k, v)]
    most = heads[0] if grouped else max(heads)
    if not all(n == most or (n > 0 and most % n == 0 if grouped else n == 1) for n in heads):
        hint = "" if grouped else "; enable_gqa=True is for fewer heads of key and value"
        raise ValueError(f"query has {heads[0]} heads, key {heads[1]}, value {heads[2]}: they do not broadcast{hint}")
    if heads[0] < most:
        q = q.expand(*q.shape[:-3], most, *q.shape[-2:])
    if heads[1] != heads[2]:  # rare: both are given the query's
        k, v = (x.repeat_interleave(most // x.shape[-3], -3) for x in (k, v))
    batch = torch.broadcast_shapes(q.shape[:-3], k.shape[:-3], v.shape[:-3])
    q, k, v = (x.expand(*batch, *x.shape[-3:]).reshape(batch.numel(), *x.shape[-3:]) for x in (q, k, v))
    return q, k, v, () if without_heads else (*batch, most)


def _leading(mask: Tensor | None, leading: tuple[int, ...]) -> Tensor | None:
    """A mask for (*leading, L, S) as one for (B, H, L, S)."""
    if mask is None or mask.dim() <= 3:
        return mask
    if mask.shape[:-3].numel() > 1 and mask.dim() - 2 <= len(leading):
        mask = mask.expand(*leading[:-1], *mask.shape[-3:])
    return mask.reshape(mask.shape[:-3].numel(), *mask.shape[-3:])  # of another size it is refused, as any mask is


# ---- on and off -----------------------------------------------------------------------------------------------------


class _Replaced(TorchFunctionMode):
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is ORIGINAL:
            return scaled_dot_product_attention(*args, **(kwargs or {}))
        return func(*args, **(kwargs or {}))


@contextlib.contextmanager
def replaced() -> Iterator[None]:
    """Within it `scaled_dot_product_attention` runs on tilewise, for this thread and the backwards that it starts.

    >>> import torch, tilewise
    >>> from tilewise.integrations import sdpa
    >>> q = torch.randn(1, 2, 5, 8)
    >>> with sdpa.replaced():
    ...     o = torch.nn.functional.scaled_dot_product_attention(q, q, q)
    >>> torch.equal(o, tilewise.attention(q, q, q))
    True
    """
    with _Replaced():
        yield


def enable() -> None:
    """From now on `torch.nn.functional.scaled_dot_product_attention` is tilewise's, in all threads, until `disable()`.

    Code that took the function out of the module earlier keeps PyTorch's: for it there is `replaced()`. So do the fused
    inference paths of `torch.nn.TransformerEncoderLayer`, which do not call it.
    """
    # PyTorch lists once which functions modes can catch, and torch.compile asks the list: it must have the old one.
    torch.overrides.get_overridable_functions()
    torch.nn.functional.scaled_dot_product_attention = scaled_dot_product_attention


def disable() -> None:
    """PyTorch's own function again. Nothing, if it is there already."""
    if torch.nn.functional.scaled_dot_product_attention is scaled_dot_product_attention:
        torch.nn.functional.scaled_dot_product_attention = ORIGINAL
