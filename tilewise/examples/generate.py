"""Greedy generation by a transformers model whose past lives in our cache: the tokens are those of its own `generate`.

    python -m tilewise.examples.generate

The model is a small Llama of random weights, so that nothing is downloaded. Its attention is replaced by a function
that appends each layer's new keys to that layer's KVCache and attends to all of them. Prompts of unlike lengths are one
batch: the prefill says how many tokens of each row are real, and after that every sequence is at a position of its own.
Pages are reserved as sequences grow.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

import tilewise

NAME = "tilewise_cached"


def small_model(layers: int = 2, heads: int = 4, kv_heads: int = 2, vocabulary: int = 97, seed: int = 0) -> Any:
    """A Llama with random weights, in eval mode, attending eagerly."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(seed)
    options: dict[str, Any] = {
        "vocab_size": vocabulary, "hidden_size": 16 * heads, "intermediate_size": 96, "num_hidden_layers": layers,
        "num_attention_heads": heads, "num_key_value_heads": kv_heads, "max_position_embeddings": 256,
        "initializer_range": 0.3, "attn_implementation": "eager", "bos_token_id": None, "eos_token_id": None,
        "pad_token_id": 0,
    }  # fmt: skip
    config = LlamaConfig(**options)
    return LlamaForCausalLM(config).eval()


class Cached:
    """A model with a KVCache a layer, all in the pages of one pool."""

    def __init__(self, model: Any, sequences: int, max_len: int, page_size: int = 16):
        from transformers import AttentionInterface, AttentionMaskInterface

        config = model.config
        pages = sequences * -(-max_len // page_size)
        self.model = model
        self.pool = tilewise.PagePool(pages, page_size, sequences, max_len, model.device)
        dim = config.hidden_size // config.num_attention_heads
        self.caches = [
            tilewise.KVCache.paged(self.pool, config.num_key_value_heads, dim, dtype=model.dtype)
            for _ in range(config.num_hidden_layers)
        ]
        self.lens: Tensor | None = None  # of this step's new tokens
        AttentionInterface.register(NAME, self._attention)
        AttentionMaskInterface.register(NAME, lambda *args, **kwargs: None)  # what is seen is the cache's to say

    def _attention(
        self, module: Any, query: Tensor, key: Tensor, value: Tensor, attention_mask: Any, scaling: float, **_: Any
    ) -> tuple[Tensor, None]:
        cache = self.caches[module.layer_idx]
        o = tilewise.attention_cached(query, cache, k=key, v=value, scale=scaling, q_lens=self.lens)
        return o.transpose(1, 2).contiguous(), None

    def step(self, tokens: Tensor, positions: Tensor, lens: Tensor | None = None) -> Tensor:
        """Logits (B, n, vocabulary) of new tokens (B, n) at their positions, of which lens (B,) are real."""
        self.lens = lens
        before = self.model.config._attn_implementation
        self.model.set_attn_implementation(NAME)
        try:
            return self.model(input_ids=tokens, position_ids=positions, use_cache=False).logits
        finally:
            self.model.set_attn_implementation(before)


@torch.no_grad()
def generate(model: Any, prompts: list[list[int]], new_tokens: int, page_size: int = 16) -> list[list[int]]:
    """The likeliest next token, new_tokens times, after each of the prompts."""
    lengths = [len(prompt) for prompt in prompts]
    cached = Cached(model, len(prompts), max(lengths) + new_tokens, page_size)
    tokens = torch.zeros(len(prompts), max(lengths), dtype=torch.int64)
    for row, prompt in zip(tokens, prompts, strict=True):
        row[: len(prompt)] = torch.tensor(prompt)
    for sequence, length in enumerate(lengths):
        cached.pool.reserve(sequence, length)
    lens = torch.tensor(lengths, dtype=torch.int32)
    logits = cached.step(tokens, torch.arange(tokens.shape[1]).expand_as(tokens), lens)
    last = logits[torch.arange(len(prompts)), lens.long() - 1].argmax(-1)
    found = [last]
    for n in range(new_tokens - 1):
        for sequence, length in enumerate(lengths):
            cached.pool.reserve(sequence, length + n + 1)
        last = cached.step(last[:, None], lens.long()[:, None] + n)[:, -1].argmax(-1)
        found.append(last)
    return torch.stack(found, 1).tolist()


@torch.no_grad()
def generate_eagerly(model: Any, prompts: list[list[int]], new_tokens: int) -> list[list[int]]:
    """The same by the model's own attention and cache, one prompt at a time."""
    return [
        model.generate(
            torch.tensor([prompt]), attention_mask=torch.ones(1, len(prompt), dtype=torch.int64),
            max_new_tokens=new_tokens, do_sample=False,
        )[0, len(prompt) :].tolist()
        for prompt in prompts
    ]  # fmt: skip


def main() -> None:
    model = small_model()
    prompts = [[5, 17, 42], [8], list(range(1, 40))]
    ours, eager = generate(model, prompts, 24), generate_eagerly(model, prompts, 24)
    for prompt, tokens in zip(prompts, ours, strict=True):
        print(f"{len(prompt):3} tokens, then {' '.join(map(str, tokens))}")
    print("the model's own generate gives", "the same tokens" if ours == eager else f"others: {eager}")


if __name__ == "__main__":
    main()
