"""A block of `hopper.backward_split`'s kernels played on the CPU, by the scheduler of `hopper_machine`.

A tile is the cell of shared memory that it lies in, a value is the set of tiles that it was made from. What a matmul
reads must still be there when it is waited for.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from types import FunctionType, SimpleNamespace
from typing import Any

from hopper_machine import Anything, Barrier, Buffers, Scheduler, _Language

from tilewise import mask
from tilewise.kernels.hopper import backward_split as kernels
from tilewise.kernels.hopper import pipeline

JITTED = ("key_range", "mask_free_range", "query_range", "mask_free_queries", "tile_of")
OWN = ("key_tile", "query_blocks", "query_tile", "key_blocks", "held", "add_block")


class Cell:
    """A buffer."""

    content: Any = None

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
        sizes = {
            "k": (1, 1),
            "v": (1, 1),
            "q": (options.STAGES, 2),
            "do": (options.V_STAGES, 2),
            "statistics": (2 * options.STAGES, 1),
        }
        rings = self._rings(sizes | {"p": (2, 1)})
        names = ("k", "v", "q", "do", "statistics")
        self._run(
            rings, producer=lambda: self.rewired(kernels.queries_producer)(*names, rings, self.call, options),
            probabilities=lambda: self.rewired(kernels.probabilities)("dv", rings, self.call, options),
            gradients=lambda: self.rewired(kernels.gradients)("dk", rings, self.call, options),
        )  # fmt: skip

    def run_dq(self) -> None:
        options = self.options
        rings = self._rings(
            {"q": (2, 1), "do": (2, 1), "k": (options.STAGES, 2), "v": (options.V_STAGES, 2)}, held=("q", "do")
        )
        consume = self.rewired(kernels.queries)

        def consumer(c: int) -> Callable[[], None]:
            return lambda: consume("dq", *[None] * 9, rings, self.call, c, options)

        names = ("q", "do", "k", "v")
        produce = self.rewired(kernels.keys_producer)
        self._run(
            rings, producer=lambda: produce(*names, rings, self.call, options),
            **{f"consumer {c}": consumer(c) for c in (0, 1)},
        )  # fmt: skip

    def _run(self, rings: Any, **partitions: Callable[[], None]) -> None:
        self.scheduler.run(partitions)
        for ring in vars(rings).values():
            for full, empty in zip(ring.full, ring.empty, strict=True):
                released = full.phase if ring.held else empty.phase
                assert full.phase == released, f"{ring.name}: what was committed was not released"

    def _rings(self, sizes: dict[str, tuple[int, int]], held: tuple[str, ...] = ()) -> Any:
        return SimpleNamespace(**{name: self._ring(name, *size, name in held) for name, size in sizes.items()})

    def _ring(self, name: str, stages: int, readers: int, held: bool) -> Any:
        """A pipeline.Ring with its own methods. held: its items stay to the end."""
        ring = SimpleNamespace(
            name=name, held=held, STAGES=stages, BYTES=1, buffers=Buffers([Cell() for _ in range(stages)]),
            full=Buffers([Barrier(1) for _ in range(stages)]), empty=Buffers([Barrier(readers) for _ in range(stages)]),
        )  # fmt: skip
        for method in ("acquire", "commit", "expect", "load", "wait", "release", "skip"):
            setattr(ring, method, self.rewired(getattr(pipeline.Ring, method)).__get__(ring))
        return ring

    # ---- what stands for the device

    def rewired(self, function: Any) -> Callable[..., Any]:
        """The Python of a jitted function, with these names in place of its module's."""
        plain = function.fn
        gl = _Language(self.program)
        gl.exp2 = lambda x: x  # type: ignore[attr-defined]
        gl.zeros = lambda *_: Value()  # type: ignore[attr-defined]
        names = {**plain.__globals__, **{name: getattr(mask, name) for name in JITTED}}
        names |= {
            "gl": gl, "mbarrier": self, "tma_load": self.tma_load, "PIECE": 64, "LN2": 1.0,
            "matrix": lambda cell: cell, "product": self.product, "add_product": self.add_product,
            "warpgroup_mma_wait": self.finish, "cap": lambda S, *_: (S, 1.0), "factor": lambda *_: 1.0,
            "mask": self.mask, "mask_turned": self.mask, "of_queries": lambda cell, _: cell.load(None),
            "row_statistics": self.row_statistics, "store_by_tma": self.store, "wait_for_stores": lambda: None,
        }  # fmt: skip
        if plain.__module__ == kernels.__name__ and plain.__name__ not in OWN:
            names |= {name: self.rewired(getattr(kernels, name)) for name in OWN}
        elif plain.__name__ == "add_block":
            names["held"] = self.rewired(kernels.held)
        return FunctionType(plain.__code__, names, plain.__name__)

    def wait(self, barrier: Barrier, parity: int) -> None:
        self.scheduler.until(lambda: barrier.phase % 2 != parity)

    def arrive(self, barrier: Barrier, count: int = 1) -> None:
        self.scheduler.until()
        barrier.arrive()

    def expect(self, barrier: Barrier, size: int) -> None:
        assert size == 1

    def tma_load(self, descriptor: str, at: list[int], barrier: Barrier, cell: Cell) -> None:
        self.scheduler.until()
        cell.content = (descriptor, *at)
        barrier.arrive()

    def product(self, a: Cell, b: Cell) -> Value:
        return Value((a.content, b.content), tuple((cell, cell.content) for cell in (a, b)))

    def add_product(self, x: Value, b: Cell, acc: Value) -> tuple[Value, Value]:
        assert not x.reads
        assert not acc.reads
        self.log.append((threading.current_thread().name, x.made_of | {b.content}, x.masked))
        return Value((), ((b, b.content),)), x

    def finish(self, _: int, values: list[Value]) -> Any:
        self.scheduler.until()
        for value in values:
            assert all(cell.content == content for cell, content in value.reads), "what a matmul reads was replaced"
            value.reads = ()
        return values[0] if len(values) == 1 else values

    def mask(self, S: Value, *_: Any) -> Value:
        return Value(S.made_of, masked=True)

    def row_statistics(self, do: Cell, *rest: Any) -> tuple[Value, Value]:
        *_, b, h, first, _call, _options = rest
        assert do.content == ("do", b, h, first, 0)
        return Value({("lse", b, h, first)}), Value({("delta", b, h, first)})

    def store(self, tile: Value, cell: Cell, descriptor: str, at: list[int]) -> None:
        cell.content = descriptor
        self.stores.append((descriptor, tuple(at[:3])))
