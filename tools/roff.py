"""Markdown as our pages use it, as text for man(1). Knows no page.

Tables become lists: the first cell is the term, the others are its explanation.
"""

from __future__ import annotations

import re
import textwrap
from typing import TYPE_CHECKING, Final

from markdown_it import MarkdownIt

if TYPE_CHECKING:
    from collections.abc import Iterator

    from markdown_it.token import Token

_WIDTH: Final = 78
_FONTS: Final = {"strong_open": r"\fB", "em_open": r"\fI", "strong_close": r"\fR", "em_close": r"\fR"}
_CHARACTERS: Final = {
    "\\": r"\e",
    "-": r"\-",
    "…": r"\[u2026]",
    "×": r"\(mu",
    "→": r"\(->",
    "–": r"\(en",
    "≥": r"\(>=",
}


def roff(markdown: str, *, top: int = 2) -> str:
    """The text, whose headings of level `top` become sections, deeper ones subsections; higher ones are left out."""
    lines = list(_blocks(MarkdownIt("commonmark").enable("table").parse(markdown), top))
    return "\n".join(line for line, *around in zip(lines, ["", *lines], [*lines[1:], ""], strict=False)
                     if not (line == ".PP" and _useless(*around))) + "\n"  # fmt: skip


def escaped(text: str) -> str:
    """Text in which nothing is a request or an escape any more, for the middle of a line."""
    return "".join(_CHARACTERS.get(character, character) for character in text)


def _blocks(tokens: list[Token], top: int) -> Iterator[str]:
    """Lines of roff. Every branch takes its token; what is inside of one comes as tokens of its own."""
    header: list[str] = []
    row: list[str] = []
    place = ""  # what the next text is: a heading's level, a table's cell, a list's item
    for token in tokens:
        match token.type:
            case "heading_open":
                place = token.tag
            case "list_item_open":
                place = "item"
            case "bullet_list_close" | "ordered_list_close":
                yield ".PP"
            case "th_open" | "td_open":
                place = "cell"
            case "thead_close":
                header, row = row, []
            case "tr_close" if header and row:
                yield from _entry(header, row)
                row = []
            case "table_close":
                header, place = [], ""
                yield ".PP"
            case "code_block" | "fence":
                yield from (
                    ".PP",
                    ".nf",
                    ".RS 4",
                    *map(_line, token.content.rstrip("\n").split("\n")),
                    ".RE",
                    ".fi",
                    ".PP",
                )
            case "inline" if place == "cell":
                row.append(_inline(token))
            case "inline" if place == "item":
                yield from (r".IP \(bu 2", *_wrapped(_inline(token)))
                place = ""
            case "inline" if place:
                level = int(place[1:])
                if level >= top:
                    yield (".SH " if level == top else ".SS ") + _title(token.content, upper=level == top)
                place = ""
            case "inline":
                yield from (".PP", *_wrapped(_inline(token)))


def _useless(before: str, after: str) -> bool:
    """Whether a new paragraph between these two lines is one anyway."""
    return before[:3] in {".SH", ".SS"} or after[:3] in {"", ".SH", ".SS", ".PP", ".TP", ".IP"}


def _entry(header: list[str], row: list[str]) -> Iterator[str]:
    """One line of a table: where several columns have headings, the last explains, and the others are notes."""
    yield ".TP"
    yield _line_start(row[0]) or r"\&"
    told = [(name, text) for name, text in zip(header[1:], row[1:], strict=True) if text]
    if sum(bool(name) for name in header[1:]) > 1:
        notes = [f"{name}: {text}" for name, text in told[:-1]]
        told = [("", text) for _, text in told[-1:]] + ([("", f"({'; '.join(notes)})")] if notes else [])
        yield from _wrapped(" ".join(text for _, text in told) or r"\&")
    else:
        yield from _wrapped("; ".join(text for _, text in told) or r"\&")


def _inline(token: Token) -> str:
    """Text of a paragraph; what may not be broken over lines has its blanks escaped."""
    parts = []
    for child in token.children or []:
        match child.type:
            case "text":
                parts.append(escaped(child.content))
            case "code_inline":
                parts.append(rf"\fB{escaped(child.content)}\fR".replace(" ", r"\ "))
            case "softbreak" | "hardbreak":
                parts.append(" ")
            case kind if kind in _FONTS:
                parts.append(_FONTS[kind])
    return "".join(parts)


def _title(text: str, *, upper: bool) -> str:
    plain = escaped(text.replace("`", ""))
    return plain.upper() if upper else plain


def _wrapped(text: str) -> list[str]:
    return [
        _line_start(line)
        for line in textwrap.wrap(text, _WIDTH, break_long_words=False, break_on_hyphens=False)
    ]


def _line(text: str) -> str:
    return _line_start(escaped(text)) or r"\&"


def _line_start(text: str) -> str:
    """A full stop or an apostrophe at the start of a line would be a request."""
    return re.sub(r"^(?=[.'])", r"\\&", text)
