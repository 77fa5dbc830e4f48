"""A Hopper block played on the CPU: the kernel's own control flow, its barriers, and one partition at a time.

`producer` and `consumer` run as the Python that they are. In place of matmuls and registers stands what the tests ask
for: which blocks were multiplied, in what order, and that no partition waits for ever. After each barrier operation the
seed says which partition goes on, so that seeds try different interleavings.
"""

from __future__ import annotations

import random
import threading
from collections.abc import Callable
from types import FunctionType, SimpleNamespace
from typing import Any

import torch

from tilewise import mask
from tilewise.kernels.hopper import config, forward, pipeline, steps, walk
from tilewise.kernels.tensors import FAR

CALL = (
    "q_len", "k_len", "diagonal", "left", "right", "scale", "softcap", "heads", "group", "tiles", "together", "total",
)  # fmt: skip
PLACE = ("row", "s", "b", "h", "q_start", "q_span", "k_start", "v_start", "call")
PLAYED = {  # functions that the partitions call, as the Python that they are
    "first_step", "step", "block_at", "tell", "walk_of", "sequence_in", "load_tile", "rows_of_v", "place_of", "extent",
    "sequence_of", "clamped", "clipped", "rows_at", "live", "way", "visit", "wait_for", "load_chunks", "beside",
}  # fmt: skip


class Stuck(AssertionError):
    """All partitions wait."""


class Scheduler:
    """Lets one partition run at a time."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.waiting: dict[str, Callable[[], bool]] = {}
        self.turns: dict[str, threading.Semaphore] = {}
        self.weights: dict[str, float] = {}
        self.fault: BaseException | None = None

    def run(self, partitions: dict[str, Callable[[], None]]) -> None:
        self.waiting = {name: lambda: True for name in partitions}
        self.turns = {name: threading.Semaphore(0) for name in partitions}
        self.weights = {name: self.random.choice((0.01, 1.0, 1.0, 100.0)) for name in partitions}
        threads = [threading.Thread(target=self._partition, args=(name, run)) for name, run in partitions.items()]
        for thread in threads:
            thread.start()
        self._choose()
        for thread in threads:
            thread.join()
        if self.fault is not None:
            raise self.fault

    def _partition(self, name: str, run: Callable[[], None]) -> None:
        threading.current_thread().name = name
        try:
            self._sleep(name)
            run()
        except BaseException as fault:
            self.fault = self.fault or fault
        self._choose()

    def until(self, ready: Callable[[], bool] = lambda: True) -> None:
        """Go on when it is ready, and this partition's turn."""
        name = threading.current_thread().name
        self.waiting[name] = ready
        self._choose()
        self._sleep(name)

    def _sleep(self, name: str) -> None:
        self.turns[name].acquire()
        if self.fault:
            raise SystemExit
        del self.waiting[name]

    def _choose(self) -> None:
        able = [name for name, ready in self.waiting.items() if not self.fault and ready()]
        if able:
            self.turns[self.random.choices(able, [self.weights[name] for name in able])[0]].release()
            return
        if self.waiting:
            self.fault = self.fault or Stuck(f"{sorted(self.waiting)} wait for each other")
        for turn in self.turns.values():
            turn.release()


class Barrier:
    """An mbarrier: `count` arrivals end a phase, and so do the last of the chunks that it expects."""

    def __init__(self, count: int) -> None:
        self.count, self.arrived, self.phase, self.expected = count, 0, 0, 0

    def arrive(self) -> None:
        self.arrived += 1
        if self.arrived == self.count:
            self.arrived, self.phase = 0, self.phase + 1


class Buffers(list):
    """What `index` finds."""

    dtype = "dtype"

    def index(self, n: int) -> Any:
        assert 0 <= n < len(self)
        return self[n]


class Pointer:
    """To an element of a list: reading beyond it is a fault."""

    def __init__(self, data: list[int], at: int = 0) -> None:
        self.data, self.at = data, at

    def __add__(self, n: int) -> Pointer:
        return Pointer(self.data, self.at + n)


APART = 1 << 20  # rows of V between sequences, in a descriptor that clips at their ends
NO_LISTS = (None,) * 5 + (0,) * 8


def lists_in(tiles: Any, batch: int, origin: tuple[int, ...], sides: tuple[int, int]) -> tuple[Any, ...]:
    """A BlockMask's lists as a kernel makes them. sides: where the tiles that have lists begin in the mask, and their
    partners."""
    side = tiles.full.shape
    apart = (side[1] if side[0] > 1 else 0, 1 if side[1] > 1 else 0, *side[2:])
    pointers = (Pointer(x.flatten().tolist()) for x in tiles)
    return (*pointers, batch, *apart, origin[0] * apart[0] + origin[1] * apart[1], *sides)


class Block:
    """One program: its rings, its turns, and a log of (consumer, what, ...).

    lengths, lists: as the kernel makes them, with Pointers.
    """

    def __init__(
        self, numbers: dict[str, int], options: Any, program: int, programs: int, counter: list[int], seed: int,
        lengths: tuple[Any, ...] = (None,) * 6, lists: tuple[Any, ...] = NO_LISTS,
    ) -> None:  # fmt: skip
        self.lengths, self.lists = lengths, lists
        self.O, self.counter, self.program, self.programs = options, counter, program, programs
        self.scheduler = Scheduler(seed)
        self.consumers = options.ROWS // 64
        self.log: list[tuple[Any, ...]] = []
        self.turns: dict[int, list[str]] = {c: [] for c in range(self.consumers)}
        rings = {"tiles": (2, self.consumers), "q": (options.QUERIES * self.consumers, 1)}
        rings |= {"k": (options.STAGES, self.consumers), "v": (options.STAGES, self.consumers)}
        rings["blocks"] = (4, self.consumers)
        wide, v_wide = options.WIDTH, options.V_WIDTH
        widths = {"q": (wide, v_wide), "k": (wide, v_wide), "v": (v_wide, wide)}
        self.descriptors = [_Descriptor(name, config.chunk(*sizes)) for name, sizes in widths.items()]
        self.rings = SimpleNamespace(
            **{name: self.ring(name, *sizes, *widths.get(name, (1, 1))) for name, sizes in rings.items()}
        )
        numbers = dict.fromkeys(CALL, 0) | numbers
        self.call = self.call_of(*(numbers[name] for name in CALL))
        self.masked: set[Any] = set()
        self.bits: dict[Any, int] = {}

    def run(self) -> None:
        partitions = {str(c): self._consumer(c) for c in range(self.consumers)}
        produce = self.rewired(forward.producer)
        partitions["producer"] = lambda: produce(
            *self.descriptors, self.counter, self.lengths, self.lists, self.rings, self.call, self.O
        )
        self.scheduler.run(partitions)
        for ring in vars(self.rings).values():
            for full, empty in zip(ring.full, ring.empty, strict=True):
                assert full.phase == empty.phase, f"{ring.name}: what was committed was not released"
        assert all(len(turn) <= 1 for turn in self.turns.values())

    def _consumer(self, c: int) -> Callable[[], None]:
        consume = self.rewired(forward.consumer)
        return lambda: consume(
            "o", (Buffers([["o"]] * 3),), Anything(), None, "bits", Anything(), self.rings, self.call, c, self.O
        )

    def call_of(self, *numbers: int) -> Any:
        """A walk.Call with its own methods."""
        call = SimpleNamespace(**dict(zip(CALL, numbers, strict=True)))
        for method in ("with_lengths", "keys", "blocks", "walk"):
            setattr(call, method, self.rewired(getattr(walk.Call, method)).__get__(call))
        return call

    def ring(self, name: str, stages: int, readers: int, width: int, other: int) -> Any:
        """A pipeline.Ring with its own methods; its tiles' columns, and others'. A part is a list of chunks."""
        columns = config.chunk(width, other)
        first, *others = (
            Buffers([[None] for _ in range(max(side // columns, 1))] for _ in range(stages))
            for side in steps.parts(width)
        )
        if name in ("tiles", "blocks"):
            first = Buffers([None] for _ in range(stages))
        ring = SimpleNamespace(
            name=name, STAGES=stages, BYTES=width // columns, buffers=first, others=tuple(others),
            full=Buffers([Barrier(1) for _ in range(stages)]), empty=Buffers([Barrier(readers) for _ in range(stages)]),
        )  # fmt: skip
        for method in ("acquire", "commit", "expect", "load_parts", "parts", "place", "wait", "release", "skip"):
            setattr(ring, method, self.rewired(getattr(pipeline.Ring, method)).__get__(ring))
        return ring

    # ---- what stands for the device

    def rewired(self, function: Any) -> Callable[..., Any]:
        """The Python of a jitted function, with these names in place of its module's."""
        plain = function.fn
        names = {**plain.__globals__, **{n: getattr(mask, n) for n in ("key_range", "mask_free_range", "tile_of")}}
        names |= {
            "gl": _Language(self.program, self.programs), "mbarrier": self, "tma_load": self.tma_load,
            "PIECE": 64, "TILE": 128, "WALK": walk.WALK.value, "FAR": FAR, "INF": torch.inf,
            "put": self.put, "number": lambda buffer, at: buffer[0][at], "begin_claim": self.begin_claim,
            "end_claim": self.end_claim, "take_turn": self.take_turn, "pass_turn": self.pass_turn,
            "matrix": self.matrix, "chunks_of": lambda parts, _: [chunk for part in parts for chunk in part],
            "scores": lambda q, k, KEYS, _: _Tile((q[0], k[0].slice(0, KEYS, dim=0))),
            "zeros": lambda _: ("o",), "add_values": self.multiply, "wait_for_values": lambda o: o,
            "rescale": lambda part, _: part, "times": lambda part, _: part, "cap": lambda S, *_: S, "mask": self.mask,
            "stay_before": lambda _: None, "computed": lambda x: x, "uniform": lambda x: x,
            "wait_for_stores": lambda: None,
            "warpgroup_mma_wait": lambda _, deps: deps[0] if len(deps) == 1 else deps,
            "softmax": self.softmax,
            "stay_behind": lambda _: None, "lots_of": lambda _, *place: place, "drop": self.drop,
            "finalize": lambda *_: (Anything(), Anything()), "store": self.store, "Call": self.call_of,
            "of_rows_in_use": self.of_rows_in_use,
            "Place": lambda *fields: SimpleNamespace(**dict(zip(PLACE, fields, strict=True))),
            "bits_mask": self.bits_mask, "below": lambda list, n, tile: sum(x < tile for x in list.data[list.at :][:n]),
        }  # fmt: skip
        for name in PLAYED & set(plain.__code__.co_names):
            home = next(module for module in (forward, walk, pipeline) if hasattr(module, name))
            names[name] = self.rewired(getattr(home, name))
        return FunctionType(plain.__code__, names, plain.__name__)

    def wait(self, barrier: Barrier, parity: int) -> None:
        self.scheduler.until(lambda: barrier.phase % 2 != parity)

    def arrive(self, barrier: Barrier, count: int = 1) -> None:
        self.scheduler.until()
        barrier.arrive()

    def expect(self, barrier: Barrier, size: int) -> None:
        barrier.expected = size

    def tma_load(self, descriptor: str, at: list[int], barrier: Barrier, buffer: list[Any]) -> None:
        self.scheduler.until()
        buffer[0] = (descriptor, *(at if len(at) == 4 else self.unclipped(at)))
        barrier.expected -= 1
        if barrier.expected == 0:
            barrier.arrive()

    def unclipped(self, at: list[int]) -> tuple[int, ...]:
        """(Sequence, head, row, column) of a place in a descriptor that clips at ends."""
        far, end, head, row, column = at
        assert far == FAR
        row += end - FAR
        return (0, head, row, column) if self.O.PACKED else (row // APART, head, row % APART, column)

    def put(self, buffer: list[Any], at: int, numbers: tuple[int, ...]) -> None:
        assert at + len(numbers) <= 32, "a message's places"
        before = {} if at == 0 else buffer[0]
        buffer[0] = before | dict(enumerate((_Int(number) for number in numbers), at))

    def begin_claim(self, counter: list[int]) -> int:
        counter[0] += 1
        return counter[0] - 1

    def end_claim(self, claim: int, counter: list[int], total: int) -> int:
        if claim == total - 1:
            counter[0] = 0
        return _Int(claim + self.programs)

    def take_turn(self, consumer: int) -> None:
        self.scheduler.until(lambda: bool(self.turns[consumer]))
        self.turns[consumer].pop()

    def pass_turn(self, consumer: int) -> None:
        self.scheduler.until()
        self.turns[consumer].append("turn")
        assert len(self.turns[consumer]) == 1, (
            "a second arrival at a named barrier counts for the threads that wait there"
        )

    def matrix(self, part: list[Any]) -> _Tile:
        """The chunks are of one place, side by side; the first one is taken for all."""
        descriptor, *place, column = part[0][0]
        columns = descriptor.block_shape[-1]
        assert [chunk[0] for chunk in part] == [(descriptor, *place, column + n * columns) for n in range(len(part))]
        tile = _Tile(part[0][0])
        tile.memory = part[0]
        return tile

    def softmax(self, S: Any, *_: Any) -> tuple[Any, ...]:
        """S is there, and with it Q, if it was loaded into registers."""
        q = S[0]
        if q.loading:
            assert q.memory[0] == q, "Q's place is another tile's before its loads into registers are done"
            q.loading = False
        return _Scores(S), Anything(), Anything(), "alpha"

    def multiply(self, P: Any, v: Any, o: Any) -> Any:
        (q, k), v = P.S, v[0]
        who = int(threading.current_thread().name)
        assert q[0] == "q", q
        assert k[0] == "k", k
        assert v == ("v", *k[1:]), (k, v)
        self.log.append(
            ("block", who, q[1:4], k[1:4], P.S in self.masked, self.bits.get(P.S, -1), k.rows or self.O.KEYS)
        )
        return o

    def mask(self, S: Any, first: int, j0: int, *_: Any) -> Any:
        if not self.O.PACKED:
            assert (S[0][3], S[1][3]) == (first, j0)
        self.masked.add(S)
        return S

    def bits_mask(self, S: Any, bits: str, tile: int, j0: int, consumer: int) -> Any:
        assert (bits, consumer) == ("bits", int(threading.current_thread().name))
        self.bits[S] = tile
        return S

    def drop(self, P: Any, lots: tuple[int, int, int], j0: int) -> Any:
        """By places in the sequence, of which the tensors' are known."""
        (s, h, first), (q, k) = lots, P.S
        assert (q[2], k[3] - q[3]) == (h, j0 - first + self.starts(s)[1] - self.starts(s)[0])
        assert (q[1], q[3]) == (0 if self.O.PACKED else s, self.starts(s)[0] + first)
        return P

    def starts(self, s: int) -> tuple[int, int]:
        """Sequence s's first query and key."""
        return (self.lengths[0].data[s], self.lengths[1].data[s]) if self.O.PACKED else (0, 0)

    def of_rows_in_use(self, o: Any, L: Any, end: int) -> tuple[Any, Any]:
        self.log.append(("in use", int(threading.current_thread().name), end))
        return o, L

    def store(self, tile: Any, buffers: Any, descriptor: str, at: list[int]) -> None:
        self.log.append(("store", int(threading.current_thread().name), tuple(at)))


class _Descriptor(str):
    """Of blocks of so many columns."""

    block_shape: tuple[int]

    def __new__(cls, name: str, columns: int) -> _Descriptor:
        made = super().__new__(cls, name)
        made.block_shape = (columns,)
        return made


class _Tile(tuple):
    """(descriptor, where it begins) of a tile in shared memory, or of its first rows; or the (Q, K) of scores."""

    rows: int | None = None
    memory: list[Any]  # where it lies
    loading = False  # into registers: begun, and perhaps not done

    @property
    def type(self) -> Anything:
        return Anything()

    def slice(self, start: int, rows: Any, dim: int) -> _Tile:
        assert start == dim == 0
        part = _Tile(self)
        part.rows = rows
        return part

    def load(self, _: Any) -> _Tile:
        self.loading = True
        return self


class _Int(int):
    """A number as a kernel has it: what is made of it is one, too."""

    def to(self, _: Any) -> _Int:
        return self


def _kept(name: str) -> Callable[..., Any]:
    plain = getattr(int, name)

    def operation(self: int, other: Any) -> Any:
        result = plain(self, other)
        return result if result is NotImplemented else _Int(result)

    return operation


for _name in ("add", "sub", "mul", "floordiv", "mod"):
    for _side in (f"__{_name}__", f"__r{_name}__"):
        setattr(_Int, _side, _kept(_side))


class Anything:
    """A tensor that nobody looks at: whatever is done with it gives it again."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return self

    def _again(self, *_: Any, **__: Any) -> Any:
        return self

    __call__ = __getitem__ = __add__ = __radd__ = __sub__ = __mul__ = __rmul__ = __lt__ = __eq__ = _again  # type: ignore[assignment]


class _Scores(Anything):
    """P, of scores S."""

    def __init__(self, S: Any) -> None:
        self.S = S


class _Language(Anything):
    """`gl`: with integers it works, with tensors not."""

    def __init__(self, program: int = 0, programs: int = 1) -> None:
        self.program_id = lambda _: _Int(program)
        self.where = lambda condition, a, b: a if condition else b
        self.num_programs = lambda _: programs
        self.minimum, self.maximum, self.static_range = min, max, range
        self.where = lambda condition, yes, no: yes if condition else no
        self.convert_layout = lambda x, *_, **__: x

    def load(self, pointer: Pointer, mask: bool = True, other: int | None = None) -> int | None:
        if not mask:
            return other
        assert 0 <= pointer.at < len(pointer.data)
        return _Int(pointer.data[pointer.at])
