"""One row a measurement: the CSV, and what is computed from its rows (goals, means). Needs nothing but Python."""

from __future__ import annotations

import csv
import math
import re
from collections.abc import Iterable
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any

KEY = ("subject", "direction", "dtype", "d", "mask", "seq", "peer")


@dataclass(frozen=True)
class Row:
    """A cell beside one peer. None (an empty field in the file) where a figure does not exist.

    ours, theirs: medians over the rounds, in `unit`. ratio: the median of the rounds' credit / ours, where credit is
    the peer's time (speed), or what the note says our time may be; at least 1 is as good. ours_tflops, their_tflops: of
    a cache TB/s. goal: "" (none), ">= x" of
    the ratio, or "<= x" of ours, in its unit.
    """

    subject: str
    direction: str = ""
    dtype: str = ""
    d: int | None = None
    mask: str = ""
    seq: int | None = None
    peer: str = ""
    unit: str = "ms"
    ours: float | None = None
    theirs: float | None = None
    ours_tflops: float | None = None
    their_tflops: float | None = None
    ratio: float | None = None
    ratio_min: float | None = None
    ratio_max: float | None = None
    goal: str = ""
    reached: str = ""  # "yes", "no", "" without a goal
    note: str = ""
    error: str = ""
    device: str = ""
    torch: str = ""
    triton: str = ""

    @property
    def key(self) -> tuple[object, ...]:
        return tuple(getattr(self, name) for name in KEY)

    @property
    def name(self) -> str:
        """What a person types after --only: a part of this."""
        size = f"d{self.d}" if self.d else ""
        seq = f"S{self.seq}" if self.seq else ""
        direction = "" if self.direction in self.subject else self.direction
        return " ".join(part for part in (self.subject, direction, self.dtype, size, self.mask, seq) if part)

    def judged(self) -> Row:
        """The same with `reached` filled in: a cell with an error, or without its figure, has not reached its goal."""
        if not self.goal:
            return replace(self, reached="")
        relation, limit = parse_goal(self.goal)
        figure = self.ratio if relation == ">=" else self.ours
        good = figure is not None and not self.error and (figure >= limit if relation == ">=" else figure <= limit)
        return replace(self, reached="yes" if good else "no")


FIELDS = [field.name for field in fields(Row)]
_WHOLE = {"d", "seq"}
_REAL = {"ours", "theirs", "ours_tflops", "their_tflops", "ratio", "ratio_min", "ratio_max"}


def parse_goal(goal: str) -> tuple[str, float]:
    """(">=" or "<=", the number). ValueError for anything else."""
    match = re.fullmatch(r"(>=|<=) ([0-9.]+)", goal)
    if not match:
        raise ValueError(f"goal is {goal!r}: it must be '>= x' (of the ratio) or '<= x' (of ours)")
    return match[1], float(match[2])


def read(path: Path) -> list[Row]:
    """The rows of a file; none if it does not exist."""
    if not path.exists():
        return []
    with open(path, newline="") as file:
        return [_row(line) for line in csv.DictReader(file)]


def write(path: Path, rows: Iterable[Row]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with open(path, "w", newline="") as file:
        writer = csv.DictWriter(file, FIELDS, lineterminator="\n")
        writer.writeheader()
        for row in rows:
            writer.writerow({name: _text(value) for name, value in asdict(row).items()})


def merge(old: Iterable[Row], new: Iterable[Row]) -> list[Row]:
    """`old` with the rows that `new` measured again replaced where they stand, and the others of `new` after them."""
    rows = {row.key: row for row in old}
    rows.update({row.key: row for row in new})
    return list(rows.values())


BEST = "best peer"


def geometric_mean(rows: Iterable[Row], subject: str, peer: str, goal: str) -> Row | None:
    """A row for the mean of the ratios of a subject's cells beside one peer, or beside the BEST of each; it fails if a
    cell did. None: no cells."""
    cells = [row for row in rows if row.subject == subject and row.peer in (peer, peer == BEST and row.peer)]
    cells = [row for row in cells if row.mask != "all cells"]
    if not cells:
        return None
    if peer == BEST:
        by_name: dict[str, list[Row]] = {}
        for row in cells:
            by_name.setdefault(row.name, []).append(row)
        cells = [min(beside, key=lambda row: (not row.error, row.ratio or 0.0)) for beside in by_name.values()]
    ratios = [row.ratio for row in cells if row.ratio and not row.error]
    failed = len(cells) - len(ratios)
    first = cells[0]
    mean = math.exp(sum(map(math.log, ratios)) / len(ratios)) if ratios else None
    return Row(
        subject=subject, direction=first.direction, dtype=first.dtype, mask="all cells", peer=peer, unit="",
        ratio=mean and round(mean, 3), ratio_min=min(ratios, default=None), ratio_max=max(ratios, default=None),
        goal=goal, note=f"geometric mean of {len(ratios)} cells", error=f"{failed} cells failed" * bool(failed),
        device=first.device, torch=first.torch, triton=first.triton,
    ).judged()  # fmt: skip


def _row(line: dict[str, str]) -> Row:
    values: dict[str, Any] = {name: _value(name, text) for name, text in line.items()}
    return Row(**values)


def _value(name: str, text: str) -> object:
    if name in _WHOLE:
        return int(text) if text else None
    if name in _REAL:
        return float(text) if text else None
    return text


def _text(value: object) -> object:
    return "" if value is None else value
