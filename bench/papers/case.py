"""A case: one cell of a paper's table, measured on a GPU or, tiny, on a CPU. It gives rows of time, rate and memory."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

import tilewise
from tilewise import Band, BlockMask, causal

from .. import timing
from ..gpu_cases import DTYPES, Call, Cell, Peer
from ..rows import Row
from ..worker import reason

DIRECTION = "forward + backward"  # of all of them: the papers are about training
NO_ROOM = "OutOfMemoryError"


@dataclass(frozen=True)
class Setting:
    """Where, by which backend (None: dispatch chooses), and whether in the tests' sizes."""

    device: str = "cuda"
    backend: str | None = None
    tiny: bool = False


@dataclass(frozen=True)
class Kernel:
    """What decides which kernels of ours a case runs. Batch and heads do not, so one of each will compile them."""

    dtype: str
    seq: int
    mask: str = "full"  # or "causal", "butterfly"
    dropout: float = 0.0
    d: int = 64


@dataclass(frozen=True)
class Case:
    """tokens: of a training step; then its memory is that of the whole step, model and optimizer included."""

    cell: Cell
    kernels: tuple[Kernel, ...]
    tokens: int = 0

    @property
    def name(self) -> str:
        return self.cell.name


def mask_of(name: str, seq: int, device: str) -> Band | BlockMask | None:
    return {"full": lambda: None, "causal": lambda: causal, "butterfly": lambda: BlockMask.butterfly(seq, seq, device)}[
        name
    ]()


def compile_kernel(setting: Setting, kernel: Kernel) -> None:
    """Run it once, forward and backward, so that its kernels lie in the cache on disk."""
    device, backend = setting.device, setting.backend
    q, k, v = (
        torch.randn(1, 1, kernel.seq, kernel.d, device=device, dtype=DTYPES[kernel.dtype], requires_grad=True)
        for _ in range(3)
    )
    mask = mask_of(kernel.mask, kernel.seq, device)
    o = tilewise.attention(q, k, v, mask=mask, dropout_p=kernel.dropout, backend=backend)
    torch.autograd.grad(o, (q, k, v), torch.ones_like(o))


# --- measuring -----------------------------------------------------------------------------------------------------


def measure(case: Case, setting: Setting) -> list[Row]:
    """Rows of time, one a peer, then of the rate if there are tokens, then of memory. Raises what ours raises; what a
    peer raises is its rows' error."""
    cell, here = case.cell, Here(setting.device)
    assert cell.build is not None
    built = cell.build()
    calls: dict[str, Call] = {}
    errors: dict[str, str] = {}
    bytes_of: dict[str, float | None] = {}
    ours: Any = None
    same = {peer.name for peer in cell.peers if peer.same_result}
    for name, prepare in {"ours": built.ours, **built.peers}.items():
        try:
            call = prepare()
            result = call()  # compiles, makes plans, allocates what is kept
            here.synchronize()
            if name in same:
                errors[name] = timing.disagreement(ours, result, built, timing.TOLERANCE[cell.row.dtype])
            ours = result if name == "ours" else ours
            del result
            bytes_of[name] = here.peak(call, whole=bool(case.tokens))
            calls[name] = call
        except Exception as error:  # whatever another library raises is that library's result
            if name == "ours":
                raise
            errors[name] = reason(error)
        here.tidy()  # outside of `except`, whose traceback keeps what did not fit
    del ours
    timers = {name: here.timer(call) for name, call in calls.items()}
    rounds = [{name: read() for name, read in timers.items()} for _ in range(timing.ROUNDS)]
    times = [timed(case, peer, rounds, errors.get(peer.name, "")) for peer in cell.peers]
    rows = [*times, *(rate(row, case.tokens) for row in times if case.tokens)]
    if here.gpu:
        rows += [memory(case, row, bytes_of) for row in times]
    return [replace(row, **here.facts()).judged() for row in rows]


def timed(case: Case, peer: Peer, rounds: list[dict[str, float]], error: str) -> Row:
    row = timing.row_of(case.cell, peer, rounds, error)
    if not case.cell.flops:
        row = replace(row, ours_tflops=None, their_tflops=None)
    return without_room(row)


def without_room(row: Row) -> Row:
    """A goal beside a peer that does not fit is none."""
    return replace(row, goal="", note="does not fit") if row.error.startswith(NO_ROOM) else row


def rate(row: Row, tokens: int) -> Row:
    """The same in tokens a second."""
    ours, theirs = (None if ms is None else round(tokens / ms * 1e3) for ms in (row.ours, row.theirs))
    return replace(row, subject=f"{row.subject} rate", unit="tokens/s", ours=ours, theirs=theirs, goal="")


def memory(case: Case, row: Row, bytes_of: dict[str, float | None]) -> Row:
    """Of the whole step, or beyond the inputs of an attention call."""
    ours, theirs = (None if (n := bytes_of.get(who)) is None else round(n / 2**30, 4) for who in ("ours", row.peer))
    ratio = round(theirs / ours, 3) if ours and theirs is not None else None
    note = "of the step, model and optimizer included" if case.tokens else "beyond q, k, v"
    return replace(
        row, subject=f"{row.subject} memory", unit="GiB", ours=ours, theirs=theirs, ours_tflops=None, their_tflops=None,
        ratio=ratio, ratio_min=ratio, ratio_max=ratio, goal="", note=note,
    )  # fmt: skip


class Here:
    """The device: on a GPU the protocol of `timing`; on a CPU a clock, for the tests."""

    def __init__(self, device: str) -> None:
        self.gpu = torch.device(device).type == "cuda"
        self._flush: Tensor | None = None

    def facts(self) -> dict[str, Any]:
        return timing.facts() if self.gpu else {"device": "CPU", "torch": torch.__version__}

    def synchronize(self) -> None:
        if self.gpu:
            torch.cuda.synchronize()

    def tidy(self) -> None:
        gc.collect()
        if self.gpu:
            torch.cuda.empty_cache()

    def peak(self, call: Call, whole: bool) -> float | None:
        """Bytes on the GPU while it runs, less those before it unless `whole`."""
        if not self.gpu:
            return None
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = 0 if whole else torch.cuda.memory_allocated()
        call()
        torch.cuda.synchronize()
        return torch.cuda.max_memory_allocated() - before

    def timer(self, call: Call) -> Callable[[], float]:
        if not self.gpu:
            return lambda: _clock(call)
        if self._flush is None:
            self._flush = timing.overwritten()
        return timing.timer(call, self._flush)


def _clock(call: Call) -> float:
    start = time.perf_counter()
    call()
    return (time.perf_counter() - start) * 1e3


def failures(case: Case, why: str) -> list[Row]:
    """The rows of a case that could not be measured."""
    return [
        replace(case.cell.row, peer=peer.name, goal=peer.goal, note=peer.note, error=why) for peer in case.cell.peers
    ]
