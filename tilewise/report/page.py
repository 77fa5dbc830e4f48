"""`tilewise explain --html`: one file that plays films of the algorithms, with nothing to fetch from anywhere.

Python runs `algorithm/` and films it (`recording`); the page's JavaScript only shows what is on the film. HTML, style
and script are in assets/, and are put together here with the data.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from importlib import resources
from pathlib import Path
from typing import Any

from .. import __version__
from .captions import KERNELS, caption, subscripted
from .recording import Film, chosen_rows, record
from .scenarios import ALGORITHMS, DIRECTIONS, MASKS, SCENARIOS, Scenario

START = Scenario("full", 512, 32, 32)  # what the page shows first


def write(
    out: Path, scenarios: Iterable[Scenario] = SCENARIOS, progress: Callable[[Scenario], None] | None = None
) -> int:
    """Film all `scenarios`, write the page, and return its size in bytes. progress: is told what is filmed next.

    RuntimeError (from `record`) if the bytes of a film are not those of the closed form; nothing is written then.
    """
    text = html(data(scenarios, progress))
    out.write_text(text, encoding="utf-8")
    return len(text.encode())


def data(scenarios: Iterable[Scenario], progress: Callable[[Scenario], None] | None = None) -> dict[str, Any]:
    """All films, as the page's script reads them. What many films share (steps, captions) is there once, numbered."""
    scenarios = list(scenarios)
    streams, captions = _Pool(), _Pool()
    films: dict[str, Any] = {}
    for scenario in scenarios:
        if progress is not None:
            progress(scenario)
        for algorithm in ALGORITHMS:
            for direction in DIRECTIONS:
                film = record(scenario, algorithm, direction)
                films[f"{scenario.key}/{algorithm}/{direction}"] = {
                    "blocks": scenario.blocks(algorithm, direction),
                    **_packed(film, algorithm, direction, streams, captions),
                }
    return {
        "version": __version__,
        "start": _named(START if START in scenarios else scenarios[0]),
        "algorithms": ALGORITHMS,
        "directions": DIRECTIONS,
        "masks": [mask for mask in MASKS if any(scenario.mask == mask for scenario in scenarios)],
        "kernels": KERNELS,
        "scenarios": [_named(scenario) for scenario in scenarios],
        "visible": {f"{s.mask}/{s.N}": s.visible for s in scenarios},
        "rows": {s.N: chosen_rows(s.N) for s in scenarios},
        "streams": streams.items,
        "captions": captions.items,
        "films": films,
    }


def _named(scenario: Scenario) -> dict[str, Any]:
    return {"mask": scenario.mask, "N": scenario.N, "d": scenario.d, "kib": scenario.kib}


def html(data: dict[str, Any]) -> str:
    """The page: the template with its style, script and data inside."""
    folder = resources.files(__package__) / "assets"
    page, style, script = ((folder / name).read_text(encoding="utf-8") for name in ("page.html", "page.css", "page.js"))
    text = json.dumps(data, separators=(",", ":"), ensure_ascii=False).replace("</", "<\\/")
    for place, what in (("/*STYLE*/", style), ("/*SCRIPT*/", script), ("/*DATA*/", text)):
        assert page.count(place) == 1, place
        page = page.replace(place, what)
    return page


class _Pool:
    """Things, each once, and their numbers."""

    def __init__(self) -> None:
        self.items: list[Any] = []
        self._numbers: dict[str, int] = {}

    def number(self, item: Any) -> int:
        key = json.dumps(item)
        if key not in self._numbers:
            self._numbers[key] = len(self.items)
            self.items.append(item)
        return self._numbers[key]


def _packed(film: Film, algorithm: str, direction: str, streams: _Pool, captions: _Pool) -> dict[str, Any]:
    """A film as lists: steps and places flat, kinds as [op, names, kernel, loaded, stored, caption]."""
    stream = {"steps": [n for step in film.steps for n in step], "places": [n for place in film.places for n in place]}
    kinds = [
        [
            kind.op,
            kind.names,
            kind.kernel,
            kind.loaded,
            kind.stored,
            captions.number(caption(algorithm, direction, kind)),
        ]
        for kind in film.kinds
    ]
    return {
        "stream": streams.number(stream),
        "kinds": kinds,
        "chips": [[[subscripted(name), size] for name, size in chip] for chip in film.chips],
        "rows": {row: [[s.step, s.m, s.l, s.factor, s.values] for s in states] for row, states in film.rows.items()},
        "model": film.model,
        "peak": film.traffic.peak_on_chip,
    }
