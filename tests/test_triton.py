"""The Triton backend on a machine without a GPU: through Triton's interpreter, and what it says when it cannot.

The interpreter is chosen when Triton is imported, by TRITON_INTERPRET, and then no kernel of the process can be
compiled. So the files in `interpreted/` run in processes of their own, and here is what starts them.
"""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from collections import Counter
from itertools import combinations, product
from pathlib import Path

import pytest
import torch
from cases import NAMED
from covering import excluded, options, pairs
from triton_cases import TIMES, covering_samples, each_time, interpreted, interpreted_case, kind, shards, small_samples

import tilewise

TESTS = Path(__file__).parent
SHARDS = 5
CASES = "test_interpreted_cases.py"
OTHERS = sorted(path.name for path in TESTS.glob("interpreted/test_*.py") if path.name != CASES)

needs_triton = pytest.mark.skipif(
    importlib.util.find_spec("triton") is None, reason="needs Triton, which torch's CPU build lacks"
)


def in_the_interpreter(file: str, **environment: str) -> None:
    """Runs a file of interpreted/; fails with what its failures print."""
    kept = {name: x for name, x in os.environ.items() if not name.startswith(("PYTEST_", "TRITON_"))}
    done = subprocess.run(
        [sys.executable, "-m", "pytest", f"tests/interpreted/{file}", "-q", "--tb=short", "-p", "no:cacheprovider"],
        cwd=TESTS.parent, env=kept | {"TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"} | environment,
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, f"{file} in the interpreter:\n{done.stdout[-20000:]}\n{done.stderr[-4000:]}"
    assert " passed" in done.stdout
    assert " skipped" not in done.stdout


@needs_triton
@pytest.mark.parametrize("now", [True, pytest.param(False, marks=pytest.mark.slow)])
@pytest.mark.parametrize("shard", range(SHARDS))
def test_cases(shard: int, now: bool, tmp_path: Path) -> None:
    names = tmp_path / "names"
    names.write_text("\n".join(shards(SHARDS, now)[shard]))
    in_the_interpreter(CASES, TILEWISE_CASES=str(names))


@needs_triton
@pytest.mark.parametrize("file", OTHERS)
def test_file(file: str) -> None:
    in_the_interpreter(file)


def test_a_failure_in_the_interpreter_shows(tmp_path: Path) -> None:
    names = tmp_path / "names"
    names.write_text("no such case")
    with pytest.raises(AssertionError, match="no such case"):
        in_the_interpreter(CASES, TILEWISE_CASES=str(names))


# ---- which cases those are -------------------------------------------------------------------------------------------


def test_the_samples_hold_every_pair_of_options_twice() -> None:
    """Every pair that the sampler gives at all is there; and it gives all but those that rule each other out."""
    values: dict[str, set[object]] = {}
    for case in small_samples().values():
        for name, value in options(case).items():
            values.setdefault(name, set()).add(value)
    wanted = [
        pair for a, b in combinations(values, 2) for x, y in product(values[a], values[b])
        if not excluded(pair := ((a, x), (b, y)))
    ]  # fmt: skip
    assert len(wanted) > 1500
    for times in (1, TIMES):
        held = Counter(pair for case in covering_samples(times).values() for pair in pairs(options(case)))
        rare = {pair: held[pair] for pair in wanted if held[pair] < times}
        assert not rare


def test_nearly_every_kind_of_named_case_is_there() -> None:
    """All but those that are large by nature."""
    run = {kind(name.removeprefix("named ")) for name in interpreted() if name.startswith("named ")}
    large = {kind(name) for name in NAMED} - run
    assert large <= {kind(name) for name in (
        "3 randn, 1024, d 128", "everything 1000, 512", "causal 2048 x 1024", "empty sequences first, long last",
        "block mask, every option", "packed, block mask", "dropout, origin, blocks", "slopes 0",
        "slopes of both signs, far keys", "block mask of everything", "whole tiles 0", "whole block mask 0",
        "whole tiles, every option",
    )}  # fmt: skip


def test_cases_are_found_by_name() -> None:
    assert all(interpreted_case(name) == case for name, case in interpreted().items())


def test_shards_share_the_cases_out() -> None:
    parts = shards(SHARDS, True) + shards(SHARDS, False)
    assert sorted(name for part in parts for name in part) == sorted(interpreted())
    assert len(each_time()) > 200


# ---- without the interpreter and without a GPU -----------------------------------------------------------------------


def test_on_a_cpu_it_says_why_not() -> None:
    q = torch.randn(1, 2, 16, 16)
    with pytest.raises(ValueError, match="backend 'triton' cannot do this"):
        tilewise.attention(q, q, q, backend="triton")
    assert "tiled: chosen" in tilewise.explain(tilewise.Problem.of(q, q, q)[0])


def test_without_triton_the_others_work() -> None:
    """Where Triton cannot be imported, "triton" gives its reason and "tiled" is chosen."""
    program = (
        "import sys; sys.modules['triton'] = None\n"
        "import torch, tilewise\n"
        "q = torch.randn(1, 2, 16, 16)\n"
        "print(tilewise.explain(tilewise.Problem.of(q, q, q)[0]))\n"
        "tilewise.attention(q, q, q)"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, cwd=TESTS.parent, check=False
    )
    assert done.returncode == 0, done.stderr
    assert "triton: " in done.stdout
    assert "tiled: chosen" in done.stdout
