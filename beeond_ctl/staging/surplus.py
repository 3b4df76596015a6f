"""What `delete` removes: what a directory of the destination has and its source has not. Runs as the user.

Copiers remove it and `preview` shows it, both by this one walk: what is not shown does not go.
"""

from __future__ import annotations

import os
import re
import stat
import sys
from typing import NamedTuple

from beeond_ctl.flushes import NAME as FLUSHES
from beeond_ctl.staging.causes import StagingError
from beeond_ctl.staging.child import PREFIX

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Generator, Iterable, Iterator

_LOOK = os.O_PATH | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_LIST = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC
_EUID = os.geteuid()

_TEMPORARY = re.compile(re.escape(PREFIX) + r"([0-9a-f]{8})\.")
_KEPT = re.compile(r"\.newer-[0-9a-f]{8}\.\d+(\.\d+)?\Z")

_AT_EMPTY_PATH, _STATX_MNT_ID = 0x1000, 0x1000


def is_spared(path: str, dead: Collection[str] = ()) -> bool:
    """Whether the entry `path`, relative to the destination, stays although the source has it not.

    That is what somebody has written and was kept as newer, what a transfer is about to write, unless its token is
    `dead`, and what the flushes of a job have in its file system.
    """
    name = path.rpartition("/")[2]
    temporary = _TEMPORARY.match(name)
    writes = temporary is not None and temporary[1] not in dead
    return writes or bool(_KEPT.search(name)) or path == FLUSHES


class Doomed(NamedTuple):
    """An entry that goes, by its name in an open directory. A directory comes after what is in it."""

    directory: int
    name: str
    path: str
    is_dir: bool
    is_top: bool
    """It is surplus itself, and not only below something that is."""


class _Level:
    """A directory that is walked through, and what is left of it."""

    def __init__(self, fd: int, name: str, path: str, entries: Iterator[os.DirEntry[str]]) -> None:
        self.fd, self.name, self.path, self.entries = fd, name, path, entries
        self.spared = False
        """Something in it stays, and so does it."""


class Walk:
    """Through what is surplus, never into another file system, nor into the source."""

    def __init__(
        self,
        source: os.stat_result,
        dead: Collection[str],
        unread: Callable[[OSError | StagingError, str], None] | None = None,
    ) -> None:
        """`source` is the source's root, `dead` as in `is_spared` below what is surplus.

        `unread` is told what cannot be looked into, and nothing is changed; without it the owner's directories are
        opened up as far as that takes.
        """
        self._source = source.st_dev, source.st_ino
        self._dead, self._unread = dead, unread
        self.at = ""
        """The entry that it has come to."""

    def is_source(self, fd: int) -> bool:
        """Whether this directory is the source itself, by whatever way it was reached."""
        info = os.fstat(fd)
        return (info.st_dev, info.st_ino) == self._source

    def doomed(
        self, directory: int, path: str, surplus: Iterable[os.DirEntry[str]]
    ) -> Generator[Doomed, None, None]:
        """What goes with the entries `surplus` of `directory`, which is at `path`. Raises OSError, StagingError."""
        levels = [_Level(directory, "", path, iter(surplus))]
        place = os.fstat(directory).st_dev, _mount_of(directory)
        try:
            while True:
                level = levels[-1]
                entry = next(level.entries, None)
                if entry is None:
                    if len(levels) == 1:
                        return
                    self._leave(levels.pop())
                    self.at = level.path
                    if level.spared:
                        levels[-1].spared = True
                    else:
                        yield Doomed(levels[-1].fd, level.name, level.path, True, len(levels) == 1)
                    continue
                self.at = full = f"{level.path}/{entry.name}" if level.path else entry.name
                is_top = len(levels) == 1
                if is_spared(full, () if is_top else self._dead):
                    level.spared = True
                elif not entry.is_dir(follow_symlinks=False):
                    yield Doomed(level.fd, entry.name, full, False, is_top)
                elif (entered := self._enter(level.fd, place, entry.name, full)) is not None:
                    levels.append(entered)
                elif self._unread is not None:
                    yield Doomed(level.fd, entry.name, full, True, is_top)
        finally:
            for level in levels[1:]:
                self._leave(level)

    @staticmethod
    def _leave(level: _Level) -> None:
        level.entries.close()  # type: ignore[attr-defined]
        os.close(level.fd)

    def _enter(self, above: int, place: tuple[int, int], name: str, path: str) -> _Level | None:
        """The directory `name`; None where it went meanwhile, or `unread` was told."""
        fd = -1
        try:
            fd = self._open(above, place, name)
            return _Level(fd, name, path, os.scandir(fd))
        except (OSError, StagingError) as error:
            if fd >= 0:
                os.close(fd)
            if isinstance(error, FileNotFoundError):
                return None
            if self._unread is None:
                raise
            self._unread(error, path)
            return None

    def _open(self, above: int, place: tuple[int, int], name: str) -> int:
        """The directory `name`, if it is at the same `place`: device and mount."""
        found = os.open(name, _LOOK, dir_fd=above)
        try:
            info = os.fstat(found)
            if self.is_source(found):
                raise StagingError("is-source")
            if (info.st_dev, _mount_of(found)) != place:
                raise StagingError("mounted")
            if self._unread is None and info.st_uid == _EUID and info.st_mode & 0o700 != 0o700:
                os.chmod(f"/proc/self/fd/{found}", stat.S_IMODE(info.st_mode) | 0o700)
            return os.open(".", _LIST, dir_fd=found)
        finally:
            os.close(found)


def _mount_of(fd: int) -> int:
    """Which mount `fd` was reached by, so that a bind mount of the same file system tells; 0 before Linux 5.8."""
    import ctypes

    info = ctypes.create_string_buffer(256)
    if ctypes.CDLL(None).statx(fd, b"", _AT_EMPTY_PATH, _STATX_MNT_ID, info):
        return 0
    has = int.from_bytes(info.raw[:4], sys.byteorder) & _STATX_MNT_ID
    return int.from_bytes(info.raw[144:152], sys.byteorder) if has else 0
