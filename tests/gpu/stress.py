"""Races: the same short calls of the Hopper backend again and again, while other processes keep the GPU busy.

    python -m tests.gpu.stress [--seconds 60] [--others 14] [--only "backward d128"]

Every result is compared with the call's first. Forward, deterministic gradients, and dK and dV of the other ones must
have its bits. dQ of the other ones is a sum of fp32 numbers in any order, and may differ by what that order does
(`freedom`); a tile that is lost, added twice or made from another's operands differs by far more. What a GPU does at
once is chosen by its load, so a race shows once in hundreds of calls, or only beside others: hence many calls, each of
more tiles than the device runs at once, and processes whose kernels take its multiprocessors away in between.

Exit code 1 if a result differs, or if another process died. TILEWISE_REHEARSE=1 tries it without a GPU, on "tiled".
"""

from __future__ import annotations

import argparse
import random
import sys
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from multiprocessing import get_context
from pathlib import Path
from typing import Any

sys.path[:0] = [str(Path(__file__).parents[2]), str(Path(__file__).parents[1]), str(Path(__file__).parent)]

import pool  # noqa: E402
import torch  # noqa: E402
from cases import Case  # noqa: E402
from hopper_cases import PREFIX  # noqa: E402
from torch import Tensor  # noqa: E402
from where import DEVICE, REHEARSAL, WHY_NOT_HOPPER, backend_of, set_up  # noqa: E402

import tilewise  # noqa: E402
from tilewise import Band, causal  # noqa: E402

AT_ONCE = 5 if REHEARSAL else 100  # calls between two looks at what differs, which wait for the device
COMPILE_SECONDS = 300.0
KEY_TILE = 64  # the least that any kernel adds to dQ at a time
RESULTS = {"forward": ("o", "lse"), "backward": ("dq", "dk", "dv"), "deterministic": ("dq", "dk", "dv")}
INTS = {2: torch.int16, 4: torch.int32}


@dataclass(frozen=True)
class Call:
    direction: str  # of RESULTS
    d: int
    length: int
    band: Band = field(default_factory=Band)
    batch: int = 8
    heads: int = 8
    kv_heads: int = 8

    @property
    def name(self) -> str:
        band = {Band(): "full", causal: "causal"}.get(self.band, f"{self.band.left}, {self.band.right}")
        heads = "" if self.heads == self.kv_heads else f" {self.heads}/{self.kv_heads} heads"
        return f"{self.direction} d{self.d} {band} {self.length}{heads}"

    @property
    def case(self) -> Case:
        """What compiles its kernels, with few tiles: they are checked against the reference, too."""
        return Case(
            dtype=torch.bfloat16, batch=2, heads=2 * self.heads // self.kv_heads, kv_heads=2, q_len=self.length,
            k_len=self.length, dim=self.d, v_dim=self.d, band=self.band, grad=self.direction != "forward",
            lse_grad=False,
        )  # fmt: skip


CALLS = [
    *(Call("forward", 64, length, band) for length in (512, 1024) for band in (Band(), causal)),
    Call("forward", 64, 2304, causal, batch=4),  # from 2048 keys another kernel
    Call("forward", 64, 777, Band(300, 5), kv_heads=2),
    *(Call("forward", 128, length, band) for length in (512, 1024) for band in (Band(), causal)),
    Call("forward", 128, 2176, causal, batch=2),
    *(Call("forward", 256, 512, band, heads=4, kv_heads=4) for band in (Band(), causal)),
    *(
        Call(direction, d, length, band)
        for direction in ("backward", "deterministic")
        for d in (64, 128)
        for length in (512, 1024)
        for band in (Band(), causal)
    ),
    *(Call(direction, 64, 520, Band(), kv_heads=2) for direction in ("backward", "deterministic")),
    *(Call("deterministic", 256, 640, band, batch=4, heads=4, kv_heads=4) for band in (Band(), causal)),
]


# ---- comparing -------------------------------------------------------------------------------------------------------


def unlike(got: Tensor, first: Tensor, allowed: Tensor | None = None) -> Tensor:
    """How many elements differ, without waiting for them: in any bit, or by more than `allowed`; NaN is more."""
    if allowed is None:
        whole = INTS[got.dtype.itemsize]
        return (got.view(whole) != first.view(whole)).sum()
    return (~((got.float() - first.float()).abs() <= allowed)).sum()


def freedom(q: Tensor, k: Tensor, v: Tensor, do: Tensor, dq: Tensor, band: Band) -> Tensor:
    """By how much dQ may differ from `dq`: fp32, dq's shape.

    T terms that are added in another order differ by at most 2 (T - 1) u A, with u = 2^-24 and A the sum of the terms'
    absolute values; twice that, for the terms here are not rounded as the kernel's are. Rounded to dq's dtype, two
    numbers so close are equal or neighbours: one ulp, at most eps |dq|.
    """
    heads = q.shape[1] // k.shape[1]
    K, V = (x.float().repeat_interleave(heads, 1) for x in (k, v))
    scale = q.shape[-1] ** -0.5
    S = (q.float() @ K.mT * scale).masked_fill(~band.dense(q.shape[2], k.shape[2]).to(q.device), -torch.inf)
    P = S.softmax(-1).nan_to_num()
    dP = do.float() @ V.mT
    dS = P * (dP - (P * dP).sum(-1, keepdim=True))
    A = scale * dS.abs() @ K.abs()
    terms = -(-k.shape[2] // KEY_TILE)
    return 2 * 2 * (terms - 1) * 2.0**-24 * A + torch.finfo(dq.dtype).eps * dq.float().abs()


class Repeated:
    """A call, its tensors, and its first results."""

    def __init__(self, call: Call, seed: int = 0) -> None:
        self.call, self.count, self.wrong, self.which = call, 0, 0, Counter[str]()
        make = torch.Generator(device=DEVICE).manual_seed(seed)
        batch = 1 if REHEARSAL else call.batch
        q, k, v, do = (
            torch.randn(batch, heads, call.length, call.d, generator=make, device=DEVICE).to(torch.bfloat16)
            for heads in (call.heads, call.kv_heads, call.kv_heads, call.heads)
        )
        self.run = self._forward(q, k, v) if call.direction == "forward" else self._backward(q, k, v, do)
        self.first = self.run()
        self.allowed: list[Tensor | None] = [None] * len(self.first)
        if call.direction == "backward":
            self.allowed[0] = freedom(q, k, v, do, self.first[0], call.band)

    def _attend(self, *tensors: Tensor) -> Any:
        return tilewise.attention(
            *tensors, mask=self.call.band, return_lse=True, backend=backend_of(PREFIX),
            deterministic=self.call.direction == "deterministic",
        )  # fmt: skip

    def _forward(self, q: Tensor, k: Tensor, v: Tensor) -> Callable[[], tuple[Tensor, ...]]:
        return lambda: self._attend(q, k, v)

    def _backward(self, q: Tensor, k: Tensor, v: Tensor, do: Tensor) -> Callable[[], tuple[Tensor, ...]]:
        leaves = [x.requires_grad_() for x in (q, k, v)]
        o = self._attend(*leaves)[0]  # kept, so that what is repeated is the backward alone
        return lambda: torch.autograd.grad(o, leaves, do, retain_graph=True)

    def repeat(self, times: int) -> None:
        """Calls one behind the other; then waits, and counts those whose results differ."""
        found = [
            torch.stack([unlike(*each) for each in zip(self.run(), self.first, self.allowed, strict=True)])
            for _ in range(times)
        ]
        self.note(torch.stack(found).tolist())

    def note(self, elements: list[list[int]]) -> None:
        """elements: of each call, of each of its results, how many differ."""
        for of_results in elements:
            self.count += 1
            self.wrong += any(of_results)
            for name, n in zip(RESULTS[self.call.direction], of_results, strict=True):
                self.which[name] += n > 0
            if any(of_results) and self.wrong <= 3:
                there = dict(zip(RESULTS[self.call.direction], of_results, strict=True))
                print(f"  {self.call.name}, call {self.count}: elements that differ: {there}", flush=True)

    def __str__(self) -> str:
        which = ", ".join(f"{name} {n}" for name, n in self.which.items() if n)
        return f"{self.call.name}: {self.count} calls, {self.wrong} differ" + (f" ({which})" if which else "")


# ---- the processes ---------------------------------------------------------------------------------------------------


def keep_busy(seed: int, ready: Any, stop: Any) -> None:
    """Forwards, backwards and copies at random, with pauses, so that the device's load changes all the time."""
    set_up()
    r = random.Random(seed)
    work: list[Callable[[], object]] = [Repeated(call, seed).run for call in r.sample(CALLS, 2 if REHEARSAL else 6)]
    here = torch.randn(2**20 if REHEARSAL else 2**25, device=DEVICE)
    work += [here.clone, lambda: here.to("cpu"), lambda: here.add_(1.0)]
    ready.release()
    while not stop.is_set():
        do = r.choice(work)
        for _ in range(r.randint(1, 10)):
            do()
        if DEVICE == "cuda":
            torch.cuda.synchronize()
        time.sleep(r.choice((0.0, 0.0, 0.001, 0.01)))


def compile_all(calls: list[Call], processes: int) -> str:
    """ "", or the faults that were found on the way."""
    cases = {PREFIX + call.name: call.case for call in calls}
    twice = frozenset(PREFIX + call.name for call in calls if call.direction == "deterministic")
    found = pool.verdicts(cases, twice, processes, COMPILE_SECONDS)
    return "\n".join(f"{name}: {verdict.fault}" for name, verdict in found.items() if verdict.fault)


def stress(calls: list[Call], seconds: float, others: int) -> int:
    """How many calls differed; RuntimeError if one of the others died."""
    context = get_context("spawn")
    ready, stop = context.Semaphore(0), context.Event()
    processes = [context.Process(target=keep_busy, args=(n + 1, ready, stop)) for n in range(others)]
    for process in processes:
        process.start()
    try:
        repeated = [Repeated(call) for call in calls]
        for _ in processes:
            while not ready.acquire(timeout=1.0):
                _alive(processes)
        r, end = random.Random(0), time.monotonic() + seconds
        while time.monotonic() < end:
            for one in r.sample(repeated, len(repeated)):
                one.repeat(AT_ONCE)
                if time.monotonic() >= end:
                    break
        _alive(processes)
    finally:
        stop.set()
        for process in processes:
            process.join(20)
            if process.is_alive():
                process.kill()
    print("\n".join(map(str, repeated)))
    total, wrong = sum(one.count for one in repeated), sum(one.wrong for one in repeated)
    print(f"{total} calls beside {others} processes, {wrong} differ")
    return wrong


def _alive(processes: list[Any]) -> None:
    dead = [process.exitcode for process in processes if process.exitcode is not None]
    if dead:
        raise RuntimeError(f"{len(dead)} of the other processes died, with exit codes {dead}")


def arguments(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="tests.gpu.stress", description=__doc__.split("\n")[0])
    parser.add_argument("--seconds", type=float, default=60.0, help="of repeating; compiling comes before")
    parser.add_argument("--others", type=int, default=14, help="processes that keep the GPU busy")
    parser.add_argument("--only", default="", help="calls whose name contains this; several, with commas between")
    parser.add_argument(
        "--processes", type=int, default=12, help="that compile at a time; 0: nothing is compiled ahead"
    )
    args = parser.parse_args(argv)
    args.calls = [call for call in CALLS if any(part in call.name for part in args.only.split(","))]
    if not args.calls:
        parser.error(f"--only {args.only!r} chooses none of: {', '.join(call.name for call in CALLS)}")
    if args.others < 0 or args.processes < 0:
        parser.error("--others and --processes must not be negative")
    return args


def main() -> int:
    args = arguments()
    if WHY_NOT_HOPPER:
        print(WHY_NOT_HOPPER)
        return 1
    set_up()
    start = time.monotonic()
    faults = compile_all(CALLS, args.processes) if args.processes else ""
    print(f"compiled: {time.monotonic() - start:.0f} s", flush=True)
    if faults:
        print(faults)
        return 1
    return 1 if stress(args.calls, args.seconds, args.others) else 0


if __name__ == "__main__":
    sys.exit(main())
