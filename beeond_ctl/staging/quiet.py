"""Whether a file that others may still write to can be proved: which of them have been left alone. Runs as the user.

A proof stands for a file's size, times and inode. It counts only if whatever is written later changes one of these, so
the time of the last change must have passed by the clock that sets it, with room for its grain (BeeGFS keeps seconds)
and for servers whose clocks differ by less than a second.
"""

from __future__ import annotations

import os
import time

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable

QUIET_NS = 2_000_000_000
"""A file that changed less than that before it is read may change again without its times telling."""

EARLY_NS = QUIET_NS
"""The copy of such a file is dated earlier by this, so that nothing takes it for the same (`+update`)."""

MEMORY = {"tmpfs", "ramfs"}
"""There, stores through a mapping never change a file's times."""

PATIENCE_S = 3.5
"""From its beginning on, so long a process waits for files that were written just before: `QUIET_NS`, the grain of the
times, and some room."""

_NEVER = -1


def filesystem(fd: int) -> str:
    """The type of the file system that `fd` is on, `''` when that cannot be told."""
    device = os.fstat(fd).st_dev
    return type_of_mount(2, f"{os.major(device)}:{os.minor(device)}".encode())


def type_of_mount(field: int, value: bytes) -> str:
    """The type in the first line of the mount table (proc(5)) that has `value` in this field; `''` if there is none."""
    with open("/proc/self/mountinfo", "rb") as mounts:
        for line in mounts:
            fields = line.split(b" ")  # a path may have other blanks in it
            if fields[field] == value:
                return os.fsdecode(fields[fields.index(b"-", 6) + 1])
    return ""


def clock_ns(directory: str, source: int) -> int | None:
    """The time by the clock of the file system of `source`: that of a file made in `directory`, as clocks of this
    machine and of a file system's servers differ. None where `directory` is on another one, or cannot be written.
    """
    path = os.path.join(directory, f".clock.{os.urandom(8).hex()}")
    try:
        fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
        try:
            info = os.fstat(fd)
        finally:
            os.close(fd)
            os.unlink(path)
    except OSError:
        return None
    if info.st_dev != os.fstat(source).st_dev:
        return None
    return min(info.st_mtime_ns, info.st_ctime_ns)


def limit_ns(directory: str, source: int) -> int:
    """The latest change of files on the file system of `source` that can be proved when they are read from now on, by
    its clock (`clock_ns`). Nothing can be proved where there is none.
    """
    if filesystem(source) in MEMORY:
        return _NEVER
    now_ns = clock_ns(directory, source)
    return _NEVER if now_ns is None else now_ns - QUIET_NS


def is_quiet(mtime_ns: int, ctime_ns: int, until_ns: int) -> bool:
    """Whether a file with these times can be proved; `until_ns` is from `limit_ns`."""
    return max(mtime_ns, ctime_ns) <= until_ns


def awaited_ns(latest_ns: int, until_ns: int, limit: Callable[[], int], patient_until_s: float) -> int:
    """`until_ns`, or what `limit` says when a file that changed at `latest_ns` can be proved.

    Nothing is waited for after `patient_until_s` (of `time.monotonic`), nor a file that is dated in the future.
    """
    while until_ns < latest_ns <= until_ns + 2 * QUIET_NS:
        left_s = patient_until_s - time.monotonic()
        if left_s <= 0:
            break
        time.sleep(min(left_s, (latest_ns - until_ns) / 1e9 + 0.01))
        until_ns = limit()
    return until_ns
