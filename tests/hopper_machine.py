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
from tilewise.kernels.hopper import forward, pipeline


class Stuck(AssertionError):
    """All partitions wait."""


class Scheduler:
    """Lets one partition run at a time."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.changed = threading.Condition()
        self.waiting: dict[str, Callable[[], bool]] = {}
        self.running: str | None = None
        self.weights: dict[str, float] = {}
        self.fault: BaseException | None = None

    def run(self, partitions: dict[str, Callable[[], None]]) -> None:
        self.waiting = {name: lambda: True for name in partitions}
        self.weights = {name: self.random.choice((0.01, 1.0, 1.0, 100.0)) for name in partitions}
        threads = [threading.Thread(target=self._partition, args=(name, run)) for name, run in partitions.items()]
        for thread in threads:
            thread.start()
        with self.changed:
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
        with self.changed:
            self._choose()

    def until(self, ready: Callable[[], bool] = lambda: True) -> None:
        """Go on when it is ready, and this partition's turn."""
        name = threading.current_thread().name
        with self.changed:
            self.waiting[name] = ready
            self._choose()
        self._sleep(name)

    def _sleep(self, name: str) -> None:
        with self.changed:
            self.changed.wait_for(lambda: self.running == name or self.fault)
            if self.fault:
                raise SystemExit
            del self.waiting[name]

    def _choose(self) -> None:
        able = [name for name, ready in self.waiting.items() if ready()]
        self.running = None
        if able:
            self.running = self.random.choices(able, [self.weights[name] for name in able])[0]
        elif self.waiting:
            self.fault = self.fault or Stuck(f"{sorted(self.waiting)} wait for each other")
        self.changed.notify_all()


class Barrier:
    """An mbarrier: `count` arrivals end a phase."""

    def __init__(self, count: int) -> None:
        self.count, self.arrived, self.phase = count, 0, 0

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


class Block:
    """One program: its rings, its turns, and a log of (consumer, what, ...)."""

    def __init__(
        self, numbers: dict[str, int], options: Any, program: int, programs: int, counter: list[int], seed: int
    ) -> None:
        self.O, self.counter, self.program, self.programs = options, counter, program, programs
        self.scheduler = Scheduler(seed)
        self.consumers = options.ROWS // 64
        self.log: list[tuple[Any, ...]] = []
        self.turns: dict[int, list[str]] = {c: [] for c in range(self.consumers)}
        rings = {"tiles": (2, self.consumers), "q": (options.QUERIES * self.consumers, 1)}
        rings |= {"k": (options.STAGES, self.consumers), "v": (options.STAGES, self.consumers)}
        self.rings = SimpleNamespace(**{name: self.ring(name, *sizes) for name, sizes in rings.items()})
        self.call = SimpleNamespace(**numbers)
        for method in ("blocks", "free_blocks"):
            setattr(self.call, method, self.rewired(getattr(forward.Call, method)).__get__(self.call))
        self.masked: set[Any] = set()

    def run(self) -> None:
        partitions = {str(c): self._consumer(c) for c in range(self.consumers)}
        produce = self.rewired(forward.producer)
        partitions["producer"] = lambda: produce("q", "k", "v", self.counter, self.rings, self.call, self.O)
        self.scheduler.run(partitions)
        for ring in vars(self.rings).values():
            for full, empty in zip(ring.full, ring.empty, strict=True):
                assert full.phase == empty.phase, f"{ring.name}: what was committed was not released"
        assert all(len(turn) <= 1 for turn in self.turns.values())

    def _consumer(self, c: int) -> Callable[[], None]:
        consume = self.rewired(forward.consumer)
        return lambda: consume("o", Buffers([["o"]] * 3), Anything(), None, self.rings, self.call, c, self.O)

    def ring(self, name: str, stages: int, readers: int) -> Any:
        """A pipeline.Ring with its own methods."""
        ring = SimpleNamespace(
            name=name, STAGES=stages, BYTES=1, buffers=Buffers([[None] for _ in range(stages)]),
            full=Buffers([Barrier(1) for _ in range(stages)]), empty=Buffers([Barrier(readers) for _ in range(stages)]),
        )  # fmt: skip
        for method in ("acquire", "commit", "load", "wait", "release", "skip"):
            setattr(ring, method, self.rewired(getattr(pipeline.Ring, method)).__get__(ring))
        return ring

    # ---- what stands for the device

    def rewired(self, function: Any) -> Callable[..., Any]:
        """The Python of a jitted function, with these names in place of its module's."""
        plain = function.fn
        names = {**plain.__globals__, **{n: getattr(mask, n) for n in ("key_range", "mask_free_range", "tile_of")}}
        names |= {
            "gl": _Language(self.program, self.programs), "mbarrier": self, "tma_load": self.tma_load, "PIECE": 64,
            "put_tile": self.put_tile, "take_tile": self.take_tile, "begin_claim": self.begin_claim,
            "end_claim": self.end_claim, "take_turn": self.take_turn, "pass_turn": self.pass_turn,
            "matrix": lambda buffer: buffer[0], "scores": self.scores, "warpgroup_mma": self.multiply, "INF": torch.inf,
            "cap": lambda S, *_: S, "mask": self.mask, "rescale": lambda o, _: o,
            "stay_before": lambda _: None, "uniform": lambda x: x, "wait_for_stores": lambda: None,
            "warpgroup_mma_wait": lambda _, deps: deps[0] if len(deps) == 1 else deps,
            "softmax": lambda S, *_: (_Scores(S), "m", Anything(), "alpha"), "half_block": self.half_block,
            "finalize": lambda *_: (Anything(), Anything()), "store_by_tma": self.store,
        }  # fmt: skip
        if function is forward.consumer:
            names["step"] = self.rewired(forward.step)
        return FunctionType(plain.__code__, names, plain.__name__)

    def wait(self, barrier: Barrier, parity: int) -> None:
        self.scheduler.until(lambda: barrier.phase % 2 != parity)

    def arrive(self, barrier: Barrier, count: int = 1) -> None:
        self.scheduler.until()
        barrier.arrive()

    def expect(self, barrier: Barrier, size: int) -> None:
        assert size == 1

    def tma_load(self, descriptor: str, at: list[int], barrier: Barrier, buffer: list[Any]) -> None:
        self.scheduler.until()
        buffer[0] = (descriptor, *at)
        barrier.arrive()

    def put_tile(self, ring: Any, n: int, row: int, bh: int) -> None:
        ring.acquire(n)[0] = (row, bh)
        ring.commit(n)

    def take_tile(self, ring: Any, n: int) -> tuple[int, int]:
        tile = ring.wait(n)[0]
        ring.release(n)
        return tile[0], _Int(tile[1])

    def begin_claim(self, counter: list[int]) -> int:
        counter[0] += 1
        return counter[0] - 1

    def end_claim(self, claim: int, counter: list[int], total: int) -> int:
        if claim == total - 1:
            counter[0] = 0
        return claim + self.programs

    def take_turn(self, consumer: int) -> None:
        self.scheduler.until(lambda: bool(self.turns[consumer]))
        self.turns[consumer].pop()

    def pass_turn(self, consumer: int) -> None:
        self.scheduler.until()
        self.turns[consumer].append("turn")
        assert len(self.turns[consumer]) == 1, (
            "a second arrival at a named barrier counts for the threads that wait there"
        )

    def scores(self, q: Any, k: Any) -> tuple[Any, ...]:
        return q, k

    def multiply(self, P: Any, v: Any, o: Any, **_: Any) -> str:
        q, k = P.S
        who = int(threading.current_thread().name)
        assert q[0] == "q", q
        assert k[0] == "k", k
        assert v == ("v", *k[1:]), (k, v)
        self.log.append(("block", who, q[1:4], k[1:4], P.S in self.masked))
        return "o"

    def mask(self, S: Any, first: int, j0: int, *_: Any) -> Any:
        assert (S[0][3], S[1][3]) == (first, j0)
        self.masked.add(S)
        return S

    def half_block(
        self, m: Any, sums: Any, q: Any, n: int, first: int, j0: int, rings: Any, *_: Any
    ) -> tuple[Any, ...]:
        k = rings.k.wait(n)[0]
        rings.k.release(n)
        assert k[3] == j0
        v = rings.v.wait(n)[0]
        self.masked.add((q, k))
        self.multiply(_Scores((q, k)), v, "o")
        rings.v.release(n)
        return "o", m, sums

    def store(self, tile: Any, buffer: Any, descriptor: str, at: list[int]) -> None:
        self.log.append(("store", int(threading.current_thread().name), tuple(at[:3])))


class _Int(int):
    def to(self, _: Any) -> int:
        return self


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
        self.program_id = lambda _: program
        self.num_programs = lambda _: programs
        self.minimum, self.maximum, self.static_range = min, max, range
        self.convert_layout = lambda x, *_, **__: x
