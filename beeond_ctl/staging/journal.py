"""The record of a transfer: what was handed out, what was proved. Knows nothing of what the texts in it mean.

A file of records, each `length (4 bytes) crc32 (4 bytes) KIND \\t TEXT`, little-endian, appended only.
Whatever byte it is cut off at, all whole records before count, and the next run goes on behind them.

    header  JSON: version, source, destination, flags, hash, token, boot, durable, live
    run     JSON: run number, boot
    proof   what a copier proved (see `copier`)
    piece   one piece of a big file that was proved, and the temporary name it is under
    dirs    directories in which something is about to be written, under temporary names
    root    the root of the destination was not there before this transfer
    mode    what the root of the destination had before it was opened up
    done    the whole transfer was proved
    closed  the run has left no temporary names; without it, the next run looks for them

The last header counts: a run that proves less than the one before says so in another.
"""

from __future__ import annotations

import errno
import os
import stat
import struct
import zlib

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterator

_HEAD = struct.Struct("<II")
_MAX = 32 << 20


def records(fd: int, length: int | None = None) -> Iterator[tuple[str, bytes]]:
    """The whole records of the journal open at `fd`, of its first `length` bytes."""
    for kind, text, _ in _read(fd, length):
        yield kind, text


def _read(fd: int, length: int | None) -> Iterator[tuple[str, bytes, int]]:
    at = 0
    with open(os.dup(fd), "rb") as stream:
        stream.seek(0)
        while len(head := stream.read(_HEAD.size)) == _HEAD.size:
            size, crc = _HEAD.unpack(head)
            if size > _MAX or (length is not None and at + _HEAD.size + size > length):
                return
            body = stream.read(size)
            if len(body) != size or zlib.crc32(body) != crc:
                return
            at += _HEAD.size + size
            kind, _, text = body.partition(b"\t")
            yield kind.decode("ascii", "replace"), text, at


def _no_file(path: str | os.PathLike[str]) -> OSError:
    return OSError(errno.EINVAL, "the journal is no file; remove it", os.fspath(path))


class Journal:
    """A journal open for appending. Not safe for threads: its owner has a lock."""

    def __init__(self, path: str | os.PathLike[str]) -> None:
        """Open `path`, made if need be. It has to be read to its end before anything is appended. Raises OSError."""
        self.path = path
        try:
            self.fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
        except OSError as error:
            if error.errno in (errno.ELOOP, errno.EISDIR, errno.ENXIO):
                raise _no_file(path) from None
            raise
        if not stat.S_ISREG(os.fstat(self.fd).st_mode):
            os.close(self.fd)
            raise _no_file(path)
        self.length = -1  # not known yet: nothing can be written there
        self._before = 0

    def read(self) -> Iterator[tuple[str, bytes]]:
        """The whole records. What a crash left unfinished behind them is cut off. Raises OSError."""
        end = 0
        for kind, text, following in _read(self.fd, None):
            self._before = end
            yield kind, text
            end = following
        self._cut(end)

    def cut(self) -> None:
        """Cut off what `read` has said last, as it makes no sense, and all behind it. Raises OSError."""
        self._cut(self._before)

    def _cut(self, end: int) -> None:
        os.ftruncate(self.fd, end)
        self.length = end

    def append(self, *items: tuple[str, str]) -> None:
        """Write records. Raises OSError when there is no room for them."""
        data = bytearray()
        for kind, text in items:
            body = f"{kind}\t{text}".encode("ascii")
            data += _HEAD.pack(len(body), zlib.crc32(body)) + body
        at = 0
        while at < len(data):
            at += os.pwrite(self.fd, data[at:], self.length + at)
        self.length += len(data)

    def read_fd(self) -> int:
        """A descriptor that can only read, for a child; the caller closes it. Raises OSError."""
        return os.open(self.path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)

    def restart(self) -> None:
        """Forget everything."""
        os.ftruncate(self.fd, 0)
        self.length = 0

    def sync(self) -> None:
        """Make what was appended survive a crash of the machine."""
        os.fdatasync(self.fd)

    def close(self) -> None:
        """Close it; what was not synced is not."""
        os.close(self.fd)
