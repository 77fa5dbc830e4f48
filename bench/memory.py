"""Peak memory of forward and backward at d = 64, one head, beyond the inputs.

`python -m bench.memory SEQLEN` prints MiB; Linux only (it resets and reads the kernel's own high-water mark).
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch

import tilewise


def main(seq: int) -> None:
    x = torch.randn(1, 1, 256, 64, requires_grad=True)
    tilewise.attention(x, x, x).sum().backward()  # what the first call loads is not the algorithm's
    q, k, v = (torch.randn(1, 1, seq, 64, requires_grad=True) for _ in range(3))
    do = torch.randn(1, 1, seq, 64)
    Path("/proc/self/clear_refs").write_text("5")
    before = high_water()
    torch.autograd.grad(tilewise.attention(q, k, v), (q, k, v), do)
    print(f"{high_water() - before:.1f}")


def high_water() -> float:
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmHWM"))
    return int(line.split()[1]) / 1024


if __name__ == "__main__":
    main(int(sys.argv[1]))
