"""Nsight Compute: finding it, what it is asked, what it answers. Nothing here is about attention.

Source: Nsight Compute's CLI manual (options; `--csv --page raw`: one line a kernel, a column a metric, and below the
header a line of units) and its Kernel Profiling Guide (the metrics' names).
"""

from __future__ import annotations

import csv
import os
import shutil
import subprocess
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

READ, WRITE = "dram__bytes_read.sum", "dram__bytes_write.sum"
L2 = "lts__t_bytes.sum"  # between the L2 and everything that asks it: all processors, copies, and the DRAM's fills not
TIME = "gpu__time_duration.sum"
METRICS = (READ, WRITE, L2, TIME)
PLACES = ("/usr/local/cuda/bin/ncu", "/opt/nvidia/nsight-compute")
UNITS = {
    "": 1.0, "byte": 1.0, "Kbyte": 1e3, "Mbyte": 1e6, "Gbyte": 1e9, "Tbyte": 1e12,
    "nsecond": 1e-9, "usecond": 1e-6, "msecond": 1e-3, "second": 1.0, "ns": 1e-9, "us": 1e-6, "ms": 1e-3, "s": 1.0,
}  # fmt: skip


class NoCounters(Exception):
    """Why there are none, in a sentence."""


@dataclass(frozen=True, slots=True)
class Launch:
    """One kernel: bytes, and seconds; NaN where ncu had no figure."""

    name: str
    read: float
    written: float
    l2: float
    seconds: float


def find() -> Path:
    """Where ncu is. Raises NoCounters."""
    if found := shutil.which("ncu"):
        return Path(found)
    for place in map(Path, PLACES):
        if place.is_file():
            return place
        if versions := sorted(place.glob("*/ncu")):
            return versions[-1]
    raise NoCounters("Nsight Compute is not installed here: there is no ncu on the PATH, nor where CUDA puts it.")


def command(ncu: Path, log: Path, program: Sequence[str], cache: str) -> list[str]:
    """ncu over a program, the kernels between its cudaProfilerStart and Stop alone. cache: "all": the L2 is emptied
    before each.

    The clocks are left alone: bytes do not depend on them. Children are not followed: compilers are.
    """
    return [
        str(ncu), "--csv", "--page", "raw", "--print-units", "base",
        "--clock-control", "none", "--cache-control", cache,
        "--profile-from-start", "off", "--target-processes", "application-only", "--metrics", ",".join(METRICS),
        "--log-file", str(log), "--force-overwrite", *program,
    ]  # fmt: skip


def run(arguments: Sequence[str], log: Path, seconds: float) -> tuple[str, str]:
    """(ncu's log, what the program printed). Raises NoCounters where there is nothing to read.

    A run that is cut short has in its log what ncu wrote until then: perhaps nothing, for it prints a CSV at the end.
    """
    environment = {**os.environ, "LC_ALL": "C"}  # no commas for decimal points
    try:
        done = subprocess.run(
            arguments, capture_output=True, text=True, timeout=seconds, env=environment, check=False
        )  # fmt: skip
        printed = done.stdout + done.stderr
    except subprocess.TimeoutExpired as late:
        printed = f"it took longer than {seconds:.0f} s\n{_text(late.stdout)}{_text(late.stderr)}"
    text = log.read_text() if log.exists() else ""
    if not parse(text.splitlines()):
        raise NoCounters(complaint(text + printed))
    return text, printed


def _text(x: str | bytes | None) -> str:
    return x.decode(errors="replace") if isinstance(x, bytes) else x or ""


def complaint(text: str) -> str:
    """A sentence for why ncu counted nothing, from what it printed."""
    if "ERR_NVGPUCTRPERM" in text:
        return (
            "The driver keeps the GPU's counters from this user (ERR_NVGPUCTRPERM): run it as root, or load the driver "
            "with NVreg_RestrictProfilingToAdminUsers=0."
        )
    if "LibraryNotLoaded" in text:
        return "Nsight Compute cannot reach the GPU's counters here (LibraryNotLoaded): in some sandboxes it never can."
    if "No kernels were profiled" in text:
        return f"Nsight Compute saw no kernel between the profiler's start and stop; the program said:\n{text}"
    lines = [line for line in text.splitlines() if "==ERROR==" in line] or text.splitlines()[-15:]
    return "Nsight Compute counted nothing: " + "\n".join(lines)


def parse(lines: Iterable[str]) -> list[Launch]:
    """The kernels of a log, in the order of their launches; what is not CSV (==PROF== ...) is passed over.

    A metric that has no column, or no number in it ("n/a"), is NaN.
    """
    rows = iter(csv.reader(line for line in lines if line.startswith('"')))
    header = next((row for row in rows if row[0] == "ID"), None)
    if header is None:
        return []
    units: dict[str, str] = {}
    found = []
    for row in rows:
        cells = dict(zip(header, row, strict=False))
        if not cells["ID"]:  # the line of units
            units = cells
            continue
        read, written, l2, seconds = (_number(cells.get(name, ""), units.get(name, "")) for name in METRICS)
        found.append((int(cells["ID"].replace(",", "")), Launch(cells["Kernel Name"], read, written, l2, seconds)))
    return [launch for _, launch in sorted(found, key=lambda pair: pair[0])]


def _number(text: str, unit: str) -> float:
    """A figure such as 1,234.5 in its unit, as bytes or seconds."""
    try:
        return float(text.replace(",", "")) * UNITS[unit]
    except (ValueError, KeyError):
        return float("nan")
