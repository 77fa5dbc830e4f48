"""From a part of the sequence and all heads to the whole sequence and a part of the heads, and back: all-to-all.

Attention of different heads has nothing to do with each other. So n ranks exchange their parts: each gets the whole
sequence of Hq / n heads, attends to it as one device would, and gives each rank its rows of o back. Every rank sends (n
- 1) / n of its q, k, v and o, whatever n is; nothing is computed meanwhile.

Source: Jacobs et al., "DeepSpeed Ulysses", 2023 (arXiv 2309.14509).
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from .agree import agreement


def check_heads(ranks: int, heads: int, kv_heads: int) -> None:
    """ValueError where the heads cannot be dealt out."""
    if heads % ranks or (kv_heads % ranks and ranks % max(kv_heads, 1)):
        raise ValueError(
            f"q has {heads} heads, k has {kv_heads}: over {ranks} ranks of `ulysses` the first must be a multiple of "
            "these, the other a multiple or a divisor"
        )


def by_heads(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    """(B, H / n, n S, D) from each rank's (B, H, S, D): this rank's heads, all ranks' rows in the order of ranks.

    Of H < n heads each is had by n / H ranks.
    """
    ranks, heads = dist.get_world_size(group), x.shape[1]
    if heads < ranks:
        x = x.repeat_interleave(ranks // heads, 1)
    return ToHeads.apply(x, group)


def by_rows(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    """(B, n H, S / n, D) from each rank's (B, H, S, D): the way back."""
    return ToRows.apply(x, group)


# Whichever way, the first dimension of what is sent is the receiver's, and of what has come the sender's. The others
# are ordered so that the one which the senders' parts extend comes next, and what has come is a view of the result.


def _to_heads(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    ranks, h = dist.get_world_size(group), x.shape[1]
    sent = x.unflatten(1, (ranks, h // ranks))
    came = _exchanged(sent.permute(1, 3, 0, 2, 4), group)  # (n, S, B, H / n, D)
    return came.flatten(0, 1).permute(1, 2, 0, 3)


def _to_rows(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    ranks, s = dist.get_world_size(group), x.shape[2]
    sent = x.unflatten(2, (ranks, s // ranks))
    came = _exchanged(sent.permute(2, 1, 0, 3, 4), group)  # (n, H, B, S / n, D)
    return came.flatten(0, 1).permute(1, 0, 2, 3)


def _exchanged(sent: Tensor, group: dist.ProcessGroup) -> Tensor:
    sent = sent.contiguous()
    came = torch.empty_like(sent)
    if sent.numel():
        try:
            dist.all_to_all_single(came, sent, group=group)
        except RuntimeError as error:
            others = [rank for rank in range(dist.get_world_size(group)) if rank != dist.get_rank(group)]
            raise agreement(group, sent.device).lost(others, error) from error
    return came


class ToHeads(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        return _to_heads(x, group)

    @staticmethod
    def backward(ctx: Any, dx: Tensor) -> tuple[Tensor, None]:
        return ToRows.apply(dx, ctx.group, False), None


class ToRows(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: dist.ProcessGroup, meet: bool = True) -> Tensor:
        ctx.group, ctx.meet = group, meet
        return _to_rows(x, group)

    @staticmethod
    def backward(ctx: Any, dx: Tensor) -> tuple[Tensor, None, None]:
        if ctx.meet:  # the backward begins here
            agreement(ctx.group, dx.device).reach({"the pass": "backward", "o": f"{tuple(dx.shape)}"})
        return ToHeads.apply(dx, ctx.group), None, None
