"""`python -m bench.plot`: TFLOP/s against the length, ours and the peers', from a CSV of `bench.gpu` to a PNG."""

from __future__ import annotations

import argparse
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from .rows import Row, read
from .tables import IN_A_GRID, length

COLOURS = {
    "ours, hopper": "#c0392b", "ours, triton": "#e67e22", "FlexAttention": "#2471a3", "FlashAttention-2": "#7d8a8c",
    "FlashAttention-3": "#8e44ad", "FlashAttention-4": "#d7bde2", "cuDNN": "#27ae60",
}  # fmt: skip
Lines = dict[str, dict[int, float]]  # name: length: TFLOP/s


def panels(rows: Iterable[Row]) -> dict[tuple[str, int, str], Lines]:
    """(direction, d, mask) -> the lines of that picture. Cells without a figure are left out."""
    found: dict[tuple[str, int, str], Lines] = {}
    for row in rows:
        if row.subject not in IN_A_GRID or row.d is None or row.seq is None:
            continue
        if not row.direction:  # of a cache, in TB/s
            continue
        ours = "ours, hopper" if row.subject.startswith("hopper") else "ours, triton"
        lines = found.setdefault((row.direction, row.d, row.mask), {})
        for name, rate in ((ours, row.ours_tflops), (row.peer, row.their_tflops)):
            if rate is not None:
                lines.setdefault(name, {})[row.seq] = rate
    return found


def draw(rows: list[Row], path: Path) -> None:
    """A row of pictures a direction, a column a head size and mask. ValueError without a cell to draw."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    found = panels(rows)
    if not found:
        raise ValueError("no rows of the grid to draw")
    directions = sorted({key[0] for key in found}, reverse=True)
    columns = sorted({key[1:] for key in found}, key=lambda column: (column[0], column[1] != "full"))
    figure, axes = pyplot.subplots(
        len(directions), len(columns), squeeze=False, sharey=True, figsize=(3.0 * len(columns), 3.0 * len(directions))
    )
    for row_axes, direction in zip(axes, directions, strict=True):
        for axis, column in zip(row_axes, columns, strict=True):
            panel(axis, found.get((direction, *column), {}), f"{direction}, d {column[0]}, {column[1]}")
        row_axes[0].set_ylabel("TFLOP/s")
    fastest = max(rate for lines in found.values() for points in lines.values() for rate in points.values())
    axes[0][0].set_ylim(0, 1.05 * fastest)  # of all: they share it
    named = {name: line for axis in axes.flat for line in axis.lines if (name := line.get_label())}
    axes[-1][-1].legend(named.values(), named.keys(), fontsize=7, frameon=False, loc="upper left")
    figure.suptitle(f"{rows[0].device}, bf16, 16k tokens a batch, hidden 2048, torch {rows[0].torch}", fontsize=10)
    figure.tight_layout()
    figure.savefig(path, dpi=150)
    pyplot.close(figure)


def panel(axis: Any, lines: Lines, title: str) -> None:
    axis.set_title(title, fontsize=9)
    for name, points in lines.items():
        seqs = sorted(points)
        axis.plot(
            seqs, [points[seq] for seq in seqs], marker="o", markersize=3, label=name, color=COLOURS.get(name),
            linewidth=2 if name.startswith("ours") else 1,
        )  # fmt: skip
    ticks = sorted({seq for points in lines.values() for seq in points})
    axis.set_xscale("log", base=2)
    axis.set_xticks(ticks, [length(seq) for seq in ticks], fontsize=7)
    axis.set_xlabel("S", fontsize=8)
    axis.grid(alpha=0.3)


def main() -> None:
    parser = argparse.ArgumentParser(prog="bench.plot", description=__doc__)
    parser.add_argument("csv", type=Path, nargs="?", default=Path(__file__).parent / "results" / "h200.csv")
    parser.add_argument("--out", type=Path, help="instead of the CSV's name with .png")
    args = parser.parse_args()
    out = args.out or args.csv.with_suffix(".png")
    draw(read(args.csv), out)
    print(out)


if __name__ == "__main__":
    main()
