"""`python -m bench.papers`: measure the tables of the FlashAttention papers on this machine's GPU, then draw them.

Our kernels are compiled first, by several processes at a time, into the cache on disk, while the process that will
measure imports what it needs. It then measures case after case, the most important first. A case that fails, hangs
or finds no time left is rows with that error. After each case its rows are printed and written.
"""

from __future__ import annotations

import argparse
import functools
import shutil
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

from ..gpu import RESULTS, line, slug, summary
from ..rows import Row, merge, read, write
from ..worker import Failed, Worker, parallel
from . import attention, figures, lengths, training
from .case import Case, Here, Kernel, Setting, compile_kernel, failures, measure

ROOT = Path(__file__).parents[2]
PAGE, PICTURES = ROOT / "docs" / "reproduction.md", ROOT / "docs" / "img"
CASE_SECONDS = 60.0  # then a case counts as hung


def cases(setting: Setting) -> list[Case]:
    """All of them, the most important first: a run may be cut short."""
    by_length = lengths.cases(setting)
    return [
        *attention.cases(setting),
        *training.gpt2_cases(setting),
        *lengths.sparsity_cases(setting),
        *by_length,
        *training.other_cases(setting),
    ]


# --- what a worker is asked ----------------------------------------------------------------------------------------


def card(setting: Setting) -> dict[str, Any]:
    return Here(setting.device).facts()


def rehearse(setting: Setting) -> None:
    """Imports transformers, and takes an optimizer's first steps: seconds, while others compile."""
    for model in (training.GPT2_SMALL, training.BERT_LARGE):
        training.Step(model.tiny(), 1, 64, setting.device).run(training.SDPA)


def measure_named(setting: Setting, name: str) -> list[Row]:
    return measure(next(case for case in cases(setting) if case.name == name), setting)


# --- the run -------------------------------------------------------------------------------------------------------


def compile_all(chosen: list[Case], setting: Setting, processes: int, deadline: float) -> None:
    """Each kernel once; with dropout first, which takes longest."""
    start = time.monotonic()
    kernels: list[Kernel] = sorted({k: None for case in chosen for k in case.kernels}, key=lambda k: -k.dropout)
    for kernel, answer in parallel(functools.partial(compile_kernel, setting), kernels, processes, deadline):
        if isinstance(answer, Failed):
            print(f"warm-up of {kernel}: {answer}", flush=True)
    print(f"warm-up of {len(kernels)} kernels: {time.monotonic() - start:.0f} s", flush=True)


def run(chosen: list[Case], setting: Setting, processes: int, start: float, seconds: float) -> Iterator[list[Row]]:
    """Each case's rows, its failure's too."""
    worker = Worker()
    with ThreadPoolExecutor(1) as beside:
        compiled = beside.submit(compile_all, chosen, setting, processes, start + seconds / 2) if processes else None
        facts: dict[str, Any] = {}
        try:
            facts = worker.ask(card, setting, seconds=CASE_SECONDS)
            worker.ask(rehearse, setting, seconds=CASE_SECONDS)
        except Failed as failed:
            print(f"{'a rehearsal' if facts else 'no GPU to measure on'}: {failed}", flush=True)
        if compiled:
            compiled.result()
    for case in chosen:
        began = time.monotonic()
        left = start + seconds - began
        try:
            if left <= 0 or not facts:
                raise Failed("skipped: out of time" if facts else "skipped: no GPU")
            rows = worker.ask(measure_named, setting, case.name, seconds=min(CASE_SECONDS, left))
        except Failed as failed:
            rows = [replace(row, **facts).judged() for row in failures(case, str(failed))]
        for row in rows:
            print(line(row), flush=True)
        print(f"  [{time.monotonic() - began:.1f} s; {time.monotonic() - start:.0f} s in all]", flush=True)
        yield rows
    worker.stop()


def main() -> None:
    parser = argparse.ArgumentParser(prog="bench.papers", description=__doc__)
    parser.add_argument("--only", default="", help="cases whose name contains this; several, with commas between")
    parser.add_argument("--out", type=Path, help="a folder for the rows, the pictures and the page, in place of ours")
    parser.add_argument("--seconds", type=float, default=120.0, help="of everything; what is left is reported as such")
    parser.add_argument("--processes", type=int, default=12, help="that compile at a time; 0: no warm-up")
    parser.add_argument("--list", action="store_true", help="print the cases' names, no more")
    parser.add_argument("--tiny", action="store_true", help="on the CPU, in the tests' sizes; give --out")
    parser.add_argument("--draw", type=Path, help="measure nothing: pictures and tables from this CSV's rows")
    args = parser.parse_args()
    start = time.monotonic()
    setting = Setting("cpu", tiny=True) if args.tiny else Setting()
    chosen = [case for case in cases(setting) if any(part in case.name for part in args.only.split(","))]
    if args.list:
        print("\n".join(case.name for case in chosen))
        return
    csv: Path | None = args.draw
    if csv is None:
        rows: list[Row] = []
        for found in run(chosen, setting, args.processes, start, args.seconds - 2):
            rows += found
            csv = (args.out or RESULTS) / f"papers_{slug(found[0].device) or 'gpu'}.csv"
            write(csv, joined(read(csv), found))  # after every case: a run that is cut short leaves what it has
        print(summary(rows))
    if csv is not None:
        draw(csv, args.out)
    print(f"{time.monotonic() - start:.0f} s")


def joined(old: list[Row], new: list[Row]) -> list[Row]:
    """What was measured stays where the new row only says that there was no time to."""
    measured = {row.key for row in old if row.ours is not None}
    return merge(old, [row for row in new if not (row.error.startswith("skipped") and row.key in measured)])


def draw(csv: Path, out: Path | None) -> None:
    page, pictures = PAGE, PICTURES
    if out is not None:
        out.mkdir(parents=True, exist_ok=True)
        page, pictures = Path(shutil.copy(PAGE, out)), out
    for written in figures.draw_all(csv, RESULTS / "h200.csv", pictures, page):
        print(written)
