"""The tables of docs/reproduction.md: the papers' figures, and the rows that stand beside them."""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Any

from ..gpu_cases import CUDNN, FA2
from ..rows import Row
from ..tables import length, markdown, spread, timed, verdict
from .attention import STANDARD, SUBJECT, model
from .case import NO_ROOM
from .training import EAGER, SDPA, STEP

NOTHING = "*Not measured yet.*"
# FlashAttention, figure 2 (left): GFLOPs, GB to and from HBM, milliseconds, on an A100 with 40 GB.
PAPER_ATTENTION = {STANDARD: (66.6, 40.3, 41.7), "ours": (75.2, 4.4, 7.3)}
# What the paper says of a model, on A100s.
PAPER_STEPS = {
    ("GPT-2 small", 1024): "3.5x over Hugging Face (table 2)",
    ("GPT-2 medium", 1024): "3.0x over Hugging Face (table 2)",
    ("BERT-large", 512): "1.15x over Nvidia's MLPerf 1.1 (table 1)",
}
PAPER_ARENA = {"full": "2.4x, mean of the tasks (table 3)", "butterfly": "2.8x, mean of the tasks (table 3)"}
Table = Callable[[list[Row]], str]


def tables(pictures: Collection[str] = ()) -> dict[str, Table]:
    """By name; "picture NAME" is papers_NAME.png if that is among `pictures`."""
    found: dict[str, Table] = {
        "attention": attention, "lengths": lengths, "sparsity": sparsity, "steps": steps, "goals": goals, "card": card,
    }  # fmt: skip
    for name, title in (
        ("lengths", "Time and memory against the length"), ("sparsity", "Time against the share of live tiles"),
        ("flash two", "Forward and backward together, TFLOP/s against the length"),
        ("flash three", "Forward and backward, TFLOP/s against the length"),
    ):  # fmt: skip
        file = f"papers_{name.replace(' two', '2').replace(' three', '3')}.png"
        found[f"picture {name}"] = lambda rows, title=title, file=file: (
            f"![{title}](img/{file})" if file in pictures else NOTHING
        )
    return found


def card(rows: list[Row]) -> str:
    where = {f"{row.device}, torch {row.torch}, Triton {row.triton}": None for row in rows if row.device}
    return f"Measured on: {'; '.join(where)}." if where else NOTHING


def attention(rows: list[Row]) -> str:
    """A line a contestant: the paper's figures, our closed forms', and what was measured."""
    body, costs = [], model()
    measured = {(row.mask, row.peer): row for row in rows if row.subject == SUBJECT}
    memory = {(row.mask, row.peer): row for row in rows if row.subject == f"{SUBJECT} memory"}
    if not measured:
        return NOTHING
    masks = ("causal, dropout 0.1", "causal")
    for who in (STANDARD, "ours", FA2, CUDNN):
        paper = [f"{x:g}" for x in PAPER_ATTENTION[who]] if who in PAPER_ATTENTION else [""] * 3
        cost = costs.get({STANDARD: "standard", "ours": "FlashAttention-2"}.get(who, ""))
        counted = [f"{cost.flops / 1e9:.0f}", f"{cost.bytes / 1e9:.1f}"] if cost else ["", ""]
        times = [cell(measured, mask, who, "ms") for mask in masks]
        body.append([who, *paper, *counted, *times, cell(memory, masks[0], who, "GiB")])
    head = ["", "paper: GFLOPs", "HBM, GB", "ms, A100", "model: GFLOPs", "HBM, GB", "ms, dropout 0.1"]
    return markdown([*head, "ms, no dropout", "memory beyond q, k, v"], body)


def cell(found: dict[Any, Row], mask: str, who: str, unit: str) -> str:
    if who != "ours":
        return theirs(found.get((mask, who)), unit)
    row = next((row for (key, _), row in found.items() if key == mask and row.ours is not None), None)
    return timed(row.ours, unit) if row else ""


def theirs(row: Row | None, unit: str) -> str:
    if row is None:
        return ""
    if row.theirs is None:
        return "does not fit" if row.error.startswith(NO_ROOM) else f"failed: {row.error}"
    return timed(row.theirs, unit)


def lengths(rows: list[Row]) -> str:
    """A line a length: time of each, then memory of each."""
    found = {(row.subject, row.mask, row.peer, row.seq): row for row in rows if row.subject.startswith("lengths")}
    body = []
    for seq in sorted({row.seq for row in found.values() if row.seq}):
        line = [length(seq)]
        for subject, unit in (("lengths", "ms"), ("lengths memory", "GiB")):
            line += [theirs(found.get((subject, "full", peer, seq)), unit) for peer in (STANDARD, FA2)]
            for mask in ("full", "butterfly"):
                of = (row for key, row in found.items() if key[:2] == (subject, mask) and key[3] == seq)
                line.append(next((timed(row.ours, unit) for row in of if row.ours is not None), ""))
        body.append(line)
    who = [STANDARD, FA2, "ours", "ours, butterfly"]
    return markdown(["N", *who, *(f"memory: {name}" for name in who)], body) if body else NOTHING


def sparsity(rows: list[Row]) -> str:
    body = [
        [
            row.mask.removeprefix("blocks "), timed(row.ours, row.unit), timed(row.theirs, row.unit),
            f"{row.ours / row.theirs:.3f}" if row.ours and row.theirs else "", spread(row), verdict(row),
        ]
        for row in rows
        if row.subject == "sparsity"
    ]  # fmt: skip
    head = ["share of the tiles", "ours", "without a mask", "of that", "(1.15 s full + 10 us) / ours", "goal reached"]
    return markdown(head, body) if body else NOTHING


def steps(rows: list[Row]) -> str:
    """A line a model, length and mask of ours."""
    found: dict[tuple[str, str, int | None], dict[tuple[str, str], Row]] = {}
    for row in rows:
        if row.direction == STEP:
            what = next((kind for kind in ("rate", "memory") if row.subject.endswith(kind)), "")
            name = row.subject.removesuffix(what).strip()
            found.setdefault((name, row.mask, row.seq), {})[what, row.peer] = row
    body = []
    for (name, mask, seq), cells in found.items():
        line = [f"{name}, {mask}", length(seq)]
        for who in (EAGER, SDPA, "ours"):
            line.append(", ".join(filter(None, (of(cells, what, who) for what in ("", "rate", "memory")))))
        line += [spread(cells["", peer]) if ("", peer) in cells else "" for peer in (EAGER, SDPA)]
        line.append(PAPER_ARENA[mask] if "Arena" in name and seq and seq <= 4096 else PAPER_STEPS.get((name, seq), ""))
        body.append(line)
    head = ["model, mask of ours", "context", EAGER, SDPA, "ours", "eager / ours", "sdpa / ours", "paper"]
    return markdown(head, body) if body else NOTHING


def of(cells: dict[tuple[str, str], Row], what: str, who: str) -> str:
    """One figure of a step, of a peer or of ours."""
    rows = [row for (kind, peer), row in cells.items() if kind == what and who in (peer, "ours")]
    if not rows:
        return ""
    if who != "ours":
        return theirs(rows[0], rows[0].unit) if rows[0].theirs is not None or not what else ""
    return next((timed(row.ours, row.unit) for row in rows if row.ours is not None), "")


def goals(rows: list[Row]) -> str:
    body = [[row.name, row.peer, spread(row), row.goal, verdict(row)] for row in rows if row.goal]
    return markdown(["what", "beside", "ratio (least, greatest)", "goal", "reached"], body) if body else NOTHING
