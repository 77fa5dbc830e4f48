"""The counters' bookkeeping, with a log such as Nsight Compute writes. Nothing here is counted."""

from __future__ import annotations

import json
import math
import sys
from dataclasses import MISSING, fields, replace
from pathlib import Path

import pytest
import torch

from bench import counted, counters, ncu
from bench.counted import Cell
from bench.counters import ALL, MARK, rows
from bench.ncu import Launch
from tilewise.algorithm.dram_model import Cache, traffic

HEADER = (
    '"ID","Process ID","Process Name","Host Name","Kernel Name","Context","Stream","Block Size","Grid Size","Device",'
    '"CC","dram__bytes_read.sum","dram__bytes_write.sum","gpu__time_duration.sum","lts__t_bytes.sum"'
)
FIGURES = {f.name: f.default for f in fields(counters.Count) if f.default is not MISSING}
UNITS = '"","","","","","","","","","","","byte","byte","ns","byte"'


def line(number: int, name: str, read: str, written: str, ns: str, l2: str) -> str:
    head = f'"{number}","77","python3","127.0.0.1","{name}","1","7","(128, 1, 1)","(8, 1, 1)","0","9.0"'
    return f'{head},"{read}","{written}","{ns}","{l2}"'


def log(*lines: str, units: str = UNITS) -> list[str]:
    return ["==PROF== Connected to process 77 (/usr/bin/python3.12)", HEADER, units, *lines, "==PROF== Disconnected"]


def test_a_log_is_read_in_the_order_of_launches() -> None:
    found = ncu.parse(
        log(
            line(1, "void at::native::softmax<float, 4>(T2 *, const T1 *, int)", "1,234,567", "32", "5,120", "2,000"),
            line(0, "dq_kernel", "10", "20.5", "1000", "n/a"),
        )
    )
    assert [launch.name for launch in found] == [
        "dq_kernel",
        "void at::native::softmax<float, 4>(T2 *, const T1 *, int)",
    ]
    assert (found[0].read, found[0].written, found[0].seconds) == (10, 20.5, pytest.approx(1e-6))
    assert math.isnan(found[0].l2)
    assert (found[1].read, found[1].l2, found[1].seconds) == (1234567, 2000, pytest.approx(5.12e-6))


def test_units_are_those_of_the_line_below_the_header() -> None:
    units = UNITS.replace('"byte","byte","ns","byte"', '"Mbyte","Kbyte","usecond","parsec"')
    (found,) = ncu.parse(log(line(0, "k", "1.5", "2", "3", "4"), units=units))
    assert (found.read, found.written, found.seconds) == (1.5e6, 2e3, pytest.approx(3e-6))
    assert math.isnan(found.l2)


def test_a_log_without_kernels_has_none() -> None:
    assert ncu.parse(["==PROF== Connected", "==WARNING== No kernels were profiled."]) == []


@pytest.mark.parametrize(
    ("printed", "says"),
    [
        ("==ERROR== ERR_NVGPUCTRPERM - The user does not have permission ...", "run it as root"),
        ("==ERROR== Failed to initialize the profiler: LibraryNotLoaded", "sandboxes"),
        ("there is no GPU that torch sees\n==WARNING== No kernels were profiled.", "there is no GPU"),
        ("==ERROR== Failed to find metric x\nmore", "Failed to find metric x"),
    ],
)
def test_what_ncu_complains_of_is_said(printed: str, says: str) -> None:
    assert says in ncu.complaint(printed)


def test_without_ncu_there_is_one_sentence(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(ncu.shutil, "which", lambda name: None)
    monkeypatch.setattr(ncu, "PLACES", ())
    with pytest.raises(SystemExit) as left:
        counters.main(["--only", "paper"])
    assert left.value.code == 1
    assert capsys.readouterr().out.splitlines() == [
        "Nsight Compute is not installed here: there is no ncu on the PATH, nor where CUDA puts it."
    ]


def test_ncu_is_run_and_read(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A program in ncu's place, that notes its arguments and writes what ncu would."""
    cell = counted.cells()[0]
    manifest = [json.dumps(FACTS), json.dumps({"cell": cell.fields, "marked": True, "error": ""})]
    kernels = [line(0, MARK, "1", "1", "1", "1")] + [line(n, "k", "1e9", "2e9", "1e6", "3e9") for n in range(1, 7)]
    fake = tmp_path / "ncu"
    fake.write_text(
        f"#!{sys.executable}\nimport sys\nfrom pathlib import Path\n"
        f"at = sys.argv\nPath(at[at.index('--log-file') + 1]).write_text({chr(10).join(log(*kernels))!r})\n"
        f"Path(at[at.index('--child') + 1]).write_text({chr(10).join(manifest)!r})\nprint(*at)\n"
    )
    fake.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    counters.main(["--out", str(tmp_path / "x.csv"), "--keep", str(tmp_path / "kept"), "--kernels"])
    printed = capsys.readouterr().out
    assert "scores: k" in printed
    assert (tmp_path / "kept" / "ncu.csv").exists()
    written = (tmp_path / "x.csv").read_text().splitlines()
    assert len(written) == 1 + 1 + 6
    assert written[0].startswith("device,backend,direction")
    arguments = (tmp_path / "kept" / "printed.txt").read_text()
    assert "--clock-control none --cache-control all --profile-from-start off" in arguments
    counters.main(["--read", str(tmp_path / "kept"), "--kernels"])
    assert capsys.readouterr().out.splitlines()[:-1] == printed.splitlines()[:-1]  # but for the seconds


# --- rows -----------------------------------------------------------------------------------------------------------

FACTS = {"device": "NVIDIA H200", "l2": 50 << 20, "processors": 132, "arch": "sm90", "torch": "2.11", "cache": "all"}
FORWARD = Cell("hopper", "forward", "bf16", 64, "full", 1024, 16, 32)
BACKWARD = Cell("hopper", "backward", "bf16", 64, "full", 1024, 16, 32)
MARKER = Launch(f"at::cuda::{MARK}(long)", 0, 0, 0, 1e-6)


def manifest(*cells: Cell, error: str = "", marked: bool = True, cache: str = "all") -> list[str]:
    done = [json.dumps({"cell": cell.fields, "marked": marked, "error": error}) for cell in cells]
    return [json.dumps({**FACTS, "cache": cache}), *done]


def test_cells_have_the_models_figures_beside_them() -> None:
    own = [Launch(name, 2e8, 1e8, 4e8, 1e-4) for name in ("prepare_kernel", "backward_kernel", "convert_kernel")]
    found = list(
        rows(manifest(FORWARD, BACKWARD), [MARKER, Launch("forward_kernel", 2e8, 5e7, 1e9, 1e-4), MARKER, *own])
    )
    assert [row.kernel for row in found] == [
        ALL, "forward: forward_kernel", ALL,
        "prepare: prepare_kernel", "backward: backward_kernel", "convert: convert_kernel",
    ]  # fmt: skip
    seen = traffic(counted.model(FORWARD, 132), Cache(50 << 20))
    assert found[0].ratio == pytest.approx(2.5e8 / seen.bytes, rel=1e-4)
    assert found[2].read == 6e8
    assert found[2].us == pytest.approx(300)
    assert found[2].model_read == pytest.approx(sum(row.model_read or 0 for row in found[3:]), rel=1e-4)


def test_kernels_that_the_model_does_not_know_are_shown_without_it() -> None:
    found = list(rows(manifest(FORWARD), [MARKER, *[Launch("strange", 1e8, 0, 0, 1e-4)] * 2]))
    assert [(row.kernel, row.model_read is None) for row in found] == [
        (ALL, False),
        ("strange", True),
        ("strange", True),
    ]


def test_a_cell_that_failed_says_so() -> None:
    (found,) = rows(manifest(FORWARD, error="out of memory", marked=False), [])
    assert (found.error, found.ratio) == ("out of memory", None)
    lost, kept = list(rows([*manifest(FORWARD, error="x"), manifest(BACKWARD)[1]], [MARKER, MARKER])), 2
    assert [row.error for row in lost] == ["x", "no kernel of it was counted"]
    assert len(lost) == kept


def test_unflushed_the_last_bytes_are_counted_in_the_flush_behind() -> None:
    flush = Launch("vectorized_elementwise_kernel", 0, counters.FLUSH - 5e7, 0, 1e-4)
    behind = Launch("vectorized_elementwise_kernel", 0, counters.FLUSH + 1e7, 0, 1e-4)
    own = Launch("forward_kernel", 2e8, 6e7, 1e9, 1e-4)
    cell, kernel = rows(manifest(FORWARD, cache="none"), [MARKER, flush, own, behind])
    assert (cell.written, kernel.written, cell.launches) == (7e7, 6e7, 1)


def test_the_models_cache_may_be_another() -> None:
    launches = [MARKER, Launch("forward_kernel", 2e8, 5e7, 1e9, 1e-4)]
    (smaller, _), (larger, _) = (list(rows(manifest(FORWARD), launches, l2)) for l2 in (1 << 20, 1 << 25))
    assert (smaller.model_read or 0) > (larger.model_read or 0)
    assert list(rows(manifest(FORWARD), launches, 50 << 20)) == list(rows(manifest(FORWARD), launches))


def test_backends_are_set_against_standard_attention() -> None:
    found = []
    for backend, size in (("standard", 1e10), ("triton", 1e9)):
        for direction in ("forward", "backward"):
            cell = Cell(backend, direction, "fp16", 64, "causal", 1024, 64, 16, True)
            found += list(rows(manifest(cell), [MARKER, Launch("k", size, size, 0, 1e-4)]))
    (says,) = counters.against_standard(found)
    assert "standard 40.00 GB, triton 4.00 GB, 10.0 times fewer" in says


# --- cells ----------------------------------------------------------------------------------------------------------


def test_cells_have_names_and_models_of_their_own() -> None:
    cells = counted.cells()
    assert len({cell.name for cell in cells}) == len(cells)
    for cell in cells:
        kernels = counted.model(cell, processors=132)
        assert sum(kernel.once for kernel in kernels) > 0
        assert cell.batch * cell.seq * cell.heads * cell.d in (16384 * 2048, 65536 * 1024)


@pytest.mark.parametrize("direction", ["forward", "backward"])
def test_calls_compute_what_they_say(direction: str) -> None:
    results = []
    for backend in ("standard", "tiled"):
        cell = Cell(backend, direction, "fp32", 32, "causal", 48, 1, 2)
        result = counted.prepare(cell, "cpu")()
        results.append(result if isinstance(result, tuple) else (result,))
    torch.testing.assert_close(*results)


def test_the_page_has_what_was_counted() -> None:
    root = Path(__file__).parents[1]
    page, found = (root / "docs/performance.md").read_text(), counters.read(counters.RESULTS / "counters_h200.csv")
    assert counters.fill(page, found) == page
    with pytest.raises(ValueError, match="must hold"):
        counters.fill("no marks", found)


def test_rows_are_read_as_they_were_written(tmp_path: Path) -> None:
    found = counters.read(counters.RESULTS / "counters_h200.csv")
    counters.write(tmp_path / "again.csv", found)
    assert (tmp_path / "again.csv").read_text() == (counters.RESULTS / "counters_h200.csv").read_text()


def test_cells_counted_anew_take_their_old_place(tmp_path: Path) -> None:
    old = counters.read(counters.RESULTS / "counters_h200.csv")
    one = next(row for row in old if row.kernel == ALL and row.backend == "hopper" and row.direction == "backward")
    new = [replace(one, us=1.0), replace(one, kernel="k")]
    merged = counters.merge(old, [*new, replace(one, seq=7)])
    at = old.index(one)
    gone = [row for row in old if replace(row, kernel=ALL, **FIGURES) == replace(one, **FIGURES)]
    assert merged == [*old[:at], *new, *old[at + len(gone) :], replace(one, seq=7)]
    assert len(gone) > 1
