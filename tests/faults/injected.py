"""Faults for the programs that touch files (see inject.c), and what has to be true after them.

`BEEOND_FAULT_RUNS` sets how many seeded runs each of the random tests makes.
"""

from __future__ import annotations

import contextlib
import errno
import os
import signal
import time
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from beeond_ctl.staging import spawn
from tests.faults import trees
from tests.testbed.host import wait_until

if TYPE_CHECKING:
    import subprocess
    import threading
    from collections.abc import Callable, Iterator

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
    """Its children's process ids after some moments; a random time is the point here, not a condition.

    It is stopped, and starts no more of them, until it is killed or told to go on.
    """
    time.sleep(delay_s)
    program.send_signal(signal.SIGSTOP)
    wait_until("the program to stop", lambda: (not (left := _running(program.pid)), left), 20, 0.001)
    return _children(program.pid)


def frozen_child() -> int:
    """The process id of a child of ours that a fault has stopped."""

    def probe() -> tuple[bool, int]:
        pid = next((pid for pid in _children(os.getpid()) if _state(pid) == "T"), 0)
        return pid > 0, pid

    return wait_until("a child that comes to the fault", probe, 20, 0.01)


def each_time_a_child_stops(act: Callable[[], object], transfer: threading.Thread) -> None:
    """Do that whenever a fault has stopped a child of ours, which then goes on, until `transfer` has ended."""
    while transfer.is_alive():
        for pid in _children(os.getpid()):
            if _state(pid) == "T":
                act()
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGCONT)
        transfer.join(0.005)


def await_end(pids: list[int]) -> None:
    """Wait until orphaned children have seen that their parent is gone."""

    def probe() -> tuple[bool, list[int]]:
        left = [pid for pid in pids if _state(pid) not in ("Z", "")]
        return not left, left

    wait_until("copiers that outlive their parent", probe, 20, 0.01)


def _children(pid: int) -> list[int]:
    """The children of all threads of `pid`; threads may end meanwhile, and so may the process."""
    found = set[str]()
    with contextlib.suppress(OSError):
        for task in Path(f"/proc/{pid}/task").iterdir():
            with contextlib.suppress(OSError):
                found.update((task / "children").read_text().split())
    return [int(child) for child in found]


def _running(pid: int) -> list[str]:
    """The threads of `pid` that neither have ended nor are stopped."""
    try:
        names = os.listdir(f"/proc/{pid}/task")
    except OSError:
        return []
    return [name for name in names if _state(int(name)) not in ("T", "Z", "X", "")]


def _state(pid: int) -> str:
    """Its state as a letter; "" when it is gone."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return ""
