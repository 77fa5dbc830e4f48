"""How tensors lie: rows that kernels can load, descriptors of them, memory for results."""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache

import torch
from torch import Tensor

from ..layout import by_token, empty, laid, strides_of
from ..problem import Problem
from .launch import Box

READY = 512  # what is kept of calls that repeat
FAR = 2**30  # the row that a `ragged` descriptor ends at
_MOST = 0x7FFF0000  # a side that nothing reaches

Strides = tuple[int, ...]
Memory = tuple[tuple[int, ...], Strides, torch.dtype]  # what torch.empty_strided is to make


def q_shape(problem: Problem) -> tuple[int, ...]:
    return (*problem.o_shape[:-1], problem.qk_dim)


def v_shape(problem: Problem) -> tuple[int, ...]:
    return (*problem.k_shape[:-1], problem.v_dim)


def dense_rows(*tensors: Tensor, expanded: bool = True) -> tuple[list[Tensor], list[Strides]]:
    """Each tensor, or a copy in the same order whose rows are contiguous and begin at multiples of 8 elements: what vector loads and
    descriptors read; and the strides of each. expanded: whether rows may lie in one place, as no descriptor has them."""
    rows, strides = [], []
    for x in tensors:
        stride = _strides_of_rows(x.shape, x.stride())
        if stride is None or x.data_ptr() & 15 or (not expanded and 0 in stride):
            x, stride = _copied(x)
        rows.append(x)
        strides.append(stride)
    return rows, strides


@lru_cache(maxsize=READY)
def _strides_of_rows(shape: tuple[int, ...], stride: Strides) -> Strides | None:
    """The strides, 8 where the size is 1, if the tensor's rows are contiguous and all lie a multiple of 8 elements apart."""
    *apart, last = [n if size > 1 else 8 for n, size in zip(stride, shape, strict=True)]
    if (last != 1 and shape[-1] > 1) or any(n % 8 for n in apart):
        return None
    return (*apart, 1)


def _copied(x: Tensor) -> tuple[Tensor, Strides]:
    width = -(-x.shape[-1] // 8) * 8
    copy = empty((*x.shape[:-1], width), x)[..., : x.shape[-1]].copy_(x)
    stride = _strides_of_rows(copy.shape, copy.stride())
    assert stride is not None
    return copy, stride


# --- descriptors -------------------------------------------------------------------------------------------------------


def whole(shape: Strides, strides: Strides, side: int, width: int) -> Box | None:
    """A descriptor of a dense x (B, H, S, D). None: the hardware has none for no elements, or one element for many."""
    if 0 in shape or min(strides) <= 0:
        return None
    return Box(shape, strides, (1, 1, side, width))


def ragged(shape: Strides, strides: Strides, side: int, width: int) -> Box | None:
    """A descriptor of x (T, H, D) or (B, H, S, D) that clips at an end which the kernel names, whatever lies behind it.

    Row i of a sequence that has `end` rows from `start` on is at (FAR, start + end, head, FAR - end + i): from i = end on
    it is past the fourth side, FAR, and the hardware gives zeros. Its address is right because the first side's stride,
    2^34 elements less a row, takes back FAR rows, and FAR 2^34 elements are a multiple of 2^64 bytes. The trick is of
    Triton's `tools.ragged_tma`. None: as `whole`, or sequences do not lie whole rows apart, or there are too many rows.
    """
    dense = len(shape) == 4
    heads, d = (shape[1], shape[3]) if dense else shape[1:]
    apart, of_head, row = strides[:3] if dense else (0, strides[1], strides[0])
    apart = apart if shape[0] > 1 else 0
    rows = shape[0] if not dense else shape[2] + (shape[0] - 1) * apart // max(row, 1)
    if 0 in shape or min(of_head, row) <= 0 or apart % row or rows > FAR:
        return None
    return Box((_MOST, _MOST, heads, FAR, d), (2**34 - row, row, of_head, row, 1), (1, 1, 1, side, width))


# --- memory ------------------------------------------------------------------------------------------------------------


def memory(shape: tuple[int, ...], dtype: torch.dtype, like: Strides | None = None) -> Memory:
    """Contiguous, or as a result that is made of a tensor with strides `like` lies."""
    return shape, strides_of(shape, like is not None and by_token(shape, like)), dtype


def lies(o: Tensor) -> tuple[Tensor, bool]:
    """(o, or a copy, without gaps; whether it lies by token): an o that came back from elsewhere, as kernels read it."""
    if o.is_contiguous():
        return o, False
    o = laid(o, o)
    return o, by_token(o.shape, o.stride())


def empty_strided(x: Tensor) -> Callable[[tuple[int, ...], Strides, torch.dtype], Tensor]:
    """torch.empty_strided for x's device. On the current GPU the function that code from torch.compile calls: it goes straight
    to the allocator, and takes half as long on the host as torch.empty_like or new_empty."""
    if x.is_cuda and x.get_device() == torch._C._cuda_getDevice():
        return torch._C._dynamo.guards._empty_strided_cuda  # type: ignore[attr-defined]
    return lambda shape, strides, dtype: torch.empty_strided(shape, strides, dtype=dtype, device=x.device)
