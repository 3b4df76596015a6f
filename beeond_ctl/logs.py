"""Where an instance's services log on a node: a file system in memory of their own, of limited size.

A user can have a server say something as often as they like, by writing on a full file system or by talking nonsense
to its port. In /run itself that would take the room of state files and of the system's own services, so all programs
of all backends are held to the same size, whatever they are and however they log. Knows none of them.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Final

from beeond_ctl import libc
from beeond_ctl.errors import NodeError

if TYPE_CHECKING:
    from pathlib import Path

SIZE: Final = 8 * 1024**2
"""Bytes that the logs of one instance may take on a node. What comes after that is lost."""
_FIRST: Final = 64 * 1024
"""Bytes of each log that stay when there has to be room again: what went wrong first is in them."""

_FLAGS: Final = 2 | 4 | 8  # nosuid, nodev, noexec: mount(2)
_DETACH, _NOFOLLOW = 2, 8  # umount2(2)


def make(directory: Path) -> None:
    """Make sure that `directory`, in one that is root's alone, is such a file system, with room in it.

    Raises NodeError.
    """
    try:
        directory.mkdir(mode=0o700, exist_ok=True)
        if not os.path.ismount(directory):
            options = f"size={SIZE},nr_inodes=1024,mode=0700".encode()
            libc.call("mount", b"beeond-logs", os.fsencode(directory), b"tmpfs", _FLAGS, options)
        room = os.statvfs(directory)
        if room.f_bavail * 2 < room.f_blocks:
            _give_room(directory)
    except OSError as error:
        raise NodeError(
            f"{directory}: no place for the services' logs can be made ({error.strerror}); see what /run lacks"
        ) from None


def _give_room(directory: Path) -> None:
    """Cut long logs: what a server says that is started now has to be seen. Who has one open goes on at its end."""
    for path in directory.iterdir():
        if path.lstat().st_size > _FIRST:
            os.truncate(path, _FIRST)


def remove(directory: Path) -> None:
    """Take the file system away with all that is in it; a no-op where there is none. Raises NodeError."""
    try:
        while os.path.ismount(directory):
            # Nothing in it counts any more, and who might still have a log open must not keep it.
            libc.call("umount2", os.fsencode(directory), _DETACH | _NOFOLLOW)
    except OSError as error:
        raise NodeError(f"{directory} cannot be unmounted ({error.strerror}); unmount it by hand") from None
