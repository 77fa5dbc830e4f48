"""On what the tests of this folder run: a CUDA GPU and "triton"; to try the tests themselves, the CPU and "tiled".
What is about "hopper" needs a Hopper GPU.

python -m tests.gpu                                 on a machine with an NVIDIA GPU: all of them, in several processes
python -m pytest tests/gpu                          all in one, or some of them
TILEWISE_REHEARSE=1 python -m pytest tests/gpu      anywhere: a few of the cases, on "tiled"
"""

from __future__ import annotations

import os
from dataclasses import replace
from typing import Any

import torch
from hopper_cases import PREFIX
from torch import Tensor

from tilewise import BlockMask, Masked

REHEARSAL = os.environ.get("TILEWISE_REHEARSE") == "1"
DEVICE, BACKEND = ("cpu", "tiled") if REHEARSAL else ("cuda", "triton")
EVERY = 14 if REHEARSAL else 1  # of so many cases one is run
PROCESSES = 2 if REHEARSAL else max(1, min(16, os.cpu_count() or 1) - 1)  # of a pool: one core is the other tests'
COMPILED = "TILEWISE_COMPILED"  # in the environment: what the other tests want compiled is so
WHY_NOT = (
    None if REHEARSAL or torch.cuda.is_available() else "needs a CUDA GPU; TILEWISE_REHEARSE=1 tries the tests without"
)
WHY_NOT_HOPPER = WHY_NOT or (
    None if REHEARSAL or torch.cuda.get_device_capability() == (9, 0) else "needs a Hopper GPU, sm90"
)


def backend_of(case_name: str) -> str:
    """Which backend a case is run on: its name says so."""
    return "hopper" if case_name.startswith(PREFIX) and not REHEARSAL else BACKEND


def moved(x: Any, device: str = DEVICE) -> Any:
    """The argument of a call, or a dictionary of them, on a device: a tensor's strides, offset and sharing stay."""
    if isinstance(x, dict):
        return {name: moved(value, device) for name, value in x.items()}
    if isinstance(x, Tensor):
        storage = torch.empty(0, dtype=torch.uint8, device=device).set_(x.untyped_storage().to(device=device))
        return torch.empty(0, dtype=x.dtype, device=device).set_(
            storage.untyped_storage(), x.storage_offset(), x.shape, x.stride()
        )
    if isinstance(x, BlockMask):
        return x.to(device)
    if isinstance(x, Masked):
        return replace(x, mask=moved(x.mask, device))
    return x


def set_up() -> None:
    """What every process does first: true fp32 products, and fp16 sums in fp32, for the yardstick's sake."""
    torch.set_num_threads(1)
    torch.backends.cuda.matmul.allow_tf32 = False
    torch.backends.cuda.matmul.allow_fp16_reduced_precision_reduction = False
    torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = False
