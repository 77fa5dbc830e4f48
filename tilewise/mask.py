"""Which keys a query may see: `Band` (an interval per row), what it becomes beside a mask, and its index arithmetic.

Key `j` is visible to query `i` of a Band iff `-left <= j - (i + offset) <= right`, where `offset = k_len - q_len` (the
last query sits on the last key) or 0 (`align="top_left"`). All that follows from it (the keys a tile of rows must
load, the keys it may take without a mask, the rows a tile of keys matters to, the dense mask, the number of visible
pairs) is computed here and nowhere else. What no interval can say is a boolean tensor's or a `block_mask`'s to say.

This module needs nothing but torch, so that every backend can take its arithmetic from here.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from .block_mask import BlockMask

INF = 2**30  # how a bound of None reaches the arithmetic: position + INF still fits an int32

ALIGNS = ("bottom_right", "top_left")

Device = torch.device | str


# --------------------------------------------------------------------------------------------------------------
# Index arithmetic. Operators, min and max only, no branches and no calls to each other, so that the same source
# compiles through `triton.jit(fn)` on run-time int32. Bounds lie in [-INF, INF], positions below INF; every
# intermediate then fits an int32 (hence INF - 2 below: left + right + 1 would not).
# --------------------------------------------------------------------------------------------------------------


def key_range(i_lo, i_hi, left, right, offset, k_len):
    """Keys `[lo, hi)` that ANY of the rows `[i_lo, i_hi)` sees; `0 <= lo <= hi <= k_len`, empty means `lo == hi`.

    The rows' intervals have one length and move by one key a row, so their union has no holes, unless all are empty
    (`left + right < 0`): then, and for no rows, the range is empty.

    >>> key_range(128, 256, INF, 0, 0, 512)      # causal: the second tile of 128 rows
    (0, 256)
    >>> key_range(128, 256, 64, 0, 0, 512)       # a window of 64 keys before the diagonal
    (64, 256)
    """
    some = max(0, min(1, min(i_hi - i_lo, left + min(right, 1073741822) + 1)))  # 1 if a row with a key exists
    lo = min(max(i_lo + offset - left, 0), k_len)
    hi = max(lo, min(i_hi + offset + right, k_len, lo + some * k_len))
    return lo, hi


def mask_free_range(i_lo, i_hi, left, right, offset, k_len):
    """Keys `[lo, hi)` that EVERY one of the rows `[i_lo, i_hi)` sees: their tiles need no mask.

    It lies within `key_range` of the same rows, an empty one too, so `[key_lo, lo)`, `[lo, hi)`, `[hi, key_hi)` are
    the keys to mask, to take as they are, and to mask.

    >>> mask_free_range(128, 256, INF, 0, 0, 512)
    (0, 129)
    """
    some = max(0, min(1, min(i_hi - i_lo, left + min(right, 1073741822) + 1)))
    key_lo = min(max(i_lo + offset - left, 0), k_len)
    key_hi = max(key_lo, min(i_hi + offset + right, k_len, key_lo + some * k_len))
    lo = min(max(i_hi - 1 + offset - left, key_lo), key_hi)
    hi = max(lo, min(i_lo + offset + right, key_hi - 1) + 1)
    return lo, hi


def query_range(j_lo, j_hi, left, right, offset, q_len):
    """Rows `[lo, hi)` that see ANY of the keys `[j_lo, j_hi)`: `key_range` read from the keys' side.

    >>> query_range(128, 256, INF, 0, 0, 512)    # causal: keys 128..255 matter from row 128 on
    (128, 512)
    """
    some = max(0, min(1, min(j_hi - j_lo, left + min(right, 1073741822) + 1)))
    lo = min(max(j_lo - offset - right, 0), q_len)
    hi = max(lo, min(j_hi - offset + left, q_len, lo + some * q_len))
    return lo, hi


def mask_free_queries(j_lo, j_hi, left, right, offset, q_len):
    """Rows `[lo, hi)` that see EVERY one of the keys `[j_lo, j_hi)`, within `query_range` of the same keys.

    >>> mask_free_queries(128, 256, INF, 0, 0, 512)
    (255, 512)
    """
    some = max(0, min(1, min(j_hi - j_lo, left + min(right, 1073741822) + 1)))
    row_lo = min(max(j_lo - offset - right, 0), q_len)
    row_hi = max(row_lo, min(j_hi - offset + left, q_len, row_lo + some * q_len))
    lo = min(max(j_hi - 1 - offset - right, row_lo), row_hi)
    hi = max(lo, min(j_lo - offset + left, row_hi - 1) + 1)
    return lo, hi


def tile_of(t, tiles, together, heads):
    """(tile, head) of the t-th of `heads * tiles`: `together` heads walk their tiles side by side, the last ones first.

    So the long tiles of a causal mask come first, and the keys of the heads that are at work stay in the L2.

    >>> [tile_of(t, 2, 2, 3) for t in range(6)]
    [(1, 0), (1, 1), (0, 0), (0, 1), (1, 2), (0, 2)]
    """
    group = t // (tiles * together)
    r = t % (tiles * together)
    width = min(together, heads - group * together)
    return tiles - 1 - r // width, group * together + r % width


def _sum_clamped(first: int, count: int, top: int) -> int:
    """Sum of `min(max(x, 0), top)` over `x = first .. first + count - 1`."""

    def upto(x: int) -> int:  # the same sum over all integers <= x
        inside, above = min(max(x, 0), top), max(x - top, 0)
        return inside * (inside + 1) // 2 + above * top

    return upto(first + count - 1) - upto(first - 1)


# --------------------------------------------------------------------------------------------------------------
# Band
# --------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Band:
    """An interval of keys per row: key `j` is visible to row `i` iff `-left <= j - (i + offset) <= right`.

    `left`, `right`: ints, or None for no bound. Negative bounds are bounds: `Band(-1, 3)` hides the diagonal.
    `align`: "bottom_right" (offset = k_len - q_len, the last row sees as far as the last key) or "top_left"
    (offset = 0, what `is_causal=True` means in `scaled_dot_product_attention`). The two agree when q_len == k_len.

    Hashable. `&` with a Band gives the Band of the pairs both show; with a BlockMask or a boolean tensor, a `Masked`.
    TypeError for a bound that is no int; ValueError for an unknown align and for `&` of Bands of unlike align.

    >>> causal & sliding_window(1023)
    Band(left=1023, right=0, align='bottom_right')
    >>> causal.count(4096, 4096)
    8390656
    """

    left: int | None = None
    right: int | None = None
    align: str = "bottom_right"

    def __post_init__(self) -> None:
        for name, bound in (("left", self.left), ("right", self.right)):
            if bound is not None and (isinstance(bound, bool) or not isinstance(bound, int)):
                raise TypeError(f"Band: {name} must be an int, or None for no bound; got {bound!r}")
        if self.align not in ALIGNS:
            raise ValueError(f"Band: align must be 'bottom_right' or 'top_left'; got {self.align!r}")

    def offset(self, q_len: int, k_len: int) -> int:
        """What to add to a row's number to find the key it sits on."""
        return k_len - q_len if self.align == "bottom_right" else 0

    @property
    def bounds(self) -> tuple[int, int]:
        """(left, right) as the index arithmetic takes them: None is INF, and all lie in [-INF, INF]."""
        left = INF if self.left is None else min(max(self.left, -INF), INF)
        right = INF if self.right is None else min(max(self.right, -INF), INF)
        return left, right

    @property
    def is_full(self) -> bool:
        """True if every row sees every key, whatever the lengths."""
        return self.left is None and self.right is None

    def visible(self, i: torch.Tensor, j: torch.Tensor, offset: int | torch.Tensor) -> torch.Tensor:
        """bool tensor of the shape that the index tensors `i` (rows) and `j` (keys) broadcast to.

        >>> causal.visible(torch.arange(2)[:, None], torch.arange(3), 1)
        tensor([[ True,  True, False],
                [ True,  True,  True]])
        """
        left, right = self.bounds
        distance = j - (i + offset)
        if self.right is None:
            return distance >= -left  # all True without a left bound: no position reaches INF
        if self.left is None:
            return distance <= right
        return (distance >= -left) & (distance <= right)

    def dense(self, q_len: int, k_len: int, device: Device | None = None) -> torch.Tensor:
        """The mask as a bool tensor (q_len, k_len), True where visible."""
        i = torch.arange(q_len, device=device)[:, None]
        return self.visible(i, torch.arange(k_len, device=device), self.offset(q_len, k_len))

    def count(self, q_len: int, k_len: int) -> int:
        """How many of the q_len * k_len pairs are visible, without looking at them one by one."""
        left, right = self.bounds
        if left + right < 0:
            return 0
        first = self.offset(q_len, k_len)
        return _sum_clamped(first + right + 1, q_len, k_len) - _sum_clamped(first - left, q_len, k_len)

    def show(self, q_len: int = 8, k_len: int = 8) -> str:
        """A picture of the first rows' keys: '#' visible, '.' not.

        >>> print(sliding_window(1).show(3, 4))
        Band(left=1, right=0, align='bottom_right'), 3 rows x 4 keys
        ##..
        .##.
        ..##
        """
        rows = ("".join("#" if seen else "." for seen in row) for row in self.dense(q_len, k_len).tolist())
        return "\n".join([f"{self}, {q_len} rows x {k_len} keys", *rows])

    def __and__(self, other: Any) -> Any:
        if isinstance(other, Band):
            return _intersect(self, other)
        if isinstance(other, Masked):
            return Masked(_intersect(self, other.band), other.mask)
        if isinstance(other, torch.Tensor):
            return Masked(self, other)
        return NotImplemented  # a BlockMask answers for itself

    def __rand__(self, other: Any) -> Any:
        return self.__and__(other)


def _intersect(a: Band, b: Band) -> Band:
    if a.is_full:
        return b
    if b.is_full:
        return a
    if a.align != b.align:
        raise ValueError(f"&: Bands of unlike align do not combine (their offsets differ): {a} & {b}")
    lefts = [band.left for band in (a, b) if band.left is not None]
    rights = [band.right for band in (a, b) if band.right is not None]
    return Band(min(lefts, default=None), min(rights, default=None), a.align)


causal = Band(None, 0)


def sliding_window(left: int | None, right: int | None = 0) -> Band:
    """Band of `left` keys before the diagonal, the diagonal, and `right` keys after it (None: no bound).

    Transformers' `sliding_window=w` counts the diagonal in: it is `sliding_window(w - 1)`.

    >>> sliding_window(2).dense(4, 4).int()
    tensor([[1, 0, 0, 0],
            [1, 1, 0, 0],
            [1, 1, 1, 0],
            [0, 1, 1, 1]], dtype=torch.int32)
    """
    return Band(left, right)


# --------------------------------------------------------------------------------------------------------------
# Masked
# --------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, eq=False)
class Masked:
    """A Band and a mask that must both show a pair: what `band & mask` and `mask & band` give.

    `mask`: BlockMask, or a bool tensor broadcastable to (B, Hq, Sq, Sk), True where visible. TypeError for another.
    `&` with more Bands, and with more masks of the same kind, narrows it.

    >>> causal & torch.ones(4, 4, dtype=torch.bool)
    Masked(Band(left=None, right=0, align='bottom_right') & bool tensor (4, 4))
    """

    band: Band
    mask: BlockMask | torch.Tensor

    def __post_init__(self) -> None:
        if not isinstance(self.band, Band):
            raise TypeError(f"Masked: band must be a Band; got {type(self.band).__name__}")
        from .block_mask import BlockMask  # which imports this module

        if not isinstance(self.mask, BlockMask) and getattr(self.mask, "dtype", None) != torch.bool:
            what = getattr(self.mask, "dtype", type(self.mask).__name__)
            raise TypeError(f"&: a mask must be a BlockMask or a tensor of dtype torch.bool; got {what}")

    def __repr__(self) -> str:
        mask = f"bool tensor {tuple(self.mask.shape)}" if isinstance(self.mask, torch.Tensor) else self.mask
        return f"Masked({self.band} & {mask})"

    def __and__(self, other: Any) -> Any:
        if isinstance(other, Band):
            return Masked(_intersect(self.band, other), self.mask)
        if isinstance(other, Masked):
            return Masked(_intersect(self.band, other.band), self.mask & other.mask)
        if isinstance(other, torch.Tensor):
            return Masked(self.band, self.mask & other)
        return NotImplemented  # a BlockMask answers for itself

    def __rand__(self, other: Any) -> Any:
        return self.__and__(other)
