"""Figures 2 (right) and 3 of FlashAttention: time against the share of live tiles; time and memory against N."""

from __future__ import annotations

from collections.abc import Callable

from ..gpu_cases import (
    FA2,
    OPERATIONS,
    Attend,
    Built,
    Cell,
    Peer,
    by_pytorch,
    compared,
    draw,
    ours,
    pairs,
    prepare,
    random_blocks,
)
from ..rows import Row
from .attention import STANDARD, standard
from .case import DIRECTION, Case, Kernel, Setting, mask_of

BATCH, HEADS, D = 16, 8, 64  # the paper's (appendix E.6)
DTYPE = "bf16"
LENGTHS = tuple(2**n for n in range(7, 17))  # 128 ... 64k
LONG = 16384  # beyond it others are not timed: a call of PyTorch's FlashAttention-2 takes seconds
SPARSITY_SEQ = 4096
LIVE = (2, 4, 8, 16, 24)  # tiles of the 32 in a row
FULL = "ours, full"


def cases(setting: Setting) -> list[Case]:
    seqs = (128, 256) if setting.tiny else LENGTHS
    return [case for seq in seqs for case in (exact(setting, seq), butterfly(setting, seq))]


def sparsity_cases(setting: Setting) -> list[Case]:
    """Shares of the tiles of one length, the same number in each row of tiles, drawn at random."""
    seq = 512 if setting.tiny else SPARSITY_SEQ
    tiles = seq // 128
    return [sparse(setting, seq, live, tiles) for live in ((1, 3) if setting.tiny else LIVE)]


def sizes(setting: Setting) -> tuple[int, int]:
    return (1, 2) if setting.tiny else (BATCH, HEADS)


def exact(setting: Setting, seq: int) -> Case:
    batch, heads = sizes(setting)
    peers = (Peer(STANDARD), Peer(FA2)) if seq <= LONG else (Peer(STANDARD),)

    def attend_of(peer: Peer) -> Callable[[], Attend]:
        return lambda: standard() if peer.name == STANDARD else by_pytorch(peer.name)

    def build() -> Built:
        return compared(ours(setting), attend_of, peers, draw(setting, batch, heads, seq, D, dtype=DTYPE), DIRECTION)

    flops = OPERATIONS[DIRECTION] * batch * heads * D * pairs("full", seq)
    return Case(Cell(Row("lengths", DIRECTION, DTYPE, D, "full", seq), peers, flops, build), (Kernel(DTYPE, seq),))


def butterfly(setting: Setting, seq: int) -> Case:
    """Block-sparse; beside ourselves without a mask, and where that takes long, beside what does not fit."""
    batch, heads = sizes(setting)
    (peer,) = peers = (Peer(FULL if seq <= LONG else STANDARD, same_result=False),)

    def build() -> Built:
        tensors = draw(setting, batch, heads, seq, D, dtype=DTYPE)
        mask = mask_of("butterfly", seq, setting.device)
        other = ours(setting) if peer.name == FULL else standard
        return Built(
            prepare(ours(setting, mask=mask), tensors, DIRECTION), {peer.name: prepare(other, tensors, DIRECTION)}
        )

    row = Row("lengths", DIRECTION, DTYPE, D, "butterfly", seq)
    return Case(Cell(row, peers, 0.0, build), (Kernel(DTYPE, seq, "butterfly"),))


def sparse(setting: Setting, seq: int, live: int, tiles: int) -> Case:
    batch, heads = sizes(setting)
    share = live / tiles
    peer = Peer(
        FULL, ">= 1.0", factor=1.15 * share, slack_ms=0.01, same_result=False,
        note=f"ratio: (1.15 * {share:g} * full + 10 us) / ours",
    )  # fmt: skip

    def build() -> Built:
        tensors = draw(setting, batch, heads, seq, D, dtype=DTYPE)
        mask = random_blocks(seq, share, setting.device)
        return Built(
            prepare(ours(setting, mask=mask), tensors, DIRECTION), {FULL: prepare(ours(setting), tensors, DIRECTION)}
        )

    row = Row("sparsity", DIRECTION, DTYPE, D, f"blocks {live}/{tiles}", seq)
    flops = OPERATIONS[DIRECTION] * batch * heads * D * pairs("full", seq) * share
    return Case(Cell(row, (peer,), flops, build), (Kernel(DTYPE, seq), Kernel(DTYPE, seq, "butterfly")))
