"""Context parallelism on two GPUs, by NCCL: values, gradients, and dropout's bits are those of one."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch
from ranks import Ranks
from test_parallel import CASES, Case, check

import tilewise

pytestmark = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")

TWO = {
    "causal, grouped, heads in parts": Case(
        "ring 2", dtype=torch.bfloat16, length=2048, batch=2, heads=8, kv_heads=4, dims=(128, 128), head_groups=2,
        through_lse=True),
    "window, contiguous": Case(
        "ring 2", "contiguous", dtype=torch.float16, length=2048, dims=(64, 64), mask=tilewise.sliding_window(300)),
    "ulysses": Case("ulysses 2", dtype=torch.bfloat16, length=2048, kv_heads=2, dims=(128, 64), through_lse=True),
    **{name: replace(case, dims=(64, 64), dtype=torch.float16)
       for name, case in CASES.items() if case.over in ("ring 2", "ulysses 2")},
    **{f"{name}, 2": replace(case, over=case.over.replace("4", "2"), dtype=torch.bfloat16, dims=(32, 32))
       for name, case in CASES.items() if case.over in ("ring 4", "ulysses 4")},
}  # fmt: skip


@pytest.fixture(scope="module")
def ranks() -> Iterator[Ranks]:
    pool = Ranks(2, timeout=120, backend="nccl")
    yield pool
    pool.close()


@pytest.mark.parametrize("name", TWO)
def test_two_gpus_are_one(ranks: Ranks, name: str) -> None:
    ranks(check, TWO[name])
