"""`torchrun --nproc-per-node 2 -m bench.parallel`: attention over several GPUs beside the same on one of them.

One sequence, causal, forward and backward, 16 heads of 128, bf16, by `ContextParallel(ring=)` in zig-zag. In each of
five rounds first rank 0 alone has all of it, while the others wait, and then each rank its share; a time is that of the
slowest rank, by CUDA events, of a call that follows another. Memory is the peak that PyTorch allocates, with the
call's tensors.
"""

from __future__ import annotations

import argparse
import time
from dataclasses import replace
from pathlib import Path

import torch
import torch.distributed as dist

import tilewise
from tilewise.parallel import ContextParallel

from .gpu import RESULTS, line, slug, summary
from .gpu_cases import OPERATIONS, Attend, Call, Cell, Peer, Setting, draw, pairs, prepare
from .papers.case import Here
from .rows import Row, merge, read, write
from .timing import ROUNDS, digits, row_of

HEADS, DIM, MASK, DIRECTION = 16, 128, "causal", "forward + backward"
LENGTHS = (65536, 262144)
GOAL, MEMORY_GOAL = ">= 1.85", ">= 1.9"  # of two GPUs


def measured(attend: Attend, tokens: int, device: torch.device) -> list[float]:
    """[seconds of a call with so many tokens on this rank, GiB at its peak], after two that compile and are looked at.

    One call, and not as many as `timing.timer` finds worth while: ranks that exchange must make the same number.
    """
    here = Here(str(device))
    tensors = draw(Setting(str(device)), 1, HEADS, tokens, DIM, dtype="bf16")
    step: Call = prepare(lambda: attend, tensors, DIRECTION)()
    step()
    gib = (here.peak(step, whole=True) or 0) / 2**30
    if not here.gpu:
        start = time.perf_counter()
        step()
        return [time.perf_counter() - start, gib]
    before, after = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    before.record()
    step()
    after.record()
    after.synchronize()
    return [before.elapsed_time(after) / 1e3, gib]


def greatest(numbers: list[float], device: torch.device) -> list[float]:
    """Of all ranks' numbers, each. Who has come here waits for the others."""
    found = torch.tensor(numbers, device=device, dtype=torch.float64)
    dist.all_reduce(found, dist.ReduceOp.MAX)
    return found.tolist()


def rows_of(length: int, device: torch.device, rounds: int = ROUNDS) -> list[Row]:
    rank, size = dist.get_rank(), dist.get_world_size()
    over = ContextParallel(ring=dist.group.WORLD)

    def alone(*qkv: torch.Tensor) -> torch.Tensor:
        return tilewise.attention(*qkv, mask=tilewise.causal)

    def shared(*qkv: torch.Tensor) -> torch.Tensor:
        return over.attention(*qkv, mask=tilewise.causal)

    found = []
    for _ in range(rounds):
        one = greatest(measured(alone, length, device) if rank == 0 else [0.0, 0.0], device)
        found.append((one, greatest(measured(shared, length // size, device), device)))
    two = size == 2 and device.type == "cuda"
    what = Row("context parallel", DIRECTION, "bf16", DIM, MASK, length)
    peer = Peer("one GPU", GOAL if two else "", note=f"{HEADS} heads, {size} ranks in a ring")
    cell = Cell(what, (peer,), OPERATIONS[DIRECTION] * HEADS * DIM * pairs(MASK, length))
    speed = row_of(cell, peer, [{"ours": 1e3 * ours[0], peer.name: 1e3 * one[0]} for one, ours in found])
    theirs, ours = (max(gib for _, gib in figures) for figures in zip(*found, strict=True))
    ratio = round(theirs / ours, 3) if ours else None
    memory = replace(
        what, subject="context parallel memory", peer=peer.name, unit="GiB", ours=digits(ours), theirs=digits(theirs),
        ratio=ratio, ratio_min=ratio, ratio_max=ratio, goal=MEMORY_GOAL if two else "", note="of each GPU",
    )  # fmt: skip
    facts = Here(str(device)).facts()
    facts["device"] = f"{size} x {facts['device']}"
    return [replace(row, **facts).judged() for row in (speed, memory)]


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
