"""An awkward file system of our own (see through_fs.c), mounted for a while."""

from __future__ import annotations

import os
import subprocess
import time
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator

_CODE = Path(__file__).with_suffix(".c")
_COMES_UP_S = 60.0


def missing() -> str:
    """What it needs and is not here."""
    found = subprocess.run(
        ["pkg-config", "--exists", "fuse3"], check=False, stderr=subprocess.DEVNULL
    ).returncode
    return (
        ""
        if not found and os.geteuid() == 0 and os.path.exists("/dev/fuse")
        else "needs root, FUSE and libfuse3-dev"
    )


@contextmanager
def mounted(area: Path, *, delay_us: int = 0, folds: bool = False) -> Iterator[tuple[Path, Path]]:
    """The directory below and the mount point, both made in `area`, with the delays and foldings of through_fs.c.

    Raises TimeoutError when it is not mounted within a minute.
    """
    program, below, top = (area / name for name in ("through_fs", "below", "through"))
    flags = subprocess.run(
        ["pkg-config", "--cflags", "--libs", "fuse3"], capture_output=True, text=True, check=True
    )
    subprocess.run(["cc", "-O2", "-o", program, _CODE, *flags.stdout.split()], check=True)
    below.mkdir()
    top.mkdir()
    environment = {"THROUGH_FS_BELOW": str(below), "THROUGH_FS_DELAY_US": str(delay_us)}
    environment |= {"THROUGH_FS_FOLD": "1"} if folds else {}
    options = "max_threads=128,max_idle_threads=128"
    running = subprocess.Popen([program, "-f", "-o", options, top], env=environment)
    try:
        deadline = time.monotonic() + _COMES_UP_S
        while not os.path.ismount(top):
            if running.poll() is not None or time.monotonic() > deadline:
                raise TimeoutError(f"{program} has not mounted {top}")
            time.sleep(0.01)
        yield below, top
    finally:
        running.terminate()  # it unmounts
        running.wait(30)
        if os.path.ismount(top):
            subprocess.run(["umount", "-l", top], check=False)
