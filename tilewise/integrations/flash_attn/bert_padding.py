"""From padded to packed sequences and back, under the names of flash_attn.bert_padding. All of it has gradients."""

from __future__ import annotations

import torch
from torch import Tensor


def unpad_input(
    hidden_states: Tensor, attention_mask: Tensor, unused_mask: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor, int, Tensor]:
    """The tokens of a padded batch, one after the other.

    Args:
        hidden_states: (B, S, ...). attention_mask: (B, S), bool or 0 and 1, 1 for tokens.
        unused_mask: (B, S), 1 for places that are kept but not in use; not where attention_mask is 1.

    Returns:
        the kept tokens (T, ...); their places in the flattened batch, int64 (T,); cu_seqlens, int32 (B + 1,); the
        greatest length, an int, for which the host waits; how many tokens of each sequence are in use, int32 (B,).

    >>> x, mask = torch.arange(6.0).view(2, 3, 1), torch.tensor([[1, 1, 0], [1, 0, 0]])
    >>> tokens, indices, cu_seqlens, longest, used = unpad_input(x, mask)
    >>> tokens.flatten().tolist(), indices.tolist(), cu_seqlens.tolist(), longest, used.tolist()
    ([0.0, 1.0, 3.0], [0, 1, 3], [0, 2, 3], 2, [2, 1])
    >>> pad_input(tokens, indices, 2, 3).flatten().tolist()
    [0.0, 1.0, 0.0, 3.0, 0.0, 0.0]
    """
    kept = attention_mask if unused_mask is None else attention_mask + unused_mask
    lengths = kept.sum(-1, dtype=torch.int32)
    indices = kept.flatten().nonzero().flatten()
    used = attention_mask.sum(-1, dtype=torch.int32)
    return index_first_axis(hidden_states.flatten(0, 1), indices), indices, _ends(lengths), int(lengths.max()), used


def unpad_input_for_concatenated_sequences(
    hidden_states: Tensor, attention_mask_in_length: Tensor
) -> tuple[Tensor, Tensor, Tensor, int]:
    """The tokens of a batch each of whose rows holds several sequences, one after the other, then padding.

    attention_mask_in_length: (B, S), of each row the lengths of its sequences, then zeros: [2, 3, 0, 0, 0, 0] is one of
    two tokens and one of three. Returns what `unpad_input` does, but the last.

    >>> x, lengths = torch.arange(6.0).view(2, 3, 1), torch.tensor([[1, 1, 0], [3, 0, 0]])
    >>> tokens, indices, cu_seqlens, longest = unpad_input_for_concatenated_sequences(x, lengths)
    >>> indices.tolist(), cu_seqlens.tolist(), longest
    ([0, 1, 3, 4, 5], [0, 1, 2, 5], 3)
    """
    row = attention_mask_in_length.sum(-1, keepdim=True)
    kept = torch.arange(attention_mask_in_length.shape[-1], device=row.device) < row
    lengths = attention_mask_in_length[attention_mask_in_length > 0]
    indices = kept.flatten().nonzero().flatten()
    return index_first_axis(hidden_states.flatten(0, 1), indices), indices, _ends(lengths), int(lengths.max())


def pad_input(hidden_states: Tensor, indices: Tensor, batch: int, seqlen: int) -> Tensor:
    """(T, ...) back to (batch, seqlen, ...), zero where nothing was kept. indices: from `unpad_input`."""
    return index_put_first_axis(hidden_states, indices, batch * seqlen).unflatten(0, (batch, seqlen))


def index_first_axis(x: Tensor, indices: Tensor) -> Tensor:
    """x[indices], of the first dimension. indices: int64 (T,)."""
    return x.index_select(0, indices)


def index_put_first_axis(values: Tensor, indices: Tensor, first_axis_dim: int) -> Tensor:
    """Zeros (first_axis_dim, ...) with `values` (T, ...) at `indices`, each of which stands there once."""
    return values.new_zeros(first_axis_dim, *values.shape[1:]).index_copy(0, indices, values)


def index_first_axis_residual(x: Tensor, indices: Tensor) -> tuple[Tensor, Tensor]:
    """`index_first_axis`, and x for what goes past it."""
    return index_first_axis(x, indices), x


def _ends(lengths: Tensor) -> Tensor:
    return torch.nn.functional.pad(lengths.cumsum(0, dtype=torch.int32), (1, 0))
