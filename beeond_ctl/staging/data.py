"""The bytes of one open file to another, with holes, with or without a checksum of what was read."""

from __future__ import annotations

import errno
import fcntl
import os

import xxhash

from beeond_ctl.staging.causes import StagingError

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterator

SMALL = 1 << 20
"""Bytes up to which a file is read in one go."""

_CHUNK = 1 << 20
_ZEROS = bytes(_CHUNK)
_FICLONE = 0x40049409  # linux/fs.h
_NO_COPY_RANGE = (
    errno.EXDEV,
    errno.EINVAL,
    errno.EOPNOTSUPP,
    errno.ENOSYS,
    errno.EBADF,
    errno.EPERM,
    errno.ETXTBSY,
)


class SourceError(Exception):
    """Wraps an OSError of the reading side, so that a message can say which side it was."""

    def __init__(self, error: OSError) -> None:
        """Wrap `error`."""
        super().__init__(str(error))
        self.error = error


def write_all(fd: int, data: bytes | memoryview) -> None:
    """Write all of `data` where `fd` stands. Raises OSError."""
    written = os.write(fd, data)
    while written < len(data):
        data = data[written:]
        written = os.write(fd, data)


def copy_small(source: int, target: int, size: int) -> bytes:
    """Copy `size` bytes and return their checksum. Raises StagingError when the file has not as many any
    more."""
    try:
        data = os.read(source, size + 1)
        while len(data) < size:
            more = os.read(source, size + 1 - len(data))
            if not more:
                break
            data += more
    except OSError as error:
        raise SourceError(error) from error
    if len(data) != size:
        raise StagingError("changed")
    if data:
        write_all(target, data)
    return xxhash.xxh3_128_digest(data)


def hash_small(fd: int, size: int) -> bytes | None:
    """The checksum of the file's `size` bytes, or None when it has not exactly as many."""
    data = os.read(fd, size + 1)
    while len(data) < size:
        more = os.read(fd, size + 1 - len(data))
        if not more:
            break
        data += more
    return xxhash.xxh3_128_digest(data) if len(data) == size else None


def segments(fd: int, start: int, end: int) -> Iterator[tuple[int, int]]:
    """The parts of `fd` between `start` and `end` that hold data (lseek(2), SEEK_DATA). Raises OSError."""
    at = start
    while at < end:
        try:
            at = os.lseek(fd, at, os.SEEK_DATA)
        except OSError as error:
            if error.errno == errno.ENXIO:  # nothing but a hole from here on
                return
            if error.errno in (errno.EINVAL, errno.EOPNOTSUPP):
                yield at, end
                return
            raise
        if at >= end:
            return
        stop = min(os.lseek(fd, at, os.SEEK_HOLE), end)
        if stop <= at:
            raise StagingError("changed")
        yield at, stop
        at = stop


def copy_range(source: int, target: int, start: int, end: int, *, sparse: bool) -> bytes:
    """Copy the bytes from `start` to `end` to the same place and return their checksum.

    `sparse` leaves holes out; `target` must have nothing there yet. Raises OSError, SourceError,
    StagingError.
    """
    digest, at = xxhash.xxh3_128(), start
    buffer = memoryview(bytearray(min(_CHUNK, max(end - start, 1))))
    for begin, stop in _from_source(source, start, end) if sparse else ((start, end),):
        _hash_zeros(digest, begin - at)
        at = begin
        while at < stop:
            try:
                count = os.preadv(source, [buffer[: min(len(buffer), stop - at)]], at)
            except OSError as error:
                raise SourceError(error) from error
            if not count:
                raise StagingError("changed")
            part = buffer[:count]
            digest.update(part)
            done = os.pwrite(target, part, at)
            while done < count:
                done += os.pwrite(target, part[done:], at + done)
            at += count
    _hash_zeros(digest, end - at)
    return digest.digest()


def hash_range(fd: int, start: int, end: int, *, sparse: bool) -> bytes | None:
    """The checksum of the bytes from `start` to `end`, or None when the file ends before. Raises OSError."""
    digest, at = xxhash.xxh3_128(), start
    buffer = memoryview(bytearray(min(_CHUNK, max(end - start, 1))))
    for begin, stop in segments(fd, start, end) if sparse else ((start, end),):
        _hash_zeros(digest, begin - at)
        at = begin
        while at < stop:
            count = os.preadv(fd, [buffer[: min(len(buffer), stop - at)]], at)
            if not count:
                return None
            digest.update(buffer[:count])
            at += count
    _hash_zeros(digest, end - at)
    return digest.digest()


def clone_range(source: int, target: int, start: int, end: int, *, sparse: bool) -> None:
    """Copy as `copy_range`, but inside the kernel where it can, and without a checksum."""
    for begin, stop in _from_source(source, start, end) if sparse else ((start, end),):
        at = begin
        while at < stop:
            try:
                count = os.copy_file_range(source, target, min(stop - at, 1 << 30), at, at)
            except OSError as error:
                if error.errno not in _NO_COPY_RANGE:
                    raise
                count = 0
            if not count:  # cannot, or says so by copying nothing: the plain way finds out
                copy_range(source, target, at, stop, sparse=False)
                break
            at += count


def reflink(source: int, target: int) -> bool:
    """Let `target` share the blocks of `source`, if their file system can (ioctl_ficlone(2))."""
    try:
        fcntl.ioctl(target, _FICLONE, source)
    except OSError:
        return False
    return True


def _from_source(source: int, start: int, end: int) -> Iterator[tuple[int, int]]:
    try:
        yield from segments(source, start, end)
    except OSError as error:
        raise SourceError(error) from error


def _hash_zeros(digest: xxhash.xxh3_128, count: int) -> None:
    while count > 0:
        digest.update(_ZEROS if count >= _CHUNK else _ZEROS[:count])
        count -= _CHUNK
