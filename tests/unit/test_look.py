"""Sources of a pending job: what its user sees of them, and what is said about it."""

from __future__ import annotations

import fcntl
import os
import subprocess
import sys
import threading
import time
from typing import TYPE_CHECKING, Any

import pytest

from beeond_ctl import bb
from beeond_ctl.errors import UserError
from beeond_ctl.request import Request
from beeond_ctl.staging.look import Look, look

if TYPE_CHECKING:
    from pathlib import Path

LATER = time.monotonic() + 3600


def seen(**fields: Any) -> dict[str, Any]:
    return {"trouble": "", "files": 1, "size": 0, "largest": 0, "unreadable": 0, "examples": [], **fields}


def test_what_is_in_a_source_is_counted_once(tmp_path: Path) -> None:
    (tmp_path / "d").mkdir()
    (tmp_path / "d/f").write_bytes(b"x" * 100_000)
    os.link(tmp_path / "d/f", tmp_path / "again")
    os.symlink("/nowhere", tmp_path / "link")
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "holes").write_bytes(b"")
    os.truncate(tmp_path / "holes", 1 << 40)
    assert look(str(tmp_path), LATER) == Look(files=2, size=100_000, largest=100_000, whole=True)
    assert look(str(tmp_path / "d/f"), LATER) == Look(files=1, size=100_000, largest=100_000, whole=True)


def test_a_source_that_is_not_there_or_is_no_file_says_so(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    assert look(str(tmp_path / "x"), LATER).trouble == "does not exist"
    assert look(str(tmp_path / "pipe/x"), LATER).trouble == "does not exist"
    assert look(str(tmp_path / "pipe"), LATER).trouble == "is neither a file nor a directory"


def test_looking_ends_at_its_deadline(tmp_path: Path) -> None:
    (tmp_path / "f").touch()
    found = look(str(tmp_path), time.monotonic() - 1)
    assert not found.whole
    assert not found.trouble


def test_looking_needs_no_thread_that_the_system_does_not_allow(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(_: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    for name in "abcdef":
        (tmp_path / name).mkdir()
        (tmp_path / name / "f").touch()
    monkeypatch.setattr("beeond_ctl.staging.look._CERTAIN_S", -1.0)
    monkeypatch.setattr("beeond_ctl.staging.look._SLOW_S", -1.0)
    monkeypatch.setattr(threading.Thread, "start", refuse)
    assert look(str(tmp_path), LATER) == Look(files=6, whole=True)


@pytest.mark.parametrize(
    ("request_", "shares", "found", "words"),
    [
        (Request(), 1, [seen(trouble="does not exist")], "source '/a' does not exist"),
        (Request(), 1, [seen(unreadable=2, examples=["/a/b: Permission denied"])], "has 2 entries that cannot be read"),
        (Request(capacity=1 << 30), 1, [seen(size=2 << 30, files=7)], "hold 2GiB in 7 files, and capacity=1GiB"),
        (Request(capacity=4 << 30), 4, [seen(size=2 << 30, largest=2 << 30)], "a file of 2GiB does not fit"),
    ],
)  # fmt: skip
def test_what_cannot_be_staged_in_is_told(
    request_: Request, shares: int, found: list[dict[str, Any]], words: str
) -> None:
    with pytest.raises(UserError, match=r"^#BB_LUA stage_in: ") as caught:
        bb._judge(request_, ["/a"], found, shares)
    assert words in str(caught.value)


def test_what_fits_is_let_through() -> None:
    bb._judge(Request(capacity=4 << 30), ["/a"], [seen(size=4 << 30, largest=1 << 30)], 4)
    bb._judge(Request(), ["/a"], [seen(size=1 << 50)], 4)
    # BeeGFS spreads a file over targets.
    bb._judge(Request(capacity=4 << 30, backend="beegfs"), ["/a"], [seen(size=2 << 30, largest=2 << 30)], 4)


def test_storage_that_does_not_answer_is_not_waited_for_by_anybody() -> None:
    program = (
        "import time\n"
        "from beeond_ctl import bb\n"
        "from beeond_ctl.staging import look\n"
        "look.look_at = lambda paths, within_s: time.sleep(600) or b''\n"
        "bb._SPARE_S = 0.1\n"
        "assert bb._look(['/a'], 0.1) == []\n"
    )
    # Returns when nobody holds the pipes any more.
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=True
    )
    assert done.stderr == "global storage did not answer within 0 s (deadlines.look)\n"


def test_a_source_that_hangs_keeps_neither_the_hook_nor_its_turn(tmp_path: Path) -> None:
    """The turn is a lock that burst_buffer.lua took for the hook, on descriptor 9."""
    program = (
        "import fcntl, os, sys, time\n"
        "from beeond_ctl import bb, slurm\n"
        "os.dup2(os.open(sys.argv[1], os.O_RDONLY), 9)\n"
        "fcntl.flock(9, fcntl.LOCK_EX)\n"
        "slurm.job_facts = lambda *_: ({'UserId': 'x(1)'}, ['#BB_LUA stage_in source=/hangs destination=in'])\n"
        "bb._is_surely_missing = lambda _: time.sleep(600)\n"
        "bb._SPARE_S = 0.1\n"
        "bb.data_in({'path': '/bin', 'look': '0.2'}, 7)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program, tmp_path], capture_output=True, text=True, timeout=60, check=True
    )
    assert done.stderr == "global storage did not answer within 0 s (deadlines.look)\n"
    turn = os.open(tmp_path, os.O_RDONLY)
    try:
        fcntl.flock(turn, fcntl.LOCK_EX | fcntl.LOCK_NB)
    finally:
        os.close(turn)


def test_what_a_process_of_its_own_sees_comes_back(tmp_path: Path) -> None:
    (tmp_path / "f").write_bytes(b"x" * 5000)
    found = bb._look([str(tmp_path), "/nowhere"], 60)
    assert [(seen["files"], seen["trouble"]) for seen in found] == [(1, ""), (0, "does not exist")]
