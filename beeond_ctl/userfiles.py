"""Files that root writes for one user to read: what `status` shows within a job, and `report` after it.

They stay root's, so that nobody can change or enlarge them; the user gets an entry in their ACL. Where a file system
keeps no ACLs the file is given to its reader, unless `keep` says otherwise. Knows nothing of what is in them.
"""

from __future__ import annotations

import errno
import os
import secrets
import stat
import struct
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Final

from beeond_ctl.errors import NodeError

if TYPE_CHECKING:
    from collections.abc import Iterator

MAX_BYTES: Final = 16 * 1024**2
"""Not more of one file is read, whoever wrote it."""

_ACL: Final = "system.posix_acl_access"
_USER_OBJ, _USER, _GROUP_OBJ, _MASK, _OTHER = 0x01, 0x02, 0x04, 0x10, 0x20
_ANY: Final = 0xFFFFFFFF
_READ: Final = 4
_DIRECTORY: Final = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_NEW: Final = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC


def acl_for(uid: int) -> bytes:
    """The ACL "root and user `uid` may read", as the kernel takes it (linux/posix_acl_xattr.h, version 2)."""
    entries = (
        (_USER_OBJ, _READ, _ANY), (_USER, _READ, uid), (_GROUP_OBJ, 0, _ANY), (_MASK, _READ, _ANY), (_OTHER, 0, _ANY),
    )  # fmt: skip
    return struct.pack("<I", 2) + b"".join(struct.pack("<HHI", *entry) for entry in entries)


@contextmanager
def own_directory(path: str, within: int | None = None) -> Iterator[int]:
    """A descriptor of the directory `path`, which must be root's to write alone. Raises OSError, NodeError."""
    descriptor = os.open(path, _DIRECTORY, dir_fd=within)
    try:
        status = os.fstat(descriptor)
        if status.st_uid not in (0, os.geteuid()) or status.st_mode & 0o022:
            raise NodeError(
                f"{path}: others than root may write it; run `chown root {path}; chmod 755 {path}`"
            )
        yield descriptor
    finally:
        os.close(descriptor)


def make_directory(path: str, within: int | None = None) -> None:
    """Make the directory `path` for all to enter, whatever the umask is, if it is not there. Raises OSError."""
    with suppress(FileExistsError):
        os.mkdir(path, dir_fd=within)
        os.chmod(path, 0o755, dir_fd=within)  # noqa: S103 - what is in it has modes of its own


def write(directory: int, name: str, data: bytes, uid: int, *, keep: bool) -> None:
    """Replace the file `name` in `directory` (a descriptor, see `own_directory`) by one that `uid` may read.

    `keep`: the file stays root's also where there are no ACLs, and is then root's to read alone. Raises OSError.
    """
    temporary = f".{name}.{secrets.token_hex(4)}"
    descriptor = os.open(temporary, _NEW, 0o400, dir_fd=directory)
    try:
        with open(descriptor, "wb") as file:
            file.write(data)
            try:
                os.setxattr(descriptor, _ACL, acl_for(uid))
            except OSError as error:
                if error.errno not in (errno.ENOTSUP, errno.EOPNOTSUPP):
                    raise
                if not keep:
                    os.fchown(descriptor, uid, -1)
        os.rename(temporary, name, src_dir_fd=directory, dst_dir_fd=directory)
    except BaseException:
        with suppress(FileNotFoundError):
            os.unlink(temporary, dir_fd=directory)
        raise


def read(directory: int, name: str) -> bytes:
    """What is in the file, as far as `MAX_BYTES`; it may be the user's to change. Raises OSError."""
    descriptor = os.open(name, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, dir_fd=directory)
    with open(descriptor, "rb") as file:
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            raise OSError(errno.EINVAL, "not a file", name)
        return file.read(MAX_BYTES)
