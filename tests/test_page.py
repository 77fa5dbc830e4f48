"""The page of `tilewise explain --html`: its films are of real runs, and a browser plays them to the model's bytes."""

from __future__ import annotations

import importlib.util
import json
import re
import zipfile
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
import torch
from browser import CHROMIUM, MISSING, Browser

from tilewise.algorithm import hbm, io_model
from tilewise.algorithm.io_model import Cost, Sizes
from tilewise.mask import Band, causal, sliding_window
from tilewise.report import page
from tilewise.report.captions import caption
from tilewise.report.recording import COMPONENTS, _Run, chosen_rows, record
from tilewise.report.scenarios import ALGORITHMS, DIRECTIONS, MASKS, SCENARIOS, Scenario

ROOT = Path(__file__).parent.parent
SMALL = [
    Scenario(mask, 512 if mask == "block-sparse" else 256, 32, 256 if mask == "block-sparse" else 32) for mask in MASKS
]
RUNS = [(algorithm, direction) for algorithm in ALGORITHMS for direction in DIRECTIONS]


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A page with one scenario of each mask."""
    out = tmp_path_factory.mktemp("page") / "out.html"
    page.write(out, SMALL)
    return out


def embedded(text: str) -> dict[str, Any]:
    """The data inside a page."""
    found = re.search(r'<script type="application/json" id="data">(.*?)</script>', text, re.DOTALL)
    assert found
    return json.loads(found[1])


# --- films ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("scenario", SMALL, ids=lambda scenario: scenario.mask)
@pytest.mark.parametrize(("algorithm", "direction"), RUNS)
def test_a_film_changes_nothing(scenario: Scenario, algorithm: str, direction: str) -> None:
    """Filmed and not, a run gives the same bits and moves the same bytes; and it is attention."""
    film = record(scenario, algorithm, direction)
    run = _Run(scenario, algorithm, direction)
    prepared = run.prepare()
    with hbm.counting() as traffic:
        plain = run(prepared)
    assert len(film.results) == len(plain)
    assert all(torch.equal(filmed, expected) for filmed, expected in zip(film.results, plain, strict=True))
    assert (film.traffic.loaded, film.traffic.stored) == (traffic.loaded, traffic.stored)
    assert film.bytes == traffic.bytes == film.model
    assert film.traffic.peak_on_chip <= scenario.M
    assert all(sum(size for _, size in chip) <= film.traffic.peak_on_chip for chip in film.chips)

    q, k, v, do = (x.double().requires_grad_() for x in run.inputs)
    S = q @ k.mT * scenario.d**-0.5
    o = torch.softmax(S.masked_fill(~shown(scenario, algorithm), -torch.inf), -1) @ v
    wanted = (o,) if direction == "forward" else torch.autograd.grad(o, (q, k, v), do)
    for result, reference in zip(film.results, wanted, strict=False):
        torch.testing.assert_close(result.double(), reference, rtol=1e-2, atol=1e-2)


def shown(scenario: Scenario, algorithm: str) -> torch.Tensor:
    """The pairs that a run computes: (N, N), boolean."""
    if scenario.block_mask is None:
        return scenario.band.dense(scenario.N, scenario.N)
    return torch.ones((), dtype=torch.bool) if algorithm == "standard" else scenario.block_mask.to_dense()


@pytest.mark.parametrize("scenario", SMALL, ids=lambda scenario: scenario.mask)
@pytest.mark.parametrize("algorithm", ["flash1", "flash2"])
def test_a_row_ends_as_the_softmax_has_it(scenario: Scenario, algorithm: str) -> None:
    film = record(scenario, algorithm, "forward")
    q, k, _, _ = (x.double() for x in _Run(scenario, algorithm, "forward").inputs)
    S = (q @ k.mT * scenario.d**-0.5).masked_fill(~shown(scenario, algorithm), -torch.inf)
    for row in chosen_rows(scenario.N):
        states = film.rows[row]
        *_, last = (state for state in states if state.m is not None)
        assert last.m == pytest.approx(float(S[0, 0, row].max()), abs=2e-3)
        assert last.l == pytest.approx(float((S[0, 0, row] - S[0, 0, row].max()).exp().sum()), rel=1e-3)
        assert states[-1].values == pytest.approx(film.results[0][0, 0, row, :COMPONENTS].tolist(), abs=1e-3)
        maxima = [state.m for state in states if state.m is not None]
        assert maxima == sorted(maxima)
        assert all(0 <= state.factor <= 1 for state in states if state.factor is not None)


def test_an_untrue_model_is_noticed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    right = io_model.flash_attention_2
    monkeypatch.setattr(io_model, "flash_attention_2", lambda sizes, *rest, **options: right(
        Sizes(sizes.q_len, sizes.k_len, sizes.d, sizes.d, element=2, acc=8), *rest, **options))  # fmt: skip
    with pytest.raises(RuntimeError, match="full/256/32/64 flash2 forward"):
        page.write(tmp_path / "out.html", [Scenario("full", 256, 32, 64)])
    assert not (tmp_path / "out.html").exists()


# --- the file ------------------------------------------------------------------------------------------------------


def model(run: dict[str, Any], mask: str, N: int, d: int, algorithm: str, direction: str) -> Cost:
    """io_model asked anew, with the tiles that a film in the page says it has."""
    sizes, blocks = Sizes(N, N, d, d), tuple(run["blocks"])
    band = {"causal": causal, "window": sliding_window(N // 4 - 1)}.get(mask, Band())
    if algorithm == "standard":
        function = io_model.standard if direction == "forward" else io_model.standard_backward
        return function(sizes, blocks, masked=not band.is_full)
    name = f"flash_attention_{algorithm[-1]}" + ("" if direction == "forward" else "_backward")
    layout = Scenario(mask, N, d, 0).layout if mask == "block-sparse" else None
    live = None if layout is None else io_model.live_tiles(layout, blocks)
    return getattr(io_model, name)(sizes, blocks, band=band, live=live)


@pytest.mark.slow
def test_every_film_has_the_bytes_of_the_model(tmp_path: Path) -> None:
    """All that the page offers, added up from the file as its script adds it up; and the file stays small."""
    out = tmp_path / "out.html"
    assert page.write(out) == out.stat().st_size < 2_000_000
    data = embedded(out.read_text(encoding="utf-8"))
    assert len(data["films"]) == len(SCENARIOS) * len(RUNS)
    for scenario in SCENARIOS:
        for algorithm, direction in RUNS:
            film = data["films"][f"{scenario.key}/{algorithm}/{direction}"]
            steps = data["streams"][film["stream"]]["steps"]
            sizes = [sum(loaded) + sum(stored) for _, _, _, loaded, stored, _ in film["kinds"]]
            played = sum(sizes[kind] for kind in steps[::3])
            asked = model(film, scenario.mask, scenario.N, scenario.d, algorithm, direction).bytes
            assert played == film["model"] == asked, (scenario.key, algorithm, direction)
            assert film["peak"] <= scenario.M


class Resources(HTMLParser):
    """What a page would fetch."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.found += [value or "" for name, value in attrs if name in ("src", "href", "action", "data", "poster")]


def test_the_file_is_whole(small: Path) -> None:
    text = small.read_text(encoding="utf-8")
    fetched = Resources()
    fetched.feed(text)
    assert fetched.found == ["data:,"]  # the icon, so that no browser asks for one
    assert not re.search(r"url\(\s*['\"]?(?!#)|@import|\bfetch\(|XMLHttpRequest|import\(", text)
    links = set(re.findall(r"\b(?:https?|wss?)://[^\s\"'`<>)]+", text))
    assert links == {"http://www.w3.org/2000/svg"}  # a name, not a place
    data = embedded(text)
    assert data["masks"] == list(MASKS)
    assert [one["mask"] for one in data["scenarios"]] == list(MASKS)


def test_every_step_has_a_sentence() -> None:
    film = record(SMALL[1], "flash1", "forward")
    said = [caption("flash1", "forward", film.kinds[kind])[0] for kind, _, _ in film.steps[:5]]
    assert said[:3] == ["Fill in HBM: O, l, m", "Load K_j, V_j", "Load Q_i, O_i, l_i, m_i"]
    assert said[3].startswith("Compute S_ij = Q_i K_j")
    assert said[4] == "Store O_i, l_i, m_i"


def test_a_wheel_has_the_page(tmp_path: Path) -> None:
    assets = {f"tilewise/report/assets/page.{kind}" for kind in ("html", "css", "js")}
    assert all((ROOT / name).is_file() for name in assets)
    if importlib.util.find_spec("hatchling") is None:
        pytest.skip("hatchling, which builds the wheel, is not installed here")
    from hatchling.builders.wheel import WheelBuilder

    (wheel,) = WheelBuilder(str(ROOT)).build(directory=str(tmp_path), versions=["standard"])
    assert assets <= set(zipfile.ZipFile(wheel).namelist())


# --- in a browser --------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def browser(small: Path) -> Iterator[Browser]:
    if CHROMIUM is None:
        pytest.skip(MISSING)
    with Browser(small.as_uri()) as opened:
        yield opened
        assert opened.problems == []


@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize(("algorithm", "direction"), RUNS)
def test_it_plays_to_the_bytes_of_the_model(browser: Browser, mask: str, algorithm: str, direction: str) -> None:
    browser.run(f"select({json.dumps({'mask': mask, 'algorithm': algorithm, 'direction': direction})}); speed(9)")
    assert browser.run("at") == 0
    browser.run("$('play').click()")
    assert browser.run("$('play').getAttribute('aria-label')") == "Pause"
    browser.wait_for("at === film.count && !playing")
    assert browser.run("$('play').getAttribute('aria-label')") == "Play"
    scenario = next(one for one in SMALL if one.mask == mask)
    for other in ALGORITHMS:
        moved = scenario.cost(other, direction).bytes
        assert browser.run(f"$('count-{other}').dataset.bytes") == str(moved)
        assert f"= io_model: {moved:,} B ✓" in browser.run(f"$('count-{other}').textContent")
    assert "Standard attention moved" in browser.run("$('verdict').textContent")
    assert browser.problems == []


def test_back_undoes_a_step(browser: Browser) -> None:
    """Whichever way a step is reached, the page shows the same."""
    browser.run("select({mask: 'causal', algorithm: 'flash2', direction: 'forward'})")
    look = "document.querySelector('main').innerHTML"
    for step in (1, 17, 60):
        browser.run(f"seek({step})")
        there = browser.run(look)
        for _ in range(3):
            browser.press("ArrowRight")
        assert browser.run("at") == step + 3
        for _ in range(3):
            browser.press("ArrowLeft")
        assert browser.run(look) == there


def test_the_keys(browser: Browser) -> None:
    browser.run("document.activeElement.blur(); select({mask: 'full', algorithm: 'flash1', direction: 'forward'})")
    browser.press("End")
    assert browser.run("at === film.count")
    browser.press("Home")
    assert browser.run("at") == 0
    browser.press("ArrowRight", shift=True)
    assert browser.run("film.place(at - 1).every((n) => n >= 0)")  # at work on a tile
    browser.press(" ")
    assert browser.run("playing > 0")
    browser.press(" ")
    assert browser.run("playing") == 0
    for key, expression in (
        ("3", "choice.algorithm === 'flash2'"),
        ("b", "choice.direction === 'backward'"),
        ("m", "choice.mask === 'causal'"),
        ("t", "document.documentElement.dataset.theme === 'dark'"),
    ):
        browser.press(key)
        assert browser.run(expression), key
    assert browser.problems == []


def test_it_offers_what_was_recorded(browser: Browser) -> None:
    browser.run("select({mask: 'block-sparse'})")
    offered = "[...document.querySelectorAll('input[name=%s]')].map((one) => one.value)"
    assert [browser.run(offered % name) for name in ("N", "d", "kib")] == [["512"], ["32"], ["256"]]


@pytest.mark.parametrize("width", [320, 375, 768])
def test_nothing_sticks_out_on_a_phone(browser: Browser, width: int) -> None:
    browser.resize(width, 740)
    for algorithm, direction in RUNS:
        browser.run(f"select({json.dumps({'algorithm': algorithm, 'direction': direction})}); seek(film.count)")
        assert browser.run("document.documentElement.scrollWidth") <= width
    browser.resize(1280, 900)


def test_controls_have_names(browser: Browser) -> None:
    unnamed = (
        "[...document.querySelectorAll('button, input')].filter((one) => !(one.getAttribute('aria-label') || "
        "(one.labels && one.labels.length && one.labels[0].textContent.trim()) || one.textContent.trim())).length"
    )
    assert browser.run(unnamed) == 0
