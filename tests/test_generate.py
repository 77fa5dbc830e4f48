"""The example of generation: a model whose past is in our cache says what it says by itself."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("transformers")

from tilewise.examples.generate import Cached, generate, generate_eagerly, small_model


@pytest.mark.parametrize("page_size", [3, 16])
def test_the_tokens_are_those_of_the_model_itself(page_size: int) -> None:
    model = small_model()
    prompts = [[5, 17, 42], [8], list(range(1, 40))]
    eager = generate_eagerly(model, prompts, 12)
    assert len({tuple(tokens) for tokens in eager}) == 3
    assert len(set(eager[0])) > 3
    assert generate(model, prompts, 12, page_size) == eager


def test_logits() -> None:
    """Nothing but rounding lies between them, before the greatest is taken; and the keys of a padded row stay out."""
    model = small_model(seed=1)
    tokens = torch.randint(1, 97, (2, 20))
    with torch.no_grad():
        expected = model(tokens).logits
        cached = Cached(model, 2, 20, page_size=7)
        for sequence in range(2):
            cached.pool.reserve(sequence, 20)
        positions = torch.arange(20).expand(2, 20)
        first = cached.step(tokens[:, :12], positions[:, :12], torch.tensor([12, 5], dtype=torch.int32))
        assert cached.caches[1].lengths.tolist() == [12, 5]
        torch.testing.assert_close(first[0], expected[0, :12], rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(first[1, :5], expected[1, :5], rtol=1e-4, atol=1e-4)
        rest = torch.stack([tokens[0, 12:20], tokens[1, 5:13]])
        second = cached.step(rest, torch.stack([positions[0, 12:20], positions[1, 5:13]]))
    torch.testing.assert_close(second[0], expected[0, 12:], rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(second[1], expected[1, 5:13], rtol=1e-4, atol=1e-4)
