"""The scanner: walks the source as the user and says what there is to do. A program of its own.

Reads one line of JSON (`_Config`) from standard input and writes lines of fields (see `wire`) to standard
output:

    making                                the root of the destination is to be made; waits for a line `go`
    ready   SETUP                         what every copier needs to know
    missing TEXT                          there is no source; nothing follows
    refused TEXT                          the transfer makes no sense; nothing follows
    batch   ENTRIES BYTES DIRS PAYLOAD    entries to copy, or to skip if the destination still has them
    big     RANGES  BYTES DIRS PAYLOAD    one file to copy in pieces
    links   ENTRIES 0     DIRS PAYLOAD    names of files that have another name in an earlier batch
    dirs    ENTRIES 0     DIRS -          directories to finish, in any order
    locked  ENTRIES 0     DIRS -          directories that let nobody pass when finished: children after
    parents special 1 0 JSON                      neither file, directory nor link: named, not copied
    failed  CAUSE SIDE JSON               an entry that cannot be read
    end

PAYLOAD of a batch: `[[INDEX_IN_DIRS, [ENTRY...]]...]`, ENTRY: `[NAME, KIND, SIZE, MTIME, CTIME, INODE,
MODE]`.
"""

from __future__ import annotations

import os
import stat
import sys
import threading
import time
from array import array
from bisect import bisect_left

from beeond_ctl.staging import child, wire
from beeond_ctl.staging.causes import StagingError, cause_of, text_of
from beeond_ctl.staging.tree import Tree

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterator
    from concurrent.futures import ThreadPoolExecutor
    from typing import Any

FILE, PROVED, SYMLINK = range(3)
"""Kinds of entries: copy; skip if the destination has it as it was proved; symbolic link."""

PIECE = 64 << 20
"""Bytes of a big file that one copier does at a time."""

_STATS = 1024
"""Entries of a directory whose status is asked for, and held, at a time."""

_KEEP = 32
"""Directories that a thread keeps open."""

_SLOW_S, _ENOUGH, _THREADS = 0.0003, 64, 32
"""When calls wait longer than this on average of so many, others are worth having in flight; and how many."""

_BATCH_ENTRIES, _BATCH_BYTES, _BATCH_DIRS = 256, 8 << 20, 128


class _Batch:
    """Entries on their way out, grouped by directory."""

    def __init__(self) -> None:
        self.dirs: list[str] = []
        self.groups: list[list[Any]] = []
        self.count = self.bytes = 0

    def group(self, path: str) -> list[Any]:
        if not self.dirs or self.dirs[-1] != path:
            self.groups.append([len(self.dirs), []])
            self.dirs.append(path)
        entries: list[Any] = self.groups[-1][1]
        return entries

    def full(self) -> bool:
        return self.count >= _BATCH_ENTRIES or self.bytes >= _BATCH_BYTES or len(self.dirs) >= _BATCH_DIRS

    def send(self, kind: str) -> None:
        if self.dirs:
            _say(kind, str(self.count), str(self.bytes), wire.dumps(self.dirs), wire.dumps(self.groups))
        self.__init__()  # type: ignore[misc]


class _Paths:
    """Directories on their way out."""

    def __init__(self, kind: str) -> None:
        self.kind = kind
        self.paths: list[str] = []

    def add(self, path: str) -> None:
        self.paths.append(path)
        if len(self.paths) >= _BATCH_DIRS:
            self.send()

    def send(self) -> None:
        if self.paths:
            _say(self.kind, str(len(self.paths)), "0", wire.dumps(self.paths), "-")
        self.paths = []


def _say(*fields: str) -> None:
    wire.send(sys.stdout.buffer, *fields)


def fingerprint(path: str, size: int, mtime_ns: int, ctime_ns: int, inode: int) -> int:
    """64 bits that stand for one state of one file; the destination is looked at as well before they
    count."""
    import xxhash

    text = f"{size} {mtime_ns} {ctime_ns} {inode} {path}"
    return xxhash.xxh3_64_intdigest(text.encode(errors="surrogateescape"))


class Proofs:
    """What earlier runs have proved: 8 bytes a file, so that ten million fit anywhere."""

    def __init__(self, known: list[int], pieces: dict[str, dict[int, str]]) -> None:
        """Fingerprints of proved files, and of big files' pieces the checksums, by temporary name."""
        self._known = array("Q", sorted(known))
        self.pieces = pieces

    def has(self, mark: int) -> bool:
        """Whether the file with this fingerprint is proved."""
        at = bisect_left(self._known, mark)
        return at < len(self._known) and self._known[at] == mark


def read_proofs(records: Iterator[tuple[str, str]]) -> Proofs:
    """The proofs in a journal's records (see `copier` for what they hold). A malformed one is no proof."""
    known: list[int] = []
    pieces: dict[str, dict[int, str]] = {}
    for kind, text in records:
        try:
            if kind == "proof":
                for directory, entries in wire.loads(text):
                    for name, size, mtime, ctime, inode, _ in entries:
                        path = f"{directory}/{name}" if directory else name
                        known.append(fingerprint(path, size, mtime, ctime, inode))
            elif kind == "piece":
                temp, index, digest = wire.loads(text)
                pieces.setdefault(str(temp), {})[int(index)] = str(digest)
        except (wire.ProtocolError, ValueError, TypeError):
            continue
    return Proofs(known, pieces)


class _Scan:
    """One walk."""

    def __init__(self, config: dict[str, Any], proofs: Proofs | None) -> None:
        self.token: str = config["token"]
        self.run: int = config["run"]
        self.proofs = proofs
        self.first_links: dict[tuple[int, int], list[Any]] = {}
        self.batch, self.links = _Batch(), _Batch()
        self.dirs, self.locked = _Paths("dirs"), _Paths("locked")
        self.source, self.destination = str(config["source"]), str(config["destination"])
        self.lock = threading.Condition()
        self.pending: list[str] = []
        self.busy = self.asked = 0
        self.waited_s = 0.0
        self.threads: list[threading.Thread] = []
        self.pool: ThreadPoolExecutor | None = None
        self.error: BaseException | None = None

    def walk(self, tree: Tree) -> None:
        """Everything below the root of `tree`, by one thread, or by many once calls turn out to wait."""
        self.pending, self.busy = [""], 0
        self._walk_some(tree)
        for thread in self.threads:
            thread.join()
        if self.error is not None:
            raise self.error
        self.finish()

    def _walk_some(self, tree: Tree) -> None:
        """Take directories until none is left or to come."""
        while True:
            with self.lock:
                self.lock.wait_for(lambda: bool(self.pending) or not self.busy or self.error is not None)
                if not self.pending or self.error is not None:
                    return
                path = self.pending.pop()
                self.busy += 1
            try:
                self._visit(tree, path)
            except BaseException as error:  # noqa: BLE001 (raised again by `walk`)
                self.error = error
            with self.lock:
                self.busy -= 1
                self.lock.notify_all()

    def _visit(self, tree: Tree, path: str) -> None:
        try:
            directory = tree.open(path)
            mode = os.fstat(directory.fd).st_mode
            with os.scandir(directory.fd) as entries:
                listed = sorted(entries, key=_name)
        except (OSError, StagingError) as error:
            with self.lock:
                _fail(error, "source", path or ".")
            return
        prefix = f"{path}/" if path else ""
        below = [prefix + entry.name for entry in listed if entry.is_dir(follow_symlinks=False)]
        if below:
            listed = [entry for entry in listed if not entry.is_dir(follow_symlinks=False)]
        with self.lock:
            self.batch.group(path)
            (self.dirs if mode & 0o700 == 0o700 else self.locked).add(path)
            self.pending += reversed(below)
        start = 0
        while start < len(listed):
            part = listed[start : start + (_ENOUGH if self.pool is None else _STATS)]
            start += len(part)
            infos = self._stats(part)
            with self.lock:
                for entry, info in zip(part, infos, strict=True):
                    if isinstance(info, os.stat_result):
                        self.entry(path, prefix, entry.name, info)
                    elif not isinstance(info, FileNotFoundError):  # else it went: as if we had come later
                        _fail(info, "source", prefix + entry.name)
        with self.lock:
            if self.batch.full():
                self.batch.send("batch")
        tree.trim(_KEEP)

    def _stats(self, entries: list[os.DirEntry[str]]) -> list[os.stat_result | OSError]:
        """The status of each, or why there is none."""
        if self.pool is not None and len(entries) > 1:
            return list(self.pool.map(_stat, entries))
        begun, used = time.monotonic(), time.process_time()
        infos = [_stat(entry) for entry in entries]
        if self.pool is None:
            self.waited_s += time.monotonic() - begun - (time.process_time() - used)
            self.asked += len(entries)
            if self.asked >= _ENOUGH:
                if self.waited_s / self.asked > _SLOW_S:
                    self._widen()
                self.waited_s, self.asked = 0.0, 0
        return infos

    def _widen(self) -> None:
        """Calls wait: have many in flight."""
        from concurrent.futures import ThreadPoolExecutor

        self.pool = ThreadPoolExecutor(_THREADS)
        self.threads = [
            threading.Thread(target=lambda: self._walk_some(Tree(self.source, make=False)), daemon=True)
            for _ in range(_THREADS)
        ]
        for thread in self.threads:
            thread.start()

    def finish(self) -> None:
        """Send what is left."""
        self.batch.send("batch")
        self.links.send("links")
        self.dirs.send()
        self.locked.send()

    def entry(self, path: str, prefix: str, name: str, info: os.stat_result) -> None:
        """Take in one entry that is no directory."""
        mode, size = info.st_mode, info.st_size
        regular = stat.S_ISREG(mode)
        if not regular and not stat.S_ISLNK(mode):
            _say("special", "1", "0", wire.dumps(prefix + name))
            return
        if info.st_nlink > 1:
            first = self.first_links.setdefault(
                (info.st_dev, info.st_ino), [path, name, size, info.st_mtime_ns]
            )
            if first[1] is not name:
                self.links.group(path).append([name, first])
                self.links.count += 1
                if self.links.full():
                    self.links.send("links")
                return
        kind = FILE if regular else SYMLINK
        if kind == FILE and self.proofs is not None:
            mark = fingerprint(prefix + name, size, info.st_mtime_ns, info.st_ctime_ns, info.st_ino)
            if self.proofs.has(mark):
                kind = PROVED
        entry = [name, kind, size, info.st_mtime_ns, info.st_ctime_ns, info.st_ino, mode]
        if kind == FILE and size > 2 * PIECE:
            self.big(path, prefix, entry)
            return
        batch = self.batch
        batch.group(path).append(entry)
        batch.count += 1
        if kind == FILE:
            batch.bytes += size
        if batch.count >= _BATCH_ENTRIES or batch.bytes >= _BATCH_BYTES:
            batch.send("batch")

    def big(self, path: str, prefix: str, entry: list[Any]) -> None:
        """Hand out a big file piece by piece, but for the pieces that an earlier run proved."""
        name, _, size, mtime, ctime, inode, _ = entry
        temp = child.piece_name(self.token, fingerprint(prefix + name, size, mtime, ctime, inode))
        have = self.proofs.pieces.get(temp, {}) if self.proofs else {}
        if have and not self._has_piece(path, temp, size):
            have = {}
        count = -(-size // PIECE)
        payload = {
            "dir": path,
            "entry": entry,
            "temp": temp,
            "have": {str(k): v for k, v in have.items() if k < count},
        }
        _say("big", str(count), str(size), wire.dumps([path]), wire.dumps(payload))

    def _has_piece(self, path: str, temp: str, size: int) -> bool:
        try:
            info = os.lstat(os.path.join(self.destination, path, temp))
        except OSError:
            return False
        return stat.S_ISREG(info.st_mode) and info.st_size == size


def _within(source: str, destination: str) -> bool:
    """Whether `destination`, which may not be there yet, is `source` or lies below it."""
    root, path = os.stat(source), os.path.realpath(destination)
    while True:
        try:
            info = os.stat(path)
            if (info.st_dev, info.st_ino) == (root.st_dev, root.st_ino):
                return True
        except OSError:
            pass
        if path == "/":
            return False
        path = os.path.dirname(path)


def _make(destination: str) -> bool:
    """Make `destination`; whether it was missing. That is on record before, as its mode is then ours to set."""
    if os.path.isdir(destination):
        return False
    _say("making")
    sys.stdin.buffer.readline(wire.MAX_LINE)
    child.make_parents(destination)
    return True


def _stat(entry: os.DirEntry[str]) -> os.stat_result | OSError:
    try:
        return entry.stat(follow_symlinks=False)
    except OSError as error:
        return error


def _name(entry: os.DirEntry[str]) -> str:
    return entry.name


def _fail(error: OSError | StagingError, side: str, path: str) -> None:
    _say("failed", cause_of(error), side, wire.dumps([path, text_of(error)]))


def _main() -> None:
    config = wire.loads(sys.stdin.buffer.readline(wire.MAX_LINE))
    source, destination, flags = config["source"], config["destination"], config["flags"]
    proofs = None
    if config["journal"]:
        from beeond_ctl.staging.journal import records

        fd, length = config["journal"]
        proofs = read_proofs(records(fd, length))
        os.close(fd)
    try:
        info = os.stat(source)
    except (FileNotFoundError, NotADirectoryError):
        _say("missing", wire.dumps("no such file or directory"))
        return
    except OSError as error:
        _say("refused", wire.dumps(["source", cause_of(error), f"{text_of(error)}"]))
        return
    single: list[str] | None = None
    scan = _Scan(config, proofs)
    try:
        side = "destination"
        if stat.S_ISREG(info.st_mode):
            into = destination.endswith("/") or os.path.isdir(destination)
            name = os.path.basename(source.rstrip("/")) if into else os.path.basename(destination)
            made = _make(destination if into else os.path.dirname(destination))
            side = "source"
            real = os.path.realpath(source)
            source, destination = os.path.dirname(real), destination if into else os.path.dirname(destination)
            single = [os.path.basename(real), name]
        elif stat.S_ISDIR(info.st_mode):
            if _within(source, destination):
                _say("refused", wire.dumps(["destination", "other", "lies within the source"]))
                return
            made = _make(destination)
        else:
            _say("refused", wire.dumps(["source", "other", "neither a file nor a directory"]))
            return
        side = "source"
        tree = Tree(source, make=False)
        side = "destination"
        target = os.stat(destination)
    except OSError as error:
        _say("refused", wire.dumps([side, cause_of(error), text_of(error)]))
        return
    root = os.fstat(tree.root.fd)
    setup = {
        "source": source,
        "destination": destination,
        "inodes": [root.st_ino, target.st_ino],
        "single": single,
        "flags": flags,
        "token": config["token"],
        "run": config["run"],
        "durable": config["durable"],
        "root_made": made or config["root_made"],
    }
    _say("ready", wire.dumps(setup))
    scan.source, scan.destination = source, destination
    if single is None:
        scan.walk(tree)
    else:
        try:
            info = os.stat(single[0], dir_fd=tree.root.fd, follow_symlinks=False)
            if not stat.S_ISREG(info.st_mode):
                raise StagingError("changed")  # noqa: TRY301
            scan.entry("", "", single[0], info)
        except (OSError, StagingError) as error:
            _fail(error, "source", single[0])
        scan.dirs.add("")  # to be synced
        scan.finish()
    _say("end")


if __name__ == "__main__":
    child.run(_main)
