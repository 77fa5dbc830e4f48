"""A film of a run: the real code of `algorithm/`, with an observer on its loads and stores.

A recording is a list of steps. Events of one kind that touch the same rows one after the other make one step ("load
K_j, V_j"). What a step says of its kind (names, bytes) and of its place (rows, keys) is kept once and numbered, so
that a film of thousands of steps takes a few kilobytes.

>>> from .scenarios import Scenario
>>> film = record(Scenario("full", 256, 16, 32), "flash2", "forward")
>>> kind, place, _ = film.steps[0]
>>> film.kinds[kind].op, film.kinds[kind].names, film.kinds[kind].loaded, film.places[place]
('load', ('Q',), (6144,), (0, 192, -1, -1))
>>> film.bytes == film.traffic.bytes == film.model
True
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from ..algorithm import hbm
from ..algorithm.backward import flash_attention_2_backward
from ..algorithm.flash1 import FlashAttention1
from ..algorithm.forward import flash_attention_2
from ..algorithm.hbm import Event, Traffic
from ..algorithm.online_softmax import LN2
from ..algorithm.scores import Scores
from ..algorithm.standard import Standard
from .measure import one_thread
from .scenarios import Scenario

MATRICES = ("S", "P", "dP", "dS")  # N x N
OF_KEYS = ("K", "V", "dK", "dV")  # all else that is not a matrix has a row for each query
NOWHERE = -1  # a side of a place that a step is not about
COMPONENTS = 4  # of a row of O or dQ that are filmed

Place = tuple[int, int, int, int]  # first and past-the-end query, then key
Held = tuple[tuple[str, int], ...]  # names and bytes on the chip


@dataclass(frozen=True, slots=True)
class Kind:
    """What steps have in common. op: load, store, accumulate (to HBM), compute (on the chip) or fill (HBM).

    names: the arrays' or tiles'; loaded, stored: bytes of each of them.
    """

    op: str
    names: tuple[str, ...]
    kernel: str
    loaded: tuple[int, ...]
    stored: tuple[int, ...]

    @property
    def bytes(self) -> int:
        return sum(self.loaded) + sum(self.stored)


@dataclass(frozen=True, slots=True)
class RowState:
    """A chosen row after a step: m and l so far (natural logarithms' m), the factor by which what was summed before
    shrank, and the first components of O, or of dQ in a backward (where the rest is None). m is None for -inf."""

    step: int
    values: tuple[float, ...]
    m: float | None = None
    l: float | None = None  # noqa: E741  the paper's name
    factor: float | None = None


@dataclass(slots=True)
class Film:
    """steps: (index of a kind, of a place, of what the chip holds then). rows: states of the chosen rows, in order.

    model: the bytes that `io_model` has for the run in closed form. results: what the algorithm returned.
    """

    kinds: list[Kind] = field(default_factory=list)
    places: list[Place] = field(default_factory=list)
    chips: list[Held] = field(default_factory=list)
    steps: list[tuple[int, int, int]] = field(default_factory=list)
    rows: dict[int, list[RowState]] = field(default_factory=dict)
    traffic: Traffic = field(default_factory=Traffic)
    model: int = 0
    results: tuple[Tensor, ...] = ()

    @property
    def bytes(self) -> int:
        """Summed over the steps."""
        return sum(self.kinds[kind].bytes for kind, _, _ in self.steps)


def chosen_rows(N: int) -> tuple[int, ...]:
    """Queries whose state is filmed: near the beginning, in between, and near the end."""
    return tuple(N * eighths // 8 - 1 for eighths in (1, 3, 6, 8))


def record(scenario: Scenario, algorithm: str, direction: str) -> Film:
    """Run `algorithm` on random inputs (the same for all algorithms) and film it.

    The backward is filmed alone: the forward that it needs runs before. RuntimeError if the film's bytes, the
    counter's and the model's are not one number, array by array.
    """
    run = _Run(scenario, algorithm, direction)
    camera = _Camera(run)
    with one_thread():
        prepared = run.prepare()
        with hbm.counting(camera.see) as traffic:
            results = run(prepared)
    film = camera.develop()
    film.traffic, film.results = traffic, results
    cost = scenario.cost(algorithm, direction)
    film.model = cost.bytes
    filmed = _by_array(film)
    for counted, modelled, seen in (
        (traffic.loaded, cost.loaded, filmed[0]),
        (traffic.stored, cost.stored, filmed[1]),
        ({"": traffic.bytes}, {"": cost.bytes}, {"": film.bytes}),
    ):
        if not counted == modelled == seen:
            raise RuntimeError(f"{scenario.key} {algorithm} {direction}: {counted}, {modelled} and {seen} differ")
    return film


def _by_array(film: Film) -> tuple[dict[str, int], dict[str, int]]:
    loaded: dict[str, int] = {}
    stored: dict[str, int] = {}
    for index, _, _ in film.steps:
        kind = film.kinds[index]
        for total, part in ((loaded, kind.loaded), (stored, kind.stored)):
            for name, size in zip(kind.names, part, strict=True):
                if size:
                    total[name] = total.get(name, 0) + size
    return loaded, stored


@dataclass(frozen=True, slots=True)
class _Run:
    """One algorithm on one scenario's inputs."""

    scenario: Scenario
    algorithm: str
    direction: str

    @property
    def inputs(self) -> tuple[Tensor, ...]:
        """q, k, v, do: (1, 1, N, d), fp16."""
        shape = (1, 1, self.scenario.N, self.scenario.d)
        make = torch.Generator().manual_seed(self.scenario.N + self.scenario.d)
        return tuple(torch.randn(shape, generator=make).half() for _ in range(4))

    def prepare(self) -> tuple[Tensor, ...]:
        """What the filmed run takes beside the inputs: nothing, or the forward's results."""
        return replace(self, direction="forward")(()) if self.direction == "backward" else ()

    def __call__(self, prepared: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        q, k, v, do = self.inputs
        scenario, scale = self.scenario, self.scenario.d**-0.5
        blocks = scenario.blocks(self.algorithm, self.direction)
        forward = self.direction == "forward"
        if self.algorithm == "standard":  # it knows no BlockMask: there it computes all pairs
            standard = Standard(scale, blocks, scenario.band)
            return standard.forward(q, k, v) if forward else standard.backward(do, q, k, v, *prepared[1:])
        if self.algorithm == "flash1":
            flash1 = FlashAttention1(scale, blocks, scenario.band, scenario.block_mask)
            return flash1.forward(q, k, v) if forward else flash1.backward(do, q, k, v, *prepared)
        rules = Scores(scale=scale, band=scenario.band, blocks=scenario.block_mask)
        if forward:
            return flash_attention_2(q, k, v, rules, blocks)
        o, lse = prepared
        return flash_attention_2_backward(q, k, v, o, lse, do, rules, blocks)

    def outer_is_keys(self, kernel: str) -> bool:
        """Which side the outer loop walks, in the kernel of that name."""
        if self.algorithm == "standard":
            return kernel in ("dV", "dK")
        return kernel != "delta" and (self.algorithm, self.direction) != ("flash2", "forward")


class _Camera:
    """The observer: joins events to steps, and knows at each of them where the loops are and what the chip holds."""

    def __init__(self, run: _Run) -> None:
        self.run, self.film = run, Film()
        self.chosen = chosen_rows(run.scenario.N)
        self.film.rows = {row: [] for row in self.chosen}
        self.kernel = ""
        self.queries: tuple[int, int] = (NOWHERE, NOWHERE)  # where the loops are
        self.keys: tuple[int, int] = (NOWHERE, NOWHERE)
        self.held: dict[str, int] = {}
        self.waiting: list[tuple[Event, Place]] = []
        self.numbers: dict[object, int] = {}

    def see(self, event: Event) -> None:
        if event.kind == "kernel":
            self._cut()
            self.kernel, self.held = event.name, {}
            self.queries = self.keys = (NOWHERE, NOWHERE)
            return
        place = self._place(event)
        if self.waiting and not self._continues(event, place):
            self._cut()
        self.waiting.append((event, place))
        if event.held:
            self.held[event.name] = event.held
        self._look_at_rows(event)

    def develop(self) -> Film:
        self._cut()
        return self.film

    def _continues(self, event: Event, place: Place) -> bool:
        """Whether the event belongs to the step of the one before it."""
        last, there = self.waiting[-1]
        if event.kind == "keep" and not {event.name, last.name} <= set(OF_KEYS):  # one product, one step
            return False
        same = event.kind == last.kind and place == there and event.kind != "accumulate"
        return same and event.name not in [seen.name for seen, _ in self.waiting]

    def _place(self, event: Event) -> Place:
        """The event's queries and keys. What the outer loop touches leaves the inner loop's place unknown."""
        if event.kind == "fill":
            return (NOWHERE,) * 4
        if event.x is not None and event.rows is not None:
            span = _span(event.rows)
            if event.name in MATRICES:
                self.queries, self.keys = span, _columns(event.x)
            elif event.name in OF_KEYS:
                self.keys = span
                if self.run.outer_is_keys(self.kernel):
                    self.queries = (NOWHERE, NOWHERE)
            else:
                self.queries = span
                if not self.run.outer_is_keys(self.kernel):
                    self.keys = (NOWHERE, NOWHERE)
        return (*self.queries, *self.keys)

    def _cut(self) -> None:
        """What waits becomes a step."""
        if not self.waiting:
            return
        events, place = [event for event, _ in self.waiting], self.waiting[0][1]
        kind = Kind(
            "compute" if events[0].kind in ("keep", "show") else events[0].kind,
            tuple(event.name for event in events),
            self.kernel,
            tuple(event.loaded for event in events),
            tuple(event.stored for event in events),
        )
        film, chip = self.film, tuple(self.held.items())
        film.steps.append(
            (self._number(kind, film.kinds), self._number(place, film.places), self._number(chip, film.chips))
        )
        self.waiting = []
        if kind.op in ("store", "accumulate"):  # written back: its memory is free
            for name in kind.names:
                self.held.pop(name, None)

    def _number(self, what: object, among: list) -> int:
        """The place of `what` in a list that has each once."""
        if (what, id(among)) not in self.numbers:
            self.numbers[what, id(among)] = len(among)
            among.append(what)
        return self.numbers[what, id(among)]

    def _look_at_rows(self, event: Event) -> None:
        """Note m, l and O (or dQ) of the chosen rows, once the step that changes them has told the last of them."""
        if event.tile is None or self.run.algorithm == "standard":
            return
        start, stop = self.queries
        watched = "O" if self.run.direction == "forward" else "dQ"
        final = event.kind == "store" and self.run.algorithm == "flash2"  # O, divided by l
        told = {seen.name: seen.tile for seen, _ in self.waiting if seen.kind == event.kind}
        complete = final or watched == "dQ" or {"O", "l", "m"} <= set(told)
        source = event.x if event.kind == "accumulate" else told.get(watched)
        if not complete or source is None or event.kind == "keep" or event.name == "L":
            return
        for row in self.chosen:
            if start <= row < stop:
                at = row if event.kind == "accumulate" else row - start
                values = tuple(_rounded(x) for x in source[0, 0, at, :COMPONENTS].tolist())
                m, l = (None, None) if final or watched == "dQ" else (_number_of(told[x], at) for x in "ml")  # noqa: E741
                self._note(row, values, m, l)

    def _note(self, row: int, values: tuple[float, ...], m: float | None, l: float | None) -> None:  # noqa: E741
        states = self.film.rows[row]
        factor = None
        if m is not None:
            if self.run.algorithm == "flash2":
                m *= LN2  # its scores are in bits
            before = states[-1].m if states else None
            factor = 0.0 if before is None or m == -math.inf else _rounded(math.exp(before - m))
        m, l = (None if x is None or x == -math.inf else _rounded(x) for x in (m, l))  # noqa: E741
        states.append(RowState(len(self.film.steps), values, m, l, factor))


def _span(rows: hbm.Rows) -> tuple[int, int]:
    """First and past-the-end position of a run. A BlockMask's tiles come as tuples of runs of 128: here of one."""
    runs = rows if isinstance(rows, tuple) else (rows,)
    assert len(runs) == 1
    (run,) = runs
    assert isinstance(run, slice)
    return run.start, run.stop


def _columns(x: Tensor) -> tuple[int, int]:
    """Which keys a view A[..., j] of a contiguous (1, 1, N, N) array has."""
    start = int(x.storage_offset() % x.stride(2))
    return start, start + x.shape[3]


def _number_of(tile: Tensor | None, at: int) -> float:
    """Entry `at` of m or l, which have one number a row: (1, 1, rows) or (1, 1, rows, 1)."""
    assert tile is not None
    return float(tile.flatten()[at])


def _rounded(x: float) -> float:
    """To four significant digits: what the page shows, and no more bytes than that."""
    return float(f"{x:.4g}")
