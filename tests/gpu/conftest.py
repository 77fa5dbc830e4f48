"""What needs a GPU. Skipped, with its reason, elsewhere; a full run that passes is stamped (`stamp.py`)."""

from __future__ import annotations

import os
import time
from collections import Counter, defaultdict
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from multiprocessing import active_children
from pathlib import Path
from typing import Any

import jobs
import pool
import pytest
import stamp
import torch
from where import BACKEND, COMPILED, DEVICE, PROCESSES, REHEARSAL, WHY_NOT, set_up

import tilewise

HERE = Path(__file__).parent
SECONDS = 500.0  # for the cases of the pool

notes: list[str] = []  # for the summary
counts: Counter[str] = Counter()
outcomes: dict[str, list[str]] = defaultdict(list)
deselected: set[str] = set()
at_work: dict[str, Future[dict[str, pool.Verdict]]] = {}

set_up()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if HERE in item.path.parents:
            item.add_marker(pytest.mark.gpu)
            if WHY_NOT:
                item.add_marker(pytest.mark.skip(reason=WHY_NOT))
    items.sort(key=lambda item: bool(_case_of(item)))  # while the others run, the pool works on these


def pytest_collection_finish(session: pytest.Session) -> None:
    if WHY_NOT or session.config.option.collectonly or not any(HERE in item.path.parents for item in session.items):
        return
    chosen = {name for item in session.items if (name := _case_of(item))}
    worker = ThreadPoolExecutor(1)  # one pool after the other
    at_work["compiled"] = worker.submit(_judge, {} if REHEARSAL or os.environ.get(COMPILED) else jobs.promised())
    at_work["verdicts"] = worker.submit(_judge, jobs.cases(chosen))


def _case_of(item: pytest.Item) -> str:
    """The name of the case that a test asks the pool for; "" where it asks for none."""
    ours = HERE in item.path.parents and hasattr(item, "callspec")
    return item.callspec.params.get("case_name", "") if ours else ""


@pytest.fixture
def backend() -> str:
    return BACKEND


@pytest.fixture
def device() -> str:
    return DEVICE


@pytest.fixture
def cuda() -> None:
    """For what has no counterpart on a CPU: streams, graphs, the memory of a device."""
    if REHEARSAL:
        pytest.skip("a rehearsal on the CPU")


@pytest.fixture(autouse=True)
def contents_are_checked() -> Iterator[None]:
    with tilewise.checked():
        yield


@pytest.fixture(autouse=True)
def memory_is_given_back() -> Iterator[None]:
    """So that what one test leaves in PyTorch's cache is not missing in the next, which may take 100 GB."""
    yield
    if DEVICE == "cuda":
        torch.cuda.empty_cache()


@pytest.fixture(scope="session")
def compiled() -> None:
    """For tests that are not about compiling: they find the kernels of PROMISED compiled."""
    at_work["compiled"].result()


@pytest.fixture(scope="session")
def verdicts() -> dict[str, pool.Verdict]:
    """Of all selected cases."""
    return at_work["verdicts"].result()


def _judge(asked: dict[str, pool.Job]) -> dict[str, pool.Verdict]:
    start = time.perf_counter()
    found = pool.verdicts(asked, PROCESSES, SECONDS)
    slowest = sorted(found, key=lambda name: -found[name].seconds)[:8]
    notes.append(f"{len(found)} cases on {PROCESSES} processes in {time.perf_counter() - start:.0f} s; the slowest:")
    notes.extend(f"  {found[name].seconds:6.1f} s  {name}" for name in slowest)
    return found


# ---- the summary and the stamp ---------------------------------------------------------------------------------------


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    if report.when == "call" or report.outcome != "passed":
        counts[report.outcome] += 1
        outcomes[report.outcome].append(report.nodeid)


def pytest_deselected(items: list[pytest.Item]) -> None:
    deselected.update(item.nodeid for item in items if HERE in item.path.parents)


def pytest_sessionfinish(session: pytest.Session, exitstatus: int) -> None:
    """Stamps a run of all of this folder on a GPU; a run of a part of it repairs the stamp of the same code."""
    unfinished = [future for future in at_work.values() if not (future.cancel() or future.done())]
    for process in active_children() if unfinished else ():  # interrupted, or -x: nobody waits for them
        process.kill()
    if WHY_NOT or REHEARSAL or exitstatus not in (0, 1) or hasattr(session.config, "workerinput"):
        return  # no worker has seen it all, and an interrupted run has not either
    items = [item for item in getattr(session, "items", []) if HERE in item.path.parents]
    whole = not any("::" in arg for arg in session.config.args)
    if deselected or {item.path for item in items} != set(HERE.glob("test_*.py")):
        there = deselected | {item.nodeid for item in items}
        files = {name.partition("::")[0] for name in there} if whole else set()
        left = stamp.repair(set(outcomes["passed"]), set(outcomes["skipped"]), there, files)
        notes.append(f"a run of a part: the stamp has {left} failed tests left")
    elif whole:
        stamp.write(dict(counts), outcomes["failed"])
        notes.append(f"stamped: {stamp.STAMP}")


def pytest_terminal_summary(terminalreporter: Any) -> None:
    for note in notes:
        terminalreporter.write_line(note)
