"""The pages in docs/: what they include is what the files say, their numbers are counted, their links lead on."""

from __future__ import annotations

import html
import re
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest
import torch

from docs import include, numbers
from tilewise.algorithm import hbm, io_model, tiling
from tilewise.algorithm.backward import flash_attention_2_backward
from tilewise.algorithm.flash1 import FlashAttention1
from tilewise.algorithm.forward import flash_attention_2
from tilewise.algorithm.scores import Scores
from tilewise.algorithm.standard import Standard

ROOT = include.ROOT
PAGES = sorted((ROOT / "docs").glob("*.md"))
ENGLISH, CHINESE = ((ROOT / "docs" / file).read_text() for file in ("algorithm.md", "algorithm.zh.md"))
FENCED = re.compile(r"^```(\w*)\n(.*?)^```$", re.DOTALL | re.MULTILINE)


def name(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


def prose(text: str) -> str:
    """Without what stands in fences."""
    return FENCED.sub("", text)


# --- what is included ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("page", PAGES, ids=name)
def test_what_is_included_is_up_to_date(page: Path) -> None:
    assert include.renewed(page.read_text()) == page.read_text(), "python -m docs.include renews it"


def test_another_line_or_number_is_stale() -> None:
    for was, now in (("P = S.sub_(pivot).exp2_()", "P = S.exp2_()"), ("| 582.0 |", "| 582.1 |"), ("#L", "#L1")):
        assert was in ENGLISH
        assert include.renewed(ENGLISH.replace(was, now, 1)) == ENGLISH


def test_what_is_not_there_is_an_error() -> None:
    file = "tilewise/algorithm/online_softmax.py"
    assert "def merge" in include.code(file, "State.merge", None, None)
    for thing, start, end in (("State.mrege", None, None), ("_pivot", "no such text", None), ("_pivot", None, "class")):
        with pytest.raises(ValueError, match=r"there is no|holds"):
            include.code(file, thing, start, end)


def test_no_marker_is_left_unread() -> None:
    for page in PAGES:
        text = page.read_text()
        assert len(include.CODE.findall(text)) == text.count("<!-- code:") == text.count("<!-- /code"), name(page)
        assert len(include.NUMBERS.findall(text)) == text.count("<!-- numbers:") == text.count("<!-- /numbers")
    assert {found[1] for found in include.NUMBERS.findall(ENGLISH)} == set(numbers.TABLES)


# --- numbers -------------------------------------------------------------------------------------------------------


def test_the_model_behind_the_tables_is_what_is_counted() -> None:
    """At the tables' first N; `test_io_model` has other sizes and masks."""
    N, d, M = 1024, numbers.D, numbers.M
    scale, square, keys, queries = d**-0.5, tiling.matmul_blocks(M, d), tiling.paper_blocks(M, d), (200, 64)
    q, k, v, do = torch.randn(4, 1, 1, N, d).half()
    counted = {}
    for label, fused in (("standard", False), ("standard, fused", True)):
        attention = Standard(scale, square, fused=fused)
        with hbm.counting() as forward:
            _, *kept = attention.forward(q, k, v)
        with hbm.counting() as backward:
            attention.backward(do, q, k, v, *kept)
        counted[label] = forward, backward
    first = FlashAttention1(scale, keys)
    with hbm.counting() as forward:
        o, *kept = first.forward(q, k, v)
    with hbm.counting() as backward:
        first.backward(do, q, k, v, o, *kept)
    counted["FlashAttention-1"] = forward, backward
    with hbm.counting() as forward:
        o, lse = flash_attention_2(q, k, v, Scores(scale=scale), queries)
    with hbm.counting() as backward:
        flash_attention_2_backward(q, k, v, o, lse, do, Scores(scale=scale), keys)
    counted["FlashAttention-2"] = forward, backward
    for table, directions in ((numbers.forward_bytes(), 1), (numbers.both_bytes(), 2)):
        found = [f"{sum(part.bytes for part in parts[:directions]) / 1e6:.1f}" for parts in counted.values()]
        assert table[0] == ["1024", *found]
    memory = {label: f"{sum(part.allocated for part in parts) / 1e6:.1f}" for label, parts in counted.items()}
    del memory["standard, fused"]
    assert numbers.memory()[0] == ["1024", *memory.values()]


def said(english: str, chinese: str) -> list[int | float]:
    """The numbers of a sentence, the same in both languages: patterns with a group for each; a space is any space."""
    found = []
    for text, pattern in ((ENGLISH, english), (CHINESE, chinese)):
        match = re.search(pattern.replace(" ", r"\s+"), text)
        assert match, pattern
        found.append([float(number) for number in match.groups()])
    assert found[0] == found[1]
    return found[0]


def passes(cost: io_model.Cost, N: int) -> int:
    """How often a matrix of N x N 16-bit numbers is read or written."""
    moved = [size for step in cost.steps for part in (step.loaded, step.stored) for size in part.values()]
    return sum(size == 2 * N * N for size in moved)


def test_sizes_in_the_text() -> None:
    B_r, B_c = tiling.paper_blocks(numbers.M, numbers.D)
    assert said(r"that is (\d+) times as many", r"后者是前者的 (\d+) 倍") == [4096 / numbers.D]
    assert said(r"tiles have (\d+) queries and (\d+) keys", r"块有 (\d+) 个查询和 (\d+) 个键") == [B_r, B_c]
    english, chinese = r"There are (\d+) outer turns of (\d+) rows", r"外层循环走 (\d+) 轮，每轮 (\d+) 行"
    assert said(english, chinese) == [-(-1024 // B_c), B_c]
    assert said(r"numbers \$M = (\d+)\$", r"16 位数， \$M = (\d+)\$") == [numbers.M]
    assert said(r"has \$d\^2 = (\d+)\$", r"时 \$d\^2 = (\d+)\$") == [numbers.D**2]
    assert numbers.M > 10 * numbers.D**2  # "ten times that and more"


def test_passes_over_the_scores_in_the_text() -> None:
    N, square = 4096, tiling.matmul_blocks(numbers.M, numbers.D)
    plain, masked = (
        [
            passes(make(numbers.sizes(N), square, masked=options, dropout=options), N)
            for make in (io_model.standard, io_model.standard_backward)
        ]
        for options in (False, True)
    )
    english = r"(\d+) times \((\d+) and (\d+)\), with a mask and dropout (\d+) times"
    chinese = r"(\d+) 次（(\d+) 次和 (\d+) 次），加上掩码和 dropout 则是 (\d+) 次"
    assert said(english, chinese) == [sum(plain), *plain, sum(masked)]


def test_what_travels_in_the_text() -> None:
    """How many matrices of N d an outer turn moves: what is moved of these arrays, without their first filling."""
    N, whole = 6400, 2 * 6400 * numbers.D
    size, keys = numbers.sizes(N), tiling.paper_blocks(numbers.M, numbers.D)
    turns = 4 * N * numbers.D / numbers.M
    assert turns == N / keys[1]

    def travel(cost: io_model.Cost, names: str, filled: int) -> float:
        moved = [part.get(x, 0) for part in (cost.loaded, cost.stored) for x in names.split()]
        return (sum(moved) - filled * whole) / (turns * whole)

    forward = travel(io_model.flash_attention_1(size, keys), "Q O", 1)
    backward = travel(io_model.flash_attention_1_backward(size, keys), "Q O dO dQ", 1)
    second = travel(io_model.flash_attention_2(size, keys[::-1]), "K V", 0)
    assert said(r"(\d) in the forward, (\d) in the backward", r"前向 (\d) 个，反向 (\d) 个") == [forward, backward]
    assert said(r"has (\d) that travel", r"前向有 (\d) 个在走动") == [second]
    for n in (forward + backward, second, forward):
        assert all(f"${4 * n:.0f} N^2 d^2 / M$" in text for text in (ENGLISH, CHINESE))


def test_ratios_in_the_text() -> None:
    long = io_model.compare(numbers.sizes(2**15), numbers.M)
    total, travel = said(r"at least \$(\d+) / (\d+) \\times M / d\^2\$", r"至少是 \$(\d+) / (\d+) \\times M / d\^2\$")
    assert long["standard"].bytes / long["FlashAttention-1"].bytes >= total / travel * numbers.M / numbers.D**2
    ours, theirs = said(
        r"does (\d) products where standard attention does (\d)", r"做 (\d) 个乘积，标准注意力做 (\d) 个"
    )
    assert long["FlashAttention-1"].flops * theirs == long["standard"].flops * ours
    gpt2 = io_model.compare(numbers.sizes(1024, batch=64, heads=16), numbers.M, masked=True, dropout=True)
    english, chinese = r"has ([\d.]+) GB and ([\d.]+) GB there", r"得到 ([\d.]+) GB 和 ([\d.]+) GB"
    assert said(english, chinese) == [round(gpt2[x].bytes / 1e9, 1) for x in ("standard", "FlashAttention-1")]


def constant(file: str, name: str) -> float:
    """Of a kernel, whose module is not imported here."""
    match = re.search(rf"^{name} = gl.constexpr\(([\d.]+)\)", (ROOT / file).read_text(), re.MULTILINE)
    assert match
    return float(match[1])


def test_hopper_in_the_text() -> None:
    kernels = "tilewise/kernels/hopper"
    piece, keys = constant(f"{kernels}/walk.py", "PIECE"), constant(f"{kernels}/backward_tiles.py", "KEYS")
    growth = constant(f"{kernels}/steps.py", "GROWTH")
    assert said(r"each has (\d+) rows of the tile", r"每个负责查询块中的 (\d+) 行") == [piece]
    english = r"A program has (\d+) keys, which stay, and each of two consumers owns (\d+) of"
    chinese = r"有 (\d+) 个键，它们留在片上，两个消费者各负责 (\d+) 个"
    assert said(english, chinese) == [keys, piece]
    assert said(r"grown by no more than (\d) bits", r"增长不超过 (\d) 比特") == [growth]
    # Of the papers' peaks: how many flops of products one other operation is worth.
    peak, other, worth = said(
        r"reach ([\d.]+) TFLOP/s, and all other fp32 arithmetic ([\d.]+), .*? as (\d+) of",
        r"可达 ([\d.]+) TFLOP/s，其余的 fp32 算术只有 ([\d.]+)，所以后者的一个 flop 相当于前者的 (\d+) 个",
    )
    assert round(peak / other) == worth
    peak, exponentials, d, flops = said(
        r"(\d+) TFLOP/s of 16-bit products and ([\d.]+) of exponentials; at \$d = (\d+)\$ a score takes (\d+) flops",
        r"有 (\d+) TFLOP/s，指数运算只有 ([\d.]+)； \$d = (\d+)\$ 时每个分数需要矩阵乘的 (\d+) 个",
    )
    assert flops == 4 * d
    assert 0.4 < peak / exponentials / flops < 0.6  # "half as long"


# --- two languages -------------------------------------------------------------------------------------------------


def test_the_translation_has_the_same_structure() -> None:
    """Headings, code, formulas, numbers of the tables, links; every inline formula, however often."""
    shapes = []
    for text in (ENGLISH, CHINESE):
        plain = prose(text)
        cells = [cell.strip() for line in re.findall(r"^\|(.*)\|$", plain, re.MULTILINE) for cell in line.split("|")]
        shapes.append(
            {
                "headings": [len(marks) for marks in re.findall(r"^(#+) ", plain, re.MULTILINE)],
                "blocks": FENCED.findall(text),
                "markers": re.findall(r"<!-- .*? -->", text),
                "cells": [cell for cell in cells if re.fullmatch(r"[\d.]+( %)?|[A-Z]\d+|[QKVOlmLΣ]", cell)],
                "links": set(re.findall(r"\]\((?!algorithm)(.*?)\)", plain)),
                "formulas": set(re.findall(r"\$(.+?)\$", plain.replace("\n", " "))),
                "names": set(re.findall(r"`([^`]+)`", plain)),
                "items": len(re.findall(r"^- ", plain, re.MULTILINE)),
                "measured": Counter(re.findall(r"\d+\.\d+", plain)),
            }
        )
    for part, of_english in shapes[0].items():
        assert of_english == shapes[1][part], part


@pytest.mark.parametrize("page", PAGES, ids=name)
def test_inline_formulas_are_ones_to_github(page: Path) -> None:
    """An opening dollar after a space or bracket, a closing one before no letter, and nothing that Markdown eats."""
    for line in re.sub(r"`[^`]*`", "", prose(page.read_text())).splitlines():
        for before, formula, after in re.findall(r"(^|.)\$([^$]+)\$(.|$)", line):
            assert before in ("", " ", "("), line
            assert after in ("", " ", ".", ",", ";", ":", ")", "'"), line
            assert not re.search(r"^\s|\s$|\\[^A-Za-z]|[*<|]", formula), line


# --- what pages name -----------------------------------------------------------------------------------------------


def test_names_of_code_exist() -> None:
    """Each word of code in the text of docs/algorithm.md is one of the package's."""
    source = "\n".join(path.read_text() for path in (ROOT / "tilewise").rglob("*.py"))
    for quoted in set(re.findall(r"`([^`]+)`", prose(ENGLISH))):
        if quoted.startswith("tilewise/") or quoted.endswith(".py"):
            assert list((ROOT / "tilewise").rglob(Path(quoted).name)), quoted
            continue
        for word in re.findall(r"[A-Za-z_]\w*", quoted):
            assert re.search(rf"\b{word}\b", source), quoted


@pytest.mark.parametrize("page", [*PAGES, *sorted(ROOT.glob("*.md"))], ids=name)
def test_links_lead_somewhere(page: Path) -> None:
    text = prose(page.read_text())
    for link, lines in re.findall(r"\]\((?!https?:|#)([^)#]+)(#[^)]*)?\)", text):
        there = page.parent / link
        assert there.exists(), link
        if lines.startswith("#L"):
            first, last = map(int, re.findall(r"\d+", lines))
            assert 1 <= first <= last <= len(there.read_text().splitlines()), link + lines


def test_the_example_runs(capsys: pytest.CaptureFixture[str]) -> None:
    (example,) = [code for _, code in FENCED.findall(ENGLISH) if code.startswith("import torch")]
    exec(compile(example, "docs/algorithm.md", "exec"), {})
    assert re.fullmatch(r"Standard +[\d.]+ MB, +\d+ KiB on chip\nFlash\w+1 +[\d.]+ MB, .*\n", capsys.readouterr().out)


# --- the site ------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Built without a warning."""
    pytest.importorskip("material")
    pytest.importorskip("latex2mathml")
    folder = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", str(folder)]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, check=False)
    assert done.returncode == 0, done.stderr
    return folder


def test_the_sites_links_lead_somewhere(site: Path) -> None:
    pages = {path: path.read_text() for path in site.rglob("*.html")}
    ids = {path: set(re.findall(r'\bid="?([^"\s>]+)', text)) for path, text in pages.items()}
    of_lines = 0
    for path, text in pages.items():
        if path.name == "404.html":  # its links are absolute
            continue
        for link in re.findall(r'<a [^>]*?href="?([^"\s>]+)', text):
            file, _, anchor = html.unescape(link).partition("#")
            if file.startswith(("http:", "https:", "mailto:")):
                continue
            there = (path.parent / file).resolve() if file else path
            assert there.is_dir() or there.is_file(), f"{path.name}: {link}"
            if anchor and there in ids:
                assert anchor in ids[there], f"{path.name}: {link}"
                of_lines += "codelineno" in anchor and there != path
    assert of_lines >= ENGLISH.count("<!-- code:") * 2


def test_the_site_needs_no_network(site: Path) -> None:
    links = r'<link[^>]*? rel="?(?:stylesheet|preconnect|preload)[^>]*?href="?([^"\s>]+)'
    for path in site.rglob("*.html"):
        text = path.read_text()
        fetched = re.findall(r'<(?:script|img|iframe)[^>]*? src="?([^"\s>]+)', text) + re.findall(links, text)
        assert not [source for source in fetched if re.match(r"(https?:)?//", source)], path.name


def test_formulas_are_made_while_the_site_is_built(site: Path) -> None:
    for file, text in (("algorithm.html", ENGLISH), ("algorithm.zh.html", CHINESE)):
        built = (site / file).read_text()
        formulas = text.count("```math") + len(re.findall(r"\$[^$]+\$", re.sub(r"`[^`]*`", "", prose(text))))
        assert built.count("<math") == formulas
        assert "arithmatex" not in built
        assert "<merror" not in built
