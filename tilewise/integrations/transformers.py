"""tilewise in Hugging Face transformers: `register()`, then `attn_implementation="tilewise"`.

transformers asks two functions of one name: the mask function once a forward and kind of layer, the attention function
in every layer. Where only the latter is registered the mask is None, and padded batches are wrong in silence; so
`register` registers both. What the mask function returns reaches the attention function as it is, so that all that
depends on the mask's contents is decided once: causal masks and windows as a Band, padding as lengths or as a
(B, 1, 1, Sk) boolean mask, which is never spread out over the queries. On a GPU nothing is read back to the host, but
for the number of packed sequences, where transformers waits itself.
"""

from __future__ import annotations

import functools
import inspect
from typing import Any

import torch
from torch import Tensor

from .. import attention, attention_packed
from ..mask import Band, Masked, causal

try:
    from transformers import AttentionInterface, AttentionMaskInterface
    from transformers.masking_utils import sdpa_mask
except ModuleNotFoundError as missing:
    if missing.name != "transformers":
        raise
    raise ModuleNotFoundError(
        f"{__name__} needs transformers. Install it: pip install 'tilewise[hf]'", name="transformers"
    ) from None
if "q_offset" not in inspect.signature(sdpa_mask).parameters:
    raise ImportError(f"{__name__} needs transformers from 5.4. Install it: pip install --upgrade 'tilewise[hf]'")

from .transformers_mask import Visible, mask_function

NAME = "tilewise"
PADDINGS = (None, "right", "none")
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
        padding: what is promised of the 2-D attention masks that models are given. "none": they hold ones alone.
            "right": in batches without a cache the zeros come last; padding then reaches the kernels as lengths, on a
            GPU too, without looking. None: nothing; on the CPU a mask is looked at, once a forward, while on a GPU, and
            in compiled code, it stays a boolean mask, which is slower than lengths or nothing. A promise is checked on
            the CPU and under `tilewise.checked()`. (In compiled code give a model some attention_mask: without one
            transformers cannot exclude that sequences are packed, and makes a mask of all pairs.)

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
    cu_seq_lens_q, cu_seq_lens_k: integers, where sequences that are packed into a batch of one end; each sees itself.

    Raises:
        ValueError: for all else that is given: it would change nothing, and the caller means it to.
    """
    for name, given in others.items():
        if given is not None and given is not False and name not in WITHOUT_EFFECT:
            hint = ": for the weights there is attn_implementation='eager'" if name == "output_attentions" else ""
            raise ValueError(f"{name} is given: tilewise's attention for transformers takes no {name}{hint}")
    mask: Any = attention_mask
    q_lens = k_lens = cu = None
    bias = position_bias
    if isinstance(mask, Visible):
        if is_causal is False and mask.is_causal and query.shape[2] > 1:
            raise ValueError("is_causal is False, and the model made a causal mask: set is_causal=False in its config")
        mask, q_lens, k_lens, cu = mask.mask, mask.q_lens, mask.k_lens, mask.cu
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
    if cu is not None or cu_seq_lens_q is not None or cu_seq_lens_k is not None:
        if q_lens is not None or k_lens is not None or isinstance(mask, Masked):
            raise ValueError("cu_seq_lens_q is given: it is for packed sequences, without padding")
        cu_q, cu_k = _ends(cu, cu_seq_lens_q, cu_seq_lens_k, query.shape[0])
        return _packed(query, key, value, mask, cu_q, cu_k, options), None
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


def _ends(cu: Tensor | None, cu_q: Tensor | None, cu_k: Tensor | None, batch: int) -> tuple[Tensor, Tensor]:
    """int32 (N + 1,) of the queries and of the keys. cu: as positions that begin anew have it, which says the same."""
    if cu_q is None and cu_k is None and cu is not None:
        return cu, cu
    if cu_q is None or cu_k is None or batch != 1:
        raise ValueError("cu_seq_lens_q and cu_seq_lens_k: both must be given, or neither; and for a batch of one")
    cu_q, cu_k = cu_q.to(torch.int32), cu_k.to(torch.int32)
    if cu is not None and cu.device.type == "cpu" and not (torch.equal(cu, cu_q) and torch.equal(cu, cu_k)):
        raise ValueError("cu_seq_lens_q and position_ids are given, and do not say the same of where sequences end")
    return cu_q, cu_k


def _packed(
    query: Tensor, key: Tensor, value: Tensor, mask: Any, cu_q: Tensor, cu_k: Tensor, options: dict[str, Any]
) -> Tensor:
    """Several sequences in a row of the batch, without padding."""
    batch, _, q_len, _ = query.shape
    k_len = key.shape[2]
    if isinstance(mask, Tensor) or options["bias"] is not None:  # of all tokens by all tokens: it, within the sequences
        i, j = _sequence_of(cu_q, batch, q_len), _sequence_of(cu_k, batch, k_len)
        apart = i[:, None, :, None] == j[:, None, None, :]
        both = apart if mask is None else mask & apart
        return attention(query, key, value, mask=both, **options).transpose(1, 2).contiguous()
    del options["bias"]
    q, k, v = (x.transpose(1, 2).flatten(0, 1) for x in (query, key, value))
    o = attention_packed(q, k, v, cu_q, cu_k, mask=mask, **options)
    return o.unflatten(0, (batch, q_len))


def _sequence_of(cu: Tensor, batch: int, tokens: int) -> Tensor:
    """(batch, tokens), the number of each token's sequence."""
    every = torch.arange(batch * tokens, dtype=cu.dtype, device=cu.device)
    return torch.searchsorted(cu, every, right=True).view(batch, tokens)
