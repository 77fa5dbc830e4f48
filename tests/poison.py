"""Memory that is read before it is written shows: what torch.empty and its kin give is NaN."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from unittest import mock

import torch


@contextlib.contextmanager
def poisoned_memory() -> Iterator[None]:
    """Within it all new, unwritten floating-point tensors are NaN, on every device that holds data."""

    def poison(make: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
        def made(*args: object, **options: object) -> torch.Tensor:
            t = make(*args, **options)
            return t.fill_(torch.nan) if t.is_floating_point() and t.device.type != "meta" else t

        return made

    with contextlib.ExitStack() as patches:
        for owner, name in (
            (torch, "empty"), (torch, "empty_like"), (torch, "empty_strided"), (torch.Tensor, "new_empty"),
            (torch.Tensor, "new_empty_strided"), (torch._C._dynamo.guards, "_empty_strided_cuda"),
        ):  # fmt: skip
            patches.enter_context(mock.patch.object(owner, name, poison(getattr(owner, name))))
        yield
