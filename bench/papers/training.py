"""End to end: training steps of transformers' models with its eager attention, its sdpa, and ours, interleaved.

Random weights and data, bf16 autocast, a fused AdamW; one model, whose attention function is exchanged between steps.
Dropout is as each model's configuration has it: 0.1 in GPT-2 and BERT, on the attention too.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ..gpu_cases import Built, Call, Cell, Peer
from ..rows import Row
from .case import Case, Kernel, Setting
from .registered import BUTTERFLY, EXACT, register

EAGER, SDPA = "eager", "sdpa"  # transformers' names
STEP = "training step"


@dataclass(frozen=True)
class Model:
    """family: "gpt2" (causal language modelling), "bert" (masked), or "encoder": a BERT that classifies whole
    sequences, as in the Long-Range Arena."""

    name: str
    family: str
    layers: int
    heads: int
    width: int
    dropout: float = 0.1
    vocab: int = 50257

    def tiny(self) -> Model:
        return Model(self.name, self.family, layers=2, heads=2, width=32, dropout=self.dropout, vocab=97)

    def make(self, seq: int) -> torch.nn.Module:
        if self.family == "gpt2":
            return _gpt2(self, seq)
        return _bert(self, seq)


GPT2_SMALL = Model("GPT-2 small", "gpt2", 12, 12, 768)
GPT2_MEDIUM = Model("GPT-2 medium", "gpt2", 24, 16, 1024)
BERT_LARGE = Model("BERT-large", "bert", 24, 16, 1024, vocab=30522)
# The arena's tasks have models of 2 to 6 layers, up to 8 heads and 512 columns, and bytes or pixels as tokens. Without
# dropout: of random data there is nothing to learn by heart.
ARENA = Model("Long-Range Arena encoder", "encoder", 4, 8, 512, dropout=0.0, vocab=256)


def gpt2_cases(setting: Setting) -> list[Case]:
    sdpa = Peer(SDPA, ">= 1.0")
    peers = {1024: (Peer(EAGER), sdpa), 8192: (sdpa,)}  # of 8192 and more, eager's matrices of scores do not fit
    longer = (Peer(EAGER, ">= 3"), Peer(SDPA))
    return [case(setting, GPT2_SMALL, 16384 // seq, seq, peers.get(seq, longer)) for seq in (1024, 4096, 8192, 16384)]


def other_cases(setting: Setting) -> list[Case]:
    found = [case(setting, BERT_LARGE, 32, 512)]
    for seq in (1024, 2048, 4096):
        found += [case(setting, ARENA, 32768 // seq, seq, mask=mask) for mask in ("full", "butterfly")]
    found.append(case(setting, ARENA, 1, 65536, mask="butterfly"))
    return [*found, case(setting, GPT2_MEDIUM, 16, 1024)]


def case(
    setting: Setting, model: Model, batch: int, seq: int, peers: tuple[Peer, ...] = (Peer(EAGER), Peer(SDPA)),
    mask: str = "full",
) -> Case:  # fmt: skip
    """mask: of ours; the peers have the model's own, causal or full."""
    peers = tuple(Peer(peer.name, peer.goal, same_result=False) for peer in peers)
    if model.family == "gpt2":
        mask = "causal"
    d = model.width // model.heads
    named = f"{mask}, dropout {model.dropout}" if model.dropout else mask
    row = Row(model.name, STEP, "bf16", d, named, seq)
    if setting.tiny:
        model, batch, seq = model.tiny(), 2, 128
    kernel = Kernel("bf16", seq, mask, model.dropout, model.width // model.heads)
    names = {"ours": BUTTERFLY if mask == "butterfly" else EXACT, **{peer.name: peer.name for peer in peers}}

    def build() -> Built:
        step = Step(model, batch, seq, setting.device)
        ready = {who: functools.partial(step.ready, name) for who, name in names.items()}
        return Built(ready.pop("ours"), ready)

    return Case(Cell(row, peers, 0.0, build), (kernel,), batch * seq)


class Step:
    """A model, its optimizer and one batch; a step by any attention function."""

    def __init__(self, model: Model, batch: int, seq: int, device: str) -> None:
        register()
        torch.manual_seed(0)
        self.device = torch.device(device)
        with self.device:
            self.model = model.make(seq).train()
            tokens = torch.randint(model.vocab, (batch, seq))
            self.inputs: dict[str, Any] = {"input_ids": tokens, "labels": tokens}
            if model.family == "encoder":
                self.inputs["labels"] = torch.randint(2, (batch,))
        if model.family == "gpt2":
            self.inputs["use_cache"] = False
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-5, fused=True)

    def ready(self, name: str) -> Call:
        return functools.partial(self.run, name)

    def run(self, name: str) -> Tensor:
        """Forward, backward, update; returns the loss. To name the function takes the host half a millisecond, within
        the sleep that goes before a timed call."""
        self.optimizer.zero_grad(set_to_none=True)
        loss = self.loss(name)
        loss.backward()
        self.optimizer.step()
        return loss.detach()

    def loss(self, name: str) -> Tensor:
        self.model.set_attn_implementation(name)  # type: ignore[operator]
        with torch.autocast(self.device.type, torch.bfloat16):
            return self.model(**self.inputs).loss


def _gpt2(model: Model, seq: int) -> torch.nn.Module:
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(
        n_layer=model.layers, n_head=model.heads, n_embd=model.width, n_positions=max(seq, 1024),
        vocab_size=model.vocab,        attn_pdrop=model.dropout, embd_pdrop=model.dropout, resid_pdrop=model.dropout,
        bos_token_id=0, eos_token_id=0,
    )  # fmt: skip
    return GPT2LMHeadModel(config)


def _bert(model: Model, seq: int) -> torch.nn.Module:
    from transformers import BertConfig, BertForMaskedLM, BertForSequenceClassification

    config = BertConfig(
        num_hidden_layers=model.layers, num_attention_heads=model.heads, hidden_size=model.width,
        intermediate_size=4 * model.width, max_position_embeddings=max(seq, 512), vocab_size=model.vocab,
        attention_probs_dropout_prob=model.dropout, hidden_dropout_prob=model.dropout, pad_token_id=None,
    )  # fmt: skip
    made: Callable[[Any], torch.nn.Module] = (
        BertForMaskedLM if model.family == "bert" else BertForSequenceClassification
    )
    return made(config)
