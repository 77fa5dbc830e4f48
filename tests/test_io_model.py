"""The IO model: bytes in closed form equal bytes counted while the algorithms run, and both bear the paper out.

The algorithms that are counted are also checked against softmax(S) V in fp64: what is counted is attention.
"""

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tilewise.algorithm import hbm, io_model, tiling
from tilewise.algorithm.backward import flash_attention_2_backward
from tilewise.algorithm.dropout import keep
from tilewise.algorithm.flash1 import FlashAttention1
from tilewise.algorithm.forward import flash_attention_2
from tilewise.algorithm.io_model import Cost, Sizes
from tilewise.algorithm.scores import Scores
from tilewise.algorithm.standard import Standard
from tilewise.block_mask import BlockMask
from tilewise.mask import Band

DTYPES = [torch.float16, torch.float32, torch.float64]
FULL = Band()
EMPTY = Band(-1, 0)  # no pair

bounds = st.none() | st.integers(-12, 12)
bands = st.sampled_from([FULL, Band(None, 0), EMPTY]) | st.builds(
    Band, bounds, bounds, st.sampled_from(["bottom_right", "top_left"])
)
io = settings(max_examples=50, deadline=None)


@st.composite
def sizes(draw, least: int = 0, most: int = 24, dtypes=DTYPES) -> tuple[Sizes, torch.dtype]:
    """Sizes of a small call and its dtype."""
    dtype = draw(st.sampled_from(dtypes))
    return Sizes(
        q_len=draw(st.integers(least, most)),
        k_len=draw(st.integers(least, most)),
        d=draw(st.integers(1, 9)),
        d_v=draw(st.integers(1, 9)),
        batch=draw(st.integers(1, 2)),
        heads=draw(st.integers(1, 3)),
        element=dtype.itemsize,
        acc=max(dtype.itemsize, 4),
    ), dtype


def tensors(size: Sizes, dtype: torch.dtype, seed: int = 0) -> tuple[torch.Tensor, ...]:
    """q, k, v, do."""
    make = torch.Generator().manual_seed(seed)
    shapes = ((size.q_len, size.d), (size.k_len, size.d), (size.k_len, size.d_v), (size.q_len, size.d_v))
    return tuple(torch.randn((size.batch, size.heads, *shape), generator=make).to(dtype) for shape in shapes)


def some(part: dict[str, int]) -> dict[str, int]:
    """Without the arrays that a loop never reached."""
    return {name: size for name, size in part.items() if size}


def assert_equal(traffic: hbm.Traffic, cost: Cost, on_chip: bool = True) -> None:
    """Every number that both have, array by array."""
    assert some(traffic.loaded) == some(cost.loaded)
    assert some(traffic.stored) == some(cost.stored)
    assert some(traffic.arrays) == some(cost.arrays)
    assert traffic.bytes == cost.bytes
    assert traffic.allocated == cost.allocated
    if on_chip:
        assert traffic.peak_on_chip == cost.peak_on_chip


def assert_steps_equal(traffic: hbm.Traffic, cost: Cost) -> None:
    """The same, kernel by kernel."""
    assert_equal(traffic, cost)
    assert list(traffic.kernels) == [step.name for step in cost.steps]
    for step in cost.steps:
        assert_equal(traffic.kernels[step.name], Cost((step,)))
        assert some(traffic.kernels[step.name].on_chip) == some(step.on_chip)


def plain(q, k, v, do, scale: float, visible: torch.Tensor, dropout_p: float = 0.0, seed: int = 0):
    """o, dq, dk, dv by autograd in fp64; visible: bool, broadcastable to (b, h, N, k_len)."""
    q, k, v = (x.double().requires_grad_() for x in (q, k, v))
    S = (scale * q @ k.mT).masked_fill(~visible, -math.inf)
    P = torch.softmax(S, -1).masked_fill(~visible.any(-1, keepdim=True), 0.0)
    if dropout_p:
        b, h, i, j = (torch.arange(n) for n in S.shape)
        Z = keep(seed, dropout_p, b[:, None, None, None], h[:, None, None], i[:, None], j[None])
        P = P * Z / (1 - dropout_p)
    o = P @ v
    return (o, *torch.autograd.grad(o, (q, k, v), do.double()))


def assert_attention(actual, expected, dtype: torch.dtype) -> None:
    for x, reference in zip(actual, expected, strict=True):
        assert x.dtype == dtype
        assert not x.isnan().any()
        tolerance = {torch.float16: 5e-2, torch.float32: 1e-5, torch.float64: 1e-12}[dtype]
        torch.testing.assert_close(x.double(), reference, rtol=tolerance, atol=tolerance)


# --- counter and closed form are equal -----------------------------------------------------------------------------


@given(
    sizes(least=1), st.tuples(st.integers(2, 30), st.integers(2, 30)), bands, st.sampled_from([0.0, 0.3]), st.booleans()
)
@io
def test_standard_counts_as_the_model_says(size, blocks, band, dropout_p, fused) -> None:
    size, dtype = size
    q, k, v, do = tensors(size, dtype)
    attention = Standard(0.7, blocks, band, dropout_p, seed=5, fused=fused)
    options = {"fused": fused, "masked": not band.is_full, "dropout": dropout_p > 0}
    with hbm.counting() as traffic:
        o, P, P_dropped = attention.forward(q, k, v)
    assert_steps_equal(traffic, io_model.standard(size, blocks, **options))
    with hbm.counting() as traffic:
        grads = attention.backward(do, q, k, v, P, P_dropped)
    assert_steps_equal(traffic, io_model.standard_backward(size, blocks, **options))
    assert_attention((o, *grads), plain(q, k, v, do, 0.7, band.dense(size.q_len, size.k_len), dropout_p, 5), dtype)


@given(sizes(), st.tuples(st.integers(2, 30), st.integers(2, 30)), bands, st.sampled_from([0.0, 0.3]))
@io
def test_flash_attention_1_counts_as_the_model_says(size, blocks, band, dropout_p) -> None:
    size, dtype = size
    q, k, v, do = tensors(size, dtype)
    attention = FlashAttention1(0.7, blocks, band, None, dropout_p, seed=5)
    with hbm.counting() as traffic:
        o, *statistics = attention.forward(q, k, v)
    assert_steps_equal(traffic, io_model.flash_attention_1(size, blocks, band=band))
    with hbm.counting() as traffic:
        grads = attention.backward(do, q, k, v, o, *statistics)
    assert_steps_equal(traffic, io_model.flash_attention_1_backward(size, blocks, band=band))
    assert_attention((o, *grads), plain(q, k, v, do, 0.7, band.dense(size.q_len, size.k_len), dropout_p, 5), dtype)


@st.composite
def block_masks(draw, size: Sizes) -> BlockMask:
    """Random tiles EMPTY, FULL and MIXED, shared or of their own for batches and heads."""
    shape = (draw(st.sampled_from([1, size.batch])), draw(st.sampled_from([1, size.heads])), size.q_len, size.k_len)
    make = torch.Generator().manual_seed(draw(st.integers(0, 2**16)))
    tiles = torch.randint(3, (*shape[:2], -(-size.q_len // 128), -(-size.k_len // 128)), generator=make)
    kind = tiles.repeat_interleave(128, 2).repeat_interleave(128, 3)[:, :, : size.q_len, : size.k_len]
    return BlockMask.from_dense((kind == 1) | ((kind == 2) & (torch.rand(shape, generator=make) < 0.2)))


def layouts(mask: BlockMask, n: int, g: int) -> list[list[bool]]:
    """The mask's tiles of one batch and head that have a visible pair, from its dense form."""
    dense = mask.to_dense()[min(n, mask.batch - 1), min(g, mask.heads - 1)]
    return [[bool(tile.any()) for tile in rows.split(128, 1)] for rows in dense.split(128, 0)]


def sum_of_heads(model, size: Sizes, blocks, band: Band, mask: BlockMask) -> Cost:
    """The model of a mask that differs by head: one head after the other, and the larger on-chip part of each array."""
    one = Sizes(size.q_len, size.k_len, size.d, size.d_v, 1, 1, size.element, size.acc)
    steps = [
        model(one, blocks, band=band, live=io_model.live_tiles(layouts(mask, n, g), blocks)).steps[0]
        for n in range(size.batch)
        for g in range(size.heads)
    ]
    on_chip = {name: max(step.on_chip[name] for step in steps) for name in steps[0].on_chip}
    cost = Cost(tuple(steps))
    return Cost((io_model.Step(steps[0].name, cost.loaded, cost.stored, on_chip, cost.arrays, cost.flops),))


@given(st.data(), sizes(least=1, most=400, dtypes=[torch.float64]), bands, st.sampled_from([0.0, 0.3]))
@settings(max_examples=25, deadline=None)
def test_block_sparse_counts_as_the_model_says(data, size, band, dropout_p) -> None:
    size, dtype = size
    blocks = data.draw(st.sampled_from([(128, 128), (64, 200), (48, 48), (150, 256)]), label="blocks")
    mask = data.draw(block_masks(size), label="mask")
    q, k, v, do = tensors(size, dtype)
    attention = FlashAttention1(0.7, blocks, band, mask, dropout_p, seed=5)
    with hbm.counting() as traffic:
        o, *statistics = attention.forward(q, k, v)
    assert_steps_equal(traffic, sum_of_heads(io_model.flash_attention_1, size, blocks, band, mask))
    with hbm.counting() as traffic:
        grads = attention.backward(do, q, k, v, o, *statistics)
    assert_steps_equal(traffic, sum_of_heads(io_model.flash_attention_1_backward, size, blocks, band, mask))
    visible = band.dense(size.q_len, size.k_len) & mask.to_dense()
    assert_attention((o, *grads), plain(q, k, v, do, 0.7, visible, dropout_p, 5), dtype)


def run_flash_attention_2(size: Sizes, dtype: torch.dtype, blocks, band: Band, mask: BlockMask | None = None):
    """(forward, backward) traffic of FlashAttention-2's loops."""
    q, k, v, do = tensors(size, dtype)
    rules = Scores(
        scale=0.7,
        band=band,
        offset=band.offset(size.q_len, size.k_len),
        blocks=mask,
        batch_index=range(size.batch),
        head_index=range(size.heads),
    )
    with hbm.counting() as forward:
        o, lse = flash_attention_2(q, k, v, rules, blocks)
    with hbm.counting() as backward:
        flash_attention_2_backward(q, k, v, o, lse, do, rules, blocks)
    return forward, backward


@given(sizes(most=150), st.tuples(st.integers(1, 6), st.integers(1, 6)), bands)
@io
def test_flash_attention_2_counts_as_the_model_says(size, blocks, band) -> None:
    size, dtype = size
    blocks = 16 * blocks[0], 16 * blocks[1]
    forward, backward = run_flash_attention_2(size, dtype, blocks, band)
    for traffic, model in (forward, io_model.flash_attention_2), (backward, io_model.flash_attention_2_backward):
        cost = model(size, blocks, band=band)
        assert_equal(traffic, cost, on_chip=False)
        held, static = largest(traffic, *traffic.kernels.values()), largest(*cost.steps)
        if band.is_full and min(size.q_len, size.k_len) > 0:
            assert held == static
        # A Band cuts its range into pieces that may all be smaller than the buffers, which are static in the model.
        assert all(held[name] <= static[name] for name in held)


def largest(*parts: hbm.Traffic | io_model.Step) -> dict[str, int]:
    """Each array's largest tile on the chip."""
    names = {name for part in parts for name in part.on_chip}
    return {name: max(part.on_chip.get(name, 0) for part in parts) for name in names}


@given(st.data(), st.integers(1, 4), st.integers(1, 4), bands.filter(lambda band: sum(band.bounds) >= 0))
@settings(max_examples=20, deadline=None)
def test_block_sparse_flash_attention_2_counts_as_the_model_says(data, rows, columns, band) -> None:
    size = Sizes(128 * rows, 128 * columns, 4, 4, batch=2, heads=2, element=4)
    shared = Sizes(size.q_len, size.k_len, 4, 4)
    mask = data.draw(block_masks(shared), label="mask")
    live = io_model.live_tiles(layouts(mask, 0, 0), (128, 128))
    forward, backward = run_flash_attention_2(size, torch.float32, (128, 128), band, mask)
    assert_equal(forward, io_model.flash_attention_2(size, (128, 128), band=band, live=live), on_chip=False)
    assert_equal(backward, io_model.flash_attention_2_backward(size, (128, 128), band=band, live=live), on_chip=False)


@given(sizes(least=1, most=30), bands)
@io
def test_flops_are_those_of_the_visited_pairs(size, band) -> None:
    """With tiles of one pair, exactly the visible pairs are visited: 2 products forward, 5 backward."""
    size, _ = size
    pairs = size.batch * size.heads * band.count(size.q_len, size.k_len)
    assert io_model.flash_attention_1(size, (1, 1), band=band).flops == 2 * (size.d + size.d_v) * pairs
    assert io_model.flash_attention_1_backward(size, (1, 1), band=band).flops == 2 * (3 * size.d + 2 * size.d_v) * pairs
    pairs = size.batch * size.heads * size.q_len * size.k_len
    assert io_model.standard(size, (7, 5)).flops == 2 * (size.d + size.d_v) * pairs
    assert io_model.standard_backward(size, (7, 5)).flops == 2 * (2 * size.d + 2 * size.d_v) * pairs
    assert io_model.flash_attention_2(size, (16, 16)).flops == 2 * (size.d + size.d_v) * pairs
    assert io_model.flash_attention_2_backward(size, (16, 16)).flops == 2 * (3 * size.d + 2 * size.d_v) * pairs


# --- the paper's claims --------------------------------------------------------------------------------------------


def counted(algorithm: str, N: int, d: int, M: int) -> int:
    """Bytes counted while one head's forward runs on a chip that holds M elements."""
    q, k, v, _ = tensors(Sizes(N, N, d, d), torch.float32)
    with hbm.counting() as traffic:
        if algorithm == "standard":
            Standard(1.0, tiling.matmul_blocks(M, d)).forward(q, k, v)
        elif algorithm == "flash 1":
            FlashAttention1(1.0, tiling.paper_blocks(M, d)).forward(q, k, v)
        else:
            flash_attention_2(q, k, v, Scores(), tiling.flash_2_blocks(M, d))
    return traffic.bytes


POINTS = [(256, 1024), (512, 1024), (512, 2048), (512, 4096), (1024, 2048), (1024, 4096)]  # (N, M) of the fits; d = 16


def exponents(moved: list[int]) -> tuple[float, float]:
    """(a, b) of bytes ~ N^a M^b at POINTS, by least squares on the logarithms."""
    (a, b, _), *_ = np.linalg.lstsq(np.c_[np.log(POINTS), np.ones(len(POINTS))], np.log(moved), rcond=None)
    return a, b


@pytest.mark.parametrize(("algorithm", "passes"), [("flash 1", 3 * 16 + 4), ("flash 2", 2 * 16)])
def test_flash_attention_moves_n_squared_over_m(algorithm: str, passes: int) -> None:
    moved = [counted(algorithm, N, 16, M) for N, M in POINTS]
    in_N, in_M = exponents(moved)
    assert in_N == pytest.approx(2, abs=0.15)
    assert in_M == pytest.approx(-1, abs=0.15)
    # What the exponents lack is the part that is linear in N: with it the fit is exact. `passes`: elements a row that
    # go by each of the N 4d / M outer tiles (Q, O, O again, and l, m twice; or K and V).
    N, M = np.array(POINTS).T
    (_, b), *_ = np.linalg.lstsq(np.c_[N, N**2 / M], np.array(moved), rcond=None)
    assert b == pytest.approx(4 * passes * 4 * 16, rel=1e-6)


def test_standard_attention_moves_n_squared_whatever_m_is() -> None:
    in_N, in_M = exponents([counted("standard", N, 16, M) for N, M in POINTS])
    assert in_N == pytest.approx(2, abs=0.1)
    assert in_M == pytest.approx(0, abs=0.1)


def test_flash_attention_moves_d_squared() -> None:
    """At fixed N and M: Nd bytes go by Nd / M times. (l and m, of size N, go by as well and are left out here.)"""
    heads = np.array([16, 32, 64])
    moved = []
    for d in heads.tolist():
        q, k, v, _ = tensors(Sizes(512, 512, d, d), torch.float32)
        with hbm.counting() as traffic:
            FlashAttention1(1.0, tiling.paper_blocks(2048, d)).forward(q, k, v)
        moved.append(
            sum(part[name] for part in (traffic.loaded, traffic.stored) for name in ("Q", "O") if name in part)
        )
    exponent, _ = np.polyfit(np.log(heads), np.log(moved), 1)
    assert exponent == pytest.approx(2, abs=0.05)


def test_standard_attention_is_a_sum_of_nd_and_n_squared() -> None:
    """Counted bytes are a N d + b N^2 exactly, with the b that the steps give: 6 N^2 and K's and V's repeated loads."""
    d, (B, _) = 16, tiling.matmul_blocks(4 * 16 * 16, 16)
    N = np.array([B, 2 * B, 5 * B, 12 * B])
    moved = np.array([counted("standard", n, d, 4 * d * d) for n in N.tolist()])
    (a, b), *_ = np.linalg.lstsq(np.c_[N * d, N**2], moved, rcond=None)
    assert np.allclose(a * N * d + b * N**2, moved, rtol=1e-9)
    assert a == pytest.approx(4 * 2)
    assert b == pytest.approx(4 * (6 + 2 * d / B))


@pytest.mark.parametrize(("N", "d", "M"), [(100, 8, 1000), (300, 16, 4096), (64, 64, 16384)])
def test_flash_attention_1_needs_4nd_plus_2n_elements(N: int, d: int, M: int) -> None:
    q, k, v, _ = tensors(Sizes(N, N, d, d), torch.float32)
    inputs = sum(x.numel() for x in (q, k, v))
    with hbm.counting() as traffic:
        FlashAttention1(1.0, tiling.paper_blocks(M, d)).forward(q, k, v)
    assert inputs + traffic.allocated / 4 == 4 * N * d + 2 * N
    assert traffic.peak_on_chip / 4 <= 1.25 * M + 4 * d + 2 * d  # four tiles and S; whole rows; and l, m
    with hbm.counting() as traffic:
        Standard(1.0, tiling.matmul_blocks(M, d)).forward(q, k, v)
    assert inputs + traffic.allocated / 4 == 4 * N * d + 2 * N * N


def test_bytes_shrink_with_the_share_of_live_tiles() -> None:
    """Proposition 4: what depends on N^2 d^2 / M is multiplied by the share of the tiles that are not EMPTY."""
    size, blocks = Sizes(2048, 2048, 64, 64), (64, 128)
    few = [[(i + j) % 4 == 0 for j in range(16)] for i in range(16)]
    dense, sparse = (
        io_model.flash_attention_1(size, blocks, live=live) for live in (None, io_model.live_tiles(few, blocks))
    )
    none = io_model.flash_attention_1(size, blocks, live=lambda i, j: False)
    assert 4 * (sparse.bytes - none.bytes) == dense.bytes - none.bytes
    assert none.bytes == 2 * (3 * 2048 * 64) + 4 * 2 * 2048  # K and V in; O, l and m filled
    assert 4 * sparse.flops == dense.flops


def test_the_papers_chip_gives_5_to_9_times_fewer_bytes() -> None:
    M = tiling.elements(100 * 1024, 2)
    ratios = []
    for N in (1024, 2048, 4096):
        for options in (False, True):
            cost = io_model.compare(Sizes(N, N, 64, 64, batch=2, heads=3), M, masked=options, dropout=options)
            ratios.append(cost["standard"].bytes / cost["FlashAttention-1"].bytes)
    assert 4.9 < min(ratios) < 5.1
    assert 8.9 < max(ratios) < 9.1
    for count, ratio in ((15, ratios[-2]), (23, ratios[-1])):
        assert ratio == pytest.approx(count / 32 * M / 64**2, rel=0.06)


# --- the interface -------------------------------------------------------------------------------------------------


def test_compare_is_made_of_the_models() -> None:
    size, band, layout = Sizes(512, 512, 64, 64), Band(None, 0), [[True] * 4, [False] * 4, [True] * 4, [False] * 4]
    keys, queries, square = (64, 200), (200, 64), (171, 171)
    live = io_model.live_tiles(layout, keys)
    forward = io_model.compare(size, 51200, band=band, layout=layout, backward=False)
    assert forward == {
        "standard": io_model.standard(size, square, masked=True),
        "standard, fused": io_model.standard(size, square, fused=True, masked=True),
        "FlashAttention-1": io_model.flash_attention_1(size, keys, band=band),
        "block-sparse": io_model.flash_attention_1(size, keys, band=band, live=live),
        "FlashAttention-2": io_model.flash_attention_2(size, queries, band=band),
    }
    both = io_model.compare(size, 51200, band=band, layout=layout)
    for name, backward in {
        "standard": io_model.standard_backward(size, square, masked=True),
        "standard, fused": io_model.standard_backward(size, square, fused=True, masked=True),
        "FlashAttention-1": io_model.flash_attention_1_backward(size, keys, band=band),
        "block-sparse": io_model.flash_attention_1_backward(size, keys, band=band, live=live),
        "FlashAttention-2": io_model.flash_attention_2_backward(size, keys, band=band),
    }.items():
        assert both[name] == forward[name] + backward
        assert both[name].bytes == forward[name].bytes + backward.bytes


def test_predicted_time_takes_the_slower_of_bytes_and_flops_in_every_step() -> None:
    gpu = io_model.GPU("test", bandwidth=1e9, flops=1e12, shared=1, processors=1, source="none")
    slow_bytes = io_model.Step("a", {"Q": 3 * 10**9}, {"O": 10**9}, {}, {}, flops=10**12)
    slow_flops = io_model.Step("b", {"Q": 10**9}, {}, {}, {}, flops=2 * 10**12)
    assert io_model.predicted_time(Cost((slow_bytes,)), gpu) == pytest.approx(4.0)
    assert io_model.predicted_time(Cost((slow_flops,)), gpu) == pytest.approx(2.0)
    assert io_model.predicted_time(Cost((slow_bytes, slow_flops)), gpu) == pytest.approx(6.0)


def test_gpus_and_their_measured_ceilings() -> None:
    cost = Cost((io_model.Step("a", {"Q": 4_270_000_000}, {}, {}, {}, flops=0),))
    h200 = io_model.GPUS["H200"]
    assert io_model.predicted_time(cost, h200, measured=True) == pytest.approx(1e-3)
    assert io_model.predicted_time(cost, h200) == pytest.approx(4.27e-3 / 4.8)
    with pytest.raises(ValueError, match=r"^measured must be False for A100"):
        io_model.predicted_time(cost, io_model.GPUS["A100"], measured=True)
    for name, gpu in io_model.GPUS.items():
        assert gpu.name == name
        assert "datasheet" in gpu.source
