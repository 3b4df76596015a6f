"""`#BB_LUA` makes the request that `--beeond` makes, and Slurm's Lua refuses what Python refuses, in the same words."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from beeond_ctl.directives import parse_directives, split_words
from beeond_ctl.errors import RequestError
from beeond_ctl.request import FLAGS, KEYS, parse_options

ROOT = Path(__file__).resolve().parents[2]
VECTORS = json.loads((ROOT / "tests/vectors/directives.json").read_text())
LUA = ROOT / "slurm/beeond_directives.lua"
LUAS = [name for name in ("lua5.1", "lua5.2", "lua5.3", "lua5.4", "luajit") if shutil.which(name)]


def lua(program: str, script: str, *arguments: str) -> str:
    argv = [program, str(ROOT / "tests/vectors/check.lua"), str(LUA), *arguments]
    done = subprocess.run(argv, input=os.fsencode(script), capture_output=True, timeout=20, check=True)
    return os.fsdecode(done.stdout)


def script_of(lines: list[str]) -> str:
    return "\n".join(["#!/bin/sh", *lines, "true", ""])


def names(vectors: list[dict[str, Any]]) -> list[Any]:
    return [pytest.param(vector, id=vector["name"].replace(" ", "-")) for vector in vectors]


@pytest.mark.parametrize("vector", names(VECTORS["accepted"]))
def test_directives_make_the_request_that_the_options_make(vector: dict[str, Any]) -> None:
    assert parse_directives(vector["lines"]) == parse_options(
        [(name, text) for name, text in vector["options"]]
    )


@pytest.mark.parametrize("vector", names(VECTORS["refused"]))
def test_a_bad_directive_is_refused_with_words_that_help(vector: dict[str, Any]) -> None:
    with pytest.raises(RequestError) as caught:
        parse_directives(vector["lines"])
    assert str(caught.value) == vector["words"]


def test_there_is_a_lua_to_test_with() -> None:
    assert LUAS, "needs lua5.4; run `make deps`"


@pytest.mark.parametrize("program", LUAS)
def test_lua_accepts_what_python_accepts(program: str) -> None:
    for vector in VECTORS["accepted"]:
        assert (vector["name"], lua(program, script_of(vector["lines"]))) == (vector["name"], "")


@pytest.mark.parametrize("program", LUAS)
def test_lua_refuses_what_python_refuses_in_the_same_words(program: str) -> None:
    for vector in VECTORS["refused"]:
        told = lua(program, script_of(vector["lines"]))
        assert (vector["name"], told) == (vector["name"], vector["words"])


@pytest.mark.parametrize("program", LUAS)
def test_lua_finds_the_directives_that_slurm_finds(program: str) -> None:
    for vector in VECTORS["scripts"]:
        found = lua(program, vector["script"], "directives").split("\n")
        assert (vector["name"], found) == (vector["name"], vector["lines"] or [""])


def test_every_key_and_flag_is_known_to_lua() -> None:
    text = LUA.read_text()
    for name in (*KEYS, *FLAGS):
        assert f'"{name}"' in text


@settings(max_examples=40, deadline=None)
@given(
    st.lists(
        st.one_of(
            st.sampled_from(
                ["source=/a", "destination=b", "flags=update", "type=file", "\\", "\\ ", "%j", "..", "=", "/", ":", "'"]
            ),
            st.text(st.characters(codec="ascii", exclude_characters="\n\0"), max_size=6),
        ),
        max_size=6,
    ),
    st.sampled_from(["beeond ", "stage_in ", "stage_out ", "stage_in source=/a ", "stage_out destination=/a source=b"]),
)  # fmt: skip
@example(["capacity=1k", "mirror"], "beeond ")
def test_lua_and_python_agree_on_any_line(words: list[str], start: str) -> None:
    line = f"#BB_LUA {start}{' '.join(words)}"
    while line.endswith("\\"):
        line = line[:-1]
    try:
        parse_directives([line])
        expected = ""
    except RequestError as error:
        expected = str(error)
    assert lua(LUAS[0], script_of([line])) == expected


@given(st.lists(st.text(st.characters(exclude_characters="\n\0"), min_size=1), max_size=5))
def test_any_words_survive_being_escaped(words: list[str]) -> None:
    escaped = [word.replace("\\", "\\\\").replace(" ", "\\ ").replace("\t", "\\\t") for word in words]
    assert split_words("  ".join(escaped)) == words


def hostile() -> dict[str, str]:
    """Directives of less than 64 KiB, none of which may keep slurmctld longer than what anybody would write."""
    deep = "a/" * 88
    many = {
        "flags": ["stage_in source=/a destination=b flags=" + "+".join(f"{n:x}" for n in range(13_500))],
        "a flag": ["stage_in source=/a destination=b flags=" + "update+" * 9000 + "delete"],
        "deletions in": [f"stage_in source=/{n} destination={deep}{n} flags=delete" for n in range(256)],
        "deletions out": [f"stage_out source={n} destination=/{deep}{n} flags=delete" for n in range(256)],
        "upwards": ["stage_in source=/a flags=delete destination=" + "a/../" * 12_000],
        "slashes": ["beeond mount=" + "/" * 64_000 + "x"],
        "slashes of a path": ["stage_out source=$BEEOND" + "/" * 64_000 + " destination=/a"],
        "blanks": ["beeond capacity=" + "\\ " * 10_000 + "1k" + "\\ " * 20_000 + "x"],
        "patterns": ["stage_in destination=b source=/" + "%x" * 32_000],
        "variables": ["stage_in destination=b source=/" + "$a/" * 21_000],
        "interfaces": ["beeond interfaces=" + "ib0+" * 16_000 + "ib0"],
        "keys": ["beeond " + "meta=1 " * 9000],
    }
    return {name: script_of([f"#BB_LUA {line}" for line in lines]) for name, lines in many.items()}


@pytest.mark.parametrize("program", LUAS)
def test_no_script_keeps_slurmctld_longer_than_an_ordinary_one_of_its_size(
    program: str, tmp_path: Path
) -> None:
    limits = tmp_path / "limits"
    limits.write_text("offer mount /x\ntold mount={value} is not a mount point that may be chosen\n")

    def seconds(script: str) -> float:
        return min(float(lua(program, script, "seconds", str(limits))) for _ in range(3))

    lines = [f"#BB_LUA stage_out source={n} destination=/{'a/' * 100}{n}" for n in range(256)]
    usual_s = seconds(script_of(lines))
    for name, script in hostile().items():
        assert (name, seconds(script) < 8 * usual_s) == (name, True)
        assert (name, len(lua(program, script, str(limits))) < 4000) == (name, True)


@pytest.mark.parametrize("program", LUAS)
def test_a_script_of_directives_without_end_is_refused_at_once(program: str) -> None:
    many = "\n".join(f"#BB_LUA stage_out source=f{n} destination=/g/{n}" for n in range(257))
    for script, words in (
        (many, "more than 256 transfers; name directories instead of single files"),
        (
            "#BB_LUA beeond \\\n" * 400_000,
            "#BB_LUA: the directives are too long; name directories instead of single files",
        ),
    ):
        assert lua(program, script) == words
        with pytest.raises(RequestError) as caught:
            parse_directives(lua(program, script, "directives").split("\n"))
        assert str(caught.value) == words
