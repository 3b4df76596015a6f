"""Faults for the programs that touch files (see inject.c), and what has to be true after them.

`BEEOND_FAULT_RUNS` sets how many seeded runs each of the random tests makes.
"""

from __future__ import annotations

import contextlib
import errno
import os
from typing import TYPE_CHECKING

import pytest

from beeond_ctl.staging import spawn
from tests.faults import trees

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

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
