"""The figures of `tilewise explain --figures`: their numbers are the model's, and the files are written."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

pytest.importorskip("matplotlib")
pytest.importorskip("typer")

from typer.testing import CliRunner

from tilewise import cli
from tilewise.algorithm import io_model
from tilewise.algorithm.io_model import GPUS, Sizes
from tilewise.report import breakdown, hierarchy, io_figures, series
from tilewise.report.breakdown import Breakdown
from tilewise.report.cost import Question
from tilewise.report.hierarchy import Level

QUESTION = Question(seqlen=512, heads=2, batch=3, dropout=True)
MEASURED = Breakdown("test", (1, 2, 3, 4), "float32", dict.fromkeys(breakdown.STEPS, 0.25), 0.5, 0.1)


@pytest.mark.parametrize("gpu", GPUS.values(), ids=lambda gpu: gpu.name)
def test_curves_are_the_models(gpu: io_model.GPU) -> None:
    measured = gpu.measured_flops is not None
    curves = series.against_length(QUESTION, gpu, (128, 1024))
    for n, length in enumerate((128, 1024)):
        sizes = Sizes(length, length, 64, 64, 3, 2)
        costs = io_model.compare(sizes, QUESTION.M, dropout=True)
        for curve in curves:
            if curve.name != "block-sparse":
                assert curve.bytes[n] == costs[curve.name].bytes
                assert curve.seconds[n] == io_model.predicted_time(costs[curve.name], gpu, measured)
    assert [curve.name for curve in curves] == list(QUESTION.costs(backward=True))


def test_larger_blocks_move_fewer_bytes_until_the_flops_decide() -> None:
    gpu = GPUS["A100"]
    first, second = series.against_block(QUESTION, gpu, (32, 128, 4096))
    assert first.bytes[1] == io_model.flash_attention_1(QUESTION.sizes, (64, 128)).bytes
    assert second.bytes[1] == io_model.flash_attention_2(QUESTION.sizes, (128, 64)).bytes
    for curve in (first, second):
        assert curve.bytes[0] > curve.bytes[1] > curve.bytes[2]
        assert curve.seconds[2] >= series.floor(QUESTION, gpu)
    assert series.floor(Question(), gpu) == series.against_block(Question(), gpu, (1024,))[0].seconds[0]


def test_no_point_lies_above_the_roof() -> None:
    for gpu in GPUS.values():
        bandwidth, flops = series.ceilings(gpu)
        points = series.roofline(QUESTION, gpu)
        costs = QUESTION.costs(backward=True)
        for point in points:
            assert point.intensity == costs[point.name].intensity
            assert point.rate <= 1.0001 * min(flops, point.intensity * bandwidth)


def test_levels_grow_downwards() -> None:
    for gpu in GPUS.values():
        sizes = [level.size for level in hierarchy.of_gpu(gpu)]
        assert sizes == sorted(sizes)
        assert len(sizes) == 3
    name, levels = hierarchy.present()
    assert name
    assert levels[-1].size > 1 << 28
    assert levels[-1].bandwidth is not None
    assert 1e8 < levels[-1].bandwidth < 1e13
    assert hierarchy.known("NVIDIA A100-SXM4-80GB") is GPUS["A100"]


def test_the_time_is_measured_step_by_step() -> None:
    found = breakdown.of((1, 1, 64, 16), torch.float32, "cpu")
    assert tuple(found.steps) == breakdown.STEPS
    assert found.standard == sum(found.steps.values())
    assert min(*found.steps.values(), found.tilewise, found.plain) > 0


def test_figures_are_written(tmp_path: Path) -> None:
    machines = [("one", [Level("L1", 1 << 15, None), Level("memory", 1 << 34, 1e10, "measured")])]
    written = list(io_figures.write(tmp_path / "new", QUESTION, GPUS["H200"], machines, MEASURED))
    assert [path.name for path in written] == ["length.png", "block.png", "roofline.png", "memory.png", "breakdown.png"]
    for path in written:
        assert path.read_bytes()[:4] == b"\x89PNG"
        assert path.stat().st_size > 8000


def test_explain_draws(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hierarchy, "present", lambda: ("NVIDIA H200", hierarchy.of_gpu(GPUS["H200"])))
    monkeypatch.setattr(breakdown, "measure", lambda: MEASURED)
    drawn = []
    monkeypatch.setattr(io_figures, "write", lambda folder, *what: drawn.append(what) or [folder / "x.png"])
    run = CliRunner().invoke
    for gpu, machines in (("H200", ["NVIDIA H200"]), ("A100", ["A100", "NVIDIA H200"])):
        result = run(cli.app, ["explain", "--figures", str(tmp_path), "--gpu", gpu, "--seqlen", "256"])
        assert result.exit_code == 0, result.output
        assert "x.png" in result.output
        question, card, shown, measured = drawn.pop()
        assert (question.seqlen, card, measured) == (256, GPUS[gpu], MEASURED)
        assert [name for name, _ in shown] == machines
    refused = run(cli.app, ["explain", "--figures", str(tmp_path), "--dtype", "fp32"])
    assert refused.exit_code == 2
    assert "no time is known" in refused.output


def test_here_must_be_a_card_that_is_known(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    result = CliRunner().invoke(cli.app, ["explain", "--gpu", "here"])
    assert result.exit_code == 2
    assert "no GPU" in result.output
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "NVIDIA H200")
    assert "time on H200" in CliRunner().invoke(cli.app, ["explain", "--gpu", "here"]).output
