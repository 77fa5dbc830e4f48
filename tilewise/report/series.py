"""What the figures of `tilewise explain --figures` show, as numbers: all of it from `algorithm.io_model`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from ..algorithm import io_model
from ..algorithm.io_model import GPU, Cost
from .cost import Question

LENGTHS = tuple(128 << n for n in range(8))  # 128 ... 16k
BLOCKS = tuple(16 << n for n in range(7))  # 16 ... 1024 keys


@dataclass(frozen=True, slots=True)
class Series:
    """One algorithm's curve: at each x the bytes between HBM and the chip, and the roofline's seconds."""

    name: str
    x: tuple[int, ...]
    bytes: tuple[int, ...]
    seconds: tuple[float, ...]


@dataclass(frozen=True, slots=True)
class Point:
    """One algorithm under the roofline: flops for each byte of HBM, and flops a second."""

    name: str
    intensity: float
    rate: float


def against_length(question: Question, gpu: GPU, lengths: Sequence[int] = LENGTHS) -> list[Series]:
    """Forward and backward of each algorithm, all else as in the question.

    >>> series = {one.name: one for one in against_length(Question(), io_model.GPUS["A100"], (1024, 2048))}
    >>> round(series["standard"].bytes[1] / series["standard"].bytes[0], 2)                 # nearly quadratic
    3.96
    """
    costs = [replace(question, seqlen=length).costs(backward=True) for length in lengths]
    return [
        Series(
            name, tuple(lengths), tuple(by_name[name].bytes for by_name in costs),
            tuple(_seconds(by_name[name], gpu) for by_name in costs),
        )
        for name in costs[0]
    ]  # fmt: skip


def against_block(question: Question, gpu: GPU, blocks: Sequence[int] = BLOCKS) -> list[Series]:
    """Forward with tiles of so many keys (FlashAttention-1) or queries (FlashAttention-2), and d of the others.

    Source: FlashAttention (Dao et al., 2022), figure 2, middle.
    """
    d, sizes = question.head_dim, question.sizes
    by_name: dict[str, list[Cost]] = {"FlashAttention-1": [], "FlashAttention-2": []}
    for block in blocks:
        other = min(block, d)
        by_name["FlashAttention-1"].append(io_model.flash_attention_1(sizes, (other, block), band=question.band))
        by_name["FlashAttention-2"].append(io_model.flash_attention_2(sizes, (block, other), band=question.band))
    return [
        Series(name, tuple(blocks), tuple(c.bytes for c in costs), tuple(_seconds(c, gpu) for c in costs))
        for name, costs in by_name.items()
    ]


def floor(question: Question, gpu: GPU) -> float:
    """Seconds of the forward's flops alone: no block size takes less."""
    forward = question.costs(backward=False)["FlashAttention-1"]
    return forward.flops / ceilings(gpu)[1]


def roofline(question: Question, gpu: GPU) -> list[Point]:
    """Forward and backward of each algorithm. Below the roof: some steps wait for flops, others for bytes."""
    both = question.costs(backward=True)
    return [Point(name, total.intensity, total.flops / _seconds(total, gpu)) for name, total in both.items()]


def ceilings(gpu: GPU) -> tuple[float, float]:
    """(bytes, flops) a second: what was measured on such a card, or else its datasheet's."""
    if gpu.measured_bandwidth is None or gpu.measured_flops is None:
        return gpu.bandwidth, gpu.flops
    return gpu.measured_bandwidth, gpu.measured_flops


def _seconds(total: Cost, gpu: GPU) -> float:
    return io_model.predicted_time(total, gpu, measured=gpu.measured_flops is not None)
