"""A dozen small cases a backend for compute-sanitizer, which looks at every address that a kernel touches.

    compute-sanitizer --tool memcheck --error-exitcode 1 python tests/gpu/sanitize.py [triton | hopper]

PyTorch's cache of memory is off: in it an address past a tensor's end would still be allocated.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

os.environ["PYTORCH_NO_CUDA_MEMORY_CACHING"] = "1"
sys.path[:0] = [str(Path(__file__).parents[2]), str(Path(__file__).parents[1]), str(Path(__file__).parent)]

import torch  # noqa: E402
from cases import Case  # noqa: E402
from close import assert_close  # noqa: E402
from where import BACKEND, DEVICE, moved  # noqa: E402

from tilewise import Band, causal  # noqa: E402

F16, BF16, F32 = torch.float16, torch.bfloat16, torch.float32
ODD = {"heads": 4, "q_len": 67, "k_len": 131, "dim": 40, "v_dim": 24}
CASES = {
    "causal": Case(dtype=BF16, band=causal, **ODD),
    "one row": Case(dtype=F16, q_len=1, k_len=129, dim=3, v_dim=1),
    "window": Case(dtype=F16, band=Band(20, -3, "top_left"), batch=2, **ODD),
    "fp32": Case(band=causal, **ODD),
    "boolean": Case(dtype=BF16, mask="bool", mask_dims="hqk", **ODD),
    "blocks": Case(dtype=BF16, mask="blocks", mask_dims="h", band=causal, **(ODD | {"q_len": 200, "k_len": 300})),
    "bias": Case(dtype=F16, bias_dims="hqk", bias_layout="last", **ODD),
    "shared bias": Case(dtype=BF16, batch=2, bias_dims="hk", slopes="bh", sink=F32, **ODD),
    "dropout": Case(dtype=BF16, dropout_p=0.3, softcap=5.0, **ODD),
    "packed": Case(
        dtype=BF16, batch=4, heads=4, q_len=135, k_len=140, cu_q=(0, 50, 50, 51, 130), cu_k=(0, 0, 7, 70, 133),
        band=causal, garbage=True,
    ),
    "lengths": Case(dtype=F16, batch=3, q_lens=(67, 0, 5), k_lens=(3, 131, 0), garbage=True, band=causal, **ODD),
    "strides": Case(dtype=BF16, layout="gaps", do_layout="offset", **ODD),
    "wide": Case(dtype=BF16, q_len=33, k_len=40, dim=300, v_dim=257),
    "empty": Case(dtype=BF16, q_len=5, k_len=0),
}  # fmt: skip
RAGGED = {"dtype": BF16, "heads": 4, "kv_heads": 2, "q_len": 197, "k_len": 331, "band": causal}
HOPPER = {
    **{f"{d}": Case(dim=d, v_dim=d, **RAGGED) for d in (64, 96, 128, 192, 256)},
    "192/128": Case(dim=192, v_dim=128, **RAGGED),
    "narrow": Case(dim=40, v_dim=24, **RAGGED | {"dtype": F16, "band": Band(70, -3, "top_left")}),
    "one row": Case(dim=64, v_dim=64, **RAGGED | {"q_len": 1, "k_len": 129}),
    "blocks": Case(dim=64, v_dim=64, mask="blocks", mask_dims="h", **RAGGED),
    "packed": Case(
        dim=128, v_dim=128, batch=4, cu_q=(0, 50, 50, 151, 190), cu_k=(0, 0, 7, 130, 303), garbage=True, **RAGGED,
    ),
    "lengths": Case(dim=64, v_dim=64, batch=3, q_lens=(197, 0, 5), k_lens=(3, 331, 0), garbage=True, **RAGGED),
    "dressed": Case(dim=128, v_dim=128, softcap=5.0, sink=F32, lse_grad=True, **RAGGED),
    "dropout": Case(dim=128, v_dim=128, dropout_p=0.3, **RAGGED),
}  # fmt: skip


def main(backend: str = BACKEND) -> None:
    for name, case in (HOPPER if backend == "hopper" else CASES).items():
        inputs = moved(case.build())
        for deterministic in (False, True):
            got = case.run(backend, inputs, deterministic=deterministic)
            assert_close(got, **inputs)
        if DEVICE == "cuda":
            torch.cuda.synchronize()
        print(name, "ok", flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
