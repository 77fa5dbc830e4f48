"""A small character-level GPT. Its attention function is an argument, and nothing else in the model changes with it.

The model is the usual decoder (Radford et al. 2019; rotary positions from Su et al. 2021, RMSNorm from Zhang and
Sennrich 2019), small enough that a laptop teaches it the letters, words and verses of Genesis in half a minute::

    x = embed(tokens)                                  (B, S, width)
    for each layer:  x = x + attention(norm(x));  x = x + mlp(norm(x))
    logits = head(norm(x))                             (B, S, vocab)

An attention function here takes q, k, v of shape (B, H, S, D) and returns o of that shape; it is causal. Two of them:
`standard_attention` below, and `lambda q, k, v: tilewise.attention(q, k, v, mask=tilewise.causal)`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from importlib import resources

import torch
import torch.nn.functional as F
from torch import Tensor, nn

AttentionFunction = Callable[[Tensor, Tensor, Tensor], Tensor]


def standard_attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Causal softmax(q k^T / sqrt(d)) v, written out: S and P exist in memory, (B, H, S, S) elements each.

    >>> q = k = v = torch.eye(2).reshape(1, 1, 2, 2)
    >>> standard_attention(q, k, v)[0, 0, 0]        # the first row sees only the first key
    tensor([1., 0.])
    """
    S = q @ k.transpose(-1, -2) / math.sqrt(q.shape[-1])
    future = torch.ones(S.shape[-2:], dtype=torch.bool, device=S.device).triu(1)
    P = torch.softmax(S.masked_fill(future, -math.inf), dim=-1)
    return P @ v


@dataclass(frozen=True)
class Size:
    """The model's size, and how it is trained."""

    context: int = 256
    layers: int = 2
    heads: int = 3
    width: int = 96
    batch: int = 3
    learning_rate: float = 6e-3
    warmup: int = 20


def rms_norm(x: Tensor) -> Tensor:
    return F.rms_norm(x, (x.shape[-1],))


def rotary(x: Tensor) -> Tensor:
    """Turn each pair of coordinates of x (B, H, S, D) by an angle that grows with the position."""
    length, half = x.shape[-2], x.shape[-1] // 2
    frequency = 10_000 ** -(torch.arange(half, device=x.device) / half)
    angle = torch.arange(length, device=x.device)[:, None] * frequency
    cos, sin = angle.cos(), angle.sin()
    a, b = x[..., :half], x[..., half:]
    return torch.cat((a * cos - b * sin, a * sin + b * cos), dim=-1)


class Attention(nn.Module):
    def __init__(self, size: Size, attend: AttentionFunction):
        super().__init__()
        self.heads, self.attend = size.heads, attend
        self.qkv = nn.Linear(size.width, 3 * size.width, bias=False)
        self.out = nn.Linear(size.width, size.width, bias=False)
        nn.init.zeros_(self.out.weight)  # each layer starts as the identity

    def forward(self, x: Tensor) -> Tensor:
        B, S, width = x.shape
        q, k, v = self.qkv(x).view(B, S, 3, self.heads, width // self.heads).permute(2, 0, 3, 1, 4)  # (B, H, S, D) each
        o = self.attend(rotary(rms_norm(q)), rotary(rms_norm(k)), v)
        return self.out(o.transpose(1, 2).reshape(B, S, width))


class Block(nn.Module):
    def __init__(self, size: Size, attend: AttentionFunction):
        super().__init__()
        self.attention = Attention(size, attend)
        self.up = nn.Linear(size.width, 4 * size.width, bias=False)
        self.down = nn.Linear(4 * size.width, size.width, bias=False)
        nn.init.zeros_(self.down.weight)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(rms_norm(x))
        return x + self.down(F.relu(self.up(rms_norm(x))).square())


class GPT(nn.Module):
    """tokens (B, S) int64 -> logits (B, S, vocab)."""

    def __init__(self, vocab: int, size: Size, attend: AttentionFunction):
        super().__init__()
        self.embed = nn.Embedding(vocab, size.width)
        self.blocks = nn.Sequential(*(Block(size, attend) for _ in range(size.layers)))
        self.head = nn.Linear(size.width, vocab, bias=False)
        nn.init.zeros_(self.head.weight)  # the first loss is log(vocab): no character is preferred yet

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(rms_norm(self.blocks(self.embed(tokens))))


class Adam:
    """Adam (Kingma and Ba 2015), written out: `torch.optim` would load torch's compiler first, which takes seconds.

    m, v: running means of the gradient g and of g^2; a step is rate * m / (sqrt(v) + eps), both corrected for having
    begun at 0.
    """

    def __init__(self, parameters: Iterable[Tensor], beta_1: float = 0.9, beta_2: float = 0.95, eps: float = 1e-8):
        self.parameters = list(parameters)
        self.m = [torch.zeros_like(p) for p in self.parameters]
        self.v = [torch.zeros_like(p) for p in self.parameters]
        self.beta_1, self.beta_2, self.eps, self.t = beta_1, beta_2, eps, 0

    @torch.no_grad()
    def step(self, gradients: Iterable[Tensor], rate: float) -> None:
        self.t += 1
        for p, g, m, v in zip(self.parameters, gradients, self.m, self.v, strict=True):
            m.lerp_(g, 1 - self.beta_1)
            v.lerp_(g * g, 1 - self.beta_2)
            m_hat, v_hat = m / (1 - self.beta_1**self.t), v / (1 - self.beta_2**self.t)
            p -= rate * m_hat / (v_hat.sqrt() + self.eps)


def load_text() -> str:
    """Genesis 1 to 24 in the King James Version, one verse a line (see README.md beside it).

    >>> load_text().splitlines()[0]
    'In the beginning God created the heaven and the earth.'
    """
    return (resources.files(__package__) / "genesis.txt").read_text(encoding="ascii")


def encode(text: str) -> tuple[Tensor, str]:
    """The text as int64 tokens, and the alphabet: token t is the character alphabet[t].

    >>> encode("abba")
    (tensor([0, 1, 1, 0]), 'ab')
    """
    alphabet = "".join(sorted(set(text)))
    number = {c: t for t, c in enumerate(alphabet)}
    return torch.tensor([number[c] for c in text]), alphabet


def batches(tokens: Tensor, size: Size, seed: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Random windows of the text for ever: (input, target), both (batch, context), the target one character later."""
    draw = torch.Generator().manual_seed(seed)
    while True:
        start = torch.randint(len(tokens) - size.context, (size.batch, 1), generator=draw)
        window = start + torch.arange(size.context + 1)
        chunk = tokens[window]
        yield chunk[:, :-1].contiguous(), chunk[:, 1:].contiguous()


def train(attend: AttentionFunction, steps: int, size: Size, seed: int = 0, device: str = "cpu") -> Iterator[float]:
    """Train a fresh model with this attention function; yields the loss of each step in nats per character.

    Weights and batches depend on the seed alone, so two runs differ only by what their attention functions compute.

    >>> losses = list(train(standard_attention, 2, Size(context=8, layers=1, heads=1, width=8, batch=2)))
    >>> round(losses[0], 3)                          # log(60): nothing is known yet, and the text has 60 characters
    4.094
    """
    tokens, alphabet = encode(load_text())
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = GPT(len(alphabet), size, attend)
    model.to(device)
    adam = Adam(model.parameters())
    for step, (x, target) in zip(range(steps), batches(tokens, size, seed), strict=False):
        logits = model(x.to(device))
        loss = F.cross_entropy(logits.flatten(0, 1), target.to(device).flatten())
        warm, left = min(1.0, (step + 1) / size.warmup), 1 - step / steps
        adam.step(torch.autograd.grad(loss, adam.parameters), size.learning_rate * min(warm, left))
        yield loss.item()
