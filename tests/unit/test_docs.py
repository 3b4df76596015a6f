"""The documentation is true where a program can tell: generated pages, links, messages."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from beeond_ctl.config import SiteConfig, parse
from tools import gen_reference, messages

ROOT = Path(__file__).resolve().parents[2]
PAGES = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md"), *(ROOT / "examples").glob("*.md")])


@pytest.mark.parametrize("path", gen_reference.pages(), ids=lambda path: str(path.name))
def test_a_generated_page_is_what_the_code_makes_of_it(path: Path) -> None:
    assert path.read_text() == gen_reference.pages()[path], f"run `make docs`: {path} is not up to date"


def test_the_example_configuration_is_valid_and_changes_nothing() -> None:
    assert parse((ROOT / "docs/config.example.toml").read_text()) == SiteConfig()


@pytest.mark.parametrize("page", PAGES, ids=lambda path: str(path.relative_to(ROOT)))
def test_no_link_is_dead(page: Path) -> None:
    text = without_code(page.read_text())
    for target in re.findall(r"\]\(([^)\s]+)\)", text):
        if re.match(r"[a-z]+:", target):
            continue
        name, _, anchor = target.partition("#")
        there = (page.parent / name).resolve() if name else page
        assert there.exists(), f"{page.name} links to {target}"
        if anchor:
            assert anchor in anchors(there), f"{page.name} links to {target}, and there is no such heading"


def without_code(text: str) -> str:
    return re.sub(r"^(    |\t).*$|`[^`\n]*`", "", text, flags=re.MULTILINE)


def anchors(page: Path) -> set[str]:
    """Headings as GitHub names them."""
    headings = re.findall(r"^#+ (.*)$", page.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


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
