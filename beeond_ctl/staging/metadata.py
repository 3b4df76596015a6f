"""Owner, mode, times, extended attributes and ACLs from one open file or directory to another.

As `cp -p` does it for the same user: the group where the user is a member of it, the owner only as root, set-
uid and set-gid bits only together with the owner and group that give them their meaning.
"""

from __future__ import annotations

import errno
import os
import stat
import struct

TYPE_CHECKING = False
if TYPE_CHECKING:
    from beeond_ctl.staging.tree import Dir

_ACCESS, _DEFAULT = "system.posix_acl_access", "system.posix_acl_default"
_GRAINS_NS = (100, 1_000, 1_000_000, 1_000_000_000)
_SECOND_NS = 1_000_000_000
_LATEST_S = (2**31 - 1, 2**32 - 1, 15_032_385_535, 16_299_260_424)
"""The last second that a file system can hold: XFS without bigtime and small inodes of ext4; NFSv3; ext4; XFS."""
_EARLIEST_S = (0, -(2**31))
"""The first one: NFSv3; most others."""
_GROUP_OBJ, _MASK = 0x04, 0x10
_ACL_ENTRY = struct.Struct("<HHI")
_EUID = os.geteuid()


def same_time(source_ns: int, kept_ns: int) -> bool:
    """Whether `kept_ns` is `source_ns` as a file system keeps it that has coarser clocks (Lustre and NFSv2: seconds),
    or does not reach so far: there the kernel takes the last or first second that it can hold.

    >>> same_time(1_500_000_000, 1_000_000_000), same_time(1_500_000_000, 1_400_000_000)
    (True, False)
    >>> same_time(2**40 * 10**9, (2**31 - 1) * 10**9), same_time(5, (2**31 - 1) * 10**9)
    (True, False)
    """
    if source_ns == kept_ns or any(source_ns - source_ns % grain == kept_ns for grain in _GRAINS_NS):
        return True
    kept_s, rest_ns = divmod(kept_ns, _SECOND_NS)
    ends = _LATEST_S if source_ns > kept_ns else _EARLIEST_S
    return rest_ns == 0 and kept_s in ends


def is_copy(info: os.stat_result, there: os.stat_result, *, proved: bool) -> bool:
    """Whether `there`, at the destination, looks like the copy of a file with the status `info`: by size and time, and
    by its mode where that was not `proved`, so that `update` notices a change of mode."""
    return (
        stat.S_ISREG(there.st_mode)
        and there.st_size == info.st_size
        and same_time(info.st_mtime_ns, there.st_mtime_ns)
        and (proved or there.st_mode == info.st_mode)
    )


def extended(fd: int) -> list[str]:
    """The names of the extended attributes of `fd` that are the user's to keep."""
    try:
        names = os.listxattr(fd)
    except OSError as error:
        if error.errno in (errno.EOPNOTSUPP, errno.ENOSYS):
            return []
        raise
    return (
        [name for name in names if name.startswith("user.") or name in (_ACCESS, _DEFAULT)]
        if names
        else names
    )


def copy_metadata(
    source: int,
    target: int,
    info: os.stat_result,
    gid: int | None,
    *,
    inherits_acl: bool,
    strip: bool = False,
) -> list[str]:
    """Give `target` what `source`, whose status is `info`, has; returns notes of what could not be kept.

    `gid` is the group that `target` has now (None: unknown), `inherits_acl` tells whether it may have got an
    ACL from its directory, `strip` has it lose attributes that `source` has not. Raises OSError.
    """
    notes: list[str] = []
    mode = stat.S_IMODE(info.st_mode)
    if _EUID == 0:
        if gid != info.st_gid or info.st_uid != 0:
            os.chown(target, info.st_uid, info.st_gid)
    elif gid != info.st_gid:
        try:
            os.chown(target, -1, info.st_gid)
        except PermissionError:
            mode &= ~stat.S_ISGID
    if info.st_uid != _EUID != 0:
        mode &= ~stat.S_ISUID
    names = extended(source)
    if inherits_acl:
        for name in (_ACCESS, _DEFAULT):
            _drop(target, name)
    for name in extended(target) if strip else ():
        if name not in names:
            _drop(target, name)
    if names:
        notes += _copy_user_attributes(source, target, names)
    if _ACCESS not in names and _DEFAULT not in names:
        os.chmod(target, mode)
    else:
        notes += _copy_acls(source, target, names, mode)
    os.utime(target, ns=(info.st_atime_ns, info.st_mtime_ns))
    return notes


def _copy_user_attributes(source: int, target: int, names: list[str]) -> list[str]:
    for name in names:
        if name.startswith("user."):
            try:
                os.setxattr(target, name, os.getxattr(source, name))
            except OSError as error:
                if error.errno != errno.EOPNOTSUPP:
                    raise
                return ["xattr"]
    return []


def _copy_acls(source: int, target: int, names: list[str], mode: int) -> list[str]:
    """Mode and ACLs. Where the target keeps no ACLs the group gets no more than its own ACL entry gave it."""
    os.chmod(target, mode & ~0o070)
    kept = True
    for name in (_ACCESS, _DEFAULT):
        if name in names:
            acl = os.getxattr(source, name)
            try:
                os.setxattr(target, name, acl)
            except OSError as error:
                if error.errno != errno.EOPNOTSUPP:
                    raise
                kept = False
                if name == _ACCESS:
                    mode &= ~0o070 | _group_bits(acl) << 3
    os.chmod(target, mode)
    return [] if kept else ["acl"]


def _group_bits(acl: bytes) -> int:
    """What the owning group may do by `acl` (linux/posix_acl_xattr.h: version, then tag, permissions, id)."""
    bits = 7
    for at in range(4, len(acl) - 7, 8):
        tag, allowed, _ = _ACL_ENTRY.unpack_from(acl, at)
        if tag in (_GROUP_OBJ, _MASK):
            bits &= allowed
    return bits


def _drop(target: int, name: str) -> None:
    try:
        os.removexattr(target, name)
    except OSError as error:
        if error.errno not in (errno.ENODATA, errno.EOPNOTSUPP):
            raise


def learn_gid(directory: Dir, fd: int) -> int:
    """The group that new files in `directory` get, seen once on `fd`, which was just made there."""
    if directory.gid is None:
        directory.gid = os.fstat(fd).st_gid
    return directory.gid
