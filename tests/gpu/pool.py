"""Cases judged by many processes at once: compiling kernels takes most of the time, and one process compiles one."""

from __future__ import annotations

import os
import tempfile
import time
import traceback
from collections import defaultdict
from collections.abc import Callable, Hashable, Mapping
from concurrent.futures import ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch
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


def check(case: Case, backend: str, **changes: Any) -> None:
    """AssertionError if a result is over its budget, and whatever a backend may raise. changes: more options."""
    inputs = moved(case.build())
    with tilewise.checked():
        with poisoned_memory():
            got = case.run(backend, inputs, **changes)
        assert_close(got, **inputs)


@dataclass(frozen=True)
class Job:
    """find: "" or what is wrong, asked in a process of the pool. Jobs of one group go to one process, one after the
    other, so that nothing is compiled twice; what they compile ends up in Triton's cache on disk, where every later
    process finds it. cost: groups that may take long begin first."""

    find: Callable[[], str]
    group: Hashable
    cost: int


def of_case(name: str, case: Case, twice: bool) -> Job:
    """twice: its gradients are also asked for reproducibly, which other kernels may do."""
    backend = backend_of(name)
    group = (backend, *specialisation(case).items())
    return Job(partial(_fault, case, twice, backend), group, case.dim + case.v_dim)


def verdicts(jobs: Mapping[str, Job], processes: int, limit: float) -> dict[str, Verdict]:
    """Of each job by name. limit: seconds for all of them; who is not through by then fails."""
    groups = defaultdict(list)
    for name, job in jobs.items():
        groups[job.group].append((name, job))
    slow_first = sorted(groups.values(), key=lambda group: -max(job.cost for _, job in group))
    found: dict[str, Verdict] = {}
    with tempfile.TemporaryDirectory() as notes:
        pool = ProcessPoolExecutor(processes, get_context("spawn"), _begin, (notes,))
        tasks = [pool.submit(_do_group, group) for group in slow_first]
        done, waiting = wait(tasks, limit)
        for task in done:
            if not isinstance(task.exception(), BrokenProcessPool):
                found |= task.result()
        at_work = sorted(note.read_text() for note in Path(notes).iterdir())
        for process in (pool._processes or {}).values() if waiting else ():
            process.kill()
        pool.shutdown(cancel_futures=True)
    lost = f"no verdict: a process died, or {limit:g} s were over. At work were then {at_work}"
    return {name: found.get(name, Verdict(lost)) for name in jobs}


_notes = Path()
_lost_to = ""  # the case that broke this process's device


def _begin(notes: str) -> None:
    global _notes
    _notes = Path(notes) / str(os.getpid())
    set_up()


def _do_group(group: list[tuple[str, Job]]) -> dict[str, Verdict]:
    global _lost_to
    found = {}
    for name, job in group:
        _notes.write_text(name)
        start = time.perf_counter()
        if DEVICE == "cuda" and not _lost_to:
            torch.cuda.empty_cache()  # the others want some of it
        fault = f"not run: {_lost_to!r} broke the device of its process" if _lost_to else job.find()
        found[name] = Verdict(fault, time.perf_counter() - start)
        if fault and not _lost_to and not _alive():
            _lost_to = name
    _notes.unlink(missing_ok=True)
    return found


def _fault(case: Case, twice: bool, backend: str) -> str:
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
