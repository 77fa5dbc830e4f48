"""`torchrun --nproc-per-node 2 -m bench.parallel`: attention over several GPUs beside the same on one of them.

One sequence, causal, forward and backward, 16 heads of 128, bf16, by `ContextParallel(ring=)` in zig-zag. In each of
five rounds first rank 0 alone has all of it, while the others wait, and then each rank its share; a time is that of the
slowest rank, by CUDA events, behind a barrier. Memory is the peak that PyTorch allocates, with the call's tensors.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

import tilewise
from tilewise.parallel import ContextParallel

from .gpu import RESULTS, line, slug, summary
from .gpu_cases import Cell, Peer
from .rows import Row, merge, read, write
from .timing import digits, facts, row_of

ROUNDS = 5
HEADS, DIM = 16, 128
LENGTHS = (65536, 262144)
GOAL, MEMORY_GOAL = ">= 1.85", ">= 1.9"  # of two GPUs
GIB = 2**30

Attend = Callable[[Tensor, Tensor, Tensor], Tensor]


def seconds_of(call: Callable[[], None], device: torch.device) -> float:
    """Of one call, on this rank."""
    if device.type == "cpu":
        start = time.perf_counter()
        call()
        return time.perf_counter() - start
    before, after = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    before.record()
    call()
    after.record()
    after.synchronize()
    return before.elapsed_time(after) / 1e3


def step_of(attend: Attend, tokens: int, device: torch.device) -> Callable[[], None]:
    """A forward and backward of so many tokens on this rank."""
    q, k, v, do = (torch.randn(1, HEADS, tokens, DIM, device=device).bfloat16() for _ in range(4))
    leaves = [x.requires_grad_() for x in (q, k, v)]

    def step() -> None:
        for x in leaves:
            x.grad = None
        attend(*leaves).backward(do)

    return step


def measured(step: Callable[[], None], device: torch.device, rounds: int) -> tuple[list[float], float]:
    """(seconds of each round, GiB at the peak), after one call that compiles."""
    step()
    if device.type == "cuda":
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
    times = [seconds_of(step, device) for _ in range(rounds)]
    return times, torch.cuda.max_memory_allocated() / GIB if device.type == "cuda" else 0.0


def slowest(x: list[float], device: torch.device) -> list[float]:
    """The greatest of all ranks' numbers, each."""
    numbers = torch.tensor(x, device=device, dtype=torch.float64)
    dist.all_reduce(numbers, dist.ReduceOp.MAX)
    return numbers.tolist()


def rows_of(length: int, device: torch.device, rounds: int = ROUNDS) -> list[Row]:
    rank, size = dist.get_rank(), dist.get_world_size()
    over = ContextParallel(ring=dist.group.WORLD)
    alone_s: list[float] = []
    shared_s: list[float] = []
    alone_gib = shared_gib = 0.0
    for _ in range(rounds):
        times, gib = [0.0], 0.0
        if rank == 0:
            plain = step_of(lambda q, k, v: tilewise.attention(q, k, v, mask=tilewise.causal), length, device)
            times, gib = measured(plain, device, 1)
            del plain
        alone_s, alone_gib = alone_s + slowest(times, device), gib
        shared = step_of(lambda q, k, v: over.attention(q, k, v, mask=tilewise.causal), length // size, device)
        dist.barrier()
        times, gib = measured(shared, device, 1)
        del shared
        shared_s, (shared_gib,) = shared_s + slowest(times, device), slowest([gib], device)
    what = Row("", "forward + backward", "bf16", DIM, "causal", length)
    two = size == 2 and device.type == "cuda"
    peer = Peer("one GPU", GOAL if two else "", note=f"{HEADS} heads, {size} ranks in a ring")
    flops = 3.5 * 4 * HEADS * length**2 * DIM / 2
    cell = Cell(replace(what, subject="context parallel"), (peer,), flops)
    rounds_ms = [{"ours": 1e3 * b, peer.name: 1e3 * a} for a, b in zip(alone_s, shared_s, strict=True)]
    ratio = round(alone_gib / shared_gib, 3) if shared_gib else None
    memory = replace(
        what, subject="context parallel memory", peer=peer.name, unit="GiB", ours=digits(shared_gib),
        theirs=digits(alone_gib), ratio=ratio, ratio_min=ratio, ratio_max=ratio, goal=MEMORY_GOAL if two else "",
        note="of each GPU",
    )  # fmt: skip
    found = facts() if device.type == "cuda" else {"device": "CPU", "torch": torch.__version__}
    found["device"] = f"{size} x {found['device']}"
    return [replace(row, **found).judged() for row in (row_of(cell, peer, rounds_ms), memory)]


def main() -> None:
    parser = argparse.ArgumentParser(prog="bench.parallel", description=__doc__)
    parser.add_argument("--out", type=Path, help="write this file, not bench/results/<ranks>_x_<gpu>.csv")
    parser.add_argument("--tiny", action="store_true", help="on the CPU, by gloo, in the tests' sizes; give --out")
    args = parser.parse_args()
    dist.init_process_group("gloo" if args.tiny else "nccl")
    rank = dist.get_rank()
    device = torch.device("cpu") if args.tiny else torch.device("cuda", rank)
    if not args.tiny:
        torch.cuda.set_device(device)
    rows: list[Row] = []
    for length in (512,) if args.tiny else LENGTHS:
        rows += rows_of(length, device)
        if rank == 0:  # after every length: a run that is cut short leaves what it has
            path = args.out or RESULTS / f"{slug(rows[0].device)}.csv"
            write(path, merge(read(path), rows))
            print("\n".join(map(line, rows[-2:])), flush=True)
    if rank == 0:
        print(summary(rows))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
