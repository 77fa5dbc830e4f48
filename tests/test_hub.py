"""The layout for Hugging Face kernels: it loads under another name, beside the package or without it."""

from __future__ import annotations

import ast
import doctest
import importlib.util
import inspect
import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from hub import build

ALLOWED = sys.stdlib_module_names | {"torch", "triton"}


@pytest.fixture(scope="module")
def variant(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build.build(tmp_path_factory.mktemp("hub") / "build")


def test_imports_are_relative(variant: Path) -> None:
    files = sorted(variant.rglob("*.py"))
    assert len(files) > 30
    for path in files:
        for node in ast.walk(ast.parse(path.read_text())):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            if isinstance(node, ast.ImportFrom) and node.level == 0:
                names = [node.module or ""]
            assert {name.partition(".")[0] for name in names} <= ALLOWED, path
            if isinstance(node, ast.Constant) and isinstance(node.value, str):  # no name of a module, or of an operator
                assert not re.fullmatch(r"tilewise(\.\w+)+|tilewise::\w+", node.value), (path, node.value)


def test_examples_of_what_is_rewritten() -> None:
    assert doctest.testmod(build) == (0, 2)


def test_metadata(variant: Path) -> None:
    data = json.loads((variant / "metadata.json").read_text())
    assert re.fullmatch("_tilewise_universal_[0-9a-f]{12}", data["id"])
    assert data["name"] == "tilewise"
    assert data["python-depends"] == []
    files = build.sources()
    assert build.unique_name(files) == data["id"]
    assert build.unique_name(files | {"api.py": files["api.py"] + "\n"}) != data["id"]


def used(variant: Path) -> None:
    """Loads it as `kernels` does, and calls what it has."""
    name = json.loads((variant / "metadata.json").read_text())["id"]
    spec = importlib.util.spec_from_file_location(name, variant / "__init__.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    q, k, v = torch.randn(3, 1, 2, 9, 8, requires_grad=True)
    expected = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
    heads_last = (x.transpose(1, 2) for x in (q, k, v))
    for found in (
        module.attention(q, k, v, mask=module.causal),
        module.flash_attn_func(*heads_last, causal=True).transpose(1, 2),
    ):
        torch.testing.assert_close(found, expected)
        found.sum().backward()
    assert str(getattr(torch.ops, name).forward.default) == f"{name}.forward.default"  # under no other's name
    assert "tiled: chosen" in module.explain(module.Problem.of(q, k, v)[0])
    assert all(hasattr(module, public) for public in module.__all__)


def test_it_loads_beside_the_package(variant: Path) -> None:
    used(variant)


def test_it_loads_where_there_is_no_package(variant: Path) -> None:
    program = (
        "import importlib.util, json, sys\nfrom pathlib import Path\nsys.modules['tilewise'] = None\n"
        f"import torch\ntorch.set_num_threads(1)\n{inspect.getsource(used)}\nused(Path({str(variant)!r}))"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False, cwd=variant)
    assert done.returncode == 0, done.stderr


def test_the_library_takes_it(variant: Path) -> None:
    kernels = pytest.importorskip("kernels", reason="pip install kernels")
    module = kernels.get_local_kernel(variant.parent.parent)
    assert module.__name__.startswith("_tilewise_universal_")


def test_it_replaces_what_was_there(tmp_path: Path) -> None:
    old = tmp_path / build.VARIANT / "tilewise" / "gone.py"
    old.parent.mkdir(parents=True)
    old.write_text("")
    assert (build.build(tmp_path) / "tilewise" / "api.py").exists()
    assert not old.exists()
