"""tilewise in Hugging Face transformers: `register()`, then `attn_implementation="tilewise"`.

transformers asks two functions of one name: the mask function once a forward and kind of layer, the attention function
in every layer. Where only the latter is registered the mask is None, and padded batches are wrong in silence; so
`register` registers both. What the mask function returns reaches the attention function as it is, so that all that
depends on the mask's contents is decided once: causal masks and windows as a Band, padding as lengths or as a
(B, 1, 1, Sk) boolean mask, which is never spread out over the queries. On a GPU nothing is read back to the host.
"""

from __future__ import annotations

import functools
import inspect
from typing import Any

import torch
from torch import Tensor
from torch._subclasses import FakeTensor

from .. import attention, attention_packed
from ..mask import Band, Masked, causal
from ..problem import _checked

try:
    from transformers import AttentionInterface, AttentionMaskInterface
    from transformers.masking_utils import bidirectional_mask_function, causal_mask_function, sdpa_mask
except ModuleNotFoundError as missing:
    if missing.name != "transformers":
        raise
    raise ModuleNotFoundError(
        f"{__name__} needs transformers. Install it: pip install 'tilewise[hf]'", name="transformers"
    ) from None
if "q_offset" not in inspect.signature(sdpa_mask).parameters:
    raise ImportError(f"{__name__} needs transformers from 5.4. Install it: pip install --upgrade 'tilewise[hf]'")

NAME = "tilewise"
PADDINGS = (None, "right")
# transformers looks for these in an implementation's name, and then takes it for its own.
TAKEN = ("flash", "sdpa", "flex_attention", "eager", "paged")
# What models hand on to every layer and that says nothing about its scores which the mask does not say.
WITHOUT_EFFECT = frozenset(
    {
        "cache_position", "labels", "logits_to_keep", "max_length_k", "max_length_q", "num_items_in_batch",
        "output_hidden_states", "output_router_logits", "position_ids", "return_dict", "seq_idx",
        "use_cache",
    }
)  # fmt: skip


def register(name: str = NAME, *, padding: str | None = None) -> None:
    """Makes `attn_implementation=name` run on tilewise, in each model that has a choice of implementations.

    Args:
        name: under which models find it. Not one that holds "flash", "sdpa" or the like, which transformers explains to
            itself.
        padding: "right" promises that the zeros of every 2-D attention mask of a batch without a cache come last. Then
            padding reaches the kernels as lengths, on a GPU too, without looking. None: on the CPU the mask is looked
            at, once a forward; on a GPU, and while compiling, it stays a boolean mask, which is slower than lengths.

    Registering again replaces. Gradients, grouped heads, sliding windows, softcap, sinks (`s_aux`), position biases,
    caches and dropout are those of `tilewise.attention`. An argument that cannot be honoured, `output_attentions=True`
    for one, is a ValueError in the forward. Rows that are padding, or see no key, give 0, where "eager" gives some
    average of the values.

    Raises:
        ValueError: for a name that transformers would take for its own, or an unknown padding.

    >>> import torch, transformers
    >>> import tilewise.integrations.transformers
    >>> tilewise.integrations.transformers.register()
    >>> config = transformers.LlamaConfig(
    ...     vocab_size=64, hidden_size=32, intermediate_size=32, num_hidden_layers=1, num_attention_heads=4,
    ...     num_key_value_heads=2, attn_implementation="tilewise")
    >>> model = transformers.LlamaForCausalLM(config)
    >>> model(torch.tensor([[1, 2, 3]])).logits.shape
    torch.Size([1, 3, 64])
    """
    if any(part in name for part in TAKEN):
        raise ValueError(f"name is {name!r}: transformers takes names with {', '.join(TAKEN)} for its own")
    if padding not in PADDINGS:
        raise ValueError(f"padding is {padding!r}: it must be one of {PADDINGS}")
    AttentionInterface.register(name, attention_function)
    AttentionMaskInterface.register(name, functools.partial(mask_function, padding=padding))


class Visible:
    """What the mask function hands to the layers: `mask` as `tilewise.attention` takes it, and lengths, int32 (B,)."""

    __slots__ = ("is_causal", "k_lens", "mask", "q_lens")
    ndim = 4  # so that transformers takes it for finished, when `generate` makes it ahead of the forward

    def __init__(
        self,
        mask: Band | Masked | Tensor | None,
        q_lens: Tensor | None = None,
        k_lens: Tensor | None = None,
        is_causal: bool = False,
    ) -> None:
        self.mask, self.q_lens, self.k_lens, self.is_causal = mask, q_lens, k_lens, is_causal

    def __repr__(self) -> str:
        lens = ", ".join(name for name in ("q_lens", "k_lens") if getattr(self, name) is not None)
        return f"Visible({self.mask if not isinstance(self.mask, Tensor) else tuple(self.mask.shape)}; {lens})"

    def __getitem__(self, key: Any) -> Any:
        raise TypeError(
            "this model computes attention itself, from a mask that is a tensor: it has no choice of others"
        )

    def to(self, device: Any, *args: Any, **kwargs: Any) -> Visible:
        """On another device, where a model is spread over several."""
        mask = self.mask
        if isinstance(mask, Masked):
            dense = mask.mask
            mask = Masked(
                mask.band, dense.to(device, *args, **kwargs) if isinstance(dense, Tensor) else dense.to(device)
            )
        elif isinstance(mask, Tensor):
            mask = mask.to(device, *args, **kwargs)
        q_lens, k_lens = (None if x is None else x.to(device, *args, **kwargs) for x in (self.q_lens, self.k_lens))
        return Visible(mask, q_lens, k_lens, self.is_causal)


# ---- the mask function ----------------------------------------------------------------------------------------------


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
    causal, a sliding window, all; with `attention_mask`, bool (B, tokens so far). Else the boolean tensor that "sdpa"
    would take: packed or chunked sequences, images within a text, the decoding step of a static cache.
    """
    if isinstance(attention_mask, Visible):  # made by `generate`, ahead of the forward
        return attention_mask
    band = None
    if isinstance(q_offset, int) and (allow_is_causal_skip or allow_is_bidirectional_skip):
        shift = q_offset - kv_offset
        kind = _kind(mask_function, local_size, allow_is_causal_skip, kv_length + kv_offset, config)
        if kind is not None:
            band = _band(kind, local_size, shift, q_length, kv_length)
    if band is None:
        return sdpa_mask(
            batch_size=batch_size, q_length=q_length, kv_length=kv_length, q_offset=q_offset, kv_offset=kv_offset,
            mask_function=mask_function, attention_mask=attention_mask, local_size=local_size,
            allow_is_causal_skip=False, allow_is_bidirectional_skip=False,
            use_vmap=others.get("use_vmap", False), device=others.get("device", "cpu"),
        )  # fmt: skip
    mask = None if band.is_full else band
    one_way = kind in ("causal", "window")
    if attention_mask is None:
        return Visible(mask, is_causal=one_way)
    last = (
        min(kv_length, q_length + shift) if one_way else kv_length
    )  # behind it no row sees, and a static cache is empty
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
    looked_at = present.device.type == "cpu" or (padding and present.device.type != "meta" and _checked.active)
    if looked_at and not torch.compiler.is_compiling() and not isinstance(present, FakeTensor):
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


# ---- the attention function -----------------------------------------------------------------------------------------


def attention_function(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Visible | Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    is_causal: bool | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    position_bias: Tensor | None = None,
    cu_seq_lens_q: Tensor | None = None,
    cu_seq_lens_k: Tensor | None = None,
    deterministic: bool | None = None,
    **others: Any,
) -> tuple[Tensor, None]:
    """One layer: query (B, Hq, L, D), key and value (B, Hkv, S, D), not repeated -> ((B, L, Hq, Dv) contiguous, None).

    attention_mask: what `mask_function` returned; or a model's or caller's own (B | 1, Hq | 1, L, S), boolean (True =
    visible) or added to the scores. It has the window in it, as for "eager". None: nobody made a mask, so `is_causal`
    (the module's, where it is None) and `sliding_window` say what is visible.
    position_bias: (B | 1, Hq | 1, L, S), added after softcap, with gradient. s_aux: (Hq,), sinks.
    cu_seq_lens_q, cu_seq_lens_k: int32, of sequences packed into a batch of one, each of which sees itself only.

    Raises:
        ValueError: for all else that is given: it would change nothing, and the caller means it to.
    """
    for name, given in others.items():
        if given is not None and given is not False and name not in WITHOUT_EFFECT:
            hint = (
                ": the weights are never formed, use attn_implementation='eager'" if name == "output_attentions" else ""
            )
            raise ValueError(f"{name} is given: tilewise's attention for transformers takes no {name}{hint}")
    mask: Any = attention_mask
    q_lens = k_lens = None
    bias = position_bias
    if isinstance(mask, Visible):
        if is_causal is False and mask.is_causal and query.shape[2] > 1:
            raise ValueError("is_causal is False, and the model made a causal mask: set is_causal=False in its config")
        mask, q_lens, k_lens = mask.mask, mask.q_lens, mask.k_lens
    elif mask is None:
        mask = _unmasked(module, query, key, is_causal, sliding_window)
    elif mask.dim() != 4:
        raise ValueError(f"attention_mask is {tuple(mask.shape)}: a tensor must be 4-D here, (B, H, L, S)")
    elif mask.is_floating_point():
        bias, mask = mask if bias is None else bias + mask, None
    # Models hand on their dropout; "eager" applies it in training alone.
    options: dict[str, Any] = {
        "bias": bias, "sink": s_aux, "scale": scaling, "softcap": softcap or 0.0, "deterministic": deterministic,
        "dropout_p": dropout if module.training else 0.0,
    }  # fmt: skip
    if cu_seq_lens_q is not None or cu_seq_lens_k is not None:
        return _packed(query, key, value, mask, q_lens, k_lens, cu_seq_lens_q, cu_seq_lens_k, options), None
    o = attention(query, key, value, mask=mask, q_lens=q_lens, k_lens=k_lens, **options)
    return o.transpose(1, 2).contiguous(), None


def _unmasked(module: Any, query: Tensor, key: Tensor, is_causal: bool | None, window: int | None) -> Band | None:
    """What a layer sees for which no mask was made."""
    if is_causal is None:
        is_causal = getattr(module, "is_causal", None)
        if is_causal is None:
            raise ValueError(f"{type(module).__name__} has no is_causal, and there is no mask: which keys are visible?")
    q_len, k_len = query.shape[2], key.shape[2]
    if is_causal and 1 < q_len != k_len:
        raise ValueError(f"there is no mask for {q_len} queries of {k_len} keys: which of the keys come before them?")
    if window is not None:
        return Band(window - 1, 0 if is_causal else window - 1)
    return causal if is_causal and q_len > 1 else None


def _packed(
    query: Tensor, key: Tensor, value: Tensor, mask: Any, q_lens: Tensor | None, k_lens: Tensor | None,
    cu_q: Tensor | None, cu_k: Tensor | None, options: dict[str, Any],
) -> Tensor:  # fmt: skip
    """A batch of one that holds several sequences, without padding."""
    if cu_q is None or cu_k is None:
        raise ValueError("cu_seq_lens_q and cu_seq_lens_k: one is given, the other is not")
    if query.shape[0] != 1 or q_lens is not None or k_lens is not None or isinstance(mask, Masked):
        raise ValueError("cu_seq_lens_q is given: it is for a batch of one, without padding")
    if options["bias"] is not None:
        raise ValueError("cu_seq_lens_q and position_bias are given: a bias is for whole sequences")
    cu_q, cu_k = cu_q.to(torch.int32), cu_k.to(torch.int32)
    if isinstance(mask, Tensor):  # of all tokens by all tokens: it, within the sequences
        del options["bias"]
        apart = _sequence_of(cu_q, query.shape[2])[:, None] == _sequence_of(cu_k, key.shape[2])
        return attention(query, key, value, mask=mask & apart, **options).transpose(1, 2).contiguous()
    q, k, v = (x[0].transpose(0, 1) for x in (query, key, value))
    return attention_packed(q, k, v, cu_q, cu_k, mask=mask, **options)[None]


def _sequence_of(cu: Tensor, tokens: int) -> Tensor:
    return torch.searchsorted(cu, torch.arange(tokens, dtype=cu.dtype, device=cu.device), right=True)
