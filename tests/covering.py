"""Few cases for many options: each pair of option values together in some case, instead of all combinations.

Most faults need one option or two at once; a set of cases in which every pair of values occurs (a pairwise covering
array) finds those with a hundredth of the cases.
"""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Callable, Hashable, Mapping, Sequence
from itertools import combinations

from cases import Case

from tilewise import causal

Options = Mapping[str, Hashable]
Pair = tuple[tuple[str, Hashable], tuple[str, Hashable]]


def pairs(options: Options) -> list[Pair]:
    """Every two of the options with their values."""
    return list(combinations(options.items(), 2))


def cover(rows: Sequence[Options], times: int, cost: Callable[[int], float] = lambda n: 1.0) -> list[int]:
    """Indices of few cheap rows that hold each pair of values `times` times (or as often as all rows together do).

    Greedy: always the row that adds the most pairs that are still missing per cost. What a row adds only shrinks as
    others are taken, so a row whose last known gain is the largest, and still is when counted anew, is the best.
    """
    held = [pairs(row) for row in rows]
    missing = {pair: min(times, n) for pair, n in Counter(pair for row in held for pair in row).items()}
    heap = [(-len(row) / cost(n), n) for n, row in enumerate(held)]
    heapq.heapify(heap)
    taken: list[int] = []
    while any(missing.values()):
        _, n = heapq.heappop(heap)
        gain = sum(missing[pair] > 0 for pair in held[n]) / cost(n)
        if heap and gain < -heap[0][0]:
            heapq.heappush(heap, (-gain, n))
            continue
        taken.append(n)
        for pair in held[n]:
            missing[pair] = max(missing[pair] - 1, 0)
    return taken


def cover_product(options: Mapping[str, Sequence[Hashable]], tries: int = 20) -> list[dict[str, Hashable]]:
    """Few rows, one value an option, in which each two values of different options meet. The same at every call.

    Greedy, row by row: begins with a pair that is missing, then gives each option in turn the value that adds most; the
    best of `tries` orders of the options.
    """
    names = list(options)
    missing = {
        pair for a, b in combinations(names, 2) for x in options[a] for y in options[b] for pair in [((a, x), (b, y))]
    }
    rows = []
    while missing:
        seed = min(missing, key=repr)
        best: tuple[int, dict[str, Hashable]] = (-1, {})
        for turn in range(tries):
            row: dict[str, Hashable] = dict(seed)
            rest = [name for name in names if name not in row]
            shift = (turn * 7 + len(rows)) % max(len(rest), 1)
            for name in rest[shift:] + rest[:shift]:
                values = options[name]
                start = (turn + len(rows)) % len(values)
                row[name] = max(
                    [*values[start:], *values[:start]],
                    key=lambda x: sum(p in missing for p in _with(row, name, x, names)),
                )
            row = {name: row[name] for name in names}
            best = max(best, (sum(pair in missing for pair in pairs(row)), row), key=lambda found: found[0])
        rows.append(best[1])
        missing.difference_update(pairs(best[1]))
    return rows


def _with(row: Options, name: str, x: Hashable, names: list[str]) -> list[Pair]:
    """The pairs that (name, x) forms with what the row has, each in the order of `names`."""
    at = names.index(name)
    return [((name, x), pair) if at < names.index(pair[0]) else (pair, (name, x)) for pair in row.items()]


def padded(dim: int) -> int:
    """The head size that a kernel computes with: a power of two, at least 16."""
    return max(16, 1 << (dim - 1).bit_length())


def specialisation(case: Case) -> dict[str, Hashable]:
    """What a kernel may have been compiled for. Cases that agree in it share their binaries, or nearly."""
    return {
        "dtype": case.dtype, "d": padded(case.dim), "d_v": padded(case.v_dim), "band": not case.band.is_full,
        "mask": case.mask, "bias": case.bias_dims, "bias_dtype": case.bias_dims is not None and case.bias_dtype,
        "alibi": case.slopes is not None, "softcap": case.softcap > 0, "sink": case.sink is not None,
        "dropout": case.dropout_p > 0, "packed": case.cu_q is not None,
        "lens": (case.q_lens is not None, case.k_lens is not None), "grad": case.grad,
        "aligned": "offset" not in (case.layout, case.do_layout),
    }  # fmt: skip


def options(case: Case) -> dict[str, Hashable]:
    """Everything a case can be told apart by in kind, whether kernels are compiled for it or not."""
    band = "full" if case.band.is_full else "causal" if case.band == causal else "band"
    dims = case.bias_dims
    return {
        "dtype": case.dtype, "dims": "equal" if case.dim == case.v_dim else "unlike",
        "whole dims": case.dim == padded(case.dim), "band": band, "align": case.band.align,
        "mask": case.mask, "bias": None if dims is None else "".join(letter for letter in "qk" if letter in dims),
        "bias_batch": None if dims is None else "b" in dims, "bias_heads": None if dims is None else "h" in dims,
        "slopes": case.slopes, "sink": case.sink is not None,
        "softcap": case.softcap > 0, "dropout": case.dropout_p > 0, "scale": _sign(case.scale),
        "layout": "dense" if case.cu_q is None else "packed" if case.cu_k is None else "packed, own keys",
        "lens": (case.q_lens is not None, case.k_lens is not None), "garbage": case.garbage,
        "groups": case.heads > case.kv_heads, "origin": any(case.origin),
        "grad": "none" if not case.grad else "all" if not case.frozen else "some", "lse_grad": case.lse_grad,
        "strides": case.layout, "do_strides": case.do_layout,
        "longer": (case.q_len > case.k_len) - (case.q_len < case.k_len),
    }  # fmt: skip


def excluded(pair: Pair) -> bool:
    """Whether the sampler never gives these two of `options` together, because one rules the other out."""
    (a, x), (b, y) = pair
    found = {a: x, b: y}

    def both(**wanted: object) -> bool:
        return all(name in found and found[name] == value for name, value in wanted.items())

    return (
        (a.startswith("bias") and b.startswith("bias") and (x is None) != (y is None))
        or both(bias="q", bias_batch=True)  # not among the sampler's shapes
        or both(bias="q", bias_heads=True)
        or both(band="causal", align="top_left")
        or both(layout="packed", longer=1)  # one cu_seqlens for queries and keys
        or both(layout="packed", longer=-1)
        or both(grad="none", lse_grad=False)
        or (found.get("grad") == "none" and found.get("do_strides", "contiguous") != "contiguous")
        or both(layout="dense", lens=(False, False), garbage=True)
    )


def _sign(scale: float | None) -> str:
    return "default" if scale is None else "negative" if scale < 0 else "zero" if scale == 0 else "positive"


def tile_steps(case: Case, tile: int = 32) -> int:
    """Pairs of tiles that a kernel visits where nothing hides any: what a case costs in an interpreter."""
    if case.cu_q is None:
        spans = [(case.q_len, case.k_len)] * case.batch
    else:
        ends = zip(case.cu_q, case.cu_q[1:], case.cu_k or case.cu_q, (case.cu_k or case.cu_q)[1:], strict=False)
        spans = [(q_end - q_start, k_end - k_start) for q_start, q_end, k_start, k_end in ends]
    return case.heads * sum(-(-rows // tile) * -(-keys // tile) for rows, keys in spans)
