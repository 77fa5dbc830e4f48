"""Descriptors of whole tensors: which elements they reach, where there are none, and which kernels load by them."""

from __future__ import annotations

from dataclasses import replace
from typing import Any
from unittest import mock

import pytest
import torch

pytest.importorskip("triton")

from tilewise import Problem, causal
from tilewise.kernels.launch import Box, recording
from tilewise.kernels.triton import config, host
from tilewise.kernels.triton.options import BOX, FAR, POINTERS, RAGGED

BF16 = torch.bfloat16


def reached(box: Box, *at: int) -> int | None:
    """The element that the hardware reads at these coordinates: bytes are counted in 64 bits. None: zeros."""
    if not all(0 <= n < side for n, side in zip(at, box.shape, strict=True)):
        return None
    assert all(side <= 2**32 for side in box.shape)
    assert all(0 < 2 * stride < 2**40 and stride % 8 == 0 for stride in box.strides[:-1])
    return sum(n * 2 * stride for n, stride in zip(at, box.strides, strict=True)) % 2**64 // 2


def positions(x: torch.Tensor) -> torch.Tensor:
    """Of each element, how far it is from the first."""
    return torch.arange(x.untyped_storage().size() // x.element_size()).as_strided(x.shape, x.stride())


def dense(layout: str) -> torch.Tensor:
    x = torch.empty(3, 5, 7, 16, dtype=BF16)
    return {"bhsd": x, "bshd": x.transpose(1, 2), "padded": x[:, :, :6, :8], "one": x[:1, :, :, :]}[layout]


@pytest.mark.parametrize("layout", ["bhsd", "bshd", "padded", "one"])
def test_a_whole_descriptor_is_the_tensor_and_clips_at_its_rows(layout: str) -> None:
    x = dense(layout)
    box = host.whole(x.shape, x.stride(), 64, 16)
    assert box is not None
    assert box.block == (1, 1, 64, 16)
    at = positions(x)
    for b, h, s, d in [(0, 0, 0, 0), (x.shape[0] - 1, 4, x.shape[2] - 1, 7), (0, 2, 3, 5)]:
        assert reached(box, b, h, s, d) == at[b, h, s, d]
    assert reached(box, 0, 0, x.shape[2], 0) is None
    assert reached(box, 0, 0, 0, x.shape[3]) is None


def test_there_is_no_descriptor_of_nothing_or_of_one_element_for_many() -> None:
    for x in (torch.empty(2, 0, 3, 16), torch.empty(2, 3, 0, 16), torch.empty(2, 1, 3, 16).expand(2, 4, 3, 16)):
        assert host.whole(x.shape, x.stride(), 64, 16) is None
        assert host.ragged(x.shape, x.stride(), 64, 16) is None


def test_sequences_that_do_not_lie_whole_rows_apart_have_no_ragged_descriptor() -> None:
    x = torch.empty(2, 5, 7, 24, dtype=BF16)[..., :16]
    apart = x.as_strided((2, 5, 7, 16), (x.stride(0) + 8, *x.stride()[1:]))
    assert host.ragged(x.shape, x.stride(), 64, 16) is not None
    assert host.ragged(apart.shape, apart.stride(), 64, 16) is None
    assert host.ragged((2, 1, FAR, 16), (16 * FAR, 16, 16, 1), 64, 16) is None


@pytest.mark.parametrize("layout", ["packed", "packed, strided", "bhsd", "bshd"])
@pytest.mark.parametrize("end", [0, 1, 4])
def test_a_ragged_descriptor_ends_with_the_sequence(layout: str, end: int) -> None:
    if layout.startswith("packed"):
        x = torch.empty(20, 3, 32, dtype=BF16)
        x = x[..., :16] if "strided" in layout else x
        s, start, apart, row = 0, 6, 0, x.stride(0)
        rows = positions(x)[start:, 2]
    else:
        x = dense(layout)
        s, start, apart, row = 2, 0, x.stride(0), x.stride(2)
        rows = positions(x)[s, 2]
    box = host.ragged(x.shape, x.stride(), 64, 16)
    assert box is not None
    assert box.block == (1, 1, 1, 64, 16)
    for i in range(6):  # as steps.source and load_tile have it
        at = reached(box, FAR, s * (apart // row) + start + end, 2, FAR - end + i, 3)
        assert at == (rows[i, 3] if i < end else None)


@pytest.mark.parametrize(
    ("x", "is_copied"),
    [
        (torch.rand(3, 5, 7, 16), False), (torch.rand(3, 7, 5, 16).transpose(1, 2), False),
        (torch.rand(3, 5, 7, 24)[..., :11], False), (torch.rand(3, 1, 7, 16).expand(3, 5, 7, 16), False),
        (torch.rand(3, 5, 7, 17)[:1, :1, :1, :16], False),  # strides of sizes 1 do not count
        (torch.rand(7, 2, 17), True), (torch.rand(3, 5, 7, 17)[..., :16], True), (torch.rand(3, 5, 16, 7).mT, True),
        (torch.rand(3, 5, 7, 20)[..., 4:], True), (torch.rand(3, 5, 7, 24)[..., 1:17], True),
        (torch.rand(3, 1, 7, 17).expand(3, 5, 7, 17), True), (torch.rand(1, 1, 7, 17).expand(3, 5, 7, 17), True),
        (torch.rand(3, 5, 7, 16)[..., :1].expand(3, 5, 7, 16), True), (torch.rand(3, 0, 7, 17), True),
    ],
)  # fmt: skip
def test_rows_are_copied_where_they_do_not_begin_at_multiples_of_8_elements(x: torch.Tensor, is_copied: bool) -> None:
    ((rows,), (strides,)) = host.dense_rows(x)
    assert (rows is not x) == is_copied
    torch.testing.assert_close(rows, x, rtol=0, atol=0, equal_nan=True)
    assert strides[-1] == 1
    assert all(n % 8 == 0 for n in strides[:-1])
    assert all(a == b or size <= 1 for a, b, size in zip(strides, rows.stride(), x.shape, strict=True))


def recorded(device: str = "sm90", cfg: config.Config | None = None, **given: Any) -> dict[str, Any]:
    """The launch of each kernel, recorded for a GPU."""
    d, offset = given.pop("d", 64), given.pop("offset", 0)
    shape = (40, 2, d + offset) if "cu_seqlens_q" in given else (2, 2, 40, d + offset)
    q = torch.empty(shape, dtype=BF16)[..., :d]
    q = q[:, :1].expand(shape) if given.pop("expanded", False) else q
    problem, aux = Problem.of(q, q, q, **given)
    problem = replace(problem, device=device)
    for cached in (host._forward, host._backward):
        cached.cache_clear()
    chosen = mock.patch.object(config, "choose", return_value=cfg or config.Config(64, 64, 4, 2, True))
    with chosen, recording() as launches:
        o, lse = host.forward(problem, q, q, q, aux)
        host.backward(problem, torch.empty_like(o), None, q, q, q, o, lse, aux)
    return {launch.kernel.__name__: launch for launch in launches if "q" in launch.kernel.arg_names}


LENS = torch.tensor([40, 20], dtype=torch.int32)


@pytest.mark.parametrize(
    ("given", "queries", "keys"),
    [
        ({}, BOX, BOX),
        ({"mask": causal, "sink": torch.ones(2)}, BOX, BOX),
        ({"cu_seqlens_q": torch.tensor([0, 10, 40], dtype=torch.int32)}, RAGGED, RAGGED),
        ({"k_lens": LENS}, BOX, RAGGED),
        ({"q_lens": LENS}, RAGGED, BOX),
        ({"offset": 1}, BOX, BOX),  # rows that do not begin at 16 bytes: a copy
        ({"d": 41}, BOX, BOX),
        ({"expanded": True}, POINTERS, POINTERS),
        ({"cfg": config.Config(64, 64, 4, 2)}, POINTERS, POINTERS),
    ],
)
def test_loads_are_by_descriptors_where_there_are_any(given: dict[str, Any], queries: int, keys: int) -> None:
    for name, launch in recorded(**given).items():
        options = launch.constexprs["O"]
        by_keys = name == "dkdv_kernel"
        assert (options.PASS, options.STAY) == ((queries, keys) if by_keys else (keys, queries)), name
        places = [n for n, arg in enumerate(launch.args) if type(arg).__name__ == "TensorDescriptor"]
        names = {launch.kernel.arg_names[n] for n in places}
        held = {"forward_kernel": {"q"}}.get(name, {"q", "do"})
        assert names == (held if queries else set()) | ({"k", "v"} if keys else set()), name


def test_tiles_are_as_wide_as_the_kernel_has_them() -> None:
    args = recorded(d=40)["dkdv_kernel"].args
    blocks = [arg.block_shape for arg in args if type(arg).__name__ == "TensorDescriptor"]
    assert blocks == [[1, 1, 64, 64]] * 4
