"""Writes docs/reference.md and docs/config.example.toml from the code: `make docs`.

What the code knows is taken from it: keys, flags, commands, configuration. The rest is text in `reference.in.md`.
"""

from __future__ import annotations

import json
import re
import sys
import textwrap
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, cast, get_args

import click
from pydantic import BaseModel, BeforeValidator

from beeond_ctl.cli.commands import cli
from beeond_ctl.config import SiteConfig
from beeond_ctl.request import FLAGS, KEYS
from beeond_ctl.units import format_size

if TYPE_CHECKING:
    from collections.abc import Iterator

    from pydantic.fields import FieldInfo

DOCS: Final = Path(__file__).resolve().parents[1] / "docs"
TEMPLATE: Final = Path(__file__).with_name("reference.in.md")

# --- reference.md -----------------------------------------------------------------------------------------


def reference() -> str:
    """The whole page."""
    text = TEMPLATE.read_text()
    for name, made in (
        ("keys", _keys()),
        ("flags", _flags()),
        ("commands", _commands()),
        ("configuration", configuration()),
    ):
        text = text.replace(f"<!-- {name} -->", made.strip())
    return text


def _keys() -> str:
    rows = [f"| `{name}={_cell(key.metavar)}` | {_cell(key.help)} |" for name, key in KEYS.items()]
    return "\n".join(["### Keys of `--beeond`", "", "| key | |", "|---|---|", *rows, ""])


def _flags() -> str:
    rows = [f"| `{name}` | {_cell(text)} |" for name, text in FLAGS.items()]
    return "\n".join(["### Flags of a transfer", "", "| flag | |", "|---|---|", *rows, ""])


def _commands() -> str:
    parts = [clean(cli.help or ""), "", option_table(cli)]
    for words, command in leaves(cli, ("beeond-ctl",)):
        if not command.hidden:
            parts += [_command(words, command)]
    return "\n".join(parts)


def leaves(group: click.Group, words: tuple[str, ...]) -> Iterator[tuple[tuple[str, ...], click.Command]]:
    """Every command that is shown, with the words that call it."""
    for name, command in sorted(group.commands.items()):
        if command.hidden:
            continue
        if isinstance(command, click.Group):
            yield from leaves(command, (*words, name))
        else:
            yield (*words, name), command


def _command(words: tuple[str, ...], command: click.Command) -> str:
    context = click.Context(command, info_name=" ".join(words))
    usage = " ".join((*words, *command.collect_usage_pieces(context)))
    return "\n".join([f"### `{usage}`", "", clean(command.help or ""), "", option_table(command)])


def option_table(command: click.Command) -> str:
    """A table of the options, "" where there are none."""
    rows = []
    for option in command.params:
        if isinstance(option, click.Option) and not option.hidden:
            metavar = "" if option.is_flag else f" {_metavar(option)}"
            names = ", ".join(f"`{name}{_cell(metavar)}`" for name in option.opts)
            rows.append(f"| {names} | {_cell(option.help or '')}{_option_notes(option)} |")
    return "\n".join(["| option | |", "|---|---|", *rows, ""]) if rows else ""


def _metavar(option: click.Option) -> str:
    return option.make_metavar(click.Context(click.Command("x")))


def _option_notes(option: click.Option) -> str:
    notes = []
    if option.show_default and option.default is not None:
        notes.append(f"default `{option.default}`")
    if option.required:
        notes.append("required")
    if option.envvar:
        notes.append(f"environment `{option.envvar}`")
    return f" ({', '.join(notes)})" if notes else ""


def clean(text: str) -> str:
    """A docstring as Markdown: paragraphs on lines of their own, `\\b` blocks as code."""
    paragraphs = []
    for block in re.split(r"\n\s*\n", text.strip()):
        if block.lstrip().startswith("\b"):
            lines = block.lstrip(" \b\n").splitlines()
            paragraphs.append("\n".join([lines[0], "", *(f"    {line.strip()}" for line in lines[1:])]))
        else:
            paragraphs.append(textwrap.fill(" ".join(block.split()), 110, break_on_hyphens=False))
    return "\n\n".join(paragraphs)


def _cell(text: str) -> str:
    return " ".join(text.split(" ")).replace("|", "\\|")


# --- the configuration ------------------------------------------------------------------------------------


def _sections() -> Iterator[tuple[str, type[BaseModel]]]:
    for name, field in SiteConfig.model_fields.items():
        yield name, cast("type[BaseModel]", field.annotation)


def configuration() -> str:
    """The chapter about the configuration."""
    parts = [
        "## Configuration",
        "",
        "`/etc/beeond-ctl/config.toml`, in [TOML](https://toml.io). Everything has a default. What is not known is an",
        'error. Sizes are numbers of bytes, or text such as `"1TiB"`. `beeond-ctl check` tells what is wrong.',
        "",
    ]
    for section, model in _sections():
        parts += [f"### [{section}]", "", " ".join((model.__doc__ or "").split()), ""]
        parts += ["| key | type | default | |", "|---|---|---|---|"]
        for key, field in model.model_fields.items():
            schema = model.model_json_schema()["properties"][key]
            kind = "size" if _is_size(field) else _type(schema, model)
            default = _default(field)
            shown = "" if default is None else f"`{_cell(default)}`"
            parts.append(f"| `{section}.{key}` | {kind} | {shown} | {_cell(field.description or '')} |")
        parts.append("")
    return "\n".join(parts)


def _is_size(field: FieldInfo) -> bool:
    """Whether it is one of `config.Size`, the only values that may be written as text and are numbers."""
    inner = (item for kind in get_args(field.annotation) for item in getattr(kind, "__metadata__", ()))
    return any(isinstance(item, BeforeValidator) for item in (*field.metadata, *inner))


def _default(field: FieldInfo) -> str | None:
    """The default as it would stand in the file; None where the key is left out."""
    value = field.get_default(call_default_factory=True)
    if value is None:
        return None
    if _is_size(field):
        return json.dumps(format_size(value))
    return json.dumps(value)


def _type(schema: dict[str, Any], model: type[BaseModel]) -> str:
    if "$ref" in schema:
        schema = model.model_json_schema()["$defs"][schema["$ref"].rpartition("/")[2]]
    if "anyOf" in schema:
        kinds = [_type(item, model) for item in schema["anyOf"] if item.get("type") != "null"]
        return " or ".join(dict.fromkeys(kinds))
    if "const" in schema:
        return f"`{json.dumps(schema['const'])}`"
    if "enum" in schema:
        return ", ".join(f"`{json.dumps(item)}`" for item in schema["enum"])
    if schema.get("type") == "array":
        return f"list of {_type(schema['items'], model)}"
    if schema.get("type") == "object":
        return "table"
    kind = {"string": "text", "integer": "whole number", "number": "number", "boolean": "true or false"}[
        schema["type"]
    ]
    low, high = schema.get("minimum", schema.get("exclusiveMinimum")), schema.get("maximum")
    if kind == "whole number" and low is not None and high is not None:
        return f"{low} to {high}"
    return kind


def example() -> str:
    """A configuration that says what is the default anyway."""
    lines = [
        "# Configuration of beeond-ctl: /etc/beeond-ctl/config.toml, the same on all hosts.",
        "# Every value is the default. Keep what you change, and leave out the rest.",
        "# Made from the code by `make docs`. See docs/admin-guide.md for what to decide.",
    ]
    for section, model in _sections():
        doc = " ".join((model.__doc__ or "").split())
        lines += ["", "", *_comment(doc), f"[{section}]"]
        for key, field in model.model_fields.items():
            default = _default(field)
            lines += ["", *_comment(field.description or "")]
            lines.append(f"#{key} =" if default is None else f"{key} = {default}")
    return "\n".join(lines) + "\n"


def _comment(text: str) -> list[str]:
    return textwrap.wrap(text, 108, initial_indent="# ", subsequent_indent="# ", break_on_hyphens=False)


# --- main -------------------------------------------------------------------------------------------------


def pages() -> dict[Path, str]:
    """What each generated file should hold."""
    return {DOCS / "reference.md": reference().rstrip() + "\n", DOCS / "config.example.toml": example()}


if __name__ == "__main__":
    for path, text in pages().items():
        path.write_text(text)
        sys.stdout.write(f"{path}\n")
