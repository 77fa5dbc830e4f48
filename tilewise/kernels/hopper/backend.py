"""The backend "hopper": forward and backward in Gluon on sm90."""

from __future__ import annotations

from functools import cache, lru_cache
from types import ModuleType

import torch
from torch import Tensor

from ...problem import Aux, Grads, Layout, Problem
from ..triton import backend as triton_backend
from . import config


@lru_cache(maxsize=512)
def why_not(problem: Problem) -> str | None:
    """None, or why this backend does not take the problem."""
    if problem.device != "sm90":
        return f"it is for Hopper GPUs, sm90 (q is on {problem.device})"
    if problem.cache is not None:
        return "it does not read a key/value cache"
    if reason := triton_backend.why_not(problem):  # of Triton's version, and for the backward
        return reason
    if problem.dtype not in (torch.float16, torch.bfloat16):
        return f"it takes fp16 and bf16, not {str(problem.dtype).removeprefix('torch.')}"
    d, v_dim = problem.qk_dim, problem.v_dim
    if d % 8 or v_dim % 8 or max(d, v_dim) > config.WIDTHS[-1]:
        return f"it takes head sizes that are multiples of 8, up to {config.WIDTHS[-1]}, not {d if d == v_dim else f'{d}/{v_dim}'}"
    if problem.scale <= 0:
        return f"it takes a positive scale, not {problem.scale:g}"
    return _options_without(problem)


def _options_without(problem: Problem) -> str | None:
    """The sentence about the first option that there is no code for."""
    options = {
        "a boolean mask": problem.mask == "bool",
        "a bias": problem.bias is not None,
        "ALiBi": problem.alibi,
    }
    return next((f"it does not take {name} yet" for name, asked in options.items() if asked), None)


def forward(problem: Problem, q: Tensor, k: Tensor, v: Tensor, aux: Aux) -> tuple[Tensor, Tensor]:
    """o (`problem.o_shape`, q's dtype) and lse (`problem.lse_shape`, fp32)."""
    if problem.dropout_p > 0 and (aux.origin[2] % config.RUN or aux.origin[3] % config.MOST_KEYS):
        return triton_backend.forward(problem, q, k, v, aux)  # the same bits: here threads have whole runs of pairs
    return _host().forward(problem, q, k, v, aux)


def backward(
    problem: Problem, do: Tensor, dlse: Tensor | None, q: Tensor, k: Tensor, v: Tensor, o: Tensor, lse: Tensor, aux: Aux
) -> Grads:
    """The gradients of everything that was given."""
    drawn_elsewhere = problem.dropout_p > 0 and (aux.origin[2] % config.RUN or aux.origin[3] % config.RUN)
    if drawn_elsewhere or backward_elsewhere(problem):
        return triton_backend.backward(problem, do, dlse, q, k, v, o, lse, aux)
    return _backward_host().backward(problem, do, dlse, q, k, v, o, lse, aux)


@lru_cache(maxsize=512)
def backward_elsewhere(problem: Problem) -> tuple[str, str] | None:
    """None, or whose the backward of a problem that this backend takes is, and why."""
    varied = problem.q_layout is Layout.PACKED or problem.q_lens or problem.k_lens
    if config.is_split(problem):
        if problem.dropout_p > 0:
            return "triton", f"it takes no dropout at head sizes over {max(config.BACKWARD)}"
        if varied:
            return "triton", f"it takes sequences of one length at head sizes over {max(config.BACKWARD)}"
        if problem.mask == "blocks":
            return "triton", f"it takes no block mask at head sizes over {max(config.BACKWARD)}"
    if problem.mask == "blocks" and problem.deterministic:
        return "triton", "it takes no block mask where it is to be deterministic"
    if 0 in (*problem.o_shape, *problem.k_shape):  # TMA knows no empty tensors
        return "triton", "there is nothing to add up"
    return None


@cache
def _host() -> ModuleType:
    """Imported when it is needed, for Triton is not imported before."""
    from . import host

    return host


@cache
def _backward_host() -> ModuleType:
    from . import backward_host

    return backward_host
