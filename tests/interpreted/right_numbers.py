"""Where Triton's interpreter does not compute what a GPU does: bf16, and the maximum of a number and NaN."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
import triton.language as tl
from triton.runtime import interpreter


def convert_bf16() -> None:
    """It keeps bf16 in uint16, and its conversion from fp32 errs where rounding carries and below 2^-126."""
    convert = interpreter._convert_float

    def exactly(x: Any, source: Any, target: Any, rounding: Any) -> Any:
        if source == tl.float32 and target == tl.bfloat16:
            return torch.from_numpy(np.array(x)).bfloat16().view(torch.int16).numpy().view(np.uint16)
        if source == tl.bfloat16 and target == tl.float32:
            return x.astype(np.uint32) << 16
        return convert(x, source, target, rounding)

    interpreter._convert_float = exactly


def multiply_bf16() -> None:
    """It multiplies those uint16."""
    builder = interpreter.InterpreterBuilder
    multiply = builder.create_dot

    def as_fp32(self: Any, a: Any, b: Any, *others: Any) -> Any:
        if a.dtype.scalar == tl.bfloat16:
            a, b = (self.cast_impl(x, tl.float32) for x in (a, b))
        return multiply(self, a, b, *others)

    builder.create_dot = as_fp32


def prefer_numbers_to_nan() -> None:
    """`tl.maximum` and `tl.minimum` without propagate_nan give the number; until 3.8 NaN won there."""
    builder = interpreter.InterpreterBuilder
    builder.create_maxnumf = lambda self, a, b: self.binary_op(a, b, np.fmax)
    builder.create_minnumf = lambda self, a, b: self.binary_op(a, b, np.fmin)
