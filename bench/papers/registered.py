"""tilewise in models of transformers, under two names: as it is and, for these benchmarks only, as a butterfly."""

from __future__ import annotations

import functools
from typing import Any

from torch import Tensor

from tilewise import BlockMask

EXACT, BUTTERFLY = "tilewise", "tilewise_butterfly"


def register() -> None:
    from transformers import AttentionInterface, AttentionMaskInterface

    from tilewise.integrations import transformers as integration

    integration.register(EXACT)
    AttentionInterface.register(BUTTERFLY, integration.attention_function)
    AttentionMaskInterface.register(BUTTERFLY, butterfly)


def butterfly(
    *, q_length: int, kv_length: int, mask_function: Any, attention_mask: Tensor | None, device: Any, **others: Any
) -> Any:
    """In place of full attention, and of nothing else."""
    from transformers.masking_utils import bidirectional_mask_function

    from tilewise.integrations.transformers_mask import Visible

    if attention_mask is not None:
        raise ValueError("attention_mask is given: the butterfly takes no padding")
    if mask_function is not bidirectional_mask_function:
        raise ValueError("the model has a mask of its own, causal for one: the butterfly is for full attention only")
    return Visible(_butterfly(q_length, kv_length, str(device)))


@functools.cache  # a BlockMask is built outside the hot path
def _butterfly(q_len: int, k_len: int, device: str) -> BlockMask:
    return BlockMask.butterfly(q_len, k_len, device)
