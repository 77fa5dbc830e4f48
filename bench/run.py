"""Time each case against its peer, interleaved, and write one CSV row a case.

Nine rounds after a warm-up; in each, peer and ours in turn. The figure is the median of the rounds' ratios peer / ours,
with the least and the greatest beside it: a machine's clock moves, a ratio within one round hardly.
"""

from __future__ import annotations

import argparse
import csv
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch

from .cases import CASES, Case

RESULTS = Path(__file__).parent / "results"
FIELDS = ["case", "peer", "ours_ms", "peer_ms", "ratio", "ratio_min", "ratio_max", "goal", "reached"]


def seconds(call: Callable[[], object]) -> float:
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


def measure(case: Case, rounds: int) -> dict[str, object]:
    ours, peer = case.build()
    ours(), peer()
    pairs = [(seconds(peer), seconds(ours)) for _ in range(rounds)]
    ratios = [p / o for p, o in pairs]
    ratio = statistics.median(ratios)
    return {
        "case": case.name,
        "peer": case.peer,
        "ours_ms": round(statistics.median(o for _, o in pairs) * 1e3, 1),
        "peer_ms": round(statistics.median(p for p, _ in pairs) * 1e3, 1),
        "ratio": round(ratio, 3),
        "ratio_min": round(min(ratios), 3),
        "ratio_max": round(max(ratios), 3),
        "goal": case.goal,
        "reached": ratio >= case.goal,
    }


def memory(seq: int) -> float:
    """MiB beyond the inputs, in a fresh process."""
    return float(subprocess.check_output([sys.executable, "-m", "bench.memory", str(seq)], text=True))


def main() -> None:
    parser = argparse.ArgumentParser(prog="bench", description=__doc__)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--only", default="", help="cases whose name contains this")
    parser.add_argument("--write", action="store_true", help="write bench/results/cpu.csv")
    args = parser.parse_args()
    print(f"torch {torch.__version__}, {torch.get_num_threads()} threads, {platform.machine()}")
    rows = []
    for case in CASES:
        if args.only in case.name:
            rows.append(measure(case, args.rounds))
            print(" ".join(f"{k}={v}" for k, v in rows[-1].items()), flush=True)
    if args.only in "memory":
        for seq in (16384, 32768, 65536):
            print(
                f"memory of forward + backward beyond the inputs, d 64, one head, {seq}: {memory(seq)} MiB", flush=True
            )
    if args.write:
        RESULTS.mkdir(exist_ok=True)
        with open(RESULTS / "cpu.csv", "w", newline="") as file:
            writer = csv.DictWriter(file, FIELDS)
            writer.writeheader()
            writer.writerows(rows)
