"""`BlockMask`: which 128 x 128 tiles of the pairs are EMPTY, which FULL, and the bits of those that are neither.

What a `Band` cannot say in two numbers, said once in data that every backend can walk: lists of the live tiles of each
row and column of tiles, and a pool of unique bit tiles.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

import torch

from .mask import INF, Band, Device, Masked

TILE = 128  # rows and keys of a tile
EMPTY, FULL = -1, -2  # codes in a tile map (b, h, n, m) int32; a MIXED tile's code is its row in the pool of bit tiles

Predicate = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]


class TileLists(NamedTuple):
    """The live tiles of each row (or column) of tiles, FULL and MIXED apart. int32; n rows of tiles, m columns.

    Entries from a row's count on are 0 and mean nothing: the lists are padded to full width, so that no shape depends
    on the data. In the key-major lists n counts tiles of keys and the entries are tiles of queries.
    """

    full_count: torch.Tensor  # (b, h, n)
    full: torch.Tensor  # (b, h, n, m), ascending
    mixed_count: torch.Tensor  # (b, h, n)
    mixed: torch.Tensor  # (b, h, n, m), ascending
    mixed_bits: torch.Tensor  # (b, h, n, m): the row of `bits` and of `turned` that holds the tile `mixed` names


@dataclass(frozen=True, slots=True, eq=False)
class BlockMask:
    """Which tiles of 128 x 128 pairs are EMPTY (never loaded), FULL (no mask work) or MIXED (bits say which pairs).

    Data, not code: block-sparse FlashAttention (Dao et al. 2022, section 3.3 and Algorithm 5) with bits for the tiles
    that a pattern cuts through. Build one with `from_tiles`, `from_predicate`, `from_dense`, `local_global`, `strided`
    or `butterfly`, once, outside the hot path (building synchronises). 24 bytes a tile slot, 4 KiB a unique MIXED tile.

    `batch`, `heads`: 1 to share the mask, or those of the queries. `query_major`: for each tile of queries its tiles
    of keys; `key_major`: for each tile of keys its tiles of queries. `bits`: uint8 (U, 128, 16); pair (i, j) of a tile
    is bit `j % 8` (the lowest is 0) of byte `[i, j // 8]`. `turned`: the same tiles with i and j exchanged, for whoever
    walks by keys. Bits beyond q_len or k_len are 0, and a tile that is visible as far as the lengths go is FULL.
    Equality and hash are those of the object.

    >>> blocks = BlockMask.from_predicate(lambda b, h, i, j: (i >= j) & (i - j < 300), 1024, 1024)
    >>> print(blocks.show())
    BlockMask: batch 1, heads 1, 1024 x 1024 in 8 x 8 tiles of 128; 25.0% visible; 3 bit tiles, 13.6 KiB
    +.......
    #+......
    +#+.....
    ++#+....
    .++#+...
    ..++#+..
    ...++#+.
    ....++#+
    """

    TILE: ClassVar[int] = TILE

    q_len: int
    k_len: int
    query_major: TileLists
    key_major: TileLists
    bits: torch.Tensor
    turned: torch.Tensor

    # --- build -------------------------------------------------------------------------------------------------

    @classmethod
    def from_tiles(cls, layout: torch.Tensor, q_len: int, k_len: int) -> BlockMask:
        """FULL where `layout` is True, EMPTY where not: the sparsity matrix of block-sparse FlashAttention.

        `layout`: bool (n, m), (h, n, m) or (b, h, n, m) for the n = ceil(q_len / 128) by m = ceil(k_len / 128) tiles.
        The mask lies on its device. TypeError or ValueError for another dtype or shape.

        >>> BlockMask.from_tiles(torch.eye(4, dtype=torch.bool), 512, 512).density()
        0.25
        """
        _check_sizes("from_tiles", q_len=q_len, k_len=k_len)
        layout = _four_d("from_tiles", "layout", layout)
        want = (_tiles(q_len), _tiles(k_len))
        if tuple(layout.shape[2:]) != want:
            raise ValueError(
                f"BlockMask.from_tiles: layout must have shape (..., {want[0]}, {want[1]}), the tiles of "
                f"{q_len} x {k_len}; got {tuple(layout.shape)}"
            )
        tile_map = torch.where(layout, FULL, EMPTY).to(torch.int32)
        return cls._from_map(q_len, k_len, tile_map, _Pool(layout.device).finish()[0])

    @classmethod
    def from_predicate(
        cls, f: Predicate, q_len: int, k_len: int, batch: int = 1, heads: int = 1, device: Device = "cpu"
    ) -> BlockMask:
        """The pairs for which `f(b, h, i, j)` is True.

        `f` gets int64 index tensors on `device`, (x, 1, 1, 1), (1, y, 1, 1), (1, 1, r, 1) and (1, 1, 1, c), of a chunk
        of the pairs at a time, and returns a bool tensor that broadcasts to (x, y, r, c). Indices stay below the sizes,
        so `f` may look things up with them. Memory beyond the result: what `f` allocates for the 2 million pairs of a
        chunk (8 million on a GPU), and some 5 bytes a pair. TypeError or ValueError if `f` returns anything else.

        >>> document = torch.tensor([0] * 200 + [1] * 100)
        >>> blocks = BlockMask.from_predicate(lambda b, h, i, j: document[i] == document[j], 300, 300)
        >>> blocks.to_dense().sum().item() == 200**2 + 100**2
        True
        """
        _check_sizes("from_predicate", q_len=q_len, k_len=k_len, batch=batch, heads=heads)
        if not callable(f):
            raise TypeError(f"BlockMask.from_predicate: f must be a function of (b, h, i, j); got {type(f).__name__}")
        device = torch.device(device)

        def read(*chunk: slice) -> torch.Tensor:
            b, h, i, j = (torch.arange(part.start, part.stop, device=device) for part in chunk)
            seen = f(b.view(-1, 1, 1, 1), h.view(1, -1, 1, 1), i.view(1, 1, -1, 1), j.view(1, 1, 1, -1))
            _check_answer(seen, tuple(part.stop - part.start for part in chunk), device)
            return seen

        return _build(q_len, k_len, batch, heads, device, read)

    @classmethod
    def from_dense(cls, mask: torch.Tensor) -> BlockMask:
        """The pairs where the bool tensor `mask`, (q, k), (h, q, k) or (b, h, q, k), is True. Any strides.

        q and k are the lengths: a mask that broadcasts over rows or keys is expanded by the caller.
        TypeError or ValueError for another dtype or shape.

        >>> BlockMask.from_dense(torch.ones(200, 300, dtype=torch.bool).tril())
        BlockMask(q_len=200, k_len=300, batch=1, heads=1)
        """
        mask = _four_d("from_dense", "mask", mask)
        batch, heads, q_len, k_len = mask.shape
        return _build(q_len, k_len, batch, heads, mask.device, lambda *chunk: mask[chunk])

    @classmethod
    def local_global(
        cls, q_len: int, k_len: int, local_tiles: int, global_tiles: int, device: Device = "cpu"
    ) -> BlockMask:
        """Each tile sees its own, `local_tiles` on either side, and the first `global_tiles`; those see all.

        The pattern of Longformer (Beltagy et al., 2020), in tiles. As in a bottom-right Band, the last tile of queries
        owns the last tile of keys.

        >>> print(BlockMask.local_global(640, 640, 1, 1).show().partition("\\n")[2])
        #####
        ###..
        ####.
        #.###
        #..##
        """
        _check_sizes("local_global", q_len=q_len, k_len=k_len, local_tiles=local_tiles, global_tiles=global_tiles)
        i, j, own = _tile_grid(q_len, k_len, device)
        return cls.from_tiles(((own - j).abs() <= local_tiles) | (i < global_tiles) | (j < global_tiles), q_len, k_len)

    @classmethod
    def strided(cls, q_len: int, k_len: int, local_tiles: int, stride: int, device: Device = "cpu") -> BlockMask:
        """Each tile sees `local_tiles` on either side of its own and every `stride`-th one from it.

        The strided pattern of Child et al., "Generating Long Sequences with Sparse Transformers" (2019), in tiles;
        theirs is `causal & BlockMask.strided(...)`. The last tile of queries owns the last tile of keys.

        >>> print(BlockMask.strided(640, 640, 0, 2).show().partition("\\n")[2])
        #.#.#
        .#.#.
        #.#.#
        .#.#.
        #.#.#
        """
        _check_sizes("strided", q_len=q_len, k_len=k_len, local_tiles=local_tiles, stride=stride)
        if stride == 0:
            raise ValueError("BlockMask.strided: stride must be at least 1; got 0")
        _, j, own = _tile_grid(q_len, k_len, device)
        return cls.from_tiles(((own - j).abs() <= local_tiles) | ((own - j) % stride == 0), q_len, k_len)

    @classmethod
    def butterfly(cls, q_len: int, k_len: int, device: Device = "cpu") -> BlockMask:
        """Tile i sees tile i and the tiles whose number differs from i in one binary digit: O(log n) tiles a row.

        The fixed pattern of block-sparse FlashAttention (section 3.3): the flat block butterfly of Dao, Chen et al.,
        "Pixelated Butterfly" (2021). With q_len != k_len it is the last rows, or last columns, of the square one.

        >>> print(BlockMask.butterfly(1024, 1024).show().partition("\\n")[2])
        ###.#...
        ##.#.#..
        #.##..#.
        .###...#
        #...###.
        .#..##.#
        ..#.#.##
        ...#.###
        """
        _check_sizes("butterfly", q_len=q_len, k_len=k_len)
        n, m = _tiles(q_len), _tiles(k_len)
        i, j, _ = _tile_grid(q_len, k_len, device)
        differ = (i + max(m - n, 0)) ^ (j + max(n - m, 0))
        return cls.from_tiles(differ & (differ - 1) == 0, q_len, k_len)

    @classmethod
    def from_tensors(cls, q_len: int, k_len: int, tensors: Sequence[torch.Tensor]) -> BlockMask:
        """The BlockMask whose `tensors()` these are (an operator can only take tensors). Looks at no content.

        >>> blocks = BlockMask.butterfly(1024, 1024)
        >>> BlockMask.from_tensors(1024, 1024, blocks.tensors()).density() == blocks.density()
        True
        """
        if len(tensors) != 12:
            raise ValueError(f"BlockMask.from_tensors: tensors must be the 12 that tensors() gives; got {len(tensors)}")
        return cls(q_len, k_len, TileLists(*tensors[:5]), TileLists(*tensors[5:10]), *tensors[10:])

    @classmethod
    def _from_map(cls, q_len: int, k_len: int, tile_map: torch.Tensor, bits: torch.Tensor) -> BlockMask:
        return cls(q_len, k_len, _lists(tile_map), _lists(tile_map.transpose(2, 3)), bits, _turned(bits))

    # --- look --------------------------------------------------------------------------------------------------

    @property
    def batch(self) -> int:
        return self.query_major.full.shape[0]

    @property
    def heads(self) -> int:
        return self.query_major.full.shape[1]

    @property
    def device(self) -> torch.device:
        return self.bits.device

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors."""
        return sum(x.numel() * x.element_size() for x in self.tensors())

    def __repr__(self) -> str:
        return f"BlockMask(q_len={self.q_len}, k_len={self.k_len}, batch={self.batch}, heads={self.heads})"

    def tensors(self) -> tuple[torch.Tensor, ...]:
        """The 12 tensors that make it: query_major, key_major, bits, turned. `from_tensors` is the way back."""
        return (*self.query_major, *self.key_major, self.bits, self.turned)

    def to(self, device: Device) -> BlockMask:
        """The same mask on another device; itself if it lies there."""
        moved = tuple(x.to(device) for x in self.tensors())
        if all(new is old for new, old in zip(moved, self.tensors(), strict=True)):
            return self
        return BlockMask.from_tensors(self.q_len, self.k_len, moved)

    def to_dense(self) -> torch.Tensor:
        """bool (batch, heads, q_len, k_len), True where visible."""
        tile_map = self.tile_map()
        dense = torch.empty(self.batch, self.heads, self.q_len, self.k_len, dtype=torch.bool, device=self.device)
        for n in range(tile_map.shape[2]):  # a row of tiles at a time: memory beyond the result stays small
            codes = tile_map[:, :, n]
            strip = (codes == FULL)[..., None, None].expand(*codes.shape, TILE, TILE).clone()
            strip[codes >= 0] = _unpack(self.bits[codes[codes >= 0].long()])
            rows = dense[:, :, n * TILE : (n + 1) * TILE]
            rows.copy_(strip.transpose(2, 3).flatten(3)[:, :, : rows.shape[2], : self.k_len])
        return dense

    def density(self) -> float:
        """The visible share of all pairs; 0.0 if there are none. Synchronises.

        >>> BlockMask.from_dense(torch.ones(1, 1, 300, 300, dtype=torch.bool).tril()).density() == 301 / 600
        True
        """
        tile_map = self.tile_map()
        pairs = tile_map.shape[0] * tile_map.shape[1] * self.q_len * self.k_len
        rows, keys = (
            (length - TILE * torch.arange(_tiles(length), device=self.device)).clamp(max=TILE)
            for length in (self.q_len, self.k_len)
        )
        full = ((tile_map == FULL) * rows[:, None] * keys).sum()
        ones = torch.cat([_unpack(part).flatten(1).sum(1) for part in self.bits.split(256)])
        mixed = ones[tile_map[tile_map >= 0].long()].sum()
        return int(full + mixed) / pairs if pairs else 0.0

    def show(self, b: int = 0, h: int = 0, width: int = 64) -> str:
        """A picture of one head, a character a tile: '.' EMPTY, '#' FULL, '+' MIXED.

        With more than `width` tiles in a row or column a character stands for a square of tiles: '.' or '#' if all
        are, '+' otherwise.
        """
        n, m = _tiles(self.q_len), _tiles(self.k_len)
        step = max(1, -(-max(n, m) // width))
        unit = f"{n} x {m} tiles of {TILE}" + (f", {step} x {step} a character" if step > 1 else "")
        header = (
            f"BlockMask: batch {self.batch}, heads {self.heads}, {self.q_len} x {self.k_len} in {unit}; "
            f"{self.density():.1%} visible; {len(self.bits)} bit tiles, {self.nbytes / 1024:.1f} KiB"
        )
        tile_map = self.tile_map()[b, h].tolist() if self.batch and self.heads else []
        lines = []
        for top in range(0, len(tile_map), step):
            squares = (
                {code for row in tile_map[top : top + step] for code in row[left : left + step]}
                for left in range(0, m, step)
            )
            lines.append("".join("." if codes == {EMPTY} else "#" if codes == {FULL} else "+" for codes in squares))
        return "\n".join([header, *lines])

    def tile_map(self) -> torch.Tensor:
        """int32 (batch, heads, n, m): EMPTY, FULL, or the row of `bits` of a MIXED tile. Synchronises.

        >>> BlockMask.from_dense(torch.ones(300, 300, dtype=torch.bool).tril()).tile_map()
        tensor([[[[ 0, -1, -1],
                  [-2,  0, -1],
                  [-2, -2,  1]]]], dtype=torch.int32)
        """
        lists = self.query_major
        tile_map = torch.full(lists.full.shape, EMPTY, dtype=torch.int32, device=self.device)
        column = torch.arange(lists.full.shape[-1], device=self.device)
        for count, tiles, codes in (
            (lists.full_count, lists.full, torch.full_like(lists.full, FULL)),
            (lists.mixed_count, lists.mixed, lists.mixed_bits),
        ):
            listed = column < count[..., None]
            b, h, n, _ = listed.nonzero(as_tuple=True)
            tile_map[b, h, n, tiles[listed].long()] = codes[listed]
        return tile_map

    # --- combine -----------------------------------------------------------------------------------------------

    def __and__(self, other: Any) -> Any:
        if isinstance(other, Band):
            return Masked(other, self)
        if isinstance(other, Masked):
            return Masked(other.band, other.mask & self)
        if isinstance(other, BlockMask):
            return _intersect_blocks(self, other)
        if isinstance(other, torch.Tensor):
            raise TypeError("&: a BlockMask and a tensor do not combine; make the tensor a BlockMask with from_dense")
        return NotImplemented

    def __rand__(self, other: Any) -> Any:
        return self.__and__(other)


def _tiles(length: int) -> int:
    return -(-length // TILE)


def _tile_grid(q_len: int, k_len: int, device: Device) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Numbers of the tiles of queries (n, 1) and keys (m,), and of each query tile's own tile of keys (n, 1)."""
    i = torch.arange(_tiles(q_len), device=device)[:, None]
    return i, torch.arange(_tiles(k_len), device=device), i + _tiles(k_len) - _tiles(q_len)


def _check_sizes(function: str, **sizes: int) -> None:
    for name, size in sizes.items():
        if isinstance(size, bool) or not isinstance(size, int):
            raise TypeError(f"BlockMask.{function}: {name} must be an int; got {size!r}")
        if not 0 <= size < INF:
            raise ValueError(f"BlockMask.{function}: {name} must be at least 0 and below 2**30; got {size}")


def _four_d(function: str, name: str, mask: torch.Tensor) -> torch.Tensor:
    if not isinstance(mask, torch.Tensor) or mask.dtype != torch.bool:
        what = mask.dtype if isinstance(mask, torch.Tensor) else type(mask).__name__
        raise TypeError(f"BlockMask.{function}: {name} must be a tensor of dtype torch.bool; got {what}")
    if not 2 <= mask.ndim <= 4:
        raise ValueError(f"BlockMask.{function}: {name} must have 2 to 4 dimensions; got shape {tuple(mask.shape)}")
    return mask[(None,) * (4 - mask.ndim)]


def _check_answer(seen: Any, chunk: tuple[int, ...], device: torch.device) -> None:
    wanted = f"f(b, h, i, j) must return a bool tensor on {device} that broadcasts to {chunk}"
    if not isinstance(seen, torch.Tensor) or seen.dtype != torch.bool or seen.device.type != device.type:
        what = f"{seen.dtype} on {seen.device}" if isinstance(seen, torch.Tensor) else type(seen).__name__
        raise TypeError(f"BlockMask.from_predicate: {wanted}; got {what}")
    padded = (1,) * (4 - seen.ndim) + tuple(seen.shape)
    if seen.ndim > 4 or any(have not in (1, want) for have, want in zip(padded, chunk, strict=True)):
        raise ValueError(f"BlockMask.from_predicate: {wanted}; got shape {tuple(seen.shape)}")


def _lists(tile_map: torch.Tensor) -> TileLists:
    full_count, full, _ = _listed(tile_map, tile_map == FULL)
    return TileLists(full_count, full, *_listed(tile_map, tile_map >= 0))


def _listed(tile_map: torch.Tensor, chosen: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """How many tiles of each row are chosen, which, and their codes; the latter two padded with 0 to full width."""
    slot = (chosen.cumsum(-1) - 1)[chosen]
    b, h, n, tile = chosen.nonzero(as_tuple=True)
    tiles, codes = (torch.zeros(tile_map.shape, dtype=torch.int32, device=tile_map.device) for _ in range(2))
    tiles[b, h, n, slot] = tile.to(torch.int32)
    codes[b, h, n, slot] = tile_map[chosen]
    return chosen.sum(-1, dtype=torch.int32), tiles, codes


# Building: cut the pairs into chunks, pack each into bits, tell EMPTY, FULL and MIXED tiles apart, pool the MIXED ones.


def _build(
    q_len: int, k_len: int, batch: int, heads: int, device: torch.device, read: Callable[..., torch.Tensor]
) -> BlockMask:
    """`read(b, h, i, j)` takes slices of positions and gives a bool tensor that broadcasts to their sizes."""
    tile_map = torch.full((batch, heads, _tiles(q_len), _tiles(k_len)), EMPTY, dtype=torch.int32, device=device)
    pool = _Pool(device)
    pairs = 2**23 if device.type == "cuda" else 2**21  # an int64 temporary of a predicate then takes 64 or 16 MiB
    for b, h, n, m in _chunks(batch, heads, _tiles(q_len), _tiles(k_len), pairs // TILE**2):
        i, j = (slice(part.start * TILE, min(part.stop * TILE, length)) for part, length in ((n, q_len), (m, k_len)))
        shape = (b.stop - b.start, h.stop - h.start, i.stop - i.start, j.stop - j.start)
        words = _pack(read(b, h, i, j).expand(shape))
        inside: int | torch.Tensor = -1  # all bits, unless the chunk ends in cut tiles
        if shape[2] % TILE or shape[3] % TILE:
            inside = _pack(torch.ones((), dtype=torch.bool, device=device).expand(1, 1, *shape[2:]))
        live, full = ((words != 0).flatten(-2).any(-1), (words == inside).flatten(-2).all(-1))
        codes = torch.where(full, FULL, EMPTY).to(torch.int32)
        mixed = live & ~full
        codes[mixed] = pool.add(words[mixed].flatten(1))
        tile_map[b, h, n, m] = codes
    bits, rows = pool.finish()
    mixed = tile_map >= 0
    tile_map[mixed] = rows[tile_map[mixed].long()]
    return BlockMask._from_map(q_len, k_len, tile_map, bits)


def _chunks(batch: int, heads: int, n: int, m: int, most: int) -> Iterator[tuple[slice, slice, slice, slice]]:
    """Slices of (batch, heads, n, m) of at most `most` tiles: whole rows of tiles, and whole heads, if they fit."""
    steps = []
    for size in (m, n, heads, batch):
        step = max(1, min(size, most))
        steps.append([slice(start, min(start + step, size)) for start in range(0, size, step)])
        most //= step
    return ((b, h, i, j) for b in steps[3] for h in steps[2] for i in steps[1] for j in steps[0])


def _pack(seen: torch.Tensor) -> torch.Tensor:
    """bool (x, y, r, c) to bits: int64 (x, y, ceil(r / 128), ceil(c / 128), 128, 2), 0 beyond r and c."""
    x, y, r, c = seen.shape
    n, m = _tiles(r), _tiles(c)
    if (r, c) == (n * TILE, m * TILE):
        padded = seen.contiguous()
    else:
        padded = torch.zeros(x, y, n * TILE, m * TILE, dtype=torch.bool, device=seen.device)
        padded[:, :, :r, :c] = seen
    # Eight bools are an int64 with bits 0, 8, .., 56. The factor holds 2^(56 - 7k): it lifts bit 8k to 56 + k, and no
    # other products meet there or carry, so that the top byte has bool k in bit k.
    eights = padded.view(torch.int64) * 0x0102040810204080
    packed = eights.bitwise_right_shift_(56).to(torch.uint8).view(torch.int64)
    return packed.view(x, y, n, TILE, m, 2).transpose(3, 4)


def _unpack(bits: torch.Tensor) -> torch.Tensor:
    """uint8 (..., 128, 16) to bool (..., 128, 128)."""
    one = torch.tensor([1, 2, 4, 8, 16, 32, 64, 128], dtype=torch.uint8, device=bits.device)
    return (bits.unsqueeze(-1) & one).ne(0).flatten(-2)


def _turned(bits: torch.Tensor) -> torch.Tensor:
    """Bit tiles with rows and columns exchanged."""
    seen = (_unpack(part).mT.clone(memory_format=torch.contiguous_format) for part in bits.split(256))
    return torch.cat([_pack(part[None]).view(torch.uint8).view(-1, TILE, TILE // 8) for part in seen])


class _Pool:
    """Bit tiles, each once. `add` gives tickets, `finish` the unique tiles and the row of each ticket."""

    def __init__(self, device: torch.device) -> None:
        self.unique = torch.empty(0, 2 * TILE, dtype=torch.int64, device=device)
        self.rows = torch.empty(0, dtype=torch.int64, device=device)  # of the tickets whose tiles are in `unique`
        self.waiting: list[torch.Tensor] = []
        self.tickets = self.held = 0

    def add(self, tiles: torch.Tensor) -> torch.Tensor:
        """int64 (N, 256) -> int32 (N,)."""
        unique, inverse = _unique(tiles)
        tickets = (self.tickets + inverse).to(torch.int32)
        self.waiting.append(unique)
        self.tickets += len(unique)
        self.held += len(unique)
        if self.held > 2 * len(self.unique) + 1024:  # merging at each doubling bounds both the work and the memory
            self._merge()
        return tickets

    def _merge(self) -> None:
        old = len(self.unique)
        self.unique, inverse = _unique(torch.cat([self.unique, *self.waiting]))
        self.rows = torch.cat([self.rows, inverse[old:]])  # in order of appearance: the old rows stay where they are
        self.waiting, self.held = [], 0

    def finish(self) -> tuple[torch.Tensor, torch.Tensor]:
        """uint8 (U, 128, 16) and int32 (tickets,)."""
        self._merge()
        return self.unique.view(torch.uint8).view(-1, TILE, TILE // 8), self.rows.to(torch.int32)


def _unique(tiles: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The distinct rows of int64 (N, 256), in order of appearance, and for each row which of them it is.

    Rows are told apart by a 64-bit sum with random odd weights, then compared with the row that they are said to equal:
    `torch.unique(dim=0)`, which sorts whole rows, is left for the case that two sums collide.
    """
    parts = tiles.split(1024)
    sums = torch.cat([(part * _weights(tiles.device)).sum(1) for part in parts])
    _, group = torch.unique(sums, return_inverse=True)
    unique, inverse = _representatives(tiles, group)
    if not all(torch.equal(part, unique[which]) for part, which in zip(parts, inverse.split(1024), strict=True)):
        _, group = torch.unique(tiles, dim=0, return_inverse=True)
        unique, inverse = _representatives(tiles, group)
    return unique, inverse


@functools.cache
def _weights(device: torch.device) -> torch.Tensor:
    generator = torch.Generator().manual_seed(0)
    return (torch.randint(-(2**62), 2**62, (2 * TILE,), generator=generator) * 2 + 1).to(device)


def _representatives(tiles: torch.Tensor, group: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    count = int(group.max()) + 1 if len(group) else 0
    position = torch.arange(len(group), device=group.device)
    first = torch.full((count,), len(group), device=group.device).scatter_reduce_(0, group, position, "amin")
    first, order = first.sort()
    rank = torch.empty_like(order)
    rank[order] = torch.arange(count, device=group.device)
    return tiles[first], rank[group]


def _intersect_blocks(a: BlockMask, b: BlockMask) -> BlockMask:
    """The pairs that both show, tile by tile: only MIXED & MIXED looks at bits, and at each pair of bit tiles once."""
    if (a.q_len, a.k_len) != (b.q_len, b.k_len) or a.device != b.device:
        raise ValueError(
            f"&: BlockMasks must have the same lengths and device; got {a} on {a.device} and {b} on {b.device}"
        )
    if any(x != y and 1 not in (x, y) for x, y in ((a.batch, b.batch), (a.heads, b.heads))):
        raise ValueError(f"&: the batches and heads of BlockMasks must be equal or 1; got {a} and {b}")
    one, two = torch.broadcast_tensors(a.tile_map(), b.tile_map())
    both = (one >= 0) & (two >= 0)
    pairs, which = torch.unique(one[both].long() * max(len(b.bits), 1) + two[both], return_inverse=True)
    new = a.bits[pairs // max(len(b.bits), 1)] & b.bits[pairs % max(len(b.bits), 1)]
    # Codes in one pool: first a's bit tiles, then b's, then the new ones. FULL is below all codes of MIXED tiles.
    pool = torch.cat([a.bits, b.bits])
    two = torch.where(two >= 0, two + len(a.bits), two)
    tile_map = torch.where((one == EMPTY) | (two == EMPTY), EMPTY, torch.maximum(one, two)).to(torch.int32)
    codes = torch.arange(len(new), dtype=torch.int32, device=a.device) + len(pool)
    tile_map[both] = torch.where((new != 0).flatten(1).any(1), codes, EMPTY)[which].to(torch.int32)
    # Only the bit tiles that are still used, and each once.
    pool = torch.cat([pool, new]).view(-1, TILE * TILE // 8).view(torch.int64)
    mixed = tile_map >= 0
    used, inverse = torch.unique(tile_map[mixed], return_inverse=True)
    unique, rows = _unique(pool[used.long()])
    tile_map[mixed] = rows[inverse].to(torch.int32)
    return BlockMask._from_map(a.q_len, a.k_len, tile_map, unique.view(torch.uint8).view(-1, TILE, TILE // 8))
