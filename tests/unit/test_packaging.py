"""What packages hold beside the program: manual pages, completion, and lists that have to agree with each other."""

from __future__ import annotations

import re
import shutil
import subprocess
import tomllib
from pathlib import Path

import pytest

from beeond_ctl.cli.commands import cli
from beeond_ctl.config import SiteConfig
from beeond_ctl.request import FLAGS, KEYS
from tools import gen_man
from tools.gen_reference import leaves
from tools.roff import roff

ROOT = Path(__file__).resolve().parents[2]
PAGES = gen_man.manual_pages()


def plain(page: str) -> str:
    """A manual page's text without its markup."""
    return re.sub(r"\\f.|\\&", "", page).replace(r"\-", "-").replace("\\ ", " ").replace("\\e", "\\")


def test_every_command_that_is_shown_has_a_manual_page() -> None:
    commands = {"-".join(words) for words, _ in leaves(cli, ("beeond-ctl",))}
    assert {name for name in PAGES if name.endswith(".1")} == {
        f"{name}.1" for name in {*commands, "beeond-ctl"}
    }
    for name in commands:
        assert name.removeprefix("beeond-ctl-").replace("-", " ") in plain(PAGES["beeond-ctl.1"])


def test_every_option_setting_key_and_flag_is_in_its_manual_page() -> None:
    for words, command in leaves(cli, ("beeond-ctl",)):
        page = plain(PAGES[f"{'-'.join(words)}.1"])
        assert [
            option
            for option in command.params
            for name in option.opts
            if name[0] == "-" and name not in page and not getattr(option, "hidden", False)
        ] == []
    settings = plain(PAGES["beeond-ctl.toml.5"])
    for section, field in SiteConfig.model_fields.items():
        for key in getattr(field.annotation, "model_fields", ()):
            assert f"{section}.{key}\n" in settings
    assert [word for word in (*KEYS, *FLAGS, "$BEEOND") if word not in plain(PAGES["beeond.7"])] == []


@pytest.mark.skipif(shutil.which("mandoc") is None, reason="needs mandoc; run `make deps`")
def test_manual_pages_have_no_fault(tmp_path: Path) -> None:
    for name, text in PAGES.items():
        (tmp_path / name).write_text(text)
    argv = ["mandoc", "-Tlint", "-Wwarning", *(str(tmp_path / name) for name in sorted(PAGES))]
    assert subprocess.run(argv, capture_output=True, text=True).stdout == ""


def test_text_is_never_taken_for_a_request() -> None:
    page = roff("# Top\n\n## One\n\n'quoted' at the start\n\n    .hidden\n    a\\b\n\n- `.bashrc`\n")
    assert page.splitlines() == [
        ".SH ONE", r"\&'quoted' at the start", ".PP", ".nf", ".RS 4", r"\&.hidden", r"a\eb", ".RE", ".fi",
        r".IP \(bu 2", r"\fB.bashrc\fR",
    ]  # fmt: skip


@pytest.mark.parametrize("name", gen_man.completions())
def test_completion_is_a_file_that_starts_nothing_until_it_is_asked(name: str) -> None:
    text = gen_man.completions()[name]
    assert "_BEEOND_CTL_COMPLETE=" in text
    shell = {"_beeond-ctl": "zsh", "beeond-ctl.fish": "fish"}.get(name, "bash")
    if shutil.which(shell):
        subprocess.run([shell, "-n"], input=text, text=True, check=True)


def test_what_is_put_into_packages_is_there() -> None:
    script = (ROOT / "packaging/files").read_text()
    named = re.findall(r"(?:slurm|deploy|docs)/[\w./*-]+", script)
    assert len(named) > 5
    assert [pattern for pattern in named if not list(ROOT.glob(pattern))] == []


def test_a_package_is_built_with_the_versions_that_are_tested() -> None:
    lock = {
        line.split("==")[0].lower().replace("_", "-")
        for line in (ROOT / "requirements.lock").read_text().split()
    }
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    wanted = {re.split(r"[<>=!~ ]", text)[0].lower() for text in project["dependencies"]}
    assert wanted <= lock


def test_units_that_rpm_stops_are_those_that_there_are() -> None:
    units = {path.name for path in (ROOT / "deploy/systemd").iterdir()}
    spec = (ROOT / "packaging/rpm/beeond-ctl.spec").read_text()
    assert set(re.findall(r"beeond-ctl-\w+\.(?:service|timer)", spec)) == units
