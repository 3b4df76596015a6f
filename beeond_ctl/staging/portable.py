"""What `_native` does, without it: the same functions, which leave everything to their callers.

For sites that have no C compiler. Which of the two is used makes no difference but to the time it takes; tests run
over both.
"""

from __future__ import annotations

import os
from array import array
from bisect import bisect_left
from itertools import islice

from beeond_ctl import libc

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterator

    Marks = list[array[int]]

WRITE, PLACE, VERIFY, SYNC_EACH, DROP_CACHE, MADE, LIVE, NAMELESS, DIRECT = 1, 2, 4, 8, 16, 32, 64, 128, 256
PRIVATE, NO_REPLACE = 512, 1024
"""What `copy` is to do, and with what."""

_PR_SET_DUMPABLE, _PR_SET_NO_NEW_PRIVS = 4, 38  # prctl(2)


def harden() -> None:
    """Give up what is left of privileges for good, and let nobody look into this process. Raises OSError."""
    libc.call("prctl", _PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)
    libc.call("prctl", _PR_SET_DUMPABLE, 0, 0, 0, 0)


def marks(known: array[int]) -> Marks:
    """The set of some fingerprints: 8 bytes each, sorted in parts, so that ten million fit anywhere."""
    parts = [array("Q") for _ in range(256)]
    for mark in known:
        parts[mark >> 56].append(mark)
    return [array("Q", sorted(part)) for part in parts]


def has(known: Marks, mark: int) -> bool:
    """Whether a set has a fingerprint."""
    part = known[mark >> 56]
    at = bisect_left(part, mark)
    return at < len(part) and part[at] == mark


def opendir(fd: int) -> Iterator[os.DirEntry[str]]:
    """A directory to read, from a descriptor that stays the caller's. Raises OSError."""
    return os.scandir(fd)


def readdir(directory: Iterator[os.DirEntry[str]], limit: int) -> tuple[bytes, list[str], bool]:
    """Some entries: names that are no directories, each with a NUL behind; directories; whether that was all.

    Raises OSError.
    """
    names, below = bytearray(), []
    count = 0
    for entry in islice(directory, limit):
        count += 1
        if entry.is_dir(follow_symlinks=False):
            below.append(entry.name)
        else:
            names += os.fsencode(entry.name) + b"\0"
    return bytes(names), below, count < limit


def examine(
    source: int,  # noqa: ARG001
    target: int,  # noqa: ARG001
    names: bytes,
    prefix: bytes,  # noqa: ARG001
    known: Marks | None,  # noqa: ARG001
    update: bool,  # noqa: ARG001, FBT001
) -> tuple[int, list[str], list[int], list[str]]:
    """What is to be done with names of one directory: how many are at `target` already (a descriptor, or -1), names
    and sizes of files of at most two pieces and one name that are not, and the names that the caller has to look at.

    A file is there if its fingerprint is `known` (`prefix` is its directory's path with a slash) or `update` is set,
    and `target` has it as `scan` says. Where there is a `target`, servers are asked, whatever this node remembers of
    both sides.
    """
    return 0, [], [], [os.fsdecode(name) for name in names.split(b"\0")[:-1]]


def look(
    source: int,  # noqa: ARG001
    target: int,  # noqa: ARG001
    names: bytes,
    prefix: bytes,  # noqa: ARG001
) -> tuple[list[str], list[int], list[str], list[int], list[int]]:
    """What it takes to say elsewhere what `examine` says: names and sizes of such files, the names that the caller has
    to look at, and of the files the fingerprints and what `target` has: 0 nothing that counts, 1 a copy if it is
    proved, 2 a copy also for `update`.
    """
    return [], [], [os.fsdecode(name) for name in names.split(b"\0")[:-1]], [], []


def put_new(
    directory: int,  # noqa: ARG001
    temp: bytes,  # noqa: ARG001
    name: bytes,  # noqa: ARG001
) -> bool:
    """Give what is in a directory under the name `temp` another one, if that is free; whether it has it. If not, for
    whatever reason, nothing was changed."""
    return False


def copy(
    source: int,  # noqa: ARG001
    target: int,  # noqa: ARG001
    names: list[str],
    prefix: bytes,  # noqa: ARG001
    temp: str,  # noqa: ARG001
    first: int,  # noqa: ARG001
    gid: int,  # noqa: ARG001
    flags: int,  # noqa: ARG001
    before: bytes,  # noqa: ARG001
    quiet_ns: int,  # noqa: ARG001
) -> tuple[bytes, int, list[int], list[int], bytes]:
    """Copy ordinary files of one directory, the number N of them by way of the name TEMP + (`first` + N).

    `gid` is the group of new files in `target` (-1: not known). With `WRITE` but not `PLACE`, they get their names when
    called again with `PLACE` and the last of the values returned, as `before`, after they were synced. With `LIVE`,
    files that changed after `quiet_ns` are left, and the data of others is settled before it is read (see `quiet`).
    With `DIRECT` they have their own names from the start, where these are free. Returns proofs, bytes, the numbers of
    the names that are left to the caller, with nothing of them at `target`, those of files that read back differently,
    and what to come back with.
    """
    return b"", 0, list(range(len(names))), [], b""
