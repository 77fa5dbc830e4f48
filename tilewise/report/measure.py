"""Time, peak memory and counted bytes of attention, forward and backward, by standard attention and by tilewise."""

from __future__ import annotations

import json
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor
from torch.profiler import ProfilerActivity, profile

from .. import api
from ..algorithm import hbm, tiled, tiling
from ..algorithm.standard import Standard
from ..examples.char_gpt import AttentionFunction, standard_attention
from ..mask import causal
from ..problem import Problem

HEADS, HEAD_DIM = 2, 64


@dataclass(frozen=True, slots=True)
class Measurement:
    """One attention call, forward and backward. peak: bytes beyond the inputs, outputs and gradients included."""

    seconds: float
    peak: int
    hbm: int


@contextmanager
def one_thread() -> Iterator[None]:
    """torch computes on one CPU thread inside.

    An operation's threads wait for the last of them by spinning. Where another process wants one of their cores, that
    takes 15 times as long as one thread alone (measured), and a comparison is of luck.
    """
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


def tilewise_attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """tilewise as an attention function of the example: causal, the backend that it chooses itself."""
    return api.attention(q, k, v, mask=causal)


def measure(length: int, device: str) -> tuple[Measurement, Measurement]:
    """(standard, tilewise) for causal self-attention of `length` tokens: batch 1, 2 heads of 64, fp32.

    Times are medians of runs by turns, as many as fit into a second or so (1 to 9), after one that does not count.
    """
    calls = [_forward_and_backward(attend, length, device) for attend in (standard_attention, tilewise_attention)]
    peaks = [peak_memory(call, device) for call in calls]  # the first run of each, too
    times: list[list[float]] = [[], []]
    start = time.perf_counter()
    while not times[0] or (len(times[0]) < 9 and time.perf_counter() - start < 1.0):
        for taken, call in zip(times, calls, strict=True):
            taken.append(_time(call, device))
    counts = hbm_bytes(length)
    standard, ours = (Measurement(statistics.median(t), p, n) for t, p, n in zip(times, peaks, counts, strict=True))
    return standard, ours


def _forward_and_backward(attend: AttentionFunction, length: int, device: str) -> Callable[[], None]:
    draw = torch.Generator().manual_seed(length)
    q, k, v, do = (torch.randn(1, HEADS, length, HEAD_DIM, generator=draw).to(device) for _ in range(4))
    inputs = [x.requires_grad_() for x in (q, k, v)]

    def call() -> None:
        torch.autograd.grad(attend(*inputs), inputs, do)

    return call


def _time(call: Callable[[], None], device: str) -> float:
    if device == "cuda":
        torch.cuda.synchronize()
    start = time.perf_counter()
    call()
    if device == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter() - start


def peak_memory(call: Callable[[], object], device: str) -> int:
    """The most bytes of tensors that were alive at once during `call`, beyond those alive before it.

    On a GPU torch keeps this number. On the CPU the profiler records every allocation and release; what libraries
    keep for themselves (a matmul's packed operands, some MB) is in neither.

    >>> peak_memory(lambda: torch.ones(1000) + torch.ones(1000), "cpu")            # three tensors of 4000 bytes
    12000
    """
    if device == "cuda":
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        call()
        return torch.cuda.max_memory_allocated() - before
    # Read when the profiler first starts: above its highest level, it does not announce its start and end on stderr.
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as record:
        call()
    with tempfile.TemporaryDirectory() as folder:
        trace = Path(folder) / "trace.json"
        record.export_chrome_trace(str(trace))
        events = json.loads(trace.read_text())["traceEvents"]
    return max((event["args"]["Total Allocated"] for event in events if event["name"] == "[memory]"), default=0)


def hbm_bytes(length: int) -> tuple[int, int]:
    """(standard, tilewise): bytes that the algorithms load and store, counted while their own code runs.

    It runs on meta tensors, which have shapes but no contents, so that counting costs nothing at any length. "Chip"
    is the CPU's cache here, as large as the tiles of the backend "tiled"; standard attention has tiles of that size.

    >>> standard, ours = hbm_bytes(4096)
    >>> standard > 20 * ours
    True
    """
    q, k, v, do = (torch.empty(1, HEADS, length, HEAD_DIM, device="meta") for _ in range(4))
    problem, aux = Problem.of(q, k, v, mask=causal)
    standard = Standard(scale=problem.scale, blocks=tiling.cpu_tile(problem), band=causal)
    with hbm.counting() as by_standard:
        o, P, P_dropped = standard.forward(q, k, v)
        standard.backward(do, q, k, v, P, P_dropped)
    with hbm.counting() as by_tiles:
        o, lse = tiled.forward(problem, q, k, v, aux)
        tiled.backward(problem, do, None, q, k, v, o, lse, aux)
    return by_standard.bytes, by_tiles.bytes
