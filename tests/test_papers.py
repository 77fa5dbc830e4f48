"""The papers' tables: each case measured once in a tiny size on the CPU, ours as transformers' attention function, and
pages and pictures from rows. No time is looked at."""

from __future__ import annotations

import re
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from bench import timing
from bench.gpu_cases import CUDNN, FA2, Built, Cell, Peer
from bench.papers import attention, figures, lengths, registered, tables, training
from bench.papers.case import NO_ROOM, Case, Kernel, Setting, compile_kernel, failures, measure
from bench.papers.run import PAGE, cases, joined, run
from bench.rows import Row
from bench.tables import BLOCK, fill
from tilewise import BlockMask

TINY = Setting("cpu", tiny=True)
STEPS = [
    "GPT-2 small training step bf16 d64 causal, dropout 0.1 S1024",
    "BERT-large training step bf16 d64 full, dropout 0.1 S512",
]
STEPS += [f"Long-Range Arena encoder training step bf16 d64 {mask} S1024" for mask in ("full", "butterfly")]


@pytest.fixture
def one_round(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(timing, "ROUNDS", 1)


# --- cases ---------------------------------------------------------------------------------------------------------


def test_cases_have_names_and_goals_of_their_own() -> None:
    found = cases(Setting())
    assert len({case.name for case in found}) == len(found)
    goals = {(case.cell.row.subject, case.cell.row.mask, case.cell.row.seq, peer.name): peer.goal
             for case in found for peer in case.cell.peers if peer.goal}  # fmt: skip
    blocks = {("sparsity", f"blocks {n}/32", 4096, lengths.FULL): ">= 1.0" for n in lengths.LIVE}
    assert goals == {
        (attention.SUBJECT, "causal, dropout 0.1", 1024, attention.STANDARD): ">= 9",
        (attention.SUBJECT, "causal, dropout 0.1", 1024, FA2): ">= 0.87",  # 1 / 1.15
        (attention.SUBJECT, "causal", 1024, FA2): ">= 1.0",
        (attention.SUBJECT, "causal", 1024, CUDNN): ">= 1.0",
        ("GPT-2 small", "causal, dropout 0.1", 1024, training.SDPA): ">= 1.0",
        ("GPT-2 small", "causal, dropout 0.1", 4096, training.EAGER): ">= 3",
        ("GPT-2 small", "causal, dropout 0.1", 8192, training.SDPA): ">= 1.0",
        ("GPT-2 small", "causal, dropout 0.1", 16384, training.EAGER): ">= 3",
        **blocks,
    }
    assert [case.cell.row.seq for case in found if case.cell.row.mask == "butterfly" and "lengths" in case.name] == [
        2**n for n in range(7, 17)
    ]
    assert {case.tokens for case in found if case.cell.row.subject == "GPT-2 small"} == {16384}


def test_the_warm_up_runs_what_the_cases_run() -> None:
    for kernel in (Kernel("bf16", 128, "butterfly"), Kernel("fp16", 64, "causal", 0.1)):
        compile_kernel(TINY, kernel)


@pytest.mark.parametrize("name", [case.name for case in cases(TINY) if not case.tokens])
def test_attention_cases_give_their_rows(name: str, one_round: None) -> None:
    case = next(case for case in cases(TINY) if case.name == name)
    rows = measure(case, TINY)
    assert [row.peer for row in rows] == [peer.name for peer in case.cell.peers]
    for row in rows:
        assert row.ours
        assert (row.unit, row.device, row.direction) == ("ms", "CPU", "forward + backward")
        if row.peer not in (FA2, CUDNN):  # which a CPU need not have
            assert row.error == ""
            assert row.theirs
            assert row.ratio


@pytest.mark.parametrize("name", STEPS)
def test_training_cases_give_their_rows(name: str, one_round: None) -> None:
    pytest.importorskip("transformers")
    case = next(case for case in cases(TINY) if case.name == name)
    rows = measure(case, TINY)
    assert [(row.peer, row.unit) for row in rows] == [
        (peer, unit) for unit in ("ms", "tokens/s") for peer in (training.EAGER, training.SDPA)
    ]
    for row in rows:
        assert row.error == ""
        assert row.ours
        assert row.theirs
    assert rows[2].ours == round(case.tokens / rows[0].ours * 1e3)


def test_what_does_not_fit_is_no_goal_missed(one_round: None) -> None:
    def no_room() -> Any:
        raise torch.OutOfMemoryError("64 GiB")

    def no_kernel() -> Any:
        raise ValueError("no such kernel")

    peers = (Peer("large", ">= 3", same_result=False), Peer("broken", ">= 3", same_result=False))
    built = Built(lambda: lambda: None, {"large": no_room, "broken": no_kernel})
    case = Case(Cell(Row("x"), peers, 0.0, lambda: built), ())
    large, broken = measure(case, TINY)
    assert (large.goal, large.note, large.theirs) == ("", "does not fit", None)
    assert large.error.startswith(NO_ROOM)
    assert (broken.reached, broken.error) == ("no", "ValueError: no such kernel")
    assert [row.error for row in failures(case, "hung")] == ["hung", "hung"]


def test_a_run_measures_in_a_worker(capsys: pytest.CaptureFixture[str]) -> None:
    chosen = [case for case in cases(TINY) if case.cell.row.subject == "sparsity"][:1]
    start = time.monotonic()
    (rows,) = run(chosen, TINY, 1, start, 300.0)
    assert [(row.peer, row.error, row.device) for row in rows] == [(lengths.FULL, "", "CPU")]
    (skipped,) = run(chosen, TINY, 0, start - 300.0, 300.0)
    assert [row.error for row in skipped] == ["skipped: out of time"]
    assert "sparsity" in capsys.readouterr().out


def test_no_time_left_takes_no_row_away() -> None:
    old = Row("x", peer="y", ours=1.0)
    skipped = replace(old, ours=None, error="skipped: out of time")
    assert joined([old], [skipped]) == [old]
    assert joined([], [skipped]) == [skipped]
    assert joined([old], [replace(old, ours=2.0)]) == [replace(old, ours=2.0)]


# --- transformers --------------------------------------------------------------------------------------------------


def outcome(step: training.Step, name: str, **inputs: Tensor) -> tuple[Tensor, list[Tensor]]:
    """Logits and gradients in fp32, without dropout."""
    step.model.eval().zero_grad()
    step.model.set_attn_implementation(name)  # type: ignore[operator]
    found = step.model(**{**step.inputs, **inputs})
    found.loss.backward()
    return found.logits.detach(), [p.grad.clone() for p in step.model.parameters() if p.grad is not None]


@pytest.mark.parametrize("model", [training.GPT2_SMALL, training.BERT_LARGE], ids=lambda model: model.family)
@pytest.mark.parametrize("padded", [False, True])
def test_models_compute_the_same(model: training.Model, padded: bool) -> None:
    pytest.importorskip("transformers")
    step = training.Step(model.tiny(), 2, 40, "cpu")
    inputs = {}
    if padded:  # at the end: every row sees a key
        keep = torch.arange(40) < torch.tensor([[40], [23]])
        inputs = {"attention_mask": keep.long(), "labels": step.inputs["labels"].masked_fill(~keep, -100)}
    logits, gradients = outcome(step, training.EAGER, **inputs)
    ours, our_gradients = outcome(step, registered.EXACT, **inputs)
    kept = keep if padded else slice(None)  # rows of padding are 0 in a layer of ours
    torch.testing.assert_close(ours[kept], logits[kept], rtol=1e-4, atol=1e-5)
    assert len(gradients) == len(our_gradients)
    for a, b in zip(our_gradients, gradients, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-3, atol=1e-5)


def test_the_butterfly_is_the_models_attention_with_that_mask() -> None:
    pytest.importorskip("transformers")
    step = training.Step(training.ARENA.tiny(), 1, 512, "cpu")
    dense = BlockMask.butterfly(512, 512).to_dense()
    assert not dense.all()
    step.model.eval()
    logits = {}
    for name, inputs in ((registered.BUTTERFLY, {}), (training.SDPA, {"attention_mask": dense})):
        step.model.set_attn_implementation(name)  # type: ignore[operator]
        logits[name] = step.model(**step.inputs, **inputs).logits
    torch.testing.assert_close(*logits.values(), rtol=1e-4, atol=1e-5)


def test_the_butterfly_is_for_full_attention() -> None:
    masks = pytest.importorskip("transformers.masking_utils")
    sizes = {"q_length": 256, "kv_length": 256, "device": "cpu", "batch_size": 1}
    with pytest.raises(ValueError, match="takes no padding"):
        registered.butterfly(
            **sizes, mask_function=masks.bidirectional_mask_function, attention_mask=torch.ones(1, 256)
        )
    with pytest.raises(ValueError, match="full attention only"):
        registered.butterfly(**sizes, mask_function=masks.causal_mask_function, attention_mask=None)


# --- pages and pictures --------------------------------------------------------------------------------------------

CARD = {"device": "NVIDIA H200", "torch": "2.11", "triton": "3.6"}


def row(subject: str, mask: str, seq: int, peer: str, unit: str = "ms", **figures: Any) -> Row:
    direction = training.STEP if subject.startswith("GPT-2 small") else "forward + backward"
    return Row(subject, direction, "bf16", 64, mask, seq, peer, unit, **figures, **CARD).judged()


GPT2 = "causal, dropout 0.1"
ROWS = [
    row(attention.SUBJECT, "causal", 1024, "standard", ours=2.0, theirs=30.0, ratio=15.0, ratio_min=14.0,
        ratio_max=16.0, goal=">= 9"),
    row("lengths", "full", 2048, FA2, ours=1.5, theirs=2.5),
    row("lengths", "full", 2048, "standard", ours=1.5, note="does not fit", error="OutOfMemoryError: 1 TiB"),
    row("lengths", "butterfly", 2048, lengths.FULL, ours=0.5, theirs=1.5),
    row("lengths memory", "full", 2048, FA2, "GiB", ours=0.25, theirs=0.375),
    row("sparsity", "blocks 8/32", 4096, lengths.FULL, ours=1.1, theirs=4.0, ratio=1.055, ratio_min=1.05,
        ratio_max=1.06, goal=">= 1.0"),
    row("GPT-2 small", GPT2, 1024, "eager", ours=100.0, theirs=170.0, ratio=1.7, ratio_min=1.6, ratio_max=1.8),
    row("GPT-2 small rate", GPT2, 1024, "eager", "tokens/s", ours=163840.0, theirs=96376.0),
    row("GPT-2 small memory", GPT2, 1024, "eager", "GiB", ours=20.5, theirs=41.25),
]  # fmt: skip


def test_tables_say_what_the_rows_say() -> None:
    made = tables.tables()
    assert "| standard | 66.6 | 40.3 | 41.7 |" in made["attention"](ROWS)
    assert "| 30 ms |" in made["attention"](ROWS)
    assert "| ours | 75.2 | 4.4 | 7.3 |" in made["attention"](ROWS)
    assert made["lengths"](ROWS).splitlines()[-1] == (
        "| 2k | does not fit | 2.5 ms | 1.5 ms | 0.5 ms |  | 0.375 GiB | 0.25 GiB |  |"
    )
    assert made["sparsity"](ROWS).splitlines()[-1] == "| 8/32 | 1.1 ms | 4 ms | 0.275 | 1.05 (1.05, 1.06) | yes |"
    step = made["steps"](ROWS).splitlines()[-1]
    assert "| 170 ms, 96376 tokens/s, 41.2 GiB |" in step
    assert "| 100 ms, 163840 tokens/s, 20.5 GiB | 1.70 (1.60, 1.80) |" in step
    assert step.endswith("| 3.5x over Hugging Face (table 2) |")
    assert len(made["goals"](ROWS).splitlines()) == 2 + 2
    assert made["card"](ROWS) == "Measured on: NVIDIA H200, torch 2.11, Triton 3.6."


def test_without_rows_nothing_is_said() -> None:
    for name, table in tables.tables().items():
        assert table([]) == tables.NOTHING, name


def test_the_page_holds_every_table() -> None:
    page = PAGE.read_text()
    assert {name for _, name, _ in BLOCK.findall(page)} == set(tables.tables())
    filled = fill(page, ROWS, tables.tables({"papers_lengths.png"}))
    assert "(img/papers_lengths.png)" in filled
    assert "(img/papers_sparsity.png)" not in filled
    shown = set(re.findall(r"\(img/([a-z0-9_]+\.png)\)", page))
    assert shown <= {path.name for path in (PAGE.parent / "img").iterdir()}


def test_rates_of_a_forward_and_then_a_backward() -> None:
    grid = [
        Row(direction, direction, "bf16", 64, "full", 512, FA2, ours_tflops=rate, their_tflops=300.0)
        for direction, rate in (("forward", 400.0), ("backward", 200.0))
    ]
    grid.append(Row("hopper forward", "forward", "bf16", 64, "full", 512, "FlashAttention-3", ours_tflops=500.0))
    lines = figures.together(grid)[64, "full"]
    assert set(lines) == {"ours, triton", FA2}
    assert lines[FA2][512] == pytest.approx(300)
    assert lines["ours, triton"][512] == pytest.approx(14 / (4 / 400 + 10 / 200))


def test_pictures_of_what_there_is(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    from bench.rows import write

    page = tmp_path / "page.md"
    page.write_text(PAGE.read_text())
    write(tmp_path / "papers.csv", ROWS)
    written = figures.draw_all(tmp_path / "papers.csv", tmp_path / "none.csv", tmp_path, page)
    assert written == [tmp_path / "papers_lengths.png", tmp_path / "papers_sparsity.png", page]
    assert "(img/papers_sparsity.png)" in page.read_text()
    assert "(img/papers_flash2.png)" not in page.read_text()
    assert figures.share(ROWS[5]) == 0.25
