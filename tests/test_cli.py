"""The command line: what each command prints is compared with what it should have computed, and each can fail."""

from __future__ import annotations

import re
import subprocess
import sys
import types
from pathlib import Path

import pytest
import torch

pytest.importorskip("typer")
pytest.importorskip("rich")
pytest.importorskip("matplotlib")

from typer.testing import CliRunner, Result

from tilewise import cli, dispatch
from tilewise.algorithm import io_model, tiled, tiling
from tilewise.examples import char_gpt
from tilewise.mask import causal, sliding_window
from tilewise.problem import Grads
from tilewise.report import check, cost, measure, page
from tilewise.report.units import duration, size

PNG = b"\x89PNG\r\n\x1a\n"


def run(*arguments: str) -> Result:
    return CliRunner().invoke(cli.app, list(arguments), env={"COLUMNS": "80"})


def row(output: str, name: str) -> str:
    """The first line of a table that starts with `name`."""
    return next(line for line in output.splitlines() if line.startswith(name))


def flat(output: str) -> str:
    """The output with its lines joined, however long they were."""
    return " ".join(output.split())


# --- demo ----------------------------------------------------------------------------------------------------------


@pytest.fixture
def small_demo(tmp_path: Path) -> tuple[str, ...]:
    return ("demo", "--steps", "8", "--context", "32", "--longest", "512", "--out", str(tmp_path / "demo.png"))


def test_demo(small_demo: tuple[str, ...]) -> None:
    result = run(*small_demo)
    assert result.exit_code == 0, result.output
    difference = re.search(r"largest difference between the curves: (\S+) nats \(below 0.001\)", result.output)
    assert difference
    assert float(difference[1]) < 1e-3
    standard, ours = map(float, re.search(r"standard (\S+)   tilewise (\S+)  nats", result.output).groups())
    assert abs(standard - ours) < 1e-3
    assert 2 < standard < 4.1  # it began at log(60) = 4.09
    for length in (256, 512):
        by_standard, by_tiles = measure.hbm_bytes(length)
        assert f"{size(by_standard)}   {size(by_tiles)}" in re.sub(r" {3,}", "   ", row(result.output, str(length)))
    picture = Path(small_demo[-1]).read_bytes()
    assert picture.startswith(PNG)
    assert int.from_bytes(picture[16:20], "big") == 1200  # its width


def test_demo_fails_when_the_curves_part(small_demo: tuple[str, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    right = measure.tilewise_attention
    monkeypatch.setattr(measure, "tilewise_attention", lambda q, k, v: 1.5 * right(q, k, v))
    result = run(*small_demo)
    assert result.exit_code == 1
    assert "NOT below" in result.output


@pytest.mark.slow
def test_demo_learns_as_it_promises(tmp_path: Path) -> None:
    """The whole demo as `make demo` runs it: 200 steps of context 256 to under 2.3 nats, curves within 1e-3."""
    result = run("demo", "--out", str(tmp_path / "demo.png"))
    assert result.exit_code == 0, result.output
    assert "200/200" in result.output
    assert all(
        float(loss) < 2.3 for loss in re.search(r"standard (\S+)   tilewise (\S+)  nats", result.output).groups()
    )
    assert row(result.output, "4096")


def test_example_depends_on_the_seed_alone() -> None:
    small = char_gpt.Size(context=16, layers=1, heads=2, width=16, batch=2)

    def losses(seed: int) -> list[float]:
        return list(char_gpt.train(char_gpt.standard_attention, 3, small, seed))

    state = torch.get_rng_state()
    assert losses(0) == losses(0)
    assert losses(0) != losses(1)
    assert torch.equal(torch.get_rng_state(), state)


def test_example_text() -> None:
    text = char_gpt.load_text()
    assert 50_000 < len(text) < 100_000
    tokens, alphabet = char_gpt.encode(text)
    assert "".join(alphabet[t] for t in tokens[:1000]) == text[:1000]


@pytest.mark.parametrize("length", [256, 640])
def test_peak_memory_of_standard_attention_is_quadratic_and_ours_is_not(length: int) -> None:
    """The profiler's number against what must be alive: S, masked S and P, or S and P and their gradients."""
    matrix = measure.HEADS * length * length * 4
    vectors = measure.HEADS * length * measure.HEAD_DIM * 4
    standard, ours = (
        measure.peak_memory(measure._forward_and_backward(attend, length, "cpu"), "cpu")
        for attend in (char_gpt.standard_attention, measure.tilewise_attention)
    )
    assert 3 * matrix <= standard <= 4 * matrix + 8 * vectors
    assert 4 * vectors <= ours  # o, dq, dk, dv


def test_peak_memory_sees_what_is_freed_again() -> None:
    def call() -> None:
        x = torch.empty(1_000_000)
        del x
        torch.empty(10)

    assert measure.peak_memory(call, "cpu") == 4_000_000


# --- explain -------------------------------------------------------------------------------------------------------


def test_explain_leads_to_the_papers_factor() -> None:
    result = run("explain")
    assert result.exit_code == 0, result.output
    sizes = io_model.Sizes(1024, 1024, 64, 64, 64, 16, 2)
    blocks = tiling.paper_blocks(51200, 64)
    forward, backward = io_model.flash_attention_1(sizes, blocks), io_model.flash_attention_1_backward(sizes, blocks)
    line = row(result.output, "FlashAttention-1")
    assert line.split()[1:] == [
        "64", "x", "200", *f"{forward.peak_on_chip / 1024:.0f} KiB".split(), *size(forward.bytes).split(),
        *size(backward.bytes).split(), *size(forward.bytes + backward.bytes).split(), "4.9x",
    ]  # fmt: skip
    assert "So 4.9x to 9.0x" in flat(result.output)
    assert row(result.output, "S ").split() == ["S", "4.00", "2.00"]  # passes: none in FlashAttention
    assert row(result.output, "1024").split()[1:4] == ["3.6x", "5.0x", "8.0x"]
    assert "12 d^2 / M = 0.96" in flat(result.output)
    for gpu in io_model.GPUS.values():
        assert gpu.name in result.output
        assert gpu.source.split(",")[0] in result.output


def test_explain_passes_its_options_on() -> None:
    sizes = ("--seqlen", "2048", "--head-dim", "128", "--sram", "192", "--heads", "4", "--batch", "2")
    result = run("explain", *sizes, "--window", "100", "--dropout", "--dtype", "bf16", "--gpu", "h200")
    assert result.exit_code == 0, result.output
    question = cost.Question(2048, 128, 192, sliding_window(100), 4, 2, "bf16", dropout=True)
    total = question.costs(backward=True)["FlashAttention-2"]
    moved, _, work = result.output.partition("time on H200")
    assert size(total.bytes) in row(moved, "FlashAttention-2")
    assert size(total.allocated) in row(work, "FlashAttention-2")
    seconds = io_model.predicted_time(total, io_model.GPUS["H200"], measured=True)
    assert duration(seconds) in row(work, "FlashAttention-2")
    assert "P_dropped" in result.output


def test_explain_causal_halves_the_flops_of_flash_attention_alone() -> None:
    def flops(band: object) -> dict[str, int]:
        question = cost.Question(seqlen=8192, band=band)
        return {name: total.flops for name, total in question.costs(backward=True).items()}

    full, half = flops(cost.Band()), flops(causal)
    assert half["standard"] == full["standard"]
    assert 0.5 < half["FlashAttention-2"] / full["FlashAttention-2"] < 0.52
    shown = run("explain", "--seqlen", "8192", "--causal").output
    full_shown = run("explain", "--seqlen", "8192").output
    assert row(shown, "FlashAttention-1") != row(full_shown, "FlashAttention-1")


def test_explain_does_not_time_fp32_by_the_flops_of_half_precision() -> None:
    result = run("explain", "--dtype", "fp32")
    assert result.exit_code == 0, result.output
    assert "No time in fp32" in flat(result.output)
    assert " ms " not in result.output.partition("Where the forward")[0]


@pytest.mark.parametrize(
    ("option", "value", "allowed"), [("--gpu", "V100", "A100, H100, H200"), ("--dtype", "int8", "fp16, bf16, fp32")]
)
def test_explain_names_what_is_allowed(option: str, value: str, allowed: str) -> None:
    result = run("explain", option, value)
    assert result.exit_code == 2
    assert value in result.output
    assert allowed in result.output


def test_explain_writes_a_page(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(page, "SCENARIOS", page.SCENARIOS[:1])
    out = tmp_path / "out.html"
    result = run("explain", "--html", str(out))
    assert result.exit_code == 0, result.output
    assert f"page: {out} ({size(out.stat().st_size)})" in result.output.replace("\n", "")
    assert "1 settings" in result.output
    assert "block sizes" not in result.output  # no tables beside it
    assert out.read_text(encoding="utf-8").startswith("<!doctype html>")


# --- check ---------------------------------------------------------------------------------------------------------


def test_check() -> None:
    result = run("check", "--problems", "8")
    assert result.exit_code == 0, result.output
    assert "8 problems, 8 runs, 0 faults" in result.output
    for dtype in ("float16", "bfloat16", "float32", "float64"):
        ratios = [float(x) for x in re.findall(r"\d+\.\d\d", row_with(result.output, dtype))]
        assert len(ratios) >= 5  # o, lse, dq, dk, dv
        assert max(ratios) <= 1
        assert min(ratios[:5]) > 0


def row_with(output: str, word: str) -> str:
    return next(line for line in output.splitlines() if f" {word} " in line)


def broken_o(problem, q, k, v, aux):  # type: ignore[no-untyped-def]
    o, lse = tiled.forward(problem, q, k, v, aux)
    return o * 1.05, lse


def broken_lse(problem, q, k, v, aux):  # type: ignore[no-untyped-def]
    o, lse = tiled.forward(problem, q, k, v, aux)
    return o, lse * 1.05


def nan_in_one_element(problem, q, k, v, aux):  # type: ignore[no-untyped-def]
    o, lse = tiled.forward(problem, q, k, v, aux)
    o.view(-1)[-1] = torch.nan
    return o, lse


def raises(problem, q, k, v, aux):  # type: ignore[no-untyped-def]
    raise RuntimeError("no such kernel")


def broken_dk(problem, do, dlse, q, k, v, o, lse, aux):  # type: ignore[no-untyped-def]
    grads = tiled.backward(problem, do, dlse, q, k, v, o, lse, aux)
    return Grads(grads.dq, grads.dk * 0.9, grads.dv, grads.dbias, grads.dslopes, grads.dsink)


def install(monkeypatch: pytest.MonkeyPatch, forward=tiled.forward, backward=tiled.backward) -> None:  # type: ignore[no-untyped-def]
    """A backend "broken" beside the others."""
    module = types.ModuleType("broken_backend")
    module.__dict__.update(why_not=lambda problem: None, forward=forward, backward=backward)
    monkeypatch.setitem(sys.modules, "broken_backend", module)
    monkeypatch.setitem(dispatch.BACKENDS, "broken", "broken_backend")


@pytest.mark.parametrize(
    ("fault", "says"),
    [
        ({"forward": broken_o}, "o: error"),
        ({"forward": broken_lse}, "lse: error"),
        ({"forward": nan_in_one_element}, "o: error nan"),
        ({"forward": raises}, "RuntimeError: no such kernel"),
        ({"backward": broken_dk}, "dk: error"),
    ],
    ids=lambda x: getattr(next(iter(x.values())), "__name__", "") if isinstance(x, dict) else "",
)
def test_check_finds_a_broken_backend(monkeypatch: pytest.MonkeyPatch, fault: dict, says: str) -> None:  # type: ignore[type-arg]
    install(monkeypatch, **fault)
    result = run("check", "--problems", "4", "--seed", "1")
    assert result.exit_code == 1
    output = flat(result.output)
    assert "4 problems, 8 runs, 4 faults" in output
    assert output.count("FAULT broken on cpu") == 4
    assert says in output
    assert "problem 3 of seed 1" in output


def test_check_that_ran_nothing_is_no_success(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dispatch, "BACKENDS", {})
    assert run("check", "--problems", "1").exit_code == 1


def test_samples_cover_the_options() -> None:
    drawn = [check.sample(0, n) for n in range(80)]
    problems = [check.Problem.of(**one.arguments())[0] for one in drawn]
    for option in ("k_lens", "alibi", "sink", "softcap", "dropout_p", "bias"):
        assert any(getattr(p, option) for p in problems), option
    assert {p.mask for p in problems} == {None, "bool", "blocks"}
    assert {p.dtype for p in problems} == set(check.DTYPES)
    assert {p.q_layout.name for p in problems} == {"DENSE", "PACKED"}
    assert any(p.group > 1 for p in problems)
    assert sum(not p.band.is_full for p in problems) > 20


# --- doctor --------------------------------------------------------------------------------------------------------


def test_doctor() -> None:
    result = run("doctor")
    assert result.exit_code == 0, result.output
    assert torch.__version__ in result.output
    assert row(result.output, "  tilewise").split()[1] == cli.diagnosis.__version__
    error = re.search(r"tiled +cpu +works +error of a causal call in float32: (\S+)", result.output)
    assert error
    assert 0 < float(error[1]) < 1e-5


def test_doctor_sees_a_backend_that_is_wrong_and_one_that_cannot(monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch, forward=broken_o)
    cannot = types.ModuleType("cannot")
    cannot.why_not = lambda problem: "it needs a GPU [of some kind]"  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "cannot", cannot)
    monkeypatch.setitem(dispatch.BACKENDS, "cannot", "cannot")
    result = run("doctor")
    assert result.exit_code == 0  # "tiled" works
    assert re.search(r"broken +cpu +does not work", result.output)
    assert re.search(r"cannot +cpu +does not work +it needs a GPU \[of some kind\]", result.output)
    monkeypatch.delitem(dispatch.BACKENDS, "tiled")
    assert run("doctor").exit_code == 1


# --- bench, and the extra ------------------------------------------------------------------------------------------


def test_bench_runs_the_checkouts_script(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(cli, "__file__", str(tmp_path / "tilewise" / "cli.py"))
    missing = run("bench")
    assert missing.exit_code == 1
    assert "checkout" in missing.output
    (tmp_path / "bench").mkdir()
    (tmp_path / "bench" / "__init__.py").touch()
    (tmp_path / "bench" / "__main__.py").write_text("import sys\nprint('got', *sys.argv[1:])\nsys.exit(3)\n")
    assert run("bench", "--only", "forward").exit_code == 3
    assert "got --only forward" in capfd.readouterr().out


@pytest.mark.parametrize("missing", ["typer", "rich", "matplotlib"])
def test_without_the_extra_it_says_what_to_install(missing: str) -> None:
    """The check comes first in cli.py, so torch and the package itself need not be loaded to see it."""
    program = (
        "import sys, types\n"
        f"sys.modules[{missing!r}] = None\n"
        "package = types.ModuleType('tilewise')\n"
        f"package.__path__ = [{str(Path(cli.__file__).parent)!r}]\n"
        "sys.modules['tilewise'] = package\n"
        "import tilewise.cli\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert done.stderr == f"tilewise: the command line needs {missing}. Install it with: pip install 'tilewise[cli]'\n"
