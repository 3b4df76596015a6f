"""A place for trees, in memory where there is any: tests that copy sync thousands of times."""

from __future__ import annotations

import os
import subprocess
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from tests.testbed.host import mount_table
from tests.waiting import wait_for

if TYPE_CHECKING:
    from collections.abc import Iterator

MEMORY = Path("/dev/shm")


@contextmanager
def area_in(base: Path | None = None) -> Iterator[Path]:
    """A directory that every user may pass, in `base`; what was mounted in it is unmounted at the end."""
    if base is None:
        base = MEMORY if os.access(MEMORY, os.W_OK) else Path("/tmp")
    area = base / f"staging-{os.getpid()}-{os.urandom(4).hex()}"
    area.mkdir()
    area.chmod(0o755)
    try:
        yield area
    finally:
        for line in reversed(mount_table()):
            point = line.split()[4]
            if point.startswith(f"{area}/"):
                subprocess.run(["umount", "-l", point], check=True)
        wait_for(lambda: _is_gone(area), 20)


def _is_gone(area: Path) -> bool:
    """Remove it; a copier that was just killed may have ended a call of its last. Trees may be deeper than Python's."""
    subprocess.run(["chmod", "-R", "u+rwX", area], check=False)
    return subprocess.run(["rm", "-rf", area], check=False).returncode == 0 and not area.exists()
