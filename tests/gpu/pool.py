"""Cases checked by many processes at once: compiling kernels takes most of the time, and one process compiles one."""

from __future__ import annotations

import os
import tempfile
import time
import traceback
from collections import defaultdict
from collections.abc import Mapping
from concurrent.futures import ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import cache_on_gpu
import torch
from cache_cases import CacheCase
from cases import Case
from close import assert_close
from covering import specialisation
from poison import poisoned_memory
from where import DEVICE, backend_of, moved, set_up

import tilewise


@dataclass(frozen=True)
class Verdict:
    fault: str  # "" if there is none
    seconds: float = 0.0  # with compiling, in the first case of a specialisation


def check(case: Case | CacheCase, backend: str | None, **changes: Any) -> None:
    """AssertionError if a result is over its budget, and whatever a backend may raise. changes: more options."""
    if isinstance(case, CacheCase):
        return cache_on_gpu.check(case, backend, DEVICE)
    inputs = moved(case.build())
    with tilewise.checked():
        with poisoned_memory():
            got = case.run(backend, inputs, **changes)
        assert_close(got, **inputs)


def verdicts(
    cases: Mapping[str, Case | CacheCase], twice: frozenset[str], processes: int, limit: float
) -> dict[str, Verdict]:
    """Of each case by name. twice: those whose gradients are also asked for reproducibly, which other kernels may do.

    Cases of one specialisation go to one process, so that nothing is compiled twice; they end up in Triton's cache on
    disk, where every later process finds them. limit: seconds for all of them; who is not through by then fails.
    """
    groups = defaultdict(list)
    for name, case in cases.items():
        of_case = cache_on_gpu.specialisation if isinstance(case, CacheCase) else specialisation
        groups[(backend_of(name), *of_case(case).items())].append((name, case, name in twice))
    slow_first = sorted(groups.values(), key=lambda group: -max(_columns(case) for _, case, _ in group))
    found: dict[str, Verdict] = {}
    with tempfile.TemporaryDirectory() as notes:
        pool = ProcessPoolExecutor(processes, get_context("spawn"), _begin, (notes,))
        tasks = [pool.submit(_check_group, group) for group in slow_first]
        done, waiting = wait(tasks, limit)
        for task in done:
            if not isinstance(task.exception(), BrokenProcessPool):
                found |= task.result()
        at_work = sorted(note.read_text() for note in Path(notes).iterdir())
        for process in (pool._processes or {}).values() if waiting else ():
            process.kill()
        pool.shutdown(cancel_futures=True)
    lost = f"no verdict: a process died, or {limit:g} s were over. At work were then {at_work}"
    return {name: found.get(name, Verdict(lost)) for name in cases}


def _columns(case: Case | CacheCase) -> int:
    return case.dim + (case.v_dim or case.dim)


_notes = Path()
_lost_to = ""  # the case that broke this process's device


def _begin(notes: str) -> None:
    global _notes
    _notes = Path(notes) / str(os.getpid())
    set_up()


def _check_group(group: list[tuple[str, Case | CacheCase, bool]]) -> dict[str, Verdict]:
    global _lost_to
    found = {}
    for name, case, twice in group:
        _notes.write_text(name)
        start = time.perf_counter()
        if DEVICE == "cuda" and not _lost_to:
            torch.cuda.empty_cache()  # the others want some of it
        fault = (
            f"not run: {_lost_to!r} broke the device of its process"
            if _lost_to
            else _fault(case, twice, backend_of(name))
        )
        found[name] = Verdict(fault, time.perf_counter() - start)
        if fault and not _lost_to and not _alive():
            _lost_to = name
    _notes.unlink(missing_ok=True)
    return found


def _fault(case: Case | CacheCase, twice: bool, backend: str | None) -> str:
    try:
        check(case, backend)
        if twice:
            check(case, backend, deterministic=True)
    except AssertionError as error:
        return f"{case}\n{error}"
    except Exception:  # what it raises is what is asked here
        return f"{case}\n{traceback.format_exc(limit=-12)}"
    return ""


def _alive() -> bool:
    """False once a kernel has read or written where it must not: all that follows fails then."""
    if DEVICE == "cpu":
        return True
    try:
        torch.cuda.synchronize()
    except RuntimeError:
        return False
    return True
