"""The tables of docs/algorithm.md: bytes, flops and memory, counted or by the model that equals the count.

One head, fp16, d = 64, and a chip of 100 KB where nothing else is said: the paper's M of 51200 elements.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from tilewise.algorithm import hbm, io_model, tiling
from tilewise.algorithm.flash1 import FlashAttention1
from tilewise.algorithm.forward import flash_attention_2
from tilewise.algorithm.scores import Scores
from tilewise.mask import Band

M, D = 51200, 64
CAUSAL = Band(None, 0)
Table = list[list[str]]


def sizes(N: int, batch: int = 1, heads: int = 1) -> io_model.Sizes:
    return io_model.Sizes(N, N, D, D, batch=batch, heads=heads)


def cards() -> Table:
    """Card, HBM in TB/s, matmuls in TFLOP/s, flops for each byte where both take as long."""
    return [
        [card.name, f"{card.bandwidth / 1e12:.2f}", f"{card.flops / 1e12:.0f}", f"{card.flops / card.bandwidth:.0f}"]
        for card in io_model.GPUS.values()
    ]


def forward_bytes() -> Table:
    """N, then MB of the forward: standard, fused, FlashAttention-1 and -2."""
    return _bytes(backward=False)


def both_bytes() -> Table:
    """The same of forward and backward together."""
    return _bytes(backward=True)


def _bytes(backward: bool) -> Table:
    return [
        [str(N), *(f"{cost.bytes / 1e6:.1f}" for cost in io_model.compare(sizes(N), M, backward=backward).values())]
        for N in (1024, 2048, 4096, 8192)
    ]


def intensity() -> Table:
    """N, then flops for each byte of the forward, as above."""
    return [
        [str(N), *(f"{cost.intensity:.0f}" for cost in io_model.compare(sizes(N), M, backward=False).values())]
        for N in (1024, 4096, 16384)
    ]


def memory() -> Table:
    """N, then MB allocated by forward and backward: standard, FlashAttention-1 and -2."""
    costs = [(N, io_model.compare(sizes(N), M)) for N in (1024, 4096, 16384)]
    names = ("standard", "FlashAttention-1", "FlashAttention-2")
    return [[str(N), *(f"{cost[name].allocated / 1e6:.1f}" for name in names)] for N, cost in costs]


def arrays() -> Table:
    """Array, then KiB in and out of FlashAttention-1's forward and -2's, counted at N = 1024; the sums last."""
    N = 1024
    q, k, v = torch.zeros(3, 1, 1, N, D, dtype=torch.float16)
    with hbm.counting() as first:
        FlashAttention1(D**-0.5, tiling.paper_blocks(M, D)).forward(q, k, v)
    with hbm.counting() as second:
        flash_attention_2(q, k, v, Scores(scale=D**-0.5), tiling.flash_2_blocks(M, D))
    columns = (first.loaded, first.stored, second.loaded, second.stored)
    table = [[name, *(_kib(moved.get(name, 0)) for moved in columns)] for name in ("Q", "K", "V", "O", "l", "m", "L")]
    return [*table, ["Σ", *(_kib(sum(moved.values())) for moved in columns)]]


def _kib(size: int) -> str:
    return f"{size / 1024:.0f}"


def causal() -> Table:
    """N, then shares of the full problem's pairs and bytes that the causal forward takes: FlashAttention-1 and -2."""
    table = []
    for N in (1024, 4096, 16384):
        full = io_model.compare(sizes(N), M, backward=False)
        cut = io_model.compare(sizes(N), M, band=CAUSAL, backward=False)
        row = [str(N)]
        for name in "FlashAttention-1", "FlashAttention-2":
            row += [_share(cut[name].flops, full[name].flops), _share(cut[name].bytes, full[name].bytes)]
        table.append(row)
    return table


def sparse() -> Table:
    """Live tiles, then MB and Gflop of block-sparse FlashAttention in both directions, N = 4096, and shares of all."""
    N, side = 4096, 128
    n = N // side
    table = []
    for width in (1, 2, 4, 8, 16, n):
        layout = [[abs(i - j) < width for j in range(n)] for i in range(n)]
        costs = io_model.compare(sizes(N), M, layout=layout)
        cost, full = costs["block-sparse"], costs["FlashAttention-1"]
        live = sum(map(sum, layout))
        table.append(
            [
                _share(live, n * n),
                f"{cost.bytes / 1e6:.1f}",
                _share(cost.bytes, full.bytes),
                f"{cost.flops / 1e9:.1f}",
                _share(cost.flops, full.flops),
            ]
        )
    return table


def _share(part: float, whole: float) -> str:
    return f"{100 * part / whole:.0f} %"


TABLES: dict[str, Callable[[], Table]] = {
    table.__name__: table for table in (cards, forward_bytes, both_bytes, intensity, memory, arrays, causal, sparse)
}
