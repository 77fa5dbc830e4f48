"""Triton's interpreter in a fraction of the time.

It exchanges the functions of `triton.language` for its own when a kernel starts, and again for every call of a jitted
function within it, each of which looks through the whole module: half of all the time. Once a kernel is enough.
"""

from __future__ import annotations

from typing import Any

import triton.language as tl
from triton.runtime import interpreter


def patch_once_a_kernel() -> None:
    """Where this version of Triton has the two names below; elsewhere it stays slow."""
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
