"""Writes manual pages and shell completion, for packages: python -m tools.gen_man MAN_DIRECTORY COMPLETION_DIRECTORY.

Everything is taken from what is there: the commands' own help, the configuration's fields, and pages of docs/.
"""

from __future__ import annotations

import re
import sys
import time
from importlib.metadata import version
from os import environ
from pathlib import Path
from typing import Final

import click
from click.shell_completion import BashComplete, FishComplete, ZshComplete

from beeond_ctl.cli.commands import cli
from tools.gen_reference import DOCS, TEMPLATE, clean, configuration, leaves, option_table
from tools.roff import escaped, roff

_NAME: Final = "beeond-ctl"
_USER_PAGE: Final = "beeond - a file system of its own for your Slurm job"
_CONFIG_PAGE: Final = "beeond-ctl.toml - configuration of beeond-ctl"


def manual_pages() -> dict[str, str]:
    """Text of each page by its file name."""
    pages = {
        f"{_NAME}.1": _page(
            _NAME, 1, f"{_NAME} - {_first_sentence(cli)}", _main_page(), see="beeond(7), beeond-ctl.toml(5)"
        ),
        "beeond.7": _page("beeond", 7, _USER_PAGE, _user_page(), see="beeond-ctl(1), sbatch(1)"),
        "beeond-ctl.toml.5": _page(
            "beeond-ctl.toml",
            5,
            _CONFIG_PAGE,
            _configuration_page(),
            see="beeond-ctl(1), beeond-ctl-check(1)",
        ),
    }
    for words, command in leaves(cli, (_NAME,)):
        name = "-".join(words)
        pages[f"{name}.1"] = _page(
            name, 1, f"{name} - {_first_sentence(command)}", _command_page(words, command)
        )
    return pages


def _page(name: str, section: int, what: str, markdown: str, see: str = "beeond-ctl(1), beeond(7)") -> str:
    day = time.strftime("%Y-%m-%d", time.gmtime(int(environ.get("SOURCE_DATE_EPOCH", time.time()))))
    head = f'.TH {escaped(name).upper()} {section} {day} "{_NAME} {version(_NAME)}"'
    related = ",\n".join(f".BR {escaped(page[:-3])} {page[-3:]}" for page in see.split(", "))
    related = re.sub(r"(\(\d\)),$", r"\1 ,", related, flags=re.MULTILINE)
    title, _, text = what.partition(" - ")
    return (
        f"{head}\n.SH NAME\n{escaped(title)} \\- {escaped(text)}\n{roff(markdown)}.SH SEE ALSO\n{related}\n"
    )


def _first_sentence(command: click.Command) -> str:
    text = " ".join((command.help or "").split("\n\n")[0].split())
    return re.split(r"(?<=[.?])\s", text)[0].rstrip(".")


def _main_page() -> str:
    rows = [
        f"| `{' '.join(words[1:])}` | {_first_sentence(command)} |"
        for words, command in leaves(cli, (_NAME,))
    ]
    return "\n\n".join([
        "## Synopsis",
        f"**{_NAME}** [*OPTIONS*] *COMMAND* [*ARGUMENTS*]",
        "## Description",
        clean(cli.help or ""),
        "## Options",
        option_table(cli),
        "## Commands",
        "\n".join(["| command | |", "|---|---|", *rows]),
        "Each has a manual page of its own, such as beeond-ctl-check(1).",
        *(_section(TEMPLATE.read_text(), title) for title in ("Environment", "Exit codes", "Files and directories")),
    ])  # fmt: skip


def _command_page(words: tuple[str, ...], command: click.Command) -> str:
    usage = " ".join(command.collect_usage_pieces(click.Context(command, info_name=" ".join(words))))
    parts = [
        "## Synopsis",
        f"**{' '.join(words)}** {usage.replace('[', chr(92) + '[')}",
        "## Description",
        clean(command.help or ""),
    ]
    if table := option_table(command):
        parts += ["## Options", table]
    return "\n\n".join(parts)


def _configuration_page() -> str:
    return configuration().replace("## Configuration", "## Description", 1)


def _user_page() -> str:
    """The user guide, which is a whole page; what leads to other pages of docs/ is named by its title alone."""
    text = (DOCS / "user-guide.md").read_text()
    return re.sub(r"^# .*$", "## Description", text, count=1, flags=re.MULTILINE)


def _section(text: str, title: str) -> str:
    found = re.search(rf"^## {title}$.*?(?=^## |^<!--|\Z)", text, re.MULTILINE | re.DOTALL)
    if found is None:
        raise LookupError(f"{TEMPLATE}: no section {title!r}")
    return found.group().strip()


def completions() -> dict[str, str]:
    """Text for each shell by its file name. Shells read it as it is; only a TAB starts the controller."""
    kinds = {_NAME: BashComplete, f"_{_NAME}": ZshComplete, f"{_NAME}.fish": FishComplete}
    found = {}
    for name, kind in kinds.items():
        maker = kind(cli, {}, _NAME, "_BEEOND_CTL_COMPLETE")
        found[name] = maker.source_template % maker.source_vars()  # `source()` would ask this host's bash
    return found


if __name__ == "__main__":
    for directory, texts in zip(map(Path, sys.argv[1:3]), (manual_pages(), completions()), strict=True):
        directory.mkdir(parents=True, exist_ok=True)
        for name, text in texts.items():
            (directory / name).write_text(text)
