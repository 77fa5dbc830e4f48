"""`tilewise check`: random problems on each backend that is present, against the fp64 reference.

This asks whether the installed library computes attention on this machine, in seconds and without the repository. The
tests of the repository ask more, with a finer rule.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from .. import api, dispatch
from ..algorithm.reference import reference
from ..block_mask import BlockMask
from ..mask import Band, Masked, causal, sliding_window
from ..problem import Problem

DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
Results = dict[str, Tensor]  # o, lse, and d<name> for each tensor with a gradient


@dataclass(frozen=True, slots=True)
class Sample:
    """One random call: its tensors, on the CPU, and its options. With `cu_seqlens_q` it is for `attention_packed`."""

    inputs: dict[str, Tensor]  # q, k, v, and bias, alibi_slopes, sink where they are given: all with gradient
    options: dict[str, Any]
    do: Tensor
    dlse: Tensor

    def arguments(self, device: str = "cpu", dtype: torch.dtype | None = None) -> dict[str, Any]:
        """Fresh leaves of the inputs on a device (and in a dtype), and the options there."""
        leaves = {name: t.to(device, dtype or t.dtype).detach().requires_grad_() for name, t in self.inputs.items()}
        return leaves | {name: _on(device, x) for name, x in self.options.items()}


def _on(device: str, x: Any) -> Any:
    """Tensors and masks on the device; what has no place as it is."""
    if isinstance(x, Masked):
        return x.band & _on(device, x.mask)
    return x.to(device) if isinstance(x, Tensor | BlockMask) else x


@dataclass(frozen=True, slots=True)
class Finding:
    """What one backend gave for one sample: by result its error and how much is allowed; fault: what is wrong."""

    backend: str
    device: str
    number: int
    problem: Problem
    errors: dict[str, tuple[float, float]]
    fault: str | None


def sample(seed: int, number: int) -> Sample:
    """The call `number` of a seed: lengths to 200, GQA, every kind of mask, bias and option, dense or packed.

    >>> problem, _ = Problem.of(**sample(0, 1).arguments())
    >>> problem == Problem.of(**sample(0, 1).arguments())[0]
    True
    """
    r = random.Random(f"{seed}/{number}")
    make = torch.Generator().manual_seed(r.randrange(2**62))
    dtype = DTYPES[number % 4]
    batch, kv_heads, d = r.randint(1, 2), r.choice((1, 2)), r.choice((8, 20, 32, 64))
    heads, q_len, k_len = kv_heads * r.choice((1, 3)), r.randint(1, 200), r.randint(16, 200)
    packed = r.random() < 0.25
    lengths = [r.randint(16, 90) for _ in range(3)]

    def normal(*shape: int, dtype: torch.dtype = dtype) -> Tensor:
        return torch.randn(shape, generator=make).to(dtype)

    options: dict[str, Any] = {}
    if packed:
        cu = torch.tensor([0, *(sum(lengths[: n + 1]) for n in range(3))], dtype=torch.int32)
        options["cu_seqlens_q"] = cu
        total, q_len, k_len, batch = sum(lengths), max(lengths), max(lengths), len(lengths)
        q, k, v, do = (normal(total, h, d) for h in (heads, kv_heads, kv_heads, heads))
    else:
        q, do = normal(batch, heads, q_len, d), normal(batch, heads, q_len, d)
        k, v = normal(batch, kv_heads, k_len, d), normal(batch, kv_heads, k_len, d)
        if r.random() < 0.2:
            options["k_lens"] = torch.tensor([r.randint(16, k_len) for _ in range(batch)], dtype=torch.int32)
    inputs = {"q": q, "k": k, "v": v}
    options["mask"] = _sample_mask(r, make, (batch, heads, q_len, k_len))
    if r.random() < 0.25:
        shape = (r.choice((1, batch)), r.choice((1, heads)), r.choice((1, q_len)), k_len)
        inputs["bias"] = normal(*shape, dtype=r.choice((dtype, torch.float32)))
    # A gradient of one number a head sums over all pairs: in half types nothing is left of it but rounding.
    per_head = inputs if dtype in (torch.float32, torch.float64) else options
    if r.random() < 0.2:
        per_head["alibi_slopes"] = normal(heads, dtype=torch.float32).abs() / 16
    if r.random() < 0.2:
        per_head["sink"] = normal(heads, dtype=torch.float32)
    options["softcap"] = r.choice((0.0, 0.0, 0.0, 20.0))
    if r.random() < 0.2:
        options |= {"dropout_p": 0.2, "seed": r.randrange(2**63)}
    dlse = normal(
        *(q.shape[1::-1] if packed else q.shape[:3]), dtype=dtype if dtype is torch.float64 else torch.float32
    )
    return Sample(inputs, options, do, dlse)


def _sample_mask(r: random.Random, make: torch.Generator, full: tuple[int, int, int, int]) -> Any:
    _, heads, q_len, k_len = full
    band: Band = r.choice((Band(), causal, sliding_window(r.randint(4, 60), r.randint(0, 20))))
    kind = r.random()
    if kind < 0.2:
        return band & (torch.rand(r.choice((1, heads)), q_len, k_len, generator=make) < 0.8)
    if kind < 0.35:
        return band & BlockMask.from_dense(torch.rand(q_len, k_len, generator=make) < 0.8)
    return None if band.is_full else band


def run(call: Callable[..., tuple[Tensor, Tensor]], sample: Sample, arguments: dict[str, Any]) -> Results:
    """o, lse and all gradients of call(**arguments), on the CPU in fp64."""
    o, lse = call(**arguments)
    leaves = [arguments[name] for name in sample.inputs]
    cotangents = sample.do.to(o.device, o.dtype), sample.dlse.to(lse.device, lse.dtype)
    grads = torch.autograd.grad((o, lse), leaves, cotangents)
    results = {"o": o, "lse": lse} | {f"d{name}": grad for name, grad in zip(sample.inputs, grads, strict=True)}
    return {name: t.detach().cpu().double() for name, t in results.items()}


def _reference(dtype: torch.dtype | None) -> Callable[..., tuple[Tensor, Tensor]]:
    def call(**arguments: Any) -> tuple[Tensor, Tensor]:
        problem, aux = Problem.of(**arguments)
        return reference(problem, arguments["q"], arguments["k"], arguments["v"], aux, dtype)

    return call


def _attention(backend: str) -> Callable[..., tuple[Tensor, Tensor]]:
    def call(**arguments: Any) -> tuple[Tensor, Tensor]:
        attention = api.attention_packed if "cu_seqlens_q" in arguments else api.attention
        return attention(**arguments, return_lse=True, backend=backend)

    return call


def check(problems: int, seed: int) -> Iterator[Finding]:
    """Every sample on every backend that takes it, on the CPU and on a GPU if there is one."""
    for number in range(problems):
        drawn = sample(seed, number)
        exact, plain = _expected(drawn)
        for device in devices():
            problem, _ = Problem.of(**drawn.arguments(device))
            for name in dispatch.BACKENDS:
                if dispatch.backend(name).why_not(problem) is None:
                    yield _finding(name, device, number, problem, drawn, exact, plain)


def devices() -> list[str]:
    return ["cpu", "cuda"] if torch.cuda.is_available() else ["cpu"]


def _expected(drawn: Sample) -> tuple[Results, Results]:
    """(in fp64, as plain torch code in the inputs' dtype has it; of that, lse in the accumulator's)."""
    exact = run(_reference(torch.float64), drawn, drawn.arguments(dtype=torch.float64))
    plain = run(_reference(None), drawn, drawn.arguments())
    accumulator = drawn.dlse.dtype
    plain["lse"] = run(_reference(accumulator), drawn, drawn.arguments(dtype=accumulator))["lse"]
    return exact, plain


def _finding(
    name: str, device: str, number: int, problem: Problem, drawn: Sample, exact: Results, plain: Results
) -> Finding:
    try:
        got = run(_attention(name), drawn, drawn.arguments(device))
    except Exception as raised:  # whatever a backend raises on a problem that it said it takes is what is looked for
        return Finding(name, device, number, problem, {}, f"{type(raised).__name__}: {raised}")
    errors, faults = dict[str, tuple[float, float]](), list[str]()
    for result, x in got.items():
        ref, near = exact[result], plain[result]
        if result == "lse":
            empty = ref == -math.inf
            if not torch.equal(x == -math.inf, empty):
                faults.append("lse is -inf in other rows than the reference's")
            x, ref, near = (t.masked_fill(empty, 0.0) for t in (x, ref, near))
        error, allowed = _rms(x - ref), 3 * _rms(near - ref) + _tolerance(result, problem) * _rms(ref)
        errors[result] = error, allowed
        if not error <= allowed:  # NaN too
            faults.append(f"{result}: error {error:.2e}, allowed {allowed:.2e}")
    return Finding(name, device, number, problem, errors, "; ".join(faults) or None)


def _tolerance(result: str, problem: Problem) -> float:
    """What is allowed beside three times plain code's error, relative to the result's size (RMS)."""
    if result in ("dalibi_slopes", "dsink"):  # one number a head, sums over all pairs in which nearly all cancels
        return 1e-3
    own = 0.0 if result == "lse" else torch.finfo(problem.dtype).eps
    return own + 8 * torch.finfo(problem.lse_dtype).eps


def _rms(t: Tensor) -> float:
    return t.square().mean().sqrt().item() if t.numel() else 0.0
