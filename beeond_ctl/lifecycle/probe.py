"""The write probe: a mount is not readiness, so each node writes, and another one reads it.

The directory that is probed may be the user's already, so nothing here follows a path through it: directories are
opened without following links, and used by their descriptors.
"""

from __future__ import annotations

import errno
import os
import secrets
import time
from contextlib import contextmanager
from typing import TYPE_CHECKING, Final

from beeond_ctl import libc, mounts
from beeond_ctl.aside import tried
from beeond_ctl.errors import NodeError, one_line

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

_DIRECTORY: Final = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_MARK: Final = "mark"

PERHAPS_THE_USERS: Final = "; a process of the job's user may have done that"
"""How what went wrong with a probe ends where it proves nothing against any node."""
_BY_USERS: Final = frozenset(
    [
        errno.EAGAIN, errno.EDQUOT, errno.EEXIST, errno.EINVAL, errno.EISDIR, errno.ELOOP, errno.ENOENT, errno.ENOSPC,
        errno.ENOTDIR, errno.ENOTEMPTY, errno.ENXIO, errno.ESTALE,
    ]
)  # fmt: skip
"""What who owns a directory can bring about for root in it; no server that is lost, nor a device, says so.

EINVAL: a client of GlusterFS said so of its root, once in many runs, where the user had just made something in it.
"""


def within(deadline_s: float, what: str, action: Callable[[], None]) -> None:
    """Do `action`, which may hang in the kernel. Raises NodeError with `what` when it does, or fails."""
    if wrong := tried(action, within_s=deadline_s):
        raise NodeError(f"{what} ({wrong}); see the services' logs")


@contextmanager
def _opened(path: str | Path, within_fd: int | None = None) -> Iterator[int]:
    descriptor = os.open(path, _DIRECTORY, dir_fd=within_fd)
    try:
        yield descriptor
    finally:
        os.close(descriptor)


@contextmanager
def _opened_mount(point: Path) -> Iterator[int]:
    """The directory mounted at `point`: what lies under it while nothing is mounted must not pass for it."""
    with _opened(point) as top:
        if mounts.mount_at(str(point)) is None:
            raise OSError(errno.ENOTCONN, "nothing is mounted", str(point))
        yield top


def excusing(action: Callable[[], None]) -> None:
    """Do `action` where the user may be at work, too.

    Raises NodeError that ends with `PERHAPS_THE_USERS` for what the user can bring about, else what `action` does.
    """
    try:
        action()
    except OSError as error:
        if error.errno in _BY_USERS:
            raise NodeError(f"{one_line(error)}{PERHAPS_THE_USERS}") from error
        raise


def write(point: Path, node: str) -> None:
    """Leave this node's mark below the mount `point`. Making a directory needs every server of the file system.

    Raises OSError.
    """
    name = _name(node)
    with _opened_mount(point) as top:
        os.mkdir(name, 0o700, dir_fd=top)
        with _opened(name, top) as directory:
            flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
            with os.fdopen(os.open(_MARK, flags, 0o600, dir_fd=directory), "w") as file:
                file.write(node)


def check(point: Path, node: str) -> None:
    """Read the mark of `node`, and remove it. Raises NodeError when another one wrote it, OSError if not there."""
    name = _name(node)
    with _opened_mount(point) as top:
        with _opened(name, top) as directory:
            flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
            with os.fdopen(os.open(_MARK, flags, dir_fd=directory), "rb") as file:
                found = file.read(1024).decode(errors="replace")
            if found != node or os.fstat(directory).st_uid != 0:
                raise NodeError(
                    f"{point}: what {node} wrote reads {found!r} here; the file system is not one"
                    f"{PERHAPS_THE_USERS}"
                )
            os.unlink(_MARK, dir_fd=directory)
        os.rmdir(name, dir_fd=top)


def touch(point: Path) -> None:
    """Make and remove a directory, which needs every server; its name cannot be guessed. Raises OSError."""
    name = _name(secrets.token_hex(8))
    with _opened_mount(point) as top:
        os.mkdir(name, 0, dir_fd=top)
        os.rmdir(name, dir_fd=top)


def sync(point: Path) -> None:
    """Write out what processes stored through mappings, which closing a file need not do. Raises OSError.

    syncfs(2) reports errors since Linux 5.8.
    """
    with _opened_mount(point) as top:
        libc.call("syncfs", top)


def insist(point: Path, deadline_s: float) -> None:
    """`touch` until it succeeds: clients take some seconds to find a server that was started again.

    Raises OSError, that of the last try, when `deadline_s` have passed; NodeError where that is that all is full.
    """
    deadline = time.monotonic() + deadline_s
    while True:
        try:
            return touch(point)
        except OSError as error:
            if time.monotonic() > deadline - 1:
                if error.errno == errno.ENOSPC:  # others have filled what was kept for tear-down
                    raise NodeError(f"{point} is full; make room on the devices of its nodes") from error
                raise
        time.sleep(0.1)


def _name(word: str) -> str:
    return f".beeond-probe-{word}"
