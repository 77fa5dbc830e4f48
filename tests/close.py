"""The one error budget: how far a result of any backend may be from the fp64 reference.

For each group of 64 consecutive rows of one head within one sequence

    RMS(x - ref) <= f * RMS(plain - ref) + eps/2 * RMS(ref) + RMS((4 * eps_acc * E + c * eps) * A)

ref     the reference in fp64.
plain   the reference in the input's dtype: what matmul, softmax, matmul in plain PyTorch would have given.
A       the formula of x with absolute values: what x would be if nothing cancelled. An error made on the way to x is
        relative to A, not to x.
E       1 + |lse| + the mean over P of |scale| |q|.|k|, a number a row: the size of the exponents that P is made from.
        An error of one rounding in a score of size E changes P by the factor 1 + eps_acc * E.
eps     of the input's dtype (of the result's, where that is coarser),
eps_acc of the accumulator's: fp32, fp64 for fp64.
f, c    1 and 0 for o and lse, 2 and 1/16 for gradients.

For lse, A is 1, and plain and eps are the accumulator's. Groups of dbias are 64 consecutive rows of it; each gradient
of a slope or a sink is a group of its own. Where A is 0 (rows without keys, whatever lies past a length, pairs that a
mask hides) x is exactly 0, and lse is -inf exactly where ref is.

A GPU's exp2 gives 0 below the accumulator's least normal number: a thousand of these (1e-35) are let go. So is
eps_acc^2 of the largest group: a gradient made of e^-42 alone has that exponent's own rounding in it, which E, a mean
over P, does not see, and nothing that it is ever added to does either.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from tilewise.algorithm.reference import reference
from tilewise.problem import Aux, Layout, Problem, sequence_lengths

ROWS = 64
FLUSHED = 1024
OPTIONAL = {"bias": "dbias", "alibi_slopes": "dslopes", "sink": "dsink"}
Results = dict[str, Tensor]  # "o", "lse", "dq", "dk", "dv" and, where the option is given, the values of OPTIONAL


def evaluate(
    attend: Callable[..., tuple[Tensor, Tensor]],
    q: Tensor, k: Tensor, v: Tensor, do: Tensor | None, dlse: Tensor | None, frozen: tuple[str, ...] = (),
    **options: Any,
) -> Results:  # fmt: skip
    """o and lse of `attend(q, k, v, **options)`, and the gradients of q, k, v, bias, slopes and sink for do and dlse.

    With do None there are no gradients; with dlse None nothing flows through lse. frozen: the gradients not to ask for.
    """
    inputs = {"dq": q, "dk": k, "dv": v} | {grad: options[name] for name, grad in OPTIONAL.items() if name in options}
    leaves = {name: t.detach().requires_grad_(do is not None and name not in frozen) for name, t in inputs.items()}
    options |= {name: leaves[grad] for name, grad in OPTIONAL.items() if name in options}
    o, lse = attend(leaves["dq"], leaves["dk"], leaves["dv"], **options)
    results = {"o": o.detach(), "lse": lse.detach()}
    return results if do is None else results | _gradients((o, lse), (do, dlse), leaves)


def standard(dtype: torch.dtype | None) -> Callable[..., tuple[Tensor, Tensor]]:
    """Standard attention computed in `dtype` (None: in the dtypes of what it gets), as a function like `attention`."""

    def attend(q: Tensor, k: Tensor, v: Tensor, **options: Any) -> tuple[Tensor, Tensor]:
        problem, aux = Problem.of(q, k, v, **options)
        return reference(problem, q, k, v, aux, dtype)

    return attend


def assert_close(got: Results, *args: Any, **options: Any) -> None:
    """AssertionError with each result of `evaluate(attend, *args, **options)` that is over its budget."""
    found = Budget(*args, **options).errors(got)
    assert set(got) == set(found), f"results are {sorted(got)}: they must be {sorted(found)}"
    bad = [f"{name}: error / budget = {ratio:.3g} {where}" for name, (ratio, where) in found.items() if not ratio <= 1]
    assert not bad, "\n".join(bad)


class Budget:
    """The budget of one call; arguments as `evaluate` gets them."""

    def __init__(
        self, q: Tensor, k: Tensor, v: Tensor, do: Tensor | None, dlse: Tensor | None, frozen: tuple[str, ...] = (),
        **options: Any,
    ) -> None:  # fmt: skip
        self.problem, self.aux = Problem.of(q, k, v, **options)
        acc = self.problem.lse_dtype
        exact = {
            name: t.detach().double() if isinstance(t, Tensor) and t.is_floating_point() else t
            for name, t in {"q": q, "k": k, "v": v, "do": do, "dlse": dlse, **options}.items()
        }
        self.ref = evaluate(standard(torch.float64), **exact)
        self.plain = evaluate(standard(None), q, k, v, do, dlse, **options)
        if not all(t.isfinite().all() for name, t in self.plain.items() if name != "lse"):  # fp16 scores beyond 65504
            self.plain = evaluate(standard(acc), q, k, v, do, dlse, **options)
        if q.dtype != acc:
            self.plain["lse"] = evaluate(standard(acc), q, k, v, None, None, **options)["lse"]
        self.allowed = allowances(self.problem, self.aux, self.ref, **exact)
        self.names = [name for name in self.ref if name not in frozen]

    def errors(self, got: Results) -> dict[str, tuple[float, str]]:
        """For each result its largest error / budget, and where; inf if it is NaN, or not the 0 or -inf it must be."""
        parts = (self.ref, self.plain, self.allowed)
        return {
            name: _excess(self.problem, self.aux, name, got[name], *(results[name] for results in parts))
            for name in self.names
        }


def allowances(
    problem: Problem, aux: Aux, ref: Results,
    q: Tensor, k: Tensor, v: Tensor, do: Tensor | None, dlse: Tensor | None, **options: Any,
) -> Results:  # fmt: skip
    """(4 eps_acc E + c eps) A of every result; all tensors in fp64. A is, with absolute values,

    o: P |V|    dv: P^T |dO|    dS' = P * (X + rowsum(P * X) + |dlse| + N) with X = |dO| |V|^T
    dq: |scale| dS' |K|    dk: |scale| dS'^T |Q|    dbias: dS'    dslopes: dS' |i + offset - j|    dsink: P_sink * (...)

    each summed as the gradient itself is, and c eps N = eps/2 |dO * o|_2: what delta = rowsum(dO * o) loses when o is
    rounded. The reference computes them all, made to by its arguments. P |V| is its output for |V|. With
    r = rowsum(|dO| * P |V|), its gradients for |dO| and |dlse| + N + 2 r have dS' in the place of dS. Zeros a and b, in
    a bias |scale| (a |K|^T + |Q| b^T), have the gradients |scale| dS' |K| and |scale| dS'^T |Q|. And a row's factor
    4 eps_acc E + c eps goes onto its |dO| and |dlse|.
    """
    packed = problem.q_layout is Layout.PACKED
    eps_acc, eps = torch.finfo(problem.lse_dtype).eps, torch.finfo(problem.dtype).eps
    wrt = {"dq": torch.zeros_like(q), "dk": torch.zeros_like(k), "dv": v.abs()}
    wrt |= {grad: options[name].detach() for name, grad in OPTIONAL.items() if name in options}
    wrt = {name: t.requires_grad_(do is not None) for name, t in wrt.items()}
    options |= {name: wrt[grad] for name, grad in OPTIONAL.items() if name in options}
    if do is not None:
        Q, a = (_padded(t, aux.cu_q) for t in (q.abs().nan_to_num(), wrt["dq"]))
        K, b = (_padded(t, aux.cu_k).repeat_interleave(problem.group, 1) for t in (k.abs().nan_to_num(), wrt["dk"]))
        bias = abs(problem.scale) * (a @ K.mT + Q @ b.mT)
        options["bias"] = bias + wrt["dbias"][..., : Q.shape[2], : K.shape[2]] if "bias" in options else bias
    o, lse = standard(torch.float64)(q, k, wrt["dv"], **options)

    def like_o(x: Tensor) -> Tensor:
        return x.transpose(0, 1).unsqueeze(-1) if packed else x.unsqueeze(-1)

    mean_key, _ = standard(torch.float64)(q, k, k.abs(), **(options | {"dropout_p": 0.0}))
    dots = abs(problem.scale) * (q.abs() * mean_key.detach()).sum(-1)
    dots = dots.transpose(0, 1) if packed else dots
    E = 1 + (ref["lse"].abs() + dots).masked_fill(ref["lse"] == -math.inf, 0.0)

    allowed = {"o": 4 * eps_acc * like_o(E) * o.detach(), "lse": 4 * eps_acc * E}
    if do is not None:
        factor = 4 * eps_acc * E + eps / 16
        r, lost = (do.abs() * o.detach()).sum(-1), eps / 2 * (do * ref["o"]).norm(dim=-1)
        r, lost = (x.transpose(0, 1) if packed else x for x in (r, lost))
        through_lse = factor * (2 * r + (0 if dlse is None else dlse.abs())) + lost
        grads = _gradients((o, lse), (like_o(factor) * do.abs(), through_lse), wrt)
        allowed |= {name: grad.abs() for name, grad in grads.items()}
    return allowed


def _padded(t: Tensor, cu: Tensor | None) -> Tensor:
    """(B, H, longest, D) of dense or packed tokens; past a sequence's end, whatever comes next."""
    if cu is None:
        return t
    starts = cu[:-1].long()
    longest = max((cu[1:] - cu[:-1]).tolist(), default=0)
    rows = (starts[:, None] + torch.arange(longest, device=starts.device)).clamp(max=len(t) - 1)
    return t[rows].transpose(1, 2)


def _gradients(outputs: Sequence[Tensor], cotangents: Sequence[Tensor | None], leaves: Results) -> Results:
    wrt = {name: t for name, t in leaves.items() if t.requires_grad}
    ends = [(x, dx) for x, dx in zip(outputs, cotangents, strict=True) if dx is not None and x.requires_grad]
    if not ends:  # the reference of no sequences: nothing depends on anything
        return {name: torch.zeros_like(t) for name, t in wrt.items()}
    reached, arriving = zip(*ends, strict=True)
    grads = torch.autograd.grad(reached, tuple(wrt.values()), arriving, materialize_grads=True)
    return dict(zip(wrt, grads, strict=True))


def _excess(
    problem: Problem, aux: Aux, name: str, x: Tensor, ref: Tensor, plain: Tensor, allowed: Tensor
) -> tuple[float, str]:
    """The largest error / budget of one result's groups, and where it is."""
    assert x.shape == ref.shape, f"{name} is {tuple(x.shape)}, expected {tuple(ref.shape)}"
    f = 1 if name in ("o", "lse") else 2
    eps = torch.finfo(x.dtype).eps
    if name == "lse":
        empty = ref == -math.inf
        if not torch.equal(x == -math.inf, empty):
            return math.inf, f"(-inf differs at {((x == -math.inf) != empty).nonzero()[0].tolist()})"
        x, ref, plain = (t.masked_fill(empty, 0.0) for t in (x, ref, plain))
    else:
        eps = max(eps, torch.finfo(problem.dtype).eps)
        if (wrong := (allowed == 0) & (x != 0)).any():
            return math.inf, f"(not 0 at {wrong.nonzero()[0].tolist()})"
    if not x.isfinite().all():
        return math.inf, f"(not finite at {(~x.isfinite()).nonzero()[0].tolist()})"
    stack = torch.stack([x.double() - ref, plain.double() - ref, ref, allowed])
    error, error_plain, size, extra = _group_norms(problem, aux, name, stack)
    if len(error) == 0:
        return 0.0, ""
    finfo = torch.finfo(problem.lse_dtype)
    least = FLUSHED * finfo.tiny + finfo.eps**2 * size.max()
    ratio = torch.where(error == 0, 0.0, error / (f * error_plain + eps / 2 * size + extra + least))
    worst = int(ratio.argmax())
    return float(ratio[worst]), f"in group {worst} of {len(ratio)} (error {error[worst]:.3g}, result {size[worst]:.3g})"


def _group_norms(problem: Problem, aux: Aux, name: str, t: Tensor) -> Tensor:
    """(n, groups): the RMS of n tensors (n, *shape) group by group, times a factor that is the same for all n."""
    n, packed = len(t), problem.q_layout is Layout.PACKED
    if name in ("dslopes", "dsink"):
        return t.reshape(n, -1).abs()
    if name == "dbias":
        t = t[(slice(None), *(None,) * (5 - t.dim()))]
        parts = [t.flatten(1, 2)]
    else:
        t = t.unsqueeze(-1) if name == "lse" else t.transpose(1, 2) if packed else t  # (n, H, T, d) or (n, B, H, S, d)
        lengths, cu = (
            sequence_lengths(problem, aux)[name in ("dk", "dv")],
            aux.cu_k if name in ("dk", "dv") else aux.cu_q,
        )
        if cu is None:
            parts = [t[:, b, :, :length] for b, length in enumerate(lengths)]
        else:
            parts = [t[:, :, start : start + length] for start, length in zip(cu.tolist(), lengths, strict=False)]
    groups = [torch.nn.functional.pad(x, (0, 0, 0, -x.shape[2] % ROWS)) for x in parts if x.numel()]
    groups = [x.unflatten(2, (-1, ROWS)).flatten(3).flatten(1, 2) for x in groups]
    return torch.cat(groups, 1).norm(dim=-1) if groups else t.new_zeros(n, 0)
