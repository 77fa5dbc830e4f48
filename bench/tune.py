"""`python -m bench.tune --direction forward --d 128`: time a grid of Configs: the evidence of kernels/triton/config.py.

Every candidate is compiled and checked on a small problem, many processes at a time; those that are right are timed by
one process on each length in turn, and after each length only those within a quarter of the best go on. Candidates that
fail (no room in shared memory, say) are rows with their reason. A backward's time is that of the whole backward, whose
other kernels keep their present Config; with `--alone` it is that of the one kernel.
"""

from __future__ import annotations

import argparse
import csv
import importlib
import itertools
import math
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import Tensor

import tilewise
from tilewise import Band, causal

from . import timing
from .gpu import slug
from .gpu_cases import DTYPES, OPERATIONS, Attend, Call, Setting, cumulative, draw, random_blocks, timed
from .worker import Failed, Worker, parallel

RESULTS = Path(__file__).parent / "results"
SHARED_BYTES = 227 * 1024  # of a block, the largest of any card's
REGISTERS = 256  # of a thread: accumulators of more spill
CHECK_LENGTH = 1024
WINDOW = 1024
KEEP = 1.25  # times the best: what is slower on one length is not timed on the next
TOLERANCE = {"bf16": 3e-2, "fp16": 1e-2, "fp32": 1e-3}


@dataclass(frozen=True)
class Task:
    """What is tuned. mask: full, causal, window, blocks (a quarter, at random). layout: dense, packed."""

    direction: str  # forward, dkdv, dq, dbias
    d: int
    dtype: str = "bf16"
    mask: str = "full"
    layout: str = "dense"
    bias: bool = False
    alone: bool = False  # dkdv, dq: without the backward's other kernels

    @property
    def measured(self) -> str:
        return "forward" if self.direction == "forward" else "backward"


@dataclass(frozen=True)
class Candidate:
    rows: int
    keys: int
    warps: int
    stages: int
    tma: bool

    def __str__(self) -> str:
        return f"{self.rows}x{self.keys} {self.warps} warps {self.stages} stages{' tma' if self.tma else ''}"


# --- the grid ------------------------------------------------------------------------------------------------------


def candidates(
    task: Task, rows: Sequence[int], keys: Sequence[int], warps: Sequence[int], stages: Sequence[int],
    tma: Sequence[bool] = (False,),
) -> list[Candidate]:  # fmt: skip
    """The grid without what cannot be good: pipelines beyond shared memory, accumulators beyond the registers.

    >>> grid = candidates(Task("forward", 128), [64, 128], [64, 128], [4, 8], [3])
    >>> Candidate(128, 128, 8, 3, False) in grid, Candidate(128, 128, 4, 3, False) in grid
    (True, False)
    """
    grid = (Candidate(*values) for values in itertools.product(rows, keys, warps, stages, tma))
    return [c for c in grid if pipeline_bytes(task, c) <= SHARED_BYTES and accumulator_registers(task, c) <= REGISTERS]


def padded(d: int) -> int:
    return max(16, 2 ** math.ceil(math.log2(d)))


def pipeline_bytes(task: Task, c: Candidate) -> int:
    """Bytes of the tiles in flight, at least: K and V, or Q and dO where the loop is over queries."""
    moving = c.rows if task.direction == "dkdv" else c.keys
    return 2 * moving * padded(task.d) * DTYPES[task.dtype].itemsize * max(1, c.stages - 1)


def accumulator_registers(task: Task, c: Candidate) -> int:
    """Registers a thread of the fp32 accumulators: the results of the loop, and the scores (and dP) of a tile."""
    d = padded(task.d)
    kept = {"forward": c.rows * d, "dkdv": 2 * c.keys * d, "dq": c.rows * d, "dbias": c.rows * c.keys}[task.direction]
    scores = c.rows * c.keys  # half of them are spent before the other half is needed in a backward
    return (kept + scores) // (32 * c.warps)


# --- one candidate -------------------------------------------------------------------------------------------------


@contextmanager
def chosen(task: Task, candidate: Candidate) -> Iterator[mock.Mock]:
    """`config.choose` answers with the candidate for the task's direction; nothing remembers an earlier answer."""
    config = importlib.import_module("tilewise.kernels.triton.config")
    before = config.choose
    choice = config.Config(**asdict(candidate))
    answered = mock.Mock()

    def choose(problem: Any, direction: str) -> Any:
        if direction != task.direction:
            return before(problem, direction)
        answered()
        return choice

    forget()
    with mock.patch.object(config, "choose", choose):
        yield answered
    forget()


@contextmanager
def alone(task: Task) -> Iterator[None]:
    """A backward launches the task's kernel only; what it reads of the others' is whatever lies there."""
    host = importlib.import_module("tilewise.kernels.triton.host")
    plan = host._backward

    def one_of(*args: Any) -> Any:
        others = {"dq", "dkdv"} - {task.direction}
        return plan(*args)._replace(**dict.fromkeys(others, lambda *tensors: None))

    with mock.patch.object(host, "_backward", one_of) if task.alone else nullcontext():
        yield


def forget() -> None:
    """Empty the functools caches of the backend's modules."""
    for module in [sys.modules[name] for name in sys.modules if name.startswith("tilewise.kernels.triton")]:
        for value in list(vars(module).values()):
            if callable(getattr(value, "cache_clear", None)):
                value.cache_clear()


def call_of(task: Task, setting: Setting, batch: int, heads: int, seq: int) -> tuple[Call, list[Tensor], Tensor]:
    """(what is timed, its inputs, the visible pairs as a dense mask or an empty tensor where that would be large)."""
    tensors = draw(setting, batch, heads, seq, task.d, dtype=task.dtype)
    mask: Any = {"full": None, "causal": causal, "window": Band(WINDOW // 2 if seq <= WINDOW else WINDOW - 1, 0)}.get(
        task.mask
    )
    if task.mask == "blocks":
        mask = random_blocks(seq, 0.25, setting.device)
    *inputs, do = tensors
    if task.bias:
        inputs += draw(setting, 1, heads, seq, seq, dtype=task.dtype, count=1)

    def dense(q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None = None) -> Tensor:
        return tilewise.attention(q, k, v, mask=mask, bias=bias, backend=setting.backend)

    attend: Attend = dense
    if task.layout == "packed":
        cu = cumulative([seq] * batch, setting.device)
        inputs = [t.transpose(1, 2).flatten(0, 1).contiguous() for t in inputs[:3]] + inputs[3:]
        do = do.transpose(1, 2).flatten(0, 1).contiguous()

        def attend(q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None = None) -> Tensor:
            return tilewise.attention_packed(q, k, v, cu, mask=mask, bias=bias, backend=setting.backend)

    return timed(attend, inputs, do, task.measured), [*inputs, do], visible(mask, seq, setting.device)


def visible(mask: Any, seq: int, device: str) -> Tensor:
    if seq > CHECK_LENGTH:
        return torch.empty(0)
    if mask is None:
        return torch.ones(seq, seq, dtype=torch.bool, device=device)
    return mask.dense(seq, seq, device=device) if isinstance(mask, Band) else mask.to_dense()[0, 0]


def check(question: tuple[Task, Candidate], setting: Setting | None = None, seq: int = CHECK_LENGTH) -> None:
    """Compile the candidate and compare its result with plain fp32 attention. Raises what is wrong."""
    task, candidate = question
    setting = setting or Setting()
    with chosen(task, candidate) as answered:
        call, tensors, seen = call_of(task, setting, batch=1, heads=2, seq=seq)
        result = call()
    if not answered.called:
        raise RuntimeError(f"config.choose was not asked for {task.direction!r}: the candidate was not run")
    *inputs, do = tensors
    leaves = [t.detach().float().requires_grad_() for t in inputs]
    q, k, v = (t.transpose(0, 1)[None] if task.layout == "packed" else t for t in leaves[:3])
    scores = q @ k.transpose(2, 3) / math.sqrt(task.d) + (leaves[3] if task.bias else 0)
    o = scores.masked_fill(~seen, -torch.inf).softmax(-1) @ v
    o = o[0].transpose(0, 1) if task.layout == "packed" else o
    wanted = (o,) if task.measured == "forward" else torch.autograd.grad(o, leaves, do.float())
    for n, (got, want) in enumerate(zip((result,) if isinstance(result, Tensor) else result, wanted, strict=True)):
        error = ((got.float() - want).norm() / want.norm()).item()
        if not error <= TOLERANCE[task.dtype]:
            raise RuntimeError(f"wrong: tensor {n} by {error:.3g} relative RMS")


def clock(question: tuple[Task, Candidate, int]) -> float:
    """Milliseconds of the task's call at this length, 16k tokens of hidden size 2048."""
    task, candidate, seq = question
    setting = Setting()
    batch = max(1, setting.tokens // seq)
    heads = 16 if task.bias else setting.heads(task.d)
    with chosen(task, candidate), alone(task):
        call, _, _ = call_of(task, setting, 1 if task.bias else batch, heads, seq)
        read = timing.timer(call, timing.overwritten())
        return min(read() for _ in range(2))


# --- all of them ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Result:
    """times: milliseconds at each length, in the order of the lengths, as far as it came."""

    candidate: Candidate
    times: tuple[float, ...] = ()
    error: str = ""


def compile_all(grids: dict[Task, list[Candidate]], processes: int, deadline: float) -> dict[Task, list[Result]]:
    results: dict[Task, list[Result]] = {task: [] for task in grids}
    questions = [(task, candidate) for task, grid in grids.items() for candidate in grid]
    for (task, candidate), answer in parallel(check, questions, processes, deadline, seconds=90):
        results[task].append(Result(candidate, error=str(answer) if isinstance(answer, Failed) else ""))
    return results


def clock_all(worker: Worker, task: Task, results: list[Result], lengths: list[int], deadline: float) -> list[Result]:
    """The results with their times; after each length those within KEEP of the best go on."""
    done = [result for result in results if result.error]
    running = [result for result in results if not result.error]
    for seq in lengths:
        timed_now = []
        for result in running:
            left = deadline - time.monotonic()
            try:
                if left <= 0:
                    raise Failed(f"skipped at {seq}: out of time")
                ms = worker.ask(clock, (task, result.candidate, seq), seconds=min(60, left))
                timed_now.append(replace(result, times=(*result.times, ms)))
            except Failed as failed:
                done.append(replace(result, error=str(failed)))
        running, dropped = keep(timed_now)
        done += dropped
    return order([*running, *done])


def keep(results: list[Result]) -> tuple[list[Result], list[Result]]:
    """(those whose last time is within KEEP of the best, the others)."""
    best = min((result.times[-1] for result in results), default=0.0)
    good = [result for result in results if result.times[-1] <= KEEP * best]
    return good, [result for result in results if result not in good]


def order(results: list[Result]) -> list[Result]:
    """Those with most lengths first, among them by the geometric mean of their times; failures last."""

    def rank(result: Result) -> tuple[bool, int, float]:
        mean = math.prod(result.times) ** (1 / len(result.times)) if result.times else math.inf
        return bool(result.error), -len(result.times), mean

    return sorted(results, key=rank)


def tflops(task: Task, seq: int, ms: float) -> float:
    setting = Setting()
    heads = 16 if task.bias else setting.heads(task.d)
    batch = 1 if task.bias else max(1, setting.tokens // seq)
    share = {"full": 1.0, "causal": 0.5, "blocks": 0.25, "window": min(1.0, WINDOW / seq)}[task.mask]
    operations = {"dkdv": 8.0, "dq": 6.0}[task.direction] if task.alone else OPERATIONS[task.measured]
    return operations * batch * heads * task.d * seq * seq * share / ms * 1e-9


FIELDS = [*(f.name for f in fields(Task)), *(f.name for f in fields(Candidate)), "seq", "ms", "tflops", "error"]


def lines(task: Task, results: list[Result], lengths: list[int]) -> list[dict[str, object]]:
    """The file's rows: one a candidate and length that was timed, one a failure."""
    found = []
    for result in results:
        named = {**asdict(task), **asdict(result.candidate)}
        for seq, ms in zip(lengths, result.times, strict=False):
            found.append(
                {**named, "seq": seq, "ms": round(ms, 4), "tflops": round(tflops(task, seq, ms), 1), "error": ""}
            )
        if result.error:
            found.append({**named, "seq": "", "ms": "", "tflops": "", "error": result.error})
    return found


def write(path: Path, task: Task, found: list[dict[str, object]]) -> None:
    """Put the task's rows into the file in place of its earlier ones."""
    old: list[dict[str, object]] = []
    if path.exists():
        with open(path, newline="") as file:
            old = list(csv.DictReader(file))
    mine = {name: str(value) for name, value in asdict(task).items()}
    old = [row for row in old if {name: row[name] for name in mine} != mine]
    path.parent.mkdir(parents=True, exist_ok=True)
    with open(path, "w", newline="") as file:
        writer = csv.DictWriter(file, FIELDS, lineterminator="\n")
        writer.writeheader()
        writer.writerows([*old, *found])


def table(task: Task, results: list[Result], lengths: list[int]) -> str:
    """TFLOP/s of each candidate at each length, the best first, then the failures."""
    out = [f"{'candidate':32}" + "".join(f"{seq:>9}" for seq in lengths) + "   TFLOP/s"]
    for result in results:
        rates = "".join(f"{tflops(task, seq, ms):9.0f}" for seq, ms in zip(lengths, result.times, strict=False))
        out.append(f"{result.candidate!s:32}{rates}" + (f"   {result.error}" if result.error else ""))
    return "\n".join(out)


def integers(text: str) -> list[int]:
    return [int(part) for part in text.split(",")]


def names(*allowed: str) -> Callable[[str], list[str]]:
    """A parser of some of these with commas between."""

    def listed(text: str) -> list[str]:
        if unknown := [part for part in text.split(",") if part not in allowed]:
            raise argparse.ArgumentTypeError(f"{', '.join(unknown)}: must be of {', '.join(allowed)}")
        return text.split(",")

    return listed


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="bench.tune", description=__doc__, epilog="several: with commas between")
    parser.add_argument("--direction", type=names("forward", "dkdv", "dq", "dbias"), required=True)
    parser.add_argument("--d", type=integers, required=True)
    parser.add_argument("--dtype", type=names(*DTYPES), default="bf16")
    parser.add_argument("--mask", type=names("full", "causal", "window", "blocks"), default="full")
    parser.add_argument("--layout", choices=["dense", "packed"], default="dense")
    parser.add_argument("--bias", action="store_true", help="with an additive bias and its gradient")
    parser.add_argument("--alone", action="store_true", help="time dkdv or dq without the backward's other kernels")
    parser.add_argument("--lengths", type=integers, default=[4096, 1024, 16384], help="the first decides who goes on")
    for name, values in (("rows", "32,64,128"), ("keys", "32,64,128"), ("warps", "4,8"), ("stages", "2,3")):
        parser.add_argument(f"--{name}", type=integers, default=values)
    parser.add_argument("--tma", choices=["no", "yes", "both"], default="no")
    parser.add_argument("--seconds", type=float, default=120.0, help="of everything")
    parser.add_argument("--processes", type=int, default=14, help="that compile at a time")
    parser.add_argument("--out", type=Path, help="instead of bench/results/tune_<gpu>.csv")
    parser.add_argument("--list", action="store_true", help="print the grid, no more")
    return parser.parse_args()


def tasks_of(args: argparse.Namespace) -> list[Task]:
    """All combinations of what was asked for; a dbias kernel runs only beside a bias."""

    def task(direction: str, d: int, dtype: str, mask: str) -> Task:
        alone = args.alone and direction in ("dkdv", "dq")
        return Task(direction, d, dtype, mask, args.layout, args.bias or direction == "dbias", alone)

    return list(itertools.starmap(task, itertools.product(args.direction, args.d, args.dtype, args.mask)))


def lengths_of(task: Task, lengths: list[int]) -> list[int]:
    """A bias is (1, 16, S, S): 4096 is long enough."""
    return list(dict.fromkeys(min(seq, 4096) for seq in lengths)) if task.bias else lengths


def main() -> None:
    args = parse()
    start = time.monotonic()
    deadline = start + args.seconds
    tma = {"no": [False], "yes": [True], "both": [False, True]}[args.tma]
    grids = {task: candidates(task, args.rows, args.keys, args.warps, args.stages, tma) for task in tasks_of(args)}
    for task, grid in grids.items():
        print(f"{task}: {len(grid)} candidates", flush=True)
        if args.list:
            print("\n".join(map(str, grid)))
    if args.list:
        return
    results = compile_all(grids, args.processes, start + 0.6 * args.seconds)
    print(f"compiled and checked: {time.monotonic() - start:.0f} s", flush=True)
    worker = Worker()
    try:
        device = slug(worker.ask(timing.facts, seconds=60)["device"])
    except Failed as failed:
        device = "gpu"
        print(f"no GPU: {failed}")
    for n, (task, checked) in enumerate(results.items()):
        lengths = lengths_of(task, args.lengths)
        share = (deadline - time.monotonic()) / (len(results) - n)  # what a task leaves, the next ones have
        found = clock_all(worker, task, checked, lengths, time.monotonic() + share)
        print(f"\n{task}\n{table(task, found, lengths)}", flush=True)
        write(args.out or RESULTS / f"tune_{device}.csv", task, lines(task, found, lengths))
    worker.stop()
    print(f"{time.monotonic() - start:.0f} s")


if __name__ == "__main__":
    main()
