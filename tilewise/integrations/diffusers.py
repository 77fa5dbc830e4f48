"""tilewise in Hugging Face diffusers, whose list of attention backends is closed: it takes the place of one of them.

`register()` puts it in that of "native", which is what models use unless told otherwise; `restore()` gives it back.
`sdpa.enable()` reaches models on "native" too, and all else that runs on PyTorch's attention.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from .. import attention
from .sdpa import TOP_LEFT

try:
    from diffusers.models.attention_dispatch import AttentionBackendName, _AttentionBackendRegistry
except ModuleNotFoundError as missing:
    if not (missing.name or "").startswith("diffusers"):
        raise
    raise ModuleNotFoundError(
        f"{__name__} needs diffusers from 0.35. Install it: pip install 'tilewise[diffusers]'", name="diffusers"
    ) from None

_replaced: dict[AttentionBackendName, tuple[Any, ...]] = {}


class _Everything(set[str]):
    """The arguments that we take, for diffusers, which drops in silence what is not among them. We refuse it aloud."""

    def __contains__(self, name: object) -> bool:
        return True


def register(replaces: str = "native") -> None:
    """Puts tilewise in the place of a backend of diffusers, for all models that use it, until `restore()`.

    Args:
        replaces: a name that `diffusers.models.attention_dispatch.AttentionBackendName` knows, to choose with
            `model.set_attention_backend(name)` or `diffusers.attention_backend(name)`.

    Raises:
        ValueError: for another name.

    >>> import torch
    >>> from diffusers.models.attention_dispatch import dispatch_attention_fn
    >>> import tilewise.integrations.diffusers
    >>> tilewise.integrations.diffusers.register()
    >>> q = torch.randn(1, 10, 2, 8)                                       # (B, S, H, D)
    >>> dispatch_attention_fn(q, q, q).shape
    torch.Size([1, 10, 2, 8])
    >>> tilewise.integrations.diffusers.restore()
    """
    names = [member.value for member in AttentionBackendName]
    if replaces not in names:
        raise ValueError(f"replaces is {replaces!r}: it must be one of {', '.join(map(repr, names))}")
    name, registry = AttentionBackendName(replaces), _AttentionBackendRegistry
    if name not in _replaced:
        tables = (registry._backends, registry._constraints, registry._supported_arg_names)
        ringed = name.value in registry._supports_context_parallel
        _replaced[name] = (*((table, table.get(name)) for table in tables), ringed)
    registry.register(name)(attention_function)
    registry._supported_arg_names[name] = _Everything(registry._supported_arg_names[name])
    registry._supports_context_parallel.discard(name.value)


def restore() -> None:
    """The backends of diffusers as they were before `register()`."""
    for name, (*tables, ringed) in _replaced.items():
        for table, before in tables:
            if before is None:
                del table[name]
            else:
                table[name] = before
        if ringed:
            _AttentionBackendRegistry._supports_context_parallel.add(name.value)
    _replaced.clear()


def attention_function(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
    return_lse: bool = False,
    _parallel_config: Any = None,
    **others: Any,
) -> Any:
    """query (B, Sq, H, D), key (B, Sk, Hkv, D), value (B, Sk, Hkv, Dv) -> (B, Sq, H, Dv); with return_lse also lse.

    attn_mask: boolean, True where visible, or added to the scores: (B, Sk), (Sq, Sk), (B, Sq, Sk) or (B | 1, H | 1, Sq,
    Sk); the first of these that fits. is_causal: aligned to the top left. enable_gqa: Hkv may be less than H. lse:
    (B, Sq, H) in fp32.

    Raises:
        ValueError: for all else that is given, context parallelism too.
    """
    for name, given in {"_parallel_config": _parallel_config, **others}.items():
        if given is not None and given is not False:
            raise ValueError(f"{name} is given: tilewise's attention for diffusers takes no {name}")
    if attn_mask is not None and is_causal:
        raise ValueError("attn_mask and is_causal are given: only one of them may be")
    if not enable_gqa and query.shape[2] != key.shape[2]:
        raise ValueError(f"query has {query.shape[2]} heads, key {key.shape[2]}: enable_gqa=True is for that")
    if attn_mask is not None and attn_mask.shape == (query.shape[0], key.shape[1]):
        attn_mask = attn_mask[:, None, None, :]
    elif attn_mask is not None and attn_mask.dim() == 3:
        attn_mask = attn_mask[:, None]
    added = attn_mask is not None and attn_mask.is_floating_point()
    mask: Any = TOP_LEFT if is_causal else None if added else attn_mask
    q, k, v = query.transpose(1, 2), key.transpose(1, 2), value.transpose(1, 2)
    o, lse = attention(
        q, k, v, mask=mask, bias=attn_mask if added else None, scale=scale, dropout_p=dropout_p, return_lse=True
    )
    o = o.transpose(1, 2)
    return (o, lse.transpose(1, 2)) if return_lse else o
