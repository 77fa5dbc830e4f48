"""`python -m tests.gpu.stress --seconds 60`: the same calls again and again while other processes keep the GPU busy.

A buffer that is handed back too early is overwritten only when the one who fills it comes first: seldom, and more
often where programs are held up in odd places. So beside this process others run attention and copies of all sizes on
the same GPU, and each result is compared with the first: o, lse, dK and dV bit for bit; dQ of the fused backward, whose
sums have no fixed order, by the norm of each 64 rows' difference. Exit code 1 if any differs.
"""

from __future__ import annotations

import argparse
import itertools
import multiprocessing as mp
import random
import sys
import time
from collections import Counter
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

import tilewise
from tilewise import Band, causal

# head size, tokens, mask, deterministic backward; None: forward alone
CALLS: list[tuple[int, int, Band, bool | None]] = [
    *((d, n, mask, backward) for d in (64, 128) for n in (512, 640, 1024) for mask in (Band(), causal)
      for backward in (None, False)),
    (64, 4096, causal, False), (128, 4096, causal, False), (64, 1024, causal, True), (128, 1024, causal, True),
    (96, 1024, causal, False), (192, 1024, causal, None), (256, 1024, causal, False), (64, 300, Band(100, 0), False),
]  # fmt: skip
CLOSE = (
    1e-3  # of 64 rows of dQ: sums in another order differ by 1e-6 of it before rounding, a wrong block by some tenths
)


def made(d: int, n: int, mask: Band, backward: bool | None, device: str = "cuda") -> Callable[[], dict[str, Tensor]]:
    """A call that gives its results by name; every tile of it has neighbours of other sequences and heads."""
    make = torch.Generator(device=device).manual_seed(d + n)
    batch, heads = max(1, 8192 // n), 8
    q, k, v, do = (torch.randn(batch, heads, n, d, generator=make, device=device).to(torch.bfloat16) for _ in range(4))

    def call() -> dict[str, Tensor]:
        leaves = [x.detach().requires_grad_(backward is not None) for x in (q, k, v)]
        o, lse = tilewise.attention(*leaves, mask=mask, return_lse=True, deterministic=bool(backward))
        if backward is None:
            return {"o": o, "lse": lse}
        return dict(zip(("dq", "dk", "dv"), torch.autograd.grad(o, leaves, do), strict=True))

    return call


def differing(first: dict[str, Tensor], then: dict[str, Tensor], ordered: bool) -> Tensor:
    """Of each result, in its order, whether it differs; nothing is waited for."""
    found = []
    for name, x in first.items():
        y = then[name]
        if name != "dq" or ordered:
            found.append((x != y).any())
            continue
        rows = x.shape[2] // 64 * 64  # the last ones, fewer than 64, belong to the last of these
        parts = [t.float().flatten(0, 1) for t in (x, x - y)]
        size, error = (
            torch.stack([p[:, :rows].unflatten(1, (-1, 64)).norm(dim=(2, 3)).amax(),
                         p[:, rows:].norm(dim=(1, 2)).amax() if rows < x.shape[2] else p.new_zeros(())])
            for p in parts
        )  # fmt: skip
        found.append((~(error <= CLOSE * size.clamp(min=1e-30))).any())
    return torch.stack(found)


def busy(seed: int, stop: Any) -> None:
    """Attention and copies of random sizes, until told to stop."""
    r = random.Random(seed)
    calls = [made(*r.choice(CALLS)) for _ in range(3)]
    block = torch.empty(r.choice((1, 16, 64)) << 20, dtype=torch.uint8, device="cuda")
    while not stop.is_set():
        for _ in range(r.randint(1, 20)):
            r.choice(calls)()
        block.copy_(block.flip(0)) if r.random() < 0.3 else None
        torch.cuda.synchronize()
        time.sleep(r.random() * 0.002)


def main() -> int:
    parser = argparse.ArgumentParser(prog="tests.gpu.stress", description=__doc__)
    parser.add_argument("--seconds", type=float, default=60.0, help="of calls; compiling comes before")
    parser.add_argument("--others", type=int, default=14, help="processes beside this one")
    args = parser.parse_args()
    context = mp.get_context("spawn")
    stop = context.Event()
    calls = {str(call): (made(*call), call) for call in CALLS}
    first = {name: call() for name, (call, _) in calls.items()}
    torch.cuda.synchronize()
    print(f"{len(calls)} calls are compiled", flush=True)
    others = [context.Process(target=busy, args=(n, stop), daemon=True) for n in range(args.others)]
    for other in others:
        other.start()
    count: Counter[str] = Counter()
    wrong = {name: torch.zeros(len(results), dtype=torch.int64, device="cuda") for name, results in first.items()}
    begin = time.monotonic()
    for rounds in itertools.count(1):  # noqa: B007
        for name, (call, what) in calls.items():
            for _ in range(10):
                wrong[name] += differing(first[name], call(), ordered=what[3] is not False or what[0] > 128)
            count[name] += 10
        torch.cuda.synchronize()
        if time.monotonic() - begin > args.seconds:
            break
    stop.set()
    bad = 0
    for name, numbers in wrong.items():
        found = {result: n for result, n in zip(first[name], numbers.tolist(), strict=True) if n}
        bad += max(found.values(), default=0)
        print(f"{name}: {count[name]} calls, {found or 'none differs'}")
    print(f"{count.total()} calls in {rounds} rounds beside {args.others} processes: {bad} differ")
    for other in others:
        other.join(20)
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
