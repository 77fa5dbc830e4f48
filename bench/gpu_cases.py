"""What is measured on a GPU: cells, each with its peers and the goal beside each.

A cell's tensors take 16k tokens of hidden size 2048, 64 MiB each in bf16: more than the L2 cache holds. Operations are
counted as 4 d a visible pair and head forward and 2.5 times that backward; a causal mask is half of the pairs.
"""

from __future__ import annotations

import functools
import math
import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

import tilewise
from tilewise import Band, BlockMask, causal

from .rows import Row

SDPA_MASKED = "sdpa with its mask"
FLEX, FA2, CUDNN, EFFICIENT = "FlexAttention", "FlashAttention-2", "cuDNN", "memory-efficient"
OPERATIONS = {"forward": 4.0, "backward": 10.0, "forward + backward": 14.0}  # a pair, head and element of d
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}

Attend = Callable[..., Tensor]
Call = Callable[[], Any]
Prepare = Callable[[], Call]  # allocates, compiles, runs a forward whose backward is to be timed; returns what is timed


@dataclass(frozen=True)
class Setting:
    """Where and how large; the tests make it small."""

    device: str = "cuda"
    backend: str = "triton"
    tokens: int = 16384
    hidden: int = 2048

    @property
    def lengths(self) -> list[int]:
        return [self.tokens >> n for n in (5, 4, 3, 2, 1, 0)]  # 512 ... 16384

    def heads(self, d: int) -> int:
        return max(1, self.hidden // d)


@dataclass(frozen=True)
class Peer:
    """ratio = (factor * the peer's time + slack_ms) / ours."""

    name: str
    goal: str = ""
    factor: float = 1.0
    slack_ms: float = 0.0
    flops: float | None = None  # if not ours
    same_result: bool = True
    note: str = ""


def _same(t: Tensor) -> Tensor:
    return t


@dataclass(frozen=True)
class Built:
    """align: brings our result to the layout of the peers' results, to compare them."""

    ours: Prepare
    peers: dict[str, Prepare]
    align: Callable[[Tensor], Tensor] = _same


@dataclass(frozen=True)
class Cell:
    """kind: "speed" (of what `build` returns, beside `peers` and their goals), or one of timing.LIMITS, with `goal`."""

    row: Row  # what names it, and its note
    peers: tuple[Peer, ...] = ()
    flops: float = 0.0
    build: Callable[[], Built] | None = None
    kind: str = "speed"
    goal: str = ""
    compiled: bool = True  # worth a warm-up
    calls: int = 1  # of what is measured, in one that is timed: of a CUDA graph, say

    @property
    def name(self) -> str:
        return self.row.name


# --- the peers -----------------------------------------------------------------------------------------------------


def sdpa(backend: SDPBackend, is_causal: bool = False, bias: Tensor | None = None, dropout_p: float = 0.0) -> Attend:
    def attend(q: Tensor, k: Tensor, v: Tensor, *more: Tensor) -> Tensor:
        mask = more[0] if more else bias
        with sdpa_kernel(backend):
            return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, dropout_p=dropout_p, is_causal=is_causal)

    return attend


SDPA = {
    FA2: SDPBackend.FLASH_ATTENTION,
    CUDNN: SDPBackend.CUDNN_ATTENTION,
    EFFICIENT: SDPBackend.EFFICIENT_ATTENTION,
}


def by_pytorch(name: str, is_causal: bool = False, dropout_p: float = 0.0) -> Attend:
    """One of SDPA."""
    return sdpa(SDPA[name], is_causal, dropout_p=dropout_p)


def flex(device: str, seq: int, visible: Callable[..., Tensor] | None) -> Attend:
    """FlexAttention, compiled for this one shape, with the block mask of `visible` (b, h, i, j) or none.

    Dynamo forgets the shapes before: after its limit of recompilations it would run the unfused path, in silence.
    """
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    compiled = compile_flex(flex_attention)
    block_mask = None if visible is None else create_block_mask(visible, None, None, seq, seq, device=device)
    return lambda q, k, v: compiled(q, k, v, block_mask=block_mask)


def compile_flex(flex_attention: Attend) -> Attend:
    import torch._dynamo
    import torch._functorch.config

    torch._dynamo.reset()
    torch._dynamo.config.fail_on_recompile_limit_hit = True
    torch._functorch.config.donated_buffer = False  # a backward is timed again and again on one retained graph
    return torch.compile(flex_attention, dynamic=False)


def see_causal(b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
    return i >= j


# --- what is timed -------------------------------------------------------------------------------------------------


def timed(attend: Attend, inputs: list[Tensor], do: Tensor, direction: str) -> Call:
    """One call of the direction. Backward: of a graph that is kept, so alone."""
    if direction == "forward":
        return lambda: attend(*inputs)
    for t in inputs:
        t.requires_grad_()
    if direction == "forward + backward":
        return lambda: torch.autograd.grad(attend(*inputs), inputs, do)
    o = attend(*inputs)
    return lambda: torch.autograd.grad(o, inputs, do, retain_graph=True)


def draw(setting: Setting, *shape: int, dtype: str, count: int = 4) -> list[Tensor]:
    """q, k, v and dO."""
    torch.manual_seed(0)
    return [torch.randn(shape, device=setting.device, dtype=DTYPES[dtype]) for _ in range(count)]


def prepare(attend: Callable[[], Attend], tensors: list[Tensor], direction: str) -> Prepare:
    """tensors: the inputs, and dO last. Everybody gets leaves of their own over the same memory."""

    def ready() -> Call:
        *inputs, do = (t.detach() for t in tensors)
        return timed(attend(), inputs, do, direction)

    return ready


def compared(
    attend: Callable[[], Attend], attend_of: Callable[[Peer], Callable[[], Attend]], peers: tuple[Peer, ...],
    tensors: list[Tensor], direction: str,
) -> Built:  # fmt: skip
    """Ours and each of the peers, `attend_of` it, on the same tensors."""
    return Built(
        prepare(attend, tensors, direction),
        {peer.name: prepare(attend_of(peer), tensors, direction) for peer in peers},
    )


def ours(setting: Setting, **options: Any) -> Callable[[], Attend]:
    return lambda: functools.partial(tilewise.attention, backend=setting.backend, **options)


def pairs(mask: str, seq: int) -> float:
    """Visible pairs of a head of one sequence."""
    return seq * seq / (2 if mask == "causal" else 1)


# --- dense ---------------------------------------------------------------------------------------------------------


def dense(
    setting: Setting, subject: str, direction: str, dtype: str, d: int, mask: str, seq: int, *peers: Peer,
    attend_of: Callable[[Peer, bool], Attend] | None = None,
) -> Cell:  # fmt: skip
    """attend_of(peer, is_causal): for peers that are not of this file."""
    batch, heads = setting.tokens // seq, setting.heads(d)
    is_causal = mask == "causal"

    def build() -> Built:
        inputs = draw(setting, batch, heads, seq, d, dtype=dtype)

        def attend(peer: Peer) -> Callable[[], Attend]:
            if attend_of is not None:
                return lambda: attend_of(peer, is_causal)
            if peer.name == FLEX:
                return lambda: flex(setting.device, seq, see_causal if is_causal else None)
            return lambda: by_pytorch(peer.name, is_causal)

        return compared(ours(setting, mask=causal if is_causal else None), attend, peers, inputs, direction)

    flops = OPERATIONS[direction] * batch * heads * d * pairs(mask, seq)
    row = Row(subject, direction, dtype, d, mask, seq)
    return Cell(row, peers, flops, build)


def grid(setting: Setting, cudnn: bool) -> list[Cell]:
    """The grid of head sizes, lengths and masks."""
    cells = []
    extra = (Peer(CUDNN),) if cudnn else ()
    forward = (Peer(FLEX, ">= 1.08"), Peer(FA2, ">= 1.3"), *extra)
    backward = (Peer(FLEX, ">= 1.05"), Peer(FA2), *extra)
    large = (Peer(FA2, ">= 1.0"), *extra)
    for direction, peers in (("forward", forward), ("backward", backward)):
        for d in (64, 128, 256):
            for mask in ("full", "causal"):
                for seq in setting.lengths:
                    subject = direction if d < 256 else f"{direction} d256"
                    cells.append(
                        dense(setting, subject, direction, "bf16", d, mask, seq, *(peers if d < 256 else large))
                    )
    return cells


def fp32(setting: Setting) -> list[Cell]:
    return [
        dense(setting, "fp32", direction, "fp32", 64, mask, seq, Peer(EFFICIENT, ">= 1.5"))
        for direction in ("forward", "backward")
        for mask in ("full", "causal")
        for seq in setting.lengths[1::2]
    ]


# --- masks: what they save -----------------------------------------------------------------------------------------


def random_blocks(seq: int, share: float, device: str) -> BlockMask:
    """The same number of live tiles in every row of tiles, at random, one pattern for all heads."""
    n = seq // BlockMask.TILE
    order = torch.rand(n, n, generator=torch.Generator().manual_seed(0)).argsort(-1)
    return BlockMask.from_tiles((order < round(n * share)).to(device), seq, seq)


def window_share(seq: int, window: int) -> float:
    """The share of the 128 x 128 tiles that hold a visible pair, if each row sees itself and the window - 1 before."""
    tile = BlockMask.TILE
    n = seq // tile
    live = sum(row - max(0, row * tile - (window - 1)) // tile + 1 for row in range(n))
    return live / (n * n)


def saving(setting: Setting, direction: str, d: int, mask: str, share: float, visible: float) -> Cell:
    """Our own time with a mask against the share of our own time without one: `visible` pairs of a head."""
    seq, heads = setting.tokens, setting.heads(d)

    def build() -> Built:
        inputs = draw(setting, 1, heads, seq, d, dtype="bf16")

        def masked() -> Attend:
            if mask.startswith("window"):
                return ours(setting, mask=Band(seq // 16 - 1, 0))()
            return ours(setting, mask=random_blocks(seq, share, setting.device))()

        return Built(prepare(masked, inputs, direction), {"ours, full": prepare(ours(setting), inputs, direction)})

    operations = OPERATIONS[direction] * heads * d
    peer = Peer(
        "ours, full", ">= 1.0", factor=1.15 * share, slack_ms=0.01, flops=operations * seq * seq, same_result=False,
        note=f"ratio: (1.15 * {share:.4f} * full + 10 us) / ours",
    )  # fmt: skip
    return Cell(Row("mask saves", direction, "bf16", d, mask, seq), (peer,), operations * visible, build)


def savings(setting: Setting) -> list[Cell]:
    seq = setting.tokens
    window = seq // 16  # 1024 of 16384
    in_window = window * seq - window * (window - 1) / 2
    masks = [(f"window {window}", window_share(seq, window), in_window)]
    masks += [(f"blocks 1/{n}", 1 / n, seq * seq / n) for n in (4, 8)]
    return [
        saving(setting, direction, d, *mask)
        for direction in ("forward", "backward")
        for d in (64, 128)
        for mask in masks
    ]


# --- documents and packed batches ----------------------------------------------------------------------------------


def document_lengths(tokens: int, count: int) -> list[int]:
    """`count` positive lengths that add up to `tokens`, cut at random."""
    cuts = sorted(random.Random(0).sample(range(1, tokens), count - 1))
    return [b - a for a, b in zip([0, *cuts], [*cuts, tokens], strict=True)]


def cumulative(lengths: list[int], device: str) -> Tensor:
    return F.pad(torch.tensor(lengths).cumsum(0), (1, 0)).to(device=device, dtype=torch.int32)


def packed(setting: Setting, cu: Tensor, mask: Band | None) -> Callable[[], Attend]:
    return lambda: lambda q, k, v: tilewise.attention_packed(q, k, v, cu, mask=mask, backend=setting.backend)


def documents(setting: Setting, direction: str, d: int, form: str) -> Cell:
    """Causal attention within 16 documents, one after the other: as packed, or as a BlockMask."""
    lengths = document_lengths(setting.tokens, 16)
    seq, heads = setting.tokens, setting.heads(d)

    def build() -> Built:
        inputs = draw(setting, 1, heads, seq, d, dtype="bf16")
        document = torch.arange(len(lengths)).repeat_interleave(torch.tensor(lengths)).to(setting.device)

        def visible(b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
            return (document[i] == document[j]) & (i >= j)

        peers = {FLEX: prepare(lambda: flex(setting.device, seq, visible), inputs, direction)}
        if form == "documents, blocks":
            blocks = BlockMask.from_predicate(visible, seq, seq, device=setting.device)
            return Built(prepare(ours(setting, mask=blocks), inputs, direction), peers)
        tokens_first = [t[0].transpose(0, 1).contiguous() for t in inputs]
        attend = packed(setting, cumulative(lengths, setting.device), causal)
        return Built(prepare(attend, tokens_first, direction), peers, lambda t: t.transpose(0, 1)[None])

    flops = OPERATIONS[direction] * heads * d * sum(pairs("causal", n) for n in lengths)
    return Cell(Row("documents", direction, "bf16", d, form, seq), (Peer(FLEX, ">= 1.3"),), flops, build)


def mixture(setting: Setting) -> tuple[int, list[int]]:
    """(the greatest length that there may be, 64 lengths)."""
    longest = setting.tokens // 4
    draw_length = random.Random(0)
    return longest, [draw_length.randint(16, longest) for _ in range(64)]


def mixed_lengths(setting: Setting, direction: str, d: int, mask: str) -> Cell:
    """64 sequences of 16 to 4096 tokens, packed, beside a dense batch of 64 with nearly the same pairs."""
    longest, lengths = mixture(setting)
    heads = setting.heads(d)
    unit = min(128, longest)
    even = max(1, round(math.sqrt(sum(n * n for n in lengths) / 64) / unit)) * unit
    is_causal = causal if mask == "causal" else None

    def build() -> Built:
        tokens = draw(setting, sum(lengths), heads, d, dtype="bf16")
        attend = packed(setting, cumulative(lengths, setting.device), is_causal)

        def even_batch() -> Call:
            return prepare(ours(setting, mask=is_causal), draw(setting, 64, heads, even, d, dtype="bf16"), direction)()

        return Built(prepare(attend, tokens, direction), {"ours, dense": even_batch})

    operations = OPERATIONS[direction] * heads * d
    flops, theirs = operations * sum(pairs(mask, n) for n in lengths), operations * 64 * pairs(mask, even)
    peer = Peer(
        "ours, dense", ">= 0.9", factor=flops / theirs, flops=theirs, same_result=False,
        note=f"ratio of the rates; dense: 64 sequences of {even}",
    )  # fmt: skip
    return Cell(Row("mixed lengths", direction, "bf16", d, f"{mask}, packed", longest), (peer,), flops, build)


def padded(setting: Setting, d: int) -> Cell:
    """16 sequences of an encoder, 4096 tokens with their padding, half of that in the mean, beside a boolean mask."""
    longest, heads, direction = setting.tokens // 4, setting.heads(d), "forward + backward"
    lengths = [max(1, longest * (n + 1) // 16) for n in range(16)]
    random.Random(0).shuffle(lengths)

    def build() -> Built:
        inputs = draw(setting, 16, heads, longest, d, dtype="bf16")
        lens = torch.tensor(lengths, dtype=torch.int32, device=setting.device)
        seen = (torch.arange(longest, device=setting.device) < lens[:, None])[:, None, None]

        def masked() -> Attend:
            return lambda q, k, v: F.scaled_dot_product_attention(q, k, v, attn_mask=seen)

        def by_lengths() -> Attend:  # by the backend that dispatch chooses
            return functools.partial(tilewise.attention, q_lens=lens, k_lens=lens)

        return Built(prepare(by_lengths, inputs, direction), {SDPA_MASKED: prepare(masked, inputs, direction)})

    operations = OPERATIONS[direction] * heads * d * sum(n * n for n in lengths)
    peer = Peer(SDPA_MASKED, ">= 1.5", same_result=False, note="its rows of padding see keys, ours are 0")
    row = Row("padded batch", direction, "bf16", d, "lengths, half in the mean", longest)
    return Cell(row, (peer,), operations, build)


# --- bias, and what is not a speed ---------------------------------------------------------------------------------


def bias_with_gradient(setting: Setting) -> Cell:
    seq, heads, d = setting.tokens // 4, 16, 64
    direction = "forward + backward"

    def build() -> Built:
        q, k, v, do = draw(setting, 1, heads, seq, d, dtype="bf16")
        (bias,) = draw(setting, 1, heads, seq, seq, dtype="bf16", count=1)
        inputs = [q, k, v, bias, do]

        def attend(q: Tensor, k: Tensor, v: Tensor, bias: Tensor) -> Tensor:
            return tilewise.attention(q, k, v, bias=bias, backend=setting.backend)

        return Built(
            prepare(lambda: attend, inputs, direction),
            {EFFICIENT: prepare(lambda: by_pytorch(EFFICIENT), inputs, direction)},
        )

    flops = OPERATIONS[direction] * heads * d * pairs("full", seq)
    return Cell(
        Row("bias with gradient", direction, "bf16", d, "full", seq), (Peer(EFFICIENT, ">= 1.3"),), flops, build
    )


def limits(setting: Setting) -> list[Cell]:
    """Host time, memory and the first call: what we may take, whatever others do."""
    host = [("no_grad forward", "<= 30"), ("forward with grad", "<= 45"), ("forward + backward", "<= 220")]
    first = [("forward", "<= 3"), ("forward + backward", "<= 8")]
    cells = []
    for whose in ("", "hopper "):
        for name, goal in host:
            row = Row(f"{whose}host time", name, "bf16", 64, "full", 128, FA2, "us")
            cells.append(Cell(row, kind="host", goal=goal))
    memory = Row(
        "memory", "forward + backward", "bf16", 128, "full", 4 * setting.tokens, unit="x",
        note="of the bytes of q, k, v, o, dO, dQ, dK, dV",
    )  # fmt: skip
    cells.append(Cell(memory, kind="memory", goal="<= 1.1"))
    for whose in ("", "hopper "):
        for name, goal in first:
            row = Row(
                f"{whose}first call", name, "bf16", 128, "causal", 1024, unit="s",
                note="empty compile cache; Triton's import included",
            )  # fmt: skip
            cells.append(Cell(row, kind="first_call", goal=goal, compiled=False))
    return cells


def backend_of(row: Row) -> str:
    return "hopper" if row.subject.startswith("hopper") else "triton"


def cells(setting: Setting | None = None, cudnn: bool = False) -> list[Cell]:
    """All of them, in the order of measuring: the host's first, while the process has done nothing else."""
    from . import decode_cases, hopper_cases  # which are made of what this file has

    setting = setting or Setting()
    found = [*limits(setting), *grid(setting, cudnn), *hopper_cases.cells(setting), *fp32(setting), *savings(setting)]
    found += [
        documents(setting, direction, d, form)
        for direction in ("forward", "backward")
        for d in (64, 128)
        for form in ("documents, packed", "documents, blocks")
    ]
    found += [
        mixed_lengths(setting, direction, 128, mask)
        for direction in ("forward", "backward")
        for mask in ("full", "causal")
    ]
    found += [padded(setting, d) for d in (64, 128)]
    return [*found, bias_with_gradient(setting), *decode_cases.cells(setting)]
