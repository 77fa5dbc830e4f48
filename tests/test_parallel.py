"""Attention over several ranks is that of one device: values, gradients, dropout's bits; and faults end in errors."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from close import assert_close, evaluate
from ranks import Ranks
from torch import Tensor

import tilewise
from tilewise.parallel import ContextParallel
from tilewise.parallel.order import chunks
from tilewise.parallel.plan import Piece, Whole, depth, pieces, span

# --- one call, whole, and over ranks -------------------------------------------------------------------------------


@dataclass(frozen=True)
class Case:
    """A call in small. over: "ring 4", "ring 2", "ulysses 4", "ulysses 2" or "ring 2 x ulysses 2"."""

    over: str
    layout: str = "zigzag"
    head_groups: int | None = None
    batch: int = 1
    length: int = 256
    heads: int = 4
    kv_heads: int = 4
    dims: tuple[int, int] = (16, 16)
    dtype: torch.dtype = torch.float32
    mask: tilewise.Band | None = tilewise.causal
    blocks: bool = False
    slopes: str = ""  # "h", "bh"
    sink: bool = False
    lens: tuple[int, ...] | None = None
    cu: tuple[int, ...] | None = None
    through_lse: bool = False
    options: dict[str, Any] = field(default_factory=dict)

    def inputs(self) -> tuple[tuple[Tensor, ...], dict[str, Any]]:
        """(q, k, v, do, dlse) and the options of `tilewise.attention` or `attention_packed`."""
        draw = torch.Generator().manual_seed(7)

        def normal(*shape: int) -> Tensor:
            return torch.randn(*shape, generator=draw).to(self.dtype)

        d, v_dim = self.dims
        shapes = [(self.heads, d), (self.kv_heads, d), (self.kv_heads, v_dim), (self.heads, v_dim)]
        if self.cu is None:
            q, k, v, do = (normal(self.batch, h, self.length, n) for h, n in shapes)
        else:
            q, k, v, do = (normal(self.length, h, n) for h, n in shapes)
        dlse = normal(*(q.shape[:3] if self.cu is None else (self.heads, self.length))).float()
        options: dict[str, Any] = dict(self.options)
        n = self.batch if self.cu is None else len(self.cu) - 1
        if self.mask is not None:
            options["mask"] = self.mask
        if self.blocks:
            options["mask"] = self.block_mask() if self.mask is None else self.mask & self.block_mask()
        if self.slopes:
            shape = (self.heads,) if self.slopes == "h" else (n, self.heads)
            options["alibi_slopes"] = torch.rand(shape, generator=draw) / 32
        if self.sink:
            options["sink"] = torch.randn(self.heads, generator=draw)
        if self.lens is not None:
            lens = torch.tensor(self.lens, dtype=torch.int32)
            options |= {"q_lens": lens, "k_lens": lens}
        if self.cu is not None:
            cu = torch.tensor(self.cu, dtype=torch.int32)
            options |= {"cu_seqlens_q": cu, "cu_seqlens_k": cu}
        return (q, k, v, do, dlse if self.through_lse else None), options  # type: ignore[return-value]

    def block_mask(self) -> tilewise.BlockMask:
        return tilewise.BlockMask.from_predicate(
            lambda b, h, i, j: ((i - j) % (100 + 60 * h) < 50) | (i // 128 == j // 128),
            self.length, self.length, heads=self.heads,
        )  # fmt: skip


def parallel(case: Case) -> ContextParallel:
    """A new object each time; the groups are made once."""
    if case.over not in _groups:
        if case.over in ("ring 4", "ulysses 4"):
            _groups[case.over] = {case.over.split()[0]: dist.group.WORLD}
        else:
            mesh = dist.device_mesh.init_device_mesh("cpu", (2, 2), mesh_dim_names=("ring", "ulysses"))
            both = {"ring": mesh["ring"], "ulysses": mesh["ulysses"]}
            _groups.update({f"{name} 2": {name: group} for name, group in both.items()})
            _groups["ring 2 x ulysses 2"] = both
    return ContextParallel(**_groups[case.over], layout=case.layout, head_groups=case.head_groups)


_groups: dict[str, dict[str, Any]] = {}


class Gathered(torch.autograd.Function):
    """`unshard` with the gradient that each rank's shard of the whole has."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, over: ContextParallel, dim: int) -> Tensor:
        ctx.over, ctx.dim = over, dim
        return over.unshard(x, dim)

    @staticmethod
    def backward(ctx: Any, dx: Tensor) -> tuple[Tensor, None, None]:
        return ctx.over.shard(dx, ctx.dim), None, None


def over_ranks(over: ContextParallel, q: Tensor, k: Tensor, v: Tensor, **options: Any) -> tuple[Tensor, Tensor]:
    """o and lse as one device gives them."""
    options["lens"] = options.pop("q_lens", None)
    options.pop("k_lens", None)
    cu = options.pop("cu_seqlens_q", None)
    options.pop("cu_seqlens_k", None)
    if cu is None:
        q, k, v = (over.shard(x, 2) for x in (q, k, v))
        o, lse = over.attention(q, k, v, **options, return_lse=True)
        return Gathered.apply(o, over, 2), Gathered.apply(lse, over, 2)
    options.pop("lens")
    q, k, v = (over.shard(x, 0) for x in (q, k, v))
    o, lse = over.attention_packed(q, k, v, cu, **options, return_lse=True)
    return Gathered.apply(o, over, 0), Gathered.apply(lse, over, 1)


def check(case: Case) -> None:
    """On all ranks: the results of the whole, each gradient the sum of the ranks' shares, within the error budget."""
    over = parallel(case)
    inputs, options = case.inputs()
    got = evaluate(lambda q, k, v, **o: over_ranks(over, q, k, v, **o), *inputs, **options)
    for name in got.keys() - {"o", "lse"}:
        for group in (over.ring, over.ulysses):
            if group is not None:
                share = got[name].float()
                dist.all_reduce(share, group=group)
                got[name] = share.to(got[name].dtype)
    if dist.get_rank() == 0:
        assert_close(got, *inputs, **options)
        assert not torch.equal(got["dq"], torch.zeros_like(got["dq"]))


CASES = {
    "causal": Case("ring 4"),
    "causal, 2 ranks, heads in parts": Case("ring 2", head_groups=2, batch=2),
    "full": Case("ring 4", layout="contiguous", mask=None, dims=(24, 8)),
    "grouped, bf16, through lse": Case(
        "ring 4", dtype=torch.bfloat16, heads=6, kv_heads=3, head_groups=3, through_lse=True, batch=2),
    "fp16, two pieces": Case("ring 2", dtype=torch.float16, heads=2, kv_heads=1),
    "window": Case("ring 4", layout="contiguous", length=1024, mask=tilewise.sliding_window(100)),
    "window both ways, zig-zag": Case("ring 4", length=2048, heads=1, kv_heads=1, mask=tilewise.sliding_window(70, 30)),
    "rows without keys": Case("ring 4", mask=tilewise.Band(None, -60), through_lse=True),
    "dropout, softcap": Case("ring 4", options={"dropout_p": 0.3, "seed": 5, "softcap": 3.0}, batch=2),
    "dropout, window, 2 ranks": Case(
        "ring 2", length=1024, heads=2, kv_heads=1, mask=tilewise.sliding_window(150), options={"dropout_p": 0.3, "seed": 5}),
    "slopes": Case("ring 4", slopes="bh", batch=2, through_lse=True),
    "sink": Case("ring 4", sink=True, heads=4, kv_heads=2, head_groups=2, through_lse=True),
    "sink, window": Case("ring 4", length=512, sink=True, mask=tilewise.sliding_window(9), options={"scale": -0.3}),
    "lengths": Case("ring 4", batch=3, lens=(256, 0, 101), slopes="h"),
    "blocks": Case("ring 2", length=1024, blocks=True, heads=2, kv_heads=2, head_groups=2),
    "blocks, full, dropout": Case(
        "ring 2", length=1024, mask=None, blocks=True, heads=2, kv_heads=2, options={"dropout_p": 0.3, "seed": 5}),
    "packed": Case("ring 4", cu=(0, 40, 40, 170, 177, 256), heads=4, kv_heads=2),
    "packed, tokens of no sequence, full": Case("ring 4", cu=(0, 90, 230), mask=None, layout="contiguous"),
    "packed, dropout, slopes": Case(
        "ring 4", cu=(0, 3, 150, 150, 190, 256), slopes="bh", sink=True, head_groups=2, options={"dropout_p": 0.4, "seed": 5}),
    "packed, window, 2 ranks": Case(
        "ring 2", length=1024, cu=(0, 700, 1000), mask=tilewise.sliding_window(130), heads=2, kv_heads=2, through_lse=True),
    "ulysses": Case("ulysses 4", through_lse=True),
    "ulysses, fewer heads than ranks": Case("ulysses 4", kv_heads=2, sink=True, slopes="bh", batch=2),
    "ulysses, dropout, blocks": Case("ulysses 2", blocks=True, batch=2, options={"dropout_p": 0.3, "seed": 5}),
    "ulysses, packed, dropout": Case("ulysses 4", cu=(0, 40, 40, 170, 256), options={"dropout_p": 0.3, "seed": 5}),
    "both": Case("ring 2 x ulysses 2", through_lse=True, kv_heads=2),
    "both, dropout, slopes": Case("ring 2 x ulysses 2", slopes="h", sink=True, options={"dropout_p": 0.3, "seed": 5}),
    "both, packed": Case("ring 2 x ulysses 2", cu=(0, 40, 170, 250), options={"dropout_p": 0.3, "seed": 5}),
    "no tokens": Case("ring 4", length=0),
}  # fmt: skip


@pytest.fixture(scope="module")
def ranks() -> Iterator[Ranks]:
    pool = Ranks(4, timeout=60)
    yield pool
    pool.close()


@pytest.mark.parametrize("name", CASES)
def test_ranks_together_are_one_device(ranks: Ranks, name: str) -> None:
    ranks(check, CASES[name])
