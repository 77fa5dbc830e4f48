"""Tables for the terminal, 80 columns wide."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence

from rich.console import RenderableType
from rich.markup import escape
from rich.table import Table

from ..algorithm.io_model import GPU, GPUS
from . import cost
from .check import Finding
from .cost import ARRAYS, Question
from .doctor import Diagnosis
from .measure import HEAD_DIM, HEADS, Measurement
from .units import duration, flops, kib, size


def table(first: str, *rest: str) -> Table:
    """An empty table: a first column of names, the others of numbers."""
    result = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    result.add_column(first, no_wrap=True)
    for name in rest:
        result.add_column(name, justify="right", no_wrap=True)
    return result


def explanation(question: Question, gpu: GPU) -> Iterator[RenderableType]:
    """All that `tilewise explain` prints, from the totals down to where the difference comes from."""
    forward, both = question.costs(backward=False), question.costs(backward=True)
    density = cost.density(cost.butterfly(question.seqlen))
    base = both["standard"]

    yield "[bold]Bytes between HBM and the chip[/]"
    moved = table("", "B_r x B_c", "on chip", "forward", "backward", "both", "standard /")
    for name, total in both.items():
        B_r, B_c = question.blocks[name]
        moved.add_row(
            name, f"{B_r} x {B_c}", kib(forward[name].peak_on_chip), size(forward[name].bytes),
            size(total.bytes - forward[name].bytes), size(total.bytes), f"{base.bytes / total.bytes:.1f}x",
        )  # fmt: skip
    yield moved
    yield (
        "on chip: all that the forward holds of one head, S and sums in fp32; M sets the tiles, up to a constant.\n"
        f"block-sparse: FlashAttention-1 on the butterfly pattern, {density:.0%} of the tiles.\n"
    )

    measured = gpu.measured_flops is not None
    peak, bandwidth = (gpu.measured_flops, gpu.measured_bandwidth) if measured else (gpu.flops, gpu.bandwidth)
    assert peak is not None
    assert bandwidth is not None
    yield "[bold]Forward and backward[/]"
    work = table("", "flops", "flops/byte", "memory", f"time on {gpu.name}", "limited by")
    for name, total in both.items():
        time = cost.seconds(question, total, gpu)
        limit = "-" if time is None else "bytes" if total.bytes / bandwidth > total.flops / peak else "flops"
        work.add_row(
            name, flops(total.flops), f"{total.intensity:.0f}", size(total.allocated),
            "-" if time is None else duration(time), limit,
        )  # fmt: skip
    yield work
    yield (
        "memory: of HBM, beyond the inputs. time: each step as fast as its bytes or its flops allow, at "
        f"{bandwidth / 1e12:.4g} TB/s and {peak / 1e12:.0f} TFLOP/s{' (measured)' if measured else ''}; below "
        f"{peak / bandwidth:.0f} flops/byte the bytes decide."
        f"{' No time in fp32: the flops are those of half precision.' if question.dtype == 'fp32' else ''}\n"
    )
    yield from derivation(question)
    yield "[bold]GPUs[/]"
    yield sources()


def derivation(question: Question) -> Iterator[RenderableType]:
    """Where the ratio of standard attention to FlashAttention comes from."""
    N, d, M = question.seqlen, question.head_dim, question.M
    forward = question.costs(backward=False)
    names = ("standard", "standard, fused", "FlashAttention-1", "FlashAttention-2")
    columns = [cost.passes(question, forward[name]) for name in names]
    yield f"[bold]Where the forward's bytes are, in passes over N x N ({size(N * N * question.element)} a head)[/]"
    ledger = table("", *names)
    for array in ARRAYS:
        if any(array in column for column in columns):
            ledger.add_row(array, *(f"{column[array]:.2f}" if array in column else "" for column in columns))
    ledger.add_row("all", *(f"{sum(column.values()):.2f}" for column in columns), style="bold")
    yield ledger
    B_c = question.blocks["FlashAttention-1"][1]
    T_c = -(-N // B_c)
    yield (
        "Standard attention writes S and P out and reads them back: a pass over N x N each time, whatever the chip "
        f"holds. FlashAttention-1 keeps tiles of B_c = M / 4d = {M} / {4 * d} = {B_c} keys on the chip; for each of "
        f"the {T_c} tiles Q and O go in and O comes out, 3 N d elements. That is {T_c} x 3 d / N = "
        f"{3 * T_c * d / N:.2f} passes (12 d^2 / M = {12 * d * d / M:.2f} for long sequences): d^2 is small beside M, "
        "and that is all of the saving.\n"
    )
    yield "[bold]Bytes of standard attention / bytes of FlashAttention-1[/]"
    forms = [form for part in ("forward", "both") for form in (f"{part}\nfused", "\nunfused", "\n+ mask, dropout")]
    grid = table("\nN", *forms)
    pairs = list(zip(cost.ratios(question, backward=False), cost.ratios(question, backward=True), strict=True))
    for one, both in pairs:
        cells = (f"{x:.1f}x" for r in (one, both) for x in (r.fused, r.unfused, r.with_mask_and_dropout))
        grid.add_row(str(one.seqlen), *cells)
    yield grid
    least, most = pairs[2][1].unfused, pairs[4][1].with_mask_and_dropout
    yield (
        f"So {least:.1f}x to {most:.1f}x for attention that runs step by step, from N = {pairs[2][1].seqlen} to "
        f"{pairs[4][1].seqlen}. The paper (2022, figure 2) measured 40.3 GB and 41.7 ms against 4.4 GB and 7.3 ms on "
        "an A100 (N 1024, d 64, 16 heads, batch 64, with the backward): 9.2x the bytes, 5.7x the time.\n"
    )


def sources() -> RenderableType:
    """Where the figures of the GPUs come from."""
    result = table("", "TB/s", "TFLOP/s")
    result.add_column("source")
    for gpu in GPUS.values():
        result.add_row(gpu.name, f"{gpu.bandwidth / 1e12:.4g}", f"{gpu.flops / 1e12:.0f}", gpu.source)
        if gpu.measured_bandwidth is not None and gpu.measured_flops is not None:
            measured = (f"{gpu.measured_bandwidth / 1e12:.4g}", f"{gpu.measured_flops / 1e12:.0f}")
            result.add_row("", *measured, "measured: a large copy, a large bf16 matmul")
    return result


def measurements(
    lengths: Sequence[int], measured: Sequence[tuple[Measurement, Measurement]], where: str
) -> Iterator[RenderableType]:
    """The demo's table: time, peak memory and counted bytes against the sequence length."""
    yield f"[bold]Causal attention, forward and backward, fp32, {HEADS} heads of {HEAD_DIM}, on {where}[/]"
    columns = [f"{what}\n{who}" for what in ("time", "peak memory", "bytes moved") for who in ("standard", "tilewise")]
    result = table("\ntokens", *(c if i % 2 == 0 else "\n" + c.partition("\n")[2] for i, c in enumerate(columns)))
    for length, (standard, ours) in zip(lengths, measured, strict=True):
        result.add_row(
            str(length), duration(standard.seconds), duration(ours.seconds), size(standard.peak), size(ours.peak),
            size(standard.hbm), size(ours.hbm),
        )  # fmt: skip
    yield result
    standard, ours = measured[-1]
    yield (
        f"At {lengths[-1]} tokens: {standard.seconds / ours.seconds:.2g}x the speed, {standard.peak / ours.peak:.0f}x "
        f"less memory, {standard.hbm / ours.hbm:.0f}x fewer bytes.\n"
        "peak memory: of tensors, beyond the inputs. bytes moved: counted while the algorithm runs, between the memory "
        "and tiles as large as this CPU's cache holds.\n"
    )


def errors(findings: Sequence[Finding]) -> Table:
    """Of every backend, device and dtype the worst error / allowed of each result."""
    results = ("o", "lse", "dq", "dk", "dv", "dbias", "dalibi_slopes", "dsink")
    groups: dict[tuple[str, str, str], list[Finding]] = {}
    for finding in findings:
        dtype = str(finding.problem.dtype).removeprefix("torch.")
        groups.setdefault((finding.backend, finding.device, dtype), []).append(finding)
    names = [name for name in results if any(name in finding.errors for finding in findings)]
    result = table("backend", "dtype", "runs", *(name.replace("dalibi_", "d") for name in names))
    for key, group in groups.items():
        cells = [[_ratio(*finding.errors[name]) for finding in group if name in finding.errors] for name in names]
        worst = (f"{max(cell):.2f}" if cell else "" for cell in cells)
        result.add_row(
            f"{key[0]}, {key[1]}",
            key[2],
            str(len(group)),
            *worst,
            style="red" if any(finding.fault for finding in group) else "",
        )
    return result


def _ratio(error: float, allowed: float) -> float:
    """error / allowed; NaN counts as infinite, so that it is the worst of all."""
    if math.isnan(error):
        return math.inf
    return error / allowed if allowed else math.inf if error else 0.0


def facts(title: str, known: Mapping[str, str]) -> Table:
    """Names and what is known of them."""
    result = table(title)
    result.add_column("")
    for name, fact in known.items():
        result.add_row(f"  {name}", escape(fact))
    return result


def diagnoses(found: Sequence[Diagnosis]) -> Table:
    """Which backends work, and what is to be said of the others."""
    result = table("backends")
    for name in ("device", "", ""):
        result.add_column(name)
    for one in found:
        result.add_row(
            f"  {one.backend}", one.device, "works" if one.works else "[red]does not work[/]", escape(one.note)
        )
    return result
