"""Every backend against the fp64 reference, on named cases and thousands of sampled ones, and finite differences."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from itertools import combinations
from typing import Any

import pytest
import torch
from cases import NAMED, Case, forced_tiles, sample
from close import assert_close
from torch import Tensor

import tilewise
from tilewise import Band, causal

SAMPLES, CHUNK = 2500, 50
F16, F32, F64 = torch.float16, torch.float32, torch.float64

pytestmark = pytest.mark.usefixtures("poisoned")


@pytest.mark.parametrize("name", NAMED)
def test_named(name: str, backend: str) -> None:
    case = NAMED[name]
    inputs = case.build()
    assert_close(case.run(backend, inputs), **inputs)


@pytest.mark.parametrize("first", range(0, SAMPLES, CHUNK))
def test_sampled(first: int, backend: str) -> None:
    faults = []
    for seed in range(first, first + CHUNK):
        case = sample(seed)
        inputs = case.build()
        try:
            assert_close(case.run(backend, inputs), **inputs)
        except AssertionError as error:
            faults.append(f"sample({seed}) = {case}\n{error}")
    assert not faults, "\n\n".join([f"{len(faults)} of {CHUNK} cases are over their budget", *faults])


def test_the_samples_reach_every_option() -> None:
    """Each value of each option, and each option beside each other one."""
    cases = [sample(seed) for seed in range(SAMPLES)]
    options: dict[str, Callable[[Case], Any]] = {
        "dtype": lambda c: c.dtype, "packed": lambda c: c.cu_q is not None, "groups": lambda c: c.heads > c.kv_heads,
        "lengths": lambda c: bool(c.q_lens or c.k_lens), "garbage": lambda c: c.garbage,
        "align": lambda c: c.band.align, "band": lambda c: not c.band.is_full,
        "mask": lambda c: c.mask, "bias": lambda c: c.bias_dims is not None,
        "slopes": lambda c: c.slopes, "sink": lambda c: c.sink is not None, "scale": lambda c: c.scale,
        "softcap": lambda c: c.softcap > 0, "dropout": lambda c: c.dropout_p > 0, "origin": lambda c: any(c.origin),
        "tiles": lambda c: c.tiles is not None, "grad": lambda c: c.grad, "strides": lambda c: c.layout,
        "through lse": lambda c: c.grad and c.lse_grad, "strides of dO": lambda c: c.do_layout,
        "nothing": lambda c: 0 in (c.q_len, c.k_len), "more queries": lambda c: c.q_len > c.k_len,
        "many": lambda c: max(c.q_len, c.k_len) > 128,
    }  # fmt: skip
    for name, value in options.items():
        counts = Counter(value(case) for case in cases)
        assert len(counts) > 1, name
        assert min(counts.values()) >= 20, (name, counts)
    off = (None, False, "contiguous", "bottom_right")
    on = {name: {n for n, case in enumerate(cases) if value(case) not in off} for name, value in options.items()}
    rare = [(a, b) for a, b in combinations(on, 2) if len(on[a] & on[b]) < 5]
    assert not rare


GRADCHECK = {
    "plain": {},
    "causal, more queries than keys": {"q_len": 8, "k_len": 5, "band": causal},
    "grouped heads": {"heads": 6, "band": causal},
    "softcap": {"softcap": 0.8, "band": causal},
    "dropout": {"dropout_p": 0.4, "heads": 4},
    "bias, slopes, sink": {"heads": 4, "bias_dims": "hk", "slopes": "bh", "sink": F64},
    "every option": {"batch": 2, "heads": 4, "band": Band(4, 2), "mask": "bool", "mask_density": 0.8,
        "bias_dims": "bq", "slopes": "h",
                     "sink": F64, "softcap": 2.0, "dropout_p": 0.3, "scale": -0.6},
    "packed": {"batch": 3, "q_len": 9, "k_len": 9, "cu_q": (0, 4, 4, 9), "band": causal},
    "packed, every option": {"batch": 3, "heads": 4, "q_len": 11, "k_len": 9, "cu_q": (0, 6, 6, 10),
        "cu_k": (0, 3, 5, 9), "band": causal,
                             "bias_dims": "bqk", "slopes": "bh", "sink": F64, "softcap": 2.0, "dropout_p": 0.3},
    "lengths": {"batch": 2, "q_lens": (5, 7), "k_lens": (6, 2), "band": causal, "sink": F64},
    "tiles": {"q_len": 34, "k_len": 37, "heads": 2, "band": causal, "bias_dims": "k", "tiles": (16, 16)},
}  # fmt: skip


@pytest.mark.parametrize("name", GRADCHECK)
def test_gradients_by_finite_differences(name: str, backend: str) -> None:
    small = {"q_len": 7, "k_len": 7, "dim": 3, "v_dim": 2, "dtype": F64, "bias_dtype": F64, "slopes_dtype": F64}
    case = Case(**(small | GRADCHECK[name]))
    inputs = case.build()
    options = {key: x for key, x in inputs.items() if key not in ("q", "k", "v", "do", "dlse", "frozen")}
    names = [key for key in ("bias", "alibi_slopes", "sink") if key in options]
    leaves = [
        x.detach().requires_grad_() for x in (inputs["q"], inputs["k"], inputs["v"], *(options[key] for key in names))
    ]

    def call(q: Tensor, k: Tensor, v: Tensor, *optional: Tensor) -> tuple[Tensor, Tensor]:
        o, lse = case.attend(backend)(q, k, v, **(options | dict(zip(names, optional, strict=True))))
        return o, lse.masked_fill(lse == -torch.inf, 0.0)

    with forced_tiles(case.tiles):
        assert torch.autograd.gradcheck(call, leaves, fast_mode=name != "plain")


def test_fp32_is_fp32(backend: str) -> None:
    """An error near 1e-6, not TF32's 1e-3."""
    inputs = Case(q_len=300, k_len=300, dim=64, v_dim=64, band=causal).build()
    q, k, v = inputs["q"], inputs["k"], inputs["v"]
    o = tilewise.attention(q, k, v, mask=causal, backend=backend)
    exact = tilewise.attention(q.double(), k.double(), v.double(), mask=causal, backend=backend)
    assert ((o - exact).norm() / exact.norm()) < 2e-6


def test_the_two_causal_alignments_differ_where_lengths_do(backend: str) -> None:
    inputs = Case(q_len=20, k_len=30).build()
    q, k, v = inputs["q"], inputs["k"], inputs["v"]
    bottom_right = tilewise.attention(q, k, v, mask=causal, backend=backend)
    top_left = tilewise.attention(q, k, v, mask=Band(None, 0, "top_left"), backend=backend)
    torch.testing.assert_close(top_left, torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True))
    assert (bottom_right - top_left).abs().max() > 0.1
    square = (q, k[:, :, :20], v[:, :, :20])
    one, other = (
        tilewise.attention(*square, mask=Band(None, 0, align), backend=backend)
        for align in ("bottom_right", "top_left")
    )
    assert torch.equal(one, other)


def test_rows_of_the_lowest_finite_bias_give_the_mean_of_v(backend: str) -> None:
    """finfo.min is how others write a mask: such a row is uniform, as in PyTorch, and its gradients are finite."""
    q, k, v = (torch.randn(1, 2, 6, 8, generator=torch.Generator().manual_seed(i)).requires_grad_() for i in range(3))
    bias = torch.zeros(6, 6)
    bias[2] = torch.finfo(F32).min
    o = tilewise.attention(q, k, v, bias=bias, backend=backend)
    torch.testing.assert_close(o[:, :, 2], v.mean(2))
    o[:, :, 3:].sum().backward()  # as in training, nothing arrives at the row
    expected = torch.autograd.grad(
        torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=bias)[:, :, 3:].sum(), (q, k, v)
    )
    for x, grad in zip((q, k, v), expected, strict=True):
        torch.testing.assert_close(x.grad, grad)


def test_gradients_flow_through_lse_alone(backend: str) -> None:
    inputs = Case(dtype=F64, heads=4, kv_heads=4, q_len=30, k_len=40, bias_dims="hk", bias_dtype=F64, sink=F64).build()
    q, k, v = (inputs[name].requires_grad_() for name in "qkv")
    bias, sink = (inputs[name].requires_grad_() for name in ("bias", "sink"))
    _, lse = tilewise.attention(q, k, v, bias=bias, sink=sink, mask=causal, return_lse=True, backend=backend)
    assert lse.requires_grad
    scores = (q @ k.mT / 4 + bias).masked_fill(~causal.dense(30, 40), -torch.inf)
    expected = torch.logaddexp(torch.logsumexp(scores, -1), sink[:, None])
    weight = torch.randn(lse.shape, dtype=F64, generator=torch.Generator().manual_seed(9))
    wrt = (q, k, bias, sink)
    for ours, theirs in zip(
        torch.autograd.grad(lse, wrt, weight), torch.autograd.grad(expected, wrt, weight), strict=True
    ):
        torch.testing.assert_close(ours, theirs)


def kept(backend: str, p: float, n: int, seed: Any, **options: Any) -> Tensor:
    """(4, n, n) bool: the pairs that dropout keeps, read off the output for equal scores and the unit matrix as v."""
    q, v = torch.zeros(1, 4, n, 1), torch.eye(n).expand(1, 4, n, n)
    o = tilewise.attention(q, q, v, dropout_p=p, seed=seed, backend=backend, **options)[0]
    torch.testing.assert_close(o[o != 0], torch.full_like(o[o != 0], 1 / (n * (1 - p))))
    return o != 0


@pytest.mark.parametrize("p", [0.001, 0.3])
def test_dropout_keeps_as_many_pairs_as_it_says(p: float, backend: str) -> None:
    """p = 0.001 keeps 0.999 of the pairs; thresholds of 8 bits would keep 0.996."""
    rate = kept(backend, p, 512, seed=3).double().mean().item()
    deviation = (p * (1 - p) / (4 * 512 * 512)) ** 0.5
    assert abs(rate - (1 - p)) < 4 * deviation


def test_dropout_depends_on_seed_head_and_pair_alone(backend: str) -> None:
    once = kept(backend, 0.5, 100, seed=7)
    assert torch.equal(once, kept(backend, 0.5, 100, seed=torch.tensor(7)))
    for tiles in ((16, 16), (32, 48), (64, 16)):
        with forced_tiles(tiles):
            assert torch.equal(once, kept(backend, 0.5, 100, seed=7))
    assert torch.equal(once, kept(backend, 0.5, 130, seed=7)[:, :100, :100])
    for other in (kept(backend, 0.5, 100, seed=8), once.roll(1, 0), once.mT):
        assert 0.4 < (once == other).double().mean() < 0.6


def test_without_a_seed_dropout_follows_manual_seed(backend: str) -> None:
    def draw() -> Tensor:
        return kept(backend, 0.5, 64, seed=None)

    torch.manual_seed(0)
    first, second = draw(), draw()
    torch.manual_seed(0)
    assert torch.equal(first, draw())
    assert not torch.equal(first, second)
