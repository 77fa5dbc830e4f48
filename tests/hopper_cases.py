"""Which cases the Hopper backend is tried on, on a GPU: Triton's that it takes, and a covering array of its own."""

from __future__ import annotations

import random
from collections.abc import Hashable
from dataclasses import replace
from functools import cache
from itertools import pairwise
from typing import Any

import pytest
import torch
from cases import Case
from covering import cover_product
from triton_cases import on_gpu

from tilewise import Band, Problem, causal
from tilewise.kernels.hopper import backend, config

F16, BF16, F32 = torch.float16, torch.bfloat16, torch.float32
PREFIX = "hopper "  # of the names

ARRAY: dict[str, tuple[Hashable, ...]] = {  # what its kernel is compiled for
    "dtype": (F16, BF16), "d": config.WIDTHS, "d_v": (64, 128, 256, "d"),
    "band": ("full", "causal", "ragged", "left", "window"), "softcap": (False, True), "sink": (None, F32),
    "length": (1024, config.LONG), "dropout_p": (0.0, 0.3),
}  # fmt: skip
VARIED: dict[str, tuple[Hashable, ...]] = {  # and with sequences of unlike lengths and BlockMasks
    "dtype": (F16, BF16), "d": tuple(config.BACKWARD), "d_v": ("d",), "band": ("full", "causal", "window"),
    "softcap": (False, True), "sink": (None, F32), "length": (1024,), "mask": (None, "blocks"),
    "layout": ("dense", "packed", "packed, own keys"), "lens": ("", "q", "k", "qk"), "dropout_p": (0.0, 0.1),
}  # fmt: skip
WIDE = VARIED | {"d": tuple(wide for wide in config.WIDTHS if wide > max(config.BACKWARD))}  # with those it is Triton's
VALUES = 3  # cases a row

CALLS: dict[str, tuple[int, int, Band]] = {  # head size, length, Band: each kind of its kernels
    "64": (64, 520, Band()), "64 causal": (64, 1000, causal), "64 causal, long": (64, 2304, causal),
    "128": (128, 512, Band()), "128 causal": (128, 1024, causal), "128 window": (128, 777, Band(300, 5)),
    "256": (256, 300, Band()), "256 causal": (256, 640, causal),
}  # fmt: skip
SPANS = (170, 0, 301, 4, 128, 430)  # of packed sequences
OPTIONS: dict[str, dict[str, Any]] = {  # of packed ones, by name: head size, Band, and whether lengths are given
    "64": {"d": 64}, "64 causal": {"d": 64, "band": causal}, "128 causal": {"d": 128, "band": causal},
    "128 lengths": {"d": 128, "band": Band(200, 3), "lens": True}, "256 causal": {"d": 256, "band": causal},
}  # fmt: skip
LAYOUTS = ("contiguous", "transposed", "gaps", "heads", "last", "offset")


def seeds(count: int) -> list[Any]:
    """Of a played protocol: a third of them each time, all before a release."""
    return [n if n < count // 3 else pytest.param(n, marks=pytest.mark.slow) for n in range(count)]


def promised() -> dict[str, Case]:
    """Of the kernels for which more is promised than right numbers: their tests find them compiled."""
    dense = {
        name: Case(
            dtype=BF16, batch=3, heads=4, kv_heads=4, q_len=length, k_len=length, dim=d, v_dim=d, band=band,
            layout="transposed", lse_grad=False,
        )
        for name, (d, length, band) in CALLS.items()
    }  # fmt: skip
    cases = dict(dense)
    cases |= {f"{name} blocks": replace(dense[name], mask="blocks") for name in ("64", "128", "256")}
    for name in ("64", "128 causal"):
        length = dense[name].q_len
        lens = (length, length // 3, 0)
        cases[f"{name} lengths"] = replace(dense[name], q_lens=lens, k_lens=lens)
    tokens, cu = sum(SPANS), tuple(sum(SPANS[:n]) for n in range(len(SPANS) + 1))
    for name, options in OPTIONS.items():
        d, used = options["d"], tuple(n * 2 // 3 for n in SPANS) if "lens" in options else None
        cases[f"{name} packed"] = Case(
            dtype=BF16, batch=len(SPANS), heads=4, kv_heads=2, q_len=tokens, k_len=tokens, dim=d, v_dim=d, cu_q=cu,
            q_lens=used, k_lens=used, band=options.get("band", Band()), lse_grad=False,
        )  # fmt: skip
    return {f"promised {name}": case for name, case in cases.items()}


@cache
def on_hopper() -> dict[str, Case]:
    cases = {name: case for name, case in on_gpu().items() if is_taken(case)} | promised()
    for name, array in (("array", ARRAY), ("varied", VARIED), ("wide", WIDE)):
        rows = enumerate(cover_product(array))
        cases |= {f"{name} {n}.{m}": array_case(row, m) for n, row in rows for m in range(VALUES)}
    return {PREFIX + name: replace(case, grad=case.grad and has_backward(case)) for name, case in cases.items()}


def promised_names() -> frozenset[str]:
    return frozenset(PREFIX + name for name in promised())


def has_backward(case: Case) -> bool:
    """Of its own."""
    if is_narrow(case):
        return True
    return not case.dropout_p and case.mask is case.cu_q is case.q_lens is case.k_lens is None


def is_narrow(case: Case) -> bool:
    return max(case.dim, case.v_dim) <= max(config.BACKWARD)


def on_hopper_twice() -> frozenset[str]:
    """The names of a case a row whose gradients other kernels make when they are asked for reproducibly."""
    return frozenset(
        name
        for name, case in on_hopper().items()
        if (
            (name.startswith((f"{PREFIX}array", f"{PREFIX}varied")) and name.endswith(".1")) or name in promised_names()
        )
        and is_narrow(case)
        and case.mask is None
    )


def is_taken(case: Case) -> bool:
    """Whether why_not says so of the case on a Hopper GPU."""
    if case.mask == "bool" or case.bias_dims is not None or case.slopes:
        return False  # what is left can be asked without the tensors' contents
    if not case.q_len * case.k_len * case.batch * case.kv_heads:
        return False
    q, k, v, sink = (
        torch.empty(shape, dtype=case.dtype, device="meta")
        for shape in (
            (case.batch, case.heads, case.q_len, case.dim), (case.batch, case.kv_heads, case.k_len, case.dim),
            (case.batch, case.kv_heads, case.k_len, case.v_dim), (case.heads,),
        )
    )  # fmt: skip
    options = {"sink": sink if case.sink else None, "scale": case.scale, "softcap": case.softcap}
    return backend.why_not(replace(Problem.of(q, k, v, mask=case.band, **options)[0], device="sm90")) is None


def array_case(row: dict[str, Any], n: int) -> Case:
    """The n-th case of a row: what the row leaves open is drawn anew; only at n = 0 the heads fill their tiles."""
    r = random.Random(f"{sorted(row.items(), key=repr)} {n}")

    def size(wide: int) -> int:
        below = max(wide // 2, *(other for other in (0, *config.WIDTHS) if other < wide))
        return wide if n == 0 else r.randrange(below + 8, wide + 8, 8)

    top = row["length"]
    k_len = r.choice((top, top + r.randint(1, 300))) if top == config.LONG else r.choice((1, 64, 129, 333, 700, top))
    q_len = r.choice((k_len, k_len, r.randint(1, 800)))
    bound = max(q_len, k_len) + 5
    band = {
        "full": Band(), "causal": causal,
        "ragged": Band(None, r.randint(-70, bound), r.choice(("bottom_right", "top_left"))),
        "left": Band(r.randint(-9, bound), None), "window": Band(r.randint(0, bound), r.randint(-5, 90)),
    }[row["band"]]  # fmt: skip
    if row["band"] == "causal":
        q_len = k_len if k_len < 64 else k_len - 64 * r.randint(0, k_len // 64 - 1)
    kv_heads, dim = r.choice((1, 2, 3)), size(row["d"])
    case = Case(
        seed=n, dtype=row["dtype"], batch=r.choice((1, 2, 3)), heads=kv_heads * r.choice((1, 2, 4)), kv_heads=kv_heads,
        q_len=q_len, k_len=k_len, dim=dim, v_dim=dim if row["d_v"] == "d" else size(row["d_v"]),
        std=r.choice((0.3, 1.0, 2.0)), layout=r.choice(LAYOUTS), scale=r.choice((None, None, 0.1)), band=band,
        softcap=r.choice((0.7, 5.0, 50.0)) if row["softcap"] else 0.0, sink=row["sink"], mask=row.get("mask"),
        mask_dims=r.choice(("", "b", "h", "bh")), grad=True, lse_grad=n == 1, dropout_p=row["dropout_p"],
        dropout_seed=r.randrange(2**63),
    )  # fmt: skip
    return with_lengths(r, case, row) if "layout" in row else case


def with_lengths(r: random.Random, case: Case, row: dict[str, Any]) -> Case:
    """The case with its sequences cut at random, with tokens of none behind the last; and with lengths within them."""
    spans = {"q": [case.q_len] * case.batch, "k": [case.k_len] * case.batch}
    if row["layout"] != "dense":
        cu = {}
        for side, length in (("q", case.q_len), ("k", case.k_len)):
            cuts = sorted(r.choices(range(length + 1), k=case.batch - 1))
            cu[side] = (0, *cuts, max([0, *cuts, length - r.choice((0, 0, 7))]))
        if row["layout"] == "packed":
            case, cu["k"] = replace(case, k_len=case.q_len), cu["q"]
        spans = {side: [b - a for a, b in pairwise(ends)] for side, ends in cu.items()}
        case = replace(case, cu_q=cu["q"], cu_k=None if row["layout"] == "packed" else cu["k"])
    given = {f"{side}_lens": tuple(r.choice((n, r.randint(0, n))) for n in spans[side]) for side in row["lens"]}
    return replace(case, garbage=bool(given) or case.cu_q is not None, **given)
