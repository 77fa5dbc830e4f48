"""What is measured: pairs of calls, ours and the peer's, on the same tensors, and the ratio that we mean to reach."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

import tilewise
from tilewise import Band, BlockMask, causal

Calls = tuple[Callable[[], object], Callable[[], object]]


@dataclass(frozen=True)
class Case:
    """`build` returns the two calls; `goal` is the least peer time / our time that we accept."""

    name: str
    peer: str
    goal: float
    build: Callable[[], Calls]


def qkv(seq: int, dtype: torch.dtype = torch.float32, grad: bool = False) -> list[Tensor]:
    torch.manual_seed(0)
    return [torch.randn(1, 8, seq, 64, dtype=dtype).requires_grad_(grad) for _ in range(3)]


def against_sdpa(
    mask: Band | None = None, dtype: torch.dtype = torch.float32, backward: bool = False, math: bool = False
) -> Callable[[], Calls]:
    def build() -> Calls:
        q, k, v = qkv(4096, dtype=dtype, grad=backward)
        do = torch.randn_like(q)

        def run(attend: Callable[[], Tensor]) -> Callable[[], object]:
            return (lambda: torch.autograd.grad(attend(), (q, k, v), do)) if backward else attend

        def sdpa() -> Tensor:
            with sdpa_kernel(SDPBackend.MATH if math else SDPBackend.FLASH_ATTENTION):
                return F.scaled_dot_product_attention(q, k, v, is_causal=mask is not None)

        return run(lambda: tilewise.attention(q, k, v, mask=mask)), run(sdpa)

    return build


def masks(seq: int, ours: Callable[[int], object], theirs: object) -> Callable[[], Calls]:
    """Two of our own calls: what a mask saves."""

    def build() -> Calls:
        q, k, v = qkv(seq)
        mask = ours(seq)
        return lambda: tilewise.attention(q, k, v, mask=mask), lambda: tilewise.attention(q, k, v, mask=theirs)

    return build


def random_blocks(heads: int) -> Callable[[int], BlockMask]:
    """A quarter of the tiles live in every row, at random, for one head or for each."""

    def make(seq: int) -> BlockMask:
        n = seq // BlockMask.TILE
        generator = torch.Generator().manual_seed(0)
        order = torch.rand(1, heads, n, n, generator=generator).argsort(-1)
        return BlockMask.from_tiles(order < n // 4, seq, seq)

    return make


FLASH, MATH = "sdpa (C++ flash)", "sdpa (math)"
CASES = [
    Case("forward fp32 (1,8,4096,64) full", FLASH, 0.8, against_sdpa()),
    Case("forward fp32 (1,8,4096,64) causal", FLASH, 0.72, against_sdpa(causal)),
    Case("forward fp32 (1,8,4096,64) full", MATH, 2.0, against_sdpa(math=True)),
    Case("forward bf16 (1,8,4096,64) full", FLASH, 0.7, against_sdpa(dtype=torch.bfloat16)),
    Case("forward + backward fp32 (1,8,4096,64) full", FLASH, 0.72, against_sdpa(backward=True)),
    Case("Band(1024, 0) at 16384", "ours, causal", 5.0, masks(16384, lambda _: Band(1024, 0), causal)),
    Case("block mask, 25 % live, one for all heads, at 8192", "ours, full", 3.0, masks(8192, random_blocks(1), None)),
    Case("block mask, 25 % live, one a head, at 8192", "ours, full", 1.5, masks(8192, random_blocks(8), None)),
]
