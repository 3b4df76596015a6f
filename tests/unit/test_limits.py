"""What a site does not offer is refused by Slurm's Lua at the prompt, in the words of the nodes."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

from beeond_ctl.config import parse
from beeond_ctl.directives import parse_directives
from beeond_ctl.errors import RequestError
from beeond_ctl.limits import make_limits
from beeond_ctl.plan import check_request

ROOT = Path(__file__).resolve().parents[2]
LUAS = [name for name in ("lua5.1", "lua5.2", "lua5.3", "lua5.4", "luajit") if shutil.which(name)]

SITES = {
    "default": "",
    "mounts": '[mount]\nchoices = ["/scratch x", "/m%1"]\n',
    "beegfs": '[backend]\ndefault = "beegfs"\nallowed = ["beegfs"]\n[beegfs]\ninterfaces = ["ib0", "ib1"]\n',
    "one node": '[backend]\ndefault = "local"\nallowed = ["local", "glusterfs"]\n',
    "all": '[backend]\nallowed = ["beegfs", "glusterfs", "local"]\n[beegfs]\ninterfaces = ["ib0"]\nlicensed = true\n',
}
ASKED = [
    "", "backend=lustre", "backend=beegfs", "backend=local", "backend=glusterfs meta=2", "meta=all", "stripe-count=4",
    "storage=2", "stripe-dirs=1+2", "chunk-size=1MiB", "mirror=yes", "mirror", "mirror=no", "mirror=0",
    "prefer-local=yes",
    "backend=beegfs mirror=yes prefer-local=1", "backend=beegfs mirror=yes", "interfaces=ib0", "interfaces=ib0+eth9",
    "backend=beegfs interfaces=ib0+eth9", "mount=/scratch\\ x", "mount=/scratch\\ x/", "mount=/m%1", "mount=/x{value}",
    "mount=/elsewhere/", "capacity=1GiB", "share=1", "backend=local share=1", "backend=beegfs share=1", "join=0",
]  # fmt: skip


def lua(program: str, lines: list[str], *arguments: str) -> str:
    argv = [
        program,
        str(ROOT / "tests/vectors/check.lua"),
        str(ROOT / "slurm/beeond_directives.lua"),
        *arguments,
    ]
    script = "\n".join(["#!/bin/sh", *lines, "true", ""])
    return os.fsdecode(
        subprocess.run(argv, input=os.fsencode(script), capture_output=True, check=True).stdout
    )


@pytest.mark.parametrize("program", LUAS)
@pytest.mark.parametrize("site", SITES)
def test_lua_refuses_what_the_site_does_not_offer_in_the_words_of_the_nodes(
    tmp_path: Path, program: str, site: str
) -> None:
    config = parse(SITES[site])
    limits = tmp_path / "limits"
    limits.write_text(make_limits(config))
    refused = 0
    for words in ASKED:
        lines = [f"#BB_LUA beeond {words}"]
        try:
            check_request(config, parse_directives(lines))
            expected = ""
        except RequestError as error:
            expected = str(error).replace("--beeond:", "#BB_LUA beeond:", 1)
            refused += 1
        assert (words, lua(program, lines, str(limits))) == (words, expected)
    assert 3 < refused < len(ASKED)


PROCESS = """
local limits = arg[2]
local open = io.open
io.open = function(path, how) return open(path == "/etc/beeond-ctl/limits" and limits or path, how) end
slurm = {
	ERROR = -1, SUCCESS = 0,
	log_error = function(...) io.write("log: ", string.format(...), "\\n") end,
}
dofile(arg[1] .. "/slurm/burst_buffer.lua")
local code, text = slurm_bb_job_process(arg[3])
io.write(code, " ", text or "", "\\n")
"""


@pytest.mark.parametrize("program", LUAS)
@pytest.mark.parametrize(
    "bad", ["told x", "offer mount /x", "offer ", "refuse -", "refuse - meta", "offer  \ntold x"]
)
def test_lines_that_make_no_rule_are_told_and_refuse_nothing(tmp_path: Path, program: str, bad: str) -> None:
    good = make_limits(parse(""))
    (tmp_path / "job").write_text("#!/bin/sh\n#BB_LUA beeond mount=/x\n")
    (tmp_path / "program.lua").write_text(PROCESS)

    def process(limits: str) -> list[str]:
        (tmp_path / "limits").write_text(limits)
        argv = [
            program,
            str(tmp_path / "program.lua"),
            str(ROOT),
            str(tmp_path / "limits"),
            str(tmp_path / "job"),
        ]
        done = subprocess.run(argv, capture_output=True, text=True, check=True)
        return done.stdout.splitlines()

    (refused,) = process(good)
    assert "mount=/x is not a mount point that may be chosen" in refused
    told = process(bad + "\n")
    assert bad.splitlines()[0] in told[0]
    assert "run `beeond-ctl bb limits >/etc/beeond-ctl/limits`" in told[0]
    assert told[-1] == "0 "
    assert process(bad + "\n" + good)[-1] == refused  # the rest still counts


@pytest.mark.parametrize("program", LUAS)
def test_a_line_that_takes_a_key_back_is_heard(tmp_path: Path, program: str) -> None:
    limits = tmp_path / "limits"
    limits.write_text(make_limits(parse("")))
    both = ["#BB_LUA beeond backend=lustre", "#BB_LUA beeond backend=glusterfs"]
    assert lua(program, both, str(limits)) == ""
    assert "lustre is not offered" in lua(program, both[::-1], str(limits))


@pytest.mark.parametrize("program", LUAS)
def test_more_than_all_nodes_have_is_refused(tmp_path: Path, program: str) -> None:
    limits = tmp_path / "limits"
    limits.write_text(make_limits(parse("")))
    assert lua(program, ["#BB_LUA beeond capacity=2TiB"], str(limits), "2TiB") == ""
    told = lua(program, ["#BB_LUA beeond capacity=2049GiB"], str(limits), "2TiB")
    assert told == (
        "#BB_LUA beeond: capacity=2049GiB is more than all nodes have together, which is 2TiB; ask for less"
    )


def test_lists_are_made_only_where_sources_are_looked_at_as_their_users() -> None:
    lists = 'lists = "/scratch/%u/.beeond"\n'
    assert (
        "lists /scratch/%u/.beeond"
        in make_limits(parse(f"[slurm]\nlook_as_user = true\n{lists}")).splitlines()
    )
    assert "lists" not in make_limits(parse(f"[slurm]\n{lists}"))


def test_what_the_hooks_need_to_know_stands_in_the_limits_too() -> None:
    lines = make_limits(parse('[slurm]\npath = ["/a", "/b"]\nlook_as_user = true\n[deadlines]\nlook = 7\n'))
    assert {"path /a:/b", "look 7", "as-user yes"} <= set(lines.splitlines())
