"""The error budget accepts what is right and rejects what is wrong: a test that never fails would prove nothing."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from cases import Case, sample
from close import Budget, Results, assert_close, evaluate, standard
from torch import Tensor

from tilewise import causal

F16, BF16, F32, F64 = torch.float16, torch.bfloat16, torch.float32, torch.float64
GRADIENTS = ("dq", "dk", "dv", "dbias", "dslopes", "dsink")


def over(budget: Budget, got: Results) -> set[str]:
    """The results that are over their budget."""
    return {name for name, (ratio, _) in budget.errors(got).items() if not ratio <= 1}


def test_of_4096_rows_it_rejects_what_a_tolerance_would_let_pass() -> None:
    inputs = Case(
        dtype=BF16, heads=1, kv_heads=1, q_len=4096, k_len=4096, dim=64, v_dim=64, band=causal, grad=False
    ).build()
    q, k, v, budget = inputs["q"], inputs["k"], inputs["v"], Budget(**inputs)
    wide, lse = standard(F32)(q, k, v, mask=causal)
    o = wide.to(BF16)
    rows, row, last = o.clone(), o.clone(), o.clone()
    rows[:, :, 2048:2112] *= 0.85
    row[:, :, 3000] *= 0.85
    last[:, :, -1] = 0
    hidden = torch.ones(4096, 4096, dtype=torch.bool)
    hidden[1152:, 1024:1152] = False  # a key tile that the rows below it do not get
    dropped, dropped_lse = standard(F32)(q, k, v, mask=causal & hidden)
    assert over(budget, {"o": o, "lse": lse}) == set()
    assert over(budget, {"o": budget.plain["o"], "lse": lse}) == set()
    for x in (o * 1.01, o * 0.99, rows, row, last, dropped.to(BF16)):
        assert over(budget, {"o": x, "lse": lse}) == {"o"}
    for x in (lse.to(BF16).float(), dropped_lse, lse + 1e-3, lse / math.log(2)):
        assert over(budget, {"o": o, "lse": x}) == {"lse"}


def rounded(inputs: dict[str, Any]) -> Results:
    """What a good backend gives: computed in the accumulator's dtype from the o that it rounded, and rounded once."""
    results = evaluate(standard(F64 if inputs["q"].dtype == F64 else F32), **inputs)
    like = {"o": "q", "dq": "q", "dk": "k", "dv": "v", "dbias": "bias", "dslopes": "alibi_slopes", "dsink": "sink"}
    return {name: x.to(inputs[like[name]].dtype) if name in like else x for name, x in results.items()}


EVERYTHING = {
    dtype: Case(
        dtype=dtype, batch=2, heads=4, kv_heads=2, q_len=150, k_len=170, dim=64, v_dim=64, band=causal,
        bias_dims="hqk", bias_dtype=dtype,
        slopes="h", sink=F32, dropout_p=0.1, k_lens=(170, 99),
    )
    for dtype in (F16, BF16, F32, F64)
}  # fmt: skip


@pytest.mark.parametrize("dtype", EVERYTHING)
def test_accepts_plain_and_the_rounded_reference(dtype: torch.dtype) -> None:
    inputs = EVERYTHING[dtype].build()
    budget = Budget(**inputs)
    assert over(budget, budget.plain) == set()
    assert over(budget, rounded(inputs)) == set()
    assert_close(rounded(inputs), **inputs)


def _one_row(x: Tensor) -> Tensor:
    """One row of a group, half of what it should be."""
    x = x.clone()
    x[:, :, 20] *= 0.5
    return x


def _first(x: Tensor, value: float) -> Tensor:
    x = x.clone()
    x.view(-1)[0] = value
    return x


FAULTS: dict[str, tuple[tuple[str, ...], Callable[[Tensor], Tensor]]] = {
    "twice": (("o", "lse", *GRADIENTS), lambda x: x * 2),
    "nothing": (("o", "lse", *GRADIENTS), torch.zeros_like),
    "negative": (("o", "lse", *GRADIENTS), torch.neg),
    "5 % more": (("o", "lse", "dq", "dk", "dv", "dbias"), lambda x: x * 1.05),
    "one row": (("o", "dq", "dk", "dv"), _one_row),
    "heads exchanged": (("o", "lse", *GRADIENTS), lambda x: x.roll(1, 0 if x.dim() == 1 else 1)),
    "rows exchanged": (("o", "dq", "dk", "dv"), lambda x: x.roll(1, 2)),
    "nan": (("o", "lse", *GRADIENTS), lambda x: _first(x, math.nan)),
    "inf": (("o", "lse", *GRADIENTS), lambda x: _first(x, math.inf)),
}  # fmt: skip


@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize("dtype", EVERYTHING)
def test_rejects(dtype: torch.dtype, fault: str) -> None:
    inputs = EVERYTHING[dtype].build()
    budget, good = Budget(**inputs), rounded(inputs)
    names, spoil = FAULTS[fault]
    for name in names:
        assert over(budget, good | {name: spoil(good[name])}) == {name}, name


def test_rejects_single_precision_where_double_is_due() -> None:
    inputs = EVERYTHING[F64].build()
    single = evaluate(standard(F32), **inputs)
    assert over(Budget(**inputs), {name: x.double() for name, x in single.items()}) == set(single)


def test_rejects_tf32_where_fp32_is_due() -> None:
    inputs = EVERYTHING[F32].build()

    def tf32(x: Tensor) -> Tensor:  # 10 bits of mantissa
        return (x.view(torch.int32) + 0x1000 & ~0x1FFF).view(F32)

    options = {name: x for name, x in inputs.items() if name not in ("q", "k", "v", "do", "dlse", "frozen")}
    got = evaluate(
        standard(None), tf32(inputs["q"]), tf32(inputs["k"]), tf32(inputs["v"]), inputs["do"], inputs["dlse"], **options
    )
    assert over(Budget(**inputs), got) >= {"o", "lse", "dq", "dk", "dv"}


def test_demands_exact_zeros_where_nothing_can_arrive() -> None:
    case = Case(q_len=70, k_len=40, band=causal, q_lens=(65,), k_lens=(33,), sink=F32)
    inputs = case.build()
    budget, good = Budget(**inputs), rounded(inputs)
    assert over(budget, good) == set()
    for name, row in (("o", 31), ("o", 65), ("dq", 31), ("dq", 65), ("dk", 33), ("dv", 33)):
        spoilt = good[name].clone()
        spoilt[0, 0, row, 0] = 1e-30
        assert over(budget, good | {name: spoilt}) == {name}, (name, row)
    for row, value in ((31, -1e30), (65, 0.0), (40, -math.inf)):
        spoilt = good["lse"].clone()
        spoilt[0, 0, row] = value
        assert over(budget, good | {"lse": spoilt}) == {"lse"}


def test_a_result_too_many_or_too_few_is_a_fault() -> None:
    inputs = Case().build()
    good = rounded(inputs)
    with pytest.raises(AssertionError, match="results are"):
        assert_close(good | {"dsink": torch.zeros(2)}, **inputs)
    with pytest.raises(KeyError):
        assert_close({name: x for name, x in good.items() if name != "dk"}, **inputs)
    with pytest.raises(AssertionError, match="expected"):
        assert_close(good | {"dq": good["dq"][:, :, 1:]}, **inputs)


def test_accepts_the_rounded_reference_of_every_sample() -> None:
    """Of the budget's terms, those for rounding suffice for an implementation that rounds its results once."""
    for seed in range(0, 300, 3):
        case = sample(seed)
        inputs = case.build()
        got = {name: x for name, x in rounded(inputs).items() if name not in case.frozen}
        assert over(Budget(**inputs), got) == set(), (seed, case)
