"""The list that stage-in uses: what a look at a pending job's source saw of its directories. Runs as the user.

A list is believed only as far as it is proved to be current. A directory whose inode, mtime and ctime are those that
were listed has the same names, each of the same kind, if it had been left alone for so long before it was listed that
whatever changes it later sets other times (see `quiet`). What a list says of a file besides, its size, only decides how
work is handed out: a file may be written without its directory showing it, and copiers look for themselves.

Both sides are the user's: whoever forges a list leaves out or adds names of their own transfer, as if they had removed
or made such files. It is read strictly, in bounded memory, and no name in it can lead out of its directory.

A file of lines `KEY CHECK JSON`, the first two of 16 hexadecimal digits, of the directory's path and of the JSON:

    [VERSION, SOURCE]                                                     the first line
    [PATH, INODE, MTIME, CTIME, FILES, SIZES, INODES, OTHERS, BELOW]      a directory, below SOURCE

FILES are those that a scanner need not look at: ordinary, small, of one name. BELOW are directories, OTHERS all else.
Names are joined by `/`, which none can have in it.
"""

from __future__ import annotations

import os
import re
import stat
from contextlib import suppress

import xxhash

from beeond_ctl.staging import wire
from beeond_ctl.staging.quiet import QUIET_NS, clock_ns, is_quiet

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

SMALL = 1 << 20
"""Bytes up to which a file is listed (data.SMALL: what is read in one go)."""

MAX_BYTES, MAX_DIRECTORIES, MAX_RECORD = 32 << 20, 100_000, 4 << 20
"""Of a list, and of one line in it. What goes beyond is not listed, and walked."""

LIFE_NS = 7 * 86400 * 10**9
"""A list that nobody has used for so long is removed by the user's next look."""

_VERSION = 1
_HEAD = 34
_NAME = re.compile(r"[0-9]+\.[0-9]+\.list|\.([0-9]+\.[0-9]+\.list|clock)\.[0-9a-f]{16}")
_OPEN = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC


class ListError(Exception):
    """There is no list that can be used; says why."""


def path_of(pattern: str, user: str, job_id: int, index: int) -> str:
    """Where the list of source number `index` of a job is; `pattern` is the site's directory for them."""
    return os.path.join(pattern.replace("%u", user), f"{job_id}.{index}.list")


def _key(path: str) -> int:
    return xxhash.xxh3_64_intdigest(os.fsencode(path))


def _line(path: str, value: list[Any]) -> bytes:
    text = wire.dumps(value).encode("ascii")
    return b"%016x %016x %s\n" % (_key(path), xxhash.xxh3_64_intdigest(text), text)


def _value(line: bytes) -> Any:  # noqa: ANN401 - whatever it is: the caller checks
    """What a line says. Raises ListError."""
    text = line[_HEAD:-1]
    if line[-1:] != b"\n" or line[17:_HEAD] != b"%016x " % xxhash.xxh3_64_intdigest(text):
        raise ListError("damaged")
    try:
        return wire.loads(text)
    except wire.ProtocolError as error:
        raise ListError(str(error)) from None


def _own_directory(path: str) -> int:
    """A descriptor of `path`, a directory that only its owner, who is us, may write. Raises OSError, ListError."""
    fd = os.open(path, _OPEN | os.O_DIRECTORY)
    info = os.fstat(fd)
    if info.st_uid != os.geteuid() or info.st_mode & 0o022:
        os.close(fd)
        raise ListError("others may write where it is")
    return fd


# --- reading ------------------------------------------------------------------------------------------------------


class Listed:
    """What is in a directory: files that need no look, with their sizes; other names, each with a NUL behind; and
    directories."""

    __slots__ = ("below", "files", "inodes", "others", "sizes")

    def __init__(self, names: list[list[bytes]], sizes: list[int], inodes: list[int]) -> None:
        self.files, self.below = ([os.fsdecode(name) for name in names[at]] for at in (0, 2))
        self.others = b"".join(name + b"\0" for name in names[1])
        self.sizes, self.inodes = sizes, inodes


class List:
    """A list, open to be looked up. Safe for threads, but for `named`."""

    def __init__(self, fd: int, source: str) -> None:
        """See what is listed in `fd`, which is ours from now on, of `source`. Raises OSError, ListError."""
        self._fd = fd
        self._where: dict[int, tuple[int, int]] = {}
        self._names: dict[int, tuple[str, str]] | None = None
        with open(fd, "rb", closefd=False) as stream:
            line = stream.readline(MAX_RECORD)
            if _value(line) != [_VERSION, source]:
                raise ListError("of another version or source")
            at = len(line)
            while at < MAX_BYTES and len(self._where) < MAX_DIRECTORIES:
                line = stream.readline(MAX_RECORD)
                if not line.endswith(b"\n"):
                    break
                with suppress(ValueError):
                    self._where[int(line[:16], 16)] = at, len(line)
                at += len(line)

    def current(self, path: str, info: os.stat_result) -> Listed | None:
        """What is in the directory `path` that has the status `info`; None if the list does not prove that."""
        try:
            at, length = self._where[_key(path)]
            value = _value(os.pread(self._fd, length, at))
            if value[:4] != [path, info.st_ino, info.st_mtime_ns, info.st_ctime_ns]:
                return None
            return _checked(value)
        except (KeyError, OSError, ListError, ValueError, TypeError):
            return None

    def named(self, inode: int) -> tuple[str, str] | None:
        """Directory and name of the listed file with this inode number. Whether it still is that is not known."""
        if self._names is None:
            self._names = {}
            for at, length in self._where.values():
                with suppress(OSError, ListError, ValueError, TypeError):
                    value = _value(os.pread(self._fd, length, at))
                    listed = _checked(value)
                    path = str(value[0])
                    self._names |= {
                        each: (path, name) for each, name in zip(listed.inodes, listed.files, strict=True)
                    }
        return self._names.get(inode)


def _checked(value: Any) -> Listed:  # noqa: ANN401
    """A directory's record. Raises ValueError, TypeError."""
    path, _, _, _, files, sizes, inodes, others, below = value
    _split(path)
    names = [_split(text) for text in (files, others, below)]
    if not (_are(sizes, len(names[0]), SMALL) and _are(inodes, len(names[0]), (1 << 64) - 1)):
        raise ValueError("not as many numbers as names")
    return Listed(names, sizes, inodes)


def _are(numbers: Any, count: int, most: int) -> bool:  # noqa: ANN401
    """Whether these are `count` numbers from 0 to `most`."""
    if type(numbers) is not list or len(numbers) != count or not set(map(type, numbers)) <= {int}:
        return False
    return not numbers or (min(numbers) >= 0 and max(numbers) <= most)


def _split(text: Any) -> list[bytes]:  # noqa: ANN401
    """The names in `text`, which may also be a path. Raises ValueError, TypeError."""
    joined = os.fsencode(text)
    if not joined:
        return []
    names = joined.split(b"/")
    if b"\0" in joined or not {b"", b".", b".."}.isdisjoint(names) or max(map(len, names)) > 255:
        raise ValueError("not names")
    return names


def take(path: str, source: str) -> List:
    """The list `path` of `source`, whose name is removed: it is used once. Raises OSError, ListError."""
    directory, name = os.path.split(path)
    place = _own_directory(directory)
    try:
        fd = os.open(name, _OPEN, dir_fd=place)
        try:
            os.unlink(name, dir_fd=place)
            info = os.fstat(fd)
            if not stat.S_ISREG(info.st_mode) or info.st_uid != os.geteuid():
                raise ListError("not a file of the user's")  # noqa: TRY301
            return List(fd, source)
        except BaseException:
            os.close(fd)
            raise
    finally:
        os.close(place)


# --- writing ------------------------------------------------------------------------------------------------------


class Directory:
    """One directory while it is read."""

    def __init__(self, fd: int) -> None:
        """`fd`: it is open there, and nothing of it was read. Raises OSError."""
        self.fd = fd
        self._before = os.fstat(fd)
        self._files: list[str] = []
        self._sizes: list[int] = []
        self._inodes: list[int] = []
        self._others: list[str] = []
        self._below: list[str] = []

    def add(self, name: str, info: os.stat_result) -> None:
        """An entry with the status `info`."""
        if stat.S_ISDIR(info.st_mode):
            self._below.append(name)
        elif stat.S_ISREG(info.st_mode) and info.st_nlink == 1 and info.st_size <= SMALL:
            self._files.append(name)
            self._sizes.append(info.st_size)
            self._inodes.append(info.st_ino)
        else:
            self._others.append(name)

    def record(self, path: str, device: int, until_ns: int) -> bytes:
        """Its line; nothing if it was not left alone, or is not on `device`. All has been read. Raises OSError."""
        info, before = os.fstat(self.fd), self._before
        if info.st_dev != device:
            return b""
        mtime, ctime = info.st_mtime_ns, info.st_ctime_ns
        if (mtime, ctime) != (before.st_mtime_ns, before.st_ctime_ns) or not is_quiet(mtime, ctime, until_ns):
            return b""
        files, others, below = ("/".join(names) for names in (self._files, self._others, self._below))
        return _line(path, [path, info.st_ino, mtime, ctime, files, self._sizes, self._inodes, others, below])


class Writer:
    """A list that is being made. What goes wrong with it harms nothing but the list."""

    def __init__(self, path: str, source: str) -> None:
        """Begin the list `path` of the directory `source`; old ones of this user's go. Raises OSError, ListError."""
        directory, self._name = os.path.split(path)
        with suppress(FileExistsError):
            os.mkdir(directory, 0o700)
        self._place = _own_directory(directory)
        self._temp = f".{self._name}.{os.urandom(8).hex()}"
        self._length = self._count = 0
        try:
            now_ns, self._device = _now_ns(directory, source)
            self._until_ns = now_ns - QUIET_NS
            for name in os.listdir(self._place):
                if _NAME.fullmatch(name):
                    self._tidy(name, now_ns - LIFE_NS)
            flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
            fd = os.open(self._temp, flags, 0o600, dir_fd=self._place)
        except BaseException:
            os.close(self._place)
            raise
        self._file = os.fdopen(fd, "wb", 1 << 16)
        self._write(_line("", [_VERSION, source]))

    def _tidy(self, name: str, before_ns: int) -> None:
        with suppress(OSError):
            if os.stat(name, dir_fd=self._place, follow_symlinks=False).st_mtime_ns < before_ns:
                os.unlink(name, dir_fd=self._place)

    def _write(self, line: bytes) -> None:
        self._file.write(line)
        self._length += len(line)

    @staticmethod
    def begin(fd: int) -> Directory:
        """A directory that is open, and of which nothing was read. Raises OSError."""
        return Directory(fd)

    def line(self, path: str, directory: Directory) -> bytes:
        """What to `add` for a directory, `path` below the source, all of which has been read. Raises OSError."""
        return directory.record(path, self._device, self._until_ns)

    def add(self, line: bytes) -> None:
        """List a directory, if there is room for it. Raises OSError."""
        fits = len(line) <= MAX_RECORD and self._length + len(line) <= MAX_BYTES
        if line and fits and self._count < MAX_DIRECTORIES:
            self._write(line)
            self._count += 1

    def close(self, *, keep: bool) -> None:
        """Give the list its name, or remove it. Raises OSError."""
        try:
            self._file.close()
            if keep:
                os.rename(self._temp, self._name, src_dir_fd=self._place, dst_dir_fd=self._place)
                return
            os.unlink(self._temp, dir_fd=self._place)
        except OSError:
            with suppress(OSError):
                os.unlink(self._temp, dir_fd=self._place)
            raise
        finally:
            os.close(self._place)


def _now_ns(directory: str, source: str) -> tuple[int, int]:
    """The time by the clock of the file system that `source` is on, and its number. Raises OSError, ListError."""
    fd = os.open(source, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        now_ns, device = clock_ns(directory, fd), os.fstat(fd).st_dev
    finally:
        os.close(fd)
    if now_ns is None:
        raise ListError(f"{directory} is not on the file system of the source, or cannot be written")
    return now_ns, device


def remove(path: str) -> None:
    """Remove the list `path`, if it is there. Raises OSError, ListError."""
    directory, name = os.path.split(path)
    with suppress(FileNotFoundError):
        place = _own_directory(directory)
        try:
            os.unlink(name, dir_fd=place)
        finally:
            os.close(place)
