"""The copier: does what the coordinator hands out, as the user, and says what it has proved. A program of its
own.

Reads lines of fields (see `wire`) from standard input and answers each but the first kind with one line of
JSON:

    setup SETUP                            the transfer (see `scan`); before anything else, and when it
    changes copy   TAG DIRS PAYLOAD                entries of a batch: temporary name, data, metadata, sync,
    read back, rename piece  TAG PAYLOAD INDEX               bytes INDEX*PIECE... of a big file, into a
    temporary name all share place  TAG PAYLOAD DIGESTS             metadata and final name of a big file
    whose pieces are all there drop   TAG PAYLOAD                     remove the temporary name of a big file
    link   TAG DIRS PAYLOAD                further names of files that are there
    delete TAG DIRS                        remove what the source directories no longer have
    clean  TAG DIRS                        remove temporary names of this transfer
    finish TAG DIRS                        metadata of directories, and sync them

TAG makes temporary names unique among all copiers of a transfer and all attempts at one batch. An answer
counts every entry once: copied, skipped or failed. What it proves is opaque to the parent: `[[DIR, [[NAME,
SIZE, MTIME_NS, CTIME_NS, INODE, CHECKSUM]...]]...]`, or for a piece `[TEMPORARY_NAME, INDEX, CHECKSUM]`.

When one file is ready for its name depends on where it goes (`_Sync`): where a single file can be synced only
by itself, each is synced; on a local file system a batch is written, synced at once, and then read back and
renamed.
"""

from __future__ import annotations

import contextlib
import errno
import itertools
import os
import stat
import sys
import time

import xxhash

from beeond_ctl.staging import child, data, wire
from beeond_ctl.staging.causes import StagingError, cause_of, text_of
from beeond_ctl.staging.metadata import copy_metadata, learn_gid, same_time
from beeond_ctl.staging.scan import PIECE, PROVED, SYMLINK
from beeond_ctl.staging.tree import Dir, Tree

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Iterable
    from typing import Any

_READ = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
_MAKE = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
_NO_LINK = (errno.EPERM, errno.EOPNOTSUPP, errno.ENOSYS, errno.EMLINK, errno.EXDEV)
_TRIES = 3
_LOCAL = {"ext2", "ext3", "ext4", "xfs", "btrfs", "f2fs", "overlay"}
_MEMORY = {"tmpfs", "ramfs"}
_MAX_THREADS = 32
_PROBE = 16


class _Sync:
    """How data gets durable where it goes."""

    NONE, WHOLE, EACH = range(3)

    def __init__(self, fd: int, *, durable: bool) -> None:
        kind = _filesystem(fd)
        self.drop_cache = kind not in _MEMORY
        self.how = (
            _Sync.NONE if not durable or kind in _MEMORY else _Sync.WHOLE if kind in _LOCAL else _Sync.EACH
        )
        self.fd = fd

    def whole(self) -> None:
        """Everything on the file system (syncfs(2), which reports errors since Linux 5.8). Raises OSError."""
        import ctypes

        if ctypes.CDLL(None, use_errno=True).syncfs(self.fd):
            code = ctypes.get_errno()
            raise OSError(code, os.strerror(code))


def _filesystem(fd: int) -> str:
    """The type of the file system that `fd` is on, `''` when that cannot be told."""
    device = os.fstat(fd).st_dev
    wanted = f"{os.major(device)}:{os.minor(device)}"
    with open("/proc/self/mountinfo", encoding="utf-8", errors="surrogateescape") as mounts:
        for line in mounts:
            fields = line.split()
            if fields[2] == wanted:
                return fields[fields.index("-", 6) + 1]
    return ""


class _FailedError(Exception):
    """One entry was not copied; says which side it was."""

    def __init__(self, side: str, error: OSError | StagingError) -> None:
        super().__init__(str(error))
        self.side = side
        self.error = error


class _Result:
    """What an answer says."""

    def __init__(self) -> None:
        self.copied = self.skipped = self.bytes = 0
        self.failures: list[list[str]] = []
        self.notes: dict[str, list[str]] = {}
        self.proofs: list[list[Any]] = []
        self.extra: dict[str, Any] = {}

    def fail(self, side: str, error: OSError | StagingError, path: str) -> None:
        self.failures.append([cause_of(error), side, path, text_of(error)])

    def note(self, kind: str, path: str) -> None:
        self.notes.setdefault(kind, []).append(path)

    def line(self, tag: str) -> str:
        return wire.dumps(
            {
                "tag": tag,
                "copied": self.copied,
                "skipped": self.skipped,
                "bytes": self.bytes,
                "failures": self.failures,
                "notes": self.notes,
                "proofs": wire.dumps(self.proofs) if self.proofs else "",
                **self.extra,
            }
        )


class _Written:
    """A temporary file that waits for its sync."""

    __slots__ = ("digest", "entry", "info", "path", "source", "sparse", "target", "temp")

    def __init__(self, entry: list[Any], path: str, source: Dir, target: Dir, temp: str) -> None:
        self.entry, self.path, self.source, self.target, self.temp = entry, path, source, target, temp
        self.info: os.stat_result
        self.digest = b""
        self.sparse = False


class Copier:
    """One copier and the transfer it works for."""

    def __init__(self, setup: dict[str, Any]) -> None:
        """Open both roots. Raises OSError, StagingError when they are not what the scanner saw."""
        self.setup = setup
        self.token: str = setup["token"]
        flags = setup["flags"]
        self.resumed: bool = setup["run"] > 1
        self.update, self.read_back = "update" in flags, "metadata-only" not in flags
        self.source = Tree(setup["source"], make=False)
        self.target = Tree(setup["destination"], make=True, fresh=setup["root_made"] and not self.resumed)
        seen = [os.fstat(tree.root.fd).st_ino for tree in (self.source, self.target)]
        if seen != setup["inodes"]:
            raise StagingError("other", "this node sees another directory under that name")
        self.source_root_device = os.fstat(self.source.root.fd).st_dev
        self.same_device = self.source_root_device == os.fstat(self.target.root.fd).st_dev
        self.sync = _Sync(self.target.root.fd, durable=setup["durable"])
        self.threads = 1
        self.rename = dict([setup["single"]]) if setup["single"] else {}

    # --- batches ------------------------------------------------------------------------------------------

    def copy(self, tag: str, dirs: list[str], payload: list[Any], result: _Result) -> None:
        """Copy the entries of a batch."""
        begun, used = time.monotonic(), time.process_time()
        items: list[_Written] = []
        for index, entries in payload:
            path = dirs[index]
            try:
                target = self.target.open(path)
                source = self.source.open(path)
            except (OSError, StagingError) as error:
                side = "destination" if not self._opens(self.target, path) else "source"
                for entry in entries:
                    result.fail(side, error, _join(path, entry[0]))
                if not entries:
                    result.fail(side, error, path or ".")
                    result.extra["uncounted"] = result.extra.get("uncounted", 0) + 1
                continue
            for entry in entries:
                items.append(
                    _Written(entry, path, source, target, f"{child.PREFIX}{self.token}.{tag}.{len(items)}")
                )
        proofs: dict[str, list[Any]] = {}
        if self.sync.how == _Sync.WHOLE:
            written = self._each(lambda item: self._write(item, result), items, result)
            if written:
                try:
                    self.sync.whole()
                except OSError as error:
                    for item in written:
                        self._unlink(item)
                        result.fail("destination", error, _join(item.path, item.entry[0]))
                    written = []
            self._each(lambda item: self._place(item, result, proofs), written, result)
        else:
            self._each(
                lambda item: self._write(item, result) and self._place(item, result, proofs), items, result
            )
        result.proofs = [[path, entries] for path, entries in proofs.items()]
        self._adapt(time.monotonic() - begun, time.process_time() - used, len(items))

    @staticmethod
    def _opens(tree: Tree, path: str) -> bool:
        try:
            tree.open(path)
        except (OSError, StagingError):
            return False
        return True

    def _adapt(self, wall_s: float, busy_s: float, count: int) -> None:
        """As many threads as calls have to be in flight to keep one processor busy; one where calls do not
        wait."""
        if count > _PROBE:
            waiting = wall_s * self.threads / max(busy_s, 0.001)
            self.threads = 1 if waiting < 4 else min(_MAX_THREADS, int(waiting))

    def _each(
        self, act: Callable[[_Written], bool], items: list[_Written], result: _Result
    ) -> list[_Written]:
        """Run `act` for every item, with failures noted and tidied; returns those for which it said True."""
        done: list[_Written] = []

        def one(item: _Written) -> None:
            try:
                if act(item):
                    done.append(item)
            except _FailedError as failure:
                self._unlink(item)
                result.fail(failure.side, failure.error, _join(item.path, item.entry[0]))

        queue = iter(items)
        if self.threads == 1:
            begun, used = time.monotonic(), time.process_time()
            for item in itertools.islice(queue, _PROBE):
                one(item)
            self._adapt(time.monotonic() - begun, time.process_time() - used, len(items))
        if self.threads == 1:
            for item in queue:
                one(item)
            return done
        import threading

        lock = threading.Lock()

        def work() -> None:
            while True:
                with lock:
                    item = next(queue, None)
                if item is None:
                    return
                one(item)

        threads = [threading.Thread(target=work) for _ in range(min(self.threads, len(items)))]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return done

    def _unlink(self, item: _Written) -> None:
        with contextlib.suppress(OSError):
            os.unlink(item.temp, dir_fd=item.target.fd)

    # --- one entry ----------------------------------------------------------------------------------------

    def _write(self, item: _Written, result: _Result) -> bool:
        """Write the temporary file. False when there is nothing to do. Raises _FailedError."""
        entry = item.entry
        kind = entry[1]
        if (kind == PROVED or self.update or (kind == SYMLINK and self.resumed)) and self._kept(item):
            result.skipped += 1
            return False
        if kind == SYMLINK:
            self._symlink(item, result)
            return False
        for _ in range(_TRIES):
            if self._write_once(item, result):
                return True
            self._unlink(item)
        raise _FailedError("source", StagingError("changed"))

    def _kept(self, item: _Written) -> bool:
        """Whether the destination has the entry as the scanner saw it at the source."""
        name, kind, size, mtime, _, _, mode = item.entry
        if item.target.made:
            return False
        try:
            info = os.stat(self.rename.get(name, name), dir_fd=item.target.fd, follow_symlinks=False)
            if kind == SYMLINK:
                return stat.S_ISLNK(info.st_mode) and os.readlink(name, dir_fd=item.target.fd) == os.readlink(
                    name, dir_fd=item.source.fd
                )
        except OSError:
            return False
        return (
            info.st_size == size
            and same_time(mtime, info.st_mtime_ns)
            and stat.S_ISREG(info.st_mode)
            and (kind == PROVED or info.st_mode == mode)
        )

    def _write_once(self, item: _Written, result: _Result) -> bool:
        """One attempt; False when the source changed meanwhile."""
        side = "source"
        source = target = -1
        try:
            source = os.open(item.entry[0], _READ, dir_fd=item.source.fd)
            item.info = info = os.fstat(source)
            if not stat.S_ISREG(info.st_mode):
                raise StagingError("changed", "no longer a file")  # noqa: TRY301
            side = "destination"
            try:
                target = os.open(item.temp, _MAKE, 0o600, dir_fd=item.target.fd)
            except FileExistsError:
                os.unlink(item.temp, dir_fd=item.target.fd)  # an earlier attempt's, nobody else has this name
                target = os.open(item.temp, _MAKE, 0o600, dir_fd=item.target.fd)
            size = info.st_size
            try:
                if size <= data.SMALL and info.st_blocks * 512 >= size:
                    item.digest = data.copy_small(source, target, size)
                else:
                    item.sparse = info.st_blocks * 512 < size
                    self._copy_large(source, target, item)
            except StagingError:
                if not _same(info, os.fstat(source)):
                    return False
                raise
            for note in copy_metadata(
                source, target, info, learn_gid(item.target, target), inherits_acl=item.target.default_acl
            ):
                result.note(note, _join(item.path, item.entry[0]))
            side = "source"
            if not _same(info, os.fstat(source)):
                return False
            side = "destination"
            if self.sync.how == _Sync.EACH:
                os.fsync(target)
        except data.SourceError as error:
            raise _FailedError("source", error.error) from None
        except (OSError, StagingError) as error:
            raise _FailedError(side, error) from None
        finally:
            if target >= 0:
                side = "destination"
                try:
                    os.close(target)
                except OSError as error:  # NFS and FUSE may report a full disk only here
                    raise _FailedError(side, error) from None
                finally:
                    os.close(source)
            elif source >= 0:
                os.close(source)
        return True

    def _copy_large(self, source: int, target: int, item: _Written) -> None:
        size = item.info.st_size
        if item.sparse:
            os.ftruncate(target, size)
        if self.same_device and data.reflink(source, target):
            item.digest = (
                data.hash_range(source, 0, size, sparse=item.sparse) or b"" if self.read_back else b""
            )
        elif self.read_back:
            item.digest = data.copy_range(source, target, 0, size, sparse=item.sparse)
        else:
            data.clone_range(source, target, 0, size, sparse=item.sparse)

    def _place(self, item: _Written, result: _Result, proofs: dict[str, list[Any]]) -> bool:
        """Prove the temporary file and give it its name. Raises _FailedError."""
        info, directory = item.info, item.target.fd
        try:
            if self.read_back:
                self._prove(item)
            else:
                _compare(info, os.stat(item.temp, dir_fd=directory, follow_symlinks=False))
            name = self.rename.get(item.entry[0], item.entry[0])
            if not item.target.made:
                self._keep_newer(directory, name, info, _join(item.path, name), result)
            os.rename(item.temp, name, src_dir_fd=directory, dst_dir_fd=directory)
        except (OSError, StagingError) as error:
            raise _FailedError("destination", error) from None
        result.copied += 1
        result.bytes += info.st_size
        proof = [
            item.entry[0],
            info.st_size,
            info.st_mtime_ns,
            info.st_ctime_ns,
            info.st_ino,
            item.digest.hex(),
        ]
        try:
            proofs[item.path].append(proof)
        except KeyError:
            proofs.setdefault(item.path, []).append(proof)
        return True

    def _prove(self, item: _Written) -> None:
        """Read back what was written and compare. Raises OSError, StagingError."""
        info = item.info
        fd = os.open(item.temp, _READ, dir_fd=item.target.fd)
        try:
            if self.sync.drop_cache:
                os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
            there = os.fstat(fd)
            if info.st_size <= data.SMALL and not item.sparse:
                digest = data.hash_small(fd, info.st_size)
            else:
                digest = data.hash_range(fd, 0, info.st_size, sparse=item.sparse)
        finally:
            os.close(fd)
        if digest != item.digest:
            raise StagingError("mismatch")
        _compare(info, there)

    def _keep_newer(
        self, directory: int, name: str, info: os.stat_result, path: str, result: _Result
    ) -> None:
        """Keep a file at the destination that is newer than the one about to replace it, under another
        name."""
        try:
            there = os.stat(name, dir_fd=directory, follow_symlinks=False)
        except FileNotFoundError:
            return
        if stat.S_ISREG(there.st_mode) and there.st_mtime_ns > info.st_mtime_ns:
            kept = f"{name}.newer-{self.token}.{self.setup['run']}"
            try:
                os.link(name, kept, src_dir_fd=directory, dst_dir_fd=directory, follow_symlinks=False)
            except OSError as error:
                if error.errno not in _NO_LINK:
                    raise
                os.rename(name, kept, src_dir_fd=directory, dst_dir_fd=directory)
            result.note("newer", path)

    def _symlink(self, item: _Written, result: _Result) -> None:
        """Copy a symbolic link: its text, and its times. Raises _FailedError."""
        side, name, directory = "source", item.entry[0], item.target.fd
        try:
            text = os.readlink(name, dir_fd=item.source.fd)
            info = os.stat(name, dir_fd=item.source.fd, follow_symlinks=False)
            side = "destination"
            try:
                os.symlink(text, item.temp, dir_fd=directory)
            except FileExistsError:
                os.unlink(item.temp, dir_fd=directory)
                os.symlink(text, item.temp, dir_fd=directory)
            with contextlib.suppress(PermissionError):
                if os.geteuid() == 0:
                    os.chown(item.temp, info.st_uid, info.st_gid, dir_fd=directory, follow_symlinks=False)
                else:
                    os.chown(item.temp, -1, info.st_gid, dir_fd=directory, follow_symlinks=False)
            with contextlib.suppress(NotImplementedError):
                os.utime(
                    item.temp,
                    ns=(info.st_atime_ns, info.st_mtime_ns),
                    dir_fd=directory,
                    follow_symlinks=False,
                )
            if os.readlink(item.temp, dir_fd=directory) != text:
                raise StagingError("mismatch")  # noqa: TRY301
            os.rename(item.temp, name, src_dir_fd=directory, dst_dir_fd=directory)
        except (OSError, StagingError) as error:
            raise _FailedError(side, error) from None
        result.copied += 1

    # --- big files ----------------------------------------------------------------------------------------

    def piece(self, payload: dict[str, Any], index: int, result: _Result) -> None:
        """Copy and prove one piece of a big file."""
        path, entry, temp = payload["dir"], payload["entry"], payload["temp"]
        start = index * PIECE
        end = min(start + PIECE, entry[2])
        side = "source"
        source = target = -1
        try:
            side = "destination"
            target_dir = self.target.open(path)
            side = "source"
            source = os.open(entry[0], _READ, dir_fd=self.source.open(path).fd)
            info = os.fstat(source)
            if not _as_scanned(info, entry):
                self._again(payload, info, result)
                return
            sparse = info.st_blocks * 512 < info.st_size
            side = "destination"
            target = self._shared_temp(temp, target_dir, entry[2])
            if self.read_back:
                digest: bytes | None = data.copy_range(source, target, start, end, sparse=sparse)
            else:
                data.clone_range(source, target, start, end, sparse=sparse)
                digest = b""
            if self.sync.how != _Sync.NONE:
                os.fdatasync(target)
            if self.read_back:
                if self.sync.drop_cache:
                    os.posix_fadvise(target, start, end - start, os.POSIX_FADV_DONTNEED)
                if data.hash_range(target, start, end, sparse=sparse) != digest:
                    raise StagingError("mismatch")  # noqa: TRY301
            side = "source"
            info = os.fstat(source)
            if not _as_scanned(info, entry):
                self._again(payload, info, result)
                return
            result.bytes += end - start
            result.extra["piece"] = wire.dumps([temp, index, digest.hex() if digest else ""])
            result.extra["digest"] = digest.hex() if digest else ""
        except data.SourceError as error:
            result.fail("source", error.error, _join(path, entry[0]))
        except (OSError, StagingError) as error:
            result.fail(side, error, _join(path, entry[0]))
        finally:
            for fd in (source, target):
                if fd >= 0:
                    os.close(fd)

    @staticmethod
    def _shared_temp(temp: str, directory: Dir, size: int) -> int:
        fd = os.open(
            temp,
            os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC,
            0o600,
            dir_fd=directory.fd,
        )
        info = os.fstat(fd)
        if not stat.S_ISREG(info.st_mode) or info.st_uid != os.geteuid() or info.st_nlink != 1:
            os.close(fd)
            raise StagingError("in-the-way")
        if info.st_size != size:
            os.ftruncate(fd, size)
        return fd

    def _again(self, payload: dict[str, Any], info: os.stat_result, result: _Result) -> None:
        """The source is not what was scanned: say what it is now, for another attempt from the start."""
        entry = payload["entry"]
        if not stat.S_ISREG(info.st_mode):
            result.fail("source", StagingError("changed"), _join(payload["dir"], entry[0]))
            return
        from beeond_ctl.staging.scan import fingerprint

        fresh = [
            entry[0],
            entry[1],
            info.st_size,
            info.st_mtime_ns,
            info.st_ctime_ns,
            info.st_ino,
            info.st_mode,
        ]
        mark = fingerprint(_join(payload["dir"], entry[0]), *fresh[2:6])
        again = {**payload, "entry": fresh, "temp": child.piece_name(self.token, mark), "have": {}}
        result.extra["again"] = [max(1, -(-info.st_size // PIECE)), info.st_size, wire.dumps(again)]

    def place(self, payload: dict[str, Any], digests: list[str], result: _Result) -> None:
        """Give a big file, whose pieces are all proved, its metadata and its name."""
        path, entry, temp = payload["dir"], payload["entry"], payload["temp"]
        name = self.rename.get(entry[0], entry[0])
        source = target = -1
        side = "source"
        try:
            source = os.open(entry[0], _READ, dir_fd=self.source.open(path).fd)
            info = os.fstat(source)
            if not _as_scanned(info, entry):
                self._again(payload, info, result)
                return
            side = "destination"
            directory = self.target.open(path)
            try:
                target = os.open(temp, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=directory.fd)
            except FileNotFoundError:
                there = os.stat(name, dir_fd=directory.fd, follow_symlinks=False)
                if there.st_size != entry[2] or not same_time(entry[3], there.st_mtime_ns):
                    raise
                # a node that was given up meanwhile has done it: nothing but a proved file gets this far
            else:
                if os.fstat(target).st_size != entry[2]:
                    raise StagingError("mismatch")
                for note in copy_metadata(source, target, info, None, inherits_acl=directory.default_acl):
                    result.note(note, _join(path, entry[0]))
                if self.sync.how != _Sync.NONE:
                    os.fsync(target)
                if not same_time(entry[3], os.fstat(target).st_mtime_ns):
                    raise StagingError("mismatch")
                if not directory.made:
                    self._keep_newer(directory.fd, name, info, _join(path, name), result)
                os.rename(temp, name, src_dir_fd=directory.fd, dst_dir_fd=directory.fd)
        except (OSError, StagingError) as error:
            result.fail(side, error, _join(path, entry[0]))
            return
        finally:
            for fd in (source, target):
                if fd >= 0:
                    os.close(fd)
        result.copied = 1
        joined = xxhash.xxh3_128_hexdigest(b"".join(bytes.fromhex(digest) for digest in digests))
        result.proofs = [[path, [[entry[0], *entry[2:6], joined if self.read_back else ""]]]]

    def drop(self, payload: dict[str, Any]) -> None:
        """Remove the temporary name of a big file that was given up."""
        with contextlib.suppress(OSError, StagingError):
            os.unlink(payload["temp"], dir_fd=self.target.open(payload["dir"]).fd)

    # --- after the files ----------------------------------------------------------------------------------

    def link(self, tag: str, dirs: list[str], payload: list[Any], result: _Result) -> None:
        """Give files that are there their further names."""
        number = 0
        for index, entries in payload:
            path = dirs[index]
            for name, (first_path, first_name, size, mtime) in entries:
                number += 1
                temp = f"{child.PREFIX}{self.token}.{tag}.{number}"
                try:
                    first_dir, directory = self.target.open(first_path).fd, self.target.open(path)
                    self._link(first_dir, first_name, directory, name, temp, size, mtime, result)
                except _LinkRefusedError:
                    source = self.source.open(path)
                    info = os.stat(name, dir_fd=source.fd, follow_symlinks=False)
                    kind = SYMLINK if stat.S_ISLNK(info.st_mode) else 0
                    entry = [
                        name,
                        kind,
                        info.st_size,
                        info.st_mtime_ns,
                        info.st_ctime_ns,
                        info.st_ino,
                        info.st_mode,
                    ]
                    payload_of_one = [[0, [entry]]]
                    result.note("links", _join(path, name))
                    self.copy(f"{tag}l{number}", [path], payload_of_one, result)
                except (OSError, StagingError) as error:
                    result.fail("destination", error, _join(path, name))

    @staticmethod
    def _link(
        first_dir: int,
        first: str,
        directory: Dir,
        name: str,
        temp: str,
        size: int,
        mtime: int,
        result: _Result,
    ) -> None:
        try:
            there = os.stat(first, dir_fd=first_dir, follow_symlinks=False)
        except FileNotFoundError:
            raise StagingError("first-link") from None
        if not stat.S_ISLNK(there.st_mode) and (
            there.st_size != size or not same_time(mtime, there.st_mtime_ns)
        ):
            raise StagingError("first-link")
        with contextlib.suppress(FileNotFoundError):
            info = os.stat(name, dir_fd=directory.fd, follow_symlinks=False)
            if (info.st_dev, info.st_ino) == (there.st_dev, there.st_ino):
                result.skipped += 1
                return
        with contextlib.suppress(FileNotFoundError):
            os.unlink(temp, dir_fd=directory.fd)
        try:
            os.link(first, temp, src_dir_fd=first_dir, dst_dir_fd=directory.fd, follow_symlinks=False)
        except OSError as error:
            if error.errno in _NO_LINK:
                raise _LinkRefusedError from None
            raise
        try:
            os.rename(temp, name, src_dir_fd=directory.fd, dst_dir_fd=directory.fd)
        except OSError:
            os.unlink(temp, dir_fd=directory.fd)
            raise
        result.copied += 1

    def delete(self, dirs: list[str], result: _Result) -> None:
        """Remove from the destination what its source directory has no entry for."""
        deleted: list[str] = []
        if self.setup["single"]:
            result.skipped, dirs = len(dirs), []
        for path in dirs:
            try:
                with os.scandir(self.source.open(path).fd) as entries:
                    wanted = {entry.name for entry in entries}
                directory = self.target.open(path).fd
                with os.scandir(directory) as entries:
                    surplus = [entry for entry in entries if entry.name not in wanted]
                for entry in surplus:
                    # What this transfer set aside because it was newer (`_keep_newer`) is somebody's work.
                    if (
                        not entry.name.startswith(f"{child.PREFIX}{self.token}.")
                        and f".newer-{self.token}." not in entry.name
                    ):
                        self._remove(directory, entry.name, entry.is_dir(follow_symlinks=False))
                        deleted.append(_join(path, entry.name))
                result.skipped += 1
            except (OSError, StagingError) as error:
                result.fail("destination", error, path or ".")
        result.extra["deleted"] = [len(deleted), sorted(deleted)[:100]]

    def _remove(self, directory: int, name: str, is_dir: bool) -> None:  # noqa: FBT001
        if not is_dir:
            os.unlink(name, dir_fd=directory)
            return
        import shutil

        try:
            shutil.rmtree(name, dir_fd=directory)
        except PermissionError:
            _unlock_below(directory, name)
            shutil.rmtree(name, dir_fd=directory)

    def clean(self, dirs: list[str], result: _Result) -> None:
        """Remove what runs of this transfer that were killed have left."""
        prefix = f"{child.PREFIX}{self.token}."
        for path in dirs:
            try:
                directory = self.target.open(path).fd if path in ("", ".") or self._there(path) else None
                if directory is None:
                    result.skipped += 1
                    continue
                for name in os.listdir(directory):
                    if name.startswith(prefix):
                        os.unlink(name, dir_fd=directory)
                result.skipped += 1
            except (OSError, StagingError) as error:
                result.fail("destination", error, path)

    def _there(self, path: str) -> bool:
        """Whether the source still has the directory; if not, `clean` must not make it at the destination."""
        return self._opens(self.source, path)

    def finish(self, dirs: list[str], result: _Result) -> None:
        """Give directories the metadata of their sources, children first, and sync them."""
        for path in reversed(dirs):
            side = "source"
            try:
                source = self.source.open(path).fd
                side = "destination"
                target = self.target.open(path)
                if (path or self.setup["root_made"]) and not self.setup["single"]:
                    self._finish_one(source, target, path, result)
                if self.sync.how == _Sync.EACH:
                    with contextlib.suppress(OSError):  # a file system that cannot sync directories (EINVAL)
                        os.fsync(target.fd)
                result.skipped += 1
            except (OSError, StagingError) as error:
                result.fail(side, error, path or ".")
        if self.sync.how == _Sync.WHOLE:
            try:
                self.sync.whole()
            except OSError as error:
                result.extra["uncounted"] = 1
                result.fail("destination", error, ".")

    @staticmethod
    def _finish_one(source: int, target: Dir, path: str, result: _Result) -> None:
        info = os.fstat(source)
        try:
            notes = copy_metadata(source, target.fd, info, None, inherits_acl=target.default_acl)
        except PermissionError:
            if target.made or os.fstat(target.fd).st_uid == os.geteuid():
                raise
            notes = [
                "foreign"
            ]  # another user's directory that we may write to: its metadata is not ours to set
        for note in notes:
            result.note(note, path or ".")

    def trim(self) -> None:
        """Close what is not in use any more."""
        self.source.trim()
        self.target.trim()


class _LinkRefusedError(Exception):
    """The file system makes no (more) hard links to this file."""


def _join(path: str, name: str) -> str:
    return f"{path}/{name}" if path else name


def _compare(info: os.stat_result, there: os.stat_result) -> None:
    """Size and time of what was written with what was read. Raises StagingError."""
    if there.st_size != info.st_size or not same_time(info.st_mtime_ns, there.st_mtime_ns):
        raise StagingError("mismatch")


def _same(one: os.stat_result, other: os.stat_result) -> bool:
    return (
        one.st_mtime_ns == other.st_mtime_ns
        and one.st_size == other.st_size
        and one.st_ctime_ns == other.st_ctime_ns
    )


def _as_scanned(info: os.stat_result, entry: list[Any]) -> bool:
    return (
        stat.S_ISREG(info.st_mode)
        and [info.st_size, info.st_mtime_ns, info.st_ctime_ns, info.st_ino] == entry[2:6]
    )


def _unlock_below(directory: int, name: str) -> None:
    """Give the owner access to every directory in the tree `name`."""
    os.chmod(name, 0o700, dir_fd=directory)
    for _, _, _, fd in os.fwalk(name, dir_fd=directory):
        with os.scandir(fd) as entries:
            below = [entry.name for entry in entries if entry.is_dir(follow_symlinks=False)]
        for each in below:
            os.chmod(each, 0o700, dir_fd=fd)


def _answer(copier: Copier, fields: list[str]) -> str:
    result = _Result()
    kind, tag = fields[0], fields[1]
    if kind == "copy":
        copier.copy(tag, wire.loads(fields[2]), wire.loads(fields[3]), result)
    elif kind == "piece":
        copier.piece(wire.loads(fields[2]), int(fields[3]), result)
    elif kind == "place":
        copier.place(wire.loads(fields[2]), wire.loads(fields[3]), result)
    elif kind == "drop":
        copier.drop(wire.loads(fields[2]))
    elif kind == "link":
        copier.link(tag, wire.loads(fields[2]), wire.loads(fields[3]), result)
    elif kind == "delete":
        copier.delete(wire.loads(fields[2]), result)
    elif kind == "clean":
        copier.clean(wire.loads(fields[2]), result)
    elif kind == "finish":
        copier.finish(wire.loads(fields[2]), result)
    else:
        raise wire.ProtocolError(f"unknown work {kind!r}")
    copier.trim()
    return result.line(tag)


def _serve(lines: Iterable[list[str]]) -> None:
    copier: Copier | None = None
    unusable = "no transfer was set up"
    for fields in lines:
        if fields[0] == "setup":
            if copier:
                copier.source.close()
                copier.target.close()
            try:
                copier = Copier(wire.loads(fields[1]))
            except (OSError, StagingError) as error:
                copier, unusable = None, text_of(error)
            continue
        answer = _answer(copier, fields) if copier else wire.dumps({"tag": fields[1], "unusable": unusable})
        wire.send(sys.stdout.buffer, answer)


if __name__ == "__main__":
    child.run(lambda: _serve(wire.lines(sys.stdin.buffer)))
