"""Train GPT-2 on a text, its bytes as tokens: on a CPU, on one GPU, or on many that share each sequence.

    python examples/train_gpt2.py                                                     # Genesis, a small model
    python examples/train_gpt2.py --text book.txt --size small --context 8192         # 124 million parameters
    torchrun --nproc-per-node 8 examples/train_gpt2.py --ring 2 --ulysses 2 --context 65536 --size small

Of the ranks `ring * ulysses` have a part each of the same sequences (`tilewise.parallel`), and as many groups as
are left have sequences of their own; parameters, gradients and optimizer are sharded over all ranks (FSDP2). What a
step reads and drops follows from the seed, the step and the group alone, so that a run that was interrupted goes on
(`--resume`) as if it had not been, on more or fewer GPUs too, if there are as many groups.

Source: Radford et al., "Language Models are Unsupervised Multitask Learners", 2019.
"""

from __future__ import annotations

import argparse
import math
import os
import sys
import time
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as checkpoint
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard

import tilewise
from tilewise.examples.char_gpt import load_text
from tilewise.parallel import ContextParallel

BYTES = 256
SIZES = {"tiny": (4, 4, 128), "small": (12, 12, 768), "medium": (24, 16, 1024), "large": (36, 20, 1280)}


class Block(nn.Module):
    def __init__(self, width: int, heads: int, dropout: float, over: ContextParallel | None):
        super().__init__()
        self.heads, self.dropout = heads, dropout
        self.attend = tilewise.attention if over is None else over.attention
        self.ln_1, self.ln_2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.proj = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(self.ln_1(x)).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)  # (B, H, S, D) each
        o = self.attend(q, k, v, mask=tilewise.causal, dropout_p=self.dropout if self.training else 0.0)
        x = x + self.proj(o.transpose(1, 2).flatten(2))
        return x + self.down(F.gelu(self.up(self.ln_2(x)), approximate="tanh"))


class GPT2(nn.Module):
    """tokens (B, S) and their positions (S,) -> logits (B, S, 256). S is this rank's part of the sequence."""

    def __init__(self, size: str, context: int, dropout: float, over: ContextParallel | None):
        super().__init__()
        layers, heads, width = SIZES[size]
        self.token, self.position = nn.Embedding(BYTES, width), nn.Embedding(context, width)
        self.blocks = nn.ModuleList(Block(width, heads, dropout, over) for _ in range(layers))
        self.ln = nn.LayerNorm(width)
        self.head = nn.Linear(width, BYTES, bias=False)
        for name, p in self.named_parameters():
            if p.dim() > 1:  # what is added to the residual stream begins smaller, the more layers there are
                nn.init.normal_(p, std=0.02 / math.sqrt(2 * layers) if "proj" in name or "down" in name else 0.02)
            elif "bias" in name:
                nn.init.zeros_(p)

    def forward(self, tokens: Tensor, positions: Tensor) -> Tensor:
        x = self.token(tokens) + self.position(positions)
        for block in self.blocks:
            x = block(x)
        return self.head(self.ln(x))


# --- ranks ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Ranks:
    """Where this process stands. mesh: (data, ring, ulysses), None if it is alone."""

    device: torch.device
    mesh: DeviceMesh | None

    @classmethod
    def start(cls, ring: int, ulysses: int) -> Ranks:
        """Under torchrun a process group, else none."""
        kind = "cuda" if torch.cuda.is_available() else "cpu"
        world = int(os.environ.get("WORLD_SIZE", 1))
        if world % (ring * ulysses):
            raise SystemExit(f"--ring {ring} --ulysses {ulysses}: their product must divide the {world} processes")
        if world == 1:
            return cls(torch.device(kind), None)
        device = torch.device(kind, int(os.environ["LOCAL_RANK"])) if kind == "cuda" else torch.device("cpu")
        if kind == "cuda":
            torch.cuda.set_device(device)
        dist.init_process_group("nccl" if kind == "cuda" else "gloo")
        shape = (world // (ring * ulysses), ring, ulysses)
        return cls(device, init_device_mesh(kind, shape, mesh_dim_names=("data", "ring", "ulysses")))

    @property
    def first(self) -> bool:
        return self.mesh is None or dist.get_rank() == 0

    def context_parallel(self) -> ContextParallel | None:
        if self.mesh is None:
            return None
        groups = {name: self.mesh[name] for name in ("ring", "ulysses") if self.mesh[name].size() > 1}
        return ContextParallel(**groups) if groups else None

    def shard(self, model: GPT2) -> None:
        """FSDP2 over all ranks: the gradients' mean is that over all tokens."""
        if self.mesh is None:
            return
        everyone = init_device_mesh(self.device.type, (dist.get_world_size(),))
        for block in model.blocks:
            fully_shard(block, mesh=everyone)
        fully_shard(model, mesh=everyone)

    def mean(self, x: Tensor) -> float:
        x = x.detach().clone()
        if self.mesh is not None:
            dist.all_reduce(x)
            x /= dist.get_world_size()
        return x.item()


def seed_of(args: argparse.Namespace, step: int, data: int) -> int:
    return (args.seed << 40) + (step << 16) + data


def batch(text: Tensor, args: argparse.Namespace, step: int, data: int) -> tuple[Tensor, Tensor]:
    """(tokens, the next ones), (B, context) each: windows of the text."""
    draw = torch.Generator().manual_seed(seed_of(args, step, data))
    start = torch.randint(len(text) - args.context, (args.batch, 1), generator=draw)
    window = text[start + torch.arange(args.context + 1)]
    return window[:, :-1], window[:, 1:]


# --- checkpoints ---------------------------------------------------------------------------------------------------


def save(folder: Path, step: int, model: GPT2, adam: torch.optim.Optimizer, ranks: Ranks) -> None:
    """All ranks write their parts; `latest` names a checkpoint once it is whole."""
    weights, moments = get_state_dict(model, adam)
    checkpoint.save(
        {"model": weights, "adam": moments}, checkpoint_id=folder / f"step_{step}", no_dist=ranks.mesh is None
    )
    if ranks.first:
        (folder / "latest.new").write_text(str(step))
        os.replace(folder / "latest.new", folder / "latest")


def load(folder: Path, model: GPT2, adam: torch.optim.Optimizer, ranks: Ranks) -> int:
    """The step to go on with. The number of ranks may be another than it was."""
    if not (folder / "latest").exists():
        raise SystemExit(f"--resume: there is no checkpoint in {folder}")
    step = int((folder / "latest").read_text())
    weights, moments = get_state_dict(model, adam)
    state: dict[str, Any] = {"model": weights, "adam": moments}
    checkpoint.load(state, checkpoint_id=folder / f"step_{step}", no_dist=ranks.mesh is None)
    set_state_dict(model, adam, model_state_dict=state["model"], optim_state_dict=state["adam"])
    return step


# --- training ------------------------------------------------------------------------------------------------------


def rate(step: int, args: argparse.Namespace) -> float:
    """Linear warm-up, then a cosine down to a tenth."""
    if step < args.warmup:
        return args.rate * (step + 1) / args.warmup
    left = (step - args.warmup) / max(args.steps - args.warmup, 1)
    return args.rate * (0.55 + 0.45 * math.cos(math.pi * min(left, 1.0)))


def show(step: int, args: argparse.Namespace, loss: float, tokens_a_second: float) -> None:
    """A bar that stays on its line on a terminal, and a line every so often elsewhere."""
    there, width = sys.stderr.isatty(), 30
    if not (there or step % max(args.steps // 10, 1) == 0 or step == args.steps):
        return
    done = width * step // args.steps
    text = f"[{'#' * done}{'.' * (width - done)}] {step}/{args.steps}  loss {loss:.4f}  {tokens_a_second:,.0f} tokens/s"
    print(f"\r{text}" if there else text, end="" if there and step < args.steps else "\n", file=sys.stderr, flush=True)


def train(args: argparse.Namespace) -> list[float]:
    """The loss of each step that was done, in nats per byte."""
    ranks = Ranks.start(args.ring, args.ulysses)
    raw = Path(args.text).read_bytes() if args.text else load_text().encode()
    text = torch.frombuffer(bytearray(raw), dtype=torch.uint8).long()
    if len(text) <= args.context:
        raise SystemExit(f"the text has {len(text)} bytes: it must have more than --context {args.context}")
    torch.manual_seed(args.seed)
    over = ranks.context_parallel()
    model = GPT2(args.size, args.context, args.dropout, over).to(ranks.device)
    ranks.shard(model)
    adam = torch.optim.AdamW(model.parameters(), betas=(0.9, 0.95), weight_decay=0.1)
    first = load(Path(args.out), model, adam, ranks) if args.resume else 0
    positions = torch.arange(args.context) if over is None else over.positions(args.context)
    positions = positions.to(ranks.device)
    data = 0 if ranks.mesh is None else ranks.mesh["data"].get_local_rank()
    groups = 1 if ranks.mesh is None else ranks.mesh["data"].size()
    autocast = torch.autocast("cuda", torch.bfloat16) if ranks.device.type == "cuda" else nullcontext()
    losses = []
    for step in range(first, args.steps):
        began = time.perf_counter()
        tokens, target = (x if over is None else over.shard(x, 1) for x in batch(text, args, step, data))
        torch.manual_seed(seed_of(args, step, data))  # of the dropout
        with autocast:
            logits = model(tokens.to(ranks.device), positions)
            loss = F.cross_entropy(logits.flatten(0, 1).float(), target.to(ranks.device).flatten())
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for group in adam.param_groups:
            group["lr"] = rate(step, args)
        adam.step()
        adam.zero_grad()
        losses.append(ranks.mean(loss))
        if ranks.first:
            seconds = time.perf_counter() - began
            show(step + 1, args, losses[-1], args.batch * groups * args.context / seconds)
        if (step + 1) % args.save_every == 0 or step + 1 == args.steps:
            save(Path(args.out), step + 1, model, adam, ranks)
    if ranks.mesh is not None:
        dist.destroy_process_group()
    return losses


def main(argv: list[str] | None = None) -> list[float]:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--text", default="", help="a file; by default Genesis in the King James Version")
    parser.add_argument("--out", default="build/gpt2", help="the folder of checkpoints")
    parser.add_argument("--resume", action="store_true", help="go on with the latest checkpoint in --out")
    parser.add_argument("--size", choices=SIZES, default="tiny", help="layers, heads, width: " + str(SIZES))
    parser.add_argument("--context", type=int, default=256, help="tokens of a sequence, on all ranks together")
    parser.add_argument("--batch", type=int, default=4, help="sequences a step, in each group of ranks")
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--rate", type=float, default=2e-3, help="the learning rate after the warm-up")
    parser.add_argument("--warmup", type=int, default=20, help="steps")
    parser.add_argument("--dropout", type=float, default=0.0, help="of attention")
    parser.add_argument("--save-every", type=int, default=100, help="steps")
    parser.add_argument("--ring", type=int, default=1, help="ranks that share a sequence by ring attention")
    parser.add_argument("--ulysses", type=int, default=1, help="ranks that share one by all-to-all over heads")
    parser.add_argument("--seed", type=int, default=0)
    return train(parser.parse_args(argv))


if __name__ == "__main__":
    main()
