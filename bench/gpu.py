"""`python -m bench.gpu`: measure the cells of gpu_cases.py beside their peers on this machine's GPU.

First all kernels are compiled, ours and the peers', by a dozen processes at a time into the caches on disk; then one
process measures cell after cell. A cell that fails, hangs or finds no time left is a row with that error.
"""

from __future__ import annotations

import argparse
import os
import re
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from . import timing
from .gpu_cases import FA2, FLEX, Cell, cells
from .rows import BEST, Row, geometric_mean, merge, read, write
from .worker import Failed, Worker, parallel

RESULTS = Path(__file__).parent / "results"
CELL_SECONDS = 100.0  # then a cell counts as hung
MEANS = [
    ("forward", FLEX, ">= 1.18"),
    ("forward", FA2, ">= 1.5"),
    ("hopper forward", BEST, ">= 1.03"),
    ("hopper backward", BEST, ">= 1.05"),
    ("decode", BEST, ">= 1.0"),
]


def slug(device: str) -> str:
    """The file's name: "NVIDIA H200" is h200.

    >>> slug("NVIDIA H200"), slug("NVIDIA A100-SXM4-80GB")
    ('h200', 'a100_sxm4_80gb')
    """
    return re.sub(r"[^a-z0-9]+", "_", device.removeprefix("NVIDIA ").lower())


def compile_all(chosen: list[Cell], processes: int, deadline: float, cudnn: bool) -> None:
    """What takes longest first: FlexAttention with a backward, then its forwards, then the others."""
    start = time.monotonic()

    def cost(cell: Cell) -> tuple[bool, bool]:
        return any(peer.name == FLEX for peer in cell.peers), "backward" in cell.row.direction

    questions = [(cell.name, cudnn) for cell in sorted(chosen, key=cost, reverse=True) if cell.compiled]
    for (name, _), answer in parallel(timing.warm, questions, processes, deadline):
        if isinstance(answer, Failed):
            print(f"warm-up of {name}: {answer}", flush=True)
    print(f"warm-up: {time.monotonic() - start:.0f} s", flush=True)


def measure_all(chosen: list[Cell], deadline: float, cudnn: bool) -> Iterator[list[Row]]:
    """Each cell's rows, its failure's too."""
    worker = Worker()
    facts: dict[str, Any] = {}
    ask: Callable[..., object] = worker.ask
    try:
        facts = worker.ask(timing.facts, seconds=CELL_SECONDS)
    except Failed as failed:
        print(f"no GPU to measure on: {failed}")
    for cell in chosen:
        left = deadline - time.monotonic()
        start = time.monotonic()
        try:
            if left <= 0 or not facts:
                raise Failed("skipped: out of time" if facts else "skipped: no GPU")
            rows = ask(timing.measure, (cell.name, cudnn), seconds=min(CELL_SECONDS, left))
            assert isinstance(rows, list)
        except Failed as failed:
            rows = [replace(row, **facts).judged() for row in failures(cell, str(failed))]
        for row in rows:
            print(f"{line(row)}  [{time.monotonic() - start:.1f} s]", flush=True)
        yield rows
    worker.stop()


def failures(cell: Cell, why: str) -> list[Row]:
    """The rows of a cell that could not be measured."""
    if cell.build is None:
        return [replace(cell.row, goal=cell.goal, error=why)]
    return [replace(cell.row, peer=peer.name, goal=peer.goal, note=peer.note, error=why) for peer in cell.peers]


def line(row: Row) -> str:
    """One row for a terminal."""
    rate = f" ({row.ours_tflops:.0f} / {row.their_tflops:.0f} TFLOP/s)" if row.ours_tflops and row.their_tflops else ""
    ratio = f" ratio {row.ratio} ({row.ratio_min}, {row.ratio_max})" if row.ratio is not None else ""
    beside = f" | {row.peer} {row.theirs}" if row.peer else ""
    goal = f" goal {row.goal}: {row.reached}" if row.goal else ""
    return f"{row.name}: {row.ours} {row.unit}{beside}{rate}{ratio}{goal}" + (
        f" ERROR {row.error}" if row.error else ""
    )


def summary(rows: list[Row]) -> str:
    judged = [row for row in rows if row.goal]
    missed = [row for row in judged if row.reached == "no"]
    lines = [f"{len(judged) - len(missed)} of {len(judged)} goals reached"]
    lines += [f"  missed: {line(row)}" for row in missed]
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(prog="bench.gpu", description=__doc__)
    parser.add_argument("--only", default="", help="cells whose name contains this; several, with commas between")
    parser.add_argument("--write", action="store_true", help="write bench/results/<gpu>.csv (cells measured anew)")
    parser.add_argument("--out", type=Path, help="write this file instead")
    parser.add_argument("--seconds", type=float, default=540.0, help="of everything; what is left is reported as such")
    parser.add_argument("--processes", type=int, default=12, help="that compile at a time; 0: no warm-up")
    parser.add_argument("--cudnn", action="store_true", help="beside cuDNN too")
    parser.add_argument("--list", action="store_true", help="print the cells' names, no more")
    args = parser.parse_args()
    start = time.monotonic()
    deadline = start + args.seconds
    chosen = [cell for cell in cells(cudnn=args.cudnn) if any(part in cell.name for part in args.only.split(","))]
    if args.list:
        print("\n".join(cell.name for cell in chosen))
        return
    os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "1")  # the processes are parallel already
    # FlashAttention-4 is to find on disk what those processes compiled.
    os.environ.setdefault("FLASH_ATTENTION_CUTE_DSL_CACHE_ENABLED", "1")
    if args.processes:
        compile_all(chosen, args.processes, start + args.seconds / 2, args.cudnn)
    rows: list[Row] = []
    for found in measure_all(chosen, deadline - 2, args.cudnn):
        rows += found
        if args.out or args.write:  # after every cell: a run that is cut short leaves what it has
            path = args.out or RESULTS / f"{slug(found[0].device) or 'gpu'}.csv"
            write(path, with_means(merge(read(path), found)))
    print(summary(with_means(rows)))
    print(f"{time.monotonic() - start:.0f} s")


def with_means(rows: list[Row]) -> list[Row]:
    means = (geometric_mean(rows, *mean) for mean in MEANS)
    return merge(rows, [mean for mean in means if mean])


if __name__ == "__main__":
    main()
