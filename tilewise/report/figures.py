"""The demo's figure, drawn without a screen, and the style of all."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from .measure import Measurement
from .training import Curves

STANDARD, TILEWISE = "#b4552d", "#1f6f8b"


def demo(
    curves: Curves, lengths: Sequence[int], measured: Sequence[tuple[Measurement, Measurement]], out: Path
) -> None:
    """The demo's picture as a PNG: loss curves, and time, memory and bytes against the sequence length."""
    figure = Figure(figsize=(10, 7), layout="constrained")
    FigureCanvasAgg(figure)
    losses, memory, traffic, time = figure.subplots(2, 2).flat
    _losses(losses, curves)
    _against_length(
        memory, "peak memory beyond the inputs, MB", lengths, [[m.peak / 1e6 for m in ms] for ms in measured]
    )
    _against_length(
        traffic, "counted bytes to and from memory, MB", lengths, [[m.hbm / 1e6 for m in ms] for ms in measured]
    )
    _against_length(time, "forward + backward, ms", lengths, [[m.seconds * 1e3 for m in ms] for ms in measured])
    figure.savefig(out, dpi=120)


def _losses(axes: Axes, curves: Curves) -> None:
    steps = range(1, len(curves.standard) + 1)
    axes.plot(steps, curves.standard, color=STANDARD, linewidth=4, alpha=0.4, label="standard attention")
    axes.plot(steps, curves.tilewise, color=TILEWISE, linewidth=1.2, label="tilewise")
    axes.set_title(f"the same GPT twice: losses differ by {curves.largest_difference:.0e} at most", fontsize=10)
    axes.set_xlabel("step")
    axes.set_ylabel("loss, nats per character")
    axes.legend(frameon=False)
    bare(axes)


def _against_length(axes: Axes, title: str, lengths: Sequence[int], values: Sequence[Sequence[float]]) -> None:
    """values: (standard, tilewise) for each length. On log scales a slope of 2 is quadratic, of 1 linear."""
    for name, color, column in (("standard attention", STANDARD, 0), ("tilewise", TILEWISE, 1)):
        axes.loglog(lengths, [pair[column] for pair in values], color=color, marker="o", markersize=4, label=name)
    axes.set_title(title, fontsize=10)
    axes.set_xlabel("sequence length")
    axes.set_xticks(list(lengths), [str(n) for n in lengths])
    axes.minorticks_off()
    axes.legend(frameon=False)
    bare(axes)


def bare(axes: Axes) -> None:
    """No frame but the two axes, and a faint grid."""
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(alpha=0.25)
