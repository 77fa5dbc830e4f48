"""The two levels of memory: tiles travel between HBM (large, slow) and on-chip memory (small, fast), and are counted.

Where the paper says "load K_j from HBM to on-chip SRAM" the code says ``hbm.load(k, "K", rows)``. Nothing is simulated:
a load copies rows of a tensor into a fresh tile, a store copies them back. While a counter is active,

    with hbm.counting() as traffic: ...

each call also adds its bytes to ``traffic``; without one the calls cost next to nothing. Who gives ``counting`` an
observer is told of each of them as an `Event`, in order: that is how `report.recording` films a run.

Source: FlashAttention (Dao et al., 2022), section 2.1 (the hierarchy) and Algorithm 1 (which lines load and store).

>>> k = torch.arange(12.0).reshape(1, 1, 6, 2)                         # batch, heads, positions, head size; fp32
>>> with counting() as traffic:
...     K_j = load(k, "K", slice(4, 6), size=4)                         # two rows, in a tile of four
...     o = zeros((1, 1, 6, 2), "O", dtype=torch.float32)
...     store(o, "O", slice(4, 6), 2 * K_j)
>>> K_j[0, 0].tolist()
[[8.0, 9.0], [10.0, 11.0], [0.0, 0.0], [0.0, 0.0]]
>>> traffic.loaded, traffic.stored                                      # bytes: zeroing O writes it once, too
({'K': 16}, {'O': 64})
>>> traffic.bytes, traffic.peak_on_chip, traffic.allocated
(80, 16, 48)
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from functools import lru_cache
from math import prod
from typing import TYPE_CHECKING, Any, TypeAlias

import torch
from torch import Tensor

if TYPE_CHECKING:
    from .chip import Chip


Runs: TypeAlias = tuple[slice, ...]
Rows: TypeAlias = slice | Runs | Tensor


@dataclass(frozen=True, slots=True)
class Event:
    """One thing that happened, as an observer is told.

    kind: "load", "store", "accumulate" (both), "fill" (an array's first filling), "keep" (a tile that lives on the chip
        only), "show" (a tile that nobody counts, as it is now), or "kernel": one begins, or with the name "" ends, and
        the chip is empty.
    name: the array's, or the kernel's. loaded, stored: bytes, over all batches and heads. held: the tile's bytes on the
        chip, of one (batch, head). x, rows: the array in HBM and its positions, if one is touched. tile: its contents,
        where they are known when the event is told: not in a load. They may change afterwards.
    """

    kind: str
    name: str
    loaded: int = 0
    stored: int = 0
    held: int = 0
    x: Tensor | None = None
    rows: Rows | None = None
    tile: Tensor | None = None


Observer: TypeAlias = Callable[[Event], None]


@dataclass(slots=True)
class Traffic:
    """What moved while it was counting: dictionaries from an array's name to bytes.

    ``loaded``, ``stored`` and ``arrays`` (what was allocated) are summed over batches and heads. ``on_chip`` is the
    largest tile each name held, for ONE (batch, head): a kernel's buffers are static, so their sum is what one block of
    it needs. ``kernels`` has the part of each `kernel`; ``on_chip`` of the whole is what was held outside of them.
    """

    loaded: dict[str, int] = field(default_factory=dict)
    stored: dict[str, int] = field(default_factory=dict)
    on_chip: dict[str, int] = field(default_factory=dict)
    arrays: dict[str, int] = field(default_factory=dict)
    kernels: dict[str, Traffic] = field(default_factory=dict)
    observer: Observer | None = field(default=None, repr=False, compare=False)

    @property
    def bytes(self) -> int:
        """All bytes that crossed between HBM and the chip, in both directions."""
        return sum(self.loaded.values()) + sum(self.stored.values())

    @property
    def peak_on_chip(self) -> int:
        """Bytes of on-chip memory that one (batch, head) needs: all names together, in the kernel that needs most."""
        return max([sum(self.on_chip.values()), *(part.peak_on_chip for part in self.kernels.values())])

    @property
    def allocated(self) -> int:
        """Bytes of HBM allocated: outputs, statistics and, in standard attention, S and P."""
        return sum(self.arrays.values())

    def _load(self, x: Tensor, name: str, batch: int, heads: int, n: int, rows: Rows) -> None:
        tile = n * prod(x.shape[3:]) * x.element_size()
        _add(self.loaded, {name: batch * heads * tile})
        self._hold(name, tile)
        self._tell("load", name, loaded=batch * heads * tile, held=tile, x=x, rows=rows)

    def _store(self, x: Tensor, name: str, n: int, rows: Rows, tile: Tensor) -> None:
        _add(self.stored, {name: _size(x, n)})
        self._tell("store", name, stored=_size(x, n), x=x, rows=rows, tile=tile)

    def _accumulate(self, x: Tensor, name: str, n: int, rows: Rows, tile: Tensor) -> None:
        size = _size(x, n)
        held = n * prod(x.shape[3:]) * x.element_size()
        _add(self.loaded, {name: size})
        _add(self.stored, {name: size})
        self._hold(name, held)
        self._tell("accumulate", name, loaded=size, stored=size, held=held, x=x, rows=rows, tile=tile)

    def _tell(self, kind: str, name: str, **what: Any) -> None:
        if self.observer is not None:
            self.observer(Event(kind, name, **what))

    def _hold(self, name: str, size: int) -> None:
        self.on_chip[name] = max(self.on_chip.get(name, 0), size)

    def _include(self, name: str, part: Traffic) -> None:
        """Take the counts of one run of the kernel `name` in."""
        for total in (self, self.kernels.setdefault(name, Traffic())):
            _add(total.loaded, part.loaded)
            _add(total.stored, part.stored)
            _add(total.arrays, part.arrays)
        for held, size in part.on_chip.items():
            self.kernels[name]._hold(held, size)


def _add(total: dict[str, int], part: dict[str, int]) -> None:
    for name, size in part.items():
        total[name] = total.get(name, 0) + size


_active: ContextVar[Traffic | None] = ContextVar("tilewise_traffic", default=None)
_COMPUTE = {torch.float16: torch.float32, torch.bfloat16: torch.float32}


@contextmanager
def counting(observer: Observer | None = None) -> Iterator[Traffic]:
    """Count every load, store, kept tile and allocation of the enclosed code (of this thread) into a new `Traffic`.

    An inner ``counting()`` takes over from an outer one until it ends. observer: is called with each `Event`.

    >>> told = []
    >>> with counting(told.append):
    ...     tile = load(torch.zeros(1, 1, 6, 2), "K", slice(0, 4))
    >>> told[0].kind, told[0].name, told[0].rows, told[0].loaded
    ('load', 'K', slice(0, 4, None), 32)
    """
    traffic = Traffic(observer=observer)
    token = _active.set(traffic)
    try:
        yield traffic
    finally:
        _active.reset(token)


@contextmanager
def kernel(name: str) -> Iterator[None]:
    """What runs inside is one kernel: it shares no on-chip memory with what ran before, and is counted apart as well.

    Also a decorator. Runs of one name add up in ``traffic.kernels[name]``; without a counter it does nothing.

    >>> x = torch.zeros(1, 1, 4, 2)
    >>> with counting() as traffic:
    ...     for name in "first", "second":
    ...         with kernel(name):
    ...             tile = load(x, name, slice(0, 4))
    >>> traffic.loaded, traffic.peak_on_chip, traffic.kernels["first"].bytes
    ({'first': 32, 'second': 32}, 32, 32)
    """
    traffic = _active.get()
    if traffic is None:
        yield
        return
    traffic._tell("kernel", name)
    with counting(traffic.observer) as part:
        yield
    traffic._include(name, part)
    traffic._tell("kernel", "")


def load(
    x: Tensor,
    name: str,
    rows: Rows,
    size: int | None = None,
    dtype: torch.dtype | None = None,
    width: int | None = None,
    heads: int | None = None,
    chip: Chip | None = None,
    read_only: bool = False,
) -> Tensor:
    """Copy the `rows` of `x` from HBM into a fresh, contiguous tile on the chip, padded with zeros.

    x: (b, h, S, d), or (b, h, S) for one number a row (l, m, L, delta).
    rows: ``slice(start, stop)`` of positions, several of them that lie one after the other in the tile (both clipped to
        S, and zeros stand for what is clipped inside the tile), or an int64 tensor of positions in [0, S), of shape
        (1 or b, 1 or heads, n); positions may repeat.
    size, width: the tile's rows (default: as many as are read) and columns (default d).
    dtype: of the tile; by default fp32 for half types, else x's own.
    chip: takes the tile into its buffer `name`, instead of fresh memory: good until the next tile of that name.
    read_only: the caller will not write to the tile: rows of `x` that already lie as the tile would are not copied.
    heads: the query heads, where x has fewer (GQA): each reads its group's rows for itself, and is counted so.

    Returns (b, heads, size, width) or (b, heads, size). Bytes counted: rows * d * x.element_size() for each batch and
    head, without the padding. The fixed, padded shape is not for speed: a matmul's rounding may depend on its shape and
    on its operands' alignment, and a row's result must depend on neither.
    """
    b, kv_heads, S = x.shape[:3]
    h = heads or kv_heads
    dtype = dtype or _COMPUTE.get(x.dtype, x.dtype)
    if isinstance(rows, Tensor):
        spans, n = [], rows.shape[-1]
        size = size or n
    else:
        spans = _spans(rows, S)
        n = sum([span[2] for span in spans])
        size = n if size is None else size
    traffic = _active.get()
    if traffic is not None:
        traffic._load(x, name, b, h, n, rows)

    d = x.shape[3:]  # (), or (d,)
    columns = d if width is None else d and (width,)
    shape = (b, h, size, *columns)
    if read_only and len(spans) == 1 and size == n and h == kv_heads and d and columns == d:
        inside = x.narrow(2, spans[0][1], n)
        if _lies_as_a_tile(inside, dtype):
            return inside  # a copy would only repeat it
    if chip is None:
        tile = torch.empty(shape, dtype=dtype, device=x.device)
    else:
        tile = chip.buffer(name, shape, dtype, x.device)
    if columns != d:
        tile[..., d[0] :].zero_()
    if isinstance(rows, Tensor):
        _gather(x, rows, h, _columns(tile[:, :, :n] if size > n else tile, x))
    end = n if isinstance(rows, Tensor) else 0  # of what is filled so far
    if len(spans) > 1 and n == size and h == kv_heads and columns == d and dtype == x.dtype:
        torch.cat([x.narrow(2, start, count) for _, start, count in spans], 2, out=tile)  # one call instead of many
        return tile
    for at, start, n in spans:
        if at > end:
            tile[:, :, end:at].zero_()
        end = at + n
        source, inside = x.narrow(2, start, n), _columns(tile.narrow(2, at, n), x)
        if h != kv_heads:  # GQA: one read position, a copy for each query head of the group
            source, inside = source.unsqueeze(2), inside.unflatten(1, (kv_heads, -1))
        inside.copy_(source)
    if size > end:
        tile[:, :, end:].zero_()
    return tile


def _lies_as_a_tile(x: Tensor, dtype: torch.dtype) -> bool:
    """True if x lies as a copy would: dense rows, heads one after the other, all as aligned as fresh memory (64 bytes).

    A matmul copies batches and heads that do not fold into one dimension, and then takes another kernel.
    """
    b, h, row, column = x.stride()
    size = x.element_size()
    return (
        x.dtype == dtype
        and column == 1
        and row == x.shape[3]
        and h != 0
        and (x.shape[0] == 1 or b == x.shape[1] * h)
        and h * size % 64 == 0
        and b * size % 64 == 0
        and x.data_ptr() % 64 == 0
    )


def _spans(rows: slice | Runs, S: int) -> list[tuple[int, int, int]]:
    """(place in the tile, start, count) of each run of positions, clipped to S of them."""
    spans, at = [], 0
    for run in (rows,) if isinstance(rows, slice) else rows:
        start = min(run.start or 0, S)
        stop = S if run.stop is None else run.stop
        spans.append((at, start, max(min(stop, S) - start, 0)))
        at += stop - (run.start or 0)
    return spans


def _gather(x: Tensor, rows: Tensor, heads: int, tile: Tensor) -> None:
    """Copy positions `rows` (1 or b, 1 or heads, n) of x, head by head of the query, into tile (b, heads, n, ..)."""
    b, kv_heads, S = x.shape[:3]
    if x.is_contiguous():  # rows of one matrix: 7 times faster than x[batch, head, rows] (measured on a CPU)
        at = (_first_rows(b, kv_heads, heads, S, x.device) + rows).flatten()
        flat = x.view(-1, *x.shape[3:])
        if tile.is_contiguous() and tile.dtype == x.dtype:
            torch.index_select(flat, 0, at, out=tile.view(-1, *x.shape[3:]))
        else:
            tile.copy_(flat.index_select(0, at).view(tile.shape))
    else:
        batch = torch.arange(b, device=x.device)[:, None, None]
        head = torch.arange(heads, device=x.device)[:, None] // (heads // kv_heads)
        tile.copy_(x[batch, head, rows])


@lru_cache(maxsize=64)
def _first_rows(b: int, kv_heads: int, heads: int, S: int, device: torch.device) -> Tensor:
    """(b, heads, 1): where each query head's keys begin in the rows of a contiguous (b, kv_heads, S, d) tensor."""
    head = torch.arange(heads, device=device) // (heads // kv_heads)
    return ((torch.arange(b, device=device)[:, None] * kv_heads + head) * S)[..., None]


def store(x: Tensor, name: str, rows: Rows, tile: Tensor) -> None:
    """Write a tile back: its rows become the positions `rows` of `x` (in HBM, x's dtype), without the tile's padding.

    x: (b, h, S, d) or (b, h, S); tile: (b, h, >= rows, >= d) or (b, h, >= rows).
    rows: as in `load`; positions that repeat must carry one value.
    """
    if isinstance(rows, Tensor):
        n = rows.shape[-1]
        x[_positions(x, rows)] = _columns(tile[:, :, :n], x).to(x.dtype)
    else:
        n = 0
        for at, start, count in _spans(rows, x.shape[2]):
            x.narrow(2, start, count).copy_(_columns(tile.narrow(2, at, count), x))
            n += count
    traffic = _active.get()
    if traffic is not None:
        traffic._store(x, name, n, rows, tile)


def accumulate(x: Tensor, name: str, rows: Rows, tile: Tensor) -> None:
    """Add a tile to the positions `rows` of `x` in HBM: a load, an addition, a store, counted as both.

    x, rows, tile as in `store`; positions that repeat add up.
    """
    if isinstance(rows, Tensor):
        n = rows.shape[-1]
        part = _columns(tile[:, :, :n], x).to(x.dtype)
        x.index_put_(_positions(x, rows), part, accumulate=True)
    else:
        n = 0
        for at, start, count in _spans(rows, x.shape[2]):
            x.narrow(2, start, count).add_(_columns(tile.narrow(2, at, count), x))
            n += count
    traffic = _active.get()
    if traffic is not None:
        traffic._accumulate(x, name, n, rows, tile)


def _columns(tile: Tensor, x: Tensor) -> Tensor:
    """As many of the tile's columns as x has."""
    return tile if x.ndim == 3 or tile.shape[-1] == x.shape[-1] else tile[..., : x.shape[3]]


def _positions(x: Tensor, rows: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    batch = torch.arange(x.shape[0], device=x.device)[:, None, None]
    head = torch.arange(x.shape[1], device=x.device)[None, :, None]
    return batch, head, rows


def _size(x: Tensor, n: int) -> int:
    """Bytes of n rows of x, in all batches and heads."""
    return x.shape[0] * x.shape[1] * n * prod(x.shape[3:]) * x.element_size()


def keep(name: str, tile: Tensor) -> Tensor:
    """Note a tile (b, h, ...) that lives on the chip only (S, P, an accumulator), and return it."""
    traffic = _active.get()
    if traffic is not None:
        size = prod(tile.shape[2:]) * tile.element_size()
        traffic._hold(name, size)
        traffic._tell("keep", name, held=size, tile=tile)
    return tile


def show(name: str, tile: Tensor) -> None:
    """Let an observer look at a tile that is not counted: m and l, which a kernel holds in registers."""
    traffic = _active.get()
    if traffic is not None:
        traffic._tell("show", name, tile=tile)


def empty(
    shape: tuple[int, ...], name: str, *, dtype: torch.dtype | None = None, device: torch.device | str | None = None
) -> Tensor:
    """An uninitialised array in HBM; its bytes count as allocated."""
    x = torch.empty(shape, dtype=dtype, device=device)
    traffic = _active.get()
    if traffic is not None:
        _add(traffic.arrays, {name: x.numel() * x.element_size()})
    return x


def full(
    shape: tuple[int, ...],
    name: str,
    value: float,
    *,
    dtype: torch.dtype | None = None,
    device: torch.device | str | None = None,
) -> Tensor:
    """An array in HBM filled with `value`; its bytes count as allocated, and as stored once (filling writes them)."""
    x = empty(shape, name, dtype=dtype, device=device).fill_(value)
    traffic = _active.get()
    if traffic is not None:
        size = x.numel() * x.element_size()
        _add(traffic.stored, {name: size})
        traffic._tell("fill", name, stored=size, x=x)
    return x


def zeros(
    shape: tuple[int, ...], name: str, *, dtype: torch.dtype | None = None, device: torch.device | str | None = None
) -> Tensor:
    """An array of zeros in HBM, counted as `full` counts."""
    return full(shape, name, 0.0, dtype=dtype, device=device)
