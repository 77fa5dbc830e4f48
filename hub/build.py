"""The package in the layout of Hugging Face `kernels`: `python -m hub.build [FOLDER]`, or `make hub`.

`FOLDER/torch-universal/` is what is uploaded as `build/torch-universal/`: Python only, for every device. `kernels`
imports it under a name of its own, beside other versions and beside tilewise itself. So nothing there may ask for a
module called tilewise, or name an operator as the installed package does: both are rewritten here, and a test looks for
what is left. Its functions are tilewise's and flash_attn's; transformers finds the latter by their names.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import re
import shutil
from pathlib import Path

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "tilewise"
VARIANT = "torch-universal"
# What runs on top of the package, or needs more than torch.
LEFT_OUT = (
    "cli.py", "report/", "examples/", "integrations/transformers", "integrations/diffusers",
)  # fmt: skip
EXPORTS = """
from . import nn
from .integrations import flash_attn
from .integrations.flash_attn import *

__all__ = [*__all__, *(name for name in flash_attn.__all__ if name.startswith("flash_attn_")), "flash_attn", "nn"]
"""
VARIANT_INIT = '''"""tilewise, for `kernels`."""

from .tilewise import *
from .tilewise import __all__, __version__
'''


def sources() -> dict[str, str]:
    """The files of the package that go along, by their paths within it."""
    paths = (path.relative_to(PACKAGE).as_posix() for path in sorted(PACKAGE.rglob("*.py")))
    return {path: (PACKAGE / path).read_text() for path in paths if not path.startswith(LEFT_OUT)}


def unique_name(files: dict[str, str]) -> str:
    """A module's name that no other state of the code has."""
    digest = hashlib.sha256("".join(f"{path}\0{text}\0" for path, text in files.items()).encode()).hexdigest()
    return f"_tilewise_universal_{digest[:12]}"


def relocatable(text: str, name: str) -> str:
    """A file's text, whatever its package is called: paths of modules relative to it, operators in a namespace `name`.

    >>> relocatable('BACKENDS = {"tiled": "tilewise.algorithm.tiled"}', "_t")
    'BACKENDS = {"tiled": __package__ + ".algorithm.tiled"}'
    >>> relocatable('@torch.library.custom_op("tilewise::forward", mutates_args=())', "_t")
    '@torch.library.custom_op("_t::forward", mutates_args=())'
    """
    text = re.sub(r'"tilewise((?:\.\w+)+)"', r'__package__ + "\1"', text)
    return text.replace('"tilewise::', f'"{name}::')


def build(folder: Path) -> Path:
    """Writes the layout into `folder`, in place of an older one. Returns the variant's folder."""
    variant = folder / VARIANT
    shutil.rmtree(variant, ignore_errors=True)
    files = sources()
    name = unique_name(files)
    for path, text in files.items():
        target = variant / "tilewise" / path
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text(relocatable(text, name) + (EXPORTS if path == "__init__.py" else ""))
    (variant / "__init__.py").write_text(VARIANT_INIT)
    # "cuda": the loader wants one backend named; a universal variant is taken on all.
    metadata = {
        "name": "tilewise", "id": name, "version": 1, "license": "Apache-2.0", "python-depends": [],
        "backend": {"type": "cuda"},
    }  # fmt: skip
    (variant / "metadata.json").write_text(json.dumps(metadata, indent=2) + "\n")
    return variant


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", nargs="?", type=Path, default=ROOT / "build")
    print(build(parser.parse_args().folder))
