"""A block of `hopper.backward_split`'s kernels played on the CPU, by the scheduler of `hopper_machine`.

A tile is the cells of shared memory that its parts lie in, a value is the set of parts that it was made from. What a
matmul reads must still be there when it is waited for.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from types import FunctionType, SimpleNamespace
from typing import Any

from hopper_machine import Anything, Barrier, Buffers, Scheduler, _Descriptor, _Language

from tilewise import mask
from tilewise.kernels.hopper import backward_split as kernels
from tilewise.kernels.hopper import config, pipeline, steps

JITTED = ("key_range", "mask_free_range", "query_range", "mask_free_queries", "tile_of")
OWN = {
    "key_tile", "query_blocks", "query_tile", "key_blocks", "held", "add_block", "scaled", "wait_for", "load_chunks",
    "beside",
}  # fmt: skip


class Cell:
    """A buffer of a part: columns of a tile from `first` on, that come by chunks."""

    content: Any = None

    def __init__(self, first: int = 0, columns: int = 1, chunk: int = 1) -> None:
        self.first, self.columns, self.chunk = first, columns, chunk

    def load(self, _: Any) -> Value:
        return self.content if isinstance(self.content, Value) else Value({self.content})

    def store(self, value: Any) -> None:
        self.content = value


class Value:
    """A tensor of registers: what it was made from, and what a matmul in flight still reads."""

    type = Anything()

    def __init__(self, made_of: Any = (), reads: tuple[tuple[Cell, Any], ...] = (), masked: bool = False) -> None:
        self.made_of, self.reads, self.masked = frozenset(made_of), reads, masked

    def to(self, _: Any) -> Value:
        return self

    def __getitem__(self, _: Any) -> Value:
        return self

    def _with(self, other: Any) -> Value:
        assert not self.reads, "a matmul's result was used before it was there"
        if not isinstance(other, Value):
            return self
        return Value(self.made_of | other.made_of, masked=self.masked or other.masked)

    __mul__ = __sub__ = __add__ = _with


class Block:
    """One program of a kernel. Its log: (consumer, what a product was made from, masked); and its stores."""

    def __init__(self, numbers: dict[str, int], options: Any, program: int, seed: int) -> None:
        self.options, self.program = options, program
        self.scheduler = Scheduler(seed)
        self.call = SimpleNamespace(**numbers)
        self.log: list[tuple[str, frozenset[Any], bool]] = []
        self.stores: list[tuple[str, tuple[int, ...]]] = []

    def run_dkdv(self) -> None:
        options = self.options
        rings = self._rings({
            "k": (1, 1, options.WIDTH), "v": (1, 1, options.V_WIDTH), "q": (options.STAGES, 2, options.WIDTH),
            "do": (options.V_STAGES, 2, options.V_WIDTH), "statistics": (2 * options.STAGES, 1, 1), "p": (2, 1, 1),
        })  # fmt: skip
        names = self._descriptors("k", "v", "q", "do", "statistics")
        self._run(
            rings, producer=lambda: self.rewired(kernels.queries_producer)(*names, rings, self.call, options),
            probabilities=lambda: self.rewired(kernels.probabilities)("dv", rings, self.call, options),
            gradients=lambda: self.rewired(kernels.gradients)("dk", rings, self.call, options),
        )  # fmt: skip

    def run_dq(self) -> None:
        options = self.options
        rings = self._rings({
            "q": (2, 1, options.WIDTH), "do": (2, 1, options.V_WIDTH), "k": (options.STAGES, 2, options.WIDTH),
            "v": (options.V_STAGES, 2, options.V_WIDTH),
        }, held=("q", "do"))  # fmt: skip
        consume = self.rewired(kernels.queries)

        def consumer(c: int) -> Callable[[], None]:
            return lambda: consume("dq", *[None] * 9, rings, self.call, c, options)

        names = self._descriptors("q", "do", "k", "v")
        produce = self.rewired(kernels.keys_producer)
        self._run(
            rings, producer=lambda: produce(*names, rings, self.call, options),
            **{f"consumer {c}": consumer(c) for c in (0, 1)},
        )  # fmt: skip

    def _descriptors(self, *names: str) -> list[str]:
        widths = {"q": self.options.WIDTH, "k": self.options.WIDTH, "statistics": 1}
        sides = (widths.get(name, self.options.V_WIDTH) for name in names)
        return [_Descriptor(name, config.chunk(side, side)) for name, side in zip(names, sides, strict=True)]

    def _run(self, rings: Any, **partitions: Callable[[], None]) -> None:
        self.scheduler.run(partitions)
        for ring in vars(rings).values():
            for full, empty in zip(ring.full, ring.empty, strict=True):
                released = full.phase if ring.held else empty.phase
                assert full.phase == released, f"{ring.name}: what was committed was not released"

    def _rings(self, sizes: dict[str, tuple[int, int, int]], held: tuple[str, ...] = ()) -> Any:
        return SimpleNamespace(**{name: self._ring(name, *size, name in held) for name, size in sizes.items()})

    def _ring(self, name: str, stages: int, readers: int, width: int, held: bool) -> Any:
        """A pipeline.Ring with its own methods, of tiles in parts. held: its items stay to the end."""
        sides, chunk = steps.parts(width), config.chunk(width, width)
        buffers, *others = (
            Buffers([Cell(sum(sides[:n]), side, chunk) for _ in range(stages)]) for n, side in enumerate(sides)
        )
        ring = SimpleNamespace(
            name=name, held=held, STAGES=stages, BYTES=width, buffers=buffers, others=tuple(others),
            full=Buffers([Barrier(1) for _ in range(stages)]), empty=Buffers([Barrier(readers) for _ in range(stages)]),
        )  # fmt: skip
        methods = "acquire", "commit", "expect", "load", "load_parts", "parts", "place", "wait", "release", "skip"
        for method in methods:
            setattr(ring, method, self.rewired(getattr(pipeline.Ring, method)).__get__(ring))
        return ring

    # ---- what stands for the device

    def rewired(self, function: Any) -> Callable[..., Any]:
        """The Python of a jitted function, with these names in place of its module's."""
        plain = function.fn
        gl = _Language(self.program)
        gl.exp2 = lambda x: x  # type: ignore[attr-defined]
        names = {**plain.__globals__, **{name: getattr(mask, name) for name in JITTED}}
        names |= {
            "gl": gl, "mbarrier": self, "tma_load": self.tma_load, "PIECE": 64, "LN2": 1.0,
            "matrix": lambda cell: cell, "chunks_of": self.chunks_of, "accumulator": lambda _: None,
            "zeros": lambda width: (Value(),) * len(steps.parts(width)), "product": self.product,
            "add_product": self.add_product, "warpgroup_mma_wait": self.finish, "cap": lambda S, *_: (S, 1.0),
            "factor": lambda *_: 1.0, "mask": self.mask, "mask_turned": self.mask,
            "of_queries": lambda cell, _: cell.load(None), "row_statistics": self.row_statistics, "store": self.store,
            "wait_for_stores": lambda: None,
        }  # fmt: skip
        for name in OWN & set(plain.__code__.co_names):
            names[name] = self.rewired(getattr(kernels if hasattr(kernels, name) else pipeline, name))
        return FunctionType(plain.__code__, names, plain.__name__)

    def chunks_of(self, parts: list[Cell], _: Any) -> list[tuple[Cell, int]]:
        return [(cell, cell.first + n) for cell in parts for n in range(0, cell.columns, cell.chunk)]

    def wait(self, barrier: Barrier, parity: int) -> None:
        self.scheduler.until(lambda: barrier.phase % 2 != parity)

    def arrive(self, barrier: Barrier, count: int = 1) -> None:
        self.scheduler.until()
        barrier.arrive()

    def expect(self, barrier: Barrier, size: int) -> None:
        barrier.expected = size

    def tma_load(self, descriptor: str, at: list[int], barrier: Barrier, place: Any) -> None:
        """place: a cell, or of one a chunk and its column."""
        self.scheduler.until()
        cell, column = place if isinstance(place, tuple) else (place, None)
        assert column is None or at[-1] == column
        cell.content = (descriptor, *at) if column is None else (descriptor, *at[:-1], cell.first)
        barrier.expected -= cell.chunk
        if barrier.expected == 0:
            barrier.arrive()

    def product(self, a: list[Cell], b: list[Cell]) -> Value:
        return Value([cell.content for cell in (*a, *b)], tuple((cell, cell.content) for cell in (*a, *b)))

    def add_product(self, x: Value, b: list[Cell], sums: tuple[Value, ...]) -> tuple[Value, ...]:
        assert not x.reads
        assert len(sums) == len(b)
        made_of = x.made_of | {cell.content for cell in b}
        self.log.append((threading.current_thread().name, made_of, x.masked))
        self.finish(0, [Value((), tuple((cell, cell.content) for cell in b))])
        return sums

    def finish(self, _: int, values: list[Value]) -> Any:
        self.scheduler.until()
        for value in values:
            assert all(cell.content == content for cell, content in value.reads), "what a matmul reads was replaced"
            value.reads = ()
        return values[0] if len(values) == 1 else values

    def mask(self, S: Value, *_: Any) -> Value:
        return Value(S.made_of, masked=True)

    def row_statistics(self, do: list[Cell], *rest: Any) -> tuple[Value, Value]:
        *_, b, h, first, _call, _options = rest
        assert [cell.content for cell in do] == [("do", b, h, first, cell.first) for cell in do]
        return Value({("lse", b, h, first)}), Value({("delta", b, h, first)})

    def store(self, sums: tuple[Value, ...], cells: list[Cell], descriptor: str, at: list[int]) -> None:
        assert len(sums) == len(cells)
        for cell in cells:
            cell.content = descriptor
        self.stores.append((descriptor, tuple(at[:3])))
