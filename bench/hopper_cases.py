"""What is measured on Hopper: the backend "hopper" beside the fastest of others there, where they are installed."""

from __future__ import annotations

import functools
import importlib.util
from collections.abc import Callable
from dataclasses import dataclass, replace
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from tilewise import Band, causal

from .gpu_cases import (
    CUDNN,
    FA2,
    OPERATIONS,
    Attend,
    Built,
    Cell,
    Peer,
    Prepare,
    Setting,
    by_pytorch,
    compared,
    cumulative,
    dense,
    documents,
    draw,
    mixture,
    ours,
    packed,
    pairs,
    prepare,
)  # fmt: skip
from .rows import Row

FA3, FA4 = "FlashAttention-3", "FlashAttention-4"
TRITON = "ours, triton"
MODULES = {FA3: "fa3_fwd_interface", FA4: "flash_attn.cute"}  # of the wheels fa3-fwd and flash-attn-4


def cells(setting: Setting) -> list[Cell]:
    """Those that somebody is here to be compared with."""
    setting = replace(setting, backend="hopper") if setting.backend == "triton" else setting
    both = ("forward", "backward")
    found = [cell for direction in both for cell in grid(setting, direction)]
    found += [in_one_order(setting, d, mask) for d in (64, 128) for mask in ("full", "causal")]
    found += [form_cell(setting, direction, form) for direction in both for form in forms(setting)]
    found += [mixed(setting, direction, mask) for direction in both for mask in ("full", "causal")]
    found += [both_dtypes(setting, direction, d) for direction in both for d in (64, 128, 256)]
    found += [with_dropout(setting, "forward", d) for d in (64, 128, 256)]
    found += [with_dropout(setting, "backward", d) for d in (64, 128)]  # of wider heads it is Triton's
    found += [of_documents(setting, *what) for what in (("forward", ">= 1.5"), ("backward", ">= 1.3"))]
    return [cell for cell in found if cell.peers]


# --- the peers -----------------------------------------------------------------------------------------------------


def peers(direction: str, goal: str, cudnn: bool = True) -> tuple[Peer, ...]:
    """Those that have the direction and are here."""
    names = [name for name in MODULES if is_here(name) and (name == FA4 or direction == "forward")]
    return tuple(Peer(name, goal) for name in [*names, *([CUDNN] * cudnn)])


@functools.cache
def is_here(name: str) -> bool:
    try:
        return importlib.util.find_spec(MODULES[name]) is not None
    except ImportError:  # not even the package around it
        return False


def module(name: str) -> ModuleType:
    return importlib.import_module(MODULES[name])


def flash(name: str, **options: Any) -> Attend:
    """FlashAttention-3 or -4: (B, S, H, D), and what they return is o or (o, lse)."""
    flash_attn_func = module(name).flash_attn_func

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        o = flash_attn_func(*(x.transpose(1, 2) for x in (q, k, v)), **options)
        return (o[0] if isinstance(o, tuple) else o).transpose(1, 2)

    return attend


def flash_packed(name: str, cu: Tensor, longest: int, is_causal: bool) -> Attend:
    flash_attn_varlen_func = module(name).flash_attn_varlen_func
    of_lengths = {"cu_seqlens_q": cu, "cu_seqlens_k": cu, "max_seqlen_q": longest, "max_seqlen_k": longest}

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        o = flash_attn_varlen_func(q, k, v, **of_lengths, causal=is_causal)
        return o[0] if isinstance(o, tuple) else o

    return attend


# --- the grid ------------------------------------------------------------------------------------------------------


def grid(setting: Setting, direction: str) -> list[Cell]:
    goals = {"forward": (">= 0.96", ">= 0.96"), "backward": (">= 0.92", ">= 1.25")}[direction]  # d 64 and 128, d 256

    def attend_of(peer: Peer, is_causal: bool) -> Attend:
        return by_pytorch(CUDNN, is_causal) if peer.name == CUDNN else flash(peer.name, causal=is_causal)

    return [
        dense(
            setting, f"hopper {direction}", direction, "bf16", d, mask, seq, *peers(direction, goals[d == 256]),
            attend_of=attend_of,
        )
        for d in (64, 128, 256)
        for mask in ("full", "causal")
        for seq in setting.lengths
    ]  # fmt: skip


# --- beside ourselves ----------------------------------------------------------------------------------------------


def beside_ourselves(
    setting: Setting, subject: str, direction: str, dtype: str, d: int, mask: str, seq: int, peer: Peer, **options: Any
) -> Cell:
    """Ours in a dtype and with options beside ours in bf16 without."""
    batch, heads = setting.tokens // seq, setting.heads(d)
    band = causal if mask == "causal" else None

    def build() -> Built:
        def one(dtype: str, **options: Any) -> Prepare:
            inputs = draw(setting, batch, heads, seq, d, dtype=dtype)
            return prepare(ours(setting, mask=band, **options), inputs, direction)

        return Built(one(dtype, **options), {peer.name: one("bf16")})

    flops = OPERATIONS[direction] * batch * heads * d * pairs(mask, seq)
    return Cell(Row(subject, direction, dtype, d, mask, seq), (peer,), flops, build)


def in_one_order(setting: Setting, d: int, mask: str) -> Cell:
    """The deterministic backward beside our own other one."""
    return beside_ourselves(
        setting, "hopper deterministic", "backward", "bf16", d, mask, setting.tokens,
        Peer("ours, in any order", ">= 0.85"), deterministic=True,
    )  # fmt: skip


def both_dtypes(setting: Setting, direction: str, d: int) -> Cell:
    return beside_ourselves(
        setting, "hopper fp16", direction, "fp16", d, "causal", setting.tokens // 4,
        Peer("ours, bf16", ">= 0.97", same_result=False),
    )  # fmt: skip


def with_dropout(setting: Setting, direction: str, d: int) -> Cell:
    """A direction with dropout beside Triton's, whose bits it has, and beside who draws numbers of their own."""
    seq = setting.tokens // 4
    batch, heads, p = setting.tokens // seq, setting.heads(d), 0.1
    other = replace(setting, backend="triton") if setting.backend == "hopper" else setting  # the CPU has only one
    peers = (Peer(TRITON, ">= 1.0"), *(Peer(name, same_result=False) for name in (FA2, CUDNN)))

    def build() -> Built:
        inputs = draw(setting, batch, heads, seq, d, dtype="bf16")

        def attend_of(peer: Peer) -> Callable[[], Attend]:
            if peer.name == TRITON:
                return ours(other, mask=causal, dropout_p=p, seed=1)
            return lambda: by_pytorch(peer.name, True, dropout_p=p)

        return compared(ours(setting, mask=causal, dropout_p=p, seed=1), attend_of, peers, inputs, direction)

    flops = OPERATIONS[direction] * batch * heads * d * pairs("causal", seq)
    return Cell(Row("hopper dropout", direction, "bf16", d, "causal", seq), peers, flops, build)


# --- other forms ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Form:
    """A dense problem of `tokens`. visible: pairs of a head of a sequence."""

    name: str
    d: int
    v_dim: int
    heads: int
    kv_heads: int
    seq: int
    band: Band
    visible: float
    flash: dict[str, Any]  # the same in FlashAttention's words
    cudnn: bool = False  # by PyTorch's operator


def forms(setting: Setting) -> list[Form]:
    seq, heads = setting.tokens, setting.heads(128)
    window, many, few = seq // 16, 2 * heads, max(1, heads // 2)  # 1024, 32, 8
    in_window = (window + 1) * seq - window * (window + 1) / 2
    left = {"window_size": (window, 0)}
    found = [
        Form(f"window ({window}, 0)", 128, 128, heads, heads, seq, Band(window, 0), in_window, left),
        Form(
            f"causal, {many}/{few} heads", 128, 128, many, few, seq // 2, causal, pairs("causal", seq // 2),
            {"causal": True},
        ),
    ]  # fmt: skip
    seq = setting.tokens // 4
    for d, v_dim in ((96, 96), (192, 192), (192, 128)):
        name = "causal" if d == v_dim else f"causal, {d}/{v_dim}"
        heads = setting.heads(d)
        found.append(
            Form(
                name, d, v_dim, heads, heads, seq, causal, pairs("causal", seq), {"causal": True}, cudnn=d == v_dim,
            )
        )  # fmt: skip
    return found


def form_cell(setting: Setting, direction: str, form: Form) -> Cell:
    batch = max(1, setting.tokens // form.seq)

    def build() -> Built:
        torch.manual_seed(0)
        q, k, v, do = (
            torch.randn(batch, heads, form.seq, d, device=setting.device, dtype=torch.bfloat16)
            for heads, d in (
                (form.heads, form.d), (form.kv_heads, form.d), (form.kv_heads, form.v_dim), (form.heads, form.v_dim),
            )
        )  # fmt: skip
        inputs = [q, k, v, do]

        def attend_of(peer: Peer) -> Callable[[], Attend]:
            return lambda: by_pytorch(CUDNN, True) if peer.name == CUDNN else flash(peer.name, **form.flash)

        return compared(ours(setting, mask=form.band), attend_of, beside, inputs, direction)

    beside = peers(direction, ">= 0.95", cudnn=form.cudnn)
    of_pair = 2 * (form.d + form.v_dim) if direction == "forward" else 2 * (3 * form.d + 2 * form.v_dim)
    flops = of_pair * batch * form.heads * form.visible
    return Cell(Row("hopper forms", direction, "bf16", form.d, form.name, form.seq), beside, flops, build)


def mixed(setting: Setting, direction: str, mask: str) -> Cell:
    """64 packed sequences of 16 to 4096 tokens."""
    d = 128
    longest, lengths = mixture(setting)
    heads = setting.heads(d)

    def build() -> Built:
        inputs = draw(setting, sum(lengths), heads, d, dtype="bf16")
        cu = cumulative(lengths, setting.device)

        def attend_of(peer: Peer) -> Callable[[], Attend]:
            return lambda: flash_packed(peer.name, cu, max(lengths), mask == "causal")

        band = causal if mask == "causal" else None
        return compared(packed(setting, cu, band), attend_of, beside, inputs, direction)

    beside = peers(direction, ">= 0.95", cudnn=False)
    flops = OPERATIONS[direction] * heads * d * sum(pairs(mask, n) for n in lengths)
    return Cell(Row("hopper forms", direction, "bf16", d, f"{mask}, packed", longest), beside, flops, build)


def of_documents(setting: Setting, direction: str, goal: str) -> Cell:
    cell = documents(setting, direction, 128, "documents, blocks")
    row = replace(cell.row, subject="hopper forms")
    return replace(cell, row=row, peers=tuple(replace(peer, goal=goal) for peer in cell.peers))
