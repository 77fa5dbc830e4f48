"""How a cell is measured: device time beside peers in turn, host time, memory, the first call.

Five rounds; in each, every peer and ours in turn. A figure is the median over the rounds, a ratio the median of the
rounds' ratios: a card's clock moves from one second to the next, within a round hardly.

Device time is read from CUDA events around each call. Before a batch of calls the device sleeps for as long as the host
needs to put them all in the queue, so that no launch is waited for; between calls the L2 cache is overwritten.
"""

from __future__ import annotations

import functools
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

import tilewise

from . import gpu_cases
from .gpu_cases import DTYPES, Built, Call, Cell, Peer, backend_of
from .rows import Row
from .worker import reason

ROUNDS = 5
BATCH_MS = 25.0  # device time of one measurement, about
MOST_CALLS = 40  # of one measurement: with their kernels, events and overwrites they fit the launch queue of 1024
CYCLES_MS = 2e6  # of the device's clock in a millisecond, at most: sleep this much for one
TOLERANCE = {"bf16": 3e-2, "fp16": 1e-2, "fp32": 1e-3}  # relative RMS difference between two correct results
HOST_CALLS = 200  # a round


def facts() -> dict[str, Any]:
    import triton

    return {"device": torch.cuda.get_device_name(), "torch": torch.__version__, "triton": triton.__version__}


@functools.cache
def find(name: str, cudnn: bool) -> Cell:
    return next(cell for cell in gpu_cases.cells(cudnn=cudnn) if cell.name == name)


# --- what a worker is asked ----------------------------------------------------------------------------------------


def warm(question: tuple[str, bool]) -> None:
    """Compile what the cell will run, into the caches on disk; the peers' failures will be reported when measured."""
    cell = find(*question)
    if cell.build is None:
        LIMITS[cell.kind](cell, rehearsal=True)
        return
    built = cell.build()
    for prepare in (built.ours, *built.peers.values()):
        _attempt(prepare)
    torch.cuda.empty_cache()  # the other processes compile beside this one


def measure(question: tuple[str, bool]) -> list[Row]:
    """The cell's rows, one a peer. Raises what ours raises; what a peer raises is its row's error."""
    cell = find(*question)
    rows = compare(cell) if cell.build is not None else [LIMITS[cell.kind](cell, rehearsal=False)]
    torch.cuda.empty_cache()
    return [replace(row, **facts()).judged() for row in rows]


# --- speed ---------------------------------------------------------------------------------------------------------


def compare(cell: Cell) -> list[Row]:
    assert cell.build is not None
    built = cell.build()
    ours = built.ours()
    result = ours()
    torch.cuda.synchronize()
    calls: dict[str, Call] = {}
    errors: dict[str, str] = {}
    for peer in cell.peers:
        call, theirs = _attempt(built.peers[peer.name])
        if call is None:
            errors[peer.name] = theirs
            continue
        calls[peer.name] = call
        if peer.same_result:
            errors[peer.name] = disagreement(result, theirs, built, TOLERANCE[cell.row.dtype])
        del theirs
    del result
    calls["ours"] = ours
    flush = overwritten()
    timers = {name: timer(call, flush) for name, call in calls.items()}
    rounds = [{name: read() / cell.calls for name, read in timers.items()} for _ in range(ROUNDS)]
    return [row_of(cell, peer, rounds, errors.get(peer.name, "")) for peer in cell.peers]


def _attempt(prepare: gpu_cases.Prepare) -> tuple[Call, Any] | tuple[None, str]:
    """(what is to be timed, its first result), or (None, why there is none)."""
    try:
        call = prepare()
        result = call()
        torch.cuda.synchronize()
    except Exception as error:  # whatever another library raises is that library's result
        return None, reason(error)
    return call, result


def overwritten() -> Tensor:
    """What is written between calls: more than an L2 cache holds."""
    return torch.empty(2**27, dtype=torch.int8, device="cuda")


def timer(call: Call, flush: Tensor) -> Callable[[], float]:
    """Reads the median device time of a call, in milliseconds. Decides here how many calls make a measurement."""
    call()
    torch.cuda.synchronize()
    start = time.perf_counter()
    call()
    host_ms = (time.perf_counter() - start) * 1e3
    torch.cuda.synchronize()
    whole_ms = (time.perf_counter() - start) * 1e3
    count = max(1, min(MOST_CALLS, int(BATCH_MS / max(whole_ms, 0.05))))

    def read() -> float:
        sleep_ms = min(40.0, 0.3 + 1.5 * count * (min(host_ms, 1.0) + 0.03))
        marks = [(torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)) for _ in range(count)]
        torch.cuda._sleep(int(sleep_ms * CYCLES_MS))
        for before, after in marks:
            flush.zero_()
            before.record()
            call()
            after.record()
        torch.cuda.synchronize()
        return statistics.median(before.elapsed_time(after) for before, after in marks)

    return read


def row_of(cell: Cell, peer: Peer, rounds: list[dict[str, float]], error: str = "") -> Row:
    """A cell's row beside one peer, from the milliseconds of each round: {"ours": ..., the peers' names: ...}."""
    ours = statistics.median(times["ours"] for times in rounds)
    row = replace(
        cell.row, peer=peer.name, goal=peer.goal, note=peer.note, error=error,
        ours=digits(ours), ours_tflops=digits(cell.flops / ours * 1e-9),
    )  # fmt: skip
    if any(peer.name not in times for times in rounds):
        return row
    theirs = statistics.median(times[peer.name] for times in rounds)
    ratios = [(peer.factor * times[peer.name] + peer.slack_ms) / times["ours"] for times in rounds]
    flops = cell.flops if peer.flops is None else peer.flops
    return replace(
        row, theirs=digits(theirs), their_tflops=digits(flops / theirs * 1e-9),
        ratio=round(statistics.median(ratios), 3), ratio_min=round(min(ratios), 3), ratio_max=round(max(ratios), 3),
    )  # fmt: skip


def disagreement(ours: Any, theirs: Any, built: Built, tolerance: float) -> str:
    """ "", or by how much the results differ. Either may be the wrong one."""
    ours, theirs = ((t,) if isinstance(t, Tensor) else tuple(t) for t in (ours, theirs))
    for n, (a, b) in enumerate(zip(ours, theirs, strict=True)):
        a, b = (built.align(a) if n < 3 else a).float(), b.float()
        difference = ((a - b).norm() / b.norm()).item()
        if not difference <= tolerance:  # NaN too
            return f"results differ: tensor {n} by {difference:.3g} relative RMS"
    return ""


def digits(x: float) -> float:
    return float(f"{x:.4g}")


# --- host time, memory, first call ---------------------------------------------------------------------------------


def host(cell: Cell, rehearsal: bool) -> Row:
    """Microseconds from call to return of a call too small to fill the queue; a thousand of each."""
    direction = cell.row.direction
    q, k, v, do = (torch.randn(1, 8, 128, 64, device="cuda", dtype=torch.bfloat16) for _ in range(4))
    for t in (q, k, v):
        t.requires_grad_(direction != "no_grad forward")

    def of(attend: Callable[[], Tensor]) -> Call:
        if direction == "forward + backward":
            return lambda: torch.autograd.grad(attend(), (q, k, v), do)
        return attend

    calls = {
        "theirs": of(lambda: torch.nn.functional.scaled_dot_product_attention(q, k, v)),
        "ours": of(lambda: tilewise.attention(q, k, v, backend=backend_of(cell.row))),
    }
    rounds = []
    with sdpa_kernel(SDPBackend.FLASH_ATTENTION), torch.set_grad_enabled(direction != "no_grad forward"):
        for call in calls.values():  # the first calls compile
            host_us(call, 50 if not rehearsal else 1)
        for _ in range(0 if rehearsal else ROUNDS):
            rounds.append({name: host_us(call, HOST_CALLS) for name, call in calls.items()})
    return host_row(cell, rounds) if rounds else cell.row


def host_us(call: Call, count: int) -> float:
    taken = []
    torch.cuda.synchronize()
    for _ in range(count):
        start = time.perf_counter_ns()
        result = call()
        taken.append(time.perf_counter_ns() - start)
        del result
    torch.cuda.synchronize()
    return statistics.median(taken) / 1e3


def host_row(cell: Cell, rounds: list[dict[str, float]]) -> Row:
    ours, theirs = (statistics.median(times[who] for times in rounds) for who in ("ours", "theirs"))
    ratios = [times["theirs"] / times["ours"] for times in rounds]
    return replace(
        cell.row, goal=cell.goal, ours=digits(ours), theirs=digits(theirs), ratio=round(statistics.median(ratios), 3),
        ratio_min=round(min(ratios), 3), ratio_max=round(max(ratios), 3),
    )  # fmt: skip


def memory(cell: Cell, rehearsal: bool) -> Row:
    """Peak memory of forward and backward over the bytes of the inputs, outputs and gradients."""
    seq, d = 1024 if rehearsal else cell.row.seq, cell.row.d
    assert seq is not None
    assert d is not None
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    dtype = DTYPES[cell.row.dtype]
    q, k, v, do = (torch.randn(1, 16, seq, d, device="cuda", dtype=dtype) for _ in range(4))
    inputs = [t.requires_grad_() for t in (q, k, v)]
    o = tilewise.attention(*inputs, backend="triton")
    grads = torch.autograd.grad(o, inputs, do)
    torch.cuda.synchronize()
    peak = torch.cuda.max_memory_allocated() - before
    needed = sum(t.numel() * t.element_size() for t in (q, k, v, do, o, *grads))
    note = f"{peak / 2**30:.3f} GiB, {needed / 2**30:.3f} {cell.row.note}"
    return replace(cell.row, goal=cell.goal, ours=round(peak / needed, 4), note=note)


def first_call(cell: Cell, rehearsal: bool) -> Row:
    """Seconds of the first call of a process whose compile cache is empty. torch is imported and the GPU in use."""
    del rehearsal
    with tempfile.TemporaryDirectory() as cache:
        done = subprocess.run(
            [sys.executable, "-m", "bench.first_call", cache, cell.row.direction, backend_of(cell.row)],
            capture_output=True, text=True, timeout=100, check=False,
        )  # fmt: skip
    if done.returncode:
        raise RuntimeError(f"the first call failed: {done.stderr[-200:]}")
    return replace(cell.row, goal=cell.goal, ours=round(float(done.stdout.split()[-1]), 2))


LIMITS: dict[str, Callable[..., Row]] = {"host": host, "memory": memory, "first_call": first_call}
