"""Figure 2 (left) of FlashAttention: the attention of GPT-2 medium, (64, 16, 1024, 64), forward and backward."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from tilewise import causal
from tilewise.algorithm.io_model import Cost, Sizes, compare

from ..counted import standard_attention
from ..gpu_cases import CUDNN, FA2, OPERATIONS, Attend, Built, Cell, Peer, by_pytorch, compared, draw, ours, pairs
from ..rows import Row
from .case import DIRECTION, Case, Kernel, Setting

SUBJECT = "GPT-2 medium attention"
STANDARD = "standard"
BATCH, HEADS, SEQ, D = 64, 16, 1024, 64
ON_CHIP = 51200  # elements of 16 bits in 100 KB, as the paper has it


def standard(is_causal: bool = False, dropout: bool = False) -> Attend:
    """Plain torch, a kernel a line: S and P lie in memory."""

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        hidden = torch.ones(q.shape[-2], k.shape[-2], device=q.device, dtype=torch.bool).triu(1) if is_causal else None
        return standard_attention(q, k, v, hidden, dropout)

    return attend


def cases(setting: Setting) -> list[Case]:
    return [case(setting, dropout) for dropout in (0.1, 0.0)]


def case(setting: Setting, dropout: float) -> Case:
    """With dropout nobody draws the same numbers, so results are not compared."""
    batch, heads, seq = (2, 2, 64) if setting.tiny else (BATCH, HEADS, SEQ)
    same = not dropout
    if dropout:
        peers = (
            Peer(STANDARD, ">= 9", same_result=same),
            Peer(FA2, ">= 0.87", same_result=same, note="at most 1.15 of its time"),
            Peer(CUDNN, same_result=same),
        )
    else:
        peers = (Peer(STANDARD), Peer(FA2, ">= 1.0"), Peer(CUDNN, ">= 1.0"))
    options: dict[str, Any] = {"mask": causal, "dropout_p": dropout}

    def build() -> Built:
        def attend_of(peer: Peer) -> Callable[[], Attend]:
            if peer.name == STANDARD:
                return lambda: standard(True, bool(dropout))
            return lambda: by_pytorch(peer.name, True, dropout)

        tensors = draw(setting, batch, heads, seq, D, dtype="fp16")
        return compared(ours(setting, **options), attend_of, peers, tensors, DIRECTION)

    flops = OPERATIONS[DIRECTION] * batch * heads * D * pairs("causal", seq)
    row = Row(SUBJECT, DIRECTION, "fp16", D, f"causal, dropout {dropout}" if dropout else "causal", seq)
    return Case(Cell(row, peers, flops, build), (Kernel("fp16", seq, "causal", dropout),))


def model() -> dict[str, Cost]:
    """Flops and bytes by the closed forms, with a mask that spares no tile, and dropout: the paper's setting."""
    return compare(Sizes(SEQ, SEQ, D, D, batch=BATCH, heads=HEADS), ON_CHIP, masked=True, dropout=True)
