"""Fill in what a page includes by reference: `python -m docs.include` renews docs/*.md, `--check` says what is stale.

    <!-- code: FILE::NAME -->                         a function, class or Class.method, without its docstring
    <!-- code: FILE::NAME from `TEXT` to `TEXT` -->   of it, the lines from the first that has one text to the next that
    <!-- /code -->                                    has the other; either may be left out
    <!-- numbers: NAME -->                            the two lines of a table's head stay; then `numbers.TABLES[NAME]`
    <!-- /numbers -->

A test holds that nothing is stale, so that code and line numbers on a page are those of the files.
"""

from __future__ import annotations

import argparse
import ast
import re
import textwrap
from pathlib import Path

from .numbers import TABLES

ROOT = Path(__file__).resolve().parent.parent
CODE = re.compile(
    r"^(<!-- code: (\S+)::(\S+)(?: from `(.+?)`)?(?: to `(.+?)`)? -->\n).*?^(<!-- /code -->)$", re.DOTALL | re.MULTILINE
)
NUMBERS = re.compile(
    r"^(<!-- numbers: (\w+) -->\n\|[^\n]*\n\|[^\n]*\n).*?^(<!-- /numbers -->)$", re.DOTALL | re.MULTILINE
)
FOR_TOOLS = re.compile(r" +# (noqa: \w+|fmt: skip)")  # comments that tell a reader nothing


def renewed(text: str) -> str:
    """The page with each of its blocks filled in anew. ValueError for a name or a text that is not there."""
    text = CODE.sub(lambda block: block[1] + code(*block.group(2, 3, 4, 5)) + block[6], text)
    return NUMBERS.sub(lambda block: block[1] + rows(TABLES[block[2]]()) + block[3], text)


def code(file: str, name: str, start: str | None, end: str | None) -> str:
    """A link to the lines, and the lines."""
    source = (ROOT / file).read_text()
    lines = source.splitlines()
    node = definition(ast.parse(source), name)
    first = min([node.lineno, *(decorator.lineno for decorator in node.decorator_list)])
    last = node.end_lineno or first
    if start is not None:
        first = holding(lines, start, first, last, f"{file}::{name}")
    if end is not None:
        last = holding(lines, end, first, last, f"{file}::{name}")
    hidden = docstring(node)
    kept = [FOR_TOOLS.sub("", lines[at - 1]) for at in range(first, last + 1) if at not in hidden]
    block = textwrap.dedent("\n".join(kept)).rstrip()
    return f"[`{file}`, {first}-{last}](../{file}#L{first}-L{last})\n\n```python\n{block}\n```\n\n"


Definition = ast.FunctionDef | ast.ClassDef


def definition(tree: ast.AST, name: str) -> Definition:
    """The function or class of a dotted name."""
    node = tree
    for part in name.split("."):
        found = [x for x in ast.iter_child_nodes(node) if isinstance(x, Definition) and x.name == part]
        if not found:
            raise ValueError(f"there is no {part} of {name}")
        node = found[0]
    assert isinstance(node, Definition)
    return node


def docstring(node: Definition) -> range:
    """The numbers of its lines."""
    if ast.get_docstring(node) is None:
        return range(0)
    return range(node.body[0].lineno, (node.body[0].end_lineno or 0) + 1)


def holding(lines: list[str], text: str, first: int, last: int, where: str) -> int:
    """The number of the first of the lines [first, last] that holds the text."""
    for at in range(first, last + 1):
        if text in lines[at - 1]:
            return at
    raise ValueError(f"no line of {where} from {first} on holds {text!r}")


def rows(table: list[list[str]]) -> str:
    return "".join(f"| {' | '.join(row)} |\n" for row in table)


def main() -> int:
    parser = argparse.ArgumentParser(description="Fill in what docs/*.md include by reference.")
    parser.add_argument("--check", action="store_true", help="write nothing; exit status 1 if a page is stale")
    check = parser.parse_args().check
    stale = 0
    for page in sorted((ROOT / "docs").glob("*.md")):
        before = page.read_text()
        after = renewed(before)
        if after != before:
            stale = 1
            print(f"{page.relative_to(ROOT)} {'is stale' if check else 'renewed'}")
            if not check:
                page.write_text(after)
    return stale if check else 0


if __name__ == "__main__":
    raise SystemExit(main())
