"""Which calls on key/value caches are tried on a GPU: the named and sampled ones, and a covering array of their own."""

from __future__ import annotations

import random
from collections.abc import Hashable
from dataclasses import replace
from functools import cache
from typing import Any

import torch
from cache_cases import BF16, F16, F32, F64, FP8, CacheCase, sample
from covering import cover_product
from poison import poisoned_memory
from test_cache import BITS, NAMED

import tilewise
from tilewise import causal, sliding_window

PREFIX = "cache "  # of the names
SAMPLES = 40

ARRAY: dict[str, tuple[Hashable, ...]] = {  # any two values meet in some row
    "dtype": (F16, BF16, F32, FP8), "page": (None, 1, 7, 16, 64, 256), "group": (1, 4, 8, 16),
    "queries": (1, 2, 5, 16, 70, 300), "dims": ((64, 64), (128, 128), (111, 72), (256, 256)),
    "option": (
        None, "window", "softcap", "sink", "alibi", "rotary half", "rotary interleaved", "starts", "rows", "packed",
        "strided", "prefix",
    ),
}  # fmt: skip


@cache
def on_gpu() -> dict[str, CacheCase]:
    found = {f"named {name}": case for name, case in NAMED.items()}
    found |= {f"bits {name}": case for name, case in BITS.items()}  # whose tests find them compiled
    found |= {f"array {n}": array_case(row, n) for n, row in enumerate(cover_product(ARRAY))}
    found |= {f"sample({seed})": sample(seed) for seed in range(SAMPLES)}
    return {
        PREFIX + name: replace(case, dtype=F32) if case.dtype is F64 else case
        for name, case in found.items()
    }  # fmt: skip


def array_case(row: dict[str, Any], n: int) -> CacheCase:
    """The n-th row with lengths drawn anew: about two tiles of keys, a sequence that is new, one with few."""
    r = random.Random(n)
    storage = FP8 if row["dtype"] is FP8 else None
    (dim, v_dim), queries, option = row["dims"], row["queries"], row["option"]
    stored = (r.randint(100, 300), 0, r.randint(1, 40))
    new = (queries, max(1, queries // 3), queries)
    case = CacheCase(
        seed=n, dtype=BF16 if storage else row["dtype"], storage=storage, heads=row["group"], kv_heads=1, dim=dim,
        v_dim=v_dim, stored=stored, new=new, room=max(stored) + queries + r.randint(0, 9), page=row["page"],
    )  # fmt: skip
    if row["group"] <= 4:
        case = replace(case, heads=2 * row["group"], kv_heads=2)
    changes: dict[str, Any] = {
        "window": {"band": sliding_window(r.choice((0, 40, 150)))}, "softcap": {"softcap": 5.0}, "sink": {"sink": True},
        "alibi": {"slopes": r.choice(("h", "bh"))}, "starts": {"starts": (r.randint(1, 90), 0, 1)},
        "rotary half": {"rotary": "half", "rotary_dim": r.choice((32, dim // 2 * 2))},
        "rotary interleaved": {"rotary": "interleaved", "rotary_dim": r.choice((32, dim // 2 * 2))},
        "rows": {"rows": (4, -1, 0)}, "packed": {"packed": True}, "strided": {"strided": True},
        "prefix": {"prefix": 130, "prefix_page": row["page"], "rotary": "half"},
    }.get(option, {})  # fmt: skip
    return replace(case, **changes)


def specialisation(case: CacheCase) -> dict[str, Hashable]:
    """What kernels may be compiled for: cases that have it in common are best compiled by one process."""
    return {
        "dtype": case.dtype, "storage": case.storage, "d": case.dim, "d_v": case.v_dim, "page": case.page,
        "group": case.heads // case.kv_heads, "band": case.band == causal, "softcap": case.softcap > 0,
        "sink": case.sink, "alibi": case.slopes, "rotary": case.rotary, "starts": case.starts is not None,
        "packed": case.packed, "prefix": case.prefix is not None, "latent": case.v_in_k,
    }  # fmt: skip


def check(case: CacheCase, backend: str | None, device: str) -> None:
    """AssertionError where a result, or what is stored, is not what it must be. All of it is done on the device."""
    with torch.device(device), tilewise.checked():
        call = case.build()
        before = call.cache.k.clone(), call.cache.v.clone()
        with poisoned_memory():
            o, lse = call.run(backend)
        call.check_storage(*before)
        call.check_results(o, lse)
