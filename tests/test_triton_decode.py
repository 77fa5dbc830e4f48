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


def compile_all(arch: str, name: str) -> None:
    """AssertionError where a kernel of the call spills, or takes more shared memory than there is."""
    pytest.importorskip("triton")
    if os.environ.get("TRITON_INTERPRET") == "1":
        pytest.skip("in Triton's interpreter there are no binaries")
    from triton.backends.compiler import GPUTarget

    from tilewise.kernels.launch import compile_for, recording, resources
    from tilewise.kernels.triton import decode_host

    problem, aux, tensors = asked(arch, **KINDS[name])
    assert backend.why_not(problem) is None
    with recording() as launches:
        decode_host.attend(problem, *tensors, aux)
        if KINDS[name].get("queries", 1) == 1:
            q, k, v = tensors
            new = [torch.empty(q.shape[0], x.shape[1], 1, x.shape[3], dtype=q.dtype) for x in (k, v)]
            decode_host.append(problem, new[0], None if KINDS[name].get("latent") else new[1], k, v, aux)
    names = [launch.kernel.__name__ for launch in launches]
    many, packed = KINDS[name].get("queries", 1) > decode_config.SHORT, KINDS[name].get("packed")
    assert ("piece_kernel" in names) == bool(not many or packed), names
    assert ("whole_kernel" in names) == bool(many or packed), names
    for launch in launches:
        compiled = compile_for(launch, GPUTarget(*TARGETS[arch]))
        taken = resources(compiled)
        assert not taken.unwritten, "ptxas left out an instruction"
        assert taken.shared <= SHARED_KIB.get(arch, 64) * 1024, f"{launch.kernel.__name__}: {taken.shared} bytes"
        if arch == "sm90":
            assert taken.spilled <= SPILLS.get(name, 0), f"{launch.kernel.__name__}: {taken.spilled} bytes spill"
        if launch.early:
            assert "griddepcontrol.wait" in compiled.asm["ptx"]


@pytest.mark.parametrize(("arch", "name"), CHOSEN)
def test_it_compiles_within_its_limits(arch: str, name: str) -> None:
    compile_all(arch, name)


@pytest.mark.slow
@pytest.mark.parametrize("name", KINDS)
@pytest.mark.parametrize("arch", TARGETS)
def test_all_compile_within_their_limits(arch: str, name: str) -> None:
    if arch in ("sm75", "cuda") and (name in ("latent", "fp8") or "fp32" in name):
        pytest.skip("refused there, or slow to compile")
    if name == "fp8" and arch in ("sm80", "sm86"):
        pytest.skip("refused there")
    compile_all(arch, name)


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
def test_sequences_are_shared_so_that_no_sm_waits_long(sequences: int, pieces: int) -> None:
    pytest.importorskip("triton")
    from tilewise.kernels.triton.decode_host import sharers_of

    sharers = sharers_of(sequences, pieces, 264)
    assert 1 <= sharers <= pieces
    programs = sequences * sharers
    turns = -(-programs // 264)
    if sequences * pieces < 264:
        assert sharers == pieces
    elif pieces >= 16:
        assert programs / (264 * turns) >= 0.75


def test_pieces_are_those_of_every_call() -> None:
    """Whatever the batch, the queries, the head sizes or the device: a row's bits would depend on them."""
    for arch in TARGETS:
        for options in (*KINDS.values(), {"batch": 1}, {"batch": 5, "queries": 4}):
            assert decode_config.choose(asked(arch, **options)[0], False).piece == decode_config.PIECE
    assert decode_config.BLOCK % decode_config.PIECE == 0


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
                shape = of.ROWS, of.KEYS, of.PIECE, of.BLOCK, of.COLUMNS, of.AT_ONCE, launch.warps, launch.stages
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
