"""The backend "triton": one launch for a forward, a few for a backward, on any GPU that Triton reaches."""

from __future__ import annotations

import os
from functools import cache, lru_cache
from importlib import metadata
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from ...problem import Aux, Grads, Problem
from ...problem_cached import FP8
from . import config, decode_config

OLDEST = (3, 6)


def why_not(problem: Problem) -> str | None:
    """None, or why this backend does not take the problem."""
    return _why_not(problem, problem.device == "cpu" and interpreted())


@lru_cache(maxsize=512)
def _why_not(problem: Problem, interpreted: bool) -> str | None:
    if problem.device == "cpu" and not interpreted:
        return "it needs a GPU (q is on the CPU)"
    if problem.device in ("mps", "xpu", "meta"):
        return f"it runs on NVIDIA and AMD GPUs (q is on {problem.device})"
    version = _triton_version()
    if version is None:
        return "Triton is not installed"
    if version < OLDEST:
        return f"it needs Triton {OLDEST[0]}.{OLDEST[1]} or later; {version[0]}.{version[1]} is installed"
    if problem.dtype is torch.float64:
        return "it takes fp16, bf16 and fp32, not fp64"
    as_fp16 = problem.cache is not None and problem.cache.dtype is FP8
    if problem.dtype is torch.bfloat16 and problem.device == "cpu" and not as_fp16:
        return "Triton's interpreter does not multiply bf16"
    most = 512 if problem.cache is None else 1024
    if max(problem.qk_dim, problem.v_dim) > most:
        return f"it takes head sizes up to {most}, not {max(problem.qk_dim, problem.v_dim)}"
    return config.why_not(problem) if problem.cache is None else decode_config.why_not(problem)


def forward(problem: Problem, q: Tensor, k: Tensor, v: Tensor, aux: Aux) -> tuple[Tensor, Tensor]:
    """o (`problem.o_shape`, q's dtype) and lse (`problem.lse_shape`, fp32)."""
    return _host().forward(problem, q, k, v, aux)


def backward(
    problem: Problem, do: Tensor, dlse: Tensor | None, q: Tensor, k: Tensor, v: Tensor, o: Tensor, lse: Tensor, aux: Aux
) -> Grads:
    """The gradients of everything that was given. All sums run in a fixed order: bit-reproducible, deterministic or not."""
    return _host().backward(problem, do, dlse, q, k, v, o, lse, aux)


def append(problem: Problem, k_new: Tensor, v_new: Tensor | None, k: Tensor, v: Tensor, aux: Aux) -> None:
    """Store new keys and values behind the aux.k_lens that each sequence has; the lengths stay as they are."""
    _decode_host().append(problem, k_new, v_new, k, v, aux)


def attend(problem: Problem, q: Tensor, k: Tensor, v: Tensor, aux: Aux) -> tuple[Tensor, Tensor]:
    """o (`problem.o_shape`) and lse of queries that are the last tokens of aux.k_lens keys in the storage k, v."""
    return _decode_host().attend(problem, q, k, v, aux)


@cache
def _host() -> ModuleType:
    """Imported when it is needed, for Triton is not imported before."""
    from . import host

    return host


@cache
def _decode_host() -> ModuleType:
    from . import decode_host

    return decode_host


def interpreted() -> bool:
    """True where Triton's interpreter stands for a GPU."""
    return os.environ.get("TRITON_INTERPRET") == "1"


def _triton_version() -> tuple[int, int] | None:
    global _version
    if _version is False:
        try:
            major, minor = metadata.version("triton").split(".")[:2]
            _version = int(major), int(minor)
        except metadata.PackageNotFoundError:
            _version = None
    return _version


_version: Any = False
