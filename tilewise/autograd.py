"""How attention joins PyTorch: one autograd.Function for eager code, two private ops for torch.compile.

    eager            Problem -> _Attention (Function) -> backend        little host time; refuses jvp and vmap itself
    traced           tilewise::forward, tilewise::backward (ops)        flat arguments; the Problem is made again inside

While tracing, lengths are symbols and no Problem exists, so that new lengths need no new graph. Both doors save the
inputs, o and lse and nothing else, and both refuse to be differentiated twice, or forwards, with one sentence.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from types import ModuleType
from typing import Any

import torch
from torch import Tensor
from torch._C._functorch import unwrap_if_dead
from torch.autograd.function import _SingleLevelFunction

from .block_mask import BlockMask
from .dispatch import choose
from .layout import empty
from .mask import Band
from .problem import Aux, MaskLike, Problem, accumulator, split_mask

TWICE = "tilewise's backward cannot be differentiated (no double backward): its gradients are first order only"
FORWARD_MODE = "tilewise has no forward-mode derivative (torch.func.jvp, forward_ad): use reverse mode"
VMAP = "tilewise has no vmap: fold the mapped dimension into the batch, (V, B, H, S, D) -> (V * B, H, S, D)"

Call = tuple[Problem, Aux, ModuleType]  # and the backend


def attend(
    problem: Problem, q: Tensor, k: Tensor, v: Tensor, aux: Aux, backend: str | None = None
) -> tuple[Tensor, Tensor]:
    """o and lse of a validated call, differentiable. `backend`: a name, or None for the first that can."""
    module = choose(problem, backend)
    if transformed():
        return _Attention.apply(q, k, v, aux.bias, aux.slopes, aux.sink, problem, aux, module)
    if problem.needs_grad:
        run: Callable[..., Any] = _EagerAttention.apply  # type: ignore[attr-defined]
        q, k, v = unwrap_if_dead(q), unwrap_if_dead(k), unwrap_if_dead(v)
        if aux.bias is aux.slopes is aux.sink is None:
            return run((problem, aux, module), q, k, v)
        options = [x if x is None else unwrap_if_dead(x) for x in (aux.bias, aux.slopes, aux.sink)]
        return run((problem, aux, module), q, k, v, *options)
    return module.forward(problem, q, k, v, aux)


def transformed() -> bool:
    """True inside torch.func transforms and forward-mode AD, which must reach our Function to be answered."""
    return torch._C._are_functorch_transforms_active() or torch.autograd.forward_ad._current_level >= 0


def _given(aux: Aux, bias: Tensor | None, slopes: Tensor | None, sink: Tensor | None) -> Aux:
    """`aux` with the tensors that autograd handed on in place of its own."""
    if aux.bias is bias and aux.slopes is slopes and aux.sink is sink:
        return aux
    return replace(aux, bias=bias, slopes=slopes, sink=sink)


class _Attention(torch.autograd.Function):
    @staticmethod
    def forward(
        q: Tensor,
        k: Tensor,
        v: Tensor,
        bias: Tensor | None,
        slopes: Tensor | None,
        sink: Tensor | None,
        problem: Problem,
        aux: Aux,
        module: ModuleType,
    ) -> tuple[Tensor, Tensor]:
        return module.forward(problem, q, k, v, _given(aux, bias, slopes, sink))

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
        *tensors, problem, aux, module = inputs
        ctx.call = problem, _given(aux, None, None, None), module
        ctx.save_for_backward(*tensors, *output)
        ctx.set_materialize_grads(False)

    @staticmethod
    def backward(ctx: Any, do: Tensor | None, dlse: Tensor | None) -> tuple[Any, ...]:
        return (*_gradients(ctx, do, dlse), None, None, None)

    @staticmethod
    def jvp(ctx: Any, *tangents: Any) -> Any:
        raise NotImplementedError(FORWARD_MODE)

    @staticmethod
    def vmap(info: Any, in_dims: Any, *args: Any) -> Any:
        raise NotImplementedError(VMAP)


class _EagerAttention(_SingleLevelFunction):
    """_Attention where no transform looks on, at less host time. Beside the backend's own, in microseconds:

    72  torch.autograd.Function with setup_context: PyTorch binds its arguments with `inspect` at each call (torch 2.13)
    15  without
    12  bias, slopes and sink, `options`, left out where there are none: each argument costs
     9  the class below Function, whose apply is C. What Function's does in Python, `attend` does: tensors that have
        leaked from a transform of torch.func are taken out of their dead wrappers.
    """

    @staticmethod
    def forward(
        ctx: Any, call: Call, q: Tensor, k: Tensor, v: Tensor, *options: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        problem, aux, module = call
        if options:
            call = problem, _given(aux, None, None, None), module
            aux = _given(aux, *options)
        o, lse = module.forward(problem, q, k, v, aux)
        ctx.call = call
        ctx.save_for_backward(q, k, v, *(options or _NO_OPTIONS), o, lse)
        ctx.set_materialize_grads(False)
        return o, lse

    @staticmethod
    def backward(ctx: Any, do: Tensor | None, dlse: Tensor | None) -> tuple[Any, ...]:
        return (None, *_gradients(ctx, do, dlse))  # more than there are inputs, if the rest is None, is allowed


_NO_OPTIONS = (None,) * 3


def _gradients(ctx: Any, do: Tensor | None, dlse: Tensor | None) -> tuple[Tensor | None, ...]:
    """Of q, k, v, bias, slopes and sink."""
    if do is None and dlse is None:
        return (None,) * 6
    q, k, v, bias, slopes, sink, o, lse = ctx.saved_tensors
    problem, aux, module = ctx.call
    do = torch.zeros_like(o) if do is None else do
    if torch.is_grad_enabled() or transformed():  # somebody may differentiate the gradients
        return _Backward.apply(do, dlse, q, k, v, bias, slopes, sink, o, lse, problem, aux, module)
    return module.backward(problem, do, dlse, q, k, v, o, lse, _given(aux, bias, slopes, sink))


class _Backward(torch.autograd.Function):
    """The backward as a function of its own, so that asking for ITS derivative meets our sentence."""

    @staticmethod
    def forward(
        do: Tensor,
        dlse: Tensor | None,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        bias: Tensor | None,
        slopes: Tensor | None,
        sink: Tensor | None,
        o: Tensor,
        lse: Tensor,
        problem: Problem,
        aux: Aux,
        module: ModuleType,
    ) -> tuple[Tensor | None, ...]:
        aux = _given(aux, bias, slopes, sink)
        return module.backward(problem, do, dlse, q, k, v, o, lse, aux)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Any, ...]) -> None:
        pass

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        raise NotImplementedError(TWICE)

    @staticmethod
    def jvp(ctx: Any, *tangents: Any) -> Any:
        raise NotImplementedError(FORWARD_MODE)

    @staticmethod
    def vmap(info: Any, in_dims: Any, *args: Any) -> Any:
        raise NotImplementedError(VMAP)


# ---- the traced door -------------------------------------------------------------------------------------------------
# A flat schema. `blocks`: a BlockMask's tensors, `blocks_q`, `blocks_k`: its lengths; `top_left`: the Band's align.


@torch.library.custom_op("tilewise::forward", mutates_args=())
def forward_op(
    q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, slopes: Tensor | None, sink: Tensor | None,
    mask: Tensor | None, blocks: list[Tensor], seed: Tensor | None, cu_q: Tensor | None, cu_k: Tensor | None,
    q_lens: Tensor | None, k_lens: Tensor | None, left: int | None, right: int | None, top_left: bool,
    blocks_q: int, blocks_k: int, scale: float | None, softcap: float, dropout_p: float, deterministic: bool,
    bias_grad: bool, backend: str | None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    problem, aux, module = _rebuild(
        q, k, v, bias, slopes, sink, mask, blocks, seed, cu_q, cu_k, q_lens, k_lens, left, right, top_left,
        blocks_q, blocks_k, scale, softcap, dropout_p, deterministic, bias_grad, backend,
    )  # fmt: skip
    return module.forward(problem, q, k, v, aux)


@torch.library.custom_op("tilewise::backward", mutates_args=())
def backward_op(
    do: Tensor, dlse: Tensor | None, o: Tensor, lse: Tensor,
    q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, slopes: Tensor | None, sink: Tensor | None,
    mask: Tensor | None, blocks: list[Tensor], seed: Tensor | None, cu_q: Tensor | None, cu_k: Tensor | None,
    q_lens: Tensor | None, k_lens: Tensor | None, left: int | None, right: int | None, top_left: bool,
    blocks_q: int, blocks_k: int, scale: float | None, softcap: float, dropout_p: float, deterministic: bool,
    bias_grad: bool, backend: str | None,
) -> list[Tensor]:  # fmt: skip
    problem, aux, module = _rebuild(
        q, k, v, bias, slopes, sink, mask, blocks, seed, cu_q, cu_k, q_lens, k_lens, left, right, top_left,
        blocks_q, blocks_k, scale, softcap, dropout_p, deterministic, bias_grad, backend,
    )  # fmt: skip
    grads = module.backward(problem, do, dlse, q, k, v, o, lse, aux)
    return [grad for grad in grads if grad is not None]


def _rebuild(
    q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, slopes: Tensor | None, sink: Tensor | None,
    mask: Tensor | None, blocks: list[Tensor], seed: Tensor | None, cu_q: Tensor | None, cu_k: Tensor | None,
    q_lens: Tensor | None, k_lens: Tensor | None, left: int | None, right: int | None, top_left: bool,
    blocks_q: int, blocks_k: int, scale: float | None, softcap: float, dropout_p: float, deterministic: bool,
    bias_grad: bool, backend: str | None,
) -> tuple[Problem, Aux, ModuleType]:  # fmt: skip
    band = Band(left, right, "top_left" if top_left else "bottom_right")
    dense = BlockMask.from_tensors(blocks_q, blocks_k, blocks) if blocks else mask
    both: MaskLike = band if dense is None else band & dense
    problem, aux = Problem.of(
        q, k, v, mask=both, bias=bias, alibi_slopes=slopes, sink=sink, scale=scale, softcap=softcap,
        dropout_p=dropout_p, seed=seed, q_lens=q_lens, k_lens=k_lens, cu_seqlens_q=cu_q, cu_seqlens_k=cu_k,
        deterministic=deterministic,
    )  # fmt: skip
    if problem.bias is not None:
        problem = replace(problem, bias=replace(problem.bias, grad=bias_grad))
    return problem, aux, choose(problem, backend)


@forward_op.register_fake
def _(q: Tensor, k: Tensor, v: Tensor, *rest: Any) -> tuple[Tensor, Tensor]:
    lse_shape = (q.shape[1], q.shape[0]) if q.dim() == 3 else q.shape[:3]
    return empty((*q.shape[:-1], v.shape[-1]), q), q.new_empty(lse_shape, dtype=accumulator(q.dtype))


@backward_op.register_fake
def _(
    do: Tensor, dlse: Tensor | None, o: Tensor, lse: Tensor, q: Tensor, k: Tensor, v: Tensor,
    bias: Tensor | None, slopes: Tensor | None, sink: Tensor | None, *rest: Any,
) -> list[Tensor]:  # fmt: skip
    options = [bias if rest[-2] else None, slopes, sink]
    contiguous = [torch.empty(x.shape, dtype=x.dtype, device=x.device) for x in options if x is not None]
    return [*(empty(x.shape, x) for x in (q, k, v)), *contiguous]


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    tensors, (blocks, seed_to_k_lens, flat) = (*inputs[:7], *output), (inputs[7], inputs[8:13], inputs[13:])
    ctx.save_for_backward(*tensors, *seed_to_k_lens, *blocks)
    ctx.flat = flat
    ctx.set_materialize_grads(False)


def _backward(ctx: Any, do: Tensor | None, dlse: Tensor | None) -> tuple[Any, ...]:
    *inputs, o, lse = ctx.saved_tensors[:9]
    rest, blocks = ctx.saved_tensors[9:14], list(ctx.saved_tensors[14:])
    nothing = (None, [None] * len(blocks), *(None,) * 16)  # for mask, blocks and all that is no tensor
    if do is None and dlse is None:
        return (*(None,) * 6, *nothing)
    do = torch.zeros_like(o) if do is None else do
    grads = backward_op(do, dlse, o, lse, *inputs, blocks, *rest, *ctx.flat)
    bias, slopes, sink = inputs[3:6]
    given = [True, True, True, bias is not None and ctx.flat[-2], slopes is not None, sink is not None]
    left = iter(grads)
    return (*(next(left) if there else None for there in given), *nothing)


def _refuse(ctx: Any, *grads: Any) -> Any:
    raise NotImplementedError(TWICE)


forward_op.register_autograd(_backward, setup_context=_save)
backward_op.register_autograd(_refuse)


def attend_traced(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    mask: Any,
    bias: Tensor | None,
    alibi_slopes: Tensor | None,
    sink: Tensor | None,
    scale: float | None,
    softcap: float,
    dropout_p: float,
    seed: int | Tensor | None,
    q_lens: Tensor | None,
    k_lens: Tensor | None,
    cu_seqlens_q: Tensor | None,
    cu_seqlens_k: Tensor | None,
    deterministic: bool | None,
    backend: str | None,
) -> tuple[Tensor, Tensor]:
    """The same call as op: what torch.compile, FakeTensor and the meta device see."""
    if transformed():
        raise NotImplementedError(f"{FORWARD_MODE}; {VMAP}")
    band, dense = split_mask(mask)
    blocks, *size = (dense.tensors(), dense.q_len, dense.k_len) if isinstance(dense, BlockMask) else ((), 0, 0)
    if dropout_p > 0 and not isinstance(seed, Tensor):
        if seed is None:
            seed = torch.randint(-(2**63), 2**63 - 1, (), dtype=torch.int64, device=q.device)
        else:
            seed = torch.full((), seed - 2**64 if seed >= 2**63 else seed, dtype=torch.int64, device=q.device)
    return forward_op(
        q, k, v, bias, alibi_slopes, sink, None if blocks else dense, list(blocks), seed if dropout_p > 0 else None,
        cu_seqlens_q, cu_seqlens_k, q_lens, k_lens, band.left, band.right, band.align == "top_left", *size,
        scale, float(softcap), float(dropout_p),
        torch.are_deterministic_algorithms_enabled() if deterministic is None else deterministic,
        bias is not None and bias.requires_grad and torch.is_grad_enabled(), backend,
    )  # fmt: skip
