"""Seconds of the first call with an empty compile cache: `python -m bench.first_call CACHE_FOLDER DIRECTION BACKEND`.

DIRECTION: "forward" or "forward + backward". torch is imported and the GPU in use when the clock starts.
"""

from __future__ import annotations

import os
import sys
import time


def main(cache: str, direction: str, backend: str) -> None:
    os.environ["TRITON_CACHE_DIR"] = cache  # before anything imports Triton

    import torch

    import tilewise

    q, k, v, do = (torch.randn(1, 16, 1024, 128, device="cuda", dtype=torch.bfloat16) for _ in range(4))
    inputs = [t.requires_grad_("backward" in direction) for t in (q, k, v)]
    torch.cuda.synchronize()
    start = time.perf_counter()
    o = tilewise.attention(*inputs, mask=tilewise.causal, backend=backend)
    if "backward" in direction:
        torch.autograd.grad(o, inputs, do)
    torch.cuda.synchronize()
    print(f"{time.perf_counter() - start:.3f}")


if __name__ == "__main__":
    main(*sys.argv[1:])
