"""Tensors to and from other ranks while the device computes.

`torch.distributed.batch_isend_irecv`: on NCCL one launch on a stream of its own, which waits for what has been launched
before it on the current stream; `wait` makes the current stream wait, and the host goes on. On gloo threads do the
work, and `wait` blocks.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from .agree import agreement


class Exchange:
    """What is sent to and received from single ranks at a time. Buffers are held until `wait`.

    Between two ranks messages arrive in the order in which they were sent: both must begin their exchanges in one
    order.
    """

    def __init__(self, group: dist.ProcessGroup, sent: list[tuple[Tensor, int]], received: list[tuple[Tensor, int]]):
        both: list[tuple[Any, Tensor, int]] = [(dist.isend, *x) for x in sent] + [(dist.irecv, *x) for x in received]
        both = [(do, x, peer) for do, x, peer in both if x.numel()]
        self.group, self.buffers = group, [x for _, x, _ in both]
        self.peers = [peer for _, _, peer in both]
        self.works: list[Any] = []
        if both:
            ops = [dist.P2POp(do, x, group=group, group_peer=peer) for do, x, peer in both]
            try:
                self.works = dist.batch_isend_irecv(ops)
            except RuntimeError as error:
                raise self._lost(self.peers, error) from error

    def wait(self) -> None:
        """RuntimeError: the rank that is gone, or did not answer in the group's time-out (on NCCL its own watchdog ends
        the process then)."""
        for n, work in enumerate(self.works):
            try:
                work.wait()
            except RuntimeError as error:
                one = len(self.works) == len(self.peers)  # on NCCL one work is that of all
                raise self._lost(self.peers[n : n + 1] if one else self.peers, error) from error
        self.works, self.buffers = [], []

    def _lost(self, peers: list[int], error: Exception) -> RuntimeError:
        return agreement(self.group, self.buffers[0].device).lost(peers, error)


class Pair(NamedTuple):
    """Two tensors (B, H, S, D) and (B, H, S, Dv) that travel as one message: k and v, or dk and dv."""

    flat: Tensor
    first: Tensor
    second: Tensor

    @classmethod
    def empty(cls, like: tuple[Tensor, Tensor], length: int) -> Pair:
        """Room for `length` keys of both."""
        shapes = [(*x.shape[:2], length, x.shape[3]) for x in like]
        sizes = [torch.Size(shape).numel() for shape in shapes]
        flat = torch.empty(sum(sizes), dtype=like[0].dtype, device=like[0].device)
        first, second = (part.view(shape) for part, shape in zip(flat.split(sizes), shapes, strict=True))
        return cls(flat, first, second)

    @classmethod
    def of(cls, first: Tensor, second: Tensor) -> Pair:
        """A copy of both."""
        pair = cls.empty((first, second), first.shape[2])
        pair.first.copy_(first)
        pair.second.copy_(second)
        return pair
