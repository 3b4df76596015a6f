"""Faults for the programs that touch files (see inject.c), and what has to be true after them.

`BEEOND_FAULT_RUNS` sets how many seeded runs each of the random tests makes.
"""

from __future__ import annotations

import contextlib
import errno
import os
import time
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from beeond_ctl.staging import spawn
from tests.faults import trees

if TYPE_CHECKING:
    import subprocess
    from collections.abc import Iterator

RUNS = int(os.environ.get("BEEOND_FAULT_RUNS", "30"))
CALLS = (
    *("open", "read", "write", "sync", "rename", "mkdir", "link", "symlink", "readlink", "unlink"),
    *("chmod", "chown", "utime", "stat", "xattr", "truncate", "seek", "close"),
)
ERRNOS = (0, errno.EIO, errno.ENOSPC, errno.EDQUOT, errno.EACCES, errno.EROFS, errno.ESTALE)


def assert_same(area: Path) -> None:
    source, target = os.fsencode(area / "source"), os.fsencode(area / "target")
    assert trees.leftovers(target) == []
    assert trees.snapshot(target) == trees.snapshot(source)


@contextlib.contextmanager
def children_with(**variables: str) -> Iterator[None]:
    """Let the programs that touch files have these environment variables."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(spawn, "_ENVIRONMENT", {**spawn._ENVIRONMENT, **variables})
        yield


def children_after(program: subprocess.Popen[bytes], delay_s: float) -> list[int]:
    """Its children's process ids after some moments; a random time is the point here, not a condition."""
    time.sleep(delay_s)
    try:
        text = Path(f"/proc/{program.pid}/task/{program.pid}/children").read_text()
        for task in Path(f"/proc/{program.pid}/task").iterdir():
            text += " " + (task / "children").read_text()
    except OSError:
        return []
    return [int(pid) for pid in set(text.split())]


def frozen_child() -> int:
    """The process id of a child of ours that a fault has stopped."""
    deadline = time.monotonic() + 20
    while time.monotonic() < deadline:
        for task in Path("/proc/self/task").iterdir():
            for pid in (task / "children").read_text().split():
                if Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "T":
                    return int(pid)
        time.sleep(0.01)
    raise AssertionError("no child has come to the fault")


def await_end(pids: list[int]) -> None:
    """Wait until orphaned children have seen that their parent is gone."""
    deadline = time.monotonic() + 20
    while any(_runs(pid) for pid in pids):
        assert time.monotonic() < deadline, "a copier outlives its parent"
        time.sleep(0.01)


def _runs(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False
