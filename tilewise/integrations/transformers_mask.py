"""The mask of a model of transformers, made once a forward and kind of layer: as a Band and lengths where it is such.

Whatever its contents decide is decided here, and not in each layer again; `transformers.py` says more.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch._subclasses import FakeTensor
from transformers.masking_utils import bidirectional_mask_function, causal_mask_function, sdpa_mask

from ..block_mask import BlockMask
from ..mask import Band, Masked, causal
from ..problem import MaskLike, _checked


class Visible:
    """What the mask function hands to the layers: `mask` as `tilewise.attention` takes it, and lengths, int32 (B,).

    cu: int32 (N + 1,), where the batch, one row after the other, holds several sequences a row; `mask` is then theirs.
    """

    __slots__ = ("cu", "is_causal", "k_lens", "mask", "q_lens")
    ndim = 4  # so that transformers takes it for finished, when `generate` makes it ahead of the forward

    def __init__(
        self,
        mask: MaskLike,
        q_lens: Tensor | None = None,
        k_lens: Tensor | None = None,
        is_causal: bool = False,
        cu: Tensor | None = None,
    ) -> None:
        self.mask, self.q_lens, self.k_lens, self.is_causal, self.cu = mask, q_lens, k_lens, is_causal, cu

    def __repr__(self) -> str:
        lens = ", ".join(name for name in ("q_lens", "k_lens", "cu") if getattr(self, name) is not None)
        return f"Visible({self.mask if not isinstance(self.mask, Tensor) else tuple(self.mask.shape)}; {lens})"

    def __getitem__(self, other: Any) -> Any:
        raise TypeError(
            "this model computes attention itself, from a mask that is a tensor: it takes no other attention"
        )

    __add__ = __radd__ = __getitem__

    def to(self, device: Any, *args: Any, **kwargs: Any) -> Visible:
        """On another device, where a model is spread over several."""

        def moved(x: Any) -> Any:
            if isinstance(x, BlockMask):
                return x.to(device)
            return x.to(device, *args, **kwargs) if isinstance(x, Tensor) else x

        mask = Masked(self.mask.band, moved(self.mask.mask)) if isinstance(self.mask, Masked) else moved(self.mask)
        return Visible(mask, moved(self.q_lens), moved(self.k_lens), self.is_causal, moved(self.cu))


def mask_function(
    batch_size: int,
    q_length: int,
    kv_length: int,
    q_offset: int | Tensor = 0,
    kv_offset: int = 0,
    mask_function: Any = causal_mask_function,
    attention_mask: Any = None,
    local_size: int | None = None,
    allow_is_causal_skip: bool = True,
    allow_is_bidirectional_skip: bool = False,
    config: Any = None,
    padding: str | None = None,
    **others: Any,
) -> Visible | Tensor:
    """The mask of one forward, from transformers' description of it.

    A `Visible` wherever transformers lets the mask be something else than a tensor and it is an interval of keys a row:
    causal, a sliding window, all; with `attention_mask`, bool (B, tokens so far); and for packed sequences. Else the
    boolean tensor that "sdpa" would take: chunks, images within a text, the decoding step of a static cache.
    padding: as for `register`.
    """
    if isinstance(attention_mask, Visible):  # made by `generate`, ahead of the forward
        return attention_mask
    if padding == "none" and attention_mask is not None:
        if _may_look(attention_mask, True) and not attention_mask.all():
            raise ValueError("attention_mask has zeros: this implementation is registered with padding='none'")
        attention_mask = None
    band = None
    if isinstance(q_offset, int) and (allow_is_causal_skip or allow_is_bidirectional_skip):
        shift = q_offset - kv_offset
        kind = _kind(mask_function, local_size, allow_is_causal_skip, kv_length + kv_offset, config)
        if kind is not None:
            band = _band(kind, local_size, shift, q_length, kv_length)
    if band is None:
        packed = _packed(mask_function) if attention_mask is None and not torch.compiler.is_compiling() else None
        return packed or sdpa_mask(
            batch_size=batch_size, q_length=q_length, kv_length=kv_length, q_offset=q_offset, kv_offset=kv_offset,
            mask_function=mask_function, attention_mask=attention_mask, local_size=local_size,
            allow_is_causal_skip=False, allow_is_bidirectional_skip=False,
            use_vmap=others.get("use_vmap", False), device=others.get("device", "cpu"),
        )  # fmt: skip
    mask = None if band.is_full else band
    one_way = kind in ("causal", "window")
    if attention_mask is None:
        return Visible(mask, is_causal=one_way)
    # The keys that any row sees; behind them a static cache is empty.
    last = min(kv_length, q_length + shift) if one_way else kv_length
    present = attention_mask[:, kv_offset : kv_offset + last]
    if present.shape[1] < last:  # tokens that the mask does not reach are hidden
        present = torch.nn.functional.pad(present, (0, last - present.shape[1]))
    whole = last == kv_length and shift == 0  # the mask's columns are the tokens, from the first on
    found = _padded(mask, present, kv_length, padding if whole else None, one_way and q_length == kv_length)
    found.is_causal = one_way
    return found


def _kind(function: Any, local_size: int | None, is_causal: bool, tokens: int, config: Any) -> str | None:
    """ "causal", "all", "window", "window both ways": what `function` shows, if that is an interval of keys a row.

    transformers allows its masks to be skipped only where nothing was added to them: no packed sequences, no overlays.
    """
    if local_size is None:
        return (
            "causal" if function is causal_mask_function else "all" if function is bidirectional_mask_function else None
        )
    if not is_causal:
        return "window both ways"
    if getattr(config, "attention_chunk_size", None) == local_size:  # chunks, unless all tokens lie in the first one
        return "causal" if tokens <= local_size and getattr(config, "sliding_window", None) != local_size else None
    return "window" if getattr(config, "sliding_window", None) == local_size else None


def _band(kind: str, size: int | None, shift: int, q_length: int, kv_length: int) -> Band:
    """The interval, of positions in the call: row i stands on key i + shift. Bounds that bind no row are None."""
    left, right = None, None if kind == "all" else shift
    if size is not None and kind == "window":
        left = size - 1 - shift
    elif size is not None and kind == "window both ways":
        left, right = size - shift, size + shift
    if left is not None and left >= q_length - 1:
        left = None
    if right is not None and right >= kv_length - 1:
        right = None
    if shift == kv_length - q_length and right == shift:  # the usual form of the same: the last row on the last key
        return causal if left is None else Band(left + shift, 0)
    return Band(left, right, "top_left") if (left, right) != (None, None) else Band()


def _padded(mask: Band | None, present: Tensor, kv_length: int, padding: str | None, rows_too: bool) -> Visible:
    """`mask` without the keys that are not `present`, bool (B, keys), and without rows of padding if `rows_too`.

    As lengths only where they move no diagonal: there is none, both ends move together, or it stands at the top left.
    """
    as_lengths = mask is None or rows_too or mask.align == "top_left"
    if _may_look(present, padding is not None):
        if bool(present.all()):
            return Visible(mask)
        last = bool((present[:, 1:] <= present[:, :-1]).all())  # where the mask has fallen it stays down
        if padding and not last:
            raise ValueError(
                "attention_mask has padding before tokens: this implementation is registered with padding='right'"
            )
        padding = "right" if last else None
    if padding and as_lengths:
        lens = present.sum(1, dtype=torch.int32)
        return Visible(mask, lens if rows_too else None, lens)
    if present.shape[1] < kv_length:
        present = torch.nn.functional.pad(present, (0, kv_length - present.shape[1]))
    dense = present[:, None, None, :]
    return Visible(dense if mask is None else Masked(mask, dense))


def _may_look(mask: Tensor, promised: bool) -> bool:
    """On the CPU always, on a GPU only to see whether a promise is kept, under `tilewise.checked()`: it waits."""
    here = mask.device.type == "cpu" or (promised and mask.device.type != "meta" and _checked.active)
    return here and not torch.compiler.is_compiling() and not isinstance(mask, FakeTensor)


# transformers says that sequences are packed by nothing but the function that it has put together: a causal one, or one
# with a window, and another for tokens of one sequence. What is not exactly this is left to the boolean tensor.


def _packed(function: Any) -> Visible | None:
    """Sequences packed into rows, as their lengths. The host waits for their number, as transformers has just done."""
    shown, packed = _captured(function, "and_masks.<locals>.and_mask", "mask_functions") or (None, None)
    ids = _captured(packed, "packed_sequence_mask_function.<locals>.inner_mask", "packed_sequence_mask")
    if ids is None:
        return None
    # Newer versions count from each sequence's own start, which moves no diagonal within it.
    shown = _captured(shown, "remap_positions_for_packed_sequence.<locals>.inner_mask", "mask_function") or shown
    band = causal
    if shown is not causal_mask_function:
        overlay, base = _captured(shown, "and_masks.<locals>.and_mask", "mask_functions") or (None, None)
        window = _captured(overlay, "sliding_window_overlay.<locals>.inner_mask", "sliding_window")
        if window is None or base is not causal_mask_function:
            return None
        band = Band(window - 1, 0)
    begins = torch.nn.functional.pad(ids[:, 1:] != ids[:, :-1], (1, 0), value=True)  # each row's first token does
    starts = begins.flatten().nonzero().flatten()
    return Visible(band, is_causal=True, cu=torch.nn.functional.pad(starts, (0, 1), value=ids.numel()).to(torch.int32))


def _captured(function: Any, qualname: str, name: str) -> Any:
    """The variable `name` of an inner function of transformers.masking_utils, or None if `function` is another."""
    if getattr(function, "__qualname__", None) != qualname or function.__module__ != causal_mask_function.__module__:
        return None
    names = function.__code__.co_freevars
    return function.__closure__[names.index(name)].cell_contents if name in names else None
