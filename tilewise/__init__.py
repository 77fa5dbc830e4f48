"""Exact attention for PyTorch, tile by tile: FlashAttention in readable Python.

>>> import torch, tilewise
>>> q = torch.randn(2, 8, 128, 64)
>>> tilewise.attention(q, q, q, mask=tilewise.causal).shape
torch.Size([2, 8, 128, 64])
"""

from .api import attention, attention_cached, attention_packed
from .block_mask import BlockMask
from .cache import KVCache, OutOfPages, PagePool
from .dispatch import explain
from .mask import Band, Masked, causal, sliding_window
from .problem import Aux, Grads, Layout, Problem, checked
from .problem_cached import Rotary

__version__ = "0.1.0"

__all__ = [
    "Aux",
    "Band",
    "BlockMask",
    "Grads",
    "KVCache",
    "Layout",
    "Masked",
    "OutOfPages",
    "PagePool",
    "Problem",
    "Rotary",
    "attention",
    "attention_cached",
    "attention_packed",
    "causal",
    "checked",
    "explain",
    "sliding_window",
]
