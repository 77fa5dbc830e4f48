"""The project itself: what importing it costs and pulls in, which way imports run, sizes, and that its examples run."""

from __future__ import annotations

import ast
import compileall
import doctest
import importlib
import json
import pkgutil
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from gpu import stamp

import tilewise
from tilewise.kernels.triton.backend import OLDEST

PACKAGE = Path(tilewise.__file__).parent
ROOT = PACKAGE.parent
MODULES = sorted(PACKAGE.rglob("*.py"))
SDPA = torch.nn.functional.scaled_dot_product_attention


def python(program: str, folder: Path = ROOT) -> str:
    """What a program prints in a fresh process that finds the package in `folder`."""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, cwd=folder, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


def name(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


# --- importing -----------------------------------------------------------------------------------------------------


def test_import_takes_under_50_ms_beyond_torch(tmp_path: Path) -> None:
    """Of CPU time, compiled as an installation is; the best of a few: a busy machine only adds to it.

    Without the garbage collector: a look at all that torch has made takes 80 ms, and falls into our import or does not.
    """
    shutil.copytree(PACKAGE, tmp_path / "tilewise", ignore=shutil.ignore_patterns("__pycache__"))
    compileall.compile_dir(tmp_path, quiet=1)
    program = (
        "import gc, time, torch; gc.disable(); t = time.process_time(); import tilewise\n"
        "print(time.process_time() - t, tilewise.__file__)"
    )
    taken: list[float] = []
    while len(taken) < 6 and (not taken or min(taken) >= 0.05):
        seconds, file = python(program, tmp_path).split(maxsplit=1)
        assert file.startswith(str(tmp_path))
        taken.append(float(seconds))
    assert min(taken) < 0.05, taken


def test_import_pulls_in_nothing_but_itself() -> None:
    program = (
        "import sys, torch; before = set(sys.modules); import tilewise\n"
        "print(*sorted(set(sys.modules) - before))\n"
        "print(*sorted(before))"
    )
    new, before = (set(line.split()) for line in python(program).splitlines())
    foreign = {module.partition(".")[0] for module in new} - {"tilewise"} - sys.stdlib_module_names
    assert not foreign - {"torch"}
    assert not {module.partition(".")[0] for module in new | before} & {
        "triton", "matplotlib", "rich", "typer", "transformers", "diffusers",
    }  # fmt: skip
    lazy = ("algorithm", "kernels", "report", "examples", "integrations", "nn", "cli")
    assert not [module for module in new if module.startswith(tuple(f"tilewise.{part}" for part in lazy))]


# Imports run from the first of these to the last. Those of one line do not know each other, but for themselves.
LAYERS = (
    ("cli",),
    ("report",),
    ("integrations", "parallel", "examples", "nn"),
    ("__init__",),
    ("api",),
    ("cache_op",),
    ("autograd", "cache"),
    ("dispatch",),
    ("algorithm", "kernels"),
    ("problem_cached",),
    ("problem",),
    ("block_mask",),
    ("mask", "layout"),
)
RANK = {part: rank for rank, layer in enumerate(LAYERS) for part in layer}
OUTSIDE = {
    "matplotlib": {"report", "cli"}, "rich": {"report", "cli"}, "typer": {"cli"}, "triton": {"kernels"},
    "transformers": {"integrations", "examples"}, "diffusers": {"integrations"},
}  # fmt: skip


def part(path: Path) -> str:
    """ "algorithm" of tilewise/algorithm/forward.py, "api" of tilewise/api.py."""
    first = path.relative_to(PACKAGE).parts[0]
    return first.removesuffix(".py")


def imported(tree: ast.AST, path: Path) -> Iterator[tuple[str, bool]]:
    """(absolute name, when its module is imported) of each import but those for type checkers."""
    at_once = {id(node) for node in _top_level(tree)}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((alias.name, id(node) in at_once) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = [] if node.level == 0 else ["tilewise", *path.relative_to(PACKAGE).parent.parts]
            base = base[: len(base) - node.level + 1] if node.level else base
            module = [*base, *(node.module.split(".") if node.module else [])]
            if module in (["tilewise"], base) and module:
                yield from ((".".join([*module, alias.name]), id(node) in at_once) for alias in node.names)
            else:
                yield ".".join(module), id(node) in at_once


def _top_level(tree: ast.AST) -> Iterator[ast.AST]:
    """The nodes that run on import, TYPE_CHECKING blocks and functions left out."""
    for node in ast.iter_child_nodes(tree):
        type_checking = isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test)
        if not type_checking and not isinstance(node, ast.FunctionDef | ast.Lambda):
            yield node
            yield from _top_level(node)


@pytest.mark.parametrize("path", MODULES, ids=name)
def test_imports_run_one_way(path: Path) -> None:
    here = part(path)
    assert here in RANK, f"{here} has no place among the layers"
    for module, at_once in imported(ast.parse(path.read_text()), path):
        first, *rest = module.split(".")
        assert here in OUTSIDE.get(first, {here}), f"{name(path)} imports {module}"
        if first != "tilewise" or not at_once:
            continue
        there = rest[0] if rest and rest[0] in RANK else "__init__"
        assert there == here or RANK[there] > RANK[here], f"{name(path)} imports {module}"


def test_the_import_rule_sees_a_breach(tmp_path: Path) -> None:
    tree = ast.parse("from ..api import attention\nfrom . import hbm\nfrom .. import cli\ndef f():\n    import rich\n")
    found = dict(imported(tree, PACKAGE / "algorithm" / "forward.py"))
    assert found == {"tilewise.api": True, "tilewise.algorithm.hbm": True, "tilewise.cli": True, "rich": False}


# --- size ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("path", MODULES, ids=name)
def test_no_function_is_long(path: Path) -> None:
    """80 lines with its docstring, and 200 for what is compiled for a GPU."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.FunctionDef):
            kernel = any("jit" in ast.unparse(decorator) for decorator in node.decorator_list)
            lines = (node.end_lineno or 0) - node.lineno + 1
            assert lines <= (200 if kernel else 80), f"{name(path)}: {node.name} has {lines} lines"


@pytest.mark.parametrize("path", MODULES, ids=name)
def test_nothing_is_swallowed(path: Path) -> None:
    """No bare `except`, and `except Exception` only where finding out what a backend raises is the purpose."""
    handlers = [node for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.ExceptHandler)]
    broad = [
        node.lineno
        for node in handlers
        if node.type is None or ast.unparse(node.type) in ("Exception", "BaseException")
    ]
    assert not broad or name(path) == "tilewise/report/check.py", f"{name(path)}: lines {broad}"


# --- examples ------------------------------------------------------------------------------------------------------


LIBRARIES = ("transformers", "diffusers")  # what an integration needs beside torch
OF_LIBRARIES = {f"tilewise.integrations.{library}": library for library in LIBRARIES}
OF_LIBRARIES["tilewise.integrations.transformers_mask"] = "transformers"


def modules() -> list[str]:
    return ["tilewise", *(found.name for found in pkgutil.walk_packages([str(PACKAGE)], "tilewise."))]


@pytest.mark.parametrize("module", modules())
def test_docstring_examples_run(module: str) -> None:
    if module in ("tilewise.cli", "tilewise.report.tables", "tilewise.report.figures", "tilewise.report.io_figures"):
        for extra in ("typer", "rich", "matplotlib"):
            pytest.importorskip(extra)
    if module in OF_LIBRARIES:
        pytest.importorskip(OF_LIBRARIES[module])
    torch.manual_seed(0)
    failed, _ = doctest.testmod(importlib.import_module(module))
    assert failed == 0


def test_no_module_hides_a_public_name() -> None:
    """A module tilewise/x.py would take the place of a function tilewise.x as soon as it is imported."""
    parts = {part(path) for path in MODULES}
    assert not parts & {public for public in tilewise.__all__ if not public.startswith("_")}


def test_public_names_have_examples() -> None:
    for public in tilewise.__all__:
        thing = getattr(tilewise, public)
        documented = thing if callable(thing) or isinstance(thing, type) else type(thing)
        assert documented.__doc__, public
    for function in (tilewise.attention, tilewise.attention_packed, tilewise.checked, tilewise.explain):
        assert ">>>" in function.__doc__, function.__name__


def readme_examples(library: str | None = None) -> list[str]:
    """The README's Python: without a library those that need torch alone, with one its own."""
    blocks = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
    own = {name: [block for block in blocks if f"import tilewise.integrations.{name}" in block] for name in LIBRARIES}
    return own[library] if library else [block for block in blocks if not any(block in some for some in own.values())]


def run_examples(blocks: list[str]) -> None:
    assert blocks
    names: dict[str, object] = {}
    for block in blocks:
        exec(compile(block, "README.md", "exec"), names)


def test_readme_examples_run(capsys: pytest.CaptureFixture[str]) -> None:
    run_examples(readme_examples())
    assert torch.nn.functional.scaled_dot_product_attention is SDPA


@pytest.mark.parametrize("library", LIBRARIES)
def test_readme_examples_of_libraries_run(library: str) -> None:
    pytest.importorskip(library)
    run_examples(readme_examples(library))


def test_a_missing_library_is_named_and_how_to_install_it() -> None:
    """One line, whatever else is missing: nothing of the library is asked for before."""
    program = (
        f"import importlib, sys\nfor library in {LIBRARIES}:\n    sys.modules[library] = None\n"
        "    try: importlib.import_module(f'tilewise.integrations.{library}')\n"
        "    except ModuleNotFoundError as e: print(e.name, e)"
    )
    project = (ROOT / "pyproject.toml").read_text()
    for library, line in zip(LIBRARIES, python(program).splitlines(), strict=True):
        extra = {"transformers": "hf"}.get(library, library)
        assert re.search(rf'^{extra} = \["{library}>=', project, re.MULTILINE)
        assert line.startswith(f"{library} tilewise.integrations.{library} needs {library}")
        assert f"pip install 'tilewise[{extra}]'" in line


# --- what the files say --------------------------------------------------------------------------------------------


def test_one_version() -> None:
    project = (ROOT / "pyproject.toml").read_text()
    version = re.search(r'^version = "(.*)"$', project, re.MULTILINE)
    assert version
    assert version[1] == tilewise.__version__
    assert f"## {tilewise.__version__}" in (ROOT / "CHANGELOG.md").read_text()


def test_the_versions_that_are_tested_begin_with_the_oldest_that_work() -> None:
    """`make test-oldest` reads its torch from that line, and `make test-tritons` begins where the backend does."""
    project, makefile, design = ((ROOT / file).read_text() for file in ("pyproject.toml", "Makefile", "docs/design.md"))
    torch_bound = re.search(r'^dependencies = \["torch>=([0-9.]+)"\]$', project, re.MULTILINE)
    assert torch_bound
    assert f"torch from {torch_bound[1]}" in design
    tritons = re.search(r"^TRITONS := (.*)$", makefile, re.MULTILINE)
    assert tritons
    first, *_, last = tritons[1].split()
    assert first == ".".join(map(str, OLDEST))
    assert f'"triton>={first};' in project
    for page in ("docs/design.md", "CONTRIBUTING.md", "CHANGELOG.md"):
        assert f"each Triton from {first} to {last}" in (ROOT / page).read_text(), page


@pytest.mark.parametrize("page", ["README.md", "CONTRIBUTING.md"])
def test_pages_name_what_exists(page: str) -> None:
    text = (ROOT / page).read_text()
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    named = re.findall(r"`make ([a-z-]+)`", text) + re.findall(r"^make ([a-z-]+)", text, re.MULTILINE)
    assert set(named) <= targets
    for link in re.findall(r"\]\(([^)#]+)\)", text):
        assert link.startswith("http") or (ROOT / link).exists(), link


# --- the GPU's tests, which do not run here ------------------------------------------------------------------------


def test_the_kernels_are_those_that_passed_on_a_gpu() -> None:
    assert stamp.stale() is None


def test_a_run_in_parts_has_all_files() -> None:
    found = importlib.import_module("tests.gpu.__main__").collected()
    assert {test.partition("::")[0] for test in found} == {
        name(path) for path in (ROOT / "tests/gpu").glob("test_*.py")
    }


def test_the_stamp_is_of_what_runs_alone(tmp_path: Path) -> None:
    """Words about the code may change; another operator, file or backend order is stale."""
    shutil.copytree(PACKAGE, tmp_path / "tilewise", ignore=shutil.ignore_patterns("__pycache__"))
    kernel = tmp_path / "tilewise" / "kernels" / "some.py"
    kernel.parent.mkdir(exist_ok=True)

    def code(text: str) -> str:
        kernel.write_text(text)
        return stamp.code_hash(tmp_path)

    before = code('def f(x):\n    """Doubles."""\n    return 2 * x\n')
    assert code("# comments\ndef f(\n    x,\n):\n    return 2 * x  # and layout\n") == before
    assert code("def f(x):\n    return 3 * x\n") != before
    assert code("def f(x):\n    'twice'\n    return 2 * x, 'a string that is no docstring'\n") != before
    saved = tmp_path / "gpu_tests.json"
    now = code("x = 1\n")
    assert "not passed on a GPU" in (stamp.stale(saved, tmp_path) or "")
    for counts, fine in (({"passed": 5, "skipped": 1}, True), ({"passed": 5, "failed": 1}, False), ({}, False)):
        saved.write_text(json.dumps({"hash": now, "device": "H200", "date": "2026-01-01", "counts": counts}))
        assert (stamp.stale(saved, tmp_path) is None) == fine
    code("x = 2\n")
    assert "python -m tests.gpu" in (stamp.stale(saved, tmp_path) or "")
    parts = {"autograd.py", "dispatch.py", "mask.py"}
    assert parts <= {path.name for path in stamp.sources()}


def test_a_stamp_is_repaired_by_what_was_seen_to_pass(tmp_path: Path) -> None:
    kernel, saved = tmp_path / "tilewise" / "kernels" / "some.py", tmp_path / "gpu_tests.json"
    kernel.parent.mkdir(parents=True)
    for name in ("autograd", "dispatch", "mask", "kernels/some"):
        (tmp_path / "tilewise" / f"{name}.py").write_text("x = 1\n")
    failed = ["one::a", "one::b", "one::c", "one::s", "two::a"]
    saved.write_text(json.dumps({"hash": stamp.code_hash(tmp_path), "counts": {}, "failed": failed}))

    def repaired(passed: set[str], skipped: set[str], there: set[str], files: set[str]) -> tuple[list[str], dict]:
        left = stamp.repair(passed, skipped, there, files, saved, tmp_path)
        data = json.loads(saved.read_text())
        assert len(data["failed"]) == left
        return data["failed"], data["counts"]

    # One of one's tests, chosen by name: of the others nothing is known.
    counts = {"passed": 1, "skipped": 0, "failed": 4}
    assert repaired({"one::a"}, set(), {"one::a"}, set()) == (["one::b", "one::c", "one::s", "two::a"], counts)
    # All of one, in which b fails again, s is skipped, d is new, and c is there no more; nothing of two.
    counts = {"passed": 1, "skipped": 1, "failed": 2}
    there = {"one::a", "one::b", "one::s", "one::d"}
    assert repaired({"one::a", "one::d"}, {"one::s"}, there, {"one"}) == (["one::b", "two::a"], counts)
    kernel.write_text("x = 2\n")  # other code: nothing is repaired
    assert repaired({"one::b", "two::a"}, set(), {"one::b", "two::a"}, {"one", "two"}) == (["one::b", "two::a"], counts)
