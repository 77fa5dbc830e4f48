"""Programs of the Hopper backward played on the CPU, as `hopper_machine` plays the forward's.

wgmma and TMA are asynchronous here too: what one reads is being read until the wait that ends it, and whoever writes
there before that fails. A `Device` runs several of them at once, which claim their tiles from one counter.
"""

from __future__ import annotations

import threading
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from types import FunctionType, SimpleNamespace
from typing import Any

from hopper_machine import APART, NO_LISTS, Anything, Barrier, Buffers, Scheduler, _Descriptor, _Int, _Language

from tilewise import mask
from tilewise.kernels.hopper import (
    backward,
    backward_drawer,
    backward_steps,
    backward_tiles,
    config,
    pipeline,
    steps,
    walk,
)
from tilewise.kernels.tensors import FAR

CALL = (
    "q_len", "k_len", "diagonal", "left", "right", "scale", "softcap", "heads", "group", "tiles", "together", "total",
)  # fmt: skip
PLACE = ("first", "s", "b", "kv", "before", "dk_start", "k_span", "call")
RINGS = ("tiles", "k", "v", "q", "dq", "do", "statistics", "blocks", "words", "BYTES")
MASK = ("query_range", "mask_free_queries", "key_range", "tile_of")
PLAYED = {  # functions that the partitions call, as the Python that they are
    "claim", "tell", "place_told", "load_tile", "load_keys",
    "place_of_keys", "query_blocks", "free_queries", "load_queries", "shares_of_head", "shares_before", "block_told",
    "add_share", "step", "turn_of", "share_of_dq", "rows_at", "clipped", "sequence_of", "extent", "clamped", "live",
    "way", "visit", "draw_block", "load_chunks", "beside", "turned_product", "add_product",
}  # fmt: skip
HOMES = (backward, backward_drawer, backward_steps, backward_tiles, walk, pipeline)
NO_LENGTHS = (None,) * 4 + (0,) * 5


class Memory(Anything):
    """A buffer in shared memory, of a tile's columns from `first` on. Operations on a part of it see the whole."""

    def __init__(self, name: str, first: int = 0) -> None:
        self.name, self.first = name, first
        self.shape = (16, 256)  # of a share of dQ; of others nobody asks
        self.holds: dict[Any, Any] = {}

    def slice(self, start: int, _: int, dim: int) -> Any:
        return Part(self, start)

    def permute(self, _: Any) -> Any:
        return Part(self, 0)


class Part(Anything):
    """Half of a buffer."""

    def __init__(self, memory: Memory, start: int) -> None:
        self.memory, self.start = memory, start

    def permute(self, _: Any) -> Any:
        return self

    def store(self, gradient: Gradient) -> None:
        gradient.block.write(self.memory, self.start, gradient.of)


class Gradient(Anything):
    """P or dS of 64 keys and 64 queries: of ((b, h), keys from, queries from)."""

    def __init__(self, block: BackwardBlock, of: tuple[Any, ...]) -> None:
        self.block, self.of = block, of


class Product(Anything):
    """What a wgmma of these operands, and of those before it, gives."""

    def __init__(self, *of: Any) -> None:
        self.of = of


ROW = Anything()  # -L or -delta


class Device:
    """Runs programs, `room` of them at a time, begun in any order. It has the counters, of tiles and of ended turns."""

    def __init__(self, seed: int, room: int) -> None:
        self.scheduler, self.room = Scheduler(seed), room
        self.running: dict[int, int] = {}  # by program that has begun: partitions that have not ended
        self.counter = 0
        self.claimed: set[int] = set()
        self.ended: dict[int, int] = defaultdict(int)  # turns, by share
        self.adding: dict[int, Any] = {}  # by share: the add that is on its way
        self.order: dict[int, list[Any]] = defaultdict(list)  # by share: adds that are in memory

    def run(self, blocks: list[BackwardBlock]) -> None:
        partitions: dict[str, Callable[[], None]] = {}
        for block in blocks:
            parts = block.partitions()
            partitions |= {
                f"{block.program} {name}": self.begun(block.program, part, block.PARTITIONS)
                for name, part in parts.items()
            }
        self.scheduler.run(partitions)
        assert not self.adding
        assert not self.counter, "the next launch begins with it"
        for block in blocks:
            block.check_end()

    def begun(self, program: int, part: Callable[[], None], partitions: int) -> Callable[[], None]:
        """The partition, once there is room for its program."""

        def run() -> None:
            self.scheduler.until(
                lambda: program in self.running or sum(left > 0 for left in self.running.values()) < self.room
            )
            self.running.setdefault(program, partitions)
            part()
            self.running[program] -= 1

        return run


class BackwardBlock:
    """One program of `programs`. Its log: ("pair", consumer, (sequence, query head), keys from, queries from, masked,
    bit tile, keys and queries from in their sequence), which statistics came with which queries, and what
    it stored.

    numbers: of a `walk.Call`. lengths, lists: as the kernel makes them, with Pointers.
    """

    @property
    def PARTITIONS(self) -> int:
        return 6 if self.O.DRAWN else 5

    def __init__(
        self, numbers: tuple[Any, ...], options: Any, program: int, programs: int, device: Device,
        lengths: tuple[Any, ...] = NO_LENGTHS, lists: tuple[Any, ...] = NO_LISTS,
    ) -> None:  # fmt: skip
        self.O, self.device = options, device
        self.program, self.programs = program, programs
        self.call = self.call_of(*numbers)
        self.lengths, self.lists = lengths, lists
        self.scheduler = device.scheduler
        self.log: list[tuple[Any, ...]] = []
        self.in_flight: dict[str, list[tuple[Product, list[Memory]]]] = defaultdict(list)
        self.leaving: dict[str, list[tuple[Memory, Any]]] = defaultdict(list)  # by TMA; with the half of it, or None
        self.at_barrier = self.met = 0
        self.sides, self.chunk = steps.parts(options.WIDTH), config.chunk(options.WIDTH, options.WIDTH)
        self.rings: Any = None
        self.numbers = numbers

    def partitions(self) -> dict[str, Callable[[], None]]:
        """What the kernel starts, on the rings that it makes."""
        chunk = self.chunk
        blocks = {
            **dict.fromkeys(("dk", "dv", "k", "v"), (1, 1, 64, chunk)), "rows": (2, 1, self.O.ROWS),
            **dict.fromkeys(("q", "do"), (1, 1, self.O.ROWS, chunk)), "dq": (config.dq_columns(self.O.WIDTH) // 4, 256),
        }  # fmt: skip
        descriptors = (self.descriptor(x, blocks[x]) for x in ("dk", "dv", "dq", "q", "k", "v", "do", "rows"))
        *pointers, batch, q_apart, do_apart, k_apart, v_apart = self.lengths
        self.rewired(backward.backward_kernel)(
            *descriptors, 0, "counter", "seed", *pointers, *self.lists[:5], "bits", *self.numbers, batch,
            q_apart, do_apart, k_apart, v_apart, *self.lists[6:], 0, 0, 0, 1.0, self.O,
        )  # fmt: skip
        return self.started

    def start(self, partitions: list[tuple[Any, tuple[Any, ...]]], *_: Any) -> None:
        def bound(function: Any, arguments: tuple[Any, ...]) -> Callable[[], None]:
            played = self.rewired(function)
            return lambda: played(*arguments)

        names = {
            backward.consumer: "{}",
            backward.adder: "{} adds",
            backward.producer: "producer",
            backward.drawer: "drawer",
        }
        self.started = {names[f].format(arguments[-2]): bound(f, arguments) for f, arguments in partitions}
        assert len(self.started) == self.PARTITIONS

    def descriptor(self, name: str, block: tuple[int, ...]) -> _Descriptor:
        made = _Descriptor(name, block[-1])
        made.block_shape, made.layout, made.dtype = block, name, None
        return made

    def rings_of(self, *fields: Any) -> Any:
        self.rings = SimpleNamespace(**dict(zip(RINGS, fields, strict=True)))
        self.rings.BYTES = 2 * (self.O.WIDTH // self.chunk) + 1  # loads
        return self.rings

    def check_end(self) -> None:
        for name in ("tiles", "k", "v", "q", "dq", "blocks", "words"):
            ring = getattr(self.rings, name)
            for full, empty in zip(ring.full, ring.empty, strict=True):
                assert full.phase == empty.phase, "what was committed was not released"
        assert not self.at_barrier
        assert not any(self.in_flight.values())
        assert not any(self.leaving.values())

    def call_of(self, *numbers: Any) -> Any:
        """A walk.Call with its own method."""
        call = SimpleNamespace(**dict(zip(CALL, numbers, strict=True)))
        call.with_lengths = self.rewired(walk.Call.with_lengths).__get__(call)
        return call

    def place_of(self, *fields: Any) -> Any:
        return SimpleNamespace(**dict(zip(PLACE, fields, strict=True)))

    def head(self, b: int, h: int) -> tuple[int, int]:
        """(Sequence, head) of a block that lies in (b, h), and which the tile of keys in shared memory takes."""
        _, of_k, kv, row, _ = self.rings.k.buffers[0].holds["loaded"]
        assert (of_k, kv) == (b, h // self.call.group)
        if not self.O.PACKED:
            return b, h
        starts = self.lengths[1].data
        (sequence,) = (s for s in range(len(starts) - 1) if starts[s] <= row < starts[s + 1])
        return sequence, h

    def buffers(self, name: str, stages: int, sides: Sequence[int] = (1,)) -> Iterator[Buffers]:
        """Of each part."""
        for n in range(len(sides)):
            yield Buffers([Memory(name, sum(sides[:n])) for _ in range(stages)])

    def ring(self, parts: Sequence[Buffers], readers: int) -> Any:
        """A pipeline.Ring with its own methods; BYTES are loads."""
        first, *others = parts
        full, empty = (Buffers([Barrier(count) for _ in first]) for count in (1, readers))
        ring = SimpleNamespace(
            STAGES=len(first), BYTES=self.O.WIDTH // self.chunk, buffers=first, others=tuple(others), full=full,
            empty=empty,
        )  # fmt: skip
        for method in ("acquire", "commit", "expect", "load_parts", "parts", "place", "wait", "release"):
            setattr(ring, method, self.rewired(getattr(pipeline.Ring, method)).__get__(ring))
        return ring

    def rewired(self, function: Any) -> Callable[..., Any]:
        """The Python of a jitted function, with these names in place of its module's."""
        plain = function.fn
        names = {**plain.__globals__, **{n: getattr(mask, n) for n in MASK}}
        language = _Language(self.program, self.programs)
        language.allocate_shared_memory = lambda _, shape, layout: next(self.buffers(layout, shape[0]))
        language.NVMMASharedLayout = SimpleNamespace(get_default_for=lambda *_: "dS")
        language.SwizzledSharedLayout = lambda *_: "numbers"
        language.warp_specialize = self.start
        names |= {
            "gl": language, "mbarrier": self, "tma_load": self.tma_load, "PIECE": 64, "KEYS": 128, "LN2": 1.0,
            "matrix": lambda memory: memory, "queries": self.queries, "begin_with": lambda row: row,
            "in_registers": self.in_registers, "begin_claim": self.begin_claim, "end_claim": self.end_claim,
            "warpgroup_mma": self.multiply, "warpgroup_mma_wait": self.finish, "score_gradient": self.score_gradient,
            "put_share": self.put_share, "tma_add": self.tma_add, "await_turn": self.await_turn,
            "end_turn": self.end_turn, "meet": self.meet, "wait_for_stores": self.wait_for_stores,
            "store": self.store, "zeros": lambda _: (Anything(),) * len(self.sides), "scaled": lambda sums, _: sums,
            "accumulator": lambda _: None, "chunks_of": self.chunks_of, "seen_as": self.seen_as,
            "fence_async_shared": lambda: None, "uniform": lambda x: x,
            "buffers_of": lambda n, _, name: tuple(self.buffers(name, n, self.sides)), "ring_of_parts": self.ring,
            "ring_of": lambda buffers, readers: self.ring((buffers,), readers), "Rings": self.rings_of,
            "lots_of_keys": lambda _, *keys: keys, "drawn": lambda lots, *queries: (*lots, *queries),
            "words_ring": lambda blocks, *_: self.ring((next(self.buffers("words", blocks)),), 2),
            "put_words": self.put_words, "words_in": lambda memory, piece: memory.holds[piece],
            "TILE": 128, "FAR": FAR, "Place": self.place_of, "Call": self.call_of,
            "put": self.put, "number": self.number,
            "below": lambda list, n, tile: sum(x < tile for x in list.data[list.at :][:n]),
        }  # fmt: skip
        for name in PLAYED & set(plain.__code__.co_names):
            home = next(module for module in HOMES if hasattr(module, name))
            names[name] = self.rewired(getattr(home, name))
        return FunctionType(plain.__code__, names, plain.__name__)

    # ---- what stands for the device

    @property
    def me(self) -> str:
        """The partition: "0", "0 adds", "1", "1 adds" or "producer"."""
        return threading.current_thread().name.partition(" ")[2]

    def wait(self, barrier: Barrier, parity: int) -> None:
        self.scheduler.until(lambda: barrier.phase % 2 != parity)

    def arrive(self, barrier: Barrier, count: int = 1) -> None:
        self.scheduler.until()
        barrier.arrive()

    def expect(self, barrier: Any, size: int) -> None:
        barrier.loads = size

    def write(self, memory: Memory, key: Any, value: Any) -> None:
        read = [of for flying in self.in_flight.values() for _, parts in flying for of in parts]
        leaving = [half for halves in self.leaving.values() for of, half in halves if of is memory]
        assert all(memory is not of for of in read), f"{memory.name} is written while it is read"
        assert not {None, key}.intersection(leaving), f"{memory.name} is written while it is stored"
        memory.holds[key] = value

    def chunks_of(self, parts: list[Memory], _: Any) -> list[tuple[Memory, int]]:
        sides = zip(parts, self.sides, strict=True)
        return [(part, part.first + n) for part, side in sides for n in range(0, side, self.chunk)]

    def seen_as(self, memory: Memory, shape: list[int], _: Any) -> Buffers:
        if memory.name == "dS":
            assert shape == [self.O.ROWS // 64, 1, 1, 64, 64]
            return Buffers([Part(memory, 64 * n) for n in range(shape[0])])
        assert shape[0] * shape[1] == memory.shape[0]
        return Buffers([(memory, shape[1] * n) for n in range(shape[0])])

    def in_registers(self, parts: list[Memory]) -> tuple[Memory, ...]:
        """Loads may be done as late as what is made of them: products are checked by the memory itself."""
        self.scheduler.until()
        return tuple(parts)

    def begin_claim(self, _: str) -> int:
        self.scheduler.until()
        claim = self.device.counter
        assert claim not in self.device.claimed, "the counter was set back too early"
        self.device.claimed.add(claim)
        self.device.counter += 1
        return claim

    def end_claim(self, claim: int, _: str, total: int) -> int:
        self.scheduler.until()
        if claim == total - 1:
            self.device.counter = 0
        return _Int(claim + self.programs)

    def tma_load(self, descriptor: str, at: list[int], barrier: Any, place: Any) -> None:
        """place: a Memory, or of one a chunk and its column."""
        self.scheduler.until()
        memory, column = place if isinstance(place, tuple) else (place, None)
        if column is not None:
            assert at[-1] == column
            at = [*at[:-1], memory.first]
        self.write(memory, "loaded", (descriptor, *at) if len(at) < 5 else (descriptor, *self.unclipped(at)))
        self.write(memory, "end", None if len(at) < 5 else at[1] if self.O.PACKED else at[1] % APART)
        barrier.loads -= 1
        if not barrier.loads:
            barrier.arrive()

    def unclipped(self, at: list[int]) -> tuple[int, ...]:
        """(Sequence, head, row, column) of a place in a descriptor that clips at ends."""
        far, end, head, row, column = at
        assert far == FAR
        row += end - FAR
        return (0, head, row, column) if self.O.PACKED else (row // APART, head, row % APART, column)

    def put(self, memory: Memory, at: int, numbers: tuple[int, ...]) -> None:
        self.write(memory, "told", None)
        memory.holds |= dict(enumerate((_Int(number) for number in numbers), at))

    def put_words(self, words: Any, memory: Memory, piece: int) -> None:
        self.scheduler.until()
        self.write(memory, piece, words)

    def number(self, memory: Memory, at: int) -> Any:
        self.scheduler.until()
        return memory.holds[at]

    def queries(self, rings: Any, at: int, piece: int) -> tuple[Any, ...]:
        tiles = rings.q.place(at), [part.index(at) for part in rings.do]
        (q, *_), (do, *_), rows = *tiles, rings.statistics[at]
        (q_name, b, h, i0, _), (do_name, *of_do), (name, _, bh, of_rows) = (x.holds["loaded"] for x in (q, do, rows))
        assert (q_name, do_name, name) == ("q", "do", "rows")
        assert (of_do, bh) == ([b, h, i0, 0], b * self.call.heads + h)
        assert q.holds["end"] == do.holds["end"]
        self.log.append(("queries", self.head(b, h), i0, of_rows, q.holds["end"]))
        return *([Part(part, 64 * piece) for part in tile] for tile in tiles), ROW, ROW

    def multiply(self, a: Any, b: Any, acc: Any, **_: Any) -> Product:
        parts = [x if isinstance(x, Memory) else x.memory for x in (a, b) if isinstance(x, (Memory, Part))]
        product = Product(a, b, acc)
        self.in_flight[self.me].append((product, parts))
        self.scheduler.until()
        return product

    def finish(self, left: int, deps: list[Any]) -> Any:
        self.scheduler.until()
        flying = self.in_flight[self.me]
        self.in_flight[self.me] = flying = flying[max(0, len(flying) - left) :]
        assert all(product is not dep for product, _ in flying for dep in deps), "it is used before it is there"
        return deps[0] if len(deps) == 1 else deps

    def score_gradient(
        self, S: Product, dP: Product, L: Any, late: Any, word: Any, first: int, i0: int, masked: bool, tile: int,
        bits: str, behind_s: int, behind_dp: int, dtype: Any, call: Any, consumer: int, options: Any,
    ) -> Any:  # fmt: skip
        assert (bits, consumer) == ("bits", int(self.me))
        places = []
        for left, product, names in ((behind_s, S, ("k", "q")), (behind_dp, dP, ("v", "do"))):
            self.finish(left, [product])
            columns = []
            while isinstance(product, Product):
                keys, queries, product = product.of
                (key_name, _b, _kv, j0, _), (name, b, h, block, _) = (
                    x.memory.holds["loaded"] if isinstance(x, Part) else x.holds["loaded"] for x in (keys, queries)
                )
                assert (key_name, name) == names
                assert keys.first == queries.memory.first
                columns.append(keys.first)
                places.append((j0, block + queries.start))
            assert sorted(columns) == [sum(self.sides[:n]) for n in range(len(self.sides))]
            assert (product is ROW) == (names[0] == "k" or late is None), "delta is in dP from the start, or added late"
        assert len(set(places)) == 1
        head = self.head(b, h)
        assert word == ((head[0], first, h, i0) if self.O.DROPOUT else None)
        self.log.append(("pair", consumer, head, *places[0], masked, tile, first, i0))
        dS = Gradient(self, (head, *places[0]))
        return dS, dS

    def put_share(self, dq: Product, memory: Memory) -> None:
        blocks, keys = set(), []
        while isinstance(dq, Product):
            dS, k, dq = dq.of
            of_k, start = (k.memory, k.start) if isinstance(k, Part) else (k, 0)
            assert of_k.first + start == (64 * int(self.me) if self.O.ROWS == 64 else 0)
            *_, j0, _ = of_k.holds["loaded"]
            keys.append(j0)
            assert len(dS.memory.holds) == self.O.ROWS // 64
            for start, (head, first, i0) in dS.memory.holds.items():
                assert first == j0
                blocks.add((head, i0 - start))
        assert sorted(keys) == [min(keys), min(keys) + 64]
        ((head, i0),) = blocks
        self.write(memory, "dq", (int(self.me), head, min(keys), i0))

    def tma_add(self, _: str, at: list[int], place: Any) -> None:
        """place: a share, or (one, the row in it). Of a block consumer 1's begins behind 64 columns of 64 rows."""
        (memory, behind), c = place if isinstance(place, tuple) else (place, 0), int(self.me[0])
        block, row = divmod(at[0], self.O.ROWS * self.O.WIDTH // 256)
        assert row == 16 * c + behind
        share, add = 2 * block + c, memory.holds["dq"]
        self.leaving[self.me].append((memory, None))
        if behind:
            self.scheduler.until()
            return
        if self.O.ORDERED:
            assert share not in self.device.adding, "an add of another tile is on its way"
            self.device.adding[share] = add
        self.log.append(("dq", *add, share))
        self.scheduler.until()

    def await_turn(self, share: int, turn: int) -> None:
        self.scheduler.until(lambda: self.device.ended[share] == turn)

    def end_turn(self, share: int) -> None:
        self.wait_for_stores()
        self.device.order[share].append(self.device.adding.pop(share))
        self.device.ended[share] += 1

    def wait_for_stores(self) -> None:
        self.scheduler.until()
        self.leaving[self.me] = []

    def meet(self) -> None:
        met = self.met
        self.at_barrier += 1
        if self.at_barrier == 2:
            self.at_barrier, self.met = 0, met + 1
        self.scheduler.until(lambda: self.met > met)

    def store(self, sums: Any, parts: list[Any], descriptor: str, at: list[int]) -> None:
        assert not self.in_flight[self.me]
        assert len(sums) == len(parts)
        for part in parts:
            memory, half = (part.memory, part.start) if isinstance(part, Part) else (part, None)
            self.write(memory, half, descriptor)
            self.leaving[self.me].append((memory, half))
        self.scheduler.until()
        self.log.append((descriptor, *at))
