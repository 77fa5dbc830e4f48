"""Triton's interpreter in a fraction of the time, computing what it computes.

Each change is made where this version of Triton has the names that it needs; elsewhere the interpreter stays slow.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import triton.language as tl
from triton.runtime import interpreter


def patch_once_a_kernel() -> None:
    """It exchanges the functions of `triton.language` for its own when a kernel starts, and again for every call of a
    jitted function within it, each of which looks through the whole module: half of all the time. Once is enough.
    """
    patch, executor = getattr(interpreter, "_patch_lang", None), getattr(interpreter, "GridExecutor", None)
    if patch is None or executor is None:
        return
    run = executor.__call__
    patched: dict[tuple[str, ...], Any] = {}  # within the running kernel, by the modules that a function sees

    def patch_first(fn: Any) -> Any:
        seen = tuple(sorted(name for name, value in fn.__globals__.items() if value is tl or value is tl.core))
        if seen not in patched:
            patched[seen] = patch(fn)
        return patched[seen]

    def run_kernel(self: Any, *args: Any, **options: Any) -> Any:
        patched.clear()
        try:
            return run(self, *args, **options)
        finally:
            patched.clear()

    interpreter._patch_lang, executor.__call__ = patch_first, run_kernel


def leave_out_what_no_one_reads() -> None:
    """It computes each sum and product of integers again in 64 bits, for an assertion that it makes only under `debug`:
    a third of what is left.
    """
    builder = getattr(interpreter, "interpreter_builder", None)
    options = getattr(builder, "options", None)
    if getattr(options, "sanitize_overflow", False) and options.debug is False:
        builder.options = dataclasses.replace(options, sanitize_overflow=False)


def look_up_dtypes_once() -> None:
    """It makes a table of all dtypes each time that it wants NumPy's name of one."""
    look_up = getattr(interpreter, "_get_np_dtype", None)
    if look_up is None:
        return
    found: dict[str, Any] = {}

    def remembered(dtype: Any) -> Any:
        if dtype.name not in found:
            found[dtype.name] = look_up(dtype)
        return found[dtype.name]

    interpreter._get_np_dtype = remembered
