"""Which cases the Triton kernels are tried on: in the interpreter small ones, on a GPU those of real sizes too."""

from __future__ import annotations

import random
import re
from collections.abc import Hashable
from dataclasses import replace
from functools import cache
from typing import Any

import torch
from cases import LAYOUTS, NAMED, Case, sample
from covering import cover, cover_product, options, tile_steps

from tilewise import Band, causal

F16, BF16, F32, F64 = torch.float16, torch.bfloat16, torch.float32, torch.float64


def for_triton(case: Case, bf16: bool = True) -> Case:
    """The case in the dtypes that there are: fp64 becomes fp32, and without bf16 that becomes fp16."""
    there = {F64: F32} if bf16 else {F64: F32, BF16: F16}
    dtypes = {name: there.get(x, x) for name, x in vars(case).items() if isinstance(x, torch.dtype)}
    return replace(case, tiles=None, **dtypes)


# ---- in the interpreter ----------------------------------------------------------------------------------------------

SEEDS, TIMES = 9000, 2
LONG = 2.2  # of `interpreter_cost`: named cases above it wait for a release, and so does each pair's second time
TILE = 16  # rows and keys, about as the kernels have them there
MOST, MOST_OF_A_KIND, MOST_SAMPLED = 9, 200, 160  # pairs of tiles; larger cases wait for a GPU


def interpreter_cost(case: Case) -> float:
    """Seconds, roughly: 0.1 whatever its size, 0.01 a pair of tiles; a backward goes over them twice more."""
    return (0.1 + 0.01 * tile_steps(case, TILE)) * (3 if case.grad else 1)


@cache
def interpreted() -> dict[str, Case]:
    """The small named cases and the smallest of each kind, and samples that hold each two options `TIMES` times."""
    named = {smaller(for_triton(case, bf16=False)): name for name, case in NAMED.items()}  # equal ones once
    cases, kinds = {}, set()
    for case, name in sorted(named.items(), key=lambda item: interpreter_cost(item[0])):
        first = kind(name) not in kinds
        kinds.add(kind(name))
        if tile_steps(case, TILE) <= (MOST_OF_A_KIND if first else MOST):
            cases[f"named {name}"] = case
    return cases | {f"sample({seed})": case for seed, case in (covering_samples(1) | covering_samples()).items()}


def interpreted_case(name: str) -> Case:
    """The case of that name in `interpreted`, which takes seconds to choose them all."""
    if name.startswith("named "):
        return smaller(for_triton(NAMED[name.removeprefix("named ")], bf16=False))
    return replace(sample(int(name.removeprefix("sample(").removesuffix(")"))), tiles=None)


def kind(name: str) -> str:
    """What a named case is about: its name without numbers, and without the tiles, which a kernel chooses itself."""
    return re.sub(r"\d+(\.\d+)?|, tiles.*", "", name)


def smaller(case: Case) -> Case:
    """Half the heads, where they are in two groups or more, and if it is still large one batch: seldom the point."""
    if case.kv_heads and case.kv_heads % 2 == 0 and case.slopes is None:
        case = replace(case, heads=case.heads // 2, kv_heads=case.kv_heads // 2)
    alike = case.cu_q is None and not case.q_lens and not case.k_lens and case.slopes != "bh"
    return replace(case, batch=1) if alike and case.batch > 1 and tile_steps(case, TILE) > 60 else case


@cache
def covering_samples(times: int = TIMES) -> dict[int, Case]:
    pool = small_samples()
    seeds, cases = list(pool), list(pool.values())
    chosen = cover([options(case) for case in cases], times, lambda n: interpreter_cost(cases[n]))
    return {seeds[n]: cases[n] for n in sorted(chosen)}


@cache
def each_time() -> frozenset[str]:
    """Those of `interpreted` that run at each commit: named ones that are not `LONG`, and each two options once."""
    once = {f"sample({seed})" for seed in covering_samples(1)}
    return frozenset(
        name for name, case in interpreted().items()
        if (interpreter_cost(case) <= LONG if name.startswith("named ") else name in once)
    )  # fmt: skip


@cache
def small_samples() -> dict[int, Case]:
    """By seed; of those samples as they are that the interpreter takes."""
    every = ((seed, sample(seed)) for seed in range(SEEDS))
    return {
        seed: replace(case, tiles=None) for seed, case in every
        if case.dtype in (F16, F32) and tile_steps(case, TILE) <= MOST_SAMPLED
    }  # fmt: skip


def shards(count: int, now: bool) -> list[list[str]]:
    """The names of `each_time`, or of the others of `interpreted`, in `count` parts that take about equally long."""
    parts: list[list[str]] = [[] for _ in range(count)]
    loads = [0.0] * count
    chosen = {name: case for name, case in interpreted().items() if (name in each_time()) == now}
    for name, case in sorted(chosen.items(), key=lambda item: -interpreter_cost(item[1])):
        least = loads.index(min(loads))
        parts[least].append(name)
        loads[least] += interpreter_cost(case)
    return parts


# ---- on a GPU --------------------------------------------------------------------------------------------------------

DIMS = (16, 32, 64, 128, 256, 512)
ARRAY: dict[str, tuple[Hashable, ...]] = {  # what kernels are compiled for
    "dtype": (F16, BF16, F32), "d": DIMS, "d_v": DIMS, "band": (False, True), "mask": (None, "bool", "blocks"),
    "bias": (None, "bhqk", "hqk", "bqk", "qk", "hk", "bk", "k", "q", "h", "b", ""), "bias_dtype": ("fp32", "own"),
    "alibi": (False, True), "softcap": (False, True), "sink": (False, True), "dropout": (False, True),
    "layout": ("dense", "packed", "packed, own keys"), "lens": ("", "q", "k", "qk"), "grad": ("none", "qkv", "all"),
    "aligned": (True, False),
}  # fmt: skip
SAMPLES = 24  # of real size
VALUES = 3  # cases a row, with one specialisation and other run-time values
LENGTHS = (1, 3, 17, 64, 100, 127, 128, 129, 200, 256, 333, 512, 700)
MOST_PAIRS = 12_000_000  # of all heads together: the reference keeps some 30 fp64 matrices of that size


@cache
def array() -> list[dict[str, Hashable]]:
    """The covering array: any two values of ARRAY meet in some row."""
    return cover_product(ARRAY)


def array_case(row: dict[str, Any], n: int) -> Case:
    """The n-th case of a row: what the row leaves open is drawn anew; only at n = 0 its sizes are the padded ones."""
    r = random.Random(f"{sorted(row.items(), key=repr)} {n}")

    def size(padded: int) -> int:
        return padded if n == 0 else r.randint(1 if padded == 16 else padded // 2 + 1, padded)

    kv_heads, batch = r.choice((1, 2, 3)), r.choice((1, 2, 3))
    dim = size(row["d"])
    strided = "offset" if not row["aligned"] else r.choice(("contiguous", "contiguous", *LAYOUTS[:3], *LAYOUTS[4:]))
    case = Case(
        seed=n, dtype=row["dtype"], batch=batch, heads=kv_heads * r.choice((1, 2, 4)), kv_heads=kv_heads, dim=dim,
        v_dim=dim if row["d"] == row["d_v"] and r.random() < 0.7 else size(row["d_v"]), std=r.choice((0.3, 1.0, 2.0)),
        layout=strided, do_layout=r.choice((strided, "offset" if not row["aligned"] else "contiguous")),
        scale=r.choice((None, None, 0.0, -0.2, 0.1)), softcap=r.choice((0.7, 5.0, 50.0)) if row["softcap"] else 0.0,
        sink=r.choice((F32, row["dtype"])) if row["sink"] else None,
        slopes=r.choice(("h", "bh")) if row["alibi"] else None,
        dropout_p=r.choice((0.001, 0.1, 0.5, 0.9)) if row["dropout"] else 0.0,
        dropout_seed=r.randrange(-(2**63), 2**64),
        bias_dims=row["bias"], bias_dtype=F32 if row["bias_dtype"] == "fp32" else row["dtype"],
        bias_fill=r.choice(("normal", "normal", "-inf entries", "-inf rows")), mask=row["mask"],
        mask_dims=r.choice(("bhqk", "bk", "hqk", "qk", "k", "bh", "")), mask_density=r.choice((0.0, 0.3, 0.9)),
        grad=row["grad"] != "none", lse_grad=r.random() < 0.6,
        frozen=() if row["grad"] == "all" else ("dbias", "dslopes", "dsink"),
    )  # fmt: skip
    case = _array_lengths(r, case, row)
    bound = max(case.q_len, case.k_len) + 5
    bands = (causal, causal, Band(r.randint(0, bound), r.randint(-5, 9)), Band(None, r.randint(-9, bound), "top_left"))
    return replace(case, band=r.choice(bands)) if row["band"] else case


def _array_lengths(r: random.Random, case: Case, row: dict[str, Any]) -> Case:
    spans_q = [r.choice(LENGTHS) for _ in range(case.batch)]
    spans_k = [r.choice(LENGTHS) for _ in range(case.batch)]
    if row["layout"] == "dense":
        spans_q, spans_k = spans_q[:1] * case.batch, spans_k[:1] * case.batch
        case = replace(case, q_len=spans_q[0], k_len=spans_k[0])
    else:
        spans_q[r.randrange(case.batch)] = r.choice((0, *LENGTHS))
        spans_k = spans_q if row["layout"] == "packed" else spans_k
        cu_q, cu_k = (tuple(sum(spans[:n]) for n in range(case.batch + 1)) for spans in (spans_q, spans_k))
        tail = r.choice((0, 0, 7))
        case = replace(
            case, q_len=cu_q[-1] + tail, k_len=cu_k[-1] + tail, cu_q=cu_q,
            cu_k=None if row["layout"] == "packed" else cu_k,
        )  # fmt: skip
    lens = {"q": spans_q, "k": spans_k}
    given = {f"{side}_lens": tuple(r.choice((n, r.randint(0, n))) for n in lens[side]) for side in row["lens"]}
    return replace(case, garbage=bool(given) or case.cu_q is not None, **given)


def real_size(seed: int) -> Case:
    """`sample(seed)` with lengths of up to 1500 and head sizes of up to 256, in rare cases 512."""
    r = random.Random(f"real size {seed}")
    case = for_triton(sample(seed))
    dims = (16, 40, 64, 64, 64, 80, 96, 128, 128, 128, 128, 192, 256, 256, 512)
    dim = r.choice(dims)
    case = replace(case, dim=dim, v_dim=dim if case.dim == case.v_dim else r.choice(dims))
    return max(
        (_longer(case, times) for times in (1, 2, 3, 5)), key=lambda c: _pairs(c) if _pairs(c) <= MOST_PAIRS else -1
    )


def _pairs(case: Case) -> int:
    return case.heads * (case.batch if case.cu_q is None else 1) * case.q_len * case.k_len


def _longer(case: Case, times: int) -> Case:
    def scaled(values: tuple[int, ...] | None) -> tuple[int, ...] | None:
        return values and tuple(n * times for n in values)

    left, right = (bound if bound is None else bound * times for bound in (case.band.left, case.band.right))
    return replace(
        case, q_len=case.q_len * times, k_len=case.k_len * times, cu_q=scaled(case.cu_q), cu_k=scaled(case.cu_k),
        q_lens=scaled(case.q_lens), k_lens=scaled(case.k_lens), band=replace(case.band, left=left, right=right),
    )  # fmt: skip


# Option sets for what is promised beyond right numbers (bits that hold still, no synchronisation, graphs, streams).
PROMISED: dict[str, Case] = {
    name: Case(**({"batch": 3, "heads": 4, "q_len": 600, "k_len": 700, "dim": 64, "v_dim": 64, "dtype": BF16} | given))
    for name, given in {
        "full": {}, "full, fp16": {"dtype": F16}, "full, fp32": {"dtype": F32}, "causal": {"band": causal},
        "causal, d 128": {"band": causal, "dim": 128, "v_dim": 128}, "window": {"band": Band(140, 3)},
        "boolean": {"mask": "bool", "mask_dims": "bqk"},
        "blocks": {"mask": "blocks", "mask_dims": "bh", "band": causal},
        "bias": {"bias_dims": "bhqk", "softcap": 5.0}, "shared bias": {"bias_dims": "hk", "band": causal},
        "slopes, sink, dropout": {"slopes": "bh", "sink": F32, "dropout_p": 0.2},
        "dropout": {"dropout_p": 0.5},
        "packed": {"batch": 5, "q_len": 905, "k_len": 905, "cu_q": (0, 170, 170, 471, 475, 905), "band": causal},
        "lengths": {"q_lens": (600, 233, 0), "k_lens": (350, 700, 7), "band": causal},
    }.items()
}  # fmt: skip


@cache
def on_gpu() -> dict[str, Case]:
    """All that is compared with the reference there."""
    return {
        **{f"named {name}": for_triton(case) for name, case in NAMED.items() if max(case.dim, case.v_dim) <= 512},
        **{f"array {n}.{m}": array_case(row, m) for n, row in enumerate(array()) for m in range(VALUES)},
        **{f"real size {seed}": real_size(seed) for seed in range(SAMPLES)},
        **{f"promised {name}": case for name, case in PROMISED.items()},
    }
