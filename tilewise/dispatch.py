"""Which backend takes a problem, and why the others do not.

A backend is a module with three names: `why_not(problem)`, `forward(...)`, `backward(...)`. They are tried fastest
first and imported only when asked. Nothing falls back silently: a backend that is named and cannot, raises its reason.
One that leaves the backward of what it takes to another says so by a fourth name, `backward_elsewhere(problem)`: None,
or whose it is, and why.
"""

from __future__ import annotations

import importlib
import sys
from types import ModuleType

from .problem import Problem

BACKENDS = {  # fastest first
    "hopper": "tilewise.kernels.hopper.backend",
    "triton": "tilewise.kernels.triton.backend",
    "tiled": "tilewise.algorithm.tiled",
}


def backend(name: str) -> ModuleType:
    """The backend's module. ValueError for an unknown name."""
    if name not in BACKENDS:
        raise ValueError(f"backend is {name!r}: it must be one of {', '.join(map(repr, BACKENDS))}, or None")
    path = BACKENDS[name]
    return sys.modules.get(path) or importlib.import_module(path)  # the former is what the latter finds, sooner


def choose(problem: Problem, name: str | None = None) -> ModuleType:
    """The module of the first backend that takes `problem`, or of the one named. ValueError with the reasons."""
    if name is not None:
        module = backend(name)
        if reason := module.why_not(problem):
            raise ValueError(f"backend {name!r} cannot do this: {reason} (problem: {problem})")
        return module
    reasons = []
    for candidate in BACKENDS:
        module = backend(candidate)
        reason = module.why_not(problem)
        if reason is None:
            return module
        reasons.append(f"{candidate}: {reason}")
    raise ValueError(f"no backend can do this: {'; '.join(reasons)} (problem: {problem})")


def explain(problem: Problem) -> str:
    """Which backend `problem` goes to, and for each of the others why not.

    >>> import torch, tilewise
    >>> q = torch.randn(1, 8, 1024, 64)
    >>> print(tilewise.explain(tilewise.Problem.of(q, q, q, mask=tilewise.causal)[0]))
    batch 1, 1024 queries x 1024 keys, 8 heads, d 64, float32, cpu, scale=0.125, causal
      hopper: it is for Hopper GPUs, sm90 (q is on cpu)
      triton: it needs a GPU (q is on the CPU)
      tiled: chosen
    """
    lines, chosen = [str(problem)], False
    for name in BACKENDS:
        reason = backend(name).why_not(problem)
        if reason is not None:
            lines.append(f"  {name}: {reason}")
        else:
            lines.append(f"  {name}: {'able, but slower' if chosen else f'chosen{_whose_backward(name, problem)}'}")
            chosen = True
    return "\n".join(lines)


def _whose_backward(name: str, problem: Problem) -> str:
    elsewhere = getattr(backend(name), "backward_elsewhere", None)
    found = elsewhere and elsewhere(problem)
    return f"; its backward is {found[0]}'s: {found[1]}" if found else ""
