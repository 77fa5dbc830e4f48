"""The kernels for key/value caches without a GPU: what is compiled for each architecture, and how work is shared."""

from __future__ import annotations

import os
from dataclasses import replace
from typing import Any

import pytest
import torch

import tilewise
from tilewise import KVCache, causal
from tilewise.kernels.triton import backend, decode_config
from tilewise.kernels.triton.config import SHARED_KIB
from tilewise.problem_cached import FP8, of_cached

BF16, F16, F32 = torch.bfloat16, torch.float16, torch.float32
TARGETS = {
    "sm75": ("cuda", 75, 32), "sm80": ("cuda", 80, 32), "sm86": ("cuda", 86, 32), "sm90": ("cuda", 90, 32),
    "sm100": ("cuda", 100, 32), "cuda": ("hip", "gfx942", 64),
}  # fmt: skip
# Beside queries x heads of 128 in bf16, a cache of 2 x 8192 keys; more queries than SHORT are whole_kernel's.
KINDS: dict[str, dict[str, Any]] = {
    "decode": {}, "pages of 64": {"page": 64}, "pages of 16": {"page": 16}, "fp8": {"storage": FP8},
    "16 queries": {"queries": 16}, "300 in pages": {"queries": 300, "page": 16}, "d 64": {"d": 64}, "d 256": {"d": 256},
    "latent": {"d": 576, "v_dim": 512, "heads": 16, "kv_heads": 1, "latent": True}, "fp32": {"dtype": F32},
    "turned": {"turned": 128},
    "111, 72": {"d": 111, "v_dim": 72}, "packed": {"queries": 30, "packed": True},
}  # fmt: skip
CHOSEN = [("sm90", name) for name in KINDS if name not in ("packed", "d 256", "fp32")] + [
    ("sm80", "decode"), ("sm86", "300 in pages"), ("sm75", "decode"), ("sm100", "decode"), ("cuda", "decode"),
]  # fmt: skip
# Bytes that may spill on sm90, of all Tritons; nothing else does.
SPILLS = {"latent": 512, "111, 72": 512, "pages of 16": 512}


def asked(
    arch: str, queries: int = 1, d: int = 128, v_dim: int | None = None, heads: int = 32, kv_heads: int = 8,
    page: int = 0, dtype: torch.dtype = BF16, storage: torch.dtype | None = None, latent: bool = False,
    packed: bool = False, batch: int = 2, keys: int = 8192, turned: int = 0,
) -> tuple[tilewise.Problem, tilewise.problem.Aux, tuple[torch.Tensor, ...]]:  # fmt: skip
    """(problem, its tensors, (q, k, v)) of an empty cache, as if on a GPU of the architecture."""
    dtype = F16 if arch == "sm75" and dtype is BF16 else dtype
    outer = (batch * keys // page, kv_heads, page) if page else (batch, kv_heads, keys)
    k = torch.empty(*outer, d, dtype=storage or dtype)
    v = k[..., :v_dim] if latent else torch.empty(*outer, v_dim or d, dtype=storage or dtype)
    pages = torch.zeros(batch, keys // page, dtype=torch.int32) if page else None
    scales = {f"{x}_scale": torch.ones(kv_heads) for x in "kv"} if storage is FP8 else {}
    cache = KVCache(k, v, torch.zeros(batch, dtype=torch.int32), pages, **scales)
    cu = torch.arange(batch + 1, dtype=torch.int32) * queries if packed else None
    shape = (batch * queries, heads, d) if packed else (batch, heads, queries, d)
    q = torch.empty(shape, dtype=dtype)
    rotary = tilewise.Rotary(*torch.empty(2, keys, turned // 2)) if turned else None
    problem = replace(of_cached(cache.shape, q, mask=causal, cu_seqlens=cu, rotary=rotary), device=arch)
    return problem, cache._aux(None, rotary, None, cu, None), (q, cache.k, cache.v)


# (SMs, keys of a sequence) with which programs have pieces, blocks, all keys, chapters.
SHARED = [(132, 8192), (16, 8192), (4, 8192), (4, 32768)]


def compile_all(arch: str, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """AssertionError where a kernel of the call spills, or takes more shared memory than there is."""
    pytest.importorskip("triton")
    if os.environ.get("TRITON_INTERPRET") == "1":
        pytest.skip("in Triton's interpreter there are no binaries")
    from triton.backends.compiler import GPUTarget

    from tilewise.kernels.launch import compile_for, recording, resources
    from tilewise.kernels.triton import decode_host

    found = {}
    for sms, keys in SHARED if arch == "sm90" else SHARED[:1]:
        monkeypatch.setattr(decode_host, "_sms", lambda device, sms=sms: sms)
        decode_host.plan_of.cache_clear()
        problem, aux, tensors = asked(arch, **KINDS[name], keys=keys)
        assert backend.why_not(problem) is None
        with recording() as launches:
            decode_host.attend(problem, *tensors, aux)
            q, k, v = tensors
            new_k = torch.empty(q.shape[0], k.shape[1], *q.shape[2:], dtype=q.dtype)
            new_v = None if KINDS[name].get("latent") else torch.empty(*new_k.shape[:3], v.shape[3], dtype=q.dtype)
            if decode_host.appends_too(problem):
                decode_host.attend(problem, *tensors, aux, (new_k, new_v))
            if KINDS[name].get("queries", 1) == 1:
                decode_host.append(problem, new_k, new_v, k, v, aux)
        found |= {(launch.kernel.__name__, launch.constexprs["O"]): launch for launch in launches}
    decode_host.plan_of.cache_clear()
    names = {kernel for kernel, _ in found}
    many, packed = KINDS[name].get("queries", 1) > decode_config.SHORT, KINDS[name].get("packed")
    assert ("piece_kernel" in names) == bool(not many or packed), names
    if many or packed:
        assert "whole_kernel" in names
    if name == "decode" and arch == "sm90":
        assert {of.NEW for kernel, of in found if kernel == "piece_kernel"} == {0, 2}
        assert {of.PART for kernel, of in found if kernel == "piece_kernel"} == {512, 2048, 8192}
        assert "whole_kernel" in names
    for launch in found.values():
        compiled = compile_for(launch, GPUTarget(*TARGETS[arch]))
        taken = resources(compiled)
        assert not taken.unwritten, "ptxas left out an instruction"
        assert taken.shared <= SHARED_KIB.get(arch, 64) * 1024, f"{launch.kernel.__name__}: {taken.shared} bytes"
        if arch == "sm90":
            assert taken.spilled <= SPILLS.get(name, 0), f"{launch.kernel.__name__}: {taken.spilled} bytes spill"
        if launch.early:
            assert "griddepcontrol.wait" in compiled.asm["ptx"]


@pytest.mark.parametrize(("arch", "name"), CHOSEN)
def test_it_compiles_within_its_limits(arch: str, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    compile_all(arch, name, monkeypatch)


@pytest.mark.slow
@pytest.mark.parametrize("name", KINDS)
@pytest.mark.parametrize("arch", TARGETS)
def test_all_compile_within_their_limits(arch: str, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if arch in ("sm75", "cuda") and (name in ("latent", "fp8") or "fp32" in name):
        pytest.skip("refused there, or slow to compile")
    if name == "fp8" and arch in ("sm80", "sm86"):
        pytest.skip("refused there")
    compile_all(arch, name, monkeypatch)


@pytest.mark.parametrize("arch", TARGETS)
def test_many_queries_are_turned_for_the_kernels_for_dense_tensors(arch: str, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("triton")
    from triton.backends.compiler import GPUTarget

    from tilewise.kernels.launch import compile_for, recording, resources
    from tilewise.kernels.triton import decode_host

    monkeypatch.setattr("tilewise.dispatch.choose", lambda dense: backend)  # Hopper's asks a GPU how many SMs it has
    for d, turned in ((128, 128), (192, 64)):
        problem, aux, tensors = asked(arch, queries=300, d=d, turned=turned)
        with recording() as launches:
            decode_host.attend(problem, *tensors, aux)
        first, second = launches
        assert (first.kernel.__name__, second.kernel.__name__) == ("turn_kernel", "forward_kernel")
        assert not resources(compile_for(first, GPUTarget(*TARGETS[arch]))).spilled


@pytest.mark.parametrize(
    ("arch", "options", "why"),
    [
        ("sm75", {"d": 576, "v_dim": 512, "latent": True}, "a tile of head sizes 576 and 512 does not fit"),
        ("sm80", {"storage": FP8}, "sm80 has no fp8"),
        ("sm90", {"d": 1025}, "it takes head sizes up to 1024, not 1025"),
    ],
)
def test_what_it_does_not_take(arch: str, options: dict[str, Any], why: str) -> None:
    problem, *_ = asked(arch, **options, keys=64)
    assert why in (backend.why_not(problem) or "")


@pytest.mark.parametrize("sequences", [1, 7, 8, 40, 64, 200, 264, 265, 512, 5000])
@pytest.mark.parametrize("pieces", [1, 16, 256])
@pytest.mark.parametrize("sizes", [1, 2, 3])
def test_sequences_are_shared_so_that_no_sm_waits_long(sequences: int, pieces: int, sizes: int) -> None:
    """Programs are at work for 0.65 of the time that the last one takes, at least."""
    pytest.importorskip("triton")
    from tilewise.kernels.triton.decode_host import sharing_of

    keys, parts = pieces * 512, (512, 2048, 8192)[:sizes]
    programs, part = sharing_of(sequences, keys, parts, 264)
    assert 1 <= programs <= -(-keys // part)
    assert part in parts
    turns, each = -(-sequences * programs // 264), min(-(-keys // part // programs) * part, keys)
    if sequences * pieces < 264:
        assert each == 512
    elif pieces >= 16:
        assert sequences * keys / (264 * turns * each) >= 0.65
    assert sharing_of(sequences, keys, parts, 264, alone=True) == (pieces, 512)


def test_pieces_are_those_of_every_call() -> None:
    """Whatever the batch, the queries, the head sizes or the device: a row's bits would depend on them."""
    for arch in TARGETS:
        for options in (*KINDS.values(), {"batch": 1}, {"batch": 5, "queries": 4}):
            assert decode_config.choose(asked(arch, **options)[0], False).piece == decode_config.PIECE
    assert decode_config.BLOCK % decode_config.PIECE == decode_config.CHAPTER % decode_config.BLOCK == 0


@pytest.mark.parametrize("name", KINDS)
def test_tiles_are_those_of_every_batch(name: str) -> None:
    """A row's sums are added in an order that follows from its tiles' shapes, which neither the batch nor the tokens of
    other sequences may choose. heads 8 of 8: tiles of one head of a group have the fewest rows."""
    pytest.importorskip("triton")
    from tilewise.kernels.launch import recording
    from tilewise.kernels.triton import decode_host

    for more in ({}, {"heads": 8}):
        found: dict[str, set[object]] = {}
        for batch in (1, 2, 16, 17, 40, 70):
            problem, aux, tensors = asked("sm90", **KINDS[name] | more, batch=batch, keys=32768)
            with recording() as launches:
                decode_host.attend(problem, *tensors, aux)
            for launch in launches:
                of = launch.constexprs["O"]
                shape = (
                    of.ROWS,
                    of.KEYS,
                    of.PIECE,
                    of.BLOCK,
                    of.CHAPTER,
                    of.COLUMNS,
                    of.AT_ONCE,
                    launch.warps,
                    launch.stages,
                )
                found.setdefault(launch.kernel.__name__, set()).add(shape)
        assert all(len(shapes) == 1 for shapes in found.values()), found


def test_tiles_divide_pieces() -> None:
    for arch in TARGETS:
        for options in KINDS.values():
            problem, *_ = asked(arch, **options)
            for whole in (False, True):
                for aligned in (False, True):
                    cfg = decode_config.choose(problem, whole, aligned)
                    assert not cfg.piece % cfg.keys
                    assert cfg.rows in (16, 32, 64)
