"""The oracle against what it can be held to: scalar arithmetic, PyTorch, and its own definition read in another way."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from cases import Case, sample
from close import evaluate, standard
from torch import Tensor

from tilewise import Band, BlockMask, Problem, causal
from tilewise.algorithm.dropout import keep
from tilewise.algorithm.reference import reference

F64 = torch.float64


def attend(q: Tensor, k: Tensor, v: Tensor, **options: Any) -> tuple[Tensor, Tensor]:
    return standard(F64)(q, k, v, **options)


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, dtype=F64, generator=torch.Generator().manual_seed(seed))


def by_hand(
    q: Tensor, k: Tensor, v: Tensor, b: int, h: int, i: int, seen: Tensor, **o: Any
) -> tuple[list[float], float]:
    """One row of the contract in Python floats: (o, lse). seen: (Sq, Sk) bool; o: the options, whole."""
    group = q.shape[1] // k.shape[1]
    q_len, k_len = q.shape[2], k.shape[2]
    logits, values = [], []
    for j in range(k_len):
        if not seen[i, j]:
            continue
        s = o["scale"] * sum(float(x) * float(y) for x, y in zip(q[b, h, i], k[b, h // group, j], strict=True))
        s = o["softcap"] * math.tanh(s / o["softcap"])
        s += float(o["bias"].expand(*q.shape[:3], k_len)[b, h, i, j])
        s -= float(o["alibi_slopes"][h]) * abs(i + (k_len - q_len) - j)
        at = (torch.tensor(x) for x in (b, h, i, j))
        kept = 1 / (1 - o["dropout_p"]) if keep(o["seed"], o["dropout_p"], *at) else 0.0
        logits.append(s)
        values.append([kept * float(x) for x in v[b, h // group, j]])
    if not logits:
        return [0.0] * v.shape[-1], -math.inf
    total = sum(math.exp(s) for s in (*logits, float(o["sink"][h])))
    weights = [math.exp(s) / total for s in logits]
    return [sum(w * x[d] for w, x in zip(weights, values, strict=True)) for d in range(v.shape[-1])], math.log(total)


@pytest.mark.parametrize(("q_len", "k_len"), [(5, 7), (7, 5)])
def test_every_option_by_hand(q_len: int, k_len: int) -> None:
    q, k, v = normal(2, 4, q_len, 3), normal(2, 2, k_len, 3, seed=1), normal(2, 2, k_len, 2, seed=2)
    options = {
        "scale": -0.7, "softcap": 1.5, "bias": normal(1, 4, 1, k_len, seed=3), "alibi_slopes": normal(4, seed=4),
        "sink": normal(4, seed=5), "dropout_p": 0.3, "seed": 11,
    }  # fmt: skip
    seen = normal(q_len, k_len, seed=6) > -0.8
    band = Band(3, 1)
    o, lse = attend(q, k, v, mask=band & seen, **options)
    offset = k_len - q_len
    shown = torch.tensor(
        [[bool(seen[i, j]) and -3 <= j - (i + offset) <= 1 for j in range(k_len)] for i in range(q_len)]
    )
    assert not shown.all(dim=1).all()
    for b in range(2):
        for h in range(4):
            for i in range(q_len):
                o_row, lse_row = by_hand(q, k, v, b, h, i, shown, **options)
                torch.testing.assert_close(o[b, h, i], torch.tensor(o_row, dtype=F64))
                torch.testing.assert_close(lse[b, h, i], torch.tensor(lse_row, dtype=F64))


@pytest.mark.parametrize("grad", ["o", "lse"])
def test_agrees_with_pytorch(grad: str) -> None:
    q, k, v = (x.requires_grad_() for x in (normal(2, 4, 9, 8), normal(2, 2, 6, 8, seed=1), normal(2, 2, 6, 8, seed=2)))
    mask = normal(2, 1, 9, 6, seed=3) > -1
    mask[..., 0] = True
    o, lse = attend(q, k, v, mask=mask)
    expected_o = torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=mask, enable_gqa=True)
    scores = (q @ k.repeat_interleave(2, 1).mT / 8**0.5).masked_fill(~mask, -math.inf)
    torch.testing.assert_close(o, expected_o)
    torch.testing.assert_close(lse, torch.logsumexp(scores, -1))
    result, expected = (o, expected_o) if grad == "o" else (lse, torch.logsumexp(scores, -1))
    weight = normal(*result.shape, seed=4)
    inputs = (q, k, v) if grad == "o" else (q, k)
    for ours, theirs in zip(
        torch.autograd.grad(result, inputs, weight), torch.autograd.grad(expected, inputs, weight), strict=True
    ):
        torch.testing.assert_close(ours, theirs)


def test_top_left_is_pytorchs_is_causal() -> None:
    q, k, v = normal(1, 2, 9, 8), normal(1, 2, 6, 8, seed=1), normal(1, 2, 6, 8, seed=2)
    expected = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
    torch.testing.assert_close(attend(q, k, v, mask=Band(None, 0, "top_left"))[0], expected)
    assert not torch.allclose(attend(q, k, v, mask=causal)[0], expected)


def test_gradients_by_finite_differences() -> None:
    q, k, v = normal(1, 4, 5, 3), normal(1, 2, 4, 3, seed=1), normal(1, 2, 4, 2, seed=2)
    bias, slopes, sink = normal(1, 4, 1, 4, seed=3), normal(1, 4, seed=4), normal(4, seed=5)

    def call(*x: Tensor) -> tuple[Tensor, Tensor]:
        o, lse = attend(
            *x[:3], bias=x[3], alibi_slopes=x[4], sink=x[5], softcap=2.0, mask=causal, dropout_p=0.3, seed=1
        )
        return o, lse[:, :, 1:]  # row 0 sees no key

    inputs = tuple(x.requires_grad_() for x in (q, k, v, bias, slopes, sink))
    assert torch.autograd.gradcheck(call, inputs)
    assert torch.autograd.gradgradcheck(call, inputs, fast_mode=True)


@pytest.mark.parametrize("sink", [False, True])
@pytest.mark.parametrize("how", ["band", "boolean", "bias", "no keys", "length"])
def test_rows_without_keys_are_zero_and_so_are_their_gradients(how: str, sink: bool) -> None:
    k_len = 0 if how == "no keys" else 4
    q, k, v = normal(1, 2, 3, 8), normal(1, 2, k_len, 8, seed=1), normal(1, 2, k_len, 8, seed=2)
    options: dict[str, Any] = {
        "band": {"mask": Band(-9, None)}, "boolean": {"mask": torch.zeros(3, 4, dtype=torch.bool)},
        "bias": {"bias": torch.full((3, 4), -math.inf, dtype=F64)}, "no keys": {},
        "length": {"k_lens": torch.tensor([0], dtype=torch.int32)},
    }[how]  # fmt: skip
    if sink:
        options["sink"] = normal(2, seed=3)
    results = evaluate(attend, q, k, v, normal(1, 2, 3, 8, seed=4), normal(1, 2, 3, seed=5), **options)
    assert (results.pop("lse") == -math.inf).all()
    for name, x in results.items():
        assert (x == 0).all(), name


def test_a_sink_is_a_key_of_value_zero() -> None:
    q, k, v = normal(1, 2, 5, 8), normal(1, 2, 6, 8, seed=1), normal(1, 2, 6, 8, seed=2)
    sink = normal(2, seed=3)
    more_k, more_v = (torch.cat([x, torch.zeros(1, 2, 1, 8, dtype=F64)], 2) for x in (k, v))
    bias = torch.zeros(1, 2, 1, 7, dtype=F64)
    bias[0, :, 0, 6] = sink
    for ours, theirs in zip(attend(q, k, v, sink=sink), attend(q, more_k, more_v, bias=bias), strict=True):
        torch.testing.assert_close(ours, theirs)


def test_packed_sequences_are_dense_ones() -> None:
    cu_q, cu_k = [0, 5, 5, 12], [0, 3, 7, 11]
    q, k, v = normal(13, 4, 8), normal(11, 2, 8, seed=1), normal(11, 2, 6, seed=2)
    bias, slopes, seen = normal(3, 1, 7, 4, seed=3), normal(3, 4, seed=4), normal(3, 4, 7, 1, seed=5) > -1
    cu = {"cu_seqlens_q": torch.tensor(cu_q, dtype=torch.int32), "cu_seqlens_k": torch.tensor(cu_k, dtype=torch.int32)}
    options = {"bias": bias, "alibi_slopes": slopes, "mask": causal & seen, "softcap": 2.0}
    o, lse = attend(q, k, v, **options, **cu)
    assert o.shape == (13, 4, 6)
    assert lse.shape == (4, 13)
    assert (o[12] == 0).all()
    assert (lse[:, 12] == -math.inf).all()
    for s in range(3):
        rows, keys = slice(cu_q[s], cu_q[s + 1]), slice(cu_k[s], cu_k[s + 1])
        n, m = rows.stop - rows.start, keys.stop - keys.start
        options = {
            "bias": bias[s, :, :n, :m],
            "alibi_slopes": slopes[s],
            "mask": causal & seen[s, :, :n],
            "softcap": 2.0,
        }
        alone_o, alone_lse = attend(*(x.transpose(0, 1)[None] for x in (q[rows], k[keys], v[keys])), **options)
        torch.testing.assert_close(o[rows], alone_o[0].transpose(0, 1))
        torch.testing.assert_close(lse[:, rows], alone_lse[0])


def test_lengths_cut_and_garbage_beyond_them_is_not_read() -> None:
    q, k, v = normal(2, 2, 6, 8), normal(2, 2, 9, 8, seed=1), normal(2, 2, 9, 8, seed=2)
    q_lens, k_lens = torch.tensor([4, 6], dtype=torch.int32), torch.tensor([9, 2], dtype=torch.int32)
    slopes = normal(2, seed=3)
    for b in range(2):
        q[b, :, q_lens[b] :], k[b, :, k_lens[b] :], v[b, :, k_lens[b] :] = math.nan, math.nan, math.nan
    results = evaluate(attend, q, k, v, torch.ones(2, 2, 6, 8, dtype=F64), None, mask=causal, alibi_slopes=slopes,
                       q_lens=q_lens, k_lens=k_lens)  # fmt: skip
    for b in range(2):
        n, m = q_lens[b], k_lens[b]
        alone = evaluate(attend, q[b : b + 1, :, :n], k[b : b + 1, :, :m], v[b : b + 1, :, :m],
                         torch.ones(1, 2, n, 8, dtype=F64), None, mask=causal, alibi_slopes=slopes)  # fmt: skip
        for name, length in (("o", n), ("lse", n), ("dq", n), ("dk", m), ("dv", m)):
            torch.testing.assert_close(results[name][b, :, :length], alone[name][0])
            beyond = results[name][b, :, length:]
            assert (beyond == (-math.inf if name == "lse" else 0)).all()


@pytest.mark.parametrize("blocks", [False, True])
def test_an_origin_takes_a_part_of_a_larger_problem(blocks: bool) -> None:
    b0, h0, cut = 1, 1, 128
    q, k, v = normal(2, 3, 256, 4), normal(2, 3, 256, 4, seed=1), normal(2, 3, 256, 4, seed=2)
    slopes = normal(3, seed=3).abs()
    mask: Any = Band(60, 100)
    if blocks:
        mask = mask & BlockMask.from_dense(normal(2, 3, 256, 256, seed=4) > -0.5)
    options = {"dropout_p": 0.3, "seed": 5, "mask": mask}
    whole, whole_lse = attend(q, k, v, alibi_slopes=slopes, **options)
    parts = [
        attend(q[b0:, h0:, cut:], k[b0:, h0:, j0 : j0 + cut], v[b0:, h0:, j0 : j0 + cut], alibi_slopes=slopes[h0:],
               origin=(b0, h0, cut, j0), **options)
        for j0 in (0, cut)
    ]  # fmt: skip
    lse = torch.logaddexp(parts[0][1], parts[1][1])
    merged = sum(part * torch.exp(part_lse - lse)[..., None] for part, part_lse in parts)
    torch.testing.assert_close(lse, whole_lse[b0:, h0:, cut:])
    torch.testing.assert_close(merged, whole[b0:, h0:, cut:])


def test_dropping_everything_gives_zero_and_leaves_lse() -> None:
    q = normal(1, 2, 5, 8)
    o, lse = attend(q, q, q, dropout_p=1.0, seed=0)
    assert (o == 0).all()
    torch.testing.assert_close(lse, attend(q, q, q)[1])


def test_precision_is_the_one_asked_for() -> None:
    case = Case(dtype=torch.bfloat16, bias_dims="qk", slopes="h", sink=torch.float32, dropout_p=0.2)
    inputs = {name: x for name, x in case.build().items() if name not in ("do", "dlse", "frozen")}
    o, lse = standard(F64)(**inputs)
    assert (o.dtype, lse.dtype) == (F64, F64)
    plain, plain_lse = standard(None)(**inputs)
    assert (plain.dtype, plain_lse.dtype) == (torch.bfloat16, torch.float32)
    error = (plain - o).abs().max()
    assert 1e-4 < error < 0.05
    # fp64 all through: a step in fp32 would show as 1e-8
    wide = {name: x.double() if isinstance(x, Tensor) and x.is_floating_point() else x for name, x in inputs.items()}
    assert torch.equal(standard(None)(**wide)[0], o)


def test_samples_are_reproducible_and_print_what_makes_them() -> None:
    names = {"Case": Case, "Band": Band, "torch": torch}
    for seed in range(200):
        case = sample(seed)
        assert case == sample(seed) == eval(repr(case), dict(names))
        first, second = case.build(), case.build()
        assert list(first) == list(second)
        for x, y in zip(first.values(), second.values(), strict=True):
            if isinstance(x, Tensor):
                assert x.stride() == y.stride()
                assert torch.allclose(x, y, rtol=0, atol=0, equal_nan=True)


def test_an_output_is_shaped_as_the_problem_says() -> None:
    for seed in range(40):
        inputs = sample(seed).build()
        options = {name: x for name, x in inputs.items() if name not in ("q", "k", "v", "do", "dlse", "frozen")}
        problem, aux = Problem.of(inputs["q"], inputs["k"], inputs["v"], **options)
        o, lse = reference(problem, inputs["q"], inputs["k"], inputs["v"], aux)
        assert (tuple(o.shape), tuple(lse.shape)) == (problem.o_shape, problem.lse_shape)
