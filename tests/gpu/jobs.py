"""What the pool is asked: the cases that tests name, and before them those that the other tests want compiled."""

from __future__ import annotations

import cache_jobs
import pool
from hopper_cases import on_hopper, on_hopper_twice, promised_names
from test_torch import CASES as TRACED
from triton_cases import PROMISED, for_triton, on_gpu
from where import WHY_NOT_HOPPER


def promised() -> dict[str, pool.Job]:
    cases = {f"promised {name}": case for name, case in PROMISED.items()}
    cases |= {f"traced {name}": for_triton(case) for name, case in TRACED.items()}
    found = {name: pool.of_case(name, case, twice=True) for name, case in cases.items()}
    names = set() if WHY_NOT_HOPPER else promised_names()
    return found | {name: _of_hopper(name) for name in names}


def cases(names: set[str]) -> dict[str, pool.Job]:
    hoppers = {} if WHY_NOT_HOPPER else on_hopper()
    found = {name: pool.of_case(name, case, twice=False) for name, case in on_gpu().items() if name in names}
    found |= {name: _of_hopper(name) for name in hoppers if name in names}
    return found | {name: job for name, job in cache_jobs.on_gpu().items() if name in names}


def _of_hopper(name: str) -> pool.Job:
    return pool.of_case(name, on_hopper()[name], name in on_hopper_twice())
