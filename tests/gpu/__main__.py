"""`python -m tests.gpu`: all tests of this folder on this machine's GPU, in several processes at once, and the stamp.

First what most tests want compiled, by a pool; then a process for each of PARTS, of which the first has a pool for the
cases; then what wants the GPU's memory, or its time, for itself. Each process takes what passed in it off the stamp's
failed tests, which at the beginning are all.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
PARTS = (("cases", "cache"), ("hopper",), ("promises", "hot"), ("torch", "integrations", "parallel"))
ALONE = ("large",)


def pytest_of(names: tuple[str, ...], *options: str) -> list[str]:
    files = [str(HERE / f"test_gpu_{name}.py") for name in names]
    return [sys.executable, "-m", "pytest", "-q", "--tb=short", *options, *files]


def collected() -> list[str]:
    """The names of all tests. RuntimeError where there is a file that no part has, or one that is not there."""
    names = tuple(name for part in (*PARTS, ALONE) for name in part)
    parts = {f"test_gpu_{name}.py" for name in names}
    if parts != (found := {path.name for path in HERE.glob("test_*.py")}):
        raise RuntimeError(f"PARTS has {sorted(parts - found)}, and lacks {sorted(found - parts)}")
    asked = pytest_of(names, "--collect-only", "-p", "no:cacheprovider")
    lines = subprocess.run(asked, capture_output=True, text=True, check=True, cwd=ROOT).stdout.splitlines()
    return [line for line in lines if "::" in line]


def main() -> int:
    sys.path[:0] = [str(HERE), str(HERE.parent)]
    import jobs
    import pool
    import stamp
    import where

    if where.WHY_NOT:
        print(where.WHY_NOT)
        return 2
    start = time.perf_counter()
    names = collected()
    if not where.REHEARSAL:
        stamp.write({}, names)
        found = pool.verdicts(jobs.promised(), where.PROCESSES, 400.0)
        print(f"{len(found)} cases compiled: {time.perf_counter() - start:.0f} s", flush=True)
    environment = os.environ | {where.COMPILED: "1"}
    running = [(part, subprocess.Popen(pytest_of(part), env=environment, cwd=ROOT, stdout=subprocess.PIPE,
                                       stderr=subprocess.STDOUT, text=True)) for part in PARTS]  # fmt: skip
    for part, process in running:
        _say(part, process.communicate()[0], start)
    done = subprocess.run(pytest_of(ALONE), env=environment, cwd=ROOT, capture_output=True, text=True, check=False)
    _say(ALONE, done.stdout, start)
    why = "a rehearsal: no stamp" if where.REHEARSAL else stamp.stale()
    print(why or f"{len(names)} tests: stamped")
    return 1 if why else 0


def _say(part: tuple[str, ...], output: str, start: float) -> None:
    """What a person has to know of it: failures and the last line."""
    lines = output.splitlines()
    failures = next(
        (n for n, line in enumerate(lines) if "= FAILURES =" in line or "= ERRORS =" in line), len(lines) - 12
    )
    print(f"---- {', '.join(part)}: {time.perf_counter() - start:.0f} s", *lines[failures:], sep="\n", flush=True)


if __name__ == "__main__":
    sys.exit(main())
