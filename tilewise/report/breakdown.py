"""Where standard attention's time goes, step by step, beside the same in one piece: the paper's figure 1, right."""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from .. import api
from ..mask import causal
from .measure import one_thread

DROPOUT = 0.1
STEPS = ("matmul", "mask", "softmax", "dropout")


@dataclass(frozen=True, slots=True)
class Breakdown:
    """Seconds of a causal forward. steps: of standard attention, both matmuls (and the scaling) in one.

    tilewise: the same function. plain: without dropout, which on a CPU is most of the work: a hash for each pair.
    """

    where: str
    shape: tuple[int, int, int, int]  # batch, heads, N, d
    dtype: str
    steps: dict[str, float]
    tilewise: float
    plain: float

    @property
    def standard(self) -> float:
        return sum(self.steps.values())


def measure(device: str | None = None) -> Breakdown:
    """On the present GPU the paper's case, GPT-2 medium in fp16; on a CPU a small one, on one thread."""
    device = device or ("cuda" if torch.cuda.is_available() else "cpu")
    if device == "cuda":
        return of((64, 16, 1024, 64), torch.float16, device)
    with one_thread():
        return of((1, 8, 1024, 64), torch.float32, device)


def of(shape: tuple[int, int, int, int], dtype: torch.dtype, device: str) -> Breakdown:
    q, k, v = (torch.randn(shape, dtype=dtype, device=device) for _ in range(3))
    N, d = shape[2:]
    hidden = torch.ones(N, N, dtype=torch.bool, device=device).triu(1)
    S = (q / math.sqrt(d)) @ k.mT
    masked = S.masked_fill(hidden, -math.inf)
    P = torch.softmax(masked, -1)

    def attend(dropout_p: float) -> Callable[[], Tensor]:
        return lambda: api.attention(q, k, v, mask=causal, dropout_p=dropout_p, seed=0)

    first, second = seconds(lambda: (q / math.sqrt(d)) @ k.mT, device), seconds(lambda: P @ v, device)
    steps = {
        "matmul": first + second,
        "mask": seconds(lambda: S.masked_fill(hidden, -math.inf), device),
        "softmax": seconds(lambda: torch.softmax(masked, -1), device),
        "dropout": seconds(lambda: F.dropout(P, DROPOUT), device),
    }
    where = torch.cuda.get_device_name() if device == "cuda" else "one CPU thread"
    ours = seconds(attend(DROPOUT), device), seconds(attend(0.0), device)
    return Breakdown(where, shape, str(dtype).removeprefix("torch."), steps, *ours)


def seconds(call: Callable[[], object], device: str, runs: int = 5) -> float:
    """The median of some runs, after one that does not count. On a GPU: of its own clock, between two events."""
    call()
    if device != "cuda":
        taken = []
        for _ in range(runs):
            start = time.perf_counter()
            call()
            taken.append(time.perf_counter() - start)
        return statistics.median(taken)
    pairs = [(torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)) for _ in range(runs)]
    for before, after in pairs:
        before.record()
        call()
        after.record()
    torch.cuda.synchronize()
    return statistics.median(before.elapsed_time(after) for before, after in pairs) / 1e3
