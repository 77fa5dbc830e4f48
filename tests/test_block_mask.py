"""BlockMask: its lists and bits, its builders and patterns, against the dense mask, tile by tile."""

import os
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tilewise import block_mask
from tilewise.block_mask import EMPTY, FULL, TILE, BlockMask

ROOT = Path(__file__).parents[1]


def random_dense(q_len, k_len, batch=1, heads=1, seed=0):
    """A dense mask whose tiles are EMPTY, FULL, random and (some of the random ones) equal."""
    generator = torch.Generator().manual_seed(seed)
    n, m = -(-q_len // TILE), -(-k_len // TILE)
    kind = torch.randint(0, 5, (batch, heads, n, m), generator=generator)
    patterns = torch.rand(3, TILE, TILE, generator=generator) > 0.5
    palette = torch.stack([torch.zeros(TILE, TILE) > 0, torch.ones(TILE, TILE) > 0, *patterns])
    return palette[kind].transpose(3, 4).reshape(batch, heads, n * TILE, m * TILE)[:, :, :q_len, :k_len]


def random_blocks(batch, heads):
    return BlockMask.from_dense(random_dense(200, 300, batch, heads))


def check_lists(blocks, dense):
    """Everything the lists say, tile by tile, against the dense mask."""
    bits = blocks.bits
    assert bits.dtype == torch.uint8
    assert bits.shape[1:] == (TILE, TILE // 8)
    assert torch.equal(block_mask._unpack(blocks.turned), block_mask._unpack(bits).mT)
    used = set()
    n, m = -(-blocks.q_len // TILE), -(-blocks.k_len // TILE)
    for lists, rows, columns in ((blocks.query_major, n, m), (blocks.key_major, m, n)):
        shape = (blocks.batch, blocks.heads, rows)
        assert all(x.dtype == torch.int32 and x.is_contiguous() for x in lists)
        assert [tuple(x.shape) for x in lists] == [shape, (*shape, columns)] + [shape] + 2 * [(*shape, columns)]
        full_count, full, mixed_count, mixed, mixed_bits = (x.tolist() for x in lists)
        for b in range(blocks.batch):
            for h in range(blocks.heads):
                for r in range(rows):
                    some, others = full_count[b][h][r], mixed_count[b][h][r]
                    fulls, mixeds = full[b][h][r][:some], mixed[b][h][r][:others]
                    assert not any(full[b][h][r][some:] + mixed[b][h][r][others:] + mixed_bits[b][h][r][others:])
                    assert fulls == sorted(fulls)
                    assert mixeds == sorted(mixeds)
                    pool = dict(zip(mixeds, mixed_bits[b][h][r], strict=False))
                    for c in range(columns):
                        i, j = (r, c) if lists is blocks.query_major else (c, r)
                        tile = dense[b, h, i * TILE : (i + 1) * TILE, j * TILE : (j + 1) * TILE]
                        assert (c in fulls) == bool(tile.all())
                        assert (c in mixeds) == bool(tile.any() and not tile.all())
                        if c in pool:
                            used.add(pool[c])
                            whole = torch.zeros(TILE, TILE, dtype=torch.bool)
                            whole[: tile.shape[0], : tile.shape[1]] = tile
                            byte = whole.view(TILE, TILE // 8, 8).long() << torch.arange(8)
                            assert torch.equal(bits[pool[c]], byte.sum(-1).to(torch.uint8))
    assert used == set(range(len(bits))), "a row of the pool that no tile uses"
    assert len(torch.unique(bits.flatten(1), dim=0)) == len(bits), "a bit tile twice in the pool"


SHAPES = [(1, 1), (1, 300), (128, 128), (129, 127), (250, 640), (513, 384), (7, 0), (0, 7), (0, 0)]


@pytest.mark.parametrize(("q_len", "k_len"), SHAPES)
@pytest.mark.parametrize(("batch", "heads"), [(1, 1), (2, 1), (1, 3), (2, 3)])
def test_dense_round_trip_and_lists(q_len, k_len, batch, heads):
    dense = random_dense(q_len, k_len, batch, heads, seed=q_len + k_len)
    blocks = BlockMask.from_dense(dense)
    assert (blocks.q_len, blocks.k_len, blocks.batch, blocks.heads) == (q_len, k_len, batch, heads)
    assert torch.equal(blocks.to_dense(), dense)
    check_lists(blocks, dense)
    assert blocks.density() == (dense.double().mean().item() if dense.numel() else 0.0)
    again = BlockMask.from_tensors(q_len, k_len, blocks.tensors())
    assert torch.equal(again.to_dense(), dense)
    slots = batch * heads * -(-q_len // TILE) * -(-k_len // TILE)
    counts = 8 * batch * heads * (-(-q_len // TILE) + -(-k_len // TILE))
    assert blocks.nbytes == 24 * slots + 2 * 2048 * len(blocks.bits) + counts


@settings(deadline=None, max_examples=25)
@given(st.integers(0, 300), st.integers(0, 300), st.integers(0, 2**20), st.sampled_from([0.0, 0.001, 0.5, 0.999, 1.0]))
def test_dense_round_trip_of_any_density(q_len, k_len, seed, share):
    dense = torch.rand(q_len, k_len, generator=torch.Generator().manual_seed(seed)) < share
    blocks = BlockMask.from_dense(dense)
    assert torch.equal(blocks.to_dense()[0, 0], dense)
    check_lists(blocks, dense[None, None])


@pytest.mark.parametrize("value", [False, True])
@pytest.mark.parametrize(("q_len", "k_len"), [(100, 300), (256, 128)])
def test_all_and_nothing_need_no_bits(value, q_len, k_len):
    blocks = BlockMask.from_dense(torch.full((q_len, k_len), value))
    assert len(blocks.bits) == 0
    assert blocks.density() == value
    assert (blocks.tile_map() == (FULL if value else EMPTY)).all()
    assert (blocks.to_dense() == value).all()


def test_full_tile_beside_a_cut_last_tile():
    dense = torch.ones(130, 200, dtype=torch.bool)
    dense[0, 0] = False
    assert BlockMask.from_dense(dense).tile_map().tolist() == [[[[0, FULL], [FULL, FULL]]]]
    dense[129, 199] = False  # the last pair: now the cut tile is MIXED
    assert BlockMask.from_dense(dense).tile_map().tolist() == [[[[0, FULL], [FULL, 1]]]]


def test_from_dense_takes_any_strides():
    base = random_dense(300, 200, 2, 3)
    for view in (base.transpose(2, 3), base[:, :, ::2, ::3], base[:, :1].expand(2, 3, 300, 200), base[0], base[0, 0]):
        want = view[(None,) * (4 - view.ndim)]
        assert torch.equal(BlockMask.from_dense(view).to_dense(), want)


@pytest.mark.parametrize("budget", [1, 3, 10, 10**6])
@pytest.mark.parametrize(("q_len", "k_len", "batch", "heads"), [(513, 700, 2, 3), (100, 900, 1, 2), (1, 1, 2, 2)])
def test_predicate_in_chunks_of_any_size(monkeypatch, budget, q_len, k_len, batch, heads):
    """Every chunk, together each pair once; index tensors as documented; no more tiles at a time than allowed."""
    chunks = block_mask._chunks
    monkeypatch.setattr(block_mask, "_chunks", lambda *args: chunks(*args[:-1], budget))
    pairs = 0

    def f(b, h, i, j):
        nonlocal pairs
        assert all(x.dtype == torch.int64 for x in (b, h, i, j))
        x, y, r, c = b.shape[0], h.shape[1], i.shape[2], j.shape[3]
        assert (b.shape, h.shape) == ((x, 1, 1, 1), (1, y, 1, 1))
        assert (i.shape, j.shape) == ((1, 1, r, 1), (1, 1, 1, c))
        assert x * y * -(-r // TILE) * -(-c // TILE) <= budget
        assert i.max() < q_len
        assert j.max() < k_len
        assert b.max() < batch
        assert h.max() < heads
        pairs += x * y * r * c
        return (i * 7 + j * 3 + b * 5 + h) % 11 < 4

    b, h = torch.arange(batch).view(-1, 1, 1, 1), torch.arange(heads).view(-1, 1, 1)
    blocks = BlockMask.from_predicate(f, q_len, k_len, batch, heads)
    assert pairs == q_len * k_len * batch * heads
    dense = (torch.arange(q_len)[:, None] * 7 + torch.arange(k_len) * 3 + b * 5 + h) % 11 < 4
    assert torch.equal(blocks.to_dense(), dense)
    check_lists(blocks, dense)


@pytest.mark.parametrize(
    "f",
    [
        lambda b, h, i, j: i >= j,
        lambda b, h, i, j: j < 150,
        lambda b, h, i, j: (b == 1) & (h != 0),
        lambda b, h, i, j: (i[0, 0] - j[0, 0]) % 5 == 0,
        lambda b, h, i, j: torch.tensor(True),
        lambda b, h, i, j: (torch.tensor([3, 200])[b] < j) & (torch.tensor([1, 2, 3])[h] * i > j),
    ],
)
def test_predicate_may_return_any_shape_that_broadcasts(f):
    b, h = torch.arange(2).view(2, 1, 1, 1), torch.arange(3).view(1, 3, 1, 1)
    i, j = torch.arange(260).view(1, 1, -1, 1), torch.arange(300).view(1, 1, 1, -1)
    blocks = BlockMask.from_predicate(f, 260, 300, 2, 3)
    assert torch.equal(blocks.to_dense(), f(b, h, i, j).expand(2, 3, 260, 300))


def test_predicate_of_nothing_is_not_asked():
    for sizes in ((0, 5), (5, 0), (5, 5, 0, 1), (5, 5, 1, 0)):
        blocks = BlockMask.from_predicate(lambda *_: pytest.fail("asked"), *sizes)
        assert blocks.to_dense().numel() == 0
        assert blocks.density() == 0.0
        assert blocks.show()


def test_pool_is_unique_across_chunks_and_when_sums_collide(monkeypatch):
    """Weights of zero make the sums of all tiles equal: only the exact comparison can tell them apart then."""
    dense = random_dense(900, 900, 1, 2)
    want = BlockMask.from_dense(dense)
    chunks = block_mask._chunks
    monkeypatch.setattr(block_mask, "_chunks", lambda *args: chunks(*args[:-1], 1))
    monkeypatch.setattr(block_mask, "_weights", lambda device: torch.zeros(2 * TILE, dtype=torch.int64))
    blocks = BlockMask.from_dense(dense)
    assert torch.equal(blocks.to_dense(), dense)
    check_lists(blocks, dense)
    assert torch.equal(blocks.bits, want.bits), "the order of the pool is that of appearance"


def test_pool_merges_as_it_grows(monkeypatch):
    """4000 different tiles, each seen twice, added a few at a time."""
    tiles = torch.randint(0, 2**62, (4000, 2 * TILE), generator=torch.Generator().manual_seed(0))
    order = torch.cat([torch.randperm(4000, generator=torch.Generator().manual_seed(seed)) for seed in (1, 2)])
    pool = block_mask._Pool(torch.device("cpu"))
    tickets, most = [], 0
    for part in order.split(37):
        tickets.append(pool.add(tiles[part]))
        most = max(most, len(pool.unique) + pool.held)
    bits, rows = pool.finish()
    assert len(bits) == 4000
    assert most <= 3 * 4000 + 1024 + 37
    back = bits[rows[torch.cat(tickets).long()].long()].view(-1, TILE * TILE // 8).view(torch.int64)
    assert torch.equal(back, tiles[order])


@pytest.mark.parametrize(("batch", "heads"), [((1, 1), (1, 1)), ((2, 1), (1, 3)), ((2, 2), (3, 3))])
@pytest.mark.parametrize(("q_len", "k_len"), [(300, 500), (128, 256), (1, 129)])
def test_and_of_block_masks(q_len, k_len, batch, heads):
    one, two = (random_dense(q_len, k_len, batch[x], heads[x], seed=x) for x in (0, 1))
    both = BlockMask.from_dense(one) & BlockMask.from_dense(two)
    assert torch.equal(both.to_dense(), one & two)
    check_lists(both, one & two)
    disjoint = BlockMask.from_dense(one) & BlockMask.from_dense(~one)
    assert disjoint.density() == 0
    assert len(disjoint.bits) == 0


def test_from_tiles():
    layout = torch.rand(2, 3, 3, 2) > 0.5
    for part in (layout, layout[0], layout[0, 0]):
        blocks = BlockMask.from_tiles(part, 300, 200)
        dense = part.repeat_interleave(TILE, -2).repeat_interleave(TILE, -1)[..., :300, :200]
        assert len(blocks.bits) == 0
        assert torch.equal(blocks.to_dense(), dense[(None,) * (4 - dense.ndim)])
    assert BlockMask.from_tiles(torch.ones(0, 2, dtype=torch.bool), 0, 200).to_dense().shape == (1, 1, 0, 200)


def picture(blocks):
    return blocks.show().split("\n")[1:]


def test_patterns_by_hand():
    assert picture(BlockMask.local_global(512, 512, 0, 1)) == ["####", "##..", "#.#.", "#..#"]
    assert picture(BlockMask.local_global(256, 512, 1, 0)) == [".###", "..##"]
    assert picture(BlockMask.local_global(500, 200, 0, 0)) == ["..", "..", "#.", ".#"]
    assert picture(BlockMask.strided(512, 512, 1, 3)) == ["##.#", "###.", ".###", "#.##"]
    assert picture(BlockMask.strided(256, 512, 0, 2)) == ["#.#.", ".#.#"]
    assert picture(BlockMask.butterfly(512, 512)) == ["###.", "##.#", "#.##", ".###"]
    assert picture(BlockMask.butterfly(256, 512)) == ["#.##", ".###"]
    assert picture(BlockMask.butterfly(384, 384)) == ["###", "##.", "#.#"]


def test_butterfly_is_the_union_of_the_butterfly_factors():
    """Factor k of a butterfly matrix: the diagonal, and pairs 2^k apart within blocks of 2^(k + 1)."""
    n = 16
    want = torch.eye(n, dtype=torch.bool)
    for k in range(4):
        half = 2**k
        for start in range(0, n, 2 * half):
            for x in range(start, start + half):
                want[x, x + half] = want[x + half, x] = True
    blocks = BlockMask.butterfly(n * TILE, n * TILE)
    assert torch.equal(blocks.tile_map()[0, 0] == FULL, want)
    assert (blocks.query_major.full_count == 5).all()  # log2(n) + 1 tiles a row


def test_show_is_a_picture_and_shrinks():
    window = BlockMask.from_predicate(lambda b, h, i, j: (i >= j) & (i - j < 1024), 4096, 4096, heads=2)
    lines = window.show().split("\n")
    assert lines[0].startswith("BlockMask: batch 1, heads 2, 4096 x 4096 in 32 x 32 tiles of 128; 21.9% visible; 2 bit")
    assert lines[1] == "+" + 31 * "."
    assert lines[32] == 23 * "." + "+" + 7 * "#" + "+"
    small = window.show(width=8).split("\n")
    assert "4 x 4 a character" in small[0]
    assert small[1:] == ["+.......", "#+......", "+#+.....", ".+#+....", "..+#+...", "...+#+..", "....+#+.", ".....+#+"]
    assert BlockMask.from_dense(torch.ones(1024, 1024) > 0).show(width=4).split("\n")[1:] == ["####"] * 4


@pytest.mark.parametrize(
    ("make", "error", "words"),
    [
        (lambda: BlockMask.from_tiles(torch.ones(2, 2), 256, 256), TypeError, "layout.*torch.bool.*float32"),
        (lambda: BlockMask.from_tiles(torch.ones(2, 2) > 0, 257, 256), ValueError, r"\(\.\.\., 3, 2\).*\(1, 1, 2, 2\)"),
        (lambda: BlockMask.from_tiles(torch.ones(2) > 0, 1, 1), ValueError, "2 to 4 dimensions"),
        (lambda: BlockMask.from_tiles(torch.ones(1, 1) > 0, -1, 1), ValueError, "q_len must be at least 0.*-1"),
        (lambda: BlockMask.from_dense([[True]]), TypeError, "mask.*torch.bool.*list"),
        (lambda: BlockMask.from_dense(torch.ones(1, 1, 1, 1, 1) > 0), ValueError, "2 to 4 dimensions"),
        (lambda: BlockMask.from_predicate(3, 1, 1), TypeError, "function of .b, h, i, j.*int"),
        (lambda: BlockMask.from_predicate(lambda b, h, i, j: i > j, 1, 2.0), TypeError, "k_len must be an int.*2.0"),
        (lambda: BlockMask.from_predicate(lambda b, h, i, j: i > j, 1, 1, -1), ValueError, "batch must be at least 0"),
        (lambda: BlockMask.from_predicate(lambda b, h, i, j: i - j, 1, 1), TypeError, "bool tensor.*int64"),
        (lambda: BlockMask.from_predicate(lambda b, h, i, j: True, 1, 1), TypeError, "bool tensor.*got bool"),
        (lambda: BlockMask.from_predicate(lambda b, h, i, j: (i > j)[..., :2, :], 5, 5), ValueError, r"\(1, 1, 2, 5\)"),
        (lambda: BlockMask.from_predicate(lambda b, h, i, j: (i > j)[None], 5, 5), ValueError, "broadcasts to"),
        (lambda: BlockMask.strided(256, 256, 1, 0), ValueError, "stride must be at least 1"),
        (lambda: BlockMask.local_global(256, 256, -1, 0), ValueError, "local_tiles must be at least 0"),
        (lambda: BlockMask.butterfly(256, None), TypeError, "k_len must be an int"),
        (lambda: BlockMask.from_tensors(1, 1, ()), ValueError, "12"),
        (lambda: BlockMask.butterfly(1, 1) & (torch.ones(1, 1) > 0), TypeError, "from_dense"),
        (lambda: (torch.ones(1, 1) > 0) & BlockMask.butterfly(1, 1), TypeError, "from_dense"),
        (lambda: BlockMask.butterfly(1, 1) & BlockMask.butterfly(1, 2), ValueError, "same lengths"),
        (lambda: random_blocks(2, 1) & random_blocks(3, 1), ValueError, "equal or 1"),
    ],
)
def test_faults_name_the_argument(make, error, words):
    with pytest.raises(error, match=words):
        make()


def test_identity_hash_and_devices():
    one, two = BlockMask.butterfly(256, 256), BlockMask.butterfly(256, 256)
    assert one != two
    assert len({one, two, one}) == 2
    assert one.to("cpu") is one
    assert one.device.type == "cpu"
    meta = one.to("meta")
    assert meta is not one
    assert meta.device.type == "meta"
    assert meta.q_len == 256
    assert BlockMask.TILE == TILE == 128


def test_predicate_over_16k_is_quick():
    """Processor time, all threads: about 2 s; elapsed time would also count what others do on the machine."""
    start = time.process_time()
    blocks = BlockMask.from_predicate(lambda b, h, i, j: (i >= j) & ((i - j < 1024) | (j < 64)), 16384, 16384)
    assert time.process_time() - start < 20
    assert len(blocks.bits) == 4
    assert blocks.density() == sum(min(i + 1, 1024 + 64) for i in range(16384)) / 16384**2


@pytest.mark.slow
def test_predicate_over_96k_stays_under_1_gib():
    """In a process of its own, so that the peak is this work's alone."""
    script = """
        import resource, torch
        from tilewise.block_mask import BlockMask
        peak = lambda: resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
        before = peak()
        blocks = BlockMask.from_predicate(lambda b, h, i, j: (i >= j) & ((i - j < 4096) | (j % 1000 < 5)), 98304, 98304)
        print(peak() - before, blocks.density())
    """
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(script)],
        env=os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    grown, density = map(float, done.stdout.split())
    assert grown < 1.0
    i = torch.arange(98304)
    far = (i - 4096).clamp(min=-1) + 1  # keys before the window; of each 1000 of them 5 are seen
    seen = (i + 1 - far) + far // 1000 * 5 + (far % 1000).clamp(max=5)
    assert density == seen.sum().item() / 98304**2
