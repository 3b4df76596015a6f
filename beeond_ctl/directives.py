"""Burst-buffer directives (`#BB_LUA …`): another way to write the request that `--beeond` makes.

Pure. Knows nothing of how Slurm carries directives. `slurm/burst_buffer.lua` refuses the same lines with the same
words at submission; `tests/vectors/directives.json` holds both to it.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Final

from beeond_ctl.errors import RequestError
from beeond_ctl.request import MAX_ENCODED, escape, parse_options, show

if TYPE_CHECKING:
    from collections.abc import Iterable

    from beeond_ctl.request import Request

DIRECTIVE: Final = "#BB_LUA"
"""What a line begins with; the `Directive` of burst_buffer.conf(5)."""

_OPTIONS: Final = {
    "beeond": "beeond",
    "stage_in": "beeond-stage-in",
    "stage_out": "beeond-stage-out",
}
_SAME: Final = {"type": "scratch", "access_mode": "striped"}
"""What DataWarp's `jobdw` lets users choose, and the choice that an instance is."""

_STAGE_KEYS: Final = ("source", "destination", "flags", "type")
_STAGE_TYPES: Final = ("directory", "file")


def split_words(text: str) -> list[str]:
    r"""Words of `text` between blanks; `\ ` is a blank within a word, `\\` a backslash.

    >>> split_words(r"source=/a\ b  x=y")
    ['source=/a b', 'x=y']
    """
    words, word, started, escaped = [], "", False, False
    for char in text:
        if escaped:
            word += char if char in " \t\\" else "\\" + char
            escaped = False
        elif char == "\\":
            escaped = started = True
        elif char in " \t":
            if started:
                words.append(word)
            word, started = "", False
        else:
            word += char
            started = True
    if escaped:
        word += "\\"
    return [*words, word] if started else words


def parse_directives(lines: Iterable[str]) -> Request:
    """The request made by `lines`, each beginning with `#BB_LUA`, continuations joined, as Slurm keeps them.

    Raises RequestError naming the directive, the value and what would be right.
    """
    lines = list(lines)
    if sum(len(os.fsencode(line)) for line in lines) > MAX_ENCODED:
        raise RequestError(
            f"{DIRECTIVE}: the directives are too long; name directories instead of single files"
        )
    options: dict[tuple[str, str], None] = {}
    for line in lines:
        option = _option(split_words(line.removeprefix(DIRECTIVE)))
        _check(option)
        # A --beeond that comes again counts again, as the last one; a transfer is made once.
        if option[0] == "beeond":
            options.pop(option, None)
        options[option] = None
    return parse_options(options)


def _option(words: list[str]) -> tuple[str, str]:
    """The option of sbatch that says the same."""
    if not words:
        raise RequestError(f"{DIRECTIVE}: the line is empty; the directives are {', '.join(_OPTIONS)}")
    name, *rest = words
    if name not in _OPTIONS:
        raise RequestError(
            f"{DIRECTIVE}: unknown directive {show(name)}; the directives are {', '.join(_OPTIONS)}"
        )
    option = _OPTIONS[name]
    return option, _beeond(rest) if name == "beeond" else _stage(name, rest)


def _beeond(words: list[str]) -> str:
    kept = []
    for word in words:
        name, _, value = word.partition("=")
        if name in _SAME:
            if value != _SAME[name]:
                raise RequestError(
                    f"{DIRECTIVE} beeond: {name}={show(value)} is not offered; "
                    f"an instance is always {name}={_SAME[name]}"
                )
        elif name != "pool":  # Slurm's, which has checked it
            kept.append(escape(word))
    return ",".join(kept)


def _stage(directive: str, words: list[str]) -> str:
    values: dict[str, str] = {}
    for word in words:
        name, equals, value = word.partition("=")
        if name not in _STAGE_KEYS:
            raise RequestError(
                f"{DIRECTIVE} {directive}: unknown key {show(name)}; the keys are {', '.join(_STAGE_KEYS)}, "
                "and a blank within a path is written '\\ '"
            )
        if not equals:
            raise RequestError(f"{DIRECTIVE} {directive}: {name} has no value; write {name}=…")
        values[name] = value
    if values.get("type", "directory") not in _STAGE_TYPES:
        raise RequestError(
            f"{DIRECTIVE} {directive}: type={show(values['type'])} is not offered; write directory or file, "
            "and one line for each"
        )
    for name in ("source", "destination"):
        if name not in values:
            raise RequestError(f"{DIRECTIVE} {directive}: no {name}; write {name}=PATH")
    text = f"{escape(values['source'])}:{escape(values['destination'])}"
    return f"{text}:{escape(values['flags'])}" if "flags" in values else text


def _check(option: tuple[str, str]) -> None:
    try:
        parse_options([option])
    except RequestError as error:
        text = str(error)
        for directive, name in _OPTIONS.items():
            text = text.replace(f"--{name}:", f"{DIRECTIVE} {directive}:", 1)
        raise RequestError(text) from None
