"""`tilewise bench counters` (`python -m bench.counters`): bytes that the GPU's counters saw, beside the model's.

One program runs all cells under Nsight Compute, which counts what each kernel moves between DRAM and L2, what the L2
was asked for, and the time. Ahead of each cell stands a kernel that marks it.

--cache all (as given): the L2 is emptied before each kernel, so that each finds its inputs in DRAM. Bytes that it wrote
and that are still in the L2 at its end are in no kernel's count. The model (`tilewise.algorithm.dram_model`) says how
many. --cache none: kernels find what those before them left. Ahead of a cell and behind it a kernel fills a quarter of
a GiB, which evicts the cell's last bytes: they are counted in the one behind, whose own are taken off. So each byte is
counted.
"""

from __future__ import annotations

import argparse
import csv
import gc
import json
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass, fields
from pathlib import Path

import torch

from tilewise.algorithm.dram_model import Cache, Kernel, traffic

from . import counted, ncu, tables
from .counted import Cell
from .gpu import slug
from .ncu import Launch, NoCounters
from .worker import Failed, parallel, reason

RESULTS = Path(__file__).parent / "results"
MARK = "spin_kernel"  # torch.cuda._sleep's, which nobody else launches
FLUSH = 1 << 28  # bytes
WIDTHS = (11, 8, 9, 8, 6, 9, 9, 9)  # of the table's columns
ALL = "all"  # instead of a kernel's name: the cell


@dataclass(frozen=True)
class Count:
    """A cell, or one of its kernels. Bytes; ratio: measured over model, of DRAM's bytes in both directions.

    l2, asked: what processors moved to and from the L2, and what of it the model has (`asked` leaves out what one
    processor's own cache served twice). None where there is no figure: a kernel has the model's if the model has as
    many as ran.
    """

    device: str
    backend: str
    direction: str
    dtype: str
    d: int
    mask: str
    dropout: bool
    seq: int
    batch: int
    heads: int
    cache: str
    kernel: str
    launches: int = 0
    us: float | None = None
    read: float | None = None
    written: float | None = None
    l2: float | None = None
    model_read: float | None = None
    model_written: float | None = None
    asked: float | None = None
    ratio: float | None = None
    error: str = ""


# --- before it: what compiles ---------------------------------------------------------------------------------------


def compile_all(names: list[str], processes: int, deadline: float) -> None:
    """Ours, many at a time, into Triton's cache on disk: under ncu one process would compile one after the other."""
    if processes and torch.cuda.is_available():
        start = time.monotonic()
        chosen = [name for name in names if not name.startswith("standard")]
        for name, answer in parallel(compile_cell, chosen, processes, deadline):
            if isinstance(answer, Failed):
                print(f"{name}: {answer}", flush=True)
        print(f"compiled: {time.monotonic() - start:.0f} s", flush=True)


def compile_cell(name: str) -> None:
    counted.prepare(next(cell for cell in counted.cells() if cell.name == name))()


# --- the child: what runs under ncu --------------------------------------------------------------------------------


def child(names: list[str], manifest: Path, cache: str) -> None:
    """Run the cells of these names; a line of the manifest for the device, and one for each cell when it is done."""
    if not torch.cuda.is_available():
        print("there is no GPU that torch sees")
        return
    card = torch.cuda.get_device_properties(0)
    facts = {
        "device": card.name, "l2": card.L2_cache_size, "processors": card.multi_processor_count,
        "arch": f"sm{card.major}{card.minor}", "torch": torch.__version__, "cache": cache,
    }  # fmt: skip
    with open(manifest, "w") as file:
        print(json.dumps(facts), file=file, flush=True)
        for cell in counted.cells():
            if cell.name in names:
                marked, error = run_cell(cell, cache)
                if error:
                    print(f"{cell.name}: {error}", flush=True)
                print(json.dumps({"cell": cell.fields, "marked": marked, "error": error}), file=file, flush=True)


def run_cell(cell: Cell, cache: str) -> tuple[bool, str]:
    """(whether its mark was launched, what went wrong)."""
    marked = False
    try:
        call = counted.prepare(cell)
        call()  # compiles
        torch.cuda.synchronize()
        flush = torch.empty(FLUSH, dtype=torch.uint8, device="cuda") if cache == "none" else None
        torch.cuda.profiler.start()
        torch.cuda._sleep(1)
        marked = True
        if flush is not None:
            flush.fill_(1)
        call()
        if flush is not None:
            flush.fill_(2)
        torch.cuda.synchronize()
    except Exception as error:  # a cell that does not run is a row that says so
        return marked, reason(error)
    finally:
        torch.cuda.profiler.stop()
        call = flush = None  # type: ignore[assignment]
        gc.collect()
        torch.cuda.empty_cache()
    return marked, ""


# --- from counters to rows -----------------------------------------------------------------------------------------


def split(launches: Iterable[Launch]) -> list[list[Launch]]:
    """The launches behind each mark."""
    parts: list[list[Launch]] = []
    for launch in launches:
        if MARK in launch.name:
            parts.append([])
        elif parts:
            parts[-1].append(launch)
    return parts


def rows(manifest: Iterable[str], launches: list[Launch], l2: int | None = None) -> Iterator[Count]:
    """Each cell's row, and those of its kernels. l2: bytes that the model is to take for the card's."""
    lines = iter(manifest)
    facts = json.loads(next(lines, "{}"))
    parts = iter(split(launches))
    for line in lines:
        done = json.loads(line)
        cell, cache = Cell(**done["cell"]), facts["cache"]
        part = next(parts, []) if done["marked"] else []
        head = Count(device=facts["device"], cache=cache, kernel=ALL, error=done["error"], **done["cell"])
        if done["error"] or not part:
            yield Count(**{**asdict(head), "error": done["error"] or "no kernel of it was counted"})
            continue
        kernels = counted.model(cell, facts["processors"], facts["arch"])
        yield from cell_rows(head, part, kernels, Cache(l2 or facts["l2"], flushed=cache == "all"))


def cell_rows(head: Count, part: list[Launch], kernels: list[Kernel], cache: Cache) -> Iterator[Count]:
    behind = 0.0  # what the flush behind the cell wrote for it
    if not cache.flushed:
        behind, part = part[-1].written - FLUSH, part[1:-1]
    seen = traffic(kernels, cache)
    written = sum(launch.written for launch in part) + behind
    yield _count(head, ALL, part, written, (seen.reads, seen.writes, sum(kernel.asked for kernel in kernels)))
    alike = len(kernels) == len(part)
    for n, launch in enumerate(part):
        of_model = (seen.kernels[n][1], seen.kernels[n][2], kernels[n].asked) if alike else None
        name = f"{kernels[n].name}: {short(launch.name)}" if alike else short(launch.name)
        yield _count(head, name, [launch], launch.written, of_model)


OfModel = tuple[float, float, float]  # read, written, asked


def _count(head: Count, kernel: str, part: list[Launch], written: float, of_model: OfModel | None) -> Count:
    read, l2, us = sum(x.read for x in part), sum(x.l2 for x in part), sum(x.seconds for x in part) * 1e6
    figures: dict[str, float | None] = {"us": us, "read": read, "written": written, "l2": l2}
    if of_model is not None:
        figures |= dict(zip(("model_read", "model_written", "asked"), of_model, strict=True))
        figures["ratio"] = (read + written) / (of_model[0] + of_model[1]) if of_model[0] + of_model[1] else None
    known = {name: None if x is None or x != x else float(f"{x:.5g}") for name, x in figures.items()}
    return Count(**{**asdict(head), "kernel": kernel, **known, "launches": len(part)})


def short(name: str) -> str:
    """A kernel's name without its arguments, and of torch's the functor, which says what it does.

    >>> short("void at::native::vectorized_elementwise_kernel<4, at::native::MulFunctor<float>>(int, T2)")
    'vectorized_elementwise_kernel MulFunctor'
    >>> short("void (anonymous namespace)::softmax_warp_forward<c10::Half, float, 10>(c10::Half *, int)")
    'softmax_warp_forward'
    >>> short("dq_kernel")
    'dq_kernel'
    """
    bare = name.replace("(anonymous namespace)", "").removeprefix("void ")
    base, _, arguments = bare.partition("<")
    functor = next((word for word in _words(arguments) if "unctor" in word or "_kernel" in word), "")
    return " ".join(part for part in (base.split("(")[0].split("::")[-1].strip(), functor) if part)


def _words(text: str) -> list[str]:
    return "".join(c if c.isalnum() or c == "_" else " " for c in text).split()


# --- what is shown -------------------------------------------------------------------------------------------------


def table(found: list[Count], each: bool) -> str:
    """Cells, and their kernels if asked. GB: 1e9 bytes."""
    titles = "DRAM in, GB", "out", "model in", "out", "ratio", "L2, GB", "asked", "us"
    lines = [f"{'':58} " + " ".join(f"{title:>{w}}" for title, w in zip(titles, WIDTHS, strict=True))]
    for row in found:
        if row.kernel != ALL and not each:
            continue
        cell = Cell(**{field.name: getattr(row, field.name) for field in fields(Cell)})
        name = cell.name if row.kernel == ALL else f"    {row.kernel}"[:58]
        if row.error:
            lines.append(f"{name:58} {row.error}")
            continue
        sizes = (row.read, row.written, row.model_read, row.model_written)
        ratio = "" if row.ratio is None else f"{row.ratio:.3f}"
        texts = *map(_gb, sizes), ratio, _gb(row.l2), _gb(row.asked), "" if row.us is None else f"{row.us:.1f}"
        lines.append(f"{name:58} " + " ".join(f"{text:>{w}}" for text, w in zip(texts, WIDTHS, strict=True)))
    return "\n".join([*lines, "", *against_standard(found)])


def markdown(found: list[Count]) -> str:
    """A line a cell, of both directions in all: GB that crossed between DRAM and L2, and the model's."""
    head = ["call", "read, GB", "written", "model: read", "written", "measured / model", "time, us"]
    body = []
    for row in found:
        if row.kernel == ALL and not row.error:
            cell = Cell(**{field.name: getattr(row, field.name) for field in fields(Cell)})
            sizes = map(_gb, (row.read, row.written, row.model_read, row.model_written))
            body.append([cell.name, *sizes, f"{row.ratio:.3f}", f"{row.us:.0f}"])
    return tables.markdown(head, body)


def read(path: Path) -> list[Count]:
    """What `write` wrote."""
    kinds = {field.name: field.type for field in fields(Count)}

    def value(name: str, text: str) -> object:
        if kinds[name] == "float | None":
            return float(text) if text else None
        return {"int": int, "bool": lambda x: x == "True"}.get(str(kinds[name]), str)(text)

    with open(path, newline="") as file:
        return [Count(**{name: value(name, text) for name, text in line.items()}) for line in csv.DictReader(file)]


def fill(page: str, found: list[Count]) -> str:
    """The page with what stands between its marks made anew."""
    begin, end = "<!-- counters -->\n", "<!-- /counters -->"
    before, _, rest = page.partition(begin)
    _, found_end, after = rest.partition(end)
    if not found_end:
        raise ValueError(f"the page must hold {begin.strip()} and {end}, each on a line")
    fewer = "\n".join(f"- {line}" for line in against_standard(found))
    return f"{before}{begin}{markdown(found)}\n\n{fewer}\n{end}{after}"


def _gb(x: float | None) -> str:
    return "" if x is None else f"{x / 1e9:.3f}"


def against_standard(found: list[Count]) -> list[str]:
    """How many times fewer bytes each backend moved than standard attention, forward and backward."""
    totals: dict[tuple[object, ...], dict[str, list[float]]] = {}
    for row in found:
        if row.kernel == ALL and row.read is not None and row.written is not None:
            key = (row.dtype, row.mask, row.dropout, row.batch, row.heads, row.seq, row.d)
            totals.setdefault(key, {}).setdefault(row.backend, []).append(row.read + row.written)
    lines = []
    for (dtype, mask, dropout, *shape), by_backend in totals.items():
        standard = by_backend.pop("standard", [])
        for backend, both in by_backend.items():
            if len(both) == len(standard) == 2:
                what = f"{dtype} {mask}{', dropout' * bool(dropout)} {tuple(shape)}"
                gb = f"standard {sum(standard) / 1e9:.2f} GB, {backend} {sum(both) / 1e9:.2f} GB"
                lines.append(f"{what}, forward + backward: {gb}, {sum(standard) / sum(both):.1f} times fewer")
    return lines


def merge(old: list[Count], new: list[Count]) -> list[Count]:
    """`old`, where cells that `new` has are `new`'s, kernels and all; cells that `old` lacks come last."""
    cells: tuple[dict[object, list[Count]], ...] = ({}, {})
    for found, rows in zip(cells, (old, new), strict=True):
        for row in rows:
            key = (row.backend, row.direction, row.dtype, row.d, row.mask, row.dropout, row.seq, row.batch, row.heads)
            found.setdefault(key, []).append(row)
    return [row for cell in (cells[0] | cells[1]).values() for row in cell]


def write(path: Path, found: list[Count]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with open(path, "w", newline="") as file:
        writer = csv.DictWriter(file, [field.name for field in fields(Count)], lineterminator="\n")
        writer.writeheader()
        writer.writerows({k: "" if v is None else v for k, v in asdict(row).items()} for row in found)


# --- the parent ----------------------------------------------------------------------------------------------------


def count(names: list[str], folder: Path, cache: str, seconds: float) -> None:
    """Fill the folder with ncu.csv, manifest.jsonl and printed.txt. Raises NoCounters."""
    log, manifest = folder / "ncu.csv", folder / "manifest.jsonl"
    program = [sys.executable, "-m", "bench.counters", "--child", str(manifest), "--cache", cache]
    program += ["--cells", json.dumps(names)]
    _, printed = ncu.run(ncu.command(ncu.find(), log, program, cache), log, seconds)
    (folder / "printed.txt").write_text(printed)


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        prog="bench.counters", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", default="", help="cells whose name contains this; several, with semicolons between")
    parser.add_argument("--cache", choices=("all", "none"), default="all", help="what is emptied before each kernel")
    parser.add_argument("--kernels", action="store_true", help="show each kernel, too")
    parser.add_argument("--write", action="store_true", help="write bench/results/counters_<gpu>.csv")
    parser.add_argument("--out", type=Path, help="write this file instead")
    parser.add_argument("--keep", type=Path, help="leave what ncu wrote in this folder")
    parser.add_argument("--read", type=Path, help="count nothing: read such a folder")
    parser.add_argument("--l2", type=float, help="MiB that the model takes for the L2, instead of what the driver says")
    parser.add_argument("--into", type=Path, help="a page whose table to fill in")
    parser.add_argument("--seconds", type=float, default=300.0, help="of everything, after which ncu is stopped")
    parser.add_argument("--processes", type=int, default=12, help="that compile at a time; 0: no warm-up")
    parser.add_argument("--list", action="store_true", help="print the cells' names, no more")
    parser.add_argument("--child", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--cells", default="[]", help=argparse.SUPPRESS)
    args = parser.parse_args(arguments)
    if args.child:
        return child(json.loads(args.cells), args.child, args.cache)
    chosen = [cell.name for cell in counted.cells() if any(part in cell.name for part in args.only.split(";"))]
    if args.list:
        return print("\n".join(chosen))
    start = time.monotonic()
    with tempfile.TemporaryDirectory() as scratch:
        folder = args.read or args.keep or Path(scratch)
        folder.mkdir(parents=True, exist_ok=True)
        try:
            if not args.read:
                compile_all(chosen, args.processes, start + args.seconds / 2)
                count(chosen, folder.resolve(), args.cache, start + args.seconds - time.monotonic())
        except NoCounters as why:
            print(why)
            raise SystemExit(1) from None
        with open(folder / "ncu.csv", newline="") as log, open(folder / "manifest.jsonl") as manifest:
            found = list(rows(manifest, ncu.parse(log), args.l2 and int(args.l2 * 2**20)))
    print(table(found, args.kernels))
    if found and (args.out or args.write):
        suffix = "" if found[0].cache == "all" else "_not_flushed"
        path = args.out or RESULTS / f"counters_{slug(found[0].device)}{suffix}.csv"
        found = merge(read(path), found) if path.exists() else found  # what was not counted now stays
        write(path, found)
    if args.into:
        args.into.write_text(fill(args.into.read_text(), found))
    print(f"{time.monotonic() - start:.0f} s")


if __name__ == "__main__":
    main()
