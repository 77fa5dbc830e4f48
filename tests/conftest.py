"""What all tests share: contents are checked, torch takes one thread, and memory can be poisoned."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from importlib.metadata import PackageNotFoundError, version

import pytest
import torch

import tilewise

BACKENDS = ["tiled"]

torch.set_num_threads(1)  # the tensors are small, and pytest-xdist has a worker on every core


def pytest_report_header() -> str:
    """Which versions are tested: there are several to choose from (`make test-oldest`, `make test-tritons`)."""
    there = []
    for name in ("torch", "triton", "numpy"):
        try:
            there.append(f"{name}-{version(name)}")
        except PackageNotFoundError:
            there.append(f"no {name}")
    return ", ".join(there)


@pytest.fixture(params=BACKENDS)
def backend(request: pytest.FixtureRequest) -> str:
    """The name of each backend in turn."""
    return request.param


@pytest.fixture(autouse=True)
def contents_are_checked() -> Iterator[None]:
    with tilewise.checked():
        yield


@pytest.fixture
def poisoned(monkeypatch: pytest.MonkeyPatch) -> None:
    """Memory that is not written before it is read is NaN: what torch.empty and its kin give in this test."""

    def poison(make: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
        def made(*args: object, **options: object) -> torch.Tensor:
            t = make(*args, **options)
            return t.fill_(torch.nan) if t.is_floating_point() and t.device.type != "meta" else t

        return made

    for owner, name in (
        (torch, "empty"), (torch, "empty_like"), (torch, "empty_strided"), (torch.Tensor, "new_empty"),
        (torch.Tensor, "new_empty_strided"), (torch._C._dynamo.guards, "_empty_strided_cuda"),
    ):  # fmt: skip
        monkeypatch.setattr(owner, name, poison(getattr(owner, name)))
