"""The documentation is true where a program can tell: generated pages, links, messages."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from beeond_ctl.config import SiteConfig, parse
from tools import gen_reference, messages, site

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.parametrize("path", gen_reference.pages(), ids=lambda path: str(path.name))
def test_a_generated_page_is_what_the_code_makes_of_it(path: Path) -> None:
    assert path.read_text() == gen_reference.pages()[path], f"run `make docs`: {path} is not up to date"


def test_the_example_configuration_is_valid_and_changes_nothing() -> None:
    assert parse((ROOT / "docs/config.example.toml").read_text()) == SiteConfig()


def test_no_link_is_dead_and_every_page_is_reached() -> None:
    assert site.faults() == []


def test_a_dead_link_and_a_lost_page_are_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "docs").mkdir()
    (tmp_path / "README.md").write_text(
        "# A\n\n[b](docs/b.md#two) [no](docs/c.md) `[code](no)` [no](docs/b.md#no)\n"
    )
    (tmp_path / "docs/b.md").write_text(
        "# One\n\n## Two\n\n    [code](no)\n\n[up](../README.md#a) [out](../..)\n"
    )
    (tmp_path / "docs/lost.md").write_text("# Lost\n")
    monkeypatch.setattr(site, "ROOT", tmp_path)
    monkeypatch.setattr(site, "START", tmp_path / "README.md")
    assert site.faults() == [
        "README.md: docs/c.md: there is no such file",
        "README.md: docs/b.md#no: there is no such heading",
        "docs/b.md: ../..: there is no such file",
        "docs/lost.md: no page leads to it",
    ]


def test_the_site_leads_to_itself(tmp_path: Path) -> None:
    site.build(tmp_path)
    page = (tmp_path / "docs/user-guide.html").read_text()
    for target in re.findall(r'href="([^"#:]+)', page):
        assert (tmp_path / "docs" / target).is_file(), target
    assert 'href="staging.html#by-hand"' in page


def test_every_message_that_the_code_can_print_is_in_troubleshooting() -> None:
    page = " ".join((ROOT / "docs/troubleshooting.md").read_text().split())
    known = {**messages.python_messages(), **messages.c_messages()}
    assert len(known) > 100
    lost = [
        f"{where}: {pattern}" for pattern, where in known.items() if messages.stable_part(pattern) not in page
    ]
    assert not lost, "add to docs/troubleshooting.md:\n" + "\n".join(lost)


def test_every_key_flag_and_variable_of_the_user_is_in_the_user_guide() -> None:
    from beeond_ctl.request import FLAGS, KEYS

    guide = (ROOT / "docs/user-guide.md").read_text()
    for word in (*KEYS, *FLAGS, "BEEOND_JOB_ID", "BEEOND_NODES", "--beeond-stage-in", "--beeond-stage-out"):
        assert word in guide
