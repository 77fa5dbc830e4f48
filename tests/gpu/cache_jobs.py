"""Cases of key/value caches for the pool: those of the other backends, and larger ones."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import pool
from cache_cases import BF16, F16, F32, F64, FP8, CacheCase, Call, sample
from poison import poisoned_memory
from test_cache import NAMED
from torch import Tensor
from where import BACKEND, REHEARSAL, moved

import tilewise
from tilewise import KVCache, Rotary, sliding_window

LONG = CacheCase(stored=(5000, 2047, 0, 2600), new=(1, 1, 1, 1), room=5100, heads=8, kv_heads=2, dim=128, dtype=BF16)
SIZED = {
    "several blocks": LONG,
    "in pages of 16": replace(LONG, page=16),
    "in pages of 64": replace(LONG, page=64, band=sliding_window(3000)),
    "in pages of 256": replace(LONG, page=256),
    "in pages of 7": replace(LONG, page=7, dtype=F16),
    "all heads share keys": replace(LONG, heads=16, kv_heads=1),
    "no heads do": replace(LONG, heads=4, kv_heads=4, dim=64),
    "16 queries": replace(LONG, new=(16, 16, 16, 16)),
    "5 queries, all on scores": replace(LONG, new=(5, 5, 5, 5), sink=True, softcap=20.0, slopes="bh"),
    "many queries": replace(LONG, new=(300, 300, 300, 300), room=5400),
    "many queries, turned": replace(LONG, new=(300, 300, 300, 300), room=5400, rotary="half", rotary_dim=128),
    "many queries in pages": replace(LONG, new=(300, 170, 1, 30), room=5400, page=16),
    "long and short, packed": replace(LONG, new=(300, 1, 17, 1), room=5400, packed=True, page=64),
    "turned": replace(LONG, rotary="half", rotary_dim=128),
    "turned by pairs, padded": replace(LONG, rotary="interleaved", rotary_dim=64, starts=(7, 2000, 0, 3)),
    "fp8": replace(LONG, storage=FP8), "fp8 in pages": replace(LONG, storage=FP8, page=64, dtype=F16),
    "latent": replace(LONG, heads=16, kv_heads=1, dim=576, v_dim=512, v_in_k=True, page=64),
    "latent, 128 heads": replace(LONG, heads=128, kv_heads=1, dim=576, v_dim=512, v_in_k=True),
    "rows of 222 bytes": replace(LONG, dim=111, v_dim=72, page=16, dtype=F16, heads=2, kv_heads=1),
    "head size 256": replace(LONG, dim=256), "head size 96": replace(LONG, dim=96, dtype=F16),
    "fp32": replace(LONG, dtype=F32, dim=64), "fp32, 128": replace(LONG, dtype=F32),
    "a prefix": replace(LONG, prefix=3000, prefix_page=16, page=16, rotary="half", rotary_dim=128, sink=True),
    "places of their own": replace(LONG, rows=(5, -1, 1, 0)),
    "a layer of many": replace(LONG, strided=True),
}  # fmt: skip
SAMPLES = {f"cache sample {seed}": sample(seed) for seed in range(150)}
CASES = {f"cache {name}": case for name, case in SIZED.items()}
CASES |= {f"cache named {name}": case for name, case in NAMED.items() if "sizes 1," not in name}
# Of one value of fp16 (see tests/interpreted) the error is no average; fp64 is "tiled"'s.
CASES |= {
    name: case for name, case in SAMPLES.items()
    if case.dtype is not F64 and (case.dtype is F32 or (case.v_dim or case.dim) > 1)
}  # fmt: skip
if REHEARSAL:
    CASES = dict(list(CASES.items())[:: len(CASES) // 6])


def on_gpu() -> dict[str, pool.Job]:
    return {name: pool.Job(partial(fault_of, name), name, case.dim) for name, case in CASES.items()}


class Placed(Call):
    """A case's call on the device; what is stored there comes back."""

    def ask(self, backend: str | None, options: dict[str, Any]) -> tuple[Tensor, Tensor]:
        there = placed(self.cache)
        options = {name: placed(x) for name, x in options.items()}
        o, lse = tilewise.attention_cached(moved(self.q), there, return_lse=True, backend=backend, **options)
        assert there.status is not None
        assert self.cache.status is not None
        for x, y in ((self.cache.k, there.k), (self.cache.v, there.v), (self.cache.lengths, there.lengths)):
            x.copy_(y)
        self.cache.status.copy_(there.status)
        return o.cpu(), lse.cpu()


def placed(x: Any) -> Any:
    if isinstance(x, KVCache):
        k = moved(x.k)
        v = k[..., : x.shape.v_dim] if x.shape.v_in_k else moved(x.v)
        tables = {name: moved(getattr(x, name)) for name in ("pages", "k_scale", "v_scale", "starts")}
        return KVCache(k, v, moved(x.lengths), **tables)
    return Rotary(moved(x.cos), moved(x.sin), x.style) if isinstance(x, Rotary) else moved(x)


def fault_of(name: str) -> str:
    """ "" or what is wrong."""
    case = CASES[name]
    try:
        call = Placed(case)
        before = call.cache.k.clone(), call.cache.v.clone()
        with tilewise.checked(), poisoned_memory():
            o, lse = call.run(BACKEND)
        call.check_storage(*before)
        call.check_results(o, lse)
    except Exception as error:
        return f"{case}\n{type(error).__name__}: {error}"
    return ""
