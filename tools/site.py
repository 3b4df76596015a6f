"""Builds the documentation as HTML, and finds what is dead in it: python -m tools.site DIRECTORY, or `make docs`.

Strict: a link to a page, file or heading that does not exist, and a
page to which nothing leads are errors. Addresses of other sites are not looked at: this needs no network.
"""

from __future__ import annotations

import html
import os
import re
import shutil
import sys
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Final

from markdown_it import MarkdownIt

if TYPE_CHECKING:
    from markdown_it.token import Token

ROOT: Final = Path(__file__).resolve().parents[1]
START: Final = ROOT / "README.md"
_MENU: Final = {  # what is at the top of every page
    "beeond-ctl": "README.md",
    "User guide": "docs/user-guide.md",
    "Admin guide": "docs/admin-guide.md",
    "Reference": "docs/reference.md",
    "Troubleshooting": "docs/troubleshooting.md",
    "Examples": "examples/README.md",
}
_STYLE: Final = """\
:root { color-scheme: light dark; --line: #8885; --soft: #8882; }
body { font: 16px/1.55 system-ui, sans-serif; max-width: 54rem; margin: 0 auto; padding: 0 1rem 4rem; }
nav { display: flex; flex-wrap: wrap; gap: .3rem 1.2rem; padding: .8rem 0; border-bottom: 1px solid var(--line); }
h1, h2, h3 { line-height: 1.25; margin: 1.8em 0 .6em; } h1 { margin-top: 1em; }
code { font-size: .92em; background: var(--soft); padding: .1em .3em; border-radius: 3px; overflow-wrap: anywhere; }
pre { background: var(--soft); padding: .8rem 1rem; overflow-x: auto; border-radius: 5px; }
pre code { background: none; padding: 0; overflow-wrap: normal; }
table { border-collapse: collapse; display: block; overflow-x: auto; }
td, th { border-bottom: 1px solid var(--line); padding: .35rem .8rem .35rem 0; text-align: left; vertical-align: top; }
@media print { nav { display: none; } body { max-width: none; } }
"""


def pages() -> list[Path]:
    """Every page for people, the first one first."""
    found = [*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md"), *(ROOT / "examples").rglob("*.md")]
    return sorted(found, key=lambda path: (path != START, path))


def parsed(page: Path) -> list[Token]:
    """A page's tokens; headings have got their names as GitHub makes them."""
    tokens = MarkdownIt("commonmark").enable("table").parse(page.read_text())
    seen: dict[str, int] = {}
    for opening, inline in pairwise(tokens):
        if opening.type == "heading_open":
            name = re.sub(r"[^\w\- ]", "", inline.content.lower()).replace(" ", "-")
            seen[name] = seen.get(name, -1) + 1
            opening.attrSet("id", f"{name}-{seen[name]}" if seen[name] else name)
    return tokens


def links(tokens: list[Token]) -> list[Token]:
    """What leads from a page to somewhere in the project."""
    inside = [child for token in tokens for child in token.children or () if child.type == "link_open"]
    return [link for link in inside if not re.match(r"[a-z]+:", str(link.attrs["href"]))]


def faults() -> list[str]:
    """Everything that is dead, a line for each."""
    tokens = {page: parsed(page) for page in pages()}
    names = {
        page: {str(token.attrs["id"]) for token in found if "id" in token.attrs}
        for page, found in tokens.items()
    }
    found, reached = [], {START}
    for page, content in tokens.items():
        for link in links(content):
            href = str(link.attrs["href"])
            file, _, name = href.partition("#")
            target = (page.parent / file).resolve() if file else page
            reached.add(target)
            if not target.is_relative_to(ROOT) or not target.exists():
                found.append(f"{page.relative_to(ROOT)}: {href}: there is no such file")
            elif name and name not in names.get(target, set()):
                found.append(f"{page.relative_to(ROOT)}: {href}: there is no such heading")
    return found + [
        f"{page.relative_to(ROOT)}: no page leads to it" for page in tokens if page not in reached
    ]


def build(directory: Path) -> None:
    """Write the site; files that pages lead to are copied beside them."""
    shutil.rmtree(directory, ignore_errors=True)
    for page in pages():
        tokens = parsed(page)
        for link in links(tokens):
            file, mark, name = str(link.attrs["href"]).partition("#")
            target = (page.parent / file).resolve() if file else page
            if target.suffix == ".md":
                link.attrs["href"] = _relative(_place(target), _place(page)) + mark + name
            elif target.is_file():
                copy = directory / target.relative_to(ROOT)
                copy.parent.mkdir(parents=True, exist_ok=True)
                shutil.copyfile(target, copy)
        place = directory / _place(page)
        place.parent.mkdir(parents=True, exist_ok=True)
        place.write_text(_html(page, tokens))


def _place(page: Path) -> Path:
    """Where a page goes in the site: README.md is what one sees of a directory."""
    relative = page.relative_to(ROOT)
    return relative.with_name("index.html") if page.name == "README.md" else relative.with_suffix(".html")


def _relative(target: Path, page: Path) -> str:
    return os.path.relpath(target, page.parent)


def _html(page: Path, tokens: list[Token]) -> str:
    title = next((token.content for token in tokens if token.type == "inline"), page.stem)
    menu = " ".join(
        f'<a href="{_relative(_place(ROOT / path), _place(page))}">{name}</a>' for name, path in _MENU.items()
    )
    markdown = MarkdownIt("commonmark").enable("table")
    body = markdown.renderer.render(tokens, markdown.options, {})
    return (
        f'<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8"><title>{html.escape(title)}</title>\n'
        f'<meta name="viewport" content="width=device-width, initial-scale=1">\n<style>\n{_STYLE}</style></head>\n'
        f"<body><nav>{menu}</nav>\n<main>\n{body}</main></body></html>\n"
    )


if __name__ == "__main__":
    if dead := faults():
        sys.exit("\n".join(dead))
    build(Path(sys.argv[1]))
    sys.stdout.write(f"{sys.argv[1]}/index.html\n")
