"""How the site differs from the pages in the repository; mkdocs calls these (mkdocs.yml, `hooks`).

README.md is the site's first page. Links to files outside docs/ lead to copies in the site, code with numbered lines.
TeX becomes MathML while the site is built, so that a browser shows it without JavaScript and without a network.
"""

from __future__ import annotations

import html
import posixpath
import re
from pathlib import Path
from typing import Any

from latex2mathml.converter import convert
from mkdocs.structure.files import File, Files

ROOT = Path(__file__).resolve().parent.parent
LINK = re.compile(r"\]\((?![a-z]+:|#)([^)#\s]+)(#[^)\s]*)?\)")
FORMULA = re.compile(r'<(span|div) class="arithmatex">\\[(\[](.*?)\\[)\]]</\1>', re.DOTALL)
HOME = "index.md"


def in_site(path: str) -> str:
    """Where a file of the repository is in the site: both as mkdocs counts, from docs/."""
    if path == "README.md":
        return HOME
    if path.startswith("docs/"):
        return path.removeprefix("docs/")
    return f"files/{path}" if path.endswith(".md") else f"files/{path}.md"


def in_repository(page: str) -> str:
    """The other way round."""
    if page == HOME:
        return "README.md"
    if not page.startswith("files/"):
        return f"docs/{page}"
    path = page.removeprefix("files/")
    return path if (ROOT / path).is_file() else path.removesuffix(".md")


def target(link: str, path: str) -> str:
    """The file that a link on the page at `path` means."""
    return posixpath.normpath(posixpath.join(posixpath.dirname(path), link))


def on_files(files: Files, config: Any) -> Files:
    """Add the first page, and a page for each file that some page links to."""
    pending = ["README.md", *(f"docs/{file.src_uri}" for file in files.documentation_pages())]
    known = set(pending)
    while pending:
        path = pending.pop()
        text = (ROOT / path).read_text()
        if not path.endswith(".md"):
            text = f'# {path}\n\n```{path.rpartition(".")[2]} linenums="1"\n{text}```\n'
        else:
            linked = {target(link, path) for link, _ in LINK.findall(text)}
            new = {there for there in linked - known if not there.startswith("docs/") and (ROOT / there).is_file()}
            known |= new
            pending += sorted(new)
        if not path.startswith("docs/"):
            files.append(File.generated(config, in_site(path), content=text))
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Links to files of the repository as links to where the site has them."""
    here = page.file.src_uri
    path = in_repository(here)
    if not path.endswith(".md"):
        return markdown

    def moved(link: re.Match[str]) -> str:
        there = target(link[1], path)
        if not (ROOT / there).is_file():
            return link[0]
        lines = re.match(r"#L(\d+)", link[2] or "")
        anchor = f"#__codelineno-0-{lines[1]}" if lines else link[2] or ""
        return f"]({posixpath.relpath(in_site(there), posixpath.dirname(here) or '.')}{anchor})"

    return LINK.sub(moved, markdown)


def on_page_content(content: str, **_: Any) -> str:
    def formula(found: re.Match[str]) -> str:
        return convert(html.unescape(found[2]).strip(), display="block" if found[1] == "div" else "inline")

    return FORMULA.sub(formula, content)
