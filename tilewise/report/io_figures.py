"""The figures of `tilewise explain --figures`: the paper's argument, one picture a step.

Their numbers are those of `series`, `hierarchy` and `breakdown`; here they are only drawn.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.patches import Polygon
from matplotlib.ticker import LogLocator, NullFormatter

from ..algorithm.io_model import GPU
from . import series
from .breakdown import STEPS, Breakdown
from .cost import Question
from .figures import STANDARD, TILEWISE, bare
from .hierarchy import Level
from .series import Point, Series
from .units import duration, size

COLORS = {
    "standard": STANDARD,
    "standard, fused": "#d99a6c",
    "FlashAttention-1": "#6ba3b8",
    "FlashAttention-2": TILEWISE,
    "block-sparse": "#6a8f3c",
}
MARKERS = {
    "standard": "o",
    "standard, fused": "s",
    "FlashAttention-1": "^",
    "FlashAttention-2": "v",
    "block-sparse": "D",
}
STEP_COLORS = {"matmul": "#8a8a8a", "mask": "#d9b36c", "softmax": "#c9784e", "dropout": "#e3c9b4"}


def write(
    folder: Path,
    question: Question,
    gpu: GPU,
    machines: Sequence[tuple[str, Sequence[Level]]],
    measured: Breakdown,
) -> Iterator[Path]:
    """All of them, as PNGs; each one's path when it is there. machines: whose memory pyramids to draw."""
    folder.mkdir(parents=True, exist_ok=True)
    figures = {
        "length.png": length(series.against_length(question, gpu), question, gpu),
        "block.png": block(series.against_block(question, gpu), series.floor(question, gpu), question, gpu),
        "roofline.png": roofline(series.roofline(question, gpu), question, gpu),
        "memory.png": memory(machines),
        "breakdown.png": breakdown(measured),
    }
    for name, figure in figures.items():
        figure.savefig(folder / name, dpi=120)
        yield folder / name


def _figure(width: float, height: float) -> Figure:
    figure = Figure(figsize=(width, height), layout="constrained")
    FigureCanvasAgg(figure)
    return figure


def _sentence(question: Question) -> str:
    parts = [f"d {question.head_dim}", f"{question.heads} heads, batch {question.batch}", question.dtype]
    if not question.band.is_full:
        parts.append(str(question.band))
    return ", ".join([*parts, *["dropout"] * question.dropout])


# --- against the length, against the block size ---------------------------------------------------------------------


def length(curves: Sequence[Series], question: Question, gpu: GPU) -> Figure:
    """Bytes, and the roofline's time, against N: slopes of 2, and of 1 where the mask is sparse."""
    figure = _figure(10, 4.4)
    left, right = figure.subplots(1, 2)
    for curve in curves:
        _curve(left, curve, [n / 1e9 for n in curve.bytes])
        _curve(right, curve, [t * 1e3 for t in curve.seconds])
    for axes, title in ((left, "bytes between HBM and the chip, GB"), (right, f"time at best on {gpu.name}, ms")):
        axes.set_title(title, fontsize=10)
        _powers(axes, curves[0].x, "N, queries and keys")
    left.legend(frameon=False, fontsize=9)
    M = f"M = {question.sram_kib:g} KiB"
    figure.suptitle(f"forward and backward, {_sentence(question)}, {M}", fontsize=11)
    return figure


def block(curves: Sequence[Series], floor: float, question: Question, gpu: GPU) -> Figure:
    """The paper's figure 2, middle: larger tiles, fewer passes, until the flops take longer than the bytes."""
    figure = _figure(10, 4.4)
    left, right = figure.subplots(1, 2)
    for curve in curves:
        _curve(left, curve, [n / 1e9 for n in curve.bytes])
        _curve(right, curve, [t * 1e3 for t in curve.seconds])
    right.axhline(floor * 1e3, color="black", linewidth=1, linestyle=":")
    right.annotate(
        f"the flops alone: {duration(floor)}", (curves[0].x[0], floor * 1e3), xytext=(0, 4),
        textcoords="offset points", fontsize=9, va="bottom",
    )  # fmt: skip
    for axes, title in ((left, "bytes between HBM and the chip, GB"), (right, f"time at best on {gpu.name}, ms")):
        axes.set_title(title, fontsize=10)
        _powers(axes, curves[0].x, "rows of the outer tile: keys (FlashAttention-1), queries (-2)")
    left.legend(frameon=False, fontsize=9)
    figure.suptitle(f"forward, N {question.seqlen}, {_sentence(question)}", fontsize=11)
    return figure


def _curve(axes: Axes, curve: Series, y: Sequence[float]) -> None:
    """FlashAttention-1 broad and pale: -2 often lies on it."""
    broad = curve.name == "FlashAttention-1"
    axes.loglog(
        curve.x, y, color=COLORS[curve.name], marker=MARKERS[curve.name], label=curve.name,
        markersize=8 if broad else 5, linewidth=4 if broad else 1.5, alpha=0.6 if broad else 1.0,
    )  # fmt: skip


def _powers(axes: Axes, x: Sequence[int], label: str) -> None:
    axes.set_xlabel(label)
    axes.set_xticks(list(x), [f"{n // 1024}k" if n >= 1024 else str(n) for n in x])
    axes.minorticks_off()
    low, high = axes.get_ylim()
    axes.yaxis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0) if high / low < 1e3 else (1.0,)))
    axes.yaxis.set_major_formatter(lambda value, _: f"{value:g}")
    bare(axes)


# --- roofline -------------------------------------------------------------------------------------------------------


def roofline(points: Sequence[Point], question: Question, gpu: GPU) -> Figure:
    """Flops a second against flops a byte: under the slope the bytes decide, under the roof the flops."""
    figure = _figure(8, 5)
    axes = figure.subplots()
    bandwidth, peak = series.ceilings(gpu)
    ridge = peak / bandwidth
    ends = 2.0, 8 * max(ridge, *(point.intensity for point in points))
    axes.loglog([ends[0], ridge, ends[1]], [ends[0] * bandwidth / 1e12, peak / 1e12, peak / 1e12], color="#444444")
    kind = "measured" if gpu.measured_flops is not None else "datasheet"
    axes.annotate(
        f"{peak / 1e12:.0f} TFLOP/s ({kind})", (ends[1], peak / 1e12), xytext=(0, 5), textcoords="offset points",
        ha="right", fontsize=9,
    )  # fmt: skip
    axes.annotate(
        f"{bandwidth / 1e12:.3g} TB/s ({kind})", (2 * ends[0], 2 * ends[0] * bandwidth / 1e12), ha="left", va="top",
        fontsize=9, xytext=(8, 0), textcoords="offset points",
    )  # fmt: skip
    low = axes.get_ylim()[0]
    axes.vlines(ridge, low, peak / 1e12, color="#444444", linewidth=0.8, linestyle=":")
    axes.set_ylim(low, 3 * peak / 1e12)
    axes.annotate(
        f"{ridge:.0f} flops a byte", (ridge, low), xytext=(5, 6), textcoords="offset points", fontsize=9
    )  # fmt: skip
    for point in points:
        broad = point.name == "FlashAttention-1"  # others lie on it
        label = f"{point.name}: {point.intensity:.0f} flops a byte, {point.rate / 1e12:.0f} TFLOP/s"
        axes.plot(
            point.intensity, point.rate / 1e12, color=COLORS[point.name], marker=MARKERS[point.name],
            markersize=15 if broad else 8, alpha=0.6 if broad else 1.0, linestyle="", label=label,
            markeredgecolor="white", zorder=2 if broad else 3,
        )  # fmt: skip
    axes.set_xlabel("flops for each byte between HBM and the chip")
    axes.set_ylabel("TFLOP/s at best")
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_major_formatter(lambda value, _: f"{value:g}")
        axis.set_minor_formatter(NullFormatter())
    axes.legend(frameon=False, fontsize=9, loc="upper left")
    bare(axes)
    axes.set_title(f"{gpu.name}: forward and backward, N {question.seqlen}, {_sentence(question)}", fontsize=11)
    return figure


# --- the memory's levels --------------------------------------------------------------------------------------------


def memory(machines: Sequence[tuple[str, Sequence[Level]]]) -> Figure:
    """The paper's figure 1, left: a pyramid for each machine, the fastest level on top."""
    figure = _figure(5.4 * len(machines), 4.4)
    panels = figure.subplots(1, len(machines), squeeze=False)[0]
    for axes, (name, levels) in zip(panels, machines, strict=True):
        _pyramid(axes, levels)
        axes.set_title(name, fontsize=11, x=1.02 / 3.32)  # above the tip
    return figure


def _pyramid(axes: Axes, levels: Sequence[Level]) -> None:
    rows = len(levels)
    shades = ("#1f6f8b", "#6ba3b8", "#a9c7d3", "#d8e5ea")[-rows:] if rows <= 4 else ("#a9c7d3",) * rows
    for n, level in enumerate(levels):
        top, bottom = n / rows, (n + 0.94) / rows
        corners = [(-top, -top), (top, -top), (bottom, -bottom), (-bottom, -bottom)]
        axes.add_patch(Polygon(corners, closed=True, facecolor=shades[n], edgecolor="none"))
        bandwidth = "" if level.bandwidth is None else f"{size(level.bandwidth)}/s"
        words = "\n".join(part for part in (f"{level.name}: {_held(level.size)}", bandwidth, level.note) if part)
        axes.annotate(words, (1.08, -(top + bottom) / 2), fontsize=9, va="center")
        axes.plot([(top + bottom) / 2 + 0.02, 1.05], [-(top + bottom) / 2] * 2, color="#999999", linewidth=0.6)
    axes.set_xlim(-1.02, 2.3)
    axes.set_ylim(-1.02, 0.02)
    axes.set_axis_off()


def _held(capacity: int) -> str:
    """Bytes that a level holds: caches come in powers of two.

    >>> _held(32 << 10), _held(108 * 192 << 10), _held(40 * 10**9)
    ('32 KiB', '20.2 MiB', '40.0 GB')
    """
    if capacity >= 1 << 30:
        return size(capacity)
    return f"{capacity / 2**10:.3g} KiB" if capacity < 1 << 20 else f"{capacity / 2**20:.3g} MiB"


# --- where the time goes --------------------------------------------------------------------------------------------


def breakdown(measured: Breakdown) -> Figure:
    """The paper's figure 1, right: standard attention's steps, one on another, and the same in one kernel."""
    figure = _figure(7, 4.6)
    axes = figure.subplots()
    whole, under = measured.standard, 0.0
    for step in STEPS:
        taken = measured.steps[step]
        axes.bar(0, taken * 1e3, bottom=under * 1e3, width=0.6, color=STEP_COLORS[step])
        axes.annotate(
            f"{step}  {duration(taken)}", (0.34, (under + taken / 2) * 1e3), va="center", fontsize=9
        )  # fmt: skip
        under += taken
    ours = {"tilewise": measured.tilewise, "tilewise,\nwithout dropout": measured.plain}
    for at, (name, taken) in enumerate(ours.items(), start=2):
        axes.bar(at, taken * 1e3, width=0.6, color=TILEWISE, alpha=1.0 if name == "tilewise" else 0.6)
        axes.annotate(
            duration(taken), (at, taken * 1e3), xytext=(0, 3), textcoords="offset points", ha="center", fontsize=9
        )  # fmt: skip
    axes.annotate(
        duration(whole), (0, whole * 1e3), xytext=(0, 3), textcoords="offset points", ha="center", fontsize=9
    )  # fmt: skip
    axes.set_xticks([0, 2, 3], ["standard attention,\na kernel for each step", *ours])
    axes.set_ylabel("ms")
    axes.set_xlim(-0.5, 3.5)
    bare(axes)
    axes.grid(visible=False, axis="x")
    batch, heads, N, d = measured.shape
    axes.set_title(
        f"causal forward with dropout, {batch} x {heads} heads, N {N}, d {d}, {measured.dtype}\n{measured.where}",
        fontsize=10,
    )
    return figure
