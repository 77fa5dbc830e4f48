"""tilewise as attention functions of transformers' models, registered under two names, for these benchmarks only.

transformers asks for a mask function of the same name as the attention function. Without one the mask is None, and a
padded batch is wrong in silence; so each name has both. What a function cannot honour is a ValueError.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor

import tilewise
from tilewise import BlockMask

EXACT, BUTTERFLY = "tilewise", "tilewise_butterfly"
# What models hand on that says nothing which the mask does not say.
WITHOUT_EFFECT = frozenset({"position_ids", "cache_position", "use_cache"})


def register() -> None:
    from transformers import AttentionInterface, AttentionMaskInterface

    for name, mask in ((EXACT, visible), (BUTTERFLY, butterfly)):
        AttentionInterface.register(name, attend)
        AttentionMaskInterface.register(name, mask)


def attend(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | BlockMask | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    is_causal: bool | None = None,
    **others: Any,
) -> tuple[Tensor, None]:
    """q (B, Hq, L, D), k and v (B, Hkv, S, D) -> (B, L, Hq, D). No mask: as the module, or is_causal, says."""
    for name, value_of in others.items():
        if name not in WITHOUT_EFFECT and value_of is not None and value_of is not False:
            raise ValueError(f"{name} is {value_of!r}: this attention function takes no {name}")
    mask: Any = attention_mask
    if mask is None:
        if is_causal is None:
            is_causal = module.is_causal  # an AttributeError is right: nobody has said which it is
        q_len, k_len = query.shape[2], key.shape[2]
        if is_causal and 1 < q_len != k_len:
            raise ValueError(f"no mask for {q_len} queries of {k_len} keys: which of the keys come before them?")
        mask = tilewise.causal if is_causal else None
    elif isinstance(mask, Tensor) and mask.dtype is not torch.bool:
        raise ValueError(f"attention_mask is {mask.dtype}: it must be boolean, True where visible, or a BlockMask")
    o = tilewise.attention(query, key, value, mask=mask, scale=scaling, dropout_p=dropout)
    return o.transpose(1, 2).contiguous(), None


def visible(**arguments: Any) -> Tensor | None:
    """None where all of a sequence, or all before a row, is visible; else the boolean mask that "sdpa" would take."""
    from transformers.masking_utils import sdpa_mask

    return sdpa_mask(**arguments)


def butterfly(
    *, q_length: int, kv_length: int, mask_function: Any, attention_mask: Tensor | None, device: Any, **others: Any
) -> BlockMask:
    """In place of full attention, and of nothing else."""
    from transformers.masking_utils import bidirectional_mask_function

    if attention_mask is not None:
        raise ValueError("attention_mask is given: the butterfly takes no padding")
    if mask_function is not bidirectional_mask_function:
        raise ValueError("the model has a mask of its own, causal for one: the butterfly is for full attention only")
    return _butterfly(q_length, kv_length, str(device))


@functools.cache  # a BlockMask is built outside the hot path
def _butterfly(q_len: int, k_len: int, device: str) -> BlockMask:
    return BlockMask.butterfly(q_len, k_len, device)
