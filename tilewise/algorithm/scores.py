"""From q . k to a masked score, and back: everything between the matmul and the softmax, for one tile at a time.

    s = scale * q.k  ->  c tanh(s / c)  ->  + bias  ->  - slope |i + offset - j|  ->  masks (-inf)  ->  softmax, dropout

S is kept in bits, log2(e) times the score (see `online_softmax`). `Scores` holds these rules for the batch and heads
that a loop works on. The loops of `forward` and `backward` call its methods by the names of the steps; a rule that is
off costs nothing.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import torch
from torch import Tensor

from ..block_mask import BlockMask
from ..mask import Band
from . import dropout, online_softmax
from .chip import Chip
from .online_softmax import LOG2E
from .tiles import FULL, NONE, Tile


@dataclass(slots=True)
class Scores:
    """The rules for batch entries and heads [0, b) x [0, h) of tensors (b, h, S, d), whatever part of a call these are.

    Coordinates: row i and key j of the tensors stand at i0 + i and j0 + j (origin), `batch_index` and `head_index` are
    the call's own numbers of these entries (BlockMask and dropout look things up by them).
    """

    scale: float = 1.0
    softcap: float = 0.0
    band: Band = field(default_factory=Band)
    offset: int = 0  # key j is on row i's diagonal when j0 + j = i0 + i + offset
    bias: Tensor | None = None  # (b|1, h|1, Sq|1, Sk|1)
    slopes: Tensor | None = None  # (b|1, h, 1, 1), in the accumulator's dtype
    visible: Tensor | None = None  # boolean (b|1, h|1, Sq|1, Sk|1)
    blocks: BlockMask | None = None
    dropout_p: float = 0.0
    seed: Tensor | int = 0
    batch_index: range = range(1)
    head_index: range = range(1)
    i0: int = 0
    j0: int = 0
    dbias: Tensor | None = None  # buffers into which the backward adds: the bias's shape,
    dslopes: Tensor | None = None  # and (b|1, h, 1, 1)
    band_tiles: dict[tuple[int, int, int], Tensor] = field(default_factory=dict)  # made once, shared by cells

    @property
    def diagonal(self) -> int:
        """The offset between this call's own rows and keys: j - i on the diagonal."""
        return self.i0 + self.offset - self.j0

    @property
    def inverse_keep(self) -> float:
        """1 / (1 - p): what dropout multiplies the kept pairs by (nothing is kept at p = 1)."""
        return 1.0 / (1.0 - self.dropout_p) if self.dropout_p < 1.0 else 0.0

    @property
    def scale_in_bits(self) -> float:
        """What Q, or K, is multiplied by when it is loaded."""
        return self.scale * LOG2E

    def scores(self, Q: Tensor, K: Tensor, chip: Chip) -> Tensor:
        """S = c tanh(Q K^T / c), (b, h, B_r, B_c), in bits as c is here."""
        S = chip.matmul("S", Q, K.mT)
        c = self.softcap * LOG2E
        return S.div_(c).tanh_().mul_(c) if c else S

    def bounded(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor | None:
        """The rows that need no running maximum (b, h, Sq, 1); None where bias or ALiBi may take scores anywhere.

        Data that is not there (a run that only counts, on device "meta") is not looked at either.
        """
        if self.bias is not None or self.slopes is not None or q.is_meta:
            return None
        return online_softmax.bounded(q, k, v, self.scale_in_bits, self.softcap * LOG2E)

    def cap_slope(self, S: Tensor) -> Tensor | None:
        """The softcap's derivative 1 - tanh^2 at its values S; None where it is off."""
        return 1.0 - (S / (self.softcap * LOG2E)).square_() if self.softcap else None

    def bias_and_mask(self, S: Tensor, i: Tile, j: Tile) -> Tensor:
        """Add bias and ALiBi, and put -inf where row i may not see key j, in place."""
        if self.bias is not None:
            self._inside(S, i, j).add_(_in_bits(_pairs(self.bias, i, j), S.dtype))
        if self.slopes is not None:
            S.sub_((self.slopes * LOG2E) * self._distance(i, j, S.device))
        if self.visible is not None:
            self._inside(S, i, j).add_(_additive(_pairs(self.visible, i, j), S.dtype))
        if i.slots is not None or j.slots is not None:
            self._mask_blocks(S, i, j)
        if i.edges or j.edges:
            band = self._band(i, j, S)
            for rows in i.edges:
                S[..., rows, :].add_(band[..., rows, :])
            for keys in j.edges:
                S[..., keys].add_(band[..., keys])
        if j.size > j.count:
            S[..., j.count :] = -math.inf  # the padding of a tile at the end of the keys
        if j.past_end is not None:
            S.masked_fill_(j.index(S.device)[..., None, :] >= j.past_end, -math.inf)
        if i.past_end is not None:
            S.masked_fill_(i.index(S.device)[..., :, None] >= i.past_end, -math.inf)
        return S

    def keep(self, i: Tile, j: Tile, device: torch.device) -> Tensor | None:
        """The pairs that dropout keeps, (b, h, B_r, B_c) boolean; None where it is off."""
        if self.dropout_p == 0.0:
            return None
        b = torch.tensor(self.batch_index, dtype=torch.int64, device=device)[:, None, None, None]
        h = torch.tensor(self.head_index, dtype=torch.int64, device=device)[:, None, None]
        rows, keys = i.index(device)[..., :, None] + self.i0, j.index(device)[..., None, :] + self.j0
        return dropout.keep(self.seed, self.dropout_p, b, h, rows, keys)

    def add_gradients(self, dS: Tensor, i: Tile, j: Tile) -> None:
        """Add a tile's part of the gradients of bias and ALiBi slopes; dS is the gradient of the masked scores."""
        if self.dslopes is not None:
            part = (dS * self._distance(i, j, dS.device)).sum((-2, -1), keepdim=True)
            self.dslopes.sub_(part.sum_to_size(self.dslopes.shape))
        if self.dbias is not None:
            _add_pairs(self.dbias, i, j, self._inside(dS, i, j))

    def _distance(self, i: Tile, j: Tile, device: torch.device) -> Tensor:
        rows, keys = i.index(device)[..., :, None], j.index(device)[..., None, :]
        return (rows + self.diagonal - keys).abs()

    @staticmethod
    def _inside(S: Tensor, i: Tile, j: Tile) -> Tensor:
        return S[..., : i.count, : j.count]

    def _band(self, i: Tile, j: Tile, S: Tensor) -> Tensor:
        """The Band's part of the tile S, to be added. Contiguous tiles that lie alike to the diagonal share it."""
        if not (isinstance(i.rows, slice) and isinstance(j.rows, slice)):
            return self._make_band(i, j, S)
        key = (self.diagonal + i.span[0] - j.span[0], i.size, j.size)
        if key not in self.band_tiles:
            if len(self.band_tiles) == 8:  # more are hardly in use at a time
                self.band_tiles.clear()
            self.band_tiles[key] = self._make_band(i, j, S)
        return self.band_tiles[key]

    def _make_band(self, i: Tile, j: Tile, S: Tensor) -> Tensor:
        rows, keys = i.index(S.device)[..., :, None], j.index(S.device)[..., None, :]
        return _additive(self.band.visible(rows, keys, self.diagonal), S.dtype)

    def _mask_blocks(self, S: Tensor, i: Tile, j: Tile) -> None:
        """Hide the pairs that the BlockMask's bits hide; slots that name no tile hide all."""
        assert self.blocks is not None
        slots, by_query = (j.slots, True) if j.slots is not None else (i.slots, False)
        assert slots is not None
        pool = self.blocks.bits if len(self.blocks.bits) else self.blocks.bits.new_zeros((1, 128, 16))
        bits = pool[slots.clamp(min=0)]
        bits = (bits[..., None] >> torch.arange(8, device=bits.device, dtype=torch.uint8)).bitwise_and_(1)
        seen = bits.bool().flatten(-2)  # (b|1, h|1, slots, 128 rows, 128 keys)
        seen.logical_or_((slots == FULL)[..., None, None]).logical_and_((slots != NONE)[..., None, None])
        # slots lie side by side along the gathered side of the tile
        seen = seen.transpose(-3, -2).flatten(-2) if by_query else seen.flatten(-3, -2)
        rows, keys = S.shape[-2:]
        S.add_(_additive(seen[..., :rows, :keys], S.dtype))


def _in_bits(bias: Tensor, dtype: torch.dtype) -> Tensor:
    """log2(e) bias. Only -inf becomes -inf: the dtype's least number, a mask to some, stays finite."""
    bits = bias.to(dtype).mul(LOG2E).clamp_(min=torch.finfo(dtype).min)
    return bits.add_(_additive(bias != -math.inf, dtype))


def _additive(visible: Tensor, dtype: torch.dtype) -> Tensor:
    """0 where visible and -inf where not: to add this takes a twentieth of masked_fill_'s time on a CPU (measured)."""
    return visible.to(dtype).log_()


def _pairs(x: Tensor, i: Tile, j: Tile) -> Tensor:
    """The tile (.., i, j) of x (b|1, h|1, Sq|1, Sk|1), by x's own strides; nothing is expanded in memory."""
    if isinstance(i.rows, slice) and isinstance(j.rows, slice):
        x = x if x.shape[-2] == 1 else x[..., i.rows, :]
        return x if x.shape[-1] == 1 else x[..., j.rows]
    return x[_index(x, i, j)]


def _index(x: Tensor, i: Tile, j: Tile) -> tuple[Tensor, ...]:
    """Index tensors of the tile (.., i, j) in x; a dimension of size 1 is at 0."""
    b = torch.arange(x.shape[0], device=x.device)[:, None, None, None]
    h = torch.arange(x.shape[1], device=x.device)[:, None, None]
    rows, keys = (t.index(x.device)[..., : t.count].clamp(max=n - 1) for t, n in zip((i, j), x.shape[2:], strict=True))
    rows = rows[..., :, None] if x.shape[2] > 1 else rows.new_zeros((1, 1))
    keys = keys[..., None, :] if x.shape[3] > 1 else keys.new_zeros((1, 1))
    return b, h, rows, keys


def _add_pairs(x: Tensor, i: Tile, j: Tile, tile: Tensor) -> None:
    """x[.., i, j] += tile, summed over the dimensions in which x is broadcast."""
    over = [dim for dim in range(4) if x.shape[dim] == 1 and tile.shape[dim] > 1]
    if isinstance(i.rows, slice) and isinstance(j.rows, slice):
        _pairs(x, i, j).add_(tile.sum(over, keepdim=True) if over else tile)
        return
    if over := [dim for dim in over if dim >= 2]:
        tile = tile.sum(over, keepdim=True)
    b, h, rows, keys = torch.broadcast_tensors(*_index(x, i, j), tile)[:4]
    x.index_put_((b, h, rows, keys), tile.expand(b.shape), accumulate=True)
