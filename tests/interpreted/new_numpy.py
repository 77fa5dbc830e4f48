"""Triton 3.6's interpreter beside NumPy 2.4 and later."""

from __future__ import annotations

from typing import Any

import triton
from triton.runtime import interpreter


def make_indices_of_one_element() -> None:
    """The bounds of a loop are arrays of one element there, and int() of those NumPy no longer has.

    Triton 3.7 squeezes them first.
    """
    if not triton.__version__.startswith("3.6."):
        return
    patch = interpreter._patch_lang_tensor

    def patch_and_mend(tensor: Any, scope: Any) -> None:
        patch(tensor, scope)  # the scope knows what was there before, and puts it back
        tensor.__index__ = lambda self: self.handle.data.item()

    interpreter._patch_lang_tensor = patch_and_mend
