"""Whether two nodes see one directory, or each its own under the same path and inode number. Runs as the user.

The root of a local file system has the same inode number on every node.
"""

from __future__ import annotations

import os

from beeond_ctl.staging.quiet import filesystem, type_of_mount

_MAKE = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
_NUMBERLESS = {"tmpfs", "ramfs", "overlay", "btrfs", "zfs", "bcachefs"}
"""Types of a node's own whose devices have the number 0, as those of network file systems have."""
_SHARED = {"lustre", "gpfs", "gfs2", "ocfs2"}
"""Types that nodes share, and whose devices have a number all the same: Lustre's is made of the file system's name."""


def is_own(fd: int) -> bool:
    """Whether `fd` is on a file system of this node: in memory, or on a device."""
    kind = _type(fd)
    if os.major(os.fstat(fd).st_dev):
        return kind not in _SHARED
    return not kind or kind in _NUMBERLESS


def own_place(fd: int) -> list[str | int]:
    """What no other node has of its own directory `fd`: this kernel, and the device. Raises OSError."""
    with open("/proc/sys/kernel/random/boot_id") as file:
        return [file.read().strip(), os.fstat(fd).st_dev]


def mark(fd: int, name: str) -> None:
    """Make `name` in the directory `fd`, for others to see that it is the same. Raises OSError."""
    times = os.fstat(fd)
    made = os.open(name, _MAKE, 0o600, dir_fd=fd)
    try:
        os.close(made)
    except OSError:
        os.unlink(name, dir_fd=fd)
        raise
    _put_back(fd, times)


def unmark(fd: int, name: str) -> None:
    """Remove such a name, if it is still there. Raises OSError."""
    times = os.fstat(fd)
    try:
        os.unlink(name, dir_fd=fd)
    except FileNotFoundError:
        return
    _put_back(fd, times)


def _put_back(fd: int, times: os.stat_result) -> None:
    """Give a directory the times it had: what comes and goes in it is nobody's. One of another user keeps the new."""
    try:
        os.utime(fd, ns=(times.st_atime_ns, times.st_mtime_ns))
    except OSError:
        return


def _type(fd: int) -> str:
    """The type of the file system that `fd` is on, by its mount: the device number that files on btrfs show is not that
    of the mount. `''` when it cannot be told."""
    try:
        with open(f"/proc/self/fdinfo/{fd}", "rb") as file:
            number = next(line.split()[1] for line in file if line.startswith(b"mnt_id:"))
    except PermissionError:  # before Linux 5.14, to a process that nobody may look into
        return filesystem(fd)
    return type_of_mount(0, number)
