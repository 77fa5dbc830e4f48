"""tilewise behind PyTorch's own switch for flash attention: `register()`, then `activate_flash_attention_impl`.

The switch replaces the operators under `scaled_dot_product_attention`'s flash backend, for all threads, compiled graphs
and C++ callers, and for `torch.distributed`'s context parallelism, which rings over them. PyTorch's gates stay: on a
CUDA device fp16 or bf16, no mask, one head size of at most 256; and on Hopper GPUs cuDNN comes first, unless
`torch.nn.attention.sdpa_kernel(SDPBackend.FLASH_ATTENTION)` says otherwise. `sdpa.py` has no gates.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.library import Library
from torch.nn.attention import register_flash_attention_impl

from ..dispatch import choose
from ..mask import Band
from ..problem import Problem
from .flash_attn.flash_attn_interface import band

NAME = "tilewise"


class _Handle:
    """Keeps the operators replaced until PyTorch removes it."""

    def __init__(self, device: str) -> None:
        self.library: Library | None = Library("aten", "IMPL")
        for name, function in (
            ("_scaled_dot_product_flash_attention", _sdpa_forward),
            ("_scaled_dot_product_flash_attention_backward", _sdpa_backward),
            ("_flash_attention_forward", _flash_forward),
            ("_flash_attention_backward", _flash_backward),
            ("_flash_attention_forward_no_dropout_inplace", _flash_forward_inplace),
        ):
            if hasattr(torch.ops.aten, name):  # the last one is younger than the others
                self.library.impl(name, function, device)

    def remove(self) -> None:
        if self.library is not None:
            self.library._destroy()
            self.library = None


def register(device: str = "CUDA") -> None:
    """Gives PyTorch the implementation "tilewise". `torch.nn.attention.activate_flash_attention_impl` switches it on.

    `torch.nn.attention.restore_flash_attention_impl()` switches it off. Before that PyTorch's own runs as ever.

    Args:
        device: the dispatch key whose operators are replaced. PyTorch calls them on "CUDA".

    >>> import torch
    >>> from tilewise.integrations import flash_impl
    >>> flash_impl.register()
    >>> "tilewise" in torch.nn.attention.list_flash_attention_impls()
    True
    """
    register_flash_attention_impl(NAME, register_fn=lambda: _Handle(device))


def _forward(
    q: Tensor, k: Tensor, v: Tensor, cu_q: Tensor | None, cu_k: Tensor | None, dropout_p: float, scale: float | None,
    band: Band, k_lens: Tensor | None = None, slopes: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """(o, lse, the dropout's seed as PyTorch keeps it: uint64 (2,)) of (B, H, S, D), or of packed (T, H, D)."""
    with torch.no_grad():  # these operators are below autograd
        state = torch.empty(2, dtype=torch.int64, device=q.device)
        if dropout_p > 0:
            state.random_()
        problem, aux = Problem.of(
            q, k, v, mask=band, scale=scale, dropout_p=dropout_p, seed=state[0], cu_seqlens_q=cu_q, cu_seqlens_k=cu_k,
            k_lens=k_lens, alibi_slopes=slopes,
        )  # fmt: skip
        o, lse = choose(problem).forward(problem, q, k, v, aux)
        return o, lse, state.view(torch.uint64)


def _backward(
    do: Tensor, q: Tensor, k: Tensor, v: Tensor, o: Tensor, lse: Tensor, cu_q: Tensor | None, cu_k: Tensor | None,
    dropout_p: float, scale: float | None, band: Band, state: Tensor,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    with torch.no_grad():
        seed = state.view(torch.int64).reshape(-1)[:1] if dropout_p > 0 else None
        problem, aux = Problem.of(
            q, k, v, mask=band, scale=scale, dropout_p=dropout_p, seed=seed, cu_seqlens_q=cu_q, cu_seqlens_k=cu_k
        )
        grads = choose(problem).backward(problem, do, None, q, k, v, o, lse, aux)
        return grads.dq, grads.dk, grads.dv


def _like(x: Tensor, t: Tensor) -> Tensor:
    """x with t's strides, which compiled graphs rely on."""
    return x if x.stride() == t.stride() or x.shape != t.shape else torch.empty_like(t).copy_(x)


def _band(is_causal: bool, left: int | None = None, right: int | None = None) -> Band:
    """The operators' windows are flash_attn's, where None is no bound either."""
    return band(is_causal, (-1 if left is None else left, -1 if right is None else right))


def _refuse(**given: Any) -> None:
    for name, value in given.items():
        if value:
            raise ValueError(f"{name} is given: tilewise's flash attention for PyTorch takes no {name}")


# ---- the operators, as aten declares them ---------------------------------------------------------------------------


def _sdpa_forward(
    query: Tensor, key: Tensor, value: Tensor, dropout_p: float = 0.0, is_causal: bool = False,
    return_debug_mask: bool = False, *, scale: float | None = None,
) -> tuple[Any, ...]:  # fmt: skip
    """(B, H, S, D) -> (o, lse (B, H, S), no cu_seqlens, the lengths, the seed, an unused tensor, no debug mask)."""
    _refuse(return_debug_mask=return_debug_mask)
    o, lse, state = _forward(query, key, value, None, None, dropout_p, scale, _band(is_causal))
    return _like(o, query), lse, None, None, query.shape[2], key.shape[2], state, _unused(query), query.new_empty(0)


def _sdpa_backward(
    grad_out: Tensor, query: Tensor, key: Tensor, value: Tensor, out: Tensor, logsumexp: Tensor, cum_seq_q: Any,
    cum_seq_k: Any, max_q: int, max_k: int, dropout_p: float, is_causal: bool, philox_seed: Tensor,
    philox_offset: Tensor, *, scale: float | None = None,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    dq, dk, dv = _backward(
        grad_out, query, key, value, out, logsumexp, None, None, dropout_p, scale, _band(is_causal), philox_seed
    )
    return _like(dq, query), _like(dk, key), _like(dv, value)


def _flash_forward(
    query: Tensor, key: Tensor, value: Tensor, cum_seq_q: Tensor | None, cum_seq_k: Tensor | None, max_q: int,
    max_k: int, dropout_p: float, is_causal: bool, return_debug_mask: bool, *, scale: float | None = None,
    window_size_left: int | None = None, window_size_right: int | None = None, seqused_k: Tensor | None = None,
    alibi_slopes: Tensor | None = None, block_table: Tensor | None = None, num_splits: int | None = None,
) -> tuple[Tensor, ...]:  # fmt: skip
    """(B, S, H, D), or packed (T, H, D) with cum_seq -> (o, lse, the seed, an unused tensor, no debug mask)."""
    _refuse(return_debug_mask=return_debug_mask, block_table=block_table is not None)
    mask = _band(is_causal, window_size_left, window_size_right)
    q, k, v = _heads_first(cum_seq_q, query, key, value)
    o, lse, state = _forward(q, k, v, cum_seq_q, cum_seq_k, dropout_p, scale, mask, seqused_k, alibi_slopes)
    (o,) = _heads_first(cum_seq_q, o)
    return _like(o, query), lse, state, _unused(query), query.new_empty(0)


def _flash_forward_inplace(out: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    """The same into `out`, for callers that want no gradient -> lse."""
    o, lse, *_ = _flash_forward(*args, **kwargs)
    out.copy_(o)
    return lse


def _flash_backward(
    grad_out: Tensor, query: Tensor, key: Tensor, value: Tensor, out: Tensor, logsumexp: Tensor,
    cum_seq_q: Tensor | None, cum_seq_k: Tensor | None, max_q: int, max_k: int, dropout_p: float, is_causal: bool,
    rng_state: Tensor, unused: Tensor, *, scale: float | None = None, window_size_left: int | None = None,
    window_size_right: int | None = None,
) -> tuple[Tensor, ...]:  # fmt: skip
    mask = _band(is_causal, window_size_left, window_size_right)
    do, q, k, v, o = _heads_first(cum_seq_q, grad_out, query, key, value, out)
    grads = _backward(do, q, k, v, o, logsumexp, cum_seq_q, cum_seq_k, dropout_p, scale, mask, rng_state)
    return tuple(_like(g, x) for g, x in zip(_heads_first(cum_seq_q, *grads), (query, key, value), strict=True))


def _heads_first(cu: Tensor | None, *tensors: Tensor) -> tuple[Tensor, ...]:
    """(B, S, H, D) as (B, H, S, D), and back; packed tensors as they are."""
    return tensors if cu is not None else tuple(x.transpose(1, 2) for x in tensors)


def _unused(q: Tensor) -> Tensor:
    return torch.empty((), dtype=torch.uint64, device=q.device)
