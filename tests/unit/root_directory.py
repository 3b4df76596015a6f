"""A directory that is root's alone all the way up, as sites' directories are and pytest's are not."""

from __future__ import annotations

import os
import shutil
import tempfile
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from beeond_ctl import mounts

if TYPE_CHECKING:
    from collections.abc import Iterator

needs_root = [pytest.mark.root, pytest.mark.skipif(os.geteuid() != 0, reason="needs root")]


@contextmanager
def root_directory() -> Iterator[Path]:
    """Make it, and remove it with all that is mounted in it."""
    path = Path(tempfile.mkdtemp(prefix="beeond-test-", dir="/var/lib"))
    path.chmod(0o755)
    try:
        yield path
    finally:
        mounts.unmount(str(path), deadline_s=20)
        shutil.rmtree(path)
