"""`tilewise doctor`: what is installed, which backends work here, and why the others do not, and what would help."""

from __future__ import annotations

import importlib.util
import platform
from collections.abc import Iterator
from dataclasses import dataclass
from importlib import metadata

import torch

from .. import __version__, api, dispatch
from ..algorithm.reference import reference
from ..mask import causal
from ..problem import Problem, checked
from .check import devices

TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 2e-2}


@dataclass(frozen=True, slots=True)
class Diagnosis:
    """One backend on one device. works: it took the call and was right; note: the error, or why not and what helps."""

    backend: str
    device: str
    works: bool
    note: str


def versions() -> dict[str, str]:
    """Name -> version, or why there is none."""
    return {
        "tilewise": __version__,
        "python": f"{platform.python_version()} ({platform.system()}, {platform.machine()})",
        "torch": torch.__version__,
        "cuda": torch.version.cuda or "this torch is built without it",
        "triton": _version("triton") or "not installed; torch brings it with CUDA (Linux: pip install triton)",
    }


def hardware() -> dict[str, str]:
    """Device -> what it is, or what would make it one."""
    found = {"cpu": f"{torch.get_num_threads()} threads, {torch.backends.cpu.get_cpu_capability()}"}
    if torch.cuda.is_available():
        for n in range(torch.cuda.device_count()):
            device = torch.cuda.get_device_properties(n)
            memory = f"{device.total_memory / 2**30:.0f} GiB"
            found[f"cuda:{n}"] = f"{device.name}, sm{device.major}{device.minor}, {memory}"
    elif torch.version.cuda or torch.version.hip:
        found["cuda"] = "torch has GPU support but finds no GPU: is there one, and does nvidia-smi list it?"
    else:
        found["cuda"] = "none for this torch: for an NVIDIA GPU install a CUDA build (pip install torch)"
    return found


def diagnose() -> Iterator[Diagnosis]:
    """Each backend on each device, by a small real call, forward and backward, under `checked()`."""
    for device in devices():
        dtype = torch.float32 if device == "cpu" else torch.bfloat16
        draw = torch.Generator().manual_seed(0)
        q, k, v = (torch.randn(1, 2, 40, 64, generator=draw).to(device, dtype).requires_grad_() for _ in range(3))
        problem, aux = Problem.of(q, k, v, mask=causal)
        for name in dispatch.BACKENDS:
            reason = dispatch.backend(name).why_not(problem)
            if reason is not None:
                yield Diagnosis(name, device, False, reason)
                continue
            with checked():
                o = api.attention(q, k, v, mask=causal, backend=name)
                grads = torch.autograd.grad(o.float().square().sum(), (q, k, v))
            exact, _ = reference(problem, q, k, v, aux)
            error = (o - exact).abs().max().item()
            right = error < TOLERANCE[dtype] and all(grad.isfinite().all() for grad in grads)
            note = f"error of a causal call in {str(dtype).removeprefix('torch.')}: {error:.1e}"
            yield Diagnosis(name, device, right, note)


def _version(package: str) -> str | None:
    """The version of an installed package, without importing it."""
    return metadata.version(package) if importlib.util.find_spec(package) else None
