"""What is asked, frozen: one attention call without the contents of its tensors.

`Problem.of` is the only validation in the library, beside that of caches in `problem_cached`. It checks shapes, dtypes
and devices, normalises the optional arguments, and returns a hashable `Problem` beside the optional tensors in an
`Aux`. Backends and the backward pass read those two and validate nothing.
"""

from __future__ import annotations

import contextlib
import enum
import math
import threading
from collections.abc import Iterator
from dataclasses import dataclass, fields
from itertools import pairwise
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from .block_mask import BlockMask
from .mask import Band, Masked

if TYPE_CHECKING:
    from .problem_cached import CacheShape

DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
Origin = tuple[int, int, int, int]
MaskLike = Band | BlockMask | Masked | Tensor | None


class Layout(enum.Enum):
    """How the sequences of a batch lie in memory."""

    DENSE = "dense"  # (B, H, S, D)
    PACKED = "packed"  # (T, H, D), sequence s in rows cu_seqlens[s] : cu_seqlens[s + 1]
    PAGED = "paged"  # (pages, H, page_size, D), a cache's keys: key j of a sequence on page table[s, j // page_size]


@dataclass(frozen=True, slots=True)
class BiasShape:
    """Which of (B, Hq, Sq, Sk) an additive bias really has (the others are broadcast from size 1), and its dtype."""

    batch: bool
    heads: bool
    rows: bool
    keys: bool
    dtype: torch.dtype
    grad: bool = False  # its gradient is wanted


@dataclass(frozen=True, slots=True)
class Aux:
    """The optional tensors of a call, normalised by `Problem.of`; None where the option is off."""

    bias: Tensor | None = None  # (B|1, Hq|1, Sq|1, Sk|1)
    slopes: Tensor | None = None  # (Hq,) or (B, Hq)
    sink: Tensor | None = None  # (Hq,)
    mask: BlockMask | Tensor | None = None  # a boolean tensor is 4-D, True = visible, dimensions 1 or full
    seed: Tensor | None = None  # int64, 0-d
    cu_q: Tensor | None = None  # int32 (N + 1,)
    cu_k: Tensor | None = None
    q_lens: Tensor | None = None  # int32 (B,)
    k_lens: Tensor | None = None
    origin: Origin = (0, 0, 0, 0)  # (b0, h0, i0, j0): shifts Band, ALiBi, BlockMask and dropout coordinates
    # Of a cached call (see `problem_cached`): k_lens says how much is stored, and
    pages: Tensor | None = None  # int32 (slots, max_pages), the page table
    rows: Tensor | None = None  # int32 (B,), where a sequence is stored
    starts: Tensor | None = None  # int32 (B,), its first valid key
    after: Tensor | None = None  # int32 (B,), keys that follow the stored ones elsewhere
    k_scale: Tensor | None = None  # fp32 (Hkv,)
    v_scale: Tensor | None = None
    rotary_cos: Tensor | None = None  # (positions, R / 2)
    rotary_sin: Tensor | None = None
    status: Tensor | None = None  # int32 (1,), into which faults are OR-ed


class Grads(NamedTuple):
    """What a backward returns; None where the input was not given or needs no gradient."""

    dq: Tensor
    dk: Tensor
    dv: Tensor
    dbias: Tensor | None = None
    dslopes: Tensor | None = None
    dsink: Tensor | None = None


class HashedOnce:
    """Base of a frozen dataclass that caches look up at each call: its hash is kept. Not a field: no pickle has it."""

    __slots__ = ("_hash",)
    _hash: int

    def __hash__(self) -> int:
        try:
            return self._hash
        except AttributeError:
            value = hash(tuple([getattr(self, field.name) for field in fields(self)]))  # type: ignore[arg-type]
            object.__setattr__(self, "_hash", value)
            return value


@dataclass(frozen=True, slots=True)
class Problem(HashedOnce):
    """Everything about a call but its tensors' contents: the key of every choice that is made for it.

    In the packed layout `batch` is the number of sequences, `q_len` and `k_len` are the total tokens.
    """

    batch: int
    q_len: int
    k_len: int
    heads: int
    kv_heads: int
    qk_dim: int
    v_dim: int
    dtype: torch.dtype
    device: str  # "cpu", "sm80", "sm90", ... or the device type where there is no compute capability
    q_layout: Layout = Layout.DENSE
    k_layout: Layout = Layout.DENSE
    q_lens: bool = False
    k_lens: bool = False
    band: Band = Band()
    mask: str | None = None  # "blocks", "bool"
    bias: BiasShape | None = None
    alibi: bool = False
    sink: bool = False
    scale: float = 1.0
    softcap: float = 0.0
    dropout_p: float = 0.0
    deterministic: bool = False
    needs_grad: bool = False
    cache: CacheShape | None = None  # k and v are a cache's storage, k_len is what one sequence can hold

    __hash__ = HashedOnce.__hash__

    @property
    def group(self) -> int:
        """Query heads that share one key/value head (1: MHA, Hq: MQA)."""
        return self.heads // self.kv_heads if self.kv_heads else 1

    @property
    def o_shape(self) -> tuple[int, ...]:
        if self.q_layout is Layout.PACKED:
            return (self.q_len, self.heads, self.v_dim)
        return (self.batch, self.heads, self.q_len, self.v_dim)

    @property
    def k_shape(self) -> tuple[int, ...]:
        if self.k_layout is Layout.PACKED:
            return (self.k_len, self.kv_heads, self.qk_dim)
        if self.cache is not None:
            return self.cache.k_shape
        return (self.batch, self.kv_heads, self.k_len, self.qk_dim)

    @property
    def lse_shape(self) -> tuple[int, ...]:
        if self.q_layout is Layout.PACKED:
            return (self.heads, self.q_len)
        return (self.batch, self.heads, self.q_len)

    @property
    def lse_dtype(self) -> torch.dtype:
        return accumulator(self.dtype)

    def __str__(self) -> str:
        lengths = f"{self.q_len} queries x {self.k_len} keys"
        if self.q_layout is Layout.PACKED:
            lengths = f"{self.batch} packed sequences, {lengths} in total"
        else:
            lengths = f"batch {self.batch}, {lengths}"
        if self.cache is not None:
            lengths = lengths.replace(f"{self.k_len} keys", f"at most {self.k_len} keys a sequence, {self.cache}")
            lengths = lengths.removesuffix(" in total")
        heads = f"{self.heads} heads" if self.group == 1 else f"{self.heads}/{self.kv_heads} heads"
        size = f"d {self.qk_dim}" if self.qk_dim == self.v_dim else f"d {self.qk_dim}/{self.v_dim}"
        options = [_band_name(self.band)] if not self.band.is_full else []
        options += {None: [], "blocks": ["block mask"], "bool": ["boolean mask"]}[self.mask]
        options += [
            name
            for name in ("q_lens", *(() if self.cache else ("k_lens",)), "alibi", "sink", "deterministic")
            if getattr(self, name)
        ]
        options += ["bias"] if self.bias else []
        options += [f"{name}={getattr(self, name):g}" for name in ("softcap", "dropout_p") if getattr(self, name)]
        options += ["with gradient"] if self.needs_grad else []
        dtype = str(self.dtype).removeprefix("torch.")
        return ", ".join([lengths, heads, size, dtype, self.device, f"scale={self.scale:g}", *options])

    @classmethod
    def of(
        cls,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        *,
        mask: MaskLike = None,
        bias: Tensor | None = None,
        alibi_slopes: Tensor | None = None,
        sink: Tensor | None = None,
        scale: float | None = None,
        softcap: float = 0.0,
        dropout_p: float = 0.0,
        seed: int | Tensor | None = None,
        q_lens: Tensor | None = None,
        k_lens: Tensor | None = None,
        cu_seqlens_q: Tensor | None = None,
        cu_seqlens_k: Tensor | None = None,
        deterministic: bool | None = None,
        origin: Origin | None = None,
    ) -> tuple[Problem, Aux]:
        """Validate a call and freeze it. Raises one ValueError or TypeError that names the argument at fault.

        The arguments are those of `tilewise.attention`, and `origin`: where this call's (b, h, i, j) = 0 lies in a
        larger one, whose BlockMask (if it has one) is passed whole.
        """
        return cls.of_call(
            q, k, v, mask, bias, alibi_slopes, sink, scale, softcap, dropout_p, seed, q_lens, k_lens, cu_seqlens_q,
            cu_seqlens_k, deterministic, origin,
        )  # fmt: skip

    @classmethod
    def of_call(
        cls, q: Tensor, k: Tensor, v: Tensor, mask: MaskLike, bias: Tensor | None, alibi_slopes: Tensor | None,
        sink: Tensor | None, scale: float | None, softcap: float, dropout_p: float, seed: int | Tensor | None,
        q_lens: Tensor | None, k_lens: Tensor | None, cu_seqlens_q: Tensor | None, cu_seqlens_k: Tensor | None,
        deterministic: bool | None, origin: Origin | None = None,
    ) -> tuple[Problem, Aux]:  # fmt: skip
        """`of`, all arguments in their places: to hand them on by name takes a microsecond."""
        key = None
        if bias is alibi_slopes is sink is q_lens is k_lens is cu_seqlens_q is cu_seqlens_k is origin is None:
            key = _plain_key(q, k, v, mask, scale, softcap, dropout_p, deterministic)
            try:
                problem = _validated.get(key)
            except TypeError:  # not hashable: a length that is a symbol, or an option that validation will refuse
                key = problem = None
            if problem is not None:
                return problem, Aux(seed=_normalise_seed(seed, q)) if problem.dropout_p > 0 else NOTHING
        problem, aux = cls._validate(
            q, k, v, mask, bias, alibi_slopes, sink, scale, softcap, dropout_p, seed, q_lens, k_lens, cu_seqlens_q,
            cu_seqlens_k, deterministic, origin,
        )  # fmt: skip
        if key is not None:
            if len(_validated) >= MOST_VALIDATED:
                _validated.clear()
            _validated[key] = problem
        return problem, aux

    @classmethod
    def _validate(
        cls, q: Tensor, k: Tensor, v: Tensor, mask: MaskLike, bias: Tensor | None, alibi_slopes: Tensor | None,
        sink: Tensor | None, scale: float | None, softcap: float, dropout_p: float, seed: int | Tensor | None,
        q_lens: Tensor | None, k_lens: Tensor | None, cu_seqlens_q: Tensor | None, cu_seqlens_k: Tensor | None,
        deterministic: bool | None, origin: Origin | None,
    ) -> tuple[Problem, Aux]:  # fmt: skip
        packed = cu_seqlens_q is not None
        _check_qkv(q, k, v, 3 if packed else 4)
        if packed:
            cu_seqlens_k = cu_seqlens_q if cu_seqlens_k is None else cu_seqlens_k
            batch = _check_cu("cu_seqlens_q", cu_seqlens_q, q)
            if _check_cu("cu_seqlens_k", cu_seqlens_k, q) != batch:
                raise ValueError(
                    f"cu_seqlens_k describes {len(cu_seqlens_k) - 1} sequences, cu_seqlens_q {batch}: "  # type: ignore[arg-type]
                    "both must have the same number of sequences"
                )
            (q_len, heads, qk_dim), (k_len, kv_heads, v_dim) = q.shape, v.shape
        else:
            (batch, heads, q_len, qk_dim), (_, kv_heads, k_len, v_dim) = q.shape, v.shape
        # Dense options span (B, Hq, Sq, Sk). Packed ones span the longest sequence, which only the device knows.
        full = (batch, heads, None if packed else q_len, None if packed else k_len)
        band, dense_mask, kind = _normalise_mask(mask, full, q, origin)
        bias, bias_shape = _normalise_bias(bias, full, q)
        _check_vector("alibi_slopes", alibi_slopes, [(heads,), (batch, heads)], q)
        _check_vector("sink", sink, [(heads,)], q)
        _check_lens("q_lens", q_lens, batch, q)
        _check_lens("k_lens", k_lens, batch, q)
        scale = 1.0 / math.sqrt(qk_dim) if scale is None else _finite("scale", scale)
        softcap = _finite("softcap", softcap)
        if softcap < 0:
            raise ValueError(f"softcap is {softcap}: it must be 0 (off) or positive")
        dropout_p = _finite("dropout_p", dropout_p)
        if not 0.0 <= dropout_p <= 1.0:
            raise ValueError(f"dropout_p is {dropout_p}: it must lie in [0, 1]")
        aux = Aux(
            bias=bias, slopes=alibi_slopes, sink=sink, mask=dense_mask,
            seed=_normalise_seed(seed, q) if dropout_p > 0 else None,
            cu_q=cu_seqlens_q, cu_k=cu_seqlens_k, q_lens=q_lens, k_lens=k_lens, origin=origin or (0, 0, 0, 0),
        )  # fmt: skip
        layout = Layout.PACKED if packed else Layout.DENSE
        problem = cls(
            batch=batch, q_len=q_len, k_len=k_len, heads=heads, kv_heads=kv_heads, qk_dim=qk_dim, v_dim=v_dim,
            dtype=q.dtype, device=device_name(q.device), q_layout=layout, k_layout=layout,
            q_lens=q_lens is not None, k_lens=k_lens is not None, band=band, mask=kind, bias=bias_shape,
            alibi=alibi_slopes is not None, sink=sink is not None, scale=scale, softcap=softcap, dropout_p=dropout_p,
            deterministic=_deterministic(deterministic),
            needs_grad=torch.is_grad_enabled()
            and any(t is not None and t.requires_grad for t in (q, k, v, bias, alibi_slopes, sink)),
        )  # fmt: skip
        if q.device.type == "cpu" or _checked.active:
            _check_contents(problem, aux)
        return problem, aux


# A call without optional tensors is validated once: after that its Problem is found by all that validation looks at.
# Found so it takes 5 microseconds instead of 25, and caches further on meet one object, which they compare by identity.
MOST_VALIDATED = 512
_validated: dict[tuple[Any, ...] | None, Problem] = {}
NOTHING = Aux()
_ORDINARY = frozenset((Tensor, torch.nn.Parameter))


def _plain_key(
    q: Any, k: Any, v: Any, mask: Any, scale: Any, softcap: Any, dropout_p: Any, deterministic: Any
) -> tuple[Any, ...] | None:
    """All that decides about a call without optional tensors; None for other classes of tensors (fake, wrappers).

    Types of the options are in it: True == 1 == 1.0, and validation refuses the first.
    """
    ordinary = type(q) in _ORDINARY and type(k) in _ORDINARY and type(v) in _ORDINARY
    if not ordinary or not (mask is None or type(mask) is Band):
        return None
    return (
        q.shape, k.shape, v.shape, q.dtype, k.dtype, v.dtype, q.device, k.device, v.device, mask,
        torch.is_grad_enabled() and (q.requires_grad or k.requires_grad or v.requires_grad),
        torch.are_deterministic_algorithms_enabled(), scale, softcap, dropout_p, deterministic,
        type(scale), type(softcap), type(dropout_p), type(deterministic),
    )  # fmt: skip


def accumulator(dtype: torch.dtype) -> torch.dtype:
    """The dtype in which sums and statistics are kept: fp32, and fp64 for fp64 inputs."""
    return torch.float64 if dtype is torch.float64 else torch.float32


def device_name(device: torch.device) -> str:
    """ "cpu", "sm90" (compute capability), or the device's type."""
    if device.type == "cuda" and torch.version.hip is None:
        major, minor = torch.cuda.get_device_capability(device)
        return f"sm{major}{minor}"
    return device.type


class _Checked(threading.local):
    active = False


_checked = _Checked()


@contextlib.contextmanager
def checked() -> Iterator[None]:
    """Check the contents of cu_seqlens and lengths on every device, not only on the CPU, within this thread.

    On a GPU that costs one synchronisation a call; outside this context the kernels clamp what they read instead.

    >>> import torch, tilewise
    >>> q = torch.randn(1, 2, 8, 16)
    >>> with tilewise.checked():
    ...     tilewise.attention(q, q, q, k_lens=torch.tensor([9], dtype=torch.int32))
    Traceback (most recent call last):
    ...
    ValueError: k_lens[0] is 9: lengths must lie in [0, 8]
    """
    before, _checked.active = _checked.active, True
    try:
        yield
    finally:
        _checked.active = before


def split_mask(mask: Any) -> tuple[Band, Any]:
    """(Band, what else hides pairs) from anything that `mask=` takes."""
    if isinstance(mask, Masked):
        return mask.band, mask.mask
    return (mask, None) if isinstance(mask, Band) else (Band(), mask)


def _band_name(band: Band) -> str:
    name = "causal" if (band.left, band.right) == (None, 0) else f"band [-{band.left}, {band.right}]"
    return name if band.align == "bottom_right" else f"{name} {band.align}"


def _shape(t: Tensor) -> str:
    return "(" + ", ".join(str(int(n)) for n in t.shape) + ")"


def _is_tensor(name: str, value: Any) -> None:
    if not isinstance(value, Tensor):
        raise TypeError(f"{name} is {value!r} ({type(value).__name__}): it must be a torch.Tensor")


def _check_qkv(q: Tensor, k: Tensor, v: Tensor, dims: int) -> None:
    form = "(B, H, S, D)" if dims == 4 else "(T, H, D)"
    for name, t in (("q", q), ("k", k), ("v", v)):
        _is_tensor(name, t)
        if t.dim() != dims:
            raise ValueError(f"{name} is {_shape(t)}: it must have {dims} dimensions {form}")
        if t.dtype not in DTYPES:
            raise TypeError(f"{name} is {t.dtype}: it must be one of {', '.join(map(str, DTYPES))}")
        if t.dtype != q.dtype:
            raise TypeError(f"{name} is {t.dtype}, q is {q.dtype}: q, k and v must have one dtype")
        if t.device != q.device:
            raise ValueError(f"{name} is on {t.device}, q is on {q.device}: all tensors must be on one device")
        if t.shape[-1] == 0:
            raise ValueError(f"{name} is {_shape(t)}: its head size (last dimension) must be at least 1")
    seq, head = (2, 1) if dims == 4 else (0, 1)
    if dims == 4:
        for name, t in (("k", k), ("v", v)):
            if t.shape[0] != q.shape[0]:
                raise ValueError(f"{name} is {_shape(t)}, q is {_shape(q)}: their batches (dimension 0) must be equal")
    if k.shape[-1] != q.shape[-1]:
        raise ValueError(f"k is {_shape(k)}, q is {_shape(q)}: their head sizes (last dimension) must be equal")
    for what, dim in (("number of heads", head), ("length", seq)):
        if v.shape[dim] != k.shape[dim]:
            raise ValueError(f"v is {_shape(v)}, k is {_shape(k)}: their {what} (dimension {dim}) must be equal")
    heads, kv_heads = q.shape[head], k.shape[head]
    if (kv_heads == 0 and heads != 0) or (kv_heads and heads % kv_heads):
        raise ValueError(
            f"q has {heads} heads, k has {kv_heads} (q is {_shape(q)}, k is {_shape(k)}): "
            "the number of q heads must be a multiple of the number of k heads"
        )


def _check_device(name: str, t: Tensor, q: Tensor) -> None:
    if t.device != q.device:
        raise ValueError(f"{name} is on {t.device}, q is on {q.device}: all tensors must be on one device")


def _check_cu(name: str, cu: Any, q: Tensor) -> int:
    _is_tensor(name, cu)
    if cu.dtype != torch.int32:
        raise TypeError(f"{name} is {cu.dtype}: it must be torch.int32")
    if cu.dim() != 1 or len(cu) < 1:
        raise ValueError(f"{name} is {_shape(cu)}: it must be one-dimensional, (number of sequences + 1,)")
    _check_device(name, cu, q)
    return len(cu) - 1


def _check_lens(name: str, lens: Any, batch: int, q: Tensor) -> None:
    if lens is None:
        return
    _is_tensor(name, lens)
    if lens.dtype != torch.int32:
        raise TypeError(f"{name} is {lens.dtype}: it must be torch.int32")
    if tuple(lens.shape) != (batch,):
        raise ValueError(f"{name} is {_shape(lens)}: it must be ({batch},), one length for each sequence")
    _check_device(name, lens, q)


def _check_vector(name: str, t: Any, shapes: list[tuple[int, ...]], q: Tensor) -> None:
    if t is None:
        return
    _is_tensor(name, t)
    if not t.dtype.is_floating_point:
        raise TypeError(f"{name} is {t.dtype}: it must be a floating-point tensor")
    if tuple(t.shape) not in shapes:
        raise ValueError(f"{name} is {_shape(t)}: it must be {' or '.join(map(str, shapes))}")
    _check_device(name, t, q)


def _broadcastable(name: str, t: Tensor, full: tuple[int | None, ...], q: Tensor) -> Tensor:
    """t as a 4-D view whose sizes are 1 or the call's (None: any size, the packed layout's longest sequence)."""
    want = "(" + ", ".join(("max_q", "max_k")[i - 2] if n is None else str(n) for i, n in enumerate(full)) + ")"
    if t.dim() > 4 or any(n not in (1, f) for n, f in zip(t.shape[::-1], full[::-1], strict=False) if f is not None):
        raise ValueError(f"{name} is {_shape(t)}: it must be broadcastable to (B, Hq, Sq, Sk) = {want}")
    _check_device(name, t, q)
    return t[(None,) * (4 - t.dim())]


def _normalise_bias(bias: Any, full: tuple[int | None, ...], q: Tensor) -> tuple[Tensor | None, BiasShape | None]:
    if bias is None:
        return None, None
    _is_tensor("bias", bias)
    if not bias.dtype.is_floating_point:
        hint = " (a boolean tensor is a mask: pass it as mask=)" if bias.dtype == torch.bool else ""
        raise TypeError(f"bias is {bias.dtype}: it must be a floating-point tensor{hint}")
    bias = _broadcastable("bias", bias, full, q)
    grad = torch.is_grad_enabled() and bias.requires_grad
    batch, heads, rows, keys = (n != 1 for n in bias.shape)
    return bias, BiasShape(batch, heads, rows, keys, bias.dtype, grad)


def _normalise_mask(
    mask: Any, full: tuple[int | None, ...], q: Tensor, origin: Origin | None
) -> tuple[Band, BlockMask | Tensor | None, str | None]:
    band, dense = split_mask(mask)
    if dense is None:
        return band, None, None
    if isinstance(dense, BlockMask):
        _check_blocks(dense, full, q, origin)
        return band, dense, "blocks"
    if not isinstance(dense, Tensor):
        raise TypeError(
            f"mask is {dense!r} ({type(dense).__name__}): it must be a Band (tilewise.causal, tilewise.sliding_window),"
            " a BlockMask, a boolean tensor, a Band & one of the other two, or None"
        )
    if dense.dtype != torch.bool:
        raise TypeError(f"mask is {dense.dtype}: it must be torch.bool (True = visible); pass additive scores as bias=")
    return band, _broadcastable("mask", dense, full, q), "bool"


def _check_blocks(blocks: BlockMask, full: tuple[int | None, ...], q: Tensor, origin: Origin | None) -> None:
    batch, heads, q_len, k_len = full
    if origin is not None:  # a part of a larger call, which the mask describes whole
        b0, h0, i0, j0 = origin
        if i0 % BlockMask.TILE or j0 % BlockMask.TILE:
            raise ValueError(f"origin is {origin}: with a BlockMask its rows and keys must be multiples of 128")
        for what, first, count, size in (
            ("batch", b0, batch, blocks.batch),
            ("heads", h0, heads, blocks.heads),
            ("queries", i0, q_len, blocks.q_len),
            ("keys", j0, k_len, blocks.k_len),
        ):
            if count is not None and first + count > size and (size > 1 or what in ("queries", "keys")):
                raise ValueError(f"mask is a BlockMask for {size} {what}: from {first} (origin) the call has {count}")
    elif blocks.batch not in (1, batch) or blocks.heads not in (1, heads):
        raise ValueError(
            f"mask is a BlockMask for batch {blocks.batch} and {blocks.heads} heads: "
            f"each must be 1 or the call's ({batch} and {heads})"
        )
    elif q_len is not None and (blocks.q_len, blocks.k_len) != (q_len, k_len):
        raise ValueError(
            f"mask is a BlockMask for {blocks.q_len} queries and {blocks.k_len} keys: the call has {q_len} and {k_len}"
        )
    _check_device("mask", blocks.bits, q)


def _deterministic(value: Any) -> bool:
    if value is None:
        return torch.are_deterministic_algorithms_enabled()
    if not isinstance(value, bool):
        raise TypeError(f"deterministic is {value!r} ({type(value).__name__}): it must be True, False or None")
    return value


def _finite(name: str, value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise TypeError(f"{name} is {value!r} ({type(value).__name__}): it must be a number")
    if not math.isfinite(value):
        raise ValueError(f"{name} is {value}: it must be finite")
    return float(value)


def _normalise_seed(seed: Any, q: Tensor) -> Tensor:
    if seed is None:
        return torch.randint(-(2**63), 2**63 - 1, (), dtype=torch.int64, device=q.device)
    if isinstance(seed, Tensor):
        if seed.dtype != torch.int64 or seed.numel() != 1:
            raise TypeError(f"seed is {seed.dtype} {_shape(seed)}: a tensor seed must be one torch.int64")
        _check_device("seed", seed, q)
        return seed.reshape(())
    if isinstance(seed, bool) or not isinstance(seed, int):
        raise TypeError(f"seed is {seed!r} ({type(seed).__name__}): it must be an int, an int64 tensor or None")
    if not -(2**63) <= seed < 2**64:
        raise ValueError(f"seed is {seed}: it must fit in 64 bits")
    return torch.full((), seed - 2**64 if seed >= 2**63 else seed, dtype=torch.int64, device=q.device)


def sequence_lengths(problem: Problem, aux: Aux) -> tuple[list[int], list[int]]:
    """The lengths of every sequence as Python integers (synchronises where they lie on a device)."""

    def of(total: int, cu: Tensor | None, lens: Tensor | None) -> list[int]:
        spans = [total] * problem.batch if cu is None else (cu[1:] - cu[:-1]).tolist()
        if lens is None:
            return spans
        return [min(max(n, 0), span) for n, span in zip(lens.tolist(), spans, strict=True)]

    return of(problem.q_len, aux.cu_q, aux.q_lens), of(problem.k_len, aux.cu_k, aux.k_lens)


def _check_contents(problem: Problem, aux: Aux) -> None:
    for name, cu, total in (("cu_seqlens_q", aux.cu_q, problem.q_len), ("cu_seqlens_k", aux.cu_k, problem.k_len)):
        if cu is None:
            continue
        ends = cu.tolist()
        if ends[0] != 0:
            raise ValueError(f"{name}[0] is {ends[0]}: cumulative lengths start at 0")
        for s, (a, b) in enumerate(pairwise(ends)):
            if b < a:
                raise ValueError(f"{name}[{s + 1}] is {b}, after {a}: cumulative lengths never decrease")
        if ends[-1] > total:
            raise ValueError(f"{name} ends at {ends[-1]}: there are only {total} tokens")
    for name, lens, cu, total in (
        ("q_lens", aux.q_lens, aux.cu_q, problem.q_len),
        ("k_lens", aux.k_lens, aux.cu_k, problem.k_len),
    ):
        if lens is None:
            continue
        spans = [total] * problem.batch if cu is None else (cu[1:] - cu[:-1]).tolist()
        for s, (n, span) in enumerate(zip(lens.tolist(), spans, strict=True)):
            if not 0 <= n <= span:
                raise ValueError(f"{name}[{s}] is {n}: lengths must lie in [0, {span}]")
    if problem.q_layout is Layout.PACKED:
        q_lens, k_lens = sequence_lengths(problem, aux)
        longest = max(q_lens, default=0), max(k_lens, default=0)
        _check_covers("bias", aux.bias.shape[2:] if aux.bias is not None else None, longest)
        if isinstance(aux.mask, BlockMask):
            if (aux.mask.q_len, aux.mask.k_len) < longest or aux.mask.k_len < longest[1]:
                raise ValueError(
                    f"mask is a BlockMask for {aux.mask.q_len} queries and {aux.mask.k_len} keys: "
                    f"the longest sequences have {longest[0]} and {longest[1]}"
                )
        elif aux.mask is not None:
            _check_covers("mask", aux.mask.shape[2:], longest)


def _check_covers(name: str, sizes: tuple[int, ...] | None, longest: tuple[int, int]) -> None:
    if sizes is None:
        return
    for dim, (size, need) in enumerate(zip(sizes, longest, strict=True)):
        if size != 1 and size < need:
            raise ValueError(
                f"{name} has {size} in dimension {dim + 2}: it must be 1 or at least the longest sequence's {need}"
            )
