"""The papers' figures from rows: nothing is measured here. A figure without a row is not drawn."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from ..gpu_cases import OPERATIONS
from ..plot import COLOURS, Lines, panel, panels
from ..rows import Row, read
from ..tables import fill, length
from .tables import tables

OURS, SPARSE = "ours", "ours, butterfly"
PALETTE = {**COLOURS, OURS: "#c0392b", SPARSE: "#e67e22", "standard": "#2c3e50"}
Series = dict[str, dict[float, float]]  # name: x: y


def draw_all(csv: Path, grid: Path, pictures: Path, page: Path) -> list[Path]:
    """Draw what there are rows for, fill in the page's tables, and return what was written."""
    rows, in_grid = read(csv), read(grid)
    drawings: dict[str, tuple[Callable[[list[Row], Path], bool], list[Row]]] = {
        "papers_lengths.png": (draw_lengths, rows),
        "papers_sparsity.png": (draw_sparsity, rows),
        "papers_flash2.png": (draw_flash2, in_grid),
        "papers_flash3.png": (draw_flash3, in_grid),
    }
    written = [pictures / name for name, (draw, of) in drawings.items() if draw(of, pictures / name)]
    page.write_text(fill(page.read_text(), rows, tables({path.name for path in pictures.glob("papers_*.png")})))
    return [*written, page]


# --- FlashAttention: figures 3 and 2 (right) -----------------------------------------------------------------------


def against_length(rows: Iterable[Row], subject: str) -> Series:
    """Ours, exact and block-sparse, and the peers that were exact."""
    found: Series = {}
    for row in rows:
        if row.subject != subject or row.seq is None:
            continue
        sparse = row.mask != "full"
        if row.ours is not None:
            found.setdefault(SPARSE if sparse else OURS, {})[row.seq] = row.ours
        if row.theirs is not None and not sparse:
            found.setdefault(row.peer, {})[row.seq] = row.theirs
    return found


def draw_lengths(rows: list[Row], path: Path) -> bool:
    times, memory = against_length(rows, "lengths"), against_length(rows, "lengths memory")
    if not times:
        return False
    figure, (left, right) = _figure(2)
    for axis, series, label in ((left, times, "ms"), (right, memory, "GiB beyond q, k, v")):
        _lines(axis, series)
        seqs = sorted({int(x) for points in series.values() for x in points})
        axis.set_xscale("log", base=2)
        axis.set_yscale("log")
        axis.set_xticks(seqs, [length(seq) for seq in seqs], fontsize=7)
        axis.set_xlabel("N")
        axis.set_ylabel(label)
    left.legend(fontsize=7, frameon=False)
    _save(figure, path, f"Forward + backward, batch 16, 8 heads of 64, {_where(rows)}")
    return True


def draw_sparsity(rows: list[Row], path: Path) -> bool:
    found = sorted((share(row), row) for row in rows if row.subject == "sparsity" and row.ours and row.theirs)
    if not found:
        return False
    figure, (axis,) = _figure(1)
    full = max(row.theirs or 0.0 for _, row in found)
    axis.plot([s for s, _ in found], [row.ours for _, row in found], marker="o", color=PALETTE[OURS], label=OURS)
    axis.plot([0, 1], [0.01, 1.15 * full + 0.01], "--", color="#7d8a8c", label="goal: 1.15 s full + 10 us")
    axis.plot([1], [full], "s", color=PALETTE["standard"], label="ours, no mask")
    axis.set_xlim(0, 1.05)
    axis.set_ylim(0)
    axis.set_xlabel("share s of the tiles that are not EMPTY")
    axis.set_ylabel("ms")
    axis.legend(fontsize=7, frameon=False)
    _save(figure, path, f"Forward + backward, N = {length(found[0][1].seq)}, {_where(rows)}")
    return True


def share(row: Row) -> float:
    """Of "blocks 8/32": 0.25."""
    live, tiles = row.mask.removeprefix("blocks ").split("/")
    return int(live) / int(tiles)


# --- FlashAttention-2 and -3: TFLOP/s against N --------------------------------------------------------------------


def together(rows: Iterable[Row]) -> dict[tuple[int, str], Lines]:
    """(d, mask) -> TFLOP/s of forward and backward one after the other, from the rates of each: a weighted harmonic
    mean. Only who was measured in both."""
    forward, backward = OPERATIONS["forward"], OPERATIONS["backward"]
    found: dict[tuple[int, str], Lines] = {}
    both = panels(rows)
    for (direction, d, mask), lines in both.items():
        if direction != "forward":
            continue
        for name, points in lines.items():
            other = both.get(("backward", d, mask), {}).get(name, {})
            rates = {
                seq: (forward + backward) / (forward / points[seq] + backward / other[seq])
                for seq in points
                if seq in other
            }
            if rates:
                found.setdefault((d, mask), {})[name] = rates
    return found


def draw_flash2(rows: list[Row], path: Path) -> bool:
    found = {key: lines for key, lines in together(rows).items() if key[0] <= 128}
    return _grid({("forward + backward", *key): lines for key, lines in found.items()}, rows, path)


def draw_flash3(rows: list[Row], path: Path) -> bool:
    return _grid(panels(rows), rows, path)


def _grid(found: dict[tuple[str, int, str], Lines], rows: list[Row], path: Path) -> bool:
    """A row of pictures a direction, a column a head size and mask."""
    if not found:
        return False
    directions = sorted({key[0] for key in found}, reverse=True)
    columns = sorted({key[1:] for key in found}, key=lambda column: (column[0], column[1] != "full"))
    figure, axes = _figure(len(columns), len(directions))
    for n, direction in enumerate(directions):
        for m, (d, mask) in enumerate(columns):
            axis = axes[n * len(columns) + m]
            panel(axis, found.get((direction, d, mask), {}), f"{direction}, d {d}, {mask}")
            axis.set_ylim(0)
        axes[n * len(columns)].set_ylabel("TFLOP/s")
    names = {line.get_label(): line for axis in axes for line in axis.lines}
    axes[0].legend(names.values(), names.keys(), fontsize=6, frameon=False, loc="lower right")
    _save(figure, path, f"{_where(rows)}, bf16, 16k tokens a batch, hidden 2048")
    return True


# --- drawing -------------------------------------------------------------------------------------------------------


def _figure(columns: int, lines: int = 1) -> tuple[Any, list[Any]]:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    wide = 4.2 if columns <= 2 else 3.0
    figure, axes = pyplot.subplots(lines, columns, squeeze=False, figsize=(wide * columns, 3.2 * lines))
    for axis in axes.flat:
        axis.grid(alpha=0.3)
    return figure, list(axes.flat)


def _lines(axis: Any, series: Series) -> None:
    for name, points in series.items():
        xs = sorted(points)
        axis.plot(xs, [points[x] for x in xs], marker="o", markersize=3, label=name, color=PALETTE.get(name))


def _where(rows: list[Row]) -> str:
    """The card and the torch of the newest of the rows that were measured."""
    row = next((row for row in reversed(rows) if row.device), rows[0])
    return f"{row.device}, torch {row.torch}"


def _save(figure: Any, path: Path, title: str) -> None:
    from matplotlib import pyplot

    figure.suptitle(title, fontsize=9)
    figure.tight_layout()
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=150)
    pyplot.close(figure)
