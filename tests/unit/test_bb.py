"""What `slurm_bb_data_out` makes of what Slurm says; its commands are scripts. On a real one: `test_burst_buffer`."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

import pytest

from beeond_ctl import bb
from beeond_ctl.errors import NodeError, RequestError, RetainedError

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

COMMAND = """#!/bin/sh
cd {directory} || exit 2
echo >>calls
[ "$(wc -l <calls)" -gt "$(cat silent)" ] || {{ echo 'Unable to contact slurm controller' >&2; exit 1; }}
case $0 in
*squeue) echo "7 $(cat job)" ;;
*) printf 'NodeName=n1 Arch=x86_64 State=%s ThreadsPerCore=1 Reason=%s [root@2026]\\n' $(cat node) ;;
esac
"""


@pytest.fixture
def slurm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A directory that says what Slurm does."""
    monkeypatch.setattr(bb, "_POLL_S", (0.01, 0.01))
    for name in ("squeue", "scontrol"):
        (tmp_path / name).write_text(COMMAND.format(directory=tmp_path))
        (tmp_path / name).chmod(0o755)
    for name, text in {"silent": "0", "job": "STAGE_OUT n1", "node": "IDLE none"}.items():
        (tmp_path / name).write_text(text)
    return tmp_path


def data_out(directory: Path) -> None:
    bb.data_out({"path": str(directory)}, 7)


def test_slurm_may_be_without_an_answer_for_a_while(slurm: Path) -> None:
    (slurm / "silent").write_text("3")
    data_out(slurm)
    assert len((slurm / "calls").read_text().splitlines()) == 5


def test_but_not_for_ever(slurm: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bb, "_PATIENCE_S", 0.1)
    (slurm / "silent").write_text("1000000")
    with pytest.raises(NodeError, match="Unable to contact"):
        data_out(slurm)


@pytest.mark.parametrize(
    ("job", "node", "proved"),
    [
        ("STAGE_OUT n1", "IDLE none", True),
        ("STAGE_OUT n1", "DOWN none", False),
        ("NODE_FAIL n1", "DOWN+NOT_RESPONDING none", False),
        ("PENDING", "DOWN none", True),
    ],
)
def test_a_node_that_went_down_speaks_against_the_stage_out(
    slurm: Path, job: str, node: str, proved: bool
) -> None:
    (slurm / "job").write_text(job)
    (slurm / "node").write_text(node)
    if proved:
        data_out(slurm)
    else:
        with pytest.raises(RetainedError, match="not proved on n1;"):
            data_out(slurm)


@pytest.mark.parametrize("owns", [True, False])
def test_only_the_jobs_own_user_looks_at_its_sources(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, owns: bool
) -> None:
    # A job may be named like the lines that come after its name.
    uid = os.geteuid()
    record = (
        f"JobId=7 JobName=x\n   UserId=somebody({uid}) GroupId=x(1)\n   UserId=bob(12345) GroupId=x(1)\n"
        "   JobState=PENDING NumNodes=1\n   BurstBuffer=#BB_LUA stage_in source=/etc destination=x\n"
    )
    (tmp_path / "record").write_text(record)
    for name, text in {
        "scontrol": f"cat {tmp_path}/record",
        "squeue": f"echo 7 {uid if owns else 12345}",
    }.items():
        (tmp_path / name).write_text(f"#!/bin/sh\n{text}\n")
        (tmp_path / name).chmod(0o755)
    looked: list[Sequence[str]] = []

    def look(sources: Sequence[str], *_: object) -> list[dict[str, object]]:
        looked.append(sources)
        return []

    monkeypatch.setattr(bb, "_look", look)
    bb.data_in({"path": str(tmp_path), "look": "5"}, 7)
    assert looked == ([["/etc"]] if owns else [])


def test_a_destination_that_is_too_long_with_the_jobs_name_holds_the_job(tmp_path: Path) -> None:
    record = (
        f"JobId=7 JobName={'n' * 200}\n   UserId=bob(12345) GroupId=x(1)\n   JobState=PENDING NumNodes=1\n"
        "   BurstBuffer=#BB_LUA stage_out source=out destination=/g/%x-%x\n"
    )
    (tmp_path / "scontrol").write_text(f"#!/bin/sh\necho '{record}'\n")
    (tmp_path / "scontrol").chmod(0o755)
    with pytest.raises(RequestError, match="more than 255 bytes"):
        bb.data_in({"path": str(tmp_path), "look": "5"}, 7)
