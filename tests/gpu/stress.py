"""`python -m tests.gpu.stress --seconds 60`: the same calls again and again while other processes keep the GPU busy.

A buffer that is handed back too early is overwritten only when the one who fills it comes first: seldom, and more
often where programs are held up in odd places. So beside this process others run attention and copies of all sizes on
the same GPU, and each result is compared with the first: o, lse, dK and dV bit for bit; dQ of the fused backward, whose
sums have no fixed order, by the norm of each 64 rows' difference. Exit code 1 if any differs, or another process died.
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

DEVICE = "cuda"
What = tuple[int, int, Band, bool | None]  # head size, tokens, mask, deterministic backward; None: forward alone
CALLS: list[What] = [
    *((d, n, mask, backward) for d in (64, 128) for n in (512, 640, 1024) for mask in (Band(), causal)
      for backward in (None, False)),
    (64, 4096, causal, False), (128, 4096, causal, False), (64, 1024, causal, True), (128, 1024, causal, True),
    (96, 1024, causal, False), (192, 1024, causal, None), (256, 1024, causal, False), (64, 300, Band(100, 0), False),
]  # fmt: skip
CLOSE = 1e-3  # of the norm of 64 rows of dQ: what rounding leaves of another order is less, a wrong block some tenths


def made(d: int, n: int, mask: Band, backward: bool | None) -> Callable[[], dict[str, Tensor]]:
    """A call that gives its results by name; every tile of it has neighbours of other sequences and heads."""
    make = torch.Generator(device=DEVICE).manual_seed(d + n)
    batch, heads = max(1, 8192 // n), 8
    q, k, v, do = (torch.randn(batch, heads, n, d, generator=make, device=DEVICE).to(torch.bfloat16) for _ in range(4))

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
    block = torch.empty(r.choice((1, 16, 64)) << 20, dtype=torch.uint8, device=DEVICE)
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
    calls = {what: made(*what) for what in CALLS}
    first = {what: call() for what, call in calls.items()}
    torch.cuda.synchronize()
    print(f"{len(calls)} calls are compiled", flush=True)
    others = [context.Process(target=busy, args=(n, stop), daemon=True) for n in range(args.others)]
    for other in others:
        other.start()
    count: Counter[What] = Counter()
    wrong = {what: torch.zeros(len(results), dtype=torch.int64, device=DEVICE) for what, results in first.items()}
    begin = time.monotonic()
    for rounds in itertools.count(1):  # noqa: B007
        for what, call in calls.items():
            d, _, _, backward = what
            for _ in range(10):
                wrong[what] += differing(first[what], call(), ordered=backward is not False or d > 128)
            count[what] += 10
        torch.cuda.synchronize()
        if time.monotonic() - begin > args.seconds:
            break
    dead = sum(not other.is_alive() for other in others)
    stop.set()
    bad = 0
    for what, numbers in wrong.items():
        found = {result: n for result, n in zip(first[what], numbers.tolist(), strict=True) if n}
        bad += max(found.values(), default=0)
        print(f"{what}: {count[what]} calls, {found or 'none differs'}")
    print(f"{count.total()} calls in {rounds} rounds beside {args.others} processes ({dead} died): {bad} differ")
    for other in others:
        other.join(20)
    return 1 if bad or dead else 0


if __name__ == "__main__":
    sys.exit(main())
