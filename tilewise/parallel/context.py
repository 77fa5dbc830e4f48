"""`ContextParallel`: one sequence over many devices. Who holds which tokens, and attention over all of them."""

from __future__ import annotations

import zlib
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.utils.weak import WeakTensorKeyDictionary

from ..api import _autocast, _autocasts
from ..autograd import attend
from ..block_mask import BlockMask
from ..mask import Band, Masked
from ..problem import Problem, split_mask
from . import ring
from .agree import Agreement, Words, agreement
from .order import LAYOUTS, Chunk, chunks
from .plan import ALIGN, Whole
from .ulysses import by_heads, by_rows, check_heads

Group = Any  # dist.ProcessGroup | DeviceMesh | None; of an object made, the first or None


@dataclass(frozen=True, slots=True)
class ContextParallel:
    """Attention over sequences that are spread over the ranks of one or two process groups.

    Args:
        ring: a ProcessGroup or a DeviceMesh of one dimension. Each rank keeps its rows; keys and values pass by
            while the device computes. Any number of heads.
        ulysses: likewise. All-to-all: each rank computes a part of the heads over all rows. Query heads must be a
            multiple of its size, key/value heads a multiple or a divisor. Needs a fast network, and no other condition.
            With both, of a mesh of two dimensions (ring, ulysses), sequences are cut over `ring`, and each part is cut
            again over `ulysses`: ulysses inside a host, ring between hosts.
        layout: over `ring`. "zigzag": two chunks a rank, an early one and a late one, equal work under a causal mask;
            "contiguous": one, for windows and full masks.
        head_groups: in how many parts a ring works on its heads, by default what the sizes suggest: more parts take
            less memory, and hide more of what is sent.

    Tensors are local shards: what `shard` gives of a sequence of `length` tokens, a multiple of the number of ranks (of
    twice that in zig-zag; fill up at the end). All ranks must make the same calls, forward and backward, in one order,
    with the same options. Gradients are those of one device: of q, k and v the shard's; of `alibi_slopes` and `sink`,
    like those of any parameter under data parallelism, the share of this rank, to be summed over ranks. FSDP2 and DDP
    over the same ranks do that.

    Raises:
        ValueError, TypeError: bad arguments, and arguments that differ between ranks: on every rank, by name.
        RuntimeError: a rank that does not come, or is gone, by name, within the group's time-out. A rank that dies
            while others are inside an exchange of NCCL is found by NCCL's own watchdog, or by name at the next call.

    Source: Ring Attention (Liu et al., 2023); DeepSpeed Ulysses (Jacobs et al., 2023); the zig-zag order is that of the
    training of Llama 3 (2024, section 3.3.2).

    >>> import torch, tilewise
    >>> import torch.distributed as dist
    >>> from tilewise.parallel import ContextParallel
    >>> dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)     # under torchrun: ("nccl")
    >>> over = ContextParallel(ring=dist.group.WORLD)
    >>> tokens = torch.randn(1, 128, 64)                                                  # the same on every rank
    >>> x = over.shard(tokens, dim=1)                                                     # this rank's
    >>> q = k = v = x.unflatten(-1, (4, 16)).transpose(1, 2)
    >>> o = over.attention(q, k, v, mask=tilewise.causal)
    >>> torch.equal(over.unshard(o, dim=2)[:, :, over.positions(128)], o)
    True
    >>> dist.destroy_process_group()
    """

    ring: Group = None
    ulysses: Group = None
    layout: str = "zigzag"
    head_groups: int | None = None

    def __post_init__(self) -> None:
        for name in ("ring", "ulysses"):
            group = getattr(self, name)
            if isinstance(group, DeviceMesh):
                if group.ndim != 1:
                    raise ValueError(
                        f"{name} is a DeviceMesh of {group.ndim} dimensions: it must have 1 (mesh['name'])"
                    )
                object.__setattr__(self, name, group.get_group())
            elif not (group is None or isinstance(group, dist.ProcessGroup)):
                raise TypeError(f"{name} is {type(group).__name__}: it must be a ProcessGroup, a DeviceMesh or None")
        if self.ring is None and self.ulysses is None:
            raise ValueError("ring and ulysses are None: one of them must be given")
        if self.layout not in LAYOUTS:
            raise ValueError(f"layout is {self.layout!r}: it must be one of {', '.join(map(repr, LAYOUTS))}")
        if self.head_groups is not None and not (isinstance(self.head_groups, int) and self.head_groups > 0):
            raise ValueError(f"head_groups is {self.head_groups!r}: it must be a positive int or None")

    # ---- tokens --------------------------------------------------------------------------------------------------

    @property
    def size(self) -> int:
        """How many ranks share a sequence."""
        return _size(self.ring) * _size(self.ulysses)

    def positions(self, length: int, device: torch.device | str | None = None) -> Tensor:
        """int64 (length / size,): where this rank's tokens stand in the sequence. For rotary embeddings, say."""
        return torch.cat([torch.arange(a, b, device=device) for a, b in self._runs(length, _rank(self.ring))])

    def shard(self, x: Tensor, dim: int) -> Tensor:
        """This rank's part of a tensor that each rank has whole, along its dimension of tokens. Differentiable.

        Labels that are the next token are moved first: shard(tokens[:, :-1], 1) and shard(tokens[:, 1:], 1).
        """
        return torch.cat([x.narrow(dim, a, b - a) for a, b in self._runs(x.shape[dim], _rank(self.ring))], dim)

    def unshard(self, x: Tensor, dim: int) -> Tensor:
        """The whole of which each rank has the part x, in the order of tokens, on every rank. Not differentiable."""
        parts = [x.detach()]
        for group in (self.ulysses, self.ring):
            if group is not None:
                whole = torch.cat(parts, dim).contiguous()
                parts = [torch.empty_like(whole) for _ in range(_size(group))]
                dist.all_gather(parts, whole, group=group)
        length = sum(part.shape[dim] for part in parts)
        of_ring = replace(self, ulysses=None) if self.ring is not None else None
        if of_ring is None:
            return torch.cat(parts, dim)
        runs = {}
        for rank, part in enumerate(parts):
            at = 0
            for a, b in of_ring._runs(length, rank):
                runs[a] = part.narrow(dim, at, b - a)
                at += b - a
        return torch.cat([runs[a] for a in sorted(runs)], dim)

    def _runs(self, length: int, ring_rank: int) -> list[tuple[int, int]]:
        """The tokens [first, last) of this rank's shard, in its order."""
        held = chunks(length, _size(self.ring), ring_rank, self.layout)
        rows = sum(chunk.size for chunk in held)
        if rows % _size(self.ulysses):
            raise ValueError(
                f"the sequence has {length} tokens: over {self.size} ranks it must be a multiple of {self.size}"
            )
        rows //= _size(self.ulysses)
        lo = _rank(self.ulysses) * rows
        return [run for chunk in held if (run := _within(chunk, lo, lo + rows))] or [(0, 0)]

    # ---- attention -----------------------------------------------------------------------------------------------

    @torch.compiler.disable
    def attention(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        *,
        mask: Band | BlockMask | Masked | None = None,
        alibi_slopes: Tensor | None = None,
        sink: Tensor | None = None,
        scale: float | None = None,
        softcap: float = 0.0,
        dropout_p: float = 0.0,
        seed: int | Tensor | None = None,
        lens: Tensor | None = None,
        return_lse: bool = False,
        deterministic: bool | None = None,
        backend: str | None = None,
    ) -> Any:
        """`tilewise.attention` of the whole sequences, of which q, k and v are this rank's shards.

        Args:
            q: (B, Hq, S, D), S = length / size. k: (B, Hkv, S, D). v: (B, Hkv, S, Dv).
            mask: a Band; a BlockMask of the whole (chunks must then be multiples of 128 tokens), on each rank; or both.
            lens: int32 (B,), how many tokens of each whole sequence are in use (queries and keys alike).
            seed: of the dropout. By default the group's first rank draws it, on the host. The pairs that are dropped
                are those that one device drops.
            The others are those of `tilewise.attention`. There is no bias and no boolean mask.

        Returns:
            o (B, Hq, S, Dv), and with return_lse lse (B, Hq, S): the shards of what one device returns.
        """
        return self._attention(
            False, q, k, v, None, mask, alibi_slopes, sink, scale, softcap, dropout_p, seed, lens, return_lse,
            deterministic, backend,
        )  # fmt: skip

    @torch.compiler.disable
    def attention_packed(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        cu_seqlens: Tensor,
        *,
        mask: Band | None = None,
        alibi_slopes: Tensor | None = None,
        sink: Tensor | None = None,
        scale: float | None = None,
        softcap: float = 0.0,
        dropout_p: float = 0.0,
        seed: int | Tensor | None = None,
        return_lse: bool = False,
        deterministic: bool | None = None,
        backend: str | None = None,
    ) -> Any:
        """`tilewise.attention_packed` of all ranks' tokens, of which q, k and v are this rank's shards.

        Args:
            q: (T, Hq, D), T = all tokens / size; k: (T, Hkv, D); v: (T, Hkv, Dv).
            cu_seqlens: int32 (N + 1,), the ends of the sequences in the whole, the same on each rank. Over `ring` it is
                needed on the host: a tensor on the CPU costs nothing, one on a device is read once (a synchronisation),
                and not again as long as it is the same tensor, unchanged.
            The others are those of `attention`.

        Returns:
            o (T, Hq, Dv), and with return_lse lse (Hq, T).
        """
        if cu_seqlens is None:
            raise TypeError("cu_seqlens is None: attention_packed needs it")
        return self._attention(
            True, q, k, v, cu_seqlens, mask, alibi_slopes, sink, scale, softcap, dropout_p, seed, None, return_lse,
            deterministic, backend,
        )  # fmt: skip

    def _attention(
        self, packed: bool, q: Tensor, k: Tensor, v: Tensor, cu: Tensor | None, mask: Any, slopes: Tensor | None,
        sink: Tensor | None, scale: float | None, softcap: float, dropout_p: float, seed: int | Tensor | None,
        lens: Tensor | None, return_lse: bool, deterministic: bool | None, backend: str | None,
    ) -> Any:  # fmt: skip
        if not isinstance(q, Tensor):
            raise TypeError(f"q is {q!r} ({type(q).__name__}): it must be a torch.Tensor")
        if torch._C._is_any_autocast_enabled() and _autocasts(q):
            q, k, v = _autocast(q), _autocast(k), _autocast(v)
        agreements = [agreement(group, q.device) for group in (self.ulysses, self.ring) if group is not None]
        try:
            problem, whole, blocks = self._validate(
                packed, q, k, v, cu, mask, slopes, sink, scale, softcap, dropout_p, seed, lens, deterministic
            )
        except (TypeError, ValueError) as error:
            for group in agreements:
                group.refuse(error)
            raise
        words = {
            "the pass": "forward", "q": f"{tuple(q.shape)}", "k": f"{tuple(k.shape)}", "v": f"{tuple(v.shape)}",
            "dtype": f"{q.dtype}", "mask": f"{whole.band}{'' if blocks is None else f' & {blocks}'}",
            "layout": whole.layout, "head_groups": f"{self.head_groups}",
            "options": f"scale={problem.scale}, softcap={softcap}, dropout_p={dropout_p}",
            "sequences": "none" if cu is None else f"{len(cu) - 1}",
            "cu_seqlens": "none" if whole.cu is None else f"{zlib.crc32(repr(whole.cu).encode()):08x}",
            "whether slopes, a sink, lengths and gradients are given or wanted":
                f"{slopes is not None, sink is not None, lens is not None, problem.needs_grad}",
        }  # fmt: skip
        if dropout_p > 0:
            seed = _agreed_seed(agreements, words, seed, q.device)
        else:
            _agree(agreements, words)
        if packed:
            q, k, v = (ring.dense(x) for x in (q, k, v))
        first = 0
        if self.ulysses is not None:
            first = q.shape[1] // _size(self.ulysses) * _rank(self.ulysses)
            q, k, v = (by_heads(x, self.ulysses) for x in (q, k, v))
            some = slice(first, first + q.shape[1])
            slopes, sink = (None if x is None else x[..., some] for x in (slopes, sink))
        if self.ring is None:
            o, lse = self._alone(
                packed, q, k, v, cu, mask, slopes, sink, problem, seed, lens, deterministic, backend, first
            )
        else:
            call = ring.Call(
                self.ring, whole, packed, first, blocks, lens, problem.scale, softcap, dropout_p, seed,  # type: ignore[arg-type]
                problem.deterministic, backend, problem.needs_grad, self.head_groups,
            )  # fmt: skip
            o, lse = ring.attend(call, q, k, v, slopes, sink)
        if self.ulysses is not None:
            o = by_rows(o, self.ulysses)
            lse = by_rows(lse[..., None], self.ulysses)[..., 0] if return_lse else lse
        if packed:
            o, lse = ring.packed(o), lse[0]
        return (o, lse) if return_lse else o

    def _validate(
        self, packed: bool, q: Tensor, k: Tensor, v: Tensor, cu: Tensor | None, mask: Any, slopes: Tensor | None,
        sink: Tensor | None, scale: float | None, softcap: float, dropout_p: float, seed: int | Tensor | None,
        lens: Tensor | None, deterministic: bool | None,
    ) -> tuple[Problem, Whole, BlockMask | None]:  # fmt: skip
        """The local tensors as a Problem, the plan's view of the whole, and its BlockMask."""
        if packed:
            for name, x in (("q", q), ("k", k), ("v", v)):
                if not isinstance(x, Tensor) or x.dim() != 3:
                    raise ValueError(f"{name} is {_seen(x)}: it must be a tensor (T, H, D)")
            q, k, v = (ring.dense(x) for x in (q, k, v))
        each = packed and slopes is not None and slopes.dim() == 2  # a slope for each sequence
        if each and slopes.shape != (len(cu) - 1, q.shape[1]):  # type: ignore[union-attr, arg-type]
            raise ValueError(f"alibi_slopes is {tuple(slopes.shape)}: it must be (Hq,) or (N, Hq)")  # type: ignore[union-attr]
        problem, _ = Problem.of(
            q, k, v, alibi_slopes=q.new_zeros(q.shape[1]) if each else slopes, sink=sink, scale=scale,
            softcap=softcap, dropout_p=dropout_p, seed=0 if seed is None else seed, deterministic=deterministic,
        )  # fmt: skip
        if problem.q_len != problem.k_len:
            raise ValueError(f"k has {problem.k_len} tokens, q has {problem.q_len}: both are shards of one sequence")
        band, blocks = split_mask(mask)
        if not (blocks is None or (isinstance(blocks, BlockMask) and not packed)):
            kinds = "a Band" if packed else "a Band, a BlockMask, or both"
            raise TypeError(f"mask is {type(blocks).__name__}: context parallel takes {kinds}")
        length = problem.q_len * self.size
        if blocks is not None and (blocks.q_len, blocks.k_len) != (length, length):
            raise ValueError(
                f"mask is a BlockMask for {blocks.q_len} queries and {blocks.k_len} keys: the whole has {length}"
            )
        if self.ulysses is not None:
            check_heads(_size(self.ulysses), problem.heads, problem.kv_heads)
        if lens is not None:
            _check_lens(lens, q)
        ends = None
        if cu is not None:
            if not isinstance(cu, Tensor) or cu.dtype != torch.int32 or cu.dim() != 1 or len(cu) < 1:
                raise ValueError(f"cu_seqlens is {_seen(cu)}: it must be torch.int32 (N + 1,)")
            ends = _on_host(cu, length) if self.ring is not None else None
        whole = Whole(
            length, _size(self.ring), self.layout, Band(band.left, band.right, "top_left"),
            dropout_p > 0 or slopes is not None or blocks is not None or lens is not None, ends,
        )  # fmt: skip
        sizes = [chunk.size for chunk in chunks(length, whole.ranks, 0, whole.layout)]
        if blocks is not None and whole.ranks > 1 and sizes[0] % ALIGN:
            raise ValueError(f"mask is a BlockMask: chunks must be multiples of {ALIGN} tokens, not {sizes[0]}")
        return problem, whole, blocks

    def _alone(
        self, packed: bool, q: Tensor, k: Tensor, v: Tensor, cu: Tensor | None, mask: Any, slopes: Tensor | None,
        sink: Tensor | None, problem: Problem, seed: Any, lens: Tensor | None, deterministic: bool | None,
        backend: str | None, first: int,
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        """The whole sequence with some of its heads, on this device."""
        if packed:
            q, k, v = (ring.packed(x) for x in (q, k, v))
            cu = cu.to(q.device)  # type: ignore[union-attr]
        looked_up = problem.dropout_p > 0 or isinstance(split_mask(mask)[1], BlockMask)
        mine, aux = Problem.of(
            q, k, v, mask=mask, alibi_slopes=slopes, sink=sink, scale=problem.scale, softcap=problem.softcap,
            dropout_p=problem.dropout_p, seed=seed, q_lens=lens, k_lens=lens, cu_seqlens_q=cu,
            deterministic=deterministic, origin=(0, first, 0, 0) if looked_up else None,
        )  # fmt: skip
        o, lse = attend(mine, q, k, v, aux, backend)
        return (ring.dense(o), lse[None]) if packed else (o, lse)


def _size(group: Any) -> int:
    return 1 if group is None else dist.get_world_size(group)


def _rank(group: Any) -> int:
    return 0 if group is None else dist.get_rank(group)


def _within(chunk: Chunk, lo: int, hi: int) -> tuple[int, int] | None:
    """The positions of those of a chunk's tokens that lie in rows [lo, hi)."""
    a, b = max(lo, chunk.local), min(hi, chunk.local + chunk.size)
    return (chunk.first + a - chunk.local, chunk.first + b - chunk.local) if a < b else None


def _seen(x: Any) -> str:
    return f"{x.dtype} {tuple(x.shape)}" if isinstance(x, Tensor) else repr(x)


def _check_lens(lens: Tensor, q: Tensor) -> None:
    if not isinstance(lens, Tensor):
        raise TypeError(f"lens is {lens!r}: it must be a torch.Tensor")
    if lens.dtype != torch.int32 or tuple(lens.shape) != (q.shape[0],) or lens.device != q.device:
        it, must = (lens.dtype, tuple(lens.shape), lens.device), (torch.int32, (q.shape[0],), q.device)
        raise ValueError(f"lens is {it}: it must be {must}")


def _agree(agreements: list[Agreement], words: Words) -> list[list[Words]]:
    """All groups' answers. Where one finds a difference, the others are told."""
    answers = []
    for n, group in enumerate(agreements):
        try:
            answers.append(group.reach(words))
        except ValueError as error:
            for other in agreements[n + 1 :]:
                other.refuse(error)
            raise
        words = {**words, **{name: value for name, value in answers[-1][0].items() if name.isupper()}}
    return answers


def _agreed_seed(agreements: list[Agreement], words: Words, seed: Any, device: torch.device) -> Tensor:
    """The dropout's seed: as given, the same everywhere, or the one that the first rank of all has drawn."""
    if isinstance(seed, Tensor):
        _agree(agreements, {**words, "seed": "a tensor"})
        return seed
    if seed is None:  # each rank draws, so that all generators go on alike
        drawn = int(torch.randint(-(2**63), 2**63 - 1, (), dtype=torch.int64))
        seed = int(_agree(agreements, {**words, "seed": "drawn", "SEED": str(drawn)})[-1][0]["SEED"])
    else:
        _agree(agreements, {**words, "seed": str(seed)})
    return torch.full((), seed - 2**64 if seed >= 2**63 else seed, dtype=torch.int64, device=device)


_read: WeakTensorKeyDictionary = WeakTensorKeyDictionary()


def _on_host(cu: Tensor, tokens: int) -> tuple[int, ...]:
    """cu_seqlens as Python integers, checked. A tensor is read once for each time that it is changed."""
    version, ends = _read.get(cu, (None, ()))
    if version != cu._version:
        ends = tuple(cu.tolist())
        _read[cu] = cu._version, ends
    if ends[0] != 0:
        raise ValueError(f"cu_seqlens[0] is {ends[0]}: cumulative lengths start at 0")
    for s, (a, b) in enumerate(pairwise(ends)):
        if b < a:
            raise ValueError(f"cu_seqlens[{s + 1}] is {b}, after {a}: cumulative lengths never decrease")
    if ends[-1] > tokens:
        raise ValueError(f"cu_seqlens ends at {ends[-1]}: all ranks together have only {tokens} tokens")
    return ends
