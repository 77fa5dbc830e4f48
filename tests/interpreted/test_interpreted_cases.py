"""Triton's kernels, interpreted, against the fp64 reference."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from close import assert_close
from triton_cases import interpreted, interpreted_case

NAMES = os.environ.get("TILEWISE_CASES")  # a file with one name a line: a part of them


@pytest.mark.usefixtures("poisoned")
@pytest.mark.parametrize("name", Path(NAMES).read_text().splitlines() if NAMES else interpreted())
def test_case(name: str, backend: str) -> None:
    case = interpreted_case(name)
    inputs = case.build()
    try:
        assert_close(case.run(backend, inputs), **inputs)
    except AssertionError as error:
        raise AssertionError(f"{case}\n{error}") from None
