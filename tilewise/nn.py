"""Modules: `MultiheadAttention`, torch's, on tilewise."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from . import attention
from .mask import Band

TOP_LEFT = Band(None, 0, "top_left")


class MultiheadAttention(torch.nn.MultiheadAttention):
    """`torch.nn.MultiheadAttention` in linear memory: its arguments, parameters, state dict and results.

    Two things differ. The weights are not formed unless they are asked for: `need_weights` is False by default. With
    need_weights=True torch's own forward runs, whose memory is quadratic. And a row of which nothing is visible gives
    what the output projection makes of 0, where torch's gives NaN.

    >>> import torch, tilewise.nn
    >>> ours, x = tilewise.nn.MultiheadAttention(16, 2, batch_first=True), torch.randn(3, 5, 16)
    >>> theirs = torch.nn.MultiheadAttention(16, 2, batch_first=True)
    >>> theirs.load_state_dict(ours.state_dict())
    <All keys matched successfully>
    >>> torch.testing.assert_close(ours(x, x, x)[0], theirs(x, x, x)[0])
    """

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        key_padding_mask: Tensor | None = None,
        need_weights: bool = False,
        attn_mask: Tensor | None = None,
        average_attn_weights: bool = True,
        is_causal: bool = False,
    ) -> tuple[Tensor, Tensor | None]:
        """One layer of attention, with its projections.

        Args:
            query: (L, N, embed_dim), (N, L, embed_dim) with batch_first, or (L, embed_dim). key: (S, N, kdim) and
                value: (S, N, vdim) likewise.
            key_padding_mask: (N, S) or (S,): boolean, True where a key is to be IGNORED, or added to the scores.
            need_weights: also return the weights, by torch's own forward; average_attn_weights is about them.
            attn_mask: (L, S) or (N * num_heads, L, S): boolean, True where a pair is NOT visible, or added.
            is_causal: attn_mask is the causal mask, which then is not looked at, and may be left out.

        Returns:
            (output, of query's shape; the weights, or None).

        Raises:
            ValueError: for shapes and dtypes that do not fit, and for nested tensors.
        """
        if need_weights:
            if is_causal and attn_mask is None:  # torch's wants the mask beside its hint
                q_len, k_len = (x.shape[1 if self.batch_first and x.dim() == 3 else 0] for x in (query, key))
                attn_mask = ~TOP_LEFT.dense(q_len, k_len, device=query.device)
            return super().forward(
                query, key, value, key_padding_mask, True, attn_mask, average_attn_weights, is_causal
            )  # fmt: skip
        if query.is_nested or key.is_nested or value.is_nested:
            raise ValueError("nested tensors are not taken: pass padded ones with key_padding_mask")
        batched = query.dim() == 3
        if query.dim() not in (2, 3) or key.dim() != query.dim() or value.dim() != query.dim():
            sizes = ", ".join(str(tuple(x.shape)) for x in (query, key, value))
            raise ValueError(f"query, key and value are {sizes}: they must all be 3-D, or 2-D without a batch")
        q, k, v = self._projected(query, key, value)
        if not batched:
            q, k, v = q[None], k[None], v[None]
        elif not self.batch_first:
            q, k, v = q.transpose(0, 1), k.transpose(0, 1), v.transpose(0, 1)
        mask, bias = self._masks(key_padding_mask, attn_mask, is_causal, q.shape[0], q.shape[1], k.shape[1])
        k, v = self._with_extra_keys(k, v)
        q, k, v = (x.unflatten(-1, (self.num_heads, self.head_dim)).transpose(1, 2) for x in (q, k, v))
        o = attention(q, k, v, mask=mask, bias=bias, dropout_p=self.dropout if self.training else 0.0)
        o = o.transpose(1, 2).flatten(2)
        if not batched:
            o = o[0]
        elif not self.batch_first:
            o = o.transpose(0, 1)
        return self.out_proj(o), None

    def _projected(self, query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, ...]:
        """By the parameters as torch keeps them: one matrix of three, or three where kdim or vdim are their own."""
        linear, weight, bias = torch.nn.functional.linear, self.in_proj_weight, self.in_proj_bias
        if query is key is value and weight is not None:
            return linear(query, weight, bias).chunk(3, -1)
        weights = (self.q_proj_weight, self.k_proj_weight, self.v_proj_weight) if weight is None else weight.chunk(3)
        biases = (None,) * 3 if bias is None else bias.chunk(3)
        return tuple(linear(x, w, b) for x, w, b in zip((query, key, value), weights, biases, strict=True))

    def _with_extra_keys(self, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """k, v (N, S, E) with a learned key and one of zeros behind them, if the module has them."""
        batch, _, size = k.shape
        if self.bias_k is not None and self.bias_v is not None:
            k, v = (torch.cat([x, b.expand(batch, 1, size)], 1) for x, b in ((k, self.bias_k), (v, self.bias_v)))
        if self.add_zero_attn:
            k, v = (torch.nn.functional.pad(x, (0, 0, 0, 1)) for x in (k, v))
        return k, v

    def _masks(
        self, padding: Tensor | None, attn_mask: Tensor | None, is_causal: bool, batch: int, q_len: int, k_len: int
    ) -> tuple[Any, Tensor | None]:
        """(mask, bias) as `tilewise.attention` takes them: what is boolean hides, what is floating point is added."""
        if padding is not None:
            if padding.shape not in ((batch, k_len), (k_len,)) or (padding.dim() == 1 and batch != 1):
                raise ValueError(f"key_padding_mask is {tuple(padding.shape)}: it must be {(batch, k_len)}")
            padding = padding.reshape(batch, 1, 1, k_len)
        pairs = None if is_causal else attn_mask
        if pairs is not None:
            if pairs.shape not in ((q_len, k_len), (batch * self.num_heads, q_len, k_len)):
                want = f"{(q_len, k_len)} or {(batch * self.num_heads, q_len, k_len)}"
                raise ValueError(f"attn_mask is {tuple(pairs.shape)}: it must be {want}")
            pairs = pairs.reshape(*((batch, self.num_heads) if pairs.dim() == 3 else (1, 1)), q_len, k_len)
        extra = (self.bias_k is not None) + bool(self.add_zero_attn)  # keys behind the others, which all rows see
        if is_causal and extra:
            pairs, is_causal = ~TOP_LEFT.dense(q_len, k_len, device=self.out_proj.weight.device)[None, None], False
        mask: Any = None
        bias: Tensor | None = None
        for name, given in (("key_padding_mask", padding), ("attn_mask", pairs)):
            if given is None:
                continue
            if given.dtype is torch.bool:
                seen = torch.nn.functional.pad(~given, (0, extra), value=True) if extra else ~given
                mask = seen if mask is None else mask & seen
            elif given.is_floating_point():
                added = torch.nn.functional.pad(given, (0, extra)) if extra else given
                bias = added if bias is None else bias + added
            else:
                raise ValueError(f"{name} is {given.dtype}: it must be boolean, True where hidden, or floating point")
        if is_causal:
            mask = TOP_LEFT if mask is None else TOP_LEFT & mask
        return mask, bias
