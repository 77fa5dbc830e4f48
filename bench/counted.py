"""What `bench.counters` counts: attention calls, and what the model says DRAM sees of each."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

import tilewise
from tilewise.algorithm import dram_model
from tilewise.algorithm.dram_model import Eager, Kernel, Machine
from tilewise.algorithm.io_model import Sizes
from tilewise.mask import Band, causal
from tilewise.problem import Problem

from .gpu_cases import DTYPES

TOKENS, HIDDEN = 16384, 2048
DROPOUT = 0.1
TILE = (128, 128)  # of S in a library's matmul, about: what is asked of the L2 depends on it, what DRAM sees does not


@dataclass(frozen=True)
class Cell:
    """One call. mask: "full" or "causal". backend: "standard" is plain torch, a kernel for each step."""

    backend: str
    direction: str  # "forward" or "backward"
    dtype: str
    d: int
    mask: str
    seq: int
    batch: int
    heads: int
    dropout: bool = False

    @property
    def name(self) -> str:
        dropout = "dropout " * self.dropout
        size = f"({self.batch},{self.heads},{self.seq},{self.d})"
        return f"{self.backend} {self.direction} {self.dtype} {self.mask} {dropout}{size}"

    @property
    def band(self) -> Band:
        return causal if self.mask == "causal" else Band()

    @property
    def fields(self) -> dict[str, Any]:
        return asdict(self)

    @property
    def sizes(self) -> Sizes:
        return Sizes(self.seq, self.seq, self.d, self.d, self.batch, self.heads, DTYPES[self.dtype].itemsize)


def cells() -> list[Cell]:
    """The paper's setting, then 16k tokens of hidden size 2048 in sequences of three lengths, with two head sizes.

    Standard attention at 16k is forward alone: its backward holds five matrices of N x N.
    """
    paper = [
        Cell(backend, direction, "fp16", 64, "causal", 1024, 64, 16, dropout=True)
        for backend in ("standard", "triton", "hopper")
        for direction in ("forward", "backward")
    ]
    grid = [
        Cell(backend, direction, "bf16", d, "full", seq, TOKENS // seq, HIDDEN // d)
        for seq in (1024, 4096, 16384)
        for d in (64, 128)
        for backend in ("standard", "triton", "hopper")
        for direction in ("forward", "backward")
        if (backend, direction, seq) != ("standard", "backward", 16384)
    ]
    return paper + grid


# --- the calls -----------------------------------------------------------------------------------------------------


def standard_attention(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, dropout: bool) -> Tensor:
    """Plain torch, as it is written where nobody thinks of memory: each line a kernel. mask: True where a key is
    hidden."""
    S = q @ k.mT
    S = S * (1 / math.sqrt(q.shape[-1]))
    if mask is not None:
        S = torch.where(mask, -math.inf, S)
    P = torch.softmax(S, -1)
    del S
    if dropout:
        P = F.dropout(P, DROPOUT)
    return P @ v


def prepare(cell: Cell, device: str = "cuda") -> Callable[[], object]:
    """Everything but what is counted, done; calling the result launches the cell's kernels and no others."""
    torch.manual_seed(0)
    shape = cell.batch, cell.heads, cell.seq, cell.d
    q, k, v, do = (torch.randn(shape, device=device, dtype=DTYPES[cell.dtype]) for _ in range(4))
    if cell.backend == "standard":
        hidden = None
        if cell.mask == "causal":
            hidden = torch.ones(cell.seq, cell.seq, device=device, dtype=torch.bool).triu(1)

        def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            return standard_attention(q, k, v, hidden, cell.dropout)

    else:
        seed = torch.tensor(7, device=device) if cell.dropout else None
        options: dict[str, Any] = {"dropout_p": DROPOUT, "seed": seed} if cell.dropout else {}
        mask = None if cell.band.is_full else cell.band

        def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            return tilewise.attention(q, k, v, mask=mask, backend=cell.backend, **options)

    if cell.direction == "forward":
        return lambda: attend(q, k, v)
    inputs = [x.requires_grad_() for x in (q, k, v)]
    o = attend(*inputs)
    return lambda: torch.autograd.grad(o, inputs, do, retain_graph=True)


# --- the model -----------------------------------------------------------------------------------------------------


def model(cell: Cell, processors: int, device: str = "sm90") -> list[Kernel]:
    """The cell's kernels as the model has them, in the order of their launches. device: as in `Problem.device`."""
    if cell.backend == "standard":
        make = dram_model.standard if cell.direction == "forward" else dram_model.standard_backward
        options = Eager(mask=cell.mask != "full", dropout=cell.dropout)
        return make(cell.sizes, TILE, Machine(processors), options)
    x = torch.empty(cell.batch, cell.heads, cell.seq, cell.d, dtype=DTYPES[cell.dtype], device="meta")
    mask = None if cell.band.is_full else cell.band
    problem, _ = Problem.of(x, x, x, mask=mask, dropout_p=DROPOUT if cell.dropout else 0.0, seed=7)
    problem = replace(problem, device=device)
    if cell.backend == "hopper":
        return _hopper(cell, problem, processors)
    return _triton(cell, problem, processors)


def _triton(cell: Cell, problem: Problem, processors: int) -> list[Kernel]:
    from tilewise.kernels.triton import config, host

    def blocks(kernel: str) -> tuple[int, int]:
        found = config.choose(problem, kernel)
        return found.rows, found.keys

    machine = Machine(2 * processors, host.together(problem))  # two programs a processor, more or less
    if cell.direction == "forward":
        return dram_model.flash_forward(cell.sizes, blocks("forward"), machine, band=cell.band)
    return dram_model.split_backward(cell.sizes, blocks("dq"), blocks("dkdv"), machine, band=cell.band)


def _hopper(cell: Cell, problem: Problem, processors: int) -> list[Kernel]:
    from tilewise.kernels.hopper import backend, config
    from tilewise.kernels.triton import host

    machine = Machine(processors, host.together(problem))
    if cell.direction == "forward":
        forward = config.choose(problem)
        return dram_model.flash_forward(cell.sizes, (forward.rows, forward.keys), machine, band=cell.band)
    if backend.backward_elsewhere(problem):
        return _triton(cell, problem, processors)
    if config.is_split(problem):
        split = config.split_of(cell.d, cell.d)
        sides = (split.dq.rows, split.dq.keys), (split.dkdv.rows, split.dkdv.keys)
        return dram_model.split_backward(cell.sizes, *sides, machine, band=cell.band)
    wide = config.backward_width(cell.d)
    tile = (config.BACKWARD[wide].rows, config.BACKWARD_KEYS)
    return dram_model.fused_backward(cell.sizes, tile, machine, width=wide, band=cell.band)
