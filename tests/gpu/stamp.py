"""The stamp of a passed GPU run: CI has no GPU, so it asks that the code is the code that passed there.

The hash is of syntax trees without docstrings, comments and positions: rewording changes nothing.
"""

from __future__ import annotations

import ast
import datetime
import fcntl
import hashlib
import json
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
STAMP = ROOT / "bench" / "results" / "gpu_tests.json"
RENEW = "run `python -m tests.gpu` on a machine with an NVIDIA GPU and commit bench/results/gpu_tests.json"


def sources(root: Path = ROOT) -> list[Path]:
    """What the GPU tests vouch for."""
    package = root / "tilewise"
    return [
        *sorted((package / "kernels").rglob("*.py")),
        *(package / f"{name}.py" for name in ("autograd", "dispatch", "mask")),
    ]


def code_hash(root: Path = ROOT) -> str:
    """The same on every Python version that the package runs on."""
    found = hashlib.sha256()
    for path in sources(root):
        tree = _without_docstrings(ast.parse(path.read_text()))
        found.update(f"{path.relative_to(root).as_posix()}\n{_canonical(tree)}\n".encode())
    return found.hexdigest()


def _without_docstrings(tree: ast.AST) -> ast.AST:
    for node in ast.walk(tree):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            first = node.body[0] if node.body else None
            if (
                isinstance(first, ast.Expr)
                and isinstance(first.value, ast.Constant)
                and isinstance(first.value.value, str)
            ):
                node.body = node.body[1:]
    return tree


def _canonical(node: Any) -> str:
    """Like ast.dump, without the fields that are empty: which of them there are depends on Python's version."""
    if isinstance(node, ast.AST):
        given = ((name, getattr(node, name, None)) for name in node._fields if name != "kind")
        return (
            f"{type(node).__name__}({', '.join(f'{name}={_canonical(x)}' for name, x in given if x not in (None, []))})"
        )
    if isinstance(node, list):
        return f"[{', '.join(map(_canonical, node))}]"
    return ascii(node)


def write(counts: dict[str, int], failed: list[str]) -> None:
    """After a run of all tests: what it found, on what. Before one in parts: all have failed yet."""
    import torch
    import triton

    _save({
        "hash": code_hash(), "torch": torch.__version__, "triton": triton.__version__,
        "device": torch.cuda.get_device_name(), "counts": counts | {"failed": len(failed)}, "failed": failed,
        "date": datetime.datetime.now(datetime.timezone.utc).date().isoformat(),
    })  # fmt: skip


def repair(
    passed: set[str], skipped: set[str], there: set[str], files: set[str], stamp: Path = STAMP, root: Path = ROOT
) -> int:
    """After a run of some tests on the same code: those that passed, or are there no more, are off the failed ones.

    So a test that was wrong itself is put right without a second run of all, and a run of all may be made in parts, of
    several processes at once. there: the tests of those files that were collected whole, `files`; of others nothing is
    known. Returns how many failed ones are left.
    """
    with stamp.with_suffix(".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        data = json.loads(stamp.read_text()) if stamp.exists() else {}
        if data.get("hash") != code_hash(root) or not data["failed"]:
            return len(data.get("failed", []))
        failed, counts = set(data["failed"]), data["counts"]
        gone = {name for name in failed if name.partition("::")[0] in files and name not in there}
        counts["passed"] = counts.get("passed", 0) + len(passed & failed)
        counts["skipped"] = counts.get("skipped", 0) + len(skipped & failed)
        data["failed"] = [name for name in data["failed"] if name not in passed | skipped | gone]
        counts["failed"] = len(data["failed"])
        _save(data, stamp)
    return len(data["failed"])


def _save(data: dict[str, Any], stamp: Path = STAMP) -> None:
    stamp.write_text(json.dumps(data, indent=2) + "\n")


def stale(stamp: Path = STAMP, root: Path = ROOT) -> str | None:
    """Why the stamp does not vouch for the code as it is; None if it does."""
    if not stamp.exists():
        return f"{stamp.name} is not there: the kernels have not passed on a GPU. To make it, {RENEW}"
    data = json.loads(stamp.read_text())
    if data["hash"] != (now := code_hash(root)):
        return (
            f"kernels/, autograd.py, dispatch.py or mask.py are not what passed on {data['device']} on {data['date']} "
            f"(their hash is {now[:12]}, the stamp's {data['hash'][:12]}). To renew it, {RENEW}"
        )
    if data["counts"].get("failed") or not data["counts"].get("passed"):
        return f"{stamp.name} counts {data['counts']}. To renew it, {RENEW}"
    return None
