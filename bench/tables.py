"""Markdown tables from the rows: `python -m bench.tables` prints them, `--into PAGE` fills them in.

A page holds a table between `<!-- table: NAME -->` and `<!-- /table -->`; NAMEs: forward, backward,
hopper forward, hopper backward, hopper overview, triton overview, decode, speeds, limits.
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Callable, Iterable
from pathlib import Path

from .rows import Row, read

GRIDS = {
    "forward": ("forward", "forward d256"), "backward": ("backward", "backward d256"),
    "hopper forward": ("hopper forward",), "hopper backward": ("hopper backward",), "decode": ("decode",),
}  # fmt: skip
IN_A_GRID = tuple(subject for subjects in GRIDS.values() for subject in subjects)
BLOCK = re.compile(r"(<!-- table: ([a-z ]+) -->\n).*?(<!-- /table -->)", re.DOTALL)


def grid(rows: Iterable[Row], name: str) -> str:
    """A line a cell: TFLOP/s (decode: TB/s) of ours and of each peer, and how many times the peer's speed ours is."""
    cells: dict[tuple[object, ...], dict[str, Row]] = {}
    for row in rows:
        if row.subject in GRIDS[name] and row.seq:
            cells.setdefault((row.d, row.mask, row.seq), {})[row.peer] = row
    peers = list(dict.fromkeys(peer for cell in cells.values() for peer in cell))
    head = ["d, mask, S", "ours", *(f"{peer} (ratio; goal)" for peer in peers)]
    body = []
    for (d, mask, seq), cell in cells.items():
        ours = next((row.ours_tflops for row in cell.values() if row.ours_tflops), None)
        body.append([f"{d}, {mask}, {length(seq)}", number(ours), *(beside(cell.get(peer)) for peer in peers)])
    return markdown(head, body)


def overview(rows: Iterable[Row], *names: str) -> str:
    """A line a head size and mask, a column a length: our TFLOP/s (how many times the speed of the fastest peer)."""
    subjects = [subject for name in names for subject in GRIDS[name]]
    lines: dict[tuple[str, int | None, str], dict[int, list[Row]]] = {}
    for row in rows:
        if row.subject in subjects and row.seq:
            key = (row.direction, row.d, row.mask)
            lines.setdefault(key, {}).setdefault(row.seq, []).append(row)
    seqs = sorted({seq for cells in lines.values() for seq in cells})
    body = [
        [f"{direction}, {d}, {mask}", *(beside_the_best(cells.get(seq, [])) for seq in seqs)]
        for (direction, d, mask), cells in lines.items()
    ]
    return markdown(["direction, d, mask", *map(length, seqs)], body)


def beside_the_best(cell: list[Row]) -> str:
    ratios = [row.ratio for row in cell if row.ratio is not None]
    return f"{number(cell[0].ours_tflops)} ({min(ratios):.2f})" if ratios else ""


def speeds(rows: Iterable[Row]) -> str:
    """A line a row of the other timed cells, and of the means."""
    head = ["what", "beside", "ours", "theirs", "ratio (least, greatest)", "goal", "reached"]
    body = [
        [
            row.name,
            row.peer,
            timed(row.ours, row.unit),
            timed(row.theirs, row.unit),
            spread(row),
            row.goal,
            verdict(row),
        ]
        for row in rows
        if row.unit in ("ms", "") and (row.subject not in IN_A_GRID or not row.seq)
    ]
    return markdown(head, body)


def limits(rows: Iterable[Row]) -> str:
    """A line a row of what is measured against a limit: host time, memory, the first call."""
    head = ["what", "ours", "limit", "reached", "beside"]
    body = [
        [
            " ".join(part for part in (row.name, row.note) if part), timed(row.ours, row.unit), row.goal, verdict(row),
            f"{row.peer} {timed(row.theirs, row.unit)}" if row.peer else "",
        ]
        for row in rows
        if row.goal.startswith("<=")
    ]  # fmt: skip
    return markdown(head, body)


TABLES: dict[str, Callable[[list[Row]], str]] = {
    "forward": lambda rows: grid(rows, "forward"),
    "backward": lambda rows: grid(rows, "backward"),
    "hopper forward": lambda rows: grid(rows, "hopper forward"),
    "hopper backward": lambda rows: grid(rows, "hopper backward"),
    "decode": lambda rows: grid(rows, "decode"),
    "hopper overview": lambda rows: overview(rows, "hopper forward", "hopper backward"),
    "triton overview": lambda rows: overview(rows, "forward", "backward"),
    "speeds": speeds,
    "limits": limits,
}


def fill(page: str, rows: list[Row], tables: dict[str, Callable[[list[Row]], str]] = TABLES) -> str:
    """The page with its tables made anew. ValueError for a name that is no table, and for a page without any."""

    def table(match: re.Match[str]) -> str:
        if match[2] not in tables:
            raise ValueError(f"table {match[2]!r}: it must be one of {', '.join(tables)}")
        return f"{match[1]}{tables[match[2]](rows)}\n{match[3]}"

    filled, count = BLOCK.subn(table, page)
    if not count:
        raise ValueError("the page has no table: it must hold <!-- table: NAME --> and <!-- /table -->, each on a line")
    return filled


def markdown(head: list[str], body: list[list[str]]) -> str:
    rule = ["---", *("---:" for _ in head[1:])]
    return "\n".join("| " + " | ".join(line) + " |" for line in (head, rule, *body))


def beside(row: Row | None) -> str:
    """One peer's part of a grid's line."""
    if row is None:
        return ""
    if row.error and row.ratio is None:
        return f"failed: {row.error}"
    goal = f"; {row.goal}{'' if row.reached == 'yes' else ' missed'}" if row.goal else ""
    return f"{number(row.their_tflops)} ({row.ratio:.2f}{goal})" + (f" {row.error}" if row.error else "")


def length(seq: object) -> str:
    return f"{seq // 1024}k" if isinstance(seq, int) and seq % 1024 == 0 else str(seq)


def number(x: float | None) -> str:
    return "" if x is None else f"{x:.0f}" if x >= 10 else f"{x:.2f}"


def timed(x: float | None, unit: str) -> str:
    return "" if x is None else f"{x:.3g} {unit}" if x < 1000 else f"{x:.0f} {unit}"


def spread(row: Row) -> str:
    return "" if row.ratio is None else f"{row.ratio:.2f} ({row.ratio_min:.2f}, {row.ratio_max:.2f})"


def verdict(row: Row) -> str:
    return f"{row.reached}: {row.error}" if row.error else row.reached


def main() -> None:
    parser = argparse.ArgumentParser(prog="bench.tables", description=__doc__)
    parser.add_argument("csv", type=Path, nargs="?", default=Path(__file__).parent / "results" / "h200.csv")
    parser.add_argument("--into", type=Path, action="append", default=[], help="a page whose tables to fill in")
    args = parser.parse_args()
    rows = read(args.csv)
    if not rows:
        raise SystemExit(f"{args.csv} has no rows: `python -m bench.gpu --write` measures them")
    for page in args.into:
        page.write_text(fill(page.read_text(), rows))
    if not args.into:
        print("\n\n".join(f"{name}:\n\n{table(rows)}" for name, table in TABLES.items()))


if __name__ == "__main__":
    main()
