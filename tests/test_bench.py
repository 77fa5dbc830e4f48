"""The benchmarks' bookkeeping: what is counted, what a row says, which goals hold. Nothing here is timed."""

from __future__ import annotations

import math
import os
import re
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from ranks import Ranks
from torch import Tensor
from torch.nn.attention import SDPBackend

from bench import decode_cases, gpu, gpu_cases, hopper_cases, plot, tables, timing, tune
from bench import parallel as parallel_bench
from bench.gpu_cases import FA2, FLEX, Cell, Setting
from bench.rows import BEST, FIELDS, Row, geometric_mean, merge, parse_goal, read, write
from bench.worker import Failed, Worker, parallel
from tilewise import Band
from tilewise.problem import Problem

SMALL = Setting(device="cpu", backend="tiled", tokens=1024, hidden=128)
ROW = Row("forward", "forward", "bf16", 64, "causal", 2048, FLEX, goal=">= 1.08", ours=0.5, theirs=0.6, ratio=1.2)


def cell_of(name: str) -> Cell:
    return next(cell for cell in gpu_cases.cells(SMALL) if cell.name == name)


# --- rows ----------------------------------------------------------------------------------------------------------


def test_rows_survive_the_file(tmp_path: Path) -> None:
    rows = [
        replace(ROW, ours_tflops=423.1, ratio_min=1.1, ratio_max=1.3, note="a, b", device="NVIDIA H200").judged(),
        Row("first call", "forward", error='it said "no",\nand stopped', goal="<= 3").judged(),
    ]
    write(tmp_path / "deep" / "x.csv", rows)
    assert read(tmp_path / "deep" / "x.csv") == rows
    assert read(tmp_path / "none.csv") == []
    assert (tmp_path / "deep" / "x.csv").read_text().splitlines()[0].split(",") == FIELDS


@pytest.mark.parametrize(
    ("row", "reached"),
    [
        (ROW, "yes"),
        (replace(ROW, ratio=1.08), "yes"),
        (replace(ROW, ratio=1.079), "no"),
        (replace(ROW, ratio=None), "no"),
        (replace(ROW, error="results differ"), "no"),
        (replace(ROW, goal=""), ""),
        (replace(ROW, goal="<= 0.5"), "yes"),
        (replace(ROW, goal="<= 0.4"), "no"),
        (replace(ROW, goal="<= 0.5", ours=None), "no"),
    ],
)
def test_a_goal_is_reached_or_not(row: Row, reached: str) -> None:
    assert row.judged().reached == reached


def test_a_goal_must_be_one() -> None:
    assert parse_goal("<= 30") == ("<=", 30.0)
    with pytest.raises(ValueError, match="goal is '> 2'"):
        parse_goal("> 2")


def test_merging_replaces_in_place() -> None:
    a, b, c = ROW, replace(ROW, peer=FA2), replace(ROW, seq=512)
    again = replace(a, ratio=1.5)
    assert merge([a, b], [c, again]) == [again, b, c]


def test_geometric_mean_counts_failures() -> None:
    rows = [ROW, replace(ROW, seq=512, ratio=1.2 * 4), replace(ROW, peer=FA2, ratio=9.0)]
    mean = geometric_mean(rows, "forward", FLEX, ">= 1.18")
    assert mean is not None
    assert (mean.ratio, mean.reached, mean.peer) == (2.4, "yes", FLEX)
    assert geometric_mean([*rows, mean], "forward", FLEX, ">= 1.18") == mean  # it is no cell of itself
    failed = geometric_mean([*rows, replace(ROW, seq=1, ratio=9.0, error="differs")], "forward", FLEX, ">= 1.18")
    assert failed is not None
    assert (failed.ratio, failed.reached) == (2.4, "no")
    assert geometric_mean(rows, "fp32", FLEX, ">= 1") is None


def test_geometric_mean_beside_the_best_peer_of_each_cell() -> None:
    cells = [replace(ROW, ratio=4.0), replace(ROW, peer=FA2, ratio=1.0)]
    cells += [replace(ROW, seq=512, ratio=4.0), replace(ROW, seq=512, peer=FA2, ratio=9.0)]
    mean = geometric_mean(cells, "forward", BEST, ">= 1.18")
    assert mean is not None
    assert (mean.ratio, mean.ratio_min, mean.ratio_max, mean.peer) == (2.0, 1.0, 4.0, BEST)
    failed = geometric_mean([*cells, replace(ROW, peer=FA2, ratio=None, error="no kernel")], "forward", BEST, ">= 1.18")
    assert failed is not None
    assert failed.reached == "no"


# --- cells ---------------------------------------------------------------------------------------------------------


def test_cells_have_names_and_goals_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hopper_cases, "is_here", lambda name: True)
    cells = gpu_cases.cells()
    assert len({cell.name for cell in cells}) == len(cells)
    goals = {
        (cell.row.subject, peer.name): peer.goal
        for cell in cells
        for peer in cell.peers
        if (cell.row.subject, cell.row.d) != ("hopper backward", 256)
    }
    FA3, FA4 = hopper_cases.MODULES
    assert goals == {
        ("forward", FLEX): ">= 1.08", ("forward", FA2): ">= 1.3", ("backward", FLEX): ">= 1.05", ("backward", FA2): "",
        ("forward d256", FA2): ">= 1.0", ("backward d256", FA2): ">= 1.0", ("fp32", gpu_cases.EFFICIENT): ">= 1.5",
        ("mask saves", "ours, full"): ">= 1.0", ("documents", FLEX): ">= 1.3",
        **{("hopper forward", name): ">= 0.96" for name in (FA3, FA4, gpu_cases.CUDNN)},
        **{("hopper backward", name): ">= 0.92" for name in (FA4, gpu_cases.CUDNN)},
        **{("hopper forms", name): ">= 0.95" for name in (FA3, FA4, gpu_cases.CUDNN)}, ("hopper forms", FLEX): ">= 1.3",
        ("hopper deterministic", "ours, in any order"): ">= 0.85", ("hopper fp16", "ours, bf16"): ">= 0.97",
        ("hopper dropout", hopper_cases.TRITON): ">= 1.0",
        **{("hopper dropout", name): "" for name in (FA2, gpu_cases.CUDNN)},
        ("padded batch", gpu_cases.SDPA_MASKED): ">= 1.5",
        **{("decode", name): ">= 0.95" for name in (FA3, FA2, gpu_cases.CUDNN)}, ("decode 16 queries", FA3): "",
        ("decode paged", decode_cases.CONTIGUOUS): ">= 0.95", ("decode odd batch", "ours, batch 32"): ">= 1.0",
        ("decode one head", decode_cases.DATA_SHEET): ">= 0.7", ("chunked prefill", decode_cases.DENSE): ">= 0.95",
        **{(f"decode {name}", decode_cases.DATA_SHEET): "" for name in ("fp8", "latent")},
        ("decode appending", decode_cases.STORED): "",
        ("mixed lengths", "ours, dense"): ">= 0.9", ("bias with gradient", gpu_cases.EFFICIENT): ">= 1.3",
    }  # fmt: skip
    wide = [cell for cell in cells if (cell.row.subject, cell.row.d) == ("hopper backward", 256)]
    assert [peer.goal for cell in wide for peer in cell.peers] == [">= 1.25"] * 2 * 2 * 6
    monkeypatch.setattr(hopper_cases, "is_here", lambda name: False)
    alone = gpu_cases.cells()
    assert {cell.name for cell in cells} - {cell.name for cell in alone} == {
        cell.name for cell in cells if {peer.name for peer in cell.peers} <= {FA3, FA4} and cell.build
    }, "cells without anybody to compare with"
    limits = {
        (cell.row.subject.removeprefix("hopper "), cell.row.direction): cell.goal
        for cell in cells
        if cell.build is None
    }
    assert limits == {
        ("host time", "no_grad forward"): "<= 30", ("host time", "forward with grad"): "<= 45",
        ("host time", "forward + backward"): "<= 220", ("memory", "forward + backward"): "<= 1.1",
        ("first call", "forward"): "<= 3", ("first call", "forward + backward"): "<= 8",
    }  # fmt: skip
    in_grid = {cell.name for cell in cells if cell.row.subject == "backward"}
    assert len(in_grid) == 2 * 2 * 6
    assert {"backward bf16 d64 full S512", "backward bf16 d128 causal S16384"} <= in_grid


def test_operations_of_a_cell() -> None:
    cell = next(cell for cell in gpu_cases.cells() if cell.name == "forward bf16 d128 causal S2048")
    assert cell.flops == 4 * 8 * 16 * 2048 * 2048 * 128 / 2
    backward = next(cell for cell in gpu_cases.cells() if cell.name == "backward bf16 d128 causal S2048")
    assert backward.flops == 2.5 * cell.flops


@pytest.mark.parametrize(("seq", "window"), [(2048, 128), (2048, 1024), (1024, 64), (512, 129), (512, 1)])
def test_window_share_counts_live_tiles(seq: int, window: int) -> None:
    dense = Band(window - 1, 0).dense(seq, seq)
    tiles = dense.view(seq // 128, 128, seq // 128, 128).any(3).any(1)
    assert gpu_cases.window_share(seq, window) == tiles.float().mean().item()


def test_masked_cells_count_visible_pairs() -> None:
    window = cell_of("mask saves forward bf16 d64 window 64 S1024")
    assert window.flops == 4 * SMALL.heads(64) * 64 * Band(63, 0).count(1024, 1024)
    blocks = cell_of("mask saves forward bf16 d64 blocks 1/4 S1024")
    mask = gpu_cases.random_blocks(1024, 0.25, "cpu")
    assert blocks.flops == 4 * SMALL.heads(64) * 64 * mask.to_dense().sum().item()
    assert set(mask.query_major.full_count.flatten().tolist()) == {2}  # the same in every row of tiles
    assert blocks.peers[0].factor == 1.15 * 0.25


def test_documents_fill_the_tokens() -> None:
    lengths = gpu_cases.document_lengths(16384, 16)
    assert (len(lengths), sum(lengths)) == (16, 16384)
    assert min(lengths) > 0
    assert gpu_cases.cumulative([3, 4], "cpu").tolist() == [0, 3, 7]


@pytest.fixture
def on_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """The peers by what the CPU has of them, and clocks for CUDA's."""

    def timer(call: Callable[[], object], flush: Tensor) -> Callable[[], float]:
        def read() -> float:
            start = time.perf_counter()
            call()
            return (time.perf_counter() - start) * 1e3

        return read

    monkeypatch.setattr(gpu_cases, "compile_flex", lambda flex_attention: flex_attention)
    monkeypatch.setattr(gpu_cases, "SDPA", dict.fromkeys(gpu_cases.SDPA, SDPBackend.MATH))
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(timing, "overwritten", lambda: torch.empty(0))
    monkeypatch.setattr(timing, "timer", timer)
    monkeypatch.setattr(timing, "ROUNDS", 2)


class FlashAttention:
    """What its packages have, in plain PyTorch."""

    @staticmethod
    def flash_attn_func(
        q: Tensor, k: Tensor, v: Tensor, causal: bool = False, window_size: tuple[int | None, int | None] = (None, None)
    ) -> tuple[Tensor, None]:
        band = Band(None, 0) if causal else Band(*window_size)
        visible = band.dense(q.shape[1], k.shape[1])
        q, k, v = (t.transpose(1, 2) for t in (q, k, v))
        o = F.scaled_dot_product_attention(q, k, v, attn_mask=visible, enable_gqa=True)
        return o.transpose(1, 2), None

    @classmethod
    def flash_attn_varlen_func(
        cls, q: Tensor, k: Tensor, v: Tensor, cu_seqlens_q: Tensor, causal: bool = False, **_: object
    ) -> tuple[Tensor, None]:
        cu = cu_seqlens_q.tolist()
        each = [
            cls.flash_attn_func(*(t[None, a:b] for t in (q, k, v)), causal=causal)[0][0] for a, b in pairwise(cu)
        ]  # fmt: skip
        return torch.cat(each), None


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
@pytest.mark.parametrize(
    "name",
    [
        "forward bf16 d64 causal S1024",
        "backward d256 bf16 d256 full S256",
        "fp32 backward fp32 d64 causal S256",
        "mask saves forward bf16 d64 window 64 S1024",
        "mask saves backward bf16 d64 blocks 1/4 S1024",
        "documents forward bf16 d64 documents, packed S1024",
        "documents forward bf16 d64 documents, blocks S1024",
        "mixed lengths backward bf16 d128 causal, packed S256",
        "bias with gradient forward + backward bf16 d64 full S256",
        "hopper deterministic backward bf16 d64 causal S1024",
        "hopper forward bf16 d64 full S256",
        "hopper fp16 forward fp16 d64 causal S256",
        "hopper dropout forward bf16 d64 causal S256",
        "hopper forms forward bf16 d128 window (64, 0) S1024",
        "hopper forms backward bf16 d128 causal, 2/1 heads S512",
        "hopper forms forward bf16 d192 causal, 192/128 S256",
        "hopper forms backward bf16 d128 causal, packed S256",
    ],
)
def test_a_cell_runs_and_its_peers_agree(name: str, on_the_cpu: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hopper_cases, "is_here", lambda name: True)
    monkeypatch.setattr(hopper_cases, "module", lambda name: FlashAttention)
    cell = cell_of(name)
    rows = timing.compare(cell)
    assert rows
    assert [row.peer for row in rows] == [peer.name for peer in cell.peers]
    for row in rows:
        assert not row.error
        assert row.ours > 0
        assert row.theirs > 0
        assert row.ratio_min <= row.ratio <= row.ratio_max


def test_a_peer_that_differs_or_fails_is_an_error(on_the_cpu: None, monkeypatch: pytest.MonkeyPatch) -> None:
    cell = cell_of("forward bf16 d64 causal S256")

    def wrong(*args: object) -> gpu_cases.Attend:
        return lambda q, k, v: v * 1.1

    def fails(*args: object, **options: object) -> gpu_cases.Attend:
        raise RuntimeError("no such kernel")

    monkeypatch.setattr(gpu_cases, "flex", wrong)
    monkeypatch.setattr(gpu_cases, "sdpa", fails)
    flex, fa2 = timing.compare(cell)
    assert "results differ" in flex.error
    assert flex.judged().reached == "no"
    assert "no such kernel" in fa2.error
    assert fa2.ours is not None
    assert fa2.theirs is None


def test_ratio_is_the_median_of_the_rounds() -> None:
    cell = cell_of("forward bf16 d64 causal S1024")
    rounds = [{"ours": 1.0, FLEX: 2.0}, {"ours": 2.0, FLEX: 6.0}, {"ours": 4.0, FLEX: 4.0}]
    row = timing.row_of(cell, cell.peers[0], rounds)
    assert (row.ours, row.theirs) == (2.0, 4.0)
    assert (row.ratio, row.ratio_min, row.ratio_max) == (2.0, 1.0, 3.0)
    assert row.ours_tflops == pytest.approx(cell.flops / 2e-3 / 1e12, rel=1e-3)


def test_a_mask_saves_what_its_share_allows() -> None:
    cell = cell_of("mask saves forward bf16 d64 blocks 1/4 S1024")
    allowed = 1.15 * 0.25 * 8.0 + 0.01
    row = timing.row_of(cell, cell.peers[0], [{"ours": allowed * 0.999, "ours, full": 8.0}]).judged()
    assert row.reached == "yes"
    row = timing.row_of(cell, cell.peers[0], [{"ours": allowed * 1.01, "ours, full": 8.0}]).judged()
    assert row.reached == "no"


def test_a_packed_rate_is_beside_equal_work() -> None:
    (peer,) = cell_of("mixed lengths forward bf16 d128 full, packed S256").peers
    cell = cell_of("mixed lengths forward bf16 d128 full, packed S256")
    row = timing.row_of(cell, peer, [{"ours": 1.0, "ours, dense": 1.0}])
    assert row.ratio == pytest.approx(row.ours_tflops / row.their_tflops, rel=1e-2)


def test_host_time_is_held_against_its_limit() -> None:
    cell = cell_of("host time no_grad forward bf16 d64 full S128")
    row = timing.host_row(cell, [{"ours": 29.0, "theirs": 30.0}, {"ours": 31.0, "theirs": 31.0}]).judged()
    assert (row.ours, row.goal, row.reached, row.unit) == (30.0, "<= 30", "yes", "us")


# --- the run -------------------------------------------------------------------------------------------------------


def test_a_cell_that_cannot_be_measured_is_a_row(capsys: pytest.CaptureFixture[str]) -> None:
    with mock.patch.object(gpu, "Worker") as worker:
        facts = {"device": "NVIDIA H200"}
        worker.return_value.ask.side_effect = [facts, Failed("it hung"), Failed("it hung"), facts, Failed("no GPU")]
        chosen = [cell_of("forward bf16 d64 full S256"), cell_of("memory forward + backward bf16 d128 full S4096")]
        rows = [row for found in gpu.measure_all(chosen, time.monotonic() + 60, cudnn=False) for row in found]
        late = [row for found in gpu.measure_all(chosen, time.monotonic() - 1, cudnn=False) for row in found]
        none = [row for found in gpu.measure_all(chosen, time.monotonic() + 60, cudnn=False) for row in found]
    assert [(row.peer, row.error, row.reached, row.device) for row in rows] == [
        (FLEX, "it hung", "no", "NVIDIA H200"),
        (FA2, "it hung", "no", "NVIDIA H200"),
        ("", "it hung", "no", "NVIDIA H200"),
    ]
    assert {row.error for row in late} == {"skipped: out of time"}
    assert {row.error for row in none} == {"skipped: no GPU"}
    assert len(late) == len(none) == len(rows)
    assert "it hung" in capsys.readouterr().out
    assert "0 of 3 goals reached" in gpu.summary(rows)


def test_a_worker_answers_fails_dies_and_comes_back() -> None:
    worker = Worker()
    assert worker.ask(math.sqrt, 4.0, seconds=60) == 2.0
    with pytest.raises(Failed, match="ValueError"):
        worker.ask(math.sqrt, -1.0, seconds=60)
    with pytest.raises(Failed, match=r"exit code 3"):
        worker.ask(os._exit, 3, seconds=60)
    assert worker.ask(math.sqrt, 9.0, seconds=60) == 3.0
    with pytest.raises(Failed, match="no answer within"):
        worker.ask(time.sleep, 100, seconds=0.2)
    worker.stop()


def test_parallel_answers_all_and_stops_in_time() -> None:
    answers = dict(parallel(math.sqrt, [1.0, 4.0, -1.0], 2, time.monotonic() + 60))
    assert (answers[1.0], answers[4.0]) == (1.0, 2.0)
    assert isinstance(answers[-1.0], Failed)
    late = dict(parallel(math.sqrt, [1.0, 4.0], 2, time.monotonic() - 1))
    assert [str(answer) for answer in late.values()] == ["skipped: out of time"] * 2


def test_context_parallelism_is_timed_beside_one_rank() -> None:
    pytest.importorskip("triton")
    ranks = Ranks(2, timeout=60)
    found = ranks(parallel_bench.rows_of, 256, torch.device("cpu"), 2)
    ranks.close()
    speed, memory = found[0]
    assert (speed.subject, speed.peer, speed.seq, speed.device) == ("context parallel", "one GPU", 256, "2 x CPU")
    assert 0 < speed.ratio_min <= speed.ratio <= speed.ratio_max
    assert found[1][0] == speed  # each rank has the slowest one's times
    assert memory.subject == "context parallel memory"


# --- tables and the plot -------------------------------------------------------------------------------------------

ROWS = [
    replace(ROW, ours_tflops=423.6, their_tflops=353.2).judged(),
    replace(ROW, peer=FA2, ours_tflops=423.6, their_tflops=260.0, ratio=1.63, goal=">= 2.0").judged(),
    replace(ROW, seq=512, error="no kernel", ratio=None, ours=None).judged(),
    Row("fp32", "forward", "fp32", 64, "full", 1024, "memory-efficient", "ms", 1.5, 3.0, ratio=2.0, ratio_min=1.9,
        ratio_max=2.1, goal=">= 1.5").judged(),
    Row("host time", "no_grad forward", "bf16", 64, "full", 128, FA2, "us", 25.0, 30.0, goal="<= 30").judged(),
]  # fmt: skip


def test_grid_table() -> None:
    assert tables.grid(ROWS, "forward").splitlines() == [
        "| d, mask, S | ours | FlexAttention (ratio; goal) | FlashAttention-2 (ratio; goal) |",
        "| --- | ---: | ---: | ---: |",
        "| 64, causal, 2k | 424 | 353 (1.20; >= 1.08) | 260 (1.63; >= 2.0 missed) |",
        "| 64, causal, 512 |  | failed: no kernel |  |",
    ]


def test_rates_of_a_cache_have_their_decimals() -> None:
    row = Row("decode", "", "bf16", 128, "batch 8", 8192, FA2, ratio=1.03, ours_tflops=3.667, their_tflops=3.55)
    assert tables.grid([row], "decode").splitlines()[2:] == ["| 128, batch 8, 8k | 3.67 | 3.55 (1.03) |"]
    assert not tables.speeds([row]).splitlines()[2:]


def test_overview_is_beside_the_best_peer() -> None:
    assert tables.overview(ROWS, "forward").splitlines() == [
        "| direction, d, mask | 512 | 2k |",
        "| --- | ---: | ---: |",
        "| forward, 64, causal |  | 424 (1.20) |",
    ]


def test_other_tables() -> None:
    assert tables.speeds(ROWS).splitlines()[2:] == [
        "| fp32 forward fp32 d64 full S1024 | memory-efficient | 1.5 ms | 3 ms | 2.00 (1.90, 2.10) | >= 1.5 | yes |"
    ]
    assert tables.limits(ROWS).splitlines()[2:] == [
        "| host time no_grad forward bf16 d64 full S128 | 25 us | <= 30 | yes | FlashAttention-2 30 us |"
    ]


def test_a_page_is_filled_and_stays_filled() -> None:
    page = "before\n<!-- table: limits -->\nold\n<!-- /table -->\nafter\n"
    filled = tables.fill(page, ROWS)
    assert filled == f"before\n<!-- table: limits -->\n{tables.limits(ROWS)}\n<!-- /table -->\nafter\n"
    assert tables.fill(filled, ROWS) == filled
    for bad in ("nothing", "<!-- table: nonsense -->\n<!-- /table -->"):
        with pytest.raises(ValueError, match="table"):
            tables.fill(bad, ROWS)


def test_plot(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    cached = Row("decode", "", "bf16", 128, "batch 8", 8192, FA2, ratio=1.03, ours_tflops=3.667)  # TB/s: in no picture
    assert plot.panels([*ROWS, cached]) == {
        ("forward", 64, "causal"): {"ours, triton": {2048: 423.6}, FLEX: {2048: 353.2}, FA2: {2048: 260.0}}
    }
    plot.draw(ROWS, tmp_path / "x.png")
    assert (tmp_path / "x.png").read_bytes().startswith(b"\x89PNG")
    with pytest.raises(ValueError, match="no rows"):
        plot.draw(ROWS[-1:], tmp_path / "y.png")


# --- tuning --------------------------------------------------------------------------------------------------------


def test_the_grid_leaves_out_what_cannot_be_good() -> None:
    sides, warps, stages = [32, 64, 128], [4, 8], [2, 3, 4]
    everything = len(sides) ** 2 * len(warps) * len(stages)
    small = tune.candidates(tune.Task("forward", 64), sides, sides, warps, stages)
    assert len(small) == everything
    large = tune.candidates(tune.Task("forward", 256), sides, sides, warps, stages)
    assert 0 < len(large) < everything
    assert tune.Candidate(64, 64, 4, 2, False) in large
    assert tune.Candidate(128, 64, 4, 2, False) not in large  # 128 x 256 fp32 over 128 threads: all 256 registers
    assert tune.Candidate(64, 128, 8, 4, False) not in large  # 3 stages of K and V take 384 KiB
    both = tune.candidates(tune.Task("dq", 64), [64], [64], [4], [2], [False, True])
    assert [c.tma for c in both] == [False, True]
    assert tune.pipeline_bytes(tune.Task("dkdv", 65), tune.Candidate(32, 128, 4, 3, False)) == 2 * 2 * 32 * 128 * 2


def test_the_candidate_is_what_the_backend_is_told() -> None:
    from tilewise.kernels.triton import config

    q = torch.empty(1, 1, 256, 64)
    problem, _ = Problem.of(q, q, q)
    before = {direction: config.choose(problem, direction) for direction in ("forward", "dq")}
    candidate = tune.Candidate(16, 128, 2, 5, True)
    with tune.chosen(tune.Task("dq", 64), candidate) as answered:
        assert config.choose(problem, "forward") == before["forward"]
        assert not answered.called
        assert config.choose(problem, "dq") == config.Config(16, 128, 2, 5, True)
        assert answered.called
    assert config.choose(problem, "dq") == before["dq"]


def test_a_kernel_alone_is_the_only_one_that_is_launched(monkeypatch: pytest.MonkeyPatch) -> None:
    host = pytest.importorskip("tilewise.kernels.triton.host")
    launched: list[str] = []
    plan = host._Backward((), *[lambda name=name: launched.append(name) for name in ("dq", "dkdv")], None, None)
    monkeypatch.setattr(host, "_backward", lambda *args: plan)
    for task in (tune.Task("dkdv", 64, alone=True), tune.Task("dq", 64)):
        with tune.alone(task):
            start = host._backward()
            start.dq()
            start.dkdv()
    assert launched == ["dkdv", "dq", "dkdv"]
    assert host._backward() is plan
    assert tune.tflops(replace(task, alone=True), 2048, 2.0) == pytest.approx(0.6 * tune.tflops(task, 2048, 2.0))


def test_a_candidate_that_was_not_run_is_no_candidate() -> None:
    """ "tiled" asks for no Config: the check must not pass for it."""
    with pytest.raises(RuntimeError, match="was not asked"):
        tune.check((tune.Task("forward", 16, "fp32"), tune.Candidate(64, 64, 4, 2, False)), SMALL, seq=128)


@pytest.mark.parametrize("direction", ["forward", "dq"])
@pytest.mark.parametrize("layout", ["dense", "packed"])
@pytest.mark.parametrize(("mask", "bias"), [("causal", False), ("blocks", True), ("window", False)])
def test_the_check_of_a_candidate_is_right(
    direction: str, layout: str, mask: str, bias: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Asked:
        called = True

    class Chosen:
        def __enter__(self) -> Asked:
            return Asked()

        def __exit__(self, *_: object) -> None: ...

    monkeypatch.setattr(tune, "chosen", lambda task, candidate: Chosen())
    task = tune.Task(direction, 16, "fp32", mask, layout, bias)
    tune.check((task, tune.Candidate(64, 64, 4, 2, False)), SMALL, seq=512)
    right = tune.timed

    def wrong(*args: object) -> Callable[[], object]:
        call = right(*args)
        return lambda: call() * 1.01 if direction == "forward" else [t * 1.01 for t in call()]

    monkeypatch.setattr(tune, "timed", wrong)
    with pytest.raises(RuntimeError, match="wrong: tensor 0"):
        tune.check((task, tune.Candidate(64, 64, 4, 2, False)), SMALL, seq=512)


def test_slow_candidates_go_and_the_best_come_first(tmp_path: Path) -> None:
    def result(rows: int, *times: float, error: str = "") -> tune.Result:
        return tune.Result(tune.Candidate(rows, 64, 4, 2, False), times, error)

    fast, close, slow, broken = result(16, 1.0), result(32, 1.2), result(64, 1.3), result(128, error="no room")
    assert tune.keep([slow, fast, close]) == ([fast, close], [slow])
    twice = [replace(fast, times=(1.0, 4.0)), replace(close, times=(1.2, 3.0))]
    ranked = tune.order([broken, slow, *twice])
    assert [r.candidate.rows for r in ranked] == [32, 16, 64, 128]
    task = tune.Task("forward", 64)
    text = tune.table(task, ranked, [2048, 1024])
    assert re.match(r"32x64 4 warps 2 stages\s+\d+\s+\d+$", text.splitlines()[1])
    assert text.splitlines()[-1].endswith("no room")
    path = tmp_path / "tune.csv"
    for _ in range(2):  # a second run takes the first one's place
        tune.write(path, task, tune.lines(task, ranked, [2048, 1024]))
        tune.write(path, replace(task, d=128), tune.lines(task, ranked[:1], [2048, 1024])[:1])
    lines = path.read_text().splitlines()
    assert len(lines) == 1 + (2 + 2 + 1 + 1) + 1
    assert lines[0] == ",".join(tune.FIELDS)


def test_tflops_of_a_tuned_call() -> None:
    cell = next(cell for cell in gpu_cases.cells() if cell.name == "backward bf16 d128 causal S2048")
    assert tune.tflops(tune.Task("dq", 128, mask="causal"), 2048, 2.0) == pytest.approx(cell.flops / 2e-3 / 1e12)


def test_the_names_of_the_cells_are_listed(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["bench.gpu", "--list", "--only", "first call,memory"])
    gpu.main()
    assert len(capsys.readouterr().out.splitlines()) == 5


def test_what_is_tuned(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["bench.tune", "--direction", "dq,dbias", "--d", "64,128", "--mask", "causal"]
    monkeypatch.setattr(sys, "argv", arguments)
    tasks = tune.tasks_of(tune.parse())
    assert tasks == [
        tune.Task(direction, d, "bf16", "causal", "dense", direction == "dbias")
        for direction in ("dq", "dbias")
        for d in (64, 128)
    ]
    assert tune.lengths_of(tasks[0], [4096, 16384]) == [4096, 16384]
    assert tune.lengths_of(tasks[2], [4096, 1024, 16384]) == [4096, 1024]
    monkeypatch.setattr(sys, "argv", [*arguments, "--mask", "causal,nonsense"])
    with pytest.raises(SystemExit):
        tune.parse()
    assert "nonsense: must be of full, causal" in capsys.readouterr().err


def test_a_candidate_that_fails_while_timed_is_reported() -> None:
    task = tune.Task("forward", 64)
    grid = [tune.Candidate(rows, 64, 4, 2, False) for rows in (16, 32, 64)]
    worker = mock.Mock()
    worker.ask.side_effect = [2.0, Failed("illegal access"), 1.0, 0.5]
    results = [tune.Result(c) for c in grid] + [tune.Result(tune.Candidate(128, 64, 4, 2, False), error="no room")]
    ranked = tune.clock_all(worker, task, results, [4096, 1024], time.monotonic() + 60)
    assert [(r.candidate.rows, r.times, r.error) for r in ranked] == [
        (64, (1.0, 0.5), ""),
        (16, (2.0,), ""),
        (128, (), "no room"),
        (32, (), "illegal access"),
    ]
    late = tune.clock_all(worker, task, results[:1], [4096], time.monotonic() - 1)
    assert late[0].error == "skipped at 4096: out of time"
